"""What to repeat in backward so that a step fits a device, and takes least time.

`fit_remat` compares the words of `ParallelConfig.remat` and, where `jax.checkpoint` asks for every operation whether
its result is kept (no pipeline, no overlap), every choice of a layer's arrays, in the plan's seconds and bytes.
`with_arrays` adds such choices to a search.
"""

import heapq
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError, divisors
from jaxdist.mesh import AXES, MeshShape
from jaxdist.plan.explain import CLOSE
from jaxdist.plan.hardware import GIB, Accelerator, Cluster, find_hardware
from jaxdist.plan.kept_arrays import Choice, choices
from jaxdist.plan.parts import OneRank
from jaxdist.plan.program_memory import rank_of, ranks_of
from jaxdist.plan.search import (
    FREE,
    Candidates,
    Fixed,
    Found,
    Scored,
    layouts_of_mesh,
    place_of,
    score,
    seconds_of_repeats,
    usable_bytes,
)
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
        """Peak bytes of a step that keeps all that was asked."""
        chosen = _with(config, word)
        found.append((word, score(chosen, Candidates.of(chosen), cluster, attention, efficiency)))
        return float(found[-1][1].memory.total[0])

    for word in _words(config):
        bytes_with(word)
    if config.parallel.mesh.pp == 1 and not config.parallel.overlap:
        ladder = [rung.remat for rung in _ladder(config, cluster, attention, efficiency)]
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
            f"a step must have at least {least / GIB:.4g} GiB, whatever backward repeats",
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
            f"the hardware table must know how much {devices.description} hold",
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
    """Words that the run does not refuse."""
    blocks, found = config.model.num_blocks, []
    several = [f"every-{size}" for size in divisors(blocks)[1:] if size**2 <= blocks]
    for word in ("none", "selective", "chunk", "block", *several):
        with suppress(ConfigError):
            _with(config, word)
            found.append(word)
    return found


class _Rung(NamedTuple):
    remat: str
    seconds: float
    num_bytes: float  # kept by a layer, of one sequence


def _ladder(config: RunConfig, cluster: Cluster, attention: str, efficiency: Efficiency) -> list[_Rung]:
    """The choices for which none keeps as little in as little time; that which keeps most first."""
    found: tuple[Choice, ...] = choices(rank_of(_with(config, "none"), attention))
    seconds = seconds_of_repeats(config, [each.repeated for each in found], cluster, attention, efficiency)
    ladder, best = [], np.inf
    for index in sorted(range(len(found)), key=lambda index: (found[index].num_bytes, seconds[index])):
        if seconds[index] < best:
            ladder.append(_Rung(found[index].remat, float(seconds[index]), found[index].num_bytes))
            best = seconds[index]
    return ladder[::-1]


# ------------------------------------------------------------------------------------------------------------ search


def with_arrays(found: Found, attention: str, efficiency: Efficiency, fixed: Fixed = FREE) -> Found:
    """What a search found, and of each mesh the fastest layout that fits because backward repeats some arrays, where it
    is faster than what was found of that mesh, and at most `CLOSE` slower than the best of all. fixed: as in the
    search.

    The time of a choice is known without a trace of it, and so is a bound of its bytes: the fastest is traced first. If
    it does not fit, its excess says how much less the next one keeps; if one fits, those before it are tried back to
    one that does not.
    """
    fits, limit = found.fits, usable_bytes(found.cluster)
    rows = _nothing_repeated(found, attention, fixed)
    if not fits.any() or not len(rows):  # what whole blocks do not bring down, arrays do not
        return found
    whole = score(found.base, rows, found.cluster, attention, efficiency)
    ranks, way = ranks_of(found.base, rows, attention)
    kept = found.base.model.num_blocks * rows.rows  # sequences of which a layer keeps arrays
    too_much = (whole.memory.total - limit) / kept  # of each
    fastest: dict[MeshShape, float] = {}
    for index in np.flatnonzero(fits):
        mesh, seconds = found.layouts.mesh(index), float(found.time.total[index])
        fastest[mesh] = min(seconds, fastest.get(mesh, np.inf))
    best, tried = min(fastest.values()), []
    # (seconds, row, rung of its ladder). With all kept, a row takes least.
    queue = [(float(whole.time.total[row]), int(row), 0) for row in np.flatnonzero(~whole.fits)]
    heapq.heapify(queue)
    while queue and queue[0][0] <= (1 + CLOSE) * best:
        seconds, row, rung = heapq.heappop(queue)
        mesh = rows.mesh(row)
        if seconds >= fastest.get(mesh, np.inf) or too_much[row] > _most_saved(ranks[way[row]]):
            continue
        ladder = _ladder(whole.config(row), found.cluster, attention, efficiency)
        most = ladder[0].num_bytes - too_much[row]
        if rung:
            here = replace(rows.take([row]), repeats=np.array([place_of(ladder[rung].remat)]))
            tried.append(score(found.base, here, found.cluster, attention, efficiency))
            if tried[-1].fits[0]:
                fastest[mesh], best = seconds, min(seconds, best)
                heapq.heappush(queue, (ladder[rung - 1].seconds, row, rung - 1))
                continue
            most = min(most, ladder[rung].num_bytes - (tried[-1].memory.total[0] - limit) / kept[row])
        small = (n for n, each in enumerate(ladder) if n > rung and each.num_bytes <= most)
        if (following := next(small, None)) is not None:
            heapq.heappush(queue, (ladder[following].seconds, row, following))
    together = Scored.join([found, *(each for each in tried if each.fits[0])])
    num_fitting = found.num_fitting + len(together) - len(found)
    return Found(
        found.base,
        found.cluster,
        together.layouts,
        together.time,
        together.memory,
        found.num_layouts + len(tried),
        num_fitting,
    )


def _most_saved(rank: OneRank) -> float:
    """Bytes of one sequence that a layer keeps if all is kept, over those of the least choice."""
    everything, *others = choices(rank)
    return everything.num_bytes - min((each.num_bytes for each in others), default=everything.num_bytes)


def _nothing_repeated(found: Found, attention: str, fixed: Fixed = FREE) -> Candidates:
    """Layouts of a search's meshes whose arrays may be chosen one by one, and that keep all of them. What a ring
    gathers is put together in place, by no operation that a choice could name."""
    base, meshes = found.base, dict.fromkeys(map(found.layouts.mesh, np.flatnonzero(found.layouts.pp == 1)))
    blocks = [found.layouts.take(slice(0))]
    for mesh in meshes:
        sizes = {axis: getattr(mesh, axis) for axis in AXES}
        blocks += layouts_of_mesh(
            base.model,
            sizes,
            base.batch_size,
            base.optimizer.name,
            attention=attention,
            loss_chunks=base.parallel.loss_chunks,
            fixed=fixed,
        )
    rows = Candidates.join(blocks)
    plain = [rows.every, rows.selective, rows.recompute, rows.overlap, rows.keep, rows.ring]
    return rows.take(~np.logical_or.reduce(plain))
