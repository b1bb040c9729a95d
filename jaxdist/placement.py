"""Where `make_layout` places every parameter: over tp by its dims, over pp by its layer, over dp and cp by ZeRO."""

import dataclasses
import itertools
import math
from collections.abc import Sequence

import jax
from jax.sharding import PartitionSpec

from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf, axes_of, replace_entry
from jaxdist.mesh import AXES, AXIS_OF_DIM, MAY_STAY_WHOLE, STATE_AXES, WORK_AXES
from jaxdist.models.base import Model, declare
from jaxdist.models.traced import parts_using
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.params import STACKED, Param, joined, named_params
from jaxdist.specs import drop_unit_axes
from jaxdist.strategy import ParallelConfig


def make_layout(model: Model, parallel: ParallelConfig, part_layers: Sequence[int] = ()) -> Layout:
    """Place every parameter that the model declares.

    part_layers: under pp, the layers of each part of the model, in model order.
    """
    mesh, declared, used_in = parallel.mesh, declare(model), parts_using(model)
    stacked = dict(named_params({STACKED: declared[STACKED]}))
    most_of_a_vector = 2 * math.sqrt(sum(math.prod(param.shape[1:]) for param in stacked.values()))
    rows, ends = None, ()
    if (schedule := parallel.pipeline) is not None:
        rows = pipeline_rows(schedule, part_layers)
        ends = tuple(sorted({schedule.place(part)[0] for part in (0, len(part_layers) - 1)}))

    def place(path, param) -> Leaf:
        name = joined(path)
        in_layers, uses = name in stacked, used_in.get(name, frozenset())
        shared = ends if len(uses) > 1 else ()
        spec = tuple(spec_of(param, parallel))
        if shared:
            spec = replace_entry(spec, choose_spread_dim(param.shape, spec, mesh.pp), "pp")
        split_over = {axis for entry in spec for axis in axes_of(entry)}
        leaf = Leaf(
            name=name,
            param=param,
            spec=spec,
            mesh=mesh,
            zero_dim=None,
            zero_axes=tuple(axis for axis in STATE_AXES if mesh.size(axis) > 1 and axis not in split_over),
            reduce_axes=tuple(axis for axis in partial_sum_axes(parallel, param) if axis not in split_over),
            rows=rows if in_layers else None,
            consumer_stages=shared,
            small=in_layers and math.prod(param.shape[1:]) <= most_of_a_vector,
            used_in=uses,
        )
        if not parallel.sharded or not leaf.zero_axes or param.update == "count":
            return leaf
        return dataclasses.replace(leaf, zero_dim=choose_zero_dim(leaf, first=int(in_layers)))

    leaves = jax.tree.map_with_path(place, declared)
    return Layout(leaves, mesh, parallel.zero if parallel.sharded else 0, parallel.bucket_bytes)


def pipeline_rows(schedule: Schedule, part_layers: Sequence[int]) -> tuple[int, ...]:
    """The layer in each row of a stacked leaf, in the order in which stages hold their chunks; -1 is padding."""
    starts, depth = [0, *itertools.accumulate(part_layers)], max(part_layers)
    rows = []
    for stage in range(schedule.num_stages):
        for chunk in range(schedule.num_chunks):
            part = schedule.part(stage, chunk)
            rows += [starts[part] + row if row < part_layers[part] else -1 for row in range(depth)]
    return tuple(rows)


def spec_of(param: Param, parallel: ParallelConfig) -> PartitionSpec:
    """The mesh axis, or axes, that split each dim; None where every rank holds it whole. An expert's width is whole
    where experts are split over tp."""
    mesh, taken, spec = parallel.mesh, parallel.expert_axes if "experts" in param.dims else (), []
    for dim, size in zip(param.dims, param.shape, strict=True):
        axis = AXIS_OF_DIM.get(dim)
        whole = axis in taken or (dim in MAY_STAY_WHOLE and size % mesh.size(axis))
        spec.append(taken if dim == "experts" else None if whole else axis)
    return drop_unit_axes(spec, mesh)


def partial_sum_axes(parallel: ParallelConfig, param: Param) -> tuple[str, ...]:
    """Axes over which a parameter's gradient is summed unless it is sharded over them: those that split the work, and
    those whose ranks use parts of it, or all of it for parts of their own."""
    axes = {*WORK_AXES, *(("tp",) if parallel.sp else ())}
    axes |= {AXIS_OF_DIM[dim] for dim in (*param.partial, *(MAY_STAY_WHOLE & set(param.dims)))}
    return tuple(axis for axis in AXES if axis in axes and parallel.mesh.size(axis) > 1)


def choose_spread_dim(shape: tuple[int, ...], spec: tuple[str | None, ...], pp: int) -> int:
    """The dim of which each stage holds a part: of those that tp leaves whole, the one with least padding, the largest.

    Raises: ConfigError where tp splits all of them.
    """
    whole = [dim for dim, axis in enumerate(spec) if axis is None]
    if not whole:
        raise ConfigError(
            f"a parameter of shape {shape}",
            "must have a dim that tp leaves whole: under pp both ends of the model use it, so the stages share it",
            "Give it such a dim",
        )
    return min(whole, key=lambda dim: (-(-shape[dim] // pp) * pp / shape[dim], -shape[dim]))


def choose_zero_dim(leaf: Leaf, first: int) -> int | None:
    """The dim that ZeRO shards: least padding, then the first, then a dim tp leaves whole, then the largest; None of a
    single number, which every rank holds.

    A GPU gathers along the first dim in place; for another one XLA transposes shards first, and keeps the transposes of
    all layers through the step. The layer dim (before `first`) is never chosen: a block must be gathered on its own.
    """

    def cost(dim):
        local = leaf.compute_local[dim]
        padded = -(-local // leaf.num_shards) * leaf.num_shards
        return padded / local, dim != first, leaf.spec[dim] is not None, -local

    return min(range(first, len(leaf.shape)), key=cost, default=None)
