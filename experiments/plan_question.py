"""What `plan` is asked: its flags, checked, each used or refused."""

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, ClassVar, Literal, get_args

import tyro

from jaxdist.config import RunConfig
from jaxdist.data.batches import load_corpus
from jaxdist.errors import MOST, ConfigError
from jaxdist.mesh import FACTORS, parse_mesh, parse_sizes
from jaxdist.models.attention_choice import LONG
from jaxdist.models.declared import num_parameters
from jaxdist.models.registry import is_path
from jaxdist.parallel.pipeline.builders import NAMES
from jaxdist.plan.cost import Cost
from jaxdist.plan.explain import billions
from jaxdist.plan.fit_remat import fit_remat
from jaxdist.plan.hardware import GIB, Accelerator, Cluster, find_hardware, load_hardware, load_prices, nearest, price
from jaxdist.plan.recipe import (
    FINE_TUNING_RATE,
    FINE_TUNING_STEPS,
    TOKENS_PER_PARAMETER,
    adapter_learning_rate,
    chinchilla_steps,
    learning_rate,
    warmup_steps,
)
from jaxdist.plan.search import MOST_WITHIN, WITHIN, Fixed, Scored, usable_bytes
from jaxdist.plan.time_model import Efficiency, calibrated, read_efficiency
from jaxdist.strategy import CP_KINDS, TP_RINGS, Dtype

from .cli import PLACEHOLDERS, CommonFlags, ModelName, refuse_ignored
from .config_file import FileFlags
from .entry import flag_word
from .plan_command import UNKNOWN_RATE, rate_note

MOST_DEVICES = 2**20
DEFAULT_BATCH_TOKENS = 2**20
LAYOUT_FLAGS = {"zero", "sp", "cp_kind", "experts_over_tp", "tp_ring", "accumulate", "remat", "unroll_layers"}
LAYOUT_FLAGS |= {"reshard_after_forward", "overlap", "schedule", "microbatches", "chunks", "stages"}
PASSED_ON = {"unroll_layers"}  # of these: a search has it in all layouts, as it has --loss-chunks
LENGTH = 4096  # of a sequence, unless given, of a downloaded model that allows more than LONG
KEEPS = ("none", "selective")  # of --remat: backward does not run whole blocks again
REMATS = (("none", (0, 0, 0)), ("selective", (0, 1, 0)), ("block", (1, 0, 0)), ("chunk", (0, 0, 1)))
MORE_WORDS = {"remat": ["every-K"], "stages": ["last-N"]}
BOUNDS = {"batch_size": 2**24, "accumulate": 2**24, "microbatches": 2**16, "chunks": 10**4, "loss_chunks": 10**8}
BOUNDS |= {"nodes": MOST_DEVICES, "devices_per_node": MOST_DEVICES, "top": 10_000, "prove": 10_000, "steps": 10**15}
BOUNDS |= {"tokens": 1e18, "epochs": 1e6, "budget": 1e12, "price_per_hour": 1e4}


@dataclass(frozen=True)
class PlanFlags(CommonFlags, FileFlags):
    """Rank every layout of a cluster for a model. A --mesh of all its devices names the one layout to report; one of
    fewer, and other settings of a layout, are fixed and the rest is searched. Nothing is run."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *("model", "hardware", "nodes", "devices_per_node", "batch_size", "seq_len", "tokens", "deadline", "budget"),
        *("mesh", "zero", "sp", "dtype", "efficiencies", "top", "trace", "compile", "json", "html", "config"),
    )

    model: ModelName = "7b"
    hardware: str = "h100"
    """Accelerator of the hardware table: h100, h200, a100-80, v5p, ...; several, or any, to find the cheapest."""
    nodes: int | None = None
    """Default: 1; with --deadline or --budget, the cheapest number that meets them."""
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
    """Dtype of parameters and activations; masters and moments stay in at least float32."""
    matmul_dtype: Literal["float8"] | None = None
    """Predict products with weights in this dtype, for a program that has them; ours computes them in --dtype."""
    tokens: float | None = None
    """To train on, as in 300e9: gives hours and dollars."""
    data: str | None = None
    """Tokens to train on, of which --epochs are counted, instead of --tokens."""
    epochs: float | None = None
    """Times that --data is read. Default: 1."""
    finetune: bool = False
    """Train all of a trained model further: a lower learning rate, and 1,000 steps unless --data or a flag says."""
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
    max_gib: float | None = None
    """Most GiB of a device that a layout may take. Default: nine tenths of its memory."""
    what_if: bool = False
    """Also plan twice the batch, twice the sequence, a node fewer, 64 of a rack's 72 and the next faster card."""
    efficiencies: str | None = None
    """TOML of the time model's constants, of your own card. Default: fitted to what was published of this one."""
    simplest_within: float = WITHIN
    """How much slower than the fastest the planned layout may be, if it is simpler; 0: the fastest is planned."""
    top: int = 10
    """Rows of the table at most, meshes that differ in replica × dp alone in one row."""
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
    given: Annotated[frozenset[str], tyro.conf.Suppress] = frozenset()

    def with_remat(self, config: RunConfig, gib: float | None) -> RunConfig:
        """For --hardware, and its memory."""
        hardware = hardware_for(self)
        cluster = cluster_of_mesh(self, hardware, config.parallel.mesh.num_devices)
        limit = usable_bytes(cluster) if gib is None else gib * GIB
        return fit_remat(config, cluster, limit, attention_on(hardware, config), efficiency_for(self, hardware)).config

    @property
    def names_layout(self) -> bool:
        """Whether --mesh is of all devices, and so names one layout; otherwise it fixes axes of a search."""
        if not self.mesh:
            return False
        ranks = math.prod(size for axis, size in parse_sizes(self.mesh).items() if axis in FACTORS)
        card, *_ = cards_of(self)
        per_node = self.devices_per_node or find_hardware(card, self.hardware_file).devices_per_node
        return self.nodes is None or self.nodes * per_node == ranks

    def fixed(self) -> dict[str, Fixed]:
        """What a search may not change, by its words. Raises: ConfigError for what no layout of a search has."""
        found = {f"--mesh {axis}={size}": Fixed({axis: size}) for axis, size in parse_sizes(self.mesh).items()}
        for name in sorted((LAYOUT_FLAGS - PASSED_ON) & self.given):
            value = getattr(self, name)
            words = flag_word(name, value) + f" {value}" * (not isinstance(value, bool))
            found[words] = Fixed(columns=self._columns(name, words))
        return found

    def _columns(self, name: str, asked: str) -> dict[str, int]:
        """A setting of a layout, as columns of `Candidates`."""
        value, words = getattr(self, name), str(getattr(self, name)).partition("-")
        known: dict[str, dict[object, dict[str, int]]] = {
            "remat": {word: dict(zip(("every", "selective", "recompute"), each, strict=True)) for word, each in REMATS},
            "schedule": {word: {"schedule": i} for i, word in enumerate(NAMES)},
            "cp_kind": {word: {"kind": i} for i, word in enumerate(CP_KINDS)},
            "tp_ring": {word: {"ring": i} for i, word in enumerate(TP_RINGS)},
            "experts_over_tp": {False: {"over_tp": 0}, True: {"over_tp": 1}},
            "stages": {"even": {"last": 0}},
            "reshard_after_forward": {True: {"keep": 0}, False: {"keep": 1}},
        }
        if name not in known:
            return {name: int(value)}
        if words[0] == {"remat": "every", "stages": "last"}.get(name) and re.fullmatch("[1-9][0-9]{0,5}", words[2]):
            number = int(words[2])
            return {"last": number} if name == "stages" else {"every": number, "selective": 0, "recompute": 0}
        if value not in known[name]:
            raise ConfigError(
                asked,
                f"must be one of {', '.join([*map(str, known[name]), *MORE_WORDS.get(name, ())])} in a search",
                "Name the whole layout with --mesh, or leave it out",
            )
        return known[name][value]

    @property
    def looks_for_nodes(self) -> bool:
        """Whether the cheapest cluster is asked for that meets a deadline or a budget."""
        return self.nodes is None and (self.deadline is not None or self.budget is not None)


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
    notes: list[str]
    recipe_notes: list[str]
    rate_known: bool
    efficiency: Efficiency
    capacity_bytes: float  # of the card, of which --max-gib may leave less in `hardware`
    fixed: Mapping[str, Fixed] = field(default_factory=dict)  # by its words
    files: tuple[str, str | None] = (PLACEHOLDERS["data"], None)  # of the command: its data and its first weights
    within: float = WITHIN  # of the fastest layout's time: what a simpler one may take more

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


def ask(flags: PlanFlags) -> Question:
    """Every flag, checked: each is used below, or refused. Raises: ConfigError."""
    flags, length_notes = with_length(flags)
    refuse_unused(flags)
    hardware = hardware_for(flags)
    hours = None if flags.deadline is None else parse_hours(flags.deadline)
    dollars, notes = hourly_price(flags, hardware)
    notes = [*length_notes, *notes]
    if flags.batch_size is None:
        batch, note = default_batch(flags, hardware.devices_per_node)
        flags, notes = replace(flags, batch_size=batch), [*notes, note]
    rate_known = flags.lr is not None or flags.optimizer == "adamw"
    flags, tokens, recipe_notes = with_recipe(flags, rate_known)
    fixed = {} if flags.names_layout else flags.fixed()
    if not flags.names_layout:
        defaults = {name: getattr(CommonFlags, name) for name in (LAYOUT_FLAGS - PASSED_ON) | {"mesh"}}
        flags = replace(flags, **defaults)
    config = flags.run_config()
    attention = attention_on(hardware, config)
    if flags.matmul_dtype is not None:
        notes.append(
            f"Products in {flags.matmul_dtype}, a scale for each tensor: for a program that has them. Memory is as in "
            f"{flags.dtype}, for operands are cast where they are used; the command computes in {flags.dtype}."
        )
    if attention == "xla":
        notes.append("Attention writes its scores out (flash attention cannot run here): they count as memory.")
    elif attention == "blocked":
        notes.append("Attention is in blocks of scores (flash attention cannot run here): slower, and none are kept.")
    means = flags.devices_per_node, attention, tokens, hours, flags.budget, dollars
    weights = flags.model if is_path(flags.model) else PLACEHOLDERS["weights"]
    files = flags.data or PLACEHOLDERS["data"], weights if flags.lora or flags.finetune else None
    capacity = find_hardware(flags.hardware, flags.hardware_file).memory_bytes
    known = notes, recipe_notes, rate_known, efficiency_for(flags, hardware), capacity
    return Question(config, hardware, *means, *known, fixed, files, flags.simplest_within)


def with_length(flags: PlanFlags) -> tuple[PlanFlags, list[str]]:
    """The flags with a length of sequences where a downloaded model allows more than anybody trains all of."""
    if flags.seq_len is not None or not is_path(flags.model) or (most := flags.model_config().seq_len) <= LONG:
        return flags, []
    note = f"--seq-len {LENGTH}: assumed; the model allows {most:,} tokens a sequence."
    return replace(flags, seq_len=LENGTH), [note]


def cluster_of_mesh(flags: PlanFlags, hardware: Accelerator, devices: int) -> Cluster:
    """The cluster that --mesh fills, and --nodes may name."""
    per_node = flags.devices_per_node or hardware.devices_per_node
    nodes = flags.nodes or -(-devices // per_node)
    return Cluster(hardware, nodes, min(per_node, devices) if flags.nodes is None else per_node)


def efficiency_for(flags: PlanFlags, hardware: Accelerator) -> Efficiency:
    found = read_efficiency(flags.efficiencies) if flags.efficiencies else calibrated(hardware)
    return replace(found, matmul_dtype=flags.matmul_dtype or found.matmul_dtype)


def attention_on(hardware: Accelerator, config: RunConfig) -> str:
    platform = "tpu" if "TPU" in hardware.title else "gpu"
    return config.model.attention_for(config.attention, platform, config.precision.dtype, training=True)


def refuse_unused(flags: PlanFlags) -> None:
    """Refuse numbers out of bounds, and flags that would change nothing and that no configuration refuses."""
    everything = {field.name for field in dataclasses.fields(flags)} - {"device"}
    refuse_ignored(flags, everything, "a plan runs on no device; its command names one for --hardware")
    for name, most in BOUNDS.items():
        if (value := getattr(flags, name)) is not None and not 0 < value <= most:
            flag, required = flag_word(name, None), f"must be above 0 and at most {most:,.0f}"
            raise ConfigError(f"{flag} {value:g}", required, f"Use {flag} 1 or more")
    if not 0 <= flags.simplest_within <= MOST_WITHIN:
        raise ConfigError(
            f"--simplest-within {flags.simplest_within:g}", f"must be from 0 to {MOST_WITHIN:g}", f"Use {WITHIN:g}"
        )
    whole, proving = flags.names_layout, flags.trace or flags.compile is not None
    mesh, layers = parse_mesh(flags.mesh * whole), flags.model_config().num_layers
    if parse_sizes(flags.mesh).get("pp", 1) > layers:  # before a schedule is made for so many stages
        reason = f"each stage must hold one of the {layers} layers or more"
        raise ConfigError(f"--mesh {flags.mesh}", reason, "Use a smaller pp")
    said = flags.tokens is not None or flags.steps is not None  # how long the run is
    untimed = not (said or flags.data is not None)
    one, alone = "Give one of the two", "Leave one of the two out"
    shown = whole, "--mesh names the one layout that is shown", alone
    paid, wider = "what a run costs needs its tokens", "Use a mesh with {}=2 or more"
    for flag, idle, why, instead in (
        ("tokens", flags.steps is not None, "--steps says how long the run is", one),
        ("data", said, "how long the run is, is said", "Give one of them"),
        ("epochs", flags.data is None, "there is no data to read so often", "Add --data"),
        ("finetune", bool(flags.lora), "adapters are fine-tuning already", alone),
        ("deadline", untimed, "how long a run lasts needs its tokens", "Add --tokens 300e9"),
        *((flag, untimed, paid, "Add --tokens 300e9") for flag in ("budget", "vendor", "price_per_hour")),
        ("vendor", flags.price_per_hour is not None, "--price-per-hour is a price already", one),
        ("price_file", flags.vendor is None, "it lists the prices of vendors", "Add --vendor"),
        *((flag, *shown) for flag in ("top", "simplest_within", "prove")),
        ("what_if", whole, "a layout that is named is not searched", alone),
        ("prove", not proving, "nothing is traced or compiled", "Add --trace or --compile h100"),
        ("prove", flags.prove > flags.top, f"the table has {flags.top} rows", f"Use --top {flags.prove}"),
        ("dump_hlo", flags.compile is None, "nothing is compiled", "Add --compile h100"),
        ("zero", whole and mesh.state_ranks == 1, "ZeRO shards over dp and cp, and both are 1", wider.format("dp")),
        ("sp", whole and mesh.tp == 1, "it splits the sequence over tp, and tp=1", wider.format("tp")),
        ("experts_over_tp", whole and mesh.tp == 1, "it splits experts over tp, and tp=1", wider.format("tp")),
        (
            "reshard_after_forward",
            whole and flags.remat not in KEEPS,
            "blocks gather their weights again",
            "Use --remat none",
        ),
        ("overlap", whole and mesh.num_devices == mesh.tp, "no message could hide", wider.format("dp")),
    ):
        if idle and getattr(flags, flag) != getattr(type(flags), flag):
            raise ConfigError(flag_word(flag, getattr(flags, flag)), f"{why}: it would change nothing", instead)


def hardware_for(flags: PlanFlags) -> Accelerator:
    """The accelerator. Raises: ConfigError where it has no peak for --dtype, or there are too many of it."""
    hardware = find_hardware(flags.hardware, flags.hardware_file)
    if flags.max_gib is not None:
        most = usable_bytes(Cluster(hardware)) / GIB
        hardware = replace(hardware, memory_gb=hardware.memory_gb * min(flags.max_gib / most, 1))
    if flags.matmul_dtype is not None:
        hardware.peak(flags.matmul_dtype)
    if flags.dtype not in hardware.peak_flops:
        raise ConfigError(
            f"--dtype {flags.dtype} on {hardware.name}",
            "the hardware table must have a peak for it, without which no time is predicted",
            f"Use {' or '.join(dtype for dtype in get_args(Dtype) if dtype in hardware.peak_flops)}; "
            f"`train` takes {', '.join(get_args(Dtype))}",
        )
    num_devices = (flags.nodes or 1) * (flags.devices_per_node or hardware.devices_per_node)
    if num_devices > MOST_DEVICES:
        raise ConfigError(f"{num_devices:,} devices", f"must be at most {MOST_DEVICES:,}", "Use fewer --nodes")
    return hardware


def hourly_price(flags: PlanFlags, hardware: Accelerator) -> tuple[float | None, list[str]]:
    """(dollars for one accelerator, None where no flag says; what is to be said about them)."""
    dollars, notes = flags.price_per_hour, []
    if flags.vendor is not None:
        listed = price(hardware.name, flags.vendor, path=flags.price_file)
        dollars, notes = listed.dollars_per_hour, [listed.warning] if listed.warning else []
    if flags.budget is not None and dollars is None:
        reason = "a budget needs a price, which must be given"
        raise ConfigError("--budget", reason, "Add --price-per-hour 2.5, or --vendor")
    return dollars, notes


def with_recipe(flags: PlanFlags, rate_known: bool) -> tuple[PlanFlags, float | None, list[str]]:
    """The flags with steps, learning rate and warm-up; the tokens asked for; a sentence for each default."""
    model, notes = flags.model_config(), []
    batch_tokens, parameters = flags.batch_size * model.seq_len, num_parameters(model)
    tokens, steps, rate, warmup = flags.tokens, flags.steps, flags.lr, flags.warmup_steps
    if flags.data is not None:
        corpus, epochs = load_corpus(flags.data, model.vocab_size), flags.epochs or 1.0
        tokens = corpus.num_train * epochs
        count = billions(corpus.num_train)
        notes.append(f"--data: {corpus.about}; {count} tokens to train on, read {epochs:g} times.")
        if corpus.num_train <= batch_tokens:
            notes.append(f"--data has fewer tokens than a batch of {batch_tokens:,}: train refuses it.")
    if tokens is not None:
        steps = math.ceil(tokens / batch_tokens)
        if steps > MOST:
            raise ConfigError(
                f"{tokens:g} tokens in batches of {batch_tokens:,}",
                f"must be at most {MOST:,} steps, and are {steps:,}",
                "Use fewer --tokens, or a larger --batch-size",
            )
    elif steps is not None:
        tokens = steps * batch_tokens
    elif flags.lora or flags.finetune:
        steps = FINE_TUNING_STEPS
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
    elif rate is None and flags.finetune and rate_known:
        rate = FINE_TUNING_RATE
        notes.append(
            f"--lr {rate:g}: that of supervised fine-tuning of Llama 2 (arXiv 2307.09288, section 3.1); AdamW."
        )
    elif rate is None:
        rate = learning_rate(parameters) if rate_known else CommonFlags.lr
        notes.append(rate_note(rate, parameters) if rate_known else UNKNOWN_RATE)
    if warmup is None:
        warmup = warmup_steps(batch_tokens, steps)
        notes.append(
            f"--warmup-steps {warmup}: GPT-3's 375 million tokens, at most a tenth of the steps (arXiv 2005.14165)."
        )
    return replace(flags, steps=steps, lr=rate, warmup_steps=warmup), tokens, notes


def default_batch(flags: PlanFlags, devices_per_node: int) -> tuple[int, str]:
    """About a million tokens, in a number of sequences that the data ranks, or all devices, divide; and a sentence."""
    length, per_node = flags.model_config().seq_len, flags.devices_per_node or devices_per_node
    target = 1 << round(math.log2(max(DEFAULT_BATCH_TOKENS / length, 1)))
    if flags.names_layout:
        mesh = parse_mesh(flags.mesh)
        micro = 1 if mesh.pp == 1 else flags.microbatches or 2 * mesh.pp
        unit, of = mesh.replica * mesh.dp * max(flags.accumulate, 1) * max(micro, 1), "micro-batches of this layout"
    else:
        unit = (flags.nodes or 1) * per_node
        of = f"{unit:,} devices"
    batch = unit * max(1, round(target / unit))
    tokens = f"{batch * length / 1e6:.2f} million tokens"
    return batch, f"--batch-size not given: {batch:,} sequences ({tokens}), which divide over the {of}."


def batch_for(batch: int, num_devices: int, num_nodes: int) -> int:
    """The nearest batch that divides over all devices; one of fewer sequences than devices over the nodes."""
    unit = num_devices if batch >= num_devices else num_nodes
    return max(round(batch / unit), 1) * unit if batch >= unit else batch


def cards_of(flags: PlanFlags) -> list[str]:
    """The accelerators of --hardware. Raises: ConfigError where several are named and only one may be."""
    names, asked = list(dict.fromkeys(flags.hardware.split(","))), f"--hardware {flags.hardware}"
    if flags.hardware == "any":
        listed, remedy = load_prices(flags.price_file), "Add it in your own price file"
        prices = None if flags.vendor is None else set(map(str.lower, nearest(flags.vendor, listed, "vendor", remedy)))
        table = load_hardware(flags.hardware_file)
        needed = {flags.dtype, flags.matmul_dtype or flags.dtype}
        names = [n for n in table if needed <= table[n].peak_flops.keys() and (prices is None or n.lower() in prices)]
        if not names:
            raise ConfigError(asked, f"a card must have a price and a peak for {flags.dtype}", "Name one card")
    if len(names) > 1:
        unpriced = flags.budget is not None and flags.vendor is None
        for idle, required, instead in (
            (bool(flags.mesh), "--mesh must come with one card", "Name one card, or leave --mesh out"),
            (flags.batch_sizes is not None, "--batch-sizes must come with one card", "Use --batch-size"),
            (flags.price_per_hour is not None, "the price must be known of each card", "Use --vendor"),
            (unpriced, "the price must be known of each card", "Add --vendor"),
        ):
            if idle:
                raise ConfigError(asked, required, instead)
    if flags.max_gib is not None:
        found = [Cluster(find_hardware(name, flags.hardware_file)) for name in names]
        most, card = max((usable_bytes(each) / GIB, each.hardware.name) for each in found)
        if not 0 < flags.max_gib <= most:
            required = f"must be above 0 and at most {most:.4g}, what a plan may fill of {card}"
            raise ConfigError(f"--max-gib {flags.max_gib:g}", required, f"Use --max-gib {most:.4g}")
    return names


def parse_batches(flags: PlanFlags) -> list[int]:
    """--batch-sizes, in order; none where it is not given. Raises: ConfigError."""
    if flags.batch_sizes is None:
        return []
    given, texts = f"--batch-sizes {flags.batch_sizes}", flags.batch_sizes.split(",")
    if not all(text.isascii() and text.isdigit() for text in texts):
        raise ConfigError(given, "must be whole numbers of sequences with commas between", "Use --batch-sizes 256,512")
    for idle, why, instead in (
        (flags.batch_size is not None, "--batch-size must not be given too", "Give one of the two"),
        (flags.names_layout, "must be one, as --mesh is of one batch", "Use --batch-size, once for each"),
        (flags.steps is not None, "must all be of the same tokens, not steps", "Use --tokens 300e9"),
        (flags.looks_for_nodes, "must be one: the smallest cluster is looked for", "Add --nodes 8"),
    ):
        if idle:
            raise ConfigError(given, why, instead)
    return sorted(set(map(int, texts)))


def parse_hours(text: str) -> float:
    """ "72h", "3d" or "90m" -> hours. Raises: ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([mhdw])", text.strip(), re.ASCII)
    if match is None or float(match[1]) == 0:
        raise ConfigError(f"--deadline {text}", "must be a time above 0 with its unit", "Write 72h, 30d, 4w or 90m")
    return float(match[1]) * {"m": 1 / 60, "h": 1, "d": 24, "w": 168}[match[2]]
