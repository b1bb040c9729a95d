"""What a run waits for, in one sentence, and what would shorten its steps.

The parts of a mean step come from three places: what the processes measured on their hosts (`runtime.telemetry`), the
time model for the layout on its hardware, and a profile of the devices (`runtime.profile`) where one was taken. Only
the last two look inside the step, so on simulated devices nothing is said about it as if it were measured.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES
from jaxdist.placement import make_layout
from jaxdist.plan.hardware import Accelerator, Cluster, load_hardware, strides
from jaxdist.plan.search import Candidates, score
from jaxdist.plan.time_model import RELIEF, Efficiency, efficiency_of
from jaxdist.plan.traffic import predicted, table
from jaxdist.runtime.devices import Devices
from jaxdist.runtime.telemetry import PARTS

SIGNIFICANT = 0.15  # of a step: what takes less is not what binds it
COMMUNICATION = "communication on "
STEP = "step"  # of which nobody said what it is made of

# The causes that the time model has, and those that only a run has.
REMEDIES = {
    "compute": RELIEF["compute"][1],
    "memory bandwidth": RELIEF["memory"][1],
    "bubble": RELIEF["bubble"][1],
    **{f"{COMMUNICATION}{axis}": RELIEF[axis][1] for axis in ("tp", "cp", "ep", "dp", "pp")},
    f"{COMMUNICATION}replica": "more tokens a device (accumulate), or a larger dp in its place",
    "small matmuls": "a smaller tp, larger micro-batches, or a wider model",
    "launches": "larger micro-batches, or fewer of them",
    "input": "more batches read ahead (--prefetch), prepared tokens, or faster storage",
    "host": "less beside the run on its host, or larger steps",
    "evaluation": "a larger --eval-every, or fewer --eval-windows",
    "checkpoint": "a larger --checkpoint-every, or faster storage",
    "checks": "a larger --checkpoint-every or --check-replicas-every",
    "straggler": "another machine in its place, or less beside the run on it",
}


@dataclass(frozen=True)
class Verdict:
    """What binds a run: a key of REMEDIES, or `STEP` where nothing outside the step does and nobody looked inside.

    share: of the mean step. seconds: of that step. text: for a person.
    """

    kind: str
    share: float
    seconds: float
    text: str


def judge(parts: Mapping[str, float], details: Mapping[str, str] | None = None, unknown: str = "") -> Verdict:
    """The part that a step waits for longest, if it is worth a word; else compute.

    parts: seconds of a mean step, by the keys of REMEDIES; `STEP` for what nobody divided, and `unknown` says why.
    details: more about a part, in words. Memory bandwidth is useful work, so it must exceed compute to be named.
    """
    total = sum(parts.values())
    if total <= 0:
        return Verdict(STEP, 0.0, 0.0, "nothing was measured")
    lost = {name: seconds for name, seconds in parts.items() if name not in ("compute", STEP)}
    if lost.get("memory bandwidth", 0) <= parts.get("compute", 0):
        lost.pop("memory bandwidth", None)
    kind = max(lost, key=lost.__getitem__, default="compute")
    if lost.get(kind, 0) < SIGNIFICANT * total:
        kind = STEP if parts.get(STEP, 0) > parts.get("compute", 0) else "compute"
    share = parts.get(kind, 0.0) / total
    more = f" ({details[kind]})" if details and kind in details else ""
    if kind == STEP:
        text = f"{share:.0%} of the time is the step itself{f'; {unknown}' if unknown else ''}"
    elif kind == "straggler":
        text = f"waiting for a straggler{more}: {share:.0%} of the time; {REMEDIES[kind]} would shorten it"
    else:
        text = f"{_bound(kind)}{more}: {share:.0%} of the time; {REMEDIES[kind]} would shorten it"
    return Verdict(kind, share, total, text)


def _bound(kind: str) -> str:
    if kind.startswith(COMMUNICATION):
        return f"communication-bound on {kind.removeprefix(COMMUNICATION)}"
    words = {"memory bandwidth": "memory-bound", "checks": "bound by comparing copies"}
    return {"small matmuls": "bound by small matmuls", **words}.get(kind, f"{kind}-bound")


# ---------------------------------------------------------------------------------------------------------------------
# Parts
# ---------------------------------------------------------------------------------------------------------------------


def measured_parts(laps: Sequence[Mapping[str, float]]) -> tuple[dict[str, float], dict[str, str]]:
    """(parts, details) from every process's mean lap of a step, in their order: `STEP` is not divided.

    The parts are those of a typical process: of the low median of what processes do by themselves. What the slowest
    does longer than that, all others wait for inside their step.
    """
    own = [sum(lap[name] for name in PARTS if name != STEP) for lap in laps]
    order = sorted(range(len(laps)), key=own.__getitem__)
    typical, slowest = laps[order[(len(laps) - 1) // 2]], order[-1]
    waiting = min(own[slowest] - own[order[(len(laps) - 1) // 2]], typical[STEP])
    parts = {name: typical[name] for name in PARTS} | {STEP: typical[STEP] - waiting, "straggler": waiting}
    late = max((name for name in PARTS if name != STEP), key=lambda name: laps[slowest][name] - typical[name])
    return parts, {"straggler": f"process {slowest}, by its {late}"}


def predicted_parts(
    config: RunConfig, cluster: Cluster, efficiency: Efficiency | None = None, attention: str = "xla"
) -> tuple[dict[str, float], dict[str, str]]:
    """(parts, details) of a step by the time model. Raises: ConfigError where it knows no peak for the dtype."""
    efficiency, layouts = efficiency or efficiency_of(cluster.hardware.name), Candidates.of(config)
    time = score(config, layouts, cluster, attention, efficiency).time
    # What matmuls of any size would take at the efficiency of large ones.
    large = score(config, layouts, cluster, attention, replace(efficiency, half_size=1e-9)).time
    found = {
        name: float(getattr(time, name)[0])
        for name in ("memory", "overhead", "bubble", "input", "tp", "cp", "ep", "pp")
    }
    compute, small = float(large.compute[0]), float(time.compute[0] - large.compute[0])
    parts = {"compute": compute, "small matmuls": small, "memory bandwidth": found["memory"]}
    parts |= {"launches": found["overhead"], "bubble": found["bubble"], "input": found["input"]}
    parts |= {f"{COMMUNICATION}{axis}": found[axis] for axis in ("tp", "cp", "ep", "pp")}
    data = next((axis for axis in ("dp", "replica") if getattr(config.parallel.mesh, axis) > 1), "cp")
    parts[f"{COMMUNICATION}{data}"] = parts.get(f"{COMMUNICATION}{data}", 0.0) + float(time.dp[0])
    return parts, _links(config, cluster)


def _links(config: RunConfig, cluster: Cluster) -> dict[str, str]:
    """The collective that sends most over each axis, and its link."""
    mesh = config.parallel.mesh
    layout = make_layout(config.model, config.parallel, config.part_layers)
    rows = table(predicted(config, layout), mesh)
    apart = strides(dict(zip(AXES, mesh.sizes, strict=True)))
    found = {}
    for axis in AXES:
        ours = [row for row in rows if axis in row.axes.split(", ")]
        if not ours:
            continue
        most = max(ours, key=lambda row: row.sent_bytes)
        link = str(cluster.link_of(mesh.size(axis), apart[axis]))
        used = cluster.inside if link == "inside" else cluster.between
        where = {"inside": "inside the node", "between": "between nodes"}.get(link, "inside the node and between nodes")
        text = f"most in {most.kind.replace('_', '-')}, {where} at {used.bytes_per_s / 1e9:,.0f} GB/s"
        found[f"{COMMUNICATION}{axis}"] = text
    return found


def divided(parts: Mapping[str, float], inside: Mapping[str, float]) -> dict[str, float]:
    """`parts` with the measured length of the step divided as `inside` is; what the host measured stays."""
    step, whole = parts.get(STEP, 0.0), sum(inside.values())
    if not whole:
        return dict(parts)
    found = {name: seconds for name, seconds in parts.items() if name != STEP}
    for name, seconds in inside.items():
        found[name] = found.get(name, 0.0) + step * seconds / whole
    return found


def verdict_of(config: RunConfig, laps: Sequence[Mapping[str, float]], devices: Devices, attention: str) -> Verdict:
    """The verdict on a run whose processes measured these mean laps; the time model divides the step on hardware that
    it knows."""
    parts, details = measured_parts(laps)
    if devices.platform == "cpu":
        kind = "simulated devices have" if devices.simulated else "a CPU has"
        return judge(parts, details, f"{kind} no speed that says anything of a GPU's: `plan --hardware` predicts it")
    hardware, dtype = known_hardware(devices.devices[0].device_kind), config.precision.dtype
    if hardware is None or dtype not in hardware.peak_flops:
        asked = f"{devices.devices[0].device_kind} in {dtype}"
        return judge(parts, details, f"the hardware table has no {asked} to divide it by")
    count = len(devices.devices)
    per_node = min(count, hardware.devices_per_node)
    cluster = Cluster(hardware, -(-count // per_node), per_node)
    try:
        inside, links = predicted_parts(config, cluster, attention=attention)
    except ConfigError as error:
        return judge(parts, details, f"the time model does not divide it: {error}")
    found = judge(divided(parts, inside), details | links)
    compared = (
        f"its {parts[STEP]:.3g} s as predicted for {hardware.title}, where it was to take {sum(inside.values()):.3g}"
    )
    return replace(found, text=f"{found.text} (inside the step {compared})")


def known_hardware(device_kind: str) -> Accelerator | None:
    """The accelerator of the hardware table that JAX calls so, None where the table has none of that name."""
    told = set(re.split(r"[^a-z0-9]+", device_kind.lower()))  # an "NVIDIA GB200" is no B200
    found = (each for name, each in load_hardware().items() if all({w, f"{w}gb"} & told for w in name.split("-")))
    return next(found, None)
