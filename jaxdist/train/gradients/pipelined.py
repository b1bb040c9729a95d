"""Gradients by the pipeline's executor, pass after pass.

Stages compute with what is outside the layers whole: it is gathered once a step, and its gradient scattered once.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from jaxdist.layout import ShardedParams, drop_frozen, fill, keep_frozen, split_outer
from jaxdist.models.context import Batch
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline.executor import Stages, pipeline_gradients, pipeline_loss
from jaxdist.parallel.spread import gather_to_consumers
from jaxdist.train.gradients.base import Gradients, Poison, ShardedModel, cut, join, reduced, sum_over_micro_batches


def gradients(model: ShardedModel, params: dict, batch: Batch, key, weight, poison: Poison | None) -> Gradients:
    return reduced(model, *local_gradients(model, params, batch, key, weight), poison)


def local_gradients(model: ShardedModel, params: dict, batch: Batch, key, weight) -> tuple[dict, jax.Array]:
    """(this rank's sums, its loss) before they are reduced over ranks."""
    outer, layers = hold(model, params)

    def one_pass(batch: Batch) -> tuple[dict, jax.Array]:
        how = dict(seed=weight, recompute_every=model.remat_every, dtype=model.sum_dtype)
        loss, d_outer, d_layers = through_stages(pipeline_gradients, model, outer, layers, batch, key, **how)
        return join(d_outer, d_layers), loss

    like = join(outer.trainable, layers.trainable)
    grads, loss_sum = sum_over_micro_batches(model, one_pass, batch, like, weight)
    if model.layout.grads_sharded:
        leaves, (d_outer, d_layers) = split_outer(model.layout.trained.leaves)[0], split_outer(grads)
        grads = join(model.params.scatter(leaves, d_outer), d_layers)
    return grads, loss_sum


def evaluate(model: ShardedModel, params: dict, batch: Batch) -> jax.Array:
    return through_stages(pipeline_loss, model, *hold(model, params), batch, None)


def hold(model: ShardedModel, params: dict) -> tuple[ShardedParams, ShardedParams]:
    """(what is outside the layers, whole on the stages that use it; the layers)."""
    params, leaves = model.cast(params), split_outer(model.layout.leaves)[0]
    outer = gather_to_consumers(leaves, fill(*model.params.hold_outer(params)))
    return ShardedParams(drop_frozen(leaves, outer), keep_frozen(leaves, outer)), model.params.hold_layers(params)


def through_stages(
    execute: Callable, model: ShardedModel, outer: ShardedParams, layers: ShardedParams, batch, key, **how
):
    """The executor's `pipeline_gradients` or `pipeline_loss` on this model, for one pass of its micro-batches."""

    def first(trainable, micro):
        return model.embed(ShardedParams(trainable, outer.stored), micro, key)

    schedule = model.schedule
    assert schedule is not None  # under pp there is one

    def layer(trainable, fixed, micro, x, model=model):
        stored, index = fixed
        return model.block(ShardedParams(trainable, stored), x, index, micro, key)

    def last(trainable, x, micro):
        return model.loss(ShardedParams(trainable, outer.stored), x, micro, key)

    return execute(
        Stages(first, layer, last, passing=partial(layer, model=model.weighted(None))),
        schedule,
        outer.trainable,
        layers.trainable,
        cut(batch, schedule.num_microbatches),
        fixed=(layers.stored, layer_numbers(model)),
        num_layers=model.part_layers,
        **how,
    )


def layer_numbers(model: ShardedModel) -> jax.Array:
    """The number of the layer in each row of this stage's stacked leaves; -1 pads."""
    leaf = jax.tree.leaves(split_outer(model.layout.leaves)[1])[0]
    rows = jnp.asarray(leaf.rows).reshape(model.layout.mesh.pp, -1)
    return comm.varying(rows, "pp")[comm.rank("pp")]
