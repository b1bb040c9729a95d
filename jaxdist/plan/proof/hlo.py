"""The text of an optimised HLO program: its computations, what they call, and the sizes of their arrays."""

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

_ITEMSIZES = {"pred": 1, "c64": 8, "c128": 16}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s*(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_CALLED = re.compile(
    r"(body|to_apply|calls|called_computations|branch_computations|true_computation|false_computation)=(?:\{([^}]*)\}|(%[\w.\-]+))"
)
TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')  # of a while


class Instruction(NamedTuple):
    """name = shape opcode(rest: the operands and all that follows). root: the computation's result."""

    name: str
    shape: str
    opcode: str
    rest: str
    root: bool = False


def computations(text: str) -> tuple[dict[str, list[Instruction]], str | None]:
    """The instructions of every computation, and the name of the entry."""
    bodies: dict[str, list[Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if found := _COMPUTATION.match(line):
            current = found[2]
            bodies[current] = []
            entry = current if found[1] else entry
        elif current is not None and (found := _INSTRUCTION.match(line)):
            root, *parts = found.groups()
            bodies[current].append(Instruction(*parts, root is not None))
    return bodies, entry


def called(rest: str) -> Iterable[tuple[str, str]]:
    """(role, name) of each computation that an instruction calls."""
    for role, several, one in _CALLED.findall(rest):
        for name in (several or one).split(", "):
            yield role, name.lstrip("%")


def operands(rest: str) -> list[str]:
    """Names of an instruction's operands, in order."""
    depth = 1
    for end, letter in enumerate(rest):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return re.findall(r"%([\w.\-]+)", rest[:end])
    return re.findall(r"%([\w.\-]+)", rest)


def dims(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, sizes) of every array in a shape, tuples opened."""
    found = re.findall(r"([a-z]\w*)\[([\d,]*)\]", shape)
    return [(dtype, tuple(int(size) for size in sizes.split(",") if size)) for dtype, sizes in found]


def arrays(shape: str) -> list[int]:
    """Bytes of every array in a shape, tuples opened."""
    return [int(_itemsize(dtype) * math.prod(sizes)) for dtype, sizes in dims(shape)]


def _itemsize(dtype: str) -> float:
    return _ITEMSIZES.get(dtype) or int(re.findall(r"\d+", dtype)[0]) / 8
