"""ZeRO-2 and ZeRO-3 inside the differentiated function: weights fetched where they are used, gradients scattered there.

`fetch` stands between a part of the model and its parameters. Forward it gives whole weights; backward it
reduce-scatters their gradient at once, so a whole gradient never lives longer than one block.
"""

from collections.abc import Callable

import jax

from jaxdist.layout import Layout
from jaxdist.parallel.grouping import all_gather_groups, reduce_scatter_groups

Weights = dict | tuple[dict, dict]
Fetch = Callable[[Weights], dict]


def fetch_whole(weights: Weights) -> dict:
    """The fetch of ZeRO 0 and 1: parameters are whole already."""
    return weights


def make_fetch(leaves: dict, layout: Layout, reduce_dtype: str, holder_dtype: str) -> Fetch:
    """The fetch of one part of the model, whose leaves (layer dim removed) are `leaves`.

    It takes (holders, held). `held` are shards, which ZeRO-3 gathers, or the whole weights of ZeRO-2, which are used as
    they are. The holders have the shape of shards; their value is never used, and their gradient is the weights'.

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
        return scatter(d_weights), None

    fetch.defvjp(forward, backward)
    return lambda weights: fetch(*weights)


def make_scatter(leaves: dict, layout: Layout, reduce_dtype: str, holder_dtype: str) -> Callable[[dict], dict]:
    """What a fetch does backward: whole gradients -> shards summed over dp."""
    flat_leaves, treedef = jax.tree.flatten(leaves)

    def scatter(d_weights: dict) -> dict:
        arrays = [g.astype(reduce_dtype) for g in treedef.flatten_up_to(d_weights)]
        summed = reduce_scatter_groups(arrays, flat_leaves, "dp", layout.parallel)
        return treedef.unflatten([x.astype(holder_dtype) for x in summed])

    return scatter
