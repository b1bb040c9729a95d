"""Every published step time, by who measured it: how far off a prediction is for a source that it was not fitted to.

`python -m jaxdist.plan.papers.sources` leaves each source out in turn, fits the constants of an accelerator to the
others, predicts the one left out, and prints every row, worst first; and how often two runs of one model, both left
out, are in the published order. `--write h100 FILE` fits them to all and writes
them for `experiments.plan --efficiencies FILE`, with the bar that 90 % of the rows left out are within.
"""

import argparse
import itertools
import tomllib
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cache
from pathlib import Path

import numpy as np

from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.papers import calibration, formulas
from jaxdist.plan.papers.calibration import MEGATRON, TimeCase, mean_and_max, not_printed
from jaxdist.plan.papers.work import PaperWork
from jaxdist.plan.time_model import Efficiency, Layout, step_time

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
ACCELERATORS = {"h100": ("h100", "h200"), "a100": ("a100-80",)}  # fitted together
COVERED = 0.9  # of the rows left out, by the bar

# The guess of each constant and how far off it may be. Where no source tells, the guess stays.
GUESSES = {
    "matmul": (0.7, 0.1),
    "half_size": (60.0, 40.0),
    "attention": (0.35, 0.15),
    "float8": (0.65, 0.15),
    "hbm": (0.7, 0.15),
    "inside": (0.7, 0.15),
    "between": (0.6, 0.12),
    "latency": (1.0, 0.5),
    "hide": (0.7, 0.1),
    "layer_seconds": (2e-4, 2e-4),
    "step_seconds": (0.02, 0.02),
}
PARTS_OF_A_PEAK = ("matmul", "attention", "float8", "hbm", "inside", "between", "hide")
SPREAD = 0.12  # relative error from which a row counts less and less
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
    def needed(self) -> float:
        """The `Efficiency.relative_error` whose bar just holds the published time."""
        return abs(self.published / self.predicted - 1) / (1 + self.exposed)


# --------------------------------------------------------------------------------------------------------------- rows


@cache
def sourced(accelerator: str) -> tuple[Sourced, ...]:
    """Every published time on one of `ACCELERATORS`, in seconds a step."""
    groups = calibration.published()["groups"]
    found = [
        Sourced(SOURCES[name], facts["accelerator"], case)
        for name, facts in groups.items()
        for run in calibration.published()[name]
        for case in calibration.times(name, run)
    ]
    found += [row for row, _ in second_set()]
    return tuple(each for each in found if each.accelerator in ACCELERATORS[accelerator])


@cache
def second_set() -> tuple[tuple[Sourced, dict], ...]:
    """The runs of second_set.toml, each with what it prints."""
    table, found = tomllib.loads(Path(__file__).with_name("second_set.toml").read_text(encoding="utf-8")), []
    shapes = table.pop("shapes")
    for name, group in table.items():
        for run in group["runs"]:
            facts = group["defaults"] | dict(zip(group["columns"], run, strict=True))
            facts |= shapes[facts["shape"]] | {"program": group["program"]}
            found.append((Sourced(group["source"], group["accelerator"], _case(name, group, facts)), facts))
    return tuple(found)


def _case(name: str, group: dict, facts: dict) -> TimeCase:
    """A row of second_set.toml. What is not printed of Megatron's is what is fastest."""
    shape = calibration.shape_of(facts)
    if facts["program"] == "nanotron":
        layout = calibration.nanotron_layout(shape, facts)
    elif facts["program"] == "fsdp":
        layout = Layout(
            dp=facts["dp"],
            tp=facts.get("tp", 1),
            rows=facts["rows"],
            microbatches=facts["microbatches"],
            remat=facts["remat"],
            zero=3,
            sp="tp" in facts,
            flash=True,
            tp_ring=facts.get("tp_ring", False),
            ring_copies=0,  # PyTorch's asynchronous tensor parallelism writes chunks where they belong
        )
    else:
        layout = _megatron(facts)
    num_devices = int(np.max(layout.num_devices))
    hardware = find_hardware(group["accelerator"])
    hardware = replace(hardware, memory_bytes_per_s=group.get("memory_bytes_per_s", hardware.memory_bytes_per_s))
    per_node = hardware.devices_per_node
    cluster = Cluster(hardware, -(-num_devices // per_node), min(num_devices, per_node))
    tokens = float(np.max(layout.sequences)) * shape.seq_len
    if "seconds" in facts:
        seconds = facts["seconds"]
    elif "tokens_per_s" in facts:
        seconds = tokens / (facts["tokens_per_s"] * num_devices)
    else:
        a_token = 3 * sum(formulas.forward_flops_per_token(shape).values())
        if facts["program"] == "fsdp":  # llm-foundry's definition
            a_token = 6 * shape.parameters + 12 * shape.num_layers * shape.width * shape.seq_len
        speed = facts["tflops"] * 1e12 if "tflops" in facts else facts["mfu"] / 100 * hardware.peak("bfloat16")
        seconds = tokens * a_token / (speed * num_devices)
    sizes = ", ".join(f"{key} {facts[key]}" for key in ("dp", "tp", "pp", "gpus", "rows", "seq_len") if key in facts)
    return TimeCase(name, f"{facts['shape']}, {sizes}", shape, layout, cluster, seconds, facts.get("dtype", "bfloat16"))


def _megatron(facts: dict) -> Layout:
    """Megatron-LM of 2021, here in a pipeline of DeepSpeed's, which does not interleave, without flash attention and
    overlap; Megatron Core, which overlaps what tp, dp and pp send, the last in interleaved schedules alone."""
    tp, pp = facts["tp"], facts["pp"]
    dp = facts["gpus"] // (tp * pp)
    common = {"tp": tp, "pp": pp, "dp": dp} | not_printed(calibration.shape_of(facts), pp, dp, facts["batch"])
    if facts["program"] == "megatron-lm":
        common |= MEGATRON | {"chunks": 1, "gradient_bytes": facts["gradient_bytes"]}
        return Layout(remat="block", scatter_gather=True, **common)
    # Of a gather, or a scatter, in tp chunks all but one has a matmul beside it.
    overlap = {"overlap_tp": (tp - 1) / tp, "overlap_pp": True, "overlap_gather": True}
    return Layout(zero=1, sp=tp > 1, flash=True, **overlap, **common)


# ---------------------------------------------------------------------------------------------------------------- fit


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
        values = dict(zip(GUESSES, (guess + x[: len(guess)] * spread).clip(1e-5).tolist(), strict=True))
        return Efficiency(**values | {name: min(values[name], 1.0) for name in PARTS_OF_A_PEAK})

    def errors(x):
        found = efficiency(x)
        logs = np.log([row.case.predict(found) / row.case.seconds for row in rows]) + own @ x[len(guess) :]
        far = np.sign(logs) * np.sqrt(2 * np.log1p(np.square(logs / SPREAD) / 2))
        return np.concatenate([2 * weight * far, x])

    x, damping = np.zeros(len(guess) + len(number)), 1e-2
    now = errors(x)
    for _ in range(steps):
        slopes = np.stack([(errors(x + step) - now) / 1e-3 for step in 1e-3 * np.eye(len(x))], axis=1)
        then = errors(x + (change := np.linalg.solve(slopes.T @ slopes + damping * np.eye(len(x)), -slopes.T @ now)))
        if then @ then < now @ now:
            x, now, damping = x + change, then, damping / 5
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


def leave_one_source_out(accelerator: str) -> list[LeftOut]:
    """Every row, predicted by the other sources' constants."""
    rows, found = sourced(accelerator), []
    for source in dict.fromkeys(row.source for row in rows):
        efficiency = fit_pooled([row for row in rows if row.source != source])
        found += predicted([row for row in rows if row.source == source], efficiency)
    return found


def bar(rows: Sequence[LeftOut]) -> float:
    """The `relative_error` whose bar holds `COVERED` of the rows."""
    return float(np.quantile([row.needed for row in rows], COVERED))


@dataclass(frozen=True)
class Pair:
    """Two runs of one model by one source: which took fewer device-seconds a token, published and predicted.

    Both are log ratios of the first's to the second's."""

    published: float
    predicted: float

    @property
    def in_order(self) -> bool:
        return self.published * self.predicted > 0


def pairs(rows: Sequence[LeftOut]) -> list[Pair]:
    """Every two rows of one source and model: layouts, sizes of cluster, recomputation."""
    return [
        Pair(
            published=float(np.log(a.published * a.a_token / (b.published * b.a_token))),
            predicted=float(np.log(a.predicted * a.a_token / (b.predicted * b.a_token))),
        )
        for same in _same_model(rows)
        for a, b in itertools.combinations(same, 2)
    ]


def _same_model(rows: Sequence[LeftOut]) -> list[list[LeftOut]]:
    found: dict[tuple, list[LeftOut]] = {}
    for row in rows:
        found.setdefault((row.source, *row.model), []).append(row)
    return [same for same in found.values() if len(same) > 1]


def kendall_tau(rows: Sequence[LeftOut]) -> float:
    """Pairs in the published order less those that are not, over all."""
    return float(np.mean([1 if pair.in_order else -1 for pair in pairs(rows)]))


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
    """Fitted to every source, with the bar of those that were left out."""
    stack = f"{accelerator}-published"
    error = round(bar(leave_one_source_out(accelerator)), 3)
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


def table(rows: Sequence[LeftOut]) -> str:
    """Markdown: every row, worst first."""
    lines = ["| source | run | published, s | predicted, s | error |", "|---|---|--:|--:|--:|"]
    for row in sorted(rows, key=lambda row: -abs(row.error)):
        lines.append(f"| {row.source} | {row.name} | {row.published:.3f} | {row.predicted:.3f} | {row.error:+.1%} |")
    return "\n".join(lines)


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
        f"Kendall's tau {kendall_tau(rows):.2f}; the run predicted best of each of {len(lost)} models costs "
        f"{np.mean(lost):.1%} more than its best in the mean, {np.median(lost):.1%} in the median, {max(lost):.0%} at "
        "most.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", nargs=2, metavar=("ACCELERATOR", "FILE"), help="fit h100 or a100, and write it")
    chosen = parser.parse_args().write
    if chosen:
        if chosen[0] not in ACCELERATORS:
            parser.error(f"--write {chosen[0]}: there are {' and '.join(ACCELERATORS)}")
        found = asdict(calibrated(chosen[0]))
        lines = [f"{field.name} = {found[field.name]!r}".replace("'", '"') for field in fields(Efficiency)]
        Path(chosen[1]).write_text("\n".join(lines) + "\n", encoding="utf-8")
        return
    for accelerator in ACCELERATORS:
        rows = leave_one_source_out(accelerator)
        print(summary(accelerator, rows), f"bar: ±{bar(rows):.0%}, more where communication shows", sep="\n\n")
        print(order_table(rows), end="\n\n")
        print(table(rows), end="\n\n")


if __name__ == "__main__":
    main()
