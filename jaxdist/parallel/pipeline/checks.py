"""What the executor requires of the arrays and functions of a pipeline, checked before anything is traced."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import varying_axes
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.split_backward import all_equations


def check_arrays(
    schedule: Schedule, shared: Any, layers: Any, fixed: Any, micros: Any, num_layers: Sequence[int] | None, axis: str
) -> int:
    """Layers a chunk has room for. Raises: ConfigError for arrays that do not fit the schedule or the executor."""
    stages, micro = lax.axis_size(axis), _leading(micros, "micros")
    for what, found, wanted in (
        ("stages", stages, schedule.num_stages),
        ("micro-batches", micro, schedule.num_microbatches),
    ):
        if found != wanted:
            raise ConfigError(
                f"schedule {schedule.name} for {wanted} {what}",
                f"must be for the {found} " + (f"ranks of {axis!r}" if what == "stages" else "of the batch"),
                f"Make the schedule for {found} {what}",
            )
    rows = _leading(layers if jax.tree.leaves(layers) else fixed, "layers")  # of which all may be frozen
    if jax.tree.leaves(fixed) and _leading(fixed, "fixed") != rows:
        raise ConfigError(
            f"fixed values for {_leading(fixed, 'fixed')} layers", f"must be for a stage's {rows}", "Give a row a layer"
        )
    if rows % schedule.num_chunks:
        raise ConfigError(
            f"schedule {schedule.name} with {schedule.num_chunks} chunks",
            f"the chunks must divide the {rows} layers of a stage",
            "Hold a multiple of the chunks, with `num_layers` where parts have fewer",
        )
    for leaf in jax.tree.leaves((shared, layers)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(
                f"weights of type {leaf.dtype}",
                "weights are differentiated, so they must be floating",
                "Pass it in `fixed` or in `micros`",
            )
        if stages == 1 and axis in varying_axes(leaf):
            raise ConfigError(
                f"weights split over {axis!r}, which has one rank",
                "must be split over axes of two or more ranks (see jaxdist.parallel.collectives)",
                f"Leave {axis!r} out of in_specs and out_specs, or use more stages",
            )
    depth, num_parts = rows // schedule.num_chunks, schedule.num_stages * schedule.num_chunks
    if num_layers is not None and (len(num_layers) != num_parts or not all(n in range(depth + 1) for n in num_layers)):
        raise ConfigError(
            f"num_layers={tuple(num_layers)}",
            f"must have {num_parts} numbers, one for each part of {schedule.name}, none above {depth}",
            "Name one whole number for each part, in model order",
        )
    return depth


def _leading(tree, name: str) -> int:
    """The size of the leading dim that all leaves share."""
    sizes: set = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(sorted(map(str, sizes))) or "no arrays"
        raise ConfigError(
            f"{name} with leading sizes {found}",
            "every leaf must have the same leading dim: a row for each layer of the stage, or for each micro-batch",
            "Give every leaf that dim, and every leaf of layers the pipeline's axis in its spec",
        )
    return sizes.pop()


def output_type(name: str, function: Callable, *types) -> Any:
    """The type of what a stage function returns.

    Raises: ConfigError where that is not one array, or where the function permutes over an axis of several ranks:
    stages run different loops at a tick, and a permute (on XLA:CPU, of all devices at once) would pair one stage's
    with another's.
    """
    closed = jax.make_jaxpr(function)(*types)
    if len(closed.out_avals) != 1:
        raise ConfigError(f"`{name}` returns {len(closed.out_avals)} arrays", "must return one", "Return one array")
    for eqn in all_equations(closed):
        if eqn.primitive.name == "ppermute" and comm.live(eqn.params["axis_name"]):
            raise ConfigError(
                f"`{name}` permutes over {eqn.params['axis_name']}",
                "must not permute: stages run different layers at a tick, so their permutes would be mismatched",
                "Use all_gather, all_to_all or a sum, which meet inside one stage alone",
            )
    return closed.out_avals[0]
