"""A model bound to a run: every setting that a step reads, as a plain value, before anything is traced."""

from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import random

from jaxdist.config import RunConfig
from jaxdist.layout import Layout, split_outer
from jaxdist.mesh import make_abstract_mesh
from jaxdist.models.context import Batch, Context
from jaxdist.models.results import of_adapters, require_results, require_values
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.named_arrays import read_arrays
from jaxdist.parallel.pipeline.lowering import lower
from jaxdist.parallel.zero import Sharded
from jaxdist.placement import spec_of
from jaxdist.probes import Probe, Recorder
from jaxdist.specs import rows_spec
from jaxdist.train.gradients.base import Replicated, ShardedModel, join


def bind_model(
    config: RunConfig,
    layout: Layout,
    attention: str,
    platform: str = "abstract",
    recorder: Recorder | None = None,
    draws_choices: bool = False,
) -> ShardedModel:
    """The run's model on its layout. attention: the one that runs. recorder, draws_choices: as in `build_program`."""
    parallel, precision = config.parallel, config.precision
    schedule = parallel.pipeline
    if schedule is not None:
        lower(schedule)  # checked and kept now; a trace finds it
    reduce_dtype, sum_dtype = precision.reduction_dtype, precision.master_dtype
    regathers, params = False, Replicated(layout, sum_dtype)
    if layout.grads_sharded:
        twice = layout.params_sharded and parallel.reshard_after_forward and parallel.mesh.pp == 1
        regathers = twice or not layout.params_sharded
        keeps_vectors = twice and not parallel.overlap_layers
        params = Sharded(layout, layout.layer_leaves, reduce_dtype, sum_dtype, twice, keeps_vectors)
    return ShardedModel(
        config=config,
        layout=layout,
        ctx=Context(
            sp=parallel.sp,
            ring=parallel.ring,
            split=parallel.split,
            expert_axes=parallel.expert_axes,
            attention=attention,
            selective=parallel.remat == "selective",
            loss_chunks=parallel.loss_chunks,
            on_gpu=platform == "gpu",
            probe=None if recorder is None else Probe(recorder),
            draws_choices=draws_choices,
        ),
        params=params,
        reduce_dtype=reduce_dtype,
        sum_dtype=sum_dtype,
        remat_every=parallel.remat_every,
        repeated=read_arrays(parallel.remat, config.rows),
        regathers=regathers,
        unrolls=parallel.unrolls(platform, config.model.num_layers),
        schedule=schedule,
        part_layers=config.part_layers,
    )


def require_sound(bound: ShardedModel) -> None:
    """Trace each of the model's functions once as a rank of the mesh calls it, whichever engine will, and its initial
    values; not of the library's own models.

    Raises: ConfigError for a result that is not what `Model` says, or values that are not what it declares.
    """
    config, mesh = bound.config, bound.layout.mesh
    model, dtype = config.model, config.precision.dtype
    if type(of_adapters(model)).__module__.startswith("jaxdist."):
        return
    require_values(model, jax.tree.leaves(bound.layout.leaves))
    leaves = join(split_outer(bound.layout.leaves)[0], bound.layout.layer_leaves)
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), leaves)
    specs = jax.tree.map(lambda leaf: spec_of(leaf.param, config.parallel), leaves)
    tokens = jax.ShapeDtypeStruct((config.batch_size, model.seq_len), jnp.int32)
    numbers = jax.ShapeDtypeStruct((config.batch_size,), jnp.int32)

    def body(params, batch):
        batch = bound.own_tokens(batch)
        weighted = replace(bound.ctx, weight=jnp.ones((), bound.sum_dtype), probe=None)
        ctx = replace(bound, ctx=weighted).context(random.key(0) if model.dropout else None, batch)
        params = jax.tree.map(lambda leaf, x: comm.varying(x, leaf.reduce_axes), leaves, params)
        require_results(model, ctx.at, *split_outer(params), batch)

    run = jax.shard_map(body, mesh=make_abstract_mesh(mesh), in_specs=(specs, rows_spec(mesh)), out_specs=None)
    jax.eval_shape(run, params, Batch(tokens, tokens, numbers, tokens if config.mask_documents else None))
