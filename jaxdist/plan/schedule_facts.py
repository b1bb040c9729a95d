"""What a plan needs of a pipeline schedule, without making its table: ticks, lock-step time, messages, buffer slots.

No JAX here. The tables of `jaxdist.parallel.pipeline.schedules` are checked action by action; a search needs hundreds
of them, of which only a few numbers. Here the same rules run over all stages at a time, on arrays of ticks, and tables
of many micro-batches are extended from small ones. Tests hold the numbers against the tables themselves
(`table_facts`).

Ticks as in docs/schedules.md: one F, B or W of one chunk each, every stage waiting for its neighbours.
"""

import math
from dataclasses import dataclass, fields
from functools import cache

import numpy as np

from jaxdist.parallel.pipeline.builders import NAMES, recipe
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.plan.disk_cache import read_arrays, write_arrays

NEVER = 1 << 30
SPAN_COSTS = np.array([1, 2, 1, 1])  # ticks' time of F, B, W and R where B runs the forward again


@dataclass(frozen=True)
class ScheduleFacts:
    """Slots are those of the executor's buffers, on the stage that needs most.

    span: lock-step time, in ticks' time; recompute_span: where B runs the forward of its chunk again. sends: ticks at
    which any stage sends to the next, plus those at which any sends to the one before. work: micro-batches × chunks.
    phases: 3, or 4 with R, before which an input alone is held.
    """

    num_ticks: int
    span: int
    recompute_span: int
    sends: int
    num_messages: int
    num_inputs: int
    num_b_residuals: int
    num_w_residuals: int
    num_b_to_w: int
    work: int
    phases: int = 3

    @property
    def bubble(self) -> float:
        """Idle over ideal time."""
        return self.span / (self.phases * self.work) - 1

    @property
    def recompute_bubble(self) -> float:
        """The same where B runs the forward of its chunk again."""
        return self.recompute_span / (4 * self.work) - 1


@cache
def schedule_facts(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, send_latency: int = 1, recompute: bool = False
) -> ScheduleFacts:
    """Facts of a named schedule. From four rounds of the stages on, extended linearly from two smaller tables.

    From there on every S micro-batches add the same, but for `recompute_span`, which is then off by up to 3 % (4 %
    with send_latency 2), and the times of v-half and v-min with send_latency 2, off by up to 7 %.
    """
    if num_microbatches <= 4 * num_stages:
        key = NAMES.index(name), num_stages, num_microbatches, num_chunks, send_latency, int(recompute)
        if key not in _known():
            ticks, placement = ticks_of(name, num_stages, num_microbatches, num_chunks, send_latency, recompute)
            _known()[key] = facts_of(ticks, num_stages, placement, send_latency)
        return _known()[key]
    base = 3 * num_stages + num_microbatches % num_stages
    rounds = (num_microbatches - base) // num_stages
    sizes = (num_chunks, send_latency, recompute)
    low, high = (schedule_facts(name, num_stages, base - n * num_stages, *sizes) for n in (1, 0))
    return ScheduleFacts(
        **{
            field.name: getattr(high, field.name) + rounds * (getattr(high, field.name) - getattr(low, field.name))
            for field in fields(ScheduleFacts)
        }
    )


FILE, KEYS = "schedules", 6


@cache
def _known() -> dict[tuple[int, ...], ScheduleFacts]:
    """Facts of every table that was run, in this process or an earlier one."""
    kept = read_arrays(FILE, ["rows"])
    rows = () if kept is None else kept["rows"].tolist()
    return {tuple(row[:KEYS]): ScheduleFacts(*row[KEYS:]) for row in rows}


def keep_facts() -> None:
    """Write down what later processes need not run again."""
    kept = read_arrays(FILE, ["rows"])
    if len(_known()) <= (0 if kept is None else len(kept["rows"])):
        return
    rows = [[*key, *vars(facts).values()] for key, facts in _known().items()]
    write_arrays(FILE, {"rows": np.array(rows, np.int64).reshape(len(rows), -1)})


def table_facts(schedule: Schedule) -> ScheduleFacts:
    """Read from a table."""
    ticks = np.full((len(schedule.phases), schedule.num_microbatches, schedule.num_parts), NEVER)
    for tick, row in enumerate(schedule.table):
        for stage, action in enumerate(row):
            if action is not None:
                ticks[action.phase - 1, action.microbatch, schedule.part(stage, action.chunk)] = tick
    return facts_of(ticks, schedule.num_stages, schedule.placement, schedule.send_latency)


def stage_of(num_stages: int, num_parts: int, placement: str) -> np.ndarray:
    """The stage that holds each part of the model."""
    chunk, stage = np.divmod(np.arange(num_parts), num_stages)
    return np.where((placement == "v") & (chunk == 1), num_stages - 1 - stage, stage)


def facts_of(ticks: np.ndarray, num_stages: int, placement: str, send_latency: int = 1) -> ScheduleFacts:
    """ticks[kind, micro-batch, part]: when each action runs; four kinds where the schedule recomputes."""
    phases, num_microbatches, num_parts = ticks.shape
    f, b, w = ticks[:3]
    saved = ticks[3] if phases == 4 else f  # when residuals are
    num_ticks = int(w.max()) + 1
    stages = np.broadcast_to(stage_of(num_stages, num_parts, placement), f.shape)

    def most(start, end, stage) -> int:
        """Intervals of ticks, both ends included, that overlap on one stage."""
        change = np.zeros((num_stages, num_ticks + 2), int)
        np.add.at(change, (stage, start), 1)
        np.add.at(change, (stage, end + 1), -1)
        return int(change.cumsum(axis=1).max())

    # Messages: F's to F of the next part, the last part's to its own B, B's to B of the part before.
    sent = np.concatenate([f[:, :-1], f[:, -1:], b[:, 1:]], axis=1)
    used = np.concatenate([f[:, 1:], b[:, -1:], b[:, :-1]], axis=1)
    sender = np.concatenate([stages[:, :-1], stages[:, -1:], stages[:, 1:]], axis=1)
    receiver = np.concatenate([stages[:, 1:], stages[:, -1:], stages[:, :-1]], axis=1)
    way = (receiver - sender) % num_stages
    onward = (way == 1) & (num_stages > 1)
    back = (way == num_stages - 1) & ~onward

    def span(costs) -> int:
        """As `simulate` in lock-step, with links that take no time."""
        table = np.zeros((num_ticks, num_stages), int)
        for kind, cost in enumerate(costs[:phases]):
            table[ticks[kind], stages] = cost
        start = end = np.zeros(num_stages, int)
        for row in table:
            others = end if send_latency == 1 else start
            both = np.concatenate([others[-1:], others, others[:1]])
            start = np.maximum(np.maximum(both[:-2], both[2:]), end)
            end = start + row
        return int(end.max())

    if send_latency == 1:
        sends = len(np.unique(sent[onward])) + len(np.unique(sent[back]))
    else:
        sends = num_ticks * (int(onward.any()) + int(back.any()))
    return ScheduleFacts(
        num_ticks=num_ticks,
        span=num_ticks if send_latency == 1 else span((1, 1, 1, 1)),
        recompute_span=span(SPAN_COSTS),
        sends=sends,
        num_messages=most(sent + np.where(sender == receiver, 1, send_latency), used, receiver),
        num_inputs=most(f, ticks[3], stages) if phases == 4 else 0,
        num_b_residuals=most(saved, b, stages),
        num_w_residuals=most(saved, w, stages),
        num_b_to_w=most(b, w, stages),
        work=num_microbatches * (num_parts // num_stages),
        phases=phases,
    )


# The rules of `jaxdist.parallel.pipeline.schedules`, all stages at a time.


def ticks_of(
    name: str, num_stages: int, num_microbatches: int, num_chunks: int, send_latency: int = 1, recompute: bool = False
) -> tuple[np.ndarray, str]:
    """(ticks[kind, micro-batch, part], placement) of a named schedule: those of `make_schedule`."""
    sizes = (num_stages, num_microbatches, num_chunks, send_latency, recompute)
    empty, (orders, limit, run_ahead) = recipe(name, *sizes)
    run = _Run(num_stages, num_microbatches, num_chunks, empty.placement, orders, send_latency, recompute)
    return (run.fused() if limit is None else run.filled(limit, run_ahead)), empty.placement


class _Run:
    """Stages that go through their orders, a tick at a time; `ticks` is flat, with one entry that is always there."""

    def __init__(self, num_stages, num_microbatches, num_chunks, placement, orders, send_latency, recompute):
        self.num_stages, self.num_microbatches, self.send_latency = num_stages, num_microbatches, send_latency
        self.num_parts = num_stages * num_chunks
        self.placement = placement
        self.shape = (3 + recompute, num_microbatches, self.num_parts)
        self.before_b = 3 if recompute else 0  # the kind that B needs of its own
        self.ticks = np.full(math.prod(self.shape) + 1, NEVER)
        self.ticks[-1] = -send_latency
        self.length = np.array([len(order) for order in orders])
        depth = int(self.length.max())
        self.kind, self.micro, self.chunk = (np.zeros((num_stages, depth + 1), int) for _ in range(3))
        for stage, order in enumerate(orders):
            n = len(order)
            self.kind[stage, :n] = [action.phase - 1 for action in order]
            self.micro[stage, :n] = [action.microbatch for action in order]
            self.chunk[stage, :n] = [action.chunk for action in order]
        self.every = np.arange(num_stages)
        self.part = self.part_of(self.every[:, None], self.chunk)
        self.stages = stage_of(num_stages, self.num_parts, placement)

    def part_of(self, stage, chunk):
        looped = chunk * self.num_stages + stage
        return np.where((self.placement == "v") & (chunk == 1), 2 * self.num_stages - 1 - stage, looped)

    def at(self, kind, micro, part):
        return (kind * self.num_microbatches + micro) * self.num_parts + part

    def needs(self, kind, micro, part, fused: bool):
        """Two entries that an action waits for (the last entry where there is nothing), each with the ticks from it on.

        As in `Schedule.earliest`.
        """
        nothing = len(self.ticks) - 1
        stage = self.stages[part]

        def wait(other, send_latency):
            return np.where(self.stages[other.clip(0, self.num_parts - 1)] == stage, 1, send_latency)

        before = np.where(part > 0, self.at(0, micro, part - 1), nothing)
        own = self.at(np.array([0, self.before_b, 1, 0])[kind], micro, part)
        after = np.where(part < self.num_parts - 1, self.at(2 if fused else 1, micro, part + 1), nothing)
        first = np.where(kind == 0, before, own), np.where(kind == 0, wait(part - 1, self.send_latency), 1)
        return first, (np.where(kind == 1, after, nothing), wait(part + 1, max(1, self.send_latency - fused)))

    def ready(self, needs, here, tick: int):
        """Whether what an action waits for is there."""
        return np.logical_and(*(self.ticks[entries[here]] + wait[here] <= tick for entries, wait in needs))

    def fused(self) -> np.ndarray:
        """As `from_orders`: every stage its next action, as soon as it can."""
        own = self.at(self.kind, self.micro, self.part)
        needs = self.needs(self.kind, self.micro, self.part, fused=True)
        position, tick = np.zeros(self.num_stages, int), 0
        while (position < self.length).any():
            here = (self.every, position)
            ready = (position < self.length) & self.ready(needs, here, tick)
            self.ticks[own[here][ready]] = tick
            position += ready
            tick += 1
        return self.ticks[:-1].reshape(self.shape)

    def filled(self, limit: int, run_ahead: bool) -> np.ndarray:
        """As `builders._fill`: F and B in order, W where neither can run, early forwards where they may."""
        own = self.at(self.kind, self.micro, self.part)
        needs = self.needs(self.kind, self.micro, self.part, fused=False)
        position, forwards, held, paid, owes = (np.zeros(self.num_stages, int) for _ in range(5))
        owed = np.zeros((self.num_stages, self.num_microbatches * self.num_parts + 1), int)  # entries of W, in order
        chunk_0 = self.part_of(self.every, np.zeros(self.num_stages, int))
        left, tick = math.prod(self.shape), 0
        while left:
            while (skip := (position < self.length) & (self.ticks[own[self.every, position]] < NEVER)).any():
                position += skip
            here = (self.every, position)
            is_f, owing = self.kind[here] == 0, owes > paid
            ordered = (position < self.length) & ~(is_f & (held >= limit) & owing)
            ordered &= self.ready(needs, here, tick)
            weights = ~ordered & owing
            early = np.zeros(self.num_stages, bool)
            if run_ahead:
                early = ~ordered & ~weights & (forwards < self.num_microbatches) & (held < limit - 1)
                early &= self.ready(self.needs(np.zeros_like(forwards), forwards, chunk_0, False), self.every, tick)
            self.ticks[own[here][ordered]] = tick
            self.ticks[owed[self.every, paid][weights]] = tick
            self.ticks[self.at(0, forwards, chunk_0)[early]] = tick
            ran_f, ran_b = (ordered & is_f) | early, ordered & (self.kind[here] == 1)
            owed[self.every[ran_b], owes[ran_b]] = self.at(2, self.micro[here], self.part[here])[ran_b]
            held += ran_f
            held -= weights
            forwards += (ordered & is_f & (self.chunk[here] == 0)) | early
            owes += ran_b
            paid += weights
            left -= int((ordered | early | weights).sum())
            tick += 1
        return self.ticks[:-1].reshape(self.shape)
