"""Charts of a report as SVG inside the page, drawn by matplotlib (the extra `draw`), in the page's own colours.

matplotlib writes fixed colours. Those used here stand for others: in the SVG they become the page's CSS variables, so
that one drawing serves the light and the dark theme. No text of a run's files is drawn: legends are HTML.
"""

import importlib.util
import io
import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import Costs

from .timeline import FAINT as TIMELINE_FAINT
from .timeline import IDLE, timeline

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SERIES = [f"var(--c{number})" for number in (0, 3, 4, 5, 2, 6, 1, 7, 8)]
INK, FAINT, LINE, CARD = "#0a0b0c", "#0a0b0d", "#0a0b0e", "#0a0b0f"
PLACEHOLDERS = [f"#0c0b{number:02x}" for number in range(len(SERIES))]
COLOURS = {
    INK: "currentColor",
    FAINT: "var(--faint)",
    LINE: "var(--line)",
    CARD: "var(--card)",
    TIMELINE_FAINT: "var(--faint)",
    IDLE: "var(--line)",
    "#f6f6f8": "var(--card)",
    **dict(zip(PLACEHOLDERS, SERIES, strict=True)),
}
STYLE = {
    "text.color": INK,
    "axes.labelcolor": FAINT,
    "axes.titlecolor": INK,
    "xtick.color": FAINT,
    "ytick.color": FAINT,
    "axes.edgecolor": LINE,
    "grid.color": LINE,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9,
    "axes.titlesize": 10,
    "svg.fonttype": "none",
    "lines.linewidth": 1.4,
    "path.simplify_threshold": 0.5,
}
DASHES = ("-", (0, (5, 3)), (0, (2, 2)), (0, (6, 2, 2, 2)))
WIDTH, HEIGHT = 4.6, 2.7  # inches, of a chart that stands beside another, and alone on a phone


class Line(NamedTuple):
    """One curve. series: which colour. points: draw a mark at each; faint: draw it thinner; dashes: of which kind, so
    that one which lies under another is seen."""

    x: np.ndarray
    y: np.ndarray
    series: int
    points: bool = False
    faint: bool = False
    dashes: int = 0


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def colour(series: int) -> str:
    """The CSS colour of a curve, as its legend shows it."""
    return SERIES[series % len(SERIES)]


def curves(lines: Sequence[Line], title: str, about: str, log: bool = False) -> str:
    """Curves over steps. title: with the unit. about: what a screen reader says."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure((WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        for line in lines:
            marks = {"marker": "o", "markersize": 3.5} if line.points else {}
            width, alpha = (0.8, 0.6) if line.faint else (1.6, 1.0)
            shade = PLACEHOLDERS[line.series % len(SERIES)]
            dashes = DASHES[line.dashes % len(DASHES)]
            axes.plot(line.x, line.y, color=shade, linestyle=dashes, linewidth=width, alpha=alpha, **marks)
        if log and any((line.y > 0).any() for line in lines):
            axes.set_yscale("log")
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        return svg(figure, about)


def areas(x: np.ndarray, parts: Mapping[str, np.ndarray], top: float, title: str, about: str) -> str:
    """Parts of a whole over steps, one on the other, cut off above `top`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure((WIDTH, HEIGHT), layout="constrained")
        axes = figure.subplots()
        shades = PLACEHOLDERS[: len(parts)]
        if len(x) == 1:  # an area needs a width
            x, parts = np.array([x[0] - 0.5, x[0] + 0.5]), {name: np.repeat(y, 2) for name, y in parts.items()}
        axes.stackplot(x, *parts.values(), colors=shades, linewidth=0)
        axes.set(ylim=(0, top))
        axes.set_title(title, loc="left")
        axes.set_xlabel("step")
        return svg(figure, about)


def stacks(rows: Sequence[Mapping[str, float]], names: Sequence[str], title: str, about: str) -> str:
    """A horizontal bar for each row, the first on top, of the parts in `names`."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure((WIDTH, 0.9 + 0.34 * len(rows)), layout="constrained")
        axes = figure.subplots()
        left = np.zeros(len(rows))
        for name, shade in zip(names, PLACEHOLDERS, strict=False):
            widths = np.array([row.get(name, 0.0) for row in rows])
            axes.barh(range(len(rows)), widths, left=left, color=shade, height=0.62)
            left += widths
        axes.set_yticks([])
        axes.grid(axis="y", visible=False)
        axes.invert_yaxis()
        axes.set_title(title, loc="left")
        return svg(figure, about)


def schedule_picture(schedule: Schedule, about: str) -> str:
    """The schedule's table over simulated time, every action one tick."""
    from matplotlib import rc_context

    with rc_context({**STYLE, "axes.grid": False}):
        subtitle = f"{schedule.num_ticks} ticks; drawn from the table, every action one tick long"
        return svg(timeline(schedule, Costs(1.0, 1.0, 1.0), subtitle), about)


def svg(figure: "Figure", about: str) -> str:
    """A figure as an element of an HTML page: no names of its own that another could have, no fixed size or colour."""
    from matplotlib import rc_context

    file = io.StringIO()
    with rc_context({**STYLE, "svg.hashsalt": about}):  # from which the names in it are made
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = file.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text[text.index("<svg") :], flags=re.DOTALL)
    head, body = text.split(">", 1)
    (box,) = re.findall(r'viewBox="([\d. -]+)"', head)
    for placeholder, value in COLOURS.items():
        body = body.replace(placeholder, value)
    body = body.replace("stroke: #ffffff", "stroke: var(--paper)").replace("xlink:href", "href")
    body = re.sub(r'<g id="[\w.-]+">', "<g>", body)
    return f'<svg viewBox="{box}" role="img" aria-label="{escape(about)}">{body}'
