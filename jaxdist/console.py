"""The command `jaxdist`: which programs there are, and one of them run."""

import ast
import runpy
import sys
import textwrap
from contextlib import suppress
from pathlib import Path

from jaxdist import programs
from jaxdist.commands import moved_text
from jaxdist.errors import printable
from jaxdist.runtime.signals import use_default_sigint
from jaxdist.versions import __version__

USAGE = "usage: jaxdist [--help | --version] PROGRAM ..."
WIDTH = 80


def main() -> int:
    """Exit code 2 for an unknown program; a program that runs ends the process itself."""
    match sys.argv[1:]:
        case [] | ["-h" | "--help", *_]:
            with suppress(BrokenPipeError):  # whoever reads it has seen enough
                print(overview(), flush=True)
        case ["--version", *_]:
            print(f"jaxdist {__version__}")
        case [name, *_] if name in find_programs():
            del sys.argv[1]
            use_default_sigint()
            runpy.run_module(f"{programs.__name__}.{name}", run_name="__main__", alter_sys=True)
        case [name, *_]:
            known = ", ".join(find_programs())
            unknown = f"error: jaxdist {printable(name)!r}: the programs are {known}. Use one of them."
            print(moved_text(name) or unknown, file=sys.stderr)
            return 2
    return 0


def find_programs() -> dict[str, Path]:
    """Name -> source of whatever ends in `run_program`, found without importing it."""
    folder = Path(*programs.__path__)
    files = {path.stem: path for path in folder.glob("*.py")}
    files |= {path.parent.name: path for path in folder.glob("*/__main__.py")}
    return {name: path for name, path in sorted(files.items()) if "\n    run_program(" in path.read_text("utf-8")}


def overview() -> str:
    """What `jaxdist --help` prints: each program with the first line of its docstring."""
    found = find_programs()
    indent = 2 + max(map(len, found)) + 2
    lines = [USAGE, "", "programs:"]
    for name, path in found.items():
        about = str(ast.get_docstring(ast.parse(path.read_text("utf-8")))).splitlines()[0]
        start = f"  {name}".ljust(indent)
        lines += textwrap.wrap(about, WIDTH, initial_indent=start, subsequent_indent=" " * indent)
    return "\n".join([*lines, "", "`jaxdist PROGRAM --help` shows the flags of one."])
