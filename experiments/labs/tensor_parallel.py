"""Tensor parallelism: which cuts cost no communication, what a layer sends, and when it is not worth it."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import parse_mesh
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_gather, all_reduce, enter, leave, rank, varying, vocab_parallel_cross_entropy
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.proof.trace import total_sent

from ..charts import Cell
from . import drawing
from .exchanges import enter_without_sum, on_mesh, relative_error, sent_over, traced
from .lab import Findings, Guesses, Picture, at_least, at_most, equal, holds, lab, table
from .tools import small_run

TP = 4
MESH = f"tp={TP}"
B, T, D, HEADS, H, F, LAYERS = 2, 6, 32, 8, 4, 64, 2  # F is of the MLP


def bytes_sent(run, *args) -> int:
    return total_sent(sent_over(run, MESH, *args), parse_mesh(MESH))


# ------------------------------------------------------------------------------------------- a transformer, by hand

SPECS = {"qkv": P(None, None, "tp"), "out": P("tp"), "bias": P(), "up": P(None, "tp"), "down": P("tp")}


def attention(x, qkv):
    """x[B, T, D], qkv[D, 3, N, H] -> o[B, T, N, H], of as many heads as the array has."""
    q, k, v = jnp.einsum("btd,dcnh->cbtnh", x, qkv)
    scores = jnp.einsum("btnh,bsnh->bnts", q, k) / math.sqrt(H)
    scores = jnp.where(jnp.tril(jnp.ones((T, T), bool)), scores, -1e30)
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores), v)


def layer(p, x, enter, leave, bias_first: bool = False):
    """x[B, T, D] -> [B, T, D]: column-parallel, then heads or elements one by one, row-parallel; twice."""
    y = jnp.einsum("btnh,nhd->btd", attention(enter(normed(x)), p["qkv"]), p["out"])
    x = x + (leave(y + p["bias"]) if bias_first else leave(y) + p["bias"])
    return x + leave(jax.nn.gelu(enter(normed(x)) @ p["up"]) @ p["down"])


def normed(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-5)


def loss(params, x, y, enter=lambda x: x, leave=lambda x: x, bias_first=False):
    """Loss of a first matrix that every rank holds, then layers."""
    h = x @ params["first"]
    for p in params["layers"]:
        h = layer(p, h, enter, leave, bias_first)
    return jnp.mean((h - y) ** 2)


def split_through_heads(qkv):
    """The columns of [D, 3 N H] dealt out in order, q first: what a rank takes for q, k and v of its heads is not."""
    flat = qkv.reshape(D, TP, 3, HEADS // TP, H)
    return jnp.moveaxis(flat, 1, 2).reshape(D, 3, HEADS, H)


def by_hand(broken: str | None) -> Findings:
    rng = np.random.default_rng(0)
    shapes = {"qkv": (D, 3, HEADS, H), "out": (HEADS, H, D), "bias": (D,), "up": (D, F), "down": (F, D)}

    def draw(shape):
        return rng.standard_normal(shape) / math.sqrt(shape[0])

    layers = [{name: draw(shape) for name, shape in shapes.items()} for _ in range(LAYERS)]
    params = placed = {"first": draw((D, D)), "layers": layers}
    if broken == "qkv":
        placed = {**params, "layers": [{**p, "qkv": split_through_heads(p["qkv"])} for p in layers]}
    x, y = rng.standard_normal((2, B, T, D))
    parallel = partial(
        loss,
        enter=enter_without_sum if broken == "input-sum" else partial(enter, sp=False),
        leave=partial(leave, sp=False),
        bias_first=broken == "bias",
    )

    def train(params, x, y):
        def step(params, _):
            now, grads = jax.value_and_grad(parallel)(params, x, y)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), now

        return lax.scan(step, params, length=30)[1]

    specs, args = {"first": P(), "layers": [SPECS] * LAYERS}, (placed, x, y)
    forward = on_mesh(MESH, parallel, (specs, P(), P()), P())
    both = on_mesh(MESH, jax.value_and_grad(parallel), (specs, P(), P()), (P(), specs))
    (value, grads), (expected, wanted) = both(*args), jax.value_and_grad(loss)(params, x, y)
    losses = np.asarray(on_mesh(MESH, train, (specs, P(), P()), P())(*args))
    last = [[tree["layers"][-1][name] for name in ("up", "down")] for tree in (grads, wanted)]
    form = 8 * (TP - 1) / TP * B * T * D * 8 * LAYERS
    count, of_both = (len(sent_over(each, MESH, *args)) for each in (forward, both))
    volume = "by hand: bytes with backward, 8 (t-1)/t of B·T·D elements a layer"
    yield equal("by hand: the loss against one device", float(value), float(expected), within=1e-12)
    yield at_most("by hand: error of the last MLP's gradients", relative_error(*last), 1e-11)
    yield at_most("by hand: error of all gradients", relative_error(grads, wanted), 1e-11)
    yield equal("by hand: all-reduces forward, 2 a layer", count, 2 * LAYERS)
    yield equal("by hand: all-reduces with backward, 2 + 2 a layer", of_both, 4 * LAYERS)
    yield equal(volume, bytes_sent(both, *args), form)
    yield at_least("by hand: loss of the first step over that of step 30", float(losses[0] / losses[-1]), 1.3)


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


def orders() -> Findings:
    rng = np.random.default_rng(2)
    args = rng.standard_normal((B, T, D)), rng.standard_normal((D, F)), rng.standard_normal((F, D))
    expected, rows = jax.nn.gelu(args[0] @ args[1]) @ args[2], []
    for name, (function, of_up, of_down, width) in ORDERS.items():
        run = on_mesh(MESH, function, (P(), of_up, of_down), P())
        sent = bytes_sent(run, *args)
        yield at_most(f"{name}: error against one device", relative_error(run(*args), expected), 1e-12)
        yield equal(f"{name}: bytes a device sends forward", sent, (TP - 1) / TP * B * T * width * 8)
        kinds = " + ".join(each.kind.replace("_", "-") for each in sent_over(run, MESH, *args))
        rows.append([name, kinds, sent])
    yield table("orders", "matrices | sent forward | bytes {:,}", rows)


# ------------------------------------------------------------------------------------------- the loss


def gathered_loss(x, table, targets):
    """Every rank gathers all logits: x[B, T, D], table[V_tp, D] -> loss[B, T]."""
    logits = all_gather(enter(x, sp=False) @ table.T, "tp", 2, replicated=True)
    return jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]


def losses() -> Findings:
    rng, vocab = np.random.default_rng(3), 512
    args = rng.standard_normal((B, T, D)), rng.standard_normal((vocab, D)), rng.integers(0, vocab, (B, T))
    specs = (P(), P("tp"), P())
    split = on_mesh(MESH, partial(vocab_parallel_cross_entropy, vocab_size=vocab, sp=False), specs, P())
    gathers = on_mesh(MESH, gathered_loss, specs, P())
    tokens = (TP - 1) / TP * B * T * 8
    error = relative_error(split(*args), gathers(*args))
    yield at_most("the loss, vocabulary-parallel and gathered: error", error, 1e-12)
    yield equal("the loss, vocabulary-parallel: bytes, 3 numbers a token", bytes_sent(split, *args), 6 * tokens)
    yield equal("the loss, gathered: bytes, V numbers a token", bytes_sent(gathers, *args), vocab * tokens)
    rows = [[f"{size:,}", size * 4 * 7 / 8, 6 * 4 * 7 / 8, size / 6] for size in (512, 50_257, 128_256)]
    columns = "vocabulary | gathered, bytes a token {:,.0f} | split, bytes a token {:,.0f} | times less {:,.0f}"
    yield table("losses", columns, rows)


# ------------------------------------------------------------------------------------------- our step; dp or tp

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
    return 2 * 7 / 8 * num_parameters(MODEL, padded=True)


def crossover() -> float:
    """Tokens in the batch at which data and tensor parallelism send the same."""
    return dp_form() / tp_form(1)


def data_or_tensor() -> Findings:
    rows = []
    for count in ROWS:
        tokens = count * MODEL.seq_len
        dp, tp = elements("dp=8", count), elements("tp=8", count)
        yield equal(f"our step, {tokens:,} tokens: elements sent over dp=8", dp, dp_form())
        yield equal(f"our step, {tokens:,} tokens: elements sent over tp=8", tp, tp_form(tokens))
        rows.append([tokens, dp, tp, "tensor" if tp < dp else "data"])
    columns = "tokens in the batch {:,} | dp=8 sends {:,} | tp=8 sends {:,} | which sends less"
    yield table("dp", columns, rows)


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


def large_enough() -> Findings:
    links, columns = {"NVLink": H100.inside, "InfiniBand": H100.between}, "width {:,}"
    rows, cases = [], [(name, tokens) for tokens in (512, 8192) for name in links]
    for name, link in links.items():
        products, sums = busy(smallest_width(8, link), 8192, 8, dataclasses.replace(link, latency_s=0.0))
        what = f"{name}: at the smallest width, seconds of all-reduces over products"
        yield equal(what, sums / products, 1, within=1e-9)
    for width in (768, 2048, 4096, 8192, 16_384):
        times = [busy(width, tokens, 8, links[name]) for name, tokens in cases]
        rows.append([width, *[sums / products for products, sums in times]])
    columns += "".join(f" | {name}, {tokens:,} tokens {{:.2f}}" for name, tokens in cases)
    yield table("sizes", columns, rows)


# ------------------------------------------------------------------------------------------- the lab


@lab(
    title="Tensor parallelism",
    question="Why do QKV and the MLP split without communication inside, and when is a layer too small for it?",
    devices=8,
    breaks={
        "qkv": {"by hand: the loss*", "by hand: error*"},
        "bias": {"by hand: the loss*", "by hand: error*", "by hand: * with backward*"},
        "input-sum": {"by hand: error of all gradients"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from by_hand(broken)
        if broken:
            return
        apart = heads_apart()
        off = float(apart[~np.eye(HEADS, dtype=bool)].max())
        yield equal("heads: largest derivative of one head's output by another's columns", off, 0)
        yield holds("heads: every head's output depends on its own columns", bool((np.diag(apart) > 0).all()))
        yield from orders()
        yield from losses()
    yield from data_or_tensor()
    yield from large_enough()
    yield Picture("ranks", draw_ranks)
    cells = [Cell(int(row), int(column), "yes", 0) for row, column in np.argwhere(apart > 0)]
    heads, title = [str(head) for head in range(HEADS)], "Does head i use head j's columns? (computed)"
    rows = "output of head"
    yield Picture("heads", partial(drawing.grids, title, {rows: cells}, {rows: heads}, "columns of head"))
    yield Guesses(
        layer=4,
        width=smallest_width(8, H100.inside),
        cross=crossover(),
        large=3,
        slow=smallest_width(8, H100.between),
        loss=128_256 / 6,
    )


def draw_ranks():
    own = np.eye(TP)[:, None]  # what is made of a rank's columns of the hidden layer
    summed = on_mesh(MESH, partial(leave, sp=False), P("tp"), P())(own)[:, 0]
    rows = {"x": np.ones((TP, 1))} | dict.fromkeys(
        ("up, columns", "hidden layer", "down, rows", "product, from"), own[:, 0]
    )
    return drawing.holdings("A colour is a quarter of the hidden layer", rows | {"sum, from": np.tile(summed, (TP, 1))})
