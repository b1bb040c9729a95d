"""The decoder of Llama, Mistral and Qwen: RMSNorm, rotary positions, grouped attention, SwiGLU, no learned positions.

One class; what tells the families apart are its fields (`jaxdist.models.huggingface` sets them from a config.json).
"""

import math
from dataclasses import dataclass

import jax
from flax import nnx

from jaxdist.errors import ConfigError, divisors, require_positive, require_within
from jaxdist.models.context import Context
from jaxdist.models.declared import BOUNDS
from jaxdist.models.experts import Mixture, MixtureOfExperts
from jaxdist.models.flax import INIT_STD, LanguageModel, ShardedParam, normal, stack_layers
from jaxdist.models.layers import GatedMLP, GroupedAttention, RMSNorm, Rotary, Transformer
from jaxdist.params import mask_rows

FULL, SLIDING, DENSE = "full", "sliding", "dense"  # kinds of layers: what a query sees of the positions before it


@dataclass(frozen=True)
class DecoderConfig(Transformer, Mixture):
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
        require_within("rope_theta", self.rope_theta, 1e-30, 1e30, "Use 10000")
        require_within("norm_eps", self.norm_eps, 0, 1e6, "Use 1e-5")
        kind, *numbers = self.rope_scaling or (None,)
        known = (kind, len(numbers)) in ((None, 0), ("linear", 1), ("llama3", 4))
        if not known or not all(0 < n < math.inf for n in numbers) or (kind == "llama3" and numbers[1] >= numbers[2]):
            raise ConfigError(
                f"rope_scaling={self.rope_scaling}",
                "must be (), ('linear', factor), or ('llama3', factor, low_freq_factor, high_freq_factor, "
                "original_max_position_embeddings), of numbers above 0, the third below the fourth",
                "Use ()",
            )
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

    def module(self, rngs: nnx.Rngs) -> "Decoder":
        return Decoder(self, rngs)


class Layer(nnx.Module):
    def __init__(self, config: DecoderConfig, kind: str, rngs: nnx.Rngs):
        out_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.attention_norm = RMSNorm(config.width, config.norm_eps)
        self.attention = GroupedAttention(
            rngs,
            width=config.width,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            rotary=Rotary(config.head_dim, config.rope_theta, config.rope_scaling),
            out_std=out_std,
            bias=config.attention_bias,
            out_bias=config.out_bias,
            qk_norm=config.norm_eps if config.qk_norm else None,
            window=config.window if kind == SLIDING else None,
        )
        self.mlp_norm = RMSNorm(config.width, config.norm_eps)
        if config.num_experts and kind != DENSE:
            self.mlp = MixtureOfExperts(rngs, config.width, config, out_std)
        else:
            self.mlp = GatedMLP(
                rngs, width=config.width, ffn_width=config.ffn_width, out_std=out_std, bias=config.mlp_bias
            )

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), ctx)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD), ctx)


class Decoder(LanguageModel):
    """The whole model: the token table, the layers, the last norm, and the head where it is not the table."""

    def __init__(self, config: DecoderConfig, rngs: nnx.Rngs):
        self.config = config
        for name in ("tokens",) if config.tied else ("tokens", "head"):
            table_VD = mask_rows(normal(rngs, (config.padded_vocab_size, config.width)), config.vocab_size)
            setattr(self, name, ShardedParam(table_VD, ("vocab", "embed"), real=config.vocab_size))
        self.norm = RMSNorm(config.width, config.norm_eps)
        self.blocks = stack_layers(config, lambda rngs, kind: Layer(config, kind, rngs), rngs)

    def embed(self, tokens_BT: jax.Array, ctx: Context) -> jax.Array:
        return ctx.embedding(tokens_BT, self.tokens[...])

    def unembed(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        table = self.tokens if self.config.tied else self.head
        return ctx.final_norm(self.norm)(x_BTD), table[...]
