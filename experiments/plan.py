"""Which layout to run, what it takes and what it costs: every layout of a cluster, predicted and ranked.

python -m experiments.plan --model 7b --hardware h200 --nodes 8
python -m experiments.plan --model 7b --hardware h100,h200,a100-80 --tokens 300e9 --deadline 30d --vendor lambda
python -m experiments.plan --model 7b --hardware h200 --mesh dp=8,tp=8 --zero 1
python -m experiments.plan --model 7b --hardware h200 --nodes 8 --compile h200 --prove 3
"""

import json
from dataclasses import replace

from rich.console import Console

from jaxdist.plan.proof.compile import require_compiler, without_devices

from .entry import make_folder, require_writable, run_program, write_output
from .plan_answers import check_limits, of_batches, of_clusters, plan_for, report_layout, what_if
from .plan_page import page
from .plan_prove import prove
from .plan_question import PlanFlags, ask, cards_of, parse_batches
from .plan_report import print_plan, to_json


def main(flags: PlanFlags, console: Console) -> int:
    # ---- check everything ----
    cards, batches = cards_of(flags), parse_batches(flags)
    questions = [ask(replace(flags, hardware=card, batch_size=size, batch_sizes=None))
                 for card in cards for size in batches or [flags.batch_size]]  # fmt: skip
    question = questions[0]
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
    elif flags.looks_for_nodes or len(cards) > 1:
        plan = of_clusters(flags, questions)
    else:
        plan = plan_for(question, flags.nodes or 1, flags.top)
    check_limits(plan, "--mesh and --nodes" if flags.names_layout else "--nodes")
    if flags.what_if:
        plan = what_if(flags, plan)

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


if __name__ == "__main__":
    run_program(PlanFlags, main, "plan")
