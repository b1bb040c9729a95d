"""A Flax module as a `Model`: each call binds it to the weights of that call, whole or shards."""

from abc import abstractmethod
from functools import cache

import jax
from flax import nnx
from jax import random

from jaxdist.errors import ConfigError
from jaxdist.models.base import Model, split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.models.flax import LanguageModel, require_parameters_alone
from jaxdist.params import Param, Tree


class FlaxModel(Model):
    """The sizes of a model that a `LanguageModel` computes: each function binds the weights that it is given to it."""

    @abstractmethod
    def module(self, rngs: nnx.Rngs) -> LanguageModel:
        """The whole model."""

    def outer(self) -> Tree:
        return _parts(self)[None][1]

    def block(self, kind: str) -> Tree:
        return _parts(self)[kind][1]

    def initial_values(self, seed) -> dict:
        return nnx.to_pure_dict(nnx.state(self.module(nnx.Rngs(random.key(seed))), nnx.Param))

    def bind(self, params: Tree, kind: str | None = None):
        """A layer of this kind with these local weights; with None the whole model without its layers."""
        return nnx.merge(_parts(self)[kind][0], params)

    def embed(self, ctx: Context, outer: Tree, batch: Batch) -> jax.Array:
        return self.bind(outer).embed(batch.inputs, ctx)

    def layer(self, ctx: Context, kind: str, params: Tree, x_BTD: jax.Array, index: jax.Array) -> jax.Array:
        return self.bind(params, kind)(x_BTD, ctx)

    def head(self, ctx: Context, outer: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.bind(outer).unembed(x_BTD, ctx)


@cache
def _parts(model: FlaxModel) -> dict[str | None, tuple[nnx.GraphDef, dict]]:
    """(graph, declared parameters) of a layer of each kind and, under None, of the model without its layers."""
    module = nnx.eval_shape(lambda: model.module(nnx.Rngs(0)))
    if getattr(module, "blocks", None) is None:
        reason = f"must give a module whose `blocks` are its layers, and gives {type(module).__name__} without"
        raise ConfigError(f"`module` of {type(model).__name__}", reason, "Make them with stack_layers")
    require_parameters_alone(module)
    layers = split_kinds(model, module.blocks)
    del module.blocks

    def divided(module: nnx.Module, num_stacked: int) -> tuple[nnx.GraphDef, dict]:
        def declared(variable: nnx.Param) -> Param:
            if variable.shape[:num_stacked] != (model.num_blocks,) * num_stacked:
                raise ConfigError(
                    f"a parameter of shape {variable.shape} in the blocks of {type(model).__name__}",
                    f"must have a leading dim of {model.num_blocks} blocks",
                    "Make them with stack_layers",
                )
            return getattr(variable, "declaration", None) or Param(variable.shape[num_stacked:])

        graph, params = nnx.split(module)
        return graph, nnx.to_pure_dict(params, declared)

    by_kind = dict(zip(model.kinds, layers, strict=True))
    return {None: divided(module, 0), **{kind: divided(layer, 1) for kind, layer in by_kind.items()}}
