"""Pipelines: how long a schedule idles, what it keeps, and that every one of them computes the same gradient."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.errors import ConfigError
from jaxdist.mesh import parse_mesh
from jaxdist.parallel import varying
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.lowering import iterations
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule, divide_layers
from jaxdist.parallel.pipeline.simple import pipeline
from jaxdist.parallel.pipeline.simulate import Costs, in_flight, simulate, validate
from jaxdist.parallel.pipeline.text import parse
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.verification import verify_step

from ..charts import schedule_picture, standalone
from . import drawing
from .exchanges import on_mesh, relative_error
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, refused, table

STAGES, MICROBATCHES, ROWS, WIDTH = 4, 8, 2, 16
# Closed forms. Idle time over work, and the activations (of a whole stage, for one micro-batch) on the fullest stage.
BUBBLE = {
    "gpipe": lambda p, m, v: (p - 1) / m,
    "1f1b": lambda p, m, v: (p - 1) / m,
    "interleaved": lambda p, m, v: (p - 1) / (v * m),
    "zb-h1": lambda p, m, v: (p - 1) / (3 * m),
    "zb-v": lambda p, m, v: (p - 1) / (3 * v * m),
}
HELD = {
    "gpipe": lambda p, m, v: m,
    "1f1b": lambda p, m, v: min(m, p),
    "interleaved": lambda p, m, v: (v * p + p - 1) / v,
    "zb-h1": lambda p, m, v: min(m, p),
    "zb-v": lambda p, m, v: p,
}
CHUNKS = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zb-h1": 1, "zb-v": 2}
SIZES = [(p, m) for p in (2, 4, 8) for m in (2 * p, 3 * p, 32)]
MINE = """
name=mine stages=2 microbatches=3 fused=no
0: F0 F1 .  B0 F2 W0 B1 W1 .  B2 W2
1: .  F0 B0 F1 B1 W0 F2 B2 W1 W2
"""


# ------------------------------------------------------------------------------------- an executor of any such table


def layer(w_DD, x_BD):
    """What a stage computes: x[B, D], w[D, D] -> [B, D]."""
    return x_BD + jnp.tanh(x_BD @ w_DD)


def loss_of(y_BD, target_BD):
    return jnp.sum((y_BD - target_BD) ** 2)


def run_table(schedule: Schedule, dropped, w_SDD, inputs_MBD, targets_MBD):
    """Loss and gradient of a model whose layer s is on stage s, tick by tick, with whatever is in the buffers.

    Layout: w[S_pp, D, D], inputs and targets [M, B, D] replicated -> loss, dw[S_pp, D, D].
    Every stage computes F, B and W at every tick and keeps what the table says: short, and three times the work.
    dropped: (stage, micro-batch) whose weight gradient is not added.
    """
    last, num_ticks = schedule.num_stages - 1, schedule.num_ticks
    phases, micros = np.zeros((2, num_ticks, schedule.num_stages), np.int32)
    for tick, row in enumerate(schedule.table):
        for stage, action in enumerate(row):
            if action is not None:
                phases[tick, stage], micros[tick, stage] = action.phase, action.microbatch

    def send(buffer_MBD, value_BD, active, micro, shift):
        """Deliver to the neighbour's buffer: it can be read from the next tick on."""
        pairs = [(s, s + shift) for s in range(last + 1) if 0 <= s + shift <= last]
        value_BD, active, micro = (lax.ppermute(each, "pp", pairs) for each in (value_BD, active, micro))
        return buffer_MBD.at[micro].set(jnp.where(active, value_BD, buffer_MBD[micro]))

    def one_stage(w_1DD, inputs_MBD, targets_MBD):
        stage = lax.axis_index("pp")

        def tick(carry, row):
            forward_MBD, backward_MBD, dw_DD, loss = carry
            phase, micro = row[0][stage], row[1][stage]
            x_BD = jnp.where(stage == 0, inputs_MBD[micro], forward_MBD[micro])
            y_BD, pullback = jax.vjp(layer, w_1DD[0], x_BD)
            loss_of_micro, seed_BD = jax.value_and_grad(loss_of)(y_BD, targets_MBD[micro])
            dw_of_micro, dx_BD = pullback(jnp.where(stage == last, seed_BD, backward_MBD[micro]))
            counts = phase == Phase.W
            if dropped is not None:
                counts &= (stage != dropped[0]) | (micro != dropped[1])
            return (
                send(forward_MBD, y_BD, phase == Phase.F, micro, 1),
                send(backward_MBD, dx_BD, phase == Phase.B, micro, -1),
                dw_DD + jnp.where(counts, dw_of_micro, 0),
                loss + jnp.where((phase == Phase.F) & (stage == last), loss_of_micro, 0),
            ), None

        zeros = (jnp.zeros_like(inputs_MBD), jnp.zeros_like(inputs_MBD), jnp.zeros_like(w_1DD[0]), jnp.zeros(()))
        start = varying(zeros, "pp")
        (_, _, dw_DD, loss), _ = lax.scan(tick, start, (phases, micros))
        return lax.psum(loss, "pp"), dw_DD[None]

    specs = (P("pp"), P(), P())
    return on_mesh(f"pp={last + 1}", one_stage, specs, (P(), P("pp")))(w_SDD, inputs_MBD, targets_MBD)


def one_device(w_SDD, inputs_MBD, targets_MBD):
    """(loss, gradient) of the same model with no pipeline."""

    def total(w_SDD):
        x = inputs_MBD
        for w_DD in w_SDD:
            x = layer(w_DD, x)
        return loss_of(x, targets_MBD)

    return jax.value_and_grad(total)(w_SDD)


def arrays(schedule: Schedule):
    """w[S v, D, D], inputs and targets [M, B, D], random."""
    rng = np.random.default_rng(0)
    parts = (schedule.num_parts, WIDTH, WIDTH), *[(schedule.num_microbatches, ROWS, WIDTH)] * 2
    return tuple(rng.standard_normal(shape) * scale for shape, scale in zip(parts, (0.2, 1, 1), strict=True))


@cache
def by_the_library(name: str) -> tuple[bool, list[int]]:
    """The library's executor against one device (`jaxdist.verify`): (equal, bytes of activations each stage sends)."""
    schedule = make_schedule(name, STAGES, MICROBATCHES)
    parts = [schedule.part(s, c) for s in range(STAGES) for c in range(schedule.num_chunks)]
    shape = parse_mesh(f"pp={STAGES}")
    run = on_mesh(str(shape), pipeline(layer, loss_of, schedule), (P("pp"), P(), P()), (P(), P("pp")))
    w_SDD, inputs_MBD, targets_MBD = arrays(schedule)

    def reference(w_SDD, inputs_MBD, targets_MBD):
        loss, dw_SDD = one_device(w_SDD[np.argsort(parts)], inputs_MBD, targets_MBD)
        return loss, dw_SDD[np.array(parts)]

    with jax.enable_x64(True):
        args = (w_SDD[np.array(parts)], inputs_MBD, targets_MBD)
        sent = collectives_of(run.trace(*args).jaxpr, shape, iterations(schedule, (1,) * schedule.num_parts))
        messages = [each for each in sent if each.kind == "permute"]
        return verify_step(run, reference, args).ok, [
            sum(c.sent_by(stage, shape) for c in messages) for stage in range(STAGES)
        ]


# ------------------------------------------------------------------------------------------------------------ tables


def counted(schedule: Schedule) -> tuple[float, float]:
    """(idle over busy cells, activations of a stage on the fullest), counted in the table."""
    cells = [action for row in schedule.table for action in row]
    busy = sum(action is not None for action in cells)
    held, most = [0] * schedule.num_stages, 0
    for row in schedule.table:
        for stage, action in enumerate(row):
            held[stage] += action is not None and action.phase == Phase.F
        most = max(most, *held)
        for stage, action in enumerate(row):
            held[stage] -= action is not None and action.phase == Phase.W
    return (len(cells) - busy) / busy, most / schedule.num_chunks


def earlier(schedule: Schedule, stage: int, action: Action) -> Schedule:
    """The table with one action of a stage a tick early, swapped with what was there."""
    rows = [list(row) for row in schedule.table]
    tick = next(tick for tick, row in enumerate(rows) if row[stage] == action)
    rows[tick][stage], rows[tick - 1][stage] = rows[tick - 1][stage], rows[tick][stage]
    table = tuple(map(tuple, rows))
    return Schedule(schedule.name, STAGES, MICROBATCHES, 1, schedule.placement, table, fused_backward=False)


def error_of(schedule: Schedule) -> ConfigError | None:
    """What the checker says of a table."""
    try:
        validate(schedule)
    except ConfigError as error:
        return error
    return None


def with_a_slow_stage(p: int, m: int, slowest: float) -> float:
    """Closed form: the slow stage never waits once it began; before and after it the others pass one micro-batch."""
    return 3 * (m * slowest + p - 1)


# --------------------------------------------------------------------------------------------------------------- run


def schedule_checks() -> Findings:
    """Bubbles and activations held of every schedule, counted in its tables, against the closed forms."""
    rows = []
    for name, v in CHUNKS.items():
        tables = {(p, m): make_schedule(name, p, m) for p, m in SIZES}
        forms = {size: (BUBBLE[name](*size, v), HELD[name](*size, v)) for size in SIZES}
        wrong_bubble = sum(not math.isclose(counted(t)[0], forms[size][0]) for size, t in tables.items())
        wrong_held = sum(
            counted(t)[1] != forms[size][1] or max(in_flight(t)) != v * forms[size][1] for size, t in tables.items()
        )
        yield equal(f"{name}: of {len(SIZES)} tables, bubbles that are not the formula's", wrong_bubble, 0)
        yield equal(f"{name}: of {len(SIZES)} tables, activations held that are not the formula's", wrong_held, 0)
        for p, m in ((4, 8), (4, 32), (8, 32)):
            idle, held = counted(tables[p, m])
            rows.append([name, p, m, v, tables[p, m].num_ticks, 100 * idle, 100 * idle / (1 + idle), held])
    columns = "schedule | p | m | v | ticks | idle / work {:.1f} % | share of time {:.1f} % | activations held {:g}"
    yield table("schedules", columns, rows)


def gradient_checks(broken: str | None) -> Findings:
    """Tables run tick by tick, against one device."""
    for name in ("gpipe", "1f1b", "zb-h1"):
        schedule = make_schedule(name, STAGES, MICROBATCHES)
        if broken == "early" and name == "zb-h1":
            schedule = earlier(schedule, 1, Action(Phase.B, 0, 0))
        dropped = (1, 2) if broken == "dropped" and name == "1f1b" else None
        step = partial(run_table, schedule, dropped)
        w, inputs, targets = arrays(schedule)
        (loss, dw), (expected, expected_dw) = step(w, inputs, targets), one_device(w, inputs, targets)
        fallen = float(step(w - 1e-3 * dw, inputs, targets)[0]) / float(loss)
        yield holds(f"{name}: the checker accepts the table", error_of(schedule) is None)
        yield equal(f"{name}: loss, against one device", float(loss), float(expected), within=1e-12)
        yield at_most(f"{name}: error of the gradient, against one device", relative_error(dw, expected_dw), 1e-12)
        yield at_most(f"{name}: loss after a step over the one before", fallen, 0.99)


def slow_stage() -> Findings:
    rows = []
    for slowest in (1.0, 1.25, 2.0):
        costs = [Costs()] * (STAGES - 1) + [Costs(slowest, slowest, slowest)]
        taken = simulate(make_schedule("1f1b", STAGES, 32), costs, waiting="dependencies")
        expected = with_a_slow_stage(STAGES, 32, slowest)
        name = f"1f1b, one stage takes {slowest:g} times as long: ticks"
        yield equal(name, taken.makespan, expected, within=1e-9)
        rows.append([slowest, taken.makespan, expected, 100 * taken.idle_share])
    columns = "k of the slowest stage {:g} | ticks, simulated {:g} | 3(mk + p - 1) {:g} | idle share {:.1f} %"
    yield table("slow", columns, rows)


@lab(
    title="Pipelines",
    question="How long do the stages of a pipeline wait for each other, what does waiting less cost in memory, and how "
    "is it known that a schedule computes the right gradient?",
    breaks={
        "dropped": {"1f1b: error of the gradient*"},
        "early": {"zb-h1: the checker accepts*", "zb-h1: error of the gradient*"},
    },
    devices=STAGES,
)
def run(broken: str | None) -> Findings:
    mine = parse(MINE)
    with jax.enable_x64(True):
        yield from gradient_checks(broken)
        if broken:
            return
        (_, dw), (_, expected_dw) = run_table(mine, None, *arrays(mine)), one_device(*arrays(mine))
    early = earlier(make_schedule("zb-h1", STAGES, MICROBATCHES), 1, Action(Phase.B, 0, 0))
    balanced = divide_layers(14, STAGES, last=2)
    pace = max(*balanced[:-1], balanced[-1] + 2)
    yield refused("the checker refuses a B one tick early", error_of(early), "must come after B of micro-batch 0")
    error = relative_error(dw, expected_dw)
    yield at_most("a table of our own: error of the gradient, against one device", error, 1e-12)
    yield equal("14 layers and a head that costs 2, balanced: work of the slowest stage", pace, (14 + 2) / STAGES)
    volume = MICROBATCHES * ROWS * WIDTH * 8  # a micro-batch is B x D numbers of 8 bytes
    for name, crossings in (("1f1b", 2), ("interleaved", 4), ("zb-v", 4)):
        same, sent = by_the_library(name)
        yield holds(f"{name}: the library's executor equals one device", same)
        # A stage in the middle sends each micro-batch on once a chunk, and its gradient back once a chunk.
        yield equal(f"{name}: bytes that stage 1 sends", sent[1], crossings * volume, unit="bytes")

    yield from schedule_checks()
    yield from slow_stage()
    cells = [[s, *[f"{a.phase.name}{a.microbatch}" if (a := row[s]) else "·" for row in mine.table]] for s in range(2)]
    ticks = " | ".join(str(tick) for tick in range(mine.num_ticks))
    yield table("mine", f"stage | {ticks}", cells)
    yield Picture("ranks", draw_ranks)
    ms = (4, 8, 16, 32, 64)
    shares = {name: (ms, [100 * idle_share(name, STAGES, m) for m in ms]) for name in CHUNKS if name != "gpipe"}
    title = "Idle share of 4 stages (from the tables)"
    yield Picture("bubble", partial(drawing.lines, title, "micro-batches", "% of the step", shares, log_x=True))
    for name in ("gpipe", "1f1b", "zb-h1"):
        drawn = schedule_picture(make_schedule(name, STAGES, MICROBATCHES), name)
        yield Picture(f"{name}-wide", partial(standalone, drawn, f"{name}: 4 stages, 8 micro-batches"))
    yield Guesses(
        share=100 * idle_share("1f1b", 4, 8),
        held=counted(make_schedule("1f1b", 4, 8))[1],
        needed=next(m for m in range(1, 1000) if BUBBLE["1f1b"](8, m, 1) <= 0.05),
        saved=100 * (1 - make_schedule("zb-h1", 8, 32).num_ticks / make_schedule("1f1b", 8, 32).num_ticks),
        slow=100 * (with_a_slow_stage(4, 32, 1.25) / with_a_slow_stage(4, 32, 1.0) - 1),
        gib=4 * 6 * 4096 * 1 * 34 * 4096 / 2**30,  # six layers of 34 s b h bytes (selective recomputation)
    )


def idle_share(name: str, p: int, m: int) -> float:
    return simulate(make_schedule(name, p, m)).idle_share


def draw_ranks() -> str:
    rows = {name: np.zeros((STAGES, 2 * STAGES)) for name in ("1f1b", "interleaved", "zb-v")}
    for name, layers in rows.items():
        schedule = make_schedule(name, STAGES, MICROBATCHES)
        for part, held in enumerate(np.array_split(np.arange(2 * STAGES), schedule.num_parts)):
            layers[schedule.place(part)[0], held] = 1
    return drawing.holdings("A colour is one of eight layers", rows)
