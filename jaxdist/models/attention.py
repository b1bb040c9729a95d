"""Causal self-attention's core: cuDNN's kernel, blocks of scores, or all of them; and which of these can run.

Dims: B batch, T queries, S keys, N heads of this rank, H head dim.
"""

import warnings
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError, reason_of
from jaxdist.models.context import Context
from jaxdist.parallel.blocked_attention import Places, blocked_attention
from jaxdist.parallel.context_parallel import context_attention
from jaxdist.parallel.remat import CUDNN_FORWARD

LONG = 8192  # positions, from which on their scores are not written out unless asked for
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

    def cudnn(q_BTNH, k_BTKH, v_BTKH):
        seen = None if window is None else (window - 1, 0)
        return jax.nn.dot_product_attention(
            q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=seen, implementation="cudnn"
        )

    def blocked(q_BTNH, k_BTKH, v_BTKH):
        return blocked_attention(q_BTNH, k_BTKH, v_BTKH, Places(0, 0, ctx.starts_BT, "same"), window)

    def block(q_BTNH, k_BSKH, v_BSKH, end):
        """The queries of the T positions before `end`, with the keys of the S positions before it."""
        rows, length = q_BTNH.shape[1], k_BSKH.shape[1]
        query_T, key_S = jnp.arange(end - rows, end)[:, None], jnp.arange(end - length, end)
        seen_TS = query_T >= key_S if window is None else (query_T >= key_S) & (query_T - key_S < window)
        if ctx.starts_BT is not None:
            seen_TS = (seen_TS & (key_S >= ctx.starts_BT[:, end - rows : end, None]))[:, None]
        scores_BNTS = scores_of(q_BTNH, k_BSKH)
        probs_BNTS = jax.nn.softmax(jnp.where(seen_TS, scores_BNTS, jnp.finfo(scores_BNTS.dtype).min), axis=-1)
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

    traced = partial(_traced_cudnn, window)
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


# cuDNN's kernels as a plan sees them where there is no cuDNN: what they take, give and keep. Traced, never compiled.
_forward_p, _backward_p = Primitive(CUDNN_FORWARD), Primitive("cudnn_attention_backward")
_forward_p.multiple_results = _backward_p.multiple_results = True


@_forward_p.def_abstract_eval
def _forward_types(q, k, v, *, window):
    """(o[B, T, N, H], one number of each row of scores in fp32)."""
    batch, length, heads, _ = q.shape
    return q, q.update(shape=(batch, heads, length), dtype=jnp.dtype(jnp.float32))


@_backward_p.def_abstract_eval
def _backward_types(q, k, v, o, row_BNT, do):
    return q, k, v


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _traced_cudnn(window, q_BTNH, k_BTKH, v_BTKH):
    return _forward_p.bind(q_BTNH, k_BTKH, v_BTKH, window=window)[0]


def _traced_cudnn_forward(window, q_BTNH, k_BTKH, v_BTKH):
    o_BTNH, row_BNT = _forward_p.bind(q_BTNH, k_BTKH, v_BTKH, window=window)
    return o_BTNH, (q_BTNH, k_BTKH, v_BTKH, o_BTNH, row_BNT)


_traced_cudnn.defvjp(_traced_cudnn_forward, lambda _, kept, do_BTNH: tuple(_backward_p.bind(*kept, do_BTNH)))


def traced_attention(eqn) -> tuple[int, int, int, int | None] | None:
    """(query heads, heads of keys, width of a head, window) of an equation that attends, in a program that was traced
    with "cudnn-traced"; None of any other."""
    if eqn.primitive is not _forward_p:
        return None
    q_BTNH, k_BTKH, _ = (v.aval.shape for v in eqn.invars)
    return q_BTNH[2], k_BTKH[2], k_BTKH[3], eqn.params["window"]


def attention_on_device(
    asked: str,
    platform: str,
    dtype: str,
    device: jax.Device | None,
    *,
    seq_len: int,
    head_dim: int,
    dropout: bool = False,
) -> str:
    """`choose_attention`; under "auto", `device` is asked whether it compiles what was chosen."""
    chosen = choose_attention(asked, platform, dtype, seq_len=seq_len, head_dim=head_dim, dropout=dropout)
    if asked != "auto" or chosen != "cudnn" or device is None:
        return chosen
    if warn_where_cudnn_does_not_compile(device, seq_len, head_dim, dtype):
        return choose_attention(asked, "cpu", dtype, seq_len=seq_len, head_dim=head_dim, dropout=dropout)
    return "cudnn"


def choose_attention(asked: str, platform: str, dtype: str, *, seq_len: int, head_dim: int, dropout: bool) -> str:
    """cuDNN's flash attention where it can run; elsewhere blocks for long sequences, and scores written out for others.
    Warns where only the width of a head keeps a GPU from the first.

    dropout: whether attention weights are dropped. Raises: ConfigError where what was asked for cannot run.
    """
    if asked == "xla":
        return "xla"
    if asked == "blocked" and dropout:
        raise ConfigError("attention=blocked", "dropout must be 0: it drops no attention weights", "Use attention=auto")
    if asked == "blocked":
        return "blocked"
    obstacles = {
        f"devices must be NVIDIA GPUs, and this mesh is of {platform} devices": platform not in ("gpu", "abstract"),
        f"dtype must be of 16 bits, not {dtype}": dtype not in ("bfloat16", "float16"),
        "dropout must be 0: it drops no attention weights": dropout,
        (width := f"the width of a head must be 8 to 128 in steps of 8, not {head_dim}"): head_dim % 8
        or head_dim > 128,
    }
    in_the_way = [reason for reason, applies in obstacles.items() if applies]
    if asked == "cudnn" and in_the_way:
        raise ConfigError("attention=cudnn", in_the_way[0], "Use attention=auto")
    if asked == "cudnn" or (platform == "gpu" and not in_the_way):
        return "cudnn"
    if platform == "gpu" and in_the_way == [width]:
        warnings.warn(f"attention=auto is not cuDNN's here: {width}", stacklevel=2)
    return "blocked" if seq_len >= LONG and not dropout else "xla"


def warn_where_cudnn_does_not_compile(device: jax.Device, seq_len: int, head_dim: int, dtype: str) -> bool:
    """Whether cuDNN has no plan for this attention on `device`; says so in a warning, since "auto" avoids it then."""
    refusal = cudnn_refusal(device, seq_len, head_dim, dtype)
    if refusal is None:
        return False
    warnings.warn(
        f"attention=auto is not cuDNN's here: cuDNN's attention does not compile on {device.device_kind} "
        f"({refusal}). Other versions of cuDNN may have it: {install_text('cuda12')} instead of cuda",
        stacklevel=2,
    )
    return True


def cudnn_refusal(device: jax.Device, seq_len: int, head_dim: int, dtype: str) -> str | None:
    """Why cuDNN's attention, forward and backward, does not compile for one head on `device`; None where it does."""
    sharding = jax.sharding.SingleDeviceSharding(device)
    x_BTNH = jax.ShapeDtypeStruct((1, seq_len, 1, head_dim), dtype, sharding=sharding)
    core = attention_core("cudnn", Context())
    try:
        jax.jit(jax.grad(lambda x: core(x, x, x).astype(jnp.float32).sum())).lower(x_BTNH).compile()
    except Exception as error:  # the compiler's, the plugin's and cuDNN's own have no type in common
        return reason_of(error)
    return None
