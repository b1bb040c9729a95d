"""The products of `grouped_matmul` on an NVIDIA GPU: one Triton kernel each, through Pallas.

Dims: N rows, in groups one after the other and empty ones at the end; E groups; D, F widths; B blocks of rows. A block
holds rows of one group alone, read where they stand: no row is copied, and the number of blocks, N // ROWS + E, does
not depend on how many rows each group has. Sums are fp32. On an H100, for Qwen3-30B-A3B's experts and with both
gradients, 1.7 to 1.9 times the time of one product of as many FLOPs, whatever the load (docs/benchmarks.md).
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

ROWS, PART = 128, 64  # rows of a block; what is summed at a time: of D, or of rows for `outer_products`
WIDE = ("8.0", "9.0", "10.0", "10.3")  # compute capabilities whose shared memory holds blocks of 256 columns


def runs_on_kernels(*arrays: jax.Array) -> bool:
    """Whether the kernels take these types and widths; where not, `grouped_matmul` runs its loop on a GPU too."""
    return all(x.dtype in (jnp.bfloat16, jnp.float16) and not any(d % PART for d in x.shape[1:]) for x in arrays)


def row_products(
    x_ND: jax.Array, w_EDF: jax.Array, counts_E: jax.Array, *, transposed: bool, interpret: bool = False
) -> jax.Array:
    """x[n] @ w[e] of each row n of group e, or x[n] @ w[e].T; 0 in the rows after the last group.

    Layout: x[N, D], w[E, D, F] (transposed: [E, F, D]), counts[E] -> [N, F], all local.
    """
    pl, triton = _pallas()
    (rows, depth), width = x_ND.shape, w_EDF.shape[1 if transposed else 2]
    columns, blocks = _columns(width), rows // ROWS + len(counts_E)

    def kernel(block_3B, x, w, y):
        block, j = pl.program_id(0), pl.program_id(1)
        group, start, stop = (block_3B[i, block] for i in range(3))
        own, at = (start + jnp.arange(ROWS) < stop)[:, None], pl.ds(j * columns, columns)

        def add(k, total):
            part = pl.ds(k * PART, PART)
            left = triton.load(x.at[pl.ds(start, ROWS), part], mask=own, other=0.0)
            right = triton.load(w.at[(group, at, part) if transposed else (group, part, at)])
            return total + _dot(left, right, 1, 1 if transposed else 0)

        @pl.when(start < stop)
        def _():
            total = lax.fori_loop(0, depth // PART, add, jnp.zeros((ROWS, columns), jnp.float32))
            triton.store(y.at[pl.ds(start, ROWS), at], total.astype(y.dtype), mask=own)

    call = _call(kernel, (blocks, width // columns), (rows, width), interpret)
    y_NF = call(_blocks(counts_E, blocks), x_ND, w_EDF)
    return jnp.where((jnp.arange(rows) < jnp.sum(counts_E))[:, None], y_NF, 0)  # the kernel leaves those as they are


def outer_products(x_ND: jax.Array, dy_NF: jax.Array, counts_E: jax.Array, *, interpret: bool = False) -> jax.Array:
    """The sum over group e's rows n of x[n] and dy[n]'s outer product; 0 for an empty group.

    Layout: x[N, D], dy[N, F], counts[E] -> [E, D, F], all local.
    """
    pl, triton = _pallas()
    depth, width = x_ND.shape[1], dy_NF.shape[1]
    high, columns, ends = math.gcd(depth, 128), _columns(width), jnp.cumsum(counts_E)

    def kernel(rows_2E, x, dy, dw):
        group, i, j = (pl.program_id(axis) for axis in range(3))
        first, stop = rows_2E[0, group], rows_2E[1, group]
        down, across = pl.ds(i * high, high), pl.ds(j * columns, columns)

        def add(k, total):
            start = first + k * PART
            own, rows = (start + jnp.arange(PART) < stop)[:, None], pl.ds(start, PART)
            left, right = (triton.load(of, mask=own, other=0.0) for of in (x.at[rows, down], dy.at[rows, across]))
            return total + _dot(left, right, 0, 0)

        total = lax.fori_loop(0, pl.cdiv(stop - first, PART), add, jnp.zeros((high, columns), jnp.float32))
        dw[group, down, across] = total.astype(dw.dtype)

    grid = (len(counts_E), depth // high, width // columns)
    rows_2E = jnp.stack([ends - counts_E, ends]).astype(jnp.int32)
    return _call(kernel, grid, (len(counts_E), depth, width), interpret)(rows_2E, x_ND, dy_NF)


def _blocks(counts_E: jax.Array, number: int) -> jax.Array:
    """[3, B]: of each block its group, its first row and the row after its group's last; one of no rows is all 0."""
    of_group_E = -(-counts_E // ROWS)
    end_E, last_E = jnp.cumsum(of_group_E), jnp.cumsum(counts_E)
    block_B = jnp.arange(number)
    used_B = block_B < end_E[-1]
    group_B = jnp.sum(end_E <= block_B[:, None], axis=1)
    start_B = (last_E - counts_E)[group_B] + (block_B - (end_E - of_group_E)[group_B]) * ROWS
    return jnp.where(used_B, jnp.stack([group_B, start_B, last_E[group_B]]), 0).astype(jnp.int32)


def _card() -> str:
    """Its compute capability; where a program is compiled without a card, that of a large one."""
    return getattr(jax.devices()[0], "compute_capability", WIDE[0])


def _columns(width: int) -> int:
    """How many a block of results has: 256 where they divide the width and the card's shared memory holds them."""
    return math.gcd(width, 256 if _card() in WIDE else 128)


def _dot(a, b, i: int, j: int):
    return lax.dot_general(a, b, (((i,), (j,)), ((), ())), preferred_element_type=jnp.float32)


def _call(kernel, grid: tuple[int, ...], shape: tuple[int, ...], interpret: bool):
    pl, triton = _pallas()

    def call(table, a, b):
        kind = jax.typeof(a)
        out = jax.ShapeDtypeStruct(shape, kind.dtype, manual_axis_type=kind.manual_axis_type)
        stages = 1 if float(_card()) < 8 else 3  # of older cards the shared memory holds no more
        params = triton.CompilerParams(num_warps=8, num_stages=stages)
        return pl.pallas_call(kernel, grid=grid, out_shape=out, compiler_params=params, interpret=interpret)(
            table, a, b
        )

    return call


def _pallas():
    from jax.experimental import pallas  # imported where it is used: half a second
    from jax.experimental.pallas import triton

    return pallas, triton
