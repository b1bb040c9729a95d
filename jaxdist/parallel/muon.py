"""Muon on shards: a momentum's matrices, orthogonalized exactly wherever their parts are.

Newton-Schulz needs whole matrices, and a rank has parts of them. Each dim of a leaf belongs to the matrix's input or
output, or numbers matrices (layers, experts):

(a) where only dims that number matrices are split (stages, experts), a rank has whole ones, and nothing is sent;
(b) of X[M, N_tp] the products X X^T are partial sums: an all-reduce of [M, M] an iteration, and the rest is local (of
    X[M_tp, N] the same with X^T X);
(c) an all-to-all gives each of the ranks that split a dim whole matrices of its own, and another takes them back.

Of those a leaf takes what sends least. Ranks that hold the same matrices orthogonalize a share each, and gather the
others'. Leaves that are split alike are one where ranks would get more matrices leaf by leaf: of a leaf's 32 matrices
on 64 ranks half the ranks get none, and two such leaves together are one for each. Nothing here depends on the order in
which shards stand along a dim: if P and Q permute rows and columns, P X Q is orthogonalized to P Y Q.

Dims: B matrices, M rows (input), N columns (output). Source: Jordan et al. 2024 (kellerjordan.github.io/posts/muon);
for distributed runs arXiv 2502.16982, section 2.3, which gathers whole matrices.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.exchange import all_to_all

EXACT_ON_SHARDS = "exact on shards"
EPS = 1e-7  # least norm that a matrix is divided by
ROWS, COLUMNS, COPIES = 1, 2, 3
ITERATIONS = 5
COEFFICIENTS = {
    "original": ((3.4445, -4.7750, 2.0315),) * ITERATIONS,  # Jordan et al. 2024
    "dion": (  # one set an iteration, nearer to orthogonal: github.com/microsoft/dion, and optax's "dion"
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
}


@dataclass(frozen=True)
class Matrix:
    """A leaf of matrices. shape: global, without padding. sides: as `jaxdist.params.Param.matrix`. spec: the mesh axis,
    or axes, of each dim, as in a PartitionSpec. copies: axes whose ranks hold the same shard, and share the work."""

    shape: tuple[int, ...]
    sides: tuple[str | None, ...]
    spec: Sequence[str | tuple[str, ...] | None]
    copies: tuple[str, ...] = ()

    @property
    def dims(self) -> list[list[int]]:
        """The dims that number matrices, that are rows, and that are columns."""
        return [[dim for dim, its in enumerate(self.sides) if its == side] for side in (None, "in", "out")]

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The mesh axes that split each of these, and those of copies."""
        entries = [[self.spec[dim] or () for dim in dims if dim < len(self.spec)] for dims in self.dims]
        return [*(tuple(a for e in each for a in ((e,) if isinstance(e, str) else e)) for each in entries), self.copies]

    def sizes(self, shape: Sequence[int]) -> list[int]:
        """[matrices, rows, columns] of a shape, global or local."""
        return [math.prod(shape[dim] for dim in dims) for dims in self.dims]

    def numbered(self, x: jax.Array) -> jax.Array:
        """A shard as [matrices, rows, columns]."""
        return x.transpose([dim for dims in self.dims for dim in dims]).reshape(self.sizes(x.shape))

    def restored(self, y_BMN: jax.Array, shape: Sequence[int]) -> jax.Array:
        """The shard of this shape that `numbered` made so."""
        order = [dim for dims in self.dims for dim in dims]
        return y_BMN.reshape([shape[dim] for dim in order]).transpose([order.index(dim) for dim in range(len(shape))])

    def scale(self, kind: str) -> float:
        """Factor of an orthogonal update. "shape": Jordan's, of a weight that is output x input; "rms": to the usual
        RMS of AdamW's update, so that its learning rate serves (arXiv 2502.16982, section 2.2)."""
        _, num_in, num_out = self.sizes(self.shape)
        return {"shape": max(1.0, num_out / num_in) ** 0.5, "rms": 0.2 * max(num_in, num_out) ** 0.5}[kind]


class Split(NamedTuple):
    """Matrices on a rank. local: [B, M, N]. axes: of the mesh, that split each, and those of copies. ranks: on them."""

    local: tuple[int, ...]
    ranks: tuple[int, ...]
    axes: tuple[tuple[str, ...], ...]

    @classmethod
    def of(cls, matrix: Matrix, shape: Sequence[int], size: Callable[[tuple[str, ...]], int]) -> "Split":
        """The split of a leaf whose shard has this shape, on a mesh whose axes have this size."""
        return cls(tuple(matrix.sizes(shape)), tuple(map(size, matrix.axes)), tuple(matrix.axes))

    @property
    def sides(self) -> list[tuple]:
        """What rows and columns are: a leaf with the same in the other order has these matrices transposed."""
        return [(self.local[dim], self.ranks[dim], self.axes[dim]) for dim in (ROWS, COLUMNS)]


class Way(NamedTuple):
    """How whole matrices come about: by an all-to-all for each dim of `shared`, and by sums over the dim that stays
    `split`."""

    shared: tuple[int, ...]
    split: int | None


class Sent(NamedTuple):
    """Messages of a kind over the axes of a dim, or of copies, each with so many elements in the full buffer."""

    kind: str
    dim: int
    count: int
    elements: int


def scale_by_muon(
    matrices: Any,
    *,
    momentum: float | optax.Schedule = 0.95,
    nesterov: bool = True,
    scale: str = "rms",
    coefficients: str = "original",
    bf16: bool = False,
) -> optax.GradientTransformation:
    """Muon's direction of gradients on local shards, as the matrices of whole arrays would have it; no learning rate.

    matrices: a `Matrix` for each leaf of the gradients, in a tree that may have more. momentum: or a schedule of the
    `step` that updates are given. bf16: of operands of products, whose sums stay wide. One moment: the momentum.
    Sends: as `messages` says, of each of `joined`. Outside of `shard_map` every leaf is whole.
    """
    by_path = dict(jax.tree.leaves_with_path(matrices))

    def orthogonalized(updates, params=None):
        found = [by_path[path] for path, _ in jax.tree.leaves_with_path(updates)]
        made = orthogonalize_all(jax.tree.leaves(updates), found, coefficients, bf16)
        scaled = [matrix.scale(scale) * y for matrix, y in zip(found, made, strict=True)]
        return jax.tree.unflatten(jax.tree.structure(updates), scaled)

    trace = scheduled_trace(momentum, nesterov) if callable(momentum) else optax.trace(momentum, nesterov)
    return optax.chain(trace, optax.stateless(orthogonalized))


def scheduled_trace(momentum: optax.Schedule, nesterov: bool) -> optax.GradientTransformationExtraArgs:
    """`optax.trace`, whose decay is `momentum(step)`.

    As published, b <- m b + (1 - m) g. The trace is b / (1 - m): the same direction, and optax's where m is constant.
    """

    def traced(grads, state: optax.TraceState, params=None, *, step: jax.Array, **_):
        now = momentum(step)
        carried = now * (1 - momentum(step - 1)) / (1 - now)
        trace = jax.tree.map(lambda g, t: g + carried * t, grads, state.trace)
        updates = jax.tree.map(lambda g, t: g + now * t, grads, trace) if nesterov else trace
        return updates, optax.TraceState(trace)

    return optax.GradientTransformationExtraArgs(optax.trace(0.0).init, traced)


def exact_on_shards(x: jax.Array) -> jax.Array:
    """The same array, declared to be this rank's shard of what the whole array would give, although it was not made
    element by element: for optimizers that send what they need (`jaxdist.train.leaf_needs`)."""
    return checkpoint_name(x, EXACT_ON_SHARDS)


def orthogonalize(x: jax.Array, matrix: Matrix, coefficients: str = "original", bf16: bool = False) -> jax.Array:
    """Five Newton-Schulz iterations of each matrix of a leaf, of which this is the local shard.

    Layout: x in any layout, as `matrix.spec` says -> the same. Zeros that pad a dim stay zeros.
    Sends: as `messages` says.
    """
    return orthogonalize_all([x], [matrix], coefficients, bf16)[0]


@jax.named_scope("orthogonalize")
def orthogonalize_all(
    leaves: Sequence[jax.Array], matrices: Sequence[Matrix], coefficients: str = "original", bf16: bool = False
) -> list[jax.Array]:
    """`orthogonalize` of every leaf; those of `joined` as one."""
    made: dict[int, jax.Array] = {}
    sizes = [Split.of(matrix, x.shape, comm.size) for matrix, x in zip(matrices, leaves, strict=True)]
    for members, split in joined(sizes):
        turned = [sizes[i].sides != split.sides for i in members]
        parts = [matrices[i].numbered(leaves[i]) for i in members]
        parts = [x.mT if turn else x for x, turn in zip(parts, turned, strict=True)]
        way = choose_way(split.local, split.ranks)
        # Without the barrier jaxlib 0.10.2 on CPU makes leaves operands of an all-to-all, each laid out its own way.
        x_BMN = lax.optimization_barrier(jnp.concatenate(parts)) if len(parts) > 1 else parts[0]
        y_BMN = _orthogonalized(x_BMN, split.axes, way, COEFFICIENTS[coefficients], bf16)
        ends = [*itertools.accumulate(map(len, parts))]
        for i, turn, y in zip(members, turned, jnp.split(y_BMN, ends[:-1]), strict=True):
            whole = matrices[i].restored(y.mT if turn else y, leaves[i].shape)
            made[i] = exact_on_shards(whole.astype(leaves[i].dtype))
    return [made[i] for i in range(len(leaves))]


def _orthogonalized(x_BMN: jax.Array, axes: Sequence[tuple[str, ...]], way: Way, coefficients, bf16) -> jax.Array:
    dim, *later = (*way.shared, COPIES)
    num, ranks = len(x_BMN), comm.size(axes[dim])
    padded = jnp.pad(x_BMN, [(0, -num % ranks), (0, 0), (0, 0)])
    if dim == COPIES:
        share = len(padded) // ranks
        mine = lax.dynamic_slice_in_dim(padded, comm.rank(axes[dim]) * share, share) if ranks > 1 else padded
        made = newton_schulz(mine, coefficients, way.split, axes[way.split] if way.split else (), bf16)
        return comm.all_gather(made, axes[dim], 0, replicated=True)[:num]
    mine = all_to_all(padded, axes[dim], 0, dim)
    made = _orthogonalized(mine, axes, way._replace(shared=tuple(later[:-1])), coefficients, bf16)
    return all_to_all(made, axes[dim], dim, 0)[:num]


def newton_schulz(
    x_BMN: jax.Array,
    coefficients: Sequence[tuple[float, float, float]],
    split: int | None = None,
    axes: comm.Axes = (),
    bf16: bool = False,
) -> jax.Array:
    """X / |X|, then X <- (a I + b A + c A^2) X with A = X X^T for each (a, b, c), in at least fp32; A is of the shorter
    side, or where a dim is split of the other, which every rank has whole. So nothing but products passes over X. bf16:
    X and what it is multiplied with, of sums that are wide.

    Layout: x[B, M, N], or with `split` one of M and N over `axes` -> the same.
    Sends: with `split` 2 (n-1)/n of B numbers, and of B squares of the other side an iteration.
    """
    tall = split == ROWS or (split is None and x_BMN.shape[ROWS] > x_BMN.shape[COLUMNS])
    # The squares of a gradient are beyond what float16 holds, or below it.
    x = (x_BMN.mT if tall else x_BMN).astype(jnp.promote_types(x_BMN.dtype, jnp.float32))
    squares = comm.all_reduce(jnp.sum(jnp.square(x), axis=(1, 2), keepdims=True), axes)
    x = x / jnp.maximum(jnp.sqrt(squares), EPS)

    narrow, wide = jnp.bfloat16 if bf16 else x.dtype, x.dtype

    def product(left: jax.Array, right: jax.Array, dtype) -> jax.Array:
        return jnp.matmul(left.astype(narrow), right.astype(narrow), preferred_element_type=dtype)

    def iterate(x: jax.Array, abc: jax.Array) -> tuple[jax.Array, None]:
        a, b, c = abc
        gram = comm.all_reduce(product(x, x.mT, wide), axes)
        polynomial = a * jnp.eye(gram.shape[-1], dtype=wide) + b * gram + c * product(gram, gram, wide)
        return product(polynomial, x, narrow), None

    x, _ = lax.scan(iterate, x.astype(narrow), jnp.asarray(coefficients, wide), unroll=True)
    return (x.mT if tall else x).astype(x_BMN.dtype)


def joined(leaves: Sequence[Split]) -> list[tuple[list[int], Split]]:
    """Leaves that are orthogonalized as one, by their place, each group with all its matrices.

    Leaves that are split alike, or are so transposed, are joined where a rank has less to do than leaf by leaf, and
    only those whose matrices do not fill the ranks: what is joined is in memory at once.
    """
    alike: dict[tuple, list[int]] = {}
    for i, leaf in enumerate(leaves):
        full = leaf.local[0] % math.prod(leaf.ranks[ROWS:]) == 0
        key = (*sorted(leaf.sides), leaf.axes[0], leaf.axes[COPIES], i if full else None)
        alike.setdefault(key, []).append(i)
    found = []
    for members in alike.values():
        apart = [leaves[i] for i in members]
        whole = apart[0]._replace(local=(sum(each.local[0] for each in apart), *apart[0].local[1:]))
        fewer = flops(*whole[:2]) < sum(flops(*each[:2]) for each in apart)
        found += [(members, whole)] if fewer else [([i], leaves[i]) for i in members]
    return found


def choose_way(local: Sequence[int], ranks: Sequence[int]) -> Way:
    """The way that sends least. local: [B, M, N] on a rank. ranks: that split each of them."""
    dims = tuple(dim for dim in (ROWS, COLUMNS) if ranks[dim] > 1)
    ways = [Way(dims, None), *(Way(tuple({*dims} - {dim}), dim) for dim in dims)]

    def sent(way: Way) -> float:
        factor = {"all_reduce": 2, "all_to_all": 1, "all_gather": 1}
        return sum(
            factor[each.kind] * each.count * each.elements * (1 - 1 / ranks[each.dim])
            for each in messages(local, ranks, way)
        )

    return min(ways, key=sent)


def messages(local: Sequence[int], ranks: Sequence[int], way: Way | None = None) -> list[Sent]:
    """What a leaf's orthogonalization sends, in the way it is done or in another. local, ranks: as in `choose_way`."""
    way, sizes, found = way or choose_way(local, ranks), [*local], []
    for dim in way.shared:
        sizes[0] += -sizes[0] % ranks[dim]
        found.append(Sent("all_to_all", dim, 2, math.prod(sizes)))
        sizes[0], sizes[dim] = sizes[0] // ranks[dim], sizes[dim] * ranks[dim]
    if ranks[COPIES] > 1:
        sizes[0] = -(-sizes[0] // ranks[COPIES])
        found.append(Sent("all_gather", COPIES, 1, ranks[COPIES] * math.prod(sizes)))
    if way.split is not None:
        num, side = sizes[0], sizes[ROWS + COLUMNS - way.split]
        found += [Sent("all_reduce", way.split, 1, num), Sent("all_reduce", way.split, ITERATIONS, num * side**2)]
    return found


def flops(local: Sequence[int], ranks: Sequence[int], way: Way | None = None) -> int:
    """FLOPs of a rank's matmuls for a leaf: X X^T and what X is multiplied by, 2 s^2 l each, and A^2, 2 s^3."""
    num, side, other = _own(local, ranks, way)
    return ITERATIONS * num * (4 * side**2 * other + 2 * side**3)


def passes(local: Sequence[int], ranks: Sequence[int], wide: int, narrow: int) -> int:
    """Bytes that a rank reads and writes for a leaf outside of its matmuls, of elements of so many bytes: X for its
    norm, divided, and made wide again; in an iteration the polynomial of A and A^2, and A made narrow for its square.
    """
    num, side, other = _own(local, ranks)
    polynomial = 3 * wide if narrow == wide else 3 * wide + 2 * narrow
    return num * (side * other * 2 * (wide + narrow) + ITERATIONS * side**2 * polynomial)


def working(local: Sequence[int], ranks: Sequence[int], wide: int, narrow: int) -> int:
    """Bytes that a leaf's orthogonalization has in memory at once: X as it came and as it is multiplied, and X X^T."""
    num, side, other = _own(local, ranks)
    return num * (side * other * (wide + narrow) + side**2 * wide)


def _own(local: Sequence[int], ranks: Sequence[int], way: Way | None = None) -> tuple[int, int, int]:
    """(matrices that a rank orthogonalizes, the side of their squares, the other side)."""
    way, (num, *sides) = way or choose_way(local, ranks), local
    for dim in way.shared:
        num, sides[dim - 1] = -(-num // ranks[dim]), sides[dim - 1] * ranks[dim]
    num = -(-num // ranks[COPIES])
    side = min(sides) if way.split is None else sides[COLUMNS - way.split]
    return num, side, math.prod(sides) // side
