"""A layer of each decoder, and GPT-2, on one device in float64 against the oracles: values and every gradient.

`jaxdist.models.layers`, `jaxdist.models.experts`, `jaxdist.models.fused` and `jaxdist.models.gpt2`; parameters are
random.
"""

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

from experiments.oracles import decoder, decoder_settings, plain
from jaxdist.config import RunConfig
from jaxdist.models.context import Context
from jaxdist.models.decoder import DecoderConfig, Layer
from jaxdist.models.gpt2 import GPT2, GPT2Config

PLAIN = DecoderConfig(2, 12, 4, num_kv_heads=2, head_dim=6, ffn_width=20, seq_len=8, vocab_size=50)
LAYERS = {
    "biases": replace(PLAIN, attention_bias=True, out_bias=True, mlp_bias=True, rope_scaling=("linear", 4.0)),
    "normed queries, a window": replace(PLAIN, num_kv_heads=1, qk_norm=True, window=3, kinds=("sliding",)),
    "experts": replace(PLAIN, num_experts=4, top_k=2, expert_width=10, shared_width=8, routed_scale=1.5),
    "experts by sigmoid": replace(
        PLAIN, num_experts=4, top_k=3, router_score="sigmoid", normalised=False, balance_rate=0.1, capacity=0.75
    ),
}


def parted(module: nnx.Module, rng: np.random.Generator) -> tuple[nnx.GraphDef, dict]:
    """(graph, random parameters in float64)."""
    graph, state = nnx.split(module)
    return graph, jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), nnx.to_pure_dict(state))


def assert_same(ours: Callable, theirs: Callable, values: dict, weight: np.ndarray) -> None:
    """Two functions of a tree of parameters have the same value, and the same gradients of its weighted sum."""

    def weighted(function):
        def total(values):
            found = function(values)
            return jnp.vdot(weight, found), found

        (_, found), grads = jax.jit(jax.value_and_grad(total, has_aux=True))(values)
        return found, flatten_dict(grads, sep=".")

    (found, grads), (wanted, wanted_grads) = weighted(ours), weighted(theirs)
    np.testing.assert_allclose(found, wanted, rtol=1e-10, atol=1e-10)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, wanted_grads[name], rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_is_the_oracle_s(name):
    config, rng = LAYERS[name], np.random.default_rng(0)
    settings = decoder_settings(RunConfig(config))
    with jax.enable_x64(True):
        graph, values = parted(Layer(config, config.kinds[0], nnx.Rngs(0)), rng)
        x, weight = rng.normal(size=(2, 2, 7, config.width))

        def theirs(values):
            p = flatten_dict(values, sep=".")
            normed = decoder.rms_norm(x, p["attention_norm.scale"], config.norm_eps)
            y = x + decoder.attention(settings, p, normed, {}, config.window)
            normed = decoder.rms_norm(y, p["mlp_norm.scale"], config.norm_eps)
            mixed = decoder.mixture(settings, p, normed)[0] if config.num_experts else decoder.gated(normed, p, "mlp.")
            return y + mixed

        assert_same(lambda values: nnx.merge(graph, values)(jnp.asarray(x), Context()), theirs, values, weight)


def test_gpt_2_is_the_oracle_s():
    """With dropout, and two documents in the second text."""
    config, rng = GPT2Config(1, 12, 2, ffn_width=20, seq_len=6, vocab_size=40, dropout=0.2), np.random.default_rng(0)
    with jax.enable_x64(True):
        graph, values = parted(GPT2(config, nnx.Rngs(0)), rng)
        starts = jnp.asarray([[0] * 6, [0, 0, 0, 3, 3, 3]])
        tokens, rows, key = jnp.asarray(rng.integers(0, 40, (2, 6))), jnp.asarray([4, 9]), jax.random.key(1)
        batch = {"inputs": tokens, "starts": np.asarray(starts)}

        def theirs(values):
            noise = plain.Dropout(0.2, rows)
            return plain.logits(flatten_dict(values, sep="."), batch, key, noise)[..., :40]

        ctx = Context(key=key, rows_B=rows, starts_BT=starts)
        assert_same(lambda values: nnx.merge(graph, values)(tokens, ctx), theirs, values, rng.normal(size=(2, 6, 40)))
