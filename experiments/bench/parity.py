"""The training step in 16 bits against fp32: loss and every gradient leaf, with each attention that the device has."""

import dataclasses
import re

import jax
import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.mesh import make_mesh
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import Program, build_program

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import full_batch

# Relative L2 error of a gradient leaf in bf16 against fp32. Each rounding is off by at most 2^-9 = 0.2 % of a value (8
# bits of significand), and a gradient has gone through some tens of them one after the other, which add up like
# independent errors: about 1 % (1.5 % at worst on a CPU). A wrong mask, scale or reduction moves a leaf by tens of
# percent.
GRADIENT_TOLERANCE = 3e-2
# The loss is a mean over all tokens, where roundings cancel.
LOSS_TOLERANCE = 1e-3
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all")

Observed = tuple[float, dict[str, np.ndarray]]  # loss; gradients by the name of their leaf


def bench_parity(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """bf16 against fp32, and cuDNN's attention against the written-out one, which leaves only attention to differ.

    The compiled step of one device must also hold no collective at all.
    """
    devices = acquire_devices(1, flags.device)
    # "highest": an NVIDIA card would otherwise multiply fp32 matrices in TF32, with 10 bits.
    runs = {"fp32 xla": observe(config, devices, "float32", "xla", "highest")}
    runs["bf16 xla"] = observe(config, devices, "bfloat16", "xla")
    pairs = [("bf16 xla", "fp32 xla")]
    auto = one_device(config, devices, "bfloat16", "auto")
    if auto.model.ctx.attention == "cudnn":
        runs["bf16 cudnn"] = observe(config, devices, "bfloat16", "cudnn")
        pairs += [("bf16 cudnn", "fp32 xla"), ("bf16 cudnn", "bf16 xla")]
    rows = []
    for run, against in pairs:
        loss_error, errors = compare(runs[run], runs[against])
        for what, error in {"loss": loss_error, **errors}.items():
            target = LOSS_TOLERANCE if what == "loss" else GRADIENT_TOLERANCE
            rows.append(Row(f"{what}: {run} against {against}", error, "relative", against=against, target=target))
    console.print(f"tolerances: loss {LOSS_TOLERANCE:g}, gradients {GRADIENT_TOLERANCE:g} (relative, L2 norm)")
    collectives = count_collectives(compiled_text(auto))
    listed = ", ".join(f"{count} {name}" for name, count in collectives.items()) or "no collective"
    console.print(f"{listed} in the compiled step of one device")
    return [*rows, Row("collectives in the compiled step", sum(collectives.values()), "", target=0)], devices


def one_device(config: RunConfig, devices: Devices, dtype: str, attention: str, with_gradients=False) -> Program:
    config = dataclasses.replace(
        config, parallel=ParallelConfig(attention=attention), precision=PrecisionConfig(dtype=dtype)
    )
    mesh = make_mesh(config.parallel.mesh, devices.devices)
    return build_program(config, mesh, with_gradients=with_gradients)


def observe(config, devices: Devices, dtype: str, attention: str, precision: str | None = None) -> Observed:
    program = one_device(config, devices, dtype, attention, with_gradients=True)
    with jax.default_matmul_precision(precision):
        _, metrics, gradients = program.step(program.init(0), program.put(full_batch(config)))
    leaves = zip(jax.tree.leaves(program.layout.leaves), jax.tree.leaves(gradients), strict=True)
    return float(metrics["loss"]), {leaf.name: np.asarray(jax.device_get(g), np.float64) for leaf, g in leaves}


def compare(run: Observed, against: Observed) -> tuple[float, dict[str, float]]:
    """Relative errors of a loss and of each gradient."""
    (loss, gradients), (expected_loss, expected) = run, against
    errors = {
        name: float(np.linalg.norm(gradients[name] - value) / max(np.linalg.norm(value), 1e-30))
        for name, value in expected.items()
    }
    return abs(loss - expected_loss) / abs(expected_loss), errors


def compiled_text(program: Program) -> str:
    return program.compile_step().as_text()


def count_collectives(hlo: str) -> dict[str, int]:
    """How often each collective stands in a compiled program's text; only those that do."""
    names = re.findall(rf"\b({'|'.join(COLLECTIVES)})(?:-start)?\(", hlo)
    return {name: names.count(name) for name in COLLECTIVES if name in names}
