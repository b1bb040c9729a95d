"""The time and memory models beside published runs, and laws that a step's predicted time must follow."""

from dataclasses import replace

import pytest

from experiments.calibration import runs, sources
from experiments.calibration.work import PaperWork
from jaxdist.models.decoder import Decoder
from jaxdist.plan import formulas
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.time_model import (
    EFFICIENCIES,
    OPTIMIZER_TRAFFIC,
    PARTS,
    RING_COPIES,
    RING_HIDE,
    Efficiency,
    Layout,
    bar_of,
    step_time,
)


def test_megatrons_memory_is_its_own_formula_to_the_printed_digit():
    """The printed state is 18 bytes for each of 12Lh², spread evenly: no embedding, biases or norms."""
    for run in runs.published()["recompute"]:
        shape, tp, pp, chunks = runs.shape_of_run("recompute", run), run["tp"], run["pp"], run["chunks"]
        matrices = shape.num_layers * shape.layer_matrices
        found = {"state_gib": formulas.state_bytes(matrices, "mixed-adam-fp32-gradients", tp=tp, pp=pp).total}
        for kind, sp, remat in (("none", False, "none"), ("selective", True, "selective")):
            layer = formulas.layer_activation_bytes(shape, run["rows"], tp, sp, remat=remat)
            kept = formulas.stage_activation_bytes(layer, shape.num_layers, pp, run["batch"] // run["rows"], chunks)
            found[f"activations_{kind}_gib"] = float(kept)
        for name, size in found.items():
            assert size / 2**30 == pytest.approx(run[name], abs=0.006), (run["name"], name)


# ---------------------------------------------------------------------------------------------------- laws of the model

SHAPE = ModelShape.gpt(32, 4096, 32)
H100 = Cluster(find_hardware("h100"), num_nodes=8)


def one(**layout):
    return step_time(PaperWork(SHAPE), Layout(**layout), H100)


def test_parts_add_up():
    found = one(pp=2, dp=4, tp=8, microbatches=8, zero=1, remat="block")
    assert found.total == pytest.approx(sum(getattr(found, name) for name in PARTS))


def test_a_bar_is_wider_by_the_part_of_the_step_that_shows_of_communication():
    for layout in ({}, {"tp": 8}, {"pp": 4, "dp": 8, "microbatches": 8}):
        found = one(**layout)
        alone = bar_of(PaperWork(SHAPE), Efficiency())
        assert found.error[0] == pytest.approx(alone * (1 + found.communication[0] / found.total[0]))
        assert (found.error[0] > 1.01 * alone) == bool(layout)


@pytest.fixture(scope="module")
def work():
    """Products of a model with windows and experts, as its layers are traced."""
    sizes = {"num_kv_heads": 4, "head_dim": 32, "ffn_width": 512, "seq_len": 1024, "vocab_size": 512, "num_experts": 8}
    return work_of(Decoder(4, 256, 8, **sizes, kinds=("sliding", "full"), window=128))


def test_an_expert_s_state_is_sharded_over_the_ranks_that_hold_the_same(work):
    """With 8 data ranks and ep=4, two ranks hold an expert: its optimiser is split over these, all else over 8."""
    layout, cluster = {"dp": 8, "ep": 4}, Cluster(find_hardware("h100"), 1)
    experts = work.num_layers * work.expert_parameters / 4
    rest = work.num_layers * (work.layer_parameters - work.expert_parameters) + work.table_parameters
    whole, sharded = (step_time(work, Layout(**layout, zero=zero), cluster).memory[0] for zero in (0, 1))
    spared = experts * (1 - 1 / 2) + rest * (1 - 1 / 8)
    hbm = cluster.hardware.memory_bytes_per_s * Efficiency().hbm
    assert whole - sharded == pytest.approx(spared * OPTIMIZER_TRAFFIC / hbm)


@pytest.mark.parametrize(("remat", "times"), [("none", 2), ("every-2", 3)])
@pytest.mark.parametrize("tp", [1, 2])
def test_experts_exchange_what_is_chosen_forward_backward_and_again(work, remat, times, tp):
    """In 16 bits, over neighbours among the data ranks; over those of tp as well where tp splits experts."""
    cluster, e = Cluster(find_hardware("h100"), 2), Efficiency()
    layout = Layout(dp=16 // tp, ep=4, tp=tp, sp=tp > 1, experts_over_tp=tp > 1, rows=3, microbatches=5, exchanged=70.0)
    found = step_time(work, replace(layout, remat=remat), cluster).ep[0]
    once = cluster.collective_seconds("all_to_all", 4 * tp, 1, 3 * work.seq_len * 70 * 2, e.inside, e.between)
    assert found == pytest.approx(5 * work.num_layers * times * once)


def test_axes_of_size_one_send_nothing():
    found = one(microbatches=4)
    assert found.communication == found.bubble == found.dp_hidden == 0


def test_recomputation_costs_a_forward():
    none, selective, block = (one(remat=kind, microbatches=4).compute for kind in ("none", "selective", "block"))
    assert none < selective < block < none * 4 / 3
    assert one(remat="every-4", microbatches=4).compute == block


def test_tensor_parallelism_is_cheaper_inside_a_node():
    inside, outside = one(tp=8, dp=8).tp, one(tp=16, dp=4).tp
    # 8 inside and 2 across: half of S/8 more, twice, over a link of a ninth of the bandwidth.
    assert outside > 1.4 * inside
    assert one(tp=8, dp=8, pp=1).tp < one(tp=64).tp
    assert one(tp=8, dp=8, overlap_tp=0.5).tp < inside


def test_sequence_parallelism_saves_memory_traffic_and_sends_the_same():
    plain, sequence = one(tp=8), one(tp=8, sp=True)
    assert sequence.memory < plain.memory and sequence.tp == plain.tp


def test_data_parallel_communication_hides_behind_enough_tokens():
    few, many = one(dp=64, rows=1), one(dp=64, rows=1, microbatches=16)
    assert few.dp + few.dp_hidden == pytest.approx(many.dp + many.dp_hidden)
    assert one(dp=64, overlap_dp=False).dp == pytest.approx(few.dp + few.dp_hidden)
    assert few.dp / few.total > many.dp / many.total
    assert one(dp=64, gradient_bytes=2).dp < few.dp


def test_rings_of_tp_hide_behind_matmuls():
    """All but one of tp chunks; as far as the matmuls take, and as much of it as what may overlap does."""
    plain, rings = one(tp=2, sp=True), one(tp=2, sp=True, tp_ring=True)
    head = 2 * H100.collective_seconds("all_reduce", 2, 1, 2048 * 4096 * 2, 0.75, 0.7)
    layers = plain.tp - head
    assert plain.tp - rings.tp == pytest.approx(RING_HIDE * 0.7 * layers)
    slow = Efficiency(inside=0.01)
    plain, rings = (step_time(PaperWork(SHAPE), Layout(tp=8, sp=True, tp_ring=on), H100, slow) for on in (False, True))

    def seconds(rows, n, k):
        smallest = min(rows, n, k)
        by_flops = 2 * rows * n * k / (0.7 * 989e12 * smallest / (smallest + 60))
        return max(by_flops, 2 * (rows * n + rows * k + n * k) / 3.35e12)

    # Forward, and backward with weights, of 2048 / 8 positions at a time.
    products = ((1536, 4096), (4096, 512), (2048, 4096), (4096, 2048))
    by_chunk, whole = (2 * 32 * 2048 / rows * sum(seconds(rows, *each) for each in products) for rows in (256, 2048))
    assert plain.tp - rings.tp == pytest.approx(RING_HIDE * 0.7 * 7 / 8 * by_chunk)
    assert rings.compute - plain.compute == pytest.approx(by_chunk - whole)
    copied = 2 * 2 * 32 * RING_COPIES * 2048 * 4096 * 2 / (0.7 * 3.35e12)
    assert rings.memory - plain.memory == pytest.approx(copied)


def test_chunks_of_the_loss_add_to_a_gradient_in_32_bits():
    whole, chunks = one(tp=8, microbatches=4), one(tp=8, microbatches=4, loss_chunks=16)
    added = 4 * 16 * 8 * 51200 * 4096 / 8 / (0.7 * 3.35e12)
    assert chunks.memory - whole.memory == pytest.approx(added)
    steps = 4 * 15 * 2 * 14 * H100.inside.latency_s
    assert chunks.tp - whole.tp == pytest.approx(steps) and chunks.compute == whole.compute


@pytest.mark.parametrize(("dtype", "itemsize"), [("bfloat16", 2), ("float8", 1), ("float32", 4)])
def test_no_product_is_faster_than_its_bytes(dtype, itemsize):
    """Eight positions through wide matrices: these are read, three times a step."""
    shape = ModelShape.gpt(2, 16384, 64, seq_len=8, vocab_size=64)
    found = step_time(PaperWork(shape), Layout(flash=True), H100, Efficiency(half_size=0.0), dtype)
    assert found.compute == pytest.approx(3 * 2 * shape.layer_matrices * itemsize / 3.35e12, rel=0.002)


def test_products_of_activations_write_or_read_every_score():
    """Heads of four: 256 x 2,048 scores a position, twice forward and four times backward, in 16 bits."""
    shape = ModelShape.gpt(1, 1024, 256, seq_len=2048, vocab_size=64)
    constants = Efficiency(half_size=0.0)
    written, fused = (step_time(PaperWork(shape), Layout(flash=on), H100, constants).compute for on in (False, True))
    core = written - fused + 2048 * 4 * 1024 * 2049 / 2 * (1 + 2.5) / (constants.attention * 989e12)
    assert core == pytest.approx(6 * 2048 * 256 * 2048 * 2 / 3.35e12)


def test_gradients_of_a_chunk_hide_behind_the_last_micro_batches_of_the_others():
    """Of an interleaved pipeline of 4 stages: all but one of 8 chunks, in as many micro-batches as stages."""
    slow = dict(pp=4, dp=64, microbatches=16, rows=1, gradient_bytes=64)  # so much that not all of it hides
    plain, chunks = one(**slow), one(**slow, chunks=8)
    assert chunks.dp_hidden / plain.dp_hidden == pytest.approx(4 * 7 / 8)
    few = one(**slow | {"microbatches": 2}, chunks=8).dp_hidden
    assert few / plain.dp_hidden == pytest.approx(2 * 7 / 8)


def test_no_more_hides_than_backward_takes():
    few = one(dp=64, rows=1)
    assert few.dp_hidden <= 0.7 * 2 / 3 * (few.compute + few.memory)


def test_sums_over_replicas_and_stages_are_of_what_their_ranks_hold():
    def ring(axis_size, apart, num_bytes):
        e = Efficiency()
        return H100.collective_seconds("ring_all_reduce", axis_size, apart, num_bytes, e.inside, e.between)

    own = {"dp": 8, "zero": 1, "overlap_dp": False}
    parameters = 32 * SHAPE.layer_parameters + SHAPE.vocab_size * SHAPE.width
    assert one(replica=8, **own).dp - one(**own).dp == pytest.approx(ring(8, 8, parameters * 4 / 8))
    staged = {"pp": 8, "overlap_dp": False}
    table = SHAPE.vocab_size * SHAPE.width
    apart = one(spread_table=True, **staged), one(**staged)
    # Half of a ring's all-reduce for the gradient in fp32, half for the weights in bf16.
    assert apart[0].dp - apart[1].dp == pytest.approx(ring(8, 1, table * 4) / 2 + ring(8, 1, table * 2) / 2)
    assert apart[0].memory < apart[1].memory  # an eighth of the table's update


def test_the_head_is_one_more_matmul_each_way():
    twice = step_time(PaperWork(replace(SHAPE, vocab_size=2 * SHAPE.vocab_size)), Layout(), H100)
    flops = 3 * 2 * SHAPE.seq_len * SHAPE.vocab_size * SHAPE.width
    peak = H100.hardware.peak("bfloat16") * 0.7 * SHAPE.seq_len / (SHAPE.seq_len + 60)
    assert twice.compute - one().compute == pytest.approx(flops / peak)


def test_with_sp_stages_send_a_part_of_a_message():
    plain, part = one(pp=2, tp=8, microbatches=8).pp, one(pp=2, tp=8, microbatches=8, sp=True).pp
    assert plain / 8 < part < plain / 6  # latencies are not divided


def test_zero_stages_in_communication_and_update():
    zero = [one(dp=8, zero=stage, overlap_dp=False, microbatches=4) for stage in range(4)]
    assert zero[1].dp < zero[2].dp < zero[3].dp  # scattered, and gathered, once a micro-batch
    assert zero[1].dp < zero[0].dp, "weights are gathered in 16 bit, gradients all-reduced in 32"
    assert zero[1].memory < zero[0].memory, "each rank updates its part alone"
    kept = one(dp=8, zero=3, keep_after_forward=True, overlap_dp=False, microbatches=4)
    assert kept.dp < zero[3].dp


def test_a_stage_with_more_layers_sets_the_pace():
    even = one(pp=4, microbatches=16)
    uneven = one(pp=4, microbatches=16, most_layers=12, last_layers=6)
    assert uneven.compute > even.compute
    head_heavy = one(pp=4, microbatches=16, most_layers=9, last_layers=5)
    assert head_heavy.compute < uneven.compute


# ------------------------------------------------------------------------------------ every source, and one left out


@pytest.mark.exhaustive
@pytest.mark.parametrize("accelerator", sources.ACCELERATORS)
def test_constants_and_bar_are_what_the_fit_gives(accelerator):
    fitted, shipped = sources.calibrated(accelerator), EFFICIENCIES[f"{accelerator}-published"]
    for name in (*sources.GUESSES, "relative_error"):
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=0.02), name
