"""How time and memory grow with width, depth, sequence, batch, micro-batches and ranks: exponents beside the theory."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence
from math import ceil, floor, log2
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.plan.program_memory import program_bytes
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.runtime.devices import acquire_devices

from ..tables import Rows
from ..timeline import write_both
from .flags import BenchFlags
from .rows import Measured, Row
from .speed import flops_per_token
from .timing import timed_step, with_parallel

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# what grows -> (its values as multiples of the model's own, the run of one value)
GROWTHS: dict[str, tuple[tuple[float, ...], Callable[[RunConfig, int], RunConfig]]] = {
    "width": ((0.5, 1, 2, 4), lambda c, n: of_model(c, width=n, ffn_width=4 * n)),
    "num_layers": ((0.5, 1, 2, 4), lambda c, n: of_model(c, num_layers=n)),
    "seq_len": ((0.5, 1, 2, 4), lambda c, n: of_model(c, seq_len=n)),
    "batch_size": ((1, 2, 4, 8), lambda c, n: dataclasses.replace(c, batch_size=n)),
    "accumulate": ((1, 2, 4, 8), lambda c, n: with_parallel(c, "", {"accumulate": n})),
    "dp": ((1, 2, 4, 8), lambda c, n: with_parallel(c, f"dp={n}" if n > 1 else "", {"zero": 3 if n > 1 else 0})),
}
COLUMNS = 3  # of the picture's panels
SERIES = {("time", "FLOPs"): ("#3470c4", "s"), ("peak bytes", "planned bytes"): ("#d66828", "o")}
LABELS = {"time": "time, measured", "peak bytes": "peak bytes, compiled"}
AXES = {
    "width": "width",
    "num_layers": "layers",
    "seq_len": "context, tokens",
    "batch_size": "batch, sequences",
    "accumulate": "micro-batches of an update",
    "dp": "dp, simulated ranks",
}


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
        write_both(draw(panels), Path(flags.draw) / "scaling", console)
    return rows, devices, True


def measure(config: RunConfig, value: int, repeats: int, devices) -> Point:
    step = timed_step(config, devices)
    layouts = Candidates.of(config)
    planned = program_bytes(config, layouts, pipelines(config, layouts), "xla").total[0]
    flops = flops_per_token(config.model, "full") * config.batch_size * config.model.seq_len
    return Point(value, [step.run() for _ in range(repeats)], flops, step.peak_bytes, float(planned))


def columns_of(points: Sequence[Point]) -> dict[str, list[float]]:
    return {
        "time": [statistics.median(point.seconds) for point in points],
        "FLOPs": [point.flops for point in points],
        "peak bytes": [point.peak_bytes for point in points],
        "planned bytes": [point.planned_bytes for point in points],
    }


def exponents(points: Sequence[Point]) -> dict[str, float]:
    x = np.log([point.value for point in points])
    return {name: float(np.polyfit(x, np.log(column), 1)[0]) for name, column in columns_of(points).items()}


def draw(panels: dict[str, list[Point]]) -> "Figure":
    """A panel for each thing that grows: measured points over the line of the theory, as multiples of the first."""
    from matplotlib.figure import Figure

    num_rows = -(-len(panels) // COLUMNS)
    figure = Figure((11, 3.3 * num_rows + 0.6), layout="constrained")
    for place, (name, points) in enumerate(panels.items()):
        axes, x = figure.add_subplot(num_rows, COLUMNS, place + 1), [point.value for point in points]
        columns, found = columns_of(points), exponents(points)
        for (measured, theory), (colour, marker) in SERIES.items():
            first = {what: columns[what][0] for what in (measured, theory)}
            axes.plot(x, [y / first[theory] for y in columns[theory]], color=colour, label=theory)
            y = [y / first[measured] for y in columns[measured]]
            axes.plot(x, y, marker, color=colour, linestyle="none", label=LABELS[measured])
        axes.set(xscale="log", yscale="log", xlabel=AXES[name], ylabel="multiple of the first")
        axes.set_xticks(x, x)
        axes.minorticks_off()
        low, high = axes.get_ylim()
        powers = range(floor(log2(low)) + 1, ceil(log2(high)))
        axes.set_yticks([2.0**n for n in powers], [f"{2.0**n:g}×" for n in powers])
        axes.grid(alpha=0.3)
        axes.set_title(
            f"{name}: time ^{found['time']:.2f} (FLOPs ^{found['FLOPs']:.2f}),\n"
            f"bytes ^{found['peak bytes']:.2f} (plan ^{found['planned bytes']:.2f})",
            fontsize=11,
        )
    figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return figure
