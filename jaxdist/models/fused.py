"""Elementwise steps and norms whose gradients are written out, so that compilers make few passes of them."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel.remat import mark_saveable

LAYER_NORM_EPS = 1e-5


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, over the leading dims of x. The bias's gradient is summed in at least fp32, and rounded once."""
    wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return x + jnp.broadcast_to(wide, x.shape).astype(bias.dtype)


GELU_SCALE, GELU_CUBE = math.sqrt(2 / math.pi), 0.044715


@jax.custom_vjp
def gelu_tanh(x: jax.Array) -> jax.Array:
    """0.5x(1 + tanh(z)), z = sqrt(2/pi)(x + 0.044715x^3); any shape.

    Its gradient is computed in at least fp32, and with sigmoid(2z) = (1 + tanh(z)) / 2, not with the tanh of forward:
    XLA makes one kernel of it, the bias's sum and the activation that backward needs again, where it would write a
    shared tanh to memory.
    Source: arXiv 1606.08415, section 2.
    """
    return jax.nn.gelu(x, approximate=True)


def _gelu_backward(x: jax.Array, d: jax.Array) -> tuple[jax.Array]:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    gate = jax.nn.sigmoid(2 * GELU_SCALE * (wide + GELU_CUBE * wide**3))
    slope = gate + 2 * wide * gate * (1 - gate) * GELU_SCALE * (1 + 3 * GELU_CUBE * wide**2)
    return ((d * slope).astype(x.dtype),)


# Forward is not `gelu_tanh` itself, whose result remat would keep.
gelu_tanh.defvjp(lambda x: (jax.nn.gelu(x, approximate=True), x), _gelu_backward)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def layer_norm(one_pass: bool, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> jax.Array:
    """(x - mean) / sqrt(variance + eps) * scale + bias over the last dim of x[..., D], in at least fp32.

    In bfloat16 both statistics are of one pass over x: x itself is rounded by more than E[x^2] - E[x]^2 cancels.
    one_pass: one reduction makes the gradients of scale and bias, for which a GPU reads x once; XLA:CPU takes longer
    for it than for two. Source: arXiv 1607.06450.
    """
    return _layer_norm_forward(one_pass, x, scale_D, bias_D)[0]


def _layer_norm_forward(one_pass: bool, x: jax.Array, scale_D: jax.Array, bias_D: jax.Array) -> tuple:
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = wide.mean(-1, keepdims=True)
    if x.dtype == jnp.bfloat16:
        variance = jnp.maximum(jnp.square(wide).mean(-1, keepdims=True) - jnp.square(mean), 0)
    else:
        variance = jnp.square(wide - mean).mean(-1, keepdims=True)
    shrink = mark_saveable(lax.rsqrt(variance + LAYER_NORM_EPS))
    normed = (wide - mark_saveable(mean)) * shrink
    return (normed * scale_D + bias_D).astype(x.dtype), (normed, shrink, scale_D)


def _layer_norm_backward(one_pass: bool, kept: tuple, d: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    normed, shrink, scale_D = kept
    d_wide = d.astype(normed.dtype)
    rows, zero = tuple(range(d.ndim - 1)), jnp.zeros((), normed.dtype)
    if one_pass:
        d_scale_D, d_bias_D = lax.reduce(
            (d_wide * normed, d_wide), (zero, zero), lambda some, more: (some[0] + more[0], some[1] + more[1]), rows
        )
    else:
        d_scale_D, d_bias_D = (d_wide * normed).sum(rows), d_wide.sum(rows)
    d_normed = d_wide * scale_D
    along = (d_normed * normed).mean(-1, keepdims=True)
    dx = shrink * (d_normed - d_normed.mean(-1, keepdims=True) - normed * along)
    return dx.astype(d.dtype), d_scale_D.astype(scale_D.dtype), d_bias_D.astype(scale_D.dtype)


layer_norm.defvjp(_layer_norm_forward, _layer_norm_backward)
