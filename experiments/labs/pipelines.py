"""Pipelines: how long a schedule idles, what it keeps, and that every one of them computes the same gradient."""

import math
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.parallel import varying
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.executor import pipeline
from jaxdist.parallel.pipeline.lowering import iterations
from jaxdist.parallel.pipeline.schedules import Action, Phase, Schedule, divide_layers
from jaxdist.parallel.pipeline.simulate import Costs, in_flight, simulate, validate
from jaxdist.parallel.pipeline.text import parse
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.runtime.devices import acquire_devices
from jaxdist.verification import verify_step

from ..timeline import timeline
from . import drawing
from .lab import Lab, Result, Table, at_most, equal, holds, refused

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

    mesh = make_mesh(parse_mesh(f"pp={last + 1}"), acquire_devices(STAGES, "cpu").devices[: last + 1])
    specs = (P("pp"), P(), P())
    return jax.shard_map(one_stage, mesh=mesh, in_specs=specs, out_specs=(P(), P("pp")))(w_SDD, inputs_MBD, targets_MBD)


def one_device(w_SDD, inputs_MBD, targets_MBD):
    """(loss, gradient) of the same model with no pipeline."""

    def total(w_SDD):
        x = inputs_MBD
        for w_DD in w_SDD:
            x = layer(w_DD, x)
        return loss_of(x, targets_MBD)

    return jax.value_and_grad(total)(w_SDD)


def relative_error(found, expected) -> float:
    return float(np.linalg.norm(np.asarray(found) - np.asarray(expected)) / np.linalg.norm(expected))


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
    mesh = make_mesh(parse_mesh(f"pp={STAGES}"), acquire_devices(STAGES, "cpu").devices[:STAGES])
    run = jax.shard_map(
        pipeline(layer, loss_of, schedule), mesh=mesh, in_specs=(P("pp"), P(), P()), out_specs=(P(), P("pp"))
    )
    w_SDD, inputs_MBD, targets_MBD = arrays(schedule)

    def reference(w_SDD, inputs_MBD, targets_MBD):
        loss, dw_SDD = one_device(w_SDD[np.argsort(parts)], inputs_MBD, targets_MBD)
        return loss, dw_SDD[np.array(parts)]

    with jax.enable_x64(True):
        args = (w_SDD[np.array(parts)], inputs_MBD, targets_MBD)
        traced = jax.jit(run).trace(*args)
        shape = parse_mesh(f"pp={STAGES}")
        sent = collectives_of(traced.jaxpr, shape, iterations(schedule, (1,) * schedule.num_parts))
        messages = [each for each in sent if each.kind == "permute"]
        return verify_step(run, reference, args).ok, [
            sum(each.sent_by(stage, shape) for each in messages) for stage in range(STAGES)
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
    return Schedule(
        schedule.name, STAGES, MICROBATCHES, 1, schedule.placement, tuple(map(tuple, rows)), fused_backward=False
    )


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


def slow_costs(p: int, slowest: float) -> list[Costs]:
    return [Costs()] * (p - 1) + [Costs(slowest, slowest, slowest)]


# --------------------------------------------------------------------------------------------------------------- run


def run(broken: str | None) -> Result:
    checks, rows = [], []
    for name, v in CHUNKS.items():
        tables = [(p, m, make_schedule(name, p, m)) for p, m in SIZES]
        wrong_bubble = sum(not math.isclose(counted(t)[0], BUBBLE[name](p, m, v)) for p, m, t in tables)
        wrong_held = sum(
            counted(t)[1] != HELD[name](p, m, v) or max(in_flight(t)) != v * HELD[name](p, m, v) for p, m, t in tables
        )
        checks.append(equal(f"{name}: of {len(SIZES)} tables, bubbles that are not the formula's", wrong_bubble, 0))
        checks.append(
            equal(f"{name}: of {len(SIZES)} tables, activations held that are not the formula's", wrong_held, 0)
        )
        for p, m, t in tables:
            if (p, m) in ((4, 8), (4, 32), (8, 32)):
                idle, held = counted(t)
                share = f"{100 * idle / (1 + idle):.1f} %"
                rows.append([name, str(p), str(m), str(v), str(t.num_ticks), f"{100 * idle:.1f} %", share, f"{held:g}"])

    with jax.enable_x64(True):
        for name in ("gpipe", "1f1b", "zb-h1"):
            schedule = make_schedule(name, STAGES, MICROBATCHES)
            if broken == "early" and name == "zb-h1":
                schedule = earlier(schedule, 1, Action(Phase.B, 0, 0))
            dropped = (1, 2) if broken == "dropped" and name == "1f1b" else None
            step = jax.jit(partial(run_table, schedule, dropped))
            w, inputs, targets = arrays(schedule)
            (loss, dw), (expected, expected_dw) = step(w, inputs, targets), one_device(w, inputs, targets)
            error = relative_error(dw, expected_dw)
            checks.append(holds(f"{name}: the checker accepts the table", error_of(schedule) is None))
            checks.append(equal(f"{name}: loss, against one device", float(loss), float(expected), within=1e-12))
            checks.append(at_most(f"{name}: error of the gradient, against one device", error, 1e-12))
            first, trained = float(loss), jnp.asarray(w)
            for _ in range(10):
                trained = trained - 1e-3 * step(trained, inputs, targets)[1]
            fallen = float(step(trained, inputs, targets)[0]) / first
            checks.append(at_most(f"{name}: loss after ten steps over the first", fallen, 0.9))

    volume = MICROBATCHES * ROWS * WIDTH * 8  # a micro-batch is B x D numbers of 8 bytes
    for name, crossings in (("1f1b", 2), ("interleaved", 4), ("zb-v", 4)):
        same, sent = by_the_library(name)
        checks.append(holds(f"{name}: the library's executor equals one device", same))
        # A stage in the middle sends each micro-batch on once a chunk, and its gradient back once a chunk.
        checks.append(equal(f"{name}: bytes that stage 1 sends", sent[1], crossings * volume, unit="bytes"))

    slow_rows = []
    for slowest in (1.0, 1.1, 1.25, 1.5, 2.0):
        table = make_schedule("1f1b", STAGES, 32)
        costs = slow_costs(STAGES, slowest)
        taken = simulate(table, costs, waiting="dependencies")
        expected = with_a_slow_stage(STAGES, 32, slowest)
        checks.append(
            equal(f"1f1b, one stage takes {slowest:g} times as long: ticks", taken.makespan, expected, within=1e-9)
        )
        slow_rows.append([f"{slowest:g}", f"{taken.makespan:g}", f"{expected:g}", f"{100 * taken.idle_share:.1f} %"])
    balanced = divide_layers(14, STAGES, last=2)
    pace = max(*balanced[:-1], balanced[-1] + 2)
    checks.append(
        equal("14 layers and a head that costs 2, balanced: work of the slowest stage", pace, (14 + 2) / STAGES)
    )

    early = earlier(make_schedule("zb-h1", STAGES, MICROBATCHES), 1, Action(Phase.B, 0, 0))
    checks.append(refused("the checker refuses a B one tick early", error_of(early), "it needs B of micro-batch 0"))
    mine = parse(MINE)
    with jax.enable_x64(True):
        (_, dw), (_, expected_dw) = run_table(mine, None, *arrays(mine)), one_device(*arrays(mine))
        error = relative_error(dw, expected_dw)
    checks.append(at_most("a table of our own: error of the gradient, against one device", error, 1e-12))
    if broken:
        return Result(checks)

    ms = (4, 8, 16, 32, 64)
    six = 6 * 4096 * 1 * 34 * 4096 / 2**30  # GiB of six layers of 34 s b h bytes (selective recomputation)
    return Result(
        checks,
        tables=[
            Table(
                "schedules",
                ["schedule", "p", "m", "v", "ticks", "idle / work", "share of time", "activations held"],
                rows,
            ),
            Table("slow", ["k of the slowest stage", "ticks, simulated", "3(mk + p - 1)", "idle share"], slow_rows),
            Table(
                "mine",
                ["stage", *[str(tick) for tick in range(mine.num_ticks)]],
                [
                    [str(s), *[f"{row[s].phase.name}{row[s].microbatch}" if row[s] else "·" for row in mine.table]]
                    for s in range(2)
                ],
            ),
        ],
        pictures={
            "bubble": partial(
                drawing.lines,
                "Idle share of 4 stages (from the tables)",
                "micro-batches",
                "% of the step",
                {name: (ms, [100 * idle_share(name, STAGES, m) for m in ms]) for name in CHUNKS if name != "gpipe"},
                log_x=True,
            ),
            "held": partial(
                drawing.lines,
                "Activations on the fullest of 4 stages",
                "micro-batches",
                "of a stage, for one micro-batch",
                {
                    n: (ms, [counted(make_schedule(n, STAGES, m))[1] for m in ms])
                    for n in ("gpipe", "interleaved", "1f1b")
                },
                log_x=True,
            ),
            **{
                f"{name}-wide": partial(
                    timeline, make_schedule(name, STAGES, MICROBATCHES), Costs(), "simulated, equal costs"
                )
                for name in ("gpipe", "1f1b", "zb-h1")
            },
        },
        guesses={
            "share": 100 * idle_share("1f1b", 4, 8),
            "held": counted(make_schedule("1f1b", 4, 8))[1],
            "needed": next(m for m in range(1, 1000) if BUBBLE["1f1b"](8, m, 1) <= 0.05),
            "saved": 100 * (1 - make_schedule("zb-h1", 8, 32).num_ticks / make_schedule("1f1b", 8, 32).num_ticks),
            "slow": 100 * (with_a_slow_stage(4, 32, 1.25) / with_a_slow_stage(4, 32, 1.0) - 1),
            "gib": 4 * six,
        },
    )


def idle_share(name: str, p: int, m: int) -> float:
    return simulate(make_schedule(name, p, m)).idle_share


LAB = Lab(
    name="pipelines",
    title="Pipelines",
    question="How long do the stages of a pipeline wait for each other, what does waiting less cost in memory, and how "
    "is it known that a schedule computes the right gradient?",
    run=run,
    breaks={
        "dropped": {"1f1b: error of the gradient, against one device"},
        "early": {"zb-h1: the checker accepts the table", "zb-h1: error of the gradient, against one device"},
    },
    devices=STAGES,
)
