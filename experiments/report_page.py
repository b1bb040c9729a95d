"""The report of runs as one HTML page: nothing loaded from anywhere, light and dark, readable on a phone.

Whatever a run's files say is escaped, and shortened where it is long.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice

import numpy as np

from jaxdist.errors import printable
from jaxdist.mesh import AXES, MeshShape
from jaxdist.plan.explain import NAMES_OF_TERMS
from jaxdist.plan.verdict import judge, measured_parts
from jaxdist.runtime.run_record import Run
from jaxdist.runtime.telemetry import PARTS, Spread

from . import report_charts as charts
from .plan_page import STYLE as PLAN_STYLE
from .report_charts import Line
from .report_predictions import Axis, Predictions, Stages

MOST_POINTS = 3000  # of the curves of one chart together
MOST_TEXT = 300  # characters of anything that a file says
MOST_ROWS = 400  # of a table of settings
MOST_RANKS = 4  # drawn of each axis
MOST_DRAWN = 1500  # ticks x stages of a schedule that is drawn

STYLE = (
    PLAN_STYLE
    + """
tbody tr:first-child { font-weight: inherit; } h3 { font-size: 1em; margin: 1.6em 0 0.4em; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22em), 1fr)); gap: 0.4em 1.6em; }
figure { margin: 0.6em 0; min-width: 0; }
svg * { stroke-linejoin: round; } svg text { font: 11px system-ui, sans-serif; }
.wide svg { min-width: 40em; } td.l, th.l { white-space: normal; } td.l { overflow-wrap: anywhere; min-width: 10em; }
td.l.short { overflow-wrap: normal; white-space: nowrap; min-width: 0; } td.l.long { min-width: 17em; }
.note { border-left: 4px solid var(--c2); background: var(--card); padding: 0.5em 0.9em; margin: 0.8em 0;
  border-radius: 4px; overflow-wrap: anywhere; } .note.bad { border-color: var(--mark); }
.note ul { margin: 0.3em 0; padding-left: 1.2em; } h1, h2, h3, li, p { overflow-wrap: anywhere; }
.good { color: var(--c4); font-weight: 600; } .bad-text { color: var(--mark); font-weight: 600; }
.mesh { display: inline-flex; flex-wrap: wrap; gap: 0.4em; border: 1px solid var(--line); border-radius: 6px;
  padding: 0.35em; margin: 0.15em; font-size: 0.8em; align-items: center; max-width: 100%; box-sizing: border-box; }
.mesh .mesh { font-size: 1em; }
.mesh > b { font-weight: 600; color: var(--faint); flex-basis: 100%; } .rank { background: var(--card);
  border: 1px solid var(--line); border-radius: 4px; padding: 0.15em 0.5em; font-variant-numeric: tabular-nums; }
summary { cursor: pointer; color: var(--faint); margin: 0.6em 0; }
@media (max-width: 480px) { body { padding: 0 0.8em; margin: 1em auto; } h1 { font-size: 1.25em; } }
"""
)

Cell = str | tuple[str, str]  # text, or (HTML that is safe, its class)


@dataclass(frozen=True)
class Verdict:
    """Parity of the run with one device, as far as it is known. ok: None where nobody has looked. text: a sentence."""

    ok: bool | None
    text: str
    command: str = ""


@dataclass(frozen=True)
class Entry:
    """One run on the page, with all that was found out about it. why_not: why there are no predictions."""

    label: str
    run: Run
    predictions: Predictions | None
    why_not: str
    verdict: Verdict


def page(entries: Sequence[Entry]) -> str:
    """The whole page."""
    title = f"Run report: {text(', '.join(entry.label for entry in entries))}"
    parts = [f"<h1>{title}</h1>", *_notes(entries), overview(entries), curves_part(entries)]
    for number, entry in enumerate(entries):
        parts += run_part(entry, number)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


# ---------------------------------------------------------------------------------------------------------------------
# Text, numbers, tables
# ---------------------------------------------------------------------------------------------------------------------


def text(value) -> str:
    """Anything from a file as HTML text: shortened, without what reorders or hides it, escaped."""
    shown = printable(str(value)[: MOST_TEXT + 1])
    return escape(shown[:MOST_TEXT] + "…" if len(shown) > MOST_TEXT else shown)


def number(value: float | None, form: str = ".4f") -> str:
    return "–" if value is None or not np.isfinite(value) else format(value, form)


def in_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= 10 * size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def in_seconds(value: float | None) -> str:
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], left: Sequence[str] = ()) -> str:
    """A table that scrolls within itself. left: the columns of words. Cells of text are escaped."""

    def cell(value: Cell, head: str) -> str:
        shown, kind = (text(value), "") if isinstance(value, str) else value
        kind = " ".join(filter(None, ("l" if head in left else "", kind)))
        return f'<td class="{kind}">{shown}</td>' if kind else f"<td>{shown}</td>"

    top = "".join(f'<th class="l">{escape(h)}</th>' if h in left else f"<th>{escape(h)}</th>" for h in heads)
    body = "".join("<tr>" + "".join(cell(v, h) for v, h in zip(row, heads, strict=True)) + "</tr>" for row in rows)
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def note(sentences: Sequence[str], bad: bool = False) -> str:
    items = "".join(f"<li>{each}</li>" for each in sentences)
    return f'<div class="note{" bad" * bad}"><ul>{items}</ul></div>' if sentences else ""


def legend(names: Sequence[str], first: int = 0) -> str:
    marks = (
        f'<span><i style="background:{charts.colour(first + at)}"></i>{text(name)}</span>'
        for at, name in enumerate(names)
    )
    return f'<div class="legend">{"".join(marks)}</div>'


def figure(picture: str, caption: str = "", marks: str = "", wide: bool = False) -> str:
    """caption: HTML."""
    inner = f'<div class="wide">{picture}</div>' if wide else picture
    return f"<figure>{inner}{marks}{f'<figcaption>{caption}</figcaption>' if caption else ''}</figure>"


# ---------------------------------------------------------------------------------------------------------------------
# All runs together
# ---------------------------------------------------------------------------------------------------------------------


def _notes(entries: Sequence[Entry]) -> list[str]:
    found = []
    for entry in entries:
        found.append(note([f"<b>{text(entry.label)}</b>: {text(each)}." for each in entry.run.notes[:50]], bad=True))
    if simulated := [entry.label for entry in entries if entry.run.config.get("simulated") is True]:
        names = "" if len(entries) == 1 else f" ({text(', '.join(simulated))})"
        found.append(
            note([f"<b>Simulated devices{names}:</b> several devices took turns on one CPU. Losses, gradients, layouts"
                  " and the messages of a step are what real devices would compute and send. Seconds and tokens per"
                  " second are not: they say nothing of real devices, nor of which layout is faster."])
        )  # fmt: skip
    return found


def overview(entries: Sequence[Entry]) -> str:
    heads = ["run", "state", "steps", "loss", "held-out loss", "tokens", "tokens/s (median)", "mesh", "verdict"]
    rows = []
    for entry in entries:
        run, asked = entry.run, entry.run.config.get("steps")
        speed = run.column("tokens_per_second")[1]
        tokens = run.column("tokens")[1]
        last = int(run.steps[-1]) if run.steps.size else 0
        rows.append([
            entry.label,
            (run.state, "short"),
            f"{last:,} of {asked:,}" if type(asked) is int else f"{last:,}",
            number(run.last("loss")),
            number(run.last("held_out_loss")),
            f"{tokens.sum():,.0f}" if tokens.size else "–",
            f"{statistics.median(speed):,.0f}" if speed.size else "–",
            mesh_text(entry),
            verdict_cell(entry.verdict),
        ])  # fmt: skip
    reasons = [
        f"{text(entry.label)} stopped: {text(entry.run.end.get('reason', 'it does not say why'))}"
        for entry in entries
        if entry.run.state == "stopped"
    ]
    under = '<p class="faint">Losses in nats per token, of the newest step that has one.</p>'
    return table(heads, rows, left=("run", "state", "mesh", "verdict")) + under + note(reasons, bad=True)


def mesh_text(entry: Entry) -> Cell:
    if entry.predictions is not None:
        return escape(str(entry.predictions.config.parallel.mesh)), "short"
    parallel = entry.run.config.get("parallel")
    mesh = parallel.get("mesh") if isinstance(parallel, dict) else None
    return ",".join(f"{k}={v}" for k, v in mesh.items() if v != 1) if isinstance(mesh, dict) else "–"


def verdict_cell(verdict: Verdict) -> Cell:
    known = {
        True: ("equal to one device", "good short"),
        False: ("DIFFERS", "bad-text short"),
        None: ("not verified", "short"),
    }
    return known[verdict.ok]


def curves_part(entries: Sequence[Entry]) -> str:
    """Loss, throughput, gradient norm, learning rate and loss scale of all runs in one chart each."""
    wanted = (
        ("loss", "Loss, nats per token", False, "held_out_loss"),
        ("tokens_per_second", "Throughput, tokens/s", False, None),
        ("grad_norm", "Norm of the whole gradient", True, None),
        ("lr", "Learning rate", False, None),
        ("loss_scale", "Loss scale (float16)", True, None),
    )
    names = [entry.label for entry in entries]
    shown = []
    for name, title, log, held_out in wanted:
        lines = []
        for at, entry in enumerate(entries):
            most = max(200, MOST_POINTS // len(entries))
            if (found := entry.run.column(name))[1].size:
                lines.append(Line(*thin(*found, most), at, faint=held_out is not None, dashes=at))
            if held_out and (found := entry.run.column(held_out))[1].size:
                lines.append(Line(*thin(*found, most), at, points=True, dashes=at))
        if not lines:
            continue
        marks = legend(names) if len(entries) > 1 else ""
        captions = {
            "loss": "Thin: training, of each step's batch. With dots: held out.",
            "grad_norm": "Before clipping; logarithmic.",
        }
        about = f"{title} of {', '.join(names)}"[:200]
        shown.append(figure(charts.curves(lines, title, about, log), captions.get(name, ""), marks))
    return f'<h2>Curves</h2><div class="charts">{"".join(shown)}</div>' if shown else ""


def thin(x: np.ndarray, y: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most about `most` points of a curve: of each stretch the least and the largest, so no spike is lost."""
    if len(x) <= most:
        return x, y
    kept = {0, len(x) - 1}
    for part in np.array_split(np.arange(len(x)), most // 2):
        kept |= {int(part[y[part].argmin()]), int(part[y[part].argmax()])}
    index = np.array(sorted(kept))
    return x[index], y[index]


# ---------------------------------------------------------------------------------------------------------------------
# One run
# ---------------------------------------------------------------------------------------------------------------------


def run_part(entry: Entry, at: int) -> list[str]:
    parts = [f"<h2>{text(entry.label)}</h2>", *time_part(entry), *gradient_part(entry)]
    parts += ["<h3>Memory of a device</h3>", memory_part(entry)]
    if entry.predictions is None:
        parts.append(note([f"Nothing is predicted for this run. {text(entry.why_not)}"]))
    else:
        parts += ["<h3>What a step sends</h3>", *sent_part(entry.predictions)]
        parts += ["<h3>The mesh</h3>", *mesh_part(entry.predictions)]
        parts += pipeline_part(entry)
    return [*parts, "<h3>Verdict</h3>", verdict_part(entry.verdict), *settings_part(entry)]


def time_part(entry: Entry) -> list[str]:
    run, means = entry.run, entry.run.mean_seconds()
    if not means:
        return []
    named = [part for part in PARTS if part in means]
    total = sum(means[part] for part in named)
    pictures = _areas(entry, named) + _process_curves(entry) if run.steps.size else ""
    spread = run.spread_over_processes()
    heads = ["part", "mean of a step", "share"]
    heads += ["least process", "median", "most", "slowest process"] if spread else []
    rows = []
    for part in [*named, *(["total"] if "total" in means else [])]:
        share = f"{means[part] / total:.1%}" if total and part != "total" else ""
        more = _spread_cells(spread.get(part)) if spread else []
        rows.append([part, in_seconds(means[part]), share, *more])
    shown = table(heads, rows, left=("part",))
    beside = figure(shown) if pictures and not spread else ""  # a table of three columns is as narrow as a chart
    parts = ["<h3>Where the time of a step goes</h3>", f'<div class="charts">{pictures}{beside}</div>']
    parts += [] if beside else [shown]
    if laps := run.laps():
        found = judge(*measured_parts(laps), "what it is made of, no clock of a host can tell")
        parts.append(f"<p><b>{text(found.text[:1].upper() + found.text[1:])}.</b></p>")
    about = f"Over {run.steps.size:,} steps, by the clock of the first process's host."
    if spread:
        about += f" The last columns: the means of {len(run.processes)} processes beside each other."
    about += " <b>step</b>: from its start until its numbers are there. <b>host</b>: what no other part is about."
    return [*parts, f'<p class="faint">{about}</p>']


def _spread_cells(spread: Spread | None) -> list[Cell]:
    if spread is None:
        return ["–"] * 4
    times = [in_seconds(value) for value in (spread.least, spread.median, spread.most)]
    return [*times, f"{spread.process:g}"]


def _areas(entry: Entry, named: Sequence[str]) -> str:
    run = entry.run
    x, columns = binned(run.steps, {part: np.nan_to_num(run.seconds[part]) for part in named}, 300)
    heights = np.sum(list(columns.values()), axis=0)
    top = float(max(1.3 * np.quantile(heights, 0.9), 1e-9))
    higher = int((heights > top).sum())
    caption = f"Steps {int(run.steps[0]):,} to {int(run.steps[-1]):,}."
    if len(x) < len(run.steps):
        caption += f" Each point is the mean of about {len(run.steps) / len(x):.0f} steps."
    if higher:
        caption += f" Cut off above {in_seconds(top)}: {higher} of {len(x)} points are higher, up to "
        caption += f"{in_seconds(float(heights.max()))}."
    picture = charts.areas(x, columns, top, "Seconds of a step by part", f"Seconds of a step by part, {entry.label}")
    return figure(picture, caption, legend(list(columns)))


def binned(x: np.ndarray, columns: Mapping[str, np.ndarray], most: int) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """At most `most` points, each the mean of a stretch."""
    if len(x) <= most:
        return x, dict(columns)
    stretches = np.array_split(np.arange(len(x)), most)
    middle = np.array([x[part].mean() for part in stretches])
    return middle, {name: np.array([y[part].mean() for part in stretches]) for name, y in columns.items()}


def _process_curves(entry: Entry) -> str:
    """Total seconds of a step: the least, the median and the most of the processes, as they told each other."""
    found = [(step, parts["total"]) for step, parts in sorted(entry.run.exchanged.items()) if "total" in parts]
    if not found:
        return ""
    x = np.array([step for step, _ in found])
    names = ("least", "median", "most")
    lines = [
        Line(*thin(x, np.array([getattr(s, n) for _, s in found]), 1000), at, True, dashes=at)
        for at, n in enumerate(names)
    ]
    title = "Seconds of a step over processes"
    slowest = statistics.mode(f"{spread.process:g}" for _, spread in found)
    caption = f"Means between two exchanges; most often the slowest: process {slowest}."
    return figure(charts.curves(lines, title, f"{title}, {entry.label}"), caption, legend(names))


def gradient_part(entry: Entry) -> list[str]:
    groups, run = entry.run.grad_norms, entry.run
    if not groups:
        return []
    shown = dict(islice(groups.items(), len(charts.SERIES)))
    parts = ["<h3>Gradient norm by group of parameters</h3>"]
    lines = []
    for at, values in enumerate(shown.values()):
        there = np.isfinite(values)
        lines.append(Line(*thin(run.steps[there], values[there], max(200, MOST_POINTS // len(shown))), at))
    left_out = f" The other {len(groups) - len(shown)} groups are in the table." if len(groups) > len(shown) else ""
    title = "Gradient norm, before clipping"
    picture = charts.curves(lines, title, f"{title}, by group, {entry.label}", log=True)
    parts.append(f'<div class="charts">{figure(picture, f"Logarithmic.{left_out}", legend(list(shown)))}')
    rows = []
    for name, values in groups.items():
        values = values[np.isfinite(values)]
        if values.size:
            figures = (values[0], np.median(values), values.max(), values[-1])
            rows.append([name, *(number(float(each), ".3g") for each in figures)])
    parts.append(figure(table(["group", "first", "median", "largest", "last"], rows, left=("group",))))
    return [*parts, "</div>"]


def memory_part(entry: Entry) -> str:
    """The plan's terms beside what was compiled, and what allocators say."""
    rows: list[list[Cell]] = []
    predicted, parts = None if entry.predictions is None else entry.predictions.memory, []
    if predicted is not None:
        rows += [[NAMES_OF_TERMS[name], in_bytes(value), ""] for name, value in predicted.terms.items()]
        rows.append(["predicted by the plan", in_bytes(predicted.total), ""])
        values = {NAMES_OF_TERMS[name]: value / 2**20 for name, value in predicted.terms.items()}
        picture = charts.stacks(
            [values], list(values), "Predicted, MiB of a device", f"Predicted memory, {entry.label}"
        )
        caption = f"Fullest in {escape(predicted.fullest)}; attention: {escape(predicted.attention)}."
        parts.append(figure(picture, caption, legend(list(values))))

    def beside(count: float) -> str:
        if predicted is None or not count:
            return ""
        error = predicted.total / count - 1
        return f"the plan predicts {abs(error):.1%} {'more' if error > 0 else 'less'}"

    compiled = entry.run.config.get("compiled")
    sizes = [compiled.get(name) for name in ("arguments", "temporaries")] if isinstance(compiled, dict) else []
    if sizes and all(type(size) is int and 0 <= size < 2**60 for size in sizes):
        rows.append(["compiled: arguments and temporaries", in_bytes(sum(sizes)), beside(sum(sizes))])
    else:
        rows.append(["compiled", "–", "the run does not say what its compiler planned"])
    memory = [each for each in entry.run.memory() if 0 <= each.peak < 2**60]
    if memory:
        worst = max(memory, key=lambda each: each.peak)
        about = f"rank {worst.rank}, the fullest of {len(memory)}; {beside(worst.peak)}"
        rows.append(["allocator: peak since the process began", in_bytes(worst.peak), about])
    else:
        simulated = entry.run.config.get("simulated") is True
        why = "simulated devices share the host's memory and have no allocator" if simulated else "not recorded"
        rows.append(["allocator", "–", why])
    parts.append(figure(table(["of one device", "bytes", ""], rows, left=("of one device", ""))))
    if len(memory) > 1:
        cells = ([str(m.rank), in_bytes(m.in_use), in_bytes(m.peak), in_bytes(m.limit)] for m in memory[:64])
        parts.append(figure(table(["rank", "in use", "peak", "limit"], cells)))
    return f'<div class="charts">{"".join(parts)}</div>'


def sent_part(found: Predictions) -> list[str]:
    """Predicted beside counted."""
    if not found.sent:
        return ["<p>Nothing: there is one device.</p>"]
    rows = []
    for each in found.sent:
        verdict = ("equal", "good") if each.equal else (difference(each.predicted, each.counted), "bad-text")
        messages, sent = (
            [largest(getattr(stages, name)) for stages in (each.predicted, each.counted)]
            for name in ("counts", "num_bytes")
        )
        kind = each.kind.replace("_", "-")
        rows.append([", ".join(each.axes), kind, *(f"{n:,}" for n in messages), *map(in_bytes, sent), verdict])
    heads = ["axes", "collective", "predicted", "counted", "bytes predicted", "bytes counted", "on every stage"]
    equal = all(each.equal for each in found.sent)
    about = (
        "Of one device, in one step; where stages differ, of the stage that sends most. Predicted: in closed form, by"
        " the plan. Counted: in a trace of this configuration's step on an abstract mesh, with this page's versions. "
    )
    about += "All are equal, in number and to the byte." if equal else "<b>Not all are equal.</b>"
    purposes = [[row.purpose, row.kind.replace("_", "-"), row.axes, f"{row.count:,}", in_bytes(row.sent_bytes)]
                for row in found.purposes]  # fmt: skip
    heads_of_purposes = ["purpose", "collective", "axes", "messages", "bytes"]
    return [
        table(heads, rows, left=("axes", "collective")),
        f'<p class="faint">{about}</p>',
        "<details><summary>By purpose (predicted)</summary>"
        + table(heads_of_purposes, purposes, left=("purpose", "collective", "axes"))
        + "</details>",
    ]


def largest(stages: Sequence[int]) -> int:
    return max(stages, default=0)


def difference(predicted: Stages, counted: Stages) -> str:
    """How the trace differs from the prediction, on the stage where it differs most."""
    more_bytes, more = (
        max((b - a for a, b in zip(*pair, strict=True)), key=abs)
        for pair in ((predicted.num_bytes, counted.num_bytes), (predicted.counts, counted.counts))
    )
    return f"counted: {more:+,} messages, {more_bytes:+,} B"


def mesh_part(found: Predictions) -> list[str]:
    mesh = found.config.parallel.mesh
    live = [axis for axis in AXES if mesh.size(axis) > 1]
    if not live:
        return ["<p>One device.</p>"]
    rows = [[(f"<b>{axis.name}</b>", "short"), str(axis.size), (place(axis.name, live), "short"),
             in_bytes(axis.sent_bytes), (text(carried(axis)), "long")] for axis in found.axes]  # fmt: skip
    several = [f"{in_bytes(row.sent_bytes)} over {row.axes} ({row.purpose})" for row in found.over_several]
    also = f" Over several axes at once: {text('; '.join(several))}." if several else ""
    return [
        drawn_mesh(mesh, live),
        table(["axis", "ranks", "place", "bytes a step", "carries"], rows, left=("axis", "place", "carries")),
        '<p class="faint">Numbers in the boxes are ranks; ranks of the innermost axis are neighbours and need the'
        f" fastest links. Bytes that one device sends over the axis alone, in a step.{also}</p>",
    ]


def place(axis: str, live: Sequence[str]) -> str:
    if len(live) == 1:
        return "the only one"
    return {live[0]: "outermost", live[-1]: "innermost"}.get(axis, "between")


def carried(axis: Axis) -> str:
    """Purposes of the bytes sent over an axis, the largest first."""
    sizes: dict[str, int] = {}
    for row in axis.purposes:
        sizes[row.purpose] = sizes.get(row.purpose, 0) + row.sent_bytes
    ordered = sorted(sizes.items(), key=lambda item: -item[1])
    shown = "; ".join(f"{purpose} ({in_bytes(size)})" for purpose, size in ordered[:4])
    return shown + f" and {len(ordered) - 4} more" * (len(ordered) > 4)


def drawn_mesh(mesh: MeshShape, live: Sequence[str]) -> str:
    """Boxes in boxes, the outermost axis outside; only the first ranks of a long axis."""

    def boxes(axes: Sequence[str], first: int) -> str:
        if not axes:
            return f'<span class="rank">{first}</span>'
        axis, inner = axes[0], list(axes[1:])
        size, stride = mesh.size(axis), 1
        for name in inner:
            stride *= mesh.size(name)
        shown = [boxes(inner, first + at * stride) for at in range(min(size, MOST_RANKS))]
        if inner:
            shown = [f'<span class="mesh"><b>{axis} {at}</b>{box}</span>' for at, box in enumerate(shown)]
        else:
            shown = [f"<span>{axis}</span>", *shown]
        return "".join(shown) + (f"<span>… {size} in all</span>" if size > MOST_RANKS else "")

    return f'<div class="mesh" role="img" aria-label="The mesh {escape(str(mesh))}">{boxes(list(live), 0)}</div>'


def pipeline_part(entry: Entry) -> list[str]:
    schedule = entry.predictions.config.parallel.pipeline
    if schedule is None:
        return []
    parts = ["<h3>The pipeline's schedule</h3>"]
    layers = "+".join(map(str, entry.predictions.config.part_layers))
    about = (
        f"{escape(schedule.name)}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches, "
        f"{schedule.num_ticks} ticks; layers {layers}. Drawn from the table that runs, not from a measurement."
    )
    if schedule.num_ticks * schedule.num_stages > MOST_DRAWN:
        return [*parts, f'<p class="faint">{about} It is too large to be drawn here.</p>']
    picture = charts.schedule_picture(schedule, f"Schedule {schedule.name} of {entry.label}")
    return [*parts, figure(picture, about, wide=True)]


def verdict_part(verdict: Verdict) -> str:
    shown, kind = verdict_cell(verdict)
    command = f"<pre>{text(verdict.command)}</pre>" if verdict.command else ""
    return f'<p><span class="{kind}">{shown}</span>: {text(verdict.text)}</p>{command}'


def settings_part(entry: Entry) -> list[str]:
    config = entry.run.config
    if not config:
        return []
    versions = config.get("versions")
    rows = [[name, str(value)] for name, value in islice(versions.items(), 50)] if isinstance(versions, dict) else []
    shown = (
        table(["package", "version"], rows, left=("package", "version"))
        if rows
        else "<p>The run does not say with which versions it was made.</p>"
    )
    devices = text(config.get("devices", "the run does not say"))
    if type(config.get("simulated")) is not bool:
        devices += ". The record does not say whether they were simulated"
    flat = list(islice(flattened({k: v for k, v in config.items() if k != "versions"}), MOST_ROWS))
    found = entry.predictions
    size = "" if found is None else f" · {found.parameters:,} parameters: {text(found.config.model.describe())}"
    return [
        "<h3>Configuration and versions</h3>",
        f"<p>Devices: {devices}{size}</p>",
        shown,
        "<details><summary>Every setting</summary>"
        + table(["setting", "value"], flat, left=("setting", "value"))
        + "</details>",
    ]


def flattened(value, name: str = "") -> Iterable[list[str]]:
    """Rows of (name, value) of nested settings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield [name, str(value)]
