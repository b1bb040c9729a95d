"""The labs: every check passes, every break is red exactly where its page says, and the pages say what a run says."""

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments.entry import run_program
from experiments.labs import COURSE, find_lab, pages
from experiments.labs.__main__ import LabsFlags, main
from experiments.labs.notebooks import write_notebooks

ROOT = Path(__file__).resolve().parents[2]
PAGES = ROOT / "docs/labs"
# Those that take seconds here; the others run with `pytest -m exhaustive` and `python -m experiments.labs --all`.
QUICK = {"one-device", "precision", "reading"}
# Those that take less than half a minute unbroken.
SHORT = {"all-reduce", "buckets", "tensor-parallel", "sequence-parallel", "context-parallel", "experts", "pipelines"}
SHORT |= {"topology", "lying-gradients", "inference", "own-layout"}
NUMBER = re.compile(r"-?\d[\d,]*\.?\d*(?:e[+-]?\d+)?")


def page_of(name: str) -> str:
    return (PAGES / f"{name}.md").read_text(encoding="utf-8")


def blocks_on(page: str) -> dict[tuple[str, str], str]:
    return {(found[2], found[3] or ""): found[0] for found in pages.BLOCK.finditer(page)}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.exhaustive] * (name not in QUICK)) for name in COURSE]
)
def test_a_lab_passes_its_checks_is_caught_when_broken_and_is_what_its_page_says(name):
    lab = find_lab(name)
    whole = lab.run(None)
    assert not whole.red
    assert len({check.name for check in whole.checks}) == len(whole.checks)
    broken = {each: lab.run(each) for each in lab.breaks}
    names = {check.name for check in whole.checks}
    for each, result in broken.items():
        assert result.red == lab.to_fail(each, result) != set(), each
        assert {check.name for check in result.checks} <= names, each
    page, blocks = page_of(lab.name), pages.blocks_of(lab, whole, broken) | pages.code_on(lab, page_of(lab.name))
    clocked = {("table", table.name) for table in whole.tables if table.clocked}
    shown = blocks_on(page)
    for key, text in shown.items():
        if key not in clocked:
            assert alike(text, pages.filled(text, blocks, {})), key
    for found in pages.GUESS.finditer(page):
        assert alike(found[0], pages.answered(found, whole.guesses[found["key"]])), found["key"]
    assert blocks.keys() == shown.keys(), "the page lacks a block that the lab makes"
    assert pages.questions_of(page).keys() == whole.guesses.keys(), "the page lacks a question that the lab answers"
    for make in whole.pictures.values():
        assert ElementTree.fromstring(make()).tag.endswith("svg")
    drawn = {pages.file_name(lab, name) for name in whole.pictures}
    assert drawn == {path.name for path in (PAGES / pages.DRAWN).glob(f"{name}-*.svg")}


@pytest.mark.parametrize("name", sorted(SHORT))
def test_a_lab_passes_its_checks(name):
    assert not find_lab(name).run(None).red


def alike(page: str, now: str) -> bool:
    """The same words, and numbers equal to what other processors round otherwise."""
    ours, theirs = ([float(n.replace(",", "")) for n in NUMBER.findall(text)] for text in (page, now))
    same_words = NUMBER.sub("", page) == NUMBER.sub("", now)
    return same_words and all(
        abs(a - b) <= 0.05 * max(abs(a), abs(b)) or max(abs(a), abs(b)) < 1e-4
        for a, b in zip(ours, theirs, strict=True)
    )


def test_notebooks_have_the_pages_commands_as_cells_and_no_table_that_they_print(tmp_path):
    pytest.importorskip("jupytext", reason="pip install -e '.[notebooks]'")
    for path in write_notebooks(PAGES, tmp_path, [*COURSE]):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
        lab = find_lab(path.stem)
        wanted = ["", *[f" --break {name}" for name in lab.breaks]]
        commands = [cell for cell in code if cell.startswith("%%bash")]
        assert commands[: len(wanted)] == [f"%%bash\njaxdist labs {lab.name}{more}" for more in wanted]
        assert "%pip install" in code[0]
        prose = "".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
        assert lab.question in prose and "<!--" not in prose and "](../" not in prose and "](drawn/" not in prose
        assert prose.count("](data:image/svg+xml;base64,") == len([*(PAGES / pages.DRAWN).glob(f"{path.stem}-*.svg")])


@pytest.mark.parametrize("name", COURSE)
def test_every_page_has_the_same_shape(name):
    lab, page = find_lab(name), page_of(name)
    assert lab.name == name and page.startswith(f"# {lab.title}\n")
    assert tuple(re.findall(r"^## (.+)$", page, re.MULTILINE)) == pages.SECTIONS
    assert f"python -m experiments.labs {name}\n" in page
    for each in lab.breaks:
        assert f"python -m experiments.labs {name} --break {each}\n" in page
        assert pages.removed_by(page, each), f"the page does not say what {each} removes"
    parts = dict(zip(pages.SECTIONS, re.split(r"^## .+$", page, flags=re.MULTILINE)[1:], strict=True))
    assert pages.GUESS.search(parts["Predict first"]) and pages.GUESS.search(parts["Exercises"])
    assert page.count('class="guess"') == len(pages.questions_of(page))
    assert all(f"](drawn/{path.name})" in page for path in (PAGES / pages.DRAWN).glob(f"{name}-*.svg"))


@pytest.mark.parametrize("name", COURSE)
def test_every_page_shows_the_code_that_is_its_idea(name):
    lab, shown = find_lab(name), blocks_on(page_of(name))
    code = pages.code_on(lab, page_of(lab.name))
    assert code and all(pages.filled(shown[key], code, {}) == shown[key] for key in code)
    assert all("```py" not in text for key, text in shown.items() if key not in code)


def test_every_lab_answers_a_question_of_the_index():
    text = (PAGES / "questions.md").read_text(encoding="utf-8")
    assert {f"{name}.md" for name in COURSE} <= set(re.findall(r"\]\(([\w-]+\.md)\)", text))


def outcome(capsys, *args: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run_program(LabsFlags, main, "labs", [*args])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def test_without_a_name_the_labs_are_listed(capsys):
    code, out, _ = outcome(capsys)
    assert code == 0 and all(f" {name} " in out for name in COURSE)
    assert max(map(len, out.splitlines())) <= 80


def test_a_broken_lab_shows_what_is_red_and_what_is_not(capsys):
    code, out, _ = outcome(capsys, "precision", "--break", "masters")
    assert code == 0 and out.count("RED") == 1 and "red where it should be, and nowhere else" in out


def test_a_break_that_is_not_caught_fails(capsys, monkeypatch):
    lab = find_lab("precision")
    unseen = dataclasses.replace(lab, run=lambda broken: lab.run(None))
    monkeypatch.setattr("experiments.labs.__main__.find_lab", lambda name: unseen)
    code, out, _ = outcome(capsys, "precision", "--break", "masters")
    assert code == 1 and "not red: a weight of 1 after 500 updates" in out


def test_answers_are_judged(capsys):
    code, out, _ = outcome(capsys, "precision", "--answer", "stuck=256", "lost=1.95")
    assert code == 0 and out.count("right.") == 2
    code, out, _ = outcome(capsys, "precision", "--answer", "stuck=1,024")
    assert code == 1 and "1,024 is not it" in out and "256" not in out and "Hint" not in out
    code, out, _ = outcome(capsys, "memory", "--answer", "seven=7")
    assert code == 1 and "too small" in out and "Hint: 16 bytes each" in out and "112" not in out


def test_an_answer_is_judged_without_jax():
    """Its import takes longer than everything else."""
    code = (
        "import sys; from experiments.labs import __main__ as labs\n"
        "try:\n    labs.run_program(labs.LabsFlags, labs.main, 'labs', ['memory', '--answer', 'seven=112'])\n"
        "finally:\n    print('jax' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0 and "seven: right." in run.stdout and run.stdout.endswith("False\n"), run


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["nothing"], "memory"),
        (["memory", "zero"], "2 labs"),
        (["memory", "--break", "nothing"], "masters, logits"),
        (["--break", "masters"], "NAME --break"),
        (["--out", "x"], "NAME --out"),
        (["memory", "--break", "masters", "--answer", "seven=1"], "Leave out --answer"),
        (["precision", "--answer", "stuck"], "KEY=NUMBER"),
        (["precision", "--answer", "nothing=1"], "stuck"),
        (["precision", "--answer", "stuck=nan"], "KEY=NUMBER"),
        (["precision", "--answer", "stuck=1", "--out", "x"], "Leave out --out"),
        (["memory", "--all"], "Leave out the name"),
        (["--all", "--break", "masters"], "--break with --all"),
        (["memory", "--notebooks", "x"], "every page"),
        (["precision", "--out", "/dev/null/x"], "Not a directory"),
    ],
)
def test_bad_input_is_refused(capsys, args, said):
    code, _, err = outcome(capsys, *args)
    assert code == 2 and said in " ".join(err.split()), err


def test_the_course_is_in_the_index_and_in_the_navigation_in_order():
    index = (PAGES / "index.md").read_text(encoding="utf-8")
    labs = [find_lab(name) for name in COURSE]
    assert pages.course_text(labs) in index
    rows = [f"      - {number}. {lab.title}: labs/{lab.name}.md\n" for number, lab in pages.numbered(labs)]
    assert "".join(rows) in (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert {path.stem for path in PAGES.glob("*.md")} == {*COURSE, "index", "questions", "glossary", "sliders"}
