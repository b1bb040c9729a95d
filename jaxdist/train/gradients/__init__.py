"""Three engines behind one signature: the loop over layers, the same with overlapped communication, the pipeline."""

from jaxdist.strategy import ParallelConfig
from jaxdist.train.gradients import overlapped, pipelined, plain
from jaxdist.train.gradients.base import Engine


def engine_of(parallel: ParallelConfig) -> Engine:
    """The engine that makes a strategy's gradients."""
    if parallel.mesh.pp > 1:
        return Engine(pipelined.gradients, pipelined.evaluate)
    return Engine(overlapped.gradients if parallel.overlap else plain.gradients, plain.evaluate)
