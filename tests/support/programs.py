"""A program in this process."""

import importlib
import typing

import pytest

from experiments.entry import run_program
from jaxdist.commands import VERBS


def run(capture, name: str, *words, **more) -> tuple[int, str, str]:
    """The exit code of a program ("train", "verify where"), and what it printed to stdout and stderr.

    capture: capfd or capsys, None where nobody asks what was printed. more: arguments of its `main`.
    """
    program, _, verb = name.partition(" ")
    module = importlib.import_module(f"experiments.{VERBS[program][verb] if verb else program}")
    module = importlib.import_module(f"{module.__name__}.__main__") if hasattr(module, "__path__") else module
    flags = typing.get_type_hints(module.main)["flags"]
    with pytest.raises(SystemExit) as ended:
        run_program(flags, lambda flags, console: module.main(flags, console, **more), name, [*map(str, words)])
    return ended.value.code or 0, *(capture.readouterr() if capture else ("", ""))
