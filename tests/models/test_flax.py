"""A Flax user's model: no mesh and no context; values, logits and gradients are those of a run on any mesh."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES, in_sample
from flax import nnx
from flax.traverse_util import flatten_dict
from jax.sharding import PartitionSpec as P
from optax import softmax_cross_entropy_with_integer_labels as cross_entropy

from jaxdist import GPT2
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh
from jaxdist.models.context import Context
from jaxdist.models.decoder import Decoder
from jaxdist.models.flax import LanguageModel, ShardedParam
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import vocab_parallel_cross_entropy, vocab_parallel_embedding
from jaxdist.parity import GRADIENT_TOLERANCE, LOSS_TOLERANCE, by_layer, observe
from jaxdist.placement import make_layout
from jaxdist.specs import param_specs
from jaxdist.train.gradients.base import dropout_key
from jaxdist.verification import proof_config

GPT = dataclasses.replace(PRESETS["proof"], num_layers=2)
WINDOWS = dataclasses.replace(
    PRESETS["llama-proof"], num_layers=4, kinds=("sliding", "full"), window=5, tied=True, qk_norm=True
)
EXPERTS = dataclasses.replace(PRESETS["moe-proof"], num_layers=2, balance_loss=0.0, z_loss=0.0)
MODULES = {"gpt2": GPT2, "windows": Decoder, "experts": Decoder}
MODELS = {"gpt2": GPT, "windows": WINDOWS, "experts": EXPERTS}
ROWS = [(name, mesh) for name in MODELS for mesh in ("", "dp=2,tp=2")]


def values(module) -> dict:
    return nnx.to_pure_dict(nnx.state(module, nnx.Param))


def named(tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(x) for name, x in flatten_dict(tree, sep=".").items()}


def batch_of(config, rows=4) -> dict:
    [batch] = random_batches(proof_config(config, "", batch_size=rows), 1)
    return batch


def mean_loss(module, inputs, targets):
    """As a user writes it: of logits, over targets that count."""
    losses = cross_entropy(module(inputs), jnp.maximum(targets, 0))
    return jnp.where(targets >= 0, losses, 0).sum() / (targets >= 0).sum()


@pytest.mark.parametrize("name", MODELS)
def test_the_module_has_the_values_and_paths_of_a_run(name):
    config = MODELS[name]
    module = MODULES[name](config, rngs=nnx.Rngs(5))
    ours, theirs = named(values(module)), named(config.initial_values(5))
    assert ours.keys() == theirs.keys()
    for path, x in ours.items():
        np.testing.assert_array_equal(x, theirs[path], path)
    assert all(isinstance(each, ShardedParam) for _, each in nnx.to_flat_state(nnx.state(module)))


@pytest.mark.parametrize(("name", "mesh"), in_sample(ROWS, [*ROWS[:2], ("experts", "dp=2,tp=2")]))
def test_logits_equal_those_of_shards(name, mesh):
    config = MODELS[name]
    module, tokens = MODULES[name](config, rngs=nnx.Rngs(0)), batch_of(config)["inputs"]
    graph, _ = nnx.split(module)
    parallel = proof_config(config, mesh).parallel
    specs = param_specs(make_layout(config, parallel))
    rows, last = (P("dp"), P("dp", None, "tp")) if mesh else (P(), P())

    def local(params, tokens):
        logits = nnx.merge(graph, params)(tokens, Context())
        assert logits.shape[2] == config.vocab_size
        width = config.vocab_size // parallel.mesh.tp
        return jax.lax.dynamic_slice_in_dim(logits, jax.lax.axis_index("tp") * width, width, 2) if mesh else logits

    on_mesh = make_mesh(parallel.mesh, DEVICES[: parallel.mesh.num_devices])
    sharded = jax.jit(jax.shard_map(local, mesh=on_mesh, in_specs=(specs, rows), out_specs=last))
    whole = nnx.jit(lambda module, tokens: module(tokens))(module, tokens)
    assert whole.shape == (*tokens.shape, config.vocab_size)
    error = np.abs(sharded(values(module), tokens) - whole).max() / np.abs(whole).max()
    assert error < LOSS_TOLERANCE["float32"]


@pytest.mark.parametrize(("name", "mesh"), in_sample(ROWS, [*ROWS[:2], ("experts", "dp=2,tp=2")]))
def test_losses_and_gradients_equal_those_of_a_step(name, mesh):
    config = MODELS[name]
    run, batch = proof_config(config, mesh, batch_size=4, steps=1), batch_of(config)
    module = MODULES[name](config, rngs=nnx.Rngs(0))
    start = named(values(module))
    seen = observe(run, DEVICES[: run.parallel.mesh.num_devices], [batch], start)
    args = batch["inputs"], batch["targets"]
    for loss in (mean_loss, lambda module, *args: module.loss(*args)):
        found, grads = nnx.jit(nnx.value_and_grad(loss))(module, *args)
        assert float(found) == pytest.approx(seen.losses[0], rel=LOSS_TOLERANCE["float32"])
        ours, norm = by_layer(named(nnx.to_pure_dict(grads))), seen.norms[0]
        for path, theirs in seen.gradients[0].items():
            if not path.rpartition("[")[0].endswith((".load", ".faults")):
                bound = GRADIENT_TOLERANCE["float32"] * max(np.linalg.norm(theirs), 1e-3 * norm)
                assert np.linalg.norm(ours[path] - theirs) <= bound, path


def test_an_nnx_optimizer_trains_it_as_plain_jax_does():
    config = GPT
    tokens, transform = batch_of(config)["inputs"], optax.adamw(3e-3)

    def loss(module, tokens):
        return cross_entropy(module(tokens[:, :-1]), tokens[:, 1:]).mean()

    @nnx.jit
    def flax_step(module, optimizer, tokens):
        value, grads = nnx.value_and_grad(loss)(module, tokens)
        optimizer.update(module, grads)
        return value

    module = GPT2(config, rngs=nnx.Rngs(0))
    graph, params = nnx.split(module)
    optimizer = nnx.Optimizer(module, transform, wrt=nnx.Param)
    params = nnx.to_pure_dict(params)
    state = transform.init(params)

    @jax.jit
    def plain_step(params, state, tokens):
        value, grads = jax.value_and_grad(lambda params: loss(nnx.merge(graph, params), tokens))(params)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    ours, theirs = [], []
    for _ in range(8):
        ours.append(float(flax_step(module, optimizer, tokens)))
        params, state, value = plain_step(params, state, tokens)
        theirs.append(float(value))
    assert all(later < earlier for earlier, later in itertools.pairwise(ours))
    assert ours == pytest.approx(theirs, rel=LOSS_TOLERANCE["float32"])
    padding = module.tokens[...][config.vocab_size :]
    assert len(padding) and not padding.any()


def test_dropout_needs_a_key_and_is_that_of_a_run():
    config = dataclasses.replace(GPT, dropout=0.3)
    module, batch = GPT2(config, rngs=nnx.Rngs(0)), batch_of(config)
    inputs, targets, rows = batch["inputs"], batch["targets"], batch["rows"]
    same = GPT2(GPT, rngs=nnx.Rngs(0))
    np.testing.assert_array_equal(module(inputs), same(inputs))
    run = proof_config(config, "", batch_size=4, steps=1)
    seen = observe(run, DEVICES[:1], [batch], named(values(module)))
    ctx = Context(key=dropout_key(run, 0), rows_B=rows)
    dropped = float(module.loss(inputs, targets, ctx))
    assert dropped == pytest.approx(seen.losses[0], rel=LOSS_TOLERANCE["float32"])
    assert abs(dropped - float(module.loss(inputs, targets))) > 1e-3


@pytest.mark.parametrize(("dtype", "vocab_size"), [("uint8", 256), ("int8", 128), ("uint16", 2**16)])
def test_tokens_are_of_any_integers(dtype, vocab_size):
    """Also of those in which the number of rows of the table is 0."""
    config = dataclasses.replace(GPT, num_layers=1, vocab_size=vocab_size)
    module, tokens = GPT2(config, rngs=nnx.Rngs(0)), jnp.arange(32).reshape(2, 16)
    narrow = tokens.astype(dtype)
    np.testing.assert_array_equal(module(narrow), module(tokens))
    assert float(module.loss(narrow, narrow)) == float(module.loss(tokens, tokens))


def test_what_is_no_token_gives_nan_and_no_other_token_s_numbers():
    table, no_token = jnp.ones((8, 2)), jnp.array([[-1, 8]])  # a vocabulary of 7, padded
    assert jnp.isnan(vocab_parallel_embedding(no_token, table, False)).all()

    def loss(x, table):
        return vocab_parallel_cross_entropy(x, table, no_token + 8, 7, False, False).sum()

    found = jax.value_and_grad(loss, argnums=(0, 1))(jnp.ones((1, 2, 2)), table)
    assert all(jnp.isnan(each).all() for each in jax.tree.leaves(found))


def test_wrong_use_is_refused():
    module, batch = GPT2(dataclasses.replace(GPT, dropout=0.3), rngs=nnx.Rngs(0)), batch_of(GPT)
    with pytest.raises(ConfigError, match="number the rows"):
        module(batch["inputs"], Context(key=jax.random.key(0)))
    with pytest.raises(ConfigError, match=rf"{GPT.seq_len + 1} tokens.*at most {GPT.seq_len}"):
        module(jnp.zeros((1, GPT.seq_len + 1), jnp.int32))

    @dataclasses.dataclass(frozen=True)
    class Unstacked(type(GPT)):
        def module(self, rngs):
            module = super().module(rngs)
            module.blocks = nnx.Linear(4, 6, rngs=rngs)
            return module

    with pytest.raises(ConfigError, match=r"shape \(\d, 6\)|shape \(6,\)"):
        Unstacked(**dataclasses.asdict(GPT)).outer()


def test_a_parameter_without_a_declaration_is_replicated():
    @dataclasses.dataclass(frozen=True)
    class Scaled(type(GPT)):
        def module(self, rngs):
            module = super().module(rngs)
            module.gain = nnx.Param(jnp.ones(3))
            module.blocks.gain = nnx.Param(jnp.ones((self.num_layers, 5)))
            return module

    config = Scaled(**dataclasses.asdict(GPT))
    assert config.outer()["gain"].dims == (None,) and config.outer()["gain"].shape == (3,)
    assert config.block("layer")["gain"].dims == (None,) and config.block("layer")["gain"].shape == (5,)


def test_a_module_without_its_parts_says_which():
    with pytest.raises(ConfigError) as refused:
        LanguageModel().embed(None, Context())
    assert "LanguageModel" in refused.value.asked and "embed" in refused.value.required
