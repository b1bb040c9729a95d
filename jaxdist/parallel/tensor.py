"""Tensor and sequence parallelism: the two places a block meets tp.

Dims: B batch in a micro-batch, T sequence, D model, F any width split over tp. Source: Megatron-LM, arXiv 1909.08053,
section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2.
"""

import itertools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.low_rank import LowRank
from jaxdist.parallel.rings import Ring, gather_matmul, matmul_scatter

AXIS = "tp"
SEQUENCE_DIM = 1


def enter(x_BTD: jax.Array, sp: bool) -> jax.Array:
    """Before a column-parallel matmul: every tp rank needs the whole sequence.

    Layout: x[B, T, D] -> x[B, T, D] typed varying over tp; with sp, x[B, T_tp, D] -> all_gather -> x[B, T, D].
    Backward: psum over tp of dx; with sp, reduce_scatter of dx over T.
    Sends: nothing forward, 2 (n-1)/n * B*T*D * itemsize backward; with sp, half of that each way.
    Source: Megatron-LM's f, and g of the sequence-parallel paper.
    """
    return comm.all_gather(x_BTD, AXIS, SEQUENCE_DIM) if sp else comm.varying(x_BTD, AXIS)


def leave(y_BTD: jax.Array, sp: bool) -> jax.Array:
    """After a row-parallel matmul: add up the partial products.

    Layout: y[B, T, D] {U_tp} -> psum -> y[B, T, D]; with sp -> reduce_scatter -> y[B, T_tp, D].
    Backward: cast to varying (free); with sp, all_gather over T.
    Sends: 2 (n-1)/n * B*T*D * itemsize forward, nothing backward; with sp, half of that each way.
    """
    return comm.reduce_scatter(y_BTD, AXIS, SEQUENCE_DIM) if sp else comm.all_reduce(y_BTD, AXIS)


def whole(w: jax.Array | LowRank) -> jax.Array:
    """The matrix itself, of one with a correction: a ring takes one array."""
    return w.total() if isinstance(w, LowRank) else w


def linear(x: jax.Array, w: jax.Array | LowRank) -> jax.Array:
    """x[B, T, D] @ w[D, ...] -> [B, T, ...], as one flat matmul (a batched one is a third slower on CPU). Dims before D
    may be others."""
    *rows, width = x.shape
    x_RD, w_DF = x.reshape(-1, width), w.reshape(width, -1)
    y_RF = w_DF.product(x_RD) if isinstance(w_DF, LowRank) else x_RD @ w_DF
    return y_RF.reshape(*rows, *w.shape[1:])


def column_parallel(
    x_BTD: jax.Array, weights: Sequence[jax.Array | LowRank], sp: bool, ring: Ring | None
) -> list[jax.Array]:
    """`enter`, then x @ w[D, ...] for each of the weights; as one ring where `ring` names one, which needs sp.

    Layout: x[B, T, D] (x[B, T_tp, D] with sp), w[D, F_tp] -> y[B, T, F_tp]; F may be several dims.
    Sends: as `enter`, once for all weights; in a ring, the same bytes in n-1 permutes.
    """
    if ring is None and sp:
        # Rows stay as they arrive. Products, which tp makes narrow, are put in order instead; compilers hold what is
        # kept for backward twice where its layout is another than a gather's.
        x_nBtD = comm.all_gather(x_BTD, AXIS, None)
        return [_in_order(linear(x_nBtD, w)) for w in weights]
    if ring is None:
        x_BTD = enter(x_BTD, sp)
        return [linear(x_BTD, w) for w in weights]
    flat = [whole(w).reshape(w.shape[0], -1) for w in weights]
    y_BTF = gather_matmul(x_BTD, flat[0] if len(flat) == 1 else jnp.concatenate(flat, axis=1), ring)
    ends = list(itertools.accumulate(w.shape[1] for w in flat))[:-1]
    return [y.reshape(*y.shape[:2], *w.shape[1:]) for y, w in zip(jnp.split(y_BTF, ends, axis=2), weights, strict=True)]


def row_parallel(y_BTF: jax.Array, w_FD: jax.Array | LowRank, sp: bool, ring: Ring | None) -> jax.Array:
    """y @ w, then `leave`; as one ring where `ring` names one, which needs sp.

    Layout: y[B, T, F_tp], w[F_tp, D] -> x[B, T, D], or x[B, T_tp, D] with sp.
    Sends: as `leave`; in a ring, the same bytes in n-1 permutes.
    """
    if ring is not None:
        return matmul_scatter(y_BTF, whole(w_FD), ring)
    if sp:
        return comm.reduce_scatter(linear(_by_rank(y_BTF), w_FD), AXIS, None)
    return leave(linear(y_BTF, w_FD), sp)


def _in_order(y_nBtF: jax.Array) -> jax.Array:
    """Layout: y[n, B, T/n, ...], of n ranks' parts of the sequence -> y[B, T, ...]."""
    n, batch, length, *rest = y_nBtF.shape
    return jnp.moveaxis(y_nBtF, 0, 1).reshape(batch, n * length, *rest)


def _by_rank(y_BTF: jax.Array) -> jax.Array:
    """Layout: y[B, T, ...] -> y[n, B, T/n, ...]."""
    batch, length, *rest = y_BTF.shape
    n = comm.size(AXIS)
    return jnp.moveaxis(y_BTF.reshape(batch, n, length // n, *rest), 1, 0)


def positions(num_local: int, sp: bool) -> jax.Array:
    """Global sequence positions of this rank's `num_local` tokens outside the tensor-parallel regions."""
    return jnp.arange(num_local) + (comm.rank(AXIS) * num_local if sp else 0)


def global_indices(num_local: int) -> jax.Array:
    """Global indices of this tp rank's part (heads, vocabulary rows) of a dim split over tp."""
    return jnp.arange(num_local) + comm.rank(AXIS) * num_local
