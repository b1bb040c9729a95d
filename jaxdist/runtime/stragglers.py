"""Which process or device is slower than the others.

In a step all ranks wait for the slowest, so a step's time names nobody. What can be told apart is what each process
does alone: its input and its host's other work, and a fixed computation on each of its devices.
"""

import json
import statistics
import time

import jax
import jax.numpy as jnp
from rich.console import Console

from jaxdist.runtime import processes
from jaxdist.runtime.telemetry import Spread, spreads

EVERY = 20  # steps between two reports of the processes to each other
FACTOR = 1.5  # times the median of all
LEAST_SECONDS = 0.02  # what a host may lose in a step unnamed


class StragglerWatch:
    """Every `EVERY` steps compares the processes' laps, and names the slow ones. With one process it does nothing."""

    def __init__(self, console: Console):
        self._console = console
        self._laps: list[dict[str, float]] = []

    def add(self, lap: dict[str, float]) -> None:
        """The seconds of a step by part (`jaxdist.runtime.telemetry`)."""
        self._laps = [*self._laps, lap][-EVERY:]

    def is_due(self, step: int) -> bool:
        """Whether the processes are compared after this step, when their devices must have nothing to do."""
        return step % EVERY == 0 and jax.process_count() > 1

    def report(self, step: int) -> dict[str, Spread]:
        """Every `EVERY` steps, of several processes: their mean laps beside each other, and a line for a slow one."""
        if not self.is_due(step):
            return {}
        laps, self._laps = self._laps, []
        mine = {
            "laps": {name: statistics.mean(lap[name] for lap in laps) for name in laps[0]},
            # The median: one long pause of a host, such as a collection of garbage, is not a slow process.
            "host": statistics.median(lap["input"] + lap["host"] for lap in laps),
            "device": max(map(_probe, jax.local_devices())),
        }
        found = [json.loads(text) for text in processes.from_all(f"times of step {step}", json.dumps(mine))]
        for line in slow_processes(found):
            self._console.print(f"[yellow]slow:[/] step {step}: {line}")
        return spreads([each["laps"] for each in found])


def slow_processes(found: list[dict[str, float]]) -> list[str]:
    """Seconds of each process, "host" a step and "device" the probe -> a line for each that stands out."""
    lines = []
    for kind, least, what in (
        ("host", LEAST_SECONDS, "spends {:.0f} ms a step on its input and host, the median is {:.0f} ms"),
        ("device", 0.0, "needs {:.1f} ms for a computation that takes {:.1f} ms in the median"),
    ):
        median = statistics.median_low([seconds[kind] for seconds in found])
        for index, seconds in enumerate(found):
            if seconds[kind] > FACTOR * median and seconds[kind] - median > least:
                lines.append(f"process {index} {what.format(1e3 * seconds[kind], 1e3 * median)}")
    return lines


def _probe(device: jax.Device) -> float:
    """Seconds that one device needs for a fixed computation, the best of three; no other device takes part."""
    x = jax.device_put(jnp.ones((512, 512), jnp.float32), device)
    _work(x).block_until_ready()
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        _work(x).block_until_ready()
        best = min(best, time.perf_counter() - start)
    return best


@jax.jit
def _work(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 8, lambda _, y: y @ x / 512, x)
