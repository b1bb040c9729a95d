"""The update: what optax makes of the same gradients, and nothing at all where a gradient is not finite."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.models.decoder import Decoder
from jaxdist.models.gpt2 import GPT2
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig
from jaxdist.train.optimizer import gradient_norms, make_optimizer, update

MODEL = GPT2(num_layers=2, width=32, num_heads=4, ffn_width=64, seq_len=16, vocab_size=100)
LAYOUT = make_layout(MODEL, ParallelConfig())


def a_few_updates(config: OptimizerConfig):
    """(parameters, moments, gradients) after two updates, with -0.0 among the moments but means of squares."""
    params = MODEL.initial_values(0)
    moments = make_optimizer(config, LAYOUT).init(params)
    step = jax.jit(lambda grads, moments, params: update(config, LAYOUT, jnp.bool(True), grads, moments, params, 1e-2))
    for seed in (1, 2):
        grads = MODEL.initial_values(seed)
        params, moments = step(grads, moments, params)

    def with_zeros(path, m):
        return m.at[..., :1].set(-0.0) if m.ndim and ".nu" not in jax.tree_util.keystr(path) else m

    return params, jax.tree_util.tree_map_with_path(with_zeros, moments), grads


@pytest.mark.parametrize(("name", "bad"), [("adamw", np.nan), ("lion", np.inf), ("sgd", np.nan), ("adafactor", np.nan)])
def test_a_gradient_that_is_not_finite_changes_no_bit(name, bad):
    config = OptimizerConfig(name)
    params, moments, grads = a_few_updates(config)
    grads["tokens"] = grads["tokens"].at[3, 4].set(bad)
    step = jax.jit(lambda finite, *state: update(config, LAYOUT, finite, *state, 1e-2))
    after = step(jnp.bool(False), grads, moments, params)  # an argument: XLA would fold a constant, and x + 0.0 to x
    for old, new in zip(jax.tree.leaves((params, moments)), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize("name", ["adamw", "lion", "sgd", "adafactor"])
def test_a_finite_gradient_is_used_as_optax_would(name):
    config = OptimizerConfig(name)
    params, moments, grads = a_few_updates(config)
    expected, expected_moments = jax.jit(make_optimizer(config, LAYOUT).update)(grads, moments, params)
    expected = optax.apply_updates(params, jax.tree.map(lambda u: -1e-2 * u, expected))
    found = jax.jit(lambda *state: update(config, LAYOUT, jnp.bool(True), *state, 1e-2))(grads, moments, params)
    for old, new in zip(jax.tree.leaves((expected, expected_moments)), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(old, new, rtol=2e-5, atol=1e-7)


def test_a_balancing_bias_moves_by_whole_tokens_above_the_mean_and_in_no_skipped_step():
    """Counts of 24 tokens: less rounding they are whole, and what is left of them at the mean is no sign."""
    model = Decoder(
        1, 8, 2, num_kv_heads=1, head_dim=4, ffn_width=8, seq_len=4, vocab_size=8, num_experts=4, balance_rate=0.25
    )
    layout = make_layout(model, ParallelConfig())
    params, config = model.initial_values(0), OptimizerConfig()
    grads = jax.tree.map(jnp.zeros_like, params)
    router = grads["blocks"]["mlp"]["router"]
    above = np.array([[3.0, -2.0, 1e-6, -1e-6]], np.float32)
    router |= {"bias": above / 24, "load": np.full((1, 4), 0.5, np.float32)}
    moments = make_optimizer(config, layout).init(params)
    step = jax.jit(lambda finite: update(config, layout, finite, grads, moments, params, 1e-2, 24)[0])
    for finite, moved in ((True, [[-0.25, 0.25, 0, 0]]), (False, [[0, 0, 0, 0]])):
        found = step(jnp.bool(finite))["blocks"]["mlp"]
        np.testing.assert_array_equal(found["router"]["bias"], moved)
        assert (found["router"]["load"] == 0.5).all()  # which names the expert that a step failed by
        assert np.array_equal(found["w_up"], params["blocks"]["mlp"]["w_up"]) != finite  # weight decay


def test_the_update_holds_no_second_copy_of_the_moments():
    """A choice between old and new moments would: this is why they are frozen by their decay."""
    config = OptimizerConfig("adamw")
    params, moments, grads = a_few_updates(config)

    def step(params, moments, grads):
        norm = jnp.maximum(optax.tree.norm(grads), 1)
        clipped = jax.tree.map(lambda g: g * (1 / norm), grads)
        return update(config, LAYOUT, jnp.isfinite(norm), clipped, moments, params, 1e-2)

    compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, moments, grads).compile()
    whole = sum(p.nbytes for p in jax.tree.leaves(params))
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


def test_the_global_norm_is_that_of_all_elements():
    grads = jax.tree.map(lambda x: jnp.full(x.shape, 1e-3), MODEL.initial_values(0))
    mesh = make_mesh(MeshShape(), jax.devices()[:1])
    norm, norms = jax.shard_map(partial(gradient_norms, layout=LAYOUT), mesh=mesh, in_specs=PartitionSpec(),
                         out_specs=PartitionSpec())(grads)  # fmt: skip
    assert norm == pytest.approx(1e-3 * math.sqrt(sum(x.size for x in jax.tree.leaves(grads))), rel=1e-5)
    assert LAYOUT.groups[0].startswith("blocks.") and len(norms) == len(LAYOUT.groups)
    assert norm == pytest.approx(float(jnp.sqrt(jnp.sum(jnp.square(norms)))), rel=1e-6)
    of_tokens = norms[LAYOUT.groups.index("tokens")]
    assert of_tokens == pytest.approx(1e-3 * math.sqrt(grads["tokens"].size), rel=1e-5)
