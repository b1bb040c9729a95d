"""A run's functions on a mesh, compiled on first use: the initial state, the training step, an evaluation."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jaxdist.config import OptimizerConfig, RunConfig, require_seed
from jaxdist.data.batches import GlobalBatch
from jaxdist.errors import ConfigError
from jaxdist.layout import Layout
from jaxdist.mesh import AXES
from jaxdist.models.context import Batch
from jaxdist.parallel.pipeline.lowering import iterations
from jaxdist.placement import make_layout
from jaxdist.probes import Recorder
from jaxdist.runtime.devices import refused_option
from jaxdist.specs import (
    abstract_storage,
    draw_spec,
    drop_unit_axes,
    local_bytes,
    param_specs,
    rows_spec,
    shardings,
    storage_specs,
)
from jaxdist.train.gradients.base import ShardedModel
from jaxdist.train.gradients.bind import bind_model, require_sound
from jaxdist.train.leaf_needs import require_held
from jaxdist.train.loss_scale import LossScale
from jaxdist.train.optimizer import learning_rate, make_optimizer, optimizer_specs, require_arguments
from jaxdist.train.state import State, initial_state, stored_parameters, unusable_donations
from jaxdist.train.step import evaluate, train_step
from jaxdist.train.xla_options import Value, accepted, options_in

REPLICATED = PartitionSpec()
METRICS = ("loss", "grad_norm", "group_norms", "tokens")


@dataclass(frozen=True)
class Program:
    """A run's functions, compiled on first use, and the layout they share.

    init(seed) -> State. step(state, batch) -> (State, metrics), donating the state; metrics["not_finite"] alone differs
    from rank to rank (`flag_not_finite`), metrics["group_norms"] are the gradient norms of `layout.trained.groups`.
    With `with_gradients`, also the gradients the optimiser was given, before clipping, in the storage layout.
    evaluate(params, batch) -> (summed loss, number of targets). model: bound to the layout, as it trains.
    """

    config: RunConfig
    mesh: Mesh | AbstractMesh
    layout: Layout
    specs: State
    shapes: State
    model: ShardedModel
    optimizer: optax.GradientTransformation
    init: Callable
    step: Callable
    evaluate: Callable

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the state; nothing is allocated."""
        return jax.tree.map(
            lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
            self.shapes,
            shardings(self.mesh, self.specs),
        )

    def abstract_batch(self) -> Batch:
        rows, length = self.config.batch_size, self.config.model.seq_len
        starts = (rows, length) if self.config.mask_documents else None
        return jax.tree.map(
            lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(self.mesh, spec)),
            Batch((rows, length), (rows, length), (rows,), starts),
            batch_specs(self.config, self.layout),
            is_leaf=lambda x: type(x) is tuple,
        )

    def iterations(self, *, evaluate: bool = False) -> dict[str, tuple[Fraction, ...]] | None:
        """How often the loops of a pipeline run, which its program does not state (`parallel.pipeline.lowering`)."""
        if self.config.parallel.mesh.pp == 1:
            return None
        return iterations(self.config.parallel.pipeline, self.config.part_layers, forward_only=evaluate)

    def put(self, batch: Mapping) -> Batch:
        """The global batch -> device arrays, each rank getting its rows.

        batch: the arrays of a `Batch` by name, on the host and of any integers, or a `GlobalBatch`, of which a process
        reads its own rows.
        Raises: ConfigError for arrays of other names, shapes or numbers than a step takes, or tokens beyond the
        vocabulary.
        """
        if not isinstance(batch, GlobalBatch):
            batch = {name: np.asarray(x) for name, x in batch.items()}
            self._require_fits(batch)
        read = batch.read if isinstance(batch, GlobalBatch) else lambda rows: {k: x[rows] for k, x in batch.items()}

        def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(
                like.shape, like.sharding, lambda at: read(at[0])[name].astype(like.dtype, copy=False)
            )

        return Batch(**{name: array(name, x) for name, x in self.abstract_batch()._asdict().items() if x is not None})

    def _require_fits(self, batch: Mapping[str, np.ndarray]) -> None:
        wanted = {name: x.shape for name, x in self.abstract_batch()._asdict().items() if x is not None}
        found = {name: x.shape if x.dtype.kind in "iu" else x.dtype for name, x in batch.items()}
        if found != wanted:
            raise ConfigError(
                f"a batch of {found}",
                f"must be whole numbers, {wanted}: batch_size rows of seq_len tokens, and starts exactly where "
                "mask_documents is set",
                "Make another, or another RunConfig",
            )
        most = self.config.model.vocab_size - 1
        for name, least in (("inputs", 0), ("targets", None)):
            tokens = batch[name]
            if tokens.max() > most or (least is not None and tokens.min() < least):
                raise ConfigError(
                    f"a batch with {name} from {tokens.min()} to {tokens.max()}",
                    f"must be tokens of the vocabulary, at most {most}; only targets may be below 0, and do not count",
                    "Use the model's tokenizer, or a larger vocab_size",
                )

    def compile_step(self, compiler_options: dict[str, Value] | None = None) -> jax.stages.Compiled:
        """Compile the step ahead of time, with options of XLA for the step alone.

        Raises: RuntimeError where XLA cannot reuse the donated state, which would then be held twice.
        """
        state = self.abstract_state()
        options = step_options(self.config, platform_of(self.mesh)) | (compiler_options or {})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Some donated buffers were not usable")
            compiled = self.step.lower(state, self.abstract_batch()).compile(compiler_options=options)
        memory, held = compiled.memory_analysis(), local_bytes(state)
        # XLA may copy a leaf of a few bytes instead: on an H100 it left 1,024 of 26 GB, two norms' scales of one size.
        if memory is not None and held - memory.alias_size_in_bytes > min(held // 1000, 2**16):
            raise RuntimeError(f"donation failed: {held} bytes of state a device, {memory.alias_size_in_bytes} reused")
        return compiled


def step_options(config: RunConfig, platform: str) -> dict[str, Value]:
    """Options of XLA that a step is compiled with, before those that a user gives.

    Raises: ConfigError where this jaxlib refuses one of the set that `xla` names.
    """
    if platform != "gpu":
        return {}
    asked = config.parallel.xla
    found = options_in(asked, config.parallel.mesh.num_devices)
    for name, value in found.items():
        if refusal := refused_option(name, value):
            raise ConfigError(
                f"xla={asked!r}",
                f"this jaxlib must take {name}={value}, and says: {refusal}",
                f"Use xla='default', or a jaxlib {' or '.join(accepted(name))}",
            )
    pipeline = config.parallel.overlap and config.parallel.mesh.pp > 1
    ring = config.parallel.mesh.cp > config.parallel.cp_split[0]
    if pipeline or ring:
        # A tick's messages go both ways at once, a ring's keys and their gradients after each other; by default a GPU
        # runs one collective at a time.
        found["xla_gpu_experimental_parallel_collective_overlap_limit"] = "2"
    return found


class CompiledBytes(NamedTuple):
    """Bytes on one device, by the compiler's plan: what a call takes and gives (a donated array once), and
    temporaries."""

    arguments: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries


def compiled_bytes(compiled: jax.stages.Compiled) -> CompiledBytes | None:
    """What a compiled program needs; None where its compiler does not say."""
    memory = compiled.memory_analysis()
    if memory is None:
        return None
    arguments = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return CompiledBytes(arguments, memory.temp_size_in_bytes)


def build_program(
    config: RunConfig,
    mesh: Mesh | AbstractMesh,
    *,
    optimizer: optax.GradientTransformation | Callable[[Layout], optax.GradientTransformation] | None = None,
    with_gradients: bool = False,
    compiler_options: dict | None = None,
    poison: Callable | None = None,
    recorder: Recorder | None = None,
    draws_choices: bool = False,
) -> Program:
    """All functions of a run on `mesh`, `make_mesh(config.parallel.mesh, devices)`. An abstract mesh gives a program
    that can be traced but not run.

    optimizer: in place of `config.optimizer`, clipping, weight decay and schedule included, none of which is then used;
    metrics have no "lr". It is called on shards: see `jaxdist.train.leaf_needs` and `clip_by_global_norm`; what needs
    more than these is given as `with_whole_parameters(optimizer)`, or as a function of the layout. An update also gets
    `step` (a float), `value` (the batch's loss) and `global_norm` (tree -> its norm over all shards), if it takes extra
    arguments.
    poison: (layout, step, local gradients) -> gradients, to rehearse a fault (`jaxdist.runtime.fault_injection`).
    recorder: of what the step's probes see (`jaxdist.divergence`). draws_choices: as in `Context`.
    """
    if config.precision.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ConfigError("dtype float64", "JAX must be told to compute in 64 bits", "Set jax_enable_x64 first")
    if poison is not None and config.parallel.overlap_layers:
        raise ConfigError(
            "overlap=True with a fault injected into a gradient",
            "it must be injected before gradients are summed over ranks, and overlap sums them during backward",
            "Leave overlap out of this run",
        )
    shape = config.parallel.mesh
    if dict(mesh.shape) != dict(zip(AXES, shape.sizes, strict=True)):
        raise ConfigError(
            f"a mesh with the axes {dict(mesh.shape)}",
            f"must have {', '.join(AXES)}, of the sizes that the configuration's {shape} gives them",
            "Make it with make_mesh(config.parallel.mesh, devices)",
        )
    layout = make_layout(config.model, config.parallel, config.part_layers)
    platform = platform_of(mesh)
    trains = bind_model(config, layout, attention_on(mesh, config, training=True), platform, recorder, draws_choices)
    require_sound(trains)
    evaluates = bind_model(
        config, layout, attention_on(mesh, config, training=False), platform, draws_choices=draws_choices
    )
    if optimizer is not None and config.optimizer != OptimizerConfig():
        raise ConfigError(
            f"config.optimizer={config.optimizer} with optimizer=...",
            "must be left at its default, since the optimizer that is given takes its place",
            "Give one of the two",
        )
    rate = learning_rate(config) if optimizer is None else None
    if callable(optimizer):
        optimizer = optimizer(layout.trained)
    else:
        if optimizer is not None:
            require_arguments(optimizer, abstract_storage(layout.trained, config.precision))
        optimizer = optimizer or make_optimizer(config, layout.trained)
        require_held(optimizer, layout.trained, config.precision.master_dtype)
    specs = State(
        step=REPLICATED,
        params=param_specs(layout),
        master=None if config.precision.dtype == config.precision.master_dtype else storage_specs(layout.trained),
        moments=optimizer_specs(optimizer, layout.trained),
        scale=None if config.precision.dtype != "float16" else LossScale(*[REPLICATED] * 3),
    )
    batch = batch_specs(config, layout)
    on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=True)
    jit = partial(jax.jit, compiler_options=compiler_options)

    # Three programs, since every mesh, parameters and masters must get the same bits: XLA may fuse a draw with what
    # is done to it (padding, another order of layers, a cast), and then round it in another way.
    drawn, stored = jax.tree.map(draw_spec, layout.leaves), storage_specs(layout)
    draw = jit(config.model.initial_values, out_shardings=shardings(mesh, drawn))
    store = jit(
        on_mesh(partial(stored_parameters, config, layout), in_specs=(drawn,), out_specs=stored), donate_argnums=0
    )
    assemble = on_mesh(partial(initial_state, config, layout, optimizer), in_specs=(stored,), out_specs=specs)
    place = jit(assemble, donate_argnums=0)

    def init(seed: int) -> State:
        require_seed(seed)
        with unusable_donations():
            return place(store(draw(np.uint32(seed))))

    step = partial(train_step, trains, optimizer, rate=rate, with_gradients=with_gradients, poison=poison)
    metrics = [*METRICS, *(["lr"] if rate is not None else []), *(["loss_scale"] if specs.scale is not None else [])]
    metric_specs = dict.fromkeys(metrics, REPLICATED) | {"not_finite": drop_unit_axes((AXES,), config.parallel.mesh)}
    outputs = (specs, metric_specs) + ((storage_specs(layout.trained),) if with_gradients else ())
    return Program(
        config=config,
        mesh=mesh,
        layout=layout,
        specs=specs,
        shapes=jax.eval_shape(assemble, abstract_storage(layout, config.precision)),
        model=trains,
        optimizer=optimizer,
        init=init,
        step=jit(on_mesh(step, in_specs=(specs, batch), out_specs=outputs), donate_argnums=0),
        evaluate=jit(
            on_mesh(partial(evaluate, evaluates), in_specs=(specs.params, batch), out_specs=(REPLICATED, REPLICATED))
        ),
    )


def batch_specs(config: RunConfig, layout: Layout) -> Batch:
    """How the arrays of a batch are split: by rows. Of a sequence that is split over cp every rank has all tokens, and
    takes its own (`ShardedModel.own_tokens`), so that nothing outside a step knows in which order they stand."""
    rows = rows_spec(layout.mesh)
    return Batch(rows, rows, rows, rows if config.mask_documents else None)


def attention_on(mesh: Mesh | AbstractMesh, config: RunConfig, *, training: bool) -> str:
    """The attention that runs on a mesh. Only devices of this process are asked what they compile.

    Raises: ConfigError where the one that was asked for cannot run.
    """
    mine = [] if isinstance(mesh, AbstractMesh) else [d for d in mesh.devices.flat if d in jax.local_devices()]
    dtype, device = config.precision.dtype, next(iter(mine), None)
    return config.model.attention_for(config.attention, platform_of(mesh), dtype, training=training, device=device)


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    return "abstract" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
