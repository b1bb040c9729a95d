"""Measure the time model's constants on this machine's cards, for `experiments.plan --efficiencies FILE`.

python -m experiments.plan calibrate --hardware h100 --out mine.toml

Every constant is what the card reaches of its datasheet: matmuls of many sizes, fused attention forward and backward,
an elementwise pass over memory, a sum over the local cards, and the launch of a program that does nothing. What cannot
be measured here (links between nodes with one node, what hides) stays as the plan has it without the file.
"""

import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from rich.console import Console

from jaxdist.commands import command_text
from jaxdist.errors import ConfigError, require_within
from jaxdist.files import write_whole
from jaxdist.parallel import collectives as comm
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.time_model import FUSED_BACKWARD, Efficiency, calibrated
from jaxdist.runtime.devices import DeviceChoice, acquire_devices

from .progress import Progress
from .tables import Rows

HEAD_DIM, HEADS = 128, 8
SMALLEST = 64  # dim of a measured matmul
IN_A_LAUNCH = 8  # matmuls, so that a small one is not timed by its launch


@dataclass(frozen=True)
class CalibrateFlags:
    """Measure what this machine's cards reach of their datasheet, and write it for a plan."""

    hardware: str
    """What the cards are, by their name in the hardware table: h100, h200, a100-80, ..."""
    out: str
    """The TOML file that is written."""
    hardware_file: str | None = None
    """TOML merged over the hardware table."""
    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    size: int = 8192
    """The largest dim of a matmul, and the positions of attention; arrays that are read or sent have 16,384 times as
    many numbers."""
    repeats: int = 20
    """Runs of each measurement; the median of five such groups counts."""
    device: DeviceChoice = "auto"
    """auto: the accelerators of this machine, or its CPU."""


def main(flags: CalibrateFlags, console: Console) -> None:
    require_within("size", flags.size, 4 * SMALLEST, 65_536)
    require_within("repeats", flags.repeats, 1, 10_000)
    hardware = find_hardware(flags.hardware, flags.hardware_file)
    peak = hardware.peak(flags.dtype)
    out = Path(flags.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out {flags.out}", "there is no such folder", "Make it, or name another file")
    devices = acquire_devices(1, flags.device).devices
    local = [device for device in jax.local_devices() if device.platform == devices[0].platform]
    before = calibrated(hardware)
    measure = partial(seconds, repeats=flags.repeats)
    with jax.default_device(local[0]), Progress("measuring"):
        found = fitted(matmul_curve(measure, flags.size, flags.dtype, peak)) | {
            "attention": attention_flops(measure, flags.size, flags.dtype, local[0].platform) / peak,
            "hbm": memory_bytes(measure, flags.size) / hardware.memory_bytes_per_s,
            "step_seconds": measure(jax.jit(lambda x: x + 1), jnp.zeros(())),
        }
        if len(local) > 1:
            found["inside"] = sum_bytes(measure, local, flags.size) / hardware.inside.bytes_per_s
    for name, value in found.items():
        if name not in ("half_size", "step_seconds") and value > 1:
            raise ConfigError(
                f"{name} = {value:.2f} of a {hardware.name}'s",
                f"must be at most 1: no card is faster than its datasheet, and this is a {local[0].device_kind}",
                "Name it by --hardware, or describe it in --hardware-file",
            )
    measured = replace(before, **found, stack=f"measured on {local[0].device_kind}")
    write_whole(out, as_toml(measured).encode())
    table = Rows("constant", "measured", "without the file")
    for name in found:
        table.add_row(name, f"{getattr(measured, name):.4g}", f"{getattr(before, name):.4g}")
    table.print(console, left=("measured", "without the file"))
    kept = [field.name for field in fields(Efficiency) if field.name not in {*found, "stack"}]
    console.print(f"Kept from {before.stack}: {', '.join(kept)}.")
    own = f" --hardware-file {shlex.quote(flags.hardware_file)}" if flags.hardware_file else ""
    words = f"{command_text('plan')} --hardware {hardware.name}{own} --efficiencies {shlex.quote(str(out))}"
    console.print(words, markup=False, soft_wrap=True)


def seconds(function: Callable, *arguments: jax.Array, repeats: int) -> float:
    """Seconds of one call, of many in a row that the host does not wait between: the median of five groups of
    `repeats`."""
    jax.block_until_ready(function(*arguments))
    groups = []
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(repeats):
            last = function(*arguments)
        jax.block_until_ready(last)
        groups.append((time.perf_counter() - start) / repeats)
    return float(np.median(groups))


def matmul_curve(measure: Callable, size: int, dtype: str, peak: float) -> dict[int, float]:
    """The smallest dim of a matmul -> the part of the peak that it reaches, of several in one launched program."""
    found, dim = {}, SMALLEST

    @jax.jit
    def products(a, b):
        def one(_, a):
            product = jax.lax.optimization_barrier(a @ b)  # all of it, though one row is used
            return a.at[:1].set(product[:1, : a.shape[1]])  # so that the next one depends on this one

        return jax.lax.fori_loop(0, IN_A_LAUNCH, one, a)

    while dim <= size:
        a, b = drawn((size, dim), dtype), drawn((dim, size), dtype)
        found[dim] = IN_A_LAUNCH * 2 * size * size * dim / measure(products, a, b) / peak
        dim *= 2
    return found


def drawn(shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Normal numbers: a card draws less power, and runs faster, on zeros and ones."""
    return jax.random.normal(jax.random.key(0), shape, dtype)


def fitted(curve: dict[int, float]) -> dict[str, float]:
    """`matmul` and `half_size` of efficiency = matmul * d / (d + half_size), as the line d / efficiency, by least
    squares of relative errors; a large matmul reaches what the best one here did, or more, and at most the peak."""
    dim, reached = np.array(list(curve), float), np.array(list(curve.values()))
    ratio = dim / reached
    slope, _ = np.linalg.lstsq(np.stack([dim, np.ones_like(dim)], 1) / ratio[:, None], np.ones_like(dim))[0]
    matmul = max(reached.max(), min(1 / slope, 1.0) if slope > 0 else 1.0)
    return {"matmul": float(matmul), "half_size": float(np.median(dim * (matmul / reached - 1)))}


def attention_flops(measure: Callable, size: int, dtype: str, platform: str) -> float:
    """FLOP/s of causal attention, forward and backward, on the scores that count."""
    kernel = "cudnn" if platform == "gpu" and dtype != "float32" else None
    attend = partial(jax.nn.dot_product_attention, is_causal=True, implementation=kernel)

    def loss(q, k, v):
        return attend(q, k, v).astype(jnp.float32).sum()

    x = drawn((1, size, HEADS, HEAD_DIM), dtype)
    flops = 4 * HEADS * HEAD_DIM * size * (size + 1) / 2 * (1 + FUSED_BACKWARD)
    return flops / measure(jax.jit(jax.grad(loss, argnums=(0, 1, 2))), x, x, x)


def memory_bytes(measure: Callable, size: int) -> float:
    """Bytes a second that an elementwise pass reads and writes."""
    x = jnp.ones(size * 16_384, jnp.float32)
    return 2 * x.nbytes / measure(jax.jit(lambda x: 2 * x + 1), x)


def sum_bytes(measure: Callable, devices: list[jax.Device], size: int) -> float:
    """Bytes a second that one card sends in a ring, of a sum over the local ones."""
    mesh, count = Mesh(np.array(devices), "x"), len(devices)
    x = jnp.ones((count, size * 16_384), jnp.bfloat16)
    x = jax.device_put(x, jax.NamedSharding(mesh, PartitionSpec("x")))
    total = jax.shard_map(
        lambda x: comm.all_reduce(x, "x"), mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec()
    )
    return 2 * (count - 1) / count * (x.nbytes / count) / measure(jax.jit(total), x)


def as_toml(efficiency: Efficiency) -> str:
    values = ((field.name, getattr(efficiency, field.name)) for field in fields(Efficiency))
    return "".join(f'{name} = "{x}"\n' if isinstance(x, str) else f"{name} = {x:.6g}\n" for name, x in values)
