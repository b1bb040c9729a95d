"""What a step counted of a model's experts: how often each was chosen, what it dropped, and which broke.

The counts are parameters of `Param.update` "count" (`jaxdist.models.experts`), so they are in the state after the step.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint.logical import readable
from jaxdist.layout import Layout, Leaf, axes_of
from jaxdist.params import STACKED

LOAD, DROPPED, FAULTS = ".load", ".dropped", ".faults"
NAMES = ("expert_load_max", "expert_load_min", "expert_rank_load_max", "expert_dropped")
DIGITS = 6


def counters(layout: Layout) -> list[Leaf]:
    """The leaves that count; none where a model has no experts."""
    return [leaf for leaf in jax.tree.leaves(layout.leaves) if leaf.param.update == "count"]


def copies(layout: Layout, params: dict) -> list[jax.Array]:
    """The counts among the parameters of a state, which the next step may then take; all processes call. Nothing waits
    for it."""
    every = zip(jax.tree.leaves(layout.leaves), jax.tree.leaves(params), strict=True)
    return [jnp.copy(readable(x)) for leaf, x in every if leaf.param.update == "count"]


def counted(layout: Layout, values: Sequence[jax.Array], num_tokens: float) -> dict[str, np.ndarray]:
    """Counts[blocks, experts] of a step, by the parameter's name, from `copies` of the state after it.

    num_tokens: of its batch, by which counts are divided.
    """
    found = {}
    for leaf, x in zip(counters(layout), map(np.asarray, values), strict=True):
        if leaf.rows is not None:
            x = x[[leaf.rows.index(layer) for layer in range(leaf.shape[0])]]
        found[leaf.name] = np.asarray(x, np.float64) * num_tokens
    return found


def summary(layout: Layout, counts: dict[str, np.ndarray]) -> dict[str, float]:
    """Over all layers: the load of the busiest expert over the mean of its layer, that of the idlest, that of the
    busiest rank where ranks hold different experts, and the part of all choices that was dropped."""
    loads = [x for name, x in counts.items() if name.endswith(LOAD)]
    if not loads:
        return {}
    parts = [x / np.maximum(x.mean(-1, keepdims=True), 1e-30) for x in loads]
    found = {"expert_load_max": max(x.max() for x in parts), "expert_load_min": min(x.min() for x in parts)}
    # A model of one's own may count loads and no faults, whose split over ranks is the experts'.
    held = min((leaf.compute_local[-1] for leaf in counters(layout) if leaf.name.endswith(FAULTS)), default=0)
    if 0 < held < parts[0].shape[-1]:
        of_ranks = (x.reshape(len(x), -1, held).mean(-1) for x in parts)
        found["expert_rank_load_max"] = max(x.max() for x in of_ranks)
    dropped = [x.sum() for name, x in counts.items() if name.endswith(DROPPED)]
    if dropped:
        found["expert_dropped"] = sum(dropped) / max(sum(x.sum() for x in loads), 1e-30)
    return {name: round(float(value), DIGITS) for name, value in found.items()}


def rounded(counts: dict[str, np.ndarray]) -> dict[str, list]:
    """As lists for JSON."""
    return {name: np.round(x, 2).tolist() for name, x in counts.items()}


def broken(layout: Layout, counts: dict[str, np.ndarray], num_kinds: int) -> list[str]:
    """The experts that made non-finite rows of finite ones, in words, in the order of layers. num_kinds: of layers."""
    leaves, found = {leaf.name: leaf for leaf in counters(layout)}, []
    for name, x in counts.items():
        if name.endswith(FAULTS):
            place = int(name.removeprefix(f"{STACKED}.").split("_")[0]) if num_kinds > 1 else 0
            for block, expert in zip(*np.nonzero(np.round(x)), strict=True):
                layer = int(block) * num_kinds + place
                found.append((layer, int(expert), f"expert {expert} of layer {layer}{_held_by(leaves[name], expert)}"))
    return [text for *_, text in sorted(found)]


def _held_by(leaf: Leaf, expert: int) -> str:
    """On which ranks of the axes that split experts."""
    dim = len(leaf.shape) - 1
    axes = axes_of(leaf.spec[dim])
    if not axes:
        return ""
    places = np.unravel_index(expert // leaf.compute_local[dim], [leaf.mesh.size(axis) for axis in axes])
    return f" (held by {','.join(f'{axis}={place}' for axis, place in zip(axes, places, strict=True))})"
