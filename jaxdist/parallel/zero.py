"""ZeRO-2 and ZeRO-3 inside the differentiated function: weights fetched where they are used, gradients scattered there.

`fetch` stands between a part of the model and its parameters. Forward it gives whole weights; backward it
reduce-scatters their gradient at once, so a whole gradient never lives longer than one block.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp

from jaxdist.layout import Layout
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.grouping import all_gather_groups, reduce_scatter_groups
from jaxdist.parallel.spread import scatter_from_users

Weights = dict | tuple[dict, dict]
Fetch = Callable[[Weights], dict]


def fetch_whole(weights: Weights) -> dict:
    """The fetch of ZeRO 0 and 1: parameters are whole already."""
    return weights


def make_fetch(
    leaves: dict, layout: Layout, reduce_dtype: str, holder_dtype: str, *, whole_holders: bool = False
) -> Fetch:
    """The fetch of one part of the model, whose leaves (layer dim removed) are `leaves`.

    It takes (holders, held). `held` are shards, which ZeRO-3 gathers, or the whole weights of ZeRO-2, which are used as
    they are. The holders have the shape of shards; their value is never used, and their gradient is the weights'. With
    `whole_holders` they are `make_whole_holders`', which scatter later what several fetches leave in them.

    Layout: w in the storage layout -> all_gather dp -> w in the compute layout, typed varying over dp.
    Backward: reduce_scatter over dp of dw, in `reduce_dtype`; the sum is kept in `holder_dtype`.
    Sends: (n-1)/n of the part's bytes forward (nothing for ZeRO-2), again under remat, and once backward.
    Source: ZeRO, arXiv 1910.02054, section 7.2; FSDP, arXiv 2304.11277, section 3.
    """
    flat_leaves, treedef = jax.tree.flatten(leaves)
    scatter = make_scatter(leaves, layout, reduce_dtype, holder_dtype)

    @jax.custom_vjp
    def fetch(holders: dict, held: dict) -> dict:
        if not layout.params_stored:
            return held
        return treedef.unflatten(all_gather_groups(treedef.flatten_up_to(held), flat_leaves, "dp", layout.parallel))

    def forward(holders, held):
        return fetch(holders, held), None

    def backward(_, d_weights):
        if whole_holders:
            return jax.tree.map(lambda g: g.astype(holder_dtype), d_weights), None
        return scatter(d_weights), None

    fetch.defvjp(forward, backward)
    return lambda weights: fetch(*weights)


def make_whole_holders(leaves: dict, layout: Layout, reduce_dtype: str, holder_dtype: str) -> Callable[[dict], dict]:
    """Holders for weights that are fetched in several places (a tied table): their gradients add up before they travel.

    Layout: holders in the storage layout -> zeros in the compute layout.
    Backward: reduce_scatter over dp of the summed gradient, in `reduce_dtype`.
    Sends: nothing forward, (n-1)/n of the leaves' bytes backward. A whole gradient lives from the head's backward
    to the embedding's.
    """
    scatter = make_scatter(leaves, layout, reduce_dtype, holder_dtype)

    @jax.custom_vjp
    def whole(holders: dict) -> dict:
        return jax.tree.map(
            lambda leaf, x: comm.varying_like(jnp.zeros(leaf.compute_local, holder_dtype), x), leaves, holders
        )

    whole.defvjp(lambda holders: (whole(holders), None), lambda _, d_whole: (scatter(d_whole),))
    return whole


def make_scatter(leaves: dict, layout: Layout, reduce_dtype: str, holder_dtype: str) -> Callable[[dict], dict]:
    """What a fetch does backward: whole gradients -> shards summed over dp, of a spread table over its users too."""
    flat_leaves, treedef = jax.tree.flatten(leaves)

    def scatter(d_weights: dict) -> dict:
        arrays = [g.astype(reduce_dtype) for g in treedef.flatten_up_to(d_weights)]
        arrays = scatter_from_users(flat_leaves, arrays)
        summed = reduce_scatter_groups(arrays, flat_leaves, "dp", layout.parallel)
        return treedef.unflatten([x.astype(holder_dtype) for x in summed])

    return scatter
