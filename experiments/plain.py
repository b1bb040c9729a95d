"""The same GPT and AdamW step as a user would write them for one device: plain `jax.jit`, no mesh, no wrappers.

What `experiments.bench overhead` holds the one-device sharded step against.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxdist.config import RunConfig


def make_step(config: RunConfig, decay_mask: dict):
    """(init(params) -> state, step(state, batch) -> (state, loss), both jitted; the optimiser). fp32, no dropout."""
    schedule = config.optimizer
    optimizer = optax.chain(
        optax.clip_by_global_norm(schedule.clip_norm),
        optax.adamw(
            schedule.lr,
            b1=schedule.beta1,
            b2=schedule.beta2,
            eps=schedule.eps,
            weight_decay=schedule.weight_decay,
            mask=decay_mask,
        ),
    )

    def step(state, batch):
        params, moments = state
        loss, grads = jax.value_and_grad(mean_loss)(params, batch, config.model.vocab_size)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), loss

    return jax.jit(lambda params: (params, optimizer.init(params))), jax.jit(step, donate_argnums=0), optimizer


def mean_loss(params: dict, batch: dict, vocab_size: int) -> jax.Array:
    """Mean cross-entropy in nats per token."""
    x = params["tokens"][batch["inputs"]] + params["positions"]
    x, _ = lax.scan(lambda x, p: (block(x, p), None), x, params["blocks"])
    logits = linear(layer_norm(x, params["ln_final"]), params["tokens"].T)
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab_size, logits, jnp.finfo(logits.dtype).min)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()


def block(x, p):
    attention, mlp = p["attention"], p["mlp"]
    qkv = linear(layer_norm(x, p["ln_attention"]), attention["w_qkv"]) + attention["b_qkv"]
    q, k, v = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    scores = jnp.einsum("BTNH,BSNH->BNTS", q * q.shape[-1] ** -0.5, k)
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    probs = jax.nn.softmax(jnp.where(causal, scores, jnp.finfo(scores.dtype).min), -1)
    mixed = jnp.einsum("BNTS,BSNH->BTNH", probs, v).reshape(x.shape)
    x = x + linear(mixed, attention["w_out"].reshape(-1, x.shape[-1])) + attention["b_out"]
    h = jax.nn.gelu(linear(layer_norm(x, p["ln_mlp"]), mlp["w_up"]) + mlp["b_up"], approximate=True)
    return x + linear(h, mlp["w_down"]) + mlp["b_down"]


def linear(x, w):
    return (x.reshape(-1, x.shape[-1]) @ w.reshape(x.shape[-1], -1)).reshape(*x.shape[:2], *w.shape[1:])


def layer_norm(x, p):
    centred = x - x.mean(-1, keepdims=True)
    return centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5) * p["scale"] + p["bias"]
