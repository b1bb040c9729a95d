"""The independent oracles: plain jnp in float64, and transformers' GPT-2 where torch is installed."""

import ast
import dataclasses
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES, in_sample
from jax.sharding import PartitionSpec

from experiments import oracles
from experiments.oracles import decoder, plain
from experiments.verify import Verifier
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.experts import Mixture
from jaxdist.models.fused import LAYER_NORM_EPS, gelu_tanh, layer_norm
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.layers import Rotary
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.vocabulary import vocab_parallel_cross_entropy
from jaxdist.parity import NOISE, PROOF_EPS
from jaxdist.runtime.devices import Devices
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train import program

ODD = GPT2Config(num_layers=3, width=36, num_heads=6, ffn_width=90, seq_len=18, vocab_size=131)
WIDE = GPT2Config(num_layers=1, width=128, num_heads=2, ffn_width=256, seq_len=8, vocab_size=131)
LONG = GPT2Config(num_layers=2, width=8, num_heads=2, ffn_width=16, seq_len=128, vocab_size=31)


def config_of(
    model=ODD, mesh="", parallel=None, optimizer=None, dropout=0.0, dtype="float64", steps=4, rows=8, documents=False
):
    """Warm-up, a cosine and a clipped gradient; in 64 bits with large steps, which show what small ones hide."""
    settings = {"lr": 1e-2 if dtype == "float64" else 1e-4, "warmup_steps": 2, "clip_norm": 0.5, "eps": PROOF_EPS}
    return RunConfig(
        model=dataclasses.replace(model, dropout=dropout) if dropout else model,
        parallel=ParallelConfig(mesh=parse_mesh(mesh), **(parallel or {})),
        optimizer=OptimizerConfig(**settings | (optimizer or {})),
        precision=PrecisionConfig(dtype=dtype),
        batch_size=rows,
        steps=steps,
        seed=3,
        mask_documents=documents,
    )


LLAMA = DecoderConfig(2, 24, 6, num_kv_heads=2, head_dim=4, ffn_width=30, seq_len=16, vocab_size=61)
# Biases, windows, a tied table and positions that are stretched, of documents; then all that routers do.
QWEN = dataclasses.replace(
    LLAMA, kinds=("sliding", "full"), window=5, tied=True, rope_scaling=("linear", 2.5), attention_bias=True
)
QWEN = dataclasses.replace(QWEN, out_bias=True, mlp_bias=True, qk_norm=True)
STRETCHED = dataclasses.replace(LLAMA, rope_theta=100.0, rope_scaling=("llama3", 4.0, 1.0, 4.0, 16), norm_eps=1e-3)
MIXTRAL = dataclasses.replace(LLAMA, num_experts=4, expert_width=8, balance_loss=0.3, z_loss=0.02)
DEEPSEEK = dataclasses.replace(
    MIXTRAL, kinds=("dense", "full"), top_k=3, router_score="sigmoid", routed_scale=2.5, shared_width=8, capacity=1.0
)
DEEPSEEK = dataclasses.replace(DEEPSEEK, balance_rate=0.05)

# All of it in one model.
EXPERTS = {field.name: getattr(DEEPSEEK, field.name) for field in dataclasses.fields(Mixture)}
EVERYTHING = dataclasses.replace(QWEN, kinds=("sliding", "dense"), **EXPERTS)

RUNS = {
    "decoder": config_of(EVERYTHING, documents=True, steps=2, rows=4),
    "llama": config_of(STRETCHED, mesh="dp=2,tp=3", parallel={"zero": 3}, steps=3),
    "qwen": config_of(QWEN, optimizer={"name": "sgd"}, documents=True, steps=2),
    "mixtral": config_of(MIXTRAL, steps=3),
    "deepseek": config_of(DEEPSEEK, steps=2),
    "documents": config_of(mesh="tp=2", documents=True, steps=1),
    "adamw-fp32": config_of(dtype="float32"),
    "adamw-dropout": config_of(dropout=0.2),
    "adamw-accumulate": config_of(dropout=0.2, parallel={"accumulate": 2}, steps=2),
    "sgd": config_of(optimizer={"name": "sgd"}),
    "lion": config_of(optimizer={"name": "lion", "lr": 1e-3}),
    "adafactor": config_of(WIDE, optimizer={"name": "adafactor"}),
    "queries-in-blocks": config_of(LONG, dropout=0.2, steps=1, rows=2),
    "pp2-dp2-dropout": config_of(mesh="pp=2,dp=2", parallel={"zero": 1, "stages": "1,2"}, dropout=0.2, steps=2),
    "dp2-tp2-zero3-overlap": config_of(mesh="dp=2,tp=2", parallel={"zero": 3, "overlap": True}, dropout=0.2, steps=2),
}


def assert_equals(oracle, name, config):
    verdict = Verifier(Devices(DEVICES, True, "simulated"), config.steps, oracle)(name, config)
    wrong = [f"{d.kind} {d.name}: {d.error:.2e} > {d.tolerance:.0e}" for d in verdict.differences if not d.ok]
    assert not wrong, "\n".join(wrong[:20])


SAMPLE = ("decoder", "adamw-accumulate", "sgd", "lion", "adafactor")


@pytest.mark.parametrize("name", in_sample(RUNS, SAMPLE))
def test_a_run_equals_plain_jnp(name):
    """Every number of each step, gradients, parameters, moments and evaluation."""
    assert_equals("plain", name, RUNS[name])


@pytest.mark.parametrize("model", [LLAMA, QWEN, STRETCHED], ids=["plain", "linear", "llama3"])
def test_frequencies_are_those_of_the_oracle(model):
    """At a length at which a scaling keeps some, slows others down and blends the rest."""
    wanted = decoder.frequencies(oracles.decoder_settings(config_of(model)), 16)
    found = Rotary(32, model.rope_theta, model.rope_scaling).frequencies()
    np.testing.assert_allclose(found, wanted, rtol=1e-14)
    if model is STRETCHED:
        assert len({*np.round(found / Rotary(32, model.rope_theta).frequencies(), 6)} - {0.25, 1.0}) > 1


@pytest.mark.parametrize("mesh", in_sample(["", "dp=2,tp=2"], ["dp=2,tp=2"]))
def test_a_run_equals_transformers(mesh):
    pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    assert_equals("transformers", mesh, config_of(mesh=mesh))


@pytest.mark.parametrize("name", ["plain", "decoder", "huggingface"])
def test_an_oracle_imports_nothing_of_the_package(name):
    tree = ast.parse((Path(oracles.__file__).parent / f"{name}.py").read_text(encoding="utf-8"))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    roots = {module.split(".")[0] for module in imported} - set(sys.stdlib_module_names)
    assert roots <= {"jax", "numpy", "torch", "transformers"}


def test_only_the_biases_of_keys_have_no_gradient():
    """So they alone may be off by an update under Lion or Adafactor, in 64 bits (`verify.compare_parameters`)."""
    config = RUNS["lion"]
    with jax.enable_x64(True):
        start = oracles.starting_parameters("plain", config)
        found = oracles.ask("plain", config, random_batches(config, config.steps, config.seed + 1), start)
    for name in found.parameters:
        smallest = np.min([np.abs(each[name]) for each in found.gradients], axis=0)
        noise = smallest <= NOISE * np.abs(found.gradients[0][name]).max()
        if name == "tokens":
            assert not noise[: config.model.vocab_size].any() and noise[config.model.vocab_size :].all()
        elif name.startswith("blocks.attention.b_qkv"):
            query, key, value = noise
            assert key.all() and not query.any() and not value.any()
        else:
            assert not noise.any(), name


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_gelu_and_its_gradient_are_those_of_the_formula(dtype):
    """Against the formula in long doubles; its gradient is nearer to it than what JAX derives from tanh."""
    with jax.enable_x64(True):
        wide = jnp.concatenate([jnp.linspace(-30, 30, 4001), jnp.zeros(1)])
        x, d = wide.astype(dtype), jnp.cos(wide).astype(dtype)
        value, pull = jax.vjp(gelu_tanh, x)
        (slope,) = pull(d)
        (derived,) = jax.vjp(lambda x: jax.nn.gelu(x, approximate=True), x)[1](d)
    assert value.dtype == slope.dtype == jnp.dtype(dtype)
    x, d, value, slope, derived = (
        np.asarray(each, np.float64).astype(np.longdouble) for each in (x, d, value, slope, derived)
    )
    scale, cube = np.sqrt(2 / np.longdouble(np.pi)), np.longdouble("0.044715")
    tanh = np.tanh(scale * (x + cube * x**3))
    exact = (1 + tanh) / 2 + x * (1 - tanh**2) / 2 * scale * (1 + 3 * cube * x**2)
    rounding = float(jnp.finfo(dtype).eps)
    # XLA's own tanh and exponential are off by as much; in bf16 forward is JAX's, the gradient is rounded once.
    most_of_value, most_of_slope = {"float64": (16, 40), "float32": (8, 8), "bfloat16": (2, 1)}[dtype]
    for found, formula, most in ((value, x * (1 + tanh) / 2, most_of_value), (slope, d * exact, most_of_slope)):
        assert np.abs(found - formula).max() <= most * rounding * max(1, np.abs(formula).max())
    assert np.abs(slope - d * exact).max() < np.abs(derived - d * exact).max()


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
def test_layer_norm_and_its_gradients_are_those_of_the_formula(dtype, one_pass):
    """Against the formula in long doubles: rows around 0 and far from it, and one without any variance."""
    keys = jax.random.split(jax.random.key(5), 4)
    with jax.enable_x64(True):
        x, d = (jax.random.normal(key, (2, 7, 100), jnp.float64) for key in keys[:2])
        x = (3 * x + jnp.array([[0.0], [1], [-4], [30], [0], [2], [20]])).at[0, 4].set(4000.0).astype(dtype)
        scale, bias = (1 + jax.random.normal(key, (100,), jnp.float64).astype(dtype) for key in keys[2:])
        d = d.astype(dtype)
        value, pull = jax.vjp(jax.jit(partial(layer_norm, one_pass)), x, scale, bias)
        found = value, *pull(d)
    assert {each.dtype for each in found} == {jnp.dtype(dtype)}
    x, d, scale, bias, *found = (
        np.asarray(each, np.float64).astype(np.longdouble) for each in (x, d, scale, bias, *found)
    )
    centred = x - x.mean(-1, keepdims=True)
    root = np.sqrt((centred**2).mean(-1, keepdims=True) + LAYER_NORM_EPS)
    normed, g = centred / root, d * scale
    dx = (g - g.mean(-1, keepdims=True) - normed * (g * normed).mean(-1, keepdims=True)) / root
    formulas = normed * scale + bias, dx, (d * normed).sum((0, 1)), d.sum((0, 1))
    rounding = float(jnp.finfo(dtype).eps)
    most = 8 if dtype in ("float64", "float32") else 0.6  # 16 bits are rounded once
    for one, formula in zip(found, formulas, strict=True):
        assert np.abs(one - formula).max() <= most * rounding * max(1, np.abs(formula).max())


@pytest.mark.parametrize("one_pass", [False, True])
@pytest.mark.parametrize("tp", [1, 4])
def test_the_loss_of_a_gpu_and_of_a_cpu_are_the_formula(one_pass, tp):
    """Loss and gradients of rows whose logits are far apart, one of them with all its weight on another rank, and one
    with a vocabulary that is padding from 13 on, against float64 without any of our code."""
    key_x, key_t = jax.random.split(jax.random.key(3))
    targets = np.array([[0, 12, 5, 7], [3, 3, 11, 1]])
    with jax.enable_x64(True):
        x = 4 * jax.random.normal(key_x, (2, 4, 6), jnp.float64)
        table = 3 * jax.random.normal(key_t, (16, 6), jnp.float64).at[2].set(40.0)
        mesh = make_mesh(MeshShape(tp=tp), jax.devices()[:tp])
        specs = PartitionSpec(), PartitionSpec("tp" if tp > 1 else None), PartitionSpec()

        def loss(x, table, targets):
            ours = partial(vocab_parallel_cross_entropy, vocab_size=13, sp=False, one_pass=one_pass)
            return jax.shard_map(ours, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())(x, table, targets)

        found = jax.jit(loss)(x, table, targets)
        slopes = jax.jit(jax.grad(lambda x, table: (loss(x, table, targets) ** 2).sum(), argnums=(0, 1)))(x, table)

    x, table = np.asarray(x, np.longdouble), np.asarray(table, np.longdouble)
    logits = (x @ table.T)[..., :13]
    odds = np.exp(logits - logits.max(-1, keepdims=True))
    expected = np.log(odds.sum(-1)) + logits.max(-1) - np.take_along_axis(logits, targets[..., None], -1)[..., 0]
    d_logits = (odds / odds.sum(-1, keepdims=True) - np.eye(13)[targets]) * 2 * expected[..., None]
    by_table = np.zeros_like(table)
    by_table[:13] = np.einsum("btv,btd->vd", d_logits, x)
    for ours, formula in ((found, expected), (slopes[0], d_logits @ table[:13]), (slopes[1], by_table)):
        assert np.abs(np.asarray(ours) - formula).max() < 1e-13 * max(1, np.abs(formula).max())


AS_ON_A_GPU = [("dp=2,tp=2", {"zero": 1}), ("tp=4", {"sp": True}), ("dp=4", {"zero": 3}), ("", {"loss_chunks": 2})]


@pytest.mark.parametrize("mesh, settings", in_sample(AS_ON_A_GPU, AS_ON_A_GPU[::3]))
def test_a_step_as_a_gpu_gets_it_computes_what_a_cpus_does(mesh, settings, monkeypatch):
    """Loss, gradients and parameters; its layers are written out where nothing is gathered."""
    model = dataclasses.replace(ODD, num_heads=4, ffn_width=88, seq_len=16)
    config = config_of(model, mesh, settings | {"attention": "xla"}, rows=8)
    batches = random_batches(config, 2)
    with jax.enable_x64(True):
        found = []
        for platform in ("cpu", "gpu"):
            monkeypatch.setattr(program, "platform_of", lambda mesh, platform=platform: platform)
            built = program.build_program(config, make_mesh(config.parallel.mesh, DEVICES), with_gradients=True)
            state, losses, grads = built.init(0), [], None
            for batch in batches:
                state, metrics, grads = built.step(state, built.put(batch))
                losses.append(float(metrics["loss"]))
            found.append((losses, grads, state.params))
            text = built.step.lower(built.abstract_state(), built.abstract_batch()).as_text()
            written_out = platform == "gpu" and not settings.get("sp") and settings.get("zero") != 3
            assert ("stablehlo.while" not in text) == (written_out and "loss_chunks" not in settings)
    for one, two in zip(*map(jax.tree.leaves, found), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-11, atol=1e-13)


def test_layers_are_written_out_where_it_costs_little():
    """On GPUs, up to a depth, where nothing is gathered; and where it is asked for."""

    def unrolls(mesh="", platform="gpu", depth=48, **settings):
        return ParallelConfig(parse_mesh(mesh), **settings).unrolls(platform, depth)

    assert unrolls() and unrolls("dp=8", zero=1) and unrolls("tp=2") and unrolls(zero=3) and unrolls(sp=True)
    assert unrolls("dp=8", remat="selective") and not unrolls("dp=8", remat="block") and not unrolls(remat="every-2")
    assert not unrolls(remat="repeat:dot_general:rx4-4x4")
    assert not unrolls(depth=49) and not unrolls(platform="cpu") and not unrolls(platform="abstract")
    for mesh, settings in (("dp=8", {"zero": 3}), ("dp=8", {"zero": 2}), ("tp=2", {"sp": True}), ("cp=2", {})):
        assert not unrolls(mesh, **settings)
    assert not unrolls("dp=8", overlap=True) and not unrolls("pp=2")
    assert unrolls("dp=8", "cpu", 96, zero=3, unroll_layers="yes") and not unrolls(unroll_layers="no")


@pytest.mark.parametrize("zero, guarded", [(0, False), (2, False), (3, True)])
def test_a_barrier_is_around_gathered_parameters_alone(zero, guarded):
    """A barrier around a layer's part of a stack is a copy of it."""
    config = config_of(LONG, "dp=2", {"zero": zero, "unroll_layers": "yes"}, dtype="float32", rows=4)
    built = program.build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    text = built.step.lower(built.abstract_state(), built.abstract_batch()).as_text()
    barriers = [line for line in text.splitlines() if "optimization_barrier" in line]
    w_up = [line for line in barriers if "tensor<8x16xf32>" in line or "tensor<8x8xf32>" in line]  # whole, or a shard
    assert barriers and bool(w_up) == guarded


@jax.custom_vjp
def doubled(x):
    return 2 * x


# Arrays made outside of any trace: constants of the rules.
doubled.defvjp(lambda x: (x * jnp.array([2.0]), None), lambda _, dx: (dx * jnp.array([2.0]),))


class WithConstants(GPT2Config):
    def layer(self, ctx, kind, params, x_BTD, index):
        return super().layer(ctx, kind, params, doubled(x_BTD), index)


@pytest.mark.parametrize(
    ("model", "mesh", "settings"),
    [
        (LONG, "cp=4", {}),
        (dataclasses.replace(PRESETS["llama-10m"], seq_len=16), "cp=4", {"remat": "every-2"}),
        (WithConstants(**dataclasses.asdict(ODD)), "", {}),
        (WithConstants(**dataclasses.asdict(ODD)), "dp=2", {"zero": 3, "remat": "block"}),
    ],
    ids=["ring", "ring-of-a-decoder", "own-gradient", "own-gradient-gathered"],
)
def test_layers_with_constants_in_their_gradients_can_be_written_out(model, mesh, settings):
    """A ring's hops are counted in an array; a user's rule may hold any. Traced, where JAX's assertion was."""
    config = config_of(model, mesh, settings | {"unroll_layers": "yes"}, dtype="float32")
    built = program.build_program(config, make_abstract_mesh(config.parallel.mesh))
    built.step.trace(built.abstract_state(), built.abstract_batch())


def test_an_oracle_refuses_what_it_does_not_know():
    verify = Verifier(Devices(DEVICES, True, "simulated"), 1, "plain")
    with pytest.raises(ConfigError, match="dtype bfloat16"):
        verify("", config_of(dtype="bfloat16"))
    with pytest.raises(ConfigError, match="--oracle transformers"):
        oracles.require_known("transformers", config_of(dropout=0.1))


def test_adafactor_factors_in_its_test():
    shapes = {name: plain.factored(x) for name, x in oracles.starting_parameters("plain", RUNS["adafactor"]).items()}
    assert {name for name, dims in shapes.items() if dims} == {"tokens", "blocks.mlp.w_up", "blocks.mlp.w_down"}
