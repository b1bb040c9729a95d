"""What a program sends, read from the program itself: walk its jaxpr, multiply by loop counts.

Works on any mesh, abstract ones too, so no device is needed. Bytes are those one device sends in a ring (the
convention of `jaxdist.parallel.collectives`); a size-1 axis sends nothing. Every branch of a `cond` is counted as if it
ran, and a permute as if every rank sent.
"""

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import jax.extend
import numpy as np

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
        n = math.prod(getattr(mesh, axis) for axis in self.axes)
        if n == 1:
            return 0
        factor = {"all_reduce": 2 * (n - 1), "permute": n}.get(self.kind, n - 1)
        return self.count * factor * self.full_bytes // n


def collectives_of(jaxpr, mesh: MeshShape) -> list[Collective]:
    """Every collective of a (closed) jaxpr over a live axis, in program order.

    Raises: ValueError for a `while` loop around a collective, whose count the program does not state.
    """
    found = []
    for eqn, count, depth in equations(jaxpr):
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
            found.append(Collective(kind, live, count, depth, len(eqn.invars), full))
    return found


def total_sent(collectives: list[Collective], mesh: MeshShape) -> int:
    """Bytes one device sends in a step."""
    return sum(c.sent_bytes(mesh) for c in collectives)


def summary(collectives: list[Collective]) -> Counter:
    """(kind, axes, depth) -> how many stand in the program text."""
    return Counter((c.kind, c.axes, c.depth) for c in collectives)


def equations(jaxpr, count: int | None = 1, depth: int = 0) -> Iterator[tuple]:
    """Every equation of a jaxpr and of those inside it, with how often it runs (None: unknown) and its loop depth."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    for eqn in jaxpr.eqns:
        yield eqn, count, depth
        name = eqn.primitive.name
        if name == "scan":
            yield from equations(eqn.params["jaxpr"], _times(count, eqn.params["length"]), depth + 1)
        else:
            inner = None if name == "while" else count
            for value in eqn.params.values():
                for sub in value if isinstance(value, tuple | list) else (value,):
                    if isinstance(sub, jax.extend.core.Jaxpr | jax.extend.core.ClosedJaxpr):
                        yield from equations(sub, inner, depth + (name == "while"))


def _times(count: int | None, length: int) -> int | None:
    return None if count is None else count * length


def _bytes(aval) -> int:
    return math.prod(aval.shape) * np.dtype(aval.dtype).itemsize
