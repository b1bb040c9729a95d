"""Products of groups of rows, each with a matrix of its own: what the experts of one rank compute.

Dims: N rows, in groups one after the other and empty ones at the end; E groups; D, F widths. `lax.ragged_dot` is the
same, but multiplies all rows by all matrices on CPUs and NVIDIA GPUs (`python -m experiments.bench experts`). Here a
loop over the blocks of rows that are there does work that grows with them, and not with the groups or the empty rows.
On an NVIDIA GPU, where each block would be several launches, 16-bit products are kernels (`grouped_kernels`).
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel import grouped_kernels as kernels
from jaxdist.parallel.blocked_attention import vary_alike

BLOCK = 512  # rows of one product
FEWEST = 8
# The functions' names in a traced program, whose loops do not say how often they run: rows and matrices come first.
GROUPED, GROUPED_OUTER = GROUPED_PRODUCTS = "grouped_products", "grouped_outer_products"


def block_rows(num_rows: int, num_groups: int) -> int:
    """Rows of a block: as many as a group has where all are full, in powers of two."""
    return min(BLOCK, max(FEWEST, 1 << (max(num_rows // num_groups, 1) - 1).bit_length()))


def grouped_matmul(x_ND: jax.Array, w_EDF: jax.Array, counts_E: jax.Array) -> jax.Array:
    """x[n] @ w[e] of each row n of group e; 0 in the rows after the last group.

    Layout: x[N, D], w[E, D, F], counts[E] rows of each group -> y[N, F], all local. x is 0 after the last group.
    Backward: dx in the same way; dw[e] from the rows of group e alone, summed in at least fp32, 0 where it has none.
    """
    return _grouped(*vary_alike(x_ND, w_EDF, counts_E))


@jax.custom_vjp
def _grouped(x_ND, w_EDF, counts_E):
    return grouped_products(x_ND, w_EDF, counts_E, transposed=False)


def _forward(x_ND, w_EDF, counts_E):
    return _grouped(x_ND, w_EDF, counts_E), (x_ND, w_EDF, counts_E)


def _backward(kept, dy_NF):
    x_ND, w_EDF, counts_E = kept
    return (
        grouped_products(dy_NF, w_EDF, counts_E, transposed=True),
        grouped_outer_products(x_ND, dy_NF, w_EDF, counts_E),
        None,
    )


_grouped.defvjp(_forward, _backward)


class _Blocks:
    """The blocks that cover the groups' rows: how many there are, and of each its group and rows."""

    def __init__(self, num_rows: int, counts_E: jax.Array):
        self.size, self.counts_E = min(block_rows(num_rows, len(counts_E)), num_rows), counts_E
        self.last_start = num_rows - self.size
        self.of_group_E = -(-counts_E // self.size)
        self.end_E, self.first_row_E = jnp.cumsum(self.of_group_E), jnp.cumsum(counts_E) - counts_E

    @property
    def number(self) -> jax.Array:
        return self.end_E[-1]

    def of(self, block: jax.Array) -> tuple[jax.Array, ...]:
        """(its group, whether it begins it, the first of `size` rows, which of these are not before it, which are its
        own)."""
        group = jnp.sum(self.end_E <= block)
        done = (block - self.end_E[group] + self.of_group_E[group]) * self.size
        first = self.first_row_E[group] + done
        start = jnp.minimum(first, self.last_start)  # none reaches beyond the last row
        row = start + jnp.arange(self.size)
        return group, done == 0, start, row >= first, (row >= first) & (row < first + self.counts_E[group] - done)


@partial(jax.jit, static_argnames="transposed")
def grouped_products(x: jax.Array, w: jax.Array, counts_E: jax.Array, *, transposed: bool) -> jax.Array:
    ways = (partial(way, transposed=transposed) for way in (_products_in_a_loop, kernels.row_products))
    return _by_platform(*ways, (x, w), counts_E)


@jax.jit
def grouped_outer_products(x_ND: jax.Array, dy_NF: jax.Array, w_EDF: jax.Array, counts_E: jax.Array) -> jax.Array:
    def loop(x, dy, counts):
        return _outer_products_in_a_loop(x, dy, w_EDF, counts)

    return _by_platform(loop, kernels.outer_products, (x_ND, dy_NF), counts_E)


def _by_platform(loop, on_gpu, arrays: tuple, counts_E):
    if not kernels.runs_on_kernels(*arrays):
        return loop(*arrays, counts_E)
    return lax.platform_dependent(*arrays, counts_E, cuda=on_gpu, default=loop)


def _products_in_a_loop(x, w, counts_E, *, transposed: bool):
    blocks = _Blocks(len(x), counts_E)
    width = w.shape[1 if transposed else 2]
    contract = (((1,), (1 if transposed else 0,)), ((), ()))

    def body(block, y):
        group, _, start, from_here, _ = blocks.of(block)
        rows = lax.dynamic_slice_in_dim(x, start, blocks.size)
        product = lax.dot_general(rows, lax.dynamic_index_in_dim(w, group, keepdims=False), contract)
        # Rows of the next group are wrong here, and are written again by its own block.
        before = lax.dynamic_slice_in_dim(y, start, blocks.size)
        return lax.dynamic_update_slice_in_dim(y, jnp.where(from_here[:, None], product, before), start, 0)

    empty = comm.varying_like(jnp.zeros((len(x), width), x.dtype), x)
    return lax.fori_loop(jnp.zeros_like(blocks.number), blocks.number, body, empty)


def _outer_products_in_a_loop(x_ND, dy_NF, w_EDF, counts_E):
    blocks = _Blocks(len(x_ND), counts_E)
    wide = jnp.promote_types(w_EDF.dtype, jnp.float32)

    def body(block, sums):
        dw, of_group = sums
        group, begins, start, _, own = blocks.of(block)
        x, dy = (lax.dynamic_slice_in_dim(rows, start, blocks.size) for rows in (x_ND, dy_NF))
        x = jnp.where(own[:, None], x, 0)
        product = lax.dot_general(x, dy, (((0,), (0,)), ((), ())), preferred_element_type=wide)
        of_group = product + jnp.where(begins, 0, of_group)
        return lax.dynamic_update_slice_in_dim(dw, of_group[None].astype(dw.dtype), group, 0), of_group

    empty = [comm.varying_like(jnp.zeros(*of), w_EDF) for of in ((w_EDF.shape, w_EDF.dtype), (w_EDF.shape[1:], wide))]
    return lax.fori_loop(jnp.zeros_like(blocks.number), blocks.number, body, tuple(empty))[0]
