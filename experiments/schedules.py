"""Pipeline schedules side by side: bubble, memory in flight, time for given costs. Simulated; nothing is run.

python -m experiments.plan schedules                                 every schedule for 4 stages and 8 micro-batches
python -m experiments.plan schedules --schedule zb-v                 one, drawn as text, with the figures of each stage
python -m experiments.plan schedules --overlap --link 0.1            where messages travel while stages compute
python -m experiments.plan schedules --file table.txt                check and show a table of your own
python -m experiments.plan schedules --draw docs/schedules           also write a timeline of each as SVG
"""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.builders import NAMES, make_schedule
from jaxdist.parallel.pipeline.schedules import Phase, Schedule
from jaxdist.parallel.pipeline.simulate import Costs, in_flight, simulate
from jaxdist.parallel.pipeline.text import draw, load

from .charts import schedule_picture, standalone
from .entry import make_folder, write_output
from .tables import Rows

MOST_COMPARED = 2**13  # stages x micro-batches x chunks, of all schedules together


@dataclass(frozen=True)
class SchedulesFlags:
    """Compare pipeline schedules, or look at one."""

    stages: int | None = None
    """Default: 4."""
    microbatches: int | None = None
    """Default: 8."""
    chunks: int | None = None
    """Chunks a stage of the interleaved schedule. Default: 2."""
    schedule: str | None = None
    """Show only this one."""
    overlap: bool = False
    """Messages travel during a tick, while stages compute, and not between two."""
    recompute: bool = False
    """Forward runs again before backward, in an action R of its own."""
    file: str | None = None
    """Show the table in this file instead; docs/schedules.md has the format."""
    forward: float = 1.0
    """Seconds that F of all layers of a stage takes for one micro-batch."""
    backward_input: float = 1.0
    """The same of B, the input gradient."""
    backward_weights: float = 1.0
    """The same of W, the weight gradient."""
    link: float = 0.0
    """Seconds that a message takes between two stages."""
    draw: str | None = None
    """Folder for a timeline of each shown schedule, as SVG."""


def main(flags: SchedulesFlags, console: Console) -> int:
    shown = shown_schedules(flags)
    folder = make_folder("--draw", flags.draw)
    if len(shown) == 1:
        console.print(draw(shown[0]), soft_wrap=True, markup=False)
        print_stages(flags, shown[0], console)
    baseline = make_schedule("1f1b", shown[0].num_stages, shown[0].num_microbatches)
    print_comparison(flags, shown, baseline, console)
    if folder is not None:
        draw_all(flags, shown, baseline, folder, console)
    return 0


def shown_schedules(flags: SchedulesFlags) -> list[Schedule]:
    if flags.file is not None:
        for name in ("schedule", "stages", "microbatches", "chunks", "overlap", "recompute"):
            if getattr(flags, name) not in (None, False):
                raise ConfigError(
                    f"--{name} with --file", "must be left to the table in the file", f"Leave --{name} or --file out"
                )
        return [load(flags.file)]
    names = NAMES if flags.schedule is None else (flags.schedule,)
    stages = 4 if flags.stages is None else flags.stages
    microbatches = 8 if flags.microbatches is None else flags.microbatches
    if len(names) > 1 and stages * microbatches * (flags.chunks or 1) > MOST_COMPARED:
        raise ConfigError(
            f"{stages} stages x {microbatches} micro-batches x {flags.chunks or 1} chunks in every schedule",
            f"must be at most {MOST_COMPARED:,} together",
            "Name one with --schedule, or use smaller sizes",
        )
    # All together: --chunks is for the one that has a choice. One alone: it is told whether it can have them.
    send_latency = 2 if flags.overlap else 1
    return [
        make_schedule(
            name,
            stages,
            microbatches,
            flags.chunks if len(names) == 1 or name == "interleaved" else None,
            send_latency,
            flags.recompute,
        )
        for name in names
    ]


def chunk_costs(flags: SchedulesFlags, schedule: Schedule) -> Costs:
    """A chunk has its share of the stage's layers."""
    times = (flags.forward, flags.backward_input, flags.backward_weights)
    return Costs(*(time / schedule.num_chunks for time in times))


def bubble_and_peak(schedule: Schedule) -> tuple[float, float]:
    """(idle time over work, every action one tick; activations in flight on the worst stage, in those of a stage's
    layers for one micro-batch)."""
    return simulate(schedule).idle_over_ideal, max(in_flight(schedule)) / schedule.num_chunks


def ratio(value: float, baseline: float) -> str:
    return f"{value / baseline:.2f}" if baseline else "-"


def print_comparison(flags: SchedulesFlags, shown: list[Schedule], baseline: Schedule, console: Console) -> None:
    figures = ("chunks", "ticks", "idle / ideal", "idle share", "bubble / 1F1B's")
    more = ("peak in flight", "/ 1F1B's", "lock-step s", "in pairs s", "textbook s")
    table, (least_bubble, least_peak) = Rows("schedule", *figures, *more), bubble_and_peak(baseline)
    for schedule in shown:
        bubble, peak = bubble_and_peak(schedule)
        costs, share = chunk_costs(flags, schedule), simulate(schedule).idle_share
        times = (simulate(schedule, costs, flags.link, each).makespan for each in ("ticks", "pairs", "dependencies"))
        table.add_row(
            *(schedule.name, str(schedule.num_chunks), str(schedule.num_ticks)),
            *(f"{100 * bubble:.1f} %", f"{100 * share:.1f} %", ratio(bubble, least_bubble)),
            *(f"{peak:g}", ratio(peak, least_peak)),
            *(f"{seconds:g}" for seconds in times),
        )
    console.print(
        f"{baseline.num_stages} stages, {baseline.num_microbatches} micro-batches (simulated)", style="italic"
    )
    table.print(console, under=more)
    console.print(
        "A tick is one action of one chunk. Bubbles and memory are of the table, every action one tick. In flight: the"
        " worst stage, in activations of a stage's layers for one micro-batch, from the start of F (of R, where it is"
        " recomputed) to the end of W."
        " Lock-step waits for both ring neighbours after every tick (the executor at most); in pairs for those that a"
        " message connects, as on GPUs; textbook only for inputs.",
        style="dim",
    )


def print_stages(flags: SchedulesFlags, schedule: Schedule, console: Console) -> None:
    unit = simulate(schedule)
    timed = simulate(schedule, chunk_costs(flags, schedule), flags.link)
    columns = zip(
        unit.busy, unit.idle, in_flight(schedule, Phase.B), in_flight(schedule), timed.busy, timed.idle, strict=True
    )
    table = Rows("stage", "busy ticks", "idle ticks", "in flight until B", "until W", "busy s", "idle s")
    for stage, figures in enumerate(columns):
        table.add_row(str(stage), *(f"{figure:g}" for figure in figures))
    console.print("Stages; in flight in chunks, seconds in lock-step (simulated)", style="italic")
    table.print(console)


def draw_all(flags: SchedulesFlags, shown: list[Schedule], baseline: Schedule, folder: Path, console: Console) -> None:
    least_bubble, least_peak = bubble_and_peak(baseline)
    for schedule in shown:
        bubble, peak = bubble_and_peak(schedule)
        title = f"{schedule.name}: {schedule.num_stages} stages, {schedule.num_microbatches} micro-batches"
        title += ", messages travel during a tick" * (schedule.send_latency == 2)
        subtitle = (
            f"with even ticks a bubble of {100 * bubble:.1f} % of the work ({ratio(bubble, least_bubble)} x 1F1B's), at"
            f" most {peak:g} activations in flight ({ratio(peak, least_peak)} x 1F1B's)"
        )
        picture = standalone(schedule_picture(schedule, title, subtitle, chunk_costs(flags, schedule)), title)
        write_output("--draw", str(folder / f"{schedule.name}.svg"), picture)
        console.print(f"wrote {folder / schedule.name}.svg", markup=False)
