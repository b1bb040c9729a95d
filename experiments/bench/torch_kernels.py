"""PyTorch's side of `experiments.bench kernels`, which starts it: the same operations, eager, timed on request.

A line of its input is "COUNT NAME"; its answer the mean seconds of a call, or why PyTorch refuses the operation.
"""

import json
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F

from jaxdist.models.fused import LAYER_NORM_EPS
from jaxdist.models.gpt2 import GPT2Config

from ..torch_gpt2 import TorchGPT2
from .kernels import BOTH, UPDATE, array_shapes


def operations(config: GPT2Config) -> dict[str, Callable]:
    """Operation -> function(tokens_BT, *arrays), as `experiments.torch_gpt2` writes it; a weight is w[in, out]."""

    def norm(x, scale, bias):
        return F.layer_norm(x, (config.width,), scale, bias, LAYER_NORM_EPS)

    def attention(q_BTNH, k_BTNH, v_BTNH):
        q, k, v = (x.transpose(1, 2) for x in (q_BTNH, k_BTNH, v_BTNH))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    def head(tokens_BT, x_BTD, table_VD, scale_D, bias_D):
        logits_BTV = F.linear(norm(x_BTD, scale_D, bias_D), table_VD)
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), tokens_BT.flatten(), reduction="sum")

    products = [name for name in array_shapes(config, 1) if name.endswith("product")]
    return dict.fromkeys(products, lambda _, x, w: F.linear(x, w.T)) | {
        "head product": lambda _, x, table: F.linear(x, table),
        "attention": lambda _, q, k, v: attention(q, k, v),
        "LayerNorm": lambda _, x, scale, bias: norm(x, scale, bias),
        "GELU": lambda _, x: F.gelu(x, approximate="tanh"),
        "embedding": lambda tokens_BT, tokens, positions: F.embedding(tokens_BT, tokens) + positions,
        "norm, head, cross-entropy": head,
    }


def make_inputs(name: str, config: GPT2Config, batch_size: int, dtype, device: str):
    """Tokens and arrays; a weight lies in memory as `nn.Linear` has it, out x in."""
    tokens_BT = torch.randint(config.vocab_size, (batch_size, config.seq_len), device=device)
    arrays = [torch.randn(shape, dtype=dtype, device=device) for shape in array_shapes(config, batch_size)[name]]
    if name.endswith("product") and name != "head product":
        arrays[1] = arrays[1].T.contiguous().T
    return tokens_BT, [array.requires_grad_() for array in arrays]


def make_call(name: str, config: GPT2Config, batch_size: int, dtype, device: str) -> Callable:
    if name == UPDATE:
        return make_update(config, device)
    kernel, _, what = name.partition(": ")
    tokens_BT, arrays = make_inputs(kernel, config, batch_size, dtype, device)
    function = operations(config)[kernel]
    if not what.endswith(BOTH):
        return torch.no_grad()(lambda: function(tokens_BT, *arrays))
    output = function(tokens_BT, *arrays)
    cotangent = torch.randn_like(output) if output.ndim else torch.ones_like(output)
    del output

    def both():
        return torch.autograd.grad(function(tokens_BT, *arrays), arrays, cotangent)

    return both


def make_update(config: GPT2Config, device: str) -> Callable:
    """Clipping and fused AdamW of fp32 parameters and gradients."""
    with torch.device(device):
        parameters = list(TorchGPT2(config).parameters())
    for weight in parameters:
        weight.grad = torch.randn_like(weight)
    adamw = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step():
        nn.utils.clip_grad_norm_(parameters, 1.0)
        adamw.step()

    return step


def main(asked: dict) -> None:
    torch.set_float32_matmul_precision("high")
    config, device = GPT2Config(**asked["model"]), asked["device"]
    sizes = (config, asked["batch_size"], getattr(torch, asked["dtype"]), device)
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    torch.zeros(1, device=device)  # refuses here where there is no such device

    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads()}), flush=True)
    last, call = None, None
    for line in sys.stdin:
        count, _, name = line.strip().partition(" ")
        try:
            if name != last:
                call = None  # only the operation at hand holds memory
                torch.cuda.empty_cache()  # does nothing where there is no card
                call, last = make_call(name, *sizes), name
            synchronize()
            start = time.perf_counter()
            for _ in range(int(count)):
                call()
            synchronize()
            answer = {"seconds": (time.perf_counter() - start) / int(count)}
        except RuntimeError as error:
            answer = {"error": str(error).splitlines()[0]}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
