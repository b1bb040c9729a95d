"""Ways to multiply rows by the matrices of the experts that they chose, on this machine: forward and backward."""

import importlib.util
import statistics
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.runtime.devices import acquire_devices

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import repeated

SKEW = 0.5  # of the rows that all choose one expert, in the second column


def bench_experts(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """The model's experts, with the rows of one batch: as many for each, and half of all for one.

    Each is a ratio to as many FLOPs in one product, which is what groups would take if they cost nothing.
    """
    model = config.model
    if not getattr(model, "num_experts", 0):
        raise ConfigError(f"bench experts with {model.describe()}", "must have experts", "Use --model moe-10m")
    devices = acquire_devices(1, flags.device)
    rows = config.batch_size * model.seq_len * model.top_k
    sizes = (rows, model.num_experts, model.width, model.width_of_expert)
    even = np.full(model.num_experts, rows // model.num_experts)
    skewed = np.full(model.num_experts, int(rows * (1 - SKEW)) // max(model.num_experts - 1, 1))
    skewed[0] = rows - skewed[1:].sum()
    dtype = jnp.dtype(config.precision.dtype)
    console.print(f"{rows} rows, {model.num_experts} experts of {model.width} x {model.width_of_expert}, {dtype.name}")
    base = timed(lambda x, w, counts: x @ w[0], sizes, even, dtype, flags.repeats)
    found = [Row.of("one product", base, "s")]
    for name, product in products(sizes).items():
        if flags.only not in name:
            continue
        for counts in (even, skewed):
            if name == "batched einsum" and counts is skewed:
                console.print(f"{name}: drops rows of a skewed load")
                continue
            with console.status(name):
                times = timed(product, sizes, counts, dtype, flags.repeats)
            ratio = statistics.median(times) / statistics.median(base)
            label = f"{name}, {'even' if counts is even else 'skewed'}"
            found.append(Row.of(label, times, "s", against="one product", ratio=ratio))
    return found, devices


def products(sizes: tuple[int, int, int, int]) -> dict[str, Callable]:
    """By name: (x[N, D], w[E, D, F], counts[E]) -> [N, F]."""
    rows, groups, width, _ = sizes

    def batched(x, w, counts):
        return jnp.einsum("end,edf->enf", x[: rows // groups * groups].reshape(groups, -1, width), w)

    found = {
        "grouped_matmul": grouped_matmul,
        "lax.ragged_dot": lambda x, w, counts: lax.ragged_dot(x, w, counts.astype(jnp.int32)),
        "batched einsum": batched,
    }
    if importlib.util.find_spec("tokamax"):
        import tokamax

        found["tokamax.ragged_dot"] = lambda x, w, counts: tokamax.ragged_dot(x, w, counts.astype(jnp.int32))
    return found


def timed(product: Callable, sizes, counts: np.ndarray, dtype, repeats: int) -> list[float]:
    """Seconds of each repeat of the product and the gradients of both operands."""
    rows, groups, width, inner = sizes
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(rows, width)), dtype)
    w = jnp.asarray(rng.normal(size=(groups, width, inner)), dtype)

    @jax.jit
    def both(x, w, counts):
        y, pull = jax.vjp(lambda x, w: product(x, w, counts), x, w)
        return y, pull(y)

    counts = jnp.asarray(counts)
    run = repeated(lambda: both(x, w, counts), at_once=jax.default_backend() != "cpu")
    run(1)
    return [run(1) for _ in range(repeats)]
