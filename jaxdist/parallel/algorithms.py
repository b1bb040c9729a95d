"""The collective algorithms spelled out in `lax.ppermute`: what a native collective does underneath, step by step.

To read, count and time, inside the body of a `jax.shard_map` with `check_vma=True`; training uses
`jaxdist.parallel.collectives`. One `ppermute` is one step, in which a rank sends at most one message and receives at
most one; `jaxdist.plan.collective_cost` holds the closed forms and the tests compare the two.

Every function takes a local array, casts it to varying over `axis` where it is not (so a value equal along the axis
counts once per rank), and returns x itself on an axis of size 1. The all-gather and the all-reduces give every rank the
same bits, but `shard_map` cannot prove that of a chain of permutes: their result is typed varying. Let it leave through
an out_spec that mentions the axis, or use the native collective. Backward is JAX's own transpose, a ppermute becoming
the one with source and destination swapped: it takes as many steps as forward and moves the same bytes.

In "Sends", n is the axis size and S the bytes of the full buffer: the input of a reduce-scatter, the output of an
all-gather, either side of an all-reduce. Where n does not divide the size, the padding is sent too.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.collectives import permute, rank, size, varying


def ring_reduce_scatter(x: jax.Array, axis: str, dim: int = 0) -> jax.Array:
    """Sum over `axis` and keep this rank's shard of `dim`: partial sums pass once around a ring.

    Layout: x[..., D, ...] {U_axis} -> x[..., D_axis, ...].
    Backward: the ring all-gather, in the other direction.
    Sends: (n-1)/n * S, in n-1 steps of S/n.
    Raises: ValueError where `dim` does not divide by the axis.
    Source: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".
    """
    n, length = size(axis), x.shape[dim]
    if length % n:
        raise ValueError(
            f"ring_reduce_scatter over {axis}={n}: dim {dim} of shape {x.shape} is {length} long, and every rank keeps "
            f"1/{n} of it. Pad it to {-(-length // n) * n}."
        )
    if n == 1:
        return x
    x, me = varying(x, axis), rank(axis)

    def shard(owner):
        return lax.dynamic_slice_in_dim(x, owner % n * (length // n), length // n, dim)

    # The sum of shard c sets out from rank c + 1, so that the last rank to add to it is its owner.
    partial_sum = shard(me - 1)
    for step in range(1, n):
        partial_sum = permute(partial_sum, axis) + shard(me - 1 - step)
    return partial_sum


def ring_all_gather(x: jax.Array, axis: str, dim: int = 0) -> jax.Array:
    """Concatenate every rank's shard of `dim`: each rank passes on what it received last.

    Layout: x[..., D_axis, ...] -> x[..., D, ...], typed varying.
    Backward: the ring reduce-scatter, in the other direction.
    Sends: (n-1)/n * S, in n-1 steps of S/n, the bytes of one shard.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH".
    """
    n = size(axis)
    if n == 1:
        return x
    shards = [varying(x, axis)]
    for _ in range(n - 1):
        shards.append(permute(shards[-1], axis))
    # They arrived from ranks me, me - 1, ...: read backwards they ascend from rank me + 1, and the roll puts 0 first.
    return jnp.roll(jnp.concatenate(shards[::-1], dim), (rank(axis) + 1) * x.shape[dim], dim)


def ring_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sum over `axis`: a ring reduce-scatter, then a ring all-gather. Summing on the devices, none sends fewer bytes.

    Layout: x[...] {U_axis} -> x[...], typed varying. Any shape: flattened, and padded to a multiple of n.
    Backward: the same sum of the cotangents, in the other direction.
    Sends: 2 (n-1)/n * S, in 2 (n-1) steps of S/n.
    Source: Patarasuk & Yuan 2009, which proves the bound.
    """
    n = size(axis)
    if n == 1:
        return x
    shard = ring_reduce_scatter(_flat(x, n), axis)
    return ring_all_gather(shard, axis)[: x.size].reshape(x.shape)


def halving_doubling_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sum over `axis`: recursive-halving reduce-scatter, then recursive-doubling all-gather.

    The ring's bytes in fewer steps; its first and last messages are S/2 and cross the whole machine.

    Layout: x[...] {U_axis} -> x[...], typed varying. Any shape: flattened, and padded to a multiple of n.
    Backward: the same sum of the cotangents (the pairs swap, so each permute is its own transpose).
    Sends: 2 (n-1)/n * S, in 2 log2(n) steps of S/2, S/4, ..., S/n and back.
    Raises: ValueError where the axis size is not a power of two.
    Source: Thakur, Rabenseifner & Gropp 2005 (Rabenseifner's algorithm), without its extra steps for other sizes.
    """
    n = size(axis)
    if n & (n - 1):
        raise ValueError(
            f"halving_doubling_all_reduce over {axis}={n}: each step splits the ranks into pairs and halves what they "
            f"hold, so the axis size must be a power of two. Use {1 << (n.bit_length() - 1)} or {1 << n.bit_length()} "
            "ranks, or ring_all_reduce."
        )
    if n == 1:
        return x
    me = rank(axis)
    distances = [1 << k for k in range(n.bit_length() - 1)]

    def swap(message, distance):
        return lax.ppermute(message, axis, [(source, source ^ distance) for source in range(n)])

    part = _flat(varying(x, axis), n)
    for distance in reversed(distances):
        halves, mine = part.reshape(2, -1), me // distance % 2
        keep, give = (lax.dynamic_index_in_dim(halves, half, keepdims=False) for half in (mine, 1 - mine))
        part = keep + swap(give, distance)
    for distance in distances:
        other = swap(part, distance)
        upper = me // distance % 2 == 1
        part = jnp.where(upper, jnp.concatenate([other, part]), jnp.concatenate([part, other]))
    return part[: x.size].reshape(x.shape)


def tree_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sum over `axis`: up a binomial tree to rank 0, then down the same tree. For messages too small to cut.

    Layout: x[...] {U_axis} -> x[...], typed varying.
    Backward: the same sum of the cotangents: down is the transpose of up.
    Sends: at most ceil(log2 n) * S (rank 0; a leaf of the tree S), in 2 ceil(log2 n) steps of S, one after the other.
    Source: Thakur, Rabenseifner & Gropp 2005, the trees for short messages; not pipelined, unlike NCCL's, whose 2S
        does not grow with n.
    """
    n = size(axis)
    if n == 1:
        return x
    x, me = varying(x, axis), rank(axis)
    distances = [1 << k for k in range((n - 1).bit_length())]
    for distance in distances:
        # A rank that no pair names receives zeros, which its sum ignores.
        up = [(parent + distance, parent) for parent in range(0, n - distance, 2 * distance)]
        x = x + lax.ppermute(x, axis, up)
    for distance in reversed(distances):
        down = [(parent, parent + distance) for parent in range(0, n - distance, 2 * distance)]
        x = jnp.where(me % (2 * distance) == distance, lax.ppermute(x, axis, down), x)
    return x


def central_all_reduce(x: jax.Array, axis: str) -> jax.Array:
    """Sum over `axis` at a parameter server: every rank sends to rank 0 in turn, which sends the sum back in turn.

    To teach: every message crosses rank 0's link, which is why nobody trains this way.

    Layout: x[...] {U_axis} -> x[...], typed varying.
    Backward: the same sum of the cotangents, through rank 0 again.
    Sends: (n-1) * S for rank 0, which receives as much, and S for each other rank; in 2 (n-1) steps of S.
    Source: Li et al. 2014, "Scaling Distributed Machine Learning with the Parameter Server", with one server.
    """
    n = size(axis)
    if n == 1:
        return x
    x, me = varying(x, axis), rank(axis)
    total = x
    for worker in range(1, n):
        total = total + lax.ppermute(x, axis, [(worker, 0)])
    result = total
    for worker in range(1, n):
        result = jnp.where(me == worker, lax.ppermute(total, axis, [(0, worker)]), result)
    return result


def _flat(x: jax.Array, n: int) -> jax.Array:
    """One dim, with zeros at the end up to a multiple of n."""
    return jnp.pad(x.reshape(-1), (0, -x.size % n))
