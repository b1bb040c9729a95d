"""GPT-2 in Flax NNX: modules declare parameters at global shape; the forward runs on whatever shards it is given.

Dims: B batch in a micro-batch, T sequence, D model, N heads, H head dim, F feed-forward, V padded vocabulary, L layers.
Letters are logical dims even for a shard. Source: Radford et al. 2019 (pre-LayerNorm, learned positions, tanh-GELU,
tied head); residual projections are initialised with std 0.02 / sqrt(2 L).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax, random

from jaxdist.config import ModelConfig, causal_blocks
from jaxdist.parallel.dropout import dropout
from jaxdist.parallel.remat import keep, keep_what_costs
from jaxdist.parallel.rings import Ring
from jaxdist.parallel.tensor import (
    column_parallel,
    cross_entropy_in_chunks,
    global_indices,
    positions,
    row_parallel,
    vocab_parallel_cross_entropy,
    vocab_parallel_embedding,
)
from jaxdist.parallel.zero import Fetch, Weights, fetch_whole

EMBED_PARTS = ("tokens", "positions")  # the others, by where they are used
HEAD_PARTS = ("tokens", "ln_final")
LAYER_NORM_EPS = 1e-5
INIT_STD = 0.02


@dataclass(frozen=True)
class Declaration:
    """What a module says of a parameter: global shape, mesh axis of each dim, whether weight decay applies.

    both_ends: the embedding and the head use it, which a pipeline puts on two stages.
    """

    shape: tuple[int, ...]
    spec: tuple[str | None, ...]
    decay: bool
    both_ends: bool = False


def parameter(value: jax.Array, spec: tuple[str | None, ...], decay: bool = False) -> nnx.Param:
    """Declare a parameter by its initial value (fp32, global shape) and compute layout."""
    return nnx.Param(value, layout=spec, decay=decay)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float = INIT_STD) -> jax.Array:
    return std * random.normal(rngs.params(), shape, jnp.float32)


@dataclass(frozen=True)
class Forward:
    """How a forward pass runs: everything static that the model needs to know.

    ring: how matmuls and their tp collectives overlap (`jaxdist.parallel.rings`); None: one after the other.
    refetch: ZeRO-2 and 3 fetch weights again in backward, so they must not be saved.
    fetch_block, fetch_embed, fetch_head: where ZeRO-2 and 3 stand between a part and its parameters.
    """

    sp: bool = False
    ring: Ring | None = None
    attention: str = "xla"
    remat: str = "none"
    remat_every: int = 0
    loss_chunks: int = 1
    refetch: bool = False
    fetch_block: Fetch = fetch_whole
    fetch_embed: Fetch = fetch_whole
    fetch_head: Fetch = fetch_whole

    @property
    def policy(self) -> Callable[..., bool]:
        """What backward keeps where whole blocks are not recomputed."""
        return keep_what_costs(self.refetch, self.remat == "selective")


@dataclass(frozen=True)
class Noise:
    """Dropout for one micro-batch: `key` belongs to the step (None: no dropout), `rows_B` are global batch rows."""

    rate: float
    key: jax.Array | None
    rows_B: jax.Array

    def at(self, site: int | jax.Array) -> "Noise":
        """The same noise at another place in the model."""
        return self if self.key is None else Noise(self.rate, random.fold_in(self.key, site), self.rows_B)

    def hidden(self, x_BTD: jax.Array, sp: bool) -> jax.Array:
        return dropout(x_BTD, self.rate, self.key, self.rows_B, positions(x_BTD.shape[1], sp))

    def attention(self, probs_BNTS: jax.Array) -> jax.Array:
        return dropout(probs_BNTS, self.rate, self.key, self.rows_B, global_indices(probs_BNTS.shape[1]))


def add_bias(x: jax.Array, bias: jax.Array) -> jax.Array:
    """x + bias, over the leading dims of x. The bias's gradient is summed in at least fp32, and rounded once."""
    wide = bias.astype(jnp.promote_types(bias.dtype, jnp.float32))
    return x + jnp.broadcast_to(wide, x.shape).astype(bias.dtype)


class LayerNorm(nnx.Module):
    def __init__(self, width: int):
        self.scale = parameter(jnp.ones(width), (None,))
        self.bias = parameter(jnp.zeros(width), (None,))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
        centred = x - x.mean(-1, keepdims=True)
        normed = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + LAYER_NORM_EPS)
        return (normed * self.scale[...] + self.bias[...]).astype(x_BTD.dtype)


class Attention(nnx.Module):
    """Causal self-attention, heads split over tp: column-parallel fused QKV, row-parallel projection.

    Layout: x[B, T, D] -> enter -> qkv[B, T, 3, N_tp, H] -> o[B, T, N_tp, H] -> {U_tp} -> leave -> y[B, T, D].
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width, heads = config.width, config.num_heads
        head_dim = width // heads
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.w_qkv = parameter(normal(rngs, (width, 3, heads, head_dim)), (None, None, "tp", None), decay=True)
        self.b_qkv = parameter(jnp.zeros((3, heads, head_dim)), (None, "tp", None))
        self.w_out = parameter(normal(rngs, (heads, head_dim, width), residual_std), ("tp", None, None), decay=True)
        self.b_out = parameter(jnp.zeros(width), (None,))

    def __call__(self, x_BTD: jax.Array, run: Forward, noise: Noise) -> jax.Array:
        qkv = add_bias(column_parallel(x_BTD, self.w_qkv[...], run.sp, run.ring), self.b_qkv[...])
        core = attention_core(run.attention, noise)
        if run.remat == "selective":
            core = jax.checkpoint(core, prevent_cse=False)
        o_BTNH = keep(core(qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]))
        batch, length, heads, head_dim = o_BTNH.shape
        w_ND = self.w_out[...].reshape(heads * head_dim, -1)
        return add_bias(row_parallel(o_BTNH.reshape(batch, length, -1), w_ND, run.sp, run.ring), self.b_out[...])


def attention_core(implementation: str, noise: Noise) -> Callable[..., jax.Array]:
    """core(q_BTNH, k_BTNH, v_BTNH) -> o_BTNH, causal, scaled by 1/sqrt(H).

    "cudnn" never holds the scores and takes no dropout; "xla" writes them out, in blocks of queries that leave out most
    of what the mask would. Softmax runs in at least fp32.
    """

    def cudnn(q_BTNH, k_BTNH, v_BTNH):
        return jax.nn.dot_product_attention(q_BTNH, k_BTNH, v_BTNH, is_causal=True, implementation="cudnn")

    def rows_of_queries(q_BTNH, k_BSNH, v_BSNH):
        """A block of queries, the last T of the S positions they may look at."""
        scores_BNTS = jnp.einsum("BTNH,BSNH->BNTS", q_BTNH * q_BTNH.shape[-1] ** -0.5, k_BSNH)
        scores_BNTS = scores_BNTS.astype(jnp.promote_types(scores_BNTS.dtype, jnp.float32))
        rows, length = scores_BNTS.shape[-2:]
        causal_TS = jnp.arange(length - rows, length)[:, None] >= jnp.arange(length)
        probs_BNTS = jax.nn.softmax(jnp.where(causal_TS, scores_BNTS, jnp.finfo(scores_BNTS.dtype).min), axis=-1)
        probs_BNTS = noise.at(length).attention(probs_BNTS.astype(q_BTNH.dtype))
        return jnp.einsum("BNTS,BSNH->BTNH", probs_BNTS, v_BSNH)

    def xla(q_BTNH, k_BTNH, v_BTNH):
        length = q_BTNH.shape[1]
        rows = length // causal_blocks(length)
        blocks = [
            rows_of_queries(q_BTNH[:, end - rows : end], k_BTNH[:, :end], v_BTNH[:, :end])
            for end in range(rows, length + 1, rows)
        ]
        return jnp.concatenate(blocks, axis=1)

    return {"cudnn": cudnn, "xla": xla}[implementation]


class MLP(nnx.Module):
    """Column-parallel up, tanh-GELU, row-parallel down.

    Layout: x[B, T, D] -> enter -> h[B, T, F_tp] -> {U_tp} -> leave -> y[B, T, D].
    """

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        width, ffn_width = config.width, config.ffn_width
        residual_std = INIT_STD / math.sqrt(2 * config.num_layers)
        self.w_up = parameter(normal(rngs, (width, ffn_width)), (None, "tp"), decay=True)
        self.b_up = parameter(jnp.zeros(ffn_width), ("tp",))
        self.w_down = parameter(normal(rngs, (ffn_width, width), residual_std), ("tp", None), decay=True)
        self.b_down = parameter(jnp.zeros(width), (None,))

    def __call__(self, x_BTD: jax.Array, run: Forward) -> jax.Array:
        up_BTF = add_bias(column_parallel(x_BTD, self.w_up[...], run.sp, run.ring), self.b_up[...])
        h_BTF = jax.nn.gelu(up_BTF, approximate=True)
        return add_bias(row_parallel(h_BTF, self.w_down[...], run.sp, run.ring), self.b_down[...])


class Block(nnx.Module):
    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        self.ln_attention = LayerNorm(config.width)
        self.attention = Attention(config, rngs)
        self.ln_mlp = LayerNorm(config.width)
        self.mlp = MLP(config, rngs)

    def __call__(self, x_BTD: jax.Array, run: Forward, noise: Noise) -> jax.Array:
        attended_BTD = self.attention(self.ln_attention(x_BTD), run, noise.at(0))
        x_BTD = x_BTD + noise.at(1).hidden(attended_BTD, run.sp)
        return x_BTD + noise.at(2).hidden(self.mlp(self.ln_mlp(x_BTD), run), run.sp)


class GPT(nnx.Module):
    """The declaration of the whole model; `blocks` holds every layer's parameters stacked on a leading dim L."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
        vocab = config.padded_vocab_size
        table_VD = normal(rngs, (vocab, config.width))
        real_V1 = jnp.arange(vocab)[:, None] < config.vocab_size
        self.tokens = parameter(jnp.where(real_V1, table_VD, 0), ("tp", None), decay=True)
        self.positions = parameter(normal(rngs, (config.seq_len, config.width)), (None, None), decay=True)
        stack = nnx.vmap(lambda each: Block(config, each), in_axes=(0,), out_axes=0)
        self.blocks = nnx.split_rngs(splits=config.num_layers)(stack)(rngs)
        self.ln_final = LayerNorm(config.width)


def declare(config: ModelConfig) -> dict:
    """Every parameter's `Declaration`, as a nested dict by attribute name; nothing is allocated."""
    abstract = nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0)))
    flat = nnx.to_flat_state(nnx.state(abstract, nnx.Param))
    tree: dict = {}
    for path, variable in flat:
        node = tree
        for name in path[:-1]:
            node = node.setdefault(name, {})
        meta = variable.get_metadata()
        both_ends = path[0] in EMBED_PARTS and path[0] in HEAD_PARTS
        node[path[-1]] = Declaration(variable.shape, meta["layout"], meta["decay"], both_ends)
    return tree


def initial_parameters(config: ModelConfig, seed: int) -> dict:
    """fp32 parameters at global shape; the same values on every mesh when jitted with `out_shardings`."""
    return nnx.to_pure_dict(nnx.state(GPT(config, nnx.Rngs(random.key(seed))), nnx.Param))


def static_half(make: Callable[[], nnx.Module]):
    """The graph of a module: merged with (local) parameters it is that module again."""
    return nnx.split(nnx.eval_shape(make))[0]


# The functions of the model, on local shards inside shard_map.


def embed(root: dict, tokens_BT: jax.Array, run: Forward, noise: Noise) -> jax.Array:
    """tokens[B, T] -> x[B, T, D], or x[B, T_tp, D] with sp. `root` holds what is not a block's."""
    weights = run.fetch_embed(root)
    x_BTD = vocab_parallel_embedding(tokens_BT, weights["tokens"], run.sp)
    length = x_BTD.shape[1]
    positions_TD = lax.dynamic_slice_in_dim(weights["positions"], positions(length, run.sp)[0], length)
    return noise.hidden(add_bias(x_BTD, positions_TD), run.sp)


def layer(config: ModelConfig, weights: Weights, x_BTD: jax.Array, run: Forward, noise: Noise) -> jax.Array:
    """One block: x -> x in the same layout."""
    graph = static_half(lambda: Block(config, nnx.Rngs(0)))
    return nnx.merge(graph, run.fetch_block(weights))(x_BTD, run, noise)


def stage(config: ModelConfig, blocks: Weights, x_BTD: jax.Array, run: Forward, noise: Noise) -> jax.Array:
    """A stack of blocks, scanned over layers: x -> x in the same layout."""

    def body(x_BTD, row):
        weights, index = row
        return layer(config, weights, x_BTD, run, noise.at(index)), None

    if run.remat_every == 1:
        body = jax.checkpoint(body, prevent_cse=False)
    else:
        body = jax.checkpoint(body, policy=run.policy, prevent_cse=False)
    layers = (blocks, jnp.arange(jax.tree.leaves(blocks)[0].shape[0]))
    if run.remat_every <= 1:
        return lax.scan(body, x_BTD, layers)[0]
    groups = jax.tree.map(lambda x: x.reshape(-1, run.remat_every, *x.shape[1:]), layers)
    recomputed = jax.checkpoint(lambda x_BTD, group: lax.scan(body, x_BTD, group), prevent_cse=False)
    return lax.scan(recomputed, x_BTD, groups)[0]


def keep_vectors(config: ModelConfig, fetch: Fetch) -> Fetch:
    """A fetch of a block whose vectors backward keeps: matrices are worth a second message, they are not."""
    declared = declare(config)["blocks"]
    return lambda weights: jax.tree.map(lambda leaf, w: w if leaf.decay else keep(w), declared, fetch(weights))


def loss(config: ModelConfig, root: dict, x_BTD: jax.Array, targets_BT: jax.Array, run: Forward) -> jax.Array:
    """Sum of the cross-entropies of all targets that are not negative, in nats; equal along tp."""
    graph = static_half(lambda: LayerNorm(config.width))

    def head(root, x_BTD):
        weights = run.fetch_head(root)
        x_BTD = nnx.merge(graph, weights["ln_final"])(x_BTD)
        if run.loss_chunks > 1:
            return x_BTD, weights["tokens"]
        return vocab_parallel_cross_entropy(x_BTD, weights["tokens"], targets_BT, config.vocab_size, run.sp)

    # Its backward follows at once: the table that ZeRO-3 gathered stays until then.
    head = jax.checkpoint(head, policy=keep_what_costs(refetch=False, selective=False), prevent_cse=False)
    if run.loss_chunks > 1:
        return cross_entropy_in_chunks(*head(root, x_BTD), targets_BT, config.vocab_size, run.sp, run.loss_chunks)
    return jnp.where(targets_BT >= 0, head(root, x_BTD), 0).sum()
