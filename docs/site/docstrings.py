"""Our docstrings as Markdown: `Layout:`, `Backward:`, `Sends:` and the like become a list, formulas stay as typed."""

import re

import griffe

LABELS = "Layout|Backward|Sends|Memory|Raises|Source|Returns"
LABELLED = re.compile(rf"^({LABELS}): (?=\S)(.*(?:\n(?!(?:{LABELS}|Args|Returns|Raises):|\s*$).*)*)", re.MULTILINE)


def as_markdown(text: str) -> str:
    """Labelled lines as items of a list, with formulas (`B*T*D`, `rows[slot][layer]`) safe from Markdown."""

    def item(found: re.Match) -> str:
        return f"\n- **{found[1]}:** " + " ".join(line.strip() for line in found[2].splitlines())

    parts = re.split(r"(`[^`]*`)", text)
    parts[::2] = [re.sub(r"[\[\]]|(?<=\w)\*(?=\w)", r"\\\g<0>", part) for part in parts[::2]]
    return LABELLED.sub(item, "".join(parts))


class OurDocstrings(griffe.Extension):
    def on_instance(self, *, obj: griffe.Object, **_) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)
