"""Megatron-LM's tensor-parallel operators and FSDP's prefetch, compared with ours by what they send."""

from collections import Counter
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import MeshShape, make_abstract_mesh
from jaxdist.parallel import all_gather, enter, leave, varying
from jaxdist.plan.proof.trace import collectives_of

from ..charts import Span
from . import drawing
from .exchanges import enter_without_sum, on_mesh, relative_error, traced
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table
from .tools import small_run

RANKS, B, T, D, F, LAYERS = 4, 2, 8, 16, 32, 4
TP = MeshShape(tp=RANKS)
SEQUENCE = P(None, "tp")  # [B, T_tp, ...]
# Megatron-LM's name, its forward, its backward, ours.
OPERATORS = (
    ("copy_to_tensor_model_parallel_region", "nothing", "all-reduce", "enter(x, sp=False)"),
    ("reduce_from_tensor_model_parallel_region", "all-reduce", "nothing", "leave(y, sp=False)"),
    ("gather_from_sequence_parallel_region", "all-gather", "reduce-scatter", "enter(x, sp=True)"),
    ("reduce_scatter_to_sequence_parallel_region", "reduce-scatter", "all-gather", "leave(y, sp=True)"),
    ("gather_from_tensor_model_parallel_region", "all-gather", "nothing", "all_gather(x, ...)"),
)
OURS = (  # the same as functions, with their specs in and out
    (partial(enter, sp=False), P(), P("tp")),
    (partial(leave, sp=False), P("tp"), P()),
    (partial(enter, sp=True), SEQUENCE, P("tp")),
    (partial(leave, sp=True), P("tp"), SEQUENCE),
    (partial(all_gather, axis="tp", dim=2, replicated=True), P(None, None, "tp"), P()),
)


def collectives_each_way(function, in_spec: P, out_spec: P) -> tuple[str, str]:
    """(forward, backward) collectives of `function` on one array, read from its trace."""
    mesh = make_abstract_mesh(TP)
    mapped = jax.shard_map(function, mesh=mesh, in_specs=in_spec, out_specs=out_spec)
    x = jax.ShapeDtypeStruct((B * RANKS, T, D), jnp.float32)
    forward = collectives_of(jax.make_jaxpr(mapped)(x), TP)
    both = collectives_of(jax.make_jaxpr(lambda x: jax.vjp(mapped, x)[1](mapped(x)))(x), TP)
    # The trace of the whole has forward twice: once for the residuals, once for the result.
    backward = Counter(c.kind for c in both) - Counter(c.kind for c in forward) - Counter(c.kind for c in forward)
    return words(Counter(c.kind for c in forward)), words(backward)


def words(kinds: Counter) -> str:
    return ", ".join(kind.replace("_", "-") for kind in kinds.elements()) or "nothing"


def mlp_errors(broken: str | None) -> tuple[float, float]:
    """Relative errors of a column- and row-parallel MLP: (of the output, of the gradient of its input).

    Layout: x[B, T, D], up[D, F_tp], down[F_tp, D] -> y[B, T, D].
    """
    rng = np.random.default_rng(0)
    x, up, down = (jnp.asarray(rng.standard_normal(s)) for s in ((B, T, D), (D, F), (F, D)))

    def column_then_row(x, up, down):
        h = enter_without_sum(x) if broken == "input-gradient" else enter(x, False)
        return leave(jax.nn.gelu(h @ up) @ down, False)

    specs = (P(), P(None, "tp"), P("tp"))
    sharded = on_mesh(str(TP), column_then_row, specs, P()).__wrapped__  # JAX differentiates it

    def plain(x, up, down):
        return jax.nn.gelu(x @ up) @ down

    def input_gradient(f):
        return jax.grad(lambda x: (f(x, up, down) ** 2).sum())(x)

    return (
        relative_error(sharded(x, up, down), plain(x, up, down)),
        relative_error(input_gradient(sharded), input_gradient(plain)),
    )


def layers_of_shards(shards, x, prefetch: bool):
    """FSDP's forward in a loop. Layout: shards[L, D_dp, D], x[B, D] -> [B, D].

    prefetch: iteration l gathers the weights of layer l + 1, else its own.
    """

    def gather(index):
        return all_gather(shards[index], "dp", 0)

    def ahead(carry, index):
        x, weights = carry
        coming = gather(jnp.minimum(index + 1, LAYERS - 1))
        return (jnp.tanh(x @ weights), coming), None

    def on_time(x, index):
        return jnp.tanh(x @ gather(index)), None

    x = varying(x, "dp")
    if prefetch:
        (x, _), _ = lax.scan(ahead, (x, gather(0)), jnp.arange(LAYERS))
    else:
        x, _ = lax.scan(on_time, x, jnp.arange(LAYERS))
    return x


def waits_for_its_gather(prefetch: bool) -> bool:
    """Whether, in one iteration of the traced loop, the matmul needs what that iteration's all-gather makes."""
    shape = MeshShape(dp=RANKS)
    specs = (P(None, "dp"), P("dp"))
    function = partial(layers_of_shards, prefetch=prefetch)
    mapped = jax.shard_map(function, mesh=make_abstract_mesh(shape), in_specs=specs, out_specs=P("dp"))
    arrays = jax.ShapeDtypeStruct((LAYERS, D, D), jnp.float32), jax.ShapeDtypeStruct((B * RANKS, D), jnp.float32)
    (inner,) = [e.params["jaxpr"] for e in jax.make_jaxpr(mapped)(*arrays).eqns if e.primitive.name == "shard_map"]
    (loop,) = [e.params["jaxpr"].jaxpr for e in inner.eqns if e.primitive.name == "scan"]
    made, waits = set(), False
    for eqn in loop.eqns:
        needs = any(v in made for v in eqn.invars if not hasattr(v, "val"))
        waits |= needs and eqn.primitive.name == "dot_general"
        if needs or "all_gather" in eqn.primitive.name:
            made.update(eqn.outvars)
    return waits


def prefetch_error(prefetch: bool) -> float:
    """Relative error of the loop's result against whole weights."""
    rng = np.random.default_rng(1)
    weights, x = jnp.asarray(rng.standard_normal((LAYERS, D, D))), jnp.asarray(rng.standard_normal((B * RANKS, D)))
    function = partial(layers_of_shards, prefetch=prefetch)
    run = on_mesh(f"dp={RANKS}", function, (P(None, "dp"), P("dp")), P("dp"))
    expected = x
    for w in weights:
        expected = jnp.tanh(expected @ w)
    return relative_error(run(weights, x), expected)


def gathers_of_layers(**settings) -> tuple[int, int]:
    """(all-gathers, reduce-scatters) of whole layers in a step of ours, ZeRO-3 on dp=4."""
    _, found = traced(small_run(f"dp={RANKS}", zero=3, **settings))
    per_layer = max(c.full_bytes for c in found if c.kind == "all_gather")
    return tuple(
        sum(c.count for c in found if c.kind == kind and c.full_bytes == per_layer)
        for kind in ("all_gather", "reduce_scatter")
    )


@lab(
    title="Reading notes on Megatron-LM and FSDP",
    question="Where is what this course is about in Megatron-LM and PyTorch FSDP, and what is different here?",
    devices=RANKS,
    breaks={
        "input-gradient": {"column then row: error of the input's gradient"},
        "prefetch": {"no iteration's matmul*"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        output_error, gradient_error = mlp_errors(broken)
        ahead = broken != "prefetch"
        loop_error = prefetch_error(ahead)
    yield at_most("column then row: error of the output", output_error, 1e-12)
    yield at_most("column then row: error of the input's gradient", gradient_error, 1e-12)
    yield at_most("gathered layers: error of the output", loop_error, 1e-12)
    yield holds("no iteration's matmul waits for the gather of the same iteration", not waits_for_its_gather(ahead))
    if broken:
        return

    rows = []
    for (name, forward, backward, ours), function in zip(OPERATORS, OURS, strict=True):
        found = collectives_each_way(*function)
        yield holds(f"{name} sends as ours does", found == (forward, backward), " / ".join(found))
        rows.append([name, ours, forward, backward])
    variants = {
        "reshard_after_forward=True (FULL_SHARD)": ({}, 2 * LAYERS),
        "with our --overlap: the last layer's weights are kept": ({"overlap": True}, 2 * LAYERS - 1),
        "reshard_after_forward=False (SHARD_GRAD_OP)": ({"reshard_after_forward": False}, LAYERS),
    }
    counted = {name: gathers_of_layers(**settings) for name, (settings, _) in variants.items()}
    for name, (_, expected) in variants.items():
        yield equal(f"gathers of {LAYERS} layers, {name}", counted[name][0], expected)
        yield equal(f"scatters of {LAYERS} layers, {name}", counted[name][1], LAYERS)
    yield table("operators", "Megatron-LM | ours | forward sends | backward sends", rows)
    columns = "all-gathers of weights | reduce-scatters of gradients"
    gathers = [[name, *each] for name, each in counted.items()]
    yield table("gathers", f"FSDP, and ours with ZeRO-3 | {columns}", gathers)
    yield Picture("prefetch", prefetch_picture)
    yield Guesses(layer=4, gathers=160, accumulated=8 * 160, resident=2)


def prefetch_picture():
    """Two streams over time: gathers and compute, without and with prefetch."""
    gather, layers = 0.6, range(LAYERS)
    late, early = [n * (1 + gather) for n in layers], [max(0.0, gather + n - 1) if n else 0.0 for n in layers]
    rows = [
        ("gather", [Span(late[n], late[n] + gather, 1, str(n)) for n in layers]),
        ("compute", [Span(late[n] + gather, late[n] + gather + 1, 0, str(n)) for n in layers]),
        ("prefetch", [Span(early[n], early[n] + gather, 1, str(n)) for n in layers]),
        ("compute", [Span(gather + n, gather + n + 1, 0, str(n)) for n in layers]),
    ]
    return drawing.timeline("Modelled: a gather takes 0.6 of a layer", "time, in layers of compute", rows)
