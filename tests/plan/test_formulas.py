"""The closed forms give the papers' numbers, to the digit they print.

Every number of the reference list is here as data. `shown` is how a paper prints a value: so many decimals, or digits.
"""

import subprocess
import sys

import numpy as np
import pytest

from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.plan import formulas as f
from jaxdist.plan.collective_cost import collective_cost, two_level
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import GIB

GPT3 = ModelShape.gpt(96, 12288, 96)


def shown(value: float, printed: str) -> bool:
    """Whether `value` is what a paper prints as `printed`: within half a unit of its last digit."""
    decimals = len(printed.partition(".")[2])
    return abs(float(value) - float(printed)) <= 0.5 * 10**-decimals + 1e-9


# ------------------------------------------------------------------------------------------------------- model state


@pytest.mark.parametrize(
    ("recipe", "parts", "total"),
    [
        ("fp32-adam", (4, 4, 8), 16),
        ("mixed-adam", (2, 2, 12), 16),
        ("mixed-adam-fp32-gradients", (2, 4, 12), 18),
        ("mixed-sgd-momentum", (2, 2, 8), 12),
        ("fp16-inference", (2, 0, 0), 2),
    ],
)
def test_bytes_a_parameter(recipe, parts, total):
    found = f.RECIPES[recipe]
    assert (found.parameter, found.gradient, found.optimizer) == parts
    assert found.total == f.state_bytes(1, recipe).total == total


ZERO_TABLE = {  # arXiv 1910.02054: N -> GB of stages 1, 2, 3 for 7.5B, 128B and 1T
    1: "120 120 120 2048 2048 2048 16000 16000 16000",
    4: "52.5 41.25 30 896 704 512 7000 5500 4000",
    16: "35.6 21.6 7.5 608 368 128 4750 2875 1000",
    64: "31.4 16.6 1.88 536 284 32 4187.5 2218.8 250",
    256: "30.4 15.4 0.47 518 263 8 4046.9 2054.7 62.5",
    1024: "30.1 15.1 0.12 513.5 257.8 2 4011.7 2013.7 15.6",
}


@pytest.mark.parametrize("ranks", ZERO_TABLE)
def test_zero_table(ranks):
    printed = iter(ZERO_TABLE[ranks].split())
    for billions in (7.5, 128, 1000):
        for stage in (1, 2, 3):
            gigabytes = f.state_bytes(billions * 1e9, zero=stage, dp=ranks).total / 1e9
            assert shown(gigabytes, text := next(printed)), (billions, stage, gigabytes, text)


# ----------------------------------------------------------------------------------------------------- communication


def test_two_levels_send_what_one_ring_sends_in_all():
    for algorithm in ("ring_all_reduce", "ring_all_gather", "ring_reduce_scatter"):
        within, across = two_level(algorithm, 8, 4, 32e9)
        assert across.bytes_sent == collective_cost(algorithm, 4, 4e9).bytes_sent
        assert within.bytes_sent + across.bytes_sent == pytest.approx(collective_cost(algorithm, 32, 32e9).bytes_sent)
    with pytest.raises(ValueError, match=r"'tree_all_reduce' in two levels.*Use one of ring_all_reduce"):
        two_level("tree_all_reduce", 8, 4, 1.0)


# -------------------------------------------------------------------------------------------------------- parameters

PARAMETERS = {
    (24, 2304): "1.7",
    (30, 3072): "3.6",
    (36, 4096): "7.5",
    (40, 6144): "18.4",
    (48, 8192): "39.1",
    (60, 10240): "76.1",
    (80, 12288): "145.6",
    (96, 16384): "310.1",
    (105, 20480): "529.6",
    (128, 25600): "1008",
}


def test_exact_count_of_our_own_model():
    from jaxdist.models.base import declare

    def count(tree):
        return sum(count(node) if isinstance(node, dict) else int(np.prod(node.shape)) for node in tree.values())

    for preset in ("proof", "gpt2-124m", "7b"):
        assert ModelShape.of(PRESETS[preset]).parameters == count(declare(PRESETS[preset]))


# ----------------------------------------------------------------------------------------------------- FLOPs and time


@pytest.mark.parametrize(("layers", "width"), PARAMETERS)
def test_iteration_flops_of_megatron(layers, width):
    shape, b, s, v = ModelShape.gpt(layers, width, width // 128), 512, 2048, 51200
    plain = 72 * b * s * layers * width**2 * (1 + s / (6 * width) + v / (12 * width * layers))
    recompute = 96 * b * s * layers * width**2 * (1 + s / (6 * width) + v / (16 * width * layers))
    assert f.iteration_flops(shape, b).value == pytest.approx(plain, rel=1e-12)
    assert f.iteration_flops(shape, b, "block").value == pytest.approx(recompute, rel=1e-12)


# ------------------------------------------------------------------------------------------------------- activations


def test_activation_formulas():
    b, s, h, a, t = 2, 2048, 12288, 96, 8
    sbh, quadratic = s * b * h, 5 * a * s / h

    def of(**kwargs):
        return f.layer_activation_bytes(GPT3, b, **kwargs)

    assert of() == sbh * (34 + quadratic)
    assert of(tp=t) == sbh * (10 + 24 / t + quadratic / t)
    assert of(tp=t, sp=True) == sbh / t * (34 + quadratic)
    assert of(tp=t, sp=True, remat="selective") == 34 * sbh / t
    assert of(tp=t, remat="selective") == sbh * (10 + 24 / t)
    assert of(tp=t, remat="block") == of(remat="block") == 2 * sbh
    assert of(tp=t, sp=True, remat="block") == 2 * sbh / t
    assert of(remat="every-4") == sbh / 2
    assert of(cp=4) == of() / 4
    assert of(flash=True) == of(remat="selective")
    with pytest.raises(ValueError, match=r"remat='every-0': .* Use every-2"):
        of(remat="every-0")


# ---------------------------------------------------------------------------------------------------------- pipeline


@pytest.mark.parametrize(
    ("pp", "m", "chunks", "percent"),
    [(4, 4, 1, "42.9"), (4, 8, 1, "27.3"), (4, 16, 1, "15.8"), (8, 32, 1, "17.9"), (4, 8, 2, "15.8")],
)
def test_bubbles(pp, m, chunks, percent):
    assert shown(100 * f.bubble_share(pp, m, chunks), percent)
    assert f.bubble_over_ideal(pp, m, chunks) == (pp - 1) / (m * chunks)
    table = make_schedule("interleaved" if chunks > 1 else "1f1b", pp, m, chunks)
    assert simulate(table).idle_share == pytest.approx(f.bubble_share(pp, m, chunks))


def test_in_flight():
    for stage in range(4):
        assert f.in_flight("gpipe", 4, 16, stage) == 16
        assert f.in_flight("1f1b", 4, 16, stage) == 4 - stage
        assert f.in_flight("1f1b", 4, 2, stage) == min(2, 4 - stage)
    assert f.in_flight("1f1b", np.array([2, 4]), 16).tolist() == [2, 4]


UTILISATION = [
    (48, 6144, 64, 4, 8, 1.10, 41.5, 43.7),
    (96, 12288, 96, 64, 64, 13.75, 51.4, 52.8),
    (105, 20480, 128, 280, 280, 37.83, 56.0, 57.0),
    (128, 25600, 160, 512, 512, 71.49, 56.3, 57.0),
]


@pytest.mark.parametrize("row", UTILISATION)
def test_published_mfu_and_hfu_fit_the_published_convention(row):
    layers, width, heads, batch, gpus, seconds, mfu, hfu = row
    shape = ModelShape.gpt(layers, width, heads)
    # The seconds are rounded to 0.01 as well: for 22B that is half a percent of them.
    rounding = 0.05 + max(mfu, hfu) * 0.005 / seconds
    speed = batch * 2048 / seconds
    assert 100 * f.mfu(shape, speed, 312e12, gpus).value == pytest.approx(mfu, abs=rounding)
    assert 100 * f.hfu(shape, speed, 312e12, gpus, "selective").value == pytest.approx(hfu, abs=rounding)
    counted = f.hfu(shape, speed, 312e12, gpus, "selective", selective="counted")
    assert 100 * counted.value < hfu - rounding, "one more forward of the core is not what they print"


# ------------------------------------------------------------------------------- layouts, inference, money, conventions


def test_the_closed_forms_import_no_jax():
    modules = "formulas", "collective_cost", "hardware", "time_model", "cost"
    code = f"import sys, {', '.join('jaxdist.plan.' + m for m in modules)}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("billions", "recipe", "gigabytes"),
    [(7, "fp32-adam", 112), (7, "mixed-adam", 112), (70, "fp16-inference", 140), (7, "fp16-inference", 14)],
)
def test_state_of_whole_models(billions, recipe, gigabytes):
    assert f.state_bytes(billions * 1e9, recipe).total == gigabytes * 1e9


def test_tp_and_pp_divide_before_dp():
    alone = f.state_bytes(1e9 / 8, zero=2, dp=4)
    split = f.state_bytes(1e9, zero=2, dp=4, tp=4, pp=2)
    assert (split.parameters, split.gradients, split.optimizer) == (
        alone.parameters,
        alone.gradients,
        alone.optimizer,
    )


def test_columns_equal_numbers():
    zero, dp, tp = np.array([0, 1, 2, 3]), np.array([1, 2, 4, 8]), np.array([8, 4, 2, 1])
    column = f.state_bytes(1e9, zero=zero, dp=dp, tp=tp).total
    assert column.tolist() == [
        f.state_bytes(1e9, zero=z, dp=d, tp=t).total for z, d, t in zip(zero, dp, tp, strict=True)
    ]
    remat = np.array(["none", "selective", "block", "every-2"])
    column = f.layer_activation_bytes(GPT3, 1, tp, True, remat=remat)
    each = [f.layer_activation_bytes(GPT3, 1, int(t), True, remat=str(r)) for t, r in zip(tp, remat, strict=True)]
    assert column.tolist() == each


@pytest.mark.parametrize(("layers", "width"), PARAMETERS)
def test_megatron_parameters(layers, width):
    shape = ModelShape.gpt(layers, width, width // 128)
    assert shown(f.megatron_parameters(shape) / 1e9, PARAMETERS[layers, width])
    assert shape.parameters == pytest.approx(f.megatron_parameters(shape) + 2 * width, abs=0.5)  # the final norm's


def test_llama_counts():
    """nanotron's two models, printed as 1.34B and 8.86B; Llama-3-8B (8.03B) for grouped key/value heads."""
    llama = {"gated_mlp": True, "learned_positions": False, "biases": False}
    assert shown(ModelShape(16, 2048, 32, 8192, 4096, 131072, **llama).parameters / 1e9, "1.34")
    assert shown(ModelShape(32, 4096, 32, 14336, 4096, 131072, tied_embedding=False, **llama).parameters / 1e9, "8.86")
    grouped = ModelShape(32, 4096, 32, 14336, 8192, 128256, num_kv_heads=8, tied_embedding=False, **llama)
    assert shown(grouped.parameters / 1e9, "8.03")


def test_flops_a_parameter_and_token():
    assert f.training_flops(7e9, 1e12) == 6 * 7e21
    assert f.training_flops(7e9, 1e12, full_recompute=True) == 8 * 7e21


@pytest.mark.parametrize(
    ("parameters", "tokens", "devices", "speed", "days"),
    [(175e9, 300e9, 1024, 140e12, "33.9"), (1e12, 450e9, 3072, 163e12, "83")],
)
def test_training_days(parameters, tokens, devices, speed, days):
    """The 83 is for P = 1e12; the model's own 1,008 billion parameters give 84."""
    stated = f.training_days(parameters, tokens, devices, speed)
    assert shown(stated.value, days)
    assert str(stated).endswith("days (8TP/(nX), full recompute)")
    without = f.training_days(parameters, tokens, devices, speed, full_recompute=False)
    assert without.value == pytest.approx(stated.value * 6 / 8) and "6TP" in str(without)


def test_utilisation_follows_palm_and_says_its_convention():
    shape, tokens_per_s, peak = GPT3, 1e5, 312e12
    matmuls = 12 * 96 * 12288**2 + 51200 * 12288
    found = f.mfu(shape, tokens_per_s, peak, 1024)
    assert found.value == pytest.approx(tokens_per_s * (6 * matmuls + 12 * 96 * 12288 * 2048) / (peak * 1024))
    causal, every = (
        f.mfu(shape, tokens_per_s, peak, 1024, attention="causal"),
        f.mfu(shape, tokens_per_s, peak, 1024, counted="all"),
    )
    assert causal.value < found.value < every.value
    assert "full attention" in str(found) and "causal attention" in str(causal) and "embeddings too" in str(every)
    assert found.value * peak * 1024 == pytest.approx(tokens_per_s * f.iteration_flops(shape, 1).value / 2048)
    with pytest.raises(ValueError, match=r"attention='half': .* Use full, causal"):
        f.mfu(shape, 1, 1, attention="half")


@pytest.mark.parametrize(
    ("kwargs", "gib"),
    [
        ({}, "2.67"),
        ({"tp": 8}, "0.54"),
        ({"tp": 8, "sp": True}, "0.33"),
        ({"tp": 8, "sp": True, "remat": "selective"}, "0.10"),
        ({"tp": 8, "remat": "block"}, "0.047"),
    ],
)
def test_activations_of_one_gpt3_layer(kwargs, gib):
    assert shown(f.layer_activation_bytes(GPT3, 1, **kwargs) / GIB, gib)


@pytest.mark.parametrize(("pp", "chunks"), [(4, 2), (8, 3), (6, 2), (1, 2)])
def test_interleaving_factor_is_what_the_schedule_holds(pp, chunks):
    factor = f.interleave_factor(pp, chunks)
    assert factor == 1 + (pp - 1) / (pp * chunks)
    if pp > 1:
        table = make_schedule("interleaved", pp, 4 * pp, chunks)
        assert in_flight(table)[0] == pytest.approx(factor * pp * chunks)
    assert f.interleave_factor(pp, 1) == 1


def test_kv_cache():
    shape = ModelShape(6, 320, 5, 1280, 512, 16000)
    assert shown(f.kv_cache_bytes(shape, 512, itemsize=4) / 1e6, "7.86")
    assert f.kv_cache_bytes(shape, 512, itemsize=4, tp=5) == f.kv_cache_bytes(shape, 512, itemsize=4) / 5
    assert f.kv_cache_bytes(shape, 512, itemsize=4, tp=2) == f.kv_cache_bytes(shape, 512, itemsize=4)
