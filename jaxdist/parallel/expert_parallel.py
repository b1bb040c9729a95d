"""Experts split over mesh axes: tokens go to the ranks that hold the experts they chose, and their results come back.

Dims: B sequences, T positions of this rank, R = B * T tokens; K choices of a token; E experts, n ranks that hold E / n
of them each; A = R * K assignments of a token to an expert; S slots of a message; D model.
Sources: GShard (arXiv 2006.16668), of capacity and the all-to-all; MegaBlocks (2211.15841), of dropping none.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.parallel.blocked_attention import vary_alike
from jaxdist.parallel.collectives import varying_axes
from jaxdist.parallel.remat import mark_saveable

Axes = tuple[str, ...]
Experts = Callable[[jax.Array, jax.Array | None], jax.Array]
NOWHERE = -1


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
    total = sum(_rows(y_SD, slot_R).astype(weight_RK.dtype) * weight_R[:, None] for slot_R, weight_R in pairs)
    return total.astype(y_SD.dtype)


def _from_slots_backward(kept, d_RD):
    y_SD, weight_RK, slots = kept
    wide_RD = d_RD.astype(weight_RK.dtype)
    weight_S = _rows(weight_RK.reshape(-1, 1), slots.assigned_S)
    d_y_SD = (weight_S * _rows(wide_RD, slots.token_S)).astype(y_SD.dtype)
    d_weight = [jnp.sum(_rows(y_SD, slot_R).astype(wide_RD.dtype) * wide_RD, -1) for slot_R in slots.slot_RK.T]
    return d_y_SD, jnp.stack(d_weight, -1), None


_from_slots.defvjp(
    lambda y_SD, weight_RK, slots: (_from_slots(y_SD, weight_RK, slots), (y_SD, weight_RK, slots)), _from_slots_backward
)


def from_slots(y_SD: jax.Array, weight_RK: jax.Array, slots: Slots) -> jax.Array:
    """The weighted sum of each token's rows: y[S, D], weight[R, K] in at least fp32 -> [R, D]. A dropped one adds 0."""
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
    experts: Experts, x_RD: jax.Array, expert_RK: jax.Array, weight_RK: jax.Array, num_experts: int, axes: Axes
) -> jax.Array:
    """The weighted sum of what the experts that each token chose make of it; an expert of NOWHERE is none.

    experts: (rows[N, D], counts[E / n]) -> [N, D], of the experts that this rank holds, on rows in order of them; None
    for counts that are all equal.
    Layout: x[R, D], expert[R, K], weight[R, K] in at least fp32, experts split over `axes` -> y[R, D]. Where `experts`
    give partial sums, so is y.
    Sends: as many slots to every other rank of `axes` as could be chosen there, R * min(K, E / n), so that nothing is
    ever dropped; of these bytes (n-1)/n each way.
    Raises: ConfigError for more slots than 32 bits count.
    """
    num_tokens, choices = expert_RK.shape
    n = comm.size(axes)
    held = num_experts // n
    num_slots = num_tokens * min(choices, held) if n > 1 else num_tokens * choices
    there_A = jnp.where(expert_RK == NOWHERE, num_experts, expert_RK).reshape(-1)
    if n * num_slots >= 2**31:
        raise ConfigError(
            f"{num_tokens:,} tokens of a rank, with {choices} experts each and ep={n}",
            "their places in a message must fit in 32 bits",
            "Use smaller micro-batches, a smaller ep, more cp, or a capacity",
        )
    order_A = jnp.argsort(there_A, stable=True)
    counts_E = jnp.bincount(there_A, length=num_experts + 1)[:num_experts]
    before_E = jnp.cumsum(counts_E) - counts_E
    # The place of each assignment among those to its rank, by expert; then the rank's part of the message.
    sorted_A = there_A[order_A]
    rank_A = jnp.minimum(sorted_A, num_experts - 1) // held
    slot_A = rank_A * num_slots + jnp.arange(len(order_A)) - before_E[rank_A * held]
    slot_A = jnp.where(sorted_A == num_experts, NOWHERE, slot_A)
    slot_RK = jnp.zeros_like(order_A).at[order_A].set(slot_A).reshape(num_tokens, choices)
    slots = Slots.of(slot_RK, n * num_slots)

    sent = to_slots(x_RD, slots)
    if n == 1:
        return from_slots(experts(sent, counts_E), weight_RK, slots)

    counts_NE = counts_E.reshape(n, held)
    got, counts_NE = mark_saveable(exchange.all_to_all(sent, axes, 0, 0)), exchange.all_to_all(counts_NE, axes, 0, 0)
    # What came from each rank is in order of the experts; all of it, too.
    ends_NE = jnp.cumsum(counts_NE, 1)
    expert_NS = jnp.sum(jnp.arange(num_slots)[None, :, None] >= ends_NE[:, None], -1).reshape(-1)
    to_M = jnp.argsort(expert_NS, stable=True)
    back_S = jnp.zeros_like(to_M).at[to_M].set(jnp.arange(len(to_M)))
    rows = experts(_permuted(*vary_alike(got, to_M, back_S)), counts_NE.sum(0))
    back = exchange.all_to_all(_permuted(*vary_alike(rows, back_S, to_M)), axes, 0, 0)
    return from_slots(mark_saveable(back), weight_RK, slots)


def apply_experts_with_capacity(
    experts: Experts,
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
    made = experts(rows, None)
    made = made.reshape(held, n, slots_each, width).swapaxes(0, 1).reshape(-1, width)
    back = mark_saveable(exchange.all_to_all(made, axes, 0, 0)) if n > 1 else made
    return from_slots(back, weight_RK, slots)
