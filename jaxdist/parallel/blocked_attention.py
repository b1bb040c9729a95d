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

from jaxdist.compat import varying_axes
from jaxdist.parallel import collectives as comm

MOST_POSITIONS = 512  # of a block
LOWEST = -1e30  # a score that no softmax sees; finite, since the difference of two infinities is not a number


class Partial(NamedTuple):
    """Attention of queries over some of their keys: o[B, T, N, H] divided by the sum of these keys' weights alone, and
    the logarithm of that sum, lse[B, K, G, T]. Both in at least fp32."""

    o: jax.Array
    lse: jax.Array


class Places(NamedTuple):
    """Positions: of the first query, of the first key; and starts[B, T], where each query's document begins."""

    query: Any
    key: Any
    starts: jax.Array | None = None


def merged(one: Partial, other: Partial) -> Partial:
    """Attention over the keys of both."""
    lse = jnp.logaddexp(one.lse, other.lse)
    return Partial(sum(part.o * _of_heads(jnp.exp(part.lse - lse)) for part in (one, other)), lse)


def blocked_attention(q_BTNH, k_BSKH, v_BSKH, places: Places, window: int | None = None) -> jax.Array:
    """Causal attention over keys that this rank holds, scaled by 1/sqrt(H): o[B, T, N, H] in q's dtype.

    K divides N: consecutive queries' heads share a key's. window: a query sees itself and the `window` - 1 positions
    before it. Backward keeps q, k, v, o and one number of each query and head. Sends: nothing.
    """
    places = Places(*map(jnp.asarray, places[:2]), places.starts)
    return _attend(window, *vary_alike(q_BTNH, k_BSKH, v_BSKH), places)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(window, q, k, v, places):
    return attend_partly(q, k, v, places, window).o.astype(q.dtype)


def _attend_forward(window, q, k, v, places):
    part = attend_partly(q, k, v, places, window)
    o = part.o.astype(q.dtype)
    return o, (q, k, v, places, o, part.lse)


def _attend_backward(window, kept, do):
    q, k, v, places, o, lse = kept
    grads = gradients_partly(q, k, v, places, window, do, lse, row_sums(do, o, lse))
    return *(g.astype(x.dtype) for g, x in zip(grads, (q, k, v), strict=True)), None


_attend.defvjp(_attend_forward, _attend_backward)


def row_sums(do_BTNH, o_BTNH, lse_BKGT) -> jax.Array:
    """sum(do * o) of each query, as backward of a softmax needs it: [B, K, G, T]."""
    products = (do_BTNH.astype(lse_BKGT.dtype) * o_BTNH.astype(lse_BKGT.dtype)).sum(-1)
    return jnp.moveaxis(products, 1, -1).reshape(lse_BKGT.shape)


def attend_partly(q_BTNH, k_BSKH, v_BSKH, places: Places, window: int | None) -> Partial:
    """Attention over these keys alone. Not differentiable: see `gradients_partly`."""
    queries, keys = _Blocks.of(q_BTNH, k_BSKH, places)
    wide = _wide(q_BTNH)

    def rows(_, query):
        def columns(carry, key):
            def seen(carry):
                most, total, o = carry
                scores, mask = _scores(query, key, window)
                now = jnp.maximum(most, jnp.where(mask, scores, LOWEST).max(-1))
                weights = jnp.where(mask, jnp.exp(scores - now[..., None]), 0)
                shrink = jnp.exp(most - now)
                values = jnp.einsum(
                    "BKGTS,BSKH->BKGTH", weights.astype(key.v.dtype), key.v, preferred_element_type=wide
                )
                return now, total * shrink + weights.sum(-1), o * shrink[..., None] + values

            return _where_seen(query, key, window, seen, carry), None

        shape = (*queries.heads, query.x.shape[1])
        start = _typed_like(q_BTNH, jnp.full(shape, LOWEST, wide), jnp.zeros(shape, wide))
        start += _typed_like(q_BTNH, jnp.zeros((*shape, q_BTNH.shape[-1]), wide))
        (most, total, o), _ = _scan(columns, start, keys.cut(v_BSKH))
        lse = jnp.where(total > 0, most + jnp.log(jnp.maximum(total, 1e-37)), LOWEST)
        return None, (o / jnp.where(total > 0, total, 1)[..., None], lse)

    _, (o, lse) = _scan(rows, None, queries.cut())
    batch, length, heads, width = q_BTNH.shape
    # [blocks, B, K, G, T of a block, H] -> [B, T, N, H]
    o = jnp.moveaxis(o, (0, 4), (1, 2)).reshape(batch, length, heads, width)
    return Partial(o, jnp.moveaxis(lse, 0, 3).reshape(*queries.heads, length))


def gradients_partly(q_BTNH, k_BSKH, v_BSKH, places: Places, window, do_BTNH, lse_BKGT, sums_BKGT) -> tuple:
    """(dq, dk, dv) through these keys' scores alone, in at least fp32. lse, sums (`row_sums`): of all keys."""
    queries, keys = _Blocks.of(q_BTNH, k_BSKH, places)
    wide, scale = _wide(q_BTNH), q_BTNH.shape[-1] ** -0.5
    product = partial(jnp.einsum, preferred_element_type=wide)

    def rows(carry, query):
        def columns(carry, key):
            dq, dk, dv = carry

            def seen(_):
                scores, mask = _scores(query, key, window)
                weights = jnp.where(mask, jnp.exp(scores - query.lse[..., None]), 0)
                dweights = product("BTKGH,BSKH->BKGTS", query.do, key.v)
                dscores = (weights * (dweights - query.sums[..., None]) * scale).astype(q_BTNH.dtype)
                return (
                    product("BKGTS,BSKH->BTKGH", dscores, key.x),
                    product("BKGTS,BTKGH->BSKH", dscores, query.x),
                    product("BKGTS,BTKGH->BSKH", weights.astype(q_BTNH.dtype), query.do),
                )

            zeros = _typed_like(
                q_BTNH, jnp.zeros(query.x.shape, wide), *(jnp.zeros(x.shape, wide) for x in (key.x, key.v))
            )
            mine, dk_here, dv_here = _where_seen(query, key, window, seen, zeros)
            return (dq + mine, dk.at[key.number].add(dk_here), dv.at[key.number].add(dv_here)), None

        [dq] = _typed_like(q_BTNH, jnp.zeros(query.x.shape, wide))
        (dq, *others), _ = _scan(columns, (dq, *carry), keys.cut(v_BSKH))
        return tuple(others), dq

    blocked = (keys.count, k_BSKH.shape[0], keys.size, *k_BSKH.shape[2:])
    (dk, dv), dq = _scan(
        rows, _typed_like(q_BTNH, *[jnp.zeros(blocked, wide)] * 2), queries.cut(do_BTNH, lse_BKGT, sums_BKGT)
    )
    return (
        jnp.moveaxis(dq, 0, 1).reshape(q_BTNH.shape),
        *(jnp.moveaxis(x, 0, 1).reshape(k_BSKH.shape) for x in (dk, dv)),
    )


# --------------------------------------------------------------------------------------------------------- the blocks


class _Query(NamedTuple):
    """A block of queries: x[B, T, K, G, H]; in backward with do like x, and lse, sums[B, K, G, T]."""

    x: jax.Array
    positions: jax.Array
    starts: jax.Array | None
    do: jax.Array | None = None
    lse: jax.Array | None = None
    sums: jax.Array | None = None


class _Key(NamedTuple):
    """A block of keys and values: x, v[B, S, K, H]."""

    number: jax.Array
    x: jax.Array
    positions: jax.Array
    v: jax.Array


class _Blocks(NamedTuple):
    """An array of queries or keys, and how it is cut. heads: (B, K, G)."""

    x: jax.Array
    first: jax.Array
    starts: jax.Array | None
    heads: tuple[int, int, int]
    size: int

    @classmethod
    def of(cls, q_BTNH, k_BSKH, places: Places) -> tuple["_Blocks", "_Blocks"]:
        # In a loop over layers JAX computes what does not depend on the layer before the loop, and keeps it: the masks of
        # all blocks, as large as the scores. So they depend on the queries.
        q_BTNH, places = lax.optimization_barrier((q_BTNH, places))
        batch, length, num_heads, width = q_BTNH.shape
        kv_heads = k_BSKH.shape[2]
        q_BTKGH = q_BTNH.reshape(batch, length, kv_heads, -1, width)
        heads = (batch, kv_heads, num_heads // kv_heads)
        return (
            cls(q_BTKGH, places.query, places.starts, heads, block_size(length)),
            cls(k_BSKH, places.key, None, heads, block_size(k_BSKH.shape[1])),
        )

    @property
    def count(self) -> int:
        return self.x.shape[1] // self.size

    def _along_sequence(self, x, dim: int = 1):
        """[..., T, ...] -> [blocks, ..., T of a block, ...]."""
        shape = (*x.shape[:dim], self.count, self.size, *x.shape[dim + 1 :])
        return jnp.moveaxis(x.reshape(shape), dim, 0)

    def _positions(self) -> jax.Array:
        return self.first + jnp.arange(self.x.shape[1]).reshape(self.count, self.size)

    def cut(self, *more):
        """All blocks, stacked: of keys with the values; of queries, in backward, with do, lse and sums."""
        if self.x.ndim == 4:
            (v,) = more
            return _Key(
                jnp.arange(self.count), self._along_sequence(self.x), self._positions(), self._along_sequence(v)
            )
        starts = None if self.starts is None else self._along_sequence(self.starts)
        if more:
            do, lse, sums = more
            more = (
                self._along_sequence(do.reshape(self.x.shape)),
                *(self._along_sequence(x, 3) for x in (lse, sums)),
            )
        return _Query(self._along_sequence(self.x), self._positions(), starts, *more)


def block_size(length: int) -> int:
    """The largest part of `length`, at most `MOST_POSITIONS`, that divides it; all of it where none is a fourth."""
    best = max(size for size in range(1, min(length, MOST_POSITIONS) + 1) if length % size == 0)
    return best if 4 * best >= min(length, MOST_POSITIONS) else length


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


def _where_seen(query: _Query, key: _Key, window: int | None, seen: Callable, otherwise):
    """seen(otherwise) where any query of the block may see a key of the other; elsewhere `otherwise`, at no cost."""
    some = (query.positions[-1] >= key.positions[0]) & (key.positions[-1] >= 0)
    if window is not None:
        some &= query.positions[0] - key.positions[-1] < window
    return lax.cond(some, seen, lambda otherwise: otherwise, otherwise)


def _scan(body: Callable, carry, xs):
    """`lax.scan`, without a loop where there is one block."""
    if len(jax.tree.leaves(xs)[0]) > 1:
        return lax.scan(body, carry, xs)
    carry, y = body(carry, jax.tree.map(lambda x: x[0], xs))
    return carry, jax.tree.map(lambda x: x[None], y)


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
