"""transformers' models and ours: the same logits, loss and gradients on any mesh, and the same files there and back."""

from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES

from jaxdist.checkpoint.logical import PARAMS, abstract_parameters, fetch
from jaxdist.checkpoint.weights import read_model, read_weights, seen_as_ours
from jaxdist.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.layout import Layout
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import Model
from jaxdist.models.context import Batch, Context
from jaxdist.models.huggingface import tensors_of
from jaxdist.parity import observe, random_batches
from jaxdist.placement import make_layout

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 16,
    "vocab_size": 131,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8,
}
GPT2 = {
    "n_embd": 64,
    "n_inner": 96,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 16,
    "vocab_size": 131,
    **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
}
FAMILIES = {
    "llama": {"model_type": "llama", **SIZES, "rope_parameters": LLAMA3},
    "llama-biases": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "qwen3": {"model_type": "qwen3", **SIZES, "head_dim": 16, "tie_word_embeddings": True},
    "qwen3-windows": {
        "model_type": "qwen3",
        **SIZES,
        "use_sliding_window": True,
        "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    },
    "qwen2": {"model_type": "qwen2", **SIZES},
    "mistral": {"model_type": "mistral", **SIZES, "sliding_window": 6},
    "gpt2": {"model_type": "gpt2", **GPT2},
    "seven-heads": {
        "model_type": "llama",
        **SIZES,
        "hidden_size": 56,
        "num_attention_heads": 7,
        "num_key_value_heads": 1,
    },
}
LAYOUTS = {
    "one": {},
    "tp2": {"mesh": "tp=2"},
    "tp4": {"mesh": "tp=4"},
    "tp2-sp": {"mesh": "tp=2", "sp": True},
    "pp2-zb-h1": {"mesh": "pp=2", "schedule": "zb-h1"},
    "dp2-zero3": {"mesh": "dp=2", "zero": 3},
    "dp2-tp2": {"mesh": "dp=2,tp=2"},
}
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # of the largest element of each leaf
SAMPLE = {
    ("llama", "tp4", "float64"),
    ("llama", "pp2-zb-h1", "float32"),
    ("llama-biases", "tp2", "float64"),
    ("qwen3", "tp2-sp", "float64"),
    ("qwen3", "dp2-zero3", "float32"),
    ("qwen3-windows", "one", "float64"),
    ("qwen2", "one", "float64"),
    ("mistral", "dp2-tp2", "float64"),
    ("gpt2", "tp2", "float64"),
    ("seven-heads", "dp2-zero3", "float64"),
}


@pytest.fixture(scope="module")
def huggingface():
    """The oracle's module, which imports torch and transformers."""
    pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    from experiments.oracles import huggingface

    return huggingface


@pytest.fixture(scope="module")
def saved(huggingface, tmp_path_factory):
    """family, dtype -> (oracle, folder that it wrote)."""

    @cache
    def make(family: str, dtype: str):
        oracle = huggingface.CausalLM(FAMILIES[family], seed=5, dtype=dtype)
        folder = tmp_path_factory.mktemp(family)
        oracle.save(folder)
        return oracle, folder

    return make


def layout_of(model: Model, mesh: str = "", **parallel) -> tuple[Layout, jax.sharding.Mesh]:
    config = RunConfig(model, ParallelConfig(parse_mesh(mesh), **parallel), batch_size=8)
    return make_layout(model, config.parallel, config.part_layers), make_mesh(config.parallel.mesh, DEVICES)


def read(folder: Path, model: Model, dtype: str = "float32", mesh: str = "", **parallel) -> dict[str, jax.Array]:
    layout, devices = layout_of(model, mesh, **parallel)
    return read_weights(folder, model, abstract_parameters(layout, devices, dtype))


def in_our_names(model: Model, theirs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Their arrays by our names, layer by layer, as `parity.observe` gives them."""
    found = {}
    for tensor in tensors_of(model):
        name = tensor.path if tensor.layer is None else f"{tensor.path}[{tensor.layer}]"
        found[name] = seen_as_ours(tensor, theirs[tensor.name])
    return found


def logits_of(model: Model, params: dict[str, jax.Array], tokens: np.ndarray) -> np.ndarray:
    """[B, T, V], on one device, of parameters by name."""
    tree: dict = {}
    for name, x in params.items():
        *path, last = name.removeprefix(f"{PARAMS}.").split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
        node[last] = x
    blocks = tree.pop("blocks")
    rows = np.arange(len(tokens), dtype=np.int32)

    def forward(outer, blocks, tokens):
        ctx = Context(rows_B=rows)
        x = model.embed(ctx, outer, Batch(tokens, tokens, rows))
        for layer in range(model.num_layers):
            block, place = divmod(layer, len(model.kinds))
            params = jax.tree.map(lambda p, block=block: p[block], blocks)
            if len(model.kinds) > 1:
                params = params[f"{place}_{model.kinds[place]}"]
            x = model.layer(ctx, model.kinds[place], params, x, layer)
        x, table = model.head(ctx, outer, x)
        return jnp.einsum("btd,vd->btv", x, table)[..., : model.vocab_size]

    mesh = make_mesh(parse_mesh(""), DEVICES[:1])
    one = jax.sharding.PartitionSpec()
    run = jax.shard_map(forward, mesh=mesh, in_specs=(one, one, one), out_specs=one)
    return np.asarray(jax.jit(run)(tree, blocks, tokens))


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.exhaustive, id="-".join(case))
    for case in ((f, layout, dtype) for f in FAMILIES for layout in LAYOUTS for dtype in TOLERANCE)
    if not (case[0] == "seven-heads" and "tp" in case[1])  # tp divides the heads
]


@pytest.mark.parametrize("family, layout, dtype", CASES)
def test_loss_and_every_gradient_are_theirs(saved, family, layout, dtype):
    oracle, folder = saved(family, dtype)
    model = read_model(folder)
    with jax.enable_x64(dtype == "float64"):
        how = dict(LAYOUTS[layout])
        parallel = ParallelConfig(parse_mesh(how.pop("mesh", "")), **how)
        optimizer = OptimizerConfig(clip_norm=1e9)
        config = RunConfig(model, parallel, optimizer, PrecisionConfig(dtype=dtype), batch_size=8)
        [batch] = random_batches(config, 1, seed=2)
        wanted = abstract_parameters(*layout_of(model, **LAYOUTS[layout]), dtype)
        found = fetch(read_weights(folder, model, wanted))
        ours = observe(config, DEVICES, [batch], {name.removeprefix(f"{PARAMS}."): x for name, x in found.items()})
        loss, theirs = oracle.gradients(batch)
    assert abs(ours.losses[0] - loss) <= TOLERANCE[dtype] * loss
    theirs = in_our_names(model, theirs)
    gradients = {name: g[: len(theirs[name])] for name, g in ours.gradients[0].items()}
    assert gradients.keys() == theirs.keys()
    wrong = {name: e for name in theirs if not (e := _gap(name, gradients[name], theirs)) <= TOLERANCE[dtype]}
    assert not wrong, wrong


def _gap(name: str, ours: np.ndarray, theirs: dict[str, np.ndarray]) -> float:
    """A key's bias shifts all scores of a query alike: its true gradient is 0, and noise is held to a query's."""
    largest = np.abs(theirs[name.replace(".b_k[", ".b_q[")]).max()
    if "b_qkv" in name:
        largest = np.abs(theirs[name]).max()
    return float(np.abs(ours - theirs[name]).max() / largest)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_theirs(saved, family):
    oracle, folder = saved(family, "float64")
    model = read_model(folder)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, model.seq_len)).astype(np.int32)
    with jax.enable_x64(True):
        ours = logits_of(model, read(folder, model, "float64"), tokens)
    assert error(ours, oracle.logits(tokens)) < 1e-9
