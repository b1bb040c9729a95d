"""The update: what optax makes of the same gradients, and nothing at all where a gradient is not finite."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig
from jaxdist.train.optimizer import make_optimizer
from jaxdist.train.update import gradient_norms, update

MODEL = GPT2Config(num_layers=2, width=32, num_heads=4, ffn_width=64, seq_len=16, vocab_size=100)
LAYOUT = make_layout(MODEL, ParallelConfig())


def run_of(name: str) -> RunConfig:
    return RunConfig(MODEL, optimizer=OptimizerConfig(name, lr=1e-2, warmup_steps=0, lr_schedule="constant"))


def apply(optimizer, finite, grads, moments, params, layout=LAYOUT, **more):
    norm = optax.tree.norm(grads)
    scalars = {"step": jnp.float32(0), "norm": norm, "loss": jnp.float32(0)}
    return update(optimizer, layout, finite, grads, moments, params, **scalars, **more)


def a_few_updates(optimizer):
    """(parameters, moments, gradients) after two updates, with -0.0 among the moments but means of squares."""
    params = MODEL.initial_values(0)
    moments = optimizer.init(params)
    step = jax.jit(partial(apply, optimizer, jnp.bool(True)))
    for seed in (1, 2):
        grads = MODEL.initial_values(seed)
        params, moments = step(grads, moments, params)

    def with_zeros(path, m):
        if "again" in jax.tree_util.keystr(path):
            return m + 1
        return m.at[..., :1].set(-0.0) if m.ndim and ".nu" not in jax.tree_util.keystr(path) else m

    return params, jax.tree_util.tree_map_with_path(with_zeros, moments), grads


def twice(decay: float) -> optax.GradientTransformation:
    """A rule of somebody's own, whose state holds one array twice and another unchanged, beside a gradient that is
    itself its state."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return {"m": zeros, "again": zeros, "fixed": zeros, "last": zeros, "steps": jnp.int32(0)}

    def rule(grads, state, params=None):
        m = jax.tree.map(lambda m, g: decay * m + g, state["m"], grads)
        new = {"m": m, "again": m, "fixed": state["fixed"], "last": grads, "steps": state["steps"] + 1}
        return jax.tree.map(lambda m: -1e-2 * m, m), new

    return optax.GradientTransformation(init, rule)


OPTIMIZERS = {
    **{name: partial(make_optimizer, run_of(name), LAYOUT) for name in ("adamw", "lion", "sgd", "adafactor", "muon")},
    "optax.adamw": lambda: optax.adamw(1e-2),
    "optax.MultiSteps": lambda: optax.MultiSteps(optax.sgd(1e-2, 0.9), 2).gradient_transformation(),
    "optax.adafactor": lambda: optax.adafactor(1e-2),
    "own": lambda: twice(0.9),
}


@pytest.mark.parametrize("bad", [np.nan, -np.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_gradient_that_is_not_finite_changes_no_bit(name, bad):
    optimizer = OPTIMIZERS[name]()
    params, moments, grads = a_few_updates(optimizer)
    grads["tokens"] = grads["tokens"].at[3, 4].set(bad)
    step = jax.jit(partial(apply, optimizer))
    after = step(jnp.bool(False), grads, moments, params)  # an argument: XLA would fold a constant, and x + 0.0 to x
    for old, new in zip(jax.tree.leaves((params, moments)), jax.tree.leaves(after), strict=True):
        assert np.asarray(old).tobytes() == np.asarray(new).tobytes()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_finite_gradient_is_used_as_optax_would(name):
    optimizer = OPTIMIZERS[name]()
    params, moments, grads = a_few_updates(optimizer)
    more = {} if name == "own" or "." in name else {"step": jnp.float32(0)}
    expected, expected_moments = jax.jit(optimizer.update)(grads, moments, params, **more)
    expected = optax.apply_updates(params, expected)
    found = jax.jit(partial(apply, optimizer, jnp.bool(True)))(grads, moments, params)
    for old, new in zip(jax.tree.leaves((expected, expected_moments)), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(old, new, rtol=2e-5, atol=1e-7)


def test_a_balancing_bias_moves_by_whole_tokens_above_the_mean_and_in_no_skipped_step():
    """Counts of 24 tokens: less rounding they are whole, and what is left of them at the mean is no sign."""
    model = DecoderConfig(
        1, 8, 2, num_kv_heads=1, head_dim=4, ffn_width=8, seq_len=4, vocab_size=8, num_experts=4, balance_rate=0.25
    )
    layout = make_layout(model, ParallelConfig())
    params, optimizer = model.initial_values(0), make_optimizer(RunConfig(model), layout)
    grads = jax.tree.map(jnp.zeros_like, params)
    router = grads["blocks"]["mlp"]["router"]
    above = np.array([[3.0, -2.0, 1e-6, -1e-6]], np.float32)
    router |= {"bias": above / 24, "load": np.full((1, 4), 0.5, np.float32)}
    moments = optimizer.init(params)
    step = jax.jit(lambda finite: apply(optimizer, finite, grads, moments, params, layout, num_tokens=24)[0])
    for finite, moved in ((True, [[-0.25, 0.25, 0, 0]]), (False, [[0, 0, 0, 0]])):
        found = step(jnp.bool(finite))["blocks"]["mlp"]
        np.testing.assert_array_equal(found["router"]["bias"], moved)
        assert (found["router"]["load"] == 0.5).all()  # which names the expert that a step failed by
        assert np.array_equal(found["w_up"], params["blocks"]["mlp"]["w_up"]) != finite  # weight decay


@pytest.mark.parametrize("name", ["adamw", "lion", "own"])
def test_the_update_holds_no_second_copy_of_the_moments(name):
    """A choice between old and new moments at the end would."""
    optimizer = OPTIMIZERS[name]()
    params, moments, grads = a_few_updates(optimizer)

    def step(params, moments, grads):
        finite = jnp.isfinite(optax.tree.norm(grads))
        return apply(optimizer, finite, grads, moments, params)

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
