"""The yardstick: GPT-2 in PyTorch under `torch.compile`, as its users write it. Imported only where torch is installed.

Same shapes as `jaxdist.model`, padded vocabulary included: pre-LayerNorm, learned positions, tanh-GELU, biases, tied
head. Weights in fp32 with bf16 autocast, flash attention through SDPA, fused AdamW, gradients clipped at 1.0.
"""

import math
import time

import torch
from torch import nn
from torch.nn import functional as F

from jaxdist.config import ModelConfig
from jaxdist.model import INIT_STD, LAYER_NORM_EPS


class Block(nn.Module):
    def __init__(self, config: ModelConfig):
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


class GPT2(nn.Module):
    def __init__(self, config: ModelConfig):
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


def measure(
    config: ModelConfig, batch: dict, num_warmup: int, num_steps: int, device: str = "cuda", compiled: bool = True
) -> dict:
    """Train on one batch of NumPy tokens over and over.

    Returns: seconds a step, seconds of the first step (it compiles), losses of the first and last timed step, and the
    peak bytes of tensors during the timed steps (None on the CPU).
    """
    on_gpu = device == "cuda"
    synchronize = torch.cuda.synchronize if on_gpu else (lambda: None)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    with torch.device(device):
        model = GPT2(config)
    run = torch.compile(model, dynamic=False) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=on_gpu)
    inputs, targets = (torch.as_tensor(batch[name], dtype=torch.int64, device=device) for name in ("inputs", "targets"))

    def step():
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = run(inputs, targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    start = time.perf_counter()
    step()
    synchronize()
    first_seconds = time.perf_counter() - start
    for _ in range(num_warmup - 1):
        step()
    synchronize()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    losses = [step() for _ in range(num_steps)]
    synchronize()
    seconds = time.perf_counter() - start
    return {
        "step_seconds": seconds / num_steps,
        "first_step_seconds": first_seconds,
        "first_loss": float(losses[0]),
        "last_loss": float(losses[-1]),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "num_parameters": sum(weight.numel() for weight in model.parameters()),
    }
