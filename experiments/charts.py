"""Charts as SVG inside a page, in the page's own colours, so that one drawing serves light and dark.

No text of a run's files is drawn: legends are HTML.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.simulate import Costs, simulate

SERIES = [f"var(--c{number})" for number in (0, 3, 4, 5, 2, 6, 1, 7, 8)]
PHASES = {Phase.F: "F forward", Phase.B: "B input gradient", Phase.W: "W weight gradient", Phase.R: "R forward again"}
DASHES = ("", "7 4", "3 3", "9 3 3 3")
WIDTH, HEIGHT = 460, 270  # of a chart that stands beside another, and alone on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 26, 36
CELL, ROW = 22, 26  # of a schedule's table
BAR, GAP = 20, 13  # of bars


def colour(series: int) -> str:
    """The CSS colour of a curve, as its legend shows it."""
    return SERIES[series % len(SERIES)]


class Scale(NamedTuple):
    """Numbers from least to most as places from start to stop."""

    least: float
    most: float
    start: float
    stop: float
    log: bool = False

    def __call__(self, values) -> np.ndarray:
        least, most, values = self.least, self.most, np.asarray(values, float)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                least, most, values = math.log(least), math.log(most), np.log(np.where(values > 0, values, np.nan))
        return self.start + (values - least) / (most - least) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within it, about five; on a logarithmic one powers of ten, or 1, 2 and 5 times them."""
        if self.log:
            powers = range(math.floor(math.log10(self.least)), math.ceil(math.log10(self.most)) + 1)
            found = [factor * 10.0**power for power in powers for factor in ((1, 2, 5) if len(powers) < 4 else (1,))]
            found = [tick for tick in found if self.least <= tick <= self.most]
            return found[:: max(1, len(found) // 6)]
        rough = (self.most - self.least) / 5
        size = 10.0 ** math.floor(math.log10(rough))
        step = next(size * factor for factor in (1, 2, 5, 10) if size * factor >= rough)
        first = math.ceil(self.least / step - 1e-9)
        return [number * step for number in range(first, math.floor(self.most / step + 1e-9) + 1)]


def scale_of(values: Sequence[float], start: float, stop: float, log: bool = False) -> Scale:
    """A scale that shows all finite values, with some air around them."""
    found = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    least, most = min(found), max(found)
    if log:
        return Scale(least / 1.3, most * 1.3, start, stop, True)
    air = (most - least) * 0.05 or abs(most) * 0.05 or 1.0
    return Scale(least - air, most + air, start, stop)


class Line(NamedTuple):
    """One curve. series: which colour. points: draw a mark at each; faint: draw it thinner; dashes: of which kind, so
    that one which lies under another is seen."""

    x: np.ndarray
    y: np.ndarray
    series: int
    points: bool = False
    faint: bool = False
    dashes: int = 0


def curves(lines: Sequence[Line], title: str, about: str, log: bool = False) -> str:
    """Curves over steps. title: with the unit. about: what a screen reader says."""
    log = log and any((line.y > 0).any() for line in lines)
    across = scale_of(np.concatenate([line.x for line in lines]), LEFT, WIDTH - RIGHT)
    up = scale_of(np.concatenate([line.y for line in lines]), HEIGHT - BOTTOM, TOP, log)
    parts = [*frame(across, up, title)]
    for line in lines:
        stroke, places = colour(line.series), list(zip(across(line.x), up(line.y), strict=True))
        width, opacity = ("0.8", ' opacity="0.6"') if line.faint else ("1.6", "")
        dashes = f' stroke-dasharray="{DASHES[line.dashes % len(DASHES)]}"' if line.dashes % len(DASHES) else ""
        style = f'fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}{opacity}'
        parts.append(f'<path d="{path(places)}" {style}/>')
        if line.points or len(places) == 1:
            parts += [circle(x, y, 2.6, stroke) for x, y in places if math.isfinite(y)]
    return svg(parts, HEIGHT, about)


def areas(x: np.ndarray, parts: Mapping[str, np.ndarray], top: float, title: str, about: str) -> str:
    """Parts of a whole over steps, one on the other, cut off above `top`."""
    if len(x) == 1:  # an area needs a width
        x, parts = np.array([x[0] - 0.5, x[0] + 0.5]), {name: np.repeat(y, 2) for name, y in parts.items()}
    across, up = Scale(x[0], x[-1], LEFT, WIDTH - RIGHT), Scale(0.0, top or 1.0, HEIGHT - BOTTOM, TOP)
    drawn, below = [], np.zeros(len(x))
    for number, values in enumerate(parts.values()):
        above = below + np.nan_to_num(values)
        edge = [*zip(across(x), up(np.minimum(above, top)), strict=True)]
        edge += [*zip(across(x)[::-1], up(np.minimum(below, top))[::-1], strict=True)]
        drawn.append(f'<path d="{path(edge)}Z" fill="{colour(number)}"/>')
        below = above
    return svg([*drawn, *frame(across, up, title)], HEIGHT, about)


class Bar(NamedTuple):
    """A bar of parts, by name. words: above it, the last of them bold. error: the least and the most of the whole."""

    parts: Mapping[str, float]
    words: tuple[str, str] | None = None
    error: tuple[float, float] | None = None


def bars(
    rows: Sequence[Bar], title: str, unit: str, about: str, marks: Mapping[str, float] | None = None, width: int = WIDTH
) -> str:
    """A horizontal bar for each row, the first on top. marks: lines over all, the last one solid."""
    marks = marks or {}
    ends = [sum(row.parts.values()) for row in rows] + [row.error[1] for row in rows if row.error] + [*marks.values()]
    pitch = BAR + GAP + 15 * any(row.words for row in rows)
    bottom = TOP + pitch * len(rows)
    across = Scale(0.0, max([*ends, 1e-12]) * 1.05, 6, width - (100 if marks else RIGHT))
    parts = [*frame(across, None, title, bottom, "")]
    for number, row in enumerate(rows):
        start, y = 0.0, TOP + pitch * (number + 1) - BAR - GAP / 2
        if row.words:
            bold = f'<tspan font-weight="600">{escape(row.words[1])}</tspan>'
            parts.append(f'<text x="6" y="{y - 5:.1f}">{escape(row.words[0])}: {bold}</text>')
        for series, (name, value) in enumerate(row.parts.items()):
            left, right = across([start, start + value])
            start += value
            parts.append(rect(left, y, right - left, BAR, colour(series), f"{name} {value:.3g} {unit}"))
        if row.error:
            (low, high), middle = across(row.error), y + BAR / 2
            ends = f"M{low:.1f} {middle - 5:.1f}v10M{high:.1f} {middle - 5:.1f}v10"
            parts.append(f'<path d="M{low:.1f} {middle:.1f}H{high:.1f}{ends}" stroke="var(--ink)" fill="none"/>')
    for number, (name, value) in enumerate(marks.items(), 1):
        x, last = float(across(value)), number == len(marks)
        dash, anchor, shift = ("", "start", 4) if last else (' stroke-dasharray="4 3"', "end", -4)
        parts.append(f'<path d="M{x:.1f} {TOP - 8}V{bottom}" stroke="var(--mark)"{dash} fill="none"/>')
        parts.append(label(x + shift, TOP - 12, name, anchor))
    return svg(parts, bottom + 24, about, width)


class Point(NamedTuple):
    x: float
    y: float
    series: int
    words: str


def scatter(points: Sequence[Point], ringed: Point, most: float, title: str, under: str, about: str) -> str:
    """Points that say their words where one points at them, one ringed. From 0 to `most`, and logarithmic upwards."""
    width, height = 2 * WIDTH, 380
    across = Scale(0.0, most, LEFT, width - 40)
    up = scale_of([point.y for point in (ringed, *points)], height - BOTTOM, TOP, log=True)
    parts = [*frame(across, up, title, height - BOTTOM, under)]
    for point in (*points, ringed):
        x, y = float(across(point.x)), float(up(point.y))
        if point is not ringed:
            parts.append(circle(x, y, 5, colour(point.series), point.words))
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="var(--mark)" stroke-width="2"/>')
    return svg(parts, height, about, width)


def schedule_picture(schedule: Schedule, about: str) -> str:
    """The schedule's table over simulated time, every action one tick; later chunks are lighter."""
    result, stages = simulate(schedule, Costs(1.0, 1.0, 1.0)), schedule.num_stages
    fills = dict(zip(PHASES, SERIES, strict=False))
    width = 64 + max(CELL * result.makespan, 830)
    across = Scale(0.0, result.makespan, 60, width - 4)
    parts = [label(0, 14, f"{schedule.num_ticks} ticks; drawn from the table, every action one tick long", "start", "")]
    for stage in range(stages):
        y = 24 + ROW * stage
        parts += [label(0, y + 15, f"stage {stage}", "start"), rect(60, y, width - 64, ROW - 3, "var(--line)")]
        for tick, row in enumerate(schedule.table):
            if (action := row[stage]) is None:
                continue
            left, right = across([result.start[tick, stage], result.end[tick, stage]])
            opacity = 1 - 0.55 * action.chunk / max(schedule.num_chunks - 1, 1)
            fill = f'{fills[action.phase]}" opacity="{opacity:.2f}'
            parts.append(rect(left + 0.5, y, right - left - 1, ROW - 3, fill))
            parts.append(label((left + right) / 2, y + 15, str(action.microbatch), kind=""))
    y = 32 + ROW * stages
    for number, phase in enumerate(schedule.phases):
        x = 60 + 140 * number
        parts += [rect(x, y, 11, 11, fills[phase]), label(x + 16, y + 10, PHASES[phase], "start")]
    return svg(parts, 50 + ROW * stages, about, width)


# ---------------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------------


def frame(
    across: Scale, up: Scale | None, title: str, bottom: int = HEIGHT - BOTTOM, under: str = "step"
) -> Iterator[str]:
    """Grid lines with their numbers, the title above and what runs across below."""
    yield label(across.start, 14, title, "start", "")
    for tick in across.ticks():
        x = float(across(tick))
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="var(--line)"/>'
        yield label(x, bottom + 15, number(tick))
    for tick in up.ticks() if up else ():
        y = float(up(tick))
        yield f'<path d="M{across.start:.1f} {y:.1f}H{across.stop:.1f}" stroke="var(--line)"/>'
        yield label(across.start - 6, y + 4, number(tick), "end")
    if under:
        yield label((across.start + across.stop) / 2, bottom + 31, under)


def label(x: float, y: float, words: str, anchor: str = "middle", kind: str = "faint") -> str:
    kind = f' class="{kind}"' if kind else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>'


def rect(x: float, y: float, width: float, height: float, fill: str, words: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{fill}">{_tip(words)}</rect>'


def circle(x: float, y: float, radius: float, fill: str, words: str = "") -> str:
    return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius}" fill="{fill}">{_tip(words)}</circle>'


def _tip(words: str) -> str:
    return f"<title>{escape(words)}</title>" if words else ""


def number(value: float) -> str:
    """A tick's label."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    if 1e4 <= abs(value) < 1e6:
        return f"{value / 1000:,.4g}k"
    return f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")


def path(places: Sequence[tuple[float, float]]) -> str:
    """A line through the places, broken where a value is not finite."""
    words, pen = [], "M"
    for x, y in places:
        if math.isfinite(y):
            words.append(f"{pen}{x:.1f} {y:.1f}")
        pen = "L" if math.isfinite(y) else "M"
    return "".join(words)


def svg(parts: Sequence[str], height: float, about: str, width: float = WIDTH) -> str:
    """An element of an HTML page with no names of its own and no fixed size or colour."""
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" fill="currentColor" role="img"'
    return f'{head} aria-label="{escape(about)}">{"".join(parts)}</svg>'
