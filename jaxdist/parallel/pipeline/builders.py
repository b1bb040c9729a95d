"""Build pipeline schedules: the published ones by name, and any other from the order of each stage; no JAX."""

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from jaxdist.errors import ConfigError
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule
from jaxdist.parallel.pipeline.simulate import check_action, check_sizes, validate

MOST_CELLS = 2**17  # stages x micro-batches x chunks; 64 stages, 512 micro-batches and 2 chunks are half of it


def from_orders(empty: Schedule, orders: Sequence[Sequence[Action]]) -> Schedule:
    """`empty` with a table in which every stage runs its actions in the given order, each as soon as it can.

    Raises: ConfigError as `validate`; for orders that deadlock, naming the tick and what each stage waits for.
    """
    num_stages = empty.num_stages
    check_sizes(empty)
    if len(orders) != num_stages:
        raise ConfigError(f"{empty} from {len(orders)} orders", "each stage must have one order", f"Give {num_stages}")
    for stage, order in enumerate(orders):
        for place, action in enumerate(order):
            check_action(empty, f"{empty}, stage {stage}, position {place} of its order", action)

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
                for source, needed in empty.inputs(stage, action)
                if empty.earliest(stage, source, needed, done.get((source, needed), math.inf)) > len(table)
            ]
            if missing:
                source, needed = missing[0]
                waits.append(f"stage {stage} with {action} waits for {needed} of stage {source}")
            else:
                row[stage] = action
        if not any(row) and len(table) >= max(done.values(), default=-1) + empty.send_latency:  # no message in flight
            raise ConfigError(
                f"{empty}, tick {len(table)}: deadlock",
                f"a stage must be able to run its next action: {'; '.join(waits)}",
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


def _fill(empty: Schedule, orders: list[list[Action]], limit: int, run_ahead: bool) -> Schedule:
    """`empty` with F and B in the given orders, each as soon as it can run, and a W where neither of them can.

    A stage with `limit` chunks in flight runs its deferred Ws before another F; it exceeds the limit where it has none,
    so no order deadlocks. run_ahead: a stage that would still idle runs its next chunk-0 forward early, if that leaves
    room for a chunk 1.
    """
    num_stages = empty.num_stages
    done: dict[tuple[int, Action], int] = {}  # the tick of each action
    position = [0] * num_stages  # in the stage's order
    forwards = [0] * num_stages  # of chunk 0
    deferred: list[collections.deque[Action]] = [collections.deque() for _ in range(num_stages)]
    held = [0] * num_stages

    def ready(stage: int, action: Action) -> bool:
        return all(
            empty.earliest(stage, *needed, done.get(needed, tick)) <= tick for needed in empty.inputs(stage, action)
        )

    def choose(stage: int) -> Action | None:
        order = orders[stage]
        while position[stage] < len(order) and (stage, order[position[stage]]) in done:
            position[stage] += 1
        if position[stage] < len(order):
            action = order[position[stage]]
            full = action.phase == Phase.F and held[stage] >= limit and deferred[stage]
            if not full and ready(stage, action):
                return action
        if deferred[stage]:
            return deferred[stage][0]
        early = Action(Phase.F, forwards[stage], 0)
        if run_ahead and early.microbatch < empty.num_microbatches and held[stage] < limit - 1 and ready(stage, early):
            return early
        return None

    table: list[tuple[Action | None, ...]] = []
    while len(done) < len(empty.phases) * empty.num_microbatches * empty.num_parts:
        tick = len(table)
        table.append(tuple(choose(stage) for stage in range(num_stages)))
        for stage, action in enumerate(table[tick]):
            if action is None:
                continue
            done[stage, action] = tick
            if action.phase == Phase.F:
                held[stage] += 1
                forwards[stage] += action.chunk == 0
            elif action.phase == Phase.B:
                deferred[stage].append(action._replace(phase=Phase.W))
            elif action.phase == Phase.W:
                deferred[stage].popleft()
                held[stage] -= 1
    schedule = dataclasses.replace(empty, table=tuple(table))
    validate(schedule)
    return schedule


# ---------------------------------------------------------------------------------------------------------- published


class Recipe(NamedTuple):
    """The order of actions of every stage, from which a named schedule is made.

    limit None: `from_orders`. Otherwise `_fill`, from orders of F and B (and R), with at most `limit` chunks in flight.
    """

    orders: list[list[Action]]
    limit: int | None = None
    run_ahead: bool = False


def _gpipe(empty: Schedule) -> Recipe:
    """All forwards, then all backwards. Source: GPipe, arXiv 1811.06965."""
    microbatches = range(empty.num_microbatches)
    order = [Action(Phase.F, m, 0) for m in microbatches]
    order += [Action(phase, m, 0) for m in microbatches for phase in (Phase.B, Phase.W)]
    return Recipe([order] * empty.num_stages)


def _interleaved(empty: Schedule) -> Recipe:
    """1F1B over v chunks a stage, S micro-batches of a chunk at a time. Source: arXiv 2104.04473 section 2.2.2.

    One chunk is plain 1F1B (section 2.2.1): a warm-up of S-1-s forwards, then one forward one backward. With
    send_latency 2 its warm-up is 2(S-1-s), and it takes S-1 ticks more: eager 1F1B, arXiv 2211.05322 section 4.
    Megatron-LM requires M to be a multiple of S. For another M this is the schedule of the next multiple without the
    actions of the additional micro-batches, each remaining action as soon as it can run.
    """
    return Recipe([[each for action in order for each in _with_w(action)] for order in _interleaved_orders(empty)])


def _with_w(action: Action) -> list[Action]:
    """The action, and after a B its W."""
    return [action, action._replace(phase=Phase.W)] if action.phase == Phase.B else [action]


def _interleaved_orders(empty: Schedule) -> list[list[Action]]:
    """The F and B of every stage in order: warm-up, one forward one backward, cool-down."""
    num_stages, num_chunks = empty.num_stages, empty.num_chunks
    group = num_stages * num_chunks  # actions before the next one of chunk 0
    num_actions = -(-empty.num_microbatches // num_stages) * group

    def nth(phase: Phase, n: int) -> Action:
        chunk = n % group // num_stages
        microbatch = n // group * num_stages + n % num_stages
        return Action(phase, microbatch, chunk if phase == Phase.F else num_chunks - 1 - chunk)

    forwards, backwards = ([nth(phase, n) for n in range(num_actions)] for phase in (Phase.F, Phase.B))
    orders = []
    for stage in range(num_stages):
        below = num_stages - 1 - stage
        # Chunks need a warm-up twice as deep: a forward goes round the ring and back before its backward can start.
        # That also covers a send_latency of 2, for which plain 1F1B needs as much (eager 1F1B).
        warm_up = empty.send_latency * below if num_chunks == 1 else 2 * below + (num_chunks - 1) * num_stages
        warm_up = min(warm_up, num_actions)
        order = forwards[:warm_up]
        for forward, backward in itertools.zip_longest(forwards[warm_up:], backwards):
            order += [backward] if forward is None else [forward, backward]
        orders.append([action for action in order if action.microbatch < empty.num_microbatches])
    return orders


def _zb_h1(empty: Schedule) -> Recipe:
    """The order of 1F1B with every W deferred to where the stage would idle, in the memory of 1F1B's first stage.

    For M >= S: 3M + S-1 ticks, a third of 1F1B's bubble, and min(M, S) activations in flight. No schedule with that
    memory is shorter: the first B reaches stage 0 at tick 2S-1, before which only S forwards fit. With send_latency 2
    it has the order and memory of eager 1F1B, at most 2S-1 in flight.
    Source: ZB-H1, arXiv 2401.10241 section 4.1.
    """
    limit = min(empty.num_microbatches, empty.send_latency * (empty.num_stages - 1) + 1)
    return Recipe(_interleaved_orders(empty), limit)


def _zb_v(empty: Schedule) -> Recipe:
    """A V with 1F1B's memory and no bubble: at most 2S chunks in flight.

    6M + S-1 ticks for M >= S, the least a pipeline can take; for M >= 2S no stage idles between its first action and
    its last. Source: ZB-V, arXiv 2401.10241 section 6; its repeated block, arXiv 2405.15362.
    """
    return Recipe(_v_orders(empty, steps=(1, 5, 1, 5)), limit=2 * empty.num_stages, run_ahead=True)


def _v_half(empty: Schedule) -> Recipe:
    """A V with half of 1F1B's memory: S+1 chunks in flight for odd S, S+2 for even, where 1F1B holds 2S.

    Bubble 3(S-1) - 1 ticks for S > 2 and M > S/2, where 1F1B's is 6(S-1). Source: V-Half, arXiv 2405.15362.
    """
    steps = (empty.send_latency, 2, empty.send_latency, 2)
    return Recipe(_v_orders(empty, steps), limit=2 * (empty.num_stages // 2 + 1))


def _v_min(empty: Schedule) -> Recipe:
    """A V with a third of 1F1B's memory: 2 ceil((S+2)/3) chunks in flight, where 1F1B holds 2S.

    Bubble 4(S-1) - 1 ticks, or 4(S-1) + 1 where 3 divides S; 1F1B's is 6(S-1). Source: V-Min, arXiv 2405.15362.
    """
    return Recipe(_v_orders(empty, steps=(empty.send_latency,) * 4), limit=2 * -(-(empty.num_stages + 2) // 3))


def _v_orders(empty: Schedule, steps: tuple[int, int, int, int]) -> list[list[Action]]:
    """The F and B of every stage, in the order of a block of ticks that is repeated every 6 ticks per micro-batch.

    The block is the path of one micro-batch: forward down the V and up again, then backward down and up, with `steps`
    ticks from stage to stage on each of the four ways. The time it spends on a stage, over 6, is what the stage holds.
    The pauses at the turns of the V are the shortest for which no stage has two actions at once.
    Source: arXiv 2405.15362 section 3.
    """
    num_stages, last = empty.num_stages, empty.num_stages - 1

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
            (ways[way][stage] + 6 * microbatch, Action(phase, microbatch, chunk))
            for microbatch in range(empty.num_microbatches)
            for way, (phase, chunk) in enumerate(((Phase.F, 0), (Phase.F, 1), (Phase.B, 1), (Phase.B, 0)))
        ]
        orders.append([action for _, action in sorted(timed)])
    return orders


class _Kind(NamedTuple):
    """One row of the table of schedules; `chunks` a stage, unless told otherwise."""

    make: Callable[[Schedule], Recipe]
    placement: str
    chunks: int
    any_chunks: bool = False
    fused_backward: bool = False


SCHEDULES = {
    "gpipe": _Kind(_gpipe, "loop", 1, fused_backward=True),
    "1f1b": _Kind(_interleaved, "loop", 1, fused_backward=True),
    "interleaved": _Kind(_interleaved, "loop", 2, any_chunks=True, fused_backward=True),
    "zb-h1": _Kind(_zb_h1, "loop", 1),
    "zb-v": _Kind(_zb_v, "v", 2),
    "v-half": _Kind(_v_half, "v", 2),
    "v-min": _Kind(_v_min, "v", 2),
}
NAMES = tuple(SCHEDULES)


def make_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    send_latency: int = 1,
    recompute: bool = False,
) -> Schedule:
    """One of `NAMES` for S stages and M micro-batches, checked. num_chunks None: the schedule's own default.

    recompute: with an R before every B, as soon as the stage has nothing else to do before that B: it needs no message,
    so it fills the time in which the stage waits for one.
    Raises: ConfigError for an unknown name, sizes below 1, a number of chunks that the schedule cannot have, and a
        send_latency other than 1 and 2.
    """
    sizes = (num_stages, num_microbatches, num_chunks, send_latency, recompute)
    empty, (orders, limit, run_ahead) = recipe(name, *sizes)
    return from_orders(empty, orders) if limit is None else _fill(empty, orders, limit, run_ahead)


def recipe(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None = None,
    send_latency: int = 1,
    recompute: bool = False,
) -> tuple[Schedule, Recipe]:
    """The schedule without its table, and what `make_schedule` makes the table from; raises as it does."""
    if name not in SCHEDULES:
        raise ConfigError(f"schedule {name!r}", "there is no schedule of that name", f"Use one of {', '.join(NAMES)}")
    kind = SCHEDULES[name]
    num_chunks = kind.chunks if num_chunks is None else num_chunks
    if num_chunks != kind.chunks and not kind.any_chunks:
        raise ConfigError(
            f"schedule {name!r} with {num_chunks} chunks a stage",
            f"must have {kind.chunks}, for which it is made",
            f"Use {kind.chunks}, or schedule interleaved",
        )
    sizes = (num_stages, num_microbatches, num_chunks)
    empty = Schedule(name, *sizes, kind.placement, (), kind.fused_backward, send_latency, recompute)
    check_sizes(empty)
    if (size := math.prod(sizes)) > MOST_CELLS:
        raise ConfigError(
            f"{num_stages} stages x {num_microbatches} micro-batches x {num_chunks} chunks",
            f"the product must be at most {MOST_CELLS:,}, not {size:,}: a table is made one action at a time",
            "Use fewer micro-batches, and accumulate more of them",
        )
    made = kind.make(empty)
    if recompute:
        made = made._replace(orders=[[each for a in order for each in _with_r(a)] for order in made.orders])
    return empty, made


def _with_r(action: Action) -> list[Action]:
    """The action, and before a B its R."""
    return [action._replace(phase=Phase.R), action] if action.phase == Phase.B else [action]
