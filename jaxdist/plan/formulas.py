"""Closed forms of the papers: parameters, FLOPs, memory, pipeline idle, days.

No JAX here. They explain what `jaxdist.plan.proof.trace` and the compiler count, and cost microseconds. Sizes are in
elements, memory in bytes (GB = 1e9, GiB = 2**30), time in seconds, speed in FLOP/s and bytes/s. Whatever a search over
layouts varies (batch, tp, dp, ZeRO stage, remat, ...) may be a number or a numpy array: arrays are columns of layouts.

Where sources disagree the choice is a named argument, and the result is a `Quantity` value whose text says which it
was. Letters in formulas are the papers': L layers, h width, a heads, s sequence length, b rows of a micro-batch, B
sequences of an update, V vocabulary, P or Ψ parameters, D tokens, t = tp, p = pp, m micro-batches, v chunks a stage.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxdist.errors import ConfigError

Number = Any  # a Python number, or a numpy array of them


@dataclass(frozen=True, eq=False)
class Quantity:
    """A value with its unit and the convention it was counted in: `str` prints all three."""

    value: Number
    unit: str
    convention: str

    def __str__(self) -> str:
        shown = f"{self.value:.4g}" if np.ndim(self.value) == 0 else f"{len(self.value)} values"
        return f"{shown} {self.unit} ({self.convention})"

    def __float__(self) -> float:
        return float(self.value)


def _choose(what: str, name: str, known: tuple | dict) -> None:
    if name not in known:
        raise ConfigError(f"{what}={name!r}", "the formula has no convention of that name", f"Use {', '.join(known)}")


# ------------------------------------------------------------------------------------------------------------- shape


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a decoder-only transformer, in elements.

    num_kv_heads: None for as many as num_heads. gated_mlp: three matrices (SwiGLU) instead of two.
    biases: linear and LayerNorm biases, as in GPT-2; without them the norm is a scale alone, as in Llama.
    """

    num_layers: int
    width: int
    num_heads: int
    ffn_width: int
    seq_len: int
    vocab_size: int
    num_kv_heads: int | None = None
    gated_mlp: bool = False
    tied_embedding: bool = True
    learned_positions: bool = True
    biases: bool = True

    def __post_init__(self):
        for name in ("num_layers", "width", "num_heads", "ffn_width", "seq_len", "vocab_size"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", "must be a whole number, at least 1", f"Use {name}=1 or more"
                )
        if self.width % self.num_heads:
            raise ConfigError(
                f"width={self.width} with num_heads={self.num_heads}",
                "each head holds width/num_heads columns, which must be whole",
                "Use a width that is a multiple of num_heads",
            )
        if self.num_kv_heads is not None and (self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads):
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} with num_heads={self.num_heads}",
                "every key/value head must serve as many query heads",
                "Use a divisor of num_heads",
            )

    @classmethod
    def of(cls, config) -> "ModelShape":
        """The shape of a `jaxdist.models.gpt2.GPT2Config`, its vocabulary padded as the model pads it."""
        return cls(
            config.num_layers,
            config.width,
            config.num_heads,
            config.ffn_width,
            config.seq_len,
            config.padded_vocab_size,
        )

    @classmethod
    def gpt(cls, num_layers: int, width: int, num_heads: int, seq_len: int = 2048, vocab_size: int = 51200):
        """GPT as the Megatron papers count it: ffn 4h, s=2,048 and V=51,200 unless told otherwise."""
        return cls(num_layers, width, num_heads, 4 * width, seq_len, vocab_size)

    @property
    def head_dim(self) -> int:
        return self.width // self.num_heads

    @property
    def kv_width(self) -> int:
        """Columns of the keys, and of the values."""
        return (self.num_kv_heads or self.num_heads) * self.head_dim

    @property
    def layer_matrices(self) -> int:
        """Elements of one layer's matrices: 12h² for GPT."""
        h, mlp = self.width, 3 if self.gated_mlp else 2
        return 2 * h * h + 2 * h * self.kv_width + mlp * h * self.ffn_width

    @property
    def layer_parameters(self) -> int:
        """Matrices, biases and two norms: 12h² + 13h for GPT."""
        h, count = self.width, self.layer_matrices + 2 * self.width
        if self.biases:
            up = (2 if self.gated_mlp else 1) * self.ffn_width
            count += 2 * h + (h + 2 * self.kv_width) + h + up + h  # norms; QKV, projection, up, down
        return count

    @property
    def embedding_parameters(self) -> int:
        """Token table and, where they are learned, positions; not an untied head."""
        return self.vocab_size * self.width + (self.seq_len * self.width if self.learned_positions else 0)

    @property
    def head_parameters(self) -> int:
        """An untied output head; 0 where it is the token table."""
        return 0 if self.tied_embedding else self.vocab_size * self.width

    @property
    def parameters(self) -> int:
        """Exact count, with the final norm."""
        final_norm = (2 if self.biases else 1) * self.width
        return self.num_layers * self.layer_parameters + self.embedding_parameters + self.head_parameters + final_norm


def megatron_parameters(shape: ModelShape) -> float:
    """12Lh²(1 + 13/(12h) + (V+s)/(12Lh)): every parameter of a GPT but the final norm's 2h.

    Source: arXiv 2104.04473, equation 2.
    """
    layers, h = shape.num_layers, shape.width
    return 12 * layers * h**2 * (1 + 13 / (12 * h) + (shape.vocab_size + shape.seq_len) / (12 * layers * h))


# ------------------------------------------------------------------------------------------------------------- FLOPs

ATTENTION = {"full": 1.0, "causal": 0.5}


def training_flops(parameters: Number, tokens: Number, full_recompute: bool = False) -> Number:
    """6PD: 2 forward and 4 backward a parameter and token; 8PD where every forward runs twice. No attention core."""
    return np.where(full_recompute, 8, 6)[()] * parameters * tokens


def forward_flops_per_token(shape: ModelShape, attention: str = "full") -> dict[str, float]:
    """FLOPs of one token's forward by part: "matrices" and "attention" of all layers, and the "head".

    attention: "full" counts every score, 4·s·h a layer; "causal" counts half of them.
    """
    _choose("attention", attention, ATTENTION)
    return {
        "matrices": 2.0 * shape.num_layers * shape.layer_matrices,
        "attention": 4.0 * shape.num_layers * shape.seq_len * shape.width * ATTENTION[attention],
        "head": 2.0 * shape.width * shape.vocab_size,
    }


def iteration_flops(shape: ModelShape, batch: Number, remat: str = "none", attention: str = "full") -> Quantity:
    """FLOPs of one update of `batch` sequences, recomputed forwards included.

    For GPT with full attention: 72BsLh²(1 + s/(6h) + V/(12hL)); with full recompute 96BsLh²(1 + s/(6h) + V/(16hL)).
    Source: arXiv 2104.04473, section 5.1 and appendix; selective recompute arXiv 2205.05198, appendix A.
    """
    part = forward_flops_per_token(shape, attention)
    selective, every = remat_columns(remat)
    again = np.where(every > 0, part["matrices"] + part["attention"], np.where(selective, part["attention"], 0.0))[()]
    flops = batch * shape.seq_len * (3 * sum(part.values()) + again)
    return Quantity(
        flops, "FLOPs", f"matmuls alone, {attention} attention, head counted once forward and twice backward"
    )


def selective_recompute_overhead(shape: ModelShape, convention: str = "published") -> Quantity:
    """Extra FLOPs of selective recompute over the layers' own, as a part of 72BsLh².

    "published": s/(6h), what the pairs of MFU and HFU in arXiv 2205.05198 (table 5) fit.
    "counted": s/(18h), one more forward of the attention core, 4s²h of 72sh² a layer.
    """
    _choose("convention", convention, ("published", "counted"))
    divisor = {"published": 6, "counted": 18}[convention]
    return Quantity(shape.seq_len / (divisor * shape.width), "of 72BsLh²", f"{convention}: s/({divisor}h)")


COUNTED = {
    "matmuls": "matrices of the layers and the head's matmul, no embedding tables",
    "all": "every parameter, embeddings too",
    "no embeddings": "no embedding tables and no head",
}


def model_flops_per_token(shape: ModelShape, attention: str = "full", counted: str = "matmuls") -> Quantity:
    """6N + 12·L·H·Q·T FLOPs of training on one token, whatever is recomputed. attention "causal" halves the second.

    counted: what is in N, see `COUNTED`. A tied table counts once in "all", as its head's matmul.
    Source: PaLM, arXiv 2204.02311, appendix B.
    """
    _choose("attention", attention, ATTENTION)
    _choose("counted", counted, COUNTED)
    tables = shape.embedding_parameters + shape.head_parameters
    n = {
        "matmuls": shape.num_layers * shape.layer_matrices + shape.vocab_size * shape.width,
        "all": shape.parameters,
        "no embeddings": shape.parameters - tables,
    }[counted]
    core = 12 * shape.num_layers * shape.width * shape.seq_len * ATTENTION[attention]
    return Quantity(6 * n + core, "FLOPs a token", f"6N + 12LHQT, {attention} attention, N: {COUNTED[counted]}")


def mfu(
    shape: ModelShape,
    tokens_per_s: Number,
    peak_flops: float,
    num_devices: Number = 1,
    attention: str = "full",
    counted: str = "matmuls",
) -> Quantity:
    """Model FLOPs utilisation: needed FLOP/s over peak FLOP/s of all devices, a fraction."""
    per_token = model_flops_per_token(shape, attention, counted)
    return Quantity(tokens_per_s * per_token.value / (peak_flops * num_devices), "MFU", per_token.convention)


def hfu(
    shape: ModelShape,
    tokens_per_s: Number,
    peak_flops: float,
    num_devices: Number = 1,
    remat: str = "none",
    attention: str = "full",
    selective: str = "published",
) -> Quantity:
    """Hardware FLOPs utilisation: as MFU, but what is recomputed counts as well.

    selective: how selective recompute is counted, see `selective_recompute_overhead`.
    """
    part = forward_flops_per_token(shape, attention)
    is_selective, every = remat_columns(remat)
    layer_flops = 6.0 * shape.num_layers * shape.layer_matrices
    extra = selective_recompute_overhead(shape, selective)
    again = np.where(
        every > 0, part["matrices"] + part["attention"], np.where(is_selective, extra.value * layer_flops, 0.0)
    )[()]
    value = tokens_per_s * (3 * sum(part.values()) + again) / (peak_flops * num_devices)
    return Quantity(value, "HFU", f"{attention} attention, selective recompute {extra.convention}")


# ------------------------------------------------------------------------------------------------------- model state


@dataclass(frozen=True)
class StateRecipe:
    """Bytes a parameter: the weights that compute, their gradients, and the optimiser (masters and moments)."""

    parameter: float
    gradient: float
    optimizer: float

    @property
    def total(self) -> float:
        return self.parameter + self.gradient + self.optimizer

    def __str__(self) -> str:
        return f"{self.parameter:g}+{self.gradient:g}+{self.optimizer:g} bytes a parameter"


RECIPES = {
    "fp32-adam": StateRecipe(4, 4, 8),
    "mixed-adam": StateRecipe(2, 2, 12),
    "mixed-adam-fp32-gradients": StateRecipe(2, 4, 12),
    "mixed-sgd-momentum": StateRecipe(2, 2, 8),
    "mixed-lion": StateRecipe(2, 2, 8),
    "fp32-sgd-momentum": StateRecipe(4, 4, 4),
    "fp32-sgd": StateRecipe(4, 4, 0),
    "fp16-inference": StateRecipe(2, 0, 0),
}


@dataclass(frozen=True, eq=False)
class StateBytes:
    """Bytes on one device."""

    parameters: Number
    gradients: Number
    optimizer: Number
    convention: str

    @property
    def total(self) -> Number:
        return self.parameters + self.gradients + self.optimizer


def require_recipe(name: str) -> None:
    """Refuse a recipe that is not one of `RECIPES`."""
    _choose("recipe", name, RECIPES)


def state_bytes(
    parameters: Number,
    recipe: str | StateRecipe = "mixed-adam",
    zero: Number = 0,
    dp: Number = 1,
    tp: Number = 1,
    pp: Number = 1,
) -> StateBytes:
    """Model state of one device: tp and pp divide everything, ZeRO divides its part by dp. Padding is left out.

    `recipe` is one of `RECIPES` or your own bytes a parameter.
    Source: ZeRO, arXiv 1910.02054, figure 1 (K = 12).
    """
    if isinstance(recipe, str):
        require_recipe(recipe)
        recipe = RECIPES[recipe]
    local = parameters / (np.asarray(tp) * pp)[()]
    zero = np.asarray(zero)

    def part(bytes_each, from_stage):
        return (local * bytes_each / np.where(zero >= from_stage, dp, 1))[()]

    return StateBytes(part(recipe.parameter, 3), part(recipe.gradient, 2), part(recipe.optimizer, 1), str(recipe))


# ------------------------------------------------------------------------------------------------------- activations


def remat_columns(remat: str | np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(selective, every): whether the attention core alone is recomputed, and blocks recomputed together (0: none).

    remat: "none", "selective", "block" (every-1), "chunk" (counted as block) or "every-K", or an array of such words.
    Raises: ConfigError for another word.
    """
    words, index = np.unique(np.asarray(remat, dtype=str), return_inverse=True)
    every = []
    for word in words:
        number = {"none": "0", "selective": "0", "block": "1", "chunk": "1"}.get(word, word.removeprefix("every-"))
        if not (number.isascii() and number.isdigit()) or (word.startswith("every-") and int(number) < 1):
            raise ConfigError(
                f"remat={str(word)!r}",
                "must be none, selective, block or every-K, with K a whole number",
                "Use every-2",
            )
        every.append(int(number))
    shape = np.shape(remat)
    return (words == "selective")[index].reshape(shape), np.array(every)[index].reshape(shape)


def layer_activation_bytes(
    shape: ModelShape,
    rows: Number,
    tp: Number = 1,
    sp: Number = False,
    cp: Number = 1,
    remat: str | np.ndarray = "none",
    dropout: Number = True,
    flash: Number = False,
    itemsize: int = 2,
) -> Number:
    """Bytes that one layer keeps for backward, for one micro-batch of `rows` sequences, on one device.

    For GPT in 16 bit with dropout: sbh(10 + 24/t + 5as/(ht)); with sp sbh/t·(34 + 5as/h); selective leaves 5as/h out;
    a recomputed block keeps its input alone, 2sbh (2sbh/t with sp, which the paper does not do), and every-K keeps one
    input for K blocks. cp divides everything. `flash` attention never keeps the scores. Without dropout the masks go.
    Source: arXiv 2205.05198, section 4 and table 2.
    """
    h, f, kv = shape.width, shape.ffn_width, shape.kv_width
    selective, every = remat_columns(remat)
    masks = np.where(dropout, 1, 0)
    # Kept whole on every tp rank without sp: the inputs of QKV, of the MLP and of both norms; two dropout masks.
    replicated = h * (4 * itemsize + 2 * masks)
    # Split over tp: q, k, v and the projection's input; what is between the MLP's matrices.
    hidden = (4 if shape.gated_mlp else 2) * f
    split = itemsize * (2 * h + 2 * kv + hidden)
    # The softmax's output, its dropout's mask and output: a·s scores for every position.
    scores = shape.num_heads * shape.seq_len * (itemsize + masks * (1 + itemsize))
    positions = rows * shape.seq_len / cp
    sharded = np.where(sp, tp, 1)
    kept = replicated / sharded + (split + np.where(selective | flash, 0, scores)) / tp
    whole = itemsize * h / sharded / np.maximum(every, 1)
    return (positions * np.where(every > 0, whole, kept))[()]


def interleave_factor(pp: Number, chunks: Number) -> Number:
    """First-stage activations with v chunks over those without: 1 + (p-1)/(pv); 1 where v = 1.

    Source: arXiv 2205.05198, section 4.2.3.
    """
    return np.where(np.asarray(chunks) > 1, 1 + (np.asarray(pp) - 1) / (np.asarray(pp) * chunks), 1.0)[()]


def stage_activation_bytes(layer_bytes: Number, num_layers: int, pp: Number, microbatches: Number, chunks: Number = 1):
    """First stage under 1F1B or interleaved: L/p layers for each micro-batch in flight, × `interleave_factor`."""
    return layer_bytes * num_layers / pp * in_flight("1f1b", pp, microbatches) * interleave_factor(pp, chunks)


def kv_cache_bytes(shape: ModelShape, context: Number, rows: Number = 1, itemsize: float = 2, tp: Number = 1) -> Number:
    """2·L·(K·H)·context·rows·itemsize; a tp rank holds its share where tp divides the key/value heads, else all."""
    heads = shape.num_kv_heads or shape.num_heads
    share = np.where(heads % np.asarray(tp) == 0, tp, 1)[()]
    return 2 * shape.num_layers * shape.kv_width * context * rows * itemsize / share


# ---------------------------------------------------------------------------------------------------------- pipeline


def bubble_over_ideal(pp: Number, microbatches: Number, chunks: Number = 1) -> Number:
    """Idle over working time: GPipe and 1F1B (p-1)/m, interleaved (p-1)/(vm). Source: arXiv 2104.04473, section 2.2."""
    return (np.asarray(pp) - 1) / (np.asarray(chunks) * microbatches)


def bubble_share(pp: Number, microbatches: Number, chunks: Number = 1) -> Number:
    """Idle time as a part of all: (p-1)/(vm + p-1)."""
    return (np.asarray(pp) - 1) / (np.asarray(chunks) * microbatches + np.asarray(pp) - 1)


def in_flight(schedule: str, pp: Number, microbatches: Number, stage: Number = 0) -> Number:
    """Micro-batches whose activations a stage holds at most: GPipe m; 1F1B min(m, p - stage)."""
    _choose("schedule", schedule, ("gpipe", "1f1b"))
    if schedule == "gpipe":
        return microbatches
    return np.minimum(microbatches, np.asarray(pp) - stage)[()]


# ---------------------------------------------------------------------------------------------------- time and money


def training_days(
    parameters: float, tokens: float, num_devices: Number, flops_per_s: Number, full_recompute: bool = True
) -> Quantity:
    """8TP/(nX) with full recompute, 6TP/(nX) without, in days; X is achieved FLOP/s of one device.

    Source: arXiv 2104.04473, section 5.1.
    """
    seconds = training_flops(parameters, tokens, full_recompute) / (num_devices * flops_per_s)
    return Quantity(seconds / 86400, "days", "8TP/(nX), full recompute" if full_recompute else "6TP/(nX), no recompute")
