"""What a program sends, read from the program itself: walk its jaxpr, multiply by loop counts.

Works on any mesh, abstract ones too, so no device is needed. Bytes are those one device sends in a ring (the
convention of `jaxdist.parallel.collectives`); a size-1 axis sends nothing. Every branch of a `cond` is counted as if it
ran, and a permute as if every rank sent. The loops and messages of the pipeline executor, which runs as its table says,
are counted as `jaxdist.parallel.pipeline.iterations` says.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from jaxdist.compat import inner_programs
from jaxdist.mesh import MeshShape

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


@dataclass(frozen=True)
class Collective:
    """One collective of the program text.

    axes: mesh axes. count: how often a step runs it. depth: how many loops surround it. num_operands: arrays it moves.
    full_bytes: bytes of the whole (gathered, or summed) buffer, once.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    depth: int
    num_operands: int
    full_bytes: int

    def sent_bytes(self, mesh: MeshShape) -> int:
        """Bytes one device sends in a step."""
        return ring_bytes(self.kind, self.axes, self.count * self.full_bytes, mesh)


def ring_bytes(kind: str, axes: Iterable[str], num_bytes: int, mesh: MeshShape) -> int:
    """Bytes one device sends in a ring where the full buffers are of `num_bytes` together."""
    n = math.prod(getattr(mesh, axis) for axis in axes)
    factor = {"all_reduce": 2 * (n - 1), "permute": n if n > 1 else 0}.get(kind, n - 1)
    return factor * num_bytes // n


def collectives_of(jaxpr, mesh: MeshShape, iterations: Mapping[str, Fraction] | None = None) -> list[Collective]:
    """Every collective of a (closed) jaxpr over a live axis, in program order.

    iterations: by the name of a jitted function, how often it (or, where it is one `while` loop, the loop) runs in
    each iteration of the scan around it.
    Raises: ValueError for another `while` loop around a collective, whose count the program does not state.
    """
    found = []
    for eqn, count, depth in equations(jaxpr, iterations):
        kind = KINDS.get(eqn.primitive.name)
        if kind is None:
            continue
        axes = eqn.params.get("axes", eqn.params.get("axis_name", ()))
        axes = tuple(a for a in ((axes,) if isinstance(axes, str) else axes) if isinstance(a, str))
        live = tuple(axis for axis in axes if getattr(mesh, axis) > 1)
        if live:
            if count is None:
                raise ValueError(f"{kind} over {live} inside a while loop: its count is unknown. Use lax.scan.")
            operands = eqn.outvars if kind == "all_gather" else eqn.invars
            full = sum(_bytes(v.aval) for v in operands)
            assert count == int(count), f"{kind} over {live} runs {count} times: `iterations` are of another program"
            found.append(Collective(kind, live, int(count), depth, len(eqn.invars), full))
    return found


def total_sent(collectives: list[Collective], mesh: MeshShape) -> int:
    """Bytes one device sends in a step."""
    return sum(c.sent_bytes(mesh) for c in collectives)


def summary(collectives: list[Collective]) -> Counter:
    """(kind, axes, depth) -> how many stand in the program text."""
    return Counter((c.kind, c.axes, c.depth) for c in collectives)


def equations(jaxpr, iterations: Mapping[str, Fraction] | None = None) -> Iterator[tuple]:
    """Every equation of a jaxpr and of those inside it, with how often it runs (None: unknown) and its loop depth.

    `iterations`: see `collectives_of`.
    """

    def walk(jaxpr, count, depth, scanned, loop) -> Iterator[tuple]:
        """`scanned`: how often the innermost scan's body runs. `loop`: how often the next `while` body runs."""
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            yield eqn, count, depth
            name, inner = eqn.primitive.name, (count, depth, scanned, loop)
            if name == "scan":
                times = _times(count, eqn.params["length"])
                inner = (times, depth + 1, times, None)
            elif name == "while":
                inner = (loop, depth + 1, scanned, None)
            elif iterations and eqn.params.get("name") in iterations:
                times = _times(scanned, iterations[eqn.params["name"]])
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


def _times(count: Fraction | None, length: Fraction) -> Fraction | None:
    return None if count is None else count * length


def _bytes(aval) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
