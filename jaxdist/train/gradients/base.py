"""What the gradient engines share: a model bound to its layout, micro-batches, and the reduction after backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax, random

from jaxdist.config import RunConfig
from jaxdist.layout import Layout, drop_frozen, fill, keep_frozen, split_outer
from jaxdist.mesh import WORK_AXES
from jaxdist.models.base import split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.grouping import all_gather_groups
from jaxdist.parallel.overlap import order_after
from jaxdist.parallel.reduce import reduce_gradients
from jaxdist.parallel.remat import SavePolicy, mark_saveable, read_arrays
from jaxdist.parallel.zero import ShardedParams, make_unshard, scatter_gradients, shard_proxies, whole_proxies
from jaxdist.params import STACKED
from jaxdist.probes import Probe, Recorder
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
class ShardedModel:
    """A model on its layout: `embed`, `layer` and `loss` take parameters as they are held, and unshard them first.

    ctx: what a run tells the model, without dropout. unrolls: whether a loop over all layers is written out.
    """

    config: RunConfig
    layout: Layout
    ctx: Context
    unrolls: bool

    @classmethod
    def of(
        cls,
        config: RunConfig,
        layout: Layout,
        attention: str,
        platform: str = "abstract",
        recorder: Recorder | None = None,
        draws_choices: bool = False,
    ) -> "ShardedModel":
        parallel = config.parallel
        ctx = Context(
            sp=parallel.sp,
            ring=parallel.ring,
            split=parallel.split,
            expert_axes=parallel.expert_axes,
            attention=attention,
            selective=parallel.remat == "selective",
            loss_chunks=parallel.loss_chunks,
            on_gpu=platform == "gpu",
            probe=None if recorder is None else Probe(recorder),
            draws_choices=draws_choices,
        )
        return cls(config, layout, ctx, parallel.unrolls(platform, config.model.num_layers))

    # ---- parameters ----

    def cast(self, params: dict) -> dict:
        """Parameters typed varying over the axes of their gradients' sums, so that backward leaves these to us."""
        return jax.tree.map(lambda leaf, x: comm.varying(x, leaf.reduce_axes), self.layout.leaves, params)

    def hold_layers(self, params: dict) -> ShardedParams:
        """All layers, stacked, as they are differentiated."""
        leaves, layers = split_outer(self.layout.leaves)[1], split_outer(params)[1]
        if not self.layout.grads_sharded:
            return ShardedParams(drop_frozen(leaves, layers), keep_frozen(leaves, layers))
        return ShardedParams(shard_proxies(drop_frozen(leaves, leaves), self.sum_dtype), layers)

    def hold_outer(self, params: dict) -> ShardedParams:
        """The parameters outside the layers, as they are differentiated: whole, or a whole proxy of what is gathered
        later."""
        leaves, outer = split_outer(self.layout.leaves)[0], split_outer(params)[0]
        if self.gathers_outer_twice:
            return ShardedParams(whole_proxies(drop_frozen(leaves, leaves), self.sum_dtype), outer)
        if self.layout.params_sharded:
            flat, treedef = jax.tree.flatten(leaves)
            whole = all_gather_groups(treedef.flatten_up_to(outer), flat, self.layout.bucket_bytes)
            outer = treedef.unflatten(whole)
        return ShardedParams(drop_frozen(leaves, outer), keep_frozen(leaves, outer))

    @property
    def gathers_outer_twice(self) -> bool:
        """Whether ZeRO-3 gathers what is outside the layers for the embedding and again for the loss. A pipeline, and
        a run that keeps weights after forward, gather it once."""
        parallel = self.config.parallel
        return self.layout.params_sharded and parallel.reshard_after_forward and parallel.mesh.pp == 1

    @property
    def sum_dtype(self) -> str:
        return self.config.precision.master_dtype

    def unshard_outer(self, outer: ShardedParams, user: str) -> dict:
        """Whole parameters of those outside the layers that `user`, "embed" or "loss", uses."""
        if not self.gathers_outer_twice:
            return fill(*outer)
        leaves, treedef = jax.tree.flatten(split_outer(self.layout.leaves)[0])
        used = [i for i, leaf in enumerate(leaves) if user in leaf.used_in]
        proxies, weights = (treedef.flatten_up_to(tree) for tree in outer)
        unshard = self._unshard([leaves[i] for i in used], whole_proxies=True)
        for i, whole in zip(used, unshard([proxies[i] for i in used], [weights[i] for i in used]), strict=True):
            weights[i] = whole
        return treedef.unflatten(weights)

    def unshard_layer(self, params: ShardedParams) -> dict:
        """Whole parameters of one layer."""
        if not self.layout.grads_sharded:
            return fill(*params)
        leaves, treedef = jax.tree.flatten(self.layer_leaves)
        weights = self._unshard(leaves)(*(None if tree is None else treedef.flatten_up_to(tree) for tree in params))
        if self.gathers_outer_twice and not self.config.parallel.overlap_layers:
            # Matrices are worth a second message; vectors are kept.
            weights = [mark_saveable(w) if leaf.small else w for leaf, w in zip(leaves, weights, strict=True)]
        return treedef.unflatten(weights)

    def _unshard(self, leaves: Sequence, **how):
        precision = self.config.precision
        return make_unshard(leaves, self.layout, precision.reduction_dtype, precision.master_dtype, **how)

    @property
    def layer_leaves(self) -> dict:
        """The leaves of one layer."""
        return jax.tree.map(lambda leaf: leaf.layer(), split_outer(self.layout.leaves)[1])

    def scatter(self, leaves: dict, grads: dict) -> dict:
        """Local gradients in the dtype of their sums; under ZeRO-2 and 3 the shards of their sum over dp."""
        flat, treedef = jax.tree.flatten(leaves)
        if not self.layout.grads_sharded:
            return jax.tree.map(lambda g: g.astype(self.sum_dtype), grads)
        given = treedef.flatten_up_to(grads)
        return treedef.unflatten(
            scatter_gradients(flat, self.layout, given, self.config.precision.reduction_dtype, self.sum_dtype)
        )

    # ---- the model's three functions ----

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
            return ctx.observe("out", self.config.model.embed(ctx, self.unshard_outer(outer, "embed"), batch))

    def block(self, params: ShardedParams, x: jax.Array, index: jax.Array, batch: Batch, key) -> jax.Array:
        """The layers of one block: one of each kind."""
        return self.whole_block(self.unshard_layer(params), x, index, batch, key)

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

        In chunks it makes its gradients on the way (`jaxdist.parallel.tensor.cross_entropy_in_chunks`), which nothing
        may keep twice.
        """

        def loss(outer, x):
            ctx = self.context(key, batch).at(2).watching("loss")
            x = ctx.observe("in", x)
            with jax.named_scope("loss"):
                return ctx.observe("sum", self.config.model.loss(ctx, self.unshard_outer(outer, "loss"), x, batch))

        return (loss if self.ctx.loss_chunks > 1 else self.ctx.checkpointed(loss))(outer, x)

    @cached_property
    def policy(self) -> SavePolicy:
        """What backward saves of a layer that is not recomputed as a whole."""
        regathers = self.layout.grads_sharded and (self.gathers_outer_twice or not self.layout.params_sharded)
        repeated = read_arrays(self.config.parallel.remat, self.config.rows)
        return SavePolicy(regathers, self.ctx.selective, repeated)


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
    return Gradients(reduce_gradients(grads, layout, model.config.precision.reduction_dtype), loss_sum, finite)


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
