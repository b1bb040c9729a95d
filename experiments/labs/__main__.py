"""The labs: a course in distributed training, each question answered by a program that can be broken on purpose.

python -m experiments.labs                                  # what there is
python -m experiments.labs memory                           # one lab: its tables, and every check of them
python -m experiments.labs memory --break NAME              # the same without the one thing that matters
python -m experiments.labs grade my.py                      # judge functions that you wrote; --template NAME begins one
python -m experiments.labs --all                            # every lab and every break; makes the site's pages anew
python -m experiments.labs --notebooks FOLDER               # the pages as Jupyter notebooks

A lab ends with exit code 0 if every check passed; with --break, if exactly the checks that the page names failed.
"""

import importlib.util
import math
import subprocess
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.text import Text

from jaxdist.commands import command_text, command_words, import_root, install_text
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole

from ..entry import make_folder, run_program
from ..tables import Rows
from . import COURSE, find_lab, pages
from .lab import Check, Lab, Result
from .notebooks import write_notebooks
from .pages import Question

LIST_WIDTH = 80  # characters


@dataclass(frozen=True)
class LabsFlags:
    """Run a lab of the course, whole or broken; without a name, list them."""

    name: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """The lab, as the list names it."""
    break_: Annotated[str | None, tyro.conf.arg(name="break")] = None
    """Remove one thing that matters, and see which checks notice."""
    answer: tuple[str, ...] = ()
    """KEY=NUMBER: what you think the answer to a question of the lab is."""
    out: str | None = None
    """Draw the lab's pictures in this folder, and fill the page NAME.md in it, if there is one."""
    all: bool = False
    """Every lab and every break, each in a process of its own; --out is docs/labs unless given."""
    notebooks: str | None = None
    """Write the pages as Jupyter notebooks in this folder; nothing is run."""


def main(flags: LabsFlags, console: Console) -> int:
    require_one_task(flags)
    if flags.notebooks is not None:
        return make_notebooks(flags, console)
    if flags.all:
        return run_all(flags, console)
    if not flags.name:
        list_course(console)
        return 0
    name = chosen_name(flags)
    answers = [parse_answer(text) for text in flags.answer]
    folder = drawing_folder(flags.out)
    page = pages.page_of(name)
    if answers:  # judged by the page alone: a lab imports JAX
        our_pages("--answer")
        return judge(name, pages.questions_of(page), answers, console)
    from jaxdist.runtime.devices import acquire_devices

    lab = chosen_lab(name, flags.break_)
    acquire_devices(lab.devices, "cpu")
    console.print(Text(f"{COURSE.index(lab.name) + 1}. {lab.title}", "bold"))
    console.print(Text(lab.question + "\n"))
    if flags.break_ is not None:
        return run_broken(lab, flags.break_, pages.removed_by(page, flags.break_), console)
    with console.status("running"):
        result = lab.run(None)
    show(result, pages.questions_of(page), console)
    caught = folder is None or fill_page(lab, result, folder, console)
    return 0 if caught and not result.red else 1


# ------------------------------------------------------------------------------------------------ what was asked for


def require_one_task(flags: LabsFlags) -> None:
    """Raises: ConfigError for flags that do not go together."""
    of_a_lab = {"--break": flags.break_, "--answer": flags.answer, "--out": flags.out}
    values = of_a_lab | {"--all": flags.all, "--notebooks": flags.notebooks}
    given = [flag for flag, value in values.items() if value not in (None, (), False)]
    if len(given) > 1 and given != ["--out", "--all"]:
        raise ConfigError(" with ".join(given), "must be one at a time", f"Leave out {', '.join(given[1:])}")
    if given and flags.name and given[-1] not in of_a_lab:
        raise ConfigError(given[-1], "must come without a name: it makes every page", "Leave out the name")
    if given and not flags.name and given[-1] in of_a_lab:
        raise ConfigError(given[-1], "must be of one lab", f"Use {command_text('labs')} NAME {given[-1]} ...")


def list_course(console: Console) -> None:
    indent = 4 + max(map(len, COURSE)) + 2
    for number, lab in pages.numbered([find_lab(name) for name in COURSE]):
        start = f"{number:2}  {lab.name}".ljust(indent)
        for line in textwrap.wrap(lab.question, LIST_WIDTH, initial_indent=start, subsequent_indent=" " * indent):
            console.print(Text(line))
        console.print(Text(f"{' ' * indent}--break {', '.join(lab.breaks)}", "dim"))
    console.print(f"\n{command_text('labs')} NAME runs one; docs/labs has a page for each.", markup=False)


def chosen_name(flags: LabsFlags) -> str:
    if len(flags.name) > 1:
        raise ConfigError(f"{len(flags.name)} labs", "must be one at a time", "Name one, or use --all")
    (name,) = flags.name
    if name not in COURSE:
        raise ConfigError(f"lab {name!r}", f"must be one of {', '.join(COURSE)}", "Use one of them")
    return name


def chosen_lab(name: str, without: str | None) -> Lab:
    lab = find_lab(name)
    if without is not None and without not in lab.breaks:
        known = ", ".join(lab.breaks)
        raise ConfigError(f"--break {without}", f"must be a break of {name}: {known}", "Use one of them")
    return lab


def parse_answer(text: str) -> tuple[str, float]:
    key, _, number = text.partition("=")
    try:
        value = float(number.replace(",", ""))
    except ValueError:
        value = math.nan
    if math.isfinite(value):
        return key, value
    raise ConfigError(f"--answer {text!r}", "must be KEY=NUMBER", "Use --answer bytes=16, say")


def drawing_folder(out: str | None) -> Path | None:
    if out is not None:
        make_folder("--out", str(Path(out, pages.DRAWN)))
    return make_folder("--out", out)


def our_pages(flag: str) -> Path:
    """docs/labs of the clone. Raises: ConfigError where there is none."""
    pages_here = import_root() / "docs/labs"
    if not pages_here.exists():
        raise ConfigError(flag, "must be run in a clone, where the pages are", "Run it in a clone")
    return pages_here


# ------------------------------------------------------------------------------------------------------------ to run


def show(result: Result, questions: dict[str, Question], console: Console) -> None:
    if questions:
        console.print(Text("Questions (--answer KEY=NUMBER checks yours):", "bold"))
        for key, question in questions.items():
            console.print(Text(f"  {key}: {question.text} ({question.unit})"))
        console.print()
    for table in result.tables:
        rows = Rows(*table.titles)
        for cells in table.rows:
            rows.add_row(*cells)
        title = table.name + " (times of this machine)" * table.clocked
        console.print(Text(title, "italic"))
        rows.print(console, left=table.words)
        console.print()
    show_checks(result.checks, console)


def show_checks(checks: Sequence[Check], console: Console) -> None:
    table = Rows("check", "found", "expected", "")
    for check in checks:
        table.add_row(check.name, check.found, check.expected, "ok" if check.ok else "RED")
    table.print(
        console, left={"found", "expected", ""}, under={"found", "expected"}, styles={"ok": "green", "RED": "bold red"}
    )


def judge(lab: str, known: dict[str, Question], answers: list[tuple[str, float]], console: Console) -> int:
    for key, _ in answers:
        if key not in known:
            raise ConfigError(f"--answer {key}", f"must be a question of {lab}: {', '.join(known)}", "Use one")
    right = [known[key].accepts(number) for key, number in answers]
    for (key, number), ok in zip(answers, right, strict=True):
        size = "large" if number > known[key].answer else "small"
        hint = f" Hint: {known[key].hint}" * bool(known[key].hint)
        wrong = f"{number:,g} is not it: too {size}. {known[key].text}{hint}"
        console.print(Text(f"{key}: " + (f"right. {known[key].told}" if ok else wrong), "green" if ok else "red"))
    return 0 if all(right) else 1


def run_broken(lab: Lab, name: str, removed: str, console: Console) -> int:
    console.print(Text(f"broken on purpose: {removed or name}\n", "bold"))
    with console.status("running"):
        result = lab.run(name)
    red = [check for check in result.checks if not check.ok]
    show_checks(red, console)
    console.print(f"{len(red)} of {len(result.checks)} checks are red; the others passed.")
    wrong = wrongly_red(lab, name, result)
    console.print(Text("\n" + (wrong or "red where it should be, and nowhere else"), "bold red" if wrong else "green"))
    return 1 if wrong else 0


def fill_page(lab: Lab, result: Result, folder: Path, console: Console) -> bool:
    """Pictures, and the blocks of the lab's page; whether every break was red where it should be."""
    page = folder / f"{lab.name}.md"
    broken, caught = {}, True
    for name in lab.breaks:
        with console.status(f"running --break {name}"):
            broken[name] = lab.run(name)
        if wrong := wrongly_red(lab, name, broken[name]):
            caught = False
            console.print(Text(f"--break {name}: {wrong}", "bold red"))
    try:
        written = pages.draw(lab, result, folder / pages.DRAWN)
        if page.exists():
            text = page.read_text(encoding="utf-8")
            blocks = pages.blocks_of(lab, result, broken) | pages.code_on(lab, text)
            new = pages.filled(text, blocks, result.guesses)
            write_whole(page, new.encode())
            written.append(page)
    except OSError as error:
        raise ConfigError(f"--out {str(folder)!r}", f"cannot be written ({error.strerror})", "Name another") from error
    for path in written:
        console.print(f"wrote {path}", markup=False)
    return caught


def wrongly_red(lab: Lab, name: str, result: Result) -> str:
    """Empty where exactly the checks that the break names are red."""
    expected = lab.to_fail(name, result)
    if result.red == expected:
        return ""
    more, less = (", ".join(sorted(names)) or "nothing" for names in (result.red - expected, expected - result.red))
    return f"red, and should not be: {more}; not red: {less}"


def run_all(flags: LabsFlags, console: Console) -> int:
    folder = drawing_folder(flags.out or str(our_pages("--all")))
    started, passed = time.monotonic(), 0
    for number, name in enumerate(COURSE, 1):
        lab_started = time.monotonic()
        with console.status(f"{number} of {len(COURSE)}: {name}"):
            command = [*command_words("labs"), name, "--out", str(folder)]
            run = subprocess.run(command, capture_output=True, text=True)
        passed += run.returncode == 0
        state = "FAILED" if run.returncode else "every check passed, every break was caught"
        console.print(f"{number}. {name}: {state}; {time.monotonic() - lab_started:.0f} s", markup=False)
        if run.returncode:
            console.print(run.stdout + run.stderr, markup=False)
    index = folder / "index.md"
    if index.exists():
        labs = [find_lab(name) for name in COURSE]
        text = index.read_text(encoding="utf-8")
        write_whole(index, pages.filled(text, {("course", ""): pages.course_text(labs)}, {}).encode())
    minutes = (time.monotonic() - started) / 60
    console.print(f"{passed} of {len(COURSE)} labs in {minutes:.1f} min", markup=False)
    return 0 if passed == len(COURSE) else 1


def make_notebooks(flags: LabsFlags, console: Console) -> int:
    if importlib.util.find_spec("jupytext") is None:
        raise ConfigError("--notebooks", "it needs jupytext, which is not installed", install_text("notebooks"))
    folder = make_folder("--notebooks", flags.notebooks)
    try:
        written = write_notebooks(our_pages("--notebooks"), folder, [*COURSE])
    except OSError as error:
        raise ConfigError(
            f"--notebooks {flags.notebooks!r}", f"cannot be written ({error.strerror})", "Name another folder"
        ) from error
    console.print(f"wrote {len(written)} notebooks in {folder}; `jupyter lab {folder}` opens them", markup=False)
    return 0


if __name__ == "__main__":
    run_program(LabsFlags, main, "labs")
