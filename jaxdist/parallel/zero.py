"""ZeRO-2 and ZeRO-3 inside the differentiated function: weights unsharded where used, gradients scattered where made.

`unshard` stands between a part of the model and its parameters. Forward it gives whole weights; backward it
reduce-scatters their gradient at once, so a whole gradient never lives longer than one layer.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Layout, Leaf
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.grouping import all_gather_groups, reduce_scatter_groups
from jaxdist.parallel.spread import scatter_from_consumers


class ShardedParams(NamedTuple):
    """Parameters of one part of a model, as gradients are taken of them.

    trainable: what is differentiated: the trained parameters themselves or, under ZeRO-2 and 3, a gradient proxy of
    each: zeros of the shape in which its gradient is kept, whose value is never used. stored: where those are proxies,
    all parameters as the state holds them, whole or as shards; elsewhere the frozen ones, if there are any.
    """

    trainable: Any
    stored: Any = None


def make_unshard(
    leaves: Sequence[Leaf], layout: Layout, reduce_dtype: str, proxy_dtype: str, *, whole_proxies: bool = False
) -> Callable[[Sequence, Sequence], list]:
    """unshard(proxies, stored) -> weights, of one part of the model with these leaves (layer dim removed).

    `stored` are shards, which ZeRO-3 gathers, or the whole weights of ZeRO-2, which are used as they are. The weights'
    gradient is the proxies': shards of it, or with `whole_proxies` all of it, to be scattered later with what the
    parameters' other uses give. A frozen leaf has None for a proxy.

    Layout: w in the storage layout -> all_gather over dp and cp -> w in the compute layout, typed varying over them.
    Backward: reduce_scatter of dw, in `reduce_dtype`; the sum is kept in `proxy_dtype`.
    Sends: (n-1)/n of the part's bytes forward (nothing for ZeRO-2), again under remat, and once backward.
    Source: ZeRO, arXiv 1910.02054, section 7.2; FSDP, arXiv 2304.11277, section 3.
    """

    @jax.custom_vjp
    def unshard_all(proxies: list, stored: list) -> list:
        return all_gather_groups(stored, leaves, layout.bucket_bytes) if layout.params_sharded else stored

    def forward(proxies, stored):
        return unshard_all(proxies, stored), None

    def backward(_, grads):
        trained = [i for i, leaf in enumerate(leaves) if not leaf.param.frozen]
        made = [grads[i] for i in trained]
        if whole_proxies:
            made = [g.astype(proxy_dtype) for g in made]
        else:
            made = scatter_gradients([leaves[i] for i in trained], layout, made, reduce_dtype, proxy_dtype)
        of_leaf = dict(zip(trained, made, strict=True))
        return [of_leaf.get(i) for i in range(len(leaves))], None

    unshard_all.defvjp(forward, backward)

    def unshard(proxies: list, stored: list) -> list:
        weights = unshard_all(proxies, stored)
        return [lax.stop_gradient(w) if leaf.param.frozen else w for w, leaf in zip(weights, leaves, strict=True)]

    return unshard


def scatter_gradients(
    leaves: Sequence[Leaf], layout: Layout, grads: Sequence[jax.Array], reduce_dtype: str, dtype: str
) -> list[jax.Array]:
    """Whole gradients -> this rank's shards, summed over dp and cp, of a tied table also over the stages that use it.

    Layout: each g in the compute layout {U_zero_axes} -> g in the storage layout, in `dtype`; summed in `reduce_dtype`.
    Sends: (n-1)/n of the bytes; of a tied table as `scatter_from_consumers` too.
    """
    arrays = [g.astype(reduce_dtype) for g in grads]
    if layout.mesh.pp > 1:
        arrays = scatter_from_consumers(leaves, arrays)
    return [x.astype(dtype) for x in reduce_scatter_groups(arrays, leaves, layout.bucket_bytes)]


def shard_proxies(leaves, dtype: str):
    """Zeros in the storage layout, one for each leaf: the proxies whose gradient is scattered where it is made."""
    return jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.storage_local, dtype), (*leaf.storage_axes, *leaf.reduce_axes)), leaves
    )


def whole_proxies(leaves, dtype: str):
    """Zeros in the compute layout: proxies of parameters that are unsharded in several places (a tied table), so that
    their gradients add up before they are sent. A whole gradient lives from the loss's backward to the embedding's."""
    return jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.compute_local, dtype), (*leaf.storage_axes, *leaf.reduce_axes)), leaves
    )
