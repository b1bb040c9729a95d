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

from jaxdist.mesh import MeshShape
from jaxdist.models.attention_choice import traced_attention
from jaxdist.models.base import Model
from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.parallel.named_arrays import REPEAT, name_array, read_arrays
from jaxdist.parallel.pipeline.split_backward import (
    dependents,
    inner_programs,
    needed_for,
    num_bytes,
    reached,
    trace_layer,
    variables,
)
from jaxdist.parallel.products import is_product, product_dims
from jaxdist.parallel.remat import DRAWS, FREE, Made, made_by
from jaxdist.plan.long_blocks import found_in
from jaxdist.plan.parts import OneRank
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
            {*given},
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
    given: set
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
        found: set = set()
        seen: set = set()
        live = [v]
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
        """A choice for each set of repeated arrays; `launches` counts equations.

        One walk back from what backward reads prices all of them. Each array of the sets has a bit; `needs` has, for
        an equation or an array, the smallest sets of arrays (as bits) whose repetition makes backward need it."""
        bits = {made: 1 << place for place, made in enumerate(frozenset[Made]().union(*repeated))}
        own = {v: bits.get(_made(eqn)) for v, eqn in self.saveable.items()}  # None: kept in every choice
        needs: dict[Any, frozenset[int]] = {v: frozenset({0}) for v in self.read}
        again: dict[frozenset[int], list[tuple[Repeated, set[str]]]] = defaultdict(list)
        for eqn in reversed(self.eqns):
            made = [v for v in eqn.outvars if v in needs and own.get(v, 0) is not None]
            needed = _smallest({need | (own.get(v) or 0) for v in made for need in needs[v]})
            for v in variables(eqn.invars) if needed else ():
                needs[v] = _smallest(needs.get(v, frozenset()) | needed)
            if needed and 0 not in needed and eqn.primitive.name not in FREE:
                again[needed].append(self._work(eqn))
        priced = [(needed, _total(work for work, _ in each), [u for _, u in each]) for needed, each in again.items()]
        kept = [(needs[v], own.get(v) or 0, num_bytes(v.aval)) for v in needs if v in self.saveable or v in self.given]
        positions, found = self.rank.rows * self.rank.model.seq_len / self.rank.cp, []
        for each in repeated:
            chosen = sum(bits[made] for made in each)
            here = [row for row in priced if _any_within(row[0], chosen)]
            work = _total(work for _, work, _ in here)
            work = Repeated(*(x / positions for x in work))._replace(launches=work.launches)
            size = sum(size for needed, bit, size in kept if not bit & chosen and _any_within(needed, chosen))
            uncounted = set[str]().union(*(each for _, _, uncounted in here for each in uncounted))
            word = _word(each, self.rank.rows)
            found.append(Choice(word, size / self.rank.rows, work, " and ".join(sorted(uncounted))))
        return tuple(found)

    def _work(self, eqn) -> tuple[Repeated, set[str]]:
        """What an equation does again, for all positions, and the parts of `Choice.uncounted`."""
        sent = list(collectives_of(SimpleNamespace(eqns=[eqn]), self.mesh))
        uncounted = {f"messages over {'+'.join(each.axes)}" for each in sent if each.axes != ("tp",)}
        uncounted |= {"random numbers"} if eqn.primitive.name in DRAWS else set()
        touched = (v for v in (*variables(eqn.invars), *eqn.outvars) if v in self.of_micro)
        over_tp = (c for c in sent if c.axes == ("tp",))
        work = Repeated(
            flops=_product_flops(eqn),
            attention=_attention_flops(eqn),
            num_bytes=sum(num_bytes(v.aval) for v in touched),
            summed=sum(c.count * c.full_bytes * (1 if c.kind == "all_reduce" else 0.5) for c in over_tp),
            launches=1,
        )
        return work, uncounted

    @cached_property
    def most_again(self) -> int:
        """Equations that cost something and are repeated only where nothing is kept."""
        usual = {id(eqn) for eqn in needed_for(self.read, self.eqns, {*self.given, *self.saveable})}
        again = needed_for(self.read, self.eqns, self.given)
        return max(1, sum(id(eqn) not in usual and eqn.primitive.name not in FREE for eqn in again))


def _total(works: Iterable[Repeated]) -> Repeated:
    return Repeated(*map(sum, zip(Repeated(), *works, strict=True)))


def _smallest(sets: Iterable[int]) -> frozenset[int]:
    """The sets, as bits, that contain no other."""
    sets = {*sets}
    return frozenset(each for each in sets if not any(other != each and other & ~each == 0 for other in sets))


def _any_within(sets: Iterable[int], chosen: int) -> bool:
    return any(each & ~chosen == 0 for each in sets)


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
    name = eqn.primitive.name
    if is_product(eqn):
        return 2.0 * math.prod(product_dims(eqn))
    if eqn.params.get("name") in MORE_ROUNDS:
        return 0.0
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
