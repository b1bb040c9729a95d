"""Which part of a step binds a run, from what processes measured, from the time model, and from both."""

import pytest

from experiments.labs.recompute import step_flops
from jaxdist.config import RunConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.plan.cost import duration
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.utilisation import flops_per_token
from jaxdist.plan.verdict import (
    REMEDIES,
    STEP,
    divided,
    judge,
    known_hardware,
    measured_parts,
    predicted_parts,
)
from jaxdist.runtime.telemetry import PARTS, MeanLap, Stopwatch, spreads
from jaxdist.strategy import ParallelConfig, PrecisionConfig

BF16 = PrecisionConfig("bfloat16")
H100 = Cluster(find_hardware("h100"))
QUIET = {"input": 0.001, "step": 1.0, "evaluation": 0.0, "checkpoint": 0.0, "checks": 0.0, "host": 0.002}


def laps(*others: dict) -> list[dict]:
    found = [QUIET | other for other in others]
    return [{**lap, "total": sum(lap.values())} for lap in found]


# ---- injected causes, as hosts measure them ----


@pytest.mark.parametrize(
    ("lap", "kind"),
    [
        ({"input": 0.4}, "input"),
        ({"checkpoint": 0.5}, "checkpoint"),
        ({"evaluation": 0.3}, "evaluation"),
        ({"checks": 0.3}, "checks"),
        ({"host": 0.4}, "host"),
        ({"input": 0.1}, STEP),
        ({}, STEP),
    ],
)
@pytest.mark.parametrize("processes", [1, 4])
def test_what_the_hosts_wait_for_is_named(lap, kind, processes):
    parts, details = measured_parts(laps(*[lap] * processes))
    verdict = judge(parts, details, "its parts are not measured on simulated devices")
    assert verdict.kind == kind and verdict.seconds == pytest.approx(sum(parts.values()))
    assert ("simulated" in verdict.text) == (kind == STEP)
    assert kind == STEP or REMEDIES[kind] in verdict.text


@pytest.mark.parametrize("late", ["host", "input"])
@pytest.mark.parametrize("others", [1, 3])
def test_a_straggler_is_named_and_what_makes_it_late(late, others):
    parts, details = measured_parts(laps(*[{}] * others, {late: 0.5, "step": 0.5}))
    verdict = judge(parts, details)
    assert verdict.kind == "straggler" and f"process {others}, by its {late}" in verdict.text
    assert 0.45 < verdict.share < 0.55 and verdict.seconds == pytest.approx(1.003)


def test_a_wait_for_a_straggler_is_no_longer_than_the_step():
    parts, _ = measured_parts(laps({}, {"host": 5.0}))
    assert parts["straggler"] == 1.0 and parts[STEP] == 0.0


# ---- injected causes, simulated by the time model ----

CAUSES = {
    # Gradients of a billion parameters in one bucket over a slow link, nothing beside them.
    "communication on dp": (
        RunConfig(
            PRESETS["gpt2-1.5b"], ParallelConfig(parse_mesh("dp=16"), grad_sync="flat"), precision=BF16, batch_size=16
        ),
        Cluster(find_hardware("h100"), num_nodes=16, devices_per_node=1),
    ),
    "bubble": (
        RunConfig(
            PRESETS["7b"],
            ParallelConfig(parse_mesh("pp=8"), schedule="gpipe", microbatches=8),
            precision=BF16,
            batch_size=8,
        ),
        H100,
    ),
    "compute": (
        RunConfig(
            PRESETS["7b"],
            ParallelConfig(parse_mesh("dp=8"), zero=1, accumulate=16, remat="block"),
            precision=BF16,
            batch_size=512,
        ),
        H100,
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_what_the_time_model_waits_for_is_named(cause):
    parts, details = predicted_parts(*CAUSES[cause], attention="cudnn")
    verdict = judge(parts, details)
    assert verdict.kind == cause, {name: f"{seconds / verdict.seconds:.0%}" for name, seconds in parts.items()}
    if cause == "communication on dp":
        assert "most in all-reduce, between nodes at 50 GB/s" in verdict.text and "accumulate" in verdict.text


def test_memory_bandwidth_binds_only_where_it_takes_more_than_compute():
    assert judge({"compute": 0.6, "memory bandwidth": 0.4}).kind == "compute"
    assert judge({"compute": 0.4, "memory bandwidth": 0.6}).kind == "memory bandwidth"
    assert judge({"compute": 0.6, "memory bandwidth": 0.2, "bubble": 0.2}).kind == "bubble"
    assert judge({}).text == "nothing was measured"


# ---- measuring ----


def test_a_lap_has_every_second_once():
    now = [0.0]
    watch = Stopwatch(lambda: now[0])
    for name, seconds in (("input", 1.0), ("step", 5.0), ("evaluation", 2.0), ("step", 1.0)):
        now[0] += 0.25
        with watch.part(name):
            now[0] += seconds
    lap = watch.lap()
    assert lap == {
        **dict.fromkeys(PARTS, 0.0),
        "input": 1.0,
        "step": 6.0,
        "evaluation": 2.0,
        "host": 1.0,
        "total": 10.0,
    }
    assert watch.lap()["total"] == 0
    watch.add("step", 11.0, 14.0)  # the host reads input from 10 to 12 and works until 15, of which the lap ends at 14
    watch.add("input", 10.0, 12.0)
    watch.add("checks", 13.0, 15.0)
    assert watch.lap(14.0) == {**dict.fromkeys(PARTS, 0.0), "input": 1.0, "step": 3.0, "total": 4.0}
    now[0] = 16.0
    assert watch.lap() == {**dict.fromkeys(PARTS, 0.0), "checks": 1.0, "host": 1.0, "total": 2.0}
    with pytest.raises(KeyError, match="nothing"), watch.part("nothing"):
        pass


def test_means_of_laps_and_processes_beside_each_other():
    laps = MeanLap()
    for seconds in (1.0, 3.0):
        laps.add({"step": seconds, "host": 0.0})
    assert laps.mean() == {"step": 2.0, "host": 0.0}
    found = spreads([{"step": 1.0}, {"step": 4.0}, {"step": 2.0}])
    assert found["step"]._asdict() == {"least": 1.0, "median": 2.0, "most": 4.0, "process": 1}


# ---- utilisation ----


@pytest.mark.parametrize("name", ["proof", "llama-proof"])
@pytest.mark.parametrize("remat", ["none", "selective", "block", "every-2", "every-4"])
def test_flops_are_those_of_the_products_in_the_traced_step(name, remat):
    config = RunConfig(PRESETS[name], ParallelConfig(remat=remat), batch_size=4)
    assert sum(flops_per_token(config)) == step_flops(config)


def test_the_step_that_was_measured_is_divided_as_it_was_predicted():
    parts, _ = measured_parts(laps({"input": 0.3}))
    inside = {"compute": 3.0, "communication on dp": 1.0}
    found = divided(parts, inside)
    assert STEP not in found and found["compute"] == 0.75 and found["communication on dp"] == 0.25
    assert sum(found.values()) == pytest.approx(sum(parts.values()))
    assert judge(found).kind == "input"
    assert divided(parts, {}) == parts


@pytest.mark.parametrize(("remat", "again"), [("none", 0.0), ("block", 1.0), ("selective", None)])
def test_model_and_hardware_flops(remat, again):
    config = RunConfig(PRESETS["gpt2-124m"], ParallelConfig(remat=remat), precision=BF16, batch_size=8)
    model, repeated = flops_per_token(config)
    parameters = 12 * (4 * 768**2 + 2 * 768 * 3072) + 50_304 * 768
    attention = 12 * 2 * 2 * 1024 * 768 * 5 / 8  # four blocks of queries see 1, 2, 3 and 4 quarters of the keys
    assert model == pytest.approx(6 * parameters + 3 * attention, rel=1e-3)
    layers = 2 * (parameters - 50_304 * 768) + attention
    last = 12 * 2 * 768 * 3072  # products whose results no gradient needs
    assert repeated == pytest.approx(attention / 2 if again is None else again * (layers - last), rel=1e-3)


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA GH200 480GB", None),
        ("AMD Instinct MI300X", "mi300x"),
    ],
)
def test_an_accelerator_is_known_by_its_whole_name(kind, name):
    found = known_hardware(kind)
    assert (found and found.name) == name


@pytest.mark.parametrize(("hours", "said"), [(31 / 60, "31 min"), (31.2 / 60, "32 min"), (45 / 3600, "45 s")])
def test_a_duration_is_rounded_up_and_an_exact_one_stays(hours, said):
    assert duration(hours) == said
