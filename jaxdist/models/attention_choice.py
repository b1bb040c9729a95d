"""Which attention runs: cuDNN's kernel where it can, which a device is asked; and what stands for it in a plan.

Dims: as in `jaxdist.models.attention`.
"""

import warnings
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError, reason_of
from jaxdist.parallel.remat import CUDNN_FORWARD

LONG = 8192  # positions, from which on their scores are not written out unless asked for


def cudnn_attention(window: int | None, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array) -> jax.Array:
    """o[B, T, N, H] of cuDNN's flash attention, as `attention_core` says."""
    seen = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(
        q_BTNH, k_BTKH, v_BTKH, is_causal=True, local_window_size=seen, implementation="cudnn"
    )


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
def traced_cudnn_attention(window, q_BTNH, k_BTKH, v_BTKH):
    return _forward_p.bind(q_BTNH, k_BTKH, v_BTKH, window=window)[0]


def _traced_forward(window, q_BTNH, k_BTKH, v_BTKH):
    o_BTNH, row_BNT = _forward_p.bind(q_BTNH, k_BTKH, v_BTKH, window=window)
    return o_BTNH, (q_BTNH, k_BTKH, v_BTKH, o_BTNH, row_BNT)


traced_cudnn_attention.defvjp(_traced_forward, lambda _, kept, do_BTNH: tuple(_backward_p.bind(*kept, do_BTNH)))


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
    core = partial(cudnn_attention, None)
    try:
        jax.jit(jax.grad(lambda x: core(x, x, x).astype(jnp.float32).sum())).lower(x_BTNH).compile()
    except Exception as error:  # the compiler's, the plugin's and cuDNN's own have no type in common
        return reason_of(error)
    return None
