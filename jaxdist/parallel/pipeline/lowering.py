"""Lower a pipeline schedule to what the executor reads (`jaxdist.parallel.pipeline.instructions`); no JAX."""

from collections.abc import Iterable, Sequence
from fractions import Fraction
from functools import lru_cache

import numpy as np

from jaxdist.parallel.pipeline.instructions import (
    ARRIVALS,
    FROM_AFTER,
    FROM_BEFORE,
    FROM_SELF,
    NOWHERE,
    Instructions,
    Loop,
    Lowered,
    Senders,
    sending,
)
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule
from jaxdist.parallel.pipeline.simulate import validate


@lru_cache(maxsize=64)
def lower(schedule: Schedule, *, forward_only: bool = False) -> Lowered:
    """Give every activation, gradient and residual of a schedule a slot.

    forward_only: only the forward actions, in their order, each as soon as it can run.
    Raises: ConfigError as `validate`.
    """
    validate(schedule)
    table = forwards(schedule) if forward_only else schedule.table
    shape, slots = (len(table), schedule.num_stages), Instructions._fields[5:]
    out = Instructions(
        **{name: np.full(shape, NOWHERE if name in slots else 0, np.int32) for name in Instructions._fields}
    )
    when = {(a.phase, a.microbatch, schedule.part(stage, a.chunk)): (tick, stage)
            for tick, row in enumerate(table) for stage, a in enumerate(row) if a is not None}  # fmt: skip
    pools = [[Slots() for _ in range(schedule.num_stages)] for _ in range(5)]
    messages, inputs, b_residuals, w_residuals, b_to_w = pools
    saves = Phase.R if schedule.recompute else Phase.F
    final, sent = schedule.num_parts - 1, []

    for (phase, micro, part), (tick, stage) in sorted(when.items(), key=lambda item: item[1]):
        chunk = schedule.place(part)[1]
        for name, value in (("phase", phase), ("microbatch", micro), ("chunk", chunk),
                            ("first", part == 0), ("last", part == final)):  # fmt: skip
            getattr(out, name)[tick, stage] = value
        if phase == Phase.F and schedule.recompute and not forward_only:
            r_tick = when[Phase.R, micro, part][0]
            out.slot_x[tick, stage] = out.slot_x[r_tick, stage] = inputs[stage].reserve(tick, r_tick)
        if phase == saves and not forward_only:
            b_tick, w_tick = when[Phase.B, micro, part][0], when[Phase.W, micro, part][0]
            out.slot_b[tick, stage] = out.slot_b[b_tick, stage] = b_residuals[stage].reserve(tick, b_tick)
            slot = w_residuals[stage].reserve(tick, w_tick)
            for reader in (tick, b_tick, w_tick):
                out.slot_w[reader, stage] = slot
        if phase == Phase.B:
            w_tick = when[Phase.W, micro, part][0]
            out.slot_bw[tick, stage] = out.slot_bw[w_tick, stage] = b_to_w[stage].reserve(tick, w_tick)

        # The next reader: of F the next part, or the last part's own B (the loss's gradient); of B the part before.
        after_f = (Phase.F, micro, part + 1) if part < final else (Phase.B, micro, part)
        if (use := when.get({Phase.F: after_f, Phase.B: (Phase.B, micro, part - 1)}.get(phase))) is None:
            continue
        use_tick, receiver = use
        arrives = tick if receiver == stage else tick + schedule.send_latency - 1
        sent.append((arrives, use_tick, receiver, _arrival(stage, receiver, schedule.num_stages)))

    for arrives, use_tick, receiver, way in sorted(sent):
        slot = messages[receiver].reserve(arrives + 1, use_tick)
        out.slot_in[use_tick, receiver] = slot
        getattr(out, way)[arrives, receiver] = slot

    parts = tuple(
        tuple(schedule.part(stage, chunk) for chunk in range(schedule.num_chunks))
        for stage in range(schedule.num_stages)
    )
    counts = (max(slots.count for slots in pool) for pool in pools)
    return Lowered(out, parts, senders_of(out, schedule.send_latency), *counts)


def forwards(schedule: Schedule) -> list[list[Action | None]]:
    """A table of only the forward actions: every stage in its order, each action as soon as it can run."""
    table: list[list[Action | None]] = []
    free = [0] * schedule.num_stages
    done: dict = {}
    for stage, action in (entry for row in schedule.table for entry in enumerate(row)):
        if action is not None and action.phase == Phase.F:
            part = schedule.part(stage, action.chunk)
            send_latency = 1 if part == 0 or schedule.place(part - 1)[0] == stage else schedule.send_latency
            tick = max(free[stage], done.get((action.microbatch, part - 1), -send_latency) + send_latency)
            free[stage], done[action.microbatch, part] = tick + 1, tick
            table += [[None] * schedule.num_stages for _ in range(tick + 1 - len(table))]
            table[tick][stage] = action
    return table


def senders_of(instructions: Instructions, send_latency: int = 1) -> dict[str, Senders]:
    """By direction, where any stage ever sends in it. With send_latency 2 each of those stages sends at every tick."""
    found = {}
    for name, shift in ARRIVALS.items():
        if shift and (getattr(instructions, name) != NOWHERE).any():
            sends = np.roll(getattr(instructions, name) != NOWHERE, -shift, axis=1)  # [ticks, S]
            rows = [tuple(np.flatnonzero(row).tolist()) for row in sends]
            sets = sorted(set(rows) - {()})
            if send_latency == 2:
                sets = [tuple(sorted(set().union(*sets)))]
                rows = sets * len(rows)
            found[name] = Senders(sets, np.array([sets.index(row) + 1 if row else 0 for row in rows], np.int32))
    return found


class Slots:
    """Slots of one buffer on one stage, reserved in order of time: the lowest that is free."""

    def __init__(self):
        self.busy_until: list[int] = []

    @property
    def count(self) -> int:
        return len(self.busy_until)

    def reserve(self, start: int, end: int) -> int:
        """A slot for ticks `start` to `end`, both included."""
        for slot, busy in enumerate(self.busy_until):
            if busy < start:
                self.busy_until[slot] = end
                return slot
        self.busy_until.append(end)
        return self.count - 1


def _arrival(sender: int, receiver: int, num_stages: int) -> str:
    """The sender as its receiver sees it: consecutive parts are on one stage or on neighbours."""
    distance = (receiver - sender) % num_stages
    assert distance in (0, 1, num_stages - 1), (sender, receiver)
    return FROM_SELF if distance == 0 else FROM_BEFORE if distance == 1 else FROM_AFTER


def iterations(
    schedule: Schedule, num_layers: Sequence[int], *, forward_only: bool = False
) -> dict[str, tuple[Fraction, ...]]:
    """How often each named function of the executor runs on each stage, on average per tick.

    For messages: how often each set of senders sends that contains the stage.
    """
    lowered = lower(schedule, forward_only=forward_only)
    num_ticks = len(lowered.instructions.phase)
    stages = range(schedule.num_stages)

    def a_tick(counts: Iterable[int]) -> tuple[Fraction, ...]:
        return tuple(Fraction(int(count), num_ticks) for count in counts)

    def at(part: int) -> tuple[Fraction, ...]:
        return a_tick(schedule.num_microbatches * (schedule.place(part)[0] == stage) for stage in stages)

    layers = a_tick(
        schedule.num_microbatches * sum(num_layers[schedule.part(stage, chunk)] for chunk in range(schedule.num_chunks))
        for stage in stages
    )
    messages = {
        sending(name, index): a_tick((found.which == index + 1).sum() * (stage in members) for stage in stages)
        for name, found in lowered.senders.items()
        for index, members in enumerate(found.sets)
    }
    once_a_layer = (Loop.LAYERS_FORWARD, Loop.LAYERS_AGAIN, Loop.LAYERS_INPUT_GRADIENT, Loop.LAYERS_WEIGHT_GRADIENT)
    ends = {Loop.EMBED: at(0), Loop.EMBED_GRADIENT: at(0), Loop.HEAD: at(schedule.num_parts - 1)}
    return messages | dict.fromkeys(once_a_layer, layers) | ends
