"""What a plan says: its rows as plain data, and the same in a terminal."""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from rich.console import Console
from rich.markup import escape

from jaxdist.mesh import parse_mesh
from jaxdist.parallel.named_arrays import shorten
from jaxdist.plan.cost import duration
from jaxdist.plan.explain import NAMES_OF_TERMS, billions, gib, seconds
from jaxdist.plan.hardware import GIB
from jaxdist.plan.parts import work_of
from jaxdist.plan.search import FULL, Scored, rank, usable_bytes
from jaxdist.plan.time_model import bar_of
from jaxdist.runtime.budget import short_money
from jaxdist.strategy import TP_RINGS

from .entry import in_flags
from .plan_command import Command, make_command
from .plan_question import Estimate, PlanFlags, Question, estimate
from .tables import print_bullet, print_columns

BATCH_MARGIN = 0.02  # of the time a token: what a smaller batch may take more
TIMES = {"compute": "matmuls", "memory": "memory traffic", "tp": "tp", "cp": "cp", "ep": "exchange of tokens"}
TIMES |= {"dp": "dp", "pp": "pp messages", "bubble": "bubble", "overhead": "host", "input": "input"}
# Where clusters are compared, these columns are left out.
UNTOLD = ("tokens/s", "sp", "cp kind", "overlap", "pipeline", "micro-batch", "loss chunks")
LEFT = ("what if", "card", "limits", "mesh", "cp kind", "remat", "pipeline", "or replica×dp")  # columns of words
SETTINGS = ("ZeRO", "sp", "cp kind", "overlap", "remat", "pipeline", "micro-batch", "loss chunks", "time")


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer: layouts with their scores, what of them is shown, best first, and what is said about it.

    groups: indices of layouts that differ in replica × dp alone. tables: rows of other questions, by what they show.
    """

    question: Question
    found: Scored
    num_layouts: int
    num_fitting: int
    groups: list[list[int]]
    front: list[dict]
    sentences: list[str]
    search_seconds: float
    tables: Mapping[str, list[dict]] = field(default_factory=dict)

    @property
    def best(self) -> int:
        return self.groups[0][0]

    @property
    def fits(self) -> bool:
        return bool(self.found.fits[self.best])

    @cached_property
    def command(self) -> Command:
        config, question = self.found.config(self.best), self.question
        step = float(self.found.time.total[self.best])
        return make_command(
            config, self.found.cluster, step, question.recipe_notes, question.rate_known, *question.files
        )


def row_layout(found: Scored, index: int) -> dict:
    """One layout, ready for JSON and for `layout_words`."""
    layouts, base, pipelined = found.layouts, found.base.parallel, found.layouts.pp[index] > 1
    return {
        "mesh": str(layouts.mesh(index)),
        "zero": int(layouts.zero[index]),
        "keep": bool(layouts.keep[index]),
        "sp": bool(layouts.sp[index]),
        "tp_ring": TP_RINGS[layouts.ring[index]],
        "experts_over_tp": bool(layouts.over_tp[index]),
        "loss_chunks": int(layouts.loss_chunks[index]),
        "cp_kind": layouts.cp_kind(index, base) if layouts.cp[index] > 1 else None,
        "overlap": bool(layouts.overlap[index]),
        "remat": layouts.remat(index),
        "schedule": layouts.schedule_name(index, base) if pipelined else None,
        "chunks": int(layouts.chunks[index]),
        "microbatches": int(layouts.microbatches[index]),
        "stages": layouts.stages(index, base) if pipelined else None,
        "accumulate": int(layouts.accumulate[index]),
        "rows": int(layouts.rows[index]),
    }


def row_of(question: Question, found: Scored, group: Sequence[int]) -> dict:
    """One layout with its figures, ready for JSON, and those that differ from it in replica × dp alone."""
    index, *others = group
    run, time, memory = estimate(question, found, index), found.time, found.memory

    def figures(index: int) -> dict:
        return {"step_seconds": float(time.total[index]), "memory_bytes": float(memory.total[index])}

    return {
        "card": found.cluster.hardware.name,
        "nodes": found.cluster.num_nodes,
        "devices": found.cluster.num_devices,
        "batch_size": question.base.batch_size,
        "tokens_per_second": question.base.batch_size * question.base.model.seq_len / run.step_seconds,
        **row_layout(found, index),
        **figures(index),
        "error": run.error,
        "mfu": float(time.mfu[index]),
        "usable_bytes": usable_bytes(found.cluster),
        "memory": {name: float(getattr(memory, name)[index]) for name in NAMES_OF_TERMS},
        "time": {name: float(getattr(time, name)[index]) for name in TIMES},
        "hours": run.hours,
        "dollars": None if run.cost is None else run.cost.dollars,
        "also": [{"mesh": str(found.layouts.mesh(other)), **figures(other)} for other in others],
    }


def to_json(plan: Plan) -> dict:
    """Everything that is shown, as plain data; the terminal and the page show this."""
    question, cluster = plan.question, plan.found.cluster
    return {
        "model": dataclasses.asdict(question.base.model),
        "batch_size": question.base.batch_size,
        "dtype": question.base.precision.dtype,
        "optimizer": question.base.optimizer.name,
        "hardware": cluster.hardware.name,
        "title": cluster.hardware.title,
        "nodes": cluster.num_nodes,
        "devices": cluster.num_devices,
        "links": {"inside": cluster.inside.quoted, "between": cluster.between.quoted},
        "capacity_bytes": question.capacity_bytes,
        "usable_bytes": usable_bytes(cluster),
        "num_layouts": plan.num_layouts,
        "num_fitting": plan.num_fitting,
        "search_seconds": plan.search_seconds,
        "tokens": question.tokens,
        "rows": [row_of(question, plan.found, group) for group in plan.groups],
        "front": plan.front,
        "tables": dict(plan.tables),
        "sentences": plan.sentences,
        "fastest": fastest_words(plan),
        "run": run_words(question, estimate(question, plan.found, plan.best)),
        "command": str(plan.command) if plan.fits else None,
        "command_notes": list(plan.command.notes) if plan.fits else [],
        "notes": list(question.notes),
        "assumptions": assumptions(question),
    }


def fastest_words(plan: Plan) -> list[str]:
    """The layout that is faster than the planned one, where there is one."""
    seconds, first = plan.found.time.total, int(rank(plan.found)[0])
    if not plan.fits or seconds[first] >= seconds[plan.best]:
        return []
    fastest, planned = (row_layout(plan.found, index) for index in (first, plan.best))
    words, gain = layout_words(fastest), 1 - float(seconds[first] / seconds[plan.best])
    if words == layout_words(planned):
        words += f", micro-batches of {fastest['rows']} in {gib(float(plan.found.memory.total[first]))} a device"
    return [f"The fastest is less simple and {gain:.1%} faster: {words}."]


def shown_words(plan: Plan) -> str:
    """Which of the layouts are in the table."""
    if not plan.question.within:
        return "Of each mesh its fastest is shown."
    within = f"{100 * plan.question.within:.3g} %"
    return f"Of each mesh the simplest within {within} of its fastest is shown, if none is simpler, smaller and faster."


def run_words(question: Question, run: Estimate) -> list[str]:
    """How long the whole run takes and what it costs, a sentence each."""
    if run.hours is None:
        return []
    limit = "" if question.hours is None else f" The deadline is {duration(question.hours)}."
    words = f"{billions(question.tokens)} tokens take {duration(run.hours)}, at most {duration(run.most_hours)}.{limit}"
    return [words] + ([] if run.cost is None else [str(run.cost)])


def assumptions(question: Question) -> list[str]:
    """What the numbers rest on."""
    e = question.efficiency
    bar = bar_of(work_of(question.base.model), e)
    return [
        "Everything above is predicted: nothing was run.",
        f"Step time: {e.stack} efficiencies (matmuls {e.matmul:.0%} of peak, HBM {e.hbm:.0%}, links inside a node "
        f"{e.inside:.0%}, between nodes {e.between:.0%}); the bar is ±{bar:.0%}, more where communication shows.",
        "Pipelines run in lock-step as our executor does: a tick is one F, B or W of one chunk; with recomputed blocks "
        "B takes two ticks' time. The F of the last part includes the head.",
        "Memory: this program's, by formula and a traced layer, the same on every device; docs/plan.md has its errors. "
        "A tenth of a device is left for the driver, communication buffers and fragmentation; full is of the rest, ! "
        "above 95 %. k: ZeRO-3 keeps its weights after forward; rings: sp with --tp-ring; experts: over tp. "
        "Micro-batch: sequences × number in an update on one data rank.",
    ]


WHY = 6  # sentences before the tables; the others come after them


def print_plan(console: Console, plan: Plan, record: dict) -> None:
    """The command first, then why, then the layouts it was chosen from, then what else there is to know."""
    base, cluster, row = plan.question.base, plan.found.cluster, record["rows"][0]
    searched = plan.num_layouts > 1
    console.print(
        f"[bold]{escape(base.model.describe())}[/], {base.batch_size} sequences an update, {base.precision.dtype}, "
        f"{base.optimizer.name}, on {cluster.num_nodes} × {cluster.devices_per_node} {escape(cluster.hardware.title)}"
    )
    console.print(
        f"[bold]{escape(layout_words(row))}[/]: {seconds(row['step_seconds'])} ± {row['error']:.0%} a step, "
        f"{row['mfu']:.0%} MFU, {gib(row['memory_bytes'])} a device"
    )
    for words in (*record["fastest"], *record["run"]):
        console.print(escape(words))
    if plan.fits:
        console.print("\n[bold]Run it[/]")
        for line in plan.command.lines(console.width):
            console.print(line, soft_wrap=True, markup=False)
    else:
        console.print(f"\n[bold red]{escape(plan.sentences[0])}[/]", soft_wrap=not console.is_terminal)
    sentences = plan.sentences[0 if plan.fits else 1 :]
    console.print("\n[bold]Why[/]" if searched else "\n[bold]What it takes[/]")
    for sentence in sentences[: WHY if searched else None]:
        print_bullet(console, sentence)
    if searched:
        console.print(
            f"\n[bold]Layouts[/] of {plan.num_layouts:,}, {plan.num_fitting:,} of which fit; predicted in "
            f"{plan.search_seconds:.1f} s. {shown_words(plan)}"
        )
        print_rows(console, record["rows"])
    for title, rows in plan.tables.items():
        console.print(f"\n[bold]{title}[/]")
        print_rows(console, rows)
    if (num := len(plan.front)) > 1:
        console.print("\n[bold]Pareto front[/] of memory and time")
        spread = np.linspace(0, num - 1, min(num, 8))  # evenly, with both ends
        print_rows(console, [plan.front[round(index)] for index in spread])
    console.print("\n[bold]Notes[/]")
    for sentence in (*(sentences[WHY:] if searched else ()), *(plan.command.notes if plan.fits else ())):
        print_bullet(console, sentence)
    for warning in (*plan.found.config(plan.best).warnings(), *plan.question.notes):
        print_bullet(console, in_flags(warning, PlanFlags), "yellow")
    console.print("\n" + " ".join(record["assumptions"]), style="dim", markup=False)


def print_rows(console: Console, rows: list[dict]) -> None:
    columns = columns_of(rows)
    print_columns(console, columns, left=LEFT, drop=("full", "±", "or replica×dp"), under=SETTINGS)


def columns_of(rows: list[dict]) -> dict[str, list[str]]:
    """The cells of a table of layouts, by title; those of the question where rows differ in it."""
    asked = {
        "what if": [row.get("what if", "") for row in rows],
        "card": [row["card"] for row in rows],
        "nodes": [str(row["nodes"]) for row in rows],
        "sequences": [f"{row['batch_size']:,}" for row in rows],
        "tokens/s": [f"{row['tokens_per_second']:,.0f}" for row in rows],
        "limits": [row.get("limits", "") for row in rows],
    }
    alike = len({(row["card"], row["nodes"], row["batch_size"]) for row in rows}) == 1
    columns = {
        title: cells for title, cells in asked.items() if title == "limits" or (not alike and len(set(cells)) > 1)
    } | {
        "mesh": [row["mesh"] for row in rows],
        "ZeRO": [f"{row['zero']}{'k' * row['keep']}" for row in rows],
        "sp": [sp_words(row) for row in rows],
        "cp kind": [row["cp_kind"] or "" for row in rows],
        "overlap": ["yes" if row["overlap"] else "" for row in rows],
        "remat": [shorten(row["remat"]) if row["remat"] != "none" else "" for row in rows],
        "pipeline": [pipeline_words(row) for row in rows],
        "micro-batch": [f"{row['rows']} × {row['accumulate'] * row['microbatches']}" for row in rows],
        "loss chunks": [str(row["loss_chunks"]) if row["loss_chunks"] > 1 else "" for row in rows],
        "step": [seconds(row["step_seconds"]) for row in rows],
        "±": [f"{row['error']:.0%}" for row in rows],
        "MFU": [f"{row['mfu']:.0%}" for row in rows],
        "GiB": [f"{row['memory_bytes'] / GIB:.1f}" for row in rows],
        "full": [
            f"{full:.0%}" + "!" * (full > FULL) for full in (row["memory_bytes"] / row["usable_bytes"] for row in rows)
        ],
        "time": ["" if row["hours"] is None else duration(row["hours"]).split(" (")[-1].rstrip(")") for row in rows],
        "cost": ["" if row["dollars"] is None else short_money(row["dollars"]) for row in rows],
        "or replica×dp": [also_words(row) for row in rows],
    }
    if any(asked["limits"]):
        columns = {title: cells for title, cells in columns.items() if title not in UNTOLD}
    return columns


def sp_words(row: dict) -> str:
    """Whether activations are split over tp, and what else is for that: rings, whole experts."""
    what = ["rings"] * (row["tp_ring"] != "none") + ["experts"] * row["experts_over_tp"]
    return (", ".join(what) or "yes") if row["sp"] else ""


def also_words(row: dict) -> str:
    """ "2×8, 4×4 (+1%)": the other ways to divide the data ranks of a row, and by how much the slowest is slower."""
    if not row["also"]:
        return ""
    splits = [parse_mesh(other["mesh"]) for other in row["also"]]
    slower = round(100 * (max(other["step_seconds"] for other in row["also"]) / row["step_seconds"] - 1))
    return f"{', '.join(f'{mesh.replica}×{mesh.dp}' for mesh in splits)} ({slower:+}%)"


def layout_words(row: dict) -> str:
    """A layout in a few words."""
    words = [row["mesh"], *([row["cp_kind"]] if row["cp_kind"] else [])]
    words += [f"ZeRO-{row['zero']}"] * (row["zero"] > 0) + ["sp"] * row["sp"]
    words += [f"{row['tp_ring']} rings"] * (row["tp_ring"] != "none") + ["experts over tp"] * row["experts_over_tp"]
    words += ["overlap"] * row["overlap"]
    words += [f"remat {shorten(row['remat'])}"] * (row["remat"] != "none")
    words += [pipeline_words(row)] * (row["schedule"] is not None)
    words += [f"loss in {row['loss_chunks']} chunks"] * (row["loss_chunks"] > 1)
    return ", ".join(words)


def pipeline_words(row: dict) -> str:
    """ "zb-v 8" or "interleaved×4 8": schedule, chunks where they are chosen, micro-batches of a pass."""
    if row["schedule"] is None:
        return ""
    chunks = f"×{row['chunks']}" if row["schedule"] == "interleaved" else ""
    stages = f" {row['stages']}" if row["stages"] != "even" else ""
    return f"{row['schedule']}{chunks} {row['microbatches']}{stages}"
