"""What a layer keeps for backward, array by array, and what making each of them again would take.

A layer is traced once. What backward needs is reached from what is kept, and the equations in between are what it
repeats: a walk through them tells, of any choice, its bytes and its work. That arrays may be chosen one by one, by
bytes and time, is from arXiv 1910.02653; layers are alike and keep few, so here every choice is tried.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax

from jaxdist.compat import inner_programs
from jaxdist.mesh import MeshShape
from jaxdist.models.attention import traced_attention
from jaxdist.models.base import Model
from jaxdist.parallel.pipeline.split_backward import (
    dependents,
    needed_for,
    num_bytes,
    reached,
    trace_layer,
    variables,
)
from jaxdist.parallel.remat import DRAWS, FREE, REPEAT, Made, made_by, name_array, read_arrays
from jaxdist.plan.long_blocks import found_in
from jaxdist.plan.parts import OneRank, product_dims
from jaxdist.plan.proof.trace import collectives_of
from jaxdist.plan.time_model import AttentionShape, Repeated

MOST_ARRAYS = 10  # that are chosen among, the largest
LEAST_PART = 1 / 16  # of what a layer passes on; smaller arrays are kept


class Choice(NamedTuple):
    """remat: the word of `ParallelConfig` for it. num_bytes: what a layer keeps of one sequence. uncounted: what else
    backward would do again, that `repeated` has no place for; "" for nothing."""

    remat: str
    num_bytes: float
    repeated: Repeated
    uncounted: str = ""


@cache
def choices(rank: OneRank) -> tuple[Choice, ...]:
    """Every choice of what to keep of the largest arrays, that of all of them first. rank: as `rank_of` has it.

    Left out are those where backward would send again over another axis than tp, or draw random numbers again.
    """

    def sizes(model: Model) -> tuple[dict[frozenset[Made], int], int]:
        layer = _layer(replace(rank, model=model, repeats=""))
        return layer.sizes(), layer.x_bytes

    groups = _largest(*found_in(rank.model, sizes))
    chosen = itertools.product((False, True), repeat=len(groups))
    repeated = [frozenset[Made]().union(*itertools.compress(groups, some)) for some in chosen]
    return tuple(choice for choice in _choices(rank, repeated) if not choice.uncounted)


@cache
def choice_of(rank: OneRank) -> Choice:
    """The choice that `rank.repeats` names."""
    return _choices(rank, [read_arrays(rank.repeats, rank.rows)])[0]


def _choices(rank: OneRank, repeated: list[frozenset[Made]]) -> tuple[Choice, ...]:
    def found(model: Model) -> tuple[tuple[Choice, ...], int]:
        layer = _layer(replace(rank, model=model, repeats=""))
        return layer.choices(repeated), layer.most_again

    counted, most_again = found_in(rank.model, found)
    each = ((choice, choice.repeated) for choice in counted)
    return tuple(choice._replace(repeated=work._replace(launches=work.launches / most_again)) for choice, work in each)


@cache
def _layer(rank: OneRank) -> "_Layer":
    def read(parts) -> _Layer:
        types = parts.divided_types()
        program, _, residuals = trace_layer(parts.divided_layer, types)
        eqns, given = program.jaxpr.eqns, program.jaxpr.invars[len(jax.tree.leaves(types[:2])) :]
        of_micro, policy = dependents(eqns, given), parts.bound.policy
        saveable = {
            v: eqn
            for eqn in eqns
            if policy(eqn.primitive, *(atom.aval for atom in eqn.invars), **eqn.params)
            for v in eqn.outvars
            if v in of_micro
        }
        return _Layer(
            rank,
            parts.mesh,
            eqns,
            given,
            of_micro,
            saveable,
            [v for v in residuals if v in of_micro],
            num_bytes(types[3]),
        )

    return rank.trace_whole(read)


@dataclass(frozen=True, eq=False)
class _Layer:
    """A layer's equations, with the variables that come in, all that follow from these, those that may be kept (and
    what makes them), those that backward reads, and the bytes of what it passes on."""

    rank: OneRank
    mesh: MeshShape
    eqns: list
    given: list
    of_micro: set
    saveable: dict
    read: list
    x_bytes: int

    def sizes(self) -> dict[frozenset[Made], int]:
        """Bytes of the arrays that may be kept, those that are made alike together."""
        makers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        sizes: dict[frozenset[Made], int] = {}
        for v in reached(self.read, self.eqns, self.saveable):
            made, size = set(), num_bytes(v.aval)
            while v in self.saveable:
                made.add(_made(makers[v]))
                v = self._beneath(v, makers)
            sizes[frozenset(made)] = sizes.get(frozenset(made), 0) + size
        return sizes

    def _beneath(self, v, makers: dict):
        """The one array that would be kept in the place of `v`, which is marked, or made of it element by element."""
        found, live, seen = set(), [v], set()
        while live:
            made = live.pop()
            eqn = makers.get(made)
            if eqn is None or eqn.primitive.name not in FREE:
                return None
            for read in self.of_micro.intersection(variables(eqn.invars)) - seen:
                (found.add if read in self.saveable else live.append)(read)
                seen.add(read)
        return found.pop() if len(found) == 1 else None

    def choices(self, repeated: list[frozenset[Made]]) -> tuple[Choice, ...]:
        """The choices that repeat what is `made` so; their launches are numbers of equations.

        One walk finds of every equation and array which repeated arrays lead to it: `ways`, each the bits of those that
        must be repeated together."""
        bits = {made: 1 << place for place, made in enumerate(frozenset[Made]().union(*repeated))}
        own = {v: bits.get(_made(eqn)) for v, eqn in self.saveable.items()}  # None where an array is always kept
        ways: dict[Any, set[int]] = {v: {0} for v in self.read}
        again: dict[frozenset[int], list[_Work]] = defaultdict(list)
        for eqn in reversed(self.eqns):
            made = [(ways[v], own.get(v, 0)) for v in eqn.outvars if v in ways and own.get(v, 0) is not None]
            through = _shortest({way | bit for outer, bit in made for way in outer})
            for v in variables(eqn.invars) if through else ():
                ways[v] = ways.get(v, set()) | through
            if through and 0 not in through and eqn.primitive.name not in FREE:
                again[through].append(self._work(eqn))
        kept = [
            (_shortest(ways[v]), own.get(v) or 0, num_bytes(v.aval))
            for v in ways
            if v in self.saveable or v in self.inputs
        ]
        of_each = [(through, _Work.total(works)) for through, works in again.items()]
        found = []
        for each in repeated:
            chosen = sum(bits[made] for made in each)
            work = _Work.total(work for through, work in of_each if any(way & ~chosen == 0 for way in through))
            left = (size for to, bit, size in kept if not bit & chosen and any(way & ~chosen == 0 for way in to))
            repeats = Repeated(*(x / self.positions for x in work[:4]), launches=work.launches)
            uncounted = " and ".join(sorted(work.uncounted))
            found.append(Choice(_word(each, self.rank.rows), sum(left) / self.rank.rows, repeats, uncounted))
        return tuple(found)

    def _work(self, eqn) -> "_Work":
        sent = list(collectives_of(SimpleNamespace(eqns=[eqn]), self.mesh))
        uncounted = {f"messages over {'+'.join(each.axes)}" for each in sent if each.axes != ("tp",)}
        return _Work(
            flops=_product_flops(eqn),
            attention=_attention_flops(eqn),
            num_bytes=sum(num_bytes(v.aval) for v in (*variables(eqn.invars), *eqn.outvars) if v in self.of_micro),
            summed=sum(
                c.count * c.full_bytes * (1 if c.kind == "all_reduce" else 0.5) for c in sent if c.axes == ("tp",)
            ),
            launches=1,
            uncounted=frozenset(uncounted | ({"random numbers"} if eqn.primitive.name in DRAWS else set())),
        )

    @cached_property
    def inputs(self) -> set:
        return {*self.given}

    @property
    def positions(self) -> float:
        return self.rank.rows * self.rank.model.seq_len / self.rank.cp

    @cached_property
    def most_again(self) -> int:
        """Equations that cost something and are repeated only where nothing is kept."""
        usual = {id(eqn) for eqn in needed_for(self.read, self.eqns, {*self.given, *self.saveable})}
        again = needed_for(self.read, self.eqns, self.inputs)
        return max(1, sum(id(eqn) not in usual and eqn.primitive.name not in FREE for eqn in again))


class _Work(NamedTuple):
    """What equations do again: sums of `Repeated`, for all positions, and `Choice.uncounted`."""

    flops: float = 0.0
    attention: float = 0.0
    num_bytes: float = 0.0
    summed: float = 0.0
    launches: int = 0
    uncounted: frozenset[str] = frozenset()

    @classmethod
    def total(cls, works: Iterable["_Work"]) -> "_Work":
        columns = [*zip(*works, strict=True)] or [()] * 6
        return cls(*map(sum, columns[:5]), uncounted=frozenset().union(*columns[5]))


def _shortest(ways: set[int]) -> frozenset[int]:
    """Without those that need all that another one needs, and more."""
    return frozenset(way for way in ways if not any(other != way and other & ~way == 0 for other in ways))


def _largest(sizes: dict[frozenset[Made], int], x_bytes: int) -> list[frozenset[Made]]:
    large = [made for made, size in sizes.items() if size >= LEAST_PART * x_bytes]
    return sorted(large, key=lambda made: -sizes[made])[:MOST_ARRAYS]


def _word(repeated: frozenset[Made], rows: int) -> str:
    """The word of `ParallelConfig.remat` that repeats these arrays."""
    names = sorted(name_array(made, rows) for made in repeated)
    return REPEAT + "+".join(names) if names else "none"


def _made(eqn) -> Made:
    return made_by(eqn.primitive.name, [atom.aval for atom in eqn.invars], eqn.params)


def _product_flops(eqn) -> float:
    """Infinitely many in a `while` loop, whose count the program does not state."""
    dims, name = product_dims(eqn), eqn.primitive.name
    if dims is not None:
        return 2.0 * math.prod(dims)
    inner = (each for program in inner_programs(eqn) for each in getattr(program, "jaxpr", program).eqns)
    flops = sum(map(_product_flops, inner))
    return flops * (eqn.params["length"] if name == "scan" else math.inf if name == "while" and flops else 1)


def _attention_flops(eqn) -> float:
    """FLOPs of the scores that count."""
    sizes = traced_attention(eqn)
    if sizes is None:
        return 0.0
    rows, positions, *_ = eqn.invars[0].aval.shape
    shape = AttentionShape(*sizes)
    return 4.0 * rows * positions * shape.heads * shape.head_dim * shape.seen(positions)
