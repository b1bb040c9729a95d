"""All-reduce by hand: the ring in one loop, what every algorithm sends, and which is fastest at which size."""

import math
from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.parallel import algorithms
from jaxdist.plan.collective_cost import CollectiveCost, collective_cost
from jaxdist.plan.hardware import find_hardware

from . import drawing
from .exchanges import between_processes, on_ranks, relative_error, sent_by, spread
from .lab import Check, Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table

N = 8
ELEMENTS = 1680  # of a message; divides by 2 to 8
LINK = find_hardware("h100").between
SIZES = [2.0**k for k in range(10, 31)]
GLOO_SIZES = tuple(2**k for k in range(10, 25, 2))


def ring(x: jax.Array, axis: str, num_steps: int | None = None, adds_own_again: bool = False) -> jax.Array:
    """Sum over `axis` in 2 (n-1) steps: n-1 that add up a chunk, n-1 that pass it on. x[S] {U_axis} -> x[S]."""
    n, me = lax.axis_size(axis), lax.axis_index(axis)
    chunks, own = x.reshape(n, -1), x.reshape(n, -1)[me]
    to_the_right = [(rank, (rank + 1) % n) for rank in range(n)]
    for step in range(2 * (n - 1) if num_steps is None else num_steps):
        arrived = lax.ppermute(chunks[(me - 1 - step) % n], axis, to_the_right)
        place = chunks.at[(me - 2 - step) % n]
        chunks = place.add(arrived) if step < n - 1 else place.set(arrived)
        if adds_own_again and step == n - 2:  # chunk `me` is complete now
            chunks = chunks.at[me].add(own)
    return chunks.reshape(x.shape)


def doubling(x: jax.Array, axis: str, distances: Sequence[int] = ()) -> jax.Array:
    """Sum over `axis` in log2 n steps: swap all you have with the rank 1, 2, 4, ... away. x[S] {U_axis} -> x[S]."""
    n = lax.axis_size(axis)
    for distance in distances or [2**k for k in range(int(math.log2(n)))]:
        x = x + lax.ppermute(x, axis, [(rank, rank ^ distance) for rank in range(n)])
    return x


# Steps, bytes that a device sends of a message of S bytes on n devices, and in words; what the library calls it.
FORMS = {
    "ring": lambda n, s: (2 * (n - 1), 2 * (n - 1) / n * s),
    "halving-doubling": lambda n, s: (2 * math.log2(n), 2 * (n - 1) / n * s),
    "doubling": lambda n, s: (math.log2(n), math.log2(n) * s),
    "tree": lambda n, s: (2 * math.log2(n), 2 * math.log2(n) * s),
    "central server": lambda n, s: (2 * (n - 1), 2 * (n - 1) * s),
}
WORDS = ("2 (n−1)/n", "2 (n−1)/n", "log2 n", "2 log2 n", "2 (n−1), at the server")
LIBRARY = {
    "ring": "ring_all_reduce",
    "halving-doubling": "halving_doubling_all_reduce",
    "tree": "tree_all_reduce",
    "central server": "central_all_reduce",
}


@lab(
    title="All-reduce by hand",
    question="Why does an all-reduce send 2(n-1)/n of the message per device, whatever n is?",
    devices=N,
    breaks={
        "last-step": {"ring: *", "training with the ring: largest difference*", "training with the ring: error*"},
        "own-chunk": {"ring: error*", "training with the ring: error*"},
        "same-pair": {"doubling: error*", "training with the doubling: e*", "training with the doubling: largest*"},
    },
)
def run(broken: str | None) -> Findings:
    steps = 2 * (N - 1) - 1 if broken == "last-step" else None
    by_hand = {
        "ring": partial(ring, num_steps=steps, adds_own_again=broken == "own-chunk"),
        "halving-doubling": algorithms.halving_doubling_all_reduce,
        "doubling": partial(doubling, distances=(1, 2, 2) if broken == "same-pair" else ()),
        "tree": algorithms.tree_all_reduce,
        "central server": algorithms.central_all_reduce,
    }
    counted = {}
    with jax.enable_x64(True):
        x = np.random.default_rng(0).uniform(-1, 1, (N, ELEMENTS))
        native = on_ranks(lambda x: lax.pcast(lax.psum(x, "dp"), "dp", to="varying"), N)(x)
        for name, algorithm in by_hand.items():
            program = on_ranks(partial(algorithm, axis="dp"), N)
            counted[name] = sent_by(program, N, x)
            steps, num_bytes = FORMS[name](N, x[0].nbytes)
            yield at_most(f"{name}: error against psum in float64", relative_error(program(x), native), 1e-14)
            yield equal(f"{name}: steps in the program", counted[name].steps, steps)
            yield equal(f"{name}: bytes a device sends", counted[name].bytes_sent, num_bytes)
        for name in ("ring", "doubling"):
            yield from training_checks(name, by_hand[name])
    if broken:
        return

    real = between_processes(GLOO_SIZES)
    yield cost_check(counted, x[0].nbytes)
    yield holds("two processes over TCP: every sum is right", real.right)
    for name, known in LIBRARY.items():
        ours = CollectiveCost(*FORMS[name](64, 1e9))
        yield holds(f"{name}: the library's closed form is this one", collective_cost(known, 64, 1e9) == ours)
    alpha, beta = least_squares(real.times)
    measured = [[kib(size), t * 1e6, (alpha + beta * size) * 1e6] for size, t in real.times]
    measured += [["fitted α", alpha * 1e6, ""], ["fitted bandwidth, GB/s", f"{1e-9 / beta:,.2f}", ""]]
    counts = [
        [name, c.steps, c.bytes_sent / x[0].nbytes, w] for (name, c), w in zip(counted.items(), WORDS, strict=True)
    ]
    ranks = " | ".join(f"rank {rank}" for rank in range(4))
    yield table("contributions", f"after step | {ranks}", contributions(4))
    yield table("counted", "algorithm | steps | bytes sent / S {:.2f} | formula", counts)
    yield table("processes", "message | median, µs {:,.0f} | fitted, µs {:,.0f}", measured, clocked=True)
    yield Picture("ranks", draw_ranks)
    yield Picture("time", draw_time)
    yield Guesses(
        eight=1.75,
        thousand=FORMS["ring"](1024, 1)[1],
        crossover=crossover(N) / 1e6,
        many=crossover(64) / 1e6,
    )


# ---------------------------------------------------------------------------------------------------- does it train?


def training_checks(name: str, all_reduce: Callable) -> Findings:
    """Linear regression on data of 8 ranks, gradients summed by hand: 200 steps, against one device with all data."""
    rng = np.random.default_rng(1)
    inputs = rng.standard_normal((N, 32, 16))
    targets = inputs @ rng.standard_normal(16) + 0.5 * rng.standard_normal((N, 32))

    def descend(inputs, targets, average):
        def step(w, _):
            error = inputs @ w - targets
            return w - 0.3 * average(inputs.T @ error / len(targets)), jnp.mean(error**2)

        start = inputs[0] * 0  # zeros, typed as the data are
        return lax.scan(step, start, length=200)

    on_all = on_ranks(lambda x, y: descend(x, y, lambda g: all_reduce(g, axis="dp") / N), N)
    weights, losses = map(np.asarray, on_all(inputs, targets))
    alone, _ = jax.jit(lambda x, y: descend(x, y, lambda g: g))(inputs.reshape(-1, 16), targets.reshape(-1))
    start = f"training with the {name}"
    yield at_least(f"{start}: loss of the first step over the last, rank 0", losses[0, 0] / losses[0, -1], 10)
    yield at_most(f"{start}: largest difference between ranks", spread(weights), 1e-12)
    yield at_most(f"{start}: error against one device", relative_error(weights[0], alone), 1e-12)


def contributions(n: int) -> list[list[str]]:
    """How many ranks' numbers are in each chunk of each rank, after every step: sum ones."""
    ones, rows = np.ones((n, n), np.float32), []
    for step in range(2 * (n - 1) + 1):
        chunks = np.asarray(on_ranks(partial(ring, axis="dp", num_steps=step), n)(ones))
        rows.append([str(step), *[" ".join(f"{int(chunk)}" for chunk in mine) for mine in chunks]])
    return rows


# ---------------------------------------------------------------------------------------------------- how long it takes


def seconds(name: str, size: float, n: int = N) -> float:
    """Steps times latency, and bytes over bandwidth."""
    return CollectiveCost(*FORMS[name](n, size)).seconds(LINK.latency_s, LINK.bytes_per_s)


def crossover(n: int) -> float:
    """The size from which the ring beats doubling: steps saved times α, over bytes saved times 1/B."""
    steps = 2 * (n - 1) - math.log2(n)
    volume = math.log2(n) - 2 * (n - 1) / n
    return steps * LINK.latency_s * LINK.bytes_per_s / volume


def cost_check(counted: dict[str, CollectiveCost], traced_bytes: int) -> Check:
    """The crossover in closed form, against a search with the steps and bytes that the programs have."""

    def found(name: str, size: float) -> float:
        cost = counted[name]
        return cost.steps * LINK.latency_s + cost.bytes_sent * size / traced_bytes / LINK.bytes_per_s

    low, high = 1.0, 2.0**40
    while high / low > 1 + 1e-9:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if found("doubling", middle) < found("ring", middle) else (low, middle)
    return equal("from which size the ring beats doubling", low, crossover(N), within=1e-6, unit="bytes")


def least_squares(times: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(α, 1/B) of (bytes, seconds): the line through them. By relative errors, so that short times count too."""
    table = np.array([(1 / seconds, size / seconds) for size, seconds in times])
    (alpha, beta), *_ = np.linalg.lstsq(table, np.ones(len(times)), rcond=None)
    return float(alpha), float(beta)


def kib(size: float) -> str:
    return f"{size / 1024:,.0f} KiB" if size < 2**20 else f"{size / 2**20:,.0f} MiB"


def draw_ranks():
    """Run on ones: a chunk's number says how many ranks are in it."""
    names = {0: "at first", 3: "after 3 steps", 6: "after 6 steps"}
    chunks = {steps: on_ranks(partial(ring, axis="dp", num_steps=steps), 4)(np.ones((4, 4))) for steps in names}
    rows = {name: np.asarray(chunks[steps]) / 4 for steps, name in names.items()}
    return drawing.holdings("A chunk's column is as tall as ranks are in its sum", rows)


def draw_time():
    curves = {
        name: ([s / 2**20 for s in SIZES], [seconds(name, s) * 1e3 for s in SIZES])
        for name in ("ring", "halving-doubling", "doubling")
    }
    title, cross = "All-reduce over 8 devices (predicted)", crossover(N) / 2**20
    return drawing.lines(title, "message, MiB", "ms", curves, log_x=True, log_y=True, marks=False, upright=cross)
