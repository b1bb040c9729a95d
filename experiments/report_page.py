"""The report of runs as one HTML page. Whatever a run's files say is escaped, and shortened where it is long."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import islice

import numpy as np

from jaxdist.plan.explain import NAMES_OF_TERMS
from jaxdist.plan.verdict import judge, measured_parts
from jaxdist.runtime.run_record import Run
from jaxdist.runtime.telemetry import PARTS

from . import charts
from .charts import Bar, Line
from .report_predictions import Predictions
from .template import Cell, details, faint, figure, note, table, text
from .template import page as whole

MOST_POINTS = 3000  # of the curves of one chart together
MOST_ROWS = 400  # of a table of settings
MOST_DRAWN = 1500  # ticks x stages of a schedule that is drawn
UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


@dataclass(frozen=True)
class Verdict:
    """Parity of the run with one device, as far as it is known. ok: None where nobody has looked. text: a sentence."""

    ok: bool | None
    text: str
    command: str = ""

    @property
    def cell(self) -> tuple[str, str]:
        if self.ok is None:
            return "not verified", "short"
        return ("equal to one device", "good short") if self.ok else ("DIFFERS", "bad-text short")


@dataclass(frozen=True)
class Entry:
    """One run on the page, with all that was found out about it. why_not: why there are no predictions."""

    label: str
    run: Run
    predictions: Predictions | None
    why_not: str
    verdict: Verdict

    @property
    def simulated(self) -> bool:
        return self.run.config.get("simulated") is True


def page(entries: Sequence[Entry]) -> str:
    """The whole page."""
    title = f"Run report: {text(', '.join(entry.label for entry in entries))}"
    parts = [*_notes(entries), overview(entries), curves_part(entries)]
    return whole(title, [*parts, *(part for entry in entries for part in run_part(entry))])


def number(value: float | None, form: str = ".4f") -> str:
    return "–" if value is None or not np.isfinite(value) else format(value, form)


def in_bytes(count: float) -> str:
    unit = next((unit for unit, size in UNITS.items() if count >= 10 * size), None)
    return f"{count / UNITS[unit]:,.1f} {unit}" if unit else f"{count:,.0f} B"


def in_seconds(value: float | None) -> str:
    if value is None or not np.isfinite(value):
        return "–"
    return f"{value:.3g} s" if value >= 1 else f"{1000 * value:.3g} ms"


# ---------------------------------------------------------------------------------------------------------------------
# All runs together
# ---------------------------------------------------------------------------------------------------------------------


def _notes(entries: Sequence[Entry]) -> list[str]:
    found = []
    for entry in entries:
        found.append(note([f"<b>{text(entry.label)}</b>: {text(each)}." for each in entry.run.notes[:50]], bad=True))
    if simulated := [entry.label for entry in entries if entry.simulated]:
        names = "" if len(entries) == 1 else f" ({text(', '.join(simulated))})"
        about = (
            f"<b>Simulated devices{names}:</b> several devices took turns on one CPU. Losses, gradients, layouts and "
            "the messages of a step are what real devices would compute and send. Seconds and tokens per second are "
            "not: they say nothing of real devices, nor of which layout is faster."
        )
        found.append(note([about]))
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
            entry.verdict.cell,
        ])  # fmt: skip
    reasons = [
        f"{text(entry.label)} stopped: {text(entry.run.end.get('reason', 'it does not say why'))}"
        for entry in entries
        if entry.run.state == "stopped"
    ]
    under = faint("Losses in nats per token, of the newest step that has one.") + note(reasons, bad=True)
    return table(heads, rows, left=("run", "state", "mesh", "verdict")) + under


def mesh_text(entry: Entry) -> Cell:
    if entry.predictions is not None:
        return escape(str(entry.predictions.config.parallel.mesh)), "short"
    parallel = entry.run.config.get("parallel")
    mesh = parallel.get("mesh") if isinstance(parallel, dict) else None
    return ",".join(f"{k}={v}" for k, v in mesh.items() if v != 1) if isinstance(mesh, dict) else "–"


# Column -> the title of its chart, what is said under it, and whether it is logarithmic.
CURVES = {
    "loss": ("Loss, nats per token", "Thin: training, of each step's batch. With dots: held out.", False),
    "tokens_per_second": ("Throughput, tokens/s", "", False),
    "grad_norm": ("Norm of the whole gradient", "Before clipping; logarithmic.", True),
    "lr": ("Learning rate", "", False),
    "loss_scale": ("Loss scale (float16)", "", True),
}


def curves_part(entries: Sequence[Entry]) -> str:
    """Loss, throughput, gradient norm, learning rate and loss scale of all runs in one chart each."""
    names, shown, most = [entry.label for entry in entries], [], max(200, MOST_POINTS // len(entries))
    for name, (title, caption, log) in CURVES.items():
        lines = []
        for at, entry in enumerate(entries):
            for column in (name, "held_out_loss") if name == "loss" else (name,):
                held_out, found = column == "held_out_loss", entry.run.column(column)
                if found[1].size:
                    width = 0.8 if name == "loss" and not held_out else 1.6
                    lines.append(Line(*thin(*found, most), at, held_out, width, at))
        if lines:
            picture = charts.curves(lines, title, f"{title} of {', '.join(names)}"[:200], log)
            shown.append(figure(picture, caption, names if len(entries) > 1 else ()))
    return "<h2>Curves</h2>" + in_grid(*shown) if shown else ""


def in_grid(*figures: str) -> str:
    return f'<div class="charts">{"".join(figures)}</div>'


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


def run_part(entry: Entry) -> list[str]:
    parts = [f"<h2>{text(entry.label)}</h2>", *time_part(entry), *gradient_part(entry)]
    parts += ["<h3>Memory of a device</h3>", memory_part(entry)]
    if entry.predictions is None:
        parts.append(note([f"Nothing is predicted for this run. {text(entry.why_not)}"]))
    else:
        parts += ["<h3>What a step sends</h3>", *sent_part(entry.predictions)]
        parts += pipeline_part(entry)
    shown, kind = entry.verdict.cell
    command = f"<pre>{text(entry.verdict.command)}</pre>" if entry.verdict.command else ""
    parts.append(f'<h3>Verdict</h3><p><span class="{kind}">{shown}</span>: {text(entry.verdict.text)}</p>{command}')
    return [*parts, *settings_part(entry)]


def time_part(entry: Entry) -> list[str]:
    run, means = entry.run, entry.run.mean_seconds()
    if not means:
        return []
    named = [part for part in PARTS if part in means]
    total = sum(means[part] for part in named)
    pictures = _areas(entry, named) + _process_curves(entry) if run.steps.size else ""
    spread = run.spread_over_processes()
    heads, rows = ["part", "mean of a step", "share"], []
    heads += ["least process", "median", "most", "slowest process"] if spread else []
    for part in [*named, *(["total"] if "total" in means else [])]:
        share, more = f"{means[part] / total:.1%}" if total and part != "total" else "", []
        if found := spread.get(part):
            more = [*map(in_seconds, (found.least, found.median, found.most)), f"{found.process:g}"]
        rows.append([part, in_seconds(means[part]), share, *(more or ["–"] * 4 * bool(spread))])
    shown = table(heads, rows, left=("part",))
    beside = pictures and not spread  # a table of three columns is as narrow as a chart
    parts = ["<h3>Where the time of a step goes</h3>", in_grid(pictures, figure(shown) if beside else "")]
    parts += [] if beside else [shown]
    if laps := run.laps():
        found = judge(*measured_parts(laps), "what it is made of, no clock of a host can tell")
        parts.append(f"<p><b>{text(found.text[:1].upper() + found.text[1:])}.</b></p>")
    about = f"Over {run.steps.size:,} steps, by the clock of the first process's host."
    if spread:
        about += f" The last columns: the means of {len(run.processes)} processes beside each other."
    about += " <b>step</b>: from its start until its numbers are there. <b>host</b>: what no other part is about."
    return [*parts, faint(about)]


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
    title = "Seconds of a step by part"
    return figure(charts.areas(x, columns, top, title, f"{title}, {entry.label}"), caption, list(columns))


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
    x, names = np.array([step for step, _ in found]), ("least", "median", "most")
    columns = [np.array([getattr(spread, name) for _, spread in found]) for name in names]
    lines = [Line(*thin(x, column, 1000), at, True, dashes=at) for at, column in enumerate(columns)]
    title = "Seconds of a step over processes"
    slowest = statistics.mode(f"{spread.process:g}" for _, spread in found)
    caption = f"Means between two exchanges; most often the slowest: process {slowest}."
    return figure(charts.curves(lines, title, f"{title}, {entry.label}"), caption, names)


def gradient_part(entry: Entry) -> list[str]:
    groups, run = entry.run.grad_norms, entry.run
    if not groups:
        return []
    shown, lines, rows = dict(islice(groups.items(), len(charts.SERIES))), [], []
    for at, values in enumerate(shown.values()):
        there = np.isfinite(values)
        lines.append(Line(*thin(run.steps[there], values[there], max(200, MOST_POINTS // len(shown))), at))
    left_out = f" The other {len(groups) - len(shown)} groups are in the table." if len(groups) > len(shown) else ""
    title = "Gradient norm, before clipping"
    picture = charts.curves(lines, title, f"{title}, by group, {entry.label}", log=True)
    for name, values in groups.items():
        values = values[np.isfinite(values)]
        if values.size:
            figures = (values[0], np.median(values), values.max(), values[-1])
            rows.append([name, *(number(float(each), ".3g") for each in figures)])
    norms = figure(table(["group", "first", "median", "largest", "last"], rows, left=("group",)))
    drawn = figure(picture, f"Logarithmic.{left_out}", list(shown))
    return ["<h3>Gradient norm by group of parameters</h3>", in_grid(drawn, norms)]


def memory_part(entry: Entry) -> str:
    """The plan's terms beside what was compiled, and what allocators say."""
    rows: list[list[Cell]] = []
    predicted, parts = None if entry.predictions is None else entry.predictions.memory, []
    if predicted is not None:
        sizes = {NAMES_OF_TERMS[name]: value for name, value in predicted.terms.items()}
        rows += [[name, in_bytes(value), ""] for name, value in sizes.items()]
        rows.append(["predicted by the plan", in_bytes(predicted.total), ""])
        bar = Bar({name: value / 2**20 for name, value in sizes.items()})
        picture = charts.bars([bar], "Predicted, MiB of a device", "MiB", f"Predicted memory, {entry.label}")
        caption = f"Fullest in {escape(predicted.fullest)}; attention: {escape(predicted.attention)}."
        parts.append(figure(picture, caption, list(sizes)))

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
        why = "simulated devices share the host's memory and have no allocator" if entry.simulated else "not recorded"
        rows.append(["allocator", "–", why])
    parts.append(figure(table(["of one device", "bytes", ""], rows, left=("of one device", ""))))
    if len(memory) > 1:
        cells = ([str(m.rank), in_bytes(m.in_use), in_bytes(m.peak), in_bytes(m.limit)] for m in memory[:64])
        parts.append(figure(table(["rank", "in use", "peak", "limit"], cells)))
    return in_grid(*parts)


def sent_part(found: Predictions) -> list[str]:
    """The messages of a step, by purpose."""
    if not found.sent:
        return ["<p>Nothing: there is one device.</p>"]
    left = ("purpose", "collective", "axes")
    rows = [
        [row.purpose, row.kind.replace("_", "-"), row.axes, f"{row.count:,}", in_bytes(row.sent_bytes)]
        for row in found.sent
    ]
    about = (
        "Of one device, in one step, by the plan's closed form; where stages differ, of the stage that sends most. "
        "<code>plan --trace</code> counts the same in the program."
    )
    return [table([*left, "messages", "bytes"], rows, left), faint(about)]


def pipeline_part(entry: Entry) -> list[str]:
    schedule = entry.predictions.config.parallel.pipeline
    if schedule is None:
        return []
    title = "<h3>The pipeline's schedule</h3>"
    layers = "+".join(map(str, entry.predictions.config.part_layers))
    about = (
        f"{escape(schedule.name)}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches, "
        f"{schedule.num_ticks} ticks; layers {layers}. Drawn from the table that runs, not from a measurement."
    )
    if schedule.num_ticks * schedule.num_stages > MOST_DRAWN:
        return [title, faint(f"{about} It is too large to be drawn here.")]
    picture = charts.schedule_picture(schedule, f"Schedule {schedule.name} of {entry.label}")
    return [title, figure(picture, about, wide=True)]


def settings_part(entry: Entry) -> list[str]:
    config = entry.run.config
    if not config:
        return []
    versions = config.get("versions")
    rows = [[name, str(value)] for name, value in islice(versions.items(), 50)] if isinstance(versions, dict) else []
    shown = "<p>The run does not say with which versions it was made.</p>"
    if rows:
        shown = table(["package", "version"], rows, left=("package", "version"))
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
        details("Every setting", table(["setting", "value"], flat, left=("setting", "value"))),
    ]


def flattened(value, name: str = "") -> Iterable[list[str]]:
    """Rows of (name, value) of nested settings."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from flattened(inner, f"{name}.{key}" if name else str(key))
    else:
        yield [name, str(value)]
