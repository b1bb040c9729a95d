"""Keys and values that attention keeps while text is generated: filled by the prompts, then extended token by token.

A model computes as it does in training; what differs is what `jaxdist.models.attention.attend` finds in its context.
Over cp, position p is held by rank p mod cp, so that every rank holds as many of every text, its window, and what is
added to it. Dims: L layers on this stage, B batch, T positions of this call on this rank, C places of the rank's cache,
K key heads, H head dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.models.attention import scores_of, weighted_values
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.context_parallel import by_turns, merge_over_ranks
from jaxdist.parallel.sequence import AXIS, SEQUENCE_DIM, Split


class KeyValues(NamedTuple):
    """Keys and values of one attention: [B, C, K, H] each, of a layer; [L, B, C, K, H], of all on a stage.

    Position p stands at place (p // cp) mod C of its rank: a cache as long as a sliding window is a ring.
    """

    k: jax.Array
    v: jax.Array


def held_positions(last_B: jax.Array, places: int) -> jax.Array:
    """The position at each place of this rank once `last_B` is written: [B, C], negative where there is none yet."""
    rank, ranks = comm.rank(AXIS), comm.size(AXIS)
    last_B1 = ((last_B - rank) // ranks)[:, None]  # among the rank's own
    own_BC = last_B1 - (last_B1 - jnp.arange(places)) % places
    return own_BC * ranks + rank


def num_places(capacity: int, window: int | None) -> int:
    """Places of a rank's cache: for its part of a text, or of the window."""
    positions = capacity if window is None else min(window, capacity)
    return -(-positions // comm.size(AXIS))


class Prompts:
    """Whole prompts, padded on the right: attention as in training, whose keys and values are kept.

    lengths_B: of the prompts. capacity: the longest that texts become. split: of the prompts over cp.
    Sends: over cp, (n-1)/n of a rank's keys and values once, beside what attention sends.
    """

    def __init__(self, lengths_B: jax.Array, capacity: int, split: Split = Split()):
        self.lengths_B, self.capacity, self.split = lengths_B, capacity, split
        self.kept: list[KeyValues] = []

    def positions(self, length: int) -> jax.Array:
        """Padding beyond any text's end has the last one's: a model may have no more."""
        return jnp.minimum(self.split.positions(jnp.arange(length), length), self.capacity - 1)

    def attend(self, core: Callable, q_BTNH, k_BTKH, v_BTKH, window: int | None) -> jax.Array:
        self.kept.append(KeyValues(self._kept(k_BTKH, window), self._kept(v_BTKH, window)))
        return core(q_BTNH, k_BTKH, v_BTKH)

    def _kept(self, x_BTKH: jax.Array, window: int | None) -> jax.Array:
        x_BTKH, places = by_turns(self.split, x_BTKH), num_places(self.capacity, window)
        more = places - x_BTKH.shape[SEQUENCE_DIM]
        if more >= 0:
            return jnp.pad(x_BTKH, [(0, 0), (0, more), (0, 0), (0, 0)])
        held_BC = jnp.maximum(held_positions(self.lengths_B - 1, places), 0) // self.split.ranks
        return jax.vmap(lambda x, at: jnp.take(x, at, axis=0))(x_BTKH, held_BC)


class NextTokens:
    """One more token of each text: its key and value are written, and it looks back at all that is held.

    Over cp every rank has the token; one writes, and each attends to what it holds (`merge_over_ranks`).

    held: the caches of every attention of a layer, of all layers of the stage, in which `layer` is this one. They are
    replaced in place, so that a compiled loop over layers writes what is new and copies nothing.
    """

    def __init__(self, held: list[KeyValues], layer: jax.Array, positions_B: jax.Array):
        self.kept, self.layer, self.positions_B, self.calls = list(held), layer, positions_B, 0

    def positions(self, length: int) -> jax.Array:
        return self.positions_B[:, None]

    def attend(self, core: Callable, q_B1NH, k_B1KH, v_B1KH, window: int | None) -> jax.Array:
        k_BCKH, v_BCKH = (self._extended(i, x) for i, x in enumerate((k_B1KH, v_B1KH)))
        self.calls += 1
        held_BC = held_positions(self.positions_B, k_BCKH.shape[1])
        seen_BC = held_BC >= 0
        if window is not None:
            seen_BC &= self.positions_B[:, None] - held_BC < window
        scores_BN1C = scores_of(q_B1NH, k_BCKH)
        lowest = jnp.finfo(scores_BN1C.dtype).min
        scores_BN1C = jnp.where(seen_BC[:, None, None], scores_BN1C, lowest)
        probs_BN1C = jax.nn.softmax(scores_BN1C, axis=-1)
        o_B1NH = weighted_values(probs_BN1C.astype(q_B1NH.dtype), v_BCKH)
        return merge_over_ranks(o_B1NH, jax.nn.logsumexp(scores_BN1C, axis=-1).swapaxes(1, 2))

    def _extended(self, which: int, x_B1KH: jax.Array) -> jax.Array:
        all_LBCKH = self.kept[self.calls][which]
        rows_B = jnp.arange(x_B1KH.shape[0])
        own_B, owner_B = jnp.divmod(self.positions_B, comm.size(AXIS))
        places = all_LBCKH.shape[2]
        places_B = jnp.where(owner_B == comm.rank(AXIS), own_B % places, places)  # beyond the last: not written
        x_B1KH = comm.varying(x_B1KH, AXIS)
        at = comm.varying_like((self.layer + 0 * rows_B, rows_B, places_B), (x_B1KH,) * 3)
        all_LBCKH = all_LBCKH.at[at].set(x_B1KH[:, 0], mode="drop")
        self.kept[self.calls] = self.kept[self.calls]._replace(**{"kv"[which]: all_LBCKH})
        return all_LBCKH[self.layer]
