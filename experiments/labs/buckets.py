"""Buckets: how many gradients share one all-reduce, and what of it backward hides."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from functools import cache, partial
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_reduce, varying
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.hardware import find_hardware
from jaxdist.verification import verify_model

from ..charts import Span
from . import drawing
from .exchanges import accepted, on_mesh, on_ranks, relative_error, sent_by, spread, traced
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table
from .tools import small_run

# ---------------------------------------------------------------------------------------------- buckets, written out

N = 8
WIDTHS = (16, 32, 32, 1)
LIMIT = 6000  # bytes of a bucket


def buckets_of(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Which leaves are sent together, the last first: backward makes those first. None passes `limit` bytes, unless it
    is one leaf."""
    buckets, filled = [], 0.0
    for place in reversed(range(len(sizes))):
        if not buckets or filled + sizes[place] > limit:
            buckets, filled = [*buckets, []], 0
        buckets[-1].append(place)
        filled += sizes[place]
    return buckets


def sum_over_ranks(grads: list[jax.Array], limit: float, sends_last: bool = True) -> list[jax.Array]:
    """One all-reduce a bucket: lay leaves side by side, sum, cut apart. Each g {U_dp} -> g, equal on all ranks."""
    summed, buckets = list(grads), buckets_of([g.nbytes for g in grads], limit)
    for bucket in buckets if sends_last else buckets[:-1]:
        flat = all_reduce(jnp.concatenate([grads[place].reshape(-1) for place in bucket]), "dp")
        ends = np.cumsum([grads[place].size for place in bucket])[:-1]
        for place, part in zip(bucket, jnp.split(flat, ends), strict=True):
            summed[place] = part.reshape(grads[place].shape)
    return summed


def gradients(params, inputs, targets, limit: float, sends_last: bool = True, waits: bool = True) -> list[jax.Array]:
    """Gradients, summed over micro-batches first and over ranks once: inputs[M, B, D] of one rank."""
    local = varying(params, "dp")
    total = [jnp.zeros_like(p) for p in local]
    for rows, wanted in zip(inputs, targets, strict=True):
        total = [t + g for t, g in zip(total, jax.grad(loss)(local, rows, wanted), strict=True)]
        if not waits:
            total = sum_over_ranks(total, limit, sends_last)
    return sum_over_ranks(total, limit, sends_last) if waits else total


def loss(params, x, y):
    """Summed squared error of tanh layers: x[B, D] -> []."""
    for w, b in zip(params[:-2:2], params[1:-2:2], strict=True):
        x = jnp.tanh(x @ w + b)
    return jnp.sum((x @ params[-2] + params[-1] - y) ** 2)


def by_hand(broken: str | None) -> Findings:
    rng = np.random.default_rng(0)
    shapes = [shape for a, b in pairwise(WIDTHS) for shape in ((a, b), (b,))]
    params = [0.3 * rng.standard_normal(shape) for shape in shapes]
    x = rng.standard_normal((N, 2, 16, WIDTHS[0]))
    y = np.sin(x.sum(-1, keepdims=True))
    make = partial(gradients, limit=LIMIT, sends_last=broken != "last-bucket", waits=broken != "every-microbatch")

    def descend(x, y, *params):
        """Losses of 100 steps of gradient descent."""

        def step(params, _):
            grads = make(params, x, y)
            now = sum(loss(params, *rows) for rows in zip(x, y, strict=True))
            return [p - 1e-4 * varying(g, "dp") for p, g in zip(params, grads, strict=True)], now

        return lax.scan(step, list(params), length=100)[1]

    copies = [np.broadcast_to(p, (N, *p.shape)) for p in params]
    on_all = on_ranks(lambda x, y, *params: make(list(params), x, y), N)
    found, cost = on_all(x, y, *copies), sent_by(on_all, N, x, y, *copies)
    alone = jax.grad(loss)(params, x.reshape(-1, WIDTHS[0]), y.reshape(-1, 1))
    equal_on_all = on_mesh(f"dp={N}", lambda p, x, y: make(p, x[0], y[0]), ([P()] * len(params), P("dp"), P("dp")), P())
    losses = np.asarray(on_ranks(descend, N)(x, y, *copies))[0]
    sizes = [p.nbytes for p in params]
    buckets = buckets_of(sizes, LIMIT)
    yield equal("by hand: messages, one a bucket", cost.steps, len(buckets))
    volume = 2 * (N - 1) / N * sum(sizes)
    yield equal("by hand: bytes a device sends, 2 (n-1)/n of all gradients", cost.bytes_sent, volume)
    yield holds("by hand: JAX takes every gradient for equal on all ranks", accepted(equal_on_all, params, x, y))
    yield at_most("by hand: largest difference between ranks", spread(found), 1e-11)
    yield at_most("by hand: error against one device, float64", relative_error([g[0] for g in found], alone), 1e-12)
    yield at_least("by hand: loss of the first step over that of step 100", losses[0] / losses[-1], 2)
    names = [f"layer {1 + place // 2} {'bias' if place % 2 else 'weight'}" for place in range(len(sizes))]
    rows = [
        [n, ", ".join(names[at] for at in each), sum(sizes[at] for at in each)] for n, each in enumerate(buckets, 1)
    ]
    yield table("packed", "bucket | leaves | bytes {:,}", rows)


# -------------------------------------------------------------------------------------------------- the library's step

MODEL = dataclasses.replace(PRESETS["proof"], num_layers=4)
# (name, settings, bytes of a bucket)
SETTINGS = (
    ("one a parameter", {"grad_sync": "per-parameter"}, 0),
    ("buckets of 0.25 MiB", {"grad_sync": "bucketed", "bucket_mb": 0.25}, 2**18),
    ("buckets of 25 MiB", {"grad_sync": "bucketed"}, 25 * 2**20),
    ("flat", {"grad_sync": "flat"}, math.inf),
)


def messages(overlap: bool = False, **settings) -> tuple[list[int], list[int]]:
    """Bytes of each gradient message of a step: (after backward, in the loop over layers)."""
    config = small_run("dp=8", MODEL, overlap=overlap, **settings)
    found = [c for c in traced(config)[1] if c.full_bytes > 8]  # the rest are single numbers: losses, token counts
    after = [c.full_bytes for c in found if c.depth == 0]
    return after, [c.full_bytes for c in found if c.depth for _ in range(c.count)]


@cache
def leaf_bytes() -> tuple[list[int], list[int], list[int]]:
    """fp32 bytes of leaves: of all as our step has them, stacked over layers; of one layer; outside the layers."""
    leaves = jax.tree.leaves(traced(small_run("dp=8", MODEL))[0].layout.leaves)
    whole = [4 * math.prod(leaf.shape) for leaf in leaves]
    inside = [leaf.name.startswith("blocks") for leaf in leaves]
    layer = [size // MODEL.num_layers for size, is_inside in zip(whole, inside, strict=True) if is_inside]
    return whole, layer, [size for size, is_inside in zip(whole, inside, strict=True) if not is_inside]


def in_the_library() -> Findings:
    """Messages of our own step against the packing above, with and without --overlap."""
    whole, layer, outer = leaf_bytes()
    rows = []
    for name, settings, limit in SETTINGS:
        after, (late, early) = messages(**settings)[0], messages(overlap=True, **settings)
        packed = Counter(sum(whole[place] for place in bucket) for bucket in buckets_of(whole, limit))
        by_layer = MODEL.num_layers * len(buckets_of(layer, limit)) + len(buckets_of(outer, limit))
        yield holds(f"our step, {name}: its messages are those that this lab packs", Counter(after) == packed)
        yield equal(f"our step, {name}: messages with --overlap, by layer", len(late) + len(early), by_layer)
        yield equal(f"our step, {name}: bytes with --overlap", sum(late) + sum(early), sum(whole))
        rows.append([name, len(after), max(after), len(late) + len(early), sum(after)])
    columns = "setting | messages | largest, bytes {:,} | messages with --overlap | bytes in all {:,}"
    yield table("counted", columns, rows)


# ------------------------------------------------------------------------------------------------- time, on paper

RANKS, LINK = 16, find_hardware("h100").between
GRADIENTS = 4 * num_parameters(PRESETS["gpt2-1.5b"])  # bytes, fp32
BACKWARD = 0.2  # seconds


def bucket_seconds(count: int) -> float:
    """One of `count` equal buckets, all-reduced in a ring."""
    cost = collective_cost("ring_all_reduce", RANKS, GRADIENTS / count)
    return cost.seconds(LINK.latency_s, LINK.bytes_per_s)


def timeline(count: int) -> list[tuple[float, float]]:
    """(start, end) of each bucket's all-reduce: when it is full, and the one before it is done."""
    free, spans, each = 0.0, [], bucket_seconds(count)
    for number in range(1, count + 1):
        full = BACKWARD * number / count
        spans.append((max(free, full), max(free, full) + each))
        free = spans[-1][1]
    return spans


def closed_form(count: int) -> float:
    """Seconds of both: bound by the network (the first bucket, then all messages), or by backward (then the last)."""
    each = bucket_seconds(count)
    return max(BACKWARD / count + count * each, BACKWARD + each)


def best_count() -> float:
    """Where the first bucket's delay T/k and k latencies add up to least: k = sqrt(T / latency of one all-reduce)."""
    return math.sqrt(BACKWARD / (2 * (RANKS - 1) * LINK.latency_s))


def on_paper() -> Findings:
    ends = {count: timeline(count)[-1][1] for count in range(1, 513)}
    wrong = max(abs(end - closed_form(count)) / end for count, end in ends.items())
    fastest = min(ends, key=ends.get)
    yield at_most("timeline: largest error of the closed form over 1 to 512 buckets", wrong, 1e-12)
    yield equal("timeline: the best number of buckets, sqrt(T / latency)", fastest, round(best_count()))
    rows = []
    for count in sorted({1, 4, 16, 64, 256, 1024, fastest}):
        sent, shown = count * bucket_seconds(count), timeline(count)[-1][1] - BACKWARD
        rows.append([count, GRADIENTS / count / 2**20, 1e3 * sent, 1e3 * shown, f"{1 - shown / sent:.0%}"])
    columns = "buckets {:,} | MiB each {:,.1f} | network busy, ms {:,.0f} | waited for, ms {:,.0f} | hidden"
    yield table("times", columns, rows)


def draw_timeline():
    rows = [("backward", [Span(0, 1e3 * BACKWARD, 7)])]
    for count in (1, 4, 16):
        spans = [Span(1e3 * start, 1e3 * end, 0) for start, end in timeline(count)]
        rows.append((f"{count:,} bucket{'s' * (count > 1)}", spans))
    return drawing.timeline("What waits for what (predicted)", "ms", rows)


# ----------------------------------------------------------------------------------------------------------- the lab


@lab(
    title="Buckets and overlap",
    question="How many gradients should share one all-reduce, and how much of it does backward hide?",
    devices=N,
    breaks={
        "last-bucket": {"by hand: [!l]*", "by hand: largest*"},  # all but the loss
        "every-microbatch": {"by hand: messages*", "by hand: bytes*", "by hand: error*"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from by_hand(broken)
    if broken:
        return
    yield from in_the_library()
    model, settings = dataclasses.replace(MODEL, num_layers=2), {"dtype": "float64", "bucket_mb": 0.1}
    report = verify_model(model, "dp=4", overlap=True, batch_size=8, device="cpu", **settings)
    yield holds("our step with --overlap: every gradient is that of one device", report.ok)
    yield from on_paper()
    yield Picture("timeline", draw_timeline)
    leaves, latency = 12 * PRESETS["gpt2-1.5b"].num_layers + 4, 2 * (RANKS - 1) * LINK.latency_s
    yield Guesses(
        leaves=leaves,
        bytes=1,
        latency=1e3 * leaves * latency,
        best=best_count(),
        hidden=100 * BACKWARD / (RANKS * bucket_seconds(RANKS) - RANKS * latency),
    )
