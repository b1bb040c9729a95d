"""Cost: FLOPs, MFU, hours and dollars of a run, the smallest cluster for a deadline, and a guard on the budget."""

from decimal import Decimal
from functools import cache

from jaxdist.errors import ConfigError
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.plan.formulas import ModelShape, hfu, mfu, training_days
from jaxdist.plan.hardware import find_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.search import rank
from jaxdist.runtime.budget import SpendLog, begin_job

from .. import plan_answers as plan
from . import drawing
from .lab import Findings, Guesses, Picture, at_most, equal, holds, lab, table
from .tools import new_folder

# Published runs: (name, layers, width, heads, batch, GPUs, seconds a step, MFU %). A100s at 312 TFLOP/s, 2,048 tokens,
# a vocabulary of 51,200 (arXiv 2205.05198, tables 3 to 5, with sequence parallelism and selective recomputation).
PUBLISHED = (
    ("22B", 48, 6144, 64, 4, 8, 1.10, 41.5),
    ("175B", 96, 12_288, 96, 64, 64, 13.75, 51.4),
    ("530B", 105, 20_480, 128, 280, 280, 37.83, 56.0),
    ("1T", 128, 25_600, 160, 512, 512, 71.49, 56.3),
)
FULL_SECONDS = {"22B": 1.42, "175B": 18.13, "530B": 49.05, "1T": 94.42}  # the same with full recomputation
LENGTH, VOCABULARY, A100 = 2048, 51_200, 312e12
# The run that is planned.
MODEL, TOKENS, PRICE, DEADLINE, BUDGET = "llama3-8b", 30e9, 3.0, 96.0, 6_000.0
BATCH = 128


# ------------------------------------------------------------------------------------------------------------- FLOPs


def step_flops(layers: int, width: int, batch: int, again: float = 0.0) -> float:
    """72 B s L h² (1 + s/6h + V/12hL), of Megatron-LM's paper (arXiv 2104.04473). again: recomputed, of 72 B s L h²."""
    layer = 72 * batch * LENGTH * layers * width**2
    return layer * (1 + LENGTH / (6 * width) + VOCABULARY / (12 * width * layers) + again)


def utilisation(run: tuple, seconds: float, again: float = 0.0) -> float:
    """Percent of the peak of all devices."""
    _, layers, width, _, batch, gpus, *_ = run
    return 100 * step_flops(layers, width, batch, again) / seconds / (gpus * A100)


def selective(run: tuple) -> float:
    """What selective recomputation repeats, as its paper counts it: s/6h."""
    return LENGTH / (6 * run[2])


def full(run: tuple) -> float:
    """What full recomputation repeats: another forward, 1/3 of all but the head."""
    return (1 + LENGTH / (6 * run[2])) / 3


# ------------------------------------------------------------------------------------------------------------ the plan


@cache
def question() -> plan.Question:
    means = {"deadline": f"{DEADLINE:g}h", "price_per_hour": PRICE}
    return plan.ask(plan.PlanFlags(model=MODEL, hardware="h100", batch_size=BATCH, tokens=TOKENS, **means))


@cache
def estimates() -> dict[int, plan.Estimate]:
    """By nodes: the fastest layout's time and cost."""
    found = {nodes: plan.find(question(), nodes) for nodes in (1, 2, 4, 8)}
    return {nodes: plan.estimate(question(), each, int(rank(each)[0])) for nodes, each in found.items()}


def smallest(within: float) -> int:
    """Nodes of the smallest cluster whose upper end of the bar meets the deadline; 0 if none does."""
    return next((nodes for nodes, each in estimates().items() if each.most_hours <= within), 0)


# ---------------------------------------------------------------------------------------------------------- the guard


def guarded(settled: bool) -> tuple[Decimal, Decimal, str]:
    """(spent after a crash, spent at the end, what the second job is told) under a ceiling of $3.00.

    The first job reserves $2.10 and crashes after half an hour; the second needs $2.10 too. settled: the first one
    writes what it cost on its way out.
    """
    log = SpendLog(str(new_folder() / "spend.jsonl"))
    log.create(Decimal("3.00"))
    clock = [0.0]
    job = begin_job(log, num_devices=2, price_per_hour="0.35", hours="3", signals=(), now=lambda: clock[0])
    try:
        if settled:
            with job:
                clock[0] = 1800.0
                raise RuntimeError("the job crashes")
        raise RuntimeError("the job crashes, and its process is gone")
    except RuntimeError:
        after = log.spent()
    try:
        with begin_job(log, num_devices=2, price_per_hour="0.35", hours="3", signals=(), now=lambda: clock[0]):
            clock[0] += 3600.0
        said = "it runs"
    except ConfigError as error:
        said = str(error)
    return after, log.spent(), said


# --------------------------------------------------------------------------------------------------------------- run


def published_runs(recomputed: bool) -> Findings:
    rows = []
    for published in PUBLISHED:
        name, layers, width, heads, batch, gpus, seconds, known = published
        shape = ModelShape.gpt(layers, width, heads, LENGTH, VOCABULARY)
        rate, slow = batch * LENGTH / seconds, FULL_SECONDS[name]
        ours = utilisation(published, seconds, selective(published) * recomputed)
        slower = utilisation(published, slow, full(published) * recomputed)
        library = 100 * mfu(shape, rate, A100, gpus).value
        yield equal(f"{name}: MFU, as published", ours, known, within=0.01, unit="%")
        yield equal(f"{name}: MFU, by the library", library, known, within=0.01, unit="%")
        faster = f"{ours:.1f} %, {slower:.1f} %"
        yield holds(f"{name}: the faster run has the higher utilisation", ours > slower, faster)
        hardware = 100 * hfu(shape, rate, A100, gpus, remat="selective").value
        again = utilisation(published, slow, full(published))
        rows.append([name, seconds, ours, hardware, slow, utilisation(published, slow), again])
    columns = "MFU {:.1f} | HFU {:.1f} | full, s {:g} | MFU, full {:.1f} | HFU, full {:.1f}"
    yield table("mfu", f"model | selective, s {{:g}} | {columns}", rows)


@lab(
    title="What a run costs",
    question="What will a run cost before it starts, how well are the devices used, and who stops it at the budget?",
    breaks={
        "recomputed": {"*: MFU, as published", "530B: the faster*"},
        "node": {"cost by hand*"},
        "unsettled": {"spent after a crash*", "the next job may run"},
    },
)
def run(broken: str | None) -> Findings:
    yield from published_runs(broken == "recomputed")
    nodes = smallest(DEADLINE)
    chosen, half = estimates()[nodes], estimates()[nodes // 2]
    per_node = find_hardware("h100").devices_per_node
    dollars = nodes * (1 if broken == "node" else per_node) * PRICE * chosen.hours
    after, end, said = guarded(settled=broken != "unsettled")
    yield at_most(f"{nodes} nodes meet the deadline, with the bar", chosen.most_hours, DEADLINE, "h")
    yield holds(f"half as many nodes, {nodes // 2}, would not", half.most_hours > DEADLINE, f"{half.most_hours:.0f} h")
    yield equal("cost by hand: devices × price × hours", dollars, chosen.cost.dollars, within=1e-9, unit="$")
    yield holds("the bar's upper end is within the budget", dollars * (1 + chosen.error) <= BUDGET)
    yield equal("spent after a crash at half an hour, of $2.10 reserved", float(after), 0.35, unit="$")
    yield holds("the next job may run", said == "it runs", said.partition(", of which")[0])
    yield at_most("spent or reserved at the end, under a ceiling of $3.00", float(end), 3.0, "$")
    if broken:
        return

    by_hand = "hours by hand: 6N × tokens over the MFU that the plan predicts"
    yield equal(by_hand, hours_by_hand(nodes), chosen.hours, 0.15)
    for name, sizes, days in (("175B", (175e9, 300e9, 1024, 140e12), 33.9), ("1T", (1e12, 450e9, 3072, 163e12), 83.2)):
        yield equal(f"{name}: days, as published", training_days(*sizes).value, days, 0.02)
    flops = []
    for name in ("gpt2-124m", "gpt2-1.5b", "llama3-8b", "llama3-70b"):
        parameters, traced = num_parameters(PRESETS[name]), work_of(PRESETS[name]).flops_per_token
        flops.append([name, parameters / 1e9, 6 * parameters / 1e9, traced / 1e9, traced / parameters / 6])
    clusters = [
        [n, n * per_node, e.step_seconds, e.hours, e.most_hours, e.cost.dollars, e.cost.most]
        for n, e in estimates().items()
    ]
    columns = "parameters, 1e9 {:.3g} | 6N, GFLOP {:.3g} | traced, GFLOP {:.3g} | ratio {:.2f}"
    units = "step, s {:.2f} | hours {:.1f} | with the bar {:.1f} | $ {:,.0f} | $, with the bar {:,.0f}"
    yield table("flops", f"model | {columns}", flops)
    yield table("clusters", f"nodes | GPUs | {units}", clusters)
    yield Picture("clusters", draw_clusters)
    yield Guesses(
        hours=6 * 8e9 * 30e9 / (16 * 989e12 * 0.4) / 3600,
        dollars=6 * 8e9 * 30e9 / (989e12 * 0.4) / 3600 * 3,
        hfu=utilisation(PUBLISHED[0], 1.42, full(PUBLISHED[0])),
    )


def hours_by_hand(nodes: int) -> float:
    """6 × N × tokens / (devices × peak × MFU), with attention left out of the FLOPs as 6N does."""
    found = plan.find(question(), nodes)
    predicted = float(found.time.mfu[int(rank(found)[0])])
    hardware = find_hardware("h100")
    devices = nodes * hardware.devices_per_node
    return 6 * num_parameters(PRESETS[MODEL]) * TOKENS / (devices * hardware.peak("bfloat16") * predicted) / 3600


def draw_clusters():
    nodes, found = list(estimates()), estimates().values()
    curves = {
        "hours": (nodes, [each.hours for each in found]),
        "hours, upper end": (nodes, [each.most_hours for each in found]),
        "$ / 100": (nodes, [each.cost.dollars / 100 for each in found]),
    }
    title, y = "30B tokens through an 8B model (predicted, H100)", "hours, or dollars / 100"
    return drawing.lines(title, "nodes of 8 GPUs", y, curves, log_x=True)
