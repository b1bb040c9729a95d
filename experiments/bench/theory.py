"""What a layout has to hold and to send, by the papers' formulas: what a program's own figures are held against.

Counted for the stage that needs most, each with the layers and the ends (embedding, head) that stand on it. The table
is as the model pads it; what ZeRO and parts of unequal length pad is not counted, nor are single numbers (loss, norm).
"""

import math
from dataclasses import dataclass
from itertools import pairwise

import jax.numpy as jnp

from jaxdist.config import RunConfig
from jaxdist.mesh import AXIS_OF_DIM
from jaxdist.models.base import declare
from jaxdist.models.traced import parts_using
from jaxdist.params import Param
from jaxdist.plan.formulas import ModelShape, StateRecipe, cp_traffic, pp_traffic, state_bytes, tp_traffic
from jaxdist.strategy import ParallelConfig

MOMENTS = {"adamw": 2, "lion": 1, "sgd": 1}


@dataclass(frozen=True)
class Stage:
    """Layers of a stage, which ends of the model stand on it, and how many of its boundaries face another stage.

    Elements on one tp rank: `parameters` of all, `alike` of those that every tp rank holds whole, `table` of the tied
    table where the model's other end is on another stage.
    """

    layers: int
    embeds: bool
    heads: bool
    boundaries: int
    parameters: float
    alike: float
    table: float


def stages(config: RunConfig) -> list[Stage]:
    mesh, schedule, layers = config.parallel.mesh, config.parallel.pipeline, config.part_layers
    declared, depth = declare(config.model), config.model.num_layers
    places = [0 if schedule is None else schedule.place(part)[0] for part in range(len(layers))]
    found = []
    for stage in range(mesh.pp):
        here = sum(n for n, place in zip(layers, places, strict=True) if place == stage)
        embeds, heads = places[0] == stage, places[-1] == stage
        used = {path.split(".")[0]: parts for path, parts in parts_using(config.model).items()}
        names = {name for name, parts in used.items() if (embeds and "embed" in parts) or (heads and "loss" in parts)}
        split, alike = sizes(declared["blocks"])
        split, alike = split * here / depth, alike * here / depth
        for name in names:
            more, as_well = sizes(declared[name])
            split, alike = split + more, alike + as_well
        boundaries = sum((a == stage) + (b == stage) for a, b in pairwise(places) if a != b)
        table = 0.0 if embeds == heads else sizes(declared["tokens"])[0] / mesh.tp
        found.append(Stage(here, embeds, heads, boundaries, split / mesh.tp + alike, alike, table))
    return found


def sizes(part: dict | Param) -> tuple[float, float]:
    """Elements (split over tp, held whole by every tp rank)."""
    if isinstance(part, dict):
        return tuple(map(sum, zip(*(sizes(each) for each in part.values()), strict=True)))
    size = math.prod(part.shape)
    return (size, 0) if "tp" in map(AXIS_OF_DIM.get, part.dims) else (0, size)


def state_in_theory(config: RunConfig) -> float | None:
    """Bytes of weights, masters and moments; None for an optimiser whose moments are not of the parameters' shapes.

    Source: ZeRO, arXiv 1910.02054, figure 1, without its gradients, which are not kept from step to step.
    """
    if config.optimizer.name not in MOMENTS:
        return None
    item, _, master = itemsizes(config)
    masters = 0 if config.precision.dtype == config.precision.master_dtype else master
    recipe = StateRecipe(item, 0, masters + MOMENTS[config.optimizer.name] * master)
    most = max(stage.parameters for stage in stages(config))
    return float(state_bytes(most, recipe, config.parallel.zero, config.parallel.mesh.state_ranks).total)


def sent_in_theory(config: RunConfig) -> float:
    """Bytes that one device sends in a step."""
    parts = (over_data, over_cp, over_tp, over_pp)
    return max(float(sum(part(config, stage) for part in parts)) for stage in stages(config))


def over_data(config: RunConfig, stage: Stage) -> float:
    """Gradients and weights: ZeRO, arXiv 1910.02054, section 7; across replicas: arXiv 2304.11277, section 3.2.2.

    With sp, gradients of what tp ranks hold alike are summed over tp in the same message: arXiv 2205.05198. A chunk
    that is recomputed apart from its backward gathers its weights a third time.
    """
    parallel = config.parallel
    mesh, zero = parallel.mesh, parallel.zero
    _, m = rows_of_a_microbatch(config)
    item, reduced, _ = itemsizes(config)
    shards = mesh.state_ranks if zero else 1
    ranks = mesh.replica * mesh.state_ranks // shards  # of an all-reduce
    mine = stage.parameters / shards
    alike = stage.alike / shards if parallel.sp else 0
    summed = 2 * reduced * (mine * share(ranks) + alike * (share(ranks * mesh.tp) - share(ranks)))
    if not zero:
        return summed
    of_gradients = {1: 1, 2: m, 3: m}[zero]
    uses = 3 if parallel.remat == "chunk" else 2
    of_weights = {1: 1, 2: 1, 3: uses * m if parallel.reshard_after_forward else m}[zero]
    return summed + (of_gradients * reduced + of_weights * item) * stage.parameters * share(shards)


def over_cp(config: RunConfig, stage: Stage) -> float:
    """Keys and values, or heads: `cp_traffic`."""
    parallel = config.parallel
    item, _, wide = itemsizes(config)
    rows, microbatches = rows_of_a_microbatch(config)
    exchanging, gathers = parallel.cp_split
    groups, shape = parallel.mesh.cp // exchanging, ModelShape.of(config.model)
    layer = cp_traffic(shape, rows, groups, exchanging, gathers, parallel.mesh.tp, item, wide)
    return microbatches * stage.layers * (layer.forward * (2 if parallel.recomputes else 1) + layer.backward)


def over_tp(config: RunConfig, stage: Stage) -> float:
    """Activations: `tp_traffic`; the softmax's three numbers a token: arXiv 1909.08053, section 3."""
    parallel, model = config.parallel, config.model
    item, _, wide = itemsizes(config)
    rows, microbatches = rows_of_a_microbatch(config)
    shape, recompute, cp = ModelShape.of(model), parallel.recomputes, parallel.mesh.cp
    layer = tp_traffic(shape, rows, parallel.mesh.tp, parallel.sp, recompute, cp, recomputed="needed").elements
    tokens, around = rows * model.seq_len / cp, 2 * share(parallel.mesh.tp)
    layer += halves_again(parallel) * tokens * model.width * share(parallel.mesh.tp)
    ends = (stage.embeds + stage.heads) * tokens * model.width * around  # embedding forward, head backward
    softmax = stage.heads * 3 * tokens * around
    return microbatches * ((stage.layers * layer + ends) * item + softmax * wide)


def halves_again(parallel: ParallelConfig) -> int:
    """Gathers and scatters over tp, half an all-reduce each, that a layer repeats where `remat` names them. Both of its
    gathers are made alike; of its scatters the last is passed on, and backward does not read it."""
    return parallel.repeats_arrays * (2 * ("all_gather:" in parallel.remat) + ("reduce_scatter:" in parallel.remat))


def over_pp(config: RunConfig, stage: Stage) -> float:
    """`pp_traffic`, and the gradient of a tied table whose two uses are on two stages: arXiv 2104.04473."""
    parallel = config.parallel
    item, reduced, _ = itemsizes(config)
    rows, microbatches = rows_of_a_microbatch(config)
    one = pp_traffic(ModelShape.of(config.model), rows, parallel.mesh.tp, parallel.sp, cp=parallel.mesh.cp).elements
    table = stage.table / (
        parallel.mesh.state_ranks if parallel.zero else 1
    )  # an all-reduce of two sends its size once
    return microbatches * stage.boundaries * one * item + table * reduced


def itemsizes(config: RunConfig) -> tuple[int, int, int]:
    """Bytes of an activation or weight, of a gradient on its way, of a master."""
    precision = config.precision
    names = (precision.dtype, precision.reduction_dtype, precision.master_dtype)
    return tuple(jnp.dtype(name).itemsize for name in names)


def rows_of_a_microbatch(config: RunConfig) -> tuple[float, int]:
    """(sequences of a micro-batch on one data rank, micro-batches in a step)."""
    parallel = config.parallel
    microbatches = parallel.accumulate * parallel.num_microbatches
    return config.batch_size / (parallel.mesh.replica * parallel.mesh.dp * microbatches), microbatches


def share(n: int) -> float:
    """What a ring's member sends of a message that every member holds: (n-1)/n."""
    return (n - 1) / n
