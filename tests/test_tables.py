"""Tables in terminals of any width, and progress of slow work."""

import io
import threading
import time

import pytest
from rich.cells import cell_len
from rich.console import Console

import experiments.plan
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


def test_a_table_leaves_columns_out_and_says_so_before_it_needs_second_lines():
    whole = printed(200, drop=("full",), under=("ZeRO",))
    assert len(whole) == 4 and "full" in whole[0]
    narrower = printed(max(map(cell_len, whole)) - 1, drop=("full",), under=("ZeRO",))
    assert len(narrower) == 5 and "full" not in narrower[0] and narrower[-1] == "(no room for: full)"


@pytest.mark.parametrize("width", [80, 160])
def test_a_plan_names_every_mesh_and_begins_with_the_command(width):
    stream = io.StringIO()
    console = Console(file=stream, width=width, force_terminal=True, color_system=None)
    flags = experiments.plan.PlanFlags(model="tiny", nodes=2, batch_size=64, tokens=1e9, price_per_hour=2.5)
    assert experiments.plan.main(flags, console) == 0
    lines = stream.getvalue().splitlines()
    assert max(map(cell_len, lines)) <= width and "…" not in stream.getvalue()
    titles = [place for place, line in enumerate(lines) if line.startswith("mesh ")]
    assert len(titles) == 2 and lines.index("Run it") < titles[0] < titles[1] < lines.index("Why")
    found = experiments.plan.plan_for(experiments.plan.ask(flags), 2, flags.top)
    for row in experiments.plan.rows_of(found):
        assert any(line.startswith(f"{row['mesh']} ") for line in lines[titles[0] : titles[1]])


def test_rows_that_differ_in_replica_and_dp_alone_are_one():
    flags = experiments.plan.PlanFlags(model="tiny", nodes=2, batch_size=64)
    found = experiments.plan.plan_for(experiments.plan.ask(flags), 2, 100)
    rows = experiments.plan.rows_of(found)
    assert any(row["also"] for row in rows)
    ignored = {"mesh", "also", "step_seconds", "error", "mfu", "device_seconds", "memory_bytes", "memory", "time"}
    kinds = []
    for row in rows:
        mesh = dict(part.split("=") for part in row["mesh"].split(","))
        data = int(mesh.pop("replica", 1)) * int(mesh.pop("dp", 1))
        settings = {name: value for name, value in row.items() if name not in ignored}
        kinds.append(repr((sorted(mesh.items()), data, settings)))
        for other in row["also"]:
            assert other["mesh"] != row["mesh"] and other["step_seconds"] >= row["step_seconds"]
    assert len(kinds) == len(set(kinds))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()], ids=["file", "terminal"])
def test_slow_work_says_how_far_it_is(stream):
    with Progress("searching", stream, after=0.02, every=0.02) as progress:
        progress.update(1, 4)
        deadline = time.monotonic() + 5
        while "searching: 1 of 4, about" not in stream.getvalue() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    text = stream.getvalue()
    assert "searching: 1 of 4, about" in text and " left" in text
    assert text.endswith("\r") if stream.isatty() else text.endswith("left\n")


def test_quick_work_and_work_without_a_count():
    stream = io.StringIO()
    with Progress("quick", stream):
        pass
    assert stream.getvalue() == ""
    with Progress("compiling", stream, after=0.01, every=0.01):
        deadline = time.monotonic() + 5
        while not stream.getvalue() and time.monotonic() < deadline:
            threading.Event().wait(0.01)
    assert stream.getvalue().startswith("compiling: 0 s so far\n")


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
