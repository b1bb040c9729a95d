"""A tied table under pp: every stage holds a part of it, the stages that compute with it get it whole for a step.

Held whole on every stage it would cost each its moments, and its gradient a sum over all stages. Here each of the two
ends sends one table a step, what an all-reduce of two sends, and a stage holds 1/pp of the state.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Leaf, replace_entry
from jaxdist.parallel import collectives as comm


def used_local(leaf: Leaf) -> tuple[int, ...]:
    """Local shape where the leaf is computed with."""
    if not leaf.consumer_stages:
        return leaf.compute_local
    return replace_entry(leaf.compute_local, leaf.spread_dim, leaf.shape[leaf.spread_dim])


def gather_to_consumers(leaves: dict, params: dict) -> dict:
    """Leaves in the compute layout -> whole on the stages that use them; those that all stages use stay as they are.

    Sends: a stage's part, once to each user but itself.
    """

    def whole(leaf: Leaf, x: jax.Array) -> jax.Array:
        if not leaf.consumer_stages:
            return x
        padded = gather_to(x, "pp", leaf.spread_dim, leaf.consumer_stages)
        return lax.slice_in_dim(padded, 0, leaf.shape[leaf.spread_dim], axis=leaf.spread_dim)

    return jax.tree.map(whole, leaves, params)


def scatter_from_consumers(leaves: dict, grads: dict) -> dict:
    """Undo `gather_to_consumers` for gradients: what the consumer stages have, summed, in the compute layout.

    Sends: on each user (pp-1)/pp of the leaf's bytes, padded.
    """

    def part(leaf: Leaf, g: jax.Array) -> jax.Array:
        if not leaf.consumer_stages:
            return g
        dim = leaf.spread_dim
        extra = leaf.compute_shape[dim] - leaf.shape[dim]
        padded = jnp.pad(g, [(0, extra if d == dim else 0) for d in range(g.ndim)]) if extra else g
        return scatter_from(padded, "pp", dim, leaf.consumer_stages)

    return jax.tree.map(part, leaves, grads)


def gather_to(x: jax.Array, axis: str, dim: int, ranks: Sequence[int]) -> jax.Array:
    """Concatenate every rank's slice of `dim`, on `ranks` alone: n-1 messages, each to one rank.

    Layout: x[..., D_axis, ...] -> x[..., D, ...] on `ranks`; on others their own slice among zeros.
    Backward: scatter_from the same ranks.
    Sends: the local bytes to each of `ranks` but itself; an all_gather sends them n-1 times.
    """
    if not comm.live(axis):
        return x
    dim = comm.dim_of(x, dim)
    n, length = comm.size(axis), x.shape[dim]
    whole = jnp.zeros((*x.shape[:dim], n * length, *x.shape[dim + 1 :]), x.dtype)

    def put(whole, part, owner):
        return lax.dynamic_update_slice_in_dim(whole, part, owner * length, dim)

    whole = put(comm.varying_like(whole, x), x, comm.rank(axis))
    for step in range(1, n):
        part = lax.ppermute(x, axis, [((receiver + step) % n, receiver) for receiver in ranks])
        whole = put(whole, part, (comm.rank(axis) + step) % n)
    return whole


def scatter_from(x: jax.Array, axis: str, dim: int, ranks: Sequence[int]) -> jax.Array:
    """Sum what `ranks` have and give every rank its slice of `dim`: n-1 messages, each from one rank.

    Layout: x[..., D, ...] {U_ranks} -> x[..., D_axis, ...]. What another rank has counts in its own slice alone: it
    should be 0.
    Backward: gather_to the same ranks.
    Sends: (n-1)/n * S on each of `ranks`, as a reduce_scatter does; nothing on others.
    Raises: ValueError where `dim` does not divide by the axis.
    """
    if not comm.live(axis):
        return x
    n, dim = comm.size(axis), comm.dim_of(x, dim)
    if x.shape[dim] % n:
        raise ValueError(f"scatter_from over {axis}={n}: dim {dim} of shape {x.shape} does not divide.")
    length = x.shape[dim] // n

    def part_of(owner):
        return lax.dynamic_slice_in_dim(x, owner * length, length, dim)

    total = part_of(comm.rank(axis))
    for step in range(1, n):
        sent = part_of((comm.rank(axis) + step) % n)
        total = total + lax.ppermute(sent, axis, [(sender, (sender + step) % n) for sender in ranks])
    return total
