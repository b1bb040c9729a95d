"""Bytes that our own training step needs on a device, in closed form: columns of layouts in, columns of bytes out.

What is kept for backward is read from a trace of one layer (`jaxdist.plan.parts`), and scaled; the papers' formulas
(`jaxdist.plan.formulas`) describe other programs. State bytes are
exact, padding counted. What one layer, the head and the update need besides is a rule for each, checked against a walk
through whole traced steps: docs/plan.md has the errors.

Every stage of a pipeline is the same program over buffers of the same size, so every device holds the same.
"""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import NamedTuple

import numpy as np

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.layout import Layout
from jaxdist.mesh import MAY_STAY_WHOLE, MeshShape
from jaxdist.models.base import Model, declare
from jaxdist.parallel.blocked_attention import MOST_POSITIONS
from jaxdist.parallel.spread import used_local
from jaxdist.parallel.zero import sharded as sharded_leaves
from jaxdist.parallel.zero import zero_groups
from jaxdist.params import STACKED, named_params
from jaxdist.placement import make_layout
from jaxdist.plan.disk_cache import cached_arrays
from jaxdist.plan.long_blocks import fullest
from jaxdist.plan.parts import (
    Moments,
    OneRank,
    at_rows,
    layer_memory,
    loss_memory,
    rows_to_trace,
    work_of,
)
from jaxdist.strategy import TP_RINGS, ParallelConfig, PrecisionConfig

ITEMSIZE = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1, "muon": 2}  # arrays of the masters' size; adafactor factors its own


@dataclass(frozen=True, eq=False)
class ProgramBytes:
    """Columns of bytes on a device.

    parameters, optimizer (masters and moments): exact. gradients: what is summed, and what the reduction copies.
    activations: kept for backward, with the pipeline's buffers. logits: the head's. working: one layer's, and what a
    phase needs that no other term is about. The last three and the gradients are those of the fullest phase: `phase`
    says which of `PHASES`.
    """

    parameters: np.ndarray
    optimizer: np.ndarray
    gradients: np.ndarray
    activations: np.ndarray
    logits: np.ndarray
    working: np.ndarray
    total: np.ndarray
    phase: np.ndarray


TERMS = ("parameters", "optimizer", "gradients", "activations", "logits", "working")
PHASES = ("backward", "the head", "the reduction of gradients", "the update", "the embedding's backward")


class Elements(NamedTuple):
    """Elements of one device: of a layer and of the rest, in the compute and the storage layout; of the rest where it
    is computed with, and of what the embedding, the loss and both of them use; of a layer's largest leaf, in both
    layouts; of a layer's vectors. Of a layer's leaves that share no message with others: all, as computed with; and the
    shards of those that are gathered along another dim than their first. Of a layer and of the rest, what has the sum
    of its gradient on this rank alone, without replicas.
    """

    layer: int
    outer: int
    stored_layer: int
    stored_outer: int
    used_outer: int
    used_embed: int
    used_loss: int
    used_both: int
    largest: int
    stored_largest: int
    vectors: int
    alone: int
    across: int
    unsent_layer: int
    unsent_outer: int


@cache
def device_elements(
    model: Model,
    tp: int,
    shards: int,
    pp: int,
    ep: int = 1,
    cp: int = 1,
    experts_over_tp: bool = False,
    itemsize: int = 4,
    trained: bool = False,
    matrices: bool = False,
) -> Elements:
    """Counted from the model's own declaration, the padding of ZeRO over so many `shards` included; with `trained` of
    what has a gradient, with `matrices` of those declared as such. shards: the ranks of dp and cp together. itemsize:
    of what messages hold."""
    layout = _sharded_layout(model, tp, shards, pp, ep, cp, experts_over_tp)
    leaves = layout.trained.leaves if trained else layout.leaves
    outer = _flat({name: part for name, part in leaves.items() if name != STACKED})
    layer = [leaf.layer() for leaf in _flat(leaves[STACKED])]
    if matrices:
        outer, layer = ([leaf for leaf in part if leaf.param.matrix] for part in (outer, layer))
    size = lambda shapes: sum(map(_product, shapes))  # noqa: E731
    whole_bytes = [itemsize * _product(layer[i].storage_local) * layer[i].num_shards for i in sharded_leaves(layer)]
    alone = [layer[group[0]] for group in zero_groups(layer, whole_bytes, layout.bucket_bytes) if len(group) == 1]
    return Elements(
        layer=size(leaf.compute_local for leaf in layer),
        outer=size(leaf.compute_local for leaf in outer),
        stored_layer=size(leaf.storage_local for leaf in layer),
        stored_outer=size(leaf.storage_local for leaf in outer),
        used_outer=size(used_local(leaf) for leaf in outer),
        used_embed=size(used_local(leaf) for leaf in outer if "embed" in leaf.used_in),
        used_loss=size(used_local(leaf) for leaf in outer if "loss" in leaf.used_in),
        used_both=size(used_local(leaf) for leaf in outer if len(leaf.used_in) > 1),
        largest=max((_product(leaf.compute_local) for leaf in layer), default=0),
        stored_largest=max((_product(leaf.storage_local) for leaf in layer), default=0),
        vectors=size(leaf.compute_local for leaf in layer if leaf.small),
        alone=size(leaf.compute_local for leaf in alone),
        across=size(leaf.storage_local for leaf in alone if leaf.zero_dim),
        unsent_layer=size(leaf.compute_local for leaf in layer if not leaf.reduce_axes),
        unsent_outer=size(leaf.compute_local for leaf in outer if not leaf.reduce_axes),
    )


@cache
def _sharded_layout(model: Model, tp: int, shards: int, pp: int, ep: int, cp: int, experts_over_tp: bool) -> Layout:
    """With one layer in each stage."""
    mesh = MeshShape(pp=pp, dp=shards // cp, ep=ep, cp=cp, tp=tp)
    kind = {"cp_kind": "all-gather"} if cp > 1 else {}
    parallel = ParallelConfig(mesh, zero=1, sp=tp > 1, experts_over_tp=bool(experts_over_tp), **kind)
    return make_layout(model, parallel, (1,) * pp)


class MatrixWork(NamedTuple):
    """What a device does in an update for whole matrices: FLOPs, bytes that pass through memory beside them, those in
    memory at once, those that it sends over dp and cp and over tp as if all-to-alls had moved them, and those gathered
    over ranks that hold the same."""

    flops: float
    passes: float
    working: float
    over_data: float
    over_tp: float
    over_copies: float


def matrix_work(config: RunConfig, layouts, num_rows) -> MatrixWork:
    """Columns for every layout; 0 for an optimizer that looks at no matrices. num_rows: layers on a device."""
    c = layouts
    if config.optimizer.name != "muon":
        return MatrixWork(*[0.0] * len(MatrixWork._fields))
    wide = ITEMSIZE[config.precision.master_dtype]
    widths = wide, ITEMSIZE["bfloat16"] if config.optimizer.muon_bf16 else wide
    ways = c.replica, c.tp, c.dp * c.cp, c.pp, c.ep, np.where(c.ep > 1, c.cp, 1), c.over_tp
    kinds, index = distinct(*ways, c.zero > 0, np.broadcast_to(num_rows, len(c.pp)).astype(int))
    found = np.array([_matrix_work(config.model, *widths, *kind) for kind in kinds], float)[index].T
    return MatrixWork(*found[:3], *(wide * found[3:]))


@cache
def _matrix_work(
    model: Model,
    wide: int,
    narrow: int,
    replica: int,
    tp: int,
    shards: int,
    pp: int,
    ep: int,
    cp: int,
    over_tp: int,
    sharded: int,
    num_rows: int,
) -> tuple[float, ...]:
    """FLOPs, bytes of passes and at once, and elements over the data axes, over tp and over copies."""
    from jaxdist.parallel import muon
    from jaxdist.plan.traffic import split_of

    layout, total = _sharded_layout(model, tp, shards, pp, ep, cp, bool(over_tp)), [0.0] * len(MatrixWork._fields)
    splits = []
    for leaf in _flat(layout.trained.leaves):
        leaf = leaf if sharded else replace(leaf, zero_dim=None)
        if (split := split_of(leaf)) is None:
            continue
        num, *sides = split.local
        num = num * num_rows // leaf.storage_local[0] if "layers" in leaf.param.dims else num
        *ranks, copies = split.ranks
        splits.append(split._replace(local=(num, *sides), ranks=(*ranks, copies * replica)))
    for _, (local, ranks, axes) in muon.joined(splits):
        total[0] += muon.flops(local, ranks)
        total[1] += muon.passes(local, ranks, wide, narrow)
        total[2] = max(total[2], muon.working(local, ranks, wide, narrow))
        for each in muon.messages(local, ranks):
            times = 2 if each.kind == "all_reduce" else 1
            which = 5 if each.dim == muon.COPIES else 4 if axes[each.dim] == ("tp",) else 3
            total[which] += times * each.count * each.elements
    return tuple(total)


class LayerColumns(NamedTuple):
    """`parts.LayerMemory` of every layout, for its micro-batches."""

    x: np.ndarray
    scan: np.ndarray
    b_residuals: np.ndarray
    w_residuals: np.ndarray
    b_to_w: np.ndarray
    backward: np.ndarray
    again: np.ndarray
    loss: np.ndarray


def layer_columns(config: RunConfig, layouts, attention: str) -> LayerColumns:
    """A layer's memory in columns, one for every layout; traced once for each of `ranks_of`."""
    ranks, index = ranks_of(config, layouts, attention)
    columns = np.empty((len(LayerColumns._fields), len(index)))
    for number, rank in enumerate(ranks):
        here = np.flatnonzero(index == number)
        columns[:, here] = _of_rank(rank, layouts.rows[here])
    return LayerColumns(*columns)


def ranks_of(config: RunConfig, layouts, attention: str) -> tuple[list[OneRank], np.ndarray]:
    """The ways to run a layer (tp, cp and its kind, ep, sp, rings, chunks of the loss, what is repeated), and
    for every layout which it has."""
    ways = layouts.tp, layouts.cp, layouts.kind, layouts.ep, layouts.sp == 1, layouts.selective == 1, layouts.over_tp
    kinds, index = distinct(*ways, layouts.ring, layouts.loss_chunks, layouts.repeats)
    ranks = []
    for number, (tp, cp, _, ep, sp, selective, over, ring, loss_chunks, _) in enumerate(kinds):
        first = int(np.argmax(index == number))
        rank = OneRank(
            config.model,
            tp,
            _rows_of(config.model, ep),
            PrecisionConfig(config.precision.dtype),
            sp=bool(sp),
            cp=cp,
            cp_kind=layouts.cp_kind(first, config.parallel),
            ep=ep,
            experts_over_tp=bool(over),
            tp_ring=TP_RINGS[ring],
            loss_chunks=loss_chunks,
            selective=bool(selective),
            repeats=layouts.repeated(first),
            attention=attention,
        )
        ranks.append(rank)
    return ranks, index


def _of_rank(rank: OneRank, rows: np.ndarray) -> np.ndarray:
    kept, *moments = _fullest(rank)
    return np.array([each * rows for each in kept] + [at_rows(each, rows) for each in moments])


def rank_of(config: RunConfig, attention: str) -> OneRank:
    """A rank of a run, with micro-batches as they are traced for memory, and the attention that runs."""
    precision = PrecisionConfig(config.precision.dtype)
    rank = OneRank.of(config)
    rows = _rows_of(rank.model, rank.ep)
    return replace(rank, rows=rows, precision=precision, swaps=False, attention=attention)


def _rows_of(model: Model, ep: int) -> int:
    """Rows of micro-batches as they are traced."""
    chosen = max(product.rows for product in work_of(model).layer)  # experts of a token
    return rows_to_trace(model, math.ceil(chosen) * ep)


class RankMemory(NamedTuple):
    """`parts.LayerMemory` and `parts.loss_memory` of one rank. kept: x, scan, b_residuals, w_residuals and b_to_w."""

    kept: np.ndarray
    backward: Moments
    again: Moments
    loss: Moments


@cache
def _fullest(rank: OneRank) -> RankMemory:
    kept, *moments = rank_memory(rank)
    return RankMemory(kept, *map(fullest, moments))


@cache
def rank_memory(rank: OneRank) -> RankMemory:
    """Traced for few ranks of tp and cp, and found from two of those for more: what a rank holds at a moment of the
    same program is whole, or a part of it."""
    for axis, few in _few_ranks(rank):
        ranks = getattr(rank, axis)
        if ranks > 2 * few and ranks % (2 * few) == 0:
            one, two = (rank_memory(replace(rank, **{axis: number})) for number in (few, 2 * few))
            if all(a.shape == b.shape for a, b in zip(one, two, strict=True)):
                return RankMemory(*(2 * b - a + 2 * few * (a - b) / ranks for a, b in zip(one, two, strict=True)))
    if not _is_ours(rank.model):
        return _traced(rank)
    return cached_arrays(hashlib.sha256(repr(rank).encode()).hexdigest(), RankMemory, lambda: _traced(rank))


def _is_ours(model: Model) -> bool:
    """Whether the package's source says all of what a model computes."""
    if type(model).__module__.partition(".")[0] != "jaxdist":
        return False
    inner = (getattr(model, field.name) for field in fields(model))
    return all(_is_ours(each) for each in inner if isinstance(each, Model))


def _traced(rank: OneRank) -> RankMemory:
    *kept, backward, again = layer_memory(replace(rank, loss_chunks=1))
    return RankMemory(np.array(kept), backward, again, loss_memory(_of_loss(rank)))


def _of_loss(rank: OneRank) -> OneRank:
    """The rank without what concerns layers alone: its loss is the same, and traced once."""
    rows = rows_to_trace(rank.model, 1)
    return replace(
        rank, rows=rows, ep=1, experts_over_tp=False, selective=False, tp_ring="none", repeats="", attention="auto"
    )


def _few_ranks(rank: OneRank) -> list[tuple[str, int]]:
    """Axes, and from how many ranks on more of them hold parts of the same. Not where more ranks hold something whole
    than fewer do, as key heads; nor with experts over tp, whose messages grow, or arrays named for one tp; nor where a
    rank's two chunks of a sequence are less than blocks of attention. With rings every tp is a program of its own."""
    heads = rank.tp * (rank.cp if rank.cp_kind == "ulysses" else 1)
    small = rank.cp > 1 and rank.model.seq_len < 2 * MOST_POSITIONS * rank.cp
    other = rank.experts_over_tp or bool(rank.repeats)
    if other or small or any(dim % heads for dim in dims_that_may_stay_whole(rank.model)):
        return []
    # A ring's first round and its last are programs of their own.
    return [("cp", 8 if rank.cp_kind == "ring" else 2)] + [("tp", 2)] * (rank.tp_ring == "none")


@cache
def dims_that_may_stay_whole(model: Model) -> frozenset[int]:
    """Sizes of dims that every rank holds whole where their axis does not divide them."""
    return frozenset(
        size
        for _, param in named_params(declare(model))
        for size, dim in zip(param.shape, param.dims, strict=True)
        if dim in MAY_STAY_WHOLE
    )


def program_bytes(config: RunConfig, layouts, table, attention: str) -> ProgramBytes:
    """Bytes of every layout in the columns, for the model, precision and optimiser of `config`.

    layouts: `search.Candidates`. table: `search.Pipelines`.
    """
    model, precision = config.model, config.precision
    itemsize, wide, summed = (ITEMSIZE[x] for x in (precision.dtype, precision.master_dtype, precision.reduction_dtype))
    c = layouts
    meshes, index = distinct(c.tp, c.dp * c.cp, c.pp, c.ep, np.where(c.ep > 1, c.cp, 1), c.over_tp)
    e, t, m = (
        Elements(*np.array([device_elements(model, *mesh, *which) for mesh in meshes], float)[index].T)
        for which in ((itemsize, False), (summed, True), (summed, True, True))
    )
    pipelined, sharded = c.pp > 1, (c.zero > 0) & (c.dp * c.cp > 1)
    num_rows = np.where(pipelined, c.chunks * table.depth, model.num_blocks)  # of a stacked leaf, on one device
    whole = num_rows * e.layer + e.outer
    stored = np.where(sharded, num_rows * e.stored_layer + e.stored_outer, whole)
    whole_trained = num_rows * t.layer + t.outer
    stored_trained = np.where(sharded, num_rows * t.stored_layer + t.stored_outer, whole_trained)
    matrices = np.where(sharded, num_rows * m.stored_layer + m.stored_outer, num_rows * m.layer + m.outer)

    # ---- state
    parameters = itemsize * np.where(sharded & (c.zero == 3), stored, whole)
    optimizer = wide * stored_trained * (itemsize < wide)
    if config.optimizer.name in MOMENTS:
        optimizer = optimizer + wide * stored_trained * MOMENTS[config.optimizer.name]
        if config.optimizer.name == "muon":  # of matrices the momentum alone
            optimizer = optimizer - wide * matrices
    else:
        optimizer = optimizer + factored_bytes(model, config.optimizer, precision.master_dtype)

    # ---- kept for backward
    scattered = sharded & (c.zero >= 2)

    x, one, b_residuals, w_residuals, b_to_w, backward, run_again, loss = layer_columns(config, layouts, attention)
    gathered = np.where(c.keep == 1, e.layer, np.where(scattered & (c.zero == 3), e.vectors, 0))
    one = one + itemsize * gathered  # of ZeRO-3
    every = np.maximum(c.every, 1)
    overlapped = (c.overlap == 1) & ~pipelined
    one = np.where(overlapped, b_residuals + w_residuals, one)
    scanned = np.where(c.every > 0, model.num_blocks / every * x, model.num_blocks * one)
    buffers = np.where(
        c.every > 0,
        table.num_b_residuals * -(-table.depth // every) * x + table.num_b_to_w * table.depth * (b_to_w + w_residuals),
        table.depth
        * (table.num_b_residuals * b_residuals + table.num_w_residuals * w_residuals + table.num_b_to_w * b_to_w)
        + table.num_inputs * x,
    )
    # With overlap the last micro-batch is a program of its own, and compilers keep its buffers beside the others'.
    scanned = scanned * np.where(overlapped & (c.accumulate > 1), 2, 1)
    # A message that leaves while the stage computes, and what comes meanwhile from both sides.
    travelling = 3 * (c.overlap == 1)
    # Before a GPU gathers along another dim than the first, it transposes the shards of all layers.
    across = np.where(scattered & (c.zero == 3), itemsize * model.num_blocks * e.across, 0)
    activations = np.where(pipelined, buffers + (table.num_messages + travelling) * x, scanned + across)

    # ---- gradients: summed over micro-batches so far, and this micro-batch's (or this pass's) own. A pipeline holds
    # what is outside the layers whole, and its gradients too: ZeRO-3's, or the table that its stages share.
    scattered_outer = np.where(pipelined, t.used_outer, t.stored_outer)
    grads = wide * np.where(scattered, num_rows * t.stored_layer + scattered_outer, num_rows * t.layer + t.used_outer)
    gathered_outer = pipelined * itemsize * np.where(scattered & (c.zero == 3), e.used_outer, e.used_both)
    sums = np.where(c.accumulate > 1, grads, 0)
    own = np.where(pipelined | scattered, grads, itemsize * whole_trained)
    # ZeRO-2 and 3 scatter those of what is outside the layers at the end: the loss's waits in the model's dtype.
    at_end = scattered & ~pipelined & ~overlapped
    late = np.where(at_end, itemsize * t.used_loss, 0)
    # With overlap each layer's is reduced into its place while the next is made.
    own = np.where(overlapped, wide * stored_trained + itemsize * t.layer, own)

    # ---- the update. What is reduced is wide then, and a bucket of it laid side by side first. The rest is as backward
    # left it, unless it was summed, or tp sends its matrices.
    work = matrix_work(config, c, num_rows)
    unsent = np.where(c.replica == 1, num_rows * t.unsent_layer + t.unsent_outer, 0)
    as_left = (c.accumulate == 1) & ~pipelined & ~scattered & (np.asarray(work.over_tp) == 0)
    before_update = grads - np.where(as_left, (wide - itemsize) * unsent, 0)
    largest = np.where(scattered, 0, wide * num_rows * np.where(sharded, t.stored_largest, t.largest))
    reduced = np.where(sharded & ~scattered, wide * (whole_trained - stored_trained), 0)  # before matrices are whole
    bucket = np.minimum(config.parallel.bucket_bytes, summed * (whole_trained - unsent))
    shards = np.where(sharded, wide * (stored_trained - unsent), 0)
    side_by_side = np.where(scattered | overlapped | (c.replica * c.dp * c.cp == 1), 0, bucket + shards)

    # ---- the loss: its logits and the gradients it makes; the weights it uses, where they were gathered
    # Of a loop that scatters XLA runs the first turn ahead: the last layer runs again beside the loss's backward.
    ahead = at_end & (t.alone > 0)
    logits = loss + np.where(scattered & ~pipelined, itemsize * e.used_loss, 0)
    # Elsewhere the zeros to which the embedding's gradient is added come before the head's own gradient.
    before = np.where(
        ahead, np.where(c.every > 0, run_again, 0), np.maximum(wide * t.used_embed - itemsize * t.used_loss, 0)
    )
    logits = logits + np.where(at_end, before, 0)

    # ---- one layer's backward: what is between its matmuls, and slices of what is stacked
    layer = np.where(c.every > 0, run_again, backward)
    again = np.where((c.every > 1) & ~pipelined, c.every * one, 0)
    scratch = np.where(pipelined & (c.every > 0), c.every * (b_residuals + w_residuals), 0)
    # A loop sends gradients in its next turn; they are whole until then.
    turn = np.where(at_end, summed * t.layer, np.where(pipelined, itemsize * e.layer, 0) + wide * t.largest)
    layer = layer + np.where(scattered, turn, 0)
    layer = layer + np.where(
        overlapped, np.where(c.zero == 3, itemsize * e.layer, 0) + np.where(c.every == 0, b_to_w, 0), 0
    )
    embedding = itemsize * e.used_embed * pipelined

    zeros = np.zeros(len(c.pp))
    phases = [
        (sums + own + late, activations, zeros, gathered_outer + np.maximum(layer + again + scratch, embedding)),
        (sums + own * pipelined, activations, logits, gathered_outer),
        (np.where(c.accumulate > 1, grads, own), zeros, zeros, side_by_side),
        (before_update, zeros, zeros, np.maximum(largest, work.working - reduced)),
        (sums + own + wide * np.where(at_end, t.used_outer, 0), zeros, zeros, zeros),
    ]
    table_of = np.array([[column + zeros for column in phase] for phase in phases])
    fullest = table_of.sum(axis=1).argmax(axis=0)
    gradients, activations, logits, working = np.take_along_axis(table_of, fullest[None, None], axis=0)[0]
    columns = [np.broadcast_to(column, zeros.shape) for column in (parameters, optimizer)]
    columns += [gradients, activations, logits, working]
    return ProgramBytes(*columns, sum(columns), fullest)


@cache
def factored_bytes(model: Model, optimizer: OptimizerConfig, dtype: str) -> int:
    """Moments of an optimiser that does not hold them as parameters are held (adafactor), whole."""
    import jax

    from jaxdist.train.optimizer import RULES

    layout = make_layout(model, ParallelConfig()).trained
    masters = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), layout.leaves)
    moments = jax.tree.leaves(jax.eval_shape(RULES[optimizer.name](optimizer, layout).init, masters))
    return sum(_product(moment.shape) * moment.dtype.itemsize for moment in moments)


def distinct(*columns: np.ndarray) -> tuple[list[tuple[int, ...]], np.ndarray]:
    """The different rows of columns of small whole numbers, and for every row which of them it is."""
    key = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        key = key * (int(column.max()) + 1) + column
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    return [tuple(row) for row in np.stack([column[first] for column in columns], axis=1).tolist()], index.reshape(-1)


def _flat(tree) -> list:
    if isinstance(tree, dict):
        return [leaf for part in tree.values() for leaf in _flat(part)]
    return [] if tree is None else [tree]


def _product(shape: Sequence[int]) -> int:
    return int(np.prod(shape, dtype=np.int64))
