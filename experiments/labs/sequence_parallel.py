"""Sequence parallelism: what tensor parallelism leaves whole on every rank, and what splitting it costs."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_reduce, enter, leave, rank, varying
from jaxdist.parallel.dropout import dropout
from jaxdist.plan.formulas import ModelShape, layer_activation_bytes
from jaxdist.plan.parts import OneRank, layer_memory, rows_to_trace
from jaxdist.strategy import PrecisionConfig

from . import drawing
from .exchanges import accepted, on_mesh, relative_error, sent_over, spread, traced
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table
from .tools import small_run

# ------------------------------------------------------------------------------------------- two layers, by hand

TP = 4
B, T, D, F, LAYERS = 2, 16, 32, 64, 2
MESH = f"tp={TP}"
MATRICES = {"up": P(None, "tp"), "down": P("tp")}  # their gradients are whole on the rank that has the part
SMALL = ("scale", "bias")  # every rank has them, for its own tokens


def layer(p, x, key, sp: bool, same_masks: bool = False):
    """x[B, T, D] (x[B, T_tp, D] with sp) -> the same. Norm, dropout and residual are done on what a rank has."""
    num_tokens = x.shape[1]
    first = rank("tp") * num_tokens if sp and not same_masks else 0
    normed = x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5) * p["scale"]
    y = leave(jax.nn.gelu(enter(normed, sp) @ p["up"]) @ p["down"], sp) + p["bias"]
    return x + dropout(y, 0.2, key, jnp.arange(B), first + jnp.arange(num_tokens))


def loss(layers, x, y, sp: bool, same_masks: bool = False):
    """Mean squared error over all tokens; with sp a rank's part of it."""
    for number, p in enumerate(layers):
        x = layer(p, x, jax.random.fold_in(jax.random.key(7), number), sp, same_masks)
    return jnp.sum((x - y) ** 2) / (B * T * D)


def cast(layers):
    """Scales and biases typed as what may differ between ranks: their gradients then do."""
    return [{**p, **{name: varying(p[name], "tp") for name in SMALL}} for p in layers]


def gradients(layers, x, y, sums: bool = True, same_masks: bool = False):
    """(loss, gradients) with sp: x[B, T_tp, D]. Those of scales and biases are of a rank's own tokens: sum them."""
    value, grads = jax.value_and_grad(loss)(cast(layers), x, y, sp=True, same_masks=same_masks)
    if sums:
        grads = [{**g, **{name: all_reduce(g[name], "tp") for name in SMALL}} for g in grads]
    return all_reduce(value, "tp"), grads


def by_hand(broken: str | None) -> Findings:
    rng = np.random.default_rng(0)
    shapes = {"up": (D, F), "down": (F, D), "scale": (D,), "bias": (D,)}
    layers = [
        {name: rng.standard_normal(shape) / math.sqrt(shape[0]) for name, shape in shapes.items()}
        for _ in range(LAYERS)
    ]
    x, y = rng.standard_normal((2, B, T, D))
    made = partial(gradients, sums=broken != "norms", same_masks=broken == "masks")

    def of_each_rank(layers, x, y):
        """The gradients that every rank should have alike, from each."""
        value, grads = made(layers, x, y)
        own = [{name: varying(g[name], "tp")[None] for name in SMALL} for g in grads]
        return value, own, [{name: g[name] for name in MATRICES} for g in grads]

    def train(layers, x, y):
        def step(layers, _):
            now, grads = made(layers, x, y)
            return cast(jax.tree.map(lambda w, g: w - 0.5 * g, layers, grads)), now

        return lax.scan(step, cast(layers), length=30)[1]

    whole, tokens, args = [dict.fromkeys(SMALL, P()) | MATRICES] * LAYERS, P(None, "tp"), (layers, x, y)
    specs, plain_specs = (whole, tokens, tokens), (whole, P(), P())
    out = (P(), [dict.fromkeys(SMALL, P("tp"))] * LAYERS, [MATRICES] * LAYERS)
    value, small, matrices = on_mesh(MESH, of_each_rank, specs, out)(*args)
    plain = partial(loss, sp=False)
    expected, wanted = on_mesh(MESH, jax.value_and_grad(plain), plain_specs, (P(), whole))(*args)
    of_matrices, of_small = ([{name: g[name] for name in names} for g in wanted] for names in (MATRICES, SMALL))
    losses = np.asarray(on_mesh(MESH, train, specs, P())(*args))
    split = on_mesh(MESH, lambda *args: all_reduce(loss(*args, sp=True), "tp"), specs, P())
    ratio = forward_bytes(split, *args) / forward_bytes(on_mesh(MESH, plain, plain_specs, P()), *args)
    first, typed = jax.tree.map(lambda g: g[0], small), accepted(on_mesh(MESH, made, specs, (P(), whole)), *args)
    alike = "by hand: scales and biases"
    yield equal("by hand: the loss with sp against plain tp", float(value), float(expected), within=1e-12)
    yield at_most("by hand: error of the matrices' gradients", relative_error(matrices, of_matrices), 1e-11)
    yield at_most(f"{alike}: error of gradients, rank 0", relative_error(first, of_small), 1e-11)
    yield at_most(f"{alike}: largest difference of gradients between ranks", spread(small), 1e-12)
    yield holds(f"{alike}: JAX takes gradients for equal on all ranks", typed)
    yield equal("by hand: bytes sent forward, sp over plain tp", ratio, 1)
    yield at_least("by hand: loss of the first step over that of step 30", float(losses[0] / losses[-1]), 1.3)


def forward_bytes(run, *args) -> int:
    """Large messages only: the loss is a number."""
    return sum(c.sent_bytes(parse_mesh(MESH)) for c in sent_over(run, MESH, *args) if c.full_bytes > 8)


# ------------------------------------------------------------------------------------------- bytes of activations

GPT3 = ModelShape.gpt(96, 12_288, 96)
GIB = 2**30


def paper(t: int, sp: bool, scores: bool, shape: ModelShape = GPT3) -> dict[str, float]:
    """Bytes that one layer keeps of one sequence in 16 bits with dropout: arXiv 2205.05198, table 2."""
    s, h, a = shape.seq_len, shape.width, shape.num_heads
    return {
        "whole on every rank": 10 * s * h / (t if sp else 1),
        "split by tp": 24 * s * h / t,
        "scores": 5 * a * s * s / t * scores,
    }


PAPER = {  # name: (arguments, published GiB)
    "one device": ((1, False, True), 2.67),
    "tp=8": ((8, False, True), 0.54),
    "tp=8, sp": ((8, True, True), 0.33),
    "tp=8, sp, selective": ((8, True, False), 0.10),
}

SMALL_GPT = GPT2Config(num_layers=2, width=1024, num_heads=16, ffn_width=4096, seq_len=512, vocab_size=1000)


@cache
def ours(t: int, sp: bool, whole_layer: bool = False) -> float:
    """Bytes that our layer keeps for a token, traced: bf16, no dropout. Recomputed: scores, or all but its input."""
    rows, precision = rows_to_trace(SMALL_GPT), PrecisionConfig("bfloat16")
    found = layer_memory(OneRank(SMALL_GPT, t, rows, precision, sp=sp and t > 1, selective=True))
    return (found.x if whole_layer else found.scan) / SMALL_GPT.seq_len


def our_form(t: int, sp: bool) -> float:
    """Inputs of both norms (4 D bytes) and their statistics (16); q, k, v, o and the MLP's hidden layer (16 D), and the
    softmax's statistics (8 a). With sp the first are split, and what was gathered is kept whole (4 D)."""
    d, a = SMALL_GPT.width, SMALL_GPT.num_heads
    gathered = 4 * d if sp and t > 1 else 0
    return (4 * d + 16) / (t if sp else 1) + gathered + (16 * d + 8 * a) / t


def paper_table() -> Findings:
    rows = []
    for name, ((t, sp, scores), published) in PAPER.items():
        parts = paper(t, sp, scores)
        total, remat = sum(parts.values()), "none" if scores else "selective"
        library = layer_activation_bytes(GPT3, 1, tp=t, sp=sp, remat=remat)
        yield equal(f"GPT-3, {name}: the library's form, bytes", float(library), total, within=1e-12)
        yield equal(f"GPT-3, {name}: as published", round(total / GIB, 2), published, unit="GiB")
        rows.append([name, *[part / GIB for part in parts.values()], total / GIB])
    columns = "GiB a layer | " + " | ".join(f"{part} {{:.3f}}" for part in paper(1, False, True)) + " | total {:.2f}"
    yield table("gpt3", columns, rows)


def our_table() -> Findings:
    rows = []
    for t in (1, 2, 4, 8):
        cells = []
        for sp in (False, True):
            yield equal(f"our layer, tp={t}{', sp' * sp}: bytes a token kept", ours(t, sp), our_form(t, sp))
            theirs = (8 / (t if sp else 1) + 24 / t) * SMALL_GPT.width  # without its two masks
            cells += [theirs, ours(t, sp), ours(t, sp, whole_layer=True)]
        yield equal(f"our layer recomputed, tp={t}: kept without sp over with it", cells[2] / cells[5], t)
        rows.append([t, *cells])
    columns = " | ".join(f"{name}{sp} {{:,.0f}}" for sp in ("", ", sp") for name in ("paper", "ours", "recomputed"))
    yield table("ours", f"tp | {columns}", rows)


# ------------------------------------------------------------------------------------------- our step

MODEL = dataclasses.replace(PRESETS["proof"], width=256, ffn_width=1024)


def our_step() -> Findings:
    """Messages over tp of a step with and without sp: eight sequences, fp32."""
    message = 8 * MODEL.seq_len * MODEL.width * 4
    rows = []
    for name, sp in (("tp=8", False), ("tp=8, sp", True)):
        config = small_run("tp=8", MODEL, sp=sp)
        found = [c for c in traced(config)[1] if c.axes == ("tp",)]
        large = [c for c in found if c.full_bytes == message]
        gradients = sum(c.full_bytes for c in found if c.full_bytes > 4096 and c.full_bytes != message)
        kinds = [
            sum(c.count for c in large if c.kind == kind) for kind in ("all_reduce", "all_gather", "reduce_scatter")
        ]
        rows.append([name, *kinds, sum(c.sent_bytes(config.parallel.mesh) for c in large), gradients])
    d, layers = MODEL.width, MODEL.num_layers
    owed = 4 * (layers * 6 * d + 2 * d + MODEL.seq_len * d)  # norms and biases of layers, the last norm, positions
    yield equal("our step: bytes of activations over tp, sp over plain", rows[1][-2] / rows[0][-2], 1)
    yield equal("our step with sp: bytes of gradients to be summed over tp", rows[1][-1], owed)
    yield equal("our step without sp: bytes of gradients to be summed over tp", rows[0][-1], 0)
    columns = "run | all-reduces | all-gathers | reduce-scatters | bytes sent {:,} | gradients to sum, bytes {:,}"
    yield table("step", columns, rows)


# ------------------------------------------------------------------------------------------- the lab


@lab(
    title="Sequence parallelism",
    question="What does tensor parallelism leave whole on every rank, and what does it cost to split that too?",
    devices=8,
    breaks={
        "norms": {"by hand: scales and biases*"},
        "masks": {"by hand: the loss with sp*", "by hand: error of the matrices*", "*: error of gradients, rank 0"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from by_hand(broken)
    if broken:
        return
    for part in (paper_table, our_table, our_step):
        yield from part()
    yield Picture("ranks", draw_ranks)
    yield Picture("gpt3", draw_gpt3)
    whole = paper(8, False, True)
    yield Guesses(
        share=100 * whole["whole on every rank"] / sum(whole.values()),
        bytes=1,
        long=34 * 8192 * 8192 / 8 * 80 / 1e9,
        without=(10 + 24 / 8) * 8192 * 8192 * 80 / 1e9,
        limit=4 * 1024 + 16,
    )


def draw_ranks():
    def body(own_BTD):
        whole_BTD = enter(own_BTD, sp=True)
        return [x.sum(1) for x in (own_BTD, whole_BTD, whole_BTD / TP, leave(whole_BTD / TP, sp=True))]

    names = ("between layers", "gathered", "product, a part", "summed, scattered")
    own = np.eye(TP)[:, None]  # each rank's token has a number of its own
    found = on_mesh(MESH, body, P("tp"), P("tp"))(own)
    return drawing.holdings(
        "A colour is a quarter of the tokens", dict(zip(names, map(np.asarray, found), strict=True))
    )


def draw_gpt3():
    cases = {name: paper(*arguments) for name, (arguments, _) in PAPER.items() if name != "one device"}
    parts = {part: [case[part] / GIB for case in cases.values()] for part in paper(1, False, True)}
    return drawing.stacks("Kept by one GPT-3 layer, 8 ranks (formula)", "GiB", list(cases), parts)
