"""The gradient rule, after the micro-batch loop ("Two layouts, one rule", docs/design.md).

Sum a gradient over each token-splitting axis that its compute layout does not mention; where its storage layout
mentions that axis, reduce-scatter instead.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from jaxdist.layout import Layout, Leaf, group, split_flat
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.spread import scatter_from_consumers
from jaxdist.parallel.zero import reduce_scatter_groups


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


def all_reduce_groups(
    arrays: Sequence[jax.Array], leaves: Sequence[Leaf], axes_of: Callable[[Leaf], tuple[str, ...]], bucket_bytes: float
) -> list[jax.Array]:
    """Sum each array over its axes, one all-reduce a group.

    A group of several is laid side by side first, so at most a bucket is copied at a time; a leaf larger than a bucket
    is reduced where it is. (A variadic all-reduce would copy nothing, but under `check_vma` a psum takes one operand.)

    Layout: each x {U_axes} -> x, equal along its axes.
    Sends: 2 (n-1)/n of the arrays' bytes, in as many messages as there are groups.
    Source: gradient bucketing of arXiv 2006.15704, section 3.2.
    """
    out = list(arrays)
    owing = [i for i, leaf in enumerate(leaves) if axes_of(leaf)]
    sizes = [arrays[i].nbytes for i in owing]
    for members in group(
        [leaves[i] for i in owing], sizes, bucket_bytes, lambda leaf: (axes_of(leaf), leaf.storage_axes)
    ):
        members = [owing[i] for i in members]
        axes = axes_of(leaves[members[0]])
        if len(members) == 1:
            out[members[0]] = comm.all_reduce(arrays[members[0]], axes)
            continue
        flat = comm.all_reduce(jnp.concatenate([arrays[i].reshape(-1) for i in members]), axes)
        for i, x in zip(members, split_flat(flat, [arrays[i].shape for i in members]), strict=True):
            out[i] = x
    return out
