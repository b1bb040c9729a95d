"""Tensor and sequence parallelism: the two places a block meets tp, and the vocabulary split over it.

Dims: B batch in a micro-batch, T sequence, D model, F any width split over tp, V vocabulary. Source: Megatron-LM,
arXiv 1909.08053, section 3; sequence parallelism: arXiv 2205.05198, section 4.2.2.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
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


def linear(x_BTD: jax.Array, w: jax.Array) -> jax.Array:
    """x[B, T, D] @ w[D, ...] -> [B, T, ...], as one flat matmul (a batched one is a third slower on CPU)."""
    batch, length, width = x_BTD.shape
    return (x_BTD.reshape(-1, width) @ w.reshape(width, -1)).reshape(batch, length, *w.shape[1:])


def column_parallel(x_BTD: jax.Array, w: jax.Array, sp: bool, ring: Ring | None) -> jax.Array:
    """`enter`, then x @ w[D, ...]; as one ring where `ring` names one, which needs sp.

    Layout: x[B, T, D] (x[B, T_tp, D] with sp), w[D, F_tp] -> y[B, T, F_tp]; F may be several dims.
    Sends: as `enter`; in a ring, the same bytes in n-1 permutes.
    """
    if ring is None:
        return linear(enter(x_BTD, sp), w)
    y_BTF = gather_matmul(x_BTD, w.reshape(w.shape[0], -1), ring)
    return y_BTF.reshape(*y_BTF.shape[:2], *w.shape[1:])


def row_parallel(y_BTF: jax.Array, w_FD: jax.Array, sp: bool, ring: Ring | None) -> jax.Array:
    """y @ w, then `leave`; as one ring where `ring` names one, which needs sp.

    Layout: y[B, T, F_tp], w[F_tp, D] -> x[B, T, D], or x[B, T_tp, D] with sp.
    Sends: as `leave`; in a ring, the same bytes in n-1 permutes.
    """
    return leave(linear(y_BTF, w_FD), sp) if ring is None else matmul_scatter(y_BTF, w_FD, ring)


def positions(num_local: int, sp: bool) -> jax.Array:
    """Global sequence positions of this rank's `num_local` tokens outside the tensor-parallel regions."""
    return jnp.arange(num_local) + (comm.rank(AXIS) * num_local if sp else 0)


def global_indices(num_local: int) -> jax.Array:
    """Global indices of this tp rank's part (heads, vocabulary rows) of a dim split over tp."""
    return jnp.arange(num_local) + comm.rank(AXIS) * num_local


def vocab_parallel_embedding(tokens_BT: jax.Array, table_VD: jax.Array, sp: bool) -> jax.Array:
    """Look up rows of a table whose vocabulary is split over tp.

    Layout: tokens[B, T], table[V_tp, D] -> {U_tp} (zero where another rank owns the token) -> leave -> x[B, T, D],
    or x[B, T_tp, D] with sp.
    Backward: as `leave`; the gradient of a row lands on the rank that owns it.
    Sends: as `leave`, once a micro-batch.
    Source: arXiv 1909.08053, section 3.
    """
    local_BT = tokens_BT - comm.rank(AXIS) * table_VD.shape[0]
    owned_BT = (local_BT >= 0) & (local_BT < table_VD.shape[0])
    rows_BTD = jnp.take(table_VD, jnp.where(owned_BT, local_BT, 0), axis=0)
    return leave(jnp.where(owned_BT[..., None], rows_BTD, 0), sp)


@jax.custom_vjp
def gradients_together(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x and w as they are. Backward: neither gradient is used before both are made.

    Nothing but the update needs the head's weight gradient, so a GPU's scheduler puts it after all layers' backward,
    and the logits' gradient waits as long (docs/plan.md).
    """
    return x, w


gradients_together.defvjp(lambda x, w: ((x, w), None), lambda _, grads: lax.optimization_barrier(grads))


def vocab_parallel_cross_entropy(
    x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, sp: bool
) -> jax.Array:
    """Cross-entropy of a tied head, in nats per token; no rank ever holds the logits of another's vocabulary.

    Columns from `vocab_size` on are padding and never count. Targets below 0 give a loss that means nothing: mask it.

    Layout: x[B, T, D] (x[B, T_tp, D] with sp), table[V_tp, D], targets[B, T] -> loss[B, T], equal along tp.
    Backward: softmax minus one-hot on the local columns; dx as `enter`.
    Sends: two all-reduces of B*T and 2*B*T scalars forward; `enter`'s share backward.
    Source: arXiv 1909.08053, section 3.
    """
    x_BTD = enter(x_BTD, sp)
    batch, length, width = x_BTD.shape
    table_VD = comm.varying(table_VD, AXIS)
    x_BTD, table_VD = gradients_together(x_BTD, table_VD)
    logits_BTV = (x_BTD.reshape(-1, width) @ table_VD.T).reshape(batch, length, -1)
    logits_BTV = logits_BTV.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
    columns_V = global_indices(table_VD.shape[0])
    logits_BTV = jnp.where(columns_V < vocab_size, logits_BTV, jnp.finfo(logits_BTV.dtype).min)

    peak_BT = comm.all_reduce_max(lax.stop_gradient(logits_BTV.max(-1)), AXIS)
    local_BT = targets_BT - comm.rank(AXIS) * table_VD.shape[0]
    owned_BT = (local_BT >= 0) & (local_BT < table_VD.shape[0])
    picked_BT = jnp.take_along_axis(logits_BTV, jnp.where(owned_BT, local_BT, 0)[..., None], axis=-1)[..., 0]
    target_BT = jnp.where(owned_BT, picked_BT, 0)
    total_BT = jnp.exp(logits_BTV - peak_BT[..., None]).sum(-1)
    total_BT, target_BT = comm.all_reduce(jnp.stack([total_BT, target_BT]), AXIS)
    return jnp.log(total_BT) + peak_BT - target_BT
