"""What 16 bits can hold: range and rounding, loss scaling, sums, and the small numbers of Adam."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.strategy import PrecisionConfig
from jaxdist.train.loss_scale import initial_loss_scale, next_loss_scale

from . import drawing, tiny
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table

FORMATS = ("float32", "bfloat16", "float16")
ROWS, LR = 64, 3e-3
SUMMED = 4096  # numbers that are added up
# The gradient of one of many targets in a large batch: small, as in a large model.
SHRINK = 2.0**-18
SMALL = (1e-2, 1e-4, 1e-5, 1e-6)
SCALES = tuple(2.0**k for k in range(0, 41, 4))


def gradients() -> np.ndarray:
    """Every element of a random model's gradient, in fp32, as small as a large model's are."""
    tokens, targets = tiny.text(ROWS, seed=0)
    grads = jax.grad(lambda p: tiny.loss_sum(p, tokens, targets) / targets.size)(tiny.initial())
    return SHRINK * np.concatenate([np.asarray(g).ravel() for g in grads.values()])


def kept_share(values: np.ndarray, dtype: str, scale: float) -> tuple[float, float]:
    """Shares of values that become 0, and that become infinite, where `values` times `scale` is stored in `dtype`."""
    stored = jnp.asarray(values * scale).astype(dtype)
    lost = (stored == 0) & (values != 0)
    return float(lost.mean()), float(jnp.isinf(stored).mean())


def running_sum(values: np.ndarray, dtype: str) -> float:
    """Added up one after the other, every sum rounded to `dtype`."""

    def add(total, x):
        return (total + x).astype(dtype), None

    return float(jax.lax.scan(add, jnp.zeros((), dtype), jnp.asarray(values, dtype))[0])


def updated(steps: int, weights: str) -> float:
    """A weight of 1 after `steps` updates of -0.001 each. weights: the dtype in which it is kept between them."""
    w = jnp.asarray(1.0, weights)
    for _ in range(steps):
        w = (w - jnp.asarray(1e-3, weights)).astype(weights)
    return float(w)


def adam_direction(gradient: float, dtype: str, eps: float = 1e-8) -> float:
    """m / (sqrt(v) + eps) of one step with a constant gradient, everything in `dtype`."""
    g = jnp.asarray(gradient, dtype)
    v = (g * g).astype(dtype)
    return float((g / (jnp.sqrt(v).astype(dtype) + jnp.asarray(eps, dtype))).astype(dtype))


def scale_history(found_finite: list[bool]) -> list[float]:
    """fp16's loss scale after each step, by the library's own rule."""
    config = PrecisionConfig("float16")
    state, history = initial_loss_scale(config), []
    for finite in found_finite:
        state = next_loss_scale(state, jnp.asarray(finite), config)
        history.append(float(state.scale))
    return history


@lab(
    title="Precision",
    question="Why does bf16 train without loss scaling where fp16 does not, and what must stay in fp32 in both?",
    breaks={
        "loss-scale": {"share of fp16 gradients that became 0"},
        "reduce-dtype": {"the sum of 4,096 ones"},
        "masters": {"a weight of 1 after 500 updates of -0.001"},
    },
)
def run(broken: str | None) -> Findings:
    values = gradients()
    scale = 1.0 if broken == "loss-scale" else 2.0**16
    lost, infinite = kept_share(values, "float16", scale)
    reduce_dtype = "bfloat16" if broken == "reduce-dtype" else "float32"
    ones = np.ones(SUMMED, np.float32)
    weight = updated(500, "bfloat16" if broken == "masters" else "float32")
    yield holds("every gradient is finite in fp16", infinite == 0)
    yield at_most("share of fp16 gradients that became 0", lost, 0.01)
    yield equal("the sum of 4,096 ones", running_sum(ones, reduce_dtype), SUMMED)
    yield equal("the sum of 200 ones", running_sum(ones[:200], reduce_dtype), 200)
    yield equal("a weight of 1 after 500 updates of -0.001", weight, 0.5, within=0.001)
    if broken:
        return

    info = {name: jnp.finfo(name) for name in FORMATS}
    first_lost = {name: 2 * float(1 / info[name].eps) for name in FORMATS}
    for name, first in first_lost.items():
        whole, below = jnp.asarray(first, name), jnp.asarray(first / 2, name)
        yield holds(f"{name}: {first:,.0f} + 1 is itself", bool(whole + 1 == whole))
        yield holds(f"{name}: {first / 2:,.0f} + 1 is more", bool(below + 1 != below))
    direction, small = "Adam's direction for a gradient of 1e-5", 1e-5
    begun = float(initial_loss_scale(PrecisionConfig("float16")).scale)
    halved = f"the library's loss scale, at first {begun:,.0f}, after three overflows of which one is forgiven"
    sweep = {name: [kept_share(values, name, scale) for scale in SCALES] for name in FORMATS}
    fewest = min(lost + over for lost, over in sweep["float16"])
    yield equal(f"{direction}, fp32", adam_direction(small, "float32"), 1.0, within=0.01)
    infinite = np.isinf(adam_direction(small, "float16"))
    yield holds(f"{direction}, fp16: infinite, for its square and eps are 0", infinite)
    yield equal(f"{direction}, bf16", adam_direction(small, "bfloat16"), 1.0, within=0.01)
    yield equal(halved, scale_history([True, False, False, False, True])[-1], begun / 4)
    yield at_most("share of bf16 gradients that became 0, with no loss scale", sweep["bfloat16"][0][0], 0.0)
    yield at_most("share of fp16 gradients that are 0 or infinite, with the best loss scale", fewest, 0.01)
    yield holds("with a loss scale of 2^40 some fp16 gradients are infinite", sweep["float16"][-1][1] > 0)
    bits = [
        [name, f"{i.nexp}, {i.nmant}", *[float(x) for x in (i.max, i.tiny, i.smallest_subnormal, i.eps)]]
        for name, i in info.items()
    ]
    scales = [
        [f"2^{np.log2(scale):.0f}", *sweep["float16"][i], sweep["bfloat16"][i][0]] for i, scale in enumerate(SCALES)
    ]
    sums = [[n, *[running_sum(ones[:n], name) for name in FORMATS]] for n in (64, 256, 1024, SUMMED)]
    updates = [[n, *[updated(n, name) for name in FORMATS]] for n in (1, 10, 100, 500)]
    adam = [[g, *[adam_direction(g, name) for name in FORMATS]] for g in SMALL]
    columns = "largest {:.1e} | smallest normal {:.1e} | smallest {:.1e} | next after 1 1+{:.1e}"
    shares = "fp16: share at 0 {:.1%} | fp16: share infinite {:.1%} | bf16: share at 0 {:.1%}"
    yield table("formats", f"format | bits: exponent, fraction | {columns}", bits)
    yield table("scales", f"loss scale | {shares}", scales)
    yield table("sums", "ones added up one by one {:,} | " + formats("{:,.0f}"), sums)
    yield table("updates", "updates of -0.001 to a weight of 1 | " + formats("{:.4f}"), updates)
    yield table("adam", "gradient {:.0e} | " + formats("{:.3g}", ": g / (√g² + 1e-8)"), adam)
    yield Picture("range", lambda: range_picture(values))
    yield Guesses(stuck=first_lost["bfloat16"], window=65504 / 2**16, halved=2.0**14, lost=1000 * 2.0**-9)


def formats(form: str, more: str = "") -> str:
    """A column for each format."""
    return " | ".join(f"{name}{more} {form}" for name in FORMATS)


def range_picture(values: np.ndarray):
    """Histogram of log2 |g|, over it what each 16-bit format can hold."""
    counts, edges = np.histogram(np.log2(np.abs(values[values != 0])), bins=40)
    curves = {"gradients": (np.repeat(edges, 2)[1:-1], np.repeat(counts, 2))}
    for row, (name, low, high) in enumerate([("fp16", -24, 16), ("fp16, loss × 65,536", -40, 0), ("bf16", -60, 20)]):
        curves[name] = ([max(low, -45), min(high, 18)], [counts.max() * (1.1 + 0.1 * row)] * 2)
    title = "Gradients (shrunk), and what 16 bits hold"
    return drawing.lines(title, "log2 of the magnitude", "gradients", curves, marks=False)
