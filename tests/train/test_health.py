"""Numbers that are none, copies that differ, losses that jump, processes that are slow: found, and named."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest
from conftest import DEVICES
from rich.console import Console

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.runtime import processes, stragglers, watchdog
from jaxdist.runtime.fault_injection import parse_fault
from jaxdist.runtime.health import SpikeWatch, checksum, gather_ranks, make_replica_check, name_culprits
from jaxdist.runtime.stragglers import EVERY, StragglerWatch, slow_processes
from jaxdist.runtime.watchdog import EXIT_STUCK, Agreement
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

MODEL = GPT2Config(num_layers=2, width=32, num_heads=4, ffn_width=64, seq_len=16, vocab_size=100)


def make_program(mesh, drill=None, precision="float32", **parallel):
    shape = parse_mesh(mesh)
    config = RunConfig(
        MODEL,
        ParallelConfig(mesh=shape, **parallel),
        OptimizerConfig(warmup_steps=0),
        PrecisionConfig(precision, loss_scale=1.0) if precision == "float16" else PrecisionConfig(precision),
        batch_size=8,
        steps=4,
    )
    poison = drill and parse_fault(drill, shape.num_devices).poison()
    return build_program(config, make_mesh(shape, DEVICES), poison=poison)


@pytest.mark.parametrize(
    ("mesh", "settings", "drill", "named"),
    [
        ("dp=4", {"zero": 3}, "nan:step=2,rank=1,leaf=blocks.ln_mlp.scale", "rank 1 (dp=1): blocks.ln_mlp.scale"),
        ("pp=2,dp=2", {"stages": "1,1"}, "nan:step=2,rank=3,leaf=positions", "rank 3 (pp=1,dp=1): positions"),
        ("dp=2", {"precision": "bfloat16", "zero": 2}, "inf:step=2,rank=0", "rank 0 (dp=0): blocks.attention.b_out"),
    ],
)
def test_one_bad_shard_is_named_and_changes_no_bit(mesh, settings, drill, named):
    """All ranks agree in the same step; the step after it is a normal one."""
    program = make_program(mesh, drill, **settings)
    step, batches = program.compile_step(), random_batches(program.config, 3)
    state, metrics = step(program.init(0), program.put(batches[0]))
    assert name_culprits(program, gather_ranks("", metrics["not_finite"])) == []
    before = jax.device_get((state.params, state.master, state.moments))

    state, metrics = step(state, program.put(batches[1]))
    assert not np.isfinite(metrics["grad_norm"]) and np.isfinite(metrics["loss"]) and int(state.step) == 2
    assert [str(culprit) for culprit in name_culprits(program, gather_ranks("", metrics["not_finite"]))] == [named]
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get((state.params, state.master, state.moments)))

    state, metrics = step(state, program.put(batches[2]))
    assert np.isfinite(metrics["grad_norm"])
    assert not np.array_equal(before[0]["tokens"], state.params["tokens"])


@pytest.mark.parametrize(("zero", "accumulate"), [(0, 2), (2, 1)])
def test_with_overlap_the_rank_is_looked_for_before_blocks_are_summed(zero, accumulate):
    """A bias that is NaN on one rank spoils its loss and gradients; then the sums, and with them all ranks."""
    program = make_program("dp=4", zero=zero, overlap=True, accumulate=accumulate)
    state = program.init(0)
    bias = state.params["blocks"]["mlp"]["b_up"]
    copies = [x.data * (np.nan if rank == 2 else 1) for rank, x in enumerate(bias.addressable_shards)]
    state.params["blocks"]["mlp"]["b_up"] = jax.make_array_from_single_device_arrays(bias.shape, bias.sharding, copies)
    _, metrics = program.step(state, program.put(random_batches(program.config, 1)[0]))
    found = name_culprits(program, gather_ranks("", metrics["not_finite"]))
    of_blocks = {c.rank: [name for name in c.names if name.startswith(("loss", "blocks"))] for c in found}
    assert [rank for rank, names in of_blocks.items() if names] == [2] and "blocks.mlp.b_up" in of_blocks[2]


@pytest.mark.parametrize(
    ("mesh", "settings", "rank", "named"),
    [
        ("dp=4", {}, 2, [2]),
        ("dp=2,tp=2", {"zero": 1}, 1, [1]),
        ("dp=2", {}, 1, [0, 1]),  # of two that differ nobody knows which is right
        ("replica=3,dp=2", {"zero": 3}, 4, [4]),
        ("pp=2,dp=4", {"stages": "1,1"}, 6, [6]),
    ],
)
def test_a_copy_that_differs_is_named(mesh, settings, rank, named):
    shape = parse_mesh(mesh)
    config = RunConfig(MODEL, ParallelConfig(mesh=shape, **settings), batch_size=48)
    program = build_program(config, make_mesh(shape, DEVICES))
    check, state = make_replica_check(program), program.init(0)
    assert check(state) == []
    drill = parse_fault(f"flip:step=1,rank={rank}", shape.num_devices)
    flipped = state._replace(params=drill.flip(1, program.mesh, state.params))
    culprits = check(flipped)
    assert [culprit.rank for culprit in culprits] == named
    assert all(culprit.names == ("params.blocks.attention.b_out",) for culprit in culprits)
    assert drill.flip(2, program.mesh, state.params) is state.params


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int32"])
def test_a_checksum_sees_every_flipped_bit_and_a_swap(dtype):
    x = np.arange(1, 1000).astype(dtype)
    whole = int(checksum(x))
    for place in (0, 1, 512, 998):
        for bit in range(8 * x.dtype.itemsize):
            changed = x.copy()
            changed.view(f"u{x.dtype.itemsize}")[place] ^= 1 << bit
            assert int(checksum(changed)) != whole
    swapped = x.copy()
    swapped[[3, 4]] = x[[4, 3]]
    assert int(checksum(swapped)) != whole


def test_a_spike_is_what_stands_out_of_noise_and_trend():
    rng = np.random.default_rng(0)
    losses = 5 * np.exp(-np.arange(200) / 80) + 2 + 0.05 * rng.standard_normal(200)
    watch = SpikeWatch()
    assert not any(watch.is_spike(loss) for loss in losses)
    assert watch.is_spike(losses[-1] * 1.5) and watch.is_spike(float("inf"))
    assert not watch.is_spike(losses[-1]), "a spike is not remembered"
    again = SpikeWatch(recent=watch.recent)
    assert again.is_spike(losses[-1] * 1.5)
    assert not SpikeWatch().is_spike(100.0), "nothing is judged before half a window was seen"


def test_a_steep_fall_that_ends_is_no_spike():
    losses = np.arange(16, 0, -1) / 4
    assert not SpikeWatch(recent=losses.tolist()).is_spike(losses[-1])  # their line goes on to 0


def test_processes_stop_two_steps_after_the_first_to_ask_with_one_in_flight(monkeypatch):
    class Store(dict):
        def key_value_set(self, key, value, allow_overwrite=False):
            assert allow_overwrite or key not in self  # JAX raises where a key is there
            self[key] = value

        def key_value_dir_get(self, prefix):
            return self.items()

    store = Store()
    monkeypatch.setattr(watchdog, "coordination_client", lambda: store)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    asks, other = Agreement(), Agreement()
    assert asks.stop_reason(3, ("SIGTERM", 143)) is None and other.stop_reason(3, None) is None
    assert asks.stop_reason(4, ("SIGTERM", 143)) is None and other.stop_reason(4, None) is None
    assert asks.stop_reason(5, ("SIGTERM", 143)) == other.stop_reason(5, None) == ("process 0: SIGTERM", 143)
    asks, other = Agreement(), Agreement()  # of the loop that begins after a roll-back to step 1
    assert asks.stop_reason(1, ("SIGTERM", 143)) is None and other.stop_reason(2, None) is None
    assert asks.stop_reason(3, ("SIGTERM", 143)) == other.stop_reason(3, None) == ("process 0: SIGTERM", 143)


def test_a_process_whose_input_is_slow_is_named(monkeypatch):
    even = {"laps": {"input": 0.0, "host": 0.001}, "host": 0.001, "device": 0.01}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes, "from_all", lambda name, mine: [json.dumps(even), mine])
    monkeypatch.setattr(stragglers, "_probe", lambda device: 0.01)
    console = Console(record=True, width=200)
    watch = StragglerWatch(console)
    watch.add({"input": 0.5, "host": 0.001})
    watch.report(EVERY)
    assert f"step {EVERY}: process 1 spends 501 ms a step on its input and host" in console.export_text()


def test_slow_processes_are_named():
    even = {"host": 0.002, "device": 0.010}
    assert slow_processes([even, even]) == []
    assert slow_processes([even, {"host": 0.5, "device": 0.010}]) == [
        "process 1 spends 500 ms a step on its input and host, the median is 2 ms"
    ]
    (line,) = slow_processes([even, even, {"host": 0.002, "device": 0.030}, even])
    assert line.startswith("process 2 needs 30.0 ms")
    assert slow_processes([even, {"host": 0.009, "device": 0.011}]) == []


def test_a_stuck_process_ends_where_standard_error_is_no_file(tmp_path):
    """A notebook's stand-in for standard error has no file descriptor, which faulthandler needs."""
    program = (
        "import io, sys, time; sys.stderr = io.StringIO()\n"
        "from jaxdist.runtime.watchdog import Watchdog\n"
        f"with Watchdog(0.2, {str(tmp_path / 'stacks')!r}) as watchdog:\n"
        "    watchdog.alive('waiting for a rank'); time.sleep(120)\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert ended.returncode == EXIT_STUCK
    for text in (ended.stderr, (tmp_path / "stacks").read_text()):
        assert "nothing was finished for 0.2 s while waiting for a rank" in text and "most recent call first" in text


def test_a_drill_that_spoils_a_local_gradient_is_refused_with_overlap():
    with pytest.raises(ConfigError, match="Leave overlap out"):
        make_program("dp=4", "nan:step=2,rank=3", overlap=True)


@pytest.mark.parametrize(
    "text",
    [
        "nan",
        "nan:",
        "rot:step=1",
        "nan:step",
        "nan:step=x",
        "nan:step=1,who=2",
        "nan:step=1,step=2",
        "flip:step=1,rank=4",
        "stuck:step=2,rank=3",
        "flip:step=2,leaf=positions",
        "batch:step=1,process=0",
    ],
)
def test_a_drill_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="drill="):
        parse_fault(text, 4)
