"""Pipeline schedules as data: a table of ticks x stages that says which action a stage runs at which tick.

No JAX here. A schedule is made (`make_schedule`, `from_orders`, `parse`), checked (`validate`), measured (`in_flight`,
`simulate`) and drawn (`draw`) as plain data; the executor of `jaxdist.parallel.pipeline.executor` runs any table that
passes.

The model is cut in S*v *parts* in model order: S stages hold v chunks of layers each. An action F (forward), B (input
gradient) or W (weight gradient) of one micro-batch and one chunk takes one tick. What it makes at tick t can be used by
a later action of the same stage from tick t+1 on, and by a neighbour from tick t+hop on. hop is 1 where messages travel
between two ticks, and 2 where they travel during one, while stages compute:

    F of part p needs F of part p-1 of the same micro-batch
    B of part p needs its own F, and B of part p+1 (with `fused_backward`: W of part p+1)
    W of part p needs its own B (with `fused_backward`: at the very next tick)
"""

import collections
import dataclasses
import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file

KINDS = ("F", "B", "W")
PLACEMENTS = ("loop", "v")


class Action(NamedTuple):
    """One tick of work: "F" forward, "B" input gradient or "W" weight gradient of one chunk for one micro-batch."""

    kind: str
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """Who does what when. Not checked by itself: see `validate`.

    `placement` says which part of the model chunk c of stage s is. "loop": c*S + s. "v" (two chunks): chunk 0 goes down
    the stages, chunk 1 comes back up: s, then 2S-1-s, so that stage 0 holds both ends.
    `table[tick][stage]` is an action, or None where the stage idles.
    `fused_backward` marks the textbook schedules, whose backward is one thing: W follows its B at once and the upstream
    stage waits for both. `hop` is 1 or 2: ticks after which another stage can use a result.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    placement: str
    table: tuple[tuple[Action | None, ...], ...]
    fused_backward: bool = False
    hop: int = 1

    @property
    def num_ticks(self) -> int:
        return len(self.table)

    @property
    def num_parts(self) -> int:
        return self.num_stages * self.num_chunks

    def part(self, stage: int, chunk: int) -> int:
        """Which part of the model, in model order, is this chunk of this stage."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """(stage, chunk) that holds a part: the inverse of `part`."""
        chunk, stage = divmod(part, self.num_stages)
        return (self.num_stages - 1 - stage if self.placement == "v" and chunk == 1 else stage), chunk

    def __str__(self) -> str:
        return f"schedule {self.name!r} ({self.num_stages} stages, {self.num_microbatches} micro-batches)"


# ---------------------------------------------------------------------------------------------------------- checking


def _inputs(schedule: Schedule, stage: int, action: Action) -> list[tuple[int, Action]]:
    """What an action waits for: (stage, action) pairs."""
    kind, microbatch, chunk = action
    part = schedule.part(stage, chunk)
    inputs = []
    if kind == "F" and part > 0:
        source, source_chunk = schedule.place(part - 1)
        inputs.append((source, Action("F", microbatch, source_chunk)))
    if kind == "B":
        inputs.append((stage, Action("F", microbatch, chunk)))
        if part < schedule.num_parts - 1:
            source, source_chunk = schedule.place(part + 1)
            inputs.append((source, Action("W" if schedule.fused_backward else "B", microbatch, source_chunk)))
    if kind == "W":
        inputs.append((stage, Action("B", microbatch, chunk)))
    return inputs


def _earliest(schedule: Schedule, stage: int, source: int, needed: Action, tick: int) -> int:
    """The first tick at which `stage` can use what `source` did at `tick`."""
    if source == stage:
        return tick + 1
    # What travels of a fused backward is made by its B, a tick before its W.
    return tick + max(1, schedule.hop - (needed.kind == "W"))


def _check_sizes(schedule: Schedule) -> None:
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
            "a V goes down the stages with chunk 0 and back up with chunk 1",
            "Use 2 chunks, or placement loop",
        )
    if schedule.hop not in (1, 2):
        raise ConfigError(
            f"{schedule} with hop {schedule.hop}", "a message travels between two ticks or during one", "Use 1 or 2"
        )


def _check_action(schedule: Schedule, where: str, action: Action) -> None:
    if action.kind not in KINDS:
        raise ConfigError(f"{where}: {action}", "unknown kind of action", "Use F, B or W")
    for what, index, size in (
        ("micro-batch", action.microbatch, schedule.num_microbatches),
        ("chunk", action.chunk, schedule.num_chunks),
    ):
        if not 0 <= index < size:
            raise ConfigError(
                f"{where}: {action}",
                f"{what} {index} is out of range, the schedule has {size}",
                f"Use 0 to {size - 1}, or a table made for these sizes",
            )


def validate(schedule: Schedule) -> None:
    """Check that every F, B and W of every micro-batch and part is there once, after all that it needs.

    Raises: ConfigError naming the first violation by tick, stage, micro-batch and chunk. Shape, ranges and doubled
        actions are looked for first, then missing actions, then the order.
    """
    _check_sizes(schedule)
    done: dict[tuple[int, Action], int] = {}
    for tick, row in enumerate(schedule.table):
        if len(row) != schedule.num_stages:
            raise ConfigError(
                f"{schedule}, tick {tick}",
                f"the row has {len(row)} entries, and there are {schedule.num_stages} stages",
                "Write one entry a stage, None where it idles",
            )
        for stage, action in enumerate(row):
            if action is None:
                continue
            where = f"{schedule}, tick {tick}, stage {stage}"
            _check_action(schedule, where, action)
            if (stage, action) in done:
                raise ConfigError(
                    f"{where}: {action}",
                    f"the stage has already run it at tick {done[stage, action]}",
                    "Every action runs exactly once: take one of the two out",
                )
            done[stage, action] = tick
    for microbatch in range(schedule.num_microbatches):
        for kind in KINDS:
            for part in range(schedule.num_parts):
                stage, chunk = schedule.place(part)
                if (stage, action := Action(kind, microbatch, chunk)) not in done:
                    raise ConfigError(
                        f"{schedule}, stage {stage}",
                        f"{action} is missing: none of the ticks 0 to {schedule.num_ticks - 1} runs it",
                        "Every action runs exactly once: add it",
                    )
    for (stage, action), tick in done.items():
        for source, needed in _inputs(schedule, stage, action):
            if tick < (earliest := _earliest(schedule, stage, source, needed, done[source, needed])):
                raise ConfigError(
                    f"{schedule}, tick {tick}, stage {stage}: {action}",
                    f"it needs {needed} of stage {source}, which is there only after tick {earliest - 1}",
                    f"Run it at tick {earliest} or later",
                )
        if (
            schedule.fused_backward
            and action.kind == "W"
            and tick != (ready := done[stage, action._replace(kind="B")] + 1)
        ):
            raise ConfigError(
                f"{schedule}, tick {tick}, stage {stage}: {action}",
                f"with a fused backward W follows its B at once, here at tick {ready}",
                f"Run it at tick {ready}, or do not call the backward fused",
            )


def from_orders(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int,
    placement: str,
    orders: Sequence[Sequence[Action]],
    fused_backward: bool = False,
    hop: int = 1,
) -> Schedule:
    """The schedule in which every stage runs its actions in the given order, each as soon as it can.

    Raises: ConfigError as `validate`; and where the orders deadlock, naming the tick and what each stage waits for.
    """
    empty = Schedule(name, num_stages, num_microbatches, num_chunks, placement, (), fused_backward, hop)
    _check_sizes(empty)
    if len(orders) != num_stages:
        raise ConfigError(f"{empty} from {len(orders)} orders", "each stage has one order", f"Give {num_stages}")
    for stage, order in enumerate(orders):
        for position, action in enumerate(order):
            _check_action(empty, f"{empty}, stage {stage}, position {position} of its order", action)

    table: list[tuple[Action | None, ...]] = []
    done: dict[tuple[int, Action], int] = {}
    position = [0] * num_stages
    while any(position[stage] < len(orders[stage]) for stage in range(num_stages)):
        row: list[Action | None] = [None] * num_stages
        waits = []
        for stage, order in enumerate(orders):
            if position[stage] == len(order):
                continue
            action = order[position[stage]]
            missing = [
                (source, needed)
                for source, needed in _inputs(empty, stage, action)
                if _earliest(empty, stage, source, needed, done.get((source, needed), math.inf)) > len(table)
            ]
            if missing:
                source, needed = missing[0]
                waits.append(f"stage {stage} with {action} waits for {needed} of stage {source}")
            else:
                row[stage] = action
        if not any(row) and len(table) >= max(done.values(), default=-1) + hop:  # nothing is on its way
            raise ConfigError(
                f"{empty}, tick {len(table)}: deadlock",
                f"no stage can run its next action: {'; '.join(waits)}",
                "Move what is waited for to an earlier place in its stage's order",
            )
        for stage, action in enumerate(row):
            if action is not None:
                done[stage, action] = len(table)
                position[stage] += 1
        table.append(tuple(row))
    schedule = dataclasses.replace(empty, table=tuple(table))
    validate(schedule)
    return schedule


# ------------------------------------------------------------------------------------------------------------ making


class Recipe(NamedTuple):
    """A named schedule before its ticks are known: the order of actions of every stage, and how they are laid out.

    limit None: `from_orders` of whole orders. Else `_fill`, from orders of F and B alone, with at most so many chunks
    in flight on a stage.
    """

    name: str
    num_chunks: int
    placement: str
    orders: list[list[Action]]
    fused_backward: bool = False
    limit: int | None = None
    run_ahead: bool = False


def _gpipe(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """All forwards, then all backwards. Source: GPipe, arXiv 1811.06965."""
    order = [Action("F", m, 0) for m in range(num_microbatches)]
    order += [Action(kind, m, 0) for m in range(num_microbatches) for kind in "BW"]
    return Recipe("gpipe", 1, "loop", [order] * num_stages, fused_backward=True)


def _one_f_one_b(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """Warm-up of S-1-s forwards, then one forward one backward. Source: arXiv 2104.04473 section 2.2.1.

    With hop 2 a warm-up of 2(S-1-s), and one tick more for each of S-1 stages: eager 1F1B, arXiv 2211.05322 section 4.
    """
    return _interleave("1f1b", num_stages, num_microbatches, 1, hop)


def _interleaved(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """1F1B over v chunks a stage, S micro-batches of a chunk at a time. Source: arXiv 2104.04473 section 2.2.2.

    Megatron-LM asks for M a multiple of S. For another M this is the schedule of the next multiple without the actions
    of the micro-batches that do not exist, each of the others as soon as it can.
    """
    return _interleave("interleaved", num_stages, num_microbatches, num_chunks, hop)


def _interleave(name: str, num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    orders = _interleaved_orders(num_stages, num_microbatches, num_chunks, hop)
    runs = {action: [action] for action in orders[0]}  # the same actions on every stage
    runs |= {action: [action, action._replace(kind="W")] for action in orders[0] if action.kind == "B"}
    orders = [[after for action in order for after in runs[action]] for order in orders]
    return Recipe(name, num_chunks, "loop", orders, fused_backward=True)


def _interleaved_orders(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> list[list[Action]]:
    """The F and B of every stage in order: warm-up, one forward one backward, cool-down."""
    group = num_stages * num_chunks  # actions before chunk 0 has its turn again
    num_actions = -(-num_microbatches // num_stages) * group

    def nth(kind: str, n: int) -> Action:
        chunk = n % group // num_stages
        microbatch = n // group * num_stages + n % num_stages
        return Action(kind, microbatch, chunk if kind == "F" else num_chunks - 1 - chunk)

    forwards, backwards = ([nth(kind, n) for n in range(num_actions)] for kind in "FB")
    orders = []
    for stage in range(num_stages):
        below = num_stages - 1 - stage
        # With chunks twice as deep: a forward goes round the ring and back before its backward can start. That is deep
        # enough where messages take a tick of their own, too; without chunks it takes as much (eager 1F1B).
        warm_up = hop * below if num_chunks == 1 else 2 * below + (num_chunks - 1) * num_stages
        warm_up = min(warm_up, num_actions)
        order = forwards[:warm_up]
        for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
            order += [backward] if forward is None else [forward, backward]
        orders.append([action for action in order if action.microbatch < num_microbatches])
    return orders


def _zb_h1(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """The order of 1F1B with every W put off to where the stage would idle, in the memory of 1F1B's first stage.

    For M >= S: 3M + S-1 ticks, a third of 1F1B's bubble, and min(M, S) activations in flight. No schedule with that
    memory is shorter: the first B reaches stage 0 at tick 2S-1, before which only S forwards fit. With hop 2 the order
    and memory of eager 1F1B, at most 2S-1 in flight.
    Source: ZB-H1, arXiv 2401.10241 section 4.1.
    """
    orders = _interleaved_orders(num_stages, num_microbatches, 1, hop)
    limit = min(num_microbatches, hop * (num_stages - 1) + 1)
    return Recipe("zb-h1", 1, "loop", orders, limit=limit)


def _zb_v(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """A V with 1F1B's memory and no bubble: at most 2S chunks in flight.

    6M + S-1 ticks for M >= S, the least a pipeline can take; for M >= 2S no stage idles between its first action and
    its last. Source: ZB-V, arXiv 2401.10241 section 6; its repeated block, arXiv 2405.15362.
    """
    orders = _v_orders(num_stages, num_microbatches, steps=(1, 5, 1, 5))
    return Recipe("zb-v", 2, "v", orders, limit=2 * num_stages, run_ahead=True)


def _v_half(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """A V with half of 1F1B's memory: S+1 chunks in flight for odd S, S+2 for even, where 1F1B holds 2S.

    Bubble 3(S-1) - 1 ticks for S > 2 and M > S/2, where 1F1B's is 6(S-1). Source: V-Half, arXiv 2405.15362.
    """
    orders = _v_orders(num_stages, num_microbatches, steps=(hop, 2, hop, 2))
    return Recipe("v-half", 2, "v", orders, limit=2 * (num_stages // 2 + 1))


def _v_min(num_stages: int, num_microbatches: int, num_chunks: int, hop: int) -> Recipe:
    """A V with a third of 1F1B's memory: 2 ceil((S+2)/3) chunks in flight, where 1F1B holds 2S.

    Bubble 4(S-1) - 1 ticks, or 4(S-1) + 1 where 3 divides S; 1F1B's is 6(S-1). Source: V-Min, arXiv 2405.15362.
    """
    orders = _v_orders(num_stages, num_microbatches, steps=(hop,) * 4)
    return Recipe("v-min", 2, "v", orders, limit=2 * -(-(num_stages + 2) // 3))


def _v_orders(num_stages: int, num_microbatches: int, steps: tuple[int, int, int, int]) -> list[list[Action]]:
    """The F and B of every stage, in the order of a block of ticks that is repeated every 6 for each micro-batch.

    The block is the way of one micro-batch: down the V and up it again forward, down and up it backward, `steps` ticks
    from stage to stage on each of the four ways. How long it stays on a stage, over 6, is what the stage holds.
    Source: arXiv 2405.15362 section 3. The pauses where the V turns are the shortest with which no stage has two
    actions at a time.
    """
    last = num_stages - 1

    def block(turns: tuple[int, int, int]) -> list[list[int]]:
        """[way][stage]: tick of each action of micro-batch 0."""
        down = [steps[0] * stage for stage in range(num_stages)]
        up = [down[last] + turns[0] + steps[1] * (last - stage) for stage in range(num_stages)]
        back_down = [up[0] + turns[1] + steps[2] * stage for stage in range(num_stages)]
        back_up = [back_down[last] + turns[2] + steps[3] * (last - stage) for stage in range(num_stages)]
        return [down, up, back_down, back_up]

    pauses = sorted(itertools.product(range(1, 7), repeat=3), key=lambda turns: (sum(turns), turns))
    blocks = (block(turns) for turns in pauses)
    ways = next(
        ways for ways in blocks if all(len({tick % 6 for tick in ticks}) == 4 for ticks in zip(*ways, strict=True))
    )
    orders = []
    for stage in range(num_stages):
        timed = [
            (ways[way][stage] + 6 * microbatch, Action(kind, microbatch, chunk))
            for microbatch in range(num_microbatches)
            for way, (kind, chunk) in enumerate((("F", 0), ("F", 1), ("B", 1), ("B", 0)))
        ]
        orders.append([action for _, action in sorted(timed)])
    return orders


def _fill(
    name: str,
    num_microbatches: int,
    num_chunks: int,
    placement: str,
    orders: list[list[Action]],
    limit: int,
    run_ahead: bool,
    hop: int,
) -> Schedule:
    """The schedule that runs F and B in the given orders, each as soon as it can, and a W where none of them can run.

    A stage with `limit` chunks in flight runs the Ws it owes before another F, so an order that needs more than the
    limit takes more and never deadlocks. `run_ahead`: a stage that would still idle runs its next chunk-0 forward
    early, if that leaves room for a chunk 1.
    """
    num_stages = len(orders)
    empty = Schedule(name, num_stages, num_microbatches, num_chunks, placement, (), hop=hop)
    # The tick after which each action's result is there, and what each stage still has to do.
    done: dict[tuple[int, Action], int] = {}
    position = [0] * num_stages
    forwards = [0] * num_stages  # of chunk 0
    owed: list[collections.deque[Action]] = [collections.deque() for _ in range(num_stages)]
    held = [0] * num_stages

    def ready(stage: int, action: Action) -> bool:
        return all(
            _earliest(empty, stage, *needed, done.get(needed, tick)) <= tick for needed in _inputs(empty, stage, action)
        )

    def choose(stage: int) -> Action | None:
        order = orders[stage]
        while position[stage] < len(order) and (stage, order[position[stage]]) in done:
            position[stage] += 1
        if position[stage] < len(order):
            action = order[position[stage]]
            full = action.kind == "F" and held[stage] >= limit and owed[stage]
            if not full and ready(stage, action):
                return action
        if owed[stage]:
            return owed[stage][0]
        early = Action("F", forwards[stage], 0)
        if run_ahead and early.microbatch < num_microbatches and held[stage] < limit - 1 and ready(stage, early):
            return early
        return None

    table: list[tuple[Action | None, ...]] = []
    while len(done) < 3 * num_microbatches * empty.num_parts:
        tick = len(table)
        table.append(tuple(choose(stage) for stage in range(num_stages)))
        for stage, action in enumerate(table[tick]):
            if action is None:
                continue
            done[stage, action] = tick
            if action.kind == "F":
                held[stage] += 1
                forwards[stage] += action.chunk == 0
            elif action.kind == "B":
                owed[stage].append(action._replace(kind="W"))
            else:
                owed[stage].popleft()
                held[stage] -= 1
    schedule = dataclasses.replace(empty, table=tuple(table))
    validate(schedule)
    return schedule


class _Kind(NamedTuple):
    """One row of the table of schedules."""

    make: Callable[[int, int, int, int], Recipe]
    placement: str
    chunks: int
    any_chunks: bool


SCHEDULES = {
    "gpipe": _Kind(_gpipe, "loop", 1, False),
    "1f1b": _Kind(_one_f_one_b, "loop", 1, False),
    "interleaved": _Kind(_interleaved, "loop", 2, True),
    "zb-h1": _Kind(_zb_h1, "loop", 1, False),
    "zb-v": _Kind(_zb_v, "v", 2, False),
    "v-half": _Kind(_v_half, "v", 2, False),
    "v-min": _Kind(_v_min, "v", 2, False),
}
NAMES = tuple(SCHEDULES)


def _kind(name: str) -> _Kind:
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r}", "there is no schedule of that name", f"Use one of {', '.join(NAMES)}")
    return SCHEDULES[name]


def default_chunks(name: str) -> int:
    """Chunks a stage holds unless told otherwise."""
    return _kind(name).chunks


def placement_of(name: str) -> str:
    """ "loop" or "v"."""
    return _kind(name).placement


LONGEST = 1e9  # of whatever unit, that one action or message takes
MOST_CELLS = 2**17  # stages x micro-batches x chunks; 64 stages, 512 micro-batches and 2 chunks are half of it


def make_schedule(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None, hop: int = 1
) -> Schedule:
    """One of `NAMES` for S stages and M micro-batches, checked. `num_chunks` None is the schedule's own default.

    Raises: ConfigError for an unknown name, sizes below 1, chunks that the schedule cannot have and a hop of neither
        1 nor 2.
    """
    made = recipe(name, num_stages, num_microbatches, num_chunks, hop)
    sizes = (num_stages, num_microbatches, made.num_chunks, made.placement, made.orders)
    if made.limit is None:
        return from_orders(name, *sizes, fused_backward=made.fused_backward, hop=hop)
    return _fill(name, num_microbatches, *sizes[2:], limit=made.limit, run_ahead=made.run_ahead, hop=hop)


def recipe(name: str, num_stages: int, num_microbatches: int, num_chunks: int | None = None, hop: int = 1) -> Recipe:
    """What `make_schedule` makes its table from; raises as it does."""
    kind = _kind(name)
    num_chunks = kind.chunks if num_chunks is None else num_chunks
    if num_chunks != kind.chunks and not kind.any_chunks:
        raise ConfigError(
            f"schedule {name!r} with {num_chunks} chunks a stage",
            f"it is made for {kind.chunks}",
            f"Use {kind.chunks}, or schedule interleaved",
        )
    _check_sizes(Schedule(name, num_stages, num_microbatches, num_chunks, kind.placement, (), hop=hop))
    if (size := num_stages * num_microbatches * num_chunks) > MOST_CELLS:
        raise ConfigError(
            f"{num_stages} stages x {num_microbatches} micro-batches x {num_chunks} chunks",
            f"a table is made one action at a time, for at most {MOST_CELLS:,} together, and this is {size:,}",
            "Use fewer micro-batches, and accumulate more of them",
        )
    return kind.make(num_stages, num_microbatches, num_chunks, hop)


# --------------------------------------------------------------------------------------------------------- measuring


def held_chunks(schedule: Schedule, until: str = "W") -> list[list[int]]:
    """[tick][stage]: (micro-batch, chunk) pairs whose F has begun and whose `until` ("B" or "W") has not yet ended.

    In chunks: one is the activations of 1/num_chunks of a stage's layers for one micro-batch.
    """
    if until not in ("B", "W"):
        raise ConfigError(f"what is in flight until {until!r}", "activations are held until B or W", "Use B or W")
    held, now = [], [0] * schedule.num_stages
    for row in schedule.table:
        for stage, action in enumerate(row):
            now[stage] += action is not None and action.kind == "F"
        held.append(list(now))
        for stage, action in enumerate(row):
            now[stage] -= action is not None and action.kind == until
    return held


def in_flight(schedule: Schedule, until: str = "W") -> list[int]:
    """The peak of `held_chunks` on every stage."""
    return [max(column) for column in zip(*held_chunks(schedule, until), strict=True)]


@dataclass(frozen=True)
class Costs:
    """Seconds (or any other unit of time) that F, B and W of one chunk take on a stage."""

    forward: float = 1.0
    backward_input: float = 1.0
    backward_weights: float = 1.0

    def __post_init__(self):
        times = (self.forward, self.backward_input, self.backward_weights)
        if not (all(0 <= time <= LONGEST for time in times) and sum(times) > 0):
            raise ConfigError(
                f"a chunk whose F, B and W take {', '.join(map(str, times))}",
                f"times are from 0 to {LONGEST:g}, and not all 0",
                "Use the seconds of one chunk for one micro-batch",
            )

    def of(self, action: Action | None) -> float:
        if action is None:
            return 0.0
        return {"F": self.forward, "B": self.backward_input, "W": self.backward_weights}[action.kind]


@dataclass(frozen=True, eq=False)
class Simulation:
    """When every entry of a table runs, in the unit of the costs. Time spent waiting for messages counts as idle."""

    start: np.ndarray
    """[tick, stage]; an idle entry starts and ends where the stage is by then."""
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
        """The bubble as a part of the work: (S-1)/M for 1F1B with even stages."""
        return sum(self.idle) / sum(self.busy)

    @property
    def idle_share(self) -> float:
        """The bubble as a part of all time: (S-1)/(M+S-1) for 1F1B with even stages."""
        return sum(self.idle) / (sum(self.idle) + sum(self.busy))


def simulate(
    schedule: Schedule, costs: Costs | Sequence[Costs] = Costs(), link: float = 0.0, waiting: str = "ticks"
) -> Simulation:
    """When every action runs, if one chunk costs `costs` (for all stages, or one a stage) and a message takes `link`.

    `waiting` "ticks" is lock-step: after every tick each stage exchanges messages with both its neighbours on the ring,
    and starts the next when its own tick and both messages are done. Our executor is never slower: it does so, but
    leaves out the messages of ticks at which no stage receives any.
    With hop 2 the messages of a tick are those of the one before, exchanged while stages compute: a tick begins for a
    stage when its own last one is done, computing and exchanging.
    "dependencies" is the textbook: an action starts when its stage is free and what it needs has arrived; messages
    between different stages take `link` and keep no stage busy.

    Raises: ConfigError as `validate`, and for costs of another number of stages, a bad link or way of waiting.
    """
    validate(schedule)
    num_stages = schedule.num_stages
    by_stage = [costs] * num_stages if isinstance(costs, Costs) else list(costs)
    if len(by_stage) != num_stages:
        raise ConfigError(
            f"{schedule} with the costs of {len(by_stage)} stages", "each stage has one", f"Give {num_stages}"
        )
    if not 0 <= link <= LONGEST:
        raise ConfigError(f"a link of {link} seconds", f"a message takes from 0 to {LONGEST:g}", "Use 0 or more")
    if waiting not in ("ticks", "dependencies"):
        raise ConfigError(f"waiting {waiting!r}", "there is no such way", "Use ticks or dependencies")

    start = np.zeros((schedule.num_ticks, num_stages))
    end = np.zeros_like(start)
    finished: dict[tuple[int, Action], float] = {}
    for tick, row in enumerate(schedule.table):
        for stage, action in enumerate(row):
            arrivals = [0.0]
            if tick > 0:
                arrivals.append(end[tick - 1, stage])
            if tick > 0 and waiting == "ticks":
                neighbours = {(stage - 1) % num_stages, (stage + 1) % num_stages} - {stage}
                if schedule.hop == 1:
                    arrivals += [end[tick - 1, neighbour] + link for neighbour in neighbours]
                elif neighbours:
                    arrivals += [start[tick - 1, one] + link for one in (stage, *neighbours)]
            if action is not None and waiting == "dependencies":
                for source, needed in _inputs(schedule, stage, action):
                    # What travels of a fused backward is its B's; with hop 2 it does so during the W.
                    made = needed._replace(kind="B") if schedule.hop == 2 and needed.kind == "W" else needed
                    arrivals.append(finished[source, made] + (link if source != stage else 0.0))
            start[tick, stage] = max(arrivals)
            end[tick, stage] = start[tick, stage] + by_stage[stage].of(action)
            if action is not None:
                finished[stage, action] = end[tick, stage]
    return Simulation(start, end)


# -------------------------------------------------------------------------------------------------------------- text


def draw(schedule: Schedule) -> str:
    """The table as text that `parse` reads: a header, then one line a stage and one cell a tick.

    F3 is F of micro-batch 3 in chunk 0, f3 the same in chunk 1, F3:2 in chunk 2; a point is an idle tick.
    """
    cells = [[_cell(row[stage]) for row in schedule.table] for stage in range(schedule.num_stages)]
    width = max((len(cell) for line in cells for cell in line), default=1)
    labels = [f"{stage}:" for stage in range(schedule.num_stages)]
    margin = max(map(len, labels))
    ruler = "#"
    for tick in range(0, schedule.num_ticks, 10):
        ruler = ruler.ljust(margin + 1 + tick * (width + 1)) + str(tick)
    header = (
        f"name={'-'.join(schedule.name.split())} placement={schedule.placement} stages={schedule.num_stages}"
        f" chunks={schedule.num_chunks} microbatches={schedule.num_microbatches}"
        f" fused={'yes' if schedule.fused_backward else 'no'}" + f" hop={schedule.hop}" * (schedule.hop > 1)
    )
    lines = [
        f"{label.ljust(margin)} {' '.join(cell.ljust(width) for cell in line)}"
        for label, line in zip(labels, cells, strict=True)
    ]
    return "\n".join(line.rstrip() for line in [header, ruler, *lines]) + "\n"


def _cell(action: Action | None) -> str:
    if action is None:
        return "."
    kind, microbatch, chunk = action
    return (
        f"{kind}{microbatch}"
        if chunk == 0
        else f"{kind.lower()}{microbatch}"
        if chunk == 1
        else f"{kind}{microbatch}:{chunk}"
    )


_HEADER_KEYS = ("name", "placement", "stages", "chunks", "microbatches", "fused", "hop")


def parse(text: str, source: str = "table") -> Schedule:
    """The schedule written in `text`, checked. `source` names it in messages, and in the schedule without a name.

    One line a stage, cells between blanks as `draw` writes them (F3:0 and F3:1 are understood too), shorter lines idle
    at the end. A line may begin with its stage's number and a colon; what follows a # is left out. Words like
    placement=v on lines of their own set what cannot be seen in the cells; by default placement=loop, fused=no, hop=1,
    and as many chunks and micro-batches as the cells name.

    Raises: ConfigError naming the line and cell that cannot be read, and as `validate`.
    """
    header: dict[str, str] = {}
    lines: list[list[Action | None]] = []
    for number, line in enumerate(text.splitlines(), 1):
        where = f"{source}, line {number}"
        words = line.split("#")[0].split()
        if not words:
            continue
        if "=" in words[0]:
            header |= _parse_header(words, where)
            continue
        if words[0].endswith(":"):
            label = words.pop(0)
            if label != f"{len(lines)}:":
                raise ConfigError(f"{where}: {label!r}", f"here comes stage {len(lines)}", "Write the stages in order")
        lines.append(
            [_parse_cell(word, f"{where}, tick {tick}, stage {len(lines)}") for tick, word in enumerate(words)]
        )
    actions = [action for line in lines for action in line if action is not None]
    if not actions:
        raise ConfigError(source, "it has no actions", "Write one line a stage, as in `F0 F1 B0 W0 B1 W1`")
    num_stages = _header_size(header, "stages", len(lines), source)
    if num_stages != len(lines):
        raise ConfigError(f"{source} with stages={num_stages}", f"it has {len(lines)} lines", "Write one line a stage")
    num_ticks = max(map(len, lines))
    schedule = Schedule(
        name=header.get("name", source),
        num_stages=num_stages,
        num_microbatches=_header_size(header, "microbatches", 1 + max(a.microbatch for a in actions), source),
        num_chunks=_header_size(header, "chunks", 1 + max(a.chunk for a in actions), source),
        placement=header.get("placement", "loop"),
        table=tuple(zip(*(line + [None] * (num_ticks - len(line)) for line in lines), strict=True)),
        fused_backward=header.get("fused", "no") == "yes",
        hop=_header_size(header, "hop", 1, source),
    )
    validate(schedule)
    return schedule


def load(path: str | Path) -> Schedule:
    """`parse` of a file. Raises: ConfigError, also where it cannot be read."""
    return parse(read_text_file("schedule file", path), source=Path(path).name)


def _parse_header(words: list[str], where: str) -> dict[str, str]:
    header = {}
    for word in words:
        key, equals, value = word.partition("=")
        known = equals and key in _HEADER_KEYS and re.fullmatch(r"[\w.-]+", value, re.ASCII)
        if not known or (key == "fused" and value not in ("yes", "no")):
            raise ConfigError(
                f"{where}: {word!r}",
                f"a header holds {', '.join(_HEADER_KEYS)}, each a word of letters, digits, points and dashes",
                "Write them as in placement=v fused=no",
            )
        header[key] = value
    return header


def _header_size(header: dict[str, str], key: str, seen: int, source: str) -> int:
    value = header.get(key, str(seen))
    if not re.fullmatch(r"\d{1,9}", value, re.ASCII):
        raise ConfigError(f"{source}: {key}={value}", "it is a count", f"Write {key}={seen}")
    return int(value)


def _parse_cell(word: str, where: str) -> Action | None:
    if word == ".":
        return None
    match = re.fullmatch(r"([FBW])(\d{1,9})(?::(\d{1,9}))?|([fbw])(\d{1,9})", word, re.ASCII)
    if match is None:
        raise ConfigError(
            f"{where}: {word!r}",
            "a cell is F, B or W with a micro-batch, small letters for chunk 1, or a point where the stage idles",
            "Write F3, f3, F3:2 or .",
        )
    kind, microbatch, chunk, small, small_microbatch = match.groups()
    return Action(small.upper(), int(small_microbatch), 1) if small else Action(kind, int(microbatch), int(chunk or 0))


# ------------------------------------------------------------------------------------------------------------ layers


@cache
def divide_layers(num_layers: int, num_parts: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of every part in model order, with the least cost of the part that costs most.

    The first part also costs `first` layers (embedding) and the last also `last` (head and loss). Every part has a
    layer; of parts that cost the same, those in the middle have more.

    Raises: ConfigError for fewer layers than parts, and for extra costs that are negative or not finite.
    """
    asked = f"{num_layers} layers over {num_parts} parts"
    if num_parts < 1 or num_layers < num_parts:
        raise ConfigError(
            asked, "there is a part, and every part holds a layer", f"Use 1 to {max(num_layers, 1)} parts"
        )
    if not all(math.isfinite(extra) and extra >= 0 for extra in (first, last)):
        raise ConfigError(
            f"{asked}, first +{first}, last +{last}", "extra costs are finite, not below 0", "Use 0 or more"
        )
    cost = [1.0] * num_parts
    cost[0] += first
    cost[-1] += last
    layers = [1] * num_parts
    for _ in range(num_layers - num_parts):
        # One layer at a time to the cheapest part never makes the dearest part dearer than it must be.
        part = min(range(num_parts), key=lambda p: (cost[p], -min(p, num_parts - 1 - p), -p))
        layers[part] += 1
        cost[part] += 1
    return tuple(layers)
