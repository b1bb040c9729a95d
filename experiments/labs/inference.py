"""Inference under tensor parallelism: what the cache holds, and when several devices make a token sooner."""

import contextlib
from unittest.mock import patch

import jax
import numpy as np

from jaxdist.generation import build_generator, bytes_per_token
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.attention import scores_of, weighted_values
from jaxdist.models.base import declare
from jaxdist.models.cache import KeyValues, NextTokens, Prompts
from jaxdist.models.declared import num_parameters
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.presets import PRESETS
from jaxdist.parity import forward_logits
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.proof.trace import collectives_of, total_sent
from jaxdist.runtime.devices import acquire_devices

from . import drawing
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table

MODEL = DecoderConfig(
    2, 64, 8, num_kv_heads=2, head_dim=8, ffn_width=48, seq_len=40, vocab_size=250
)  # 2 layers of width 64, 8 heads of queries on 2 of keys
LENGTHS, NEW = (5, 12, 9), 8  # of the prompts, and how many tokens follow
SIZES = ("gpt2-124m", "llama3-8b", "llama3-70b")
DEGREES = (1, 2, 4, 8)
CONTEXT = 4096
H100 = find_hardware("h100")


# ------------------------------------------------------------------------------------------------- text, on any mesh


def random_values() -> dict:
    rng = np.random.default_rng(0)
    return jax.tree.map(lambda p: p.mean + 0.3 * rng.normal(size=p.shape), declare(MODEL))


def prompts() -> np.ndarray:
    """i32[B, T], padded on the right."""
    rng, tokens = np.random.default_rng(1), np.zeros((len(LENGTHS), max(LENGTHS)), int)
    for row, length in enumerate(LENGTHS):
        tokens[row, :length] = rng.integers(0, MODEL.vocab_size, length)
    return tokens


def generate(mesh: str, advance: bool = True) -> tuple[np.ndarray, np.ndarray, object, object]:
    """(tokens[B, new], logits[B, new, V], generator, caches): prompts at once, then a token of each text at a time.

    advance: every token is decoded at the position after the one before.
    """
    shape, lengths = parse_mesh(mesh), np.array(LENGTHS)
    devices = acquire_devices(2, "cpu").devices[: shape.num_devices]
    sizes = {"num_texts": len(LENGTHS), "capacity": max(LENGTHS) + NEW}
    made = build_generator(MODEL, make_mesh(shape, devices), shape, dtype="float64", **sizes)
    params = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), random_values(), made.abstract_params())
    found = made.prefill(params, made.put(prompts()), made.put(lengths))
    tokens, logits = [np.asarray(found.tokens)], [np.asarray(found.logits)]
    for step in range(NEW - 1):
        positions = lengths + step if advance else lengths
        found = made.decode(params, found.caches, found.tokens, made.put(positions))
        tokens.append(np.asarray(found.tokens))
        logits.append(np.asarray(found.logits))
    return np.stack(tokens, 1), np.stack(logits, 1), made, found.caches


def trained_logits(tokens: np.ndarray) -> np.ndarray:
    """[B, new, V]: what the forward of training says of the same texts, all at once and without a cache."""
    whole = np.zeros((len(LENGTHS), max(LENGTHS) + NEW), int)
    for row, (length, prompt) in enumerate(zip(LENGTHS, prompts(), strict=True)):
        whole[row, : length + NEW] = np.concatenate([prompt[:length], tokens[row]])
    logits = forward_logits(MODEL, random_values(), whole, acquire_devices(2, "cpu").devices[0])
    return np.stack([row[length - 1 : length - 1 + NEW] for row, length in zip(logits, LENGTHS, strict=True)])


def without_mask(prompts: Prompts, core, q_BTNH, k_BTKH, v_BTKH, window):
    """Attention of a prefill in which every position sees the whole prompt."""
    prompts.kept.append(KeyValues(prompts._kept(k_BTKH, window), prompts._kept(v_BTKH, window)))
    return weighted_values(jax.nn.softmax(scores_of(q_BTNH, k_BTKH), axis=-1), v_BTKH)


def one_place_off(held: NextTokens, which: int, x_B1KH):
    """The newest key or value, written one place too far."""
    right = held.positions_B
    held.positions_B = right + 1
    written = extended(held, which, x_B1KH)
    held.positions_B = right
    return written


extended = NextTokens._extended


# -------------------------------------------------------------------------------------------------------- predictions


def decode_seconds(name: str, tp: int, texts: int = 1) -> tuple[float, float]:
    """(reading, messages) of one token of each text on H100s: weights and cache are read, two sums a layer wait.

    Of the algorithms for a sum the quicker one is taken.
    """
    model = PRESETS[name]
    weights = 2 * num_parameters(model, padded=True) / tp
    cached = closed_kv_bytes(model, CONTEXT) * texts / tp
    message = 2 * texts * model.width
    link = H100.inside
    costs = [collective_cost(f"{kind}_all_reduce", tp, message) for kind in ("ring", "halving_doubling")]
    one_sum = min(cost.seconds(link.latency_s, link.bytes_per_s) for cost in costs)
    return (weights + cached) / H100.memory_bytes_per_s, (2 * model.num_layers + 1) * one_sum


def closed_kv_bytes(model, context: int, itemsize: int = 2) -> float:
    """2 (keys and values) × layers × key heads × head dim × context × bytes."""
    heads = getattr(model, "num_kv_heads", None) or model.num_heads
    head_dim = getattr(model, "head_dim", None) or model.width // model.num_heads
    return 2 * model.num_layers * heads * head_dim * context * itemsize


def traced_decode(made) -> tuple[int, int]:
    """(all-reduces, bytes that a device sends) of one token of each text, in the decode program."""
    tokens = made.abstract_tokens()
    found = collectives_of(made.decode.trace(made.abstract_params(), made.caches, tokens, tokens).jaxpr, made.shape)
    return sum(each.count for each in found if each.kind == "all_reduce"), total_sent(found, made.shape)


# --------------------------------------------------------------------------------------------------------------- run


def generation_checks(broken: str | None) -> Findings:
    faults = {"place": (NextTokens, "_extended", one_place_off), "mask": (Prompts, "attend", without_mask)}
    with jax.enable_x64(True):
        with patch.object(*faults[broken]) if broken in faults else contextlib.nullcontext():
            tokens, logits, _, _ = generate("", broken != "positions")
            tp_tokens, tp_logits, made, caches = generate("tp=2", broken != "positions")
        true = trained_logits(tokens)
        num_sums, sent = traced_decode(made)
    scale = np.abs(true).max()
    first, later, sharded = (
        float(np.abs(a - b).max() / scale)
        for a, b in ((logits[:, 0], true[:, 0]), (logits[:, 1:], true[:, 1:]), (tp_logits, logits))
    )
    yield at_most("first token: error of its logits, against training", first, 1e-12)
    yield at_most("later tokens: error of their logits, against training", later, 1e-12)
    yield at_most("tp=2: error of the logits, against one device", sharded, 1e-12)
    yield holds("tp=2: every token is that of one device", np.array_equal(tokens, tp_tokens))
    if broken:
        return
    held = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(caches))
    places = len(LENGTHS) * (max(LENGTHS) + NEW)
    formula = bytes_per_token(MODEL, made.shape, "float64", len(LENGTHS))
    yield equal("cache of a device on tp=2", held, closed_kv_bytes(MODEL, places, 8) / 2, unit="bytes")
    yield equal("sums over tp in decode: two a layer and the embedding's", num_sums, 2 * MODEL.num_layers + 1)
    yield equal("bytes sent for a token of each text", sent, formula)


@lab(
    title="Inference",
    question="When do several devices make the next token sooner, when later, and what must the cache hold?",
    breaks={
        "place": {"later tokens*"},
        "positions": {"later tokens*"},
        "mask": {"first token*", "later tokens*"},
    },
    devices=2,
)
def run(broken: str | None) -> Findings:
    yield from generation_checks(broken)
    if broken:
        return
    for name, known in zip(SIZES, (124.4e6, 8.03e9, 70.55e9), strict=True):
        yield equal(f"{name}: parameters", num_parameters(PRESETS[name]), known, within=0.005)
    times = {name: {tp: sum(decode_seconds(name, tp)) for tp in DEGREES} for name in SIZES}
    small, large = times[SIZES[0]], times[SIZES[2]]
    slower = small[1] < small[2] < small[8]
    yield holds("a small model is slower on two devices, and slower still on eight", slower)
    yield at_least("a large one is faster on eight than on two", large[2] / large[8], 2, "times")
    rows = [
        [name, tp, *[1e3 * t for t in (*decode_seconds(name, tp), each[tp])], each[1] / each[tp]]
        for name, each in times.items()
        for tp in DEGREES
    ]
    moves = []
    for name in SIZES[1:]:
        for context in (1024, 8192, 32_768):
            size, link = closed_kv_bytes(PRESETS[name], context), H100.between.bytes_per_s
            prefill = 2 * num_parameters(PRESETS[name]) * context / H100.peak("bfloat16") / 8
            moves.append([name, context, size / 1e9, 1e3 * prefill, 1e3 * size / link / 8, 1e3 * size / link])
    curves = {name: (DEGREES, [each[1] / each[tp] for tp in DEGREES]) for name, each in times.items()}
    title, llama = "Speed-up of decode, one text (predicted, H100)", PRESETS["llama3-8b"]
    cache, weights = closed_kv_bytes(llama, 1), 2 * num_parameters(llama)
    units = "reading, ms {:.3f} | messages, ms {:.3f} | a token, ms {:.3f} | speed-up {:.2f}"
    moved = "cache, GB {:.2f} | prefill, ms {:,.0f} | moved by 8 links, ms {:,.1f} | by one, ms {:,.0f}"
    yield table("decode", f"model | tp | {units}", rows)
    yield table("moves", f"model, tp=8 | tokens {{:,}} | {moved}", moves)
    yield Picture("speedup", lambda: drawing.lines(title, "tp", "times one device", curves, log_x=True))
    yield Guesses(
        kv=cache / 1024,
        token=1e3 * weights / H100.memory_bytes_per_s,
        balance=H100.peak("bfloat16") / H100.memory_bytes_per_s,
        share=100 * decode_seconds("llama3-8b", 8)[1] / sum(decode_seconds("llama3-8b", 8)),
        context=weights / cache,
    )
