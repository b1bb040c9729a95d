"""What a newcomer has to read to understand one thing: files and lines that run when it is done once.

python -m tests.support.reading_paths

Each row does something small and notes which functions of `jaxdist` ran. *Files* and *lines* are of the whole files
they stand in, *executed* of these functions alone. Errors are left out.
"""

import ast
import inspect
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import jax
from rich.console import Console

import jaxdist
from experiments.entry import run_program
from experiments.tables import Rows
from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.checkpoint.resume import Progress, restore, save
from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import search
from jaxdist.runtime.devices import acquire_devices
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

PACKAGE = Path(inspect.getfile(jaxdist)).parent
OUTSIDE = ("__init__", "errors")


@dataclass(frozen=True)
class ReadingFlags:
    """Count the files and lines behind a step, a plan and a resume."""

    files: bool = False
    """Name the files too."""


def step(mesh: str, **parallel) -> None:
    """Trace one training step: nothing but the step itself runs."""
    config = RunConfig(PRESETS["proof"], ParallelConfig(parse_mesh(mesh), **parallel), batch_size=16)
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    state, batch = program.abstract_state(), program.abstract_batch()
    recorded(lambda: program.step.trace(state, batch))


def plan() -> None:
    config = RunConfig(PRESETS["tiny"], batch_size=16)
    recorded(lambda: search(config, Cluster(find_hardware("h100"), num_nodes=1, devices_per_node=8)))


def resume() -> None:
    """Save a state and restore it."""

    def there_and_back() -> None:
        save(checkpoints, program, state, {}, Progress())
        checkpoints.wait()
        restore(checkpoints, checkpoints.manifest(0), program, same_run=True)

    config = RunConfig(PRESETS["proof"], ParallelConfig(parse_mesh("dp=2"), zero=1), batch_size=16)
    program = build_program(config, make_mesh(config.parallel.mesh, acquire_devices(2).devices))
    state = program.init(0)
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        recorded(there_and_back)


PATHS: dict[str, Callable[[], None]] = {
    "a step, dp=2,tp=2": lambda: step("dp=2,tp=2"),
    "a step, dp=2, ZeRO-3": lambda: step("dp=2", zero=3),
    "a pipeline step, pp=2": lambda: step("pp=2"),
    "a plan": plan,
    "a save and a resume": resume,
}
_ran: dict[tuple[str, int], None] = {}


def recorded(work: Callable[[], object]) -> None:
    """Run it, noting every function of the package that is called."""

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(str(PACKAGE)):
            _ran[frame.f_code.co_filename, frame.f_code.co_firstlineno] = None

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)


def count(path: Callable[[], None]) -> dict[str, tuple[int, int]]:
    """File -> (its lines, lines of its functions that ran), in the order in which files are first entered."""
    _ran.clear()
    jax.clear_caches()
    path()
    found = {}
    for file in dict.fromkeys(file for file, _ in _ran):
        if Path(file).stem in OUTSIDE:
            continue
        starts = {line for other, line in _ran if other == file}
        inside = {n for first, start, end in functions(file) if first in starts for n in range(start, end + 1)}
        found[str(Path(file).relative_to(PACKAGE))] = len(Path(file).read_text().splitlines()), len(inside)
    return found


@cache
def functions(file: str) -> list[tuple[int, int, int]]:
    """(line that Python reports, first line, last line) of every function in a file."""
    nodes = [n for n in ast.walk(ast.parse(Path(file).read_text())) if isinstance(n, ast.FunctionDef | ast.Lambda)]
    return [
        (min([n.lineno, *(d.lineno for d in getattr(n, "decorator_list", []))]), n.lineno, n.end_lineno) for n in nodes
    ]


def main(flags: ReadingFlags, console: Console) -> int:
    acquire_devices(2)
    table = Rows("to understand", "files", "lines", "executed")
    for name, path in PATHS.items():
        found = count(path)
        lines, executed = (sum(each[i] for each in found.values()) for i in (0, 1))
        table.add_row(name, str(len(found)), f"{lines:,}", f"{executed:,}")
        if flags.files:
            console.print(f"{name}: " + ", ".join(f"{file} {n[1]}/{n[0]}" for file, n in found.items()))
    table.print(console)
    return 0


if __name__ == "__main__":
    run_program(ReadingFlags, main, "tests.support.reading_paths")
