"""Every schedule: ticks, memory predicted and compiled, compile time."""

import dataclasses
import time

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline.buffers import Buffer
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.plan.proof.trace import named_bytes
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program, compiled_bytes

from ..tables import Rows
from .flags import BenchFlags
from .rows import Measured, Row
from .timing import with_parallel

STAGES, LAYERS, ROWS = 4, 4, 2  # layers a stage, sequences a micro-batch
# (schedule, micro-batches, what is recomputed); the first row is the one the others are predicted from.
PIPELINE_ROWS = [
    *(("1f1b", micro, "none") for micro in (8, 16, 32)),
    *(("gpipe", micro, "none") for micro in (8, 16, 32)),
    *((name, 16, "none") for name in ("interleaved", "zb-h1", "zb-v", "v-half", "v-min")),
]


def bench_pipeline(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Memory: the compiler's temporaries against the buffers the schedule asks for, plus what 1F1B needs beside them.

    Compile time: against 1F1B with 8 micro-batches, and with four times the layers a stage.
    """
    devices = acquire_devices(STAGES, flags.device)
    console.print(f"devices: {devices.description}")

    def measure(schedule: str, micro: int, remat: str, layers: int = LAYERS) -> dict:
        model = dataclasses.replace(config.model, num_layers=STAGES * layers)
        more = {"schedule": schedule, "microbatches": micro, "remat": remat}
        each = dataclasses.replace(config, model=model, batch_size=ROWS * micro)
        each = with_parallel(each, f"pp={STAGES}", more)
        program = build_program(each, make_mesh(each.parallel.mesh, devices.devices))
        start = time.perf_counter()
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - start
        table = each.parallel.pipeline
        return {
            "schedule": schedule,
            "microbatches": micro,
            "remat": remat,
            "layers_per_stage": layers,
            "ticks": table.num_ticks,
            "idle_share": simulate(table).idle_share,
            "in_flight": max(in_flight(table)) / table.num_chunks,
            "buffer_bytes": sum(named_bytes(traced.jaxpr, tuple(Buffer)).values()),
            "compiled_bytes": compiled_bytes(compiled).temporaries,
            "compile_seconds": seconds,
        }

    measure(*PIPELINE_ROWS[0])  # warms up
    first = measure(*PIPELINE_ROWS[0])
    rows = [first]
    for name, micro, remat in PIPELINE_ROWS[1:]:
        if flags.only in name:
            with console.status(f"{name}, {micro} micro-batches"):
                rows.append(measure(name, micro, remat))
    beside = first["compiled_bytes"] - first["buffer_bytes"]
    deep = measure(*PIPELINE_ROWS[0], layers=4 * LAYERS)
    deeper = deep["compile_seconds"] / first["compile_seconds"]

    times = ("ticks", "idle (simulated)", "in flight", "compile s", "/ first")
    memory = ("buffers MiB", "predicted MiB", "compiled MiB", "error")
    table = Rows("schedule", "micro-batches", *times[:3], *memory, *times[3:])
    for row in rows:
        row["predicted_bytes"] = row["buffer_bytes"] + beside
        row["error"] = row["predicted_bytes"] / row["compiled_bytes"] - 1
        table.add_row(
            row["schedule"],
            str(row["microbatches"]),
            str(row["ticks"]),
            f"{row['idle_share']:.1%}",
            f"{row['in_flight']:g}",
            *(f"{row[name] / 2**20:.1f}" for name in ("buffer_bytes", "predicted_bytes", "compiled_bytes")),
            f"{row['error']:+.1%}",
            f"{row['compile_seconds']:.1f}",
            f"{row['compile_seconds'] / first['compile_seconds']:.2f}",
        )
    table.print(console, under=times)
    console.print(
        f"{4 * LAYERS} layers a stage against {LAYERS}: compile time {deeper:.2f} times. In flight: activations of one "
        "micro-batch on the stage that holds most. Predicted: the buffers, and what the first row needs beside its own."
    )
    ok = all(abs(row["error"]) < 0.05 for row in rows) and deeper < 1.5
    figures = []
    for row in rows:
        name = f"{row['schedule']}, {row['microbatches']} micro-batches"
        ratio = row["predicted_bytes"] / row["compiled_bytes"]
        figures += [
            Row(f"{name}: temporaries, compiled", row["compiled_bytes"], "bytes"),
            Row(f"{name}: temporaries, predicted", row["predicted_bytes"], "bytes", against="compiled", ratio=ratio),
            Row(f"{name}: idle share, simulated", row["idle_share"], "share"),
            Row(f"{name}: compile", row["compile_seconds"], "s"),
        ]
    deep_name, seconds = f"{4 * LAYERS} layers a stage: compile", deep["compile_seconds"]
    figures.append(Row(deep_name, seconds, "s", against=f"{LAYERS} layers a stage: compile", ratio=deeper))
    return figures, devices, ok
