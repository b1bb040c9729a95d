"""Compile time against depth."""

import dataclasses
import statistics
import time

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program

from .flags import BenchFlags
from .rows import Measured, Row


def bench_compile(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Seconds to trace, lower and compile the step, by number of layers; the first depth is the unit."""
    devices = acquire_devices(1, flags.device)
    seconds: dict[int, list[float]] = {depth: [] for depth in flags.depths}
    for repeat in range(flags.repeats + 1):
        for depth in flags.depths:
            model = dataclasses.replace(config.model, num_layers=depth)
            program = build_program(dataclasses.replace(config, model=model), make_mesh(MeshShape(), devices.devices))
            with console.status(f"{depth} layers, {repeat} of {flags.repeats}"):
                start = time.perf_counter()
                program.compile_step()
            if repeat:  # the first round warms up
                seconds[depth].append(time.perf_counter() - start)
    unit = statistics.median(seconds[flags.depths[0]])
    first = f"{flags.depths[0]} layers: compile"
    rows = [
        Row.of(f"{depth} layers: compile", s, "s", against=first, ratio=statistics.median(s) / unit, target=1.2)
        for depth, s in seconds.items()
    ]
    return rows, devices
