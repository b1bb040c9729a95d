"""Tensor and sequence parallelism: the two places a block meets tp, and the vocabulary split over it.

Dims: B batch in a micro-batch, T sequence, D model, F any width split over tp, V vocabulary. Source: Megatron-LM,
arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

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


def linear(x_BTD: jax.Array, w: jax.Array | LowRank) -> jax.Array:
    """x[B, T, D] @ w[D, ...] -> [B, T, ...], as one flat matmul (a batched one is a third slower on CPU). Dims before D
    may be others."""
    *rows, width = x_BTD.shape
    x_RD, w_DF = x_BTD.reshape(-1, width), w.reshape(width, -1)
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


class HeadsOfQueries(NamedTuple):
    """Which heads of keys this tp rank's query heads use (`heads_of_queries`).

    count: of the key heads that the rank computes, from `first` on, where the parameters it holds have all of them;
    None where it holds its own alone. query: for each local query, its key head among those that are computed; None
    where equal groups of queries share them in order.
    """

    count: int | None = None
    first: jax.Array | int = 0
    query: jax.Array | None = None

    def pick(self, w: jax.Array, dim: int) -> jax.Array:
        """The parameters of the heads that the rank computes, of an array with all of them on `dim`."""
        if self.count is None:
            return w
        if isinstance(w, LowRank):
            return w.slice_in_dim(self.first, self.count, dim)
        return lax.dynamic_slice_in_dim(comm.varying(w, AXIS), self.first, self.count, dim)

    def of_each_query(self, k_BTKH: jax.Array) -> jax.Array:
        """Keys (or values) of groups of one size: as they are, or repeated for each query."""
        return k_BTKH if self.query is None else jnp.take(k_BTKH, self.query, axis=2)


def heads_of_queries(num_local: int, num_heads: int, num_kv_heads: int) -> HeadsOfQueries:
    """num_local: query heads on this rank, of `num_heads`; consecutive ones share one of `num_kv_heads` key heads.

    Where tp divides the key heads, each rank holds its part of them. Elsewhere it holds all, and its queries use a few
    neighbours: one where tp is a multiple of the key heads.
    """
    ranks, group = num_heads // num_local, num_heads // num_kv_heads
    if num_kv_heads % ranks == 0:
        return HeadsOfQueries()
    count = max(((r + 1) * num_local - 1) // group - r * num_local // group for r in range(ranks)) + 1
    start = comm.rank(AXIS) * num_local
    first = jnp.minimum(start // group, num_kv_heads - count)
    if count == 1:
        return HeadsOfQueries(1, first)
    return HeadsOfQueries(count, first, (start + jnp.arange(num_local)) // group - first)


def vocab_parallel_embedding(tokens_BT: jax.Array, table_VD: jax.Array, sp: bool) -> jax.Array:
    """Look up rows of a table whose vocabulary is split over tp.

    Layout: tokens[B, T], table[V_tp, D] -> {U_tp} (zero where another rank owns the token) -> leave -> x[B, T, D],
    or x[B, T_tp, D] with sp.
    Backward: as `leave`; the gradient of a row lands on the rank that owns it, summed over its tokens in at least fp32.
    Sends: as `leave`, once a micro-batch.
    Source: arXiv 1909.08053, section 3.
    """
    local_BT = tokens_BT - comm.rank(AXIS) * table_VD.shape[0]
    owned_BT = (local_BT >= 0) & (local_BT < table_VD.shape[0])
    rows_BTD = look_up(table_VD.shape[0], table_VD, jnp.where(owned_BT, local_BT, 0))
    return leave(jnp.where(owned_BT[..., None], rows_BTD, 0), sp)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(num_rows: int, table_VD: jax.Array, index_BT: jax.Array) -> jax.Array:
    """table[index] of every token. The gradient adds up in at least fp32 and is rounded once: JAX's own adds in the
    table's dtype, in which 256 + 1 is 256, and a frequent token is in a micro-batch more often than that."""
    return jnp.take(table_VD, index_BT, axis=0)


def _look_up_gradient(num_rows: int, index_BT: jax.Array, d_BTD: jax.Array) -> tuple[jax.Array, None]:
    wide = d_BTD.astype(jnp.promote_types(d_BTD.dtype, jnp.float32))
    zeros_VD = comm.varying_like(jnp.zeros((num_rows, d_BTD.shape[-1]), wide.dtype), wide)
    return zeros_VD.at[index_BT].add(wide).astype(d_BTD.dtype), None


look_up.defvjp(
    lambda num_rows, table_VD, index_BT: (look_up(num_rows, table_VD, index_BT), index_BT), _look_up_gradient
)


@jax.custom_vjp
def barrier_grads(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x and w as they are. Backward: neither gradient is used before both are made; of a frozen w none is made.

    Nothing but the update needs the head's weight gradient, so a GPU's scheduler puts it after all layers' backward,
    and the logits' gradient waits as long (docs/plan.md).
    """
    return x, w


@jax.tree_util.register_static
@dataclass(frozen=True)
class Differentiated:
    """Which inputs of a function have a gradient."""

    inputs: tuple[bool, ...]


def _barrier_forward(x, w):
    return (x.value, w.value), Differentiated((x.perturbed, w.perturbed))


def _barrier_backward(differentiated: Differentiated, grads: tuple) -> tuple:
    return lax.optimization_barrier(
        tuple(g if wanted else None for g, wanted in zip(grads, differentiated.inputs, strict=True))
    )


barrier_grads.defvjp(_barrier_forward, _barrier_backward, symbolic_zeros=True)


def vocab_parallel_cross_entropy(
    x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, sp: bool, one_pass: bool = False
) -> jax.Array:
    """Cross-entropy of a tied head, in nats per token; no rank ever holds the logits of another's vocabulary.

    Columns from `vocab_size` on are padding and never count. Targets below 0 give a loss that means nothing: mask it.
    one_pass: as in `peak_and_total`.

    Layout: x[B, T, D] (x[B, T_tp, D] with sp), table[V_tp, D], targets[B, T] -> loss[B, T], equal along tp.
    Backward: softmax minus one-hot on the local columns; dx as `enter`.
    Sends: two all-reduces of B*T and 2*B*T scalars forward; `enter`'s share backward.
    Source: arXiv 1909.08053, section 3.
    """
    x_BTD = enter(x_BTD, sp)
    x_BTD, table_VD = barrier_grads(x_BTD, comm.varying(table_VD, AXIS))
    x_RD, targets_R = x_BTD.reshape(-1, x_BTD.shape[-1]), targets_BT.reshape(-1)
    losses_R = row_losses(x_RD, table_VD, targets_R, vocab_size, one_pass)
    return losses_R.reshape(targets_BT.shape)


def row_losses(
    x_RD: jax.Array, table_VD: jax.Array, targets_R: jax.Array, vocab_size: int, one_pass: bool
) -> jax.Array:
    """`vocab_parallel_cross_entropy` of R rows that every tp rank holds whole."""
    logits_RV = x_RD @ table_VD.T
    logits_RV = logits_RV.astype(jnp.promote_types(x_RD.dtype, jnp.float32))
    columns_V = global_indices(table_VD.shape[0])
    logits_RV = jnp.where(columns_V < vocab_size, logits_RV, jnp.finfo(logits_RV.dtype).min)

    own_peak_R, total_R = peak_and_total(one_pass, logits_RV)
    peak_R = comm.all_reduce_max(lax.stop_gradient(own_peak_R), AXIS)
    local_R = targets_R - comm.rank(AXIS) * table_VD.shape[0]
    owned_R = (local_R >= 0) & (local_R < table_VD.shape[0])
    target_R = jnp.where(owned_R, pick_column(table_VD.shape[0], logits_RV, jnp.where(owned_R, local_R, 0)), 0)
    total_R *= jnp.exp(lax.stop_gradient(own_peak_R) - peak_R)
    total_R, target_R = comm.all_reduce(jnp.stack([total_R, target_R]), AXIS)
    return jnp.log(total_R) + peak_R - target_R


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def peak_and_total(one_pass: bool, x_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(largest x[r, v], sum of exp(x[r, v] - largest)) of every row. Of the second alone there is a gradient.

    one_pass: one reduction makes both, for which a GPU reads x once; XLA:CPU takes longer for it than for two.
    Source: arXiv 1805.02867, section 3 (online softmax).
    """
    if not one_pass:
        peak_R = x_RV.max(-1)
        return peak_R, jnp.exp(x_RV - peak_R[:, None]).sum(-1)

    def joined(some, others):
        peak = jnp.maximum(some[0], others[0])
        return peak, some[1] * jnp.exp(some[0] - peak) + others[1] * jnp.exp(others[0] - peak)

    nothing = jnp.array(jnp.finfo(x_RV.dtype).min, x_RV.dtype), jnp.array(0, x_RV.dtype)
    return lax.reduce((x_RV, jnp.ones_like(x_RV)), nothing, joined, (1,))


def _peak_and_total_forward(one_pass: bool, x_RV: jax.Array) -> tuple:
    peak_R, total_R = peak_and_total(one_pass, x_RV)
    return (peak_R, total_R), (x_RV, peak_R)


def _peak_and_total_backward(one_pass: bool, kept: tuple, grads: tuple) -> tuple[jax.Array]:
    (x_RV, peak_R), (_, d_R) = kept, grads
    return (jnp.exp(x_RV - peak_R[:, None]) * d_R[:, None],)


peak_and_total.defvjp(_peak_and_total_forward, _peak_and_total_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def pick_column(num_columns: int, x_RV: jax.Array, column_R: jax.Array) -> jax.Array:
    """x[r, column[r]] of every row. The gradient is elementwise: JAX's own is a scatter into zeros as large as x."""
    return jnp.take_along_axis(x_RV, column_R[:, None], axis=-1)[:, 0]


pick_column.defvjp(
    lambda num_columns, x_RV, column_R: (pick_column(num_columns, x_RV, column_R), column_R),
    lambda num_columns, column_R, d_R: (jnp.where(jnp.arange(num_columns) == column_R[:, None], d_R[:, None], 0), None),
)


def cross_entropy_in_chunks(
    x_BTD: jax.Array,
    table_VD: jax.Array,
    targets_BT: jax.Array,
    vocab_size: int,
    sp: bool,
    num_chunks: int,
    one_pass: bool = False,
) -> jax.Array:
    """The sum of `vocab_parallel_cross_entropy` over targets that are not negative, a chunk of rows at a time.

    A chunk's gradients are made while its logits are there, and nothing is computed twice: differentiated, it holds the
    logits of B*T / num_chunks rows, and the gradients of x and of the table in at least fp32. The number of chunks
    divides B*T.

    Layout: as `vocab_parallel_cross_entropy`, but -> loss [], equal along tp.
    Sends: the same bytes in num_chunks times as many all-reduces; `enter`'s share once.
    Source: Liger Kernel, arXiv 2410.10989, section 3.2 (fused linear cross-entropy).
    """
    x_BTD = enter(x_BTD, sp)
    width, dtype = x_BTD.shape[-1], x_BTD.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    x_CRD = x_BTD.reshape(num_chunks, -1, width)
    targets_CR = targets_BT.reshape(num_chunks, -1)
    table_VD = comm.varying_like(comm.varying(table_VD, AXIS), x_CRD)
    # Half precision would lose the small ones of a gradient that is scaled only later.
    seed = 2.0**12 / x_CRD.shape[1] if dtype == jnp.float16 else 1.0

    def chunk_loss(x_RD, table_VD, targets_R):
        losses_R = row_losses(x_RD, table_VD, targets_R, vocab_size, one_pass)
        return jnp.where(targets_R >= 0, losses_R, 0).sum()

    def total(x_CRD, table_VD, targets_CR):
        def body(loss, chunk):
            return loss + chunk_loss(chunk[0], table_VD, chunk[1]), None

        return lax.scan(body, zero(x_CRD, table_VD, targets_CR), (x_CRD, targets_CR))[0]

    def zero(x_CRD, table_VD, targets_CR):
        like = jax.eval_shape(chunk_loss, x_CRD[0], table_VD, targets_CR[0])
        return comm.varying_like(jnp.zeros((), like.dtype), like)

    def forward(x_CRD, table_VD, targets_CR):
        # Of a frozen table there is none.
        trained = table_VD.perturbed
        x_CRD, table_VD, targets_CR = (each.value for each in (x_CRD, table_VD, targets_CR))

        def body(carry, chunk):
            loss, d_table = carry
            x_RD, targets_R = chunk
            here, pull = jax.vjp(
                lambda x, table: chunk_loss(x, table_VD if table is None else table, targets_R),
                x_RD,
                table_VD if trained else None,
            )
            d_x, more = pull(comm.varying_like(jnp.asarray(seed, here.dtype), here))
            return (loss + here, d_table + more.astype(wide) if trained else None), d_x.astype(wide)

        d_table = comm.varying_like(jnp.zeros(table_VD.shape, wide), table_VD) if trained else None
        start = (zero(x_CRD, table_VD, targets_CR), d_table)
        (loss, d_table), d_x_CRD = lax.scan(body, start, (x_CRD, targets_CR))
        return loss, (d_x_CRD, d_table)

    def backward(kept, d_loss):
        d_x_CRD, d_table = jax.tree.map(lambda each: comm.varying_like(d_loss / seed, each) * each, kept)
        return d_x_CRD.astype(dtype), None if d_table is None else d_table.astype(table_VD.dtype), None

    summed = jax.custom_vjp(total)
    summed.defvjp(forward, backward, symbolic_zeros=True)
    return summed(x_CRD, table_VD, targets_CR)
