"""The compiled step of a card that is not there, kernel by kernel, against the card's roofline."""

from collections.abc import Sequence

import jax
import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh
from jaxdist.plan.explain import gib
from jaxdist.plan.hardware import Accelerator, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.proof.compile import CUDA_CARDS, compile_step, target_devices, without_devices
from jaxdist.plan.proof.launches import launches_of
from jaxdist.plan.proof.roofline import KINDS, ON_H100, PHASES, Kernel, Roof, Total, kernels_of, trips_of
from jaxdist.train.program import build_program

from ..plan_prove import with_attention
from ..tables import Rows
from .flags import BenchFlags
from .rows import Measured, Row
from .speed import NARROW

SHOWN = 20
MATMUL, HBM = 0.7, 0.85  # parts of the peak and of the bandwidth that a good kernel reaches


def bench_roofline(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Compiles for --hardware, walks the program, and adds up what its kernels launch and move. Nothing is run."""
    if flags.hardware not in CUDA_CARDS:
        raise ConfigError(
            f"--hardware {flags.hardware}",
            "must be a card of which the compiler has a description",
            f"Use {', '.join(CUDA_CARDS)}",
        )
    hardware, mesh = find_hardware(flags.hardware), config.parallel.mesh
    if mesh.pp > 1:
        raise ConfigError(
            f"--mesh {mesh}",
            "pp must be 1: how often a pipeline's kernels run is said by its table and not by the program",
            "Use a mesh with pp=1",
        )
    nodes = -(-mesh.num_devices // hardware.devices_per_node)
    without_devices(mesh.num_devices)
    devices = target_devices(flags.hardware, mesh.num_devices, nodes)
    roof = Roof.of(hardware, config.precision.dtype, MATMUL, HBM)
    config, _ = with_attention(
        config, config.model.attention_for(config.attention, "gpu", config.precision.dtype, training=True)
    )
    step = compile_step(config, flags.hardware, num_nodes=nodes, thunks=True)
    kernels = kernels_of(step.text)
    whole = Total.of(kernels, roof)
    least = whole.least_bytes + update_bytes(config, devices)
    launches = launches_of(step.thunks, trips_of(step.text)) if step.thunks else None

    table_of_kernels(kernels, roof).print(console, left=("part", "operation"))
    tokens = config.batch_size * config.model.seq_len / mesh.num_devices
    flops = tokens * work_of(config.model).flops_per_token
    products = sum(each.count * roof.products(each) for each in kernels)
    speed, of_peak = tokens / whole.seconds, flops / (whole.seconds * hardware.peak(config.precision.dtype))
    console.print(
        f"{config.model.describe()}, {config.precision.dtype}, attention {config.attention}, compiled for "
        f"{hardware.title} in {step.seconds:.0f} s: {whole.kernels:,} kernels move {whole.moved / 1e9:.3g} GB and "
        f"multiply {whole.flops / 1e12:.3g} TFLOP a step and device; peak {gib(step.peak)}. At {MATMUL:.0%} of the "
        f"peak and {HBM:.0%} of the bandwidth that is at least {whole.seconds * 1e3:.3g} ms, {speed:,.0f} tokens/s a "
        f"device, {of_peak:.0%} MFU; the products alone {products * 1e3:.3g} ms. The same "
        "products, each reading its operands and writing its result once, and one pass over the state would move "
        f"{least / 1e9:.3g} GB: the program moves {whole.moved / least:.2f} times that. Nothing was run; links between "
        "devices and launches take time that is not in it."
    )
    reached = seconds_reached(kernels, hardware, config.precision.dtype)
    if reached:
        expected = sum(reached.values())
        console.print(
            f"With what such kernels were measured to reach on an H100 it takes {expected * 1e3:.3g} ms, "
            f"{tokens / expected:,.0f} tokens/s."
        )
    if launches:
        console.print(
            f"The host makes {launches.total:,} launches a step: {launches.graphs:,} of CUDA graphs, which hold "
            f"{launches.in_graphs:,} kernels and copies, and {launches.alone:,} of single ones."
        )
    rows = [
        Row("kernels a step", whole.kernels, "kernels"),
        Row("bytes moved", whole.moved, "bytes", against="least bytes", ratio=whole.moved / least),
        Row("least bytes", least, "bytes"),
        Row("FLOPs of products", whole.flops, "FLOP"),
        Row("time by the roofline", whole.seconds, "s"),
        *([Row("launches a step", launches.total, "launches")] if launches else []),
        Row("peak", step.peak, "bytes"),
        Row("compile time", step.seconds, "s"),
    ]
    for (phase, part), found in grouped(kernels).items():
        rows += rows_of(f"{phase} {part}", found, roof)
    for kind in KINDS:
        rows += rows_of(kind, [each for each in kernels if each.kind == kind], roof)
        rows += [Row(f"{kind}: as measured", reached[kind], "s")] if reached else []
    rows += [Row("all kernels: as measured", sum(reached.values()), "s")] if reached else []
    return rows, None


def rows_of(name: str, kernels: Sequence[Kernel], roof: Roof) -> list[Row]:
    total = Total.of(kernels, roof)
    return [
        Row(f"{name}: kernels", total.kernels, ""),
        Row(f"{name}: bytes", total.moved, "bytes", against="bytes moved"),
        Row(f"{name}: bytes of products", total.least_bytes, "bytes"),
        Row(f"{name}: FLOPs", total.flops, "FLOP"),
        Row(f"{name}: time by the roofline", total.seconds, "s"),
    ]


def seconds_reached(kernels: Sequence[Kernel], hardware: Accelerator, dtype: str) -> dict[str, float]:
    """Seconds of a step by kind of kernel, with what was measured; empty for another card or dtype."""
    if hardware.name != "h100" or dtype not in NARROW:
        return {}
    found = dict.fromkeys(KINDS, 0.0)
    for each in kernels:
        found[each.kind] += each.count * ON_H100.seconds(each, hardware, dtype)
    return found


def update_bytes(config: RunConfig, devices: Sequence) -> int:
    """One pass over a device's state: master and moments read and written, parameters written, gradients read.

    Products read the parameters.
    """
    state = build_program(config, make_mesh(config.parallel.mesh, devices)).abstract_state()

    def local(tree) -> int:
        leaves = jax.tree.leaves(tree)
        return sum(int(np.prod(leaf.sharding.shard_shape(leaf.shape))) * leaf.dtype.itemsize for leaf in leaves)

    params, everything = local(state.params), local(state)
    return 2 * (everything - params) + 2 * params


def grouped(kernels: Sequence[Kernel]) -> dict[tuple[str, str], list[Kernel]]:
    """By phase and part, in the order of `PHASES`."""
    found: dict[tuple[str, str], list[Kernel]] = {}
    for kernel in sorted(kernels, key=lambda kernel: PHASES.index(kernel.phase)):
        found.setdefault((kernel.phase, kernel.part), []).append(kernel)
    return found


def table_of_kernels(kernels: Sequence[Kernel], roof: Roof) -> Rows:
    """Table of the kernels that take longest."""
    table = Rows("phase", "part", "operation", "times", "GB read", "GB written", "TFLOP", "ms")
    for kernel in sorted(kernels, key=lambda kernel: -kernel.count * roof.seconds(kernel))[:SHOWN]:
        table.add_row(
            kernel.phase,
            kernel.part,
            kernel.operation,
            str(kernel.count),
            f"{kernel.count * kernel.read / 1e9:.2f}",
            f"{kernel.count * kernel.written / 1e9:.2f}",
            f"{kernel.count * kernel.flops / 1e12:.2f}",
            f"{kernel.count * roof.seconds(kernel) * 1e3:.2f}",
        )
    return table
