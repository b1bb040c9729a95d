"""What a model's functions return, against what `Model` says of them: refused by name before anything runs."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.layout import Leaf
from jaxdist.models.base import Model, split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.parallel.collectives import varying_axes
from jaxdist.params import Tree, joined


def require_results(model: Model, at: Callable[[int], Context], outer: Tree, block: Tree, batch: Batch) -> jax.Array:
    """Call each of a model's functions once, inside a trace of `jax.shard_map`; what `embed` gives.

    at: the context of the embedding, 0, of layers, 1, and of the loss, 2. block: the weights of one block.
    Raises: ConfigError for a result that is not what the next function or a gradient takes.
    """
    own = of_adapters(model)
    x = model.embed(at(0), outer, batch)
    _require(own, "embed", "one floating-point array x[B, T, D]", x, _is_floating(x))
    layers = dict(zip(model.kinds, split_kinds(model, block), strict=True))
    for index, kind in enumerate(layers):
        y = model.layer(at(1).at(index), kind, layers[kind], x, jnp.int32(index))
        name, said = "layer" + f" of kind {kind!r}" * (len(layers) > 1), f"x as it takes it, {_text(x)}"
        _require(own, name, said, y, _is_floating(y) and (y.shape, y.dtype) == (x.shape, x.dtype))
        if apart := sorted(varying_axes(y) - varying_axes(x)):
            raise ConfigError(
                f"what `{name}` of {type(own).__name__} returns",
                f"must be equal on all ranks of {', '.join(apart)}, as the x that it takes is",
                "Add the ranks' parts up, with ctx.row_parallel",
            )
    if type(own).loss is Model.loss:
        pair = model.head(at(2), outer, x)
        two = isinstance(pair, tuple | list) and len(pair) == 2 and all(map(_is_floating, pair))
        fits = two and pair[1].ndim == 2 and pair[0].shape[-1] == pair[1].shape[-1]
        name = "unembed" if hasattr(own, "module") else "head"
        _require(own, name, "two floating-point arrays, x[B, T, D] and table[V, D]", pair, fits)
    loss = model.loss(at(2), outer, x, batch)
    _require(own, "loss", "one floating-point number, the summed loss", loss, _is_floating(loss) and not loss.shape)
    return x


def require_values(model: Model, leaves: Sequence[Leaf]) -> None:
    """Look at the shapes of a model's initial values. leaves: what it declares.

    Raises: ConfigError where they are of other parameters, of another shape, or integers that would be trained.
    """
    of, values = type(of_adapters(model)).__name__, jax.eval_shape(model.initial_values, 0)
    given = {joined(path): value for path, value in jax.tree.leaves_with_path(values)}
    if other := sorted(given.keys() ^ {leaf.name for leaf in leaves}):
        raise ConfigError(
            f"`initial_values` of {of} {'with' if other[0] in given else 'without'} {other[0]}",
            "must give a value of each declared parameter and of no other",
            f"{'Leave it out' if other[0] in given else 'Add it'}, or declare it otherwise",
        )
    for leaf in leaves:
        value = given[leaf.name]
        if value.shape != leaf.shape:
            raise ConfigError(
                f"{leaf.name} of {list(value.shape)} from `initial_values` of {of}",
                f"must be of the shape that is declared, {list(leaf.shape)}",
                "Give it that shape",
            )
        fixed = leaf.param.frozen or leaf.param.update == "count"
        if not fixed and not jnp.issubdtype(value.dtype, jnp.floating):
            raise ConfigError(
                f"parameter {leaf.name} of {value.dtype}",
                "must begin as floating-point numbers, since it is trained",
                "Give it such values, or declare it frozen=True",
            )


def of_adapters(model: Model) -> Model:
    """The model that adapters are of (`jaxdist.models.lora`); itself where there are none."""
    return getattr(model, "base", model)


def _is_floating(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.floating) and jnp.issubdtype(x.dtype, jnp.floating)


def _require(model: Model, name: str, what: str, found: Any, fits: bool) -> None:
    if not fits:
        raise ConfigError(
            f"`{name}` of {type(model).__name__} returns {_text(found)}", f"must return {what}", f"Mend `{name}`"
        )


def _text(found: Any) -> str:
    """A result in a few words: float32[2,16,64], None, (float32[], int32[4])."""
    if isinstance(found, tuple | list):
        return f"({', '.join(map(_text, found))})"
    if isinstance(found, jax.Array | np.ndarray | np.generic):
        return f"{found.dtype}{list(found.shape)}".replace(" ", "")
    return "None" if found is None else f"a {type(found).__name__}"
