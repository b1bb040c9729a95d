"""transformers' models and ours: the same logits, loss and gradients on any mesh, and the same files there and back."""

import dataclasses
import json
import random
from functools import cache
from pathlib import Path

import jax
import numpy as np
import pytest
from conftest import DEVICES
from flax.traverse_util import unflatten_dict
from support.families import FAMILIES, LLAMA3

from jaxdist.checkpoint.logical import PARAMS, abstract_parameters, fetch
from jaxdist.checkpoint.weights import in_our_names, open_weights, read_weights, source_of, write_weights
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.layout import Layout
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import Model, declare
from jaxdist.models.huggingface import ARCHITECTURES, config_of, model_from_config, read_model, tensors_of
from jaxdist.params import named_params
from jaxdist.parity import forward_logits, observe
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig, PrecisionConfig

LAYOUTS = {
    "one": {},
    "tp2": {"mesh": "tp=2"},
    "tp4": {"mesh": "tp=4"},
    "tp2-sp": {"mesh": "tp=2", "sp": True},
    "pp2-zb-h1": {"mesh": "pp=2", "schedule": "zb-h1"},
    "dp2-zero3": {"mesh": "dp=2", "zero": 3},
    "dp2-tp2": {"mesh": "dp=2,tp=2"},
    "cp4": {"mesh": "cp=4"},
    "dp2-cp4-zero3-gather": {"mesh": "dp=2,cp=4", "zero": 3, "cp_kind": "all-gather"},
    "pp2-cp4-gather": {"mesh": "pp=2,cp=4", "cp_kind": "all-gather"},
    "dp2-ep2": {"mesh": "dp=2,ep=2"},
    "dp4-ep4": {"mesh": "dp=4,ep=4"},
    "dp4-ep2-zero3": {"mesh": "dp=4,ep=2", "zero": 3},
    "dp2-ep2-tp2-sp": {"mesh": "dp=2,ep=2,tp=2", "sp": True},
}
WITH_EXPERTS = ("mixtral", "qwen3-moe", "qwen3-moe-every-other", "qwen3-moe-not-normalised")
TOLERANCE = {"float64": 1e-9, "float32": 1e-5}  # of the largest element of each leaf
SAMPLE = {
    ("llama", "pp2-zb-h1", "float32"),
    ("llama-biases", "tp2", "float64"),
    ("qwen3", "tp2-sp", "float64"),
    ("qwen3-windows", "one", "float64"),
    ("qwen2", "one", "float64"),
    ("mistral", "dp2-tp2", "float64"),
    ("gpt2", "tp2", "float64"),
    ("seven-heads", "dp2-zero3", "float64"),
    ("qwen3-windows", "cp4", "float64"),
    ("qwen3-moe-not-normalised", "dp2-ep2", "float64"),
    ("qwen3-moe-every-other", "one", "float64"),
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


def logits_of(model: Model, params: dict[str, jax.Array], tokens: np.ndarray) -> np.ndarray:
    """[B, T, V], on one device, of parameters by name."""
    tree = unflatten_dict({name.removeprefix(f"{PARAMS}."): x for name, x in params.items()}, sep=".")
    return forward_logits(model, tree, tokens, DEVICES[0])


def error(ours: np.ndarray, theirs: np.ndarray) -> float:
    """The largest difference, relative to the largest element."""
    assert ours.shape == theirs.shape
    return float(np.abs(ours - theirs).max() / np.abs(theirs).max())


CASES = [
    pytest.param(*case, marks=() if case in SAMPLE else pytest.mark.exhaustive, id="-".join(case))
    for case in ((f, layout, dtype) for f in FAMILIES for layout in LAYOUTS for dtype in TOLERANCE)
    if not (case[0] == "seven-heads" and "tp" in case[1])  # tp divides the heads
    and (case[0] in WITH_EXPERTS or "ep" not in case[1])
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
    counts = {param for param, p in named_params(declare(model)) if p.update == "count"}
    made = {name: g for name, g in ours.gradients[0].items() if name.partition("[")[0] not in counts}
    gradients = {name: g[: len(theirs[name])] for name, g in made.items()}
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


# ---------------------------------------------------------------------------------------------------------------------
# There and back
# ---------------------------------------------------------------------------------------------------------------------


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "generation_config.json"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("family, shards", [("llama", "5GB"), ("qwen3", "60KB"), ("gpt2", "100KB")])
def test_import_and_export_give_the_same_files(huggingface, tmp_path, family, shards, dtype):
    huggingface.CausalLM(FAMILIES[family], dtype="float32").save(tmp_path / "theirs", dtype, shards)
    model = read_model(tmp_path / "theirs")
    folder, _ = open_weights(tmp_path / "theirs", model)
    assert (folder.index is None) == (shards == "5GB")
    arrays = read(tmp_path / "theirs", model, dtype, mesh="dp=2,tp=2", zero=3)
    write_weights(tmp_path / "ours", model, arrays, source_of(folder))
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_reads_what_we_export(huggingface, saved, tmp_path, family):
    """Without a source: config.json, names and header are our own."""
    oracle, folder = saved(family, "float32")
    model = read_model(folder)
    write_weights(tmp_path / "out", model, read(folder, model, mesh="tp=2" if family != "seven-heads" else "dp=2"))
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, model.seq_len))
    again = huggingface.CausalLM.load(tmp_path / "out", "float32")
    assert np.array_equal(again.logits(tokens), oracle.logits(tokens))
    names = {tensor.name for tensor in tensors_of(model)}
    assert {*open_weights(tmp_path / "out", model)[0].tensors} == names


def test_bf16_stays_what_it_was_through_fp32(huggingface, tmp_path):
    huggingface.CausalLM(FAMILIES["qwen3"], dtype="float32").save(tmp_path / "theirs", "bfloat16")
    model = read_model(tmp_path / "theirs")
    folder, _ = open_weights(tmp_path / "theirs", model)
    write_weights(tmp_path / "ours", model, read(tmp_path / "theirs", model, "float32"), source_of(folder))
    assert files_of(tmp_path / "ours") == files_of(tmp_path / "theirs")


def test_a_tied_head_beside_its_table_is_kept_and_must_be_equal(huggingface, tmp_path):
    """As the files of Qwen3-0.6B have it."""
    from safetensors.torch import load_file, save_file

    huggingface.CausalLM(FAMILIES["qwen3"], dtype="float32").save(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, path, {"format": "pt"})
    model = read_model(tmp_path)
    folder, _ = open_weights(tmp_path, model)
    write_weights(tmp_path / "again", model, read(tmp_path, model), source_of(folder))
    assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes()
    tensors["lm_head.weight"][130, 63] += 1
    save_file(tensors, path)
    with pytest.raises(ConfigError, match="tie_word_embeddings"):
        open_weights(tmp_path, model)


def test_gpt_2_with_fewer_positions_takes_the_first(saved, huggingface, tmp_path):
    oracle, folder = saved("gpt2", "float32")
    model = dataclasses.replace(read_model(folder), seq_len=10)
    arrays = read(folder, model)
    tokens = np.random.default_rng(1).integers(0, model.vocab_size, (2, 10)).astype(np.int32)
    assert error(logits_of(model, arrays, tokens), oracle.logits(tokens)) < 1e-5
    write_weights(tmp_path / "out", model, arrays, source_of(open_weights(folder, model)[0]))
    again = huggingface.CausalLM.load(tmp_path / "out", "float32")
    assert again.model.config.n_positions == 10
    assert np.array_equal(again.logits(tokens), oracle.logits(tokens))
    with pytest.raises(ConfigError, match=r"different  transformer\.wpe\.weight"):
        read(folder, dataclasses.replace(model, seq_len=17))


@pytest.mark.parametrize("family, prefix", [("gpt2", "transformer."), ("qwen3", "model.")])
def test_files_of_a_bare_body(huggingface, tmp_path, family, prefix):
    """As those of openai-community/gpt2, with its causal masks, and of Qwen/Qwen3-Embedding-0.6B."""
    from safetensors.torch import load_file, save_file
    from torch import ones

    huggingface.CausalLM(FAMILIES[family], dtype="float32").save(tmp_path)
    path, model = tmp_path / "model.safetensors", read_model(tmp_path)
    expected = read(tmp_path, model)
    tensors = {name.removeprefix(prefix): x for name, x in load_file(path).items()}
    masks = {f"h.{i}.attn.bias": ones(1, 1, 16, 16).tril() for i in range(4) if family == "gpt2"}
    save_file(tensors | masks, path, {"format": "pt"})
    found = read(tmp_path, model)
    assert all(np.array_equal(found[name], x) for name, x in expected.items())
    write_weights(tmp_path / "out", model, found, source_of(open_weights(tmp_path, model)[0]))
    assert {*load_file(tmp_path / "out" / path.name)} == {*tensors}
    name = next(name for name in tensors if "0" in name)
    save_file({**tensors, prefix + name: tensors[name] + 1}, path, {"format": "pt"})
    with pytest.raises(ConfigError, match=f"twice +{prefix}{name}: also as {name}"):
        open_weights(tmp_path, model)


# ---------------------------------------------------------------------------------------------------------------------
# config.json
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "family, change, said",
    [
        ("llama", {"model_type": "gemma"}, 'model_type: "gemma"'),
        ("llama", {"hidden_act": "gelu"}, 'hidden_act: "gelu"'),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "default, linear, llama3"),
        ("llama", {"rope_parameters": {**LLAMA3, "attention_factor": 2}}, r"\['attention_factor'\] cannot"),
        ("llama", {"rope_parameters": {"rope_type": "linear"}}, "no factor"),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout: 0.1"),
        ("llama", {"layer_types": ["sliding_attention"] * 4}, "layer_types"),
        ("llama", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("llama", {"is_causal": False}, "is_causal: false"),
        ("qwen3", {"per_layer_config": {}}, "per_layer_config"),
        ("llama", {"original_max_position_embeddings": 4}, "original_max_position_embeddings: 4"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": None}, "sliding_window: null"),
        ("qwen3", {"layer_types": ["full_attention", "chunked_attention"] * 2}, "chunked_attention"),
        ("qwen3-moe", {"mlp_only_layers": [4]}, "a list of layers below 4"),
        ("qwen3-moe", {"use_sliding_window": True}, "use_sliding_window: true"),
        ("mixtral", {"num_experts_per_tok": 5}, "top_k=5 with num_experts=4"),
        ("mixtral", {"num_experts": 8}, "num_local_experts: 4"),
        ("gpt2", {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon: 1e-06"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx: true"),
        ("gpt2", {"activation_function": "relu"}, 'activation_function: "relu"'),
        ("gpt2", {"attn_pdrop": 0.1}, "attn_pdrop"),
        ("gpt2", {"num_attention_heads": 2}, "num_attention_heads: 2"),
    ],
)
def test_what_is_not_computed_is_refused_by_field_and_value(family, change, said):
    with pytest.raises(ConfigError, match=said):
        model_from_config(FAMILIES[family] | change)


WITH_WINDOWS = {"use_sliding_window": True, "num_hidden_layers": 30}  # above the default of max_window_layers


@pytest.mark.parametrize(
    ("family", "change"),
    [*((family, {}) for family in ARCHITECTURES), ("qwen2", WITH_WINDOWS), ("qwen3", WITH_WINDOWS)],
)
def test_a_field_that_is_left_out_has_the_default_of_transformers(family, change):
    """One after the other, of all that its class writes; or it is refused. Kinds of layers are said twice."""
    transformers = pytest.importorskip("transformers", reason="pip install -e '.[oracle]'")
    written = transformers.AutoConfig.for_model(family, **change).to_dict()
    whole, refused = model_from_config(written), set()
    for name in written.keys() - change.keys():
        left = {field: value for field, value in written.items() if field not in (name, "layer_types")}
        try:
            assert model_from_config(left) == whole, name
        except ConfigError:
            refused.add(name)
    sizes = {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}
    sizes |= {"max_position_embeddings", "n_embd", "n_layer", "n_head", "n_positions"}
    assert refused - sizes <= {"model_type", "sliding_window"}


def test_a_width_that_heads_do_not_divide_is_no_llama_s():
    """Which transformers refuses to open."""
    model = dataclasses.replace(model_from_config(FAMILIES["llama"]), num_heads=6, num_kv_heads=2, head_dim=16)
    model = dataclasses.replace(model, width=50)
    assert config_of(model)["model_type"] == "mistral" and model_from_config(config_of(model)) == model


@pytest.mark.parametrize("family", FAMILIES)
def test_a_config_there_and_back(family):
    model = model_from_config(FAMILIES[family])
    assert model_from_config(json.loads(json.dumps(config_of(model)))) == model


def test_an_old_config_is_the_new_one():
    old = {name: value for name, value in FAMILIES["llama"].items() if name != "rope_parameters"}
    scaling = {name: value for name, value in LLAMA3.items() if name != "rope_theta"}
    for kind in ("rope_type", "type"):
        scaling = {("type" if name == "rope_type" else name): value for name, value in scaling.items()}
        found = model_from_config({**old, "rope_theta": 100.0, "rope_scaling": {kind: "llama3", **scaling}})
        assert found == model_from_config(FAMILIES["llama"])


def test_mistral_must_say_its_window():
    config = {name: value for name, value in FAMILIES["mistral"].items() if name != "sliding_window"}
    with pytest.raises(ConfigError, match="no sliding_window"):
        model_from_config(config)


def test_kinds_repeat_as_shortly_as_they_can():
    def kinds(**change) -> tuple:
        model = model_from_config(FAMILIES["qwen3-windows"] | change)
        return model.kinds

    full, sliding = "full_attention", "sliding_attention"
    assert kinds() == ("full", "sliding")
    assert kinds(layer_types=[full, sliding, sliding, full]) == ("full", "sliding", "sliding", "full")
    assert kinds(layer_types=None, max_window_layers=3) == ("full", "full", "full", "sliding")
    assert kinds(layer_types=None, max_window_layers=0) == ("sliding",)
    experts = {name: x for name, x in FAMILIES["qwen3-moe"].items() if name != "decoder_sparse_step"}
    for step, found in ((1, ("full",)), (2, ("dense", "full")), (4, ("dense", "dense", "dense", "full"))):
        sparse = {"decoder_sparse_step": step} if step > 1 else {}
        assert model_from_config(experts | {"mlp_only_layers": []} | sparse).kinds == found


def test_whatever_a_config_says_only_one_error_comes_out():
    odd = (None, True, 0, -1, 1.5, 2**70, float("nan"), "x", "", [], [None], {}, {"a": 1}, {"rope_type": []})
    chance = random.Random(0)
    refused = 0
    for _ in range(3000):
        config = dict(FAMILIES[chance.choice(sorted(FAMILIES))])
        names = [
            *config,
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "head_dim",
            "partial_rotary_factor",
            "n_inner",
        ]
        for name in chance.sample(sorted({*names, "sliding_window", "max_window_layers"}), chance.randint(1, 3)):
            config[name] = chance.choice(odd)
        try:
            model = model_from_config(config)
        except ConfigError:
            refused += 1
            continue
        assert model_from_config(config_of(model)) == model
    assert 1500 < refused < 3000
