"""An independent oracle: GPT-2 and its training in plain jnp and float64, written from the papers and docs/design.md.

It imports nothing of the package: no mesh, no module, no update rule. Whole arrays, one layer after the other, one
batch at a time. Parameters and gradients are flat dicts by name; those named `blocks.*` are stacked over layers.

GPT-2: Radford et al. 2019. AdamW: arXiv 1711.05101. Lion: arXiv 2302.06675. Adafactor: arXiv 1804.04235. Muon: Jordan
et al. 2024, with the scale of arXiv 2502.16982. Momentum: with no damping, Sutskever et al. 2013. Clipping by the
global norm: arXiv 1211.5063. Other models bring their losses (`decoder`).
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

BLOCKS = "blocks."


@dataclass(frozen=True)
class Recipe:
    """Model and training. total_steps: after which the learning rate is at its floor. balance_rate: of a mixture's
    balancing biases."""

    vocab_size: int
    dropout: float
    seed: int
    optimizer: str
    lr: float
    min_lr_ratio: float
    warmup_steps: int
    total_steps: int
    weight_decay: float
    beta1: float
    beta2: float
    eps: float
    clip_norm: float
    lr_schedule: str = "cosine"
    balance_rate: float = 0.0
    momentum: float = 0.95
    momentum_warmup_steps: int = 0
    nesterov: bool = True
    muon_scale: str = "rms"
    muon_coefficients: str = "original"


@dataclass(frozen=True)
class Training:
    """By step, and after the last one. moments: by the paper's name of each, then by parameter."""

    losses: list[float]
    norms: list[float]
    rates: list[float]
    targets: list[int]
    gradients: list[dict]
    parameters: dict
    moments: dict[str, dict]
    evaluation: float


def train(recipe: Recipe, parameters: dict, batches: list[dict], losses: Callable | None = None) -> Training:
    """One update for each batch, then the loss of the last batch without dropout. Needs JAX's 64 bits.

    losses: (parameters, batch) -> (what is minimised, (the loss, counts by name)); GPT-2's unless given. A count is no
    gradient: it has no part in the norm, and the optimizer sees 0. It replaces the last one; a bias moves against its
    sign.
    """
    if losses is None:

        def with_counts(params, batch, key):
            loss = mean_loss(recipe, params, batch, key)
            return loss, (loss, {})
    else:

        def with_counts(params, batch, key):
            return losses(params, batch)

    def updated(params, grads, counts, moments, rate, t):
        norm = jnp.sqrt(sum(jnp.sum(g**2) for name, g in grads.items() if name not in counts))
        shrink = jnp.minimum(1, recipe.clip_norm / norm)
        learned = {name: shrink * g for name, g in grads.items()} | {name: 0 * count for name, count in counts.items()}
        directions, moments = direction(recipe, t, learned, moments)
        after = {}
        for name, p in params.items():
            decay = recipe.weight_decay if is_decayed(name) else 0.0
            after[name] = p - rate * (directions[name] + decay * p)
            if name in counts and not name.endswith(".bias"):
                after[name] = counts[name]
            elif name in counts:
                after[name] = p - recipe.balance_rate * jnp.sign(jnp.round(counts[name], 9))
        return norm, after, moments

    params = {name: jnp.asarray(x, jnp.float64) for name, x in parameters.items()}
    moments = initial_moments(recipe.optimizer, params)
    gradient_of, update = jax.jit(jax.grad(with_counts, has_aux=True)), jax.jit(updated)
    result, norms, rates, gradients = [], [], [], []
    for step, batch in enumerate(batches):
        key = jax.random.fold_in(jax.random.key(recipe.seed), step)
        grads, (loss, counts) = gradient_of(params, batch, key if recipe.dropout else None)
        rate = learning_rate(recipe, step)
        norm, params, moments = update(params, grads, counts, moments, rate, step + 1.0)
        result.append(float(loss))
        norms.append(float(norm))
        rates.append(rate)
        gradients.append(grads | counts)
    targets = [int((batch["targets"] >= 0).sum()) for batch in batches]
    _, (evaluation, _) = gradient_of(params, batches[-1], None)
    return Training(result, norms, rates, targets, gradients, params, moments, float(evaluation))


# ---------------------------------------------------------------------------------------------------------------------
# The model
# ---------------------------------------------------------------------------------------------------------------------


def mean_loss(recipe: Recipe, params: dict, batch: dict, key) -> jax.Array:
    """Mean cross-entropy over the targets that are not negative. key: of the step; None for no dropout."""
    noise = Dropout(recipe.dropout, jnp.asarray(batch["rows"]))
    real = logits(params, batch, key, noise)[..., : recipe.vocab_size]
    log_probs = real - jnp.log(jnp.sum(jnp.exp(real - real.max(-1, keepdims=True)), -1, keepdims=True))
    log_probs = log_probs - real.max(-1, keepdims=True)
    counted = batch["targets"] >= 0
    picked = jnp.take_along_axis(log_probs, jnp.where(counted, batch["targets"], 0)[..., None], -1)[..., 0]
    return -jnp.sum(jnp.where(counted, picked, 0)) / counted.sum()


def logits(params: dict, batch: dict, key, noise: "Dropout") -> jax.Array:
    """[B, T] -> [B, T, padded V]. A document begins at "starts", counts its positions from there and sees itself."""
    tokens, places = batch["inputs"], np.arange(batch["inputs"].shape[1])
    starts = batch.get("starts", np.zeros(tokens.shape, int))
    seen = (places <= places[:, None]) & (places >= starts[..., None])
    x = params["tokens"][tokens] + params["positions"][places - starts]
    x = noise.hidden(x, site(key, 0))
    for i in range(params["blocks.mlp.w_up"].shape[0]):
        p = {name.removeprefix(BLOCKS): x[i] for name, x in params.items() if name.startswith(BLOCKS)}
        here = site(site(key, 1), i)
        h = layer_norm(x, p["ln_attention.scale"], p["ln_attention.bias"])
        q, k, v = (
            jnp.einsum("btd,dnh->bnth", h, p["attention.w_qkv"][:, part]) + p["attention.b_qkv"][part][:, None]
            for part in range(3)
        )
        scores = jnp.einsum("bnth,bnsh->bnts", q, k) / np.sqrt(q.shape[-1])
        probs = softmax(jnp.where(seen[:, None], scores, -jnp.inf))
        probs = noise.attention(probs, site(here, 0))
        mixed = jnp.einsum("bnts,bnsh->btnh", probs, v)
        attended = jnp.einsum("btnh,nhd->btd", mixed, p["attention.w_out"]) + p["attention.b_out"]
        x = x + noise.hidden(attended, site(here, 1))
        h = layer_norm(x, p["ln_mlp.scale"], p["ln_mlp.bias"])
        h = gelu(h @ p["mlp.w_up"] + p["mlp.b_up"]) @ p["mlp.w_down"] + p["mlp.b_down"]
        x = x + noise.hidden(h, site(here, 2))
    return layer_norm(x, params["ln_final.scale"], params["ln_final.bias"]) @ params["tokens"].T


def layer_norm(x, scale, bias):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / jnp.sqrt(variance + 1e-5) * scale + bias


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def softmax(x):
    weights = jnp.exp(x - x.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


# ---------------------------------------------------------------------------------------------------------------------
# Dropout, from the keys that docs/design.md documents
# ---------------------------------------------------------------------------------------------------------------------


def site(key, number: int):
    return None if key is None else jax.random.fold_in(key, number)


@dataclass(frozen=True)
class Dropout:
    """Masks of one batch. rows: the index of each row in the global batch."""

    rate: float
    rows: jax.Array

    def hidden(self, x, key):
        """x[B, T, D]: a key for each row and position."""
        return x if key is None else self.drop(x, self.draw(key, x.shape[1], x.shape[2:]))

    def attention(self, probs, key):
        """probs[B, N, T, S]: a key for each row and head, of each block of queries."""
        if key is None:
            return probs
        heads, length = probs.shape[1:3]
        num_blocks = next((n for n in (4, 2) if length % n == 0 and length // n >= 64), 1)
        size, blocks = length // num_blocks, []
        for end in range(size, length + 1, size):
            kept = self.draw(jax.random.fold_in(key, end), heads, (size, end))
            blocks.append(jnp.pad(kept, [(0, 0), (0, 0), (0, 0), (0, length - end)]))
        return self.drop(probs, jnp.concatenate(blocks, axis=2))

    def draw(self, key, second: int, rest: tuple[int, ...]):
        """kept[rows, second, *rest]."""

        def one(row, index):
            return jax.random.bits(jax.random.fold_in(jax.random.fold_in(key, row), index), rest, jnp.uint32)

        bits = jax.vmap(lambda row: jax.vmap(lambda index: one(row, index))(jnp.arange(second)))(self.rows)
        return bits >= np.uint32(self.rate * 2**32)

    def drop(self, x, kept):
        return jnp.where(kept, x / (1 - self.rate), 0)


# ---------------------------------------------------------------------------------------------------------------------
# The update
# ---------------------------------------------------------------------------------------------------------------------


def learning_rate(recipe: Recipe, step: int) -> float:
    """The rate of the step that follows `step` others: warm-up to `lr`, then down to `lr * min_lr_ratio`."""
    if step < recipe.warmup_steps:
        return recipe.lr * (step + 1) / min(recipe.warmup_steps, recipe.total_steps)
    progress = (step - recipe.warmup_steps) / (recipe.total_steps - recipe.warmup_steps)
    if recipe.lr_schedule == "constant":
        return recipe.lr
    if recipe.lr_schedule == "wsd":  # down in the last fifth alone
        progress = max(0.0, 5 * progress - 4)
    left = (1 + np.cos(np.pi * progress)) / 2 if recipe.lr_schedule == "cosine" else 1 - progress
    return recipe.lr * (recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * left)


def is_decayed(name: str) -> bool:
    """Matrices and embeddings."""
    last = name.split(".")[-1]
    return last in ("tokens", "positions", "head", "w") or last.startswith("w_")


def initial_moments(optimizer: str, params: dict) -> dict[str, dict]:
    """Zeros, by the name that a paper gives each moment."""
    if optimizer == "muon":
        zeros = {name: jnp.zeros(p.shape) for name, p in params.items()}
        return {kind: {name: x for name, x in zeros.items() if has_matrices(name) == (kind == "b")} for kind in "bmv"}
    if optimizer != "adafactor":
        kinds = {"adamw": "mv", "lion": "m", "sgd": "m"}[optimizer]
        return {kind: {name: jnp.zeros(p.shape) for name, p in params.items()} for kind in kinds}
    moments: dict[str, dict] = {"row": {}, "column": {}, "whole": {}}
    for name, p in params.items():
        if factored(p) is None:
            moments["whole"][name] = jnp.zeros(p.shape)
        else:
            rows, columns = factored(p)
            moments["row"][name] = jnp.zeros(np.delete(p.shape, columns))
            moments["column"][name] = jnp.zeros(np.delete(p.shape, rows))
    return moments


def direction(recipe: Recipe, t: float, grads: dict, moments: dict) -> tuple[dict, dict]:
    """The update before the learning rate and without weight decay, and the new moments; t counts from 1."""
    b1, b2 = recipe.beta1, recipe.beta2
    if recipe.optimizer == "sgd":
        m = {name: b1 * moments["m"][name] + g for name, g in grads.items()}
        return m, {"m": m}
    if recipe.optimizer == "lion":
        signs = {name: jnp.sign(b1 * moments["m"][name] + (1 - b1) * g) for name, g in grads.items()}
        return signs, {"m": {name: b2 * moments["m"][name] + (1 - b2) * g for name, g in grads.items()}}
    if recipe.optimizer == "adamw":
        m = {name: b1 * moments["m"][name] + (1 - b1) * g for name, g in grads.items()}
        v = {name: b2 * moments["v"][name] + (1 - b2) * g**2 for name, g in grads.items()}
        found = {name: (m[name] / (1 - b1**t)) / (jnp.sqrt(v[name] / (1 - b2**t)) + recipe.eps) for name in grads}
        return found, {"m": m, "v": v}
    if recipe.optimizer == "muon":
        return muon(recipe, t, grads, moments)
    return adafactor(t, grads, moments)


def factored(x) -> tuple[int, int] | None:
    """The two largest dims, where both are 128 or more: (rows, columns)."""
    order = sorted(range(x.ndim), key=lambda dim: x.shape[dim])
    return tuple(order[-2:]) if x.ndim > 1 and x.shape[order[-2]] >= 128 else None


def adafactor(t: float, grads: dict, moments: dict) -> tuple[dict, dict]:
    """Algorithms 4 and 5 of the paper, with its decay 1 - t^-0.8, its eps_1 of 1e-30 and its clipping at 1."""
    decay, found = 1 - t**-0.8, {}
    after: dict[str, dict] = {"row": {}, "column": {}, "whole": {}}
    for name, g in grads.items():
        square = g**2 + 1e-30
        if factored(g) is None:
            v = after["whole"][name] = decay * moments["whole"][name] + (1 - decay) * square
        else:
            rows, columns = factored(g)
            row = after["row"][name] = decay * moments["row"][name] + (1 - decay) * square.mean(columns)
            column = after["column"][name] = decay * moments["column"][name] + (1 - decay) * square.mean(rows)
            row, column = jnp.expand_dims(row, columns), jnp.expand_dims(column, rows)
            v = row * column / row.mean(rows, keepdims=True)
        u = g / jnp.sqrt(v)
        found[name] = u / jnp.maximum(1, jnp.sqrt(jnp.mean(u**2)))
    return found, after


def muon(recipe: Recipe, t: float, grads: dict, moments: dict) -> tuple[dict, dict]:
    """The orthogonalized momentum of every matrix of the layers, one by one; AdamW for the rest."""
    ours = {name: g for name, g in grads.items() if has_matrices(name)}
    others = {name: g for name, g in grads.items() if not has_matrices(name)}
    found, after = direction(replace(recipe, optimizer="adamw"), t, others, moments)
    after["b"] = {}
    before, now = momentum(recipe, t - 1), momentum(recipe, t)
    for name, g in ours.items():
        b = now * (1 - before) * moments["b"][name] + (1 - now) * g  # what is kept is b / (1 - momentum)
        after["b"][name] = b / (1 - now)
        stacked = as_matrices(name, (1 - now) * g + now * b if recipe.nesterov else b)
        *_, outputs, inputs = stacked.shape
        flat = [orthogonal(recipe.muon_coefficients, each) for each in stacked.reshape(-1, outputs, inputs)]
        scale = 0.2 * np.sqrt(max(outputs, inputs)) if recipe.muon_scale == "rms" else np.sqrt(max(1, outputs / inputs))
        found[name] = scale * from_matrices(name, jnp.stack(flat).reshape(stacked.shape), g.shape)
    return found, after


def momentum(recipe: Recipe, t: float) -> float:
    """From 0.85, in a straight line; t counts from 1."""
    done = jnp.clip((t - 1) / recipe.momentum_warmup_steps, 0, 1) if recipe.momentum_warmup_steps else 1.0
    return 0.85 + done * (recipe.momentum - 0.85)


def has_matrices(name: str) -> bool:
    return name.startswith(BLOCKS) and is_decayed(name)


def as_matrices(name: str, x):
    """[..., outputs, inputs] of a stacked parameter [layers, ...], inputs first; all heads are one matrix."""
    kind = name.split(".")[-1]
    if kind == "w_qkv":  # [layers, inputs, 3, heads, head]
        return jnp.stack([as_matrices("w_q", x[:, :, part]) for part in range(3)], axis=1)
    if kind == "w_out":  # [layers, heads, head, outputs]
        x = x.reshape(len(x), -1, x.shape[-1])
    elif kind in ("w_q", "w_k", "w_v"):  # [layers, inputs, heads, head]
        x = x.reshape(*x.shape[:2], -1)
    return jnp.swapaxes(x, -1, -2)


def from_matrices(name: str, matrices, shape: tuple[int, ...]):
    """Undo `as_matrices`."""
    if name.endswith("w_qkv"):
        parts = [from_matrices("w_q", matrices[:, part], (*shape[:2], *shape[3:])) for part in range(3)]
        return jnp.stack(parts, axis=2)
    return jnp.swapaxes(matrices, -1, -2).reshape(shape)


NEWTON_SCHULZ = {
    "original": [(3.4445, -4.7750, 2.0315)] * 5,
    "dion": [
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ],
}


def orthogonal(coefficients: str, g):
    """Newton-Schulz of one matrix [outputs, inputs], as in the post."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / jnp.maximum(jnp.linalg.norm(x), 1e-7)
    for a, b, c in NEWTON_SCHULZ[coefficients]:
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if g.shape[0] > g.shape[1] else x
