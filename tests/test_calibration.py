"""The time and memory models beside published runs, and laws that a step's predicted time must follow."""

from dataclasses import replace

import pytest

from experiments.calibration import mixtures, peaks, runs, sources
from experiments.calibration.memory import NANOTRON, TORCHTITAN, device_bytes
from experiments.calibration.runs import mean_and_max
from experiments.calibration.work import PaperWork
from jaxdist.models.decoder import Decoder
<<<<<<< HEAD
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.papers import calibration, sources
from jaxdist.plan.papers.calibration import FITTED, all_rows, fit, mean_and_max
from jaxdist.plan.papers.formulas import ModelShape
from jaxdist.plan.papers.work import PaperWork
=======
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.plan import formulas
from jaxdist.plan.explain import CLOSE, CLOSE_IN_ORDER, FAR, FAR_IN_ORDER
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import Cluster, find_hardware
>>>>>>> 9ead5f2 (Move the evidence of calibration out of the wheel; fit one set of constants a card)
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


<<<<<<< HEAD
@pytest.fixture(scope="module")
def rows():
    return all_rows()


def errors(rows, **wanted):
    found = [row for row in rows if all(getattr(row, key) == value for key, value in wanted.items())]
    assert found
    return found


@pytest.mark.exhaustive
def test_every_published_case_is_there(rows):
    assert len(errors(rows, group="recompute", quantity="step time")) == 8
    assert len(errors(rows, group="weak_scaling")) == 9
    assert len(errors(rows, group="nanotron")) == 6
    assert len(errors(rows, unit="GiB")) == 12
    assert len(errors(rows, group="tp_scaling")) == 5
    assert len(errors(rows, group="mpt")) == 8
    assert len(errors(rows, group="torchtitan")) == 6
    assert len(errors(rows, group="torchtitan_405b")) == 4


@pytest.mark.exhaustive
def test_megatrons_memory_is_its_own_formula_to_the_printed_digit(rows):
    for row in errors(rows, group="recompute", unit="GiB"):
        assert row.predicted == pytest.approx(row.published, abs=0.0051), row


@pytest.mark.exhaustive
def test_step_time_targets(rows):
    """5 % in the mean, 10 % at most, on each stack by itself."""
    for group in ("recompute", "weak_scaling", "nanotron"):
        mean, worst = mean_and_max([row.error for row in errors(rows, group=group, quantity="step time")])
        assert mean <= 0.05 and worst <= 0.10, group


@pytest.mark.exhaustive
@pytest.mark.parametrize("stack", FITTED)
def test_constants_are_what_the_fit_gives(stack):
    fitted = fit(stack)
    for name in FITTED[stack]:
        assert getattr(EFFICIENCIES[stack], name) == pytest.approx(getattr(fitted, name), rel=0.01), name


def test_error_bars_hold_the_published_times():
    for stack in FITTED:
        for case in calibration.time_cases(stack):
            found = step_time(PaperWork(case.shape), case.layout, case.cluster, EFFICIENCIES[stack], case.dtype)
            best = int(found.total.argmin())
            assert abs(found.total[best] - case.seconds) <= found.error[best] * found.total[best], case.name
=======
def test_megatrons_memory_is_its_own_formula_to_the_printed_digit():
    """The printed state is 18 bytes for each of 12Lh², spread evenly: no embedding, biases or norms."""
    for run in runs.published()["recompute"]:
        shape, tp, pp, chunks = runs.shape_of_run("recompute", run), run["tp"], run["pp"], run["chunks"]
        matrices = shape.num_layers * shape.layer_matrices
        state = formulas.state_bytes(matrices, "mixed-adam-fp32-gradients", tp=tp, pp=pp).total
        found = {"state_gib": state}
        for kind, sp, remat in (("none", False, "none"), ("selective", True, "selective")):
            layer = formulas.layer_activation_bytes(shape, run["rows"], tp, sp, remat=remat)
            kept = formulas.stage_activation_bytes(layer, shape.num_layers, pp, run["batch"] // run["rows"], chunks)
            found[f"activations_{kind}_gib"] = float(kept)
        for name, size in found.items():
            assert size / 2**30 == pytest.approx(run[name], abs=0.006), (run["name"], name)


def test_conventions_of_memory_hold_for_the_published_peaks():
    """8 % in the mean of what was left out: met. Other choices fit torchtitan's few peaks as well as the stated one."""
    for program, convention in peaks.CONVENTIONS.items():
        errors = [abs(peak.error(convention)) for peak in peaks.of_program(program)]
        best = [abs(peak.error(peaks.best_convention(program))) for peak in peaks.of_program(program)]
        assert np.mean(errors) <= np.mean(best) + 0.015, program
    assert peaks.best_convention("nanotron") == NANOTRON
    left_out = np.abs(np.concatenate([peaks.left_out(program) for program in peaks.CONVENTIONS]))
    assert len(left_out) == 38 and left_out.mean() < 0.065 and np.quantile(left_out, 0.9) < 0.14
    assert np.mean(np.abs(peaks.left_out("nanotron"))) < 0.08


def test_what_fsdp_holds_by_hand():
    """torchtitan's 8B on 8 GPUs: 4+4+8 bytes a parameter over 8, two layers and the tables gathered, every other
    product, four arrays of logits."""
    (case,) = {each.case for each in peaks.of_program("torchtitan") if each.gib == 77.0}
    h, kv, f, vocab, positions = 4096, 1024, 14336, 128256, 2 * 8192
    layer = 2 * h * h + 2 * h * kv + 3 * h * f + 2 * h
    state = 16 / 8 * (32 * layer + 2 * vocab * h)
    gathered = 2 * (2 * layer + 2 * vocab * h)
    kept = 32 * 2 * positions * (4 * h + kv + f)
    head = positions * (4 * h + 14 * vocab)
    found = device_bytes(case.shape, case.layout, convention=TORCHTITAN)
    assert found.total[0] == pytest.approx(state + gathered + kept + head, rel=1e-3)


def test_the_fullest_stage_can_be_any():
    """Not always the first: a large vocabulary fills the last one, and the second may have more layers."""
    shape = ModelShape.gpt(16, 2048, 16, vocab_size=131072)
    assert device_bytes(shape, Layout(pp=2, microbatches=16)).stage == "first"
    assert device_bytes(shape, Layout(pp=2, rows=8)).stage == "last"
    assert (
        device_bytes(shape, Layout(pp=4, microbatches=8, first_layers=1, last_layers=1, most_layers=7)).stage
        == "second"
    )


def test_memory_in_columns_is_the_closed_forms():
    pp, tp, zero = np.array([1, 2, 4, 1]), np.array([8, 4, 2, 1]), np.array([0, 1, 2, 3])
    remat = np.array(["block", "selective", "none", "every-4"])
    layout = Layout(pp=pp, tp=tp, dp=4, zero=zero, remat=remat, sp=True, microbatches=8, rows=2, dropout=True)
    found = device_bytes(SHAPE, layout, "mixed-adam")
    layer = formulas.layer_activation_bytes(SHAPE, 2, tp, True, remat=remat, dropout=True)
    assert found.activations.tolist() == (layer * 32 / pp * np.minimum(8, pp)).tolist()
    assert found.stage.tolist() == ["first"] * 4
    parameters = 32 / pp * SHAPE.layer_parameters + (51200 + 2048) * 4096
    state = formulas.state_bytes(parameters, "mixed-adam", zero, 4, tp)
    assert (found.parameters + found.gradients + found.optimizer).tolist() == pytest.approx(state.total.tolist())
    assert found.recompute.tolist() == formulas.recompute_bytes(SHAPE, 2, remat, tp=tp, sp=True).tolist()
    assert found.logits.tolist() == (formulas.head_activation_bytes(SHAPE, 2, tp, True) * (pp == 1)).tolist()
    parts = ("parameters", "gradients", "optimizer", "activations", "recompute", "logits")
    assert found.total == pytest.approx(sum(getattr(found, part) for part in parts))
    held = max(in_flight(make_schedule("v-half", 4, 8))) / 2
    half = device_bytes(SHAPE, Layout(pp=4, microbatches=8), held=held)
    assert half.activations == pytest.approx(device_bytes(SHAPE, Layout(pp=4, microbatches=8)).activations * held / 4)
>>>>>>> 9ead5f2 (Move the evidence of calibration out of the wheel; fit one set of constants a card)


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


<<<<<<< HEAD
=======
@pytest.mark.parametrize(("accelerator", "number"), [("h100", 193), ("a100", 33)])
def test_constants_of_all_programs_together(accelerator, number):
    """Those that a plan uses: how far off every published row is, and the bar that nine tenths of them are within."""
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


def test_chunks_that_are_not_printed_divide_the_layers_of_a_stage():
    """Interleaving needs micro-batches in groups of pp; one stage has none."""
    shape = ModelShape.gpt(96, 12288, 96)
    found = runs.not_printed(shape, 6, 48, 1152)
    assert sorted(set(found["chunks"].tolist())) == [1, 2, 4, 8, 16]
    rows_of_more = found["rows"][found["chunks"] > 1]
    assert set((1152 // 48 // rows_of_more % 6).tolist()) == {0} and set(rows_of_more.tolist()) == {1, 2, 4}
    assert set(runs.not_printed(shape, 1, 48, 1152)["chunks"].tolist()) == {1}
    published = {row.source: row.case.layout.chunks for row in sources.sourced("a100")}
    assert published["MT-NLG"] == 1 and max(np.max(row.case.layout.chunks) for row in sources.sourced("a100")) > 1


def test_what_is_slow_about_one_source_bends_the_constants_less():
    """All its runs took a tenth longer: its own factor takes half of that; without, others' change by 5 %."""
    rows = sources.sourced("a100")
    slow = [
        replace(row, case=replace(row.case, seconds=row.case.seconds * (1.1 if "2021" in row.source else 1)))
        for row in rows
    ]
    usual, found = (sources.fit_pooled(each) for each in (rows, slow))
    others = [row for row in rows if "2021" not in row.source]
    changes = [row.case.predict(found) / row.case.predict(usual) - 1 for row in others]
    assert np.abs(changes).max() < 0.04


def test_rows_count_once_and_turn_into_seconds():
    rows = sources.sourced("h100")
    assert len({(row.source, row.case.name, row.case.dtype, row.case.seconds) for row in rows}) == len(rows)
    # llm-foundry prints both: 46.44 % and 10,643 tokens a second and GPU of 6.7B on 8 H100
    (seven,) = [row.case for row in rows if row.case.name.startswith("mpt-7b, dp 128")]
    tokens = 128 * 6 * 2048
    assert tokens / seven.seconds / 128 == pytest.approx(10_643 * 45.71 / 46.44, rel=0.005)


def test_rows_aside_are_on_the_page_and_in_no_fit():
    """DeepSpeed's of early 2021, which gathered a parameter at a time: six, far too fast, the more the more GPUs."""
    rows = sources.aside()
    assert not {row.source for row in rows} & {row.source for row in sources.sourced("a100")}
    errors = [-100 * row.error for row in rows]
    assert errors == [*sorted(errors[:3]), *sorted(errors[3:])] and len(errors) == 6
    page = (Path(__file__).parents[1] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    for (one, two, three), others in ((errors[:3], " too fast on 384"), (errors[3:], " on 640")):
        assert f"{one:.0f}, {two:.0f} and {three:.0f} %{others}" in page


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


>>>>>>> 9ead5f2 (Move the evidence of calibration out of the wheel; fit one set of constants a card)
@pytest.mark.exhaustive
@pytest.mark.parametrize("accelerator", sources.ACCELERATORS)
def test_constants_and_bar_are_what_the_fit_gives(accelerator):
    fitted, shipped = sources.calibrated(accelerator), EFFICIENCIES[f"{accelerator}-published"]
    for name in (*sources.GUESSES, "relative_error"):
        assert getattr(shipped, name) == pytest.approx(getattr(fitted, name), rel=0.02), name
<<<<<<< HEAD
=======


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
    page = (Path(__file__).parents[1] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    order, regret = sources.order_table(h100).split("\n\n")
    assert np.mean(sources.regrets(h100)) < 0.051 and f"{np.mean(sources.regrets(h100)):.1%} more" in regret
    tables = sources.summary("h100", h100), sources.summary("a100", a100), order, sources.predictors_table(a100)
    for line in itertools.chain(*(table.splitlines() for table in tables)):
        assert line in page, line
    for accelerator, rows in (("H100", h100), ("A100", a100)):
        assert f"±{sources.bar(rows):.0%} for {accelerator}".replace("%", " %") in page
    assert f"Of {len(sources.pairs(h100))} pairs" in page and f"tau is {sources.kendall_tau(h100):.2f}" in page


def test_what_the_programs_of_rows_repeat_and_cast():
    """By hand: MaxText's and Pax's policies, and the casts of Transformer Engine."""
    shape = runs.shape_of({"layers": 2, "width": 8, "heads": 2, "ffn_width": 24, "seq_len": 4, "vocab_size": 9})
    core = 4 * 2 * 4 * 2.5
    for word, products in (("save_dot_only", 0), ("save_qkv_out_proj", 8 * 24), ("save_qkv_proj", 8 * (8 + 48))):
        found = sources._remat(shape, word, casts=7.0)["repeated"]
        whole, split, _ = PaperWork(shape).elementwise_bytes(False, True, 2)
        assert (found.flops, found.attention, found.num_bytes) == (2 * products, core, whole + split + 7)
    assert sources._remat(shape, "block", casts=0.0)["remat"] == "block"
    # Read in 16 bits and written twice in 8: inputs of four products, and gradients of their results.
    assert sources._casts(shape, 2) == 4 * ((8 + 4 + 8 + 12) + (12 + 8 + 24 + 8))
    casts = {row.source: set() for row in sources.sourced("h100")}
    for row in sources.sourced("h100"):
        if row.case.dtype == "float8":
            own = sources._remat(row.case.shape, "save_qkv_proj", casts=0.0)["repeated"].num_bytes
            casts[row.source].add(row.case.layout.repeated.num_bytes > own * (row.source != "Megatron Core"))
    assert casts["Megatron Core"] == casts["Pax"] == {True} and casts["MaxText"] == casts["torchtitan"] == {False}


@pytest.mark.exhaustive
def test_what_the_fit_of_dense_models_says_of_mixtures():
    """Their bar holds nine tenths of them; the page has the table. Eight models are traced."""
    rows = mixtures.predicted()
    assert pytest.approx(sources.bar(rows), abs=0.005) == MIXTURE_ERROR
    grok = [row.error for row in rows if row.source == "grok" and row.model[2] == "bfloat16"]
    assert len(rows) == 46 and mean_and_max(grok) < (0.07, 0.1)
    page = (Path(__file__).parents[1] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    for line in mixtures.summary(rows).splitlines():
        assert line in page, line


def test_what_torchtitan_repeats():
    """By hand: keys, the output's and the gate's second product in bf16; all but the last in float8."""
    shape = runs.shape_of(
        {"layers": 2, "width": 8, "heads": 2, "kv_heads": 1, "ffn_width": 24, "seq_len": 4, "vocab_size": 9}
    )
    whole, split, _ = PaperWork(shape).elementwise_bytes(False, True, 2)
    for dtype, products in (("bfloat16", 8 * (4 + 8 + 24)), ("float8", 8 * (8 + 4 + 4 + 8 + 24 + 24))):
        for tp in (1, 4):
            found = runs.torchtitan_remat(shape, "selective", dtype, tp)["repeated"]
            gathers = 0 if tp == 1 else 8 * 2  # two, of 16 bits, each half of a sum
            assert found == (2 * products / tp, 0, (whole + split) / tp, gathers, 1)
    assert runs.torchtitan_remat(shape, "block", "float8") == {"remat": "block"}
    rows = [row.case for row in sources.sourced("h100") if row.source == "torchtitan"]
    assert sum(case.layout.repeated.flops > 0 for case in rows) == 10
    assert all((case.layout.repeated.flops > 0) == (case.layout.remat == "selective") for case in rows)


def test_mixtures_by_constants_that_are_fitted_to_none():
    """Their bar is wider."""
    page = (Path(__file__).parents[1] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    assert f"±{MIXTURE_ERROR:.0%} for a mixture".replace("%", " %") in page
    assert len(mixtures.runs()) == 46
    _, model, facts = mixtures.runs()[0]
    constants = EFFICIENCIES["h100-published"]
    assert bar_of(work_of(model), constants) == MIXTURE_ERROR > bar_of(PaperWork(SHAPE), constants)
    # By hand: 8 GPUs of tp=4 have dp=2, which ep takes whole; every position goes out and back twice, a quarter a rank.
    layout = mixtures.layout_of(model, facts)
    assert (layout.dp, layout.ep, layout.exchanged, layout.microbatches) == (2, 2, 2 * 2 * 6144 / 4, 512)
    etp1 = next(facts for name, _, facts in mixtures.runs() if name == "grok_etp1")
    assert (lambda found: found.ep * found.tp * found.experts_over_tp)(mixtures.layout_of(model, etp1)) == etp1["ep"]


def test_rings_gain_about_what_published_ones_did():
    """Five pairs of runs with and without; the page has both."""
    runs = [row.case for row, _ in sources.second_set() if row.source == "torchtitan" and row.case.layout.tp == 8]
    pairs = list(zip(runs[::2], runs[1::2], strict=True))
    assert len(pairs) == 5 and all(on.layout.tp_ring > off.layout.tp_ring for off, on in pairs)
    published = [off.seconds / on.seconds - 1 for off, on in pairs]
    constants = EFFICIENCIES["h100-published"]
    predicted = [off.predict(constants) / on.predict(constants) - 1 for off, on in pairs]
    assert np.mean(published) == pytest.approx(np.mean(predicted), abs=0.025)
    apart = [abs(a - b) for a, b in zip(published, predicted, strict=True)]
    # Of the layout of 70B that gained 5.7 % in 2024, 16.4 % were published in 2025; 8B in float8 was added with it.
    assert max(apart[0], *apart[2:4]) < 0.05 and max(apart) < 0.07
    page = (Path(__file__).parents[1] / "docs/plan-evidence.md").read_text(encoding="utf-8")
    for gains in (published, predicted):
        *most, last = (f"{100 * gain:.1f}" for gain in gains)
        assert f"{', '.join(most)} and {last} %" in page
>>>>>>> 9ead5f2 (Move the evidence of calibration out of the wheel; fit one set of constants a card)
