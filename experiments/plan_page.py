"""The plan as one HTML page."""

from html import escape

from jaxdist.plan.explain import NAMES_OF_TERMS, gib
from jaxdist.plan.hardware import GIB

from . import charts
from .charts import Bar, Point
from .plan_report import LEFT, TIMES, columns_of, layout_words
from .template import faint, figure, listed, table
from .template import page as whole


def page(record: dict) -> str:
    """The whole page, from the same record as the JSON."""
    model, best, rows = record["model"], record["rows"][0], record["rows"]
    model = model.get("base", model)  # of adapters
    title = (
        f"{model['num_layers']} layers × {model['width']} on {record['nodes']} × "
        f"{record['devices'] // record['nodes']} {record['hardware'].upper()}"
    )
    counted = "One layout."
    if record["num_layouts"] > 1:
        counted = f"{record['num_layouts']:,} layouts, {record['num_fitting']:,} fit."
    step, error = best["step_seconds"], best["error"]
    links = [f"Link {name} a node: {quoted}." for name, quoted in record["links"].items()]
    parts = [
        faint(
            f"{escape(record['title'])}; context {model['seq_len']}, {record['batch_size']} sequences an update, "
            f"{record['dtype']}, {record['optimizer']}. {counted} Everything is predicted; nothing was run."
        ),
        f"<p><b>{escape(best['mesh'])}, ZeRO {best['zero']}</b>: {step:.3g} s (± {error:.0%}: {step * (1 - error):.3g} "
        f"to {step * (1 + error):.3g} s) a step, {best['mfu']:.0%} MFU, {gib(best['memory_bytes'])} a device. "
        f"{escape(' '.join([*record['fastest'], *record['run']]))}</p>",
    ]
    if record["command"] is not None:
        notes = listed(map(escape, record["command_notes"]), "faint")
        parts.append(f"<pre>{escape(record['command'])}</pre>{notes}")
    parts += ["<h2>Why</h2>", listed(map(escape, record["sentences"])), "<h2>Layouts</h2>", layouts(rows)]
    for about, other in record["tables"].items():
        parts += [f"<h2>{escape(about)}</h2>", layouts(other)]
    parts += ["<h2>Memory of a device</h2>", memory_bars(record), "<h2>Time of a step</h2>", time_bars(rows)]
    if len(record["front"]) > 1:
        parts += ["<h2>Memory against time</h2>", front(record)]
    rests = listed(map(escape, [*record["notes"], *record["assumptions"], *links]))
    return whole(escape(title), [*parts, "<h2>What this rests on</h2>", rests])


def layouts(rows: list[dict]) -> str:
    columns = columns_of(rows)
    said = {title: cells for title, cells in columns.items() if any(cells)}
    said |= {title: [(escape(cell), "short") for cell in said[title]] for title in LEFT if title in said}
    return table(list(said), zip(*said.values(), strict=True), LEFT, told=True)


def memory_bars(record: dict) -> str:
    ends = [gib(row["memory_bytes"]) for row in record["rows"]]
    parts = [{name: size / GIB for name, size in row["memory"].items()} for row in record["rows"]]
    found = (("usable", record["usable_bytes"] / GIB), ("capacity", record["capacity_bytes"] / GIB))
    marks = {f"{name} {size:.0f} GiB": size for name, size in found}
    return stacked(record["rows"], parts, ends, NAMES_OF_TERMS, "GiB", marks)


def time_bars(rows: list[dict]) -> str:
    ends = [f"{row['step_seconds']:.3g} s ± {row['error']:.0%}" for row in rows]
    return stacked(rows, [row["time"] for row in rows], ends, TIMES, "s")


def stacked(
    rows: list[dict],
    values: list[dict],
    ends: list[str],
    names: dict[str, str],
    unit: str,
    marks: dict[str, float] | None = None,
) -> str:
    """A bar for each layout, of the parts that are worth a look; with its error, where no marks are drawn."""
    shown = [name for name in names if any(each[name] > 0.002 * sum(each.values()) for each in values)]
    found = []
    for row, each, end in zip(rows, values, ends, strict=True):
        step, error = row["step_seconds"], row["error"]
        span = None if marks else (step * (1 - error), step * (1 + error))
        found.append(Bar({names[name]: each[name] for name in shown}, (layout_words(row), end), span))
    picture = charts.bars(found, unit, unit, f"{unit} of each layout", marks, 2 * charts.WIDTH)
    return figure(picture, names=[names[name] for name in shown])


def front(record: dict) -> str:
    """Memory against time; a point a layout that no other beats."""

    def point(row: dict) -> Point:
        words = f"{layout_words(row)}, {row['step_seconds']:.3g} s, {gib(row['memory_bytes'])}"
        return Point(row["memory_bytes"] / GIB, row["step_seconds"], 0, words)

    points, most = list(map(point, record["front"])), record["usable_bytes"] / GIB
    picture = charts.scatter(points, point(record["rows"][0]), most, "s a step", "GiB a device", "Memory against time")
    caption = "Layouts that no other beats in memory and time; ringed: the planned one. Point at one to read it."
    return figure(picture, caption)
