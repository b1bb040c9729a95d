"""Predicted seconds of a training step: columns of layouts in, columns of times out.

No JAX here. Ten thousand layouts are a few numpy operations. A step is the slowest stage's micro-batch, times their
number, plus the bubble, plus what the update sends and does, plus the host:

    matmuls      the longer of FLOPs / (peak × efficiency of the smallest dim) and bytes / HBM's whole bandwidth
    memory       bytes that elementwise operations, norms, gradient accumulation and the optimiser move / HBM bandwidth
    tp, cp, pp   collectives and messages of every micro-batch, on the link their axis lands on (α–β, ring)
    dp           gradients and ZeRO's weights (over dp and cp), of which a part hides behind backward
    bubble       idle over ideal × micro-batches × one micro-batch's time
    overhead     launches of a layer, as far as they take longer than the layer itself; the host once a step; stragglers

How good it is: `jaxdist.plan.papers.calibration` compares it with published runs. It is a prediction; it has not been
measured on the machine you plan for, unless you calibrate an `Efficiency` for it.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxdist.errors import ConfigError
from jaxdist.plan.hardware import Cluster, read_toml, strides
from jaxdist.plan.papers.formulas import bubble_over_ideal, remat_columns

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
# Of the bar of a mixture of experts, at least: nine tenths of 46 published runs are within it, by constants of dense
# models (`python -m jaxdist.plan.papers.mixtures`).
MIXTURE_ERROR = 0.24
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
    relative_error: ± of the total, from the calibration; 0.3 where there was none.
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

    def __post_init__(self):
        for name in ("matmul", "attention", "flash2", "float8", "hbm", "inside", "between"):
            if not 0 < getattr(self, name) <= 1:
                raise ConfigError(
                    f"efficiency {name}={getattr(self, name)}",
                    "it is a part of a peak, above 0 and at most 1",
                    "Use 0.7",
                )


UNCALIBRATED = Efficiency()


def efficiency_of(accelerator: str) -> Efficiency:
    """What published programs reach on an accelerator of that name; the guesses where none was measured."""
    families = {"h100": "h100-published", "h200": "h100-published", "a100-40": "a100-published"}
    name = (families | {"a100-80": "a100-published"}).get(accelerator)
    return UNCALIBRATED if name is None else EFFICIENCIES[name]


def read_efficiency(path: str | Path) -> Efficiency:
    """The constants in a TOML file, by the names of `Efficiency`; what it does not name is as in `Efficiency()`.

    Raises: ConfigError for a file that cannot be read, and for a name or value that is none of them.
    """
    found, known = read_toml(Path(path)), {field.name: field for field in fields(Efficiency)}
    for name, value in found.items():
        given = f"{name} = {value!r} in {str(path)!r}"
        if name not in known:
            raise ConfigError(given, "it is not one of the time model's constants", f"Use {', '.join(known)}")
        if name == "stack":
            if not isinstance(value, str):
                raise ConfigError(given, "it is the constants' name", "Write stack = 'mine'")
        elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(given, "it is a number, not below 0", f"Write {name} = {known[name].default}")
    return Efficiency(**{"stack": Path(path).stem} | found)


# Fitted by `python -m jaxdist.plan.papers.calibration --fit` to published runs: what is written here and nothing else.
# Errors are in docs/plan.md; `relative_error` is the largest one of a run that was left out of the fit.
EFFICIENCIES = {
    "a100-megatron": Efficiency(matmul=0.813, half_size=35.8, hbm=0.573, relative_error=0.1, stack="a100-megatron"),
    "h100-nanotron": Efficiency(
        matmul=0.643, flash2=0.3, step_seconds=0.0461, relative_error=0.17, stack="h100-nanotron"
    ),
    "h100-mpt": Efficiency(matmul=0.545, flash2=0.183, relative_error=0.14, stack="h100-mpt"),
    "h100-torchtitan-float8": Efficiency(matmul=0.55, flash2=0.2, relative_error=0.26, stack="h100-torchtitan-float8"),
    # `python -m jaxdist.plan.papers.sources --write`: of all programs together; `relative_error` is the bar that holds
    # nine tenths of the rows of sources that were left out.
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
        relative_error=0.137,
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
        relative_error=0.149,
        stack="a100-published",
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
    remat: words of `jaxdist.config.ParallelConfig`. gradient_bytes: of one accumulated and reduced element.
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
    `jaxdist.plan.papers.work` from the closed forms of published models.

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
        """Of forward and backward."""

    def matrices(self, matmul: Callable, tp: Number, ep: Number, experts_over_tp: Number) -> Number:
        """Seconds of a layer's products with its weights; experts get as much each."""

    def in_rings(self, matmul: Callable, tp: Number) -> Number:
        """Of `matrices`, those of the products that `tp_ring` takes in chunks."""

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
    `jaxdist.plan.papers.formulas`. A ring of cp hides behind attention; what cp sends otherwise shows in full.
    Raises: ConfigError for a dtype the accelerator has no peak for, and an unknown remat.
    """
    itemsize = {"float32": 4, "tfloat32": 4, "float64": 8}.get(dtype, 2)
    peak, e, h = cluster.hardware.peak(dtype), efficiency, work.width
    reached = peak * e.matmul * (e.float8 if dtype == "float8" else 1)
    wide, operand = ("bfloat16", 1) if dtype == "float8" else (dtype, itemsize)  # activations' products in 16 bit
    pp, dp, cp, tp, ep = (np.asarray(getattr(layout, name)) for name in ("pp", "dp", "cp", "tp", "ep"))
    replica, m, sp = np.asarray(layout.replica), np.asarray(layout.microbatches), np.asarray(layout.sp)
    zero, grad = np.asarray(layout.zero), np.asarray(layout.gradient_bytes)
    selective, every = remat_columns(layout.remat)
    apart = strides({"pp": pp, "replica": replica, "dp": dp, "cp": cp, "tp": tp})
    cluster = cluster.with_latency(e.latency)
    hbm = cluster.hardware.memory_bytes_per_s * e.hbm
    positions = layout.rows * work.seq_len / cp  # of one micro-batch on one device

    def matmul(n, k, m=None, part=1):
        rows = positions * part if m is None else m
        smallest = np.minimum(np.minimum(rows, n), k)
        by_flops = 2 * positions * n * k / (reached * smallest / (smallest + e.half_size))
        # What is read: rows, and for those of each group a matrix; of activations the scores are all that counts.
        read = positions * k + n * k / part if m is None else 0
        num_bytes = positions * n * itemsize + read * operand
        return np.maximum(by_flops, num_bytes / cluster.hardware.memory_bytes_per_s)

    def ring(algorithm, axis, size, num_bytes):
        return cluster.collective_seconds(algorithm, size, apart[axis], num_bytes, e.inside, e.between)

    def both(algorithm, num_bytes, of_experts):
        """Over the ranks that hold the same; `num_bytes` are those of experts and of the rest."""
        each, each_of_experts = (num_bytes - of_experts) / messages, of_experts / messages
        # The ranks of dp outside of ep; of cp, where ep takes it whole.
        experts_apart = cluster.collective_seconds(
            algorithm, dp * cp // ep, apart["cp"] * ep, each_of_experts, e.inside, e.between
        )
        return messages * (ring(algorithm, "cp", dp * cp, each) + np.where(of_experts, experts_apart, 0))

    # ---- one layer, one micro-batch
    over_tp = np.asarray(layout.experts_over_tp)
    attention_peak = cluster.hardware.peak(wide) * np.where(layout.flash2, e.flash2, e.attention)
    core = _attention_core(work, layout, matmul, positions, attention_peak, hbm, itemsize)
    matrices = work.matrices(matmul, tp, ep, over_tp)
    whole, split, scores = work.elementwise_bytes(layout.dropout, core.fused, itemsize)
    elementwise = positions * (whole / np.where(sp, tp, 1) + split / tp) / hbm
    softmax = positions * scores / tp / hbm
    activation = positions * h * itemsize
    # With sp it is a gather and a scatter, of which there are no trees.
    all_reduce = np.where(sp, *(ring(name, "tp", tp, activation) for name in ("ring_all_reduce", "all_reduce")))
    again = every > 0  # recomputed forwards
    alone = np.asarray(layout.remat) == "block"
    products_again = again * np.where(alone, work.matrices_again, 1)
    sums_again = again * np.where(alone, np.where(sp, work.sp_sums_again, work.sums_again), 1)
    core_again = again | (selective & ~core.fused)
    sent = _over_cp(work, layout, cluster, e, positions, itemsize, core)
    # Neighbours among the ranks of dp x cp, or of tp before them, hold different experts.
    swapped = cluster.collective_seconds(
        "all_to_all",
        ep * np.where(over_tp, tp, 1),
        np.where(over_tp, apart["tp"], apart["cp"]),
        positions * layout.exchanged * itemsize,
        e.inside,
        e.between,
    )
    sums = work.layer_sums - over_tp * work.mixture_sums
    repeated = layout.repeated
    sent_again = ring("all_reduce", "tp", tp, positions * repeated.summed)
    in_rings = np.asarray(layout.tp_ring) * work.ring_sums
    summed = (2 + sums_again) * sums * all_reduce + np.where(repeated.summed, sent_again, 0)
    # Products of forward, and of backward those with weights, go chunk by chunk.
    by_chunk = np.where(in_rings, work.in_rings(partial(matmul, part=1 / tp), tp), 0)
    slower = by_chunk - np.where(in_rings, work.in_rings(matmul, tp), 0)
    hidden = np.minimum(in_rings * all_reduce, (tp - 1) / tp * by_chunk)
    summed = summed - RING_HIDE * e.hide * (2 + again) * hidden
    products = (1 + work.layer_backward + products_again) * matrices + (2 + again) * slower
    layer = {
        "compute": products
        + core.backward
        + (1 + core_again) * core.forward
        + positions * (repeated.flops / reached + repeated.attention / attention_peak),
        "memory": (1 + BACKWARD_TRAFFIC + again) * elementwise
        + (1 + BACKWARD_TRAFFIC + core_again) * softmax
        + (1 + core_again) * core.forward_traffic
        + core.backward_traffic
        + (positions * repeated.num_bytes + (2 + again) * in_rings * layout.ring_copies * activation) / hbm,
        "tp": summed * (1 - np.asarray(layout.overlap_tp)),
        "cp": (1 + again) * sent.forward + sent.backward,
        "ep": (2 + again) * swapped,
    }
    launches = 3 + again + CORE_LAUNCHES * (core_again & ~again) + repeated.launches
    launches = launches + (2 + again) * in_rings * 2 * (tp - 1) * RING_LAUNCHES  # of a gather, and of a scatter
    layer["overhead"] = np.maximum(launches * e.layer_seconds - sum(layer.values()), 0)
    # Chunks of the loss add to the table's gradient in 32 bits, and each has its largest logit and its sum over tp.
    loss_chunks = np.asarray(layout.loss_chunks)
    chunked = np.where(loss_chunks > 1, loss_chunks, 0)
    head = {
        "compute": (1 + work.head_backward) * work.head(matmul, tp),
        "memory": positions * LOGIT_TRAFFIC * work.vocab_size / tp / hbm
        + 8 * chunked * work.table_parameters * work.trained_table / tp / hbm,
        "overhead": 0.0,
        "tp": 2 * all_reduce + 2 * (loss_chunks - 1) * ring("all_reduce", "tp", tp, 0.0),
        "cp": 0.0,
        "ep": 0.0,
    }

    # ---- one micro-batch on the slowest stage
    most = np.ceil(work.num_layers / pp) if layout.most_layers is None else np.asarray(layout.most_layers)
    last = work.num_layers / pp if layout.last_layers is None else np.asarray(layout.last_layers)
    with_head = last * sum(layer.values()) + sum(head.values()) >= most * sum(layer.values())
    # Parameters of a device: of a stage that computes with the token table, and (held) as they are stored.
    dense, experts = (
        work.num_layers * part / pp / tp
        for part in (work.layer_parameters - work.expert_parameters, work.expert_parameters / ep)
    )
    layers, table = dense + experts, work.table_parameters / tp
    spread = np.where(layout.spread_table, pp, 1)
    held, trained_table = layers + table / spread, table * work.trained_table
    trained = layers * work.trained_layer + trained_table  # of these, what has a gradient
    updated = layers * work.trained_layer + trained_table / spread
    of_experts = experts * work.trained_layer  # among what is updated
    micro = {name: np.where(with_head, last * layer[name] + head[name], most * layer[name]) for name in layer}
    # Of several micro-batches each gradient is added to the sum so far, one alone is only written.
    added = np.where(layout.fused_sums, 0, itemsize) + 2 * grad
    written = np.where((m > 1) | layout.always_sums, added, grad)
    micro["memory"] = micro["memory"] + trained * written / hbm
    message = activation / np.where(sp | np.asarray(layout.scatter_gather), tp, 1)
    sends = 2 * np.asarray(layout.chunks) if layout.sends is None else np.asarray(layout.sends)
    between = sends * cluster.permute_seconds(pp, apart["pp"], message, e.inside, e.between)
    micro["pp"] = np.where(layout.overlap_pp, np.maximum(between - sum(micro.values()), 0), between)

    # ---- one update
    passes = m if layout.pipeline_microbatches is None else layout.pipeline_microbatches
    idle = bubble_over_ideal(pp, passes, layout.chunks) if layout.bubble is None else np.asarray(layout.bubble)
    time = {name: m * seconds for name, seconds in micro.items()}
    time["bubble"] = idle * sum(time.values())
    shards = dp * cp
    # ZeRO shards an expert over fewer ranks, since fewer hold it.
    own = (updated + (ep - 1) * of_experts) / shards
    time["memory"] = time["memory"] + np.where(zero >= 1, own, updated) * OPTIMIZER_TRAFFIC / hbm
    time["overhead"] = (
        time["overhead"] + e.step_seconds * np.asarray(layout.python) + LAUNCH_SECONDS * np.asarray(layout.copies)
    )
    time["input"] = m * layout.rows * work.seq_len * 8 / e.input_bytes_per_s  # tokens and targets, 4 bytes each

    by_layer = (zero >= 2) | np.asarray(layout.by_layer)
    messages = np.maximum(layout.messages, by_layer * (most + 1))
    scatter, summed_over_dp = (
        both(algorithm, updated * grad, of_experts * grad) for algorithm in ("ring_reduce_scatter", "all_reduce")
    )
    across = ring("all_reduce", "replica", replica, own * grad)
    # An end gives, and gets, as many parts as in a ring.
    ends = ring("ring_reduce_scatter", "pp", pp, trained_table * grad) + ring(
        "ring_all_gather", "pp", pp, table * itemsize
    )
    across = across + np.where(layout.spread_table, ends, 0)
    gathered, gathered_experts = (
        np.where(zero == 3, whole, changed) * itemsize for whole, changed in ((held, updated), (experts, of_experts))
    )
    gather = np.where(zero == 0, 0, both("ring_all_gather", gathered, gathered_experts))
    scatter = np.where(zero == 0, summed_over_dp, scatter)
    rounds = np.where(zero >= 2, m, 1)
    each = np.where(layout.keep_after_forward, 1, 2) if layout.gathers is None else np.asarray(layout.gathers)
    gathers = np.where(zero == 3, each * m, 1)
    working = sum(micro[name] for name in ("compute", "memory"))
    may_hide = rounds * scatter + np.where(layout.overlap_across, across, 0)
    in_forward = np.asarray(layout.overlap_gather) & (zero == 1)
    gathers_hide = (zero == 3) | in_forward
    may_hide = layout.hidden_part * (may_hide + np.where(gathers_hide, gathers * gather, 0))
    backward = 2 / 3 + in_forward / 3  # of a micro-batch
    # Chunk by chunk pass the last micro-batches, as many as stages: gradients of all but one have another beside them.
    chunks = np.asarray(layout.chunks)
    last = np.where(chunks > 1, np.minimum(m, pp) * (1 - 1 / chunks), 1)
    window = np.where(zero == 3, m, np.where(zero == 2, rounds, last) * backward) * working
    hidden = np.where(layout.overlap_dp, e.hide * np.minimum(may_hide, window), 0)
    time["dp"] = rounds * scatter + across + gathers * gather - hidden

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
        "mfu": flops / (total * peak * layout.num_devices),
    }
    length = np.broadcast_shapes((1,), *(np.shape(column) for column in columns.values()))
    return StepTime(**{field.name: np.broadcast_to(columns[field.name], length) for field in fields(StepTime)})


def bar_of(work: Work, efficiency: Efficiency) -> float:
    """± of a step in which nothing communicates."""
    return max(efficiency.relative_error, MIXTURE_ERROR if work.expert_parameters else 0.0)


class _Core(NamedTuple):
    """Attention's core in one layer, one micro-batch: seconds of products and of HBM traffic; fused: whether its scores
    are never all there."""

    fused: np.ndarray
    forward: Number
    backward: Number
    forward_traffic: Number
    backward_traffic: Number


def _attention_core(work: Work, layout: Layout, matmul, positions, attention_peak, hbm, itemsize: int) -> _Core:
    """Fused attention computes the scores that count; one that writes them, `work.core`."""
    tp, known = np.asarray(layout.tp), len(work.attention) > 0
    flash, blocks = (np.asarray(column, bool) & known for column in (layout.flash, layout.blocks))
    seen = sum(each.heads * each.seen(work.seq_len) for each in work.attention) / tp  # scores of a position
    flops = sum(4 * each.heads * each.head_dim * each.seen(work.seq_len) for each in work.attention) / tp
    by_blocks = sum(
        matmul(2 * each.heads * each.seen(work.seq_len) / tp, each.head_dim, m=each.head_dim) for each in work.attention
    )
    forward = np.where(flash, positions * flops / attention_peak, np.where(blocks, by_blocks, work.core(matmul, tp)))
    traffic = (
        np.where(blocks, positions * seen * (4 * wide + itemsize * narrow) / hbm, 0)
        for wide, narrow in (BLOCK_FORWARD, BLOCK_BACKWARD)
    )
    fused = flash | blocks
    return _Core(fused, forward, np.where(fused, FUSED_BACKWARD, 2) * forward, *traffic)


class _Sent(NamedTuple):
    forward: Number
    backward: Number


def _over_cp(
    work: Work, layout: Layout, cluster: Cluster, e: Efficiency, positions, itemsize: int, core: _Core
) -> _Sent:
    """Seconds that show of what one layer sends over cp for a micro-batch (`jaxdist.parallel.context_parallel`)."""
    cp, tp, exchanging = (np.asarray(each) for each in (layout.cp, layout.tp, layout.exchanging))
    groups, links = cp // exchanging, (e.inside, e.between)

    def message(num_bytes, ranks=cp):
        return cluster.permute_seconds(ranks, tp, num_bytes, *links)

    ring, ring_back, in_full = 0.0, 0.0, 0.0
    for each in work.attention:
        keys = 2 * positions * np.maximum(each.kv_heads / tp, 1) * each.head_dim * itemsize
        near = np.minimum(each.reached(work.seq_len / (2 * groups)), groups - 1)
        gather = cluster.collective_seconds("ring_all_gather", cp, tp, cp * keys, *links)
        # Queries and the result, keys and values: a part of each to every other rank of the group.
        swapped = keys + 2 * positions * each.heads / tp * each.head_dim * itemsize
        exchange = (exchanging - 1) * message(swapped / exchanging, exchanging)
        round_, is_ring = near * message(keys), near == groups - 1
        ring = ring + np.where(layout.gathers_keys, 0, round_)
        # A ring's backward sends the keys again, and their gradients in fp32; the near chunks' are their transposes.
        gradients = np.where(is_ring, near * message(keys * max(4, itemsize) / itemsize), 0)
        ring_back = ring_back + np.where(layout.gathers_keys, 0, round_ + gradients)
        in_full = in_full + np.where(layout.gathers_keys, gather, 0) + exchange
    beside = core.forward + core.forward_traffic, core.backward + core.backward_traffic
    shown = (sent - e.hide * np.minimum(sent, time) for sent, time in zip((ring, ring_back), beside, strict=True))
    return _Sent(*(each + in_full for each in shown))
