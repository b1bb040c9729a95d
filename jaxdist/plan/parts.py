"""The parts of a model traced alone: what its embedding, one layer and its loss send, keep and read again.

A step runs each part as often as its schedule says, so what a part is need be known once. Nothing here knows a model:
the parts are traced on an abstract mesh that has tp, cp and ep alone, with the shapes of one rank.
"""

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import random
from jax.extend.core import ClosedJaxpr
from jax.sharding import PartitionSpec

from jaxdist.config import MOST_TOKENS, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.layout import ShardedParams, drop_frozen, fill, keep_frozen, split_outer
from jaxdist.mesh import MeshShape, data_ranks_of, make_abstract_mesh
from jaxdist.models.attention_choice import traced_attention
from jaxdist.models.base import Model, declare
from jaxdist.models.context import Batch
from jaxdist.models.declared import check_split
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import type_of
from jaxdist.parallel.pipeline.split_backward import SplitLayer, all_equations, flat, needed_for, split_layer, variables
from jaxdist.parallel.products import product_dims, products_among, products_of
from jaxdist.params import named_params
from jaxdist.placement import make_layout
from jaxdist.plan.long_blocks import found_in
from jaxdist.plan.proof.trace import Collective, collectives_of
from jaxdist.plan.proof.trace_memory import Buffer, compiler_of_dtype, lifetimes
from jaxdist.plan.time_model import AttentionShape, Number
from jaxdist.specs import compute_spec, rows_spec
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.gradients.base import ShardedModel
from jaxdist.train.gradients.bind import bind_model

T = TypeVar("T")


@dataclass(frozen=True)
class OneRank:
    """One rank of `tp`, `cp` and `ep`, with micro-batches of `rows` sequences, and what a run tells the model.

    swaps: what a ring sends is swapped in pairs, as in a pipeline. repeats: a word of `ParallelConfig.remat` that names
    arrays; "" where it is another."""

    model: Model
    tp: int
    rows: int
    precision: PrecisionConfig
    sp: bool = False
    cp: int = 1
    cp_kind: str = "ring"
    swaps: bool = False
    ep: int = 1
    experts_over_tp: bool = False
    tp_ring: str = "none"
    loss_chunks: int = 1
    selective: bool = False
    repeats: str = ""
    attention: str = "auto"

    @classmethod
    def of(cls, config: RunConfig) -> "OneRank":
        parallel, mesh = config.parallel, config.parallel.mesh
        return cls(
            config.model,
            mesh.tp,
            config.rows,
            config.precision,
            sp=parallel.sp and mesh.tp > 1,
            cp=mesh.cp,
            cp_kind=parallel.cp_kind,
            swaps=parallel.split.swaps and mesh.cp > 1,
            ep=mesh.ep,
            experts_over_tp=parallel.experts_over_tp and mesh.tp > 1,
            tp_ring=parallel.tp_ring,
            loss_chunks=parallel.loss_chunks,
            selective=parallel.remat == "selective",
            repeats=parallel.remat if parallel.repeats_arrays else "",
            attention=config.attention,
        )

    def trace(self, function: Callable[["_Functions"], T]) -> T:
        """What `function` finds out about the parts, called where collectives over tp can be traced; of a long
        block as `found_in` says."""
        return found_in(self.model, lambda model: replace(self, model=model).trace_whole(function))

    def trace_whole(self, function: Callable[["_Functions"], T]) -> T:
        """`trace` of whatever `function` returns, in the time that all layers of a block take."""
        remat, attention = self.repeats or ("selective" if self.selective else "none"), self.attention
        dp = data_ranks_of(self.ep, self.cp)
        mesh, model, dtype = MeshShape(dp=dp, ep=self.ep, cp=self.cp, tp=self.tp), self.model, self.precision.dtype
        settings = {
            name: getattr(self, name) for name in ("sp", "cp_kind", "experts_over_tp", "tp_ring", "loss_chunks")
        }
        parallel = ParallelConfig(mesh, remat=remat, **settings)
        config = RunConfig(model, parallel, precision=self.precision, batch_size=dp * self.rows, steps=1)
        layout = make_layout(model, parallel)
        attention = model.attention_for(attention, "abstract", dtype, training=True)
        bound = bind_model(config, layout, "cudnn-traced" if attention == "cudnn" else attention)
        bound = replace(bound, ctx=replace(bound.ctx, split=replace(bound.ctx.split, swaps=self.swaps)))
        specs = Batch(*[rows_spec(layout.mesh)] * 3)
        tokens = jax.ShapeDtypeStruct((dp * self.rows, model.seq_len), jnp.int32)
        numbers = jax.ShapeDtypeStruct((dp * self.rows,), jnp.int32)
        params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), layout.leaves)
        found: list[T] = []

        def body(params, batch):
            found.append(function(_Functions.of(bound, params, batch)))
            return jnp.zeros(())

        with jax.enable_x64(dtype == "float64"):
            run = jax.shard_map(
                body,
                mesh=make_abstract_mesh(mesh),
                in_specs=(jax.tree.map(compute_spec, layout.leaves), specs),
                out_specs=PartitionSpec(),
                check_vma=True,
            )
            jax.eval_shape(run, params, Batch(tokens, tokens, numbers))
        return found[-1]


@dataclass(frozen=True)
class _Functions:
    """The three functions of a bound model, with arguments to trace them at."""

    bound: ShardedModel
    outer: dict
    weights: dict
    batch: Batch
    key: jax.Array | None

    @classmethod
    def of(cls, bound: ShardedModel, params: dict, batch: Batch) -> "_Functions":
        bound, batch = bound.weighted(jnp.ones((), bound.sum_dtype)), bound.own_tokens(batch)
        outer, layers = split_outer(bound.cast(params))
        key = random.key(0) if bound.config.model.dropout else None
        return cls(bound, outer, jax.tree.map(lambda x: x[0], layers), batch, key)

    @cached_property
    def outer_leaves(self) -> dict:
        return split_outer(self.bound.layout.leaves)[0]

    @cached_property
    def x(self) -> jax.Array:
        return self.embed(self.outer)

    @property
    def mesh(self) -> MeshShape:
        return self.bound.layout.mesh

    def embed(self, outer) -> jax.Array:
        return self.bound.embed(ShardedParams(outer), self.batch, self.key)

    def layer(self, weights, x) -> jax.Array:
        return self.bound.whole_block(weights, x, jnp.int32(0), self.batch, self.key)

    def saved_layer(self, weights, x) -> jax.Array:
        """The layer under the policy of what backward keeps."""
        return jax.checkpoint(self.layer, policy=self.bound.policy, prevent_cse=False)(weights, x)

    def loss(self, outer, x) -> jax.Array:
        return self.bound.loss(ShardedParams(outer), x, self.batch, self.key)

    def split(self) -> SplitLayer:
        return split_layer(self.divided_layer, *self.divided_types())

    def divided_layer(self, trained, fixed, batch, x) -> jax.Array:
        """The layer as `split_layer` takes it."""
        frozen, index = fixed
        return self.bound.whole_block(fill(trained, frozen), x, index, batch, self.key)

    def divided_types(self) -> list:
        """Types of the arguments of `divided_layer`."""
        leaves = self.bound.layout.layer_leaves
        trained, frozen = drop_frozen(leaves, self.weights), keep_frozen(leaves, self.weights)
        args = trained, (frozen, jnp.int32(0)), self.batch, self.x
        return [jax.tree.map(type_of, each) for each in args]


# ------------------------------------------------------------------------------------------------------------ traffic


@dataclass(frozen=True)
class PartTraffic:
    """What one part sends over tp, cp and ep for one micro-batch.

    forward, backward: with what forward keeps at hand. alone: a forward of which nothing is kept. recomputed: what
    backward sends besides where forward runs again. read_again: the parameters that such a backward needs, forward
    included, by their path in the part.
    """

    forward: tuple[Collective, ...]
    alone: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    recomputed: tuple[Collective, ...]
    read_again: frozenset[str]


@dataclass(frozen=True)
class Traffic:
    """Messages of the three parts. x_bytes: what a layer passes on. read_by_w: the parameters of a layer that W
    reads."""

    embed: PartTraffic
    layer: PartTraffic
    loss: PartTraffic
    x_bytes: int
    read_by_w: frozenset[str]


@cache
def traffic_of(rank: OneRank) -> Traffic:
    """What the parts send for one micro-batch."""

    def read(parts: _Functions) -> Traffic:
        return Traffic(
            embed=_traffic(parts.embed, parts.embed, parts.mesh, parts.outer_leaves, parts.outer),
            layer=_traffic(
                parts.saved_layer, parts.layer, parts.mesh, parts.bound.layout.layer_leaves, parts.weights, parts.x
            ),
            loss=_traffic(parts.loss, parts.loss, parts.mesh, parts.outer_leaves, parts.outer, parts.x),
            x_bytes=_num_bytes([type_of(parts.x)]),
            read_by_w=_read_by_w(parts.split(), parts.bound.layout.layer_leaves, parts.weights),
        )

    return rank.trace(read)


def _traffic(saved: Callable, plain: Callable, mesh: MeshShape, leaves: dict, params, *inputs) -> PartTraffic:
    """saved: the part as it runs; plain: without a policy of what is saved, to run it again from its inputs."""
    types = [jax.tree.map(type_of, each) for each in (params, *inputs)]
    forward, backward = _forward_and_backward(saved, leaves, types)
    needed, given = _from_inputs(plain, leaves, types, forward.out_avals[0])
    in_backward = _collectives(needed_for(backward.jaxpr.outvars, backward.jaxpr.eqns), mesh)
    return PartTraffic(
        forward=_collectives(needed_for(forward.jaxpr.outvars, forward.jaxpr.eqns), mesh),
        alone=_collectives(needed_for(forward.jaxpr.outvars[:1], forward.jaxpr.eqns), mesh),
        backward=in_backward,
        recomputed=_without(_collectives(needed, mesh), in_backward),
        read_again=_read(needed, given, params),
    )


def _from_inputs(function: Callable, leaves: dict, types: list, y) -> tuple[list, list]:
    """Equations of a part's gradients for that of its result, of type `y`, where nothing is kept of its forward; and
    the variables of its arguments."""
    pull = flat(jax.make_jaxpr(lambda dy, *args: _vjp(function, leaves, *args)[1](dy))(y, *types))
    return needed_for(pull.jaxpr.outvars, pull.jaxpr.eqns), pull.jaxpr.invars[1:]


def _vjp(function: Callable, leaves: dict, params: dict, *inputs) -> tuple:
    """`jax.vjp` of a part for its inputs and what is trained of its parameters, whose `leaves` say so."""
    frozen = keep_frozen(leaves, params)
    return jax.vjp(
        lambda trained, *inputs: function(fill(trained, frozen), *inputs), drop_frozen(leaves, params), *inputs
    )


def _forward_and_backward(function: Callable, leaves: dict, types: list) -> tuple[ClosedJaxpr, ClosedJaxpr]:
    """(args -> y, what backward needs), (what forward kept, dy -> gradients)."""
    pullback = None

    def forward_and_residuals(*args):
        nonlocal pullback
        y, pull = _vjp(function, leaves, *args)
        residuals, pullback = jax.tree.flatten(pull)
        return y, residuals

    forward = flat(jax.make_jaxpr(forward_and_residuals)(*types))
    y, *residuals = forward.out_avals
    backward = jax.make_jaxpr(lambda values, dy: jax.tree.unflatten(pullback, values)(dy))(residuals, y)
    return forward, flat(backward)


def _read_by_w(split: SplitLayer, leaves: dict, weights) -> frozenset[str]:
    def weight_gradient(weights, *saved):
        fixed = keep_frozen(leaves, weights), jnp.int32(0)
        return split.weight_gradient(drop_frozen(leaves, weights), fixed, *saved)

    types = jax.tree.map(type_of, weights), split.w_residuals, split.b_to_w
    closed = flat(jax.make_jaxpr(weight_gradient)(*types))
    return _read(needed_for(closed.jaxpr.outvars, closed.jaxpr.eqns), closed.jaxpr.invars, weights)


def _read(eqns: list, invars: list, params) -> frozenset[str]:
    """Paths of the parameters, the first of `invars`, that equations read."""
    read = {v for eqn in eqns for v in variables(eqn.invars)}
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)]
    return frozenset(path for path, v in zip(paths, invars, strict=False) if v in read)


def _collectives(eqns: list, mesh: MeshShape) -> tuple[Collective, ...]:
    return tuple(collectives_of(SimpleNamespace(eqns=eqns), mesh))


def _without(all_: tuple[Collective, ...], some: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Messages of `all_` that are left when each of `some` is taken out once."""
    left = list(all_)
    for each in some:
        left.remove(each)
    return tuple(left)


def _num_bytes(avals) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)


# -------------------------------------------------------------------------------------------------------------- memory

MOST_ROWS = 499  # of a micro-batch when memory is traced
MOST_CHOICES = 16  # experts of a token, where they are not known yet


@cache
def rows_to_trace(model: Model, choices: int = MOST_CHOICES) -> int:
    """Rows of a micro-batch with which what grows with them is told from what does not: a prime that divides no dim of
    a parameter, and not the sequence either, so that it divides an array's size if and only if that grows.

    choices: rows of experts for one position, of all ranks together; their places are 32-bit numbers. Where no prime
    is left, MOST_ROWS, which is refused when it is traced."""
    most = min(MOST_ROWS, MOST_TOKENS // (model.seq_len * choices))
    dims = {model.seq_len, *(size for _, param in named_params(declare(model)) for size in param.shape)}
    primes = (n for n in range(max(most, 2), 1, -1) if all(n % d for d in range(2, math.isqrt(n) + 1)))
    return next((n for n in primes if all(size % n for size in dims)), MOST_ROWS)


MOST_SPLIT = 64  # the largest tp that is tried to see what it splits

Moments = np.ndarray  # [n, 2]: (bytes, bytes a row) alive at each moment of a program, in the order of time


class LayerMemory(NamedTuple):
    """Bytes of one sequence on one rank: what a layer passes on; what it keeps from forward to backward; in a pipeline
    what F saves for B, F for W, and B for W (`jaxdist.parallel.pipeline.split_backward`). Then what a layer's
    backward needs besides, with what forward kept at hand (`backward`) and where it runs again (`again`)."""

    x: float
    scan: float
    b_residuals: float
    w_residuals: float
    b_to_w: float
    backward: Moments
    again: Moments


@cache
def layer_memory(rank: OneRank) -> LayerMemory:
    """Traced; `rank.rows` is that of `rows_to_trace`."""
    compiler = compiler_of_dtype(rank.precision.dtype)

    def read(parts: _Functions) -> LayerMemory:
        types = [jax.tree.map(type_of, each) for each in (parts.weights, parts.x)]
        leaves = parts.bound.layout.layer_leaves
        forward, backward = _forward_and_backward(parts.saved_layer, leaves, types)
        again = jax.checkpoint(parts.layer, prevent_cse=False)
        given = set(forward.jaxpr.invars[: len(jax.tree.leaves(parts.weights))])
        residuals = [v for v in dict.fromkeys(variables(forward.jaxpr.outvars[1:])) if v not in given]
        split = parts.split()
        buffers = [type_of(parts.x)], [v.aval for v in residuals], split.b_residuals, split.w_residuals, split.b_to_w
        sizes = (_num_bytes(avals) / rank.rows for avals in buffers)
        runs_again = None
        if not rank.selective:
            runs_again = _of_a_loop(_forward_and_backward(again, leaves, types)[1], compiler, rank.rows)
        return LayerMemory(*sizes, _of_a_loop(backward, compiler, rank.rows), runs_again)

    found = rank.trace(read)
    # What runs again as a whole is not selective.
    return found._replace(again=layer_memory(replace(rank, selective=False)).again) if rank.selective else found


@cache
def loss_memory(rank: OneRank) -> Moments:
    """What the loss and its gradient need, gradients included."""

    def read(parts: _Functions) -> Moments:
        def both(outer, x):
            loss, pull = _vjp(parts.loss, parts.outer_leaves, outer, x)
            return loss, pull(comm.varying_like(jnp.ones((), loss.dtype), loss))

        program = jax.make_jaxpr(both)(*(jax.tree.map(type_of, each) for each in (parts.outer, parts.x)))
        kept = range(len(program.jaxpr.outvars))
        return _moments(lifetimes(program, compiler_of_dtype(rank.precision.dtype), {}, kept=kept), rank.rows)

    return rank.trace(read)


def at_rows(moments: Moments, rows: np.ndarray) -> np.ndarray:
    """Bytes at the fullest moment, for micro-batches of so many rows."""
    return np.max([fixed + each * rows for fixed, each in moments], axis=0)


def _of_a_loop(backward: ClosedJaxpr, compiler: str, rows: int) -> Moments:
    """Moments of the body of a loop over layers: (what forward kept, dy) -> (gradients, dx), dx in the place of dy."""
    num_inputs, num_outputs = len(backward.jaxpr.invars), len(backward.jaxpr.outvars)
    carried, sliced = {num_outputs - 1: num_inputs - 1}, range(num_inputs - 1)
    return _moments(lifetimes(backward, compiler, carried, sliced=sliced), rows)


def _moments(buffers: list[Buffer], rows: int) -> Moments:
    changes: dict[int, list[float]] = defaultdict(lambda: [0.0, 0.0])
    for buffer in buffers:
        grows = buffer.num_bytes % rows == 0
        size = buffer.num_bytes / (rows if grows else 1)
        changes[buffer.start][grows] += size
        changes[buffer.end + 1][grows] -= size
    return np.cumsum([(0.0, 0.0), *(changes[clock] for clock in sorted(changes))], axis=0)


# ---------------------------------------------------------------------------------------------------------------- time


class Product(NamedTuple):
    """A matrix product of one part: FLOPs a position, its two dims beside the positions, and which of them tp splits.

    batched: a product of activations (attention's), whose `n` and `k` are its smallest dim and whatever is left.
    rows, groups: of experts' products, the rows for one position, in so many groups, each with a matrix of its own.
    """

    flops: float
    n: float
    k: float
    splits_n: bool
    splits_k: bool
    batched: bool
    rows: float = 1.0
    groups: int = 1

    def seconds(self, matmul: Callable, tp: Number, ep: Number = 1, experts_over_tp: Number = False) -> Number:
        if self.batched:
            return matmul(self.n / (tp if self.splits_n else 1), self.k, m=self.k)
        rows = self.rows
        if self.groups > 1:  # where tp splits experts, a rank has fewer rows, of whole width
            rows, tp = rows / np.where(experts_over_tp, tp, 1), np.where(experts_over_tp, 1, tp)
        n, k = self.n / (tp if self.splits_n else 1), self.k / (tp if self.splits_k else 1)
        if self.groups == 1:
            return matmul(n, k)
        # Of its experts a rank gets the rows of all ranks that hold others.
        return rows * matmul(n, k, part=self.rows * ep / self.groups)


@dataclass(frozen=True)
class TracedWork:
    """What one layer and the loss of a model compute, read from a trace of each (`jaxdist.plan.parts.work_of`).

    vocab_size: rows of the largest parameter that the loss uses. Elementwise traffic is taken to be what products read
    and write of activations: what is between them is fused.
    """

    num_layers: int
    seq_len: int
    width: int
    vocab_size: int
    layer_parameters: int
    expert_parameters: int
    table_parameters: int
    embedding_parameters: int
    layer_sums: float
    mixture_sums: float
    ring_sums: float
    matrices_again: float
    sums_again: float
    sp_sums_again: float
    trained_layer: float
    trained_table: float
    layer_backward: float
    head_backward: float
    layer: tuple[Product, ...]
    loss: tuple[Product, ...]
    attention: tuple[AttentionShape, ...]

    @property
    def flops_per_token(self) -> float:
        layer = sum(p.flops * (3 if p.batched else 1 + self.layer_backward) for p in self.layer)
        return self.num_layers * layer + sum(p.flops for p in self.loss) * (1 + self.head_backward)

    @property
    def experts(self) -> int:
        """How many a layer has; 1 where it has none."""
        return max((p.groups for p in self.layer), default=1)

    def matrices(self, matmul: Callable, tp: Number, ep: Number, experts_over_tp: Number) -> Number:
        return sum(p.seconds(matmul, tp, ep, experts_over_tp) for p in self.layer if not p.batched)

    def in_rings(self, matmul: Callable, tp: Number) -> Number:
        split = (p for p in self.layer if (p.splits_n or p.splits_k) and not p.batched and p.groups == 1)
        return sum(p.seconds(matmul, tp) for p in split)

    def core(self, matmul: Callable, tp: Number) -> Number:
        return sum(p.seconds(matmul, tp) for p in self.layer if p.batched)

    def head(self, matmul: Callable, tp: Number) -> Number:
        return sum(p.seconds(matmul, tp) for p in self.loss)

    def elementwise_bytes(self, dropout: Number, flash: Number, itemsize: int) -> tuple:
        whole = split = scores = 0.0
        for p in self.layer:
            if p.batched:
                scores += np.where(flash, 0, 2 * p.n * itemsize)
                continue
            for size, is_split in ((p.rows * p.n, p.splits_n), (p.rows * p.k, p.splits_k)):
                split, whole = split + size * is_split, whole + size * (not is_split)
        return whole * itemsize, split * itemsize, scores


@cache
def allows(model: Model, tp: int, experts_over_tp: bool = False) -> bool:
    """Whether a model's own rules let it be split over tp."""
    try:
        check_split(model, ParallelConfig(MeshShape(tp=tp), sp=experts_over_tp, experts_over_tp=experts_over_tp))
    except ConfigError:
        return False
    return True


@cache
def work_of(model: Model) -> TracedWork:
    """The products of one layer and of the loss, from a trace on one rank and on the fewest that the model allows."""
    rows = rows_to_trace(model)
    one = OneRank(model, 1, rows, PrecisionConfig(), attention="xla")
    layer, loss, width = one.trace(_products)
    backward, again = one.trace(_backward_flops), one.trace(_layer_again)[1]
    few = next((replace(one, tp=tp) for tp in range(2, MOST_SPLIT) if allows(model, tp)), None)
    parted_layer, parted_loss, _ = few.trace(_products) if few else (layer, loss, width)
    leaves = make_layout(model, ParallelConfig()).leaves
    outer, layers = (jax.tree.leaves(tree) for tree in split_outer(leaves))
    layer_parameters = sum(math.prod(leaf.shape[1:]) for leaf in layers)
    products = _compared(layer, parted_layer, rows, model.seq_len)
    of_loss = _compared(loss, parted_loss, rows, model.seq_len)
    weights, core = (sum(p.flops for p in products if p.batched == batched) for batched in (False, True))
    table = max((leaf for leaf in outer if "loss" in leaf.used_in), key=lambda leaf: math.prod(leaf.shape))
    in_experts = {
        path for path, param in named_params(declare(model)) if "experts" in param.dims and param.update != "count"
    }
    with_experts = (tp for tp in range(2, MOST_SPLIT) if in_experts and model.seq_len % tp == 0)
    apart = next((tp for tp in with_experts if allows(model, tp, experts_over_tp=True)), None)
    apart = apart and replace(one, tp=apart, sp=True, experts_over_tp=True)
    with_sp = few and model.seq_len % few.tp == 0 and replace(few, sp=True)
    return TracedWork(
        num_layers=model.num_blocks,
        seq_len=model.seq_len,
        width=width,
        vocab_size=max(table.shape),
        layer_parameters=layer_parameters,
        expert_parameters=sum(math.prod(leaf.shape[1:]) for leaf in layers if leaf.name in in_experts),
        table_parameters=math.prod(table.shape),
        embedding_parameters=sum(math.prod(leaf.shape) for leaf in outer),
        layer_sums=_sums(few),
        mixture_sums=_sums(few) - _sums(apart) if apart else 0.0,
        ring_sums=_sums(with_sp) - _sums(replace(with_sp, tp_ring="one-way")) if with_sp else 0.0,
        matrices_again=(again - core) / weights,
        sums_again=_part_again(few),
        sp_sums_again=_part_again(with_sp or None),
        trained_layer=sum(math.prod(leaf.shape[1:]) for leaf in layers if not leaf.param.frozen) / layer_parameters,
        trained_table=float(not table.param.frozen),
        layer_backward=(backward[0] - 2 * core) / weights,
        head_backward=backward[1] / sum(p.flops for p in of_loss),
        layer=products,
        loss=of_loss,
        attention=one.trace(_attention),
    )


def _sums(rank: OneRank | None, again: bool = False) -> float:
    """Sums over tp of what a layer passes on, in its forward; a gather or scatter of it is half of one.

    again: those that are repeated where a layer runs again alone for its backward."""
    if rank is None:
        return 0.0
    sent, x_bytes = rank.trace(_sent_again if again else _sent_forward)
    whole = x_bytes * (rank.tp if rank.sp else 1)
    over_tp = [c for c in sent if c.kind != "all_to_all" and c.full_bytes >= whole]
    return sum(c.count * (1 if c.kind == "all_reduce" else 0.5) for c in over_tp)


def _part_again(rank: OneRank | None) -> float:
    """Fraction of the sums of a layer's forward that recomputing the layer repeats; 0 where there are none."""
    total = _sums(rank)
    return _sums(rank, again=True) / total if total else 0.0


@cache
def exchanged(model: Model, ranks: int) -> float:
    """Elements of the all-to-alls that a layer's forward sends over the `ranks` that hold different experts, for one
    position; what a rank keeps of its own is counted."""
    if ranks == 1:
        return 0.0
    rank = OneRank(model, 1, 1, PrecisionConfig(), ep=ranks)
    sent, _ = rank.trace(_sent_forward)
    all_to_alls = (c.count * c.full_bytes for c in sent if c.kind == "all_to_all")
    return sum(all_to_alls) / jnp.dtype(rank.precision.dtype).itemsize / model.seq_len


def _sent_forward(parts: _Functions) -> tuple[tuple[Collective, ...], int]:
    """What a layer's forward sends, and the bytes of what it passes on."""
    types = [jax.tree.map(type_of, each) for each in (parts.weights, parts.x)]
    program = flat(jax.make_jaxpr(parts.layer)(*types)).jaxpr
    return _collectives(needed_for(program.outvars, program.eqns), parts.mesh), _num_bytes([type_of(parts.x)])


def _sent_again(parts: _Functions) -> tuple[tuple[Collective, ...], int]:
    """The same of a layer that runs again alone for its backward, without what backward itself sends."""
    return _layer_again(parts)[0], _num_bytes([type_of(parts.x)])


def _layer_again(parts: _Functions) -> tuple[tuple[Collective, ...], float]:
    """What a layer sends that runs again alone for its backward, and the FLOPs a position of its products, without
    backward's own."""
    types = [jax.tree.map(type_of, each) for each in (parts.weights, parts.x)]
    forward, backward = _forward_and_backward(parts.layer, parts.bound.layout.layer_leaves, types)
    own = needed_for(backward.jaxpr.outvars, backward.jaxpr.eqns)
    everything, _ = _from_inputs(parts.layer, parts.bound.layout.layer_leaves, types, forward.out_avals[0])
    sent = _without(_collectives(everything, parts.mesh), _collectives(own, parts.mesh))
    products = sum(
        2 * math.prod(dims) * sign
        for eqns, sign in ((everything, 1), (own, -1))
        for dims in map(product_dims, products_among(eqns))
    )
    return sent, products / math.prod(parts.batch.inputs.shape)


def _attention(parts: _Functions) -> tuple[AttentionShape, ...]:
    """Every call of `jaxdist.models.attention.attend` in a layer."""
    bound = replace(parts.bound, ctx=replace(parts.bound.ctx, attention="cudnn-traced"))
    types = [jax.tree.map(type_of, each) for each in (parts.weights, parts.x)]
    program = flat(jax.make_jaxpr(replace(parts, bound=bound).layer)(*types))
    found = map(traced_attention, all_equations(program.jaxpr))
    return tuple(AttentionShape(*sizes) for sizes in found if sizes)


def _products(parts: _Functions) -> tuple[list, list, int]:
    """(batch, m, n, k) of every product of a layer and of the loss, and the width of what a layer passes on."""

    found = []
    for function, args in ((parts.layer, (parts.weights, parts.x)), (parts.loss, (parts.outer, parts.x))):
        closed = flat(jax.make_jaxpr(function)(*(jax.tree.map(type_of, each) for each in args)))
        found.append(_dots(closed))
    return *found, parts.x.shape[-1]


def _dots(jaxpr) -> list[tuple[int, int, int, int]]:
    return [product_dims(eqn) for eqn in products_of(jaxpr)]


def _backward_flops(parts: _Functions) -> tuple[float, float]:
    """FLOPs a position of a layer's and of the loss's backward, for their inputs and what is trained of them."""
    found = []
    for function, leaves, params in (
        (parts.layer, parts.bound.layout.layer_leaves, parts.weights),
        (parts.loss, parts.outer_leaves, parts.outer),
    ):
        _, backward = _forward_and_backward(
            function, leaves, [jax.tree.map(type_of, each) for each in (params, parts.x)]
        )
        found.append(sum(2 * math.prod(dims) for dims in _dots(backward)) / math.prod(parts.batch.inputs.shape))
    return found[0], found[1]


def _compared(one: list, two: list, rows_traced: int, seq_len: int) -> tuple[Product, ...]:
    """Products on one rank, told by those on two which of their dims tp splits."""
    positions, found = rows_traced * seq_len, []
    for (batch, m, n, k), (_, _, n2, k2) in zip(one, two, strict=True):
        if batch > 1 and batch % rows_traced:  # groups of rows, each with a matrix of its own
            rows = batch * m / positions
            found.append(Product(2 * rows * n * k, n, k, n2 < n, k2 < k, False, rows, batch))
            continue
        if batch % rows_traced == 0:  # of activations: heads are split, if anything is
            smallest, flops = min(m, n, k), 2 * batch * m * n * k / positions
            halves = two is not one and any(b < a for a, b in zip(one, two, strict=True))
            found.append(Product(flops, flops / 2 / smallest, smallest, halves, False, True))
            continue
        n, n2 = (m, n2) if m % rows_traced else (n, n2)
        found.append(Product(2 * n * k, n, k, n2 < n, k2 < k, False))
    return tuple(found)
