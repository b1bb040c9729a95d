"""Is the sharded run the same computation as the one-device one? Every leaf by name, with a verdict.

Both runs start from bit-equal parameters and see the same global batches; the sharded one runs the very step that
trains, with its gradients as an extra output.
"""

import dataclasses
import math
from dataclasses import dataclass

import jax
import numpy as np

from jaxdist.config import ParallelConfig, RunConfig
from jaxdist.layout import STACKED, local_bytes
from jaxdist.logical import MOMENTS, PARAMS, fetch, logical_parameters, named, to_logical
from jaxdist.mesh import make_mesh
from jaxdist.plan.trace import total_sent
from jaxdist.runtime import refused_option
from jaxdist.step import build_program

# Relative errors that rounding alone explains. fp32 and fp64 hold for any order of summation, and for the largest
# element as well as for the L2 norm. In 16 bits every activation is rounded after every partial sum, so two meshes
# differ: ten units of the last place are allowed (eps is 2^-7 in bf16, 2^-10 in fp16), and single elements, which
# the sum of many tokens may leave near 0, by more: there the norm alone is held to the tolerance.
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 8e-2, "float16": 1e-2}
LOSS_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-3, "float16": 2e-4}

# A proof compiles much and computes little. Not every jaxlib takes both.
QUICK_ON_CPU = {"xla_backend_optimization_level": 0, "xla_cpu_use_fusion_emitters": False}


@dataclass(frozen=True)
class Difference:
    """The relative error of one value (a loss, or a leaf of one layer) and what is allowed; norms of both runs."""

    kind: str
    name: str
    error: float
    tolerance: float
    norm: float
    reference_norm: float

    @property
    def ok(self) -> bool:
        return self.error <= self.tolerance


@dataclass(frozen=True)
class Observed:
    """What one run computed: losses and gradient norms by step, first-step gradients, final parameters and moments."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    moments: dict[str, np.ndarray]
    state_bytes: int
    sent_bytes: int


def random_batches(config: RunConfig, num_steps: int, seed: int = 1) -> list[dict[str, np.ndarray]]:
    """Random tokens; some targets are ignored, unevenly over the rows, so that a mean of means shows."""
    rng = np.random.default_rng(seed)
    rows, length = config.batch_size, config.model.seq_len
    batches = []
    for _ in range(num_steps):
        tokens = rng.integers(0, config.model.vocab_size, (rows, length + 1)).astype(np.int32)
        targets = tokens[:, 1:].copy()
        for row in range(rows):
            targets[row, length - (row * length) // (2 * rows) :] = -1
        batches.append({"inputs": tokens[:, :-1], "targets": targets, "rows": np.arange(rows, dtype=np.int32)})
    return batches


def observe(config: RunConfig, devices: list[jax.Device], batches: list[dict[str, np.ndarray]]) -> Observed:
    """Run `batches` as training steps and bring everything back at logical shape."""
    mesh = make_mesh(config.parallel.mesh, devices)
    # The program is the one that trains; of the CPU's code generators it is the quick one, and told not to polish.
    quick = {name: value for name, value in QUICK_ON_CPU.items() if refused_option(name, value) is None}
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    program = build_program(config, mesh, with_gradients=True, compiler_options=quick if on_cpu else None)
    abstract = (program.abstract_state(), program.abstract_batch())
    traced = program.step.trace(*abstract)
    step = traced.lower().compile()
    state = program.init(config.seed)
    losses, norms, gradients = [], [], None
    for batch in batches:
        state, metrics, grads = step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        if gradients is None:
            gradients = _by_layer(named("", fetch(logical_parameters(program, grads))))
    final = _by_layer(fetch(to_logical(program, state)))
    return Observed(
        losses=losses,
        norms=norms,
        gradients=gradients,
        parameters=_under(PARAMS, final),
        moments=_under(MOMENTS, final),
        state_bytes=local_bytes(abstract[0]),
        sent_bytes=total_sent(program.collectives_of(traced), config.parallel.mesh),
    )


def one_device(config: RunConfig) -> RunConfig:
    """The reference of a run: the same computation with no mesh and no strategy."""
    return dataclasses.replace(config, parallel=ParallelConfig(attention=config.parallel.attention))


def compare(config: RunConfig, run: Observed, reference: Observed) -> list[Difference]:
    """Every loss, gradient norm, gradient, parameter and moment, layer by layer."""
    dtype = coarsest_dtype(config)
    loss_tolerance, tolerance = LOSS_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    differences = []
    for step, (ours, theirs) in enumerate(zip(run.losses, reference.losses, strict=True), 1):
        differences.append(_scalar("loss", f"step {step}", ours, theirs, loss_tolerance))
    for step, (ours, theirs) in enumerate(zip(run.norms, reference.norms, strict=True), 1):
        differences.append(_scalar("gradient norm", f"step {step}", ours, theirs, tolerance * (1 if step == 1 else 10)))
    elementwise = dtype in ("float32", "float64")
    for name, ours in run.gradients.items():
        differences.append(_array("gradient", name, ours, reference.gradients[name], tolerance, elementwise))
    differences += compare_parameters(config, run, reference)
    # A second moment is a gradient squared: twice the relative error; and later steps see parameters that differ.
    for name, ours in run.moments.items():
        differences.append(_array("moment", name, ours, reference.moments[name], 10 * tolerance, elementwise))
    return differences


def coarsest_dtype(config: RunConfig) -> str:
    """The coarser of the dtypes in which a gradient is computed and summed: what its rounding is measured by."""
    return max(config.precision.dtype, config.precision.reduction_dtype, key=GRADIENT_TOLERANCE.__getitem__)


def compare_parameters(config: RunConfig, run: Observed, reference: Observed) -> list[Difference]:
    """Parameters after the steps, with the error that an update rule may make of an allowed gradient error.

    AdamW and Lion divide an element's gradient by its own size. Where a gradient is rounding noise (a key bias shifts
    every score of a query alike, so its true gradient is 0), the update is noise of size lr too, and no tolerance on
    the parameter itself would mean anything. So an element's difference, in units of the largest total update, is
    weighted by the size of its gradient relative to the largest of its leaf: the error is traced back to the gradient
    that caused it and held to a gradient's tolerance, times 10 for the steps after the first. (That noise also moves
    the next step's gradients by about lr, so proofs use a small one.)
    """
    tolerance = 10 * GRADIENT_TOLERANCE[coarsest_dtype(config)]
    normalised = config.optimizer.name in ("adamw", "lion", "adafactor")
    eps = float(np.finfo(config.precision.master_dtype).eps)
    differences = []
    for name, ours in run.parameters.items():
        theirs, gradient = reference.parameters[name], np.abs(reference.gradients[name])
        rounding = 4 * eps * len(reference.losses) * np.abs(theirs)
        gap = np.maximum(np.abs(ours - theirs) - rounding, 0)
        peak = gradient.max() or 1.0
        step_size = config.optimizer.lr * len(reference.losses)
        if normalised:
            error = float((gap / step_size * gradient / peak).max())
        else:
            error = float((gap / step_size).max() / peak)
        differences.append(
            Difference("parameter", name, error, tolerance, float(np.linalg.norm(ours)), float(np.linalg.norm(theirs)))
        )
    return differences


def worst(differences: list[Difference], kind: str | None = None) -> Difference:
    """The difference closest to (or furthest beyond) its tolerance."""

    def severity(difference: Difference) -> float:
        return math.inf if math.isnan(difference.error) else difference.error / difference.tolerance

    return max((d for d in differences if kind in (None, d.kind)), key=severity)


def _scalar(kind, name, ours, theirs, tolerance) -> Difference:
    error = abs(ours - theirs) / max(abs(theirs), 1e-30)
    return Difference(kind, name, error, tolerance, abs(ours), abs(theirs))


def _array(kind, name, ours, theirs, tolerance, elementwise) -> Difference:
    """Relative error in the L2 norm; with `elementwise`, of the largest element where that is worse."""
    norm, reference_norm = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    gap = ours - theirs
    if not theirs.any():
        error = 0.0 if not gap.any() else math.inf
    else:
        error = float(np.linalg.norm(gap)) / reference_norm
        error = max(error, float(np.abs(gap).max() / np.abs(theirs).max())) if elementwise else error
    return Difference(kind, name, error, tolerance, norm, reference_norm)


def _by_layer(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Logical arrays as float64, those of stacked layers one layer at a time."""
    split = {}
    for name, x in arrays.items():
        array = np.asarray(x).astype(np.float64)
        if STACKED in name.split("."):
            split.update({f"{name}[{layer}]": part for layer, part in enumerate(array)})
        else:
            split[name] = array
    return split


def _under(prefix: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {name.removeprefix(f"{prefix}."): x for name, x in arrays.items() if name.startswith(f"{prefix}.")}
