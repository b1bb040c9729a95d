"""Every setting of a run as frozen values, and the checks that hold between them.

A `RunConfig` that exists is valid: `__post_init__` refuses whatever cannot work, before anything is traced.
"""

import dataclasses
from dataclasses import dataclass
from functools import cache
from numbers import Integral
from typing import Literal

from jaxdist.errors import MOST, ConfigError, divisors, require_positive, require_within
from jaxdist.mesh import MeshShape
from jaxdist.models.base import Model, declare
from jaxdist.models.declared import check_split
from jaxdist.models.registry import model_of
from jaxdist.models.registry import to_dict as model_to_dict
from jaxdist.models.traced import head_in_layers
from jaxdist.parallel.pipeline.builders import NAMES
from jaxdist.parallel.pipeline.schedules import divide_layers, with_last
from jaxdist.params import STACKED, named_params
from jaxdist.strategy import CP_KINDS, ParallelConfig, PrecisionConfig, fits_pipeline, require_choices
from jaxdist.values import fields_of

OptimizerName = Literal["adamw", "sgd", "lion", "adafactor", "muon"]
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]
MOST_TOKENS = 2**30  # of one update: its targets are counted in 32 bits


def require_seed(seed: int) -> None:
    if not isinstance(seed, Integral) or not 0 <= seed < 2**32:
        raise ConfigError(f"seed={seed!r}", "must be a whole number from 0 to 2**32 - 1", "Use seed=0")


def check_context(model: Model, parallel: ParallelConfig) -> None:
    """Refuse a sequence that cannot be split over cp. Raises: ConfigError."""
    cp = parallel.mesh.cp
    if cp == 1:
        return
    require_splits_sequence(model, cp)
    unit = parallel.split.unit
    if model.seq_len % unit:
        below = model.seq_len // unit * unit
        raise ConfigError(
            f"seq_len={model.seq_len} with cp={cp}",
            f"must be a multiple of {unit}, since cp_kind={parallel.cp_kind} gives ranks equal parts of the sequence",
            f"Use a seq_len of {f'{below} or ' if below else ''}{below + unit}",
        )


def require_splits_sequence(model: Model, cp: int) -> None:
    """Refuse a model whose layers do not compute with a part of the sequence. Raises: ConfigError."""
    if cp > 1 and not model.splits_sequence:
        raise ConfigError(
            f"the model {type(model).__name__} with cp={cp}",
            "it must say that its layers can compute with a part of the sequence",
            "Set splits_sequence = True in it where all that mixes positions is `attend`, or use cp=1",
        )


@cache
def context_kinds(model: Model, mesh: MeshShape) -> tuple[str, ...]:
    """The kinds of context parallelism that a model can have on a mesh, by its own rules; the first, where cp=1."""
    if mesh.cp == 1:
        return CP_KINDS[:1]
    found = []
    for kind in CP_KINDS:
        if not fits_pipeline(mesh, kind):
            continue
        parallel = ParallelConfig(MeshShape(cp=mesh.cp, tp=mesh.tp), cp_kind=kind)
        try:
            check_split(model, parallel)
            check_context(model, parallel)
        except ConfigError:
            continue
        found.append(kind)
    return tuple(found)


UNUSED_BETAS = {"sgd": ("beta2",), "adafactor": ("beta1", "beta2")}
OF_MUON = ("momentum", "momentum_warmup_steps", "nesterov", "muon_scale", "muon_coefficients", "muon_bf16")


@dataclass(frozen=True)
class OptimizerConfig:
    """Update rule and its rates: linear warm-up to `lr`, then `lr_schedule` down to `lr * min_lr_ratio` at `steps`."""

    name: OptimizerName = "adamw"
    """Update rule. Muon is of the layers' matrices, with AdamW for all other parameters."""
    lr: float = 3e-3
    """Learning rate at the end of the warm-up, the highest."""
    min_lr_ratio: float = 0.1
    """Learning rate after the last step, as a share of the highest."""
    lr_schedule: LrSchedule = "cosine"
    """Course of the learning rate after the warm-up: cosine or linear down to the last step, constant, or wsd
    (constant, and linear down in the last fifth)."""
    warmup_steps: int = 20
    """Steps in which the learning rate rises linearly."""
    weight_decay: float = 0.1
    """Decoupled, and of matrices and embeddings alone."""
    beta1: float = 0.9
    """Decay of the first moment; the momentum of SGD."""
    beta2: float = 0.95
    """Decay of the second moment."""
    eps: float = 1e-8
    """Added to the root of AdamW's second moment."""
    momentum: float = 0.95
    """Momentum of Muon."""
    momentum_warmup_steps: int = 0
    """Steps in which Muon's momentum rises linearly, from 0.85."""
    nesterov: bool = True
    """Whether Muon's momentum is Nesterov's."""
    muon_scale: Literal["rms", "shape"] = "rms"
    """Scale of Muon's update: rms, that of AdamW's, so that one learning rate serves both; shape, sqrt(max(1, outputs /
    inputs))."""
    muon_coefficients: Literal["original", "dion"] = "original"
    """Coefficients of Muon's Newton-Schulz iterations: the same in all five, or one set each."""
    muon_bf16: bool = False
    """Whether operands of these iterations' products are bfloat16; sums stay wide."""
    clip_norm: float = 1.0
    """Largest norm of the whole gradient; a larger one is scaled down to it."""

    def __post_init__(self):
        require_choices(self)
        # Bounds within what fp32 holds with digits to spare.
        for name, least, most in (
            ("lr", 1e-30, 1e30),
            ("eps", 1e-30, 1e6),
            ("clip_norm", 1e-30, 1e30),
            ("beta1", 0, 1 - 1e-7),
            ("beta2", 0, 1 - 1e-7),
            ("momentum", 0, 1 - 1e-7),
            ("min_lr_ratio", 0, 1),
            ("weight_decay", 0, 1e6),
        ):
            require_within(name, getattr(self, name), least, most, "Use the default")
        if self.lr_schedule == "constant" and self.min_lr_ratio != OptimizerConfig.min_lr_ratio:
            raise ConfigError(
                f"min_lr_ratio={self.min_lr_ratio} with lr_schedule=constant",
                "the rate stays at its highest: it would change nothing",
                "Leave it out",
            )
        for name in UNUSED_BETAS.get(self.name, ()):
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)}",
                    f"{self.name} has no such moment: it would change nothing",
                    "Leave it out",
                )
        for name in OF_MUON if self.name != "muon" else ():
            if getattr(self, name) != getattr(OptimizerConfig, name):
                raise ConfigError(
                    f"{name}={getattr(self, name)} with optimizer={self.name}",
                    "must be given only with muon: it would change nothing",
                    "Use optimizer=muon, or leave it out",
                )
        for name in ("warmup_steps", "momentum_warmup_steps"):
            if not 0 <= (steps := getattr(self, name)) <= MOST:
                raise ConfigError(
                    f"{name}={steps}", f"must be a number of steps, 0 to {MOST:,}", "Use 0 for no warm-up"
                )


@cache
def require_matrices(model: Model) -> None:
    """Refuse a model for which Muon is not defined. Raises: ConfigError, with the name of the parameter."""
    trained = [each for each in named_params(declare(model)) if not each[1].frozen and each[1].update == "gradient"]
    for name, param in trained:
        if param.matrix is None and "layers" in param.dims:
            raise ConfigError(
                f"optimizer=muon with parameter {name} of shape {param.shape[1:]}",
                "must say which dims are its matrix, having more than two",
                "Declare it as in matrix=('in', 'out', 'out'), None for a dim that numbers matrices, or matrix=()",
            )
    if not any(param.matrix for _, param in trained):
        raise ConfigError(
            f"optimizer=muon with {model.describe()}",
            "must have matrices that are trained: all its trained parameters would be AdamW's",
            "Use optimizer=adamw",
        )


@dataclass(frozen=True)
class RunConfig:
    """One training run."""

    model: Model
    parallel: ParallelConfig = ParallelConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    precision: PrecisionConfig = PrecisionConfig()
    batch_size: int = 16
    """Sequences per update, over the whole mesh."""
    steps: int = 300
    """Updates."""
    seed: int = 0
    """Seed of initial values, the order of data, and dropout."""
    mask_documents: bool = False
    """Nothing crosses from one document of a sequence to the next: attention stays in each, positions count from its
    start, and its first token is not predicted."""

    def __post_init__(self):
        require_positive("steps", self.steps)
        require_positive("batch_size", self.batch_size)
        if self.batch_size * self.model.seq_len > MOST_TOKENS:
            raise ConfigError(
                f"batch_size={self.batch_size} x seq_len={self.model.seq_len}",
                f"an update must have at most {MOST_TOKENS:,} tokens",
                f"Use a batch size of {max(1, MOST_TOKENS // self.model.seq_len):,} or less",
            )
        if self.mask_documents and self.parallel.attention == "cudnn":
            raise ConfigError(
                "mask_documents=True with attention=cudnn",
                "must be off, since cudnn takes no such mask",
                "Use attention=auto",
            )
        require_seed(self.seed)
        check_split(self.model, self.parallel)
        self._check_sequence()
        self._check_batch()
        if self.model.seq_len // self.parallel.mesh.cp % self.parallel.loss_chunks:
            raise ConfigError(
                f"loss_chunks={self.parallel.loss_chunks} with seq_len={self.model.seq_len}",
                "the loss must be of equal parts of a micro-batch's positions",
                f"Use loss_chunks in {divisors(self.model.seq_len // self.parallel.mesh.cp)}",
            )
        self._check_optimizer()
        self._check_pipeline()
        layers, every = self.model.num_blocks, self.parallel.remat_every
        if every and layers % every and self.parallel.mesh.pp == 1:
            raise ConfigError(
                f"remat=every-{every} with {self.model.size_text}",
                "blocks must be recomputed in equal groups",
                f"Use every-K with K in {divisors(layers)}",
            )

    @property
    def attention(self) -> str:
        """The attention that is asked for; auto is written out where documents are told apart, since cuDNN's takes no
        mask."""
        return "xla" if self.mask_documents and self.parallel.attention == "auto" else self.parallel.attention

    @property
    def part_layers(self) -> tuple[int, ...]:
        """Layers of each part of the pipelined model, in model order; all in one part where pp=1."""
        schedule, stages, model = self.parallel.pipeline, self.parallel.stages, self.model
        if schedule is None:
            return (model.num_blocks,)
        if model.num_blocks < schedule.num_parts:
            once = 1 < len(model.kinds) == model.num_layers  # a first layer of another kind, say
            more = f"num_layers={schedule.num_parts * len(model.kinds)} or more"
            raise ConfigError(
                f"{model.size_text} over {schedule.num_stages} stages x {schedule.num_chunks} chunks",
                f"each of the {schedule.num_parts} parts of schedule {schedule.name} must hold at least one "
                + (f"block, and the {len(model.kinds)} kinds of its layers make a single one" if once else "layer"),
                f"Use pp=1, or {more} where its kinds may repeat" if once else f"Use {more}, or fewer stages or chunks",
            )
        if stages in ("even", "balanced"):
            head = head_in_layers(model) if stages == "balanced" else 0.0
            return divide_layers(model.num_blocks, schedule.num_parts, last=head)
        if last := self.parallel.last_layers:
            others = schedule.num_parts - 1
            if model.num_blocks - last < others:
                raise ConfigError(
                    f"stages={stages!r} with {model.size_text}",
                    f"each part before the last must hold at least one layer, and there are {others}",
                    f"Use last-{model.num_blocks - others} or less",
                )
            return with_last(model.num_blocks, schedule.num_parts, last)
        return tuple(int(part) for part in stages.split(","))

    def _check_pipeline(self):
        if (self.parallel.pipeline or self.parallel.overlap) and not named_params(declare(self.model)[STACKED]):
            raise ConfigError(
                f"{'overlap=True' if self.parallel.overlap else f'pp={self.parallel.mesh.pp}'} with "
                f"{type(self.model).__name__}",
                "its layers must have parameters: stages hold them, and overlap sends them",
                "Declare some in `block`, or leave both out",
            )
        schedule, parts = self.parallel.pipeline, self.part_layers
        if schedule is None:
            return
        if len(parts) != schedule.num_parts or sum(parts) != self.model.num_blocks:
            raise ConfigError(
                f"stages={self.parallel.stages!r} with {self.model.size_text}",
                f"the {schedule.num_parts} parts of schedule {schedule.name} ({schedule.num_stages} stages x "
                f"{schedule.num_chunks} chunks) must hold every layer once; here {len(parts)} parts hold {sum(parts)}",
                "Use " + ",".join(map(str, divide_layers(self.model.num_blocks, schedule.num_parts))),
            )

    def _check_sequence(self):
        length, mesh = self.model.seq_len, self.parallel.mesh
        check_context(self.model, self.parallel)
        if self.parallel.sp and length // mesh.cp % mesh.tp:
            raise ConfigError(
                f"seq_len={length} cannot be split over tp={mesh.tp}",
                "with sequence parallelism each tp rank must hold an equal part of the positions",
                f"Use a seq_len that is a multiple of {mesh.cp * mesh.tp}, or leave sp out",
            )

    def _check_batch(self):
        mesh, accumulate, micro = self.parallel.mesh, self.parallel.accumulate, self.parallel.num_microbatches
        unit = mesh.batch_ranks * accumulate * micro
        pipeline = f" x microbatches={micro}" if mesh.pp > 1 else ""
        if self.batch_size % unit:
            below = self.batch_size // unit * unit
            raise ConfigError(
                f"batch_size={self.batch_size}",
                f"must be a multiple of {unit}: it is split over replica={mesh.replica} x dp={mesh.dp} x "
                f"accumulate={accumulate}{pipeline}",
                f"Use {f'{below} or ' if below else ''}{below + unit}",
            )

    def _check_optimizer(self):
        parallel = self.parallel
        split = parallel.mesh.pp > 1 or parallel.mesh.tp > 1 or parallel.sharded
        if self.optimizer.name == "adafactor" and split:
            raise ConfigError(
                f"optimizer=adafactor with pp={parallel.mesh.pp}, tp={parallel.mesh.tp}, zero={parallel.zero}",
                "every rank must hold whole parameters (factored moments, update clipping), and here they are split",
                "Use a mesh of dp alone with zero=0, or optimizer=adamw, lion or sgd",
            )
        if self.optimizer.name == "muon":
            require_matrices(self.model)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch on one device."""
        parallel = self.parallel
        return self.batch_size // (parallel.mesh.batch_ranks * parallel.accumulate * parallel.num_microbatches)

    def warnings(self) -> list[str]:
        """Legal but unwise combinations, one sentence each."""
        parallel, notes = self.parallel, []
        if parallel.zero and not parallel.sharded:
            notes.append(f"zero={parallel.zero} shards over dp and cp, and both are 1: nothing is sharded.")
        if parallel.sp and parallel.mesh.tp == 1:
            notes.append("sp=True splits the sequence over tp, and tp=1: it changes nothing.")
        if parallel.experts_over_tp and parallel.mesh.tp == 1:
            notes.append("experts_over_tp=True splits experts over tp, and tp=1: it changes nothing.")
        if parallel.remat == "selective" and parallel.mesh.cp > parallel.cp_split[0]:
            notes.append(f"remat=selective: attention over cp by {parallel.cp_kind} keeps no scores to recompute.")
        elif parallel.remat == "selective" and parallel.attention in ("cudnn", "blocked"):
            notes.append(f"remat=selective: attention={parallel.attention} keeps no scores to recompute.")
        if not parallel.reshard_after_forward and parallel.recomputes:
            notes.append(f"remat={parallel.remat} recomputes blocks, and so gathers their weights again all the same.")
        if not parallel.reshard_after_forward and parallel.zero == 3 and parallel.mesh.pp > 1:
            notes.append(
                "reshard_after_forward=False: a pipeline gathers the weights of blocks again in B all the same."
            )
        if parallel.unroll_layers == "yes" and parallel.grows_unrolled:
            notes.append(
                "unroll_layers=yes with zero above 1, sp, cp or recomputed blocks: a GPU's compiler may hold several "
                "layers' arrays at once, and more memory than is planned."
            )
        if parallel.overlap_layers and parallel.mesh.batch_ranks * parallel.mesh.cp == 1:
            notes.append("overlap=True has no effect: it overlaps what data ranks send, and there is one.")
        if parallel.mesh.pp > 1 and parallel.num_microbatches < parallel.mesh.pp:
            notes.append(
                f"{parallel.num_microbatches} micro-batches cannot fill {parallel.mesh.pp} stages: some idle all the "
                "time."
            )
        warmup = self.optimizer.warmup_steps
        if warmup > self.steps and warmup != OptimizerConfig.warmup_steps:
            notes.append(
                f"warmup_steps={warmup} with steps={self.steps}: the rate rises over the whole run, in fewer steps."
            )
        if self.precision.reduction_dtype == "float16" != self.precision.dtype:
            notes.append("gradients are summed in float16 without a loss scale: small ones become 0.")
        if self.precision.dtype == "float16" and self.model.num_layers > 48:
            notes.append("float16 overflows easily in deep models; bfloat16 has the range of float32.")
        return notes


def to_dict(config: RunConfig) -> dict:
    """The config as nested dicts and lists, as JSON gives them back; the model as its registry writes it."""
    return _without_tuples(dataclasses.asdict(config) | {"model": model_to_dict(config.model)})


def renewed(name: str, value):
    """A setting of ParallelConfig as an earlier version wrote it -> as this one does."""
    if name == "unroll_layers" and isinstance(value, bool):
        return "yes" if value else "auto"
    return value


def from_dict(found: dict, trust: bool = False) -> RunConfig:
    """What `to_dict` wrote, read from JSON; keys that are not a setting's are left out.

    Only with `trust` does it import the module of a user's own model, and read a schedule from the file that it names.
    Raises: ConfigError where a setting is missing, unknown or of another type.
    """
    parts = {"parallel": ParallelConfig, "optimizer": OptimizerConfig, "precision": PrecisionConfig}
    known = {field.name for field in dataclasses.fields(RunConfig)}
    values = fields_of(
        RunConfig, {name: value for name, value in found.items() if name in known}, "a configuration", ("model", *parts)
    )
    for name, cls in parts.items():
        if name in values:
            if isinstance(values[name], dict):
                values[name] = {key: renewed(key, value) for key, value in values[name].items()}
            nested = fields_of(cls, values[name], name)
            if not trust and nested.get("schedule", NAMES[0]) not in NAMES:
                reason = "a file names it, and must not have another file opened unless it is trusted"
                raise ConfigError(f"the schedule {nested['schedule']!r}", reason, "Add --trust")
            values[name] = cls(**nested)
    return RunConfig(**values | {"model": model_of(values["model"], trust=trust)})


def _without_tuples(value):
    if isinstance(value, dict):
        return {name: _without_tuples(each) for name, each in value.items()}
    return [_without_tuples(each) for each in value] if isinstance(value, tuple | list) else value
