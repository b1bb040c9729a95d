"""What a step sends: by the closed form and by its trace."""

from collections import Counter

import jax

from jaxdist.config import RunConfig
from jaxdist.layout import Layout
from jaxdist.mesh import MeshShape, make_abstract_mesh
from jaxdist.placement import make_layout
from jaxdist.plan.proof.trace import Collective, step_collectives
from jaxdist.plan.traffic import Message, predicted
from jaxdist.train.program import build_program


def layout_of(config: RunConfig) -> Layout:
    return make_layout(config.model, config.parallel, config.part_layers)


def traced(config: RunConfig) -> list[Collective]:
    with jax.enable_x64(config.precision.dtype == "float64"):
        program = build_program(config, make_abstract_mesh(config.parallel.mesh))
        return step_collectives(program, program.step.trace(program.abstract_state(), program.abstract_batch()))


def by_size(messages: list[Message] | list[Collective], mesh: MeshShape) -> Counter:
    """(kind, axes, bytes of the full buffer, stage) -> how many a step sends. Grouping is in it, purposes are not."""
    found = Counter()
    for message in messages:
        for stage, count in enumerate(message.by_stage or (message.count,) * mesh.pp):
            found[message.kind, message.axes, message.full_bytes, stage] += count
    return found


def assert_equals_trace(config: RunConfig) -> None:
    messages, collectives = predicted(config, layout_of(config)), traced(config)
    form, program = (by_size(each, config.parallel.mesh) for each in (messages, collectives))
    assert form == program, f"the form has {form - program} too many, the program {program - form}"
