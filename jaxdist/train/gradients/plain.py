"""Gradients by `jax.grad` of a scan over layers, micro-batch after micro-batch.

Parameters are cast to varying over every axis that splits the tokens once, before the loop, so no reduction is left
inside it; gradients are summed over ranks after it. ZeRO-2 and 3 alone reduce inside, over dp, because they keep no
whole gradient.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.layout import ShardedParams, split_outer
from jaxdist.models.context import Batch
from jaxdist.train.gradients.base import Gradients, Poison, ShardedModel, join, reduced, sum_over_micro_batches


def gradients(model: ShardedModel, params: dict, batch: Batch, key, weight, poison: Poison | None) -> Gradients:
    return reduced(model, *local_gradients(model, params, batch, key, weight), poison)


def local_gradients(model: ShardedModel, params: dict, batch: Batch, key, weight) -> tuple[dict, jax.Array]:
    """(this rank's sums, its loss) before they are reduced over ranks."""
    outer_leaves, _ = split_outer(model.layout.trained.leaves)
    params = model.cast(params)
    layers = model.params.hold_layers(params)

    def one(micro: Batch) -> tuple[dict, jax.Array]:
        outer = model.params.hold_outer(params)

        def weighted(outer_trainable, layers_trainable):
            held = outer._replace(trainable=outer_trainable), layers._replace(trainable=layers_trainable)
            total = summed_loss(model, *held, micro, key)
            return total * weight, total

        (d_outer, d_layers), total = jax.grad(weighted, argnums=(0, 1), has_aux=True)(outer.trainable, layers.trainable)
        model.policy.require_seen(model.config.parallel.remat)
        return join(model.params.scatter(outer_leaves, d_outer), d_layers), total

    like = join(model.params.outer_sums(params), layers.trainable)
    return sum_over_micro_batches(model, one, batch, like, weight)


def summed_loss(model: ShardedModel, outer: ShardedParams, layers: ShardedParams, batch: Batch, key) -> jax.Array:
    """The model's forward on this rank's rows."""
    x = model.embed(outer, batch, key)
    x = scan_blocks(model, layers, x, batch, key)
    return model.loss(outer, x, batch, key)


def scan_blocks(model: ShardedModel, layers: ShardedParams, x: jax.Array, batch: Batch, key) -> jax.Array:
    """Through all layers: x -> x in the same layout.

    Where they are written out, a barrier keeps XLA from holding for backward what the policy does not keep: around a
    layer's input, and around its parameters only where they are gathered, since it copies each out of its stack.
    """
    every, unroll = model.remat_every, model.unrolls
    barrier = (True, model.layout.params_sharded) if unroll else False

    def body(x, row):
        params, index = row
        return model.block(params, x, index, batch, key), None

    if barrier:
        # A call keeps the constants that a custom gradient makes. JAX (0.10 to 0.12) takes those of a checkpointed
        # function for arguments, for which a tuple of barriers has no entries, and stops at an assertion.
        body = jax.jit(body)
    body = jax.checkpoint(body, policy=None if every == 1 else model.policy, prevent_cse=barrier)
    rows = (layers, jnp.arange(model.config.model.num_blocks))
    if every <= 1:
        return lax.scan(body, x, rows, unroll=unroll)[0]
    groups = jax.tree.map(lambda x: x.reshape(-1, every, *x.shape[1:]), rows)
    recomputed = jax.checkpoint(lambda x, group: lax.scan(body, x, group, unroll=unroll), prevent_cse=barrier)
    return lax.scan(recomputed, x, groups, unroll=unroll)[0]


def evaluate(model: ShardedModel, params: dict, batch: Batch) -> jax.Array:
    return summed_loss(model, model.params.hold_outer(params), model.params.hold_layers(params), batch, None)
