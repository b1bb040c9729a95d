"""Data parallelism by hand: each rank has a part of the batch, and one sum makes them one device again."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import MeshShape
from jaxdist.parallel import all_reduce, varying
from jaxdist.plan.proof.trace import total_sent

from . import drawing, tiny
from .exchanges import accepted, on_mesh, relative_error, sent_over, spread
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table

RANKS, ROWS, STEPS, LR = 4, 16, 40, 3e-3
# Ranks, and micro-batches that each adds up before the one sum: all of them the same batch of 16 sequences.
SPLITS = ((1, 1), (1, 4), (2, 2), (4, 1), (4, 4))
BUDGET = 4096  # sequences that a run of the last table may see
BATCHES = (8, 16, 32, 64, 128, 256, 512)
RULES = {"constant": lambda times: 1.0, "square root": lambda times: times**0.5, "linear": lambda times: times}


def batch(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, targets), later sequences with fewer targets, as padding makes them: -1 does not count."""
    tokens, targets = tiny.text(ROWS, seed)
    counted = tiny.T - np.arange(ROWS) * (tiny.T - 2) // ROWS
    return tokens, np.where(np.arange(tiny.T) < counted[:, None], targets, -1)


def mean_gradient(local, tokens, targets, accumulate: int = 1, broken: str | None = None):
    """(loss, gradient) of the mean over the targets of all ranks.

    Layout: a copy of the parameters on each rank, tokens[B_dp, T] -> equal on every rank. Each rank adds up sums over
    its micro-batches; the ranks add theirs up once; the division is by the number of targets of the whole batch.
    """

    def add_microbatch(sums, microbatch):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(tiny.loss_sum)(local, *microbatch)), None

    microbatches = [x.reshape(accumulate, -1, tiny.T) for x in (tokens, targets)]
    zeros = jax.tree.map(jnp.zeros_like, (local["embed"][0, 0], local))
    sums, _ = jax.lax.scan(add_microbatch, zeros, microbatches)
    here = (targets >= 0).sum()
    everywhere = all_reduce(here, "dp")
    if broken == "mean-of-means":
        return jax.tree.map(lambda x: all_reduce(x / here, "dp") / RANKS, sums)
    if broken == "no-sum":
        return jax.tree.map(lambda x: x / here, sums)
    loss, grads = all_reduce(sums, "dp")
    num_targets = everywhere / RANKS if broken == "wrong-count" else everywhere
    return loss / everywhere, jax.tree.map(lambda g: g / num_targets, grads)


def on_ranks(num_ranks: int, broken: str | None = None, accumulate: int = 1, stacked: bool = False):
    """(parameters, tokens, targets) -> (loss, gradient), each rank with its part of the batch.

    stacked: each rank's own gradient, along a new first dim, instead of one that is equal on all.
    """

    def on_each(params, tokens, targets):
        found = mean_gradient(varying(params, "dp"), tokens, targets, accumulate, broken)
        return jax.tree.map(lambda x: varying(x, "dp")[None], found) if stacked else found

    return on_mesh(f"dp={num_ranks}", on_each, (P(), P("dp"), P("dp")), P("dp") if stacked else P())


def gradient_error(num_ranks: int, accumulate: int, broken: str | None) -> float:
    """Largest relative difference, over ranks and parameters, from the whole batch's gradient on one device."""
    params, (tokens, targets) = tiny.initial(dtype=jnp.float64), batch(0)
    expected = jax.grad(lambda p: tiny.loss_sum(p, tokens, targets) / (targets >= 0).sum())(params)
    _, found = on_ranks(num_ranks, broken, accumulate, stacked=True)(params, tokens, targets)
    return max(relative_error(jax.tree.map(lambda g, r=r: g[r], found), expected) for r in range(num_ranks))


def train(num_ranks: int, broken: str | None = None) -> tuple[list[float], float, float]:
    """(the loss that each step reports, on the first rank; its copy's loss on the first batch at the end; the largest
    difference between the ranks' copies at the end).

    copies[dp, ...]: every rank updates its own, as it would on a cluster. Nothing but equal gradients keeps them equal.
    """
    split = P("dp")

    def step(copies, moments, number, tokens, targets):
        params, moments = jax.tree.map(lambda x: x[0], (copies, moments))
        loss, grads = mean_gradient(params, tokens, targets, broken=broken)
        updated = tiny.adam(params, grads, moments, number, LR)
        return jax.tree.map(lambda x: varying(x, "dp")[None], (*updated, loss))

    run = on_mesh(f"dp={num_ranks}", step, (split, split, P(), split, split), split)
    params = tiny.initial(dtype=jnp.float64)
    copies, moments = jax.tree.map(lambda x: jnp.stack([x] * num_ranks), (params, tiny.no_moments(params)))
    losses = []
    for number in range(1, STEPS + 1):
        copies, moments, loss = run(copies, moments, jnp.float64(number), *batch(number))
        losses.append(float(loss[0]))
    first, (tokens, targets) = jax.tree.map(lambda x: x[0], jax.device_get(copies)), batch(0)
    final = float(tiny.loss_sum(first, tokens, targets)) / (targets >= 0).sum()
    return losses, final, spread(copies)


def sent_bytes(num_ranks: int) -> tuple[int, int]:
    """(bytes that a device sends for one gradient, number of collectives), read from the traced program."""
    found = sent_over(on_ranks(num_ranks), f"dp={num_ranks}", tiny.initial(), *batch(0))
    return total_sent(found, MeshShape(dp=num_ranks)), len(found)


@partial(jax.jit, static_argnames="updates")
def held_out_loss(tokens, targets, lr, updates: int):
    """After `updates` of Adam over tokens[updates, B, T], the mean loss of text that was not trained on."""

    def step(carry, now):
        params, moments = carry
        number, tokens, targets = now
        grads = jax.grad(lambda p: tiny.loss_sum(p, tokens, targets) / targets.size)(params)
        return tiny.adam(params, grads, moments, number, lr), None

    params = tiny.initial()
    numbers = jnp.arange(1.0, updates + 1)
    (params, _), _ = jax.lax.scan(step, (params, tiny.no_moments(params)), (numbers, tokens, targets))
    tokens, targets = tiny.text(1024, seed=10_000)
    return tiny.loss_sum(params, tokens, targets) / targets.size


def batch_sweep() -> dict[str, list[float]]:
    """Held-out loss of each batch size, for each rule by which the learning rate follows it from 8 sequences on."""
    tokens, targets = tiny.text(BUDGET, seed=1)
    found = {rule: [] for rule in RULES}
    for rows in BATCHES:
        data = [x.reshape(-1, rows, tiny.T) for x in (tokens, targets)]
        for rule, factor in RULES.items():
            found[rule].append(float(held_out_loss(*data, LR * factor(rows / BATCHES[0]), BUDGET // rows)))
    return found


@lab(
    title="Data parallelism equals one device",
    question="When do many devices with a part of the batch each compute exactly what one device computes?",
    devices=8,
    breaks={
        "mean-of-means": {"largest relative*"},
        "no-sum": {"largest*", "loss of one batch*", "JAX's types*"},
        "wrong-count": {"largest relative*"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        splits = [split for split in SPLITS if broken is None or split == (RANKS, 1)]
        errors = {split: gradient_error(*split, broken) for split in splits}
        (losses, final, drift), (_, alone, _) = train(RANKS, broken), train(1)
    typed = accepted(on_ranks(RANKS, broken), tiny.initial(), *batch(0))
    yield at_most("largest relative difference of a gradient from one device", max(errors.values()), 1e-12)
    yield at_most("the loss falls: last over first", losses[-1] / losses[0], 0.8)
    yield equal("loss of one batch after 40 steps, against one device", final, alone, within=0.03, unit="nats")
    yield at_most("largest difference between the ranks' copies of a parameter", drift, 0.0)
    yield holds("JAX's types accept that gradients are equal on all ranks", typed)
    if broken:
        return

    num_parameters = sum(int(np.prod(shape)) for shape, _ in tiny.SHAPES.values())
    sent = {n: sent_bytes(n) for n in (2, 4, 8)}
    # The gradient, the loss (4 bytes) and the number of targets (4 bytes), each summed once.
    expected = {n: 2 * (n - 1) / n * (4 * num_parameters + 8) for n in sent}
    yield from (equal(f"bytes sent by each of {n} ranks", sent[n][0], expected[n], 1e-4, "bytes") for n in sent)
    sweep = batch_sweep()
    constant, root = sweep["constant"], sweep["square root"]
    worse = constant[-1] - min(constant)
    yield at_least("constant rate: loss of the largest batch minus that of the best", worse, 0.1, "nats")
    better = root[4] / constant[4]
    yield at_most("batches of 128: loss with the square root rate over that with the constant one", better, 0.98)
    split_rows = [[f"{n} × {k} × {ROWS // n // k}", ROWS, errors[n, k]] for n, k in SPLITS]
    sent_rows = [[n, ROWS // n, sent[n][0], 2 * (n - 1) / n * 4 * num_parameters] for n in sent]
    batches = [[rows, BUDGET // rows, *[sweep[rule][i] for rule in RULES]] for i, rows in enumerate(BATCHES)]
    rates = " | ".join(f"loss, {rule} rate {{:.3f}}" for rule in RULES)
    formula = "bytes sent by each {:,} | 2 (n−1)/n × 4 bytes × parameters {:,.0f}"
    curves = {f"{rule} learning rate": (BATCHES, losses) for rule, losses in sweep.items()}
    title, x = f"Held-out loss after {BUDGET:,} sequences", "sequences in a batch"
    cut = "ranks × micro-batches × sequences"
    yield table("splits", f"{cut} | batch | relative difference of the gradient {{:.0e}}", split_rows)
    yield table("sent", f"ranks | sequences a rank | {formula}", sent_rows)
    yield table("batch", f"sequences in a batch | updates | {rates}", batches)
    yield Picture("ranks", draw_ranks)
    yield Picture("batch", lambda: drawing.lines(title, x, "loss, nats a token", curves, log_x=True))
    guesses = {"sent": 2 * 3 / 4 * 4 * num_parameters, "global": 64 * 4 * 8}
    yield Guesses(guesses, means=3.5, large=2 * 255 / 256 * 14)


def draw_ranks():
    own = np.eye(4)
    summed = on_mesh("dp=4", partial(all_reduce, axes="dp"), P("dp"), P())(own)
    rows = {"parameters": np.ones((4, 1)), "rows of the batch": own, "gradient, from": own}
    return drawing.holdings("A colour is a quarter of the batch", rows | {"sum, from": np.tile(summed, (4, 1))})
