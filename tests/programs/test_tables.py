"""Tables in terminals of any width, and progress of slow work."""

import fcntl
import io
import os
import struct
import termios

import pytest
from rich.cells import cell_len
from rich.console import Console

from experiments.progress import Progress
from experiments.tables import Rows, print_columns

MESHES = ["pp=2,replica=16,dp=128,tp=8", "dp=8", "pp=64,replica=4,dp=8,tp=8"]
COLUMNS = {
    "mesh": MESHES,
    "ZeRO": ["1", "3", "0"],
    "sp": ["yes", "", "yes"],
    "pipeline": ["interleaved×16 512", "", "zb-v 16"],
    "nothing": ["", "", ""],
    "step": ["18.16 s", "2.00 s", "3 ms"],
    "full": ["97%", "3%", "50%"],
}


def printed(width: int, columns=COLUMNS, **more) -> list[str]:
    stream = io.StringIO()
    print_columns(Console(file=stream, width=width), columns, **more)
    return stream.getvalue().splitlines()


@pytest.mark.parametrize("width", [40, 60, 80, 120, 160])
def test_a_table_shortens_no_cell_at_any_width(width):
    lines = printed(width, left=("mesh", "pipeline"), drop=("full",), under=("ZeRO", "sp", "pipeline"))
    text = "\n".join(lines)
    assert max(map(cell_len, lines)) <= width and "…" not in text and "nothing" not in text
    for mesh, zero, pipeline in zip(MESHES, COLUMNS["ZeRO"], COLUMNS["pipeline"], strict=True):
        place = next(number for number, line in enumerate(lines) if line.startswith(mesh))
        block = " ".join(lines[place : place + 4])
        assert pipeline in block and zero in block


def test_a_table_of_rows_loses_no_cell_in_a_narrow_terminal():
    stream = io.StringIO()
    table = Rows("option", "verdict", "time / none", "spread")
    option = "xla_gpu_experimental_parallel_collective_overlap_limit=2"
    table.add_row(option, "refused: [this] compiler does not know it")
    table.add_row("xla_cpu_x=1", "faster", "0.931", "0.900-0.960")
    table.print(Console(file=stream, width=80), left=("verdict",), under=("verdict", "spread"))
    for cell in (option, "refused: [this] compiler does not know it", "0.931", "0.900-0.960"):
        assert cell in stream.getvalue()
    assert "…" not in stream.getvalue()
    Rows("nothing").print(Console(file=stream))


def test_progress_is_taken_back_whole_in_a_narrow_terminal():
    """A line that wraps would leave its rows before what is printed next, an error say."""
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 20, 0, 0))
    with open(theirs, "w") as terminal, Progress("searching layouts of 64 devices", terminal, after=0.01):
        shown = b""
        while b"layout" not in shown:
            shown += os.read(ours, 100)
    with open(ours, "rb", buffering=0) as rest:
        shown += rest.read(1000)
    assert max(map(len, shown.split(b"\r"))) == 19 and shown.endswith(b"\r" + b" " * 19 + b"\r"), shown
