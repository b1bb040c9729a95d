"""One step, phase by phase: forward, backward, reduction, update."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.table import Table

from experiments.bench.flags import BenchFlags
from experiments.bench.rows import Measured, Row
from experiments.bench.timing import full_batch
from jaxdist.config import RunConfig
from jaxdist.mesh import make_mesh
from jaxdist.parallel.data import reduce_gradients
from jaxdist.runtime import Devices, acquire_devices
from jaxdist.step import Program, accumulate_gradients, build_program

PHASES = ("forward", "backward", "reduction", "update")


def bench_step(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Programs that end after each phase, run in turn; a phase is what the next one takes longer."""
    devices = acquire_devices(config.parallel.mesh.num_devices, flags.device)
    console.print(f"devices: {devices.description}")
    runs = cumulative(config, devices)
    seconds: dict[str, list[float]] = {phase: [] for phase in PHASES}
    for _ in range(flags.repeats):
        ends = [run() for run in runs]
        for phase, start, end in zip(PHASES, [0.0, *ends], ends, strict=False):
            seconds[phase].append(end - start)
    whole = [sum(parts) for parts in zip(*seconds.values(), strict=True)]
    total = statistics.median(whole)
    marked = "ms (simulated)" if devices.simulated else "ms"
    table = Table("phase", marked, "share of the step", "spread", box=None, header_style="bold", pad_edge=False)
    rows = []
    for name, values in (*seconds.items(), ("step", whole)):
        share = statistics.median(values) / total
        spread = f"{min(values) * 1e3:.1f}-{max(values) * 1e3:.1f}"
        table.add_row(name, f"{statistics.median(values) * 1e3:.1f}", f"{share:.1%}", spread)
        rows.append(Row.of(name, values, "s", against="step", ratio=share, simulated=devices.simulated))
    console.print(table)
    console.print(
        "Each phase is a difference of two programs' times; the update holds clipping, ZeRO-1's and 2's gathers, and "
        "what the compiler could not fuse across phases. Sums inside backward (ZeRO-2 and 3, tp, pp) count as backward."
    )
    return rows, devices, True


def cumulative(config: RunConfig, devices: Devices) -> list[Callable[[], float]]:
    """Programs that end after forward, backward, reduction and update: each run gives its seconds."""
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    batch = program.put(full_batch(config))
    held = {"state": program.init(config.seed)}
    step = program.compile_step()

    def whole():
        held["state"], metrics = step(held["state"], batch)
        return held["state"], metrics

    gradients = {reduced: gradient_program(program, devices.platform, reduced) for reduced in (False, True)}
    runs = [
        lambda: program.evaluate(held["state"].params, batch),
        lambda: gradients[False](held["state"], batch),
        lambda: gradients[True](held["state"], batch),
        whole,
    ]

    def timed(run: Callable) -> Callable[[], float]:
        jax.block_until_ready(run())

        def seconds() -> float:
            start = time.perf_counter()
            jax.block_until_ready(run())
            return time.perf_counter() - start

        return seconds

    return [timed(run) for run in runs]


def gradient_program(program: Program, platform: str, reduced: bool) -> Callable:
    """(state, batch) -> gradients, summed, or each rank's own with a leading dim for the axes they owe a sum over."""
    layout, config = program.layout, program.config
    scattered = layout.grads_scattered

    def local(leaf) -> P:
        owed = leaf.shard_reduce_axes if scattered else leaf.reduce_axes
        return P(owed, *(leaf.storage_spec if scattered else leaf.compute_spec))

    def gradients(state, batch):
        found, _ = accumulate_gradients(
            config, layout, platform, state, batch, weight=jnp.ones((), config.precision.master_dtype)
        )
        if reduced:
            return reduce_gradients(found, layout, config.precision.reduction_dtype)
        return jax.tree.map(lambda g: g[None], found)

    specs = layout.storage_specs() if reduced else jax.tree.map(local, layout.leaves)
    in_specs = (program.specs, layout.batch_spec())
    on_mesh = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(on_mesh(gradients, in_specs=in_specs, out_specs=specs))
