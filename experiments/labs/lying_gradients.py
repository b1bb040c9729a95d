"""Gradients that lie: forward is right and backward is not. Which check sees which fault, each cell computed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.runtime.devices import acquire_devices

from . import drawing
from .lab import Lab, Result, Table, at_most, equal, holds

ROWS, LENGTH, WIDTH, HIDDEN, STEPS = 8, 8, 8, 16, 30
RATE, EPS = 0.01, 1e-8
AXES = ("dp", "cp")
FAULTS = {
    "double": "gradients are summed over the ranks twice",
    "missing": "gradients are not summed; the first rank's are taken",
    "means": "each rank divides by its own count, and the means are averaged",
    "stopped": "the shares by which two blocks of attention are merged are constants in backward",
    "stale": "the 16-bit copy of one matrix is not made anew after an update",
}


# ------------------------------------------------------------------------------------------------------------ a model


def block_attention(q_BTD, k_BTD, v_BTD):
    """(result, log-sum-exp of the scores) of attention to one block of keys."""
    scores_BTS = jnp.einsum("btd,bsd->bts", q_BTD, k_BTD)
    lse_BT1 = jax.nn.logsumexp(scores_BTS, axis=-1, keepdims=True)
    return jnp.einsum("bts,bsd->btd", jnp.exp(scores_BTS - lse_BT1), v_BTD), lse_BT1


def ring_attention(q_BTD, k_BTD, v_BTD, stopped: bool):
    """Attention to the whole sequence, split over cp: blocks of keys go round, results are merged.

    Layout: q, k, v[B, T_cp, D] -> [B, T_cp, D].
    """
    n = lax.axis_size("cp")
    out_BTD, lse_BT1 = block_attention(q_BTD, k_BTD, v_BTD)
    for _ in range(n - 1):
        k_BTD, v_BTD = lax.ppermute((k_BTD, v_BTD), "cp", [(r, (r + 1) % n) for r in range(n)])
        new_BTD, new_lse_BT1 = block_attention(q_BTD, k_BTD, v_BTD)
        both_BT1 = jnp.logaddexp(lse_BT1, new_lse_BT1)
        shares = jnp.exp(lse_BT1 - both_BT1), jnp.exp(new_lse_BT1 - both_BT1)
        if stopped:
            shares = lax.stop_gradient(shares)
        out_BTD, lse_BT1 = out_BTD * shares[0] + new_BTD * shares[1], both_BT1
    return out_BTD


def error_sum(weights, x_BTD, y_BTD, counts_BT, stopped: bool):
    """Sum of squared errors of this rank's positions, of those that count."""
    q, k, v = (x_BTD @ weights[name] for name in ("q", "k", "v"))
    h_BTD = x_BTD + ring_attention(q, k, v, stopped)
    h_BTD = h_BTD + jnp.tanh(h_BTD @ weights["up"]) @ weights["down"]
    return jnp.sum(jnp.where(counts_BT[..., None], (h_BTD - y_BTD) ** 2, 0))


def gradients(fault: str | None, weights, x_BTD, y_BTD, counts_BT):
    """(loss, gradients) on each rank, in the body of a shard_map.

    Layout: weights replicated; x[B_dp, T_cp, D] -> loss, gradients, both replicated (varying with "missing").
    """
    count = lax.psum(jnp.sum(counts_BT), AXES)

    def local_loss(weights):
        total = error_sum(weights, x_BTD, y_BTD, counts_BT, fault == "stopped")
        if fault == "means":
            return total / jnp.sum(counts_BT) / (lax.axis_size("dp") * lax.axis_size("cp")), total
        return total / count, total

    own = jax.tree.map(lambda w: lax.pcast(w, AXES, to="varying"), weights)
    grads, total = jax.grad(local_loss, has_aux=True)(own)
    if fault != "missing":
        grads = lax.psum(grads, AXES)
    if fault == "double":
        grads = lax.psum(grads, AXES)
    return lax.psum(total, AXES) / count, grads


def sharded(fault: str | None, dp: int, cp: int):
    """`gradients` as a function of global arrays, with their types checked."""
    mesh = jax.sharding.Mesh(np.array(acquire_devices(4, "cpu").devices[: dp * cp]).reshape(dp, cp), AXES)
    data = P("dp", "cp")
    specs = (P(), data, data, data)
    return jax.shard_map(partial(gradients, fault), mesh=mesh, in_specs=specs, out_specs=(P(), P()))


def program(fault: str | None, dp: int, cp: int):
    """The same, and what a user does who is refused: return every rank's gradient, and take the first."""
    if fault != "missing":
        return jax.jit(sharded(fault, dp, cp))
    mesh = jax.sharding.Mesh(np.array(acquire_devices(4, "cpu").devices[: dp * cp]).reshape(dp, cp), AXES)

    def every_rank(*args):
        loss, grads = gradients(fault, *args)
        return loss, jax.tree.map(lambda g: g[None], grads)

    data = P("dp", "cp")
    run = jax.shard_map(every_rank, mesh=mesh, in_specs=(P(), data, data, data), out_specs=(P(), P(AXES)))

    def first(*args):
        loss, grads = run(*args)
        return loss, jax.tree.map(lambda g: g[0], grads)

    return jax.jit(first)


# ------------------------------------------------------------------------------------------------------------ training


def example():
    """(masters, batch): weights of one layer, inputs, what to predict, which positions count (unevenly)."""
    rng = np.random.default_rng(0)
    shapes = {"q": WIDTH, "k": WIDTH, "v": WIDTH, "up": HIDDEN, "down": WIDTH}
    masters = {
        name: rng.standard_normal((HIDDEN if name == "down" else WIDTH, size)) * 0.4 for name, size in shapes.items()
    }
    x_BTD, y_BTD = rng.standard_normal((2, ROWS, LENGTH, WIDTH))
    counts_BT = rng.random((ROWS, LENGTH)) < np.linspace(0.2, 1, ROWS)[:, None]
    return masters, (x_BTD, y_BTD, counts_BT)


def rounded(masters):
    """The 16-bit weights that compute, here in the masters' dtype."""
    return jax.tree.map(lambda w: w.astype(jnp.bfloat16).astype(w.dtype), masters)


@cache
def train(fault: str | None, dp: int = 2, cp: int = 2) -> dict[str, list]:
    """Adam on one batch: losses, gradients, masters and the weights that computed, of every step."""
    step, (masters, batch) = program(fault, dp, cp), example()
    weights, first, second = rounded(masters), 0, 0
    found = {"loss": [], "grads": [], "masters": [], "weights": []}
    for number in range(1, STEPS + 1):
        loss, grads = jax.device_get(step(weights, *batch))
        for name, value in zip(found, (float(loss), grads, masters, weights), strict=True):
            found[name].append(value)
        first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, first or zeros_like(grads), grads)
        second = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g * g, second or zeros_like(grads), grads)
        masters = jax.tree.map(
            lambda w, m, v, n=number: w - RATE * (m / (1 - 0.9**n)) / (np.sqrt(v / (1 - 0.99**n)) + EPS),
            masters,
            first,
            second,
        )
        weights = rounded(masters) | ({"up": weights["up"]} if fault == "stale" else {})
    return found


def zeros_like(tree):
    return jax.tree.map(np.zeros_like, tree)


# -------------------------------------------------------------------------------------------------------------- checks


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


def worst_leaf(ours, theirs) -> float:
    """The largest relative error of a leaf."""
    return max(norm(ours[name] - theirs[name]) / norm(theirs[name]) for name in theirs)


def finite_difference(fault: str | None, weights, grads) -> float:
    """Relative gap between the gradient along a random direction and the difference of two losses."""
    step, (_, batch) = program(fault, 2, 2), example()
    rng, eps = np.random.default_rng(1), 1e-6
    direction = {name: rng.standard_normal(w.shape) for name, w in weights.items()}

    def loss(sign: int) -> float:
        return float(step(jax.tree.map(lambda w, d: w + sign * eps * d, weights, direction), *batch)[0])

    difference = (loss(1) - loss(-1)) / (2 * eps)
    along = sum(float(np.sum(grads[name] * direction[name])) for name in grads)
    return abs(along - difference) / abs(difference)


def type_error(fault: str | None) -> str:
    """What check_vma says of the program when it is traced; empty if nothing."""
    masters, batch = example()
    try:
        jax.jit(sharded(fault, 2, 2)).trace(masters, *batch)
    except ValueError as error:
        return str(error)
    return ""


@cache
def checks_of(fault: str | None) -> list:
    """Every check, of the program with this fault."""
    with jax.enable_x64(True):
        run, true = train(fault), train(None, 1, 1)
        loss, losses = run["loss"], true["loss"]
        gap = max(abs(a - b) / b for a, b in zip(loss, losses, strict=True))
        ratio = norm(run["grads"][0]) / norm(true["grads"][0])
        refused = type_error(fault)
        rounding = max(norm(run["weights"][-1][name] - w) for name, w in rounded(run["masters"][-1]).items())
        return [
            equal("loss of step 1", loss[0], losses[0], within=1e-10),
            at_most("loss of step 30 over that of step 1", loss[-1] / loss[0], 0.9),
            at_most("loss curve: largest relative gap to one device", gap, 0.05),
            holds("gradient norm of step 1: within a factor of 3", 1 / 3 < ratio < 3, f"{ratio:.2f} of one device's"),
            at_most(
                "gradients of step 1: relative error of the worst leaf",
                worst_leaf(run["grads"][0], true["grads"][0]),
                1e-10,
            ),
            at_most(
                "gradients of step 2: relative error of the worst leaf",
                worst_leaf(run["grads"][1], true["grads"][1]),
                1e-2,
            ),
            at_most(
                "finite differences at step 2: relative error",
                finite_difference(fault, run["weights"][1], run["grads"][1]),
                1e-6,
            ),
            holds("types (check_vma) accept the program", not refused, "no: ValueError" if refused else ""),
            at_most("16-bit weights at step 30: difference from the masters, rounded", rounding, 0),
        ]


def run(broken: str | None) -> Result:
    checks = checks_of(broken)
    if broken:
        return Result(checks)
    matrix = {fault: checks_of(fault) for fault in FAULTS}
    rows = [
        [check.name, *["misses" if matrix[fault][number].ok else "sees" for fault in FAULTS]]
        for number, check in enumerate(checks)
    ]
    with jax.enable_x64(True):  # all of these are in train's cache
        curves = {name: train(fault)["loss"] for name, fault in {"right": None, **{f: f for f in FAULTS}}.items()}
        counts_BT = example()[1][2]
        per_rank = [int(part.sum()) for half in np.split(counts_BT, 2) for part in np.split(half, 2, axis=1)]
        stopped = train("stopped")
    seen = {fault: sum(not check.ok for check in matrix[fault]) for fault in FAULTS}
    return Result(
        checks,
        tables=[
            Table("faults", ["fault", "what is wrong"], [[name, text] for name, text in FAULTS.items()]),
            Table("matrix", ["check", *FAULTS], rows),
            Table(
                "losses",
                ["step", *curves],
                [
                    [str(step), *[f"{losses[step - 1]:.4f}" for losses in curves.values()]]
                    for step in (1, 2, 10, 20, 30)
                ],
            ),
        ],
        pictures={"curves": lambda: draw_curves(curves)},
        guesses={
            "seen": 0,
            "factor": norm(train("double")["grads"][0]) / norm(train(None, 1, 1)["grads"][0]),
            "count": (1 / min(per_rank) / 4) / (1 / sum(per_rank)),
            "stopped": sum(
                norm(stopped["grads"][0][name] - g) > 1e-10 * norm(g)
                for name, g in train(None, 1, 1)["grads"][0].items()
            ),
            "quiet": min(seen.values()),
        },
    )


CURVE = "loss curve: largest relative gap to one device"


def draw_curves(curves):
    figure = drawing.lines(
        "Loss, with each fault (simulated dp=2, cp=2)",
        "step",
        "loss, squared error",
        {name: (range(1, STEPS + 1), losses) for name, losses in curves.items()},
        marks=False,
    )
    figure.axes[0].set_ylim(5, 46)
    figure.axes[0].legend(ncols=3, loc="upper center")
    return figure


NORM = "gradient norm of step 1: within a factor of 3"
FIRST, SECOND = (
    "gradients of step 1: relative error of the worst leaf",
    "gradients of step 2: relative error of the worst leaf",
)
DIFFERENCES, TYPES = "finite differences at step 2: relative error", "types (check_vma) accept the program"
COPIES = "16-bit weights at step 30: difference from the masters, rounded"

LAB = Lab(
    name="lying-gradients",
    title="Gradients that lie",
    question="Forward is right, backward is wrong, and the loss falls: which check sees it, and which ones miss it?",
    run=run,
    breaks={
        "double": {NORM, FIRST, SECOND, DIFFERENCES},
        "missing": {CURVE, FIRST, SECOND, DIFFERENCES, TYPES},
        "means": {CURVE, FIRST, SECOND, DIFFERENCES},
        "stopped": {FIRST, SECOND, DIFFERENCES},
        "stale": {CURVE, SECOND, COPIES},
    },
    devices=4,
)
