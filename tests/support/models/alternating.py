"""Two kinds of layers in turn: attention and gated MLP, then two weighed MLPs. The second has an auxiliary loss, and so
has the embedding."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from llama import Llama, rms_norm

from jaxdist.parallel.tensor import linear
from jaxdist.params import Param


@dataclass(frozen=True)
class Alternating(Llama):
    kinds: tuple[str, ...] = ("decoder", "weighed")
    z_loss: float = 0.1

    def block(self, kind):
        if kind == "decoder":
            return super().block(kind)
        d, f = self.width, self.ffn_width
        return {
            "norm": self.norm_scale(),
            "w_router": Param((d, 2), ("embed", None), std=0.2),
            "w_up": Param((2, d, f), (None, "embed", "ffn"), std=0.1),
            "w_down": Param((2, f, d), (None, "ffn", "embed"), std=0.05),
        }

    def embed(self, ctx, outer, batch):
        x = super().embed(ctx, outer, batch)
        return ctx.add_loss(x, self.z_loss * jnp.sum(jnp.square(x)))

    def layer(self, ctx, kind, p, x, index):
        if kind == "decoder":
            return super().layer(ctx, kind, p, x, index)
        a = rms_norm(x, p["norm"])
        router = a @ p["w_router"]
        # The router's z-loss (arXiv 2202.08906, equation 5), of this rank's tokens.
        x = ctx.add_loss(x, self.z_loss * jnp.sum(jnp.square(jax.nn.logsumexp(router, -1))))
        weights, m = jax.nn.softmax(router), ctx.enter(a)
        for i in range(2):
            x = x + weights[..., i, None] * ctx.row_parallel(jax.nn.silu(linear(m, p["w_up"][i])), p["w_down"][i])
        return x
