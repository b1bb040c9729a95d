"""Declarations and placement: what is sharded where, padding there and back, schedule and update rules."""

import dataclasses
import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from experiments.oracles import plain
from jaxdist.checkpoint.logical import from_logical, to_logical
from jaxdist.config import OptimizerConfig, RunConfig, from_dict, to_dict
from jaxdist.errors import ConfigError
from jaxdist.generation import Sampling
from jaxdist.layout import Leaf, group
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.relayout import from_compute, from_storage, gather_whole, to_compute, to_storage
from jaxdist.parallel.zero import all_gather_groups, reduce_scatter_groups
from jaxdist.params import Param
from jaxdist.placement import choose_zero_dim, make_layout, pipeline_rows
from jaxdist.specs import compute_spec, draw_spec, logical_spec, param_specs, storage_spec
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.loss_scale import initial_loss_scale
from jaxdist.train.optimizer import learning_rate
from jaxdist.train.program import build_program

MODEL = GPT2Config(num_layers=3, width=48, num_heads=6, ffn_width=96, seq_len=16, vocab_size=100)


def layout_of(zero=0, sp=False, config=MODEL, **axes):
    return make_layout(config, ParallelConfig(mesh=MeshShape(**axes), zero=zero, sp=sp))


def test_every_parameter_is_declared_once_with_its_gpt2_shape():
    leaves = {leaf.name: leaf for leaf in jax.tree.leaves(layout_of(tp=2).leaves)}
    shapes = {
        "tokens": ((384, 48), ("tp", None)),  # 100 rounded up to lcm(128, 6)
        "positions": ((16, 48), (None, None)),
        "blocks.attention.w_qkv": ((3, 48, 3, 6, 8), (None, None, None, "tp", None)),
        "blocks.attention.b_qkv": ((3, 3, 6, 8), (None, None, "tp", None)),
        "blocks.attention.w_out": ((3, 6, 8, 48), (None, "tp", None, None)),
        "blocks.attention.b_out": ((3, 48), (None, None)),
        "blocks.mlp.w_up": ((3, 48, 96), (None, None, "tp")),
        "blocks.mlp.b_up": ((3, 96), (None, "tp")),
        "blocks.mlp.w_down": ((3, 96, 48), (None, "tp", None)),
        "blocks.mlp.b_down": ((3, 48), (None, None)),
        "ln_final.scale": ((48,), (None,)),
        "ln_final.bias": ((48,), (None,)),
    } | {
        f"blocks.{norm}.{part}": ((3, 48), (None, None))
        for norm in ("ln_attention", "ln_mlp")
        for part in ("scale", "bias")
    }
    assert {name: (leaf.shape, leaf.spec) for name, leaf in leaves.items()} == shapes
    decayed = {name for name, leaf in leaves.items() if leaf.param.decay}
    assert decayed == {"tokens", "positions"} | {
        f"blocks.{w}" for w in ("attention.w_qkv", "attention.w_out", "mlp.w_up", "mlp.w_down")
    }


def test_initial_values_have_the_gpt2_statistics():
    wide = GPT2Config(num_layers=8, width=128, num_heads=4, ffn_width=512, seq_len=64, vocab_size=250)
    params = jax.jit(lambda: wide.initial_values(0))()
    blocks = params["blocks"]
    for w in (params["tokens"][:250], params["positions"], blocks["attention"]["w_qkv"], blocks["mlp"]["w_up"]):
        assert abs(float(w.std()) - 0.02) < 0.001 and abs(float(w.mean())) < 0.001
    for w in (blocks["attention"]["w_out"], blocks["mlp"]["w_down"]):
        assert abs(float(w.std()) - 0.02 / 4) < 0.0003  # sqrt(2 * 8 layers) = 4
    assert not params["tokens"][250:].any()
    assert (blocks["ln_mlp"]["scale"] == 1).all() and not blocks["mlp"]["b_up"].any()
    layers = np.asarray(blocks["mlp"]["w_up"])
    assert not np.array_equal(layers[0], layers[1])


@pytest.mark.parametrize("heads", [1, 4, 5, 6, 12, 20, 25])
def test_any_tp_that_divides_the_heads_divides_the_vocabulary(heads):
    config = GPT2Config(1, 8 * heads, heads, 8 * heads, 8, 50257)
    padded = config.padded_vocab_size
    assert padded >= 50257 and padded % 128 == 0
    assert all(padded % tp == 0 for tp in range(1, heads + 1) if heads % tp == 0)
    assert padded - 50257 < math.lcm(128, heads)


def test_what_each_leaf_owes():
    owed = {leaf.name: leaf.reduce_axes for leaf in jax.tree.leaves(layout_of(replica=2, dp=2, tp=2, sp=True).leaves)}
    assert owed["blocks.mlp.w_up"] == ("replica", "dp")
    assert owed["blocks.ln_mlp.scale"] == ("replica", "dp", "tp")
    assert owed["positions"] == ("replica", "dp", "tp")
    owed = {leaf.name: leaf.reduce_axes for leaf in jax.tree.leaves(layout_of(replica=2, dp=2, tp=2).leaves)}
    assert set(owed.values()) == {("replica", "dp")}


def leaf(shape, spec, tp, dp, zero_dim, cp=1):
    axes = tuple(axis for axis, size in (("dp", dp), ("cp", cp)) if size > 1)
    mesh = MeshShape(dp=dp, cp=cp, tp=tp)
    return Leaf("x", Param(shape), spec, mesh, zero_dim, axes)


def moved(placed, move, x, there, here):
    """`move` of one leaf on its own mesh."""
    mesh = make_mesh(placed.mesh, DEVICES)
    on_mesh = jax.shard_map(partial(move, placed), mesh=mesh, in_specs=there, out_specs=here, check_vma=True)
    return np.asarray(jax.jit(on_mesh)(jax.device_put(x, NamedSharding(mesh, there))))


def there_and_back(placed, x):
    """The stored array; checked to be undone exactly, with the whole compute layout in between."""
    stored = moved(placed, to_storage, x, draw_spec(placed), storage_spec(placed))
    assert stored.shape == placed.storage_shape
    back = moved(placed, from_storage, stored, storage_spec(placed), draw_spec(placed))
    np.testing.assert_array_equal(back, x)
    computed = moved(placed, to_compute, stored, storage_spec(placed), compute_spec(placed))
    assert computed.shape == placed.compute_shape
    np.testing.assert_array_equal(moved(placed, from_compute, computed, compute_spec(placed), logical_spec(placed)), x)
    assert np.count_nonzero(stored) == x.size  # padding is zeros, and nothing is lost
    return stored, computed


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_storage_is_undone_exactly_and_padding_is_small(data):
    tp = data.draw(st.sampled_from([1, 2, 3]))
    cp = data.draw(st.sampled_from([1, 2]))
    dp = data.draw(st.integers(1 if cp > 1 else 2, 8 // tp // cp))
    shape = tuple(data.draw(st.integers(1, 7)) * (tp if split else 1) for split in (False, True, False))
    spec = (None, "tp" if tp > 1 else None, None)
    zero_dim = choose_zero_dim(leaf(shape, spec, tp, dp, None, cp), first=data.draw(st.integers(0, 1)))
    placed = leaf(shape, spec, tp, dp, zero_dim, cp)
    x = np.arange(1, math.prod(shape) + 1, dtype=np.int32).reshape(shape)
    stored, _ = there_and_back(placed, x)
    assert math.prod(placed.storage_local) * tp * dp * cp == stored.size
    # Each tp rank's part begins where tp would cut the padded array.
    if tp > 1 and spec[zero_dim] == "tp":
        first = np.split(stored, tp, axis=zero_dim)[1]
        np.testing.assert_array_equal(
            np.take(first, 0, axis=zero_dim), np.take(x, shape[zero_dim] // tp, axis=zero_dim)
        )


def test_every_rank_holds_a_single_number():
    assert choose_zero_dim(leaf((), (), 1, 2, None), first=0) is None


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_layers_change_stages_and_come_back(data):
    """Any order of layers with any padding; where pp divides the layers they are split, where not whole."""
    pp, dp = data.draw(st.sampled_from([(2, 1), (2, 3), (4, 2)]))
    num_layers, depth = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 3))
    depth = max(depth, -(-num_layers // pp))
    rows = data.draw(st.permutations([*range(num_layers), *[-1] * (pp * depth - num_layers)]))
    mesh, zero_dim = MeshShape(pp=pp, dp=dp), 1 if dp > 1 else None
    placed = Leaf("x", Param((num_layers, 5)), ("pp", None), mesh, zero_dim, ("dp",), rows=tuple(rows))
    x = np.arange(1, num_layers * 5 + 1, dtype=np.int32).reshape(num_layers, 5)
    _, computed = there_and_back(placed, x)
    for row, number in zip(computed, rows, strict=True):
        np.testing.assert_array_equal(row, x[number] if number >= 0 else 0)


@pytest.mark.parametrize("size", [8, 7])
@pytest.mark.parametrize("zero_dim", [None, 0, 1])
def test_a_table_that_the_stages_share_is_undone_exactly(size, zero_dim):
    dp = 1 if zero_dim is None else 2
    mesh, spec = MeshShape(pp=2, dp=dp), ("pp", None)
    placed = Leaf("x", Param((size, 3)), spec, mesh, zero_dim, ("dp",), consumer_stages=(0, 1))
    x = np.arange(1, size * 3 + 1, dtype=np.int32).reshape(size, 3)
    _, computed = there_and_back(placed, x)
    np.testing.assert_array_equal(computed[:size], x)


@pytest.mark.parametrize("spec", [("dp", "tp"), (("dp", "tp"), None), (None, ("tp", "dp")), ("tp", None), (None, None)])
def test_every_part_is_gathered_in_its_place(spec):
    mesh, spec = make_mesh(MeshShape(dp=2, tp=3), DEVICES), PartitionSpec(*spec)
    x = np.arange(12 * 6, dtype=np.int32).reshape(12, 6)
    gather = jax.shard_map(partial(gather_whole, spec=spec), mesh=mesh, in_specs=spec, out_specs=PartitionSpec())
    np.testing.assert_array_equal(jax.jit(gather)(jax.device_put(x, NamedSharding(mesh, spec))), x)


def test_only_arrays_that_stand_where_they_are_wanted_are_donated():
    program = build_program(RunConfig(MODEL), make_mesh(MeshShape(), DEVICES))
    placed = to_logical(program, program.init(0))
    host = {name: np.array(x) for name, x in placed.items()}
    elsewhere = {name: jax.device_put(x, DEVICES[1]) for name, x in host.items()}
    for arrays in (elsewhere, host, placed):
        state = from_logical(program, arrays)
        np.testing.assert_array_equal(state.params["tokens"], host["params.tokens"])
    assert not any(x.is_deleted() for x in elsewhere.values())
    assert all(x.is_deleted() for x in placed.values())
    np.testing.assert_array_equal(host["params.tokens"], program.init(0).params["tokens"])


@pytest.mark.parametrize("bucket_bytes", [0, math.inf])
def test_shards_that_share_a_message_are_those_of_the_sum(bucket_bytes):
    """Leaves of which another dim is sharded each, one of them padded: alone, and all in one message."""
    shapes = {"a": (10, 3), "b": (3, 8), "c": (3, 5, 12)}
    leaves = [
        Leaf(n, Param(s), (None,) * len(s), MeshShape(dp=4), i, ("dp",), ("dp",))
        for i, (n, s) in enumerate(shapes.items())
    ]
    whole = {
        name: np.random.default_rng(0).normal(size=(4, *shape)).astype(np.float32) for name, shape in shapes.items()
    }

    def there_and_back(grads):
        shards = reduce_scatter_groups([g[0] for g in grads.values()], leaves, bucket_bytes)
        return all_gather_groups(shards, leaves, bucket_bytes, replicated=True)

    mesh = make_mesh(MeshShape(dp=4), DEVICES)
    found = jax.jit(jax.shard_map(there_and_back, mesh=mesh, in_specs=PartitionSpec("dp"), out_specs=PartitionSpec()))(
        whole
    )
    for x, expected in zip(found, whole.values(), strict=True):
        np.testing.assert_allclose(x, expected.sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("zero, dtype", [(1, "float32"), (3, "bfloat16")])
def test_what_is_saved_of_padded_shards_is_what_was_drawn(zero, dtype):
    """Norms of 10 over four ranks are padded; parameters of ZeRO-3 alone, or their masters, are held as shards."""
    model = GPT2Config(num_layers=1, width=10, num_heads=2, ffn_width=20, seq_len=8, vocab_size=50)
    config = RunConfig(model, ParallelConfig(MeshShape(dp=4), zero=zero), precision=PrecisionConfig(dtype))
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    leaves, specs = program.layout.leaves, param_specs(program.layout)
    assert specs == jax.tree.map(storage_spec if zero == 3 else compute_spec, leaves)
    assert any(leaf.storage_shape != leaf.shape for leaf in jax.tree.leaves(leaves))
    saved, drawn = to_logical(program, program.init(0)), jax.jit(model.initial_values)(0)
    for path, x in jax.tree.leaves_with_path(drawn):
        np.testing.assert_array_equal(saved[".".join(["params", *(entry.key for entry in path)])], x)


def test_a_state_that_was_never_scaled_begins_with_the_first_scale():
    half = RunConfig(MODEL, precision=PrecisionConfig("float16"))
    program = build_program(half, make_mesh(MeshShape(), DEVICES))
    arrays = {name: x for name, x in to_logical(program, program.init(0)).items() if not name.startswith("scale")}
    assert len(arrays) < len(to_logical(program, program.init(0)))
    assert from_logical(program, arrays).scale.scale == initial_loss_scale(half.precision).scale


def test_zero_never_splits_the_layer_dim_and_prefers_no_padding():
    for dp in (2, 3, 4, 5, 8):
        for placed in jax.tree.leaves(layout_of(zero=1, dp=dp, tp=2).leaves):
            assert not (placed.name.startswith("blocks.") and placed.zero_dim == 0)
            local = placed.compute_local[placed.zero_dim]
            divisible = [n % dp == 0 for n in placed.compute_local[int(placed.name.startswith("blocks.")) :]]
            assert local % dp == 0 or not any(divisible)


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-5, 1), st.sampled_from(["per-parameter", "flat", "bucketed"]))
def test_groups_hold_every_leaf_once_in_reverse_order(bucket_mb, grad_sync):
    leaves = jax.tree.leaves(layout_of(tp=2, dp=2).leaves)
    sizing = {"bucket_mb": bucket_mb} if grad_sync == "bucketed" else {}
    parallel = ParallelConfig(grad_sync=grad_sync, **sizing)
    sizes = [math.prod(leaf.compute_local) * 4 for leaf in leaves]
    groups = group(leaves, sizes, parallel.bucket_bytes, lambda leaf: leaf.spec_axes)
    assert sorted(i for members in groups for i in members) == list(range(len(leaves)))
    for members in groups:
        assert members == sorted(members, reverse=True)
        assert len({leaves[i].spec_axes for i in members}) == 1
        assert len(members) == 1 or grad_sync == "flat" or sum(sizes[i] for i in members) <= bucket_mb * 2**20
    if grad_sync == "per-parameter":
        assert all(len(members) == 1 for members in groups)
    if grad_sync == "flat":
        assert len(groups) == 2  # split over tp, and whole


def test_a_bucket_may_be_filled_exactly_and_not_passed():
    leaves = [leaf((8,), (None,), 1, 1, None)] * 5
    half = 2**19
    sizes = [half, half, half, half + 1, 2**21]  # taken from the last to the first
    parallel = ParallelConfig(grad_sync="bucketed", bucket_mb=1.0)
    assert group(leaves, sizes, parallel.bucket_bytes, lambda leaf: leaf.spec_axes) == [[4], [3], [2, 1], [0]]


def test_learning_rate_warms_up_and_decays():
    config = RunConfig(MODEL, optimizer=OptimizerConfig(lr=1.0, warmup_steps=10, min_lr_ratio=0.1), steps=110)
    rates = [float(learning_rate(config)(jnp.float32(step))) for step in range(111)]
    np.testing.assert_allclose(rates[:10], np.arange(1, 11) / 10, rtol=1e-6)
    np.testing.assert_allclose(rates[60], 0.55, rtol=1e-5)  # half way down
    np.testing.assert_allclose(rates[110], 0.1, rtol=1e-5)
    assert all(a >= b for a, b in itertools.pairwise(rates[10:]))
    for name in ("cosine", "linear", "constant", "wsd"):
        rule = OptimizerConfig(lr=0.5, warmup_steps=10, lr_schedule=name)
        rates = [float(learning_rate(RunConfig(MODEL, optimizer=rule, steps=110))(jnp.float32(n))) for n in range(110)]
        known = {field.name for field in dataclasses.fields(plain.Recipe)}
        values = {field: value for field, value in vars(rule).items() if field in known}
        recipe = plain.Recipe(**values, optimizer="adamw", vocab_size=1, dropout=0.0, seed=0, total_steps=110)
        np.testing.assert_allclose(rates, [plain.learning_rate(recipe, n) for n in range(110)], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose([rates[10], rates[90], rates[100]], [0.5, 0.5, 0.275], rtol=1e-6)  # wsd's last fifth
    for warmup, steps, first in ((10, 5, [0.2, 0.4, 0.6, 0.8, 1]), (2, 9, [0.5, 1, 1]), (1, 9, [1, 1]), (0, 9, [1])):
        short = RunConfig(MODEL, optimizer=OptimizerConfig(lr=1.0, warmup_steps=warmup), steps=steps)
        assert [float(learning_rate(short)(jnp.float32(n))) for n in range(len(first))] == pytest.approx(first)


@pytest.mark.parametrize(
    "name, parts", [("1f1b", (2, 3, 1)), ("interleaved", (2, 1, 2, 1, 1, 2)), ("zb-v", (1, 2) * 3)]
)
def test_every_layer_has_one_row_where_its_part_lies(name, parts):
    schedule = make_schedule(name, 3, 3)
    rows, depth = pipeline_rows(schedule, parts), max(parts)
    assert sorted(row for row in rows if row >= 0) == list(range(sum(parts)))
    for number, at in enumerate(range(0, len(rows), depth)):
        part = schedule.part(*divmod(number, schedule.num_chunks))
        layers = list(range(sum(parts[:part]), sum(parts[: part + 1])))
        assert list(rows[at : at + depth]) == layers + [-1] * (depth - len(layers))


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5])
def test_a_seed_is_a_whole_number_of_32_bits(seed):
    config = RunConfig(PRESETS["proof"])
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    for take in (program.init, lambda seed: dataclasses.replace(config, seed=seed), lambda seed: Sampling(seed=seed)):
        with pytest.raises(ConfigError, match=f"seed={seed}"):
            take(seed)


def test_another_seed_gives_other_initial_values():
    """Every leaf that is drawn; scales and biases are constants."""
    program = build_program(RunConfig(MODEL), make_mesh(MeshShape(), DEVICES))
    first, second = (jax.device_get(program.init(seed).params) for seed in (1, 2))
    again = jax.device_get(program.init(1).params)
    for leaf, one, two, three in zip(*map(jax.tree.leaves, (program.layout.leaves, first, second, again)), strict=True):
        assert (one != two).mean() > 0.2 if leaf.param.decay else np.array_equal(one, two), leaf.name
        np.testing.assert_array_equal(one, three)


@pytest.mark.parametrize(
    "recorded, mesh, read", [(True, "dp=2", "yes"), (False, "dp=2", "auto"), (False, "pp=2", "auto")]
)
def test_a_record_from_when_layers_were_written_out_or_not_is_read(recorded, mesh, read):
    config = RunConfig(PRESETS["tiny"], ParallelConfig(parse_mesh(mesh)), batch_size=8)
    found = to_dict(config)
    found["parallel"]["unroll_layers"] = recorded
    assert from_dict(found).parallel.unroll_layers == read
    assert from_dict(to_dict(config)) == config
