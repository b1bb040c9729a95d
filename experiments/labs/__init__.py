"""The course: a question about distributed training per lab, answered by a program (`python -m experiments.labs`).

A lab is a module here whose `run` is a `Lab`, and a page of the same name in `docs/labs/`. Its tables, pictures,
answers and the table of what breaks come from running it; its prose does not.
"""

import importlib

from .lab import Lab

# In the order in which they are read.
COURSE = (
    "one-device",
    "data-parallel",
    "all-reduce",
    "buckets",
    "memory",
    "zero",
    "tensor-parallel",
    "sequence-parallel",
    "context-parallel",
    "experts",
    "pipelines",
    "layouts",
    "precision",
    "whole-matrices",
    "recompute",
    "topology",
    "faults",
    "lying-gradients",
    "inference",
    "cost",
    "design",
    "reading",
    "whole-run",
    "own-layout",
)


def find_lab(name: str) -> Lab:
    """The lab of a name in `COURSE`."""
    return importlib.import_module(f".{name.replace('-', '_')}", __package__).run
