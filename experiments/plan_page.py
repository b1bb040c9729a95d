"""The plan as one HTML page: pictures drawn by hand as inline SVG, nothing loaded from anywhere, light and dark."""

from html import escape
from math import log

from jaxdist.parallel.remat import shorten
from jaxdist.plan.explain import NAMES_OF_TERMS, gib
from jaxdist.plan.hardware import GIB
from jaxdist.runtime.budget import short_money

TIMES = {
    "compute": "matmuls",
    "memory": "memory traffic",
    "tp": "tp",
    "cp": "cp",
    "ep": "exchange of tokens",
    "dp": "dp",
    "pp": "pp messages",
    "bubble": "bubble",
    "overhead": "host",
    "input": "input",
}
BAR, ROW, WIDTH = 20, 48, 960

STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --faint: #5f6670; --line: #d4d7dc; --paper: #ffffff;
  --card: #f5f6f8; --c0: #3f6fb5; --c1: #7fa6d9; --c2: #b08a2e; --c3: #c9682b; --c4: #4f8f62; --c5: #8b7bb8;
  --c6: #b3545e; --c7: #7a7f87; --c8: #a9adb3; --mark: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8eb; --faint: #9aa1ab; --line: #3a3f47; --paper: #16181c;
  --card: #1f2227; --c0: #6b9ae0; --c1: #3f6799; --c2: #cfa84a; --c3: #e08a4f; --c4: #6fb385; --c5: #a999d6;
  --c6: #d4747e; --c7: #8b919a; --c8: #646a73; --mark: #ff8a80; } }
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1000px;
  margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
p.faint, li.faint, figcaption { color: var(--faint); font-size: 0.9em; }
table { border-collapse: collapse; font-size: 0.88em; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3em 0.6em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.l, td.l { text-align: left; } tbody tr:first-child { font-weight: 600; }
.wide { overflow-x: auto; }
pre { background: var(--card); padding: 0.8em 1em; border-radius: 6px; white-space: pre-wrap; word-break: break-word; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui, sans-serif; }
svg text.faint { fill: var(--faint); } figure { margin: 1em 0; }
.legend { display: flex; flex-wrap: wrap; gap: 0.2em 1.2em; font-size: 0.85em; }
.legend i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; border-radius: 2px; }
"""


def page(record: dict) -> str:
    """The whole page, from the same record as the JSON."""
    model = record["model"]
    best = record["rows"][0]
    title = (
        f"{model['num_layers']} layers × {model['width']} on {record['nodes']} × "
        f"{record['devices'] // record['nodes']} {record['hardware'].upper()}"
    )
    counted = (
        f"{record['num_layouts']:,} layouts, {record['num_fitting']:,} fit; the best of each mesh is shown."
        if record["num_layouts"] > 1
        else "One layout."
    )
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="faint">{escape(record["title"])}; context {model["seq_len"]}, {record["batch_size"]} sequences an '
        f"update, {record['dtype']}, {record['optimizer']}. {counted} Everything is predicted; nothing was run.</p>",
        f"<p><b>{escape(best['mesh'])}, ZeRO {best['zero']}</b>: {span(best)} a step, {best['mfu']:.0%} MFU, "
        f"{gib(best['memory_bytes'])} a device. {escape(' '.join(record['run']))}</p>",
        *command_part(record),
        "<h2>Why</h2>",
        "<ul>" + "".join(f"<li>{escape(sentence)}</li>" for sentence in record["sentences"]) + "</ul>",
        "<h2>Layouts</h2>",
        table(record["rows"]),
        *(["<h2>Batches</h2>", table(record["batches"], batches=True)] if record["batches"] else []),
        "<h2>Memory of a device</h2>",
        memory_bars(record),
        "<h2>Time of a step</h2>",
        time_bars(record),
    ]
    if len(record["front"]) > 1:
        parts += ["<h2>Memory against time</h2>", scatter(record)]
    parts += [
        "<h2>What this rests on</h2>",
        "<ul>" + "".join(f"<li>{escape(text)}</li>" for text in [*record["notes"], *record["assumptions"]]),
        *(f"<li>Link {name} a node: {escape(quoted)}.</li>" for name, quoted in record["links"].items()),
        "</ul>",
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" '
        f'content="width=device-width"><title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n'
        + "\n".join(parts)
        + "\n</body></html>\n"
    )


def span(row: dict) -> str:
    step, error = row["step_seconds"], row["error"]
    return f"{step:.3g} s (± {error:.0%}: {step * (1 - error):.3g} to {step * (1 + error):.3g} s)"


def command_part(record: dict) -> list[str]:
    """The command and where its numbers are from; nothing for a layout that does not fit."""
    if record["command"] is None:
        return []
    notes = "".join(f'<li class="faint">{escape(note)}</li>' for note in record["command_notes"])
    return [f"<pre>{escape(record['command'])}</pre>", f"<ul>{notes}</ul>"]


def sp_word(row: dict) -> str:
    """ "rings" where sp's messages over tp go in rings."""
    return "" if not row["sp"] else "yes" if row["tp_ring"] == "none" else "rings"


def label(row: dict) -> str:
    """A layout in a few words."""
    words = [row["mesh"], *([row["cp_kind"]] if row["cp_kind"] else []), f"Z{row['zero']}"]
    words += ["sp"] * row["sp"] + ["rings"] * (row["tp_ring"] != "none") + ["overlap"] * row["overlap"]
    words += [shorten(row["remat"])] * (row["remat"] != "none")
    words += [row["schedule"]] * (row["schedule"] is not None)
    return " ".join(words)


def table(rows: list[dict], batches: bool = False) -> str:
    """batches: the rows are of different ones."""
    money = rows[0]["dollars"] is not None
    heads = (
        ["sequences", "tokens/s"] * batches
        + ["mesh", "ZeRO", "sp", "remat", "pipeline", "micro-batch", "step", "±", "MFU", "GiB"]
        + ["cost"] * money
    )
    left = {"mesh", "remat", "pipeline"}
    lines = ["".join(f"<th{' class=l' * (head in left)}>{head}</th>" for head in heads)]
    for row in rows:
        pipeline = f"{row['schedule']}, {row['chunks']} chunks, {row['microbatches']}" if row["schedule"] else ""
        pipeline += f", {row['stages']}" if row["stages"] not in (None, "even") else ""
        others = ", ".join(other["mesh"] for other in row["also"])
        cells = [
            *([f"{row['batch_size']:,}", f"{row['tokens_per_second']:,.0f}"] if batches else []),
            row["mesh"] + (f" {row['cp_kind']}" if row["cp_kind"] else "") + (f" (or {others})" if others else ""),
            f"{row['zero']}{' kept' * row['keep']}{' overlap' * row['overlap']}",
            sp_word(row),
            shorten(row["remat"]),
            pipeline,
            f"{row['rows']} × {row['accumulate'] * row['microbatches']}",
            f"{row['step_seconds']:.3g} s",
            f"{row['error']:.0%}",
            f"{row['mfu']:.0%}",
            f"{row['memory_bytes'] / GIB:.1f}",
            *([short_money(row["dollars"])] if money else []),
        ]
        lines.append(
            "".join(
                f"<td{' class=l' * (head in left)}>{escape(cell)}</td>" for head, cell in zip(heads, cells, strict=True)
            )
        )
    body = "".join(f"<tr>{line}</tr>" for line in lines[1:])
    return f'<div class="wide"><table><thead><tr>{lines[0]}</tr></thead><tbody>{body}</tbody></table></div>'


def memory_bars(record: dict) -> str:
    rows = record["rows"]
    values = [{name: row["memory"][name] / GIB for name in NAMES_OF_TERMS} for row in rows]
    marks = {"usable": record["usable_bytes"] / GIB, "capacity": record["capacity_bytes"] / GIB}
    ends = [gib(row["memory_bytes"]) for row in rows]
    return bars(rows, values, ends, NAMES_OF_TERMS, marks, "GiB")


def time_bars(record: dict) -> str:
    rows = record["rows"]
    ends = [f"{row['step_seconds']:.3g} s ± {row['error']:.0%}" for row in rows]
    shares = [{name: row["time"][name] for name in TIMES} for row in rows]
    errors = [(row["step_seconds"] * (1 - row["error"]), row["step_seconds"] * (1 + row["error"])) for row in rows]
    return bars(rows, shares, ends, TIMES, {}, "s", errors)


def bars(rows, values, ends, names, marks, unit, errors=()) -> str:
    """Stacked bars, one a layout: its words above the bar; an error bar where there is one, marks over all."""
    shown = [name for name in names if any(value[name] > 0.002 * sum(value.values()) for value in values)]
    colours = {name: f"var(--c{index})" for index, name in enumerate(names)}
    most = max([sum(value.values()) for value in values] + list(marks.values()) + [high for _, high in errors])
    room = WIDTH - (110 if marks else 20)
    scale = room / most
    height = len(rows) * ROW + 50
    out = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img">']
    for number, (row, value, end) in enumerate(zip(rows, values, ends, strict=True)):
        top = number * ROW + 26
        words = f'{escape(label(row))}: <tspan font-weight="600">{escape(end)}</tspan>'
        out.append(f'<text x="0" y="{top - 5}">{words}</text>')
        x = 0.0
        for name in shown:
            width = value[name] * scale
            if width > 0:
                out.append(
                    f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" fill="{colours[name]}">'
                    f"<title>{names[name]} {value[name]:.3g} {unit}</title></rect>"
                )
            x += width
        if errors:
            low, high = (edge * scale for edge in errors[number])
            middle = top + BAR / 2
            out.append(
                f'<path d="M{low:.1f} {middle}H{high:.1f}M{low:.1f} {middle - 5}v10M{high:.1f} {middle - 5}v10" '
                f'stroke="var(--ink)" fill="none"/>'
            )
    for name, at in marks.items():
        x = at * scale
        anchor = "start" if name == "capacity" else "end"
        shift = 4 if name == "capacity" else -4
        dash = "" if name == "capacity" else ' stroke-dasharray="4 3"'
        out.append(
            f'<path d="M{x:.1f} 6V{height - 24}" stroke="var(--mark)"{dash} fill="none"/>'
            f'<text class="faint" x="{x + shift:.1f}" y="{height - 10}" text-anchor="{anchor}">'
            f"{name} {at:.0f} {unit}</text>"
        )
    legend = "".join(f'<span><i style="background:{colours[name]}"></i>{names[name]}</span>' for name in shown)
    return f'<figure>{"".join(out)}</svg><div class="legend">{legend}</div></figure>'


def scatter(record: dict) -> str:
    """Memory against time; a point a layout that no other beats, its size the devices it needs."""
    points, best = record["front"], record["rows"][0]
    width, height, left, bottom = WIDTH, 380, 70, 46
    times = [p["step_seconds"] for p in points] + [best["step_seconds"]]
    low, high = min(times) * 0.9, max(times) * 1.1
    most = record["usable_bytes"] / GIB

    def place(row):
        x = left + (row["memory_bytes"] / GIB) / most * (width - left - 40)
        # Logarithmic: clusters of different sizes differ by factors.
        y = 14 + (1 - log(row["step_seconds"] / low) / log(high / low)) * (height - bottom - 14)
        return x, y

    out = [f'<svg viewBox="0 0 {width} {height}" role="img">']
    out.append(f'<path d="M{left} 8V{height - bottom}H{width - 20}" stroke="var(--faint)" fill="none"/>')
    for part in range(0, 5):
        value = most * part / 4
        x = left + part / 4 * (width - left - 40)
        out.append(f'<text class="faint" x="{x:.0f}" y="{height - 28}" text-anchor="middle">{value:.0f}</text>')
    for part in range(0, 5):
        value = low * (high / low) ** (part / 4)
        y = 14 + (1 - part / 4) * (height - bottom - 14)
        out.append(f'<text class="faint" x="{left - 8}" y="{y + 4:.0f}" text-anchor="end">{value:.3g} s</text>')
        out.append(f'<path d="M{left} {y:.0f}H{width - 20}" stroke="var(--line)" fill="none"/>')
    nodes = sorted({p["nodes"] for p in points})
    colours = {n: f"var(--c{(0, 3, 4, 5, 6, 2, 1, 7, 8)[min(index, 8)]})" for index, n in enumerate(nodes)}
    for p in points:
        x, y = place(p)
        colour = colours[p["nodes"]]
        words = f"{p['nodes']} nodes: {label(p)}, {p['step_seconds']:.3g} s, {gib(p['memory_bytes'])}"
        out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="{colour}"><title>{escape(words)}</title></circle>')
    x, y = place(best)
    out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="9" fill="none" stroke="var(--mark)" stroke-width="2"/>')
    middle = (left + width) / 2
    out.append(f'<text class="faint" x="{middle:.0f}" y="{height - 8}" text-anchor="middle">GiB a device</text>')
    legend = "".join(
        f'<span><i style="background:{colour}"></i>{n} node{"s" * (n > 1)}</span>' for n, colour in colours.items()
    )
    return (
        f'<figure>{"".join(out)}</svg><div class="legend">{legend}</div><figcaption>Layouts that no other beats in '
        "memory, time and device-hours at once, on this cluster and on halves of it; ringed: the best. Point at one to "
        "read it.</figcaption></figure>"
    )
