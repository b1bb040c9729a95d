"""The pipeline's executor on one stage, against `jax.grad`: values, and what its loops cost."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.parallel.pipeline.builders import make_schedule
from jaxdist.parallel.pipeline.simple import pipeline
from jaxdist.runtime.devices import acquire_devices

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import repeated

TOLERANCE = 1e-5  # relative, of the loss and of the gradients' L2 norm


def bench_executor(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """A ZB-V of one stage, whose loops have trip counts that are data, on layers of one --width x --width product.

    One device runs every action, so the time beyond that of `jax.grad` is the executor's own.
    """
    devices = acquire_devices(1, flags.device)
    width, num_layers = config.model.width, config.model.num_layers
    console.print(f"{num_layers} layers of {width} x {width}")
    schedule = make_schedule("zb-v", 1, 8)
    mesh = Mesh(np.asarray(devices.devices[:1]), ("pp",), axis_types=(AxisType.Auto,))
    keys = jax.random.split(jax.random.key(0), 3)
    weights = jax.random.normal(keys[0], (schedule.num_parts, max(num_layers // 2, 1), width, width)) * width**-0.5
    inputs, targets = jax.random.normal(keys[1], (2, schedule.num_microbatches, width, width))

    def part(weights, x):
        return lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, weights)[0]

    def distance(y, target):
        return jnp.square(y - target).sum()

    def plain(weights, inputs, targets):
        def of_micro(weights, x, target):
            for each in range(schedule.num_parts):
                x = part(weights[each], x)
            return distance(x, target)

        def add(sums, micro):
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(of_micro)(weights, *micro)), None

        return lax.scan(add, (jnp.float32(0), jnp.zeros_like(weights)), (inputs, targets))[0]

    executor = pipeline(part, distance, schedule)
    on_mesh = jax.jit(jax.shard_map(executor, mesh=mesh, in_specs=(P(), P(), P()), out_specs=(P(), P())))
    with jax.default_matmul_precision("highest"):
        calls = [lambda run=run: run(weights, inputs, targets) for run in (on_mesh, jax.jit(plain))]
        (loss, grads), (plain_loss, plain_grads) = (call() for call in calls)
        runs = [repeated(call, devices.platform != "cpu") for call in calls]
        times = [tuple(run(3) for run in runs) for _ in range(flags.repeats)]
    errors = {
        "gradient": float(jnp.linalg.norm(grads - plain_grads) / jnp.linalg.norm(plain_grads)),
        "loss": abs(float(loss) / float(plain_loss) - 1),
    }
    ours, theirs = zip(*times, strict=True)
    console.print(f"zb-v on one stage, {schedule.num_ticks} ticks")
    rows = [
        Row(f"error of {name}", error, "relative", against="jax.grad", target=TOLERANCE)
        for name, error in errors.items()
    ]
    return [*rows, Row.beside("executor", ours, theirs, "jax.grad"), Row.of("jax.grad", theirs, "s")], devices
