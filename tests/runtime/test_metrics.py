"""The files of a run: every step once, whole lines, on a disk that may be full."""

import json
import os
import resource

import pytest

from jaxdist.config import RunConfig
from jaxdist.models.presets import PRESETS
from jaxdist.runtime.metrics import METRICS, RunFiles

CONFIG = RunConfig(PRESETS["proof"])


def steps(folder) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / METRICS).read_text().splitlines()]


def test_lines_of_later_steps_and_half_lines_are_dropped(tmp_path):
    with RunFiles(tmp_path, CONFIG, {}) as files:
        for step in (1, 2, 3):
            assert files.write_step({"step": step, "loss": float("nan")})
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"step": 4, "lo')
    with RunFiles(tmp_path, CONFIG, {}, steps=2) as files:
        assert steps(tmp_path) == [1, 2]
        files.write_step({"step": 3, "loss": 1.0})
        files.go_back(1)
        files.write_step({"step": 2, "loss": 1.0})
    assert steps(tmp_path) == [1, 2]


def test_a_full_disk_costs_lines_not_the_run(tmp_path):
    with RunFiles(tmp_path, CONFIG, {}) as files:
        files.write_step({"step": 1})
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
        written = files.write_step({"step": 2, "loss": 1.0})
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert not written and files.failure
        assert files.write_step({"step": 3})
    assert steps(tmp_path) == [1, 3]


LINES = [b'{"step": 1}', b'{"step": 2}', b'{"step": 3}']


@pytest.mark.parametrize(
    ("lines", "kept", "said"),
    [
        ([LINES[0], b"{broken", LINES[2]], [1, 3], "line 2 is not the record"),
        ([LINES[0], b"\xff\xfe", b"[]", LINES[2]], [1, 3], "line 2 and 1 other lines are"),
        ([b'{"loss": 1.0}', *LINES], [1, 2, 3], "line 1 is"),
        ([b'{"step": true}', b'{"step": 1.5}', *LINES], [1, 2, 3], "line 1 and 1 other"),
        ([*LINES[:2], *LINES], [1, 2, 3], "line 3 and 1 other"),  # two runs wrote it
        ([b"[" * 100_000, *LINES], [1, 2, 3], "line 1 is"),
    ],
)
def test_damaged_metrics_are_named_and_kept_and_the_good_lines_stay(tmp_path, lines, kept, said):
    content, warnings = b"\n".join(lines) + b"\n", []
    (tmp_path / METRICS).write_bytes(content)
    with RunFiles(tmp_path, CONFIG, {}, steps=3, warn=warnings.append) as files:
        assert steps(tmp_path) == kept and files.write_step({"step": 4})
    assert (tmp_path / "metrics.jsonl.damaged").read_bytes() == content
    (warning,) = warnings
    assert said in warning and "metrics.jsonl.damaged" in warning
    with RunFiles(tmp_path, CONFIG, {}, steps=4, warn=warnings.append):
        assert len(warnings) == 1 and steps(tmp_path) == [*kept, 4]


@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_metrics_that_are_no_file_are_set_aside(tmp_path, make):
    make(tmp_path / METRICS)
    warnings = []
    with RunFiles(tmp_path, CONFIG, {}, steps=3, warn=warnings.append) as files:
        assert files.write_step({"step": 4})
    assert "not a regular file" in warnings[0] or "directory" in warnings[0]
