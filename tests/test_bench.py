"""Benches: rows of one form, simulated time that is never called speed, and each bench at a tiny size."""

import dataclasses
import json

import pytest

from experiments.bench.__main__ import BENCHES, main
from experiments.bench.flags import BenchFlags
from experiments.bench.rows import Row, ratios, rows_of
from experiments.cli import run_program

TINY = ["--num-layers", "2", "--width", "32", "--num-heads", "4", "--seq-len", "32", "--vocab-size", "100"]
TINY += ["--repeats", "2"]
KEYS = {"name", "value", "unit", "spread", "runs", "against", "ratio", "simulated"}


def run(capsys, *args) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        run_program(BenchFlags, main, "experiments.bench", [str(arg) for arg in args])
    captured = capsys.readouterr()
    return ended.value.code, captured.out + captured.err


def test_a_row_is_a_median_with_its_spread():
    row = Row.of("step", [3.0, 1.0, 2.0], "s", against="theirs", ratio=0.5)
    assert (row.value, row.spread, row.runs) == (2.0, (1.0, 3.0), 3)
    assert {field.name for field in dataclasses.fields(Row)} == KEYS
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]


@pytest.mark.parametrize("unit", ["tokens/s", "bytes/s", "steps/s"])
def test_simulated_devices_have_no_speed(unit):
    with pytest.raises(ValueError, match="no speed"):
        Row("dp=8", 1.0, unit, simulated=True)
    Row("one device", 1.0, unit)
    Row("dp=8", 1.0, "s", simulated=True)


def test_figures_become_rows_by_the_last_word_of_their_name():
    rows = rows_of("10 GB", {"open_seconds": 0.5, "grown_bytes": 3, "first_batch_seconds": None})
    assert [(row.name, row.unit) for row in rows] == [("10 GB: open", "s"), ("10 GB: grown", "bytes")]


SMALL = [
    ("step", ["--mesh", "dp=2", "--zero", "1", "--accumulate", "2", *TINY], "update", 5),
    ("collectives", ["--mesh", "dp=2", "--message-bytes", "65536", "--repeats", "2"], "all_to_all", 5),
    ("compile", ["--depths", "1", "2", *TINY], "layers", 2),
]


@pytest.mark.parametrize("bench, args, word, num_rows", SMALL)
def test_a_bench_prints_a_table_and_writes_rows(capsys, tmp_path, bench, args, word, num_rows):
    path = tmp_path / "figures.json"
    code, printed = run(capsys, bench, *args, "--json", path)
    record = json.loads(path.read_text())
    assert code in (0, 1) and word in printed
    assert {"command", "date", "cpu", "python", "versions", "model"} <= set(record["header"])
    assert len(record["rows"]) == num_rows and all(set(row) == KEYS for row in record["rows"])


BAD = [
    (["step", "--repeats", "0"], "repeats=0"),
    (["peers", "--dtype", "bfloat16"], "rows of its own"),
    (["peers", "--mesh", "dp=2"], "rows of its own"),
    (["collectives", "--mesh", "dp=2,tp=2"], "one axis"),
    (["collectives", "--zero", "3"], "rows of its own"),
    (["compile", "--json", "/nowhere/x.json"], "--json"),
]


@pytest.mark.parametrize("args, message", BAD)
def test_what_a_bench_cannot_do_is_refused(capsys, args, message):
    code, printed = run(capsys, *args)
    assert code == 2 and message in printed


def test_every_bench_is_listed_in_the_help():
    import experiments.bench.__main__ as program

    assert all(f"experiments.bench {bench} " in program.__doc__ for bench in BENCHES)
