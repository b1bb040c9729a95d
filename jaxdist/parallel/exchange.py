"""Messages that move values from rank to rank, as `jaxdist.parallel.collectives` sums and gathers them.

n, S and "Sends" are as there.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.collectives import Axes, dim_of, live, rank, size, varying_like


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
