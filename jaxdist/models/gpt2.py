"""GPT-2 in Flax NNX: modules declare parameters at global shape; the forward runs on whatever shards it is given.

Dims: B batch in a micro-batch, T sequence, D model, N heads, H head dim, F feed-forward, V padded vocabulary, L layers.
Letters are logical dims even for a shard. Source: Radford et al. 2019 (pre-LayerNorm, learned positions, tanh-GELU,
tied head); residual projections are initialised with std 0.02 / sqrt(2 L).
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.errors import ConfigError, divisors, require_positive
from jaxdist.models.attention import attend
from jaxdist.models.base import BOUNDS
from jaxdist.models.context import Context
from jaxdist.models.flax import INIT_STD, LanguageModel, ShardedParam, normal, stack_layers
from jaxdist.models.layers import Transformer, add_bias
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.remat import HEADS, mark_saveable
from jaxdist.params import mask_rows

LAYER_NORM_EPS = 1e-5


@dataclass(frozen=True)
class GPT2Config(Transformer):
    """The shape of a GPT-2 (Radford et al. 2019): sizes in elements, dropout as a probability."""

    num_layers: int
    width: int
    num_heads: int
    ffn_width: int
    seq_len: int
    vocab_size: int
    dropout: float = 0.0

    def __post_init__(self):
        for name, most in BOUNDS.items():
            require_positive(name, getattr(self, name), most)
        if self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} with num_heads={self.num_heads}",
                "each head holds width/num_heads columns, which must be whole",
                f"Use num_heads in {divisors(self.width)}",
            )
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout={self.dropout}", "must be a probability, at least 0 and below 1", "Use 0.1")

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    def module(self, rngs: nnx.Rngs) -> "GPT2":
        return GPT2(self, rngs)


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


class LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = ShardedParam(jnp.ones(width), ("embed",), mean=1.0)
        self.bias = ShardedParam(jnp.zeros(width), ("embed",))

    def __call__(self, x_BTD: jax.Array, one_pass: bool = False) -> jax.Array:
        scale_D, bias_D = (comm.varying_like(each[...], x_BTD) for each in (self.scale, self.bias))
        return layer_norm(one_pass, x_BTD, scale_D, bias_D)


class Attention(nnx.Module):
    """Causal self-attention, heads split over tp: column-parallel fused QKV, row-parallel projection.

    Layout: x[B, T, D] -> enter -> qkv[B, T, 3, N_tp, H] -> o[B, T, N_tp, H] -> {U_tp} -> leave -> y[B, T, D].
    """

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        width, heads, head_dim = config.width, config.num_heads, config.head_dim
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.dropout = config.dropout
        self.w_qkv = ShardedParam(normal(rngs, (width, 3, heads, head_dim)), ("embed", None, "heads", None))
        self.b_qkv = ShardedParam(jnp.zeros((3, heads, head_dim)), (None, "heads", None), decay=False)
        self.w_out = ShardedParam(normal(rngs, (heads, head_dim, width), residual_std), ("heads", None, "embed"))
        self.b_out = ShardedParam(jnp.zeros(width), ("embed",))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        qkv = add_bias(ctx.column_parallel(x_BTD, self.w_qkv[...]), self.b_qkv[...])
        # Kept as they are read, and not as one product, of which backward would copy the parts again.
        q, k, v = (mark_saveable(qkv[:, :, part], HEADS) for part in range(3))
        o_BTNH = attend(ctx, q, k, v, rate=self.dropout)
        batch, length, heads, head_dim = o_BTNH.shape
        w_ND = self.w_out[...].reshape(heads * head_dim, -1)
        return add_bias(ctx.row_parallel(o_BTNH.reshape(batch, length, -1), w_ND), self.b_out[...])


class MLP(nnx.Module):
    """Column-parallel up, tanh-GELU, row-parallel down.

    Layout: x[B, T, D] -> enter -> h[B, T, F_tp] -> {U_tp} -> leave -> y[B, T, D].
    """

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        width, ffn_width = config.width, config.ffn_width
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.w_up = ShardedParam(normal(rngs, (width, ffn_width)), ("embed", "ffn"))
        self.b_up = ShardedParam(jnp.zeros(ffn_width), ("ffn",))
        self.w_down = ShardedParam(normal(rngs, (ffn_width, width), residual_std), ("ffn", "embed"))
        self.b_down = ShardedParam(jnp.zeros(width), ("embed",))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        up_BTF = add_bias(ctx.column_parallel(x_BTD, self.w_up[...]), self.b_up[...])
        h_BTF = gelu_tanh(up_BTF)
        return add_bias(ctx.row_parallel(h_BTF, self.w_down[...]), self.b_down[...])


class Block(nnx.Module):
    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.dropout = config.dropout
        self.ln_attention = LayerNorm(config.width)
        self.attention = Attention(config, rngs)
        self.ln_mlp = LayerNorm(config.width)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        attended_BTD = self.attention(self.ln_attention(x_BTD, ctx.on_gpu), ctx.at(0))
        x_BTD = x_BTD + ctx.at(1).dropout(attended_BTD, self.dropout)
        return x_BTD + ctx.at(2).dropout(self.mlp(self.ln_mlp(x_BTD, ctx.on_gpu), ctx), self.dropout)


class GPT2(LanguageModel):
    """The whole model: the tied token table, the learned positions, the layers and the last norm."""

    def __init__(self, config: GPT2Config, rngs: nnx.Rngs):
        self.config = config
        table_VD = mask_rows(normal(rngs, (config.padded_vocab_size, config.width)), config.vocab_size)
        self.tokens = ShardedParam(table_VD, ("vocab", "embed"), real=config.vocab_size)
        self.positions = ShardedParam(normal(rngs, (config.seq_len, config.width)), (None, "embed"))
        self.ln_final = LayerNorm(config.width)
        self.blocks = stack_layers(config, lambda rngs, kind: Block(config, rngs), rngs)

    def embed(self, tokens_BT: jax.Array, ctx: Context) -> jax.Array:
        x_BTD = ctx.embedding(tokens_BT, self.tokens[...])
        positions_TD = ctx.position_rows(self.positions[...], x_BTD.shape[1])
        return ctx.dropout(add_bias(x_BTD, positions_TD), self.config.dropout)

    def unembed(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        norm = partial(self.ln_final, one_pass=ctx.on_gpu)
        return ctx.final_norm(norm)(x_BTD), self.tokens[...]
