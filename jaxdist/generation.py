"""Text out of a model on any mesh: prompts in one program, then a token of every text at a time in another.

Weights, and the cache of keys and values, are split over tp by heads and over pp by layers, the cache over cp by
positions; texts over the data axes.
Which token comes next is drawn from a random stream of the seed, the text and the position alone, so every mesh draws
the same. The model is the one that trains: nothing of it is described again.

Dims: B texts, T positions of the longest prompt, V vocabulary, D model.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdist.config import require_seed, require_splits_sequence
from jaxdist.errors import ConfigError, divisors, require_positive, require_within
from jaxdist.layout import split_outer
from jaxdist.mesh import DATA_AXES, MeshShape, make_abstract_mesh
from jaxdist.models.base import Model, declare, split_kinds
from jaxdist.models.cache import KeyValues, NextTokens, Prompts
from jaxdist.models.context import Batch, Context
from jaxdist.models.declared import abstract_values, check_split
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.parallel.context_parallel import merge_bytes
from jaxdist.parallel.sequence import SEQUENCE_DIM, Split
from jaxdist.placement import spec_of
from jaxdist.plan.parts import OneRank, traffic_of
from jaxdist.plan.proof.trace import ring_bytes
from jaxdist.specs import drop_unit_axes, shardings
from jaxdist.strategy import ParallelConfig, PrecisionConfig

NO_TOKEN = -1  # where a model's logits are not finite


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen: the likeliest where `temperature` is 0, else drawn.

    temperature: divides the logits. top_k: only the likeliest so many. top_p: only the likeliest that together have
    this probability (arXiv 1904.09751). Both after the temperature.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0

    def __post_init__(self):
        require_seed(self.seed)
        least = 1e-6 if self.temperature else 0  # by less, logits overflow
        require_within("temperature", self.temperature, least, 1e4, "Use 1, or 0 to draw nothing")
        if self.top_k is not None:
            require_positive("top_k", self.top_k)
        if self.top_p is not None:
            require_within("top_p", self.top_p, 1e-6, 1, "Use 0.9")
        for name in ("top_k", "top_p"):
            if self.temperature == 0 and getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)} with temperature=0",
                    "must not be given: the likeliest token is taken, and nothing is drawn",
                    "Use temperature=1",
                )

    def choose(self, logits_BV: jax.Array, rows_B: jax.Array, positions_B: jax.Array) -> jax.Array:
        """The token at these positions of these texts (by their number among all): i32[B]; NO_TOKEN where its logits
        are not finite."""
        finite_B = jnp.isfinite(logits_BV.max(axis=-1))  # rows that pad a vocabulary are -inf, and NaN is the largest
        return jnp.where(finite_B, self._choose(logits_BV, rows_B, positions_B), NO_TOKEN)

    def _choose(self, logits_BV: jax.Array, rows_B: jax.Array, positions_B: jax.Array) -> jax.Array:
        if self.temperature == 0:
            return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
        logits_BV = logits_BV / self.temperature
        lowest = jnp.finfo(logits_BV.dtype).min
        if self.top_k is not None and self.top_k < logits_BV.shape[-1]:
            least_B1 = lax.top_k(logits_BV, self.top_k)[0][:, -1:]
            logits_BV = jnp.where(logits_BV < least_B1, lowest, logits_BV)
        if self.top_p is not None and self.top_p < 1:
            sorted_BV = jnp.sort(logits_BV, axis=-1, descending=True)
            probs_BV = jax.nn.softmax(sorted_BV, axis=-1)
            before_BV = jnp.cumsum(probs_BV, axis=-1) - probs_BV
            least_B1 = jnp.where(before_BV < self.top_p, sorted_BV, jnp.inf).min(axis=-1, keepdims=True)
            logits_BV = jnp.where(logits_BV < least_B1, lowest, logits_BV)

        def draw(row, position, logits_V):
            key = random.fold_in(random.fold_in(random.key(self.seed), row), position)
            return random.categorical(key, logits_V)

        return jax.vmap(draw)(rows_B, positions_B, logits_BV).astype(jnp.int32)


class Next(NamedTuple):
    """What a call gives: the next token of each text, i32[B], NO_TOKEN as `Sampling.choose` says; its logits, [B, V] in
    at least fp32; the caches."""

    tokens: jax.Array
    logits: jax.Array
    caches: list[list[KeyValues]]


@dataclass(frozen=True)
class Generator:
    """Programs of one batch of texts, compiled on first use.

    prefill(params, tokens[B, T], lengths[B], first=0) -> Next, of prompts padded on the right to T.
    decode(params, caches, tokens[B], positions[B], first=0) -> Next: the newest tokens at their positions; donates the
    caches. first: the number among all texts of the first of these, which random tokens follow from. A text that is
    longer than the capacity has NaN for logits.
    specs: of the parameters at their logical shape, as a nested dict. caches: shapes, dtypes and shardings, of each
    attention of each kind of layer.
    """

    model: Model
    mesh: Mesh | AbstractMesh
    shape: MeshShape
    specs: dict
    dtype: str
    num_texts: int
    prefill: Callable[..., Next]
    decode: Callable[..., Next]
    caches: list[list[KeyValues]]

    def abstract_params(self) -> dict:
        """Shapes, dtype and shardings of the parameters."""

        def shape(param, sharding):
            return jax.ShapeDtypeStruct(param.shape, self.dtype, sharding=sharding)

        return jax.tree.map(shape, declare(self.model), shardings(self.mesh, self.specs))

    def abstract_tokens(self, length: int | None = None) -> jax.ShapeDtypeStruct:
        """i32[B, length], or i32[B]."""
        sizes = (self.num_texts,) if length is None else (self.num_texts, length)
        return jax.ShapeDtypeStruct(sizes, jnp.int32, sharding=NamedSharding(self.mesh, _rows_spec(self.shape)))

    def put(self, tokens: np.ndarray) -> jax.Array:
        """Host integers [B], or tokens [B, T] -> each rank's texts. Raises: ConfigError for what is no token."""
        if tokens.ndim > 1 and not 0 <= tokens.min() <= tokens.max() < self.model.vocab_size:
            raise ConfigError(
                f"tokens from {tokens.min()} to {tokens.max()}",
                f"must be of the vocabulary, from 0 to {self.model.vocab_size - 1}",
                "Use the model's tokenizer",
            )
        like = self.abstract_tokens(*tokens.shape[1:])
        return jax.make_array_from_callback(tokens.shape, like.sharding, lambda at: tokens[at].astype(np.int32))


def parameter_specs(model: Model, parallel: ParallelConfig) -> dict:
    """How parameters are split where text is generated: layers over pp, heads and widths over tp."""
    return jax.tree.map(lambda param: spec_of(param, parallel), declare(model))


def build_generator(
    model: Model,
    mesh: Mesh | AbstractMesh,
    shape: MeshShape,
    *,
    dtype: str,
    num_texts: int,
    capacity: int,
    sampling: Sampling = Sampling(),
    attention: str = "xla",
    cp_kind: str = "ring",
) -> Generator:
    """Programs for `num_texts` texts of at most `capacity` tokens, prompts included.

    cp_kind: how prompts attend over cp, as `ParallelConfig.cp_kind`. Raises: ConfigError where the mesh does not divide
    the model's heads or layers, or the texts, or where cp splits what cannot be.
    """
    parallel = ParallelConfig(shape, cp_kind=cp_kind)
    require_splits_sequence(model, shape.cp)
    if model.dropout:
        model = replace(model, dropout=0.0)  # type: ignore[type-var]  # its subclasses are dataclasses
    check_split(model, parallel)
    if model.num_blocks % shape.pp:
        raise ConfigError(
            f"{model.size_text} over pp={shape.pp}",
            "each stage must hold as many layers",
            f"Use pp in {divisors(model.num_blocks)}",
        )
    if shape.cp > 1 and shape.ep > 1 and "cp" in shape.expert_axes:
        raise ConfigError(
            f"ep={shape.ep} over cp={shape.cp}",
            "one of the two must be 1: every rank of cp has a new token, and all would exchange it",
            "Use ep=1, or cp=1",
        )
    if num_texts % shape.batch_ranks:
        raise ConfigError(
            f"{num_texts} texts over {shape.batch_ranks} data ranks",
            "each rank must have equally many",
            f"Use {-(-num_texts // shape.batch_ranks) * shape.batch_ranks} texts, or a smaller dp",
        )
    if not 1 <= capacity <= model.seq_len:
        raise ConfigError(
            f"{capacity} tokens with seq_len={model.seq_len}", "must fit the positions of the model", "Shorten the text"
        )
    specs, rows = parameter_specs(model, parallel), _rows_spec(shape)
    ctx = Context(split=parallel.split, expert_axes=parallel.expert_axes, attention=attention)
    bound = _OnStages(model, shape, sampling, capacity, ctx)
    on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=True)
    caches = _cache_specs(bound, on_mesh, specs, dtype, num_texts)
    outputs = Next(rows, rows, caches)
    number = PartitionSpec()
    on_prompts = on_mesh(bound.prefill, in_specs=(specs, rows, rows, number), out_specs=outputs)
    on_tokens = on_mesh(bound.decode, in_specs=(specs, caches, rows, rows, number), out_specs=outputs)

    def prefill(params, tokens, lengths, first=0):
        return on_prompts(params, tokens, lengths, jnp.int32(first))

    def decode(params, caches, tokens, positions, first=0):
        return on_tokens(params, caches, tokens, positions, jnp.int32(first))

    found = Generator(
        model, mesh, shape, specs, dtype, num_texts, jax.jit(prefill), jax.jit(decode, donate_argnums=1), []
    )
    like = jax.eval_shape(prefill, found.abstract_params(), found.abstract_tokens(1), found.abstract_tokens()).caches
    placed = jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), like, shardings(mesh, caches)
    )
    return replace(found, caches=placed)


def _rows_spec(shape: MeshShape) -> PartitionSpec:
    return drop_unit_axes((DATA_AXES,), shape)


def _cache_specs(bound: "_OnStages", on_mesh: Callable, specs: dict, dtype: str, num_texts: int):
    """How the caches are split, in their structure: [L, B, C, K, H] over pp, the data axes, cp, and tp by heads.

    Heads that several ranks hold are counted on each of them. Raises: ConfigError for a model without attention.
    """
    params = abstract_values(bound.model, dtype)
    number = jax.ShapeDtypeStruct((num_texts,), jnp.int32)
    found: list = []

    def look(params, tokens, lengths):
        found.append(bound.prefill(params, tokens, lengths).caches)
        return jnp.zeros(())

    rows = _rows_spec(bound.shape)
    tokens = jax.ShapeDtypeStruct((num_texts, 1), jnp.int32)
    traced = on_mesh(look, in_specs=(specs, rows, rows), out_specs=PartitionSpec())
    jax.eval_shape(traced, params, tokens, number)
    if not jax.tree.leaves(found[-1]):
        raise ConfigError(
            f"the model {type(bound.model).__name__}",
            "its layers must call `jaxdist.models.attention.attend`, which keeps what text is generated from",
            "Use a model with attention",
        )
    spec = drop_unit_axes(("pp", DATA_AXES, "cp", "tp", None), bound.shape)
    return jax.tree.map(lambda _: spec, found[-1])


@dataclass(frozen=True)
class _OnStages:
    """A model's forward on local shards, stage after stage. ctx: of prompts, which cp splits; a token that follows them
    is on all its ranks."""

    model: Model
    shape: MeshShape
    sampling: Sampling
    capacity: int
    ctx: Context

    def prefill(self, params: dict, tokens_BT: jax.Array, lengths_B: jax.Array, first=0) -> Next:
        cache = partial(Prompts, lengths_B, self.capacity, self.ctx.split)

        def layers(params, x_BTD, _):
            def body(x, layer):
                caches = []
                for kind, weights in zip(self.model.kinds, split_kinds(self.model, layer[0]), strict=True):
                    ctx = replace(self.ctx, cache=cache())
                    x = self.model.layer(ctx, kind, weights, x, layer[1])
                    caches.append(ctx.cache.kept)
                return x, caches

            return lax.scan(body, x_BTD, (params, self.layer_numbers(params)))

        ctx = replace(self.ctx, cache=cache())
        x_BTD, caches = self.through(layers, ctx, params, _cut_prompts(self.ctx.split, tokens_BT), None)
        return self.next(ctx, params, _last_of(self.ctx.split, x_BTD, lengths_B), lengths_B, first, caches)

    def decode(self, params: dict, caches: list, tokens_B: jax.Array, positions_B: jax.Array, first=0) -> Next:
        whole = replace(self.ctx, split=Split())

        def layers(params, x_B1D, caches):
            def body(carry, layer):
                x, caches = carry
                weights, place, number = layer
                caches = list(caches)
                for i, (kind, part) in enumerate(zip(self.model.kinds, split_kinds(self.model, weights), strict=True)):
                    ctx = replace(whole, cache=NextTokens(caches[i], place, positions_B))
                    x = self.model.layer(ctx, kind, part, x, number)
                    caches[i] = ctx.cache.kept
                return (x, caches), None

            numbers = self.layer_numbers(params)
            return lax.scan(body, (x_B1D, caches), (params, jnp.arange(len(numbers)), numbers))[0]

        ctx = replace(whole, cache=NextTokens([], jnp.int32(0), positions_B))
        x_B1D, caches = self.through(layers, ctx, params, tokens_B[:, None], caches)
        return self.next(ctx, params, x_B1D, positions_B + 1, first, caches)

    def layer_numbers(self, stacked: dict) -> jax.Array:
        """The number of each layer (of each block's first) on this stage."""
        count = len(jax.tree.leaves(stacked)[0])
        return (comm.rank("pp") * count + jnp.arange(count)) * len(self.model.kinds)

    def through(self, layers: Callable, ctx: Context, params: dict, tokens_BT: jax.Array, caches):
        """(x after the last layer, on the last stage; the caches). layers(params, x, caches) runs a stage's own."""
        outer, stacked = split_outer(params)
        x = self.model.embed(ctx, outer, Batch(tokens_BT, None, None))
        if self.shape.pp == 1:
            return layers(stacked, x, caches)
        x, stage = comm.varying(x, "pp"), comm.rank("pp")
        if caches is None:
            like = jax.eval_shape(layers, stacked, x, None)[1]
            caches = jax.tree.map(lambda a: comm.varying_like(jnp.zeros(a.shape, a.dtype), a), like)
        for turn in range(self.shape.pp):
            mine = partial(lax.cond, stage == turn, lambda x, caches: layers(stacked, x, caches))
            x, caches = mine(lambda x, caches: (x, caches), x, caches)
            if turn + 1 < self.shape.pp:
                x = comm.permute(x, "pp", senders=[turn])
        return x, caches

    def next(self, ctx: Context, params: dict, x_B1D: jax.Array, positions_B: jax.Array, first, caches) -> Next:
        x_B1D = exchange.broadcast(x_B1D, "pp", self.shape.pp - 1)
        x_B1D, table_VD = self.model.head(ctx, split_outer(params)[0], x_B1D)
        logits_BV = (comm.varying(x_B1D[:, 0], "tp") @ comm.varying(table_VD, "tp").T).astype(
            jnp.promote_types(x_B1D.dtype, jnp.float32)
        )
        logits_BV = comm.all_gather(logits_BV, "tp", 1, replicated=True)[:, : self.model.vocab_size]
        logits_BV = jnp.where((positions_B <= self.capacity)[:, None], logits_BV, jnp.nan)  # others overwrote the first
        rows_B = first + comm.rank(DATA_AXES) * len(positions_B) + jnp.arange(len(positions_B))
        return Next(self.sampling.choose(logits_BV, rows_B, positions_B), logits_BV, caches)


def _cut_prompts(split: Split, tokens_BT: jax.Array) -> jax.Array:
    """This rank's positions of prompts that are padded to what `split` and `by_turns` divide."""
    padding = -tokens_BT.shape[SEQUENCE_DIM] % (split.ranks * split.unit)
    return split.cut(jnp.pad(tokens_BT, [(0, 0), (0, padding)]))


def _last_of(split: Split, x_BTD: jax.Array, lengths_B: jax.Array) -> jax.Array:
    """x of the last position of each prompt, which one rank of cp has: [B, 1, D], equal along cp.

    Sends: an all-reduce of it over cp.
    """
    num_local = x_BTD.shape[SEQUENCE_DIM]
    is_last_BT = split.positions(jnp.arange(num_local), num_local) == (lengths_B - 1)[:, None]
    place_B, is_here_B = jnp.argmax(is_last_BT, axis=1), is_last_BT.any(axis=1)
    x_B1D = jnp.take_along_axis(x_BTD, place_B[:, None, None], axis=SEQUENCE_DIM)
    return comm.all_reduce(jnp.where(is_here_B[:, None, None], x_B1D, 0), "cp")


def bytes_per_token(model: Model, shape: MeshShape, dtype: str, num_texts: int) -> int:
    """Bytes that one device sends for the next token of each of `num_texts` texts, by formula, on the stage that sends
    most: what embedding and layers send of one position, what attention merges over cp, x from stage to stage and back
    to all, the logits over tp.
    """
    one_position = replace(model, seq_len=1)  # type: ignore[type-var]  # its subclasses are dataclasses
    texts = num_texts // shape.batch_ranks
    rank = OneRank(one_position, shape.tp, texts, PrecisionConfig(dtype), attention="xla")
    parts, blocks = traffic_of(rank), model.num_blocks // shape.pp
    sent = sum(each.sent_bytes(shape) for each in parts.embed.forward)
    sent += sum(each.sent_bytes(shape) for each in parts.layer.forward) * blocks
    sent += ring_bytes("all_reduce", ("cp",), _merged_bytes(rank) * blocks, shape)
    if shape.pp > 1:
        sent += parts.x_bytes + ring_bytes("all_reduce", ("pp",), parts.x_bytes, shape)
    logits = texts * _head_rows(model) * jnp.dtype(jnp.promote_types(dtype, jnp.float32)).itemsize
    return sent + ring_bytes("all_gather", ("tp",), logits, shape)


def _merged_bytes(rank: OneRank) -> int:
    """Bytes that the attentions of a block merge over cp for one position of each text."""
    noted = _Queries()

    def note(parts) -> None:
        bound = replace(parts.bound, ctx=replace(parts.bound.ctx, cache=noted))
        bound.whole_block(parts.weights, parts.x, jnp.int32(0), parts.batch, None)

    rank.trace_whole(note)
    itemsize = jnp.promote_types(rank.precision.dtype, jnp.float32).itemsize
    return sum(merge_bytes(q.size, q.size // q.shape[-1], itemsize) for q in noted.queries)


class _Queries:
    """In place of a cache: notes the queries [B, T, N, H] of every attention."""

    def __init__(self):
        self.queries: list[jax.Array] = []

    def positions(self, length: int) -> jax.Array:
        return jnp.arange(length)

    def attend(self, core: Callable, q_BTNH, k_BTKH, v_BTKH, window: int | None) -> jax.Array:
        self.queries.append(q_BTNH)
        return core(q_BTNH, k_BTKH, v_BTKH)


def _head_rows(model: Model) -> int:
    """Rows of the table that makes logits, padding counted."""
    mesh, found = make_abstract_mesh(MeshShape()), []
    outer, _ = split_outer(abstract_values(model, jnp.float32))
    tokens = jax.ShapeDtypeStruct((1, 1), jnp.int32)

    def look(outer, tokens):
        x = model.embed(Context(), outer, Batch(tokens, None, None))
        found.append(model.head(Context(), outer, x)[1])
        return jnp.zeros(())

    spec = PartitionSpec()
    jax.eval_shape(jax.shard_map(look, mesh=mesh, in_specs=(spec, spec), out_specs=spec), outer, tokens)
    return len(found[0])
