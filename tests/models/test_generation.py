"""Text out of a model: the same logits as in training at every position, the same tokens on every mesh."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax.sharding import PartitionSpec
from support.small_models import MODELS, TEXT

from jaxdist.data.text_stream import TextStream
from jaxdist.data.tokenizer import ByteTokenizer
from jaxdist.errors import ConfigError
from jaxdist.generation import NO_TOKEN, Sampling, build_generator, bytes_per_token
from jaxdist.mesh import make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.base import declare
from jaxdist.models.cache import KeyValues, NextTokens
from jaxdist.parity import forward_logits
from jaxdist.plan.proof.trace import collectives_of, total_sent

MESHES = {
    "gpt2": ("tp=2", "pp=2"),
    "grouped": ("tp=4", "dp=2,tp=2"),
    "windows": ("pp=2", "tp=2"),
    "experts": ("dp=2,tp=2", "tp=2"),
}
OTHER_MESHES = [  # model, mesh, kind of context parallelism, whether tokens are drawn
    ("gpt2", "cp=2", "ring", True),
    ("gpt2", "pp=2,cp=2", "ulysses", False),
    ("grouped", "cp=2,tp=2", "ring", True),
    ("grouped", "pp=2,cp=2", "all-gather", True),
    ("grouped", "pp=2,cp=4", "ring", True),
    ("windows", "cp=2", "ring", False),
    ("windows", "cp=4", "usp-2", True),
    ("windows", "dp=2,cp=2", "ulysses", True),
    ("windows", "cp=8", "ring", False),  # a window that reaches one chunk back
    ("experts", "cp=2", "ring", True),
    ("experts", "dp=2,ep=2,tp=2", "ring", True),
    ("experts", "dp=4,ep=4", "ring", False),
]
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

    return jax.tree.map(draw, declare(model))


def prompts_of(lengths=(5, 12, 9, 1)) -> list[np.ndarray]:
    rng = np.random.default_rng(1)
    return [rng.integers(0, TEXT["vocab_size"], length) for length in lengths]


def generate(model, mesh: str, sampling=GREEDY, prompts=None, num_new=NUM_NEW, cp_kind="ring"):
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
        cp_kind=cp_kind,
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


@functools.cache
def on_one_device(name: str, sampling: Sampling):
    return generate(MODELS[name], "1", sampling)


def require_same_text(found, one, mesh: str) -> None:
    np.testing.assert_array_equal(found.tokens, one.tokens, err_msg=mesh)
    np.testing.assert_allclose(found.logits, one.logits, rtol=0, atol=1e-10 * np.abs(one.logits).max())


@pytest.mark.parametrize("name", in_sample(MODELS, ["gpt2", "windows"]))
def test_every_position_has_the_logits_of_training_and_every_mesh_the_same_tokens(name):
    with jax.enable_x64(True):
        model, params = MODELS[name], random_values(MODELS[name])
        first = {sampling: on_one_device(name, sampling) for sampling in (GREEDY, DRAWN)}
        texts = [
            np.concatenate([prompt, found.tokens[row]])
            for found in first.values()
            for row, prompt in enumerate(prompts_of())
        ]
        padded = np.zeros((len(texts), max(map(len, texts))), int)  # what follows a text changes nothing in it
        for row, text in enumerate(texts):
            padded[row, : len(text)] = text
        whole = forward_logits(model, params, padded, DEVICES[0])
        logits = [row for found in first.values() for row in found.logits]
        for text, found, all_logits in zip(texts, logits, whole, strict=True):
            expected = all_logits[len(text) - NUM_NEW - 1 : len(text) - 1]
            np.testing.assert_allclose(found, expected, rtol=0, atol=1e-10 * np.abs(expected).max())
        assert (first[GREEDY].tokens == first[GREEDY].logits.argmax(-1)).all()
        assert (first[GREEDY].tokens != first[DRAWN].tokens).any()
        for mesh, sampling in zip(MESHES[name], (GREEDY, DRAWN), strict=True):
            require_same_text(generate(model, mesh, sampling), first[sampling], mesh)


def test_a_text_longer_than_its_cache_has_no_next_token():
    model = MODELS["gpt2"]
    made = build_generator(
        model, make_mesh(parse_mesh("1"), DEVICES), parse_mesh("1"), dtype="float32", num_texts=1, capacity=4
    )
    found = made.prefill(random_values(model), np.zeros((1, 3), int), np.array([3]))
    assert found.tokens[0] >= 0
    for position, ends in ((3, False), (4, True)):
        found = made.decode(random_values(model), found.caches, found.tokens, np.array([position]))
        assert (int(found.tokens[0]) == NO_TOKEN) is ends and bool(jnp.isfinite(found.logits).all()) is not ends


@pytest.mark.parametrize(("name", "mesh", "kind", "drawn"), in_sample(OTHER_MESHES, OTHER_MESHES[::3]))
def test_a_split_of_sequences_or_experts_changes_no_token(name, mesh, kind, drawn):
    sampling = DRAWN if drawn else GREEDY
    with jax.enable_x64(True):
        found = generate(MODELS[name], mesh, sampling, cp_kind=kind)
        require_same_text(found, on_one_device(name, sampling), mesh)


def test_the_padding_of_a_split_prompt_may_exceed_the_model_s_positions():
    prompts = prompts_of((TEXT["seq_len"] - 3, 2))
    with jax.enable_x64(True):
        one, found = (generate(MODELS["gpt2"], mesh, prompts=prompts, num_new=3) for mesh in ("1", "cp=4"))
    require_same_text(found, one, "cp=4")


def build(model, mesh: str, **how):
    """A generator of 4 texts on an abstract mesh, of the kind that every mesh may have."""
    shape = parse_mesh(mesh)
    kind = "all-gather" if shape.cp > 1 else "ring"
    how = {"dtype": "bfloat16", "num_texts": 4, "capacity": 20, "cp_kind": kind} | how
    return build_generator(model, make_abstract_mesh(shape), shape, **how)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["tp=2", "tp=4", "dp=2,tp=2", "pp=2", "cp=2", "dp=2,cp=2,tp=2", "pp=2,cp=4"])
def test_bytes_of_a_token_are_those_of_the_program(name, mesh):
    model, shape = MODELS[name], parse_mesh(mesh)
    made = build(model, mesh)
    number = made.abstract_tokens()
    traced = jax.make_jaxpr(made.decode)(made.abstract_params(), made.caches, number, number)
    found = collectives_of(traced, shape)
    in_layers, others = (total_sent([c for c in found if bool(c.depth) == inside], shape) for inside in (True, False))
    # The program's text has the layers once for each turn, of which every stage takes one.
    assert others + in_layers // shape.pp == bytes_per_token(model, shape, "bfloat16", 4) > 0


def test_the_cache_is_split_by_heads_and_a_window_bounds_it():
    [sliding], [full] = build(MODELS["windows"], "tp=2").caches
    assert sliding.k.shape == (2, 4, 6, 2, 8) and full.v.shape == (2, 4, 20, 2, 8)
    assert full.k.sharding.shard_shape(full.k.shape) == (2, 4, 20, 1, 8)


@pytest.mark.parametrize(("mesh", "capacity"), [("cp=2", 20), ("cp=4", 20), ("cp=4,tp=2", 18)])
def test_every_rank_of_a_split_sequence_holds_its_part_of_the_cache(mesh, capacity):
    def local_bytes(mesh):
        caches = jax.tree.leaves(build(MODELS["windows"], mesh, capacity=capacity).caches)
        return [math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in caches]

    shape, per_place = parse_mesh(mesh), 2 * 4 * 2 * 8 * 2  # layers, texts, heads, width, bytes
    sliding, full = (-(-places // shape.cp) * per_place // shape.tp for places in (6, capacity))
    assert local_bytes(mesh) == [sliding] * 2 + [full] * 2
    assert local_bytes("1") == [6 * per_place] * 2 + [capacity * per_place] * 2


def test_drawn_tokens_have_their_probabilities():
    logits = jnp.log(jnp.array([0.5, 0.25, 0.15, 0.1]))
    rows = jnp.arange(4000)
    for sampling, expected in (
        (Sampling(1.0), [0.5, 0.25, 0.15, 0.1]),
        (Sampling(1.0, top_k=2), [2 / 3, 1 / 3, 0, 0]),
        (Sampling(1.0, top_p=0.8), [5 / 9, 2.5 / 9, 1.5 / 9, 0]),  # 0.75 is not enough
        (Sampling(1.0, top_p=0.5), [1, 0, 0, 0]),
        (Sampling(0.5), np.array([0.25, 0.0625, 0.0225, 0.01]) / 0.345),
        (Sampling(0.5, top_p=0.8), [0.8, 0.2, 0, 0]),  # with temperature 1 it would keep three
    ):
        drawn = sampling.choose(jnp.tile(logits, (len(rows), 1)), rows, rows)
        np.testing.assert_allclose(np.bincount(drawn, minlength=4) / len(rows), expected, atol=0.03)


def test_a_model_trained_with_dropout_generates_on_a_ring():
    model = dataclasses.replace(MODELS["gpt2"], dropout=0.1)
    assert build(model, "cp=2", cp_kind="ring").caches


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


def test_text_ends_at_the_first_stop_word_of_a_token_that_holds_several():
    tokenizer = SimpleNamespace(decode=lambda tokens: "abzz")
    assert TextStream(tokenizer, stop=("zz", "b")).add(0) == "a"
    at_once = TextStream(tokenizer, stop=("ab",))
    assert at_once.add(0) == "" and at_once.done
    half = TextStream(SimpleNamespace(decode=lambda tokens: "aSTOP\ufffd"), stop=("STOP",))
    assert half.add(0) == "" and half.close() == "a"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"capacity": 41}, "41 tokens"),
        ({"num_texts": 3, "mesh": "dp=2"}, "3 texts"),
        ({"mesh": "pp=3"}, "pp in"),
        ({"mesh": "tp=3"}, "num_heads"),
        ({"mesh": "pp=2,cp=3"}, "all-gather"),
        ({"mesh": "cp=4", "cp_kind": "usp-3"}, "usp-3"),
        ({"mesh": "dp=2", "cp_kind": "ulysses"}, "cp=1"),
    ],
)
def test_what_cannot_be_generated_is_refused(change, match):
    asked = {"mesh": "1", "num_texts": 2, "capacity": 8} | change
    shape = parse_mesh(asked.pop("mesh"))
    with pytest.raises(ConfigError, match=match):
        build_generator(MODELS["gpt2"], make_abstract_mesh(shape), shape, dtype="float32", **asked)


@pytest.mark.parametrize("wrong", [-1, TEXT["vocab_size"]])
def test_a_prompt_is_of_the_model_s_tokens(wrong):
    with pytest.raises(ConfigError, match=f"tokens from .*{wrong}"):
        build(MODELS["gpt2"], "dp=2").put(np.array([[0, wrong]] * 4))


def test_a_token_sees_its_window_and_no_more_of_what_ranks_hold():
    """Two ranks hold positions 3 to 6 between them; that at 6, with a window of 3, sees 4, 5 and itself."""
    k, v, q = (np.random.default_rng(0).normal(size=(2, 7, 4)).astype(np.float32) for _ in range(3))
    held = np.array([[4, 6], [5, 3]])  # at each place of each rank; 6 is what is written now

    def attend(k_LBCKH, v_LBCKH):
        cache = NextTokens([KeyValues(k_LBCKH, v_LBCKH)], jnp.int32(0), jnp.full(1, 6))
        return cache.attend(None, *(jnp.asarray(x[:, 6].reshape(1, 1, 2, 4)) for x in (q, k, v)), 3)

    caches = [
        np.where(held[..., None, None] == 6, 0, x.transpose(1, 0, 2)[held]).reshape(1, 1, 4, 2, 4) for x in (k, v)
    ]
    split, mesh = PartitionSpec(None, None, "cp"), make_mesh(parse_mesh("cp=2"), DEVICES)
    found = jax.jit(jax.shard_map(attend, mesh=mesh, in_specs=split, out_specs=PartitionSpec()))(*caches)
    scores = np.einsum("kh,kth->kt", q[:, 6], k[:, 4:]) / 2
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(found[0, 0], np.einsum("kt,kth->kh", weights, v[:, 4:]), rtol=1e-5)
