"""The calculators of docs/labs/sliders.md, run in Chromium, give the numbers of the package's own functions."""

import dataclasses
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import pytest

from experiments.labs import solutions
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.builders import from_orders, make_schedule
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import Costs, in_flight, simulate
from jaxdist.parallel.pipeline.text import parse_cell
from jaxdist.plan import formulas
from jaxdist.plan.collective_cost import collective_cost
from jaxdist.plan.cost import Cost
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.proof.roofline import Kernel, Roof

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = 50  # of each calculator
# Moves every control to a place that a small generator chooses, and writes down what the page then says.
DRIVER = """
let seed = 1;
const below = (n) => (seed = (seed * 48271) % 2147483647) % n;
const found = {};
for (const place of document.querySelectorAll("[data-calculator]")) {
  found[place.dataset.calculator] = [...Array(SETTINGS)].map(() => {
    for (const control of place.querySelectorAll("input, select")) {
      if (control.type === "range") control.value = below(Number(control.max) + 1);
      else control.selectedIndex = below(control.length);
    }
    place.querySelector("form").dispatchEvent(new Event("input"));
    const shown = [...place.querySelectorAll("dd")].map((each) => each.textContent);
    return [JSON.parse(place.dataset.setting), JSON.parse(place.dataset.results), shown];
  });
}
document.body.innerHTML = `<pre>${JSON.stringify(found).replaceAll("<", "&lt;")}</pre>`;
"""


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict[str, list]:
    """By calculator: (setting, results, texts) of every setting."""
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("Chromium is not installed")
    page = (ROOT / "docs/labs/sliders.md").read_text(encoding="utf-8")
    script = (ROOT / "docs/site/sliders.js").read_text(encoding="utf-8")
    places = "".join(re.findall(r"<div data-calculator.*?</div>", page))
    folder = tmp_path_factory.mktemp("sliders")
    path = folder / "page.html"
    scripts = "".join(f"<script>{code}</script>" for code in (script, f"const SETTINGS = {SETTINGS};", DRIVER))
    html = f"<!doctype html><meta charset=utf-8>{places}{scripts}"
    path.write_text(html, encoding="utf-8")
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder / 'profile'}", "--dump-dom"]
    dom = subprocess.run([chromium, *flags, path.as_uri()], capture_output=True, text=True, timeout=300).stdout
    return json.loads(unescape(re.search(r"<pre>(.*?)</pre>", dom, re.DOTALL)[1]))


def shape_of(model: str) -> formulas.ModelShape:
    config = PRESETS[model]
    if not hasattr(config, "num_kv_heads"):
        return formulas.ModelShape.of(config)
    sizes = (config.num_layers, config.width, config.num_heads, config.ffn_width, config.seq_len, config.vocab_size)
    return formulas.ModelShape(*sizes, config.num_kv_heads, True, config.tied, False, False)


def memory(v: dict) -> dict[str, float]:
    shape = shape_of(v["model"])
    state = formulas.state_bytes(shape.parameters, v["recipe"], v["zero"], v["dp"] * v["cp"], v["tp"], v["pp"])
    remat = "block" if v["recompute"] == "layers" else "none"
    how = {"sp": v["sp"] == "on", "cp": v["cp"], "remat": remat, "dropout": False, "flash": True}
    layer = formulas.layer_activation_bytes(shape, v["rows"], v["tp"], **how)
    kept = formulas.stage_activation_bytes(layer, shape.num_layers, v["pp"], v["microbatches"])
    terms = {"parameters": state.parameters, "gradients": state.gradients, "optimizer": state.optimizer}
    terms |= {"activations": kept, "total": state.total + kept}
    return {name: size / 2**30 for name, size in terms.items()} | {"devices": v["dp"] * v["tp"] * v["pp"] * v["cp"]}


def pipeline(v: dict) -> dict[str, float]:
    p, m, chunks = v["stages"], v["microbatches"], 2 if v["schedule"] == "interleaved" else 1
    if v["schedule"] == "zb-h1":
        lines = solutions.less_bubble(p, m)
        orders = [[parse_cell(word, "the solution") for word in line.split()] for line in lines]
        schedule = from_orders(Schedule("zb-h1", p, m, 1, "loop"), orders)
    else:
        schedule = make_schedule(v["schedule"], p, m, chunks)
    costs = Costs(*(v[name] / chunks for name in ("forward", "backward", "weights")))
    taken = simulate(schedule, costs, waiting="dependencies")
    return {
        "time": taken.makespan,
        "bubble": 100 * taken.idle_share,
        "in flight": max(in_flight(schedule)) / chunks,
    }


def ring(v: dict) -> dict[str, float]:
    names = {"ring": "ring_all_reduce", "tree": "pipelined_tree_all_reduce"}
    if v["ranks"] & (v["ranks"] - 1) == 0:
        names["halving-doubling"] = "halving_doubling_all_reduce"
    costs = {name: collective_cost(known, v["ranks"], v["size"] * 1e6) for name, known in names.items()}
    return {name: 1e3 * each.seconds(v["latency"] * 1e-6, v["bandwidth"] * 1e9) for name, each in costs.items()}


def roofline(v: dict) -> dict[str, float]:
    shape, tokens = shape_of(v["model"]), v["tokens"]
    columns = shape.ffn_width // v["tp"]
    read, written = 2 * shape.width * (tokens + columns), 2 * tokens * columns
    kernel = Kernel("product", "dot", "", 1, read, written, 2.0 * tokens * shape.width * columns, read + written)
    roof = Roof.of(find_hardware(v["card"]), "bfloat16", 1.0, 1.0)
    times = {
        "arithmetic": 1e6 * kernel.flops / roof.flops_per_s,
        "memory": 1e6 * kernel.moved / roof.bytes_per_s,
        "at least": 1e6 * roof.seconds(kernel),
    }
    return times | {"intensity": kernel.flops / kernel.moved}


def deadline(v: dict) -> dict[str, float]:
    flops = find_hardware(v["card"]).peak_flops["bfloat16"] * v["mfu"] / 100
    again = v["recompute"] == "layers"
    parameters = shape_of(v["model"]).parameters
    days = formulas.training_days(parameters, v["tokens"] * 1e9, v["devices"], flops, again).value
    return {"days": days, "cost": Cost(v["devices"], v["price"], 24 * days).dollars}


@pytest.mark.parametrize("ours", [memory, pipeline, ring, roofline, deadline])
def test_the_page_says_what_the_package_computes(found, ours: Callable[[dict], dict[str, float]]):
    settings = found[ours.__name__]
    assert len(settings) == SETTINGS and len({json.dumps(setting) for setting, *_ in settings}) > SETTINGS / 2
    for setting, results, texts in settings:
        expected = ours(setting)
        assert {name for name, *_ in results} == expected.keys()
        for (name, value, unit, digits), text in zip(results, texts, strict=True):
            assert value == pytest.approx(expected[name], rel=1e-12, abs=1e-10), (setting, name)
            number = float(text.removesuffix(unit).replace(",", ""))
            assert abs(number - expected[name]) <= 0.500001 * 10**-digits, (setting, name)


def test_models_and_cards_are_those_of_the_package():
    script = (ROOT / "docs/site/sliders.js").read_text(encoding="utf-8")
    models = re.findall(r'^    "([\w.-]+)": (\[.*\]),$', script, re.MULTILINE)
    assert len(models) == 6
    for name, row in models:
        config, shape, kind = PRESETS[name], shape_of(name), json.loads(row)[-1]
        sizes = (*dataclasses.astuple(shape)[:3], shape.num_kv_heads or shape.num_heads)
        assert json.loads(row)[:-1] == [*sizes, shape.ffn_width, shape.seq_len, shape.vocab_size]
        assert kind == ("llama" if shape.gated_mlp else "gpt")
        assert shape.parameters == pytest.approx(num_parameters(config), rel=1e-3)
    names = ("CARDS", "PEAK", "HBM")
    (cards,), (peaks,), (speeds,) = (re.findall(rf"const {name} = (\{{.*?\}});", script) for name in names)
    for card, size in json.loads(cards).items():
        assert find_hardware(card).memory_bytes == size * 2**30
    for card, flops in json.loads(peaks).items():
        assert find_hardware(card).peak_flops["bfloat16"] == flops
    for card, speed in json.loads(speeds).items():
        assert find_hardware(card).memory_bytes_per_s == speed
    (recipes,) = re.findall(r"const RECIPES = (\{.*?\});", script, re.DOTALL)
    for name, row in json.loads(recipes).items():
        assert [*dataclasses.astuple(formulas.RECIPES[name])] == row
