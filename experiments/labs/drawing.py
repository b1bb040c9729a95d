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
) -> "Figure":
    """Curves by name, as (xs, ys)."""
    figure, axes = blank(title, x, y)
    for number, (name, (xs, ys)) in enumerate(curves.items()):
        axes.plot(xs, ys, marker="osD^vP"[number % 6] if marks else None, label=name)
    if log_x:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:g}" if x < 10_000 else f"$2^{{{math.log2(x):.0f}}}$")
    if log_y:
        axes.set_yscale("log")
    if len(curves) > 1:
        axes.legend()
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
