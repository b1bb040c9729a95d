"""Attention over a sequence that is split over the axis `cp`: by a ring, by gathering keys, or by exchanging heads.

Dims: B batch, T positions of this rank, S of the whole sequence, N query heads, K heads of keys and values, H head dim;
n ranks. `jaxdist.parallel.sequence.Split` says which positions each rank holds.
Sources: Ring Attention (arXiv 2310.01889); Striped Attention (2311.09431), of the balance; Llama 3 (2407.21783, section
3.3.2), of the gather and of 2n chunks; DeepSpeed Ulysses (2309.14509); USP (2405.07719), of the two combined.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.parallel.blocked_attention import (
    LOWEST,
    Partial,
    Places,
    attend_partly,
    blocked_attention,
    gradients_partly,
    merged,
    row_sums,
    vary_alike,
)
from jaxdist.parallel.remat import mark_saveable
from jaxdist.parallel.sequence import AXIS, SEQUENCE_DIM, Split

HEADS_DIM = 2


def context_attention(
    split: Split,
    core: Callable[..., jax.Array],
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int | None = None,
    starts_BS: jax.Array | None = None,
) -> jax.Array:
    """Causal attention of this rank's queries over the whole sequence: o[B, T, N, H].

    Layout: q[B, T_cp, N, H], k, v[B, T_cp, K, H], placed by `split` -> o[B, T_cp, N, H].
    core: attention by (q, k, v) where, with heads exchanged for positions, the whole sequence is held. window: as in
    `blocked_attention`. starts_BS: where the document of each position of the whole sequence begins.
    Sends: `exchange_heads` of q, k, v, and of o back; then `ring_attention`, `gather_attention` or, where the window
    reaches fewer chunks than the ring has hops, `halo_attention`.
    """
    if split.exchanging > 1:
        q_BTNH, k_BTKH, v_BTKH = (
            exchange_heads(split, x) for x in (q_BTNH, *repeat_heads(split.exchanging, k_BTKH, v_BTKH))
        )
    if split.groups == 1:
        o_BTNH = core(q_BTNH, k_BTKH, v_BTKH)
    else:
        chunk = q_BTNH.shape[1] // 2
        if split.gathers:
            attention = gather_attention
        else:
            attention = ring_attention if hops(window, chunk, split.groups) is None else halo_attention
        o_BTNH = attention(split, q_BTNH, k_BTKH, v_BTKH, window=window, starts_BS=starts_BS)
    return exchange_heads(split, o_BTNH, back=True) if split.exchanging > 1 else o_BTNH


# --------------------------------------------------------------------------------------------- keys of generated text


def by_turns(split: Split, x_BTKH: jax.Array) -> jax.Array:
    """Position p of the sequence to rank p mod n, in order: what a text gets later keeps its ranks as even.

    Layout: x[B, T_cp, K, H], placed by `split`, its length a multiple of n * `split.unit` -> x[B, T_cp, K, H].
    Sends: (n-1)/n of the local bytes, in one all-to-all.
    """
    n = split.ranks
    if n == 1:
        return x_BTKH
    batch, num_local, *of_one = x_BTKH.shape
    # Places count from a multiple of n in every chunk, so those of equal rest are of one rank.
    taken = exchange.all_to_all(x_BTKH.reshape(batch, num_local // n, n, *of_one), AXIS, 2, SEQUENCE_DIM)
    first_T = jnp.arange(0, num_local, n)
    places_T = jnp.concatenate([split.place(first_T, num_local, rank) for rank in range(n)]) // n
    return jnp.zeros_like(x_BTKH).at[:, places_T].set(taken[:, :, 0])


def merge_over_ranks(o_BTNH: jax.Array, lse_BTN: jax.Array) -> jax.Array:
    """Attention over the keys of all ranks, where every rank has the same queries: o[B, T, N, H], equal along cp.

    o_BTNH: over this rank's keys, divided by the sum of their weights alone; lse_BTN: the logarithm of that sum.
    Sends: all-reduces of 1 and then of H + 1 numbers, in the dtype of `lse_BTN`, for each query and head.
    Source: Flash-Decoding for long-context inference (Dao et al. 2023); arXiv 2411.01783, of many devices.
    """
    if not comm.live(AXIS):
        return o_BTNH
    weights = jnp.exp(lse_BTN - comm.all_reduce_max(lse_BTN, AXIS))[..., None]
    o, total = comm.all_reduce((o_BTNH * weights, weights), AXIS)
    return (o / total).astype(o_BTNH.dtype)


def merge_bytes(num_values: int, num_heads: int, itemsize: int) -> int:
    """Bytes of the buffers that `merge_over_ranks` sums, for queries of so many values and heads in all."""
    return (num_values + 2 * num_heads) * itemsize


# ---------------------------------------------------------------------------------------------------------------- heads


def exchange_heads(split: Split, x_BTNH: jax.Array, back: bool = False) -> jax.Array:
    """All positions of a group, for a part of the heads; or back.

    Layout: x[B, T, N, H] -> x[B, T * u, N / u, H] for groups of u ranks; back the other way.
    Backward: the other way.
    Sends: (u-1)/u of the local bytes.
    """
    ranks = range(split.ranks)
    groups = [[*ranks[first : first + split.exchanging]] for first in ranks[:: split.exchanging]]
    cut, joined = (SEQUENCE_DIM, HEADS_DIM) if back else (HEADS_DIM, SEQUENCE_DIM)
    return exchange.all_to_all(x_BTNH, AXIS, cut, joined, groups if split.groups > 1 else None)


def repeat_heads(parts: int, *arrays: jax.Array) -> list[jax.Array]:
    """Heads of keys and values, each as often as it takes for `parts` to divide them."""
    return [
        x if x.shape[HEADS_DIM] % parts == 0 else jnp.repeat(x, parts // x.shape[HEADS_DIM], axis=HEADS_DIM)
        for x in arrays
    ]


# --------------------------------------------------------------------------------------- keys that are gathered or near


def gather_attention(
    split: Split,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int | None = None,
    starts_BS: jax.Array | None = None,
) -> jax.Array:
    """Every rank gathers all keys and values.

    Backward: the gathers' transposes, reduce-scatters of dk and dv.
    Sends: (n-1) * (k and v of a rank) forward, and as much backward, for n groups; nothing else.
    """
    both = mark_saveable(comm.all_gather(jnp.stack([k_BTKH, v_BTKH]), AXIS, 1 + SEQUENCE_DIM))
    # [2, B, ranks, halves, T / 2, K, H]: the first halves in order, the second in the opposite one.
    both = both.reshape(*both.shape[:2], split.groups, 2, -1, *both.shape[3:])
    whole = jnp.concatenate([both[:, :, :, 0], both[:, :, ::-1, 1]], axis=2)
    k_BSKH, v_BSKH = whole.reshape(*both.shape[:2], -1, *k_BTKH.shape[2:])
    return _of_halves(split, q_BTNH, lambda half, first: (k_BSKH, v_BSKH, 0), window, starts_BS)


def halo_attention(
    split: Split,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int,
    starts_BS: jax.Array | None = None,
) -> jax.Array:
    """Attention in a window: every chunk gets only the m chunks before it, from hand to hand along the zig-zag.

    Backward: the permutes' transposes.
    Sends: m * (k and v of a rank) forward, and as much backward, for m = ceil((window - 1) / chunk).
    """
    chunk, last = q_BTNH.shape[1] // 2, split.groups - 1
    hop, ranks = split.exchanging, [*range(split.ranks)]

    def before(pair):
        """The chunks just before two chunks: the rank before has one, the rank after the other; the last has both."""
        early, late = pair
        if split.swaps:
            early_before, late_after = swapped(early, late)
        else:
            early_before = comm.permute(early, AXIS, hop, ranks[:-hop])
            late_after = comm.permute(late, AXIS, -hop, ranks[hop:])
        return early_before, jnp.where(split.group == last, early, late_after)

    def swapped(early, late):
        """Early chunks from the group before and late ones from that after. The first group gets keys that would be
        before the sequence, which nothing sees."""
        even = split.group % 2 == 0
        one = exchange.swap(jnp.where(even, early, late), AXIS, neighbours(split, 0))
        other = exchange.swap(jnp.where(even, late, early), AXIS, neighbours(split, 1))
        return jnp.where(even, other, one), jnp.where(even, one, other)

    found = [jnp.split(jnp.stack([k_BTKH, v_BTKH]), 2, axis=1 + SEQUENCE_DIM)]
    for _ in range(hops(window, chunk, split.groups)):
        found.append(before(found[-1]))
    reach = (len(found) - 1) * chunk

    def keys(half, first):
        return *jnp.concatenate([pair[half] for pair in reversed(found)], axis=1 + SEQUENCE_DIM), first - reach

    return _of_halves(split, q_BTNH, keys, window, starts_BS)


def _of_halves(split: Split, q_BTNH, keys: Callable, window, starts_BS) -> jax.Array:
    """Attention of both chunks of queries; keys(half, position of its first query) -> (k, v, position of the first)."""
    chunk = q_BTNH.shape[1] // 2
    parts = []
    for half, first in enumerate(first_positions(split, chunk)):
        k, v, first_key = keys(half, first)
        q = q_BTNH[:, half * chunk : (half + 1) * chunk]
        starts = None if starts_BS is None else lax.dynamic_slice_in_dim(starts_BS, first, chunk, axis=SEQUENCE_DIM)
        parts.append(blocked_attention(q, k, v, Places(first, first_key, starts), window))
    return jnp.concatenate(parts, axis=SEQUENCE_DIM)


def hops(window: int | None, chunk: int, groups: int) -> int | None:
    """How many chunks before its own a window reaches, where these are fewer messages than a ring's; else None."""
    reached = None if window is None else -(-(window - 1) // chunk)
    return None if reached is None or reached >= groups - 1 else reached


# ------------------------------------------------------------------------------------------------------------- the ring


def ring_attention(
    split: Split,
    q_BTNH: jax.Array,
    k_BTKH: jax.Array,
    v_BTKH: jax.Array,
    *,
    window: int | None = None,
    starts_BS: jax.Array | None = None,
) -> jax.Array:
    """Keys and values go round in n-1 hops for n groups; each rank attends to those it holds while it sends them on.

    The softmax is over all keys: partial results are merged by their log-sum-exp, and backward uses that of all. The
    whole ring is one function with a backward of its own, since a merge that JAX differentiates must not lose the
    gradient of a log-sum-exp. In every hop each rank computes the scores of two chunks by two: its late queries see the
    early keys that came, and its early or its late queries see those like them.
    With `split.swaps` a hop is a swap with one neighbour, and the next hop with the other. Keys from an even rank then
    move to the next rank at each hop, those from an odd rank to the one before. All have been everywhere after n-1
    hops, and one more takes them home. Stages of a pipeline need this (`exchange.swap`).
    Backward: keys and values go round once more, and after them their gradients, summed on the way in at least fp32.
    Keeps q, k, v, o and one number of each query and head.
    Sends: (n-1) * (k and v of a rank) forward; as much again, and (n-1) * (dk and dv), backward.
    """
    starts = None
    if starts_BS is not None:
        chunk = q_BTNH.shape[1] // 2
        starts = jnp.stack(
            [lax.dynamic_slice_in_dim(starts_BS, first, chunk, 1) for first in first_positions(split, chunk)]
        )
    return _ring(split, window, *vary_alike(*(comm.varying(x, AXIS) for x in (q_BTNH, k_BTKH, v_BTKH))), starts)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _ring(split, window, q, k, v, starts):
    return _ring_forward(split, window, q, k, v, starts)[0]


def _ring_forward(split, window, q, k, v, starts):
    queries, places = _halves(q), _Places(split, k.shape[1] // 2, starts)

    def hop(carry, step, odd, last=False):
        held, found = carry
        coming = None if last else _onwards(split, held, odd)
        for query, key in _pairs(split, step):
            part = attend_partly(queries[query], *held[:, key], places.of(query, key, step), window)
            both = merged(Partial(found.o[query], found.lse[query]), part)
            found = Partial(found.o.at[query].set(both.o), found.lse.at[query].set(both.lse))
        return lax.optimization_barrier((coming, found))

    carry = hop((_keys_and_values(k, v), _nothing_seen(queries, k)), 0, odd=0)
    carry = _repeat(split, hop, carry, range(1, split.groups - 1))
    _, found = hop(carry, split.groups - 1, (split.groups - 1) % 2, last=True)
    o, lse = mark_saveable((_joined(found.o).astype(q.dtype), found.lse))
    return o, (q, k, v, starts, o, lse)


def _ring_backward(split, window, kept, do):
    # Otherwise a compiler takes what came round in forward for what comes again, and keeps all of it until then.
    (q, k, v, starts, o, lse), do = lax.optimization_barrier((kept, do))
    places = _Places(split, k.shape[1] // 2, starts)
    queries, cotangents, held = _halves(q), _halves(do), _keys_and_values(k, v)
    sums = jax.vmap(row_sums)(cotangents, _halves(o), lse)

    def hop(carry, step, odd, last=False):
        """carry: keys and values, dq so far, and the gradients of those that were here a hop ago."""
        held, dq, left = carry
        coming = None if last else _onwards(split, held, odd)
        arriving = None if left is None else _onwards(split, left, 1 - odd)
        here = jnp.zeros_like(held, lse.dtype)
        for query, key in _pairs(split, step):
            of_query = (cotangents[query], lse[query], sums[query])
            grads = gradients_partly(queries[query], *held[:, key], places.of(query, key, step), window, *of_query)
            dq, here = dq.at[query].add(grads[0]), here.at[:, key].add(jnp.stack(grads[1:]))
        return lax.optimization_barrier((coming, dq, here if arriving is None else arriving + here))

    final = split.groups - 1
    held, dq, home = hop((held, jnp.zeros_like(queries, lse.dtype), None), 0, odd=0)
    carry = hop((held, dq, None), 1, odd=1, last=final == 1)
    if final > 1:
        carry = _repeat(split, hop, carry, range(2, final))
        carry = hop(carry, final, final % 2, last=True)
    _, dq, left = carry
    home = home + _onwards(split, left, final % 2)
    return *(_joined(g).astype(x.dtype) for g, x in zip((dq, *home), (q, k, v), strict=True)), None


_ring.defvjp(_ring_forward, _ring_backward)


def _repeat(split: Split, hop: Callable, carry, steps: range):
    """The hops of these steps, as a loop: a program is as long for many ranks as for few. Of swaps, two hops at a time,
    since with which neighbour is written in the program."""
    together = 2 if split.swaps else 1
    odd = steps.start % 2
    in_loop = len(steps) // together * together if len(steps) > together else 0

    def some(carry, first):
        return _in_turn(hop, carry, [first + i for i in range(together)], odd), None

    if in_loop:
        carry, _ = lax.scan(some, carry, jnp.array(steps[:in_loop:together]))
    return _in_turn(hop, carry, steps[in_loop:], (odd + in_loop) % 2)


def _in_turn(hop: Callable, carry, steps: Sequence, odd: int):
    """The hops of these steps, of which the first is even or odd."""
    for i, step in enumerate(steps):
        carry = hop(carry, step, (odd + i) % 2)
    return carry


def _pairs(split: Split, step: jax.Array | int) -> list[tuple]:
    """(half of the queries, half of the keys) whose scores count in a step."""
    if _is_first(step):
        return [(0, 0), (1, 0), (1, 1)]
    either = jnp.where(_owner(split, step) < split.group, 0, 1)
    return [(1, 0), (either, either)]


def _is_first(step: jax.Array | int) -> bool:
    return isinstance(step, int) and step == 0


def _owner(split: Split, step: jax.Array | int) -> jax.Array:
    """The group whose keys this rank holds after so many hops."""
    forwards = split.group - step
    if split.swaps:
        forwards = jnp.where(forwards % 2 == 0, forwards, split.group + step)
    return forwards % split.groups


class _Places(NamedTuple):
    """Positions of halves. starts[2, B, T]: of the documents of both halves of the queries."""

    split: Split
    chunk: int
    starts: jax.Array | None

    def of(self, query, key, step: jax.Array | int) -> Places:
        split = self.split
        starts = None if self.starts is None else self.starts[query]
        order = "same" if _is_first(step) and query == key else "after"
        first_query, first_key = split.chunk_of(query, split.group), split.chunk_of(key, _owner(split, step))
        return Places(first_query * self.chunk, first_key * self.chunk, starts, order)


def _onwards(split: Split, x, odd: int):
    """To the rank with the same place in the next group; or, with swaps, from a neighbour, whose number among hops is
    even or odd."""
    if split.swaps:
        return exchange.swap(x, AXIS, neighbours(split, odd))
    return comm.permute(x, AXIS, split.exchanging)


def _keys_and_values(k, v) -> jax.Array:
    """The halves of both in one array, which is one message: a GPU sends one at a time while it computes.

    [B, 2 * T, K, H] each -> [2, 2, B, T, K, H], keys first.
    """
    return jnp.stack([_halves(k), _halves(v)])


def _nothing_seen(queries, k) -> Partial:
    _, batch, length, heads, _ = queries.shape
    wide = jnp.promote_types(queries.dtype, jnp.float32)
    lse = jnp.full((2, batch, k.shape[2], heads // k.shape[2], length), LOWEST, wide)
    return Partial(jnp.zeros_like(queries, wide), comm.varying_like(lse, queries))


def _halves(x_BTNH) -> jax.Array:
    """[B, 2 * T, N, H] -> [2, B, T, N, H]."""
    return jnp.stack(jnp.split(x_BTNH, 2, axis=SEQUENCE_DIM))


def _joined(x) -> jax.Array:
    """Undo `_halves`."""
    return jnp.concatenate(list(x), axis=SEQUENCE_DIM)


def neighbours(split: Split, odd: int) -> list[tuple[int, int]]:
    """Ranks of equal place in neighbouring groups: in groups 0 and 1, 2 and 3, ...; or (odd) 1 and 2, 3 and 4, ...
    and the last and first."""
    return [
        (first % split.groups * split.exchanging + member, (first + 1) % split.groups * split.exchanging + member)
        for first in range(odd, split.groups + odd, 2)
        for member in range(split.exchanging)
    ]


def first_positions(split: Split, chunk: int) -> list[jax.Array]:
    """Where the two chunks of this rank's group begin."""
    return [split.chunk_of(half, split.group) * chunk for half in range(2)]
