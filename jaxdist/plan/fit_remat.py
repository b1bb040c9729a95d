"""What to repeat in backward so that a step fits a device, and takes least time.

`fit_remat` compares the words of `ParallelConfig.remat` and, where `jax.checkpoint` asks for every operation whether
its result is kept (no pipeline, no overlap), every choice of a layer's arrays, in the plan's seconds and bytes.
"""

from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError, divisors
from jaxdist.plan.hardware import GIB, Accelerator, Cluster, find_hardware
from jaxdist.plan.kept_arrays import Choice, choices
from jaxdist.plan.program_memory import rank_of
from jaxdist.plan.search import Candidates, Scored, score, seconds_of_repeats, usable_bytes
from jaxdist.plan.time_model import Efficiency, efficiency_of
from jaxdist.plan.verdict import known_hardware
from jaxdist.runtime.devices import Devices


class Fitted(NamedTuple):
    """The run with `remat` chosen, and its predicted bytes on a device."""

    config: RunConfig
    num_bytes: float


def fit_remat(
    config: RunConfig, cluster: Cluster, limit: float, attention: str = "xla", efficiency: Efficiency | None = None
) -> Fitted:
    """The `remat` with which a step of `config` is fastest among those that need at most `limit` bytes of a device.

    attention: what runs, as in `jaxdist.plan.search.score`, which predicts both.
    Raises: ConfigError where none fits.
    """
    efficiency = efficiency or efficiency_of(cluster.hardware.name)
    found: list[tuple[str, Scored]] = []

    def bytes_with(word: str) -> float:
        """Of a step. All that was asked is kept."""
        chosen = _with(config, word)
        found.append((word, score(chosen, Candidates.of(chosen), cluster, attention, efficiency)))
        return float(found[-1][1].memory.total[0])

    for word in _words(config):
        bytes_with(word)
    if config.parallel.mesh.pp == 1 and not config.parallel.overlap:
        ladder = _ladder(config, cluster, attention, efficiency)
        low, high = 0, len(ladder)  # all before low are too large, all from high on fit
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if bytes_with(ladder[middle]) <= limit else (middle + 1, high)
    fits = [(float(scored.time.total[0]), float(scored.memory.total[0]), word) for word, scored in found]
    least = min(num_bytes for _, num_bytes, _ in fits)
    fits = [row for row in fits if row[1] <= limit]
    if not fits:
        raise ConfigError(
            f"remat='auto' within {limit / GIB:.4g} GiB of a device",
            f"the least that a step needs is {least / GIB:.4g} GiB, whatever backward repeats",
            "Use smaller micro-batches, more devices, or another layout",
        )
    _, num_bytes, word = min(fits)
    return Fitted(_with(config, word), num_bytes)


SIMULATED = "h100"  # the accelerator whose speeds decide what is cheap to repeat on devices that the table has not


def fit_on_devices(config: RunConfig, devices: Devices, gib: float | None = None) -> RunConfig:
    """`config` with `fit_remat`'s choice for these devices, within so many GiB of each; by default what may be filled.

    Raises: ConfigError where nothing fits, and without `gib` on devices whose memory the hardware table does not know.
    """
    hardware = None if devices.simulated else known_hardware(devices.devices[0].device_kind)
    if hardware is None and gib is None:
        raise ConfigError(
            "remat='auto'",
            f"the hardware table does not know how much {devices.description} hold",
            "Use remat='auto-24', with the GiB of a device that a step may take",
        )
    return fit_on_hardware(config, hardware or find_hardware(SIMULATED), gib, devices.platform)


def fit_on_hardware(
    config: RunConfig, hardware: Accelerator, gib: float | None = None, platform: str = "gpu"
) -> RunConfig:
    """The same for accelerators that are not there. platform: whose attention runs."""
    count = config.parallel.mesh.num_devices
    per_node = min(count, hardware.devices_per_node)
    cluster = Cluster(hardware, -(-count // per_node), per_node)
    attention = config.model.attention_for(config.attention, platform, config.precision.dtype, training=True)
    return fit_remat(config, cluster, usable_bytes(cluster) if gib is None else gib * GIB, attention).config


def _with(config: RunConfig, word: str) -> RunConfig:
    return replace(config, parallel=replace(config.parallel, remat=word))


def _words(config: RunConfig) -> list[str]:
    """Those that the run does not refuse."""
    blocks, found = config.model.num_blocks, []
    several = [f"every-{size}" for size in divisors(blocks)[1:] if size**2 <= blocks]
    for word in ("none", "selective", "chunk", "block", *several):
        with suppress(ConfigError):
            _with(config, word)
            found.append(word)
    return found


def _ladder(config: RunConfig, cluster: Cluster, attention: str, efficiency: Efficiency) -> list[str]:
    """Words of the choices for which none keeps as little in as little time; that which keeps most first."""
    found: tuple[Choice, ...] = choices(rank_of(_with(config, "none"), attention))
    seconds = seconds_of_repeats(config, [each.repeated for each in found], cluster, attention, efficiency)
    ladder, best = [], np.inf
    for index in sorted(range(len(found)), key=lambda index: (found[index].num_bytes, seconds[index])):
        if seconds[index] < best:
            ladder.append(found[index].remat)
            best = seconds[index]
    return ladder[::-1]
