"""Check and measure one GPU, unattended: a fixed selection of `bench`, most important first.

python -m experiments.bench gpu

Every bench runs in a process of its own: a peak is then one section's peak, two frameworks never share a process, and a
bench that crashes or hangs costs its own figures alone. `gpu.json` (every row of every bench) and `gpu.md` (their
tables) are rewritten after each.
"""

import json
import math
import os
import shlex
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exc
from typing import Any

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.commands import command_text, command_words, install_text
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole
from jaxdist.runtime.devices import TUNED, Devices, acquire_devices, refused_option

from ..entry import make_folder, require_writable
from .rows import describe_machine

Clock = Callable[[], float]
FUSION_AUTOTUNER = "xla_gpu_experimental_enable_fusion_autotuner"


@dataclass(frozen=True)
class GpuFlags:
    """Check and measure one GPU, unattended: parity, speed beside PyTorch, operations, memory, compiler options."""

    out: str = "runs/gpu"
    """Folder for gpu.json and gpu.md; those of an earlier run are replaced."""
    only: tuple[str, ...] = ()
    """Sections whose name starts with one of these; default all."""
    time_limit_minutes: float = 15.0
    """A section starts only if enough of this is left, and none runs beyond it."""


@dataclass(frozen=True)
class Section:
    """One bench. least: seconds without which it is not started; most: after which it counts as stuck and is killed.

    In `args`, {seconds} stands for the time after which the bench should start nothing more.
    """

    name: str
    args: str
    least: float = 20
    most: float = 150

    def command(self, limit: float) -> list[str]:
        args = shlex.split(self.args.format(seconds=max(limit - 60, 0)))
        return [*command_words("bench"), *args]


# A section's result, ready for JSON: "status" (ok; missed: it ran, and a tolerance or target is not met; failed; out of
# time), "seconds", "output" (what it printed) or "error" with the end of its log as "log".
Entry = dict[str, Any]
Runner = Callable[[Section, float], tuple[Entry, list[dict]]]


def plan_sections(flags: GpuFlags, num_gpus: int = 1) -> list[Section]:
    """What will run, in order of importance. Raises: ConfigError for flags that cannot work."""
    limit = flags.time_limit_minutes
    if not (math.isfinite(limit) and limit > 0):
        raise ConfigError(f"time_limit_minutes={limit}", "must be a positive finite number", "Use the default")

    def step(preset: str, batch_size: int = 16, more: str = "") -> str:
        return f"--device gpu --dtype bfloat16 --model {preset} --batch-size {batch_size} {more}".rstrip()

    whole = "step --no-phases"
    experts = step("qwen3-30b-a3b", 1, "--seq-len 4096")
    adapters = step("llama3-8b", 1, "--seq-len 2048 --lora 16 --unroll-layers no")
    mesh = f"--device gpu --mesh dp={num_gpus}" if num_gpus > 1 else "--device cpu --mesh dp=4"
    sections = [
        Section("step gpt2-124m", f"{whole} {step('gpt2-124m')}", 60, 150),
        Section("sets gpt2-124m", f"flags --only=--xla {step('gpt2-124m')} --start-within {{seconds}}", 90, 200),
        Section("peers gpt2-124m", f"peers --only 'one device' --repeats 3 {step('gpt2-124m')}", 60, 200),
        Section("parity", "parity --device gpu --model gpt2-124m --num-layers 2 --batch-size 2", 40, 200),
        Section("step qwen3-30b-a3b", f"{whole} --num-layers 2 {experts}", 40, 150),
        Section("experts qwen3-30b-a3b", f"experts --only grouped {experts}", 30, 90),
        Section("step llama3.2-1b", f"{whole} {step('llama3.2-1b', 4, '--seq-len 4096')}", 40, 120),
        Section("adapters llama3-8b", f"{whole} {adapters}", 40, 120),
        Section("muon gpt2-124m", f"{whole} {step('gpt2-124m')} --optimizer muon --muon-bf16", 60, 120),
        Section("step gpt2-774m", f"{whole} --unroll-layers no {step('gpt2-774m')}", 30),
        Section("step gpt2-1.5b", f"{whole} --unroll-layers no {step('gpt2-1.5b', 8)}", 30),
        Section("phases gpt2-124m", f"step {step('gpt2-124m')}", 60, 180),
        Section("executor", "executor --device gpu --num-layers 8 --width 1024", most=90),
        Section("kernels gpt2-124m", f"kernels {step('gpt2-124m', 32)}", 45, 150),
        Section("standin 8", f"standin --mesh dp=8 --zero 3 --unroll-layers no {step('gpt2-1.5b', 64)}", 30, 120),
        Section("standin 64", f"standin --mesh dp=8,tp=8 --sp --zero 1 {step('7b', 64)}", 30, 120),
        Section("collectives", f"collectives {mesh}", 20, 60),
    ]
    chosen = [section for section in sections if section.name.startswith(flags.only or ("",))]
    if not chosen:
        names = ", ".join(section.name for section in sections)
        raise ConfigError(f"--only {' '.join(flags.only)}", "must begin a section's name", f"Use some of {names}")
    return chosen


def main(flags: GpuFlags, console: Console) -> int:
    deadline = time.monotonic() + 60 * flags.time_limit_minutes
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else this process alone would hold most of the card
    plan_sections(flags)  # refuses flags before anything is started
    devices = require_gpu()
    sections = plan_sections(flags, len(jax.devices("gpu")))
    with tempfile.TemporaryDirectory() as folder:
        share_autotuning(Path(folder))
        report = Report(flags.out, describe_machine(devices))
        run_sections(report, sections, run_bench, deadline, console)
    console.print(f"\nwritten: {report.folder / 'gpu.json'}, {report.folder / 'gpu.md'}", markup=False)
    return 1 if report.failed else 0


def require_gpu() -> Devices:
    """One GPU. Raises: ConfigError where JAX sees none."""
    try:
        return acquire_devices(1, "gpu")
    except ConfigError as error:
        raise ConfigError(
            command_text("bench gpu"),
            "JAX must see a GPU to measure, and sees none on this machine",
            f"On a machine with an NVIDIA driver (`nvidia-smi` must list the card): {install_text('cuda')}",
        ) from error


def share_autotuning(folder: Path) -> None:
    """Let the sections share what XLA's autotuning found, through JAX's cache folder; programs are not kept there.

    Without XLA's fusion autotuner, where XLA_FLAGS is not set: the step of 124M on an H100 was no faster with it, and
    time is what a section is short of.
    """
    (folder / TUNED).mkdir()
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(folder))
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "1000000")
    if refused_option(FUSION_AUTOTUNER, False) is None:  # an unknown one would end every section at its start
        os.environ.setdefault("XLA_FLAGS", f"--{FUSION_AUTOTUNER}=false")


# ---- the border: where a section may fail, and the others still run ----


def run_sections(
    report: "Report",
    sections: list[Section],
    run: Runner,
    deadline: float,
    console: Console,
    clock: Clock = time.monotonic,
) -> None:
    """Run every section that has time left; whatever it raises becomes its entry."""
    for section in sections:
        started, rows = clock(), []
        if deadline - started < section.least:
            entry = {"status": "out of time", "error": "not run: out of time"}
        else:
            try:
                entry, rows = run(section, deadline - started)
            except Exception as error:
                entry = {"status": "failed", "error": f"{type(error).__name__}: {error}", "log": format_exc()[-4000:]}
        seconds = round(clock() - started, 1)
        command = f"{command_text('bench')} {section.args}"
        entry = {"name": section.name, "command": command, "seconds": seconds, **entry}
        report.add(entry, rows)
        console.print(f"\n[bold]{section.name}[/]: {entry['status']} ({seconds:.0f} s)")
        console.print(escape(entry.get("output") or entry["error"]))


def run_bench(section: Section, seconds_left: float) -> tuple[Entry, list[dict]]:
    """Run one section in a new process and read its rows; kill it when its time is up."""
    limit = min(seconds_left, section.most)
    with tempfile.TemporaryDirectory() as folder:
        figures, output, log = (Path(folder, name) for name in ("figures.json", "output.txt", "log.txt"))
        code = run_command([*section.command(limit), "--json", str(figures)], output, log, limit)
        printed, logged = (path.read_text(encoding="utf-8", errors="replace").strip() for path in (output, log))
        written = figures.read_text(encoding="utf-8") if figures.exists() else ""
    if code in (0, 1) and written:
        record = json.loads(written)
        entry = {"status": "missed" if code else "ok", "model": record["header"]["model"], "output": printed}
        return entry, record["rows"]
    if code is None and limit == seconds_left:
        return {"status": "out of time", "error": f"killed after {limit:.0f} s: out of time"}, []
    text = f"{printed}\n{logged}".strip()
    reason = f"killed after {limit:.0f} s: stuck" if code is None else f"its process ended with code {code}"
    return {
        "status": "failed",
        "error": f"{reason}; its last line: {text.rpartition(chr(10))[2]}",
        "log": text[-4000:],
    }, []


def run_command(command: list[str], output: Path, log: Path, seconds: float) -> int | None:
    """The exit code, or None where it was killed after `seconds`; what it prints goes to files.

    To files and not pipes: compiler workers that outlive the child would keep a pipe open, and us waiting.
    """
    with output.open("w", encoding="utf-8") as out, log.open("w", encoding="utf-8") as err:
        child = subprocess.Popen(command, stdout=out, stderr=err, start_new_session=True)
        try:
            return child.wait(timeout=seconds)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # its own session: the workers it started are killed with it
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


# ---- the report ----


class Report:
    """`gpu.json` and `gpu.md` in a folder, rewritten after every section."""

    def __init__(self, out: str, header: dict):
        self.folder, self.header = make_folder("--out", out), header
        self.sections: list[Entry] = []
        self.rows: list[dict] = []
        require_writable("--out", str(self.folder / "gpu.json"))
        self._write()

    @property
    def failed(self) -> bool:
        return any(entry["status"] in ("failed", "missed") for entry in self.sections)

    def add(self, entry: Entry, rows: list[dict]) -> None:
        """rows: as `experiments.bench.rows.Row`; each is marked with its section's name."""
        self.sections.append(entry)
        self.rows += [{"section": entry["name"], **row} for row in rows]
        self._write()

    def as_markdown(self) -> str:
        """What was run where, and what each section printed."""
        about = self.header
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        card = f"{about['card']} (compute capability {about['compute_capability']}; nvidia-smi: {about['nvidia_smi']})"
        lines = [f"`{about['command']}`", "", f"{about['date']}; {card}; Python {about['python']}, {versions}.", ""]
        lines += [f"XLA_FLAGS: `{about['xla_flags']}`", ""] if about["xla_flags"] else []
        for entry in self.sections:
            lines += [f"**{entry['name']}**: {entry['status']}, {entry['seconds']:.0f} s; `{entry['command']}`", ""]
            lines += ["```", entry.get("output") or entry["error"], "```", ""]
        return "\n".join(lines).rstrip() + "\n"

    def _write(self) -> None:
        content = {"header": self.header, "rows": self.rows, "sections": self.sections}
        write_whole(self.folder / "gpu.json", (json.dumps(content, indent=1) + "\n").encode())
        write_whole(self.folder / "gpu.md", self.as_markdown().encode())
