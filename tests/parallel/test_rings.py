"""Collective matmuls: values, gradients and bytes equal those of the collectives they stand for."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from jax.sharding import PartitionSpec as P

from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.rings import gather_matmul, matmul_scatter
from jaxdist.parallel.tensor import linear
from jaxdist.plan.proof.compile import emitted_collectives
from jaxdist.plan.proof.trace import collectives_of, equations, total_sent
from jaxdist.strategy import ParallelConfig

RINGS = ("one-way", "two-way")
SIZES = (1, 3, 4)
B, CHUNK, D, F = 2, 3, 5, 4  # F of a rank
RNG = np.random.default_rng(0)


def on_ring(n, function, out):
    """function(x, w) on n ranks of tp and two of dp, which splits the batch; w is split as the function needs it."""
    shape = MeshShape(dp=1 if n == 8 else 2, tp=n)
    mesh = make_mesh(shape, DEVICES[: shape.num_devices])
    dp, tp = (axis if getattr(shape, axis) > 1 else None for axis in ("dp", "tp"))
    outside, inside = P(dp, tp), P(dp, None, tp)
    x, w = (outside, P(None, tp)) if out == "inside" else (inside, P(tp))
    y = inside if out == "inside" else outside
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=(x, w), out_specs=y, check_vma=True)), shape


def gather(n, ring):
    """(the ring, the collective and a matmul, x, w)."""
    x, w = RNG.normal(size=(B, n * CHUNK, D)), RNG.normal(size=(D, n * F))
    ours = partial(gather_matmul, ring=ring)
    return (
        *on_ring(n, ours, "inside"),
        on_ring(n, lambda x, w: linear(comm.all_gather(x, "tp", 1), w), "inside")[0],
        x,
        w,
    )


def scatter(n, ring):
    x, w = RNG.normal(size=(B, n * CHUNK, n * F)), RNG.normal(size=(n * F, D))
    ours = partial(matmul_scatter, ring=ring)
    native = on_ring(n, lambda y, w: comm.reduce_scatter(linear(y, w), "tp", 1), "outside")[0]
    return *on_ring(n, ours, "outside"), native, x, w


@pytest.mark.parametrize("make", [gather, scatter])
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("n", SIZES)
def test_a_ring_equals_the_collective_and_a_matmul_and_so_do_its_gradients(make, ring, n):
    ours, _, native, x, w = make(n, ring)
    np.testing.assert_allclose(ours(x, w), native(x, w), rtol=1e-5, atol=1e-5)
    weights = RNG.normal(size=native(x, w).shape).astype(np.float32)

    def gradients(function):
        return jax.grad(lambda x, w: jnp.sum(function(x, w) * weights), argnums=(0, 1))(x, w)

    for found, expected in zip(gradients(ours), gradients(native), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("make", [gather, scatter])
def test_a_ring_of_two_dtypes_gives_the_wider_and_gradients_of_each_and_may_be_empty(make):
    ours, _, native, x, w = make(2, "one-way")
    x, w = jnp.asarray(x, jnp.bfloat16), jnp.asarray(w, jnp.float32)
    for function in (ours, native):
        y, pull = jax.vjp(function, x, w)
        assert [y.dtype, *(each.dtype for each in pull(y))] == ["float32", "bfloat16", "float32"]
    np.testing.assert_allclose(ours(x, w), native(x, w), rtol=1e-5, atol=1e-4)
    assert ours(x[:0], w).shape == native(x[:0], w).shape


@pytest.mark.parametrize("make", [gather, scatter])
@pytest.mark.parametrize("ring", RINGS)
@pytest.mark.parametrize("n", SIZES)
def test_a_ring_sends_what_the_collective_sends_forward_and_backward(make, ring, n):
    ours, shape, native, x, w = make(n, ring)

    def sent(function):
        """Collectives of forward, and of forward and backward; what the weights owe over dp left out."""
        both = jax.grad(lambda x, w: jnp.sum(function(x, w) ** 2), argnums=(0, 1))
        traced = [jax.jit(f).trace(x, w).jaxpr for f in (function, both)]
        return [[c for c in collectives_of(jaxpr, shape) if c.axes == ("tp",)] for jaxpr in traced]

    for found, expected in zip(sent(ours), sent(native), strict=True):
        assert {c.kind for c in found} <= {"permute"}
        assert total_sent(found, shape) == total_sent(expected, shape)
    forward, both = sent(ours)
    assert sum(c.count for c in forward) == n - 1
    assert sum(c.count for c in both) == 2 * (n - 1)


def test_two_ways_share_the_chunks():
    for make, n in ((gather, 4), (gather, 8), (scatter, 4), (scatter, 8), (scatter, 3)):
        ours, _, _, x, w = make(n, "two-way")
        pairs = [
            eqn.params["perm"][0] for eqn, *_ in equations(ours.trace(x, w).jaxpr) if eqn.primitive.name == "ppermute"
        ]
        shifts = [(target - source) % n for source, target in pairs]
        assert (shifts.count(1), shifts.count(n - 1)) == (n // 2, (n - 1) // 2)


@pytest.mark.parametrize(
    ("mesh", "more", "message"),
    [
        (MeshShape(tp=2), {}, "Add sp=True"),
        (MeshShape(dp=2), {"sp": True}, "tp=1"),
        (MeshShape(pp=2, tp=2), {"sp": True}, "pp=2"),
    ],
)
def test_a_ring_that_cannot_run_is_refused(mesh, more, message):
    with pytest.raises(ConfigError, match=message):
        ParallelConfig(mesh, tp_ring="one-way", **more)


PROGRAM = """\
HloModule jit_step, is_scheduled=true

%gemm (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  ROOT %dot.1 = f32[8,8] dot(%a, %b)
}

%sum (a: f32[8,8], b: f32[8,8]) -> f32[8,8] {
  ROOT %add.1 = f32[8,8] add(%a, %b)
}

ENTRY %main (p: f32[8,8]) -> f32[8,8] {
  %s1 = (f32[8,8], f32[8,8]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
  %f1 = f32[8,8] fusion(%p, %p), kind=kCustom, calls=%gemm
  %s2 = (f32[8,8], f32[16,8]) all-gather-start(%p), replica_groups={{0,1}}
  %c1 = f32[8,8] custom-call(%p, %p), custom_call_target="__cublas$gemm"
  %d1 = f32[8,8] collective-permute-done(%s1)
  %d2 = f32[16,8] all-gather-done(%s2)
  %s3 = (f32[8,8], f32[8,8]) collective-permute-start(%d1), source_target_pairs={{0,1},{1,0}}
  %f2 = f32[8,8] fusion(%d1, %p), kind=kLoop, calls=%sum
  ROOT %d3 = f32[8,8] collective-permute-done(%s3)
}
"""


def test_matmuls_under_collectives_are_counted():
    found = [(c.kind, c.matmuls) for c in emitted_collectives(PROGRAM, MeshShape(tp=2))]
    assert found == [("permute", 2), ("all_gather", 1), ("permute", 0)]
