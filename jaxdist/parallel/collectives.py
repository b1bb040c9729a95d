"""Collectives over named mesh axes, for the body of a `jax.shard_map` with `check_vma=True`.

Every function takes local arrays (or, where it says so, pytrees of them) and drops mesh axes of size 1, so a
parallelism that is not used leaves nothing in the compiled program; outside of `shard_map` every axis has one rank.
Specs passed to `shard_map` must leave size-1 axes out too (`jaxdist.specs.drop_unit_axes`), or the types would still
call a value varying over them.

With n the product of the axis sizes and S the bytes of the *full* buffer, "Sends" counts the bytes one device puts on
the wire in a ring, the convention of arXiv 1909.09756 and of NCCL's bus bandwidth.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import jax
from jax import lax

Axes = str | Sequence[str]
Tree = TypeVar("Tree")


def type_of(x: jax.Array) -> jax.core.ShapedArray:
    """The abstract value of an array: shape, dtype, varying axes. An abstract value is its own."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def varying_axes(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which the local value `x` may differ from rank to rank, as `shard_map` has proven."""
    return frozenset(type_of(x).manual_axis_type.varying)


def _ranks(axis: str) -> int:
    """The number of ranks along one axis; 1 where no mesh is bound, which is how a model runs outside `shard_map`."""
    try:
        return lax.axis_size(axis)
    except NameError:
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise
        return 1


def live(axes: Axes) -> tuple[str, ...]:
    """The axes among `axes` that have more than one rank."""
    return tuple(axis for axis in ((axes,) if isinstance(axes, str) else axes) if _ranks(axis) > 1)


def size(axes: Axes) -> int:
    """The number of ranks along `axes`, a Python int."""
    return math.prod(map(_ranks, live(axes)))


def rank(axes: Axes) -> jax.Array | int:
    """This device's coordinate on an axis, or its number among all ranks of several, the first axis the slowest; the
    Python int 0 where there is one rank."""
    return lax.axis_index(live(axes)) if live(axes) else 0


def dim_of(x: jax.Array, dim: int) -> int:
    """A dim's number from 0, of one that may count from the end. Raises: ValueError where it is none, or empty."""
    if not -x.ndim <= dim < x.ndim or not x.shape[dim]:
        raise ValueError(f"dim {dim} of shape {x.shape}: it must be from {-x.ndim} to {x.ndim - 1}, and not empty.")
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


def _countable(x):
    return x.astype("int32") if hasattr(x, "dtype") and x.dtype == bool else x


def all_reduce(tree: Tree, axes: Axes) -> Tree:
    """Sum over `axes`, one collective a leaf. Truth values are counted, in int32.

    Layout: x[...] {U_axes} -> x[...], equal along `axes`.
    Backward: cast to varying (free).
    Sends: 2 (n-1)/n * S.
    Raises: ValueError where a leaf is already equal along one of the axes: a second sum would multiply it by n.
    """
    axes, tree = live(axes), jax.tree.map(_countable, tree)
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
    """Sum over `axis`, as `all_reduce`, and keep this rank's slice of `dim`; with None, its one of the first dim.

    Layout: x[..., D, ...] {U_axis} -> x[..., D_axis, ...]; with None, x[n, ...] {U_axis} -> x[...].
    Backward: all_gather over `axis` on `dim`.
    Sends: (n-1)/n * S.
    Raises: ValueError where `dim` does not divide by the axis, or the operand is already equal along it.
    """
    axes, x = live(axis), _countable(x)
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
