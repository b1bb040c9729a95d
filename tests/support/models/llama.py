"""A Llama-like toy in one file: RMSNorm, rotary positions, grouped heads, SwiGLU, an untied head, no biases.

It knows nothing of meshes but the names of its dims and `Context`.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.models.attention import attend
from jaxdist.models.base import Model
from jaxdist.parallel.tensor import linear
from jaxdist.params import Param


@dataclass(frozen=True)
class Llama(Model):
    num_layers: int = 4
    width: int = 64
    num_heads: int = 8
    num_kv_heads: int = 4
    ffn_width: int = 96
    seq_len: int = 32
    vocab_size: int = 256

    def outer(self):
        table = Param((self.vocab_size, self.width), ("vocab", "embed"))
        return {"tokens": table, "head": table, "norm": self.norm_scale()}

    def block(self, kind):
        head, d, f = self.width // self.num_heads, self.width, self.ffn_width
        return {
            "attention_norm": self.norm_scale(),
            "w_q": Param((d, self.num_heads, head), ("embed", "heads", None), std=0.1),
            "w_k": Param((d, self.num_kv_heads, head), ("embed", "heads", None), std=0.1),
            "w_v": Param((d, self.num_kv_heads, head), ("embed", "heads", None), std=0.1),
            "w_o": Param((self.num_heads, head, d), ("heads", None, "embed"), std=0.05),
            "mlp_norm": self.norm_scale(),
            "w_gate": Param((d, f), ("embed", "ffn"), std=0.1),
            "w_up": Param((d, f), ("embed", "ffn"), std=0.1),
            "w_down": Param((f, d), ("ffn", "embed"), std=0.05),
        }

    def norm_scale(self):
        return Param((self.width,), ("embed",), mean=1.0, std=0.0)

    def embed(self, ctx, outer, batch):
        return ctx.embedding(batch.inputs, outer["tokens"])

    def layer(self, ctx, kind, p, x, index):
        a = ctx.enter(rms_norm(x, p["attention_norm"]))
        q, k, v = (linear(a, p[name]) for name in ("w_q", "w_k", "w_v"))
        o = attend(ctx, rotate(q), rotate(k), v)
        x = x + ctx.row_parallel(o.reshape(*o.shape[:2], -1), p["w_o"].reshape(-1, self.width))
        m = ctx.enter(rms_norm(x, p["mlp_norm"]))
        return x + ctx.row_parallel(jax.nn.silu(linear(m, p["w_gate"])) * linear(m, p["w_up"]), p["w_down"])

    def loss(self, ctx, outer, x, batch):
        return ctx.loss(rms_norm(x, outer["norm"]), outer["head"], batch.targets, self.vocab_size)


def rms_norm(x, scale):
    wide = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    return (wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + 1e-5) * scale).astype(x.dtype)


def rotate(x_BTNH):
    """Rotary positions (arXiv 2104.09864), the halves of a head rotated against each other."""
    half = x_BTNH.shape[-1] // 2
    angle_TH = jnp.arange(x_BTNH.shape[1])[:, None] * 10_000.0 ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angle_TH)[:, None], jnp.sin(angle_TH)[:, None]
    a, b = x_BTNH[..., :half].astype(cos.dtype), x_BTNH[..., half:].astype(cos.dtype)
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1).astype(x_BTNH.dtype)
