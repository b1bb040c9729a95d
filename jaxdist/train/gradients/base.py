"""What the gradient engines share: a model bound to its layout, micro-batches, and the reduction after backward."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from jaxdist.config import RunConfig
from jaxdist.layout import Layout, ShardedParams, drop_frozen, fill, keep_frozen, split_outer
from jaxdist.mesh import WORK_AXES
from jaxdist.models.base import split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.overlap import order_after
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.reduce import reduce_gradients
from jaxdist.parallel.remat import Made, SavePolicy
from jaxdist.parallel.zero import Sharded
from jaxdist.params import STACKED
from jaxdist.strategy import ParallelConfig

Poison = Callable[[dict], dict]


class Gradients(NamedTuple):
    """What an engine gives: gradients in the storage layout, summed over ranks; this rank's summed loss; of each leaf,
    whether its local gradient was finite before the sum."""

    grads: dict
    loss_sum: jax.Array
    finite: dict


class Engine(NamedTuple):
    """gradients(model, params, batch, key, weight, poison) -> Gradients, of `weight` times the summed loss of this
    rank's rows, and of auxiliary losses where the model is `weighted`. evaluate(model, params, batch) -> the
    summed loss of this rank's rows, without dropout.

    params: as the state has them. key: of the step's dropout, or None. poison: local gradients -> local gradients.
    """

    gradients: Callable[..., Gradients]
    evaluate: Callable[..., jax.Array]


@dataclass(frozen=True)
class Replicated:
    """Parameters that every rank holds whole, but for what tp and pp split; those of ZeRO-2 and 3:
    `jaxdist.parallel.zero.Sharded`."""

    layout: Layout
    sum_dtype: str

    def hold_outer(self, params: dict) -> ShardedParams:
        """The parameters outside the layers, as they are differentiated."""
        return self._hold(*(split_outer(tree)[0] for tree in (self.layout.leaves, params)))

    def hold_layers(self, params: dict) -> ShardedParams:
        """All layers, stacked, as they are differentiated."""
        return self._hold(*(split_outer(tree)[1] for tree in (self.layout.leaves, params)))

    def _hold(self, leaves: dict, params: dict) -> ShardedParams:
        return ShardedParams(drop_frozen(leaves, params), keep_frozen(leaves, params))

    def outer_sums(self, params: dict) -> dict:
        """Arrays like the sums of gradients outside the layers."""
        return split_outer(drop_frozen(self.layout.leaves, params))[0]

    def unshard_outer(self, outer: ShardedParams, user: str) -> dict:
        """Whole parameters of those outside the layers, or those that `user`, "embed" or "loss", uses."""
        return fill(*outer)

    def unshard_layer(self, params: ShardedParams) -> dict:
        """Whole parameters of one layer."""
        return fill(*params)

    def scatter(self, leaves: dict, grads: dict) -> dict:
        """Local gradients, in the dtype of sums."""
        return jax.tree.map(lambda g: g.astype(self.sum_dtype), grads)


@dataclass(frozen=True)
class ShardedModel:
    """A model on its layout: `embed`, `layer` and `loss` take parameters as they are held, and unshard them first.

    ctx: what a run tells the model, without dropout. reduce_dtype, sum_dtype: in which gradients are summed over ranks
    and over micro-batches. remat_every, repeated, regathers: what backward runs again: as in `ParallelConfig`; arrays
    by what makes them; weights' gathers. unrolls: whether a loop over all layers is written out. schedule, part_layers:
    of a pipeline; None and () elsewhere.
    """

    config: RunConfig
    layout: Layout
    ctx: Context
    params: Replicated | Sharded
    reduce_dtype: str
    sum_dtype: str
    remat_every: int
    repeated: frozenset[Made]
    regathers: bool
    unrolls: bool
    schedule: Schedule | None
    part_layers: tuple[int, ...]

    def cast(self, params: dict) -> dict:
        """Parameters typed varying over the axes of their gradients' sums, so that backward leaves these to us."""
        return jax.tree.map(lambda leaf, x: comm.varying(x, leaf.reduce_axes), self.layout.leaves, params)

    def own_tokens(self, batch: Batch) -> Batch:
        """The batch with the inputs and targets at this rank's positions alone. Sends nothing."""
        return batch._replace(inputs=self.ctx.split.cut(batch.inputs), targets=self.ctx.split.cut(batch.targets))

    def weighted(self, weight: jax.Array | None) -> "ShardedModel":
        """The same where a gradient is taken, of `weight` times each auxiliary loss. None: where none is."""
        return replace(self, ctx=replace(self.ctx, weight=weight))

    def context(self, key: jax.Array | None, batch: Batch) -> Context:
        return replace(self.ctx, key=key, rows_B=batch.rows, starts_BT=batch.starts)

    def embed(self, outer: ShardedParams, batch: Batch, key) -> jax.Array:
        ctx = self.context(key, batch).at(0).watching("embed")
        with jax.named_scope("embed"):
            return ctx.observe("out", self.config.model.embed(ctx, self.params.unshard_outer(outer, "embed"), batch))

    def block(self, params: ShardedParams, x: jax.Array, index: jax.Array, batch: Batch, key) -> jax.Array:
        """The layers of one block: one of each kind."""
        return self.whole_block(self.params.unshard_layer(params), x, index, batch, key)

    def whole_block(self, weights: dict, x: jax.Array, index: jax.Array, batch: Batch, key) -> jax.Array:
        """`block` with weights that are whole already."""
        model = self.config.model
        for i, (kind, params) in enumerate(zip(model.kinds, split_kinds(model, weights), strict=True)):
            layer = index if len(model.kinds) == 1 else index * len(model.kinds) + i
            ctx = self.context(key, batch).at(1).at(layer).watching("layer", layer)
            with jax.named_scope(kind):
                x = ctx.observe("out", model.layer(ctx, kind, params, ctx.observe("in", x), layer))
        return x

    def loss(self, outer: ShardedParams, x: jax.Array, batch: Batch, key) -> jax.Array:
        """The summed loss. Its backward follows at once: the weights that ZeRO-3 gathers stay until then.

        In chunks it makes its gradients on the way (`jaxdist.parallel.chunked_loss`), which nothing may keep twice.
        """

        def loss(outer, x):
            ctx = self.context(key, batch).at(2).watching("loss")
            x = ctx.observe("in", x)
            with jax.named_scope("loss"):
                return ctx.observe(
                    "sum", self.config.model.loss(ctx, self.params.unshard_outer(outer, "loss"), x, batch)
                )

        return (loss if self.ctx.loss_chunks > 1 else self.ctx.checkpointed(loss))(outer, x)

    @cached_property
    def policy(self) -> SavePolicy:
        """What backward saves of a layer that is not recomputed as a whole."""
        return SavePolicy(self.regathers, self.ctx.selective, self.repeated)


def dropout_key(config: RunConfig, step: jax.Array) -> jax.Array | None:
    """The key of one step; None where there is no dropout."""
    return random.fold_in(random.key(config.seed), step) if config.model.dropout else None


def cut(batch: Batch, num_parts: int) -> Batch:
    """[B, ...] -> [num_parts, B / num_parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)


def sum_over_micro_batches(model: ShardedModel, one: Callable, batch: Batch, like: dict, weight) -> tuple:
    """(gradients, loss) of `one(micro)` summed over the `accumulate` parts of the batch, in the dtype of the sums.

    like: arrays of the gradients' shapes and types.
    """
    num_micro = model.config.parallel.accumulate
    if num_micro == 1:
        grads, loss_sum = one(batch)
        return jax.tree.map(lambda g: g.astype(model.sum_dtype), grads), loss_sum

    def body(carry, micro):
        grads, loss_sum = one(micro)
        summed = jax.tree.map(lambda total, g: total + g.astype(total.dtype), carry[0], grads)
        return (summed, carry[1] + loss_sum), None

    zeros = jax.tree.map(lambda x: comm.varying_like(jnp.zeros(x.shape, model.sum_dtype), x), like)
    start = (zeros, comm.varying(jnp.zeros((), weight.dtype), WORK_AXES))
    return lax.scan(body, start, cut(batch, num_micro))[0]


def reduced(model: ShardedModel, grads: dict, loss_sum: jax.Array, poison: Poison | None) -> Gradients:
    """Local sums -> what the optimiser gets, by the gradient rule (`jaxdist.parallel.reduce`)."""
    if poison is not None:
        grads = poison(grads)
    finite = all_finite(grads)
    layout = model.layout.trained
    grads = order_after_finite_check(grads, finite, model.config.parallel)
    return Gradients(reduce_gradients(grads, layout, model.reduce_dtype), loss_sum, finite)


def all_finite(tree):
    """For each leaf, whether all its local elements are finite."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


def order_after_finite_check(grads: dict, finite: dict, parallel: ParallelConfig) -> dict:
    """The gradients, to be sent once `finite` is known of each, where they are sums over micro-batches.

    Otherwise a GPU's compiler checks them while messages are in flight, and keeps whole sums beside their shards.
    (Those of one micro-batch are cast on their way into a message; waiting would make a copy of all of them.)
    """
    if parallel.accumulate == 1 or parallel.mesh.num_devices == 1:
        return grads
    return jax.tree.map(order_after, grads, finite)


def join(outer: dict, layers: dict) -> dict:
    """Undo `split_outer`."""
    return {**outer, STACKED: layers}
