"""What a model's functions use of its parameters, and what they cost: found by tracing them on one rank."""

from functools import cache, partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxdist.mesh import MeshShape, make_abstract_mesh
from jaxdist.models.base import Model, declare, split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.models.declared import abstract_values
from jaxdist.models.results import require_results
from jaxdist.parallel.pipeline.split_backward import needed_for, variables
from jaxdist.parallel.products import flops_of
from jaxdist.params import STACKED, named_params


@cache
def parts_using(model: Model) -> dict[str, frozenset[str]]:
    """Which of "embed" and "loss" use each parameter outside the layers, by path; found by tracing both on one rank."""
    one = _OneRank(model)
    names = [name for name, _ in named_params({name: declare(model)[name] for name in one.outer})]
    used = {
        "embed": _used_inputs(one.embed, one.outer, one.batch)[: len(names)],
        "loss": _used_inputs(one.loss, one.outer, one.x, one.batch)[: len(names)],
    }
    return {name: frozenset(part for part in used if used[part][i]) for i, name in enumerate(names)}


@cache
def head_in_layers(model: Model) -> float:
    """FLOPs of the loss in units of one block's, by which `stages="balanced"` divides the layers: what the model says,
    or those of products alone, by tracing both on one rank."""
    if model.head_in_layers is not None:
        return model.head_in_layers
    one = _OneRank(model)
    loss = jax.make_jaxpr(one.loss)(one.outer, one.x, one.batch)
    block = jax.make_jaxpr(one.block)(one.blocks, one.x, one.batch)
    return flops_of(loss) / flops_of(block)


class _OneRank:
    """A model's functions on a mesh of one rank, and the shapes of what they take."""

    def __init__(self, model: Model):
        values = abstract_values(model, jnp.float32)
        self.model, self.outer = model, {name: part for name, part in values.items() if name != STACKED}
        self.blocks = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), values[STACKED])
        tokens = jax.ShapeDtypeStruct((1, model.seq_len), jnp.int32)
        self.batch = Batch(tokens, tokens, jax.ShapeDtypeStruct((1,), jnp.int32))
        mesh = make_abstract_mesh(MeshShape())
        mapped = partial(jax.shard_map, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())
        self.embed = mapped(lambda outer, batch: model.embed(Context(rows_B=batch.rows), outer, batch))
        self.loss = mapped(lambda outer, x, batch: model.loss(Context(rows_B=batch.rows), outer, x, batch))
        self.block = mapped(self._block)
        checked = mapped(lambda *args: require_results(model, lambda _: Context(rows_B=args[-1].rows), *args))
        with jax.enable_x64(False):  # where it is on, parameters may be of 64 bits, and these are not
            self.x = jax.eval_shape(checked, self.outer, self.blocks, self.batch)

    def _block(self, blocks, x, batch):
        ctx = Context(rows_B=batch.rows)
        for index, (kind, params) in enumerate(zip(self.model.kinds, split_kinds(self.model, blocks), strict=True)):
            x = self.model.layer(ctx, kind, params, x, jnp.int32(index))
        return x


def _used_inputs(function, *args) -> list[bool]:
    """Which of a function's flat inputs its result depends on."""
    closed = jax.make_jaxpr(function)(*args)
    # Inside the one equation that is the mapped function.
    [mapped] = [eqn for eqn in closed.jaxpr.eqns if eqn.primitive.name == "shard_map"]
    inner = getattr(mapped.params["jaxpr"], "jaxpr", mapped.params["jaxpr"])
    needed = needed_for(inner.outvars, inner.eqns)
    read = {v for eqn in needed for v in variables(eqn.invars)} | set(variables(inner.outvars))
    place = {outside: inside for outside, inside in zip(mapped.invars, inner.invars, strict=True)}
    return [place.get(v) in read for v in closed.jaxpr.invars]
