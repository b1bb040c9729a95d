"""What a newcomer meets first: --help of every program, and what is refused because something is missing."""

import ast
import dataclasses
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import tyro

from experiments.bench.__main__ import ALL_ROWS, BENCHES, OWN, SILENT, main
from experiments.bench.flags import ABOUT, BenchFlags
from experiments.bench.levels import LevelsFlags
from experiments.bench.overlap import OverlapFlags
from experiments.budget import Init, Settle
from experiments.entry import run_program
from experiments.plan import PlanFlags
from experiments.report import ReportFlags
from experiments.train import TrainFlags
from experiments.verify import VerifyFlags
from jaxdist import console
from jaxdist.commands import MOVED, VERBS

ROOT = Path(__file__).resolve().parents[2]


def outcome(capsys, flags_type, program, prog, *args) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        run_program(flags_type, program, prog, [*args])
    captured = capsys.readouterr()
    return ended.value.code or 0, captured.out, captured.err


def never(flags, console):
    raise AssertionError("the program ran")


@pytest.mark.parametrize("flags_type", [TrainFlags, VerifyFlags, PlanFlags, BenchFlags, LevelsFlags, OverlapFlags])
def test_help_has_every_flag_once_in_groups(capsys, monkeypatch, flags_type):
    monkeypatch.setenv("COLUMNS", "120")
    prog = flags_type.__name__.removesuffix("Flags").lower()
    _, grouped, _ = outcome(capsys, flags_type, never, prog, "--help-all")
    with pytest.raises(SystemExit):
        tyro.cli(flags_type, args=["--help"])
    flat = capsys.readouterr().out

    def flags_of(text: str) -> list[str]:
        lines = re.findall(r"^[│ ] {1,2}(--\S.*?)(?:  |$)", text, re.MULTILINE)
        return sorted(word for line in lines for word in line.split() if word.startswith("--"))

    assert len(flags_of(flat)) > 30 and flags_of(grouped) == flags_of(flat)
    defaults = [re.findall(r"\(default: [^)]*\)", re.sub(r"[\s│]+", " ", text)) for text in (grouped, flat)]
    assert sorted(defaults[0]) == sorted(defaults[1])
    boxes = re.split(r"^.*?(\w+) options\b.*$", grouped, flags=re.MULTILINE)
    assert {"devices", "model", "precision", "strategy", "pipeline", "optimizer"} <= set(boxes[1::2])
    assert max(len(flags_of(box)) for box in boxes) < len(flags_of(flat)) / 2


PROGRAMS = {"bench": BenchFlags, "plan": PlanFlags, "train": TrainFlags, "verify": VerifyFlags}


@pytest.mark.parametrize("prog", PROGRAMS)
def test_help_fits_two_screens_and_names_the_rest(capsys, monkeypatch, prog):
    monkeypatch.setenv("COLUMNS", "80")
    flags_type = PROGRAMS[prog]
    _, out, _ = outcome(capsys, flags_type, never, prog, "--help")
    assert len(out.splitlines()) <= 80 and "--help-all" in out
    assert set(flags_type.COMMON) <= {field.name for field in dataclasses.fields(flags_type)} | {"only"}
    assert all(f"{prog} {verb}" in re.sub(r"\s+", " ", out) for verb in VERBS.get(prog, ()))


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_an_old_name_says_where_its_program_went(capsys, monkeypatch, old, new):
    monkeypatch.setattr(sys, "argv", ["jaxdist", old])
    assert console.main() == 2
    err = capsys.readouterr().err
    assert new in err and err.count("\n") == 1
    program, verb = new.split()
    assert verb in VERBS[program] or (program, verb) == ("plan", "--trace")


def test_a_module_of_an_old_name_says_it_too():
    done = subprocess.run([sys.executable, "-m", "experiments.diverge"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 2 and "verify where" in done.stderr and not done.stdout


@pytest.mark.parametrize(("program", "verb"), [(program, verb) for program, verbs in VERBS.items() for verb in verbs])
def test_every_verb_is_a_program_with_flags(capsys, program, verb):
    code, out, err = outcome(capsys, PROGRAMS.get(program, ReportFlags), never, program, verb, "--help")
    assert code == 0 and f"experiments.{program} {verb}" in out and not err


@pytest.mark.parametrize(("program", "flags_type"), [("budget", Init | Settle), ("report", ReportFlags)])
def test_all_of_a_small_program_s_help_is_its_help(capsys, program, flags_type):
    """Programs with commands have a union of flags, and few flags need no second list."""
    code, out, err = outcome(capsys, flags_type, never, program, "--help-all")
    assert (code, err) == (0, "") and out == outcome(capsys, flags_type, never, program, "--help")[1]


def test_help_of_bench_says_what_each_measures(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    _, out, _ = outcome(capsys, BenchFlags, never, "bench", "--help")
    out = re.sub(r"[\s│]+", " ", out)
    assert set(ABOUT) == set(BENCHES)
    assert all(f"{name}: {text}." in out for name, text in ABOUT.items())


@pytest.mark.parametrize("bench", [name for name, (_, _, unused) in BENCHES.items() if unused >= ALL_ROWS])
def test_a_bench_whose_rows_cannot_be_chosen_refuses_only(capsys, bench):
    code, out, err = outcome(capsys, BenchFlags, main, "bench", bench, "--only", "x")
    assert code == 2 and not out and "--only" in err and bench in err


def test_every_bench_shows_that_it_works():
    for name, (module, _, _) in BENCHES.items():
        source = (ROOT / "experiments/bench" / f"{module}.py").read_text(encoding="utf-8")
        assert (".status(" in source) != (name in SILENT), name


def test_the_other_benches_read_only():
    for module, _, unused in BENCHES.values():
        source = (ROOT / "experiments/bench" / f"{module}.py").read_text(encoding="utf-8")
        assert ("flags.only" in source) != (unused >= ALL_ROWS), module


@pytest.mark.parametrize("bench, names", OWN.items(), ids=OWN)
def test_a_flag_of_one_bench_is_refused_by_the_others(capsys, bench, names):
    other = "compile" if bench != "compile" else "step"
    values = {"phases": ["--no-phases"], "start_within": ["--start-within", "9"]}
    for name in names:
        flag = f"--{name.replace('_', '-')}"
        args = values.get(name, [flag, "7"])
        code, _, err = outcome(capsys, BenchFlags, main, "bench", other, *args)
        assert code == 2 and args[0] in err and other in err


def test_standin_says_what_it_needs(capsys):
    code, _, err = outcome(capsys, BenchFlags, main, "bench", "standin")
    assert code == 2 and "NVIDIA GPU" in err and "--mesh dp=8" in err
    assert "experiments.bench standin --mesh" in (ROOT / "docs/commands.md").read_text(encoding="utf-8")


def test_what_is_printed_about_extras_keeps_its_brackets():
    """`[bench]` is a style to rich where markup is on."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    pattern = re.compile(r"\[(" + "|".join(extras) + r")\]")
    for path in [*(ROOT / "experiments").rglob("*.py"), *(ROOT / "jaxdist").rglob("*.py")]:
        source = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(source)):
            if isinstance(call, ast.Call) and getattr(call.func, "attr", "") == "print":
                literals = [x.value for x in ast.walk(call) if isinstance(x, ast.Constant) and isinstance(x.value, str)]
                markup = any(keyword.arg == "markup" for keyword in call.keywords)
                assert markup or not any(map(pattern.search, literals)), f"{path}:{call.lineno}"
        for asked in re.findall(r"pip install (\S*\[[a-z-]+\])", source):
            assert asked.startswith("'.[") or asked.startswith(".["), f"{path}: {asked}"
