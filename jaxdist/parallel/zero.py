"""ZeRO: what is gathered and scattered where states, gradients or parameters are sharded over dp and cp.

ZeRO-1 does both after backward. ZeRO-2 and 3 do it inside the differentiated function: `unshard` stands between a part
of the model and its parameters. Forward it gives whole weights; backward it reduce-scatters their gradient at once, so
a whole gradient never lives longer than one layer. What is differentiated is then a gradient proxy of each parameter:
zeros of the shape in which its gradient is kept, whose value is never used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Layout, Leaf, ShardedParams, drop_frozen, fill, group, keep_frozen, split_flat, split_outer
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.remat import mark_saveable
from jaxdist.parallel.spread import scatter_from_consumers


@dataclass(frozen=True)
class Sharded:
    """Parameters under ZeRO-2 and 3, as `jaxdist.train.gradients.base.Replicated` has those of other runs.

    gathers_twice: whether ZeRO-3 gathers what is outside the layers for the embedding and again for the loss. A
    pipeline, and a run that keeps weights after forward, gather it once. keeps_vectors: whether backward keeps a
    layer's vectors and gathers its matrices alone again.
    """

    layout: Layout
    layer_leaves: dict
    reduce_dtype: str
    sum_dtype: str
    gathers_twice: bool
    keeps_vectors: bool

    def hold_outer(self, params: dict) -> ShardedParams:
        """The parameters outside the layers, as they are differentiated: whole, or a whole proxy of what is gathered
        later."""
        leaves, outer = split_outer(self.layout.leaves)[0], split_outer(params)[0]
        if self.gathers_twice:
            return ShardedParams(whole_proxies(drop_frozen(leaves, leaves), self.sum_dtype), outer)
        if self.layout.params_sharded:
            flat, treedef = jax.tree.flatten(leaves)
            outer = treedef.unflatten(all_gather_groups(treedef.flatten_up_to(outer), flat, self.layout.bucket_bytes))
        return ShardedParams(drop_frozen(leaves, outer), keep_frozen(leaves, outer))

    def hold_layers(self, params: dict) -> ShardedParams:
        """All layers, stacked, as they are differentiated: a proxy of each gradient's shard."""
        leaves, layers = split_outer(self.layout.leaves)[1], split_outer(params)[1]
        return ShardedParams(shard_proxies(drop_frozen(leaves, leaves), self.sum_dtype), layers)

    def outer_sums(self, params: dict) -> dict:
        """Arrays like the sums of gradients outside the layers."""
        return shard_proxies(split_outer(self.layout.trained.leaves)[0], self.sum_dtype)

    def unshard_outer(self, outer: ShardedParams, user: str) -> dict:
        """Whole parameters of those outside the layers that `user`, "embed" or "loss", uses."""
        if not self.gathers_twice:
            return fill(*outer)
        leaves, treedef = jax.tree.flatten(split_outer(self.layout.leaves)[0])
        used = [i for i, leaf in enumerate(leaves) if user in leaf.used_in]
        proxies, weights = (treedef.flatten_up_to(tree) for tree in outer)
        unshard = self.make_unshard([leaves[i] for i in used], whole_proxies=True)
        for i, whole in zip(used, unshard([proxies[i] for i in used], [weights[i] for i in used]), strict=True):
            weights[i] = whole
        return treedef.unflatten(weights)

    def unshard_layer(self, params: ShardedParams) -> dict:
        """Whole parameters of one layer."""
        leaves, treedef = jax.tree.flatten(self.layer_leaves)
        trees = (None if tree is None else treedef.flatten_up_to(tree) for tree in params)
        weights = self.make_unshard(leaves)(*trees)
        if self.keeps_vectors:
            # Matrices are worth a second message; vectors are kept.
            weights = [mark_saveable(w) if leaf.small else w for leaf, w in zip(leaves, weights, strict=True)]
        return treedef.unflatten(weights)

    def scatter(self, leaves: dict, grads: dict) -> dict:
        """Local gradients -> the shards of their sum over dp and cp, in the dtype of sums."""
        flat, treedef = jax.tree.flatten(leaves)
        return treedef.unflatten(self.scatter_gradients(flat, treedef.flatten_up_to(grads)))

    def make_unshard(self, leaves: Sequence[Leaf], whole_proxies: bool = False) -> Callable[[list, list], list]:
        """unshard(proxies, stored) -> weights, of one part of the model with these leaves (layer dim removed).

        `stored` are shards, which ZeRO-3 gathers, or the whole weights of ZeRO-2, which are used as they are. The
        weights' gradient is the proxies': shards of it, or with `whole_proxies` all of it, to be scattered later with
        what the parameters' other uses give. A frozen leaf has None for a proxy.

        Layout: w in the storage layout -> all_gather over dp and cp -> w in the compute layout, typed varying over
        them.
        Backward: reduce_scatter of dw, in `reduce_dtype`; the sum is kept in `sum_dtype`.
        Sends: (n-1)/n of the part's bytes forward (nothing for ZeRO-2), again under remat, and once backward.
        Source: ZeRO, arXiv 1910.02054, section 7.2; FSDP, arXiv 2304.11277, section 3.
        """
        layout = self.layout

        @jax.custom_vjp
        def unshard_all(proxies: list, stored: list) -> list:
            return all_gather_groups(stored, leaves, layout.bucket_bytes) if layout.params_sharded else stored

        def forward(proxies, stored):
            return unshard_all(proxies, stored), None

        def backward(_, grads):
            trained = [i for i, leaf in enumerate(leaves) if not leaf.param.frozen]
            made = [grads[i] for i in trained]
            if whole_proxies:
                made = [g.astype(self.sum_dtype) for g in made]
            else:
                made = self.scatter_gradients([leaves[i] for i in trained], made)
            of_leaf = dict(zip(trained, made, strict=True))
            return [of_leaf.get(i) for i in range(len(leaves))], None

        unshard_all.defvjp(forward, backward)

        def unshard(proxies: list, stored: list) -> list:
            weights = unshard_all(proxies, stored)
            return [lax.stop_gradient(w) if leaf.param.frozen else w for w, leaf in zip(weights, leaves, strict=True)]

        return unshard

    def scatter_gradients(self, leaves: Sequence[Leaf], grads: Sequence[jax.Array]) -> list[jax.Array]:
        """Whole gradients -> this rank's shards, summed over dp and cp, of a tied table also over the stages that use
        it.

        Layout: each g in the compute layout {U_zero_axes} -> g in the storage layout, in `sum_dtype`; summed in
        `reduce_dtype`.
        Sends: (n-1)/n of the bytes; of a tied table as `scatter_from_consumers` too.
        """
        arrays = [g.astype(self.reduce_dtype) for g in grads]
        if self.layout.mesh.pp > 1:
            arrays = scatter_from_consumers(leaves, arrays)
        return [x.astype(self.sum_dtype) for x in reduce_scatter_groups(arrays, leaves, self.layout.bucket_bytes)]


def shard_proxies(leaves: dict, dtype: str) -> dict:
    """Zeros in the storage layout, one for each leaf: the proxies whose gradient is scattered where it is made."""
    return jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.storage_local, dtype), (*leaf.storage_axes, *leaf.reduce_axes)), leaves
    )


def whole_proxies(leaves: dict, dtype: str) -> dict:
    """Zeros in the compute layout: proxies of parameters that are unsharded in several places (a tied table), so that
    their gradients add up before they are sent. A whole gradient lives from the loss's backward to the embedding's."""
    return jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.compute_local, dtype), (*leaf.storage_axes, *leaf.reduce_axes)), leaves
    )


@jax.named_scope("gather_parameters")
def gather_parameters(shards: dict, layout: Layout) -> dict:
    """Updated shards -> whole parameters for the next step (ZeRO-1 and 2).

    Layout: each w in the storage layout -> w in the compute layout, equal along the axes of ZeRO.
    Sends: (n-1)/n of the parameter bytes.
    """
    leaves, treedef = jax.tree.flatten(layout.leaves)
    whole = all_gather_groups(treedef.flatten_up_to(shards), leaves, layout.bucket_bytes, replicated=True)
    return treedef.unflatten(whole)


def owned_shards(params: dict, layout: Layout) -> dict:
    """The part of whole parameters whose update this rank computes (ZeRO-1 and 2). Sends nothing."""
    return jax.tree.map(lambda leaf, p: shard(p, leaf), layout.leaves, params)


# Shards, and their collectives.


def sharded(leaves: Sequence[Leaf]) -> list[int]:
    """Indices of the leaves that ZeRO shards: an expert that no other rank holds is not."""
    return [i for i, leaf in enumerate(leaves) if leaf.zero_dim is not None]


def zero_groups(leaves: Sequence[Leaf], sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """`group` of the leaves that ZeRO shards, whose collectives it makes; sizes: of these alone."""
    there = sharded(leaves)
    groups = group([leaves[i] for i in there], sizes, bucket_bytes, lambda leaf: leaf.group_key)
    return [[there[i] for i in members] for members in groups]


def reduce_scatter_groups(arrays: Sequence[jax.Array], leaves: Sequence[Leaf], bucket_bytes: float) -> list[jax.Array]:
    """Compute-local gradients -> this rank's summed shards, one reduce-scatter a group.

    Layout: each g in the compute layout {U_zero_axes} -> g in the storage layout; what ZeRO does not shard, as it is.
    Sends: (n-1)/n of the padded bytes. A group of several leaves is laid side by side first: one copy of that group.
    Source: ZeRO, arXiv 1910.02054, section 5.
    """
    out = list(arrays)
    padded = {i: pad(arrays[i], leaves[i]) for i in sharded(leaves)}
    for members in zero_groups(leaves, [x.nbytes for x in padded.values()], bucket_bytes):
        first = leaves[members[0]]
        if len(members) == 1:
            out[members[0]] = comm.reduce_scatter(padded[members[0]], first.zero_axes, first.zero_dim)
            continue
        rows = [_rank_major(padded[i], leaves[i]) for i in members]
        shard = comm.reduce_scatter(jnp.concatenate(rows, axis=1), first.zero_axes, 0)
        for i, x in zip(members, split_flat(shard[0], [leaves[i].storage_local for i in members]), strict=True):
            out[i] = x
    return out


def all_gather_groups(
    shards: Sequence[jax.Array], leaves: Sequence[Leaf], bucket_bytes: float, *, replicated: bool = False
) -> list[jax.Array]:
    """Shards in the storage layout -> whole compute-local arrays, one all-gather a group.

    Layout: each w in the storage layout -> w in the compute layout; typed equal along their axes with `replicated`.
    Sends: (n-1)/n of the padded bytes.
    """
    out = list(shards)
    sizes = [shards[i].nbytes * leaves[i].num_shards for i in sharded(leaves)]
    for members in zero_groups(leaves, sizes, bucket_bytes):
        first = leaves[members[0]]
        gather = partial(comm.all_gather, axis=first.zero_axes, replicated=replicated)
        if len(members) == 1:
            out[members[0]] = unpad(gather(shards[members[0]], dim=first.zero_dim), first)
            continue
        flat = jnp.concatenate([shards[i].reshape(1, -1) for i in members], axis=1)
        rows = gather(flat, dim=0)
        start = 0
        for i in members:
            num = shards[i].size
            out[i] = unpad(_from_rank_major(rows[:, start : start + num], leaves[i]), leaves[i])
            start += num
    return out


def shard(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Compute-local array -> this rank's part of it, in the storage layout. Sends nothing."""
    if leaf.zero_dim is None:
        return x
    num_rows = leaf.zero_local // leaf.num_shards
    return lax.dynamic_slice_in_dim(pad(x, leaf), comm.rank(leaf.zero_axes) * num_rows, num_rows, axis=leaf.zero_dim)


def pad(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Compute-local array -> the same with `zero_dim` zero-padded to a multiple of `num_shards`."""
    extra = leaf.zero_local - x.shape[leaf.zero_dim]
    return jnp.pad(x, [(0, extra if d == leaf.zero_dim else 0) for d in range(x.ndim)]) if extra else x


def unpad(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Undo `pad`."""
    dim = _sharded_dim(leaf)
    return lax.slice_in_dim(x, 0, leaf.compute_local[dim], axis=dim)


def _sharded_dim(leaf: Leaf) -> int:
    assert leaf.zero_dim is not None
    return leaf.zero_dim


def _rank_major(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Padded array -> [shards, elements of one]."""
    dim = _sharded_dim(leaf)
    split = x.reshape(*x.shape[:dim], leaf.num_shards, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0).reshape(leaf.num_shards, -1)


def _from_rank_major(rows: jax.Array, leaf: Leaf) -> jax.Array:
    """Undo `_rank_major`."""
    dim, local = _sharded_dim(leaf), leaf.storage_local
    split = jnp.moveaxis(rows.reshape(leaf.num_shards, *local), 0, dim)
    return split.reshape(*local[:dim], -1, *local[dim + 1 :])
