"""One training step on local shards, inside one `jax.shard_map`: gradients, clipping, the update."""

from functools import partial

import jax
import jax.numpy as jnp
import optax

from jaxdist.layout import drop_frozen, fill
from jaxdist.mesh import AXES, TOKEN_AXES, WORK_AXES
from jaxdist.models.context import Batch
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.zero import gather_parameters, owned_shards
from jaxdist.train.gradients import engine_of
from jaxdist.train.gradients.base import ShardedModel, all_finite, dropout_key
from jaxdist.train.loss_scale import next_loss_scale
from jaxdist.train.state import State
from jaxdist.train.update import gradient_norms, update


def train_step(
    model: ShardedModel,
    optimizer: optax.GradientTransformation,
    state: State,
    batch: Batch,
    *,
    rate: optax.Schedule | None = None,
    with_gradients=False,
    poison=None,
):
    """(State, Batch) -> (State, metrics[, gradients before clipping, in the storage layout]).

    rate: the learning rate of a step, to be reported; the optimizer has its own.
    poison: (layout, step, local gradients) -> gradients, to rehearse a fault (`jaxdist.runtime.fault_injection`).
    A gradient that is not finite changes nothing but the step counter (and fp16's loss scale), on every rank.
    """
    config, layout = model.config, model.layout.trained

    # Gradients of the mean loss: a sum over targets, divided once by their global number. Auxiliary losses and counts
    # are sums over all tokens, whether they are targets or not, and are divided by the number of tokens.
    num_targets, batch = count_targets(model.own_tokens(batch))
    num_targets = num_targets.astype(model.sum_dtype)
    at_least_one = jnp.maximum(num_targets, 1)
    num_tokens = batch.targets.size * comm.size(TOKEN_AXES)
    scale = state.scale.scale if state.scale is not None else 1
    key = dropout_key(config, state.step)
    spoil = None if poison is None else partial(poison, layout, state.step)
    engine = engine_of(config.parallel)
    weight = jnp.asarray(scale / num_tokens, model.sum_dtype)
    weighted = model.weighted(jnp.where(num_targets >= 0, weight, 0))  # ordered after the count, as the inputs are
    grads, loss_sum, finite_leaves = engine.gradients(weighted, state.params, batch, key, scale / at_least_one, spoil)
    not_finite = flag_not_finite(all_finite(loss_sum), finite_leaves)
    grads = jax.tree.map(lambda g: g / scale, grads)
    loss = comm.all_reduce(loss_sum, WORK_AXES) / at_least_one

    # The norm of the whole gradient is equal on every rank, and so is the overflow flag made from it.
    norm, group_norms = gradient_norms(grads, layout)
    finite, at = jnp.isfinite(norm), state.step.astype(norm.dtype)

    # Update the shards this rank owns, then make the parameters of the next step from them.
    owned = state.master if state.master is not None else drop_frozen(model.layout.leaves, state.params)
    if state.master is None and layout.shards_update:
        owned = owned_shards(owned, layout)
    updated, moments = update(
        optimizer, layout, finite, grads, state.moments, owned, step=at, norm=norm, loss=loss, num_tokens=num_tokens
    )
    params = jax.tree.map(lambda p: p.astype(config.precision.dtype), updated)
    params = gather_parameters(params, layout) if layout.shards_update else params
    new_state = State(
        step=state.step + 1,
        params=fill(params, state.params),
        master=None if state.master is None else updated,
        moments=moments,
        scale=None if state.scale is None else next_loss_scale(state.scale, finite, config.precision),
    )
    metrics = {"loss": loss, "grad_norm": norm, "tokens": num_targets, "not_finite": not_finite}
    metrics["group_norms"] = group_norms
    if rate is not None:
        metrics["lr"] = jnp.asarray(rate(at), norm.dtype)
    if state.scale is not None:
        metrics["loss_scale"] = state.scale.scale
    return (new_state, metrics, grads) if with_gradients else (new_state, metrics)


def evaluate(model: ShardedModel, params: dict, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed loss of a batch, without dropout, and the number of targets; equal on every rank."""
    num_targets, batch = count_targets(model.own_tokens(batch))
    total = engine_of(model.config.parallel).evaluate(model, params, batch)
    return comm.all_reduce(total, WORK_AXES), num_targets


def count_targets(batch: Batch) -> tuple[jax.Array, Batch]:
    """(number of targets of the whole global batch; the batch, which is there once they are counted).

    Nothing else orders the count and the forward's first collective, and simulated devices that begin with different
    ones wait for each other for ever: XLA:CPU has a thread for each, and a collective keeps it. A barrier is gone by
    then, so the inputs depend on the count.
    """
    here = jnp.sum(batch.targets >= 0)
    count = comm.all_reduce(here, TOKEN_AXES)
    return count, batch._replace(inputs=jnp.where(count >= 0, batch.inputs, 0))


def flag_not_finite(loss: jax.Array, grads: dict) -> jax.Array:
    """Which ranks made a non-finite number, before sums spread it: flags[1, 1 + leaves], the loss first.

    Layout: local -> flags[ranks, 1 + leaves] over all axes of the mesh, as `jaxdist.runtime.health.culprits` reads
    them. Sends: nothing. Under ZeRO-2 and 3 backward has summed already: the flag is of the rank that owns the shard.
    (With overlap that is so outside the layers alone.) Args: whether the loss, and each leaf of the gradient, is finite
    on this rank.
    """
    flags = [comm.varying(~finite, AXES) for finite in (loss, *jax.tree.leaves(grads))]
    return jnp.stack(flags)[None]
