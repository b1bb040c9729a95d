"""`experiments.plan` as a user meets it: what it prints and writes, the command it names, and how wrong input ends."""

import json
import re
import shlex
from dataclasses import replace

import pytest
import tyro
from support.pages import Page
from support.programs import run

import experiments.plan
import experiments.plan_question
import experiments.train
from experiments.cli import flags_of
from experiments.plan_answers import ideal_hours
from experiments.plan_page import page
from experiments.plan_question import PlanFlags, ask, cards_of
from experiments.plan_report import Plan, fastest_words
from experiments.train import TrainFlags
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.recipe import GPT3_RATES, checkpoint_every, learning_rate, warmup_steps
from jaxdist.plan.search import Candidates, score
from jaxdist.strategy import ParallelConfig, PrecisionConfig

SMALL = ["--model", "tiny", "--hardware", "h100", "--nodes", "1", "--global-batch", "64"]


def plan(capsys, *args) -> tuple[int, str, str]:
    """(exit code, stdout, stderr)."""
    return run(capsys, "plan", *args)


def test_it_ranks_explains_and_names_a_command_that_gives_the_same_run(capsys, tmp_path):
    path = tmp_path / "plan.json"
    code, out, err = plan(capsys, *SMALL, "--top", "3", "--json", path)
    assert code == 0 and all(line.startswith("searching") for line in err.splitlines())  # on a slow machine
    for said in ("Layouts", "Pareto front", "Plain data parallel", "binds", "±", "predicted", "Run it", "GPT-3"):
        assert said in out, said
    record = json.loads(path.read_text())
    assert len(record["rows"]) == 3 and record["num_fitting"] <= record["num_layouts"]
    steps = [row["step_seconds"] for row in record["rows"]]
    assert steps[1:] == sorted(steps[1:]) and steps[0] <= 1.02 * min(steps)
    best = record["rows"][0]
    assert best["memory_bytes"] == pytest.approx(sum(best["memory"].values()))
    assert best["step_seconds"] == pytest.approx(sum(best["time"].values()))
    assert out.index("Run it") < out.index("Why") < out.index("Layouts") < out.index("Pareto front")
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
    cluster = experiments.plan_question.cluster_of_mesh(
        experiments.plan.PlanFlags(nodes=nodes), find_hardware("h100"), 2
    )
    assert (cluster.num_nodes, cluster.devices_per_node) == (1, per_node)


CONFIGS = [
    RunConfig(GPT2Config(4, 128, 4, 512, 128, 256)),
    RunConfig(
        GPT2Config(6, 96, 6, 100, 64, 300, dropout=0.1),
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


def test_one_layout_has_the_same_report(capsys):
    layout = ["--mesh", "dp=4,tp=2", "--zero", "1", "--sp", "--accumulate", "2"]
    code, out, _ = plan(capsys, *SMALL, *layout)
    assert code == 0
    assert "What it takes" in out and "dp=4,tp=2" in out and "ZeRO-1 over dp=4" in out
    command = re.sub(r" \\\n +", " ", out)
    assert "--mesh dp=4,tp=2 --zero 1 --sp --accumulate 2 --batch-size 64" in command and "--dtype bfloat16" in command


def test_the_smallest_cluster_that_meets_a_deadline_and_a_budget(capsys, tmp_path):
    path = tmp_path / "plan.json"
    args = ["--model", "gpt2-1.5b", "--hardware", "h100", "--global-batch", "512", "--tokens", "5e9", "--top", "2"]
    _, out, _ = plan(capsys, *args, "--nodes", "1", "--json", path)
    alone = json.loads(path.read_text())["rows"][0]
    deadline = alone["hours"] * (1 + alone["error"]) * 0.7
    limits = ["--deadline", f"{deadline:.3f}h", "--budget", "5000", "--price-per-hour", "2.5"]
    code, out, _ = plan(capsys, *args, *limits, "--json", path)
    record = json.loads(path.read_text())
    assert code == 0 and record["nodes"] == 2
    assert record["rows"][0]["hours"] * (1 + record["rows"][0]["error"]) <= deadline
    assert re.search(r"16 H100s × \$2.50/h × [\d.]+ h = \$[\d.]+\. Budget \$5,000.00, buffer \$", out)


def recorded(capsys, tmp_path, *args) -> dict:
    path = tmp_path / "plan.json"
    code, _, err = plan(capsys, *args, "--json", path)
    assert code == 0, err
    return json.loads(path.read_text())


def test_any_number_of_nodes_may_be_the_cheapest(capsys, tmp_path):
    """With a deadline that the third node meets, and a batch that its devices divide."""
    args = ["--model", "gpt2-124m", "--global-batch", "64", "--devices-per-node", "2", "--tokens", "5e9"]
    args += ["--price-per-hour", "2.5"]
    [two, three] = (recorded(capsys, tmp_path, *args, "--nodes", str(n)) for n in (2, 4))
    most = [row["hours"] * (1 + row["error"]) for row in (two["rows"][0], three["rows"][0])]
    found = recorded(capsys, tmp_path, *args, "--deadline", f"{sum(most) / 2:.4f}h")
    [rows] = found["tables"].values()
    assert found["nodes"] == 3 and found["batch_size"] == 66 and any("64 sequences" in note for note in found["notes"])
    assert [row["dollars"] for row in rows] == sorted(row["dollars"] for row in rows)
    limits = {row["nodes"]: row["limits"] for row in rows}
    assert limits[2] != "met" and limits[3] == "met"
    assert found["rows"][0]["dollars"] == min(row["dollars"] for row in rows if row["limits"] == "met")


def test_several_cards_are_compared_by_price(capsys, tmp_path):
    args = ["--model", "gpt2-124m", "--global-batch", "64", "--tokens", "1e9", "--nodes", "1", "--vendor", "lambda"]
    found = recorded(capsys, tmp_path, *args, "--hardware", "h100,a100-80")
    [rows] = found["tables"].values()
    each = {card: recorded(capsys, tmp_path, *args, "--hardware", card) for card in ("h100", "a100-80")}
    dollars = {card: record["rows"][0]["dollars"] for card, record in each.items()}
    assert {row["card"]: row["dollars"] for row in rows} == pytest.approx(dollars)
    assert found["hardware"] == min(dollars, key=dollars.get) == rows[0]["card"]


def test_cards_are_compared_in_the_dtype_of_their_products():
    """With a lower peak a card would look dearer than it is, and would not be searched."""
    flags = PlanFlags(model="7b", hardware="h200", tokens=1e9)
    eight = replace(flags, matmul_dtype="float8")
    assert ideal_hours(ask(eight)) == pytest.approx(ideal_hours(ask(flags)) * 989 / 1979)
    cards = cards_of(replace(eight, hardware="any"))
    assert "h100" in cards and "a100-80" not in cards


def test_a_limit_of_memory_holds_on_cards_that_have_more():
    flags = PlanFlags(model="gpt2-124m", hardware="any", max_gib=60.0)
    assert {"a100-40", "h100"} <= set(cards_of(flags))
    usable = [0.9 * ask(replace(flags, hardware=card)).hardware.memory_gb for card in ("a100-40", "h100")]
    assert usable == pytest.approx([36, 60])


def test_constants_of_a_card_of_ones_own_are_those_that_it_names(tmp_path):
    path, known = tmp_path / "mine.toml", find_hardware("h100")
    words = {name: getattr(known, name) for name in ("title", "memory_gb", "memory_bytes_per_s", "devices_per_node")}
    words |= {"inside": "pcie4", "between": known.between.name, "source": "mine", "calibrated": "h100-published"}
    lines = "".join(f"{name} = {json.dumps(value)}\n" for name, value in words.items())
    path.write_text(f"[accelerators.mine]\n{lines}date = 2026-11-21\npeak_flops = {{bfloat16 = 989e12}}\n")
    flags = PlanFlags(model="gpt2-124m", hardware="mine", hardware_file=str(path))
    assert ask(flags).efficiency.stack == "h100-published"
    path.write_text(path.read_text().replace("h100-published", "h100"))
    with pytest.raises(ConfigError, match=r"calibrated='h100'.* must be one of h100-published"):
        ask(flags)


def test_layouts_that_differ_in_the_micro_batch_alone_are_told_apart():
    question = ask(PlanFlags(model="gpt2-124m", devices_per_node=1, batch_size=64))
    rows = [replace(question.base, parallel=ParallelConfig(accumulate=n)) for n in (64, 1)]
    layouts = Candidates.join([Candidates.of(row) for row in rows])
    found = score(question.base, layouts, question.cluster(1), "cudnn")
    plan = Plan(question, found, 2, 2, [[0]], [], [], 0.0)
    assert re.search(r"faster: 1 device, micro-batches of 64 in [\d.]+ GiB a device", *fastest_words(plan))


def test_a_card_in_capitals_has_its_price_among_several(tmp_path):
    path = tmp_path / "prices.toml"
    path.write_text("[mine]\nH100 = 2.0\nh200 = 3.0\ndate = 2026-11-01\n")
    flags = PlanFlags(model="gpt2-124m", hardware="any", vendor="mine", price_file=str(path), tokens=1e9)
    assert cards_of(flags) == ["h100", "h200"]


def test_what_if_asks_the_questions_beside_it(capsys, tmp_path):
    args = ["--model", "gpt2-124m", "--global-batch", "64", "--nodes", "2", "--devices-per-node", "4"]
    found = recorded(capsys, tmp_path, *args, "--what-if")
    rows = {row["what if"]: row for row in found["tables"]["What if"]}
    assert rows["as planned"]["step_seconds"] == found["rows"][0]["step_seconds"]
    assert rows["twice the batch"]["batch_size"] == 128 and rows["twice the sequence"]["batch_size"] == 32
    assert rows["a node fewer"]["devices"] == 4 and rows["on h200, without a price"]["card"] == "h200"
    alone = recorded(capsys, tmp_path, *args, "--global-batch", "128")["rows"][0]
    assert rows["twice the batch"]["step_seconds"] == alone["step_seconds"]
    found = recorded(capsys, tmp_path, *args, "--max-gib", "60", "--what-if")
    assert {row["card"] for row in found["tables"]["What if"]} == {"h100", "h200"}
    assert (found["usable_bytes"], found["capacity_bytes"]) == (pytest.approx(60 * 2**30), 80 * 2**30)
    found = recorded(capsys, tmp_path, *args, "--mesh", "tp=4", "--what-if")  # which fills the smaller cluster
    rows = {row["what if"]: row for row in found["tables"]["What if"]}
    assert "tp=4" in rows["a node fewer"]["mesh"] and rows["a node fewer"]["batch_size"] == 64
    args = ["--model", "gpt2-124m", "--global-batch", "48", "--nodes", "1", "--devices-per-node", "6", "--what-if"]
    rows = {row["what if"]: row for row in recorded(capsys, tmp_path, *args)["tables"]["What if"]}
    assert [row["devices"] for row in rows.values()] == [6, 6, 6, 4, 6] and "on 4 of a node's 6" in rows


def test_what_is_said_to_fit_in_place_of_a_layout_does(capsys, tmp_path):
    args = ["--model", "llama3-8b", "--seq-len", "4096", "--global-batch", "64", "--hardware", "h100"]
    found = recorded(capsys, tmp_path, *args, "--mesh", "dp=8", "--zero", "1")
    flags = re.findall(r"(--mesh .*?) would, with ([\d.]+) GiB", found["sentences"][0])
    assert found["num_fitting"] == 0 and len(flags) == 2
    for words, gib in flags:
        fits = recorded(capsys, tmp_path, *args, *words.split())
        assert fits["num_fitting"] == 1 and fits["rows"][0]["memory_bytes"] / 2**30 == pytest.approx(
            float(gib), abs=0.06
        )


def test_fine_tuning_has_its_own_rate_and_reads_its_data(capsys, tmp_path):
    (tmp_path / "my text.txt").write_text("some words " * 5000)
    args = [*SMALL, "--finetune", "--data", tmp_path / "my text.txt", "--epochs", "2"]
    found = recorded(capsys, tmp_path, *args)
    assert "--lr 2e-05" in found["command"] and "--weights WEIGHTS" in found["command"]
    assert f"--data '{tmp_path}/my text.txt'" in found["command"]
    assert 2 * 0.8 * 55_000 < found["tokens"] < 2 * 55_000


TINY_RUN = ["--model", "gpt2-124m", "--hardware", "h100", "--global-batch", "64", "--tokens", "5e8"]
PRICE = ["--price-per-hour", "2.5"]


def test_a_budget_is_not_beaten_by_rounding(capsys):
    code, _, err = plan(capsys, *TINY_RUN, *PRICE, "--budget", "0.01")
    assert code == 2 and "a budget of $0.01" in err
    said = re.search(r"the cheapest is --hardware h100 --nodes \d+ in at most [\d.]+ \w+ for at most \$(\d+\.\d+)", err)
    said = said or re.search(
        r"the fastest is --hardware h100 --nodes \d+ in at most [\d.]+ \w+ for at most \$(\d+\.\d+)", err
    )
    remedy = re.search(r"Use --budget (\d+)", err)
    assert 0 < float(said[1]) <= float(remedy[1])
    code, out, _ = plan(capsys, *TINY_RUN, *PRICE, "--budget", remedy[1])
    low, high = map(float, re.search(r"With the bar \$([\d.]+) to \$([\d.]+)\.", out).groups())
    assert code == 0 and 0 < low < high <= float(remedy[1])


def test_the_upper_end_of_the_bar_is_what_a_limit_is_held_against(capsys, tmp_path):
    path = tmp_path / "plan.json"
    args = [*TINY_RUN, *PRICE, "--nodes", "1", "--simplest-within", "0"]
    _, out, _ = plan(capsys, *args, "--json", path)
    row = json.loads(path.read_text())["rows"][0]
    most = 1 + row["error"]
    for flag, value, unit in (("--budget", row["dollars"], ""), ("--deadline", row["hours"] * 60, "m")):
        for part, expected in ((0.999 * most, 2), (1.001 * most, 0)):
            code, _, _ = plan(capsys, *args, flag, f"{value * part:.6f}{unit}")
            assert code == expected, (flag, part)
    # What is printed is never below what was computed.
    hours, dollars = re.search(r"× ([\d.]+) h = \$([\d.]+)\.", out).groups()
    assert row["hours"] <= float(hours) <= row["hours"] * 1.01
    assert row["dollars"] <= float(dollars) <= row["dollars"] * 1.01


IMPOSSIBLE = ["--model", "gpt2-124m", "--hardware", "a100-80", "--global-batch", "16", "--tokens", "1e13"]
RUN = [*SMALL, "--tokens", "1e9"]
REFUSED = [
    (["--hardware", "h2000"], ["h2000", "Did you mean h200"]),
    ([*IMPOSSIBLE, "--deadline", "1h"], ["the fastest is", "Use --deadline"]),
    ([*IMPOSSIBLE, "--budget", "3", "--price-per-hour", "2"], ["budget of $3", "Use --budget"]),
    (["--deadline", "soon", "--tokens", "1e9"], ["72h"]),
    (["--budget", "3", "--tokens", "1e9"], ["--price-per-hour"]),
    (["--nodes", "1000000000"], ["--nodes 1e+09", "1,048,576"]),
    ([*SMALL, "--json", "/dev/full"], ["--json '/dev/full': it cannot be written", "No space"]),
    (["--model", "tiny", "--mesh", "pp=1000"], ["--mesh pp=1000", "smaller pp"]),
    (["--model", "tiny", "--mesh", "dp=12"], ["2 nodes of 8", "Add --devices-per-node 6"]),
    ([*SMALL, "--dtype", "float64"], ["--dtype float64", "Use float32 or bfloat16 or float16", "`train` takes"]),
    ([*RUN, "--vendor", "acme"], ["vendor 'acme'", "among aws"]),
    ([*RUN, "--vendor", "acme", "--hardware", "any"], ["vendor 'acme'", "among aws"]),
    ([*RUN, "--hardware", "h100,h200", "--price-per-hour", "2"], ["--hardware h100,h200", "--vendor"]),
    ([*RUN, "--hardware", "h100,h200", "--mesh", "dp=8"], ["--hardware h100,h200", "--mesh"]),
    ([*SMALL, "--hardware", "a100-80", "--matmul-dtype", "float8"], ["float8", "a100-80"]),
    ([*SMALL, "--max-gib", "500"], ["--max-gib 500", "at most 72"]),
    ([*SMALL, "--simplest-within", "0.5"], ["--simplest-within 0.5", "0.1"]),
    ([*RUN, "--tokens", "nan"], ["--tokens nan"]),
    ([*SMALL, "--hardware-file", "/dev/zero"], ["'/dev/zero'", "it is not a regular file"]),
]


@pytest.mark.parametrize("args, said", REFUSED, ids=[" ".join(args)[-40:] for args, _ in REFUSED])
def test_wrong_input_ends_with_one_sentence_and_a_remedy(capsys, args, said):
    code, _, err = plan(capsys, *args)
    assert code == 2 and "Traceback" not in err
    for words in said:
        assert words in err


# ------------------------------------------------------------------------------------------------------- own schedules

OWN_TABLE = """name={name}
0: F0 F1 .  .  B0 W0 B1 W1
1: .  F0 F1 B0 W0 B1 W1 .
"""


@pytest.mark.parametrize("name", ["mine", "zb-h1"])
def test_the_table_in_the_file_is_what_is_planned(capsys, tmp_path, name):
    path, found = tmp_path / "table.txt", tmp_path / "plan.json"
    path.write_text(OWN_TABLE.format(name=name))
    args = ["--model", "proof", "--hardware", "h100", "--global-batch", "8", "--mesh", "pp=2,dp=2"]
    args += ["--microbatches", "2", "--stages", "1,3", "--schedule", path, "--json", found]
    code, out, err = plan(capsys, *args)
    assert code == 0, err
    record = json.loads(found.read_text())
    assert f"--schedule {path} --microbatches 2 --stages 1,3" in record["command"]
    code, _, _ = plan(capsys, *[{str(path): "zb-h1"}.get(str(arg), arg) for arg in args])
    assert record["rows"][0]["time"]["bubble"] > json.loads(found.read_text())["rows"][0]["time"]["bubble"]
    config = tyro.cli(TrainFlags, args=train_flags(record["command"])).run_config()
    assert config.parallel.pipeline.name == name and config.part_layers == (1, 3)
    assert str(path) in out


@pytest.mark.exhaustive
def test_the_best_layouts_are_traced_and_compiled_beside_the_formula(capsys):
    small = ["--model", "proof", "--hardware", "h100", "--devices-per-node", "4", "--global-batch", "16"]
    code, out, _ = plan(capsys, *small, "--dtype", "float32", "--compile", "cpu", "--prove", "2")
    assert code == 0
    assert "The same, traced, compiled for cpu" in out
    assert out.count("at the peak") == 2


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_command_is_refused_until_it_is_filled_in(capsys, tmp_path, nodes):
    path = tmp_path / "plan.json"
    code, _, _ = plan(capsys, *SMALL, "--nodes", nodes, "--json", path)
    command = json.loads(path.read_text())["command"]
    launcher = "srun --nodes 2 --ntasks-per-node 8 --gpus-per-node 8 " if nodes == 2 else ""
    assert code == 0 and command.startswith(f"{launcher}python -m experiments.train ")
    args = train_flags(command)
    assert ("--distributed" in args) == (nodes == 2) and args[args.index("--device") + 1] == "gpu"
    code, _, err = run(capsys, "train", *args)
    assert code == 2 and "--data DATA and --out OUT: " in err
    flags = tyro.cli(TrainFlags, args=[{"DATA": "tokens", "OUT": "run"}.get(word, word) for word in args])
    flags.require_filled_in()
    flags.check()
    config = flags.run_config()
    assert config.parallel.mesh.num_devices == 8 * nodes and flags.checkpoint_every <= config.steps


def test_the_recipe_is_the_published_one():
    assert [learning_rate(size) for size, _ in GPT3_RATES] == [rate for _, rate in GPT3_RATES]
    assert learning_rate(1e6) == 6e-4 and learning_rate(1e12) == 6e-5
    assert learning_rate(6.7e9) < learning_rate(4e9) < learning_rate(2.7e9)
    assert warmup_steps(2**20, 10**6) == 358 and warmup_steps(2**20, 100) == 10
    # 12 GB written in 12 s, a failure every 50,677 / 8 hours: sqrt(2 · 12 · 22.8e6) s between checkpoints.
    every, why = checkpoint_every(12e9, 1, 8, 1.0, 10**6)
    assert every == pytest.approx(23_397, rel=1e-3) and "Llama 3" in why
    assert checkpoint_every(12e9, 1, 8, 1.0, 100)[0] == 100


def test_an_old_price_warns(capsys):
    code, out, _ = plan(capsys, *SMALL, "--tokens", "1e9", "--vendor", "lambda")
    assert code == 0 and "days old" in out and "check it before you pay" in out


@pytest.mark.parametrize("flags, batch", [
    (["--nodes", "3"], 504),
    (["--nodes", "4"], 512),
    (["--nodes", "128"], 1024),
    (["--nodes", "5", "--devices-per-node", "7"], 525),
    (["--mesh", "dp=24"], 504),
    (["--mesh", "pp=3,dp=2", "--microbatches", "5", "--accumulate", "7"], 490),
])  # fmt: skip
def test_the_batch_that_is_chosen_divides(flags, batch):
    flags = tyro.cli(experiments.plan.PlanFlags, args=["--model", "7b", *flags])
    found, said = experiments.plan_question.default_batch(flags, 8)
    assert found == batch and f"{batch:,} sequences" in said


SEARCH = ["--model", "proof", "--devices-per-node", "4", "--global-batch", "8", "--nodes", "1"]


NAMED = ["--model", "proof", "--global-batch", "16", "--mesh", "pp=2,dp=2,tp=2"]


ONE_LAYOUT = "--mesh names the one layout"


OWN_CARD = "[accelerators.h100]\nmemory_gb = 40"


OWN_PRICE = "[aws]\nh100 = 1.5\ndate = 2100-01-01"


OF_EXPERTS = {"num_experts": "4", "top_k": "1", "expert_width": "64", "shared_width": "64", "capacity": "1.5"} | {
    "balance_loss": "0.02",
    "balance_rate": "0.01",
    "z_loss": "0.01",
}


# Flag -> its words, what is given beside it, what happens in a search and what with --mesh: None, the answer is another
# one or the command has the flag; else a part of the refusal.
FLAGS = {
    "mesh": ("dp=4", [], None, None),
    "device": ("cpu", [], "a plan runs on no device", "a plan runs on no device"),
    "model": ("tiny", [], None, None),
    "num_layers": ("2", [], None, None),
    "width": ("128", [], None, None),
    "num_heads": ("4", [], None, None),
    "num_kv_heads": ("2", [], "Leave it out", "Leave it out"),
    "ffn_width": ("128", [], None, None),
    **{name: (value, [], "Leave it out", "Leave it out") for name, value in OF_EXPERTS.items()},
    "seq_len": ("64", [], None, None),
    "vocab_size": ("500", [], None, None),
    "dropout": ("0.1", [], None, None),
    "lora": ("2", [], None, None),
    "lora_alpha": ("3", ["--lora", "2"], None, None),
    "lora_targets": ("w_up", ["--lora", "2"], None, None),
    "batch_size": ("32", [], None, None),
    "batch_sizes": ("8,16", [], "--batch-sizes", "--batch-sizes"),
    "steps": ("77", [], None, None),
    "seed": ("5", [], None, None),
    "mask_documents": (None, [], None, None),
    "dtype": ("float32", [], None, None),
    "reduce_dtype": ("bfloat16", [], None, None),
    "loss_scale": ("64", ["--dtype", "float16"], None, None),
    "loss_scale_window": ("64", ["--dtype", "float16"], None, None),
    "loss_scale_hysteresis": ("1", ["--dtype", "float16"], None, None),
    "zero": ("1", [], None, None),
    "sp": (None, [], None, None),
    "cp_kind": ("all-gather", ["--mesh", "cp=2"], "none has it", None),
    "experts_over_tp": (None, ["--sp", "--mesh", "tp=2"], "none has it", "experts"),
    "tp_ring": ("one-way", ["--mesh", "tp=2", "--sp"], None, None),
    "grad_sync": ("flat", [], None, None),
    "bucket_mb": ("3", [], None, None),
    "accumulate": ("2", [], None, None),
    "remat": ("block", [], None, None),
    "loss_chunks": ("2", [], None, None),
    "unroll_layers": ("yes", ["--mesh", "dp=2"], None, None),
    "reshard_after_forward": (None, ["--mesh", "dp=2", "--zero", "3"], None, None),
    "overlap": (None, [], None, None),
    "attention": ("xla", [], None, None),
    "xla": ("stable", [], None, None),
    "schedule": ("zb-h1", [], None, None),
    "microbatches": ("2", [], None, None),
    "chunks": ("4", ["--mesh", "pp=2", "--schedule", "interleaved", "--num-layers", "8"], "none has it", None),
    "stages": ("1,3", [], "even, last-N", None),
    "optimizer": ("lion", [], None, None),
    "lr": ("1e-5", [], None, None),
    "min_lr_ratio": ("0.3", [], None, None),
    "lr_schedule": ("linear", [], None, None),
    "warmup_steps": ("7", [], None, None),
    "weight_decay": ("0.3", [], None, None),
    "beta1": ("0.8", [], None, None),
    "beta2": ("0.99", [], None, None),
    "eps": ("1e-6", [], None, None),
    "momentum": ("0.9", ["--optimizer", "muon"], None, None),
    "momentum_warmup_steps": ("300", ["--optimizer", "muon"], None, None),
    "nesterov": (None, ["--optimizer", "muon"], None, None),
    "muon_scale": ("shape", ["--optimizer", "muon"], None, None),
    "muon_coefficients": ("dion", ["--optimizer", "muon"], None, None),
    "muon_bf16": (None, ["--optimizer", "muon"], None, None),
    "clip_norm": ("0.3", [], None, None),
    "hardware": ("h200", [], None, None),
    "nodes": ("4", ["--devices-per-node", "4"], None, None),
    "devices_per_node": ("2", [], None, None),
    "tokens": ("1e9", [], None, None),
    "deadline": ("30d", ["--tokens", "1e9"], None, None),
    "budget": ("1000", ["--tokens", "1e9", "--price-per-hour", "2"], None, None),
    "vendor": ("aws", ["--tokens", "1e9"], None, None),
    "price_per_hour": ("2.5", ["--tokens", "1e9"], None, None),
    "hardware_file": (OWN_CARD, [], None, None),
    "efficiencies": ("matmul = 0.5", [], None, None),
    "price_file": (OWN_PRICE, ["--tokens", "1e9", "--vendor", "aws"], None, None),
    "top": ("3", ["--simplest-within", "0"], None, ONE_LAYOUT),
    "simplest_within": ("0", [], None, ONE_LAYOUT),
    "max_gib": ("1", [], None, None),
    "what_if": (None, [], None, "not searched"),
    "data": ("some text " * 999, [], None, None),
    "epochs": ("3", ["--data", __file__], None, None),
    "finetune": (None, [], None, None),
    "matmul_dtype": ("float8", [], None, None),
    "prove": ("2", ["--trace"], None, ONE_LAYOUT),
    "config": ("[optimizer]\nlr = 1e-5", [], None, None),
    "trace": (None, [], None, None),
    "compile": ("cpu", [], None, None),
    "json": ("FILE", [], None, None),
    "html": ("FILE", [], None, None),
    "dump_hlo": ("FILE", ["--compile", "cpu"], None, None),
}


SLOW = {"trace", "compile", "prove", "dump_hlo"}  # what they do is tested by the tests that trace and compile


def answer(out: str) -> str:
    """Printed text, without times that vary."""
    return re.sub(r"predicted in [\d.]+ s", "", out)


@pytest.mark.parametrize("mode", ["search", "named"])
@pytest.mark.parametrize("name", [name for name in FLAGS if name not in SLOW])
def test_no_flag_is_ignored(capsys, tmp_path, name, mode):
    value, beside, searched, named = FLAGS[name]
    refusal = searched if mode == "search" else named
    if mode == "search" and "--mesh" in beside:
        beside = []
    common = [*(SEARCH if mode == "search" else NAMED), *beside]
    flag, file = f"--{name.replace('_', '-')}", tmp_path / "file"
    if name in ("reshard_after_forward", "nesterov"):
        flag = f"--no-{name.replace('_', '-')}"
    written = name in ("config", "efficiencies", "data") or name.endswith("_file")
    if written:
        file.write_text(value)
    words = [flag] + ([] if value is None else [str(file)] if name in ("json", "html") or written else [value])
    code, out, err = plan(capsys, *common, *words)
    if refusal is not None:
        assert code == 2 and refusal in err and flag in err
        return
    code_before, before, err_before = plan(capsys, *common)
    assert code_before == 0, err_before
    if name in ("json", "html"):
        assert code == 0 and file.stat().st_size > 1000
    elif code == 2:  # used: against the mesh, or a limit
        assert name in ("devices_per_node", "nodes", "hardware") and "ranks" in err
    else:
        assert code == 0, err
        assert answer(out) != answer(before)


USELESS = [
    ["--steps", "10", "--tokens", "1e9"],
    ["--tokens", "1e9", "--vendor", "aws", "--price-per-hour", "2"],
    ["--vendor", "aws"],
    ["--price-per-hour", "2"],
    ["--tokens", "1e9", "--price-file", "prices.toml"],
    ["--prove", "2"],
    ["--trace", "--prove", "20"],
    ["--dump-hlo", "folder"],
    ["--trace", "--dump-hlo", "folder"],
    ["--grad-sync", "flat", "--bucket-mb", "3"],
    ["--mesh", "dp=4", "--schedule", "gpipe"],
    ["--mesh", "dp=4", "--stages", "2,2"],
    ["--mesh", "dp=4", "--chunks", "2"],
    ["--mesh", "dp=4", "--microbatches", "2"],
    ["--mesh", "tp=4", "--zero", "1"],
    ["--mesh", "dp=4", "--sp"],
    ["--mesh", "dp=4", "--experts-over-tp"],
    ["--mesh", "dp=4", "--no-reshard-after-forward"],
    ["--mesh", "dp=4", "--zero", "3", "--remat", "block", "--no-reshard-after-forward"],
    ["--mesh", "tp=4", "--overlap"],
    ["--epochs", "2"],
    ["--data", "some.txt", "--steps", "10"],
    ["--lora", "2", "--finetune"],
]


@pytest.mark.parametrize("more", USELESS, ids=" ".join)
def test_a_flag_that_would_change_nothing_is_refused(capsys, more):
    code, _, err = plan(capsys, "--model", "proof", "--devices-per-node", "4", "--global-batch", "8", *more)
    assert code == 2 and re.search("would change nothing|nothing is (traced|compiled)|concerns the pipeline", err), err


def test_the_smallest_batch_that_is_as_fast_is_planned(capsys, tmp_path):
    """Each is what a search of it alone finds, and one that no mesh divides has no row."""
    common = ["--model", "gpt2-124m", "--devices-per-node", "4", "--nodes", "1", "--tokens", "1e9"]

    def found(*more):
        file = tmp_path / "plan.json"
        code, out, err = plan(capsys, *common, *more, "--json", str(file))
        assert code == 0, err
        return json.loads(file.read_text()), out

    html = tmp_path / "plan.html"
    whole, out = found("--batch-sizes", "512,16,1024,3,512", "--html", str(html))
    assert "<h2>Best of each batch</h2>" in html.read_text() and ">1,024</td>" in html.read_text()
    [rows] = whole["tables"].values()
    sizes = [row["batch_size"] for row in rows]
    assert sizes == [3, 16, 512, 1024] and "Best of each batch" in out
    alone = {size: found("--batch-size", str(size))[0] for size in sizes}
    for row in rows:
        assert row == alone[row["batch_size"]]["rows"][0] | {"also": []}
    speeds = {row["batch_size"]: row["tokens_per_second"] for row in rows}
    fast = [size for size in sizes if speeds[size] * 1.02 >= max(speeds.values())]
    assert whole["batch_size"] == fast[0] == 512 and speeds[512] < speeds[1024]
    assert f"--batch-size {fast[0]} " in whole["command"] and not alone[16]["tables"]


def test_uneven_stages_are_planned_as_they_are(capsys, tmp_path):
    path, found = tmp_path / "plan.json", {}
    for stages in ("even", "balanced", "1,3"):
        args = ["--model", "proof", "--hardware", "h100", "--global-batch", "8", "--mesh", "pp=2,dp=2"]
        code, _, _ = plan(capsys, *args, "--stages", stages, "--json", path)
        found[stages] = json.loads(path.read_text())["rows"][0]
        assert code == 0 and found[stages]["stages"] == stages
    assert found["1,3"]["memory"]["parameters"] > 1.3 * found["even"]["memory"]["parameters"]
    assert found["1,3"]["step_seconds"] > found["even"]["step_seconds"]


def test_the_page_is_whole_and_loads_nothing(capsys, tmp_path):
    path = tmp_path / "plan.html"
    args = ["--model", "7b", "--hardware", "h100", "--nodes", "2", "--global-batch", "32", "--top", "4"]
    json_of = tmp_path / "plan.json"
    code, _, _ = plan(capsys, *args, "--html", path, "--json", json_of)
    text = path.read_text()
    assert code == 0
    assert not {"src", "href", "srcset"} & {name for name, _ in Page(text).attributes}
    assert "http" not in text and "@import" not in text and "url(" not in text
    assert text.count("<svg") == 3 and "prefers-color-scheme: dark" in text
    found = json.loads(json_of.read_text())
    assert page(found) == page(found | {"model": {"base": found["model"]}}), "of adapters"
    for said in ("activations", "capacity 80 GiB", "matmuls", "±", "python -m experiments.train", "h100-published"):
        assert said in text
    assert not re.search(r"\bnan\b", text)


def test_one_layout_that_is_traced_shows_every_message_and_one_device_sends_none(capsys):
    tiny = "--model proof --hardware h100 --nodes 1 --batch-size 8 --dtype float32 --trace --devices-per-node"
    _, out, _ = plan(capsys, *tiny.split(), "2", "--mesh", "dp=2", "--zero", "1")
    assert re.search(r"parameters after the update +all_gather +dp", out)
    code, out, err = plan(capsys, *tiny.split(), "1")
    assert code == 0 and "What a step sends: nothing" in out, err
