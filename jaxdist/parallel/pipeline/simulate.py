"""Check a pipeline schedule, count the activations it holds, and simulate how long it takes; no JAX."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule

PLACEMENTS = ("loop", "v")
LONGEST = 1e9  # time, in any unit, of one action or message


def check_sizes(schedule: Schedule) -> None:
    for what, size in (
        ("stages", schedule.num_stages),
        ("micro-batches", schedule.num_microbatches),
        ("chunks", schedule.num_chunks),
    ):
        if size < 1:
            raise ConfigError(
                f"schedule {schedule.name!r} with {size} {what}", "there must be at least one", f"Use 1 or more {what}"
            )
    if schedule.placement not in PLACEMENTS:
        raise ConfigError(
            f"{schedule} with placement {schedule.placement!r}", "there is no placement of that name", "Use loop or v"
        )
    if schedule.placement == "v" and schedule.num_chunks != 2:
        raise ConfigError(
            f"{schedule} with placement v and {schedule.num_chunks} chunks",
            "a V must go down the stages with chunk 0 and back up with chunk 1",
            "Use 2 chunks, or placement loop",
        )
    if schedule.send_latency not in (1, 2):
        raise ConfigError(
            f"{schedule} with a send latency of {schedule.send_latency} ticks",
            "messages must be sent between two ticks (1) or during a tick (2)",
            "Use 1 or 2",
        )


def check_action(schedule: Schedule, where: str, action: Action) -> None:
    if not isinstance(action.phase, Phase):
        raise ConfigError(
            f"{where}: {action.phase!r}", "an action must have a phase", "Use Phase.F, Phase.B or Phase.W"
        )
    if action.phase not in schedule.phases:
        raise ConfigError(
            f"{where}: {action}", "must be in a schedule that recomputes", "Take it out, or set recompute"
        )
    for what, index, size in (
        ("micro-batch", action.microbatch, schedule.num_microbatches),
        ("chunk", action.chunk, schedule.num_chunks),
    ):
        if not 0 <= index < size:
            raise ConfigError(
                f"{where}: {action}",
                f"{what} must be 0 to {size - 1}, not {index}",
                f"Use 0 to {size - 1}, or a table made for these sizes",
            )


@lru_cache(maxsize=16)  # tables are simulated several times each
def validate(schedule: Schedule) -> None:
    """Check that every action of every micro-batch and part runs once, after all its inputs have arrived.

    Raises: ConfigError naming the first violation by tick, stage, micro-batch and chunk. Shape, ranges and duplicate
        actions are checked first, then missing actions, then the order.
    """
    check_sizes(schedule)
    done: dict[tuple[int, Action], int] = {}
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_stages:
            raise ConfigError(
                f"{schedule}, tick {tick}",
                f"the row must have {schedule.num_stages} entries, one for each stage, and has {len(row)}",
                "Write one entry a stage, None where it idles",
            )
        for stage, action in enumerate(row):
            if action is None:
                continue
            where = f"{schedule}, tick {tick}, stage {stage}"
            check_action(schedule, where, action)
            if (stage, action) in done:
                raise ConfigError(
                    f"{where}: {action}",
                    f"must run once, and has run at tick {done[stage, action]} already",
                    "Every action runs exactly once: take one of the two out",
                )
            done[stage, action] = tick
    for microbatch in range(schedule.num_microbatches):
        for phase in schedule.phases:
            for part in range(schedule.num_parts):
                stage, chunk = schedule.place(part)
                if (stage, action := Action(phase, microbatch, chunk)) not in done:
                    raise ConfigError(
                        f"{schedule}, stage {stage}",
                        f"{action} is missing: one of the ticks 0 to {schedule.num_ticks - 1} must run it",
                        "Every action runs exactly once: add it",
                    )
    for (stage, action), tick in done.items():
        for source, needed in schedule.inputs(stage, action):
            if tick < (earliest := schedule.earliest(stage, source, needed, done[source, needed])):
                raise ConfigError(
                    f"{schedule}, tick {tick}, stage {stage}: {action}",
                    f"must come after {needed} of stage {source}, which is there only after tick {earliest - 1}",
                    f"Run it at tick {earliest} or later",
                )
        if (
            schedule.fused_backward
            and action.phase == Phase.W
            and tick != (ready := done[stage, action._replace(phase=Phase.B)] + 1)
        ):
            raise ConfigError(
                f"{schedule}, tick {tick}, stage {stage}: {action}",
                f"with a fused backward W must follow its B at once, here at tick {ready}",
                f"Run it at tick {ready}, or do not call the backward fused",
            )


def held_chunks(schedule: Schedule, until: Phase = Phase.W) -> list[list[int]]:
    """[tick][stage]: (micro-batch, chunk) pairs whose F has begun and whose `until` (B or W) has not yet ended; with
    recompute whose R has begun, before which the input of the chunk alone is held.

    One chunk stands for the activations of 1/num_chunks of a stage's layers for one micro-batch.
    """
    if until not in (Phase.B, Phase.W):
        raise ConfigError(
            f"in flight until {until!r}", "activations must be held until B or W", "Use Phase.B or Phase.W"
        )
    held, now, begins = [], [0] * schedule.num_stages, Phase.R if schedule.recompute else Phase.F
    for row in schedule.table:
        for stage, action in enumerate(row):
            now[stage] += action is not None and action.phase == begins
        held.append(list(now))
        for stage, action in enumerate(row):
            now[stage] -= action is not None and action.phase == until
    return held


def in_flight(schedule: Schedule, until: Phase = Phase.W) -> list[int]:
    """The peak of `held_chunks` on every stage."""
    return [max(column) for column in zip(*held_chunks(schedule, until), strict=True)]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any other unit of time) that F, B, W and R of one chunk take on a stage; an R as long as an F, unless
    told otherwise."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weights: float = 1.0
    recompute: float | None = None

    def __post_init__(self):
        times = (self.forward, self.backward_input, self.backward_weights, self.again)
        if not (all(0 <= time <= LONGEST for time in times) and sum(times) > 0):
            raise ConfigError(
                f"a chunk whose F, B, W and R take {', '.join(map(str, times))}",
                f"times must be from 0 to {LONGEST:g}, and not all 0",
                "Use the seconds of one chunk for one micro-batch",
            )

    @property
    def again(self) -> float:
        return self.forward if self.recompute is None else self.recompute

    def of(self, action: Action | None) -> float:
        if action is None:
            return 0.0
        return (self.forward, self.backward_input, self.backward_weights, self.again)[action.phase - 1]


@dataclass(frozen=True, eq=False)
class Simulation:
    """When every entry of a table runs, in the unit of the costs; waiting for messages is idle time."""

    start: np.ndarray
    """[tick, stage]; an idle entry starts and ends at the same time."""
    end: np.ndarray

    @property
    def makespan(self) -> float:
        return float(self.end.max())

    @property
    def busy(self) -> list[float]:
        """Per stage."""
        return (self.end - self.start).sum(axis=0).tolist()

    @property
    def idle(self) -> list[float]:
        """Per stage, of the makespan."""
        return [self.makespan - busy for busy in self.busy]

    @property
    def idle_over_ideal(self) -> float:
        """The bubble as a share of the work: (S-1)/M for 1F1B with even stages."""
        return sum(self.idle) / sum(self.busy)

    @property
    def idle_share(self) -> float:
        """The bubble as a share of all time: (S-1)/(M+S-1) for 1F1B with even stages."""
        return sum(self.idle) / (sum(self.idle) + sum(self.busy))


def simulate(
    schedule: Schedule, costs: Costs | Sequence[Costs] = Costs(), link: float = 0.0, waiting: str = "ticks"
) -> Simulation:
    """When every action runs, for the `costs` of one chunk (of all stages, or one per stage) and a message of `link`.

    waiting "ticks" is lock-step: after every tick each stage exchanges messages with both its neighbours on the ring,
        and starts the next tick when its own action and both messages are done. The executor does the same, but skips
        the messages of ticks at which no stage receives any, so it is never slower. With send_latency 2 a stage
        exchanges the results of the previous tick while it computes: a tick ends when both are done.
    waiting "pairs" is lock-step of those alone that a message connects: a permute holds up its sender and its receiver
        until both are there, and nobody else, as on GPUs. With send_latency 2 there is one on every link at every tick,
        so this is "ticks".
    waiting "dependencies" is the textbook: an action starts when its stage is free and its inputs have arrived; a
        message to another stage takes `link` and occupies no stage.

    Raises: ConfigError as `validate`, and for costs of another number of stages, or a wrong `link` or `waiting`.
    """
    validate(schedule)
    num_stages = schedule.num_stages
    by_stage = [costs] * num_stages if isinstance(costs, Costs) else list(costs)
    if len(by_stage) != num_stages:
        raise ConfigError(
            f"{schedule} with the costs of {len(by_stage)} stages", "each stage must have one", f"Give {num_stages}"
        )
    if not 0 <= link <= LONGEST:
        raise ConfigError(f"a link of {link} seconds", f"a message must take from 0 to {LONGEST:g}", "Use 0 or more")
    if waiting not in ("ticks", "pairs", "dependencies"):
        raise ConfigError(f"waiting {waiting!r}", "there is no such way", "Use ticks, pairs or dependencies")

    start = np.zeros((schedule.num_ticks, num_stages))
    end = np.zeros_like(start)
    partners = _partners(schedule) if waiting == "pairs" and schedule.send_latency == 1 else None
    finished: dict[tuple[int, Action], float] = {}
    for tick, row in enumerate(schedule.table):
        for stage, action in enumerate(row):
            arrivals = [0.0]
            if tick > 0:
                arrivals.append(end[tick - 1, stage])
            if tick > 0 and waiting != "dependencies":
                neighbours = {(stage - 1) % num_stages, (stage + 1) % num_stages} - {stage}
                if partners is not None:
                    neighbours = partners[tick - 1][stage]
                if schedule.send_latency == 1:
                    arrivals += [end[tick - 1, neighbour] + link for neighbour in neighbours]
                elif neighbours:
                    arrivals += [start[tick - 1, one] + link for one in (stage, *neighbours)]
            if action is not None and waiting == "dependencies":
                for source, needed in schedule.inputs(stage, action):
                    # A fused backward sends the result of its B; with send_latency 2 during its W.
                    early = schedule.send_latency == 2 and needed.phase == Phase.W
                    made = needed._replace(phase=Phase.B) if early else needed
                    arrivals.append(finished[source, made] + (link if source != stage else 0.0))
            start[tick, stage] = max(arrivals)
            end[tick, stage] = start[tick, stage] + by_stage[stage].of(action)
            if action is not None:
                finished[stage, action] = end[tick, stage]
    return Simulation(start, end)


def _partners(schedule: Schedule) -> list[list[set[int]]]:
    """[tick][stage]: the stages that it sends to or receives from after the tick."""
    found: list[list[set[int]]] = [[set() for _ in range(schedule.num_stages)] for _ in schedule.table]
    for tick, row in enumerate(schedule.table):
        for stage, action in enumerate(row):
            if action is None or action.phase not in (Phase.F, Phase.B):
                continue
            part = schedule.part(stage, action.chunk) + (1 if action.phase == Phase.F else -1)
            if 0 <= part < schedule.num_parts and (other := schedule.place(part)[0]) != stage:
                found[tick][stage].add(other)
                found[tick][other].add(stage)
    return found
