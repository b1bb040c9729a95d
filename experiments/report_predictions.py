"""What a run should have taken: its memory, its messages and its pipeline, from the configuration that it recorded.

Nothing runs here: memory and messages are predicted in closed form, and the same messages counted in a trace of the
step on an abstract mesh. The record is not trusted: unless told to, nothing imports a module or opens a file that it
names.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import jax

from jaxdist.config import RunConfig, from_dict
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, MeshShape, make_abstract_mesh
from jaxdist.models.base import num_parameters
from jaxdist.placement import make_layout
from jaxdist.plan.explain import NAMES_OF_TERMS
from jaxdist.plan.program_memory import PHASES, program_bytes
from jaxdist.plan.proof.trace import Collective, Transfer, ring_bytes, step_collectives, total_sent
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.plan.traffic import Message, Row, predicted, table
from jaxdist.train.program import build_program

MOST_LAYERS = 2**12  # of a model whose step is traced, and
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


class Stages(NamedTuple):
    """Messages of one kind of collective over the same axes, on each stage: how many one device sends in a step, and
    bytes."""

    counts: tuple[int, ...]
    num_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over the same axes: predicted in closed form, and counted in the trace."""

    kind: str
    axes: tuple[str, ...]
    predicted: Stages
    counted: Stages

    @property
    def equal(self) -> bool:
        """On every stage, in number and to the byte."""
        return self.predicted == self.counted


@dataclass(frozen=True)
class Predictions:
    """Predictions for one run. purposes: the predicted messages, added up. axes: bytes that a device sends over each of
    them alone, and what for."""

    config: RunConfig
    parameters: int
    memory: Memory
    sent: list[Sent]
    purposes: list[Row]
    axes: dict[str, tuple[int, list[Row]]]
    over_several: list[Row]


def config_of(record: dict, trust: bool) -> RunConfig:
    """The configuration that config.json holds. Raises: ConfigError where it cannot be used, with the reason."""
    if not record:
        raise ConfigError("the configuration", "there is none", "Look at the run's folder")
    return from_dict(record, trust)


def predictions(config: RunConfig, attention: str) -> Predictions:
    """Raises: ConfigError where the step is too large to be traced here."""
    mesh, schedule = config.parallel.mesh, config.parallel.pipeline
    cells = 0 if schedule is None else schedule.num_ticks * schedule.num_stages
    if config.model.num_layers > MOST_LAYERS or cells > MOST_CELLS:
        raise ConfigError(
            f"{config.model.num_layers:,} layers and {cells:,} ticks x stages",
            f"must be at most {MOST_LAYERS:,} and {MOST_CELLS:,} for a report to trace the step",
            "Ask experiments.plan",
        )
    with jax.enable_x64(config.precision.dtype == "float64"):
        messages = predicted(config, make_layout(config.model, config.parallel, config.part_layers))
        alone = {name: [each for each in messages if each.axes == (name,)] for name in AXES if mesh.size(name) > 1}
        return Predictions(
            config,
            num_parameters(config.model),
            predicted_memory(config, attention),
            compared(messages, counted(config), config),
            table(messages, mesh),
            {name: (total_sent(found, mesh), table(found, mesh)) for name, found in alone.items()},
            table([each for each in messages if len(each.axes) > 1], mesh),
        )


def predicted_memory(config: RunConfig, attention: str) -> Memory:
    """attention: "xla", "blocked" or "cudnn"."""
    layout = Candidates.of(config)
    found = program_bytes(config, layout, pipelines(config, layout), attention)
    terms = {name: float(getattr(found, name)[0]) for name in NAMES_OF_TERMS}
    return Memory(terms, PHASES[int(found.phase[0])], attention)


def counted(config: RunConfig) -> list[Collective]:
    """The collectives of the step, traced on an abstract mesh."""
    program = build_program(config, make_abstract_mesh(config.parallel.mesh))
    return step_collectives(program, program.step.trace(program.abstract_state(), program.abstract_batch()))


def compared(messages: Sequence[Message], collectives: Sequence[Collective], config: RunConfig) -> list[Sent]:
    """By axes and kind."""
    ours, theirs = (_by_kind(each, config.parallel.mesh) for each in (messages, collectives))
    keys = sorted({*ours, *theirs}, key=lambda key: (AXES.index(key[1][0]), key[1], key[0]))
    none = Stages(*[(0,) * config.parallel.mesh.pp] * 2)
    return [Sent(*key, ours.get(key, none), theirs.get(key, none)) for key in keys]


def _by_kind(transfers: Sequence[Transfer], mesh: MeshShape) -> dict[tuple[str, tuple[str, ...]], Stages]:
    """(kind, axes) -> what one device sends. A stage's bytes are added before they are rounded, so that sums which one
    side has in one message and the other in several are the same."""
    alike: dict[tuple, list[Transfer]] = {}
    for each in transfers:
        alike.setdefault((each.kind, tuple(axis for axis in AXES if axis in each.axes)), []).append(each)
    found = {}
    for (kind, axes), group in alike.items():
        counts = [[each.count] * mesh.pp if each.by_stage is None else each.by_stage for each in group]
        sizes = [sum(n[stage] * x.full_bytes for n, x in zip(counts, group, strict=True)) for stage in range(mesh.pp)]
        num_bytes = tuple(ring_bytes(kind, axes, size, mesh) for size in sizes)
        found[kind, axes] = Stages(tuple(map(sum, zip(*counts, strict=True))), num_bytes)
    return found
