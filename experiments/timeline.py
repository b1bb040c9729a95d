"""Pictures of pipeline schedules, drawn by matplotlib (the extra `draw`)."""

import importlib.util
import io
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole
from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.simulate import Costs, held_chunks, simulate

from .cli import make_folder

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PHASES = {
    Phase.F: ("#3470c4", "forward"),
    Phase.B: ("#d66828", "input gradient"),
    Phase.W: ("#3e8e5c", "weight gradient"),
    Phase.R: ("#7a57a5", "forward again"),
}
IDLE, FAINT, MEMORY = "#e8e8ec", "#787882", "#9282c4"
TICK_WIDTH, ROW_HEIGHT = 0.22, 0.3  # inches
HALF = 0.44  # of a row, beside the gap


def timeline(schedule: Schedule, costs: Costs, subtitle: str) -> "Figure":
    """Every action of a schedule over simulated time (lock-step, free links), and under it what each stage holds.

    Chunks are shades, from dark to light; a grey cell is idle. Memory is in activations of a whole stage's layers for
    one micro-batch, all stages to one scale.
    """
    from matplotlib.colors import to_rgb
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    def shade(phase: Phase, chunk: int) -> tuple[float, ...]:
        """Later chunks are lighter."""
        towards_white = 0.62 * chunk / max(schedule.num_chunks - 1, 1)
        return tuple(part + (1 - part) * towards_white for part in to_rgb(PHASES[phase][0]))

    result, stages, peak = simulate(schedule, costs), range(schedule.num_stages), max(map(max, held_chunks(schedule)))
    inches = TICK_WIDTH * schedule.num_ticks
    figure = Figure((max(inches + 1.4, 8.2), 2 * ROW_HEIGHT * schedule.num_stages + 1.9), layout="constrained")
    actions, memory = figure.subplots(2, sharex=True)
    for stage, held in enumerate(zip(*held_chunks(schedule), strict=True)):
        bottom, spans, fills = stage + HALF, [], []
        for tick, row in enumerate(schedule.table):
            if (action := row[stage]) is not None:
                left, width = result.start[tick, stage], result.end[tick, stage] - result.start[tick, stage]
                spans.append((left, width))
                fills.append(shade(action.phase, action.chunk))
                if width * inches / result.makespan > 0.09 * len(str(action.microbatch)):
                    ink = "black" if sum(fills[-1]) > 1.9 else "white"
                    actions.text(
                        left + width / 2, stage, action.microbatch, color=ink, ha="center", va="center", size=8
                    )
        actions.broken_barh([(0, result.makespan)], (stage - HALF, 2 * HALF), color=IDLE)
        actions.broken_barh(spans, (stage - HALF, 2 * HALF), facecolors=fills, edgecolor="white")
        memory.broken_barh([(0, result.makespan)], (stage - HALF, 2 * HALF), color="#f6f6f8")
        tops = [bottom - 2 * HALF * chunks / peak for chunks in (*held, held[-1])]
        memory.fill_between([*result.start[:, stage], result.makespan], bottom, tops, step="post", color=MEMORY, lw=0)
        memory.text(result.makespan, stage, f"  peak {max(held) / schedule.num_chunks:g}", va="center", size=9)
    for axes in (actions, memory):
        axes.set(xlim=(0, result.makespan), ylim=(schedule.num_stages - 0.5, -0.5))
        axes.set_yticks(stages, [f"stage {stage}" for stage in stages])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
    title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
    figure.suptitle(title + ", messages travel during a tick" * (schedule.send_latency == 2), x=0.01, ha="left")
    actions.set_title(subtitle, loc="left", size=9, color=FAINT)
    memory.set_title("activations in flight (of a stage's layers for one micro-batch)", loc="left", size=9, color=FAINT)
    memory.set_xlabel("time, in the unit of the costs", color=FAINT)
    patches = [Patch(color=IDLE, label="idle")]
    for phase, chunk in product(schedule.phases, range(schedule.num_chunks)):
        label = f"{phase.name} {PHASES[phase][1]}" + f", chunk {chunk}" * (schedule.num_chunks > 1)
        patches.append(Patch(color=shade(phase, chunk), label=label))
    figure.legend(handles=patches, loc="outside lower left", ncols=7, frameon=False, fontsize=8, handlelength=1.4)
    return figure


def picture_folder(path: str | None) -> Path | None:
    """The folder that --draw names, made. Raises: ConfigError, also where there is nothing to draw with."""
    folder = make_folder("--draw", path)
    if folder is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--draw", "pictures are drawn by matplotlib, which is not installed", install_text("draw"))
    return folder


def write_both(figure: "Figure", stem: Path, console: Console) -> None:
    """STEM.svg and STEM.png. Raises: ConfigError where they cannot be written."""
    from matplotlib import rc_context

    for kind in ("svg", "png"):
        path = stem.with_name(f"{stem.name}.{kind}")
        try:
            with rc_context(
                {"svg.fonttype": "none", "svg.hashsalt": "jaxdist"}
            ):  # text stays text; the same every time
                drawn = io.BytesIO()
                figure.savefig(drawn, format=kind, dpi=120, metadata={"Date": None} if kind == "svg" else {})
            write_whole(path, drawn.getvalue())
        except OSError as error:
            raise ConfigError(
                f"--draw {str(stem.parent)!r}", f"cannot write {path} ({error.strerror})", "Name another"
            ) from error
        console.print(f"wrote {path}", markup=False)
