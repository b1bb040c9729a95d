"""What a program sends, read from the program itself: walk its jaxpr, multiply by loop counts.

Works on any mesh, abstract ones too, so no device is needed. Bytes are those one device sends in a ring (the
convention of `jaxdist.parallel.collectives`); a size-1 axis sends nothing. Every branch of a `cond` is counted as if it
ran. Stages of a pipeline do different things: the loops and messages of the executor, which runs as its table says, are
counted on each stage as `jaxdist.parallel.pipeline.lowering.iterations` says, and a permute over pp outside loops on
the stages that send in it. Any other permute is counted as if every rank sent, and a collective among some of an
axis' ranks as the permutes that it consists of.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import jax
import numpy as np

from jaxdist.mesh import MeshShape
from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.train.program import Program

Count = int | np.ndarray  # one for all stages, or of each
Iterations = Mapping[str, Sequence[Fraction]]

KINDS = {
    "psum": "all_reduce",
    "psum_invariant": "all_reduce",
    "pmax": "all_reduce",
    "pmin": "all_reduce",
    "all_gather": "all_gather",
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "unreduced_reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "ragged_all_to_all": "all_to_all",
    "ppermute": "permute",
}


class Transfer:
    """A message, of any class with `kind`, `axes`, `count`, `full_bytes` and `by_stage`."""

    def sent_bytes(self, mesh: MeshShape) -> int:
        """Bytes one device sends in a step, on the stage that sends most."""
        return ring_bytes(self.kind, self.axes, self.count * self.full_bytes, mesh)

    def sent_by(self, stage: int, mesh: MeshShape) -> int:
        """The same, on one stage of a pipeline."""
        count = self.count if self.by_stage is None else self.by_stage[stage]
        return ring_bytes(self.kind, self.axes, count * self.full_bytes, mesh)


@dataclass(frozen=True)
class Collective(Transfer):
    """One collective of the program text.

    axes: mesh axes. count: how often a step runs it, on the stage that runs it most. depth: how many loops surround it.
    num_operands: arrays it moves. full_bytes: bytes of the whole (gathered, or summed) buffer, once. by_stage: the
    count on each stage, where they differ.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    depth: int
    num_operands: int
    full_bytes: int
    by_stage: tuple[int, ...] | None = None


def ring_bytes(kind: str, axes: Iterable[str], num_bytes: int, mesh: MeshShape) -> int:
    """Bytes one device sends in a ring where the full buffers are of `num_bytes` together."""
    return sent_among(math.prod(mesh.size(axis) for axis in axes), kind, num_bytes)


def sent_among(n: int, kind: str, num_bytes: int) -> int:
    """`ring_bytes` of so many ranks."""
    factor = {"all_reduce": 2 * (n - 1), "permute": n if n > 1 else 0}.get(kind, n - 1)
    return factor * num_bytes // n


def as_permutes(kind: str, axes: Iterable[str], num_bytes: int, ranks: int, mesh: MeshShape) -> tuple[str, int]:
    """(kind, bytes of the full buffer) of a collective among `ranks` ranks: of permutes, where the axes have more."""
    if kind == "permute" or ranks == math.prod(mesh.size(axis) for axis in axes):
        return kind, num_bytes
    return "permute", sent_among(ranks, kind, num_bytes)


def collectives_of(jaxpr, mesh: MeshShape, iterations: Iterations | None = None, rounds: int = 1) -> list[Collective]:
    """Every collective of a (closed) jaxpr over a live axis that runs, in program order.

    iterations: by the name of a jitted function, how often it (or, where it is one `while` loop, the loop) runs on each
    stage in each iteration of the scan around it.
    rounds: of every exchange between experts that drops nothing (`jaxdist.parallel.expert_parallel`).
    Raises: ValueError for another `while` loop around a collective, whose count the program does not state.
    """
    found = []
    for eqn, count, depth in equations(jaxpr, iterations, rounds):
        kind = KINDS.get(eqn.primitive.name)
        if kind is None or (count is not None and not np.any(count)):
            continue
        live = tuple(axis for axis in axes_of(eqn) if mesh.size(axis) > 1)
        if live:
            if count is None:
                raise ValueError(f"{kind} over {live} inside a while loop: its count is unknown. Use lax.scan.")
            operands = eqn.outvars if kind == "all_gather" else eqn.invars
            full = sum(_bytes(v.aval) for v in operands)
            if live == ("pp",) and kind == "permute" and not depth:
                senders = [source for source, _ in eqn.params["perm"]]
                count = count * np.isin(np.arange(mesh.pp), senders).astype(int)
            if groups := eqn.params.get("axis_index_groups"):
                kind, full = as_permutes(kind, live, full, len(groups[0]), mesh)
            most, by_stage = on_stages(count)
            found.append(Collective(kind, live, most, depth, len(eqn.invars), full, by_stage))
    return found


def branches_differ(jaxpr) -> bool:
    """Whether a conditional's branches send different things: then the text does not say what a step sends, unless
    `iterations` do. (A pipeline's tick sends to one of several sets of stages.)"""

    def sends(program) -> list:
        return [(e.primitive.name, str(e.params)) for e, *_ in equations(program) if e.primitive.name in KINDS]

    for eqn, *_ in equations(jaxpr):
        if eqn.primitive.name == "cond":
            first, *others = map(sends, eqn.params["branches"])
            if any(other != first for other in others):
                return True
    return False


def axes_of(eqn) -> tuple[str, ...]:
    """The mesh axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if isinstance(a, str))


def on_stages(count: int | np.ndarray) -> tuple[int, tuple[int, ...] | None]:
    """The most of a count on each stage, and the counts where they differ."""
    counts = tuple(map(int, np.atleast_1d(count)))
    assert (np.atleast_1d(count) == counts).all(), f"{count} times: `iterations` are of another program"
    return max(counts), counts if len(set(counts)) > 1 else None


def total_sent(sendings: Iterable[Transfer], mesh: MeshShape) -> int:
    """Bytes one device sends in a step, on the stage that sends most in all."""
    sendings = list(sendings)
    return max(sum(each.sent_by(stage, mesh) for each in sendings) for stage in range(mesh.pp))


def summary(collectives: list[Collective]) -> Counter:
    """(kind, axes, depth) -> how many stand in the program text."""
    return Counter((c.kind, c.axes, c.depth) for c in collectives)


def step_collectives(program: Program, traced: jax.stages.Traced, *, evaluate: bool = False) -> list[Collective]:
    """What a program's traced `step` sends, or its traced `evaluate`."""
    return collectives_of(traced.jaxpr, program.config.parallel.mesh, program.iterations(evaluate=evaluate))


def equations(jaxpr, iterations: Iterations | None = None, rounds: int = 1) -> Iterator[tuple]:
    """Every equation of a jaxpr and of those inside it, with how often it runs and its loop depth.

    How often is None where it is unknown, an array where stages differ. iterations, rounds: see `collectives_of`.
    """

    def walk(jaxpr, count, depth, scanned, loop) -> Iterator[tuple]:
        """`scanned`: how often the innermost scan's body runs. `loop`: how often the next `while` body runs."""
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn, count, depth
            name, inner = eqn.primitive.name, (count, depth, scanned, loop)
            if name == "scan":
                times = times_each(count, eqn.params["length"])
                inner = (times, depth + 1, times, None)
            elif name == "while":
                inner = (loop, depth + 1, scanned, None)
            elif eqn.params.get("name") in MORE_ROUNDS:
                times = times_each(count, rounds - 1)
                inner = (times, depth, times, times)
            elif iterations and eqn.params.get("name") in iterations:
                times = times_each(scanned, iterations[eqn.params["name"]])
                inner = (times, depth, scanned, times)
            for sub in inner_programs(eqn):
                yield from walk(sub, *inner)

    yield from walk(jaxpr, 1, 0, 1, None)


def named_bytes(jaxpr, names: Iterable[str]) -> dict[str, int]:
    """Local bytes of what the jitted functions of these names return, each where it first stands."""
    found: dict[str, int] = {}
    for eqn, *_ in equations(jaxpr):
        name = eqn.params.get("name")
        if name in names and name not in found:
            found[name] = sum(_bytes(v.aval) for v in eqn.outvars)
    return found


def times_each(count: Count | None, length: Count | Sequence[Fraction]) -> Count | None:
    """`count` times `length`, which may be of each stage; None stays None."""
    length = np.array(length, dtype=object) if isinstance(length, Sequence) else length
    return None if count is None else count * length


def _bytes(aval) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
