"""One card standing for many: one rank's program of a larger mesh, its collectives mocked, beside the plan's step time.

JAX's `jax_mock_gpu_topology` gives a process with one GPU a client that shows N of them, compiles for all, runs its own
and leaves out collectives. So what a rank computes is measured at its true local shapes, and what it sends is taken
from the time model. Values mean nothing: nothing was received.
"""

import statistics

import jax
import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh
from jaxdist.plan.time_model import StepTime
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.train.program import attention_on

from .flags import BenchFlags
from .rows import Measured, Row
from .speed import card_of, plan_step
from .timing import AT_ONCE, timed_step

# The client's other processes do not exist, and autotuning divided among them would wait for them forever
# (openxla/xla issue 28959).
OPTIONS = {"xla_gpu_shard_autotuning": False}


def bench_standin(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Seconds of the first rank's program, plus the modelled communication, against the plan's whole step."""
    mesh = config.parallel.mesh
    if mesh.num_devices == 1:
        raise ConfigError(
            "standin without --mesh",
            "there must be a mesh, for all of whose ranks one real NVIDIA GPU stands",
            "Use --mesh dp=8 on a machine with one",
        )
    if mesh.pp > 1:
        raise ConfigError(
            f"standin with pp={mesh.pp}", "must be 1: only the first stage would be measured", "Use a mesh of dp and tp"
        )
    devices = mock_gpus(mesh.num_devices)
    hardware = card_of(devices.devices[0].device_kind)
    if hardware is None:
        raise ConfigError(
            f"standin on {devices.devices[0].device_kind}", "the plan's table must have it", "Use an H100 or H200"
        )
    console.print(f"devices: 1 x {devices.devices[0].device_kind}, standing for {mesh.num_devices}: {mesh}")
    attention = attention_on(make_mesh(mesh, devices.devices), config, training=True)
    step = timed_step(config, devices, OPTIONS)
    seconds = [step.run_several(AT_ONCE) for _ in range(flags.repeats)]
    planned = plan_step(config, hardware, attention)
    rows = compare(seconds, planned)
    if step.peak_bytes is not None:
        rows.append(Row("peak of a rank: compiler's plan", step.peak_bytes, "bytes"))
    console.print(
        f"The plan says {planned.total[0] * 1e3:.1f} ms ± {planned.error[0]:.0%}, of which "
        f"{planned.communication[0] * 1e3:.1f} communication. Collectives were mocked: their time is modelled, and "
        "what a real one takes from the card's bandwidth and multiprocessors is in neither figure."
    )
    return rows, devices


def mock_gpus(count: int) -> Devices:
    """`count` GPUs, one a process, of which this process has the first and the others do not exist.

    Call it before anything else touches a JAX backend. Raises: ConfigError where there is no GPU.
    """
    jax.config.update("jax_mock_gpu_topology", f"1x{count}x1")  # slices x processes x devices of each
    jax.config.update("jax_cuda_visible_devices", "0")
    jax.config.update("jax_enable_compilation_cache", False)
    try:
        return acquire_devices(count, "gpu")
    except ConfigError as error:
        raise ConfigError(
            f"standin for {count} devices",
            "one real NVIDIA GPU must stand for all of them, and JAX sees none that can on this machine",
            "Run it on a machine with one; `plan` predicts without",
        ) from error


def compare(seconds: list[float], planned: StepTime) -> list[Row]:
    """What was measured, what is modelled, and their sum, each beside the same part of the plan's step."""
    sent, total = float(planned.communication[0]), float(planned.total[0])
    whole = list(np.asarray(seconds) + sent)
    return [
        Row.of(
            "a rank's own work, measured",
            seconds,
            "s",
            against="the plan's step without communication",
            ratio=statistics.median(seconds) / (total - sent),
        ),
        Row("communication, modelled", sent, "s"),
        Row.of("step", whole, "s", against="the plan's step", ratio=statistics.median(whole) / total),
    ]
