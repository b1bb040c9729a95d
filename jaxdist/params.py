"""Parameters: what is declared of one, and trees of them by name."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxdist.errors import ConfigError

STACKED = "blocks"  # the subtree of a parameter tree whose leaves carry a leading layer dim
Tree = Mapping[str, Any]


@dataclass(frozen=True)
class Param:
    """A parameter: its global shape, a logical name (or None) for each dim, and how its values start.

    dims: `jaxdist.mesh.MESH_AXES` says which names are split over which axis: "vocab", "heads" and "ffn" over tp.
    partial: names whose axes' ranks each use all of it, so that its gradient is a sum over them: "heads" of a norm that
    every head applies.
    mean, std: of the initial values, which are normal; a norm's scale has mean 1 and std 0.
    decay: whether weight decay applies; None: to leaves of two or more dims. real: where fewer than all rows of dim 0
    are real (a padded vocabulary), how many; the others are 0, and nothing may depend on them.
    frozen: training leaves it as it is: it has no gradient, no master copy, no moments, and nothing of these is sent.
    matrix: "in", "out" or None for each dim: whether it belongs to a matrix's input or output, or numbers matrices, as
    experts do; for optimizers that update matrices. () for none. None: two dims of a layer are a matrix, and fewer, or
    those outside the layers, are not.
    update: how a step changes it: "gradient", by the optimiser; "count", to what the model counted in the step with
    `Context.count`; "balance", by `rate` against the sign of what it counted. A count is a sum over all ranks, as a
    gradient is, but no part of the gradient's norm.
    """

    shape: tuple[int, ...]
    dims: tuple[str | None, ...] = ()
    mean: float = 0.0
    std: float = 0.02
    decay: bool | None = None
    real: int | None = None
    partial: tuple[str, ...] = ()
    frozen: bool = False
    matrix: tuple[str | None, ...] | None = None
    update: str = "gradient"
    rate: float = 0.0

    def __post_init__(self):
        if self.decay is None:
            object.__setattr__(self, "decay", len(self.shape) > 1)
        if not self.dims:
            object.__setattr__(self, "dims", (None,) * len(self.shape))
        if len(self.dims) != len(self.shape) or min(self.shape, default=1) < 1:
            raise ConfigError(
                f"a parameter of shape {self.shape} with dims {self.dims}",
                "must have a name or None for each dim, of at least one element",
                "Write Param((256, 1024), ('embed', 'ffn'))",
            )
        if self.matrix and (len(self.matrix) != len(self.shape) or {*self.matrix} | {None} != {"in", "out", None}):
            raise ConfigError(
                f"a parameter of shape {self.shape} with matrix={self.matrix}",
                "must have in, out or None for each dim, and both an in and an out",
                "Write Param((256, 4, 64), matrix=('in', 'out', 'out')), or matrix=() for none",
            )

    @property
    def size(self) -> int:
        """Elements, without rows that pad a vocabulary."""
        return math.prod(self.shape if self.real is None else (self.real, *self.shape[1:]))

    def draw(self, noise: jax.Array) -> jax.Array:
        """The values that standard normal noise of the parameter's shape gives."""
        values = self.mean + self.std * noise
        return values if self.real is None else mask_rows(values, self.real)


def mask_rows(values: jax.Array, real: int) -> jax.Array:
    """The values, with 0 in the rows from `real` on."""
    rows = jnp.arange(values.shape[0]).reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(rows < real, values, 0)


def named_params(tree: Tree) -> list[tuple[str, Param]]:
    """(path, parameter) of every leaf, the path as in `blocks.attention.w_out`."""
    return [(joined(path), leaf) for path, leaf in jax.tree.leaves_with_path(tree)]


def joined(path: jax.tree_util.KeyPath) -> str:
    """The name of a leaf. Keys of a list's members are numbers."""
    return jax.tree_util.keystr(path, simple=True, separator=".")
