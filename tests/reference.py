"""The third oracle: GPT-2 in plain jnp, with no flax, no mesh, no scan, no sharing of code with the package.

Written from the paper's description, on whole arrays, one layer after the other.
"""

import jax
import jax.numpy as jnp


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(jnp.sqrt(2 / jnp.pi) * (x + 0.044715 * x**3)))


def logits(params, tokens):
    """[B, T] -> [B, T, padded V]."""
    length = tokens.shape[1]
    blocks = params["blocks"]
    x = params["tokens"][tokens] + params["positions"][:length]
    for i in range(blocks["mlp"]["w_up"].shape[0]):
        attention, mlp = blocks["attention"], blocks["mlp"]
        h = layer_norm(x, blocks["ln_attention"]["scale"][i], blocks["ln_attention"]["bias"][i])
        q, k, v = (
            jnp.einsum("btd,dnh->bnth", h, attention["w_qkv"][i][:, part]) + attention["b_qkv"][i][part][:, None]
            for part in range(3)
        )
        scores = jnp.einsum("bnth,bnsh->bnts", q, k) / jnp.sqrt(q.shape[-1])
        scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
        mixed = jnp.einsum("bnts,bnsh->btnh", jax.nn.softmax(scores, -1), v)
        x = x + jnp.einsum("btnh,nhd->btd", mixed, attention["w_out"][i]) + attention["b_out"][i]
        h = layer_norm(x, blocks["ln_mlp"]["scale"][i], blocks["ln_mlp"]["bias"][i])
        x = x + gelu(h @ mlp["w_up"][i] + mlp["b_up"][i]) @ mlp["w_down"][i] + mlp["b_down"][i]
    return layer_norm(x, params["ln_final"]["scale"], params["ln_final"]["bias"]) @ params["tokens"].T


def mean_loss(params, batch, vocab_size):
    """Mean cross-entropy over the targets that are not negative."""
    real = logits(params, batch["inputs"])[..., :vocab_size]
    log_probs = jax.nn.log_softmax(real, -1)
    counted = batch["targets"] >= 0
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, batch["targets"], 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(counted, picked, 0)) / counted.sum()


def adamw_step(params, grads, moments, step, lr, decayed, b1=0.9, b2=0.95, eps=1e-8, decay=0.1, clip=1.0):
    """One AdamW update with global-norm clipping; `moments` is a pair of parameter-shaped trees."""
    norm = jnp.sqrt(sum(jnp.sum(g**2) for g in jax.tree.leaves(grads)))
    grads = jax.tree.map(lambda g: g * jnp.minimum(1, clip / norm), grads)
    first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, moments[0], grads)
    second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g**2, moments[1], grads)

    def update(p, m, v, is_decayed):
        direction = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + eps)
        return p - lr * (direction + (decay * p if is_decayed else 0))

    return jax.tree.map(update, params, first, second, decayed), (first, second)
