"""Hugging Face's config.json and tensor names: which model they describe, and where each of our parameters is kept.

Nothing is guessed. Whatever a file says that `Decoder` or `GPT2` cannot compute is refused by field and value; a field
that it leaves out has the default of transformers' class of that `model_type`.
"""

import itertools
import json
import math
import re
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from jaxdist.errors import MOST, ConfigError, reason_of, require_positive
from jaxdist.files import read_text_file
from jaxdist.models.base import Model, declare
from jaxdist.models.declared import BOUNDS
from jaxdist.models.decoder import DENSE, FULL, SLIDING, DecoderConfig
from jaxdist.models.fused import LAYER_NORM_EPS
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.params import STACKED, named_params

CONFIG = "config.json"
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
}
MIXTURES = ("mixtral", "qwen3_moe")
KINDS = {FULL: "full_attention", SLIDING: "sliding_attention", DENSE: "full_attention"}
# Parameters of a scaling of rotary frequencies, in the order of `Rotary.scaling`.
ROPE_SCALING = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
ROPE_THETA = 10_000.0  # where a file does not name one
MIXTRAL_THETA = 1_000_000.0


# ---------------------------------------------------------------------------------------------------------------------
# config.json -> model
# ---------------------------------------------------------------------------------------------------------------------


def read_model(path: Path | str) -> Model:
    """The model that a config.json, or the folder it is in, describes. Raises: ConfigError."""
    path = Path(path)
    path = path / CONFIG if path.is_dir() else path
    if not path.exists():
        remedy = "Name a folder of transformers, or its config.json"
        raise ConfigError(f"the model in {str(path)!r}", "there is no file or folder of that name", remedy)
    text = read_text_file("the model in", path)
    try:
        config = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"the model in {str(path)!r}", f"must be JSON ({reason_of(error)})", "Fetch it again"
        ) from error
    if not isinstance(config, dict):
        raise ConfigError(f"the model in {str(path)!r}", "must be a JSON object", "Fetch it again")
    return model_from_config(config, str(path))


def model_from_config(config: dict, where: str = CONFIG) -> Model:
    """The model that a config.json describes. where: the file, for messages.

    Raises: ConfigError naming the field and its value, where we compute something else than transformers would.
    """
    fields = _Fields(config, where)
    model_type = fields.one_of("model_type", tuple(ARCHITECTURES))
    for name in ("quantization_config", "auto_map", "per_layer_config"):
        fields.one_of(name, (None,), None)
    fields.one_of("is_causal", (True,), True)  # which transformers' masks obey in every family
    return _gpt2(fields) if model_type == "gpt2" else _decoder(fields, model_type)


@dataclass(frozen=True)
class _Fields:
    """The fields of a config.json, each checked where it is read."""

    config: dict
    where: str

    def refuse(self, name: str, required: str, remedy: str = "Use another model", value: Any = ...) -> ConfigError:
        value = self.config.get(name) if value is ... else value
        shown = f"{name}: {json.dumps(value)}" if name in self.config else f"no {name}"
        return ConfigError(f"{self.where} with {shown}", required, remedy)

    def one_of(self, name: str, values: tuple, *default: Any) -> Any:
        value = self.config.get(name, *default)
        if not any(value == known and type(value) is type(known) for known in values):
            known = " or ".join(json.dumps(known) for known in values)
            raise self.refuse(name, f"must be {known} to be computed here")
        return value

    def size(self, name: str, *default: int | None) -> int:
        """A whole number above 0. default: where the field is missing or null."""
        value = self.config.get(name)
        value = default[0] if value is None and default else value
        if type(value) is not int or not 1 <= value <= MOST:
            raise self.refuse(name, f"must be a whole number from 1 to {MOST:,}", "Fix the file")
        return value

    def number(self, name: str, default: float | None = None, of: dict | None = None) -> float:
        """A number above 0, of the file or of a dict in it."""
        value: Any = (self.config if of is None else of).get(name, default)
        if type(value) not in (int, float) or not 0 < value < math.inf:
            raise self.refuse(name, "must be a number above 0", "Fix the file", value)
        return value

    def flag(self, name: str, default: bool) -> bool:
        return self.one_of(name, (False, True), default)


def _gpt2(fields: _Fields) -> GPT2Config:
    fields.one_of("activation_function", ("gelu_new", "gelu_pytorch_tanh"), "gelu_new")
    fields.one_of("layer_norm_epsilon", (LAYER_NORM_EPS,), LAYER_NORM_EPS)
    for name, value in GPT2_FLAGS.items():
        fields.one_of(name, (value,), value)
    rates = [fields.config.get(name, 0.1) for name in GPT2_DROPOUT]
    if any(type(rate) not in (int, float) or rate != rates[0] for rate in rates):
        raise fields.refuse(GPT2_DROPOUT[0], f"{', '.join(GPT2_DROPOUT)} must be one rate here", "Make them equal")
    for name, alias in GPT2_ALIASES.items():
        if fields.config.get(alias, fields.config.get(name)) != fields.config.get(name):
            raise fields.refuse(alias, f"must be {name}, which it is another name of", "Leave one of them out")
    width = fields.size("n_embd")
    return GPT2Config(
        num_layers=fields.size("n_layer"),
        width=width,
        num_heads=fields.size("n_head"),
        ffn_width=fields.size("n_inner", 4 * width),
        seq_len=fields.size("n_positions"),
        vocab_size=fields.size("vocab_size"),
        dropout=float(rates[0]),
    )


GPT2_ALIASES = {
    "n_embd": "hidden_size",
    "n_positions": "max_position_embeddings",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
}
GPT2_DROPOUT = ("resid_pdrop", "embd_pdrop", "attn_pdrop")
GPT2_FLAGS = {
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "reorder_and_upcast_attn": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def _decoder(fields: _Fields, model_type: str) -> DecoderConfig:
    fields.one_of("hidden_act", ("silu",), "silu")
    if fields.config.get("attention_dropout", 0) != 0:
        raise fields.refuse("attention_dropout", "must be 0: these layers have no dropout", "Use 0")
    width, heads, num_layers = map(fields.size, ("hidden_size", "num_attention_heads", "num_hidden_layers"))
    require_positive("num_layers", num_layers, BOUNDS["num_layers"])
    has_flag = model_type in ("llama", "qwen3", "qwen3_moe")
    bias = fields.flag("attention_bias", False) if has_flag else model_type == "qwen2"
    kinds = _kinds(fields, model_type, num_layers)
    theta, scaling = _rope(fields, MIXTRAL_THETA if model_type == "mixtral" else ROPE_THETA)
    head_dim = 128 if model_type == "qwen3" else width // heads
    if fields.config.get("head_dim") is None and model_type != "qwen3" and width % heads:
        raise fields.refuse("head_dim", f"hidden_size {width} must divide by {heads} heads", "Fix the file")
    kv_heads = {"llama": heads, "mistral": 8, "qwen2": 32, "qwen3": 32, "mixtral": 8, "qwen3_moe": 4}[model_type]
    if "num_key_value_heads" in fields.config:  # where null has another meaning than absence
        kv_heads = heads
    return DecoderConfig(
        num_layers=num_layers,
        width=width,
        num_heads=heads,
        num_kv_heads=fields.size("num_key_value_heads", kv_heads),
        head_dim=fields.size("head_dim", head_dim),
        ffn_width=fields.size("intermediate_size"),
        seq_len=fields.size("max_position_embeddings"),
        vocab_size=fields.size("vocab_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=fields.number("rms_norm_eps", 1e-5 if model_type == "mixtral" else 1e-6),
        qk_norm=model_type in ("qwen3", "qwen3_moe"),
        attention_bias=bias,
        out_bias=bias and model_type != "qwen2",
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
        tied=fields.flag("tie_word_embeddings", False),
        window=fields.size("sliding_window") if SLIDING in kinds else None,
        kinds=kinds,
        **(_mixture(fields, model_type) if model_type in MIXTURES else {}),
    )


def _mixture(fields: _Fields, model_type: str) -> dict:
    """Every layer's experts. Their balance loss is another than ours, and is a setting of a run: it is not read."""
    counts = [name for name in ("num_experts", "num_local_experts") if name in fields.config]
    experts = fields.size(counts[0]) if counts else {"mixtral": 8, "qwen3_moe": 128}[model_type]
    if counts and fields.config[counts[-1]] != experts:
        raise fields.refuse(counts[-1], f"must be {counts[0]}, which it is another name of", "Leave one of them out")
    chosen = fields.size("num_experts_per_tok", {"mixtral": 2, "qwen3_moe": 8}[model_type])
    found = {"num_experts": experts, "top_k": chosen}
    if model_type == "mixtral":
        fields.one_of("router_jitter_noise", (0, 0.0), 0)
        return found
    width = fields.size("moe_intermediate_size", 768)
    return found | {"expert_width": width, "normalised": fields.flag("norm_topk_prob", False)}


def _rope(fields: _Fields, default: float) -> tuple[float, tuple]:
    """(theta, scaling), of `rope_parameters` as transformers 5 writes it, or `rope_theta` and `rope_scaling`."""
    names = [name for name in ("rope_parameters", "rope_scaling") if fields.config.get(name)]
    if len(names) == 2 and fields.config[names[0]] != fields.config[names[1]]:
        raise fields.refuse(names[1], f"must be what {names[0]} is", "Leave one of them out")
    name = names[0] if names else "rope_scaling"
    rope = fields.config.get(name) or {}
    if not isinstance(rope, dict):
        raise fields.refuse(name, "must be an object", "Fix the file")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in ROPE_SCALING or rope.get("type", kind) != kind:
        raise fields.refuse(name, f"its type must be one of {', '.join(ROPE_SCALING)} to be computed here")
    unknown = rope.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor", *ROPE_SCALING[kind]}
    whole = rope.get("partial_rotary_factor", fields.config.get("partial_rotary_factor"))
    if unknown or whole not in (None, 1):
        raise fields.refuse(
            name, f"of the type {kind}, {sorted(unknown) or 'a part of a head'} cannot be computed here"
        )
    scaling = tuple(fields.number(part, of=rope) for part in ROPE_SCALING[kind])
    outside = "original_max_position_embeddings"  # of which transformers takes the one outside
    if kind == "llama3" and fields.config.get(outside, scaling[3]) != scaling[3]:
        raise fields.refuse(outside, f"must be the {scaling[3]} of {name}", "Leave it out")
    if kind == "llama3" and not scaling[1] < scaling[2]:
        raise fields.refuse(name, "low_freq_factor must be below high_freq_factor", "Fix the file")
    theta = float(fields.number("rope_theta", fields.config.get("rope_theta", default), of=rope))
    return theta, (kind, *scaling) if scaling else ()


def _kinds(fields: _Fields, model_type: str, num_layers: int) -> tuple[str, ...]:
    """The kinds of the layers, as short as they repeat."""
    if model_type == "mistral":
        if "sliding_window" not in fields.config:
            raise fields.refuse("sliding_window", "the file must say which, null for none", "Add the field")
        kinds = [FULL if fields.config["sliding_window"] is None else SLIDING] * num_layers
    elif model_type == "mixtral":
        kinds = [FULL if fields.config.get("sliding_window") is None else SLIDING] * num_layers
    elif model_type == "qwen3_moe":
        fields.one_of("use_sliding_window", (False,), False)
        step, dense = fields.size("decoder_sparse_step", 1), fields.config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(type(i) is int and 0 <= i < num_layers for i in dense):
            raise fields.refuse("mlp_only_layers", f"must be a list of layers below {num_layers}", "Fix the file")
        kinds = [DENSE if i in dense or (i + 1) % step else FULL for i in range(num_layers)]
    elif model_type in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False):
        first = fields.config.get("max_window_layers", 28)
        if type(first) is not int or first < 0:
            raise fields.refuse("max_window_layers", "must be a whole number, 0 or more", "Fix the file")
        kinds = [SLIDING if layer >= first else FULL for layer in range(num_layers)]
        if fields.config.get("sliding_window") is None:
            raise fields.refuse("sliding_window", "must be given: use_sliding_window is true", "Fix the file")
    else:
        kinds = [FULL] * num_layers
    types = fields.config.get("layer_types")
    if types is not None:
        names = {KINDS[ours]: ours for ours in (FULL, SLIDING)}
        if not isinstance(types, list) or len(types) != num_layers or not {*map(str, types)} <= names.keys():
            raise fields.refuse("layer_types", f"must be a list of {num_layers}, each {' or '.join(names)}")
        given = [DENSE if ours == DENSE else names[each] for each, ours in zip(types, kinds, strict=True)]
        may_differ = model_type in ("qwen2", "qwen3") and fields.flag("use_sliding_window", False)
        if given != kinds and not may_differ:
            raise fields.refuse("layer_types", f"must all be {KINDS[kinds[0]]}, as this {model_type}'s fields say")
        kinds = given
    periods = (n for n in range(1, num_layers + 1) if num_layers % n == 0)
    return tuple(next(kinds[:n] for n in periods if kinds[:n] * (num_layers // n) == kinds))


# ---------------------------------------------------------------------------------------------------------------------
# model -> config.json
# ---------------------------------------------------------------------------------------------------------------------


def config_of(model: Model) -> dict:
    """The config.json of a model, with which `model_from_config` gives it back. Raises: ConfigError where none does."""
    if isinstance(model, GPT2Config):
        found = {
            "n_layer": model.num_layers,
            "n_embd": model.width,
            "n_head": model.num_heads,
            "n_inner": model.ffn_width,
            "n_positions": model.seq_len,
            "vocab_size": model.vocab_size,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": LAYER_NORM_EPS,
            **dict.fromkeys(GPT2_DROPOUT, model.dropout),
            **GPT2_FLAGS,
        }
        return _named("gpt2", found)
    if not isinstance(model, DecoderConfig):
        raise ConfigError(f"model {type(model).__name__}", "must be known to transformers", "Export a decoder or GPT-2")
    kind, *scaling = model.rope_scaling or ("default",)
    found = {
        "num_hidden_layers": model.num_layers,
        "hidden_size": model.width,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "intermediate_size": model.ffn_width,
        "max_position_embeddings": model.seq_len,
        "vocab_size": model.vocab_size,
        "hidden_act": "silu",
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rope_theta,
        "rope_scaling": {"rope_type": kind, **dict(zip(ROPE_SCALING[kind], scaling, strict=True))} if scaling else None,
        "tie_word_embeddings": model.tied,
        "attention_dropout": 0.0,
    }
    layers = [KINDS[kind] for kind in model.kinds * model.num_blocks]
    windows = {"use_sliding_window": model.window is not None, "sliding_window": model.window, "layer_types": layers}
    candidates: dict[str, dict] = {
        "llama": {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias},
        "mistral": {"sliding_window": model.window},
        "qwen2": windows,
        "qwen3": windows | {"attention_bias": model.attention_bias},
    }
    if model.width % model.num_heads:  # which transformers' Llama refuses
        del candidates["llama"]
    if model.num_experts:
        candidates, model = _mixture_candidates(model), _as_published(model)
    for model_type, more in candidates.items():
        config = _named(model_type, found | more)
        try:
            if model_from_config(config) == model:
                return config
        except ConfigError:
            continue
    raise ConfigError(
        f"model {model.describe()}",
        f"its biases, norms, windows and experts together must be those of one of {', '.join(candidates)}",
        "Export a model of one of these families",
    )


def _mixture_candidates(model: DecoderConfig) -> dict[str, dict]:
    """The fields of a mixture of experts in each family that has one."""
    chosen = {"num_experts_per_tok": model.top_k, "output_router_logits": False}
    dense = [i for i, kind in enumerate(model.kinds * model.num_blocks) if kind == DENSE]
    return {
        "mixtral": chosen
        | {
            "intermediate_size": model.width_of_expert,
            "num_local_experts": model.num_experts,
            "router_jitter_noise": 0.0,
            "sliding_window": model.window,
        },
        "qwen3_moe": chosen
        | {
            "num_experts": model.num_experts,
            "moe_intermediate_size": model.width_of_expert,
            "norm_topk_prob": model.normalised,
            "decoder_sparse_step": 1,
            "mlp_only_layers": dense,
            "use_sliding_window": False,
            "attention_bias": model.attention_bias,
        },
    }


def _as_published(model: DecoderConfig) -> DecoderConfig:
    """Without what is a run's choice, and in no file: what is dropped, and auxiliary losses."""
    width = model.width_of_expert
    widths = {"expert_width": width} if model.qk_norm else {"ffn_width": width, "expert_width": None}
    return replace(model, capacity=None, balance_loss=0.0, z_loss=0.0, **widths)


def _named(model_type: str, fields: dict) -> dict:
    return {"architectures": [ARCHITECTURES[model_type]], "model_type": model_type, **fields}


# ---------------------------------------------------------------------------------------------------------------------
# Tensors
# ---------------------------------------------------------------------------------------------------------------------

# Our path: their name, and how the two are laid out. Dims: D model, V vocabulary, P positions, N query heads, K heads
# of keys and values, H head dim, F feed-forward, C the three of q, k and v; those in brackets are one dim of theirs.
# (PyTorch's Linear keeps [out, in]; GPT-2's Conv1D keeps [in, out].) Both rotate the halves of a head, so heads
# need no reordering.
DECODER = {
    "tokens": ("model.embed_tokens.weight", "V D -> V D"),
    "norm.scale": ("model.norm.weight", "D -> D"),
    "head": ("lm_head.weight", "V D -> V D"),
}
DECODER_LAYERS = "model.layers.{}."
DECODER_LAYER = {
    "attention_norm.scale": ("input_layernorm.weight", "D -> D"),
    "attention.w_q": ("self_attn.q_proj.weight", "D N H -> (N H) D"),
    "attention.w_k": ("self_attn.k_proj.weight", "D K H -> (K H) D"),
    "attention.w_v": ("self_attn.v_proj.weight", "D K H -> (K H) D"),
    "attention.b_q": ("self_attn.q_proj.bias", "N H -> (N H)"),
    "attention.b_k": ("self_attn.k_proj.bias", "K H -> (K H)"),
    "attention.b_v": ("self_attn.v_proj.bias", "K H -> (K H)"),
    "attention.w_out": ("self_attn.o_proj.weight", "N H D -> D (N H)"),
    "attention.b_out": ("self_attn.o_proj.bias", "D -> D"),
    "attention.q_norm.scale": ("self_attn.q_norm.weight", "H -> H"),
    "attention.k_norm.scale": ("self_attn.k_norm.weight", "H -> H"),
    "mlp_norm.scale": ("post_attention_layernorm.weight", "D -> D"),
    "mlp.w_gate": ("mlp.gate_proj.weight", "D F -> F D"),
    "mlp.b_gate": ("mlp.gate_proj.bias", "F -> F"),
    "mlp.w_up": ("mlp.up_proj.weight", "D F -> F D"),
    "mlp.b_up": ("mlp.up_proj.bias", "F -> F"),
    "mlp.w_down": ("mlp.down_proj.weight", "F D -> D F"),
    "mlp.b_down": ("mlp.down_proj.bias", "D -> D"),
}
# Of each expert there is one tensor; `{}` is its number.
MIXTRAL_LAYER = {
    "mlp.router.w": ("block_sparse_moe.gate.weight", "D E -> E D"),
    "mlp.w_gate": ("block_sparse_moe.experts.{}.w1.weight", "D F -> F D"),
    "mlp.w_up": ("block_sparse_moe.experts.{}.w3.weight", "D F -> F D"),
    "mlp.w_down": ("block_sparse_moe.experts.{}.w2.weight", "F D -> D F"),
}
QWEN3_MOE_LAYER = {
    "mlp.router.w": ("mlp.gate.weight", "D E -> E D"),
    "mlp.w_gate": ("mlp.experts.{}.gate_proj.weight", "D F -> F D"),
    "mlp.w_up": ("mlp.experts.{}.up_proj.weight", "D F -> F D"),
    "mlp.w_down": ("mlp.experts.{}.down_proj.weight", "F D -> D F"),
}
GPT2_OUTER = {
    "tokens": ("transformer.wte.weight", "V D -> V D"),
    "positions": ("transformer.wpe.weight", "P D -> P D"),
    "ln_final.scale": ("transformer.ln_f.weight", "D -> D"),
    "ln_final.bias": ("transformer.ln_f.bias", "D -> D"),
}
GPT2_LAYERS = "transformer.h.{}."
GPT2_LAYER = {
    "ln_attention.scale": ("ln_1.weight", "D -> D"),
    "ln_attention.bias": ("ln_1.bias", "D -> D"),
    "attention.w_qkv": ("attn.c_attn.weight", "D C N H -> D (C N H)"),
    "attention.b_qkv": ("attn.c_attn.bias", "C N H -> (C N H)"),
    "attention.w_out": ("attn.c_proj.weight", "N H D -> (N H) D"),
    "attention.b_out": ("attn.c_proj.bias", "D -> D"),
    "ln_mlp.scale": ("ln_2.weight", "D -> D"),
    "ln_mlp.bias": ("ln_2.bias", "D -> D"),
    "mlp.w_up": ("mlp.c_fc.weight", "D F -> D F"),
    "mlp.b_up": ("mlp.c_fc.bias", "F -> F"),
    "mlp.w_down": ("mlp.c_proj.weight", "F D -> F D"),
    "mlp.b_down": ("mlp.c_proj.bias", "D -> D"),
}
HEAD = DECODER["head"][0]
# What files hold beside parameters, which transformers makes by itself.
BUFFERS = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias|model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Tensor:
    """A tensor of theirs, and the part of a parameter of ours that it holds.

    shape: as it is stored. view: the stored shape with its dims taken apart; `reshape(view).transpose(order)` is ours.
    path, index: of ours; () for all of it, outside of the layers; (layer,) within a stacked parameter, or (layer,
    expert).
    """

    name: str
    path: str
    index: tuple[int, ...]
    shape: tuple[int, ...]
    view: tuple[int, ...]
    order: tuple[int, ...]


@cache
def tensors_of(model: Model) -> tuple[Tensor, ...]:
    """Every tensor of a model as transformers names it, once: a head that is the token table is the table."""
    outer, prefix, layers = _names_of(model)
    found = []
    for path, param in named_params(declare(model)):
        head, _, rest = path.partition(".")
        if param.update == "count":  # of a run, and not of the model
            continue
        if head != STACKED:
            name, layout = outer[path]
            shape = param.shape if param.real is None else (param.real, *param.shape[1:])
            found.append(_tensor(name, path, (), shape, layout))
            continue
        place = 0
        if len(model.kinds) > 1:  # blocks.0_full.mlp.w_up
            number, _, rest = rest.partition(".")
            place = int(number.partition("_")[0])
        names = layers
        if getattr(model, "num_experts", 0) and model.kinds[place] != DENSE:
            names = layers | (QWEN3_MOE_LAYER if model.qk_norm else MIXTRAL_LAYER)
        name, layout = names[rest]
        experts = [(expert,) for expert in range(param.shape[1])] if "{}" in name else [()]
        found += [
            _tensor(
                prefix.format(block * len(model.kinds) + place) + name.format(*expert),
                path,
                (block, *expert),
                param.shape[1 + len(expert) :],
                layout,
            )
            for block in range(model.num_blocks)
            for expert in experts
        ]
    return tuple(found)


def _names_of(model: Model) -> tuple[dict, str, dict]:
    """(names outside the layers, the prefix of a layer, names in it)."""
    if isinstance(model, GPT2Config):
        return GPT2_OUTER, GPT2_LAYERS, GPT2_LAYER
    if not isinstance(model, DecoderConfig):
        raise ConfigError(f"model {type(model).__name__}", "must be known to transformers", "Use a decoder or GPT-2")
    if not model.num_experts:
        return DECODER, DECODER_LAYERS, DECODER_LAYER
    if model.shared_width or model.router_score != "softmax" or model.balance_rate or model.routed_scale != 1:
        raise ConfigError(
            f"model {model.describe()}",
            "a mixture of experts must be like transformers' Mixtral or Qwen3-MoE, which are known here",
            "Leave out shared_width, balance_rate, routed_scale and router_score='sigmoid'",
        )
    return DECODER, DECODER_LAYERS, DECODER_LAYER


def _tensor(name: str, path: str, index: tuple[int, ...], shape: tuple[int, ...], layout: str) -> Tensor:
    ours, theirs = layout.split(" -> ")
    sizes = dict(zip(ours.split(), shape, strict=True))
    groups = [group.strip("()").split() for group in re.findall(r"\(.*?\)|\w", theirs)]
    dims = list(itertools.chain(*groups))
    stored = tuple(math.prod(sizes[dim] for dim in group) for group in groups)
    return Tensor(
        name, path, index, stored, tuple(sizes[dim] for dim in dims), tuple(dims.index(dim) for dim in ours.split())
    )


def in_full(name: str, model: Model) -> str:
    """A tensor's name with the prefix that files of a bare body leave out."""
    prefix = "transformer." if isinstance(model, GPT2Config) else "model."
    return name if name.startswith((prefix, HEAD)) else prefix + name
