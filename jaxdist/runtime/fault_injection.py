"""Faults on purpose: what a run does when they come can be rehearsed before they do.

`drill="nan:step=5,rank=3,leaf=tokens"` and the like, for one fault at one step. Nothing here runs without it.
"""

import os
import resource
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh

from jaxdist.errors import MOST, ConfigError
from jaxdist.layout import Layout
from jaxdist.mesh import AXES
from jaxdist.parallel import collectives as comm

# What a fault does, and which settings it has besides its step.
KINDS: dict[str, tuple[str, tuple[str, ...]]] = {
    "nan": ("one gradient of a rank becomes NaN", ("rank", "leaf")),
    "inf": ("one gradient of a rank becomes infinite", ("rank", "leaf")),
    "flip": ("one bit of a replicated parameter flips on a device", ("rank",)),
    "batch": ("the targets of the batch that this step takes are shuffled", ()),
    "stuck": ("a process stops for ever", ("process",)),
    "slow": ("a process is late by half a second from that step on", ("process",)),
    "die": ("a process is killed", ("process",)),
    "term": ("a process gets SIGTERM", ("process",)),
    "late": ("a process gets SIGTERM, and its step never ends", ("process",)),
    "full": ("no file may grow beyond 1 KiB while the checkpoint of that step is written", ()),
}


@dataclass(frozen=True)
class Fault:
    """One fault. `step` counts from 1, as in the metrics; `rank` is a device in mesh order."""

    kind: str
    step: int
    rank: int = 0
    process: int = 0
    leaf: str = ""

    def poison(self) -> Callable | None:
        """What `build_program` puts into the step for it."""
        if self.kind not in ("nan", "inf"):
            return None
        value = {"nan": jnp.nan, "inf": jnp.inf}[self.kind]

        def spoil(layout: Layout, step: jax.Array, grads: dict) -> dict:
            names = [leaf.name for leaf in jax.tree.leaves(layout.leaves)]
            name = self.leaf or names[0]
            if name not in names:
                asked = f"drill={f'{self.kind}:step={self.step},leaf={name}'!r}"
                raise ConfigError(asked, "the model has no such parameter", f"Use leaf={names[0]}")
            here = (step + 1 == self.step) & (_rank() == self.rank)

            def one(leaf, g):
                if leaf.name != name:
                    return g
                g = comm.varying_like(g, here)
                return jnp.where(comm.varying_like(here, g), g.at[(0,) * g.ndim].set(value), g)

            return jax.tree.map(one, layout.leaves, grads)

        return spoil

    def before(self, step: int) -> None:
        """What happens to a process on the host, before it starts step `step`."""
        if jax.process_index() != self.process:
            return
        if self.kind == "slow" and step >= self.step:
            time.sleep(0.5)
        if step != self.step:
            return
        if self.kind in ("die", "term", "late"):
            os.kill(os.getpid(), signal.SIGKILL if self.kind == "die" else signal.SIGTERM)
        if self.kind in ("stuck", "late"):
            time.sleep(10**6)

    @contextmanager
    def no_room(self, step: int) -> Iterator[None]:
        """While the checkpoint of `step` is written: the system refuses larger files, as a full disk would."""
        if self.kind != "full" or step != self.step:
            yield
            return
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    def spoil_batch(self, index: int, batch: Mapping) -> Mapping:
        """The batch of this index, counted from 0 as in the metrics; a step that comes again has another one."""
        if self.kind != "batch" or index + 1 != self.step:
            return batch
        rng = np.random.default_rng(0)
        return {**batch, "targets": rng.permutation(batch["targets"].ravel()).reshape(batch["targets"].shape)}

    def flip(self, step: int, mesh: Mesh, tree):
        """One device's copy of the first leaf with a bit of it flipped."""
        if self.kind != "flip" or step != self.step:
            return tree
        first, *others = jax.tree.leaves(tree)
        flipped = [
            _flip(shard.data) if shard.device == mesh.devices.flat[self.rank] else shard.data
            for shard in first.addressable_shards
        ]
        first = jax.make_array_from_single_device_arrays(first.shape, first.sharding, flipped)
        return jax.tree.unflatten(jax.tree.structure(tree), [first, *others])


def parse_fault(drill: str | None, num_ranks: int, num_steps: int = MOST, num_processes: int = MOST) -> Fault | None:
    """`"nan:step=5,rank=3,leaf=tokens"` -> Fault. Raises: ConfigError."""
    if drill is None:
        return None
    kind, _, settings = drill.partition(":")
    pairs = [piece.partition("=") for piece in settings.split(",")]
    found = {key.strip(): value.strip() for key, _, value in pairs}
    numbers = {key: value for key, value in found.items() if key != "leaf"}
    known = {"step", "rank", "process", "leaf"}
    if kind not in KINDS or "step" not in found or not found.keys() <= known or len(found) < len(pairs):
        kinds = "; ".join(f"{name}: {what}" + f" ({', '.join(has)})" * bool(has) for name, (what, has) in KINDS.items())
        raise ConfigError(
            f"drill={drill!r}",
            f"must be a fault and its settings, of step, rank, process and leaf. {kinds}",
            "Write nan:step=5,rank=1,leaf=tokens",
        )
    if idle := found.keys() - {"step", *KINDS[kind][1]}:
        raise ConfigError(
            f"drill={drill!r}", f"{kind} must have no {min(idle)}: it would change nothing", "Leave it out"
        )
    if not all(value.isascii() and value.isdigit() for value in numbers.values()):
        raise ConfigError(f"drill={drill!r}", "step, rank and process must be whole numbers", "Write nan:step=5,rank=1")
    fault = Fault(kind, leaf=found.get("leaf", ""), **{key: int(value) for key, value in numbers.items()})
    if fault.rank >= num_ranks:
        raise ConfigError(f"drill={drill!r}", f"its rank must be 0 to {num_ranks - 1}", "Name one of them")
    if fault.process >= num_processes:
        raise ConfigError(f"drill={drill!r}", f"its process must be 0 to {num_processes - 1}", "Name one of them")
    if not 1 <= fault.step <= num_steps:
        raise ConfigError(f"drill={drill!r}", f"its step must be 1 to {num_steps:,}", "Name one of them")
    return fault


def _rank() -> jax.Array:
    """This device's place in the mesh, in mesh order."""
    place = jnp.int32(0)
    for axis in AXES:
        place = place * lax.axis_size(axis) + comm.rank(axis)
    return place


def _flip(x: jax.Array) -> jax.Array:
    """The highest bit of the first number's fraction: the next update may round the lowest away."""
    host = np.array(x)
    host.reshape(-1).view(f"u{host.itemsize}")[0] ^= 1 << (jnp.finfo(host.dtype).nmant - 1)
    return jax.device_put(host, next(iter(x.devices())))
