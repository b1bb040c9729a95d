"""Bytes a program needs on a device, read from its trace: which values get a buffer, and from when to when.

Nothing is compiled. A jaxpr names every value; a compiler fuses most of them away. The rules here say which are left
(what matmuls, collectives and loops read and write, and what is read twice and expensive to compute again), how long
each lives, and where loops and updates work in place. The lifetimes are then packed into one block of memory as XLA
packs them. `experiments.bench levels` compares the result with the compilers' own plans; errors are in docs/plan.md.

The rules were found by reading compiled programs of XLA:CPU and XLA:GPU (jax 0.10), and are the compiler's rules, not
its promises. `jaxdist.plan.proof.compile` asks the compiler itself.
"""

import heapq
import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import accumulate, combinations
from operator import or_

import jax
import numpy as np
from jax.extend.core import Literal

from jaxdist.compat import scan_counts
from jaxdist.errors import ConfigError
from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.parallel.pipeline.split_backward import inner_programs

# What an operation does to buffers. Anything in none of these sets writes a buffer of its own and reads buffers.
RENAMES = {"reshape", "squeeze", "expand_dims", "pvary", "stop_gradient", "optimization_barrier", "copy", "name"}
GENERATES = {"broadcast_in_dim", "iota"}
REDUCES = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax"}
EXPENSIVE = {"exp", "exp2", "expm1", "log", "log1p", "logistic", "tanh", "erf", "pow"}
ELEMENTWISE = EXPENSIVE | {
    *("abs", "add", "add_any", "and", "ceil", "clamp", "convert_element_type", "cos", "div", "eq", "floor", "ge", "gt"),
    *("integer_pow", "is_finite", "le", "lt", "max", "min", "mul", "ne", "neg", "not", "one_minus_square", "or"),
    *("reduce_precision", "rem", "round", "rsqrt", "select_n", "shift_left", "shift_right_logical", "sign", "sin"),
    *("sqrt", "square", "sub", "xor"),
}
MOVES = {"concatenate", "dynamic_slice", "gather", "pad", "rev", "slice", "split", "stack", "transpose", "unstack"}
FUSIBLE = ELEMENTWISE | MOVES | GENERATES | REDUCES
IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}
LOOPS = {"scan", "while"}
CALLS = {"jit", "pjit", "closed_call", "custom_jvp_call", "custom_vjp_call", "checkpoint", "remat2", "shard_map"}


@dataclass(frozen=True)
class CompilerModel:
    """Where compilers differ.

    keeps_expensive: results of `EXPENSIVE` operations that are read twice get a buffer, others are
    computed again. zeros_first: what depends on no input (zeros to be filled) is made when the program starts.
    reuses_operand_buffer: an elementwise result may take the buffer of an operand of its size. reduces_buffers:
    reductions over whole arrays read a buffer rather than being fused. fuses_gathers: into what reads them. widens:
    temporaries of 16 bits take 32, in which everything is computed. platform: whose branch is compiled where a program
    has one for each. scatters_later: what a loop reduce-scatters and stacks is sent in the next turn, so its whole
    operands are carried there. joins_gathers: gathers by the same indices are one kernel.
    """

    keeps_expensive: bool
    zeros_first: bool
    reuses_operand_buffer: bool
    reduces_buffers: bool
    fuses_gathers: bool
    widens: bool
    platform: str
    scatters_later: bool
    joins_gathers: bool


COMPILERS = {
    "cpu": CompilerModel(
        keeps_expensive=True,
        zeros_first=True,
        reuses_operand_buffer=False,
        reduces_buffers=True,
        fuses_gathers=False,
        widens=True,
        platform="cpu",
        scatters_later=False,
        joins_gathers=False,
    ),
    "gpu": CompilerModel(
        keeps_expensive=False,
        zeros_first=False,
        reuses_operand_buffer=True,
        reduces_buffers=False,
        fuses_gathers=True,
        widens=False,
        platform="cuda",
        scatters_later=True,
        joins_gathers=True,
    ),
}


def compiler_of_dtype(dtype: str) -> str:
    """Whose rules a plan assumes that names no compiler: a GPU's for 16 bits, a CPU's otherwise."""
    return "gpu" if dtype in ("bfloat16", "float16") else "cpu"


@dataclass(eq=False)
class Buffer:
    """One block of memory: alive from clock `start` to clock `end`, both included."""

    start: int
    num_bytes: int
    what: str
    end: int = -1


@dataclass(frozen=True)
class StepMemory:
    """Predicted bytes of one device during a step. largest: (bytes, what) of the buffers alive at the peak."""

    arguments: int
    temporaries: int
    largest: tuple[tuple[int, str], ...]

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries


def step_memory(program, traced: jax.stages.Traced, compiler: str) -> StepMemory:
    """What the traced `step` of a `jaxdist.train.program.Program` needs: its state, its batch, and temporaries.

    Raises: ConfigError for a compiler that is not one of `COMPILERS`.
    """
    state = jax.tree.leaves(program.abstract_state())
    arguments = jax.tree.leaves((program.abstract_state(), program.abstract_batch()))
    donated = {index: index for index in range(len(state))}
    temporaries, largest = temporary_bytes(traced.jaxpr, donated, compiler)
    local = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in arguments)
    return StepMemory(local, temporaries, largest)


def temporary_bytes(jaxpr, donated: Mapping[int, int], compiler: str) -> tuple[int, tuple[tuple[int, str], ...]]:
    """Bytes beyond the arguments of a jaxpr whose top level is one shard_map (local shapes), or which has none.

    donated: index of an output -> index of the argument whose memory it takes.
    Returns: the bytes, and what they are at the moment of the highest need.
    """
    kept = [j for j in range(len(jaxpr.jaxpr.outvars)) if j not in donated]
    buffers = lifetimes(jaxpr, compiler, donated, kept=kept)
    # XLA tries both orders and takes the better one.
    by_size = sorted(buffers, key=lambda b: (-b.num_bytes, b.start - b.end))
    by_time = sorted(buffers, key=lambda b: (b.start - b.end, -b.num_bytes))
    return min(pack(by_size), pack(by_time)), alive_at_peak(buffers)


def lifetimes(
    jaxpr, compiler: str, carried: Mapping[int, int], *, sliced: Collection[int] = (), kept: Collection[int] = ()
) -> list[Buffer]:
    """The buffers of a program, or of a loop's body.

    carried: index of an output -> of the input whose memory it takes. sliced: inputs that are one entry of an array of
    the caller's. kept: outputs that need memory of their own; the others are written into arrays of the caller's.
    """
    if compiler not in COMPILERS:
        raise ConfigError(
            f"the memory of a program for {compiler!r}", "its rules must be known", f"Use {', '.join(COMPILERS)}"
        )
    timeline = _Timeline(COMPILERS[compiler])
    timeline.run(jaxpr, carried, sliced, kept)
    return [buffer for buffer in timeline.buffers if buffer.num_bytes]


def pack(buffers: Iterable[Buffer]) -> int:
    """Height of the stack when each buffer, in order, goes to the tightest gap between those alive with it.

    Source: the best fit of XLA's global heap simulator.
    """
    placed = np.zeros((0, 4), np.int64)  # start, end, bottom, top
    for buffer in buffers:
        alive = placed[(placed[:, 0] <= buffer.end) & (placed[:, 1] >= buffer.start)]
        best, floor = None, 0
        for bottom, top in sorted(map(tuple, alive[:, 2:].tolist())):
            gap = bottom - floor
            if gap >= buffer.num_bytes and (best is None or gap < best[0]):
                best = gap, floor
            floor = max(floor, top)
        at = floor if best is None else best[1]
        placed = np.vstack([placed, (buffer.start, buffer.end, at, at + buffer.num_bytes)])
    return int(placed[:, 3].max(initial=0))


def alive_at_peak(buffers: Collection[Buffer]) -> tuple[tuple[int, str], ...]:
    """(bytes, what) of the buffers alive when most bytes are, largest first; equal ones together."""
    changes: dict[int, int] = defaultdict(int)
    for buffer in buffers:
        changes[buffer.start] += buffer.num_bytes
        changes[buffer.end + 1] -= buffer.num_bytes
    now = peak = at = 0
    for clock in sorted(changes):
        now += changes[clock]
        if now > peak:
            peak, at = now, clock
    found: dict[str, int] = defaultdict(int)
    for buffer in buffers:
        if buffer.start <= at <= buffer.end:
            found[buffer.what] += buffer.num_bytes
    return tuple(sorted(((num_bytes, what) for what, num_bytes in found.items()), reverse=True))


# A program as a list of operations on numbered values.


@dataclass(eq=False)
class _Op:
    name: str
    inputs: list[int | None]  # None: a constant of the text
    outputs: list[int]
    eqn: object
    loop: str = ""  # the jitted function that it stands in


@dataclass
class _Program:
    rules: CompilerModel
    sizes: list[int] = field(default_factory=list)
    ops: list[_Op] = field(default_factory=list)
    in_place: dict[int, int] = field(default_factory=dict)  # value -> the one that is finished in its memory

    def new(self, aval) -> int:
        self.sizes.append(_bytes(aval, self.rules.widens))
        return len(self.sizes) - 1

    def add(self, jaxpr, inputs: list, function: str = "") -> list:
        """Append a jaxpr's equations, calls written out and mere renamings left out; returns its outputs."""
        jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
        value_of = {v: self.new(v.aval) for v in jaxpr.constvars} | dict(zip(jaxpr.invars, inputs, strict=True))

        def read(v):
            return None if isinstance(v, Literal) else value_of[v]

        for eqn in jaxpr.eqns:
            name, ids = eqn.primitive.name, [read(v) for v in eqn.invars]
            platforms = eqn.params.get("branches_platforms") if name == "cond" else None
            if platforms:
                at = next(k for k, names in enumerate(platforms) if names is None or self.rules.platform in names)
                results = self.add(eqn.params["branches"][at], ids[1:])
            elif name in CALLS:
                results = self.add(next(inner_programs(eqn)), ids, eqn.params.get("name", ""))
            elif len(ids) == len(eqn.outvars) and (name in RENAMES or _is_no_cast(eqn)):
                results = ids
            else:
                results = [self.new(v.aval) for v in eqn.outvars]
                self.ops.append(_Op(name, ids, results, eqn, function))
            value_of.update(zip(eqn.outvars, results, strict=True))
        return [read(v) for v in jaxpr.outvars]

    def prune(self, outputs: Iterable) -> None:
        """Drop what no output needs."""
        needed, kept = set(outputs), []
        for op in reversed(self.ops):
            if needed.intersection(op.outputs):
                needed.update(op.inputs)
                kept.append(op)
        self.ops = kept[::-1]

    def scatter_in_place(self, outputs: Iterable) -> None:
        """x + scatter-add(zeros, ...) is scatter-add(x, ...), as every XLA compiler rewrites it.

        Where that is added to a sum so far, it is scatter-add(sum + x, ...): x is added where it is made.
        """
        maker = {o: op for op in self.ops for o in op.outputs}
        uses: dict[int | None, int] = defaultdict(int)
        for op in self.ops:
            for i in op.inputs:
                uses[i] += 1
        outputs = set(outputs)
        for op in self.ops:
            for one, other in (op.inputs, op.inputs[::-1]) if op.name == "add_any" else ():
                scatter = maker.get(one)
                if scatter is None or scatter.name != "scatter-add" or uses[one] > 1 or one in outputs or one == other:
                    continue
                zeros = maker.get(scatter.inputs[0])
                if zeros is not None and zeros.name == "broadcast_in_dim" and zeros.inputs[0] is None:
                    op.name, op.inputs = "scatter-add", [other, *scatter.inputs[1:]]
                    break
        for op in [op for op in self.ops if op.name == "add"]:
            for one, other in (op.inputs, op.inputs[::-1]):
                scatter = maker.get(one)
                if scatter is None or scatter.name != "scatter-add" or uses[one] > 1 or one in outputs:
                    continue
                base, made = scatter.inputs[0], maker.get(scatter.inputs[0])
                if made is not None and uses[base] == 1 and other is not None and other not in maker:
                    early = _Op("add", [base, other], [self.new(op.eqn.outvars[0].aval)], op.eqn)
                    self.ops.insert(self.ops.index(made) + 1, early)
                    op.name, op.inputs = "scatter-add", [early.outputs[0], *scatter.inputs[1:]]
                    self.in_place[early.outputs[0]] = op.outputs[0]
                    break
        self.prune(outputs)


class _Timeline:
    """Walks a program operation by operation, loops' bodies once, and notes when each buffer lives."""

    def __init__(self, rules: CompilerModel):
        self.rules, self.clock = rules, 0
        self.scatters = False  # whether the loop that was walked last reduce-scatters what it stacks
        self.buffers: list = []

    def run(
        self, jaxpr, carried: Mapping[int, int], sliced: Collection[int], kept: Collection[int]
    ) -> tuple[list[Buffer], list[tuple[int, int]]]:
        """One level of the program. Returns: of a loop's body, the buffers that are scattered in the next turn, and
        (input, bytes) of what is transposed before the loop to be gathered.

        carried: index of an output -> of the input whose memory it takes (a loop's carry, a donated argument). sliced:
        inputs that are one entry of an array of the caller's. kept: outputs that need memory of their own; the others
        that are not carried are written into arrays of the caller's.
        """
        program = _Program(self.rules)
        inputs = [program.new(v.aval) for v in getattr(jaxpr, "jaxpr", jaxpr).invars]
        outputs = program.add(jaxpr, inputs)
        program.prune(outputs)
        program.scatter_in_place(outputs)
        slices, own = {inputs[i] for i in sliced}, {outputs[j] for j in kept} - {None}
        level = _Level(program, self.rules, slices, own)
        kernels = level.joined() if self.rules.joins_gathers else []
        if kernels or any(map(_is_more_rounds, program.ops)):
            kernels = _more_rounds_first(kernels or [[op] for op in program.ops])
            program.ops = [op for kernel in kernels for op in kernel]
            level = _Level(program, self.rules, slices, own, kernels)
        home = {outputs[j]: inputs[carried[j]] if j in carried else None for j in range(len(outputs)) if j not in kept}

        home |= {value: home[final] for value, final in program.in_place.items() if final in home}

        begin, ends = self.clock + 1, defaultdict(list)
        live: dict[int, Buffer] = {}

        memory: dict[int, Buffer] = {}
        transposed: dict[int, Buffer] = {}

        def hold(value: int, buffer: Buffer) -> None:
            live[value] = memory[value] = buffer
            ends[level.last_use[value]].append(value)

        def allocate(value: int, start: int, what: str) -> None:
            self.buffers.append(Buffer(start, program.sizes[value], what))
            hold(value, self.buffers[-1])

        for i in carried.values():
            if inputs[i] not in live:
                hold(inputs[i], Buffer(begin, 0, "the caller's"))
        arrivals, last_loop, early_zeros = defaultdict(list), begin, None
        for value in level.slices:
            if level.buffered[value] and level.users[value]:
                arrivals[min(level.users[value])].append(value)

        for k, op in enumerate(program.ops):
            self.clock += 1
            start = self.clock
            for value in arrivals[k]:
                allocate(value, start, "one layer's part of a stacked array")
            dying = [value for value in ends[level.until[k]] if value in live]
            carry = _carry(op)
            for value in op.outputs:
                if not level.buffered[value]:
                    continue
                place = op.inputs[0] if op.name in IN_PLACE else carry.get(value)
                if value in program.in_place:
                    place = home.get(value)
                if place not in dying and value in home and value not in carry and not level.is_fusible(op):
                    place = None  # made in a buffer of its own, then written to the caller's
                if place not in dying and level.is_fusible(op) and self.rules.reuses_operand_buffer:
                    size = program.sizes[value]
                    alike = level.read_alike(op)
                    place = next((v for v in dying if size and live[v].num_bytes == size and v in alike), None)
                if place in dying:
                    dying.remove(place)
                    hold(value, live.pop(place))
                    continue
                early = self.rules.zeros_first and (value in level.first or (op.name == "scan" and value not in carry))
                filled = early_zeros is not None and op.name in IN_PLACE and level.is_generated(op.inputs[0])
                allocate(value, begin if early else early_zeros if filled else start, _describe(op, value in carry))
            for body, body_carried, body_sliced, body_kept in _bodies(op):
                mark = len(self.buffers)
                late, across = self.run(body, body_carried, body_sliced, body_kept)
                for i, size in across:
                    stack = Buffer(begin, size * op.eqn.params["length"], "transposed shards of all layers")
                    transposed.setdefault(op.inputs[i], stack).end = self.clock
                if late:
                    ahead = sum(size for size, _ in alive_at_peak(self.buffers[mark:]))
                    self.buffers.append(Buffer(last_loop, ahead, "a loop's first turn, ahead of it", end=start))
                for buffer in late:
                    buffer.start, buffer.end = start + 1, self.clock
            if op.name in LOOPS:
                early_zeros = last_loop if self.scatters and not late else None
                last_loop = self.clock
            for value in ends[k]:
                if value in live:
                    live.pop(value).end = self.clock
        for buffer in live.values():
            buffer.end = self.clock
        self.buffers += transposed.values()
        stacked = {outputs[j] for j in range(len(outputs)) if j not in kept and j not in carried} if sliced else set()
        late = [memory[i] for i in level.scattered_into(stacked, ELEMENTWISE)] if self.rules.scatters_later else []
        self.scatters = self.rules.scatters_later and bool(level.scattered_into(stacked, FUSIBLE))
        places = {inputs[i]: i for i in sliced} if self.rules.scatters_later else {}
        return late, [(places[i], program.sizes[i]) for i in level.gathered_across() if i in places]


class _Level:
    """Which values of one program level get a buffer, and the last operation that reads each."""

    def __init__(
        self, program: _Program, rules: CompilerModel, slices: set[int], kept: set[int], kernels: list[list[_Op]] = ()
    ):
        self.program, self.rules, self.slices, self.kept = program, rules, slices, kept
        ends = [end for kernel, end in zip(kernels, accumulate(map(len, kernels)), strict=True) for _ in kernel]
        self.until = [end - 1 for end in ends] or range(len(program.ops))  # when the kernel of each operation is done
        self.users, self.maker = defaultdict(list), {}
        for k, op in enumerate(program.ops):
            for i in set(op.inputs) - {None}:
                self.users[i].append(k)
            for o in op.outputs:
                self.maker[o] = op
        self.place = {o: k for k, op in enumerate(program.ops) for o in op.outputs}
        self.buffered = [self.needs_buffer(v) for v in range(len(program.sizes))]
        self.last_use = self.last_uses()
        self.first = self.made_first() if rules.zeros_first else set()

    def is_folded(self, op: _Op) -> bool:
        """Whether an operation is a matrix's transpose that matmuls take in its place: they read the matrix."""
        readers = [self.program.ops[k] for k in self.users[op.outputs[0]]]
        is_matrix = op.name == "transpose" and len(op.eqn.outvars[0].aval.shape) == 2
        return is_matrix and all(reader.name == "dot_general" for reader in readers)

    def is_kernel(self, op: _Op) -> bool:
        """Whether an operation, with what is fused into it, computes a buffer element by element."""
        return op.name in ELEMENTWISE and self.buffered[op.outputs[0]]

    def is_fusible(self, op: _Op) -> bool:
        reduces = self.rules.reduces_buffers and op.name in ("reduce_sum", "reduce_max")
        return op.name in FUSIBLE and not reduces

    def scattered_into(self, outputs: set[int], through: set[str]) -> list[int]:
        """Values reduce-scattered into outputs, with nothing but operations of `through` after it."""
        found, live = [], [*outputs]
        while live:
            maker = self.maker.get(live.pop())
            if maker is not None and maker.name == "reduce_scatter":
                found += _values(maker)
            elif maker is not None and maker.name in through:
                live += _values(maker)
        return found

    def gathered_across(self) -> list[int]:
        """Values gathered along another dim than their first."""
        gathers = (op for op in self.program.ops if op.name == "all_gather" and op.eqn.params["all_gather_dimension"])
        return [value for op in gathers for value in _values(op)]

    def joined(self) -> list[list[_Op]]:
        """The operations by kernels, in the order in which pairs of gathers by the same indices are made together, each
        with what it is fused into, and what an exchange waits for first; none where there is no such pair. There what
        is computed from the same two buffers is one kernel, too."""
        ops = self.program.ops
        group: dict[int, int] = {}
        pairs = defaultdict(list)
        for k, op in enumerate(ops):
            if op.name == "gather":
                pairs[self._sources(op.inputs[1]), op.eqn.outvars[0].aval.shape].append(k)
        for members in pairs.values():
            if len(members) == 2:
                group |= {k: members[0] for first in members for k in self._fused_after(first)}
        if not group:
            return []
        needs = [{self.place[i] for i in op.inputs if i in self.place} for op in ops]
        before: list[int] = []  # of each operation all that it needs, as bits
        for k, direct in enumerate(needs):
            before.append(reduce(or_, (before[i] for i in direct), 1 << k))
        same = [(k, self.read_alike(op)) for k, op in enumerate(ops) if self.is_kernel(op) and k not in group]
        for (k, read), (later, also) in combinations(same, 2):
            shared = {v for v in read & also if self.program.sizes[v] == self.program.sizes[ops[k].outputs[0]]}
            if len(shared) > 1 and not before[later] >> k & 1:
                group |= {k: group.get(k, k), later: group.get(k, k)}
        awaited: set[int] = set()
        for k in reversed(range(len(ops))):
            if ops[k].name == "all_to_all" or k in awaited:
                awaited |= needs[k] | {k}
        return [[ops[k] for k in kernel] for kernel in _grouped_order(needs, group, awaited)]

    def _sources(self, value: int | None) -> frozenset[int]:
        """Values from which one is computed element by element."""
        maker = self.maker.get(value)
        if maker is None or maker.name not in ELEMENTWISE | GENERATES:
            return frozenset({value} - {None})
        return frozenset().union(*map(self._sources, maker.inputs))

    def _fused_after(self, k: int) -> list[int]:
        """An operation and those that it is fused into, as far as a buffer."""
        found = [k]
        while not any(self.buffered[o] for o in self.program.ops[found[-1]].outputs):
            users = [user for o in self.program.ops[found[-1]].outputs for user in self.users[o]]
            if len(users) != 1:
                break
            found += users
        return found

    def read_alike(self, op: _Op) -> set[int]:
        """Buffers that an operation reads, itself or by what is fused into it, each element where it writes one: not
        those whose rows it gathers."""
        found: dict[bool, set[int]] = {False: set(), True: set()}
        size = self.program.sizes[op.outputs[0]]

        def walk(reader: _Op, moved: bool) -> None:
            moved = moved or (reader.name == "gather" and self.program.sizes[reader.outputs[0]] >= size)
            for value in {*_values(reader)} - found[moved]:
                found[moved].add(value)
                if not self.buffered[value] and value in self.maker:
                    walk(self.maker[value], moved)

        walk(op, False)
        return found[False] - found[True]

    def needs_buffer(self, value: int) -> bool:
        users = [self.program.ops[k] for k in self.users[value]]
        read = any(not self.is_fusible(user) or self.is_folded(user) for user in users)
        if value in self.kept:
            return True
        if value not in self.maker:
            return value in self.slices and read
        op = self.maker[value]
        if op.name in GENERATES or self.is_folded(op):
            return False
        gathers = op.name == "gather" and not self.rules.fuses_gathers
        if not self.is_fusible(op) or op.name in REDUCES or gathers or read:
            return True
        return self.rules.keeps_expensive and op.name in EXPENSIVE and len(self.users[value]) > 1

    def is_cheap(self, value: int) -> bool:
        """Whether readers that can be fused compute the value again rather than read its buffer."""
        if not self.rules.keeps_expensive or value not in self.maker or value in self.kept:
            return False
        op = self.maker[value]
        return self.is_fusible(op) and op.name not in REDUCES | EXPENSIVE | GENERATES | {"gather"}

    def last_uses(self) -> list[int]:
        """The last operation that needs each value, through everything that is fused with its readers.

        Goes backwards, so that readers are known before what they read.
        """
        ops, end = self.program.ops, len(self.program.ops)
        last = [end if v in self.kept else self.place.get(v, -1) for v in range(len(self.program.sizes))]
        fused = [-1] * len(last)  # the last operation into which a value is fused
        for k in reversed(range(end)):
            op = ops[k]
            passes_on = [self.until[k]]
            if self.is_fusible(op):
                passes_on += [last[o] for o in op.outputs if not self.buffered[o]]
                passes_on += [fused[o] for o in op.outputs if self.buffered[o] and self.is_cheap(o)]
            for i in {i for i in op.inputs if i is not None}:
                if self.is_fusible(op) and not self.is_folded(op):
                    fused[i] = max(fused[i], *passes_on)
                    if self.buffered[i] and self.is_cheap(i):
                        continue
                last[i] = max(last[i], *passes_on)
        return last

    def is_generated(self, value: int | None) -> bool:
        return value in self.maker and self.maker[value].name in GENERATES

    def made_first(self) -> set[int]:
        """Values that depend on nothing, and what is scattered onto such."""
        found: set[int] = set()
        for op in self.program.ops:
            if op.name in GENERATES or (op.name in IN_PLACE and op.inputs[0] in found):
                found.update(op.outputs)
        return found


def _values(op: _Op) -> list[int]:
    """Values that an operation reads, less constants of the text."""
    return [value for value in op.inputs if value is not None]


def _is_more_rounds(op: _Op) -> bool:
    return op.name == "while" and op.loop in MORE_ROUNDS


def _more_rounds_first(kernels: list[list[_Op]]) -> list[list[_Op]]:
    """The kernels in an order in which each loop of an exchange's later rounds comes before what it does not need:
    backward of the first round waits for it, and compilers make late what is read late."""
    for loop in [kernel for kernel in kernels if any(map(_is_more_rounds, kernel))]:
        at, needed, before = kernels.index(loop), {*_values(loop[-1])}, []
        for kernel in reversed(kernels[:at]):
            if needed.intersection(*[[value for op in kernel for value in op.outputs]]):
                needed.update(value for op in kernel for value in _values(op))
                before.append(kernel)
        others = [kernel for kernel in kernels[:at] if kernel not in before]
        kernels = [*before[::-1], loop, *others, *kernels[at + 1 :]]
    return kernels


def _grouped_order(needs: list[set[int]], group: Mapping[int, int], first: set[int]) -> list[list[int]]:
    """Groups of numbers in an order that has each after those it needs, otherwise as they are but for those that come
    first; none where groups need each other."""
    members: dict[int, list[int]] = defaultdict(list)
    for k in range(len(needs)):
        members[group.get(k, k)].append(k)
    waits = {g: {group.get(i, i) for k in ks for i in needs[k]} - {g} for g, ks in members.items()}
    users: dict[int, list[int]] = defaultdict(list)
    for g, others in waits.items():
        for other in others:
            users[other].append(g)
    ready, order = [(g not in first, g) for g, others in waits.items() if not others], []
    heapq.heapify(ready)
    while ready:
        _, g = heapq.heappop(ready)
        order.append(members[g])
        for user in users[g]:
            waits[user].discard(g)
            if not waits[user]:
                heapq.heappush(ready, (user not in first, user))
    return order if len(order) == len(members) else []


def _carry(op: _Op) -> dict[int, int | None]:
    """Output of a loop -> the value it starts from."""
    if op.name == "scan":
        first, number = scan_counts(op.eqn)
    elif op.name == "while":
        first = op.eqn.params["cond_nconsts"] + op.eqn.params["body_nconsts"]
        number = len(op.outputs)
    else:
        return {}
    return {op.outputs[j]: op.inputs[first + j] for j in range(number)}


def _bodies(op: _Op) -> list[tuple]:
    """The programs inside an operation, as arguments of `_Timeline.run`."""
    params = op.eqn.params
    if op.name == "scan":
        first, number = scan_counts(op.eqn)
        sliced = range(first + number, len(op.inputs))
        return [(params["jaxpr"], {j: first + j for j in range(number)}, sliced, ())]
    if op.name == "while":
        first = params["body_nconsts"]
        return [(params["body_jaxpr"], {j: first + j for j in range(len(op.outputs))}, (), ())]
    if op.name == "cond":
        return [(branch, {}, (), range(len(op.outputs))) for branch in params["branches"]]
    return []


def _describe(op: _Op, carried: bool) -> str:
    if op.name == "scan" and not carried:
        return "stacked by a loop (kept for backward, or gradients)"
    if op.name in LOOPS:
        return "carried by a loop"
    aval = max((v.aval for v in op.eqn.outvars), key=_bytes)
    return f"{op.name} {aval.dtype}[{', '.join(map(str, aval.shape))}]"


def _is_no_cast(eqn) -> bool:
    return eqn.primitive.name == "convert_element_type" and eqn.invars[0].aval.dtype == eqn.outvars[0].aval.dtype


def _bytes(aval, widens: bool = False) -> int:
    try:
        itemsize = np.dtype(aval.dtype).itemsize
    except TypeError:  # a random key
        itemsize = 8
    if widens and jax.numpy.issubdtype(aval.dtype, jax.numpy.floating):
        itemsize = max(itemsize, 4)
    return math.prod(aval.shape) * itemsize
