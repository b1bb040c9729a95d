"""Text out of a model: the same logits as in training at every position, the same tokens on every mesh."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from alternating import Alternating
from conftest import DEVICES

from jaxdist.data.text_stream import TextStream
from jaxdist.data.tokenizer import ByteTokenizer
from jaxdist.errors import ConfigError
from jaxdist.generation import Sampling, build_generator, bytes_per_token
from jaxdist.mesh import make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.base import declare, is_param
from jaxdist.models.decoder import Decoder
from jaxdist.models.gpt2 import GPT2
from jaxdist.parity import forward_logits
from jaxdist.plan.proof.trace import collectives_of, total_sent

SIZES = {"num_layers": 4, "width": 32, "num_heads": 8, "num_kv_heads": 2, "head_dim": 8, "ffn_width": 48}
TEXT = {"seq_len": 40, "vocab_size": 250}
MODELS = {
    "gpt2": GPT2(num_layers=4, width=32, num_heads=8, ffn_width=64, **TEXT),
    "grouped": Decoder(**SIZES, **TEXT),
    "windows": Decoder(**SIZES, **TEXT, qk_norm=True, tied=True, window=6, kinds=("sliding", "full")),
}
MESHES = ["1", "tp=2", "tp=4", "pp=2", "dp=2,tp=2"]
GREEDY = Sampling()
DRAWN = Sampling(temperature=1.5, top_k=40, top_p=0.9, seed=3)
NUM_NEW = 16


def random_values(model) -> dict:
    rng = np.random.default_rng(0)

    def draw(param):
        values = param.mean + 0.3 * rng.normal(size=param.shape)
        if param.real is not None:
            values[param.real :] = 0
        return values

    return jax.tree.map(draw, declare(model), is_leaf=is_param)


def prompts_of(lengths=(5, 12, 9, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, TEXT["vocab_size"], length) for length in lengths]


def generate(model, mesh: str, sampling=GREEDY, prompts=None, num_new=NUM_NEW):
    """(tokens [B, new], logits [B, new, V]) in float64, and the generator with its last arguments."""
    shape, prompts = parse_mesh(mesh), prompts or prompts_of()
    lengths = np.array([len(prompt) for prompt in prompts])
    tokens = np.zeros((len(prompts), lengths.max()), int)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    made = build_generator(
        model,
        make_mesh(shape, DEVICES),
        shape,
        dtype="float64",
        num_texts=len(prompts),
        capacity=lengths.max() + num_new,
        sampling=sampling,
    )
    like = made.abstract_params()
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), random_values(model), like)
    found = made.prefill(params, made.put(tokens), made.put(lengths))
    all_tokens, logits = [np.asarray(found.tokens)], [np.asarray(found.logits)]
    for step in range(num_new - 1):
        found = made.decode(params, found.caches, found.tokens, made.put(lengths + step))
        all_tokens.append(np.asarray(found.tokens))
        logits.append(np.asarray(found.logits))
    return SimpleNamespace(tokens=np.stack(all_tokens, 1), logits=np.stack(logits, 1), made=made)


@pytest.mark.parametrize("name", MODELS)
def test_every_position_has_the_logits_of_training_and_every_mesh_the_same_tokens(name):
    with jax.enable_x64(True):
        model, params = MODELS[name], random_values(MODELS[name])
        first = {sampling: generate(model, "1", sampling) for sampling in (GREEDY, DRAWN)}
        for found in first.values():
            for row, prompt in enumerate(prompts_of()):
                text = np.concatenate([prompt, found.tokens[row]])
                whole = forward_logits(model, params, text[None], DEVICES[0])[0]
                expected = whole[len(prompt) - 1 : -1]
                np.testing.assert_allclose(found.logits[row], expected, rtol=0, atol=1e-10 * np.abs(expected).max())
        assert (first[GREEDY].tokens == first[GREEDY].logits.argmax(-1)).all()
        assert (first[GREEDY].tokens != first[DRAWN].tokens).any()
        for mesh in MESHES[1:]:
            for sampling, one in first.items():
                found = generate(model, mesh, sampling)
                np.testing.assert_array_equal(found.tokens, one.tokens, err_msg=mesh)
                np.testing.assert_allclose(found.logits, one.logits, rtol=0, atol=1e-10 * np.abs(one.logits).max())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2", "pp=2"])
def test_bytes_of_a_token_are_those_of_the_program(name, mesh):
    model, shape = MODELS[name], parse_mesh(mesh)
    made = build_generator(model, make_abstract_mesh(shape), shape, dtype="bfloat16", num_texts=4, capacity=20)
    number = made.abstract_tokens()
    traced = jax.make_jaxpr(made.decode)(made.abstract_params(), made.caches, number, number)
    assert total_sent(collectives_of(traced, shape), shape) == bytes_per_token(model, shape, "bfloat16", 4) > 0


def test_the_cache_is_split_by_heads_and_a_window_bounds_it():
    shape = parse_mesh("tp=2")
    made = build_generator(
        MODELS["windows"], make_abstract_mesh(shape), shape, dtype="bfloat16", num_texts=4, capacity=20
    )
    [sliding], [full] = made.caches
    assert sliding.k.shape == (2, 4, 6, 2, 8) and full.v.shape == (2, 4, 20, 2, 8)
    assert full.k.sharding.shard_shape(full.k.shape) == (2, 4, 20, 1, 8)


def test_drawn_tokens_have_their_probabilities():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    rows = jnp.arange(4000)
    for sampling, expected in (
        (Sampling(1.0), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.8), [5 / 9, 2.5 / 9, 1.5 / 9, 0]),  # 0.75 is not enough
        (Sampling(1.0, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
    ):
        drawn = sampling.choose(jnp.tile(logits, (len(rows), 1)), rows, rows)
        np.testing.assert_allclose(np.bincount(drawn, minlength=4) / len(rows), expected, atol=0.03)


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": 1.0, "top_k": 0}, "top_k"),
        ({"temperature": 1.0, "top_p": 0.0}, "top_p"),
        ({"top_p": 0.5}, "nothing is drawn"),
    ],
)
def test_settings_of_sampling_are_checked(asked, match):
    with pytest.raises(ConfigError, match=match):
        Sampling(**asked)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"capacity": 41}, "no more positions"),
        ({"num_texts": 3, "mesh": "dp=2"}, "as many"),
        ({"mesh": "pp=3"}, "pp in"),
        ({"mesh": "tp=3"}, "num_heads"),
    ],
)
def test_what_cannot_be_generated_is_refused(change, match):
    asked = {"mesh": "1", "num_texts": 2, "capacity": 8} | change
    shape = parse_mesh(asked.pop("mesh"))
    with pytest.raises(ConfigError, match=match):
        build_generator(MODELS["gpt2"], make_abstract_mesh(shape), shape, dtype="float32", **asked)


def test_a_model_that_keeps_nothing_is_refused():
    class NoAttention(Alternating):
        def layer(self, ctx, kind, params, x, index):
            return x

        def head(self, ctx, outer, x):
            return x, outer["head"]

    NoAttention = dataclasses.dataclass(frozen=True)(NoAttention)
    shape = parse_mesh("1")
    with pytest.raises(ConfigError, match="attend"):
        build_generator(NoAttention(), make_abstract_mesh(shape), shape, dtype="float32", num_texts=1, capacity=8)


def test_text_is_shown_when_it_is_certain():
    stream = TextStream(ByteTokenizer(), end=(0,), stop=("STOP",))
    shown = [stream.add(token) for token in "aé".encode()]
    assert shown == ["a", "", "é"]
    shown = [stream.add(token) for token in b"xSTxST"]
    assert shown == ["x", "", "", "STx", "", ""] and not stream.done
    shown = [stream.add(token) for token in b"OP and more"]
    assert not any(shown) and stream.done and stream.text == "aéxSTx"
    ended = TextStream(ByteTokenizer(), end=(0,), stop=("STOP",))
    assert [ended.add(token) for token in b"aS\0b"] == ["a", "", "S", ""] and ended.text == "aS"
    cut = TextStream(ByteTokenizer())
    assert [cut.add(token) for token in "é".encode()[:1]] == [""] and cut.close() == "\ufffd"
