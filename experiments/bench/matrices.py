"""What Muon adds to an update of a large model, by closed forms: bytes of each way to whole matrices, FLOPs, time."""

import math
from dataclasses import replace

import jax
from rich.console import Console

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.mesh import parse_mesh
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import muon
from jaxdist.placement import make_layout
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.proof.trace import sent_among
from jaxdist.plan.search import Candidates, score
from jaxdist.plan.traffic import split_of
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from .flags import BenchFlags
from .rows import Measured, Row

NODES = 8  # of 8 H100s
# Model: sequences of a batch of a million tokens, their length, layouts.
CASES = {
    "llama3-8b": (
        128,
        8192,
        [
            ("dp=64", {"zero": 1}),
            ("dp=64", {"zero": 3}),
            ("replica=8,dp=8", {"zero": 3}),
            ("dp=8,tp=8", {"zero": 1, "sp": True}),
            ("pp=8,dp=8", {"zero": 1, "microbatches": 16}),
            ("pp=4,dp=4,tp=4", {"zero": 1, "sp": True, "microbatches": 16}),
            ("dp=64", {"zero": 0}),
        ],
    ),
    "qwen3-30b-a3b": (
        256,
        4096,
        [
            ("dp=64,ep=8", {"zero": 1}),
            ("dp=64,ep=8", {"zero": 3}),
            ("dp=64,ep=64", {"zero": 1}),
            ("dp=64", {"zero": 3}),
            ("dp=32,ep=8,tp=2", {"zero": 1, "sp": True, "experts_over_tp": True}),
            ("pp=4,dp=16,ep=8", {"zero": 1, "microbatches": 16}),
        ],
    ),
}


def bench_matrices(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """MiB that a device sends for whole matrices in the way that is chosen, with all exchanged, with sums, and with all
    gathered; FLOPs; optimizer state and step time, AdamW's and Muon's."""
    rows = []
    for model, (_, _, layouts) in CASES.items():
        for mesh, strategy in layouts:
            rows += rows_of(f"{model}, {mesh}, ZeRO-{strategy['zero']}", model, mesh, strategy)
    return rows, None


def rows_of(name: str, *layout) -> list[Row]:
    adamw, ours = (score_of(*layout, optimizer) for optimizer in ("adamw", "muon"))
    run = config_of(*layout, "muon")
    leaves = jax.tree.leaves(make_layout(run.model, run.parallel, run.part_layers).trained.leaves)
    found = [sent_and_done(split) for _, split in muon.joined([*filter(None, map(split_of, leaves))])]
    *sent, flops = (sum(column) for column in zip(*found, strict=True))
    ways = ("chosen", "exchanged", "by sums", "gathered")
    return [
        *(Row(f"{name}: {way}", x, "bytes") for way, x in zip(ways, sent, strict=True)),
        Row(f"{name}: matmuls", flops, "FLOP"),
        Row(f"{name}: state", ours[0], "bytes", against="AdamW's", ratio=ours[0] / adamw[0]),
        Row(f"{name}: step", ours[1], "s", against="AdamW's", ratio=ours[1] / adamw[1]),
    ]


def config_of(model: str, mesh: str, strategy: dict, optimizer: str) -> RunConfig:
    rows, seq_len, _ = CASES[model]
    parallel, sizes = ParallelConfig(parse_mesh(mesh), **strategy), replace(PRESETS[model], seq_len=seq_len)
    return RunConfig(sizes, parallel, OptimizerConfig(optimizer), PrecisionConfig("bfloat16"), batch_size=rows)


def score_of(model: str, mesh: str, strategy: dict, optimizer: str) -> tuple[float, float]:
    """(bytes of the optimizer's state, seconds of a step)."""
    config = config_of(model, mesh, strategy, optimizer)
    found = score(config, Candidates.of(config), Cluster(find_hardware("h100"), NODES), "cudnn")
    return float(found.memory.optimizer[0]), float(found.time.total[0])


def sent_and_done(together: muon.Split) -> tuple[int, int, int, int, int]:
    """Bytes that matrices send in each way, and FLOPs in the chosen one."""
    local, ranks, _ = together
    split = [dim for dim in (muon.ROWS, muon.COLUMNS) if ranks[dim] > 1]

    def sent(way: muon.Way) -> int:
        return 4 * sum(
            each.count * sent_among(ranks[each.dim], each.kind, each.elements)
            for each in muon.messages(local, ranks, way)
        )

    by_sums = min((sent(muon.Way(tuple({*split} - {dim}), dim)) for dim in split), default=0)
    gathered = 4 * math.prod(local) * (ranks[muon.ROWS] * ranks[muon.COLUMNS] - 1)
    exchanged = sent(muon.Way(tuple(split), None))
    return sent(muon.choose_way(local, ranks)), exchanged, by_sums, gathered, muon.flops(local, ranks)
