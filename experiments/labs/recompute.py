"""Recomputation: how much memory of activations it gives back, for how many FLOPs, and what must be the same again."""

import dataclasses
import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

import jaxdist
from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.proof.trace import equations
from jaxdist.train.program import build_program

from . import drawing
from .exchanges import relative_error
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table
from .tools import compiled_levels, planned_bytes, small_run

LAYERS, ROWS, WIDTH, HIDDEN = 64, 2048, 32, 128
INPUT = ROWS * WIDTH * 4  # bytes of a layer's input, x
KEPT = 9 * INPUT  # what a layer keeps for backward: x, tanh and its derivative, both four times as wide
GROUPS = (1, 2, 4, 8, 64)  # layers recomputed together; 64 is one checkpoint around the whole model
DROPPED = 0.1

SMALL = dataclasses.replace(
    PRESETS["proof"], num_layers=8, width=256, ffn_width=1024, num_heads=4, seq_len=128, vocab_size=250
)
REMATS = ("none", "selective", "block", "every-2")  # in the order of their FLOPs
BUDGETS = (240, 210, 150, 130)  # MiB
REAL = (("7b", "tp=8", 8), ("llama3-8b", "tp=8", 8))


# ------------------------------------------------------------------------------------ a stack of layers of our own


def layer(x_BD, weights, number):
    """x[B, D], (w[D, F], w[F, D]) -> [B, D], with dropout that depends only on the layer's number."""
    up_DF, down_FD = weights
    hidden_BF = jnp.tanh(x_BD @ up_DF)
    kept_BF = jax.random.bernoulli(jax.random.fold_in(jax.random.key(0), number), 1 - DROPPED, hidden_BF.shape)
    return x_BD + jnp.where(kept_BF, hidden_BF / (1 - DROPPED), 0) @ down_FD


def plain_layer(x_BD, weights, number):
    """The same without dropout."""
    up_DF, down_FD = weights
    return x_BD + jnp.tanh(x_BD @ up_DF) @ down_FD


def stack_loss(weights, x_BD, every: int, saved: bool = False, layer=plain_layer):
    """Loss of a scan over the layers; every k of them are recomputed together, where k is not 0.

    saved: the checkpoint's policy keeps everything after all.
    """
    policy = jax.checkpoint_policies.everything_saveable if saved else None

    def group(x_BD, group_weights):
        return jax.lax.scan(lambda x, each: (layer(x, each[0], each[1]), None), x_BD, group_weights)

    layers = (weights, jnp.arange(LAYERS))
    if every:
        layers = jax.tree.map(lambda w: w.reshape(LAYERS // every, every, *w.shape[1:]), layers)
        group = partial(jax.lax.scan, jax.checkpoint(group, policy=policy))
    return jnp.mean(group(x_BD, layers)[0] ** 2)


def recomputing(layer, shift: int = 0):
    """A checkpoint written by hand: forward saves only the inputs, backward runs the layer again.

    shift: added to what the recomputation draws its dropout from; anything but 0 is a fault.
    """

    @jax.custom_vjp
    def checkpointed(x_BD, weights, number):
        return layer(x_BD, weights, number)

    def forward(x_BD, weights, number):
        return layer(x_BD, weights, number), (x_BD, weights, number)

    def backward(saved, dy_BD):
        x_BD, weights, number = saved
        _, pullback = jax.vjp(lambda x_BD, weights: layer(x_BD, weights, number + shift), x_BD, weights)
        return (*pullback(dy_BD), None)

    checkpointed.defvjp(forward, backward)
    return checkpointed


def random_stack():
    rng = np.random.default_rng(0)
    shapes = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH), (ROWS, WIDTH))
    up, down, x = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
    return (0.1 * up, 0.05 * down), x


def matmul_flops(jaxpr) -> float:
    """FLOPs of every matrix product in a traced program, those in loops as often as they run."""
    flops = 0
    for eqn, times, _ in equations(jaxpr):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            length = math.prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
            flops += 2 * times * length * math.prod(eqn.outvars[0].aval.shape)
    return flops


@cache
def stack_program(every: int, saved: bool = False) -> tuple[float, int, object]:
    """(FLOPs over those of a forward, bytes of the compiled program's temporaries, gradient) of the stack."""
    weights, x_BD = random_stack()
    traced = jax.jit(jax.grad(partial(stack_loss, every=every, saved=saved))).trace(weights, x_BD)
    compiled = traced.lower().compile()
    forward = LAYERS * 2 * (2 * ROWS * WIDTH * HIDDEN)
    flops = matmul_flops(traced.jaxpr) / forward
    return flops, compiled.memory_analysis().temp_size_in_bytes, compiled(weights, x_BD)


def predicted_temporaries(every: int) -> float:
    """Closed form: an input for every group, what one group keeps, and about 8 inputs of gradients in work."""
    return (LAYERS // every if every else 0) * INPUT + (every or LAYERS) * KEPT + 8 * INPUT


# -------------------------------------------------------------------------------------------------- the library's step


@cache
def step_flops(config: RunConfig) -> float:
    """FLOPs of a token in the traced training step."""
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    return matmul_flops(traced.jaxpr) / (config.batch_size * config.model.seq_len)


def expected_flops(remat: str) -> float:
    """Closed form of the same: three forwards, and the repeated products.

    Our attention leaves out scores that the mask hides: of 128 positions in 2 blocks 3/4 are computed.
    """
    h, f, s, padded = SMALL.width, SMALL.ffn_width, SMALL.seq_len, 256
    matrices, last, core = 2 * (4 * h * h + 2 * h * f), 2 * h * f, 2 * (2 * s * h) * 3 / 4
    forward = SMALL.num_layers * (matrices + core) + 2 * h * padded
    again = {
        "none": 0,
        "selective": core / 2,  # the scores; what they are multiplied by was kept, and so was the result
        "block": matrices + core - last,  # the block's last product makes only its result, which nobody needs
        "every-2": matrices + core,
    }
    return 3 * forward + SMALL.num_layers * again[remat]


def cheapest_that_fits(bytes_of: dict[str, float], budget: float) -> str:
    return next((remat for remat in REMATS if bytes_of[remat] <= budget), "nothing fits")


# --------------------------------------------------------------------------------------------------------------- run


def stack_checks(saved: bool) -> Findings:
    rows = []
    _, none_bytes, none_grads = stack_program(0)
    for every in (0, *GROUPS):
        flops, temporaries, grads = stack_program(every, saved and every > 0)
        name, formula = f"groups of {every}" if every else "none", predicted_temporaries(every)
        yield equal(f"stack, {name}: FLOPs over those of a forward", flops, 4 if every else 3)
        yield equal(f"stack, {name}: temporaries", temporaries / 2**20, formula / 2**20, 0.15, "MiB")
        yield at_most(f"stack, {name}: error of the gradient, against none", relative_error(grads, none_grads), 1e-5)
        rows.append([name, flops, formula / 2**20, temporaries / 2**20, none_bytes / temporaries])
    columns = "FLOPs, in forwards {:g} | formula, MiB {:,.1f} | compiled, MiB {:,.1f} | times less than none {:.1f}"
    yield table("stack", f"recomputed | {columns}", rows)


def step_checks() -> Findings:
    rows, peaks, plans = [], {}, {}
    for remat in REMATS:
        config = small_run(model=SMALL, remat=remat)
        flops, terms = step_flops(config), planned_bytes(config)
        plans[remat], peaks[remat] = sum(terms.values()) / 2**20, compiled_levels(config).compiled.peak / 2**20
        yield equal(f"our step, --remat {remat}: FLOPs of a token", flops, expected_flops(remat))
        yield equal(f"our step, --remat {remat}: planned peak", plans[remat], peaks[remat], 0.1, "MiB")
        rows.append([remat, terms["activations"] / 2**20, plans[remat], peaks[remat], flops / expected_flops("none")])
    chosen = [(b, cheapest_that_fits(plans, b), cheapest_that_fits(peaks, b)) for b in BUDGETS]
    yield holds("planned and compiled peaks choose the same", all(a == b for _, a, b in chosen))
    columns = "activations, MiB {:,.1f} | planned peak, MiB {:,.1f} | compiled peak, MiB {:,.1f}"
    yield table("step", f"--remat | {columns} | FLOPs over those of none {{:.3f}}", rows)
    yield table("budgets", "budget, MiB | chosen by planned peaks | chosen by compiled peaks", chosen)


@lab(
    title="Recomputation",
    question="How much memory does running forward again in backward save, for how many FLOPs, and what must stay?",
    breaks={
        "redrawn": {"stack with dropout: error*"},
        "saved": {"stack, groups of *: FLOPs*", "stack, groups of [!6]*: temporaries"},  # all layers keep all anyway
    },
)
def run(broken: str | None) -> Findings:
    yield from stack_checks(broken == "saved")
    (loss, grads), (kept_loss, kept_grads) = by_hand(1000 * (broken == "redrawn")), by_hand(None)
    yield equal("stack with dropout: loss with recomputation, against none", loss[0], kept_loss[0], within=1e-6)
    yield at_most("stack with dropout: loss after four steps over the first", loss[-1] / loss[0], 0.95)
    error = relative_error(grads, kept_grads)
    yield at_most("stack with dropout: error of the gradient, against none", error, 1e-5)
    if broken:
        return
    model = dataclasses.replace(PRESETS["proof"], num_layers=2, dropout=0.1)
    report = jaxdist.verify(model, remat="block", batch_size=4, steps=1, device="cpu")
    name = "our step with dropout, --remat block: every leaf is that of one device that keeps everything"
    yield holds(name, report.ok)
    yield from step_checks()
    real = [
        [f"{name}, {mesh}, batch {rows}", *[planned_gb(PRESETS[name], mesh, rows, remat) for remat in REMATS[:3]]]
        for name, mesh, rows in REAL
    ]
    columns = " | ".join(f"{remat} {{:,.1f}}" for remat in REMATS[:3])
    yield table("real", f"planned peak, GB a device | {columns}", real)
    yield Picture("groups", draw_groups)
    yield Guesses(
        flops=100 / 3,
        best=min((2**e for e in range(7)), key=predicted_temporaries),
        sqrt=min(100 / k + k for k in range(1, 101)),
        block=24 * 4096 * 4096 * 2 / 2**30,
        last=100 * (expected_flops("block") / expected_flops("none") - 1),
    )


@cache
def by_hand(shift: int | None) -> tuple[list[float], object]:
    """(losses of five steps, gradient of the first) of the stack with dropout, on an eighth of the rows.

    shift: of `recomputing`; None recomputes nothing.
    """
    each = layer if shift is None else recomputing(layer, shift)
    weights, x_BD = random_stack()
    x_BD = x_BD[: ROWS // 8]
    step = jax.jit(jax.value_and_grad(partial(stack_loss, every=0, layer=each)))
    losses, first = [], None
    for _ in range(5):
        loss, grads = step(weights, x_BD)
        losses.append(float(loss))
        first = grads if first is None else first
        weights = jax.tree.map(lambda w, g: w - 0.2 * g, weights, grads)
    return losses, first


def planned_gb(model, mesh: str, rows: int, remat: str) -> float:
    return sum(planned_bytes(small_run(mesh, model, rows, dtype="bfloat16", remat=remat, sp=True)).values()) / 1e9


def draw_groups():
    ks, none = [2**e for e in range(7)], stack_program(0)[1] / 2**20
    curves = {
        "formula": (ks, [predicted_temporaries(k) / 2**20 for k in ks]),
        "compiled for a CPU": (GROUPS, [stack_program(k)[1] / 2**20 for k in GROUPS]),
        "nothing recomputed": ([1, 64], [none, none]),
    }
    title, x = "64 layers: temporaries of the gradient", "layers recomputed together"
    return drawing.lines(title, x, "MiB", curves, log_x=True)
