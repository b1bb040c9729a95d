"""How time and memory grow with width, depth, sequence, batch, micro-batches and ranks: exponents beside the theory."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log
from typing import NamedTuple

import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.plan.program_memory import program_bytes
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.runtime.devices import acquire_devices

from ..cli import make_folder
from ..tables import Rows
from ..timeline import FAINT, INK, Line, Picture, Rectangle, Text, write_both
from .flags import BenchFlags
from .rows import Measured, Row
from .speed import flops_per_token
from .timing import timed_step, with_parallel

# what grows -> (its values as multiples of the model's own, the run of one value)
GROWTHS: dict[str, tuple[tuple[float, ...], Callable[[RunConfig, int], RunConfig]]] = {
    "width": ((0.5, 1, 2, 4), lambda c, n: of_model(c, width=n, ffn_width=4 * n)),
    "num_layers": ((0.5, 1, 2, 4), lambda c, n: of_model(c, num_layers=n)),
    "seq_len": ((0.5, 1, 2, 4), lambda c, n: of_model(c, seq_len=n)),
    "batch_size": ((1, 2, 4, 8), lambda c, n: dataclasses.replace(c, batch_size=n)),
    "accumulate": ((1, 2, 4, 8), lambda c, n: with_parallel(c, "", {"accumulate": n})),
    "dp": ((1, 2, 4, 8), lambda c, n: with_parallel(c, f"dp={n}" if n > 1 else "", {"zero": 3 if n > 1 else 0})),
}
COLOURS = {"time": (52, 112, 196), "bytes": (214, 104, 40)}


class Point(NamedTuple):
    """One run: seconds a step and its FLOPs, compiled bytes of a device at the peak and the plan's."""

    value: int
    seconds: list[float]
    flops: float
    peak_bytes: int
    planned_bytes: float


def of_model(config: RunConfig, **more) -> RunConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, **more))


def bench_scaling(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """One figure grows, all others stay. Time is held against the FLOPs of a step, bytes against the plan's."""
    devices = acquire_devices(max(GROWTHS["dp"][0]), flags.device)
    console.print(f"devices: {devices.description}")
    own = {**dataclasses.asdict(config.model), "batch_size": config.batch_size, "accumulate": 1, "dp": 1}
    table = Rows("grows", "from", "to", "time ^", "FLOPs ^", "peak bytes ^", "plan's bytes ^")
    rows, panels = [], {}
    for name, (multiples, make) in GROWTHS.items():
        if flags.only not in name:
            continue
        values = [int(own[name] * multiple) for multiple in multiples]
        with console.status(name):
            points = [measure(make(config, value), value, flags.repeats, devices) for value in values]
        panels[name] = points
        found = exponents(points)
        table.add_row(name, str(values[0]), str(values[-1]), *(f"{exponent:.2f}" for exponent in found.values()))
        simulated = name == "dp"
        for point in points:
            rows.append(Row.of(f"{name}={point.value}: step", point.seconds, "s", simulated=simulated))
            ratio = point.peak_bytes / point.planned_bytes
            rows.append(Row(f"{name}={point.value}: peak", point.peak_bytes, "bytes", against="plan", ratio=ratio))
        rows += [Row(f"{name}: exponent of {what}", value, "exponent") for what, value in found.items()]
    table.print(console)
    console.print(
        "Exponents of a fit a * x^k by least squares of logarithms. A small step has parts that do not grow with x, and"
        " they lower it. dp: simulated ranks share the same cores, so that the same global batch is the same work."
    )
    if flags.draw:
        write_both(draw(panels), make_folder("--draw", flags.draw) / "scaling", console)
    return rows, devices, True


def measure(config: RunConfig, value: int, repeats: int, devices) -> Point:
    step = timed_step(config, devices)
    layouts = Candidates.of(config)
    planned = program_bytes(config, layouts, pipelines(config, layouts), "xla").total[0]
    flops = flops_per_token(config.model, "full") * config.batch_size * config.model.seq_len
    return Point(value, [step.run() for _ in range(repeats)], flops, step.peak_bytes, float(planned))


def exponents(points: Sequence[Point]) -> dict[str, float]:
    x = np.log([point.value for point in points])
    columns = {
        "time": [statistics.median(point.seconds) for point in points],
        "FLOPs": [point.flops for point in points],
        "peak bytes": [point.peak_bytes for point in points],
        "planned bytes": [point.planned_bytes for point in points],
    }
    return {name: float(np.polyfit(x, np.log(column), 1)[0]) for name, column in columns.items()}


WIDTH, HEIGHT, EDGE, COLUMNS = 330.0, 220.0, 44.0, 3


def draw(panels: dict[str, list[Point]]) -> Picture:
    """A panel for each thing that grows: measured points over the line of the theory, as multiples of the first."""
    num_rows = -(-len(panels) // COLUMNS)
    picture = Picture(COLUMNS * WIDTH, num_rows * HEIGHT + 30)
    for index, (name, points) in enumerate(panels.items()):
        left, top = index % COLUMNS * WIDTH + EDGE, index // COLUMNS * HEIGHT + 26
        panel(picture, name, points, left, top, WIDTH - EDGE - 14, HEIGHT - 62)
    legend = "squares: measured time (blue) and compiled bytes (orange); lines: FLOPs and the plan's bytes"
    picture.shapes.append(Text(EDGE, num_rows * HEIGHT + 14, legend, 12, FAINT))
    return picture


def panel(picture: Picture, name: str, points: list[Point], left, top, width, height) -> None:
    found = exponents(points)
    seconds = [statistics.median(point.seconds) for point in points]
    series = {
        "time": (seconds, [p.flops for p in points]),
        "bytes": ([p.peak_bytes for p in points], [p.planned_bytes for p in points]),
    }
    factors = [v / column[0] for pair in series.values() for column in pair for v in column]
    low, high = min(*factors, 0.9), max(*factors, 1.2)

    def place(value, factor):
        x = left + width * log(value / points[0].value) / log(points[-1].value / points[0].value)
        return x, top + height * (1 - log(factor / low) / log(high / low))

    add = picture.shapes.append
    add(Line(left, top, left, top + height, FAINT))
    add(Line(left, top + height, left + width, top + height, FAINT))
    for factor in (low, 1.0, high) if low < 0.9 else (1.0, high):  # labels that do not touch
        add(Text(left - 5, place(points[0].value, factor)[1], f"{factor:.2g}x", 10, FAINT, "end"))
    for point in points:
        add(Text(place(point.value, low)[0], top + height + 11, str(point.value), 10, FAINT, "middle"))
    for what, (measured, theory) in series.items():
        line = [place(p.value, t / theory[0]) for p, t in zip(points, theory, strict=True)]
        for start, end in pairwise(line):
            add(Line(*start, *end, COLOURS[what]))
        for p, m in zip(points, measured, strict=True):
            x, y = place(p.value, m / measured[0])
            add(Rectangle(x - 3, y - 3, 6, 6, COLOURS[what]))
    words = f"{name}: time ^{found['time']:.2f} (FLOPs ^{found['FLOPs']:.2f})"
    add(Text(left, top - 14, words, 11, INK))
    words = f"bytes ^{found['peak bytes']:.2f} (plan ^{found['planned bytes']:.2f})"
    add(Text(left, top + height + 26, words, 11, INK))
