"""Layers of which today's decoders are made: norms, rotary positions, grouped attention, gated feed-forward.

They declare parameters at global shape and run on whatever shards they are given. Dims: B batch, T sequence, D model,
N query heads, K key and value heads, H head dim, F feed-forward.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

from jaxdist.errors import ConfigError, divisors
from jaxdist.models.attention import attend
from jaxdist.models.attention_choice import attention_on_device
from jaxdist.models.context import Context
from jaxdist.models.flax import ShardedParam, normal
from jaxdist.models.flax_model import FlaxModel
from jaxdist.models.fused import add_bias
from jaxdist.parallel.kv_heads import heads_of_queries
from jaxdist.parallel.remat import HEADS, mark_saveable
from jaxdist.strategy import ParallelConfig


class Transformer(FlaxModel):
    """What the models of these layers have in common: heads and a feed-forward that tp splits, a padded vocabulary."""

    width: int
    num_heads: int
    ffn_width: int
    splits_sequence = True

    @property
    def padded_vocab_size(self) -> int:
        """The vocabulary rounded up so that every tp divides it: tp divides the heads, so lcm(128, heads) does."""
        multiple = math.lcm(128, self.num_heads)
        return -(-self.vocab_size // multiple) * multiple

    @property
    def split_widths(self) -> dict[str, int]:
        """The feed-forward's widths, which tp splits, by name."""
        return {"ffn_width": self.ffn_width}

    def describe(self) -> str:
        return f"{self.num_layers} layers, width {self.width}, context {self.seq_len}"

    def check(self, parallel: ParallelConfig) -> None:
        tp = parallel.mesh.tp
        split = {"num_heads": self.num_heads, **self.split_widths}
        if parallel.experts_over_tp:
            split.pop("expert_width", None)
        for name, sized in split.items():
            if sized % tp:
                raise ConfigError(
                    f"{name}={sized} cannot be split over tp={tp}",
                    f"{name} must divide by tp: each rank holds an equal part",
                    f"Use tp in {divisors(math.gcd(*split.values()))}",
                )
        self._check_context(parallel)

    def _check_context(self, parallel: ParallelConfig) -> None:
        cp, (exchanging, _) = parallel.mesh.cp, parallel.cp_split
        heads, kv_heads = (
            n // parallel.mesh.tp for n in (self.num_heads, getattr(self, "num_kv_heads", self.num_heads))
        )
        kv_heads = max(kv_heads, 1)
        if heads % exchanging or (kv_heads % exchanging and exchanging % kv_heads):
            raise ConfigError(
                f"cp_kind={parallel.cp_kind} with {heads} query heads and {kv_heads} key heads on a tp rank",
                f"each of {exchanging} ranks must take an equal part of the heads",
                "Use cp_kind='ring', or usp-U with a U that divides them",
            )
        if self.dropout and cp > exchanging:
            raise ConfigError(
                f"dropout={self.dropout} with cp_kind={parallel.cp_kind}",
                "must be 0: attention's weights are made in blocks, which drop none",
                "Use cp_kind='ulysses', or dropout=0",
            )

    def attention_for(self, asked: str, platform: str, dtype: str, *, training: bool, device=None) -> str:
        dropped = training and self.dropout > 0
        return attention_on_device(
            asked, platform, dtype, device, seq_len=self.seq_len, head_dim=self.head_dim, dropout=dropped
        )


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dim, in at least fp32. Source: arXiv 1910.07467.

    partial: as in `jaxdist.params.Param`, of a scale that each head applies.
    """

    def __init__(self, width: int, eps: float, dim: str | None = "embed", partial: tuple[str, ...] = ()):
        self.eps = eps
        self.scale = ShardedParam(jnp.ones(width), (dim,), mean=1.0, partial=partial)

    def __call__(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        normed = wide * mark_saveable(lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + self.eps))
        return (normed * self.scale[...]).astype(x.dtype)


class Rotary(NamedTuple):
    """Rotary positions (arXiv 2104.09864): the halves of a head are rotated against each other.

    theta: the base of the frequencies. scaling: () for none, ("linear", factor), or ("llama3", factor, low_freq_factor,
    high_freq_factor, original_max_position_embeddings): long waves slowed down by `factor`, short ones kept, those
    between them blended. Source: `rope_scaling` of Llama 3.1's config.json.
    """

    head_dim: int
    theta: float = 10_000.0
    scaling: tuple = ()

    def frequencies(self) -> np.ndarray:
        """Radians a position, of each pair of a head's elements, in float64: [H / 2]."""
        plain = self.theta ** -(np.arange(0, self.head_dim, 2) / self.head_dim)
        if not self.scaling:
            return plain
        kind, factor, *bounds = self.scaling
        if kind == "linear":
            return plain / factor
        low, high, original = bounds
        kept = np.clip((original * plain / (2 * math.pi) - low) / (high - low), 0, 1)
        return kept * plain + (1 - kept) * plain / factor

    def __call__(self, x_BTNH: jax.Array, positions_T: jax.Array) -> jax.Array:
        """positions: [T], or [B, T] where rows differ. Computed in at least fp32."""
        dtype = jnp.promote_types(x_BTNH.dtype, jnp.float32)
        angle = (positions_T[..., None].astype(dtype) * self.frequencies().astype(dtype))[..., None, None, :]
        signs = np.array([[-1], [1]], dtype)
        # Elementwise, and nothing put together: backward then keeps x alone.
        halves = x_BTNH.reshape(*x_BTNH.shape[:-1], 2, -1).astype(dtype)
        rotated = halves * jnp.cos(angle) + jnp.flip(halves, -2) * (signs * jnp.sin(angle))
        return rotated.reshape(x_BTNH.shape).astype(x_BTNH.dtype)


class GroupedAttention(nnx.Module):
    """Causal attention in which groups of query heads share a key's and a value's head (arXiv 2305.13245).

    Query heads are split over tp. So are key and value heads where tp divides them; elsewhere every rank holds all, and
    computes those that its queries use. Layout: x[B, T, D] -> enter -> q[B, T, N_tp, H], k, v[B, T, K', H] ->
    o[B, T, N_tp, H] -> {U_tp} -> leave -> y[B, T, D].

    Args: bias, out_bias: whether q, k and v, and the output, have one. qk_norm: the eps of an RMSNorm of each query and
    key over H, before they are rotated; None for none. window: as in `attention_core`.
    """

    def __init__(
        self,
        rngs: nnx.Rngs,
        *,
        width: int,
        num_heads: int,
        num_kv_heads: int,
        rotary: Rotary,
        out_std: float,
        bias: bool,
        out_bias: bool,
        qk_norm: float | None,
        window: int | None,
    ):
        self.rotary, self.num_heads, self.num_kv_heads, self.window = rotary, num_heads, num_kv_heads, window
        head_dim = rotary.head_dim
        sizes = {"q": ("heads", num_heads), "k": ("kv_heads", num_kv_heads), "v": ("kv_heads", num_kv_heads)}
        for name, (dim, heads) in sizes.items():
            w_DNH = normal(rngs, (width, heads, head_dim))
            setattr(self, f"w_{name}", ShardedParam(w_DNH, ("embed", dim, None), matrix=("in", "out", "out")))
            if bias:
                b_NH = jnp.zeros((heads, head_dim))
                setattr(self, f"b_{name}", ShardedParam(b_NH, (dim, None), decay=False, matrix=()))
        self.w_out = ShardedParam(
            normal(rngs, (num_heads, head_dim, width), out_std), ("heads", None, "embed"), matrix=("in", "in", "out")
        )
        self.b_out = ShardedParam(jnp.zeros(width), ("embed",)) if out_bias else None
        self.qk_norm = qk_norm is not None
        if qk_norm is not None:
            self.q_norm, self.k_norm = (RMSNorm(head_dim, qk_norm, None, partial=("heads",)) for _ in "qk")

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        heads = heads_of_queries(self.w_q.shape[1], self.num_heads, self.num_kv_heads)
        weights = [self.w_q[...], heads.pick(self.w_k[...], 1), heads.pick(self.w_v[...], 1)]
        q, k, v = ctx.column_parallel(x_BTD, *weights)
        if hasattr(self, "b_q"):
            q = add_bias(q, self.b_q[...])
            k, v = (add_bias(y, heads.pick(b[...], 0)) for y, b in ((k, self.b_k), (v, self.b_v)))
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        positions = ctx.whole_positions(q.shape[1])
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        if not self.qk_norm:  # whose gradient needs the products; otherwise these are kept in their place
            q, k, v = (mark_saveable(each, HEADS) for each in (q, k, v))
        o_BTNH = attend(ctx, q, heads.of_each_query(k), heads.of_each_query(v), window=self.window)
        w_FD = self.w_out[...].reshape(-1, x_BTD.shape[-1])
        y_BTD = ctx.row_parallel(o_BTNH.reshape(*o_BTNH.shape[:2], -1), w_FD)
        return y_BTD if self.b_out is None else add_bias(y_BTD, self.b_out[...])


class GatedMLP(nnx.Module):
    """Column-parallel gate and up, silu(gate) * up, row-parallel down. Source: SwiGLU, arXiv 2002.05202.

    Layout: x[B, T, D] -> enter -> h[B, T, F_tp] -> {U_tp} -> leave -> y[B, T, D].
    """

    def __init__(self, rngs: nnx.Rngs, *, width: int, ffn_width: int, out_std: float, bias: bool = False):
        for name in ("gate", "up"):
            setattr(self, f"w_{name}", ShardedParam(normal(rngs, (width, ffn_width)), ("embed", "ffn")))
            if bias:
                setattr(self, f"b_{name}", ShardedParam(jnp.zeros(ffn_width), ("ffn",)))
        self.w_down = ShardedParam(normal(rngs, (ffn_width, width), out_std), ("ffn", "embed"))
        self.b_down = ShardedParam(jnp.zeros(width), ("embed",)) if bias else None

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        gate_BTF, up_BTF = ctx.column_parallel(x_BTD, self.w_gate[...], self.w_up[...])
        if self.b_down is not None:
            gate_BTF, up_BTF = add_bias(gate_BTF, self.b_gate[...]), add_bias(up_BTF, self.b_up[...])
        y_BTD = ctx.row_parallel(jax.nn.silu(gate_BTF) * up_BTF, self.w_down[...])
        return y_BTD if self.b_down is None else add_bias(y_BTD, self.b_down[...])
