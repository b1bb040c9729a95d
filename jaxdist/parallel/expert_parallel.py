"""Experts split over mesh axes: tokens go to the ranks that hold the experts they chose, and their results come back.

Dims: B sequences, T positions of this rank, R = B * T tokens; K choices of a token; E experts, N ranks that hold
L = E / N of them each; A = R * K assignments of a token to an expert; S slots of a message; D model.
Sources: GShard (arXiv 2006.16668), of capacity and the all-to-all; MegaBlocks (2211.15841), of dropping none.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.parallel.blocked_attention import vary_alike
from jaxdist.parallel.collectives import varying_axes
from jaxdist.parallel.remat import mark_saveable

Axes = tuple[str, ...]
Experts = Callable[[Any, jax.Array, jax.Array | None], jax.Array]
NOWHERE = -1
ROOM = 1.5


class Slots(NamedTuple):
    """Where each assignment's row is in a message. token_S: the token in each slot, NOWHERE in an empty one.
    assigned_S: the same for the assignment, its token's number times K plus its choice's. slot_RK: the slot of each
    assignment, NOWHERE where it was dropped."""

    token_S: jax.Array
    assigned_S: jax.Array
    slot_RK: jax.Array

    @classmethod
    def of(cls, slot_RK: jax.Array, num_slots: int) -> "Slots":
        """From the slots alone, all different, NOWHERE for none."""
        choices = slot_RK.shape[1]
        flat_A = jnp.where(slot_RK == NOWHERE, num_slots, slot_RK).reshape(-1)
        empty = comm.varying_like(jnp.full(num_slots, NOWHERE), flat_A)
        assigned_S = empty.at[flat_A].set(jnp.arange(len(flat_A)), mode="drop")
        return cls(jnp.where(assigned_S < 0, NOWHERE, assigned_S // choices), assigned_S, slot_RK)


# ---------------------------------------------------------------------------------------------- rows to slots and back


@jax.custom_vjp
def _to_slots(x_RD, slots):
    return _rows(x_RD, slots.token_S)


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """x[index], 0 where that is NOWHERE."""
    return jnp.where((index >= 0)[..., None], jnp.take(x, jnp.maximum(index, 0), axis=0), 0)


def _to_slots_backward(slots, d_SD):
    wide = jnp.promote_types(d_SD.dtype, jnp.float32)
    total = sum(_rows(d_SD, slot_R).astype(wide) for slot_R in slots.slot_RK.T)
    return total.astype(d_SD.dtype), None


_to_slots.defvjp(lambda x_RD, slots: (_to_slots(x_RD, slots), slots), _to_slots_backward)


def to_slots(x_RD: jax.Array, slots: Slots) -> jax.Array:
    """The rows of tokens in their slots, 0 in empty ones: x[R, D] -> [S, D]. Backward: summed in at least fp32."""
    axes = _axes_of(slots)
    return _to_slots(comm.varying(x_RD, axes), slots)


@jax.custom_vjp
def _from_slots(y_SD, weight_RK, slots):
    pairs = zip(slots.slot_RK.T, weight_RK.T, strict=True)
    return sum(_rows(y_SD, slot_R).astype(weight_RK.dtype) * weight_R[:, None] for slot_R, weight_R in pairs)


def _from_slots_backward(kept, d_RD):
    y_SD, weight_RK, slots = kept
    weight_S1 = _rows(weight_RK.reshape(-1, 1), slots.assigned_S)
    d_y_SD = (weight_S1 * _rows(d_RD, slots.token_S)).astype(y_SD.dtype)
    d_weight = [jnp.sum(_rows(y_SD, slot_R).astype(d_RD.dtype) * d_RD, -1) for slot_R in slots.slot_RK.T]
    return d_y_SD, jnp.stack(d_weight, -1), None


_from_slots.defvjp(
    lambda y_SD, weight_RK, slots: (_from_slots(y_SD, weight_RK, slots), (y_SD, weight_RK, slots)), _from_slots_backward
)


def from_slots(y_SD: jax.Array, weight_RK: jax.Array, slots: Slots) -> jax.Array:
    """The weighted sum of each token's rows: y[S, D], weight[R, K] in at least fp32 -> [R, D] in the dtype of the
    weights. A dropped one adds 0."""
    y_SD, weight_RK = vary_alike(y_SD, comm.varying(weight_RK, _axes_of(slots)))
    return _from_slots(y_SD, weight_RK, slots)


def _axes_of(slots: Slots) -> list[str]:
    return sorted(varying_axes(slots.slot_RK))


@jax.custom_vjp
def _permuted(x_SD, to_M, back_S):
    return _rows(x_SD, to_M)


_permuted.defvjp(
    lambda x_SD, to_M, back_S: (_permuted(x_SD, to_M, back_S), back_S),
    lambda back_S, d_MD: (_rows(d_MD, back_S), None, None),
)


# ------------------------------------------------------------------------------------------------- which slot is whose


def places_in_expert(expert_NA: jax.Array, num_experts: int) -> jax.Array:
    """How many assignments to the same expert come before each, in each row of N: i32[N, A]."""

    def of_row(expert_A):
        order_A = jnp.argsort(expert_A, stable=True)
        counts_E = jnp.bincount(expert_A, length=num_experts)
        before_E = jnp.cumsum(counts_E) - counts_E
        place_A = jnp.arange(len(expert_A)) - before_E[expert_A[order_A]]
        return jnp.zeros_like(expert_A).at[order_A].set(place_A.astype(expert_A.dtype))

    return jax.vmap(of_row)(expert_NA)


def kept_places(expert_BTK: jax.Array, num_experts: int, capacity: int) -> jax.Array:
    """The place of each choice among those of its expert in the whole sequence, NOWHERE from `capacity` on.

    First come all first choices by position, then all second ones: what is dropped depends on the sequence alone, and
    not on the batch or the mesh. Source: GShard, algorithm 1.
    """
    batch, length, choices = expert_BTK.shape
    in_order = jnp.moveaxis(expert_BTK, 2, 1).reshape(batch, choices * length)
    place = places_in_expert(in_order, num_experts).reshape(batch, choices, length)
    return jnp.where(place < capacity, place, NOWHERE).transpose(0, 2, 1)


# --------------------------------------------------------------------------------------------------------- the experts


def apply_experts(
    experts: Experts,
    weights: Any,
    x_RD: jax.Array,
    expert_RK: jax.Array,
    weight_RK: jax.Array,
    num_experts: int,
    axes: Axes,
    room: float | None = ROOM,
) -> jax.Array:
    """The weighted sum of what the experts that each token chose make of it; an expert of NOWHERE is none.

    experts: (weights, rows[N, D], counts[E / n]) -> [N, D], of the experts that this rank holds, on rows in order of
    them; None for counts that are all equal. It must not close over arrays: they are in `weights`, a pytree.
    room: rows that a round takes from a rank to another, over an even share of a rank's choices; None for all there
    could be (`slots_of_round`).
    Layout: x[R, D], expert[R, K], weight[R, K] in at least fp32, experts split over `axes` -> y[R, D]. Where `experts`
    give partial sums, so is y.
    Sends: `slots_of_round` slots to every other rank of `axes` in each round, there and back, of these bytes (n-1)/n;
    as many rounds as the fullest message of any rank needs, so that nothing is ever dropped, nearly always one. Rounds
    after the first keep nothing for backward: they run again for the gradient of x, and again for that of `weights`.
    Raises: ConfigError for more slots than 32 bits count.
    """
    num_tokens, choices = expert_RK.shape
    n = comm.size(axes)
    held = num_experts // n
    most, num_slots = (slots_of_round(num_tokens, choices, num_experts, n, each) for each in (None, room))
    if max(n * num_slots, most) >= 2**31:
        raise ConfigError(
            f"{num_tokens:,} tokens of a rank, with {choices} experts each and ep={n}",
            "their places in a message must fit in 32 bits",
            "Use smaller micro-batches, a smaller ep, more cp, or a capacity",
        )
    there_A = jnp.where(expert_RK == NOWHERE, num_experts, expert_RK).reshape(-1)
    order_A = jnp.argsort(there_A, stable=True)
    counts_E = jnp.bincount(there_A, length=num_experts + 1)[:num_experts]
    before_E = jnp.cumsum(counts_E) - counts_E
    # The place of each assignment among those to its rank, by expert.
    sorted_A = there_A[order_A]
    rank_A = jnp.minimum(sorted_A, num_experts - 1) // held
    place_A = jnp.where(sorted_A == num_experts, NOWHERE, jnp.arange(len(order_A)) - before_E[rank_A * held])
    place_RK = jnp.zeros_like(order_A).at[order_A].set(place_A).reshape(num_tokens, choices)
    counts_NL = counts_E.reshape(n, held)
    route = _Route(
        jnp.minimum(expert_RK, num_experts - 1) // held, place_RK, exchange.all_to_all(counts_NL, axes, 0, 0)
    )
    of_round = _Rounds(experts, axes, num_slots)
    y_RD = of_round(weights, x_RD, weight_RK, route, 0)
    if num_slots < most:
        number = comm.all_reduce_max(-(-jnp.max(counts_NL.sum(1)) // num_slots), axes)
        y_RD = _more_rounds(of_round, *_vary_alike((y_RD, weights, x_RD, weight_RK, route, number)))
    return y_RD.astype(x_RD.dtype)


def slots_of_round(num_tokens: int, choices: int, num_experts: int, ranks: int, room: float | None) -> int:
    """Rows that a rank sends to each of `ranks` in a round: `room` times an even share of its choices, or, where that
    is more than half of it, all that could be chosen there, so that one round is always enough."""
    most = num_tokens * (min(choices, num_experts // ranks) if ranks > 1 else choices)
    even = most if room is None or ranks == 1 else math.ceil(room * num_tokens * choices / ranks)
    return even if 2 * even <= most else most


def _by_expert(ends_NL: jax.Array, num_slots: int) -> jax.Array:
    """Where each slot goes when all are put in order of experts, then of ranks: i32[n * S]. ends_NL: where each
    expert's rows end in a rank's message, which has them in order of experts; those of no expert come last."""
    ends_NX = jnp.pad(ends_NL, ((0, 0), (0, 1)), constant_values=num_slots)
    counts_NX = jnp.diff(ends_NX, axis=1, prepend=0)
    before_NX = jnp.cumsum(counts_NX, 0) - counts_NX
    first_X = jnp.cumsum(counts_NX.sum(0)) - counts_NX.sum(0)
    expert_NS = jnp.sum(jnp.arange(num_slots)[None, :, None] >= ends_NL[:, None], -1)
    moved_NS = jnp.take_along_axis(first_X + before_NX - (ends_NX - counts_NX), expert_NS, 1)
    return (jnp.arange(num_slots) + moved_NS).reshape(-1)


class _Route(NamedTuple):
    """rank_RK: who holds the expert of each assignment. place_RK: which of a rank's assignments to that one it is, by
    expert; NOWHERE for none. counts_NL: rows that each rank has for each expert that this rank holds."""

    rank_RK: jax.Array
    place_RK: jax.Array
    counts_NL: jax.Array


class _Rounds(NamedTuple):
    """What one round computes, with static settings alone."""

    experts: Experts
    axes: Axes
    num_slots: int

    def __call__(self, weights, x_RD, weight_RK, route: _Route, number) -> jax.Array:
        """The weighted sums of the rows of a round, y[R, D] in the dtype of `weight_RK`."""
        n, size = comm.size(self.axes), self.num_slots
        place_RK = jnp.where(route.place_RK == NOWHERE, NOWHERE, route.place_RK - number * size)
        here_RK = (place_RK >= 0) & (place_RK < size)
        slots = Slots.of(jnp.where(here_RK, route.rank_RK * size + place_RK, NOWHERE), n * size)
        ends_NL = jnp.clip(jnp.cumsum(route.counts_NL, 1) - number * size, 0, size)
        counts_NL = jnp.diff(ends_NL, axis=1, prepend=0)
        sent = to_slots(x_RD, slots)
        if n == 1:
            return from_slots(self.experts(weights, sent, counts_NL[0]), weight_RK, slots)
        got = mark_saveable(exchange.all_to_all(sent, self.axes, 0, 0))
        back_S = _by_expert(ends_NL, size)
        to_M = jnp.zeros_like(back_S).at[back_S].set(jnp.arange(len(back_S)), unique_indices=True)
        rows = self.experts(weights, _permuted(*vary_alike(got, to_M, back_S)), counts_NL.sum(0))
        back = exchange.all_to_all(_permuted(*vary_alike(rows, back_S, to_M)), self.axes, 0, 0)
        return from_slots(mark_saveable(back), weight_RK, slots)


# ----------------------------------------------------------------------------------------------- rounds after the first


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _more_rounds(of_round, y_RD, weights, x_RD, weight_RK, route, number):
    """`y_RD` and the sum of rounds 1 to `number`. Each way through them is a loop in a jitted function of its own name,
    so that a pipeline can part the gradient of x from that of the weights, and a trace knows how often it runs."""

    @jax.jit
    def more_rounds(y_RD, weights, x_RD, weight_RK, route, number):
        return _summed(number, y_RD, lambda r: of_round(weights, x_RD, weight_RK, route, r))

    return more_rounds(y_RD, weights, x_RD, weight_RK, route, number)


def _more_rounds_backward(of_round, kept, dy_RD):
    """Backward of the first round waits for these: their arrays are not beside its own."""

    @jax.jit
    def more_rounds_of_inputs(kept, dy_RD):
        weights, x_RD, weight_RK, route, number = kept

        def gradient(r):
            return jax.vjp(lambda x, weight: of_round(weights, x, weight, route, r), x_RD, weight_RK)[1](dy_RD)

        return _gradients((x_RD, weight_RK), x_RD, number, gradient)

    @jax.jit
    def more_rounds_of_weights(kept, dy_RD):
        weights, x_RD, weight_RK, route, number = kept

        def gradient(r):
            return jax.vjp(lambda weights: of_round(weights, x_RD, weight_RK, route, r), weights)[1](dy_RD)[0]

        return _gradients(weights, x_RD, number, gradient)

    of_inputs, first_RD = lax.optimization_barrier((more_rounds_of_inputs(kept, dy_RD), dy_RD))
    return first_RD, more_rounds_of_weights(kept, dy_RD), *of_inputs, None, None


_more_rounds.defvjp(
    lambda of_round, *args: (_more_rounds(of_round, *args), args[1:]),
    _more_rounds_backward,
)
MORE_ROUNDS = "more_rounds", "more_rounds_of_inputs", "more_rounds_of_weights"


def _summed(number: jax.Array, start, of_round: Callable):
    """A tree and those of rounds 1 to `number`, added up."""

    def body(r, sums):
        return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, of_round(r))

    return lax.fori_loop(jnp.ones_like(number), number, body, start)


def _gradients(arrays, like: jax.Array, number: jax.Array, of_round: Callable):
    """The sum of rounds' gradients of `arrays`, a tree, which vary as `like` does, added up in at least fp32."""
    wide = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.promote_types(x.dtype, jnp.float32)), arrays)
    sums = _summed(number, jax.tree.map(lambda x: comm.varying_like(x, like), wide), of_round)
    return jax.tree.map(lambda total, x: total.astype(x.dtype), sums, arrays)


def _vary_alike(tree):
    """`vary_alike` of the leaves of a tree."""
    leaves, structure = jax.tree.flatten(tree)
    return structure.unflatten(vary_alike(*leaves))


def apply_experts_with_capacity(
    experts: Experts,
    weights: Any,
    x_RD: jax.Array,
    expert_RK: jax.Array,
    weight_RK: jax.Array,
    num_experts: int,
    slots_each: int,
    axes: Axes,
) -> jax.Array:
    """`apply_experts` with `slots_each` slots for every expert, so that messages and rows are no more than these.

    At most so many of this rank's assignments are to one expert; those to NOWHERE are dropped.
    Sends: E * slots_each rows, of which (n-1)/n leave the rank, each way.
    """
    n = comm.size(axes)
    place = places_in_expert(jnp.where(expert_RK == NOWHERE, num_experts, expert_RK).reshape(1, -1), num_experts + 1)
    slot_RK = expert_RK * slots_each + place.reshape(expert_RK.shape)
    slots = Slots.of(jnp.where(expert_RK == NOWHERE, NOWHERE, slot_RK), num_experts * slots_each)
    sent = to_slots(x_RD, slots)
    width, held = sent.shape[-1], num_experts // n
    got = mark_saveable(exchange.all_to_all(sent, axes, 0, 0)) if n > 1 else sent
    rows = got.reshape(n, held, slots_each, width).swapaxes(0, 1).reshape(-1, width)
    made = experts(weights, rows, None)
    made = made.reshape(held, n, slots_each, width).swapaxes(0, 1).reshape(-1, width)
    back = mark_saveable(exchange.all_to_all(made, axes, 0, 0)) if n > 1 else made
    return from_slots(back, weight_RK, slots).astype(x_RD.dtype)
