"""Judge functions that a reader wrote: python -m experiments.labs grade my.py (with --template NAME: what to write).

Each is run on 2, 3 and 4 simulated devices in float64 and compared with one device, rank by rank and array by array.
What it sends and holds is read from its trace. A file may have any of the tasks.
"""

import ast
import hashlib
import importlib.util
import inspect
import json
import math
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import jax
import numpy as np
import tyro
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxdist.commands import command_text
from jaxdist.compat import source_of
from jaxdist.errors import ConfigError, reason_of
from jaxdist.mesh import MeshShape
from jaxdist.parallel import varying
from jaxdist.parallel.pipeline.builders import from_orders
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.parallel.pipeline.text import parse_cell
from jaxdist.plan.proof.trace import KINDS, branches_differ, collectives_of, equations
from jaxdist.plan.proof.trace_memory import temporary_bytes
from jaxdist.runtime.devices import acquire_devices

from ..entry import require_writable
from ..tables import Rows, print_bullet
from . import solutions
from .exchanges import QUICKLY, on_mesh
from .tasks import OWN, SIZES, TASKS, Formula, OnRanks, Orders, Split

AXIS = "dp"
WORD = 8  # bytes of an element
TOLERANCE = 1e-10
SECONDS = 20.0  # after which a function that is being traced is stopped


@dataclass(frozen=True)
class Fault:
    """Why a function is refused. reason: raised, results, shape, value, collective, endless, bytes, messages,
    memory, order, bubble or in flight. likeness: what a wrong value looks like."""

    reason: str
    text: str
    ranks: int | None = None
    rank: int | None = None
    result: str = ""
    likeness: str = ""


@dataclass
class Grade:
    """One function's. scores: what it needs, by name and unit, on the most ranks (stages)."""

    task: str
    fault: Fault | None = None
    scores: dict[str, float] = field(default_factory=dict)


class Refused(Exception):
    """Ends the judging of a function."""

    def __init__(self, reason: str, text: str, **where):
        super().__init__(text)
        self.fault = Fault(reason, text, **where)


# ----------------------------------------------------------------------------------------------------- a user's file


def functions_of(path: str) -> dict[str, Callable]:
    """The tasks' functions in a file. Raises: ConfigError where it cannot be run or has none."""
    spec = importlib.util.spec_from_file_location("graded", path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ConfigError(path, "must be a Python file", f"Begin with `{command_text('labs')} grade --template NAME`")
    module = importlib.util.module_from_spec(spec)
    try:
        run_theirs(path, partial(spec.loader.exec_module, module))
    except Refused as refused:
        raise ConfigError(path, f"must run, and {refused.fault.text}", "Correct it") from refused
    found = {name: getattr(module, name) for name in TASKS if callable(getattr(module, name, None))}
    if not found:
        raise ConfigError(
            path, f"must define one of {', '.join(TASKS)}", f"Begin with a --template of {next(iter(TASKS))}"
        )
    return found


def run_theirs(path: str, function: Callable, *args):
    """Call a reader's code. Raises: Refused for whatever it raises, and where it does not end."""

    def stop(number, frame):
        raise TimeoutError(f"it did not end in {SECONDS:g} seconds")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with their_fault(path):
            return function(*args)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextmanager
def their_fault(path: str) -> Iterator[None]:
    """Raises: Refused for whatever is raised within."""
    try:
        yield
    except Refused:
        raise
    except (Exception, SystemExit) as error:
        where = "" if (line := line_of(path, error)) is None else f"line {line}: "
        said = "it is not written yet" if isinstance(error, NotImplementedError) else reason_of(error)
        raise Refused("raised", f"{where}{type(error).__name__}: {said}") from error


def line_of(path: str, error: BaseException) -> int | None:
    """The innermost line of a file that an error passed through."""
    if isinstance(error, SyntaxError):
        return error.lineno
    here = [f.lineno for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == Path(path).absolute()]
    return here[-1] if here else None


def template(name: str) -> str:
    """Signatures and docstrings of a task, or of all tasks of a lab. Raises: ConfigError for any other name."""
    names = [task for task, each in TASKS.items() if name in (task, each.lab)]
    if not names:
        known = ", ".join(TASKS)
        raise ConfigError(f"--template {name}", f"must be a task or a lab that has one: {known}", "Use one")
    source = inspect.getsource(solutions)
    lines, nodes = source.splitlines(), ast.parse(source).body
    about = ast.get_docstring(ast.parse(source)).split("\n\n", 1)[1]
    parts = [f'"""{about}\n"""', "import math\n\nimport jax\nimport jax.numpy as jnp\nfrom jax import lax"]
    for node in nodes:
        if isinstance(node, ast.FunctionDef) and node.name in names:
            parts.append(
                "\n" + "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno]) + "\n    raise NotImplementedError"
            )
    return "\n\n".join(parts)


# ---------------------------------------------------------------------------------------------------------- to judge


def grade(name: str, function: Callable, path: str) -> Grade:
    """Judge one function of a file."""
    task, found = TASKS[name], Grade(name)
    judges = {OnRanks: judge_on_ranks, Orders: judge_orders, Formula: judge_formula}
    try:
        with jax.enable_x64(True):
            judges[type(task)](task, function, path, found.scores)
    except Refused as refused:
        found.fault = refused.fault
        hints = [task.hints[key] for key in (refused.fault.result, refused.fault.reason) if key in task.hints]
        if hints:
            found.fault = replace(found.fault, text=f"{found.fault.text}. Hint: {hints[0]}")
    return found


def judge_on_ranks(task: OnRanks, function: Callable, path: str, scores: dict[str, float]) -> None:
    """Values on every number of ranks; then what it sends and holds."""
    programs, on_one = {}, jax.jit(task.whole, compiler_options=QUICKLY)
    for n in SIZES:
        run, compiled = on_mesh(f"{AXIS}={n}", partial(local, task, function), P(AXIS), P(AXIS)), None
        for draw in task.draws:
            whole = draw(n, np.random.default_rng(n))
            args = tuple(stacked(each, how, n) for each, how in zip(whole, task.arguments.values(), strict=True))
            if compiled is None:
                traced = run_theirs(path, run.trace, args)
                refuse_what_cannot_run(traced.jaxpr, n)
                with their_fault(path):
                    programs[n], compiled = traced.jaxpr, traced.lower().compile()
            right = on_one(*whole)
            with their_fault(path):
                found = jax.block_until_ready(compiled(args))
            compare(task, found, right if len(task.results) > 1 else (right,), n)
    for n, jaxpr in programs.items():
        judge_sent(task, jaxpr, n, scores)


def stacked(tree, how: Split, n: int):
    """[n, ...] of whole arrays that ranks split, or have copies of."""

    def of_ranks(x):
        x = np.asarray(x)
        if how == OWN:
            return x
        return np.broadcast_to(x, (n, *x.shape)) if how is None else np.stack(np.split(x, n, how))

    return jax.tree.map(of_ranks, tree)


def local(task: OnRanks, function: Callable, args):
    """The reader's function on one rank, and its results as that rank's entry of a stack."""
    results = function(*task.static, *jax.tree.map(lambda x: x[0], args), AXIS)
    if len(task.results) == 1:
        results = (results,)
    number = len(results) if isinstance(results, tuple | list) else 1
    if number != len(task.results):
        wanted = ", ".join(task.results)
        raise Refused("results", f"it must return ({wanted}), and returned {number} of {len(task.results)}")
    return varying(jax.tree.map(lambda y: jax.numpy.asarray(y)[None], tuple(results)), AXIS)


def compare(task: OnRanks, found: Sequence, whole: Sequence, n: int) -> None:
    """Raises: Refused for the first array that is not what one device computes."""
    for (name, how), ours, right in zip(task.results.items(), found, whole, strict=True):
        right = stacked(right, how, n)
        if jax.tree.structure(ours) != jax.tree.structure(right):
            text = f"{name} must be {parts_of(right)}, and is {parts_of(ours)}"
            raise Refused("results", text, result=name)
        pairs = zip(jax.tree_util.tree_leaves_with_path(right), jax.tree.leaves(ours), strict=True)
        for (key, wanted), got in pairs:
            leaf, got = name + jax.tree_util.keystr(key), np.asarray(got)
            got = got.astype(np.complex128 if got.dtype.kind == "c" else np.float64)
            if got.shape != wanted.shape:
                text = f"{leaf} on {n} ranks has shape {got.shape[1:]} and must have {wanted.shape[1:]}"
                raise Refused("shape", text, ranks=n, result=name)
            errors = np.abs(got - wanted).reshape(n, -1).max(1) / (np.abs(wanted).max() or 1.0)
            wrong = np.flatnonzero(~(errors <= TOLERANCE))
            if len(wrong):
                rank, seen = int(wrong[0]), likeness(got, wanted, int(wrong[0]))
                fewer = f" (right on {SIZES[SIZES.index(n) - 1]})" if n > SIZES[0] else ""
                text = f"{leaf} of rank {rank} on {n} ranks{fewer} is "
                text += seen or f"off by {errors[rank]:.1g} of its largest element"
                raise Refused("value", text, ranks=n, rank=rank, result=name, likeness=seen)


def parts_of(tree) -> str:
    """How arrays are put together, as in "[array, array]"."""
    return str(jax.tree.structure(tree)).removeprefix("PyTreeDef(").removesuffix(")").replace("*", "array")


def likeness(got: np.ndarray, wanted: np.ndarray, rank: int) -> str:
    """What a wrong array of a rank, of [n, ...], is instead; empty where it is nothing that we know."""
    n, mine, right = len(got), got[rank], wanted[rank]

    def near(a, b) -> bool:
        return bool(np.abs(a - b).max() <= 1e-8 * np.abs(wanted).max())

    if not np.isfinite(mine).all():
        return "not finite"
    if near(mine, 0 * mine):
        return "zero"
    factor = (mine * right).sum() / ((right * right).sum() or 1.0)
    if near(mine, factor * right):
        return f"{factor:.4g} times the right one" + f" (1/{n}: a mean, not a sum)" * math.isclose(factor, 1 / n)
    if near(got.sum(0), right):
        return "a part: the ranks' arrays add up to the right one, so a sum is missing"
    others = [other for other in range(n) if other != rank and near(mine, wanted[other])]
    return f"what rank {others[0]} should have" if others else ""


def refuse_what_cannot_run(jaxpr, n: int) -> None:
    """Refuse what may not end (a loop of unknown length, or a collective that some ranks come to and others do not),
    and messages of ranks that are not there."""
    for eqn, *_ in equations(jaxpr):
        pairs = eqn.params["perm"] if eqn.primitive.name == "ppermute" else ()
        if strange := [rank for pair in pairs for rank in pair if not 0 <= rank < n]:
            text = f"{source_of(eqn)} has a message of rank {strange[0]}, and ranks are 0 to {n - 1}"
            raise Refused("collective", text, ranks=n)
        if eqn.primitive.name == "while":
            raise Refused("endless", f"{source_of(eqn)} loops until something holds: use a loop of known length")
    if branches_differ(jaxpr):
        raise Refused("endless", "branches of a conditional send different things: ranks would wait for each other")


def judge_sent(task: OnRanks, jaxpr, n: int, scores: dict[str, float]) -> None:
    """Raises: Refused where a traced program sends or holds more than it has to."""
    mesh = MeshShape(dp=n)
    collectives = collectives_of(jaxpr, mesh)
    places = [source_of(eqn) for eqn, count, _ in equations(jaxpr) if eqn.primitive.name in KINDS and count]
    sizes = [each.sent_bytes(mesh) for each in collectives]
    each_sent = zip(collectives, sizes, places, strict=True)
    lines = [f"{each.kind} of {size:,} bytes in {place}" for each, size, place in each_sent]
    for each, line in zip(collectives, lines, strict=True):
        if task.only and each.kind not in task.only:
            raise Refused("collective", f"{line}: only {', '.join(task.only)} may be used", ranks=n)
    sent, least = sum(sizes), WORD * task.sends(n)
    scores["bytes sent"] = sent
    if sent > least * (1 + 1e-9):
        most = [line for _, line in sorted(zip(sizes, lines, strict=True), reverse=True)]
        text = f"on {n} ranks it sends {sent:,} bytes, {sent / least:.3g} times the {least:,.0f} that it has to"
        text += f": {'; '.join([*dict.fromkeys(most)][:3])}"
        raise Refused("bytes", text, ranks=n)
    messages = sum(each.count * each.num_operands for each in collectives)
    if task.messages is not None and messages != task.messages:
        raise Refused("messages", f"arrays sent: {messages}, and {task.messages} are asked for", ranks=n)
    limit = WORD * task.holds(n)
    if math.isfinite(limit):
        held, parts = temporary_bytes(jaxpr, {}, "cpu")
        scores["bytes held"] = held
        if held > limit:
            most = ", ".join(f"{size:,} of {what}" for size, what in parts[:2])
            raise Refused("memory", f"on {n} ranks it holds {held:,} bytes, over {limit:,.0f}: {most}", ranks=n)


def judge_orders(task: Orders, function: Callable, path: str, scores: dict[str, float]) -> None:
    for p, m in task.sizes:
        lines = run_theirs(path, function, p, m)
        name = f"{p} stages, {m} micro-batches"
        if not isinstance(lines, list) or len(lines) != p or not all(isinstance(line, str) for line in lines):
            raise Refused("results", f"{name}: it must return a list of {p} texts", ranks=p)
        try:
            orders = [[parse_cell(w, f"stage {s}") for w in line.split()] for s, line in enumerate(lines)]
            made = from_orders(Schedule("yours", p, m, 1, "loop"), orders)
        except ConfigError as error:
            raise Refused("order", f"{name}: {error}", ranks=p) from error
        held = in_flight(made)
        scores["% bubble"] = 100 * (bubble := simulate(made).idle_over_ideal)
        for stage, count in enumerate(held):
            if count > (most := task.in_flight(p, m, stage)):
                text = f"{name}: stage {stage} holds {count} micro-batches, and at most {most} are allowed"
                raise Refused("in flight", text, ranks=p, rank=stage)
        if bubble > task.bubble(p, m) + 1e-9:
            text = f"{name}: the bubble is {bubble:.1%} of the work, and {task.bubble(p, m):.1%} is possible"
            raise Refused("bubble", text, ranks=p)


def judge_formula(task: Formula, function: Callable, path: str, scores: dict[str, float]) -> None:
    for setting in task.settings:
        found, right = run_theirs(path, lambda: float(function(**setting))), float(task.whole(**setting))  # noqa: B023
        if not math.isclose(found, right, rel_tol=1e-12):
            words = ", ".join(f"{key}={value:,}" for key, value in setting.items())
            text = f"for {words} it is {found:,.0f} bytes, {found / right:.4g} times the right {right:,.0f}"
            raise Refused("value", text, result=function.__name__)


# --------------------------------------------------------------------------------------------------------- a program


@dataclass(frozen=True)
class GradeFlags:
    """Judge functions that you wrote, by the docstring of each; without a file, list the tasks."""

    file: Annotated[str, tyro.conf.Positional] = ""
    """A Python file with one or more of the tasks' functions."""
    template: str | None = None
    """Print what to write for this task, or for all tasks of this lab."""
    out: str | None = None
    """Add a line of JSON to this file for each function that passes: what it sends, holds or idles."""


def main(flags: GradeFlags, console: Console) -> int:
    if flags.template is not None:
        if flags.file:
            raise ConfigError("--template with a file", "must come alone", "Leave one out")
        print(template(flags.template))
        return 0
    if not flags.file:
        list_tasks(console)
        return 0
    require_writable("--out", flags.out)
    acquire_devices(max(SIZES), "cpu")
    grades = []
    for name, function in functions_of(flags.file).items():
        with console.status(f"running {name}"):
            grades.append(grade(name, function, flags.file))
    show(grades, console)
    if flags.out is not None:
        append_results(flags, grades)
    return 1 if any(each.fault for each in grades) else 0


def list_tasks(console: Console) -> None:
    rows = Rows("task", "lab", "what it computes")
    for name, task in TASKS.items():
        rows.add_row(name, task.lab, inspect.getdoc(getattr(solutions, name)).splitlines()[0])
    rows.print(console, left={"lab", "what it computes"}, under={"what it computes"})
    console.print(f"\n{command_text('labs')} grade --template NAME > my.py begins one.", markup=False)


def show(grades: Sequence[Grade], console: Console) -> None:
    rows = Rows("task", "", "score")
    for each in grades:
        score = ", ".join(f"{value:,g} {name}" for name, value in each.scores.items())
        rows.add_row(each.task, "refused" if each.fault else "right", "" if each.fault else score)
    rows.print(console, left={"", "score"}, styles={"right": "green", "refused": "bold red"})
    for each in grades:
        if each.fault:
            print_bullet(console, f"{each.task}: {each.fault.text.rstrip('.')}.", "red")


def append_results(flags: GradeFlags, grades: Sequence[Grade]) -> None:
    """A line for each function that passes, with the hash of the file that it is in."""
    digest = hashlib.sha256(Path(flags.file).read_bytes()).hexdigest()
    with Path(flags.out).open("a", encoding="utf-8") as file:
        for each in grades:
            if not each.fault:
                file.write(json.dumps({"task": each.task, **each.scores, "sha256": digest}) + "\n")
