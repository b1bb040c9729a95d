"""Every mesh equals one device (which equals the oracles: `test_oracle`). Each leaf by name."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, sampled

from experiments import plain
from experiments.bench.timing import full_batch
from experiments.strategies import BY_NAME, EXPERTS, PIPELINES, STRATEGIES, Strategy
from experiments.verify import Verifier
from jaxdist.checkpoint.logical import fetch, to_logical
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.context import Context
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.parallel.dropout import dropout
from jaxdist.parity import observe, one_device
from jaxdist.runtime.devices import Devices
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

VERIFIER = Verifier(Devices(DEVICES, True, "simulated"), steps=2)


def assert_equal(verdict):
    wrong = [d for d in verdict.differences if not d.ok]
    assert not wrong, "\n".join(
        f"{d.kind} {d.name}: error {d.error:.2e} > {d.tolerance:.0e}, norm {d.norm:.8g} against {d.reference_norm:.8g}"
        for d in wrong[:20]
    )


@pytest.mark.parametrize("strategy", sampled(STRATEGIES))
def test_every_strategy_equals_one_device(strategy):
    assert_equal(VERIFIER(strategy.name, strategy.run_config()))


@pytest.mark.parametrize("strategy", sampled(s for s in EXPERTS if s.dtype != "float32"))
def test_mixtures_in_16_bits_equal_one_device(strategy):
    """With experts that are drawn; by their scores they are chosen in 64 bits, in `test_experts`."""
    assert_equal(VERIFIER(strategy.name, strategy.run_config()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", [*STRATEGIES, *EXPERTS], ids=lambda s: s.name)
def test_every_strategy_equals_one_device_in_bfloat16(strategy):
    assert_equal(VERIFIER(strategy.name, strategy.run_config("bfloat16")))


@pytest.mark.parametrize("strategy", PIPELINES[6::50], ids=lambda s: s.name)
def test_a_sample_of_pipelines_equals_one_device(strategy):
    """The whole matrix: `python -m experiments.verify --pipelines`, or `pytest -m exhaustive`."""
    assert_equal(VERIFIER(strategy.name, strategy.run_config()))


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", PIPELINES, ids=lambda s: s.name)
def test_every_pipeline_equals_one_device(strategy):
    assert_equal(VERIFIER(strategy.name, strategy.run_config()))


@pytest.mark.parametrize("name", ["pp4-uneven", "pp2-dp2-tp2-sp-zero3"])
def test_a_pipeline_evaluates_what_one_device_evaluates(name):
    """The forward actions alone, with padding rows and with weights held as shards."""
    config = BY_NAME[name].run_config()
    batch = random_batches(config, 1)[0]
    found = []
    for run in (config, one_device(config)):
        program = build_program(run, make_mesh(run.parallel.mesh, DEVICES))
        total, count = program.evaluate(program.init(run.seed).params, program.put(batch))
        found.append((float(total), int(count)))
    np.testing.assert_allclose(*found, rtol=1e-6)


EXHAUSTIVE = [
    Strategy(f"{mesh}-zero{zero}-{sync}-acc{accumulate}-{remat}-seed{seed}", mesh, parallel, dropout=dropout)
    for mesh in ("dp=4", "replica=2,dp=2", "dp=2,tp=2", "dp=3,tp=2", "replica=2,dp=2,tp=2")
    for zero in (0, 1, 2, 3)
    for sync in ("per-parameter", "flat", "bucketed")
    for accumulate, remat, dropout, seed in ((1, "none", 0.0, 1), (4, "selective", 0.1, 2), (2, "every-2", 0.0, 3))
    for parallel in [
        {"zero": zero, "grad_sync": sync, "accumulate": accumulate, "remat": remat, "sp": "tp" in mesh and zero != 1}
    ]
]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", EXHAUSTIVE, ids=lambda s: s.name)
def test_matrix_equals_one_device(strategy):
    seed = int(strategy.name[-1])
    assert_equal(VERIFIER(strategy.name, strategy.run_config(seed=seed)))


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "seed"), [("dp2-tp2-zero1-sgd", 1), ("replica2-dp2-tp2-sp-zero2", 2), ("dp2-tp4", 3)])
def test_other_seeds(name, seed):
    assert_equal(VERIFIER(name, BY_NAME[name].run_config(seed=seed)))


ODD = GPT2Config(num_layers=3, width=36, num_heads=6, ffn_width=90, seq_len=18, vocab_size=131)


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("tp=6", {"sp": True}),
        ("tp=3,dp=2", {"zero": 2, "sp": True}),
    ],
)
def test_sizes_that_divide_badly(mesh, parallel):
    config = RunConfig(
        ODD,
        ParallelConfig(mesh=parse_mesh(mesh), **parallel),
        OptimizerConfig(lr=1e-4, warmup_steps=0),
        batch_size=8,
        steps=2,
    )
    assert_equal(VERIFIER(mesh, config))


@pytest.mark.parametrize(
    ("mesh", "parallel"),
    [
        ("dp=3,tp=2", {"zero": 1, "sp": True}),
        ("pp=2,dp=3", {"zero": 1, "microbatches": 2}),
        ("pp=2,tp=3", {"stages": "1,2"}),
    ],
)
def test_initial_values_are_bit_equal_on_every_mesh(mesh, parallel):
    def initial(mesh, **parallel):
        shape = parse_mesh(mesh)
        config = RunConfig(ODD, ParallelConfig(mesh=shape, **parallel), batch_size=24)
        program = build_program(config, make_mesh(shape, DEVICES))
        return fetch(to_logical(program, program.init(7)))

    expected = initial("")
    for name, x in initial(mesh, **parallel).items():
        np.testing.assert_array_equal(x, expected[name], err_msg=name)


def test_padded_vocabulary_never_counts():
    """Whatever stands in the padded rows, loss and gradients stay the same, and their own gradient is zero."""
    shape = parse_mesh("tp=2")
    config = RunConfig(ODD, ParallelConfig(mesh=shape), batch_size=4)
    program = build_program(config, make_mesh(shape, DEVICES), with_gradients=True)
    batch = random_batches(config, 1)[0]
    losses, gradients = [], []
    for filler in (0.0, 50.0):
        state = program.init(0)
        table = state.params["tokens"]
        padding = jnp.arange(table.shape[0])[:, None] >= ODD.vocab_size
        filled = jax.device_put(jnp.where(padding, filler, table), table.sharding)
        state = state._replace(params={**state.params, "tokens": filled})
        _, metrics, grads = program.step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
        gradients.append(np.asarray(grads["tokens"]))
    assert losses[0] == losses[1]
    np.testing.assert_array_equal(gradients[0], gradients[1])
    assert not gradients[0][ODD.vocab_size :].any()
    assert gradients[0][: ODD.vocab_size].any(1).all()


def test_dropout_is_the_same_function_of_the_token_on_every_mesh_and_differs_by_step():
    config = BY_NAME["dp2-tp2-dropout"].run_config()
    batches = [random_batches(config, 1)[0]] * 2
    run = observe(dataclasses.replace(config, optimizer=OptimizerConfig(lr=1e-12)), DEVICES, batches)
    plain = observe(one_device(dataclasses.replace(config, optimizer=OptimizerConfig(lr=1e-12))), DEVICES, batches)
    np.testing.assert_allclose(run.losses, plain.losses, rtol=1e-6)
    assert abs(run.losses[0] - run.losses[1]) > 1e-4  # same batch, same weights, another mask


def test_dropout_keeps_the_right_share_and_the_mean():
    x = np.asarray(dropout(jnp.full((64, 16, 32), 3.0), 0.25, jax.random.key(0), jnp.arange(64), jnp.arange(16)))
    assert set(np.unique(x)) == {0.0, 4.0}
    assert abs((x == 0).mean() - 0.25) < 0.01
    assert not np.array_equal(x[0], x[1])
    assert not np.array_equal(x[:, 0], x[:, 1])
    np.testing.assert_array_equal(
        x[5:7, 3:4], dropout(jnp.full((2, 1, 32), 3.0), 0.25, jax.random.key(0), jnp.arange(5, 7), jnp.arange(3, 4))
    )
    assert Context().dropout_heads(x, 0.25) is x  # an evaluation


def test_the_plain_step_of_the_benchmark_is_the_same_training():
    """What `bench overhead` is held against does the same work: losses of three steps agree."""
    config = RunConfig(ODD, optimizer=OptimizerConfig(lr=1e-3, warmup_steps=0, min_lr_ratio=1.0), batch_size=4, steps=3)
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    batch = full_batch(config)
    state, losses = program.init(0), []
    init, step, _ = plain.make_step(config, jax.tree.map(lambda leaf: leaf.param.decay, program.layout.leaves))
    plain_state, plain_losses = init(program.init(0).params), []
    for _ in range(3):
        state, metrics = program.step(state, program.put(batch))
        plain_state, loss = step(plain_state, batch)
        losses.append(float(metrics["loss"]))
        plain_losses.append(float(loss))
    np.testing.assert_allclose(losses, plain_losses, rtol=1e-5)
