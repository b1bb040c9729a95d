"""Predicted seconds of a training step: columns of layouts in, columns of times out.

No JAX here. Ten thousand layouts are a few numpy operations. A step is the slowest stage's micro-batch, times their
number, plus the bubble, plus what the update sends and does, plus the host:

    matmuls      the longer of FLOPs / (peak × efficiency of the smallest dim) and bytes / HBM's whole bandwidth
    memory       bytes that elementwise operations, norms, gradient accumulation and the optimiser move / HBM bandwidth
    tp, cp, pp   collectives and messages of every micro-batch, on the link their axis lands on (α–β, ring)
    dp           gradients and ZeRO's weights (over dp and cp), of which a part hides behind backward
    bubble       idle over ideal × micro-batches × one micro-batch's time
    overhead     launches of a layer, as far as they take longer than the layer itself; the host once a step; stragglers

How good it is: `experiments.calibration` compares it with published runs. It is a prediction; it has not been
measured on the machine you plan for, unless you calibrate an `Efficiency` for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.plan.formulas import bubble_over_ideal, remat_columns
from jaxdist.plan.hardware import Accelerator, Cluster, load_hardware, read_toml, strides

Number = Any  # a Python number, or a numpy array of them

BACKWARD_TRAFFIC = 1.5  # elementwise bytes of backward over forward: the incoming gradient is read as well
# A score that attention by blocks writes to HBM and reads: times in fp32, and in the dtype of products. Forward it is
# written, read for the largest and for the weights, which are written and read. Backward two products are written and
# read; weights and the score's gradient are written, and read once and twice.
BLOCK_FORWARD, BLOCK_BACKWARD = (3, 2), (4, 5)
FUSED_BACKWARD = 2.5  # FLOPs over forward's, of attention that makes its scores again: five products for two
LOGIT_TRAFFIC = 18  # bytes a logit: written in 16 bit, cast to fp32, read and written by softmax, loss and gradient
CORE_LAUNCHES = 0.2  # of a layer's forward, those of attention that writes its scores
# What `tp_ring` adds to a layer, counted in programs compiled for H100 (docs/plan.md): for each sum, activations that
# are copied into and out of their places; for each hop of a ring, launches, as a part of those of a forward.
RING_COPIES, RING_LAUNCHES = 5, 0.06
RING_HIDE = 0.45  # of what `hide` says, in rings: of three published runs with and without them (docs/plan.md)
# Least bars of the kinds of runs that are predicted worse than dense ones: nine tenths of published runs are within
# them, every source with the same weight (`python -m experiments.calibration.sources`), of experts 93 % of 96
# and of adapters all of 20 (`.traced`).
BARS = {"experts": 0.6, "adapters": 0.23, "long sequences": 0.35, "tiny": 4.0}
LONG_SEQUENCES, TINY_WIDTH = 16_384, 768
LAUNCH_SECONDS = 8e-6  # of a copy from Python, one after the other
OPTIMIZER_TRAFFIC = 40  # bytes a parameter: gradient read twice (norm, update), master and two moments read and written


@dataclass(frozen=True)
class Efficiency:
    """What a software stack reaches on an accelerator: the constants of the time model.

    matmul: part of the peak that a large matmul reaches. half_size: a matmul whose smallest dim is this reaches half of
    that. attention: part of the peak that cuDNN's fused attention, which is ours on GPUs, reaches on scores that count,
    forward and backward together; flash2: the same of FlashAttention-2 and older ones, of published runs alone. float8:
    part of `matmul` that products in float8 reach of their own peak, casts and scales included. hbm, inside, between:
    parts of the bandwidths. latency: of the links' latencies. layer_seconds: launches of one layer's forward (twice
    that backward). step_seconds: of a Python program's host, once a step. straggle: by what part a step is longer for
    each time that the nodes double, since all wait for the slowest. hide: part of what may overlap that does.
    relative_error: ± of the total, from the calibration; 0.3 where there was none. matmul_dtype: of products with
    weights, where it is another than the run's.
    """

    matmul: float = 0.7
    half_size: float = 60.0
    attention: float = 0.45
    flash2: float = 0.3
    float8: float = 1.0
    hbm: float = 0.7
    inside: float = 0.75
    between: float = 0.7
    latency: float = 1.0
    layer_seconds: float = 0.0
    step_seconds: float = 0.0
    straggle: float = 0.0
    hide: float = 0.7
    input_bytes_per_s: float = 1e9
    relative_error: float = 0.3
    stack: str = "uncalibrated"
    matmul_dtype: str = ""

    def __post_init__(self):
        for name in ("matmul", "attention", "flash2", "float8", "hbm", "inside", "between"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"efficiency {name}={getattr(self, name)}",
                    "must be a part of a peak, above 0 and at most 1",
                    "Use 0.7",
                )


UNCALIBRATED = Efficiency()


@cache
def efficiency_of(accelerator: str) -> Efficiency:
    """What published programs reach on an accelerator of that name; the guesses where none was measured."""
    known = load_hardware().get(accelerator)
    return calibrated(known) if known else UNCALIBRATED


def calibrated(hardware: Accelerator) -> Efficiency:
    """The constants that an entry of a hardware table names. Raises: ConfigError where there are none of that name."""
    if hardware.calibrated and hardware.calibrated not in EFFICIENCIES:
        given = f"[accelerators.{hardware.name}] calibrated={hardware.calibrated!r}"
        raise ConfigError(given, f"must be one of {', '.join(EFFICIENCIES)}", "Leave it out, or use --efficiencies")
    return EFFICIENCIES.get(hardware.calibrated, UNCALIBRATED)


def read_efficiency(path: str | Path) -> Efficiency:
    """The constants in a TOML file, by the names of `Efficiency`; what it does not name is as in `Efficiency()`.

    Raises: ConfigError for a file that cannot be read, and for a name or value that is none of them.
    """
    found, known = read_toml(Path(path)), {field.name: field for field in fields(Efficiency)}
    for name, value in found.items():
        given = f"{name} = {value!r} in {str(path)!r}"
        if name not in known:
            raise ConfigError(given, "must be one of the time model's constants", f"Use {', '.join(known)}")
        if isinstance(known[name].default, str):
            if not isinstance(value, str):
                raise ConfigError(given, "must be text", f"Write {name} = 'mine'")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(given, "must be a number, not below 0", f"Write {name} = {known[name].default}")
    return Efficiency(**{"stack": Path(path).stem} | found)


# Fitted by `python -m experiments.calibration.sources --write` to published runs of all programs together: what is
# written here and nothing else. `relative_error` is the bar that holds nine tenths of dense rows of sources left out,
# each source with the same weight.
EFFICIENCIES = {
    "h100-published": Efficiency(
        matmul=0.681,
        half_size=68.4,
        attention=0.526,
        flash2=0.199,
        float8=0.936,
        hbm=0.501,
        inside=0.688,
        between=0.804,
        latency=1.38,
        layer_seconds=0.0002,
        step_seconds=0.0526,
        straggle=0.00624,
        hide=0.844,
        relative_error=0.2,
        stack="h100-published",
    ),
    "a100-published": Efficiency(
        matmul=0.786,
        half_size=63.4,
        attention=0.45,
        flash2=0.282,
        float8=0.65,
        hbm=0.595,
        inside=0.679,
        between=0.595,
        latency=1.04,
        layer_seconds=0.0002,
        step_seconds=0.0296,
        straggle=0.00419,
        hide=0.702,
        relative_error=0.17,
        stack="a100-published",
    ),
    "gb200-published": Efficiency(
        matmul=0.582,
        half_size=68.1,
        attention=0.481,
        float8=0.894,
        hbm=0.587,
        inside=0.668,
        between=0.583,
        latency=1.01,
        layer_seconds=0.0002,
        step_seconds=0.0261,
        straggle=0.00572,
        hide=0.673,
        relative_error=0.2,
        stack="gb200-published",
    ),
}


class Repeated(NamedTuple):
    """What backward computes again of one layer to keep less of it, for one position of a device: FLOPs of products and
    of attention's scores that count, bytes that these read and write, and bytes that all-reduces over tp sum (a gather
    or a scatter is half of one). launches: as a part of those of a forward."""

    flops: Number = 0.0
    attention: Number = 0.0
    num_bytes: Number = 0.0
    summed: Number = 0.0
    launches: Number = 0.0


NOTHING = Repeated()


@dataclass(frozen=True, eq=False)
class Layout:
    """Layouts as columns; every field is a number or an array, all of one length.

    microbatches: of one update on one data rank, all passes together; pipeline_microbatches: of one pass (default all).
    rows: sequences of a micro-batch.
    bubble: idle over ideal time; default (p-1)/(vm), or pass `simulate(...).idle_over_ideal`.
    most_layers: of the stage that has most (default ceil(L/p)); last_layers: of the stage that also has the head
        (default L/p); first_layers is for memory alone (default most_layers).
    remat: words of `jaxdist.strategy.ParallelConfig`. gradient_bytes: of one accumulated and reduced element.
    overlap_dp: gradients (and ZeRO-3 weights) are sent during backward. overlap_tp: part of tp's traffic that overlaps
        with matmuls. overlap_pp: messages between stages are sent while stages compute.
    flash: attention that never writes its scores; flash2: by an older kernel than cuDNN's. blocks: attention that
        writes them a block at a time, and makes them again in backward (`jaxdist.parallel.blocked_attention`).
    scatter_gather: without sp, tp ranks send different parts of a message between stages.
    sends: messages of a micro-batch that a stage waits for, both ways together (default 2v).
    spread_table: every stage holds a part of the token table; its two ends get it, and give its gradient, once a step.
    hidden_part: with overlap_dp, of what is sent during backward, the part that has another layer beside it.
    exchanging, gathers_keys: as `ParallelConfig.cp_split`.
    overlap_gather: with overlap_dp, ZeRO-1's new weights are gathered during the next forward.
    overlap_across: with overlap_dp, the sum over replica overlaps with backward as well.
    messages: in which gradients are reduced over dp, or weights gathered, each with a latency of its own. by_layer: at
        least one for each layer and one more, as always with ZeRO-2 and 3.
    always_sums: the gradient of a micro-batch that is alone is added to zeros as well.
    fused_sums: products add to the gradients so far themselves, and write none of their own.
    python: the host runs Python between launches; ours launches one compiled program.
    copies: that the host launches one by one once a step, and nothing runs beside.
    tp_ring: what products gather and scatter over tp moves in chunks, of which all but one have a product beside them.
    ring_copies: of an activation, that a ring makes for each sum (default: our program's).
    loss_chunks: as in `ParallelConfig`.
    experts_over_tp: as in `ParallelConfig`. exchanged: elements of a layer's all-to-alls between experts in forward,
        for one position of a device.
    gathers: of ZeRO-3's weights in a micro-batch (default 2, or 1 with keep_after_forward).
    repeated: beside what `remat` says.
    update_flops: of the optimizer's matmuls on a device, in float32 as cards multiply it by default, or with
        update_bf16 in that. update_passes: bytes that it moves beside them.
        update_over_data, update_over_tp: bytes of the all-to-alls between them.
        update_over_copies: of the gathers where ranks hold the same and do a share each.
    """

    pp: Number = 1
    replica: Number = 1
    dp: Number = 1
    cp: Number = 1
    tp: Number = 1
    ep: Number = 1
    microbatches: Number = 1
    rows: Number = 1
    zero: Number = 0
    sp: Number = False
    remat: str | np.ndarray = "none"
    chunks: Number = 1
    pipeline_microbatches: Number | None = None
    bubble: Number | None = None
    first_layers: Number | None = None
    most_layers: Number | None = None
    last_layers: Number | None = None
    keep_after_forward: Number = False
    gradient_bytes: Number = 4
    overlap_dp: Number = True
    overlap_tp: Number = 0.0
    overlap_pp: Number = False
    flash: Number = False
    flash2: Number = False
    blocks: Number = False
    dropout: Number = False
    scatter_gather: Number = False
    sends: Number | None = None
    spread_table: Number = False
    gathers: Number | None = None
    exchanging: Number = 1
    gathers_keys: Number = False
    overlap_gather: Number = False
    overlap_across: Number = True
    hidden_part: Number = 1.0
    experts_over_tp: Number = False
    exchanged: Number = 0.0
    messages: Number = 1
    by_layer: Number = False
    always_sums: Number = False
    fused_sums: Number = False
    python: Number = True
    copies: Number = 0
    tp_ring: Number = False
    ring_copies: Number = RING_COPIES
    loss_chunks: Number = 1
    repeated: Repeated = NOTHING
    update_flops: Number = 0.0
    update_passes: Number = 0.0
    update_bf16: bool = False
    update_over_data: Number = 0.0
    update_over_tp: Number = 0.0
    update_over_copies: Number = 0.0

    @property
    def num_devices(self) -> Number:
        return np.asarray(self.pp) * self.replica * self.dp * self.cp * self.tp

    @property
    def sequences(self) -> Number:
        """In one update, over the whole mesh."""
        return np.asarray(self.replica) * self.dp * self.microbatches * self.rows


PARTS = ("compute", "memory", "overhead", "tp", "cp", "ep", "dp", "pp", "bubble", "input")
BINDS = ("compute", "memory", "communication", "bubble", "host")
# What binds a step: (as the subject of a sentence, what would shorten the step).
RELIEF = {
    "compute": ("Compute binds", "more devices, less recomputation, or lower-precision matmuls"),
    "memory": (
        "Memory bandwidth binds",
        "fused norms and activations, flash attention, sp, or larger micro-batches",
    ),
    "tp": ("Tensor-parallel communication binds", "a smaller tp inside one node, sp, or overlap (tp_ring)"),
    "cp": ("Context-parallel communication binds", "a smaller cp, another cp_kind, or fewer key/value heads"),
    "ep": ("The exchange of tokens between experts binds", "a smaller ep inside one node, or a capacity"),
    "dp": (
        "Data-parallel communication binds",
        "more tokens a device (accumulate), overlap, 16-bit gradients, or a lower ZeRO stage",
    ),
    "pp": ("Messages between stages bind", "fewer chunks, or overlap"),
    "bubble": ("The pipeline's bubble binds", "more micro-batches, chunks, a zero-bubble schedule, or fewer stages"),
    "host": ("The host binds", "larger micro-batches, or a faster input pipeline"),
}


@dataclass(frozen=True, eq=False)
class StepTime:
    """Columns of seconds, one entry a layout. `dp` is what shows; `dp_hidden` what overlaps with backward.

    error: relative half-width of `total`'s bar. mfu: of the FLOPs that `work` counts, whatever is recomputed.
    """

    compute: np.ndarray
    memory: np.ndarray
    overhead: np.ndarray
    tp: np.ndarray
    cp: np.ndarray
    ep: np.ndarray
    dp: np.ndarray
    dp_hidden: np.ndarray
    pp: np.ndarray
    bubble: np.ndarray
    input: np.ndarray
    total: np.ndarray
    error: np.ndarray
    mfu: np.ndarray

    @property
    def communication(self) -> np.ndarray:
        return self.tp + self.cp + self.ep + self.dp + self.pp

    @property
    def binds(self) -> np.ndarray:
        """Which of `BINDS` takes most of each step."""
        groups = (self.compute, self.memory, self.communication, self.bubble, self.overhead + self.input)
        return np.array(BINDS)[np.argmax(np.stack(groups), axis=0)]

    def relief(self, index: int = 0) -> str:
        """What would shorten this step, and what part of it that is now."""
        binds = str(self.binds[index])
        if binds == "communication":
            binds = max(("tp", "cp", "ep", "dp", "pp"), key=lambda name: getattr(self, name)[index])
        seconds = self.overhead + self.input if binds == "host" else getattr(self, binds)
        cause, relief = RELIEF[binds]
        share = seconds[index] / self.total[index]
        return f"{cause}: {relief} would shorten the step. It is {share:.0%} of the predicted step."


class AttentionShape(NamedTuple):
    """A causal attention: query heads, heads of keys and values, width of a head, and the window, if it has one."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None = None

    def seen(self, seq_len: int) -> float:
        """Keys that a query sees, in the mean."""
        most = min(self.window or seq_len, seq_len)
        return most - most * (most - 1) / (2 * seq_len)

    def reached(self, chunk: Number) -> Number:
        """Chunks of so many positions before a query's own that hold keys it sees; infinitely many without a window."""
        return np.inf if self.window is None else np.ceil((self.window - 1) / chunk)


class Work(Protocol):
    """What a model's layers and loss compute: `jaxdist.plan.parts.work_of` reads it from a trace,
    `experiments.calibration.work` from the closed forms of published models.

    expert_parameters: of layer_parameters, those of experts, all of them. layer_sums: all-reduces over tp of one
    layer's forward; mixture_sums, of these, around experts; ring_sums, those that `tp_ring` takes. matrices_again,
    sums_again, sp_sums_again: of the seconds of products with weights, and of these sums without sp and with it, the
    part that a layer repeats which runs again alone for its backward: nobody needs its result. table_parameters: of the
    largest parameter that the loss uses, vocab_size its rows. trained_layer, trained_table: what part of these
    parameters is trained. layer_backward, head_backward: FLOPs of the backward of products with weights over those of
    their forward: 2, or 1 where weights are frozen. attention: every causal attention of a layer; none where the model
    has another. matmul(n, k, m): seconds of a product [positions, k] x [k, n]; m, another dim that may be the smallest,
    where both are activations; part where its rows come in groups of that part of the positions, each with a matrix.
    """

    num_layers: int
    seq_len: int
    width: int
    vocab_size: int
    layer_parameters: int
    expert_parameters: int
    table_parameters: int
    embedding_parameters: int
    layer_sums: float
    mixture_sums: float
    ring_sums: float
    matrices_again: float
    sums_again: float
    sp_sums_again: float
    trained_layer: float
    trained_table: float
    layer_backward: float
    head_backward: float
    attention: Sequence[AttentionShape]

    @property
    def flops_per_token(self) -> float:
        """FLOPs of forward and backward."""

    def matrices(self, matmul: Callable, tp: Number, ep: Number, experts_over_tp: Number) -> Number:
        """Seconds of a layer's products with its weights; experts get as much each."""

    def in_rings(self, matmul: Callable, tp: Number) -> Number:
        """Seconds of the products in `matrices` that `tp_ring` takes in chunks."""

    def core(self, matmul: Callable, tp: Number) -> Number:
        """Seconds of a layer's products of activations where attention writes its scores."""

    def head(self, matmul: Callable, tp: Number) -> Number:
        """Seconds of the loss's products."""

    def elementwise_bytes(self, dropout: Number, flash: Number, itemsize: int) -> tuple[Number, Number, Number]:
        """HBM bytes of one position's forward through a layer beside products: (whole on every tp rank unless sp,
        split over tp, attention's scores)."""


def step_time(
    work: Work,
    layout: Layout,
    cluster: Cluster,
    efficiency: Efficiency = Efficiency(),
    dtype: str = "bfloat16",
) -> StepTime:
    """Predicted time of one update for every layout in the columns. Matmuls run in `dtype`, 16 bits unless float32.

    A layout must already be legal (heads, layers and batch divide); nothing is checked here, and memory not at all: see
    `jaxdist.plan.formulas`. A ring of cp hides behind attention; what cp sends otherwise shows in full.
    Raises: ConfigError for a dtype the accelerator has no peak for, and an unknown remat.
    """
    step = _Step(work, layout, cluster, efficiency, efficiency.matmul_dtype or dtype)
    e, parameters = efficiency, _Parameters.of(work, layout)
    micro = step.micro_batch(parameters)
    time = step.passes(micro)
    time["memory"] = time["memory"] + step.optimiser_seconds(parameters)
    time["overhead"] = (
        time["overhead"] + e.step_seconds * np.asarray(layout.python) + LAUNCH_SECONDS * np.asarray(layout.copies)
    )
    time["input"] = step.m * layout.rows * work.seq_len * 8 / e.input_bytes_per_s  # tokens and targets, 4 bytes each
    time["dp"], hidden = step.over_data_ranks(parameters, working=micro["compute"] + micro["memory"])
    update = step.update_of_matrices()
    time |= {name: time[name] + seconds for name, seconds in update.items()}

    nodes = np.maximum(layout.num_devices / cluster.devices_per_node, 1)
    time["overhead"] = time["overhead"] + e.straggle * np.log2(nodes) * sum(time.values())
    total = sum(time.values())
    flops = layout.sequences * work.seq_len * work.flops_per_token
    exposed = (time["tp"] + time["cp"] + time["ep"] + time["dp"] + time["pp"]) / total
    columns = {
        **time,
        "dp_hidden": hidden,
        "total": total,
        # Links are known less well than matmuls: a step that mostly communicates is as uncertain again.
        "error": bar_of(work, e) * (1 + exposed),
        "mfu": flops / (total * step.peak * layout.num_devices),
    }
    length = np.broadcast_shapes((1,), *(np.shape(column) for column in columns.values()))
    return StepTime(**{field.name: np.broadcast_to(columns[field.name], length) for field in fields(StepTime)})


def bar_of(work: Work, efficiency: Efficiency) -> float:
    """± of a step in which nothing communicates."""
    return max(efficiency.relative_error, BARS.get(kind_of(work), 0.0))


def kind_of(work: Work) -> str:
    """A key of `BARS`, or "dense"."""
    if work.expert_parameters:
        return "experts"
    if work.width < TINY_WIDTH:
        return "tiny"
    if work.seq_len >= LONG_SEQUENCES:
        return "long sequences"
    return "adapters" if work.trained_layer < 0.5 else "dense"


class _Parameters(NamedTuple):
    """How many parameters a device of the slowest stage has. held: as they are stored. table: of the token table that
    it computes with. trained, updated: of all that has a gradient, where it is made and where it is applied.
    trained_table: of `table`. experts: all of its experts', updated_experts those of `updated`."""

    held: Number
    table: Number
    trained: Number
    updated: Number
    trained_table: Number
    experts: Number
    updated_experts: Number

    @classmethod
    def of(cls, work: Work, layout: Layout) -> "_Parameters":
        pp, tp, ep = (np.asarray(getattr(layout, name)) for name in ("pp", "tp", "ep"))
        dense, experts = (
            work.num_layers * part / pp / tp
            for part in (work.layer_parameters - work.expert_parameters, work.expert_parameters / ep)
        )
        layers, table = dense + experts, work.table_parameters / tp
        spread = np.where(layout.spread_table, pp, 1)
        held, trained_table = layers + table / spread, table * work.trained_table
        trained = layers * work.trained_layer + trained_table
        updated = layers * work.trained_layer + trained_table / spread
        return cls(held, table, trained, updated, trained_table, experts, experts * work.trained_layer)


class _Core(NamedTuple):
    """Attention's core in one layer, one micro-batch: seconds of products and of HBM traffic; fused: whether its scores
    are never all there."""

    fused: np.ndarray
    forward: Number
    backward: Number
    forward_traffic: Number
    backward_traffic: Number


class _Sent(NamedTuple):
    forward: Number
    backward: Number


class _Step:
    """The parts of a step: columns of seconds by the names of `PARTS`, of what happens on one device.

    positions: of one micro-batch on one device. activation: bytes of one array [positions, width]. reached: FLOP/s of a
    large product; attention_peak: those of the peak that attention's fused kernels reach. hbm: bytes/s that are
    reached. operand: bytes of an operand's element. apart: strides of the mesh's axes in devices. m: micro-batches.
    """

    def __init__(self, work: Work, layout: Layout, cluster: Cluster, efficiency: Efficiency, dtype: str):
        self.work, self.layout, self.e = work, layout, efficiency
        self.itemsize = {"float32": 4, "tfloat32": 4, "float64": 8}.get(dtype, 2)
        # In float8 activations' products are in 16 bit.
        wide, self.operand = ("bfloat16", 1) if dtype == "float8" else (dtype, self.itemsize)
        self.peak, e = cluster.hardware.peak(dtype), efficiency
        self.reached = self.peak * e.matmul * (e.float8 if dtype == "float8" else 1)
        self.attention_peak = cluster.hardware.peak(wide) * np.where(layout.flash2, e.flash2, e.attention)
        self.hbm = cluster.hardware.memory_bytes_per_s * e.hbm
        self.cluster = cluster.with_latency(e.latency)

        self.pp, self.dp, self.cp, self.tp, self.ep, self.replica = (
            np.asarray(getattr(layout, name)) for name in ("pp", "dp", "cp", "tp", "ep", "replica")
        )
        self.apart = strides({name: getattr(self, name) for name in ("pp", "replica", "dp", "cp", "tp")})
        self.m, self.sp, self.zero = np.asarray(layout.microbatches), np.asarray(layout.sp), np.asarray(layout.zero)
        self.grad = np.asarray(layout.gradient_bytes)
        self.positions = layout.rows * work.seq_len / self.cp
        self.activation = self.positions * work.width * self.itemsize
        most, last = layout.most_layers, layout.last_layers
        self.most_layers = np.ceil(work.num_layers / self.pp) if most is None else np.asarray(most)
        self.last_layers = work.num_layers / self.pp if last is None else np.asarray(last)

    # ---- a product, a message

    def matmul(self, n, k, m=None, part=1):
        """`Work.matmul`."""
        positions = self.positions
        rows = positions * part if m is None else m
        smallest = np.minimum(np.minimum(rows, n), k)
        by_flops = 2 * positions * n * k / (self.reached * smallest / (smallest + self.e.half_size))
        # What is read: rows, and for those of each group a matrix; of activations the scores are all that counts.
        read = positions * k + n * k / part if m is None else 0
        num_bytes = positions * n * self.itemsize + read * self.operand
        return np.maximum(by_flops, num_bytes / self.cluster.hardware.memory_bytes_per_s)

    def collective(self, algorithm: str, size, apart, num_bytes):
        """Over so many ranks, so many devices apart."""
        return self.cluster.collective_seconds(algorithm, size, apart, num_bytes, self.e.inside, self.e.between)

    def ring(self, algorithm: str, axis: str, size, num_bytes):
        return self.collective(algorithm, size, self.apart[axis], num_bytes)

    def sum_over_tp(self):
        """One all-reduce of an activation. With sp it is a gather and a scatter, of which there are no trees."""
        names = "ring_all_reduce", "all_reduce"
        return np.where(self.sp, *(self.ring(name, "tp", self.tp, self.activation) for name in names))

    # ---- one layer and the loss, one micro-batch

    def layer(self) -> dict[str, Number]:
        work, layout, e, hbm, tp, sp = self.work, self.layout, self.e, self.hbm, self.tp, self.sp
        positions, activation = self.positions, self.activation
        over_tp = np.asarray(layout.experts_over_tp)
        core = self._attention_core()
        matrices = work.matrices(self.matmul, tp, self.ep, over_tp)
        whole, split, scores = work.elementwise_bytes(layout.dropout, core.fused, self.itemsize)
        elementwise = positions * (whole / np.where(sp, tp, 1) + split / tp) / hbm
        softmax = positions * scores / tp / hbm
        all_reduce = self.sum_over_tp()

        selective, every = remat_columns(layout.remat)
        again = every > 0  # recomputed forwards
        alone = np.asarray(layout.remat) == "block"
        products_again = again * np.where(alone, work.matrices_again, 1)
        sums_again = again * np.where(alone, np.where(sp, work.sp_sums_again, work.sums_again), 1)
        core_again = again | (selective & ~core.fused)
        repeated = layout.repeated

        sums = work.layer_sums - over_tp * work.mixture_sums
        sent_again = self.ring("all_reduce", "tp", tp, positions * repeated.summed)
        in_rings = np.asarray(layout.tp_ring) * work.ring_sums
        summed = (2 + sums_again) * sums * all_reduce + np.where(repeated.summed, sent_again, 0)
        # Products of forward, and of backward those with weights, go chunk by chunk.
        by_chunk = np.where(in_rings, work.in_rings(partial(self.matmul, part=1 / tp), tp), 0)
        slower = by_chunk - np.where(in_rings, work.in_rings(self.matmul, tp), 0)
        hidden = np.minimum(in_rings * all_reduce, (tp - 1) / tp * by_chunk)
        summed = summed - RING_HIDE * e.hide * (2 + again) * hidden
        products = (1 + work.layer_backward + products_again) * matrices + (2 + again) * slower
        sent = self._over_cp(core)
        layer = {
            "compute": products
            + core.backward
            + (1 + core_again) * core.forward
            + positions * (repeated.flops / self.reached + repeated.attention / self.attention_peak),
            "memory": (1 + BACKWARD_TRAFFIC + again) * elementwise
            + (1 + BACKWARD_TRAFFIC + core_again) * softmax
            + (1 + core_again) * core.forward_traffic
            + core.backward_traffic
            + (positions * repeated.num_bytes + (2 + again) * in_rings * layout.ring_copies * activation) / hbm,
            "tp": summed * (1 - np.asarray(layout.overlap_tp)),
            "cp": (1 + again) * sent.forward + sent.backward,
            "ep": (2 + again) * self._between_experts(),
        }
        launches = 3 + again + CORE_LAUNCHES * (core_again & ~again) + repeated.launches
        launches = launches + (2 + again) * in_rings * 2 * (tp - 1) * RING_LAUNCHES  # of a gather, and of a scatter
        layer["overhead"] = np.maximum(launches * e.layer_seconds - sum(layer.values()), 0)
        return layer

    def head(self) -> dict[str, Number]:
        """Chunks of the loss add to the table's gradient in 32 bits, and each has its largest logit and its sum over
        tp."""
        work, tp = self.work, self.tp
        loss_chunks = np.asarray(self.layout.loss_chunks)
        chunked = np.where(loss_chunks > 1, loss_chunks, 0)
        return {
            "compute": (1 + work.head_backward) * work.head(self.matmul, tp),
            "memory": self.positions * LOGIT_TRAFFIC * work.vocab_size / tp / self.hbm
            + 8 * chunked * work.table_parameters * work.trained_table / tp / self.hbm,
            "overhead": 0.0,
            "tp": 2 * self.sum_over_tp() + 2 * (loss_chunks - 1) * self.ring("all_reduce", "tp", tp, 0.0),
            "cp": 0.0,
            "ep": 0.0,
        }

    # ---- one micro-batch on the slowest stage, and all of them

    def micro_batch(self, parameters: _Parameters) -> dict[str, Number]:
        layout, layer, head = self.layout, self.layer(), self.head()
        most, last = self.most_layers, self.last_layers
        with_head = last * sum(layer.values()) + sum(head.values()) >= most * sum(layer.values())
        micro = {name: np.where(with_head, last * layer[name] + head[name], most * layer[name]) for name in layer}
        # Of several micro-batches each gradient is added to the sum so far, one alone is only written.
        added = np.where(layout.fused_sums, 0, self.itemsize) + 2 * self.grad
        written = np.where((self.m > 1) | layout.always_sums, added, self.grad)
        micro["memory"] = micro["memory"] + parameters.trained * written / self.hbm
        message = self.activation / np.where(self.sp | np.asarray(layout.scatter_gather), self.tp, 1)
        sends = 2 * np.asarray(layout.chunks) if layout.sends is None else np.asarray(layout.sends)
        links = self.e.inside, self.e.between
        between = sends * self.cluster.permute_seconds(self.pp, self.apart["pp"], message, *links)
        micro["pp"] = np.where(layout.overlap_pp, np.maximum(between - sum(micro.values()), 0), between)
        return micro

    def passes(self, micro: dict[str, Number]) -> dict[str, Number]:
        """All micro-batches of an update, and the bubble."""
        layout = self.layout
        passes = self.m if layout.pipeline_microbatches is None else layout.pipeline_microbatches
        idle = bubble_over_ideal(self.pp, passes, layout.chunks) if layout.bubble is None else np.asarray(layout.bubble)
        time = {name: self.m * seconds for name, seconds in micro.items()}
        time["bubble"] = idle * sum(time.values())
        return time

    # ---- once an update

    def own(self, parameters: _Parameters) -> Number:
        """Updated parameters of one shard. ZeRO shards an expert over fewer ranks, since fewer hold it."""
        return (parameters.updated + (self.ep - 1) * parameters.updated_experts) / (self.dp * self.cp)

    def optimiser_seconds(self, parameters: _Parameters) -> Number:
        here: Number = np.where(self.zero >= 1, self.own(parameters), parameters.updated)
        return here * OPTIMIZER_TRAFFIC / self.hbm

    def update_of_matrices(self) -> dict[str, Number]:
        """Seconds of what an optimizer does for whole matrices, none of which hides."""
        layout, peaks = self.layout, self.cluster.hardware.peak_flops
        wide = peaks.get("tfloat32", peaks.get("bfloat16", self.peak))
        peak = np.where(layout.update_bf16, peaks.get("bfloat16", wide), wide)
        data, tp = np.asarray(layout.update_over_data), np.asarray(layout.update_over_tp)
        copies, ranks = np.asarray(layout.update_over_copies), self.replica * self.dp * self.cp
        gather = np.where(
            self.zero == 0,
            self.ring("ring_all_gather", "cp", ranks, copies),
            self.ring("ring_all_gather", "replica", self.replica, copies),
        )
        return {
            "compute": np.asarray(layout.update_flops) / (peak * self.e.matmul),
            "memory": np.asarray(layout.update_passes) / self.hbm,
            "dp": np.where(data, self.ring("all_to_all", "cp", self.dp * self.cp, data), 0)
            + np.where(copies, gather, 0),
            "tp": np.where(tp, self.ring("all_to_all", "tp", self.tp, tp), 0),
        }

    def over_data_ranks(self, parameters: _Parameters, working: Number) -> tuple[Number, Number]:
        """Seconds of gradients and of ZeRO's weights: (what shows, what hides). working: seconds of a micro-batch in
        which they may."""
        layout, zero, m = self.layout, self.zero, self.m
        gathers_later = np.asarray(layout.overlap_gather) & (zero == 1)  # in the next forward
        scatter, gather = self._scatter_and_gather(parameters)
        across = self.ring("all_reduce", "replica", self.replica, self.own(parameters) * self.grad)
        across = across + np.where(layout.spread_table, self._ends_of_the_table(parameters), 0)
        rounds = np.where(zero >= 2, m, 1)
        each = np.where(layout.keep_after_forward, 1, 2) if layout.gathers is None else np.asarray(layout.gathers)
        gathers = np.where(zero == 3, each * m, 1)

        may_hide = rounds * scatter + np.where(layout.overlap_across, across, 0)
        may_hide = layout.hidden_part * (may_hide + np.where((zero == 3) | gathers_later, gathers * gather, 0))
        backward = 2 / 3 + gathers_later / 3  # of a micro-batch
        # Chunk by chunk pass the last micro-batches, as many as stages: gradients of all but one have another beside
        # them.
        chunks = np.asarray(layout.chunks)
        last = np.where(chunks > 1, np.minimum(m, self.pp) * (1 - 1 / chunks), 1)
        window = np.where(zero == 3, m, np.where(zero == 2, rounds, last) * backward) * working
        hidden = np.where(layout.overlap_dp, self.e.hide * np.minimum(may_hide, window), 0)
        return rounds * scatter + across + gathers * gather - hidden, hidden

    def _scatter_and_gather(self, parameters: _Parameters) -> tuple[Number, Number]:
        """Seconds of one reduction of gradients over dp and cp (a scatter with ZeRO), and of one gather of weights."""
        zero, grad = self.zero, self.grad
        updated, updated_experts = parameters.updated, parameters.updated_experts
        by_layer = (zero >= 2) | np.asarray(self.layout.by_layer)
        messages = np.maximum(self.layout.messages, by_layer * (self.most_layers + 1))

        def both(algorithm, num_bytes, of_experts):
            """Over the ranks that hold the same; `num_bytes` are those of experts and of the rest."""
            each, each_of_experts = (num_bytes - of_experts) / messages, of_experts / messages
            # The ranks of dp outside of ep; of cp, where ep takes it whole.
            ranks, apart = self.dp * self.cp // self.ep, self.apart["cp"] * self.ep
            experts_apart = self.collective(algorithm, ranks, apart, each_of_experts)
            all_apart = self.ring(algorithm, "cp", self.dp * self.cp, each)
            return messages * (all_apart + np.where(of_experts, experts_apart, 0))

        scattered, summed = (
            both(algorithm, updated * grad, updated_experts * grad)
            for algorithm in ("ring_reduce_scatter", "all_reduce")
        )
        gathered, gathered_experts = (
            np.where(zero == 3, whole, changed) * self.itemsize
            for whole, changed in ((parameters.held, updated), (parameters.experts, updated_experts))
        )
        gather = np.where(zero == 0, 0, both("ring_all_gather", gathered, gathered_experts))
        return np.where(zero == 0, summed, scattered), gather

    def _ends_of_the_table(self, parameters: _Parameters) -> Number:
        """Seconds of what an end gives and gets of a table that is spread over pp: as many parts as in a ring."""
        return self.ring("ring_reduce_scatter", "pp", self.pp, parameters.trained_table * self.grad) + self.ring(
            "ring_all_gather", "pp", self.pp, parameters.table * self.itemsize
        )

    # ---- parts of a layer

    def _attention_core(self) -> _Core:
        """Fused attention computes the scores that count; one that writes them, `work.core`."""
        work, layout, tp, positions = self.work, self.layout, self.tp, self.positions
        known = len(work.attention) > 0
        flash, blocks = (np.asarray(column, bool) & known for column in (layout.flash, layout.blocks))
        seen = sum(each.heads * each.seen(work.seq_len) for each in work.attention) / tp  # scores of a position
        flops = sum(4 * each.heads * each.head_dim * each.seen(work.seq_len) for each in work.attention) / tp
        by_blocks = sum(
            self.matmul(2 * each.heads * each.seen(work.seq_len) / tp, each.head_dim, m=each.head_dim)
            for each in work.attention
        )
        written = np.where(blocks, by_blocks, work.core(self.matmul, tp))
        forward = np.where(flash, positions * flops / self.attention_peak, written)
        traffic = (
            np.where(blocks, positions * seen * (4 * wide + self.itemsize * narrow) / self.hbm, 0)
            for wide, narrow in (BLOCK_FORWARD, BLOCK_BACKWARD)
        )
        fused = flash | blocks
        return _Core(fused, forward, np.where(fused, FUSED_BACKWARD, 2) * forward, *traffic)

    def _between_experts(self) -> Number:
        """Seconds of one forward's all-to-alls. Neighbours among the ranks of dp x cp, or of tp before them, hold
        different experts."""
        over_tp = np.asarray(self.layout.experts_over_tp)
        return self.collective(
            "all_to_all",
            self.ep * np.where(over_tp, self.tp, 1),
            np.where(over_tp, self.apart["tp"], self.apart["cp"]),
            self.positions * self.layout.exchanged * self.itemsize,
        )

    def _over_cp(self, core: _Core) -> _Sent:
        """Seconds that show of what one layer sends over cp for a micro-batch (`jaxdist.parallel.context_parallel`)."""
        layout, cluster, e, cp, tp = self.layout, self.cluster, self.e, self.cp, self.tp
        exchanging, positions, itemsize = np.asarray(layout.exchanging), self.positions, self.itemsize
        groups, links = cp // exchanging, (e.inside, e.between)

        def message(num_bytes, ranks=cp):
            return cluster.permute_seconds(ranks, tp, num_bytes, *links)

        ring, ring_back, in_full = 0.0, 0.0, 0.0
        for each in self.work.attention:
            keys = 2 * positions * np.maximum(each.kv_heads / tp, 1) * each.head_dim * itemsize
            near = np.minimum(each.reached(self.work.seq_len / (2 * groups)), groups - 1)
            gather = cluster.collective_seconds("ring_all_gather", cp, tp, cp * keys, *links)
            # Queries and the result, keys and values: a part of each to every other rank of the group.
            swapped = keys + 2 * positions * each.heads / tp * each.head_dim * itemsize
            exchange = (exchanging - 1) * message(swapped / exchanging, exchanging)
            round_, is_ring = near * message(keys), near == groups - 1
            ring = ring + np.where(layout.gathers_keys, 0, round_)
            # A ring's backward sends the keys again, and gradients in fp32; the near chunks' are their transposes.
            gradients = np.where(is_ring, near * message(keys * max(4, itemsize) / itemsize), 0)
            ring_back = ring_back + np.where(layout.gathers_keys, 0, round_ + gradients)
            in_full = in_full + np.where(layout.gathers_keys, gather, 0) + exchange
        beside = core.forward + core.forward_traffic, core.backward + core.backward_traffic
        shown = (sent - e.hide * np.minimum(sent, time) for sent, time in zip((ring, ring_back), beside, strict=True))
        return _Sent(*(each + in_full for each in shown))
