"""`experiments.where`: planted bugs are found where they are, and equal runs have none."""

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
from support import programs

from experiments import where
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.divergence import (
    GRADIENT,
    PARAMETER,
    PHASES,
    TARGETS,
    Run,
    Step,
    compare_steps,
    first_divergence,
    split_dims,
)
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, MeshShape, make_mesh, parse_mesh
from jaxdist.models import gpt2
from jaxdist.models.context import Context
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.layers import Transformer
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import context_parallel, tensor, vocabulary, zero
from jaxdist.parallel.pipeline import executor
from jaxdist.parity import PROOF_EPS, PROOF_LR, one_device
from jaxdist.probes import BACKWARD, FORWARD, Key, Probe, Recorder
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train import step as train_step
from jaxdist.train.gradients import base
from jaxdist.train.program import build_program

SIZES = {"num_layers": 2, "width": 16, "num_heads": 4, "ffn_width": 32, "vocab_size": 50}
MODEL = GPT2Config(**SIZES, seq_len=8)
WINDOWS = DecoderConfig(**SIZES, seq_len=16, num_kv_heads=2, head_dim=4, window=3, kinds=("sliding",))


def config_of(mesh: str, dtype: str = "float32", model: Transformer = MODEL, **parallel) -> RunConfig:
    return RunConfig(
        model,
        ParallelConfig(mesh=parse_mesh(mesh), **parallel),
        OptimizerConfig(lr=PROOF_LR, warmup_steps=0, eps=PROOF_EPS),
        PrecisionConfig(dtype),
        batch_size=8,
        steps=2,
    )


@cache
def reference(config: RunConfig) -> Step:
    """The first step of a run that takes no other."""
    return Run(config, DEVICES).advance(random_batches(config, 1)[0])


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


def no_sum(where, name: str, partial_sum: Callable, layer: int | None = None) -> Callable:
    """A bug: what a function sums over tp is this rank's partial sum."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        function = getattr(where, name)

        def wrong(*args):
            total = function(*args)
            gap = pretend(partial_sum(*args) - total, total)
            return total + jnp.where(is_there(layer, None, Here.layer), gap, 0)

        patch.setattr(where, name, wrong)

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

        def wrong(optimizer, layout, finite, grads, moments, owned, **more):
            updated, moments = update(optimizer, layout, finite, grads, moments, owned, **more)

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


def keys_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    """A ring takes the keys that it holds for those of the rank before."""
    owner = context_parallel._owner
    patch.setattr(context_parallel, "_owner", lambda split, step: (owner(split, step) - 1) % split.groups)


def halo_one_off(patch: pytest.MonkeyPatch) -> None:
    """In a window, keys that came from other ranks stand one position too late."""
    attend = context_parallel.blocked_attention

    def wrong(q, k, v, places, window):
        return attend(q, k, v, places._replace(key=places.key + 1), window)

    patch.setattr(context_parallel, "blocked_attention", wrong)


def positions_of_another_rank(patch: pytest.MonkeyPatch) -> None:
    """Rank 1 of cp rotates its queries and keys to positions one too far."""
    positions = Context.whole_positions

    def wrong(ctx, length):
        return positions(ctx, length) + jnp.where(comm.rank("cp") == 1, 1, 0)

    patch.setattr(Context, "whole_positions", wrong)


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
    """A planted bug, and where it must be found. layer, ranks, before, rows: None where they say nothing."""

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
    "cp4": ("cp=4", {}),
    "cp4-window": ("cp=4", {"model": WINDOWS}),
    "cp2-tp2-sp": ("cp=2,tp=2", {"sp": True}),
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


ALL = ROWS = (0, 1, 2, 3)
BIAS, W_UP, W_DOWN = "blocks.ln_mlp.bias", "blocks.mlp.w_up", "blocks.mlp.w_down"
B_OUT, W_OUT = "blocks.attention.b_out", "blocks.attention.w_out"
OUT, QKV, PRODUCTS = "Attention.row_parallel.out", "Attention.column_parallel.in", "Attention.column_parallel.out"
ATTENDED, GROUPED = "Attention.row_parallel.in", "GroupedAttention.row_parallel.in"
MLP_OUT, MLP_IN, HIDDEN = "MLP.row_parallel.out", "MLP.column_parallel.in", "MLP.row_parallel.in"
EMBEDDED, LOSSES = "GPT2.embed.embedding.out", "Model.loss.cross_entropy.out"
TP_SUM, TP_SCATTER, GATHER = "all_reduce over tp", "reduce_scatter over tp", "all_gather over dp"
SENT, RING = "permute over pp", "permute over cp"
row, column = partial(scaled, tensor, "row_parallel"), partial(scaled, tensor, "column_parallel")
embedded = partial(scaled, vocabulary, "vocab_parallel_embedding")
losses = partial(scaled, vocabulary, "vocab_parallel_cross_entropy")
bent = partial(bent_backward, tensor, "row_parallel")
reduced = partial(one_leaf, base, "reduce_gradients")
scattered = partial(scaled, zero, "reduce_scatter_groups", from_layers)
BUGS = [
    # dp=2, tp=2: one layer on one rank, then collectives that are missing or wrong.
    Bug("a-sum", "dp2-tp2", row(layer=1, rank=3), FORWARD, OUT, 1, (3,), TP_SUM),
    Bug("a-sum-of-the-mlp", "dp2-tp2", row(in_mlp, layer=0, rank=1), FORWARD, MLP_OUT, 0, (1,)),
    Bug("a-weight", "dp2-tp2", column(layer=1, rank=2), FORWARD, PRODUCTS, 1, (2,), TP_SUM),
    Bug("the-mask", "dp2-tp2", sees_the_future, FORWARD, ATTENDED, 1, (0,), TP_SUM),
    Bug("a-scatter", "dp2-tp2-sp", row(layer=0, rank=2), FORWARD, OUT, 0, (2,), TP_SCATTER),
    Bug("an-embedding", "dp2-tp2", embedded(rank=2), FORWARD, EMBEDDED, 0, (2,), TP_SUM, (4, 5, 6, 7)),
    Bug("no-sum", "dp2-tp2", no_sum(tensor, "row_parallel", partial_product, 1), FORWARD, OUT, 1, ALL),
    Bug(
        "no-table-sum",
        "dp2-tp2",
        no_sum(vocabulary, "vocab_parallel_embedding", own_rows),
        FORWARD,
        EMBEDDED,
        0,
        (1, 3),
    ),
    Bug("a-loss", "dp2-tp2", losses(rank=1), FORWARD, LOSSES, 0, (1,), TP_SUM, ROWS),
    Bug("no-sum-in-backward", "dp2-tp2", no_sum_in_backward, BACKWARD, MLP_IN, 1, ALL, TP_SUM),
    Bug("a-gradient", "dp2-tp2", bent(at(0, 2), in_mlp), BACKWARD, HIDDEN, 0, (2,), f"{TP_SUM} in column_parallel"),
    Bug("half-a-leaf", "dp2-tp2", reduced(BIAS, half_on(2)), GRADIENT, f"{BIAS}[1]", 1, (2,), "all_reduce over dp"),
    Bug("no-sum-of-one-leaf", "dp2-tp2", reduced(W_UP, unsummed), GRADIENT, f"{W_UP}[1]", 1, ALL),
    Bug("targets-not-counted", "dp2-tp2", own_targets_alone, TARGETS, "tokens"),
    Bug("a-stale-weight", "dp2-tp2", stale_leaf(W_DOWN), PARAMETER, f"{W_DOWN}[1]", 1, ALL),
    # ZeRO-3.
    Bug("a-gathered-weight", "zero3", column(layer=1, rank=1), FORWARD, PRODUCTS, 1, (1,), GATHER, (4, 5, 6, 7)),
    Bug("shards-swapped", "zero3", shards_swapped, FORWARD, QKV, 0, (0, 1), GATHER),
    Bug("a-scattered-gradient", "zero3", scattered(rank=1), GRADIENT, f"{B_OUT}[1]", 1, (1,), "reduce_scatter over dp"),
    Bug("a-shard-not-updated", "zero3", stale_leaf(W_OUT, 1), PARAMETER, f"{W_OUT}[1]", 1, (1,)),
    Bug("a-layer-overlapped", "zero3-overlap", row(layer=1, rank=0), FORWARD, OUT, 1, (0,), GATHER, ROWS),
    # Pipelines.
    Bug("a-message", "pp2", message_scaled(0), FORWARD, "in", 1, (1,), SENT),
    Bug("a-message-of-a-gradient", "pp2", message_scaled(1), BACKWARD, "out", 0, (0,), SENT),
    Bug("a-layer-of-a-stage", "pp2-zb-h1", row(layer=1, rank=1), FORWARD, OUT, 1, (1,), SENT),
    Bug("a-gradient-of-a-stage", "pp2-zb-h1", bent(at(0)), BACKWARD, HIDDEN, 0, (0,), SENT),
    Bug("other-tokens", "pp2", other_tokens, FORWARD, EMBEDDED, 0, (0,), None, (2, 3)),
    Bug("a-tied-gradient", "pp2", reduced("tokens", half_on(0)), GRADIENT, "tokens", 0, (0,), SENT),
    # Split sequences.
    Bug("keys", "cp4", keys_of_another_rank, FORWARD, ATTENDED, 0, None, RING),
    Bug("the-halo", "cp4-window", halo_one_off, FORWARD, GROUPED, 0, None, RING),
    Bug("positions", "cp4-window", positions_of_another_rank, FORWARD, GROUPED, 0, (0, 1, 2)),
    Bug("a-split-sum", "cp2-tp2-sp", row(layer=1, rank=3), FORWARD, OUT, 1, (3,)),
]
SAMPLE = {"a-sum", "no-sum", "no-sum-in-backward", "half-a-leaf", "a-stale-weight", "shards-swapped", "a-split-sum"}
SAMPLE |= {"a-scattered-gradient", "a-message-of-a-gradient", "other-tokens", "targets-not-counted", "the-halo"}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, id=b.name, marks=[pytest.mark.exhaustive] * (b.name not in SAMPLE)) for b in BUGS],
)
def test_a_planted_bug_is_found_where_it_is(monkeypatch, bug):
    mesh, parallel = LAYOUTS[bug.layout]
    config = config_of(mesh, **parallel)
    theirs = reference(one_device(config))
    note_layers(monkeypatch)
    bug.plant(monkeypatch)
    found = first_divergence(compare_steps(Run(config, DEVICES).advance(random_batches(config, 1)[0]), theirs))
    assert found is not None
    assert (found.key.direction, found.key.name) == (bug.direction, bug.tensor)
    assert bug.layer is None or found.key.layer == bug.layer
    assert bug.ranks is None or found.ranks == bug.ranks
    assert bug.before is None or bug.before in found.collective, found.collective
    assert bug.rows is None or found.rows == bug.rows


def test_twenty_bugs_are_planted():
    assert len(BUGS) >= 20 and {bug.name for bug in BUGS} >= SAMPLE


# ---------------------------------------------------------------------------------------------------------------------
# Equal runs, and runs that are not watched
# ---------------------------------------------------------------------------------------------------------------------

EQUAL = {
    "dp2-tp2-sp-accumulate-remat": ("dp=2,tp=2", {"sp": True, "accumulate": 2, "remat": "block"}),
    "zero3-overlap-bf16": ("dp=2", {"zero": 3, "overlap": True, "dtype": "bfloat16"}),
    "pp2-tp2-zb-h1": ("pp=2,tp=2", {"schedule": "zb-h1"}),
    "dp2-tp2-ring-zero1": ("dp=2,tp=2", {"sp": True, "tp_ring": "two-way", "zero": 1}),
    "dp4-zero2": ("dp=4", {"zero": 2}),
    "replica2-dp2-zero3": ("replica=2,dp=2", {"zero": 3}),
    "tp4-loss-chunks": ("tp=4", {"loss_chunks": 4}),
    "pp2-dp2-overlap": ("pp=2,dp=2", {"schedule": "1f1b", "overlap": True, "zero": 1}),
    "cp2-tp2-sp": ("cp=2,tp=2", {"sp": True}),
    "dp2-cp2-windows-zero3": ("dp=2,cp=2", {"model": WINDOWS, "zero": 3}),
    "pp2-cp2-all-gather": ("pp=2,cp=2", {"cp_kind": "all-gather"}),
    "cp4-usp-2-bf16": ("cp=4", {"cp_kind": "usp-2", "dtype": "bfloat16"}),
    "pp2-remat-bf16": ("pp=2", {"remat": "every-1", "dtype": "bfloat16"}),
}
QUICK = {"cp2-tp2-sp", "dp2-tp2-sp-accumulate-remat", "zero3-overlap-bf16", "pp2-tp2-zb-h1", "tp4-loss-chunks"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.exhaustive] * (n not in QUICK)) for n in EQUAL])
def test_equal_runs_do_not_part(name):
    """Two steps, so that the second one's tensors come from updated parameters."""
    mesh, settings = EQUAL[name]
    config = config_of(mesh, **settings)
    ours, theirs = Run(config, DEVICES), Run(one_device(config), DEVICES)
    for batch in random_batches(config, 2):
        checked = compare_steps(ours.advance(batch), theirs.advance(batch))
        assert first_divergence(checked) is None
        assert {c.key.direction for c in checked} == set(PHASES)
        layers = {(c.key.direction, c.key.layer) for c in checked if c.key.part == "layer"}
        assert {("forward", 0), ("forward", 1), ("backward", 0), ("gradient", 1), ("parameter", 1)} <= layers
        assert not ours.skipped


def test_runs_of_32_and_64_bits_are_compared():
    """Each with its own switch, which callbacks obey in threads of their own."""
    config = config_of("tp=2", dtype="float64")
    ours = Run(config, DEVICES).advance(random_batches(config, 1)[0])
    assert first_divergence(compare_steps(ours, reference(config_of("")))) is None
    assert first_divergence(compare_steps(ours, reference(one_device(config)))) is None
    assert not jax.config.jax_enable_x64


def test_probes_that_nobody_watches_leave_the_program_as_it_is(monkeypatch):
    config = config_of("dp=2,tp=2", sp=True)

    def text() -> str:
        program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
        return program.step.lower(program.abstract_state(), program.abstract_batch()).as_text()

    with_probes = text()
    for name in ("observe", "_observe"):
        monkeypatch.setattr(Context, name, lambda ctx, name, x: x)
    monkeypatch.setattr(Context, "watching", lambda ctx, part, layer=0: ctx)
    assert text() == with_probes and "callback" not in with_probes


def test_an_observed_array_has_the_rows_of_the_micro_batch():
    ctx = Context(rows_B=jnp.arange(4), probe=Probe(Recorder())).watching("layer")
    with pytest.raises(ConfigError, match=r"observe\('scores'\) of an array of shape \(3, 4\)"):
        ctx.observe("scores", jnp.zeros((3, 4)))


@pytest.mark.parametrize(
    ("local", "whole", "mesh", "found"),
    [
        ((8, 16), (8, 16), {"tp": 2}, {}),
        ((4, 16), (8, 16), {"tp": 2}, {"tp": 0}),
        ((8, 3, 2, 4), (8, 3, 4, 4), {"tp": 2}, {"tp": 2}),
        ((8, 1), (8, 2), {"tp": 4}, None),  # a key head that is whole on every rank
        ((4, 8), (8, 16), {"tp": 2}, None),
        ((8,), None, {"tp": 2}, None),
        ((4, 16), (8, 16), {"cp": 2}, {"cp": 0}),
        ((4, 8), (8, 16), {"cp": 2, "tp": 2}, {"cp": 0, "tp": 1}),
        ((2, 16), (8, 16), {"cp": 2, "tp": 2}, {"cp": 0, "tp": 0}),
        ((2, 16), (4, 16), {"cp": 2}, None),  # no positions
    ],
)
def test_the_dims_that_ranks_share_are_found_by_their_sizes(local, whole, mesh, found):
    assert split_dims(local, whole, MeshShape(**mesh), seq_len=8) == found


def test_a_callback_s_operands_may_be_larger_than_what_is_copied_at_once():
    """A larger operand in one piece hangs XLA:CPU, whose threads all wait for the callback's."""
    model = dataclasses.replace(MODEL, num_layers=1, width=256, ffn_width=512, seq_len=64)
    config = config_of("dp=2,tp=2", model=model)
    step = Run(config, DEVICES).advance(random_batches(config, 1)[0])
    key = Key("forward", "layer", 0, "MLP.column_parallel.out")
    assert step.tensors[key].rows[7].shape == (64, 512)


# ---------------------------------------------------------------------------------------------------------------------
# The program
# ---------------------------------------------------------------------------------------------------------------------

SMALL = "--num-layers 2 --width 16 --num-heads 4 --ffn-width 32 --seq-len 8 --vocab-size 50 --batch-size 8 --steps 1"


def run(capsys, *args) -> tuple[int, str, str]:
    return programs.run(capsys, "verify where", *SMALL.split(), *args)


def test_the_program_names_what_differs(capsys, monkeypatch):
    """In one sentence: where, what, on which rank, by how much, and the collective before it."""
    note_layers(monkeypatch)
    bent_backward(tensor, "row_parallel", at(1, 3), in_mlp)(monkeypatch)
    code, out, _ = run(capsys, "mesh=dp=2,tp=2")
    assert code == 1 and "MLP.row_parallel.in" in out and "DIFFERS" in out
    assert (
        "step 1, rows 4-7, layer 1: the gradient of MLP.row_parallel.in differs on rank 3 (dp=1,tp=1) by 4.8e-01 "
        "(allowed 1e-05); before it: all_reduce over tp in column_parallel (context.py:"
    ) in out


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mesh=dp=2", "mesh=1", "mesh=tp=2"], "3 sides"),
        (["colour=red"], "'colour'"),
        (["mesh=dp=2 'zero"], "No closing quotation"),
        (["mesh=dp=2", "seed=3"], "seed is 3"),
        (["mesh=dp=2", "nowhere.json"], "cannot be read"),
        (["nowhere.toml"], "cannot be read"),
        (["--mesh", "dp=3"], "dp=3"),
        (["--steps", "0"], "steps"),
    ],
)
def test_bad_input_is_refused(capsys, args, said):
    code, out, err = run(capsys, *args)
    assert code == 2 and said in err and not out


def test_rows_and_ranks_are_said_in_few_words():
    assert where.ranges((0, 1, 2, 3, 6)) == "0-3, 6"
    assert where.plural("rank", ["0", "1", "2"]) == "ranks 0, 1 and 2"
