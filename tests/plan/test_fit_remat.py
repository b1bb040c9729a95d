"""What backward repeats, array by array: each choice's bytes and work against a trace under its policy, and the one
that is chosen for a budget."""

import dataclasses
import math
import types

import jax
import numpy as np
import pytest
from conftest import in_sample

from experiments.strategies import Strategy
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_abstract_mesh, parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.collectives import type_of
from jaxdist.parallel.named_arrays import is_array, name_array, read_arrays
from jaxdist.plan.fit_remat import _nothing_repeated, fit_remat, with_arrays
from jaxdist.plan.hardware import GIB, Cluster, find_hardware
from jaxdist.plan.kept_arrays import _largest, _layer, choice_of, choices
from jaxdist.plan.parts import _dots, _forward_and_backward, layer_memory, traffic_of
from jaxdist.plan.program_memory import rank_of
from jaxdist.plan.proof.trace_memory import step_memory
from jaxdist.plan.search import Candidates, place_of, score, search
from jaxdist.plan.time_model import NOTHING, efficiency_of
from jaxdist.plan.utilisation import flops_per_token
from jaxdist.plan.verdict import STEP, verdict_of
from jaxdist.runtime.devices import Devices
from jaxdist.runtime.telemetry import PARTS
from jaxdist.strategy import PrecisionConfig
from jaxdist.train.program import build_program

RUNS = {
    "one device": Strategy("", ""),
    "tp, sp": Strategy("", "dp=2,tp=2", {"sp": True, "zero": 3}),
    "tp": Strategy("", "tp=4"),
    "ulysses": Strategy("", "cp=4", {"cp_kind": "ulysses"}),
    "ring": Strategy("", "cp=2,tp=2", {"sp": True}),
    "blocked": Strategy("", "", {"attention": "blocked"}),
    "experts": Strategy("", "dp=4,ep=2", {"zero": 2}, preset="moe-proof"),
    "cudnn": Strategy("", "tp=2", {"sp": True, "attention": "cudnn"}, dtype="bfloat16"),
}


def _attention(run: Strategy) -> str:
    return {"blocked": "blocked", "cudnn": "cudnn"}.get(run.parallel.get("attention"), "xla")


@pytest.mark.parametrize("name", in_sample(RUNS, ["tp, sp"]))
def test_a_choice_keeps_and_repeats_what_a_trace_of_it_does(name):
    run = RUNS[name]
    config = run.run_config()
    rank = rank_of(config, _attention(run))
    everything, *others = choices(rank)
    assert everything.remat == "none" and everything.repeated == NOTHING and len(others) >= 7
    assert min(each.num_bytes for each in others) < everything.num_bytes / 2
    for choice in others[:: len(others) // 3]:
        repeats = dataclasses.replace(rank, repeats=choice.remat)
        less = layer_memory(rank).scan - layer_memory(repeats).scan
        assert less == pytest.approx(everything.num_bytes - choice.num_bytes, rel=1e-3)
        positions = rank.rows * config.model.seq_len / config.parallel.mesh.cp
        if _attention(run) != "cudnn":  # whose products are no products of the program
            assert (_flops(repeats) - _flops(rank)) / positions == pytest.approx(choice.repeated.flops)
        assert (_summed(repeats) - _summed(rank)) / positions == pytest.approx(choice.repeated.summed)
        assert choice_of(repeats) == choice


def _flops(rank) -> float:
    def read(parts) -> float:
        types = [jax.tree.map(type_of, each) for each in (parts.weights, parts.x)]
        _, backward = _forward_and_backward(parts.saved_layer, parts.bound.layout.layer_leaves, types)
        return sum(2 * math.prod(dims) for dims in _dots(backward))

    return rank.trace(read)


def _summed(rank) -> float:
    sent = (each for each in traffic_of(rank).layer.backward if each.axes == ("tp",))
    return sum(each.count * each.full_bytes * (1 if each.kind == "all_reduce" else 0.5) for each in sent)


def test_attention_that_is_repeated_is_counted_by_its_scores():
    rank = rank_of(RUNS["cudnn"].run_config(), "cudnn")
    alone = [each for each in choices(rank) if each.remat.count(":") == 2 and "attention" in each.remat]
    model = rank.model
    width, seen = model.width / rank.tp, (model.seq_len + 1) / 2
    assert [each.repeated.attention for each in alone] == [4 * width * seen]


CLUSTER = Cluster(find_hardware("h100"), 1, 4)


@pytest.mark.parametrize("name", in_sample(["one device", "tp, sp", "experts"], ["tp, sp"]))
def test_the_choice_fits_takes_least_and_is_what_the_step_keeps(name):
    """No choice that fits is predicted faster; the traced step falls by what was predicted."""
    config, cluster = RUNS[name].run_config(), CLUSTER
    whole = _scored(config)
    least = _scored(_with(config, "block"))
    assert fit_remat(config, cluster, float(whole[1])).config == config
    limit = (whole[1] + least[1]) / 2
    fitted = fit_remat(config, cluster, limit)
    seconds, num_bytes = _scored(fitted.config)
    assert num_bytes == fitted.num_bytes <= limit
    rank = rank_of(config, "xla")
    every = [_scored(_with(config, choice.remat)) for choice in choices(rank)[:: len(choices(rank)) // 8]]
    words = [_scored(_with(config, word)) for word in ("none", "selective", "block", "every-2")]
    assert seconds <= min(s for s, b in (*every, *words) if b <= limit) * (1 + 1e-9)

    assert traced(config) - traced(fitted.config) == pytest.approx(whole[1] - num_bytes, rel=0.25)


def traced(config: RunConfig) -> int:
    """Bytes of a step at its peak, from its trace."""
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    step = program.step.trace(program.abstract_state(), program.abstract_batch())
    return step_memory(program, step, "cpu").peak


def _with(config: RunConfig, word: str) -> RunConfig:
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, remat=word))


def _scored(config: RunConfig) -> tuple[float, float]:
    found = score(config, Candidates.of(config), CLUSTER)
    return float(found.time.total[0]), float(found.memory.total[0])


@pytest.mark.exhaustive
def test_a_search_has_the_fastest_choice_of_arrays_of_each_mesh():
    """Where memory is short: against time and memory of every sixth choice, of all that keep everything on dp=4."""
    config = Strategy("", "", preset="proof").run_config()
    words = search(config, CLUSTER)
    least = words.memory.total[words.layouts.pp == 1].min()
    hardware = dataclasses.replace(CLUSTER.hardware, memory_gb=2.6 * least / 0.9 / GIB)
    cluster = dataclasses.replace(CLUSTER, hardware=hardware)
    found = search(config, cluster)
    both = with_arrays(found, "xla", efficiency_of("h100"))
    assert both.num_fitting - found.num_fitting == len(both) - len(found) > 0
    mesh = parse_mesh("dp=4")
    rows = _nothing_repeated(found, "xla")
    rows = rows.take([rows.mesh(index) == mesh for index in range(len(rows))])
    seconds = _fastest(found, mesh)
    assert _fastest(both, mesh) < seconds
    for choice in choices(rank_of(config, "xla"))[::6]:
        tried = dataclasses.replace(rows, repeats=np.full(len(rows), place_of(choice.remat)))
        scored = score(config, tried, cluster)
        seconds = min(seconds, scored.time.total[scored.fits].min(initial=np.inf))
    assert _fastest(both, mesh) <= seconds * (1 + 1e-9)
    for index in range(len(found), len(both)):
        alone = both.config(index)
        assert alone.parallel.repeats_arrays
        assert _scored(alone) == pytest.approx((both.time.total[index], both.memory.total[index]))


def _fastest(found, mesh) -> float:
    here = [found.layouts.mesh(index) == mesh for index in range(len(found))]
    return found.time.total[found.fits & here].min(initial=np.inf)


def test_a_pipeline_and_overlap_choose_among_words():
    for mesh, settings in (("pp=2,dp=2", {}), ("dp=4", {"overlap": True})):
        config = Strategy("", mesh, settings).run_config()
        whole = _scored(config)[1]
        fitted = fit_remat(config, CLUSTER, whole * 0.9)
        assert not fitted.config.parallel.repeats_arrays and fitted.config.parallel.remat != "none"
        assert fitted.num_bytes <= whole * 0.9


def test_arrays_that_no_operation_makes_are_refused_when_the_step_is_traced():
    """A word that was chosen for another layout changes nothing, and must not look as if it did."""
    config = _with(RUNS["one device"].run_config(), "repeat:dot_general:32rx64-64x255")
    with pytest.raises(ConfigError, match="another layout or attention"):
        traced(config)


def test_queries_keys_and_values_are_repeated_with_their_product():
    """They are kept in its place: to repeat them alone would keep it, and save nothing."""
    layer = _layer(rank_of(RUNS["one device"].run_config(), "xla"))
    largest = _largest(layer.sizes(), layer.x_bytes)
    [found] = [made for made in largest if {name for name, _ in made} == {"heads", "dot_general"}]
    model = layer.rank.model
    shapes = {name: shapes for name, shapes in found}
    assert shapes["heads"][0][2:] == (model.num_heads, model.head_dim)
    assert shapes["dot_general"][1] == (model.width, 3 * model.width)
    together, heads = layer.choices([found, frozenset({("heads", shapes["heads"])})])
    assert together.num_bytes < heads.num_bytes
    # Rotated ones follow from their products and from positions.
    llama = Strategy("", "tp=2", {"sp": True}, preset="llama-10m").run_config()
    layer = _layer(rank_of(llama, "blocked"))
    marked = [made for made in _largest(layer.sizes(), layer.x_bytes) if any(name == "heads" for name, _ in made)]
    assert len(marked) == 2 and all(any(name == "dot_general" for name, _ in made) for made in marked)
    assert not any(choice.uncounted for choice in layer.choices(marked))


def test_what_is_repeated_counts_among_the_flops_of_the_hardware():
    """GPT-2's projection to the MLP on two ranks: 2 x width x ffn a token and layer, whatever tp."""
    config = Strategy("", "tp=2", {"remat": "repeat:dot_general:32rx64-64x128"}).run_config()
    model = config.model
    assert flops_per_token(config)[1] == model.num_layers * 2 * model.width * model.ffn_width
    assert flops_per_token(_with(config, "none"))[1] == 0


def test_what_a_plan_would_not_count_is_refused_and_counted_among_flops():
    """A word written by hand, whose backward exchanges heads over cp again."""
    config = RUNS["ulysses"].run_config()
    layer = _layer(rank_of(config, "xla"))
    single = layer.choices(_largest(layer.sizes(), layer.x_bytes))
    word = next(each.remat for each in single if each.uncounted)
    assert word not in {each.remat for each in choices(layer.rank)}
    with pytest.raises(ConfigError, match="repeat messages over cp, whose time a plan does not predict"):
        _scored(_with(config, word))
    card = types.SimpleNamespace(device_kind="NVIDIA H100 80GB HBM3", platform="gpu")
    in_bf16 = dataclasses.replace(_with(config, word), precision=PrecisionConfig("bfloat16"))
    found = verdict_of(in_bf16, [dict.fromkeys(PARTS, 0.0) | {STEP: 1.0}], Devices([card] * 4, False, ""), "xla")
    assert "the time model does not divide it: remat=" in found.text
    everything = "+".join(each.remat.removeprefix("repeat:") for each in single)
    assert flops_per_token(_with(config, f"repeat:{everything}"))[1] > 0


def test_names_of_arrays_are_read_as_written():
    made = ("dot_general", ((499 * 1024, 768), (768, 2304), (499,), ()))
    name = name_array(made, 499)
    assert name == "dot_general:1024rx768-768x2304-r-" and is_array(name) and not is_array("add:4y")
    assert read_arrays(f"repeat:{name}+scatter-add:4x16r", 16) == {
        ("dot_general", ((16 * 1024, 768), (768, 2304), (16,), ())),
        ("scatter-add", ((4, 256),)),
    }
    assert PRESETS and read_arrays("block", 4) == frozenset()
