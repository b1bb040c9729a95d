"""Exchanges between ranks and broadcasts, beside the sums, gathers and permutes of `jaxdist.parallel.collectives`.

n, S and "Sends" are as there.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.collectives import Axes, dim_of, live, rank, size


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


def broadcast(x: jax.Array, axis: str, root: int = 0) -> jax.Array:
    """Every rank gets rank `root`'s value: a masked sum, whose result is typed equal along `axis`.

    Layout: x on every rank -> x of `root`, equal along `axis`.
    Backward: the cotangent reaches `root` alone.
    Sends: 2 (n-1)/n * S (it is an all-reduce; the mask keeps a NaN of another rank out).
    Raises: ValueError where `root` is not a rank of the axis.
    """
    if not 0 <= root < size(axis):
        raise ValueError(f"broadcast from rank {root}: {axis} has ranks 0 to {size(axis) - 1}.")
    if not live(axis):
        return x
    masked = jnp.where(rank(axis) == root, x, jnp.zeros_like(x))
    if masked.dtype == bool:  # a sum of which would be whole numbers
        return lax.psum(masked.astype(jnp.uint8), axis).astype(bool)
    return lax.psum(masked, axis)
