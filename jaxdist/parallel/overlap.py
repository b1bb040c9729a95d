"""Backward and communication at once: while one layer computes, the next weights come and the last gradients go.

A layer's communication is one loop iteration away from its compute, so that inside each
iteration there is something to send and something independent to compute:

    forward of layer l     gathers the weights of layer l + 1
    backward of layer l    gathers the weights of layer l - 1, and reduces the gradients of layer l + 1

JAX's own transpose of a scan cannot do this: it puts the reduction of a layer's gradients into the iteration that
makes them, after everything else. So the backward loop is written out here, from the division of a layer's backward in
`jaxdist.parallel.pipeline.split_backward`. Whether a compiler then sends and computes at once is for its program to
say: `python -m experiments.bench overlap` reads it.

Source: PyTorch DDP, arXiv 2006.15704, section 3.2.3; FSDP, arXiv 2304.11277, section 3.3.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import type_of, varying_axes
from jaxdist.parallel.pipeline.buffers import add, pick
from jaxdist.parallel.pipeline.executor import Stages
from jaxdist.parallel.pipeline.split_backward import SplitLayer, pruned, split_layer


class Sums(NamedTuple):
    """loss: summed. shared: gradients of what is used outside the layers. layers: what `reduce_into` made. finite: a
    flag for each leaf of a layer, of local gradients, over all layers."""

    loss: jax.Array
    shared: Any
    layers: Any
    finite: Any

    def plus(self, later: "Sums") -> "Sums":
        """With the sums of another micro-batch, which has the layers' already."""
        finite = jax.tree.map(jnp.logical_and, self.finite, later.finite)
        return Sums(self.loss + later.loss, add(self.shared, later.shared), later.layers, finite)


class _Carry(NamedTuple):
    """The carry of the backward loop at layer l: dx of its output, its weights where they were gathered ahead, the
    local gradients of layer l + 1 that are still to be reduced, and the results so far."""

    dx: jax.Array
    weights: Any
    pending: Any
    layers: Any
    finite: Any


@dataclass(frozen=True)
class OverlappedBackward:
    """What `jax.grad` gives of one micro-batch, with the layers' gradients reduced while backward runs.

    Layout: layers[L, ...] as they are held -> d_layers as `reduce_into` leaves them; shared -> d_shared {U}: sums are
    owed as the caller's types say.
    Sends: what `gather` sends, 2L - 1 times (L forward; the last layer's weights serve its backward too), and what
    `reduce_into` sends, L times.

    stages: `layer` is called as layer(trained, (frozen, index), micro, x). reduce_into(d_trained, index, out) -> out:
    reduces the local gradients of one layer into the result. gather: one layer as it is held -> its weights, to be
    started a layer ahead; None where layers are held whole. divide: weights -> (trained, frozen). seed: the gradient is
    that of seed times the summed loss. recompute: keep a layer's input alone, and run the layer again in backward.
    """

    stages: Stages
    shared: Any
    layers: Any
    micro: Any
    reduce_into: Callable
    gather: Callable | None
    divide: Callable
    seed: jax.Array
    recompute: bool

    def __call__(self, out) -> Sums:
        """`out`: what `reduce_into` puts the first gradients into."""
        last = self.num_layers - 1

        # ---- forward ----
        weights = self.prefetch(0)
        x, pull_first = jax.vjp(lambda shared: self.stages.first(shared, self.micro), self.shared)
        split = self.split(weights, x)
        if last > 0:

            def forward(carry, index):
                x, weights = carry
                coming = self.prefetch(index + 1)
                y, kept = self.run(split, weights, index, x)
                return (y, coming), kept

            (x, weights), kept = lax.scan(forward, (x, weights), jnp.arange(last))
        y, kept_last = self.run(split, weights, jnp.int32(last), x)

        # ---- the loss; the last layer's weights are still here ----
        loss, pull_last = jax.vjp(lambda shared, y: self.stages.last(shared, y, self.micro), self.shared, y)
        d_shared, dy = pull_last(comm.varying_like(jnp.asarray(self.seed, loss.dtype), loss))

        # ---- backward ----
        trained, _ = self.weights_of(weights, last)
        finite = jax.tree.map(lambda w: comm.varying_like(jnp.bool_(True), w), trained)
        carry = _Carry(dy, weights, None, out, finite)
        carry = self.step(split, carry, jnp.int32(last), kept_last, is_first=last == 0, is_last=True)
        if last > 1:

            def backward(carry, index):
                return self.step(split, carry, index, pick(kept, index)), None

            carry, _ = lax.scan(backward, carry, jnp.arange(1, last), reverse=True)
        if last > 0:
            carry = self.step(split, carry, jnp.int32(0), pick(kept, 0), is_first=True)
        out = self.reduce_into(carry.pending, 0, carry.layers)
        return Sums(loss, add(d_shared, pull_first(carry.dx)[0]), out, carry.finite)

    @cached_property
    def num_layers(self) -> int:
        return jax.tree.leaves(self.layers)[0].shape[0]

    def prefetch(self, index, after=()):
        """The weights of a layer, not to be gathered before `after` is there."""
        return None if self.gather is None else self.gather(order_after(pick(self.layers, index), after))

    def weights_of(self, weights, index):
        """The weights of a layer, (trained, (frozen, index)): those that were gathered ahead, or those held."""
        trained, frozen = self.divide(pick(self.layers, index) if self.gather is None else weights)
        return trained, (frozen, index)

    def split(self, weights, x) -> SplitLayer | None:
        """The layer's backward, divided; None where layers run again."""
        if self.recompute:
            return None
        types = [jax.tree.map(type_of, part) for part in (*self.weights_of(weights, jnp.int32(0)), self.micro, x)]
        return split_layer(self.stages.layer, *types)

    def run(self, split: SplitLayer | None, weights, index, x):
        """(y, what backward needs) of one layer."""
        trained, fixed = self.weights_of(weights, index)
        if split is None:
            # As its gradient runs it: what is sent for an auxiliary loss, which no y needs, is not sent here.
            layer = partial(self.stages.layer, trained, fixed, self.micro)
            return pruned(lambda x: jax.vjp(layer, x)[0], x), x
        y, *kept = split.forward(trained, fixed, self.micro, x)
        return y, kept

    def gradient(self, split: SplitLayer | None, weights, index, kept, dy):
        """(d_trained, dx) of one layer."""
        trained, fixed = self.weights_of(weights, index)
        if split is None:

            def pull(trained, x, dy):
                again = partial(self.stages.layer, micro=self.micro)
                return jax.vjp(lambda trained, x: again(trained, fixed, x=x), trained, x)[1](dy)

            return pruned(pull, trained, kept, dy)
        dx, b_to_w = split.input_gradient(trained, fixed, *kept, dy)
        return split.weight_gradient(trained, fixed, kept[1], b_to_w), dx

    def step(self, split, carry: _Carry, index, kept, *, is_first: bool = False, is_last: bool = False) -> _Carry:
        """Backward of one layer. The model's first has nothing left to gather, its last nothing to reduce yet."""
        coming = None if is_first else self.prefetch(index - 1, after=carry.dx)
        out = carry.layers if is_last else self.reduce_into(carry.pending, index + 1, carry.layers)
        d_weights, dx = self.gradient(split, carry.weights, index, kept, carry.dx)
        finite = jax.tree.map(lambda flag, g: flag & jnp.isfinite(g).all(), carry.finite, d_weights)
        if is_first and not is_last:
            # Otherwise a compiler would send two layers in one late message, with what is outside the layers.
            reduced = jax.tree.map(lambda rows: rows[index + 1].reshape(-1)[0], out)
            d_weights, dx = order_after((d_weights, dx), reduced)
        return _Carry(dx, coming, d_weights, out, finite)


def order_after(tree: Any, event: Any) -> Any:
    """`tree`, with which nothing is computed before `event` is there.

    A barrier makes its results vary alike, so a leaf waits for what varies over no more axes than it does itself.
    """

    def one(x):
        events = [e for e in jax.tree.leaves(event) if varying_axes(e) <= varying_axes(x)]
        return lax.optimization_barrier((x, events))[0]

    return jax.tree.map(one, tree)
