"""What a layer keeps for backward, array by array, and what making each of them again would take.

A layer is traced once. What backward needs is reached from what is kept, and the equations in between are what it
repeats: a walk through them tells, of any choice, its bytes and its work. That arrays may be chosen one by one, by
bytes and time, is from arXiv 1910.02653; layers are alike and keep few, so here every choice is tried.
"""

import itertools
import math
from dataclasses import dataclass, replace
from functools import cache, cached_property
from types import SimpleNamespace
from typing import NamedTuple

import jax

from jaxdist.compat import inner_programs
from jaxdist.mesh import MeshShape
from jaxdist.models.attention import traced_attention
from jaxdist.parallel.pipeline.split_backward import (
    dependents,
    needed_for,
    num_bytes,
    reached,
    trace_layer,
    variables,
)
from jaxdist.parallel.remat import DRAWS, FREE, REPEAT, Made, made_by, name_array, read_arrays
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
    layer = _layer(replace(rank, repeats=""))
    groups = layer.groups()
    chosen = itertools.product((False, True), repeat=len(groups))
    repeated = (frozenset().union(*itertools.compress(groups, some)) for some in chosen)
    return tuple(choice for each in repeated if not (choice := layer.choice(each)).uncounted)


@cache
def choice_of(rank: OneRank) -> Choice:
    """The choice that `rank.repeats` names."""
    return _layer(replace(rank, repeats="")).choice(read_arrays(rank.repeats, rank.rows))


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

    return rank.trace(read)


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

    def groups(self) -> list[frozenset[Made]]:
        """The largest arrays, those that are made alike together."""
        makers = {v: eqn for eqn in self.eqns for v in eqn.outvars}
        sizes: dict[frozenset[Made], int] = {}
        for v in reached(self.read, self.eqns, self.saveable):
            made, size = set(), num_bytes(v.aval)
            while v in self.saveable:
                made.add(_made(makers[v]))
                v = self._beneath(v, makers)
            sizes[frozenset(made)] = sizes.get(frozenset(made), 0) + size
        large = [made for made, size in sizes.items() if size >= LEAST_PART * self.x_bytes]
        return sorted(large, key=lambda made: -sizes[made])[:MOST_ARRAYS]

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

    def choice(self, repeated: frozenset[Made]) -> Choice:
        kept = {*self.given, *(v for v, eqn in self.saveable.items() if _made(eqn) not in repeated)}
        again = self._again(kept)
        sent = list(collectives_of(SimpleNamespace(eqns=again), self.mesh))
        uncounted = {f"messages over {'+'.join(each.axes)}" for each in sent if each.axes != ("tp",)}
        uncounted |= {"random numbers" for eqn in again if eqn.primitive.name in DRAWS}
        positions = self.rank.rows * self.rank.model.seq_len / self.rank.cp
        touched = (v for eqn in again for v in (*variables(eqn.invars), *eqn.outvars) if v in self.of_micro)
        work = Repeated(
            flops=sum(_product_flops(eqn) for eqn in again) / positions,
            attention=sum(_attention_flops(eqn) for eqn in again) / positions,
            num_bytes=sum(num_bytes(v.aval) for v in touched) / positions,
            summed=sum(
                c.count * c.full_bytes * (1 if c.kind == "all_reduce" else 0.5) for c in sent if c.axes == ("tp",)
            )
            / positions,
            launches=len(again) / self.most_again,
        )
        names = sorted(name_array(made, self.rank.rows) for made in repeated)
        kept_bytes = sum(num_bytes(v.aval) for v in reached(self.read, self.eqns, kept)) / self.rank.rows
        word = REPEAT + "+".join(names) if names else "none"
        return Choice(word, kept_bytes, work, " and ".join(sorted(uncounted)))

    def _again(self, kept: set) -> list:
        """Equations that cost something and are repeated only where nothing but `kept` is."""
        return [eqn for eqn in self._needed(kept) if id(eqn) not in self.usual and eqn.primitive.name not in FREE]

    @cached_property
    def usual(self) -> set[int]:
        """Ids of the equations that are repeated where all that may be kept is."""
        return {id(eqn) for eqn in self._needed({*self.given, *self.saveable})}

    @cached_property
    def most_again(self) -> int:
        return max(1, len(self._again({*self.given})))

    def _needed(self, kept: set) -> list:
        return needed_for(self.read, self.eqns, kept)


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
