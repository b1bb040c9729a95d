"""How a run is divided over a mesh: every setting of it, its checks, and its pipeline's schedule. It needs no model."""

import dataclasses
import math
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

from jaxdist.errors import ConfigError, divisors, require_positive, require_within
from jaxdist.mesh import MeshShape
from jaxdist.parallel.named_arrays import REPEAT, is_array
from jaxdist.parallel.pipeline.builders import NAMES, make_schedule
from jaxdist.parallel.pipeline.schedules import Schedule
from jaxdist.parallel.pipeline.simulate import validate
from jaxdist.parallel.pipeline.text import load
from jaxdist.parallel.sequence import Split

GradSync = Literal["per-parameter", "flat", "bucketed"]
AttentionName = Literal["auto", "cudnn", "blocked", "xla"]
TpRing = Literal["none", "one-way", "two-way"]
UnrollLayers = Literal["auto", "yes", "no"]
XlaSet = Literal["default", "stable", "fast"]
UNROLLED_AT_MOST = 48  # layers, where nobody has said: each takes a second or two to compile, in a scan none
TP_RINGS = get_args(TpRing)
CP_KINDS = ("ring", "all-gather", "ulysses")


def require_choices(config) -> None:
    """Refuse a value that its field's Literal type does not list."""
    for name, choices in _choices_of(type(config)).items():
        value = getattr(config, name)
        if value is not None and value not in choices:
            words = ", ".join(map(str, choices))
            raise ConfigError(f"{name}={value!r}", f"must be one of {words}", "Use one of them")


@cache
def _choices_of(kind: type) -> dict[str, tuple]:
    """What the fields of a dataclass that are Literal types list."""
    found = {}
    for name, hint in get_type_hints(kind).items():
        literals = [part for part in (hint, *get_args(hint)) if get_origin(part) is Literal]
        if literals:
            found[name] = get_args(literals[0])
    return found


REMAT = {"none": 0, "selective": 0, "block": 1, "chunk": 0}  # name -> blocks recomputed together in B


def cp_split(kind: str, cp: int) -> tuple[int, bool]:
    """(neighbours along cp that exchange heads, whether the others' keys are gathered)."""
    if kind.startswith("usp-"):
        return int(kind.removeprefix("usp-")), False
    return (cp if kind == "ulysses" else 1), kind == "all-gather"


@dataclass(frozen=True)
class ParallelConfig:
    """How one training step is split over a mesh. The texts of its fields are also those of the flags."""

    mesh: MeshShape = MeshShape()
    """Axes above 1, as in dp=2,tp=2: pp (stages), replica (data, whole copies), dp (data, ZeRO shards), cp (positions
    of a sequence, ZeRO shards), tp (tensor), and ep (experts, over the ranks of dp and cp)."""
    zero: int = 0
    """ZeRO stage: 1 shards optimiser state over dp and cp, 2 gradients too, 3 parameters too."""
    sp: bool = False
    """Sequence parallelism: split activations between tensor-parallel regions over tp."""
    cp_kind: str = "ring"
    """How attention reaches the whole sequence over cp: ring (keys and values go round), all-gather (of them), ulysses
    (heads are exchanged for positions), or usp-U (groups of U ranks exchange heads, and the groups are a ring)."""
    experts_over_tp: bool = False
    """With sp: ranks of tp hold different experts, each in its whole width, where they would hold parts of the same."""
    tp_ring: TpRing = "none"
    """With sp: gather and scatter over tp in a ring whose chunks travel while others are multiplied."""
    grad_sync: GradSync = "bucketed"
    """Which gradients (with ZeRO-3 also weights) share one collective."""
    bucket_mb: float = 25.0
    """MiB of gradients in one collective, where they are bucketed."""
    accumulate: int = 1
    """Micro-batches per update on each data rank; in a pipeline, passes per update."""
    remat: str = "none"
    """What backward recomputes: none, selective (the attention core), block, every-K blocks, or, in a pipeline, a chunk
    in an action R of its own (its table with R is another one). auto, or auto-24: arrays of a layer, chosen so that a
    step fits the device, or so many GiB, with the least to repeat; the run then names them, as in repeat:A+B."""
    loss_chunks: int = 1
    """Logits exist for one of so many parts of a micro-batch at a time."""
    unroll_layers: UnrollLayers = "auto"
    """Write the loop over layers out: a GPU copies less into and out of stacks, and compiling takes longer. auto: on
    GPUs, up to 48 layers that neither send parts of a state or a sequence nor repeat what they computed."""
    reshard_after_forward: bool = True
    """ZeRO-3: drop gathered weights after forward and gather them again in backward."""
    overlap: bool = False
    """Reduce a layer's gradients, and gather the next layer's ZeRO-3 weights, while another layer computes; in a
    pipeline instead, send between stages while they compute."""
    attention: AttentionName = "auto"
    """auto: cuDNN's, which never holds the scores, on GPUs where it can run and compiles; elsewhere blocked, which
    holds those of a block, for 8,192 positions and more, and xla, which writes them out, for fewer."""
    xla: XlaSet = "default"
    """Options of XLA on GPUs: default (XLA's own), stable (loops' stacks without fills, no timing of fusions), or fast
    (stable, and on several GPUs collectives that overlap). docs/benchmarks.md has what each gains."""
    schedule: str = "1f1b"
    """Pipeline schedule: gpipe, 1f1b, interleaved, zb-h1, zb-v, v-half, v-min, or the path of a table of your own."""
    microbatches: int | None = None
    """In one pass of the pipeline, on each data rank. Default: twice the stages."""
    chunks: int | None = None
    """Model chunks per stage. Default: what the schedule needs."""
    stages: str = "even"
    """Layers of each part of the pipeline: even, balanced (by FLOPs, the head counted), last-N (N in the last part, the
    others even), or as in 3,5,5,3."""

    @property
    def num_microbatches(self) -> int:
        """Micro-batches in one pass of the pipeline; 1 where there is none."""
        if self.mesh.pp == 1:
            return 1
        return 2 * self.mesh.pp if self.microbatches is None else self.microbatches

    @property
    def pipeline(self) -> Schedule | None:
        """The schedule that runs; None where pp=1."""
        if self.mesh.pp == 1:
            return None
        sizes = (self.mesh.pp, self.num_microbatches, self.chunks)
        return find_schedule(self.schedule, *sizes, 2 if self.overlap else 1, self.remat == "chunk")

    @property
    def overlap_layers(self) -> bool:
        """Whether a layer's communication over dp overlaps with another layer's compute: not in a pipeline."""
        return self.overlap and self.mesh.pp == 1

    def unrolls(self, platform: str, num_layers: int) -> bool:
        """Whether the step's loop over so many layers is written out."""
        if self.unroll_layers != "auto":
            return self.unroll_layers == "yes"
        own_loop = self.mesh.pp > 1 or self.overlap
        return platform == "gpu" and not (self.grows_unrolled or own_loop) and num_layers <= UNROLLED_AT_MOST

    @property
    def grows_unrolled(self) -> bool:
        """Whether a layer has what a GPU's compiler moves over its end where layers are written out, so that the peak
        rises (docs/benchmarks.md): messages over the axes that hold parts of a state or a sequence, and blocks that run
        again."""
        sends = (self.zero > 1 and self.sharded) or (self.sp and self.mesh.tp > 1) or self.mesh.cp > 1
        return sends or self.recomputes or self.repeats_arrays

    @property
    def last_layers(self) -> int:
        """N of `stages="last-N"`; 0 for another division."""
        number = self.stages.removeprefix("last-")
        return int(number) if number != self.stages else 0

    @property
    def remat_every(self) -> int:
        """Blocks recomputed together in backward; 0 where whole blocks are not recomputed, or in an R of their own."""
        if self.repeats_arrays:
            return 0
        return REMAT[self.remat] if self.remat in REMAT else int(self.remat.removeprefix("every-"))

    @property
    def repeats_arrays(self) -> bool:
        """Whether `remat` names arrays (`jaxdist.parallel.named_arrays.name_array`)."""
        return self.remat.startswith(REPEAT)

    @property
    def recomputes(self) -> bool:
        """Whether layers run forward again in backward, alone or together."""
        return self.remat_every > 0 or self.remat == "chunk"

    @property
    def ring(self) -> str | None:
        """The direction of the rings that run; None where there are none."""
        return None if self.tp_ring == "none" else self.tp_ring

    @property
    def cp_split(self) -> tuple[int, bool]:
        """(neighbours along cp that exchange heads, whether the others' keys are gathered)."""
        return cp_split(self.cp_kind, self.mesh.cp)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the devices' mesh that experts are split over."""
        return self.mesh.expert_axes + ("tp",) * self.experts_over_tp

    @property
    def expert_ranks(self) -> int:
        """Ranks that hold different experts."""
        return self.mesh.ep * (self.mesh.tp if self.experts_over_tp else 1)

    @property
    def split(self) -> Split:
        """How sequences are split over cp."""
        return Split(self.mesh.cp, *self.cp_split, swaps=self.mesh.pp > 1)

    @property
    def bucket_bytes(self) -> float:
        """Bytes of gradients that share one collective at most; a larger leaf is sent alone."""
        return {"per-parameter": 0, "flat": math.inf, "bucketed": self.bucket_mb * 2**20}[self.grad_sync]

    @property
    def sharded(self) -> bool:
        """Whether ZeRO shards anything at all."""
        return self.zero > 0 and self.mesh.state_ranks > 1

    def __post_init__(self):
        require_choices(self)
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero={self.zero}", "must be a stage of ZeRO, 0 (off) to 3", "Use zero=0, 1, 2 or 3")
        require_within("bucket_mb", self.bucket_mb, 1e-6, 2**20, "Use 25")
        require_positive("accumulate", self.accumulate)
        require_positive("loss_chunks", self.loss_chunks)
        self._check_remat()
        for name in ("microbatches", "chunks"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        numbers = self.stages.removeprefix("last-")
        parts = numbers.split(",") if numbers == self.stages else [numbers]
        if self.stages not in ("even", "balanced") and not all(map(_is_positive, parts)):
            raise ConfigError(
                f"stages={self.stages!r}",
                "must be even, balanced, last-N, or the layers of each part",
                "Use last-3, or 3,5,5,3 for 16 layers",
            )
        self._check_used()
        self._check_context()
        self._check_experts()
        self._check_ring()
        self._check_overlap()
        _ = self.pipeline  # refuses a schedule that cannot be made

    def _check_used(self):
        """No setting is ignored: what only one kind of strategy reads is refused with the others."""
        default = {field.name: field.default for field in dataclasses.fields(self)}
        for names, applies, why in (
            (("schedule", "microbatches", "chunks", "stages"), self.mesh.pp > 1, "it describes a pipeline, and pp=1"),
            (("cp_kind",), self.mesh.cp > 1, "it describes context parallelism, and cp=1"),
            (("bucket_mb",), self.grad_sync == "bucketed", f"gradients are reduced {self.grad_sync}, in no buckets"),
            (
                ("unroll_layers",),
                self.mesh.pp == 1 and not self.overlap,
                "a pipeline and overlap have loops of their own",
            ),
            (("reshard_after_forward",), self.zero == 3, f"only ZeRO-3 gathers weights, and this is zero={self.zero}"),
        ):
            for name in names:
                if not applies and getattr(self, name) != default[name]:
                    raise ConfigError(
                        f"{name}={getattr(self, name)}", f"{why}: it would change nothing", "Leave it out"
                    )

    def _check_context(self):
        heads = self.cp_kind.removeprefix("usp-")
        if self.cp_kind not in CP_KINDS and not (heads != self.cp_kind and _is_positive(heads)):
            raise ConfigError(
                f"cp_kind={self.cp_kind!r}",
                f"must be {', '.join(CP_KINDS)}, or usp-U for groups of U ranks",
                "Use cp_kind='ring'",
            )
        exchanging, _ = self.cp_split
        if self.mesh.cp % exchanging:
            raise ConfigError(
                f"cp_kind={self.cp_kind} with cp={self.mesh.cp}",
                f"cp must be a multiple of {exchanging}, the ranks of a group",
                f"Use usp-U with U in {divisors(self.mesh.cp)}",
            )
        if self.attention == "cudnn" and self.mesh.cp > self.cp_split[0]:
            raise ConfigError(
                f"attention=cudnn with cp_kind={self.cp_kind}",
                "its kernel must see whole sequences, and this cp_kind attends to blocks of them",
                "Use attention=auto, or cp_kind='ulysses'",
            )
        if not fits_pipeline(self.mesh, self.cp_kind):
            raise ConfigError(
                f"cp_kind={self.cp_kind} with pp={self.mesh.pp} and cp={self.mesh.cp}",
                f"a ring in a pipeline stage swaps in pairs: its size must be even, not {self.mesh.cp // exchanging}",
                "Use cp_kind='all-gather', an even cp, or a mesh with pp=1",
            )

    def _check_experts(self):
        if self.experts_over_tp and not self.sp:
            raise ConfigError(
                "experts_over_tp=True",
                "each rank of tp must have tokens of its own to send, and without sp all ranks have the same ones",
                "Add sp=True, or use experts_over_tp=False",
            )

    def _check_ring(self):
        asked = f"tp_ring={self.tp_ring}"
        if self.ring and not self.sp:
            raise ConfigError(
                asked,
                "sequence parallelism must be on: a ring gathers and scatters the sequence that it splits over tp",
                "Add sp=True, or use tp_ring='none'",
            )
        if self.ring and self.mesh.tp == 1:
            raise ConfigError(
                f"{asked} with tp=1", "a ring must have neighbours", "Use a mesh with tp=2 or more, or tp_ring='none'"
            )
        if self.ring and self.mesh.pp > 1:
            raise ConfigError(
                f"{asked} with pp={self.mesh.pp}",
                "pp must be 1: stages run different layers at a tick, and their permutes would be mismatched",
                "Use a mesh with pp=1, or tp_ring='none'",
            )

    def _check_remat(self):
        every, arrays = self.remat.removeprefix("every-"), self.remat.removeprefix(REPEAT).split("+")
        is_every = every != self.remat and _is_positive(every)
        if not (self.remat in REMAT or is_every or (self.repeats_arrays and all(map(is_array, arrays)))):
            raise ConfigError(
                f"remat={self.remat!r}",
                "must be none, selective, block, chunk or every-K with K a whole number; in programs also auto",
                "Use every-2",
            )
        if self.remat == "chunk" and self.mesh.pp == 1:
            raise ConfigError(
                "remat=chunk", "pp must be above 1: a pipeline recomputes chunks where it idles", "Use remat=block"
            )
        if self.repeats_arrays and (self.mesh.pp > 1 or self.overlap):
            raise ConfigError(
                f"remat={self.remat!r} with {f'pp={self.mesh.pp}' if self.mesh.pp > 1 else 'overlap=True'}",
                "must name no arrays: a layer's backward is a program of its own there, and chooses what it keeps",
                "Use remat='block'" + " or 'chunk'" * (self.mesh.pp > 1),
            )

    def _check_overlap(self):
        for asked, why, instead, applies in (
            (
                f"remat={self.remat}",
                "a layer must be recomputed by itself: overlap works layer by layer",
                "Use remat='block'",
                self.remat_every > 1,
            ),
            (
                "reshard_after_forward=False",
                "weights must be gathered again: those that stay whole are not gathered ahead in backward",
                "Use one of the two",
                self.zero == 3 and not self.reshard_after_forward,
            ),
        ):
            if self.overlap_layers and applies:
                raise ConfigError(f"overlap=True with {asked}", why, instead)


_make_schedule = cache(make_schedule)


def fits_pipeline(mesh: MeshShape, kind: str) -> bool:
    """Whether the mesh may have this kind: in a pipeline neighbours in a ring swap in pairs (`exchange.swap`)."""
    exchanging, gathers = cp_split(kind, mesh.cp)
    groups = mesh.cp // exchanging
    return mesh.pp == 1 or gathers or groups == 1 or groups % 2 == 0


def find_schedule(
    name: str,
    num_stages: int,
    num_microbatches: int,
    num_chunks: int | None,
    send_latency: int = 1,
    recompute: bool = False,
) -> Schedule:
    """The named schedule for these sizes, or the one in a file. Raises: ConfigError where there is none.

    send_latency: ticks from stage to stage, which a table in a file must allow for too. recompute: whether the table
    has an R for every B, as one in a file must then have.
    """
    if name in NAMES:
        return _make_schedule(name, num_stages, num_microbatches, num_chunks, send_latency, recompute)
    if not Path(name).is_file():
        raise ConfigError(
            f"schedule={name!r}", "must be the name of a schedule or a file with a table", f"Use {', '.join(NAMES)}"
        )
    schedule = load(name)
    found = (schedule.num_stages, schedule.num_microbatches, schedule.num_chunks)
    wanted = (num_stages, num_microbatches, num_chunks or schedule.num_chunks)
    if found != wanted:
        sizes = "{} stages, {} micro-batches and {} chunks"
        raise ConfigError(
            f"the schedule in {name} is for {sizes.format(*found)}",
            f"must fit the run, which has {sizes.format(*wanted)}",
            f"Use a mesh with pp={found[0]}, microbatches={found[1]} and chunks={found[2]}, or write another table",
        )
    if schedule.recompute != recompute:
        raise ConfigError(
            f"the schedule in {name} with{'' if recompute else 'out'} remat=chunk",
            f"must fit its table, which has {'an' if schedule.recompute else 'no'} R (a chunk's forward, run again)",
            "Use another remat than chunk, or a table with R" if recompute else "Use remat=chunk",
        )
    schedule = dataclasses.replace(schedule, send_latency=send_latency)
    validate(schedule)
    return schedule


def _is_positive(text: str) -> bool:
    text = text.strip()
    return text.isascii() and text.isdigit() and len(text) < 10 and int(text) > 0


Dtype = Literal["float32", "bfloat16", "float16", "float64"]


@dataclass(frozen=True)
class PrecisionConfig:
    """Dtypes. Masters and moments are in at least float32. float16 scales the loss dynamically."""

    dtype: Dtype = "float32"
    """Dtype of parameters and activations; masters and moments stay in at least float32."""
    reduce_dtype: Dtype | None = None
    """In which gradients are summed. Default: float32 (float64 where dtype is)."""
    loss_scale: float = 2.0**12
    """The loss's factor at the start of a float16 run."""
    loss_scale_window: int = 1000
    """Finite steps after which the factor doubles."""
    loss_scale_hysteresis: int = 2
    """Overflows after which it halves."""

    @property
    def master_dtype(self) -> str:
        return "float64" if self.dtype == "float64" else "float32"

    @property
    def reduction_dtype(self) -> str:
        return self.reduce_dtype or self.master_dtype

    def __post_init__(self):
        require_choices(self)
        if self.reduce_dtype == "float64" and self.dtype != "float64":
            raise ConfigError(
                f"reduce_dtype=float64 with dtype={self.dtype}",
                "must be float64 in both or in neither: the whole program computes in 64 bits or none of it",
                "Use dtype='float64', or reduce in float32",
            )
        for name in ("loss_scale", "loss_scale_window", "loss_scale_hysteresis"):
            if self.dtype != "float16" and getattr(self, name) != getattr(PrecisionConfig, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)}",
                    f"only float16 scales the loss, and dtype={self.dtype}: it would change nothing",
                    "Leave it out",
                )
        if not (math.isfinite(self.loss_scale) and self.loss_scale >= 1):
            raise ConfigError(f"loss_scale={self.loss_scale}", "must be a finite number, at least 1", "Use 4096")
        require_positive("loss_scale_window", self.loss_scale_window)
        require_positive("loss_scale_hysteresis", self.loss_scale_hysteresis)
