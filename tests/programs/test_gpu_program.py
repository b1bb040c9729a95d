"""`bench gpu`: without a GPU it refuses; its border and its report, with processes of its own on the CPU."""

import json
import math
import os
import subprocess
import sys
import time
from dataclasses import asdict
from pathlib import Path
from unittest import mock

import jax
import pytest
from jax._src.compiler import get_compile_options
from rich.console import Console

from experiments.bench import gpu
from experiments.bench.__main__ import BENCHES
from experiments.bench.flags import BenchFlags
from experiments.bench.gpu import GpuFlags, Report, Section
from experiments.bench.rows import Row, describe_machine
from experiments.entry import run_program
from jaxdist.errors import ConfigError
from jaxdist.runtime.devices import TUNED, Devices, keep_tuning

QUIET = Console(quiet=True)
OK = ({"status": "ok", "output": "fine"}, [asdict(Row("step", 0.5, "s"))])


@pytest.fixture
def no_gpu(monkeypatch):
    """Processes started by the test see no GPU, wherever the test runs."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


@pytest.fixture
def report(tmp_path, monkeypatch) -> Report:
    monkeypatch.setattr(sys, "argv", ["bench", "gpu", "--only", "parity"])
    return Report(str(tmp_path / "out"), describe_machine(None))


def written(folder: Path) -> dict:
    return json.loads((folder / "gpu.json").read_text(encoding="utf-8"))


# ---- the program ----


def test_without_a_gpu_it_refuses_and_writes_nothing(tmp_path, no_gpu):
    command = [sys.executable, "-m", "experiments.bench", "gpu", "--out", str(tmp_path / "out")]
    ended = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=120)
    assert ended.returncode == 2
    assert "sees none on this machine" in ended.stderr and "Traceback" not in ended.stderr
    assert ended.stdout == ""
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "flags, message",
    [
        (GpuFlags(time_limit_minutes=math.nan), "time_limit_minutes=nan"),
        (GpuFlags(time_limit_minutes=0.0), "time_limit_minutes=0"),
        (GpuFlags(only=("nonsense",)), "Use some of step"),
    ],
)
def test_flags_that_cannot_work(flags, message):
    with pytest.raises(ConfigError, match=message):
        gpu.plan_sections(flags)


def test_the_plan_starts_with_what_matters_most():
    names = [section.name for section in gpu.plan_sections(GpuFlags())]
    assert names[:3] == ["step gpt2-124m", "sets gpt2-124m", "peers gpt2-124m"] and names[-1] == "collectives"
    assert [section.name for section in gpu.plan_sections(GpuFlags(only=("kernels", "parity")))] == [
        "parity",
        "kernels gpt2-124m",
    ]
    (collectives,) = gpu.plan_sections(GpuFlags(only=("collectives",)), num_gpus=8)
    assert "--device gpu --mesh dp=8" in collectives.args


@pytest.mark.parametrize("section", gpu.plan_sections(GpuFlags()), ids=lambda section: section.name)
def test_every_section_is_a_command_that_its_bench_takes(section, monkeypatch):
    """The whole way to the bench itself: flags, and what they may be combined with."""
    command = section.command(100)
    assert "{" not in " ".join(command) and command[3] in BENCHES
    seen = []
    import experiments.bench.__main__ as program

    def bench(flags, config, console):
        seen.append((flags, config))
        return [Row("a figure", 1.0, "s")], None

    module = type("module", (), {BENCHES[command[3]][1]: bench})
    monkeypatch.setattr(program.importlib, "import_module", lambda name, package: module)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    with pytest.raises(SystemExit) as ended:
        run_program(BenchFlags, program.main, "bench", command[3:])
    assert ended.value.code == 0 and len(seen) == 1
    assert math.isinf(seen[0][0].start_within) or seen[0][0].start_within == 40


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="must be a folder"):
        Report(str(tmp_path / "file" / "out"), {})


@pytest.mark.parametrize("status, code", [("ok", 0), ("out of time", 0), ("missed", 1), ("failed", 1)])
def test_the_exit_code_tells(monkeypatch, tmp_path, status, code):
    cpu = jax.devices("cpu")
    monkeypatch.setattr(gpu, "require_gpu", lambda: Devices(cpu[:1], False, "1 CPU device"))
    monkeypatch.setattr(gpu.jax, "devices", lambda platform: cpu[:1])
    monkeypatch.setattr(gpu, "run_bench", lambda section, left: ({**OK[0], "status": status}, OK[1]))
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1")
    assert gpu.main(GpuFlags(out=str(tmp_path), only=("parity",)), QUIET) == code
    (entry,) = written(tmp_path)["sections"]
    assert (entry["name"], entry["status"], entry["output"]) == ("parity", status, "fine")


# ---- the border ----


def test_a_failing_section_is_recorded_and_the_others_run(report):
    def run(section, _):
        if section.name == "executor":
            raise RuntimeError("no such\nengine")
        return OK

    sections = gpu.plan_sections(GpuFlags())
    gpu.run_sections(report, sections, run, math.inf, QUIET)
    found = written(report.folder)
    entries = {entry["name"]: entry for entry in found["sections"]}
    assert [name for name, entry in entries.items() if entry["status"] != "ok"] == ["executor"]
    assert len(entries) == len(sections) and report.failed
    assert entries["executor"]["error"] == "RuntimeError: no such\nengine"
    assert "Traceback" in entries["executor"]["log"]
    assert [row["section"] for row in found["rows"]] == [name for name in entries if name != "executor"]
    assert "**executor**: failed" in report.as_markdown() and "no such\nengine" in report.as_markdown()


def test_the_report_is_written_after_each_section(report):
    seen = []

    def run(section, _):
        seen.append(len(written(report.folder)["sections"]))
        return OK

    sections = gpu.plan_sections(GpuFlags())
    gpu.run_sections(report, sections, run, math.inf, QUIET)
    assert seen == list(range(len(sections))) and not report.failed
    text = (report.folder / "gpu.md").read_text(encoding="utf-8")
    assert text == report.as_markdown() and "python -m experiments.bench gpu --only parity`" in text and "jax 0" in text


@pytest.mark.parametrize(
    ("refusal", "flags", "expected"),
    [
        (None, None, "--xla_gpu_experimental_enable_fusion_autotuner=false"),
        ("No such option", None, None),
        (None, "", ""),
    ],
)
def test_xla_flags_are_what_this_compiler_takes_and_a_users_own_stay(monkeypatch, tmp_path, refusal, flags, expected):
    monkeypatch.setattr(gpu, "refused_option", lambda name, value: refusal)
    names = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "XLA_FLAGS")
    with mock.patch.dict(os.environ):
        for name in names:
            os.environ.pop(name, None)
        if flags is not None:
            os.environ["XLA_FLAGS"] = flags
        gpu.share_autotuning(tmp_path)
        assert os.environ.get("XLA_FLAGS") == expected


def test_a_run_keeps_what_was_tuned_and_leaves_a_users_own_cache(tmp_path):
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {name: getattr(jax.config, name) for name in names}
    try:
        jax.config.update(names[0], str(tmp_path / "own"))
        keep_tuning(tmp_path / "run")
        assert jax.config.jax_compilation_cache_dir == str(tmp_path / "own") and not (tmp_path / "run").exists()
        jax.config.update(names[0], None)
        keep_tuning(tmp_path / "run")
        options = get_compile_options(1, 1)
        build = options.executable_build_options  # held, or its part below is read after it is freed
        assert build.debug_options.xla_gpu_per_fusion_autotune_cache_dir == str(tmp_path / "run" / TUNED)
        assert (tmp_path / "run" / TUNED).is_dir()
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def test_a_section_does_not_start_without_time_left(report):
    now = [0.0]

    def run(section, left):
        assert left == 150 - now[0]
        now[0] += 45
        return OK

    gpu.run_sections(report, gpu.plan_sections(GpuFlags()), run, 150.0, QUIET, clock=lambda: now[0])
    statuses = [entry["status"] for entry in report.sections]
    # After three sections 15 seconds are left, and no other section is worth starting with that.
    assert statuses == ["ok"] * 3 + ["out of time"] * (len(statuses) - 3)
    assert not report.failed and "not run: out of time" in report.as_markdown()


def test_a_bench_hands_its_rows_over(no_gpu):
    section = Section("executor", "executor --device cpu --width 16 --num-heads 4 --num-layers 2 --repeats 1")
    entry, rows = gpu.run_bench(section, 90)
    assert entry["status"] == "ok" and "zb-v on one stage" in entry["output"], entry
    assert {"error of gradient", "executor"} <= {row["name"] for row in rows}


def test_a_bench_that_ends_early_is_a_failure_with_its_last_words(no_gpu):
    entry, rows = gpu.run_bench(Section("step", "step --device gpu"), 90)
    assert entry["status"] == "failed" and rows == []
    assert "ended with code 2" in entry["error"] and "shows JAX 0" in entry["log"]


def test_a_stuck_bench_is_killed_with_what_it_started(monkeypatch, tmp_path):
    alive = tmp_path / "alive"
    grandchild = f"import time, pathlib\nwhile True: pathlib.Path({str(alive)!r}).touch(); time.sleep(0.05)"
    code = (
        f"import subprocess, sys; print('working', flush=True); subprocess.run([sys.executable, '-c', {grandchild!r}])"
    )
    stuck = [sys.executable, "-c", code]
    assert gpu.run_command(stuck, tmp_path / "out", tmp_path / "log", 3.0) is None
    alive.unlink(missing_ok=True)
    time.sleep(0.5)
    assert not alive.exists()

    def killed(command, output, log, seconds):
        output.write_text("a\nworking\n")
        log.write_text("")

    monkeypatch.setattr(gpu, "run_command", killed)
    section = Section("parity", "parity", most=50)
    assert gpu.run_bench(section, 49)[0]["status"] == "out of time"
    entry, _ = gpu.run_bench(section, 51)
    assert entry["status"] == "failed" and entry["error"].endswith("stuck; its last line: working")


def test_a_target_that_is_missed_keeps_its_rows(monkeypatch):
    def missed(command, output, log, seconds):
        output.write_text("slow\n")
        log.write_text("")
        figures = {"header": {"model": {}}, "rows": OK[1]}
        Path(command[command.index("--json") + 1]).write_text(json.dumps(figures))
        return 1

    monkeypatch.setattr(gpu, "run_command", missed)
    assert gpu.run_bench(Section("peers", "peers"), 90) == ({"status": "missed", "model": {}, "output": "slow"}, OK[1])
