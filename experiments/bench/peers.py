"""The same model, batch and optimiser by others, in the same run: plain JAX, automatic sharding, PyTorch."""

import dataclasses
import importlib.util
import json
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from experiments.bench.automatic import timed_automatic
from experiments.bench.flags import BenchFlags
from experiments.bench.overhead import timed_plain
from experiments.bench.rows import Measured, Row, ratios
from experiments.bench.timing import Timed, full_batch, timed_step, with_parallel
from jaxdist.config import RunConfig
from jaxdist.runtime import Devices, acquire_devices

STEPS = 3  # in one turn of a peer

# (title, our mesh, our settings, peers beside automatic sharding: (name, code, compiled, wrap))
ONE_DEVICE = (
    ("PyTorch", "torch", False, "none"),
    ("PyTorch, torch.compile", "torch", True, "none"),
    ("transformers GPT2LMHeadModel", "transformers", False, "none"),
    ("transformers GPT2LMHeadModel, torch.compile", "transformers", True, "none"),
)
MANY_DEVICES = (("PyTorch DDP", "torch", False, "ddp"), ("PyTorch FSDP2", "torch", False, "fsdp"))
MESHES = {
    4: [("dp=4", {}), ("dp=4", {"zero": 1}), ("dp=4", {"zero": 3}), ("dp=2,tp=2", {}), ("pp=2,dp=2", {})],
    8: [("dp=8", {}), ("dp=8", {"zero": 1}), ("dp=8", {"zero": 3}), ("dp=4,tp=2", {}), ("pp=2,dp=4", {})],
}
DDP_TARGET = 0.25  # of the time of DDP over gloo
TORCH_TARGET = 1.15  # of the time of the fastest PyTorch on one device


@dataclass
class Peer:
    """Something that trains: `run(n)` makes n steps and returns the seconds of one."""

    name: str
    run: Callable[[int], float]
    close: Callable[[], None] = lambda: None
    peak_bytes: int | None = None
    sent_bytes: int | None = None


def bench_peers(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """In turn, round after round; every peer's ratio is the median of its rounds' ratios to ours."""
    devices = acquire_devices(8, flags.device)
    console.print(f"devices: {devices.description}")
    rows, met = [], []
    groups: list[tuple[str, Callable[[], list[Peer | None]], dict[str, float]]] = [
        ("one device", lambda: one_device(config, devices, console), dict.fromkeys(["PyTorch"], TORCH_TARGET)),
    ]
    for count, meshes in MESHES.items():
        for mesh, more in meshes:
            name = " ".join([mesh, *(f"{key}={value}" for key, value in more.items())])
            targets = {"automatic sharding": 1.0, "PyTorch DDP": DDP_TARGET}
            groups.append(
                (name, lambda m=mesh, s=more, n=count: many_devices(config, m, s, n, devices, console), targets)
            )
    for title, make, targets in groups:
        if flags.only not in title:
            continue
        peers = make()
        try:
            table, found, ok = race(title, peers, flags.repeats, targets, simulated=title != "one device")
        finally:
            for peer in peers:
                peer.close()
        console.print(table)
        rows += found
        met += ok
    return rows, devices, all(met)


def race(title: str, peers: Sequence[Peer], repeats: int, targets: dict[str, float], simulated: bool):
    """Rounds in which each peer makes `STEPS` steps: (table, rows, which targets are met). The first peer is ours."""
    seconds: list[list[float]] = [[] for _ in peers]
    for _ in range(repeats):
        for peer, found in zip(peers, seconds, strict=True):
            found.append(peer.run(STEPS))
    table = Table(
        title, "s/step", "ours / theirs", "spread", "peak MiB", "sent MiB", "target", box=None, header_style="bold"
    )
    rows, met = [], []
    for peer, theirs in zip(peers, seconds, strict=True):
        pairs = ratios(seconds[0], theirs)
        ratio, target = statistics.median(pairs), next((t for n, t in targets.items() if peer.name == n), None)
        sizes = ["" if not size else f"{size / 2**20:.1f}" for size in (peer.peak_bytes, peer.sent_bytes)]
        mark = "" if target is None else f"{target:.2f} " + ("[green]met[/]" if ratio <= target else "[red]missed[/]")
        spread = f"{pairs[0]:.2f}-{pairs[-1]:.2f}"
        table.add_row(peer.name, f"{statistics.median(theirs):.3f}", f"{ratio:.2f}", spread, *sizes, mark)
        more = {} if peer is peers[0] else {"against": f"{title}: {peers[0].name}", "ratio": 1 / ratio}
        rows.append(Row.of(f"{title}: {peer.name}", theirs, "s", simulated=simulated, **more))
        if target is not None:
            met.append(ratio <= target)
    return table, rows, met


def one_device(config: RunConfig, devices: Devices, console: Console) -> list[Peer]:
    peers = [
        jax_peer("jaxdist", timed_step(with_parallel(config, "", {}), devices)),
        jax_peer("plain jax.jit", timed_plain(config, devices)),
    ]
    return peers + [p for entry in ONE_DEVICE if (p := torch_peer(config, 1, *entry, devices, console)) is not None]


def many_devices(config, mesh: str, more: dict, count: int, devices: Devices, console: Console) -> list[Peer]:
    parallel = with_parallel(config, mesh, more)
    peers = [jax_peer("jaxdist", timed_step(parallel, devices))]
    if parallel.parallel.mesh.pp == 1:
        peers.append(jax_peer("automatic sharding", timed_automatic(parallel, devices)))
    if devices.platform != "cpu":  # one card cannot be many processes' card
        return peers
    return peers + [
        p for entry in MANY_DEVICES if (p := torch_peer(config, count, *entry, devices, console)) is not None
    ]


def jax_peer(name: str, step: Timed) -> Peer:
    def run(count: int) -> float:
        return sum(step.run() for _ in range(count)) / count

    return Peer(name, run, peak_bytes=step.peak_bytes, sent_bytes=step.sent_bytes)


def torch_peer(
    config: RunConfig, num_processes: int, name: str, code: str, compiled: bool, wrap: str, devices: Devices, console
) -> Peer | None:
    """Processes of `torch_peer`, ready; None, and the reason on the console, where it cannot run here."""
    missing = [package for package in ("torch", code) if importlib.util.find_spec(package) is None]
    if missing:
        console.print(f"{name}: not run, {missing[0]} is not installed (pip install 'jaxdist[bench]')")
        return None
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = {
        "model": dataclasses.asdict(config.model),
        "code": code,
        "compiled": compiled,
        "wrap": wrap,
        "num_processes": num_processes,
        "port": port,
        "device": "cuda" if devices.platform == "gpu" else "cpu",  # where ours runs
    }
    batch = {k: np.asarray(v).tolist() for k, v in full_batch(config).items() if k in ("inputs", "targets")}
    children = []
    for rank in range(num_processes):
        log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [sys.executable, "-m", "experiments.bench.torch_peer", json.dumps(asked | {"rank": rank})]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True)
        child.log = log
        children.append(child)

    def tell(line: str) -> list[dict]:
        for child in children:
            child.stdin.write(line + "\n")
            child.stdin.flush()
        answers = [child.stdout.readline() for child in children]
        if not all(answers):
            raise BrokenPipeError
        return [json.loads(answer) for answer in answers]

    def close():
        for child in children:
            child.kill()
            child.wait()
            child.log.close()

    try:
        tell(json.dumps(batch))
        tell("2")  # warm
    except (BrokenPipeError, json.JSONDecodeError):
        children[0].wait(30)
        children[0].log.seek(0)
        lines = children[0].log.read().strip().splitlines() or ["no message"]
        console.print(f"{name}: not run ({escape(lines[-1])})")
        close()
        return None
    return Peer(name, lambda count: max(answer["seconds"] for answer in tell(str(count))) / count, close)
