"""The written-out attention, in blocks of queries: values and gradients of one without blocks, in fewer products."""

import dataclasses
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax import random
from jax.sharding import PartitionSpec

from experiments.strategies import Strategy
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh
from jaxdist.models import attention, attention_choice
from jaxdist.models.attention import attention_core
from jaxdist.models.attention_choice import LONG, choose_attention
from jaxdist.models.context import Context
from jaxdist.parallel import blocked_attention
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.dropout import dropout
from jaxdist.parallel.kv_heads import heads_of_queries
from jaxdist.parallel.pipeline.split_backward import all_equations
from jaxdist.train import program as programs
from jaxdist.train.program import attention_on, build_program

NO_DROPOUT = Context(rows_B=np.arange(2))


def core_on_one_device(ctx: Context = NO_DROPOUT, rate: float = 0.0, window: int | None = None, name: str = "xla"):
    """The attention as it runs: inside of a mesh, here of one device."""
    mesh = make_mesh(MeshShape(), DEVICES)
    spec = PartitionSpec()
    core = attention_core(name, ctx, rate, window)
    return jax.jit(jax.shard_map(core, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec))


def plain(q, k, v, keep=None):
    """softmax(q k^T / sqrt(H)) v under a causal mask; keep[B, N, T, S] are the probabilities' factors."""
    scores = np.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    probs = np.exp(scores - scores.max(-1, keepdims=True))
    probs /= probs.sum(-1, keepdims=True)
    return np.einsum("bnts,bsnh->btnh", probs if keep is None else probs * keep, v)


@pytest.fixture(params=["xla", "blocked"])
def written(request, monkeypatch) -> str:
    """Attention that is not a kernel's; blocks of at most 64 positions, so that there are several."""
    monkeypatch.setattr(blocked_attention, "MOST_POSITIONS", 64)
    return request.param


@pytest.mark.parametrize("length", in_sample([16, 128, 192, 256], [16, 192]))
def test_values_and_gradients_are_those_without_blocks(length, written):
    with jax.enable_x64(True):
        q, k, v, d = random.normal(random.key(0), (4, 2, length, 3, 8), jnp.float64)
        core = core_on_one_device(name=written)
        np.testing.assert_allclose(core(q, k, v), plain(*map(np.asarray, (q, k, v))), rtol=1e-12, atol=1e-12)

        def whole(q, k, v):
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
            scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf)
            return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

        ours, theirs = (jax.vjp(f, q, k, v)[1](d) for f in (core, whole))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_masked_blocks_are_not_computed():
    q = jnp.ones((1, 256, 2, 8))
    jaxpr = jax.make_jaxpr(core_on_one_device())(q, q, q)
    products = [e.outvars[0].aval.shape for e in all_equations(jaxpr) if e.primitive.name == "dot_general"]
    scores = [shape[-2:] for shape in products if 8 not in shape[-2:]]
    assert sum(t * s for t, s in scores) == 256 * 256 * 5 // 8


def test_every_block_draws_its_own_dropout():
    """Column sums of a dropout mask: with v one-hot, what comes out are the probabilities that were kept."""
    length, key = 256, random.key(1)
    ctx = Context(key=key, rows_B=jnp.arange(1))
    zeros = jnp.zeros((1, length, 1, length))
    out = np.asarray(core_on_one_device(ctx, 0.5)(zeros, zeros, jnp.eye(length)[None, :, None]))[0, :, 0]
    rows = length // 4
    for end in range(rows, length + 1, rows):
        block = jnp.ones((1, 1, rows, end))
        kept = np.asarray(dropout(block, 0.5, ctx.at(end).key, jnp.arange(1), jnp.arange(1)))[0, 0]
        expected = np.tril(np.ones((length, length)))[end - rows : end, :end]
        expected = expected / expected.sum(-1, keepdims=True) * kept
        np.testing.assert_allclose(out[end - rows : end, :end], expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("refused", [True, False])
def test_auto_falls_back_where_cudnn_has_no_plan(monkeypatch, refused):
    """JAX skips its own cuDNN test on CUDA 13 for that reason."""
    monkeypatch.setattr(programs, "platform_of", lambda mesh: "gpu")
    if not refused:
        monkeypatch.setattr(attention_choice, "cudnn_refusal", lambda *_: None)
    config = Strategy("", "dp=2", {}, dropout=0.0, dtype="bfloat16").run_config()
    mesh = make_mesh(config.parallel.mesh, DEVICES)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        program = build_program(config, mesh)
    # Once for the step, once for the evaluation.
    assert ["cuDNN's attention does not compile on cpu" in str(w.message) for w in said] == [True] * 2 * refused
    assert program.config == config and program.model.ctx.attention == ("xla" if refused else "cudnn")
    if refused:  # with cuDNN's it cannot even be lowered here
        program.step.lower(program.abstract_state(), program.abstract_batch())
        program.evaluate.lower(program.abstract_state().params, program.abstract_batch())
    asked = dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, attention="cudnn"))
    assert attention_on(mesh, asked, training=True) == "cudnn"


def test_a_head_that_cudnn_does_not_take_is_written_out_with_a_warning():
    how = {"platform": "gpu", "dtype": "bfloat16", "dropout": False, "seq_len": 64}
    with pytest.warns(UserWarning, match="not 256"):
        assert choose_attention("auto", head_dim=256, **how) == "xla"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_attention("auto", head_dim=128, **how) == "cudnn"
        assert choose_attention("auto", head_dim=256, **how | {"dtype": "float32"}) == "xla"
        assert choose_attention("xla", head_dim=256, **how) == "xla"


def test_blocks_keep_to_documents_as_the_written_out_scores_do():
    starts = jnp.array([[0] * 40 + [40] * 88, [0] * 128])
    with jax.enable_x64(True):
        q, k, v = random.normal(random.key(0), (3, 2, 128, 2, 8), jnp.float64)
        one, other = (
            core_on_one_device(dataclasses.replace(NO_DROPOUT, starts_BT=starts), name=name)(q, k, v)
            for name in ("xla", "blocked")
        )
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("length", "window"), [(16, 1), (16, 5), (256, 200)])
def test_groups_and_windows_are_those_of_the_formula(window, length, written):
    """Grouped heads, each query with the `window` newest positions; in float64, gradients too."""
    with jax.enable_x64(True):
        q, d = random.normal(random.key(0), (2, 2, length, 6, 4), jnp.float64)
        k, v = random.normal(random.key(1), (2, 2, length, 2, 4), jnp.float64)

        def whole(q, k, v):
            k, v = (jnp.repeat(x, 3, axis=2) for x in (k, v))
            scores = jnp.einsum("btnh,bsnh->bnts", q, k) / jnp.sqrt(q.shape[-1])
            ago = jnp.arange(length)[:, None] - jnp.arange(length)
            scores = jnp.where((ago >= 0) & (ago < window), scores, -jnp.inf)
            return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)

        core = core_on_one_device(window=window, name=written)
        np.testing.assert_allclose(core(q, k, v), whole(q, k, v), rtol=1e-12, atol=1e-12)
        for ours, theirs in zip(*(jax.vjp(f, q, k, v)[1](d) for f in (core, whole)), strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("overlap", [False, True])
def test_training_with_dropout_writes_attention_out_on_a_gpu_too(monkeypatch, overlap):
    """cuDNN's takes no dropout: where it would run otherwise, `auto` must ask for training, and evaluation not."""
    monkeypatch.setattr(programs, "platform_of", lambda mesh: "gpu")
    chosen = []
    core = attention.attention_core
    monkeypatch.setattr(attention, "attention_core", lambda name, *how: chosen.append(name) or core("xla", *how))
    config = Strategy("", "dp=2", {"overlap": overlap}, dropout=0.1, dtype="bfloat16").run_config()
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    program.step.trace(program.abstract_state(), program.abstract_batch())
    assert set(chosen) == {"xla"}
    chosen.clear()
    program.evaluate.trace(program.abstract_state().params, program.abstract_batch())
    assert set(chosen) == {"cudnn"}


@pytest.mark.parametrize("num_heads", range(1, 13))
def test_every_query_gets_the_key_of_its_group_however_tp_divides_them(num_heads, monkeypatch):
    """Every number of key heads and every tp that divides the query heads, key heads unevenly over ranks among them."""
    monkeypatch.setattr(comm, "varying", lambda x, axes: x)
    divisors = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
    for num_kv_heads, tp in itertools.product(divisors, divisors):
        num_local, keys = num_heads // tp, np.arange(num_kv_heads)
        for rank in range(tp):
            monkeypatch.setattr(comm, "rank", lambda axis, rank=rank: rank)
            heads = heads_of_queries(num_local, num_heads, num_kv_heads)
            held = keys if num_kv_heads % tp else np.split(keys, tp)[rank]
            computed = np.asarray(heads.pick(held, 0))
            of_query = np.asarray(heads.of_each_query(computed.reshape(1, 1, -1, 1))).ravel()
            # Attention divides its queries evenly among the keys that it is given.
            found = np.repeat(of_query, num_local // len(of_query))
            queries = rank * num_local + np.arange(num_local)
            np.testing.assert_array_equal(found, queries // (num_heads // num_kv_heads), err_msg=f"{num_kv_heads} {tp}")


def test_scores_of_long_sequences_are_not_written_out_unless_asked_for():
    how = {"platform": "cpu", "dtype": "float32", "head_dim": 64}
    assert choose_attention("auto", seq_len=LONG, dropout=False, **how) == "blocked"
    assert choose_attention("auto", seq_len=LONG // 2, dropout=False, **how) == "xla"
    assert choose_attention("auto", seq_len=LONG, dropout=True, **how) == "xla"
    assert choose_attention("xla", seq_len=LONG, dropout=False, **how) == "xla"
    assert choose_attention("blocked", seq_len=64, dropout=False, **how) == "blocked"
    with pytest.raises(ConfigError, match="attention=blocked"):
        choose_attention("blocked", seq_len=64, dropout=True, **how)
