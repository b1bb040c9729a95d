"""Every schedule: ticks, memory predicted and compiled, compile time."""

import dataclasses
import time

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline.buffers import Buffer
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.plan.proof.trace import named_bytes
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program, compiled_bytes

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import with_parallel

STAGES, LAYERS, ROWS = 4, 4, 2  # layers a stage, sequences a micro-batch
# (schedule, micro-batches); the first row is the one the others are predicted from.
PIPELINE_ROWS = [
    *(("1f1b", micro) for micro in (8, 16, 32)),
    *(("gpipe", micro) for micro in (8, 16, 32)),
    *((name, 16) for name in ("interleaved", "zb-h1", "zb-v", "v-half", "v-min")),
]


def bench_pipeline(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Memory: the compiler's temporaries against the buffers the schedule asks for, plus what 1F1B needs beside them.

    Compile time: against 1F1B with 8 micro-batches, and with four times the layers a stage.
    """
    devices = acquire_devices(STAGES, flags.device)

    def measure(schedule: str, micro: int, layers: int = LAYERS) -> tuple[Schedule, int, int, float]:
        """(the table, bytes of its buffers, bytes of the compiler's temporaries, seconds to compile)."""
        model = dataclasses.replace(config.model, num_layers=STAGES * layers)
        each = dataclasses.replace(config, model=model, batch_size=ROWS * micro)
        each = with_parallel(each, f"pp={STAGES}", {"schedule": schedule, "microbatches": micro})
        program = build_program(each, make_mesh(each.parallel.mesh, devices.devices))
        start = time.perf_counter()
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
        compiled = traced.lower().compile()
        seconds = time.perf_counter() - start
        buffers = sum(named_bytes(traced.jaxpr, tuple(Buffer)).values())
        return each.parallel.pipeline, buffers, compiled_bytes(compiled).temporaries, seconds

    measure(*PIPELINE_ROWS[0])  # warms up
    _, first_buffers, first_temporaries, first_seconds = measure(*PIPELINE_ROWS[0])
    rows = []
    for schedule, micro in PIPELINE_ROWS:
        if flags.only in schedule or not rows:
            name = f"{schedule}, {micro} micro-batches"
            with console.status(name):
                table, buffers, temporaries, seconds = measure(schedule, micro)
            predicted = buffers + first_temporaries - first_buffers
            rows += [
                Row(f"{name}: ticks", table.num_ticks, ""),
                Row(f"{name}: idle share, simulated", simulate(table).idle_share, "share"),
                Row(f"{name}: in flight", max(in_flight(table)) / table.num_chunks, ""),
                Row(f"{name}: buffers", buffers, "bytes"),
                Row(f"{name}: temporaries, predicted", predicted, "bytes"),
                Row(f"{name}: temporaries, compiled", temporaries, "bytes"),
                Row(f"{name}: error", abs(predicted / temporaries - 1), "share", target=0.05),
                Row(f"{name}: compile", seconds, "s", against="the first", ratio=seconds / first_seconds),
            ]
    *_, deep = measure(*PIPELINE_ROWS[0], layers=4 * LAYERS)
    more = {"against": "the first", "ratio": deep / first_seconds, "target": 1.5}
    rows.append(Row(f"{PIPELINE_ROWS[0][0]}, {4 * LAYERS} layers a stage: compile", deep, "s", **more))
    console.print(
        f"{LAYERS} layers a stage. In flight: activations of one micro-batch on the stage that holds most. Predicted: "
        "the buffers, and what the first row needs beside its own."
    )
    return rows, devices
