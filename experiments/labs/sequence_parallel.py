"""Sequence parallelism: what tensor parallelism leaves whole on every rank, and what splitting it costs."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.config import PrecisionConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_reduce, enter, gather_matmul, leave, rank, varying
from jaxdist.parallel.dropout import dropout
from jaxdist.plan.papers.formulas import ModelShape, layer_activation_bytes
from jaxdist.plan.parts import OneRank, layer_memory, rows_to_trace
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.runtime.devices import acquire_devices

from . import drawing
from .exchanges import traced
from .lab import Check, Lab, Result, Table, at_least, at_most, equal, holds
from .tools import small_run

# ------------------------------------------------------------------------------------------- two layers, by hand

TP = 4
B, T, D, F, LAYERS = 2, 16, 32, 64, 2
MESH = parse_mesh(f"tp={TP}")
MATRICES = {"up": P(None, "tp"), "down": P("tp")}  # their gradients are whole on the rank that has the part
SMALL = ("scale", "bias")  # every rank has them, for its own tokens


def on_tp(body, in_specs, out_specs):
    """A function of global arrays, run by TP ranks of `tp`."""
    mesh = make_mesh(MESH, acquire_devices(TP, "cpu").devices[:TP])
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


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


def by_hand(broken: str | None) -> list[Check]:
    rng = np.random.default_rng(0)
    layers = [
        {
            "up": rng.standard_normal((D, F)) / math.sqrt(D),
            "down": rng.standard_normal((F, D)) / math.sqrt(F),
            "scale": 1 + 0.2 * rng.standard_normal(D),
            "bias": 0.1 * rng.standard_normal(D),
        }
        for _ in range(LAYERS)
    ]
    x, y = rng.standard_normal((2, B, T, D))
    made = partial(gradients, sums=broken != "norms", same_masks=broken == "masks")

    def of_each_rank(layers, x, y):
        """The gradients that every rank should have alike, from each."""
        value, grads = made(layers, x, y)
        own = {name: [varying(g[name], "tp")[None] for g in grads] for name in SMALL}
        return value, own, {name: [g[name] for g in grads] for name in MATRICES}

    whole = [dict.fromkeys(SMALL, P()) | MATRICES] * LAYERS
    out = (
        P(),
        {name: [P("tp")] * LAYERS for name in SMALL},
        {name: [spec] * LAYERS for name, spec in MATRICES.items()},
    )
    tokens = P(None, "tp")
    value, small, matrices = on_tp(of_each_rank, (whole, tokens, tokens), out)(layers, x, y)
    alone = on_tp(jax.value_and_grad(partial(loss, sp=False)), (whole, P(), P()), (P(), whole))
    expected, wanted = alone(layers, x, y)

    def train(layers, x, y):
        def step(layers, _):
            now, grads = made(layers, x, y)
            return cast(jax.tree.map(lambda w, g: w - 0.5 * g, layers, grads)), now

        return lax.scan(step, cast(layers), length=30)[1]

    losses = np.asarray(on_tp(train, (whole, tokens, tokens), P())(layers, x, y))

    def error(found, wanted):
        return float(jnp.abs(found - wanted).max() / jnp.abs(wanted).max())

    small = {name: [np.asarray(g) for g in found] for name, found in small.items()}
    plain = on_tp(partial(loss, sp=False), (whole, P(), P()), P())
    split = on_tp(lambda *args: all_reduce(loss(*args, sp=True), "tp"), (whole, tokens, tokens), P())
    sent = {name: forward_bytes(run, layers, x, y) for name, run in (("tp", plain), ("sp", split))}
    return [
        equal("by hand: the loss with sp against plain tp", float(value), float(expected), within=1e-12),
        at_most(
            "by hand: error of the matrices' gradients",
            max(error(matrices[name][at], wanted[at][name]) for name in MATRICES for at in range(LAYERS)),
            1e-11,
        ),
        at_most(
            "by hand: scales and biases: error of gradients, rank 0",
            max(error(small[name][at][0], wanted[at][name]) for name in SMALL for at in range(LAYERS)),
            1e-11,
        ),
        at_most(
            "by hand: scales and biases: largest difference of gradients between ranks",
            max(float(np.ptp(small[name][at], axis=0).max()) for name in SMALL for at in range(LAYERS)),
            1e-12,
        ),
        holds(
            "by hand: scales and biases: JAX takes gradients for equal on all ranks",
            typed_equal(made, whole, layers, x, y),
        ),
        equal("by hand: bytes sent forward, sp over plain tp", sent["sp"] / sent["tp"], 1),
        at_least("by hand: loss of the first step over that of step 30", float(losses[0] / losses[-1]), 1.3),
    ]


def forward_bytes(run, *args) -> int:
    """Of what is large: the loss is a number."""
    return sum(c.sent_bytes(MESH) for c in collectives_of(run.trace(*args).jaxpr, MESH) if c.full_bytes > 8)


def typed_equal(made, specs, *args) -> bool:
    """Whether `shard_map` lets gradients leave as the parameters came."""
    tokens = P(None, "tp")
    try:
        on_tp(made, (specs, tokens, tokens), (P(), specs)).trace(*args)
    except ValueError:
        return False
    return True


def ring_checks() -> list[Check]:
    """Gather and matmul as one ring: a chunk is multiplied while the next is on its way."""
    rng = np.random.default_rng(3)
    x, w = rng.standard_normal((B, T, D)), rng.standard_normal((D, F))
    specs = (P(None, "tp"), P(None, "tp")), P(None, None, "tp")
    ring, plain = on_tp(gather_matmul, *specs), on_tp(lambda x, w: enter(x, sp=True) @ w, *specs)
    error = np.abs(np.asarray(ring(x, w)) - np.asarray(plain(x, w))).max()
    return [
        at_most("ring matmul: largest difference from gather, then multiply", error, 1e-12),
        equal("ring matmul: bytes over those of the gather", forward_bytes(ring, x, w) / forward_bytes(plain, x, w), 1),
    ]


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

SMALL_GPT = GPT2(num_layers=2, width=1024, num_heads=16, ffn_width=4096, seq_len=512, vocab_size=1000)


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


def activations() -> tuple[list[Check], list[list[str]], list[list[str]]]:
    checks, paper_rows, our_rows = [], [], []
    for name, ((t, sp, scores), published) in PAPER.items():
        parts = paper(t, sp, scores)
        total, remat = sum(parts.values()), "none" if scores else "selective"
        library = layer_activation_bytes(GPT3, 1, tp=t, sp=sp, remat=remat)
        checks += [
            equal(f"GPT-3, {name}: the library's form, bytes", float(library), total, within=1e-12),
            equal(f"GPT-3, {name}: as published", round(total / GIB, 2), published, unit="GiB"),
        ]
        paper_rows.append([name, *[f"{part / GIB:.3f}" for part in parts.values()], f"{total / GIB:.2f}"])
    for t in (1, 2, 4, 8):
        row = [str(t)]
        for sp in (False, True):
            checks.append(equal(f"our layer, tp={t}{', sp' * sp}: bytes a token kept", ours(t, sp), our_form(t, sp)))
            theirs = (8 / (t if sp else 1) + 24 / t) * SMALL_GPT.width  # without its two masks
            row += [f"{theirs:,.0f}", f"{ours(t, sp):,.0f}", f"{ours(t, sp, whole_layer=True):,.0f}"]
        again = ours(t, False, whole_layer=True) / ours(t, True, whole_layer=True)
        checks.append(equal(f"our layer recomputed, tp={t}: kept without sp over with it", again, t))
        our_rows.append(row)
    return checks, paper_rows, our_rows


# ------------------------------------------------------------------------------------------- our step

MODEL = dataclasses.replace(PRESETS["proof"], width=256, ffn_width=1024)


def our_step() -> tuple[list[Check], list[list[str]]]:
    """Messages over tp of a step with and without sp: eight sequences, fp32."""
    message = 8 * MODEL.seq_len * MODEL.width * 4
    rows, bytes_of = [], {}
    for name, sp in (("tp=8", False), ("tp=8, sp", True)):
        config = small_run("tp=8", MODEL, sp=sp)
        found = [c for c in traced(config)[1] if c.axes == ("tp",)]
        large = [c for c in found if c.full_bytes == message]
        bytes_of[name] = sum(c.sent_bytes(config.parallel.mesh) for c in large)
        shared = [c for c in found if c.full_bytes > 4096 and c.full_bytes != message]
        kinds = {
            kind: sum(c.count for c in large if c.kind == kind)
            for kind in ("all_reduce", "all_gather", "reduce_scatter")
        }
        rows.append([name, *map(str, kinds.values()), f"{bytes_of[name]:,}", f"{sum(c.full_bytes for c in shared):,}"])
    d, layers = MODEL.width, MODEL.num_layers
    owed = 4 * (layers * 6 * d + 2 * d + MODEL.seq_len * d)  # norms and biases of layers, the last norm, positions
    checks = [
        equal("our step: bytes of activations over tp, sp over plain", bytes_of["tp=8, sp"] / bytes_of["tp=8"], 1),
        equal("our step with sp: bytes of gradients to be summed over tp", float(rows[1][-1].replace(",", "")), owed),
        equal("our step without sp: bytes of gradients to be summed over tp", float(rows[0][-1].replace(",", "")), 0),
    ]
    return checks, rows


# ------------------------------------------------------------------------------------------- the lab


def run(broken: str | None) -> Result:
    with jax.enable_x64(True):
        checks = by_hand(broken)
        if broken:
            return Result(checks)
        checks += ring_checks()
    byte_checks, paper_rows, our_rows = activations()
    step_checks, step_rows = our_step()
    return Result(
        [*checks, *byte_checks, *step_checks],
        tables=[
            Table("gpt3", ["GiB a layer", *paper(1, False, True), "total"], paper_rows),
            Table(
                "step",
                ["run", "all-reduces", "all-gathers", "reduce-scatters", "bytes sent", "gradients to sum, bytes"],
                step_rows,
            ),
            Table("ours", ["tp", "paper", "ours", "recomputed", "paper, sp", "ours, sp", "recomputed, sp"], our_rows),
        ],
        pictures={"gpt3": draw_gpt3, "ours": draw_ours},
        guesses=guesses(),
    )


def draw_gpt3():
    cases = {name: paper(*arguments) for name, (arguments, _) in PAPER.items() if name != "one device"}
    parts = {part: [case[part] / GIB for case in cases.values()] for part in paper(1, False, True)}
    return drawing.stacks("Kept by one GPT-3 layer, 8 ranks (formula)", "GiB", list(cases), parts)


def draw_ours():
    sizes = (1, 2, 4, 8)
    d = SMALL_GPT.width
    curves = {
        "paper, tp": (sizes, [8 + 24 / t for t in sizes]),
        "paper, sp": (sizes, [32 / t for t in sizes]),
        "ours, tp": (sizes, [ours(t, False) / d for t in sizes]),
        "ours, sp": (sizes, [ours(t, True) / d for t in sizes]),
    }
    return drawing.lines("Kept by a layer (ours: traced)", "tp", "bytes a token / width", curves, log_x=True)


def guesses() -> dict[str, float]:
    whole = paper(8, False, True)
    long = 34 * 8192 * 8192 / 8 * 80 / 1e9
    return {
        "share": 100 * whole["whole on every rank"] / sum(whole.values()),
        "bytes": 1,
        "long": long,
        "without": (10 + 24 / 8) * 8192 * 8192 * 80 / 1e9,
        "limit": 4 * 1024 + 16,
    }


ONE, BETWEEN = (
    "by hand: scales and biases: error of gradients, rank 0",
    "by hand: scales and biases: largest difference of gradients between ranks",
)
LAB = Lab(
    name="sequence-parallel",
    title="Sequence parallelism",
    question="What does tensor parallelism leave whole on every rank, and what does it cost to split that too?",
    run=run,
    devices=8,
    breaks={
        "norms": {ONE, BETWEEN, "by hand: scales and biases: JAX takes gradients for equal on all ranks"},
        "masks": {"by hand: the loss with sp against plain tp", "by hand: error of the matrices' gradients", ONE},
    },
)
