"""What follows from a model's declaration: what may split it, how large it is, what decays."""

import math
from collections import Counter
from functools import cache

import jax

from jaxdist.errors import ConfigError, divisors
from jaxdist.mesh import AXIS_OF_DIM, MAY_STAY_WHOLE
from jaxdist.models.base import Model, declare
from jaxdist.params import named_params
from jaxdist.strategy import ParallelConfig

# Far above what anybody trains (1T parameters: 128 layers x 25,600), and low enough that products stay meaningful.
BOUNDS = {
    "num_layers": 2**14,
    "width": 2**20,
    "num_heads": 2**16,
    "ffn_width": 2**22,
    "seq_len": 2**24,
    "vocab_size": 2**31 - 1 - 2**17,  # tokens are 32-bit integers, and the padded vocabulary too
}


def check_split(model: Model, parallel: ParallelConfig) -> None:
    """Refuse what a model cannot be split into, by its own rules and by its parameters' dims.

    Raises: ConfigError where a mesh axis does not divide a dim that it shards, or has two of a parameter to shard.
    """
    model.check(parallel)
    _check_experts(model, parallel)
    for path, param in named_params(declare(model)):
        split = Counter(AXIS_OF_DIM[dim] for dim in param.dims if dim in AXIS_OF_DIM)
        for axis in (axis for axis, number in split.items() if number > 1 and getattr(parallel.mesh, axis) > 1):
            raise ConfigError(
                f"parameter {path} with dims {param.dims} over {axis}={getattr(parallel.mesh, axis)}",
                f"{axis} must split only one of them",
                "Name the others None",
            )
        for size, dim in zip(param.shape, param.dims, strict=True):
            axis = AXIS_OF_DIM.get(dim)
            if dim in ("layers", "experts") or dim in MAY_STAY_WHOLE or axis is None:
                continue
            if "experts" in param.dims and axis in parallel.expert_axes:
                continue
            if size % (ranks := getattr(parallel.mesh, axis)) == 0:
                continue
            raise ConfigError(
                f"{dim}={size} of parameter {path} over {axis}={ranks}",
                f"must be a multiple of {ranks}, so that each {axis} rank holds an equal part",
                f"Use a mesh whose {axis} divides {size}",
            )


def _check_experts(model: Model, parallel: ParallelConfig) -> None:
    """Refuse to split experts, over ep or tp, for a model that has none, or none to split so."""
    ranks = parallel.expert_ranks
    if ranks == 1:
        return
    tp = " and experts_over_tp=True" * parallel.experts_over_tp
    asked, over = f"ep={parallel.mesh.ep}{tp}", "ep x tp" if tp else "ep"
    numbers = [
        size
        for _, param in named_params(declare(model))
        for size, dim in zip(param.shape, param.dims, strict=True)
        if dim == "experts"
    ]
    if not numbers:
        instead = "Use ep=1" + ", experts_over_tp=False" * bool(tp)
        raise ConfigError(f"{asked} with {model.describe()}", f"must have experts, which {over} splits", instead)
    for number in numbers:
        if number % ranks:
            raise ConfigError(
                f"{asked} with {number} experts",
                f"each of {ranks} ranks of {over} must hold equally many",
                f"Use {over} in {divisors(number)}",
            )


def decay_mask(model: Model) -> dict:
    """Whether weight decay applies to each trained parameter, as optax's `mask` takes it: to matrices and tables, and
    not to vectors, which a layer's are although they are stacked."""
    return jax.tree.map(lambda p: None if p.frozen else p.decay, declare(model))


def abstract_values(model: Model, dtype: str) -> dict:
    """Shape and dtype of every parameter, at its global shape."""
    return jax.tree.map(lambda param: jax.ShapeDtypeStruct(param.shape, dtype), declare(model))


@cache
def num_parameters(model: Model, padded: bool = False) -> int:
    """All of them, with `padded` the rows that pad a vocabulary too; counters excluded."""
    params = [param for _, param in named_params(declare(model)) if param.update != "count"]
    return sum(math.prod(param.shape) if padded else param.size for param in params)
