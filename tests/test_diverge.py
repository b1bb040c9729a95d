"""`experiments.where`: planted bugs are found where they are, and equal runs have none."""

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax import lax

from experiments import where
from experiments.cli import run_program
from jaxdist.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.digests import digested, read_record, record_text, require_same_training, shared_settings
from jaxdist.divergence import PHASES, Run, Step, compare_steps, first_divergence, split_dims
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, MeshShape, make_mesh, parse_mesh
from jaxdist.models.context import Context
from jaxdist.models.decoder import Decoder
from jaxdist.models.gpt2 import GPT2
from jaxdist.models.layers import Transformer
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import context_parallel, tensor, zero
from jaxdist.parallel.pipeline import executor
from jaxdist.parity import PROOF_EPS, PROOF_LR, one_device, random_batches
from jaxdist.probes import BACKWARD, FORWARD, Key, Probe, Recorder
from jaxdist.train import step as train_step
from jaxdist.train.program import build_program

SIZES = {"num_layers": 2, "width": 16, "num_heads": 4, "ffn_width": 32, "vocab_size": 50}
MODEL = GPT2(**SIZES, seq_len=8)
WINDOWS = Decoder(**SIZES, seq_len=16, num_kv_heads=2, head_dim=4, window=3, kinds=("sliding",))


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


def stale_leaf(leaf: str, rank: int | None = None) -> Callable:
    """A bug: the update leaves a leaf as it was."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        update = train_step.update

        def wrong(optimizer, layout, finite, grads, moments, owned, lr, num_tokens):
            updated, moments = update(optimizer, layout, finite, grads, moments, owned, lr, num_tokens)

            def each(path, after, before):
                path = jax.tree_util.keystr(path, simple=True, separator=".")
                stale = pretend(before - after, after) * pretend(is_there(None, rank, 0).astype(after.dtype), after)
                return after + stale if path == leaf else after

            return jax.tree.map_with_path(each, updated, owned), moments

        patch.setattr(train_step, "update", wrong)

    return plant


def halo_one_off(patch: pytest.MonkeyPatch) -> None:
    """In a window, keys that came from other ranks stand one position too late."""
    attend = context_parallel.blocked_attention

    def wrong(q, k, v, places, window):
        return attend(q, k, v, places._replace(key=places.key + 1), window)

    patch.setattr(context_parallel, "blocked_attention", wrong)


def message_scaled(sender: int) -> Callable:
    """A bug: what a stage sends to the other is changed on its way."""
    return scaled(executor.comm, "permute", lambda x, axis, shift, senders: senders == (sender,))


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
    "zero3": ("dp=2", {"zero": 3}),
    "pp2": ("pp=2", {}),
    "cp4-window": ("cp=4", {"model": WINDOWS}),
    "cp2-tp2-sp": ("cp=2,tp=2", {"sp": True}),
}


def in_mlp(y, *args) -> bool:
    """Whether a row-parallel product is the MLP's, on one of two tp ranks."""
    return y.shape[-1] == MODEL.ffn_width // 2


def from_layers(arrays, leaves, *args, **how) -> bool:
    return any("blocks" in leaf.name for leaf in leaves)


def at(layer: int | None = None, rank: int | None = None) -> Callable:
    """A change of a gradient there."""
    return lambda dx, here: scale(dx, layer, rank, here)


QKV, OUT, PRODUCTS = "Attention.column_parallel.in", "Attention.row_parallel.out", "Attention.column_parallel.out"
ATTENDED = "Attention.row_parallel.in"
MLP_OUT, TP_SUM, GATHER = "MLP.row_parallel.out", "all_reduce over tp", "all_gather over dp"
BUGS = [
    Bug("a-sum", "dp2-tp2", scaled(tensor, "row_parallel", layer=1, rank=3), FORWARD, OUT, 1, (3,), TP_SUM),
    Bug(
        "no-sum-in-backward",
        "dp2-tp2",
        no_sum_in_backward,
        BACKWARD,
        "MLP.column_parallel.in",
        1,
        (0, 1, 2, 3),
        "all_reduce over tp",
    ),
    Bug(
        "a-stale-weight",
        "dp2-tp2",
        stale_leaf("blocks.mlp.w_down"),
        "parameter",
        "blocks.mlp.w_down[1]",
        1,
        (0, 1, 2, 3),
    ),
    Bug(
        "a-scattered-gradient",
        "zero3",
        scaled(zero, "reduce_scatter_groups", from_layers, rank=1),
        "gradient",
        "blocks.attention.b_out[1]",
        1,
        (1,),
        "reduce_scatter over dp",
    ),
    Bug("a-message-of-a-gradient", "pp2", message_scaled(1), BACKWARD, "out", 0, (0,), "permute over pp"),
    Bug("the-halo", "cp4-window", halo_one_off, FORWARD, f"Grouped{ATTENDED}", 0, None, "permute over cp"),
    Bug("a-split-sum", "cp2-tp2-sp", scaled(tensor, "row_parallel", layer=1, rank=3), FORWARD, OUT, 1, (3,)),
]
IN_EVERY_RUN = {"no-sum-in-backward", "a-scattered-gradient"}


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, id=b.name, marks=[pytest.mark.exhaustive] * (b.name not in IN_EVERY_RUN)) for b in BUGS],
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


# ---------------------------------------------------------------------------------------------------------------------
# Equal runs, and runs that are not watched
# ---------------------------------------------------------------------------------------------------------------------

EQUAL = {
    "dp2-tp2-sp-accumulate-remat": ("dp=2,tp=2", {"sp": True, "accumulate": 2, "remat": "block"}),
    "zero3-overlap-bf16": ("dp=2", {"zero": 3, "overlap": True, "dtype": "bfloat16"}),
    "pp2-tp2-zb-h1": ("pp=2,tp=2", {"schedule": "zb-h1"}),
    "tp4-loss-chunks": ("tp=4", {"loss_chunks": 4}),
    "cp2-tp2-sp": ("cp=2,tp=2", {"sp": True}),
    "dp2-cp2-windows-zero3": ("dp=2,cp=2", {"model": WINDOWS, "zero": 3}),
}
QUICK = {"zero3-overlap-bf16"}


@pytest.mark.parametrize("name", in_sample(EQUAL, QUICK))
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


def run(capsys, *args: str) -> tuple[int, str, str]:
    """(exit code, stdout, stderr), words put on one line."""
    with pytest.raises(SystemExit) as stop:
        run_program(where.WhereFlags, where.main, "verify where", [*SMALL.split(), *map(str, args)])
    captured = capsys.readouterr()
    return stop.value.code or 0, captured.out, captured.err


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


def test_a_recorded_bug_is_found_in_another_layout(capsys, tmp_path, monkeypatch):
    path = tmp_path / "digests.json"
    with monkeypatch.context() as patch:
        note_layers(patch)
        scaled(tensor, "row_parallel", layer=1)(patch)
        run(capsys, "--mesh", "tp=2", "--record", path)
    code, out, _ = run(capsys, "mesh=dp=2", path)
    assert code == 1 and "rows 0-7, layer 1: Attention.row_parallel.out differs on every rank" in out


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> str:
    config = config_of("")
    return record_text(config, [digested(reference(config))])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda text: text[: len(text) // 2], "not JSON"),
        (
            lambda text: text.replace('"loss", "", 0, "loss", 0, {"-1": [', '"loss", "", 0, "loss", 0, {"-1": [1'),
            "hash",
        ),
        (lambda text: text.replace("jaxdist digests 1", "jaxdist digests 7"), "format"),
        (lambda text: '{"format": "jaxdist digests 1", "hash": "0"}', "hash"),
        (lambda text: text.replace('"batch_size": 8', '"batch_size": 9'), "hash"),
    ],
)
def test_a_file_that_is_damaged_or_of_another_version_is_refused(tmp_path, recorded, change, said):
    path = tmp_path / "digests.json"
    path.write_text(change(recorded))
    with pytest.raises(ConfigError, match=said):
        read_record(str(path), config_of(""))


def test_digests_of_another_training_are_refused(tmp_path, recorded):
    path = tmp_path / "digests.json"
    path.write_text(recorded)
    assert read_record(str(path), config_of("dp=2", zero=1))[0].is_digest
    with pytest.raises(ConfigError, match="seed is 0"):
        read_record(str(path), dataclasses.replace(config_of(""), seed=3))


def test_a_setting_that_one_of_two_trainings_does_not_say_is_refused():
    config = config_of("")
    theirs = shared_settings(config)
    del theirs["seed"]
    with pytest.raises(ConfigError, match="seed is None"):
        require_same_training("B", config, theirs)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["mesh=dp=2", "mesh=1", "mesh=tp=2"], "two are compared"),
        (["colour=red"], "'colour' is no setting"),
        (["mesh=dp=2 'zero"], "No closing quotation"),
        (["mesh=dp=2", "seed=3"], "seed is 3"),
        (["mesh=dp=2", "nowhere.json"], "cannot be read"),
        (["nowhere.toml"], "cannot be read"),
        (["--mesh", "dp=3"], "dp=3"),
        (["--steps", "0"], "steps"),
        (["--record", "no/such/folder/file.json"], "cannot be written"),
    ],
)
def test_bad_input_is_refused(capsys, args, said):
    code, out, err = run(capsys, *args)
    assert code == 2 and said in err and not out


SAMPLE = {"a-sum", "no-sum", "no-sum-in-backward", "a-gradient-of-one-leaf", "a-stale-weight", "shards-swapped"} | {
    *(
        "a-scattered-gradient",
        "a-message-of-a-gradient",
        "other-tokens",
        "targets-not-counted",
        "the-halo",
        "a-split-sum",
    )
}


def test_twenty_bugs_are_planted():
    assert len(BUGS) >= 20 and {bug.name for bug in BUGS} >= SAMPLE


def test_recorded_digests_are_compared(capsys, tmp_path):
    path = tmp_path / "digests.json"
    code, out, _ = run(capsys, "--mesh", "tp=2", "--record", path)
    assert code == 0 and "digests of 1 steps" in out
    code, out, _ = run(capsys, "mesh=dp=2 zero=3", path)
    assert code == 0 and "equal:" in out
