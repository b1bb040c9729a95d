"""experiments.gpu: without a GPU it refuses; its sections, its border and its report, on the CPU at a tiny size."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from rich.console import Console

from experiments import gpu
from experiments.bench.rows import describe_machine
from experiments.gpu import GpuFlags, Report, Section
from jaxdist.config import PRESETS, ModelConfig
from jaxdist.errors import ConfigError
from jaxdist.runtime import Devices

TINY = ModelConfig(num_layers=2, width=64, num_heads=2, ffn_width=256, seq_len=32, vocab_size=250)
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def cpu() -> Devices:
    return Devices(jax.devices("cpu")[:1], False, "1 CPU device")


@pytest.fixture
def compile_fast():
    """XLA skips its costly passes: what is compared here holds without them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture
def no_gpu(monkeypatch):
    """Processes started by the test see no GPU, wherever the test runs."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def report(tmp_path) -> Report:
    return Report(str(tmp_path / "out"), describe_machine(None, "experiments.gpu"))


def written(folder: Path) -> dict:
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


# ---- the program ----


def test_without_a_gpu_it_refuses_and_writes_nothing(tmp_path, no_gpu):
    command = [sys.executable, "-m", "experiments.gpu", "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert ended.returncode == 2
    assert "JAX sees none on this machine" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (GpuFlags(batch_sizes=(4,)), "--batch-sizes 4 with 2 presets"),
        (GpuFlags(batch_sizes=(4, 0)), "batch_sizes=0"),
        (GpuFlags(steps=0), "steps=0"),
        (GpuFlags(time_limit_minutes=math.nan), "time_limit_minutes=nan"),
        (GpuFlags(peak_tflops=-1.0), "peak_tflops=-1.0"),
    ],
)
def test_flags_that_cannot_work(flags, message):
    with pytest.raises(ConfigError, match=message):
        gpu.plan_sections(flags)


def test_the_plan_alternates_the_frameworks():
    names = [section.name for section in gpu.plan_sections(GpuFlags())]
    assert names == [
        "pipeline",
        "collectives",
        "parity-xla",
        "parity-cudnn",
        "speed gpt2-124m",
        "torch gpt2-124m",
        "speed gpt2-774m",
        "torch gpt2-774m",
    ]
    timed = gpu.plan_sections(GpuFlags(section="speed", presets=("tiny", "12m"), batch_sizes=(3, 5)))
    assert timed == [Section("speed", "tiny", 3), Section("speed", "12m", 5)]


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        Report(str(tmp_path / "file" / "out"), {})


@pytest.mark.parametrize("passed, code, status", [(True, 0, "ok"), (False, 1, "failed")])
def test_main_runs_one_section_and_its_exit_code_tells(monkeypatch, tmp_path, cpu, passed, code, status):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    monkeypatch.setattr(gpu, "require_gpu", lambda: cpu)
    monkeypatch.setattr(gpu, "check_pipeline", lambda devices: {"passed": passed, "summary": f"on {devices.platform}"})
    assert gpu.main(GpuFlags(out=str(tmp_path), section="pipeline"), QUIET) == code
    (entry,) = written(tmp_path)["sections"]
    assert (entry["name"], entry["status"], entry["figures"]["summary"]) == ("pipeline", status, "on cpu")


# ---- the border ----


def test_a_failing_section_is_recorded_and_the_others_run(report):
    def run(section, _):
        if section.kind == "parity-cudnn":
            raise RuntimeError("no | such\nengine")
        return {"status": "ok", "figures": {"passed": True, "summary": "fine"}}

    gpu.run_sections(report, gpu.plan_sections(GpuFlags()), run, math.inf, QUIET)
    entries = {entry["name"]: entry for entry in written(report.folder)["sections"]}
    assert [name for name, entry in entries.items() if entry["status"] != "ok"] == ["parity-cudnn"]
    assert len(entries) == 8 and report.failed
    assert entries["parity-cudnn"]["error"] == "RuntimeError: no | such\nengine"
    assert "Traceback" in entries["parity-cudnn"]["log"]
    row = next(line for line in report.as_markdown().splitlines() if "parity-cudnn" in line)
    assert "FAILED" in row and r"no \| such engine" in row


def test_the_report_is_written_after_each_section(report):
    seen = []

    def run(section, _):
        seen.append(len(written(report.folder)["sections"]))
        return {"status": "skipped", "error": "for the test"}

    gpu.run_sections(report, gpu.plan_sections(GpuFlags()), run, math.inf, QUIET)
    assert seen == list(range(8)) and not report.failed


def test_a_section_does_not_start_without_time_left(report):
    now = [0.0]

    def run(section, left):
        assert left == 100 - now[0]
        now[0] += 45
        return {"status": "ok", "figures": {"summary": "fine"}}

    gpu.run_sections(report, gpu.plan_sections(GpuFlags()), run, 100.0, QUIET, clock=lambda: now[0])
    statuses = [entry["status"] for entry in report.sections]
    # After two sections 10 seconds are left, and no other section is worth starting with that.
    assert statuses == ["ok", "ok"] + ["out of time"] * 6
    assert not report.failed and "not run: out of time" in report.as_markdown()


def test_a_child_that_ends_early_is_a_failure_with_its_last_words(no_gpu):
    entry = gpu.run_in_child(Section("pipeline"), GpuFlags(), 90)
    assert entry["status"] == "failed"
    assert "ended with code 2" in entry["error"] and "JAX sees none" in entry["log"]


def test_a_child_hands_its_entry_over(no_gpu):
    entry = gpu.run_in_child(Section("torch", "tiny", 2), GpuFlags(), 90)
    assert entry["status"] == "skipped"
    assert "torch" in entry["error"]


def test_a_stuck_child_is_killed(monkeypatch, tmp_path):
    stuck = [sys.executable, "-c", "import time; print('working', flush=True); time.sleep(600)"]
    assert gpu.run_command(stuck, tmp_path / "log", 1.0) is None
    monkeypatch.setattr(gpu, "run_command", lambda command, log, seconds: log.write_text("a\nworking\n") and None)
    section, (_, most) = Section("pipeline"), gpu.SECONDS["pipeline"]
    assert gpu.run_in_child(section, GpuFlags(), most - 1)["status"] == "out of time"
    entry = gpu.run_in_child(section, GpuFlags(), most + 1)
    assert entry["status"] == "failed" and entry["error"].endswith("stuck; its last line: working")


# ---- the sections ----


def test_the_executor_equals_plain_gradients(cpu):
    figures = gpu.check_pipeline(cpu, width=16, num_layers=4, repeats=1)
    assert figures["passed"] and figures["gradient_error"] < 1e-6 and figures["num_ticks"] == 48


def test_one_device_leaves_no_collective(cpu, compile_fast):
    figures = gpu.check_collectives(cpu, TINY, 2)
    assert figures["passed"] and figures["collectives"] == {}


def test_collectives_are_counted_by_opcode():
    hlo = """
      %all-reduce.1 = (f32[2], f32[]) all-reduce(f32[2] %a, f32[] %b), metadata={op_name="psum"}
      %start = f32[2] all-gather-start(f32[1] %all-reduce.1)
      %done = f32[2] all-gather-done(f32[2] %start)
      ROOT %c = f32[2] collective-permute(%done)
    """
    assert gpu.count_collectives(hlo) == {"all-reduce": 1, "all-gather": 1, "collective-permute": 1}


def test_bf16_is_close_to_fp32(cpu, compile_fast):
    figures = gpu.check_parity(cpu, TINY, 2, "xla")
    (comparison,) = figures["comparisons"]
    assert figures["passed"], figures["summary"]
    assert (comparison["run"], comparison["against"]) == ("bf16 xla", "fp32 xla")
    assert figures["losses"]["fp32 xla"] == pytest.approx(math.log(TINY.vocab_size), rel=0.02)
    # bf16 was really used: nothing in fp32 errs by more than 1e-5.
    assert min(comparison["gradient_errors"].values()) > 1e-3
    assert {"tokens", "positions", "blocks.attention.w_qkv"} <= set(comparison["gradient_errors"])


@pytest.mark.parametrize(
    "loss, spoil, worst",
    [
        (1.0, lambda g: g * 1.04, "w"),
        (1.0, lambda g: g * math.nan, "w"),
        (1.01, lambda g: g, "b"),
        (math.nan, None, "b"),
    ],
    ids=["scaled", "nan", "loss", "nan-loss"],
)
def test_parity_can_fail(loss, spoil, worst):
    gradients = {"b": np.ones(3), "w": np.arange(4.0)}
    spoilt = {**gradients, "w": gradients["w"] if spoil is None else spoil(gradients["w"])}
    comparison = gpu.compare({"ours": (loss, spoilt), "reference": (1.0, gradients)}, "ours", "reference")
    assert not comparison["passed"] and comparison["worst_leaf"] == worst
    assert gpu.compare({"ours": (1.0, gradients), "reference": (1.0, gradients)}, "ours", "reference")["passed"]


def test_speed_of_a_tiny_model(cpu, compile_fast):
    figures = gpu.measure_speed(cpu, TINY, 2, num_steps=2, peak_tflops=1.0)
    assert figures["passed"] and figures["attention"] == "xla"
    assert figures["tokens_per_second"] == pytest.approx(2 * 32 / figures["step_seconds"])
    assert figures["mfu"] == pytest.approx(figures["tokens_per_second"] * figures["flops_per_token"] / 1e12)
    assert figures["last_loss"] < figures["first_loss"]  # the same batch every step
    memory, num_parameters = figures["compiled_memory"], figures["num_parameters"]
    assert memory["peak"] == figures["compiled_peak_bytes"]
    # bf16 parameters, fp32 masters and two moments are arguments, and are all reused.
    assert memory["argument"] >= memory["alias"] >= 14 * num_parameters
    json.dumps(figures)


def test_the_torch_model_is_the_same_model(cpu):
    torch = pytest.importorskip("torch")
    figures = gpu.measure_torch(TINY, 2, num_steps=2, on_cpu=True)
    program = gpu.one_device_program(cpu, TINY, 2, "float32", "xla", num_steps=1)
    assert figures["num_parameters"] == sum(
        math.prod(x.shape) for x in jax.tree.leaves(program.abstract_state().params)
    )
    assert figures["passed"] and figures["last_loss"] < figures["first_loss"]
    assert figures["torch"] == torch.__version__


def test_torch_is_skipped_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(gpu.importlib.util, "find_spec", lambda name: None)
    entry = gpu.run_here(Section("torch", "tiny", 2), GpuFlags(), None)
    assert entry == {"status": "skipped", "error": "torch is not installed"}


# ---- figures and the report ----


def test_mfu_of_gpt2_124m_by_hand():
    # 12 blocks of 12 * 768^2 + 13 * 768, ln_final, and the head of 50257 (not 50304) rows.
    multiplying = 12 * (12 * 768**2 + 13 * 768) + 2 * 768 + 50257 * 768
    assert multiplying == 123_653_376
    assert gpu.flops_per_token(PRESETS["gpt2-124m"]) == 6 * multiplying + 12 * 12 * 768 * 1024 == 855_166_464
    # 16 x 1024 tokens in 32.768 ms are 500,000 tokens/s: 427.6 of 989 TFLOP/s.
    figures = gpu.speed_figures(PRESETS["gpt2-124m"], 16, 0.032768, "NVIDIA H200", None)
    assert figures["tokens_per_second"] == pytest.approx(500_000)
    assert figures["mfu"] == pytest.approx(0.43234, abs=1e-5)


@pytest.mark.parametrize(
    "name, given, peak",
    [
        ("NVIDIA A100-SXM4-40GB", None, 312e12),
        ("NVIDIA H100 80GB HBM3", None, 989e12),
        ("NVIDIA H100 PCIe", None, 756e12),
        ("NVIDIA H200", None, 989e12),
        ("NVIDIA L4", None, None),
        ("NVIDIA H200", 500.0, 500e12),
    ],
)
def test_peak_of_a_card(name, given, peak):
    assert gpu.peak_flops(name, given) == peak


def test_the_table_sets_jax_beside_torch(report):
    speeds = {"speed": 480_000.0, "torch": 400_000.0}
    for kind, tokens_per_second in speeds.items():
        figures = {"passed": True, "summary": "timed", "tokens_per_second": tokens_per_second, "step_seconds": 0.0341}
        figures |= {"mfu": None, "peak_bytes": 3 * 2**30, "compiled_peak_bytes": 2**31 if kind == "speed" else None}
        entry = {"name": f"{kind} tiny", "kind": kind, "preset": "tiny", "status": "ok", "figures": figures}
        report.add({**entry, "seconds": 1.0})
    text = report.as_markdown()
    assert "| speed tiny | ok | 480,000 | 34.1 |  | 3.00 | 2.00 | timed |" in text
    assert "| torch tiny | ok | 400,000 | 34.1 |  | 3.00 |  | timed |" in text
    assert "tiny: jaxdist runs at 1.20 x the tokens/s of torch.compile" in text
    assert "python -m experiments.gpu" in text and "jax 0" in text
    assert written(report.folder)["ratios"] == report.ratios()
    assert (report.folder / "gpu.md").read_text(encoding="utf-8") == text
    Console(quiet=True).print(report.as_table())
