"""One training step: micro-batches, the gradient rule, clipping, the update. All of it inside one `jax.shard_map`."""

import dataclasses
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax, random
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from jaxdist import model
from jaxdist.config import RunConfig
from jaxdist.data import GlobalBatch
from jaxdist.errors import ConfigError, reason_of
from jaxdist.layout import STACKED, Layout, live_spec, local_bytes, make_layout, shardings
from jaxdist.mesh import AXES, DATA_AXES
from jaxdist.optimizer import (
    LossScale,
    global_norm,
    initial_loss_scale,
    learning_rate,
    make_optimizer,
    next_loss_scale,
    optimizer_specs,
    update,
)
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.data import gather_parameters, reduce_gradients
from jaxdist.parallel.grouping import shard
from jaxdist.parallel.overlap import Gradients, overlapped_gradients, wait
from jaxdist.parallel.pipeline import Stages, add, iterations, pick, pipeline_gradients, pipeline_loss
from jaxdist.parallel.relayout import to_compute, to_storage
from jaxdist.parallel.spread import gather_to_users
from jaxdist.parallel.zero import fetch_whole, make_fetch, make_scatter, make_whole_holders
from jaxdist.plan.trace import Collective, Iterations, collectives_of

REPLICATED = PartitionSpec()
METRICS = ("loss", "grad_norm", "lr", "tokens")
LOSS_AXES = ("pp", *DATA_AXES)  # each data rank has its rows' loss; under pp, on one stage


class State(NamedTuple):
    """Everything a step reads and replaces.

    params: compute dtype; compute layout, or storage layout for ZeRO-3. master: fp32 in the storage layout, None where
    `params` are fp32 (or fp64) already. moments: the optimiser's, in the storage layout. scale: fp16 only.
    """

    step: jax.Array
    params: dict
    master: dict | None
    moments: Any
    scale: LossScale | None


class Batch(NamedTuple):
    """inputs, targets: tokens[B, T] (a negative target does not count). rows[B]: index in the global batch."""

    inputs: Any
    targets: Any
    rows: Any


@dataclass(frozen=True)
class Program:
    """A run's functions, compiled on first use, and the layout they share.

    init(seed) -> State. step(state, batch) -> (State, metrics), donating the state; metrics["not_finite"] alone differs
    from rank to rank (`flag_not_finite`). With `with_gradients`, also the
    gradients the optimiser was given, before clipping, in the storage layout. evaluate(params, batch) -> (summed
    loss, number of targets).
    """

    config: RunConfig
    mesh: Mesh | AbstractMesh
    layout: Layout
    specs: State
    shapes: State
    runs: RunConfig  # `config`, with the attention that compiles on the mesh
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
        sharding = shardings(self.mesh, self.layout.batch_spec())
        shape = partial(jax.ShapeDtypeStruct, dtype=jnp.int32, sharding=sharding)
        return Batch(shape((rows, length)), shape((rows, length)), shape((rows,)))

    def collectives_of(self, traced: jax.stages.Traced, *, evaluate: bool = False) -> list[Collective]:
        """What the traced `step` sends, or the traced `evaluate`."""
        return collectives_of(traced.jaxpr, self.config.parallel.mesh, self.iterations(evaluate=evaluate))

    def iterations(self, *, evaluate: bool = False) -> Iterations | None:
        """How often the loops of a pipeline run, which its program does not state (`jaxdist.parallel.pipeline`)."""
        if self.config.parallel.mesh.pp == 1:
            return None
        return iterations(self.config.parallel.pipeline, self.config.part_layers, forward_only=evaluate)

    def put(self, batch: Mapping) -> Batch:
        """The global batch -> device arrays, each rank getting its rows.

        batch: `inputs`, `targets` and `rows` as host arrays, or a `GlobalBatch`, of which a process reads its own rows.
        """
        read = batch.read if isinstance(batch, GlobalBatch) else lambda rows: {k: x[rows] for k, x in batch.items()}

        def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
            return jax.make_array_from_callback(like.shape, like.sharding, lambda at: read(at[0])[name])

        return Batch(*map(array, Batch._fields, self.abstract_batch()))

    def compile_step(self, compiler_options: dict[str, str | bool] | None = None) -> jax.stages.Compiled:
        """Compile the step ahead of time, with options of XLA for the step alone.

        Raises: RuntimeError where XLA cannot reuse the donated state, since the state would then be held twice.
        """
        state = self.abstract_state()
        options = step_options(self.config, _platform(self.mesh)) | (compiler_options or {})
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="Some donated buffers were not usable")
            compiled = self.step.lower(state, self.abstract_batch()).compile(compiler_options=options)
        memory = compiled.memory_analysis()
        if memory is not None and memory.alias_size_in_bytes < local_bytes(state):
            raise RuntimeError(
                f"donation failed: {local_bytes(state)} bytes of state a device, {memory.alias_size_in_bytes} reused"
            )
        return compiled


def step_options(config: RunConfig, platform: str) -> dict[str, str | bool]:
    """Options of XLA that a step is compiled with, before those that a user gives."""
    if platform == "gpu" and config.parallel.overlap and config.parallel.mesh.pp > 1:
        # A tick's messages go both ways at once; by default one collective of a GPU travels at a time.
        return {"xla_gpu_experimental_parallel_collective_overlap_limit": "2"}
    return {}


class CompiledBytes(NamedTuple):
    """Of one device, by the compiler's plan: what a call takes and gives (a donated array once), and temporaries."""

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
    with_gradients: bool = False,
    compiler_options: dict | None = None,
    poison: Callable | None = None,
) -> Program:
    """All functions of a run on `mesh`. An abstract mesh gives a program that can be traced but not run.

    poison: (layout, step, local gradients) -> gradients, to rehearse a fault (`jaxdist.drill`).
    """
    if config.precision.dtype == "float64" and not jax.config.jax_enable_x64:
        raise ConfigError("dtype float64", "JAX computes in 32 bits unless told", "Set jax_enable_x64 first")
    if poison is not None and config.parallel.overlap_layers:
        raise ConfigError(
            "--overlap with a drill that spoils a gradient",
            "it spoils one before it is summed over ranks, and here sums are made while backward runs",
            "Leave --overlap out for the drill",
        )
    layout = make_layout(model.declare(config.model), config.parallel, config.part_layers)
    choose_attention(config, _platform(mesh), training=True)  # refuses what cannot run, before anything is traced
    runs = with_attention_that_compiles(config, mesh)
    optimizer = make_optimizer(config.optimizer, layout)
    specs = State(
        step=REPLICATED,
        params=layout.param_specs(),
        master=None if config.precision.dtype == config.precision.master_dtype else layout.storage_specs(),
        moments=optimizer_specs(optimizer, layout),
        scale=None if config.precision.dtype != "float16" else LossScale(*[REPLICATED] * 3),
    )
    batch_specs = Batch(*[layout.batch_spec()] * 3)
    on_mesh = partial(jax.shard_map, mesh=mesh, check_vma=True)
    jit = partial(jax.jit, compiler_options=compiler_options)

    # Three programs, since every mesh, parameters and masters must get the same bits: XLA may fuse a draw with what
    # is done to it (padding, another order of layers, a cast), and then round it in another way.
    drawn, stored = layout.draw_specs(), layout.storage_specs()
    draw = jit(partial(model.initial_parameters, config.model), out_shardings=shardings(mesh, drawn))
    store = jit(on_mesh(partial(stored_parameters, config, layout), in_specs=(drawn,), out_specs=stored))
    assemble = on_mesh(partial(initial_state, config, layout, optimizer), in_specs=(stored,), out_specs=specs)
    place = jit(assemble)

    def step(state, batch):
        return train_step(runs, layout, _platform(mesh), with_gradients, poison, state, batch)

    def evaluate(params, batch):
        return evaluate_loss(runs, layout, _platform(mesh), params, batch)

    metrics = [*METRICS, *(["loss_scale"] if specs.scale is not None else [])]
    metric_specs = dict.fromkeys(metrics, REPLICATED) | {"not_finite": live_spec((AXES,), config.parallel.mesh)}
    outputs = (specs, metric_specs) + ((layout.storage_specs(),) if with_gradients else ())
    return Program(
        config=config,
        mesh=mesh,
        layout=layout,
        specs=specs,
        shapes=jax.eval_shape(assemble, layout.abstract_storage(config.precision.master_dtype)),
        runs=runs,
        init=lambda seed: place(store(draw(np.uint32(seed)))),
        step=jit(on_mesh(step, in_specs=(specs, batch_specs), out_specs=outputs), donate_argnums=0),
        evaluate=jit(on_mesh(evaluate, in_specs=(specs.params, batch_specs), out_specs=(REPLICATED, REPLICATED))),
    )


def stored_parameters(config: RunConfig, layout: Layout, logical: dict) -> dict:
    """Local logical arrays, split as they are drawn -> at full precision in the storage layout."""
    return jax.tree.map(
        lambda leaf, x: to_storage(leaf, x).astype(config.precision.master_dtype), layout.leaves, logical
    )


def initial_state(config: RunConfig, layout: Layout, optimizer: optax.GradientTransformation, stored: dict) -> State:
    """The state before the first step, on local shards."""
    params = stored if layout.params_stored else jax.tree.map(to_compute, layout.leaves, stored)
    return State(
        step=jnp.int32(0),
        params=jax.tree.map(lambda x: x.astype(config.precision.dtype), params),
        master=None if config.precision.dtype == config.precision.master_dtype else stored,
        moments=optimizer.init(stored),
        scale=initial_loss_scale(config.precision),
    )


def train_step(config, layout, platform, with_gradients, poison, state: State, batch: Batch):
    """The step on local shards: (State, Batch) -> (State, metrics[, gradients]).

    A gradient that is not finite changes nothing but the step counter (and fp16's loss scale), on every rank.
    """
    # Gradients of the mean loss: a sum over tokens, divided once by the global token count.
    num_tokens = count_targets(batch).astype(config.precision.master_dtype)
    scale = state.scale.scale if state.scale is not None else 1
    if config.parallel.overlap_layers:
        grads, loss_sum, finite_leaves = overlapped_accumulation(
            config, layout, platform, state, batch, scale / num_tokens
        )
    else:
        grads, loss_sum = accumulate_gradients(config, layout, platform, state, batch, weight=scale / num_tokens)
        if poison is not None:
            grads = poison(layout, state.step, grads)
        finite_leaves = all_finite(grads)
        grads = reduce_gradients(looked_at(grads, finite_leaves, layout), layout, config.precision.reduction_dtype)
    not_finite = flag_not_finite(all_finite(loss_sum), finite_leaves)
    grads = jax.tree.map(lambda g: g / scale, grads)
    loss = comm.all_reduce(loss_sum, LOSS_AXES) / num_tokens

    # Clip by the norm of the whole gradient. It is equal on every rank, and so is the overflow flag made from it.
    norm = global_norm(grads, layout)
    finite = jnp.isfinite(norm)
    shrink = config.optimizer.clip_norm / jnp.maximum(norm, config.optimizer.clip_norm)
    clipped = jax.tree.map(lambda g: g * shrink, grads)

    # Update the shards this rank owns, then make the parameters of the next step from them.
    lr = learning_rate(config, state.step.astype(norm.dtype))
    owned = state.master if state.master is not None else owned_shards(state.params, layout)
    updated, moments = update(config.optimizer, layout, finite, clipped, state.moments, owned, lr)
    params = jax.tree.map(lambda p: p.astype(config.precision.dtype), updated)
    new_state = State(
        step=state.step + 1,
        params=gather_parameters(params, layout) if layout.sharded and not layout.params_stored else params,
        master=None if state.master is None else updated,
        moments=moments,
        scale=None if state.scale is None else next_loss_scale(state.scale, finite, config.precision),
    )
    metrics = {"loss": loss, "grad_norm": norm, "lr": lr, "tokens": num_tokens, "not_finite": not_finite}
    if state.scale is not None:
        metrics["loss_scale"] = state.scale.scale
    return (new_state, metrics, grads) if with_gradients else (new_state, metrics)


def all_finite(tree):
    """For each leaf, whether all its local elements are finite."""
    return jax.tree.map(lambda x: jnp.isfinite(x).all(), tree)


def looked_at(grads: dict, finite: dict, layout: Layout) -> dict:
    """The gradients, to be sent once `finite` is known of each, where they are sums over micro-batches.

    Or a GPU's compiler looks at them while messages are under way, and keeps whole sums beside their shards. (Those of
    one micro-batch are cast on their way into a message; waiting would make a copy of all of them.)
    """
    parallel = layout.parallel
    return jax.tree.map(wait, grads, finite) if parallel.accumulate > 1 and parallel.mesh.num_devices > 1 else grads


def flag_not_finite(loss: jax.Array, grads: dict) -> jax.Array:
    """Which ranks made a number that is none, before sums spread it: flags[1, 1 + leaves], the loss first.

    Layout: local -> flags[ranks, 1 + leaves] over all axes of the mesh, as `jaxdist.health.culprits` reads them.
    Sends: nothing. Under ZeRO-2 and 3 backward has summed already: the flag is of the rank that owns the shard. (With
    overlap that is so outside the blocks alone.)
    Args: whether the loss, and each leaf of the gradient, is finite on this rank.
    """
    flags = [comm.varying(~finite, AXES) for finite in (loss, *jax.tree.leaves(grads))]
    return jnp.stack(flags)[None]


def accumulate_gradients(config, layout, platform, state, batch, weight) -> tuple[dict, jax.Array]:
    """Gradients of `weight` times the summed loss over this rank's rows, and the unweighted sum.

    The rows go through in `accumulate` parts, one after the other: micro-batches, or under pp passes of the pipeline.
    Parameters are cast to varying over every axis that splits the tokens once, before the loop, so no reduction is
    left inside it; the sums they owe are paid by `reduce_gradients` after it. ZeRO-2 and 3 alone reduce inside, over
    dp, because they keep no whole gradient; under pp that is so of blocks, the rest being fetched once a step.
    """
    run, split = plan_forward(config, layout, platform, training=True)
    key = dropout_key(config, state.step)
    held = cast_to_owed(state.params, layout)
    differentiated = cast_to_owed(gradient_holders(held, layout, config.precision.master_dtype), layout)
    pipelined, weights = layout.parallel.mesh.pp > 1, None
    if pipelined:
        weights = pipeline_weights(layout, split, differentiated, held)

    def micro_loss(differentiated, micro: Batch):
        noise = model.Noise(config.model.dropout, key, micro.rows)
        total = forward_loss(config, run, split(differentiated, held), micro, noise)
        return total * weight, total

    def gradients(batch):
        if pipelined:
            return pipelined_gradients(config, run, weights, batch, key, weight)
        return jax.grad(micro_loss, has_aux=True)(differentiated, batch)

    def settled(grads):
        """Gradients of what a pipeline fetched once, as the others are."""
        if not (pipelined and layout.grads_scattered):
            return grads
        leaves, (d_root, d_blocks) = split_root(layout.leaves)[0], split_root(grads)
        scatter = make_scatter(leaves, layout, config.precision.reduction_dtype, config.precision.master_dtype)
        return {**scatter(d_root), STACKED: d_blocks}

    num_micro = config.parallel.accumulate
    if num_micro == 1:
        grads, loss_sum = gradients(batch)
        return settled(jax.tree.map(lambda g: g.astype(config.precision.master_dtype), grads)), loss_sum

    def body(carry, micro):
        grads, loss_sum = gradients(micro)
        summed = jax.tree.map(lambda total, g: total + g.astype(total.dtype), carry[0], grads)
        return (summed, carry[1] + loss_sum), None

    summands = {**weights.root, STACKED: weights.blocks} if pipelined else differentiated
    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, config.precision.master_dtype), summands)
    start = (comm.varying_like(zeros, summands), comm.varying(jnp.zeros((), weight.dtype), LOSS_AXES))
    grads, loss_sum = lax.scan(body, start, cut(batch, num_micro))[0]
    return settled(grads), loss_sum


def dropout_key(config: RunConfig, step: jax.Array) -> jax.Array | None:
    """The key of one step; None where there is no dropout."""
    return random.fold_in(random.key(config.seed), step) if config.model.dropout else None


def overlapped_accumulation(config, layout, platform, state, batch, weight) -> tuple[dict, jax.Array, dict]:
    """`accumulate_gradients` and `reduce_gradients` in one, where blocks are reduced while backward runs.

    DP and ZeRO-1 sum over ranks once, in the last micro-batch's backward, what all of them gave; ZeRO-2 and 3 scatter
    over dp in each, and sum over other axes in the last. What is not a block's is reduced after backward.

    Layout: -> gradients in the storage layout, the local loss, and of each leaf whether its local gradient is finite.
    Sends: what the two send without overlap, in a layer's messages rather than a stack's; less one layer's gather under
    ZeRO-3.
    """
    precision = config.precision
    run, split = plan_forward(config, layout, platform, training=True)
    key = dropout_key(config, state.step)
    held = cast_to_owed(state.params, layout)
    holders = cast_to_owed(gradient_holders(held, layout, precision.master_dtype), layout)
    root, root_held, blocks, (blocks_held, _) = pipeline_weights(layout, split, holders, held)
    # Blocks get whole weights, and are told their layer: fetching is the loop's.
    parts = pipeline_stages(config, dataclasses.replace(run, fetch_block=fetch_whole), root_held, key)
    stages = parts._replace(layer=lambda weights, index, *args: parts.layer(weights, (None, index), *args))
    root_leaves, stacked = split_root(layout.leaves)
    block_layout = Layout(jax.tree.map(lambda leaf: leaf.layer(), stacked), layout.parallel)

    def scatter(leaves, grads):
        """What is summed in every micro-batch, with what ranks hold of it, in the dtype of the sums."""
        if layout.grads_scattered:
            return make_scatter(leaves, layout, precision.reduction_dtype, precision.master_dtype)(grads)
        return jax.tree.map(lambda g: g.astype(precision.master_dtype), grads)

    layers = blocks if blocks_held is None else blocks_held

    def one_pass(layers, micro, out, take) -> Gradients:
        gather = (lambda held: run.fetch_block((None, held))) if layout.params_stored else None
        recompute = run.remat_every == 1
        found = overlapped_gradients(
            stages, root, layers, micro, out, take=take, gather=gather, seed=weight, recompute=recompute
        )
        return found._replace(shared=scatter(root_leaves, found.shared))

    def put(out, index, row):
        return jax.tree.map(lambda rows, x: lax.dynamic_update_index_in_dim(rows, x, index, 0), out, row)

    # ---- all micro-batches but the last: sums that wait ----
    def keep(d_weights, index, sums):
        return put(sums, index, add(pick(sums, index), scatter(block_layout.leaves, d_weights)))

    def plus(before: Gradients, found: Gradients) -> Gradients:
        finite = jax.tree.map(jnp.logical_and, before.finite, found.finite)
        return Gradients(before.loss + found.loss, add(before.shared, found.shared), found.layers, finite)

    def body(carry, micro):
        return plus(carry, one_pass(layers, micro, carry.layers, keep)), None

    def zeros(leaf):
        shape = leaf.storage_local if layout.grads_scattered else leaf.compute_local
        return comm.varying(jnp.zeros(shape, precision.master_dtype), (*leaf.storage_axes, *leaf.reduce_axes))

    def true(leaf):
        return comm.varying(jnp.bool_(True), (*leaf.spec_axes, *leaf.reduce_axes))

    last, summed = batch, None
    if config.parallel.accumulate > 1:
        micros = cut(batch, config.parallel.accumulate)
        first, last = jax.tree.map(lambda x: x[:-1], micros), jax.tree.map(lambda x: x[-1], micros)
        start = Gradients(
            loss=comm.varying(jnp.zeros((), weight.dtype), LOSS_AXES),
            shared=jax.tree.map(zeros, root_leaves),
            layers=jax.tree.map(zeros, stacked),
            finite=jax.tree.map(true, stacked),
        )
        summed = lax.scan(body, start, first)[0]
        # Or a compiler begins the last one's forward beside the others, and keeps twice as much.
        layers = jax.tree.map(wait, layers, summed.layers)

    # ---- the last one: each layer's sum is final when its backward is done ----
    def settle(d_weights, index, out):
        total = scatter(block_layout.leaves, d_weights)
        total = total if summed is None else add(pick(summed.layers, index), total)
        return put(out, index, reduce_gradients(total, block_layout, precision.reduction_dtype))

    out = jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.storage_local, precision.master_dtype), leaf.storage_axes), stacked
    )
    found = one_pass(layers, last, out, settle)
    found = found if summed is None else plus(summed, found)
    root_finite, root_layout = all_finite(found.shared), Layout(root_leaves, layout.parallel)
    d_root = looked_at(found.shared, root_finite, root_layout)
    d_root = reduce_gradients(d_root, root_layout, precision.reduction_dtype)
    return {**d_root, STACKED: found.layers}, found.loss, {**root_finite, STACKED: found.finite}


class PipelineWeights(NamedTuple):
    """What the stages of a pipeline, or the layers of an overlapped backward, compute with.

    root: what is not a block's; on the stages that use it, whole. root_held: with overlap under ZeRO-3 the shards of
    it, None elsewhere. blocks, fixed: of each layer its weights, or the holders of their gradients, and what else
    belongs to it: (weights held or None, number of the layer).
    """

    root: dict
    root_held: dict | None
    blocks: dict
    fixed: tuple


def pipelined_gradients(config, run, weights: PipelineWeights, batch, key, weight) -> tuple[dict, jax.Array]:
    """What `jax.grad` gives without a pipeline, for one pass of all its micro-batches: (gradients, summed loss).

    Gradients of the root are whole, each stage's own.
    """
    how = dict(seed=weight, recompute_every=run.remat_every, dtype=config.precision.master_dtype)
    loss, d_root, d_blocks = through_stages(pipeline_gradients, config, run, weights, batch, key, **how)
    return {**d_root, STACKED: d_blocks}, loss


def through_stages(execute: Callable, config, run, weights: PipelineWeights, batch, key, **how):
    """The executor's `pipeline_gradients` or `pipeline_loss` on this model, for one pass."""
    return execute(
        pipeline_stages(config, run, weights.root_held, key),
        config.parallel.pipeline,
        weights.root,
        weights.blocks,
        cut(batch, config.parallel.num_microbatches),
        fixed=weights.fixed,
        num_layers=config.part_layers,
        **how,
    )


def pipeline_weights(layout: Layout, split, differentiated: dict, held: dict) -> PipelineWeights:
    """Fetches what is fetched once."""
    root, blocks = split(differentiated, held)
    root, root_held = root if isinstance(root, tuple) else (root, None)
    blocks, blocks_held = blocks if isinstance(blocks, tuple) else (blocks, None)
    leaf = jax.tree.leaves(split_root(layout.leaves)[1])[0]
    rows = range(leaf.shape[0]) if leaf.rows is None else leaf.rows
    layers = comm.varying(jnp.asarray(rows).reshape(layout.parallel.mesh.pp, -1), "pp")[comm.rank("pp")]
    root = gather_to_users(split_root(layout.leaves)[0], root)
    return PipelineWeights(root, root_held, blocks, (blocks_held, layers))


def pipeline_stages(config: RunConfig, run: model.Forward, root_held: dict | None, key) -> Stages:
    """The model as the pipeline's executor calls it; each micro-batch is a `Batch`."""

    def whole(weights, held):
        return weights if held is None else (weights, held)

    def noise(micro: Batch) -> model.Noise:
        return model.Noise(config.model.dropout, key, micro.rows)

    def first(root, micro):
        return model.embed(whole(root, root_held), micro.inputs, run, noise(micro).at(0))

    def layer(weights, fixed, micro, x_BTD):
        held, index = fixed
        return model.layer(config.model, whole(weights, held), x_BTD, run, noise(micro).at(1).at(index))

    def last(root, x_BTD, micro):
        return model.loss(config.model, whole(root, root_held), x_BTD, micro.targets, run)

    return Stages(first, layer, last)


def cut(batch: Batch, num_parts: int) -> Batch:
    """[B, ...] -> [num_parts, B / num_parts, ...]."""
    return jax.tree.map(lambda x: x.reshape(num_parts, -1, *x.shape[1:]), batch)


def cast_to_owed(tree: dict, layout: Layout) -> dict:
    """Cast each leaf to vary over the axes its gradient owes a sum over, so that backward leaves the sum to us."""
    return jax.tree.map(lambda leaf, x: comm.varying(x, leaf.reduce_axes), layout.leaves, tree)


def gradient_holders(params: dict, layout: Layout, dtype: str) -> dict:
    """What backward differentiates: the parameters; for ZeRO-2 and 3 zero shards that only receive gradients.

    The holders are of the masters' dtype, so a gradient summed in fp32 is not rounded to the 16 bits of its parameter.
    """
    if not layout.grads_scattered:
        return params
    return jax.tree.map(
        lambda leaf: comm.varying(jnp.zeros(leaf.storage_local, dtype), leaf.storage_axes), layout.leaves
    )


def owned_shards(params: dict, layout: Layout) -> dict:
    """The part of the parameters whose update this rank computes. Sends nothing."""
    return params if layout.params_stored else jax.tree.map(lambda leaf, p: shard(p, leaf), layout.leaves, params)


def plan_forward(config: RunConfig, layout: Layout, platform: str, training: bool):
    """The static `Forward` and split(differentiated, held) -> (root weights, block weights) for it.

    `held` are the parameters as the state has them. Under ZeRO-2 and 3 weights travel as (holders, held) until a fetch.
    """
    parallel = config.parallel
    common = dict(
        sp=parallel.sp,
        ring=parallel.ring,
        attention=choose_attention(config, platform, training),
        remat=parallel.remat,
        remat_every=parallel.remat_every,
        loss_chunks=parallel.loss_chunks,
    )
    if not layout.grads_scattered:
        return model.Forward(**common), lambda params, _: split_root(params)

    dtypes = config.precision.reduction_dtype, config.precision.master_dtype

    def fetch_of(leaves, **how):
        return make_fetch(leaves, layout, *dtypes, **how)

    root, blocks = split_root(layout.leaves)
    common["fetch_block"] = fetch_of(jax.tree.map(lambda leaf: leaf.layer(), blocks))
    if parallel.mesh.pp > 1 or not (layout.params_stored and parallel.reshard_after_forward):
        # What is not a block's is fetched once, and its gradient scattered once: nothing is dropped after forward, or
        # a pipeline's stages would fetch it for every micro-batch.
        def split(holders, held):
            (root_holders, block_holders), (root_held, block_held) = split_root(holders), split_root(held)
            return fetch_of(root)((root_holders, root_held)), (block_holders, block_held)

        return model.Forward(**common, refetch=not layout.params_stored), split

    # The table is fetched for the embedding and for the head; both gradients are scattered as one.
    def fetch_parts(names):
        def fetch(weights):
            part = fetch_of(_pick(root, names), whole_holders=True)
            return part(tuple(_pick(tree, names) for tree in weights))

        return fetch

    def split_pairs(holders, held):
        root_holders, block_holders = split_root(holders)
        pairs = ((make_whole_holders(root, layout, *dtypes)(root_holders), block_holders), split_root(held))
        return tuple(zip(*pairs, strict=True))

    fetch_embed, fetch_head = fetch_parts(model.EMBED_PARTS), fetch_parts(model.HEAD_PARTS)
    if not parallel.overlap_layers:  # overlap decides by itself what is kept
        common["fetch_block"] = model.keep_vectors(config.model, common["fetch_block"])
    return model.Forward(**common, refetch=True, fetch_embed=fetch_embed, fetch_head=fetch_head), split_pairs


def _pick(tree: dict, names: tuple[str, ...]) -> dict:
    return {name: tree[name] for name in names}


def split_root(tree: dict) -> tuple[dict, dict]:
    """A parameter-shaped tree -> (what is not a block's, the blocks)."""
    return {name: part for name, part in tree.items() if name != STACKED}, tree[STACKED]


def forward_loss(config, run: model.Forward, weights, batch: Batch, noise: model.Noise) -> jax.Array:
    """Summed cross-entropy of this rank's rows."""
    root, blocks = weights
    x_BTD = model.embed(root, batch.inputs, run, noise.at(0))
    x_BTD = model.stage(config.model, blocks, x_BTD, run, noise.at(1))
    return model.loss(config.model, root, x_BTD, batch.targets, run)


def evaluate_loss(config, layout, platform, params, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Summed loss of a batch in nats, without dropout, and the number of targets; equal on every rank."""
    run, split = plan_forward(config, layout, platform, training=False)
    holders = gradient_holders(params, layout, config.precision.master_dtype)
    if layout.parallel.mesh.pp > 1:
        weights = pipeline_weights(layout, split, holders, params)
        total = through_stages(pipeline_loss, config, run, weights, batch, None)
    else:
        total = forward_loss(config, run, split(holders, params), batch, model.Noise(0.0, None, batch.rows))
    return comm.all_reduce(total, LOSS_AXES), count_targets(batch)


def count_targets(batch: Batch) -> jax.Array:
    """Targets that count, over the whole global batch; at least 1."""
    here = jnp.sum(batch.targets >= 0)
    return jnp.maximum(comm.all_reduce(here, DATA_AXES), 1)


def choose_attention(config: RunConfig, platform: str, training: bool) -> str:
    """cuDNN's flash attention where it can run, the written-out one elsewhere.

    Raises: ConfigError where "cudnn" was asked for and cannot run.
    """
    asked, head_dim = config.parallel.attention, config.model.width // config.model.num_heads
    if asked == "xla":
        return "xla"
    obstacles = {
        f"it needs an NVIDIA GPU and this mesh is of {platform} devices": platform not in ("gpu", "abstract"),
        f"it computes in 16 bits and dtype is {config.precision.dtype}": config.precision.dtype
        not in ("bfloat16", "float16"),
        "it applies no dropout to the attention weights": training and config.model.dropout > 0,
        f"it takes head widths up to 128 in steps of 8 and here it is {head_dim}": head_dim % 8 or head_dim > 128,
    }
    in_the_way = [reason for reason, applies in obstacles.items() if applies]
    if asked == "cudnn" and in_the_way:
        raise ConfigError("--attention cudnn", in_the_way[0], "Use --attention auto")
    return "cudnn" if asked == "cudnn" or (platform == "gpu" and not in_the_way) else "xla"


def with_attention_that_compiles(config: RunConfig, mesh: Mesh | AbstractMesh) -> RunConfig:
    """The config as it can run: `auto` becomes "xla", with a warning, where cuDNN has no plan for its attention.

    Only devices of this process are asked; for others, and for an abstract mesh, nothing is known.
    """
    if config.parallel.attention != "auto" or choose_attention(config, _platform(mesh), training=False) != "cudnn":
        return config
    mine = [] if isinstance(mesh, AbstractMesh) else [d for d in mesh.devices.flat if d in jax.local_devices()]
    refusal = cudnn_refusal(config, mine[0]) if mine else None
    if refusal is None:
        return config
    warnings.warn(
        f"--attention auto writes the scores out: cuDNN's attention does not compile on {mine[0].device_kind} "
        f"({refusal}). Other versions of cuDNN may have it: pip install -e '.[cuda12]' instead of '.[cuda]'",
        stacklevel=2,
    )
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, attention="xla"))


def cudnn_refusal(config: RunConfig, device: jax.Device) -> str | None:
    """Why cuDNN's attention, forward and backward, does not compile for one head on `device`; None where it does."""
    shape = (1, config.model.seq_len, 1, config.model.width // config.model.num_heads)
    x_BTNH = jax.ShapeDtypeStruct(shape, config.precision.dtype, sharding=jax.sharding.SingleDeviceSharding(device))
    core = model.attention_core("cudnn", model.Noise(0.0, None, jnp.arange(1)))
    try:
        jax.jit(jax.grad(lambda x: core(x, x, x).astype(jnp.float32).sum())).lower(x_BTNH).compile()
    except Exception as error:  # the compiler's, the plugin's and cuDNN's own have no type in common
        return reason_of(error)
    return None


def _platform(mesh: Mesh | AbstractMesh) -> str:
    return "abstract" if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0].platform
