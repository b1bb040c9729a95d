"""A lab's page in `docs/labs`: prose written by hand, with parts that come from running the lab.

Blocks of Markdown between `<!-- lab: KIND NAME -->` and `<!-- end -->` are replaced whole:

| block | contents |
|---|---|
| `question` | the lab's question, in bold |
| `table NAME` | a table of the run |
| `break NAME` | checks that are red, with and without the thing that was removed |
| `code NAME` | a function or class of the lab, or of another module, `a.module.NAME` |
| `next` | tasks of the lab that `grade` judges, and the lab that follows |
| `course` | in `index.md`: every lab with its question and tasks |

In `<details class="guess">`, a question whose answer is folded away, only the number is replaced. The site adds a box
to guess in.
"""

import ast
import importlib.util
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import unescape
from pathlib import Path

from jaxdist.commands import import_root
from jaxdist.files import write_whole

from . import COURSE, find_lab
from .lab import Lab, Result, Table, shown

BLOCK = re.compile(r"(<!-- lab: ([a-z]+)(?: ([\w.-]+))? -->\n).*?(<!-- end -->)", re.DOTALL)
GUESS = re.compile(
    r'<details class="guess" data-answer="(?P<answer>[^"]*)" data-within="(?P<within>[^"]*)">\s*'
    r"<summary>(?P<question>.*?) \((?P<unit>[^()]*); <code>(?P<key>[\w-]+)</code>\)</summary>\s*"
    r"<p>(?P<told>.*?)</p>\s*</details>",
    re.DOTALL,
)
REMOVED = r"^Removed: ((?:.+\n)+)\n<!-- lab: break {} -->"
DRAWN = "drawn"
BAR = "\\|"
SHOWN = 5  # red checks of a break
SECTIONS = (
    "Predict first",
    "Run it",
    "Break it",
    "What it saves, what it costs",
    "In the code, here and elsewhere",
    "Exercises",
    "Further reading",
)


@dataclass(frozen=True)
class Question:
    """One that a page asks: a number, right within a relative error. told: the answer, with a sentence on why."""

    text: str
    unit: str
    answer: float
    within: float
    told: str

    def accepts(self, guess: float) -> bool:
        return abs(guess - self.answer) <= self.within * abs(self.answer) + 1e-12

    @property
    def hint(self) -> str:
        """Why the answer is what it is; empty where that says the number."""
        why = self.told.partition(": ")[2]
        return "" if shown(self.answer) in re.findall(r"[\d.,]*\d", why) else why


def page_of(lab: str) -> str:
    """The text of the lab's page; empty where the pages are not installed."""
    path = import_root() / "docs/labs" / f"{lab}.md"
    return path.read_text(encoding="utf-8") if path.exists() else ""


def questions_of(page: str) -> dict[str, Question]:
    """By key."""
    return {
        found["key"]: Question(
            plain(found["question"]),
            found["unit"],
            float(found["answer"]),
            float(found["within"]),
            plain(found["told"]),
        )
        for found in GUESS.finditer(page)
    }


def removed_by(page: str, name: str) -> str:
    """What the page says that a break removes."""
    found = re.search(REMOVED.format(name), page, re.MULTILINE)
    return plain(found[1]) if found else ""


def plain(text: str) -> str:
    return unescape(" ".join(text.split()))


def filled(page: str, blocks: Mapping[tuple[str, str], str], answers: Mapping[str, float]) -> str:
    """The page with its blocks and answers replaced. Raises: KeyError for one that the lab does not have."""
    page = BLOCK.sub(lambda found: f"{found[1]}\n{blocks[found[2], found[3] or '']}\n\n{found[4]}", page)
    return GUESS.sub(lambda found: answered(found, answers[found["key"]]), page)


def answered(found: re.Match, answer: float) -> str:
    """A question with this answer: the text after the number's colon stays."""
    unit = "" if found["unit"] == "a number" else found["unit"]
    told = f"{shown(answer, unit)}: {found['told'].partition(': ')[2]}"
    text = found[0].replace(f"<p>{found['told']}</p>", f"<p>{told}</p>")
    return text.replace(f'data-answer="{found["answer"]}"', f'data-answer="{answer!r}"')


def blocks_of(lab: Lab, whole: Result, broken: Mapping[str, Result]) -> dict[tuple[str, str], str]:
    """(kind, name) -> Markdown of everything that the lab's page may have."""
    blocks = {("question", ""): f"**{lab.question}**", ("next", ""): next_text(lab)} | {
        ("table", table.name): table_text(table) for table in whole.tables
    }
    return blocks | {("break", name): break_text(whole, result) for name, result in broken.items()}


def code_on(lab: Lab, page: str) -> dict[tuple[str, str], str]:
    """(kind, name) -> Markdown of the code that the page shows, as it is in the source now."""
    names = [found[3] for found in BLOCK.finditer(page) if found[2] == "code"]
    return {("code", name): f"```py\n{source_of(lab, name)}\n```" for name in names}


def source_of(lab: Lab, name: str) -> str:
    """The text of a function or class with its decorators. Raises: StopIteration where the module has none such."""
    module, _, short = name.rpartition(".")
    path = importlib.util.find_spec(module or f"{__package__}.{lab.name.replace('-', '_')}").origin
    text = Path(path).read_text(encoding="utf-8")
    defined = (node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef | ast.ClassDef))
    node = next(node for node in defined if node.name == short)
    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])


def tasks_of(lab: Lab) -> str:
    from .tasks import TASKS

    return ", ".join(f"`{name}`" for name, task in TASKS.items() if task.lab == lab.name)


def next_text(lab: Lab) -> str:
    """What to do after a lab."""
    tasks, after = tasks_of(lab), COURSE.index(lab.name) + 1
    write = f"python -m experiments.labs grade --template {lab.name} > my.py"
    yourself = f"Write it yourself: `{write}` begins {tasks}; `grade my.py` judges it. " if tasks else ""
    if after == len(COURSE):
        return yourself + "Next: a run of your own, [planned](../plan.md) and [trained](../train.md)."
    following = find_lab(COURSE[after])
    return yourself + f"Next: [{following.title}]({following.name}.md)."


def course_text(labs: list[Lab]) -> str:
    rows = [[f"[{n}. {lab.title}]({lab.name}.md)", lab.question, tasks_of(lab)] for n, lab in numbered(labs)]
    return table_text(Table("course", ["lab", "question", "write it yourself"], rows))


def numbered(labs: list[Lab]) -> Iterator[tuple[int, Lab]]:
    return enumerate(labs, 1)


def table_text(table: Table) -> str:
    def line(cells) -> str:
        return f"| {' | '.join(cell.replace('|', BAR).replace('<', '&lt;') for cell in cells)} |"

    rule = ["---" if title in {*table.words, table.titles[0]} else "--:" for title in table.titles]
    text = "\n".join([line(table.titles), line(rule), *map(line, table.rows)])
    return text + "\n\nTimes of the machine that made this page; yours differ." * table.clocked


def break_text(whole: Result, result: Result) -> str:
    """The first few checks that are red; the command prints all."""
    before = {check.name: check.found for check in whole.checks}
    rows = [[check.name, before[check.name], check.found] for check in result.checks if not check.ok]
    more = f" The first {SHOWN} are shown." * (len(rows) > SHOWN)
    counts = f"Red: {len(rows)} of {len(result.checks)} checks.{more}"
    return table_text(Table("break", ["red", "as it should be", "broken"], rows[:SHOWN])) + f"\n\n{counts}"


def file_name(lab: Lab, picture: str) -> str:
    return f"{lab.name}-{picture}.svg"


def draw(lab: Lab, result: Result, folder: Path) -> list[Path]:
    """Write the pictures; the same bytes every time. Raises: OSError."""
    paths = []
    for name, make in result.pictures.items():
        paths.append(folder / file_name(lab, name))
        write_whole(paths[-1], make().encode())
    return paths
