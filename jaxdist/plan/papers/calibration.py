"""The plan's predictions beside published runs: errors, what was fitted to them, and errors of what was left out.

`python -m jaxdist.plan.papers.calibration` prints the tables of docs/plan.md; `--fit` the fitted constants.

What is fitted is little and stated: `FITTED` constants of an `Efficiency` for each software stack. Leave-one-out: the
constants are fitted again without a run, and predict that run.
"""

import argparse
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxdist.parallel.pipeline.schedules import divide_layers
from jaxdist.plan.hardware import GIB, Cluster, find_hardware
from jaxdist.plan.papers import formulas
from jaxdist.plan.papers.formulas import ModelShape
from jaxdist.plan.papers.work import PaperWork, elementwise_bytes
from jaxdist.plan.time_model import EFFICIENCIES, Efficiency, Layout, Repeated, step_time


@dataclass(frozen=True)
class Row:
    """One published number and ours. `left_out`: what a fit without this run predicts; None where nothing is fitted."""

    group: str
    name: str
    quantity: str
    unit: str
    published: float
    predicted: float
    left_out: float | None = None
    seq_len: int | None = None

    @property
    def error(self) -> float:
        """Relative, signed."""
        return self.predicted / self.published - 1

    @property
    def left_out_error(self) -> float | None:
        return None if self.left_out is None else self.left_out / self.published - 1


def mean_and_max(errors: Sequence[float]) -> tuple[float, float]:
    """Of the sizes of relative errors."""
    sizes = np.abs(errors)
    return float(sizes.mean()), float(sizes.max())


@cache
def published() -> dict:
    return tomllib.loads(Path(__file__).with_name("published.toml").read_text(encoding="utf-8"))


@cache
def _cluster(group: str, num_devices: int) -> Cluster:
    facts = published()["groups"][group]
    hardware = find_hardware(facts["accelerator"])
    hardware = replace(hardware, memory_bytes_per_s=facts.get("memory_bytes_per_s", hardware.memory_bytes_per_s))
    return Cluster(hardware, -(-num_devices // hardware.devices_per_node), min(num_devices, hardware.devices_per_node))


def _shape(group: str, run: dict) -> ModelShape:
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

    def predict(self, efficiency: Efficiency) -> float:
        work = PaperWork(self.shape)
        return float(step_time(work, self.layout, self.cluster, efficiency, self.dtype).total.min())


@cache
def time_cases(stack: str) -> tuple[TimeCase, ...]:
    """Every published time of a software stack, in seconds a step; MFU and TFLOP/s turned into seconds as published."""
    groups = [name for name, facts in published()["groups"].items() if facts["stack"] == stack]
    return tuple(case for group in groups for run in published()[group] for case in times(group, run))


def times(group: str, run: dict) -> "list[TimeCase]":
    """What published.toml prints of one run."""
    if group in ("recompute", "weak_scaling"):
        return {"recompute": _recompute_times, "weak_scaling": _weak_scaling_times}[group](run)
    return [_fsdp_time(group, run) if "tokens_per_s" in run else _nanotron_time(group, run)]


MEGATRON = {"gradient_bytes": 2, "overlap_dp": False, "dropout": True, "always_sums": True}


def _recompute_times(run: dict) -> list[TimeCase]:
    shape, cluster = _shape("recompute", run), _cluster("recompute", run["gpus"])
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
    shape, tp = _shape("weak_scaling", run), min(run["model_parallel"], 8)
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
    shape, cluster = _shape(group, run), _cluster(group, run["gpus"])
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
    return {"remat": word, "repeated": again}  # the word is for memory: of fused attention it repeats nothing


def _fsdp_time(group: str, run: dict) -> TimeCase:
    """Of a run whose state is sharded as with ZeRO-3 and whose speed is printed in tokens a second and GPU. The keys of
    context parallelism are gathered, and nothing of that hides."""
    shape = _shape(group, run)
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


# --------------------------------------------------------------------------------------------------------------- fit

LONG = 32768  # positions of a sequence
RUN_SPREAD = 0.05  # relative error that a published time is expected to have under the model

# What is fitted, with the guess it starts from and how far off that may be; other constants of the stack stay guesses.
# The guess holds a constant that few runs depend on near where it was.
FITTED = {
    "a100-megatron": {"matmul": (0.8, 0.2), "half_size": (60.0, 60.0), "hbm": (0.7, 0.2)},
    "h100-nanotron": {"matmul": (0.7, 0.2), "step_seconds": (0.02, 0.02)},
    "h100-mpt": {"matmul": (0.7, 0.2), "flash2": (0.4, 0.2)},
    "h100-torchtitan-float8": {"matmul": (0.5, 0.2), "flash2": (0.4, 0.2)},
}


# No constant is fitted to these; that tp traffic shows in full was chosen after seeing them.
NEVER_FITTED = ("tp_scaling", "torchtitan_405b")


def fit(stack: str, leave_out: int | None = None) -> Efficiency:
    """The stack's `FITTED` constants for the published times, by least squares of log errors and guesses.

    Gauss-Newton with damping: minimises the squares of log(predicted/published) / RUN_SPREAD, and of
    (constant - guess) / spread.
    """
    cases = [
        case for index, case in enumerate(time_cases(stack)) if index != leave_out and case.group not in NEVER_FITTED
    ]
    guess, spread = np.array(list(FITTED[stack].values())).T

    def efficiency(x):
        return replace(
            EFFICIENCIES[stack], **dict(zip(FITTED[stack], (guess + x * spread).clip(1e-3).tolist(), strict=True))
        )

    def errors(x):
        logs = np.log([case.predict(efficiency(x)) / case.seconds for case in cases])
        return np.concatenate([logs / RUN_SPREAD, x])

    x, damping = np.zeros(len(guess)), 1e-2
    now = errors(x)
    for _ in range(30):
        slopes = np.stack([(errors(x + step) - now) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        change = np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), -slopes.T @ now)
        then = errors(x + change)
        if then @ then < now @ now:
            x, now, damping = x + change, then, damping / 10
            if np.abs(change).max() < 1e-4:
                break
        else:
            damping *= 10
    return efficiency(x)


def time_rows(stack: str, leave_out: bool = True) -> list[Row]:
    """Seconds a step, published and predicted with the constants of `EFFICIENCIES`."""
    rows = []
    for index, case in enumerate(time_cases(stack)):
        predicted = case.predict(EFFICIENCIES[stack])
        fitted = leave_out and case.group not in NEVER_FITTED
        left_out = case.predict(fit(stack, leave_out=index)) if fitted else None
        rows.append(Row(case.group, case.name, "step time", "s", case.seconds, predicted, left_out, case.shape.seq_len))
    return rows


# ------------------------------------------------------------------------------------------------------------ memory


def memory_rows() -> list[Row]:
    """GiB, published and predicted. Megatron's are what the paper's formulas give; `peaks` has measured ones."""
    rows = []
    for run in published()["recompute"]:
        shape, tp, pp, chunks = _shape("recompute", run), run["tp"], run["pp"], run["chunks"]
        # The printed figure is 18 bytes for each of 12Lh², spread evenly: no embedding, biases or norms.
        matrices = shape.num_layers * shape.layer_matrices
        state = formulas.state_bytes(matrices, "mixed-adam-fp32-gradients", tp=tp, pp=pp).total
        rows.append(Row("recompute", run["name"], "parameters + optimiser", "GiB", run["state_gib"], state / GIB))
        for kind, sp, remat in (("none", False, "none"), ("selective", True, "selective")):
            layer = formulas.layer_activation_bytes(shape, run["rows"], tp, sp, remat=remat)
            kept = formulas.stage_activation_bytes(layer, shape.num_layers, pp, run["batch"] // run["rows"], chunks)
            quantity = "activations" if kind == "none" else "activations, sp + selective"
            rows.append(
                Row("recompute", run["name"], quantity, "GiB", run[f"activations_{kind}_gib"], float(kept) / GIB)
            )
    return rows


# ------------------------------------------------------------------------------------------------------------ tables


def all_rows(leave_out: bool = True) -> list[Row]:
    """Every published number beside ours."""
    return memory_rows() + [row for stack in FITTED for row in time_rows(stack, leave_out)]


def table(rows: Sequence[Row]) -> str:
    """Markdown, one line a number."""
    lines = [
        "| run | quantity | published | predicted | error | left out |",
        "|---|---|--:|--:|--:|--:|",
    ]
    for row in rows:
        left_out = "" if row.left_out is None else f"{row.left_out_error:+.1%}"
        lines.append(
            f"| {row.group} {row.name} | {row.quantity} | {row.published:.4g} {row.unit} | "
            f"{row.predicted:.4g} {row.unit} | {row.error:+.1%} | {left_out} |"
        )
    return "\n".join(lines)


def summary(rows: Sequence[Row]) -> str:
    """Markdown: mean and max error by what was predicted."""
    lines = ["| what | numbers | mean | max | mean, left out | max, left out |", "|---|--:|--:|--:|--:|--:|"]
    time = [row for row in rows if row.quantity == "step time"]
    kinds = {
        "memory, formulas (Megatron)": [row for row in rows if row.group == "recompute" and row.unit == "GiB"],
        "step time, A100, Megatron": [row for row in time if row.group in ("recompute", "weak_scaling")],
        "step time, H100, nanotron": [row for row in time if row.group == "nanotron"],
        "step time, H100, MPT and torchtitan": [row for row in time if row.group in ("mpt", "torchtitan")],
        f"step time, of these {LONG:,} tokens and more": [
            row for row in time if row.group in ("mpt", "torchtitan") and row.seq_len >= LONG
        ],
        "step time, all that were fitted": [row for row in time if row.group not in NEVER_FITTED],
        "step time, not fitted to (tp 2 to 32)": [row for row in time if row.group == "tp_scaling"],
        "step time, not fitted to (405B, long)": [row for row in time if row.group == "torchtitan_405b"],
    }
    for what, of in kinds.items():
        mean, worst = mean_and_max([row.error for row in of])
        left = [row.left_out_error for row in of if row.left_out is not None]
        ending = "{:.1%} | {:.1%}".format(*mean_and_max(left)) if left else "|"
        lines.append(f"| {what} | {len(of)} | {mean:.1%} | {worst:.1%} | {ending} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--fit", action="store_true", help="print the fitted constants instead of the tables")
    if parser.parse_args().fit:
        for stack in FITTED:
            fitted = fit(stack)
            print(stack, {name: round(getattr(fitted, name), 4) for name in FITTED[stack]})
        return
    rows = all_rows()
    print(summary(rows), table(rows), sep="\n\n")


if __name__ == "__main__":
    main()
