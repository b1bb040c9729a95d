"""What NVIDIA's driver says of this process's GPUs (NVML): utilisation, memory, power, temperature, errors."""

import importlib
import os
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

import jax


class GPU(NamedTuple):
    """One device of a run. busy: part of the last sampling period in which a kernel ran. memory_used: bytes, of all
    processes. power: watts. temperature: degrees Celsius. ecc_errors: uncorrected ones since the driver was loaded.
    What a card does not tell is None."""

    rank: int
    busy: float | None
    memory_used: int | None
    power: float | None
    temperature: float | None
    ecc_errors: int | None


class Watch:
    """Asks the driver about the GPUs among `devices` (in mesh order) that are this process's own.

    Empty where there are none, or the package nvidia-ml-py is not installed. CUDA numbers the GPUs that
    CUDA_VISIBLE_DEVICES names, the driver numbers all.
    """

    def __init__(self, devices: Sequence[jax.Device], module: str = "pynvml"):
        self._nvml = None
        self._handles: dict = {}
        mine = {
            rank: d for rank, d in enumerate(devices) if d.process_index == jax.process_index() and d.platform == "gpu"
        }
        if mine:
            self._open(mine, module)

    def _open(self, mine: dict[int, jax.Device], module: str) -> None:
        try:
            self._nvml = importlib.import_module(module)
        except ModuleNotFoundError:
            return
        try:
            self._nvml.nvmlInit()
        except self._nvml.NVMLError:  # the driver talks to nobody here, as in some containers
            return
        for rank, device in mine.items():
            name = _visible(device.local_hardware_id)
            by_uuid = isinstance(name, str)
            find = self._nvml.nvmlDeviceGetHandleByUUID if by_uuid else self._nvml.nvmlDeviceGetHandleByIndex
            with suppress(self._nvml.NVMLError):  # of a part of a UUID, which CUDA takes and the driver does not
                self._handles[rank] = find(name)

    def read(self) -> list[GPU]:
        return [
            GPU(
                rank,
                busy=self._ask(lambda n, h: n.nvmlDeviceGetUtilizationRates(h).gpu / 100, handle),
                memory_used=self._ask(lambda n, h: int(n.nvmlDeviceGetMemoryInfo(h).used), handle),
                power=self._ask(lambda n, h: n.nvmlDeviceGetPowerUsage(h) / 1e3, handle),
                temperature=self._ask(lambda n, h: float(n.nvmlDeviceGetTemperature(h, 0)), handle),
                ecc_errors=self._ask(lambda n, h: int(n.nvmlDeviceGetTotalEccErrors(h, 1, 0)), handle),
            )
            for rank, handle in self._handles.items()
        ]

    def _ask(self, question, handle):
        try:
            return question(self._nvml, handle)
        except self._nvml.NVMLError:  # not every card answers everything
            return None


def _visible(number: int) -> int | str:
    """The driver's number, or UUID, of CUDA's device `number`."""
    names = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    name = names[number] if number < len(names) else str(number)
    return int(name) if name.isdigit() else name
