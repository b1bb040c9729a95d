"""Causal attention that never holds its scores: blocks of queries by blocks of keys, made again in backward.

Dims: B batch, T queries, S keys, K key heads, G queries that share one (N = K * G query heads), H head dim.
Queries and keys each stand at consecutive positions, from a first one on. A key at a negative position is not there.
Sums are in at least fp32. Source: FlashAttention-2, arXiv 2307.08691, sections 2.3 and 3.1.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import varying_axes
from jaxdist.parallel.remat import mark_saveable

MOST_POSITIONS = 512  # of a block
LOWEST = -1e30  # a score that no softmax sees; finite, since the difference of two infinities is not a number


class Partial(NamedTuple):
    """Attention of queries over some of their keys: o[B, T, N, H] divided by the sum of these keys' weights alone, and
    the logarithm of that sum, lse[B, K, G, T]. Both in at least fp32."""

    o: jax.Array
    lse: jax.Array


class Places(NamedTuple):
    """Positions: of the first query, of the first key; and starts[B, T], where each query's document begins.

    order: what is known of them while tracing: "same", that both are equal; "after", that all queries come after all
    keys; None, nothing. A program asks only where it is not known which blocks see each other.
    """

    query: Any
    key: Any
    starts: jax.Array | None = None
    order: str | None = None


def merged(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = jnp.logaddexp(one.lse, other.lse)
    return Partial(sum(part.o * _of_heads(jnp.exp(part.lse - lse)) for part in (one, other)), lse)


def blocked_attention(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, places: Places, window: int | None = None
) -> jax.Array:
    """Causal attention over keys that this rank holds, scaled by 1/sqrt(H): o[B, T, N, H] in q's dtype.

    K divides N: consecutive queries' heads share a key's. window: a query sees itself and the `window` - 1 positions
    before it. Backward keeps q, k, v, o and one number of each query and head. Sends: nothing.
    """
    return _attend(window, places.order, *vary_alike(q_BTNH, k_BSKH, v_BSKH), places._replace(order=None))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(window, order, q, k, v, places):
    return _attend_forward(window, order, q, k, v, places)[0]


def _attend_forward(window, order, q, k, v, places):
    part = attend_partly(q, k, v, places._replace(order=order), window)
    o, lse = mark_saveable((part.o.astype(q.dtype), part.lse))
    return o, (q, k, v, places, o, lse)


def _attend_backward(window, order, kept, do):
    q, k, v, places, o, lse = kept
    places = places._replace(order=order)
    grads = gradients_partly(q, k, v, places, window, do, lse, row_sums(do, o, lse))
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def row_sums(do_BTNH: jax.Array, o_BTNH: jax.Array, lse_BKGT: jax.Array) -> jax.Array:
    """sum(do * o) of each query, as backward of a softmax needs it: [B, K, G, T]."""
    products = (do_BTNH.astype(lse_BKGT.dtype) * o_BTNH.astype(lse_BKGT.dtype)).sum(-1)
    return jnp.moveaxis(products, 1, -1).reshape(lse_BKGT.shape)


def attend_partly(
    q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, places: Places, window: int | None
) -> Partial:
    """Attention over these keys alone. Not differentiable: see `gradients_partly`."""
    how = _How(places.order, window, MOST_POSITIONS)
    return _attend_partly(how, q_BTNH, k_BSKH, v_BSKH, places._replace(order=None))


def gradients_partly(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    places: Places,
    window: int | None,
    do_BTNH: jax.Array,
    lse_BKGT: jax.Array,
    sums_BKGT: jax.Array,
) -> tuple:
    """(dq, dk, dv) through these keys' scores alone, in at least fp32. lse, sums (`row_sums`): of all keys."""
    how = _How(places.order, window, MOST_POSITIONS)
    of_query = (do_BTNH, lse_BKGT, sums_BKGT)
    return _gradients_partly(how, q_BTNH, k_BSKH, v_BSKH, places._replace(order=None), *of_query)


class _How(NamedTuple):
    """What a program is made for: `Places.order`, the window, the most positions of a block."""

    order: str | None
    window: int | None
    most: int


# Functions of JAX's own, so that each is traced once for all hops, layers and directions that have its shapes.
@partial(jax.jit, static_argnums=0)
def _attend_partly(how: _How, q_BTNH, k_BSKH, v_BSKH, places: Places) -> Partial:
    queries, keys = _queries(how, q_BTNH, k_BSKH, places), _keys(how, k_BSKH, v_BSKH, places)
    wide = _wide(q_BTNH)

    def visit(carry, query: _Query, key: _Key):
        most, total, o = (x[query.number] for x in carry)
        scores, mask = _scores(query, key, how.window)
        now = jnp.maximum(most, jnp.where(mask, scores, LOWEST).max(-1))
        weights = jnp.where(mask, jnp.exp(scores - now[..., None]), 0)
        shrink = jnp.exp(most - now)
        values = jnp.einsum("BKGTS,BSKH->BKGTH", weights.astype(key.v.dtype), key.v, preferred_element_type=wide)
        found = (now, total * shrink + weights.sum(-1), o * shrink[..., None] + values)
        return tuple(x.at[query.number].set(y) for x, y in zip(carry, found, strict=True))

    _, batch, size, kv_heads, group, width = queries.x.shape
    shape = (len(queries.x), batch, kv_heads, group, size)
    start = (jnp.full(shape, LOWEST, wide), jnp.zeros(shape, wide), jnp.zeros((*shape, width), wide))
    most, total, o = _visit_pairs(how, visit, _typed_like(q_BTNH, *start), queries, keys)
    lse = jnp.where(total > 0, most + jnp.log(jnp.maximum(total, 1e-37)), LOWEST)
    o = o / jnp.where(total > 0, total, 1)[..., None]
    # [blocks, B, K, G, T of a block, H] -> [B, T, N, H]
    o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(q_BTNH.shape)
    return Partial(o, jnp.moveaxis(lse, 0, 3).reshape(batch, kv_heads, group, -1))


@partial(jax.jit, static_argnums=0)
def _gradients_partly(how: _How, q_BTNH, k_BSKH, v_BSKH, places: Places, do_BTNH, lse_BKGT, sums_BKGT) -> tuple:
    queries = _queries(how, q_BTNH, k_BSKH, places, do_BTNH, lse_BKGT, sums_BKGT)
    keys, wide, scale = _keys(how, k_BSKH, v_BSKH, places), _wide(q_BTNH), q_BTNH.shape[-1] ** -0.5
    product = partial(jnp.einsum, preferred_element_type=wide)

    def visit(carry, query: _Query, key: _Key):
        dq, dk, dv = carry
        scores, mask = _scores(query, key, how.window)
        weights = jnp.where(mask, jnp.exp(scores - query.lse[..., None]), 0)
        dweights = product("BTKGH,BSKH->BKGTS", query.do, key.v)
        dscores = (weights * (dweights - query.sums[..., None]) * scale).astype(q_BTNH.dtype)
        return (
            dq.at[query.number].add(product("BKGTS,BSKH->BTKGH", dscores, key.x)),
            dk.at[key.number].add(product("BKGTS,BTKGH->BSKH", dscores, query.x)),
            dv.at[key.number].add(product("BKGTS,BTKGH->BSKH", weights.astype(q_BTNH.dtype), query.do)),
        )

    start = (jnp.zeros(x.shape, wide) for x in (queries.x, keys.x, keys.v))
    grads = _visit_pairs(how, visit, _typed_like(q_BTNH, *start), queries, keys)
    like = (q_BTNH, k_BSKH, v_BSKH)
    return tuple(jnp.moveaxis(g, 0, 1).reshape(x.shape) for g, x in zip(grads, like, strict=True))


# --------------------------------------------------------------------------------------------------------- the blocks


class _Query(NamedTuple):
    """A block of queries, or all, stacked: x[B, T, K, G, H]; in backward with do like x, and lse, sums[B, K, G, T]."""

    number: jax.Array
    x: jax.Array
    positions: jax.Array
    starts: jax.Array | None
    do: jax.Array = None
    lse: jax.Array = None
    sums: jax.Array = None


class _Key(NamedTuple):
    """A block of keys and values, or all of them stacked: x, v[B, S, K, H]."""

    number: jax.Array
    x: jax.Array
    positions: jax.Array
    v: jax.Array


def _queries(how: _How, q_BTNH, k_BSKH, places: Places, do=None, lse=None, sums=None) -> _Query:
    # In a loop over layers JAX computes what does not depend on the layer before the loop, and keeps it: the masks of
    # all blocks, as large as the scores. So they depend on the queries.
    q_BTNH, (first, _, starts, _) = lax.optimization_barrier((q_BTNH, places))
    shape = (*q_BTNH.shape[:2], k_BSKH.shape[2], -1, q_BTNH.shape[-1])
    cut = partial(_cut, size=block_size(q_BTNH.shape[1], how.most))
    return _Query(
        *_numbered(first, q_BTNH.shape[1], cut(q_BTNH.reshape(shape), 1)),
        None if starts is None else cut(starts, 1),
        None if do is None else cut(do.reshape(shape), 1),
        *(None if x is None else cut(x, 3) for x in (lse, sums)),
    )


def _keys(how: _How, k_BSKH, v_BSKH, places: Places) -> _Key:
    cut = partial(_cut, size=block_size(k_BSKH.shape[1], how.most))
    return _Key(*_numbered(places.key, k_BSKH.shape[1], cut(k_BSKH, 1)), cut(v_BSKH, 1))


def _cut(x, dim: int, size: int):
    """[..., T, ...] -> [blocks, ..., T of a block, ...]."""
    return jnp.moveaxis(x.reshape(*x.shape[:dim], -1, size, *x.shape[dim + 1 :]), dim, 0)


def _numbered(first, length: int, x) -> tuple:
    """(number, x, positions) of all blocks."""
    return jnp.arange(len(x)), x, first + jnp.arange(length).reshape(len(x), -1)


def block_size(length: int, most: int) -> int:
    """The largest part of `length`, at most `most`, that divides it; all of it where none is a fourth as large."""
    best = max(size for size in range(1, min(length, most) + 1) if length % size == 0)
    return best if 4 * best >= min(length, most) else length


def visible_pairs(
    lengths: tuple[int, int], sizes: tuple[int, int], order: str | None, window: int | None
) -> list[tuple[int, int]]:
    """(block of queries, block of keys) of all pairs that may have a score that counts, by what is known of their
    order (`Places.order`)."""
    (queries, keys), (rows, columns) = ([*range(n // size)] for n, size in zip(lengths, sizes, strict=True)), sizes
    pairs = [(i, j) for i in queries for j in keys]
    if order != "same":
        return pairs
    return [
        (i, j)
        for i, j in pairs
        if j * columns < (i + 1) * rows and (window is None or i * rows - (j + 1) * columns + 1 < window)
    ]


def _visit_pairs(how: _How, visit: Callable, carry, queries: _Query, keys: _Key):
    """carry after visit(carry, query, key) of all pairs of blocks that may have a score that counts."""
    lengths, sizes = zip(*((x.positions.size, x.positions.shape[1]) for x in (queries, keys)), strict=True)
    pairs = visible_pairs(lengths, sizes, how.order, how.window)
    known = how.order == "same" or (how.order == "after" and how.window is None)

    def step(carry, pair):
        query, key = (
            jax.tree.map(lambda x, at=at: x[at], blocks) for blocks, at in zip((queries, keys), pair, strict=True)
        )
        if known:
            return visit(carry, query, key), None
        seen = _any_seen(query, key, how.window)
        return lax.cond(seen, lambda carry: visit(carry, query, key), lambda carry: carry, carry), None

    if len(pairs) == 1:
        return step(carry, pairs[0])[0]
    return lax.scan(step, carry, tuple(jnp.array(pairs).T))[0]


def _any_seen(query: _Query, key: _Key, window: int | None) -> jax.Array:
    """Whether any query of the block may see a key of the other."""
    some = (query.positions[-1] >= key.positions[0]) & (key.positions[-1] >= 0)
    return some if window is None else some & (query.positions[0] - key.positions[-1] < window)


def _scores(query: _Query, key: _Key, window: int | None) -> tuple[jax.Array, jax.Array]:
    """(scores[B, K, G, T, S], which of them count)."""
    scaled = query.x * query.x.shape[-1] ** -0.5
    scores = jnp.einsum("BTKGH,BSKH->BKGTS", scaled, key.x, preferred_element_type=_wide(query.x))
    query_T1, key_S = query.positions[:, None], key.positions
    mask = (query_T1 >= key_S) & (key_S >= 0)
    if window is not None:
        mask &= query_T1 - key_S < window
    if query.starts is not None:
        mask = (mask & (key_S >= query.starts[..., None]))[:, None, None]
    return scores, mask


def _of_heads(x_BKGT) -> jax.Array:
    """[B, K, G, T] -> [B, T, N, 1]."""
    batch, *_, length = x_BKGT.shape
    return jnp.moveaxis(x_BKGT, -1, 1).reshape(batch, length, -1, 1)


def _wide(x):
    return jnp.promote_types(x.dtype, jnp.float32)


def _typed_like(x, *arrays) -> tuple[jax.Array, ...]:
    """Arrays that vary over the axes over which x does."""
    return tuple(comm.varying(array, sorted(varying_axes(x))) for array in arrays)


def vary_alike(*arrays) -> tuple[jax.Array, ...]:
    """Each, typed varying over every axis over which one of them varies."""
    axes = sorted(frozenset().union(*map(varying_axes, arrays)))
    return tuple(comm.varying(array, axes) for array in arrays)
