"""A model bound to a run: every setting that a step reads, as a plain value, before anything is traced."""

from jaxdist.config import RunConfig
from jaxdist.layout import Layout
from jaxdist.models.context import Context
from jaxdist.parallel.named_arrays import read_arrays
from jaxdist.parallel.pipeline.lowering import lower
from jaxdist.parallel.zero import Sharded
from jaxdist.probes import Probe, Recorder
from jaxdist.train.gradients.base import Replicated, ShardedModel


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
