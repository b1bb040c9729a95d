"""The wrappers: values, types, transposes, what is refused, and that size-1 axes leave nothing behind."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from conftest import DEVICES
from jax.sharding import PartitionSpec as P

from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange, spread
from jaxdist.parallel.collectives import varying_axes
from jaxdist.plan.proof.trace import collectives_of, total_sent

SHAPE = MeshShape(replica=2, dp=2, tp=2)
MESH = make_mesh(SHAPE, DEVICES)
ONE = make_mesh(MeshShape(), DEVICES)
X = np.arange(8 * 4 * 6, dtype=np.float32).reshape(8, 4, 6)
ALL = ("replica", "dp", "tp")
PER_RANK = P(ALL)


def on_mesh(body, out_specs, mesh=MESH, in_specs=PER_RANK):
    return jax.jit(jax.shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=True))


def by_rank(x):
    """[8, ...] -> [replica, dp, tp, ...]."""
    return np.asarray(x).reshape(2, 2, 2, *x.shape[1:])


def test_all_reduce_sums_over_the_named_axes_only():
    out = on_mesh(lambda x: comm.all_reduce(x, ("replica", "tp")), P("dp"))(X)
    np.testing.assert_array_equal(np.asarray(out), by_rank(X).sum((0, 2)))


def test_all_reduce_max_and_broadcast():
    out = on_mesh(lambda x: comm.all_reduce_max(x, ALL), P())(X)
    np.testing.assert_array_equal(np.asarray(out)[0], X.max(0))
    out = on_mesh(lambda x: exchange.broadcast(x, "tp", root=1), P(("replica", "dp")))(X)
    np.testing.assert_array_equal(np.asarray(out).reshape(2, 2, 4, 6), by_rank(X)[:, :, 1])


def test_broadcast_keeps_the_nan_of_other_ranks_out():
    poisoned = X.copy()
    poisoned[::2] = np.nan  # tp rank 0
    out = on_mesh(lambda x: exchange.broadcast(x, "tp", root=1), P(("replica", "dp")))(poisoned)
    assert np.isfinite(out).all()


def test_a_truth_value_is_broadcast_as_one():
    out = on_mesh(lambda x: exchange.broadcast(x > 0, "tp", root=1), P(("replica", "dp")))(X)
    assert out.dtype == bool and np.array_equal(np.asarray(out).reshape(2, 2, 4, 6), by_rank(X)[:, :, 1] > 0)


def test_truth_values_are_counted_on_any_number_of_ranks():
    counts = on_mesh(lambda x: comm.all_reduce(x > 100, "dp"), P(("replica", "tp")))(X)
    np.testing.assert_array_equal(np.asarray(counts).reshape(2, 2, 4, 6), by_rank(X > 100).sum(1))
    parts = by_rank(on_mesh(lambda x: comm.reduce_scatter(x > 100, "dp", 1), PER_RANK)(X))
    np.testing.assert_array_equal(np.concatenate([parts[:, 0], parts[:, 1]], 2), by_rank(X > 100).sum(1))
    for call in (comm.all_reduce, lambda x, axis: comm.reduce_scatter(x, axis, 1)):
        alone = on_mesh(lambda x, call=call: call(x > 100, "dp"), P(), ONE, P())(X)
        assert alone.dtype == counts.dtype == parts.dtype == np.int32


@pytest.mark.parametrize(
    "call",
    [
        lambda x, dim: comm.reduce_scatter(x, "dp", dim),
        lambda x, dim: comm.all_gather(x, "dp", dim),
        lambda x, dim: exchange.all_to_all(x, "dp", dim, -2),
        lambda x, dim: exchange.all_to_all(x, "dp", 1, dim),
        lambda x, dim: spread.gather_to(x, "dp", dim, [0]),
        lambda x, dim: spread.scatter_from(x, "dp", dim, [0]),
    ],
)
def test_a_dim_may_count_from_the_end(call):
    whole, from_end = (on_mesh(lambda x, dim=dim: call(x, dim), PER_RANK)(X) for dim in (2, -1))
    np.testing.assert_array_equal(whole, from_end)
    for dim in (3, -4):
        with pytest.raises(ValueError, match=f"dim {dim}"):
            on_mesh(lambda x, dim=dim: call(x, dim), PER_RANK)(X)
    with pytest.raises(ValueError, match="not empty"):
        on_mesh(lambda x: call(x, 2), PER_RANK)(X[..., :0])


def test_reduce_scatter_and_all_gather():
    out = on_mesh(lambda x: comm.reduce_scatter(x, "dp", 1), P(("replica", "tp"), "dp"))(X)
    expected = by_rank(X).sum(1).reshape(4, 4, 6)
    np.testing.assert_array_equal(np.asarray(out), expected)
    out = on_mesh(lambda x: comm.all_gather(x, "tp", 1, replicated=True), P(("replica", "dp")))(X)
    np.testing.assert_array_equal(np.asarray(out), by_rank(X).reshape(4, 8, 6))


def test_all_to_all_and_permute():
    out = on_mesh(lambda x: exchange.all_to_all(x, "dp", split_dim=1, concat_dim=2), PER_RANK)(X)
    parts = by_rank(X)
    expected = np.stack(
        [np.concatenate([parts[:, source, :, rank * 2 : rank * 2 + 2] for source in (0, 1)], -1) for rank in (0, 1)], 1
    )
    np.testing.assert_array_equal(by_rank(out), expected)
    out = on_mesh(lambda x: comm.permute(x, "replica"), PER_RANK)(X)
    np.testing.assert_array_equal(by_rank(out), by_rank(X)[::-1])


def test_permute_direction():
    mesh = make_mesh(MeshShape(dp=4), DEVICES[:4])
    for shift in (1, -1, 2):
        out = on_mesh(partial(comm.permute, axis="dp", shift=shift), P("dp"), mesh, P("dp"))(np.arange(4.0))
        np.testing.assert_array_equal(np.asarray(out), np.roll(np.arange(4.0), shift))


@pytest.mark.parametrize("ranks", [(0, 3), (0,), (1, 2), (0, 1, 2, 3)])
def test_gather_to_and_scatter_from_some_ranks(ranks):
    mesh = make_mesh(MeshShape(pp=4), DEVICES[:4])
    gather = on_mesh(lambda x: spread.gather_to(x[0], "pp", 1, ranks)[None], P("pp"), mesh, P("pp"))
    x = X[:4]
    whole = np.asarray(gather(x))
    for rank in range(4):
        own = np.zeros((4, 4, 6), np.float32)
        own[rank] = x[rank]
        expected = np.concatenate(list(x if rank in ranks else own), axis=1)
        np.testing.assert_array_equal(whole[rank], expected)

    scatter = on_mesh(lambda x: spread.scatter_from(x[0], "pp", 0, ranks)[None], P("pp"), mesh, P("pp"))
    given = np.where(np.isin(np.arange(4), ranks)[:, None, None], x, 0)
    np.testing.assert_array_equal(np.asarray(scatter(given))[:, 0], given.sum(0))

    # Each is the other's transpose, of what the ranks get and give.
    weights = np.random.default_rng(0).normal(size=whole.shape).astype(np.float32)
    weights *= np.isin(np.arange(4), ranks)[:, None, None]
    gradient = jax.grad(lambda x: jnp.sum(gather(x) * weights))(x)
    back = on_mesh(lambda x: spread.scatter_from(x[0], "pp", 1, ranks)[None], P("pp"), mesh, P("pp"))
    np.testing.assert_allclose(np.asarray(gradient), np.asarray(back(weights)), rtol=1e-5, atol=1e-6)

    # What the rank that sends most sends: to every other taker of its slice, or n-1 slices.
    mesh_shape, bytes_of = MeshShape(pp=4), {}
    for name, function, argument in (("gather", gather, x), ("scatter", scatter, given)):
        sent = collectives_of(function.trace(argument).jaxpr, mesh_shape)
        bytes_of[name] = total_sent(sent, mesh_shape)
    takers = max(len(set(ranks) - {rank}) for rank in range(4))
    assert bytes_of == {"gather": takers * x[0].nbytes, "scatter": 3 / 4 * x[0].nbytes}


@pytest.mark.parametrize(
    ("name", "forward", "gathered"),
    [
        ("all_reduce", lambda x: comm.all_reduce(x, "tp"), P(("replica", "dp"))),
        ("reduce_scatter", lambda x: comm.reduce_scatter(x, "tp", 1), P(("replica", "dp"), "tp")),
        ("all_gather", lambda x: comm.all_gather(x, "tp", 1, replicated=True), P(("replica", "dp"))),
        ("permute", lambda x: comm.permute(x, "tp"), PER_RANK),
        ("all_to_all", lambda x: exchange.all_to_all(x, "tp", 1, 2), PER_RANK),
        ("broadcast", lambda x: exchange.broadcast(x, "tp"), P(("replica", "dp"))),
    ],
)
def test_transposes(name, forward, gathered):
    """<f(x), y> = <x, f'(y)> for the linear f: a gradient of a weighted sum is the transpose of f."""
    f = on_mesh(forward, gathered)
    y = f(X)
    rng = np.random.default_rng(0)
    weights = rng.normal(size=y.shape).astype(np.float32)
    gradient = jax.grad(lambda x: jnp.sum(f(x) * weights))(X)
    direction = rng.normal(size=X.shape).astype(np.float32)
    np.testing.assert_allclose(
        np.sum(np.asarray(f(direction)) * weights), np.sum(np.asarray(gradient) * direction), rtol=1e-4
    )


def test_a_second_reduction_is_an_error():
    """JAX accepts it and multiplies by the axis size; the wrappers do not."""
    with pytest.raises(ValueError, match="already equal along"):
        on_mesh(lambda x: comm.all_reduce(comm.all_reduce(x, "dp"), "dp"), P(("replica", "tp")))(X)
    with pytest.raises(ValueError, match="already equal along"):
        on_mesh(lambda x: comm.reduce_scatter(comm.all_reduce(x, "dp"), "dp", 1), PER_RANK)(X)


def test_varying_casts_once_and_types_are_what_they_say():
    def body(x):
        assert varying_axes(x) == set(ALL)
        total = comm.all_reduce(x, "tp")
        assert varying_axes(total) == {"replica", "dp"}
        assert varying_axes(comm.varying(total, "tp")) == set(ALL)
        assert varying_axes(comm.all_gather(x, "dp", 0)) == set(ALL)
        assert varying_axes(comm.all_gather(x, "dp", 0, replicated=True)) == {"replica", "tp"}
        return comm.varying(total, ("tp", "dp"))

    on_mesh(body, PER_RANK)(X)


def on_one_rank(x):
    assert comm.rank("tp") == 0 and comm.size(ALL) == 1
    for name in ALL:
        x = comm.all_reduce(comm.varying(x, name), name)
        x = comm.all_gather(comm.reduce_scatter(x, name, 0), name, 0)
        x = comm.permute(exchange.all_to_all(x, name, 0, 1), name)
        x = exchange.broadcast(comm.all_reduce_max(x, name), name)
        x = spread.scatter_from(spread.gather_to(x, name, 0, (0,)), name, 0, (0,))
    return x + 1


def test_size_one_axes_leave_nothing_in_the_program():
    traced = jax.jit(jax.shard_map(on_one_rank, mesh=ONE, in_specs=P(), out_specs=P(), check_vma=True)).trace(X)
    assert collectives_of(traced.jaxpr, MeshShape()) == []
    text = traced.lower().compile().as_text()
    for kind in ("all-reduce", "all-gather", "reduce-scatter", "collective-permute", "all-to-all", " copy("):
        assert kind not in text


def test_without_a_mesh_there_is_one_rank():
    for call in (on_one_rank, jax.jit(on_one_rank), jax.checkpoint(on_one_rank)):
        np.testing.assert_array_equal(call(X), X + 1)
    slope = jax.jit(jax.grad(lambda x: comm.all_reduce(comm.varying(x, "tp"), "tp").sum()))
    np.testing.assert_array_equal(slope(X), np.ones_like(X))


@pytest.mark.parametrize("call", [comm.live, comm.size, comm.rank])
def test_an_axis_that_the_mesh_lacks_is_an_error(call):
    with pytest.raises(NameError, match="no_axis"):
        on_mesh(lambda x: x + len([call("no_axis")]), PER_RANK)(X)


def test_sizes_that_do_not_divide_say_what_would():
    with pytest.raises(ValueError, match="Pad it to 6"):
        on_mesh(lambda x: comm.reduce_scatter(x[:, :, :5], "dp", 2), PER_RANK)(X)
    with pytest.raises(ValueError, match="Pad it to 6"):
        on_mesh(lambda x: exchange.all_to_all(x[:, :, :5], "dp", 2, 1), PER_RANK)(X)
    with pytest.raises(ValueError, match="ranks 0 to 1"):
        on_mesh(lambda x: exchange.broadcast(x, "dp", root=2), P(("replica", "tp")))(X)
    with pytest.raises(ValueError, match="does not divide"):
        on_mesh(lambda x: spread.scatter_from(x[:, :, :5], "dp", 2, (0,)), PER_RANK)(X)
