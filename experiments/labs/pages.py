"""What a lab's page has from running it: blocks of Markdown between `<!-- lab: KIND NAME -->` and `<!-- end -->`.

| block | contents |
|---|---|
| `question` | the question, in bold |
| `table NAME` | a table of the run |
| `picture NAME` | the picture, in `drawn/` beside the page |
| `checks` | every check of the run |
| `guess KEY` | a question with its answer folded away; the site adds a box to guess in |
| `break NAME` | what is removed, and each check with it and without it |
| `course` | of `index.md`: every lab with its question |
"""

import io
import re
from collections.abc import Iterator, Mapping
from html import escape, unescape
from pathlib import Path

from jaxdist.files import write_whole

from .drawing import STYLE
from .lab import Break, Guess, Lab, Picture, Result, Table

BLOCK = re.compile(r"(<!-- lab: ([a-z]+)(?: ([\w-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
GUESS = re.compile(
    r'<details class="guess" data-answer="([^"]*)" data-within="([^"]*)">'
    r"<summary>(.*?) \(([^()]*); <code>([\w-]+)</code>\)</summary><p>(.*?)</p>"
)
DRAWN = "drawn"
BAR = "\\|"
SECTIONS = (
    "Predict first",
    "Run it",
    "Break it",
    "What it saves, what it costs",
    "In the code, here and elsewhere",
    "Exercises",
    "Further reading",
)


def filled(text: str, blocks: Mapping[tuple[str, str], str]) -> str:
    """The page with its blocks replaced. Raises: KeyError for a block that the lab does not have."""
    return BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2], found[3] or '']}\n\n{found[4]}", text)


def blocks_of(lab: Lab, whole: Result, broken: Mapping[str, Result]) -> dict[tuple[str, str], str]:
    """(kind, name) -> Markdown of everything that the lab's page may have."""
    blocks = {("question", ""): f"**{lab.question}**", ("checks", ""): checks_text(whole)}
    blocks |= {("table", table.name): table_text(table) for table in whole.tables}
    blocks |= {("picture", each.name): f"![{each.about}]({DRAWN}/{file_name(lab, each)})" for each in whole.pictures}
    blocks |= {("guess", guess.key): guess_text(guess) for guess in whole.guesses}
    return blocks | {("break", name): break_text(lab.by_name[name], whole, each) for name, each in broken.items()}


def course_text(labs: list[Lab]) -> str:
    rows = [[f"[{n}. {lab.title}]({lab.name}.md)", lab.question] for n, lab in numbered(labs)]
    return table_text(Table("course", ["lab", "question"], rows))


def numbered(labs: list[Lab]) -> Iterator[tuple[int, Lab]]:
    return enumerate(labs, 1)


def table_text(table: Table) -> str:
    def line(cells) -> str:
        return f"| {' | '.join(cell.replace('|', BAR).replace('<', '&lt;') for cell in cells)} |"

    rule = ["---" if title in {*table.words, table.titles[0]} else "--:" for title in table.titles]
    text = "\n".join([line(table.titles), line(rule), *map(line, table.rows)])
    return text + "\n\nTimes of the machine that made this page; yours differ." * table.clocked


def checks_text(result: Result) -> str:
    rows = [[check.name, check.found, check.expected] for check in result.checks]
    return table_text(Table("checks", ["check", "found", "expected"], rows))


def break_text(broken: Break, whole: Result, result: Result) -> str:
    before = {check.name: check for check in whole.checks}
    rows = [[c.name, before[c.name].found, c.found, "passes" if c.ok else "**red**"] for c in result.checks]
    table = table_text(Table("break", ["check", "as it should be", "broken", "verdict"], rows))
    return f"Removed: {broken.removes}.\n\n{table}\n\nWithout these checks: {broken.how_silent}."


def guess_text(guess: Guess) -> str:
    data = f'data-answer="{guess.answer!r}" data-within="{guess.within!r}"'
    return (
        f'<details class="guess" {data}><summary>{escape(guess.question)} ({escape(guess.unit or "a number")}; '
        f"<code>{guess.key}</code>)</summary><p>{escape(guess.told)}</p></details>"
    )


def guesses_of(text: str) -> dict[str, Guess]:
    """The questions of a page, by key: what `guess_text` made of them."""
    found = {}
    for answer, within, question, unit, key, why in GUESS.findall(text):
        shown_unit = "" if unit == "a number" else unescape(unit)
        why = unescape(why).partition(": ")[2]
        found[key] = Guess(key, unescape(question), float(answer), shown_unit, why, float(within))
    return found


def file_name(lab: Lab, picture: Picture) -> str:
    return f"{lab.name}-{picture.name}{'-wide' * picture.wide}.svg"


def draw(lab: Lab, result: Result, folder: Path) -> list[Path]:
    """Write the pictures; the same bytes every time. Raises: OSError."""
    from matplotlib import rc_context

    paths = []
    for picture in result.pictures:
        path = folder / file_name(lab, picture)
        with rc_context({**STYLE, "svg.hashsalt": path.name}):
            drawn = io.BytesIO()
            picture.draw().savefig(drawn, format=path.suffix.removeprefix("."), metadata={"Date": None})
        write_whole(path, drawn.getvalue())
        paths.append(path)
    return paths
