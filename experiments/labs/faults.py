"""Faults: a run that is killed, resumed and resized, a NaN, a copy that drifts, a device that computes wrongly."""

import json
import math
import os
import signal
import subprocess
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from jaxdist.checkpoint import resume
from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.commands import command_words, import_root
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.divergence import Run, compare_steps, first_divergence
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.parallel import rank, tensor
from jaxdist.parity import one_device
from jaxdist.runtime.devices import acquire_devices
from jaxdist.runtime.fault_injection import parse_fault
from jaxdist.runtime.health import gather_ranks, make_replica_check, name_culprits
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import Program, build_program

from . import drawing
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table
from .tools import new_folder, small_run

STEPS, SAVED = 12, 6
MODEL = GPT2Config(num_layers=2, width=32, num_heads=4, ffn_width=64, seq_len=16, vocab_size=64, dropout=0.1)
DATA = {"source": "a chain", "fingerprint": "0"}
MESHES = ("dp=2", "dp=2,tp=2", "one device")
# What is killed: the command, in a process of its own.
TRAIN = (
    "--num-layers 1 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --mesh dp=2 --zero 1 --steps 8 "
    "--checkpoint-every 4 --eval-every 1000 --eval-windows 8"
)
# 419 unexpected interruptions in 54 days on 16,384 GPUs (Llama 3, arXiv 2407.21783, section 3.3.4).
HOURS_OF_A_GPU = 16_384 * 54 * 24 / 419
SAVE_SECONDS = 30
CULPRIT = "rank 3 (dp=1,tp=1): blocks.mlp.w_up"  # where a NaN is put
WRONG = "layer 0: Attention.column_parallel.out"  # what the wrong device multiplies


# ------------------------------------------------------------------------------------------- a run in this process


def batch_of(index: int) -> dict[str, np.ndarray]:
    """The global batch of an index: a chain of tokens that can be learned, from random starts, with some noise."""
    rng = np.random.default_rng(index)
    tokens = np.empty((8, MODEL.seq_len + 1), np.int32)
    tokens[:, 0] = rng.integers(0, MODEL.vocab_size, 8)
    for place in range(MODEL.seq_len):
        tokens[:, place + 1] = (5 * tokens[:, place] + 7) % MODEL.vocab_size
    tokens = np.where(rng.random(tokens.shape) < 0.1, rng.integers(0, MODEL.vocab_size, tokens.shape), tokens)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "rows": np.arange(8, dtype=np.int32)}


@cache
def program_of(mesh: str) -> tuple[Program, object]:
    """(program, compiled step). That for four devices has a fault built in, as `train --drill` takes it."""
    shape = parse_mesh("" if mesh == "one device" else mesh)
    optimizer = OptimizerConfig(lr=2e-2, warmup_steps=0)
    config = RunConfig(MODEL, ParallelConfig(mesh=shape), optimizer, batch_size=8, steps=STEPS)
    poison = parse_fault("nan:step=2,rank=3,leaf=blocks.mlp.w_up", 4).poison() if mesh == "dp=2,tp=2" else None
    devices = acquire_devices(4, "cpu").devices[: shape.num_devices]
    program = build_program(config, make_mesh(shape, devices), poison=poison)
    return program, program.compile_step({"xla_backend_optimization_level": 0})


def train(program: Program, step, state, batches) -> tuple[object, list[float]]:
    """(state, loss of each step) after batches of these indices."""
    losses = []
    for index in batches:
        state, metrics = step(state, program.put(batch_of(index)))
        losses.append(float(metrics["loss"]))
    return state, losses


@cache
def interrupted() -> tuple[Path, list[float], object]:
    """(folder with a checkpoint after half of the steps, losses of all of them, last parameters), never stopped."""
    program, step = program_of(MESHES[0])
    folder = new_folder()
    state, losses = train(program, step, program.init(0), range(SAVED))
    checkpoints = Checkpoints(folder)
    resume.save(checkpoints, program, state, DATA, resume.Progress(batch=SAVED))
    checkpoints.wait()
    state, rest = train(program, step, state, range(SAVED, STEPS))
    return folder, losses + rest, jax.device_get(state.params)


def resumed(mesh: str, position: bool = True, moments: bool = True) -> tuple[list[float], object]:
    """(losses after the checkpoint, last parameters) of a run that continues on a mesh.

    position: continue with the batch that the checkpoint names, not with the first. moments: restore the optimiser's.
    """
    program, step = program_of(mesh)
    checkpoints = Checkpoints(interrupted()[0])
    start = resume.restore(checkpoints, checkpoints.check(SAVED), program, same_run=True)
    state, first = start.state, start.progress.batch if position else 0
    if not moments:
        state = state._replace(moments=jax.tree.map(jnp.zeros_like, state.moments))
    state, losses = train(program, step, state, range(first, first + STEPS - SAVED))
    return losses, jax.device_get(state.params)


def drifting(flipped: bool) -> tuple[list[float], list[str]]:
    """(losses, ranks that the replica check names) of a run in which a bit of device 1's copy may flip."""
    program, step = program_of("dp=2")
    check = make_replica_check(program)
    state, losses = train(program, step, program.init(0), range(SAVED))
    if flipped:
        fault = parse_fault(f"flip:step={SAVED},rank=1", 2)
        state = state._replace(params=fault.flip(SAVED, program.mesh, state.params))
    state, rest = train(program, step, state, range(SAVED, STEPS))
    return losses + rest, [str(culprit) for culprit in check(state)]


@cache
def with_a_nan() -> tuple[list[str], bool, bool, bool]:
    """(culprits, bits unchanged by that step, loss of it finite, the next step changes them) of a NaN on rank 3."""
    program, step = program_of("dp=2,tp=2")
    state, _ = step(program.init(0), program.put(batch_of(0)))
    before = jax.device_get((state.params, state.moments))
    state, metrics = step(state, program.put(batch_of(1)))
    culprits = [str(each) for each in name_culprits(program, gather_ranks("", metrics["not_finite"]))]
    after = jax.device_get((state.params, state.moments))
    unchanged, finite = same_bits(before, after), math.isfinite(float(metrics["loss"]))
    state, _ = step(state, program.put(batch_of(2)))
    return culprits, unchanged, finite, not same_bits(before[0], jax.device_get(state.params))


def same_bits(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


@cache
def wrong_device() -> tuple[str, tuple[int, ...], str]:
    """(tensor, ranks, the collective before it) of the first divergence, where one device multiplies wrongly."""
    column_parallel = tensor.column_parallel

    def wrong(x_BTD, *args):
        factor = jnp.where(rank("tp") == 1, jnp.float32(1.001), 1)
        return jax.tree.map(lambda y_BTF: y_BTF * factor, column_parallel(x_BTD, *args))

    config = small_run("tp=2", replace(MODEL, dropout=0.0))
    devices = acquire_devices(4, "cpu").devices
    (batch,) = random_batches(config, 1)
    reference = Run(one_device(config), devices[:1]).advance(batch)
    with patch.object(tensor, "column_parallel", wrong):
        ours = Run(config, devices[:2]).advance(batch)
    found = first_divergence(compare_steps(ours, reference))
    return f"layer {found.key.layer}: {found.key.name}", found.ranks, found.collective


# ---------------------------------------------------------------------------------------------- a run that is killed


@cache
def killed() -> tuple[int, list[int], list[float], list[float]]:
    """(exit code, steps committed when it was killed, losses until then, losses after the same command continued)."""
    folder = new_folder()
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200, encoding="utf-8")

    def train(*more: str) -> int:
        words = [*command_words("train"), "--data", str(folder / "text.txt"), *TRAIN.split(), "--out", str(folder)]
        environment = os.environ | {"PYTHONPATH": str(import_root()), "XLA_FLAGS": "--xla_backend_optimization_level=0"}
        return subprocess.run([*words, *more], cwd=folder, env=environment, capture_output=True).returncode

    def losses() -> list[float]:
        lines = map(json.loads, (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines())
        return list({line["step"]: line["loss"] for line in lines if "loss" in line}.values())

    code, before = train("--drill", "die:step=8"), losses()
    committed = sorted(int(path.name[5:]) for path in (folder / "checkpoints").glob("step_*[0-9]"))
    assert train() == 0
    return code, committed, before, losses()


# --------------------------------------------------------------------------------------------------------- intervals


def lost_share(interval: float, save: float, between: float) -> float:
    """Closed form: the share of time that goes to saves, and to steps that a fault makes necessary again."""
    return save / interval + interval / (2 * between)


def best_interval(save: float, between: float) -> float:
    """Where both are equal: √(2 × save × time between faults)."""
    return math.sqrt(2 * save * between)


# --------------------------------------------------------------------------------------------------------------- run


@lab(
    title="Faults",
    question="A run is killed, moved to other devices, or one device goes wrong: how is it known that training goes on "
    "as if nothing had happened, and who was it?",
    breaks={
        "position": {"resumed on the same*", "resumed on *: error*"},
        "moments": {"resumed on the same*", "resumed on *: error*"},
        "drift": {"copies on dp=2: ranks*"},
    },
    devices=4,
)
def run(broken: str | None) -> Findings:
    _, never_stopped, last = interrupted()
    rest, found = never_stopped[SAVED:], {}
    for mesh in MESHES:
        found[mesh], params = resumed(mesh, broken != "position", broken != "moments")
        worst = max(abs(a - b) / b for a, b in zip(found[mesh], rest, strict=True))
        if mesh == MESHES[0]:
            yield holds("resumed on the same mesh: losses and parameters to the bit", same_bits(params, last))
        yield at_most(f"resumed on {mesh}: error of the losses", worst, 1e-5)
        fallen = found[mesh][-1] / never_stopped[0]
        yield at_most(f"resumed on {mesh}: last loss over that of step 1", fallen, 0.9)
    losses, named = drifting(broken == "drift")
    yield at_most("copies on dp=2: last loss over that of step 1", losses[-1] / losses[0], 0.9)
    yield equal("copies on dp=2: ranks that the replica check names", len(named), 0)
    if broken:
        return

    culprits, unchanged, finite, goes_on = with_a_nan()
    code, committed, before, after = killed()
    where, ranks, collective = wrong_device()
    yield holds("a NaN: rank and leaf that are named", culprits == [CULPRIT], "; ".join(culprits), CULPRIT)
    yield holds("a NaN: that step changes no bit of parameters and moments", unchanged)
    yield holds("a NaN: the loss of that step is finite", finite)
    yield holds("a NaN: the next step changes parameters", goes_on)
    yield equal("killed: exit code, minus the number of SIGKILL", code, -signal.SIGKILL)
    yield equal("killed: step of the newest checkpoint", committed[-1], 4)
    yield equal("killed and continued: steps in the log", len(after), 8)
    again = "killed and continued: steps 5 to 7, taken twice, have the same losses to the bit"
    yield holds(again, before == after[:7])
    yield holds("a wrong device: first tensor that differs", where == WRONG, where, WRONG)
    yield equal("a wrong device: rank on which it differs", ranks[0] if len(ranks) == 1 else math.nan, 1)
    yield holds("a wrong device: last collective before that tensor", collective.startswith("all_reduce over tp"))
    intervals = []
    for gpus in (8, 1024, 16_384):
        between = HOURS_OF_A_GPU / gpus * 3600
        best = best_interval(SAVE_SECONDS, between)
        searched = min((best * 1.01**e for e in range(-200, 201)), key=lambda t: lost_share(t, SAVE_SECONDS, between))
        name = f"{gpus:,} GPUs: minutes between saves, by formula and by search"
        yield equal(name, best / 60, searched / 60, within=0.01)
        intervals.append([gpus, between / 3600, best / 60, 100 * lost_share(best, SAVE_SECONDS, between)])

    curves = {
        "never stopped": never_stopped,
        "without position": never_stopped[:SAVED] + resumed(MESHES[0], position=False)[0],
        "without moments": never_stopped[:SAVED] + resumed(MESHES[0], moments=False)[0],
    }
    series = {name: (range(1, STEPS + 1), curve) for name, curve in curves.items()}
    title = f"Resumed after step {SAVED} (simulated dp=2)"
    named = [
        ["NaN in one gradient", "finiteness check, before the sum", culprits[0]],
        ["a bit of one copy", "replica check", "; ".join(drifting(True)[1])],
        ["a device that multiplies wrongly", "comparison with one device", f"{where}, rank {ranks[0]}"],
        ["SIGKILL", "the same command again", f"continues after step {committed[-1]}"],
    ]
    steps = [[SAVED + 1 + i, loss, *[found[mesh][i] for mesh in MESHES]] for i, loss in enumerate(rest)]
    columns = " | ".join(f"resumed on {mesh} {{:.6f}}" for mesh in MESHES)
    units = "hours between faults {:,.1f} | best minutes between saves {:,.0f} | time lost {:.2f} %"
    big = HOURS_OF_A_GPU / 16_384 * 3600
    yield table("losses", f"step | never stopped {{:.6f}} | {columns}", steps)
    yield table("found", "fault | found by | named", named)
    yield table("intervals", f"GPUs {{:,}} | {units}", intervals)
    yield Picture("curves", lambda: drawing.lines(title, "step", "loss, nats a token", series))
    yield Guesses(
        lost=50,
        interval=best_interval(SAVE_SECONDS, big) / 60,
        bytes=7 * 12,
        slower=100 * lost_share(best_interval(10 * SAVE_SECONDS, big), 10 * SAVE_SECONDS, big),
    )
