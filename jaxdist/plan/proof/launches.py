"""What the host launches in a step for a GPU: kernels one by one, and CUDA graphs of many.

Read from XLA's list of thunks, the units that its runtime starts (`compile_step(..., thunks=True)`). It makes graphs of
neighbours by itself. Compiled without a card it leaves attention by cuDNN, loops, and copies between a loop's stacks
outside, even where it is asked to take them in.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

THUNK = re.compile(r"( *)\d+: k(\w+)")
SECTION = re.compile(r" *(condition|body):")
NOTHING_OF_ITS_OWN = {
    *("Sequential", "DynamicSliceFusion", "While", "Conditional", "AsyncStart", "WaitForStreams"),
    *("PartitionId", "ReplicaId"),
}


@dataclass(frozen=True)
class Launches:
    """In a step. alone: kernels, copies and collectives that are launched one by one. graphs: CUDA graphs, which hold
    `in_graphs` of them."""

    alone: int
    graphs: int
    in_graphs: int

    @property
    def total(self) -> int:
        return self.alone + self.graphs


@dataclass
class _Open:
    """A thunk whose inner ones may follow. times: how often it runs in a step; inner: how often they do."""

    indent: int
    kind: str
    times: int
    inner: int
    in_graph: bool


def launches_of(thunks: str, trips: Sequence[int]) -> Launches:
    """Launches of a list of thunks as XLA writes it, whose loops run so often, in program order.

    A loop's condition is not counted: XLA knows how often these loops run.
    """
    left, alone, graphs, in_graphs = list(trips), 0, 0, 0
    inside = [_Open(-1, "", 1, 1, False)]
    for line in thunks.splitlines():
        if section := SECTION.match(line):
            while inside[-1].kind != "While":
                inside.pop()
            inside[-1].inner = inside[-1].times * left.pop(0) if section[1] == "body" else 0
            continue
        if not (found := THUNK.match(line)):
            continue
        indent, kind = len(found[1]), found[2]
        while inside[-1].indent >= indent:
            inside.pop()
        times, in_graph = inside[-1].inner, inside[-1].in_graph
        if kind == "CommandBuffer":
            graphs += times
        elif kind not in NOTHING_OF_ITS_OWN and not kind.endswith("Done"):
            in_graphs, alone = in_graphs + times * in_graph, alone + times * (not in_graph)
        inside.append(_Open(indent, kind, times, times, in_graph or kind == "CommandBuffer"))
    return Launches(alone, graphs, in_graphs)
