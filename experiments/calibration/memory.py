"""Predicted bytes on the fullest device: columns of layouts in, columns of bytes out.

No JAX here. The closed forms of `jaxdist.plan.formulas`, stage by stage, with what a framework keeps beyond them
as a named convention. For one layout, tracing and compiling the real program know better; this one searches ten
thousand.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from jaxdist.plan import formulas
from jaxdist.plan.formulas import RECIPES, ModelShape, StateRecipe
from jaxdist.plan.time_model import Layout

Number = Any  # a Python number, or a numpy array of them


@dataclass(frozen=True)
class MemoryConvention:
    """What a framework keeps beyond the papers' formulas; the defaults are those formulas alone.

    micro_gradient: bytes a parameter of a micro-batch's own gradient, beside the accumulated one. update: bytes a
    parameter, sharded as the optimiser is, of its temporaries. extra_hidden: bytes a position and h that a layer keeps
    beyond its matmuls' and norms' inputs. gathered: with sp, the whole gathered inputs of QKV and of the MLP are kept
    (4h bytes a position instead of 4h/t). bytes_per_logit: 4 for fp32 logits; 10 for 16-bit and fp32 ones and softmax;
    14 with their gradient besides. gathered_layers: layers whose weights ZeRO-3 holds whole, in 16 bit, and what is
    outside the layers with them; its shards are over cp as well. alternate: "selective" keeps a layer's input, the
    attention's output and every other product, not all but the scores. recipe: of `formulas.RECIPES`.
    """

    micro_gradient: float = 0
    update: float = 0
    extra_hidden: float = 0
    gathered: bool = False
    bytes_per_logit: float = 4
    gathered_layers: int = 0
    alternate: bool = False
    recipe: str = "mixed-adam-fp32-gradients"


# Chosen by `experiments.calibration.peaks`, as the best of 270 for nanotron's 26 published peaks.
NANOTRON = MemoryConvention(micro_gradient=2, extra_hidden=8, gathered=True, bytes_per_logit=6)
# torchtitan's masters are in fp32 and sharded, and it keeps every other product (arXiv 2410.06511, section 2). The rest
# by its peaks: two layers' weights whole, and of the logits four arrays, fewer in its release of a year later.
TORCHTITAN = MemoryConvention(recipe="fp32-adam", gathered_layers=2, alternate=True, bytes_per_logit=14, gathered=True)
TORCHTITAN_2025 = replace(TORCHTITAN, bytes_per_logit=6)


@dataclass(frozen=True, eq=False)
class DeviceBytes:
    """Columns of bytes on a device of the fullest stage. `stage` says which: "first", "second" or "last"."""

    parameters: np.ndarray
    gradients: np.ndarray
    optimizer: np.ndarray
    activations: np.ndarray
    recompute: np.ndarray
    logits: np.ndarray
    total: np.ndarray
    stage: np.ndarray


def device_bytes(
    shape: ModelShape,
    layout: Layout,
    recipe: str | StateRecipe | None = None,
    convention: MemoryConvention = MemoryConvention(),
    held: Number | None = None,
    itemsize: int = 2,
) -> DeviceBytes:
    """Bytes of model state, activations and logits on the fullest stage, for every layout in the columns.

    recipe: default the convention's. held: micro-batches whose activations the first stage holds at most; default
    min(m, p) of 1F1B times `interleave_factor`. Of another schedule pass max(`in_flight(...)`) / chunks. The second
    stage holds one less and the last one; the second may have more layers than the first. What an allocator loses is
    not counted.
    `itemsize` is of an activation: 2, or 4 in fp32 (with recipe "fp32-adam").
    Raises: ConfigError for an unknown recipe or remat.
    """
    recipe = recipe or convention.recipe
    if isinstance(recipe, str):
        formulas.require_recipe(recipe)
        recipe = RECIPES[recipe]
    recipe = StateRecipe(
        recipe.parameter, recipe.gradient + convention.micro_gradient, recipe.optimizer + convention.update
    )
    pp, tp, dp, sp = (np.asarray(getattr(layout, name)) for name in ("pp", "tp", "dp", "sp"))
    shards = dp * layout.cp if convention.gathered_layers else dp  # FSDP's are over both
    split = {"tp": tp, "sp": sp, "cp": layout.cp, "itemsize": itemsize}
    kept = {**split, "dropout": layout.dropout, "flash": layout.flash}
    selective, every = formulas.remat_columns(layout.remat)

    extra = layout.rows * shape.seq_len / layout.cp * shape.width
    extra = extra * (convention.extra_hidden / tp + convention.gathered * 4 * (1 - 1 / tp) * sp)
    layer = formulas.layer_activation_bytes(shape, layout.rows, remat=layout.remat, **kept) + np.where(every, 0, extra)
    if convention.alternate:
        h, kv = shape.width, shape.kv_width
        products = 2 * h / np.where(sp, tp, 1) + (2 * h + kv + shape.ffn_width) / tp
        layer = np.where(selective, itemsize * layout.rows * shape.seq_len / layout.cp * products, layer)
    recompute = formulas.recompute_bytes(shape, layout.rows, layout.remat, **kept) + every * extra
    logits = formulas.head_activation_bytes(shape, layout.rows, bytes_per_logit=convention.bytes_per_logit, **split)

    passes = layout.microbatches if layout.pipeline_microbatches is None else layout.pipeline_microbatches
    if held is None:
        # Without a pipeline one micro-batch is forward and backward before the next.
        held = formulas.in_flight("1f1b", pp, passes) * formulas.interleave_factor(pp, layout.chunks)
    most = np.ceil(shape.num_layers / pp) if layout.most_layers is None else np.asarray(layout.most_layers)
    first = most if layout.first_layers is None else np.asarray(layout.first_layers)
    last = most if layout.last_layers is None else np.asarray(layout.last_layers)
    table = shape.vocab_size * shape.width
    positions = shape.seq_len * shape.width if shape.learned_positions else 0
    alone = pp == 1
    # A tied table is on both end stages; on one stage it is there once.
    both_tables = (1 if shape.tied_embedding else 2) * table + positions
    stages = {
        "first": (first, np.where(alone, both_tables, table + positions), held, np.where(alone, logits, 0)),
        "second": (np.where(alone, 0, most), 0, np.maximum(held - 1, 1), 0),
        "last": (last, np.where(alone, both_tables, table), 1, logits),
    }
    columns = []
    for layers, tables, in_flight, head in stages.values():
        state = formulas.state_bytes(layers * shape.layer_parameters + tables, recipe, layout.zero, shards, tp)
        whole = 2 * (convention.gathered_layers * shape.layer_parameters + tables) / tp
        whole = np.where(np.asarray(layout.zero) == 3, whole, 0) * (convention.gathered_layers > 0)
        parts = [
            state.parameters + whole,
            state.gradients,
            state.optimizer,
            layers * in_flight * layer,
            recompute,
            head,
        ]
        columns.append([*parts, sum(parts)])
    length = np.broadcast_shapes((1,), *(np.shape(part) for parts in columns for part in parts))
    table_of = np.array([[np.broadcast_to(part, length) for part in parts] for parts in columns])  # stage, part, layout
    fullest = table_of[:, -1].argmax(axis=0)
    chosen = np.take_along_axis(table_of, fullest[None, None], axis=0)[0]
    names = [field.name for field in fields(DeviceBytes)][:-1]
    return DeviceBytes(**dict(zip(names, chosen, strict=True)), stage=np.array(list(stages))[fullest])
