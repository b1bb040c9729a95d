"""The executor's buffers: slots for messages, and pools of residuals with a row for each slot and layer."""

from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm


class Buffer(StrEnum):
    """Names of the functions that make the buffers; they stay in the program, where their sizes are read."""

    MESSAGES = "messages"
    INPUTS = "inputs"
    B_RESIDUALS = "b_residuals"
    W_RESIDUALS = "w_residuals"
    B_TO_W = "b_to_w"


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["length", "shape"])
@dataclass(frozen=True)
class Pool:
    """Values of one shape, a row for each slot and layer: rows[slots * length, elements].

    Each value is laid out flat. With dims of its own, a GPU compiler gives a buffer the layout that one of its readers
    likes (time first, for a reduce-scatter) and transposes the whole of it for the others, at every tick. And slots and
    layers are one dim: with one layer a chunk, XLA would see that a load does not depend on the loop's index, and would
    lift it out of the loop, to be run at every tick on every stage.
    """

    rows: jax.Array
    length: int
    shape: tuple[int, ...]


def pick(tree: Any, index: jax.Array | int) -> Any:
    """Entry `index` of the leading dim of every leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(buffer: jax.Array, slot: jax.Array, x: jax.Array) -> jax.Array:
    """`x` into a slot of the buffer; nothing happens for slot -1."""
    at = jnp.maximum(slot, 0)
    kept = jnp.where(slot >= 0, x, lax.dynamic_index_in_dim(buffer, at, keepdims=False))
    return lax.dynamic_update_index_in_dim(buffer, kept, at, 0)


def load(pools: list[Pool], slot: jax.Array, layer: jax.Array | int) -> list:
    """What each pool holds at one slot and layer."""

    def at(pool):
        return lax.dynamic_index_in_dim(pool.rows, slot * pool.length + layer, keepdims=False).reshape(pool.shape)

    return [at(pool) for pool in pools]


def store(pools: list[Pool], slot: jax.Array, layer: jax.Array | int, values: list) -> list[Pool]:
    """The pools with `values` at one slot and layer."""

    def at(pool, x):
        x = comm.varying_like(x.reshape(-1), pool.rows)
        rows = lax.dynamic_update_index_in_dim(pool.rows, x, slot * pool.length + layer, 0)
        return Pool(rows, pool.length, pool.shape)

    return [at(pool, x) for pool, x in zip(pools, values, strict=True)]


def add(sums: Any, tree: Any) -> Any:
    """Running sums plus a tree of the same structure, in the dtype of the sums."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, tree)
