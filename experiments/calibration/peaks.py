"""Published peaks of memory beside the formulas with what each program keeps besides, and errors of what was left out.

`python -m experiments.calibration.peaks` prints them, worst first. Nothing continuous is fitted: a program's
`MemoryConvention` is the best of `CHOICES`, and is chosen again without a run to predict that run.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from jaxdist.plan.hardware import GIB

from . import runs
from .memory import NANOTRON, TORCHTITAN, TORCHTITAN_2025, MemoryConvention, device_bytes
from .runs import TimeCase, mean_and_max
from .sources import second_set

CONVENTIONS = {"nanotron": NANOTRON, "torchtitan": TORCHTITAN, "torchtitan, H200": TORCHTITAN_2025}


def _every(base: MemoryConvention, **values: Sequence) -> tuple[MemoryConvention, ...]:
    rows = itertools.product(*values.values())
    return tuple(replace(base, **dict(zip(values, row, strict=True))) for row in rows)


_FSDP = _every(TORCHTITAN, bytes_per_logit=(6, 10, 14, 18), gathered_layers=(0, 2), gathered=(False, True))
# What a program's convention is chosen from.
CHOICES = {
    "nanotron": _every(
        MemoryConvention(),
        micro_gradient=(0, 2, 4),
        update=(0, 4, 8),
        extra_hidden=(0, 2, 4, 6, 8),
        gathered=(False, True),
        bytes_per_logit=(6, 10, 14),
    ),
    "torchtitan": _FSDP,
    "torchtitan, H200": _FSDP,
}
GROUPS = {"torchtitan_h200": "torchtitan, H200"}  # other groups are their source's


@dataclass(frozen=True, eq=False)
class Peak:
    """One published peak. gib: of 2**30 bytes, on the device that needs most."""

    program: str
    case: TimeCase
    gib: float

    def error(self, convention: MemoryConvention) -> float:
        """Relative, signed."""
        return (
            float(device_bytes(self.case.shape, self.case.layout, convention=convention).total[0]) / GIB / self.gib - 1
        )


@cache
def peaks() -> tuple[Peak, ...]:
    """Every published peak whose program's convention is known."""
    found = [
        Peak(program, case, run["peak_gib"])
        for program in ("nanotron", "torchtitan")
        for run in runs.published()[program]
        for case in runs.times(program, run)
        if "peak_gib" in run
    ]
    for row, facts in second_set():
        if facts.get("peak_gib"):
            found.append(Peak(GROUPS.get(row.case.group, row.source), row.case, facts["peak_gib"]))
    return tuple(found)


def of_program(program: str) -> list[Peak]:
    return [peak for peak in peaks() if peak.program == program]


@cache
def _errors_of_choices(program: str) -> np.ndarray:
    """[choice, run]: relative errors."""
    return np.array([[peak.error(choice) for peak in of_program(program)] for choice in CHOICES[program]])


def best_convention(program: str, leave_out: int | None = None) -> MemoryConvention:
    """The choice with the least mean error over a program's published peaks."""
    return CHOICES[program][_best(program, leave_out)]


def _best(program: str, leave_out: int | None = None) -> int:
    errors = np.abs(_errors_of_choices(program))
    kept = [run for run in range(errors.shape[1]) if run != leave_out]
    return int(errors[:, kept].mean(axis=1).argmin())


def left_out(program: str) -> list[float]:
    """Each run's error by the convention that is best for the others."""
    errors = _errors_of_choices(program)
    return [float(errors[_best(program, run), run]) for run in range(errors.shape[1])]


def summary() -> str:
    """Markdown: a line a program and one of all."""
    lines = [
        "| program | peaks | mean | mean, left out | 90 % within, left out | signed |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    every: list[tuple[float, float]] = []
    for program, convention in CONVENTIONS.items():
        errors = list(zip([peak.error(convention) for peak in of_program(program)], left_out(program), strict=True))
        every += errors
        lines.append(_line(program, errors))
    return "\n".join([*lines, _line("**all**", every)])


def _line(name: str, errors: Sequence[tuple[float, float]]) -> str:
    chosen, out = zip(*errors, strict=True)
    within = np.quantile(np.abs(out), 0.9)
    return (
        f"| {name} | {len(out)} | {mean_and_max(chosen)[0]:.1%} | {mean_and_max(out)[0]:.1%} | {within:.1%} | "
        f"{np.mean(out):+.1%} |"
    )


def table() -> str:
    """Markdown: every peak, worst first by its error when it was left out."""
    lines = ["| program | run | published, GiB | predicted, GiB | error | left out |", "|---|---|--:|--:|--:|--:|"]
    rows = [
        (out, peak, peak.error(convention))
        for program, convention in CONVENTIONS.items()
        for peak, out in zip(of_program(program), left_out(program), strict=True)
    ]
    for out, peak, error in sorted(rows, key=lambda row: -abs(row[0])):
        predicted = peak.gib * (1 + error)
        lines.append(
            f"| {peak.program} | {peak.case.name} | {peak.gib:.1f} | {predicted:.1f} | {error:+.1%} | {out:+.1%} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    print(summary(), table(), sep="\n\n")
