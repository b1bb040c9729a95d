"""The last level: one step run on simulated devices, and how often each ran each instruction, by XLA's profile."""

import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.config import RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.plan.proof.compile import CompiledStep, Emitted, stages_of, target_devices
from jaxdist.train.program import build_program


@dataclass(frozen=True)
class Miscounted:
    """A collective that a device of `stage` ran `executed` times in a step, where `counted` were read in the text."""

    collective: Emitted
    stage: int
    counted: int | None
    executed: int


def executed_step(config: RunConfig, compiled: CompiledStep) -> Counter:
    """(instruction, device) -> how often it ran in one step of a compiled program.

    Raises: ConfigError where it was not compiled for simulated CPU devices.
    """
    if compiled.target != "cpu":
        raise ConfigError(f"a step compiled for {compiled.target}", "there is no such device to run it on", "Use cpu")
    mesh = make_mesh(config.parallel.mesh, target_devices("cpu", config.parallel.mesh.num_devices))
    program = build_program(config, mesh)
    batch = program.put(random_batches(config, 1)[0])
    # The first run of a program holds work that no other does.
    state, _ = jax.block_until_ready(compiled.executable(program.init(config.seed), batch))
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(compiled.executable(state, batch))
        (path,) = Path(folder).rglob("*.xplane.pb")
        profile = jax.profiler.ProfileData.from_file(str(path))
    return Counter((event.name, event.device) for line in lines(profile) for event in line)


def miscounted(compiled: CompiledStep, executed: Counter, mesh: MeshShape) -> list[Miscounted]:
    """The collectives that some device did not run as often as `compiled` counts them for its stage.

    A permute between stages runs on every device of the axis, on those as well that send nothing in it.
    """
    stages, found = stages_of(range(mesh.num_devices), mesh).tolist(), []
    for each in compiled.collectives:
        for device, stage in enumerate(stages):
            by_stage = None if each.kind == "permute" and "pp" in each.axes else each.by_stage
            counted = each.count if by_stage is None else by_stage[stage]
            if executed[each.name, device] != counted:
                found.append(Miscounted(each, stage, counted, executed[each.name, device]))
    return found


@dataclass(frozen=True)
class Event:
    """One execution of an instruction of a compiled program. Times in nanoseconds."""

    name: str
    device: int | None
    start: float
    end: float


def lines(profile) -> Iterator[list[Event]]:
    """What each thread, or stream, of a `jax.profiler.ProfileData` ran."""
    with warnings.catch_warnings():  # jaxlib makes a type as Python 3.12 no longer likes it, at the first look
        warnings.filterwarnings("ignore", "builtin type event_stats has no __module__", DeprecationWarning)
        for plane in profile.planes:
            for line in plane.lines:
                yield list(_events(line))


def _events(line) -> Iterator[Event]:
    for event in line.events:
        facts = dict(event.stats)
        if name := facts.get("hlo_op"):
            yield Event(name, facts.get("device_ordinal"), event.start_ns, event.start_ns + event.duration_ns)
