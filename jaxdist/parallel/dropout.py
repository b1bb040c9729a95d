"""Dropout whose mask does not depend on the mesh."""

from functools import partial

import jax
import jax.numpy as jnp
from jax import random

from jaxdist.parallel.remat import mark_saveable


def dropout(x: jax.Array, rate: float, key: jax.Array, *indices: jax.Array) -> jax.Array:
    """Zero elements with probability `rate` and scale the rest by 1 / (1 - rate).

    The mask of an element depends on the key and on its *global* index alone. `indices[d]` holds the global indices of
    dim d of the local array, for every leading dim that some mesh axis may split; the key is folded with them, one
    dim after the other, and the remaining dims are drawn at once.
    """
    kept = mark_saveable(draw(key, x.shape[len(indices) :], *indices) >= jnp.uint32(rate * 2**32))
    return jnp.where(kept, x * (1 / (1 - rate)), 0).astype(x.dtype)


def draw(key: jax.Array, shape: tuple[int, ...], *indices: jax.Array) -> jax.Array:
    """Random u32[*lengths of indices, *shape]: the key is folded with each index in turn, and `shape` drawn at once."""
    if not indices:
        return random.bits(key, shape, jnp.uint32)
    keys = jax.vmap(partial(random.fold_in, key))(indices[0])
    return jax.vmap(lambda each: draw(each, shape, *indices[1:]))(keys)
