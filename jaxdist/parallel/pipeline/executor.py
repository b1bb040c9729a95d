"""Run any pipeline schedule: one `lax.scan` over its table, in which each stage runs its own action at each tick.

An action is F (forward of one micro-batch through one chunk of layers), B (its input gradient), W (its weight
gradient) or R (forward again, where the schedule recomputes), so a tick costs about one unit on every stage that has
work, and nothing on a stage that is idle. The residuals that F (or R) saves for B and W, and the values that B saves
for W, are in buffers with as many slots as the schedule ever has in flight.

Each phase is a loop that runs as many times as the table says on this stage: once for each layer of the chunk, or not
at all. (A `lax.switch` over the phases would be simpler, but XLA copies the buffers that its branches change, where a
loop updates them in place.) Whatever such a loop computes depends on its index or its carry, otherwise XLA lifts it out
of the loop and runs it at every tick.

Dims: S stages, M micro-batches, C chunks per stage, L layers per chunk. Source: GPipe, arXiv 1811.06965; 1F1B and
interleaving, arXiv 2104.04473, section 2.2; the division of backward, arXiv 2401.10241, section 2.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.errors import ConfigError
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import type_of, varying_axes
from jaxdist.parallel.pipeline import recompute
from jaxdist.parallel.pipeline.buffers import Buffer, Pool, add, load, pick, put, store
from jaxdist.parallel.pipeline.checks import check_arrays, output_type
from jaxdist.parallel.pipeline.instructions import ARRIVALS, FROM_SELF, NOWHERE, Instructions, Loop, Lowered, sending
from jaxdist.parallel.pipeline.lowering import lower
from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.split_backward import SplitLayer, pruned, split_layer


class Stages(NamedTuple):
    """A model as a pipeline sees it; each function works on local shards of one micro-batch.

    first(shared, micro) -> x, on the first part of the model. layer(weights, fixed, micro, x) -> x of the same shape
    and dtype. last(shared, x, micro) -> the micro-batch's summed loss, a scalar, on the last part. passing: `layer` for
    an F that saves nothing, since B runs it again: without what only a gradient needs; None for `layer` itself.
    """

    first: Callable
    layer: Callable
    last: Callable
    passing: Callable | None = None


class _State(NamedTuple):
    """The scan's carry: messages[slots, ...], lists of pools, the sums so far; with send_latency 2 also the last tick's
    message, which is sent during the next; where the schedule recomputes inputs[slots, ...] of chunks."""

    messages: jax.Array
    outgoing: jax.Array | None
    inputs: jax.Array | None
    b_residuals: list
    w_residuals: list
    b_to_w: list
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
    split: SplitLayer  # None where a layer's F is its whole forward
    x: Any
    loss: Any
    depth: int
    counts: jax.Array
    recompute_every: int | None
    recomputes: bool
    send_latency: int
    axis: str

    def tick(self, lowered: Lowered, act: Callable, state: _State, rows: tuple) -> tuple[_State, None]:
        """Receive, act, send: every stage runs its own action, and buffers what arrives.

        act: (state, row) -> (state, message). Messages are sent between two ticks, if any stage needs one. With
        send_latency 2 the message of the last tick is sent meanwhile, and at every tick, needed or not: no compiler
        overlaps a collective that is inside a conditional branch.
        """
        row, which = rows
        mine = jax.tree.map(lambda column: comm.varying(column, self.axis)[comm.rank(self.axis)], row)

        def exchange(message):
            return {name: self.send(name, found.sets, which[name], message) for name, found in lowered.senders.items()}

        arrived = None if self.send_latency == 1 else exchange(state.outgoing)
        state, message = act(state, mine)
        if arrived is None:
            arrived = exchange(message)
        else:  # Otherwise a compiler may buffer one arrival at once, and wait for it before it computes.
            arrived, message = lax.optimization_barrier((arrived, message))
        arrived[FROM_SELF] = message
        messages = state.messages
        for name in ARRIVALS:
            if (getattr(lowered.instructions, name) != NOWHERE).any():
                messages = put(messages, getattr(mine, name), arrived[name])
        return state._replace(messages=messages, outgoing=None if self.send_latency == 1 else message), None

    def send(self, name: str, sets: list[tuple[int, ...]], which, message):
        """The neighbour's message, if it is in the set that sends. All stages take the same branch."""

        def branch(index: int):
            send = partial(comm.permute, axis=self.axis, shift=ARRIVALS[name], senders=sets[index])
            return lambda message: named(sending(name, index), send, message)

        if self.send_latency == 2:
            return branch(0)(message)
        return lax.switch(which, [lambda message: message, *map(branch, range(len(sets)))], message)

    def run_action(self, seed: jax.Array, state: _State, row: Instructions) -> tuple[_State, jax.Array]:
        """(state, message to be sent): the input is loaded and passes through the loops, of which only those of this
        stage's action run."""
        micro, value = pick(self.micros, row.microbatch), pick(state.messages, jnp.maximum(row.slot_in, 0))
        value = self.embed(row, value)
        if self.recomputes:
            value, state = recompute.forward_input(self, row, micro, value, state)
        elif self.recompute_every:
            value, state = recompute.forward_inputs(self, row, micro, value, state)
        else:
            value, state = self.forward(row, micro, value, state)
        value, state = self.head(seed, row, micro, value, state)
        if self.recomputes:
            state = recompute.again(self, row, micro, state)
        if self.recompute_every:
            value, state = recompute.backward_again(self, row, micro, value, state)
        else:
            value, state = self.backward(row, micro, value, state)
        value, state = self.embed_gradient(row, micro, value, state)
        return self.weight_gradient(row, state), value

    def embed(self, row, value):
        """The micro-batch is picked at the loop's index: nothing else in the loop changes, and XLA would lift all of
        it out, collectives too, and run it at every tick on every stage."""

        def body(_, index):
            return self.stages.first(self.shared, pick(self.micros, row.microbatch + index))

        active = (row.phase == Phase.F) & (row.first == 1)
        return self.loop(Loop.EMBED, active.astype(jnp.int32), body, value)

    def forward(self, row, micro, value, state: _State, name=Loop.LAYERS_FORWARD, phase=Phase.F):
        """F (or R) of every layer, saving what backward needs."""

        def body(carry, layer):
            x, b_residuals, w_residuals = carry
            x, new_b, new_w = self.split.forward(*self.weights(row, layer), micro, x)
            return x, store(b_residuals, row.slot_b, layer, new_b), store(w_residuals, row.slot_w, layer, new_w)

        carry = (value, state.b_residuals, state.w_residuals)
        value, b_residuals, w_residuals = self.for_layers(name, row, phase, body, carry)
        return value, state._replace(b_residuals=b_residuals, w_residuals=w_residuals)

    def head(self, seed, row, micro, value, state: _State):
        """The loss and, at once, its gradient: logits are too large to keep until B."""

        def body(carry):
            d_shared, loss, y = carry
            here, pull = jax.vjp(lambda shared, y: self.stages.last(shared, y, micro), self.shared, y)
            d_here, dy = pull(comm.varying_like(seed.astype(here.dtype), here))
            return add(d_shared, d_here), loss + here, dy

        active = (row.phase == Phase.F) & (row.last == 1)
        d_shared, loss, value = self.run_if(Loop.HEAD, active, body, (state.d_shared, state.loss, value))
        return value, state._replace(d_shared=d_shared, loss=loss)

    def backward(self, row, micro, value, state: _State):
        """B of every layer, from the residuals of F."""

        def body(carry, layer):
            dx, b_to_w = carry
            residuals = load(state.b_residuals, row.slot_b, layer), load(state.w_residuals, row.slot_w, layer)
            dx, new = self.split.input_gradient(*self.weights(row, layer), *residuals, dx)
            return dx, store(b_to_w, row.slot_bw, layer, new)

        carry = (value, state.b_to_w)
        value, b_to_w = self.for_layers(Loop.LAYERS_INPUT_GRADIENT, row, Phase.B, body, carry, reverse=True)
        return value, state._replace(b_to_w=b_to_w)

    def embed_gradient(self, row, micro, value, state: _State):
        def gradient(shared, micro, dx):
            return jax.vjp(lambda shared: self.stages.first(shared, micro), shared)[1](dx)[0]

        def body(carry):
            d_shared, dx = carry  # dx ends here; carried and changed, so that a gather of it stays in the loop
            return add(d_shared, pruned(gradient, self.shared, micro, dx)), jnp.zeros_like(dx)

        active = (row.phase == Phase.B) & (row.first == 1)
        d_shared, value = self.run_if(Loop.EMBED_GRADIENT, active, body, (state.d_shared, value))
        return value, state._replace(d_shared=d_shared)

    def weight_gradient(self, row, state: _State) -> _State:
        """W of every layer, added to the sums."""
        num_b_to_w = len(self.split.b_to_w)

        def body(d_layers, layer):
            stored = load(state.b_to_w, row.slot_bw, layer)
            w_residuals = stored[num_b_to_w:] if self.recompute_every else load(state.w_residuals, row.slot_w, layer)
            dw = self.split.weight_gradient(*self.weights(row, layer), w_residuals, stored[:num_b_to_w])
            at = row.chunk * self.depth + layer
            total = add(pick(d_layers, at), dw)
            return jax.tree.map(lambda sums, x: lax.dynamic_update_index_in_dim(sums, x, at, 0), d_layers, total)

        d_layers = self.for_layers(Loop.LAYERS_WEIGHT_GRADIENT, row, Phase.W, body, state.d_layers)
        return state._replace(d_layers=d_layers)

    # Only the loss.

    def run_forward_action(self, state: _State, row: Instructions):
        micro, value = pick(self.micros, row.microbatch), pick(state.messages, jnp.maximum(row.slot_in, 0))
        value = self.pass_on(self.stages.layer, row, micro, self.embed(row, value))
        loss = self.run_if(
            Loop.HEAD,
            (row.phase == Phase.F) & (row.last == 1),
            lambda loss: loss + self.stages.last(self.shared, value, micro),
            state.loss,
        )
        return state._replace(loss=loss), value

    def pass_on(self, function: Callable, row, micro, value):
        """F of every layer, saving nothing."""
        return self.for_layers(
            Loop.LAYERS_FORWARD, row, Phase.F, lambda x, layer: function(*self.weights(row, layer), micro, x), value
        )

    # Loops.

    def weights(self, row: Instructions, layer):
        """Weights and fixed values of one layer of the action's chunk."""
        return pick((self.layers, self.fixed), row.chunk * self.depth + layer)

    def for_layers(self, name: str, row: Instructions, phase: Phase, body: Callable, carry, reverse: bool = False):
        """carry = body(carry, layer) for every layer of the action's chunk, where the action is of this phase."""
        return self.loop(name, jnp.where(row.phase == phase, self.counts[row.chunk], 0), body, carry, reverse)

    def run_if(self, name: str, active, body: Callable, carry):
        """carry = body(carry) where `active`."""
        return self.loop(name, active.astype(jnp.int32), lambda carry, _: body(carry), carry)

    def loop(self, name: str, times, body: Callable, carry, reverse: bool = False):
        """carry = body(carry, index) for every index below `times`, which differs from stage to stage.

        The name stays in the program, where `jaxdist.plan.proof.trace` finds the loop.
        """

        def step(state):
            index, carry = state
            new = body(carry, times - 1 - index if reverse else index)
            return index + 1, comm.varying_like(new, carry)

        start = comm.varying(jnp.int32(0), self.axis)
        return named(name, lax.while_loop, lambda state: state[0] < times, step, (start, carry))[1]

    # Before the first tick.

    @classmethod
    def make(cls, given: Stages, schedule, lowered, arrays: tuple, num_layers, recompute_every, axis):
        depth = check_arrays(schedule, *arrays, num_layers, axis)
        # A stage's own loops read arrays that are typed varying over the axis, as their trip counts are.
        shared, layers, fixed, micros = comm.varying(arrays, axis)
        num_layers = [depth] * (schedule.num_stages * schedule.num_chunks) if num_layers is None else num_layers
        row, micro = (jax.tree.map(_row_type, tree) for tree in ((layers, fixed), micros))
        shared_type = jax.tree.map(type_of, shared)
        # x has one type from layer to layer, so it varies over every axis over which any function makes it vary.
        x = output_type("first", given.first, shared_type, micro)
        wide = sorted(varying_axes(x) | varying_axes(output_type("layer", given.layer, *row, micro, x)) | {axis})
        stages = Stages(
            first=lambda shared, micro: comm.varying(given.first(shared, micro), wide),
            layer=lambda *args: comm.varying(given.layer(*args), wide),
            last=given.last,
            passing=lambda *args: comm.varying((given.passing or given.layer)(*args), wide),
        )
        x = output_type("first", stages.first, shared_type, micro)
        loss = output_type("last", stages.last, shared_type, x, micro)
        if loss.shape != () or not jnp.issubdtype(loss.dtype, jnp.inexact):
            raise ConfigError(
                f"a loss of type {loss.str_short()}", "its gradient is taken, so it must be one number", "Sum it"
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
            counts=layers_per_chunk(lowered.parts, num_layers, axis),
            recompute_every=recompute_every,
            recomputes=schedule.recompute,
            send_latency=schedule.send_latency,
            axis=axis,
        )

    def initial(self, lowered: Lowered, dtype) -> _State:
        """Empty buffers and zero sums."""
        b_residuals, w_residuals, b_to_w, d_shared, d_layers = [], [], [], (), ()
        if self.split is not None:
            split, every = self.split, self.recompute_every
            if every:
                num_groups = -(-self.depth // every)
                b_residuals = named(Buffer.B_RESIDUALS, self.pool, lowered.num_b_residuals, [self.x], num_groups)
                b_to_w = named(Buffer.B_TO_W, self.pool, lowered.num_b_to_w, (*split.b_to_w, *split.w_residuals))
            else:
                b_residuals = named(Buffer.B_RESIDUALS, self.pool, lowered.num_b_residuals, split.b_residuals)
                w_residuals = named(Buffer.W_RESIDUALS, self.pool, lowered.num_w_residuals, split.w_residuals)
                b_to_w = named(Buffer.B_TO_W, self.pool, lowered.num_b_to_w, split.b_to_w)
            d_shared, d_layers = jax.tree.map(lambda w: self.zeros(type_of(w), dtype=dtype), (self.shared, self.layers))
        messages = named(Buffer.MESSAGES, self.zeros, self.x, (max(lowered.num_messages, 1),))
        outgoing = self.zeros(self.x) if self.send_latency == 2 else None
        inputs = None
        if self.split is not None and self.recomputes:
            inputs = named(Buffer.INPUTS, self.zeros, self.x, (lowered.num_inputs,))
        return _State(
            messages, outgoing, inputs, b_residuals, w_residuals, b_to_w, d_shared, d_layers, self.zeros(self.loss)
        )

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

    def scan(self, lowered: Lowered, act: Callable, state: _State) -> _State:
        """All ticks of a table."""
        which = {name: jnp.asarray(found.which) for name, found in lowered.senders.items()}
        rows = jax.tree.map(jnp.asarray, lowered.instructions), which
        return lax.scan(partial(self.tick, lowered, act), state, rows)[0]


def pipeline_gradients(
    stages: Stages,
    schedule: Schedule,
    shared: Any,
    layers: Any,
    micros: Any,
    *,
    fixed: Any = None,
    num_layers: Sequence[int] | None = None,
    seed: jax.Array | float = 1.0,
    recompute_every: int = 0,
    dtype: Any = None,
    axis: str = "pp",
) -> tuple[jax.Array, Any, Any]:
    """Loss and gradients of a model whose layers are divided over `axis`, for all micro-batches of a step.

    Layout: shared equal on all stages; layers[(C L)_axis, ...]: each stage's chunks one after the other; fixed (not
    differentiated) like layers; micros[M, ...] equal on all stages -> loss {U_axis}, nonzero on one stage alone;
    d_shared {U_axis}; d_layers[(C L)_axis, ...]. Gradients are unreduced over other axes as the caller's types say:
    cast shared and layers to varying over the axes that split the batch, and reduce once afterwards.
    Sends: one micro-batch's activations between the stages of consecutive parts, and their gradient back; with a
    send_latency of 2 as much at every tick, while the stages compute, in each direction that is ever used.
    Args:
        num_layers: layers of each part of the model, in model order, where some have fewer than L; the rows beyond
            them are padding: never read, and their gradient is 0.
        seed: the gradient is that of seed times the summed loss.
        recompute_every: 0 saves what backward needs; K saves the input of every K layers and runs them again in B. A
            schedule with R saves the input of every chunk, and R runs it again.
        dtype: in which gradients are summed over micro-batches; None: that of the weights.
    Returns: (loss, in the dtype of `last`, d_shared, d_layers).
    Raises: ConfigError for a schedule that is invalid or for another number of stages, chunks or micro-batches.
    """
    if not isinstance(recompute_every, int) or recompute_every < 0:
        raise ConfigError(f"recompute_every={recompute_every}", "must be a number of layers, or 0", "Use 0, 1, 2, ...")
    if recompute_every and schedule.recompute:
        raise ConfigError(f"recompute_every={recompute_every}", "must be 0: the schedule recomputes in its R", "Use 0")
    lowered = lower(schedule)
    arrays = (shared, layers, fixed, micros)
    run = _Runner.make(stages, schedule, lowered, arrays, num_layers, recompute_every, axis)
    state = run.scan(lowered, partial(run.run_action, jnp.asarray(seed)), run.initial(lowered, dtype))
    return state.loss, state.d_shared, state.d_layers


def pipeline_loss(
    stages: Stages,
    schedule: Schedule,
    shared: Any,
    layers: Any,
    micros: Any,
    *,
    fixed: Any = None,
    num_layers: Sequence[int] | None = None,
    axis: str = "pp",
) -> jax.Array:
    """Only the summed loss, by the forward actions of `schedule`; arguments and layout of `pipeline_gradients`."""
    lowered = lower(schedule, forward_only=True)
    run = _Runner.make(stages, schedule, lowered, (shared, layers, fixed, micros), num_layers, None, axis)
    return run.scan(lowered, run.run_forward_action, run.initial(lowered, None)).loss


def layers_per_chunk(parts: Sequence[Sequence[int]], num_layers: Sequence[int], axis: str) -> jax.Array:
    """Layers in each chunk of this stage, int32[C]; parts: of the model, of each chunk of each stage."""
    table = [[num_layers[part] for part in chunks] for chunks in parts]
    return comm.varying(jnp.asarray(table, jnp.int32), axis)[comm.rank(axis)]


def named(name: str, function: Callable, *args) -> Any:
    """function(*args) as a jitted function of that name, for those who read the traced program."""

    def run():
        return function(*args)

    run.__name__ = name
    return jax.jit(run)()


def _row_type(x):
    """The type of an entry of the leading dim."""
    t = type_of(x)
    return t.update(shape=t.shape[1:])
