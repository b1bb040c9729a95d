"""Charts of a report as SVG inside the page, in the page's own colours, so that one drawing serves light and dark.

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
PHASES = dict(zip((Phase.F, Phase.B, Phase.W, Phase.R), SERIES, strict=False))
DASHES = ("", "7 4", "3 3", "9 3 3 3")
WIDTH, HEIGHT = 460, 270  # of a chart that stands beside another, and alone on a phone
LEFT, RIGHT, TOP, BOTTOM = 52, 10, 26, 36
CELL, ROW = 22, 26  # of a schedule's table


class Line(NamedTuple):
    """One curve. series: which colour. points: draw a mark at each; faint: draw it thinner; dashes: of which kind, so
    that one which lies under another is seen."""

    x: np.ndarray
    y: np.ndarray
    series: int
    points: bool = False
    faint: bool = False
    dashes: int = 0


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
        parts.append(
            f'<path d="{path(places)}" fill="none" stroke="{stroke}" stroke-width="{width}"{dashes}{opacity}/>'
        )
        if line.points or len(places) == 1:
            marks = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{stroke}"/>' for x, y in finite(places))
            parts.extend(marks)
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


def stacks(rows: Sequence[Mapping[str, float]], names: Sequence[str], title: str, about: str) -> str:
    """A horizontal bar for each row, the first on top, of the parts in `names`."""
    bottom = TOP + 34 * len(rows)
    across = Scale(0.0, max([sum(row.values()) for row in rows] + [1e-12]) * 1.05, 6, WIDTH - RIGHT)
    parts = [*frame(across, None, title, bottom, "")]
    for number, row in enumerate(rows):
        start = 0.0
        for series, name in enumerate(names):
            left, right = across([start, start + row.get(name, 0.0)])
            start += row.get(name, 0.0)
            place = f'x="{left:.1f}" y="{TOP + 34 * number + 6}" width="{right - left:.1f}" height="21"'
            parts.append(f'<rect {place} fill="{colour(series)}"/>')
    return svg(parts, bottom + 24, about)


def schedule_picture(schedule: Schedule, about: str) -> str:
    """The schedule's table over simulated time, every action one tick; later chunks are lighter."""
    result, stages = simulate(schedule, Costs(1.0, 1.0, 1.0)), schedule.num_stages
    width = 64 + max(CELL * result.makespan, 830)
    across = Scale(0.0, result.makespan, 60, width - 4)
    title = f"{schedule.num_ticks} ticks; drawn from the table, every action one tick long"
    parts = [f'<text x="0" y="14">{escape(title)}</text>']
    for stage in range(stages):
        y = 24 + ROW * stage
        parts.append(f'<text x="0" y="{y + 15}" fill="var(--faint)">stage {stage}</text>')
        parts.append(f'<rect x="60" y="{y}" width="{width - 64:.1f}" height="{ROW - 3}" fill="var(--line)"/>')
        for tick, row in enumerate(schedule.table):
            if (action := row[stage]) is None:
                continue
            left, right = across([result.start[tick, stage], result.end[tick, stage]])
            opacity = 1 - 0.55 * action.chunk / max(schedule.num_chunks - 1, 1)
            place = f'x="{left + 0.5:.1f}" y="{y}" width="{right - left - 1:.1f}" height="{ROW - 3}"'
            parts.append(f'<rect {place} fill="{PHASES[action.phase]}" opacity="{opacity:.2f}"/>')
            parts.append(
                f'<text x="{(left + right) / 2:.1f}" y="{y + 15}" text-anchor="middle">{action.microbatch}</text>'
            )
    x = 60
    for phase in schedule.phases:
        y = 32 + ROW * stages
        parts.append(f'<rect x="{x}" y="{y}" width="11" height="11" fill="{PHASES[phase]}"/>')
        parts.append(f'<text x="{x + 16}" y="{y + 10}" fill="var(--faint)">{WORDS[phase]}</text>')
        x += 140
    return svg(parts, 50 + ROW * stages, about, width)


WORDS = {Phase.F: "F forward", Phase.B: "B input gradient", Phase.W: "W weight gradient", Phase.R: "R forward again"}


# ---------------------------------------------------------------------------------------------------------------------
# Pieces
# ---------------------------------------------------------------------------------------------------------------------


def frame(
    across: Scale, up: Scale | None, title: str, bottom: int = HEIGHT - BOTTOM, under: str = "step"
) -> Iterator[str]:
    """Grid lines with their numbers, the title above and what runs across below."""
    yield f'<text x="{across.start:.0f}" y="14">{escape(title)}</text>'
    for tick in across.ticks():
        x = float(across(tick))
        yield f'<path d="M{x:.1f} {TOP}V{bottom}" stroke="var(--line)"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 15}" text-anchor="middle" fill="var(--faint)">{number(tick)}</text>'
    for tick in up.ticks() if up else ():
        y = float(up(tick))
        yield f'<path d="M{across.start:.1f} {y:.1f}H{across.stop:.1f}" stroke="var(--line)"/>'
        place = f'x="{across.start - 6:.1f}" y="{y + 4:.1f}" text-anchor="end"'
        yield f'<text {place} fill="var(--faint)">{number(tick)}</text>'
    middle = (across.start + across.stop) / 2
    yield f'<text x="{middle:.0f}" y="{bottom + 31}" text-anchor="middle" fill="var(--faint)">{escape(under)}</text>'


def number(value: float) -> str:
    """A tick's label."""
    if value == 0 or 1e-3 <= abs(value) < 1e4:
        return f"{value:.4g}"
    return (
        f"{value / 1000:,.4g}k" if 1e4 <= abs(value) < 1e6 else f"{value:.0e}".replace("e-0", "e-").replace("e+0", "e")
    )


def finite(places: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    return ((x, y) for x, y in places if math.isfinite(y))


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
    head = f'<svg viewBox="0 0 {width:.0f} {height:.0f}" font-size="11" fill="currentColor" role="img"'
    return f'{head} aria-label="{escape(about)}">{"".join(parts)}</svg>'
