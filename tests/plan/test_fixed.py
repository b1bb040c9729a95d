"""A search in which some settings are fixed: the best of all layouts that have them, and refusals that say why not."""

import dataclasses
import json
import random

import numpy as np
import pytest
from support.programs import run

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES as MESH_AXES
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.parallel.pipeline.builders import NAMES
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import Candidates, Fixed, layouts_of_mesh, legal_meshes, rank, score, search
from jaxdist.strategy import PrecisionConfig

GPT = GPT2Config(num_layers=4, width=1024, num_heads=16, ffn_width=4096, seq_len=1024, vocab_size=50257)
EXPERTS = DecoderConfig(
    4, 1024, 16, num_kv_heads=8, head_dim=64, ffn_width=2048, seq_len=8192, vocab_size=32000, num_experts=4, top_k=2
)
CLUSTERS = (
    (GPT, 16, Cluster(find_hardware("h100"), 2, 4)),
    (GPT, 16, Cluster(find_hardware("a100-80"), 1, 4)),
    (EXPERTS, 8, Cluster(find_hardware("h100"), 2, 4)),
)
AXES = {"pp": (1, 2, 4), "tp": (1, 2, 4), "dp": (1, 2, 4), "cp": (1, 2), "replica": (1, 2), "ep": (1, 2, 4)}
COLUMNS = {
    "zero": (0, 1, 2, 3),
    "sp": (0, 1),
    "overlap": (0, 1),
    "schedule": (NAMES.index("1f1b"), NAMES.index("gpipe"), NAMES.index("zb-v"), NAMES.index("interleaved")),
    "every": (0, 1, 2),
    "selective": (0, 1),
    "accumulate": (1, 2),
    "microbatches": (4, 8),
    "keep": (0, 1),
    "over_tp": (0, 1),
}


def some_fixed(seed: int) -> Fixed:
    draw = random.Random(seed)
    axes = {axis: draw.choice(AXES[axis]) for axis in draw.sample(sorted(AXES), draw.choice((0, 1, 1, 2)))}
    columns = {name: draw.choice(COLUMNS[name]) for name in draw.sample(sorted(COLUMNS), draw.choice((1, 1, 2)))}
    return Fixed(axes, columns)


def with_fixed(model, batch: int, cluster: Cluster, fixed: Fixed) -> Candidates | None:
    """Every layout, chosen one by one."""
    meshes = legal_meshes(model, cluster.num_devices, batch)
    every = Candidates.join(block for mesh in meshes for block in layouts_of_mesh(model, mesh, batch))
    have = np.ones(len(every), bool)
    for name, value in (fixed.axes | fixed.columns).items():
        have &= getattr(every, name) == value
    for i in np.flatnonzero(have):
        have[i] = fixed.allows({axis: int(getattr(every, axis)[i]) for axis in MESH_AXES})
    return every.take(have) if have.any() else None


@pytest.mark.exhaustive
@pytest.mark.parametrize("cluster", range(len(CLUSTERS)))
@pytest.mark.parametrize("seed", range(4))
def test_the_best_is_that_of_all_layouts_with_what_is_fixed(seed, cluster):
    (model, batch, cluster), fixed = CLUSTERS[cluster], some_fixed(100 * cluster + seed)
    config, attention = (
        RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=batch),
        ("cudnn", "xla")[seed % 2],
    )
    layouts = with_fixed(model, batch, cluster, fixed)
    if layouts is None:
        with pytest.raises(ConfigError):
            search(config, cluster, attention, fixed=fixed)
        return
    scored, found = score(config, layouts, cluster, attention), search(config, cluster, attention, fixed=fixed)
    for name, value in (fixed.axes | fixed.columns).items():
        assert (getattr(found.layouts, name) == value).all(), name
    expected, best = int(rank(scored)[0]), int(rank(found)[0])
    assert found.fits[best] and scored.fits[expected]
    assert found.time.total[best] == pytest.approx(scored.time.total[expected], rel=1e-9)


NARROW = DecoderConfig(2, 384, 6, num_kv_heads=2, head_dim=64, ffn_width=1024, seq_len=32768, vocab_size=1000)


@pytest.mark.parametrize(
    ("model", "fixed", "mesh"),
    [
        (NARROW, Fixed({"cp": 2}, {"kind": 0}), "dp=2,cp=2,tp=2"),  # which exchanges no heads
        (dataclasses.replace(GPT, num_layers=1), Fixed({}, {"accumulate": 8}), "tp=8"),  # over two nodes
    ],
)
def test_meshes_that_a_search_leaves_out_are_there_where_what_is_fixed_needs_them(model, fixed, mesh):
    config = RunConfig(model, precision=PrecisionConfig("bfloat16"), batch_size=8 if model is not NARROW else 2)
    quick, whole = (search(config, CLUSTERS[0][2], "cudnn", fixed=fixed, thorough=each) for each in (False, True))
    best, expected = (int(rank(found)[0]) for found in (quick, whole))
    assert str(quick.layouts.mesh(best)) == str(whole.layouts.mesh(expected)) == mesh


def planned(capfd, tmp_path, words: str) -> dict:
    path = tmp_path / "plan.json"
    code, out, err = run(capfd, "plan", *f"--model gpt2-124m --batch-size 64 {words} --json {path}".split())
    assert code == 0, err
    return json.loads(path.read_text()) | {"said": out}


def test_axes_of_a_mesh_of_fewer_devices_are_fixed_and_the_rest_is_searched(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--nodes 1 --mesh tp=4 --zero 2 --no-overlap")
    assert {(row["mesh"], row["zero"], row["overlap"]) for row in plan["rows"]} == {("dp=2,tp=4", 2, False)}
    [said] = [each for each in plan["sentences"] if each.startswith("Fixed:")]
    assert "--mesh tp=4, --no-overlap, --zero 2" in said and "--mesh tp=4 alone" in said and "--mesh dp=8" in said
    free = planned(capfd, tmp_path, "--nodes 1")
    assert free["rows"][0]["step_seconds"] <= plan["rows"][0]["step_seconds"]
    assert not any(each.startswith("Fixed:") for each in free["sentences"])


def test_arrays_to_repeat_are_chosen_of_layouts_that_have_what_is_fixed(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--nodes 1 --zero 1 --accumulate 2 --max-gib 2")
    assert {(row["zero"], row["accumulate"]) for row in plan["rows"]} == {(1, 2)}
    assert any(row["remat"].startswith("repeat:") for row in plan["rows"])


def test_a_size_of_one_fixes_that_there_is_none(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--nodes 2 --mesh pp=1,tp=1 --remat block")
    assert all("pp" not in row["mesh"] and "tp" not in row["mesh"] for row in plan["rows"])
    assert {row["remat"] for row in plan["rows"]} == {"block"}


@pytest.mark.parametrize("words", ["--unroll-layers no", "--seq-len 8200 --loss-chunks 8 --batch-size 2"])
def test_what_all_layouts_have_is_left_out_where_it_has_no_place(words, capfd, tmp_path):
    plan = planned(capfd, tmp_path, f"--nodes 1 --simplest-within 0 {words}")
    assert plan["command"] and "--overlap" in plan["command"]


def test_experts_are_fixed_without_the_ranks_they_are_over(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--nodes 1 --mesh ep=2 --model moe-proof")
    assert plan["rows"] and all("ep=2" in row["mesh"] for row in plan["rows"])


def test_a_file_fixes_what_it_sets_to_other_than_the_default(capfd, tmp_path):
    (tmp_path / "some.toml").write_text("[parallel]\nzero = 2\nschedule = '1f1b'\ncp_kind = 'ring'\n")
    plan = planned(capfd, tmp_path, f"--nodes 1 --config {tmp_path}/some.toml")
    assert {row["zero"] for row in plan["rows"]} == {2} and plan["rows"][0]["mesh"] == "dp=8"


def test_a_mesh_with_a_deadline_names_its_layout(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--mesh dp=4,tp=2 --tokens 1e9 --deadline 30d")
    assert plan["num_layouts"] == 1 and plan["rows"][0]["mesh"] == "dp=4,tp=2"


@pytest.mark.parametrize(
    ("words", "culprits"),
    [
        ("--nodes 1 --mesh pp=1 --schedule zb-h1 --overlap", "--mesh pp=1 with --schedule zb-h1 on 8 devices"),
        ("--nodes 1 --cp-kind ring --zero 1", "--cp-kind ring on 8 devices"),
        ("--nodes 2 --mesh tp=8", "--num-heads 12 cannot be split over tp=8"),
        ("--nodes 2 --mesh dp=3", "--mesh dp=3 on 16 devices"),
        ("--nodes 1 --mesh ep=2", "ep=2 with 12 layers, width 768, context 1024"),
        ("--nodes 1 --remat auto-24", "--remat auto-24"),
        ("--nodes 1 --remat last-3", "--remat last-3"),
        ("--nodes 1 --remat every-0", "--remat every-0"),
        ("--nodes 1 --schedule mine.json", "--schedule mine.json"),
        ("--nodes 1 --stages 3,3,3,3", "--stages 3,3,3,3"),
    ],
)
def test_what_contradicts_is_named(words, culprits, capfd):
    code, _, err = run(capfd, "plan", *f"--model gpt2-124m --batch-size 64 {words}".split())
    assert code == 2 and f"error: {culprits}:" in err


def test_what_would_fit_is_of_meshes_that_the_optimizer_takes(capfd, tmp_path):
    plan = planned(capfd, tmp_path, "--optimizer adafactor --mesh dp=8 --max-gib 1")
    assert plan["sentences"][0].endswith("beside it does: leave --mesh out to search all.")


def test_a_downloaded_model_is_not_planned_at_all_its_positions_unless_asked(capfd, tmp_path):
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "max_position_embeddings": 131072, "vocab_size": 1000, **sizes}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for more, length in (([], 4096), (["--seq-len", "16384"], 16384)):
        path = tmp_path / "plan.json"
        asked = f"--model {tmp_path} --nodes 1 --mesh dp=8 --batch-size 64 --json {path}".split()
        code, out, err = run(capfd, "plan", *asked, *more)
        assert code == 0, err
        assert json.loads(path.read_text())["model"]["seq_len"] == length
        assert ("the model allows 131,072 tokens" in out) == (not more)
