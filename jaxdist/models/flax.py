"""A model whose parameters are declared by Flax NNX modules, at global shape, and that runs them on local shards."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache

import jax
from flax import nnx
from jax import random

from jaxdist.models.base import STACKED, Model, Param, Tree


def parameter(
    value: jax.Array,
    dims: tuple[str | None, ...] = (),
    *,
    decay: bool | None = None,
    mean: float = 0.0,
    real: int | None = None,
) -> nnx.Param:
    """Declare a parameter by its initial value (fp32, global shape); the rest as in `Param`."""
    return nnx.Param(value, dims=dims, decay=decay, mean=mean, real=real)


class FlaxModel(Model):
    """Give `outer_module` and `layer_module`; in `embed`, `layer` and `loss` call `merge` to have them again."""

    @abstractmethod
    def outer_module(self, rngs: nnx.Rngs) -> nnx.Module:
        """What stands outside the layers."""

    @abstractmethod
    def layer_module(self, rngs: nnx.Rngs) -> nnx.Module:
        """One layer."""

    def outer(self) -> Tree:
        return _declared(self.outer_module)

    def block(self) -> Tree:
        return _declared(self.layer_module)

    def initial_values(self, seed) -> dict:
        rngs = nnx.Rngs(random.key(seed))
        outer = self.outer_module(rngs)
        layers = nnx.split_rngs(splits=self.num_layers)(nnx.vmap(self.layer_module, in_axes=(0,), out_axes=0))(rngs)
        return {**_values(outer), STACKED: _values(layers)}

    def merge(self, make: Callable[[nnx.Rngs], nnx.Module], params: Tree) -> nnx.Module:
        """The module that `make` (`self.outer_module`, say) declares, with these local parameters."""
        return nnx.merge(_graph(make), params)


@cache
def _graph(make: Callable) -> nnx.GraphDef:
    return nnx.split(_abstract(make))[0]


def _abstract(make: Callable) -> nnx.Module:
    return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def _declared(make: Callable) -> dict:
    tree: dict = {}
    for path, variable in nnx.to_flat_state(nnx.state(_abstract(make), nnx.Param)):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        meta = variable.get_metadata()
        node[str(path[-1])] = Param(
            variable.shape, meta.get("dims", ()), meta.get("mean", 0.0), decay=meta.get("decay"), real=meta.get("real")
        )
    return tree


def _values(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
