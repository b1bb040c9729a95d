"""Charts of the labs, all of one size and style: legible at the width of a phone."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#3470c4", "#d66828", "#3e8e5c", "#9282c4", "#c9a227", "#b0413e", "#5b8a8a", "#787882")
STYLE = {
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e4e4ea",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "font.family": "sans-serif",
    "font.size": 10,
    "legend.fontsize": 9,
    "legend.frameon": False,
    "svg.fonttype": "none",
    "lines.linewidth": 1.6,
    "lines.markersize": 4,
}
WIDTH, HEIGHT = 4.6, 3.2  # inches


def blank(title: str, x: str, y: str, height: float = HEIGHT, width: float = WIDTH) -> "tuple[Figure, Axes]":
    """An empty chart. x, y: the axes' labels, with units."""
    from cycler import cycler
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context({**STYLE, "axes.prop_cycle": cycler(color=COLOURS)}):
        figure = Figure((width, height), layout="constrained")
        axes = figure.subplots()
        figure.suptitle(title, x=0.02, ha="left", size=10, weight="bold")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
        return figure, axes


def lines(
    title: str,
    x: str,
    y: str,
    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    log_x: bool = False,
    log_y: bool = False,
    marks: bool = True,
    level: float | None = None,
    upright: float | None = None,
    y_range: tuple[float, float] | None = None,
) -> "Figure":
    """Curves by name, as (xs, ys). level, upright: where a horizontal and a vertical line are drawn."""
    figure, axes = blank(title, x, y)
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        axes.plot(xs, ys, marker="osD^vP"[number % 6] if marks else None, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 10_000 else f"$2^{{{math.log2(x):.0f}}}$")
    if log_y:
        axes.set_yscale("log")
    if level is not None:
        axes.axhline(level, color=COLOURS[7], linestyle=":", linewidth=1)
    if upright is not None:
        axes.axvline(upright, color=COLOURS[7], linestyle=":", linewidth=1)
    if y_range is not None:
        axes.set_ylim(*y_range)
    if len(curves) > 1:
        axes.legend(ncols=1 if len(curves) < 6 else 3)
    return figure


Span = tuple[float, float, str, int]  # start, end, text, colour


def timeline(title: str, x: str, rows: Sequence[tuple[str, Sequence[Span]]], height: float = 2.2) -> "Figure":
    """Rows from the top, each with a name and bars over time."""
    figure, axes = blank(title, x, "", height=height)
    for row, (_, spans) in enumerate(rows):
        for start, end, text, colour in spans:
            axes.barh(row, end - start, left=start, height=0.7, color=COLOURS[colour], edgecolor="white")
            axes.text((start + end) / 2, row, text, ha="center", va="center", color="white", size=9)
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


Cell = tuple[int, int, str, int]  # row, column, text, colour


def grids(title: str, parts: Mapping[str, Sequence[Cell]], y_names: Mapping[str, Sequence[str]], x: str) -> "Figure":
    """Square grids side by side, by name: coloured cells with text, rows named from the top."""
    from matplotlib.patches import Rectangle

    figure, unused = blank(title, "", "", height=2.75)
    unused.remove()
    for number, (name, cells) in enumerate(parts.items(), 1):
        axes = figure.add_subplot(1, len(parts), number, xlabel=x)
        for row, column, text, colour in cells:
            axes.add_patch(Rectangle((column + 0.04, row + 0.04), 0.92, 0.92, facecolor=COLOURS[colour]))
            axes.text(column + 0.5, row + 0.54, text, ha="center", va="center", color="white", size=8)
        rows, columns = (max(cell[at] for cell in cells) + 1 for at in (0, 1))
        axes.set(xlim=(0, columns), ylim=(rows, 0))
        axes.set_title(name, size=10)
        axes.grid(visible=False)
        axes.tick_params(length=0)
        axes.set_xticks([c + 0.5 for c in range(columns)], range(columns))
        axes.set_yticks([r + 0.5 for r in range(rows)], y_names[name])
    return figure


def stacks(title: str, x: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> "Figure":
    """A horizontal bar for each of `names`, the first on top, of its parts in order."""
    figure, axes = blank(title, x, "", height=1.4 + 0.34 * len(names))
    left = [0.0] * len(names)
    for part, widths in parts.items():
        axes.barh(range(len(names)), widths, left=left, height=0.66, label=part)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    if len(parts) > 1:
        figure.legend(loc="outside lower left", ncols=min(len(parts), 3))
    return figure
