"""Mesh axes, their sizes, and meshes of real, simulated or abstract devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.errors import ConfigError

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh, and all that layouts, batches and plans need to know of it.

    shards: the logical dims of parameters that are split over it. may_stay_whole: those of them that every rank holds
    whole where the axis does not divide them; each rank then uses a part. splits: what it splits of the work: "batch"
    (rows), "sequence" (positions), "layers", or nothing. A parameter that is not sharded over an axis that splits the
    work needs a sum of its gradient over it. shards_state: ZeRO shards over it. available: whether it may have more
    than one rank.
    """

    name: str
    shards: tuple[str, ...] = ()
    may_stay_whole: tuple[str, ...] = ()
    splits: str = ""
    shards_state: bool = False
    available: bool = True


# Outermost (slowest link) first.
MESH_AXES = (
    MeshAxis("pp", shards=("layers",), splits="layers"),
    MeshAxis("replica", splits="batch"),
    MeshAxis("dp", splits="batch", shards_state=True),
    MeshAxis("ep", shards=("experts",), splits="batch", available=False),
    MeshAxis("cp", splits="sequence", shards_state=True),
    MeshAxis("tp", shards=("vocab", "heads", "kv_heads", "ffn"), may_stay_whole=("kv_heads",)),
)


def axes_that(split: str) -> tuple[str, ...]:
    """The axes that split this of the work."""
    return tuple(axis.name for axis in MESH_AXES if axis.splits == split)


AXES = tuple(axis.name for axis in MESH_AXES)
AVAILABLE_AXES = tuple(axis.name for axis in MESH_AXES if axis.available)
DATA_AXES = axes_that("batch")
SEQUENCE_AXES = axes_that("sequence")
TOKEN_AXES = (*DATA_AXES, *SEQUENCE_AXES)
WORK_AXES = tuple(axis.name for axis in MESH_AXES if axis.splits)
STATE_AXES = tuple(axis.name for axis in MESH_AXES if axis.shards_state)
AXIS_OF_DIM = {dim: axis.name for axis in MESH_AXES for dim in axis.shards}
MAY_STAY_WHOLE = frozenset(dim for axis in MESH_AXES for dim in axis.may_stay_whole)
MOST_DEVICES = 2**22


@dataclass(frozen=True)
class MeshShape:
    """The size of every mesh axis, outermost (slowest link) first; an axis that is not used has size 1.

    `replica` and `dp` both split the batch; ZeRO shards over `dp` and `cp`, so `replica > 1` is hybrid sharding.
    """

    pp: int = 1
    replica: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis, size in zip(AXES, self.sizes, strict=True):
            if size < 1 or (size > 1 and axis not in AVAILABLE_AXES):
                why = "not available yet" if size > 1 else "a whole number of ranks, at least 1"
                raise ConfigError(f"mesh axis {axis}={size}", f"it is {why}", f"Use {axis}=1")
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(
                f"a mesh of {self.num_devices:,} devices", f"at most {MOST_DEVICES:,} can be described", "Use fewer"
            )

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def batch_ranks(self) -> int:
        """Ranks that have rows of the batch of their own."""
        return math.prod(getattr(self, axis) for axis in DATA_AXES)

    @property
    def state_ranks(self) -> int:
        """Ranks that ZeRO shards over."""
        return math.prod(getattr(self, axis) for axis in STATE_AXES)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(getattr(self, axis) for axis in AXES)

    def __str__(self) -> str:
        used = [f"{axis}={size}" for axis, size in zip(AXES, self.sizes, strict=True) if size > 1]
        return ",".join(used) or "1 device"


def parse_mesh(text: str) -> MeshShape:
    """`"dp=2,tp=2"` -> MeshShape; the empty string and `"1"` are one device.

    Raises: ConfigError for an empty part, an unknown or repeated axis, or a size that is not a positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() not in ("", "1") else ():
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise ConfigError(f"mesh={text!r}", "a comma stands between two axes", "Write mesh='dp=2,tp=2'")
        if axis not in AVAILABLE_AXES:
            known = "not available yet" if axis in AXES else "not a mesh axis"
            raise ConfigError(
                f"mesh={text!r}", f"{axis!r} is {known}", f"Use {', '.join(AVAILABLE_AXES)}, as in mesh='dp=2,tp=2'"
            )
        if axis in sizes:
            raise ConfigError(f"mesh={text!r}", f"axis {axis!r} is named twice", "Name each axis once")
        if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size) > 0):
            raise ConfigError(
                f"mesh={text!r}", f"axis {axis!r} needs a whole number of ranks, at least 1", f"Write {axis}=2"
            )
        sizes[axis] = int(size)
    return MeshShape(**sizes)


def make_mesh(shape: MeshShape, devices: "Sequence[jax.Device]") -> "jax.sharding.Mesh":
    """A mesh with all six axes over the first `shape.num_devices` of `devices`. Raises: ConfigError for too few."""
    if len(devices) < shape.num_devices:
        raise ConfigError(
            f"mesh {shape}", f"it has {shape.num_devices} ranks and {len(devices)} devices were given", "Give one each"
        )
    from jax.sharding import AxisType, Mesh

    chosen = np.asarray(devices[: shape.num_devices]).reshape(shape.sizes)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_abstract_mesh(shape: MeshShape) -> "jax.sharding.AbstractMesh":
    """The same mesh with no devices: enough to trace a step of any number of ranks."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(shape.sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
