"""Collective matmuls: an all-gather and the matmul after it, or a matmul and its reduce-scatter, as one ring.

While one chunk of the sequence is sent to a neighbour, the matmul of another runs: nothing waits for a whole
collective. The two functions are each other's transposes, so forward and backward are the same two rings.

Dims: B batch, T sequence (split over the axis outside), D width outside, F width inside (split over the axis).
"one-way" sends to the next rank in n-1 steps; "two-way" to both neighbours at once in n/2 steps, whole chunks. Both
send the bytes of the collective they stand for.

An `optimization_barrier` ends each step. Without it XLA merges the matmuls, which share an operand, into one that waits
for the last chunk, or moves all chunks first (both seen in programs compiled for H200).
Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models"; the loops are unrolled here.
"""

from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import varying_axes

Ring = Literal["one-way", "two-way"]


def gather_matmul(x_BTD: jax.Array, w_DF: jax.Array, ring: Ring = "one-way", axis: str = "tp") -> jax.Array:
    """all_gather(x) @ w: every chunk is multiplied as it arrives, while it is passed on.

    Layout: x[B, T_tp, D], w[D, F_tp] -> y[B, T, F_tp].
    Backward: dx = matmul_scatter(dy, w.T), a ring of its own; dw is one matmul with the gathered x, which forward keeps
    (as an all-gather's backward does), so that x is not sent again. Under remat the forward ring runs again.
    Sends: (n-1)/n * B*T*D * itemsize bytes a device forward, and as many backward, in n-1 messages each.
    """
    return _gather_matmul(*_vary_alike(x_BTD, w_DF, axis), ring, axis)


def matmul_scatter(y_BTF: jax.Array, w_FD: jax.Array, ring: Ring = "one-way", axis: str = "tp") -> jax.Array:
    """reduce_scatter(y @ w): a chunk's sum is passed on to its owner; every rank on the way adds its share.

    The sum that is passed on is of the activations' dtype and is rounded at every rank, in ring order, as a
    reduce-scatter's is in an order of its own: the two agree to rounding, not to the bit.

    Layout: y[B, T, F_tp], w[F_tp, D] -> {U_tp} -> x[B, T_tp, D].
    Backward: dy = gather_matmul(dx, w.T); dw is one matmul of y with the dx that this ring gathers.
    Sends: (n-1)/n * B*T*D * itemsize bytes a device forward, and as many backward, in n-1 messages each.
    Raises: ValueError where T does not divide by the axis.
    """
    n, length = comm.size(axis), y_BTF.shape[1]
    if length % n:
        raise ValueError(
            f"matmul_scatter over {axis}={n}: each rank keeps 1/{n} of the sequence, and it is {length} long. "
            f"Pad it to {-(-length // n) * n}."
        )
    return _matmul_scatter(*_vary_alike(y_BTF, w_FD, axis), ring, axis)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _gather_matmul(x_BTD, w_DF, ring, axis):
    return _gather_ring(x_BTD, w_DF, ring, axis)[0]


def _gather_matmul_forward(x_BTD, w_DF, ring, axis):
    y_BTF, gathered_BTD = _gather_ring(x_BTD, w_DF, ring, axis)
    return y_BTF, (gathered_BTD, w_DF)


def _gather_matmul_backward(ring, axis, kept, dy_BTF):
    gathered_BTD, w_DF = kept
    dx_BTD, dw_DF = _scatter_ring(dy_BTF, w_DF.T, ring, axis), _weight_gradient(gathered_BTD, dy_BTF)
    return dx_BTD.astype(gathered_BTD.dtype), dw_DF.astype(w_DF.dtype)


_gather_matmul.defvjp(_gather_matmul_forward, _gather_matmul_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _matmul_scatter(y_BTF, w_FD, ring, axis):
    return _scatter_ring(y_BTF, w_FD, ring, axis)


def _matmul_scatter_forward(y_BTF, w_FD, ring, axis):
    return _scatter_ring(y_BTF, w_FD, ring, axis), (y_BTF, w_FD)


def _matmul_scatter_backward(ring, axis, kept, dx_BTD):
    y_BTF, w_FD = kept
    dy_BTF, gathered_BTD = _gather_ring(dx_BTD, w_FD.T, ring, axis)
    return dy_BTF.astype(y_BTF.dtype), _weight_gradient(y_BTF, gathered_BTD).astype(w_FD.dtype)


_matmul_scatter.defvjp(_matmul_scatter_forward, _matmul_scatter_backward)


def _gather_ring(x_BTD, w_DF, ring, axis) -> tuple[jax.Array, jax.Array]:
    """(all_gather(x) @ w, all_gather(x))."""
    n, me, chunk, arms = comm.size(axis), comm.rank(axis), x_BTD.shape[1], _arms(axis, ring)
    axes = sorted(varying_axes(x_BTD))
    y_BTF, gathered_BTD = (
        comm.varying(jnp.zeros((x_BTD.shape[0], n * chunk, width), dtype), axes)
        for width, dtype in zip(w_DF.shape[::-1], (jnp.result_type(x_BTD, w_DF), x_BTD.dtype), strict=True)
    )

    def place(whole, part, distance):
        return lax.dynamic_update_slice_in_dim(whole, part, _owner(me, distance, n) * chunk, 1)

    here, step = {0: x_BTD}, 0  # chunks by the distance of the rank they came from
    while here:
        coming = {
            -shift * (step + 1): comm.permute(here[-shift * step], axis, shift)
            for shift, hops in arms.items()
            if step < hops
        }
        products = {distance: _matmul(part, w_DF) for distance, part in here.items()}
        coming, products = lax.optimization_barrier((coming, products))
        for distance, part in here.items():
            y_BTF = place(y_BTF, products[distance], distance)
            gathered_BTD = place(gathered_BTD, part, distance)
        here, step = coming, step + 1
    return y_BTF, gathered_BTD


def _scatter_ring(y_BTF, w_FD, ring, axis) -> jax.Array:
    """reduce_scatter(y @ w)."""
    n, me, arms = comm.size(axis), comm.rank(axis), _arms(axis, ring)
    chunk = y_BTF.shape[1] // n

    def share(distance, w_FD):
        """What this rank adds to the sum of the chunk whose owner is so far away."""
        return _matmul(lax.dynamic_slice_in_dim(y_BTF, _owner(me, distance, n) * chunk, chunk, 1), w_FD)

    # In each direction this rank begins the sum whose owner is farthest, and is the last to add to its neighbour's.
    sums: dict[int, jax.Array] = {}
    for distance in range(max(arms.values()), 0, -1):
        coming = {shift: comm.permute(total, axis, shift) for shift, total in sums.items()}
        shares = {shift: share(shift * distance, w_FD) for shift, hops in arms.items() if distance <= hops}
        coming, shares, w_FD = lax.optimization_barrier((coming, shares, w_FD))
        sums = {shift: coming[shift] + own if shift in coming else own for shift, own in shares.items()}
    coming = [comm.permute(total, axis, shift) for shift, total in sums.items()]
    return sum(coming, share(0, w_FD))


def _owner(me, distance: int, n: int):
    """The rank so far away, in a ring of n."""
    owner = jnp.asarray(me + distance % n)
    return lax.rem(owner, jnp.asarray(n, owner.dtype))


def _arms(axis: str, ring: Ring) -> dict[int, int]:
    """The directions in which chunks are sent (the shift of a permute), and how many hops each: n-1 together."""
    n = comm.size(axis)
    return {"one-way": {1: n - 1}, "two-way": {1: n // 2, -1: (n - 1) // 2}}[ring]


def _matmul(x_BTD: jax.Array, w_DF: jax.Array) -> jax.Array:
    """x @ w as one flat matmul."""
    batch, length, width = x_BTD.shape
    return (x_BTD.reshape(batch * length, width) @ w_DF).reshape(batch, length, w_DF.shape[1])


def _weight_gradient(x_BTD: jax.Array, dy_BTF: jax.Array) -> jax.Array:
    rows = x_BTD.shape[0] * x_BTD.shape[1]
    return x_BTD.reshape(rows, x_BTD.shape[2]).T @ dy_BTF.reshape(rows, dy_BTF.shape[2])


def _vary_alike(x: jax.Array, w: jax.Array, axis: str) -> tuple[jax.Array, jax.Array]:
    """Both varying over the axis and all that either varies over, so that their gradients have the types asked for."""
    return comm.varying((x, w), sorted(varying_axes(x) | varying_axes(w) | {axis}))
