"""`experiments.plan` as a user meets it: what it prints and writes, the command it names, and how wrong input ends."""

import json
import re
import shlex
import sys
from html.parser import HTMLParser

import pytest
import tyro

import experiments.plan
from experiments.cli import flags_of, run_program
from experiments.train import TrainFlags
from jaxdist.config import ModelConfig, OptimizerConfig, ParallelConfig, PrecisionConfig, RunConfig
from jaxdist.mesh import MeshShape

SMALL = ["--model", "tiny", "--hardware", "h100", "--nodes", "1", "--global-batch", "64"]


def plan(monkeypatch, capsys, *args) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    monkeypatch.setattr(sys, "argv", ["plan", *map(str, args)])
    with pytest.raises(SystemExit) as stop:
        run_program(experiments.plan.PlanFlags, experiments.plan.main, "experiments.plan")
    out, err = capsys.readouterr()
    return stop.value.code or 0, out, err


def test_it_ranks_explains_and_names_a_command_that_gives_the_same_run(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = plan(monkeypatch, capsys, *SMALL, "--top", "3", "--json", path)
    assert code == 0 and not err
    for said in ("layouts", "Pareto front", "Plain data parallel", "binds", "±", "predicted", "Run it"):
        assert said in out, said
    record = json.loads(path.read_text())
    assert len(record["rows"]) == 3 and record["num_fitting"] <= record["num_layouts"]
    steps = [row["step_seconds"] for row in record["rows"]]
    assert steps == sorted(steps)
    best = record["rows"][0]
    assert best["memory_bytes"] == pytest.approx(sum(best["memory"].values()))
    assert best["step_seconds"] == pytest.approx(sum(best["time"].values()))
    command = next(line for line in out.splitlines() if line.startswith("python -m experiments.train"))
    assert command == record["command"]
    config = tyro.cli(TrainFlags, args=shlex.split(command)[3:]).run_config()
    parallel = config.parallel
    found = (str(parallel.mesh), parallel.zero, parallel.sp, parallel.remat, parallel.accumulate)
    assert found == tuple(best[name] for name in ("mesh", "zero", "sp", "remat", "accumulate"))
    assert config.batch_size == 64 and config.precision.dtype == "bfloat16"


CONFIGS = [
    RunConfig(ModelConfig(4, 128, 4, 512, 128, 256)),
    RunConfig(
        ModelConfig(6, 96, 6, 100, 64, 300, dropout=0.1),
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
            grad_sync="flat",
        ),
        OptimizerConfig("lion", lr=1e-4, clip_norm=0.5),
        PrecisionConfig("bfloat16", "bfloat16"),
        batch_size=32,
        steps=7,
        seed=3,
    ),
    RunConfig(ModelConfig(32, 4096, 32, 10000, 2048, 50257), ParallelConfig(mesh=MeshShape(tp=4))),
]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_flags_of_a_run_parse_to_the_same_run(config):
    assert tyro.cli(TrainFlags, args=flags_of(config)).run_config() == config


def test_one_layout_has_the_same_report(monkeypatch, capsys):
    layout = ["--mesh", "dp=4,tp=2", "--zero", "1", "--sp", "--accumulate", "2"]
    code, out, _ = plan(monkeypatch, capsys, *SMALL, *layout)
    assert code == 0
    assert "What it takes" in out and "dp=4,tp=2" in out and "ZeRO-1 over dp=4" in out
    assert "--mesh dp=4,tp=2 --batch-size 64 --dtype bfloat16 --zero 1 --sp --accumulate 2" in out


def test_one_layout_that_does_not_fit_is_told_what_would(monkeypatch, capsys):
    args = ["--model", "7b", "--hardware", "h100", "--mesh", "dp=8", "--global-batch", "16"]
    code, out, _ = plan(monkeypatch, capsys, *args)
    assert code == 0
    assert "It does not fit" in out and "--mesh dp=8 --zero 3" in out
    assert "optimiser state alone needs more than that" in out


def test_the_smallest_cluster_that_meets_a_deadline_and_a_budget(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.json"
    args = ["--model", "gpt2-124m", "--hardware", "h100", "--global-batch", "64", "--tokens", "5e9", "--top", "2"]
    _, out, _ = plan(monkeypatch, capsys, *args, "--nodes", "1", "--json", path)
    alone = json.loads(path.read_text())["rows"][0]["hours"]
    deadline = f"{alone * 0.6:.3f}h"
    code, out, _ = plan(
        monkeypatch,
        capsys,
        *args,
        "--deadline",
        deadline,
        "--budget",
        "5000",
        "--price-per-hour",
        "2.5",
        "--json",
        path,
    )
    record = json.loads(path.read_text())
    assert code == 0 and record["nodes"] == 2
    assert record["rows"][0]["hours"] <= alone * 0.6
    assert re.search(r"16 H100s × \$2.50/h × [\d.]+ h = \$[\d.]+\. Budget \$5,000.00, buffer \$", out)


def test_an_old_price_warns(monkeypatch, capsys):
    code, out, _ = plan(monkeypatch, capsys, *SMALL, "--tokens", "1e9", "--vendor", "lambda")
    assert code == 0 and "days old" in out and "check it before you pay" in out


IMPOSSIBLE = ["--model", "gpt2-124m", "--hardware", "a100-80", "--global-batch", "16", "--tokens", "1e13"]
REFUSED = [
    (["--hardware", "h2000"], ["h2000", "Did you mean h200"]),
    (["--model", "175b", "--hardware", "a100-40", "--nodes", "1", "--global-batch", "8"], ["too much", "optimiser"]),
    ([*IMPOSSIBLE, "--deadline", "1h"], ["no cluster tried meets that", "Use --deadline"]),
    ([*IMPOSSIBLE, "--budget", "3", "--price-per-hour", "2"], ["budget of $3", "with --budget"]),
    ([*SMALL, "--tokens", "1e13", "--deadline", "1h"], ["leave --nodes out"]),
    (["--deadline", "soon", "--tokens", "1e9"], ["72h"]),
    (["--deadline", "3h"], ["--tokens 300e9"]),
    (["--budget", "3", "--tokens", "1e9"], ["--price-per-hour"]),
    (["--nodes", "0"], ["--nodes 0"]),
    ([*SMALL, "--zero", "1"], ["--zero", "--mesh"]),
    ([*SMALL, "--mesh", "dp=4"], ["4 ranks", "8 devices"]),
    (["--model", "tiny", "--global-batch", "3", "--hardware", "h100", "--devices-per-node", "5"], ["multiple of 5"]),
    ([*SMALL, "--html", "/nowhere/at/all.html"], ["--html", "cannot be written"]),
]


@pytest.mark.parametrize("args, said", REFUSED, ids=[" ".join(args)[-40:] for args, _ in REFUSED])
def test_wrong_input_ends_with_one_sentence_and_a_remedy(monkeypatch, capsys, args, said):
    code, _, err = plan(monkeypatch, capsys, *args)
    assert code == 2 and "Traceback" not in err
    for words in said:
        assert words in err


class Tags(HTMLParser):
    """Every tag closes; attributes are collected."""

    VOID = ("meta", "path", "rect", "circle")

    def __init__(self):
        super().__init__()
        self.open, self.attributes = [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += attrs
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += attrs

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(monkeypatch, capsys, tmp_path):
    path = tmp_path / "plan.html"
    args = ["--model", "7b", "--hardware", "h100", "--nodes", "2", "--global-batch", "32", "--top", "4"]
    code, _, _ = plan(monkeypatch, capsys, *args, "--html", path)
    text = path.read_text()
    assert code == 0
    tags = Tags()
    tags.feed(text)
    assert not tags.open
    assert not {"src", "href", "srcset"} & {name for name, _ in tags.attributes}
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert text.count("<svg") == 3 and "prefers-color-scheme: dark" in text
    for said in ("activations", "capacity 80 GiB", "matmuls", "±", "python -m experiments.train", "uncalibrated"):
        assert said in text
    assert not re.search(r"\bnan\b", text)


def test_the_best_layouts_are_traced_and_compiled_beside_the_formula(monkeypatch, capsys):
    small = ["--model", "proof", "--hardware", "h100", "--devices-per-node", "4", "--global-batch", "16"]
    code, out, _ = plan(monkeypatch, capsys, *small, "--dtype", "float32", "--compile", "cpu", "--prove", "2")
    assert code == 0
    assert "The same, traced, compiled for cpu" in out
    assert out.count("at the peak") == 2


def test_a_target_that_does_not_exist_is_refused_before_anything_is_searched(monkeypatch, capsys):
    code, _, err = plan(monkeypatch, capsys, "--compile", "abacus")
    assert code == 2 and "Use cpu, a100-40" in err
