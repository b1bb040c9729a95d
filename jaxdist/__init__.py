"""Prove a distributed training run on a laptop, then run it unchanged on a cluster.

The programs are described by `jaxdist --help`. One step of training from Python:

    config = RunConfig(PRESETS["tiny"], ParallelConfig(mesh=parse_mesh("dp=2,tp=2"), zero=1))
    devices = acquire_devices(config.parallel.mesh.num_devices).devices
    program = build_program(config, make_mesh(config.parallel.mesh, devices))
    batches = Batches(load_corpus(None, config.model.vocab_size), config.batch_size, config.model.seq_len, config.seed)
    state, metrics = program.step(program.init(config.seed), program.put(batches[0]))

Names are imported when first used: `import jaxdist` neither imports JAX nor starts a backend.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from jaxdist.versions import __version__

if TYPE_CHECKING:
    from jaxdist.checkpoint.checkpoints import Checkpoints
    from jaxdist.config import OptimizerConfig, RunConfig
    from jaxdist.data.batches import Batches, load_corpus
    from jaxdist.errors import ConfigError
    from jaxdist.mesh import make_mesh, parse_mesh
    from jaxdist.models.base import Model
    from jaxdist.models.context import Context
    from jaxdist.models.declared import decay_mask
    from jaxdist.models.gpt2 import GPT2, GPT2Config
    from jaxdist.models.presets import PRESETS
    from jaxdist.params import Param
    from jaxdist.runtime.devices import acquire_devices
    from jaxdist.strategy import ParallelConfig, PrecisionConfig
    from jaxdist.train.program import Program, build_program
    from jaxdist.train.update import clip_by_global_norm
    from jaxdist.train.whole_parameters import with_whole_parameters
    from jaxdist.verification import verify

__all__ = [
    "GPT2",
    "PRESETS",
    "Batches",
    "Checkpoints",
    "ConfigError",
    "Context",
    "GPT2Config",
    "Model",
    "OptimizerConfig",
    "ParallelConfig",
    "Param",
    "PrecisionConfig",
    "Program",
    "RunConfig",
    "__version__",
    "acquire_devices",
    "build_program",
    "clip_by_global_norm",
    "decay_mask",
    "load_corpus",
    "make_mesh",
    "parse_mesh",
    "verify",
    "with_whole_parameters",
]
_HOMES = {
    "checkpoint.checkpoints": ("Checkpoints",),
    "config": ("OptimizerConfig", "RunConfig"),
    "data.batches": ("Batches", "load_corpus"),
    "errors": ("ConfigError",),
    "mesh": ("make_mesh", "parse_mesh"),
    "models.base": ("Model",),
    "models.context": ("Context",),
    "models.declared": ("decay_mask",),
    "models.gpt2": ("GPT2", "GPT2Config"),
    "models.presets": ("PRESETS",),
    "params": ("Param",),
    "runtime.devices": ("acquire_devices",),
    "strategy": ("ParallelConfig", "PrecisionConfig"),
    "train.program": ("Program", "build_program"),
    "train.update": ("clip_by_global_norm",),
    "train.whole_parameters": ("with_whole_parameters",),
    "verification": ("verify",),
}


def __getattr__(name: str):
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
