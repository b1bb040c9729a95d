"""The state with no mesh in it: every array at its logical shape, under a name.

Storage layouts pad dims so that ZeRO's ranks divide them, and order layers by stage and chunk. A checkpoint, a
comparison of two runs and weights for generation want neither: `to_logical` takes both off, `from_logical` puts those
of any other layout on. Values are moved, never computed, so the bits stay.
"""

import warnings
from functools import partial

import jax
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.layout import Leaf, live_spec, shardings
from jaxdist.optimizer import LossScale, initial_loss_scale, make_optimizer
from jaxdist.step import Program, State, initial_state, stored_parameters

PARAMS, MOMENTS, SCALE, STEP = "params", "moments", "scale", "step"


def to_logical(program: Program, state: State) -> dict[str, jax.Array]:
    """Everything a run continues from: `params.*` at full precision, `moments.*`, `scale.*` (fp16), `step`.

    16-bit parameters are left out: they are the masters, rounded. Arrays whose storage is logical already are returned
    as they are, not copied: use them before the state is donated.
    """
    layout = program.layout
    if state.master is not None:
        params = logical_parameters(program, state.master)
    elif layout.params_stored:
        params = logical_parameters(program, state.params)
    else:
        params = jax.tree.map(partial(_from_compute, program), layout.leaves, state.params)
    moments = jax.tree.map(partial(_from_storage, program), _owners(program), state.moments, is_leaf=_is_owner)
    return {
        **named(PARAMS, params),
        **named(MOMENTS, moments),
        **({} if state.scale is None else named(SCALE, state.scale._asdict())),
        STEP: state.step,
    }


def logical_parameters(program: Program, stored: dict) -> dict:
    """A tree of parameters or gradients in the storage layout -> the logical one."""
    return jax.tree.map(partial(_from_storage, program), program.layout.leaves, stored)


def abstract_logical(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding on this mesh of everything `to_logical` returns; nothing is allocated."""
    whole, dtype = NamedSharding(program.mesh, PartitionSpec()), program.config.precision.master_dtype

    def shape(leaf: Leaf | None, x) -> jax.ShapeDtypeStruct:
        if leaf is None:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        return jax.ShapeDtypeStruct(leaf.shape, x.dtype, sharding=_sharding(program, leaf))

    stored = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, dtype), program.layout.leaves)
    scale = program.shapes.scale
    return {
        **named(PARAMS, jax.tree.map(shape, program.layout.leaves, stored)),
        **named(MOMENTS, jax.tree.map(shape, _owners(program), program.shapes.moments, is_leaf=_is_owner)),
        **({} if scale is None else {f"{SCALE}.{k}": shape(None, v) for k, v in scale._asdict().items()}),
        STEP: shape(None, program.shapes.step),
    }


def from_logical(program: Program, arrays: dict[str, jax.Array]) -> State:
    """The state of this program's layout from the arrays that any layout's `to_logical` gave (bit for bit).

    Without `scale.*` an fp16 run starts with its configured loss scale. The arrays are donated.
    """
    config, layout, shapes = program.config, program.layout, program.shapes
    optimizer = make_optimizer(config.optimizer, layout)

    def place(arrays: dict) -> State:
        params = unnamed(PARAMS, layout.leaves, arrays)
        moments = unnamed(MOMENTS, shapes.moments, arrays)

        def store(leaf: Leaf | None, x):
            return x if leaf is None else leaf.to_storage(x)

        moments = jax.tree.map(store, _owners(program), moments, is_leaf=_is_owner)
        scale = initial_loss_scale(config.precision)
        if scale is not None and f"{SCALE}.scale" in arrays:
            scale = LossScale(*(arrays[f"{SCALE}.{field}"] for field in LossScale._fields))
        fresh = initial_state(config, layout, optimizer, stored_parameters(config, layout, params))
        return fresh._replace(step=arrays[STEP], moments=moments, scale=scale)

    out = shardings(program.mesh, program.specs)
    with warnings.catch_warnings():  # what is padded or reordered cannot reuse its buffer
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        return jax.jit(place, out_shardings=out, donate_argnums=0)(arrays)


def parameters_from_logical(program: Program, arrays: dict[str, jax.Array]) -> dict:
    """Parameters as this program's `evaluate` takes them, from `params.*` alone: weights for generation."""
    config, layout = program.config, program.layout
    optimizer = make_optimizer(config.optimizer, layout)

    def place(arrays: dict) -> dict:
        params = unnamed(PARAMS, layout.leaves, arrays)
        return initial_state(config, layout, optimizer, stored_parameters(config, layout, params)).params

    return jax.jit(place, out_shardings=shardings(program.mesh, program.specs.params))(arrays)


def fetch(tree):
    """A tree of logical arrays -> whole NumPy arrays, on every process. For models that fit in one host's memory."""

    def whole(x: jax.Array) -> np.ndarray:
        if x.is_fully_addressable or x.is_fully_replicated:
            return np.asarray(x)
        replicated = NamedSharding(x.sharding.mesh, PartitionSpec())
        return np.asarray(jax.jit(lambda x: x, out_shardings=replicated)(x))

    return jax.tree.map(whole, tree)


def named(prefix: str, tree) -> dict:
    """The leaves of a pytree by path: `params.blocks.up.weight`, `moments.0.mu.blocks.up.weight`."""
    return {_path(prefix, path): x for path, x in jax.tree.leaves_with_path(tree)}


def unnamed(prefix: str, like, arrays: dict):
    """Undo `named` into the structure of `like`."""
    return jax.tree.map_with_path(lambda path, _: arrays[_path(prefix, path)], like)


def _path(prefix: str, path) -> str:
    return ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))


def _owners(program: Program):
    """The tree of the optimiser's state: the parameter each moment is stored as, None for counters and the like."""
    return optax.tree_utils.tree_map_params(
        make_optimizer(program.config.optimizer, program.layout),
        lambda x, leaf: leaf if x.shape == leaf.storage_shape else None,
        program.shapes.moments,
        program.layout.leaves,
        transform_non_params=lambda _: None,
    )


def _is_owner(x) -> bool:
    return x is None or isinstance(x, Leaf)


def _sharding(program: Program, leaf: Leaf) -> NamedSharding:
    return NamedSharding(program.mesh, live_spec(leaf.draw_spec, program.config.parallel.mesh))


def _from_storage(program: Program, leaf: Leaf | None, x: jax.Array) -> jax.Array:
    if leaf is None or (leaf.storage_shape == leaf.shape and _is_logical(leaf)):
        return x
    return jax.jit(leaf.from_storage, out_shardings=_sharding(program, leaf))(x)


def _from_compute(program: Program, leaf: Leaf, x: jax.Array) -> jax.Array:
    if _is_logical(leaf):
        return x
    return jax.jit(leaf.from_compute, out_shardings=_sharding(program, leaf))(x)


def _is_logical(leaf: Leaf) -> bool:
    """Whether the compute layout holds the logical array: layers in order, nothing padded."""
    return leaf.compute_shape == leaf.shape and (leaf.rows is None or leaf.rows == tuple(range(leaf.shape[0])))
