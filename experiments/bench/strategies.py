"""State, peak and sent bytes of each strategy beside theory, time, and equality with one device."""

import dataclasses
import statistics

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh
from jaxdist.parity import PROOF_EPS, PROOF_LR
from jaxdist.plan.proof.levels import compiler_of
from jaxdist.plan.proof.trace_memory import step_memory
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program

from ..cli import chosen
from ..tables import Rows
from ..verify import STYLES, Verifier
from .flags import BenchFlags
from .rows import Measured, Row
from .theory import sent_in_theory, state_in_theory
from .timing import timed_step, with_parallel

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
    console.print(f"devices: {devices.description}")
    proof = dataclasses.replace(config.optimizer, lr=PROOF_LR, eps=PROOF_EPS, warmup_steps=0)
    verify = Verifier(devices, steps=2)
    timing = "s/step (simulated)" if devices.simulated else "s/step"
    sizes_shown = (
        "state MiB/device",
        "state / theory",
        "sent MiB/step",
        "sent / theory",
        "peak MiB/device",
        "peak / plan",
    )
    table = Rows("strategy", "mesh", timing, *sizes_shown, "worst gradient error", "equal")
    rows, ok = [], True
    for name, each in configs:
        with console.status(name):
            verdict = verify(name, dataclasses.replace(each, optimizer=proof, steps=2))
            step = timed_step(each, devices)
            seconds = [step.run() for _ in range(flags.repeats)]
        ok &= verdict.ok
        error = max(d.error for d in verdict.differences if d.kind == "gradient")
        target = "cpu" if devices.platform == "cpu" else None
        sizes = {
            "state": (verdict.run.state_bytes, "theory", state_in_theory(each)),
            "sent a step": (verdict.run.sent_bytes, "theory", sent_in_theory(each)),
            "peak": (step.peak_bytes, "the plan", planned_peak(each, target)),
        }
        rows.append(Row.of(f"{name}: step", seconds, "s", simulated=devices.simulated))
        cells = []
        for what, (size, against, other) in sizes.items():
            ratio = size / other if size and other else None
            cells += ["unknown" if size is None else f"{size / 2**20:.1f}", "" if ratio is None else f"{ratio:.3f}"]
            if size is not None:
                rows.append(Row(f"{name}: {what}", size, "bytes", against=against, ratio=ratio))
        rows.append(Row(f"{name}: worst gradient error", error, "relative L2"))
        table.add_row(
            name,
            str(each.parallel.mesh),
            f"{statistics.median(seconds):.2f}",
            *cells,
            f"{error:.1e}",
            "equal" if verdict.ok else "DIFFERS",
        )
    table.print(console, left=("mesh",), under=sizes_shown, styles=STYLES)
    return rows, devices, ok


def planned_peak(config: RunConfig, target: str | None) -> int:
    """Bytes of a device, from the traced step."""
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    return step_memory(program, traced, compiler_of(target, config.precision.dtype)).peak
