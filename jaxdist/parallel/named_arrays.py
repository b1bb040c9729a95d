"""Arrays of a layer by name: what `remat="repeat:A+B"` lists, a word for each operation whose result runs again."""

import re

from jaxdist.parallel.remat import Made

REPEAT = "repeat:"  # how a word of `ParallelConfig.remat` begins that names arrays
_ARRAY = re.compile(r"[\w-]+(:\d*r?(x\d*r?)*(-\d*r?(x\d*r?)*)*)?")


def name_array(made: Made, rows: int) -> str:
    """A result by what makes it, as in dot_general:1024rx768-768x2304, where r is the rows of a micro-batch.

    rows: a prime that divides no other dim, as `jaxdist.plan.parts.rows_to_trace` finds.
    """

    def dim(size: int) -> str:
        return str(size) if size % rows else f"{size // rows if size > rows else ''}r"

    operation, shapes = made
    return f"{operation}:" + "-".join("x".join(map(dim, shape)) for shape in shapes)


def is_array(name: str) -> bool:
    """Whether a name is one of `name_array`'s."""
    return _ARRAY.fullmatch(name) is not None


def read_arrays(word: str, rows: int) -> frozenset[Made]:
    """What makes the arrays that a word of `ParallelConfig.remat` names, in micro-batches of so many rows."""

    def size(dim: str) -> int:
        return int(dim[:-1] or 1) * rows if dim.endswith("r") else int(dim)

    found = set()
    for name in word.removeprefix(REPEAT).split("+") if word.startswith(REPEAT) else ():
        operation, _, shapes = name.partition(":")
        found.add(
            (operation, tuple(tuple(map(size, shape.split("x") if shape else ())) for shape in shapes.split("-")))
        )
    return frozenset(found)


def shorten(word: str) -> str:
    """A word of `ParallelConfig.remat` for people: "3 arrays" where it names them."""
    count = word.count("+") + 1
    return f"{count} array{'s' * (count > 1)}" if word.startswith(REPEAT) else word
