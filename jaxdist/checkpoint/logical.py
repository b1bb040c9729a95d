"""The mesh-independent state: every array at its logical shape, under a name.

Storage layouts pad dims so that ZeRO's ranks divide them, and order layers by stage and chunk. A checkpoint, a
comparison of two runs and weights for generation want neither: `to_logical` takes both off, `from_logical` puts those
of any other layout on. Values are moved, never computed, so the bits stay.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.tree_util import KeyEntry, KeyPath, SequenceKey

from jaxdist.layout import Layout, Leaf, fill
from jaxdist.parallel.relayout import from_compute, from_storage, gather_whole, is_logical, to_storage
from jaxdist.specs import compute_spec, draw_spec, drop_unit_axes, kept_dtype, logical_spec, storage_spec, zero_padded
from jaxdist.strategy import PrecisionConfig
from jaxdist.train.loss_scale import LossScale, initial_loss_scale
from jaxdist.train.optimizer import by_owner
from jaxdist.train.program import Program
from jaxdist.train.state import State, initial_state, stored_parameters, unusable_donations

PARAMS, MOMENTS, SCALE, STEP = "params", "moments", "scale", "step"


def to_logical(program: Program, state: State) -> dict[str, jax.Array]:
    """Everything a run continues from: `params.*` as they are kept, `moments.*`, `scale.*` (fp16), `step`.

    16-bit parameters that have masters are left out: they are these, rounded. Arrays whose storage is logical already
    are returned as they are, not copied: use them before the state is donated.
    """
    layout = program.layout
    whole = state.params if state.master is None else fill(state.master, state.params)
    moves = {name: (leaf, from_storage) for name, leaf in named(MOMENTS, _owners(program)).items() if leaf}
    for name, leaf in _leaves(PARAMS, layout).items():
        computed = (state.master is None or leaf.param.frozen) and not layout.params_sharded
        moves[name] = leaf, from_compute if computed else from_storage
    scale = {} if state.scale is None else named(SCALE, state.scale._asdict())
    moments = jax.tree.map(_numbers, named(MOMENTS, state.moments))
    return _moved(program, moves, {**named(PARAMS, whole), **moments, **scale, STEP: state.step})


def logical_parameters(program: Program, stored: dict) -> dict:
    """A tree of parameters or gradients in the storage layout -> the logical one."""
    return _logical_tree(program, stored, from_storage)


def compute_parameters(program: Program, params: dict) -> dict:
    """`State.params`, in the compute layout or (ZeRO-3) the storage layout -> the logical tree, in their dtype."""
    return _logical_tree(program, params, from_storage if program.layout.params_sharded else from_compute)


def abstract_logical(program: Program) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding on this mesh of everything `to_logical` returns; nothing is allocated."""
    whole = NamedSharding(program.mesh, PartitionSpec())

    def shape(leaf: Leaf | bool, x) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, bool):
            x = jax.eval_shape(_numbers, x)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=whole)
        return jax.ShapeDtypeStruct(leaf.shape, x.dtype, sharding=_sharding(program, draw_spec(leaf)))

    scale = program.shapes.scale
    return {
        **abstract_parameters(program.layout, program.mesh, program.config.precision),
        **named(MOMENTS, jax.tree.map(shape, _owners(program), program.shapes.moments)),
        **({} if scale is None else {f"{SCALE}.{k}": shape(False, v) for k, v in scale._asdict().items()}),
        STEP: shape(False, program.shapes.step),
    }


def abstract_parameters(layout: Layout, mesh: Mesh, kept: str | PrecisionConfig) -> dict[str, jax.ShapeDtypeStruct]:
    """The same of `params.*` alone, which needs a layout and no program. kept: the dtype of all of them, or the
    precision of a run that keeps each as it needs it."""

    def shape(leaf: Leaf) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, drop_unit_axes(draw_spec(leaf), layout.mesh))
        dtype = kept if isinstance(kept, str) else kept_dtype(leaf, kept)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, sharding=sharding)

    return named(PARAMS, jax.tree.map(shape, layout.leaves))


def from_logical(program: Program, arrays: dict[str, jax.Array | np.ndarray]) -> State:
    """The state of this program's layout from the arrays that any layout's `to_logical` gave (bit for bit).

    Without `moments.*` and `step` it is a run's first state, with these parameters. Without `scale.*` an fp16 run
    starts with its configured loss scale. Arrays may stand anywhere: on the host, on one device, or as
    `abstract_logical` says; only in the last case are they donated.
    """
    config, layout, shapes = program.config, program.layout, program.shapes

    def assemble(arrays: dict) -> State:
        params = unnamed(PARAMS, layout.leaves, arrays)
        fresh = initial_state(config, layout, program.optimizer, stored_parameters(config, layout, params))
        if STEP not in arrays:
            return fresh

        def store(leaf: Leaf | bool, x, like):
            x = jax.random.wrap_key_data(x) if _is_key(like) else x
            return to_storage(leaf, x) if isinstance(leaf, Leaf) else x

        moments = unnamed(MOMENTS, shapes.moments, arrays)
        moments = jax.tree.map(store, _owners(program), moments, shapes.moments)
        scale = initial_loss_scale(config.precision)
        if scale is not None and f"{SCALE}.scale" in arrays:
            scale = LossScale(*(arrays[f"{SCALE}.{field}"] for field in LossScale._fields))
        return fresh._replace(step=arrays[STEP], moments=moments, scale=scale)

    return _assembled(program, assemble, program.specs, arrays)


def parameters_from_logical(program: Program, arrays: dict[str, jax.Array | np.ndarray]) -> dict:
    """Parameters as this program's `evaluate` takes them, from `params.*` alone: weights for generation."""
    config, layout = program.config, program.layout

    def assemble(arrays: dict) -> dict:
        params = unnamed(PARAMS, layout.leaves, arrays)
        return initial_state(config, layout, program.optimizer, stored_parameters(config, layout, params)).params

    return _assembled(program, assemble, program.specs.params, arrays, donate=False)


def _assembled(program: Program, assemble: Callable, out_specs, arrays: dict, donate: bool = True):
    """`assemble` on local shards of logical arrays, which are placed first where they are not yet."""
    wanted = abstract_logical(program)
    placed = {name: _placed(x, wanted[name].sharding) for name, x in arrays.items()}
    specs = {name: wanted[name].sharding.spec for name in placed}
    donate = donate and all(placed[name] is x for name, x in arrays.items())
    run = jax.shard_map(assemble, mesh=program.mesh, in_specs=(specs,), out_specs=out_specs, check_vma=True)
    with unusable_donations():
        return jax.jit(run, donate_argnums=(0,) if donate else ())(placed)


def _placed(x: jax.Array | np.ndarray, sharding: NamedSharding) -> jax.Array:
    """The array on this mesh: itself where it is sharded so already."""
    if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
        return x
    if isinstance(x, jax.Array):
        return jax.device_put(x, sharding)
    return jax.make_array_from_callback(np.shape(x), sharding, lambda at: np.asarray(x)[at])


def _is_key(x) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _numbers(x: jax.Array) -> jax.Array:
    """An array as a file holds it: of a random key its bits."""
    return jax.random.key_data(x) if _is_key(x) else x


def fetch(tree):
    """A tree of logical arrays -> whole NumPy arrays, on every process. For models that fit in one host's memory."""

    return jax.tree.map(lambda x: np.asarray(readable(x)), tree)


def readable(x: jax.Array) -> jax.Array:
    """The array, or a copy of it that every process can read whole. Waits for nothing. Sends: an all-gather where a
    process has only a part."""
    if x.is_fully_addressable or x.is_fully_replicated:
        return x
    return _gather(x.sharding.mesh, x.sharding.spec)(x)


def named(prefix: str, tree) -> dict:
    """The leaves of a pytree by path: `params.blocks.up.weight`, `moments.0.mu.blocks.up.weight`.

    Members of a chain that keep nothing are not counted, so an array has one name with and without them.
    """
    found = jax.tree.leaves_with_path(tree)
    return {_path(prefix, path, found): x for path, x in found}


def unnamed(prefix: str, like, arrays: dict):
    """Undo `named` into the structure of `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in named(prefix, like)])


def _path(prefix: str, path: KeyPath, found: Iterable[tuple[KeyPath, Any]] = ()) -> str:
    path = tuple(_counted(path[: i + 1], found) for i in range(len(path)))
    return ".".join(filter(None, (prefix, jax.tree_util.keystr(path, simple=True, separator="."))))


def _counted(path: KeyPath, found: Iterable[tuple[KeyPath, Any]]) -> KeyEntry:
    """The last entry of a path; in a tuple, its number among those under which something was found."""
    *above, last = path
    if not isinstance(last, SequenceKey):
        return last
    there = {other[len(above)].idx for other, _ in found if list(other[: len(above)]) == above}
    return SequenceKey(sorted(there).index(last.idx))


def _owners(program: Program):
    """The tree of the optimiser's state: the parameter each moment is stored as, False for counters and the like."""
    return by_owner(
        lambda x, leaf: leaf if x.shape == leaf.storage_shape else False,
        program.shapes.moments,
        program.layout.trained.leaves,
        of_others=False,
    )


def _sharding(program: Program, spec: PartitionSpec) -> NamedSharding:
    return NamedSharding(program.mesh, drop_unit_axes(spec, program.config.parallel.mesh))


def _leaves(prefix: str, layout: Layout) -> dict[str, Leaf]:
    return {_path(prefix, path): leaf for path, leaf in jax.tree.leaves_with_path(layout.leaves)}


def _logical_tree(program: Program, tree: dict, move: Callable) -> dict:
    arrays = named("", tree)
    moves = {name: (leaf, move) for name, leaf in _leaves("", program.layout).items() if name in arrays}
    return unnamed("", tree, _moved(program, moves, arrays))


def _moved(program: Program, moves: dict[str, tuple[Leaf, Callable]], arrays: dict) -> dict:
    """The arrays, those whose layout is not the logical one moved.

    In one program: collectives of several that are in flight at once can wait for one another for ever (seen on CPU).
    """
    moving = tuple(
        (name, leaf, move)
        for name, (leaf, move) in moves.items()
        if not is_logical(leaf) or (move is from_storage and zero_padded(leaf))
    )
    if not moving:
        return arrays
    return arrays | _mover(program.mesh, moving)({name: arrays[name] for name, *_ in moving})


@cache
def _mover(mesh: Mesh, moving: tuple[tuple[str, Leaf, Callable], ...]) -> Callable:
    there = {name: storage_spec(leaf) if move is from_storage else compute_spec(leaf) for name, leaf, move in moving}
    here = {name: draw_spec(leaf) if move is from_storage else logical_spec(leaf) for name, leaf, move in moving}

    def move_all(arrays: dict) -> dict:
        return {name: move(leaf, arrays[name]) for name, leaf, move in moving}

    return jax.jit(jax.shard_map(move_all, mesh=mesh, in_specs=(there,), out_specs=here, check_vma=True))


@cache
def _gather(mesh: Mesh, spec: PartitionSpec) -> Callable:
    whole = partial(gather_whole, spec=spec)
    return jax.jit(jax.shard_map(whole, mesh=mesh, in_specs=spec, out_specs=PartitionSpec(), check_vma=True))
