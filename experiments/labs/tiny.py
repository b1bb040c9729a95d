"""A decoder small enough to read, in plain jnp, and a source of text whose entropy is known.

B sequences in a batch, T positions, D width, F feed-forward, V vocabulary. One layer, one head.
"""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

V, D, F, T = 16, 32, 64, 24
# Of each parameter the shape, and one over the variance that it is drawn with.
SHAPES = {
    "embed": ((V, D), D),
    "position": ((T, D), D),
    "qkv": ((D, 3 * D), D),
    "out": ((D, D), D),
    "up": ((D, F), D),
    "down": ((F, D), F),
}
ADAM = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}


def initial(seed: int = 0, dtype=jnp.float32) -> dict[str, jax.Array]:
    """Every parameter, drawn at random."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(rng.standard_normal(shape) / np.sqrt(fan), dtype) for name, (shape, fan) in SHAPES.items()
    }


def logits(params: dict, tokens_BT: jax.Array, causal: bool = True) -> jax.Array:
    """[B, T] -> [B, T, V]. causal: position t sees only positions up to t."""
    x = params["embed"][tokens_BT] + params["position"][: tokens_BT.shape[1]]
    q, k, v = jnp.split(normed(x) @ params["qkv"], 3, axis=-1)
    scores = q @ k.mT / np.sqrt(D)
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -jnp.inf)
    x = x + jax.nn.softmax(scores) @ v @ params["out"]
    x = x + jax.nn.gelu(normed(x) @ params["up"]) @ params["down"]
    return normed(x) @ params["embed"].T


def normed(x):
    """Each position to mean 0 and variance 1."""
    x = x - x.mean(-1, keepdims=True)
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + 1e-5)


def loss_sum(params: dict, tokens_BT: jax.Array, targets_BT: jax.Array, causal: bool = True) -> jax.Array:
    """Cross-entropy in nats, summed over the targets that are not negative."""
    log_probs = jax.nn.log_softmax(logits(params, tokens_BT, causal))
    picked = jnp.take_along_axis(log_probs, jnp.maximum(targets_BT, 0)[..., None], -1)[..., 0]
    return -jnp.where(targets_BT >= 0, picked, 0).sum()


def adam(params: dict, grads: dict, moments: tuple, step, lr, correct: bool = True) -> tuple[dict, tuple]:
    """One update of Adam; step counts from 1. correct: divide the moments by what their start at 0 took from them."""
    first = jax.tree.map(lambda m, g: ADAM["b1"] * m + (1 - ADAM["b1"]) * g, moments[0], grads)
    second = jax.tree.map(lambda m, g: ADAM["b2"] * m + (1 - ADAM["b2"]) * g * g, moments[1], grads)
    c1, c2 = (1 - ADAM["b1"] ** step, 1 - ADAM["b2"] ** step) if correct else (1.0, 1.0)
    new = jax.tree.map(lambda p, m, v: p - lr * (m / c1) / (jnp.sqrt(v / c2) + ADAM["eps"]), params, first, second)
    return new, (first, second)


def no_moments(params: dict) -> tuple[dict, dict]:
    zeros = jax.tree.map(jnp.zeros_like, params)
    return zeros, zeros


@cache
def source() -> tuple[np.ndarray, float]:
    """(transitions[V, V], entropy in nats a token): a Markov chain whose next token depends only on the last.

    Every row is a permutation of the same probabilities, so every row has the same entropy, which is the loss that the
    best model of this text reaches.
    """
    rng = np.random.default_rng(7)
    probabilities = np.array([0.5, 0.25, 0.125, 0.0625, *[0.0625 / (V - 4)] * (V - 4)])
    rows = np.stack([probabilities[rng.permutation(V)] for _ in range(V)])
    return rows, float(-(probabilities * np.log(probabilities)).sum())


def text(num_rows: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens[B, T], targets[B, T]) of the source: a target is the token that follows."""
    transitions, rng = source()[0], np.random.default_rng(seed)
    tokens = np.zeros((num_rows, T + 1), np.int32)
    tokens[:, 0] = rng.integers(0, V, num_rows)
    bounds = transitions.cumsum(1)
    for t in range(T):
        draws = rng.random(num_rows)
        tokens[:, t + 1] = (draws[:, None] > bounds[tokens[:, t]]).sum(1).clip(max=V - 1)
    return tokens[:, :-1], tokens[:, 1:]
