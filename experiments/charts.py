"""Charts as SVG inside a page, in the page's own colours, so that one drawing serves light and dark.

No text of a run's files is drawn: legends are HTML. `standalone` makes a file of a chart, with its colours and legend.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple

import numpy as np

from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.simulate import Costs, held_chunks, simulate

# By name in the pages' style: on light paper, and on dark.
COLOURS = {
    "ink": ("#1f2328", "#e6e8eb"),
    "faint": ("#5f6670", "#9aa1ab"),
    "line": ("#d4d7dc", "#3a3f47"),
    "paper": ("#ffffff", "#16181c"),
    "card": ("#f5f6f8", "#1f2227"),
    "c0": ("#3f6fb5", "#6b9ae0"),
    "c1": ("#7fa6d9", "#3f6799"),
    "c2": ("#b08a2e", "#cfa84a"),
    "c3": ("#c9682b", "#e08a4f"),
    "c4": ("#4f8f62", "#6fb385"),
    "c5": ("#8b7bb8", "#a999d6"),
    "c6": ("#b3545e", "#d4747e"),
    "c7": ("#7a7f87", "#8b919a"),
    "c8": ("#a9adb3", "#646a73"),
    "mark": ("#b3261e", "#ff8a80"),
}
SERIES = [f"var(--c{number})" for number in (0, 3, 4, 5, 2, 6, 1, 7, 8)]
PHASES = {Phase.F: "F forward", Phase.B: "B input gradient", Phase.W: "W weight gradient", Phase.R: "R forward again"}
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
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
    log: int = 0
    """Its base; 0 for a linear one."""

    def __call__(self, values) -> np.ndarray:
        least, most, values = self.least, self.most, np.asarray(values, float)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                least, most, values = math.log(least), math.log(most), np.log(np.where(values > 0, values, np.nan))
        return self.start + (values - least) / (most - least) * (self.stop - self.start)

    def ticks(self) -> list[float]:
        """Round numbers within it, about five; on a logarithmic one powers of two, or of ten and 2 and 5 times them."""
        if self.log == 2:
            powers = range(math.ceil(math.log2(self.least)), math.floor(math.log2(self.most)) + 1)
            return [2.0**power for power in powers[:: math.ceil(len(powers) / 8)]]
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


def scale_of(values: Sequence[float], start: float, stop: float, log: int = 0) -> Scale:
    """A scale that shows all finite values, with some air around them."""
    found = [value for value in values if math.isfinite(value) and (value > 0 or not log)] or [1.0]
    least, most = min(found), max(found)
    if log:
        return Scale(least / 1.3, most * 1.3, start, stop, log)
    air = (most - least) * 0.05 or abs(most) * 0.05 or 1.0
    return Scale(least - air, most + air, start, stop)


class Line(NamedTuple):
    """One curve. series: which colour. points: draw a mark at each; width: in pixels, below 1 it is faint, too; dashes:
    of which kind, so that one which lies under another is seen."""

    x: np.ndarray
    y: np.ndarray
    series: int
    points: bool = False
    width: float = 1.6
    dashes: int = 0


def curves(
    lines: Sequence[Line],
    title: str,
    about: str,
    log: bool = False,
    under: str = "step",
    log_x: bool = False,
    marks: tuple[float | None, float | None] = (None, None),
    up_to: float | None = None,
) -> str:
    """Curves over steps. title: with the unit. about: what a screen reader says.

    log_x: powers of two across. marks: where an upright and a level line are drawn. up_to: what is higher is cut off.
    """
    log = log and any((line.y > 0).any() for line in lines)
    across = scale_of(np.concatenate([line.x for line in lines]), LEFT, WIDTH - RIGHT, 2 * log_x)
    heights = np.concatenate([line.y for line in lines])
    up = scale_of(heights if up_to is None else heights[heights <= up_to], HEIGHT - BOTTOM, TOP, 10 * log)
    parts = [*frame(across, up, title, under=under)]
    for value, scale, form in zip(marks, (across, up), ("M{0:.1f} {1}V{2}", "M{3} {0:.1f}H{4}"), strict=True):
        if value is not None:
            place = form.format(float(scale(value)), TOP, HEIGHT - BOTTOM, LEFT, WIDTH - RIGHT)
            parts.append(f'<path d="{place}" stroke="var(--faint)" stroke-dasharray="2 3"/>')
    for line in lines:
        y = line.y if up_to is None else np.where(line.y <= up_to, line.y, np.nan)
        stroke, places = colour(line.series), list(zip(across(line.x), up(y), strict=True))
        opacity = ' opacity="0.6"' if line.width < 1 else ""
        dashes = f' stroke-dasharray="{DASHES[line.dashes % len(DASHES)]}"' if line.dashes % len(DASHES) else ""
        style = f'fill="none" stroke="{stroke}" stroke-width="{line.width}"{dashes}{opacity}'
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
    up = scale_of([point.y for point in (ringed, *points)], height - BOTTOM, TOP, log=10)
    parts = [*frame(across, up, title, height - BOTTOM, under)]
    for point in (*points, ringed):
        x, y = float(across(point.x)), float(up(point.y))
        if point is not ringed:
            parts.append(circle(x, y, 5, colour(point.series), point.words))
    parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="var(--mark)" stroke-width="2"/>')
    return svg(parts, height, about, width)


class Span(NamedTuple):
    """A bar from start to end with words in it. light: how much lighter than its series; height: in that of a row."""

    start: float
    end: float
    series: int
    words: str = ""
    light: float = 0.0
    height: float = 1.0


def spans(
    rows: Sequence[tuple[str, Sequence[Span]]],
    title: str,
    under: str,
    about: str,
    names: Mapping[str, int] | None = None,
    width: float = WIDTH,
) -> str:
    """Bars over time in named rows, the first on top. under: what runs across. names: of series, in a legend below."""
    bottom, high = TOP + ROW * len(rows), ROW - 4
    most = max(span.end for _, row in rows for span in row)
    across = Scale(0.0, most, 14 + 6 * max(len(name) for name, _ in rows), width - RIGHT)
    parts = [*frame(across, None, title, bottom, under)]
    for y, (name, row) in enumerate(rows):
        base = TOP + ROW * (y + 1) - 2
        parts.append(label(6, base - 7, name, "start", ""))
        if row:
            parts.append(rect(across.start, base - high, across.stop - across.start, high, "var(--line)"))
        for span in row:
            left, right = across([span.start, span.end])
            fill = f'{colour(span.series)}" opacity="{1 - span.light:.2f}'
            parts.append(rect(left, base - high * span.height, right - left - 1, high * span.height, fill))
            parts += [label((left + right) / 2, base - 7, span.words, kind="")] * bool(span.words)
    found, end = legend(names or {}, bottom + BOTTOM + 12, width)
    return svg([*parts, *found], end, about, width)


def schedule_picture(
    schedule: Schedule, about: str, title: str = "every action one tick long", costs: Costs | None = None
) -> str:
    """The schedule's table over simulated time (lock-step, free links), later chunks lighter; and under it what each
    stage holds, in activations of all its layers for one micro-batch, all stages to one scale."""
    result, stages = simulate(schedule, costs or Costs(1.0, 1.0, 1.0)), range(schedule.num_stages)
    starts = np.vstack([result.start, np.full(schedule.num_stages, result.makespan)])
    held = list(zip(*held_chunks(schedule), strict=True))
    series = {phase: number for number, phase in enumerate(PHASES)}
    rows: list[tuple[str, list[Span]]] = [(f"stage {stage}", []) for stage in stages]
    for tick, actions in enumerate(schedule.table):
        for stage, action in enumerate(actions):
            if action is not None:
                light = 0.55 * action.chunk / max(schedule.num_chunks - 1, 1)
                ends = result.start[tick, stage], result.end[tick, stage]
                rows[stage][1].append(Span(*ends, series[action.phase], str(action.microbatch), light))
    rows.append(("held:", []))
    for stage in stages:
        levels = [Span(*starts[t : t + 2, stage], 7, height=n / max(map(max, held))) for t, n in enumerate(held[stage])]
        rows.append((f"at most {max(held[stage]) / schedule.num_chunks:g}", levels))
    title = f"{schedule.num_ticks} ticks; drawn from the table, {title}"
    names = {PHASES[phase]: series[phase] for phase in schedule.phases}
    return spans(rows, title, "", about, names, 64 + max(CELL * result.makespan, 830))


class Cell(NamedTuple):
    row: int
    column: int
    words: str
    series: int


def grids(parts: Mapping[str, Sequence[Cell]], names: Mapping[str, Sequence[str]], under: str, about: str) -> str:
    """Grids of cells with words side by side, by name, their rows named from the top, their columns numbered."""
    left = 14 + 6 * max(len(name) for each in names.values() for name in each)
    drawn, height = [], 0.0
    for number, (title, cells) in enumerate(parts.items()):
        start, columns = number * WIDTH / len(parts) + left, 1 + max(cell.column for cell in cells)
        size = (WIDTH / len(parts) - left - 4) / columns
        height = TOP + size * len(names[title])
        drawn += [label(start, 14, title, "start", ""), label(start + size * columns / 2, height + 31, under)]
        drawn += [label(start + size * (c + 0.5), height + 15, str(c)) for c in range(columns)]
        for row, name in enumerate(names[title]):
            drawn.append(label(start - 6, TOP + size * (row + 0.5) + 4, name, "end"))
        for cell in cells:
            x, y, lines = start + size * cell.column, TOP + size * cell.row, cell.words.split("\n")
            drawn.append(rect(x + 1, y + 1, size - 2, size - 2, colour(cell.series)))
            for line, words in enumerate(lines):
                drawn.append(
                    label(x + size / 2, y + size / 2 + 4 + 14 * (line - (len(lines) - 1) / 2), words, kind="on")
                )
    return svg(drawn, height + BOTTOM, about)


def holdings(rows: Mapping[str, np.ndarray], about: str) -> str:
    """What each rank has: shares[ranks, pieces] by name. A column is a piece, in its colour as far as a rank has it."""
    left, pitch, tall = 14 + 6 * max(map(len, rows)), 32, 22
    num_ranks = max(len(shares) for shares in rows.values())
    box = (WIDTH - left) / num_ranks
    drawn = [label(left + box * (rank + 0.5), 14, f"rank {rank}") for rank in range(num_ranks)]
    for number, (name, shares) in enumerate(rows.items(), 1):
        bottom, wide = TOP + pitch * number - 6, (box - 8) / shares.shape[1]
        drawn.append(label(6, bottom - 7, name, "start", ""))
        for (rank, piece), share in np.ndenumerate(shares):
            x = left + box * rank + 4 + wide * piece
            drawn.append(rect(x, bottom - tall, wide - 1, tall, "var(--line)"))
            drawn.append(rect(x, bottom - tall * share, wide - 1, tall * share, colour(piece)))
    return svg(drawn, TOP + pitch * len(rows), about)


def standalone(picture: str, title: str, names: Sequence[str] = ()) -> str:
    """A chart as a file of its own, in the colours of light paper: its title above, a legend of its series below."""
    width, height = map(float, re.findall(r'viewBox="0 0 (\d+) (\d+)"', picture)[0])
    inside = picture.replace("<svg ", f'<svg y="22" width="{width:.0f}" height="{height:.0f}" ', 1)
    found, end = legend({name: at for at, name in enumerate(names)}, height + 40, width)
    style = "text { font: 11px system-ui, sans-serif; fill: var(--ink); } .faint { fill: var(--faint); } "
    style += ".on { fill: var(--paper); } .title { font-weight: 600; font-size: 13px; }"
    heading = [f"<style>{style}</style>", rect(0, 0, width, end, "var(--paper)"), label(6, 16, title, "start", "title")]
    drawn = svg([*heading, inside, *found], end, title, width).replace(
        "<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1
    )
    return re.sub(r"var\(--(\w+)\)", lambda name: COLOURS[name[1]][0], drawn) + "\n"


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


def legend(names: Mapping[str, int], y: float, width: float) -> tuple[list[str], float]:
    """Squares with the names of series, in as many lines as they need; and where the picture may end."""
    drawn, x = [], 6.0
    for name, series in names.items():
        size = 30 + 6.2 * len(name)
        if x > 6 and x + size > width:
            x, y = 6.0, y + 18
        drawn += [rect(x, y - 9, 11, 11, colour(series)), label(x + 16, y, name, "start", "")]
        x += size
    return drawn, y + 8 if names else y - 12


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
    """A tick's label; powers of two that are long to write are written as such."""
    if value > 0 and math.log2(value).is_integer() and not 0.01 < value < 1e4:
        return "2" + f"{math.log2(value):.0f}".translate(SUPERSCRIPTS)
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
