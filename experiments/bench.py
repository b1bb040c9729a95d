"""Tables of what strategies cost.

python -m experiments.bench strategies   state, peak and sent bytes of each strategy, steps/s, equality with one device
python -m experiments.bench overhead     what the mesh machinery costs: one device against plain jit, 8 against one
python -m experiments.bench compile      compile time against depth
python -m experiments.bench search       layouts a second that experiments.plan enumerates, scores and ranks
python -m experiments.bench pipeline     every schedule: ticks, memory predicted and compiled, compile time
python -m experiments.bench checkpoint   what saving adds to steps, how long a restore takes, host memory of a save
python -m experiments.bench input        token files of 0.1, 1 and 10 GB: opening, memory, tokens/s, share of a step

Times of simulated devices are marked so: they are ratios on one CPU, never the speed of a cluster.
"""

import dataclasses
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.table import Table

from experiments import plain
from experiments.cli import CommonFlags, refuse_ignored, require_writable, run_program, set_precision
from experiments.verify import Verifier
from jaxdist.checkpoint import Checkpoints
from jaxdist.config import PRESETS, ModelConfig, ParallelConfig, PrecisionConfig, RunConfig, require_positive
from jaxdist.data import Batches, Corpus, load_corpus
from jaxdist.errors import ConfigError
from jaxdist.layout import local_bytes
from jaxdist.logical import abstract_logical, from_logical, to_logical
from jaxdist.mesh import MeshShape, make_mesh, parse_mesh
from jaxdist.parallel.pipeline import BUFFERS
from jaxdist.parallel.schedules import in_flight, simulate
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.schedule_facts import schedule_facts
from jaxdist.plan.search import rank, search
from jaxdist.plan.trace import named_bytes
from jaxdist.prefetch import Prefetched
from jaxdist.runtime import Devices, acquire_devices
from jaxdist.step import build_program, compiled_peak_bytes
from jaxdist.tokens import CHUNK, SAMPLED_CHUNKS
from jaxdist.verify import random_batches

STRATEGY_ROWS: list[tuple[str, str, dict]] = [
    ("DP flat", "dp=4", {"grad_sync": "flat"}),
    ("DP flat + ZeRO-1", "dp=4", {"grad_sync": "flat", "zero": 1}),
    ("DP flat + ZeRO-2", "dp=4", {"grad_sync": "flat", "zero": 2}),
    ("DP flat + ZeRO-3", "dp=4", {"grad_sync": "flat", "zero": 3}),
    ("DP bucketed", "dp=4", {}),
    ("DP bucketed + ZeRO-1", "dp=4", {"zero": 1}),
    ("DP bucketed + ZeRO-2", "dp=4", {"zero": 2}),
    ("DP bucketed + ZeRO-3", "dp=4", {"zero": 3}),
    ("TP", "tp=4", {}),
    ("TP + SP", "tp=4", {"sp": True}),
    ("DP x TP + SP + ZeRO-1", "dp=2,tp=2", {"sp": True, "zero": 1}),
    ("hybrid (replica x ZeRO-3)", "replica=2,dp=2", {"zero": 3}),
    ("PP 1F1B", "pp=4", {"microbatches": 4, "accumulate": 1}),
    ("PP ZB-H1", "pp=4", {"microbatches": 4, "accumulate": 1, "schedule": "zb-h1"}),
    ("PP x DP + ZeRO-1", "pp=2,dp=2", {"microbatches": 4, "accumulate": 1, "zero": 1}),
    ("PP x TP + SP", "pp=2,tp=2", {"microbatches": 4, "accumulate": 1, "sp": True}),
]

EIGHT_WAY = [
    ("dp=8", {}),
    ("dp=8", {"zero": 1}),
    ("dp=8", {"zero": 2}),
    ("dp=8", {"zero": 3}),
    ("replica=2,dp=4", {"zero": 3}),
    ("dp=4,tp=2", {}),
    ("dp=2,tp=4", {"sp": True, "zero": 1}),
    ("tp=8", {}),
    ("tp=8", {"sp": True}),
    ("pp=8", {"microbatches": 8}),
    ("pp=2,dp=2,tp=2", {"microbatches": 4}),
]


@dataclass(frozen=True)
class BenchFlags(CommonFlags):
    """Compare strategies in one run, as ratios. Strategy flags are set by the table itself."""

    which: tyro.conf.Positional[
        Literal["strategies", "overhead", "compile", "pipeline", "search", "input", "checkpoint"]
    ] = "strategies"
    num_layers: int | None = 6
    width: int | None = 256
    num_heads: int | None = 8
    seq_len: int | None = 256
    vocab_size: int | None = 10000
    batch_size: int = 8
    repeats: int = 5
    """Timed steps; tables show their median."""
    only: str = ""
    """Rows whose name contains this text (strategies, overhead, pipeline)."""
    depths: tuple[int, ...] = (12, 48)
    """For `compile`."""
    gigabytes: tuple[float, ...] = (0.1, 1, 10)
    """For `input`: files written to the temporary folder and removed again."""
    save_every: int = 50
    """For `checkpoint`: steps between two saves."""
    json: str | None = None
    """Also write the figures to this file."""


def main(flags: BenchFlags, console: Console) -> int:
    require_positive("repeats", flags.repeats)
    require_positive("save_every", flags.save_every)
    ignored = {"mesh", "zero", "sp", "grad_sync", "bucket_mb", "accumulate", "remat", "reshard_after_forward"}
    ignored |= {"schedule", "microbatches", "chunks", "stages"}
    if flags.which == "pipeline":
        ignored |= {"num_layers", "batch_size"}
    if flags.which == "search":
        ignored |= {"num_layers", "width", "num_heads", "seq_len", "vocab_size", "batch_size", "dtype", "device"}
    if flags.which == "overhead":  # the plain step is AdamW in fp32 without dropout
        ignored |= {"dtype", "reduce_dtype", "dropout", "optimizer"}
    used = {field.name for field in dataclasses.fields(flags)} - ignored
    refuse_ignored(flags, used, f"the table of `{flags.which}` has rows of its own and would not use it")
    require_writable("--json", flags.json)
    if not flags.depths:
        raise ConfigError("--depths", "at least one number of layers is needed", "Use --depths 12 48")
    if not flags.gigabytes or min(flags.gigabytes) < 0.01:
        raise ConfigError("--gigabytes", "at least one size of 0.01 or more is needed", "Use --gigabytes 0.1 1 10")
    config = flags.run_config()
    set_precision(config)
    bench = {
        "strategies": bench_strategies,
        "overhead": bench_overhead,
        "compile": bench_compile,
        "pipeline": bench_pipeline,
        "search": bench_search,
        "input": bench_input,
        "checkpoint": bench_checkpoint,
    }[flags.which]
    rows, ok = bench(flags, config, console)
    if flags.json:
        record = {"bench": flags.which, "jax": jax.__version__, "model": dataclasses.asdict(config.model), "rows": rows}
        Path(flags.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return 0 if ok else 1


# ---------------------------------------------------------------------------------------------------------------------
# Strategies
# ---------------------------------------------------------------------------------------------------------------------


def bench_strategies(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """One row a strategy on four devices."""
    configs = [(name, with_parallel(config, mesh, {"accumulate": 2, **more})) for name, mesh, more in STRATEGY_ROWS]
    configs = [(name, each) for name, each in configs if flags.only in name]
    devices = acquire_devices(4, flags.device)
    console.print(f"devices: {devices.description}")
    # Warm-up and lr as in a proof: AdamW's first steps amplify rounding noise by the learning rate.
    proof = dataclasses.replace(config.optimizer, lr=1e-4, warmup_steps=0)
    verify = Verifier(devices, steps=2)
    rows = []
    for name, each in configs:
        with console.status(name):
            verdict = verify(name, dataclasses.replace(each, optimizer=proof, steps=2))
            step, peak = timed_step(each, devices)
            seconds = statistics.median(step() for _ in range(flags.repeats))
        rows.append(
            {
                "strategy": name,
                "mesh": str(each.parallel.mesh),
                "steps_per_second": 1 / seconds,
                "simulated": devices.simulated,
                "state_bytes": verdict.run.state_bytes,
                "peak_bytes": peak,
                "sent_bytes": verdict.run.sent_bytes,
                "worst_gradient_error": max(d.error for d in verdict.differences if d.kind == "gradient"),
                "equal": verdict.ok,
            }
        )
    table = Table(box=None, header_style="bold", pad_edge=False)
    timing = "steps/s (simulated)" if devices.simulated else "steps/s"
    for title in ("strategy", "mesh"):
        table.add_column(title)
    for title in (timing, "state MiB/device", "peak MiB/device", "sent MiB/step", "worst gradient error", "equal"):
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(
            row["strategy"],
            row["mesh"],
            f"{row['steps_per_second']:.2f}",
            f"{row['state_bytes'] / 2**20:.1f}",
            "unknown" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}",
            f"{row['sent_bytes'] / 2**20:.1f}",
            f"{row['worst_gradient_error']:.1e}",
            "[green]yes[/]" if row["equal"] else "[bold red]NO[/]",
        )
    console.print(table)
    return rows, all(row["equal"] for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# Overhead
# ---------------------------------------------------------------------------------------------------------------------


def bench_overhead(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """Each mesh in turn with the one-device step, pair by pair, so that a drifting machine cancels out."""
    devices = acquire_devices(8, flags.device)
    console.print(f"devices: {devices.description}")
    one, _ = timed_step(with_parallel(config, "", {}), devices)
    table = Table("step", "against", "ratio", "spread", "target", "", box=None, header_style="bold", pad_edge=False)
    rows = []

    def compare(name: str, against: str, ours: Callable, theirs: Callable, target: float) -> None:
        """Add one row: the median of the paired ratios."""
        with console.status(name):
            ratios = sorted(ours() / theirs() for _ in range(flags.repeats))
        ratio = statistics.median(ratios)
        mark = "[green]met[/]" if ratio <= target else "[bold red]missed[/]"
        table.add_row(name, against, f"{ratio:.3f}", f"{ratios[0]:.3f}-{ratios[-1]:.3f}", f"{target:.2f}", mark)
        rows.append({"step": name, "against": against, "ratio": ratio, "target": target, "met": ratio <= target})

    if flags.only in "one device, shard_map":
        compare("one device, shard_map", "plain jit", one, timed_plain(config, devices), 1.02)
    for mesh, more in EIGHT_WAY:
        name = " ".join([mesh, *(f"{key}={value}" for key, value in more.items()), "(simulated)"])
        if flags.only in name:
            ours, _ = timed_step(with_parallel(config, mesh, more), devices)
            compare(name, "one device", ours, one, 1.15 if (mesh, more) == ("dp=8", {}) else 2.0)
    console.print(table)
    return rows, all(row["met"] for row in rows)


def timed_plain(config: RunConfig, devices: Devices) -> Callable[[], float]:
    program = build_program(config, make_mesh(MeshShape(), devices.devices))
    init, step = plain.make_step(config, jax.tree.map(lambda leaf: leaf.decay, program.layout.leaves))
    batch = jax.device_put(full_batch(config), devices.devices[0])
    held = {"state": init(program.init(config.seed).params)}

    def run() -> float:
        start = time.perf_counter()
        held["state"], loss = step(held["state"], batch)
        jax.block_until_ready((held["state"], loss))
        return time.perf_counter() - start

    run()
    return run


def timed_step(config: RunConfig, devices: Devices) -> tuple[Callable[[], float], int | None]:
    """(run one step and return its seconds, the compiler's peak bytes a device)."""
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    compiled = program.compile_step()
    peak = compiled_peak_bytes(compiled, program.abstract_state())
    batch = program.put(full_batch(config))
    held = {"state": program.init(config.seed)}

    def run() -> float:
        start = time.perf_counter()
        held["state"], metrics = compiled(held["state"], batch)
        jax.block_until_ready((held["state"], metrics))
        return time.perf_counter() - start

    run()
    return run, peak


def full_batch(config: RunConfig) -> dict:
    """A random batch in which every target counts."""
    batch = random_batches(config, 1)[0]
    return {**batch, "targets": np.maximum(batch["targets"], 0)}


# ---------------------------------------------------------------------------------------------------------------------
# Compile time
# ---------------------------------------------------------------------------------------------------------------------


def bench_compile(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """Seconds to trace, lower and compile the step, by number of layers; the first depth is the unit."""
    devices = acquire_devices(1, flags.device)
    table = Table("layers", "seconds", "ratio", box=None, header_style="bold", pad_edge=False)
    seconds: dict[int, list[float]] = {depth: [] for depth in flags.depths}
    for repeat in range(flags.repeats + 1):
        for depth in flags.depths:
            model = dataclasses.replace(config.model, num_layers=depth)
            program = build_program(dataclasses.replace(config, model=model), make_mesh(MeshShape(), devices.devices))
            with console.status(f"{depth} layers, {repeat} of {flags.repeats}"):
                start = time.perf_counter()
                program.compile_step()
            if repeat:  # the first round warms up
                seconds[depth].append(time.perf_counter() - start)
    unit = statistics.median(seconds[flags.depths[0]])
    rows = [
        {"layers": depth, "seconds": statistics.median(s), "ratio": statistics.median(s) / unit}
        for depth, s in seconds.items()
    ]
    for row in rows:
        table.add_row(str(row["layers"]), f"{row['seconds']:.2f}", f"{row['ratio']:.3f}")
    console.print(table)
    return rows, all(row["ratio"] <= 1.2 for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# Pipelines
# ---------------------------------------------------------------------------------------------------------------------

STAGES, LAYERS, ROWS = 4, 4, 2  # layers a stage, sequences a micro-batch
# (schedule, micro-batches, what is recomputed); the first row is the one the others are predicted from.
PIPELINE_ROWS = [
    *(("1f1b", micro, "none") for micro in (8, 16, 32)),
    *(("gpipe", micro, "none") for micro in (8, 16, 32)),
    *((name, 16, "none") for name in ("interleaved", "zb-h1", "zb-v", "v-half", "v-min")),
]


def bench_pipeline(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """Memory: the compiler's temporaries against the buffers the schedule asks for, plus what 1F1B needs beside them.

    Compile time: against 1F1B with 8 micro-batches, and with four times the layers a stage.
    """
    devices = acquire_devices(STAGES, flags.device)
    console.print(f"devices: {devices.description}")

    def measure(schedule: str, micro: int, remat: str, layers: int = LAYERS) -> dict:
        model = dataclasses.replace(config.model, num_layers=STAGES * layers)
        more = {"schedule": schedule, "microbatches": micro, "remat": remat}
        each = dataclasses.replace(config, model=model, batch_size=ROWS * micro)
        each = with_parallel(each, f"pp={STAGES}", more)
        program = build_program(each, make_mesh(each.parallel.mesh, devices.devices))
        start = time.perf_counter()
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
        compiled = traced.lower().compile()
        seconds, memory = time.perf_counter() - start, compiled.memory_analysis()
        table = each.parallel.pipeline
        return {
            "schedule": schedule,
            "microbatches": micro,
            "remat": remat,
            "layers_per_stage": layers,
            "ticks": table.num_ticks,
            "idle_share": simulate(table).idle_share,
            "in_flight": max(in_flight(table)) / table.num_chunks,
            "buffer_bytes": sum(named_bytes(traced.jaxpr, BUFFERS).values()),
            "compiled_bytes": memory.temp_size_in_bytes,
            "compile_seconds": seconds,
        }

    measure(*PIPELINE_ROWS[0])  # warms up
    first = measure(*PIPELINE_ROWS[0])
    rows = [first]
    for name, micro, remat in PIPELINE_ROWS[1:]:
        if flags.only in name:
            with console.status(f"{name}, {micro} micro-batches"):
                rows.append(measure(name, micro, remat))
    beside = first["compiled_bytes"] - first["buffer_bytes"]
    deep = measure(*PIPELINE_ROWS[0], layers=4 * LAYERS)
    deeper = deep["compile_seconds"] / first["compile_seconds"]

    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("schedule", "micro-batches", "ticks", "idle (simulated)", "in flight", "buffers MiB"):
        table.add_column(title, justify="left" if title == "schedule" else "right")
    for title in ("predicted MiB", "compiled MiB", "error", "compile s", "/ first"):
        table.add_column(title, justify="right")
    for row in rows:
        row["predicted_bytes"] = row["buffer_bytes"] + beside
        row["error"] = row["predicted_bytes"] / row["compiled_bytes"] - 1
        table.add_row(
            row["schedule"],
            str(row["microbatches"]),
            str(row["ticks"]),
            f"{row['idle_share']:.1%}",
            f"{row['in_flight']:g}",
            *(f"{row[name] / 2**20:.1f}" for name in ("buffer_bytes", "predicted_bytes", "compiled_bytes")),
            f"{row['error']:+.1%}",
            f"{row['compile_seconds']:.1f}",
            f"{row['compile_seconds'] / first['compile_seconds']:.2f}",
        )
    console.print(table)
    console.print(
        f"{4 * LAYERS} layers a stage against {LAYERS}: compile time {deeper:.2f} times. In flight: activations of one "
        "micro-batch on the stage that holds most. Predicted: the buffers, and what the first row needs beside its own."
    )
    ok = all(abs(row["error"]) < 0.05 for row in rows) and deeper < 1.5
    return [*rows, {**deep, "compile_ratio": deeper}], ok


# ---------------------------------------------------------------------------------------------------------------------
# Search
# ---------------------------------------------------------------------------------------------------------------------

SEARCH_ROWS = [("gpt2-124m", 1, 64), ("7b", 1, 512), ("7b", 8, 512), ("70b", 16, 512)]  # preset, nodes, sequences
SEARCH_SECONDS = 2.0  # for 10,000 layouts


def bench_search(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """Seconds to enumerate, score and rank; the first search of a process, and one that knows its schedules."""
    table = Table("model", "devices", "layouts", "first s", "again s", "layouts/s", box=None, header_style="bold")
    rows = []
    for preset, nodes, batch_size in SEARCH_ROWS:
        base = RunConfig(PRESETS[preset], precision=PrecisionConfig("bfloat16"), batch_size=batch_size)
        cluster = Cluster(find_hardware("h100"), nodes)
        schedule_facts.cache_clear()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            found = search(base, cluster, "cudnn")
            rank(found)
            seconds.append(time.perf_counter() - start)
        row = {"model": preset, "devices": cluster.num_devices, "layouts": len(found)}
        row |= {"first_seconds": seconds[0], "again_seconds": seconds[1], "per_second": len(found) / seconds[0]}
        rows.append(row)
        table.add_row(
            preset,
            str(cluster.num_devices),
            f"{len(found):,}",
            *(f"{s:.2f}" for s in seconds),
            f"{row['per_second']:,.0f}",
        )
    console.print(table)
    return rows, all(row["per_second"] > 10_000 / SEARCH_SECONDS for row in rows)


# ---------------------------------------------------------------------------------------------------------------------
# Input
# ---------------------------------------------------------------------------------------------------------------------

OPEN_SECONDS = 1.0
OPEN_BYTES = 64 << 20  # of memory, whatever the size of the file
READ_BATCHES = 200


def bench_input(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """What it costs to open token files and to read batches from them, and the part of a step that waits for input."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in ("GB", "tokens", "open s", "first batch ms", "tokens/s read", "memory grew MiB"):
        table.add_column(title, justify="right")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        for gigabytes in sorted(flags.gigabytes):
            with console.status(f"{gigabytes:g} GB"):
                write_tokens(path, int(gigabytes * 1e9), config.model.vocab_size)
                rows.append({"gigabytes": gigabytes, **measure_input(path, config)})
            row = rows[-1]
            table.add_row(
                f"{gigabytes:g}",
                f"{row['tokens']:,}",
                f"{row['open_seconds']:.3f}",
                f"{row['first_batch_seconds'] * 1e3:.1f}",
                f"{row['tokens_per_second']:,.0f}",
                "unknown" if row["grown_bytes"] is None else f"{row['grown_bytes'] / 2**20:.1f}",
            )
        console.print(table)
        console.print(
            f"Opening checks an even sample of at most {CHUNK * SAMPLED_CHUNKS:,} tokens. Read: {READ_BATCHES} batches "
            f"of {config.batch_size} x {config.model.seq_len} tokens from all over the file, by one thread. Memory: "
            "resident, from before opening to after the last batch. The files had just been written, and what of them "
            "the system still held in memory came from there."
        )
        shares = input_shares(load_corpus(str(path), config.model.vocab_size), flags, config, console)
    grown = [row["grown_bytes"] or 0 for row in rows]
    return [*rows, shares], max(row["open_seconds"] for row in rows) < OPEN_SECONDS and max(grown) < OPEN_BYTES


def bench_checkpoint(flags: BenchFlags, config: RunConfig, console: Console) -> tuple[list[dict], bool]:
    """What saving adds to the steps of a run, and what a save and a restore of GPT-2 124M take."""
    share = save_share(flags, config, console)
    table = Table("model", box=None, header_style="bold", pad_edge=False)
    for title in ("state MiB", "on disk MiB", "blocks s", "committed s", "checked s", "restored s", "host MiB, save"):
        table.add_column(title, justify="right")
    rows = [
        save_once(flags, name, each)
        for name, each in (
            (f"{config.model.num_layers} x {config.model.width}", config.model),
            ("gpt2-124m", PRESETS["gpt2-124m"]),
        )
    ]
    for row in rows:
        mib = [f"{row[key] / 2**20:,.0f}" for key in ("state_bytes", "disk_bytes")]
        seconds = [
            f"{row[key]:.2f}" for key in ("blocks_seconds", "commit_seconds", "check_seconds", "restore_seconds")
        ]
        grown = "unknown" if row["grown_bytes"] is None else f"{row['grown_bytes'] / 2**20:,.0f}"
        table.add_row(row["model"], *mib, *seconds, grown)
    console.print(table)
    console.print(
        "One device, fp32, AdamW. Blocks: until training goes on. Committed: hashed, flushed, renamed. Checked: every "
        "file hashed. Restored: read and put into the layout, with compiling. Host: the most that the process grew by."
    )
    return [share, *rows], True


def save_share(flags: BenchFlags, config: RunConfig, console: Console) -> dict:
    """The same steps with and without a save among them, one after the other: the ratio of their times."""
    config = with_parallel(config, "dp=2", {"zero": 1})
    devices = acquire_devices(2, flags.device)
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    step, batch, state = program.compile_step(), program.put(full_batch(config)), program.init(0)
    state, _ = step(state, batch)
    times: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(folder, keep_last=1)
        for repeat in range(flags.repeats):
            for saving in (False, True):
                with console.status(f"{flags.save_every} steps, {repeat + 1} of {flags.repeats}"):
                    start = time.perf_counter()
                    for index in range(flags.save_every):
                        if saving and index == 0:
                            checkpoints.save(int(state.step), to_logical(program, state), {})
                        state, metrics = step(state, batch)
                        jax.block_until_ready(metrics)
                    times[saving].append(time.perf_counter() - start)
            checkpoints.wait()
    ratios = [b / a for a, b in zip(times[False], times[True], strict=True)]
    share = statistics.median(ratios) - 1
    simulated = ", simulated" if devices.simulated else ""
    console.print(
        f"a save every {flags.save_every} steps of {statistics.median(times[False]) / flags.save_every:.2f} s (dp=2"
        f"{simulated}) adds {share:.1%} to them (median of {flags.repeats} pairs, {min(ratios) - 1:.1%} to "
        f"{max(ratios) - 1:.1%}), the writing and hashing beside them counted"
    )
    return {"save_every": flags.save_every, "share": share, "ratios": ratios, "seconds": times[False] + times[True]}


def save_once(flags: BenchFlags, name: str, model: ModelConfig) -> dict:
    config = RunConfig(model, ParallelConfig(), batch_size=1)
    program = build_program(config, make_mesh(config.parallel.mesh, acquire_devices(1, flags.device).devices))
    state = program.init(0)
    jax.block_until_ready(state)
    with tempfile.TemporaryDirectory() as folder, Growth() as growth:
        checkpoints = Checkpoints(folder)
        start = time.perf_counter()
        checkpoints.save(0, to_logical(program, state), {})
        blocked = time.perf_counter()
        checkpoints.wait()
        committed = time.perf_counter()
        grown = growth.most()
        manifest = checkpoints.check(0)
        checked = time.perf_counter()
        again = from_logical(program, checkpoints.restore(manifest, abstract_logical(program)))
        jax.block_until_ready(again)
        restored = time.perf_counter()
    return {
        "model": name,
        "state_bytes": local_bytes(state),
        "disk_bytes": sum(size for size, _ in manifest.files.values()),
        "blocks_seconds": blocked - start,
        "commit_seconds": committed - start,
        "check_seconds": checked - committed,
        "restore_seconds": restored - checked,
        "grown_bytes": grown,
    }


class Growth:
    """The most that this process's memory has grown by, looked at every few milliseconds."""

    def __enter__(self) -> Self:
        self._before, self._most, self._stop = resident_bytes(), resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if self._before is not None:
            self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, resident_bytes())

    def most(self) -> int | None:
        return None if self._before is None else self._most - self._before

    def __exit__(self, *_) -> None:
        self._stop.set()


def write_tokens(path: Path, num_bytes: int, vocab_size: int) -> None:
    block = np.random.default_rng(0).integers(0, vocab_size, 5_000_000).astype("<u2")
    with open(path, "wb") as file:
        while num_bytes > 0:
            file.write(block[: num_bytes // 2].tobytes())
            num_bytes -= block.nbytes


def measure_input(path: Path, config: RunConfig) -> dict:
    before, start = resident_bytes(), time.perf_counter()
    corpus = load_corpus(str(path), config.model.vocab_size)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)
    opened = time.perf_counter()
    batches[0].read()
    first = time.perf_counter()
    for step in range(READ_BATCHES):
        batches[step].read()
    seconds = time.perf_counter() - first
    return {
        "tokens": corpus.num_train + corpus.num_held_out,
        "open_seconds": opened - start,
        "first_batch_seconds": first - opened,
        "tokens_per_second": READ_BATCHES * config.batch_size * config.model.seq_len / seconds,
        "grown_bytes": None if before is None else resident_bytes() - before,
    }


def resident_bytes() -> int | None:
    """Memory of this process; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def input_shares(corpus: Corpus, flags: BenchFlags, config: RunConfig, console: Console) -> dict:
    """The part of a step's time that is spent on its input, prefetched and not."""
    devices = acquire_devices(2, flags.device)
    config = with_parallel(config, "dp=2", {})
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    step, state = program.compile_step(), program.init(config.seed)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)

    def make(index: int):
        return jax.block_until_ready(program.put(batches[index]))

    shares = {}
    num_steps = flags.repeats + 1  # the first batch has no step to hide behind, and is left out
    for name, depth in (("prefetched", 2), ("not_prefetched", 0)):
        waits, seconds = [], []
        with Prefetched(make, 0, num_steps if depth else 0, max(depth, 1)) as inputs:
            for index in range(num_steps):
                start = time.perf_counter()
                batch = next(inputs) if depth else make(index)
                waits.append(time.perf_counter() - start)
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - start)
        shares[name] = sum(waits[1:]) / sum(seconds[1:])
    marked = " (simulated)" if devices.simulated else ""
    console.print(
        f"Input's share of {flags.repeats} steps of this model on dp=2{marked}: {shares['prefetched']:.2%} prefetched, "
        f"{shares['not_prefetched']:.2%} read in the loop."
    )
    return {**shares, "simulated": devices.simulated}


def with_parallel(config: RunConfig, mesh: str, more: dict) -> RunConfig:
    parallel = ParallelConfig(mesh=parse_mesh(mesh), attention=config.parallel.attention, **more)
    return dataclasses.replace(config, parallel=parallel)


if __name__ == "__main__":
    run_program(BenchFlags, main, "experiments.bench")
