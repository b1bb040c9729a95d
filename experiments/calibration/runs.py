"""Published runs with a time, as the plan's time model takes them: shape, layout, cluster, seconds of a step."""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxdist.parallel.pipeline.schedules import divide_layers
from jaxdist.plan import formulas
from jaxdist.plan.formulas import ModelShape
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.time_model import Layout, Repeated

from .work import elementwise_bytes


def mean_and_max(errors: Sequence[float]) -> tuple[float, float]:
    """Mean and maximum of the sizes of relative errors."""
    sizes = np.abs(errors)
    return float(sizes.mean()), float(sizes.max())


@cache
def published() -> dict:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


def cluster_of(card: str, num_devices: int, **measured) -> Cluster:
    """So many of a card, with other figures where a source states its own; of 72 in a rack 64 are used."""
    hardware = replace(find_hardware(card), **measured)
    per_node = min(num_devices, 64 if hardware.devices_per_node == 72 else hardware.devices_per_node)
    return Cluster(hardware, -(-num_devices // per_node), per_node)


def measured(group: dict) -> dict:
    """Figures of its cards that a group of runs states."""
    return {name: group[name] for name in ("memory_bytes_per_s",) if name in group}


def _cluster(group: str, num_devices: int) -> Cluster:
    facts = published()["groups"][group]
    return cluster_of(facts["accelerator"], num_devices, **measured(facts))


def shape_of_run(group: str, run: dict) -> ModelShape:
    return shape_of(published()["groups"][group] | run)


def shape_of(facts: dict) -> ModelShape:
    """A GPT's, or with ffn_width a Llama's."""
    if "ffn_width" not in facts:
        return ModelShape.gpt(*(facts[name] for name in ("layers", "width", "heads", "seq_len", "vocab_size")))
    return ModelShape(
        *(facts[name] for name in ("layers", "width", "heads", "ffn_width", "seq_len", "vocab_size")),
        num_kv_heads=facts.get("kv_heads"),
        gated_mlp=facts.get("gated", True),
        tied_embedding=facts.get("tied", False),
        learned_positions=False,
        biases=False,
    )


# -------------------------------------------------------------------------------------------------------------- time


@dataclass(frozen=True, eq=False)
class TimeCase:
    """A run with a published time. Where the layout has several columns, the fastest is what the authors are taken to
    have run: their micro-batch was tuned and is not printed."""

    group: str
    name: str
    shape: ModelShape
    layout: Layout
    cluster: Cluster
    seconds: float
    dtype: str = "bfloat16"


def times(group: str, run: dict) -> "list[TimeCase]":
    """What published.toml prints of one run."""
    if group in ("recompute", "weak_scaling"):
        return {"recompute": _recompute_times, "weak_scaling": _weak_scaling_times}[group](run)
    return [_fsdp_time(group, run) if "tokens_per_s" in run else _nanotron_time(group, run)]


MEGATRON = {"gradient_bytes": 2, "overlap_dp": False, "dropout": True, "always_sums": True}


def _recompute_times(run: dict) -> list[TimeCase]:
    shape, cluster = shape_of_run("recompute", run), _cluster("recompute", run["gpus"])
    common = {key: run[key] for key in ("tp", "pp", "chunks", "rows")} | MEGATRON
    common["microbatches"] = run["batch"] // run["rows"]
    layouts = {
        "full": Layout(remat="block", scatter_gather=True, **common),
        "selective": Layout(remat="selective", sp=True, **common),
    }
    return [
        TimeCase("recompute", f"{run['name']} {kind}", shape, layout, cluster, run[f"seconds_{kind}"])
        for kind, layout in layouts.items()
    ]


def _weak_scaling_times(run: dict) -> list[TimeCase]:
    shape, tp = shape_of_run("weak_scaling", run), min(run["model_parallel"], 8)
    pp = run["model_parallel"] // tp
    dp = run["gpus"] // run["model_parallel"]
    layout = Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        **not_printed(shape, pp, dp, run["batch"]),
        remat="block",
        scatter_gather=True,
        **MEGATRON,
    )
    flops = formulas.iteration_flops(shape, run["batch"], "block").value
    seconds = flops / (run["tflops"] * 1e12 * run["gpus"])
    cluster = _cluster("weak_scaling", run["gpus"])
    return [TimeCase("weak_scaling", run["name"], shape, layout, cluster, seconds)]


def not_printed(shape: ModelShape, pp: int, dp: int, batch: int) -> dict[str, np.ndarray]:
    """Columns of every micro-batch, and number of chunks that an interleaved schedule may have: both were tuned."""
    found = [
        (rows, passes, chunks)
        for rows in (1, 2, 4, 8)
        if batch % (dp * rows) == 0
        for passes in [batch // (dp * rows)]
        for chunks in range(1, shape.num_layers // pp + 1)
        if chunks == 1 or (pp > 1 and shape.num_layers % (pp * chunks) == 0 and passes % pp == 0)
    ]
    return dict(zip(("rows", "microbatches", "chunks"), np.array(found).T, strict=True))


BUCKET = 25 * 2**20 / 2  # parameters of a bucket: DistributedDataParallel reduces 25 MiB of 16-bit gradients at a time
NANOTRON_TENSORS = 6  # of a layer


def nanotron_layout(shape: ModelShape, run: dict) -> Layout:
    """With ZeRO-1 every rank's part of every tensor is copied out of what was gathered, one by one."""
    layers = nanotron_layers(shape, run["pp"])
    return Layout(
        messages=np.ceil(shape.parameters / (run["tp"] * run["pp"] * BUCKET)),
        copies=run["dp"] * NANOTRON_TENSORS * max(layers) if run["zero"] else 0,
        **{key: run[key] for key in ("dp", "tp", "pp", "microbatches", "rows", "zero")},
        sp=run["tp"] > 1,
        first_layers=layers[0],
        most_layers=max(layers),
        last_layers=layers[-1],
        gradient_bytes=4,
        always_sums=True,
        flash=True,
        flash2=True,
        overlap_dp=True,
    )


def _nanotron_time(group: str, run: dict) -> TimeCase:
    shape, cluster = shape_of_run(group, run), _cluster(group, run["gpus"])
    layout = nanotron_layout(shape, run)
    tokens = layout.sequences * shape.seq_len
    flops = 3 * sum(formulas.forward_flops_per_token(shape).values()) * tokens
    speed = run["tflops"] * 1e12 if "tflops" in run else run["mfu"] / 100 * cluster.hardware.peak("bfloat16")
    return TimeCase(group, run["name"], shape, layout, cluster, float(flops / (speed * run["gpus"])))


def torchtitan_remat(shape: ModelShape, word: str, dtype: str, tp: int = 1) -> dict:
    """Fields of a layout. "selective" is torchtitan's policy for each operation: attention, what tp's scatters give and
    every other product are kept (of q, k, v, out, gate, up, down in this order), no product in float8, whose operation
    its list lacks; of those made again none is a last one, which nobody needs.

    Source: _apply_ac_to_transformer_block in torchtitan's parallelize_llama.py, December 2024.
    """
    if word != "selective":
        return {"remat": word}
    h, f, kv = shape.width, shape.ffn_width, shape.kv_width
    products = h * (h + 2 * kv + h + 2 * f) if dtype == "float8" else h * (kv + h + f)
    whole, halves, _ = elementwise_bytes(shape, False, True)
    gathered = 2 * (h * 2) / 2 if tp > 1 else 0.0  # before attention and before the MLP, each half of an all-reduce
    again = Repeated(2 * products / tp, 0.0, float(whole + halves) / tp, summed=gathered, launches=1)
    return {"remat": word, "repeated": again}  # of fused attention the word alone repeats nothing


def _fsdp_time(group: str, run: dict) -> TimeCase:
    """The case of a run with ZeRO-3's sharding whose speed is printed in tokens a second and GPU. The keys of
    context parallelism are gathered, and nothing of that hides."""
    shape = shape_of_run(group, run)
    dtype = "float8" if "float8" in published()["groups"][group]["stack"] else "bfloat16"
    remat = torchtitan_remat(shape, run["remat"], dtype) if group == "torchtitan" else {"remat": run["remat"]}
    axes = {"pp": 1, "dp": 8, "cp": 1, "tp": 1, "microbatches": 1}
    layout = Layout(
        **{name: run.get(name, default) for name, default in axes.items()},
        rows=run["rows"],
        **remat,
        zero=3 if run.get("pp", 1) == 1 else 1,  # in a pipeline FSDP keeps what it gathers, and reduces once
        sp="tp" in run,
        gradient_bytes=2 if group == "mpt" else 4,
        gathers_keys=True,
        flash=True,
        flash2=True,
    )
    num_devices = int(layout.num_devices)
    seconds = float(layout.sequences * shape.seq_len / (run["tokens_per_s"] * num_devices))
    return TimeCase(group, run["name"], shape, layout, _cluster(group, num_devices), seconds, dtype)


def nanotron_layers(shape: ModelShape, pp: int) -> tuple[int, ...]:
    """nanotron spreads layers over stages by matmul cost, the head counted as so many layers."""
    return divide_layers(shape.num_layers, pp, last=shape.vocab_size * shape.width / shape.layer_matrices)
