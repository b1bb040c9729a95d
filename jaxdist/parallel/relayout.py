"""A parameter moved between its logical array and the layouts of a run, with every message written out.

All of it runs inside `shard_map`. Left to XLA's automatic partitioner (`jit` with `out_shardings`), the same moves have
aborted the process in one version of the compiler. Values are moved, never computed, so the bits stay.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.layout import Leaf
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.parallel.zero import shard, unpad
from jaxdist.specs import logical_spec, zero_padded


def to_storage(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Put on what a layout adds: the order of the stages' rows, then padding.

    Layout: x[`draw_spec`] -> x[`storage_spec`], padded.
    Sends: (pp-1)/pp of the local bytes or less where layers change stages; else nothing.
    """
    if leaf.rows is not None and not is_logical(leaf):
        x = _reorder(x, logical_rows(leaf), np.reshape(leaf.rows, (leaf.mesh.pp, -1)))
    elif leaf.consumer_stages and not is_logical(leaf):
        dim = leaf.spread_dim
        extra = leaf.compute_shape[dim] - leaf.shape[dim]
        x = _own_part(jnp.pad(x, [(0, extra if d == dim else 0) for d in range(x.ndim)]), dim)
    return shard(x, leaf) if zero_padded(leaf) else x


def from_storage(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Undo `to_storage`.

    Sends: an all-gather over ZeRO's axes where it pads, and what `from_compute` sends.
    """
    return from_compute(leaf, to_compute(leaf, x) if zero_padded(leaf) else x)


def to_compute(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Layout: x[`storage_spec`] -> x[`compute_spec`]. Sends: an all-gather where ZeRO shards the leaf."""
    if leaf.zero_dim is None:
        return x
    return unpad(comm.all_gather(x, leaf.zero_axes, leaf.zero_dim, replicated=True), leaf)


def from_compute(leaf: Leaf, x: jax.Array) -> jax.Array:
    """Layers in model order, and the padding of stages taken off.

    Layout: x[`compute_spec`] -> x[`logical_spec`]; as ZeRO shards it where x is.
    Sends: over pp, where layers change stages at most (pp-1)/pp of the bytes; an all-gather where pp does not divide.
    """
    if is_logical(leaf):
        return x
    if leaf.consumer_stages:
        whole = comm.all_gather(x, "pp", leaf.spread_dim, replicated=True)
        return lax.slice_in_dim(whole, 0, leaf.shape[leaf.spread_dim], axis=leaf.spread_dim)
    if logical_spec(leaf)[0] is None:
        whole = comm.all_gather(x, "pp", 0, replicated=True)
        assert leaf.rows is not None
        return whole[np.array([leaf.rows.index(layer) for layer in range(leaf.shape[0])])]
    return _reorder(x, np.reshape(leaf.rows, (leaf.mesh.pp, -1)), logical_rows(leaf))


def is_logical(leaf: Leaf) -> bool:
    """Whether the compute layout holds the logical array: layers in order, nothing padded."""
    return leaf.compute_shape == leaf.shape and (leaf.rows is None or leaf.rows == tuple(range(leaf.shape[0])))


def logical_rows(leaf: Leaf) -> np.ndarray:
    """Layers of the logical array on each stage, for a stacked leaf under pp; otherwise one row of all of them."""
    return np.arange(leaf.shape[0]).reshape(1 if logical_spec(leaf)[0] is None else leaf.mesh.pp, -1)


def gather_whole(x: jax.Array, spec: jax.sharding.PartitionSpec) -> jax.Array:
    """Every rank's part of every dim: x[`spec`] -> x, equal on all ranks."""
    for dim, axes in enumerate(spec):
        for axis in reversed((axes,) if isinstance(axes, str) else axes or ()):
            x = comm.all_gather(x, axis, dim, replicated=True)
    return x


def _reorder(x: jax.Array, held: np.ndarray, wanted: np.ndarray) -> jax.Array:
    """Rows of dim 0 from the stages that have them to those that want them, in one all-to-all.

    held, wanted: [pp, rows] layer numbers, -1 for padding; where `held` has one row of numbers, every stage has them.
    """
    me = comm.rank("pp")
    if len(held) == 1:
        return _pick(x, jnp.asarray(wanted)[me])
    num_stages = len(held)
    moves = [[[row for row in theirs if row >= 0 and row in mine] for mine in wanted] for theirs in held]
    longest = max(len(rows) for stage in moves for rows in stage)
    sent = np.full((num_stages, num_stages * longest), -1)
    arrived = np.full(wanted.shape, -1)
    for source, to_stages in enumerate(moves):
        for stage, rows in enumerate(to_stages):
            for place, row in enumerate(rows):
                sent[source, stage * longest + place] = list(held[source]).index(row)
                arrived[stage, list(wanted[stage]).index(row)] = source * longest + place
    buffer = exchange.all_to_all(_pick(x, jnp.asarray(sent)[me]), "pp", 0, 0)
    return _pick(buffer, jnp.asarray(arrived)[me])


def _pick(x: jax.Array, rows: jax.Array) -> jax.Array:
    """Rows of dim 0 by index; zeros for -1."""
    found = jnp.take(x, jnp.maximum(rows, 0), axis=0)
    return jnp.where(rows.reshape(-1, *[1] * (x.ndim - 1)) >= 0, found, jnp.zeros((), x.dtype))


def _own_part(x: jax.Array, dim: int) -> jax.Array:
    length = x.shape[dim] // comm.size("pp")
    return lax.dynamic_slice_in_dim(x, comm.rank("pp") * length, length, axis=dim)
