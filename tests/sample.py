"""Choose the default sample of tests: the cheapest that run every line which any test runs, and every bug's own test.

python -m tests.sample --minutes 8        needs coverage and pytest-cov, and more than an hour of two cores

Every test runs once, with the lines that it executes (in programs that it starts too) and its time written down. What
takes less than half a second stays, and so does what `tests/kept.txt` names: comparisons of values. Of the others one
is added after the other, by what it runs that none before it ran, a second: lines, a test function of its own, values
of parameters. Those left out are written to `tests/left_out.txt`, and `conftest` marks them. Whether the sample catches
what all tests catch is counted by `tests.mutants --default-only`.
"""

import re
import sqlite3
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from experiments.entry import run_program
from tests.planted_bugs import ROOT, all_bugs

LEFT_OUT = Path(__file__).with_name("left_out.txt")
KEPT = Path(__file__).with_name(
    "kept.txt"
)  # written by hand: a test that runs a line may compare nothing that comes of it
SHORT = 0.5  # seconds of a test that always stays
OF_A_FUNCTION, OF_A_VALUE = 25, 3  # what a test function, or a value of a parameter, counts for; a line counts for 1
TEST = re.compile(r"tests/\w+/test_.*?(?= \((?:call|setup|teardown)\)$|\|(?:run|setup|teardown)$)")
RULES = """
[run]
source =
    jaxdist
    experiments
data_file = {folder}/lines
context = ${{PYTEST_CURRENT_TEST-none}}
patch = subprocess
    _exit
"""


@dataclass(frozen=True)
class SampleFlags:
    minutes: float = 8.0
    """What the sample may take on two cores."""


def main(flags: SampleFlags, console: Console) -> int:
    with tempfile.TemporaryDirectory() as folder:
        ran, seconds = measure(Path(folder))
    sample = choose(ran, seconds, 2 * 60 * flags.minutes)
    LEFT_OUT.write_text("".join(f"{name}\n" for name in names_of(seconds.keys() - sample, sample)), encoding="utf-8")
    console.print(f"{len(sample)} of {len(seconds)} tests, {sum(seconds[test] for test in sample) / 120:.1f} minutes")
    return 0


def measure(folder: Path) -> tuple[dict[str, set], dict[str, float]]:
    """By test: what it ran, as (file, line), and its seconds without that being written down."""
    rules = folder / "rules"
    rules.write_text(RULES.format(folder=folder), encoding="utf-8")
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", "--durations-min=0.01"]
    cleared = LEFT_OUT.read_text(encoding="utf-8")
    LEFT_OUT.write_text("", encoding="utf-8")
    try:
        timed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        traced = ["--cov", f"--cov-config={rules}", "--cov-context=test", "--cov-report="]
        subprocess.run([*command, *traced], cwd=ROOT, capture_output=True, check=True)
    finally:
        LEFT_OUT.write_text(cleared, encoding="utf-8")
    seconds: Counter[str] = Counter()
    for line in timed.stdout.splitlines():
        if match := re.match(r"\s*([\d.]+)s (?:call|setup|teardown)\s+(tests/.*)", line):
            seconds[match[2].strip()] += float(match[1])
    return lines_of(folder / "lines"), dict(seconds)


def lines_of(path: Path) -> dict[str, set]:
    from coverage.numbits import numbits_to_nums

    found = defaultdict(set)
    with sqlite3.connect(path) as data:
        files = dict(data.execute("select id, path from file"))
        contexts = dict(data.execute("select id, context from context"))
        for file, context, bits in data.execute("select file_id, context_id, numbits from line_bits"):
            if match := TEST.search(contexts[context]):
                found[match[0]] |= {(files[file], line) for line in numbits_to_nums(bits)}
    return found


def choose(ran: dict[str, set], seconds: dict[str, float], most: float) -> set[str]:
    """The tests of a sample that takes `most` seconds, where short ones and those of planted bugs leave so much."""
    named = [name for bug in all_bugs() for name in bug.tests]
    stay = {*named, *KEPT.read_text(encoding="utf-8").splitlines()}
    sample = {test for test in seconds if seconds[test] < SHORT or {test, function(test)} & stay}
    spent = sum(seconds[test] for test in sample)
    seen = set().union(*(ran.get(test, set()) | extras(test).keys() for test in sample))

    def gain(test: str) -> float:
        new = {**dict.fromkeys(ran.get(test, ()), 1), **extras(test)}
        return sum(weight for what, weight in new.items() if what not in seen) / seconds[test]

    rest = seconds.keys() - sample
    while rest and gain(best := max(sorted(rest), key=gain)):
        rest.discard(best)
        if spent + seconds[best] <= most:
            sample.add(best)
            spent += seconds[best]
            seen |= ran.get(best, set()) | extras(best).keys()
    return sample


def left_out() -> frozenset[str]:
    return frozenset(LEFT_OUT.read_text(encoding="utf-8").splitlines())


def function(test: str) -> str:
    return test.partition("[")[0]


def extras(test: str) -> dict[tuple, int]:
    """What a test is besides the lines that it runs, and what that counts for."""
    name, _, values = test.partition("[")
    words = re.split(r"[-,= ]", values.removesuffix("]")) if values else []
    return {(name,): OF_A_FUNCTION, **{(name.partition("::")[0], word): OF_A_VALUE for word in words}}


def names_of(left_out: set[str], sample: set[str]) -> list[str]:
    """A test function that is left out with all its parameters is named once."""
    whole = {function(test) for test in sample}
    return sorted({test if function(test) in whole else function(test) for test in left_out})


if __name__ == "__main__":
    run_program(SampleFlags, main, "tests.sample")
