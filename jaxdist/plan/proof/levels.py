"""Formula, trace and compiler about one layout, side by side: what is kept, what is sent, and where they differ."""

import time
from collections import defaultdict
from dataclasses import dataclass

from jaxdist.config import RunConfig
from jaxdist.mesh import AXES, MeshShape, make_abstract_mesh
from jaxdist.plan.proof.compile import CompiledStep, compile_step, emitted_bytes, without_devices
from jaxdist.plan.proof.trace import step_collectives, total_sent
from jaxdist.plan.proof.trace_memory import StepMemory, compiler_of_dtype, step_memory
from jaxdist.specs import local_bytes
from jaxdist.train.program import build_program


@dataclass(frozen=True)
class Sent:
    """Collectives of one kind over the same axes: how many a step runs, and the bytes one device sends for them.

    None where the compiler's text does not say how often a loop runs.
    """

    kind: str
    axes: tuple[str, ...]
    traced_count: int
    traced_bytes: int
    compiled_count: int | None = None
    compiled_bytes: int | None = None

    @property
    def why(self) -> str:
        """How the compiler's program differs from the trace, and what it has done."""
        if self.compiled_count is None or self.compiled_bytes is None:
            return "in loops whose length the compiler's text does not say"
        # A message's bytes are rounded down, so combining some may show a byte for each.
        if abs(self.compiled_bytes - self.traced_bytes) <= max(self.traced_count, self.compiled_count):
            if self.compiled_count == self.traced_count:
                return "equal"
            return f"equal bytes, combined: {self.traced_count} became {self.compiled_count}"
        if self.compiled_bytes < self.traced_bytes:
            return "the compiler sends less: what is gathered or summed twice, once"
        return "the compiler sends more: 16 bits widened to 32, or a sum taken apart"


@dataclass(frozen=True)
class Levels:
    """What each level says of one layout; `compiled` is None where no compiler was asked. Bytes, seconds.

    sent: by kind and axes, each on the stage that sends most of it. sent_bytes: traced, of the stage that sends most;
    compiled_sent_bytes: the same, compiled, and None where its text does not say.
    """

    state: int
    predicted: StepMemory
    sent: tuple[Sent, ...]
    sent_bytes: int
    compiled_sent_bytes: int | None
    trace_seconds: float
    compiled: CompiledStep | None

    @property
    def peak_error(self) -> float | None:
        """Predicted over compiled peak, less 1."""
        return None if self.compiled is None else self.predicted.peak / self.compiled.peak - 1


def levels(config: RunConfig, target: str | None = None, *, num_nodes: int = 1, dump: str | None = None) -> Levels:
    """Trace the step of `config` on an abstract mesh, and compile it for `target` where one is named.

    The prediction is of that target's compiler (`compiler_of`).
    Raises: ConfigError as `jaxdist.plan.proof.compile.compile_step`.
    """
    mesh = config.parallel.mesh
    without_devices(mesh.num_devices)
    compiled = None if target is None else compile_step(config, target, num_nodes=num_nodes, dump=dump)
    start = time.perf_counter()
    program = build_program(config, make_abstract_mesh(mesh))
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    predicted = step_memory(program, traced, compiler_of(target, config.precision.dtype))
    collectives = step_collectives(program, traced)
    sent, sent_bytes = compare(collectives, compiled, mesh), total_sent(collectives, mesh)
    seconds = time.perf_counter() - start
    return Levels(
        state=local_bytes(program.abstract_state()),
        predicted=predicted,
        sent=sent,
        sent_bytes=sent_bytes,
        compiled_sent_bytes=None if compiled is None else emitted_bytes(compiled.collectives, mesh),
        trace_seconds=seconds,
        compiled=compiled,
    )


def compiler_of(target: str | None, dtype: str) -> str:
    """Which of `COMPILERS` a target is predicted with; with none named, a GPU's for 16 bits and a CPU's otherwise.

    A TPU gets a GPU's: both compute in 16 bits, which a CPU widens. What its tiles pad is not in them (docs/plan.md).
    """
    if target is None:
        return compiler_of_dtype(dtype)
    return "cpu" if target == "cpu" else "gpu"


def compare(traced: list, compiled: CompiledStep | None, mesh: MeshShape) -> tuple[Sent, ...]:
    """Trace and compiled program, by kind and axes."""

    def totals(collectives) -> dict:
        found: dict = defaultdict(lambda: [0, 0])
        for c in collectives:
            entry = found[c.kind, tuple(axis for axis in AXES if axis in c.axes)]
            sent = c.sent_bytes(mesh)
            entry[0] = None if c.count is None or entry[0] is None else entry[0] + c.count
            entry[1] = None if sent is None or entry[1] is None else entry[1] + sent
        return found

    ours = totals(traced)
    theirs = None if compiled is None else totals(compiled.collectives)
    rows = []
    for key in sorted({*ours, *(theirs or ())}, key=lambda key: (key[1], key[0])):
        numbers = (None, None) if theirs is None else theirs[key]
        rows.append(Sent(*key, *ours[key], *numbers))
    return tuple(rows)
