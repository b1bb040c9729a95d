"""The yardsticks in PyTorch, as its users write them. Imported only where torch is installed.

`HuggingFaceModel` is what transformers has. TorchGPT2 has the shapes of `jaxdist.models.gpt2`, padded vocabulary
included: pre-LayerNorm, learned positions, tanh-GELU, biases, tied head. Attention is SDPA's, the optimiser AdamW,
gradients are clipped at 1.0.
"""

import contextlib
import math
import os
from dataclasses import replace
from typing import Literal

import torch
from torch import distributed, nn
from torch.nn import functional as F

from jaxdist.models.base import Model
from jaxdist.models.flax import INIT_STD
from jaxdist.models.fused import LAYER_NORM_EPS
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.huggingface import config_of

Wrap = Literal["none", "ddp", "fsdp"]


class Block(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        width, self.num_heads = config.width, config.num_heads
        self.ln_attention = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.ln_mlp = nn.LayerNorm(width, eps=LAYER_NORM_EPS)
        self.up = nn.Linear(width, config.ffn_width)
        self.down = nn.Linear(config.ffn_width, width)

    def forward(self, x_BTD):
        q_BTD, k_BTD, v_BTD = self.qkv(self.ln_attention(x_BTD)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (q_BTD, k_BTD, v_BTD))
        o_BNTH = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x_BTD = x_BTD + self.out(o_BNTH.transpose(1, 2).flatten(2))
        return x_BTD + self.down(F.gelu(self.up(self.ln_mlp(x_BTD)), approximate="tanh"))


class TorchGPT2(nn.Module):
    def __init__(self, config: GPT2Config):
        super().__init__()
        self.tokens = nn.Embedding(config.padded_vocab_size, config.width)
        self.positions = nn.Embedding(config.seq_len, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_final = nn.LayerNorm(config.width, eps=LAYER_NORM_EPS)
        for name, weight in self.named_parameters():
            if weight.ndim == 2:
                residual = name.endswith(("out.weight", "down.weight"))
                nn.init.normal_(weight, std=INIT_STD / math.sqrt(2 * config.num_layers) if residual else INIT_STD)
            elif name.endswith("bias"):
                nn.init.zeros_(weight)

    def forward(self, inputs_BT, targets_BT):
        """Mean cross-entropy, nats per token."""
        x_BTD = self.tokens(inputs_BT) + self.positions.weight[: inputs_BT.shape[1]]
        for block in self.blocks:
            x_BTD = block(x_BTD)
        logits_BTV = F.linear(self.ln_final(x_BTD), self.tokens.weight)
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


class HuggingFaceModel(nn.Module):
    """transformers' model of the same shape, without dropout, under the same signature; experts in its own loop."""

    def __init__(self, config: Model):
        from transformers import AutoConfig, AutoModelForCausalLM

        super().__init__()
        fields = config_of(replace(config, dropout=0.0) if isinstance(config, GPT2Config) else config)
        fields |= {"vocab_size": config.padded_vocab_size, "use_cache": False, "experts_implementation": "eager"}
        chosen = AutoConfig.for_model(**fields)
        self.model = AutoModelForCausalLM.from_config(chosen, attn_implementation="sdpa")

    def forward(self, inputs_BT, targets_BT):
        logits_BTV = self.model(inputs_BT).logits
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), targets_BT.flatten())


class Training:
    """A model, its optimiser and one batch that is trained on over and over.

    batch: NumPy `inputs` and `targets`; with `wrap`, the rows of this process of a torch.distributed group. dtype: that
    of autocast, None for fp32 throughout.
    """

    def __init__(
        self,
        config: Model,
        batch: dict,
        device: str = "cuda",
        compiled: bool = True,
        dtype: torch.dtype | None = torch.bfloat16,
        model: type[nn.Module] = TorchGPT2,
        wrap: Wrap = "none",
    ):
        self.on_gpu, self._device, self._dtype = device == "cuda", device, dtype
        torch.manual_seed(0)
        torch.set_float32_matmul_precision("high")
        with torch.device(device):
            self.model = model(config)
        if wrap == "ddp":
            self.model = nn.parallel.DistributedDataParallel(self.model)
        elif wrap == "fsdp":
            from torch.distributed.fsdp import fully_shard

            for block in self.model.blocks:
                fully_shard(block)
            fully_shard(self.model)
        self._run = torch.compile(self.model, dynamic=False) if compiled else self.model
        parameters = self.model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
        self._inputs, self._targets = (
            torch.as_tensor(batch[name], dtype=torch.int64, device=device) for name in ("inputs", "targets")
        )

    def step(self) -> torch.Tensor:
        autocast = contextlib.nullcontext()
        if self._dtype is not None:
            autocast = torch.autocast(self._device, dtype=self._dtype)
        with autocast:
            loss = self._run(self._inputs, self._targets)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    def synchronize(self) -> None:
        if self.on_gpu:
            torch.cuda.synchronize()

    def release(self) -> None:
        """Give memory back that no tensor uses."""
        if self.on_gpu:
            torch.cuda.empty_cache()


def join(rank: int, num_processes: int, port: int) -> None:
    """Form a gloo group of `num_processes` on this machine, which share its cores."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_processes))
    address = f"tcp://127.0.0.1:{port}"
    distributed.init_process_group("gloo", init_method=address, rank=rank, world_size=num_processes)
