"""What several labs need of the library: small runs, what the plan says of them, and what a compiler says."""

import tempfile
from functools import cache
from pathlib import Path

from jaxdist.config import RunConfig
from jaxdist.models.base import Model
from jaxdist.models.presets import PRESETS
from jaxdist.plan.program_memory import TERMS
from jaxdist.plan.proof.levels import Levels, levels
from jaxdist.verification import proof_config

from ..bench.timing import planned_memory


def small_run(mesh: str = "", model: Model = PRESETS["proof"], batch_size: int = 8, **settings) -> RunConfig:
    """A small run; settings as for `jaxdist.verify` (dtype, optimizer, and those of `ParallelConfig`)."""
    return proof_config(model, mesh, batch_size, **settings)


def planned_bytes(config: RunConfig) -> dict[str, float]:
    """Bytes of one device by term, as the search counts them."""
    found = planned_memory(config)
    return {term: float(getattr(found, term)[0]) for term in TERMS}


@cache
def compiled_levels(config: RunConfig) -> Levels:
    """Predicted and compiled for simulated CPUs, once for a lab and its breaks. Not while the library is patched."""
    return levels(config, "cpu")


@cache
def _scratch() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="jaxdist-lab-")


def new_folder() -> Path:
    """An empty folder, gone when the process ends."""
    return Path(tempfile.mkdtemp(dir=_scratch().name))
