"""What a lab is, and what one run of it found. The prose (questions, answers in words, breaks) is on its page."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?\s?[%×]?|2\^\d+|")
COLUMN = re.compile(r"(?P<title>.*?)(?: (?P<form>\S*\{:[^{}]*\}.*))?")


@dataclass(frozen=True)
class Check:
    """One statement about a run that is true or not: `found` against `expected`. Made by the functions below."""

    name: str
    found: str
    expected: str
    ok: bool


def equal(name: str, found: float, expected: float, within: float = 0.0, unit: str = "") -> Check:
    """Equal, or within a relative error. A non-finite value is equal to nothing."""
    ok = math.isfinite(found) and abs(found - expected) <= within * abs(expected)
    near = f" ± {100 * within:.2g}%" if within >= 1e-5 else ""  # less is rounding
    return Check(name, shown(found, unit), shown(expected, unit) + near, ok)


def at_most(name: str, found: float, limit: float, unit: str = "") -> Check:
    return Check(name, shown(found, unit), f"at most {shown(limit, unit)}", found <= limit)


def at_least(name: str, found: float, limit: float, unit: str = "") -> Check:
    return Check(name, shown(found, unit), f"at least {shown(limit, unit)}", found >= limit)


def holds(name: str, ok: bool, found: str = "", expected: str = "yes") -> Check:
    """found: what was seen, where there is more to say than yes or no."""
    return Check(name, found or ("yes" if ok else "no"), expected, bool(ok))


def refused(name: str, error: Exception | None, because: str) -> Check:
    """Something raised an error whose text has `because` in it."""
    said = "nothing was raised" if error is None else f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return Check(name, said, f"an error that says {because!r}", error is not None and because in str(error))


def shown(value: float, unit: str = "") -> str:
    """Counts in full, other numbers to four digits."""
    if float(value).is_integer() and abs(value) < 1e15:
        text = f"{int(value):,}"
    elif 1e-3 <= abs(value) < 1e6:
        text = f"{value:,.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    else:
        text = f"{value:.1e}"
    return f"{text} {unit}".rstrip()


@dataclass(frozen=True)
class Table:
    """Cells under titles; the first column names the rows.

    clocked: it has times of the machine it was made on, so that no test compares it.
    """

    name: str
    titles: Sequence[str]
    rows: Sequence[Sequence[str]]
    clocked: bool = False

    def __post_init__(self):
        assert len({*self.titles}) == len(self.titles), f"two columns of {self.name} have one title"
        assert all(len(row) == len(self.titles) for row in self.rows), self.name

    @property
    def words(self) -> list[str]:
        """Titles of the columns with cells that are not numbers."""
        columns = zip(self.titles, zip(*self.rows, strict=True), strict=True)
        return [title for title, cells in columns if not all(NUMBER.fullmatch(cell) for cell in cells)]


def table(name: str, columns: str, rows: Iterable[Sequence[object]], clocked: bool = False) -> Table:
    """columns: titles between " | ", each with the format of its cells in braces where it is not plain:
    "nodes | hours {:.1f}". Text in a cell stays as it is."""
    split = [COLUMN.fullmatch(column) for column in columns.split(" | ")]
    forms = [each["form"] or "{}" for each in split]
    cells = [[c if isinstance(c, str) else form.format(c) for c, form in zip(row, forms, strict=True)] for row in rows]
    return Table(name, [each["title"] for each in split], cells, clocked)


class Picture(NamedTuple):
    """make: an SVG file; one called NAME-wide is shown at full width."""

    name: str
    make: Callable[[], str]


class Guesses(dict[str, float]):
    """By key, the answers to the questions that the page asks."""


Findings = Iterator[Check | Table | Picture | Guesses]


@dataclass(frozen=True)
class Result:
    """What one run found. A broken run needs only the checks."""

    checks: Sequence[Check]
    tables: Sequence[Table] = ()
    pictures: Mapping[str, Callable[[], str]] = field(default_factory=dict)
    guesses: Mapping[str, float] = field(default_factory=dict)

    @property
    def red(self) -> set[str]:
        """The checks that failed."""
        return {check.name for check in self.checks if not check.ok}


@dataclass(frozen=True)
class Lab:
    """run: the whole lab, or with the name of a break the lab without the one thing that the break removes.
    breaks: by name, patterns (`fnmatch`) of exactly the checks that must fail; all others still pass.
    devices: how many it needs, simulated where there are too few."""

    name: str
    title: str
    question: str
    run: Callable[[str | None], Result]
    breaks: Mapping[str, Set[str]]
    devices: int = 1

    def to_fail(self, name: str, result: Result) -> set[str]:
        """The checks of a run with this break that must be red. A pattern that none matches is itself in the set."""
        names = [check.name for check in result.checks]
        return {check for pattern in self.breaks[name] for check in fnmatch.filter(names, pattern) or [pattern]}


def lab(title: str, question: str, breaks: Mapping[str, Set[str]], devices: int = 1) -> Callable[..., Lab]:
    """Makes a lab, named as its module, of a `run` that yields what it finds."""

    def made(run: Callable[[str | None], Findings]) -> Lab:
        def whole(broken: str | None) -> Result:
            found = list(run(broken))
            checks, tables = ([each for each in found if isinstance(each, kind)] for kind in (Check, Table))
            pictures = {each.name: each.make for each in found if isinstance(each, Picture)}
            guesses = {key: number for each in found if isinstance(each, Guesses) for key, number in each.items()}
            return Result(checks, tables, pictures, guesses)

        return Lab(run.__module__.rpartition(".")[2].replace("_", "-"), title, question, whole, breaks, devices)

    return made
