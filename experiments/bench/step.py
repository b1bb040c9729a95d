"""One step: its time, phase by phase, the memory it takes and the memory it was predicted to take."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.layout import replace_entry
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline.builders import NAMES
from jaxdist.parallel.reduce import reduce_gradients
from jaxdist.plan.proof.trace_memory import step_memory
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.specs import storage_spec, storage_specs
from jaxdist.train.gradients import pipelined, plain
from jaxdist.train.gradients.base import dropout_key
from jaxdist.train.program import Program, batch_specs, build_program, compiled_bytes

from .flags import BenchFlags
from .rows import Measured, Row
from .speed import CONVENTIONS, NARROW, card_of, plan_step, speed_rows
from .timing import AT_ONCE, full_batch, planned_memory, repeated

PHASES = ("forward", "backward", "reduction", "update")


def bench_step(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Programs that end after each phase, run in turn; a phase is what the next one takes longer."""
    devices = acquire_devices(config.parallel.mesh.num_devices, flags.device)

    # ---- the whole step first: what memory it takes at most is not seen behind other programs
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    start = time.perf_counter()
    step = program.compile_step()
    compile_seconds = time.perf_counter() - start
    batch = program.put(full_batch(config))
    held = {"state": program.init(config.seed)}
    jax.block_until_ready(held)
    before = peak_in_use(devices)

    def whole():
        held["state"], metrics = step(held["state"], batch)
        return held["state"], metrics

    on_cpu = devices.platform == "cpu"
    count = 1 if on_cpu else AT_ONCE
    runs = {"step": repeated(whole, not on_cpu)}
    runs["step"](1)
    memory = memory_rows(program, step, devices, before, peak_in_use(devices))

    # ---- time
    if flags.phases:
        runs = {name: repeated(run, not on_cpu) for name, run in phase_programs(program, devices, held, batch).items()}
        runs |= {"update": repeated(whole, not on_cpu)}
        for run in runs.values():
            run(1)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(flags.repeats):
        end = 0.0
        for name, run in runs.items():
            start, end = end, run(count)
            seconds[name].append(end - start if flags.phases else end)
    whole_seconds = [sum(parts) for parts in zip(*seconds.values(), strict=True)]

    # ---- rows
    phases = {**(seconds if flags.phases else {}), "step": whole_seconds}
    total = statistics.median(whole_seconds)
    rows = [
        Row.of(name, s, "s", against="step", ratio=statistics.median(s) / total, simulated=devices.simulated)
        for name, s in phases.items()
    ]
    if flags.phases:
        console.print(
            "Each phase is a difference of two programs' times; the update holds clipping, ZeRO-1's and 2's gathers, "
            "and what the compiler could not fuse across phases. Sums inside backward (ZeRO-2 and 3, tp, pp) count as "
            "backward."
        )
    card = card_of(devices.devices[0].device_kind)
    if card is not None and config.precision.dtype in NARROW:
        planned = float(plan_step(config, card, program.model.ctx.attention).total[0])
        rows.append(Row("step: time by the plan", planned, "s", against="step", ratio=planned / total))
    speeds = speed_rows("step", whole_seconds, config, devices, len(devices.devices))
    if len(speeds) > 1:
        console.print(CONVENTIONS)
    attention = program.model.ctx.attention
    console.print(f"compiled in {compile_seconds:.1f} s; attention {attention}; dtype {config.precision.dtype}")
    return [*rows, *speeds, *memory, Row("compile", compile_seconds, "s")], devices


def memory_rows(program: Program, step, devices: Devices, before: int | None, after: int | None) -> list[Row]:
    """A device's peak: by the compiler's plan, from the trace, by the planner's formula, and as measured.

    Measured is the process's high-water mark, so it is the step's own only where the step raised it.
    """
    config, on_cpu = program.config, devices.platform == "cpu"
    planned = compiled_bytes(step)
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    found = {
        "compiler's plan": planned and planned.peak,
        "predicted from the trace": step_memory(program, traced, "cpu" if on_cpu else "gpu").peak,
    }
    schedule = config.parallel.pipeline
    if schedule is None or schedule.name in NAMES:
        found["predicted by formula"] = float(planned_memory(config, program.model.ctx.attention).total[0])
    if after is not None:
        raised = "measured" if after > before else "measured, but not raised by the step"
        found |= {"measured before the step": before, raised: after}
    against = next(iter(found))
    return [
        Row(f"{name}: peak of a device", value, "bytes", against=against, ratio=planned and value / planned.peak)
        for name, value in found.items()
        if value is not None
    ]


def peak_in_use(devices: Devices) -> int | None:
    """The high-water mark of a device's memory, bytes; None where the backend does not count (the CPU)."""
    return (devices.devices[0].memory_stats() or {}).get("peak_bytes_in_use")


def phase_programs(program: Program, devices: Devices, held: dict, batch) -> dict[str, Callable]:
    """Programs that end after forward, backward and reduction."""
    gradients = {reduced: gradient_program(program, reduced) for reduced in (False, True)}
    return {
        "forward": lambda: program.evaluate(held["state"].params, batch),
        "backward": lambda: gradients[False](held["state"], batch),
        "reduction": lambda: gradients[True](held["state"], batch),
    }


def gradient_program(program: Program, reduced: bool) -> Callable:
    """(state, batch) -> gradients, summed, or each rank's own with a leading dim for the axes they owe a sum over."""
    layout, config = program.layout, program.config
    scattered = layout.grads_sharded

    def local(leaf) -> P:
        if scattered:
            return P(leaf.shard_reduce_axes, *storage_spec(leaf))
        used = replace_entry(leaf.spec, leaf.spread_dim, None) if leaf.consumer_stages else leaf.spec
        return P((*(("pp",) if leaf.consumer_stages else ()), *leaf.reduce_axes), *used)

    def gradients(state, batch):
        engine = pipelined if config.parallel.mesh.pp > 1 else plain
        key, weight = dropout_key(config, state.step), jnp.ones((), config.precision.master_dtype)
        found, _ = engine.local_gradients(program.model, state.params, batch, key, weight)
        if reduced:
            return reduce_gradients(found, layout, config.precision.reduction_dtype)
        return jax.tree.map(lambda g: g[None], found)

    specs = storage_specs(layout) if reduced else jax.tree.map(local, layout.leaves)
    in_specs = (program.specs, batch_specs(program.config, layout))
    on_mesh = partial(jax.shard_map, mesh=program.mesh, check_vma=True)
    return jax.jit(on_mesh(gradients, in_specs=in_specs, out_specs=specs))
