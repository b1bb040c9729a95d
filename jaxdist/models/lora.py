"""Low-rank adapters around any model: its own parameters are frozen, and some matrices get a trained correction."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import jax

from jaxdist.errors import ConfigError, require_positive
from jaxdist.mesh import AXIS_OF_DIM
from jaxdist.models.base import Model, merge_kinds, split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.models.declared import BOUNDS
from jaxdist.parallel.low_rank import LowRank
from jaxdist.params import STACKED, Param, Tree, joined, named_params
from jaxdist.strategy import ParallelConfig

ADAPTERS = "lora"  # the subtree of a layer that holds them
ALPHA_PER_RANK = 2.0  # unless told


@dataclass(frozen=True)
class LoRA(Model):
    """`base`, frozen, with w + (alpha / rank) * a @ b in the place of the matrices that `targets` name in every layer.

    a begins random and b at 0, so training begins at `base`. Adapters are split over tp as the matrix is: of a
    column-parallel one every tp rank holds a, of a row-parallel one b.

    targets: as in "w_q" or "attention.w_q"; () for all matrices of a layer. Source: LoRA, arXiv 2106.09685, section 4.
    """

    base: Model
    rank: int
    alpha: float
    targets: tuple[str, ...] = ()

    def __post_init__(self):
        require_positive("lora", self.rank, BOUNDS["width"])
        if not (self.alpha > 0 and math.isfinite(self.alpha)):
            raise ConfigError(
                f"lora_alpha={self.alpha}", "must be finite and above 0: adapters are scaled by it", "Use 2 x the rank"
            )
        if isinstance(self.base, LoRA):
            raise ConfigError("lora around lora", "adapters must be of a model's own matrices", "Give the model itself")
        kinds = {kind: self.base.block(kind) for kind in self.base.kinds}
        known = [joined(path) for block in kinds.values() for path, _ in _matrices(block)]
        for target in self.targets:
            if not any(_is_named(path, target) for path in known):
                names = ", ".join(sorted({path.rpartition(".")[2] for path in known}))
                raise ConfigError(f"lora_targets={target!r}", f"must be a layer's matrix, one of {names}", "Use those")

    num_layers = property(lambda self: self.base.num_layers)
    seq_len = property(lambda self: self.base.seq_len)
    vocab_size = property(lambda self: self.base.vocab_size)
    dropout = property(lambda self: self.base.dropout)
    splits_sequence = property(lambda self: self.base.splits_sequence)
    kinds = property(lambda self: self.base.kinds)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    # ---- parameters ----

    def outer(self) -> Tree:
        return _frozen(self.base.outer())

    def block(self, kind: str) -> Tree:
        base = self.base.block(kind)
        adapters: dict = {}
        for path, param in _matrices(base):
            if not self.targets or any(_is_named(joined(path), target) for target in self.targets):
                *parents, name = (entry.key for entry in path)
                node = adapters
                for parent in parents:
                    node = node.setdefault(parent, {})
                node[name] = self.adapter(param)
        return {**_frozen(base), ADAPTERS: adapters}

    def adapter(self, param: Param) -> dict[str, Param]:
        """a and b of one matrix."""
        dims, num_in = param.dims, _num_in(param)
        taken, given = dims[:num_in], dims[num_in:]
        # The std of a: that of the uniform draw with which linear layers begin in PyTorch, and adapters in PEFT.
        size = math.prod(param.shape[:num_in])
        return {
            "a": Param(
                (*param.shape[:num_in], self.rank),
                (*taken, None),
                std=(3 * size) ** -0.5,
                partial=_split(given),
                matrix=(),
            ),
            "b": Param((self.rank, *param.shape[num_in:]), (None, *given), std=0.0, partial=_split(taken), matrix=()),
        }

    def initial_values(self, seed) -> dict:
        values, base = super().initial_values(seed), self.base.initial_values(seed)
        blocks = zip(split_kinds(self, values[STACKED]), split_kinds(self, base[STACKED]), strict=True)
        layers = [{**theirs, ADAPTERS: ours[ADAPTERS]} for ours, theirs in blocks]
        return {**base, STACKED: merge_kinds(self, layers)}

    # ---- the forward, on local shards ----

    def embed(self, ctx: Context, outer: Tree, batch: Batch) -> jax.Array:
        return self.base.embed(ctx, outer, batch)

    def layer(self, ctx: Context, kind: str, params: Tree, x_BTD: jax.Array, index: jax.Array) -> jax.Array:
        weights = {name: part for name, part in params.items() if name != ADAPTERS}
        try:
            return self.base.layer(ctx, kind, self.adapted(weights, params[ADAPTERS]), x_BTD, index)
        except (TypeError, ValueError) as error:
            if "__jax_array__" not in str(error):
                raise
            raise ConfigError(
                f"adapters of {type(self.base).__name__}",
                "its layers must multiply by @ or with the Context: JAX's functions take no matrix with a correction",
                "Write jnp.asarray(w) where they are called, or leave the matrix out of lora_targets",
            ) from error

    def adapted(self, weights: Tree, adapters: Tree) -> dict:
        """The weights, with a `LowRank` where there is an adapter."""
        found = dict(weights)
        for name, adapter in adapters.items():
            w = weights[name]
            found[name] = (
                self.adapted(w, adapter) if isinstance(w, Mapping) else LowRank(w, scale=self.scale, **adapter)
            )
        return found

    def head(self, ctx: Context, outer: Tree, x_BTD: jax.Array) -> tuple[jax.Array, jax.Array]:
        return self.base.head(ctx, outer, x_BTD)

    def loss(self, ctx: Context, outer: Tree, x_BTD: jax.Array, batch: Batch) -> jax.Array:
        return self.base.loss(ctx, outer, x_BTD, batch)

    # ---- what else a model says ----

    def check(self, parallel: ParallelConfig) -> None:
        self.base.check(parallel)

    def attention_for(self, asked: str, platform: str, dtype: str, *, training: bool, device=None) -> str:
        return self.base.attention_for(asked, platform, dtype, training=training, device=device)

    def describe(self) -> str:
        where = ", ".join(self.targets) or "all matrices"
        return f"{self.base.describe()}; LoRA of rank {self.rank}, alpha {self.alpha:g} on {where}"


def adapted_paths(tree: Tree, path: str = "") -> Iterator[tuple[str, str]]:
    """(path of a parameter, path of its adapter without the a or b) of a layer, or of all layers stacked."""
    for name, part in tree.items():
        if name == ADAPTERS:
            for leaf, _ in named_params(part):
                if (owner := leaf.removesuffix(".a")) != leaf:
                    yield f"{path}{owner}", f"{path}{ADAPTERS}.{owner}"
        elif isinstance(part, Mapping):
            yield from adapted_paths(part, f"{path}{name}.")


def _matrices(block: Tree) -> list[tuple[jax.tree_util.KeyPath, Param]]:
    """Matrices that may have adapters: neither experts' nor their router's."""
    return [
        (path, param)
        for path, param in jax.tree.leaves_with_path(block)
        if len(param.shape) > 1 and param.decay and not {"experts", "choices"} & set(param.dims)
    ]


def _is_named(path: str, target: str) -> bool:
    return f".{path}".endswith(f".{target}")


def _num_in(param: Param) -> int:
    """How many dims of a matrix meet its input: all but the last where its first is split over an axis, else one."""
    return len(param.shape) - 1 if param.dims[0] in AXIS_OF_DIM else 1


def _split(dims: tuple[str | None, ...]) -> tuple[str, ...]:
    return tuple(dim for dim in dims if dim in AXIS_OF_DIM)


def _frozen(tree: Tree) -> dict:
    return jax.tree.map(lambda param: replace(param, frozen=True), tree)
