"""Which leaves share one collective: per parameter, all in one, or buckets of a given size."""

import math
from collections.abc import Callable, Hashable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Leaf
from jaxdist.parallel import collectives as comm


def group(
    leaves: Sequence[Leaf], sizes: Sequence[int], bucket_bytes: float, key: Callable[[Leaf], Hashable]
) -> list[list[int]]:
    """Indices of `leaves` in groups, last leaf first: backward finishes the last layers' gradients first.

    Only leaves with an equal `key` (the axes they are reduced and sharded over) share a group. A bucket closes before
    it would pass `bucket_bytes`, `sizes` being the bytes of each leaf's full buffer; a larger leaf is sent alone.
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], float]] = {}
    for index in reversed(range(len(leaves))):
        members, filled = open_groups.get(key(leaves[index]), ([], math.inf))
        if filled + sizes[index] > bucket_bytes or not members:
            members, filled = [], 0.0
            groups.append(members)
        members.append(index)
        open_groups[key(leaves[index])] = (members, filled + sizes[index])
    return groups


def sharded(leaves: Sequence[Leaf]) -> list[int]:
    """Indices of the leaves that ZeRO shards: an expert that no other rank holds is not."""
    return [i for i, leaf in enumerate(leaves) if leaf.zero_dim is not None]


def zero_groups(leaves: Sequence[Leaf], sizes: Sequence[int], bucket_bytes: float) -> list[list[int]]:
    """`group` of the leaves that ZeRO shards, whose collectives it makes; sizes: of these alone."""
    there = sharded(leaves)
    groups = group([leaves[i] for i in there], sizes, bucket_bytes, lambda leaf: leaf.group_key)
    return [[there[i] for i in members] for members in groups]


def all_reduce_groups(
    arrays: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    axes_of: Callable[[Leaf], tuple[str, ...]],
    bucket_bytes: float,
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
        for i, x in zip(members, _split(flat, [arrays[i].shape for i in members]), strict=True):
            out[i] = x
    return out


def reduce_scatter_groups(arrays: Sequence[jax.Array], leaves: Sequence[Leaf], bucket_bytes: float) -> list[jax.Array]:
    """Compute-local gradients -> this rank's summed shards, one reduce-scatter a group.

    Layout: each g in the compute layout {U_zero_axes} -> g in the storage layout; what ZeRO does not shard, as it is.
    Sends: (n-1)/n of the padded bytes. A group of several leaves is laid side by side first: one copy of that group.
    Source: ZeRO, arXiv 1910.02054, section 5.
    """
    out = list(arrays)
    padded = {i: leaves[i].pad(arrays[i]) for i in sharded(leaves)}
    for members in zero_groups(leaves, [x.nbytes for x in padded.values()], bucket_bytes):
        first = leaves[members[0]]
        if len(members) == 1:
            out[members[0]] = comm.reduce_scatter(padded[members[0]], first.zero_axes, first.zero_dim)
            continue
        rows = [_rank_major(padded[i], leaves[i]) for i in members]
        shard = comm.reduce_scatter(jnp.concatenate(rows, axis=1), first.zero_axes, 0)
        for i, x in zip(members, _split(shard[0], [leaves[i].storage_local for i in members]), strict=True):
            out[i] = x
    return out


def all_gather_groups(
    shards: Sequence[jax.Array],
    leaves: Sequence[Leaf],
    bucket_bytes: float,
    *,
    replicated: bool = False,
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
            out[members[0]] = first.unpad(gather(shards[members[0]], dim=first.zero_dim))
            continue
        flat = jnp.concatenate([shards[i].reshape(1, -1) for i in members], axis=1)
        rows = gather(flat, dim=0)
        start = 0
        for i in members:
            num = shards[i].size
            out[i] = leaves[i].unpad(_from_rank_major(rows[:, start : start + num], leaves[i]))
            start += num
    return out


def shard(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Compute-local array -> this rank's part of it, in the storage layout. Sends nothing."""
    if leaf.zero_dim is None:
        return x
    num_rows = leaf.zero_local // leaf.num_shards
    return lax.dynamic_slice_in_dim(leaf.pad(x), comm.rank(leaf.zero_axes) * num_rows, num_rows, axis=leaf.zero_dim)


def _rank_major(x: jax.Array, leaf: Leaf) -> jax.Array:
    """Padded array -> [shards, elements of one]."""
    dim = leaf.zero_dim
    split = x.reshape(*x.shape[:dim], leaf.num_shards, -1, *x.shape[dim + 1 :])
    return jnp.moveaxis(split, dim, 0).reshape(leaf.num_shards, -1)


def _from_rank_major(rows: jax.Array, leaf: Leaf) -> jax.Array:
    """Undo `_rank_major`."""
    dim, local = leaf.zero_dim, leaf.storage_local
    split = jnp.moveaxis(rows.reshape(leaf.num_shards, *local), 0, dim)
    return split.reshape(*local[:dim], -1, *local[dim + 1 :])


def _split(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    parts, start = [], 0
    for shape in shapes:
        parts.append(flat[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return parts
