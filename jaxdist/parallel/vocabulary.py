"""The vocabulary split over tp: the embedding, and the cross-entropy of a tied head.

Dims: as in `jaxdist.parallel.tensor`; V vocabulary, R rows: the tokens of a micro-batch.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel import tensor


def vocab_parallel_embedding(tokens_BT: jax.Array, table_VD: jax.Array, sp: bool) -> jax.Array:
    """Look up rows of a table whose vocabulary is split over tp.

    Layout: tokens[B, T], table[V_tp, D] -> {U_tp} (zero where another rank owns the token, NaN where none does) ->
    leave -> x[B, T, D], or x[B, T_tp, D] with sp.
    Backward: as `leave`; the gradient of a row lands on the rank that owns it, summed over its tokens in at least fp32.
    Sends: as `leave`, once a micro-batch.
    Source: arXiv 1909.08053, section 3.
    """
    local_BT = _from_own_first(tokens_BT, table_VD.shape[0])
    owned_BT = (local_BT >= 0) & (local_BT < table_VD.shape[0])
    rows_BTD = look_up(table_VD.shape[0], table_VD, jnp.where(owned_BT, local_BT, 0))
    last = (comm.size(tensor.AXIS) - comm.rank(tensor.AXIS)) * table_VD.shape[0]
    others_BT = jnp.where((tokens_BT >= 0) & (local_BT < last), 0.0, jnp.nan).astype(rows_BTD.dtype)
    return tensor.leave(jnp.where(owned_BT[..., None], rows_BTD, others_BT[..., None]), sp)


def _from_own_first(tokens: jax.Array, num_local: int) -> jax.Array:
    """Tokens counted from this rank's first row; in 32 bits, since the 256 of a table is 0 as a uint8."""
    return tokens.astype(jnp.promote_types(tokens.dtype, jnp.int32)) - comm.rank(tensor.AXIS) * num_local


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def look_up(num_rows: int, table_VD: jax.Array, index: jax.Array) -> jax.Array:
    """table[V, D], index[...] -> table[index][..., D].

    The gradient adds up in at least fp32 and is rounded once: JAX's own adds in the table's dtype, in which 256 + 1 is
    256, and a frequent token is in a micro-batch more often than that.
    """
    return jnp.take(table_VD, index, axis=0)


def _look_up_gradient(num_rows: int, index: jax.Array, d: jax.Array) -> tuple[jax.Array, None]:
    wide = d.astype(jnp.promote_types(d.dtype, jnp.float32))
    zeros_VD = comm.varying_like(jnp.zeros((num_rows, d.shape[-1]), wide.dtype), wide)
    return zeros_VD.at[index].add(wide).astype(d.dtype), None


look_up.defvjp(lambda num_rows, table_VD, index: (look_up(num_rows, table_VD, index), index), _look_up_gradient)


@jax.custom_vjp
def barrier_grads(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """x and w as they are. Backward: neither gradient is used before both are made; of a frozen w none is made.

    Nothing but the update needs the head's weight gradient, so a GPU's scheduler puts it after all layers' backward,
    and the logits' gradient waits as long (docs/plan.md).
    """
    return x, w


def _barrier_forward(x, w):
    # Which inputs have a gradient, as a tree without leaves.
    return (x.value, w.value), tuple(() if each.perturbed else None for each in (x, w))


def _barrier_backward(wanted: tuple, grads: tuple) -> tuple:
    return lax.optimization_barrier(tuple(g if each == () else None for g, each in zip(grads, wanted, strict=True)))


barrier_grads.defvjp(_barrier_forward, _barrier_backward, symbolic_zeros=True)


def vocab_parallel_cross_entropy(
    x_BTD: jax.Array, table_VD: jax.Array, targets_BT: jax.Array, vocab_size: int, sp: bool, one_pass: bool = False
) -> jax.Array:
    """Cross-entropy of a tied head, in nats per token; no rank ever holds the logits of another's vocabulary.

    Columns from `vocab_size` on are padding: the loss of such a target is NaN. One below 0 means nothing: mask it.
    one_pass: as in `peak_and_total`.

    Layout: x[B, T, D] (x[B, T_tp, D] with sp), table[V_tp, D], targets[B, T] -> loss[B, T], equal along tp.
    Backward: softmax minus one-hot on the local columns; dx as `enter`.
    Sends: two all-reduces of B*T and 2*B*T scalars forward; `enter`'s share backward.
    Source: arXiv 1909.08053, section 3.
    """
    x_BTD = tensor.enter(x_BTD, sp)
    x_BTD, table_VD = barrier_grads(x_BTD, comm.varying(table_VD, tensor.AXIS))
    x_RD, targets_R = x_BTD.reshape(-1, x_BTD.shape[-1]), targets_BT.reshape(-1)
    return softmax_losses(vocab_size, one_pass, x_RD @ table_VD.T, targets_R).reshape(targets_BT.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def softmax_losses(vocab_size: int, one_pass: bool, logits_RV: jax.Array, targets_R: jax.Array) -> jax.Array:
    """Layout: logits[R, V_tp], targets[R] -> loss[R] in at least fp32, equal along tp.

    Backward: exp(logits - log of the sum) - (column is the target), element by element, from the logits as they came.
    """
    return _softmax_forward(vocab_size, one_pass, logits_RV, targets_R)[0]


def _softmax_forward(vocab_size: int, one_pass: bool, logits_RV: jax.Array, targets_R: jax.Array):
    wide_RV = _real_columns(vocab_size, logits_RV)
    own_peak_R, total_R = peak_and_total(one_pass, wide_RV)
    peak_R = comm.all_reduce_max(own_peak_R, tensor.AXIS)
    num_columns = logits_RV.shape[1]
    local_R = _from_own_first(targets_R, num_columns)
    owned_R = (local_R >= 0) & (local_R < num_columns)
    picked_R = jnp.take_along_axis(wide_RV, jnp.where(owned_R, local_R, 0)[:, None], axis=-1)[:, 0]
    total_R *= jnp.exp(own_peak_R - peak_R)
    total_R, target_R = comm.all_reduce(jnp.stack([total_R, jnp.where(owned_R, picked_R, 0)]), tensor.AXIS)
    log_total_R = jnp.where(targets_R.astype(local_R.dtype) < vocab_size, jnp.log(total_R) + peak_R, jnp.nan)
    return log_total_R - target_R, (logits_RV, log_total_R, targets_R)


def _softmax_backward(vocab_size: int, one_pass: bool, kept: tuple, d_R: jax.Array) -> tuple:
    logits_RV, *rows = kept
    # Else XLA:CPU holds another fp32 copy of a pipeline stage's logits.
    log_total_R, targets_R, d_R = lax.optimization_barrier((*rows, d_R))
    wide_RV = _real_columns(vocab_size, logits_RV)
    one_hot_RV = (tensor.global_indices(logits_RV.shape[1]) == targets_R[:, None]).astype(wide_RV.dtype)
    d_RV = (jnp.exp(wide_RV - log_total_R[:, None]) - one_hot_RV) * d_R[:, None]
    return d_RV.astype(logits_RV.dtype), None


def _real_columns(vocab_size: int, logits_RV: jax.Array) -> jax.Array:
    """Logits in at least fp32, those of columns that pad the vocabulary at the least value."""
    wide_RV = logits_RV.astype(jnp.promote_types(logits_RV.dtype, jnp.float32))
    return jnp.where(tensor.global_indices(logits_RV.shape[1]) < vocab_size, wide_RV, jnp.finfo(wide_RV.dtype).min)


softmax_losses.defvjp(_softmax_forward, _softmax_backward)


def peak_and_total(one_pass: bool, x_RV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(largest x[r, v], sum of exp(x[r, v] - largest)) of every row.

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
