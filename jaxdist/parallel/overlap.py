"""Backward and communication at once: while one layer computes, the next weights come and the last gradients go.

What a layer communicates stands one loop iteration away from the layer that it belongs to, so that inside each
iteration there is something to send and something independent to compute:

    forward of layer l     gathers the weights of layer l + 1
    backward of layer l    gathers the weights of layer l - 1, and reduces the gradients of layer l + 1

JAX's own transpose of a scan cannot do this: it puts the reduction of a layer's gradients into the iteration that
makes them, after everything else. So the backward loop is written out here, from the division of a layer's backward in
`jaxdist.parallel.split`. Whether a compiler then sends and computes at once is for its program to say:
`python -m experiments.overlap` reads it.

Source: PyTorch DDP, arXiv 2006.15704, section 3.2.3; FSDP, arXiv 2304.11277, section 3.3.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.compat import type_of, varying_axes
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline import Stages, add, pick
from jaxdist.parallel.split import pruned, split_layer


class Gradients(NamedTuple):
    """loss: summed. shared: of what is used outside the layers. layers: what `take` made. finite: a flag for each leaf
    of a layer, of local gradients, over all layers."""

    loss: jax.Array
    shared: Any
    layers: Any
    finite: Any


class _Carry(NamedTuple):
    """Of the backward loop at layer l: dx of its output, its weights where they were gathered ahead, the local
    gradients of layer l + 1 that are still to be reduced, and the results so far."""

    dx: jax.Array
    weights: Any
    pending: Any
    layers: Any
    finite: Any


def overlapped_gradients(
    stages: Stages,
    shared,
    layers,
    micro,
    out,
    *,
    take: Callable,
    gather: Callable | None,
    seed: jax.Array,
    recompute: bool,
) -> Gradients:
    """What `jax.grad` gives of one micro-batch, with the layers' gradients reduced while backward runs.

    Layout: layers[L, ...] as they are held -> d_layers as `take` leaves them; shared -> d_shared {U}: sums are owed as
    the caller's types say.
    Sends: what `gather` sends, 2L - 1 times (L forward; the last layer's weights serve its backward too), and what
    `take` sends, L times.
    Args:
        stages: `layer` is called as layer(weights, index, micro, x).
        out, take: take(d_weights, index, out) -> out: reduces the local gradients of one layer into the result.
        gather: one layer as it is held -> its weights, to be started a layer ahead; None where layers are held whole.
        seed: the gradient is that of seed times the summed loss.
        recompute: keep a layer's input alone, and run the layer again in backward.
    """
    num_layers = jax.tree.leaves(layers)[0].shape[0]

    def ahead(index, after=()):
        """The weights of a layer, not to be gathered before `after` is there."""
        return None if gather is None else gather(wait(pick(layers, index), after))

    def weights_of(weights, index):
        return pick(layers, index) if gather is None else weights

    weights = ahead(0)
    x, pull_first = jax.vjp(lambda shared: stages.first(shared, micro), shared)
    types = [jax.tree.map(type_of, part) for part in (weights_of(weights, 0), jnp.int32(0), micro, x)]
    split = None if recompute else split_layer(stages.layer, *types)

    def run(weights, index, x):
        weights = weights_of(weights, index)
        if recompute:
            return stages.layer(weights, index, micro, x), x
        y, *kept = split.forward(weights, index, micro, x)
        return y, kept

    def again(index, weights, x):
        return stages.layer(weights, index, micro, x)

    def gradient(weights, index, kept, dy):
        weights = weights_of(weights, index)
        if recompute:
            return pruned(lambda w, x, dy: jax.vjp(partial(again, index), w, x)[1](dy), weights, kept, dy)
        dx, handed = split.input_gradient(weights, index, *kept, dy)
        return split.weight_gradient(weights, index, kept[1], handed), dx

    # ---- forward ----

    def forward(carry, index):
        x, weights = carry
        coming = ahead(index + 1)
        y, kept = run(weights, index, x)
        return (y, coming), kept

    last = num_layers - 1
    if last > 0:
        (x, weights), kept = lax.scan(forward, (x, weights), jnp.arange(last))
    y, kept_last = run(weights, jnp.int32(last), x)

    # ---- the loss; the last layer's weights are still here ----
    loss, pull_last = jax.vjp(lambda shared, y: stages.last(shared, y, micro), shared, y)
    d_shared, dy = pull_last(comm.varying_like(jnp.asarray(seed, loss.dtype), loss))

    # ---- backward ----

    def step(carry: _Carry, index, kept, *, is_first: bool = False, is_last: bool = False) -> _Carry:
        """Backward of one layer. The model's first has nothing left to gather, its last nothing to reduce yet."""
        coming = None if is_first else ahead(index - 1, after=carry.dx)
        out = carry.layers if is_last else take(carry.pending, index + 1, carry.layers)
        d_weights, dx = gradient(carry.weights, index, kept, carry.dx)
        finite = jax.tree.map(lambda flag, g: flag & jnp.isfinite(g).all(), carry.finite, d_weights)
        if is_first and not is_last:  # or a compiler would send two layers in one late message, with what is no layer's
            d_weights, dx = wait((d_weights, dx), jax.tree.map(lambda rows: rows[index + 1].reshape(-1)[0], out))
        return _Carry(dx, coming, d_weights, out, finite)

    start = jax.tree.map(lambda w: comm.varying_like(jnp.bool_(True), w), weights_of(weights, last))
    carry = _Carry(dy, weights, None, out, start)
    carry = step(carry, jnp.int32(last), kept_last, is_first=last == 0, is_last=True)
    if last > 0:

        def backward(carry, index):
            return step(carry, index, pick(kept, index)), None

        if last > 1:
            carry, _ = lax.scan(backward, carry, jnp.arange(1, last), reverse=True)
        carry = step(carry, jnp.int32(0), pick(kept, 0), is_first=True)
    out = take(carry.pending, 0, carry.layers)
    return Gradients(loss, add(d_shared, pull_first(carry.dx)[0]), out, carry.finite)


def wait(tree, event):
    """`tree`, with which nothing is computed before `event` is there.

    A barrier makes its results vary alike, so a leaf waits for what varies over no more axes than it does itself.
    """

    def one(x):
        events = [e for e in jax.tree.leaves(event) if varying_axes(e) <= varying_axes(x)]
        return lax.optimization_barrier((x, events))[0]

    return jax.tree.map(one, tree)
