"""`experiments.diverge`: planted bugs are found where they are, and equal runs have none."""

import dataclasses
from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from jax import lax

from jaxdist.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.divergence import Checked, Run, Step, compare_steps, first_divergence
from jaxdist.mesh import AXES, make_mesh, parse_mesh
from jaxdist.models import gpt2
from jaxdist.models.context import Context
from jaxdist.models.gpt2 import GPT2
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import tensor, zero
from jaxdist.parallel.pipeline import executor
from jaxdist.parity import PROOF_EPS, PROOF_LR, one_device, random_batches
from jaxdist.probes import BACKWARD, FORWARD, Recorder
from jaxdist.train import step as train_step
from jaxdist.train.gradients import base
from jaxdist.train.program import build_program

MODEL = GPT2(num_layers=2, width=16, num_heads=4, ffn_width=32, seq_len=8, vocab_size=50)


def config_of(mesh: str, dtype: str = "float32", model: GPT2 = MODEL, **parallel) -> RunConfig:
    return RunConfig(
        model,
        ParallelConfig(mesh=parse_mesh(mesh), **parallel),
        OptimizerConfig(lr=PROOF_LR, warmup_steps=0, eps=PROOF_EPS),
        PrecisionConfig(dtype),
        batch_size=8,
        steps=2,
    )


@cache
def reference(config: RunConfig, num_steps: int = 1) -> tuple[Run, Step]:
    """The last of its steps."""
    run = Run(config, DEVICES)
    steps = [run.advance(batch) for batch in random_batches(config, num_steps)]
    return run, steps[-1]


def compared(config: RunConfig, against: RunConfig | None = None) -> tuple[Run, list[Checked]]:
    """Every tensor of the first step."""
    expected, theirs = reference(one_device(config) if against is None else against)
    run = Run(config, DEVICES)
    return run, compare_steps(run, run.advance(random_batches(config, 1)[0]), expected, theirs)


# ---------------------------------------------------------------------------------------------------------------------
# Bugs
# ---------------------------------------------------------------------------------------------------------------------


def pretend(x: jax.Array, like: jax.Array) -> jax.Array:
    """`x`, typed varying as `like`: what no program of ours can say, and a faulty device can do. No gradient."""
    x = lax.stop_gradient(x)
    again = jax.pure_callback(lambda x: np.asarray(x), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return comm.varying_like(again, like)


class Here:
    """The layer that is being traced, for bugs that are in one."""

    layer: int | jax.Array = -1


def note_layers(patch: pytest.MonkeyPatch) -> None:
    watching = Context.watching

    def noted(ctx, part, layer=0):
        Here.layer = layer if part == "layer" else -1
        return watching(ctx, part, layer)

    patch.setattr(Context, "watching", noted)


def is_there(layer: int | None, rank: int | None, here) -> jax.Array:
    found = jnp.bool_(True) if layer is None else jnp.equal(here, layer)
    return found if rank is None else found & (comm.rank(AXES) == rank)


def scale(x: jax.Array, layer: int | None = None, rank: int | None = None, here=None) -> jax.Array:
    """`x`, half as large again in a layer (None: anywhere) on a rank (None: on all)."""
    there = is_there(layer, rank, Here.layer if here is None else here)
    return x * pretend(jnp.where(there, 1.5, 1.0).astype(x.dtype), x)


def scaled(where, name: str, wanted: Callable = lambda *args, **how: True, **at) -> Callable:
    """A bug: what a function returns is scaled."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(where, name)

        def wrong(*args, **how):
            found = function(*args, **how)
            return jax.tree.map(lambda x: scale(x, **at), found) if wanted(*args, **how) else found

        patch.setattr(where, name, wrong)

    return plant


def bent_backward(where, name: str, change: Callable, wanted: Callable = lambda *args: True) -> Callable:
    """A bug in backward alone: change(dx, layer) of a function's first argument."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(where, name)

        @jax.custom_vjp
        def bent(x, layer):
            return x

        bent.defvjp(lambda x, layer: (x, layer), lambda layer, dx: (change(dx, layer), None))

        def wrong(x, *args):
            return function(bent(x, jnp.asarray(Here.layer)) if wanted(x, *args) else x, *args)

        patch.setattr(where, name, wrong)

    return plant


def no_sum(name: str, partial_sum: Callable, layer: int | None = None) -> Callable:
    """A bug: what a function of `tensor` sums over tp is this rank's partial sum."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(tensor, name)

        def wrong(*args):
            total = function(*args)
            gap = pretend(partial_sum(*args) - total, total)
            return total + jnp.where(is_there(layer, None, Here.layer), gap, 0)

        patch.setattr(tensor, name, wrong)

    return plant


def no_sum_in_backward(patch: pytest.MonkeyPatch) -> None:
    """Layer 1 forgets the psum that is the transpose of `enter`."""
    enter = tensor.enter

    @jax.custom_vjp
    def wrong(x, layer):
        return enter(x, False)

    def backward(layer, dy):
        total = lax.psum(dy, "tp")
        return total + jnp.where(layer == 1, pretend(dy - total, total), 0), None

    wrong.defvjp(lambda x, layer: (wrong(x, layer), layer), backward)
    patch.setattr(tensor, "enter", lambda x, sp: wrong(x, jnp.asarray(Here.layer)))


def one_leaf(where, name: str, leaf: str, change: Callable) -> Callable:
    """A bug: change(leaf of a tree that a function of (tree, layout, ...) returns, the same that it was given)."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(where, name)

        def wrong(tree, *args):
            def each(path, after, before):
                path = jax.tree_util.keystr(path, simple=True, separator=".")
                return change(after, before) if path == leaf else after

            return jax.tree.map_with_path(each, function(tree, *args), tree)

        patch.setattr(where, name, wrong)

    return plant


def stale_leaf(leaf: str, rank: int | None = None) -> Callable:
    """A bug: the update leaves a leaf as it was."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        update = train_step.update

        def wrong(optimizer, layout, finite, grads, moments, owned, lr):
            updated, moments = update(optimizer, layout, finite, grads, moments, owned, lr)

            def each(path, after, before):
                path = jax.tree_util.keystr(path, simple=True, separator=".")
                stale = pretend(before - after, after) * pretend(is_there(None, rank, 0).astype(after.dtype), after)
                return after + stale if path == leaf else after

            return jax.tree.map_with_path(each, updated, owned), moments

        patch.setattr(train_step, "update", wrong)

    return plant


def sees_the_future(patch: pytest.MonkeyPatch) -> None:
    """On rank 0 layer 1 attends to the next position: the mask is off by one."""
    attend = gpt2.attend

    def wrong(ctx, q, k, v, **how):
        there = is_there(1, 0, Here.layer)
        k, v = (jnp.where(there, jnp.roll(x, -1, axis=1), x) for x in (k, v))
        return attend(ctx, q, k, v, **how)

    patch.setattr(gpt2, "attend", wrong)


def shards_swapped(patch: pytest.MonkeyPatch) -> None:
    """Layers are gathered with the shards of both ranks exchanged."""
    gather = zero.all_gather_groups

    def wrong(arrays, leaves, *args, **how):
        whole = gather(arrays, leaves, *args, **how)
        layers = any("blocks" in leaf.name for leaf in leaves)
        return [jnp.roll(w, w.shape[0] // 2, 0) for w in whole] if layers else whole

    patch.setattr(zero, "all_gather_groups", wrong)


def own_targets_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank divides by the number of its own targets."""
    count = train_step.count_targets

    def wrong(batch):
        total, batch = count(batch)
        return pretend(jnp.sum(batch.targets >= 0), total), batch

    patch.setattr(train_step, "count_targets", wrong)


def message_scaled(sender: int) -> Callable:
    """A bug: what a stage sends to the other is changed on its way."""
    return scaled(executor.comm, "permute", lambda x, axis, shift, senders: senders == (sender,))


def other_tokens(patch: pytest.MonkeyPatch) -> None:
    """The pipeline embeds the tokens of rows 0 and 1 where it should embed those of rows 2 and 3."""
    embed = base.ShardedModel.embed

    def wrong(model, outer, batch, key):
        moved = jnp.where(batch.rows[:1] == 2, jnp.roll(batch.inputs, 1, axis=1), batch.inputs)
        return embed(model, outer, batch._replace(inputs=moved), key)

    patch.setattr(base.ShardedModel, "embed", wrong)


class Bug(NamedTuple):
    """What is planted, and where it must be found. layer, ranks, before, rows: None where they say nothing."""

    name: str
    layout: str
    plant: Callable
    direction: str
    tensor: str
    layer: int | None = None
    ranks: tuple[int, ...] | None = None
    before: str | None = None
    rows: tuple[int, ...] | None = None


LAYOUTS = {
    "dp2-tp2": ("dp=2,tp=2", {}),
    "dp2-tp2-sp": ("dp=2,tp=2", {"sp": True}),
    "zero3": ("dp=2", {"zero": 3}),
    "zero3-overlap": ("dp=2", {"zero": 3, "overlap": True}),
    "pp2": ("pp=2", {}),
    "pp2-zb-h1": ("pp=2", {"schedule": "zb-h1"}),
}


def in_mlp(y, *args) -> bool:
    """Whether a row-parallel product is the MLP's, on one of two tp ranks."""
    return y.shape[-1] == MODEL.ffn_width // 2


def partial_product(y, w, sp, ring):
    return tensor.linear(y, w)


def own_rows(tokens, table, sp):
    local = tokens - comm.rank("tp") * len(table)
    owned = (local >= 0) & (local < len(table))
    return jnp.where(owned[..., None], table[jnp.where(owned, local, 0)], 0)


def from_layers(arrays, leaves, *args, **how) -> bool:
    return any("blocks" in leaf.name for leaf in leaves)


def at(layer: int | None = None, rank: int | None = None) -> Callable:
    """A change of a gradient there."""
    return lambda dx, here: scale(dx, layer, rank, here)


def half_on(rank: int) -> Callable:
    return lambda after, before: scale(after, None, rank)


def unsummed(after, before):
    """The gradient that was given in place of its sum."""
    return after + pretend(before.astype(after.dtype) - after, after)


QKV, OUT, PRODUCTS = "Attention.column_parallel.in", "Attention.row_parallel.out", "Attention.column_parallel.out"
MLP_OUT, TP_SUM, GATHER = "MLP.row_parallel.out", "all_reduce over tp", "all_gather over dp"
BUGS = [
    # dp=2, tp=2: one layer on one rank, then collectives that are missing or wrong.
    Bug("a-sum", "dp2-tp2", scaled(tensor, "row_parallel", layer=1, rank=3), FORWARD, OUT, 1, (3,), TP_SUM),
    Bug("a-sum-of-the-mlp", "dp2-tp2", scaled(tensor, "row_parallel", in_mlp, layer=0, rank=1), FORWARD, MLP_OUT, 0, (1,)),
    Bug("a-weight", "dp2-tp2", scaled(tensor, "column_parallel", layer=1, rank=2), FORWARD, PRODUCTS, 1, (2,), TP_SUM),
    Bug("the-mask", "dp2-tp2", sees_the_future, FORWARD, "Attention.row_parallel.in", 1, (0,), TP_SUM),
    Bug("a-scatter", "dp2-tp2-sp", scaled(tensor, "row_parallel", layer=0, rank=2), FORWARD, OUT, 0, (2,), "reduce_scatter over tp"),
    Bug("an-embedding", "dp2-tp2", scaled(tensor, "vocab_parallel_embedding", rank=2), FORWARD, "GPT2.embed.embedding.out", 0, (2,), "all_reduce over tp", (4, 5, 6, 7)),
    Bug("no-sum", "dp2-tp2", no_sum("row_parallel", partial_product, 1), FORWARD, OUT, 1, (0, 1, 2, 3)),
    Bug("no-sum-of-the-embedding", "dp2-tp2", no_sum("vocab_parallel_embedding", own_rows), FORWARD, "GPT2.embed.embedding.out", 0, (1, 3)),
    Bug("a-loss", "dp2-tp2", scaled(tensor, "vocab_parallel_cross_entropy", rank=1), FORWARD, "Model.loss.cross_entropy.out", 0, (1,), "all_reduce over tp", (0, 1, 2, 3)),
    Bug("no-sum-in-backward", "dp2-tp2", no_sum_in_backward, BACKWARD, "MLP.column_parallel.in", 1, (0, 1, 2, 3), "all_reduce over tp"),
    Bug("a-gradient-in-backward", "dp2-tp2", bent_backward(tensor, "row_parallel", at(0, 2), in_mlp), BACKWARD, "MLP.row_parallel.in", 0, (2,), "all_reduce over tp in column_parallel"),
    Bug("a-gradient-of-one-leaf", "dp2-tp2", one_leaf(base, "reduce_gradients", "blocks.ln_mlp.bias", half_on(2)), "gradient", "blocks.ln_mlp.bias[1]", 1, (2,), "all_reduce over dp"),
    Bug("no-sum-of-one-leaf", "dp2-tp2", one_leaf(base, "reduce_gradients", "blocks.mlp.w_up", unsummed), "gradient", "blocks.mlp.w_up[1]", 1, (0, 1, 2, 3)),
    Bug("targets-not-counted", "dp2-tp2", own_targets_alone, "targets", "tokens"),
    Bug("a-stale-weight", "dp2-tp2", stale_leaf("blocks.mlp.w_down"), "parameter", "blocks.mlp.w_down[1]", 1, (0, 1, 2, 3)),
    # ZeRO-3.
    Bug("a-gathered-weight", "zero3", scaled(tensor, "column_parallel", layer=1, rank=1), FORWARD, PRODUCTS, 1, (1,), GATHER, (4, 5, 6, 7)),
    Bug("shards-swapped", "zero3", shards_swapped, FORWARD, QKV, 0, (0, 1), GATHER),
    Bug("a-scattered-gradient", "zero3", scaled(zero, "reduce_scatter_groups", from_layers, rank=1), "gradient", "blocks.attention.b_out[1]", 1, (1,), "reduce_scatter over dp"),
    Bug("a-shard-not-updated", "zero3", stale_leaf("blocks.attention.w_out", 1), "parameter", "blocks.attention.w_out[1]", 1, (1,)),
    Bug("a-layer-overlapped", "zero3-overlap", scaled(tensor, "row_parallel", layer=1, rank=0), FORWARD, OUT, 1, (0,), GATHER, (0, 1, 2, 3)),
    # Pipelines.
    Bug("a-message", "pp2", message_scaled(0), FORWARD, "in", 1, (1,), "permute over pp"),
    Bug("a-message-of-a-gradient", "pp2", message_scaled(1), BACKWARD, "out", 0, (0,), "permute over pp"),
    Bug("a-layer-of-a-stage", "pp2-zb-h1", scaled(tensor, "row_parallel", layer=1, rank=1), FORWARD, OUT, 1, (1,), "permute over pp"),
    Bug("a-gradient-of-a-stage", "pp2-zb-h1", bent_backward(tensor, "row_parallel", at(0)), BACKWARD, "MLP.row_parallel.in", 0, (0,), "permute over pp"),
    Bug("other-tokens", "pp2", other_tokens, FORWARD, "GPT2.embed.embedding.out", 0, (0,), None, (2, 3)),
    Bug("a-tied-gradient", "pp2", one_leaf(base, "reduce_gradients", "tokens", half_on(0)), "gradient", "tokens", 0, (0,), "permute over pp"),
]  # fmt: skip
SAMPLE = {"a-sum", "no-sum", "no-sum-in-backward", "a-gradient-of-one-leaf", "a-stale-weight", "shards-swapped"} | {
    *("a-scattered-gradient", "a-message-of-a-gradient", "other-tokens", "targets-not-counted")
}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, id=b.name, marks=[pytest.mark.exhaustive] * (b.name not in SAMPLE)) for b in BUGS],
)
def test_a_planted_bug_is_found_where_it_is(monkeypatch, bug):
    mesh, parallel = LAYOUTS[bug.layout]
    config = config_of(mesh, **parallel)
    expected, theirs = reference(one_device(config))
    note_layers(monkeypatch)
    bug.plant(monkeypatch)
    run = Run(config, DEVICES)
    found = first_divergence(compare_steps(run, run.advance(random_batches(config, 1)[0]), expected, theirs))
    assert found is not None
    assert (found.key.direction, found.key.name) == (bug.direction, bug.tensor)
    assert bug.layer is None or found.key.layer == bug.layer
    assert bug.ranks is None or found.ranks == bug.ranks
    assert bug.before is None or bug.before in found.collective, found.collective
    assert bug.rows is None or found.rows == bug.rows


def test_twenty_bugs_are_planted():
    assert len(BUGS) >= 20 and SAMPLE <= {bug.name for bug in BUGS}
