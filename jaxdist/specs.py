"""Arrays outside `shard_map`: how those of a leaf are split over the mesh in every layout, and their dtypes."""

import math
from collections.abc import Iterable

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.layout import Layout, Leaf, axes_of, replace_entry
from jaxdist.mesh import DATA_AXES, MeshShape
from jaxdist.strategy import PrecisionConfig


def compute_spec(leaf: Leaf) -> PartitionSpec:
    """In the compute layout."""
    return PartitionSpec(*leaf.spec)


def storage_spec(leaf: Leaf) -> PartitionSpec:
    """In the storage layout."""
    return with_shards(leaf, compute_spec(leaf))


def logical_spec(leaf: Leaf) -> PartitionSpec:
    """How the logical array is split: as in the compute layout, where that takes no padding."""
    return PartitionSpec(
        *(a if leaf.shape[dim] % leaf.num_parts[dim] == 0 else None for dim, a in enumerate(leaf.spec))
    )


def draw_spec(leaf: Leaf) -> PartitionSpec:
    """How the logical array is split while it is drawn, saved and restored: as ZeRO shards it, unless that pads."""
    return logical_spec(leaf) if zero_padded(leaf) else with_shards(leaf, logical_spec(leaf))


def zero_padded(leaf: Leaf) -> bool:
    """Whether `zero_dim` of the storage layout is longer than the logical one."""
    return leaf.zero_dim is not None and leaf.storage_shape[leaf.zero_dim] != leaf.shape[leaf.zero_dim]


def with_shards(leaf: Leaf, spec: PartitionSpec) -> PartitionSpec:
    """A spec with what ZeRO splits."""
    if leaf.zero_dim is None:
        return spec
    axes = (*axes_of(spec[leaf.zero_dim]), *leaf.zero_axes)
    return PartitionSpec(*replace_entry(tuple(spec), leaf.zero_dim, axes))


def param_specs(layout: Layout) -> dict:
    """Specs of the parameters as a state holds them."""
    return jax.tree.map(storage_spec if layout.params_sharded else compute_spec, layout.leaves)


def storage_specs(layout: Layout) -> dict:
    return jax.tree.map(storage_spec, layout.leaves)


def kept_dtype(leaf: Leaf, precision: PrecisionConfig) -> str:
    """In which its value is kept from step to step: a frozen leaf needs no more than is computed with."""
    return precision.dtype if leaf.param.frozen else precision.master_dtype


def abstract_storage(layout: Layout, precision: PrecisionConfig) -> dict:
    """Global shapes of the parameters in the storage layout."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, kept_dtype(leaf, precision)), layout.leaves
    )


def rows_spec(mesh: MeshShape) -> PartitionSpec:
    """The spec of an array with a dim for the batch's rows."""
    return drop_unit_axes((DATA_AXES,), mesh)


def drop_unit_axes(dims: Iterable, mesh: MeshShape) -> PartitionSpec:
    """A PartitionSpec without the axes of size 1."""

    def keep(entry):
        return tuple(a for a in axes_of(entry) if mesh.size(a) > 1) or None

    return PartitionSpec(*map(keep, dims))


def shardings(mesh: jax.sharding.Mesh, specs):
    """Specs -> NamedShardings, through any pytree."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec))


def local_bytes(tree) -> int:
    """Bytes one device holds of a pytree of sharded (or abstract, with `sharding`) global arrays."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree))
