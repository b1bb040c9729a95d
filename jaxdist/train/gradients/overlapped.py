"""Gradients that are reduced, and ZeRO-3 weights that are gathered, while another layer computes (`--overlap`).

DP and ZeRO-1 sum over ranks once, in the last micro-batch's backward, what all of them gave; ZeRO-2 and 3 scatter over
dp in each, and sum over other axes in the last. What is outside the layers is reduced after backward.
"""

from dataclasses import dataclass, replace
from functools import cached_property, partial

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import Layout, ShardedParams, drop_frozen, fill, keep_frozen, split_outer
from jaxdist.mesh import WORK_AXES
from jaxdist.models.context import Batch
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.overlap import OverlappedBackward, Sums, order_after
from jaxdist.parallel.pipeline.buffers import add, pick
from jaxdist.parallel.pipeline.executor import Stages
from jaxdist.parallel.reduce import reduce_gradients
from jaxdist.train.gradients.base import (
    Gradients,
    Poison,
    ShardedModel,
    all_finite,
    cut,
    join,
    order_after_finite_check,
)


def gradients(model: ShardedModel, params: dict, batch: Batch, key, weight, poison: Poison | None) -> Gradients:
    """As the other engines. Sends what plain gradients and their reduction send, in a layer's messages rather than a
    stack's; less one layer's gather under ZeRO-3. `build_program` refuses a poison here."""
    params = model.cast(params)
    run = _Overlapped(model, params, model.params.hold_outer(params), key, weight)
    last, deferred = batch, None
    layers = split_outer(params)[1]
    if model.config.parallel.accumulate > 1:
        micros = cut(batch, model.config.parallel.accumulate)
        first, last = jax.tree.map(lambda x: x[:-1], micros), jax.tree.map(lambda x: x[-1], micros)
        deferred = lax.scan(lambda sums, micro: (run.defer(sums, layers, micro), None), run.no_sums(), first)[0]
        # Otherwise a compiler begins the last one's forward beside the others, and keeps twice as much.
        layers = jax.tree.map(order_after, layers, deferred.layers)
    found = run.final(layers, last, deferred)
    outer_finite, outer_layout = all_finite(found.shared), replace(model.layout, leaves=run.outer_leaves)
    d_outer = order_after_finite_check(found.shared, outer_finite, model.config.parallel)
    d_outer = reduce_gradients(d_outer, outer_layout, model.reduce_dtype)
    return Gradients(join(d_outer, found.layers), found.loss, join(outer_finite, found.finite))


@dataclass(frozen=True)
class _Overlapped:
    """The micro-batches of one step; layers are passed as the state has them."""

    model: ShardedModel
    params: dict
    outer: ShardedParams
    key: jax.Array | None
    weight: jax.Array

    @cached_property
    def outer_leaves(self) -> dict:
        return split_outer(self.model.layout.trained.leaves)[0]

    @cached_property
    def stacked_leaves(self) -> dict:
        return split_outer(self.model.layout.trained.leaves)[1]

    @cached_property
    def layer_layout(self) -> Layout:
        return replace(self.model.layout, leaves=self.model.layout.layer_leaves).trained

    def backward(self, layers: dict, micro: Batch, out: dict, reduce_into) -> Sums:
        """One micro-batch, its layers' gradients put into `out` by `reduce_into`."""
        model, stored = self.model, self.outer.stored

        def first(outer, micro):
            return model.embed(ShardedParams(outer, stored), micro, self.key)

        def layer(trained, fixed, micro, x):
            frozen, index = fixed
            return model.whole_block(fill(trained, frozen), x, index, micro, self.key)

        def last(outer, x, micro):
            return model.loss(ShardedParams(outer, stored), x, micro, self.key)

        found = OverlappedBackward(
            Stages(first, layer, last),
            self.outer.trainable,
            layers,
            micro,
            reduce_into=reduce_into,
            gather=self.gather if model.layout.params_sharded else None,
            divide=self.divide,
            seed=self.weight,
            recompute=model.remat_every == 1,
        )(out)
        return found._replace(shared=model.params.scatter(self.outer_leaves, found.shared))

    def gather(self, shards: dict) -> dict:
        """Whole weights of one layer."""
        return self.model.params.unshard_layer(ShardedParams(jax.tree.map(lambda _: None, shards), shards))

    def divide(self, weights: dict) -> tuple[dict, dict]:
        """(trained, frozen) of one layer."""
        leaves = self.model.layout.layer_leaves
        return drop_frozen(leaves, weights), keep_frozen(leaves, weights)

    def defer(self, sums: Sums, layers: dict, micro: Batch) -> Sums:
        """A micro-batch whose sums over ranks wait: added to the sums so far."""

        def add_to_sums(d_weights, index, out):
            return put(out, index, add(pick(out, index), self.scatter_layer(d_weights)))

        return sums.plus(self.backward(layers, micro, sums.layers, add_to_sums))

    def final(self, layers: dict, micro: Batch, deferred: Sums | None) -> Sums:
        """The last micro-batch: each layer's sum is final when its backward is done, and is reduced then."""
        dtype = self.model.reduce_dtype

        def reduce_into(d_weights, index, out):
            total = self.scatter_layer(d_weights)
            total = total if deferred is None else add(pick(deferred.layers, index), total)
            return put(out, index, reduce_gradients(total, self.layer_layout, dtype))

        out = jax.tree.map(partial(self.zeros, reduced=True), self.stacked_leaves)
        found = self.backward(layers, micro, out, reduce_into)
        return found if deferred is None else deferred.plus(found)

    def scatter_layer(self, d_weights: dict) -> dict:
        return self.model.params.scatter(self.layer_layout.leaves, d_weights)

    def no_sums(self) -> Sums:
        def true(leaf):
            return comm.varying(jnp.bool_(True), (*leaf.spec_axes, *leaf.reduce_axes))

        return Sums(
            loss=comm.varying(jnp.zeros((), self.weight.dtype), WORK_AXES),
            shared=jax.tree.map(self.zeros, self.outer_leaves),
            layers=jax.tree.map(self.zeros, self.stacked_leaves),
            finite=jax.tree.map(true, self.stacked_leaves),
        )

    def zeros(self, leaf, reduced: bool = False) -> jax.Array:
        """The gradient of a leaf before anything is added, of sums over ranks or of sums that still wait for them."""
        stored = reduced or self.model.layout.grads_sharded
        axes = leaf.storage_axes if reduced else (*leaf.storage_axes, *leaf.reduce_axes)
        return comm.varying(jnp.zeros(leaf.storage_local if stored else leaf.compute_local, self.model.sum_dtype), axes)


def put(rows: dict, index, row: dict) -> dict:
    """`row` at `index` of the leading dim of every leaf."""
    return jax.tree.map(lambda all_, x: lax.dynamic_update_index_in_dim(all_, x, index, 0), rows, row)
