"""Run a pipeline schedule, any schedule: one `lax.scan` over its table, each stage doing its own action at each tick.

An action is F (forward of one micro-batch through one chunk of layers), B (its input gradient) or W (its weight
gradient), so a tick costs about one unit on every stage that has work, and nothing on one that is idle. What F leaves
for B and W, and B for W, waits in buffers that hold as many entries as the schedule ever has in flight, no more.

Each kind of action is a loop that runs as many times as the table says on this stage: once for each layer of the chunk,
or not at all. (A `lax.switch` over the kinds would be the plain way; XLA copies the buffers that its branches change,
where a loop updates them in place.) What such a loop computes depends on its index or its carry, or the compiler lifts
it out, to be run at every tick.

Dims: S stages, M micro-batches, C chunks a stage, L layers a chunk. Source: GPipe, arXiv 1811.06965; 1F1B and
interleaving, arXiv 2104.04473, section 2.2; the division of backward, arXiv 2401.10241, section 2.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.compat import type_of, varying_axes
from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline.schedules import Action, Schedule, validate
from jaxdist.parallel.pipeline.split_backward import SplitLayer, all_equations, pruned, split_layer

IDLE, FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT = range(4)
KINDS = {"F": FORWARD, "B": INPUT_GRADIENT, "W": WEIGHT_GRADIENT}
NOWHERE = -1
ARRIVALS = {"from_before": 1, "from_after": -1, "from_self": 0}  # where a message comes from -> shift of the permute


class Stages(NamedTuple):
    """A model as a pipeline sees it; each function works on local shards of one micro-batch.

    first(shared, micro) -> x, on the first part of the model. layer(weights, fixed, micro, x) -> x of the same shape
    and dtype. last(shared, x, micro) -> the micro-batch's summed loss, a scalar, on the last part.
    """

    first: Callable
    layer: Callable
    last: Callable


class Instructions(NamedTuple):
    """A schedule as the executor reads it: int32[ticks, S] each; a slot of -1 is nowhere.

    kind: 0 idle, 1 F, 2 B, 3 W. first, last: whether the chunk is the first or last part of the model. slot_in: where
    the action's input waits among the messages. slot_b, slot_w, slot_h: where it keeps (or finds) what F leaves until
    B, what F leaves until W, and what B hands to W. from_before, from_after, from_self: where to put the message that
    has come by the end of the tick from the stage before, the stage after, and this stage.
    """

    kind: Any
    microbatch: Any
    chunk: Any
    first: Any
    last: Any
    slot_in: Any
    slot_b: Any
    slot_w: Any
    slot_h: Any
    from_before: Any
    from_after: Any
    from_self: Any


@dataclass(frozen=True)
class Lowered:
    """Instructions and how many slots they need of each buffer (the most that any stage has in use at once)."""

    instructions: Instructions
    num_messages: int
    num_until_b: int
    num_until_w: int
    num_handed: int


def lower(schedule: Schedule, *, forward_only: bool = False) -> Lowered:
    """Give every activation, gradient and residual of a schedule a slot; no JAX.

    forward_only: the forward actions alone, in their order, each as soon as it can run.
    Raises: ConfigError where `validate` does.
    """
    validate(schedule)
    table = forwards(schedule) if forward_only else schedule.table
    shape, slots = (len(table), schedule.num_stages), Instructions._fields[5:]
    out = Instructions(
        **{name: np.full(shape, NOWHERE if name in slots else 0, np.int32) for name in Instructions._fields}
    )
    when = {(a.kind, a.microbatch, schedule.part(stage, a.chunk)): (tick, stage)
            for tick, row in enumerate(table) for stage, a in enumerate(row) if a is not None}  # fmt: skip
    messages, until_b, until_w, handed = ([Slots() for _ in range(schedule.num_stages)] for _ in range(4))
    final, sent = schedule.num_parts - 1, []

    for (kind, micro, part), (tick, stage) in sorted(when.items(), key=lambda item: item[1]):
        chunk = schedule.place(part)[1]
        for name, value in (("kind", KINDS[kind]), ("microbatch", micro), ("chunk", chunk),
                            ("first", part == 0), ("last", part == final)):  # fmt: skip
            getattr(out, name)[tick, stage] = value
        if kind == "F" and not forward_only:
            b_tick, w_tick = when["B", micro, part][0], when["W", micro, part][0]
            out.slot_b[tick, stage] = out.slot_b[b_tick, stage] = until_b[stage].take(tick, b_tick)
            slot = until_w[stage].take(tick, w_tick)
            for reader in (tick, b_tick, w_tick):
                out.slot_w[reader, stage] = slot
        if kind == "B":
            w_tick = when["W", micro, part][0]
            out.slot_h[tick, stage] = out.slot_h[w_tick, stage] = handed[stage].take(tick, w_tick)

        # Where the result is used next: F's by the next part, or the loss's gradient by the last part itself.
        target = {"F": ("F", micro, part + 1) if part < final else ("B", micro, part), "B": ("B", micro, part - 1)}
        if (use := when.get(target.get(kind))) is None:
            continue
        use_tick, receiver = use
        arrives = tick if receiver == stage else tick + schedule.hop - 1
        sent.append((arrives, use_tick, receiver, _arrival(stage, receiver, schedule.num_stages)))

    for arrives, use_tick, receiver, way in sorted(sent):
        slot = messages[receiver].take(arrives + 1, use_tick)
        out.slot_in[use_tick, receiver] = slot
        getattr(out, way)[arrives, receiver] = slot

    return Lowered(out, *(max(slots.count for slots in pool) for pool in (messages, until_b, until_w, handed)))


def forwards(schedule: Schedule) -> list[list[Action | None]]:
    """A table of the forward actions alone: every stage in its order, each action as soon as it can run."""
    table: list[list[Action | None]] = []
    free, done = [0] * schedule.num_stages, {}
    for stage, action in (entry for row in schedule.table for entry in enumerate(row)):
        if action is not None and action.kind == "F":
            part = schedule.part(stage, action.chunk)
            hop = 1 if part == 0 or schedule.place(part - 1)[0] == stage else schedule.hop
            tick = max(free[stage], done.get((action.microbatch, part - 1), -hop) + hop)
            free[stage], done[action.microbatch, part] = tick + 1, tick
            table += [[None] * schedule.num_stages for _ in range(tick + 1 - len(table))]
            table[tick][stage] = action
    return table


class Senders(NamedTuple):
    """Which stages send in one direction what arrives by the end of a tick: those of sets[which[tick] - 1], or none
    for 0."""

    sets: list[tuple[int, ...]]
    which: np.ndarray


def senders_of(instructions: Instructions, hop: int = 1) -> dict[str, Senders]:
    """By direction, of those in which any stage ever sends. With hop 2 all that ever send in it do so at every tick."""
    found = {}
    for name, shift in ARRIVALS.items():
        if shift and (getattr(instructions, name) != NOWHERE).any():
            sends = np.roll(getattr(instructions, name) != NOWHERE, -shift, axis=1)  # [ticks, S]
            rows = [tuple(np.flatnonzero(row).tolist()) for row in sends]
            sets = sorted(set(rows) - {()})
            if hop == 2:
                sets = [tuple(sorted(set().union(*sets)))]
                rows = sets * len(rows)
            found[name] = Senders(sets, np.array([sets.index(row) + 1 if row else 0 for row in rows], np.int32))
    return found


class Slots:
    """Slots of one buffer on one stage, taken in order of time: the lowest that is free."""

    def __init__(self):
        self.busy_until: list[int] = []

    @property
    def count(self) -> int:
        return len(self.busy_until)

    def take(self, start: int, end: int) -> int:
        """A slot for ticks `start` to `end`, both included."""
        for slot, busy in enumerate(self.busy_until):
            if busy < start:
                self.busy_until[slot] = end
                return slot
        self.busy_until.append(end)
        return self.count - 1


def _arrival(sender: int, receiver: int, num_stages: int) -> str:
    """Where a message comes from, as its receiver sees it: consecutive parts are on one stage or on neighbours."""
    distance = (receiver - sender) % num_stages
    assert distance in (0, 1, num_stages - 1), (sender, receiver)
    return "from_self" if distance == 0 else "from_before" if distance == 1 else "from_after"


# Inside shard_map.


def pipeline_gradients(
    stages: Stages,
    schedule: Schedule,
    shared,
    layers,
    micros,
    *,
    fixed=None,
    num_layers: Sequence[int] | None = None,
    seed: jax.Array | float = 1.0,
    recompute_every: int = 0,
    dtype=None,
    axis: str = "pp",
) -> tuple[jax.Array, Any, Any]:
    """Loss and gradients of a model whose layers are divided over `axis`, for all micro-batches of a step.

    Layout: shared equal on all stages; layers[(C L)_axis, ...]: each stage's chunks one after the other; fixed (not
    differentiated) like layers; micros[M, ...] equal on all stages -> loss {U_axis}, nonzero on one stage alone;
    d_shared {U_axis}; d_layers[(C L)_axis, ...]. Sums over other axes are owed as the caller's types say: cast shared
    and layers to varying over the axes that split the batch, and reduce once afterwards.
    Sends: one micro-batch's activations to another stage wherever the model goes on there, and their gradient back;
    with a schedule of hop 2 as much at every tick, while the stages compute, both ways where both are ever used.
    Args:
        num_layers: layers of each part of the model, in model order, where some have fewer than L; the rows beyond
            them are padding: never read, and their gradient is 0.
        seed: the gradient is that of seed times the summed loss.
        recompute_every: 0 keeps what backward needs; K keeps the input of every K layers and runs them again in B.
        dtype: in which gradients are summed over micro-batches; None: that of the weights.
    Returns: (loss, summed in the dtype `last` gives it, d_shared, d_layers).
    Raises: ConfigError for an invalid schedule, one for another number of stages, chunks or micro-batches.
    """
    if not isinstance(recompute_every, int) or recompute_every < 0:
        raise ConfigError(f"recompute_every={recompute_every}", "it is a number of layers, or 0", "Use 0, 1, 2, ...")
    run = _Runner.make(stages, schedule, shared, layers, micros, fixed, num_layers, recompute_every, axis)
    lowered = lower(schedule)
    state = run.scan(lowered.instructions, partial(run.act, jnp.asarray(seed)), run.initial(lowered, dtype))
    return state.loss, state.d_shared, state.d_layers


def pipeline_loss(
    stages: Stages, schedule: Schedule, shared, layers, micros, *, fixed=None, num_layers=None, axis: str = "pp"
) -> jax.Array:
    """The summed loss alone, by the forward actions of `schedule`; arguments and layout of `pipeline_gradients`."""
    run = _Runner.make(stages, schedule, shared, layers, micros, fixed, num_layers, None, axis)
    lowered = lower(schedule, forward_only=True)
    return run.scan(lowered.instructions, run.act_forward, run.initial(lowered, None)).loss


def pipeline(stage_fn: Callable, loss_fn: Callable, schedule: Schedule, axis: str = "pp") -> Callable:
    """The plainest pipeline: any `stage_fn(params, x) -> x`, for the body of a `jax.shard_map`.

    Gives gradients(params, inputs, targets) -> (loss, d_params), of the sum over micro-batches of
    `loss_fn(y, target)`.

    Layout: params[(C L)_axis, ...]: a row for each layer (or whole chunk, with L = 1) this stage holds, through which
    `stage_fn` takes x one after the other; inputs[M, ...], targets[M, ...] equal on all stages -> loss, equal on all
    stages; d_params[(C L)_axis, ...].
    """
    stages = Stages(
        first=lambda _, micro: micro[0],
        layer=lambda params, fixed, micro, x: stage_fn(params, x),
        last=lambda _, y, micro: loss_fn(y, micro[1]),
    )

    def gradients(params, inputs, targets):
        loss, _, d_params = pipeline_gradients(stages, schedule, (), params, (inputs, targets), axis=axis)
        return comm.all_reduce(loss, axis), d_params

    return gradients


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["length", "shape"])
@dataclass(frozen=True)
class Pool:
    """Values of one shape, a row for each slot and layer: rows[slots * length, elements].

    Each value is laid out flat. With dims of its own, a GPU compiler gives a buffer the layout that one of its readers
    likes (time first, for a reduce-scatter) and transposes the whole of it for the others, at every tick. And slots and
    layers are one dim: with one layer a chunk, XLA would see that a load does not depend on the loop's index, and would
    lift it out of the loop, to be run at every tick on every stage.
    """

    rows: jax.Array
    length: int
    shape: tuple[int, ...]


class _State(NamedTuple):
    """The scan's carry: messages[slots, ...], lists of pools, the sums so far; with hop 2 also the last tick's message,
    which travels during the next."""

    messages: jax.Array
    leaving: jax.Array | None
    until_b: list
    until_w: list
    handed: list
    d_shared: Any
    d_layers: Any
    loss: jax.Array


@dataclass(frozen=True)
class _Runner:
    """One pipeline, its functions traced once. `recompute_every` is None where there is no backward at all."""

    stages: Stages
    shared: Any
    layers: Any
    fixed: Any
    micros: Any
    split: SplitLayer | None
    x: Any
    loss: Any
    depth: int
    counts: jax.Array
    recompute_every: int | None
    hop: int
    axis: str

    @classmethod
    def make(cls, given, schedule, shared, layers, micros, fixed, num_layers, recompute_every, axis):
        depth = check_sizes(schedule, shared, layers, fixed, micros, num_layers, axis)
        # What a stage's own loops read is typed varying over the axis first, as their trip counts are.
        shared, layers, fixed, micros = comm.varying((shared, layers, fixed, micros), axis)
        num_layers = [depth] * schedule.num_parts if num_layers is None else num_layers
        row, micro = (jax.tree.map(lambda x: _without_leading(type_of(x)), tree) for tree in ((layers, fixed), micros))
        shared_type = jax.tree.map(type_of, shared)
        # x goes from layer to layer as one type, so it varies over every axis over which any of them makes it vary.
        x = _type_of("first", given.first, shared_type, micro)
        wide = sorted(varying_axes(x) | varying_axes(_type_of("layer", given.layer, *row, micro, x)) | {axis})
        stages = Stages(
            first=lambda shared, micro: comm.varying(given.first(shared, micro), wide),
            layer=lambda *args: comm.varying(given.layer(*args), wide),
            last=given.last,
        )
        x = _type_of("first", stages.first, shared_type, micro)
        loss = _type_of("last", stages.last, shared_type, x, micro)
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.inexact):
            raise ConfigError(
                f"a loss of type {loss.str_short()}", "its gradient is taken, and it is one number", "Sum it"
            )
        return cls(
            stages=stages,
            shared=shared,
            layers=layers,
            fixed=fixed,
            micros=micros,
            split=None if recompute_every is None else split_layer(stages.layer, *row, micro, x),
            x=x,
            loss=loss,
            depth=depth,
            counts=counts_of(schedule, num_layers, axis),
            recompute_every=recompute_every,
            hop=schedule.hop,
            axis=axis,
        )

    def initial(self, lowered: Lowered, dtype) -> _State:
        """Empty buffers and zero sums. Each buffer is made by a function of that name, which stays in the program."""
        until_b, until_w, handed, d_shared, d_layers = [], [], [], (), ()
        if self.split is not None:
            split, every = self.split, self.recompute_every
            if every:
                until_b = named("until_b", self.pool, lowered.num_until_b, [self.x], -(-self.depth // every))
                handed = named("handed", self.pool, lowered.num_handed, (*split.handed, *split.until_w))
            else:
                until_b = named("until_b", self.pool, lowered.num_until_b, split.until_b)
                until_w = named("until_w", self.pool, lowered.num_until_w, split.until_w)
                handed = named("handed", self.pool, lowered.num_handed, split.handed)
            d_shared, d_layers = jax.tree.map(lambda w: self.zeros(type_of(w), dtype=dtype), (self.shared, self.layers))
        messages = named("messages", self.zeros, self.x, (max(lowered.num_messages, 1),))
        leaving = self.zeros(self.x) if self.hop == 2 else None
        return _State(messages, leaving, until_b, until_w, handed, d_shared, d_layers, self.zeros(self.loss))

    def pool(self, num_slots: int, types: Sequence, length: int | None = None) -> list[Pool]:
        """An empty pool for each type."""
        length = self.depth if length is None else length

        def empty(t):
            flat = t.update(shape=(math.prod(t.shape),))
            return Pool(self.zeros(flat, (num_slots * length,)), length, t.shape)

        return [empty(t) for t in types]

    def zeros(self, like, leading: tuple[int, ...] = (), dtype=None) -> jax.Array:
        """Zeros of a type, with leading dims, varying over the pipeline's axis as well."""
        zeros = jnp.zeros((*leading, *like.shape), dtype or like.dtype)
        return comm.varying(zeros, sorted(varying_axes(like) | {self.axis}))

    def scan(self, instructions: Instructions, act: Callable, state: _State) -> _State:
        """Every tick: act, send where a neighbour waits for it, put away what came.

        With hop 2 the message of the last tick travels meanwhile. It goes at every tick, whatever it is: inside a
        branch of a conditional no compiler would let it travel beside the action.
        """
        senders = senders_of(instructions, self.hop)
        used = [name for name in ARRIVALS if (getattr(instructions, name) != NOWHERE).any()]

        def tick(state, rows):
            row, which = rows
            mine = jax.tree.map(lambda column: comm.varying(column, self.axis)[comm.rank(self.axis)], row)

            def exchange(message):
                return {name: self.send(name, found.sets, which[name], message) for name, found in senders.items()}

            arrived = None if self.hop == 1 else exchange(state.leaving)
            state, message = act(state, mine)
            if arrived is None:
                arrived = exchange(message)
            else:  # Or a compiler puts away one of the two at once, and waits for it before it computes.
                arrived, message = lax.optimization_barrier((arrived, message))
            arrived["from_self"] = message
            messages = state.messages
            for name in used:
                messages = put(messages, getattr(mine, name), arrived[name])
            return state._replace(messages=messages, leaving=None if self.hop == 1 else message), None

        which = {name: jnp.asarray(found.which) for name, found in senders.items()}
        return lax.scan(tick, state, (jax.tree.map(jnp.asarray, instructions), which))[0]

    def send(self, name: str, sets: list[tuple[int, ...]], which, message):
        """What arrives from the neighbour, if it is of the set that sends. All stages take the same branch."""

        def branch(index: int):
            send = partial(comm.permute, axis=self.axis, shift=ARRIVALS[name], senders=sets[index])
            return lambda message: named(sending(name, index), send, message)

        if self.hop == 2:
            return branch(0)(message)
        return lax.switch(which, [lambda message: message, *map(branch, range(len(sets)))], message)

    # A tick: (state, row) -> (state, message). The value on its way is loaded, changed by the loops of the one action
    # this stage has, and sent.

    def act(self, seed: jax.Array, state: _State, row: Instructions):
        micro, value = pick(self.micros, row.microbatch), pick(state.messages, jnp.maximum(row.slot_in, 0))
        value = self.embed(row, value)
        value, state = (self.forward_inputs if self.recompute_every else self.forward)(row, micro, value, state)
        value, state = self.head(seed, row, micro, value, state)
        value, state = (self.backward_again if self.recompute_every else self.backward)(row, micro, value, state)
        value, state = self.embed_gradient(row, micro, value, state)
        return self.weight_gradient(row, state), value

    def act_forward(self, state: _State, row: Instructions):
        micro, value = pick(self.micros, row.microbatch), pick(state.messages, jnp.maximum(row.slot_in, 0))
        value = self.embed(row, value)
        value = self.for_layers(
            "layers_forward",
            row,
            FORWARD,
            lambda x, layer: self.stages.layer(*self.weights(row, layer), micro, x),
            value,
        )
        loss = self.once(
            "head",
            (row.kind == FORWARD) & (row.last == 1),
            lambda loss: loss + self.stages.last(self.shared, value, micro),
            state.loss,
        )
        return state._replace(loss=loss), value

    def embed(self, row, value):
        """The micro-batch is picked at the loop's index: nothing else in the loop changes, and XLA would lift all of
        it out, collectives too, to be run at every tick on every stage."""

        def body(_, index):
            return self.stages.first(self.shared, pick(self.micros, row.microbatch + index))

        at_work = (row.kind == FORWARD) & (row.first == 1)
        return self.loop("embed", at_work.astype(jnp.int32), body, value)

    def forward(self, row, micro, value, state: _State):
        """F of every layer, keeping what backward needs."""

        def body(carry, layer):
            x, until_b, until_w = carry
            x, kept_b, kept_w = self.split.forward(*self.weights(row, layer), micro, x)
            return x, store(until_b, row.slot_b, layer, kept_b), store(until_w, row.slot_w, layer, kept_w)

        carry = (value, state.until_b, state.until_w)
        value, until_b, until_w = self.for_layers("layers_forward", row, FORWARD, body, carry)
        return value, state._replace(until_b=until_b, until_w=until_w)

    def forward_inputs(self, row, micro, value, state: _State):
        """F of every layer, keeping the input of every group of layers."""

        def body(carry, group):
            x, until_b = carry
            until_b = store(until_b, row.slot_b, group, [x])
            first, size = self.members(row, group)

            def layer_of_group(x, index):
                return self.stages.layer(*self.weights(row, first + index), micro, x)

            return self.loop("layers_forward", size, layer_of_group, x), until_b

        carry = (value, state.until_b)
        value, until_b = self.loop("groups_forward", self.num_groups(row, FORWARD), body, carry)
        return value, state._replace(until_b=until_b)

    def head(self, seed, row, micro, value, state: _State):
        """The loss and, at once, its gradient: logits are too large to keep until B."""

        def body(carry):
            d_shared, loss, y = carry
            here, pull = jax.vjp(lambda shared, y: self.stages.last(shared, y, micro), self.shared, y)
            d_here, dy = pull(comm.varying_like(seed.astype(here.dtype), here))
            return add(d_shared, d_here), loss + here, dy

        at_work = (row.kind == FORWARD) & (row.last == 1)
        d_shared, loss, value = self.once("head", at_work, body, (state.d_shared, state.loss, value))
        return value, state._replace(d_shared=d_shared, loss=loss)

    def backward(self, row, micro, value, state: _State):
        """B of every layer, from what F kept."""

        def body(carry, layer):
            dx, handed = carry
            kept = load(state.until_b, row.slot_b, layer), load(state.until_w, row.slot_w, layer)
            dx, for_w = self.split.input_gradient(*self.weights(row, layer), *kept, dx)
            return dx, store(handed, row.slot_h, layer, for_w)

        carry = (value, state.handed)
        value, handed = self.for_layers("layers_input_gradient", row, INPUT_GRADIENT, body, carry, reverse=True)
        return value, state._replace(handed=handed)

    def backward_again(self, row, micro, value, state: _State):
        """B of every group of layers: forward again from the group's input, then backward through it.

        Of a single layer, what only its result needs is left out, and its weights are fetched once for both. A loop
        over several layers computes every result and keeps no layer's weights.
        """
        if self.recompute_every == 1:
            return self.backward_again_alone(row, micro, value, state)
        split, every = self.split, self.recompute_every

        def body(carry, group):
            first, size = self.members(row, group)

            def forward(carry, index):
                x, kept_b, kept_w = carry
                x, new_b, new_w = split.forward(*self.weights(row, first + index), micro, x)
                return x, store(kept_b, 0, index, new_b), store(kept_w, 0, index, new_w)

            def backward(carry, index):
                dx, handed = carry
                kept = load(kept_b, 0, index), load(kept_w, 0, index)
                dx, for_w = split.input_gradient(*self.weights(row, first + index), *kept, dx)
                return dx, store(handed, row.slot_h, first + index, [*for_w, *kept[1]])

            [x] = load(state.until_b, row.slot_b, group)
            start = (x, self.pool(1, split.until_b, every), self.pool(1, split.until_w, every))
            _, kept_b, kept_w = self.loop("layers_again", size, forward, start)
            return self.loop("layers_input_gradient", size, backward, carry, reverse=True)

        num_groups = self.num_groups(row, INPUT_GRADIENT)
        value, handed = self.loop("groups_backward", num_groups, body, (value, state.handed), reverse=True)
        return value, state._replace(handed=handed)

    def backward_again_alone(self, row, micro, value, state: _State):
        """B of every layer, each from its own input."""

        def body(carry, layer):
            dx, handed = carry
            [x] = load(state.until_b, row.slot_b, layer)
            dx, for_w, kept_w = self.split.input_gradient_again(*self.weights(row, layer), micro, x, dx)
            return dx, store(handed, row.slot_h, layer, [*for_w, *kept_w])

        carry = (value, state.handed)
        value, handed = self.for_layers("layers_input_gradient", row, INPUT_GRADIENT, body, carry, reverse=True)
        return value, state._replace(handed=handed)

    def embed_gradient(self, row, micro, value, state: _State):
        def gradient(shared, micro, dx):
            return jax.vjp(lambda shared: self.stages.first(shared, micro), shared)[1](dx)[0]

        def body(carry):
            d_shared, dx = carry  # dx ends here; carried and changed, so that a gather of it stays in the loop
            return add(d_shared, pruned(gradient, self.shared, micro, dx)), jnp.zeros_like(dx)

        at_work = (row.kind == INPUT_GRADIENT) & (row.first == 1)
        d_shared, value = self.once("embed_gradient", at_work, body, (state.d_shared, value))
        return value, state._replace(d_shared=d_shared)

    def weight_gradient(self, row, state: _State) -> _State:
        """W of every layer, added to the sums."""
        num_handed = len(self.split.handed)

        def body(d_layers, layer):
            for_w = load(state.handed, row.slot_h, layer)
            kept = for_w[num_handed:] if self.recompute_every else load(state.until_w, row.slot_w, layer)
            dw = self.split.weight_gradient(*self.weights(row, layer), kept, for_w[:num_handed])
            at = row.chunk * self.depth + layer
            total = add(pick(d_layers, at), dw)
            return jax.tree.map(lambda sums, x: lax.dynamic_update_index_in_dim(sums, x, at, 0), d_layers, total)

        d_layers = self.for_layers("layers_weight_gradient", row, WEIGHT_GRADIENT, body, state.d_layers)
        return state._replace(d_layers=d_layers)

    # Loops.

    def weights(self, row: Instructions, layer):
        """Weights and fixed values of one layer of the action's chunk."""
        return pick((self.layers, self.fixed), row.chunk * self.depth + layer)

    def num_groups(self, row: Instructions, kind: int):
        """Groups of layers that are recomputed together; 0 where this stage does something else."""
        num_groups = (self.counts[row.chunk] + self.recompute_every - 1) // self.recompute_every
        return jnp.where(row.kind == kind, num_groups, 0)

    def members(self, row: Instructions, group):
        """(first layer, number of layers) of a group."""
        first = group * self.recompute_every
        return first, jnp.minimum(self.recompute_every, self.counts[row.chunk] - first)

    def for_layers(self, name: str, row: Instructions, kind: int, body: Callable, carry, reverse: bool = False):
        """carry = body(carry, layer) for every layer of the action's chunk, where the action is of this kind."""
        return self.loop(name, jnp.where(row.kind == kind, self.counts[row.chunk], 0), body, carry, reverse)

    def once(self, name: str, at_work, body: Callable, carry):
        """carry = body(carry) where this stage has that to do."""
        return self.loop(name, at_work.astype(jnp.int32), lambda carry, _: body(carry), carry)

    def loop(self, name: str, times, body: Callable, carry, reverse: bool = False):
        """carry = body(carry, index) for every index below `times`, which differs from stage to stage.

        The name stays in the program: `jaxdist.plan.proof.trace` finds there how often the loop runs.
        """

        def step(state):
            index, carry = state
            new = body(carry, times - 1 - index if reverse else index)
            return index + 1, comm.varying_like(new, carry)

        start = comm.varying(jnp.int32(0), self.axis)
        return named(name, lax.while_loop, lambda state: state[0] < times, step, (start, carry))[1]


BUFFERS = ("messages", "until_b", "until_w", "handed")


def sending(name: str, index: int) -> str:
    """The name of the function that sends in one direction, of the set of senders `index`."""
    return f"{name}_{index}"


def iterations(
    schedule: Schedule, num_layers: Sequence[int], *, forward_only: bool = False
) -> dict[str, tuple[Fraction, ...]]:
    """How often each named function of the executor runs on each stage, a tick on average.

    Of the messages, how often each set of senders sends that the stage is in.
    """
    instructions = lower(schedule, forward_only=forward_only).instructions
    senders, num_ticks = senders_of(instructions, schedule.hop), len(instructions.kind)
    stages = range(schedule.num_stages)

    def a_tick(counts: Iterable[int]) -> tuple[Fraction, ...]:
        return tuple(Fraction(int(count), num_ticks) for count in counts)

    def at(part: int) -> tuple[Fraction, ...]:
        return a_tick(schedule.num_microbatches * (schedule.place(part)[0] == stage) for stage in stages)

    layers = a_tick(
        schedule.num_microbatches * sum(num_layers[schedule.part(stage, chunk)] for chunk in range(schedule.num_chunks))
        for stage in stages
    )
    messages = {
        sending(name, index): a_tick((found.which == index + 1).sum() * (stage in members) for stage in stages)
        for name, found in senders.items()
        for index, members in enumerate(found.sets)
    }
    every_layer = ("layers_forward", "layers_again", "layers_input_gradient", "layers_weight_gradient")
    ends = {"embed": at(0), "embed_gradient": at(0), "head": at(schedule.num_parts - 1)}
    return messages | dict.fromkeys(every_layer, layers) | ends


def check_sizes(schedule: Schedule, shared, layers, fixed, micros, num_layers, axis: str) -> int:
    """Rows of a chunk. Raises: ConfigError where arrays are not what the schedule, or the executor, needs."""
    stages, micro = lax.axis_size(axis), _leading(micros, "micros")
    for what, found, wanted in (
        ("stages", stages, schedule.num_stages),
        ("micro-batches", micro, schedule.num_microbatches),
    ):
        if found != wanted:
            raise ConfigError(
                f"schedule {schedule.name} for {wanted} {what}",
                f"{axis!r} has {found} ranks" if what == "stages" else f"the batch is cut into {found}",
                f"Make the schedule for {found} {what}",
            )
    rows = _leading(layers, "layers")
    if jax.tree.leaves(fixed) and _leading(fixed, "fixed") != rows:
        raise ConfigError(
            f"fixed values for {_leading(fixed, 'fixed')} layers", f"a stage has {rows} layers", "Give one row a layer"
        )
    if rows % schedule.num_chunks:
        raise ConfigError(
            f"schedule {schedule.name} with {schedule.num_chunks} chunks",
            f"each stage holds {rows} layers, which do not divide",
            "Hold a multiple of the chunks, with `num_layers` where parts have fewer",
        )
    for leaf in jax.tree.leaves((shared, layers)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise ConfigError(
                f"weights of type {leaf.dtype}", "weights are differentiated", "Pass it in `fixed` or in `micros`"
            )
        if stages == 1 and axis in varying_axes(leaf):
            raise ConfigError(
                f"weights split over {axis!r}, which has one rank",
                "an axis of size 1 is in no spec here (see jaxdist.parallel.collectives)",
                f"Leave {axis!r} out of in_specs and out_specs, or use more stages",
            )
    depth = rows // schedule.num_chunks
    if num_layers is not None and (
        len(num_layers) != schedule.num_parts or not all(n in range(depth + 1) for n in num_layers)
    ):
        raise ConfigError(
            f"num_layers={tuple(num_layers)}",
            f"schedule {schedule.name} has {schedule.num_parts} parts, of at most {depth} layers here",
            "Name one whole number for each part, in model order",
        )
    return depth


def _leading(tree, name: str) -> int:
    """The size of the leading dim that all leaves share."""
    sizes = {leaf.shape[0] if leaf.ndim else None for leaf in jax.tree.leaves(tree)}
    if len(sizes) != 1 or None in sizes:
        found = ", ".join(sorted(map(str, sizes))) or "no arrays"
        raise ConfigError(
            f"{name} with leading sizes {found}",
            "every leaf has the same leading dim: a row for each layer of the stage, or for each micro-batch",
            "Give every leaf that dim, and every leaf of layers the pipeline's axis in its spec",
        )
    return sizes.pop()


def counts_of(schedule: Schedule, num_layers: Sequence[int], axis: str) -> jax.Array:
    """Layers in each chunk of this stage, int32[C]."""
    table = [
        [num_layers[schedule.part(stage, chunk)] for chunk in range(schedule.num_chunks)]
        for stage in range(schedule.num_stages)
    ]
    return comm.varying(jnp.asarray(table, jnp.int32), axis)[comm.rank(axis)]


def named(name: str, function: Callable, *args):
    """function(*args) as a jitted function of that name, for whoever reads the traced program."""

    def run():
        return function(*args)

    run.__name__ = name
    return jax.jit(run)()


def pick(tree, index):
    """Entry `index` of the leading dim of every leaf."""
    return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, index, keepdims=False), tree)


def put(buffer: jax.Array, slot, x: jax.Array) -> jax.Array:
    """`x` into a slot of the buffer; nothing happens for slot -1."""
    at = jnp.maximum(slot, 0)
    kept = jnp.where(slot >= 0, x, lax.dynamic_index_in_dim(buffer, at, keepdims=False))
    return lax.dynamic_update_index_in_dim(buffer, kept, at, 0)


def load(pools: list[Pool], slot, layer) -> list:
    """What each pool holds at one slot and layer."""

    def at(pool):
        return lax.dynamic_index_in_dim(pool.rows, slot * pool.length + layer, keepdims=False).reshape(pool.shape)

    return [at(pool) for pool in pools]


def store(pools: list[Pool], slot, layer, values: list) -> list[Pool]:
    """The pools with `values` at one slot and layer."""

    def at(pool, x):
        x = comm.varying_like(x.reshape(-1), pool.rows)
        rows = lax.dynamic_update_index_in_dim(pool.rows, x, slot * pool.length + layer, 0)
        return Pool(rows, pool.length, pool.shape)

    return [at(pool, x) for pool, x in zip(pools, values, strict=True)]


def add(sums, tree):
    """Running sums plus a tree of the same structure, in the dtype of the sums."""
    return jax.tree.map(lambda total, x: total + x.astype(total.dtype), sums, tree)


def _without_leading(t):
    return t.update(shape=t.shape[1:])


def _type_of(name: str, function: Callable, *types):
    """The type of what a stage function returns.

    Raises: ConfigError where that is not one array, or where the function permutes over an axis of several ranks:
    stages run different loops at a tick, and a permute (on XLA:CPU, of all devices at once) would pair one stage's
    with another's.
    """
    closed = jax.make_jaxpr(function)(*types)
    if len(closed.out_avals) != 1:
        raise ConfigError(f"`{name}` returns {len(closed.out_avals)} arrays", "it returns one", "Return one array")
    for eqn in all_equations(closed):
        if eqn.primitive.name == "ppermute" and comm.live(eqn.params["axis_name"]):
            raise ConfigError(
                f"`{name}` permutes over {eqn.params['axis_name']}",
                "stages run different layers at a tick, and their permutes would be taken for one another",
                "Use all_gather, all_to_all or a sum, which meet inside one stage alone",
            )
    return closed.out_avals[0]
