"""Gradients that lie: forward is right and backward is not. Which check sees which fault, each cell computed."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec as P

from . import drawing
from .exchanges import accepted, on_mesh, relative_error
from .lab import Check, Findings, Guesses, Picture, at_most, equal, holds, lab, table

ROWS, LENGTH, WIDTH, HIDDEN, STEPS = 8, 8, 8, 16, 30
RATE, EPS = 0.01, 1e-8
AXES = ("dp", "cp")
FAULTS = ("double", "missing", "means", "stopped", "stale")


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
    data = P("dp", "cp")
    return on_mesh(f"dp={dp},cp={cp}", partial(gradients, fault), (P(), data, data, data), (P(), P()))


def program(fault: str | None, dp: int, cp: int):
    """The same, and what a user does who is refused: return every rank's gradient, and take the first."""
    if fault != "missing":
        return sharded(fault, dp, cp)

    def every_rank(*args):
        loss, grads = gradients(fault, *args)
        return loss, jax.tree.map(lambda g: g[None], grads)

    data = P("dp", "cp")
    run = on_mesh(f"dp={dp},cp={cp}", every_rank, (P(), data, data, data), (P(), P(AXES)))

    def first(*args):
        loss, grads = run(*args)
        return loss, jax.tree.map(lambda g: g[0], grads)

    return first


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
    optimizer, weights = optax.adam(RATE, b2=0.99, eps=EPS), rounded(masters)
    state, found = optimizer.init(masters), {"loss": [], "grads": [], "masters": [], "weights": []}
    for _ in range(STEPS):
        loss, grads = jax.device_get(step(weights, *batch))
        for name, value in zip(found, (float(loss), grads, masters, weights), strict=True):
            found[name].append(value)
        updates, state = optimizer.update(grads, state)
        masters = jax.device_get(optax.apply_updates(masters, updates))
        weights = rounded(masters) | ({"up": weights["up"]} if fault == "stale" else {})
    return found


# -------------------------------------------------------------------------------------------------------------- checks


def norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree))))


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


@cache
def checks_of(fault: str | None) -> list[Check]:
    """Every check, of the program with this fault."""
    with jax.enable_x64(True):
        run, true = train(fault), train(None, 1, 1)
        loss, losses = run["loss"], true["loss"]
        gap = max(abs(a - b) / b for a, b in zip(loss, losses, strict=True))
        ratio = norm(run["grads"][0]) / norm(true["grads"][0])
        (masters, batch), last = example(), rounded(run["masters"][-1])
        rounding = max(norm(run["weights"][-1][name] - w) for name, w in last.items())
        along = finite_difference(fault, run["weights"][1], run["grads"][1])
        first, second = (relative_error(run["grads"][step], true["grads"][step]) for step in (0, 1))
        return [
            equal("loss of step 1", loss[0], losses[0], within=1e-10),
            at_most("loss of step 30 over that of step 1", loss[-1] / loss[0], 0.9),
            at_most("loss curve: largest relative gap to one device", gap, 0.05),
            holds("gradient norm of step 1: within a factor of 3", 1 / 3 < ratio < 3, f"{ratio:.2f} of one device's"),
            at_most("gradients of step 1: relative error of the worst leaf", first, 1e-10),
            at_most("gradients of step 2: relative error of the worst leaf", second, 1e-2),
            at_most("finite differences at step 2: relative error", along, 1e-6),
            holds("types (check_vma) accept the program", accepted(sharded(fault, 2, 2), masters, *batch)),
            at_most("16-bit weights at step 30: difference from the masters, rounded", rounding, 0),
        ]


@lab(
    title="Gradients that lie",
    question="Forward is right, backward is wrong, and the loss falls: which check sees it, and which ones miss it?",
    breaks={
        "double": {"gradient norm*", "gradients of step*", "finite differences*"},
        "missing": {"loss curve*", "gradients of step*", "finite differences*", "types*"},
        "means": {"loss curve*", "gradients of step*", "finite differences*"},
        "stopped": {"gradients of step*", "finite differences*"},
        "stale": {"loss curve*", "gradients of step 2*", "16-bit weights*"},
    },
    devices=4,
)
def run(broken: str | None) -> Findings:
    checks = checks_of(broken)
    yield from checks
    if broken:
        return
    matrix = {fault: checks_of(fault) for fault in FAULTS}
    cells = [["misses" if each.ok else "sees" for each in column] for column in matrix.values()]
    with jax.enable_x64(True):  # all of these are in train's cache
        curves = {"right": train(None)["loss"]} | {fault: train(fault)["loss"] for fault in FAULTS}
        counts_BT, right, stopped = example()[1][2], train(None, 1, 1)["grads"][0], train("stopped")["grads"][0]
    per_rank = [int(part.sum()) for half in np.split(counts_BT, 2) for part in np.split(half, 2, axis=1)]
    columns = " | ".join(f"{name} {{:.4f}}" for name in curves)
    losses = [[step, *[curve[step - 1] for curve in curves.values()]] for step in (1, 2, 10, 20, 30)]
    yield table("matrix", f"check | {' | '.join(FAULTS)}", zip([c.name for c in checks], *cells, strict=True))
    yield table("losses", f"step | {columns}", losses)
    yield Picture("curves", partial(draw_curves, curves))
    yield Guesses(
        seen=0,
        factor=norm(train("double")["grads"][0]) / norm(right),
        count=(1 / min(per_rank) / 4) / (1 / sum(per_rank)),
        stopped=sum(norm(stopped[name] - g) > 1e-10 * norm(g) for name, g in right.items()),
        quiet=min(sum(not check.ok for check in column) for column in matrix.values()),
    )


def draw_curves(curves):
    series = {name: (range(1, STEPS + 1), losses) for name, losses in curves.items()}
    title, y = "Loss, with each fault (simulated dp=2, cp=2)", "loss, squared error"
    return drawing.lines(title, "step", y, series, marks=False, up_to=46)
