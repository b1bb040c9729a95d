"""Pipeline schedules as data: a table of ticks x stages that says which action a stage runs at which tick.

No JAX here. `builders` makes schedules, `simulate` checks and measures them, `text` draws and reads them, and
`executor` runs any table that passes the check.

The model is cut into S*v *parts* in model order: S stages hold v chunks of layers each. An action F (forward), B (input
gradient) or W (weight gradient) of one micro-batch and one chunk takes one tick. A later action of the same stage can
use its result from the next tick on, another stage `send_latency` ticks later:

    F of part p needs F of part p-1 of the same micro-batch
    B of part p needs its own F, and B of part p+1 (with `fused_backward`: W of part p+1)
    W of part p needs its own B (with `fused_backward`: at the very next tick)

With `recompute` F keeps its input alone, and an action R (recompute) runs it again:

    R of part p needs its own F, and B of part p needs its own R
"""

import math
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import NamedTuple

from jaxdist.errors import ConfigError


class Phase(IntEnum):
    """The actions of a schedule; R where it recomputes."""

    F = 1
    """Forward."""
    B = 2
    """Backward: the input gradient."""
    W = 3
    """Backward: the weight gradient."""
    R = 4
    """Forward again, for what F did not keep."""


class Action(NamedTuple):
    """One tick of work: a phase of one chunk for one micro-batch."""

    phase: Phase
    microbatch: int
    chunk: int

    def __str__(self) -> str:
        return f"{self.phase.name} of micro-batch {self.microbatch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """Who does what when; `jaxdist.parallel.pipeline.simulate.validate` checks it.

    placement: which part of the model chunk c of stage s is. "loop": c*S + s. "v" (two chunks): chunk 0 goes down the
        stages and chunk 1 comes back up (s, then 2S-1-s), so stage 0 holds both the first and the last part.
    table[tick][stage]: an action, or None where the stage idles.
    fused_backward: the backward of a textbook schedule is one operation: W follows its B immediately, and the stage
        upstream waits for both.
    send_latency: ticks after which another stage can use a result: 1 if messages are sent between two ticks, 2 if they
        are sent during a tick, while stages compute.
    recompute: each chunk's forward runs again, in an R of its own.
    """

    name: str
    num_stages: int
    num_microbatches: int
    num_chunks: int
    placement: str
    table: tuple[tuple[Action | None, ...], ...] = ()
    fused_backward: bool = False
    send_latency: int = 1
    recompute: bool = False

    def __post_init__(self):
        object.__setattr__(self, "table", tuple(map(tuple, self.table)))  # rows may be lists

    @property
    def phases(self) -> tuple[Phase, ...]:
        """Phases that every micro-batch and part has one action of."""
        return tuple(phase for phase in Phase if phase != Phase.R or self.recompute)

    @property
    def num_ticks(self) -> int:
        return len(self.table)

    @property
    def num_parts(self) -> int:
        return self.num_stages * self.num_chunks

    def part(self, stage: int, chunk: int) -> int:
        """The part of the model, in model order, that a chunk of a stage is."""
        if self.placement == "v" and chunk == 1:
            return 2 * self.num_stages - 1 - stage
        return chunk * self.num_stages + stage

    def place(self, part: int) -> tuple[int, int]:
        """(stage, chunk) that holds a part: the inverse of `part`."""
        chunk, stage = divmod(part, self.num_stages)
        return (self.num_stages - 1 - stage if self.placement == "v" and chunk == 1 else stage), chunk

    def inputs(self, stage: int, action: Action) -> list[tuple[int, Action]]:
        """What an action waits for: (stage, action) pairs."""
        phase, microbatch, chunk = action
        part = self.part(stage, chunk)
        inputs = []
        if phase == Phase.F and part > 0:
            source, source_chunk = self.place(part - 1)
            inputs.append((source, Action(Phase.F, microbatch, source_chunk)))
        if phase == Phase.B:
            inputs.append((stage, Action(Phase.R if self.recompute else Phase.F, microbatch, chunk)))
            if part < self.num_parts - 1:
                source, source_chunk = self.place(part + 1)
                inputs.append((source, Action(Phase.W if self.fused_backward else Phase.B, microbatch, source_chunk)))
        if phase == Phase.W:
            inputs.append((stage, Action(Phase.B, microbatch, chunk)))
        if phase == Phase.R:
            inputs.append((stage, Action(Phase.F, microbatch, chunk)))
        return inputs

    def earliest(self, stage: int, source: int, needed: Action, tick: float) -> float:
        """The first tick at which `stage` can use what `source` did at `tick`."""
        if source == stage:
            return tick + 1
        # A fused backward sends the result of its B, a tick before its W.
        return tick + max(1, self.send_latency - (needed.phase == Phase.W))

    def __str__(self) -> str:
        return f"schedule {self.name!r} ({self.num_stages} stages, {self.num_microbatches} micro-batches)"


@cache
def divide_layers(num_layers: int, num_parts: int, first: float = 0.0, last: float = 0.0) -> tuple[int, ...]:
    """Layers of every part in model order, with the least cost of the part that costs most.

    The first part also costs `first` layers (embedding) and the last also `last` (head and loss). Every part has a
    layer; of parts that cost the same, those in the middle have more.

    Raises: ConfigError for fewer layers than parts, and for extra costs that are negative or not finite.
    """
    asked = f"{num_layers} layers over {num_parts} parts"
    if num_parts < 1 or num_layers < num_parts:
        raise ConfigError(
            asked, "there must be a part, and every part must hold a layer", f"Use 1 to {max(num_layers, 1)} parts"
        )
    if not all(math.isfinite(extra) and extra >= 0 for extra in (first, last)):
        raise ConfigError(
            f"{asked}, first +{first}, last +{last}", "extra costs must be finite, not below 0", "Use 0 or more"
        )
    cost = [1.0] * num_parts
    cost[0] += first
    cost[-1] += last
    layers = [1] * num_parts
    for _ in range(num_layers - num_parts):
        # One layer at a time to the cheapest part never makes the dearest part dearer than it must be.
        part = min(range(num_parts), key=lambda p: (cost[p], -min(p, num_parts - 1 - p), -p))
        layers[part] += 1
        cost[part] += 1
    return tuple(layers)


def with_last(num_layers: int, num_parts: int, last: int) -> tuple[int, ...]:
    """Layers of every part in model order: so many in the last, the others evenly; 0 for all evenly.

    Raises: ConfigError as `divide_layers`, of the others.
    """
    if not last:
        return divide_layers(num_layers, num_parts)
    return (*divide_layers(num_layers - last, num_parts - 1), last)
