"""The files of a run: every step once, whole lines, on a disk that may be full."""

import json
import resource

import pytest

from jaxdist.config import PRESETS, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.metrics import METRICS, RunFiles, read_config

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


@pytest.mark.parametrize("content", [None, "{", "[]", "[" * 100_000])
def test_a_configuration_that_is_none(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)
