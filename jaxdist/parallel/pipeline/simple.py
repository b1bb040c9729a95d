"""The simplest use of the executor: any stage function and any loss, for a model of one's own."""

from collections.abc import Callable

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline.executor import Stages, pipeline_gradients
from jaxdist.parallel.pipeline.schedules import Schedule


def pipeline(stage_fn: Callable, loss_fn: Callable, schedule: Schedule, axis: str = "pp") -> Callable:
    """A pipeline of any `stage_fn(params, x) -> x`, for the body of a `jax.shard_map`.

    Returns gradients(params, inputs, targets) -> (loss, d_params), of the sum over micro-batches of
    `loss_fn(y, target)`.

    Layout: params[(C L)_axis, ...]: a row for each layer (or whole chunk, with L = 1) that this stage holds, to which
    `stage_fn` is applied in turn; inputs[M, ...], targets[M, ...] equal on all stages -> loss, equal on all stages;
    d_params[(C L)_axis, ...].
    """
    stages = Stages(
        first=lambda _, micro: micro[0],
        layer=lambda params, fixed, micro, x: stage_fn(params, x),
        last=lambda _, y, micro: loss_fn(y, micro[1]),
    )

    def gradients(params, inputs, targets):
        loss, _, d_params = pipeline_gradients(stages, schedule, (), params, (inputs, targets), axis=axis)
        return comm.all_reduce(loss, axis), d_params

    return gradients
