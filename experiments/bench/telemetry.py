"""What it costs to measure a run: the host's work after a step, and what the step itself has for it."""

import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.runtime import gpus
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.runtime.metrics import StepLines
from jaxdist.runtime.telemetry import PARTS, MeanLap, Stopwatch, device_memory

from ..panel import RunPanel
from .flags import BenchFlags
from .rows import Measured, Row
from .timing import timed_step, with_parallel

LARGEST = 0.01  # of a step
TIMES = 200  # repetitions of what takes microseconds


def bench_telemetry(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """The measuring of one step against the step on one device, which is the shortest of all."""
    devices = acquire_devices(1, flags.device)
    step = timed_step(with_parallel(config, "", {}), devices)
    seconds = statistics.median(step.run() for _ in range(flags.repeats))
    rows = [Row.of("step", [seconds], "s")]
    with tempfile.TemporaryDirectory() as folder:
        for name, work in works(devices, Path(folder)).items():
            if flags.only not in name:
                continue
            with console.status(name):
                each = [cost_of(work) for _ in range(flags.repeats)]
            ratio = statistics.median(each) / seconds
            rows.append(Row.of(name, each, "s", against="step", ratio=ratio, target=LARGEST))
    return rows, devices


def cost_of(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    for _ in range(TIMES):
        work()
    return (time.perf_counter() - begun) / TIMES


def works(devices: Devices, folder: Path) -> dict[str, Callable[[], object]]:
    """What `train` does after a step, part by part and in all; without the optional exporters."""
    watch, laps, card = Stopwatch(), MeanLap(), gpus.Watch(devices.devices)
    run, process = (StepLines(folder / name, 0, lambda text: None) for name in ("metrics.jsonl", "0000.jsonl"))
    panel = RunPanel("", 10**9, None, simulated=False)
    numbers = {"loss": 1.0, "grad_norm": 1.0, "lr": 1e-3, "tokens": 1024, "tokens_per_second": 1e4}
    norms = {f"blocks.{index}.attention": 0.5 for index in range(12)}

    def clocks() -> dict[str, float]:
        for part in PARTS[:-1]:
            with watch.part(part):
                pass
        laps.add(lap := watch.lap())
        return lap

    def lines() -> None:
        seconds = dict.fromkeys(PARTS, 0.1)
        run.write({"step": 1, **numbers, "grad_norms": norms, "seconds": seconds})
        process.write({"step": 1, "time": 0.0, "seconds": seconds})

    def asked() -> None:
        device_memory(devices.devices)
        card.read()

    def panelled() -> None:
        panel.update({"step": 1, **numbers, "grad_norms": norms, "seconds": dict.fromkeys(PARTS, 0.1)}, [])

    found = {"clocks": clocks, "two lines": lines, "allocators and driver": asked, "panel": panelled}
    return found | {"all of it": lambda: [work() for work in found.values()]}
