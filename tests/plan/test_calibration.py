"""The time and memory models beside published runs, and laws that a step's predicted time must follow."""

import itertools
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from experiments.calibration import runs, sources, traced
from experiments.calibration.runs import mean_and_max
from experiments.calibration.work import PaperWork
from jaxdist.models.decoder import DecoderConfig
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.simulate import simulate
from jaxdist.plan import formulas
from jaxdist.plan.explain import CLOSE, CLOSE_IN_ORDER, FAR, FAR_IN_ORDER
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.time_model import (
    BARS,
    EFFICIENCIES,
    FUSED_BACKWARD,
    OPTIMIZER_TRAFFIC,
    PARTS,
    RING_COPIES,
    RING_HIDE,
    UNCALIBRATED,
    AttentionShape,
    Efficiency,
    Layout,
    bar_of,
    efficiency_of,
    kind_of,
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
    return work_of(DecoderConfig(4, 256, 8, **sizes, kinds=("sliding", "full"), window=128))


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
    """In an interleaved pipeline of 4 stages: all but one of 8 chunks, in as many micro-batches as stages."""
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


@pytest.mark.parametrize("window", [None, 1, 2, 7, 16, 20])
def test_a_query_sees_the_keys_of_its_window(window):
    """Counted one by one: how many, in the mean; and how many chunks before a query's own hold some of them."""
    shape, length, chunk = AttentionShape(6, 2, 4, window), 16, 4
    seen = [[s for s in range(t + 1) if window is None or t - s < window] for t in range(length)]
    assert shape.seen(length) == pytest.approx(np.mean([len(keys) for keys in seen]))
    if window is not None:
        long = range(100 * chunk, 101 * chunk)  # far from the beginning
        assert shape.reached(chunk) == max(100 - (t - window + 1) // chunk for t in long)


def test_attention_in_windows_computes_the_scores_that_it_sees(work):
    windows, whole = (AttentionShape(8, 4, 32, window) for window in (128, None))
    assert tuple(work.attention) == (windows, whole)
    layout, cluster = Layout(flash=True), Cluster(find_hardware("h100"), 1)
    with_windows = step_time(work, layout, cluster).compute[0]
    without = step_time(replace(work, attention=(whole, whole)), layout, cluster).compute[0]
    # Two products of forward, of 2 FLOPs for each score and element; backward takes FUSED_BACKWARD times as long.
    unseen = whole.seen(1024) - windows.seen(1024)
    flops = 1024 * 4 * 8 * 32 * unseen * (1 + FUSED_BACKWARD) * work.num_layers
    peak = cluster.hardware.peak("bfloat16") * Efficiency().attention
    assert without - with_windows == pytest.approx(flops / peak)


def test_the_bubble_is_the_one_of_the_schedule_that_is_passed():
    given = {"pp": 4, "microbatches": 16}
    default = one(**given)
    work = default.total - default.bubble
    textbook = simulate(make_schedule("1f1b", 4, 16)).idle_over_ideal
    assert one(**given, bubble=textbook).bubble == pytest.approx(default.bubble)
    assert default.bubble == pytest.approx(3 / 16 * work, rel=0.05)  # the optimiser and the host are not in the bubble
    assert one(**given, chunks=2).bubble < default.bubble
    assert one(**given, bubble=0.0).bubble == 0
    assert one(**given, pipeline_microbatches=8).bubble == pytest.approx(2 * default.bubble)


def test_every_message_over_dp_has_its_latency():
    """One for each layer, and one more, with ZeRO-2 and 3; 7 steps in each of two nodes and one between them."""
    hops = 7 * H100.inside.latency_s + H100.between.latency_s
    slow = Efficiency(latency=3.0)

    def latency(**more):
        layout = Layout(dp=16, overlap_dp=False, **more)
        slower, usual = (step_time(PaperWork(SHAPE), layout, H100, each).dp for each in (slow, Efficiency()))
        return (slower - usual).item() / 2

    for zero in (0, 1):  # a scatter and a gather, or both halves of a sum
        assert latency(zero=zero) == pytest.approx(2 * hops)
        assert latency(zero=zero, messages=5) == pytest.approx(5 * 2 * hops)
        assert latency(zero=zero, by_layer=True) == pytest.approx(33 * 2 * hops)
    assert latency(zero=2, microbatches=4) == pytest.approx(33 * (4 + 1) * hops)
    assert latency(zero=3, microbatches=4) == pytest.approx(33 * 4 * 3 * hops)  # with two gathers
    assert latency(zero=3, messages=384) == pytest.approx(384 * 3 * hops)  # a parameter at a time


@pytest.mark.parametrize(
    ("layout", "efficiency", "binds", "advice"),
    [
        ({"rows": 8}, {}, "compute", "Compute binds"),
        ({"rows": 8}, {"hbm": 0.01}, "memory", "Memory bandwidth binds"),
        ({"tp": 64}, {}, "communication", "Tensor-parallel communication binds"),
        ({"dp": 64}, {"between": 0.01}, "communication", "Data-parallel communication binds"),
        ({"pp": 32, "microbatches": 2}, {}, "bubble", "The pipeline's bubble binds"),
        ({}, {"step_seconds": 10.0}, "host", "The host binds"),
    ],
)
def test_what_binds_and_what_would_relieve_it(layout, efficiency, binds, advice):
    found = step_time(PaperWork(SHAPE), Layout(**layout), H100, replace(Efficiency(), **efficiency))
    assert found.binds.tolist() == [binds]
    assert found.relief().startswith(advice) and found.relief().endswith("% of the predicted step.")


@pytest.mark.parametrize(("accelerator", "number"), [("h100", 193), ("a100", 33)])
def test_constants_of_all_programs_together(accelerator, number):
    """Constants that a plan uses: how far off every published row is, and the bar that nine tenths of them are
    within."""
    efficiency = EFFICIENCIES[f"{accelerator}-published"]
    found = sources.predicted(sources.sourced(accelerator), efficiency)
    assert len(found) == number
    mean, _ = mean_and_max([row.error for row in found])
    assert mean < {"h100": 0.08, "a100": 0.07}[accelerator]
    assert abs(np.mean([row.error for row in found])) < 0.03
    guessed = sources.predicted(sources.sourced(accelerator), Efficiency())
    assert sum(row.error < 0 for row in guessed) == {"h100": 172, "a100": 7}[accelerator]
    covered = np.mean([row.needed <= efficiency.relative_error for row in found])
    assert covered >= 0.9


@pytest.mark.parametrize(
    ("kind", "of"),
    [
        ("dense", {}),
        ("adapters", {"trained_layer": 0.01}),
        ("long sequences", {"seq_len": 32_768}),
        ("long sequences", {"seq_len": 32_768, "trained_layer": 0.01}),
        ("tiny", {"width": 512}),
        ("experts", {"expert_parameters": 8, "seq_len": 32_768}),
    ],
)
def test_a_bar_is_by_the_kind_of_run(kind, of):
    work = SimpleNamespace(**{"expert_parameters": 0, "width": 4096, "trained_layer": 1.0, "seq_len": 4096} | of)
    assert kind_of(work) == kind
    assert bar_of(work, Efficiency(relative_error=0.1)) == BARS.get(kind, 0.1)


def test_rows_count_once_and_turn_into_seconds():
    rows = sources.sourced("h100")
    assert len({(row.source, row.case.name, row.case.dtype, row.case.seconds) for row in rows}) == len(rows)
    # llm-foundry prints both: 46.44 % and 10,643 tokens a second and GPU of 6.7B on 8 H100
    (seven,) = [row.case for row in rows if row.case.name.startswith("mpt-7b, dp 128")]
    tokens = 128 * 6 * 2048
    assert tokens / seven.seconds / 128 == pytest.approx(10_643 * 45.71 / 46.44, rel=0.005)


def test_order_of_runs_of_one_model():
    """Pairs are of one source and model, by device-seconds a token; ties of order and regret by hand."""

    def run(source, published, predicted, model=("h100", "7b"), a_token=1.0):
        return sources.LeftOut(source, "", published, predicted, 0.0, model, a_token)

    rows = [
        run("a", 1.0, 1.0),
        run("a", 2.0, 1.04),
        run("a", 4.0, 0.5),
        run("b", 1.0, 9.0),
        run("b", 8.0, 8.0, a_token=0.5),
    ]
    assert [pair.in_order for pair in sources.pairs(rows)] == [True, False, False, False]
    assert sources.kendall_tau(rows) == -0.5
    assert sources.right_within(rows, 0, 0.05) == (1, 1)
    assert sources.right_within(rows, 0.05, np.inf) == (0, 3)
    assert sources.regrets(rows) == pytest.approx([3, 3])


@pytest.mark.exhaustive
def test_errors_of_sources_left_out():
    """The targets were 7 % in the mean and 15 % for nine tenths: missed by little, docs/plan.md says where; signed 3 %,
    Kendall's tau 0.8 and regret 10 %: met on H100."""
    h100, a100 = (sources.leave_one_source_out(name) for name in ("h100", "a100"))
    for rows, mean, signed in ((h100, 0.085, 0.03), (a100, 0.09, 0.04)):
        errors = [row.error for row in rows]
        assert mean_and_max(errors)[0] < mean and abs(np.mean(errors)) < signed
    assert sources.kendall_tau(h100) > 0.8 and sources.kendall_tau(a100) == 1
    for least, most, said in ((0, CLOSE, CLOSE_IN_ORDER), (FAR, np.inf, FAR_IN_ORDER)):
        right, number = sources.right_within(h100, least, most)
        assert right / number == pytest.approx(said, abs=0.005)
    page = (Path(__file__).parents[2] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    order, regret = sources.order_table(h100).split("\n\n")
    assert np.mean(sources.regrets(h100)) < 0.051 and f"{np.mean(sources.regrets(h100)):.1%} more" in regret
    gb200, gb300 = sources.leave_one_source_out("gb200"), sources.predicted(sources.sourced("gb300"), UNCALIBRATED)
    summaries = zip(("h100", "a100", "gb200", "gb300"), (h100, a100, gb200, gb300), strict=True)
    tables = *itertools.starmap(sources.summary, summaries), order, sources.predictors_table(a100)
    for line in itertools.chain(*(table.splitlines() for table in tables)):
        assert line in page, line
    for accelerator in sources.ACCELERATORS:
        bars = BARS | {"dense": EFFICIENCIES[f"{accelerator}-published"].relative_error}
        rows = sources.leave_one_source_out(accelerator, unfitted=True)
        for line in sources.kinds_table(accelerator, rows, bars).splitlines():
            assert line in page, line
    assert f"Of {len(sources.pairs(h100))} pairs" in page and f"tau is {sources.kendall_tau(h100):.2f}" in page


def test_bars_of_blackwell_hold_what_was_published():
    """GB300 keeps the guesses; GB200 is fitted to these rows, of which one by hand from tokens a second."""
    rows = {name: sources.sourced(name) for name in ("gb200", "gb300")}
    assert [len(some) for some in rows.values()] == [54, 22]
    for name, least in (("gb200", 53), ("gb300", 22)):
        bar = efficiency_of(name).relative_error
        found = sources.predicted(rows[name], efficiency_of(name))
        assert sum(row.needed <= bar for row in found) >= least
    first = rows["gb200"][0].case
    assert first.seconds == pytest.approx(1536 * 8192 / (843 * 256), rel=1e-4) and first.layout.num_devices == 256
    assert (first.cluster.num_nodes, first.cluster.devices_per_node) == (4, 64)


def test_what_stages_send_crosses_nodes_where_a_stage_fills_one():
    """The same activations either way; pp is the outermost axis, so two stages of 8 GPUs are on two nodes."""
    sizes = {"pp": 2, "microbatches": 4, "rows": 1, "zero": 1}
    cluster, e = replace(H100, num_nodes=2), UNCALIBRATED
    inside, across = (step_time(PaperWork(SHAPE), Layout(dp=dp, **sizes), cluster, e).pp for dp in (4, 8))
    slower = cluster.inside.bytes_per_s * e.inside / (cluster.between.bytes_per_s * e.between)
    assert across / inside == pytest.approx(slower, rel=0.05)


def test_experts_by_constants_that_are_fitted_to_none():
    """Their bar is wider."""
    page = (Path(__file__).parents[2] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    assert f"±{BARS['experts']:.0%} for a mixture".replace("%", " %") in page
    _, model, facts = traced.runs()[0]
    constants = EFFICIENCIES["h100-published"]
    assert bar_of(work_of(model), constants) == BARS["experts"] > bar_of(PaperWork(SHAPE), constants)
    # By hand: 8 GPUs of tp=4 have dp=2, which ep takes whole; every position goes out and back twice, a quarter a rank.
    layout = traced.layout_of(model, facts)
    assert (layout.dp, layout.ep, layout.exchanged, layout.microbatches) == (2, 2, 2 * 2 * 6144 / 4, 512)
    etp1 = next(facts for name, _, facts in traced.runs() if name == "grok_etp1")
    assert (lambda found: found.ep * found.tp * found.experts_over_tp)(traced.layout_of(model, etp1)) == etp1["ep"]


def test_fine_tuning_by_constants_that_are_fitted_to_none():
    """By hand: 24,824 tokens a second and GPU are 0.66 s; frozen matrices are not multiplied transposed."""
    rows = [(model, facts) for name, model, facts in traced.runs() if name in ("adapters", "fine_tuning")]
    model, facts = next((model, facts) for model, facts in rows if facts["seconds"] == 0.66)
    assert facts["batch"] * model.seq_len / (facts["gpus"] * facts["seconds"]) == pytest.approx(24_824, rel=2e-4)
    layout, whole = traced.layout_of(model, facts), traced.layout_of(model.base, facts)
    assert (layout.dp, layout.ep, layout.microbatches, layout.exchanged) == (8, 1, 4, 0)
    shape = ModelShape(32, 4096, 32, 11008, 4096, 32_000, gated_mlp=True)
    assert layout.repeated.num_bytes * 4 == 3 * whole.repeated.num_bytes == 3 * sources._casts(shape, 1)
    time = step_time(work_of(model), layout, runs.cluster_of("h100", 8), efficiency_of("h100"), "float8")
    assert np.max(time.total) == pytest.approx(0.76, abs=0.005)
    assert np.max(time.error) == pytest.approx(BARS["adapters"], rel=0.01)


@pytest.mark.exhaustive
def test_traced_runs_are_as_the_page_says():
    page = (Path(__file__).parents[2] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    rows = traced.predicted()
    for line in traced.summary(rows).splitlines():
        assert line in page, line
    held = {kind: [] for kind in ("experts", "adapters", "dense")}
    for row in rows:
        kind = kind_of(work_of(row.model[1]))
        held[kind].append(row.needed <= BARS.get(kind, 0.2))
    assert {kind: sum(some) for kind, some in held.items()} == {"experts": 89, "adapters": 20, "dense": 14}
