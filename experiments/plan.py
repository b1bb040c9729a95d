"""Which layout to run, what it takes and what it costs: every layout of a cluster, predicted and ranked.

python -m experiments.plan --model 7b --hardware h200 --nodes 8
python -m experiments.plan --model 7b --hardware h100 --tokens 300e9 --deadline 30d --price-per-hour 2.5
python -m experiments.plan --model 7b --hardware h200 --mesh dp=8,tp=8 --zero 1
python -m experiments.plan --model 7b --hardware h200 --nodes 8 --compile h200 --prove 3
"""

import itertools
import json
import math
import time
from dataclasses import replace

import numpy as np
from rich.console import Console

from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape
from jaxdist.models.attention_choice import LONG
from jaxdist.plan import explain
from jaxdist.plan.cost import CENTURY_HOURS, duration
from jaxdist.plan.explain import billions, gib
from jaxdist.plan.fit_remat import with_arrays
from jaxdist.plan.hardware import Cluster
from jaxdist.plan.proof.compile import require_compiler, without_devices
from jaxdist.plan.search import (
    INTEGERS,
    Candidates,
    Fixed,
    Found,
    Scored,
    best_of_each_mesh,
    has_layout,
    memory_time_front,
    pareto,
    rank,
    score,
    search,
    usable_bytes,
)
from jaxdist.runtime.budget import short_money
from jaxdist.strategy import ParallelConfig

from .cli import make_folder, require_writable, run_program, write_output
from .plan_page import page
from .plan_prove import prove
from .plan_question import MOST_DEVICES, Estimate, PlanFlags, Question, ask, cluster_of_mesh, estimate, parse_batches
from .plan_report import BATCH_MARGIN, Plan, print_plan, row_of, to_json
from .progress import Progress

MOST_NODES = 4096  # tried for a deadline or a budget
MOST_HALVES = 2  # of the cluster, whose layouts are in the front too


def main(flags: PlanFlags, console: Console) -> int:
    # ---- check everything ----
    batches = parse_batches(flags)
    questions = [ask(replace(flags, batch_size=size, batch_sizes=None)) for size in batches]
    question = questions[0] if batches else ask(flags)
    for name in ("json", "html"):
        require_writable(f"--{name}", getattr(flags, name))
    proving = flags.trace or flags.compile is not None
    if proving:
        if flags.compile is not None:
            require_compiler(flags.compile)
        make_folder("--dump-hlo", flags.dump_hlo)
        without_devices(question.base.parallel.mesh.num_devices * question.cluster(flags.nodes or 1).num_devices)

    # ---- answer ----
    if batches:
        plan = of_batches(questions, flags.nodes or 1, flags.top)
    elif flags.names_layout:
        plan = report_layout(flags, question)
    elif flags.looks_for_nodes:
        plan = smallest_cluster(question, flags.top)
    else:
        plan = plan_for(question, flags.nodes or 1, flags.top)
    check_limits(plan, "--mesh and --nodes" if flags.names_layout else "--nodes")

    # ---- report ----
    record = to_json(plan)
    print_plan(console, plan, record)
    if proving:
        shown = [index for index, *_ in plan.groups[: flags.prove]]
        record["proven"] = prove(console, plan.found, shown, plan.question.attention, flags)
    if flags.json:
        write_output("--json", flags.json, json.dumps(record, indent=1) + "\n")
    if flags.html:
        write_output("--html", flags.html, page(record))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------


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
        return with_arrays(found, question.attention, question.efficiency)


def require_layouts(question: Question, cluster: Cluster) -> None:
    """Refuse settings that no layout has. Raises: ConfigError naming the fewest of them that contradict each other."""
    fixed = question.fixed
    if not fixed or has_layout(question.base, cluster, Fixed.join(fixed.values())):
        return
    subsets = (names for number in range(1, len(fixed) + 1) for names in itertools.combinations(fixed, number))
    names = next(n for n in subsets if not has_layout(question.base, cluster, Fixed.join(fixed[name] for name in n)))
    axes = Fixed.join(fixed[name] for name in names).axes
    question.base.model.check(ParallelConfig(MeshShape(**axes)))  # which may say why
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


def plan_for(question: Question, num_nodes: int, top: int) -> Plan:
    """The ranked layouts of a cluster, and the Pareto front of all clusters up to it.

    Raises: ConfigError where nothing fits, with the nearest thing that does.
    """
    start = time.perf_counter()
    found = find(question, num_nodes)
    order = rank(found)
    if not found.num_fitting:
        raise ConfigError(*explain.nothing_fits(found, lambda: nearest(question, num_nodes)))
    took = time.perf_counter() - start
    rows = folded(found, best_of_each_mesh(found, order[found.fits[order]]))[:top]
    sentences = explain.explain(found, order, question.attention, question.efficiency)
    sentences += price_of_what_is_fixed(question, found, num_nodes)
    front = front_of(question, found)
    return Plan(question, found, found.num_layouts, found.num_fitting, rows, front, sentences, took)


def price_of_what_is_fixed(question: Question, found: Found, num_nodes: int) -> list[str]:
    """How much faster the best layout would be without."""
    if not question.fixed or (free := find_fitting(replace(question, fixed={}), num_nodes)) is None:
        return []

    def cost(some: Scored) -> float:
        return float(some.time.total[rank(some)[0]]) / float(free.time.total[best]) - 1

    best, words = int(rank(free)[0]), ", ".join(question.fixed)
    if cost(found) < 1e-6:
        return [f"Fixed: {words}. The best of all layouts has that."]
    alone = {}
    for name, fixed in question.fixed.items() if len(question.fixed) > 1 else ():
        one = find_fitting(replace(question, fixed={name: fixed}), num_nodes)
        alone[name] = "does not fit" if one is None else f"{cost(one):.1%}"
    each = f" ({', '.join(f'{name} alone: {price}' for name, price in alone.items())})" if alone else ""
    return [
        f"Fixed: {words}. That costs {cost(found):.1%}{each}; the best of all is {explain.layout_flags(free, best)}."
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
            row = row_of(question, found, [int(rank(found)[0])])
            rows.append((row["step_seconds"] / question.base.batch_size, question, row))
    most = min((time for time, _, _ in rows), default=0.0) * (1 + BATCH_MARGIN)
    chosen = next((question for time, question, _ in rows if time <= most), questions[0])
    plan = plan_for(chosen, num_nodes, top)
    said = [f"No layout fits that divides a batch of {' or '.join(without)} sequences."] if without else []
    return replace(plan, batches=tuple(row for _, _, row in rows), sentences=[*said, *plan.sentences])


def folded(found: Scored, indices: np.ndarray) -> list[list[int]]:
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


def front_of(question: Question, found: Found) -> list[dict]:
    """Layouts that no other beats in memory, time and device-seconds at once, on this cluster and its halves."""
    rows = []
    for halves in range(MOST_HALVES + 1):
        nodes = found.cluster.num_nodes >> halves
        here = found if not halves else find_fitting(question, nodes) if nodes else None
        if here is None:
            break
        rows += [row_of(question, here, group) for group in folded(here, memory_time_front(here))]
    columns = [np.array([row[name] for row in rows]) for name in ("memory_bytes", "step_seconds", "device_seconds")]
    return [rows[index] for index in pareto(*columns)]


def smallest_cluster(question: Question, top: int) -> Plan:
    """The plan for the fewest nodes, doubling from one, that meet the deadline and the budget.

    Raises: ConfigError where none does, saying what would be needed.
    """
    tried, nodes = [], 1
    while nodes <= MOST_NODES and question.cluster(nodes).num_devices <= question.base.batch_size * 1024:
        if found := find_fitting(question, nodes):
            tried.append(estimate(question, found, int(rank(found)[0])))
            if not misses(question, tried[-1]):
                return plan_for(question, nodes, top)
        nodes *= 2
    raise ConfigError(*impossible(question, tried))


def misses(question: Question, run: Estimate) -> bool:
    """Whether the upper end of the bar exceeds the deadline, the budget or a century."""
    late = run.most_hours is not None and run.most_hours > min(question.hours or CENTURY_HOURS, CENTURY_HOURS)
    dear = question.budget is not None and run.cost is not None and run.cost.most > question.budget
    return late or dear


def impossible(question: Question, tried: list[Estimate]) -> tuple[str, str, str]:
    """(asked, required and why, what would work), every limit rounded up."""
    asked = [f"a deadline of {question.hours:g} h"] if question.hours is not None else []
    asked += [f"a budget of {short_money(question.budget)}"] if question.budget is not None else []
    if not tried:
        return (
            f"{' and '.join(asked)} on {question.hardware.name}",
            "a layout must fit at some size of cluster, and none does for this model and batch",
            "Use a smaller model, a larger --global-batch (which allows more devices), or more memory a device",
        )
    within = f" with {' and '.join(asked)}" if asked else ""
    asked = f"{billions(question.tokens)} tokens{within} on {question.hardware.name}"
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
    words = f"--nodes {run.cluster.num_nodes}"
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
        raise ConfigError(
            f"--mesh {config.parallel.mesh} on {cluster.num_nodes} nodes of {cluster.devices_per_node}",
            f"there must be as many ranks as devices: {devices} and {cluster.num_devices}",
            "Leave --nodes out, or use a mesh of as many ranks",
        )
    start = time.perf_counter()
    found = score(config, Candidates.of(config), cluster, question.attention, question.efficiency)
    sentences = explain.explain(found, np.array([0]), question.attention, question.efficiency)
    if not found.fits[0]:
        needs = f"It does not fit: {gib(found.memory.total[0])} of {gib(usable_bytes(cluster))} usable."
        with Progress("searching a layout that fits"):
            sentences.insert(0, f"{needs} {explain.what_would_fit(found, question.attention, question.efficiency)}")
    took = time.perf_counter() - start
    return Plan(question, found, 1, int(found.fits[0]), [[0]], [row_of(question, found, [0])], sentences, took)


if __name__ == "__main__":
    run_program(PlanFlags, main, "plan")
