"""bf16 and fp16: masters, loss scaling, and what is agreed on by every rank."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax.sharding import PartitionSpec

from experiments.strategies import BY_NAME, Strategy
from jaxdist.checkpoint.logical import logical_parameters
from jaxdist.data.batches import random_batches
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.parallel.chunked_loss import cross_entropy_in_chunks
from jaxdist.parity import compare, observe, one_device
from jaxdist.plan.proof.trace import equations
from jaxdist.strategy import PrecisionConfig
from jaxdist.train.loss_scale import initial_loss_scale, next_loss_scale
from jaxdist.train.program import build_program

HALF = Strategy("", "dp=2,tp=2", {"zero": 2}, dtype="float16", num_layers=1, batch_size=8)


def program_of(strategy: Strategy, **precision):
    config = strategy.run_config()
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, **precision))
    mesh = make_mesh(config.parallel.mesh, DEVICES)
    return config, build_program(config, mesh, with_gradients=True)


def test_fp16_gradients_are_unscaled():
    config = HALF.run_config()
    batches = random_batches(config, 1)
    half = observe(config, DEVICES, batches)
    full = observe(dataclasses.replace(config, precision=PrecisionConfig()), DEVICES, batches)
    for name, expected in full.gradients[0].items():
        error = np.linalg.norm(half.gradients[0][name] - expected) / np.linalg.norm(expected)
        assert error < 2e-2, f"{name}: {error:.1e}"


def test_overflow_skips_the_update_on_every_rank():
    """One rank's rows overflow (a scale far too large); nobody updates, and every rank agrees on the next scale."""
    config, program = program_of(HALF, loss_scale=2.0**40, loss_scale_hysteresis=1)
    batch = random_batches(config, 1)[0]
    state = program.init(0)
    before = jax.device_get((state.params, state.master, state.moments))
    state, metrics, _ = program.step(state, program.put(batch))
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.master, state.moments)))
    assert not np.isfinite(metrics["grad_norm"])
    assert float(metrics["loss_scale"]) == 2.0**40
    scales = {float(shard.data) for shard in state.scale.scale.addressable_shards}
    assert scales == {2.0**39}
    for _ in range(35):
        state, metrics, _ = program.step(state, program.put(batch))
    assert np.isfinite(metrics["grad_norm"])  # the scale came down until it fits
    assert not np.array_equal(before[1]["tokens"], np.asarray(state.master["tokens"]))


def test_loss_scale_rules():
    """Window, hysteresis, floor: FACTS section 1, precision."""
    config = PrecisionConfig(dtype="float16", loss_scale=4.0, loss_scale_window=3, loss_scale_hysteresis=2)
    state = initial_loss_scale(config)
    scales = []
    for finite in (True, True, True, False, False, True, True, True, False, False, False, False, False):
        state = next_loss_scale(state, jnp.bool_(finite), config)
        scales.append(float(state.scale))
    assert scales == [4, 4, 8, 8, 4, 4, 4, 8, 8, 4, 2, 1, 1]
    assert initial_loss_scale(PrecisionConfig(dtype="bfloat16")) is None
    # An overflow that hysteresis tolerates begins the window again.
    state, seen = initial_loss_scale(config), []
    for finite in (True, True, False, True, True, True):
        state = next_loss_scale(state, jnp.bool_(finite), config)
        seen.append((float(state.scale), int(state.good_steps), int(state.hysteresis)))
    assert seen == [(4, 1, 2), (4, 2, 2), (4, 0, 1), (4, 1, 1), (4, 2, 1), (8, 0, 2)]


def test_a_loss_scale_that_grows_changes_no_gradient_on_any_mesh():
    """With a window of one step: doubled after each, equal to one device's, and divided out again."""
    config = Strategy("", "dp=2", {"zero": 1}, dtype="float16", num_layers=1, batch_size=4).run_config(steps=3)
    grows = dataclasses.replace(config, precision=dataclasses.replace(config.precision, loss_scale_window=1))
    batches = random_batches(config, 3)
    run, steady = (observe(each, DEVICES, batches) for each in (grows, one_device(config)))
    start = grows.precision.loss_scale
    assert (run.counters["scale.scale"], steady.counters["scale.scale"]) == (8 * start, start)
    wrong = [d for d in compare(config, run, steady) if not d.ok]
    assert {d.name for d in wrong} == {"scale.scale", "scale.good_steps"}, wrong


def test_masters_keep_what_bf16_would_lose():
    """Updates far below a bf16 ulp of the weight add up in the fp32 master."""
    config = HALF.run_config("bfloat16")
    config = dataclasses.replace(
        config, optimizer=dataclasses.replace(config.optimizer, lr=1e-6, min_lr_ratio=1.0, weight_decay=0.0)
    )
    mesh = make_mesh(config.parallel.mesh, DEVICES)
    program = build_program(config, mesh)
    batch = program.put(random_batches(config, 1)[0])
    state = program.init(0)
    start = np.asarray(state.master["tokens"])
    for _ in range(3):
        state, _ = program.step(state, batch)
    moved = np.abs(np.asarray(state.master["tokens"]) - start)
    assert 1e-6 < np.median(moved[:250]) < 4e-6
    assert state.params["tokens"].dtype == jnp.bfloat16
    master = np.asarray(logical_parameters(program, state.master)["tokens"]).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(state.params["tokens"], np.float32), master.astype(np.float32))


def test_reduction_dtype_is_what_was_asked():
    """The gradients of bf16 parameters cross the wire in fp32, or in bf16 on request."""

    def dtypes(**precision):
        _, program = program_of(BY_NAME["dp2-tp2-zero1-bf16"], **precision)
        jaxpr = program.step.trace(program.abstract_state(), program.abstract_batch()).jaxpr
        return {eqn.invars[0].aval.dtype.name for eqn in _scatters(jaxpr)}

    assert dtypes() == {"float32"}
    assert dtypes(reduce_dtype="bfloat16") == {"bfloat16"}


def _scatters(jaxpr):
    return [eqn for eqn, _, _ in equations(jaxpr) if eqn.primitive.name == "reduce_scatter"]


SUMS = [("dp=4", {"zero": 2}), ("pp=2", {"schedule": "gpipe"})]


@pytest.mark.parametrize(("mesh", "parallel"), in_sample(SUMS, SUMS[:1]))
def test_gradients_keep_the_precision_of_the_reduction(mesh, parallel):
    """Summed in fp32, a gradient of bf16 parameters is not rounded back to bf16, whatever the strategy."""
    config, program = program_of(Strategy("", mesh, parallel, num_layers=2, batch_size=8), dtype="bfloat16")
    _, _, grads = program.step(program.init(0), program.put(random_batches(config, 1)[0]))
    g = np.asarray(grads["blocks"]["mlp"]["w_up"])
    assert g.dtype == np.float32
    assert (g != g.astype(jnp.bfloat16).astype(np.float32)).mean() > 0.5


def test_float64_needs_jax_to_be_told():
    with pytest.raises(ValueError, match="jax_enable_x64"):
        program_of(BY_NAME["dp2-tp2-fp64"])


def test_the_loss_in_chunks_keeps_what_float16_would_lose_of_its_gradient():
    """A row of probability 1e-8, whose share of a logit's gradient is below float16's smallest number."""
    table = jnp.zeros((8, 8), jnp.float16).at[0].set(-2.0)  # its logit is -16
    x, targets = jnp.ones((1, 64, 8), jnp.float16), jnp.ones((1, 64), jnp.int32)

    def loss(table):
        return cross_entropy_in_chunks(x, table, targets, 8, False, 4)

    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    gradient = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec())(table)
    np.testing.assert_allclose(np.asarray(gradient[0], np.float32), 64 * math.exp(-16) / 7, rtol=0.15)
