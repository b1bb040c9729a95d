"""The panel of a run, while it trains and read from its folder."""

import io
import json

import pytest
from rich.console import Console
from support.programs import run
from support.records import record

from experiments import live as watch
from experiments.panel import RunPanel, sparks
from jaxdist.runtime.telemetry import DeviceMemory


def shown(panel: RunPanel, width: int = 80) -> str:
    console = Console(width=width, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(panel)
    return console.export_text()


def test_the_panel_says_what_the_last_steps_said():
    panel = RunPanel("dp=2", 10, 3 * 2**30, simulated=False)
    assert "the first step is under way" in shown(panel)
    panel.update(record(1, held_out_loss=4.25), [])
    memory = [DeviceMemory(0, 2**30, 2 * 2**30, 8 * 2**30), DeviceMemory(1, 2**30, 4 * 2**30, 8 * 2**30)]
    panel.update(record(2, loss_scale=1024.0), memory)
    text = shown(panel)
    for part in (
        "3.0000 █▁",
        "held-out 4.2500",
        "640 tokens/s",
        "loss scale 1024",
        "norm 1.000: tokens 0.8, attention 0.5",
        "step 80%",
        "host 20%",
        "at most 4.0 GiB of 8.0 GiB, on rank 1; the compiler planned 3.0 GiB a device",
        "step 2 of 10, about 8 s left",
    ):
        assert part in said(text), part
    assert "simulated" not in text and max(map(len, text.splitlines())) == 80


def said(text: str) -> str:
    """The words of the panel, wherever lines end."""
    return " ".join(text.replace("│", " ").split())


@pytest.mark.parametrize("width", [40, 60, 200])
def test_the_panel_fits_any_terminal(width):
    panel = RunPanel("pp=2,dp=2,tp=2", 10**6, None, simulated=True)
    panel.update(record(1, loss=float("nan")), [])
    panel.update(record(2), [])
    text = shown(panel, width)
    assert max(map(len, text.splitlines())) <= width and "no speed" in said(text)


def test_sparks():
    assert (
        sparks([0.0, 1.0, float("nan"), 0.5]) == "▁█ ▅" and sparks([float("inf")]) == "" and sparks([2.0, 2.0]) == "▁▁"
    )


@pytest.mark.parametrize("value", ["x", None, [], {}, True, 1e308, -1, float("nan"), 10**400])
def test_a_line_of_other_types_is_passed_over_or_shown(tmp_path, value):
    path = tmp_path / "metrics.jsonl"
    for name in (
        *record(1),
        "held_out_loss",
        "loss_scale",
        "mfu",
        "hfu",
        "seconds.total",
        "seconds.step",
        "grad_norms.x",
    ):
        changed, (outer, _, inner) = record(2), name.partition(".")
        holder = changed[outer] if inner else changed
        holder[inner or outer] = value
        path.write_text(f"{json.dumps(record(1))}\n{json.dumps(changed)}\n")
        panel = RunPanel("", 10, None, simulated=True)
        for each in watch.records(path):
            panel.update(each, [])
        assert "step" in shown(panel)


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"steps": 3, "devices": "2 SIMULATED devices"}))
    lines = [record(1), record(2, loss=None), {"step": 3, "loss": 1.0}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 4, "lo')
    return tmp_path


def watched(words, capfd):
    return run(capfd, "report live", *words)


def test_a_run_that_goes_on_elsewhere_is_shown_and_drawn(folder, capfd):
    code, out, err = watched([folder, "--svg", folder / "panel.svg"], capfd)
    assert code == 0 and "step 2 of 3" in out and "no speed" in out, err
    drawn = (folder / "panel.svg").read_text()
    assert drawn.startswith("<svg") and "font-face" not in drawn and "url(http" not in drawn


def test_a_run_that_rolls_back_or_begins_anew_is_shown_as_its_files_have_it(folder, monkeypatch):
    def go_back(seconds):
        (folder / "config.json").write_text('{"steps": 9}')
        (folder / "metrics.jsonl").write_text(json.dumps(record(1, loss=7.0)) + "\n")
        (folder / "stopped.json").write_text("{}")

    monkeypatch.setattr(watch.time, "sleep", go_back)
    console = Console(force_terminal=True, record=True, file=io.StringIO())
    assert watch.main(watch.LiveFlags(str(folder)), console) == 0
    assert "step 1 of 9" in said(console.export_text()).split("╮")[-1]


def test_a_run_that_stopped_before_its_last_step_has_ended(tmp_path):
    assert not watch.has_ended(tmp_path)
    (tmp_path / "stopped.json").write_text("{}")
    assert watch.has_ended(tmp_path)


def test_what_cannot_be_shown_is_refused(folder, capfd):
    for damage, match in (
        (lambda: (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 2}\n'), "of this version"),
        (lambda: (folder / "metrics.jsonl").unlink(), "Wait for its first step"),
        (lambda: (folder / "config.json").write_text("[]"), "config.json"),
        (lambda: (folder / "config.json").unlink(), "cannot be read"),
    ):
        damage()
        code, _, err = watched([folder], capfd)
        assert code == 2 and match in err
    assert watched([folder, "--every", "0"], capfd)[0] == 2
