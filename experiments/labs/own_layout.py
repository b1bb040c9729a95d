"""A layout of your own: a step written with `shard_map`, compared with one device, beside automatic sharding."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel import all_gather, all_reduce, enter, leave, rank, size, varying
from jaxdist.plan.proof.compile import emitted_bytes, emitted_collectives
from jaxdist.runtime.devices import acquire_devices
from jaxdist.verification import Report, verify

from . import drawing
from .exchanges import enter_without_sum, on_mesh
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table

MESH, LAYERS, B, D, F, LR = "dp=2,tp=4", 2, 64, 128, 512, 0.1


# ---------------------------------------------------------------------------------------------- one device, and yours


def reference(layers, batch):
    """(updated layers, loss): residual MLPs, mean squared error, SGD; on one device, or wherever its arrays are."""

    def loss(layers):
        x, y = batch
        for p in layers:
            x = x + jax.nn.gelu(x @ p["up"]) @ p["down"]
        return jnp.mean((x - y) ** 2)

    value, grads = jax.value_and_grad(loss)(layers)
    return jax.tree.map(lambda w, g: w - LR * g, layers, grads), value


def step(mlp, specs, mean, layers, batch):
    """The same on a rank: x, y[B_dp, D], each layer's weights as `specs` say.

    mlp: (weights, x) -> y, equal on the ranks of tp. Where every rank of dp has a weight, its gradient is summed here.
    """
    whole = [name for name, spec in specs.items() if "dp" not in jax.tree.leaves(tuple(spec))]

    def loss(layers):
        x, y = batch
        for p in layers:
            x = x + mlp(p, x)
        return mean((x - y) ** 2)

    used = [{name: varying(w, "dp") if name in whole else w for name, w in p.items()} for p in layers]
    value, grads = jax.value_and_grad(loss)(used)
    grads = [{name: all_reduce(g, "dp") if name in whole else g for name, g in p.items()} for p in grads]
    return jax.tree.map(lambda w, g: w - LR * g, layers, grads), all_reduce(value, "dp")


def of_all_rows(x):
    """A rank's part of the mean over the whole batch."""
    return jnp.sum(x) / (B * D)


def columns_rows(p, x, enters=lambda x: enter(x, sp=False)):
    """up[D, F_tp], down[F_tp, D]."""
    return leave(jax.nn.gelu(enters(x) @ p["up"]) @ p["down"], sp=False)


def gathered(p, x, gather=lambda shard, dim: all_gather(shard, "dp", dim)):
    """up[D_dp, F_tp], down[F_tp, D_dp]: whole rows and columns where they are used."""
    return columns_rows({"up": gather(p["up"], 0), "down": gather(p["down"], 1)}, x)


def columns_twice(p, x):
    """up[D, F_tp], down[F, D_tp]."""
    h = all_gather(jax.nn.gelu(enter(x, sp=False) @ p["up"]), "tp", 1)
    return all_gather(h @ p["down"], "tp", 1, replicated=True)


MEGATRON, SHARDED, TWICE = "columns, then rows", "the same, sharded over dp", "columns twice"
LAYOUTS = {
    MEGATRON: (columns_rows, {"up": P(None, "tp"), "down": P("tp")}),
    SHARDED: (gathered, {"up": P("dp", "tp"), "down": P("tp", "dp")}),
    TWICE: (columns_twice, {"up": P(None, "tp"), "down": P(None, "tp")}),
}


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def gather_whole(shard, dim):
    """A gather over dp whose gradient is summed whole on every rank, which then keeps its part."""
    return all_gather(shard, "dp", dim)


def keep_own(dim, _, dw):
    length = dw.shape[dim] // size("dp")
    return (jax.lax.dynamic_slice_in_dim(varying(all_reduce(dw, "dp"), "dp"), rank("dp") * length, length, dim),)


gather_whole.defvjp(lambda shard, dim: (all_gather(shard, "dp", dim), None), keep_own)


# ------------------------------------------------------------------------------------------------------------ the lab


def arrays():
    rng = np.random.default_rng(0)
    scale = {"up": (D, F), "down": (F, D)}
    layers = [{n: rng.normal(0, s[0] ** -0.5, s) for n, s in scale.items()} for _ in range(LAYERS)]
    return layers, tuple(rng.standard_normal((2, B, D)))


def on_ranks(mlp: Callable, specs: dict, mean: Callable = of_all_rows) -> Callable:
    placed = [specs] * LAYERS
    return on_mesh(MESH, partial(step, mlp, specs, mean), (placed, P("dp")), (placed, P()))


BROKEN = {
    "mean": lambda: {MEGATRON: on_ranks(*LAYOUTS[MEGATRON], jnp.mean)},
    "enter": lambda: {MEGATRON: on_ranks(partial(columns_rows, enters=enter_without_sum), LAYOUTS[MEGATRON][1])},
    "whole-gradient": lambda: {SHARDED: on_ranks(partial(gathered, gather=gather_whole), LAYOUTS[SHARDED][1])},
}


def proof(run: Callable) -> Report:
    with jax.enable_x64(True):
        return verify(run, reference, arrays())


def automatic_mesh(mesh: str = MESH) -> Mesh:
    shape = parse_mesh(mesh)
    devices = make_mesh(shape, acquire_devices(shape.num_devices, "cpu").devices[: shape.num_devices])
    return Mesh(devices.devices, devices.axis_names, axis_types=(AxisType.Auto,) * devices.devices.ndim)


def draw_ranks() -> str:
    rows = {}
    for layout, (_, specs) in LAYOUTS.items():
        for name, spec in specs.items():
            held = rows[f"{layout}: {name}"] = np.zeros((4, 4))
            placed = NamedSharding(automatic_mesh("dp=2,tp=2"), spec).devices_indices_map((2, 2))
            for number, index in enumerate(placed.values()):
                held[number].reshape(2, 2)[index] = 1
    return drawing.holdings("A colour is a quarter of the matrix, on dp=2,tp=2", rows)


def automatic_bytes(specs: dict) -> int:
    """What a device sends if the compiler finds the messages of `reference`, given where its arrays are; float64."""
    auto = automatic_mesh()
    layers = [{name: NamedSharding(auto, spec) for name, spec in specs.items()}] * LAYERS
    rows, whole = (NamedSharding(auto, spec) for spec in (P("dp"), P()))
    run = jax.jit(reference, in_shardings=(layers, (rows, rows)), out_shardings=(layers, whole))
    with jax.enable_x64(True):
        text = run.lower(*arrays()).compile().as_text()
    return emitted_bytes(emitted_collectives(text, parse_mesh(MESH)), parse_mesh(MESH))


def sent_by_formula(name: str) -> float:
    """Bytes that a device sends; 8 a number. Over dp each matrix is summed, or gathered and scattered; over tp are the
    activations of each layer, and in backward those that the layers before need; one number is the loss."""
    n, t = 2, 4
    x, h, matrices = B // n * D, B // n * F, 2 * D * F // t
    over_tp = (t - 1) / t * (2 * LAYERS - 1) * 2 * x
    if name == TWICE:  # the hidden layer is gathered, and its gradient scattered
        over_tp = (t - 1) / t * (LAYERS * (2 * h + x) + (LAYERS - 1) * 2 * x)
    return 8 * (2 * (n - 1) / n * (LAYERS * matrices + 1) + over_tp)


@lab(
    title="A layout of your own",
    question="You split a model in a way that no library knows: is it right, what does it send, and would the compiler "
    "have found the same?",
    breaks={
        "mean": {f"{MEGATRON}: error*"},
        "enter": {f"{MEGATRON}: error*"},
        "whole-gradient": {f"{SHARDED}: bytes*"},
    },
    devices=8,
)
def run(broken: str | None) -> Findings:
    layouts = {name: on_ranks(*layout) for name, layout in LAYOUTS.items()} | BROKEN.get(broken, dict)()
    sent = {}
    for name, layout in layouts.items():
        report = proof(layout)
        worst, sent[name] = max(difference.error for difference in report.differences), report.sent_bytes
        yield at_most(f"{name}: error of updated weights and loss against one device", worst, 1e-12)
        yield equal(f"{name}: bytes that a device sends, traced, by the formula", sent[name], sent_by_formula(name))
    if broken:
        return
    automatic = {name: automatic_bytes(specs) for name, (_, specs) in LAYOUTS.items()}
    ratios = {name: automatic[name] / sent[name] for name in LAYOUTS}
    yield holds("automatic sharding never sends less", min(ratios.values()) >= 1)
    rows = [[name, sent[name], automatic[name], ratios[name]] for name in LAYOUTS]
    columns = "layout | bytes sent, yours {:,} | automatic sharding {:,} | times {:.2f}"
    yield table("sent", columns, rows)
    yield Picture("ranks", draw_ranks)
    yield Guesses(
        sharded=sent[SHARDED] / sent[MEGATRON],
        automatic=ratios[SHARDED],
        twice=sent[TWICE] / sent[MEGATRON],
    )
