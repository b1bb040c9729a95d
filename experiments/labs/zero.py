"""ZeRO and FSDP: what each stage shards, what it holds, what it sends, and that it still trains the same model."""

import dataclasses
import math
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import parse_mesh
from jaxdist.models.base import Model
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_gather, all_reduce, rank, reduce_scatter, size, varying
from jaxdist.params import STACKED
from jaxdist.placement import make_layout
from jaxdist.plan.formulas import RECIPES, state_bytes
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig
from jaxdist.verification import verify_model

from . import drawing
from .exchanges import accepted, on_mesh, on_ranks, relative_error, sent_by, spread, traced
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table
from .tools import compiled_levels, small_run

# ------------------------------------------------------------------------------------------------------------- by hand

N, LAYERS, WIDTH, ROWS, STEPS = 8, 3, 16, 8, 30
SIZE = LAYERS * WIDTH * WIDTH  # parameters
LR = 0.02


def layer(w, x):
    """x[B, D] -> [B, D]."""
    return jnp.tanh(x @ w.reshape(WIDTH, WIDTH))


def mean_error(x, y):
    """Error of a rank's rows, as a part of the mean over all: its sum over ranks is the loss."""
    return jnp.sum((x - y) ** 2) / (N * ROWS)


def forward(weights, x, y):
    """weights[S], x[B, D] -> this rank's part of the loss."""
    for w in weights.reshape(LAYERS, -1):
        x = layer(w, x)
    return mean_error(x, y)


def one_device(state, x, y):
    """weights[S], momentum[S] -> both after an update, and the loss."""
    weights, momentum = state
    now, grads = jax.value_and_grad(forward)(weights, x, y)
    momentum = 0.9 * momentum + grads
    return (weights - LR * momentum, momentum), now


def zero1(state, x, y, sums: bool = True):
    """weights[S] on every rank, momentum[S_dp] -> both after an update: each rank makes that of its own part."""
    weights, momentum = state
    now, grads = jax.value_and_grad(forward)(weights, x, y)
    momentum = 0.9 * momentum + (reduce_scatter(grads, "dp", 0) if sums else my_part(grads))
    return (all_gather(my_part(weights) - LR * momentum, "dp", 0), momentum), now


def my_part(x):
    """x[S] on every rank -> x[S_dp]. Sends nothing."""
    return lax.dynamic_slice_in_dim(x, rank("dp") * (x.size // size("dp")), x.size // size("dp"))


def zero3(state, x, y, replicas: str | None = None, stale: bool = False, sums: bool = True):
    """weights[L, D*D_dp], momentum and the last step's weights alike -> all after an update.

    A layer is gathered where it is used, and by `checkpoint` again in backward. The transpose of a gather is a
    reduce-scatter, so the gradient of a shard is summed over dp. replicas: an axis along which shards are equal (hybrid
    sharding): their gradients are summed over it. stale: the first layer was gathered too early.
    """
    shards, momentum, before = state
    used = shards.at[0].set(before[0]) if stale else shards
    if replicas:  # else JAX, which knows that these are equal, would sum their gradients itself
        used = varying(used, replicas)

    def loss(used):
        h = x
        for shard in used:
            h = jax.checkpoint(lambda shard, h: layer(all_gather(shard, "dp", 0), h))(shard, h)
        return mean_error(h, y)

    now, grads = jax.value_and_grad(loss)(used)
    momentum = 0.9 * momentum + (all_reduce(grads, replicas) if replicas and sums else grads)
    return (shards - LR * momentum, momentum, shards), now


def trained(step: Callable, state, x, y):
    """(state, losses) of all steps."""
    return lax.scan(lambda state, _: step(state, x, y), state, length=STEPS)


def by_hand(broken: str | None) -> Findings:
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(SIZE) / math.sqrt(WIDTH)
    x, y = rng.standard_normal((2, N, ROWS, WIDTH))
    y = np.tanh(0.5 * y)
    alone, _ = jax.jit(partial(trained, one_device))((weights, 0 * weights), *(a.reshape(-1, WIDTH) for a in (x, y)))
    cases = {
        "ZeRO-1": (partial(zero1, sums=broken != "no-sum"), 1, 2 * (N - 1) / N),
        "ZeRO-3": (partial(zero3, stale=broken == "stale"), 1, 3 * (N - 1) / N),
        "HSDP of 2 x 4": (partial(zero3, replicas="replica", sums=broken != "replicas"), 2, 3 * 3 / 4 + 2 * 1 / 2 / 4),
    }
    for name, (step, replicas, volume) in cases.items():
        n = N // replicas
        shards = np.tile(weights.reshape(LAYERS, n, -1).swapaxes(0, 1), (replicas, 1, 1))
        whole = np.tile(weights, (N, 1))
        state = (whole, np.zeros((N, SIZE // N))) if name == "ZeRO-1" else (shards, 0 * shards, shards)

        def finish(x, y, *state, step=step, name=name):
            (found, *_), losses = trained(step, state, x, y)
            return (found if name == "ZeRO-1" else all_gather(found, "dp", 1).reshape(-1)), losses

        found, losses = map(np.asarray, on_ranks(finish, n, replicas)(x, y, *state))
        once = on_ranks(lambda x, y, *state, step=step: step(state, x, y), n, replicas)
        sent = sent_by(once, n, x, y, *state, replicas=replicas)
        error = relative_error(found[0], alone[0])
        yield equal(
            f"{name}: bytes a device sends in a step, over those of the weights", sent.bytes_sent / 8 / SIZE, volume
        )
        yield at_most(f"{name}: error of the weights after {STEPS} steps against one device", error, 1e-12)
        yield at_most(f"{name}: largest difference between ranks", spread(found), 1e-12)
        yield at_least(f"{name}: loss of the first step over the last, rank 0", losses[0, 0] / losses[0, -1], 1.3)
    typed = typed_equal(cases["HSDP of 2 x 4"][0])
    yield holds("HSDP of 2 x 4: JAX takes shards for equal on both replicas", typed)


def typed_equal(step: Callable) -> bool:
    """Whether the updated shards may leave as one value for both replicas."""
    rows, shards = P(("replica", "dp")), P(None, "dp")
    specs = (((shards,) * 3), rows, rows)
    run = on_mesh("replica=2,dp=4", lambda state, x, y: step(state, x[0], y[0])[0], specs, (shards,) * 3)
    data = np.zeros((N, ROWS, WIDTH))
    return accepted(run, (np.zeros((LAYERS, WIDTH * WIDTH)),) * 3, data, data)


# --------------------------------------------------------------------------------------------------- the library's step

MODEL = PRESETS["proof"]
NAMES = ("none", "ZeRO-1", "ZeRO-2", "ZeRO-3")
WIDER = dataclasses.replace(MODEL, width=256, ffn_width=1024, vocab_size=1000)
CASES = {
    "none": ("dp=8", {}),
    "ZeRO-1": ("dp=8", {"zero": 1}),
    "ZeRO-2": ("dp=8", {"zero": 2}),
    "ZeRO-3": ("dp=8", {"zero": 3}),
    "ZeRO-3, kept after forward": ("dp=8", {"zero": 3, "reshard_after_forward": False}),
    "HSDP of 2 x 4": ("replica=2,dp=4", {"zero": 3}),
}


@cache
def leaf_sizes(model: Model) -> dict[str, int]:
    """Elements of every parameter, stacked over layers, by name."""
    return {leaf.name: math.prod(leaf.shape) for leaf in jax.tree.leaves(make_layout(model, ParallelConfig()).leaves)}


def held(psi: float, n: int, stage: int, recipe: str = "mixed-adam") -> tuple[float, float, float]:
    """Bytes of weights, gradients and optimiser on one device: each divided by n from its stage on."""
    each = RECIPES[recipe]
    parts = ((each.parameter, 3), (each.gradient, 2), (each.optimizer, 1))
    return tuple(psi * size / (n if stage >= first else 1) for size, first in parts)


def volume(name: str, psi: float) -> tuple[float, float]:
    """Elements that a device sends in a step: over dp and over replicas."""
    stage = {"none": 0, "ZeRO-1": 1, "ZeRO-2": 2}.get(name, 3)
    others = sum(size for leaf, size in leaf_sizes(MODEL).items() if not leaf.startswith(STACKED) and leaf != "tokens")
    n = 4 if "HSDP" in name else 8
    again = stage == 3 and "kept" not in name  # gathered in backward too; positions and the final norm are not
    elements = 3 * psi - others if again else 2 * psi
    return (n - 1) / n * elements, psi / n if "HSDP" in name else 0


def in_the_library() -> Findings:
    psi, rows = num_parameters(MODEL, padded=True), []
    for name, (mesh, settings) in CASES.items():
        config = small_run(mesh, MODEL, **settings)
        shape, found = config.parallel.mesh, [c for c in traced(config)[1] if c.full_bytes > 256]
        sent = {axis: sum(c.sent_bytes(shape) for c in found if c.axes == (axis,)) / 4 for axis in ("dp", "replica")}
        over_dp, over_replicas = volume(name, psi)
        half, _ = traced(small_run(mesh, MODEL, dtype="bfloat16", **settings))
        kept = local_bytes(half.abstract_state()) / psi
        weights, _, optimizer = held(1, shape.dp, settings.get("zero", 0))
        yield equal(f"{name}: bytes a parameter kept between steps, bf16", kept, weights + optimizer, within=1e-3)
        yield equal(f"{name}: elements sent over dp", sent["dp"], over_dp)
        yield equal(f"{name}: elements sent over replicas", sent["replica"], over_replicas)
        rows.append([name, kept, sent["dp"] / psi, sent["replica"] / psi])
    columns = "run | bytes a parameter {:.2f} | sent over dp / Ψ {:.2f} | over replicas / Ψ {:.2f}"
    yield table("ours", columns, rows)


def compiled_peaks() -> Findings:
    """What a compiler says of a wider model on eight devices."""
    peaks = [compiled_levels(small_run("dp=8", WIDER, zero=stage)).compiled.peak / 2**20 for stage in range(4)]
    falls = all(more > less for more, less in pairwise(peaks))
    yield holds("compiled peak falls with every stage", falls, " > ".join(f"{peak:,.1f}" for peak in peaks))
    yield table("peaks", "run | compiled peak, MiB {:,.1f}", zip(NAMES, peaks, strict=True))


# --------------------------------------------------------------------------------------------- gathered at once

WRAPPED = {"8B": PRESETS["llama3-8b"], "70B": PRESETS["llama3-70b"]}


def wrapping() -> Findings:
    """bf16 weights on one of 64 devices: its shard, and those gathered at the same time."""
    rows = []
    for name, model in WRAPPED.items():
        sizes = leaf_sizes(model)
        psi, block = sum(sizes.values()), block_size(model)
        outer = max(size for leaf, size in sizes.items() if not leaf.startswith(STACKED))
        together = {
            "everything at once": psi,
            "each layer": max(block, outer),
            "each layer, the next one prefetched": max(2 * block, outer + block),
        }
        for wrap, gathered in together.items():
            rows.append([name, wrap, 2 * psi / 64 / 1e9, 2 * gathered / 1e9, 2 * (psi / 64 + gathered) / 1e9])
    _, found = traced(small_run("dp=8", MODEL, zero=3))
    in_loops = max(c.full_bytes for c in found if c.depth and c.kind == "all_gather") / 4
    columns = "model | gathered together | shard, GB {:,.1f} | gathered, GB {:,.1f} | both, GB {:,.1f}"
    yield equal("our step gathers one layer at a time: elements", in_loops, block_size(MODEL))
    yield table("wrapping", columns, rows)


def block_size(model: Model) -> float:
    return sum(size for leaf, size in leaf_sizes(model).items() if leaf.startswith(STACKED)) / model.num_layers


# ----------------------------------------------------------------------------------------------------------- the lab


@lab(
    title="ZeRO and FSDP",
    question="What does each ZeRO stage shard, what does it save, and what does it send for that?",
    devices=N,
    breaks={
        "no-sum": {"ZeRO-1: bytes a device sends*", "ZeRO-1: error*"},
        "stale": {"ZeRO-3: error*"},
        "replicas": {"HSDP of 2 x 4: [!l]*", "HSDP of 2 x 4: largest*"},  # all but its loss
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from by_hand(broken)
    if broken:
        return
    for part in (in_the_library, wrapping, compiled_peaks):
        yield from part()
    model = dataclasses.replace(MODEL, num_layers=2)
    report = verify_model(model, "replica=2,dp=2", zero=2, batch_size=8, dtype="float64", device="cpu")
    yield holds("our step, ZeRO-2, replica=2, dp=2: every leaf is that of one device", report.ok)
    for stage, published in ((1, 31.4), (2, 16.6), (3, 1.88)):
        total, name = sum(held(7.5e9, 64, stage)) / 1e9, f"7.5B on 64 devices, stage {stage}"
        library = state_bytes(7.5e9, zero=stage, dp=64).total / 1e9
        yield equal(f"{name}, against ZeRO's figure 1", total, published, within=0.005, unit="GB")
        yield equal(f"{name}: the library's count", library, total, unit="GB", within=1e-12)
    sizes = [[n, *[sum(held(7.5e9, n, stage)) / 1e9 for stage in range(4)]] for n in (1, 4, 16, 64, 256, 1024)]
    yield table("papers", "devices | " + " | ".join(f"{name} {{:,.1f}}" for name in NAMES), sizes)
    yield Picture("ranks", draw_ranks)
    yield Picture("held", draw_held)
    yield Guesses(
        one=sum(held(7.5e9, 64, 1)) / 1e9,
        three=sum(held(7.5e9, 64, 3)) / 1e9,
        volume=1.5,
        hybrid=2 * 7 / 8 * 70e9 / 8 * 4 / 1e9,
        plain=63 / 64 * 70e9 * (4 + 2 + 2) / 1e9,
    )


def draw_ranks():
    rows = {}
    for stage, name in enumerate(NAMES):
        layout = make_layout(MODEL, ParallelConfig(parse_mesh("dp=4"), zero=stage))
        sharded = (layout.params_sharded, layout.grads_sharded, layout.sharded)
        for array, split in zip(("weights", "gradients", "optimiser"), sharded, strict=True):
            rows[f"{name}: {array}"] = np.eye(4) if split else np.ones((4, 4))
    return drawing.holdings("A colour is a quarter of the parameters", rows)


def draw_held():
    parts = ("weights", "gradients", "optimiser")
    bytes_of = {part: [held(1, 8, stage)[at] for stage in range(4)] for at, part in enumerate(parts)}
    return drawing.stacks("Bytes a parameter on 8 devices (formula)", "bytes", NAMES, bytes_of)
