"""What a run should have taken: its memory and its messages, in closed form from the configuration that it recorded.

Nothing runs here. The record is not trusted: unless told to, nothing imports a module or opens a file that it names.
"""

from dataclasses import dataclass

import jax

from jaxdist.config import RunConfig, from_dict
from jaxdist.errors import ConfigError
from jaxdist.models.declared import num_parameters
from jaxdist.placement import make_layout
from jaxdist.plan.explain import NAMES_OF_TERMS
from jaxdist.plan.program_memory import PHASES, program_bytes
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.plan.traffic import Row, predicted, table

MOST_LAYERS = 2**12  # of a model, and
MOST_CELLS = 2**14  # of its schedule: larger ones take minutes


@dataclass(frozen=True)
class Memory:
    """Bytes of one device by the plan's formula, for one way to compute attention. terms: by `NAMES_OF_TERMS`."""

    terms: dict[str, float]
    fullest: str
    attention: str

    @property
    def total(self) -> float:
        return sum(self.terms.values())


@dataclass(frozen=True)
class Predictions:
    """Predictions for one run. sent: its messages, added up by purpose."""

    config: RunConfig
    parameters: int
    memory: Memory
    sent: list[Row]


def config_of(record: dict, trust: bool) -> RunConfig:
    """The configuration that config.json holds. Raises: ConfigError where it cannot be used, with the reason."""
    if not record:
        raise ConfigError("the configuration", "there is none", "Look at the run's folder")
    return from_dict(record, trust)


def predictions(config: RunConfig, attention: str) -> Predictions:
    """attention: "xla", "blocked" or "cudnn". Raises: ConfigError where the step is too large."""
    schedule = config.parallel.pipeline
    cells = 0 if schedule is None else schedule.num_ticks * schedule.num_stages
    if config.model.num_layers > MOST_LAYERS or cells > MOST_CELLS:
        raise ConfigError(
            f"{config.model.num_layers:,} layers and {cells:,} ticks x stages",
            f"must be at most {MOST_LAYERS:,} and {MOST_CELLS:,} for a report",
            "Ask experiments.plan",
        )
    with jax.enable_x64(config.precision.dtype == "float64"):
        messages = predicted(config, make_layout(config.model, config.parallel, config.part_layers))
        memory = predicted_memory(config, attention)
        return Predictions(config, num_parameters(config.model), memory, table(messages, config.parallel.mesh))


def predicted_memory(config: RunConfig, attention: str) -> Memory:
    layout = Candidates.of(config)
    found = program_bytes(config, layout, pipelines(config, layout), attention)
    terms = {name: float(getattr(found, name)[0]) for name in NAMES_OF_TERMS}
    return Memory(terms, PHASES[int(found.phase[0])], attention)
