"""Explicit-collective parallelism for any model inside `jax.shard_map(..., check_vma=True)`.

`collectives`, `exchange`: typed wrappers that drop size-1 axes and refuse a second reduction. `algorithms`: ring, tree
and halving-doubling written by hand from `ppermute`. `tensor`: the two places a block meets tensor parallelism.
`vocabulary`, `chunked_loss`: embedding and loss. `rings`: matmuls overlapped with their gather or scatter over tp.
`context_parallel`, `blocked_attention`: attention over a sequence that is split, or too long for its scores.
`zero`, `reduce`: the gradient rule over a `jaxdist.layout.Layout`. `muon`: its update of shards.
`pipeline`: schedules as tables (no JAX), and the executor that runs any of them.

Names are imported when first used, so that `jaxdist.parallel.pipeline.schedules` needs no JAX.
"""

from importlib import import_module

EXPORTS = {
    "collectives": (
        "all_gather",
        "all_reduce",
        "all_reduce_max",
        "permute",
        "rank",
        "reduce_scatter",
        "size",
        "varying",
    ),
    "chunked_loss": ("cross_entropy_in_chunks",),
    "context_parallel": ("context_attention",),
    "exchange": ("all_to_all", "broadcast", "swap"),
    "muon": ("orthogonalize", "scale_by_muon"),
    "pipeline.builders": ("make_schedule",),
    "pipeline.executor": ("Stages", "pipeline_gradients", "pipeline_loss"),
    "reduce": ("reduce_gradients",),
    "spread": ("gather_to", "scatter_from"),
    "rings": ("gather_matmul", "matmul_scatter"),
    "pipeline.schedules": ("Action", "Phase", "Schedule"),
    "tensor": ("enter", "leave"),
    "vocabulary": ("vocab_parallel_cross_entropy", "vocab_parallel_embedding"),
}
MODULES = (
    "algorithms",
    "blocked_attention",
    "chunked_loss",
    "collectives",
    "context_parallel",
    "dropout",
    "exchange",
    "muon",
    "overlap",
    "pipeline",
    "reduce",
    "rings",
    "spread",
    "tensor",
    "vocabulary",
    "zero",
)
_HOME = {name: module for module, names in EXPORTS.items() for name in names}
__all__ = sorted([*MODULES, *_HOME])


def __getattr__(name: str):
    if name in MODULES:
        return import_module(f"{__name__}.{name}")
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
