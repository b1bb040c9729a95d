"""State, peak and sent bytes of each strategy beside the plan's, time, and equality with one device."""

import dataclasses

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh
from jaxdist.parity import PROOF_EPS, PROOF_LR
from jaxdist.placement import make_layout
from jaxdist.plan.proof.levels import compiler_of
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.proof.trace_memory import step_memory
from jaxdist.plan.traffic import predicted
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program

from ..entry import chosen
from ..verify import Verifier
from .flags import BenchFlags
from .rows import Measured, Row
from .timing import planned_memory, timed_step, with_parallel

STRATEGY_ROWS: list[tuple[str, str, dict]] = [
    ("DP flat", "dp=4", {"grad_sync": "flat"}),
    ("DP flat + ZeRO-1", "dp=4", {"grad_sync": "flat", "zero": 1}),
    ("DP flat + ZeRO-2", "dp=4", {"grad_sync": "flat", "zero": 2}),
    ("DP flat + ZeRO-3", "dp=4", {"grad_sync": "flat", "zero": 3}),
    ("DP bucketed", "dp=4", {}),
    ("DP bucketed + ZeRO-1", "dp=4", {"zero": 1}),
    ("DP bucketed + ZeRO-2", "dp=4", {"zero": 2}),
    ("DP bucketed + ZeRO-3", "dp=4", {"zero": 3}),
    ("TP", "tp=4", {}),
    ("TP + SP", "tp=4", {"sp": True}),
    ("DP x TP + SP + ZeRO-1", "dp=2,tp=2", {"sp": True, "zero": 1}),
    ("hybrid (replica x ZeRO-3)", "replica=2,dp=2", {"zero": 3}),
    ("PP 1F1B", "pp=4", {"microbatches": 4, "accumulate": 1}),
    ("PP ZB-H1", "pp=4", {"microbatches": 4, "accumulate": 1, "schedule": "zb-h1"}),
    ("PP x DP + ZeRO-1", "pp=2,dp=2", {"microbatches": 4, "accumulate": 1, "zero": 1}),
    ("PP x TP + SP", "pp=2,tp=2", {"microbatches": 4, "accumulate": 1, "sp": True}),
]


def bench_strategies(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """One row a strategy on four devices."""
    names = chosen(flags.only, [name for name, *_ in STRATEGY_ROWS])
    configs = [
        (name, with_parallel(config, mesh, {"accumulate": 2, **more}))
        for name, mesh, more in STRATEGY_ROWS
        if name in names
    ]
    devices = acquire_devices(4, flags.device)
    proof = dataclasses.replace(config.optimizer, lr=PROOF_LR, eps=PROOF_EPS, warmup_steps=0)
    verify = Verifier(devices, steps=2)
    rows = []
    for name, each in configs:
        with console.status(name):
            verdict = verify(name, dataclasses.replace(each, optimizer=proof, steps=2))
            step = timed_step(each, devices)
            seconds = [step.run() for _ in range(flags.repeats)]
        error = max(d.error for d in verdict.differences if d.kind == "gradient")
        target = "cpu" if devices.platform == "cpu" else None
        sizes = verdict.run.state_bytes, verdict.run.sent_bytes, step.peak_bytes
        rows.append(Row.of(f"{name}: step", seconds, "s", simulated=devices.simulated))
        planned = planned_bytes(each, target)
        for what, size, other in zip(("state", "sent a step", "peak"), sizes, planned, strict=True):
            if size is not None:
                rows.append(Row(f"{name}: {what}", size, "bytes", against="the plan", ratio=size / other))
        rows.append(Row(f"{name}: worst gradient error", error, "relative"))
        rows.append(Row(f"{name}: differs from one device", not verdict.ok, "", target=0))
    return rows, devices


def planned_bytes(config: RunConfig, target: str | None) -> tuple[float, int, int]:
    """(state and sent bytes of a device, by the planner's closed forms; its peak, from the traced step)."""
    memory = planned_memory(config)
    messages = predicted(config, make_layout(config.model, config.parallel, config.part_layers))
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    peak = step_memory(program, traced, compiler_of(target, config.precision.dtype)).peak
    return float(memory.parameters[0] + memory.optimizer[0]), total_sent(messages, config.parallel.mesh), peak
