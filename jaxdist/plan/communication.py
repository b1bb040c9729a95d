"""What a step of ours sends, in closed form: from the leaves, the settings and the schedule's table. Nothing is traced.

`predicted` says for every message what it is for; `tests/test_communication.py` holds it equal, to the byte and to the
message, to what `jaxdist.plan.trace` reads from the program. The papers' forms are in `jaxdist.plan.formulas`; where
ours differ from them stands in docs/plan.md.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist import model
from jaxdist.config import RunConfig
from jaxdist.layout import STACKED, Layout, Leaf
from jaxdist.mesh import DATA_AXES, MeshShape
from jaxdist.parallel.grouping import group
from jaxdist.parallel.pipeline import iterations
from jaxdist.parallel.schedules import Schedule
from jaxdist.plan.trace import ring_bytes

LAST_BIAS = f"{STACKED}.mlp.b_down"  # added last in a block, so nothing in backward asks for it


@dataclass(frozen=True)
class Message:
    """One collective of a step, in the field's words.

    axes: mesh axes, all of them live. count: how often a step runs it (under pp, on the stage that runs it most).
    full_bytes: bytes of the whole (gathered, or summed) buffer, once.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    count: int
    full_bytes: int

    def sent_bytes(self, mesh: MeshShape) -> int:
        """Bytes one device sends in a step, in a ring."""
        return ring_bytes(self.kind, self.axes, self.count * self.full_bytes, mesh)


class Row(NamedTuple):
    """Messages of one purpose, kind and axes: how many a step sends, and the bytes one device sends in them."""

    purpose: str
    kind: str
    axes: str
    count: int
    sent_bytes: int


def predicted(config: RunConfig, layout: Layout) -> list[Message]:
    """Every message of one step of `config`.

    The number of messages of weights and gradients depends on how `grad_sync` groups leaves, the bytes do not, but for
    one thing: backward fetches the ZeRO-3 groups that hold a matrix, and with it whatever else is in them.
    """
    step = _Step(config, layout)
    messages = [*step.scalars(), *step.tensor_parallel(), *step.fetches(), *step.stages(), *step.gradients()]
    return [message for message in messages if message.count and message.axes]


def table(messages: Sequence[Message], mesh: MeshShape) -> list[Row]:
    """The messages by purpose, kind and axes, in the order in which the step first sends them."""
    alike: dict[tuple, list[Message]] = {}
    for message in messages:
        alike.setdefault((message.purpose, message.kind, message.axes), []).append(message)
    return [
        Row(purpose, kind, ", ".join(axes), sum(m.count for m in found), sum(m.sent_bytes(mesh) for m in found))
        for (purpose, kind, axes), found in alike.items()
    ]


@cache
def runs_of(schedule: Schedule, num_layers: tuple[int, ...]) -> dict[str, int]:
    """How often each loop of the pipeline's executor runs in one pass, on the stage that runs it most."""
    return {name: int(each * schedule.num_ticks) for name, each in iterations(schedule, num_layers).items()}


class _Step:
    """The sizes that messages are made of. `runs`: how often a step does each thing, by the executor's names."""

    def __init__(self, config: RunConfig, layout: Layout):
        self.config, self.layout, self.parallel, self.mesh = config, layout, config.parallel, config.parallel.mesh
        self.item, self.reduced, self.master = (
            jnp.dtype(name).itemsize
            for name in (config.precision.dtype, config.precision.reduction_dtype, config.precision.master_dtype)
        )
        self.pipelined = self.mesh.pp > 1
        passes, layers = self.parallel.accumulate, config.model.num_layers
        if self.pipelined:
            once = runs_of(self.parallel.pipeline, config.part_layers)
        else:
            once = {"embed": 1, "head": 1, "from_before": 0, "from_after": 0, "layers_forward": layers}
        self.runs = {name: passes * times for name, times in once.items()}
        self.root = {name: part for name, part in layout.leaves.items() if name != STACKED}
        self.block = [leaf.layer() for leaf in jax.tree.leaves(layout.leaves[STACKED])]

        rows = config.batch_size // (self.mesh.replica * self.mesh.dp * passes * self.parallel.num_microbatches)
        self.positions = rows * config.model.seq_len
        self.activation = self.positions * config.model.width * self.item
        self.sequence_split = self.parallel.sp and self.mesh.tp > 1

    def live(self, *axes: str) -> tuple[str, ...]:
        return tuple(axis for axis in axes if getattr(self.mesh, axis) > 1)

    # ---- one number a message ----

    def scalars(self) -> list[Message]:
        """Token count, loss, and a part of the gradient norm for each set of axes that leaves are sharded on."""
        counter = 8 if self.config.precision.dtype == "float64" else 4  # JAX's default integer
        norms = dict.fromkeys(leaf.storage_axes for leaf in jax.tree.leaves(self.layout.leaves))
        return [
            Message("token count", "all_reduce", self.live(*DATA_AXES), 1, counter),
            Message("loss", "all_reduce", self.live("pp", *DATA_AXES), 1, self.master),
            *(Message("gradient norm", "all_reduce", axes, 1, self.master) for axes in norms),
        ]

    # ---- activations ----

    def tensor_parallel(self) -> list[Message]:
        """Where a block, the embedding and the head meet tp: `enter` and `leave`, forward, backward and recomputed."""
        layers = self.runs["layers_forward"]
        enters, leaves = self.recomputed_in_a_block()
        return [
            *self.meets("embedding, forward", self.runs["embed"], leaves=1),
            *self.meets("blocks, forward", layers, enters=2, leaves=2),
            *self.meets("head, forward", self.runs["head"], enters=1),
            Message("softmax", "all_reduce", self.live("tp"), self.runs["head"], self.positions * self.master),
            Message("softmax", "all_reduce", self.live("tp"), self.runs["head"], 2 * self.positions * self.master),
            *self.meets("head, backward", self.runs["head"], enters=1, backward=True),
            *self.meets("blocks, recomputed", layers, enters, leaves),
            *self.meets("blocks, backward", layers, enters=2, leaves=2, backward=True),
            *self.meets("embedding, backward", self.runs["embed"], leaves=1, backward=True),
        ]

    def meets(self, purpose: str, times: int, enters: int = 0, leaves: int = 0, backward: bool = False):
        """`enters` before column-parallel and `leaves` after row-parallel matmuls; each is the other's transpose."""
        if backward:
            enters, leaves = leaves, enters
        kinds = (("all_gather", enters), ("reduce_scatter", leaves)) if self.sequence_split else (("all_reduce", leaves),)
        return [Message(purpose, kind, self.live("tp"), times * each, self.activation) for kind, each in kinds]

    def recomputed_in_a_block(self) -> tuple[int, int]:
        """(enters, leaves) that run again. The second sum gives the next block's input, which one block alone has no
        use for: JAX drops it. The pipeline's executor, and a loop over several blocks, do not.
        """
        if not self.parallel.remat_every:
            return 0, 0
        return 2, 1 if self.parallel.remat_every == 1 and not self.pipelined else 2

    def stages(self) -> list[Message]:
        """A micro-batch's activations (or their gradient) from every stage, at each tick at which any receives."""
        size = self.activation // (self.mesh.tp if self.sequence_split else 1)
        return [
            Message(f"activations, {name}", "permute", self.live("pp"), self.runs[ticks], size)
            for name, ticks in (("to the next stage", "from_before"), ("to the stage before", "from_after"))
        ]

    # ---- weights and gradients ----

    def fetches(self) -> list[Message]:
        """ZeRO-3's gathers, where weights are used; and ZeRO-2 and 3's scatters, where their gradients are made."""
        if not self.layout.grads_scattered:
            return []
        layers, parallel = self.runs["layers_forward"], self.parallel
        scatter = self.scatters("gradients of a block", self.block, layers)
        if self.layout.params_stored and parallel.reshard_after_forward:
            embed, head = (
                jax.tree.leaves({name: self.root[name] for name in names})
                for names in (model.EMBED_PARTS, model.HEAD_PARTS)
            )
            messages = [
                *self.gathers("weights of the embedding", embed, self.runs["embed"]),
                *self.gathers("weights of the head, forward", head, self.runs["head"]),
                *self.gathers("weights of the head, backward", head, self.runs["head"], only=is_matrix),
                *self.scatters("gradients of the embedding", embed, self.runs["embed"]),
                *self.scatters("gradients of the head", head, self.runs["head"]),
            ]
        else:
            root = jax.tree.leaves(self.root)  # fetched whole: once a micro-batch, or once a pass of the pipeline
            messages = [
                *(self.gathers("weights outside the blocks", root, parallel.accumulate) * self.layout.params_stored),
                *self.scatters("gradients outside the blocks", root, parallel.accumulate),
            ]
        if self.layout.params_stored:
            for name, only in self.block_fetches():
                messages += self.gathers(f"weights of a block, {name}", self.block, layers, only)
        return messages + scatter

    def block_fetches(self) -> list[tuple[str, Callable[[Leaf], bool]]]:
        """When ZeRO-3 gathers a block's weights, and which of them: a group travels when one of its leaves is asked for.

        In a pipeline a fetch is one operation: whoever needs one weight gathers the block. Its W needs the last norms'
        scale and bias unless what they give was kept, which it is where a cast to 16 bits or a gather over tp follows.
        """
        every = self.parallel.remat_every
        fetches = [("forward", is_any)]
        if self.pipelined:
            fetches += [("recomputed", is_any)] * bool(every) + [("backward (B)", is_any)]
            return fetches + [("backward (W)", is_any)] * (self.item >= 4 and not self.sequence_split)
        if every:
            fetches.append(("recomputed", is_any if every > 1 else lambda leaf: leaf.name != LAST_BIAS))
        if self.parallel.reshard_after_forward and every != 1:
            fetches.append(("backward", is_matrix))
        return fetches

    def gradients(self) -> list[Message]:
        """What is left after backward: the gradient rule, and the updated parameters of ZeRO-1 and 2."""
        leaves, layout = jax.tree.leaves(self.layout.leaves), self.layout
        messages = []
        if layout.sharded and not layout.grads_scattered:
            messages += self.scatters("gradients", leaves, 1)
        # One all-reduce for each set of axes still owed.
        owing = [leaf for leaf in leaves if leaf.shard_reduce_axes]
        sizes = [math.prod(leaf.storage_local) * self.reduced for leaf in owing]
        for members in self.groups(owing, sizes, lambda leaf: (leaf.shard_reduce_axes, leaf.storage_axes)):
            axes, size = owing[members[0]].shard_reduce_axes, sum(sizes[i] for i in members)
            messages.append(Message(owed(axes, layout), "all_reduce", axes, 1, size))
        if layout.sharded and not layout.params_stored:
            messages += self.gathers("parameters after the update", leaves, 1)
        return messages

    def gathers(self, purpose: str, leaves: Sequence[Leaf], times: int, only=None) -> list[Message]:
        return self.over_dp(purpose, "all_gather", leaves, times, self.item, only)

    def scatters(self, purpose: str, leaves: Sequence[Leaf], times: int) -> list[Message]:
        return self.over_dp(purpose, "reduce_scatter", leaves, times, self.reduced, None)

    def over_dp(self, purpose, kind, leaves, times, itemsize, only) -> list[Message]:
        """One message a group that holds a leaf of which `only` is true, its bytes those of the padded leaves."""
        sizes = [math.prod(leaf.storage_local) * leaf.dp * itemsize for leaf in leaves]
        return [
            Message(purpose, kind, ("dp",), times, sum(sizes[i] for i in members))
            for members in self.groups(leaves, sizes, lambda leaf: leaf.spec_axes)
            if only is None or any(only(leaves[i]) for i in members)
        ]

    def groups(self, leaves: Sequence[Leaf], sizes: Sequence[int], key: Callable[[Leaf], Hashable]) -> list[list[int]]:
        return group(leaves, sizes, self.parallel, key)


def is_any(leaf: Leaf) -> bool:
    return True


def is_matrix(leaf: Leaf) -> bool:
    """Whether backward multiplies by the leaf: the matrices, which are also what decays."""
    return leaf.decay


def owed(axes: tuple[str, ...], layout: Layout) -> str:
    """Why gradients are summed over these axes."""
    if not set(axes) & set(DATA_AXES):
        return "gradients of what " + " and ".join(
            {"pp": "several stages use", "tp": "saw a part of the sequence"}[axis] for axis in axes
        )
    return "gradients, across replicas" if layout.sharded else "gradients"
