"""The time model's constants, measured on this machine. No test reads a clock's value."""

import dataclasses
import math
import sys

import numpy as np
import pytest

import experiments.calibrate
from experiments.calibrate import CalibrateFlags, as_toml, fitted, main
from experiments.entry import run_program
from jaxdist.plan.proof.trace import equations
from jaxdist.plan.time_model import EFFICIENCIES, Efficiency, efficiency_of, read_efficiency

CARD = "[accelerators.h100]\npeak_flops = { bfloat16 = %s, float32 = %s }\nmemory_bytes_per_s = 1e15\n"


def calibrate(monkeypatch, capfd, tmp_path, *words, peak="1e15") -> tuple[int, str, str]:
    (tmp_path / "card.toml").write_text(CARD % (peak, peak))
    words = ["--hardware", "h100", "--hardware-file", str(tmp_path / "card.toml"), "--device", "cpu", *words]
    monkeypatch.setattr(sys, "argv", ["calibrate", "--size", "256", "--repeats", "1", "--dtype", "float32", *words])
    with pytest.raises(SystemExit) as stop:
        run_program(CalibrateFlags, main, "calibrate")
    return stop.value.code or 0, *capfd.readouterr()


def test_what_is_measured_is_what_a_plan_reads(monkeypatch, capfd, tmp_path):
    path = tmp_path / "mine.toml"
    code, out, err = calibrate(monkeypatch, capfd, tmp_path, "--out", str(path))
    assert code == 0, err
    found, before = read_efficiency(path), efficiency_of("h100")
    assert "measured on cpu" in found.stack and f"--efficiencies {path}" in out
    for name in ("matmul", "attention", "hbm", "step_seconds"):
        assert getattr(found, name) != getattr(before, name) and name in out
    for name in ("between", "hide", "relative_error"):
        assert getattr(found, name) == getattr(before, name)


def test_the_curve_of_matmuls_is_fitted():
    curve = {dim: 0.8 * dim / (dim + 100) for dim in (64, 128, 1024, 8192)}
    assert fitted(curve) == pytest.approx({"matmul": 0.8, "half_size": 100})
    noisy = fitted({64: 0.01, 128: 0.04, 256: 0.3})  # faster than in proportion: no line has such a curve
    assert 0.3 <= noisy["matmul"] <= 1 and noisy["half_size"] > 0
    assert fitted(dict.fromkeys((64, 128, 1024), 0.5)) == pytest.approx({"matmul": 0.5, "half_size": 0}, abs=1e-9)


def test_every_constant_is_written_and_read(tmp_path):
    path = tmp_path / "all.toml"
    for efficiency in (*EFFICIENCIES.values(), Efficiency()):
        path.write_text(as_toml(efficiency))
        found = dataclasses.astuple(read_efficiency(path))
        for a, b in zip(found, dataclasses.astuple(efficiency), strict=True):
            assert a == b or np.isclose(a, b, rtol=1e-5)


def test_the_sum_over_local_cards_is_of_the_ring(devices):
    asked = []
    rate = experiments.calibrate.sum_bytes(lambda f, x: asked.append((f(x), x.nbytes)) or 2.0, devices[:4], 4)
    ((total, num_bytes),) = asked
    assert np.asarray(total, np.float32).sum() == 4 * num_bytes / 2 / 4
    assert rate == 2 * 3 / 4 * num_bytes / 4 / 2.0


def test_a_matmul_s_part_of_the_peak_is_of_the_products_that_run():
    """With a clock on which every product takes a second a FLOP, each reaches the whole of a peak of 1."""

    def flops(function, *arguments):
        found = equations(function.trace(*arguments).jaxpr)
        return sum(
            2 * times * math.prod(eqn.outvars[0].aval.shape) * eqn.invars[0].aval.shape[1]
            for eqn, times, _ in found
            if eqn.primitive.name == "dot_general"
        )

    curve = experiments.calibrate.matmul_curve(flops, 128, "float32", 1.0)
    assert curve == {64: 1.0, 128: 1.0}
