"""Promises about 16 bits, read from the traced step: sums in fp32, softmax and norms in fp32, masters in fp32.

Dtypes of accumulators and of reductions are facts of the jaxpr, so no rounding has to show for a broken promise to.
"""

import dataclasses
import functools
import itertools
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from conftest import in_sample
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jaxdist.compat import scan_counts
from jaxdist.config import RunConfig
from jaxdist.mesh import DATA_AXES, make_abstract_mesh, parse_mesh
from jaxdist.models.attention import attention_core
from jaxdist.models.context import Context
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.fused import layer_norm
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.layers import RMSNorm, Rotary
from jaxdist.parallel.context_parallel import context_attention
from jaxdist.parallel.expert_parallel import apply_experts, apply_experts_with_capacity
from jaxdist.parallel.grouped_matmul import grouped_matmul
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.parallel.sequence import Split
from jaxdist.parallel.vocabulary import look_up
from jaxdist.plan.proof.trace import equations
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

ROWS = 7  # of a micro-batch on one rank: a dim of activations and of no parameter
SIZES = {"num_layers": 4, "width": 32, "num_heads": 4, "ffn_width": 64, "seq_len": 8, "vocab_size": 250}
MODEL = GPT2Config(**SIZES)
# All that today's decoders have: norms of queries and keys, biases, windows.
DECODER = DecoderConfig(
    **SIZES | {"num_kv_heads": 2, "head_dim": 10, "window": 4, "kinds": ("sliding", "full"), "qk_norm": True},
    **dict.fromkeys(("attention_bias", "out_bias", "mlp_bias"), True),
)
EXPERTS = 6  # a dim of no other array
MIXTURE = DecoderConfig(
    **SIZES | {"num_kv_heads": 2, "head_dim": 10, "num_experts": EXPERTS, "top_k": 2, "expert_width": 16},
    **{"balance_loss": 0.1, "z_loss": 0.01, "balance_rate": 0.01, "shared_width": 16},
)

# mesh, parallel, how many passes of ROWS rows one rank makes
PROGRAMS = {
    "accumulate": ("dp=2", {"accumulate": 2}, 2),
    "zero2-accumulate": ("dp=2", {"zero": 2, "accumulate": 2}, 2),
    "zero3-accumulate": ("dp=2,tp=2", {"zero": 3, "sp": True, "accumulate": 2}, 2),
    "overlap-accumulate": ("replica=2,dp=2", {"overlap": True, "accumulate": 3}, 3),
    "zero1-overlap-accumulate": ("dp=2", {"overlap": True, "zero": 1, "accumulate": 2}, 2),
    "zero3-overlap-accumulate": ("dp=2", {"overlap": True, "zero": 3, "accumulate": 2}, 2),
    "loss-chunks": ("tp=2", {"loss_chunks": 2, "sp": True}, 1),
    "pipeline": ("pp=2,dp=2", {"zero": 1, "microbatches": 4}, 4),
    "pipeline-accumulate": ("pp=2,tp=2", {"schedule": "zb-h1", "microbatches": 4, "accumulate": 2}, 8),
    "pipeline-zero3": ("pp=2,dp=2", {"zero": 3, "schedule": "zb-v", "microbatches": 4}, 4),
    "ring": ("dp=2,tp=2", {"sp": True, "tp_ring": "two-way", "zero": 1}, 1),
    "remat": ("dp=2", {"remat": "selective", "zero": 2}, 1),
    "cp-ring": ("cp=4", {"accumulate": 2}, 2),
}
MESH_OF_CAPACITY = ("dp=2,ep=2,tp=2", {"sp": True, "zero": 3, "accumulate": 2}, 2)
OTHERS = {
    "decoder": (DECODER, "dp=2,tp=2", {"sp": True, "zero": 1, "accumulate": 2}, 2),
    "decoder-cp-ring": (DECODER, "cp=4", {"accumulate": 2}, 2),
    "mixture": (MIXTURE, "dp=2,ep=2", {"zero": 2, "accumulate": 2}, 2),
    "mixture-capacity": (dataclasses.replace(MIXTURE, capacity=1.0, router_score="sigmoid"), *MESH_OF_CAPACITY),
}
MODELS = {name: (MODEL, *how) for name, how in PROGRAMS.items()} | OTHERS
# What differs between families is not how half precision is treated.
EVERY = [*itertools.product(MODELS, ("bfloat16", "float16"))]
IN_HALF = ["zero2-accumulate", "zero3-overlap-accumulate", "pipeline-accumulate", "pipeline-zero3", "cp-ring", *OTHERS]
DTYPES = in_sample(EVERY, [("pipeline", "float16"), *((name, "bfloat16") for name in IN_HALF)])


@functools.cache
def traced(name: str, dtype: str = "bfloat16"):
    model, mesh, parallel, passes = MODELS[name]
    parallel = ParallelConfig(parse_mesh(mesh), **parallel)
    rows = ROWS * passes * parallel.mesh.replica * parallel.mesh.dp
    config = RunConfig(model, parallel, precision=PrecisionConfig(dtype), batch_size=rows, steps=2)
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    return program, program.step.trace(program.abstract_state(), program.abstract_batch()).jaxpr


def is_narrow(aval) -> bool:
    return jnp.issubdtype(aval.dtype, jnp.floating) and aval.dtype.itemsize < 4


def is_activation(aval) -> bool:
    return any(n % ROWS == 0 for n in aval.shape)


# ---------------------------------------------------------------------------------------------------------------------
# Which values are sums with what a loop carries
# ---------------------------------------------------------------------------------------------------------------------

# What places a value elsewhere, or changes its type, and adds nothing to it.
MOVES = {
    *("dynamic_slice", "dynamic_update_slice", "slice", "squeeze", "reshape", "transpose", "broadcast_in_dim", "pad"),
    *("convert_element_type", "select_n", "concatenate", "optimization_barrier", "pvary", "copy", "gather", "name"),
    *("reduce_scatter", "psum", "psum_invariant", "all_gather", "ppermute", "reduce_precision"),
}
ADDS = {"add", "add_any", "scatter-add"}


@dataclass(frozen=True)
class Trail:
    """How a value came from one carried value: the dtypes of the sums on its way, and whether each is an activation."""

    sums: frozenset = frozenset()

    def __or__(self, other: "Trail") -> "Trail":
        return Trail(self.sums | other.sums)


def follow(jaxpr, trails: list[Trail | None]) -> list[Trail | None]:
    """The trails of a program's results, given those of its arguments; None: it does not come from there."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    known = dict(zip(jaxpr.invars, trails, strict=True))

    def of(var):
        return None if isinstance(var, Literal) else known.get(var)

    def merge(found):
        found = [trail for trail in found if trail is not None]
        return functools.reduce(Trail.__or__, found) if found else None

    for eqn in jaxpr.eqns:
        given, name = [of(var) for var in eqn.invars], eqn.primitive.name
        if all(trail is None for trail in given):
            continue
        inner = list(inner_programs(eqn))
        if name == "while":
            num_cond = eqn.params["cond_nconsts"]
            num_body = eqn.params["body_nconsts"]
            carry = given[num_cond + num_body :]
            after = follow(eqn.params["body_jaxpr"], given[num_cond:])
            out = [merge(pair) for pair in zip(carry, after, strict=True)]
        elif name == "scan":
            num_consts, num_carry = scan_counts(eqn)
            after = follow(inner[0], given)
            carry = given[num_consts : num_consts + num_carry]
            out = [merge(pair) for pair in itertools.zip_longest(carry, after)]
        elif name == "cond":
            out = [merge(found) for found in zip(*(follow(branch, given[1:]) for branch in inner), strict=True)]
        elif inner and len(getattr(inner[0], "jaxpr", inner[0]).invars) == len(eqn.invars):
            out = follow(inner[0], given)
        elif name in ADDS:
            aval = eqn.outvars[0].aval
            out = [merge(given) | Trail(frozenset([(aval.dtype.name, is_narrow(aval), is_activation(aval))]))]
        elif name in MOVES:
            one_each = len(eqn.outvars) == len(eqn.invars)
            out = given if one_each else [merge(given)] * len(eqn.outvars)
        else:
            continue
        known.update(zip(eqn.outvars, out, strict=True))
    return [of(var) for var in jaxpr.outvars]


def accumulators(jaxpr):
    """(loop's name, type, sums) of every value that a loop carries and adds to: what is carried is a sum as well."""
    for eqn, _, depth in equations(jaxpr):
        if eqn.primitive.name == "scan":
            num_consts, num_carry = scan_counts(eqn)
            body = next(inner_programs(eqn))
        elif eqn.primitive.name == "while":
            num_consts, body = eqn.params["body_nconsts"], eqn.params["body_jaxpr"]
            num_carry = len(eqn.outvars)
        else:
            continue
        num_args = len(getattr(body, "jaxpr", body).invars)
        for index in range(num_carry):
            start = [Trail() if arg == num_consts + index else None for arg in range(num_args)]
            trail = follow(body, start)[index]
            aval = eqn.outvars[index].aval
            if trail is not None and trail.sums and jnp.issubdtype(aval.dtype, jnp.floating):
                carried = (aval.dtype.name, is_narrow(aval), is_activation(aval))
                yield f"{eqn.primitive.name} at depth {depth}", aval, trail.sums | {carried}


@pytest.mark.parametrize("name", MODELS)
def test_what_a_loop_sums_is_summed_in_fp32(name):
    """Gradients over micro-batches, layers and chunks; not activations, whose residual stream is in 16 bits."""
    _, jaxpr = traced(name)
    found = list(accumulators(jaxpr))
    wrong = [(where, aval) for where, aval, sums in found if any(narrow and not act for _, narrow, act in sums)]
    assert not wrong
    gradients = [aval for _, aval, sums in found if aval.shape and any(not act for *_, act in sums)]
    if name not in ("ring", "remat"):  # which have no loop that sums gradients
        assert gradients


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_what_is_summed_over_tokens_is_summed_in_fp32(name, dtype):
    """Gradients of the embedding, of biases and norms: no reduction of a micro-batch by itself is narrow."""
    _, jaxpr = traced(name, dtype)
    found = [eqn for eqn, *_ in equations(jaxpr) if eqn.primitive.name in {"reduce_sum", "scatter-add", "cumsum"}]
    assert {"reduce_sum", "scatter-add"} <= {eqn.primitive.name for eqn in found}
    assert not [(eqn.primitive.name, eqn.outvars[0].aval) for eqn in found if is_narrow(eqn.outvars[0].aval)]


def test_the_gradient_of_a_frequent_token_is_not_lost_to_rounding():
    tokens, table = jnp.zeros((4, 1024), jnp.int32), jnp.ones((8, 4), jnp.bfloat16)
    gradient = jax.grad(lambda table: look_up(8, table, tokens).astype(jnp.float32).sum())(table)
    assert gradient[0, 0] == 4096  # added in bfloat16: 256


@pytest.mark.parametrize("name", MODELS)
def test_what_ranks_sum_of_gradients_is_summed_in_fp32(name):
    """Every sum over data ranks and stages; what is summed over tp alone are activations, and with sp vectors' sums."""
    _, jaxpr = traced(name)
    for eqn, *_ in equations(jaxpr):
        if eqn.primitive.name not in ("psum", "psum_invariant", "reduce_scatter"):
            continue
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        axes = {axes} if isinstance(axes, str) else set(axes)
        for var in eqn.invars:
            if axes & {"pp", *DATA_AXES} or not is_activation(var.aval):
                assert not is_narrow(var.aval), f"{eqn.primitive.name} over {axes} of {var.aval}"


@pytest.mark.parametrize("name", ["pipeline", "pipeline-accumulate", "pipeline-zero3"])
def test_what_stages_add_of_a_shared_table_is_added_in_fp32(name):
    """`scatter_from` adds what a permute brings: no reduction by name, so the sum is looked for behind the permute."""
    program, jaxpr = traced(name)
    table = program.layout.leaves["tokens"]
    parts = {table.compute_local, tuple(n for n in table.compute_local if n > 1)}
    seen = 0
    for eqn, *_ in equations(jaxpr):
        for inner in inner_programs(eqn):
            body = getattr(inner, "jaxpr", inner)
            brought = {e.outvars[0] for e in body.eqns if e.primitive.name == "ppermute"}
            for each in body.eqns:
                if each.primitive.name in ADDS and brought & {v for v in each.invars if not isinstance(v, Literal)}:
                    seen += each.outvars[0].aval.shape in parts
                    assert not is_narrow(each.outvars[0].aval), each
    assert seen


@pytest.mark.parametrize(("name", "dtype"), DTYPES)
def test_exponentials_and_norms_are_computed_in_fp32(name, dtype):
    """Softmax of attention, of the loss and of a router, its logarithm, norms, the angles of positions, the update."""
    _, jaxpr = traced(name, dtype)
    names = {
        "exp",
        "exp2",
        "log",
        "log1p",
        "expm1",
        "rsqrt",
        "sqrt",
        "reduce_max",
        "cumsum",
        "logsumexp",
        "pow",
        "sin",
        "cos",
    }
    found = [(eqn.primitive.name, eqn.invars[0].aval) for eqn, *_ in equations(jaxpr) if eqn.primitive.name in names]
    assert {"exp", "log", "rsqrt", "sqrt", "reduce_max"} <= {kind for kind, _ in found}
    assert not [(kind, aval) for kind, aval in found if is_narrow(aval)]
    assert ("sin" in {kind for kind, _ in found}) == (MODELS[name][0] is not MODEL)
    # What is summed over an exponential, or turned by an angle, is no narrower either.
    for eqn, *_ in equations(jaxpr):
        for inner in inner_programs(eqn):
            body = getattr(inner, "jaxpr", inner)
            powers = {e.outvars[0] for e in body.eqns if e.primitive.name in ("exp", "sin", "cos")}
            for each in body.eqns:
                if each.primitive.name == "convert_element_type" and each.invars[0] in powers:
                    assert not is_narrow(each.outvars[0].aval), each


@pytest.mark.parametrize("name", [name for name in OTHERS if name.startswith("mixture")])
def test_a_router_computes_in_fp32(name):
    """Its logits, the scores that are compared, and weights, by which experts' results are added up."""
    _, jaxpr = traced(name)
    found = [eqn for eqn, *_ in equations(jaxpr) if eqn.primitive.name in ("dot_general", "top_k")]
    logits = [eqn.outvars[0].aval for eqn in found if eqn.primitive.name == "dot_general"]
    compared = [eqn.invars[0].aval for eqn in found if eqn.primitive.name == "top_k"]
    of_router = [aval for aval in logits if EXPERTS in aval.shape] + compared
    assert len(compared) > 0 and len(of_router) > 2 * len(compared)
    assert not [aval for aval in of_router if is_narrow(aval)]


@pytest.mark.parametrize("name", MODELS)
def test_masters_and_moments_are_fp32(name):
    program, _ = traced(name)
    wide = {"masters": program.shapes.master, "moments": program.shapes.moments}
    for kind, tree in wide.items():
        floats = [x.dtype.name for x in jax.tree.leaves(tree) if jnp.issubdtype(x.dtype, jnp.floating)]
        assert floats and set(floats) == {"float32"}, kind
    assert {x.dtype.name for x in jax.tree.leaves(program.shapes.params)} == {"bfloat16"}


# ---------------------------------------------------------------------------------------------------------------------
# Pieces by themselves, in which 16 bits are given, sent and multiplied, and never added up
# ---------------------------------------------------------------------------------------------------------------------

SUMS = {*ADDS, "sub", "dot_general", "reduce_sum", "cumsum", "reduce_scatter", "psum", "psum_invariant"}
ELEMENTWISE = {"mul", "div", "sin", "cos", "rsqrt", "square", "integer_pow", "exp"}


def half(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def of_attention(split: Split, window: int | None = None):
    def attend(q, k, v):
        core = attention_core("blocked", Context(), 0.0, window)
        return context_attention(split, core, q, k, v, window=window)

    return f"cp={split.ranks}", PartitionSpec(None, "cp"), attend, (half(ROWS, 64, 8, 8), *[half(ROWS, 64, 4, 8)] * 2)


def of_dispatch(dispatch, *more):
    """Tokens to their experts, which give back what they get, and the weighted sums of what comes back."""

    def run(x_RD, weight_RK):
        expert_RK = jnp.argsort(weight_RK, axis=1)
        y_RD = dispatch(lambda _, rows, counts: rows, (), x_RD, expert_RK, weight_RK, EXPERTS, *more, ("ep",))
        return y_RD.astype(x_RD.dtype)

    return "dp=2,ep=2", PartitionSpec("ep"), run, (half(ROWS * 4, 8), jax.ShapeDtypeStruct((ROWS * 4, 2), jnp.float32))


def rms_norm(x, scale):
    norm = RMSNorm(8, 1e-5)
    norm.scale.set_value(scale)
    return norm(x)


PIECES = {
    "RMSNorm": ("", PartitionSpec(), rms_norm, (half(ROWS, 8), half(8))),
    "layer norm": ("", PartitionSpec(), partial(layer_norm, False), (half(ROWS, 8), half(8), half(8))),
    "rotary": ("", PartitionSpec(), lambda x: Rotary(8)(x, jnp.arange(1024)), (half(ROWS, 1024, 2, 8),)),
    "blocked": of_attention(Split()),
    "ring": of_attention(Split(8)),  # whose hops are a loop
    "ring-of-groups": of_attention(Split(4, 2)),
    "ring-of-swaps": of_attention(Split(4, swaps=True)),
    "ring-with-a-window": of_attention(Split(4), window=40),
    "gather": of_attention(Split(4, gathers=True)),
    "ulysses": of_attention(Split(4, 4)),
    "dispatch": of_dispatch(apply_experts),
    "dispatch-in-rounds": of_dispatch(partial(apply_experts, room=0.25)),
    "dispatch-with-capacity": of_dispatch(apply_experts_with_capacity, 5),
    "grouped": (
        "",
        PartitionSpec(),
        lambda x, w: grouped_matmul(x, w, jnp.array([3, 4, 0])),
        (half(ROWS, 8), half(3, 8, 16)),
    ),
}
# Where keys are gathered, their gradients are summed over ranks as they are sent, and halves of arrays put together; an
# exchange adds those of the first round and of the others.
NARROW = {"gather": {"reduce_scatter", "add_any"}, "dispatch-in-rounds": {"add_any"}, "grouped": {"dot_general"}}


@pytest.mark.parametrize("name", PIECES)
def test_nothing_is_added_up_in_16_bits(name):
    """Forward and backward. Queries are divided by the root of their width in 16 bits; norms and angles are not."""
    mesh, spec, function, args = PIECES[name]
    mapped = partial(jax.shard_map, mesh=make_abstract_mesh(parse_mesh(mesh)), in_specs=spec, out_specs=spec)
    jaxpr = jax.make_jaxpr(mapped(lambda *args: (lambda y, pull: (y, *pull(y)))(*jax.vjp(function, *args))))(*args)
    looked_for = SUMS | (ELEMENTWISE if name in ("RMSNorm", "layer norm", "rotary") else set())
    found = {
        eqn.primitive.name
        for eqn, *_ in equations(jaxpr)
        for var in eqn.outvars
        if eqn.primitive.name in looked_for and is_narrow(var.aval)
    }
    assert found == NARROW.get(name, set())
    assert not [aval for _, aval, sums in accumulators(jaxpr) if any(narrow for _, narrow, _ in sums)]
