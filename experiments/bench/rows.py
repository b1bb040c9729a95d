"""What every bench returns: rows of one form under one header, and how they are printed and written."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Self

from rich.console import Console

from jaxdist.commands import command_text
from jaxdist.files import write_whole
from jaxdist.runtime.devices import Devices

from ..tables import MARKS, Rows

PACKAGES = (
    "jax",
    "jaxlib",
    "jax-cuda12-plugin",
    "jax-cuda13-plugin",
    "flax",
    "optax",
    "numpy",
    "torch",
    "transformers",
)


@dataclass(frozen=True)
class Row:
    """One figure.

    name: what was measured, the same from run to run; "SUBJECT: FIGURE" where there are several of one subject. value:
    the median of `runs` measurements, in `unit`, and `spread` their least and largest. against: the name of what
    `ratio` is the value's multiple of, measured in the same run. simulated: measured on devices that share one CPU.
    target: the most that the ratio may be, or the value where there is no ratio.

    Raises: ValueError for a speed of simulated devices, which would be none.
    """

    name: str
    value: float
    unit: str
    spread: tuple[float, float] | None = None
    runs: int = 1
    against: str | None = None
    ratio: float | None = None
    simulated: bool = False
    target: float | None = None

    def __post_init__(self):
        if self.simulated and self.unit.endswith("/s"):
            raise ValueError(f"{self.name}: {self.unit} of simulated devices is no speed; give seconds or a ratio")

    @classmethod
    def of(cls, name: str, measured: Sequence[float], unit: str, **more) -> Self:
        """The median of several measurements."""
        return cls(name, statistics.median(measured), unit, (min(measured), max(measured)), len(measured), **more)

    @classmethod
    def beside(cls, name: str, ours: Sequence[float], theirs: Sequence[float], against: str, **more) -> Self:
        """Seconds, and the median of their ratios to seconds that were measured in turn with them."""
        return cls.of(name, ours, "s", against=against, ratio=statistics.median(ratios(ours, theirs)), **more)

    @property
    def met(self) -> bool:
        """A value that is not a number meets no target."""
        return self.target is None or (self.value if self.ratio is None else self.ratio) <= self.target

    def cell(self) -> str:
        """The value and its ratio, and whether a target is met."""
        ratio = "" if self.ratio is None else f" ({self.ratio:.3f})"
        mark = "" if self.target is None else " met" if self.met else f" missed {self.target:g}"
        return shown(self.value, self.unit) + ratio + mark


Measured = tuple[list[Row], Devices | None]  # what a bench returns: figures, and where they were measured


def shown(value: float, unit: str) -> str:
    """A value in the size of its unit that is read easily."""
    if unit == "s":
        size, unit = next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if value >= s), (1e-6, "µs"))
        return f"{value / size:.{max(0, 2 - len(f'{value / size:.0f}'))}f} {unit}"
    if unit in ("share", "of peak"):
        return f"{value:.1%}"
    size, form, unit = {
        "bytes": (2**20, ",.1f", "MiB"),
        "bytes/s": (1e9, ",.1f", "GB/s"),
        "tokens/s": (1, ",.0f", unit),
        "FLOP": (1e12, ",.2f", "TFLOP"),
        "FLOP/s": (1e12, ",.3f", "TFLOP/s"),
        "relative": (1, ".1e", ""),
    }.get(unit, (1, ",.0f" if value % 1 == 0 else ",.4g", unit))
    return f"{value / size:{form}} {unit}".rstrip()


def print_rows(rows: Sequence[Row], console: Console) -> None:
    """A line for each subject, with a column for each of its figures; a median has its spread, too."""
    lines: dict[str, dict[str, str]] = {}
    titles: dict[str, set[str]] = {}
    subjects = {row.name.rpartition(": ")[0] for row in rows}
    for row in rows:
        subject, colon, figure = row.name.rpartition(": ")
        if row.name in subjects or not colon:
            subject, figure = row.name, "median"
        lines.setdefault(subject, {})[figure] = row.cell()
        titles.setdefault(figure, set()).update([row.against] if row.ratio is not None else [])
        if row.spread is not None and figure == "median":
            lines[subject]["spread"] = " - ".join(shown(end, row.unit) for end in row.spread)
    names = {
        figure: figure + (f" (/ {next(iter(against))})" if len(against) == 1 else " (ratio)" if against else "")
        for figure, against in titles.items()
    }
    names |= {"spread": "spread"} if any("spread" in line for line in lines.values()) else {}
    table = Rows("simulated" if any(row.simulated for row in rows) else "", *names.values())
    for subject, line in lines.items():
        table.add_row(subject, *(line.get(figure, "") for figure in names))
    table.print(console, under=[*names.values()][1:], styles=MARKS)


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Pair by pair, in order of size: what was measured in turn shares the machine's moods."""
    return sorted(a / b for a, b in zip(ours, theirs, strict=True))


def describe_machine(devices: Devices | None) -> dict:
    """The machine, the card, the driver and every version that figures depend on."""
    device = devices.devices[0] if devices else None
    return {
        "command": f"{command_text('bench')} {shlex.join(sys.argv[1:])}".rstrip(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": f"{os.cpu_count()} x {cpu_name()}",
        "devices": devices.description if devices else None,
        "card": device.device_kind if device and device.platform == "gpu" else None,
        "compute_capability": str(getattr(device, "compute_capability", None)),
        "backend": str(device.client.platform_version) if device else None,
        "nvidia_smi": ask_nvidia_smi("name,driver_version,memory.total,power.limit"),
        "python": sys.version.split()[0],
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "versions": {found.name: found.version for found in distributions() if found.name in PACKAGES},
    }


def cpu_name() -> str:
    """As the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def ask_nvidia_smi(fields: str) -> str | None:
    """One line of `nvidia-smi` a card, None where it does not answer."""
    command = ["nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def write_rows(path: str | Path, header: dict, rows: Sequence[Row]) -> None:
    record = {"header": header, "rows": [asdict(row) for row in rows]}
    write_whole(Path(path), (json.dumps(record, indent=1) + "\n").encode())
