"""A tied table under pp: every stage holds a part of it, the stages that compute with it get it whole for a step.

Held whole on every stage it would cost each its moments, and its gradient a sum over all stages. Here each of the two
ends sends one table a step, what an all-reduce of two sends, and a stage holds 1/pp of the state.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Leaf, replace_entry
from jaxdist.parallel import exchange


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
        padded = exchange.gather_to(x, "pp", leaf.spread_dim, leaf.consumer_stages)
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
        return exchange.scatter_from(padded, "pp", dim, leaf.consumer_stages)

    return jax.tree.map(part, leaves, grads)
