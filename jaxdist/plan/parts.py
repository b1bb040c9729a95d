"""The parts of a model traced alone: what its embedding, one layer and its loss send, keep and read again.

A step runs each part as often as its schedule says, so what a part is need be known once. Nothing here knows a model:
the parts are traced on an abstract mesh that has tp alone, with the shapes of one rank.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
from jax import random
from jax.sharding import PartitionSpec

from jaxdist.compat import type_of
from jaxdist.config import ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.layout import Layout, make_layout, split_outer
from jaxdist.mesh import MeshShape, make_abstract_mesh
from jaxdist.models.base import Batch, Model
from jaxdist.parallel.split import SplitLayer, flat, needed_for, split_layer, variables
from jaxdist.parallel.zero import ShardedParams
from jaxdist.plan.trace import Collective, collectives_of
from jaxdist.train.gradients.base import ShardedModel


@dataclass(frozen=True)
class Part:
    """What one part sends over tp for one micro-batch, and what backward needs of it.

    forward, backward: with what forward keeps at hand. recomputed: what backward sends besides where forward runs
    again. read_again: the parameters that such a backward needs, forward included, by their path in the part.
    kept_bytes: what forward leaves for backward, parameters not counted.
    """

    forward: tuple[Collective, ...]
    backward: tuple[Collective, ...]
    recomputed: tuple[Collective, ...]
    read_again: frozenset[str]
    kept_bytes: int


@dataclass(frozen=True)
class Parts:
    """The parts of a model on one rank, for one micro-batch.

    x_bytes: what a layer passes on. until_b_bytes, until_w_bytes, handed_bytes: of a layer in a pipeline
    (`jaxdist.parallel.split`). read_by_w: the parameters of a layer that W reads.
    """

    embed: Part
    layer: Part
    loss: Part
    x_bytes: int
    until_b_bytes: int
    until_w_bytes: int
    handed_bytes: int
    read_by_w: frozenset[str]


def parts_of(config: RunConfig) -> Parts:
    """The parts of a run's model as one of its ranks computes them."""
    parallel, mesh = config.parallel, config.parallel.mesh
    micro_batches = parallel.accumulate * parallel.num_microbatches
    return trace_parts(
        config.model,
        mesh.tp,
        config.batch_size // (mesh.batch_ranks * micro_batches),
        config.precision,
        sp=parallel.sp and mesh.tp > 1,
        tp_ring=parallel.tp_ring,
        loss_chunks=parallel.loss_chunks,
        selective=parallel.remat == "selective",
        attention=parallel.attention,
    )


@cache
def trace_parts(
    model: Model,
    tp: int,
    rows: int,
    precision: PrecisionConfig,
    *,
    sp: bool = False,
    tp_ring: str = "none",
    loss_chunks: int = 1,
    selective: bool = False,
    attention: str = "auto",
) -> Parts:
    """The parts for micro-batches of `rows` sequences on one of `tp` ranks."""
    remat = "selective" if selective else "none"
    parallel = ParallelConfig(MeshShape(tp=tp), sp=sp, tp_ring=tp_ring, loss_chunks=loss_chunks, remat=remat)
    config = RunConfig(model, parallel, precision=precision, batch_size=rows, steps=1)
    layout = make_layout(model, parallel)
    asked = model.attention_for(attention, "abstract", precision.dtype, training=True)
    bound = ShardedModel.of(config, layout, asked)
    specs = Batch(layout.batch_spec(), layout.batch_spec(), layout.rows_spec())
    tokens, numbers = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, model.seq_len), (rows,)))
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, precision.dtype), layout.leaves)
    found: list[Parts] = []

    def body(params, batch):
        found.append(_trace(bound, layout, params, batch))
        return jnp.zeros(())

    with jax.enable_x64(precision.dtype == "float64"):
        on_mesh = partial(jax.shard_map, mesh=make_abstract_mesh(parallel.mesh), check_vma=True)
        in_specs = (layout.compute_specs(), specs)
        jax.eval_shape(
            on_mesh(body, in_specs=in_specs, out_specs=PartitionSpec()), params, Batch(tokens, tokens, numbers)
        )
    return found[-1]


def _trace(bound: ShardedModel, layout: Layout, params: dict, batch: Batch) -> Parts:
    mesh = layout.parallel.mesh
    key = random.key(0) if bound.config.model.dropout else None
    outer, layers = split_outer(bound.cast(params))
    layer = jax.tree.map(lambda x: x[0], layers)
    index = jnp.int32(0)

    def embed(outer):
        return bound.embed(ShardedParams(outer), batch, key)

    def run_layer(weights, x):
        return bound.whole_layer(weights, x, index, batch, key)

    def loss(outer, x):
        return bound.loss(ShardedParams(outer), x, batch, key)

    x = type_of(embed(outer))
    saved = jax.checkpoint(run_layer, policy=bound.policy, prevent_cse=False)

    def of_pipeline(weights, index, batch, x):
        return bound.whole_layer(weights, x, index, batch, key)

    split = split_layer(of_pipeline, *(jax.tree.map(type_of, part) for part in (layer, index, batch, x)))
    return Parts(
        embed=_part(embed, embed, mesh, outer),
        layer=_part(saved, run_layer, mesh, layer, x),
        loss=_part(loss, loss, mesh, outer, x),
        x_bytes=_num_bytes([x]),
        until_b_bytes=_num_bytes(split.until_b),
        until_w_bytes=_num_bytes(split.until_w),
        handed_bytes=_num_bytes(split.handed),
        read_by_w=_read_by_w(split, layer, index),
    )


def _part(saved: Callable, plain: Callable, mesh: MeshShape, params, *inputs) -> Part:
    """saved: the part as it runs; plain: without a policy of what is saved, to run it again from its inputs."""
    types = [jax.tree.map(type_of, each) for each in (params, *inputs)]
    pullback = None

    def forward_and_residuals(*args):
        nonlocal pullback
        y, pull = jax.vjp(saved, *args)
        residuals, pullback = jax.tree.flatten(pull)
        return y, residuals

    forward = flat(jax.make_jaxpr(forward_and_residuals)(*types))
    y, *residuals = forward.jaxpr.outvars
    backward = flat(jax.make_jaxpr(lambda values, dy: jax.tree.unflatten(pullback, values)(dy))(
        [v.aval for v in residuals], y.aval
    ))  # fmt: skip
    again = flat(jax.make_jaxpr(lambda dy, *args: jax.vjp(plain, *args)[1](dy))(y.aval, *types))
    needed = needed_for(again.jaxpr.outvars, again.jaxpr.eqns)
    in_backward = _collectives(needed_for(backward.jaxpr.outvars, backward.jaxpr.eqns), mesh)
    given = set(forward.jaxpr.invars[: len(jax.tree.leaves(params))])
    kept = [v for v in dict.fromkeys(variables(residuals)) if v not in given]
    return Part(
        forward=_collectives(forward.jaxpr.eqns, mesh),
        backward=in_backward,
        recomputed=_without(_collectives(needed, mesh), in_backward),
        read_again=_read(needed, again.jaxpr.invars[1:], params),
        kept_bytes=_num_bytes(v.aval for v in kept),
    )


def _read_by_w(split: SplitLayer, layer, index) -> frozenset[str]:
    types = [jax.tree.map(type_of, part) for part in (layer, index)]
    closed = flat(jax.make_jaxpr(split.weight_gradient)(*types, list(split.until_w), list(split.handed)))
    return _read(needed_for(closed.jaxpr.outvars, closed.jaxpr.eqns), closed.jaxpr.invars, layer)


def _read(eqns: list, invars: list, params) -> frozenset[str]:
    """Paths of the parameters, the first of `invars`, that equations read."""
    read = {v for eqn in eqns for v in variables(eqn.invars)}
    paths = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in jax.tree.leaves_with_path(params)]
    return frozenset(path for path, v in zip(paths, invars, strict=False) if v in read)


def _collectives(eqns: list, mesh: MeshShape) -> tuple[Collective, ...]:
    return tuple(collectives_of(SimpleNamespace(eqns=eqns), mesh))


def _without(all_: tuple[Collective, ...], some: tuple[Collective, ...]) -> tuple[Collective, ...]:
    """Those of `all_` that are left when each of `some` is taken out once."""
    left = list(all_)
    for each in some:
        left.remove(each)
    return tuple(left)


def _num_bytes(avals) -> int:
    return sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals)
