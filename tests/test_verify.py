"""The comparison itself: whatever is missing, empty or off in anything that a run holds is reported."""

import dataclasses

import jax
import numpy as np
import pytest
from conftest import DEVICES

from experiments.strategies import Strategy
from jaxdist.mesh import make_mesh
from jaxdist.step import build_program
from jaxdist.verify import compare, observe, random_batches, unequal_copies

CONFIG = Strategy("", "", dtype="bfloat16", num_layers=1, batch_size=2).run_config()
TREES = ["parameters", "moments", "counters", "rounded"]


@pytest.fixture(scope="module")
def run():
    return observe(CONFIG, DEVICES, random_batches(CONFIG, 2))


def wrong(run, reference, config=CONFIG):
    return {(d.kind, d.name) for d in compare(config, run, reference) if not d.ok}


def with_tree(run, tree, change):
    """The run with `change` made to a copy of one of its trees; the gradients of each step are trees too."""
    if tree.startswith("gradients"):
        step, gradients = int(tree[-1]), list(run.gradients)
        gradients[step] = change(dict(gradients[step]))
        return dataclasses.replace(run, gradients=gradients)
    return dataclasses.replace(run, **{tree: change(dict(getattr(run, tree)))})


def test_a_run_equals_itself(run):
    assert not wrong(run, run)


@pytest.mark.parametrize("tree", [*TREES, "gradients 0", "gradients 1"])
def test_a_missing_leaf_or_an_empty_tree_is_reported(run, tree):
    def without_one(values):
        values.popitem()
        return values

    assert wrong(with_tree(run, tree, without_one), run)
    assert wrong(run, with_tree(run, tree, without_one)) or tree == "rounded"  # rounded masters are the run's own
    empty = with_tree(run, tree, lambda values: {})
    assert wrong(empty, run) and wrong(empty, empty)


@pytest.mark.parametrize("tree", [*TREES, "gradients 0", "gradients 1"])
def test_a_wrong_value_of_any_leaf_is_reported(run, tree):
    names = run.gradients[0] if tree.startswith("gradients") else getattr(run, tree)
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
