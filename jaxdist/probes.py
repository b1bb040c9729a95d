"""Probes: identities in a traced model that hand what they see to the host, in forward and in backward.

`jaxdist.models.context.Context.observe` places one. Unless a run is watched it returns its argument, and the program is
the one that trains. A watched program computes the same with a callback at every probe.
"""

from collections import defaultdict
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.collectives import varying_axes

# JAX copies a callback's operands to a device. Up to 100 KB that happens at once; a larger copy waits for a thread of
# XLA:CPU's pool, all of which may wait in a collective for this very callback.
CHUNK_BYTES = 2**16

FORWARD, BACKWARD = "forward", "backward"


@dataclass(frozen=True)
class Site:
    """A probe in the text of a model's part.

    part: "embed", "layer" or "loss". order: among the part's probes, from 1. direction: whether values are seen or
    gradients. shape: local. varying: mesh axes along which the type says that ranks may hold different values.
    """

    direction: str
    part: str
    order: int
    name: str
    shape: tuple[int, ...]
    varying: frozenset[str]


class Piece(NamedTuple):
    """One rank's part of a tensor. rank: its number in the mesh. rows: of the global batch."""

    site: Site
    rank: int
    rows: tuple[int, ...]
    value: np.ndarray


class Key(NamedTuple):
    """A tensor of one step, whatever the mesh. direction: or another phase of the step (`jaxdist.divergence`)."""

    direction: str
    part: str
    layer: int
    name: str


class Recorder:
    """What the probes of one program have seen since `take` was last called.

    Recomputation runs a probe again: the first value counts, which is forward's.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple, Piece] = {}

    def record(self, site: Site, rank, layer, rows, *chunks) -> np.ndarray:
        """Called by the program. Returns the first element, which the program goes on with: it must not drop us."""
        parts = [np.asarray(chunk) for chunk in chunks]
        value = np.concatenate(parts).astype(np.float64).reshape(site.shape)
        key = Key(site.direction, site.part, int(layer), site.name)
        place = (key, int(rank), tuple(np.asarray(rows).tolist()))
        self._seen.setdefault(place, Piece(site, *place[1:], value))
        return parts[0][:1]

    def take(self) -> dict[Key, list[Piece]]:
        """Every tensor seen, with its parts in the order of rows and ranks; forgets them."""
        found, self._seen = self._seen, {}
        tensors = defaultdict(list)
        for (key, *_), piece in found.items():
            tensors[key].append(piece)
        return {key: sorted(pieces, key=lambda p: (p.rows, p.rank)) for key, pieces in tensors.items()}


@dataclass(frozen=True)
class Probe:
    """Where the model is that is being traced. names: of this part's probes so far."""

    recorder: Recorder
    part: str = ""
    layer: int | jax.Array = 0
    names: list[str] = field(default_factory=list)

    def at(self, part: str, layer: int | jax.Array) -> "Probe":
        return Probe(self.recorder, part, layer)

    def __call__(self, name: str, x: jax.Array, rows_B: jax.Array) -> jax.Array:
        """`x`. Raises: ConfigError where its first dim is not the micro-batch's rows."""
        if x.ndim and x.shape[0] != rows_B.shape[0]:
            raise ConfigError(
                f"observe({name!r}) of an array of shape {x.shape}",
                f"its first dim must be the rows of the micro-batch, of which there are {rows_B.shape[0]}",
                "Observe an array [B, ...], or a scalar that is a sum over rows",
            )
        times = sum(known.split("#")[0] == name for known in self.names)
        self.names.append(f"{name}#{times + 1}" if times else name)
        site = partial(Site, part=self.part, order=len(self.names), name=self.names[-1], shape=x.shape)

        @jax.custom_vjp
        def seen(x, layer, rows_B):
            return self._see(site, FORWARD, x, layer, rows_B)

        seen.defvjp(
            lambda x, layer, rows_B: (seen(x, layer, rows_B), (layer, rows_B)),
            lambda kept, dx: (self._see(site, BACKWARD, dx, *kept), None, None),
        )
        return seen(x, jnp.asarray(self.layer, jnp.int32), rows_B)

    def _see(self, site: partial, direction: str, x, layer, rows_B):
        made = site(direction, varying=varying_axes(x))
        flat = x.reshape(-1)
        length = CHUNK_BYTES // x.dtype.itemsize
        chunks = [flat[start : start + length] for start in range(0, flat.size, length)]
        like = jax.ShapeDtypeStruct((1,), x.dtype)
        rank = jnp.asarray(comm.rank(AXES), jnp.int32)
        first = jax.pure_callback(partial(self.recorder.record, made), like, rank, layer, rows_B, *chunks)
        # A callback's result is typed equal everywhere. Here it is as equal as x.
        return lax.dynamic_update_slice(flat, comm.varying_like(first, flat), (0,)).reshape(x.shape)
