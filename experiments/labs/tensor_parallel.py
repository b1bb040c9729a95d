"""Tensor parallelism: which cuts cost no communication, what a layer sends, and when it is not worth it."""

import dataclasses
import math
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_gather, all_reduce, enter, leave, rank, varying, vocab_parallel_cross_entropy
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.runtime.devices import acquire_devices

from . import drawing
from .exchanges import traced
from .lab import Check, Lab, Result, Table, at_least, at_most, equal, holds
from .tools import small_run

TP = 4
B, T, D, HEADS, H, F, LAYERS = 2, 6, 32, 8, 4, 64, 2  # F is of the MLP


def on_tp(body: Callable, in_specs, out_specs) -> Callable:
    """A function of global arrays, run by TP ranks of `tp`."""
    mesh = make_mesh(parse_mesh(f"tp={TP}"), acquire_devices(TP, "cpu").devices[:TP])
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs))


def sent(run: Callable, *args) -> list:
    """The collectives of a jitted program over tp."""
    return collectives_of(run.trace(*args).jaxpr, parse_mesh(f"tp={TP}"))


def bytes_of(found: list) -> int:
    return sum(each.sent_bytes(parse_mesh(f"tp={TP}")) for each in found)


# ------------------------------------------------------------------------------------------- a transformer, by hand

SPECS = {"qkv": P(None, None, "tp"), "out": P("tp"), "bias": P(), "up": P(None, "tp"), "down": P("tp")}


def attention(x, qkv):
    """x[B, T, D], qkv[D, 3, N, H] -> o[B, T, N, H], of as many heads as the array has."""
    q, k, v = jnp.einsum("btd,dcnh->cbtnh", x, qkv)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def layer(p, x, enter, leave, bias_first: bool = False):
    """x[B, T, D] -> [B, T, D]: column-parallel, what is done to heads or elements alone, row-parallel; twice."""
    y = jnp.einsum("btnh,nhd->btd", attention(enter(normed(x)), p["qkv"]), p["out"])
    x = x + (leave(y + p["bias"]) if bias_first else leave(y) + p["bias"])
    return x + leave(jax.nn.gelu(enter(normed(x)) @ p["up"]) @ p["down"])


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def loss(params, x, y, enter=lambda x: x, leave=lambda x: x, bias_first=False):
    """Of a first matrix that every rank holds, then layers."""
    h = x @ params["first"]
    for p in params["layers"]:
        h = layer(p, h, enter, leave, bias_first)
    return jnp.mean((h - y) ** 2)


@jax.custom_vjp
def enter_without_sum(x):
    """`enter`, but backward goes on with rank 0's part of dx alone."""
    return varying(x, "tp")


enter_without_sum.defvjp(
    lambda x: (varying(x, "tp"), None), lambda _, dx: (lax.psum(jnp.where(rank("tp") == 0, dx, 0), "tp"),)
)


def split_through_heads(qkv):
    """The columns of [D, 3 N H] dealt out in order, q first: what a rank takes for q, k and v of its heads is not."""
    flat = qkv.reshape(D, TP, 3, HEADS // TP, H)
    return jnp.moveaxis(flat, 1, 2).reshape(D, 3, HEADS, H)


def by_hand(broken: str | None) -> list[Check]:
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape) / math.sqrt(shape[0])

    def one_layer():
        bias = 0.1 * rng.standard_normal(D)
        return {
            "qkv": draw(D, 3, HEADS, H),
            "out": draw(HEADS, H, D),
            "bias": bias,
            "up": draw(D, F),
            "down": draw(F, D),
        }

    params = {"first": draw(D, D), "layers": [one_layer() for _ in range(LAYERS)]}
    x, y = rng.standard_normal((2, B, T, D))
    placed = params
    if broken == "qkv":
        placed = {**params, "layers": [{**p, "qkv": split_through_heads(p["qkv"])} for p in params["layers"]]}
    parallel = partial(
        loss,
        enter=enter_without_sum if broken == "input-sum" else partial(enter, sp=False),
        leave=partial(leave, sp=False),
        bias_first=broken == "bias",
    )
    specs = {"first": P(), "layers": [SPECS] * LAYERS}
    forward = on_tp(parallel, (specs, P(), P()), P())
    both = on_tp(jax.value_and_grad(parallel), (specs, P(), P()), (P(), specs))

    def train(params, x, y):
        def step(params, _):
            now, grads = jax.value_and_grad(parallel)(params, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), now

        return lax.scan(step, params, length=30)[1]

    value, grads = both(placed, x, y)
    expected, wanted = jax.value_and_grad(loss)(params, x, y)
    losses = np.asarray(on_tp(train, (specs, P(), P()), P())(placed, x, y))
    message = B * T * D * 8

    def error(found, wanted):
        return max(
            float(jnp.abs(jax.device_get(f) - w).max() / jnp.abs(w).max())
            for f, w in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True)
        )

    return [
        equal("by hand: the loss against one device", float(value), float(expected), within=1e-12),
        at_most("by hand: error of the last MLP's gradients", error(mlp(grads), mlp(wanted)), 1e-11),
        at_most("by hand: error of all gradients", error(grads, wanted), 1e-11),
        equal("by hand: all-reduces forward, 2 a layer", len(sent(forward, placed, x, y)), 2 * LAYERS),
        equal("by hand: all-reduces with backward, 2 + 2 a layer", len(sent(both, placed, x, y)), 4 * LAYERS),
        equal(
            "by hand: bytes with backward, 8 (t-1)/t of B·T·D elements a layer",
            bytes_of(sent(both, placed, x, y)),
            8 * (TP - 1) / TP * message * LAYERS,
        ),
        at_least("by hand: loss of the first step over that of step 30", float(losses[0] / losses[-1]), 1.3),
    ]


def mlp(tree):
    return [tree["layers"][-1][name] for name in ("up", "down")]


def heads_apart() -> np.ndarray:
    """[N, N]: how much head i's output changes with head j's columns of QKV; largest derivative."""
    rng = np.random.default_rng(1)
    x, qkv = rng.standard_normal((1, T, D)), rng.standard_normal((D, 3, HEADS, H)) / math.sqrt(D)
    jacobian = jax.jacobian(lambda w: attention(x, w).sum((0, 1, 3)))(qkv)  # [N, D, 3, N, H]
    return np.abs(np.asarray(jacobian)).max(axis=(1, 2, 4))


# ------------------------------------------------------------------------------------------- the order of two matrices


def column_then_row(x, up, down):
    """up[D, F_tp], down[F_tp, D]: one sum at the end."""
    return leave(jax.nn.gelu(enter(x, sp=False) @ up) @ down, sp=False)


def row_then_column(x, up, down):
    """up[D_tp, F], down[F, D_tp]: partial sums must be added before the GELU, and columns gathered after it."""
    width = up.shape[0]
    mine = lax.dynamic_slice_in_dim(varying(x, "tp"), rank("tp") * width, width, axis=2)
    h = jax.nn.gelu(all_reduce(mine @ up, "tp"))
    return all_gather(varying(h, "tp") @ down, "tp", 2, replicated=True)


def column_twice(x, up, down):
    """up[D, F_tp], down[F, D_tp]: gather after each."""
    h = all_gather(jax.nn.gelu(enter(x, sp=False) @ up), "tp", 2)
    return all_gather(h @ down, "tp", 2, replicated=True)


ORDERS = {
    "column, row": (column_then_row, P(None, "tp"), P("tp"), 2 * D),
    "column, column": (column_twice, P(None, "tp"), P(None, "tp"), F + D),
    "row, column": (row_then_column, P("tp"), P(None, "tp"), 2 * F + D),
}


def orders() -> tuple[list[Check], list[list[str]]]:
    rng = np.random.default_rng(2)
    x, up, down = rng.standard_normal((B, T, D)), rng.standard_normal((D, F)), rng.standard_normal((F, D))
    expected, checks, rows = jax.nn.gelu(x @ up) @ down, [], []
    for name, (function, of_up, of_down, width) in ORDERS.items():
        run = on_tp(function, (P(), of_up, of_down), P())
        found, error = sent(run, x, up, down), jnp.abs(jax.device_get(run(x, up, down)) - expected).max()
        form = (TP - 1) / TP * B * T * width * 8
        checks += [
            at_most(f"{name}: error against one device", float(error / jnp.abs(expected).max()), 1e-12),
            equal(f"{name}: bytes a device sends forward", bytes_of(found), form),
        ]
        kinds = " + ".join(each.kind.replace("_", "-") for each in found)
        rows.append([name, kinds, f"{bytes_of(found):,}"])
    return checks, rows


# ------------------------------------------------------------------------------------------- the loss


def gathered_loss(x, table, targets):
    """Every rank gathers all logits: x[B, T, D], table[V_tp, D] -> loss[B, T]."""
    logits = all_gather(enter(x, sp=False) @ table.T, "tp", 2, replicated=True)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def losses() -> tuple[list[Check], list[list[str]]]:
    rng, vocab = np.random.default_rng(3), 512
    x, table = rng.standard_normal((B, T, D)), rng.standard_normal((vocab, D))
    targets = rng.integers(0, vocab, (B, T))
    split = on_tp(partial(vocab_parallel_cross_entropy, vocab_size=vocab, sp=False), (P(), P("tp"), P()), P())
    gathers = on_tp(gathered_loss, (P(), P("tp"), P()), P())
    args = (x, table, targets)
    error = np.abs(np.asarray(split(*args)) - np.asarray(gathers(*args))).max()
    share = (TP - 1) / TP
    checks = [
        at_most("the loss, vocabulary-parallel and gathered: largest difference", error, 1e-12),
        equal(
            "the loss, vocabulary-parallel: bytes, 3 numbers a token",
            bytes_of(sent(split, *args)),
            6 * share * B * T * 8,
        ),
        equal(
            "the loss, gathered: bytes, V numbers a token", bytes_of(sent(gathers, *args)), vocab * share * B * T * 8
        ),
    ]
    rows = []
    for size in (512, 50_257, 128_256):
        rows.append([f"{size:,}", f"{size * 4 * 7 / 8:,.0f}", f"{6 * 4 * 7 / 8:,.0f}", f"{size / 6:,.0f}"])
    return checks, rows


# ------------------------------------------------------------------------------------------- our step; dp beside tp

MODEL = dataclasses.replace(PRESETS["proof"], width=256, ffn_width=1024)
ROWS = (8, 16, 32, 64)


def elements(mesh: str, rows: int) -> int:
    """fp32 elements that one device sends in a step of our own, single numbers left out."""
    config = small_run(mesh, MODEL, batch_size=rows)
    shape = config.parallel.mesh
    return sum(c.sent_bytes(shape) for c in traced(config)[1] if c.full_bytes > 64) // 4


def tp_form(tokens: float) -> float:
    """4 all-reduces a layer, one of the embedding and one of the head, of D a token; and 3 numbers of the loss."""
    return 2 * 7 / 8 * tokens * ((4 * MODEL.num_layers + 2) * MODEL.width + 3)


def dp_form() -> float:
    return 2 * 7 / 8 * num_parameters(MODEL)


def crossover() -> float:
    """Tokens in the batch at which data and tensor parallelism send the same."""
    return dp_form() / tp_form(1)


def data_or_tensor() -> tuple[list[Check], list[list[str]]]:
    checks, rows = [], []
    for count in ROWS:
        tokens = count * MODEL.seq_len
        dp, tp = elements("dp=8", count), elements("tp=8", count)
        checks += [
            equal(f"our step, {tokens:,} tokens: elements sent over dp=8", dp, dp_form()),
            equal(f"our step, {tokens:,} tokens: elements sent over tp=8", tp, tp_form(tokens)),
        ]
        rows.append([f"{tokens:,}", f"{dp:,}", f"{tp:,}", "tensor" if tp < dp else "data"])
    config = small_run("tp=8", MODEL)
    in_layers = [c for c in traced(config)[1] if c.depth and c.axes == ("tp",)]
    checks.append(
        equal(
            "our step: all-reduces in the loops, 2 + 2 a layer", sum(c.count for c in in_layers), 4 * MODEL.num_layers
        )
    )
    return checks, rows


# ------------------------------------------------------------------------------------------- is it large enough

H100 = find_hardware("h100")


def busy(width: float, tokens: float, tp: int, link) -> tuple[float, float]:
    """(seconds of products, seconds of all-reduces) of one layer, forward and backward, bf16, at peak rates."""
    products = 72 * tokens * width**2 / tp / H100.peak()
    node = Cluster(H100, devices_per_node=tp, inside=link)
    return products, 4 * node.collective_seconds("ring_all_reduce", tp, 1, 2 * tokens * width)


def smallest_width(tp: int, link) -> float:
    """Where all-reduces take as long as products, for any number of tokens: 16 h (t-1)/t / B = 72 h² / (t F)."""
    return 16 * (tp - 1) / 72 * H100.peak() / link.bytes_per_s


def large_enough() -> tuple[list[Check], list[list[str]]]:
    checks, rows = [], []
    links = {"NVLink": H100.inside, "InfiniBand": H100.between}
    for name, link in links.items():
        width = smallest_width(8, link)
        without_latency = dataclasses.replace(link, latency_s=0.0)
        products, sums = busy(width, 8192, 8, without_latency)
        checks.append(
            equal(
                f"{name}: at the smallest width, seconds of all-reduces over products", sums / products, 1, within=1e-9
            )
        )
    for width in (768, 2048, 4096, 8192, 16_384):
        row = [f"{width:,}"]
        for tokens in (512, 8192):
            for link in links.values():
                products, sums = busy(width, tokens, 8, link)
                row.append(f"{sums / products:.2f}")
        rows.append(row)
    return checks, rows


# ------------------------------------------------------------------------------------------- the lab


def run(broken: str | None) -> Result:
    with jax.enable_x64(True):
        checks = by_hand(broken)
        if broken:
            return Result(checks)
        order_checks, order_rows = orders()
        loss_checks, loss_rows = losses()
        apart = heads_apart()
    off = apart[~np.eye(HEADS, dtype=bool)].max()
    data_checks, data_rows = data_or_tensor()
    size_checks, size_rows = large_enough()
    heads = [
        equal("heads: largest derivative of one head's output by another's columns", float(off), 0),
        holds("heads: every head's output depends on its own columns", bool((np.diag(apart) > 0).all())),
    ]
    return Result(
        [*checks, *heads, *order_checks, *loss_checks, *data_checks, *size_checks],
        tables=[
            Table("orders", ["matrices", "sent forward", "bytes"], order_rows),
            Table("losses", ["vocabulary", "gathered, bytes a token", "split, bytes a token", "times less"], loss_rows),
            Table("dp", ["tokens in the batch", "dp=8 sends", "tp=8 sends", "which sends less"], data_rows),
            Table(
                "sizes",
                ["width", "NVLink, 512 tokens", "InfiniBand, 512", "NVLink, 8,192", "InfiniBand, 8,192"],
                size_rows,
            ),
        ],
        pictures={"heads": partial(draw_heads, apart), "dp": draw_data},
        guesses=guesses(),
    )


def draw_heads(apart: np.ndarray):
    figure, axes = drawing.blank("Does head i use head j's columns? (computed)", "columns of head", "output of head")
    axes.pcolormesh(apart > 0, cmap="Blues", vmax=1.4)
    axes.invert_yaxis()
    axes.set_aspect("equal")
    axes.grid(visible=False)
    axes.set_xticks([head + 0.5 for head in range(HEADS)], range(HEADS))
    axes.set_yticks([head + 0.5 for head in range(HEADS)], range(HEADS))
    for edge in range(2, HEADS, 2):
        axes.axhline(edge, color="#787882", linewidth=0.8)
        axes.axvline(edge, color="#787882", linewidth=0.8)
    return figure


def draw_data():
    tokens = [count * MODEL.seq_len for count in (4, *ROWS, 128)]
    curves = {
        "dp=8": (tokens, [dp_form() / 1e6] * len(tokens)),
        "tp=8": (tokens, [tp_form(number) / 1e6 for number in tokens]),
    }
    title = "Sent by a device in a step (closed form)"
    return drawing.lines(title, "tokens in the batch", "million elements", curves, log_x=True, log_y=True)


def guesses() -> dict[str, float]:
    return {
        "layer": 4,
        "width": smallest_width(8, H100.inside),
        "cross": crossover(),
        "large": 3,
        "slow": smallest_width(8, H100.between),
        "loss": 128_256 / 6,
    }


ALL = "by hand: error of all gradients"
LAST = "by hand: error of the last MLP's gradients"
LOSS = "by hand: the loss against one device"
COUNT = "by hand: all-reduces with backward, 2 + 2 a layer"
BYTES = "by hand: bytes with backward, 8 (t-1)/t of B·T·D elements a layer"
LAB = Lab(
    name="tensor-parallel",
    title="Tensor parallelism",
    question="Why do QKV and the MLP split without communication inside, and when is a layer too small for it?",
    run=run,
    devices=8,
    breaks={"qkv": {LOSS, LAST, ALL}, "bias": {LOSS, LAST, ALL, COUNT, BYTES}, "input-sum": {ALL}},
)
