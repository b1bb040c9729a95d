"""Presets by name: the sizes of published models, and models by the path of their config.json."""

import dataclasses
import json
import math

import pytest
from flax.traverse_util import flatten_dict

from jaxdist.config import RunConfig, to_dict
from jaxdist.errors import ConfigError
from jaxdist.models.base import split_kinds
from jaxdist.models.declared import num_parameters
from jaxdist.models.huggingface import config_of, model_from_config, tensors_of
from jaxdist.models.lora import LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.models.registry import find_model, model_of, name_of

# Of the files on the Hub, a tied head counted once.
PUBLISHED = {
    "gpt2-124m": 124_439_808,
    "gpt2-1.5b": 1_557_611_200,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "mistral-7b-v0.1": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mixtral-8x7b": 46_702_792_704,
    "mixtral-8x22b": 140_620_634_112,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_preset_has_as_many_parameters_as_were_published(name):
    model = PRESETS[name]
    assert num_parameters(model) == PUBLISHED[name] <= num_parameters(model, padded=True)
    assert sum(math.prod(tensor.shape) for tensor in tensors_of(model)) == PUBLISHED[name]


OURS = {  # those without a file there, and their longest sequences
    **{"proof": (218_112, 32), "tiny": (842_496, 128), "gpt-7m": (7_364_608, 256), "gpt-11m": (10_844_160, 256)},
    **{"gpt2-350m": (354_823_168, 1024), "gpt2-774m": (774_030_080, 1024), "llama3-405b": (405_853_388_800, 8192)},
    **{"12m": (12_682_240, 512), "7b": (6_658_404_352, 2048), "70b": (71_304_830_976, 2048)},
    **{"175b": (174_604_259_328, 2048), "llama-proof": (220_992, 32), "llama-10m": (9_638_784, 256)},
    **{"moe-proof": (468_800, 32), "moe-10m": (7_219_456, 256)},
}


def test_presets_without_a_published_file_keep_their_sizes():
    """Runs and pages name them."""
    assert {*OURS, *PUBLISHED} == {*PRESETS}
    assert {name: (num_parameters(PRESETS[name]), PRESETS[name].seq_len) for name in OURS} == OURS


# Their config.json, by what is in it: model_type, hidden and feed-forward width, layers, heads, key heads, positions,
# vocabulary, base of the rotary frequencies, epsilon, and what else they say.
LLAMA_32 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
QWEN = {"head_dim": 128, "use_sliding_window": False, "attention_bias": False}
MOE = {**QWEN, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1}
TIED = {"tie_word_embeddings": True}
CONFIGS = {
    "llama3-8b": ("llama", 4096, 14336, 32, 32, 8, 8192, 128256, 5e5, 1e-5, {}),
    "llama3-70b": ("llama", 8192, 28672, 80, 64, 8, 8192, 128256, 5e5, 1e-5, {}),
    "llama3.2-1b": (
        *("llama", 2048, 8192, 16, 32, 8, 131072, 128256, 5e5, 1e-5),
        {**TIED, "head_dim": 64, "rope_scaling": {**LLAMA_32, "original_max_position_embeddings": 8192}},
    ),
    "qwen3-0.6b": ("qwen3", 1024, 3072, 28, 16, 8, 40960, 151936, 1e6, 1e-6, {**QWEN, **TIED}),
    "qwen3-8b": ("qwen3", 4096, 12288, 36, 32, 8, 40960, 151936, 1e6, 1e-6, QWEN),
    "qwen3-32b": ("qwen3", 5120, 25600, 64, 64, 8, 40960, 151936, 1e6, 1e-6, QWEN),
    "mistral-7b-v0.1": ("mistral", 4096, 14336, 32, 32, 8, 32768, 32000, 1e4, 1e-5, {"sliding_window": 4096}),
    "mistral-7b-v0.3": ("mistral", 4096, 14336, 32, 32, 8, 32768, 32768, 1e6, 1e-5, {"sliding_window": None}),
    "mixtral-8x7b": ("mixtral", 4096, 14336, 32, 32, 8, 32768, 32000, 1e6, 1e-5, {"num_local_experts": 8}),
    "mixtral-8x22b": ("mixtral", 6144, 16384, 56, 48, 8, 65536, 32000, 1e6, 1e-5, {"num_local_experts": 8}),
    "qwen3-30b-a3b": (
        *("qwen3_moe", 2048, 6144, 48, 32, 4, 40960, 151936, 1e6, 1e-6),
        {**MOE, "moe_intermediate_size": 768},
    ),
    "qwen3-235b-a22b": (
        *("qwen3_moe", 4096, 12288, 94, 64, 4, 40960, 151936, 1e6, 1e-6),
        {**MOE, "moe_intermediate_size": 1536},
    ),
}
FIELDS = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "max_position_embeddings", "vocab_size", "rope_theta", "rms_norm_eps"),
)


@pytest.mark.parametrize(
    "model_type, said, biases",
    [
        ("qwen2", {}, (True, False)),
        ("llama", {}, (False, False)),
        ("llama", {"attention_bias": True}, (True, True)),
        ("qwen3", {"attention_bias": True}, (True, True)),
        ("mistral", {"sliding_window": None}, (False, False)),
    ],
)
def test_attention_has_the_biases_of_its_family(model_type, said, biases):
    values = (model_type, 16, 32, 2, 4, 2, 32, 50, 1e4, 1e-5)
    model = model_from_config(dict(zip(FIELDS, values, strict=True)) | said)
    assert (model.attention_bias, model.out_bias) == biases


def test_gpt_2_is_its_published_config():
    config = {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25, "n_positions": 1024, "n_inner": None}
    config |= {"vocab_size": 50257, **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)}
    assert model_from_config(config) == PRESETS["gpt2-1.5b"]


@pytest.mark.parametrize("name", CONFIGS)
def test_a_preset_is_its_published_config(name):
    *values, more = CONFIGS[name]
    config = {"hidden_act": "silu", "tie_word_embeddings": False, **dict(zip(FIELDS, values, strict=True)), **more}
    assert model_from_config(config) == PRESETS[name]


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_there_and_back(name):
    model = PRESETS[name]
    # Auxiliary losses are a run's, and in no file of a model.
    published = dataclasses.replace(model, balance_loss=0.0, z_loss=0.0) if getattr(model, "num_experts", 0) else model
    assert model_from_config(json.loads(json.dumps(config_of(model)))) == published
    assert model_of(json.loads(json.dumps(to_dict(RunConfig(model))["model"]))) == model
    assert name_of(model) == (name, {})


def test_adapters_are_named_by_what_is_not_their_default():
    base = PRESETS["llama-proof"]
    assert name_of(LoRA(base, rank=4, alpha=8.0)) == ("llama-proof", {"lora": 4})
    assert name_of(LoRA(base, rank=4, alpha=4.0))[1] == {"lora": 4, "lora_alpha": 4.0}


def test_files_name_models_without_config():
    found, plain = (to_dict(RunConfig(PRESETS[name]))["model"] for name in ("llama-proof", "tiny"))
    assert found["class"] == "jaxdist.models.decoder:Decoder" and "class" not in plain


def test_a_decoder_s_initial_values_have_the_spread_of_gpt_2_s():
    """0.02; 0.02 / sqrt(2 layers) of what is added to the residual, twice a layer (GPT-2, section 2.3); norms are 1."""
    model = dataclasses.replace(PRESETS["moe-proof"], num_layers=8, kinds=("dense", "full"), shared_width=32, top_k=8)
    for drawn in split_kinds(model, model.initial_values(0)["blocks"]):
        for name, x in flatten_dict(drawn, sep=".").items():
            last = name.split(".")[-1]
            std = {"w_out": 0.02 / 4, "w_down": 0.02 / 4, "scale": 0.0, "load": 0.0, "faults": 0.0}.get(last, 0.02)
            assert abs(float(x.std()) - std) < 0.1 * std + 1e-9, name
            assert abs(float(x.mean()) - (last == "scale")) < 0.2 * 0.02, name


@pytest.mark.parametrize(
    "text, said",
    [(None, "no file or folder"), ("{", "JSON"), ("[]", "JSON object"), ("{}", "with no model_type")],
)
def test_a_path_that_is_no_config(tmp_path, text, said):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        find_model(str(path))


@pytest.mark.parametrize(
    "change",
    [
        {"rope_theta": 0.0},
        {"rope_theta": math.nan},
        {"norm_eps": -1e-5},
        {"rope_scaling": ("yarn", 2.0)},
        {"rope_scaling": ("linear", 0.0)},
        {"rope_scaling": ("linear", 2.0, 3.0)},
        {"rope_scaling": ("llama3", 8.0, 4.0, 1.0, 8)},
        {"rope_theta": "10000"},
        {"width": "64"},
        {"ffn_width": 192.5},
    ],
)
def test_a_decoder_refuses_numbers_that_nothing_computes_with(change):
    with pytest.raises(ConfigError, match=next(iter(change))):
        dataclasses.replace(PRESETS["llama-proof"], **change)
