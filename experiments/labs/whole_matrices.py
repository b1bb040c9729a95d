"""Optimisers that need whole matrices: what Muon does to a gradient, and what that costs where a rank has a part.

B matrices, M rows (input), N columns (output). The decoder is `tiny`, over 4 ranks of one axis "tp".
"""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import all_to_all
from jaxdist.parallel.muon import COLUMNS, Matrix, Way, flops, messages, orthogonalize
from jaxdist.plan.proof.trace import sent_among

from . import drawing, tiny
from .exchanges import on_mesh, sent_over
from .lab import Findings, Guesses, Picture, at_most, equal, lab, table

TP, STEPS, ROWS, LARGEST = 4, 60, 16, 4
SEEDS = range(3)
RATES = {"Adam": (0.003, 0.01, 0.03), "Muon": (0.01, 0.03, 0.1)}
# Of each leaf that Muon updates: its shape, what a dim is to the matrix, and the mesh axis of each dim.
LEAVES = {
    "qkv": ((tiny.D, 3, tiny.D), ("in", None, "out"), (None, None, "tp")),
    "out": ((tiny.D, tiny.D), ("in", "out"), ("tp", None)),
    "up": ((tiny.D, tiny.F), ("in", "out"), (None, "tp")),
    "down": ((tiny.F, tiny.D), ("in", "out"), ("tp", None)),
}
UP_8B, SPLIT = (32, 4096, 14336), 8  # the `up` of Llama 3 8B in all its layers, and the ranks that split its columns


def declared(name: str, broken: str | None = None) -> Matrix:
    """What Muon is told of a leaf; with a break, what it should not be told."""
    shape, sides, spec = LEAVES[name]
    if broken == "fused":
        sides = tuple(side or "out" for side in sides)
    if broken == "shard":
        spec = ()  # of each rank's part, as if it were the whole
    if broken == "local-scale":
        shape = tuple(n // TP if axis else n for n, axis in zip(shape, spec, strict=True))
    return Matrix(shape, sides, spec)


def update(x: jax.Array, matrix: Matrix) -> jax.Array:
    """Muon's direction of one leaf, as large as AdamW's."""
    return matrix.scale("rms") * orthogonalize(x, matrix)


def by_numpy(x: np.ndarray) -> np.ndarray:
    """The same of the whole leaf, in float64, matrix by matrix, from the published iteration."""
    whole, made = np.asarray(x, np.float64).reshape(len(x), -1, x.shape[-1]), []
    for part in whole.swapaxes(0, 1):
        y = part if part.shape[0] <= part.shape[1] else part.T
        y = y / np.linalg.norm(y)
        for _ in range(5):
            gram = y @ y.T
            y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
        y = y if part.shape[0] <= part.shape[1] else y.T
        made.append(0.2 * max(part.shape) ** 0.5 * y)
    return np.stack(made, 1).reshape(x.shape)


@cache
def gradient() -> dict[str, np.ndarray]:
    """The first gradient of the decoder, of the leaves that Muon updates."""
    tokens, targets = tiny.text(ROWS, seed=0)
    grads = jax.grad(lambda p: tiny.loss_sum(p, tokens, targets) / targets.size)(tiny.initial())
    return {name: np.asarray(grads[name]).reshape(shape) for name, (shape, *_) in LEAVES.items()}


def in_the_largest(x: np.ndarray) -> float:
    """The part of a matrix's squares that its LARGEST largest singular values hold."""
    squares = np.linalg.svd(x, compute_uv=False) ** 2
    return float(squares[:LARGEST].sum() / squares.sum())


def direction(x: jax.Array, name: str, kind: str) -> jax.Array:
    """Muon's update of a whole leaf on one device, or what ranks with a break would make of it together."""
    whole, wrong = declared(name), declared(name, kind)
    if kind != "shard":
        return wrong.scale("rms") * orthogonalize(x, Matrix(x.shape, wrong.sides, ()))
    dim = whole.spec.index("tp")
    parts = [update(part, Matrix(part.shape, whole.sides, ())) for part in jnp.split(x, TP, dim)]
    return jnp.concatenate(parts, dim)


def losses(kind: str, rate: jax.Array, params: dict, batches) -> jax.Array:
    """Losses[steps] of one run: Adam's, or with Muon, right or broken, for the leaves of the layer. The rate falls to 0
    over the second half."""

    def step(carry, batch):
        params, moments, momentum, at = carry
        loss, grads = jax.value_and_grad(lambda p: tiny.loss_sum(p, *batch) / batch[1].size)(params)
        lr = rate * jnp.minimum(1.0, 2 * (1 - at / STEPS))
        updated, moments = tiny.adam(params, grads, moments, at + 1, lr)
        momentum = jax.tree.map(lambda m, g: 0.95 * m + g, momentum, grads)
        for name in LEAVES if kind != "Adam" else ():
            nesterov = (grads[name] + 0.95 * momentum[name]).reshape(LEAVES[name][0])
            updated[name] = params[name] - lr * direction(nesterov, name, kind).reshape(params[name].shape)
        return (updated, moments, momentum, at + 1), loss

    start = params, tiny.no_moments(params), jax.tree.map(jnp.zeros_like, params), 0
    return jax.lax.scan(step, start, batches)[1]


@cache
def trained(kind: str) -> tuple[float, np.ndarray]:
    """(the best of RATES, its losses[seeds, steps]): the lowest mean loss of the last tenth, over all seeds."""
    rates = RATES["Adam" if kind == "Adam" else "Muon"]
    texts = [[tiny.text(ROWS, seed=1000 * seed + step) for step in range(STEPS)] for seed in SEEDS]
    batches = jax.tree.map(lambda *x: jnp.stack(x), *[jax.tree.map(lambda *x: np.stack(x), *text) for text in texts])
    params = jax.tree.map(lambda *x: jnp.stack(x), *[tiny.initial(seed) for seed in SEEDS])
    each_seed = jax.vmap(partial(losses, kind), (None, 0, 0))
    found = np.asarray(jax.jit(jax.vmap(each_seed, (0, None, None)))(jnp.asarray(rates), params, batches))
    best = int(found[:, :, -STEPS // 10 :].mean((1, 2)).argmin())
    return rates[best], found[best]


def last(kind: str) -> np.ndarray:
    """Excess of the last tenth's mean loss over the text's entropy, by seed, nats a token."""
    return trained(kind)[1][:, -STEPS // 10 :].mean(1) - tiny.source()[1]


@lab(
    title="Whole matrices",
    question="What does an optimiser do that needs whole matrices, where every rank has a part of each?",
    breaks={
        "shard": {"* of NumPy's"},
        "fused": {"qkv: * of NumPy's"},
        "local-scale": {"up: * of NumPy's", "down: * of NumPy's"},
    },
    devices=TP,
)
def run(broken: str | None) -> Findings:
    grads = gradient()
    on_ranks = {}
    for name, (_, _, spec) in LEAVES.items():
        on_ranks[name] = on_mesh(f"tp={TP}", partial(update, matrix=declared(name, broken)), P(*spec), P(*spec))
        ours, wanted = np.asarray(on_ranks[name](grads[name])), by_numpy(grads[name])
        yield at_most(f"{name}: error of NumPy's", float(np.linalg.norm(ours - wanted) / np.linalg.norm(wanted)), 1e-5)
    if broken:
        return

    matrices = {f"{'qkv'[at]} of qkv": grads["qkv"][:, at] for at in range(3)}
    matrices |= {name: x for name, x in grads.items() if name != "qkv"}
    spectra = [[name, in_the_largest(x), in_the_largest(by_numpy(x))] for name, x in matrices.items()]
    columns = f"in the {LARGEST} largest directions, gradient {{:.0%}} | in the {LARGEST} largest, update {{:.0%}}"
    yield table("spectra", f"matrix | {columns}", spectra)
    for name in LEAVES:
        matrix = declared(name)
        local = matrix.sizes([n // TP if axis else n for n, axis in zip(matrix.shape, matrix.spec, strict=True)])
        ranks = [TP if axes else 1 for axes in matrix.axes]
        sent = sum(each.count * sent_among(TP, each.kind, 4 * each.elements) for each in messages(local, ranks))
        found = sent_over(on_ranks[name], f"tp={TP}", grads[name])
        traced = sum(each.count * sent_among(TP, each.kind, each.full_bytes) for each in found)
        yield equal(f"{name}: bytes sent by a rank, as traced, and by the formula", traced, sent)
    yield table("ways", "way | GB sent by a rank {:.2f} | TFLOP of a rank {:.1f}", ways())
    results = [[kind, trained(kind)[0], *last(kind)] for kind in ("Adam", "Muon", "shard", "fused", "local-scale")]
    seeds = " | ".join(f"seed {seed} {{:.4f}}" for seed in SEEDS)
    yield table("training", f"optimiser | best rate {{:.3f}} | {seeds}", results)
    yield Picture("ranks", draw_ranks)
    yield Picture("losses", losses_picture)
    gram = UP_8B[1] ** 2
    yield Guesses(
        gram=gram / 1e6,
        exchanged=2 * (1 - 1 / SPLIT) * 4 * math.prod(UP_8B) / 2**30,
        flops=flops((1, *UP_8B[1:]), [1] * 4) / 1e12,
    )


def ways() -> list[list]:
    """What a rank sends and multiplies for the `up` of all layers, split by columns over SPLIT ranks."""
    num, rows, columns = UP_8B
    local, ranks = (num, rows, columns // SPLIT), [1, 1, SPLIT, 1]
    gathered = sent_among(SPLIT, "all_gather", 4 * math.prod(UP_8B))
    found = [["gathered by every rank", gathered / 1e9, flops(UP_8B, [1] * 4) / 1e12]]
    titles = {"exchanged: whole matrices to each rank": Way((COLUMNS,), None), "sums of X Xᵀ": Way((), COLUMNS)}
    for title, way in titles.items():
        sent = sum(each.count * sent_among(SPLIT, each.kind, 4 * each.elements) for each in messages(local, ranks, way))
        found.append([title, sent / 1e9, flops(local, ranks, way) / 1e12])
    return found


def losses_picture() -> str:
    curves = {
        f"{kind}, rate {rate:g}": (range(1, STEPS + 1), found.mean(0))
        for kind in ("Adam", "Muon", "shard")
        for rate, found in [trained(kind)]
    }
    title = "Loss, mean of three seeds; below it the text's entropy"
    return drawing.lines(title, "step", "nats a token", curves, marks=False, level=tiny.source()[1])


def draw_ranks() -> str:
    def body(columns_LND):
        whole_LND = all_to_all(columns_LND, "tp", 0, 1)
        found = (columns_LND, whole_LND, all_to_all(whole_LND, "tp", 1, 0))
        return [x.sum((0, 1))[None] / TP for x in found]

    own = np.repeat(np.eye(TP)[:, None], TP, 1)  # a quarter of the columns of four matrices, each with a number
    found = on_mesh(f"tp={TP}", body, P(None, "tp"), P("tp"))(own)
    names = ("split by columns", "exchanged", "sent back")
    return drawing.holdings("A colour is a matrix", dict(zip(names, map(np.asarray, found), strict=True)))
