"""The search: every layout and only legal ones, schedule facts as the tables say, memory as the trace keeps it."""

import dataclasses
import itertools
import math
import random
from types import SimpleNamespace

import numpy as np
import pytest
import tyro
from conftest import in_sample

from experiments.cli import CommonFlags
from jaxdist.compat import scan_counts
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError, divisors
from jaxdist.mesh import AXES, FACTORS, MeshShape, make_abstract_mesh
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.models.traced import head_in_layers
from jaxdist.parallel.pipeline.builders import NAMES, SCHEDULES, make_schedule
from jaxdist.parallel.pipeline.lowering import lower, senders_of
from jaxdist.parallel.pipeline.simulate import Costs, simulate
from jaxdist.plan import kept_arrays, long_blocks
from jaxdist.plan import search as searching
from jaxdist.plan.explain import close_by, layout_flags
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.long_blocks import fullest
from jaxdist.plan.parts import OneRank, at_rows, layer_memory, loss_memory, rows_to_trace, traffic_of, work_of
from jaxdist.plan.program_memory import (
    PHASES,
    device_elements,
    program_bytes,
    rank_memory,
    rank_of,
    ranks_of,
)
from jaxdist.plan.proof.trace import equations, step_collectives
from jaxdist.plan.schedule_facts import ScheduleFacts, facts_of, schedule_facts, table_facts, ticks_of
from jaxdist.plan.search import (
    INTEGERS,
    Candidates,
    Fixed,
    best_of_each_mesh,
    complexity,
    hidden_part,
    layouts_of_mesh,
    legal_meshes,
    memory_time_front,
    pareto,
    pipelines,
    rank,
    score,
    search,
    simplest,
    usable_bytes,
    weight_gathers,
)
from jaxdist.plan.time_model import PARTS, UNCALIBRATED, Layout, efficiency_of, step_time
from jaxdist.specs import local_bytes
from jaxdist.strategy import CP_KINDS, ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

SMALL = GPT2Config(num_layers=4, width=64, num_heads=8, ffn_width=256, seq_len=32, vocab_size=250)
H100 = Cluster(find_hardware("h100"))


def every_layout(model, devices, batch, optimizer="adamw") -> Candidates:
    meshes = legal_meshes(model, devices, batch, optimizer)
    return Candidates.join(block for mesh in meshes for block in layouts_of_mesh(model, mesh, batch, optimizer))


def score_all(config: RunConfig, cluster: Cluster, attention: str = "xla"):
    return score(config, every_layout(config.model, cluster.num_devices, config.batch_size), cluster, attention)


def base(model=SMALL, batch_size=16, **kwargs) -> RunConfig:
    return RunConfig(model, batch_size=batch_size, **kwargs)


# --------------------------------------------------------------------------------------------------------- schedules


def chunks_of(name: str) -> tuple[int, ...]:
    return (2, 3) if name == "interleaved" else (SCHEDULES[name].chunks,)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_schedule_facts_are_those_of_the_table(name, recompute):
    for send_latency, stages, chunks in itertools.product((1, 2), (2, 3, 4, 6), chunks_of(name)):
        if send_latency == 2 and (stages in (2, 6) or chunks == 3):
            continue
        for microbatches in (1, 2, stages, 2 * stages + 1):
            schedule = make_schedule(name, stages, microbatches, chunks, send_latency, recompute)
            facts, lowered = table_facts(schedule), lower(schedule)
            senders = senders_of(lowered.instructions).values()
            assert facts == ScheduleFacts(
                num_ticks=schedule.num_ticks,
                span=simulate(schedule).makespan,
                recompute_span=simulate(schedule, Costs(1, 2, 1)).makespan,
                sends=sum((which > 0).sum() if send_latency == 1 else schedule.num_ticks for _, which in senders),
                num_messages=lowered.num_messages,
                num_inputs=lowered.num_inputs,
                num_b_residuals=lowered.num_b_residuals,
                num_w_residuals=lowered.num_w_residuals,
                num_b_to_w=lowered.num_b_to_w,
                work=microbatches * chunks,
                phases=4 if recompute else 3,
            )
            assert math.isclose(facts.bubble, simulate(schedule).idle_over_ideal, abs_tol=1e-12)
            ticks, placement = ticks_of(name, stages, microbatches, chunks, send_latency, recompute)
            assert facts_of(ticks, stages, placement, send_latency) == facts


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_many_micro_batches_extend_linearly(name, recompute):
    for send_latency, stages, chunks in itertools.product((1, 2), (2, 3, 4, 5), chunks_of(name)):
        if send_latency == 2 and (stages in (2, 5) or chunks == 3):
            continue
        for microbatches in (4 * stages + 1, 5 * stages, 7 * stages - 1):
            sizes = (stages, microbatches, chunks, send_latency, recompute)
            direct = dataclasses.asdict(table_facts(make_schedule(name, *sizes)))
            extended = dataclasses.asdict(schedule_facts(name, *sizes))
            loose = {"recompute_span": 0.03 if send_latency == 1 else 0.04}
            if send_latency == 2 and name in ("v-half", "v-min"):
                loose |= dict.fromkeys(("num_ticks", "span", "sends"), 0.07)
            for field, error in loose.items():
                assert extended.pop(field) == pytest.approx(direct.pop(field), rel=error)
            assert extended == direct


# ------------------------------------------------------------------------------------------------------- enumeration

CASES = [
    (SMALL, 8, 16),
    (dataclasses.replace(SMALL, num_layers=6, num_heads=4), 4, 12),
    (dataclasses.replace(SMALL, num_layers=5, seq_len=30), 6, 24),
]


MIXTURE = PRESETS["moe-proof"], 8, 16


@pytest.mark.parametrize(
    "model, devices, batch, column", [(dataclasses.replace(SMALL, num_layers=5), 6, 24, "last"), (*MIXTURE, "over_tp")]
)
def test_the_flags_of_a_layout_are_its_settings(model, devices, batch, column):
    config, found = base(batch_size=24), every_layout(model, devices, batch)
    special = [int(index) for index in np.flatnonzero(getattr(found, column))]
    for index in random.Random(0).sample(range(len(found)), 100) + random.Random(0).sample(special, 50):
        words = layout_flags(SimpleNamespace(layouts=found, base=config), index).split()
        flags = tyro.cli(CommonFlags, args=words, default=CommonFlags(batch_size=24))
        wanted = found.parallel(index, config.parallel)
        for setting in (
            "mesh",
            "stages",
            "schedule",
            "microbatches",
            "chunks",
            "remat",
            "cp_kind",
            "zero",
            "tp_ring",
            "experts_over_tp",
        ):
            assert str(getattr(flags, setting)) == str(getattr(wanted, setting)), (words, setting)


@pytest.mark.parametrize(
    "model, devices, batch", [*CASES, (PRESETS["7b"], 64, 128), (PRESETS["gpt2-1.5b"], 50, 100), MIXTURE]
)
def test_every_candidate_is_a_legal_run_without_idle_settings(model, devices, batch):
    found = every_layout(model, devices, batch)
    for index in random.Random(0).sample(range(len(found)), min(len(found), 150)):
        config = RunConfig(model, found.parallel(index), batch_size=batch)
        assert config.parallel.mesh.num_devices == devices
        assert not [note for note in config.warnings() if "changes nothing" in note or "nothing is sharded" in note]
        again = Candidates.of(config)
        assert {name: getattr(again, name)[0] for name in INTEGERS} == {
            name: getattr(found, name)[index] for name in INTEGERS
        }


@pytest.mark.parametrize("axes, apart", [({"dp": 2, "ep": 2, "tp": 4}, 1), ({"dp": 4, "tp": 2}, 0)])
def test_experts_are_split_over_tp_where_that_is_faster(axes, apart):
    model = dataclasses.replace(PRESETS["qwen3-30b-a3b"], num_layers=2, seq_len=2048)
    config = RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=16)
    mesh = {**dict.fromkeys(AXES, 1), **axes}

    def seconds(**columns) -> tuple[float, int]:
        found = search(config, H100, "cudnn", fixed=Fixed(mesh, {"sp": 1, **columns}))
        best = found.time.total.argmin()
        return found.time.total[best], found.layouts.over_tp[best]

    each, free = [seconds(over_tp=value) for value in (0, 1)], seconds()
    assert [over_tp for _, over_tp in each] == [0, 1]
    assert free == min(each) == each[apart]


@pytest.mark.parametrize("model, devices, batch", in_sample(CASES, CASES[2:]))
def test_no_legal_layout_is_missing(monkeypatch, model, devices, batch):
    monkeypatch.setattr(searching, "LONG", model.seq_len if devices == 4 else searching.LONG)
    found = every_layout(model, devices, batch)
    rows = [tuple(row) for row in np.stack([getattr(found, name) for name in INTEGERS], axis=1).tolist()]
    assert len(rows) == len(set(rows))
    known, missing = set(rows), []
    for parallel in every_setting(model, devices, batch):
        try:
            config = RunConfig(model, parallel, batch_size=batch)
        except ConfigError:
            continue
        idle = ("changes nothing", "nothing is", "all the same")
        if any(word in note for note in config.warnings() for word in idle):
            continue
        columns = Candidates.of(config)
        row = tuple(int(getattr(columns, name)[0]) for name in INTEGERS)
        if row not in known:
            missing.append((row, config.parallel))
    # What is left out is never better than something that is there.
    everything = score(base(model, batch), found, H100)
    left_out = score(base(model, batch), Candidates(*np.array([row for row, _ in missing]).T), H100)
    for index, (_, parallel) in enumerate(missing):
        pipelined = parallel.mesh.pp > 1 and ((parallel.chunks or 1) > 2 or parallel.accumulate > 1)
        pipelined = pipelined or parallel.last_layers > 0
        assert parallel.remat_every > 1 or pipelined
        as_good = (everything.memory.total <= left_out.memory.total[index] * (1 + 1e-9)) & (
            everything.time.total <= left_out.time.total[index] * (1 + 1e-9)
        )
        same = np.ones(len(found), bool)
        for name in set(INTEGERS) - {"keep", "chunks", "last", "microbatches", "accumulate", "every", "selective"}:
            same &= getattr(found, name) == getattr(left_out.layouts, name)[index]
        assert (as_good & same).any(), parallel


def every_setting(model, devices, batch):
    """Settings of every kind on every mesh, legal or not."""
    sizes = divisors(devices)
    for shape in itertools.product(sizes, repeat=len(FACTORS)):
        mesh = MeshShape(**dict(zip(FACTORS, shape, strict=True)))
        if mesh.num_devices != devices or (mesh.cp > 1 and model.seq_len < searching.LONG):
            continue
        pipelines_of = [(None, None, None, None)]
        if mesh.pp > 1:
            pipelines_of = [
                (name, chunks, micro, last)
                for name in NAMES
                for chunks in (range(2, 6) if name == "interleaved" else [None])
                for micro in divisors(batch)
                for last in ("even", "last-1", "last-2", "last-3")
            ]
        kinds = CP_KINDS if mesh.cp > 1 else CP_KINDS[:1]
        for (name, chunks, micro, last), zero, keep, sp, overlap, kind in itertools.product(
            pipelines_of, range(4), (True, False), (False, True), (False, True), kinds
        ):
            if (not keep and zero != 3) or (sp and mesh.tp == 1) or (zero and mesh.state_ranks == 1):
                continue
            if overlap and mesh.pp * mesh.dp * mesh.replica * mesh.cp == 1:
                continue
            if last not in (None, "even") and (zero or sp or overlap):  # no rule of these is about the parts
                continue
            remats = ("none", "selective", "block", "every-2", "every-3", "chunk")
            rings = ("none", "one-way") if sp and mesh.pp == 1 else ("none",)
            for remat, accumulate, ring in itertools.product(remats, (1, 2, 3), rings):
                if remat == "selective" and mesh.cp > 1 and kind != "ulysses":
                    continue
                if overlap and mesh.pp > 1 and accumulate > 1:  # whatever a pass is, its messages are its own
                    continue
                schedule = {}
                if name is not None:
                    schedule = {"schedule": name, "chunks": chunks, "microbatches": micro, "stages": last}
                try:
                    yield ParallelConfig(
                        mesh=mesh,
                        zero=zero,
                        sp=sp,
                        tp_ring=ring,
                        cp_kind=kind,
                        reshard_after_forward=keep,
                        overlap=overlap,
                        remat=remat,
                        accumulate=accumulate,
                        **schedule,
                    )
                except ConfigError:
                    continue


def test_adafactor_has_whole_parameters_alone():
    found = every_layout(SMALL, 8, 16, "adafactor")
    assert len(found) and set(found.pp) == set(found.tp) == {1} and set(found.zero) == {0}


def test_a_batch_that_cannot_be_divided_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="multiple of 7"):
        legal_meshes(SMALL, 7, 16)


# ----------------------------------------------------------------------------------------------------------- scoring


def test_a_layout_alone_has_the_score_it_has_among_all():
    found = score_all(base(precision=PrecisionConfig("bfloat16")), H100)
    for index in (0, len(found) // 2, len(found) - 1):
        alone = score(found.config(index), Candidates.of(found.config(index)), H100)
        assert alone.time.total[0] == found.time.total[index]
        assert alone.memory.total[0] == found.memory.total[index]


def test_a_compiled_step_has_no_python_between_launches():
    config = base(precision=PrecisionConfig("bfloat16"))
    quick, slow = (dataclasses.replace(UNCALIBRATED, step_seconds=seconds) for seconds in (0.0, 1.0))
    times = [score(config, Candidates.of(config), H100, efficiency=each).time.total[0] for each in (quick, slow)]
    assert times[0] == times[1]


def test_what_overlap_hides_is_what_compiled_programs_show():
    # docs/benchmarks.md: of 831 MiB that DP sends of this model, 524 have a product between start and done.
    assert hidden_part(PRESETS["gpt2-124m"]) == pytest.approx(524 / 831, abs=0.01)


def test_the_best_of_each_mesh_is_its_first_in_the_order():
    found = score_all(base(), H100)
    order = rank(found)
    first = {}
    for index in order.tolist():
        first.setdefault(tuple(int(getattr(found.layouts, axis)[index]) for axis in FACTORS), index)
    assert best_of_each_mesh(found, order).tolist() == list(first.values())


CLUSTERS = {
    "8 in 2 nodes": (SMALL, 16, (2, 4), 1.0),
    "6 in 3 nodes": (dataclasses.replace(SMALL, num_layers=5, seq_len=30), 24, (3, 2), 1.0),
    "little memory": (PRESETS["gpt2-350m"], 32, (2, 2), 0.04),
}


@pytest.mark.parametrize("name", in_sample(CLUSTERS, ["6 in 3 nodes"]))
def test_the_search_finds_what_brute_force_finds(name):
    """Every layout alone, as a run of its own, one after the other, compared by plain Python."""
    model, batch, shape, part = CLUSTERS[name]
    card = find_hardware("h100")
    cluster = Cluster(dataclasses.replace(card, memory_gb=part * card.memory_gb), *shape)
    config = RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=batch)
    layouts = every_layout(model, cluster.num_devices, batch)
    usable = 0.9 * part * 80 * 2**30
    chunks = 1 if model.seq_len % searching.LOSS_CHUNKS else searching.LOSS_CHUNKS
    in_chunks = dataclasses.replace(layouts, loss_chunks=np.full(len(layouts), chunks))
    whole, chunked = score(config, layouts, cluster), score(config, in_chunks, cluster)
    head = PHASES.index("the head")
    best, front, num_fitting = {}, [], 0
    for index in range(len(layouts)):
        large = whole.memory.total[index] > usable and whole.memory.phase[index] == head
        scored = chunked if large else whole
        parallel = scored.layouts.parallel(index)
        seconds, memory = float(scored.time.total[index]), float(scored.memory.total[index])
        num_fitting += memory <= usable
        key = (memory > usable, seconds if memory <= usable else memory, memory)
        if str(parallel.mesh) not in best or key < best[str(parallel.mesh)][0]:
            best[str(parallel.mesh)] = key, parallel
        if memory <= usable and not any(m <= memory and s <= seconds for m, s in front):
            front = [(m, s) for m, s in front if not (memory <= m and seconds <= s)] + [(memory, seconds)]
    found = search(config, cluster, thorough=True)
    order = best_of_each_mesh(found, rank(found))
    winners = [found.config(int(index)).parallel for index in order]
    assert winners == [parallel for _, parallel in sorted(best.values(), key=lambda entry: entry[0])]
    assert (found.num_layouts, found.num_fitting) == (len(layouts), num_fitting) and num_fitting > 0
    kept = memory_time_front(found)
    assert list(zip(found.memory.total[kept], found.time.total[kept], strict=True)) == sorted(front)


def test_a_loss_whose_logits_are_too_large_is_computed_in_chunks():
    """In the search, where the logits are why a layout does not fit; not where the run says how many chunks."""
    model = dataclasses.replace(PRESETS["gpt2-124m"], vocab_size=2**18, seq_len=2**15)
    config = base(model, 2, precision=PrecisionConfig("bfloat16"))
    small = dataclasses.replace(find_hardware("h100"), memory_gb=20)
    cluster = Cluster(small, num_nodes=1, devices_per_node=2)
    found, alone = (search(one, cluster, "cudnn") for one in (config, with_loss_chunks(config, 2)))
    assert set(found.layouts.loss_chunks) == {1, searching.LOSS_CHUNKS} and set(alone.layouts.loss_chunks) == {2}
    assert found.fits.all()
    for index in np.flatnonzero(found.layouts.loss_chunks > 1):
        chosen = found.config(index)
        again, whole = (
            score(one, Candidates.of(one), cluster, "cudnn") for one in (chosen, with_loss_chunks(chosen, 1))
        )
        assert chosen.parallel.loss_chunks == searching.LOSS_CHUNKS and not whole.fits[0]
        assert PHASES[whole.memory.phase[0]] == "the head"
        assert (again.memory.total[0], again.time.total[0]) == (found.memory.total[index], found.time.total[index])
    odd = dataclasses.replace(config, model=dataclasses.replace(model, seq_len=4 * 8191))  # which eight does not divide
    assert set(search(odd, cluster, "cudnn").layouts.loss_chunks) == {1}


def with_loss_chunks(config, chunks):
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, loss_chunks=chunks))


@pytest.mark.parametrize("slower, pays", in_sample([(1, False), (8, True)], [(8, True)]))
def test_rings_over_tp_are_searched_and_found_where_they_pay(slower, pays):
    """On links that are so many times slower; and where no stages are. The same best as without leaving any out."""
    model = dataclasses.replace(PRESETS["llama3-8b"], num_layers=2, seq_len=4096)
    config = base(model, 8, precision=PrecisionConfig("bfloat16"))
    card = find_hardware("h100")
    inside = dataclasses.replace(card.inside, bytes_per_s=card.inside.bytes_per_s / slower)
    cluster = Cluster(dataclasses.replace(card, inside=inside), num_nodes=1)
    found, whole = (search(config, cluster, "cudnn", thorough=thorough) for thorough in (False, True))
    best = found.layouts.take(best_of_each_mesh(found, rank(found)))
    possible = (best.sp == 1) & (best.pp == 1)
    assert possible.any() and best.ring[possible].any() == pays
    assert not best.ring[~possible].any()
    assert found.time.total[rank(found)[0]] == whole.time.total[rank(whole)[0]]


def test_ranking_puts_what_fits_first_and_the_front_is_not_beaten():
    config = RunConfig(PRESETS["7b"], precision=PrecisionConfig("bfloat16"), batch_size=32)
    found = score_all(config, H100, "cudnn")
    order = rank(found)
    fits = (found.memory.total <= usable_bytes(H100))[order]
    assert fits.any() and not fits.all() and (np.diff(fits.astype(int)) <= 0).all()
    assert (np.diff(found.time.total[order][fits]) >= 0).all()
    rows = np.stack([found.memory.total, found.time.total], axis=1)
    front = pareto(*rows.T)
    for index in front:
        better = (rows <= rows[index]).all(axis=1) & (rows < rows[index]).any(axis=1)
        assert not better.any()
    for index in random.Random(1).sample(range(len(rows)), 200):
        assert any((rows[f] <= rows[index]).all() for f in front)


# ------------------------------------------------------------------------------------------------------------ memory

STATES = [
    ("dp=2", {"zero": 0}, "adamw", "float32"),
    ("dp=4", {"zero": 1}, "adamw", "bfloat16"),
    ("dp=3", {"zero": 3}, "lion", "bfloat16"),
    ("dp=4,tp=2", {"zero": 2}, "sgd", "float32"),
    ("pp=3,dp=2", {"zero": 1}, "adamw", "bfloat16"),
    ("pp=3,dp=2", {"zero": 3, "schedule": "interleaved", "chunks": 2}, "adamw", "float16"),
    ("dp=2", {}, "adafactor", "float32"),
    ("pp=3,dp=2,tp=2", {"zero": 2}, "muon", "bfloat16"),
]


def traced(config: RunConfig):
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    return program, program.step.trace(program.abstract_state(), program.abstract_batch())


def mesh_of(text: str) -> MeshShape:
    return MeshShape(**{axis: int(size) for axis, size in (part.split("=") for part in text.split(","))})


@pytest.mark.parametrize("mesh, more, optimizer, dtype", in_sample(STATES, STATES[2:6]))
def test_state_bytes_are_those_of_the_program(mesh, more, optimizer, dtype):
    model = dataclasses.replace(SMALL, num_layers=8, width=256, num_heads=8, vocab_size=1000)
    config = RunConfig(
        model,
        ParallelConfig(mesh=mesh_of(mesh), **more),
        OptimizerConfig(optimizer),
        PrecisionConfig(dtype),
        batch_size=72,
    )
    layout = Candidates.of(config)
    found = program_bytes(config, layout, pipelines(config, layout), "xla")
    state = build_program(config, make_abstract_mesh(config.parallel.mesh)).abstract_state()
    assert abs(float(found.parameters[0] + found.optimizer[0]) - local_bytes(state)) <= 64  # counters


def memory_of(mesh: str, batch_size: int, optimizer: OptimizerConfig | None = None, **more):
    """Closed form of a small bf16 model of wide rows, its number of parameters, and its layout's columns."""
    model = dataclasses.replace(SMALL, num_layers=6, width=256, seq_len=64, vocab_size=20_000)
    config = RunConfig(
        model,
        ParallelConfig(mesh=mesh_of(mesh), **more),
        optimizer or OptimizerConfig(),
        PrecisionConfig("bfloat16"),
        batch_size=batch_size,
    )
    layout = Candidates.of(config)
    state = build_program(config, make_abstract_mesh(config.parallel.mesh)).abstract_state()
    return program_bytes(config, layout, pipelines(config, layout), "xla"), local_bytes(state.params) / 2, config


def test_each_phase_holds_what_it_is_said_to_hold():
    # The update: fp32 gradients of everything, and nothing of forward.
    found, number, config = memory_of("replica=2", 2, grad_sync="per-parameter")
    assert PHASES[int(found.phase[0])] == "the update" and found.gradients == 4 * number and found.activations == 0
    assert found.working == 4 * 3 * 256**2 * 6  # the largest leaf, of q, k and v
    # One device reduces nothing: they stay as backward made them.
    alone, _, _ = memory_of("replica=1", 1)
    assert PHASES[int(alone.phase[0])] == "the update" and alone.gradients == 2 * number
    # One bucket of all gradients: all of them again, in fp32, and with ZeRO-1 a rank's shard of their sums.
    for mesh, zero, shard in (("replica=2", 0, 0), ("dp=4", 1, 1)):
        flat, _, _ = memory_of(mesh, 4, grad_sync="flat", zero=zero)
        assert PHASES[int(flat.phase[0])] == "the reduction of gradients" and flat.gradients == 2 * number
        assert flat.working == 4 * number + shard * number
    # Matrices: queries, keys and values of six layers as they came, in fp32, and as they are multiplied, here in
    # bfloat16, and X X^T of each.
    muon = OptimizerConfig("muon", muon_bf16=True)
    found, _, _ = memory_of("replica=1", 1, optimizer=muon)
    assert PHASES[int(found.phase[0])] == "the update"
    assert found.working == 6 * 3 * (256 * 256 * (4 + 2) + 256**2 * 4)
    # The loss: logits, and the gradients of the table and of its input, beside the sum over micro-batches.
    found, number, config = memory_of("replica=2", 1024, accumulate=2, remat="block")
    padded = config.model.padded_vocab_size
    assert PHASES[int(found.phase[0])] == "the head" and found.gradients == 4 * number
    assert found.logits == pytest.approx(2 * (256 * 64 * padded + padded * 256 + 256 * 64 * 256), rel=1e-3)
    assert found.activations == 6 * 256 * 64 * 256 * 2  # the input of every block
    # The same in chunks: an eighth of the logits, and the gradients, in fp32 and rounded.
    found, _, _ = memory_of("replica=2", 1024, accumulate=2, remat="block", loss_chunks=8)
    assert PHASES[int(found.phase[0])] == "the head"
    gradients = padded * 256 + 256 * 64 * 256
    assert 2 * 32 * 64 * padded + 4 * gradients < found.logits < 2 * 32 * 64 * padded + 8 * gradients
    # Backward, of a pipeline that recomputes: the inputs of groups (two of three layers in two), what B hands to W,
    # and messages, by the slots of the table.
    found, number, config = memory_of("pp=2", 64, remat="every-2", microbatches=2, schedule="zb-h1")
    slots, x = lower(config.parallel.pipeline), 32 * 64 * 256 * 2
    kept = layer_memory(rank_of(config, "xla"))
    layer = 32 * (kept.b_to_w + kept.w_residuals)
    assert found.activations == (2 * slots.num_b_residuals + slots.num_messages) * x + 3 * slots.num_b_to_w * layer
    # With an R of its own: the inputs of chunks, and from R on what a layer keeps.
    found, number, config = memory_of("pp=2", 64, remat="chunk", microbatches=2)
    slots = lower(config.parallel.pipeline)
    assert slots.num_inputs == 2 and slots.num_b_residuals == 1
    kept = [
        slots.num_b_residuals * kept.b_residuals + slots.num_w_residuals * kept.w_residuals,
        slots.num_b_to_w * kept.b_to_w,
    ]
    assert found.activations == (slots.num_inputs + slots.num_messages) * x + 3 * 32 * sum(kept)


KEEPING = [(dtype, *tp) for dtype in ("float32", "bfloat16") for tp in ((1, False), (4, False), (4, True))]


@pytest.mark.parametrize("dtype, tp, sp", in_sample(KEEPING, [("float32", 1, False), ("bfloat16", 4, True)]))
def test_what_a_layer_keeps_is_what_the_trace_keeps(dtype, tp, sp):
    model = dataclasses.replace(SMALL, width=256, ffn_width=1024, seq_len=128, vocab_size=512)
    itemsize = np.dtype("float16" if dtype == "bfloat16" else dtype).itemsize
    unit = 2 * model.seq_len * model.width / tp  # bytes of a 16-bit activation

    def predicted(context, selective):
        precision, rows = PrecisionConfig(dtype), rows_to_trace(model)
        rank = OneRank(model, tp, rows, precision, sp=sp, selective=selective, attention="xla")
        return getattr(layer_memory(rank), context)

    for remat, zero, keep in (
        ("none", 0, False),
        ("selective", 0, False),
        ("none", 3, False),
        ("none", 3, True),
        ("selective", 2, False),
    ):
        parallel = ParallelConfig(
            mesh=MeshShape(dp=2, tp=tp), zero=zero, sp=sp, remat=remat, reshard_after_forward=not keep
        )
        _, trace = traced(RunConfig(model, parallel, precision=PrecisionConfig(dtype), batch_size=2))
        (kept,) = (
            size_of(eqn.outvars[scan_counts(eqn)[1] :]) / model.num_layers
            for eqn, *_ in equations(trace.jaxpr)
            if eqn.primitive.name == "scan" and not eqn.params["reverse"]
        )
        elements = device_elements(model, tp, 1, 1)
        # The bias of q, k and v is counted, and backward does not need it: it has q, k and v.
        gathered = (elements.layer if keep else elements.vectors) - 3 * model.width / tp
        extra = itemsize * (gathered if zero == 3 else 0)
        assert abs(predicted("scan", remat == "selective") + extra - kept) < 0.2 * unit, (remat, zero, keep)

    for remat in ("none", "selective"):
        parallel = ParallelConfig(mesh=MeshShape(pp=2, tp=tp), sp=sp, remat=remat, schedule="zb-h1", microbatches=4)
        config = RunConfig(model, parallel, precision=PrecisionConfig(dtype), batch_size=4)
        _, trace = traced(config)
        lowered = lower(parallel.pipeline)
        slots = {
            "b_residuals": lowered.num_b_residuals,
            "w_residuals": lowered.num_w_residuals,
            "b_to_w": lowered.num_b_to_w,
        }
        for eqn, *_ in equations(trace.jaxpr):
            if (name := eqn.params.get("name")) in slots:
                kept = size_of(eqn.outvars) / slots[name] / 2
                assert abs(predicted(name, remat == "selective") - kept) < 0.05 * unit, (remat, name)


RANKS = [
    ("gpt2-124m", 1024, {"tp": 12}),
    ("gpt2-124m", 8192, {"tp": 4, "sp": True, "cp": 8, "cp_kind": "all-gather"}),
    ("llama3-8b", 8192, {"tp": 8, "sp": True}),
    ("llama3-8b", 8192, {"cp": 8, "cp_kind": "ulysses"}),
    ("llama3-8b", 8192, {"tp": 4, "sp": True, "cp": 2, "cp_kind": "ulysses", "selective": True}),
    ("llama3-8b", 32_768, {"cp": 16, "cp_kind": "ulysses"}),
    ("llama3-8b", 8192, {"tp": 8, "sp": True, "tp_ring": "one-way"}),
    ("llama3-8b", 8192, {"tp": 2, "sp": True, "tp_ring": "one-way", "cp": 8, "cp_kind": "all-gather"}),
    ("llama3-8b", 131_072, {"cp": 32}),
    ("llama3-8b", 131_072, {"tp": 8, "sp": True, "cp": 64}),
]


@pytest.mark.parametrize("preset, seq_len, ranks", in_sample(RANKS, RANKS[1:7:3]))
def test_memory_of_many_ranks_follows_from_that_of_few(preset, seq_len, ranks):
    """What two traces of few ranks say of more, against a trace of those."""
    model = dataclasses.replace(PRESETS[preset], seq_len=seq_len)
    settings = {"tp": 1, "precision": PrecisionConfig("bfloat16"), "attention": "cudnn"} | ranks
    rank_ = OneRank(model, rows=rows_to_trace(model), **settings)
    kept, *moments = rank_memory(rank_)
    *traced_kept, backward, again = layer_memory(rank_)
    assert kept == pytest.approx(np.array(traced_kept), rel=1e-9)
    loss, rows = loss_memory(dataclasses.replace(rank_, selective=False)), np.array([1, 4, 64])
    for mine, its in zip(moments, (backward, again, loss), strict=True):
        assert at_rows(fullest(mine), rows) == pytest.approx(at_rows(fullest(its), rows), rel=1e-6)


def test_memory_of_rings_is_that_of_their_trace():
    model = PRESETS["llama3-8b"]
    settings = {"sp": True, "tp_ring": "one-way", "loss_chunks": 8}
    config = RunConfig(model, ParallelConfig(mesh_of("tp=4"), **settings), precision=PrecisionConfig("bfloat16"))
    assert ranks_of(config, Candidates.of(config), "cudnn")[0] == [rank_of(config, "cudnn")]
    rings = rank_of(config, "cudnn")
    kept, gathers = (rank_memory(rank_).kept for rank_ in (rings, dataclasses.replace(rings, tp_ring="none")))
    assert kept.tolist() == list(layer_memory(dataclasses.replace(rings, loss_chunks=1)))[:5]
    assert kept[1] > gathers[1]


def size_of(variables) -> int:
    return sum(math.prod(v.aval.shape) * v.aval.dtype.itemsize for v in variables)


GATHERS = [("dp=4", {}), ("dp=4", {"reshard_after_forward": False}), ("dp=4", {"remat": "block"})]
GATHERS += [("dp=4", {"remat": "every-2"}), ("pp=2,dp=4", {}), ("pp=2,dp=4", {"remat": "block"})]


@pytest.mark.parametrize("mesh, more", GATHERS)
def test_zero_3_gathers_its_weights_as_often_as_the_program(mesh, more):
    model = dataclasses.replace(SMALL, width=128, ffn_width=512, vocab_size=100, seq_len=16)
    shape = mesh_of(mesh)
    micro = 4 if shape.pp > 1 else None
    # One gather a leaf: in a bucket, large leaves would travel again with the small ones that W needs.
    parallel = ParallelConfig(mesh=shape, zero=3, microbatches=micro, grad_sync="per-parameter", **more)
    config = RunConfig(model, parallel, precision=PrecisionConfig("bfloat16"), batch_size=16)
    program, trace = traced(config)
    sent = sum(c.sent_bytes(shape) for c in step_collectives(program, trace) if c.kind == "all_gather")
    micro = config.parallel.num_microbatches
    layers = 2 * 12 * model.width**2 * model.num_layers // shape.pp * (shape.dp - 1) // shape.dp * micro
    times = int(weight_gathers(Candidates.of(config))[0])
    assert times <= sent / layers < times + 0.9  # the token table besides


BY_HAND = {
    "1f1b": ("pp=2,dp=2,tp=2", {"zero": 1, "sp": True, "microbatches": 8, "accumulate": 2}, Layout(zero=1, sp=True)),
    "recompute": ("pp=4", {"schedule": "zb-h1", "microbatches": 8, "remat": "block"}, Layout(remat="block", gathers=3)),
    # Parts of 1, 1, 2 and 1 layers: the last one's F alone is shorter.
    "uneven": ("pp=4", {"schedule": "gpipe", "microbatches": 4}, Layout(most_layers=2, last_layers=2 - 1 / 3)),
    "zero-3": ("dp=4", {"zero": 3}, Layout(zero=3)),
    "pipelined overlap": ("pp=4", {"schedule": "zb-h1", "microbatches": 8, "overlap": True}, Layout()),
    "rings": (
        "dp=2,tp=4",
        {"sp": True, "tp_ring": "one-way", "loss_chunks": 4},
        Layout(sp=True, tp_ring=True, loss_chunks=4),
    ),
    "overlap": ("dp=2,replica=2", {"zero": 1, "overlap": True}, Layout(zero=1, by_layer=True)),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_time_is_that_of_the_layout_written_by_hand(name):
    """The schedule's part is read from its table, the rest is what docs/plan.md says of our program."""
    mesh, more, layout = BY_HAND[name]
    shape = mesh_of(mesh)
    model = dataclasses.replace(SMALL, width=512, num_layers=5 if name == "uneven" else 8)
    config = RunConfig(model, ParallelConfig(mesh=shape, **more), precision=PrecisionConfig("bfloat16"), batch_size=64)
    schedule, micro = config.parallel.pipeline, config.parallel.num_microbatches
    table = {}
    if schedule is not None:
        sends = sum((which > 0).sum() for _, which in senders_of(lower(schedule).instructions).values())
        span = simulate(schedule, Costs(1, 2, 1)).makespan
        bubble = span / (4 * micro) - 1 if name == "recompute" else simulate(schedule).idle_over_ideal
        table = {"bubble": bubble, "sends": (2 * schedule.num_ticks if schedule.send_latency == 2 else sends) / micro}
    by_hand = dataclasses.replace(
        layout,
        **{axis: getattr(shape, axis) for axis in FACTORS},
        **table,
        microbatches=micro * config.parallel.accumulate,
        pipeline_microbatches=micro,
        rows=64 // (shape.replica * shape.dp * micro * config.parallel.accumulate),
        overlap_dp=config.parallel.overlap_layers,
        overlap_pp=config.parallel.overlap,
        hidden_part=hidden_part(model),
        spread_table=shape.pp > 1,
    )
    found = score(config, Candidates.of(config), H100, efficiency=UNCALIBRATED).time
    expected = step_time(work_of(model), by_hand, H100)
    for part in (*PARTS, "dp_hidden", "total"):
        assert getattr(found, part)[0] == pytest.approx(getattr(expected, part)[0], rel=1e-9), part


def test_three_messages_are_held_where_stages_send_while_they_compute():
    """One that leaves, and one that comes meanwhile from either side; beside what the schedule's table keeps."""
    config = base(parallel=ParallelConfig(mesh=MeshShape(pp=4), microbatches=8))
    layouts = Candidates.of(config)
    table = pipelines(config, layouts)
    plain, sending = (
        program_bytes(config, dataclasses.replace(layouts, overlap=np.array([overlap])), table, "xla")
        for overlap in (0, 1)
    )
    message = 4 * (16 // 8) * SMALL.seq_len * SMALL.width
    assert sending.total[0] - plain.total[0] == 3 * message


def rows_of(found) -> list[tuple]:
    """Every layout with its time and memory, as plain numbers."""
    columns = [getattr(found.layouts, name) for name in INTEGERS]
    columns += [getattr(found.time, name) for name in (*PARTS, "total", "error", "mfu")]
    columns += [getattr(found.memory, field.name) for field in dataclasses.fields(found.memory)]
    return list(zip(*(column.tolist() for column in columns), strict=True))


BOTH = [
    ("gpt2-124m", 8, 64, "h100", "cudnn"),
    *(
        pytest.param(*case, marks=pytest.mark.exhaustive)
        for case in [
            ("gpt2-350m", 16, 64, "a100-40", "xla"),
            ("gpt2-1.5b", 16, 32, "a100-80", "cudnn"),
            ("gpt2-1.5b", 32, 512, "h100", "xla"),
            ("7b", 8, 64, "h100", "cudnn"),
            ("7b", 64, 512, "h100", "cudnn"),
            ("7b", 128, 128, "a100-40", "cudnn"),
            ("llama3-8b", 16, 16, "h100", "cudnn"),
            ("llama3-8b", 64, 256, "h200", "cudnn"),
        ]
    ),
]


@pytest.mark.parametrize("preset, devices, batch, card, attention", BOTH)
def test_what_a_search_leaves_out_is_not_the_best(preset, devices, batch, card, attention):
    """Against the search that leaves nothing out."""
    card = find_hardware(card)
    cluster = Cluster(card, -(-devices // card.devices_per_node), min(devices, card.devices_per_node))
    config = RunConfig(PRESETS[preset], precision=PrecisionConfig("bfloat16"), batch_size=batch)
    quick, whole = (search(config, cluster, attention, thorough=thorough) for thorough in (False, True))
    assert quick.num_fitting and quick.num_layouts < whole.num_layouts / 1.5
    (first, *_), (best, *_) = rank(quick), rank(whole)
    assert quick.config(first) == whole.config(best) or quick.time.total[first] == whole.time.total[best]
    # Nor does it leave out what would free a hundredth of a card.
    assert quick.memory.total.min() - whole.memory.total.min() < 0.01 * usable_bytes(cluster)


@pytest.mark.parametrize("pp", [2, 4])
def test_no_division_over_stages_is_faster_than_those_searched(pp):
    """All divisions of 16 layers, beside a head of about two layers."""
    model = GPT2Config(num_layers=16, width=2048, num_heads=16, ffn_width=8192, seq_len=512, vocab_size=50176)
    assert 1.5 < head_in_layers(model) < 2.5

    def run(stages):
        parallel = ParallelConfig(MeshShape(pp=pp), microbatches=8, stages=stages)
        return base(model, 8, parallel=parallel, precision=PrecisionConfig("bfloat16"))

    def seconds(stages):
        return score(run(stages), Candidates.of(run(stages)), H100, "cudnn").time.total[0]

    splits = itertools.combinations(range(1, 16), pp - 1)
    every = [",".join(map(str, np.diff([0, *cuts, 16]).tolist())) for cuts in splits]
    searched = [f"last-{last}" if last else "even" for _, last in searching._depths(model, pp)]
    best = min(seconds(stages) for stages in every)
    assert min(seconds(stages) for stages in searched) == pytest.approx(best, rel=1e-9)
    assert (best < seconds("even") * 0.98) == (pp == 4)
    for stages in searched[1:]:
        config = run(stages)
        assert config.part_layers[-1] == config.parallel.last_layers and sum(config.part_layers) == 16
        assert Candidates.of(config).parallel(0) == config.parallel


def test_blocks_of_any_size_give_the_same_search():
    cluster = Cluster(find_hardware("h100"), num_nodes=2, devices_per_node=4)
    config = base(precision=PrecisionConfig("bfloat16"))
    whole = search(config, cluster, block=10**6)
    for block in (7, 1000):
        found = search(config, cluster, block=block)
        assert rows_of(found) == rows_of(whole)
        assert (found.num_layouts, found.num_fitting) == (whole.num_layouts, whole.num_fitting)


TINY = DecoderConfig(6, 64, 4, num_kv_heads=2, head_dim=16, ffn_width=96, seq_len=64, vocab_size=256)
LONG = {
    "windows": dataclasses.replace(TINY, window=16, kinds=(*5 * ("sliding",), "full")),
    "experts": dataclasses.replace(PRESETS["moe-proof"], num_layers=6, kinds=("dense", *5 * ("full",))),
}
EXTENDED = traffic_of, layer_memory, kept_arrays.choices, work_of


@pytest.mark.parametrize(
    "name, function", in_sample(itertools.product(LONG, EXTENDED), itertools.product(["windows"], EXTENDED[:2]))
)
def test_a_long_block_is_what_two_short_ones_say(monkeypatch, name, function):
    model = LONG[name]
    rank = OneRank(model, 2, rows_to_trace(model), PrecisionConfig("bfloat16"), sp=True)
    monkeypatch.setattr(kept_arrays, "MOST_ARRAYS", 2)

    def found():
        kept_arrays.choice_of.cache_clear()
        return function.__wrapped__(model if function is work_of else rank)

    block, extended = long_blocks.long_block(model), found()
    monkeypatch.setattr(long_blocks, "long_block", lambda model: None)
    whole = found()
    assert (block.start, block.unit, block.times) == (int(name == "experts"), 1, 5)
    if function is layer_memory:
        assert extended[:5] == pytest.approx(whole[:5])
        for mine, its in zip(extended[5:], whole[5:], strict=True):
            assert mine == pytest.approx(fullest(its))
    elif function is kept_arrays.choices:
        assert len(extended) == len(whole) == 4
        for mine, its in zip(extended, whole, strict=True):
            assert (mine.remat, mine.uncounted) == (its.remat, its.uncounted)
            assert (mine.num_bytes, *mine.repeated) == pytest.approx((its.num_bytes, *its.repeated))
    else:
        assert extended == whole


def test_a_long_block_names_its_parameters_by_their_place():
    kinds = ("a", *4 * ("b", "c"), "d")
    block = long_blocks.LongBlock(SimpleNamespace(kinds=kinds), start=1, unit=2, times=4)
    short = ["0_a.w", "1_b.w", "2_c.w", "3_b.w", "4_c.w", "4_c.last", "5_d.w", "scale"]
    whole = [f"{layer}_{kind}.w" for layer, kind in enumerate(kinds)] + ["8_c.last", "scale"]
    assert block.extended(frozenset(), frozenset(short)) == frozenset(whole)


def test_a_block_is_not_traced_as_two_that_are_no_shorter():
    model = dataclasses.replace(LONG["windows"], num_layers=6, kinds=("full", *4 * ("sliding",), "full"))
    assert long_blocks.long_block(model) is None and long_blocks.long_block(PRESETS["gpt2-124m"]) is None


def test_rows_are_traced_with_a_number_that_divides_no_dim():
    """499 where it can be; with dims that it divides, or places of experts beyond 32 bits, a smaller prime, and what a
    row needs is the same."""
    assert rows_to_trace(SMALL) == 499
    assert rows_to_trace(dataclasses.replace(SMALL, ffn_width=499 * 2)) == 491
    assert rows_to_trace(dataclasses.replace(SMALL, ffn_width=499 * 491)) == 487
    model = PRESETS["qwen3-30b-a3b"]
    rank_ = OneRank.of(RunConfig(model, ParallelConfig(mesh_of("dp=16,ep=16")), batch_size=16))
    whole = dataclasses.replace(model, exchange_room=None)
    with pytest.raises(ConfigError, match="in 32 bits"):
        rank_memory(dataclasses.replace(rank_, model=whole, rows=499))
    rows = np.array([1, 2])
    few, fewer = (dataclasses.replace(rank_, ep=2, rows=rows) for rows in (rows_to_trace(model, 8 * 16), 61))
    for one, two in zip(rank_memory(few), rank_memory(fewer), strict=True):
        assert one == pytest.approx(two) if one.ndim == 1 else at_rows(one, rows) == pytest.approx(at_rows(two, rows))
    config = RunConfig(model, batch_size=16)
    assert rank_of(dataclasses.replace(config, parallel=ParallelConfig(mesh_of("dp=16,ep=16"))), "xla").rows == 199


def test_a_plan_says_what_it_cannot_tell_apart():
    """How far behind the next mesh is, and how many are within 5 % of the best."""
    model = GPT2Config(num_layers=2, width=256, num_heads=4, ffn_width=1024, seq_len=256, vocab_size=256)
    asked = RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=8)
    found = search(asked, Cluster(find_hardware("h100"), 1, 4))
    meshes = best_of_each_mesh(found, rank(found))
    assert len(meshes) > 4

    def said(*behind):
        """Where the meshes after the best take so much more, and the last of these all others."""
        seconds = np.full(len(found), 1 + behind[-1])
        seconds[meshes[: len(behind) + 1]] = 1 + np.array([0, *behind])
        slowed = dataclasses.replace(found, time=dataclasses.replace(found.time, total=seconds))
        return close_by(slowed)

    assert said(0.013, 0.04, 0.3).startswith("2 other meshes are predicted less than 5% slower than the fastest")
    assert said(0.02, 0.06).startswith("Another mesh is ") and said(0.06) == ""
    assert close_by(found.take(meshes[:1])) == ""


def test_the_simplest_is_as_fast_as_asked_and_no_simpler_one_is():
    """Against every layout of the cluster, one by one."""
    model = GPT2Config(num_layers=4, width=1024, num_heads=16, ffn_width=4096, seq_len=1024, vocab_size=50257)
    asked, cluster = (
        RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=16),
        Cluster(find_hardware("h100"), 2, 4),
    )
    found = search(asked, cluster, "cudnn")
    blocks = [each for mesh in legal_meshes(model, 8, 16) for each in layouts_of_mesh(model, mesh, 16)]
    every = score(asked, Candidates.join(blocks), cluster, "cudnn")
    for within in (0.0, 0.02, 0.1):
        best, expected = simplest(found, within), simplest(every, within)
        assert found.time.total[best] <= (1 + within) * found.time.total[found.fits].min() and found.fits[best]
        simpler = complexity(every) < complexity(found)[best]
        assert not within or every.time.total[simpler & every.fits].min(initial=np.inf) > found.time.total[best]
        same = found.time.total[best], complexity(found)[best] * (within > 0)
        assert same == pytest.approx((every.time.total[expected], complexity(every)[expected] * (within > 0)), rel=1e-9)
    levels = complexity(found)[[simplest(found, within) for within in (0.0, 0.02, 0.1)]]
    assert levels[0] >= levels[1] >= levels[2]
    allowed = np.arange(len(found)) == rank(found)[0]
    assert simplest(found, 0.02, allowed) == rank(found)[0]


def test_what_cp_sends_takes_time_by_its_kind():
    """A gather and an exchange show in full; a ring less than it sends, behind an attention that is long."""
    model = GPT2Config(num_layers=2, width=1024, num_heads=8, ffn_width=4096, seq_len=131072, vocab_size=256)
    cluster, found = Cluster(find_hardware("h100"), 1, 8), {}
    for kind in searching.CP_KINDS:
        parallel = ParallelConfig(MeshShape(cp=8), cp_kind=kind)
        config = RunConfig(model, parallel, precision=PrecisionConfig("bfloat16"), batch_size=1)
        found[kind] = score(config, Candidates.of(config), cluster, "cudnn", UNCALIBRATED).time
    keys = 2 * 131072 // 8 * 1024 * 2  # bytes of a rank's keys and values
    hop = cluster.permute_seconds(8, 1, keys, 0.75, 0.7)
    gathered = cluster.collective_seconds("ring_all_gather", 8, 1, 8 * keys, 0.75, 0.7)
    swapped = 7 * cluster.permute_seconds(8, 1, 2 * keys / 8, 0.75, 0.7)
    layers = model.num_layers
    assert found["all-gather"].cp[0] == pytest.approx(layers * 2 * gathered)
    again = Layout(cp=8, gathers_keys=True, flash=True, remat="every-2")  # a layer that runs again gathers again
    assert step_time(work_of(model), again, cluster).cp[0] == pytest.approx(layers * 3 * gathered)
    assert found["ulysses"].cp[0] == pytest.approx(layers * 2 * swapped)
    # Forward the keys; backward the keys and, in fp32, their gradients. 0.7 of it hides.
    assert found["ring"].cp[0] == pytest.approx(
        layers * 7 * (hop + hop + cluster.permute_seconds(8, 1, 2 * keys, 0.75, 0.7)) * 0.3
    )
    # Blocks move their scores through memory; a fused kernel keeps them.
    assert found["ring"].memory[0] > 3 * found["ulysses"].memory[0]


def test_muon_adds_its_products_and_what_passes_between_them():
    """Four matrices of 768 by 768 in a layer and two of 768 by 3,072, in fp32, by hand."""
    runs = [
        RunConfig(PRESETS["gpt2-124m"], optimizer=OptimizerConfig(name), precision=PrecisionConfig("bfloat16"))
        for name in ("adamw", "muon")
    ]
    adamw, ours = (score(run, Candidates.of(run), Cluster(find_hardware("h100"), 1, 1), "cudnn").time for run in runs)
    reached, side = efficiency_of("h100"), 768
    flops = 12 * 5 * (4 * (4 + 2) * side**3 + 2 * (4 * 4 + 2) * side**3)
    moved = 12 * (4 * 4 * (4 + 2 * 4) * side**2 + 5 * 3 * 4 * 6 * side**2)
    assert ours.compute - adamw.compute == pytest.approx(flops / (494e12 * reached.matmul))
    assert ours.memory - adamw.memory == pytest.approx(moved / (3.35e12 * reached.hbm))
