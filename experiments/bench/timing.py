"""Timed steps, batches and memory that several benches share."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

import jax
import numpy as np

from jaxdist.config import ParallelConfig, RunConfig
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.runtime import Devices
from jaxdist.step import build_program, compiled_peak_bytes
from jaxdist.verify import random_batches


def timed_step(config: RunConfig, devices: Devices) -> tuple[Callable[[], float], int | None]:
    """(run one step and return its seconds, the compiler's peak bytes a device)."""
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    compiled = program.compile_step()
    peak = compiled_peak_bytes(compiled, program.abstract_state())
    batch = program.put(full_batch(config))
    held = {"state": program.init(config.seed)}

    def run() -> float:
        start = time.perf_counter()
        held["state"], metrics = compiled(held["state"], batch)
        jax.block_until_ready((held["state"], metrics))
        return time.perf_counter() - start

    run()
    return run, peak


def full_batch(config: RunConfig) -> dict:
    """A random batch in which every target counts."""
    batch = random_batches(config, 1)[0]
    return {**batch, "targets": np.maximum(batch["targets"], 0)}


def with_parallel(config: RunConfig, mesh: str, more: dict) -> RunConfig:
    parallel = ParallelConfig(mesh=parse_mesh(mesh), attention=config.parallel.attention, **more)
    return dataclasses.replace(config, parallel=parallel)


class Growth:
    """The most that this process's memory has grown by, looked at every few milliseconds."""

    def __enter__(self) -> Self:
        self._before, self._most, self._stop = resident_bytes(), resident_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        if self._before is not None:
            self._thread.start()
        return self

    def _look(self) -> None:
        while not self._stop.wait(0.005):
            self._most = max(self._most, resident_bytes())

    def most(self) -> int | None:
        return None if self._before is None else self._most - self._before

    def __exit__(self, *_) -> None:
        self._stop.set()


def resident_bytes() -> int | None:
    """Memory of this process; None where the system has no /proc."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
