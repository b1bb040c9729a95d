"""The independent oracles: plain jnp in float64, and transformers' GPT-2 where torch is installed."""

import ast
import dataclasses
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES

from experiments import oracles
from experiments.oracles import plain
from experiments.verify import Verifier
from jaxdist.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import parse_mesh
from jaxdist.models.gpt2 import GPT2, gelu_tanh
from jaxdist.parity import NOISE, PROOF_EPS, random_batches
from jaxdist.runtime.devices import Devices

ODD = GPT2(num_layers=3, width=36, num_heads=6, ffn_width=90, seq_len=18, vocab_size=131)
WIDE = GPT2(num_layers=1, width=128, num_heads=2, ffn_width=256, seq_len=8, vocab_size=131)
LONG = GPT2(num_layers=2, width=8, num_heads=2, ffn_width=16, seq_len=128, vocab_size=31)


def config_of(model=ODD, mesh="", parallel=None, optimizer=None, dropout=0.0, dtype="float64", steps=4, rows=8):
    """Warm-up, a cosine and a clipped gradient; in 64 bits with large steps, which show what small ones hide."""
    settings = {"lr": 1e-2 if dtype == "float64" else 1e-4, "warmup_steps": 2, "clip_norm": 0.5, "eps": PROOF_EPS}
    return RunConfig(
        model=dataclasses.replace(model, dropout=dropout),
        parallel=ParallelConfig(mesh=parse_mesh(mesh), **(parallel or {})),
        optimizer=OptimizerConfig(**settings | (optimizer or {})),
        precision=PrecisionConfig(dtype=dtype),
        batch_size=rows,
        steps=steps,
        seed=3,
    )


RUNS = {
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


@pytest.mark.parametrize("name", RUNS)
def test_a_run_equals_plain_jnp(name):
    """Every number of each step, gradients, parameters, moments and evaluation."""
    assert_equals("plain", name, RUNS[name])


@pytest.mark.parametrize("mesh", ["", "dp=2,tp=2"])
def test_a_run_equals_transformers(mesh):
    pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    assert_equals("transformers", mesh, config_of(mesh=mesh))


def test_an_oracle_refuses_what_it_does_not_know():
    verify = Verifier(Devices(DEVICES, True, "simulated"), 1, "plain")
    with pytest.raises(ConfigError, match="16 bits are too coarse"):
        verify("", config_of(dtype="bfloat16"))
    with pytest.raises(ConfigError, match=r"dropout masks are not ours|not installed"):
        oracles.require_known("transformers", config_of(dropout=0.1))


@pytest.mark.parametrize("name", ["plain", "huggingface"])
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


def test_adafactor_factors_in_its_test():
    shapes = {name: plain.factored(x) for name, x in oracles.starting_parameters("plain", RUNS["adafactor"]).items()}
    assert {name for name, dims in shapes.items() if dims} == {"tokens", "blocks.mlp.w_up", "blocks.mlp.w_down"}


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
