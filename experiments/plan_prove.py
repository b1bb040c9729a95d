"""The best layouts of a plan again, traced and compiled: what they keep and send, from the program itself."""

import dataclasses
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from jaxdist.commands import install_text
from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape
from jaxdist.placement import make_layout
from jaxdist.plan.explain import gib
from jaxdist.plan.hardware import GIB
from jaxdist.plan.proof.compile import has_cuda_compiler
from jaxdist.plan.proof.levels import Levels, levels
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.search import Candidates, Scored, score
from jaxdist.plan.traffic import Message, predicted, table

from .plan_question import PlanFlags
from .plan_report import layout_words, row_layout
from .progress import Progress
from .tables import print_bullet, print_columns

MARGIN = 0.10  # by which one level may differ from the one above before the report says so


def prove(console: Console, found: Scored, shown: list[int], attention: str, flags: PlanFlags) -> list[dict]:
    """The best layouts again, by formula, trace and (where asked) compiler, side by side. shown: their indices."""
    records, lines, rows = [], [], []
    for place, index in enumerate(shown, start=1):
        name = f"{place}. {layout_words(row_layout(found, index))}"
        config, note = with_attention(found.config(index), attention)
        doing = "tracing" if flags.compile is None else "tracing and compiling"
        with Progress(f"{doing} {place} of {len(shown)}"):
            dump = None if flags.dump_hlo is None else str(Path(flags.dump_hlo) / str(place))
            level = levels(config, flags.compile, num_nodes=found.cluster.num_nodes, dump=dump)
        formula = float(found.memory.total[index])
        if note:  # then the formula, too, of the attention that is traced
            formula = float(score(config, Candidates.of(config), found.cluster, config.attention).memory.total[0])
        messages = predicted(config, make_layout(config.model, config.parallel, config.part_layers))
        sent, compiled = total_sent(messages, config.parallel.mesh), level.compiled
        record = {
            "layout": name,
            "formula_bytes": formula,
            "traced_bytes": level.predicted.peak,
            "compiled_bytes": None if compiled is None else compiled.peak,
            "sent_formula_bytes": sent,
            "sent": [{**dataclasses.asdict(row), "why": row.why} for row in level.sent],
            "trace_seconds": level.trace_seconds,
            "compile_seconds": None if compiled is None else compiled.seconds,
        }
        records.append(record)
        sizes = {
            "GiB formula": formula,
            "GiB traced": level.predicted.peak,
            "GiB compiled": record["compiled_bytes"],
            "sent GiB formula": sent,
            "sent GiB traced": level.sent_bytes,
            "sent GiB compiled": level.compiled_sent_bytes,
        }
        rows.append(
            {"layout": name, **{title: "" if x is None else f"{x / GIB:.2f}" for title, x in sizes.items()}}
            | {"async": "" if compiled is None else f"{compiled.asynchronous} of {len(compiled.collectives)}"}
            | {"trace s": f"{level.trace_seconds:.1f}"}
            | {"compile s": "" if compiled is None else f"{compiled.seconds:.0f}"}
        )
        lines += [note] if note else []
        lines += disagreements(name, formula, level)
        largest = ", ".join(f"{gib(num_bytes)} {what}" for num_bytes, what in level.predicted.largest[:4])
        lines.append(f"{name}: at the peak {largest}.")
    what = f", compiled for {flags.compile}" if flags.compile else ""
    console.print(f"\n[bold]The same, traced{what}[/] (bytes on one device; nothing was run)")
    columns = {title: [row[title] for row in rows] for title in rows[0]}
    print_columns(console, columns, left=("layout",), drop=("trace s", "async"))
    for line in dict.fromkeys(lines):
        print_bullet(console, line)
    if len(rows) == 1:
        print_messages(console, messages, config.parallel.mesh)
    return records


def print_messages(console: Console, messages: list[Message], mesh: MeshShape) -> None:
    """The messages of one device in a step, by purpose; of each purpose the stage that sends most of it."""
    if not messages:
        console.print("\n[bold]What a step sends[/]: nothing, one device has nobody to send to")
        return
    console.print("\n[bold]What a step sends[/], by closed form")
    titles = ("purpose", "collective", "over", "messages", "bytes sent")
    columns = dict(zip(titles, zip(*table(messages, mesh), strict=True), strict=True))
    cells = {title: [f"{x:,}" if isinstance(x, int) else x for x in found] for title, found in columns.items()}
    print_columns(console, cells, left=("purpose", "collective", "over"))


def with_attention(config: RunConfig, attention: str) -> tuple[RunConfig, str | None]:
    """The config with the attention that would run; where that cannot be traced here, another one, and why."""
    note, parallel = None, config.parallel
    if parallel.mesh.cp > parallel.cp_split[0]:
        return config, None  # attention over cp by blocks: no other is run
    if attention == "cudnn" and not has_cuda_compiler():
        attention = config.model.attention_for("auto", "cpu", config.precision.dtype, training=True)
        xla, blocked = "scores are written out here and counted", "it is traced in blocks of scores"
        note = (
            f"Flash attention cannot be traced without the CUDA plugin: {xla if attention == 'xla' else blocked} "
            f"({install_text('prove-cuda')} needs no card)."
        )
    return replace(config, parallel=replace(parallel, attention=attention)), note


def disagreements(name: str, formula: float, level: Levels) -> list[str]:
    """Where one level differs from the one above by more than the margin, and the largest differences."""
    found, traced = [], level.predicted.peak
    if abs(formula / traced - 1) > MARGIN:
        found.append(f"{name}: the formula's memory differs from the trace's by {formula / traced - 1:+.0%}.")
    if level.peak_error is not None and abs(level.peak_error) > MARGIN:
        found.append(f"{name}: the trace's memory differs from the compiler's by {level.peak_error:+.0%}.")
    changed = [row for row in level.sent if row.compiled_count is not None and not row.why.startswith("equal")]
    return [*found, *(f"{name}: {row.kind} over {','.join(row.axes)}: {row.why}." for row in changed)]
