"""Two runs of one training in step, and the first tensor in which they differ beyond rounding.

Both start from the same parameters and see the same batches. Probes (`jaxdist.probes`) show every layer's tensors in
forward and in backward; what the step returns shows gradients after their reduction and parameters after the update.
They are compared in the order in which a step computes them, so the first that differs is where the fault is.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import jax
import numpy as np

from jaxdist.checkpoint.logical import PARAMS, fetch, from_logical, logical_parameters, named, to_logical
from jaxdist.config import RunConfig
from jaxdist.layout import Leaf
from jaxdist.mesh import AXES, MeshShape, make_abstract_mesh, make_mesh
from jaxdist.models.base import Model
from jaxdist.parallel.relayout import to_compute, to_storage
from jaxdist.parallel.sequence import Split
from jaxdist.params import STACKED
from jaxdist.parity import (
    GRADIENT_TOLERANCE,
    LATER,
    LOSS_TOLERANCE,
    QUICK_ON_CPU,
    Observed,
    by_layer,
    coarsest_dtype,
    compare_parameters,
    one_device,
    random_parameters,
    unequal_copies,
)
from jaxdist.plan.proof.provenance import Provenance
from jaxdist.probes import BACKWARD, FORWARD, Key, Piece, Recorder
from jaxdist.runtime.devices import refused_option
from jaxdist.specs import compute_spec, draw_spec, drop_unit_axes, storage_spec
from jaxdist.train.program import build_program

# The phases of a step, in order.
TARGETS, LOSS, GRADIENT, NORM, PARAMETER = "targets", "loss", "gradient", "gradient norm", "parameter"
PHASES = (TARGETS, FORWARD, LOSS, BACKWARD, GRADIENT, NORM, PARAMETER)
METRIC_OF = {TARGETS: "tokens", LOSS: "loss", NORM: "grad_norm"}
PARTS = ("embed", "layer", "loss")
WHOLE = -1  # in place of a row, of what has none: a sum over rows, a parameter
# Rounding adds up over layers like a random walk. The tolerances of `jaxdist.parity` hold for the gradients of a proof,
# which pass 4 layers twice.
PROVEN_DEPTH = 8


@dataclass(frozen=True)
class Copy:
    """A rank's part of one row of a tensor. at: its place in the whole row; of a partial sum, `value` is the sum."""

    row: int
    ranks: tuple[int, ...]
    value: np.ndarray
    at: tuple[slice | np.ndarray, ...] = ()


@dataclass(frozen=True)
class Tensor:
    """A tensor of one run and step. rows: whole, by row of the global batch. copies: what each rank has of them.

    unequal: ranks whose copies differ in their bits though their type says that they are equal. order: in its part.
    """

    rows: dict[int, np.ndarray]
    copies: list[Copy]
    order: int = 0
    unequal: tuple[int, ...] = ()


@dataclass(frozen=True)
class Checked:
    """The comparison of one tensor. rows, ranks: those that differ. error: relative to the largest element, or to the
    norm. unequal: as `Tensor.unequal`. collective: the last before the tensor in the program, "" for none."""

    step: int
    key: Key
    error: float
    allowed: float
    rows: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    unequal: tuple[int, ...] = ()
    collective: str = ""

    @property
    def ok(self) -> bool:
        return self.error <= self.allowed and not self.unequal


@dataclass(frozen=True)
class Step:
    """What one run computed in one step. dtype: the coarsest that it computed in. tensors: in the order in which it
    computed them. run: that made it, now after this step."""

    number: int
    dtype: str
    tensors: dict[Key, Tensor]
    run: "Run"


class Run:
    """One configuration, compiled with probes, a step at a time."""

    def __init__(
        self, config: RunConfig, devices: list[jax.Device], parameters: Mapping[str, np.ndarray] | None = None
    ):
        """parameters: to start from, at logical shape by name; `random_parameters` if none are given."""
        self.config, self.recorder = config, Recorder()
        with self._precision():
            self._compile(devices, parameters)

    @contextmanager
    def _precision(self) -> Iterator[None]:
        """JAX in 64 bits for a float64 run alone: the other run may be of another dtype. In all threads
        (`jax.enable_x64` is for one): callbacks have their own."""
        before = jax.config.jax_enable_x64
        jax.config.update("jax_enable_x64", self.config.precision.dtype == "float64")
        try:
            yield
        finally:
            jax.config.update("jax_enable_x64", before)

    def _compile(self, devices: list[jax.Device], parameters: Mapping[str, np.ndarray] | None) -> None:
        config = self.config
        mesh = make_mesh(config.parallel.mesh, devices)
        quick = {name: value for name, value in QUICK_ON_CPU.items() if refused_option(name, value) is None}
        options = quick if mesh.devices.flat[0].platform == "cpu" else None
        self.program = build_program(
            config, mesh, with_gradients=True, compiler_options=options, recorder=self.recorder
        )
        abstract = self.program.abstract_state(), self.program.abstract_batch()
        traced = self.program.step.trace(*abstract)
        found = Provenance.of(traced.jaxpr, config.parallel.mesh)
        self._seen_after = {(s.direction, s.part, s.name): text for s, text in found.last.items()}
        state, metrics, gradients = jax.tree.unflatten(traced.out_tree, found.outputs)
        self._before = {GRADIENT: named("", gradients), PARAMETER: named("", state.params)}
        self._before |= {phase: {name: metrics[name]} for phase, name in METRIC_OF.items()}
        self.step = traced.lower().compile()
        self.whole_shapes = whole_shapes(config)
        start = random_parameters(config, self.program.layout) if parameters is None else parameters
        self.state = from_logical(self.program, {f"{PARAMS}.{name}": x for name, x in start.items()})
        self.number = 0
        self.skipped: Counter = Counter()
        self.gradients: list[dict[str, np.ndarray]] = []
        self.parameters: dict[str, np.ndarray] = {}
        self._placed: dict[str, dict] = {}

    @property
    def mesh(self) -> MeshShape:
        return self.config.parallel.mesh

    def advance(self, batch: Mapping[str, np.ndarray]) -> Step:
        """Run one step and bring everything back that is compared."""
        with self._precision():
            return self._advance(batch)

    def _advance(self, batch: Mapping[str, np.ndarray]) -> Step:
        self.number += 1
        self.recorder.take()
        self.state, metrics, gradients = jax.block_until_ready(self.step(self.state, self.program.put(batch)))
        tensors = {}
        for key, pieces in self.recorder.take().items():
            if (tensor := self._assemble(key, pieces)) is None:
                self.skipped[key.name] += 1
            else:
                tensors[key] = tensor
        for phase, name in METRIC_OF.items():
            tensors[Key(phase, "", 0, name)] = _single(np.asarray(metrics[name], np.float64))
        self.gradients.append(by_layer(named("", fetch(logical_parameters(self.program, gradients)))))
        final = fetch(to_logical(self.program, self.state))
        self.parameters = by_layer(
            {n.removeprefix(f"{PARAMS}."): x for n, x in final.items() if n.startswith(f"{PARAMS}.")}
        )
        self._placed = {GRADIENT: named("", gradients), PARAMETER: named("", self.state.params)}
        unequal = {phase: unequal_copies(placed) for phase, placed in self._placed.items()}
        for phase, arrays in ((GRADIENT, self.gradients[-1]), (PARAMETER, self.parameters)):
            for name, x in arrays.items():
                key = leaf_key(self.config.model, phase, name)
                held = self._parts(name, self._placed[phase]) if name.partition("[")[0] in unequal[phase] else ()
                tensors[key] = _single(x, unequal_ranks(held))
        in_order = dict(sorted(tensors.items(), key=lambda item: position(*item)))
        return Step(self.number, coarsest_dtype(self.config), in_order, self)

    def collective_before(self, key: Key) -> str:
        """The last collective that the tensor was computed from, "" for none."""
        if key.direction in self._before:
            return self._before[key.direction].get(key.name.partition("[")[0], "")
        return self._seen_after.get((key.direction, key.part, key.name), "")

    # ---- one tensor, from what its ranks hold ----

    def _assemble(self, key: Key, pieces: list[Piece]) -> Tensor | None:
        """None where it cannot be told how ranks share the tensor."""
        order, unequal = pieces[0].site.order, self._unequal(pieces)
        if not pieces[0].site.shape:
            return self._scalar(key, pieces, order, unequal)
        local, whole = pieces[0].site.shape[1:], self.whole_shapes.get((key.direction, key.part, key.name))
        split = split_dims(local, whole, self.mesh, self.config.model.seq_len)
        varying = pieces[0].site.varying
        if whole is None or split is None or ("cp" in varying and "cp" not in split):
            return None
        partial = key.direction == BACKWARD and "tp" in varying and "tp" not in split
        by_row: dict[int, dict[tuple[int, int], tuple[list[int], np.ndarray]]] = {}
        for piece in pieces:
            who = self.coordinate(piece.rank, "cp"), self.coordinate(piece.rank, "tp")
            for row, value in zip(piece.rows, piece.value, strict=True):
                by_row.setdefault(row, {}).setdefault(who, ([], value))[0].append(piece.rank)
        places = {who: self._place_of(split, local, *who) for parts in by_row.values() for who in parts}
        rows, copies = {}, []
        for row, parts in by_row.items():
            rows[row] = np.zeros(whole)
            for who in sorted(parts, reverse=True):  # of copies the first rank's stays
                value = parts[who][1]
                rows[row][places[who]] = rows[row][places[who]] + value if partial else value
            for who, (ranks, value) in parts.items():
                at = places[who]
                copies.append(Copy(row, tuple(ranks), rows[row][at] if partial else value, at))
        return Tensor(rows, copies, order, unequal)

    def _place_of(self, split: dict[str, int], local: tuple[int, ...], cp: int, tp: int) -> tuple:
        """Where a row's part of ranks with these coordinates is in the whole row."""
        at: list = [slice(None)] * len(local)
        if "tp" in split:
            dim, size = split["tp"], local[split["tp"]]
            at[dim] = slice(tp * size, (tp + 1) * size)
        if "cp" in split:
            dim = split["cp"]
            is_shared = split.get("tp") == dim
            first, num_local = (tp * local[dim], self.mesh.tp * local[dim]) if is_shared else (0, local[dim])
            at[dim] = _positions(self.config.parallel.split, first, local[dim], num_local, cp)
        return tuple(at)

    def _scalar(self, key: Key, pieces: list[Piece], order: int, unequal: tuple[int, ...]) -> Tensor:
        """Forward a sum over rows, and over cp where its ranks differ: of all micro-batches. Backward a factor: each
        micro-batch's."""
        if key.direction == BACKWARD:
            copies = [Copy(WHOLE, (piece.rank,), piece.value) for piece in pieces]
            return Tensor({WHOLE: copies[0].value}, copies, order, unequal)
        copies = []
        for c in range(self.mesh.tp):
            mine = {
                (p.rows, self.coordinate(p.rank, "cp") if "cp" in p.site.varying else 0): p
                for p in pieces
                if self.coordinate(p.rank, "tp") == c
            }
            ranks = tuple(sorted({p.rank for p in mine.values()}))
            copies.append(Copy(WHOLE, ranks, np.sum([p.value for p in mine.values()])))
        return Tensor({WHOLE: copies[0].value}, copies, order, unequal)

    def _unequal(self, pieces: list[Piece]) -> tuple[int, ...]:
        """Ranks that should hold equal copies, by the type, and do not."""

        def own(piece: Piece) -> tuple:
            return piece.rows, [self.coordinate(piece.rank, axis) for axis in AXES if axis in piece.site.varying]

        return unequal_ranks((str(own(piece)), piece.rank, piece.value) for piece in pieces)

    def coordinate(self, rank: int, axis: str) -> int:
        return int(np.unravel_index(rank, self.mesh.sizes)[AXES.index(axis)])

    def name_of(self, rank: int) -> str:
        """As in "3 (dp=1,tp=1)"."""
        places = zip(AXES, np.unravel_index(rank, self.mesh.sizes), self.mesh.sizes, strict=True)
        used = [f"{axis}={place}" for axis, place, size in places if size > 1]
        return f"{rank} ({','.join(used)})" if used else str(rank)

    # ---- what the step returned, rank by rank ----

    def _parts(self, name: str, placed: dict[str, jax.Array]) -> Iterator[tuple[str, int, np.ndarray]]:
        """(which part it is, rank, its values) of a leaf, or of one layer of a stacked one."""
        path, _, number = name.removesuffix("]").partition("[")
        leaf = _leaves(self.program.layout)[path]
        layers = list(leaf.rows if leaf.rows is not None else range(leaf.shape[0]))
        ranks = {device: rank for rank, device in enumerate(self.program.mesh.devices.flat)}
        for part in placed[path].addressable_shards:
            value = np.asarray(part.data).astype(np.float64)
            if number:
                held = layers[part.index[0]]
                if int(number) not in held:
                    continue
                value = value[held.index(int(number))]
            yield str(part.index), ranks[part.device], value

    def ranks_that_differ(self, key: Key, reference: dict[str, np.ndarray], allowed: float) -> tuple[int, ...]:
        """Ranks whose part of a gradient or parameter is not that of the reference, by what it is of the largest."""
        path = key.name.partition("[")[0]
        expected = {rank: x for _, rank, x in self._parts(key.name, self._place(key.direction, path, reference))}
        found = {rank: x for _, rank, x in self._parts(key.name, self._placed[key.direction])}
        peak = max((float(np.abs(x).max(initial=0)) for x in expected.values()), default=0.0) or 1.0
        gaps = {rank: float(np.abs(x - expected[rank]).max(initial=0)) / peak for rank, x in found.items()}
        far = {rank for rank, gap in gaps.items() if not gap <= allowed}
        return tuple(sorted(far or {max(gaps, key=gaps.__getitem__)}))

    def _place(self, phase: str, path: str, reference: dict[str, np.ndarray]) -> dict[str, jax.Array]:
        """One leaf of the reference as this run holds it."""
        leaf, mesh = _leaves(self.program.layout)[path], self.program.mesh
        layers = [f"{path}[{layer}]" for layer in range(leaf.shape[0])]
        logical = reference[path] if path in reference else np.stack([reference[layer] for layer in layers])
        stored = phase == GRADIENT or self.program.layout.params_sharded
        there = drop_unit_axes(draw_spec(leaf), self.mesh)
        here = drop_unit_axes(storage_spec(leaf) if stored else compute_spec(leaf), self.mesh)

        def place(x):
            x = to_storage(leaf, x)
            return x if stored else to_compute(leaf, x)

        dtype = self._placed[phase][path].dtype
        sharded = jax.device_put(logical.astype(dtype), jax.sharding.NamedSharding(mesh, there))
        return {path: jax.jit(jax.shard_map(place, mesh=mesh, in_specs=there, out_specs=here))(sharded)}


def unequal_ranks(parts: Iterable[tuple[str, int, np.ndarray]]) -> tuple[int, ...]:
    """Ranks of the groups whose values, which should be equal, differ in their bits. parts: (group, rank, value)."""
    groups: dict[str, dict[int, bytes]] = {}
    for group, rank, value in parts:
        groups.setdefault(group, {})[rank] = value.tobytes()
    return tuple(sorted({r for held in groups.values() if len(set(held.values())) > 1 for r in held}))


def _leaves(layout) -> dict[str, Leaf]:
    return {leaf.name: leaf for leaf in jax.tree.leaves(layout.leaves)}


def _single(value: np.ndarray, unequal: tuple[int, ...] = ()) -> Tensor:
    """A copy of a value without rows, which every rank has."""
    return Tensor({WHOLE: value}, [Copy(WHOLE, (), value)], 0, unequal)


def whole_shapes(config: RunConfig) -> dict[tuple[str, str, str], tuple[int, ...]]:
    """Shape of a row of every tensor that one device sees, by direction, part and name: traced, not run."""
    alone = one_device(config)
    alone = replace(alone, parallel=replace(alone.parallel, loss_chunks=config.parallel.loss_chunks))
    program = build_program(alone, make_abstract_mesh(MeshShape()), recorder=Recorder())
    traced = program.step.trace(program.abstract_state(), program.abstract_batch())
    return {(s.direction, s.part, s.name): s.shape[1:] for s in Provenance.of(traced.jaxpr, MeshShape()).last}


def split_dims(
    local: tuple[int, ...], whole: tuple[int, ...] | None, mesh: MeshShape, seq_len: int
) -> dict[str, int] | None:
    """The dim of which each rank of an axis holds a part, by axis: of cp that of the positions, of tp any, that of the
    positions too with sequence parallelism. None where it cannot be told."""
    if whole is None or len(local) != len(whole):
        return None
    found, left = {}, list(whole)
    for axis, ranks in (("cp", mesh.cp), ("tp", mesh.tp)):
        dims = [d for d, (a, b) in enumerate(zip(local, left, strict=True)) if a != b and b % (a * ranks) == 0]
        dims = [d for d in dims if axis == "tp" or whole[d] == seq_len]
        if ranks > 1 and dims:
            found[axis] = dims[0]
            left[dims[0]] //= ranks
    return found if tuple(left) == local else None


@cache
def _positions(split: Split, first: int, num: int, num_local: int, rank: int) -> np.ndarray:
    """Positions in the sequence of `num` of the `num_local` that a rank of cp holds, from `first` on."""
    return np.asarray(split.place(first + np.arange(num), num_local, rank))


def leaf_key(model: Model, phase: str, name: str) -> Key:
    """The key of a leaf, as in "blocks.mlp.w_up[2]". Of a block with several kinds the layer is found by its place."""
    path, _, number = name.removesuffix("]").partition("[")
    if not number:
        return Key(phase, "", 0, name)
    place = path.split(".")[path.split(".").index(STACKED) + 1].split("_")[0] if len(model.kinds) > 1 else "0"
    return Key(phase, "layer", int(number) * len(model.kinds) + int(place), name)


def position(key: Key, tensor: Tensor) -> tuple:
    """Sorts tensors as a step computes them. Parameters have the order of their gradients."""
    phase = PHASES.index(key.direction)
    part = PARTS.index(key.part) if key.part in PARTS else len(PARTS)
    if key.direction == FORWARD:
        return phase, part, key.layer, tensor.order, key.name
    if key.direction == BACKWARD:
        return phase, -part, -key.layer, -tensor.order, key.name
    return phase, part, -key.layer, 0, key.name


# ---------------------------------------------------------------------------------------------------------------------
# Comparison
# ---------------------------------------------------------------------------------------------------------------------


def is_elementwise(dtype: str) -> bool:
    """Whether single elements are held to the tolerance too, as in `jaxdist.parity`."""
    return dtype in ("float32", "float64")


def tolerance(key: Key, step: int, dtype: str, num_layers: int) -> float:
    """What rounding in a dtype explains."""
    if key.direction == TARGETS:
        return 0.0
    later = LATER if is_elementwise(dtype) and step > 1 else 1
    if key.direction == LOSS:
        return LOSS_TOLERANCE[dtype] * later
    if key.direction == PARAMETER:
        return LATER * GRADIENT_TOLERANCE[dtype]
    passed = key.layer if key.direction == FORWARD and key.part != "loss" else 2 * num_layers
    return GRADIENT_TOLERANCE[dtype] * later * math.sqrt(max(1.0, passed / PROVEN_DEPTH))


def errors_of(pairs: Sequence[tuple[Copy, np.ndarray]], elementwise: bool) -> tuple[float, Callable[[float], tuple]]:
    """(the worst error of any rank, allowed -> (rows, ranks) that exceed it) of copies and what they should be.

    An error is the norm of a rank's difference relative to that of its part, or of the average part if larger;
    with `elementwise` the largest difference relative to the largest element of the tensor, where that is worse.
    """
    peak = max((float(np.abs(expected).max(initial=0)) for _, expected in pairs), default=0.0)
    mean_square = float(np.mean([np.square(expected).sum() for _, expected in pairs]))

    def relative(gap: float, scale: float) -> float:
        if math.isnan(gap):
            return math.inf
        return gap / scale if scale else (0.0 if gap == 0 else math.inf)

    cells: dict = {}
    by_ranks: dict = {}
    for copy, expected in pairs:
        gap = copy.value - expected
        square, most = float(np.square(gap).sum()), float(np.abs(gap).max(initial=0))
        here = relative(most, peak) if elementwise else 0.0
        total = by_ranks.setdefault(copy.ranks, [0.0, 0.0, 0, 0.0])
        total[0] += square
        total[1] += float(np.square(expected).sum())
        total[2] += 1
        total[3] = max(total[3], here)
        cells[copy.row, copy.ranks] = max(here, relative(math.sqrt(square), math.sqrt(mean_square)))
    ranks = {
        who: max(relative(math.sqrt(square), math.sqrt(max(own, count * mean_square))), most)
        for who, (square, own, count, most) in by_ranks.items()
    }
    worst = max(ranks.values())

    def beyond(allowed: float) -> tuple[tuple[int, ...], tuple[int, ...]]:
        bad = {who for who, error in ranks.items() if not error <= allowed}
        rows = {row for (row, who), error in cells.items() if who in bad and not error <= allowed}
        rows = rows or {max((error, row) for (row, who), error in cells.items() if who in bad)[1]}
        return tuple(sorted(rows - {WHOLE})), tuple(sorted({r for who in bad for r in who}))

    return worst, beyond


def compare_tensor(ours: Tensor, theirs: Tensor, elementwise: bool) -> tuple[float, Callable[[float], tuple]]:
    """As `errors_of`; rows that only one run has are an infinite error."""
    if ours.rows.keys() != theirs.rows.keys():
        odd = tuple(sorted(ours.rows.keys() ^ theirs.rows.keys()))
        return math.inf, lambda allowed: (odd, tuple(sorted({r for c in ours.copies for r in c.ranks if c.row in odd})))
    pairs = [(copy, theirs.rows[copy.row][copy.at]) for copy in ours.copies]
    if any(copy.value.shape != np.shape(expected) for copy, expected in pairs):
        return math.inf, lambda allowed: ((), tuple(sorted({r for c in ours.copies for r in c.ranks})))
    return errors_of(pairs, elementwise)


def compare_steps(ours: Step, theirs: Step) -> list[Checked]:
    """Every tensor of one step of two runs, in the order in which it is computed.

    What a part of the model has in one run alone (a loss in chunks) is left out.
    """
    run, dtype = ours.run, max(ours.dtype, theirs.dtype, key=GRADIENT_TOLERANCE.__getitem__)
    known = [{(k.direction, k.part, k.name) for k in step.tensors} for step in (ours, theirs)]
    common = known[0] & known[1]
    parameters = parameter_errors(ours, theirs)
    checked = []
    for key in sorted_keys(ours, theirs):
        if key.direction in (FORWARD, BACKWARD) and (key.direction, key.part, key.name) not in common:
            continue
        allowed = tolerance(key, ours.number, dtype, run.config.model.num_layers)
        found = Checked(ours.number, key, math.inf, allowed, collective=run.collective_before(key))
        if key in ours.tensors and key in theirs.tensors:
            by_gradient = parameters.get(key.name) if key.direction == PARAMETER else None
            found = _check(found, ours, theirs, by_gradient, is_elementwise(dtype))
        checked.append(found)
    return checked


def _check(found: Checked, ours: Step, theirs: Step, parameter: float | None, elementwise: bool) -> Checked:
    """`found` with what the two steps have under its key. parameter: the error of one, where another rule gives it."""
    key, mine = found.key, ours.tensors[found.key]
    if parameter is None:
        error, beyond = compare_tensor(mine, theirs.tensors[key], elementwise)
        rows, ranks = beyond(found.allowed) if not error <= found.allowed else ((), ())
    else:
        error, rows, ranks = parameter, (), ()
    found = replace(found, error=error, rows=rows, ranks=ranks, unequal=mine.unequal)
    if not found.ok and key.direction in (GRADIENT, PARAMETER):
        wanted = theirs.run.gradients[-1] if key.direction == GRADIENT else theirs.run.parameters
        found = replace(found, ranks=ours.run.ranks_that_differ(key, wanted, found.allowed))
    return found


def sorted_keys(ours: Step, theirs: Step) -> list[Key]:
    both = {**theirs.tensors, **ours.tensors}
    return sorted(both, key=lambda key: position(key, both[key]))


def parameter_errors(ours: Step, theirs: Step) -> dict[str, float]:
    """By `jaxdist.parity.compare_parameters`, which traces a difference back to the gradient that it needs."""
    runs = ours.run, theirs.run
    coarser = max(runs, key=lambda run: GRADIENT_TOLERANCE[coarsest_dtype(run.config)])
    observed = (Observed(run.gradients, run.parameters) for run in runs)
    return {d.name: d.error for d in compare_parameters(coarser.config, *observed)}


def first_divergence(checked: Sequence[Checked]) -> Checked | None:
    return next((each for each in checked if not each.ok), None)
