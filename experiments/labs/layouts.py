"""3D layouts: which rank holds what, how three published models are laid out, and why tp stays inside a node."""

import dataclasses
import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from jax.sharding import NamedSharding

from jaxdist.config import RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, make_mesh, parse_mesh
from jaxdist.models.declared import num_parameters
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.presets import PRESETS
from jaxdist.parity import compare, observe, one_device
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import Found, rank, search
from jaxdist.plan.time_model import UNCALIBRATED
from jaxdist.runtime.devices import acquire_devices
from jaxdist.specs import compute_spec
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from ..charts import Cell
from . import drawing
from .exchanges import traced
from .lab import Findings, Guesses, Picture, Table, at_most, equal, holds, lab, refused, table
from .tools import small_run

# --------------------------------------------------------------------------------------------- eight devices, by hand

MESH = parse_mesh("pp=2,dp=2,tp=2")
NODE = 4  # devices of a node
MODEL = dataclasses.replace(PRESETS["proof"], num_layers=4)
BATCH, MICROBATCHES = 16, 4


def devices_in_order(tp_inside: bool = True) -> list:
    """Eight devices as `make_mesh` wants them, pp outermost; or so that tp is outermost and pp innermost."""
    devices = np.array(acquire_devices(8, "cpu").devices[:8]).reshape(2, 2, 2)
    return list((devices if tp_inside else devices.transpose(2, 1, 0)).flat)


def coordinates(number: int) -> dict[str, int]:
    """A rank's coordinates: tp runs fastest, pp slowest."""
    return {"pp": number // 4, "dp": number // 2 % 2, "tp": number % 2}


def held(number: int) -> dict[str, tuple[int, int]]:
    """What a rank has: layers of its stage, heads of its tp rank, rows of its dp rank; [from, to)."""
    at = coordinates(number)
    layers, heads, rows = MODEL.num_layers // 2, MODEL.num_heads // 2, BATCH // 2
    parts = {"layers": (at["pp"], layers), "heads": (at["tp"], heads), "rows": (at["dp"], rows)}
    return {name: (place * size, place * size + size) for name, (place, size) in parts.items()}


def groups(devices: Sequence, axis: str) -> list[list[int]]:
    """Numbers of the devices that talk to each other over an axis."""
    mesh = make_mesh(MESH, devices).devices
    lines = np.moveaxis(mesh, AXES.index(axis), -1).reshape(-1, getattr(MESH, axis))
    first = min(device.id for device in devices)
    return [[device.id - first for device in line] for line in lines]


def leaves_node(devices: Sequence, axes: Sequence[str]) -> bool:
    """Whether a message over these axes crosses from one node to another."""
    return any(len({number // NODE for number in group}) > 1 for axis in axes for group in groups(devices, axis))


def placed_right(devices: Sequence) -> bool:
    """Whether every device has the shard of QKV that its number says: w_qkv[L, D, 3, N, H]."""
    config = small_run(str(MESH), MODEL, batch_size=BATCH)
    leaf = traced(config)[0].layout.leaves["blocks"]["attention"]["w_qkv"]
    sharding = NamedSharding(make_mesh(MESH, devices), compute_spec(leaf))
    first, right = min(device.id for device in devices), True
    for device, index in sharding.devices_indices_map(leaf.compute_shape).items():
        found = [(index[dim].start, index[dim].stop) for dim in (0, 3)]
        right &= found == [held(device.id - first)[name] for name in ("layers", "heads")]
    return right


def bytes_leaving(devices: Sequence) -> tuple[int, int]:
    """(bytes a device sends to another node in a step, those over pp): of our own step, traced."""
    config = small_run(str(MESH), MODEL, batch_size=BATCH)
    found = traced(config)[1]

    def total(kept) -> int:
        return max(sum(c.sent_by(stage, MESH) for c in kept) for stage in range(MESH.pp))

    leaving = total([c for c in found if leaves_node(devices, c.axes)])
    return leaving, total([c for c in found if "pp" in c.axes])


@cache
def reference():
    """Two steps of the same batch on one device."""
    config = small_run(str(MESH), MODEL, batch_size=BATCH)
    batches = random_batches(config, 1) * 2
    return config, batches, observe(one_device(config), acquire_devices(8, "cpu").devices[:1], batches)


def cut(batch: int, dp: int, microbatches: int, refuses: bool = True) -> list[range]:
    """Rows of every micro-batch, of one dp rank after the other."""
    parts = dp * microbatches
    if refuses and batch % parts:
        raise ConfigError(f"batch_size={batch}", f"{parts} must divide it", f"Use {batch // parts * parts}")
    rows = batch // parts
    return [range(part * rows, (part + 1) * rows) for part in range(parts)]


def by_hand(broken: str | None) -> Findings:
    devices = devices_in_order(tp_inside=broken != "order")
    leaving, over_pp = bytes_leaving(devices)
    config, batches, expected = reference()
    found = observe(config, devices, batches)
    lost, error = 0, None
    for batch in (16, 12):
        try:
            lost += batch - sum(map(len, cut(batch, 2, 4, refuses=broken != "remainder")))
        except ConfigError as raised:
            error = raised
    same = all(leaf.ok for leaf in compare(config, found, expected))
    yield holds("every device has the layers and heads that its number says", placed_right(devices))
    yield holds("groups of tp stay in a node", not leaves_node(devices, ("tp",)))
    yield equal("bytes that a device sends to another node: only those over pp", leaving, over_pp)
    yield holds("our step on this mesh: every leaf is that of one device", same)
    yield holds("our step on this mesh: the loss falls", found.losses[1] < found.losses[0])
    yield refused("a batch of 12 for dp=2 and 4 micro-batches is refused", error, "must divide")
    yield equal("rows of the batches of 16 and 12 that are neither trained on nor refused", lost, 0)


def rank_table() -> Table:
    rows = []
    for number in range(8):
        at, spans = coordinates(number), [f"{start} to {stop - 1}" for start, stop in held(number).values()]
        partners = [number ^ 1, number ^ 2, number ^ 4]  # tp runs fastest, pp slowest
        rows.append([number, number // NODE, *at.values(), *spans, *partners])
    return table("ranks", "rank | node | pp | dp | tp | layers | heads | rows | tp with | dp with | pp with", rows)


# --------------------------------------------------------------------------------------------- three published models

H100 = find_hardware("h100")
LLAMA_405B = DecoderConfig(
    126,
    16_384,
    128,
    num_kv_heads=8,
    head_dim=128,
    ffn_width=53_248,
    seq_len=8192,
    vocab_size=128_256,
    rope_theta=500_000.0,
)
CASES = {  # name: (model, nodes of 8, sequences an update)
    "8B": (PRESETS["llama3-8b"], 1, 64),
    "70B": (PRESETS["llama3-70b"], 8, 128),
    "405B": (LLAMA_405B, 64, 512),
}


def base_of(name: str) -> RunConfig:
    model, _, batch = CASES[name]
    return RunConfig(model, ParallelConfig(), precision=PrecisionConfig("bfloat16"), batch_size=batch)


KINDS = {  # of layouts over these three axes: which columns of a search belong
    "fastest": lambda found: found.cp == 1,
    "only dp": lambda found: (found.cp == 1) & (found.pp == 1) & (found.tp == 1),
    "tp=8 and a pipeline": lambda found: (found.cp == 1) & (found.pp > 1) & (found.tp == 8),
}


@cache
def searched(name: str) -> tuple[Found, dict[str, int]]:
    """Every layout, and the fastest that fits of each kind; where none fits, the smallest."""
    found = search(base_of(name), Cluster(H100, CASES[name][1]), "cudnn", UNCALIBRATED)
    best = {}
    for kind, belongs in KINDS.items():
        inside = belongs(found.layouts)
        best |= {kind: int(next(index for index in rank(found) if inside[index]))} if inside.any() else {}
    return found, best


def planned() -> Findings:
    rows = []
    for name, (_, _, batch) in CASES.items():
        found, best = searched(name)
        for kind, at in best.items():
            layouts, time = found.layouts, found.time
            cuts = [int(getattr(layouts, part)[at]) for part in ("replica", "dp", "microbatches", "accumulate", "rows")]
            yield equal(f"{name}, {kind}: dp x micro-batches x rows are the batch", math.prod(cuts), batch)
            settings = f"ZeRO-{layouts.zero[at]}{', sp' * int(layouts.sp[at])}"
            schedule = layouts.schedule_name(at, ParallelConfig()) if layouts.pp[at] > 1 else ""
            layout = ", ".join(filter(None, [str(layouts.mesh(at)), settings, schedule]))
            cells = f"{cuts[4]} x {cuts[2] * cuts[3]}", found.memory.total[at] / 2**30, time.total[at], time.mfu[at]
            rows.append([f"{name} on {found.cluster.num_devices}, {kind}", layout, layouts.remat(at), *cells])
        fits = found.memory.total[best["fastest"]] / 2**30
        yield at_most(f"{name}, fastest: fits 80 GiB less a tenth", fits, 72, unit="GiB")
    columns = "model on H100s | layout | recompute | micro-batches | GiB a device {:.0f} | s a step {:.1f} | MFU {:.0%}"
    yield table("planned", columns, rows)


PARTS = ("compute", "memory", "tp", "dp", "pp", "bubble")


# --------------------------------------------------------------------------------------------- the lab


@lab(
    title="3D layouts",
    question="Where do tp, pp and dp go on a cluster, and what would 8B, 70B and 405B look like?",
    devices=8,
    breaks={
        "order": {"every device has*", "groups of tp*", "bytes that a device sends*"},
        "remainder": {"a batch of 12*", "rows of the batches*"},
    },
)
def run(broken: str | None) -> Findings:
    yield from by_hand(broken)
    if broken:
        return
    yield rank_table()
    yield from planned()
    yield Picture("ranks", draw_ranks)
    yield Picture("time", draw_time)
    yield Guesses(
        rank=5,
        state=16 * num_parameters(LLAMA_405B) / 1e12,
        weights=2 * num_parameters(LLAMA_405B) / 128 / 1e9,
        batch=512,
    )


def draw_ranks():
    cells = []
    for number in range(8):
        at, spans = coordinates(number), [f"{name} {a}–{b - 1}" for name, (a, b) in held(number).items()]
        text = "\n".join([f"rank {number}", f"dp {at['dp']}, tp {at['tp']}", *spans])
        cells.append(Cell(number // NODE, number % NODE, text, at["pp"]))
    names = ("node 0, pp 0", "node 1, pp 1")
    return drawing.grids("pp=2, dp=2, tp=2 on two nodes of four", {"": cells}, {"": names}, "device of the node")


def draw_time():
    best = [(found, at["fastest"]) for found, at in map(searched, CASES)]
    shares = {
        part: [100 * float(getattr(found.time, part)[at] / found.time.total[at]) for found, at in best]
        for part in PARTS
    }
    return drawing.stacks("What a step is made of (predicted)", "% of the step", list(CASES), shares)
