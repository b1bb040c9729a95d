"""`jaxdist.verify`: a model on any layout, or a user's own sharded step, against the same computation on one device.

For a test of your own:

    def test_my_model():
        jaxdist.verify(MyModel(), mesh="dp=2,tp=2", zero=3).require()

    def test_my_step():
        jaxdist.verify(sharded_step, reference_step, (params, batch)).require()
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

from jaxdist.checkpoint.logical import named
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError
from jaxdist.mesh import AXES, parse_mesh
from jaxdist.models.base import Model
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.parity import (
    GRADIENT_TOLERANCE,
    PROOF_EPS,
    PROOF_LR,
    Difference,
    array_difference,
    compare,
    in_float64,
    observe,
    one_device,
    worst,
)
from jaxdist.plan.proof.trace import Collective, branches_differ, collectives_of
from jaxdist.runtime.devices import acquire_devices
from jaxdist.strategy import ParallelConfig, PrecisionConfig


@dataclass(frozen=True)
class Report:
    """What was compared, and what the sharded program costs a device.

    differences: every leaf by name. tested: False where every result of a step is 0 or one of its arguments.
    collectives: those of one step, in program order. sent_bytes: what one device sends in it, on the stage that sends
    most; None where a loop does not say how often it runs, or a conditional which branch. argument_bytes,
    temporary_bytes: a device's memory by the compiler's plan, None where it has none.
    """

    differences: list[Difference]
    collectives: list[Collective]
    sent_bytes: int | None
    argument_bytes: int | None = None
    temporary_bytes: int | None = None
    notes: list[str] = field(default_factory=list)
    tested: bool = True

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)

    def require(self) -> "Report":
        """This report. Raises: AssertionError naming every leaf that differs."""
        assert self.ok, str(self)
        return self

    def __str__(self) -> str:
        failed = [d for d in self.differences if not d.ok]
        lines = [
            f"{d.kind} {d.name}: error {d.error:.2e}, allowed {d.tolerance:.0e}; norm {d.norm:.6g}, of the reference "
            f"{d.reference_norm:.6g}"
            for d in failed or [worst(self.differences)]
        ]
        count = len(self.differences)
        verdict = f"{len(failed)} of {count} values differ" if failed else f"all {count} values are equal; the worst:"
        if not failed and not self.tested:
            verdict = f"nothing was tested: the {count} values are equal, and each is 0 or an argument of the step"
        cost = [f"{len(self.collectives)} collectives in the program"]
        if self.sent_bytes is not None:
            cost.append(f"{self.sent_bytes:,} bytes sent by a device in a step")
        if self.temporary_bytes is not None:
            cost.append(f"{self.argument_bytes:,} bytes of arguments and {self.temporary_bytes:,} of temporaries")
        return "\n".join([verdict, *lines, ", ".join(cost), *self.notes])


def verify(subject: Model | Callable, reference: Callable | None = None, args: tuple = (), **settings) -> Report:
    """Compare leaf by leaf with one device; see `verify_model` and `verify_step` for the settings.

    verify(model, mesh="dp=2,tp=2", zero=3) trains the model on the mesh and on one device. verify(sharded_step,
    reference_step, (params, batch)) compares what any two functions return of the same arguments.
    """
    if isinstance(subject, Model):
        if reference is not None or args:
            raise ConfigError("a reference for a model", "its reference must be itself on one device", "Leave it out")
        return verify_model(subject, **settings)
    if not callable(subject) or not callable(reference):
        raise ConfigError(
            f"verify({type(subject).__name__}, {type(reference).__name__})",
            "must compare a Model with itself on one device, or a sharded step with a reference step",
            "Use verify(MyModel(), mesh='dp=2') or verify(sharded_step, reference_step, (params, batch))",
        )
    return verify_step(subject, reference, args, **settings)


def verify_model(
    model: Model,
    mesh: str = "",
    *,
    batch_size: int = 16,
    steps: int = 2,
    dtype: str = "float32",
    optimizer: str = "adamw",
    seed: int = 0,
    mask_documents: bool = False,
    device: str = "auto",
    **parallel,
) -> Report:
    """The model's losses, gradients, parameters and moments of `steps` training steps, on the mesh and on one device.

    mesh: as in "dp=2,tp=2"; simulated where there are too few devices, for which no JAX backend may have started yet.
    parallel: the other settings of `ParallelConfig`: zero=3, sp=True, schedule="zb-h1", ...
    Raises: ConfigError for a layout that the model or the settings do not allow.
    """
    config = proof_config(model, mesh, batch_size, steps, dtype, optimizer, seed, mask_documents, **parallel)
    devices = acquire_devices(config.parallel.mesh.num_devices, device)
    with jax.enable_x64(dtype == "float64"):
        batches = random_batches(config, steps, seed + 1)
        expected = observe(one_device(config), devices.take(1), batches)
        found = observe(config, devices.take(config.parallel.mesh.num_devices), batches)
        differences = compare(config, found, expected, lambda: in_float64(config, devices.take(1), batches))
    return Report(differences, list(found.collectives), found.sent_bytes)


def proof_config(
    model: Model,
    mesh: str,
    batch_size=16,
    steps=2,
    dtype="float32",
    optimizer="adamw",
    seed=0,
    mask_documents=False,
    **parallel,
) -> RunConfig:
    """A run whose updates do not amplify rounding (`jaxdist.parity.PROOF_LR`)."""
    return RunConfig(
        model=model,
        parallel=ParallelConfig(mesh=parse_mesh(mesh), **parallel),
        optimizer=OptimizerConfig(name=optimizer, lr=PROOF_LR, warmup_steps=0, eps=PROOF_EPS),
        precision=PrecisionConfig(dtype),
        batch_size=batch_size,
        steps=steps,
        seed=seed,
        mask_documents=mask_documents,
    )


def verify_step(sharded: Callable, reference: Callable, args: tuple, *, tolerance: float | None = None) -> Report:
    """What `sharded(*args)` and `reference(*args)` return, leaf by leaf: any pytrees of one structure.

    sharded: a function of global arrays, usually a `jax.shard_map`, jitted or not. args: of both; they are not donated.
    tolerance: of a leaf's relative error, by norm and by largest element; default: what rounding in the reference's
    dtype explains, of NumPy's float64 in JAX's widest. The report's notes say where the two differ.
    Raises: ConfigError where the structures differ, or nothing is returned.
    """
    jitted = sharded if isinstance(sharded, jax.stages.Wrapped) else jax.jit(sharded)
    expected = _leaves(jax.tree.map(_on_host, reference(*args)))
    given = {_on_host(x).tobytes() for x in jax.tree.leaves(args)}
    traced = jitted.trace(*args)
    compiled = traced.lower().compile()
    found = _leaves(jax.tree.map(_on_host, jitted(*args)))
    if found.keys() != expected.keys():
        differing = sorted(found.keys() ^ expected.keys())
        raise ConfigError(
            f"results of {len(found)} and {len(expected)} leaves",
            f"both must have the same ones, and only one has {', '.join(map(repr, differing[:3]))}",
            "Return the same pytree from both steps",
        )
    if not found:
        raise ConfigError("results without any leaf", "must have some to compare", "Return what the step computes")
    differences = [_difference(name or "result", found[name], expected[name], tolerance) for name in found]
    dtypes = [
        f"{name or 'result'} is {x.dtype}; the reference's is {expected[name].dtype}"
        for name, x in found.items()
        if x.dtype != expected[name].dtype
    ]
    collectives: list[Collective] = []
    notes: list[str] = []
    mesh = _mesh_of(traced.jaxpr)
    try:
        collectives = collectives_of(traced.jaxpr, mesh)
    except ValueError as error:
        notes = [str(error)]
    if not notes and branches_differ(traced.jaxpr):
        notes = ["the branches of a conditional send different things: the program does not say what a step sends"]
    memory = compiled.memory_analysis()
    sent_bytes = None if notes else sum(c.sent_bytes(mesh) for c in collectives)
    return Report(
        differences,
        collectives,
        sent_bytes,
        memory and memory.argument_size_in_bytes,
        memory and memory.temp_size_in_bytes,
        notes + dtypes,
        tested=any(x.any() and x.tobytes() not in given for x in expected.values()),
    )


def _on_host(x) -> np.ndarray:
    """The values; of typed random keys, the numbers that they are made of."""
    is_key = isinstance(x, jax.Array) and jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(x) if is_key else x)


OF_PARTS = {"complex64": "float32", "complex128": "float64"}


def _difference(name: str, ours: np.ndarray, theirs: np.ndarray, tolerance: float | None) -> Difference:
    if not np.issubdtype(theirs.dtype, np.inexact) and theirs.dtype.kind != "V":
        return Difference("value", name, 0.0 if np.array_equal(ours, theirs) else math.inf, 0.0, math.nan, math.nan)
    # Without 64 bits a reference in NumPy is wider than any result; one that is narrower than need be lost something.
    dtype = str(jax.dtypes.canonicalize_dtype(theirs.dtype))
    allowed = GRADIENT_TOLERANCE.get(OF_PARTS.get(dtype, dtype), 1e-5) if tolerance is None else tolerance
    wide = np.complex128 if "c" in (ours.dtype.kind, theirs.dtype.kind) else np.float64
    pair = (ours.astype(wide), theirs.astype(wide))
    if ours.shape == theirs.shape:  # a number that is infinite in both is no difference
        finite = ~(np.isinf(pair[1]) & (pair[0] == pair[1]))
        pair = tuple(np.where(finite, x, 0) for x in pair)
    return array_difference("value", name, *pair, allowed, True)


def _leaves(tree) -> dict[str, np.ndarray]:
    """The leaves by name; by jax's own where joined names of two are one, as those of {"a": {"b": x}, "a.b": y}."""
    found = named("", tree)
    if len(found) == len(jax.tree.leaves(tree)):
        return found
    return {jax.tree_util.keystr(path): x for path, x in jax.tree.leaves_with_path(tree)}


def _mesh_of(closed) -> Any:
    """The sizes of the axes that the program is mapped over, whatever their names."""
    sizes = dict.fromkeys(AXES, 1)

    def walk(jaxpr) -> None:
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            if eqn.primitive.name == "shard_map":
                sizes.update(eqn.params["mesh"].shape)
            for inner in inner_programs(eqn):
                walk(inner)

    walk(closed)
    return SimpleNamespace(**sizes, size=sizes.__getitem__)
