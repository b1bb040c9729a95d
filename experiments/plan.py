"""Which layout to run, what it takes and what it costs: every layout of a cluster, predicted and ranked.

python -m experiments.plan --model 7b --hardware h200 --nodes 8
python -m experiments.plan --model 7b --hardware h100 --tokens 300e9 --deadline 30d --price-per-hour 2.5
python -m experiments.plan --model 7b --hardware h200 --mesh dp=8,tp=8 --zero 1
python -m experiments.plan --model 7b --hardware h200 --nodes 8 --compile h200 --prove 3
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.cli import CommonFlags, flags_of, refuse_ignored, require_writable, run_program
from experiments.plan_page import page
from jaxdist.config import Dtype, Preset, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.layout import make_layout
from jaxdist.model import declare
from jaxdist.parallel.schedules import NAMES
from jaxdist.plan import explain
from jaxdist.plan.communication import predicted
from jaxdist.plan.compile import TARGETS, has_cuda_compiler, without_devices
from jaxdist.plan.explain import NAMES_OF_TERMS, billions, gib, seconds
from jaxdist.plan.formulas import GIB, Cost
from jaxdist.plan.hardware import Cluster, find_hardware, price
from jaxdist.plan.levels import Levels, levels
from jaxdist.plan.search import (
    Candidates,
    Scored,
    best_of_each_mesh,
    pareto,
    rank,
    score,
    search,
    usable_bytes,
)
from jaxdist.plan.time_model import Efficiency
from jaxdist.plan.trace import total_sent
from jaxdist.step import choose_attention

MOST_NODES = 4096
DEFAULT_BATCH_TOKENS = 2**20


@dataclass(frozen=True)
class PlanFlags(CommonFlags):
    """Rank every layout of a cluster for a model; with --mesh, report that layout alone. Nothing is run."""

    preset: Annotated[Preset, tyro.conf.arg(aliases=["--model"])] = "7b"
    """Model shape; the flags below override it."""
    hardware: str = "h100"
    """Accelerator of the hardware table."""
    nodes: int | None = None
    """Default: 1; with --deadline or --budget, the smallest number that meets them."""
    devices_per_node: int | None = None
    """Default: that of the accelerator."""
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--global-batch"])] = None
    """Sequences per update, over the whole mesh. Default: about a million tokens."""
    dtype: Dtype = "bfloat16"
    """Of parameters and activations; masters and moments stay in at least float32."""
    tokens: float | None = None
    """To train on, as in 300e9: gives hours and dollars."""
    deadline: str | None = None
    """As in 72h or 30d; needs --tokens."""
    budget: float | None = None
    """Dollars; needs --tokens and a price."""
    vendor: str | None = None
    """Whose price of the price table."""
    price_per_hour: float | None = None
    """Dollars for one accelerator, instead of --vendor."""
    hardware_file: str | None = None
    """TOML merged over the hardware table."""
    price_file: str | None = None
    """TOML merged over the price table."""
    top: int = 10
    """Rows of the table: the best layouts of so many meshes."""
    json: str | None = None
    """Also write the plan to this file."""
    html: str | None = None
    """Also write a page with pictures to this file."""
    trace: bool = False
    """Also trace the step of the best layout: what it keeps and sends, from the program itself."""
    compile: str | None = None
    """Also compile it, with no device present: cpu, an NVIDIA card (h200, ...) or a TPU (v5p, ...). Implies --trace."""
    prove: int = 1
    """How many of the best layouts to trace or compile."""
    dump_hlo: str | None = None
    """Folder for the text of compiled programs."""


@dataclass(frozen=True)
class Question:
    """What is asked, checked: the run without its layout, and the means."""

    base: RunConfig
    hardware: object
    devices_per_node: int | None
    attention: str
    tokens: float | None
    hours: float | None
    budget: float | None
    dollars_per_hour: float | None
    notes: tuple[str, ...]
    efficiency: Efficiency

    def cluster(self, num_nodes: int) -> Cluster:
        return Cluster(self.hardware, num_nodes, self.devices_per_node)

    def run_hours(self, step_seconds: float) -> float | None:
        """Hours of the whole run."""
        if self.tokens is None:
            return None
        return self.tokens / (self.base.batch_size * self.base.model.seq_len) * step_seconds / 3600

    def cost(self, cluster: Cluster, step_seconds: float) -> Cost | None:
        hours = self.run_hours(step_seconds)
        if hours is None or self.dollars_per_hour is None:
            return None
        name = cluster.hardware.name.upper()
        return Cost(cluster.num_devices, self.dollars_per_hour, round(hours, 2), self.budget, name)


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer: what was scored, best first, and what is said about it."""

    question: Question
    found: Scored
    order: np.ndarray
    shown: np.ndarray
    front: list[dict]
    sentences: list[str]
    search_seconds: float

    @property
    def best(self) -> int:
        return int(self.order[0])

    @property
    def command(self) -> str:
        return "python -m experiments.train " + " ".join(flags_of(self.found.config(self.best)))


def main(flags: PlanFlags, console: Console) -> int:
    # ---- check everything ----
    question = ask(flags)
    for name in ("json", "html"):
        require_writable(f"--{name}", getattr(flags, name))
    proving = flags.trace or flags.compile is not None
    if proving:
        require_target(flags.compile)
        without_devices(question.base.parallel.mesh.num_devices * question.cluster(flags.nodes or 1).num_devices)

    # ---- answer ----
    if flags.mesh:
        plan = report_layout(flags, question)
    elif flags.nodes is None and (flags.deadline or flags.budget is not None):
        plan = smallest_cluster(question, flags.top)
    else:
        plan = plan_for(question, flags.nodes or 1, flags.top)
        check_limits(question, plan)

    # ---- report ----
    print_plan(console, plan)
    record = to_json(plan)
    if proving:
        record["proven"] = prove(console, plan, flags)
    if flags.json:
        Path(flags.json).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if flags.html:
        Path(flags.html).write_text(page(record), encoding="utf-8")
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The question
# ---------------------------------------------------------------------------------------------------------------------

LAYOUT_FLAGS = {"zero", "sp", "tp_ring", "accumulate", "remat", "reshard_after_forward", "overlap"}
LAYOUT_FLAGS |= {"schedule", "microbatches", "chunks", "stages"}


def ask(flags: PlanFlags) -> Question:
    """Every flag, checked. Raises: ConfigError."""
    used = {field.name for field in dataclasses.fields(flags)} - (set() if flags.mesh else LAYOUT_FLAGS) - {"device"}
    refuse_ignored(flags, used, "a layout is searched for, and this names a part of one (--mesh names a whole one)")
    for name in ("nodes", "devices_per_node", "top", "prove", "tokens", "budget", "price_per_hour"):
        value = getattr(flags, name)
        if value is not None and not (math.isfinite(value) and value > 0):
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}", "it must be above 0 and finite", "Use 1 or more")
    hardware = find_hardware(flags.hardware, flags.hardware_file)
    hours = None if flags.deadline is None else parse_hours(flags.deadline)
    notes = []

    dollars = flags.price_per_hour
    if dollars is None and flags.vendor is not None:
        listed = price(flags.hardware, flags.vendor, path=flags.price_file)
        dollars = listed.dollars_per_hour
        notes += [listed.warning] if listed.warning else []
    if (hours is not None or flags.budget is not None) and flags.tokens is None:
        raise ConfigError("--deadline or --budget", "how long a run lasts needs its tokens", "Add --tokens 300e9")
    if flags.budget is not None and dollars is None:
        raise ConfigError("--budget", "dollars need a price", "Add --price-per-hour 2.5, or --vendor")

    batch = flags.batch_size
    if batch is None:
        devices = (flags.nodes or 1) * (flags.devices_per_node or hardware.devices_per_node)
        length = flags.model_config().seq_len
        batch = 1 << round(math.log2(max(DEFAULT_BATCH_TOKENS / length, 1)))
        while batch < devices:
            batch *= 2
        notes.append(f"Batch not given: {batch} sequences, {batch * length / 1e6:.2f} million tokens, assumed.")
    flags = replace(flags, batch_size=batch)
    config = flags.run_config()
    if flags.tokens is not None:
        config = replace(config, steps=math.ceil(flags.tokens / (batch * config.model.seq_len)))
    platform = "tpu" if "TPU" in hardware.title else "gpu"
    attention = choose_attention(config, platform, training=True)
    if attention == "xla":
        notes.append("Attention writes its scores out (flash attention cannot run here): they count as memory.")
    return Question(
        base=config,
        hardware=hardware,
        devices_per_node=flags.devices_per_node,
        attention=attention,
        tokens=flags.tokens,
        hours=hours,
        budget=flags.budget,
        dollars_per_hour=dollars,
        notes=tuple(notes),
        efficiency=Efficiency(),
    )


def parse_hours(text: str) -> float:
    """ "72h", "3d" or "90m" -> hours. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--deadline {text}", "it is a time above 0 with its unit", "Write 72h, 30d, 4w or 90m")
    return float(match[1]) * {"m": 1 / 60, "h": 1, "d": 24, "w": 168}[match[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------


def find(question: Question, num_nodes: int) -> Scored:
    return search(question.base, question.cluster(num_nodes), question.attention, question.efficiency)


def plan_for(question: Question, num_nodes: int, top: int) -> Plan:
    """The ranked layouts of a cluster, and the Pareto front of all clusters up to it.

    Raises: ConfigError where nothing fits, with the nearest thing that does.
    """
    start = time.perf_counter()
    found = find(question, num_nodes)
    order = rank(found)
    if not fits(found)[order[0]]:
        raise ConfigError(*explain.nothing_fits(found, lambda: nearest(question, num_nodes)))
    took = time.perf_counter() - start
    shown = best_of_each_mesh(found, order[fits(found)[order]])[:top]
    sentences = explain.explain(found, order, question.attention, question.efficiency)
    return Plan(question, found, order, shown, front_of(question, found), sentences, took)


def fits(found: Scored) -> np.ndarray:
    return found.memory.total <= usable_bytes(found.cluster)


def nearest(question: Question, num_nodes: int) -> str:
    """What would make it fit: more nodes, or another accelerator's memory."""
    for more in range(1, 8):
        nodes = num_nodes << more
        try:
            found = find(question, nodes)
        except ConfigError:
            break
        best = int(rank(found)[0])
        if fits(found)[best]:
            parallel = found.config(best).parallel
            return (
                f"Use --nodes {nodes} ({found.cluster.num_devices} devices): --mesh {parallel.mesh} --zero "
                f"{parallel.zero} --remat {parallel.remat} needs {gib(found.memory.total[best])} a device"
            )
    return "Use a smaller model, a shorter --seq-len, or an accelerator with more memory"


def front_of(question: Question, found: Scored) -> list[dict]:
    """Layouts that no other beats in memory, time and device-seconds at once, on this cluster and on smaller ones."""
    rows = []
    nodes = found.cluster.num_nodes
    while nodes >= 1:
        try:
            here = found if nodes == found.cluster.num_nodes else find(question, nodes)
        except ConfigError:
            break
        good = np.flatnonzero(fits(here))
        if not len(good):
            break
        front = good[pareto(here.memory.total[good], here.time.total[good])]
        rows += [row_of(question, here, int(index)) for index in front]
        nodes //= 2
    columns = [np.array([row[name] for row in rows]) for name in ("memory_bytes", "step_seconds", "device_seconds")]
    return [rows[index] for index in pareto(*columns)]


def smallest_cluster(question: Question, top: int) -> Plan:
    """The plan for the fewest nodes, doubling from one, that meet the deadline and the budget.

    Raises: ConfigError where none does, saying what would be needed.
    """
    tried = []
    for nodes in doubling(question):
        try:
            found = find(question, nodes)
        except ConfigError:
            break  # no layout divides the model and the batch over so many
        best = int(rank(found)[0])
        if not fits(found)[best]:
            continue
        step = float(found.time.total[best])
        hours, cost = question.run_hours(step), question.cost(found.cluster, step)
        tried.append((nodes, hours, cost))
        if not misses(question, hours, cost):
            return plan_for(question, nodes, top)
    raise ConfigError(*impossible(question, tried))


def doubling(question: Question) -> Iterator[int]:
    nodes = 1
    while nodes <= MOST_NODES and question.cluster(nodes).num_devices <= question.base.batch_size * 1024:
        yield nodes
        nodes *= 2


def misses(question: Question, hours: float | None, cost: Cost | None) -> bool:
    late = question.hours is not None and hours > question.hours
    dear = question.budget is not None and cost is not None and cost.dollars > question.budget
    return late or dear


def impossible(question: Question, tried: list) -> tuple[str, str, str]:
    deadline = [] if question.hours is None else [f"a deadline of {question.hours:g} h"]
    budget = [] if question.budget is None else [f"a budget of ${question.budget:,.0f}"]
    asked = " and ".join(deadline + budget)
    if not tried:
        return (
            f"{asked} on {question.hardware.name}",
            "no layout fits at any size of cluster for this model and batch",
            "Use a smaller model, a larger --global-batch (which allows more devices), or more memory a device",
        )
    quickest = min(tried, key=lambda row: row[1])
    words = f"the fastest is --nodes {quickest[0]} in {quickest[1]:,.1f} h"
    remedy = f"Use --deadline {math.ceil(quickest[1])}h, fewer --tokens, or a larger --global-batch"
    if quickest[2] is not None:
        cheapest = min(tried, key=lambda row: row[2].dollars)
        words += (
            f" for ${quickest[2].dollars:,.0f}; the cheapest is --nodes {cheapest[0]} in {cheapest[1]:,.1f} h for "
            f"${cheapest[2].dollars:,.0f}"
        )
    if quickest[2] is not None and question.budget is not None:
        remedy = (
            f"Use --deadline {math.ceil(cheapest[1])}h with --budget {math.ceil(cheapest[2].dollars)}, "
            f"or --deadline {math.ceil(quickest[1])}h with --budget {math.ceil(quickest[2].dollars)}"
        )
    asked = f"{billions(question.tokens)} tokens with {asked} on {question.hardware.name}"
    return asked, f"no cluster tried meets that: {words}", remedy


def check_limits(question: Question, plan: Plan) -> None:
    """Refuse a cluster that the user named and that misses the deadline or the budget."""
    step = float(plan.found.time.total[plan.best])
    hours, cost = question.run_hours(step), question.cost(plan.found.cluster, step)
    if misses(question, hours, cost):
        asked, required, remedy = impossible(question, [(plan.found.cluster.num_nodes, hours, cost)])
        raise ConfigError(asked, required, remedy + ", or leave --nodes out and the smallest cluster is looked for")


def report_layout(flags: PlanFlags, question: Question) -> Plan:
    """The same report for the one layout that --mesh and the other flags name."""
    config = question.base
    devices = config.parallel.mesh.num_devices
    per_node = flags.devices_per_node or question.hardware.devices_per_node
    nodes = flags.nodes or -(-devices // per_node)
    cluster = Cluster(question.hardware, nodes, min(per_node, devices) if flags.nodes is None else per_node)
    if devices != cluster.num_devices:
        raise ConfigError(
            f"--mesh {config.parallel.mesh} on {cluster.num_nodes} nodes of {cluster.devices_per_node}",
            f"the mesh has {devices} ranks and the cluster {cluster.num_devices} devices",
            "Leave --nodes out, or use a mesh of as many ranks",
        )
    start = time.perf_counter()
    found = score(config, Candidates.of(config), cluster, question.attention, question.efficiency)
    order = np.array([0])
    sentences = explain.explain(found, order, question.attention, question.efficiency)
    if not fits(found)[0]:
        needs = f"It does not fit: {gib(found.memory.total[0])} of {gib(usable_bytes(cluster))} usable."
        sentences.insert(0, f"{needs} {explain.what_would_fit(found, question.attention)}")
    took = time.perf_counter() - start
    return Plan(question, found, order, order, [row_of(question, found, 0)], sentences, took)


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

TIMES = ("compute", "memory", "tp", "cp", "dp", "pp", "bubble", "overhead", "input")


def row_of(question: Question, found: Scored, index: int) -> dict:
    """One layout with its figures, ready for JSON."""
    layouts = found.layouts
    parallel = found.config(index).parallel
    step = float(found.time.total[index])
    hours, cost = question.run_hours(step), question.cost(found.cluster, step)
    pipelined = parallel.mesh.pp > 1
    return {
        "nodes": found.cluster.num_nodes,
        "devices": found.cluster.num_devices,
        "mesh": str(parallel.mesh),
        "zero": parallel.zero,
        "keep": not parallel.reshard_after_forward,
        "sp": parallel.sp,
        "overlap": parallel.overlap,
        "remat": parallel.remat,
        "schedule": NAMES[layouts.schedule[index]] if pipelined else None,
        "chunks": int(layouts.chunks[index]),
        "microbatches": int(layouts.microbatches[index]),
        "accumulate": parallel.accumulate,
        "rows": int(layouts.rows[index]),
        "step_seconds": step,
        "error": float(found.time.error[index]),
        "mfu": float(found.time.mfu[index]),
        "device_seconds": step * found.cluster.num_devices,
        "memory_bytes": float(found.memory.total[index]),
        "memory": {name: float(getattr(found.memory, name)[index]) for name in NAMES_OF_TERMS},
        "time": {name: float(getattr(found.time, name)[index]) for name in TIMES},
        "hours": hours,
        "dollars": None if cost is None else cost.dollars,
    }


def to_json(plan: Plan) -> dict:
    """Everything that is shown, as plain data; the page is made from it."""
    question, found = plan.question, plan.found
    model, cluster = question.base.model, found.cluster
    cost = question.cost(cluster, float(found.time.total[plan.best]))
    return {
        "model": dataclasses.asdict(model),
        "batch_size": question.base.batch_size,
        "dtype": question.base.precision.dtype,
        "optimizer": question.base.optimizer.name,
        "hardware": cluster.hardware.name,
        "title": cluster.hardware.title,
        "nodes": cluster.num_nodes,
        "devices": cluster.num_devices,
        "links": {"inside": cluster.inside.quoted, "between": cluster.between.quoted},
        "capacity_bytes": cluster.hardware.memory_bytes,
        "usable_bytes": usable_bytes(cluster),
        "num_layouts": len(found),
        "num_fitting": int(fits(found).sum()),
        "search_seconds": plan.search_seconds,
        "tokens": question.tokens,
        "rows": [row_of(question, found, int(index)) for index in plan.shown],
        "front": plan.front,
        "sentences": plan.sentences,
        "cost": None if cost is None else str(cost),
        "command": plan.command,
        "notes": list(question.notes),
        "assumptions": assumptions(question),
    }


def assumptions(question: Question) -> list[str]:
    """What the numbers rest on."""
    e = question.efficiency
    return [
        "Everything above is predicted by closed forms: nothing was run.",
        f"Step time: {e.stack} efficiencies (matmuls {e.matmul:.0%} of peak, HBM {e.hbm:.0%}, links inside a node "
        f"{e.inside:.0%}, between nodes {e.between:.0%}); the bar is ±{e.relative_error:.0%}, more where communication "
        "shows.",
        "Pipelines run in lock-step as our executor does: a tick is one F, B or W of one chunk; with recomputed blocks "
        "B takes two ticks' time. The F of the last part includes the head.",
        "Memory: closed form of this program, the same on every device; docs/plan.md has its errors. A tenth of a "
        "device is left for the driver, communication buffers and fragmentation; full is of the rest. k: ZeRO-3 keeps "
        "its weights after forward. Micro-batch: sequences × number in an update on one data rank.",
    ]


def print_plan(console: Console, plan: Plan) -> None:
    question, found = plan.question, plan.found
    model, cluster, config = question.base.model, found.cluster, found.config(plan.best)
    console.print(
        f"[bold]{model.num_layers} layers, width {model.width}, context {model.seq_len}[/], "
        f"{question.base.batch_size} sequences an update, {question.base.precision.dtype}, "
        f"{question.base.optimizer.name}, on {cluster.num_nodes} × {cluster.devices_per_node} {cluster.hardware.title}"
    )
    many = f"{len(found):,} layouts, {int(fits(found).sum()):,} fit" if len(found) > 1 else "this layout"
    console.print(f"{many}; predicted in {plan.search_seconds:.1f} s. Best of each mesh:" if len(found) > 1 else many)
    print_rows(console, [row_of(question, found, int(index)) for index in plan.shown], usable_bytes(cluster))
    if len(plan.front) > 1:
        console.print(f"\n[bold]Pareto front[/] of memory, time and device-hours, up to {cluster.num_nodes} nodes")
        print_rows(console, thinned(plan.front, 8), usable_bytes(cluster))
    console.print("\n[bold]Why[/]" if len(found) > 1 else "\n[bold]What it takes[/]")
    for sentence in plan.sentences:
        console.print(f"  • {escape(sentence)}", soft_wrap=True)
    for warning in config.warnings():
        console.print(f"  • [yellow]{escape(warning)}[/]", soft_wrap=True)
    step = float(found.time.total[plan.best])
    if (hours := question.run_hours(step)) is not None:
        limit = "" if question.hours is None else f", the deadline is {question.hours:g} h"
        console.print(f"\n{billions(question.tokens)} tokens take {hours:,.1f} h ({hours / 24:,.1f} days){limit}.")
    if (cost := question.cost(cluster, step)) is not None:
        bar = float(found.time.error[plan.best])
        low, high = (replace(cost, hours=cost.hours * (1 + sign * bar)).dollars for sign in (-1, 1))
        console.print(f"{cost} With the bar ${low:,.0f} to ${high:,.0f}.", soft_wrap=True)
    for note in question.notes:
        console.print(f"[yellow]{escape(note)}[/]", soft_wrap=True)
    console.print("\n[bold]Run it[/]")
    console.print(plan.command, soft_wrap=True, markup=False)
    console.print("\n" + " ".join(assumptions(question)), style="dim")


# ---------------------------------------------------------------------------------------------------------------------
# Trace and compile
# ---------------------------------------------------------------------------------------------------------------------

MARGIN = 0.10  # by which one level may differ from the one above before the report says so


def prove(console: Console, plan: Plan, flags: PlanFlags) -> list[dict]:
    """The best layouts again, by formula, trace and (where asked) compiler, side by side."""
    found, records, lines = plan.found, [], []
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("layout")
    for title in ("GiB formula", "traced", "compiled", "sent GiB formula", "traced", "compiled", "async"):
        table.add_column(title, justify="right")
    for title in ("trace s", "compile s"):
        table.add_column(title, justify="right")
    for place, index in enumerate(plan.shown[: flags.prove], start=1):
        config = found.config(int(index))
        name = f"{place}. {config.parallel.mesh} ZeRO {config.parallel.zero} {config.parallel.remat}"
        config, note = with_attention(config, plan.question.attention)
        with console.status(name):
            dump = None if flags.dump_hlo is None else str(Path(flags.dump_hlo) / str(place))
            level = levels(config, flags.compile, num_nodes=found.cluster.num_nodes, dump=dump)
        formula = float(found.memory.total[int(index)])
        if note:  # then the formula, too, of the attention that is traced
            formula = float(score(config, Candidates.of(config), found.cluster, "xla").memory.total[0])
        layout = make_layout(declare(config.model), config.parallel, config.part_layers)
        sent = total_sent(predicted(config, layout), config.parallel.mesh), level.sent_bytes
        compiled = level.compiled
        table.add_row(
            name,
            *(gib_number(n) for n in (formula, level.predicted.peak, compiled and compiled.peak)),
            *(gib_number(n) for n in (*sent, total_compiled(level))),
            "" if compiled is None else f"{compiled.asynchronous} of {len(compiled.collectives)}",
            f"{level.trace_seconds:.1f}",
            "" if compiled is None else f"{compiled.seconds:.0f}",
        )
        lines += [note] if note else []
        lines += disagreements(name, formula, level)
        lines.append(f"{name}: at the peak {largest(level)}.")
        records.append(
            {
                "layout": name,
                "formula_bytes": formula,
                "traced_bytes": level.predicted.peak,
                "compiled_bytes": None if compiled is None else compiled.peak,
                "sent_formula_bytes": sent[0],
                "sent": [{**dataclasses.asdict(row), "why": row.why} for row in level.sent],
                "trace_seconds": level.trace_seconds,
                "compile_seconds": None if compiled is None else compiled.seconds,
            }
        )
    what = f", compiled for {flags.compile}" if flags.compile else ""
    console.print(f"\n[bold]The same, traced{what}[/] (bytes on one device; nothing was run)")
    console.print(table)
    for line in dict.fromkeys(lines):
        console.print(f"  • {escape(line)}", soft_wrap=True)
    return records


def require_target(target: str | None) -> None:
    if target is not None and target not in TARGETS:
        raise ConfigError(f"--compile {target}", "there is no such target", f"Use {', '.join(TARGETS)}")


def with_attention(config: RunConfig, attention: str) -> tuple[RunConfig, str | None]:
    """The config with the attention that would run; where that cannot be traced here, the written-out one, and why."""
    note = None
    if attention == "cudnn" and not has_cuda_compiler():
        note = (
            "Flash attention cannot be traced without the CUDA plugin: scores are written out here and counted "
            "(pip install 'jaxdist[prove-cuda]' needs no card)."
        )
        attention = "xla"
    parallel = replace(config.parallel, attention=attention)
    return replace(config, parallel=parallel), note


def disagreements(name: str, formula: float, level: Levels) -> list[str]:
    """Where one level differs from the one above by more than the margin, and the largest differences."""
    found = []
    traced = level.predicted.peak
    if abs(formula / traced - 1) > MARGIN:
        found.append(f"{name}: the formula's memory differs from the trace's by {formula / traced - 1:+.0%}.")
    if level.peak_error is not None and abs(level.peak_error) > MARGIN:
        found.append(f"{name}: the trace's memory differs from the compiler's by {level.peak_error:+.0%}.")
    changed = [row for row in level.sent if row.compiled_count is not None and not row.why.startswith("equal")]
    for row in changed:
        found.append(f"{name}: {row.kind} over {','.join(row.axes)}: {row.why}.")
    return found


def total_compiled(level: Levels) -> int | None:
    """Bytes sent by the compiled program; None where it does not say."""
    counted = [row.compiled_bytes for row in level.sent]
    return None if None in counted else sum(counted)


def largest(level: Levels) -> str:
    return ", ".join(f"{gib(num_bytes)} {what}" for num_bytes, what in level.predicted.largest[:4])


def gib_number(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def print_rows(console: Console, rows: list[dict], usable: float) -> None:
    """A table of layouts; columns in which no row says anything are left out."""
    columns = {
        "nodes": [str(row["nodes"]) for row in rows],
        "mesh": [row["mesh"] for row in rows],
        "ZeRO": [f"{row['zero']}{'k' * row['keep']}" for row in rows],
        "sp": ["yes" if row["sp"] else "" for row in rows],
        "overlap": ["yes" if row["overlap"] else "" for row in rows],
        "remat": [row["remat"] for row in rows],
        "pipeline": [pipeline_words(row) for row in rows],
        "micro-batch": [f"{row['rows']} × {row['accumulate'] * row['microbatches']}" for row in rows],
        "step": [seconds(row["step_seconds"]) for row in rows],
        "±": [f"{row['error']:.0%}" for row in rows],
        "MFU": [f"{row['mfu']:.0%}" for row in rows],
        "GiB": [f"{row['memory_bytes'] / GIB:.1f}" for row in rows],
        "full": [f"{row['memory_bytes'] / usable:.0%}" for row in rows],
        "days": ["" if row["hours"] is None else f"{row['hours'] / 24:.1f}" for row in rows],
        "$": ["" if row["dollars"] is None else f"{row['dollars']:,.0f}" for row in rows],
    }
    shown = {title: cells for title, cells in columns.items() if any(cells)}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for title in shown:
        table.add_column(title, justify="left" if title in ("mesh", "remat", "pipeline") else "right")
    for cells in zip(*shown.values(), strict=True):
        table.add_row(*cells)
    console.print(table)


def pipeline_words(row: dict) -> str:
    """ "zb-v 8" or "interleaved×4 8": schedule, chunks where they are chosen, micro-batches of a pass."""
    if row["schedule"] is None:
        return ""
    chunks = f"×{row['chunks']}" if row["schedule"] == "interleaved" else ""
    return f"{row['schedule']}{chunks} {row['microbatches']}"


def thinned(rows: list[dict], most: int) -> list[dict]:
    """At most so many of the rows, evenly spread, with both ends."""
    if len(rows) <= most:
        return rows
    return [rows[round(index)] for index in np.linspace(0, len(rows) - 1, most)]


if __name__ == "__main__":
    run_program(PlanFlags, main, "experiments.plan")
