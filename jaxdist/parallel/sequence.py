"""How a sequence is split over the axis `cp`: which positions each rank holds.

In a zig-zag: of 2n equal chunks, rank r of n holds r and 2n-1-r, so that causal scores are as many on every rank. Where
heads are exchanged for positions no such order is needed.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxdist.parallel import collectives as comm

AXIS = "cp"
SEQUENCE_DIM = 1


@dataclass(frozen=True)
class Split:
    """How a sequence is split over the axis: groups of `exchanging` neighbours exchange heads, and the groups are a
    ring, or gather keys. With one group heads alone are exchanged; with groups of one rank, none.

    swaps: what a ring sends, neighbours swap in pairs, an even number of groups
    (`jaxdist.parallel.context_parallel.ring_attention`).
    """

    ranks: int = 1
    exchanging: int = 1
    gathers: bool = False
    swaps: bool = False

    @property
    def groups(self) -> int:
        return self.ranks // self.exchanging

    @property
    def unit(self) -> int:
        """What a sequence's length is a multiple of: positions are split evenly over ranks, and in 2 chunks a group."""
        return self.ranks if self.groups == 1 else math.lcm(self.ranks, 2 * self.groups)

    @property
    def group(self) -> jax.Array | int:
        """The number of this rank's group."""
        return comm.rank(AXIS) // self.exchanging

    @property
    def member(self) -> jax.Array | int:
        """The number of this rank in its group."""
        return comm.rank(AXIS) % self.exchanging

    def chunk_of(self, half, group: jax.Array | int) -> jax.Array:
        """The number of a group's first (half 0) or second chunk among the sequence's 2 * groups."""
        return jnp.where(half == 0, group, 2 * self.groups - 1 - group)

    def place(self, held_T: jax.Array, num_local: int, rank: jax.Array | int) -> jax.Array:
        """Positions in the sequence of some of the `num_local` that a rank holds, by their places there: i32[T]."""
        if self.ranks == 1:
            return held_T
        held = held_T + rank % self.exchanging * num_local  # among those of the rank's group
        if self.groups == 1:
            return held
        chunk, group = num_local * self.exchanging // 2, rank // self.exchanging
        half = held // chunk
        return held + (self.chunk_of(half, group) - half) * chunk

    def positions(self, held_T: jax.Array, num_local: int) -> jax.Array:
        """`place` of this rank."""
        return self.place(held_T, num_local, comm.rank(AXIS))

    def cut(self, x_BS: jax.Array) -> jax.Array:
        """What this rank holds of an array with the whole sequence on dim 1. Sends nothing."""
        if self.ranks == 1:
            return x_BS
        num_local = x_BS.shape[SEQUENCE_DIM] // self.ranks
        places_T = self.positions(jnp.arange(num_local), num_local)
        return jnp.take(comm.varying(x_BS, AXIS), places_T, axis=SEQUENCE_DIM)

    def gather(self, x_BT: jax.Array) -> jax.Array:
        """Undo `cut`: the whole sequence, in order, on every rank. Sends (n-1)/n of its bytes."""
        if self.ranks == 1:
            return x_BT
        num_local = x_BT.shape[SEQUENCE_DIM]
        places_S = [self.place(jnp.arange(num_local), num_local, rank) for rank in range(self.ranks)]
        return jnp.take(comm.all_gather(x_BT, AXIS, SEQUENCE_DIM), jnp.argsort(jnp.concatenate(places_S)), SEQUENCE_DIM)
