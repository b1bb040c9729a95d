"""A model whose parameters are declared by Flax NNX modules, at global shape, and that runs them on local shards."""

from abc import abstractmethod
from collections.abc import Callable
from functools import cache

import jax
from flax import nnx
from jax import random

from jaxdist.errors import ConfigError
from jaxdist.models.base import Model, merge_kinds
from jaxdist.params import STACKED, Param, Tree


def parameter(
    value: jax.Array,
    dims: tuple[str | None, ...] = (),
    *,
    decay: bool | None = None,
    mean: float = 0.0,
    real: int | None = None,
    partial: tuple[str, ...] = (),
    frozen: bool = False,
    update: str = "gradient",
    rate: float = 0.0,
) -> nnx.Param:
    """Declare a parameter by its initial value (fp32, global shape); the rest as in `Param`."""
    rest = {"partial": partial, "frozen": frozen, "update": update, "rate": rate}
    return nnx.Param(value, dims=dims, decay=decay, mean=mean, real=real, **rest)


class FlaxModel(Model):
    """Implement `outer_module` and `layer_module`; `merge` makes them again in `embed`, `layer` and `head`."""

    @abstractmethod
    def outer_module(self, rngs: nnx.Rngs) -> nnx.Module:
        """The module of the parameters outside the layers."""

    @abstractmethod
    def layer_module(self, rngs: nnx.Rngs, kind: str) -> nnx.Module:
        """One layer of this kind."""

    def outer(self) -> Tree:
        return _declared(self.outer_module)

    def block(self, kind: str) -> Tree:
        return _declared(self.layer_module, kind)

    def initial_values(self, seed) -> dict:
        rngs = nnx.Rngs(random.key(seed))
        outer = self.outer_module(rngs)

        def stacked(kind: str) -> dict:
            make = nnx.vmap(lambda rngs: self.layer_module(rngs, kind), in_axes=(0,), out_axes=0)
            return _values(nnx.split_rngs(splits=self.num_blocks)(make)(rngs))

        return {**_values(outer), STACKED: merge_kinds(self, [stacked(kind) for kind in self.kinds])}

    def merge(self, make: Callable[..., nnx.Module], params: Tree, *args) -> nnx.Module:
        """The module that `make` (`self.outer_module`, say, after rngs called with `args`) declares, with these local
        parameters."""
        return nnx.merge(_graph(make, *args), params)


@cache
def _graph(make: Callable, *args) -> nnx.GraphDef:
    return nnx.split(_abstract(make, *args))[0]


def _abstract(make: Callable, *args) -> nnx.Module:
    return nnx.eval_shape(lambda: make(nnx.Rngs(0), *args))


def _declared(make: Callable, *args) -> dict:
    tree, module = {}, _abstract(make, *args)
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param))):
        raise ConfigError(
            f"{type(variable).__name__} {'.'.join(map(str, path))} of {type(module).__name__}",
            "a module must hold parameters alone: what else it keeps would not be carried from step to step",
            "Leave it out; Context.dropout draws masks, and Param(update='count') counts",
        )
    for path, variable in nnx.to_flat_state(nnx.state(module, nnx.Param)):
        node = tree
        for name in path[:-1]:
            node = node.setdefault(str(name), {})
        meta = variable.get_metadata()
        node[str(path[-1])] = Param(
            variable.shape,
            meta.get("dims", ()),
            meta.get("mean", 0.0),
            decay=meta.get("decay"),
            real=meta.get("real"),
            partial=meta.get("partial", ()),
            frozen=meta.get("frozen", False),
            update=meta.get("update", "gradient"),
            rate=meta.get("rate", 0.0),
        )
    return tree


def _values(module: nnx.Module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))
