"""Kernels of a compiled program: how often they run, their bytes and FLOPs, beside closed forms and XLA's profile."""

import dataclasses
import tempfile
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from experiments.bench.profile import own_seconds
from experiments.bench.timing import full_batch
from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.proof import hlo
from jaxdist.plan.proof.launches import Launches, launches_of
from jaxdist.plan.proof.roofline import ON_H100, Reached, Roof, Total, kernels_of, phase_of, trips_of
from jaxdist.runtime.devices import acquire_devices
from jaxdist.train.program import build_program


def compiled(function, *shapes):
    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return kernels_of(jax.jit(function).lower(*arrays).compile().as_text())


def test_a_product_reads_its_operands_once_and_writes_its_result():
    (kernel,) = [k for k in compiled(jnp.matmul, (64, 48), (48, 80)) if k.flops]
    assert kernel.flops == 2 * 64 * 48 * 80
    assert kernel.moved == kernel.product_bytes == 4 * (64 * 48 + 48 * 80 + 64 * 80)
    assert kernel.wide


def test_a_pass_over_arrays_fused():
    (kernel,) = compiled(lambda x, y: jnp.tanh(x) * y + 1, (1000, 77), (1000, 77))
    assert (kernel.read, kernel.written, kernel.flops) == (2 * 4 * 77000, 4 * 77000, 0)


def test_a_loop_counts_as_often_as_it_runs_and_reads_its_slice():
    """scan over a stack of 6 matrices: each product once a turn, of one matrix of the stack."""

    def chain(x, stack):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, stack)[0]

    kernels = compiled(chain, (32, 40), (6, 40, 40))
    assert sum(k.count * k.flops for k in kernels) == 6 * 2 * 32 * 40 * 40
    assert {k.count for k in kernels if k.flops} == {6}
    assert all(k.moved < 4 * 6 * 40 * 40 for k in kernels if k.loop)  # of one turn, never of the stack


STACKS = """HloModule step

%sliced (stack: bf16[12,64,32], index: s32[], x: bf16[64,32]) -> bf16[64,32] {
  %stack = bf16[12,64,32]{2,1,0} parameter(0)
  %index = s32[] parameter(1)
  %x = bf16[64,32]{1,0} parameter(2)
  %zero = s32[] constant(0)
  %slice = bf16[1,64,32]{2,1,0} dynamic-slice(%stack, %index, %zero, %zero), dynamic_slice_sizes={1,64,32}
  %flat = bf16[64,32]{1,0} bitcast(%slice)
  ROOT %sum = bf16[64,32]{1,0} add(%flat, %x)
}

%stored (stack.1: bf16[12,64,32], index.1: s32[], x.1: f32[64,32]) -> (bf16[12,64,32], bf16[64,32]) {
  %stack.1 = bf16[12,64,32]{2,1,0} parameter(0)
  %index.1 = s32[] parameter(1)
  %x.1 = f32[64,32]{1,0} parameter(2)
  %narrow = bf16[64,32]{1,0} convert(%x.1)
  %one = bf16[1,64,32]{2,1,0} bitcast(%narrow)
  %zero.1 = s32[] constant(0)
  %put = bf16[12,64,32]{2,1,0} dynamic-update-slice(%stack.1, %one, %index.1, %zero.1, %zero.1)
  ROOT %both = (bf16[12,64,32]{2,1,0}, bf16[64,32]{1,0}) tuple(%put, %narrow)
}

ENTRY %main (stack.2: bf16[12,64,32], index.2: s32[], x.2: bf16[64,32], y: f32[64,32]) -> bf16[64,32] {
  %stack.2 = bf16[12,64,32]{2,1,0} parameter(0)
  %index.2 = s32[] parameter(1)
  %x.2 = bf16[64,32]{1,0} parameter(2)
  %y = f32[64,32]{1,0} parameter(3)
  %a = bf16[64,32]{1,0} fusion(%stack.2, %index.2, %x.2), kind=kLoop, calls=%sliced, ORIGIN
  %b = (bf16[12,64,32]{2,1,0}, bf16[64,32]{1,0}) fusion(%stack.2, %index.2, %y), kind=kLoop, calls=%stored
  %attention = (bf16[2,16,4,8]{3,2,1,0}, f32[2,4,16]{2,1,0}) custom-call(%q, %k, %v), CALL
  %q = bf16[2,16,4,8]{3,2,1,0} parameter(4)
  %k = bf16[2,16,2,8]{3,2,1,0} parameter(5)
  %v = bf16[2,16,2,8]{3,2,1,0} parameter(6)
  ROOT %copy = bf16[64,32]{1,0} copy(%a)
}
"""
STACKS = STACKS.replace("ORIGIN", 'metadata={op_name="jit(step)/transpose(jvp())/while/body/layer/add"}')
STACKS = STACKS.replace("CALL", 'custom_call_target="__cudnn$fmhaSoftmax", backend_config={"mask_type": "CAUSAL"}')


@pytest.fixture(scope="module")
def step():
    """A step of three layers on one CPU device, compiled."""
    config = RunConfig(dataclasses.replace(PRESETS["proof"], num_layers=3), batch_size=4)
    program = build_program(config, make_mesh(MeshShape(), acquire_devices(1, "cpu").devices))
    return config, program, program.compile_step()


def test_products_of_a_step_are_those_that_the_model_declares(step):
    config, _, executable = step
    flops = sum(kernel.count * kernel.flops for kernel in kernels_of(executable.as_text()))
    work, tokens = work_of(config.model), config.batch_size * config.model.seq_len
    assert flops == pytest.approx(work.flops_per_token * tokens, rel=1e-6)


def test_kernels_run_as_often_as_xlas_profile_says(step):
    config, program, executable = step
    state = program.init(0)
    batch = program.put(full_batch(config))
    state, _ = executable(state, batch)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(executable(state, batch))
        (path,) = Path(folder).rglob("*.xplane.pb")
        ran = Counter()
        for name, _, count in own_seconds(jax.profiler.ProfileData.from_file(str(path))):
            ran[name] += count
    kernels = kernels_of(executable.as_text())
    seen = [kernel for kernel in kernels if kernel.name in ran]
    assert len(seen) > 0.8 * len(kernels)
    # Where threads share a kernel, or the profile has two lines of it, each reports it: the same for most, in loops and
    # outside.
    in_loops, outside = (
        Counter(ran[kernel.name] / kernel.count for kernel in seen if bool(kernel.loop) == loop).most_common(1)[0]
        for loop in (True, False)
    )
    assert in_loops[0] == outside[0] and in_loops[1] + outside[1] > 0.5 * len(seen)
    assert {kernel.count for kernel in seen if kernel.loop} == {3}


def test_loops_run_as_often_as_the_program_says_in_its_order():
    def nested(x, stack):
        inner = lambda x, w: jax.lax.scan(lambda x, _: (jnp.sin(x @ w), None), x, None, length=5)  # noqa: E731
        x, _ = jax.lax.scan(lambda x, w: (inner(x, w)[0], None), x, stack)
        return jax.lax.fori_loop(0, 7, lambda _, x: jnp.sin(x @ stack[0]), x)

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (3, 8, 8))]
    assert trips_of(jax.jit(nested).lower(*arrays).compile().as_text()) == [3, 5, 7]


# As XLA writes it: a graph of two, a loop whose body has a graph, a copy into a stack and a loop of its own, attention.
THUNKS = """000: kCommandBuffer [source       | next=013 (1)]
    001: kCustomKernel [source       | next=002 (1)] input_fusion grid: [1, 1, 1]
    002: kCopy [prev=001 (1) | next=003 (1)] kCopy
013: kWhile         [prev=000 (1) | next=000 (1)]
condition:
    014: kCustomKernel [source | sink] loop_compare_fusion grid: [1, 1, 1]
  body:
    000: kCommandBuffer      [source       | next=022 (2)]
        015: kCustomKernel [source       | next=016 (1)] input_reduce_fusion_2
        016: kCustomKernel [prev=015 (1) | next=017 (1)] loop_multiply_fusion_1
        017: kCustomKernel [prev=016 (1) | next=018 (1)] input_reduce_fusion_1
    020: kDynamicSliceFusion [source       | next=022 (1)] params=1, results=1
        021: kCopy [source | sink] kCopy
    022: kWhile         [prev=000 (1) | next=000 (1)]
    condition:
        023: kCustomKernel [source | sink] loop_compare_fusion
      body:
        024: kGemm [source | sink] kGemm
    025: kCuDnn              [prev=023 (1) | next=000 (2)] kCuDnn
026: kPartitionId   [source        | next=002 (1) ] kPartitionId
028: kAsyncStart    [prev=002 (1)  | next=009 (4) ] stream=communication_stream[0], async_id=4
    027: kAllReduce [source | sink] kAllReduce
029: kAsyncDone     [source        | sink         ] async_id=4
"""


def test_launches_are_graphs_and_what_is_outside_of_them():
    """Outside: in each of 12 turns a copy, 5 products and attention; and one collective. In graphs: 2, and 3 a turn."""
    found = launches_of(THUNKS, [12, 5])
    assert found == Launches(alone=12 * (1 + 5 + 1) + 1, graphs=1 + 12, in_graphs=2 + 12 * 3)
    assert found.total == 98
    assert launches_of("", []) == Launches(0, 0, 0)


def test_slices_of_a_stack_and_what_is_written_in_place():
    sliced, stored, attention, copied = kernels_of(STACKS)
    array = 64 * 32
    assert (sliced.read, sliced.written) == (2 * array + 4 + 2 * array, 2 * array)
    assert (stored.read, stored.written) == (4 * array + 4, 2 * array + 2 * array)
    assert (copied.read, copied.written) == (2 * array, 2 * array)
    assert (sliced.phase, sliced.part, sliced.operation) == ("backward", "layer", "add")
    # Scores that count, two products of 8 each: a query sees 8.5 of 16 positions in the mean.
    assert attention.flops == 2 * 2 * (2 * 4 * 16 * 8.5) * 8
    assert attention.moved == 2 * (2 * 2 * 16 * 4 * 8 + 2 * 2 * 16 * 2 * 8) + 4 * 2 * 4 * 16


# As XLA writes a scan whose stack is allocated and not filled: 5 turns that each write 16 floats of 5 x 16.
ALLOCATED = """HloModule scan

%put (stack: f32[5,16], index: s32[], x: f32[16]) -> f32[5,16] {
  %stack = f32[5,16]{1,0} parameter(0)
  %index = s32[] parameter(1)
  %x = f32[16]{0} parameter(2)
  %row = f32[1,16]{1,0} bitcast(%x)
  %zero = s32[] constant(0)
  ROOT %updated = f32[5,16]{1,0} dynamic-update-slice(%stack, %row, %index, %zero)
}

%body (carry: (s32[], f32[5,16], f32[16])) -> (s32[], f32[5,16], f32[16]) {
  %carry = (s32[], f32[5,16]{1,0}, f32[16]{0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %rows = f32[5,16]{1,0} get-tuple-element(%carry), index=1
  %value = f32[16]{0} get-tuple-element(%carry), index=2
  %stored = f32[5,16]{1,0} fusion(%rows, %i, %value), kind=kLoop, calls=%put
  ROOT %next = (s32[], f32[5,16]{1,0}, f32[16]{0}) tuple(%i, %stored, %value)
}

ENTRY %main (start: s32[], value.1: f32[16]) -> f32[5,16] {
  %start = s32[] parameter(0)
  %value.1 = f32[16]{0} parameter(1)
  %memory = f32[5,16]{1,0} custom-call(), custom_call_target="AllocateBuffer"
  %state = (s32[], f32[5,16]{1,0}, f32[16]{0}) tuple(%start, %memory, %value.1)
  %loop = (s32[], f32[5,16]{1,0}, f32[16]{0}) while(%state), condition=%more, body=%body, TRIPS
  ROOT %result = f32[5,16]{1,0} get-tuple-element(%loop), index=1
}
"""
ALLOCATED = ALLOCATED.replace("TRIPS", 'backend_config={"known_trip_count":{"n":"5"}}')


def test_a_fusion_that_is_started_is_the_same_kernel():
    shape = "((f32[5,16]{1,0}, s32[], f32[16]{0}), f32[5,16]{1,0}, u32[])"
    whole = "%stored = f32[5,16]{1,0} fusion(%rows, %i, %value), kind=kLoop, calls=%put"
    started = ALLOCATED.replace(
        whole,
        f"%begun = {shape} fusion-start(%rows, %i, %value), kind=kLoop, calls=%put\n"
        "  %stored = f32[5,16]{1,0} fusion-done(%begun)",
    )
    (before,), (after,) = kernels_of(ALLOCATED), kernels_of(started)
    assert started != ALLOCATED
    assert dataclasses.replace(after, name=before.name, opcode=before.opcode) == before


def test_an_allocation_is_no_kernel_and_moves_nothing():
    (stored,) = kernels_of(ALLOCATED)
    assert (stored.count, stored.read, stored.written) == (5, 4 + 4 * 16, 4 * 16)
    filled = ALLOCATED.replace(
        'custom-call(), custom_call_target="AllocateBuffer"', "broadcast(%nought), dimensions={}"
    )
    fill, again = kernels_of(filled)
    assert again == stored and (fill.count, fill.read, fill.written) == (1, 0, 4 * 5 * 16)


def test_operands_end_at_their_parenthesis():
    assert hlo.operands("%a, f32[2]{0} %b.1), calls=%c") == ["a", "b.1"]
    assert hlo.arrays("(bf16[2,3]{1,0}, pred[], u8[0]{0})") == [12, 1, 0]


@pytest.mark.parametrize(
    "origin, phase",
    [
        ("jit(train_step)/jvp()/while/body/closed_call/layer/dot_general", "forward"),
        ("jit(train_step)/transpose(jvp())/while/body/layer/dot_general", "backward"),
        ("jit(train_step)/transpose(jvp())/checkpoint/rematted_computation/layer/tanh", "recomputed"),
        ("jit(train_step)/update/sub", "update"),
    ],
)
def test_phases_by_origin(origin, phase):
    assert phase_of(origin) == phase


def test_least_time_is_the_larger_of_products_and_bytes():
    roof = Roof.of(find_hardware("h100"), "bfloat16", matmul=0.5, hbm=0.5)
    sliced, *_ = kernels_of(STACKS)
    assert roof.seconds(sliced) == pytest.approx(sliced.moved / (0.5 * 3.35e12))
    heavy = dataclasses.replace(sliced, flops=1e12)
    assert roof.seconds(heavy) == pytest.approx(1e12 / (0.5 * find_hardware("h100").peak("bfloat16")))
    wide = dataclasses.replace(heavy, wide=True)
    assert roof.seconds(wide) == roof.products(wide) == pytest.approx(1e12 / (0.5 * 494e12))
    assert ON_H100.seconds(wide, find_hardware("h100"), "bfloat16") == pytest.approx(1e12 / (0.76 * 494e12))
    exact = Roof.of(find_hardware("h100"), "float32", matmul=0.5, hbm=0.5)
    assert exact.seconds(wide) == exact.seconds(heavy) == pytest.approx(1e12 / (0.5 * 67e12))
    total = Total.of([dataclasses.replace(heavy, count=3), sliced], roof)
    assert (total.kernels, total.flops, total.moved) == (4, 3e12, 4 * sliced.moved)
    assert total.seconds == pytest.approx(3 * roof.seconds(heavy) + roof.seconds(sliced))


def test_kernels_of_a_kind_take_what_they_were_measured_to_reach():
    sliced, _, attention, _ = kernels_of(STACKS)
    h100, reached = find_hardware("h100"), Reached(products=0.5, bandwidth=0.25, attention=0.4, half_positions=48)
    assert (sliced.kind, attention.kind, attention.positions) == ("elementwise", "attention", 16)
    assert reached.seconds(sliced, h100, "bfloat16") == sliced.moved / (0.25 * h100.memory_bytes_per_s)
    of_peak = 0.4 * 16 / (16 + 48)
    large = dataclasses.replace(attention, flops=1e15)
    assert reached.seconds(large, h100, "bfloat16") == pytest.approx(1e15 / (of_peak * h100.peak("bfloat16")))
    product = dataclasses.replace(large, positions=0)
    assert (product.kind, product.positions) == ("products", 0)
    assert reached.seconds(product, h100, "bfloat16") == pytest.approx(1e15 / (0.5 * h100.peak("bfloat16")))
