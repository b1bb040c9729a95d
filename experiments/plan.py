"""Which layout to run, what it takes and what it costs: every layout of a cluster, predicted and ranked.

python -m experiments.plan --model 7b --hardware h200 --nodes 8
python -m experiments.plan --model 7b --hardware h100 --tokens 300e9 --deadline 30d --price-per-hour 2.5
python -m experiments.plan --model 7b --hardware h200 --mesh dp=8,tp=8 --zero 1
python -m experiments.plan --model 7b --hardware h200 --nodes 8 --compile h200 --prove 3
"""

import dataclasses
import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, ClassVar, get_args

import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist.commands import install_text
from jaxdist.config import TP_RINGS, Dtype, RunConfig
from jaxdist.errors import MOST, ConfigError
from jaxdist.mesh import MeshShape, parse_mesh
from jaxdist.models.base import num_parameters
from jaxdist.parallel.remat import shorten
from jaxdist.placement import make_layout
from jaxdist.plan import explain
from jaxdist.plan.cost import CENTURY_HOURS, Cost, duration
from jaxdist.plan.explain import NAMES_OF_TERMS, billions, gib, seconds
from jaxdist.plan.fit_remat import fit_remat, with_arrays
from jaxdist.plan.hardware import GIB, Accelerator, Cluster, find_hardware, price
from jaxdist.plan.parts import work_of
from jaxdist.plan.proof.compile import has_cuda_compiler, require_compiler, without_devices
from jaxdist.plan.proof.levels import Levels, levels
from jaxdist.plan.proof.trace import total_sent
from jaxdist.plan.recipe import (
    ADAPTER_STEPS,
    TOKENS_PER_PARAMETER,
    adapter_learning_rate,
    chinchilla_steps,
    learning_rate,
    warmup_steps,
)
from jaxdist.plan.search import (
    INTEGERS,
    Candidates,
    Found,
    Scored,
    best_of_each_mesh,
    memory_time_front,
    pareto,
    rank,
    score,
    search,
    usable_bytes,
)
from jaxdist.plan.time_model import Efficiency, bar_of, efficiency_of, read_efficiency
from jaxdist.plan.traffic import Message, predicted, table
from jaxdist.runtime.budget import short_money

from .cli import (
    CommonFlags,
    ModelName,
    flag_word,
    in_flags,
    make_folder,
    refuse_ignored,
    require_writable,
    run_program,
    write_output,
)
from .config_file import FileFlags
from .plan_command import UNKNOWN_RATE, Command, make_command, rate_note
from .plan_page import page, sp_word
from .progress import Progress
from .tables import print_bullet, print_columns

MOST_NODES = 4096  # tried for a deadline or a budget
MOST_DEVICES = 2**20
MOST_HALVES = 2  # of the cluster, whose layouts are in the front too
DEFAULT_BATCH_TOKENS = 2**20


@dataclass(frozen=True)
class PlanFlags(CommonFlags, FileFlags):
    """Rank every layout of a cluster for a model; with --mesh, report that layout alone. Nothing is run."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("model", "hardware", "nodes", "devices_per_node", "batch_size", "seq_len", "tokens", "deadline", "budget"),
        *("mesh", "zero", "sp", "dtype", "efficiencies", "top", "trace", "compile", "json", "html", "config"),
    )

    model: ModelName = "7b"
    hardware: str = "h100"
    """Accelerator of the hardware table: h100, h200, a100-80, v5p, ..."""
    nodes: int | None = None
    """Default: 1; with --deadline or --budget, the smallest number that meets them."""
    devices_per_node: int | None = None
    """Default: that of the accelerator."""
    batch_size: Annotated[int | None, tyro.conf.arg(aliases=["--global-batch"])] = None
    """Sequences per update, over the whole mesh. Default: about a million tokens, divisible by the devices."""
    batch_sizes: str | None = None
    """Several --batch-size, as in 256,512,1024: each is searched, and the smallest planned that takes at most 2 % more
    time a token than the fastest."""
    steps: int | None = None
    """Updates, instead of --tokens. With neither the command has steps for 20 tokens a parameter."""
    lr: float | None = None
    """Default: GPT-3's for a model of this size, where the optimiser is AdamW."""
    warmup_steps: int | None = None
    """Default: GPT-3's 375 million tokens, at most a tenth of the steps."""
    dtype: Dtype = "bfloat16"
    """Of parameters and activations; masters and moments stay in at least float32."""
    tokens: float | None = None
    """To train on, as in 300e9: gives hours and dollars."""
    deadline: str | None = None
    """As in 72h or 30d; needs --tokens or --steps. The upper end of the error bar must meet it."""
    budget: float | None = None
    """Dollars; needs --tokens or --steps, and a price. The upper end of the error bar must meet it."""
    vendor: str | None = None
    """Whose price of the price table."""
    price_per_hour: float | None = None
    """Dollars for one accelerator, instead of --vendor."""
    hardware_file: str | None = None
    """TOML merged over the hardware table."""
    price_file: str | None = None
    """TOML merged over the price table."""
    efficiencies: str | None = None
    """TOML of the time model's constants, of your own card. Default: fitted to what was published of this one."""
    top: int = 10
    """Rows of the table: the best layouts of so many meshes, meshes that differ in replica × dp alone in one row."""
    json: str | None = None
    """Also write the plan to this file."""
    html: str | None = None
    """Also write a page with pictures to this file."""
    trace: bool = False
    """Also trace the step of the best layout: what it keeps and sends, from the program itself. Of one layout, also
    every message by its purpose."""
    compile: str | None = None
    """Also compile it, with no device present: cpu, an NVIDIA card (h200, ...) or a TPU (v5p, ...). Implies --trace."""
    prove: int = 1
    """How many rows of the table to trace or compile."""
    dump_hlo: str | None = None
    """Folder for the text of compiled programs."""

    def with_remat(self, config: RunConfig, gib: float | None) -> RunConfig:
        """For --hardware, and its memory."""
        hardware = hardware_for(self)
        cluster = cluster_of_mesh(self, hardware, config.parallel.mesh.num_devices)
        limit = usable_bytes(cluster) if gib is None else gib * GIB
        return fit_remat(config, cluster, limit, attention_on(hardware, config), efficiency_for(self, hardware)).config


@dataclass(frozen=True)
class Question:
    """The question, checked: the run without its layout, and the means."""

    base: RunConfig
    hardware: Accelerator
    devices_per_node: int | None
    attention: str
    tokens: float | None
    hours: float | None
    budget: float | None
    dollars_per_hour: float | None
    notes: tuple[str, ...]
    recipe_notes: tuple[str, ...]
    rate_known: bool
    efficiency: Efficiency

    def cluster(self, num_nodes: int) -> Cluster:
        return Cluster(self.hardware, num_nodes, self.devices_per_node)

    def run_hours(self, step_seconds: float) -> float | None:
        """Hours of the whole run."""
        if self.tokens is None:
            return None
        return self.tokens / (self.base.batch_size * self.base.model.seq_len) * step_seconds / 3600


@dataclass(frozen=True)
class Estimate:
    """How long a layout's whole run takes and what it costs, None where that is not asked."""

    cluster: Cluster
    step_seconds: float
    error: float
    hours: float | None
    cost: Cost | None

    @property
    def most_hours(self) -> float | None:
        """The upper end of the bar: what a deadline has to cover."""
        return None if self.hours is None else self.hours * (1 + self.error)


def estimate(question: Question, found: Scored, index: int) -> Estimate:
    step, error = float(found.time.total[index]), float(found.time.error[index])
    hours, cost = question.run_hours(step), None
    if hours is not None and question.dollars_per_hour is not None:
        name, count = found.cluster.hardware.name.upper(), found.cluster.num_devices
        cost = Cost(count, question.dollars_per_hour, hours, question.budget, name, error)
    return Estimate(found.cluster, step, error, hours, cost)


@dataclass(frozen=True, eq=False)
class Plan:
    """The answer: layouts with their scores, what of them is shown, best first, and what is said about it.

    shown: indices. also: for each of them others that differ in replica × dp alone. batches: the best layout of every
    batch that was asked for, the planned one included.
    """

    question: Question
    found: Scored
    num_layouts: int
    num_fitting: int
    shown: list[int]
    also: list[list[int]]
    front: list[dict]
    sentences: list[str]
    search_seconds: float
    batches: tuple[dict, ...] = ()

    @property
    def best(self) -> int:
        return self.shown[0]

    @property
    def fits(self) -> bool:
        return bool(self.found.fits[self.best])

    @cached_property
    def command(self) -> Command:
        config, question = self.found.config(self.best), self.question
        step = float(self.found.time.total[self.best])
        return make_command(config, self.found.cluster, step, question.recipe_notes, question.rate_known)


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
        check_limits(plan.question, plan, "--nodes")
    elif flags.mesh:
        plan = report_layout(flags, question)
        check_limits(question, plan, "--mesh and --nodes")
    elif flags.nodes is None and (flags.deadline or flags.budget is not None):
        plan = smallest_cluster(question, flags.top)
    else:
        plan = plan_for(question, flags.nodes or 1, flags.top)
        check_limits(question, plan, "--nodes")

    # ---- report ----
    print_plan(console, plan)
    record = to_json(plan)
    if proving:
        record["proven"] = prove(console, plan, flags)
    if flags.json:
        write_output("--json", flags.json, json.dumps(record, indent=1) + "\n")
    if flags.html:
        write_output("--html", flags.html, page(record))
    return 0


# ---------------------------------------------------------------------------------------------------------------------
# The question
# ---------------------------------------------------------------------------------------------------------------------

LAYOUT_FLAGS = {
    "zero",
    "sp",
    "cp_kind",
    "experts_over_tp",
    "tp_ring",
    "accumulate",
    "remat",
    "unroll_layers",
    "reshard_after_forward",
    "overlap",
}
PIPELINE = ("schedule", "microbatches", "chunks", "stages")
LAYOUT_FLAGS |= set(PIPELINE)
KEEPS = ("none", "selective")  # of --remat: backward does not run whole blocks again


def ask(flags: PlanFlags) -> Question:
    """Every flag, checked: each is used below, or refused. Raises: ConfigError."""
    refuse_unused(flags)
    check_numbers(flags)
    refuse_idle(flags)
    hardware = hardware_for(flags)
    hours = None if flags.deadline is None else parse_hours(flags.deadline)
    dollars, notes = hourly_price(flags, hardware)
    if flags.batch_size is None:
        batch, note = default_batch(flags, hardware.devices_per_node)
        flags, notes = replace(flags, batch_size=batch), [*notes, note]
    rate_known = flags.lr is not None or flags.optimizer == "adamw"
    flags, tokens, recipe_notes = with_recipe(flags, rate_known)
    config = flags.run_config()
    attention = attention_on(hardware, config)
    if attention == "xla":
        notes.append("Attention writes its scores out (flash attention cannot run here): they count as memory.")
    elif attention == "blocked":
        notes.append("Attention is in blocks of scores (flash attention cannot run here): slower, and none are kept.")
    return Question(
        base=config,
        hardware=hardware,
        devices_per_node=flags.devices_per_node,
        attention=attention,
        tokens=tokens,
        hours=hours,
        budget=flags.budget,
        dollars_per_hour=dollars,
        notes=tuple(notes),
        recipe_notes=tuple(recipe_notes),
        rate_known=rate_known,
        efficiency=efficiency_for(flags, hardware),
    )


def cluster_of_mesh(flags: PlanFlags, hardware: Accelerator, devices: int) -> Cluster:
    """The cluster that --mesh fills, and --nodes may name."""
    per_node = flags.devices_per_node or hardware.devices_per_node
    nodes = flags.nodes or -(-devices // per_node)
    return Cluster(hardware, nodes, min(per_node, devices) if flags.nodes is None else per_node)


def efficiency_for(flags: PlanFlags, hardware: Accelerator) -> Efficiency:
    return read_efficiency(flags.efficiencies) if flags.efficiencies else efficiency_of(hardware.name)


def attention_on(hardware: Accelerator, config: RunConfig) -> str:
    platform = "tpu" if "TPU" in hardware.title else "gpu"
    return config.model.attention_for(config.attention, platform, config.precision.dtype, training=True)


def refuse_unused(flags: PlanFlags) -> None:
    """Refuse a device, and without --mesh the parts of a layout."""
    everything = {field.name for field in dataclasses.fields(flags)} - {"device"}
    refuse_ignored(flags, everything, "a plan runs on no device; its command names one for --hardware")
    if not flags.mesh:
        why = "a layout is searched for, and this names a part of one (--mesh names a whole one)"
        refuse_ignored(flags, everything - LAYOUT_FLAGS | {"device"}, why)


def hardware_for(flags: PlanFlags) -> Accelerator:
    """The accelerator. Raises: ConfigError where it has no peak for --dtype, or there are too many of it."""
    hardware = find_hardware(flags.hardware, flags.hardware_file)
    if flags.dtype not in hardware.peak_flops:
        raise ConfigError(
            f"--dtype {flags.dtype} on {hardware.name}",
            "the hardware table has no peak for it, and without one no time is predicted",
            f"Use {' or '.join(dtype for dtype in get_args(Dtype) if dtype in hardware.peak_flops)}; "
            f"`train` takes {', '.join(get_args(Dtype))}",
        )
    num_devices = (flags.nodes or 1) * (flags.devices_per_node or hardware.devices_per_node)
    if num_devices > MOST_DEVICES:
        raise ConfigError(f"{num_devices:,} devices", f"a plan is for at most {MOST_DEVICES:,}", "Use fewer --nodes")
    return hardware


def hourly_price(flags: PlanFlags, hardware: Accelerator) -> tuple[float | None, list[str]]:
    """(dollars for one accelerator, None where no flag says; what is to be said about them)."""
    dollars, notes = flags.price_per_hour, []
    if flags.vendor is not None:
        listed = price(hardware.name, flags.vendor, path=flags.price_file)
        dollars, notes = listed.dollars_per_hour, [listed.warning] if listed.warning else []
    if flags.budget is not None and dollars is None:
        raise ConfigError(
            "--budget", "a budget needs a price, which must be given", "Add --price-per-hour 2.5, or --vendor"
        )
    return dollars, notes


def with_recipe(flags: PlanFlags, rate_known: bool) -> tuple[PlanFlags, float | None, list[str]]:
    """The flags with steps, learning rate and warm-up; the tokens asked for; a sentence for each default."""
    model, notes = flags.model_config(), []
    batch_tokens, parameters = flags.batch_size * model.seq_len, num_parameters(model)
    tokens, steps, rate, warmup = flags.tokens, flags.steps, flags.lr, flags.warmup_steps
    if tokens is not None:
        steps = math.ceil(tokens / batch_tokens)
        if steps > MOST:
            raise ConfigError(
                f"{tokens:g} tokens in batches of {batch_tokens:,}",
                f"they are {steps:,} steps, and a run has at most {MOST:,}",
                "Use fewer --tokens, or a larger --batch-size",
            )
    elif steps is not None:
        tokens = steps * batch_tokens
    elif flags.lora:
        steps = ADAPTER_STEPS
        notes.append(
            f"--steps {steps}: assumed, for neither --tokens nor --steps says how much there is to learn from."
        )
    else:
        steps = chinchilla_steps(parameters, batch_tokens)
        notes.append(
            f"--steps {steps}: {TOKENS_PER_PARAMETER} tokens a parameter (arXiv 2203.15556), neither --tokens nor "
            "--steps is given."
        )
    if rate is None and flags.lora and rate_known:
        rate = adapter_learning_rate(parameters)
        notes.append(f"--lr {rate:g}: that of adapters of a model of this size in arXiv 2305.14314, appendix B; AdamW.")
    elif rate is None:
        rate = learning_rate(parameters) if rate_known else CommonFlags.lr
        notes.append(rate_note(rate, parameters) if rate_known else UNKNOWN_RATE)
    if warmup is None:
        warmup = warmup_steps(batch_tokens, steps)
        notes.append(
            f"--warmup-steps {warmup}: GPT-3's 375 million tokens, at most a tenth of the steps (arXiv 2005.14165)."
        )
    return replace(flags, steps=steps, lr=rate, warmup_steps=warmup), tokens, notes


BOUNDS = {
    "batch_size": 2**24,
    "accumulate": 2**24,
    "microbatches": 2**16,
    "chunks": 10**4,
    "loss_chunks": 10**8,
    "nodes": MOST_DEVICES,
    "devices_per_node": MOST_DEVICES,
    "top": 10_000,
    "prove": 10_000,
    "steps": 10**15,
    "tokens": 1e18,
    "budget": 1e12,
    "price_per_hour": 1e4,
}


def check_numbers(flags: PlanFlags) -> None:
    for name, most in BOUNDS.items():
        value = getattr(flags, name)
        if value is not None and not 0 < value <= most:
            flag = f"--{name.replace('_', '-')}"
            raise ConfigError(
                f"{flag} {value:g}", f"it must be above 0 and at most {most:,.0f}", f"Use {flag} 1 or more"
            )
    mesh, layers = parse_mesh(flags.mesh), flags.model_config().num_layers
    if mesh.pp > layers:  # before a schedule is made for so many stages
        raise ConfigError(
            f"--mesh {mesh}", f"each stage must hold one of the {layers} layers or more", "Use a smaller pp"
        )


def refuse_idle(flags: PlanFlags) -> None:
    """Refuse what would change nothing beside the other flags. Raises: ConfigError."""
    mesh = parse_mesh(flags.mesh)
    timed, proving = flags.tokens is not None or flags.steps is not None, flags.trace or flags.compile is not None
    for flag, idle, why, instead in (
        ("tokens", flags.steps is not None, "--steps says how long the run is", "Give one of the two"),
        ("deadline", not timed, "how long a run lasts needs its tokens", "Add --tokens 300e9"),
        ("budget", not timed, "what a run costs needs its tokens", "Add --tokens 300e9"),
        ("vendor", not timed, "what a run costs needs its tokens", "Add --tokens 300e9"),
        ("price_per_hour", not timed, "what a run costs needs its tokens", "Add --tokens 300e9"),
        ("vendor", flags.price_per_hour is not None, "--price-per-hour is a price already", "Give one of the two"),
        ("price_file", flags.vendor is None, "it lists the prices of vendors", "Add --vendor"),
        ("top", bool(flags.mesh), "--mesh names the one layout that is shown", "Leave one of the two out"),
        ("prove", bool(flags.mesh), "--mesh names the one layout that is shown", "Leave one of the two out"),
        ("prove", not proving, "nothing is traced or compiled", "Add --trace or --compile h100"),
        ("prove", flags.prove > flags.top, f"the table has {flags.top} rows", f"Use --top {flags.prove}"),
        ("dump_hlo", flags.compile is None, "nothing is compiled", "Add --compile h100"),
        ("bucket_mb", flags.grad_sync != "bucketed", "only buckets have a size", "Use --grad-sync bucketed"),
        ("zero", mesh.state_ranks == 1, "ZeRO shards over dp and cp, and both are 1", "Use a mesh with dp=2 or more"),
        ("sp", mesh.tp == 1, "it splits the sequence over tp, and tp=1", "Use a mesh with tp=2 or more"),
        ("experts_over_tp", mesh.tp == 1, "it splits experts over tp, and tp=1", "Use a mesh with tp=2 or more"),
        ("reshard_after_forward", flags.zero != 3, "it is about the weights of ZeRO-3", "Add --zero 3"),
        ("reshard_after_forward", flags.remat not in KEEPS, "blocks gather their weights again", "Use --remat none"),
        ("overlap", mesh.num_devices == mesh.tp, "no message could hide", "Use a mesh with dp=2 or more"),
        *((name, mesh.pp == 1, "it is about the pipeline, and pp=1", "Use --mesh pp=2,...") for name in PIPELINE),
    ):
        if idle and getattr(flags, flag) != getattr(type(flags), flag):
            raise ConfigError(flag_word(flag, getattr(flags, flag)), f"{why}: it would change nothing", instead)


def default_batch(flags: PlanFlags, devices_per_node: int) -> tuple[int, str]:
    """About a million tokens, in a number of sequences that the data ranks, or all devices, divide; and a sentence."""
    length, per_node = flags.model_config().seq_len, flags.devices_per_node or devices_per_node
    target = 1 << round(math.log2(max(DEFAULT_BATCH_TOKENS / length, 1)))
    if flags.mesh:
        mesh = parse_mesh(flags.mesh)
        micro = 1 if mesh.pp == 1 else flags.microbatches or 2 * mesh.pp
        unit, of = mesh.replica * mesh.dp * max(flags.accumulate, 1) * max(micro, 1), "micro-batches of this layout"
    elif flags.nodes is None and (flags.deadline is not None or flags.budget is not None):
        unit = per_node << max(round(math.log2(target / per_node)), 0)  # so that doubled nodes divide it too
        of = f"nodes of {per_node}, doubled"
    else:
        unit = (flags.nodes or 1) * per_node
        of = f"{unit:,} devices"
    batch = unit * max(1, round(target / unit))
    tokens = f"{batch * length / 1e6:.2f} million tokens"
    return batch, f"--batch-size not given: {batch:,} sequences ({tokens}), which divide over the {of}."


def parse_batches(flags: PlanFlags) -> list[int]:
    """--batch-sizes, in order; none where it is not given. Raises: ConfigError."""
    if flags.batch_sizes is None:
        return []
    given, texts = f"--batch-sizes {flags.batch_sizes}", flags.batch_sizes.split(",")
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise ConfigError(given, "it must be numbers of sequences with commas between", "Use --batch-sizes 256,512")
    for idle, why, instead in (
        (flags.batch_size is not None, "--batch-size is one already", "Give one of the two"),
        (bool(flags.mesh), "--mesh names a layout, which is of one batch", "Use --batch-size, once for each"),
        (flags.steps is not None, "as many steps of another batch are other tokens", "Use --tokens 300e9"),
        (
            flags.nodes is None and (flags.deadline is not None or flags.budget is not None),
            "the smallest cluster is looked for, for one batch",
            "Add --nodes 8, or use --batch-size",
        ),
    ):
        if idle:
            raise ConfigError(given, why, instead)
    return sorted(set(map(int, texts)))


def parse_hours(text: str) -> float:
    """ "72h", "3d" or "90m" -> hours. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--deadline {text}", "it must be a time above 0 with its unit", "Write 72h, 30d, 4w or 90m")
    return float(match[1]) * {"m": 1 / 60, "h": 1, "d": 24, "w": 168}[match[2]]


# ---------------------------------------------------------------------------------------------------------------------
# Answers
# ---------------------------------------------------------------------------------------------------------------------


def find(question: Question, num_nodes: int) -> Found:
    cluster = question.cluster(num_nodes)
    with Progress(f"searching layouts of {cluster.num_devices:,} devices, meshes") as progress:
        found = search(question.base, cluster, question.attention, question.efficiency, progress=progress.update)
    with Progress("choosing what backward repeats"):
        return with_arrays(found, question.attention, question.efficiency)


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
    return Plan(
        question,
        found,
        found.num_layouts,
        found.num_fitting,
        [first for first, *_ in rows],
        [others for _, *others in rows],
        front_of(question, found),
        sentences,
        took,
    )


BATCH_MARGIN = 0.02  # of the time a token: what a smaller batch may take more


def of_batches(questions: list[Question], num_nodes: int, top: int) -> Plan:
    """The plan of the smallest batch that takes at most BATCH_MARGIN more time a token than the fastest, with the best
    layout of each.

    Raises: ConfigError where nothing fits with any of them, as for the first.
    """
    rows, refused, without = [], [], []
    for question in questions:
        try:
            found = find(question, num_nodes)
        except ConfigError as error:
            refused.append(error)
            found = None
        if found is None or not found.num_fitting:
            without.append(f"{question.base.batch_size:,}")
        else:
            row = row_of(question, found, [int(rank(found)[0])])
            rows.append((row["step_seconds"] / question.base.batch_size, question, row))
    if not rows:
        if refused:
            raise refused[0]
        return plan_for(questions[0], num_nodes, top)
    most = min(time for time, _, _ in rows) * (1 + BATCH_MARGIN)
    chosen = next(question for time, question, _ in rows if time <= most)
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
    nodes = num_nodes * 2
    while nodes <= num_nodes * 16 and nodes * question.cluster(1).num_devices <= MOST_DEVICES:
        try:
            if find(question, nodes).num_fitting:
                return f"Use --nodes {nodes}, or accelerators with more memory"
        except ConfigError:
            break  # the batch cannot be divided over so many
        nodes *= 2
    return "Use accelerators with more memory, a smaller model, or a larger --global-batch, which allows more nodes"


def front_of(question: Question, found: Found) -> list[dict]:
    """Layouts that no other beats in memory, time and device-seconds at once, on this cluster and its halves."""
    rows, here = [], found
    for halves in range(MOST_HALVES + 1):
        nodes = found.cluster.num_nodes >> halves
        if halves:
            try:
                here = find(question, nodes) if nodes else None
            except ConfigError:
                break
        if here is None or not here.num_fitting:
            break
        rows += [row_of(question, here, group) for group in folded(here, memory_time_front(here))]
    columns = [np.array([row[name] for row in rows]) for name in ("memory_bytes", "step_seconds", "device_seconds")]
    return [rows[index] for index in pareto(*columns)]


def smallest_cluster(question: Question, top: int) -> Plan:
    """The plan for the fewest nodes, doubling from one, that meet the deadline and the budget.

    Raises: ConfigError where none does, saying what would be needed.
    """
    tried = []
    for nodes in doubling(question):
        try:
            found = find(question, nodes)
        except ConfigError:
            break  # no layout divides the model and the batch over so many
        if not found.num_fitting:
            continue
        tried.append(estimate(question, found, int(rank(found)[0])))
        if not misses(question, tried[-1]):
            return plan_for(question, nodes, top)
    raise ConfigError(*impossible(question, tried))


def doubling(question: Question) -> Iterator[int]:
    nodes = 1
    while nodes <= MOST_NODES and question.cluster(nodes).num_devices <= question.base.batch_size * 1024:
        yield nodes
        nodes *= 2


def misses(question: Question, run: Estimate) -> bool:
    """Whether the upper end of the bar exceeds the deadline, the budget or a century."""
    late = run.most_hours is not None and run.most_hours > min(question.hours or CENTURY_HOURS, CENTURY_HOURS)
    dear = question.budget is not None and run.cost is not None and run.cost.most > question.budget
    return late or dear


def impossible(question: Question, tried: list[Estimate]) -> tuple[str, str, str]:
    """(asked, required and why, what would work), every limit rounded up."""
    deadline = [] if question.hours is None else [f"a deadline of {question.hours:g} h"]
    budget = [] if question.budget is None else [f"a budget of {short_money(question.budget)}"]
    asked = " and ".join(deadline + budget)
    if not tried:
        return (
            f"{asked} on {question.hardware.name}",
            "no layout fits at any size of cluster for this model and batch",
            "Use a smaller model, a larger --global-batch (which allows more devices), or more memory a device",
        )
    asked = f"{billions(question.tokens)} tokens{f' with {asked}' if asked else ''} on {question.hardware.name}"
    quickest = min(tried, key=lambda run: run.most_hours)
    cheapest = quickest if quickest.cost is None else min(tried, key=lambda run: run.cost.most)
    if quickest.most_hours > CENTURY_HOURS:
        return asked, f"{limits(quickest)} takes more than a century", "Use more --nodes, or fewer --tokens"
    words = f"the fastest is {limits(quickest)}"
    if cheapest is not quickest:
        words += f"; the cheapest is {limits(cheapest)}"
    choices = [cheapest] * (question.budget is not None) + [quickest] * (question.hours is not None)
    remedies = dict.fromkeys(remedy(question, run) for run in choices)
    return asked, f"no cluster tried meets that: {words}", f"Use {' or '.join(remedies)}"


def limits(run: Estimate) -> str:
    """A cluster, and the upper ends of its bars."""
    words = f"--nodes {run.cluster.num_nodes}"
    if run.most_hours <= CENTURY_HOURS:
        words += f" in at most {duration(run.most_hours)}"
    return words + ("" if run.cost is None else f" for at most {short_money(run.cost.most)}")


def remedy(question: Question, run: Estimate) -> str:
    flags = []
    if question.hours is not None:
        flags.append(f"--deadline {math.ceil(run.most_hours)}h")
    if question.budget is not None:
        flags.append(f"--budget {math.ceil(run.cost.most)}")
    return " with ".join(flags)


def check_limits(question: Question, plan: Plan, named: str) -> None:
    """Refuse a cluster or a layout that the user named and that misses the deadline or the budget."""
    run = estimate(question, plan.found, plan.best)
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
            f"the mesh has {devices} ranks and the cluster {cluster.num_devices} devices",
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
    return Plan(question, found, 1, int(found.fits[0]), [0], [[]], [row_of(question, found, [0])], sentences, took)


# ---------------------------------------------------------------------------------------------------------------------
# Report
# ---------------------------------------------------------------------------------------------------------------------

TIMES = ("compute", "memory", "tp", "cp", "ep", "dp", "pp", "bubble", "overhead", "input")


def row_layout(found: Scored, index: int) -> dict:
    """One layout, ready for JSON and for `layout_words`."""
    layouts, base, pipelined = found.layouts, found.base.parallel, found.layouts.pp[index] > 1
    return {
        "mesh": str(layouts.mesh(index)),
        "zero": int(layouts.zero[index]),
        "keep": bool(layouts.keep[index]),
        "sp": bool(layouts.sp[index]),
        "tp_ring": TP_RINGS[layouts.ring[index]],
        "loss_chunks": int(layouts.loss_chunks[index]),
        "cp_kind": layouts.cp_kind(index, base) if layouts.cp[index] > 1 else None,
        "overlap": bool(layouts.overlap[index]),
        "remat": layouts.remat(index),
        "schedule": layouts.schedule_name(index, base) if pipelined else None,
        "chunks": int(layouts.chunks[index]),
        "microbatches": int(layouts.microbatches[index]),
        "stages": layouts.stages(index, base) if pipelined else None,
        "accumulate": int(layouts.accumulate[index]),
        "rows": int(layouts.rows[index]),
    }


def row_of(question: Question, found: Scored, group: list[int]) -> dict:
    """One layout with its figures, ready for JSON, and those that differ from it in replica × dp alone."""
    layouts, (index, *others) = found.layouts, group
    run = estimate(question, found, index)
    return {
        "nodes": found.cluster.num_nodes,
        "devices": found.cluster.num_devices,
        "batch_size": question.base.batch_size,
        "tokens_per_second": question.base.batch_size * question.base.model.seq_len / run.step_seconds,
        **row_layout(found, index),
        "step_seconds": run.step_seconds,
        "error": run.error,
        "mfu": float(found.time.mfu[index]),
        "device_seconds": run.step_seconds * found.cluster.num_devices,
        "memory_bytes": float(found.memory.total[index]),
        "memory": {name: float(getattr(found.memory, name)[index]) for name in NAMES_OF_TERMS},
        "time": {name: float(getattr(found.time, name)[index]) for name in TIMES},
        "hours": run.hours,
        "dollars": None if run.cost is None else run.cost.dollars,
        "also": [
            {
                "mesh": str(layouts.mesh(other)),
                "step_seconds": float(found.time.total[other]),
                "memory_bytes": float(found.memory.total[other]),
            }
            for other in others
        ],
    }


def to_json(plan: Plan) -> dict:
    """Everything that is shown, as plain data; the page is made from it."""
    question, found = plan.question, plan.found
    model, cluster = question.base.model, found.cluster
    run = estimate(question, found, plan.best)
    return {
        "model": dataclasses.asdict(model),
        "batch_size": question.base.batch_size,
        "dtype": question.base.precision.dtype,
        "optimizer": question.base.optimizer.name,
        "hardware": cluster.hardware.name,
        "title": cluster.hardware.title,
        "nodes": cluster.num_nodes,
        "devices": cluster.num_devices,
        "links": {"inside": cluster.inside.quoted, "between": cluster.between.quoted},
        "capacity_bytes": cluster.hardware.memory_bytes,
        "usable_bytes": usable_bytes(cluster),
        "num_layouts": plan.num_layouts,
        "num_fitting": plan.num_fitting,
        "search_seconds": plan.search_seconds,
        "tokens": question.tokens,
        "rows": rows_of(plan),
        "front": plan.front,
        "batches": list(plan.batches),
        "sentences": plan.sentences,
        "run": run_words(question, run),
        "command": str(plan.command) if plan.fits else None,
        "command_notes": list(plan.command.notes) if plan.fits else [],
        "notes": list(question.notes),
        "assumptions": assumptions(question),
    }


def rows_of(plan: Plan) -> list[dict]:
    groups = zip(plan.shown, plan.also, strict=True)
    return [row_of(plan.question, plan.found, [first, *others]) for first, others in groups]


def run_words(question: Question, run: Estimate) -> list[str]:
    """How long the whole run takes and what it costs, a sentence each."""
    if run.hours is None:
        return []
    limit = "" if question.hours is None else f" The deadline is {duration(question.hours)}."
    words = f"{billions(question.tokens)} tokens take {duration(run.hours)}, at most {duration(run.most_hours)}.{limit}"
    return [words] + ([] if run.cost is None else [str(run.cost)])


def assumptions(question: Question) -> list[str]:
    """What the numbers rest on."""
    e = question.efficiency
    bar = bar_of(work_of(question.base.model), e)
    return [
        "Everything above is predicted by closed forms: nothing was run.",
        f"Step time: {e.stack} efficiencies (matmuls {e.matmul:.0%} of peak, HBM {e.hbm:.0%}, links inside a node "
        f"{e.inside:.0%}, between nodes {e.between:.0%}); the bar is ±{bar:.0%}, more where communication shows.",
        "Pipelines run in lock-step as our executor does: a tick is one F, B or W of one chunk; with recomputed blocks "
        "B takes two ticks' time. The F of the last part includes the head.",
        "Memory: closed form of this program, the same on every device; docs/plan.md has its errors. A tenth of a "
        "device is left for the driver, communication buffers and fragmentation; full is of the rest. k: ZeRO-3 keeps "
        "its weights after forward; rings: sp with --tp-ring. Micro-batch: sequences × number in an update on one data "
        "rank.",
    ]


def print_plan(console: Console, plan: Plan) -> None:
    """The command first, then the layouts it was chosen from, then why."""
    question, found = plan.question, plan.found
    model, cluster, config = question.base.model, found.cluster, found.config(plan.best)
    searched = plan.num_layouts > 1

    console.print(
        f"[bold]{model.describe()}[/], "
        f"{question.base.batch_size} sequences an update, {question.base.precision.dtype}, "
        f"{question.base.optimizer.name}, on {cluster.num_nodes} × {cluster.devices_per_node} {cluster.hardware.title}"
    )
    row = rows_of(plan)[0]
    console.print(
        f"[bold]{escape(layout_words(row))}[/]: {seconds(row['step_seconds'])} ± {row['error']:.0%} a step, "
        f"{row['mfu']:.0%} MFU, {gib(row['memory_bytes'])} a device"
    )
    for words in run_words(question, estimate(question, found, plan.best)):
        console.print(escape(words))

    if plan.fits:
        console.print("\n[bold]Run it[/]")
        for line in plan.command.lines(console.width):
            console.print(line, soft_wrap=True, markup=False)
        for note in plan.command.notes:
            print_bullet(console, note)
    else:
        console.print(f"\n[bold red]{escape(plan.sentences[0])}[/]", soft_wrap=not console.is_terminal)

    if searched:
        console.print(
            f"\n[bold]Best of each mesh[/], of {plan.num_layouts:,} layouts, {plan.num_fitting:,} of which fit; "
            f"predicted in {plan.search_seconds:.1f} s"
        )
        print_rows(console, rows_of(plan), usable_bytes(cluster))
    if plan.batches:
        console.print(
            "\n[bold]Best of each batch[/]; planned is the smallest that takes at most "
            f"{BATCH_MARGIN:.0%} more time a token than the fastest. How many tokens a larger batch needs for the same "
            "loss, a plan does not know (arXiv 1812.06162)."
        )
        print_rows(console, list(plan.batches), usable_bytes(cluster), batches=True)
    if len(plan.front) > 1:
        console.print(
            f"\n[bold]Pareto front[/] of memory, time and device-hours, on {cluster.num_nodes} nodes and fewer"
            if cluster.num_nodes > 1
            else "\n[bold]Pareto front[/] of memory and time"
        )
        print_rows(console, thinned(plan.front, 8), usable_bytes(cluster))

    console.print("\n[bold]Why[/]" if searched else "\n[bold]What it takes[/]")
    for sentence in plan.sentences[0 if plan.fits else 1 :]:
        print_bullet(console, sentence)
    for warning in (*config.warnings(), *question.notes):
        print_bullet(console, in_flags(warning, PlanFlags), "yellow")
    console.print("\n" + " ".join(assumptions(question)), style="dim")


# ---------------------------------------------------------------------------------------------------------------------
# Trace and compile
# ---------------------------------------------------------------------------------------------------------------------

MARGIN = 0.10  # by which one level may differ from the one above before the report says so


def prove(console: Console, plan: Plan, flags: PlanFlags) -> list[dict]:
    """The best layouts again, by formula, trace and (where asked) compiler, side by side."""
    found, records, lines, rows = plan.found, [], [], []
    for place, index in enumerate(plan.shown[: flags.prove], start=1):
        config = found.config(index)
        name = f"{place}. {layout_words(row_of(plan.question, found, [index]))}"
        config, note = with_attention(config, plan.question.attention)
        doing = "tracing" if flags.compile is None else "tracing and compiling"
        with Progress(f"{doing} {place} of {min(flags.prove, len(plan.shown))}"):
            dump = None if flags.dump_hlo is None else str(Path(flags.dump_hlo) / str(place))
            level = levels(config, flags.compile, num_nodes=found.cluster.num_nodes, dump=dump)
        formula = float(found.memory.total[index])
        if note:  # then the formula, too, of the attention that is traced
            formula = float(score(config, Candidates.of(config), found.cluster, config.attention).memory.total[0])
        layout = make_layout(config.model, config.parallel, config.part_layers)
        messages = predicted(config, layout)
        sent = total_sent(messages, config.parallel.mesh), level.sent_bytes
        compiled = level.compiled
        rows.append(
            {
                "layout": name,
                "GiB formula": gib_number(formula),
                "GiB traced": gib_number(level.predicted.peak),
                "GiB compiled": gib_number(compiled and compiled.peak),
                "sent GiB formula": gib_number(sent[0]),
                "sent GiB traced": gib_number(sent[1]),
                "sent GiB compiled": gib_number(level.compiled_sent_bytes),
                "async": "" if compiled is None else f"{compiled.asynchronous} of {len(compiled.collectives)}",
                "trace s": f"{level.trace_seconds:.1f}",
                "compile s": "" if compiled is None else f"{compiled.seconds:.0f}",
            }
        )
        lines += [note] if note else []
        lines += disagreements(name, formula, level)
        lines.append(f"{name}: at the peak {largest(level)}.")
        records.append(
            {
                "layout": name,
                "formula_bytes": formula,
                "traced_bytes": level.predicted.peak,
                "compiled_bytes": None if compiled is None else compiled.peak,
                "sent_formula_bytes": sent[0],
                "sent": [{**dataclasses.asdict(row), "why": row.why} for row in level.sent],
                "trace_seconds": level.trace_seconds,
                "compile_seconds": None if compiled is None else compiled.seconds,
            }
        )
    what = f", compiled for {flags.compile}" if flags.compile else ""
    console.print(f"\n[bold]The same, traced{what}[/] (bytes on one device; nothing was run)")
    columns = {title: [row[title] for row in rows] for title in rows[0]}
    print_columns(console, columns, left=("layout",), drop=("trace s", "async"))
    for line in dict.fromkeys(lines):
        print_bullet(console, line)
    if len(rows) == 1:
        print_messages(console, messages, config.parallel.mesh)
    return records


def print_messages(console: Console, messages: list[Message], mesh: MeshShape) -> None:
    """The messages of one device in a step, by purpose; of each purpose the stage that sends most of it."""
    if not messages:
        console.print("\n[bold]What a step sends[/]: nothing, one device has nobody to send to")
        return
    console.print("\n[bold]What a step sends[/], by closed form")
    titles = ("purpose", "collective", "over", "messages", "bytes sent")
    columns = dict(zip(titles, zip(*table(messages, mesh), strict=True), strict=True))
    cells = {title: [f"{x:,}" if isinstance(x, int) else x for x in found] for title, found in columns.items()}
    print_columns(console, cells, left=("purpose", "collective", "over"))


def with_attention(config: RunConfig, attention: str) -> tuple[RunConfig, str | None]:
    """The config with the attention that would run; where that cannot be traced here, another one, and why."""
    note, parallel = None, config.parallel
    if parallel.mesh.cp > parallel.cp_split[0]:
        return config, None  # attention over cp by blocks: no other is run
    if attention == "cudnn" and not has_cuda_compiler():
        attention = config.model.attention_for("auto", "cpu", config.precision.dtype, training=True)
        written = (
            "scores are written out here and counted" if attention == "xla" else "it is traced in blocks of scores"
        )
        note = (
            f"Flash attention cannot be traced without the CUDA plugin: {written} "
            f"({install_text('prove-cuda')} needs no card)."
        )
    return replace(config, parallel=replace(parallel, attention=attention)), note


def disagreements(name: str, formula: float, level: Levels) -> list[str]:
    """Where one level differs from the one above by more than the margin, and the largest differences."""
    found = []
    traced = level.predicted.peak
    if abs(formula / traced - 1) > MARGIN:
        found.append(f"{name}: the formula's memory differs from the trace's by {formula / traced - 1:+.0%}.")
    if level.peak_error is not None and abs(level.peak_error) > MARGIN:
        found.append(f"{name}: the trace's memory differs from the compiler's by {level.peak_error:+.0%}.")
    changed = [row for row in level.sent if row.compiled_count is not None and not row.why.startswith("equal")]
    for row in changed:
        found.append(f"{name}: {row.kind} over {','.join(row.axes)}: {row.why}.")
    return found


def largest(level: Levels) -> str:
    return ", ".join(f"{gib(num_bytes)} {what}" for num_bytes, what in level.predicted.largest[:4])


def gib_number(num_bytes: float | None) -> str:
    return "" if num_bytes is None else f"{num_bytes / GIB:.2f}"


def print_rows(console: Console, rows: list[dict], usable: float, batches: bool = False) -> None:
    """A table of layouts. batches: they are of different ones."""
    of_each = {
        "sequences": [f"{row['batch_size']:,}" for row in rows],
        "tokens/s": [f"{row['tokens_per_second']:,.0f}" for row in rows],
    }
    columns = (of_each if batches else {}) | {
        "mesh": [row["mesh"] for row in rows],
        "nodes": [str(row["nodes"]) for row in rows],
        "ZeRO": [f"{row['zero']}{'k' * row['keep']}" for row in rows],
        "sp": [sp_word(row) for row in rows],
        "cp kind": [row["cp_kind"] or "" for row in rows],
        "overlap": ["yes" if row["overlap"] else "" for row in rows],
        "remat": [shorten(row["remat"]) if row["remat"] != "none" else "" for row in rows],
        "pipeline": [pipeline_words(row) for row in rows],
        "micro-batch": [f"{row['rows']} × {row['accumulate'] * row['microbatches']}" for row in rows],
        "loss chunks": [str(row["loss_chunks"]) if row["loss_chunks"] > 1 else "" for row in rows],
        "step": [seconds(row["step_seconds"]) for row in rows],
        "±": [f"{row['error']:.0%}" for row in rows],
        "MFU": [f"{row['mfu']:.0%}" for row in rows],
        "GiB": [f"{row['memory_bytes'] / GIB:.1f}" for row in rows],
        "full": [f"{row['memory_bytes'] / usable:.0%}" for row in rows],
        "time": ["" if row["hours"] is None else duration(row["hours"]).split(" (")[-1].rstrip(")") for row in rows],
        "cost": ["" if row["dollars"] is None else short_money(row["dollars"]) for row in rows],
        "or replica×dp": [also_words(row) for row in rows],
    }
    if len(set(columns["nodes"])) == 1:
        del columns["nodes"]
    left = ("mesh", "cp kind", "remat", "pipeline", "or replica×dp")
    settings = ("ZeRO", "sp", "cp kind", "overlap", "remat", "pipeline", "micro-batch", "loss chunks", "time")
    print_columns(console, columns, left=left, drop=("full", "±", "or replica×dp"), under=settings)


def also_words(row: dict) -> str:
    """ "2×8, 4×4 (+1%)": the other ways to divide the data ranks of a row, and by how much the slowest is slower."""
    if not row["also"]:
        return ""
    splits = [parse_mesh(other["mesh"]) for other in row["also"]]
    slower = round(100 * (max(other["step_seconds"] for other in row["also"]) / row["step_seconds"] - 1))
    return f"{', '.join(f'{mesh.replica}×{mesh.dp}' for mesh in splits)} ({slower:+}%)"


def layout_words(row: dict) -> str:
    """A layout in a few words."""
    words = [row["mesh"], *([row["cp_kind"]] if row["cp_kind"] else [])]
    words += [f"ZeRO-{row['zero']}"] * (row["zero"] > 0) + ["sp"] * row["sp"]
    words += [f"{row['tp_ring']} rings"] * (row["tp_ring"] != "none") + ["overlap"] * row["overlap"]
    words += [f"remat {shorten(row['remat'])}"] * (row["remat"] != "none")
    words += [pipeline_words(row)] * (row["schedule"] is not None)
    words += [f"loss in {row['loss_chunks']} chunks"] * (row["loss_chunks"] > 1)
    return ", ".join(words)


def pipeline_words(row: dict) -> str:
    """ "zb-v 8" or "interleaved×4 8": schedule, chunks where they are chosen, micro-batches of a pass."""
    if row["schedule"] is None:
        return ""
    chunks = f"×{row['chunks']}" if row["schedule"] == "interleaved" else ""
    stages = f" {row['stages']}" if row["stages"] != "even" else ""
    return f"{row['schedule']}{chunks} {row['microbatches']}{stages}"


def thinned(rows: list[dict], most: int) -> list[dict]:
    """At most so many of the rows, evenly spread, with both ends."""
    if len(rows) <= most:
        return rows
    return [rows[round(index)] for index in np.linspace(0, len(rows) - 1, most)]


if __name__ == "__main__":
    run_program(PlanFlags, main, "plan")
