"""What `python -m experiments.labs grade` asks for, and the same computed on one device, from whole arrays."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.nn import gelu

from jaxdist.plan import formulas

OWN = "own"  # entry r of the first dim is rank r's own array
SIZES = (2, 3, 4)  # ranks
Split = int | str | None  # the dim that ranks split; None where each has a copy


def splits(names: str) -> dict[str, Split]:
    """By name, how arrays are split, of "x:0 up:1 scale grads:own": first dim, second, a copy each, each its own."""
    pairs = (each.partition(":") for each in names.split())
    return {name: how if how == OWN else int(how) if how else None for name, _, how in pairs}


@dataclass(frozen=True)
class OnRanks:
    """A function that every rank runs, and what is right.

    lab: the page that it belongs to. layout: arguments -> results, as `splits` reads them (of a tree all leaves alike).
    draws(n, rng): the whole arguments, once for each. whole(*arguments): the whole results, on one device.
    static: arguments in front that are no arrays. sends(n): elements that a rank has to send, in 64 bits.
    messages: in how many collectives. holds(n): elements that a rank may hold at a time, by the trace, where that
    matters. only: kinds of collectives that may be used. hints: by the result or reason that is wrong.
    """

    lab: str
    layout: str
    draws: Sequence[Callable[[int, np.random.Generator], Sequence]]
    whole: Callable
    static: Sequence = ()
    sends: Callable[[int], float] = lambda n: float("inf")
    messages: int | None = None
    holds: Callable[[int], float] = lambda n: float("inf")
    only: Sequence[str] = ()
    hints: Mapping[str, str] = field(default_factory=dict)

    @property
    def arguments(self) -> dict[str, Split]:
        return splits(self.layout.partition(" -> ")[0])

    @property
    def results(self) -> dict[str, Split]:
        return splits(self.layout.partition(" -> ")[2])


@dataclass(frozen=True)
class Orders:
    """Orders of a pipeline's stages, held against limits on the bubble and on micro-batches in flight."""

    lab: str
    bubble: Callable[[int, int], float]
    in_flight: Callable[[int, int, int], int]
    hints: Mapping[str, str]
    sizes: Sequence[tuple[int, int]] = ((2, 4), (3, 7), (4, 3), (4, 8))


@dataclass(frozen=True)
class Formula:
    """Numbers, held against our own formula in settings."""

    lab: str
    settings: Sequence[Mapping]
    whole: Callable[..., float]
    hints: Mapping[str, str]


def summed(n: int, elements: float) -> float:
    """Elements that a rank sends in an all-reduce; a gather or a reduce-scatter is half of one."""
    return 2 * (n - 1) / n * elements


def normal(*shapes: tuple[int, ...]) -> Callable:
    return lambda n, rng: [rng.standard_normal(shape) / max(shape[0], 1) ** 0.5 for shape in shapes]


def own(shape: tuple[int, ...]) -> Callable:
    return lambda n, rng: [rng.standard_normal((n, *shape))]


# ------------------------------------------------------------------------------------------- models, on one device


def with_gradients(function: Callable) -> Callable:
    """(y, gradients...) of a function of arrays, for a dy that is its last argument."""

    def whole(*args):
        y, pull_back = jax.vjp(function, *args[:-1])
        return y, *pull_back(args[-1])

    return whole


def mlp(x, up, down):
    return gelu(x @ up) @ down


def normed_mlp(x, scale, up, down):
    return mlp(x / jnp.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale, up, down)


def cross_entropy(h, table, targets):
    def loss(h, table):
        return -jnp.take_along_axis(jax.nn.log_softmax(h @ table.T), targets[:, None], 1).sum()

    value, grads = jax.value_and_grad(loss, (0, 1))(h, table)
    return value, *grads


def draw_vocabulary(n: int, rng: np.random.Generator) -> list:
    return [30 * rng.standard_normal((8, 6)), 30 * rng.standard_normal((24, 6)), rng.integers(0, 24, 8)]


def counted_loss(params, batch):
    """(sum of squared errors where the target is not NaN, how many)."""
    x, target = batch
    counts = ~jnp.isnan(target)
    error = jnp.where(counts, jnp.tanh(x @ params["up"]) @ params["down"] - jnp.where(counts, target, 0), 0)
    return (error**2).sum(), counts.sum()


def draw_counted(n: int, rng: np.random.Generator) -> list:
    x, up, down, target = normal((12, 6), (6, 5), (5,), (12,))(n, rng)
    target[[0, 1, 2, 4]] = np.nan
    return [{"up": up, "down": down}, (x, target)]


def mean_of_all(params, batch):
    return jax.value_and_grad(lambda params: jnp.divide(*counted_loss(params, batch)))(params)


def squared_error(params, batch):
    x, target = batch
    return ((jnp.tanh(x @ params["up"]) @ params["down"] - target) ** 2).sum()


def draw_zero1(n: int, rng: np.random.Generator) -> list:
    up, down, m_up, m_down, x, target = normal((12, 24), (24, 12), (12, 24), (24, 12), (12, 12), (12, 12))(n, rng)
    return [{"up": up, "down": down}, {"up": m_up, "down": m_down}, (x, target)]


def momentum_step(params, momentum, batch):
    grads = jax.grad(squared_error)(params, batch)
    new = {name: 0.9 * m + grads[name] for name, m in momentum.items()}
    return {name: p - 0.1 * new[name] for name, p in params.items()}, new


def residual_layer(w, x):
    return x + jnp.tanh(x @ w)


def squares(x, target):
    return ((x - target) ** 2).sum()


def layers_step(shards, batch):
    def loss(shards):
        x, target = batch
        for w in shards:
            x = residual_layer(w, x)
        return squares(x, target)

    return [w - 0.1 * g for w, g in zip(shards, jax.grad(loss)(shards), strict=True)]


def draw_layers(n: int, rng: np.random.Generator) -> list:
    *shards, x, target = normal(*[(48, 48)] * 8, (12, 48), (12, 48))(n, rng)
    return [shards, (x, target)]


def attention(q, k, v):
    scores = jnp.where(jnp.tril(jnp.ones((len(q), len(k)), bool)), q @ k.T / q.shape[1] ** 0.5, -jnp.inf)
    return jax.nn.softmax(scores) @ v


def half_loss(half, batch):
    """In float16 without a scale the gradient is too small to be a number. batch: (x[rows, D], a power of two)."""
    x, factor = (each.astype(jnp.float16) for each in batch)
    return ((half * factor[0]) * (x * factor[0])).sum()


def draw_scaled(n: int, rng: np.random.Generator, overflow: bool = False, good: int = 1) -> list:
    x = rng.integers(1, 9, (12, 6)).astype(float)
    factor, scale = np.full(12, 2.0**-13), np.float64(2.0**10)
    if overflow:  # in one row, of the last rank
        x[-1, 2], factor, scale = 60_000.0, np.full(12, 0.5), np.float64(2.0**15)
        x[:-1] = 0.0
    return [rng.integers(-8, 9, 6) * 2.0**-24, (x, factor), scale, np.int64(good)]


def scaled_update(weights, batch, scale, good):
    x, factor = batch
    each = x * factor[:, None]
    overflow = jnp.abs(each * scale).max() > 65504
    new = weights - 0.1 * (each * factor[:, None]).sum(0)
    scale = jnp.where(overflow, scale / 2, jnp.where(good == 1, 2 * scale, scale))
    return jnp.where(overflow, weights, new), scale, jnp.where(overflow, 0, (good + 1) % 2)


def dense_experts(x, router, up, down):
    """Every token through every expert, times its gate: 0 but for two."""
    scores = x @ router
    second = jnp.sort(scores)[:, -2:-1]
    gates = jax.nn.softmax(jnp.where(scores >= second, scores, -jnp.inf))
    return sum(gates[:, e : e + 1] * (jnp.tanh(x @ up[e]) @ down[e]) for e in range(len(up)))


def draw_experts(n: int, rng: np.random.Generator) -> list:
    """Most tokens prefer the same experts."""
    x, router, up, down, dy = normal((24, 4), (4, 12), (12, 4, 6), (12, 6, 4), (24, 4))(n, rng)
    router[:, 5] += 2 * x[:12].mean(0) / np.abs(x).mean()
    return [x + 0.5, router, up, down, dy]


def orthogonalized(x):
    x = x / jnp.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.775 * a @ x + 2.0315 * a @ a @ x
    return x


GRADS = [(5, 7), (4, 6), (10,), (3, 3), (30,), (5,), (2, 2)]
SUM_HINT = "a rank has only its part of the sum; the transpose of a copy to all ranks is a sum over them"
TASKS: dict[str, OnRanks | Orders | Formula] = {
    "mean_gradient": OnRanks(
        "data-parallel",
        "params batch:0 -> loss gradient",
        (draw_counted,),
        mean_of_all,
        static=(counted_loss,),
        sends=lambda n: summed(n, 37),
        hints={"loss": "ranks have different numbers of targets: divide once, by the number of all"},
    ),
    "all_reduce": OnRanks(
        "all-reduce",
        "x:own -> sum",
        (own((24,)),),
        lambda x: x.sum(0),
        sends=lambda n: summed(n, 24),
        only=("permute",),
        hints={"bytes": "cut x in n chunks: n-1 steps add up a chunk, n-1 pass the sums on"},
    ),
    "reduce_scatter": OnRanks(
        "all-reduce",
        "x:own dy:0 -> y:0 dx",
        (lambda n, rng: [rng.standard_normal((n, 24)), rng.standard_normal(24)],),
        lambda x, dy: (x.sum(0), dy),
        sends=lambda n: summed(n, 24),
        only=("permute",),
        hints={"dx": "each element of x reaches one rank's y: its gradient is that rank's dy, so dx is an all-gather"},
    ),
    "bucketed_sum": OnRanks(
        "buckets",
        "grads:own -> sums",
        (lambda n, rng: [[rng.standard_normal((n, *shape)) for shape in GRADS]],),
        lambda grads: [grad.sum(0) for grad in grads],
        static=(34,),
        sends=lambda n: summed(n, sum(int(np.prod(shape)) for shape in GRADS)),
        messages=5,
        hints={"messages": "lay the arrays of a bucket side by side (concatenate), and sum that"},
    ),
    "zero1_step": OnRanks(
        "zero",
        "params momentum:0 batch:0 -> params momentum:0",
        (draw_zero1,),
        momentum_step,
        static=(squared_error,),
        sends=lambda n: summed(n, 2 * 12 * 24),
        hints={"bytes": "a rank needs its part of the summed gradient alone: reduce-scatter it"},
    ),
    "zero3_step": OnRanks(
        "zero",
        "shards:0 batch:0 -> weights:0",
        (draw_layers,),
        layers_step,
        static=(residual_layer, squares),
        sends=lambda n: 1.5 * summed(n, 8 * 48 * 48),
        holds=lambda n: 2.5 * 8 * 48 * 48 / n + 4 * 48 * 48,
        hints={"memory": "gather a layer's weights where it runs, and again in backward: jax.checkpoint around both"},
    ),
    "column_row_mlp": OnRanks(
        "tensor-parallel",
        "x up:1 down:0 dy -> y dx dup:1 ddown:0",
        (normal((6, 12), (12, 24), (24, 12), (6, 12)),),
        with_gradients(mlp),
        sends=lambda n: 2 * summed(n, 6 * 12),
        hints={"dx": SUM_HINT, "bytes": "a rank needs its own columns of the hidden layer alone"},
    ),
    "vocabulary_loss": OnRanks(
        "tensor-parallel",
        "h table:0 targets -> loss dh dtable:0",
        (draw_vocabulary,),
        cross_entropy,
        sends=lambda n: summed(n, 3 * 8 + 8 * 6),
        hints={
            "loss": "largest logit, sum of exponentials and the target's logit are each of all ranks",
            "dh": SUM_HINT,
        },
    ),
    "sequence_parallel_mlp": OnRanks(
        "sequence-parallel",
        "x:0 scale up:1 down:0 dy:0 -> y:0 dx:0 dscale dup:1 ddown:0",
        (normal((24, 6), (6,), (6, 12), (12, 6), (24, 6)),),
        with_gradients(normed_mlp),
        sends=lambda n: 2 * summed(n, 24 * 6) + summed(n, 6),
        hints={"dscale": "a rank sees its own tokens alone, and scale is used by all", "dx": SUM_HINT},
    ),
    "one_f_one_b": Orders(
        "pipelines",
        lambda p, m: 2 * (p - 1) / (3 * m),
        lambda p, m, s: min(m, p - s),
        {"in flight": "alternate B and F once p - s are in flight", "bubble": "do not wait for all forwards"},
    ),
    "less_bubble": Orders(
        "pipelines",
        lambda p, m: (p - 1) / (3 * m),
        lambda p, m, s: p,
        {
            "bubble": "nobody waits for a W: put some off to where the stage would idle, at the end",
            "in flight": "an activation is held until its W: put off s of them on stage s",
        },
        sizes=((2, 4), (3, 7), (4, 4), (4, 8)),
    ),
    "ring_attention": OnRanks(
        "context-parallel",
        "q:0 k:0 v:0 do:0 -> o:0 dq:0 dk:0 dv:0",
        (normal((96, 4), (96, 4), (96, 4), (96, 4)),),
        with_gradients(attention),
        sends=lambda n: (4 * (n - 1) + 2 * n) * 96 / n * 4,
        holds=lambda n: 4 * (96 / n) ** 2 + 14 * 96 / n * 4,
        hints={
            "memory": "attend to one rank's keys at a time, and merge by the log-sum-exp of the scores",
            "dk": "gradients of keys and values belong to the rank whose they are: send them round with k and v",
        },
    ),
    "scaled_step": OnRanks(
        "precision",
        "weights batch:0 scale good -> weights scale good",
        (draw_scaled, partial(draw_scaled, good=0), partial(draw_scaled, overflow=True)),
        scaled_update,
        static=(half_loss,),
        hints={
            "weights": "scale the loss before backward, and divide in the wider dtype",
            "scale": "all ranks decide alike, and it doubles where good arrives at 2",
        },
    ),
    "state_bytes": Formula(
        "memory",
        [
            {"parameters": 7e9 + 1e9 * dp, "zero": zero, "dp": dp, "tp": tp, "pp": pp}
            for zero in range(4)
            for dp, tp, pp in ((1, 1, 1), (8, 1, 1), (4, 2, 3))
        ],
        lambda **setting: formulas.state_bytes(recipe="mixed-adam", **setting).total,
        {"state_bytes": "ZeRO-1 divides the optimiser by dp, 2 the gradients too, 3 the weights too; tp and pp all"},
    ),
    "activation_bytes": Formula(
        "memory",
        [
            {"seq_len": 2048 * rows, "rows": rows, "width": 4096, "num_heads": 32, "tp": tp, "sp": sp}
            for rows, tp, sp in ((1, 1, False), (2, 1, True), (1, 8, False), (4, 8, True))
        ],
        lambda seq_len, rows, width, num_heads, tp, sp: formulas.layer_activation_bytes(
            formulas.ModelShape(1, width, num_heads, 4 * width, seq_len, 1), rows, tp, sp
        ),
        {"activation_bytes": "s b h (10 + 24/t + 5 a s/(h t)); sp divides the 10 too"},
    ),
    "top2_experts": OnRanks(
        "experts",
        "x:0 router up:0 down:0 dy:0 -> y:0 dx:0 drouter dup:0 ddown:0",
        (draw_experts,),
        with_gradients(dense_experts),
        sends=lambda n: 2 * summed(n, 24 * 4) + summed(n, 4 * 12) + summed(n, 24 * 12),
        hints={
            "y": "the gates are the softmax of the two chosen scores, and every token must arrive",
            "drouter": "the router learns through the gates, from the tokens of all ranks",
        },
    ),
    "newton_schulz": OnRanks(
        "whole-matrices",
        "x:1 -> x:1",
        (normal((4, 120)),),
        orthogonalized,
        sends=lambda n: summed(n, 5 * 16 + 1),
        hints={
            "x": "the norm and x @ x.T are of the whole matrix",
            "bytes": "x @ x.T is small, and a sum over columns",
        },
    ),
}
