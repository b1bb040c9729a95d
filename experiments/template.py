"""The one template of every page that we write: nothing loaded from anywhere, light and dark, readable on a phone."""

from collections.abc import Iterable, Sequence
from html import escape

from jaxdist.errors import printable

from .charts import COLOURS, colour

MOST_TEXT = 300  # characters of anything that a file says

LIGHT, DARK = (" ".join(f"--{name}: {colours[theme]};" for name, colours in COLOURS.items()) for theme in (0, 1))
STYLE = f"""
:root {{ color-scheme: light dark; {LIGHT} }}
@media (prefers-color-scheme: dark) {{ :root {{ {DARK} }} }}"""
STYLE += """
body { background: var(--paper); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; max-width: 1000px;
  margin: 2em auto; padding: 0 1.2em; }
h1 { font-size: 1.5em; margin-bottom: 0.2em; } h2 { font-size: 1.15em; margin-top: 2em; }
h3 { font-size: 1em; margin: 1.6em 0 0.4em; } h1, h2, h3, li, p { overflow-wrap: anywhere; }
p.faint, li.faint, figcaption { color: var(--faint); font-size: 0.9em; }
table { border-collapse: collapse; font-size: 0.88em; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 0.3em 0.6em; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th.l, td.l { text-align: left; white-space: normal; } td.l { overflow-wrap: anywhere; min-width: 10em; }
td.l.short { overflow-wrap: normal; white-space: nowrap; min-width: 0; } td.l.long { min-width: 17em; }
.wide { overflow-x: auto; } .wide svg { min-width: 40em; }
pre { background: var(--card); padding: 0.8em 1em; border-radius: 6px; white-space: pre-wrap; word-break: break-word; }
.charts { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 22em), 1fr)); gap: 0.4em 1.6em; }
figure { margin: 0.6em 0; min-width: 0; }
svg { width: 100%; height: auto; display: block; } svg * { stroke-linejoin: round; }
svg text { fill: var(--ink); font: 11px system-ui, sans-serif; } svg text.faint { fill: var(--faint); }
.legend { display: flex; flex-wrap: wrap; gap: 0.2em 1.2em; font-size: 0.85em; }
.legend i { display: inline-block; width: 0.8em; height: 0.8em; margin-right: 0.4em; border-radius: 2px; }
.note { border-left: 4px solid var(--c2); background: var(--card); padding: 0.5em 0.9em; margin: 0.8em 0;
  border-radius: 4px; overflow-wrap: anywhere; } .note.bad { border-color: var(--mark); }
.note ul { margin: 0.3em 0; padding-left: 1.2em; }
.good { color: var(--c4); font-weight: 600; } .bad-text { color: var(--mark); font-weight: 600; }
summary { cursor: pointer; color: var(--faint); margin: 0.6em 0; }
@media (max-width: 480px) { body { padding: 0 0.8em; margin: 1em auto; } h1 { font-size: 1.25em; }
  .told thead { display: none; } .told tr { display: flex; flex-wrap: wrap; gap: 0 1em; padding: 0.5em 0;
  border-bottom: 1px solid var(--line); } .told td { border: 0; padding: 0; } .told td:empty { display: none; }
  .told td::before { content: attr(data-head) " "; color: var(--faint); } }
"""

Cell = str | tuple[str, str]  # text, or (HTML that is safe, its class)


def page(title: str, parts: Iterable[str]) -> str:
    """The whole page. title, parts: HTML."""
    body = "\n".join([f"<h1>{title}</h1>", *parts])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def text(value) -> str:
    """Anything from a file as HTML text: shortened, without what reorders or hides it, escaped."""
    shown = printable(str(value)[: MOST_TEXT + 1])
    return escape(shown[:MOST_TEXT] + "…" if len(shown) > MOST_TEXT else shown)


def table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], left: Iterable[str] = (), told: bool = False) -> str:
    """A table that scrolls within itself, or with `told` is a list of named cells on a phone. left: the columns of
    words. Cells of text are escaped."""
    sides = ["l" if head in left else "" for head in heads]

    def cell(tag: str, value: Cell, side: str, head: str) -> str:
        shown, kind = (text(value), "") if isinstance(value, str) else value
        kind = " ".join(filter(None, (side, kind)))
        attributes = f' class="{kind}"' * bool(kind) + f' data-head="{text(head)}"' * (told and tag == "td")
        return f"<{tag}{attributes}>{shown}</{tag}>"

    top, *body = (
        "".join(cell(tag, *each) for each in zip(row, sides, heads, strict=True))
        for tag, row in [("th", heads), *(("td", row) for row in rows)]
    )
    lines = "".join(f"<tr>{line}</tr>" for line in body)
    opened = f'<div class="{"told" if told else "wide"}">'
    return f"{opened}<table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>"


def listed(items: Iterable[str], kind: str = "") -> str:
    """items: HTML."""
    opening = f'<li class="{kind}">' if kind else "<li>"
    return f"<ul>{''.join(f'{opening}{each}</li>' for each in items)}</ul>"


def note(sentences: Sequence[str], bad: bool = False) -> str:
    return f'<div class="note{" bad" * bad}">{listed(sentences)}</div>' if sentences else ""


def faint(sentences: str) -> str:
    return f'<p class="faint">{sentences}</p>'


def details(summary: str, inner: str) -> str:
    return f"<details><summary>{summary}</summary>{inner}</details>"


def figure(picture: str, caption: str = "", names: Sequence[str] = (), wide: bool = False) -> str:
    """caption: HTML. names: of the series, in the order of their colours."""
    inner = f'<div class="wide">{picture}</div>' if wide else picture
    marks = "".join(
        f'<span><i style="background:{colour(at)}"></i>{text(each)}</span>' for at, each in enumerate(names)
    )
    inner += f'<div class="legend">{marks}</div>' if names else ""
    return f"<figure>{inner}{f'<figcaption>{caption}</figcaption>' if caption else ''}</figure>"
