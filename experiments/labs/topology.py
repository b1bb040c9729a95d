"""Topology: what a collective takes on each wire, which axis goes where, and when a faster link stops helping."""

import dataclasses
import tomllib
from functools import cache

import jax
import numpy as np
from jax import lax

from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, parse_mesh
from jaxdist.models.declared import num_parameters
from jaxdist.models.presets import PRESETS
from jaxdist.parallel import all_gather, all_reduce, reduce_scatter, varying
from jaxdist.placement import make_layout
from jaxdist.plan.collective_cost import CollectiveCost, bus_bandwidth_factor, collective_cost, two_level
from jaxdist.plan.hardware import HERE, Cluster, Link, find_hardware
from jaxdist.plan.proof.trace import collectives_of, total_sent
from jaxdist.plan.search import Candidates, Scored, score
from jaxdist.plan.time_model import UNCALIBRATED
from jaxdist.plan.traffic import predicted
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from . import drawing
from .exchanges import on_ranks
from .lab import Findings, Guesses, Picture, Table, at_most, equal, holds, lab, table

MESSAGE = 128 * 2**20
H100 = find_hardware("h100")


NAMES = ("nvlink3", "nvlink4", "nvlink5", "pcie5", "ib400", "ib200", "ethernet100")


@cache
def links() -> dict[str, Link]:
    """Wires of the hardware table; bytes/s are what one device can send in one direction."""
    table = tomllib.loads((HERE / "hardware.toml").read_text(encoding="utf-8"))["links"]
    return {name: Link(name=name, **table[name]) for name in NAMES}


# --------------------------------------------------------------------------------------------- one collective, one link

KINDS = {
    "all_reduce": "ring_all_reduce",
    "all_gather": "ring_all_gather",
    "reduce_scatter": "ring_reduce_scatter",
    "all_to_all": "all_to_all",
    "permute": "",
}


def seconds(kind: str, n: int, size: float, link: Link) -> float:
    cost = collective_cost(KINDS[kind], n, size) if KINDS[kind] else CollectiveCost(1, size)
    return cost.seconds(link.latency_s, link.bytes_per_s)


def link_table() -> Table:
    kinds = " | ".join(f"{kind.replace('_', '-')} {{:,.2f}}" for kind in KINDS)
    rows = [
        [name, link.bytes_per_s / 1e9, *[1e3 * seconds(kind, 8, MESSAGE, link) for kind in KINDS]]
        for name, link in links().items()
    ]
    return table("links", f"link | GB/s {{:,.4g}} | {kinds}", rows)


# --------------------------------------------------------------------------------------------- what a benchmark reports

REPORTED = 360e9  # bus bandwidth, bytes/s


def from_bus_bandwidth(kind: str, n: int, size: float, factor: bool = True) -> float:
    """Seconds of a collective, of the bus bandwidth that a benchmark reports: the speed at which links are used."""
    return (bus_bandwidth_factor(kind, n) if factor else 1.0) * size / REPORTED


def benchmark(broken: bool) -> Findings:
    """The same link speed must come back from every collective and number of ranks, without latency."""
    link = dataclasses.replace(H100.inside, latency_s=0.0, bytes_per_s=REPORTED)
    for kind, n in (("permute", 2), ("all_reduce", 2), ("all_reduce", 8), ("all_reduce", 64), ("all_gather", 8)):
        found, wanted = from_bus_bandwidth(kind, n, MESSAGE, factor=not broken), seconds(kind, n, MESSAGE, link)
        name = f"{kind} over {n} from 360 GB/s of bus bandwidth, ms"
        yield equal(name, 1e3 * found, 1e3 * wanted, within=1e-12)


# --------------------------------------------------------------------------------------------- two levels

INSIDE, ACROSS = 4, 2  # of the simulated cluster: ranks of a node (dp), nodes (replica)


def in_two_levels(x: jax.Array) -> jax.Array:
    """x[S] {U_dp, U_replica} -> x[S]: scatter in the node, add a part across nodes, gather in the node."""
    part = reduce_scatter(x, "dp", 0)
    return all_gather(varying(all_reduce(part, "replica"), "replica"), "dp", 0)


def hierarchical() -> Findings:
    x = np.random.default_rng(0).uniform(-1, 1, (INSIDE * ACROSS, 960))
    run = on_ranks(in_two_levels, INSIDE, ACROSS)
    native = on_ranks(lambda x: lax.psum(x, ("replica", "dp")), INSIDE, ACROSS)
    error = np.abs(np.asarray(run(x)) - np.asarray(native(x))).max()
    mesh, size = MeshShape(replica=ACROSS, dp=INSIDE), x[0].nbytes
    found = collectives_of(run.trace(x).jaxpr, mesh)
    within, beyond = two_level("ring_all_reduce", INSIDE, ACROSS, size)
    inside, across = (total_sent([c for c in found if c.axes == (axis,)], mesh) for axis in ("dp", "replica"))
    to_others = 2 * (ACROSS - 1) / ACROSS * size / INSIDE
    in_node = 2 * (INSIDE - 1) / INSIDE * size
    yield at_most("two levels: error against one psum, float64", error, 1e-14)
    yield equal("two levels: bytes a device sends in its node, 2 (k-1)/k S", inside, in_node)
    yield equal("two levels: bytes it sends to other nodes, 2 (m-1)/m S/k", across, to_others)
    yield holds("two levels: the library counts the same", (within.bytes_sent, beyond.bytes_sent) == (inside, across))


def across_seconds(size: float, inside: int, across: int, port: float, ports: int) -> float:
    """Seconds of the level across nodes, without latency: what all ranks of a node send, over its ports."""
    each = 2 * (across - 1) / across * size / inside
    return each * inside / (port * ports)


def ports(broken: bool) -> Findings:
    """Eight nodes of eight. The hardware table is of one device: of 100 Gb/s Ethernet, a port for eight of them."""
    ethernet, infiniband = links()["ethernet100"], H100.between
    _, beyond = two_level("ring_all_reduce", 8, 8, MESSAGE)
    count = 8 if broken else 1  # as if every device had the port to itself
    shared = across_seconds(MESSAGE, 8, 8, ethernet.quoted_bytes_per_s, count)
    own = across_seconds(MESSAGE, 8, 8, infiniband.bytes_per_s, 8)
    eight, one = (beyond.seconds(0.0, link.bytes_per_s) for link in (infiniband, ethernet))
    yield equal("eight ports of 50 GB/s a node: s across nodes", own, eight, 1e-12)
    yield equal("one port of 12.5 GB/s a node: s across nodes", shared, one, 1e-12)


def ways(size: float) -> dict[str, float]:
    """Seconds of an all-reduce over 64 H100s, 8 a node."""
    within, beyond = two_level("ring_all_reduce", 8, 8, size)
    inside, between, ethernet = H100.inside, H100.between, links()["ethernet100"]
    in_node = within.seconds(inside.latency_s, inside.bytes_per_s)
    return {
        "one ring over InfiniBand": seconds("all_reduce", 64, size, between),
        "two levels": in_node + beyond.seconds(between.latency_s, between.bytes_per_s),
        "two levels, one 100 Gb/s port": in_node + beyond.seconds(ethernet.latency_s, ethernet.bytes_per_s),
    }


# --------------------------------------------------------------------------------------------- which axis on which wire

LAYOUT = ParallelConfig(mesh=parse_mesh("pp=4,dp=2,tp=8"), zero=1, microbatches=64)


@cache
def axis_bytes() -> dict[str, tuple[int, int]]:
    """axis -> (messages, bytes) that a device sends in a step of 70B, of the stage that sends most."""
    config = RunConfig(PRESETS["llama3-70b"], LAYOUT, precision=PrecisionConfig("bfloat16"), batch_size=128)
    found, mesh = predicted(config, make_layout(config.model, LAYOUT, config.part_layers)), LAYOUT.mesh
    by_axis = {axis: [m for m in found if m.axes == (axis,)] for axis in ("tp", "pp", "dp")}
    return {axis: (sum(m.count for m in sent), total_sent(sent, mesh)) for axis, sent in by_axis.items()}


def placement() -> Findings:
    model, sent = PRESETS["llama3-70b"], axis_bytes()
    activation = model.seq_len * model.width * 2
    tables = 2 * model.padded_vocab_size * model.width  # outside the layers: every stage holds, and sums, them
    held = (num_parameters(model) - tables) / 32 + tables / 8
    form = {
        "tp": 64 * 2 * 7 / 8 * activation * (4 * model.num_layers / 4 + 1),  # layers of a stage, and its table
        "pp": 64 * 2 * activation + 2 * 3 / 4 * 4 * tables / 8 / 2,  # forward and backward; gradients of the tables
        "dp": 1 / 2 * (4 + 2) * held,  # fp32 gradients scattered, bf16 weights gathered
    }
    rows = []
    for axis, (count, size) in sent.items():
        name = f"70B over {axis}: GB in a step, by a closed form"
        yield equal(name, size / 1e9, form[axis] / 1e9, within=1e-3, unit="GB")
        rows.append([axis, count, size / 1e9, *[size / link.bytes_per_s for link in (H100.inside, H100.between)]])
    columns = "axis | messages {:,} | GB sent {:,.1f} | s on NVLink {:,.2f} | s on InfiniBand {:,.2f}"
    yield table("axes", columns, rows)


# --------------------------------------------------------------------------------------------- a faster link

SPEEDS = (3.125e9, 6.25e9, 12.5e9, 25e9, 50e9, 100e9, 200e9, 400e9)


@cache
def at_speed(bytes_per_s: float) -> Scored:
    """8B with ZeRO-3 on 64 H100s, one sequence each, with another link between nodes."""
    parallel = ParallelConfig(mesh=parse_mesh("dp=64"), zero=3, remat="block", overlap=True)
    config = RunConfig(PRESETS["llama3-8b"], parallel, precision=PrecisionConfig("bfloat16"), batch_size=64)
    link = dataclasses.replace(H100.between, bytes_per_s=bytes_per_s)
    return score(config, Candidates.of(config), Cluster(H100, 8, between=link), "cudnn", UNCALIBRATED)


def sent_seconds(bytes_per_s: float) -> float:
    """Seconds of ZeRO-3's messages: bf16 weights gathered twice, fp32 gradients scattered, in two levels."""
    psi, time = num_parameters(PRESETS["llama3-8b"]), 0.0
    for size in (2 * psi, 2 * psi, 4 * psi):
        within, beyond = two_level("ring_all_gather", 8, 8, size)
        time += within.seconds(H100.inside.latency_s, H100.inside.bytes_per_s * UNCALIBRATED.inside)
        time += beyond.seconds(H100.between.latency_s, bytes_per_s * UNCALIBRATED.between)
    return time


def sweep() -> Findings:
    rows, totals, errors = [], [], []
    for speed in SPEEDS:
        time = at_speed(speed).time
        shown, hidden, total = (float(column[0]) for column in (time.dp, time.dp_hidden, time.total))
        totals.append(total)
        errors.append(abs(shown + hidden - sent_seconds(speed)) / sent_seconds(speed))
        rows.append([speed / 1e9, total - shown, shown + hidden, shown, total, str(time.binds[0])])
    yield at_most("link sweep: largest relative error of the closed form for what is sent", max(errors), 0.1)
    yield holds("link sweep: a faster link is never slower", totals == sorted(totals, reverse=True))
    yield equal("link sweep: the step at 400 GB/s over that at 100", totals[-1] / totals[5], 1, within=0.03)
    columns = "work, s {:.2f} | sent, s {:.2f} | waited for, s {:.2f} | step, s {:.2f} | binds"
    yield table("sweep", f"GB/s between nodes {{:g}} | {columns}", rows)


# --------------------------------------------------------------------------------------------- the lab


@lab(
    title="Links and topology",
    question="Which axis belongs on which wire, and when does a faster link stop helping?",
    devices=8,
    breaks={
        "shared-port": {"one port of 12.5 GB/s*"},
        "bus-bandwidth": {"all_reduce over [!2]* from 360 GB/s*", "all_gather over 8 from 360 GB/s*"},
    },
)
def run(broken: str | None) -> Findings:
    with jax.enable_x64(True):
        yield from hierarchical()
    yield from ports(broken == "shared-port")
    yield from benchmark(broken == "bus-bandwidth")
    if broken:
        return
    yield link_table()
    yield from placement()
    sizes = [2.0**20, 2.0**27, 2.0**33]
    rows = [[way, *[1e3 * ways(size)[way] for size in sizes]] for way in ways(1.0)]
    yield table("levels", "ms | " + " | ".join(f"{size / 2**20:,.0f} MiB {{:,.2f}}" for size in sizes), rows)
    yield from sweep()
    yield Picture("sweep", draw_sweep)
    nvlink = dataclasses.replace(H100.inside, latency_s=0.0)
    yield Guesses(
        nvlink=1e3 * seconds("all_reduce", 8, MESSAGE, nvlink),
        report=1e3 * from_bus_bandwidth("all_reduce", 8, 1e9),
        levels=(2 * 63 / 64) / (2 * 7 / 8 / 8),
    )


def draw_sweep():
    speeds = [speed / 1e9 for speed in SPEEDS]
    times = [at_speed(speed).time for speed in SPEEDS]
    curves = {
        "step": (speeds, [float(t.total[0]) for t in times]),
        "sent": (speeds, [sent_seconds(speed) for speed in SPEEDS]),
        "work": (speeds, [float(t.total[0] - t.dp[0]) for t in times]),
    }
    return drawing.lines("8B, ZeRO-3 on 64 H100s (predicted)", "GB/s between nodes", "seconds", curves, log_x=True)
