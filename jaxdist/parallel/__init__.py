"""Explicit-collective parallelism for any model inside `jax.shard_map(..., check_vma=True)`.

`collectives`: typed wrappers that drop size-1 axes and refuse a second reduction. `algorithms`: ring, tree and
halving-doubling written by hand from `ppermute`. `tensor`: the two places a block meets tensor parallelism, and the
vocabulary-parallel embedding and loss. `zero`, `grouping`, `data`: the gradient rule over a `jaxdist.layout.Layout`.
"""

from jaxdist.parallel import algorithms, collectives, data, dropout, grouping, tensor, zero
from jaxdist.parallel.collectives import (
    all_gather,
    all_reduce,
    all_reduce_max,
    all_to_all,
    broadcast,
    permute,
    rank,
    reduce_scatter,
    size,
    varying,
)
from jaxdist.parallel.data import reduce_gradients
from jaxdist.parallel.tensor import enter, leave, vocab_parallel_cross_entropy, vocab_parallel_embedding

__all__ = [
    "algorithms",
    "all_gather",
    "all_reduce",
    "all_reduce_max",
    "all_to_all",
    "broadcast",
    "collectives",
    "data",
    "dropout",
    "enter",
    "grouping",
    "leave",
    "permute",
    "rank",
    "reduce_gradients",
    "reduce_scatter",
    "size",
    "tensor",
    "varying",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "zero",
]
