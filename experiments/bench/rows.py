"""What every bench returns: rows of one form under one header, and how they are written."""

import importlib.metadata
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
from pathlib import Path
from typing import Self

from jaxdist.commands import command_text
from jaxdist.files import write_whole
from jaxdist.runtime.devices import Devices

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

    name: what was measured, the same from run to run. value: the median of `runs` measurements, in `unit`, and
    `spread` their least and largest. against: the name of what `ratio` is the value's multiple of, measured in the
    same run. simulated: measured on devices that share one CPU.

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

    def __post_init__(self):
        if self.simulated and self.unit.endswith("/s"):
            raise ValueError(f"{self.name}: {self.unit} of simulated devices is no speed; give seconds or a ratio")

    @classmethod
    def of(cls, name: str, measured: Sequence[float], unit: str, **more) -> Self:
        """The median of several measurements."""
        return cls(name, statistics.median(measured), unit, (min(measured), max(measured)), len(measured), **more)


Measured = tuple[list[Row], Devices | None, bool]  # what a bench returns: figures, where, whether all targets are met


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Pair by pair, in order of size: what was measured in turn shares the machine's moods."""
    return sorted(a / b for a, b in zip(ours, theirs, strict=True))


UNITS = {"seconds": "s", "bytes": "bytes"}


def rows_of(name: str, figures: dict[str, float | None]) -> list[Row]:
    """A row for each figure that is known; its unit is the last word of its name, as in `open_seconds`."""
    split = [(*key.rpartition("_")[::2], value) for key, value in figures.items() if value is not None]
    return [Row(f"{name}: {what.replace('_', ' ')}", value, UNITS[unit]) for what, unit, value in split]


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
        "versions": {name: version for name in PACKAGES if (version := installed_version(name))},
    }


def cpu_name() -> str:
    """As the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
