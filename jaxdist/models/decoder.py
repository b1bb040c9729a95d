"""The decoder of Llama, Mistral and Qwen: RMSNorm, rotary positions, grouped attention, SwiGLU, no learned positions.

One class; what tells the families apart are its fields (`jaxdist.models.huggingface` sets them from a config.json).
"""

import math
from dataclasses import dataclass

import jax
from flax import nnx

from jaxdist.errors import ConfigError, divisors, require_positive
from jaxdist.models.base import BOUNDS
from jaxdist.models.context import Batch, Context
from jaxdist.models.experts import Mixture, MixtureOfExperts
from jaxdist.models.flax import parameter
from jaxdist.models.layers import INIT_STD, GatedMLP, GroupedAttention, RMSNorm, Rotary, Transformer, normal
from jaxdist.params import Tree, mask_rows

FULL, SLIDING, DENSE = "full", "sliding", "dense"  # kinds of layers: what a query sees of the positions before it


@dataclass(frozen=True)
class Decoder(Transformer, Mixture):
    """Sizes in elements. Source: Llama 3 (arXiv 2407.21783), Mistral 7B (2310.06825), Qwen3 (2505.09388).

    num_kv_heads: heads of keys and values; it divides `num_heads`. rope_scaling: as `Rotary.scaling`. qk_norm: whether
    queries and keys are normed. tied: whether the token table is the head too. window: of layers of kind "sliding".
    With experts (`Mixture`) these are every layer's feed-forward but that of kind "dense", which has all positions.
    """

    num_layers: int
    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_width: int
    seq_len: int
    vocab_size: int
    rope_theta: float = 10_000.0
    rope_scaling: tuple = ()
    norm_eps: float = 1e-5
    qk_norm: bool = False
    attention_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    tied: bool = False
    window: int | None = None
    kinds: tuple[str, ...] = (FULL,)

    def __post_init__(self):
        for name, most in BOUNDS.items():
            require_positive(name, getattr(self, name), most)
        for name in ("num_kv_heads", "head_dim"):
            require_positive(name, getattr(self, name), BOUNDS["num_heads"])
        if self.num_heads % self.num_kv_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} with num_kv_heads={self.num_kv_heads}",
                "each head of keys must serve as many query heads",
                f"Use num_kv_heads in {divisors(self.num_heads)}",
            )
        if self.head_dim % 2:
            raise ConfigError(
                f"head_dim={self.head_dim}",
                "the halves of a head are rotated, so it must be even",
                "Use an even number",
            )
        if (SLIDING in self.kinds) != (self.window is not None) or not {*self.kinds} <= {FULL, SLIDING, DENSE}:
            raise ConfigError(
                f"kinds={self.kinds} with window={self.window}",
                f"layers must be {FULL}, {SLIDING} or {DENSE}, with a window exactly where some are {SLIDING}",
                "Give a window and sliding layers, or neither",
            )
        if DENSE in self.kinds and not self.num_experts:
            required = f"layers called {DENSE} must be among layers with experts: without experts every layer is dense"
            raise ConfigError(f"kinds={self.kinds}", required, f"Use {FULL}, or add num_experts=8")
        if self.window is not None:
            require_positive("window", self.window)
        self.check_mixture()
        self.slots(self.seq_len)

    @property
    def split_widths(self) -> dict[str, int]:
        dense = {} if self.num_experts and DENSE not in self.kinds else super().split_widths
        experts = {"expert_width": self.width_of_expert} if self.num_experts else {}
        return dense | experts | ({"shared_width": self.shared_width} if self.shared_width else {})

    def describe(self) -> str:
        experts = f", {self.num_experts} experts, {self.top_k} a token" if self.num_experts else ""
        return super().describe() + experts

    # ---- parameters ----

    def outer_module(self, rngs: nnx.Rngs) -> nnx.Module:
        return Outer(self, rngs)

    def layer_module(self, rngs: nnx.Rngs, kind: str) -> nnx.Module:
        return Layer(self, kind, rngs)

    # ---- the forward, on local shards ----

    def embed(self, ctx: Context, outer: Tree, batch: Batch) -> jax.Array:
        return ctx.embedding(batch.inputs, outer["tokens"])

    def layer(self, ctx: Context, kind: str, params: Tree, x_BTD: jax.Array, index: jax.Array) -> jax.Array:
        return self.merge(self.layer_module, params, kind)(x_BTD, ctx)

    def head(self, ctx: Context, outer: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        norm = self.merge(self.outer_module, outer).norm
        return ctx.final_norm(norm)(x_BTD), outer["tokens" if self.tied else "head"]


class Outer(nnx.Module):
    """The token table, the last norm, and the head where it is not the table."""

    def __init__(self, model: Decoder, rngs: nnx.Rngs):
        for name in ("tokens",) if model.tied else ("tokens", "head"):
            table_VD = mask_rows(normal(rngs, (model.padded_vocab_size, model.width)), model.vocab_size)
            setattr(self, name, parameter(table_VD, ("vocab", "embed"), real=model.vocab_size))
        self.norm = RMSNorm(model.width, model.norm_eps)


class Layer(nnx.Module):
    def __init__(self, model: Decoder, kind: str, rngs: nnx.Rngs):
        out_std = INIT_STD / math.sqrt(2 * model.num_layers)
        self.attention_norm = RMSNorm(model.width, model.norm_eps)
        self.attention = GroupedAttention(
            rngs,
            width=model.width,
            num_heads=model.num_heads,
            num_kv_heads=model.num_kv_heads,
            rotary=Rotary(model.head_dim, model.rope_theta, model.rope_scaling),
            out_std=out_std,
            bias=model.attention_bias,
            out_bias=model.out_bias,
            qk_norm=model.norm_eps if model.qk_norm else None,
            window=model.window if kind == SLIDING else None,
        )
        self.mlp_norm = RMSNorm(model.width, model.norm_eps)
        if model.num_experts and kind != DENSE:
            self.mlp = MixtureOfExperts(rngs, model.width, model, out_std)
        else:
            self.mlp = GatedMLP(
                rngs, width=model.width, ffn_width=model.ffn_width, out_std=out_std, bias=model.mlp_bias
            )

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), ctx)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD), ctx)
