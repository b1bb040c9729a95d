"""Models in Flax NNX: one module is the whole model; it declares parameters at global shape and runs on any shards."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax, random

from jaxdist.errors import ConfigError
from jaxdist.models.base import Model, merge_kinds, split_kinds
from jaxdist.models.context import Context
from jaxdist.parallel import collectives as comm
from jaxdist.params import Param

INIT_STD = 0.02


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float = INIT_STD) -> jax.Array:
    return std * random.normal(rngs.params(), shape, jnp.float32)


class ShardedParam(nnx.Param):
    """A parameter by its initial value (fp32, global shape) and its `declaration`, given by the fields of `Param`."""

    declaration: Param

    def __init__(self, value: jax.Array | float, dims: tuple[str | None, ...] = (), **fields):
        super().__init__(jnp.asarray(value), declaration=Param(jnp.shape(value), dims, **fields))


class LanguageModel(nnx.Module):
    """A whole model as Flax has it. A subclass sets `config` and makes `blocks`, its layers, with `stack_layers`.

    A layer is called with (x_BTD, ctx). ctx: the run; by default one device, without dropout. Masks are drawn with
    `Context(key=..., rows_B=...)`, the key of a step and the rows' numbers. Inside `jax.shard_map` the same methods run
    on shards.
    """

    config: Model
    blocks: nnx.Module

    def embed(self, tokens_BT: jax.Array, ctx: Context) -> jax.Array:
        """As `Model.embed`."""
        raise self._without("embed")

    def unembed(self, x_BTD: jax.Array, ctx: Context) -> tuple[jax.Array, jax.Array]:
        """As `Model.head`."""
        raise self._without("unembed")

    def _without(self, name: str) -> ConfigError:
        return ConfigError(f"the module {type(self).__name__}", f"it must have {name}", f"Define `{name}` in it")

    def __call__(self, tokens_BT: jax.Array, ctx: Context | None = None) -> jax.Array:
        """Logits of the next tokens in at least fp32: [B, T, vocab_size], without rows that pad the vocabulary."""
        ctx = ctx or Context()
        x_BTD, table_VD = self.unembed(self.hidden(tokens_BT, ctx), ctx.at(2))
        logits_BTV = ctx.column_parallel(x_BTD, table_VD.T).astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
        return comm.all_gather(logits_BTV, "tp", 2)[..., : self.config.vocab_size]

    def loss(self, tokens_BT: jax.Array, targets_BT: jax.Array, ctx: Context | None = None) -> jax.Array:
        """The mean cross-entropy of this rank's targets that are not negative, in nats."""
        ctx = ctx or Context()
        x_BTD, table_VD = self.unembed(self.hidden(tokens_BT, ctx), ctx.at(2))
        return ctx.loss(x_BTD, table_VD, targets_BT, self.config.vocab_size) / jnp.maximum((targets_BT >= 0).sum(), 1)

    def hidden(self, tokens_BT: jax.Array, ctx: Context) -> jax.Array:
        """What the last layer gives: x[B, T, D]. Raises: ConfigError for a key of dropout without the rows' numbers."""
        if ctx.key is not None and ctx.rows_B is None:
            remedy = "Give rows_B=jnp.arange(len(tokens))"
            raise ConfigError("a Context with a key", "must number the rows whose masks are drawn", remedy)
        graph, stacked = nnx.split(self.blocks)

        def block(x_BTD, numbered):
            index, params = numbered
            layers: Any = split_kinds(self.config, nnx.merge(graph, params))
            for i, layer in enumerate(layers):
                x_BTD = layer(x_BTD, ctx.at(1).at(index * len(self.config.kinds) + i))
            return x_BTD, None

        numbered = jnp.arange(self.config.num_blocks), nnx.to_pure_dict(stacked)
        return lax.scan(block, self.embed(tokens_BT, ctx.at(0)), numbered)[0]


def require_parameters_alone(module: nnx.Module) -> None:
    """Refuse a module, traced by `nnx.eval_shape`, that keeps more than parameters. Raises: ConfigError."""
    kept = dict(nnx.to_flat_state(nnx.state(module, nnx.Not(nnx.Param))))
    for path, node in nnx.iter_modules(module):  # an array that was made while tracing is no state to nnx
        kept |= {(*path, name): x for name, x in vars(node).items() if isinstance(x, jax.Array)}
    for path, x in kept.items():
        raise ConfigError(
            f"{type(x).__name__ if isinstance(x, nnx.Variable) else 'the array'} {'.'.join(map(str, path))} of "
            f"{type(module).__name__}",
            "a module must hold parameters alone: what else it keeps would not be carried from step to step",
            "Leave it out, and make constants where they are used; Context.dropout draws masks, and "
            "Param(update='count') counts",
        )


def stack_layers(config: Model, make: Callable[[nnx.Rngs, str], nnx.Module], rngs: nnx.Rngs) -> nnx.Module:
    """The layers that make(rngs, kind) gives, each parameter stacked over the blocks; those of several kinds as
    `merge_kinds` names them. Raises: ConfigError where they hold what was made outside of them."""

    def stacked(kind: str) -> nnx.Module:
        each = nnx.vmap(lambda rngs: make(rngs, kind), in_axes=(0,), out_axes=0)
        try:
            return nnx.split_rngs(splits=config.num_blocks)(each)(rngs)
        except ValueError as error:
            if "different trace level" not in str(error):
                raise
            raise ConfigError(
                f"a layer of {type(config).__name__} that holds a module or a parameter from outside of it",
                "each layer must hold its own: they are stacked, and what is outside is not",
                "Make it in the function that stack_layers is given",
            ) from error

    blocks = merge_kinds(config, [stacked(kind) for kind in config.kinds])
    return nnx.Dict(blocks) if isinstance(blocks, dict) else blocks
