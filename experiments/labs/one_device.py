"""The loop that every other lab distributes, what it keeps in memory, and what it takes for granted."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxdist.plan.formulas import state_bytes, training_flops
from jaxdist.plan.hardware import find_hardware

from . import drawing, tiny
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table

STEPS, ROWS, LR = 300, 64, 3e-3
MFU = 0.4  # of the peak, as published runs reach
TOKENS_PER_PARAMETER = 20  # Chinchilla, arXiv 2203.15556
SIZES = {"12.5M": 12.5e6, "124M": 124e6, "1.5B": 1.5e9, "7B": 7e9, "70B": 70e9}
DAY = 86_400


@partial(jax.jit, static_argnames=("causal", "correct"))
def train_step(params, moments, step, tokens_BT, targets_BT, causal=True, correct=True):
    """All of training on one device: loss, gradient, update."""

    def mean_loss(params):
        return tiny.loss_sum(params, tokens_BT, targets_BT, causal) / targets_BT.size

    loss, grads = jax.value_and_grad(mean_loss)(params)
    params, moments = tiny.adam(params, grads, moments, step, LR, correct)
    return params, moments, loss


def train(steps: int, **broken) -> tuple[dict, list[float]]:
    """(parameters, loss of each step)."""
    params, losses = tiny.initial(), []
    moments = tiny.no_moments(params)
    for step in range(1, steps + 1):
        params, moments, loss = train_step(params, moments, step, *tiny.text(ROWS, seed=step), **broken)
        losses.append(float(loss))
    return params, losses


def train_with_optax(steps: int) -> dict:
    """The same by a library that shares no code with ours."""
    optimizer = optax.adam(LR, b1=tiny.ADAM["b1"], b2=tiny.ADAM["b2"], eps=tiny.ADAM["eps"])
    params = tiny.initial()
    state = optimizer.init(params)
    for step in range(1, steps + 1):
        tokens, targets = tiny.text(ROWS, seed=step)
        grads = jax.grad(lambda p: tiny.loss_sum(p, tokens, targets) / targets.size)(params)  # noqa: B023
        updates, state = optimizer.update(grads, state)
        params = optax.apply_updates(params, updates)
    return params


def temporary_bytes(num_rows: int) -> int:
    """What the compiled step needs besides its arguments and results, at this batch."""
    params = tiny.initial()
    batch = jax.ShapeDtypeStruct((num_rows, tiny.T), jnp.int32)
    compiled = train_step.lower(params, tiny.no_moments(params), 1, batch, batch).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def sees_the_future(causal: bool) -> bool:
    """Whether the logits of the first half change with the tokens of the second."""
    tokens, _ = tiny.text(4, seed=0)
    other = tokens.copy()
    other[:, tiny.T // 2 :] = (other[:, tiny.T // 2 :] + 1) % tiny.V
    before, after = (tiny.logits(tiny.initial(), x, causal)[:, : tiny.T // 2] for x in (tokens, other))
    return bool(jnp.any(before != after))


def days_on_one(parameters: float) -> float:
    """Days of one H100 for 20 tokens a parameter."""
    flops = 6 * parameters * TOKENS_PER_PARAMETER * parameters
    return flops / (MFU * find_hardware("h100").peak_flops["bfloat16"]) / DAY


@lab(
    title="Why one device stops",
    question="What does training on one device take for granted, and which of it fails first?",
    breaks={
        "mask": {"no model predicts better*", "largest difference*", "no position sees a later one"},
        "bias-correction": {"largest difference*"},
    },
)
def run(broken: str | None) -> Findings:
    causal, correct = broken != "mask", broken != "bias-correction"
    entropy = tiny.source()[1]
    _, losses = train(STEPS, causal=causal, correct=correct)
    few, _ = train(5, causal=causal, correct=correct)
    theirs = train_with_optax(5)
    apart = max(float(jnp.abs(few[name] - theirs[name]).max()) for name in few)
    last = float(np.mean(losses[-20:]))
    yield at_most("the loss falls: last over first", last / losses[0], 0.7)
    yield at_least("no model predicts better than the source's entropy", last, entropy - 0.03, "nats")
    yield at_most("largest difference from optax's Adam after 5 steps", apart, 2e-5)
    yield holds("no position sees a later one", not sees_the_future(causal))
    if broken:
        return

    batches = [64, 128, 256, 512]
    temporaries = [temporary_bytes(rows) for rows in batches]
    per_row = (temporaries[-1] - temporaries[0]) / (batches[-1] - batches[0])
    straight = max(
        abs(temporaries[0] + per_row * (rows - batches[0]) - found) / found
        for rows, found in zip(batches, temporaries, strict=True)
    )
    seven, library = days_on_one(7e9), float(training_flops(7e9, 140e9))
    yield at_most("activations grow in a straight line with the batch: largest deviation", straight, 0.05)
    yield equal("GB of state of 7B, by the library", state_bytes(7e9).total / 1e9, 16 * 7, unit="GB")
    yield equal("days of 7B by the library's FLOPs", library / (MFU * 989e12) / DAY, seven, within=0.001, unit="days")
    batch_rows = [[rows, found / 1024, found / 1024 / rows] for rows, found in zip(batches, temporaries, strict=True)]
    sizes = []
    for name, n in SIZES.items():
        state, days = state_bytes(n).total, days_on_one(n)
        days = f"{days:,.1g}" if days < 1 else f"{days:,.0f}"
        sizes.append([name, state / 1e9, "yes" if state < 80e9 else "no", TOKENS_PER_PARAMETER * n / 1e9, days])
    loss_rows = [[n, losses[n - 1], losses[n - 1] - entropy] for n in (1, 10, 30, 100, 200, STEPS)]
    curves = {"training": (range(1, STEPS + 1), losses), "entropy of the source": ([1, STEPS], [entropy, entropy])}
    title, y = "One device: loss, and the least there is", "loss, nats a token"
    columns = "GB of state {:,.1f} | in one 80 GB device | tokens, billion {:,.2f} | days on one H100"
    yield table("loss", "step | loss, nats {:.3f} | above the source's entropy {:.3f}", loss_rows)
    yield table("batch", "sequences in a batch | temporary KiB {:,.0f} | KiB a sequence {:.1f}", batch_rows)
    yield table("sizes", f"parameters | {columns}", sizes)
    yield Picture("loss", lambda: drawing.lines(title, "step", y, curves, marks=False))
    yield Guesses(start=float(np.log(tiny.V)), days=seven, memory=1000 * per_row / 2**20, twice=4)
