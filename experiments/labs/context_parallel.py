"""Context parallelism: a ring of attention written by hand, with a backward of its own, in a balanced order.

Dims: B batch, T positions of this rank, S of the whole sequence, K heads of keys, G queries' heads that share one, H
head dim, N = K * G, D width, V vocabulary. Sources: Ring Attention (arXiv 2310.01889); the order is that of Llama 3
(2407.21783, section 3.3.2).
"""

import math
from dataclasses import dataclass, replace
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import context_parallel as library
from jaxdist.parallel import rank, varying
from jaxdist.parallel.blocked_attention import Places, blocked_attention
from jaxdist.parallel.sequence import Split
from jaxdist.plan.parts import OneRank, layer_memory, rows_to_trace
from jaxdist.plan.proof.trace import total_sent
from jaxdist.strategy import PrecisionConfig

from ..charts import Cell
from . import drawing
from .exchanges import on_mesh, relative_error, sent_over
from .lab import Findings, Guesses, Picture, Table, at_least, at_most, equal, lab, table

AXIS, RANKS = "cp", 4
B, S, K, G, H = 2, 32, 2, 4, 4
N, CHUNK = K * G, S // (2 * RANKS)
WIDTH, VOCAB, STEPS, WINDOW = 16, 24, 20, 5
OF_ATTENTION, OF_LOSS = ("lse", "late", "seam", "keys"), ("targets", "count")  # breaks
LOWEST = -1e30  # a score that no softmax sees; finite, since the difference of two infinities is not a number


def on_ranks(body, in_specs, out_specs):
    return on_mesh(f"{AXIS}={RANKS}", body, in_specs, out_specs)


# ------------------------------------------------------------------------------------------- JAX's own log-sum-exp


def in_two_halves(q_BTNH, k_BSNH, v_BSNH):
    """Attention to the keys in two halves, merged by the log-sum-exp that JAX returns with each."""
    halves = slice(0, S // 2), slice(S // 2, S)
    parts = [
        jax.nn.dot_product_attention(q_BTNH, k_BSNH[:, half], v_BSNH[:, half], return_residual=True) for half in halves
    ]
    lse_BTN = jnp.logaddexp(parts[0][1], parts[1][1])
    return sum(o_BTNH * jnp.exp(own_BTN - lse_BTN)[..., None] for o_BTNH, own_BTN in parts)


# ------------------------------------------------------------------------------------------- a ring, by hand


@dataclass(frozen=True)
class Ring:
    """How ranks attend. window: a query sees itself and the window - 1 positions before it. broken: a break, of
    OF_ATTENTION."""

    zigzag: bool = True
    window: int | None = None
    broken: str | None = None

    def positions(self, holder, length: int):
        """Where the `length` tokens of a rank stand in the sequence: i32[T]. In a zig-zag: chunks r and 2n-1-r."""
        if not self.zigzag:
            return holder * length + jnp.arange(length)
        chunk = length // 2
        early, late = holder * chunk, (2 * RANKS - 1 - holder) * chunk
        return jnp.concatenate([early + jnp.arange(chunk), late + jnp.arange(chunk)])

    def seen(self, step: int, length: int):
        """Which keys this rank's queries see in a step, where it holds those of `step` ranks before: bool[T, S]."""
        me = rank(AXIS)
        query_T, key_S = self.positions(me, length), self.positions((me - step) % RANKS, length)
        if self.broken == "seam" and step:
            key_S = key_S + 1
        back_TS = query_T[:, None] - key_S
        return (back_TS >= 0) & (back_TS < (self.window or math.inf))


def onwards(arrays):
    """To the next rank of the ring."""
    return lax.ppermute(arrays, AXIS, [(r, (r + 1) % RANKS) for r in range(RANKS)])


def masked_scores(q_BTKGH, k_BSKH, seen_TS):
    scores_BTKGS = jnp.einsum("btkgh,bskh->btkgs", q_BTKGH, k_BSKH) * q_BTKGH.shape[-1] ** -0.5
    return jnp.where(seen_TS[:, None, None], scores_BTKGS, LOWEST)


def attend(q_BTKGH, k_BSKH, v_BSKH, seen_TS):
    """(o[B, T, K, G, H], log-sum-exp of the scores[B, T, K, G, 1]) of attention to these keys."""
    scores_BTKGS = masked_scores(q_BTKGH, k_BSKH, seen_TS)
    lse_BTKG1 = jax.nn.logsumexp(scores_BTKGS, axis=-1, keepdims=True)
    return jnp.einsum("btkgs,bskh->btkgh", jnp.exp(scores_BTKGS - lse_BTKG1), v_BSKH), lse_BTKG1


def merge(one, other):
    """Attention to the keys of both: each part weighs as much as its keys' share of the softmax's denominator."""
    (o, lse), (new_o, new_lse) = one, other
    both = jnp.logaddexp(lse, new_lse)
    return o * jnp.exp(lse - both) + new_o * jnp.exp(new_lse - both), both


def go_round(ring: Ring, q_BTKGH, k_BTKH, v_BTKH, attend=attend):
    """(o, log-sum-exp) of attention to the whole sequence.

    Layout: q[B, T_cp, K, G, H], k, v[B, T_cp, K, H] -> o[B, T_cp, K, G, H].
    Sends: k and v of a rank, RANKS - 1 times.
    """
    held, length = (k_BTKH, v_BTKH), q_BTKGH.shape[1]
    found = attend(q_BTKGH, *held, ring.seen(0, length))
    for step in range(1, RANKS):
        held = onwards(held)
        found = merge(found, attend(q_BTKGH, *held, ring.seen(step, length)))
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def ring_attention(ring: Ring, q_BTKGH, k_BTKH, v_BTKH):
    return go_round(ring, q_BTKGH, k_BTKH, v_BTKH)[0]


def forward(ring: Ring, q, k, v):
    o, lse = go_round(ring, q, k, v)
    return o, (q, k, v, o, lse)


def backward(ring: Ring, kept, do):
    """(dq, dk, dv). Keys and values go round again, and their gradients with them: after RANKS hops these are home.

    Sends: k, v, dk and dv of a rank, RANKS times.
    """
    q, own_k, own_v, o, lse = kept
    sums = (do * o).sum(-1, keepdims=True)
    k, v, dk, dv, dq = own_k, own_v, jnp.zeros_like(own_k), jnp.zeros_like(own_v), jnp.zeros_like(q)
    for step in range(RANKS):
        weights = jnp.exp(masked_scores(q, k, ring.seen(step, q.shape[1])) - lse)  # of the softmax over all keys
        dscores = weights * (jnp.einsum("btkgh,bskh->btkgs", do, v) - sums) * q.shape[-1] ** -0.5
        dq += jnp.einsum("btkgs,bskh->btkgh", dscores, k)
        dk += jnp.einsum("btkgs,btkgh->bskh", dscores, q)
        dv += jnp.einsum("btkgs,btkgh->bskh", weights, do)
        k, v, dk, dv = onwards((k, v, dk, dv))
        if ring.broken == "keys":
            k, v = own_k, own_v
    return dq, dk, dv


ring_attention.defvjp(forward, backward)


def attend_by_jax(q, k, v, seen_TS):
    """`attend`, by JAX's function."""
    o, lse = jax.nn.dot_product_attention(
        q.reshape(*q.shape[:2], N, H), k, v, mask=seen_TS[None, None], return_residual=True
    )
    return o.reshape(q.shape), lse.reshape(*q.shape[:-1], 1)


def attention(ring: Ring, q, k, v):
    """`ring_attention`, or what a break makes of it."""
    if ring.broken == "late":
        k, v = onwards((k, v))
    if ring.broken == "lse":
        return go_round(ring, q, k, v, attend_by_jax)[0]
    return ring_attention(ring, q, k, v)


def whole_attention(q_BTKGH, k_BSKH, v_BSKH, window: int | None = None):
    """The whole matrix of scores on one device, differentiated by JAX."""
    back_TS = jnp.arange(S)[:, None] - jnp.arange(S)
    seen_TS = (back_TS >= 0) & (back_TS < (window or S))
    weights = jax.nn.softmax(masked_scores(q_BTKGH, k_BSKH, seen_TS), axis=-1)
    return jnp.einsum("btkgs,bskh->btkgh", weights, v_BSKH)


# ------------------------------------------------------------------------------------------- a model on it


def local_loss(ring: Ring, broken: str | None, weights, tokens_BS, targets_BS):
    """(this rank's part of the mean loss over all targets, its tokens with the right target).

    Layout: tokens, targets[B, S] on every rank, which takes its own of both; negative targets do not count.
    """
    me, length = rank(AXIS), S // RANKS
    places_T = Ring().positions(me, length)
    tokens_BT, right_BT = tokens_BS[:, places_T], targets_BS[:, places_T]
    targets_BT = right_BT
    if broken == "targets":
        targets_BT = jnp.where(right_BT < 0, -1, jnp.roll(tokens_BT, -1, axis=1))
    losses = token_losses(partial(attention, ring), weights, tokens_BT, targets_BT, ring.positions(me, length))
    count = jnp.sum(targets_BT >= 0)
    loss = jnp.sum(losses) / (RANKS * count if broken == "count" else lax.psum(count, AXIS))
    return loss, jnp.sum(targets_BT == right_BT)


def token_losses(attention, weights, tokens_BT, targets_BT, positions_T):
    """Cross-entropy of each token that has a target, else 0: attention and a head that is the token table."""
    x_BTD = weights["tokens"][tokens_BT] + weights["positions"][positions_T]
    shapes = {"q": (K, G, H), "k": (K, H), "v": (K, H)}
    q, k, v = ((x_BTD @ weights[name]).reshape(*tokens_BT.shape, *shape) for name, shape in shapes.items())
    o_BTKGH = attention(q, k, v)
    x_BTD = x_BTD + o_BTKGH.reshape(*tokens_BT.shape, -1) @ weights["out"]
    logits_BTV = x_BTD @ weights["tokens"].T
    chosen_BT1 = jnp.take_along_axis(logits_BTV, jnp.maximum(targets_BT, 0)[..., None], -1)
    return jnp.where(targets_BT >= 0, jax.nn.logsumexp(logits_BTV, -1) - chosen_BT1[..., 0], 0)


@cache
def ring_gradients(ring: Ring, broken: str | None):
    """A program (weights, tokens, targets) -> (loss, gradients, tokens with the right target) of all ranks."""

    def body(weights, *batch):
        loss = jax.value_and_grad(partial(local_loss, ring, broken), has_aux=True)
        (value, right), grads = loss(varying(weights, AXIS), *batch)
        return lax.psum((value, grads, right), AXIS)

    return on_ranks(body, P(), P())


def loss_on_one_device(weights, tokens_BS, targets_BS):
    losses = token_losses(whole_attention, weights, tokens_BS, targets_BS, jnp.arange(S))
    return jnp.sum(losses) / jnp.sum(targets_BS >= 0)


@cache
def on_one_device():
    """(loss, gradients) of both texts."""
    _, (weights, *batch), other = example()
    run = jax.jit(jax.value_and_grad(loss_on_one_device))
    return run(weights, *batch), run(weights, *other)


def descend(gradients, weights, *batch) -> list[float]:
    """The loss of every step of plain descent."""
    losses = []
    for _ in range(STEPS):
        loss, grads, _ = gradients(weights, *batch)
        weights = jax.tree.map(lambda w, g: w - 0.1 * np.asarray(g), weights, grads)
        losses.append(float(loss))
    return losses


# ------------------------------------------------------------------------------------------- checks of both


@cache
def example():
    """(q, k, v, do), (weights, tokens, targets), another text; targets count unevenly."""
    rng = np.random.default_rng(0)
    q, do = rng.standard_normal((2, B, S, K, G, H))
    k, v = rng.standard_normal((2, B, S, K, H))
    shapes = {  # of the model
        "tokens": (VOCAB, WIDTH),
        "positions": (S, WIDTH),
        "q": (WIDTH, N * H),
        "k": (WIDTH, K * H),
        "v": (WIDTH, K * H),
        "out": (N * H, WIDTH),
    }
    weights = {name: 0.4 * rng.standard_normal(shape) for name, shape in shapes.items()}
    texts = rng.integers(VOCAB, size=(2, B, S + 1))
    texts[0, 0, 22:] = texts[0, 1, :4] = -1
    first, other = ((np.maximum(text[:, :-1], 0), text[:, 1:]) for text in texts)
    return (q, k, v, do), (weights, *first), other


def values_and_gradients(function, q, k, v, do):
    o, back = jax.vjp(function, q, k, v)
    return dict(zip(PARTS, (o, *back(do)), strict=True))


PARTS = ("o", "dq", "dk", "dv")


@cache
def expected(window: int | None):
    return jax.jit(partial(values_and_gradients, partial(whole_attention, window=window)))(*example()[0])


def in_order(length: int = S) -> np.ndarray:
    """The positions in the sequence of all tokens, rank after rank."""
    return np.concatenate([np.asarray(Ring().positions(r, length // RANKS)) for r in range(RANKS)])


@cache
def errors_of(function, ring: Ring) -> dict[str, float]:
    """Errors of attention(ring, q, k, v) with arrays split over cp in a zig-zag: o, dq, dk, dv."""
    order, split = in_order(), P(None, AXIS)
    run = on_ranks(partial(values_and_gradients, partial(function, ring)), split, split)
    found = run(*(x[:, order] for x in example()[0]))
    return {name: relative_error(found[name], wanted[:, order]) for name, wanted in expected(ring.window).items()}


ROUNDING = 1e-6  # of JAX's own attention, which computes in fp32 whatever it is given


def attention_checks(broken: str | None) -> Findings:
    broken = broken if broken in OF_ATTENTION else None
    causal, windowed = (errors_of(attention, Ring(window=window, broken=broken)) for window in (None, WINDOW))
    gradients = max(windowed[name] for name in PARTS[1:])
    yield from (at_most(f"ring: error of {name}", causal[name], ROUNDING) for name in PARTS)
    yield at_most(f"ring, window of {WINDOW}: error of o", windowed["o"], ROUNDING)
    yield at_most(f"ring, window of {WINDOW}: largest error of a gradient", gradients, ROUNDING)


def model_checks(broken: str | None) -> Findings:
    _, batch, other = example()
    weights, ring = batch[0], Ring(broken=broken if broken in OF_ATTENTION else None)
    of_loss = broken if broken in OF_LOSS else None
    run = ring_gradients(ring, of_loss)
    loss, grads, right = run(*batch)
    (wanted, wanted_grads), (alone, _) = on_one_device()
    counted = replace(ring, zigzag=not ring.zigzag) if broken == "order" else ring
    evaluate = ring_gradients(counted, of_loss)
    losses, worst = descend(run, *batch), relative_error(grads, wanted_grads)
    found, *_ = evaluate(weights, *other)
    yield equal("model: tokens whose target is the next token", int(right), B * S)
    yield equal("model: loss of step 1 against one device", float(loss), float(wanted), within=ROUNDING)
    yield at_most("model: gradients of step 1, error of the worst leaf", worst, ROUNDING)
    yield at_least(f"model: loss of step 1 over that of step {STEPS}", losses[0] / losses[-1], 1.3)
    yield equal("model: loss of another text against one device", float(found), float(alone), within=ROUNDING)


# ------------------------------------------------------------------------------------------- what the page shows


def halves_errors() -> dict[str, float]:
    """Errors of `in_two_halves` in fp32: o, dq, dk, dv."""
    rng = np.random.default_rng(1)
    arrays = rng.standard_normal((4, B, S, N, H)).astype(np.float32)
    found, wanted = (
        jax.jit(partial(values_and_gradients, each))(*arrays) for each in (in_two_halves, jax.nn.dot_product_attention)
    )
    return {name: relative_error(found[name], wanted[name]) for name in PARTS}


def by_library(ring: Ring, q, k, v):
    q_BTNH = q.reshape(*q.shape[:2], -1, q.shape[-1])
    split = Split(RANKS)
    return library.context_attention(split, whole_heads, q_BTNH, k, v, window=ring.window).reshape(q.shape)


def whole_heads(q_BSNH, k_BSKH, v_BSKH):
    """What ulysses computes between its exchanges."""
    return blocked_attention(q_BSNH, k_BSKH, v_BSKH, Places(0, 0))


def library_checks() -> Findings:
    for window in (None, WINDOW):
        largest = max(errors_of(by_library, Ring(window=window)).values())
        yield at_most(f"the library, window {window}: largest error of o, dq, dk, dv", largest, ROUNDING)


def pairs_of(ring: Ring) -> np.ndarray:
    """Pairs of chunks that have a score that counts, in every hop: [RANKS, hops]."""

    def body():
        length = S // RANKS
        seen = jnp.stack([ring.seen(step, length) for step in range(RANKS)])
        return seen.reshape(RANKS, 2, length // 2, 2, length // 2).any((2, 4)).sum((1, 2))[None]

    return np.asarray(on_ranks(body, (), P(AXIS))())


ORDERS = {"plain": Ring(zigzag=False), "zig-zag": Ring(zigzag=True)}


def balance() -> Findings:
    rows = []
    for name, longest in (("plain", 4 * RANKS - 1), ("zig-zag", 2 * RANKS + 1)):
        pairs = pairs_of(ORDERS[name])
        waited = int(pairs.max(0).sum())
        rows.append([name, *pairs.sum(1), waited])
        yield equal(f"{name}: pairs of chunks of the busiest rank of each hop, added", waited, longest)
    ranks = " | ".join(f"rank {r}" for r in range(RANKS))
    yield table("balance", f"order | {ranks} | busiest rank of each hop, added", rows)


LONG, LONG_HEAD = 8192, 128  # of the table of bytes: one sequence in bf16, N heads of queries and K of keys
KINDS = {  # (a split of the library, heads of keys)
    "ring": (Split(RANKS), K),
    "ring, keys repeated": (Split(RANKS), N),
    "all-gather": (Split(RANKS, gathers=True), K),
    "ulysses": (Split(RANKS, exchanging=RANKS), K),
    "usp-2": (Split(RANKS, exchanging=2), K),
}


def sent_by_formula(kind: str) -> tuple[float, float]:
    """Bytes that a rank sends for a layer, forward and backward. n ranks in groups of u, m = n / u."""
    split, key_heads = KINDS[kind]
    n, u, m = split.ranks, split.exchanging, split.groups
    of_head = 2 * LONG // n * LONG_HEAD  # 16 bits
    keys = 2 * of_head * (key_heads if key_heads % u == 0 else u)
    exchanged = (u - 1) / u * (2 * N * of_head + keys) if u > 1 else 0
    once = exchanged + (m - 1) * keys
    return once, once + (0 if split.gathers else 2 * (m - 1) * keys)  # a ring's dk and dv are in fp32


def sent_by_trace(attention, key_heads: int, *query_heads: int) -> tuple[int, int]:
    """Bytes that a rank sends for attention(q, k, v), forward and backward."""

    def values(*shape):
        return jax.ShapeDtypeStruct((1, LONG, *shape, LONG_HEAD), jnp.bfloat16)

    def sent(function, *arguments) -> int:
        mesh = f"{AXIS}={RANKS}"
        return total_sent(
            sent_over(on_mesh(mesh, function, P(None, AXIS), P(None, AXIS)), mesh, *arguments), parse_mesh(mesh)
        )

    arguments = values(*query_heads), values(key_heads), values(key_heads)
    both = sent(partial(values_and_gradients, attention), *arguments, values(*query_heads))
    return (once := sent(attention, *arguments)), both - once


def traffic() -> Findings:
    cases = {
        kind: (sent_by_formula(kind), sent_by_trace(partial(library.context_attention, split, whole_heads), heads, N))
        for kind, (split, heads) in KINDS.items()
    }
    keys = 2 * 2 * LONG // RANKS * LONG_HEAD * K
    by_hand = sent_by_trace(partial(ring_attention, Ring()), K, K, G)
    cases["ring by hand"] = ((RANKS - 1) * keys, RANKS * 2 * keys), by_hand
    yield from (equal(f"{kind}: bytes sent, traced", sum(found), sum(form)) for kind, (form, found) in cases.items())
    rows = [[kind, *[number / 2**20 for number in (*form, *found)]] for kind, (form, found) in cases.items()]
    columns = "formula, forward {:.2f} | formula, backward {:.2f} | traced, forward {:.2f} | traced, backward {:.2f}"
    yield table("bytes", f"MiB a layer | {columns}", rows)


LLAMA = replace(PRESETS["llama3-8b"], seq_len=131_072, num_layers=1)
SPLITS = (1, 2, 4, 8)


def keys_sent(cp: int) -> int:
    """Bytes of keys and values that a rank of a ring sends forward for a layer of `LLAMA`."""
    return (cp - 1) * 2 * LLAMA.seq_len // cp * LLAMA.num_kv_heads * LLAMA.head_dim * 2


def scaling() -> Table:
    rows = []
    for cp in SPLITS:
        # Neither the ring nor one device, which attends in blocks at this length, keeps scores.
        one = OneRank(LLAMA, 1, rows_to_trace(LLAMA), PrecisionConfig("bfloat16"), cp=cp)
        scores = LLAMA.seq_len * (LLAMA.seq_len + 1) / 2 / cp
        rows.append([cp, layer_memory(one).scan / 2**30, scores / 1e9, keys_sent(cp) / 2**20])
    columns = "cp | kept by a layer, GiB {:.2f} | scores of a head, billions {:.2f} | sent forward, MiB {:,.0f}"
    return table("scaling", columns, rows)


def draw_pairs():
    """The matrix of pairs of chunks in both orders: colour is the rank that computes a pair, the number its hop."""
    parts, names = {}, {}
    for name, ring in ORDERS.items():
        owner = {int(p) // CHUNK: r for r in range(RANKS) for p in ring.positions(r, 2 * CHUNK)}
        names[name] = [f"rank {owner[chunk]}" for chunk in range(2 * RANKS)]
        parts[name] = [
            Cell(query, key, str((owner[query] - owner[key]) % RANKS), owner[query])
            for query in range(2 * RANKS)
            for key in range(query + 1)
        ]
    return drawing.grids("The hop in which a rank computes each pair of chunks", parts, names, "chunk of keys")


# ------------------------------------------------------------------------------------------- the lab


def slower(n: int) -> float:
    """The plain order's time over the zig-zag's."""
    return (4 * n - 1) / (2 * n + 1)


@lab(
    title="Context parallelism and long sequences",
    question="How do several devices attend to one long sequence, what do they send for that, which faults are silent?",
    devices=RANKS,
    breaks={
        "lse": {"ring: error of d[qk]", "ring, window*gradient", "model: gradients*"},
        "late": {"ring: *", "ring, window*", "model: loss*device", "model: gradients*"},
        "seam": {"ring, window*"},
        "keys": {"ring: error of d?", "ring, window*gradient", "model: gradients*"},
        "targets": {"model: tokens*", "model: loss*device", "model: gradients*"},
        "order": {"model: loss of another*"},
        "count": {"model: loss of step 1 against*", "model: gradients*"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from attention_checks(broken)
        yield from model_checks(broken)
        if broken:
            return
        rings, balanced = [*library_checks()], [*balance()]
    halves = halves_errors()
    yield at_most("JAX's log-sum-exp: error of o", halves["o"], ROUNDING)
    yield from (at_least(f"JAX's log-sum-exp: error of {name}", halves[name], 0.1) for name in ("dq", "dk"))
    yield table("lse", "merged in two halves | relative error {:.1e}", halves.items())
    yield from (*rings, *balanced, *traffic(), scaling())
    yield Picture("blocks", draw_pairs)
    yield Guesses(
        wait=slower(RANKS),
        heads=N / K,
        backward=3,
        sent=keys_sent(8) / 1e9,
        hidden=2 * LLAMA.num_kv_heads / LLAMA.num_heads * 400e12 / 50e9,
        more=slower(8),
    )
