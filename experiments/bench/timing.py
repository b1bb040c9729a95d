"""Timed steps, batches and memory that several benches share."""

import dataclasses
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import jax
import numpy as np

from jaxdist.config import RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.mesh import MeshShape, make_mesh, parse_mesh
from jaxdist.plan.program_memory import ProgramBytes, program_bytes
from jaxdist.plan.proof.compile import emitted_bytes, emitted_collectives
from jaxdist.plan.proof.trace import Iterations
from jaxdist.plan.search import Candidates, pipelines
from jaxdist.runtime.devices import Devices
from jaxdist.strategy import ParallelConfig
from jaxdist.train.program import build_program, compiled_bytes

AT_ONCE = 3  # steps that an accelerator gets in a row


@dataclass(frozen=True)
class Timed:
    """A compiled step that can be run over and over: `run()` gives the seconds of one, `run_several(n)` of each of n.

    An accelerator gets n steps at once, as in training; a CPU one after the other, since simulated devices that are
    in different steps can wait for each other forever.

    peak_bytes: of one device, by the compiler's plan. sent_bytes: by one device in a step, read from the compiled
    program. None where the compiler does not say.
    """

    compiled: jax.stages.Compiled
    run_several: Callable[[int], float]
    peak_bytes: int | None
    sent_bytes: int | None

    def run(self) -> float:
        return self.run_several(1)


def timed(compiled: jax.stages.Compiled, state, batch, mesh: MeshShape, iterations: Iterations | None = None) -> Timed:
    """`compiled` takes (state, batch), donates the state and returns (state, figures). Run once to warm up.

    iterations: of a pipeline (`Program.iterations`).
    """
    collectives = emitted_collectives(compiled.as_text(), mesh, iterations)
    held = {"state": state}

    def step():
        held["state"], figures = compiled(held["state"], batch)
        return held["state"], figures

    (device, *_) = jax.tree.leaves(state)[0].devices()
    run_several = repeated(step, at_once=device.platform != "cpu")
    run_several(1)
    memory = compiled_bytes(compiled)
    return Timed(compiled, run_several, memory and memory.peak, emitted_bytes(collectives, mesh))


def repeated(step: Callable, at_once: bool) -> Callable[[int], float]:
    """n -> mean seconds of `step()`, called n times in a row; if not `at_once`, each is waited for."""

    def run_several(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            outputs = step()
            if not at_once:
                jax.block_until_ready(outputs)
        jax.block_until_ready(outputs)
        return (time.perf_counter() - start) / count

    return run_several


def timed_step(config: RunConfig, devices: Devices, compiler_options: dict[str, str | bool] | None = None) -> Timed:
    """Our own step."""
    mesh = make_mesh(config.parallel.mesh, devices.devices)
    program = build_program(config, mesh)
    compiled = program.compile_step(compiler_options)
    batch = program.put(full_batch(config))
    return timed(compiled, program.init(config.seed), batch, config.parallel.mesh, program.iterations())


def full_batch(config: RunConfig) -> dict:
    """A random batch in which every target counts."""
    batch = random_batches(config, 1)[0]
    return {**batch, "targets": np.maximum(batch["targets"], 0)}


def planned_memory(config: RunConfig, attention: str | None = None) -> ProgramBytes:
    """Bytes of this one layout, as the search counts them."""
    layouts = Candidates.of(config)
    return program_bytes(config, layouts, pipelines(config, layouts), attention or config.attention)


def with_parallel(config: RunConfig, mesh: str, more: dict) -> RunConfig:
    passed_on = {name: getattr(config.parallel, name) for name in ("attention", "xla")}
    parallel = ParallelConfig(mesh=parse_mesh(mesh), **passed_on | more)
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
