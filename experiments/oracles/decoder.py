"""An independent oracle: Llama's decoder and its mixtures of experts in plain jnp and float64, from the papers.

It imports nothing of the package, as `plain`, which trains it. Every expert computes every token, and what was not
chosen is not added; which are chosen is decided in NumPy, one token after the other.

Llama: arXiv 2302.13971. Rotary positions: 2104.09864. Groups of queries: 2305.13245. SwiGLU: 2002.05202. Mixtral:
2401.04088. DeepSeek-V3: 2412.19437. A bias that balances: 2408.15664. Capacity: GShard, 2006.16668. z-loss: 2202.08906.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Settings:
    """What shapes of parameters do not say. kinds: of the layers, in turn: "full", "sliding", which has the window, and
    "dense", which has no experts. The others as their papers name them."""

    num_layers: int
    vocab_size: int
    kinds: tuple[str, ...]
    window: int | None
    rope_theta: float
    rope_scaling: tuple
    norm_eps: float
    top_k: int
    router_score: str
    normalised: bool
    routed_scale: float
    capacity: float | None
    balance_rate: float
    balance_loss: float
    z_loss: float


def losses(settings: Settings, params: dict, batch: dict) -> tuple:
    """(what is minimised, (the cross-entropy of a target, counts for a token)); counts by name, stacked over layers.

    Auxiliary losses are means over all tokens, the cross-entropy is one over targets alone.
    """
    x, extra, found = params["tokens"][batch["inputs"]], 0, {}
    for i in range(settings.num_layers):
        block, place = divmod(i, len(settings.kinds))
        kind = settings.kinds[place]
        prefix = "blocks." if len(settings.kinds) == 1 else f"blocks.{place}_{kind}."
        p = {name.removeprefix(prefix): w[block] for name, w in params.items() if name.startswith(prefix)}
        window = settings.window if kind == "sliding" else None
        x = x + attention(settings, p, rms_norm(x, p["attention_norm.scale"], settings.norm_eps), batch, window)
        normed = rms_norm(x, p["mlp_norm.scale"], settings.norm_eps)
        if "mlp.router.w" not in p:
            x = x + gated(normed, p, "mlp.")
            continue
        y, auxiliary, counts = mixture(settings, p, normed)
        for name, count in counts.items():
            found.setdefault(f"{prefix}mlp.{name}", []).append(count)
        x, extra = x + y, extra + auxiliary
    logits = rms_norm(x, params["norm.scale"], settings.norm_eps) @ params.get("head", params["tokens"]).T
    logits = jnp.where(np.arange(logits.shape[-1]) < settings.vocab_size, logits, -jnp.inf)
    counted = batch["targets"] >= 0
    picked = jnp.take_along_axis(log_softmax(logits), jnp.where(counted, batch["targets"], 0)[..., None], -1)[..., 0]
    loss = -jnp.where(counted, picked, 0).sum() / counted.sum()
    counts = {name: jnp.stack(of_layers) / counted.size for name, of_layers in found.items()}
    return loss + extra / counted.size, (loss, counts)


def rms_norm(x, scale, eps):
    return x / jnp.sqrt((x**2).mean(-1, keepdims=True) + eps) * scale


def log_softmax(x):
    x = x - x.max(-1, keepdims=True)
    return x - jnp.log(jnp.exp(x).sum(-1, keepdims=True))


def silu(x):
    return x / (1 + jnp.exp(-x))


def gated(x, p: dict, prefix: str):
    gate, up = (x @ p[f"{prefix}w_{name}"] + p.get(f"{prefix}b_{name}", 0) for name in ("gate", "up"))
    return (silu(gate) * up) @ p[f"{prefix}w_down"] + p.get(f"{prefix}b_down", 0)


# ---------------------------------------------------------------------------------------------------------------------
# Attention
# ---------------------------------------------------------------------------------------------------------------------


def attention(settings: Settings, p: dict, x, batch: dict, window: int | None):
    places = np.arange(x.shape[1])
    starts = batch.get("starts", np.zeros(x.shape[:2], int))
    q, k, v = (
        jnp.einsum("btd,dnh->btnh", x, p[f"attention.w_{name}"]) + p.get(f"attention.b_{name}", 0) for name in "qkv"
    )
    if "attention.q_norm.scale" in p:
        q, k = (rms_norm(y, p[f"attention.{name}_norm.scale"], settings.norm_eps) for name, y in (("q", q), ("k", k)))
    q, k = (rotate(settings, y, places - starts) for y in (q, k))
    k, v = (jnp.repeat(y, q.shape[2] // y.shape[2], axis=2) for y in (k, v))
    back = places[:, None] - places
    seen = (back >= 0) & (places >= starts[..., None]) & (back < (window or len(places)))
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / np.sqrt(q.shape[-1])
    weights = jnp.exp(log_softmax(jnp.where(seen[:, None], scores, -jnp.inf)))
    return jnp.einsum("bnts,bsnh,nhd->btd", weights, v, p["attention.w_out"]) + p.get("attention.b_out", 0)


def rotate(settings: Settings, x, positions):
    """x[B, T, N, H]: the first half of a head is turned against the second."""
    half = x.shape[-1] // 2
    angles = (positions[..., None] * frequencies(settings, half))[:, :, None]
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angles) - b * jnp.sin(angles), b * jnp.cos(angles) + a * jnp.sin(angles)], -1)


def frequencies(settings: Settings, half: int) -> np.ndarray:
    """Radians a position. Linear: all slower by a factor. Llama 3.1: long waves alone, with a blend to short ones."""
    found = settings.rope_theta ** -(np.arange(half) / half)
    if not settings.rope_scaling:
        return found
    kind, factor, *bounds = settings.rope_scaling
    if kind == "linear":
        return found / factor
    low, high, original = bounds
    scaled = []
    for frequency in found:
        turns = original * frequency / (2 * np.pi)  # within the original length
        smooth = (turns - low) / (high - low)
        blend = (1 - smooth) * frequency / factor + smooth * frequency
        scaled.append(frequency if turns > high else frequency / factor if turns < low else blend)
    return np.array(scaled)


# ---------------------------------------------------------------------------------------------------------------------
# Experts
# ---------------------------------------------------------------------------------------------------------------------


def mixture(settings: Settings, p: dict, x) -> tuple:
    """(y, auxiliary losses summed over tokens, counts by name)."""
    logits = x @ p["mlp.router.w"]
    scores = 1 / (1 + jnp.exp(-logits)) if settings.router_score == "sigmoid" else jnp.exp(log_softmax(logits))
    by = jax.lax.stop_gradient(scores + p.get("mlp.router.bias", 0))

    def choose(settings: Settings):
        return jax.pure_callback(
            lambda by: chosen(settings, np.asarray(by)), jax.ShapeDtypeStruct(scores.shape, bool), by
        )

    picked, used = choose(replace(settings, capacity=None)), choose(settings)
    weights = scores / (scores * picked).sum(-1, keepdims=True) if settings.normalised else scores
    y = 0
    for e in range(scores.shape[-1]):
        expert = {name: w[e] for name, w in p.items() if name.startswith("mlp.w_")}
        y = y + jnp.where(used[..., e, None], settings.routed_scale * weights[..., e, None], 0) * gated(
            x, expert, "mlp."
        )
    if "mlp.shared.w_up" in p:
        y = y + gated(x, p, "mlp.shared.")
    share = (scores / scores.sum(-1, keepdims=True)).mean(1)
    fraction = picked.astype(x.dtype).mean(1) * scores.shape[-1] / settings.top_k
    balance = settings.balance_loss * x.shape[1] * (fraction * share).sum()
    z = settings.z_loss * (jnp.log(jnp.exp(logits).sum(-1)) ** 2).sum()
    load = picked.sum((0, 1))
    counts = {"router.load": load, "faults": 0 * load}
    counts |= {"router.dropped": load - used.sum((0, 1))} if settings.capacity is not None else {}
    counts |= {"router.bias": load - load.mean()} if settings.balance_rate else {}
    return y, balance + z, counts


def chosen(settings: Settings, scores: np.ndarray) -> np.ndarray:
    """Whether each token uses each expert: bool[B, T, E]; what is over capacity is dropped, choice by choice."""
    batch, length, experts = scores.shape
    order = np.argsort(-scores, axis=-1, kind="stable")[..., : settings.top_k]
    limit = length
    if settings.capacity is not None:
        limit = int(np.ceil(settings.capacity * length * settings.top_k / experts))
    used = np.zeros(scores.shape, bool)
    for row in range(batch):
        taken = np.zeros(experts, int)
        for choice in range(settings.top_k):
            for place in range(length):
                expert = order[row, place, choice]
                used[row, place, expert] = taken[expert] < limit
                taken[expert] += 1
    return used
