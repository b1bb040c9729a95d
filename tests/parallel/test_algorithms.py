"""The hand-written collectives equal the native ones, forward and backward, and send what the closed forms predict."""

from collections import Counter
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.parallel import algorithms
from jaxdist.parallel.collectives import varying_axes
from jaxdist.plan.collective_cost import ALGORITHMS, CollectiveCost, bus_bandwidth_factor, collective_cost

ALL_REDUCES = ("ring_all_reduce", "halving_doubling_all_reduce", "tree_all_reduce", "central_all_reduce")


def native_reduce_scatter(x, axis, dim):
    return lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)


def native_all_gather(x, axis, dim):
    return lax.all_gather(x, axis, axis=dim, tiled=True)


# case -> (name in `algorithms`, ours, native)
CASES = {name: (name, getattr(algorithms, name), lax.psum) for name in ALL_REDUCES}
for dim in (0, 1):
    for name, native in (("ring_reduce_scatter", native_reduce_scatter), ("ring_all_gather", native_all_gather)):
        CASES[f"{name}-dim{dim}"] = (name, partial(getattr(algorithms, name), dim=dim), partial(native, dim=dim))


def allowed(case: str, n: int) -> bool:
    return not case.startswith("halving_doubling") or n in (1, 2, 4, 8)


RUNS = [(case, n) for case in CASES for n in (1, 3, 4, 8) if allowed(case, n)]


def mesh(n: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:n]), ("ring",), axis_types=(AxisType.Auto,))


def on_ranks(body, n: int):
    """`body` as a function of global arrays: entry r of the leading dim is rank r's local value, in and out."""
    return jax.shard_map(
        lambda *xs: body(*(x[0] for x in xs))[None], mesh=mesh(n), in_specs=P("ring"), out_specs=P("ring")
    )


def positive(*shape) -> jax.Array:
    """Random fp32 in [1, 2): with no cancellation, 8 numbers summed in any order agree to 7 roundings, 5e-7."""
    return jnp.asarray(np.random.default_rng(sum(shape)).uniform(1, 2, shape), jnp.float32)


def integers(*shape) -> jax.Array:
    return jnp.asarray(np.random.default_rng(sum(shape)).integers(-99, 99, shape), jnp.float32)


def local_shape(case: str, n: int) -> tuple[int, ...]:
    """Both dims divide for the reduce-scatter; 7*3 divides by none of 2, 4, 5, 8, so the all-reduces pad."""
    return (7, 3) if case in ALL_REDUCES else (2 * n, 3 * n)


@pytest.mark.parametrize(("case", "n"), RUNS)
def test_equals_the_native_collective(case, n):
    _, ours, native = CASES[case]
    both = jax.jit(lambda x: (on_ranks(lambda x: ours(x, "ring"), n)(x), on_ranks(lambda x: native(x, "ring"), n)(x)))
    shape = (n, *local_shape(case, n))
    got, want = both(positive(*shape))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_array_equal(*both(integers(*shape)))
    if case in ALL_REDUCES:
        np.testing.assert_array_equal(got, np.broadcast_to(got[0], got.shape), "ranks hold different bits")


@pytest.mark.parametrize("name", ALL_REDUCES)
def test_all_reduces_take_any_shape(name):
    """No size but 0 divides by 4. Under jit: JAX 0.10 cannot fetch an empty result of an eager shard_map."""
    xs = [integers(4, *shape) for shape in [(), (1,), (5,), (0, 3), (2, 3, 5)]]
    all_reduce = on_ranks(lambda x: getattr(algorithms, name)(x, "ring"), 4)
    totals = jax.jit(lambda xs: [all_reduce(local) for local in xs])(xs)
    for x, total in zip(xs, totals, strict=True):
        np.testing.assert_array_equal(total, np.broadcast_to(np.sum(x, 0), x.shape), str(x.shape))


@pytest.mark.parametrize(("case", "n"), [(case, n) for case, n in RUNS if n > 1])
def test_gradient_equals_the_native_gradient(case, n):
    """Every rank weighs its own copy of the result differently, so no rank's cotangent can be lost or counted twice."""
    _, ours, native = CASES[case]
    x = positive(n, *local_shape(case, n))
    shape = jax.eval_shape(on_ranks(lambda x: ours(x, "ring"), n), x).shape
    weights = positive(*shape)

    def loss(x, collective):
        return jnp.sum(on_ranks(lambda x, w: jnp.sum(w * collective(x, "ring")), n)(x, weights))

    got, want = jax.jit(lambda x: (jax.grad(loss)(x, ours), jax.grad(loss)(x, native)))(x)
    np.testing.assert_allclose(got, want, rtol=1e-6)


@dataclass
class Traffic:
    """The permutes of a jaxpr, in order: each step's message, and what every rank sends and receives, in bytes."""

    messages: list[int] = field(default_factory=list)
    sent: Counter = field(default_factory=Counter)
    received: Counter = field(default_factory=Counter)

    def add(self, jaxpr: Jaxpr) -> None:
        for eqn in jaxpr.eqns:
            if eqn.primitive.name == "ppermute":
                (message,) = (v.aval.size * v.aval.dtype.itemsize for v in eqn.invars)
                self.messages.append(message)
                for source, destination in eqn.params["perm"]:
                    self.sent[source] += message
                    self.received[destination] += message
            for inner in jax.tree.leaves(eqn.params, is_leaf=lambda p: isinstance(p, Jaxpr | ClosedJaxpr)):
                if isinstance(inner, Jaxpr | ClosedJaxpr):
                    self.add(inner.jaxpr if isinstance(inner, ClosedJaxpr) else inner)


def traffic(f, *args) -> Traffic:
    found = Traffic()
    found.add(jax.make_jaxpr(f)(*args).jaxpr)
    return found


@pytest.mark.parametrize(("case", "n"), RUNS)
def test_permutes_match_the_closed_form(case, n):
    name, ours, _ = CASES[case]
    local = jnp.zeros((n, 2 * n, 3 * n))
    full_bytes = 6 * n * n * 4 * (n if name == "ring_all_gather" else 1)
    collective = on_ranks(lambda x: ours(x, "ring"), n)
    forward = traffic(collective, local)
    assert CollectiveCost(len(forward.messages), sum(forward.messages)) == collective_cost(name, n, full_bytes)

    backward = traffic(jax.grad(lambda x: jnp.sum(collective(x))), local)
    assert Counter(backward.messages) == Counter(forward.messages * 2), "backward sends what forward does"

    sent = [forward.sent[r] for r in range(n)]
    received = [forward.received[r] for r in range(n)]
    if n == 1:
        assert sent == received == [0]
    elif name == "central_all_reduce":
        assert sent == received == [(n - 1) * full_bytes] + [full_bytes] * (n - 1)
    elif name == "tree_all_reduce":
        levels = (n - 1).bit_length()
        assert sent[0] == received[0] == max(sent) == levels * full_bytes
        assert min(sent) == full_bytes and sum(sent) == 2 * (n - 1) * full_bytes
    else:
        assert set(sent) == set(received) == {sum(forward.messages)}


def test_replicated_operand_counts_once_per_rank_and_the_result_is_varying():
    """On a mesh of two axes: the other axis, over which x already varies, must be left alone."""
    grid = Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("other", "ring"), axis_types=(AxisType.Auto,) * 2)

    def body(x):
        assert varying_axes(x) == {"other"}
        results = [ours(x, "ring") for _, ours, _ in CASES.values()]
        assert all(varying_axes(result) == {"other", "ring"} for result in results)
        return [result[None, None] for result in results]

    x = integers(4, 2)
    outs = jax.jit(jax.shard_map(body, mesh=grid, in_specs=P("other"), out_specs=P("other", "ring")))(x)
    for case, out in zip(CASES, outs, strict=True):
        for other in range(2):
            block = np.asarray(x)[2 * other : 2 * other + 2]
            dim = int(case[-1]) if case[-1].isdigit() else None
            if case.startswith("ring_reduce_scatter"):
                want = np.split(2 * block, 2, dim)
            elif case.startswith("ring_all_gather"):
                want = [np.concatenate([block, block], dim)] * 2
            else:
                want = [2 * block] * 2
            np.testing.assert_array_equal(out[other], want, case)


RANKS = st.integers(2, 4096)
BYTES = st.integers(1, 10**13)


@given(st.integers(0, 12), BYTES)
def test_halving_doubling_sends_the_rings_bytes_in_no_more_steps(log2_n, size_bytes):
    ring = collective_cost("ring_all_reduce", 1 << log2_n, size_bytes)
    halving = collective_cost("halving_doubling_all_reduce", 1 << log2_n, size_bytes)
    assert halving.bytes_sent == ring.bytes_sent and halving.steps <= ring.steps
    assert halving.steps == 2 * log2_n


@given(RANKS, BYTES)
def test_no_all_reduce_sends_less_than_the_ring(n, size_bytes):
    ring = collective_cost("ring_all_reduce", n, size_bytes).bytes_sent
    assert ring <= collective_cost("tree_all_reduce", n, size_bytes).bytes_sent
    assert ring <= collective_cost("central_all_reduce", n, size_bytes).bytes_sent


@given(RANKS, BYTES, st.floats(1e6, 1e13))
def test_bus_bandwidth_is_the_link_speed_at_any_n(n, size_bytes, bytes_per_s):
    for algorithm in ("ring_reduce_scatter", "ring_all_gather", "ring_all_reduce", "all_to_all"):
        algorithm_bandwidth = size_bytes / collective_cost(algorithm, n, size_bytes).seconds(0.0, bytes_per_s)
        factor = bus_bandwidth_factor(algorithm.removeprefix("ring_"), n)
        assert algorithm_bandwidth * factor == pytest.approx(bytes_per_s)
    assert bus_bandwidth_factor("broadcast", n) == bus_bandwidth_factor("permute", n) == 1


def test_one_rank_costs_nothing():
    assert {collective_cost(algorithm, 1, 28e9) for algorithm in ALGORITHMS} == {CollectiveCost(0, 0.0)}
    assert bus_bandwidth_factor("all_reduce", 1) == 0


def test_reference_numbers():
    """28 GB of fp32 gradients (7B parameters) over 8 devices: the published 0.082 s and 1.96 s."""
    ring = collective_cost("ring_all_reduce", 8, 28e9)
    assert ring.seconds(0.0, 600e9) == pytest.approx(0.082, abs=5e-4)
    assert ring.seconds(0.0, 25e9) == pytest.approx(1.96)
    assert collective_cost("central_all_reduce", 8, 28e9).bytes_sent == 2 * 7 * 28e9
    assert collective_cost("tree_all_reduce", 8, 28e9) == CollectiveCost(6, 6 * 28e9)
    assert collective_cost("all_to_all", 8, 28e9) == CollectiveCost(7, 7 / 8 * 28e9)
    assert ring.seconds(1e-3, 25e9) == pytest.approx(1.96 + 14e-3)
