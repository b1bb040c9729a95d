"""The comparison itself: whatever is missing, empty or off in anything that a run holds is reported."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from conftest import DEVICES

from experiments.strategies import Strategy
from jaxdist.data.batches import random_batches
from jaxdist.mesh import make_mesh
from jaxdist.parity import Difference, Observed, compare, observe, random_parameters, settled, unequal_copies, worst
from jaxdist.placement import make_layout
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.traffic import predicted
from jaxdist.train.program import build_program

CONFIG = Strategy("", "", dtype="bfloat16", num_layers=1, batch_size=2).run_config()
TREES = ["parameters", "moments", "counters", "rounded"]


@pytest.fixture(scope="module")
def run():
    return observe(CONFIG, DEVICES, random_batches(CONFIG, 2))


def wrong(run, reference, config=CONFIG):
    return {(d.kind, d.name) for d in compare(config, run, reference) if not d.ok}


def with_tree(run, tree, change):
    """The run with `change` made to a copy of one of its trees; those of each step are trees too."""
    if tree in STEPS:
        tree, step = tree.split()
        series = list(getattr(run, tree))
        series[int(step)] = change(dict(series[int(step)]))
        return dataclasses.replace(run, **{tree: series})
    return dataclasses.replace(run, **{tree: change(dict(getattr(run, tree)))})


def test_what_a_run_sends_is_what_is_predicted():
    config = Strategy("", "dp=2", num_layers=1, batch_size=2).run_config()
    layout = make_layout(config.model, config.parallel)
    found = observe(config, DEVICES, random_batches(config, 1))
    assert found.sent_bytes == total_sent(predicted(config, layout), config.parallel.mesh) > 0


def test_a_run_equals_itself(run):
    assert not wrong(run, run)


STEPS = [f"{tree} {step}" for tree in ("gradients", "group_norms") for step in (0, 1)]


@pytest.mark.parametrize("tree", [*TREES, *STEPS])
def test_a_missing_leaf_or_an_empty_tree_is_reported(run, tree):
    def without_one(values):
        values.popitem()
        return values

    assert wrong(with_tree(run, tree, without_one), run)
    assert wrong(run, with_tree(run, tree, without_one)) or tree == "rounded"  # rounded masters are the run's own
    empty = with_tree(run, tree, lambda values: {})
    assert wrong(empty, run) and wrong(empty, empty)


@pytest.mark.parametrize("tree", [*TREES, *STEPS])
def test_a_wrong_value_of_any_leaf_is_reported(run, tree):
    names = getattr(run, tree[:-2])[0] if tree in STEPS else getattr(run, tree)
    for name in names:
        changed = with_tree(run, tree, lambda values, name=name: values | {name: 1.5 * values[name] + 0.1})
        assert {found for _, found in wrong(changed, run)} == {name}


@pytest.mark.parametrize("series", ["losses", "norms", "rates"])
def test_a_wrong_number_of_any_step_is_reported(run, series):
    for step in range(2):
        values = list(getattr(run, series))
        values[step] *= 1.2
        assert {name for _, name in wrong(dataclasses.replace(run, **{series: values}), run)} == {f"step {step + 1}"}
    assert wrong(dataclasses.replace(run, evaluation=1.2 * run.evaluation), run) == {("loss", "evaluation")}
    with pytest.raises(ValueError, match=r"zip\(\) argument"):
        wrong(dataclasses.replace(run, **{series: getattr(run, series)[:1]}), run)


def test_a_nan_is_a_difference(run):
    changed = with_tree(run, "parameters", lambda values: values | {"tokens": np.full_like(values["tokens"], np.nan)})
    assert ("parameter", "tokens") in wrong(changed, run)


def test_float64_settles_what_is_within_a_few_roundings():
    """One device is a rounding off; a mesh may be eight of it, whatever the kind of number."""

    def off_by(roundings: float) -> Observed:
        x, norm = {"w": np.full(3, 1 + roundings / 1024)}, {"blocks": 1 + roundings / 1024}
        return Observed([x, x], x, moments=x, group_norms=[norm, norm])

    names = ("parameter", "moment", "gradient", "gradient of step 2", "gradient norm", "gradient norm of step 2")
    found = [Difference(kind, "blocks" if "norm" in kind else "w", math.inf, 1e-6, 1.0, 1.0) for kind in names]
    for roundings, ok in ((8, True), (9, False)):
        judged = settled(found, off_by(roundings), off_by(1), off_by(0))
        assert [each.ok for each in judged] == [ok] * len(names)
    assert {each.error for each in settled(found, off_by(8), off_by(1), off_by(0))} == {8.0}


def test_weights_that_are_not_their_masters_rounded_are_reported(run):
    """What the reference holds does not matter: this is a fact of one state."""
    off = with_tree(run, "rounded", lambda values: values | {"positions": np.nextafter(values["positions"], 9)})
    assert wrong(off, off) == {("bfloat16 parameter", "positions")}


def test_copies_that_differ_are_reported(run):
    config = Strategy("", "dp=2", num_layers=1, batch_size=2).run_config()
    program = build_program(config, make_mesh(config.parallel.mesh, DEVICES))
    state = program.init(0)
    assert unequal_copies(state) == ()
    table = state.params["tokens"]
    parts = [part.data if rank == 0 else part.data + 1 for rank, part in enumerate(table.addressable_shards)]
    drifted = jax.make_array_from_single_device_arrays(table.shape, table.sharding, parts)
    state = state._replace(params={**state.params, "tokens": drifted})
    assert unequal_copies(state) == ("params.tokens",)
    assert wrong(dataclasses.replace(run, unequal=("params.tokens",)), run) == {("copies", "params.tokens")}


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "adafactor"])
def test_in_64_bits_no_element_with_a_gradient_may_be_off(run, optimizer):
    """In 32 bits an element counts as much as its gradient; here only one whose gradient is noise is excused."""
    config = Strategy("", "", dtype="float64", optimizer={"name": optimizer}).run_config()
    gradient = np.array([1.0, 1e-6, 1e-14])
    start = dataclasses.replace(run, parameters={"x": np.zeros(3)}, gradients=[{"x": gradient}] * 2)
    for element, counts in enumerate((True, True, optimizer == "adamw")):
        off = np.zeros(3)
        off[element] = config.optimizer.lr
        changed = dataclasses.replace(start, parameters={"x": off})
        assert (("parameter", "x") in wrong(changed, start, config)) == counts


# ---------------------------------------------------------------------------------------------------------------------
# Tolerances, on runs made up for the purpose
# ---------------------------------------------------------------------------------------------------------------------

# first gradients, losses, what follows an update
ALLOWED = {
    "float32": (1e-5, 1e-5, 2e-5),
    "float64": (1e-10, 1e-10, 2e-10),
    "bfloat16": (8e-2, 1e-3, 8e-2),
    "float16": (1e-2, 2e-4, 1e-2),
}


def made_up(dtype) -> Observed:
    ones = np.ones(4)
    return Observed(
        losses=[1.0, 1.0],
        norms=[1.0, 1.0],
        group_norms=[{"x": 1.0}, {"x": 1.0}],
        rates=[1.0, 1.0],
        gradients=[{"x": ones}, {"x": ones}],
        parameters={"x": np.zeros(4)},
        moments={"m": ones},
        counters={"step": 2.0},
        evaluation=1.0,
        rounded={"x": np.zeros(4)} if dtype in ("bfloat16", "float16") else {},
    )


@pytest.mark.parametrize("dtype", ALLOWED)
def test_every_tolerance_is_the_one_that_is_stated(dtype):
    config = Strategy("", "", dtype=dtype).run_config()
    start, (gradient, loss, later) = made_up(dtype), ALLOWED[dtype]
    rate = 1e-10 if dtype == "float64" else 1e-5

    def second(values, factor):
        return [values[0], factor * values[1]]

    def off(kind, error):
        grown = 1 + error
        return {
            "losses": {"losses": second(start.losses, grown)},
            "evaluation": {"evaluation": grown},
            "first norm": {"norms": [grown, 1.0]},
            "second norm": {"norms": second(start.norms, grown)},
            "first group": {"group_norms": [{"x": grown}, {"x": 1.0}]},
            "second group": {"group_norms": [{"x": 1.0}, {"x": grown}]},
            "rates": {"rates": second(start.rates, grown)},
            "first gradient": {"gradients": [{"x": grown * np.ones(4)}, start.gradients[1]]},
            "second gradient": {"gradients": [start.gradients[0], {"x": grown * np.ones(4)}]},
            "moment": {"moments": {"m": grown * np.ones(4)}},
        }[kind]

    allowed = {
        **{"losses": loss, "evaluation": loss, "first norm": gradient, "second norm": later, "rates": rate},
        **{"first gradient": gradient, "second gradient": later, "moment": 2 * gradient},
        **{"first group": gradient, "second group": later},
    }
    for kind, tolerance in allowed.items():
        for share, passes in ((0.99, True), (1.01, False)):
            found = wrong(dataclasses.replace(start, **off(kind, share * tolerance)), start, config)
            assert bool(found) != passes, (kind, share, found)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd", "lion"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_parameter_may_be_off_by_its_share_of_an_update(dtype, optimizer):
    """In units of the largest total update, weighted by the gradient where the rule divides by it."""
    config = Strategy("", "", dtype=dtype, optimizer={"name": optimizer}).run_config()
    weight = 0.1 if optimizer != "sgd" and dtype != "float64" else 1.0
    unit = 2 * config.optimizer.lr * 2 * ALLOWED[dtype][0]  # LATER, two steps
    peak = 3.0
    gradient = peak * np.array([0.1, 1.0, 0.5, 0.5])
    start = dataclasses.replace(made_up(dtype), gradients=[{"x": gradient}] * 2, rounded={})
    gap = unit * (peak if optimizer == "sgd" else 1 / weight)
    for share, passes in ((0.99, True), (1.01, False)):
        off = np.array([share * gap, 0, 0, 0])
        changed = dataclasses.replace(start, parameters={"x": off})
        assert (("parameter", "x") not in wrong(changed, start, config)) == passes, share


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_what_is_near_0_in_any_step_may_have_either_sign_under_lion(dtype):
    """Near 0 in the first step, or in the second, where gradients cancel. Clipping is of a whole step."""
    config = Strategy("", "", dtype=dtype, optimizer={"name": "lion"}).run_config()
    one, two = config.optimizer.beta1, config.optimizer.beta2
    cancels = -one * (1 - two) / (1 - one)  # of the first gradient, in the second step
    gradients = [np.array([1.0, 1e-9, 1.0, 0.5]), np.array([1.0, 1.0, cancels, 0.5])]
    start = dataclasses.replace(made_up(dtype), gradients=[{"x": g} for g in gradients], rounded={})
    for element, passes in enumerate((False, True, True, False)):
        off = np.zeros(4)
        off[element] = 2 * config.optimizer.lr
        changed = dataclasses.replace(start, parameters={"x": off})
        assert (("parameter", "x") not in wrong(changed, start, config)) == passes, element


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 1e-5), ("bfloat16", 8e-3), ("float16", 1e-3)])
def test_counts_and_the_biases_that_follow_them_are_judged_by_themselves(dtype, unit):
    """A count to its rounding, whatever the learning rate is; a bias by whether its count was at the mean."""
    mixture = {"balance_rate": 0.01}
    config = Strategy("", "", dtype=dtype, preset="moe-proof", model=mixture).run_config()
    load, bias = (f"blocks.mlp.router.{name}[0]" for name in ("load", "bias"))
    counts, above = np.array([1.0, 0.2, 0.6, 0.2]), np.array([0.5, -0.3, unit / 4, -0.3])
    gradients = [{load: counts, bias: above}] * 2
    start = dataclasses.replace(
        made_up(dtype), gradients=gradients, parameters={load: counts, bias: np.zeros(4)}, rounded={}
    )

    def found(name, off):
        parameters = start.parameters | {name: start.parameters[name] + np.array(off)}
        found = {kind for kind, _ in wrong(dataclasses.replace(start, parameters=parameters), start, config)}
        return found - {f"{dtype} parameter"}  # which nothing has rounded here

    assert found(load, [0, 0.9 * unit, 0, 0]) == set() and found(load, [0, 1.1 * unit, 0, 0]) == {"count"}
    assert found(bias, [0, 0, 0.02, 0]) == set() and found(bias, [0.02, 0, 0, 0]) == {"balance"}


def test_batches_differ_and_ignore_targets_unevenly():
    config = Strategy("", "", batch_size=4).run_config()
    first, second = random_batches(config, 2)
    assert not np.array_equal(first["inputs"], second["inputs"])
    length = config.model.seq_len
    for batch in (first, second):
        counted = batch["targets"] >= 0
        assert counted.sum(1).tolist() == [length - row * length // 8 for row in range(4)]
        assert counted[:, :-1][counted[:, 1:]].all()  # what is ignored is the end
        np.testing.assert_array_equal(
            batch["targets"][:, :-1][counted[:, :-1]], batch["inputs"][:, 1:][counted[:, :-1]]
        )
        assert batch["inputs"].min() >= 0 and batch["inputs"].max() < config.model.vocab_size
        np.testing.assert_array_equal(batch["rows"], np.arange(4))
    np.testing.assert_array_equal(random_batches(config, 1)[0]["inputs"], first["inputs"])
    assert not np.array_equal(random_batches(config, 1, seed=2)[0]["inputs"], first["inputs"])


def test_start_values_are_random_in_every_leaf():
    config = Strategy("", "").run_config()
    layout = make_layout(config.model, config.parallel)
    drawn = random_parameters(config, layout)
    assert {leaf.name: leaf.shape for leaf in jax.tree.leaves(layout.leaves)} == {k: x.shape for k, x in drawn.items()}
    for name, x in drawn.items():
        real = x[: config.model.vocab_size] if name == "tokens" else x
        mean, spread = (1, 0.2) if name.endswith("scale") else (0, 0.08)
        assert x.dtype == np.float32 and abs(real.mean() - mean) < spread and abs(real.std() / spread - 1) < 0.25, name
    assert not drawn["tokens"][config.model.vocab_size :].any()


@pytest.mark.parametrize("peak", [1e-6, 1.0, 1e6])
def test_what_excuses_an_element_in_64_bits_is_its_share_of_the_leafs_largest_gradient(run, peak):
    config = Strategy("", "", dtype="float64", optimizer={"name": "lion"}).run_config()
    gradient = peak * np.array([1.0, 1e-14])
    start = dataclasses.replace(run, parameters={"x": np.zeros(2)}, gradients=[{"x": gradient}] * 2)
    off = dataclasses.replace(start, parameters={"x": np.array([0.0, config.optimizer.lr])})
    assert ("parameter", "x") not in wrong(off, start, config)


@pytest.mark.parametrize("dtype", ALLOWED)
def test_one_element_counts_by_itself_in_32_and_64_bits(dtype):
    config = Strategy("", "", dtype=dtype).run_config()
    start, tolerance = made_up(dtype), ALLOWED[dtype][0]
    one = np.array([1 + 1.5 * tolerance, 1, 1, 1])  # 0.75 of the tolerance by L2 norm
    changed = dataclasses.replace(start, gradients=[{"x": one}, start.gradients[1]])
    assert bool(wrong(changed, start, config)) == (dtype in ("float32", "float64"))


def test_rounding_of_a_parameter_itself_is_no_difference():
    """An update of a large parameter is rounded to its last place: four of them a step are allowed, and no more."""
    config = Strategy("", "").run_config()
    eps = float(np.finfo(np.float32).eps)
    start = dataclasses.replace(made_up("float32"), parameters={"x": 1e4 * np.ones(4)})
    for units, passes in ((7.9, True), (8.1, False)):
        changed = dataclasses.replace(start, parameters={"x": 1e4 * np.ones(4) * (1 + units * eps)})
        assert (not wrong(changed, start, config)) == passes


def test_the_worst_difference_is_the_furthest_beyond_its_tolerance(run):
    found = compare(CONFIG, dataclasses.replace(run, evaluation=2 * run.evaluation), run)
    assert worst(found).name == "evaluation" and worst(found, "loss").name == "evaluation"
    assert worst(found, "gradient").kind == "gradient"
    lost = compare(CONFIG, dataclasses.replace(run, norms=[float("nan"), *run.norms[1:]], evaluation=9.0), run)
    assert worst(lost).kind == "gradient norm"
    exact = [Difference("counter", "a", 0.0, 0.0, 1, 1), Difference("loss", "b", 0.5, 1.0, 1, 1)]
    assert worst(exact).name == "b"
    assert worst([*exact, Difference("counter", "c", 1e-3, 0.0, 1, 1)]).name == "c"
