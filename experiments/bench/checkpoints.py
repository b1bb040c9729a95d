"""What saving adds to steps, how long a restore takes, host memory of a save."""

import statistics
import tempfile
import time

import jax
from rich.console import Console

from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.checkpoint.logical import abstract_logical, from_logical, to_logical
from jaxdist.config import RunConfig
from jaxdist.mesh import make_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

from .flags import BenchFlags
from .rows import Measured, Row, ratios
from .timing import Growth, full_batch, with_parallel


def bench_checkpoint(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """What saving adds to the steps of a run, and what a save and a restore of GPT-2 124M take."""
    devices = acquire_devices(2, flags.device)
    share = save_share(flags, config, devices, console)
    models = {f"{config.model.num_layers} x {config.model.width}": config.model, "gpt2-124m": PRESETS["gpt2-124m"]}
    rows = [row for name, model in models.items() for row in save_once(flags, name, model)]
    console.print(
        "One device, fp32, AdamW. Blocks: until training goes on. Commit: hashed, flushed, renamed. Check: every file "
        "hashed. Restore: read and put into the layout, with compiling. Grown: the most that the process grew by."
    )
    return [share, *rows], devices


def save_share(flags: BenchFlags, config: RunConfig, devices: Devices, console: Console) -> Row:
    """The same steps with and without a save among them, one after the other: the ratio of their times."""
    config = with_parallel(config, "dp=2", {"zero": 1})
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    step, batch, state = program.compile_step(), program.put(full_batch(config)), program.init(0)
    state, _ = step(state, batch)
    times: dict[bool, list[float]] = {False: [], True: []}
    waits = []
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, keep_last=1)
        for repeat in range(flags.repeats):
            for saving in (False, True):
                with console.status(f"{flags.save_every} steps, {repeat + 1} of {flags.repeats}"):
                    start = time.perf_counter()
                    for index in range(flags.save_every):
                        if saving and index == 0:
                            checkpoints.save(int(state.step), to_logical(program, state), {})
                            waits.append(time.perf_counter() - start)
                        state, metrics = step(state, batch)
                        jax.block_until_ready(metrics)
                    times[saving].append(time.perf_counter() - start)
            checkpoints.wait()
    pairs = ratios(times[True], times[False])
    share = statistics.median(pairs) - 1
    simulated = ", simulated" if devices.simulated else ""
    console.print(
        f"a save every {flags.save_every} steps of {statistics.median(times[False]) / flags.save_every:.2f} s (dp=2"
        f"{simulated}) adds {share:.1%} to them (median of {flags.repeats} pairs, {pairs[0] - 1:.1%} to "
        f"{pairs[-1] - 1:.1%}), the writing and hashing beside them counted; the first save kept the steps waiting for "
        f"{waits[0]:.2f} s, the last for {waits[-1]:.2f} s"
    )
    name, plain = (f"{flags.save_every} steps{more}" for more in (", one save", ""))
    more = {"simulated": devices.simulated, "target": 1.05}
    return Row.of(name, times[True], "s", against=plain, ratio=share + 1, **more)


def save_once(flags: BenchFlags, name: str, model: GPT2Config) -> list[Row]:
    config = RunConfig(model, ParallelConfig(), batch_size=1)
    program = build_program(config, make_mesh(config.parallel.mesh, acquire_devices(1, flags.device).devices))
    state = program.init(0)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder, Growth() as growth:
        checkpoints = Checkpoints(folder)
        start = time.perf_counter()
        checkpoints.save(0, to_logical(program, state), {})
        blocked = time.perf_counter()
        checkpoints.wait()
        committed = time.perf_counter()
        grown = growth.most()
        manifest = checkpoints.check(0)
        checked = time.perf_counter()
        again = from_logical(program, checkpoints.restore(manifest, abstract_logical(program)))
        jax.block_until_ready(again)
        restored = time.perf_counter()
    rows = [
        Row(f"{name}: state", local_bytes(state), "bytes"),
        Row(f"{name}: disk", sum(size for size, _ in manifest.files.values()), "bytes"),
        Row(f"{name}: blocks", blocked - start, "s"),
        Row(f"{name}: commit", committed - start, "s"),
        Row(f"{name}: check", checked - committed, "s"),
        Row(f"{name}: restore", restored - checked, "s"),
    ]
    return rows if grown is None else [*rows, Row(f"{name}: grown", grown, "bytes")]
