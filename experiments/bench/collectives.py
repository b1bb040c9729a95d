"""Every collective over sizes, with algbw and busbw as NCCL's tests define them."""

import statistics
import time
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, make_mesh, parse_mesh
from jaxdist.parallel import collectives as comm
from jaxdist.parallel import exchange
from jaxdist.runtime.devices import acquire_devices

from .flags import BenchFlags
from .rows import Measured, Row

ITEMSIZE = 4
ROUNDS = 10  # in one call, so that a call's own cost is shared

# name -> (local function over `axis`, bytes of a local input for a message of S bytes over n ranks,
#          busbw / algbw over n ranks). S is the larger of a rank's input and output, as in NCCL's tests.
COLLECTIVES = {
    "all_reduce": (comm.all_reduce, lambda s, n: s, lambda n: 2 * (n - 1) / n),
    "all_gather": (lambda x, axis: comm.all_gather(x, axis, 0), lambda s, n: s // n, lambda n: (n - 1) / n),
    "reduce_scatter": (lambda x, axis: comm.reduce_scatter(x, axis, 0), lambda s, n: s, lambda n: (n - 1) / n),
    "all_to_all": (lambda x, axis: exchange.all_to_all(x, axis, 0, 0), lambda s, n: s, lambda n: (n - 1) / n),
    "permute": (lambda x, axis: comm.permute(x, axis, 1), lambda s, n: s, lambda n: 1.0),
}


def bench_collectives(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """On the axis of --mesh (default dp=4): seconds of each, and on real devices algbw = S / t and its busbw.

    Simulated devices copy within one memory: their time is given beside that of a plain copy of the same bytes, and
    no bandwidth.
    """
    shape = parse_mesh(flags.mesh or "dp=4")
    axes = [axis for axis, size in zip(AXES, shape.sizes, strict=True) if size > 1]
    if len(axes) != 1:
        raise ConfigError(f"--mesh {flags.mesh}", "exactly one axis must be above 1", "Use --mesh dp=4")
    (axis,), num_ranks = axes, shape.num_devices
    devices = acquire_devices(num_ranks, flags.device)
    mesh = make_mesh(shape, devices.devices)
    rows = []
    for name, (function, input_bytes, bus) in COLLECTIVES.items():
        if flags.only not in name:
            continue
        for size in flags.message_bytes:
            least = ITEMSIZE * num_ranks**2  # a number for each pair of ranks
            if size < least:
                required = f"must be at least {least}, a number for each pair of ranks"
                raise ConfigError(f"--message-bytes {size}", required, "Use more")
            size = size // least * least  # what is sent, and named
            local = input_bytes(size, num_ranks) // ITEMSIZE
            seconds = time_rounds(function, mesh, axis, local, flags.repeats)
            label = f"{name} {size:,} bytes on {num_ranks}"
            if devices.simulated:
                copies = time_rounds(lambda x, _: -x, mesh, axis, local, flags.repeats)
                ratio = statistics.median(seconds) / statistics.median(copies)
                rows.append(Row.of(label, seconds, "s", against="a copy", ratio=ratio, simulated=True))
                continue
            rows.append(Row.of(f"{label}: time", seconds, "s"))
            for bandwidth, factor in (("algbw", 1.0), ("busbw", bus(num_ranks))):
                rows.append(Row.of(f"{label}: {bandwidth}", [factor * size / s for s in seconds], "bytes/s"))
    return rows, devices


def time_rounds(function, mesh, axis: str, num_elements: int, repeats: int) -> list[float]:
    """Seconds of one call each, from `ROUNDS` in a row that wait for each other."""

    def rounds(x):
        def body(_, carry):
            y = function(carry, axis)
            # The next round's input depends on this one's output, at the cost of one element.
            return carry.at[0].add(0 * y.reshape(-1)[0])

        return jax.lax.fori_loop(0, ROUNDS, body, comm.varying(x, (axis,)))

    spec = P(axis)
    on_mesh = partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=True)
    x = jax.device_put(jnp.ones(num_elements * mesh.shape[axis], jnp.float32), jax.NamedSharding(mesh, spec))
    run = jax.jit(on_mesh(rounds))
    jax.block_until_ready(run(x))
    found = []
    for _ in range(repeats):
        start = time.perf_counter()
        jax.block_until_ready(run(x))
        found.append((time.perf_counter() - start) / ROUNDS)
    return found
