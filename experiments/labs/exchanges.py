"""What the labs about communication share: arrays of ranks, what a traced program sends, and two real processes.

python -m experiments.labs.exchanges JSON is one of the two processes.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxdist.config import RunConfig
from jaxdist.mesh import MeshShape, make_abstract_mesh, make_mesh, parse_mesh
from jaxdist.parallel import rank, varying
from jaxdist.plan.collective_cost import CollectiveCost
from jaxdist.plan.proof.trace import Collective, collectives_of, step_collectives
from jaxdist.runtime import processes
from jaxdist.runtime.devices import acquire_devices
from jaxdist.specs import drop_unit_axes
from jaxdist.train.program import Program, build_program

from ..bench.workers import Worker
from ..launch import free_port

WARM_UP, REPEATS = 10, 30
QUICKLY = {"xla_backend_optimization_level": 0}  # for what is compiled once and run a few times


def on_mesh(mesh: str, body: Callable, in_specs, out_specs) -> Callable:
    """`body`, run by every rank of a mesh of simulated devices, as a function of global arrays."""
    shape = parse_mesh(mesh)
    devices = make_mesh(shape, acquire_devices(shape.num_devices, "cpu").devices[: shape.num_devices])
    specs = drop_unit_axes_of((in_specs, out_specs), shape)
    run = jax.shard_map(body, mesh=devices, in_specs=specs[0], out_specs=specs[1])
    return jax.jit(run, compiler_options=QUICKLY)


def drop_unit_axes_of(specs, shape: MeshShape):
    return jax.tree.map(lambda spec: drop_unit_axes(spec, shape), specs, is_leaf=lambda x: isinstance(x, P))


def sent_over(run: Callable, mesh: str, *args) -> list[Collective]:
    """The collectives of a jitted program on a mesh, read from its text."""
    return collectives_of(run.trace(*args).jaxpr, parse_mesh(mesh))


def accepted(run: Callable, *args) -> bool:
    """Whether JAX's types accept the program; they refuse what may differ between ranks and is said to be equal."""
    try:
        jax.eval_shape(run, *args)
    except ValueError:
        return False
    return True


def relative_error(found, wanted) -> float:
    """The worst leaf's, by norms."""
    pairs = zip(jax.tree.leaves(jax.device_get(found)), jax.tree.leaves(wanted), strict=True)
    return max(float(np.linalg.norm(np.asarray(f) - np.asarray(w)) / np.linalg.norm(w)) for f, w in pairs)


def spread(copies) -> float:
    """The largest difference between ranks' copies, which are entries of each leaf's first dim."""
    return max(float(np.ptp(np.asarray(leaf), axis=0).max()) for leaf in jax.tree.leaves(copies))


def on_ranks(body: Callable, n: int, replicas: int = 1) -> Callable:
    """`body` as a function of global arrays: entry r of the first dim is rank r's own array, in and out."""

    def local(*xs):
        return jax.tree.map(lambda y: y[None], body(*(x[0] for x in xs)))

    spec = P(("replica", "dp"))
    return on_mesh(f"replica={replicas},dp={n}", local, spec, spec)


@jax.custom_vjp
def enter_without_sum(x):
    """`enter` of tensor parallelism, but backward goes on with only rank 0's part of dx."""
    return varying(x, "tp")


enter_without_sum.defvjp(
    lambda x: (varying(x, "tp"), None), lambda _, dx: (lax.psum(jnp.where(rank("tp") == 0, dx, 0), "tp"),)
)


def sent_by(run: Callable, n: int, *args, replicas: int = 1) -> CollectiveCost:
    """Messages one after the other, and the bytes in them, of a jitted program of `on_ranks`; read from its text."""
    mesh = MeshShape(dp=n, replica=replicas)
    found = collectives_of(run.trace(*args).jaxpr, mesh)
    return CollectiveCost(sum(each.count for each in found), sum(each.sent_bytes(mesh) for each in found))


@cache
def traced(config: RunConfig) -> tuple[Program, tuple[Collective, ...]]:
    """The program of a run, on a mesh that has no devices, and every collective of a step."""
    with jax.enable_x64(config.precision.dtype == "float64"):
        program = build_program(config, make_abstract_mesh(config.parallel.mesh))
        step = program.step.trace(program.abstract_state(), program.abstract_batch())
        return program, tuple(step_collectives(program, step))


# ------------------------------------------------------------------------------------------------- two real processes


class Exchange(NamedTuple):
    """All-reduces between two processes: (bytes, median seconds) of each size, and whether the sums were right."""

    times: list[tuple[int, float]]
    right: bool


@cache
def between_processes(sizes: Sequence[int]) -> Exchange:
    """Sum fp32 arrays of these bytes over two processes of this machine, which talk over TCP (gloo).

    Raises: WorkerEnded where one of them fails.
    """
    asked = {"address": f"127.0.0.1:{free_port()}", "sizes": sizes}
    workers = [Worker(f"{__package__}.exchanges", asked | {"index": index}) for index in range(2)]
    try:
        found = [worker.answer() for worker in workers]
    finally:
        for worker in workers:
            worker.close()
    return Exchange([tuple(pair) for pair in found[0]["times"]], all(each["right"] for each in found))


def main(address: str, index: int, sizes: list[int]) -> None:
    """One of two processes: every size summed often, timed from a common start to the result."""
    os.environ.pop("XLA_FLAGS", None)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 1)
    processes.join(address, 2, index)
    mesh = Mesh(np.asarray(jax.devices()), ("dp",), axis_types=(AxisType.Auto,))
    here = jax.sharding.NamedSharding(mesh, P("dp"))
    add = jax.jit(jax.shard_map(lambda x: lax.psum(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P()))
    times, right = [], True
    for size in sizes:
        mine = np.full((1, size // 4), index + 1, np.float32)
        x = jax.make_array_from_process_local_data(here, mine)
        right &= bool((np.asarray(add(x).addressable_data(0)) == 3).all())
        taken = []
        for _ in range(WARM_UP + REPEATS):
            begun = time.perf_counter()
            add(x).block_until_ready()
            taken.append(time.perf_counter() - begun)
        times.append((size, float(np.median(taken[WARM_UP:]))))
    print(json.dumps({"times": times, "right": right}), flush=True)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
