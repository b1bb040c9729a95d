"""Keys and values that attention keeps while text is generated: filled by the prompts, then extended token by token.

A model computes as it does in training; what differs is what `jaxdist.models.attention.attend` finds in its context.
Dims: L layers on this stage, B batch, T positions of this call, C places of the cache, K key heads, H head dim.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.models.attention import scores_of, weighted_values
from jaxdist.parallel import collectives as comm


class KeyValues(NamedTuple):
    """Of one attention: [B, C, K, H] each, of a layer; [L, B, C, K, H], of all on a stage.

    Position p stands at place p mod C: a cache as long as a sliding window is a ring.
    """

    k: jax.Array
    v: jax.Array


def held_positions(last_B: jax.Array, places: int) -> jax.Array:
    """The position at each place once `last_B` is written: [B, C], negative where there is none yet."""
    return last_B[:, None] - (last_B[:, None] - jnp.arange(places)) % places


class Prompts:
    """Whole prompts, padded on the right: attention as in training, whose keys and values are kept.

    lengths_B: of the prompts. capacity: the longest that texts become.
    """

    def __init__(self, lengths_B: jax.Array, capacity: int):
        self.lengths_B, self.capacity = lengths_B, capacity
        self.kept: list[KeyValues] = []

    def positions(self, length: int) -> jax.Array:
        return jnp.arange(length)

    def attend(self, core: Callable, q_BTNH, k_BTKH, v_BTKH, window: int | None) -> jax.Array:
        self.kept.append(KeyValues(self._kept(k_BTKH, window), self._kept(v_BTKH, window)))
        return core(q_BTNH, k_BTKH, v_BTKH)

    def _kept(self, x_BTKH: jax.Array, window: int | None) -> jax.Array:
        places = self.capacity if window is None else min(window, self.capacity)
        more = places - x_BTKH.shape[1]
        if more >= 0:
            return jnp.pad(x_BTKH, [(0, 0), (0, more), (0, 0), (0, 0)])
        held_BC = jnp.maximum(held_positions(self.lengths_B - 1, places), 0)
        return jax.vmap(lambda x, at: jnp.take(x, at, axis=0))(x_BTKH, held_BC)


class NextTokens:
    """One more token of each text: its key and value are written, and it looks back at all that is held.

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
        probs_BN1C = jax.nn.softmax(jnp.where(seen_BC[:, None, None], scores_BN1C, lowest), axis=-1)
        return weighted_values(probs_BN1C.astype(q_B1NH.dtype), v_BCKH)

    def _extended(self, which: int, x_B1KH: jax.Array) -> jax.Array:
        all_LBCKH = self.kept[self.calls][which]
        rows_B = jnp.arange(x_B1KH.shape[0])
        places_B = self.positions_B % all_LBCKH.shape[2]
        at = comm.varying_like((self.layer + 0 * rows_B, rows_B, places_B), (x_B1KH,) * 3)
        all_LBCKH = all_LBCKH.at[at].set(x_B1KH[:, 0])
        self.kept[self.calls] = self.kept[self.calls]._replace(**{"kv"[which]: all_LBCKH})
        return all_LBCKH[self.layer]
