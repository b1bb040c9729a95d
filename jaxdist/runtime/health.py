"""Numerical-fault detection: which rank made a non-finite or diverging value, in which leaf, and since when.

What a step flags on each rank and what a checksum finds on each device is brought together on the hosts, outside of
any collective of the training step.
"""

import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.mesh import AXES, MeshShape
from jaxdist.parallel import collectives as comm
from jaxdist.runtime import processes
from jaxdist.specs import drop_unit_axes
from jaxdist.train.program import Program
from jaxdist.train.state import State


@dataclass(frozen=True)
class Culprit:
    """A rank and what is wrong there: leaves by name, or "loss"."""

    rank: int
    coordinates: str
    names: tuple[str, ...]

    def __str__(self) -> str:
        shown, rest = self.names[:3], len(self.names) - 3
        more = f" and {rest} more" if rest > 0 else ""
        place = f"rank {self.rank}" + (f" ({self.coordinates})" if self.coordinates else "")
        return f"{place}: {', '.join(shown)}{more}"


def name_culprits(program: Program, flags: np.ndarray) -> list[Culprit]:
    """flags[ranks, 1 + leaves], the loss first -> the ranks that have one, in mesh order."""
    names = ("loss", *(leaf.name for leaf in jax.tree.leaves(program.layout.trained.leaves)))
    return [
        Culprit(rank, coordinates(program.config.parallel.mesh, rank), tuple(names[i] for i in np.flatnonzero(row)))
        for rank, row in enumerate(flags)
        if row.any()
    ]


def coordinates(mesh: MeshShape, rank: int) -> str:
    """Where a rank sits: dp=1,tp=0. Axes of size 1 are left out."""
    places = np.unravel_index(rank, mesh.sizes)
    return ",".join(f"{axis}={place}" for axis, size, place in zip(AXES, mesh.sizes, places, strict=True) if size > 1)


def gather_ranks(name: str, x: jax.Array) -> np.ndarray:
    """An array [ranks, n] with one row a device, whole on every process."""
    mine = {shard.index[0].start or 0: np.asarray(shard.data)[0].tolist() for shard in x.addressable_shards}
    found: dict[int, list] = {}
    for text in processes.from_all(name, json.dumps(mine)):
        found |= {int(rank): row for rank, row in json.loads(text).items()}
    return np.array([found[rank] for rank in range(x.shape[0])])


# ---------------------------------------------------------------------------------------------------------------------
# Replicas
# ---------------------------------------------------------------------------------------------------------------------


def make_replica_check(program: Program) -> Callable[[State], list[Culprit]]:
    """A function of the state that names the ranks whose copy of anything replicated differs from the others'.

    Every device sums up its own copy of every array as integers (position counts), so one flipped bit shows. Ranks
    that should hold the same must have the same sum; of two that differ both are named, of more the minority.
    Sends: nothing between devices.
    """
    specs, mesh = jax.tree.leaves(program.specs), program.config.parallel.mesh
    names = [
        jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(program.specs)
    ]

    def sums(state):
        return jnp.stack([comm.varying(checksum(x), AXES) for x in jax.tree.leaves(state)])[None]

    on_ranks = jax.jit(
        jax.shard_map(
            sums,
            mesh=program.mesh,
            in_specs=(program.specs,),
            out_specs=drop_unit_axes((AXES,), mesh),
            check_vma=True,
        )
    )

    def check(state: State) -> list[Culprit]:
        found = gather_ranks("checksums", on_ranks(state))
        wrong = np.stack([_minority(column, spec, mesh) for column, spec in zip(found.T, specs, strict=True)], axis=1)
        return [
            Culprit(rank, coordinates(mesh, rank), tuple(names[i] for i in np.flatnonzero(row)))
            for rank, row in enumerate(wrong)
            if row.any()
        ]

    return check


def checksum(x: jax.Array) -> jax.Array:
    """A 32-bit sum over the bits of a local array in which every position weighs differently; exact, any order."""
    bits = lax.bitcast_convert_type(x, {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[x.dtype.itemsize])
    bits = bits.reshape(-1).astype(jnp.uint32)
    weights = 2 * lax.iota(jnp.uint32, bits.size) + 1  # odd: no flipped bit is lost in the sum's overflow
    return jnp.sum(bits * weights, dtype=jnp.uint32)


def _minority(sums: np.ndarray, spec, mesh: MeshShape) -> np.ndarray:
    """wrong[ranks]: whether a rank's sum is not the one that most ranks with the same shard have."""
    split = {axis for entry in spec for axis in ((entry,) if isinstance(entry, str) else entry or ())}
    places = np.stack(np.unravel_index(np.arange(len(sums)), mesh.sizes), axis=1)
    groups: dict[tuple, list[int]] = {}
    for rank, place in enumerate(places):
        groups.setdefault(tuple(p for p, axis in zip(place, AXES, strict=True) if axis in split), []).append(rank)
    wrong = np.zeros(len(sums), bool)
    for ranks in groups.values():
        (common, most), *others = Counter(sums[ranks].tolist()).most_common()
        tied = bool(others) and others[0][1] == most
        for rank in ranks:
            wrong[rank] = tied or sums[rank] != common
    return wrong


# ---------------------------------------------------------------------------------------------------------------------
# Loss
# ---------------------------------------------------------------------------------------------------------------------


class SpikeWatch:
    """Whether a loss stands out from those before it: by `sigmas` of their spread, and by 10 % at least.

    The spread is that of the last `window` losses about their line, so a steady fall is not taken for noise. Nothing is
    judged before half a window has been seen. `recent` is the whole state.
    """

    def __init__(self, window: int = 32, sigmas: float = 6.0, recent: list[float] | None = None):
        self.window, self.sigmas, self.recent = window, sigmas, list(recent or [])

    def is_spike(self, loss: float) -> bool:
        """Judge the next loss; one that is no spike is remembered."""
        if len(self.recent) >= self.window // 2:
            places = np.arange(len(self.recent))
            slope, start = np.polyfit(places, self.recent, 1)
            spread = float(np.std(np.array(self.recent) - (start + slope * places)))
            expected = start + slope * len(self.recent)
            if loss > max(expected + self.sigmas * spread, 1.1 * max(expected, self.recent[-1])):
                return True
        if math.isfinite(loss):
            self.recent = [*self.recent, loss][-self.window :]
        return False
