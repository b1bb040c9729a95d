"""Programs as several processes of one run."""

import sys
from pathlib import Path

from jaxdist.runtime import processes

ROOT = Path(__file__).resolve().parents[2]
LAUNCHER_VARIABLES = {name for pair in processes.LAUNCHERS for name in pair} | {processes.ADDRESS}


def as_processes(num_processes: int, num_devices: int) -> list[str]:
    launcher = [sys.executable, "-m", "experiments.launch", "--processes", str(num_processes)]
    return [*launcher, "--devices-per-process", str(num_devices), "--"]
