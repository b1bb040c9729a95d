"""The same model, batch and optimiser by others, in the same run: plain JAX, automatic sharding, PyTorch."""

import importlib.util
import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import numpy as np
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.markup import escape

from jaxdist.commands import install_text
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_mesh
from jaxdist.models import registry
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.specs import rows_spec, shardings, storage_specs
from jaxdist.train.program import build_program

from .. import plain
from ..cli import require_formulas
from ..launch import free_port
from .flags import BenchFlags
from .overhead import timed_plain
from .rows import Measured, Row, ratios
from .speed import CONVENTIONS, speed_rows
from .timing import Timed, full_batch, timed, timed_step, with_parallel
from .workers import Worker, WorkerEnded

STEPS = 3  # in one turn of a peer
ONLY = "one device"

# (title, our mesh, our settings, peers beside automatic sharding: (name, code, compiled, wrap))
ONE_DEVICE = (
    ("PyTorch", "torch", False, "none"),
    ("PyTorch, torch.compile", "torch", True, "none"),
    ("transformers", "transformers", False, "none"),
    ("transformers, torch.compile", "transformers", True, "none"),
)
MANY_DEVICES = (("PyTorch DDP", "torch", False, "ddp"), ("PyTorch FSDP2", "torch", False, "fsdp"))
MESHES = {
    4: [("dp=4", {}), ("dp=4", {"zero": 1}), ("dp=4", {"zero": 3}), ("dp=2,tp=2", {}), ("pp=2,dp=2", {})],
    8: [
        ("dp=8", {}),
        ("dp=8", {"zero": 1}),
        ("dp=8", {"zero": 3}),
        ("dp=4,tp=2", {}),
        ("pp=2,dp=4", {"microbatches": 2}),
    ],
}
# The most that ours may take of a peer's time: of PyTorch's own model on one device, and of others on the same mesh.
TARGETS = {"PyTorch": 1.0, "automatic sharding": 0.7, "PyTorch DDP": 1.0, "PyTorch FSDP2": 0.85}


@dataclass
class Peer:
    """Something that trains: `run(n)` makes n steps and returns the seconds of one.

    peak_bytes: by the compiler's plan; of PyTorch what its tensors took at most. precision: where it is not fp32.
    """

    name: str
    run: Callable[[int], float]
    close: Callable[[], None] = lambda: None
    peak_bytes: int | None = None
    sent_bytes: int | None = None
    precision: str = ""


def bench_peers(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """In turn, round after round; every peer's ratio is the median of its rounds' ratios to ours.

    In bfloat16 on one device alone: ours with fp32 masters, PyTorch under autocast. Models other than GPT-2 on one
    device alone too, beside transformers.
    """
    dtype = config.precision.dtype
    if flags.only != ONLY:
        require_formulas("bench", config.model)
    if dtype not in ("float32", "bfloat16"):
        raise ConfigError(f"peers --dtype {dtype}", "peers must train in float32 or bfloat16", "Use --dtype bfloat16")
    if dtype != "float32" and flags.only != ONLY:
        raise ConfigError(
            f"peers --dtype {dtype}", "must be float32, as the peers are on meshes", f"Add --only {ONLY!r}"
        )
    devices = acquire_devices(1 if flags.only == ONLY else 8, flags.device)
    rows = []
    groups: list[tuple[str, Callable[[], list[Peer | None]]]] = [(ONLY, lambda: one_device(config, devices, console))]
    for count, meshes in MESHES.items():
        for mesh, more in meshes:
            name = " ".join([mesh, *(f"{key}={value}" for key, value in more.items())])
            if flags.only not in name:
                continue
            parallel = with_parallel(config, mesh, more)  # now, so that a batch it cannot split is refused at once
            groups.append((name, lambda c=parallel, n=count: many_devices(c, n, devices, console)))
    for title, make in groups:
        if flags.only not in title:
            continue
        peers = make()
        try:
            rows += race(title, peers, flags.repeats, config, devices)
        finally:
            for peer in peers:
                peer.close()
    if any("MFU" in row.name for row in rows):
        console.print(CONVENTIONS)
    return rows, devices


def race(title: str, peers: Sequence[Peer], repeats: int, config: RunConfig, devices: Devices) -> list[Row]:
    """Rounds in which each peer makes `STEPS` steps. The first peer is ours."""
    alone = title == ONLY
    seconds: list[list[float]] = [[] for _ in peers]
    for _ in range(repeats):
        for peer, found in zip(peers, seconds, strict=True):
            found.append(peer.run(STEPS))
    rows = []
    for peer, theirs in zip(peers, seconds, strict=True):
        ratio = statistics.median(ratios(seconds[0], theirs))
        name = f"{title}: {peer.name}"
        more = {} if peer is peers[0] else {"against": f"{title}: {peers[0].name}", "ratio": 1 / ratio}
        rows.append(Row.of(name, theirs, "s", simulated=not alone, **more))
        rows += speed_rows(name, theirs, config, devices, 1) if alone and isinstance(config.model, GPT2Config) else []
        peak = f"peak, {peer.precision}" if peer.precision else "peak"
        rows += [Row(f"{name}: {peak}", peer.peak_bytes, "bytes")] if peer.peak_bytes else []
        rows += [Row(f"{name}: sent", peer.sent_bytes, "bytes")] if peer.sent_bytes else []
        if peer.name in TARGETS:
            more = {"target": TARGETS[peer.name]}
            rows.append(Row(f"{title}, {peers[0].name} over {peer.name}", ratio, "", **more))
    return rows


def one_device(config: RunConfig, devices: Devices, console: Console) -> list[Peer]:
    dtype, fp32 = config.precision.dtype, "float32" + (", TF32 products" if devices.platform == "gpu" else "")
    mixed = dtype != "float32"
    precision = f"{dtype}, fp32 masters" if mixed else fp32
    peers = [jax_peer("jaxdist", timed_step(with_parallel(config, "", {}), devices), precision)]
    ours = isinstance(config.model, GPT2Config)
    if mixed or not ours:
        console.print("plain jax.jit: not run, it is a GPT-2 in float32")
    else:
        peers.append(jax_peer("plain jax.jit", timed_plain(config, devices), precision))
    precision = f"fp32, autocast to {dtype}" if mixed else fp32
    entries = ONE_DEVICE if ours else [("transformers", "transformers", False, "none")]
    return peers + torch_peers(config, 1, entries, devices, console, precision)


def many_devices(config: RunConfig, count: int, devices: Devices, console: Console) -> list[Peer]:
    peers = [jax_peer("jaxdist", timed_step(config, devices))]
    if config.parallel.mesh.pp == 1:
        peers.append(jax_peer("automatic sharding", timed_automatic(config, devices)))
    if devices.platform != "cpu":  # one card cannot be many processes' card
        return peers
    return peers + torch_peers(config, count, MANY_DEVICES, devices, console)


def jax_peer(name: str, step: Timed, precision: str = "") -> Peer:
    return Peer(name, step.run_several, peak_bytes=step.peak_bytes, sent_bytes=step.sent_bytes, precision=precision)


def torch_peers(
    config: RunConfig, num_processes: int, entries, devices: Devices, console: Console, precision: str = ""
) -> list[Peer]:
    """Processes of `torch_peer`, ready; without those that cannot run here, whose reasons go to the console.

    On a GPU all start at once, because `torch.compile` takes a minute; on a CPU one after the other.
    """
    at_once = devices.platform == "gpu"
    started = []
    for name, code, compiled, wrap in entries:
        missing = [package for package in ("torch", code) if importlib.util.find_spec(package) is None]
        if missing:
            text = f"{name}: not run, {missing[0]} is not installed ({install_text('bench')})"
            console.print(text, markup=False)
            continue
        workers = start_workers(config, num_processes, code, compiled, wrap, devices)
        started.append((name, workers, None if at_once else ready(name, workers, console)))
    found = [(name, workers, peak or ready(name, workers, console)) for name, workers, peak in started]
    return [torch_peer(name, workers, first, precision) for name, workers, first in found if first]


def start_workers(config, num_processes: int, code: str, compiled: bool, wrap: str, devices: Devices) -> list[Worker]:
    asked = {
        "model": registry.to_dict(config.model),
        "code": code,
        "compiled": compiled,
        "wrap": wrap,
        "num_processes": num_processes,
        "port": free_port(),
        "device": "cuda" if devices.platform == "gpu" else "cpu",  # where ours runs
        "dtype": config.precision.dtype,
    }
    batch = {k: np.asarray(v).tolist() for k, v in full_batch(config).items() if k in ("inputs", "targets")}
    workers = [Worker(f"{__package__}.torch_peer", asked | {"rank": rank}) for rank in range(num_processes)]
    for worker in workers:
        worker.send(json.dumps(batch))
    return workers


def ready(name: str, workers: list[Worker], console: Console) -> dict | None:
    """The answer to some first steps of all; None, and the reason on the console, where one of them ended."""
    try:
        for worker in workers:
            worker.answer()
        return ask(workers, 2)
    except WorkerEnded as ended:
        console.print(f"{name}: not run ({escape(str(ended))})")
        for worker in workers:
            worker.close()
        return None


def ask(workers: list[Worker], num_steps: int) -> dict:
    """The slowest one's answer."""
    for worker in workers:
        worker.send(str(num_steps))
    return max((worker.answer() for worker in workers), key=lambda answer: answer["seconds"])


def timed_automatic(config: RunConfig, devices: Devices) -> Timed:
    """The same training under plain `jax.jit`: parameters are placed as our step holds them, moments as our optimiser
    does, the batch over the data axes; what moves between is GSPMD's choice.
    """
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    mesh = Mesh(program.mesh.devices, program.mesh.axis_names, axis_types=(AxisType.Auto,) * program.mesh.devices.ndim)
    decay = jax.tree.map(lambda leaf: leaf.param.decay, program.layout.leaves)
    init, step, optimizer = plain.make_step(config, decay)
    params = program.init(config.seed).params
    replicated = NamedSharding(mesh, PartitionSpec())
    storage = shardings(mesh, storage_specs(program.layout))
    state_shapes = jax.eval_shape(init, params)
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state_shapes[1], storage, transform_non_params=lambda _: replicated
    )
    placed = (shardings(mesh, program.specs.params), moments)
    batch_sharding = NamedSharding(mesh, rows_spec(program.layout.mesh))
    batch = jax.device_put({k: v for k, v in full_batch(config).items() if k != "rows"}, batch_sharding)
    state = jax.jit(init, out_shardings=placed)(jax.device_put(params, placed[0]))
    compiled = (
        jax.jit(step, in_shardings=(placed, batch_sharding), out_shardings=(placed, replicated), donate_argnums=0)
        .lower(state, batch)
        .compile()
    )
    return timed(compiled, state, batch, config.parallel.mesh)


def torch_peer(name: str, workers: list[Worker], first: dict, precision: str) -> Peer:
    def close():
        for worker in workers:
            worker.close()

    def run(count: int) -> float:
        return ask(workers, count)["seconds"] / count

    return Peer(name, run, close, peak_bytes=first["peak_bytes"], precision=precision)
