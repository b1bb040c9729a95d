"""The report of a run: what is on the page, and that no folder, however bad, breaks it, runs code or adds markup."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.pages import Page
from support.programs import run

from experiments.report import VERIFY, verdict_of
from experiments.report_page import binned, thin
from jaxdist.config import RunConfig, from_dict, to_dict
from jaxdist.errors import ConfigError
from jaxdist.models.lora import LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.runtime.run_record import labels, read_run
from jaxdist.runtime.telemetry import DeviceMemory
from jaxdist.strategy import PrecisionConfig

SIZES = "--num-layers 2 --width 32 --num-heads 2 --seq-len 16 --batch-size 8 --steps 6 --eval-every 2 --eval-windows 8"
LAYOUT = "--mesh pp=2,dp=2,tp=2 --zero 1 --sp --microbatches 2 --device cpu"


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    args = [*SIZES.split(), *LAYOUT.split(), "--data", str(folder / "text.txt"), "--out", str(folder / "run")]
    assert run(None, "train", *args)[0] == 0
    return folder / "run"


@pytest.fixture
def copy(trained, tmp_path) -> Path:
    """The run's small files, to be spoilt."""
    shutil.copytree(trained, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoints"))
    return tmp_path / "run"


def report(tmp_path, *args: str | Path) -> tuple[str, Page]:
    out = tmp_path / "page.html"
    assert run(None, "report", *args, "--out", out)[0] == 0
    text = out.read_text(encoding="utf-8")
    return text, Page(text)


def set_config(folder: Path, **changes) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


# ---- what is on the page ----


def test_a_page_has_every_part_and_loads_nothing(trained, tmp_path):
    text, page = report(tmp_path, trained)
    for said in (
        "6 of 6", "Loss, nats per token", "Throughput, tokens/s", "Learning rate", "Simulated devices",
        "Where the time of a step goes", "checkpoint", "blocks.mlp", "predicted by the plan", "the plan predicts",
        "have no allocator", "reduce-scatter", "gradients", "plan --trace",
        "1f1b: 2 stages, 2 micro-batches", "not verified", "experiments.verify --config", "jaxlib", "Every setting",
        "parallel.mesh.tp",
    ):  # fmt: skip
        assert said in page.text, said
    assert len(text) < 2e6 and page.tags.count("svg") >= 7
    for name, value in page.attributes:
        assert name not in ("src", "srcset", "data", "onload", "onclick"), (name, value)
        assert name not in ("href", "xlink:href") or value.startswith("#"), value
    assert not {"script", "link", "iframe", "object", "img", "base"} & set(page.tags)
    assert not re.search(r"https?://|@import|url\((?!#)", text)


def test_its_numbers_are_those_of_the_run(trained, tmp_path):
    _, page = report(tmp_path, trained)
    lines = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    run = read_run(trained)
    assert run.state == "complete" and run.notes == [] and run.steps.tolist() == [1, 2, 3, 4, 5, 6]
    assert run.numbers["loss"].tolist() == [line["loss"] for line in lines]
    assert run.column("held_out_loss")[0].tolist() == [2, 4, 6]
    assert f"{lines[-1]['loss']:.4f}" in page.text and f"{lines[-1]['held_out_loss']:.4f}" in page.text
    mean = np.mean([line["seconds"]["step"] for line in lines])
    assert run.mean_seconds()["step"] == pytest.approx(mean)
    compiled = run.config["compiled"]
    assert f"{(compiled['arguments'] + compiled['temporaries']) / 2**10:,.1f} KiB" in page.text


def test_colours_of_charts_are_the_pages(trained, tmp_path):
    text, _ = report(tmp_path, trained)
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search("#[0-9a-f]{3,6}", drawn)
    assert "var(--c0)" in drawn and "prefers-color-scheme: dark" in text and "currentColor" in drawn


def test_several_runs_share_charts_and_have_names_of_their_own(trained, copy, tmp_path):
    (tmp_path / "other").mkdir()
    shutil.copytree(copy, tmp_path / "other/run")
    (tmp_path / "link").symlink_to(copy)
    _, page = report(tmp_path, tmp_path / "link", tmp_path / "other/run", copy)
    assert page.text.count("nobody has compared this layout") == 2, "one folder by two names is one run"
    names = labels([copy, tmp_path / "other/run"])
    assert names == [str(copy), str(tmp_path / "other/run")] and all(name in page.text for name in names)
    assert labels([copy, tmp_path / "other"]) == ["run", "other"]


@pytest.mark.parametrize("model", PRESETS.values(), ids=PRESETS)
def test_a_configuration_is_read_back(model):
    for each in (model, LoRA(model, 4, 8.0, ())):
        config = RunConfig(each)
        assert from_dict(json.loads(json.dumps(to_dict(config)))) == config


def test_processes_are_compared_and_the_slowest_named(copy, tmp_path):
    lines = [json.loads(line) for line in (copy / "processes/0000.jsonl").read_text().splitlines()]
    memory = [{"rank": 1, "in_use": 5 << 20, "peak": 77 << 20, "limit": 99 << 20}]
    for line in lines:
        line["seconds"]["input"] += 3.0
        line["memory"] = memory
    (copy / "processes/0001.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    spread = read_run(copy).spread_over_processes()
    assert spread["input"].process == 1 and spread["input"].most == pytest.approx(3.0, abs=0.5)
    _, page = report(tmp_path, copy)
    assert "slowest process" in page.text and "77.0 MiB" in page.text and "rank 1, the fullest" in page.text


@pytest.fixture
def folder(tmp_path) -> Path:
    """A run that has written nothing but a config.json, and that one is empty."""
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "processes").mkdir()
    return tmp_path


def write_process(folder: Path, index: int, *lines: dict) -> None:
    text = "".join(json.dumps({"step": step} | line) + "\n" for step, line in enumerate(lines, 1))
    (folder / f"processes/{index:04}.jsonl").write_text(text)


def test_the_slowest_process_has_the_number_of_its_file(folder):
    for index, seconds in ((0, 1.0), (2, 4.0)):
        write_process(folder, index, {"seconds": {"host": seconds}})
    assert read_run(folder).spread_over_processes()["host"].process == 2


def test_processes_are_compared_where_all_were_and_not_with_those_that_are_gone(folder):
    fast, slow = {"seconds": {"host": 1.0}}, {"seconds": {"host": 9.0}}
    write_process(folder, 0, slow, slow, fast, fast)  # alone, and then with another
    (folder / "processes/0001.jsonl").write_text("".join(json.dumps({"step": n, **fast}) + "\n" for n in (3, 4)))
    write_process(folder, 2, slow, slow)
    found = read_run(folder)
    assert [each.index for each in found.processes] == [0, 1] and found.spread_over_processes()["host"].most == 1.0
    assert "0002.jsonl ends at step 2 and the first process at 4" in " ".join(found.notes)


def test_the_peak_of_a_device_is_the_most_of_every_step(folder):
    peaks = [{"memory": [{"rank": 0, "in_use": 1, "peak": peak, "limit": 10}]} for peak in (9, 5)]
    write_process(folder, 0, *peaks)
    assert read_run(folder).memory() == [DeviceMemory(rank=0, in_use=1, peak=9, limit=10)]


def test_the_last_of_several_verdicts_counts(folder):
    config = RunConfig(PRESETS["proof"])
    (folder / VERIFY).write_text(json.dumps([{"ok": ok, "config": to_dict(config)} for ok in (False, True)]))
    assert verdict_of(read_run(folder), config).ok


def test_a_verdict_does_not_count_for_another_precision(folder):
    config = RunConfig(PRESETS["proof"])
    (folder / VERIFY).write_text(json.dumps([{"ok": True, "config": to_dict(config)}]))
    in_bf16 = replace(config, precision=PrecisionConfig("bfloat16"))
    assert verdict_of(read_run(folder), in_bf16).ok is None


@pytest.mark.parametrize("ok, said", [(True, "equal to one device"), (False, "DIFFERS")])
def test_a_verdict_counts_for_its_own_configuration(copy, tmp_path, ok, said):
    config = to_dict(from_dict(read_run(copy).config))
    (copy / VERIFY).write_text(json.dumps([{"ok": ok, "config": config}]))
    assert said in report(tmp_path, copy)[1].text
    config["parallel"]["zero"] = 3
    (copy / VERIFY).write_text(json.dumps([{"ok": ok, "config": config}]))
    page = report(tmp_path, copy)[1].text
    assert said not in page and "not verified" in page


def test_curves_are_thinned_without_losing_spikes():
    x, y = np.arange(100_000), np.zeros(100_000)
    y[12_345], y[54_321] = 9.0, -9.0
    xs, ys = thin(x, y, 500)
    assert len(xs) < 1100 and {12_345, 54_321} <= set(xs.tolist()) and (ys.max(), ys.min()) == (9.0, -9.0)
    _, columns = binned(x, {"a": y + 1}, 300)
    assert len(columns["a"]) == 300 and columns["a"].mean() == pytest.approx(1.0, abs=1e-3)


# ---- bad folders ----


def half_a_line(folder):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 7, "lo')
    (folder / "summary.json").unlink()


def damaged(folder):
    lines = (folder / "metrics.jsonl").read_bytes().splitlines()
    lines[2] = b"\xff\x00{"
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def older(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [{name: line[name] for name in ("step", "loss")} | {"colour": 1} for line in lines]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in kept))
    shutil.rmtree(folder / "processes")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model": config["model"]}))


def odd_values(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    odd = ["x", None, True, 10**400, [1], {"a": 1}]
    for line, value in zip(lines, odd, strict=True):
        line |= {"loss": value, "grad_norms": value, "seconds": {"step": value, "nap": 1}, "processes": {"step": value}}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def no_config(folder):
    (folder / "config.json").unlink()


def broken_config(folder):
    (folder / "config.json").write_text('{"model": ')


def list_config(folder):
    (folder / "config.json").write_text("[1]")


def nothing_but_config(folder):
    for name in ("metrics.jsonl", "summary.json"):
        (folder / name).unlink()
    shutil.rmtree(folder / "processes")


def empty_metrics(folder):
    (folder / "metrics.jsonl").write_text("")


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (half_a_line, ["not finished", "6 of 6"]),
        (damaged, ["metrics.jsonl is damaged: line 3 is not", "its other 5 lines"]),
        (older, ["Loss, nats per token", "there is no file of a process"]),
        (odd_values, ["loss is no number in 5 of 6", "loss was not finite, or is not said"]),
        (no_config, ["config.json: it cannot be read", "Nothing is predicted"]),
        (broken_config, ["config.json: it is not a whole JSON file"]),
        (list_config, ["config.json: it holds no JSON object"]),
        (nothing_but_config, ["there is no metrics.jsonl", "0 of 6", "predicted by the plan"]),
        (empty_metrics, ["metrics.jsonl has no whole line"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bad_folder_is_shown_with_what_is_missing(copy, tmp_path, spoil, said):
    spoil(copy)
    _, page = report(tmp_path, copy)
    for each in said:
        assert each in page.text, each


def changed(name: str, value):
    return lambda config: config["parallel"].update({name: value})


@pytest.mark.parametrize(
    "change",
    [
        changed("mesh", {"dp": "2"}),
        changed("mesh", {"dp": 2, "zp": 3}),
        changed("mesh", 7),
        changed("zero", 9),
        changed("novel", 1),
        changed("microbatches", 10**9),
        changed("schedule", "/etc/passwd"),
        changed("schedule", ["1f1b"]),
        lambda config: config.update(model=None),
        lambda config: config.update(model=[]),
        lambda config: config["model"].update(width="x"),
        lambda config: config["model"].update(num_layers=10**9),
        lambda config: config["model"].update(colour=1),
        lambda config: config.update(batch_size=2.5),
        lambda config: config.update(parallel=[]),
        lambda config: config.update(optimizer={"name": ["adamw"]}),
        lambda config: config.update(versions=3, compiled=[], devices={}, simulated="yes", attention=[], steps="six"),
    ],
)
def test_a_configuration_of_another_version_gives_no_wrong_numbers(copy, tmp_path, change):
    config = json.loads((copy / "config.json").read_text())
    change(config)
    (copy / "config.json").write_text(json.dumps(config))
    _, page = report(tmp_path, copy)
    assert "Nothing is predicted" in page.text
    assert "predicted by the plan" not in page.text and "Loss, nats per token" in page.text


def test_no_module_is_imported_unless_asked(copy, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "report_victim.py").write_text("open('ran', 'w').close()\nraise RuntimeError('ran')\n")
    for name in ("report_victim:Model", "jaxdist.models:../report_victim:M", "jaxdist.models.x.report_victim", 7):
        model = json.loads((copy / "config.json").read_text())["model"]
        set_config(copy, model=model | {"class": name})
        _, page = report(tmp_path, copy)
        assert "Nothing is predicted" in page.text and not (tmp_path / "ran").exists()
    set_config(copy, model={"class": "jaxdist.models.lora:LoRA", "base": {"class": "report_victim:Model"}})
    assert "Nothing is predicted" in report(tmp_path, copy)[1].text and not (tmp_path / "ran").exists()
    assert "Nothing is predicted" in report(tmp_path, copy, "--trust")[1].text
    set_config(copy, model={"class": "report_victim:Model"})
    assert "Nothing is predicted" in report(tmp_path, copy, "--trust")[1].text and (tmp_path / "ran").exists()


EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>\u202e\x1b[31m$\\frac{"


def test_nothing_from_a_run_is_markup(copy, tmp_path):
    lines = [json.loads(line) for line in (copy / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        line |= {EVIL: 1, "grad_norms": {EVIL: 1.0, "ok": 2.0}, "seconds": line["seconds"] | {EVIL: 1.0}}
    (copy / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (copy / "summary.json").unlink()
    (copy / "stopped.json").write_text(json.dumps({"reason": EVIL}))
    set_config(copy, data=EVIL, devices=EVIL, versions={EVIL: EVIL}, steps=EVIL, **{EVIL: {EVIL: EVIL}})
    evil = tmp_path / EVIL.replace("/", "")
    copy.rename(evil)
    text, page = report(tmp_path, evil)
    assert not {"script", "img"} & set(page.tags) and "alert(1)" in page.text
    assert "\u202e" not in text and "\x1b" not in text
    assert all(not name.startswith("on") for name, _ in page.attributes)


@pytest.mark.parametrize("path", ["nowhere", ".", "text", "a\0b", ""])
def test_what_is_no_run_is_refused(tmp_path, monkeypatch, capsys, path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").write_text("x")
    code, _, err = run(capsys, "report", path)
    assert code == 2 and "Name what `train --out` was given" in err and not (tmp_path / "report.html").exists()


def test_no_run_at_all_is_refused(capsys):
    code, _, err = run(capsys, "report")
    assert code == 2 and "runs/a" in err


def test_an_output_that_cannot_be_written_is_refused(trained, tmp_path, capsys):
    assert run(capsys, "report", trained, "--out", tmp_path / "no/page.html")[0] == 2
    with pytest.raises(ConfigError):
        read_run(tmp_path)
