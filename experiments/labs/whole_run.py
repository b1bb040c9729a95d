"""A small GPT on real text, whole: its parameters counted, six layouts that train the same model, and what it costs."""

import dataclasses
import time
from functools import cache
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import Batches, load_corpus
from jaxdist.layout import Layout
from jaxdist.mesh import AXES, make_mesh, parse_mesh
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.collectives import all_reduce, varying
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.utilisation import flops_per_token
from jaxdist.runtime.devices import acquire_devices
from jaxdist.strategy import ParallelConfig
from jaxdist.train import step as train_step
from jaxdist.train.program import build_program
from jaxdist.train.update import gradient_norms

from . import drawing
from .lab import Findings, Guesses, Picture, at_most, equal, lab, table

PUBLISHED = PRESETS["12m"]  # 12.5M without its positions
MODEL = dataclasses.replace(PRESETS["gpt-11m"], seq_len=64)  # bytes for tokens: nothing to train a tokenizer on
STEPS, ROWS = 8, 8
LAYOUTS = {
    "one device": ("", {}),
    "dp=4": ("dp=4", {}),
    "dp=4, ZeRO-3": ("dp=4", {"zero": 3}),
    "tp=2, sequence parallel": ("tp=2", {"sp": True}),
    "pp=2, 1F1B": ("pp=2", {"schedule": "1f1b", "microbatches": 4}),
    "pp=2, dp=2, tp=2, ZeRO-1": ("pp=2,dp=2,tp=2", {"zero": 1, "microbatches": 4}),
}
SHARDED = ("dp=4, ZeRO-3", "tp=2, sequence parallel")  # what a break runs, with one device
MFU, DOLLARS_PER_HOUR = 0.4, 2.50


def config_of(layout: str) -> RunConfig:
    mesh, settings = LAYOUTS[layout]
    parallel = ParallelConfig(mesh=parse_mesh(mesh), **settings)
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2)
    return RunConfig(MODEL, parallel, optimizer, batch_size=ROWS, steps=STEPS)


@cache
def batches() -> Batches:
    """The training text of `experiments.train`: the source of Python's standard library."""
    return Batches(load_corpus(None, MODEL.vocab_size), ROWS, MODEL.seq_len, 0)


@dataclasses.dataclass(frozen=True)
class Trained:
    """By step. seconds: of the steps after the first."""

    losses: list[float]
    norms: list[float]
    seconds: float


def train(layout: str) -> Trained:
    """`STEPS` steps of the layout, on simulated devices."""
    config = config_of(layout)
    count = config.parallel.mesh.num_devices
    program = build_program(config, make_mesh(config.parallel.mesh, acquire_devices(count, "cpu").devices[:count]))
    state, losses, norms, started = program.init(0), [], [], 0.0
    for step in range(STEPS):
        state, metrics = program.step(state, program.put(batches()[step]))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        started = started or time.perf_counter()
    return Trained(losses, norms, time.perf_counter() - started)


def local_norms(grads: dict, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """`gradient_norms` as a library for one device computes it: each rank of its own shards; here their mean."""
    mine = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(varying(grads, AXES))))
    return all_reduce(mine, AXES) / layout.mesh.num_devices, gradient_norms(grads, layout)[1]


def apart(runs: dict[str, Trained], what: str) -> float:
    """Largest relative difference of a step's `what` from one device."""
    reference = np.array(getattr(runs["one device"], what))
    return max(float(np.max(np.abs(getattr(run, what) / reference - 1))) for run in runs.values())


@lab(
    title="A whole run",
    question="Do six layouts train the same model on real text, how is its size counted, and what does a token cost?",
    devices=8,
    breaks={"local-norm": {"gradient norms*", "losses of the layouts*"}},
)
def run(broken: str | None) -> Findings:
    names = ["one device", *SHARDED] if broken else list(LAYOUTS)
    with patch.object(train_step, "gradient_norms", local_norms if broken else gradient_norms):
        runs = {name: train(name) for name in names}
    losses = runs["one device"].losses
    yield at_most(f"the loss falls: after {STEPS} steps, of what it was", losses[-1] / losses[0], 0.85)
    yield at_most("losses of the layouts: largest relative difference from one device", apart(runs, "losses"), 1e-3)
    yield at_most("gradient norms: largest relative difference from one device", apart(runs, "norms"), 1e-3)
    if broken:
        return

    h, layers, total = PUBLISHED.width, PUBLISHED.num_layers, num_parameters(PUBLISHED)
    vocabulary, positions = PUBLISHED.vocab_size * h, PUBLISHED.seq_len * h
    blocks = layers * (12 * h * h + 13 * h)
    padding = (PUBLISHED.padded_vocab_size - PUBLISHED.vocab_size) * h
    flops, _ = flops_per_token(config_of("one device"))
    model_parameters = num_parameters(MODEL, padded=True)
    form = blocks + 2 * h + vocabulary + positions + padding
    yield equal("parameters, by the closed form and in the model", form, total)
    yield equal("FLOPs a token, read from the program, and 6 × parameters", flops, 6 * model_parameters, within=0.1)
    counts = {
        "layers, 6 × (12h² + 13h)": blocks,
        "and the last norm": blocks + 2 * h,
        "and the table of 16,000 tokens, which is also the head": blocks + 2 * h + vocabulary,
        "and 512 positions": blocks + 2 * h + vocabulary + positions,
        "and rows that pad the vocabulary: what is allocated": total,
        "with a head of its own, untied": total + vocabulary + padding,
    }
    peak, one = find_hardware("h100").peak_flops["bfloat16"], runs["one device"]
    speed = MFU * peak / flops
    dollars = DOLLARS_PER_HOUR / 3600 / speed * 1e9
    shown = (1, 2, 4, STEPS)
    steps = [
        [name, *[found.losses[n - 1] for n in shown], apart({"one device": one, name: found}, "losses")]
        for name, found in runs.items()
    ]
    cost = [
        ["FLOPs a token, forward and backward", f"{flops / 1e6:,.1f} million"],
        ["tokens a second", f"{speed / 1e6:,.2f} million"],
        [f"dollars a billion tokens, at ${DOLLARS_PER_HOUR:.2f} an hour", f"{dollars:.2f}"],
        ["dollars for 20 tokens a parameter", f"{dollars * 20 * model_parameters / 1e9:.3f}"],
    ]
    columns = " | ".join(f"step {n} {{:.5f}}" for n in shown)
    here = [["one device", (STEPS - 1) * ROWS * MODEL.seq_len / one.seconds]]
    counted = [[name, count, count / 1e6] for name, count in counts.items()]
    yield table("count", "what is counted | parameters {:,} | millions {:.2f}", counted)
    yield table("losses", f"layout | {columns} | largest difference {{:.0e}}", steps)
    yield table("speed", "layout | tokens a second here {:,.0f}", here, clocked=True)
    yield table("cost", "on one H100, at 40% of its peak | value", cost)
    curves = {name: (range(1, STEPS + 1), found.losses) for name, found in runs.items()}
    title = "Six layouts, one run (simulated devices, fp32)"
    yield Picture("losses", lambda: drawing.lines(title, "step", "loss, nats a byte", curves, marks=False, equal=True))
    yield Guesses(
        layers=blocks / 1e6,
        embedding=vocabulary / 1e6,
        mfu=100 * 3e6 * flops / peak,
    )
