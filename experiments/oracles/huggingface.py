"""A second oracle: transformers' models, with weights that it made itself or that a folder holds.

GPT-2 is trained by torch's AdamW in float64. Of any model: logits, the mean loss and every gradient, under its names.
It imports nothing of the package, and only where torch and transformers are installed (`pip install -e '.[oracle]'`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging

logging.set_verbosity_error()
logging.disable_progress_bar()

# Our name: theirs inside a block, and the shape of one of ours, in which D is the width and N the heads.
BLOCK = {
    "ln_attention.scale": ("ln_1.weight", lambda x, heads: x),
    "ln_attention.bias": ("ln_1.bias", lambda x, heads: x),
    "attention.w_qkv": ("attn.c_attn.weight", lambda x, heads: x.reshape(len(x), 3, heads, -1)),
    "attention.b_qkv": ("attn.c_attn.bias", lambda x, heads: x.reshape(3, heads, -1)),
    "attention.w_out": ("attn.c_proj.weight", lambda x, heads: x.reshape(heads, -1, x.shape[-1])),
    "attention.b_out": ("attn.c_proj.bias", lambda x, heads: x),
    "ln_mlp.scale": ("ln_2.weight", lambda x, heads: x),
    "ln_mlp.bias": ("ln_2.bias", lambda x, heads: x),
    "mlp.w_up": ("mlp.c_fc.weight", lambda x, heads: x),
    "mlp.b_up": ("mlp.c_fc.bias", lambda x, heads: x),
    "mlp.w_down": ("mlp.c_proj.weight", lambda x, heads: x),
    "mlp.b_down": ("mlp.c_proj.bias", lambda x, heads: x),
}
ROOT = {
    "positions": "transformer.wpe.weight",
    "ln_final.scale": "transformer.ln_f.weight",
    "ln_final.bias": "transformer.ln_f.bias",
}
TABLE = "transformer.wte.weight"


@dataclass(frozen=True)
class Shape:
    num_layers: int
    width: int
    num_heads: int
    ffn_width: int
    seq_len: int
    vocab_size: int
    padded_vocab_size: int


class Gpt2:
    """The model, in our names: `parameters`, `train`."""

    def __init__(self, shape: Shape, seed: int):
        self.shape = shape
        torch.manual_seed(seed)
        config = GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.seq_len,
            n_embd=shape.width,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_inner=shape.ffn_width,
            layer_norm_epsilon=1e-5,
            initializer_range=0.08,
            **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
            use_cache=False,
            attn_implementation="eager",
        )
        self.model = GPT2LMHeadModel(config)
        with torch.no_grad():  # scales of 1 and biases of 0 would hide what is done with them
            for weight in self.model.parameters():
                if weight.ndim == 1:
                    weight += 0.1 * torch.randn(weight.shape)
        self.model = self.model.double()

    def parameters(self) -> dict[str, np.ndarray]:
        return self._in_our_names({name: x.detach() for name, x in self.model.named_parameters()})

    def _in_our_names(self, theirs: dict[str, torch.Tensor]) -> dict[str, np.ndarray]:
        arrays = {name: x.numpy().copy() for name, x in theirs.items()}
        ours = {name: arrays[there] for name, there in ROOT.items()}
        ours["tokens"] = np.pad(arrays[TABLE], [(0, self.shape.padded_vocab_size - self.shape.vocab_size), (0, 0)])
        for name, (there, reshape) in BLOCK.items():
            layers = [arrays[f"transformer.h.{i}.{there}"] for i in range(self.shape.num_layers)]
            ours[f"blocks.{name}"] = np.stack([reshape(x, self.shape.num_heads) for x in layers])
        return ours

    def mean_loss(self, batch: dict) -> torch.Tensor:
        tokens = torch.as_tensor(np.asarray(batch["inputs"]), dtype=torch.int64)
        targets = torch.as_tensor(np.asarray(batch["targets"]), dtype=torch.int64)
        return _mean_loss(self.model(tokens).logits, targets)

    def train(
        self,
        batches: list[dict],
        rates: list[float],
        betas: tuple[float, float],
        eps: float,
        weight_decay: float,
        clip_norm: float,
    ) -> dict:
        """AdamW at the given learning rates: losses, norms, gradients, parameters, moments, evaluation."""
        named = dict(self.model.named_parameters())
        matrices = [x for x in named.values() if x.ndim > 1]
        vectors = [x for x in named.values() if x.ndim == 1]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, betas=betas, eps=eps)
        losses, norms, gradients = [], [], []
        for batch, rate in zip(batches, rates, strict=True):
            optimizer.zero_grad(set_to_none=True)
            loss = self.mean_loss(batch)
            loss.backward()
            losses.append(loss.item())
            gradients.append(self._in_our_names({name: x.grad for name, x in named.items()}))
            norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(x.grad) for x in named.values()]))
            norms.append(float(norm))
            for x in named.values():
                x.grad *= min(1.0, clip_norm / float(norm))
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        moments = {
            kind: self._in_our_names({name: optimizer.state[x][there] for name, x in named.items()})
            for kind, there in (("m", "exp_avg"), ("v", "exp_avg_sq"))
        }
        with torch.no_grad():
            evaluation = float(self.mean_loss(batches[-1]))
        return {
            "losses": losses,
            "norms": norms,
            "gradients": gradients,
            "parameters": self.parameters(),
            "moments": moments,
            "evaluation": evaluation,
        }


# ---------------------------------------------------------------------------------------------------------------------
# Any causal model
# ---------------------------------------------------------------------------------------------------------------------


EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}  # fused ones take no float64


@contextmanager
def _computed_in(dtype: torch.dtype) -> Iterator[None]:
    """transformers makes norms, softmax, rotary angles and routers in float32: here it is the dtype given."""
    names = [mock.patch.object(torch, name, dtype) for name in ("float32", "float")]
    with names[0], names[1], mock.patch.object(torch.Tensor, "float", lambda x: x.to(dtype)):
        yield


class CausalLM:
    """A model of transformers, with eager attention, in evaluation mode.

    config: as in config.json, with `model_type`. Weights are random; every scale and bias is off its 1 or 0, and
    matrices are large enough that attention is not uniform.
    """

    def __init__(self, config: dict, seed: int = 0, dtype: str = "float64"):
        values = {name: value for name, value in config.items() if name != "model_type"}
        torch.manual_seed(seed)
        self.dtype = getattr(torch, dtype)
        with _computed_in(self.dtype):
            made = CONFIG_MAPPING[config["model_type"]](**values, initializer_range=0.1)
            self.model = AutoModelForCausalLM.from_config(made, **EAGER)
        with torch.no_grad():
            for weight in self.model.parameters():
                if weight.ndim == 1:
                    weight += 0.2 * torch.randn(weight.shape)
        self.model = self.model.to(self.dtype).eval()

    @classmethod
    def load(cls, folder: Path | str, dtype: str = "float64") -> "CausalLM":
        """The one that a folder holds, in this dtype."""
        found = cls.__new__(cls)
        found.dtype = getattr(torch, dtype)
        with _computed_in(found.dtype):
            found.model = AutoModelForCausalLM.from_pretrained(folder, dtype=found.dtype, **EAGER)
        found.model = found.model.to(found.dtype).eval()
        return found

    def save(self, folder: Path | str, dtype: str | None = None, max_shard_size: str = "5GB") -> None:
        """Write it as transformers does, in another dtype where one is given (and then it is rounded here too)."""
        if dtype is not None:
            self.model = self.model.to(getattr(torch, dtype))
        self.model.save_pretrained(folder, max_shard_size=max_shard_size)
        self.model = self.model.to(self.dtype)

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """tokens[B, T] -> [B, T, V]."""
        with torch.no_grad(), _computed_in(self.dtype):
            return self.model(torch.as_tensor(np.asarray(tokens), dtype=torch.int64)).logits.numpy()

    def gradients(self, batch: dict) -> tuple[float, dict[str, np.ndarray]]:
        """(mean loss of the targets that are not negative, its gradient by every parameter's name)."""
        self.model.zero_grad(set_to_none=True)
        tokens, targets = (
            torch.as_tensor(np.asarray(batch[name]), dtype=torch.int64) for name in ("inputs", "targets")
        )
        with _computed_in(self.dtype):
            loss = _mean_loss(self.model(tokens).logits, targets)
            loss.backward()
        grads = {name: x.grad.numpy().copy() for name, x in self.model.named_parameters()}
        return loss.item(), _expert_by_expert(self.model.config.model_type, grads)


# The module in which files have a layer's experts, and an expert's gate, up and down, which the model has as two arrays
# of all experts.
EXPERTS = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def _expert_by_expert(model_type: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Under the names that files have, which name every expert."""
    if model_type not in EXPERTS:
        return arrays
    module, parts = EXPERTS[model_type]
    found = {}
    for name, x in arrays.items():
        layer, _, rest = name.partition(".mlp.")
        if rest == "gate.weight":
            found[f"{layer}.{module}.gate.weight"] = x
        elif rest in ("experts.gate_up_proj", "experts.down_proj"):
            pieces = np.split(x, 2, axis=1) if rest == "experts.gate_up_proj" else [x]
            for part, piece in zip(parts[:2] if len(pieces) == 2 else parts[2:], pieces, strict=True):
                found |= {f"{layer}.{module}.experts.{e}.{part}.weight": one for e, one in enumerate(piece)}
        else:
            found[name] = x
    return found


def _mean_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().clamp(min=-1), ignore_index=-1)
