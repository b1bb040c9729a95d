"""Which heads of keys and values the query heads of a tp rank use, where several query heads share one."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.low_rank import LowRank
from jaxdist.parallel.tensor import AXIS


class HeadsOfQueries(NamedTuple):
    """Which heads of keys this tp rank's query heads use (`heads_of_queries`).

    count: of the key heads that the rank computes, from `first` on, where the parameters it holds have all of them;
    None where it holds its own alone. query: for each local query, its key head among those that are computed; None
    where equal groups of queries share them in order.
    """

    count: int | None = None
    first: jax.Array | int = 0
    query: jax.Array | None = None

    def pick(self, w: jax.Array, dim: int) -> jax.Array:
        """The parameters of the heads that the rank computes, of an array with all of them on `dim`."""
        if self.count is None:
            return w
        if isinstance(w, LowRank):
            return w.slice_in_dim(self.first, self.count, dim)
        return lax.dynamic_slice_in_dim(comm.varying(w, AXIS), self.first, self.count, dim)

    def of_each_query(self, k_BTKH: jax.Array) -> jax.Array:
        """Keys (or values) of groups of one size: as they are, or repeated for each query."""
        return k_BTKH if self.query is None else jnp.take(k_BTKH, self.query, axis=2)


def heads_of_queries(num_local: int, num_heads: int, num_kv_heads: int) -> HeadsOfQueries:
    """num_local: query heads on this rank, of `num_heads`; consecutive ones share one of `num_kv_heads` key heads.

    Where tp divides the key heads, each rank holds its part of them. Elsewhere it holds all, and its queries use a few
    neighbours: one where tp is a multiple of the key heads.
    """
    ranks, group = num_heads // num_local, num_heads // num_kv_heads
    if num_kv_heads % ranks == 0:
        return HeadsOfQueries()
    count = max(((r + 1) * num_local - 1) // group - r * num_local // group for r in range(ranks)) + 1
    start = comm.rank(AXIS) * num_local
    first = jnp.minimum(start // group, num_kv_heads - count)
    if count == 1:
        return HeadsOfQueries(1, first)
    return HeadsOfQueries(count, first, (start + jnp.arange(num_local)) // group - first)
