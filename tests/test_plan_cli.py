"""`experiments.plan` as a user meets it: what it prints and writes, the command it names, and how wrong input ends."""

import json
import re
import shlex
import sys

import pytest
import tyro

import experiments.plan
import experiments.train
from experiments.cli import flags_of, run_program
from experiments.train import TrainFlags
from jaxdist.config import OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.mesh import MeshShape
from jaxdist.models.gpt2 import GPT2
from jaxdist.plan.hardware import find_hardware

SMALL = ["--model", "tiny", "--hardware", "h100", "--nodes", "1", "--global-batch", "64"]


def plan(monkeypatch, capsys, *args) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        run_program(experiments.plan.PlanFlags, experiments.plan.main, "plan")
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def test_it_ranks_explains_and_names_a_command_that_gives_the_same_run(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = plan(monkeypatch, capsys, *SMALL, "--top", "3", "--json", path)
    assert code == 0 and all(line.startswith("searching") for line in err.splitlines())  # on a slow machine
    for said in ("layouts", "Pareto front", "Plain data parallel", "binds", "±", "predicted", "Run it", "GPT-3"):
        assert said in out, said
    record = json.loads(path.read_text())
    assert len(record["rows"]) == 3 and record["num_fitting"] <= record["num_layouts"]
    steps = [row["step_seconds"] for row in record["rows"]]
    assert steps == sorted(steps)
    best = record["rows"][0]
    assert best["memory_bytes"] == pytest.approx(sum(best["memory"].values()))
    assert best["step_seconds"] == pytest.approx(sum(best["time"].values()))
    assert best["device_seconds"] == 8 * best["step_seconds"]
    assert out.index("Run it") < out.index("Best of each mesh") < out.index("Pareto front") < out.index("Why")
    assert re.sub(r" \\\n +", " ", out).count(record["command"]) == 1
    config = tyro.cli(TrainFlags, args=train_flags(record["command"])).run_config()
    parallel = config.parallel
    found = (str(parallel.mesh), parallel.zero, parallel.sp, parallel.remat, parallel.accumulate)
    assert found == tuple(best[name] for name in ("mesh", "zero", "sp", "remat", "accumulate"))
    assert config.batch_size == 64 and config.precision.dtype == "bfloat16"


def train_flags(command: str) -> list[str]:
    """The flags of `experiments.train` in a command, whatever launches it."""
    words = shlex.split(command)
    return words[words.index("experiments.train") + 1 :]


@pytest.mark.parametrize(("nodes", "per_node"), [(None, 2), (1, 8)])
def test_a_mesh_fills_a_part_of_a_node_unless_nodes_are_named(nodes, per_node):
    cluster = experiments.plan.cluster_of_mesh(experiments.plan.PlanFlags(nodes=nodes), find_hardware("h100"), 2)
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, per_node)


CONFIGS = [
    RunConfig(GPT2(4, 128, 4, 512, 128, 256)),
    RunConfig(
        GPT2(6, 96, 6, 100, 64, 300, dropout=0.1),
        ParallelConfig(
            mesh=MeshShape(pp=2, dp=2, tp=2),
            zero=3,
            sp=True,
            remat="every-2",
            accumulate=2,
            reshard_after_forward=False,
            schedule="interleaved",
            chunks=3,
            microbatches=4,
            attention="xla",
            bucket_mb=3.5,
        ),
        OptimizerConfig("lion", lr=1e-4, beta1=0.8, beta2=0.99, clip_norm=0.5),
        PrecisionConfig("bfloat16", "bfloat16"),
        batch_size=32,
        steps=7,
        seed=3,
    ),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_flags_of_a_run_parse_to_the_same_run(config):
    assert tyro.cli(TrainFlags, args=flags_of(config)).run_config() == config


def test_one_layout_has_the_same_report(monkeypatch, capsys):
    layout = ["--mesh", "dp=4,tp=2", "--zero", "1", "--sp", "--accumulate", "2"]
    code, out, _ = plan(monkeypatch, capsys, *SMALL, *layout)
    assert code == 0
    assert "What it takes" in out and "dp=4,tp=2" in out and "ZeRO-1 over dp=4" in out
    command = re.sub(r" \\\n +", " ", out)
    assert "--mesh dp=4,tp=2 --zero 1 --sp --accumulate 2 --batch-size 64" in command and "--dtype bfloat16" in command


def test_the_smallest_cluster_that_meets_a_deadline_and_a_budget(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    args = ["--model", "gpt2-1.5b", "--hardware", "h100", "--global-batch", "512", "--tokens", "5e9", "--top", "2"]
    _, out, _ = plan(monkeypatch, capsys, *args, "--nodes", "1", "--json", path)
    alone = json.loads(path.read_text())["rows"][0]
    deadline = alone["hours"] * (1 + alone["error"]) * 0.7
    limits = ["--deadline", f"{deadline:.3f}h", "--budget", "5000", "--price-per-hour", "2.5"]
    code, out, _ = plan(monkeypatch, capsys, *args, *limits, "--json", path)
    record = json.loads(path.read_text())
    assert code == 0 and record["nodes"] == 2
    assert record["rows"][0]["hours"] * (1 + record["rows"][0]["error"]) <= deadline
    assert re.search(r"16 H100s × \$2.50/h × [\d.]+ h = \$[\d.]+\. Budget \$5,000.00, buffer \$", out)


TINY_RUN = ["--model", "gpt2-124m", "--hardware", "h100", "--global-batch", "64", "--tokens", "5e8"]
PRICE = ["--price-per-hour", "2.5"]


def test_a_budget_is_not_beaten_by_rounding(monkeypatch, capsys):
    code, _, err = plan(monkeypatch, capsys, *TINY_RUN, *PRICE, "--budget", "0.01")
    assert code == 2 and "a budget of $0.01" in err
    said = re.search(r"the cheapest is --nodes \d+ in at most [\d.]+ \w+ for at most \$(\d+\.\d+)", err)
    said = said or re.search(r"the fastest is --nodes \d+ in at most [\d.]+ \w+ for at most \$(\d+\.\d+)", err)
    remedy = re.search(r"Use --budget (\d+)", err)
    assert 0 < float(said[1]) <= float(remedy[1])
    code, out, _ = plan(monkeypatch, capsys, *TINY_RUN, *PRICE, "--budget", remedy[1])
    low, high = map(float, re.search(r"With the bar \$([\d.]+) to \$([\d.]+)\.", out).groups())
    assert code == 0 and 0 < low < high <= float(remedy[1])


def test_the_upper_end_of_the_bar_is_what_a_limit_is_held_against(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    args = [*TINY_RUN, *PRICE, "--nodes", "1"]
    _, out, _ = plan(monkeypatch, capsys, *args, "--json", path)
    row = json.loads(path.read_text())["rows"][0]
    most = 1 + row["error"]
    for flag, value, unit in (("--budget", row["dollars"], ""), ("--deadline", row["hours"] * 60, "m")):
        for part, expected in ((0.999 * most, 2), (1.001 * most, 0)):
            code, _, _ = plan(monkeypatch, capsys, *args, flag, f"{value * part:.6f}{unit}")
            assert code == expected, (flag, part)
    # What is printed is never below what was computed.
    hours, dollars = re.search(r"× ([\d.]+) h = \$([\d.]+)\.", out).groups()
    assert row["hours"] <= float(hours) <= row["hours"] * 1.01
    assert row["dollars"] <= float(dollars) <= row["dollars"] * 1.01


IMPOSSIBLE = ["--model", "gpt2-124m", "--hardware", "a100-80", "--global-batch", "16", "--tokens", "1e13"]
RUN = [*SMALL, "--tokens", "1e9"]
REFUSED = [
    (["--hardware", "h2000"], ["h2000", "Did you mean h200"]),
    ([*IMPOSSIBLE, "--deadline", "1h"], ["no cluster tried meets that", "Use --deadline"]),
    ([*IMPOSSIBLE, "--budget", "3", "--price-per-hour", "2"], ["budget of $3", "Use --budget"]),
    (["--deadline", "soon", "--tokens", "1e9"], ["72h"]),
    (["--budget", "3", "--tokens", "1e9"], ["--price-per-hour"]),
    (["--nodes", "1000000000"], ["--nodes 1e+09", "1,048,576"]),
    ([*SMALL, "--json", "/dev/full"], ["--json '/dev/full': it cannot be written", "No space"]),
    (["--model", "tiny", "--mesh", "pp=1000"], ["--mesh pp=1000", "smaller pp"]),
    ([*SMALL, "--dtype", "float64"], ["--dtype float64", "Use float32 or bfloat16 or float16", "`train` takes"]),
    ([*RUN, "--vendor", "acme"], ["vendor 'acme'", "among aws"]),
    ([*RUN, "--tokens", "nan"], ["--tokens nan"]),
    ([*SMALL, "--hardware-file", "/dev/zero"], ["'/dev/zero'", "it is not a regular file"]),
]


@pytest.mark.parametrize("args, said", REFUSED, ids=[" ".join(args)[-40:] for args, _ in REFUSED])
def test_wrong_input_ends_with_one_sentence_and_a_remedy(monkeypatch, capsys, args, said):
    code, _, err = plan(monkeypatch, capsys, *args)
    assert code == 2 and "Traceback" not in err
    for words in said:
        assert words in err


def test_the_batch_of_an_unknown_cluster_divides_over_doubled_nodes():
    flags = tyro.cli(experiments.plan.PlanFlags, args=["--devices-per-node", "6", "--deadline", "3d"])
    found, _ = experiments.plan.default_batch(flags, 8)
    assert found == 384 and not any(found % (6 * nodes) for nodes in (1, 2, 4, 8))


# ------------------------------------------------------------------------------------------------------- own schedules

OWN_TABLE = """name={name}
0: F0 F1 .  .  B0 W0 B1 W1
1: .  F0 F1 B0 W0 B1 W1 .
"""


@pytest.mark.parametrize("name", ["mine", "zb-h1"])
def test_the_table_in_the_file_is_what_is_planned(monkeypatch, capsys, tmp_path, name):
    path, found = tmp_path / "table.txt", tmp_path / "plan.json"
    path.write_text(OWN_TABLE.format(name=name))
    args = ["--model", "proof", "--hardware", "h100", "--global-batch", "8", "--mesh", "pp=2,dp=2"]
    args += ["--microbatches", "2", "--stages", "1,3", "--schedule", path, "--json", found]
    code, out, err = plan(monkeypatch, capsys, *args)
    assert code == 0, err
    record = json.loads(found.read_text())
    assert f"--schedule {path} --microbatches 2 --stages 1,3" in record["command"]
    code, _, _ = plan(monkeypatch, capsys, *[{str(path): "zb-h1"}.get(str(arg), arg) for arg in args])
    assert record["rows"][0]["time"]["bubble"] > json.loads(found.read_text())["rows"][0]["time"]["bubble"]
    config = tyro.cli(TrainFlags, args=train_flags(record["command"])).run_config()
    assert config.parallel.pipeline.name == name and config.part_layers == (1, 3)
    assert str(path) in out


@pytest.mark.exhaustive
def test_the_best_layouts_are_traced_and_compiled_beside_the_formula(monkeypatch, capsys):
    small = ["--model", "proof", "--hardware", "h100", "--devices-per-node", "4", "--global-batch", "16"]
    code, out, _ = plan(monkeypatch, capsys, *small, "--dtype", "float32", "--compile", "cpu", "--prove", "2")
    assert code == 0
    assert "The same, traced, compiled for cpu" in out
    assert out.count("at the peak") == 2
