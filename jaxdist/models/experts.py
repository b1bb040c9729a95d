"""A layer's feed-forward as a mixture of experts: a router, the experts it chooses for each token, and shared ones.

Dims: B batch, T sequence, D model, E experts, K chosen for a token, F an expert's width.
"""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from jaxdist.errors import ConfigError, require_positive
from jaxdist.models.context import Context
from jaxdist.models.flax import parameter
from jaxdist.models.layers import INIT_STD, GatedMLP, normal
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.parallel.remat import mark_saveable


@dataclass(frozen=True)
class Mixture:
    """What a mixture of experts is. Sources: Mixtral (arXiv 2401.04088), DeepSeek-V3 (2412.19437, section 2.1.2).

    num_experts: of which a token chooses `top_k`, each of `width`. score: of an expert, the softmax over all of them or
    a sigmoid each. normalised: whether a token's weights, the scores of what it chose, are divided by their sum. scale:
    a factor of them. shared_width: of a feed-forward that all tokens use; 0 for none.

    capacity: None drops nothing. Otherwise an expert takes at most `capacity` times its even share of each sequence,
    T * K / E, rounded up: first choices first, in the order of positions (`jaxdist.parallel.expert_parallel`).
    balance_loss, z_loss: factors of the two auxiliary losses of `Router`.
    """

    num_experts: int
    top_k: int
    width: int
    score: str = "softmax"
    normalised: bool = True
    scale: float = 1.0
    shared_width: int = 0
    capacity: float | None = None
    balance_loss: float = 0.0
    z_loss: float = 0.0

    def __post_init__(self):
        for name in ("num_experts", "top_k", "width"):
            require_positive(name, getattr(self, name))
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} with num_experts={self.num_experts}",
                "a token chooses among the experts there are",
                f"Use top_k up to {self.num_experts}",
            )
        if self.score not in ("softmax", "sigmoid"):
            raise ConfigError(f"score={self.score!r}", "it is softmax or sigmoid", "Use score='softmax'")

    def slots(self, seq_len: int) -> int | None:
        """Tokens of one sequence that an expert takes at most; None for all.

        Raises: ConfigError where that is less than one.
        """
        if self.capacity is None:
            return None
        share = self.capacity * seq_len * self.top_k / self.num_experts
        if not 1 <= share < math.inf:
            raise ConfigError(
                f"capacity={self.capacity}",
                f"of a sequence of {seq_len} an expert would take {share:.3g} tokens, and it is to take one at least",
                f"Use capacity={self.num_experts / seq_len / self.top_k:.3g} or more, or none to drop nothing",
            )
        return min(math.ceil(share), seq_len)

    @property
    def active_share(self) -> float:
        """The part of the experts' parameters that a token uses."""
        return self.top_k / self.num_experts


class Router(nnx.Module):
    """Scores of the experts for each token, in at least fp32, of which the highest count; ties go to the first expert.

    Its auxiliary losses are sums over this micro-batch's tokens, as the loss is, so that no mesh changes them:
    - z-loss: the square of the logits' logsumexp, of every token (arXiv 2202.08906, equation 5);
    - balance loss: T times sum_e f_e P_e of every *sequence*, with f_e = E / (K T) times the choices of expert e, and
      P_e the mean over the sequence of its score's share of the token's scores (DeepSeek-V3, equations 17 to 20). It is
      T where all experts get the same. Means over a batch would be a product of means, which depends on how the batch
      is cut.
    """

    def __init__(self, rngs: nnx.Rngs, width: int, mixture: Mixture):
        self.mixture = mixture
        self.w = parameter(normal(rngs, (width, mixture.num_experts)), ("embed", None))

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x -> (x with the auxiliary losses, expert[B, T, K], weight[B, T, K])."""
        mixture = self.mixture
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTE = ctx.observe("router", x_BTD.astype(wide) @ self.w[...].astype(wide))
        scores_BTE = jax.nn.softmax(logits_BTE) if mixture.score == "softmax" else jax.nn.sigmoid(logits_BTE)
        _, expert_BTK = lax.top_k(lax.stop_gradient(scores_BTE), mixture.top_k)
        weight_BTK = jnp.take_along_axis(scores_BTE, expert_BTK, axis=-1)
        if mixture.normalised:
            weight_BTK = weight_BTK / weight_BTK.sum(-1, keepdims=True)
        if mixture.z_loss:
            z = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)).sum()
            x_BTD = ctx.add_loss(x_BTD, mixture.z_loss * z)
        if mixture.balance_loss:
            x_BTD = ctx.add_loss(x_BTD, mixture.balance_loss * self.balance(scores_BTE, expert_BTK, ctx))
        return x_BTD, expert_BTK, weight_BTK * mixture.scale

    def balance(self, scores_BTE: jax.Array, expert_BTK: jax.Array, ctx: Context) -> jax.Array:
        """The balance loss, summed over sequences; equal on the ranks that share them."""
        num_experts, top_k = self.mixture.num_experts, self.mixture.top_k
        share_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
        chosen_BE = jax.nn.one_hot(expert_BTK, num_experts, dtype=scores_BTE.dtype).sum((1, 2))
        chosen_BE, share_BE = ctx.sum_over_sequence(chosen_BE), ctx.sum_over_sequence(share_BTE.sum(1))
        length = ctx.sequence_ranks * scores_BTE.shape[1]
        return num_experts / top_k / length * jnp.sum(chosen_BE * share_BE)


class MixtureOfExperts(nnx.Module):
    """x[B, T, D] -> router -> enter -> experts, split over ep and their width over tp -> {U_tp} -> leave -> y[B, T, D],
    and the shared feed-forward beside them."""

    def __init__(self, rngs: nnx.Rngs, width: int, mixture: Mixture, out_std: float):
        self.mixture = mixture
        num, inner = mixture.num_experts, mixture.width
        self.router = Router(rngs, width, mixture)
        for name in ("gate", "up"):
            w_EDF = normal(rngs, (num, width, inner), INIT_STD)
            setattr(self, f"w_{name}", parameter(w_EDF, ("experts", "embed", "ffn")))
        self.w_down = parameter(normal(rngs, (num, inner, width), out_std), ("experts", "ffn", "embed"))
        if mixture.shared_width:
            self.shared = GatedMLP(rngs, width=width, ffn_width=mixture.shared_width, out_std=out_std)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        x_BTD, expert_BTK, weight_BTK = self.router(x_BTD, ctx)
        # Where text is generated a step has a token or two, and nothing is dropped.
        slots = None if ctx.cache is not None else self.mixture.slots(ctx.sequence_ranks * x_BTD.shape[1])
        y_BTD = ctx.mixture(self.experts, x_BTD, expert_BTK, weight_BTK, self.mixture.num_experts, slots)
        return y_BTD + self.shared(x_BTD, ctx) if self.mixture.shared_width else y_BTD

    def experts(self, rows_ND: jax.Array, counts_E: jax.Array | None) -> jax.Array:
        gate, up, down = (w[...] for w in (self.w_gate, self.w_up, self.w_down))
        if counts_E is None:
            rows_END = rows_ND.reshape(len(gate), -1, rows_ND.shape[-1])
            gate_ENF, up_ENF = (mark_saveable(jnp.einsum("end,edf->enf", rows_END, w)) for w in (gate, up))
            return jnp.einsum("enf,efd->end", jax.nn.silu(gate_ENF) * up_ENF, down).reshape(rows_ND.shape)
        gate_NF, up_NF = (mark_saveable(grouped_matmul(rows_ND, w, counts_E)) for w in (gate, up))
        return grouped_matmul(jax.nn.silu(gate_NF) * up_NF, down, counts_E)
