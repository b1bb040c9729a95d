"""What a trace says of compute and communication, and a run that takes one."""

import json
from unittest import mock

import jax
import pytest
from support.programs import run

from jaxdist.config import RunConfig
from jaxdist.mesh import make_abstract_mesh, parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.runtime.profile import SUMMARY, described, device_times
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program

MESH = parse_mesh("dp=2,tp=2")
TEXT = """HloModule jit_step

ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %all-reduce-start.1 = f32[4]{0} all-reduce-start(%p), replica_groups={{0,1},{2,3}}, to_apply=%add
  %fusion.2 = f32[4]{0} fusion(%p), kind=kLoop, calls=%body
  %all-reduce-done.1 = f32[4]{0} all-reduce-done(%all-reduce-start.1)
  ROOT %all-gather.3 = f32[4]{0} all-gather(%fusion.2), replica_groups={{0,2},{1,3}}, dimensions={0}
}
"""


def event(op: str, start: float, end: float, **more) -> dict:
    args = {"hlo_op": op, "hlo_module": "jit_step", **more.pop("args", {})}
    return {"ph": "X", "pid": 1, "ts": 1e6 * start, "dur": 1e6 * (end - start), "name": op, "args": args, **more}


def on(ordinal: int, *events) -> list[dict]:
    return [each | {"args": each["args"] | {"device_ordinal": str(ordinal)}} for each in events]


def test_communication_beside_compute_is_not_exposed():
    events = on(
        0,
        event("while.7", 0, 10),  # spans what it runs
        event("fusion.2", 0, 4),
        event("all-reduce-start.1", 3, 5),
        event("all-reduce-done.1", 5, 6),
        event("all-gather.3", 7, 9),
    ) + on(1, event("fusion.2", 1, 2))
    first, second = device_times(events, TEXT, MESH, {0: 2, 1: 3})
    assert (first.rank, second.rank) == (2, 3) and first.span == 9 and first.compute == 4
    assert first.communication == {"tp": 3, "dp": 2} and first.exposed == {"tp": 2, "dp": 2} and first.idle == 1
    assert second.compute == 1 and not second.communication and second.idle == 0
    assert "rank 2, a step: compute 2000.00 ms, communication over tp 1500.00 ms, 1000.00 ms" in described(
        [first, second], 2
    )


def test_a_trace_that_names_its_devices_as_processes():
    name = {"ph": "M", "pid": 7, "name": "process_name", "args": {"name": "/device:GPU:1"}}
    host = {"ph": "M", "pid": 8, "name": "process_name", "args": {"name": "/host:CPU"}}
    events = [
        name,
        host,
        event("fusion.2", 0, 1, pid=7),
        event("fusion.2", 0, 5, pid=8),
        {"ph": "X", "ts": 0, "dur": 1},
    ]
    found = device_times(events, TEXT, MESH, {0: 0, 1: 1})
    assert [each.compute for each in found] == [0, 1] and found[0].span == 0


def test_a_step_asks_its_host_for_nothing():
    config = RunConfig(PRESETS["proof"], ParallelConfig(MESH), batch_size=8)
    program = build_program(config, make_abstract_mesh(MESH))
    text = (
        program.step.trace(program.abstract_state(), program.abstract_batch())
        .lower(lowering_platforms=("cpu",))
        .as_text()
    )
    assert "all_reduce" in text and not [word for word in ("callback", "infeed", "outfeed", "send") if word in text]


@pytest.mark.exhaustive
def test_a_run_is_profiled_and_says_what_was_exposed(tmp_path, capfd):
    (tmp_path / "text.txt").write_text("some words to learn from. " * 200)
    words = ["--num-layers", "2", "--width", "32", "--num-heads", "4", "--seq-len", "24", "--batch-size", "4"]
    words += ["--data", tmp_path / "text.txt", "--eval-windows", "8", "--mesh", "dp=2,tp=2"]
    run_words = [*words, "--steps", "4", "--out", tmp_path / "run", "--profile", "2:3"]
    code, out, err = run(capfd, "train", *run_words)
    assert code == 0 and "of steps 2 to 3" in out and "communication over" in out and "no speed" in out, err
    folder = tmp_path / "run/profile/0000"
    found = json.loads((folder / SUMMARY).read_text())
    assert [each["rank"] for each in found] == [0, 1, 2, 3]
    assert all(each["compute"] > 0 and {"tp", "dp"} <= set(each["communication"]) for each in found)
    assert list(folder.glob("plugins/profile/*/perfetto_trace.json.gz")) and list(
        folder.glob("plugins/profile/*/*.xplane.pb")
    )
    for name in ("start_trace", "stop_trace"):
        full = mock.Mock(side_effect=jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: a.pb; No space left on device"))
        with mock.patch.object(jax.profiler, name, full):
            run_words[-3] = tmp_path / name
            code, out, err = run(capfd, "train", *run_words)
        assert code == 0 and "the profile cannot be" in out and "No space left" in out, err
        if name == "stop_trace":
            jax.profiler.stop_trace()
    for more, match in (
        (["--profile", "2:3"], "without --out"),
        (["--out", tmp_path / "a", "--profile", "7:8"], "--profile 7:8"),
    ):
        code, _, err = run(capfd, "train", *words, "--steps", "4", *more)
        assert code == 2 and match in err
