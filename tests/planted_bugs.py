"""Plant a bug, run the tests that should see it, expect red. Prints the score.

python -m tests.planted_bugs [--only TEXT]

Each bug is a patch file in `tests/bugs`, applied to a copy of the source tree; the tests run there, so the checkout is
never touched. The tests that must catch the bugs are first run on the untouched copy and must be green.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.entry import run_program
from experiments.tables import Rows
from jaxdist.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("jaxdist", "experiments", "tests", "docs", "cluster", "pyproject.toml", "README.md")


BUGS = ROOT / "tests" / "bugs"
CAUGHT_BY = "caught by: "


@dataclass(frozen=True)
class Bug:
    """A patch file: its first line is the bug's name, the next ones say which tests see it, then follows the diff."""

    name: str
    tests: tuple[str, ...]
    patch: Path

    @classmethod
    def read(cls, patch: Path) -> "Bug":
        name, *lines = patch.read_text(encoding="utf-8").splitlines()
        tests = tuple(line.removeprefix(CAUGHT_BY) for line in lines if line.startswith(CAUGHT_BY))
        return cls(name, tests, patch)

    def apply(self, root: Path, *how: str) -> None:
        """Plant it in the tree at `root` (with "--reverse": take it out). Raises: ValueError where it does not fit."""
        command = ["git", "apply", "-C1", *how, str(self.patch)]
        # Outside any repository: a tree inside one would be taken for a part of it.
        env = {**os.environ, "GIT_CEILING_DIRECTORIES": str(root.parent)}
        done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise ValueError(f"{self.patch.name} does not fit the source: {done.stderr.strip()}")


def all_bugs() -> list[Bug]:
    return [Bug.read(path) for path in sorted(BUGS.glob("*.patch"))]


@dataclass(frozen=True)
class BugFlags:
    """Plant every bug of the list in a copy of the source and count how many the tests catch."""

    only: str = ""
    """Run the bugs whose name contains this text."""


def main(flags: BugFlags, console: Console) -> int:
    bugs = [bug for bug in all_bugs() if flags.only in bug.name]
    if not bugs:
        raise ConfigError(f"--only {flags.only}", "no bug has that in its name", "Try --only dropout")
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, copy / name)

        every_test = sorted({test for bug in bugs for test in bug.tests})
        with console.status("the untouched copy must be green"):
            green, output = run_tests(copy, every_test)
        if not green:
            console.print(output, markup=False)
            raise RuntimeError("the tests fail without any bug planted: see above")
        console.print(f"{len(every_test)} tests are green on the untouched copy")

        table = Rows("bug", "verdict")
        caught = 0
        for number, bug in enumerate(bugs, 1):
            with console.status(f"{bug.name} ({number} of {len(bugs)})"):
                was_caught = is_caught(copy, bug)
            caught += was_caught
            verdict = "caught" if was_caught else "NOT CAUGHT"
            table.add_row(bug.name, verdict)
            if not console.is_terminal:
                console.print(f"{'caught' if was_caught else 'NOT CAUGHT'}  {bug.name}")
    table.print(console, left=("verdict",), styles={"caught": "green", "NOT CAUGHT": "bold red"})
    console.print(f"{caught} of {len(bugs)} planted bugs turn the tests red")
    return 0 if caught == len(bugs) else 1


def is_caught(copy: Path, bug: Bug) -> bool:
    """Plant one bug in the copy, run its tests, take it out again."""
    bug.apply(copy)
    try:
        return any(not run_tests(copy, [test])[0] for test in bug.tests)
    finally:
        bug.apply(copy, "--reverse")


def run_tests(folder: Path, tests: list[str]) -> tuple[bool, str]:
    """(all passed, output). A run that collects no test is an error, not a catch."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-o", "addopts=", "-p", "no:cacheprovider", *tests]
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest could not run {tests}:\n{done.stdout}\n{done.stderr}")
    return done.returncode == 0, done.stdout


if __name__ == "__main__":
    run_program(BugFlags, main, "tests.planted_bugs")
