"""Design: from a model, a cluster, a deadline and a budget to a layout on one page, each choice with its number."""

import dataclasses
from collections.abc import Callable
from functools import cache

import numpy as np

from jaxdist.models.declared import num_parameters
from jaxdist.plan import explain
from jaxdist.plan.hardware import Cluster
from jaxdist.plan.program_memory import TERMS
from jaxdist.plan.search import Scored, layouts_of_mesh, rank, score, search, usable_bytes

from .. import plan_answers as plan
from . import drawing
from .lab import Findings, Guesses, Picture, at_most, equal, lab, table

MODEL, BATCH, TOKENS, NODES = "llama3-8b", 128, 100e9, 4
PRICE, DEADLINE, BUDGET = 3.0, 168.0, 16_000.0  # dollars for a GPU and hour, hours, dollars
SLOW = 25e9 / 8  # bytes a second and GPU: the eight of a node share one port of 200 Gb/s
PARTS = ("compute", "memory", "overhead", "tp", "cp", "dp", "pp", "bubble", "input")  # of a step's time, in seconds
AXES = ("pp", "replica", "dp", "cp", "tp")


@cache
def question() -> plan.Question:
    """The run and its means; the cluster's link between nodes is the slow one."""
    means = {"deadline": f"{DEADLINE:g}h", "budget": BUDGET, "price_per_hour": PRICE}
    flags = plan.PlanFlags(model=MODEL, hardware="h100", batch_size=BATCH, tokens=TOKENS, **means)
    asked = plan.ask(flags)
    slow = dataclasses.replace(asked.hardware.between, name="one 200 Gb/s port a node", bytes_per_s=SLOW)
    return dataclasses.replace(asked, hardware=dataclasses.replace(asked.hardware, between=slow))


@cache
def searched(ignored: str | None) -> Scored:
    """The best layouts of every mesh, scored on the cluster, or on one without the thing that is ignored.

    "link": between nodes is as fast as inside. "activations": any number of them fits.
    """
    hardware = question().hardware
    if ignored == "link":
        hardware = dataclasses.replace(hardware, between=hardware.inside)
    if ignored == "activations":
        hardware = dataclasses.replace(hardware, memory_gb=10_000)
    return search(question().base, Cluster(hardware, NODES), question().attention, question().efficiency)


def chosen(ignored: str | None) -> Scored:
    """The fastest layout that fits, for all that the search was told: one row, scored on the real cluster."""
    found = searched(ignored)
    fits = found.fits
    if ignored == "activations":
        fits = found.memory.parameters + found.memory.optimizer + found.memory.gradients <= usable_bytes(cluster())
    index = int(np.where(fits, found.time.total, np.inf).argmin())
    return score(question().base, found.layouts.take([index]), cluster(), question().attention, question().efficiency)


def cluster() -> Cluster:
    return question().cluster(NODES)


def parts_of(scored: Scored, index: int) -> dict[str, float]:
    return {part: float(np.broadcast_to(getattr(scored.time, part), len(scored))[index]) for part in PARTS}


def gib(num_bytes: float) -> float:
    return float(num_bytes) / 2**30


# -------------------------------------------------------------------------------------------------------- runners-up


@cache
def of_the_mesh() -> Scored:
    """Every layout of the chosen mesh."""
    mesh = {axis: int(getattr(chosen(None).layouts, axis)[0]) for axis in ("pp", "replica", "dp", "ep", "cp", "tp")}
    blocks = layouts_of_mesh(question().base.model, mesh, BATCH)
    asked = question()
    return Scored.join([score(asked.base, block, cluster(), asked.attention, asked.efficiency) for block in blocks])


def alternatives() -> list[tuple[str, Scored, int]]:
    """(name, layouts, index) of the fastest layout that makes one choice otherwise; of those that fit, if any do."""
    others: list[tuple[str, Scored, Callable[[Scored], np.ndarray]]] = [
        ("no tensor parallelism", searched(None), lambda s: s.layouts.tp == 1),
        ("tp over a whole node", searched(None), lambda s: s.layouts.tp == 8),
        ("a pipeline of two stages", searched(None), lambda s: s.layouts.pp == 2),
        ("a pipeline over all nodes", searched(None), lambda s: s.layouts.pp == 4),
        ("without ZeRO", of_the_mesh(), lambda s: s.layouts.zero == 0),
        ("ZeRO-3", of_the_mesh(), lambda s: s.layouts.zero == 3),
        ("recomputing blocks", of_the_mesh(), lambda s: s.layouts.every == 1),
        ("messages not overlapped", of_the_mesh(), lambda s: s.layouts.overlap == 0),
    ]
    found = []
    for name, scored, wanted in others:
        mask = wanted(scored) & scored.fits if (wanted(scored) & scored.fits).any() else wanted(scored)
        found.append((name, scored, int(np.where(mask, scored.time.total, np.inf).argmin())))
    return found


def why_it_loses(scored: Scored, index: int) -> str:
    """The term that costs most more than the chosen layout's, or the memory that is not there."""
    if not scored.fits[index]:
        return f"does not fit: {gib(scored.memory.total[index]):.1f} of {gib(usable_bytes(cluster())):.1f} GiB"
    ours, theirs = parts_of(chosen(None), 0), parts_of(scored, index)
    part = max(PARTS, key=lambda part: theirs[part] - ours[part])
    return f"{part}: {theirs[part]:.2f} s for {ours[part]:.2f} s"


# --------------------------------------------------------------------------------------------------------------- run


@lab(
    title="A design on one page",
    question="Llama 3 8B, 100 billion tokens, four nodes of H100s with a slow link, a week and $16,000: which layout, "
    "and why no other?",
    breaks={
        "activations": {"memory of a device"},
        "link": {"step: no layout*", "*, upper end of the bar"},
    },
)
def run(broken: str | None) -> Findings:
    best = chosen(broken)
    estimate, layout = plan.estimate(question(), best, 0), best.layouts
    all_found = searched(None)
    fastest = float(all_found.time.total[rank(all_found)[0]])
    steps = TOKENS / (BATCH * question().base.model.seq_len)
    state = 12 * num_parameters(question().base.model) / (NODES * 8 / int(layout.replica[0]))
    devices = int(np.prod([int(getattr(layout, axis)[0]) for axis in AXES]))
    terms = {term: gib(getattr(best.memory, term)[0]) for term in TERMS}
    usable, total, most = gib(usable_bytes(cluster())), gib(best.memory.total[0]), estimate.cost.most
    sharded = "masters and moments: 12 bytes over the devices that shard them"
    dollars = NODES * 8 * PRICE * estimate.hours
    yield equal("devices: the product of the axes", devices, NODES * 8)
    yield equal("micro-batches × rows × data ranks: the batch", batch_of(best), BATCH)
    yield equal(sharded, terms["optimizer"], gib(state), 0.2, "GiB")
    yield equal("memory: the sum of its terms", sum(terms.values()), total, 1e-6, "GiB")
    yield equal("step: the sum of its parts", sum(parts_of(best, 0).values()), estimate.step_seconds, 1e-6, "s")
    yield equal("hours: updates × step", steps * estimate.step_seconds / 3600, estimate.hours, 1e-9, "h")
    yield equal("dollars: devices × price × hours", dollars, estimate.cost.dollars, 1e-9, "$")
    yield at_most("memory of a device", total, usable, "GiB")
    yield at_most("step: no layout that fits is faster", estimate.step_seconds, fastest * (1 + 1e-9), "s")
    yield at_most("hours, upper end of the bar", estimate.most_hours, DEADLINE, "h")
    yield at_most("dollars, upper end of the bar", most, BUDGET, "$")
    if broken:
        return

    parts = {part: seconds for part, seconds in parts_of(best, 0).items() if seconds > 0.005}
    memory, step = (
        ", ".join(f"{name} {x:{form}}" for name, x in of.items()) for of, form in ((terms, ".1f"), (parts, ".2f"))
    )
    page = [
        ["layout", explain.layout_flags(best, 0)],
        ["memory", f"{memory}: {total:.1f} of {usable:.1f} GiB"],
        ["a step", f"{step}: {estimate.step_seconds:.2f} s"],
        ["hours", f"{estimate.hours:.0f}, at most {estimate.most_hours:.0f} of {DEADLINE:.0f}"],
        ["dollars", f"{estimate.cost.dollars:,.0f}, at most {most:,.0f} of {BUDGET:,.0f}"],
    ]
    late = f"{estimate.hours:.0f} to {estimate.most_hours:.0f} h, if it is late"
    dear = f"${BUDGET / most * PRICE:.2f} an hour for a GPU"
    risks = [
        ["memory", f"{usable - total:.1f} GiB left of {usable:.1f}", "and 8 GiB more that no plan fills"],
        ["time", f"± {100 * estimate.error:.0f} %", late],
        ["deadline", f"{DEADLINE - estimate.most_hours:.0f} h left", "at the bar's upper end, for failures"],
        ["price", dear, "from there on the upper end is too dear"],
    ]
    others, runs = [], {"chosen": (best, 0)}
    for name, scored, index in alternatives():
        flags, seconds = explain.layout_flags(scored, index).replace("--", ""), float(scored.time.total[index])
        size, hours = gib(scored.memory.total[index]), question().run_hours(seconds)
        others.append([name, flags, size, seconds, hours, why_it_loses(scored, index)])
        runs |= {name: (scored, index)} if scored.fits[index] else {}
    columns = "otherwise | layout | GiB {:.1f} | step, s {:.2f} | hours {:.0f} | loses by"
    stacked = {
        part: [parts_of(scored, index)[part] for scored, index in runs.values()]
        for part in ("compute", "memory", "tp", "dp", "pp", "bubble")
    }
    title, link = "A step of each design that fits (predicted)", searched("link")
    psi = num_parameters(question().base.model)
    yield table("page", "the design | ", page)
    yield table("others", columns, others)
    yield table("risks", "risk | number | what it means", risks)
    yield Picture("steps", lambda: drawing.stacks(title, "seconds", list(runs), stacked))
    yield Guesses(
        least=gib(16 * psi / 32),
        floor=6 * psi * TOKENS / (32 * 989e12) / 3600,
        allreduce=2 * psi / SLOW,
        link=float(chosen("link").time.total[0]) / float(link.time.total[int(rank(link)[0])]),
        mfu=100 * float(best.time.mfu[0]),
    )


def batch_of(scored: Scored) -> int:
    """Sequences of an update."""
    layout = scored.layouts
    names = ("microbatches", "accumulate", "rows", "dp", "replica")
    return int(np.prod([int(getattr(layout, name)[0]) for name in names]))
