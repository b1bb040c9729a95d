"""Causal self-attention's core: cuDNN's kernel, blocks of scores, or all of them.

Dims: B batch, T queries, S keys, N heads of this rank, H head dim.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.models.attention_choice import cudnn_attention, traced_cudnn_attention
from jaxdist.models.context import Context
from jaxdist.parallel.blocked_attention import Places, blocked_attention
from jaxdist.parallel.context_parallel import context_attention

MIN_QUERIES = 64  # in a block; smaller products of matrices are slower than what leaving out the masked ones saves


def causal_blocks(seq_len: int) -> int:
    """Into how many blocks of queries the written-out attention is cut: n leave (n - 1) / 2n of all scores out."""
    return next(n for n in (4, 2, 1) if n == 1 or (seq_len % n == 0 and seq_len // n >= MIN_QUERIES))


def attend(
    ctx: Context,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    rate: float = 0.0,
    window: int | None = None,
) -> jax.Array:
    """Causal self-attention over the whole sequence: `attention_core` as the run has chosen it.

    Where text is generated, keys and values are kept, and a call may be of the newest position of each text alone.
    """
    core = attention_core(ctx.attention, ctx, rate, window)
    if ctx.split.ranks > 1:
        core = partial(context_attention, ctx.split, core, window=window, starts_BS=ctx.starts_BT)
    if ctx.cache is not None:
        return ctx.cache.attend(core, q_BTNH, k_BTKH, v_BTKH, window)
    return core(q_BTNH, k_BTKH, v_BTKH)


def attention_core(
    implementation: str, ctx: Context, rate: float = 0.0, window: int | None = None
) -> Callable[..., jax.Array]:
    """core(q_BTNH, k_BTKH, v_BTKH) -> o_BTNH, causal, scaled by 1/sqrt(H); `rate` is of dropout.

    K divides N: consecutive queries' heads share a key's (arXiv 2305.13245). window: a query sees itself and the
    `window` - 1 positions before it. "cudnn" never holds the scores and takes no dropout ("cudnn-traced" stands for it
    in a plan). "blocked" holds a block of them, makes them again in backward, and takes no dropout. "xla" writes them
    out, in blocks of queries that leave out most of what the mask would, and is what selective recomputation runs
    again. The last two keep to each token's document. Softmax runs in at least fp32.
    """

    def blocked(q_BTNH, k_BTKH, v_BTKH):
        return blocked_attention(q_BTNH, k_BTKH, v_BTKH, Places(0, 0, ctx.starts_BT, "same"), window)

    def block(q_BTNH, k_BSKH, v_BSKH, end):
        """The queries of the T positions before `end`, with the keys of the S positions before it."""
        rows, length = q_BTNH.shape[1], k_BSKH.shape[1]
        query_T1, key_S = jnp.arange(end - rows, end)[:, None], jnp.arange(end - length, end)
        seen = query_T1 >= key_S if window is None else (query_T1 >= key_S) & (query_T1 - key_S < window)
        if ctx.starts_BT is not None:
            seen = (seen & (key_S >= ctx.starts_BT[:, end - rows : end, None]))[:, None]
        scores_BNTS = scores_of(q_BTNH, k_BSKH)
        probs_BNTS = jax.nn.softmax(jnp.where(seen, scores_BNTS, jnp.finfo(scores_BNTS.dtype).min), axis=-1)
        return weighted_values(ctx.at(end).dropout_heads(probs_BNTS.astype(q_BTNH.dtype), rate), v_BSKH)

    def xla(q_BTNH, k_BTKH, v_BTKH):
        length = q_BTNH.shape[1]
        rows = length // causal_blocks(length)

        def first(end):
            return 0 if window is None else max(0, end - rows - window + 1)

        blocks = [
            block(q_BTNH[:, end - rows : end], k_BTKH[:, first(end) : end], v_BTKH[:, first(end) : end], end)
            for end in range(rows, length + 1, rows)
        ]
        return jnp.concatenate(blocks, axis=1)

    cudnn, traced = partial(cudnn_attention, window), partial(traced_cudnn_attention, window)
    known = {"cudnn": cudnn, "cudnn-traced": traced, "blocked": blocked, "xla": ctx.recomputed(xla)}
    return known[implementation]


def scores_of(q_BTNH: jax.Array, k_BSKH: jax.Array) -> jax.Array:
    """Every query times every key of its group's head, by 1/sqrt(H), in at least fp32: [B, N, T, S]."""
    batch, rows, heads, width = q_BTNH.shape
    q_BTNH = q_BTNH * width**-0.5
    if heads == k_BSKH.shape[2]:
        scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH, k_BSKH)
    else:
        q_BTKGH = q_BTNH.reshape(batch, rows, k_BSKH.shape[2], -1, width)
        scores_BNTS = jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH).reshape(batch, heads, rows, -1)
    return scores_BNTS.astype(jnp.promote_types(scores_BNTS.dtype, jnp.float32))


def weighted_values(probs_BNTS: jax.Array, v_BSKH: jax.Array) -> jax.Array:
    """The values of each group's head, added up by weight: [B, T, N, H]."""
    batch, heads, rows, length = probs_BNTS.shape
    if heads == v_BSKH.shape[2]:
        return jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v_BSKH)
    probs_BKGTS = probs_BNTS.reshape(batch, v_BSKH.shape[2], -1, rows, length)
    return jnp.einsum("BKGTS,BSKH->BTKGH", probs_BKGTS, v_BSKH).reshape(batch, rows, heads, -1)
