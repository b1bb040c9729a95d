"""What a model is to everything else: parameters with logical dims, and three functions of their local shards.

A model is a frozen dataclass of its sizes that subclasses `Model`. Layouts, ZeRO, pipelines, checkpoints, proofs and
plans read nothing but what is declared here, so a model is one file.
"""

import dataclasses
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
from jax import random

from jaxdist.errors import ConfigError
from jaxdist.models.context import Batch, Context
from jaxdist.params import STACKED, Param, Tree, joined, named_params
from jaxdist.strategy import ParallelConfig


class Model(ABC):
    """A language model of `num_layers` layers; subclass it as a frozen dataclass that has these fields.

    `outer` and `block` declare parameters; `embed`, `layer` and `head` (or `loss`) compute on their local shards,
    inside `jax.shard_map`. All arrays a layer takes and gives have one shape and dtype. dropout: the largest rate used.
    splits_sequence: whether its layers compute with a part of the sequence, so that cp may split it: they have
    positions from the context, and nothing but `attend` mixes them.
    kinds: of the layers, in the order in which they repeat. One repeat is a block: the unit of pipelines' stages, of
    recomputation and of ZeRO-3's gathers.
    head_in_layers: FLOPs of the loss in units of one block's; None: as `jaxdist.models.traced` finds.
    """

    num_layers: int
    seq_len: int
    vocab_size: int
    dropout = 0.0
    splits_sequence = False
    kinds: tuple[str, ...] = ("layer",)
    head_in_layers = None

    @abstractmethod
    def outer(self) -> Tree:
        """The `Param`s outside the layers, as a nested dict."""

    @abstractmethod
    def block(self, kind: str) -> Tree:
        """The `Param`s of one layer of this kind, as a nested dict."""

    @abstractmethod
    def embed(self, ctx: Context, outer: Tree, batch: Batch) -> jax.Array:
        """tokens[B, T] -> x[B, T, D], or x[B, T_tp, D] with sp. Parameters that it does not use may be missing parts:
        ZeRO-3 gathers those alone that it does."""

    @abstractmethod
    def layer(self, ctx: Context, kind: str, params: Tree, x_BTD: jax.Array, index: jax.Array) -> jax.Array:
        """One layer: x -> x in the same layout. index: its number, from 0. With a loss of its own: `ctx.add_loss`."""

    def head(self, ctx: Context, outer: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        """x -> (the same normed, table[V_tp, D]), whose product is the logits. Its `vocab_size` first rows count."""
        raise ConfigError(
            f"the model {type(self).__name__}", "it must have a head, from which logits are made", "Define `head` in it"
        )

    def loss(self, ctx: Context, outer: Tree, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        """The summed loss of the targets that count, equal along tp; unless defined otherwise, the cross-entropy of
        `head`'s logits."""
        x_BTD, table_VD = self.head(ctx, outer, x_BTD)
        return ctx.loss(x_BTD, table_VD, batch.targets, self.vocab_size)

    @property
    def num_blocks(self) -> int:
        """How often the kinds of layers repeat."""
        return self.num_layers // len(self.kinds)

    @property
    def size_text(self) -> str:
        blocks = "" if len(self.kinds) == 1 else f" in {self.num_blocks} blocks"
        return f"num_layers={self.num_layers}{blocks}"

    # What a model may say for itself.

    def check(self, parallel: ParallelConfig) -> None:  # noqa: B027  # most models need none
        """Refuse what else this model cannot do on a mesh: `jaxdist.models.declared.check_split` calls it, and refuses
        axes that do not divide a dim. Raises: ConfigError."""

    def initial_values(self, seed) -> dict:
        """fp32 parameters at global shape, from `Param.mean` and `std`; equal on every mesh."""
        key = random.key(seed)

        def values(path, param: Param) -> jax.Array:
            of_name = random.fold_in(key, zlib.crc32(joined(path).encode()))
            return param.draw(random.normal(of_name, param.shape, jnp.float32))

        return jax.tree.map_with_path(values, declare(self))

    def attention_for(
        self, asked: str, platform: str, dtype: str, *, training: bool, device: jax.Device | None = None
    ) -> str:
        """The attention that runs: "xla", "blocked" or "cudnn"; `device`, if given, may be asked to compile it.

        Raises: ConfigError where `asked` cannot run.
        """
        if asked not in ("auto", "xla"):
            raise ConfigError(f"attention={asked}", f"must be auto or xla in {type(self).__name__}", "Leave it out")
        return "xla"

    def describe(self) -> str:
        """One line for a person."""
        sizes = ", ".join(f"{field.name}={getattr(self, field.name)}" for field in dataclasses.fields(self))
        return f"{type(self).__name__}({sizes})"


@cache
def declare(model: Model) -> dict:
    """Every `Param` of a model: those outside the layers, and under `STACKED` those of all layers, stacked."""
    outer = dict(model.outer())
    if STACKED in outer:
        raise ConfigError(f"a parameter called {STACKED!r}", "must not take the name of the layers", "Use another")
    if not model.kinds or model.num_layers % len(model.kinds):
        raise ConfigError(
            f"num_layers={model.num_layers} with kinds={model.kinds}",
            "the kinds must repeat a whole number of times",
            f"Use a multiple of {max(len(model.kinds), 1)} layers",
        )

    def stack(param: Param) -> Param:
        matrix = param.matrix
        if matrix is None and len(param.shape) <= 2:
            matrix = ("in", "out") if len(param.shape) == 2 else ()
        return replace(
            param,
            shape=(model.num_blocks, *param.shape),
            dims=("layers", *param.dims),
            matrix=(None, *matrix) if matrix else matrix,
            real=None,
        )

    block = merge_kinds(model, [model.block(kind) for kind in model.kinds])
    declared = {**outer, STACKED: jax.tree.map(stack, block)}
    names = [name for name, _ in named_params(declared)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"two parameters called {twice[0]!r}", "their names, joined by dots, must differ", "Rename one"
        )
    return declared


def merge_kinds(model: Model, layers: Sequence[Tree]) -> Tree:
    """The trees of a block's layers as one: that of the only one, or `0_KIND`, `1_KIND` ... beside each other."""
    if len(layers) == 1:
        return layers[0]
    return {f"{i}_{kind}": tree for i, (kind, tree) in enumerate(zip(model.kinds, layers, strict=True))}


def split_kinds(model: Model, block: Tree) -> Sequence[Tree]:
    """Undo `merge_kinds`."""
    return [block] if len(model.kinds) == 1 else [block[f"{i}_{kind}"] for i, kind in enumerate(model.kinds)]
