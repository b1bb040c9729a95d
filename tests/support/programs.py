"""A program in this process."""

import pytest

from experiments.cli import run_program


def run(program, flags, prog, words, capfd, **how):
    """Its exit code, and what it printed to stdout and stderr."""
    with pytest.raises(SystemExit) as ended:
        run_program(flags, program, prog, [str(word) for word in words])
    captured = capfd.readouterr()
    return ended.value.code or 0, captured.out, captured.err
