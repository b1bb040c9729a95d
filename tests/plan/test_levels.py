"""Memory predicted from a trace, programs compiled for absent devices, and how the two are compared."""

import random
from fractions import Fraction
from functools import partial

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from experiments.bench.levels import LARGE, formula_bytes, with_layout
from experiments.strategies import BY_NAME
from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_abstract_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import GIB, Cluster, find_hardware
from jaxdist.plan.proof.compile import emitted_collectives, has_cuda_compiler
from jaxdist.plan.proof.executed import executed_step, miscounted
from jaxdist.plan.proof.levels import Sent, levels
from jaxdist.plan.proof.trace_memory import Buffer, alive_at_peak, pack, step_memory, temporary_bytes
from jaxdist.plan.search import Candidates, score
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

KIB = 1024
X = jax.ShapeDtypeStruct((16, 16), jnp.float32)  # 1 KiB


def temporaries(function, *args, donated=(), compiler="gpu") -> int:
    jaxpr = jax.make_jaxpr(function)(*args)
    return temporary_bytes(jaxpr, dict(donated), compiler)[0]


# ---- which values get a buffer


def test_elementwise_results_between_two_matmuls_are_one_buffer():
    # x @ x is a buffer, the chain is fused into one (which takes over its memory), the second matmul is the output.
    def f(x):
        return jnp.tanh(x @ x * 2 + 1) @ x

    assert temporaries(f, X) == 2 * KIB


def test_what_no_output_needs_takes_nothing():
    assert temporaries(lambda x: (x @ x @ x, x + 1)[1], X) == 1 * KIB


def test_donated_memory_is_not_counted():
    assert temporaries(lambda x: x * 2, X) == 1 * KIB
    assert temporaries(lambda x: x * 2, X, donated=[(0, 0)]) == 0


def test_a_loop_keeps_what_backward_needs_once_for_each_turn():
    def loss(w, x):
        return lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=10)[0].sum()

    short = temporaries(jax.grad(loss), X, X)
    assert short >= 10 * KIB  # ten x
    assert short < 30 * KIB  # but not ten times everything inside


def test_a_loop_copies_one_layer_of_what_it_goes_through():
    def through(x, stacked):
        return lax.scan(lambda x, w: (x @ w, None), x, stacked)[0]

    same = temporaries(lambda x, w: lax.scan(lambda x, _: (x @ w, None), x, None, length=10)[0], X, X)
    assert temporaries(through, X, jax.ShapeDtypeStruct((10, 16, 16), jnp.float32)) == same + 1 * KIB


def test_what_is_fused_keeps_what_it_reads_until_its_reader():
    def f(x):
        a = x @ x
        doubled = a * 2  # fused into the sum, which needs `a` beside a product and its operand
        return (doubled + x @ x @ x) @ x

    assert temporaries(f, X) == 3 * KIB

    def g(x):
        a = x @ x
        b = a + 1  # a buffer, for the next matmul; the last line computes it again, on a CPU
        return (b @ x @ x @ x + b * 2) @ x

    assert temporaries(g, X, compiler="cpu") == 4 * KIB


def test_a_loop_updates_its_carry_in_place():
    def fill(buffer):
        def body(buffer, index):
            return lax.dynamic_update_index_in_dim(buffer, buffer[0] * 2, index, 0), None

        return lax.scan(body, buffer, jnp.arange(8))[0]

    big = jax.ShapeDtypeStruct((8, 16, 16), jnp.float32)
    assert temporaries(fill, big, donated=[(0, 0)]) < 3 * KIB
    assert 8 * KIB <= temporaries(fill, big) < 11 * KIB


def test_scattering_onto_a_sum_is_done_in_place():
    def f(x, rows):
        return x @ x + jnp.zeros((16, 16)).at[rows].add(1.0)

    rows = jax.ShapeDtypeStruct((4,), jnp.int32)
    assert temporaries(f, X, rows) < 3 * KIB


def test_a_scattered_gradient_is_added_to_the_sum_where_it_is_made():
    """A tied table's over micro-batches: the head's part does not wait beside the sum for the embedding's."""

    def loss(table, x, rows):
        return jnp.sin(jnp.sin(table[rows] @ x) @ x.T @ table.T).sum()

    def f(total, table, x, rows, read_again):
        def body(total, rows):
            gradient = jax.grad(loss)(table, x, rows)
            return total + gradient, gradient[0, 0] if read_again else 0.0

        return lax.scan(body, total, rows)

    table, wide = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((256, 16), (16, 2048)))
    rows = jax.ShapeDtypeStruct((8, 4), jnp.int32)
    added, waits = (
        temporaries(partial(f, read_again=again), table, table, wide, rows, donated=[(0, 0)], compiler="cpu")
        for again in (False, True)
    )
    assert waits - added == 16 * KIB


@pytest.mark.parametrize("compiler", ["cpu", "gpu"])
def test_a_matmul_reads_a_transposed_matrix_as_it_is(compiler):
    assert temporaries(lambda x: x @ x.T, X, compiler=compiler) == 1 * KIB
    # What is transposed lives as long as the matmul needs it; a transpose with another reader is made.
    assert temporaries(lambda x: x @ x @ (x @ x).T @ x, X, compiler=compiler) == 3 * KIB
    assert temporaries(lambda x: (x @ x.T, jnp.sort(x.T)), X, compiler=compiler) > 2 * KIB


def test_one_platforms_branch_is_compiled():
    def f(x):
        return lax.platform_dependent(x, cuda=lambda x: x @ x, default=lambda x: (x @ x) @ (x @ x @ x)) @ x

    assert temporaries(f, X) == temporaries(lambda x: x @ x @ x, X) < temporaries(f, X, compiler="cpu")


def test_rows_are_not_gathered_in_place():
    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    column = jax.ShapeDtypeStruct((16, 1), jnp.float32)
    assert temporaries(lambda x, y, rows: (x @ x + 1) @ y, X, column, rows) < 2 * KIB
    assert temporaries(lambda x, y, rows: (x @ x)[rows] @ y, X, column, rows) == 2 * KIB


def test_gathers_by_the_same_rows_are_one_kernel():
    def f(x, rows, one_kernel):
        other = rows if one_kernel else jnp.sort(rows)
        return (x @ x)[rows] @ x, (x @ x @ x)[other] @ x

    rows = jax.ShapeDtypeStruct((16,), jnp.int32)
    together, apart = (temporaries(partial(f, one_kernel=one), X, rows) for one in (True, False))
    assert together > apart and temporaries(partial(f, one_kernel=True), X, rows, compiler="cpu") > 0


def in_two(f, *args):
    """Temporaries of a program of two ranks, of local shapes."""
    mesh = jax.sharding.AbstractMesh((2,), ("dp",))
    both = [jax.ShapeDtypeStruct((2 * x.shape[0], *x.shape[1:]), x.dtype) for x in args]
    return temporaries(jax.shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp")), *both)


def test_what_a_loop_scatters_waits_for_its_next_turn():
    """Whole gradients of one turn live through the next, which runs once before the loop."""

    def f(x, stacked, sends):
        def body(x, w):
            x = jnp.sin(x @ w)
            made = x @ x
            return x, lax.psum_scatter(made, "dp", tiled=True) if sends else made[:8] * 2

        return lax.scan(body, x, stacked)[1]

    stacked = jax.ShapeDtypeStruct((10, 16, 16), jnp.float32)
    late, at_once = (in_two(partial(f, sends=sends), X, stacked) for sends in (True, False))
    assert late >= at_once + 1 * KIB


def test_shards_of_another_dim_are_transposed_for_all_layers():
    def f(x, stacked, dim):
        return lax.scan(lambda x, w: (x @ lax.all_gather(w, "dp", axis=dim, tiled=True), None), x, stacked)[0]

    shards = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((10, 8, 16), (10, 16, 8))]
    first, second = (in_two(partial(f, dim=dim), X, shards[dim]) for dim in (0, 1))
    assert second == first + 10 * KIB // 2


def test_sixteen_bits_take_thirty_two_on_a_cpu():
    half = jax.ShapeDtypeStruct((16, 16), jnp.bfloat16)
    assert temporaries(lambda x: x @ x @ x, half, compiler="cpu") == 2 * temporaries(lambda x: x @ x @ x, half)


# ---- packing


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.integers(1, 50)), max_size=40), st.randoms())
def test_a_packing_holds_what_lives_and_wastes_no_more_than_everything(spans, order: random.Random):
    buffers = [Buffer(min(a, b), size, "x", end=max(a, b)) for a, b, size in spans]
    order.shuffle(buffers)
    alive = sum(num_bytes for num_bytes, _ in alive_at_peak(buffers))
    assert alive <= pack(buffers) <= sum(buffer.num_bytes for buffer in buffers)


def test_buffers_that_never_meet_share_memory():
    assert pack([Buffer(0, 5, "a", end=1), Buffer(2, 7, "b", end=3), Buffer(4, 6, "c", end=4)]) == 7


def test_the_tightest_gap_is_taken():
    # At clock 2 there are gaps of 4 (below b) and 3 (below d): a buffer of 3 goes to the second.
    placed = [Buffer(0, 4, "a", end=1), Buffer(0, 2, "b", end=3), Buffer(0, 3, "c", end=1), Buffer(0, 1, "d", end=3)]
    assert pack([*placed, Buffer(2, 3, "e", end=3), Buffer(2, 4, "f", end=3)]) == 10


# ---- the text of an optimised program

PROGRAM = """\
HloModule jit_step, is_scheduled=true

%sum (a: f32[], b: f32[]) -> f32[] {
  ROOT %add = f32[] add(%a, %b)
}

%product (a: f32[8,16]) -> f32[8,16] {
  ROOT %m = f32[8,16]{1,0} dot(%a, %a), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (p: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %g = ((bf16[1,768]{1,0}, bf16[1,256]{1,0}), (bf16[2,768]{1,0}, bf16[2,256]{1,0})) all-gather-start(%x, %y), \
replica_groups={{0,2},{1,3}}, dimensions={0}
  %f = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%product
  %k = f32[8,16]{1,0} custom-call(%x), custom_call_target="__cublas$lt$matmul"
  %h = f32[8,16]{1,0} add(%f, %k)
  %d = (bf16[2,768]{1,0}, bf16[2,256]{1,0}) all-gather-done(%g)
  %r = ((f32[8,16]{1,0}), f32[4,16]{1,0}) reduce-scatter-start(%z), replica_groups=[2,2]<=[4], to_apply=%sum
  ROOT %t = (s32[], bf16[8,16]) tuple(%i, %v)
}

%condition (p: (s32[], bf16[8,16])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = (s32[], bf16[8,16]) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"6"}}
  %a = (f32[4]{0}, f32[2]{0}) all-reduce(%p, %q), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%sum
  %c = (f32[4]{0}, f32[4]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1},{1,0},{2,3},{3,2}}
  %e = (s32[], bf16[8,16]) while(%init), condition=%condition, body=%body
  %s = ((f32[4]{0}), f32[4]{0}) all-reduce-start(%p), replica_groups={{0,1},{2,3}}, to_apply=%sum
  %b = f32[4]{0} all-reduce(%p), channel_id=1, replica_groups=mesh['pp'=1,'dp'=2,'tp'=2] {'dp'}, to_apply=%sum
  ROOT %o = f32[4]{0} all-reduce(%p), replica_groups={{0},{1},{2},{3}}, to_apply=%sum
}
"""


def test_collectives_of_a_program_text_with_loops_and_groups_of_every_form():
    found = emitted_collectives(PROGRAM, MeshShape(dp=2, tp=2))
    assert [(c.kind, c.axes, c.count, c.full_bytes, c.num_operands, c.asynchronous) for c in found] == [
        ("all_gather", ("dp",), 6, 2 * 2 * (768 + 256), 2, True),
        ("reduce_scatter", ("tp",), 6, 4 * 8 * 16, 1, True),
        ("all_reduce", ("dp",), 1, 4 * 6, 2, False),
        ("permute", ("tp",), 1, 16, 1, True),
        ("all_gather", ("dp",), None, 2 * 2 * (768 + 256), 2, True),  # a loop without a known length
        ("reduce_scatter", ("tp",), None, 4 * 8 * 16, 1, True),
        ("all_reduce", ("tp",), 1, 4 * 4, 1, True),  # since JAX 0.12 with its operands
        ("all_reduce", ("dp",), 1, 4 * 4, 1, False),
    ]
    assert [c.matmuls for c in found] == [2, 0, 0, 0, 2, 0, 0, 0]


MANY = {"sp": True, "zero": 1, "schedule": "interleaved", "overlap": True}


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        pytest.param("pp=2,dp=2,tp=2", MANY, marks=pytest.mark.exhaustive),
        ("pp=2,tp=2", {"zero": 1, "schedule": "zb-v", "remat": "block", "accumulate": 2}),
    ],
)
def test_a_step_runs_every_collective_as_often_as_it_is_counted(mesh, more):
    # Traced, compiled and executed, on each device: nothing is lifted out of a pipeline's loops.
    config = RunConfig(PRESETS["tiny"], ParallelConfig(mesh=parse_mesh(mesh), attention="xla", **more), batch_size=16)
    found = levels(config, "cpu")
    assert all(row.why.startswith("equal") for row in found.sent)
    executed = executed_step(config, found.compiled)
    assert found.compiled.collectives and miscounted(found.compiled, executed, config.parallel.mesh) == []
    one = found.compiled.collectives[0]
    executed[one.name, 1] += 1  # and the comparison can fail
    assert [each.collective for each in miscounted(found.compiled, executed, config.parallel.mesh)] == [one]


# ---- the levels together


@pytest.mark.parametrize("name", ["tp4-sp"])
def test_the_compiler_emits_what_was_traced_or_less(name):
    found = levels(BY_NAME[name].run_config(), "cpu")
    assert found.sent
    for row in found.sent:
        assert row.compiled_bytes <= row.traced_bytes, row
        assert row.why.startswith("equal"), row


def test_predicted_peak_is_near_the_compilers():
    # The whole table is `python -m experiments.bench levels`; its errors are in docs/plan.md.
    model = GPT2Config(num_layers=2, width=64, num_heads=4, ffn_width=256, seq_len=128, vocab_size=8192)
    for mesh, more in [("tp=2", {"sp": True, "remat": "selective"}), ("pp=2", {})]:
        base = RunConfig(model=model, batch_size=8)
        assert abs(levels(with_layout(base, mesh, more, "cpu"), "cpu").peak_error) < 0.05, mesh


@pytest.mark.parametrize(
    ("mesh", "more"),
    [
        ("dp=4,tp=2", {"zero": 3, "sp": True, "remat": "block"}),
        ("pp=2,tp=2", {"schedule": "zb-v", "remat": "block"}),
    ],
)
def test_the_searchs_closed_form_of_memory_agrees_with_the_trace(mesh, more):
    # Samples of hundreds and their errors are in docs/plan.md.
    parallel = ParallelConfig(mesh=parse_mesh(mesh), attention="xla", **more)
    config = RunConfig(PRESETS["gpt2-124m"], parallel, precision=PrecisionConfig("bfloat16"), batch_size=64)
    cluster = Cluster(find_hardware("h100"), devices_per_node=parallel.mesh.num_devices)
    formula = score(config, Candidates.of(config), cluster, "xla").memory.total[0]
    assert formula == pytest.approx(levels(config).predicted.peak, rel=0.10)


@pytest.mark.parametrize("name", LARGE)
def test_memory_of_adapters_experts_and_long_sequences_is_the_compilers(name):
    """`python -m experiments.bench levels --compile h200 --large` asks the compiler again."""
    row = LARGE[name]
    config, compiled = row.config(), row.compiled * GIB
    assert formula_bytes(config) == pytest.approx(compiled, rel=0.05)
    if has_cuda_compiler() or config.parallel.attention != "cudnn":
        assert levels(config).predicted.peak == pytest.approx(compiled, rel=0.05)


def test_a_dear_result_read_twice_is_kept_on_a_cpu_and_made_again_on_a_gpu():
    def f(x, y):
        e = jnp.exp(x)
        later = (x @ y) @ y
        return (e + 1) @ later @ (e + 2)

    kept, again = temporaries(f, X, X, compiler="cpu"), temporaries(f, X, X)
    assert kept > again


PIPELINED = """
%message (p: f32[2]) -> f32[2] {
  ROOT %p.1 = f32[2]{0} collective-permute(%p), source_target_pairs={{0,2},{1,3}}, \
metadata={op_name="jit(step)/while/body/cond/branch_1_fun/jit(from_before_0)/ppermute"}
}

%layer (p: f32[4]) -> f32[4] {
  ROOT %in = f32[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%sum
}

%tick (p: f32[4]) -> f32[4] {
  %lifted = f32[4]{0} all-reduce(%p), replica_groups={{0,1},{2,3}}, to_apply=%sum, \
metadata={op_name="jit(step)/while/body/jit(embed)/while/body/psum"}
  %l = f32[4]{0} while(%p), condition=%c, body=%layer, metadata={op_name="jit(step)/jit(layers)/while"}
  %o = f32[4]{0} while(%p), condition=%c, body=%layer, metadata={op_name="jit(step)/jit(layers)/jit(o)/while"}
  %m = f32[2]{0} conditional(%i, %p, %p), branch_computations={%none, %message}, metadata={op_name="jit(step)/cond"}
}

ENTRY %main (p: f32[4]) -> f32[4] {
  %w = f32[4]{0} while(%p), condition=%c, body=%tick, backend_config={"known_trip_count":{"n":"6"}}
}
"""


def test_loops_of_data_dependent_length_are_counted_by_the_names_of_their_functions():
    third = Fraction(1, 3)
    iterations = {"layers": (third, 2 * third), "from_before_0": (Fraction(1, 2), Fraction(0)), "embed": (third, 0)}
    found = emitted_collectives(PIPELINED, MeshShape(pp=2, tp=2), iterations)
    assert [(c.name, c.count, c.by_stage) for c in found] == [
        ("lifted", 6, None),  # out of its loop: at every tick, whatever its name says
        ("in", 4, (2, 4)),
        ("in", None, None),  # a loop inside, of which nothing is known
        ("p.1", 3, (3, 0)),
    ]
    assert [c.sent_bytes(MeshShape(pp=2, tp=2)) for c in found] == [6 * 16, 4 * 16, None, 3 * 8]


def test_arguments_of_a_step_are_its_state_and_its_batch():
    config = RunConfig(
        model=GPT2Config(4, 64, 4, 256, 32, 256),
        parallel=ParallelConfig(mesh=parse_mesh("dp=4,tp=2"), zero=2),
        precision=PrecisionConfig(dtype="bfloat16"),
        batch_size=8,
    )
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    batch = 2 * (32 + 32 + 1) * 4  # two rows of inputs, targets and an index
    assert step_memory(program, traced, "gpu").arguments == local_bytes(program.abstract_state()) + batch


def test_more_is_kept_with_less_recomputation_and_more_rows():
    def peak(remat, batch):
        parallel = ParallelConfig(mesh=parse_mesh("dp=2"), remat=remat)
        config = RunConfig(model=GPT2Config(4, 64, 4, 256, 64, 256), parallel=parallel, batch_size=batch)
        return levels(config).predicted.temporaries

    assert peak("none", 8) > peak("selective", 8) > peak("block", 8)
    assert 1.7 < peak("none", 16) / peak("none", 8) < 2.1


def test_how_a_compiled_program_differs_is_said():
    def why(traced, compiled):
        return Sent("all_reduce", ("dp",), *traced, *compiled).why

    assert why((3, 300), (3, 300)) == "equal"
    assert why((3, 21), (2, 22)) == "equal bytes, combined: 3 became 2"  # a byte is lost to rounding in each message
    assert "sends less" in why((3, 300), (2, 200))
    assert "sends more" in why((3, 300), (3, 600))
    assert "text does not say" in why((3, 300), (None, None))
