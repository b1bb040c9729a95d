"""Mesh axes, their sizes, and meshes of real, simulated or abstract devices."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxdist.errors import ConfigError, divisors

if TYPE_CHECKING:
    import jax


@dataclass(frozen=True)
class MeshAxis:
    """One axis of the mesh, and all that layouts, batches and plans need to know of it.

    shards: the logical dims of parameters that are split over it. may_stay_whole: those of them that every rank holds
    whole where the axis does not divide them; each rank then uses a part. splits: what it splits of the work: "batch"
    (rows), "sequence" (positions), "layers", or nothing. A parameter that is not sharded over an axis that splits the
    work needs a sum of its gradient over it. shards_state: ZeRO shards over it.
    """

    name: str
    shards: tuple[str, ...] = ()
    may_stay_whole: tuple[str, ...] = ()
    splits: str = ""
    shards_state: bool = False


# Outermost (slowest link) first.
MESH_AXES = (
    MeshAxis("pp", shards=("layers",), splits="layers"),
    MeshAxis("replica", splits="batch"),
    MeshAxis("dp", splits="batch", shards_state=True),
    MeshAxis("ep", shards=("experts",), splits="batch", shards_state=True),
    MeshAxis("cp", splits="sequence", shards_state=True),
    MeshAxis("tp", shards=("vocab", "heads", "kv_heads", "ffn"), may_stay_whole=("kv_heads",)),
)


def axes_that(split: str) -> tuple[str, ...]:
    """The axes that split this of the work."""
    return tuple(axis.name for axis in MESH_AXES if axis.splits == split)


AXES = tuple(axis.name for axis in MESH_AXES)
FACTORS = tuple(axis for axis in AXES if axis != "ep")  # whose ranks multiply to the number of devices
DATA_AXES = axes_that("batch")
SEQUENCE_AXES = axes_that("sequence")
TOKEN_AXES = (*DATA_AXES, *SEQUENCE_AXES)
WORK_AXES = tuple(axis.name for axis in MESH_AXES if axis.splits)
STATE_AXES = tuple(axis.name for axis in MESH_AXES if axis.shards_state)
AXIS_OF_DIM = {dim: axis.name for axis in MESH_AXES for dim in axis.shards}
MAY_STAY_WHOLE = frozenset(dim for axis in MESH_AXES for dim in axis.may_stay_whole)
MOST_DEVICES = 2**22


def data_ranks_of(ep: int, cp: int) -> int:
    """How many of the ranks that experts are split over are of dp: all of cp is taken first where it divides ep."""
    return ep // cp if ep % cp == 0 else ep


@dataclass(frozen=True)
class MeshShape:
    """How many ranks each parallelism has, outermost (slowest link) first; 1 where it is not used.

    `replica` and `dp` both split the batch; ZeRO shards over `dp` and `cp`, so `replica > 1` is hybrid sharding.

    `ep` adds no devices. It is another factorisation of dp x cp, for experts alone: neighbours among these ranks hold
    different experts, and ZeRO shards each expert over what is left. All of cp is taken first where it divides ep, and
    the rest from dp; otherwise ep is taken from dp. The devices' mesh therefore has two axes for the ranks of dp, "dp"
    and, inside it, "ep": `size` gives those of an axis. Source: MoE parallel folding, arXiv 2504.14960.
    """

    pp: int = 1
    replica: int = 1
    dp: int = 1
    ep: int = 1
    cp: int = 1
    tp: int = 1

    def __post_init__(self):
        for axis in AXES:
            if (size := getattr(self, axis)) < 1:
                raise ConfigError(
                    f"mesh axis {axis}={size}", "must be a whole number of ranks, at least 1", f"Use {axis}=1"
                )
        if self.dp % self.size("ep"):
            over = f"dp={self.dp}" + f" and cp={self.cp}" * (self.cp > 1)
            fitting = [n for n in divisors(self.dp * self.cp) if n % self.cp == 0 or self.dp % n == 0]
            raise ConfigError(
                f"ep={self.ep} over {over}",
                "experts must be split over the ranks of dp, all of cp first where that divides ep",
                f"Use ep in {fitting}",
            )
        if self.num_devices > MOST_DEVICES:
            raise ConfigError(
                f"a mesh of {self.num_devices:,} devices", f"must have at most {MOST_DEVICES:,}", "Use fewer"
            )

    @property
    def num_devices(self) -> int:
        return math.prod(self.sizes)

    @property
    def batch_ranks(self) -> int:
        """Ranks that have rows of the batch of their own."""
        return math.prod(self.size(axis) for axis in DATA_AXES)

    @property
    def state_ranks(self) -> int:
        """Ranks that ZeRO shards over."""
        return math.prod(self.size(axis) for axis in STATE_AXES)

    @property
    def expert_axes(self) -> tuple[str, ...]:
        """The axes of the devices' mesh that experts are split over."""
        return ("ep", "cp") if self.ep % self.cp == 0 else ("ep",)

    def size(self, axis: str) -> int:
        """Ranks along an axis of the devices' mesh."""
        if axis not in ("dp", "ep"):
            return getattr(self, axis)
        of_dp = data_ranks_of(self.ep, self.cp)
        return of_dp if axis == "ep" else self.dp // of_dp

    @property
    def sizes(self) -> tuple[int, ...]:
        """Axis sizes of the devices' mesh."""
        return tuple(self.size(axis) for axis in AXES)

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis in AXES if (size := getattr(self, axis)) > 1) or "1 device"


def parse_mesh(text: str) -> MeshShape:
    """`"dp=2,tp=2"` -> MeshShape; the empty string and `"1"` are one device. Raises: ConfigError as both."""
    return MeshShape(**parse_sizes(text))


def parse_sizes(text: str) -> dict[str, int]:
    """Sizes of the axes that are named, be they a whole mesh or not.

    Raises: ConfigError for an empty part, an unknown or repeated axis, or a size that is not a positive whole number.
    """
    sizes: dict[str, int] = {}
    for part in text.split(",") if text.strip() not in ("", "1") else ():
        axis, _, size = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            raise ConfigError(f"mesh={text!r}", "must have one comma between two axes", "Write mesh='dp=2,tp=2'")
        if axis not in AXES:
            raise ConfigError(
                f"mesh={text!r}", f"{axis!r} must be a mesh axis", f"Use {', '.join(AXES)}, as in mesh='dp=2,tp=2'"
            )
        if axis in sizes:
            raise ConfigError(f"mesh={text!r}", f"must name axis {axis!r} only once", "Name each axis once")
        if not (size.isascii() and size.isdigit() and len(size) < 10 and int(size) > 0):
            raise ConfigError(
                f"mesh={text!r}", f"axis {axis!r} must have a whole number of ranks, at least 1", f"Write {axis}=2"
            )
        sizes[axis] = int(size)
    return sizes


def make_mesh(shape: MeshShape, devices: "Sequence[jax.Device]") -> "jax.sharding.Mesh":
    """A mesh with all six axes over the first `shape.num_devices` of `devices`. Raises: ConfigError for too few."""
    if len(devices) < shape.num_devices:
        raise ConfigError(
            f"mesh {shape}", f"must have {shape.num_devices} devices, and {len(devices)} were given", "Give one each"
        )
    from jax.sharding import AxisType, Mesh

    chosen = np.asarray(devices[: shape.num_devices]).reshape(shape.sizes)
    return Mesh(chosen, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def make_abstract_mesh(shape: MeshShape) -> "jax.sharding.AbstractMesh":
    """The same mesh with no devices: enough to trace a step of any number of ranks."""
    from jax.sharding import AbstractMesh, AxisType

    return AbstractMesh(shape.sizes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
