"""Check and measure one GPU, unattended: numbers against fp32, the pipeline executor, speed beside PyTorch, memory.

python -m experiments.gpu

Every section runs in a process of its own: a peak is then one section's peak, two frameworks never share the card, and
a section that crashes or hangs costs its own figures alone. `gpu.json` and `gpu.md` are rewritten after each.
"""

import importlib.metadata
import importlib.util
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from traceback import format_exc
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.bench.rows import describe_machine
from experiments.cli import run_program
from jaxdist import model
from jaxdist.config import PRESETS, ModelConfig, ParallelConfig, PrecisionConfig, Preset, RunConfig, require_positive
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline import pipeline
from jaxdist.parallel.schedules import make_schedule
from jaxdist.runtime import Devices, acquire_devices
from jaxdist.step import Program, build_program, choose_attention

Kind = Literal["pipeline", "collectives", "parity-xla", "parity-cudnn", "speed", "torch"]
Clock = Callable[[], float]

# kind -> (seconds without which it is not started, seconds after which it counts as stuck and is killed)
SECONDS: dict[Kind, tuple[float, float]] = {
    "pipeline": (15, 120),
    "collectives": (15, 90),
    "parity-xla": (20, 120),
    "parity-cudnn": (20, 150),
    "speed": (30, 200),
    "torch": (40, 240),
}
DEFAULT_BATCH_SIZES = {"gpt2-124m": 16, "gpt2-350m": 8, "gpt2-774m": 8}  # sequences; 4 for the others
NUM_WARMUP = 3
CHECKED_MODEL = ModelConfig(num_layers=4, width=256, num_heads=4, ffn_width=1024, seq_len=256, vocab_size=4096)
CHECKED_BATCH_SIZE = 4

# Relative L2 error of a gradient leaf in bf16 against fp32. Each rounding is off by at most 2^-9 = 0.2 % of a value (8
# bits of significand), and a gradient has gone through some tens of them one after the other, which add up like
# independent errors: about 1 % (1.5 % at worst on a CPU). A wrong mask, scale or reduction moves a leaf by tens of
# percent.
GRADIENT_TOLERANCE = 3e-2
# The loss is a mean over all tokens, where roundings cancel.
LOSS_TOLERANCE = 1e-3

# Dense bf16 FLOP/s by a part of the device's name, from the data sheets; the first that fits.
PEAK_FLOPS = (("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H200", 989e12), ("H100", 989e12), ("A100", 312e12))

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")


@dataclass(frozen=True)
class GpuFlags:
    """Check and measure one GPU, unattended: parity, collectives in branches, speed beside PyTorch, memory."""

    out: str = "runs/gpu"
    """Folder for gpu.json and gpu.md; those of an earlier run are replaced."""
    presets: tuple[Preset, ...] = ("gpt2-124m", "gpt2-774m")
    """Models to time."""
    batch_sizes: tuple[int, ...] = ()
    """Sequences per step, one number for each preset. Default: 16 for gpt2-124m, 8 for gpt2-350m and -774m, else 4."""
    steps: int = 10
    """Steps timed, after 3 that are not."""
    time_limit_minutes: float = 8.0
    """A section starts only if enough of this is left, and none runs beyond it."""
    peak_tflops: float | None = None
    """Dense bf16 peak of the card, for MFU. Default: known for A100, H100 and H200."""
    section: Kind | None = None
    """Run the sections of this kind alone, in this process and without a time limit."""


@dataclass(frozen=True)
class Section:
    """One unit of work of the report; `preset` and `batch_size` only for those that time a model."""

    kind: Kind
    preset: Preset | None = None
    batch_size: int = 0

    @property
    def name(self) -> str:
        return self.kind if self.preset is None else f"{self.kind} {self.preset}"


# A section's result, ready for JSON: "status" (ok, failed, skipped, out of time), "seconds", and "figures" or "error"
# (why there are none), with the end of a traceback or log as "log".
Entry = dict[str, Any]
Runner = Callable[[Section, float], Entry]


def main(flags: GpuFlags, console: Console) -> int:
    start = time.monotonic()

    # ---- check everything, before anything is traced ----
    sections = plan_sections(flags)
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # else this process alone would hold most of the card
    if flags.section == "torch":  # PyTorch brings its own CUDA libraries: JAX must not load others beside them
        jax.config.update("jax_platforms", "cpu")
        devices = None
    else:
        devices = require_gpu()
    report = Report(flags.out, describe_machine(devices, "experiments.gpu"))

    # ---- run ----
    if flags.section:
        run_sections(report, sections, lambda section, _: run_here(section, flags, devices), math.inf, console)
    else:
        deadline = start + 60 * flags.time_limit_minutes
        run_sections(report, sections, lambda section, left: run_in_child(section, flags, left), deadline, console)

    # ---- report ----
    console.print(report.as_table())
    for line in (*report.ratios(), CONVENTIONS):
        console.print(line)
    console.print(f"\nwritten: {report.folder / 'gpu.json'}, {report.folder / 'gpu.md'}")
    return 1 if report.failed else 0


def plan_sections(flags: GpuFlags) -> list[Section]:
    """What will run, in order. Raises: ConfigError for flags that cannot work."""
    require_positive("steps", flags.steps)
    for name, value in (("time_limit_minutes", flags.time_limit_minutes), ("peak_tflops", flags.peak_tflops)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"{name}={value}", "it must be a positive finite number", "Use the default")
    if flags.batch_sizes and len(flags.batch_sizes) != len(flags.presets):
        raise ConfigError(
            f"--batch-sizes {' '.join(map(str, flags.batch_sizes))} with {len(flags.presets)} presets",
            "each preset is timed at one batch size",
            f"Give {len(flags.presets)} numbers, or leave --batch-sizes out",
        )
    sizes = flags.batch_sizes or [DEFAULT_BATCH_SIZES.get(preset, 4) for preset in flags.presets]
    for size in sizes:
        require_positive("batch_sizes", size)
    sections = [Section(kind) for kind in ("pipeline", "collectives", "parity-xla", "parity-cudnn")]
    for preset, size in zip(flags.presets, sizes, strict=True):
        sections += [Section("speed", preset, size), Section("torch", preset, size)]
    return [section for section in sections if flags.section in (None, section.kind)]


def require_gpu() -> Devices:
    """One GPU. Raises: ConfigError where JAX sees none."""
    try:
        return acquire_devices(1, "gpu")
    except ConfigError as error:
        raise ConfigError(
            "experiments.gpu",
            "it measures a GPU, and JAX sees none on this machine",
            "Install jaxdist[cuda] on a machine with an NVIDIA driver (`nvidia-smi` must list the card)",
        ) from error


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
        started, (least, _) = clock(), SECONDS[section.kind]
        if deadline - started < least:
            entry = {"status": "out of time", "error": "not run: out of time"}
        else:
            try:
                entry = run(section, deadline - started)
            except Exception as error:
                entry = {"status": "failed", "error": f"{type(error).__name__}: {error}", "log": format_exc()[-4000:]}
        entry = {"name": section.name, "kind": section.kind, "preset": section.preset, **entry}
        entry["seconds"] = round(clock() - started, 1)
        report.add(entry)
        console.print(f"{section.name}: {entry['status']} ({entry['seconds']:.0f} s)  {escape(note(entry))}")


def run_here(section: Section, flags: GpuFlags, devices: Devices | None) -> Entry:
    """Run one section in this process."""
    size = (PRESETS[section.preset] if section.preset else CHECKED_MODEL, section.batch_size or CHECKED_BATCH_SIZE)
    figures = {
        "pipeline": lambda: check_pipeline(devices),
        "collectives": lambda: check_collectives(devices, *size),
        "parity-xla": lambda: check_parity(devices, *size, "xla"),
        "parity-cudnn": lambda: check_parity(devices, *size, "cudnn"),
        "speed": lambda: measure_speed(devices, *size, flags.steps, flags.peak_tflops),
        "torch": lambda: measure_torch(*size, flags.steps, flags.peak_tflops),
    }[section.kind]()
    if "skipped" in figures:
        return {"status": "skipped", "error": figures["skipped"]}
    return {"status": "ok" if figures["passed"] else "failed", "figures": figures}


def run_in_child(section: Section, flags: GpuFlags, seconds_left: float) -> Entry:
    """Run one section as `--section KIND` in a new process and read its entry; kill it when its time is up."""
    limit = min(seconds_left, SECONDS[section.kind][1])
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "experiments.gpu", "--section", section.kind, "--out", folder]
        command += ["--steps", str(flags.steps)]
        if section.preset:
            command += ["--presets", section.preset, "--batch-sizes", str(section.batch_size)]
        if flags.peak_tflops:
            command += ["--peak-tflops", str(flags.peak_tflops)]
        log, result = Path(folder, "log.txt"), Path(folder, "gpu.json")
        code = run_command(command, log, limit)
        entries = json.loads(result.read_text(encoding="utf-8"))["sections"] if result.exists() else []
        if entries:
            return {name: value for name, value in entries[0].items() if name in ("status", "figures", "error", "log")}
        if code is None and limit == seconds_left:
            return {"status": "out of time", "error": f"killed after {limit:.0f} s: out of time"}
        text = log.read_text(encoding="utf-8", errors="replace").strip()
        last_line = text.rpartition("\n")[2]
        reason = f"killed after {limit:.0f} s: stuck" if code is None else f"its process ended with code {code}"
        return {"status": "failed", "error": f"{reason}; its last line: {last_line}", "log": text[-4000:]}


def run_command(command: list[str], log: Path, seconds: float) -> int | None:
    """The exit code, or None where it was killed after `seconds`. Output goes to `log`.

    To a file and not a pipe: compiler workers that outlive the child would keep a pipe open, and us waiting.
    """
    with log.open("w", encoding="utf-8") as stream:
        child = subprocess.Popen(command, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            return child.wait(timeout=seconds)
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # its own session: the workers it started are killed with it
            child.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return None
            raise


# ---- sections: each takes the devices and a size, and returns figures for the report ----


def check_pipeline(devices: Devices, width: int = 1024, num_layers: int = 8, repeats: int = 5) -> dict:
    """The pipeline's executor on one stage: loops whose trip counts are data; values and time against `jax.grad`.

    One device runs every action of a ZB-V of one stage, so the time beyond that of `jax.grad` is the executor's own.
    """
    schedule = make_schedule("zb-v", 1, 8)
    mesh = Mesh(np.asarray(devices.devices[:1]), ("pp",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (schedule.num_parts, num_layers // 2, width, width)) * width**-0.5
    inputs, targets = jax.random.normal(keys[1], (2, schedule.num_microbatches, width, width))

    def part(weights, x):
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]

    def distance(y, target):
        return jnp.square(y - target).sum()

    def plain(weights, inputs, targets):
        def of_micro(weights, x, target):
            for each in range(schedule.num_parts):
                x = part(weights[each], x)
            return distance(x, target)

        def add(sums, micro):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(of_micro)(weights, *micro)), None

        return lax.scan(add, (jnp.float32(0), jnp.zeros_like(weights)), (inputs, targets))[0]

    executor = pipeline(part, distance, schedule)
    on_mesh = jax.jit(jax.shard_map(executor, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P())))
    runs = {"pipeline": on_mesh, "plain": jax.jit(plain)}
    results, seconds = {}, {}
    with jax.default_matmul_precision("highest"):
        for name, run in runs.items():
            results[name] = jax.block_until_ready(run(weights, inputs, targets))
        for name, run in runs.items():
            start = time.perf_counter()
            for _ in range(repeats):
                jax.block_until_ready(run(weights, inputs, targets))
            seconds[name] = (time.perf_counter() - start) / repeats
    (loss, grads), (plain_loss, plain_grads) = (results[name] for name in ("pipeline", "plain"))
    error = float(jnp.linalg.norm(grads - plain_grads) / jnp.linalg.norm(plain_grads))
    loss_error = abs(float(loss) / float(plain_loss) - 1)
    ratio = seconds["pipeline"] / seconds["plain"]
    return {
        "passed": error < 1e-5 and loss_error < 1e-5,
        "summary": f"gradient error {error:.1e}, loss error {loss_error:.1e}; {ratio:.2f} times the time of jax.grad",
        "gradient_error": error,
        "loss_error": loss_error,
        "time_ratio": ratio,
        "num_ticks": schedule.num_ticks,
    }


def check_collectives(devices: Devices, config: ModelConfig, batch_size: int) -> dict:
    """On one device the compiled training step must hold no collective at all."""
    program = one_device_program(devices, config, batch_size, "bfloat16", "auto", num_steps=1)
    found = count_collectives(program.compile_step().as_text())
    listed = ", ".join(f"{count} {name}" for name, count in found.items()) or "no collective"
    return {"passed": not found, "summary": f"{listed} in the compiled step of one device", "collectives": found}


def check_parity(devices: Devices, config: ModelConfig, batch_size: int, attention: str) -> dict:
    """Loss and every gradient leaf of the training step in bf16 with `attention`, against fp32 (and, for cuDNN's,
    against bf16 with the written-out attention, which leaves only the attention itself to differ)."""
    batch = random_batch(config, batch_size)

    def observe(dtype: str, attention: str, precision: str | None = None):
        program = one_device_program(devices, config, batch_size, dtype, attention, num_steps=1, with_gradients=True)
        with jax.default_matmul_precision(precision):
            _, metrics, gradients = program.step(program.init(0), program.put(batch))
        leaves = zip(jax.tree.leaves(program.layout.leaves), jax.tree.leaves(gradients), strict=True)
        gradients = {leaf.name: np.asarray(jax.device_get(g), np.float64) for leaf, g in leaves}
        return float(metrics["loss"]), gradients

    # "highest": an NVIDIA card would otherwise multiply fp32 matrices in TF32, with 10 bits.
    runs = {"fp32 xla": observe("float32", "xla", "highest"), "bf16 xla": observe("bfloat16", "xla")}
    pairs = [("bf16 xla", "fp32 xla")]
    if attention != "xla":
        runs[f"bf16 {attention}"] = observe("bfloat16", attention)
        pairs = [(f"bf16 {attention}", "fp32 xla"), (f"bf16 {attention}", "bf16 xla")]
    comparisons = [compare(runs, *pair) for pair in pairs]
    sentences = [
        f"{c['run']} vs {c['against']}: loss {c['loss_error']:.1e}, worst gradient {c['worst_error']:.1e} "
        f"({c['worst_leaf']})"
        for c in comparisons
    ]
    return {
        "passed": all(c["passed"] for c in comparisons),
        "summary": "; ".join(sentences) + f"; tolerances {LOSS_TOLERANCE:g} and {GRADIENT_TOLERANCE:g}, relative L2",
        "shape": shape_of(config, batch_size),
        "losses": {name: loss for name, (loss, _) in runs.items()},
        "comparisons": comparisons,
    }


def compare(runs: dict, run: str, against: str) -> dict:
    """Relative errors of a run's loss and gradients; a NaN never passes."""
    (loss, gradients), (reference_loss, reference) = runs[run], runs[against]
    errors = {
        name: float(np.linalg.norm(gradients[name] - expected) / max(np.linalg.norm(expected), 1e-30))
        for name, expected in reference.items()
    }
    loss_error = abs(loss - reference_loss) / abs(reference_loss)
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return {
        "run": run,
        "against": against,
        "passed": bool(loss_error <= LOSS_TOLERANCE and errors[worst] <= GRADIENT_TOLERANCE),
        "loss_error": loss_error,
        "worst_leaf": worst,
        "worst_error": errors[worst],
        "gradient_errors": errors,
    }


def measure_speed(
    devices: Devices, config: ModelConfig, batch_size: int, num_steps: int, peak_tflops: float | None = None
) -> dict:
    """Time the training step in bf16 with fp32 masters; and its peak memory, as compiled and as measured.

    The measured peak is the process's high-water mark, so it holds compilation and initialisation too: it is noted
    after each of them, and is the step's own only where the step raised it.
    """
    program = one_device_program(devices, config, batch_size, "bfloat16", "auto", NUM_WARMUP + num_steps)
    start = time.perf_counter()
    step = program.compile_step()
    compile_seconds = time.perf_counter() - start
    peaks = {"compiled": peak_in_use(devices)}
    state, batch = program.init(0), program.put(random_batch(config, batch_size))
    jax.block_until_ready((state, batch))
    peaks["initialised"] = peak_in_use(devices)

    for _ in range(NUM_WARMUP):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    first_loss = float(metrics["loss"])
    start = time.perf_counter()
    for _ in range(num_steps):
        state, metrics = step(state, batch)
    jax.block_until_ready((state, metrics))
    step_seconds = (time.perf_counter() - start) / num_steps
    peaks["trained"] = peak_in_use(devices)

    memory = compiled_memory(step)
    attention = choose_attention(program.config, devices.platform, training=True)
    return {
        **speed_figures(config, batch_size, step_seconds, devices.devices[0].device_kind, peak_tflops),
        "passed": math.isfinite(float(metrics["loss"])),
        "summary": f"{shape_of(config, batch_size)}, attention {attention}, compiled in {compile_seconds:.0f} s",
        "attention": attention,
        "compile_seconds": compile_seconds,
        "num_parameters": sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(program.layout.leaves)),
        "first_loss": first_loss,
        "last_loss": float(metrics["loss"]),
        "peak_bytes": peaks["trained"],
        "peak_bytes_by_phase": peaks,
        "compiled_peak_bytes": memory.get("peak"),
        "compiled_memory": memory,
    }


def measure_torch(
    config: ModelConfig, batch_size: int, num_steps: int, peak_tflops: float | None = None, on_cpu: bool = False
) -> dict:
    """The same model, batch and number of steps in PyTorch under `torch.compile` (on the CPU, for tests, without)."""
    if importlib.util.find_spec("torch") is None:
        return {"skipped": "torch is not installed"}
    import torch

    from experiments import torch_gpt2

    if not on_cpu and not torch.cuda.is_available():
        return {"skipped": f"torch {torch.__version__} sees no GPU"}
    device, device_name = ("cpu", "cpu") if on_cpu else ("cuda", torch.cuda.get_device_name())
    batch = random_batch(config, batch_size)
    training = torch_gpt2.Training(config, batch, device, compiled=not on_cpu)
    figures = torch_gpt2.measure(training, NUM_WARMUP, num_steps)
    return {
        **figures,
        **speed_figures(config, batch_size, figures["step_seconds"], device_name, peak_tflops),
        "passed": math.isfinite(figures["last_loss"]),
        "summary": f"{shape_of(config, batch_size)}, first step (compiles) {figures['first_step_seconds']:.0f} s",
        "compiled_peak_bytes": None,
        "torch": torch.__version__,
    }


# ---- what the sections share ----


def one_device_program(devices, config, batch_size, dtype, attention, num_steps, with_gradients=False) -> Program:
    run = RunConfig(
        model=config,
        parallel=ParallelConfig(attention=attention),
        precision=PrecisionConfig(dtype=dtype),
        batch_size=batch_size,
        steps=num_steps,
    )
    return build_program(run, make_mesh(run.parallel.mesh, devices.devices), with_gradients=with_gradients)


def random_batch(config: ModelConfig, batch_size: int) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (batch_size, config.seq_len + 1), dtype=np.int32)
    rows = np.arange(batch_size, dtype=np.int32)
    return {"inputs": tokens[:, :-1].copy(), "targets": tokens[:, 1:].copy(), "rows": rows}


def flops_per_token(config: ModelConfig) -> int:
    """Floating-point operations that one trained token needs, 6 N + 12 L D T.

    N counts the parameters that multiply: the blocks, the final LayerNorm and the tied head once, at the real
    vocabulary (padding is no useful work); not positions, and the embedding is a look-up. 12 L D T is attention,
    counted in full although half of it is masked. Nothing is added for recomputation.
    Source: PaLM, arXiv 2204.02311, appendix B.
    """
    declared = model.declare(config)
    shapes = [part.shape for part in jax.tree.leaves(declared, is_leaf=lambda x: isinstance(x, model.Declaration))]
    padding = (config.padded_vocab_size - config.vocab_size) * config.width
    multiplying = sum(math.prod(shape) for shape in shapes) - math.prod(declared["positions"].shape) - padding
    return 6 * multiplying + 12 * config.num_layers * config.width * config.seq_len


def peak_flops(device_name: str, peak_tflops: float | None) -> float | None:
    """Dense bf16 FLOP/s of a card, None where it is neither given nor known."""
    if peak_tflops is not None:
        return peak_tflops * 1e12
    return next((peak for part, peak in PEAK_FLOPS if part in device_name), None)


def speed_figures(config, batch_size, step_seconds: float, device_name: str, peak_tflops: float | None) -> dict:
    tokens_per_second = batch_size * config.seq_len / step_seconds
    per_token, peak = flops_per_token(config), peak_flops(device_name, peak_tflops)
    return {
        "batch_size": batch_size,
        "seq_len": config.seq_len,
        "step_seconds": step_seconds,
        "tokens_per_second": tokens_per_second,
        "flops_per_token": per_token,
        "peak_flops": peak,
        "mfu": None if peak is None else tokens_per_second * per_token / peak,
    }


def shape_of(config: ModelConfig, batch_size: int) -> str:
    return f"L{config.num_layers} D{config.width} batch {batch_size} x {config.seq_len}"


def count_collectives(hlo: str) -> dict[str, int]:
    """How often each collective stands in a compiled program's text; only those that do."""
    names = re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)
    return {name: names.count(name) for name in COLLECTIVES if name in names}


def peak_in_use(devices: Devices) -> int | None:
    """The process's high-water mark of device memory, bytes; None where the backend does not count (the CPU)."""
    return (devices.devices[0].memory_stats() or {}).get("peak_bytes_in_use")


def compiled_memory(compiled: jax.stages.Compiled) -> dict[str, int]:
    """The compiler's sizes in bytes; `peak` = arguments + outputs + temporaries - outputs that reuse arguments."""
    analysis = compiled.memory_analysis()
    names = ("argument", "output", "temp", "alias", "generated_code")
    sizes = {name: getattr(analysis, f"{name}_size_in_bytes", None) for name in names}
    if any(sizes[name] is None for name in names[:4]):
        return {}
    return {**sizes, "peak": sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]}


# ---- the report ----


CONVENTIONS = (
    "MFU counts 6 N + 12 L D T FLOPs a token (PaLM: tied head once, attention in full) at the card's dense bf16 peak. "
    "Peak GiB is measured: for JAX the high-water mark of the process, for PyTorch that of the timed steps. "
    "Compiled peak is XLA's arguments + outputs + temporaries - reused arguments."
)
HEADINGS = ("section", "status", "tokens/s", "ms/step", "MFU %", "peak GiB", "compiled peak GiB", "notes")


class Report:
    """`gpu.json` and `gpu.md` in a folder, rewritten after every section.

    Raises: ConfigError where the folder cannot be written.
    """

    def __init__(self, out: str, environment: dict):
        self.folder, self.environment, self.sections = Path(out), environment, []
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
        except OSError as error:
            raise ConfigError(
                f"--out {out}", f"it cannot be written ({error.strerror})", "Name a folder that you may write"
            ) from error

    @property
    def failed(self) -> bool:
        return any(entry["status"] == "failed" for entry in self.sections)

    def add(self, entry: Entry) -> None:
        self.sections.append(entry)
        self._write()

    def ratios(self) -> list[str]:
        """One sentence for each preset that both frameworks ran."""
        speed = {
            (entry["kind"], entry["preset"]): entry["figures"]["tokens_per_second"]
            for entry in self.sections
            if entry["preset"] and "tokens_per_second" in entry.get("figures", {})
        }
        both = [preset for kind, preset in speed if kind == "speed" and ("torch", preset) in speed]
        return [
            f"{preset}: jaxdist runs at {speed['speed', preset] / speed['torch', preset]:.2f} x the tokens/s of "
            "torch.compile"
            for preset in both
        ]

    def as_table(self) -> Table:
        """The table for a terminal."""
        table = Table(box=None, header_style="bold", pad_edge=False)
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if heading in ("section", "status", "notes") else "right")
        for entry in self.sections:
            table.add_row(*map(escape, cells(entry)))
        return table

    def as_markdown(self) -> str:
        """The same table for docs/benchmarks.md, with what was run where."""
        about = self.environment
        versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
        card = f"{about['card']} (compute capability {about['compute_capability']}; nvidia-smi: {about['nvidia_smi']})"
        lines = [f"`{about['command']}`", "", f"{about['date']}; {card}; Python {about['python']}, {versions}.", ""]
        lines += [markdown_row(HEADINGS), markdown_row(["---"] * len(HEADINGS))]
        lines += [markdown_row(cells(entry)) for entry in self.sections]
        lines += ["", CONVENTIONS, "", *(f"- {line}" for line in self.ratios())]
        return "\n".join(lines).rstrip() + "\n"

    def _write(self) -> None:
        content = {"environment": self.environment, "sections": self.sections, "ratios": self.ratios()}
        (self.folder / "gpu.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        (self.folder / "gpu.md").write_text(self.as_markdown(), encoding="utf-8")


def cells(entry: Entry) -> list[str]:
    """One row under HEADINGS; a figure that was not measured is empty."""
    figures = entry.get("figures", {})

    def number(name: str, scale: float, form: str) -> str:
        return "" if figures.get(name) is None else format(figures[name] * scale, form)

    return [
        entry["name"],
        "FAILED" if entry["status"] == "failed" else entry["status"],
        number("tokens_per_second", 1, ",.0f"),
        number("step_seconds", 1e3, ".1f"),
        number("mfu", 100, ".1f"),
        number("peak_bytes", 2**-30, ".2f"),
        number("compiled_peak_bytes", 2**-30, ".2f"),
        note(entry),
    ]


def note(entry: Entry) -> str:
    """What a section found, or why it did not, in one line."""
    text = " ".join((entry["figures"]["summary"] if "figures" in entry else entry["error"]).split())
    return text if len(text) <= 400 else text[:400] + " ..."


def markdown_row(texts) -> str:
    return "| " + " | ".join(text.replace("|", r"\|") for text in texts) + " |"


if __name__ == "__main__":
    run_program(GpuFlags, main, "experiments.gpu")
