"""A block of many layers, traced as two blocks of few: their difference is what a further layer adds.

A model whose kinds of layers do not repeat from the first layer on (a dense layer before the mixtures, say) is a single
block of all its layers, and tracing it takes as long as it has layers. So it is traced with one and with two of what
repeats inside: messages, products and bytes grow by their difference with every further repeat. Two blocks cannot show
that they do; a test compares with whole blocks.
"""

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from itertools import takewhile
from numbers import Number
from typing import Any, TypeVar

import numpy as np

from jaxdist.models.base import Model
from jaxdist.models.lora import LoRA

T = TypeVar("T")
FEW = 2  # repeats in the longer of the two blocks that are traced


class Uneven(Exception):
    """The two blocks differ by something else than a repeat put in, so that nothing follows for a third."""


@dataclasses.dataclass(frozen=True)
class LongBlock:
    """A block of `model` whose layers from `start` on are `times` repeats of `unit` kinds."""

    model: Model
    start: int
    unit: int
    times: int

    def shortened(self, times: int) -> Model:
        """The model as one block with so many repeats."""
        kinds, end = self.model.kinds, self.start + self.unit * self.times
        shorter = _with_kinds(self.model, kinds[: self.start + self.unit * times] + kinds[end:])
        assert shorter is not None  # as `self.model` has kinds
        return shorter

    def extended(self, less, more):
        """What the whole block has, where blocks with FEW - 1 and FEW repeats have `less` and `more`."""
        if isinstance(more, np.ndarray):
            return self._extended_moments(less, more)
        if isinstance(more, frozenset):
            return self._paths(more)
        if isinstance(more, dict):
            return {name: self.extended(less.get(name, 0), value) for name, value in more.items()}
        if dataclasses.is_dataclass(more) and not isinstance(more, type):
            names = [field.name for field in dataclasses.fields(more)]
            return dataclasses.replace(more, **{n: self.extended(getattr(less, n), getattr(more, n)) for n in names})
        if hasattr(more, "_fields"):
            return type(more)(*map(self.extended, less, more))
        if isinstance(more, (tuple, list)):
            if len(less) == len(more):
                return type(more)(map(self.extended, less, more))
            return self._extended_sequence(less, more)
        if less == more:
            return more
        if isinstance(more, Number):
            return more + (self.times - FEW) * (more - less)
        raise Uneven

    def _extended_sequence(self, less: Any, more: Any) -> Any:
        """`more` is `less` with something put in once; the whole block has that so much more often."""
        first = len([*takewhile(lambda pair: pair[0] == pair[1], zip(less, more, strict=False))])
        put_in = more[first : first + len(more) - len(less)]
        if more != less[:first] + put_in + less[first:]:
            raise Uneven
        return less[:first] + put_in * (1 + self.times - FEW) + less[first:]

    def _extended_moments(self, less: np.ndarray, more: np.ndarray) -> np.ndarray:
        """The fullest moments alone: those between have another length in each block."""
        less, more = fullest(less), fullest(more)
        if less.shape != more.shape:
            raise Uneven
        return more + (self.times - FEW) * (more - less)

    def _paths(self, short: frozenset[str]) -> frozenset[str]:
        """The paths in the whole block that are like those of the short one."""
        found = {path for path in short if not re.match(r"\d+_", path)}
        for layer in range(len(self.model.kinds)):
            repeat, place = divmod(layer - self.start, self.unit)
            if repeat >= self.times - 1:  # the last, and what follows it
                like = layer - self.unit * (self.times - FEW)
            else:
                like = layer if repeat < 0 else self.start + place
            found |= {f"{layer}{path.removeprefix(str(like))}" for path in short if path.startswith(f"{like}_")}
        return frozenset(found)


def found_in(model: Model, function: Callable[[Model], T]) -> T:
    """`function` of a model; of one with a long block, extended from its results for two short ones.

    These are numbers, arrays of moments [n, 2], sets of parameters' paths, or tuples, lists, dicts and dataclasses of
    such."""
    block = long_block(model)
    if block is None:
        return function(model)
    try:
        return block.extended(function(block.shortened(FEW - 1)), function(block.shortened(FEW)))
    except Uneven:
        return function(model)


@cache
def long_block(model: Model) -> LongBlock | None:
    """The repeats with which two short blocks have least layers; None where these are no fewer than the whole block's,
    or where a model cannot be given other kinds."""
    kinds, best, fewest = model.kinds, None, len(model.kinds)
    if _with_kinds(model, kinds) is None:
        return None
    for unit in range(1, len(kinds) // (FEW + 1) + 1):
        start = 0
        while start + unit < len(kinds):
            end = start + unit
            while end < len(kinds) and kinds[end] == kinds[end - unit]:
                end += 1
            times = (end - start) // unit
            traced = 2 * (len(kinds) - unit * times) + unit * (2 * FEW - 1)
            if times > FEW and traced < fewest:
                best, fewest = LongBlock(model, start, unit, times), traced
            start = max(start + 1, end - unit + 1)
    return best


def _with_kinds(model: Model, kinds: tuple[str, ...]) -> Model | None:
    """None where kinds are not among the fields of a model."""
    if isinstance(model, LoRA):
        base = _with_kinds(model.base, kinds)
        return base and dataclasses.replace(model, base=base)
    init = {name for name, field in getattr(model, "__dataclass_fields__", {}).items() if field.init}
    if not {"kinds", "num_layers"} <= init:
        return None
    return dataclasses.replace(model, kinds=kinds, num_layers=len(kinds))  # type: ignore[type-var]


def fullest(moments: np.ndarray) -> np.ndarray:
    """The moments [n, 2] (bytes, bytes a row) that are the fullest for some number of rows."""
    best: list[tuple[float, float]] = []
    for fixed, each in sorted(set(map(tuple, moments.tolist())), reverse=True):
        if not best or each > best[-1][1]:
            best.append((fixed, each))
    return np.array(best)
