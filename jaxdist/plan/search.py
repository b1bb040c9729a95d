"""Every layout a model can have on a cluster, as numpy columns: enumerated by the rules of `RunConfig`, scored, ranked.

No device is used; `program_memory` and `time_model` do the arithmetic, a column at a time. A layout is
enumerated once: of settings that give the same program (`RunConfig.warnings` says which change nothing) only the plain
one is here.

Schedules: one tick is one F, B or W of one chunk, and every stage waits for its neighbours after it, as our executor
does (docs/schedules.md). With whole blocks recomputed a B lasts two ticks' time, and lock-step makes the others wait;
the F of the last part includes the head.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache

import numpy as np

from jaxdist.config import RunConfig, context_kinds
from jaxdist.errors import ConfigError, divisors
from jaxdist.mesh import AXES, FACTORS, MeshShape, data_ranks_of
from jaxdist.models.attention_choice import LONG
from jaxdist.models.base import Model
from jaxdist.models.traced import head_in_layers
from jaxdist.parallel.blocked_attention import MOST_POSITIONS
from jaxdist.parallel.pipeline.builders import NAMES, SCHEDULES
from jaxdist.parallel.pipeline.schedules import divide_layers, with_last
from jaxdist.plan.hardware import Cluster
from jaxdist.plan.kept_arrays import choice_of
from jaxdist.plan.parts import allows, exchanged, work_of
from jaxdist.plan.program_memory import PHASES, ProgramBytes, distinct, matrix_work, program_bytes, ranks_of
from jaxdist.plan.schedule_facts import keep_facts, schedule_facts, table_facts
from jaxdist.plan.time_model import NOTHING, Efficiency, Layout, Repeated, StepTime, efficiency_of, step_time
from jaxdist.strategy import CP_KINDS, TP_RINGS, ParallelConfig, cp_split

# ------------------------------------------------------------------------------------------------------- enumeration

BLOCK = 1 << 15  # layouts made and scored at a time: their columns stay in the cache
INTEGERS = (*AXES, "zero", "sp", "ring", "keep", "schedule", "chunks", "last", "microbatches", "accumulate", "rows")
INTEGERS += ("every", "selective", "recompute", "repeats", "overlap", "kind", "loss_chunks", "over_tp")
OWN = len(NAMES)  # in the column `schedule`: the schedule and the parts of the run's own `ParallelConfig`
EXCHANGE = "ulysses"  # the kind of cp that exchanges heads
WORDS = [""]  # of `remat`, those that name arrays: in the column `repeats`, their places here, 0 for none
RINGS = ("none", "one-way")  # that are searched: two-way rings are for links that carry both directions at once
HEAD_AT_MOST = 1.5  # of the loss's time in layers, over that of its FLOPs: the last part has fewer layers for it
LOSS_CHUNKS = 8  # searched beside what the run has: their logits are less than what layers need
OWN_KIND = len(CP_KINDS)  # in the column `kind`: the run's own `cp_kind`
STEADY = [NAMES.index(name) for name in ("1f1b", "zb-h1", "v-half", "v-min")]  # whose buffers fill up and stay
SMALLER = 0.3  # at most, than the smallest layout of a search is one that it leaves out; 0.15 was seen (docs/plan.md)
LEAST_POSITIONS = 2 * MOST_POSITIONS  # of a sequence on a rank of cp, in a search that is not thorough: two blocks


@dataclass(frozen=True, eq=False)
class Candidates:
    """Layouts as integer columns of one length.

    ring: index in `config.TP_RINGS`. keep: ZeRO-3 without dropping weights after forward. schedule: index in
    `builders.NAMES`, or OWN; where pp is 1 it is that of 1f1b and chunks is 1. last: layers of the last part, 0 where
    all are even. microbatches: of one pass of the pipeline; 1 where pp is 1. rows: sequences of a micro-batch. every:
    blocks recomputed together, 0 for none; selective: only the attention core is recomputed; recompute: a chunk is, in
    an R of the schedule's; repeats: the arrays are that a word of `remat` names, its place in WORDS. overlap: a layer's
    gradients, and ZeRO-3's weights, are sent while another layer computes; in a pipeline, messages between stages do.
    kind: index in `strategy.CP_KINDS`, or OWN_KIND; 0 where cp is 1. over_tp: experts are split over tp too.
    """

    pp: np.ndarray
    replica: np.ndarray
    dp: np.ndarray
    ep: np.ndarray
    cp: np.ndarray
    tp: np.ndarray
    zero: np.ndarray
    sp: np.ndarray
    ring: np.ndarray
    keep: np.ndarray
    schedule: np.ndarray
    chunks: np.ndarray
    last: np.ndarray
    microbatches: np.ndarray
    accumulate: np.ndarray
    rows: np.ndarray
    every: np.ndarray
    selective: np.ndarray
    recompute: np.ndarray
    repeats: np.ndarray
    overlap: np.ndarray
    kind: np.ndarray
    loss_chunks: np.ndarray
    over_tp: np.ndarray

    def __len__(self) -> int:
        return len(self.pp)

    def take(self, index) -> "Candidates":
        return take_rows(self, index)

    @classmethod
    def join(cls, blocks: Iterable["Candidates"]) -> "Candidates":
        return join_rows(list(blocks))

    def mesh(self, index: int) -> MeshShape:
        return MeshShape(**{axis: int(getattr(self, axis)[index]) for axis in AXES})

    def remat(self, index: int) -> str:
        """The word of `ParallelConfig`."""
        word = remat_name(int(self.every[index]), int(self.selective[index]), int(self.recompute[index]))
        return self.repeated(index) or word

    def repeated(self, index: int) -> str:
        """The word that names arrays, "" where none does."""
        return WORDS[int(self.repeats[index])]

    def schedule_name(self, index: int, base: ParallelConfig) -> str:
        return base.schedule if self.schedule[index] == OWN else NAMES[self.schedule[index]]

    def stages(self, index: int, base: ParallelConfig) -> str:
        """The word of `ParallelConfig`."""
        if self.schedule[index] == OWN:
            return base.stages
        return f"last-{self.last[index]}" if self.last[index] else "even"

    def parallel(self, index: int, base: ParallelConfig | None = None) -> ParallelConfig:
        """The settings of one layout; what is not searched is as in `base`. Makes the schedule, whatever its size."""
        row = {name: int(getattr(self, name)[index]) for name in INTEGERS}
        plain, pipeline = ParallelConfig(), {}
        if row["schedule"] == OWN:
            pipeline = {name: getattr(base, name) for name in ("schedule", "microbatches", "chunks", "stages")}
        elif row["pp"] > 1:
            pipeline = {"schedule": NAMES[row["schedule"]], "microbatches": row["microbatches"]}
            pipeline["stages"] = self.stages(index, plain)
            if pipeline["schedule"] == "interleaved":
                pipeline["chunks"] = row["chunks"]
        return replace(
            base or plain,
            mesh=self.mesh(index),
            zero=row["zero"],
            sp=bool(row["sp"]),
            tp_ring=TP_RINGS[row["ring"]],
            loss_chunks=row["loss_chunks"],
            accumulate=row["accumulate"],
            remat=self.remat(index),
            reshard_after_forward=not row["keep"],
            overlap=bool(row["overlap"]),
            cp_kind=self.cp_kind(index, base or plain),
            experts_over_tp=bool(row["over_tp"]),
            unroll_layers=plain.unroll_layers if row["pp"] > 1 or row["overlap"] else (base or plain).unroll_layers,
            **{"schedule": plain.schedule, "microbatches": None, "chunks": None, "stages": plain.stages, **pipeline},
        )

    def cp_kind(self, index: int, base: ParallelConfig) -> str:
        return kind_name(int(self.kind[index]), base)

    @classmethod
    def of(cls, config: RunConfig) -> "Candidates":
        """One layout that somebody chose, as columns of length one."""
        parallel, schedule = config.parallel, config.parallel.pipeline
        searched = parallel.schedule in NAMES and (parallel.stages == "even" or parallel.last_layers > 0)
        mesh = parallel.mesh
        micro = parallel.num_microbatches
        row = {axis: getattr(mesh, axis) for axis in AXES} | {
            "zero": parallel.zero if parallel.sharded else 0,
            "sp": parallel.sp and mesh.tp > 1,
            "ring": TP_RINGS.index(parallel.tp_ring),
            "keep": parallel.zero == 3 and parallel.sharded and not parallel.reshard_after_forward,
            "schedule": NAMES.index("1f1b") if schedule is None else NAMES.index(schedule.name) if searched else OWN,
            "chunks": 1 if schedule is None else schedule.num_chunks,
            "last": parallel.last_layers if searched else 0,
            "microbatches": micro,
            "accumulate": parallel.accumulate,
            "rows": config.batch_size // (mesh.replica * mesh.dp * parallel.accumulate * micro),
            "every": parallel.remat_every,
            "selective": parallel.remat == "selective",
            "recompute": parallel.remat == "chunk",
            "repeats": place_of(parallel.remat) if parallel.repeats_arrays else 0,
            "overlap": parallel.overlap,
            "kind": CP_KINDS.index(parallel.cp_kind) if parallel.cp_kind in CP_KINDS else OWN_KIND,
            "loss_chunks": parallel.loss_chunks,
            "over_tp": parallel.experts_over_tp and mesh.tp > 1,
        }
        return cls(*(np.array([int(row[name])]) for name in INTEGERS))


@dataclass(frozen=True)
class Fixed:
    """What a search may not change: sizes of mesh axes, and values of other columns of `Candidates`.

    A setting that means something on some meshes alone (sp, a schedule, ZeRO) asks for one of these.
    """

    axes: Mapping[str, int] = field(default_factory=dict)
    columns: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def join(cls, parts: Iterable["Fixed"]) -> "Fixed":
        found = cls()
        for part in parts:
            found = cls({**found.axes, **part.axes}, {**found.columns, **part.columns})
        return found

    def allows(self, mesh: Mapping[str, int]) -> bool:
        columns = self.columns
        needs_pp = columns.keys() & {"schedule", "chunks", "last"} or columns.get("microbatches", 1) > 1
        meaningful = mesh["pp"] > 1 or not (needs_pp or columns.get("recompute"))
        meaningful &= mesh["tp"] > 1 or not any(map(columns.get, ("sp", "ring", "over_tp")))
        meaningful &= mesh["cp"] > 1 or "kind" not in columns
        meaningful &= not columns.get("zero") or MeshShape(**mesh).state_ranks > 1
        return meaningful and all(mesh[axis] == size for axis, size in self.axes.items())

    def rows(self, names: str, rows: list) -> list:
        """Rows of some columns, named in order, that have what is fixed."""
        wanted = [(i, self.columns[name]) for i, name in enumerate(names.split()) if name in self.columns]
        return [row for row in rows if all(row[i] == value for i, value in wanted)]

    def or_one(self, name: str, values: Iterable[int]) -> list[int]:
        """The values of a column to try: what it is fixed to, though it be one that a search leaves out."""
        return [self.columns[name]] if self.columns.get(name) else list(values)


FREE = Fixed()


def place_of(word: str) -> int:
    """In WORDS."""
    if word not in WORDS:
        WORDS.append(word)
    return WORDS.index(word)


def take_rows(columns, index):
    """The rows of an index, a mask or a slice, of a dataclass whose fields are columns."""
    return type(columns)(**{each.name: getattr(columns, each.name)[index] for each in fields(columns)})


def join_rows(blocks: Sequence):
    """Such dataclasses as one, one after the other."""
    kind = type(blocks[0])
    return kind(**{each.name: np.concatenate([getattr(b, each.name) for b in blocks]) for each in fields(kind)})


def put_rows(columns, index, rows):
    """With other rows in the places of an index."""
    changed = {each.name: getattr(columns, each.name).copy() for each in fields(columns)}
    for name, column in changed.items():
        column[index] = getattr(rows, name)
    return replace(columns, **changed)


def kind_name(kind: int, base: ParallelConfig) -> str:
    """The word of `ParallelConfig.cp_kind`."""
    return base.cp_kind if kind == OWN_KIND else CP_KINDS[kind]


def remat_name(every: int, selective: int, recompute: int) -> str:
    """The word of `ParallelConfig.remat`."""
    alone = "chunk" if recompute else "selective" if selective else "none"
    return {0: alone, 1: "block"}.get(every, f"every-{every}")


def legal_meshes(model: Model, num_devices: int, batch_size: int, optimizer: str = "adamw") -> list[dict[str, int]]:
    """Every mesh of `num_devices` devices that divides the model and the batch; with cp for `LONG` sequences alone.

    Raises: ConfigError for none."""

    def split(axes: tuple[str, ...], left: int) -> Iterator[dict[str, int]]:
        if not axes:
            if left == 1:
                yield {}
            return
        for size in divisors(left):
            yield from ({axes[0]: size} | rest for rest in split(axes[1:], left // size))

    def divides(mesh: dict[str, int]) -> bool:
        whole = optimizer == "adafactor"  # needs whole parameters on every rank
        fits_layers = mesh["pp"] <= (1 if whole else model.num_blocks) and not (whole and mesh["tp"] > 1)
        divided = fits_layers and batch_size % (mesh["replica"] * mesh["dp"]) == 0
        divided = divided and (mesh["cp"] == 1 or model.seq_len >= LONG)
        return divided and allows(model, mesh["tp"]) and bool(context_kinds(model, MeshShape(**mesh)))

    experts = work_of(model).experts
    found = [
        mesh | {"ep": ep}
        for mesh in split(FACTORS, num_devices)
        if divides(mesh)
        for ep in divisors(math.gcd(experts, mesh["dp"] * mesh["cp"]))
        if mesh["dp"] % data_ranks_of(ep, mesh["cp"]) == 0
    ]
    if not found:
        raise ConfigError(
            f"{num_devices} devices for a batch of {batch_size} sequences",
            f"a mesh of {', '.join(FACTORS)} must divide the batch and {model.describe()} over them",
            f"Use a batch that is a multiple of {num_devices}, or fewer devices",
        )
    return found


def layouts_of_mesh(
    model: Model,
    mesh: dict[str, int],
    batch_size: int,
    optimizer: str = "adamw",
    block: int = BLOCK,
    attention: str | None = None,
    loss_chunks: int = 1,
    fixed: Fixed = FREE,
) -> Iterator[Candidates]:
    """Every distinct layout of one mesh that `RunConfig` accepts, at most `block` at a time; of stages those that are
    even, or have fewer layers in the last part.

    That is: what concerns layers, times what concerns ZeRO, times how a sequence is split, times how the batch is cut.
    attention: what will run, where only `_likely` choices are asked for. loss_chunks: of all. Left out, because
    another layout here is the same program or never worse: settings that change nothing; every-K where K makes fewer
    groups than a group has layers; under pp, every-K where a smaller K makes as many groups of the layers of a part,
    chunks where fewer of them are as short, and more passes where one fills as many buffers.
    """
    per_rank = batch_size // (mesh["replica"] * mesh["dp"])
    pp = mesh["pp"]
    shards = MeshShape(**mesh).state_ranks > 1
    # (zero, keep, overlap)
    states: list = [(0, 0), (1, 0), (2, 0), (3, 0), (3, 1)] if shards and optimizer != "adafactor" else [(0, 0)]
    overlaps = [0, 1] if pp > 1 or (mesh["dp"] * mesh["replica"] * mesh["cp"] > 1 and model.num_blocks > 1) else [0]
    states = [(*state, overlap) for state in states for overlap in overlaps]
    # (sp, ring, kind of context parallelism, experts over tp)
    sps = [(0, 0)]
    if mesh["tp"] > 1 and model.seq_len // mesh["cp"] % mesh["tp"] == 0:
        rings = RINGS if pp == 1 and work_of(model).ring_sums else RINGS[:1]
        sps += [(1, ring) for ring in fixed.or_one("ring", map(TP_RINGS.index, rings))]
    apart = work_of(model).experts % (mesh["ep"] * mesh["tp"]) == 0 and allows(model, mesh["tp"], True)
    splits = [
        (*sp, CP_KINDS.index(kind), over_tp)
        for sp in sps
        for kind in context_kinds(model, MeshShape(**mesh))
        for over_tp in ((0, 1) if sp[0] and apart else (0,))
    ]
    # (schedule, chunks, layers of the last part, every, selective, recompute)
    if pp == 1:
        # As many groups as a larger K has layers keep no more, and gather ZeRO-3's weights no more often.
        few = [size for size in divisors(model.num_blocks) if size**2 <= model.num_blocks]
        few = [size for size in fixed.or_one("every", few) if model.num_blocks % size == 0]
        layers = [(NAMES.index("1f1b"), 1, 0, *again) for again in _remats(few)]
    else:
        layers = [
            (index, chunks, last, *again)
            for index, kind in enumerate(SCHEDULES.values())
            for chunks in (
                fixed.or_one("chunks", _chunk_counts(model.num_blocks, pp)) if kind.any_chunks else [kind.chunks]
            )
            if pp * chunks <= model.num_blocks
            for depth, last in _depths(model, pp * chunks, fixed.columns.get("last", 0))
            for again in (*_remats(fixed.or_one("every", _group_sizes(depth))), (0, 0, 1))
        ]
    # (microbatches, accumulate, rows)
    cuts = [
        (micro, accumulate, per_rank // micro // accumulate)
        for micro in (divisors(per_rank) if pp > 1 else [1])
        for accumulate in divisors(per_rank // micro)
    ]
    if model.seq_len // mesh["cp"] % loss_chunks:
        return
    layers = fixed.rows("schedule chunks last every selective recompute", layers)
    states, splits = fixed.rows("zero keep overlap", states), fixed.rows("sp ring kind over_tp", splits)
    cuts = fixed.rows("microbatches accumulate", cuts)
    if not (layers and states and splits and cuts):
        return
    if attention is not None:
        layers, states, splits, cuts = _likely(attention, layers, states, splits, cuts, pp)
    shape = (len(layers), len(states), len(splits), len(cuts))
    layers, states, splits, cuts = map(np.array, (layers, states, splits, cuts))
    for start in range(0, math.prod(shape), block):
        layer, state, split, cut = np.unravel_index(np.arange(start, min(start + block, math.prod(shape))), shape)
        schedule, chunks, last, every, selective, recompute = layers[layer].T
        zero, keep, overlap = states[state].T
        micro, accumulate, rows = cuts[cut].T
        sp, ring, kind, over_tp = splits[split].T
        found = Candidates(
            **{axis: np.full(len(layer), mesh[axis]) for axis in AXES},
            zero=zero,
            sp=sp,
            ring=ring,
            keep=keep,
            schedule=schedule,
            chunks=chunks,
            last=last,
            microbatches=micro,
            accumulate=accumulate,
            rows=rows,
            every=every,
            selective=selective,
            recompute=recompute,
            repeats=np.zeros_like(every),
            overlap=overlap,
            kind=kind,
            loss_chunks=np.full_like(kind, loss_chunks),
            over_tp=over_tp,
        )
        legal = (overlap == 0) | (pp > 1) | ((every <= 1) & (keep == 0))
        legal &= (keep == 0) | ((every == 0) & (recompute == 0))  # recomputed blocks are gathered again all the same
        # A ring, and attention to keys that are gathered, keep no scores to recompute.
        legal &= (selective == 0) | (mesh["cp"] == 1) | (kind == CP_KINDS.index(EXCHANGE))
        # From two rounds of its stages on, one pass of these holds as much as two, and fills and drains once.
        legal &= ~(np.isin(schedule, STEADY) & (accumulate > 1) & (micro >= 2 * pp) & (pp > 1))
        if legal.any():
            yield found.take(legal)


def _depths(model: Model, num_parts: int, last: int = 0) -> list[tuple[int, int]]:
    """(layers of the largest part, of the last one, 0 where all are even): every division with which a micro-batch may
    be shorter in lock-step than with a smaller largest part.

    The head is in the F of the last part (a third of a layer's time is F), and the other parts wait for it: of parts
    that are no larger, the fewest layers in the last are the fastest, until its F takes no longer than the others'.
    last: layers of the last part, where that is not to be chosen.
    """
    if last:
        return (
            [(max(with_last(model.num_blocks, num_parts, last)), last)]
            if last + num_parts - 1 <= model.num_blocks
            else []
        )
    even = divide_layers(model.num_blocks, num_parts)
    head = HEAD_AT_MOST * head_in_layers(model)

    def length(depth: int, last: int) -> float:
        return depth + max(0.0, head - (depth - last) / 3)

    found, shortest = [(max(even), 0)], length(max(even), even[-1])
    for depth in range(max(even), model.num_blocks):
        last = max(model.num_blocks - depth * (num_parts - 1), 1)
        if length(depth, last) < shortest:
            found.append((depth, last))
            shortest = length(depth, last)
        if last == 1 or length(depth, last) == depth:
            break
    return found


def _chunk_counts(num_layers: int, pp: int) -> list[int]:
    """Chunks of the interleaved schedule, at least 2: the fewest for each number of layers of the largest."""
    fewest = {-(-num_layers // (pp * chunks)): chunks for chunks in range(num_layers // pp, 1, -1)}
    return sorted(fewest.values())


def _remats(group_sizes: list[int]) -> list[tuple[int, int, int]]:
    """(every, selective, recompute): none, selective, and every group size."""
    return [(0, 0, 0), (0, 1, 0), *((size, 0, 0) for size in group_sizes)]


@cache
def _group_sizes(num_layers: int) -> list[int]:
    """Sizes of groups that cut a part's layers in different numbers of groups; the smallest for each number."""
    smallest = {-(-num_layers // size): size for size in range(num_layers, 0, -1)}
    return sorted(smallest.values())


# ----------------------------------------------------------------------------------------------------------- scoring


@dataclass(frozen=True, eq=False)
class Scored:
    """Layouts with what they are predicted to take: seconds of an update, bytes of a device."""

    base: RunConfig
    cluster: Cluster
    layouts: Candidates
    time: StepTime
    memory: ProgramBytes

    def __len__(self) -> int:
        return len(self.layouts)

    def take(self, index) -> "Scored":
        time, memory = take_rows(self.time, index), take_rows(self.memory, index)
        return Scored(self.base, self.cluster, self.layouts.take(index), time, memory)

    @classmethod
    def join(cls, blocks: Sequence["Scored"]) -> "Scored":
        """One after the other; all of the same run and cluster."""

        layouts, time, memory = (
            join_rows([getattr(block, part) for block in blocks]) for part in ("layouts", "time", "memory")
        )
        return cls(blocks[0].base, blocks[0].cluster, layouts, time, memory)

    @property
    def fits(self) -> np.ndarray:
        """Which layouts leave enough of a device free."""
        return self.memory.total <= usable_bytes(self.cluster)

    def config(self, index: int) -> RunConfig:
        """The run of one layout. Builds it, so it is checked by every rule of `RunConfig`; a schedule of many
        micro-batches takes its time.
        """
        return replace(self.base, parallel=self.layouts.parallel(index, self.base.parallel))


def score(
    base: RunConfig,
    layouts: Candidates,
    cluster: Cluster,
    attention: str = "xla",
    efficiency: Efficiency | None = None,
) -> Scored:
    """Step time and memory of every layout; model, precision, optimiser and batch are those of `base`.

    attention: what runs on the cluster, "cudnn", "blocked" or "xla" (`jaxdist.train.program.choose_attention`).
    efficiency: default what published programs reach on the cluster's accelerator, as in `experiments.plan`.
    Raises: ConfigError for a dtype that the accelerator has no peak for, and arrays to repeat whose time it does not
    know (`kept_arrays.Choice.uncounted`).
    """
    efficiency = efficiency or efficiency_of(cluster.hardware.name)
    return Scored.join(
        [
            _score_block(base, layouts.take(slice(start, start + BLOCK)), cluster, attention, efficiency)
            for start in range(0, len(layouts), BLOCK)
        ]
    )


@dataclass(frozen=True, eq=False)
class Pipelines:
    """Columns of what the tables of the layouts say; without a pipeline, a table of one stage that keeps nothing."""

    bubble: np.ndarray
    sends: np.ndarray
    num_messages: np.ndarray
    num_inputs: np.ndarray
    num_b_residuals: np.ndarray
    num_w_residuals: np.ndarray
    num_b_to_w: np.ndarray
    depth: np.ndarray
    last_part: np.ndarray


def pipelines(config: RunConfig, layouts: Candidates) -> Pipelines:
    """The facts of every layout's schedule, and the layers of its largest and of its last part."""
    model = config.model
    again = (layouts.every > 0).astype(int)
    overlap = layouts.overlap * (layouts.pp > 1)
    sizes = (layouts.pp, layouts.schedule, layouts.microbatches, layouts.chunks, layouts.last)
    kinds, index = distinct(*sizes, again, overlap, layouts.recompute)
    rows = []
    for pp, schedule, micro, chunks, last, again, overlap, recompute in kinds:
        parts = config.part_layers if schedule == OWN else with_last(model.num_blocks, pp * chunks, last)
        row = (0.0, 0.0, 0, 0, 0, 0, 0)
        if pp > 1:
            if schedule == OWN:
                facts = table_facts(config.parallel.pipeline)
            else:
                facts = schedule_facts(NAMES[schedule], pp, micro, chunks, 1 + overlap, bool(recompute))
            bubble = facts.recompute_bubble if again else facts.bubble
            slots = (
                facts.num_messages,
                facts.num_inputs,
                facts.num_b_residuals,
                facts.num_w_residuals,
                facts.num_b_to_w,
            )
            row = (bubble, facts.sends / micro, *slots)
        rows.append((*row, max(parts), parts[-1]))
    columns = np.array(rows)[index].T
    return Pipelines(*columns[:2], *columns[2:].astype(int))


def _score_block(base, layouts: Candidates, cluster, attention, efficiency) -> Scored:
    table = pipelines(base, layouts)
    memory = program_bytes(base, layouts, table, attention)
    return Scored(base, cluster, layouts, _step_time(base, layouts, table, cluster, attention, efficiency), memory)


def _score_what_fits(base, layouts: Candidates, cluster, attention, efficiency) -> Scored:
    """Layouts of a block that fit, with their loss in chunks where that is why; of a mesh that has none, the
    smallest. Others need no time."""
    table = pipelines(base, layouts)
    memory = program_bytes(base, layouts, table, attention)
    layouts, memory = _with_loss_in_chunks(base, layouts, table, memory, cluster, attention)
    fits = memory.total <= usable_bytes(cluster)
    if not fits.all():
        _, mesh = distinct(*(getattr(layouts, axis) for axis in AXES))
        order = np.lexsort((memory.total, mesh))
        smallest = order[np.unique(mesh[order], return_index=True)[1]]
        fits[smallest[np.bincount(mesh, fits)[mesh[smallest]] == 0]] = True
    index = np.flatnonzero(fits)
    layouts, table, memory = layouts.take(index), take_rows(table, index), take_rows(memory, index)
    return Scored(base, cluster, layouts, _step_time(base, layouts, table, cluster, attention, efficiency), memory)


def _with_loss_in_chunks(
    base, layouts: Candidates, table: Pipelines, memory: ProgramBytes, cluster, attention
) -> tuple[Candidates, ProgramBytes]:
    """Give layouts that logits make too large LOSS_CHUNKS chunks, where these divide the sequence."""
    possible = (layouts.loss_chunks == 1) & (base.model.seq_len // layouts.cp % LOSS_CHUNKS == 0)
    index = np.flatnonzero(
        possible & (PHASES.index("the head") == memory.phase) & (memory.total > usable_bytes(cluster))
    )
    if not len(index):
        return layouts, memory
    chunked = replace(layouts.take(index), loss_chunks=np.full(len(index), LOSS_CHUNKS))
    smaller = program_bytes(base, chunked, take_rows(table, index), attention)
    return put_rows(layouts, index, chunked), put_rows(memory, index, smaller)


def _step_time(
    base, layouts: Candidates, table: Pipelines, cluster, attention, efficiency, repeated: Repeated | None = None
) -> StepTime:
    """repeated: what is repeated of a layer; default by the layouts' own words."""
    model, precision = base.model, base.precision
    deepest = layouts.chunks * table.depth
    exchanging, gathers_keys = context_columns(base, layouts)
    by_blocks = (layouts.cp > exchanging) | (attention == "blocked")  # a ring's, and of keys that are gathered
    update = matrix_work(base, layouts, np.where(layouts.pp > 1, deepest, model.num_blocks))
    layout = Layout(
        **{axis: _number_if_constant(getattr(layouts, axis)) for axis in AXES},
        microbatches=layouts.accumulate * layouts.microbatches,
        pipeline_microbatches=layouts.microbatches,
        rows=layouts.rows,
        zero=layouts.zero,
        sp=layouts.sp == 1,
        exchanging=exchanging,
        exchanged=exchanged_columns(base, layouts),
        experts_over_tp=layouts.over_tp == 1,
        gathers_keys=gathers_keys,
        remat=remat_names(layouts),
        chunks=layouts.chunks,
        bubble=table.bubble,
        most_layers=deepest,
        # The last part's F includes the head; only its F may be shorter for that than the others' in lock-step.
        last_layers=deepest - (table.depth - table.last_part) / 3,
        gathers=weight_gathers(layouts),
        gradient_bytes=np.dtype(precision.reduction_dtype.replace("bfloat16", "float16")).itemsize,
        # Without, a compiler finds nothing to compute beside what is sent (docs/benchmarks.md).
        overlap_dp=(layouts.overlap == 1) & (layouts.pp == 1),
        overlap_pp=layouts.overlap == 1,
        by_layer=(layouts.overlap == 1) & (layouts.pp == 1),
        hidden_part=hidden_part(model),
        flash=(attention == "cudnn") & ~by_blocks,
        blocks=by_blocks,
        dropout=model.dropout > 0,
        python=False,
        tp_ring=layouts.ring > 0,
        loss_chunks=layouts.loss_chunks,
        sends=table.sends,
        spread_table=layouts.pp > 1,
        repeated=repeated or _repeated(base, layouts, attention),
        update_flops=update.flops,
        update_passes=update.passes,
        update_bf16=base.optimizer.muon_bf16,
        update_over_data=update.over_data,
        update_over_tp=update.over_tp,
        update_over_copies=update.over_copies,
    )
    time = step_time(work_of(model), layout, cluster, efficiency, precision.dtype)
    return StepTime(**{each.name: np.broadcast_to(getattr(time, each.name), len(layouts)) for each in fields(StepTime)})


def seconds_of_repeats(
    base: RunConfig, repeated: Sequence[Repeated], cluster: Cluster, attention: str, efficiency: Efficiency
) -> np.ndarray:
    """Seconds of a step of `base`, where it repeats each of these of a layer."""
    layouts = Candidates.of(base).take(np.zeros(len(repeated), int))
    columns = Repeated(*np.array(repeated).T)
    return _step_time(base, layouts, pipelines(base, layouts), cluster, attention, efficiency, columns).total


def _repeated(base: RunConfig, layouts: Candidates, attention: str) -> Repeated:
    if not layouts.repeats.any():
        return NOTHING
    ranks, index = ranks_of(base, layouts, attention)
    found = [choice_of(rank) for rank in ranks]
    for each in found:
        if each.uncounted:
            raise ConfigError(
                f"remat={each.remat!r}",
                f"must not repeat {each.uncounted}, whose time a plan does not predict",
                "Use remat=auto, which leaves such arrays alone",
            )
    return Repeated(*np.array([each.repeated for each in found])[index].T)


def _number_if_constant(column: np.ndarray):
    """A column as one number where its rows are equal: the same results, for less work."""
    return column[0] if (column == column[0]).all() else column


def hidden_part(model: Model) -> float:
    """Fraction of the parameters in layers that have another beside them: all but the last in backward."""
    work = work_of(model)
    return (
        (work.num_layers - 1)
        * work.layer_parameters
        / (work.num_layers * work.layer_parameters + work.embedding_parameters)
    )


def context_columns(base: RunConfig, layouts: Candidates) -> tuple[np.ndarray, np.ndarray]:
    """`ParallelConfig.cp_split`, as columns."""
    kinds, index = distinct(layouts.kind, layouts.cp)
    rows = [cp_split(kind_name(kind, base.parallel), cp) for kind, cp in kinds]
    return tuple(np.array(rows)[index].T)


def exchanged_columns(base: RunConfig, layouts: Candidates) -> np.ndarray:
    """`parts.exchanged` for one position of a device, as a column."""
    of_tp = np.where(layouts.over_tp, layouts.tp, 1)  # each sends its part of the sequence
    sizes, index = distinct(layouts.ep * of_tp)
    return np.array([exchanged(base.model, ranks) for (ranks,) in sizes])[index] / of_tp


def weight_gathers(layouts: Candidates) -> np.ndarray:
    """How often a micro-batch gathers a layer's ZeRO-3 weights. A test compares it with the trace."""
    alone = layouts.pp == 1
    thrice = (layouts.every > 1) | (layouts.recompute == 1)  # forward, forward again, backward
    return np.where(thrice, 3, np.where(alone & (layouts.keep == 1), 1, 2))


def remat_names(layouts: Candidates) -> np.ndarray:
    """The words of `ParallelConfig.remat`, as a column."""
    kinds, index = distinct(layouts.every, layouts.selective, layouts.recompute)
    return np.array([remat_name(*kind) for kind in kinds])[index]


# ----------------------------------------------------------------------------------------------------------- ranking

USABLE = 0.9  # of a device's memory; the rest is for the driver, communication buffers and fragmentation


def usable_bytes(cluster: Cluster) -> float:
    """Bytes of a device that a plan may fill."""
    return USABLE * cluster.hardware.memory_bytes


def rank(scored: Scored) -> np.ndarray:
    """Indices of the layouts, best first: those that fit by time, then the others by memory."""
    total, seconds, fits = scored.memory.total, scored.time.total, scored.fits
    return np.lexsort((total, np.where(fits, seconds, total), ~fits))


def best_of_each_mesh(scored: Scored, order: np.ndarray) -> np.ndarray:
    """The first of every mesh among ranked indices."""
    mesh = _meshes(scored)
    return order[np.sort(np.unique(mesh[order], return_index=True)[1])]


def _meshes(scored: Scored) -> np.ndarray:
    """The number of each layout's mesh."""
    return distinct(*(getattr(scored.layouts, axis) for axis in AXES))[1]


FULL = 0.95  # of what may be filled; more is marked, and counts as less simple
WITHIN, MOST_WITHIN = 0.02, 0.1  # of the fastest layout's time: what a simpler one may take more; by default, at most
KNOWN = {"1f1b": 0, "gpipe": 1, "interleaved": 1}  # schedules by how well they are known; the others are 2


def complexity(scored: Scored) -> np.ndarray:
    """How much there is to understand in each layout: less is simpler. By the first of these in which two differ:
    mesh axes larger than 1, a pipeline, memory nearly full, arrays that backward repeats by name, how little known the
    schedule is, its chunks, special settings (rings, weights kept after forward, loss chunks, fewer layers in the last
    part, experts over tp), and recomputation. What follows from the mesh (ZeRO's stage, sp, overlap, the cut of the
    batch) does not count."""
    c, pipelined = scored.layouts, scored.layouts.pp > 1
    known = np.array([*(KNOWN.get(name, 2) for name in NAMES), 2])
    found = np.zeros(len(scored), np.int64)
    for digit in (
        sum((getattr(c, axis) > 1).astype(int) for axis in AXES),
        pipelined,
        scored.memory.total > FULL * usable_bytes(scored.cluster),
        c.repeats > 0,
        known[c.schedule] * pipelined,
        np.minimum(c.chunks, 99) * pipelined,
        (c.ring > 0) + 1 * (c.keep > 0) + 1 * (c.loss_chunks > 1) + 1 * (c.last > 0) + 1 * (c.over_tp > 0),
        (c.every > 0) | (c.selective > 0) | (c.recompute > 0),
    ):
        found = 100 * found + digit
    return found


def simplest(scored: Scored, within: float = WITHIN, allowed: np.ndarray | None = None) -> int:
    """The simplest layout that fits and takes at most `within` more time than the fastest, of equally simple ones the
    fastest. allowed: a mask of those to choose from, where any of them qualifies."""
    seconds, fits = scored.time.total, scored.fits
    near = fits & (seconds <= (1 + within) * seconds[fits].min(initial=np.inf))
    if allowed is not None and (near & allowed).any():
        near &= allowed
    index = np.flatnonzero(near)
    return int(index[np.lexsort((seconds[index], complexity(scored)[index] if within else seconds[index]))[0]])


def simplest_of_each_mesh(scored: Scored, within: float = WITHIN) -> np.ndarray:
    """`simplest` of every mesh that fits, by time."""
    mesh = _meshes(scored)
    found = [
        members[simplest(scored.take(members), within)]
        for members in (np.flatnonzero((mesh == number) & scored.fits) for number in np.unique(mesh[scored.fits]))
    ]
    return np.array(sorted(found, key=lambda index: scored.time.total[index]), int)


def pareto(*columns: np.ndarray) -> np.ndarray:
    """Indices of the rows that no other row is at least as good as in every column and better in one (less is better),
    by the first column. Of equal rows the first is there."""
    order = np.lexsort(columns[::-1])
    front: list[int] = []
    best = np.empty((0, len(columns)))
    table = np.stack(columns, axis=1)
    for index in order:
        row = table[index]
        if not (best <= row).all(axis=1).any():
            front.append(int(index))
            best = np.vstack([best, row])
    return np.array(front, int)


def memory_time_front(scored: Scored) -> np.ndarray:
    """`pareto` of memory and time, of the layouts that fit."""
    fitting = np.flatnonzero(scored.fits)
    memory, seconds = scored.memory.total[fitting], scored.time.total[fitting]
    order = np.lexsort((seconds, memory))
    least_before = np.minimum.accumulate(np.append(np.inf, seconds[order])[:-1])
    return fitting[order[seconds[order] < least_before]]


@dataclass(frozen=True, eq=False)
class Found(Scored):
    """The results of a search, in the order of enumeration: the best layouts of every mesh, each faster than all that
    are simpler, and those that no other beats in memory and time. The numbers are of all that were scored.
    """

    num_layouts: int
    num_fitting: int


def search(
    base: RunConfig,
    cluster: Cluster,
    attention: str = "xla",
    efficiency: Efficiency | None = None,
    block: int = BLOCK,
    progress: Callable[[int, int], None] = lambda done, total: None,
    thorough: bool = False,
    fixed: Fixed = FREE,
) -> Found:
    """The cluster's layouts scored as by `score`, at most `block` of them at a time; the best are kept.

    fixed: what all of them must have.
    thorough: every layout that `layouts_of_mesh` has. Otherwise what has never been the best is left out (a test
    compares both searches), and tried only where nothing else fits, though not by far: tp over more than a node, fewer
    than LEAST_POSITIONS of a sequence on a rank, tp without sp, rings that are no faster, experts over tp, or not,
    whichever is slower, GPipe, state that is not sharded where it can be, fewer micro-batches than stages, attention
    recomputed that keeps no scores, and, where cuDNN's attention runs, keys that travel over cp though heads could be
    exchanged.
    progress: told how many meshes of how many are done. Raises: ConfigError as `legal_meshes` and `score`, and where
    no layout has what is fixed.
    """
    efficiency = efficiency or efficiency_of(cluster.hardware.name)
    found = _search(base, cluster, attention, efficiency, block, progress, thorough, fixed)
    nearly = (1 - SMALLER) * found.memory.total.min() <= usable_bytes(cluster)
    if not thorough and not found.num_fitting and nearly:
        found = _search(base, cluster, attention, efficiency, block, progress, True, fixed)
    return found


def _search(base, cluster, attention, efficiency, block, progress, thorough: bool, fixed: Fixed) -> Found:
    model, optimizer, chunks = base.model, base.optimizer.name, base.parallel.loss_chunks
    meshes = list(_meshes_with(base, cluster, fixed))
    if not thorough:
        meshes = _likely_meshes(model, meshes, cluster, attention, fixed)

    def blocks() -> Iterator[Candidates]:
        """Layouts of one mesh after the other, at least `block` at a time while there are so many."""
        waiting: list[Candidates] = []
        for done, mesh in enumerate(meshes):
            progress(done, len(meshes))
            likely = None if thorough else attention
            for some in layouts_of_mesh(model, mesh, base.batch_size, optimizer, block, likely, chunks, fixed):
                waiting.append(some)
                if sum(map(len, waiting)) >= block:
                    yield Candidates.join(waiting)
                    waiting = []
        if waiting:
            yield Candidates.join(waiting)

    kept, num_layouts, num_fitting = [], 0, 0
    for some in blocks():
        if not thorough:
            some = _that_pay(base, some, cluster, attention, efficiency, fixed)
        scored = _score_what_fits(base, some, cluster, attention, efficiency)
        num_layouts += len(some)
        num_fitting += int(scored.fits.sum())
        kept.append(scored.take(_worth_keeping(scored)))
    keep_facts()
    if not kept:
        raise ConfigError(
            f"{fixed} on {cluster.num_devices} devices", "some layout must have what is fixed", "Fix less of it"
        )
    found = Scored.join(kept)
    found = found.take(_worth_keeping(found))
    return Found(base, cluster, found.layouts, found.time, found.memory, num_layouts, num_fitting)


def has_layout(base: RunConfig, cluster: Cluster, fixed: Fixed) -> bool:
    """Whether any layout, whatever its memory, has what is fixed."""
    return next(_meshes_with(base, cluster, fixed), None) is not None


def _meshes_with(base: RunConfig, cluster: Cluster, fixed: Fixed) -> Iterator[dict[str, int]]:
    """Meshes with a layout that has what is fixed. Raises: ConfigError as `legal_meshes`."""
    run = base.batch_size, base.optimizer.name
    for mesh in legal_meshes(base.model, cluster.num_devices, *run):
        layouts = fixed.allows(mesh) and next(layouts_of_mesh(base.model, mesh, *run, block=1024, fixed=fixed), None)
        if layouts:
            yield mesh


def _likely_meshes(
    model: Model, meshes: list[dict[str, int]], cluster: Cluster, attention: str, fixed: Fixed
) -> list[dict[str, int]]:
    """Meshes with tp in a node and enough of a sequence on a rank, all where there are none; where a fused kernel
    attends, with a cp that heads are exchanged over, if they can be on any mesh with that cp and may be."""
    exchanges = {id(mesh): EXCHANGE in context_kinds(model, MeshShape(**mesh)) for mesh in meshes}
    exchange = CP_KINDS.index(EXCHANGE)
    may = attention == "cudnn" and fixed.columns.get("kind", exchange) == exchange
    sizes = {mesh["cp"] for mesh in meshes if may and exchanges[id(mesh)]}
    return [
        mesh
        for mesh in meshes
        if mesh["tp"] <= cluster.devices_per_node
        and model.seq_len >= mesh["cp"] * LEAST_POSITIONS
        and (mesh["cp"] not in sizes or exchanges[id(mesh)])
    ] or meshes


def _likely(
    attention: str, layers: list[tuple], states: list[tuple], splits: list[tuple], cuts: list[tuple], pp: int
) -> tuple:
    """Layouts of a mesh that may be the best: any schedule but GPipe, whose buffers are 1F1B's or more; state that is
    sharded, if it can be; with sp where it is possible, by exchanging heads where that is and a fused kernel attends,
    recomputing attention alone where it writes its scores, and a micro-batch for every stage, if there are sequences
    enough."""
    most_sp, exchange = max(split[0] for split in splits), CP_KINDS.index(EXCHANGE)
    kinds = {split[2] for split in splits}
    if attention == "cudnn" and exchange in kinds:
        kinds = {exchange}
    most = max(micro for micro, _, _ in cuts)
    likely = [row for row in layers if row[0] != NAMES.index("gpipe") and (attention == "xla" or not row[4])]
    states = [state for state in states if state[0]] or states
    splits = [split for split in splits if split[0] == most_sp and split[2] in kinds]
    return likely or layers, states, splits, [cut for cut in cuts if cut[0] >= min(pp, most)]


def _that_pay(base, layouts: Candidates, cluster, attention, efficiency, fixed: Fixed) -> Candidates:
    """Without those with rings that take no less time than without, and of those with experts over tp and without the
    faster ones: no memory is traced for the others. What is fixed stays."""

    def pays(layouts: Candidates, index: np.ndarray, column: str, other) -> Candidates:
        """Without what is at the index and is no faster than with another value of a column; as fast with 0 stays."""
        some, keep = layouts.take(index), np.ones(len(layouts), bool)
        if len(index) and column not in fixed.columns:
            own, others = (
                _step_time(base, each, pipelines(base, each), cluster, attention, efficiency).total
                for each in (some, replace(some, **{column: np.broadcast_to(other, len(some))}))
            )
            nearly = np.where(getattr(some, column), 1 - 1e-9, 1 + 1e-9)  # rounding makes nothing faster
            keep[index] = own < nearly * others
        return layouts.take(keep)

    layouts = pays(layouts, np.flatnonzero(layouts.ring), "ring", 0)
    experts, c = work_of(base.model).experts, layouts
    index = np.flatnonzero((c.sp == 1) & (c.tp > 1) & (experts > 0) & (experts % (c.ep * c.tp) == 0))
    return pays(layouts, index, "over_tp", 1 - c.over_tp[index])


def _worth_keeping(scored: Scored) -> np.ndarray:
    fastest = best_of_each_mesh(scored, rank(scored))
    return np.unique(np.concatenate([fastest, memory_time_front(scored), _simpler(scored)]))


def _simpler(scored: Scored) -> np.ndarray:
    """The layouts of every mesh that fit, are not much slower than its fastest and are faster than simpler ones."""
    mesh, seconds, level = _meshes(scored), scored.time.total, complexity(scored)
    fastest = np.full(mesh.max(initial=-1) + 1, np.inf)
    np.minimum.at(fastest, mesh[scored.fits], seconds[scored.fits])
    index = np.flatnonzero(scored.fits & (seconds <= (1 + MOST_WITHIN) * fastest[mesh]))
    index = index[np.lexsort((seconds[index], level[index], mesh[index]))]
    groups = np.split(index, np.flatnonzero(np.diff(mesh[index])) + 1)
    firsts = [group[seconds[group] < np.minimum.accumulate(np.append(np.inf, seconds[group])[:-1])] for group in groups]
    return np.concatenate(firsts)
