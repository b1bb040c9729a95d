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

from jaxdist.errors import ConfigError, divisors, require_positive
from jaxdist.models.attention import attend
from jaxdist.models.context import Context
from jaxdist.models.declared import BOUNDS
from jaxdist.models.flax import INIT_STD, LanguageModel, ShardedParam, normal, stack_layers
from jaxdist.models.fused import add_bias, gelu_tanh, layer_norm
from jaxdist.models.layers import Transformer
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.remat import HEADS, mark_saveable
from jaxdist.params import mask_rows


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
        self.w_qkv = ShardedParam(
            normal(rngs, (width, 3, heads, head_dim)), ("embed", None, "heads", None), matrix=("in", None, "out", "out")
        )
        self.b_qkv = ShardedParam(jnp.zeros((3, heads, head_dim)), (None, "heads", None), decay=False, matrix=())
        self.w_out = ShardedParam(
            normal(rngs, (heads, head_dim, width), residual_std), ("heads", None, "embed"), matrix=("in", "in", "out")
        )
        self.b_out = ShardedParam(jnp.zeros(width), ("embed",))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        qkv = add_bias(ctx.column_parallel(x_BTD, self.w_qkv[...]), self.b_qkv[...])
        # Kept as they are read, and not as one product, of which backward would copy the parts again.
        q, k, v = (mark_saveable(qkv[:, :, part], HEADS) for part in range(3))
        o_BTNH = attend(ctx, q, k, v, rate=self.dropout)
        batch, length, heads, head_dim = o_BTNH.shape
        w_FD = self.w_out[...].reshape(heads * head_dim, -1)
        return add_bias(ctx.row_parallel(o_BTNH.reshape(batch, length, -1), w_FD), self.b_out[...])


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
        positions = ctx.position_rows(self.positions[...], x_BTD.shape[1])
        return ctx.dropout(add_bias(x_BTD, positions), self.config.dropout)

    def unembed(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        norm = partial(self.ln_final, one_pass=ctx.on_gpu)
        return ctx.final_norm(norm)(x_BTD), self.tokens[...]
