"""Where every parameter lives: one declaration per leaf, read by all that follows (docs/design.md).

A leaf has a *compute* layout (how it enters the differentiated function: the tensor-parallel dims its module declared)
and a *storage* layout (how the optimiser holds it: ZeRO adds dp and cp on one more dim, padded where none divides).

Under pp a table that both ends of the model use is neither's: every stage holds a part of it and of its moments, and
the two stages that compute with it get it whole for the length of a step.
"""

import dataclasses
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import jax

from jaxdist.mesh import AXES, MeshShape
from jaxdist.params import STACKED, Param

Spec = tuple[str | tuple[str, ...] | None, ...]


def axes_of(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """The mesh axes that one dim is split over, outermost first."""
    return (entry,) if isinstance(entry, str) else entry or ()


@dataclass(frozen=True)
class Leaf:
    """One parameter. Dims index the array with its leading layer dim where it has one.

    param: as declared; of all layers, where it is stacked. spec: the mesh axis, or axes, of each dim in the compute
        layout, live axes only.
    zero_dim: the dim ZeRO shards, None where nothing is sharded; `zero_local` its padded size on one rank of `spec`.
    zero_axes: over which axes.
    reduce_axes: axes over which the gradient is still a partial sum when backward ends ("Two layouts, one rule" in
        docs/design.md).
    rows: for a stacked leaf under pp, the layer in each row, stage by stage and chunk by chunk; -1 pads the parts that
        have fewer layers than the largest. The compute and storage layouts hold these rows, split over pp.
    consumer_stages: the stages that compute with a leaf of which every stage holds a part, padded where pp does not
        divide it; empty for every other leaf. Only these get it whole.
    small: a layer's vector, which backward keeps where it gathers matrices again.
    used_in: of a leaf outside the layers, which of "embed" and "loss" use it. num_parts, num_shards: the ranks that
        share each dim in the compute layout, and those that ZeRO shards the leaf over.
    """

    name: str
    param: Param
    spec: Spec
    mesh: MeshShape
    zero_dim: int | None
    zero_axes: tuple[str, ...]
    reduce_axes: tuple[str, ...] = ()
    rows: tuple[int, ...] | None = None
    consumer_stages: tuple[int, ...] = ()
    small: bool = False
    used_in: frozenset[str] = frozenset()
    num_parts: tuple[int, ...] = field(init=False)
    num_shards: int = field(init=False)

    def __post_init__(self):
        parts = tuple(math.prod(map(self.mesh.size, axes_of(entry))) for entry in self.spec)
        object.__setattr__(self, "num_parts", parts)
        object.__setattr__(self, "num_shards", math.prod(map(self.mesh.size, self.zero_axes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Global shape, unpadded."""
        return self.param.shape

    @property
    def compute_shape(self) -> tuple[int, ...]:
        """Global shape in the compute layout, padding of rows and parts counted."""
        if self.rows is not None:
            return (len(self.rows), *self.shape[1:])
        if not self.consumer_stages:
            return self.shape
        return replace_entry(
            self.shape, self.spread_dim, -(-self.shape[self.spread_dim] // self.mesh.pp) * self.mesh.pp
        )

    @property
    def spread_dim(self) -> int:
        """The dim of which each stage holds a part, of a leaf that has `consumer_stages`."""
        return self.spec.index("pp")

    @property
    def compute_local(self) -> tuple[int, ...]:
        """Local shape in the compute layout."""
        return tuple(n // self.num_parts[dim] for dim, n in enumerate(self.compute_shape))

    @property
    def zero_local(self) -> int:
        """Size of `zero_dim` on one rank, padded to a multiple of `num_shards`."""
        assert self.zero_dim is not None
        return -(-self.compute_local[self.zero_dim] // self.num_shards) * self.num_shards

    @property
    def storage_local(self) -> tuple[int, ...]:
        """Local shape in the storage layout."""
        if self.zero_dim is None:
            return self.compute_local
        return replace_entry(self.compute_local, self.zero_dim, self.zero_local // self.num_shards)

    @property
    def storage_shape(self) -> tuple[int, ...]:
        """Global shape in the storage layout, padding counted."""
        if self.zero_dim is None:
            return self.compute_shape
        return replace_entry(self.compute_shape, self.zero_dim, self.num_parts[self.zero_dim] * self.zero_local)

    @property
    def spec_axes(self) -> tuple[str, ...]:
        """Mesh axes the leaf is sharded on in the compute layout, outermost first."""
        used = {axis for entry in self.spec for axis in axes_of(entry)}
        return tuple(axis for axis in AXES if axis in used)

    @property
    def group(self) -> str:
        """The part of the model whose gradient norms are reported as one: blocks.attention of blocks.attention.w_q."""
        *parts, _ = self.name.split(".")
        return ".".join(parts[:3]) or self.name

    @property
    def group_key(self) -> tuple[tuple[str, ...], ...]:
        """What leaves that share a collective of ZeRO have in common: the axes they differ along, are sharded over, and
        are owed sums."""
        return self.spec_axes, self.zero_axes, self.shard_reduce_axes

    @property
    def storage_axes(self) -> tuple[str, ...]:
        """Mesh axes the stored leaf is sharded on."""
        return self.spec_axes + (() if self.zero_dim is None else self.zero_axes)

    @property
    def shard_reduce_axes(self) -> tuple[str, ...]:
        """`reduce_axes` less those that a reduce-scatter takes care of."""
        return tuple(axis for axis in self.reduce_axes if self.zero_dim is None or axis not in self.zero_axes)

    def layer(self) -> "Leaf":
        """The same leaf of one layer: without the leading layer dim."""
        return dataclasses.replace(
            self,
            param=dataclasses.replace(
                self.param, shape=self.shape[1:], dims=self.param.dims[1:], matrix=(self.param.matrix or ())[1:]
            ),
            spec=self.spec[1:],
            zero_dim=None if self.zero_dim is None else self.zero_dim - 1,
            rows=None,
        )


class ShardedParams(NamedTuple):
    """Parameters of one part of a model, as gradients are taken of them.

    trainable: what is differentiated: the trained parameters themselves or, under ZeRO-2 and 3, a gradient proxy of
    each (`jaxdist.parallel.zero`). stored: where those are proxies, all parameters as the state holds them, whole or as
    shards; elsewhere the frozen ones, if there are any.
    """

    trainable: Any
    stored: Any = None


@dataclass(frozen=True)
class Layout:
    """The leaves of a parameter tree (`leaves` mirrors it), and how they are sharded and sent.

    zero: the stage of ZeRO; 0 where it shards nothing. bucket_bytes: of what shares one collective.
    """

    leaves: dict
    mesh: MeshShape
    zero: int
    bucket_bytes: float

    @cached_property
    def trained(self) -> "Layout":
        """The layout of what has a gradient: None where a leaf is frozen."""
        return dataclasses.replace(self, leaves=drop_frozen(self.leaves, self.leaves))

    @cached_property
    def groups(self) -> tuple[str, ...]:
        """Names of the groups of leaves that have a gradient, each once, in order."""
        return tuple(
            dict.fromkeys(leaf.group for leaf in jax.tree.leaves(self.leaves) if leaf.param.update == "gradient")
        )

    @property
    def layer_leaves(self) -> dict:
        """The leaves of one layer."""
        return jax.tree.map(lambda leaf: leaf.layer(), split_outer(self.leaves)[1])

    @property
    def params_sharded(self) -> bool:
        """Whether parameters themselves are held in the storage layout (ZeRO-3)."""
        return self.zero == 3

    @property
    def sharded(self) -> bool:
        """Whether ZeRO shards anything at all."""
        return self.zero > 0

    @property
    def shards_update(self) -> bool:
        """Whether each rank updates a part of whole parameters (ZeRO-1 and 2)."""
        return self.sharded and not self.params_sharded

    @property
    def grads_sharded(self) -> bool:
        """Whether backward itself reduce-scatters, block by block (ZeRO-2 and 3)."""
        return self.zero >= 2


def split_outer(tree: dict) -> tuple[dict, dict]:
    """A parameter-shaped tree -> (what is outside the layers, the stacked layers)."""
    return {name: part for name, part in tree.items() if name != STACKED}, tree[STACKED]


def drop_frozen(leaves: dict, tree: dict) -> dict:
    """A parameter-shaped tree -> the same with None where a leaf is frozen: the shape of a gradient."""
    return jax.tree.map(lambda leaf, x: None if leaf.param.frozen else x, leaves, tree)


def keep_frozen(leaves: dict, tree: dict) -> dict:
    """What `drop_frozen` drops, with None for the rest."""
    return jax.tree.map(lambda leaf, x: x if leaf.param.frozen else None, leaves, tree)


def fill(tree: dict, other: dict | None) -> dict:
    """A tree with the subtrees of another where it has None."""
    if other is None:
        return tree
    return jax.tree.map(lambda x, y: y if x is None else x, tree, other, is_leaf=lambda x: x is None)


def group(
    leaves: Sequence[Leaf], sizes: Sequence[int], bucket_bytes: float, key: Callable[[Leaf], Hashable]
) -> list[list[int]]:
    """Indices of `leaves` in groups, last leaf first: backward finishes the last layers' gradients first.

    Only leaves with an equal `key` (the axes they are reduced and sharded over) share a group. A bucket closes before
    it would pass `bucket_bytes`, `sizes` being the bytes of each leaf's full buffer; a larger leaf is sent alone.
    """
    groups: list[list[int]] = []
    open_groups: dict[Hashable, tuple[list[int], float]] = {}
    for index in reversed(range(len(leaves))):
        members, filled = open_groups.get(key(leaves[index]), ([], math.inf))
        if filled + sizes[index] > bucket_bytes or not members:
            members, filled = [], 0.0
            groups.append(members)
        members.append(index)
        open_groups[key(leaves[index])] = (members, filled + sizes[index])
    return groups


def split_flat(flat: jax.Array, shapes: Sequence[tuple[int, ...]]) -> list[jax.Array]:
    """A flat array -> arrays of these shapes, one after the other."""
    parts, start = [], 0
    for shape in shapes:
        parts.append(flat[start : start + math.prod(shape)].reshape(shape))
        start += math.prod(shape)
    return parts


def replace_entry(entries: tuple, index: int, value) -> tuple:
    return (*entries[:index], value, *entries[index + 1 :])
