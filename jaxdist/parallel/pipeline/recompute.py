"""Layers that run forward again in a pipeline's backward: in groups inside B, or a chunk in an action R of its own.

Each function is a part of the executor's tick (`jaxdist.parallel.pipeline.executor`), whose `run` it is given.
"""

import jax.numpy as jnp

from jaxdist.parallel.pipeline.buffers import load, pick, put, store
from jaxdist.parallel.pipeline.instructions import NOWHERE, Instructions, Loop
from jaxdist.parallel.pipeline.schedules import Phase

# ---- a chunk, in R ----


def forward_input(run, row, micro, value, state):
    """F of every layer, saving the input of the first."""
    inputs = put(state.inputs, jnp.where(row.phase == Phase.F, row.slot_x, NOWHERE), value)
    return run.pass_on(run.stages.passing, row, micro, value), state._replace(inputs=inputs)


def again(run, row, micro, state):
    """R of every layer, saving what backward needs; its result is dropped."""
    x = pick(state.inputs, jnp.maximum(row.slot_x, 0))
    return run.forward(row, micro, x, state, Loop.LAYERS_AGAIN, Phase.R)[1]


# ---- groups of layers, in B ----


def forward_inputs(run, row, micro, value, state):
    """F of every layer, saving the input of every group of layers."""

    def body(carry, group):
        x, b_residuals = carry
        b_residuals = store(b_residuals, row.slot_b, group, [x])
        first, size = members(run, row, group)

        def layer_of_group(x, index):
            return run.stages.passing(*run.weights(row, first + index), micro, x)

        return run.loop(Loop.LAYERS_FORWARD, size, layer_of_group, x), b_residuals

    carry = (value, state.b_residuals)
    value, b_residuals = run.loop(Loop.GROUPS_FORWARD, num_groups(run, row, Phase.F), body, carry)
    return value, state._replace(b_residuals=b_residuals)


def backward_again(run, row, micro, value, state):
    """B of every group of layers: forward again from the group's input, then backward through it.

    For groups of one layer, operations that only the layer's result needs are left out, and its weights are
    unsharded once for both. A loop over several layers computes every result and holds no layer's weights.
    """
    if run.recompute_every == 1:
        return backward_again_alone(run, row, micro, value, state)
    split, every = run.split, run.recompute_every

    def body(carry, group):
        first, size = members(run, row, group)

        def forward(carry, index):
            x, b_residuals, w_residuals = carry
            x, new_b, new_w = split.forward(*run.weights(row, first + index), micro, x)
            return x, store(b_residuals, 0, index, new_b), store(w_residuals, 0, index, new_w)

        def backward(carry, index):
            dx, b_to_w = carry
            residuals = load(b_residuals, 0, index), load(w_residuals, 0, index)
            dx, new = split.input_gradient(*run.weights(row, first + index), *residuals, dx)
            return dx, store(b_to_w, row.slot_bw, first + index, [*new, *residuals[1]])

        [x] = load(state.b_residuals, row.slot_b, group)
        start = (x, run.pool(1, split.b_residuals, every), run.pool(1, split.w_residuals, every))
        _, b_residuals, w_residuals = run.loop(Loop.LAYERS_AGAIN, size, forward, start)
        return run.loop(Loop.LAYERS_INPUT_GRADIENT, size, backward, carry, reverse=True)

    carry, times = (value, state.b_to_w), num_groups(run, row, Phase.B)
    value, b_to_w = run.loop(Loop.GROUPS_BACKWARD, times, body, carry, reverse=True)
    return value, state._replace(b_to_w=b_to_w)


def backward_again_alone(run, row, micro, value, state):
    """B of every layer, each from its own input."""

    def body(carry, layer):
        dx, b_to_w = carry
        [x] = load(state.b_residuals, row.slot_b, layer)
        dx, new, w_residuals = run.split.input_gradient_again(*run.weights(row, layer), micro, x, dx)
        return dx, store(b_to_w, row.slot_bw, layer, [*new, *w_residuals])

    carry = (value, state.b_to_w)
    value, b_to_w = run.for_layers(Loop.LAYERS_INPUT_GRADIENT, row, Phase.B, body, carry, reverse=True)
    return value, state._replace(b_to_w=b_to_w)


def num_groups(run, row: Instructions, phase: Phase):
    """Groups of layers that are recomputed together; 0 where this stage runs another phase."""
    num_groups = (run.counts[row.chunk] + run.recompute_every - 1) // run.recompute_every
    return jnp.where(row.phase == phase, num_groups, 0)


def members(run, row: Instructions, group):
    """(first layer, number of layers) of a group."""
    first = group * run.recompute_every
    return first, jnp.minimum(run.recompute_every, run.counts[row.chunk] - first)
