"""Charts of the labs, all of one size and style: legible at the width of a phone."""

from collections.abc import Mapping, Sequence

import numpy as np

from .. import charts
from ..charts import Bar, Cell, Line, Span


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
    up_to: float | None = None,
    equal: bool = False,
) -> str:
    """Curves by name, as (xs, ys); equal ones are each thinner than the one below. The rest as for `charts.curves`."""
    drawn = [
        Line(np.asarray(xs, float), np.asarray(ys, float), at, marks, *((9 - 1.5 * at, 0) if equal else (1.6, at)))
        for at, (xs, ys) in enumerate(curves.values())
    ]
    picture = charts.curves(drawn, y, title, log_y, x, log_x, (upright, level), up_to)
    return charts.standalone(picture, title, list(curves) if len(curves) > 1 else ())


def timeline(title: str, x: str, rows: Sequence[tuple[str, Sequence[Span]]]) -> str:
    """Rows from the top, each with a name and bars over time."""
    return charts.standalone(charts.spans(rows, "", x, title), title)


def grids(title: str, parts: Mapping[str, Sequence[Cell]], names: Mapping[str, Sequence[str]], x: str) -> str:
    return charts.standalone(charts.grids(parts, names, x, title), title)


def holdings(title: str, rows: Mapping[str, np.ndarray]) -> str:
    return charts.standalone(charts.holdings(rows, title), title)


def stacks(title: str, x: str, names: Sequence[str], parts: Mapping[str, Sequence[float]]) -> str:
    """A horizontal bar for each of `names`, the first on top, of its parts in order."""
    rows = [{part: widths[at] for part, widths in parts.items()} for at in range(len(names))]
    bars = [Bar(row, (name, f"{sum(row.values()):.3g}")) for name, row in zip(names, rows, strict=True)]
    return charts.standalone(charts.bars(bars, x, x, title), title, list(parts) if len(parts) > 1 else ())
