"""What our own step sends, in closed form: from the leaves, the settings and the schedule's table. Nothing is traced.

`predicted` says of every message what it is for. `tests/plan/test_communication.py` holds the messages equal, in number
and to the byte, to those that `jaxdist.plan.proof.trace` reads from the program. `jaxdist.plan.formulas` has the
papers' forms.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf, group
from jaxdist.mesh import TOKEN_AXES, WORK_AXES, MeshShape
from jaxdist.parallel import muon
from jaxdist.parallel.pipeline.instructions import FROM_AFTER, FROM_BEFORE, Loop
from jaxdist.parallel.pipeline.lowering import iterations
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.zero import sharded, zero_groups
from jaxdist.params import STACKED
from jaxdist.placement import make_layout
from jaxdist.plan.parts import OneRank, traffic_of
from jaxdist.plan.proof.trace import Count, Transfer, on_stages, total_sent
from jaxdist.train.optimizer import matrix_of

LeafFilter = Callable[[Leaf], bool]


@dataclass(frozen=True)
class Message(Transfer):
    """One collective of a step, in the field's words.

    axes: mesh axes, all of them live. count: how often a step runs it, on the stage that runs it most. full_bytes:
    bytes of the whole (gathered, or summed) buffer, once. by_stage: the count on each stage, where they differ.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    full_bytes: int
    by_stage: tuple[int, ...] | None = None

    @classmethod
    def of(cls, purpose: str, kind: str, axes: tuple[str, ...], count: Count, full_bytes: int) -> "Message":
        """count: one for all stages, or of each."""
        most, by_stage = on_stages(count)
        return cls(purpose, kind, axes, most, full_bytes, by_stage)


class Row(NamedTuple):
    """Messages of one purpose, kind and axes: how many a step sends, and the bytes one device sends in them, on the
    stage that sends most of them.
    """

    purpose: str
    kind: str
    axes: str
    count: int
    sent_bytes: int


def predicted(config: RunConfig, layout: Layout) -> list[Message]:
    """Every message of one step of `config`, whose layout is `layout`.

    `grad_sync` changes the number of messages of weights and gradients. It changes their bytes in one case: a ZeRO-3
    backward gathers every group that holds a matrix, and with the matrix whatever else is in the group.
    Raises: ConfigError for the layout of another strategy.
    """
    if layout != make_layout(config.model, config.parallel, config.part_layers):
        raise ConfigError(
            f"a layout of another strategy, on {layout.mesh}, for a run on {config.parallel.mesh}",
            "the messages are of leaves as the run places them, so both must have the same ParallelConfig",
            "Use make_layout(config.model, config.parallel, config.part_layers)",
        )
    step = _Step(config, layout)
    messages = [*step.scalars(), *step.activations(), *step.stages(), *step.spread(), *step.weights()]
    messages += [*step.reductions(), *step.update()]
    return [message for message in messages if message.count and message.axes]


def table(messages: Sequence[Message], mesh: MeshShape) -> list[Row]:
    """The messages added up by purpose, kind and axes, in the order given."""
    alike: dict[tuple, list[Message]] = {}
    for message in messages:
        alike.setdefault((message.purpose, message.kind, message.axes), []).append(message)
    return [
        Row(purpose, kind, ", ".join(axes), most_sent(found), total_sent(found, mesh))
        for (purpose, kind, axes), found in alike.items()
    ]


def most_sent(messages: Sequence[Message]) -> int:
    """How many messages one device sends, on the stage that sends most of them."""
    return int(np.max(sum(np.asarray(m.count if m.by_stage is None else m.by_stage) for m in messages)))


@cache
def runs_of(schedule: Schedule, num_layers: tuple[int, ...]) -> dict:
    """How often each loop of the pipeline's executor runs in one pass, on each stage."""
    return {
        name: np.array([int(each * schedule.num_ticks) for each in stages])
        for name, stages in iterations(schedule, num_layers).items()
    }


class Again(IntEnum):
    """How a layer's forward runs again in backward: not at all, alone, or in a loop over several."""

    NONE = 0
    ALONE = 1
    TOGETHER = 2


class _Step:
    """The messages of one step. `runs`: how often a step does each thing, by the names of the executor's loops."""

    def __init__(self, config: RunConfig, layout: Layout):
        self.config, self.layout, self.parallel, self.mesh = config, layout, config.parallel, config.parallel.mesh
        self.item, self.reduced, self.master = (
            jnp.dtype(name).itemsize
            for name in (config.precision.dtype, config.precision.reduction_dtype, config.precision.master_dtype)
        )
        self.pipelined = self.mesh.pp > 1
        passes, layers = self.parallel.accumulate, config.model.num_blocks
        if self.pipelined:
            once = runs_of(self.parallel.pipeline, config.part_layers)
        else:
            once = {Loop.EMBED: 1, Loop.HEAD: 1, Loop.LAYERS_FORWARD: layers}
        self.runs = {name: passes * times for name, times in once.items()}
        self.outer = {name: part for name, part in layout.leaves.items() if name != STACKED}
        self.layer_leaves = jax.tree.leaves(layout.layer_leaves)
        self.parts = traffic_of(OneRank.of(config))

    @property
    def layers_again(self) -> Again:
        if not self.parallel.recomputes:
            return Again.NONE
        return Again.ALONE if self.parallel.remat_every == 1 else Again.TOGETHER

    def live(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if self.mesh.size(axis) > 1)

    # ---- one number a message ----

    def scalars(self) -> list[Message]:
        """Token count, loss, and for each set of axes that leaves are sharded on a part of the gradient norms."""
        counter = 8 if self.config.precision.dtype == "float64" else 4  # JAX's default integer, with and without x64
        norms: dict[tuple[str, ...], set[str]] = {}
        for leaf in jax.tree.leaves(self.layout.trained.leaves):
            if leaf.param.update != "gradient":
                continue
            norms.setdefault(leaf.storage_axes, set()).add(leaf.group)
        return [
            Message.of("token count", "all_reduce", self.live(*TOKEN_AXES), 1, counter),
            Message.of("sum of the loss", "all_reduce", self.live(*WORK_AXES), 1, self.master),
            *(
                Message.of("gradient norm", "all_reduce", axes, 1, len(found) * self.master)
                for axes, found in norms.items()
            ),
        ]

    # ---- activations ----

    def activations(self) -> list[Message]:
        """What the parts of the model send over tp, as often as each runs."""
        again, layers, parts = self.layers_again, self.runs[Loop.LAYERS_FORWARD], self.parts
        # A loop over several layers that run again computes the last one's result too.
        sent_again = {Again.NONE: (), Again.ALONE: parts.layer.recomputed, Again.TOGETHER: parts.layer.forward}[again]
        found = (
            ("embedding, forward", self.runs[Loop.EMBED], parts.embed.forward),
            ("layers, forward", layers, parts.layer.alone if again else parts.layer.forward),
            ("loss, forward", self.runs[Loop.HEAD], parts.loss.forward),
            ("loss, backward", self.runs[Loop.HEAD], parts.loss.backward),
            ("layers, recomputed", layers, sent_again),
            ("layers, backward", layers, parts.layer.backward),
            ("embedding, backward", self.runs[Loop.EMBED], parts.embed.backward),
        )
        return [
            Message.of(purpose, each.kind, each.axes, times * each.count, each.full_bytes)
            for purpose, times, sent in found
            for each in sent
        ]

    def stages(self) -> list[Message]:
        """A micro-batch's activations (or their gradient), of the stage that sends most."""
        ways = {"to the next": FROM_BEFORE, "to the one before": FROM_AFTER}
        return [
            Message.of(f"between stages, {name}", "permute", self.live("pp"), times, self.parts.x_bytes)
            for name, way in ways.items()
            for times in [sum(count for ran, count in self.runs.items() if ran.startswith(way))]
        ]

    # ---- weights and gradients ----

    def spread(self) -> list[Message]:
        """A table that both ends of a pipeline use: its parts to them, its gradient back."""
        stages, messages = np.arange(self.mesh.pp), []
        for leaf in (leaf for leaf in jax.tree.leaves(self.outer) if leaf.consumer_stages):
            size, an_end = math.prod(leaf.compute_local), np.isin(stages, leaf.consumer_stages)
            to_ends, back = len(leaf.consumer_stages) - an_end, (self.mesh.pp - 1) * an_end * (not leaf.param.frozen)
            messages += [
                Message.of("weights to the ends", "permute", ("pp",), to_ends, size * self.item),
                Message.of("gradients from the ends", "permute", ("pp",), back, size * self.reduced),
            ]
        return messages

    def weights(self) -> list[Message]:
        """ZeRO-3's gathers where weights are used, ZeRO-2 and 3's scatters where their gradients are made."""
        if not self.layout.grads_sharded:
            return []
        layers, parallel, messages = self.runs[Loop.LAYERS_FORWARD], self.parallel, []
        if self.layout.params_sharded:
            for name, only in self.layer_gathers():
                times = layers - parallel.accumulate if parallel.overlap_layers and name == "backward" else layers
                messages += self.gathers(f"weights of a layer, {name}", self.layer_leaves, times, only)
        messages += self.scatters("gradients of a layer", self.layer_leaves, layers)
        if self.pipelined:  # once a step
            outer = jax.tree.leaves(self.outer)
            if self.layout.params_sharded:
                messages += self.gathers("weights outside the layers", outer, 1)
            return messages + self.scatters("gradients outside the layers", outer, 1)
        if self.layout.params_sharded and parallel.reshard_after_forward:
            embed, head = (
                [leaf for leaf in jax.tree.leaves(self.outer) if user in leaf.used_in] for user in ("embed", "loss")
            )
            messages += self.gathers("weights of the embedding", embed, self.runs[Loop.EMBED])
            messages += self.gathers("weights of the head", head, self.runs[Loop.HEAD])
        elif self.layout.params_sharded:
            messages += self.gathers("weights outside the layers", jax.tree.leaves(self.outer), parallel.accumulate)
        # Together: once a micro-batch.
        outer = jax.tree.leaves(self.outer)
        return messages + self.scatters("gradients outside the layers", outer, parallel.accumulate)

    def layer_gathers(self) -> list[tuple[str, LeafFilter]]:
        """When ZeRO-3 gathers a layer's weights, and which leaves are asked for then.

        The pipeline's division of a layer takes a gather for one operation, so B gathers the whole layer, for its
        recomputation too where that is of the one layer. What W needs of it (a norm's scale and bias, say) B hands over
        where it is no larger than the activation. With overlap each layer is gathered whole both times, but the last,
        whose backward comes next.
        """
        together = self.layers_again == Again.TOGETHER
        weights: list[tuple[str, LeafFilter]] = [("forward", every_leaf)]
        if self.parallel.overlap_layers:
            return [*weights, ("backward", every_leaf)]
        if self.pipelined:
            read = [leaf for leaf in self.layer_leaves if _in_layer(leaf) in self.parts.read_by_w]
            again = sum(math.prod(leaf.compute_local) * self.item for leaf in read) > self.parts.x_bytes
            return [
                *weights,
                *[("recomputed", every_leaf)] * together,
                ("B", every_leaf),
                *[("W", every_leaf)] * again,
            ]
        if self.layers_again:
            weights.append(("recomputed", every_leaf if together else self.is_read_again))
        if self.parallel.reshard_after_forward and self.layers_again != Again.ALONE:
            weights.append(("backward", is_matrix))
        return weights

    def is_read_again(self, leaf: Leaf) -> bool:
        """Whether running the layer again for its gradients alone needs the leaf: a last bias is only added to the
        result, which nothing in backward asks for."""
        return _in_layer(leaf) in self.parts.layer.read_again

    def reductions(self) -> list[Message]:
        """After backward: the sums of `jaxdist.parallel.reduce`, and the new parameters of ZeRO-1 and 2."""
        leaves, layout, messages = jax.tree.leaves(self.layout.trained.leaves), self.layout, []
        reduced = [(leaves, 1)]
        if self.parallel.overlap_layers:  # a layer at a time, while backward runs
            reduced = [(jax.tree.leaves(self.outer), 1), (self.layer_leaves, self.config.model.num_blocks)]
        for part, times in reduced:
            part = [leaf for leaf in part if not leaf.param.frozen]
            if layout.sharded and not layout.grads_sharded:
                messages += self.scatters("gradients", part, times)
            owing = [leaf for leaf in part if leaf.shard_reduce_axes]
            sizes = [math.prod(leaf.storage_local) * self.reduced for leaf in owing]
            for members in group(
                owing, sizes, layout.bucket_bytes, lambda leaf: (leaf.shard_reduce_axes, leaf.storage_axes)
            ):
                axes, size = owing[members[0]].shard_reduce_axes, sum(sizes[i] for i in members)
                messages.append(Message.of(owed_for(axes), "all_reduce", axes, times, size))
        if layout.sharded and not layout.params_sharded:
            messages += self.gathers("parameters after the update", leaves, 1)
        return messages

    def update(self) -> list[Message]:
        """What the optimizer sends of its own: Muon, for whole matrices."""
        if self.config.optimizer.name != "muon":
            return []
        splits = filter(None, map(split_of, jax.tree.leaves(self.layout.trained.leaves)))
        return [
            Message.of(
                "matrices for the update", each.kind, split.axes[each.dim], each.count, each.elements * self.master
            )
            for _, split in muon.joined([*splits])
            for each in muon.messages(split.local, split.ranks)
        ]

    def gathers(
        self, purpose: str, leaves: Sequence[Leaf], times: int, only: LeafFilter | None = None
    ) -> list[Message]:
        return self.over_shards(purpose, "all_gather", leaves, times, self.item, only or every_leaf)

    def scatters(self, purpose: str, leaves: Sequence[Leaf], times: int) -> list[Message]:
        trained = [leaf for leaf in leaves if not leaf.param.frozen]
        return self.over_shards(purpose, "reduce_scatter", trained, times, self.reduced, every_leaf)

    def over_shards(self, purpose, kind, leaves, times, itemsize, only) -> list[Message]:
        """One message for each group with a only leaf in it; its bytes are those of all its leaves, padded."""
        sizes = {i: math.prod(leaves[i].storage_local) * leaves[i].num_shards * itemsize for i in sharded(leaves)}
        return [
            Message.of(purpose, kind, leaves[members[0]].zero_axes, times, sum(sizes[i] for i in members))
            for members in zero_groups(leaves, [*sizes.values()], self.layout.bucket_bytes)
            if any(only(leaves[i]) for i in members)
        ]


def split_of(leaf: Leaf) -> muon.Split | None:
    """How a leaf's matrices are split as it is stored; None where it has none."""
    if (matrix := matrix_of(leaf)) is None:
        return None
    return muon.Split.of(matrix, leaf.storage_local, lambda axes: math.prod(map(leaf.mesh.size, axes)))


def every_leaf(leaf: Leaf) -> bool:
    return True


def is_matrix(leaf: Leaf) -> bool:
    """Whether backward gathers it again: small leaves are kept."""
    return not leaf.small


def _in_layer(leaf: Leaf) -> str:
    """A leaf's path in its layer."""
    return leaf.name.removeprefix(f"{STACKED}.")


def owed_for(axes: tuple[str, ...]) -> str:
    """What an all-reduce of gradients over these axes is for."""
    if set(axes) & set(TOKEN_AXES):
        return "gradients"
    reasons = {"pp": "gradients of what every stage holds", "tp": "gradients of what saw a part of the sequence"}
    return "gradients of what every stage holds, a part of the sequence each" if len(axes) > 1 else reasons[axes[0]]
