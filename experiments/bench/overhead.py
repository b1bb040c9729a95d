"""What the mesh machinery costs: one device against plain jit, eight against one."""

from collections.abc import Callable

import jax
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.train.program import build_program

from .. import plain
from .flags import BenchFlags
from .rows import Measured, Row
from .timing import Timed, full_batch, timed, timed_step, with_parallel

EIGHT_WAY = [
    ("dp=8", {}),
    ("dp=8", {"zero": 1}),
    ("dp=8", {"zero": 2}),
    ("dp=8", {"zero": 3}),
    ("replica=2,dp=4", {"zero": 3}),
    ("dp=4,tp=2", {}),
    ("dp=2,tp=4", {"sp": True, "zero": 1}),
    ("tp=8", {}),
    ("tp=8", {"sp": True}),
    ("pp=8", {"microbatches": 8}),
    ("pp=2,dp=2,tp=2", {"microbatches": 4}),
]


def bench_overhead(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Each mesh in turn with the one-device step, pair by pair, so that a drifting machine cancels out."""
    devices = acquire_devices(8, flags.device)
    one, rows = timed_step(with_parallel(config, "", {}), devices).run, []

    def compare(name: str, against: str, ours: Callable, theirs: Callable, target: float) -> None:
        """Add one row: the median of the paired ratios."""
        with console.status(name):
            times = [(ours(), theirs()) for _ in range(flags.repeats)]
        more = {"simulated": "(simulated)" in name, "target": target}
        rows.append(Row.beside(name, *zip(*times, strict=True), against, **more))

    if flags.only in "one device, shard_map":
        compare("one device, shard_map", "plain jit", one, timed_plain(config, devices).run, 1.02)
    for mesh, more in EIGHT_WAY:
        name = " ".join([mesh, *(f"{key}={value}" for key, value in more.items()), "(simulated)"])
        if flags.only in name:
            ours = timed_step(with_parallel(config, mesh, more), devices).run
            compare(name, "one device", ours, one, 1.15 if (mesh, more) == ("dp=8", {}) else 2.0)
    return rows, devices


def timed_plain(config: RunConfig, devices: Devices) -> Timed:
    """The step of `experiments.plain` on one device."""
    program = build_program(config, make_mesh(MeshShape(), devices.devices))
    init, step, _ = plain.make_step(config, jax.tree.map(lambda leaf: leaf.param.decay, program.layout.leaves))
    batch = jax.device_put(full_batch(config), devices.devices[0])
    state = init(program.init(config.seed).params)
    return timed(step.lower(state, batch).compile(), state, batch, MeshShape())
