"""Collectives over named mesh axes, for the body of a `jax.shard_map` with `check_vma=True`.

Every function takes local arrays (or, where it says so, pytrees of them) and drops mesh axes of size 1, so a
parallelism that is not used leaves nothing in the compiled program. Specs passed to `shard_map` must leave size-1 axes
out too (`jaxdist.specs.drop_unit_axes`), or the types would still call a value varying over them.

With n the product of the axis sizes and S the bytes of the *full* buffer, "Sends" counts the bytes one device puts on
the wire in a ring, the convention of arXiv 1909.09756 and of NCCL's bus bandwidth.
"""

import functools
from collections.abc import Sequence
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.compat import varying_axes

Axes = str | Sequence[str]
Tree = TypeVar("Tree")


def live(axes: Axes) -> tuple[str, ...]:
    """The axes among `axes` that have more than one rank."""
    return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if lax.axis_size(axis) > 1)


def size(axes: Axes) -> int:
    """The number of ranks along `axes`, a Python int."""
    return functools.reduce(lambda total, axis: total * lax.axis_size(axis), live(axes), 1)


def rank(axes: Axes) -> jax.Array | int:
    """This device's coordinate on an axis, or its number among all ranks of several, the first axis the slowest; the
    Python int 0 where there is one rank."""
    return lax.axis_index(live(axes)) if live(axes) else 0


def dim_of(x: jax.Array, dim: int) -> int:
    """A dim's number from 0, of one that may count from the end. Raises: ValueError where there is none."""
    if not -x.ndim <= dim < x.ndim:
        raise ValueError(f"dim {dim} of shape {x.shape}: it must be from {-x.ndim} to {x.ndim - 1}.")
    return dim % x.ndim


def varying(tree: Tree, axes: Axes) -> Tree:
    """Cast every leaf to varying over `axes`. Free; the transpose is the psum that a replicated operand needs.

    Layout: x -> x, typed varying over `axes`.
    Backward: psum over the axes that were added.
    Sends: nothing forward.
    """

    def cast(x):
        missing = tuple(axis for axis in live(axes) if axis not in varying_axes(x))
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(cast, tree)


def varying_like(tree: Tree, reference: Tree) -> Tree:
    """Cast each leaf to vary over every axis its partner in `reference` varies over (scan carries need it)."""
    return jax.tree.map(lambda x, like: varying(x, sorted(varying_axes(like))), tree, reference)


def _require_owed(name: str, x, axes: tuple[str, ...]) -> None:
    equal = [axis for axis in axes if axis not in varying_axes(x)]
    if equal:
        raise ValueError(
            f"{name} over {axes}: the operand is already equal along {equal}, so summing it there would multiply it "
            "by the axis size. Drop the axis, or cast with `varying` where every rank really holds a partial sum."
        )


def all_reduce(tree: Tree, axes: Axes) -> Tree:
    """Sum over `axes`, one collective a leaf.

    Layout: x[...] {U_axes} -> x[...], equal along `axes`.
    Backward: cast to varying (free).
    Sends: 2 (n-1)/n * S.
    Raises: ValueError where a leaf is already equal along one of the axes: a second sum would multiply it by n.
    """
    axes = live(axes)
    if not axes:
        return tree
    for leaf in jax.tree.leaves(tree):
        _require_owed("all_reduce", leaf, axes)
    return lax.psum(tree, axes)


def all_reduce_max(x: jax.Array, axes: Axes) -> jax.Array:
    """Largest value over `axes`. Not differentiable: stop the gradient first.

    Sends: 2 (n-1)/n * S.
    """
    axes = live(axes)
    return lax.pmax(x, axes) if axes else x


def reduce_scatter(x: jax.Array, axis: Axes, dim: int | None) -> jax.Array:
    """Sum over `axis` and keep this rank's slice of `dim`; with None, its one of the first dim.

    Layout: x[..., D, ...] {U_axis} -> x[..., D_axis, ...]; with None, x[n, ...] {U_axis} -> x[...].
    Backward: all_gather over `axis` on `dim`.
    Sends: (n-1)/n * S.
    Raises: ValueError where `dim` does not divide by the axis, or the operand is already equal along it.
    """
    axes = live(axis)
    if not axes:
        return x[0] if dim is None else x
    _require_owed("reduce_scatter", x, axes)
    if dim is None:
        return lax.psum_scatter(x, axes)
    dim = dim_of(x, dim)
    if x.shape[dim] % size(axis):
        raise ValueError(
            f"reduce_scatter over {axis}={size(axis)}: dim {dim} of shape {x.shape} does not divide. "
            f"Pad it to {-(-x.shape[dim] // size(axis)) * size(axis)}."
        )
    return lax.psum_scatter(x, axes, scatter_dimension=dim, tiled=True)


def all_gather(x: jax.Array, axis: Axes, dim: int | None, *, replicated: bool = False) -> jax.Array:
    """Concatenate every rank's slice of `dim`; with None, stack all ranks' arrays in front.

    Layout: x[..., D_axis, ...] -> x[..., D, ...]; with None, x[...] -> x[n, ...]; still typed varying, unless
    `replicated` asks for a value that may leave `shard_map` through a spec without the axis.
    Backward: reduce_scatter over `axis` on `dim`; with `replicated`, this rank's slice (free).
    Sends: (n-1)/n * S.
    """
    axes = live(axis)
    if not axes:
        return x[None] if dim is None else x
    to = "invarying" if replicated else "varying"
    return lax.all_gather(x, axes, axis=0 if dim is None else dim_of(x, dim), tiled=dim is not None, to=to)


def all_to_all(
    x: jax.Array, axis: Axes, split_dim: int, concat_dim: int, groups: Sequence[Sequence[int]] | None = None
) -> jax.Array:
    """Exchange: slice r of `split_dim` goes to rank r, which concatenates what it receives on `concat_dim`.

    Layout: x[..., A, B_axis, ...] -> x[..., A_axis, B, ...] for split_dim A and concat_dim B.
    Backward: all_to_all with the two dims swapped.
    Sends: (n-1)/n of the local bytes.
    groups: of equally many ranks, each rank in one; the exchange is inside each, and n its number of ranks.
    """
    axes = live(axis)
    if not axes:
        return x
    split_dim, concat_dim = dim_of(x, split_dim), dim_of(x, concat_dim)
    n = size(axis) if groups is None else len(groups[0])
    if x.shape[split_dim] % n:
        raise ValueError(
            f"all_to_all among {n} ranks of {axis}: dim {split_dim} of shape {x.shape} does not divide. "
            f"Pad it to {-(-x.shape[split_dim] // n) * n}."
        )
    name = axes if len(axes) > 1 else axes[0]
    return lax.all_to_all(x, name, split_axis=split_dim, concat_axis=concat_dim, axis_index_groups=groups, tiled=True)


def swap(x: jax.Array, axis: str, pairs: Sequence[tuple[int, int]]) -> jax.Array:
    """The partner's value, for pairs in which every rank of `axis` is once.

    What a permute does in which ranks send to each other, as a collective of two ranks that meet in no other: a stage
    of a pipeline may run it alone, where XLA:CPU has all devices of the mesh join a permute.
    Layout: x on rank a -> x on rank b, and back, for each pair (a, b).
    Backward: the same swap.
    Sends: the local bytes, once.
    """
    if not live(axis):
        return x
    both = all_to_all(jnp.stack([x, x]), axis, 0, 0, pairs)
    second = jnp.zeros(size(axis), bool).at[jnp.array([b for _, b in pairs])].set(True)[rank(axis)]
    return jnp.where(second, both[0], both[1])


def permute(x: jax.Array, axis: str, shift: int = 1, senders: Sequence[int] | None = None) -> jax.Array:
    """Send to the rank `shift` places further along `axis`, cyclically; of `senders` alone, where they are given.

    Layout: x on rank r -> x on rank (r + shift) mod n; 0 on a rank to which nobody sends.
    Backward: permute by -shift, back to the senders.
    Sends: the local bytes, once, on each sender.
    """
    if not live(axis):
        return x
    n = size(axis)
    return lax.ppermute(
        x, axis, [(source, (source + shift) % n) for source in (range(n) if senders is None else senders)]
    )


def gather_to(x: jax.Array, axis: str, dim: int, ranks: Sequence[int]) -> jax.Array:
    """Concatenate every rank's slice of `dim`, on `ranks` alone: n-1 messages, each to one rank.

    Layout: x[..., D_axis, ...] -> x[..., D, ...] on `ranks`; on others their own slice among zeros.
    Backward: scatter_from the same ranks.
    Sends: the local bytes to each of `ranks` but itself; an all_gather sends them n-1 times.
    """
    if not live(axis):
        return x
    dim = dim_of(x, dim)
    n, length = size(axis), x.shape[dim]
    whole = jnp.zeros((*x.shape[:dim], n * length, *x.shape[dim + 1 :]), x.dtype)

    def put(whole, part, owner):
        return lax.dynamic_update_slice_in_dim(whole, part, owner * length, dim)

    whole = put(varying_like(whole, x), x, rank(axis))
    for step in range(1, n):
        part = lax.ppermute(x, axis, [((receiver + step) % n, receiver) for receiver in ranks])
        whole = put(whole, part, (rank(axis) + step) % n)
    return whole


def scatter_from(x: jax.Array, axis: str, dim: int, ranks: Sequence[int]) -> jax.Array:
    """Sum what `ranks` have and give every rank its slice of `dim`: n-1 messages, each from one rank.

    Layout: x[..., D, ...] {U_ranks} -> x[..., D_axis, ...]. What another rank has counts in its own slice alone: it
    should be 0.
    Backward: gather_to the same ranks.
    Sends: (n-1)/n * S on each of `ranks`, as a reduce_scatter does; nothing on others.
    Raises: ValueError where `dim` does not divide by the axis.
    """
    if not live(axis):
        return x
    n, dim = size(axis), dim_of(x, dim)
    if x.shape[dim] % n:
        raise ValueError(f"scatter_from over {axis}={n}: dim {dim} of shape {x.shape} does not divide.")
    length = x.shape[dim] // n

    def part_of(owner):
        return lax.dynamic_slice_in_dim(x, owner * length, length, dim)

    total = part_of(rank(axis))
    for step in range(1, n):
        sent = part_of((rank(axis) + step) % n)
        total = total + lax.ppermute(sent, axis, [(sender, (sender + step) % n) for sender in ranks])
    return total


def broadcast(x: jax.Array, axis: str, root: int = 0) -> jax.Array:
    """Every rank gets rank `root`'s value: a masked sum, whose result is typed equal along `axis`.

    Layout: x on every rank -> x of `root`, equal along `axis`.
    Backward: the cotangent reaches `root` alone.
    Sends: 2 (n-1)/n * S (it is an all-reduce; the mask keeps a NaN of another rank out).
    Raises: ValueError where `root` is not a rank of the axis.
    """
    if not 0 <= root < lax.axis_size(axis):
        raise ValueError(f"broadcast from rank {root}: {axis} has ranks 0 to {lax.axis_size(axis) - 1}.")
    if not live(axis):
        return x
    masked = jnp.where(rank(axis) == root, x, jnp.zeros_like(x))
    if masked.dtype == bool:  # a sum of which would be whole numbers
        return lax.psum(masked.astype(jnp.uint8), axis).astype(bool)
    return lax.psum(masked, axis)
