"""Change the source mechanically, one place at a time, and see whether a test turns red.

python -m tests.mutants --sample 300 --seed 0
python -m tests.mutants --sample 40 --paths jaxdist/parallel/zero.py

`tests.planted_bugs` has the bugs that somebody thought of; these are the ones that nobody did. First the tests run once
with every line that each of them executes written down. Then each mutant of the sample runs, in a copy of the tree,
against tests that execute its line, until one is red: the fastest first, and those that noticed most mutants before. A
time limit counts as red, and is counted. What stays green is printed. Mutants that compute the same as the source are
listed with a reason in `mutants_equivalent.toml`.
"""

import ast
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from rich.console import Console

from experiments.entry import run_program
from experiments.progress import Progress
from jaxdist.errors import ConfigError, require_positive
from tests.mutant_runner import TIMED_OUT
from tests.planted_bugs import COPIED, ROOT

TARGETS = tuple(
    f"jaxdist/{name}"
    for name in ("parallel", "train", "models", "layout.py", "specs.py", "checkpoint/logical.py", "parity.py")
)
TESTS = ("checkpoint", "data", "models", "parallel", "plan", "runtime", "train")  # not those of programs
CI, DEFAULT = "not exhaustive", "not exhaustive and not left_out"
NO_TESTS = 5  # pytest's exit code
EQUIVALENT = Path(__file__).parent / "mutants_equivalent.toml"

COMPARISONS = {
    **{ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq},
    **{ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In},
}
OPERATORS = {
    **{ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult},
    **{ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult, ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd},
}
NAMES = {  # axes and dtypes
    **{"dp": "tp", "tp": "dp", "pp": "dp", "replica": "dp"},
    **{"float32": "bfloat16", "float64": "float32", "bfloat16": "float32", "float16": "float32"},
}
ASSERTIONS = ("strict", "check_vma")  # arguments that check what holds anyway


@dataclass(frozen=True)
class Mutant:
    """`old` replaced by `new` in one place. text: its first line. lines: of the statement around it, less its body."""

    path: str
    line: int
    column: int
    start: int
    end: int
    old: str
    new: str
    text: str
    lines: tuple[int, ...]

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What tells it from others while the lines before it change."""
        return self.path, self.text, self.old, self.new

    @property
    def name(self) -> str:
        return f"{self.path}:{self.line}:{self.column}: {' '.join(self.old.split())} -> {' '.join(self.new.split())}"

    def planted(self, source: bytes) -> bytes:
        return source[: self.start] + self.new.encode() + source[self.end :]


# ---------------------------------------------------------------------------------------------------------------------
# Mutants of a file
# ---------------------------------------------------------------------------------------------------------------------


def mutants_of(path: str, source: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its text."""
    tree = ast.parse(source)
    offsets, lines = [0], source.splitlines()
    for line in source.encode().splitlines(keepends=True):
        offsets.append(offsets[-1] + len(line))

    def walk(node: ast.AST, statement: ast.stmt) -> Iterator[Mutant]:
        for child in ast.iter_child_nodes(node):
            if ignored(node, child):
                continue
            inner = child if isinstance(child, ast.stmt) else statement
            for new in changes(child):
                start = offsets[child.lineno - 1] + child.col_offset
                end = offsets[child.end_lineno - 1] + child.end_col_offset
                old = source.encode()[start:end].decode()
                yield Mutant(
                    path,
                    child.lineno,
                    child.col_offset,
                    start,
                    end,
                    old,
                    new,
                    lines[child.lineno - 1].strip(),
                    own_lines(inner),
                )
            yield from walk(child, inner)

    yield from walk(tree, tree.body[0]) if tree.body else ()


def own_lines(statement: ast.stmt) -> tuple[int, ...]:
    """The lines of a statement, of a compound one those before its body."""
    body = getattr(statement, "body", None)
    end = body[0].lineno - 1 if body else statement.end_lineno
    return tuple(range(statement.lineno, max(end, statement.lineno) + 1))


def ignored(parent: ast.AST, node: ast.AST) -> bool:
    """Code that computes nothing: assertions, messages, imports, types, decorators, docstrings."""
    if isinstance(node, ast.Raise | ast.Assert | ast.Import | ast.ImportFrom | ast.JoinedStr):
        return True
    if isinstance(node, ast.keyword) and node.arg in ASSERTIONS:
        return True
    if isinstance(parent, ast.FunctionDef | ast.ClassDef) and node in parent.decorator_list:
        return True
    annotations = (getattr(parent, "annotation", None), getattr(parent, "returns", None))
    return node in annotations or (isinstance(parent, ast.Expr) and isinstance(node, ast.Constant))


def changes(node: ast.AST) -> Iterator[str]:
    """The texts that may stand in a node's place."""
    match node:
        case ast.Constant(value=bool(value)):
            yield str(not value)
        case ast.Constant(value=int(value)):
            yield str(value + 1)
        case ast.Constant(value=float(value)):
            yield str(2 * value + 1)
        case ast.Constant(value=str(value)) if value in NAMES:
            yield repr(NAMES[value])
        case ast.Attribute(value=owner, attr=attr) if attr in NAMES and attr not in ("dp", "tp", "pp", "replica"):
            yield f"{ast.unparse(owner)}.{NAMES[attr]}"
        case ast.Compare(ops=[op]) if type(op) in COMPARISONS:
            yield _unparsed(ast.Compare(node.left, [COMPARISONS[type(op)]()], node.comparators))
        case ast.BinOp(op=op) if type(op) in OPERATORS:
            yield _unparsed(ast.BinOp(node.left, OPERATORS[type(op)](), node.right))
        case ast.BoolOp(op=op, values=values):
            other = ast.Or() if isinstance(op, ast.And) else ast.And()
            yield _unparsed(ast.BoolOp(other, values))
        case ast.UnaryOp(op=ast.USub() | ast.Not(), operand=operand):
            yield _unparsed(operand)
        case ast.IfExp(body=body, orelse=orelse):
            yield _unparsed(body)
            yield _unparsed(orelse)
        case ast.Call(func=func, args=args, keywords=keywords):
            for dropped in keywords:
                if dropped.arg is not None and dropped.arg not in ASSERTIONS:
                    yield ast.unparse(ast.Call(func, args, [each for each in keywords if each is not dropped]))
            starred = any(isinstance(each, ast.Starred) for each in args)
            if len(args) == 1 and not keywords and not starred and isinstance(func, ast.Attribute):
                yield _unparsed(args[0])  # the call left out
        case ast.Assign(targets=[ast.Name(id=name)], value=value) if _mentions(value, name):
            yield "pass"
        case ast.AugAssign():
            yield "pass"


def _unparsed(node: ast.expr) -> str:
    return f"({ast.unparse(node)})"


def _mentions(node: ast.AST, name: str) -> bool:
    return any(isinstance(each, ast.Name) and each.id == name for each in ast.walk(node))


def all_mutants(paths: tuple[str, ...]) -> list[Mutant]:
    files = []
    for path in paths:
        there = ROOT / path
        if not there.exists() or "jaxdist" not in Path(path).parts:
            raise ConfigError(f"--paths {path}", "it is no file or folder of jaxdist", "Try --paths jaxdist/parallel")
        files += sorted(there.rglob("*.py")) if there.is_dir() else [there]
    return [
        mutant
        for file in files
        for mutant in mutants_of(file.relative_to(ROOT).as_posix(), file.read_text(encoding="utf-8"))
    ]


def equivalents() -> dict[tuple[str, str, str, str], str]:
    """The key of each mutant that computes the same, and why it does."""
    rows = tomllib.loads(EQUIVALENT.read_text(encoding="utf-8")).get("mutant", [])
    return {(row["path"], row["text"], row["old"], row["new"]): row["reason"] for row in rows}


# ---------------------------------------------------------------------------------------------------------------------
# Tests of a mutant
# ---------------------------------------------------------------------------------------------------------------------


def test_files(names: tuple[str, ...]) -> list[Path]:
    """The files of tests in folders of `tests`, or of these names."""
    files = [*(ROOT / "tests").rglob("test_*.py")]
    found = [path for path in files if {path.parent.name, path.stem.removeprefix("test_")} & {*names}]
    known = {name for path in found for name in (path.parent.name, path.stem.removeprefix("test_"))}
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"--tests {unknown[0]}", "must name a folder or a file of tests", f"Use {', '.join(TESTS)}")
    return found


class Coverage:
    """Which tests run a line, from the records that `Runner.record` wrote."""

    def __init__(self, records: list[Path]):
        self.seconds: dict[str, float] = {}
        self.times_red: Counter[str] = Counter()
        self.by_line: dict[tuple[str, int], set[str]] = defaultdict(set)
        self.by_file: dict[str, set[str]] = defaultdict(set)
        for record in records:
            for row in map(json.loads, record.read_text(encoding="utf-8").splitlines()):
                self.seconds[row["test"]] = row["seconds"]
                for path, lines in row["lines"].items():
                    self.by_file[path].add(row["test"])
                    for line in lines:
                        self.by_line[path, line].add(row["test"])

    def of(self, mutant: Mutant, seconds: float) -> list[str]:
        """Tests that run the mutant's line, or else its statement: together within `seconds`, at least one, and those
        that take the least time for each mutant that they noticed; of files that import the module four times that.

        What runs while a module is imported belongs to no test: there, the tests that run anything of the file, and
        those in files that import it.
        """
        found = self.by_line[mutant.path, mutant.line]
        found = found or set().union(*(self.by_line[mutant.path, line] for line in mutant.lines))
        near = self.importing(mutant.path)
        found = found or self.by_file[mutant.path] | near
        cost = {test: self.seconds[test] / (1 + self.times_red[test]) / (4 if test in near else 1) for test in found}
        chosen, total = [], 0.0
        for test in sorted(found, key=lambda test: (cost[test], test)):
            total += self.seconds[test]
            if chosen and total > seconds:
                break
            chosen.append(test)
        return chosen

    def importing(self, path: str) -> set[str]:
        """The tests in files that name a module."""
        module = path.removesuffix(".py").replace("/", ".")
        files = {file for test in self.seconds if module in (ROOT / (file := test.partition("::")[0])).read_text()}
        return {test for test in self.seconds if test.partition("::")[0] in files}


RED, TIME_LIMIT, SURVIVES = "red", "time limit", "survives"


class Runner:
    """A copy of the tree and a warm process that runs its tests (`tests.mutant_runner`)."""

    def __init__(self, folder: Path, cache: Path, marks: str):
        self.folder, self.marks = folder, marks
        for name in COPIED:
            source = ROOT / name
            (shutil.copytree if source.is_dir() else shutil.copy)(source, folder / name)
        cached = {
            "JAX_COMPILATION_CACHE_DIR": str(cache),
            "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.2",
            "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "0",
            "JAX_PLATFORMS": "cpu",
        }
        script = str(Path(__file__).with_name("mutant_runner.py"))
        self.process = subprocess.Popen(
            [sys.executable, "-P", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, **cached, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"},
        )

    def run(self, tests: list[str], seconds: float, record: Path | None = None) -> tuple[int, str]:
        """(pytest's exit code, the test that was red)."""
        request = {"folder": str(self.folder), "tests": tests, "marks": self.marks, "seconds": seconds}
        request["record"] = record and str(record)
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = json.loads(self.process.stdout.readline())
        return answer["code"], answer["red"]

    def record(self, file: Path, out: Path) -> Path:
        """Run a file of tests once with every line of jaxdist that each test executes written down.

        A record belongs to the sources and the tests it was made of. Raises: RuntimeError where a test is red.
        """
        test = str(file.relative_to(ROOT))
        digest = sha256(self.marks.encode())
        for source in (*sorted((self.folder / "jaxdist").rglob("*.py")), self.folder / test):
            digest.update(source.read_bytes())
        record = out / f"{file.stem}-{digest.hexdigest()[:16]}.jsonl"
        if not record.exists():
            partial = record.with_suffix(".partial")
            partial.write_bytes(b"")
            code, _ = self.run([test], 3600, partial)
            if code not in (0, NO_TESTS):
                raise RuntimeError(f"{test} is red without a mutant (exit code {code})")
            partial.rename(record)
        return record

    def verdict(self, mutant: Mutant, tests: list[str], seconds: float) -> tuple[str, str]:
        """(RED, TIME_LIMIT, or SURVIVES; the test that was red)."""
        path = self.folder / mutant.path
        source = path.read_bytes()
        path.write_bytes(mutant.planted(source))
        try:
            code, red = self.run(tests, seconds)
            return {0: SURVIVES, TIMED_OUT: TIME_LIMIT}.get(code, RED), red
        finally:
            path.write_bytes(source)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------


class Runners:
    """Several runners, each of which does one thing at a time."""

    def __init__(self, number: int, cache: Path, marks: str):
        self.stack, self.idle = ExitStack(), queue.SimpleQueue()
        for _ in range(number):
            folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory()))
            runner = Runner(folder, cache, marks)
            self.stack.callback(runner.close)
            self.idle.put(runner)
        self.threads = self.stack.enter_context(ThreadPoolExecutor(number))

    def __enter__(self) -> "Runners":
        return self

    def __exit__(self, *error) -> None:
        self.threads.shutdown(cancel_futures=True)
        self.stack.close()

    def map(self, work: Callable, items: list, what: str) -> Iterator[tuple]:
        """(item, work(runner, item)) as they end; begun in the items' order."""

        def one(item):
            runner = self.idle.get()
            try:
                return item, work(runner, item)
            finally:
                self.idle.put(runner)

        waiting = [self.threads.submit(one, item) for item in items]
        with Progress(what) as progress:
            for number, done in enumerate(as_completed(waiting), 1):
                progress.update(number, len(items))
                yield done.result()


@dataclass(frozen=True)
class MutantFlags:
    """Mutate the source at random places and count the mutants that a test notices."""

    sample: int = 300
    """How many mutants, of all that the paths have."""
    seed: int = 0
    paths: tuple[str, ...] = TARGETS
    """Files or folders to mutate."""
    tests: tuple[str, ...] = TESTS
    """Folders or files of tests that may notice a mutant, by name."""
    default_only: bool = False
    """Only with the tests of the default run; give it an --out of its own."""
    out: str = "mutants"
    """Folder for which test runs which line, for compiled programs and verdicts; another run tries survivors again."""
    seconds: int = 120
    """Tests a mutant is given, by the time they took when recorded."""
    jobs: int = 1
    """Mutants at a time, each in its own copy of the tree."""


def main(flags: MutantFlags, console: Console) -> int:
    for name in ("sample", "seconds", "jobs"):
        require_positive(name, getattr(flags, name))
    every, same = all_mutants(flags.paths), equivalents()
    sample = sorted(every, key=lambda mutant: sha256(f"{flags.seed} {mutant.name}".encode()).digest())[: flags.sample]
    judged = [mutant for mutant in sample if mutant.key not in same]
    out = Path(flags.out).resolve()
    out.mkdir(parents=True, exist_ok=True)
    verdicts = out / "verdicts.jsonl"
    known = {}
    if verdicts.exists():
        known = {name: found for name, *found in map(json.loads, verdicts.read_text(encoding="utf-8").splitlines())}
    console.print(f"{len(every):,} mutants, {len(sample)} of them sampled with seed {flags.seed}")

    # The files of most bytes tend to take longest, and begin first.
    files = sorted(test_files(flags.tests), key=lambda file: -file.stat().st_size)
    with Runners(flags.jobs, out / "compiled", DEFAULT if flags.default_only else CI) as runners:
        recorded = runners.map(lambda runner, file: runner.record(file, out), files, "recording which lines tests run")
        tests = Coverage([record for _, record in recorded])
        tests.times_red.update(red for _, red in known.values() if red)

        def judge(runner: Runner, mutant: Mutant) -> tuple[str, str]:
            chosen = tests.of(mutant, flags.seconds)
            limit = 120 + 5 * sum(tests.seconds[test] for test in chosen)
            return runner.verdict(mutant, chosen, limit) if chosen else (SURVIVES, "")

        # Survivors of an earlier run come last, when it is known which tests notice most.
        tried = [m for m in judged if m.name not in known] + [
            m for m in judged if known.get(m.name, "")[:1] == [SURVIVES]
        ]
        for mutant, (verdict, red) in runners.map(judge, tried, "mutants"):
            known[mutant.name] = verdict, red
            tests.times_red[red] += bool(red)
            with verdicts.open("a", encoding="utf-8") as file:
                file.write(json.dumps([mutant.name, verdict, red]) + "\n")
            if verdict == SURVIVES:
                console.print(f"survives: {mutant.name}", markup=False, soft_wrap=True)

    ended = [known[mutant.name][0] for mutant in judged]
    killed = len(ended) - ended.count(SURVIVES)
    console.print(
        f"{killed} of {len(judged)} mutants turn a test red ({killed / max(len(judged), 1):.1%}), "
        f"{ended.count(TIME_LIMIT)} of them by the time limit; "
        f"{len(sample) - len(judged)} more compute the same as the source"
    )
    return 0 if killed == len(judged) else 1


if __name__ == "__main__":
    run_program(MutantFlags, main, "tests.mutants")
