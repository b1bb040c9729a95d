"""Is the sharded run the same computation as the one-device one? Every leaf by name, with a verdict.

Both runs start from the same random parameters, to the bit, and see the same global batches; the sharded one runs the
very step that trains, with its gradients as an extra output.
"""

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jaxdist.checkpoint.logical import (
    MOMENTS,
    PARAMS,
    compute_parameters,
    fetch,
    from_logical,
    logical_parameters,
    named,
    to_logical,
)
from jaxdist.config import RunConfig
from jaxdist.layout import Layout, split_outer
from jaxdist.mesh import MeshShape, make_mesh
from jaxdist.models.base import Model, declare, split_kinds
from jaxdist.models.context import Batch, Context
from jaxdist.params import STACKED, named_params
from jaxdist.plan.proof.trace import Collective, step_collectives, total_sent
from jaxdist.runtime.devices import refused_option
from jaxdist.specs import local_bytes
from jaxdist.strategy import ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

# Relative errors that rounding alone explains. fp32 and fp64 hold for any order of summation, and for the largest
# element as well as for the L2 norm. In 16 bits every activation is rounded after every partial sum, so two meshes
# differ: ten units of the last place are allowed (eps is 2^-7 in bf16, 2^-10 in fp16), and single elements, which
# the sum of many tokens may leave near 0, by more: there the norm alone is held to the tolerance. What depends on
# earlier updates (gradients and norms of later steps, parameters) may be off by LATER times as much in 32 and 64 bits,
# since an update makes lr out of a gradient that is rounding noise; so may moments, since some are gradients squared.
GRADIENT_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 8e-2, "float16": 1e-2}
LOSS_TOLERANCE = {"float32": 1e-5, "float64": 1e-10, "bfloat16": 1e-3, "float16": 2e-4}
LATER = 2

# A sum whose terms cancel keeps their rounding: no order of summation is the right one, and a tolerance relative to
# what is left means nothing. So what fails in fp32 is judged by float64: it is equal where it is at most so many times
# as far from the float64 value as one device's is, in any layer or step.
NEAR = 8

# Of a gradient's element in 64 bits, relative to the largest of its leaf: below this it is rounding noise.
NOISE = 1e-13

# AdamW makes steps of size lr out of rounding noise where a true gradient is 0, or near eps: a small lr, and an eps
# above that noise, keep it out of the next step's gradients.
PROOF_LR, PROOF_EPS = 1e-4, 1e-6

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
    """What one run computed, at logical shape: by step, and the state after the last one.

    rates: learning rates. group_norms: norms of parts of the gradient, by name (`Layout.groups`). rounded: the 16-bit
    parameters, empty where parameters are their own masters. moments: those that are arrays; counters: every other
    number of the state, and the targets of each step. evaluation: mean loss of the last batch, without dropout.
    unequal: arrays of the state of which two devices hold different copies.
    """

    gradients: list[dict[str, np.ndarray]]
    parameters: dict[str, np.ndarray]
    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)
    group_norms: list[dict[str, float]] = dataclasses.field(default_factory=list)
    rates: list[float] = dataclasses.field(default_factory=list)
    moments: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    counters: dict[str, float] = dataclasses.field(default_factory=dict)
    evaluation: float = 0.0
    rounded: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    unequal: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    state_bytes: int = 0
    sent_bytes: int = 0
    collectives: tuple[Collective, ...] = ()


def random_parameters(config: RunConfig, layout: Layout) -> dict[str, np.ndarray]:
    """Every leaf drawn at random, at logical shape: a scale of 1 or a bias of 0 would hide what is done with it.

    Matrices are large enough that attention is not uniform. Padded rows of the vocabulary are 0, as they always are.
    """
    rng = np.random.default_rng(config.seed)

    def draw(leaf) -> np.ndarray:
        noise = rng.standard_normal(leaf.shape).astype(np.float32)
        values = np.float32(leaf.param.mean) + np.float32(0.2 if leaf.param.mean else 0.08) * noise
        if leaf.param.real is not None:
            values[leaf.param.real :] = 0
        return values

    return {leaf.name: draw(leaf) for leaf in jax.tree.leaves(layout.leaves)}


def forward_logits(model: Model, params: dict, tokens_BT: np.ndarray, device: jax.Device) -> np.ndarray:
    """[B, T, V] by the functions that train, layer after layer on one device. params: whole, as a nested dict."""

    def forward(params, tokens_BT):
        ctx, (outer, layers) = Context(), split_outer(params)
        x_BTD = model.embed(ctx, outer, Batch(tokens_BT, None, None))
        for number in range(model.num_layers):
            block, place = divmod(number, len(model.kinds))
            weights = split_kinds(model, jax.tree.map(lambda w, at=block: w[at], layers))[place]
            x_BTD = model.layer(ctx, model.kinds[place], weights, x_BTD, jnp.int32(number))
        x_BTD, table_VD = model.head(ctx, outer, x_BTD)
        return (x_BTD @ table_VD.T)[..., : model.vocab_size]

    spec = PartitionSpec()
    run = jax.shard_map(forward, mesh=make_mesh(MeshShape(), [device]), in_specs=(spec, spec), out_specs=spec)
    return np.asarray(jax.jit(run)(params, tokens_BT))


def quick_options(mesh: jax.sharding.Mesh) -> dict | None:
    """For the program that trains: of the CPU's code generators the quick one, told not to polish, as this jaxlib has
    them; None elsewhere."""
    if mesh.devices.flat[0].platform != "cpu":
        return None
    return {name: value for name, value in QUICK_ON_CPU.items() if refused_option(name, value) is None}


def observe(
    config: RunConfig,
    devices: list[jax.Device],
    batches: list[dict[str, np.ndarray]],
    parameters: dict[str, np.ndarray] | None = None,
) -> Observed:
    """Run `batches` as training steps and bring everything back at logical shape.

    parameters: to start from, at logical shape, by name; `random_parameters` if none are given.
    """
    mesh = make_mesh(config.parallel.mesh, devices)
    options = {"with_gradients": True, "compiler_options": quick_options(mesh)}
    program = build_program(config, mesh, **options, draws_choices=not is_elementwise(config))
    abstract = (program.abstract_state(), program.abstract_batch())
    traced = program.step.trace(*abstract)
    step = traced.lower().compile()
    collectives = step_collectives(program, traced)
    if parameters is None:
        parameters = random_parameters(config, program.layout)
    state = from_logical(program, {f"{PARAMS}.{name}": x for name, x in parameters.items()})
    losses, norms, group_norms, rates, gradients, counters = [], [], [], [], [], {}
    groups = program.layout.trained.groups
    for batch in batches:
        state, metrics, grads = step(state, program.put(batch))
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
        group_norms.append(dict(zip(groups, map(float, metrics["group_norms"]), strict=True)))
        rates.append(float(metrics["lr"]))
        counters[f"targets of step {len(losses)}"] = float(metrics["tokens"])
        gradients.append(by_layer(named("", fetch(logical_parameters(program, grads)))))
    total, count = map(float, program.evaluate(state.params, program.put(batches[-1])))
    final = fetch(to_logical(program, state))
    counters |= {name: float(x) for name, x in final.items() if x.ndim == 0 and is_counter(name, x)}
    arrays = by_layer({name: x for name, x in final.items() if name not in counters})
    rounded = {} if state.master is None else named("", fetch(compute_parameters(program, state.params)))
    return Observed(
        losses=losses,
        norms=norms,
        group_norms=group_norms,
        rates=rates,
        gradients=gradients,
        parameters=_under(PARAMS, arrays),
        moments=_under(MOMENTS, arrays),
        counters=counters,
        evaluation=total / count,
        rounded=by_layer(rounded),
        unequal=unequal_copies(state),
        changed=changed_though_frozen(program.layout, parameters, final),
        state_bytes=local_bytes(abstract[0]),
        sent_bytes=total_sent(collectives, config.parallel.mesh),
        collectives=tuple(collectives),
    )


def is_counter(name: str, x: np.ndarray) -> bool:
    """Whether a single number of a state is exact: not a parameter, nor its moment."""
    return not name.startswith(f"{PARAMS}.") and not (name.startswith(f"{MOMENTS}.") and x.dtype.kind == "f")


def changed_though_frozen(
    layout: Layout, before: dict[str, np.ndarray], after: dict[str, np.ndarray]
) -> tuple[str, ...]:
    """Frozen parameters whose bits are not those that the run began with."""

    def differs(leaf) -> bool:
        now = after[f"{PARAMS}.{leaf.name}"]
        return before[leaf.name].astype(now.dtype).tobytes() != now.tobytes()

    return tuple(leaf.name for leaf in jax.tree.leaves(layout.leaves) if leaf.param.frozen and differs(leaf))


def unequal_copies(state) -> tuple[str, ...]:
    """Arrays of which this process's devices hold the same part with different bits."""

    def differs(x: jax.Array) -> bool:
        seen: dict[str, bytes] = {}
        parts = ((str(part.index), np.asarray(part.data).tobytes()) for part in x.addressable_shards)
        return any(seen.setdefault(index, data) != data for index, data in parts)

    return tuple(name for name, x in named("", state).items() if differs(x))


def one_device(config: RunConfig) -> RunConfig:
    """The reference of a run: the same computation with no mesh and no strategy."""
    return dataclasses.replace(config, parallel=ParallelConfig(attention=config.parallel.attention))


def compare(
    config: RunConfig, run: Observed, reference: Observed, exact: Callable[[], Observed] | None = None
) -> list[Difference]:
    """Every number of each step and every array of the final state, layer by layer; what only one run has is wrong, and
    so is a loss without any gradient, of which nothing would be tested.

    exact: makes the reference in float64, which settles what fails in fp32 (`NEAR`).
    """
    found = _compared(config, run, reference)
    if not any(reference.norms):
        found.append(Difference("gradient", "every one is 0: nothing was tested", math.inf, 0.0, 0.0, 0.0))
    if exact is None or coarsest_dtype(config) != "float32" or all(each.ok for each in found):
        return found
    return settled(found, run, reference, exact())


def in_float64(config: RunConfig, devices: list[jax.Device], batches: list[dict[str, np.ndarray]]) -> Observed:
    """The reference of a run, on one device in float64, from the same parameters."""
    with jax.enable_x64(True):
        return observe(dataclasses.replace(one_device(config), precision=PrecisionConfig("float64")), devices, batches)


def settled(found: list[Difference], run: Observed, reference: Observed, exact: Observed) -> list[Difference]:
    """Differences, those that rounding explains in units of it: how far one device is from float64.

    That is taken over all layers and steps of a leaf, since what a single number is off by may be small by chance.
    """
    ours, theirs, true = map(_values, (run, reference, exact))

    def leaf(kind: str, name: str) -> tuple[str, str]:
        return kind.partition(" of ")[0], name.partition("[")[0]

    def sizes(values: dict, key: tuple[str, str]) -> np.ndarray:
        """(largest element, L2 norm) of the distance from float64."""
        gap = np.abs(np.asarray(values[key]) - true[key])
        return np.array([gap.max(), np.linalg.norm(gap)])

    rounding: dict[tuple[str, str], np.ndarray] = {}
    for key in theirs.keys() & true.keys():
        rounding[leaf(*key)] = np.maximum(rounding.get(leaf(*key), 0.0), sizes(theirs, key))

    def judge(each: Difference) -> Difference:
        key, least = (each.kind, each.name), rounding.get(leaf(each.kind, each.name))
        if each.ok or least is None or not least.all() or np.shape(ours.get(key)) != np.shape(true.get(key)):
            return each
        error = float((sizes(ours, key) / least).max())
        return dataclasses.replace(each, error=error, tolerance=NEAR) if error <= NEAR else each

    return [judge(each) for each in found]


def _values(run: Observed) -> dict[tuple[str, str], Any]:
    """What float64 may settle, by kind and name as `_compared` has them."""
    found: dict = {("moment", name): x for name, x in run.moments.items()}
    found |= {("parameter", name): x for name, x in run.parameters.items()}
    for step, (gradients, norms) in enumerate(zip(run.gradients, run.group_norms, strict=True), 1):
        later = "" if step == 1 else f" of step {step}"
        found |= {(f"gradient{later}", name): x for name, x in gradients.items()}
        found |= {(f"gradient norm{later}", name): x for name, x in norms.items()}
    return found


def _compared(config: RunConfig, run: Observed, reference: Observed) -> list[Difference]:
    dtype = coarsest_dtype(config)
    loss_tolerance, tolerance = LOSS_TOLERANCE[dtype], GRADIENT_TOLERANCE[dtype]
    exact = GRADIENT_TOLERANCE[config.precision.master_dtype]
    elementwise = is_elementwise(config)
    later = tolerance * (LATER if elementwise else 1)

    def by_step(kind: str, ours: list[float], theirs: list[float], first: float, later: float) -> list[Difference]:
        return [
            _scalar(kind, f"step {step}", a, b, first if step == 1 else later)
            for step, (a, b) in enumerate(zip(ours, theirs, strict=True), 1)
        ]

    differences = by_step("loss", run.losses, reference.losses, loss_tolerance, loss_tolerance)
    differences += by_step("gradient norm", run.norms, reference.norms, tolerance, later)
    differences += by_step("learning rate", run.rates, reference.rates, exact, exact)
    differences.append(_scalar("loss", "evaluation", run.evaluation, reference.evaluation, loss_tolerance))
    differences += _each("counter", run.counters, reference.counters, lambda *pair: _scalar("counter", *pair, 0.0))

    def arrays(kind: str, ours: dict, theirs: dict, allowed: float) -> list[Difference]:
        return _each(kind, ours, theirs, lambda *pair: array_difference(kind, *pair, allowed, elementwise))

    for step, (ours, theirs) in enumerate(zip(run.gradients, reference.gradients, strict=True), 1):
        kind, allowed = ("gradient", tolerance) if step == 1 else (f"gradient of step {step}", later)
        differences += arrays(kind, ours, theirs, allowed)
    for step, (ours, theirs) in enumerate(zip(run.group_norms, reference.group_norms, strict=True), 1):
        kind, allowed = ("gradient norm", tolerance) if step == 1 else (f"gradient norm of step {step}", later)
        differences += _each(kind, ours, theirs, partial(_scalar, kind, tolerance=allowed))
    differences += compare_parameters(config, run, reference)
    differences += compare_rounded(config, run)
    differences += arrays("moment", run.moments, reference.moments, LATER * tolerance)
    for kind, names in (("copies", run.unequal), ("frozen", (*run.changed, *reference.changed))):
        differences += [Difference(kind, name, math.inf, 0.0, math.nan, math.nan) for name in names]
    return differences


def _each(kind: str, run: dict, reference: dict, judge: Callable[..., Difference]) -> list[Difference]:
    """`judge(name, ours, theirs)` of every name. A name that one run lacks, or nothing to compare, is a difference."""
    missing = run.keys() ^ reference.keys() or ({"nothing was compared"} if not run else set())
    return [judge(name, run[name], reference[name]) for name in run if name in reference] + [
        Difference(kind, name, math.inf, 0.0, math.nan, math.nan) for name in sorted(missing)
    ]


def compare_rounded(config: RunConfig, run: Observed) -> list[Difference]:
    """The 16-bit parameters of a run are its masters, rounded: to the bit."""
    if config.precision.dtype == config.precision.master_dtype:
        return []
    expected = {name: x.astype(config.precision.dtype).astype(np.float64) for name, x in run.parameters.items()}
    kind = f"{config.precision.dtype} parameter"
    return _each(kind, run.rounded, expected, lambda *pair: array_difference(kind, *pair, 0.0, True))


def coarsest_dtype(config: RunConfig) -> str:
    """The coarser of the dtypes in which a gradient is computed and summed: what its rounding is measured by."""
    return max(config.precision.dtype, config.precision.reduction_dtype, key=GRADIENT_TOLERANCE.__getitem__)


def is_elementwise(config: RunConfig) -> bool:
    """Whether single elements are held to a tolerance, and choices to those of the scores: not in 16 bits."""
    return coarsest_dtype(config) in ("float32", "float64")


def compare_parameters(config: RunConfig, run: Observed, reference: Observed) -> list[Difference]:
    """Parameters after the steps, with the error that an update rule may make of an allowed gradient error.

    AdamW and Lion divide an element's gradient by its own size. Where a gradient is rounding noise (a key bias shifts
    every score of a query alike, so its true gradient is 0), the update is noise of size lr too, and no tolerance on
    the parameter itself would mean anything. So an element's difference, in units of the largest total update, is
    weighted by the size of its gradient relative to the largest of its leaf: the error is traced back to the gradient
    that caused it and held to a gradient's tolerance, times LATER for the steps after the first. (That noise also moves
    the next step's gradients by about lr, so proofs use a small one.)

    In 64 bits the noise is far below AdamW's eps, and no element is weighted; under Adafactor, which has no such eps,
    only those are whose gradient is noise. Nor is one of Muon's matrices in 32 bits: its update is of the whole matrix.

    Lion's update is a sign, and so is a balancing bias's. What is near 0 in any step may be of either sign, whatever it
    was in the first. So an element is weighted by the least that its sign was taken of in any of the steps, relative to
    the largest of the leaf in that step: in 64 bits again only where that is noise.

    A count is no update: it is what the last step counted, held to a gradient's tolerance element by element; in 16
    bits, where it is rounded once on each rank, to a tenth of it, which is one unit in the last place.
    """
    dtype = coarsest_dtype(config)
    tolerance = GRADIENT_TOLERANCE[dtype]
    closely = tolerance if is_elementwise(config) else tolerance / 10
    eps = float(np.finfo(config.precision.master_dtype).eps)
    num_steps = len(reference.gradients)
    params = dict(named_params(declare(config.model)))
    orthogonal = config.optimizer.name == "muon"
    signed = lion_directions(config, reference) if config.optimizer.name == "lion" else []

    def judge(name: str, ours: np.ndarray, theirs: np.ndarray) -> Difference:
        norms = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
        if any(name not in each for each in reference.gradients) or ours.shape != theirs.shape:
            return Difference("parameter", name, math.inf, LATER * tolerance, *norms)
        param = params.get(name.partition("[")[0])
        update = "gradient" if param is None else param.update
        if update == "count":
            return array_difference("count", name, ours, theirs, closely, True)
        rounding = 4 * eps * num_steps * np.abs(theirs)
        gap = np.maximum(np.abs(ours - theirs) - rounding, 0)
        if param is not None and update == "balance":
            error = gap / param.rate * nearness([each[name] for each in reference.gradients], dtype)
            return Difference("balance", name, float(error.max()), closely, *norms)
        gradients = [np.abs(each[name]) for each in reference.gradients]
        peak = gradients[0].max() or 1.0
        error = gap / (config.optimizer.lr * num_steps)
        if config.optimizer.name == "sgd":
            error = error / peak
        elif config.optimizer.name == "lion":
            error = error * nearness([each[name] for each in signed], dtype)
        elif config.optimizer.name == "adafactor" and dtype == "float64":
            error = error * nearness(gradients, dtype)
        elif dtype != "float64" and not (dtype == "float32" and orthogonal and param is not None and param.matrix):
            error = error * gradients[0] / peak
        return Difference("parameter", name, float(error.max()), LATER * tolerance, *norms)

    frozen = {name for name, param in params.items() if param.frozen}  # `changed` is about these
    trained = [
        {name: x for name, x in found.parameters.items() if name.partition("[")[0] not in frozen}
        for found in (run, reference)
    ]
    return _each("parameter", *trained, judge)


def nearness(values: list[np.ndarray], dtype: str) -> np.ndarray:
    """For each element, how far from 0 it was where it was nearest, over steps: 0 to 1, the largest of the leaf. In 64
    bits 1 for all but noise."""
    shares = [np.abs(x) / (np.abs(x).max() or 1.0) for x in values]
    least = np.min(shares, axis=0)
    return np.where(least > NOISE, 1.0, least) if dtype == "float64" else least


def lion_directions(config: RunConfig, run: Observed) -> list[dict[str, np.ndarray]]:
    """What Lion takes the signs of in each step, from a run's gradients (arXiv 2302.06675, algorithm 2)."""
    rule, momentum, found = config.optimizer, None, []
    for grads, norm in zip(run.gradients, run.norms, strict=True):
        shrink = rule.clip_norm / max(norm, rule.clip_norm)
        clipped = {name: shrink * g for name, g in grads.items()}
        momentum = momentum or {name: np.zeros_like(g) for name, g in clipped.items()}
        found.append({name: rule.beta1 * momentum[name] + (1 - rule.beta1) * g for name, g in clipped.items()})
        momentum = {name: rule.beta2 * momentum[name] + (1 - rule.beta2) * g for name, g in clipped.items()}
    return found


def worst(differences: list[Difference], kind: str | None = None) -> Difference:
    """The difference closest to (or furthest beyond) its tolerance."""

    def severity(difference: Difference) -> float:
        if difference.ok:
            return difference.error / difference.tolerance if difference.tolerance else 0.0
        return math.inf if math.isnan(difference.error) else difference.error / max(difference.tolerance, 1e-30)

    return max((d for d in differences if kind in (None, d.kind)), key=severity)


def _scalar(kind, name, ours, theirs, tolerance) -> Difference:
    error = abs(ours - theirs) / max(abs(theirs), 1e-30)
    return Difference(kind, name, error, tolerance, abs(ours), abs(theirs))


@np.errstate(over="ignore", invalid="ignore")  # norms of 1e200 are infinite, and infinite values differ by NaN
def array_difference(kind, name, ours, theirs, tolerance, elementwise) -> Difference:
    """Relative error in the L2 norm; with `elementwise`, of the largest element where that is worse."""
    norm, reference_norm = float(np.linalg.norm(ours)), float(np.linalg.norm(theirs))
    if ours.shape != theirs.shape:
        error = math.inf
    elif not theirs.any():
        error = 0.0 if not ours.any() else math.inf
    else:
        gap, scaled = (x / np.abs(theirs).max() for x in (ours - theirs, theirs))  # squares of 1e-200 are 0
        error = float(np.linalg.norm(gap) / np.linalg.norm(scaled))
        error = max(error, float(np.abs(gap).max())) if elementwise else error
    return Difference(kind, name, error, tolerance, norm, reference_norm)


def by_layer(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
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
