"""The same training under automatic sharding: plain `jax.jit`, arrays placed as ours, collectives by the compiler."""

import jax
import optax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxdist.config import RunConfig
from jaxdist.layout import shardings
from jaxdist.mesh import make_mesh
from jaxdist.runtime.devices import Devices
from jaxdist.train.program import build_program

from .. import plain
from .timing import Timed, full_batch, timed


def timed_automatic(config: RunConfig, devices: Devices) -> Timed:
    """Parameters are placed as our step holds them, moments as our optimiser does, the batch over the data axes; what
    moves between is GSPMD's choice.
    """
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    mesh = Mesh(program.mesh.devices, program.mesh.axis_names, axis_types=(AxisType.Auto,) * program.mesh.devices.ndim)
    decay = jax.tree.map(lambda leaf: leaf.decay, program.layout.leaves)
    init, step, optimizer = plain.make_step(config, decay)
    params = program.init(config.seed).params
    replicated = NamedSharding(mesh, PartitionSpec())
    storage = shardings(mesh, program.layout.storage_specs())
    state_shapes = jax.eval_shape(init, params)
    moments = optax.tree_utils.tree_map_params(
        optimizer, lambda _, sharding: sharding, state_shapes[1], storage, transform_non_params=lambda _: replicated
    )
    placed = (shardings(mesh, program.specs.params), moments)
    batch_sharding = NamedSharding(mesh, program.layout.batch_spec())
    batch = jax.device_put({k: v for k, v in full_batch(config).items() if k != "rows"}, batch_sharding)
    state = jax.jit(init, out_shardings=placed)(jax.device_put(params, placed[0]))
    compiled = (
        jax.jit(step, in_shardings=(placed, batch_sharding), out_shardings=(placed, replicated), donate_argnums=0)
        .lower(state, batch)
        .compile()
    )
    return timed(compiled, state, batch, config.parallel.mesh)
