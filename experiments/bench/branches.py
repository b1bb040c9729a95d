"""What a pipeline needs whose actions are branches of a conditional, against ours, whose actions are loops.

docs/design.md has the finding. Both are compiled and neither is run.
"""

from collections.abc import Callable
from unittest import mock

import jax
import jax.numpy as jnp
from jax import lax
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.pipeline import executor as pipeline
from jaxdist.parallel.pipeline.schedules import Phase
from jaxdist.plan.proof.compile import CompiledStep, compile_step
from jaxdist.runtime.devices import acquire_devices

from ..tables import Rows
from .flags import BenchFlags
from .rows import Measured, Row
from .timing import with_parallel

STAGES = 4
SCHEDULES = ("1f1b", "zb-h1")
LOOPS, GUARDED, BRANCHES = "loops", "loops, each in a conditional that may do nothing", "one switch over the actions"

run_action, loop = pipeline._Runner.run_action, pipeline._Runner.loop


def guarded(self, name: str, times, body: Callable, carry, reverse: bool = False):
    return lax.cond(times > 0, lambda c: loop(self, name, times, body, c, reverse), lambda c: c, carry)


def branches(self, seed, state, row):
    """A tick as one `lax.switch`: each branch knows the phase it runs."""

    def branch(phase: int):
        known = row._replace(phase=comm.varying_like(jnp.int32(phase), row.phase))
        return lambda state: run_action(self, seed, state, known)

    return tuple(lax.switch(row.phase, list(map(branch, (0, *Phase))), state))


FORMS = {LOOPS: {"run_action": run_action}, GUARDED: {"loop": guarded}, BRANCHES: {"run_action": branches}}


def bench_branches(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Compiled temporaries of the three forms."""
    devices = acquire_devices(STAGES, "cpu")
    figures, table = [], Rows("schedule", "form", "compiled MiB", "ratio", "copies in the text")
    for schedule in SCHEDULES:
        each, first = with_parallel(config, f"pp={STAGES}", {"schedule": schedule}), None
        for form in FORMS:
            with console.status(f"{schedule}: {form}"):
                found = compiled_as(form, each)
            first = first or found.temporaries
            ratio, copies = found.temporaries / first, found.text.count(" copy(")
            table.add_row(schedule, form, f"{found.temporaries / 2**20:.1f}", f"{ratio:.2f}", str(copies))
            figures.append(Row(f"{schedule}, {form}", found.temporaries, "bytes", against=LOOPS, ratio=ratio))
    table.print(console, left=("form",), under=("form",))
    return figures, devices, True


def compiled_as(form: str, config: RunConfig) -> CompiledStep:
    """The step with the executor in one of `FORMS`."""
    jax.clear_caches()
    with mock.patch.multiple(pipeline._Runner, **FORMS[form]):
        return compile_step(config, "cpu")
