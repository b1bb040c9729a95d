"""`build_program(optimizer=...)`: any optax transformation on shards does what it does on one device, or is refused."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jaxdist.checkpoint.checkpoints import Checkpoints
from jaxdist.checkpoint.logical import fetch, from_logical, to_logical
from jaxdist.checkpoint.resume import Progress, restore, save
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.declared import decay_mask
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.leaf_needs import require_held
from jaxdist.train.program import build_program
from jaxdist.train.update import clip_by_global_norm
from jaxdist.train.whole_parameters import with_whole_parameters
from tests.support.small_models import MODELS

MODEL, STEPS, ROWS = MODELS["grouped"], 3, 8
ON_MESH = {
    "zero-1": ("dp=4", {"zero": 1}),
    "tp, zero-3": ("dp=2,tp=2", {"zero": 3}),
    "stages": ("pp=2,dp=2", {}),
    "uneven stages, zero-1": ("pp=3,dp=2", {"zero": 1, "microbatches": 4}),
}


def normed_rows() -> optax.GradientTransformation:
    """A rule that looks along a dim of each parameter."""

    def update(grads, state, params=None):
        return jax.tree.map(lambda g: -1e-2 * g / (1 + jnp.abs(g).max(-1, keepdims=True)), grads), state

    return optax.GradientTransformation(lambda _: optax.EmptyState(), update)


def by_the_norm() -> optax.GradientTransformationExtraArgs:
    """A rule that uses what the step passes: twice as far in the first two steps, by the norm of its momentum."""

    def update(grads, trace, params=None, *, step, global_norm, **_):
        trace = jax.tree.map(lambda m, g: 0.9 * m + g, trace, grads)
        rate = -jnp.where(step < 2, 2e-2, 1e-2) / global_norm(trace)
        return jax.tree.map(lambda m: rate * m, trace), trace

    return optax.GradientTransformationExtraArgs(lambda params: jax.tree.map(jnp.zeros_like, params), update)


def shampoo() -> optax.GradientTransformation:
    """Each layer's matrices between roots of their gradients' summed squares (arXiv 1802.09568); the rest by sign."""

    def sides(g):
        return {"left": g @ g.mT, "right": g.mT @ g} if g.ndim == 3 else None

    def root(x):  # by Newton's iteration
        y, z = x / jnp.trace(x, axis1=-2, axis2=-1)[..., None, None] + 1e-3 * (one := jnp.eye(x.shape[-1])), one
        for _ in range(12):
            y, z = y @ (w := (3 * one - z @ y) / 2), w @ z
        return z

    def init(params):
        return jax.tree.map(lambda p: sides(0 * p), params)

    def update(grads, kept, params=None):
        kept = jax.tree.map(lambda g, k: k and jax.tree.map(jnp.add, k, sides(g)), grads, kept)
        rule = lambda g, k: -1e-2 * (root(k["left"]) @ g @ root(k["right"]) if k else jnp.sign(g))  # noqa: E731
        return jax.tree.map(rule, grads, kept), kept

    return optax.GradientTransformation(init, update)


def labels(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: "tables" if path[0].key == "tokens" else "rest", params)


RATE = optax.join_schedules([optax.linear_schedule(0, 1e-2, 2), optax.cosine_decay_schedule(1e-2, 5)], [2])
ELEMENTWISE = {
    "adamw": lambda: optax.chain(clip_by_global_norm(0.5), optax.adamw(RATE, mask=decay_mask(MODEL))),
    "lion": lambda: optax.lion(1e-3),
    "nadam": lambda: optax.chain(optax.clip(1e-3), optax.nadam(1e-3)),
    "partition": lambda: optax.partition({"tables": optax.adam(1e-3), "rest": optax.sgd(1e-2, 0.9)}, labels),
    "accumulating": lambda: optax.MultiSteps(optax.adamw(1e-3), 2).gradient_transformation(),
    "masked": lambda: optax.chain(
        optax.masked(clip_by_global_norm(1e-3), lambda tree: jax.tree.map(lambda x: x.ndim > 2, tree)),
        optax.sgd(0.1, 0.9),
    ),
    "injected": lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=RATE),
    "schedule-free": lambda: optax.contrib.schedule_free_adamw(1e-2, warmup_steps=2),  # which has a NaN written in it
    "plateau": lambda: optax.chain(optax.sgd(1e-1), optax.contrib.reduce_on_plateau(patience=1)),  # reads the loss
    "own": by_the_norm,
}
WHOLE = {
    "norm of all": (lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3)), "clip_by_global_norm"),
    "flag of all": (lambda: optax.apply_if_finite(optax.adamw(1e-3), 2), "apply_if_finite"),
    "trust ratio": (lambda: optax.lamb(1e-3), "scale_by_trust_ratio"),
    "factored": (lambda: optax.adafactor(1e-3), "clip_by_block_rms"),
    "noise": (lambda: optax.chain(optax.add_noise(0.1, 0.5, key=0), optax.sgd(1e-2)), "add_noise"),
    "matrices": (lambda: optax.contrib.muon(1e-3), "scale_by_muon"),
    "own": (normed_rows, "normed_rows"),
    "roots": (shampoo, "shampoo"),
    "shape": (lambda: optax.stateless(lambda g, _: jax.tree.map(lambda x: -x / x.size, g)), "the optimizer"),
    "ones": (lambda: optax.stateless(lambda g, _: jax.tree.map(lambda x: -x / jnp.ones_like(x).sum(), g)), "stateless"),
}


def program_on(mesh: str, optimizer, **parallel):
    shape = parse_mesh(mesh)
    config = RunConfig(
        MODEL,
        ParallelConfig(shape, **parallel),
        precision=PrecisionConfig("float64", "float64"),
        batch_size=ROWS,
    )
    return build_program(config, make_mesh(shape, jax.devices()[: shape.num_devices]), optimizer=optimizer)


def batch(step: int) -> dict:
    tokens = np.random.default_rng(step).integers(0, MODEL.vocab_size, (ROWS, MODEL.seq_len + 1), dtype=np.int32)
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "rows": np.arange(ROWS, dtype=np.int32)}


def trained(program, state=None, first: int = 0):
    state = program.init(0) if state is None else state
    for step in range(first, STEPS):
        state, metrics = program.step(state, program.put(batch(step)))
    assert "lr" not in metrics  # the schedule is the optimizer's own
    return fetch(to_logical(program, state))


def optimizer_of(name: str) -> optax.GradientTransformation:
    return ELEMENTWISE[name]() if name in ELEMENTWISE else WHOLE[name.removeprefix("whole: ")][0]()


@cache
def on_one_device(name: str) -> dict:
    return trained(program_on("dp=1", optimizer_of(name)))


@pytest.mark.parametrize(
    ("name", "mesh"),
    [(name, "tp, zero-3") for name in ELEMENTWISE]
    + [(name, mesh) for name in ("adamw", "own") for mesh in ("zero-1", "stages")]
    + [(f"whole: {name}", "tp, zero-3") for name in ("factored", "flag of all", "noise", "roots", "shape")]
    + [("whole: roots", mesh) for mesh in ("zero-1", "stages", "uneven stages, zero-1")],
)
def test_shards_are_updated_as_one_device_is(name, mesh):
    with jax.enable_x64(True):
        one = on_one_device(name)
        optimizer = optimizer_of(name)
        given = with_whole_parameters(optimizer) if name.startswith("whole") else optimizer
        found = trained(program_on(ON_MESH[mesh][0], given, **ON_MESH[mesh][1]))
    kept = [key for key in one if key.startswith("moments.")]
    assert found.keys() == one.keys() and (kept or name == "whole: shape")
    for key, expected in one.items():
        np.testing.assert_allclose(found[key], expected, rtol=1e-6, atol=1e-9, err_msg=key)


def test_one_device_is_updated_as_optax_alone_would():
    """Beside a loop that knows nothing of layouts: gradients from the program, the rest plain optax."""
    optimizer = ELEMENTWISE["adamw"]()
    with jax.enable_x64(True):
        program = program_on("dp=1", optax.sgd(0.0))
        program = build_program(program.config, program.mesh, optimizer=optax.sgd(0.0), with_gradients=True)
        state = program.init(0)
        params, moments = state.params, optimizer.init(state.params)
        for step in range(STEPS):
            _, _, grads = program.step(state._replace(params=jax.tree.map(jnp.copy, params), step=jnp.int32(step)),
                                       program.put(batch(step)))  # fmt: skip
            updates, moments = optimizer.update(grads, moments, params)
            params = optax.apply_updates(params, updates)
        found = trained(program_on("dp=1", optimizer))
    for path, expected in jax.tree.leaves_with_path(params):
        name = "params." + jax.tree_util.keystr(path, simple=True, separator=".")
        np.testing.assert_allclose(found[name], expected, rtol=1e-9, atol=1e-12, err_msg=name)


def test_a_random_key_of_an_optimizer_is_saved():
    noisy = optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(3)), optax.sgd(1e-2))
    program = program_of_fp32("dp=2", noisy)
    state, _ = program.step(program.init(0), program.put(batch(0)))
    held = fetch(to_logical(program, state))
    again, _ = program.step(from_logical(program, held), program.put(batch(1)))
    state, _ = program.step(state, program.put(batch(1)))
    for x, y in zip(jax.tree.leaves(state.params), jax.tree.leaves(again.params), strict=True):
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.mark.parametrize("name", WHOLE)
def test_what_looks_at_whole_parameters_is_refused_where_they_are_split(name):
    make, culprit = WHOLE[name]
    whole = make_layout(MODEL, ParallelConfig(parse_mesh("dp=4"))).trained
    require_held(make(), whole, "float32")
    for mesh, more in ON_MESH.values():
        parallel = ParallelConfig(parse_mesh(mesh), **more)
        layout = make_layout(MODEL, parallel, {1: (), 2: (2, 2), 3: (2, 1, 1)}[parallel.mesh.pp]).trained
        with pytest.raises(ConfigError) as refused:
            require_held(make(), layout, "float32")
        assert refused.value.asked.startswith(culprit)


def test_a_run_with_its_own_optimizer_goes_on_bit_for_bit_on_another_mesh(tmp_path):
    """Members of a chain that keep nothing are not counted in the names of what the others keep."""
    optimizer = ELEMENTWISE["adamw"]()
    program = program_of_fp32("dp=2,tp=2", optimizer, zero=3)
    state, _ = program.step(program.init(0), program.put(batch(0)))
    before = fetch(to_logical(program, state))
    assert "moments.0.0.mu.tokens" in before
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, program, state, {}, Progress())
    checkpoints.wait()
    there = program_of_fp32("dp=4", optax.chain(optax.adamw(RATE, mask=decay_mask(MODEL))), zero=1)
    after = fetch(to_logical(there, restore(checkpoints, checkpoints.manifest(1), there, same_run=True).state))
    assert before.keys() == after.keys()
    for key, expected in before.items():
        assert np.asarray(expected).tobytes() == np.asarray(after[key]).tobytes(), key
    again = from_logical(program, before)
    assert trained(program, again, first=1).keys() == before.keys()


def program_of_fp32(mesh: str, optimizer, **parallel):
    shape = parse_mesh(mesh)
    config = RunConfig(MODEL, ParallelConfig(shape, **parallel), batch_size=ROWS)
    return build_program(config, make_mesh(shape, jax.devices()[: shape.num_devices]), optimizer=optimizer)


def test_an_optimizer_that_is_given_twice_is_refused():
    config = RunConfig(MODEL, optimizer=OptimizerConfig(clip_norm=0.5), batch_size=ROWS)
    with pytest.raises(ConfigError) as refused:
        build_program(config, make_mesh(config.parallel.mesh, jax.devices()[:1]), optimizer=optax.sgd(1e-2))
    assert "clip_norm=0.5" in refused.value.asked


@pytest.mark.parametrize("given", [lambda rule: rule, with_whole_parameters], ids=["as it is", "whole"])
def test_an_optimizer_that_asks_for_more_than_a_step_passes_is_refused(given):
    with pytest.raises(ConfigError) as refused:
        program_of_fp32("dp=1", given(optax.lbfgs(1e-2)))
    assert "'grad' and 'value_fn'" in refused.value.asked and "value (the batch's loss)" in refused.value.required


def test_a_mixture_counts_without_the_optimizer_seeing_its_counts():
    """Counts travel as gradients do; a norm over all leaves must not have them."""
    config = RunConfig(MODELS["experts"], ParallelConfig(parse_mesh("dp=2")), batch_size=ROWS)
    mesh = make_mesh(config.parallel.mesh, jax.devices()[:2])
    ours, theirs = (
        build_program(config, mesh, optimizer=optax.chain(clip(0.1), optax.sgd(1e-2)))
        for clip in (clip_by_global_norm, optax.clip_by_global_norm)
    )
    (a, _), (b, _) = (each.step(each.init(0), each.put(batch(0))) for each in (ours, theirs))
    for x, y in zip(jax.tree.leaves(a.params), jax.tree.leaves(b.params), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-7)


def test_what_would_be_taken_for_a_padded_shard_is_refused():
    layout = make_layout(MODEL, ParallelConfig(parse_mesh("dp=3"), zero=1)).trained
    leaves = jax.tree.leaves(layout.leaves)
    padded = next(leaf for leaf in leaves if leaf.storage_shape != leaf.shape)
    keeps = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda leaf: jnp.zeros(padded.storage_shape), layout.leaves),
        lambda updates, state, params=None: (updates, state),
    )
    with pytest.raises(ConfigError) as refused:
        with_whole_parameters(keeps)(layout).init(
            jax.tree.map(lambda leaf: jnp.zeros(leaf.storage_shape), layout.leaves)
        )
    assert str(padded.storage_shape) in refused.value.asked
