"""Muon: what the published algorithm makes of whole matrices, on every mesh, with the bytes that are predicted."""

import dataclasses
import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from conftest import DEVICES, in_sample
from jax.sharding import NamedSharding, PartitionSpec
from support.messages import assert_equals_trace
from support.small_models import MODELS
from train.test_oracle import LLAMA, MIXTRAL, ODD, assert_equals, config_of

from experiments.oracles.plain import orthogonal
from jaxdist.checkpoint.logical import fetch, from_logical, to_logical
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import declare
from jaxdist.models.lora import LoRA
from jaxdist.parallel import muon
from jaxdist.params import Param
from jaxdist.plan.proof.trace import collectives_of, equations
from jaxdist.train.optimizer import muon_momentum
from jaxdist.train.program import build_program

MESH = parse_mesh("dp=2,tp=2")
IN_OUT, SUMS, EXCHANGE, SHARE = (None, "in", "out"), {"all_reduce"}, {"all_to_all"}, {"all_gather"}
WAYS = {
    # shape, sides, spec, messages
    "whole matrices of some layers": ((4, 6, 10), IN_OUT, ("dp", None, None), set()),
    "experts of some layers": ((2, 4, 5, 3), (None, *IN_OUT), (None, ("dp", "tp")), set()),
    "columns, by sums": ((2, 4, 48), IN_OUT, (None, None, "tp"), SUMS),
    "rows, by sums": ((2, 48, 4), IN_OUT, (None, "tp"), SUMS),
    "columns over two axes, by sums": ((1, 3, 80), IN_OUT, (None, None, ("tp", "dp")), SUMS),
    "columns, exchanged": ((4, 6, 10), IN_OUT, (None, None, "tp"), EXCHANGE),
    "rows of three, exchanged": ((3, 10, 6), IN_OUT, (None, "dp"), EXCHANGE),
    "rows and columns, exchanged": ((5, 6, 8), IN_OUT, (None, "dp", "tp"), EXCHANGE),
    "rows exchanged, columns by sums": ((2, 4, 48), IN_OUT, (None, "dp", "tp"), SUMS | EXCHANGE),
    "copies, shared": ((5, 6, 10), IN_OUT, (), SHARE),
    "copies of exchanged rows, shared": ((6, 6, 10), IN_OUT, (None, "tp"), EXCHANGE | SHARE),
    "copies of columns, shared by sums": ((3, 4, 48), IN_OUT, (None, None, "tp"), SUMS | SHARE),
    "heads of q, k and v": ((2, 12, 3, 4, 2), (None, "in", None, "out", "out"), (None, "dp", None, "tp"), EXCHANGE),
}


def test_messages_are_of_padded_shares():
    """Five matrices of 12 x 8, rows over four ranks: eight go round and come back; or three copies do two each."""
    rows = muon.Way((muon.ROWS,), None)
    assert muon.messages((5, 3, 8), (1, 4, 1, 1), rows) == [("all_to_all", muon.ROWS, 2, 8 * 3 * 8)]
    shared = [("all_to_all", muon.ROWS, 2, 8 * 3 * 8), ("all_gather", muon.COPIES, 1, 3 * 1 * 12 * 8)]
    assert muon.messages((5, 3, 8), (1, 4, 1, 3), rows) == shared
    assert muon.messages((5, 6, 8), (1, 1, 1, 3), muon.Way((), None)) == [("all_gather", muon.COPIES, 1, 3 * 2 * 6 * 8)]


def test_leaves_are_joined_where_that_leaves_a_rank_fewer_matrices():
    """On 4 ranks, two leaves of 2 matrices are one for each rank, where leaf by leaf they are two. Two leaves of 3 are
    two either way, four are three. Transposed is alike; other sides or axes are not, and what fills the ranks stays
    alone."""
    rows = muon.Split((2, 3, 8), (1, 4, 1, 1), ((), ("dp",), (), ()))
    columns = muon.Split((2, 8, 3), (1, 1, 4, 1), ((), (), ("dp",), ()))
    others = [
        rows._replace(local=(4, 3, 8)),
        rows._replace(local=(2, 3, 9)),
        rows._replace(axes=((), ("tp",), (), ())),
        rows._replace(axes=((), ("dp",), (), ("cp",)), ranks=(1, 4, 1, 2)),
    ]
    assert muon.joined([rows, *others, columns]) == [
        ([0, 5], rows._replace(local=(4, 3, 8))),
        *(([i], each) for i, each in enumerate(others, 1)),
    ]
    three = rows._replace(local=(3, 3, 8))
    assert muon.joined([three] * 2) == [([0], three), ([1], three)]
    assert muon.joined([three] * 4) == [([0, 1, 2, 3], three._replace(local=(12, 3, 8)))]


def test_joined_leaves_are_orthogonalized_as_each_alone():
    """Two squares, one split by rows and one by columns; a wide matrix and a tall one; and two that fill the ranks.
    Leaf by leaf a rank would have three squares and two of the others, joined it has two and one."""
    shapes = {"q": (1, 6, 6), "o": (1, 6, 6), "up": (1, 6, 10), "down": (1, 10, 6), "alone": (2, 6, 6)}
    specs = {name: PartitionSpec(*((None, None, "tp") if name in ("o", "down") else (None, "tp"))) for name in shapes}
    matrices = {name: muon.Matrix(shape, IN_OUT, specs[name]) for name, shape in shapes.items()}

    def ours(xs):
        return dict(zip(xs, muon.orthogonalize_all([*xs.values()], [matrices[name] for name in xs]), strict=True))

    with jax.enable_x64(True):
        xs = {name: np.random.default_rng(0).normal(size=shape) for name, shape in shapes.items()}
        on_mesh = jax.jit(jax.shard_map(ours, mesh=make_mesh(MESH, DEVICES), in_specs=(specs,), out_specs=specs))
        found, program = on_mesh(xs), jax.make_jaxpr(on_mesh)(xs)
        wanted = {name: np.stack([orthogonal("original", each.T).T for each in x]) for name, x in xs.items()}
    for name, expected in wanted.items():
        np.testing.assert_allclose(found[name], expected, rtol=0, atol=1e-12, err_msg=name)
    assert matmul_flops(program) == 5 * (2 * 6 * 6**3 + 4 * 6**2 * 10 + 2 * 6**3)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_momentum_is_that_of_its_step(nesterov):
    """By hand: 0.5, then 0.8; b <- m b + (1 - m) g, and with Nesterov's g as well. What follows is the same."""
    schedule, matrix = (lambda step: jnp.where(step < 1, 0.5, 0.8)), {"w": muon.Matrix((4, 6), ("in", "out"), ())}
    optimizer = muon.scale_by_muon(matrix, momentum=schedule, nesterov=nesterov)
    g = [np.random.default_rng(seed).normal(size=(4, 6)).astype(np.float32) for seed in (0, 1)]
    state, b = optimizer.init({"w": g[0]}), 0
    for step, m in enumerate((0.5, 0.8)):
        found, state = optimizer.update({"w": g[step]}, state, step=jnp.float32(step))
        b = m * b + (1 - m) * g[step]
        direction = m * b + (1 - m) * g[step] if nesterov else b
        plain = muon.scale_by_muon(matrix, momentum=0.0, nesterov=False)
        wanted, _ = plain.update({"w": direction}, plain.init({"w": direction}))
        np.testing.assert_allclose(found["w"], wanted["w"], atol=2e-6)


@pytest.mark.parametrize("size", [1e-5, 300.0])
def test_squares_of_a_float16_gradient_are_held_in_32_bits(size):
    matrix, g = muon.Matrix((8, 5), ("in", "out"), ()), np.random.default_rng(0).normal(size=(8, 5))
    narrow = jnp.asarray(size * g, "float16")
    found, wanted = (muon.orthogonalize(x, matrix) for x in (narrow, narrow.astype("float32")))
    assert found.dtype == "float16"
    np.testing.assert_allclose(found, wanted, atol=1e-3)


@pytest.mark.parametrize("name", WAYS)
def test_every_matrix_is_orthogonalized_as_a_whole(name):
    shape, sides, spec, messages = WAYS[name]
    copies = ("dp",) if messages >= SHARE else ()
    matrix, spec = muon.Matrix(shape, sides, spec, copies), PartitionSpec(*spec)
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=shape)
        ours = partial(muon.orthogonalize, matrix=matrix)
        on_mesh = jax.jit(jax.shard_map(ours, mesh=make_mesh(MESH, DEVICES), in_specs=spec, out_specs=spec))
        found, whole = on_mesh(x), ours(jnp.asarray(x))
        order = [dim for dims in matrix.dims for dim in dims]
        flat = x.transpose(order).reshape(matrix.sizes(shape))
        expected = np.stack([orthogonal("original", each.T).T for each in flat])
        expected = expected.reshape([shape[dim] for dim in order]).transpose(np.argsort(order))
        program = jax.make_jaxpr(on_mesh)(x)
    for y in (found, whole):
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-12)
    assert {message.kind for message in collectives_of(program, MESH)} == messages
    ranks = [math.prod(map(MESH.size, axes)) for axes in matrix.axes]
    local = matrix.sizes(NamedSharding(make_mesh(MESH, DEVICES), spec).shard_shape(shape))
    assert matmul_flops(program) == muon.flops(local, ranks)


def test_products_of_bf16_operands_make_squares_wide_and_the_matrix_narrow():
    matrix, x = muon.Matrix((2, 12, 16), IN_OUT, ()), np.random.default_rng(0).normal(size=(2, 12, 16))
    wide, narrow = (partial(muon.orthogonalize, matrix=matrix, bf16=bf16) for bf16 in (False, True))
    x = jnp.asarray(x, jnp.float32)
    dots = [eqn for eqn, _, _ in equations(jax.make_jaxpr(narrow)(x)) if eqn.primitive.name == "dot_general"]
    assert dots and {v.aval.dtype.name for eqn in dots for v in eqn.invars} == {"bfloat16"}
    made = {(eqn.outvars[0].aval.shape, eqn.outvars[0].aval.dtype.name) for eqn in dots}
    assert made == {((2, 12, 12), "float32"), ((2, 12, 16), "bfloat16")}
    assert 0 < np.abs(narrow(x) - wide(x)).max() < 0.05


def test_passes_beside_the_products_by_hand():
    """X[2, 12, 16]: read for its norm, read and written as it is divided, read at the end. In an iteration two squares
    of 12 are read and one written; with narrow operands the first is cast too. Ranks with copies do a share each."""
    local, alone = (2, 12, 16), [1, 1, 1, 1]
    assert muon.passes(local, alone, 4, 4) == 2 * (4 * 12 * 16 * 4 + 5 * 12 * 12 * 3 * 4)
    assert muon.passes(local, alone, 4, 2) == 2 * (12 * 16 * (2 * 4 + 2 * 2) + 5 * 12 * 12 * (2 * 4 + 2 + 4 + 2))
    assert muon.passes(local, [1, 1, 1, 2], 4, 4) == muon.passes((1, 12, 16), alone, 4, 4)
    assert muon.passes((2, 16, 12), alone, 4, 4) == muon.passes(local, alone, 4, 4)


def matmul_flops(program) -> int:
    dots = [(eqn, count) for eqn, count, _ in equations(program) if eqn.primitive.name == "dot_general"]
    return sum(2 * count * eqn.outvars[0].aval.size * eqn.invars[0].aval.shape[-1] for eqn, count in dots)


@pytest.mark.parametrize("split", [muon.ROWS, muon.COLUMNS])
@pytest.mark.parametrize("shape", [(1, 6, 8), (2, 8, 6)])
def test_sums_are_exact_on_the_longer_side_too(shape, split):
    spec = PartitionSpec(*["tp" if dim == split else None for dim in range(3)])
    with jax.enable_x64(True):
        x, sets = np.random.default_rng(1).normal(size=shape), muon.COEFFICIENTS["dion"]
        ours = partial(muon.newton_schulz, coefficients=sets, split=split, axes=("tp",))
        found = jax.shard_map(ours, mesh=make_mesh(MESH, DEVICES), in_specs=spec, out_specs=spec)(x)
        expected = np.stack([orthogonal("dion", each) for each in x])
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("scale", ["shape", "rms"])
@pytest.mark.parametrize(("nesterov", "warmup"), [(True, 0), (False, 0), (True, 3), (False, 3)])
def test_five_updates_are_those_of_torch(scale, nesterov, warmup, monkeypatch):
    """Whose weights are [output, input], and whose iterations run in bfloat16 unless that is taken for float64."""
    torch = pytest.importorskip("torch", reason="pip install -e '.[oracle]'")
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("torch.optim.Muon came with torch 2.9")
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())
    draw, lr, decay = np.random.default_rng(2).normal, 0.02, 0.1
    start, grads = {"wide": draw(size=(4, 9)), "tall": draw(size=(12, 5))}, []
    theirs = {name: torch.nn.Parameter(torch.tensor(x.T.copy())) for name, x in start.items()}
    adjust = {"shape": "original", "rms": "match_rms_adamw"}[scale]
    optimizer = torch.optim.Muon(
        theirs.values(), lr, decay, momentum=0.9, nesterov=nesterov, adjust_lr_fn=adjust, eps=muon.EPS
    )
    rule = OptimizerConfig("muon", momentum=0.9, momentum_warmup_steps=warmup)
    for number in range(5):
        if warmup:
            optimizer.param_groups[0]["momentum"] = 0.85 + 0.05 * min(number / warmup, 1)
        grads.append({name: draw(size=x.shape) for name, x in start.items()})
        for name, p in theirs.items():
            p.grad = torch.tensor(grads[-1][name].T.copy())
        optimizer.step()
    with jax.enable_x64(True):
        matrices = {name: muon.Matrix(x.shape, ("in", "out"), ()) for name, x in start.items()}
        ours = optax.chain(
            muon.scale_by_muon(matrices, momentum=muon_momentum(rule), nesterov=nesterov, scale=scale),
            optax.add_decayed_weights(decay),
            optax.scale(-lr),
        )
        params = jax.tree.map(jnp.asarray, start)
        state = ours.init(params)
        for number, each in enumerate(grads):
            updates, state = ours.update(
                jax.tree.map(jnp.asarray, each), state, params, step=jnp.asarray(float(number))
            )
            params = optax.apply_updates(params, updates)
    for name, p in theirs.items():
        np.testing.assert_allclose(params[name], p.detach().numpy().T, rtol=1e-10, atol=1e-12, err_msg=name)


def muon_run(model=ODD, mesh="", steps=5, rule=None, **more) -> RunConfig:
    return config_of(model, mesh, optimizer={"name": "muon", **(rule or {})}, steps=steps, **more)


EVEN = dataclasses.replace(LLAMA, num_heads=8, width=16, ffn_width=32)
MESHES = {
    "one": muon_run(),
    "one-fp32": muon_run(dtype="float32"),
    "one-shape-dion": muon_run(rule={"muon_scale": "shape", "muon_coefficients": "dion", "nesterov": False}),
    "experts": muon_run(MIXTRAL, rule={"momentum_warmup_steps": 3}),
    **{f"dp4-zero{zero}": muon_run(mesh="dp=4", parallel={"zero": zero}) for zero in range(4)},
    "dp8-zero1-padded": muon_run(mesh="dp=8", parallel={"zero": 1}),
    "tp2": muon_run(mesh="tp=2"),
    "tp4-2-kv-heads": muon_run(EVEN, "tp=4"),
    "tp2-sp": muon_run(mesh="tp=2", parallel={"sp": True}),
    **{f"dp2-tp2-zero{zero}": muon_run(mesh="dp=2,tp=2", parallel={"zero": zero}) for zero in (1, 2, 3)},
    "dp2-tp2-zero1-fp32": muon_run(mesh="dp=2,tp=2", parallel={"zero": 1}, dtype="float32"),
    "pp2-zb-h1-uneven": muon_run(mesh="pp=2", parallel={"schedule": "zb-h1", "stages": "1,2"}),
    "pp2-dp2-zero1": muon_run(
        mesh="pp=2,dp=2", parallel={"zero": 1, "stages": "2,1"}, rule={"momentum_warmup_steps": 8}
    ),
    "replica2-dp2-zero2": muon_run(mesh="replica=2,dp=2", parallel={"zero": 2}),
    "cp2-zero3": muon_run(LLAMA, "cp=2", parallel={"zero": 3}),
    "ep2-zero1": muon_run(MIXTRAL, "dp=4,ep=2", parallel={"zero": 1}),
    "accumulate": muon_run(mesh="dp=2", parallel={"accumulate": 2, "zero": 1}),
    "overlap": muon_run(mesh="dp=2", parallel={"overlap": True, "zero": 3}),
}


@pytest.mark.parametrize("name", in_sample(MESHES, ["dp2-tp2-zero2"]))
def test_a_run_equals_plain_jnp(name):
    """Gradients, parameters and moments of every leaf after five updates."""
    assert_equals("plain", name, MESHES[name])


@pytest.mark.parametrize("name", in_sample(MESHES, ["dp2-tp2-zero3", "pp2-dp2-zero1", "ep2-zero1"]))
def test_a_run_sends_what_is_predicted(name):
    assert_equals_trace(MESHES[name])


def test_a_run_goes_on_on_other_meshes():
    """ZeRO-2 over dp -> uneven stages -> tp and ZeRO-1 -> ZeRO-3, with the parameters of a run that never moved."""
    with jax.enable_x64(True):
        batches = random_batches(MESHES["one"], 4)

        def trained(name: str, batches: list, arrays: dict | None = None) -> dict:
            program = build_program(MESHES[name], make_mesh(MESHES[name].parallel.mesh, DEVICES))
            state = program.init(0) if arrays is None else from_logical(program, arrays)
            for batch in batches:
                state, _ = program.step(state, program.put(batch))
            return fetch(to_logical(program, state))

        whole, moved = trained("one", batches), None
        for number, name in enumerate(("dp4-zero2", "pp2-zb-h1-uneven", "dp2-tp2-zero1", "dp4-zero3")):
            moved = trained(name, batches[number:][:1], moved)
    for name, expected in whole.items():
        np.testing.assert_allclose(moved[name], expected, rtol=1e-10, atol=1e-12, err_msg=name)


@dataclasses.dataclass(frozen=True)
class Undeclared(type(MODELS["grouped"])):
    def block(self, kind: str):
        return {**super().block(kind), "w_more": Param((4, 2, 3))}


@dataclasses.dataclass(frozen=True)
class Misdeclared(type(MODELS["grouped"])):
    def block(self, kind: str):
        return {**super().block(kind), "w_more": Param((4, 2, 3), matrix=("in", None, None))}


def of(cls):
    return cls(**vars(MODELS["grouped"]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: RunConfig(of(Undeclared), optimizer=OptimizerConfig("muon")), r"blocks\.w_more of shape \(4, 2, 3\)"),
        (lambda: declare(of(Misdeclared)), "both an in and an out"),
        (lambda: RunConfig(LoRA(ODD, 2, 4.0), optimizer=OptimizerConfig("muon")), "must have matrices"),
        (lambda: OptimizerConfig("adamw", nesterov=False), "only with muon"),
        (lambda: OptimizerConfig("sgd", momentum=0.9), "only with muon"),
    ],
)
def test_what_changes_nothing_or_is_not_declared_is_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()
