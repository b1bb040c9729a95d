"""Where a step's time goes: what XLA's own profile says of its operations, by what they came from in the program."""

import re
import resource
import statistics
import tempfile
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import jax
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.plan.proof.executed import lines
from jaxdist.plan.proof.roofline import phase_of
from jaxdist.runtime.devices import acquire_devices

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import timed_step

SHOWN = 20


def bench_profile(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """The step of --mesh under JAX's profiler. Operations of all devices are added up."""
    devices = acquire_devices(config.parallel.mesh.num_devices, flags.device)
    step = timed_step(config, devices)
    before = resource.getrusage(resource.RUSAGE_SELF)
    seconds = [step.run() for _ in range(flags.repeats)]
    after = resource.getrusage(resource.RUSAGE_SELF)
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            profiled = step.run_several(flags.repeats)
        (path,) = Path(folder).rglob("*.xplane.pb")
        found = own_seconds(jax.profiler.ProfileData.from_file(str(path)))
    if not found:
        raise ConfigError("profile", f"{devices.platform} must report operations to JAX's profiler", "Use --device cpu")

    origins = origins_of(step.compiled.as_text())
    totals, counts = Counter(), Counter()
    for name, own, count in found:
        totals[origins.get(name, ("", "others"))] += own / flags.repeats
        counts[origins.get(name, ("", "others"))] += count / flags.repeats
    rows, all_seconds = [], totals.total()
    for (phase, operation), own in totals.most_common(SHOWN):
        share = own / all_seconds
        name = f"{phase} {operation}".strip()
        rows.append(Row(name, own, "s", against="all operations", ratio=share, simulated=devices.simulated))
        rows.append(Row(f"{name}: times a step", counts[phase, operation], ""))
    user = (after.ru_utime - before.ru_utime) / flags.repeats
    system = (after.ru_stime - before.ru_stime) / flags.repeats
    rows.append(Row.of("step", seconds, "s", simulated=devices.simulated))
    rows += [Row("step: user time", user, "s"), Row("step: system time", system, "s")]
    console.print(
        f"A step takes {statistics.median(seconds):.3f} s, {profiled:.3f} s while profiled; over all cores it uses"
        f" {user:.2f} s, and the system {system:.2f} s for it (memory touched for the first time, mostly). The"
        f" operations above are of {all_seconds:.2f} s; of a product on several cores, one of them is counted."
    )
    return rows, devices


def own_seconds(profile) -> list[tuple[str, float, int]]:
    """(instruction, its seconds without what ran inside it, how often it ran), over all threads and streams."""
    totals, counts = Counter(), Counter()
    for line in lines(profile):
        for name, nanoseconds in own_time((event.name, event.start, event.end) for event in line):
            totals[name] += nanoseconds
            counts[name] += 1
    return [(name, nanoseconds / 1e9, counts[name]) for name, nanoseconds in totals.items()]


def own_time(spans: Iterable[tuple[str, float, float]]) -> list[tuple[str, float]]:
    """What each span takes without the spans inside it. Spans of one thread are nested or apart."""
    found: list[list] = []
    open_spans: list[tuple[float, int]] = []
    for name, start, end in sorted(spans, key=lambda span: (span[1], -span[2])):
        while open_spans and open_spans[-1][0] <= start:
            open_spans.pop()
        if open_spans:
            found[open_spans[-1][1]][1] -= end - start
        open_spans.append((end, len(found)))
        found.append([name, end - start])
    return [tuple(each) for each in found]


def origins_of(text: str) -> dict[str, tuple[str, str]]:
    """Instruction -> (phase, JAX operation), from the metadata of a compiled program."""
    found = {}
    for name, origin in re.findall(r'^\s*(?:ROOT )?%?([\w.\-]+) = .*?op_name="([^"]*)"', text, re.MULTILINE):
        found[name] = (phase_of(origin), origin.rpartition("/")[2])
    return found
