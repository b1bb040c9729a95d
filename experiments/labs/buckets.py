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

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_reduce, varying
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.hardware import find_hardware
from jaxdist.runtime.devices import acquire_devices
from jaxdist.verification import verify_model

from . import drawing
from .exchanges import on_ranks, sent_by, traced
from .lab import Check, Lab, Result, Table, at_least, at_most, equal, holds
from .tools import small_run

# ---------------------------------------------------------------------------------------------- buckets, written out

N = 8
WIDTHS = (16, 32, 32, 1)
LIMIT = 6000  # bytes of a bucket


def buckets_of(sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Which leaves are sent together, the last first: backward makes those first. None passes `limit` bytes, unless it
    is a leaf alone."""
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
    """Of all ranks' rows, summed over micro-batches first and over ranks once: inputs[M, B, D] of one rank."""
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


def by_hand(broken: str | None) -> tuple[list[Check], list[list[str]]]:
    rng = np.random.default_rng(0)
    shapes = [shape for a, b in pairwise(WIDTHS) for shape in ((a, b), (b,))]
    params = [0.3 * rng.standard_normal(shape) for shape in shapes]
    inputs = rng.standard_normal((N, 2, 16, WIDTHS[0]))
    targets = np.sin(inputs.sum(-1, keepdims=True))
    make = partial(gradients, limit=LIMIT, sends_last=broken != "last-bucket", waits=broken != "every-microbatch")

    copies = [np.broadcast_to(p, (N, *p.shape)) for p in params]
    on_all = on_ranks(lambda x, y, *params: make(list(params), x, y), N)
    found = [np.asarray(g) for g in on_all(inputs, targets, *copies)]
    alone = jax.grad(loss)(params, inputs.reshape(-1, WIDTHS[0]), targets.reshape(-1, 1))
    cost = sent_by(on_all, N, inputs, targets, *copies)
    sizes = [p.nbytes for p in params]
    buckets = buckets_of(sizes, LIMIT)
    error = max(np.abs(g[0] - a).max() / np.abs(a).max() for g, a in zip(found, alone, strict=True))
    losses = training_losses(make, params, inputs, targets)
    checks = [
        equal("by hand: messages, one a bucket", cost.steps, len(buckets)),
        equal(
            "by hand: bytes a device sends, 2 (n-1)/n of all gradients", cost.bytes_sent, 2 * (N - 1) / N * sum(sizes)
        ),
        holds("by hand: JAX takes every gradient for equal on all ranks", typed_equal(make, params, inputs, targets)),
        at_most("by hand: largest difference between ranks", max(np.ptp(g, axis=0).max() for g in found), 1e-11),
        at_most("by hand: error against one device, float64", error, 1e-12),
        at_least("by hand: loss of the first step over that of step 100", losses[0] / losses[-1], 2),
    ]
    names = [f"layer {1 + place // 2} {'bias' if place % 2 else 'weight'}" for place in range(len(sizes))]
    rows = [
        [f"{number}", ", ".join(names[place] for place in bucket), f"{sum(sizes[place] for place in bucket):,}"]
        for number, bucket in enumerate(buckets, 1)
    ]
    return checks, rows


def training_losses(make, params, inputs, targets) -> np.ndarray:
    """Of rank 0's rows, over 100 steps of gradient descent."""

    def descend(x, y, *params):
        def step(params, _):
            grads = make(params, x, y)
            now = sum(loss(params, *rows) for rows in zip(x, y, strict=True))
            return [p - 1e-4 * varying(g, "dp") for p, g in zip(params, grads, strict=True)], now

        return lax.scan(step, list(params), length=100)[1]

    copies = [np.broadcast_to(p, (N, *p.shape)) for p in params]
    return np.asarray(on_ranks(descend, N)(inputs, targets, *copies))[0]


def typed_equal(make, params, inputs, targets) -> bool:
    """Whether `shard_map` lets the gradients leave as one value: it refuses what may differ between ranks."""
    mesh = make_mesh(parse_mesh(f"dp={N}"), acquire_devices(N, "cpu").devices)
    specs = ([P()] * len(params), P("dp"), P("dp"))
    body = jax.shard_map(lambda p, x, y: make(p, x[0], y[0]), mesh=mesh, in_specs=specs, out_specs=P())
    try:
        jax.eval_shape(body, params, inputs, targets)
    except ValueError:
        return False
    return True


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


def in_the_library() -> tuple[list[Check], list[list[str]]]:
    """Messages of our own step against the packing above, with and without --overlap."""
    whole, layer, outer = leaf_bytes()
    checks, rows = [], []
    for name, settings, limit in SETTINGS:
        after, _ = messages(**settings)
        packed = Counter(sum(whole[place] for place in bucket) for bucket in buckets_of(whole, limit))
        late, early = messages(overlap=True, **settings)
        by_layer = MODEL.num_layers * len(buckets_of(layer, limit)) + len(buckets_of(outer, limit))
        checks += [
            holds(f"our step, {name}: its messages are those that this lab packs", Counter(after) == packed),
            equal(f"our step, {name}: bytes of gradients", sum(after), sum(whole)),
            equal(f"our step, {name}: messages with --overlap, by layer", len(late) + len(early), by_layer),
            equal(f"our step, {name}: bytes with --overlap", sum(late) + sum(early), sum(whole)),
        ]
        rows.append([name, f"{len(after)}", f"{max(after):,}", f"{len(late) + len(early)}", f"{sum(after):,}"])
    return checks, rows


# ------------------------------------------------------------------------------------------------- time, on paper

RANKS, LINK = 16, find_hardware("h100").between
GRADIENTS = 4 * num_parameters(PRESETS["gpt2-1.5b"])  # bytes, fp32
BACKWARD = 0.2  # seconds
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)


def bucket_seconds(count: int) -> float:
    """One of `count` equal buckets, all-reduced in a ring."""
    cost = collective_cost("ring_all_reduce", RANKS, GRADIENTS / count)
    return cost.seconds(LINK.latency_s, LINK.bytes_per_s)


def timeline(count: int, overlap: bool = True) -> list[tuple[float, float]]:
    """(start, end) of each bucket's all-reduce: when it is full, and the one before it is done."""
    free, spans, each = 0.0, [], bucket_seconds(count)
    for number in range(1, count + 1):
        full = BACKWARD * number / count if overlap else BACKWARD
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


def on_paper() -> tuple[list[Check], list[list[str]]]:
    ends = {count: timeline(count)[-1][1] for count in range(1, 513)}
    wrong = max(abs(end - closed_form(count)) / end for count, end in ends.items())
    fastest = min(ends, key=ends.get)
    checks = [
        at_most("timeline: largest error of the closed form over 1 to 512 buckets", wrong, 1e-12),
        equal("timeline: the best number of buckets, sqrt(T / latency)", fastest, round(best_count())),
    ]
    rows = []
    for count in sorted({*COUNTS[::2], fastest}):
        sent, shown = count * bucket_seconds(count), timeline(count)[-1][1] - BACKWARD
        rows.append(
            [
                f"{count:,}",
                f"{GRADIENTS / count / 2**20:,.1f}",
                f"{1e3 * sent:,.0f}",
                f"{1e3 * shown:,.0f}",
                f"{1 - shown / sent:.0%}",
            ]
        )
    return checks, rows


def draw_sizes():
    sizes = [GRADIENTS / count / 2**20 for count in COUNTS]
    curves = {
        "after backward": (sizes, [1e3 * timeline(count, overlap=False)[-1][1] for count in COUNTS]),
        "while backward runs": (sizes, [1e3 * timeline(count)[-1][1] for count in COUNTS]),
    }
    figure = drawing.lines("Backward and all-reduce (predicted)", "bucket, MiB", "ms", curves, log_x=True)
    figure.axes[0].axhline(1e3 * BACKWARD, color="#787882", linestyle=":", linewidth=1)
    figure.axes[0].set_ylim(bottom=0)
    return figure


def draw_timeline():
    figure, axes = drawing.blank("What waits for what (predicted)", "ms", "", height=2.2)
    axes.barh(0, 1e3 * BACKWARD, height=0.6, color=drawing.COLOURS[7])
    names = ["backward"]
    for row, count in enumerate((1, 4, 16, 1024), 1):
        spans = [(1e3 * start, 1e3 * (end - start)) for start, end in timeline(count)]
        if count > 16:  # too many to tell apart
            spans = [(spans[0][0], sum(spans[-1]) - spans[0][0])]
        axes.broken_barh(spans, (row - 0.3, 0.6), facecolor=drawing.COLOURS[0], edgecolor="white")
        names.append(f"{count:,} bucket{'s' * (count > 1)}")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.grid(axis="y", visible=False)
    return figure


# ----------------------------------------------------------------------------------------------------------- the lab


@cache
def overlap_report():
    """Our step with --overlap on four simulated devices, every leaf against one device."""
    model = dataclasses.replace(MODEL, num_layers=2)
    settings = {"batch_size": 8, "dtype": "float64", "bucket_mb": 0.1, "device": "cpu"}
    return verify_model(model, "dp=4", overlap=True, **settings)


def run(broken: str | None) -> Result:
    with jax.enable_x64(True):
        checks, packed = by_hand(broken)
    if broken:
        return Result(checks)
    library_checks, counted = in_the_library()
    paper_checks, times = on_paper()
    whole = holds("our step with --overlap: every gradient is that of one device", overlap_report().ok)
    leaves = 12 * PRESETS["gpt2-1.5b"].num_layers + 4
    latency = 2 * (RANKS - 1) * LINK.latency_s
    volume = RANKS * bucket_seconds(RANKS) - RANKS * latency
    return Result(
        [*checks, *library_checks, whole, *paper_checks],
        tables=[
            Table("packed", ["bucket", "leaves", "bytes"], packed),
            Table(
                "counted",
                ["setting", "messages", "largest, bytes", "messages with --overlap", "bytes in all"],
                counted,
            ),
            Table("times", ["buckets", "MiB each", "network busy, ms", "waited for, ms", "hidden"], times),
        ],
        pictures={"timeline": draw_timeline, "sizes": draw_sizes},
        guesses={
            "leaves": leaves,
            "bytes": 1,
            "latency": 1e3 * leaves * latency,
            "best": best_count(),
            "hidden": 100 * BACKWARD / volume,
        },
    )


HAND = "by hand: "
LAB = Lab(
    name="buckets",
    title="Buckets and overlap",
    question="How many gradients should share one all-reduce, and how much of it does backward hide?",
    run=run,
    devices=N,
    breaks={
        "last-bucket": {
            HAND + "messages, one a bucket",
            HAND + "bytes a device sends, 2 (n-1)/n of all gradients",
            HAND + "JAX takes every gradient for equal on all ranks",
            HAND + "largest difference between ranks",
            HAND + "error against one device, float64",
        },
        "every-microbatch": {
            HAND + "messages, one a bucket",
            HAND + "bytes a device sends, 2 (n-1)/n of all gradients",
            HAND + "error against one device, float64",
        },
    },
)
