"""A layer's feed-forward as a mixture of experts: a router, the experts it chooses for each token, and shared ones.

Dims: B batch, T sequence, D model, E experts, K chosen for a token, F an expert's width.
"""

import math
from dataclasses import dataclass, fields
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax, random

from jaxdist.errors import ConfigError, require_positive
from jaxdist.models.context import Context
from jaxdist.models.flax import INIT_STD, ShardedParam, normal
from jaxdist.models.layers import GatedMLP
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import tensor
from jaxdist.parallel.dropout import draw
from jaxdist.parallel.expert_parallel import (
    NOWHERE,
    ROOM,
    Experts,
    apply_experts,
    apply_experts_with_capacity,
    kept_places,
)
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.parallel.remat import mark_saveable

MOST_EXPERTS = 2**14


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """The fields of a model whose feed-forwards are mixtures of experts. Sources: Mixtral (arXiv 2401.04088),
    DeepSeek-V3 (2412.19437, section 2.1.2).

    num_experts: of which a token chooses `top_k`; 0 for none. expert_width: of each; None for the model's `ffn_width`.
    router_score: of an expert, the "softmax" over all of them or a "sigmoid" each. normalised: whether a token's
    weights, the scores of what it chose, are divided by their sum. routed_scale: a factor of them. shared_width: of a
    feed-forward that all tokens use; 0 for none.

    balance_rate: of a bias of each expert's score, by which experts are chosen, but not weighted: every step adds it to
    those of fewer tokens than the mean, and takes it from those of more (2408.15664); 0 for no bias.

    capacity: None drops nothing. Otherwise an expert takes at most `capacity` times its even share of each sequence,
    T * K / E, rounded up: first choices first, in the order of positions (`jaxdist.parallel.expert_parallel`).
    exchange_room: where nothing is dropped, how many times an even share of a rank's choices a round of the exchange
    takes to another rank; None for all there could be.
    balance_loss, z_loss: factors of the two auxiliary losses of `Router`.
    """

    num_experts: int = 0
    top_k: int = 2
    expert_width: int | None = None
    router_score: str = "softmax"
    normalised: bool = True
    routed_scale: float = 1.0
    shared_width: int = 0
    balance_rate: float = 0.0
    capacity: float | None = None
    exchange_room: float | None = ROOM
    balance_loss: float = 0.0
    z_loss: float = 0.0

    def check_mixture(self) -> None:
        """Raises: ConfigError for what no mixture can be, and for what belongs to one where there are no experts."""
        if self.num_experts == 0:
            for field in fields(Mixture):
                if field.name != "num_experts" and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"{field.name}={getattr(self, field.name)}",
                        "must be given only with a mixture of experts, and there are none",
                        "Add num_experts=8",
                    )
            return
        for name in ("num_experts", "top_k", "width_of_expert"):
            require_positive(name, getattr(self, name), MOST_EXPERTS if name != "width_of_expert" else 2**22)
        if self.top_k > self.num_experts:
            raise ConfigError(
                f"top_k={self.top_k} with num_experts={self.num_experts}",
                "a token must choose among the experts there are",
                f"Use top_k up to {self.num_experts}",
            )
        if self.router_score not in ("softmax", "sigmoid"):
            raise ConfigError(
                f"router_score={self.router_score!r}", "must be softmax or sigmoid", "Use router_score='softmax'"
            )
        if self.exchange_room is not None and not 0 < self.exchange_room < math.inf:
            raise ConfigError(
                f"exchange_room={self.exchange_room}", "must be a number above 0", f"Use exchange_room={ROOM}"
            )
        if self.capacity is not None and self.exchange_room != ROOM:
            raise ConfigError(
                f"exchange_room={self.exchange_room} with capacity={self.capacity}",
                "must be given only where nothing is dropped: a capacity has room of its own",
                "Leave one of them out",
            )
        for name in ("shared_width", "balance_rate", "balance_loss", "z_loss", "routed_scale"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)}", "must be a number, not below 0", f"Use {name}=0")

    @property
    def width_of_expert(self) -> int:
        return self.ffn_width if self.expert_width is None else self.expert_width

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
                f"an expert must take at least one token of a sequence of {seq_len}, and would take {share:.3g}",
                f"Use capacity={self.num_experts / seq_len / self.top_k:.3g} or more, or none to drop nothing",
            )
        return min(math.ceil(share), seq_len)


def mixture_of(
    ctx: Context,
    experts: Experts,
    weights: Any,
    x_BTD: jax.Array,
    expert_BTK: jax.Array,
    weight_BTK: jax.Array,
    num_experts: int,
    capacity: int | None = None,
    room: float | None = ROOM,
) -> jax.Array:
    """The weighted sum of what the experts that a token chose make of it, in the layout between layers.

    experts, weights, room: as in `jaxdist.parallel.expert_parallel.apply_experts`, with their width split over tp
    unless `ctx.expert_axes` has it: then each rank sends its own part of the sequence. capacity: the most tokens
    that an expert gets of one whole sequence, which `within_capacity` has seen to.
    """
    over_tp = tensor.AXIS in ctx.expert_axes
    if not over_tp:
        x_BTD, weight_BTK = ctx.enter(x_BTD), tensor.enter(weight_BTK, ctx.sp)
        expert_BTK = tensor.enter(expert_BTK, ctx.sp)
    batch, length, width = x_BTD.shape
    flat = x_BTD.reshape(-1, width), *(x.reshape(batch * length, -1) for x in (expert_BTK, weight_BTK))
    if capacity is None:
        # Where text is generated rows are few, and what they choose is anything but even.
        room = None if ctx.cache is not None else room
        y_RD = apply_experts(experts, weights, *flat, num_experts, ctx.expert_axes, room)
    else:
        slots_each = batch * min(capacity, length)
        y_RD = apply_experts_with_capacity(experts, weights, *flat, num_experts, slots_each, ctx.expert_axes)
    y_BTD = y_RD.reshape(x_BTD.shape)
    return ctx.observe("mixture_of.out", y_BTD if over_tp else tensor.leave(y_BTD, ctx.sp))


def choose(ctx: Context, scores_BTE: jax.Array, number: int) -> jax.Array:
    """Each token's experts, those of the highest scores: expert[B, T, number]. Ties go to the first.

    Layout: scores in the layout between layers. A score that rounding moves past another makes a token another
    expert's, and no tolerance covers that. So two runs in 16 bits are compared with choices that are drawn for each row
    and position, as dropout's masks are, and the same on every mesh.
    """
    if ctx.draws_choices:
        rows_B, places_T = ctx.rows_B, ctx.places(scores_BTE.shape[1])
        scores_BTE = comm.varying_like(draw(random.key(0), scores_BTE.shape[2:], rows_B, places_T), scores_BTE)
    return lax.top_k(lax.stop_gradient(scores_BTE), number)[1]


def within_capacity(ctx: Context, expert_BTK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """The choices, NOWHERE from where an expert has `capacity` tokens of a whole sequence
    (`jaxdist.parallel.expert_parallel.kept_places`). Sends: choices, over cp and with sp over tp."""
    whole_BSK = ctx.split.gather(tensor.enter(expert_BTK, ctx.sp) if ctx.sp else expert_BTK)
    place_BTK = ctx.split.cut(kept_places(whole_BSK, num_experts, capacity))
    if ctx.sp:
        num_local = expert_BTK.shape[1]
        first = comm.rank(tensor.AXIS) * num_local
        place_BTK = lax.dynamic_slice_in_dim(place_BTK, first, num_local, axis=1)
    return jnp.where(place_BTK >= 0, expert_BTK, NOWHERE)


class Router(nnx.Module):
    """Scores of the experts for each token, in at least fp32, of which the highest count; ties go to the first expert.

    Its auxiliary losses are sums over this micro-batch's tokens, as the loss is, so that no mesh changes them:
    - z-loss: the square of the logits' logsumexp, of every token (arXiv 2202.08906, equation 5);
    - balance loss: T times sum_e f_e P_e of every *sequence*, with f_e = E / (K T) times the choices of expert e, and
      P_e the mean over the sequence of its score's share of the token's scores (DeepSeek-V3, equations 17 to 20). It is
      T where all experts get the same. Means over a batch would be a product of means, which depends on how the batch
      is cut.

    It counts what every expert was chosen for, and what it dropped of that, in the layout between layers.
    """

    def __init__(self, rngs: nnx.Rngs, width: int, mixture: Mixture):
        self.mixture = mixture
        self.w = ShardedParam(normal(rngs, (width, mixture.num_experts)), ("embed", "choices"))
        nothing_E = jnp.zeros(mixture.num_experts)
        self.load = ShardedParam(nothing_E, update="count")
        if mixture.capacity is not None:
            self.dropped = ShardedParam(nothing_E, update="count")
        if mixture.balance_rate:
            self.bias = ShardedParam(nothing_E, update="balance", rate=mixture.balance_rate)

    def __call__(self, x_BTD: jax.Array, ctx: Context, capacity: int | None) -> tuple[jax.Array, jax.Array, jax.Array]:
        """x -> (x with the auxiliary losses and counts, expert[B, T, K], NOWHERE where dropped, weight[B, T, K])."""
        mixture = self.mixture
        wide = jnp.promote_types(x_BTD.dtype, jnp.float32)
        logits_BTE = ctx.observe("router", x_BTD.astype(wide) @ self.w[...].astype(wide))
        scores_BTE = jax.nn.softmax(logits_BTE) if mixture.router_score == "softmax" else jax.nn.sigmoid(logits_BTE)
        by_BTE = scores_BTE + self.bias[...].astype(wide) if mixture.balance_rate else scores_BTE
        expert_BTK = choose(ctx, by_BTE, mixture.top_k)
        weight_BTK = jnp.take_along_axis(scores_BTE, expert_BTK, axis=-1)
        if mixture.normalised:
            weight_BTK = weight_BTK / weight_BTK.sum(-1, keepdims=True)
        if mixture.z_loss and ctx.trains:
            z = jnp.square(jax.nn.logsumexp(logits_BTE, axis=-1)).sum()
            x_BTD = ctx.add_loss(x_BTD, mixture.z_loss * z)
        if mixture.balance_loss and ctx.trains:
            x_BTD = ctx.add_loss(x_BTD, mixture.balance_loss * self.balance(scores_BTE, expert_BTK, ctx))
        load_E = self.choices(expert_BTK, wide).sum(0)
        x_BTD = ctx.count(x_BTD, self.load[...], load_E)
        if mixture.balance_rate:
            x_BTD = ctx.count(x_BTD, self.bias[...], load_E - expert_BTK.size / mixture.num_experts)
        if capacity is not None:
            expert_BTK = within_capacity(ctx, expert_BTK, mixture.num_experts, capacity)
            x_BTD = ctx.count(x_BTD, self.dropped[...], load_E - self.choices(expert_BTK, wide).sum(0))
        return x_BTD, expert_BTK, weight_BTK * mixture.routed_scale

    def choices(self, expert_BTK: jax.Array, dtype) -> jax.Array:
        """How often each sequence's tokens here chose each expert: [B, E]. NOWHERE is none."""
        return jax.nn.one_hot(expert_BTK, self.mixture.num_experts, dtype=dtype).sum((1, 2))

    def balance(self, scores_BTE: jax.Array, expert_BTK: jax.Array, ctx: Context) -> jax.Array:
        """The balance loss, summed over sequences; equal on the ranks that share them."""
        num_experts, top_k = self.mixture.num_experts, self.mixture.top_k
        share_BTE = scores_BTE / scores_BTE.sum(-1, keepdims=True)
        chosen_BE = self.choices(expert_BTK, scores_BTE.dtype)
        chosen_BE, share_BE = (comm.all_reduce(x, ctx.sequence_axes) for x in (chosen_BE, share_BTE.sum(1)))
        length = comm.size(ctx.sequence_axes) * scores_BTE.shape[1]
        return num_experts / top_k / length * jnp.sum(chosen_BE * share_BE)


class MixtureOfExperts(nnx.Module):
    """x[B, T, D] -> router -> enter -> experts, split over ep and their width over tp -> {U_tp} -> leave -> y[B, T, D],
    or, where tp splits experts, x[B, T_tp, D] -> router -> experts -> y[B, T_tp, D]; the shared feed-forward beside it.
    `faults` counts finite rows that an expert made non-finite ones of."""

    def __init__(self, rngs: nnx.Rngs, width: int, mixture: Mixture, out_std: float):
        self.mixture = mixture
        num, inner = mixture.num_experts, mixture.width_of_expert
        self.router = Router(rngs, width, mixture)
        for name in ("gate", "up"):
            w_EDF = normal(rngs, (num, width, inner), INIT_STD)
            setattr(self, f"w_{name}", ShardedParam(w_EDF, ("experts", "embed", "ffn"), matrix=(None, "in", "out")))
        self.w_down = ShardedParam(
            normal(rngs, (num, inner, width), out_std), ("experts", "ffn", "embed"), matrix=(None, "in", "out")
        )
        self.faults = ShardedParam(jnp.zeros(num), ("experts",), partial=("ffn",), update="count")
        if mixture.shared_width:
            self.shared = GatedMLP(rngs, width=width, ffn_width=mixture.shared_width, out_std=out_std)

    def __call__(self, x_BTD: jax.Array, ctx: Context) -> jax.Array:
        # Where text is generated a step has a token or two, and nothing is dropped.
        slots = None if ctx.cache is not None else self.mixture.slots(comm.size(ctx.sequence_axes) * x_BTD.shape[1])
        x_BTD, expert_BTK, weight_BTK = self.router(x_BTD, ctx, slots)
        weights = [w[...] for w in (self.w_gate, self.w_up, self.w_down, self.faults)]
        mixture, chosen = self.mixture, (x_BTD, expert_BTK, weight_BTK)
        y_BTD = mixture_of(
            ctx, apply_gated, (*weights, ctx.weight), *chosen, mixture.num_experts, slots, mixture.exchange_room
        )
        return y_BTD + self.shared(x_BTD, ctx) if self.mixture.shared_width else y_BTD


def apply_gated(weights: tuple, rows_ND: jax.Array, counts_E: jax.Array | None) -> jax.Array:
    """The experts of `MixtureOfExperts` on rows in order of them, as `Experts` says. weights: gate[E, D, F],
    up[E, D, F], down[E, F, D], faults[E], and the factor of counts, None where nothing is trained."""
    gate, up, down, faults, factor = weights
    if counts_E is None:
        rows_END = rows_ND.reshape(len(gate), -1, rows_ND.shape[-1])
        gate_ENF, up_ENF = (mark_saveable(jnp.einsum("end,edf->enf", rows_END, w)) for w in (gate, up))
        made_ND = jnp.einsum("enf,efd->end", jax.nn.silu(gate_ENF) * up_ENF, down).reshape(rows_ND.shape)
        expert_N = jnp.repeat(jnp.arange(len(gate)), len(rows_ND) // len(gate))
    else:
        gate_NF, up_NF = (mark_saveable(grouped_matmul(rows_ND, w, counts_E)) for w in (gate, up))
        made_ND = grouped_matmul(jax.nn.silu(gate_NF) * up_NF, down, counts_E)
        expert_N = jnp.searchsorted(jnp.cumsum(counts_E), jnp.arange(len(rows_ND)), side="right")
    if factor is None:
        return made_ND
    bad_N = jnp.isfinite(rows_ND).all(-1) & ~jnp.isfinite(made_ND).all(-1)
    faults_E = comm.varying_like(jnp.zeros(len(gate), factor.dtype), bad_N)
    faults_E = faults_E.at[expert_N].add(bad_N.astype(factor.dtype), mode="drop")
    return Context(weight=factor).count(made_ND, faults, faults_E)
