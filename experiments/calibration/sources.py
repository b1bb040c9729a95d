"""Every published step time, by who measured it: how far off a prediction is for a source that it was not fitted to.

`python -m experiments.calibration.sources` leaves each source out in turn, fits the constants of an accelerator to the
others, predicts the one left out, and prints every row, worst first; and how often two runs of one model, both left
out, are in the published order. `--write h100 FILE` fits them to all and writes
them for `experiments.plan --efficiencies FILE`, with the bar that 90 % of the rows left out are within.
"""

import argparse
import csv
import itertools
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxdist.files import write_whole
from jaxdist.plan import formulas
from jaxdist.plan.time_model import BARS, EFFICIENCIES, Efficiency, Layout, Repeated, efficiency_of, kind_of, step_time

from . import runs
from .runs import MEGATRON, TimeCase, cluster_of, mean_and_max, not_printed
from .work import PaperWork, elementwise_bytes

# Of the groups of published.toml.
SOURCES = {
    "recompute": "Megatron-LM, 2022",
    "weak_scaling": "Megatron-LM, 2021",
    "nanotron": "nanotron",
    "tp_scaling": "nanotron",
    "mpt": "llm-foundry",
    "torchtitan": "torchtitan",
    "torchtitan_405b": "torchtitan",
}
ACCELERATORS = {"h100": ("h100", "h200"), "a100": ("a100-80",), "gb200": ("gb200", "b200")}
FLASH2 = ("llm-foundry", "torchtitan")  # whose attention is FlashAttention-2's, or Triton's; nanotron's is as well
TRANSFORMER_ENGINE = ("Megatron Core", "Pax")  # whose casts to float8 are kernels of their own
COMPILED = ("MaxText", "Pax")  # by XLA, a step at a time
COVERED = 0.9  # of the rows left out, by the bar

# The guess of each constant and how far off it may be. Where no source tells, the guess stays.
GUESSES = {
    "matmul": (0.7, 0.1),
    "half_size": (60.0, 40.0),
    "attention": (0.45, 0.15),
    "flash2": (0.3, 0.15),
    "float8": (0.65, 0.15),
    "hbm": (0.7, 0.15),
    "inside": (0.7, 0.15),
    "between": (0.6, 0.12),
    "latency": (1.0, 0.5),
    "hide": (0.7, 0.1),
    "layer_seconds": (2e-4, 2e-4),
    "step_seconds": (0.02, 0.02),
    "straggle": (0.005, 0.005),
}
PARTS_OF_A_PEAK = ("matmul", "attention", "flash2", "float8", "hbm", "inside", "between", "hide")
SPREAD = 0.12  # relative error from which a row counts less and less
SAME = 0.02  # by which two releases of one program differ on one run: no order of runs that are closer is asked for
ENOUGH = 1e-3  # of what `GUESSES` allows: a fit that changes no constant by more has ended
OF_A_SOURCE = 0.08  # by how much all of a source's runs may be slower, or faster, than the model knows a reason for


@dataclass(frozen=True, eq=False)
class Sourced:
    """A run and whose it is."""

    source: str
    accelerator: str
    case: TimeCase


@dataclass(frozen=True)
class LeftOut:
    """A row that was predicted with constants of the other sources. exposed: the part of the step that communicates."""

    source: str
    name: str
    published: float
    predicted: float
    exposed: float
    model: tuple  # accelerator, shape and dtype
    a_token: float  # devices over tokens: of seconds, device-seconds a token

    @property
    def error(self) -> float:
        """Relative, signed: below 0 where the prediction is too fast."""
        return self.predicted / self.published - 1

    @property
    def kind(self) -> str:
        return kind_of(PaperWork(self.model[1]))

    @property
    def needed(self) -> float:
        """The `Efficiency.relative_error` whose bar just holds the published time."""
        return abs(self.published / self.predicted - 1) / (1 + self.exposed)


# --------------------------------------------------------------------------------------------------------------- rows


@cache
def sourced(accelerator: str) -> tuple[Sourced, ...]:
    """Every published time on one of `ACCELERATORS`, or on another card, in seconds a step."""
    groups = runs.published()["groups"]
    found = [
        Sourced(SOURCES[name], facts["accelerator"], case)
        for name, facts in groups.items()
        for run in runs.published()[name]
        for case in runs.times(name, run)
    ]
    found += [row for row, facts in second_set() if not facts["aside"]]
    found += in_columns("blackwell.csv")
    return tuple(each for each in found if each.accelerator in ACCELERATORS.get(accelerator, (accelerator,)))


@cache
def second_set() -> tuple[tuple[Sourced, dict], ...]:
    """The runs of second_set.toml, each with what it prints."""
    table, found = tomllib.loads(Path(__file__).with_name("second_set.toml").read_text(encoding="utf-8")), []
    shapes, _ = table.pop("shapes"), table.pop("predictors")
    for name, group in table.items():
        for run in group["runs"]:
            facts = group["defaults"] | dict(zip(group["columns"], run, strict=True))
            facts |= shapes[facts["shape"]] | {"program": group["program"], "aside": group.get("aside", False)}
            found.append((Sourced(group["source"], group["accelerator"], _case(name, group, facts)), facts))
    return tuple(found)


VOCABULARY = {"mpt": 50_368, "nemotron": 256_000, "gpt": 51_200}
VOCABULARY |= {"llama-7b": 32_000, "llama-13b": 32_000, "llama": 128_256}


@cache
def in_columns(name: str) -> tuple[Sourced, ...]:
    """The runs of a CSV file beside this one. No constant is fitted to those of third_set.csv."""
    shapes = tomllib.loads(Path(__file__).with_name("second_set.toml").read_text(encoding="utf-8"))["shapes"]
    found = []
    with Path(__file__).with_name(name).open(encoding="utf-8") as file:
        for run in csv.DictReader(file):
            vocabulary = next(size for begin, size in VOCABULARY.items() if run["shape"].startswith(begin))
            shape = runs.shape_of(shapes[run["shape"]] | {"seq_len": int(run["seq_len"]), "vocab_size": vocabulary})
            of_fsdp = run["source"] in ("llm-foundry", "fms-fsdp") or run["zero"] == "3"
            words = ("dp", "rows", "tp", "replica") if of_fsdp else ("dp", "rows", "pp", "cp", "tp", "chunks")
            sizes = {name: int(run[name]) for name in words} | {"microbatches": int(run["micro"])}
            has_casts = run["dtype"] == "float8" and run["source"] != "llm-foundry"
            repeated = Repeated(num_bytes=_casts(shape, sizes["tp"]) if has_casts else 0)
            common = sizes | {"sp": sizes["tp"] > 1, "remat": run["recompute"], "repeated": repeated}
            if of_fsdp:
                flash = {"flash": True, "flash2": run["source"] in FLASH2}
                layout = Layout(**common, zero=3, gradient_bytes=2, overlap_across=True, **flash)
            else:
                core = MEGATRON_CORE | {"zero": int(run["zero"]), "overlap_tp": (sizes["tp"] - 1) / sizes["tp"]}
                layout = Layout(**common | core, gradient_bytes=4)
            cluster, said = cluster_of(run["card"], int(layout.num_devices)), ", ".join(run.values())
            case = TimeCase(run["source"], said, shape, layout, cluster, float(run["seconds"]), run["dtype"])
            found.append(Sourced(run["source"], run["card"], case))
    return tuple(found)


def _case(name: str, group: dict, facts: dict) -> TimeCase:
    """A row of second_set.toml. What is not printed of Megatron's is what is fastest."""
    shape = runs.shape_of(facts)
    if facts["program"] == "nanotron":
        layout = runs.nanotron_layout(shape, facts)
    elif facts["program"] == "deepspeed":
        layout = Layout(
            **{name: facts[name] for name in ("dp", "rows", "microbatches")},
            zero=3,
            **runs.MEGATRON,
            remat="block",
            messages=GPT_TENSORS * shape.num_layers,
        )
    elif facts["program"] == "fsdp":
        if group["source"] == "torchtitan":
            remat = runs.torchtitan_remat(shape, facts["remat"], facts.get("dtype", "bfloat16"), facts.get("tp", 1))
        else:
            remat = _remat(shape, facts["remat"], casts=_casts(shape, 1) if _has_casts(group, facts) else 0)
        layout = Layout(
            replica=facts.get("replica", 1),
            dp=facts["dp"],
            tp=facts.get("tp", 1),
            rows=facts["rows"],
            microbatches=facts["microbatches"],
            **remat,
            zero=3,
            sp="tp" in facts,
            flash=True,
            flash2=group["source"] in FLASH2,
            python=group["source"] not in COMPILED,
            overlap_across=group["source"] not in COMPILED,
            gradient_bytes=4 if group["source"] == "torchtitan" else 2,
            tp_ring=facts.get("tp_ring", False),
            ring_copies=0,  # PyTorch's asynchronous tensor parallelism writes chunks where they belong
        )
    else:
        layout = _megatron(facts)
        if _has_casts(group, facts):
            layout = replace(layout, repeated=Repeated(num_bytes=_casts(shape, layout.tp)))
    num_devices = int(np.max(layout.num_devices))
    cluster = cluster_of(group["accelerator"], num_devices, **runs.measured(group))
    hardware = cluster.hardware
    tokens = float(np.max(layout.sequences)) * shape.seq_len
    if "seconds" in facts:
        seconds = facts["seconds"]
    elif "tokens_per_s" in facts:
        seconds = tokens / (facts["tokens_per_s"] * num_devices)
    elif "hardware_tflops" in facts:
        flops = formulas.iteration_flops(shape, tokens / shape.seq_len, "block").value
        seconds = flops / (facts["hardware_tflops"] * 1e12 * num_devices)
    else:
        a_token = 3 * sum(formulas.forward_flops_per_token(shape).values())
        if facts["program"] == "fsdp":  # llm-foundry's definition
            a_token = 6 * shape.parameters + 12 * shape.num_layers * shape.width * shape.seq_len
        speed = facts["tflops"] * 1e12 if "tflops" in facts else facts["mfu"] / 100 * hardware.peak("bfloat16")
        seconds = tokens * a_token / (speed * num_devices)
    sizes = ", ".join(
        f"{key} {facts[key]}" for key in ("replica", "dp", "tp", "pp", "cp", "gpus", "rows", "seq_len") if key in facts
    )
    return TimeCase(name, f"{facts['shape']}, {sizes}", shape, layout, cluster, seconds, facts.get("dtype", "bfloat16"))


def _has_casts(group: dict, facts: dict) -> bool:
    return facts.get("dtype") == "float8" and group["source"] in TRANSFORMER_ENGINE


def _casts(shape: formulas.ModelShape, tp: int) -> float:
    """HBM bytes of one position in a layer that kernels of their own read in 16 bits and write in 8, twice, the second
    time transposed: inputs of products, and the gradients of their results."""
    h, f = shape.width, shape.ffn_width
    inputs = 2 * h + (h + f) / tp
    results = 2 * h + (h + 2 * shape.kv_width + (2 if shape.gated_mlp else 1) * f) / tp
    return (2 + 1 + 1) * (inputs + results)


def _remat(shape: formulas.ModelShape, word: str, casts: float) -> dict:
    """Fields of a layout. casts: bytes of a position in a layer, besides. JAX's policies that keep some products say
    what else is made again: attention, which is none, and of a layer's products those that are needed and not kept; a
    last one is not."""
    flops = {
        "save_dot_only": 0,
        "save_qkv_out_proj": shape.width * shape.ffn_width,
        "save_qkv_proj": shape.width * (shape.width + (2 if shape.gated_mlp else 1) * shape.ffn_width),
    }
    if word not in flops:
        return {"remat": word, "repeated": Repeated(num_bytes=casts)}
    work = PaperWork(shape)
    whole, split, _ = elementwise_bytes(shape, False, True)
    cores = (4 * each.heads * each.head_dim * each.seen(shape.seq_len) for each in work.attention)
    return {"repeated": Repeated(2 * flops[word], sum(cores), float(whole + split) + casts, launches=1)}


GPT_TENSORS = 12  # of a layer: four products with their biases, two norms
MEGATRON_CORE = {"zero": 1, "flash": True, "always_sums": True, "fused_sums": True}
MEGATRON_CORE |= {"overlap_pp": True, "overlap_gather": True}


def _megatron(facts: dict) -> Layout:
    """Megatron-LM of 2021, here in a pipeline of DeepSpeed's, which does not interleave, without flash attention and
    overlap; Megatron Core, which overlaps what tp, dp and pp send, the last in interleaved schedules alone."""
    tp, pp, cp = facts["tp"], facts["pp"], facts.get("cp", 1)
    dp = facts["gpus"] // (tp * pp * cp)
    common = {"tp": tp, "pp": pp, "cp": cp, "dp": dp}
    if "rows" in facts:
        passes = facts["batch"] // (dp * facts["rows"])
        common |= {"rows": facts["rows"], "microbatches": passes, "chunks": facts["chunks"]}
    else:
        common |= not_printed(runs.shape_of(facts), pp, dp, facts["batch"])
    if facts["program"] == "megatron-lm":
        common |= MEGATRON | {"chunks": 1, "gradient_bytes": facts["gradient_bytes"]}
        return Layout(remat="block", scatter_gather=True, **common)
    # Of a gather, or a scatter, in tp chunks all but one has a matmul beside it.
    common |= {"overlap_tp": (tp - 1) / tp, "gradient_bytes": facts.get("gradient_bytes", 4)}
    return Layout(sp=tp > 1, **MEGATRON_CORE, **common)


# ---------------------------------------------------------------------------------------------------------------- fit


class _Together:
    """Rows whose model, card and dtype are the same, as columns of one layout: a fit predicts all of them many times.

    A step does not depend on how many nodes there are besides those of the layout."""

    def __init__(self, rows: Sequence[Sourced]):
        self.rows, groups = rows, {}
        for place, row in enumerate(rows):
            case = row.case
            missing = tuple(name for name, value in vars(case.layout).items() if value is None)
            bandwidth = case.cluster.hardware.memory_bytes_per_s  # which some sources state of their cards
            same = (case.shape, row.accelerator, bandwidth, case.cluster.devices_per_node, case.dtype, missing)
            groups.setdefault(same, []).append(place)
        self.groups = [(places, *self._columns(places)) for places in groups.values()]

    def _columns(self, places: list[int]) -> tuple[Layout, list[int]]:
        """(the layouts of these rows as one, where each begins)."""
        layouts = [self.rows[place].case.layout for place in places]
        lengths = [np.broadcast_shapes((1,), *(np.shape(column) for column in _flat(each)))[0] for each in layouts]
        columns = [
            None
            if values[0] is None
            else np.concatenate([np.broadcast_to(*pair) for pair in zip(values, lengths, strict=True)])
            for values in zip(*map(_flat, layouts), strict=True)
        ]
        names = [field.name for field in fields(Layout) if field.name != "repeated"]
        repeated = Repeated(*columns[len(names) :])
        layout = Layout(**dict(zip(names, columns, strict=False)), repeated=repeated)
        return layout, [0, *itertools.accumulate(lengths[:-1])]

    def seconds(self, efficiency: Efficiency) -> np.ndarray:
        """Seconds of every row, by the fastest of its columns."""
        found = np.empty(len(self.rows))
        for places, layout, starts in self.groups:
            case = self.rows[places[0]].case
            time = step_time(PaperWork(case.shape), layout, case.cluster, efficiency, case.dtype)
            found[places] = np.minimum.reduceat(time.total, starts)
        return found


def _flat(layout: Layout) -> list:
    """The columns of a layout, those of `repeated` last."""
    return [value for name, value in vars(layout).items() if name != "repeated"] + list(layout.repeated)


def fit_pooled(rows: Sequence[Sourced], steps: int = 14) -> Efficiency:
    """One set of constants for all rows: least squares of log errors, every source with the same weight and far rows
    with less (Cauchy), and of what `GUESSES` allows. Gauss-Newton with damping.

    Every source also has a factor of its own (`OF_A_SOURCE`; their product is 1), which is fitted and thrown away: what
    is better or worse about a program as a whole then does not bend the constants, which the differences among its own
    runs should tell.
    """
    guess, spread = np.array(list(GUESSES.values())).T
    number = Counter(row.source for row in rows)
    weight = np.sqrt([len(rows) / len(number) / number[row.source] for row in rows])
    own = (np.array([[row.source == source for source in number] for row in rows]) - 1 / len(number)) * OF_A_SOURCE

    def efficiency(x) -> Efficiency:
        values = dict(zip(GUESSES, (guess + x[: len(guess)] * spread).clip(1e-6).tolist(), strict=True))
        return Efficiency(**values | {name: min(values[name], 1.0) for name in PARTS_OF_A_PEAK})

    together, published = _Together(rows), np.array([row.case.seconds for row in rows])

    @cache
    def by_constants(*x):
        return np.log(together.seconds(efficiency(np.array(x))) / published)

    def errors(x):
        logs = by_constants(*x[: len(guess)].tolist()) + own @ x[len(guess) :]
        far = np.sign(logs) * np.sqrt(2 * np.log1p(np.square(logs / SPREAD) / 2))
        return np.concatenate([2 * weight * far, x])

    x, damping = np.zeros(len(guess) + len(number)), 1e-2
    now = errors(x)
    for _ in range(steps):
        slopes = np.stack([(errors(x + step) - now) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        then = errors(x + (change := np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), -slopes.T @ now)))
        if then @ then < now @ now:
            x, now, damping = x + change, then, damping / 5
            if np.abs(change).max() < ENOUGH:
                break
        else:
            damping *= 10
    return efficiency(x)


def predicted(rows: Sequence[Sourced], efficiency: Efficiency) -> list[LeftOut]:
    found = []
    for row in rows:
        case = row.case
        time = step_time(PaperWork(case.shape), case.layout, case.cluster, efficiency, case.dtype)
        best = int(time.total.argmin())
        total = float(time.total[best])
        exposed = float(time.communication[best]) / total
        a_token = case.layout.num_devices / (case.layout.sequences * case.shape.seq_len)
        found.append(
            LeftOut(
                row.source,
                f"{case.name}, {case.dtype}",
                case.seconds,
                total,
                exposed,
                model=(row.accelerator, case.shape, case.dtype),
                a_token=float(np.broadcast_to(a_token, time.total.shape)[best]),
            )
        )
    return found


def aside() -> list[LeftOut]:
    """The rows that are neither fitted to nor in the bar, by the constants of all others."""
    rows = [row for row, facts in second_set() if facts["aside"]]
    return [each for row in rows for each in predicted([row], efficiency_of(row.accelerator))]


@cache
def leave_one_source_out(accelerator: str, unfitted: bool = False) -> tuple[LeftOut, ...]:
    """Every row, predicted by the other sources' constants. unfitted: and those that none is fitted to."""
    rows, more = sourced(accelerator), in_columns("third_set.csv") if unfitted else ()
    every, found = [*rows, *(row for row in more if row.accelerator.startswith(accelerator))], []
    for source in dict.fromkeys(row.source for row in every):
        efficiency = fit_pooled([row for row in rows if row.source != source])
        found += predicted([row for row in every if row.source == source], efficiency)
    return tuple(found)


def bar(rows: Sequence[LeftOut]) -> float:
    """The `relative_error` whose bar holds `COVERED` of the rows, every source with the same weight: runs of one
    program are off together, and the next may be of another."""
    some = sorted(rows, key=lambda row: row.needed)
    number = Counter(row.source for row in some)
    weight = np.cumsum([1 / number[row.source] for row in some])
    return some[int(np.searchsorted(weight, COVERED * weight[-1] * (1 - 1e-9)))].needed


@dataclass(frozen=True)
class Pair:
    """Two runs of one model by one source: which took fewer device-seconds a token, published and predicted.

    Both are log ratios of the first's to the second's."""

    published: float
    predicted: float

    @property
    def in_order(self) -> bool:
        return self.published * self.predicted > 0


def pairs(rows: Sequence[LeftOut], apart: float = SAME) -> list[Pair]:
    """Every two rows of one source and model, published so far apart: layouts, sizes of cluster, recomputation."""
    found = [
        Pair(
            published=float(np.log(a.published * a.a_token / (b.published * b.a_token))),
            predicted=float(np.log(a.predicted * a.a_token / (b.predicted * b.a_token))),
        )
        for same in _same_model(rows)
        for a, b in itertools.combinations(same, 2)
    ]
    return [pair for pair in found if np.expm1(abs(pair.published)) >= apart]


def _same_model(rows: Sequence[LeftOut]) -> list[list[LeftOut]]:
    found: dict[tuple, list[LeftOut]] = {}
    for row in rows:
        found.setdefault((row.source, *row.model), []).append(row)
    return [same for same in found.values() if len(same) > 1]


def kendall_tau(rows: Sequence[LeftOut], apart: float = SAME) -> float:
    """Pairs in the published order less those that are not, over all."""
    return float(np.mean([1 if pair.in_order else -1 for pair in pairs(rows, apart)]))


def regrets(rows: Sequence[LeftOut]) -> list[float]:
    """For each model of a source: how much more its run that is predicted best costs than its best."""
    found = []
    for same in _same_model(rows):
        chosen = min(same, key=lambda row: row.predicted * row.a_token)
        found.append(chosen.published * chosen.a_token / min(row.published * row.a_token for row in same) - 1)
    return found


def right_within(rows: Sequence[LeftOut], least: float, most: float) -> tuple[int, int]:
    """(in the published order, all) of the pairs predicted so far apart: least <= slower / faster - 1 < most."""
    inside = [pair for pair in pairs(rows) if least <= np.expm1(abs(pair.predicted)) < most]
    return sum(pair.in_order for pair in inside), len(inside)


def calibrated(accelerator: str) -> Efficiency:
    """Fitted to every source, with the bar of those that were left out, at least H100's where all are one program's."""
    stack = f"{accelerator}-published"
    error = round(bar([row for row in leave_one_source_out(accelerator, unfitted=True) if row.kind == "dense"]), 2)
    if accelerator == "gb200":
        error = max(error, EFFICIENCIES["h100-published"].relative_error)
    return replace(fit_pooled(sourced(accelerator)), relative_error=error, stack=stack)


# ------------------------------------------------------------------------------------------------------------- tables


def summary(accelerator: str, rows: Sequence[LeftOut]) -> str:
    """Markdown: a line a source and one of all."""
    lines = ["| left out | rows | mean | 90 % within | signed |", "|---|--:|--:|--:|--:|"]
    for source in (*dict.fromkeys(row.source for row in rows), ""):
        errors = [row.error for row in rows if source in (row.source, "")]
        within = np.quantile(np.abs(errors), 0.9)
        name = f"{accelerator}, {source}" if source else f"**{accelerator}, all**"
        mean, _ = mean_and_max(errors)
        lines.append(f"| {name} | {len(errors)} | {mean:.1%} | {within:.1%} | {np.mean(errors):+.1%} |")
    return "\n".join(lines)


def kinds_table(accelerator: str, rows: Sequence[LeftOut], bars: Mapping[str, float]) -> str:
    """Markdown: a line for each kind of run: how far off they are, and how many a plan's bar holds."""
    lines = ["| kind | sources | rows | mean | signed | bar | held |", "|---|--:|--:|--:|--:|--:|--:|"]
    for kind in dict.fromkeys(row.kind for row in rows):
        some = [row for row in rows if row.kind == kind]
        mean, signed = mean_and_max([row.error for row in some])[0], np.mean([row.error for row in some])
        held = np.mean([row.needed <= bars[kind] for row in some])
        number = f"{len({row.source for row in some})} | {len(some)}"
        errors = f"{mean:.1%} | {signed:+.1%} | ±{bars[kind]:.0%} | {held:.0%}"
        lines.append(f"| {accelerator}, {kind} | {number} | {errors} |")
    return "\n".join(lines)


def table(rows: Sequence[LeftOut]) -> str:
    """Markdown: every row, worst first."""
    lines = ["| source | run | published, s | predicted, s | error |", "|---|---|--:|--:|--:|"]
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        lines.append(f"| {row.source} | {row.name} | {row.published:.3f} | {row.predicted:.3f} | {row.error:+.1%} |")
    return "\n".join(lines)


def predictors_table(rows: Sequence[LeftOut]) -> str:
    """Markdown: the rows that other public predictors have predicted as well, each one's error, and the means."""
    table = tomllib.loads(Path(__file__).with_name("second_set.toml").read_text(encoding="utf-8"))["predictors"]
    published = {(row.source, row.name.split(", ")[0]): row for row in rows}
    errors, lines = [], []
    for source, run, *others in table["runs"]:
        row = published[source, run]
        errors.append([row.error, *(seconds / row.published - 1 for seconds in others)])
        cells = " | ".join(f"{error:+.1%}" for error in errors[-1])
        lines.append(f"| {source} | {run} | {row.published:.1f} | {cells} |")
    means = " | ".join(f"{mean:.1%}" for mean in np.abs(errors).mean(axis=0))
    names = ["source", "run", "published, s", "here, left out", *table["columns"][2:]]
    ruled = "|---|---" + "|--:" * (len(names) - 2) + "|"
    return "\n".join([f"| {' | '.join(names)} |", ruled, *lines, f"| **mean of sizes** | | | {means} |"])


GAPS = (0, 0.05, 0.2, np.inf)  # between two predictions


def order_table(rows: Sequence[LeftOut]) -> str:
    """Markdown: how often two runs of one model are in the published order, by how far apart they are predicted."""
    lines = ["| predicted apart by | pairs | in the published order |", "|---|--:|--:|"]
    for least, most in (*itertools.pairwise(GAPS), (0, np.inf)):
        right, number = right_within(rows, least, most)
        name = f"{least:.0%} to {most:.0%}" if most < np.inf else f"{least:.0%} and more" if least else "**anything**"
        lines.append(f"| {name} | {number} | {right / max(number, 1):.0%} |")
    lost = regrets(rows)
    lines += [
        "",
        f"Of pairs that were published {SAME:.0%} or more apart: Kendall's tau {kendall_tau(rows):.2f} (of all "
        f"{kendall_tau(rows, 0):.2f}). The run predicted best of each of {len(lost)} models costs "
        f"{np.mean(lost):.1%} more than its best in the mean, {np.median(lost):.1%} in the median, {max(lost):.0%} at "
        "most.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    which = f"fit {', '.join(ACCELERATORS)}, and write it"
    parser.add_argument("--write", nargs=2, metavar=("ACCELERATOR", "FILE"), help=which)
    chosen = parser.parse_args().write
    if chosen:
        if chosen[0] not in ACCELERATORS:
            parser.error(f"--write {chosen[0]}: must be one of {', '.join(ACCELERATORS)}")
        found = asdict(calibrated(chosen[0]))
        lines = [f"{field.name} = {found[field.name]!r}".replace("'", '"') for field in fields(Efficiency)]
        write_whole(Path(chosen[1]), ("\n".join(lines) + "\n").encode())
        return
    for accelerator in ACCELERATORS:
        rows = leave_one_source_out(accelerator)
        bars = BARS | {"dense": EFFICIENCIES[f"{accelerator}-published"].relative_error}
        print(summary(accelerator, rows), end="\n\n")
        print(kinds_table(accelerator, leave_one_source_out(accelerator, unfitted=True), bars), end="\n\n")
        print(order_table(rows), end="\n\n")
        if accelerator == "a100":
            print(predictors_table(rows), end="\n\n")
            print(table(aside()), end="\n\n")
        print(table(rows), end="\n\n")
    print(summary("gb300", predicted(sourced("gb300"), efficiency_of("gb300"))))


if __name__ == "__main__":
    main()
