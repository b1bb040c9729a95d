"""The answers of a plan: one cluster, one layout, several batches, the cheapest cluster of any size and card."""

import itertools
import math
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from jaxdist.errors import ConfigError, divisors
from jaxdist.mesh import MeshShape
from jaxdist.models.attention_choice import LONG
from jaxdist.models.declared import check_split
from jaxdist.plan import explain
from jaxdist.plan.cost import CENTURY_HOURS, duration
from jaxdist.plan.explain import billions, gib
from jaxdist.plan.fit_remat import with_arrays
from jaxdist.plan.hardware import Accelerator, Cluster, load_hardware
from jaxdist.plan.parts import work_of
from jaxdist.plan.search import (
    INTEGERS,
    Candidates,
    Fixed,
    Found,
    Scored,
    complexity,
    has_layout,
    memory_time_front,
    pareto,
    rank,
    score,
    search,
    simplest,
    simplest_of_each_mesh,
    usable_bytes,
)
from jaxdist.runtime.budget import short_money
from jaxdist.strategy import ParallelConfig

from .plan_question import (
    LAYOUT_FLAGS,
    MOST_DEVICES,
    PASSED_ON,
    Estimate,
    PlanFlags,
    Question,
    ask,
    batch_for,
    cluster_of_mesh,
    estimate,
)
from .plan_report import BATCH_MARGIN, Plan, row_of
from .progress import Progress


def find(question: Question, num_nodes: int) -> Found:
    cluster, fixed = question.cluster(num_nodes), Fixed.join(question.fixed.values())
    require_layouts(question, cluster)
    with Progress(f"searching layouts of {cluster.num_devices:,} devices, meshes") as progress:
        found = search(
            question.base,
            cluster,
            question.attention,
            question.efficiency,
            progress=progress.update,
            fixed=fixed,
        )
    if fixed.columns.keys() & {"every", "selective", "recompute"}:
        return found
    with Progress("choosing what backward repeats"):
        return with_arrays(found, question.attention, question.efficiency, fixed)


def require_layouts(question: Question, cluster: Cluster) -> None:
    """Refuse settings that no layout has. Raises: ConfigError naming the fewest of them that contradict each other."""
    fixed = question.fixed
    if not fixed or has_layout(question.base, cluster, Fixed.join(fixed.values())):
        return
    subsets = (names for number in range(1, len(fixed) + 1) for names in itertools.combinations(fixed, number))
    names = next(n for n in subsets if not has_layout(question.base, cluster, Fixed.join(fixed[name] for name in n)))
    axes = Fixed.join(fixed[name] for name in names).axes
    mesh = MeshShape(**({"dp": axes.get("ep", 1)} | axes))
    check_split(question.base.model, ParallelConfig(mesh))  # which may say why
    why = f"; cp is for sequences of {LONG:,} and more" if "cp" in " ".join(names) else ""
    raise ConfigError(
        f"{' with '.join(names)} on {cluster.num_devices} devices",
        f"must leave a layout of {question.base.model.describe()} in batches of {question.base.batch_size:,}, and none "
        f"has {['it', 'both', 'all'][min(len(names), 3) - 1]}{why}",
        f"Leave {'one of them' if len(names) > 1 else 'it'} out, or use another batch or number of devices",
    )


def find_fitting(question: Question, num_nodes: int) -> Found | None:
    """None where no layout fits, or none divides the model and the batch over so many nodes."""
    try:
        found = find(question, num_nodes)
    except ConfigError:
        return None
    return found if found.num_fitting else None


def plan_for(question: Question, num_nodes: int, top: int, found: Found | None = None) -> Plan:
    """The layouts of a cluster that are worth a look, the one to run first. found: the search, where it is done.

    Raises: ConfigError where nothing fits, with the nearest thing that does.
    """
    start = time.perf_counter()
    found = found or find(question, num_nodes)
    if not found.num_fitting:
        raise ConfigError(*explain.nothing_fits(found, lambda: nearest(question, num_nodes)))
    took, order, best = time.perf_counter() - start, rank(found), chosen(question, found)
    order = np.array([best, *order[order != best]])
    sentences = explain.explain(found, order, question.attention, question.efficiency)
    sentences += price_of_what_is_fixed(question, found, num_nodes)
    rows = worth_showing(found, best, question.within)[:top]
    front = [row_of(question, found, group) for group in folded(found, memory_time_front(found))]
    return Plan(question, found, found.num_layouts, found.num_fitting, rows, front, sentences, took)


def chosen(question: Question, found: Scored) -> int:
    """The layout to run: the simplest that is about as fast as the fastest, and meets the limits if one does."""
    meets = [not misses(question, estimate(question, found, index)) for index in range(len(found))]
    return simplest(found, question.within, np.array(meets))


def worth_showing(found: Scored, best: int, within: float) -> list[list[int]]:
    """The layout to run, then the simplest about as fast as the fastest of each other mesh, by time; none that is
    slower, larger and more complex than another, unless only time counts (`within` 0)."""
    mesh = found.layouts.mesh(best)
    others = [index for index in simplest_of_each_mesh(found, within) if found.layouts.mesh(index) != mesh]
    groups = folded(found, [best, *others])
    firsts = np.array([group[0] for group in groups])
    columns = found.time.total[firsts], found.memory.total[firsts], complexity(found)[firsts]
    return [groups[place] for place in sorted(pareto(*columns))] if within else groups


def price_of_what_is_fixed(question: Question, found: Found, num_nodes: int) -> list[str]:
    """How much faster the best layout would be without."""
    if not question.fixed or (free := find_fitting(replace(question, fixed={}), num_nodes)) is None:
        return []

    def cost(some: Scored) -> float:  # of the fastest of both
        return float(some.time.total[rank(some)[0]]) / float(free.time.total[best]) - 1

    best, words = int(rank(free)[0]), ", ".join(question.fixed)
    if cost(found) < 1e-6:
        return [f"Fixed: {words}. The fastest of all layouts has that."]
    alone = {}
    for name, fixed in question.fixed.items() if len(question.fixed) > 1 else ():
        one = find_fitting(replace(question, fixed={name: fixed}), num_nodes)
        alone[name] = "does not fit" if one is None else f"{cost(one):.1%}"
    each = f" ({', '.join(f'{name} alone: {price}' for name, price in alone.items())})" if alone else ""
    return [
        f"Fixed: {words}. That costs {cost(found):.1%}{each}; the fastest of all is {explain.layout_flags(free, best)}."
    ]


def of_batches(questions: list[Question], num_nodes: int, top: int) -> Plan:
    """The plan of the smallest batch that takes at most BATCH_MARGIN more time a token than the fastest, with the best
    layout of each.

    Raises: ConfigError where nothing fits with any of them, as for the first.
    """
    rows, without = [], []
    for question in questions:
        if (found := find_fitting(question, num_nodes)) is None:
            without.append(f"{question.base.batch_size:,}")
        else:
            row = row_of(question, found, [chosen(question, found)])
            rows.append((row["step_seconds"] / question.base.batch_size, question, row))
    most = min((time for time, _, _ in rows), default=0.0) * (1 + BATCH_MARGIN)
    plan = plan_for(next((question for time, question, _ in rows if time <= most), questions[0]), num_nodes, top)
    said = [f"No layout fits that divides a batch of {' or '.join(without)} sequences."] if without else []
    said += [
        f"Planned is the smallest batch that takes at most {BATCH_MARGIN:.0%} more time a token than the fastest. How "
        "many tokens a larger batch needs for the same loss, a plan does not know (arXiv 1812.06162)."
    ]
    tables = {"Best of each batch": [row for _, _, row in rows]}
    return replace(plan, tables=tables, sentences=[*said, *plan.sentences])


def folded(found: Scored, indices: Iterable[int]) -> list[list[int]]:
    """Layouts in groups that differ in replica × dp alone, in the order of each group's first."""
    layouts, groups = found.layouts, {}
    same = [getattr(layouts, name) for name in INTEGERS if name not in ("replica", "dp")]
    for index in map(int, indices):
        groups.setdefault(tuple(int(column[index]) for column in same), []).append(index)
    return list(groups.values())


def nearest(question: Question, num_nodes: int) -> str:
    """What would make it fit: more nodes, or another accelerator's memory."""
    for nodes in (num_nodes * 2, num_nodes * 4, num_nodes * 8, num_nodes * 16):
        if nodes * question.cluster(1).num_devices <= MOST_DEVICES and find_fitting(question, nodes):
            return f"Use --nodes {nodes}, or accelerators with more memory"
    return "Use accelerators with more memory, a smaller model, or a larger --global-batch, which allows more nodes"


# ------------------------------------------------------------------------------------------------- clusters compared

# Numbers of nodes that are tried: all up to 8, then four of each doubling, and those between the last two that matter.
COUNTS = (1, 2, 3, *(count << doubled for doubled in range(11) for count in (4, 5, 6, 7)))


class Option(NamedTuple):
    """A cluster, with the layout to run on it."""

    question: Question
    found: Found
    row: dict
    run: Estimate

    @property
    def misses(self) -> bool:
        return misses(self.question, self.run)

    @property
    def price(self) -> tuple[float, float]:
        """What to compare clusters by: dollars where a price is known, else devices, then the time."""
        cost = self.run.cluster.num_devices if self.run.cost is None else self.run.cost.dollars
        return cost, self.run.step_seconds if self.run.hours is None else self.run.hours


def of_clusters(flags: PlanFlags, questions: Sequence[Question]) -> Plan:
    """The plan for the cheapest cluster of these cards (without a price the smallest) that meets the deadline and the
    budget, with all that were tried, by price.

    Raises: ConfigError where none does, saying what would be needed.
    """
    start, options, notes = time.perf_counter(), [], []
    for question in sorted(questions, key=lambda question: ideal_dollars(question) or 0):
        least = ideal_dollars(question)
        cheapest = min((each.run.cost.most for each in options if not each.misses and each.run.cost), default=math.inf)
        if least is not None and least > cheapest:
            notes.append(
                f"{question.hardware.name} is not searched: its products alone would cost {short_money(least)}."
            )
            continue
        options += tried(flags, question)
    met = [option for option in options if not option.misses]
    if not met:
        cards = " or ".join(question.hardware.name for question in questions)
        raise ConfigError(*impossible(questions[0], [option.run for option in options], cards))
    best = min(met, key=lambda option: option.price)
    plan = plan_for(best.question, best.run.cluster.num_nodes, flags.top, best.found)
    took = time.perf_counter() - start
    limited = flags.deadline is not None or flags.budget is not None
    rows = [option.row | {"limits": verdict(option) * limited} for option in sorted(options, key=lambda o: o.price)]
    title = f"Clusters by {'price' if best.run.cost else 'devices'}"
    return replace(plan, tables={title: rows}, sentences=[*plan.sentences, *notes], search_seconds=took)


def tried(flags: PlanFlags, question: Question) -> list[Option]:
    """Clusters of one card: the smallest that meets the limits, smaller ones, and with a price some up to twice it."""
    found: dict[int, Option | None] = {}

    def meets(nodes: int) -> bool:
        if nodes not in found:
            found[nodes] = with_nodes(flags, question, nodes)
        return found[nodes] is not None and not found[nodes].misses

    def options() -> list[Option]:
        return [found[nodes] for nodes in sorted(found) if found[nodes] is not None]

    def hopeless() -> bool:
        """More nodes cost more, and what these cost is too much."""
        costs = [each.run.cost for each in options() if each.run.cost is not None]
        return len(costs) > 1 and costs[-2].most <= costs[-1].most and costs[-1].most > (question.budget or math.inf)

    if flags.nodes is not None or not flags.looks_for_nodes:
        meets(flags.nodes or 1)
        return options()
    devices = question.cluster(1).num_devices
    most = min(COUNTS[-1], question.base.batch_size * 1024 // devices, MOST_DEVICES // devices)
    allowed = [nodes for nodes in COUNTS if nodes <= most] or [1]
    counts = [nodes for nodes in allowed if nodes >= fewest_nodes(question)] or allowed[-1:]
    first = next((nodes for nodes in itertools.takewhile(lambda _: not hopeless(), counts) if meets(nodes)), None)
    if first is None:
        if not options():
            next((nodes for nodes in reversed(allowed) if meets(nodes) or options()), None)  # one that fits, to be told
        return options()
    below = max((nodes for nodes in found if nodes < first), default=0)
    while first - below > 1:  # fewer miss, so the smallest is found by halving
        middle = (first + below) // 2
        first, below = (middle, below) if meets(middle) else (first, middle)
    for nodes in counts if question.dollars_per_hour is not None else ():
        if first < nodes <= 2 * first and not hopeless():
            meets(nodes)
    return options()


def ideal_hours(question: Question) -> float:
    """Hours of the run on one node, were all of it its products at the efficiency of large ones."""
    hardware, base = question.hardware, question.base
    flops = question.tokens * work_of(base.model).flops_per_token
    dtype = question.efficiency.matmul_dtype or base.precision.dtype
    rate = hardware.peak(dtype) * question.efficiency.matmul * question.cluster(1).num_devices
    return flops / rate / 3600


def ideal_dollars(question: Question) -> float | None:
    """The same in dollars, on any number of nodes; None without a price or tokens."""
    if question.dollars_per_hour is None or question.tokens is None:
        return None
    return ideal_hours(question) * question.cluster(1).num_devices * question.dollars_per_hour


def fewest_nodes(question: Question) -> int:
    """The least number of nodes that could meet the deadline."""
    return max(1, math.ceil(ideal_hours(question) / min(question.hours or CENTURY_HOURS, CENTURY_HOURS)))


def with_nodes(flags: PlanFlags, question: Question, nodes: int, **changes) -> Option | None:
    """The same question of so many nodes, in a batch that they divide, with flags changed; None where nothing fits."""
    cluster = question.cluster(nodes)
    given = flags.batch_size is not None or flags.batch_sizes is not None
    size = changes.pop("batch_size", question.base.batch_size if given else None)
    batch = size and batch_for(size, cluster.num_devices, nodes)
    same = {"tokens": question.tokens, "steps": None} if flags.steps is not None else {}
    flags = replace(flags, hardware=question.hardware.name, nodes=nodes, batch_size=batch, **(same | changes))
    if question.fixed:  # a mesh that fills fewer nodes would name a whole layout
        flags = replace(flags, **{name: getattr(PlanFlags, name) for name in (LAYOUT_FLAGS - PASSED_ON) | {"mesh"}})
    asked = replace(ask(flags), fixed=question.fixed)
    if batch != size:
        asked.notes.append(
            f"--batch-size {batch:,}: {size:,} sequences do not divide over {cluster.num_devices:,} devices."
        )
    if (found := find_fitting(asked, nodes)) is None:
        return None
    index = chosen(asked, found)
    return Option(asked, found, row_of(asked, found, [index]), estimate(asked, found, index))


def verdict(option: Option) -> str:
    run, question = option.run, option.question
    late = question.hours is not None and run.hours > question.hours
    dear = question.budget is not None and run.cost.dollars > question.budget
    return "missed" if late or dear else "missed by the bar" if option.misses else "met"


def what_if(flags: PlanFlags, plan: Plan) -> Plan:
    """The plan with the best layouts of a few questions beside the one that was asked."""
    question, cluster = plan.question, plan.found.cluster
    nodes, batch, length = cluster.num_nodes, question.base.batch_size, question.base.model.seq_len
    flags = replace(flags, deadline=None, budget=None, what_if=False)
    cases = {
        "twice the batch": partial(with_nodes, flags, question, nodes, batch_size=2 * batch),
        "twice the sequence": partial(
            with_nodes, flags, question, nodes, seq_len=2 * length, batch_size=max(batch // 2, 1)
        ),
    }
    if nodes > 1:
        cases["a node fewer"] = partial(with_nodes, flags, question, nodes - 1)
    per_node = cluster.devices_per_node
    if (even := 1 << (per_node.bit_length() - 1)) < per_node:  # a rack of 72, which models of 64 heads divide badly
        part = replace(flags, devices_per_node=even), replace(question, devices_per_node=even)
        cases[f"on {even} of a node's {per_node}"] = partial(with_nodes, *part, nodes)
    if (card := next_card(question, flags.hardware_file)) is not None:
        other = replace(question, hardware=card)
        unpriced = replace(flags, vendor=None, price_per_hour=None, price_file=None)
        nodes = max(1, cluster.num_devices // other.cluster(1).num_devices)
        cases[f"on {card.name}, without a price"] = partial(with_nodes, unpriced, other, nodes)
    rows, said = [row_of(question, plan.found, plan.groups[0][:1]) | {"what if": "as planned"}], []
    for name, case in cases.items():
        try:
            option, why = case(), "no layout fits"
        except ConfigError as error:
            option, why = None, str(error)
        rows += [option.row | {"what if": name}] if option is not None else []
        said += [f"What if {name}: {why.removesuffix('.')}."] if option is None else []
    return replace(plan, tables={**plan.tables, "What if": rows}, sentences=[*plan.sentences, *said])


def next_card(question: Question, hardware_file: str | None) -> Accelerator | None:
    """The next faster accelerator of the table that is of the same kind."""
    cards, dtype = load_hardware(hardware_file), question.base.precision.dtype
    here = cards[question.hardware.name]  # with all of its memory, whatever --max-gib allows
    faster = [
        card
        for card in cards.values()
        if ("TPU" in card.title) == ("TPU" in here.title)
        and (card.peak_flops.get(dtype, 0), card.memory_bytes) > (here.peak(dtype), here.memory_bytes)
    ]
    return min(faster, key=lambda card: (card.peak_flops[dtype], card.memory_bytes), default=None)


def misses(question: Question, run: Estimate) -> bool:
    """Whether the upper end of the bar exceeds the deadline, the budget or a century."""
    late = run.most_hours is not None and run.most_hours > min(question.hours or CENTURY_HOURS, CENTURY_HOURS)
    dear = question.budget is not None and run.cost is not None and run.cost.most > question.budget
    return late or dear


def impossible(question: Question, tried: list[Estimate], cards: str = "") -> tuple[str, str, str]:
    """(asked, required and why, what would work), every limit rounded up. cards: that were tried."""
    cards = cards or question.hardware.name
    asked = [f"a deadline of {question.hours:g} h"] if question.hours is not None else []
    asked += [f"a budget of {short_money(question.budget)}"] if question.budget is not None else []
    if not tried:
        return (
            f"{' and '.join(asked) or question.base.model.describe()} on {cards}",
            "a layout must fit at some size of cluster, and none does for this model and batch",
            "Use a smaller model, a larger --global-batch (which allows more devices), or more memory a device",
        )
    within = f" with {' and '.join(asked)}" if asked else ""
    asked = f"{billions(question.tokens)} tokens{within} on {cards}"
    quickest = min(tried, key=lambda run: run.most_hours)
    cheapest = quickest if quickest.cost is None else min(tried, key=lambda run: run.cost.most)
    if quickest.most_hours > CENTURY_HOURS:
        return asked, f"must take less than a century: {limits(quickest)}", "Use more --nodes, or fewer --tokens"
    words = f"the fastest is {limits(quickest)}"
    if cheapest is not quickest:
        words += f"; the cheapest is {limits(cheapest)}"

    def remedy(run: Estimate) -> str:
        late = [] if question.hours is None else [f"--deadline {math.ceil(run.most_hours)}h"]
        dear = [] if question.budget is None else [f"--budget {math.ceil(run.cost.most)}"]
        return " with ".join(late + dear)

    choices = [cheapest] * (question.budget is not None) + [quickest] * (question.hours is not None)
    remedies = dict.fromkeys(map(remedy, choices))
    return asked, f"a cluster must meet that, and none tried does: {words}", f"Use {' or '.join(remedies)}"


def limits(run: Estimate) -> str:
    """A cluster, and the upper ends of its bars."""
    words = f"--hardware {run.cluster.hardware.name} --nodes {run.cluster.num_nodes}"
    if run.most_hours <= CENTURY_HOURS:
        words += f" in at most {duration(run.most_hours)}"
    return words + ("" if run.cost is None else f" for at most {short_money(run.cost.most)}")


def check_limits(plan: Plan, named: str) -> None:
    """Refuse a cluster or a layout that the user named and that misses the deadline or the budget."""
    question, run = plan.question, estimate(plan.question, plan.found, plan.best)
    if plan.fits and misses(question, run):
        asked, required, what = impossible(question, [run])
        if question.hours is not None or question.budget is not None:
            what += f", or leave {named} out and the smallest cluster is looked for"
        raise ConfigError(asked, required, what)


def report_layout(flags: PlanFlags, question: Question) -> Plan:
    """The same report for the one layout that --mesh and the other flags name."""
    config = question.base
    devices = config.parallel.mesh.num_devices
    cluster = cluster_of_mesh(flags, question.hardware, devices)
    if devices != cluster.num_devices:
        whole = max(size for size in divisors(devices) if size <= cluster.devices_per_node)
        raise ConfigError(
            f"--mesh {config.parallel.mesh} on {cluster.num_nodes} nodes of {cluster.devices_per_node}",
            f"there must be as many ranks as devices: {devices} and {cluster.num_devices}",
            f"Add --devices-per-node {whole}, or use a mesh of as many ranks",
        )
    start = time.perf_counter()
    found = score(config, Candidates.of(config), cluster, question.attention, question.efficiency)
    sentences = explain.explain(found, np.array([0]), question.attention, question.efficiency)
    if not found.fits[0]:
        needs, usable = float(found.memory.total[0]), usable_bytes(cluster)
        needs = f"It does not fit: {gib(needs)} of {gib(usable)} usable, {gib(needs - usable)} too much."
        with Progress("searching a layout that fits"):
            sentences.insert(0, f"{needs} {explain.what_would_fit(found, question.attention, question.efficiency)}")
    took = time.perf_counter() - start
    return Plan(question, found, 1, int(found.fits[0]), [[0]], [row_of(question, found, [0])], sentences, took)
