"""The gradient rule, after the micro-batch loop ("Two layouts, one rule", docs/design.md).

Sum a gradient over each token-splitting axis that its compute layout does not mention; where its storage layout
mentions that axis, reduce-scatter instead.
"""

import jax

from jaxdist.layout import Layout
from jaxdist.parallel.grouping import all_gather_groups, all_reduce_groups, reduce_scatter_groups
from jaxdist.parallel.spread import scatter_from_consumers


@jax.named_scope("reduce_gradients")
def reduce_gradients(grads: dict, layout: Layout, dtype: str) -> dict:
    """Local gradient sums -> gradients in the layout the optimiser holds, summed in `dtype`.

    Layout: each g in the compute layout {U_reduce_axes}, a spread table's whole on its consumer stages (for ZeRO-2 and
    3 already in the storage layout and summed over its axes) -> g in the storage layout. Sends: of a spread table as
    `scatter_from_consumers`. Then DP 2 (n-1)/n, ZeRO-1 (n-1)/n of the gradient bytes; over `replica`, 2 (n-1)/n of the
    shard's bytes. Source: ZeRO, arXiv 1910.02054; hybrid sharding: arXiv 2304.11277, section 3.2.2.
    """
    leaves, treedef = jax.tree.flatten(layout.leaves)
    given = treedef.flatten_up_to(grads)
    arrays = [
        g.astype(dtype) if leaf.reduce_axes or leaf.consumer_stages else g
        for g, leaf in zip(given, leaves, strict=True)
    ]
    if layout.mesh.pp > 1 and not layout.grads_sharded:
        arrays = scatter_from_consumers(leaves, arrays)
    if layout.sharded and not layout.grads_sharded:
        arrays = reduce_scatter_groups(arrays, leaves, layout.bucket_bytes)
    arrays = all_reduce_groups(arrays, leaves, lambda leaf: leaf.shard_reduce_axes, layout.bucket_bytes)
    return treedef.unflatten([x.astype(g.dtype) for x, g in zip(arrays, given, strict=True)])


@jax.named_scope("gather_parameters")
def gather_parameters(shards: dict, layout: Layout) -> dict:
    """Updated shards -> whole parameters for the next step (ZeRO-1 and 2).

    Layout: each w in the storage layout -> w in the compute layout, equal along the axes of ZeRO.
    Sends: (n-1)/n of the parameter bytes.
    """
    leaves, treedef = jax.tree.flatten(layout.leaves)
    whole = all_gather_groups(treedef.flatten_up_to(shards), leaves, layout.bucket_bytes, replicated=True)
    return treedef.unflatten(whole)
