"""What a compiled step launches and moves: every kernel of an optimised program, its bytes, FLOPs and least time.

Read from the text alone, so for a card that is not there (`jaxdist.plan.proof.compile`). A kernel is an instruction
that the program launches; one in a loop counts as often as the loop runs. Its bytes are those that it reads and writes
in HBM if each array passes once: of an operand of which a fusion only reads slices, the slices; of a result that is
written in place, what is written. Caches can make that less, and a kernel that reads an operand several times more.

    least time of a kernel = max(FLOPs of its products / (peak x matmul), bytes / (bandwidth x hbm))

FLOPs of elementwise operations, launches and links between devices are left out.
Source of the model: Williams, Waterman & Patterson 2009, "Roofline: an insightful visual performance model".
"""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.plan.hardware import Accelerator
from jaxdist.plan.proof import hlo
from jaxdist.plan.proof.hlo import Instruction

# No work of their own: names, constants, control flow, and the ends of what was started before.
NOT_LAUNCHED = {
    *("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "opt-barrier", "optimization-barrier"),
    *("partition-id", "replica-id", "add-dependency", "domain", "after-all", "async-update"),
}
ALLOCATION = 'custom_call_target="AllocateBuffer"'  # memory without a fill, which nothing writes
CONTROL = {"while", "conditional", "call", "async-start"}
FUSIONS = {"fusion", "fusion-start"}  # XLA of jaxlib 0.11 starts those that copy in and out of a loop's stacks
SLICES = {"dynamic-slice", "slice", "gather"}
RENAMES = {"bitcast", "reshape", "copy", "convert"}
# In a fusion, element by element: a slice of the result takes as much of the operands.
ELEMENTWISE = RENAMES | {"select", "compare", "add", "subtract", "multiply", "divide", "maximum", "minimum", "negate"}
PHASES = ("forward", "recomputed", "backward", "update")
KINDS = ("products", "elementwise", "attention")
_ORIGIN = re.compile(r'op_name="([^"]*)"')
_PARTS = re.compile(r"\b(embed|layer|loss|gradient_norms|update)\b")
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_FUSED_BACKWARD = 2.5  # FLOPs over forward's of an attention that makes its scores again: five products for two


@dataclass(frozen=True)
class Kernel:
    """One launched instruction. count: runs in a step. read, written: bytes a run. flops: of its products, a run.

    phase: one of `PHASES`. part: of the model or step, "layer" or "loss" say, where the origin names one. operation:
    JAX's name of what it came from. product_bytes: of its products' operands and results alone, a run. loop: the origin
    of the innermost loop that it runs in, "" outside. positions: that a query of fused attention looks at, 0 elsewhere.
    wide: whether its products are of fp32 operands.
    """

    name: str
    opcode: str
    origin: str
    count: int
    read: int
    written: int
    flops: float
    product_bytes: int
    loop: str = ""
    positions: int = 0
    wide: bool = False

    @property
    def moved(self) -> int:
        return self.read + self.written

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return "attention" if self.positions else "products" if self.flops else "elementwise"

    @property
    def phase(self) -> str:
        found = phase_of(self.origin)
        return phase_of(self.loop) if found == "update" and self.loop else found

    @property
    def part(self) -> str:
        found = _PARTS.search(self.origin)
        if found:
            return found[1]
        return "layer" if self.loop or "/while/body" in self.origin else "others"

    @property
    def operation(self) -> str:
        return self.origin.rpartition("/")[2] or self.opcode


def phase_of(origin: str) -> str:
    """One of `PHASES`, from the metadata of an instruction."""
    if "rematted_computation" in origin:
        return "recomputed"
    if "transpose(" in origin:
        return "backward"
    return "forward" if "jvp(" in origin else "update"


@dataclass(frozen=True)
class Roof:
    """What a card can do: FLOP/s of products, of those with fp32 operands too, and bytes/s of HBM, as far as they are
    taken to be reached."""

    flops_per_s: float
    wide_flops_per_s: float
    bytes_per_s: float

    @classmethod
    def of(cls, hardware: Accelerator, dtype: str, matmul: float, hbm: float) -> "Roof":
        """matmul, hbm: parts of the peak and of the bandwidth."""
        peaks = (peak_of(hardware, dtype, wide) * matmul for wide in (False, True))
        return cls(*peaks, hardware.memory_bytes_per_s * hbm)

    def products(self, kernel: Kernel) -> float:
        """Seconds of one run's products alone."""
        return kernel.flops / (self.wide_flops_per_s if kernel.wide else self.flops_per_s)

    def seconds(self, kernel: Kernel) -> float:
        """Seconds of one run."""
        return max(self.products(kernel), kernel.moved / self.bytes_per_s)


def peak_of(hardware: Accelerator, dtype: str, wide: bool) -> float:
    """FLOP/s of products in a run of this dtype; of `wide` ones in a run of 16 bits, as JAX has cards multiply fp32."""
    return hardware.peak_flops.get("tfloat32", hardware.peak(dtype)) if wide and "16" in dtype else hardware.peak(dtype)


@dataclass(frozen=True)
class Reached:
    """What kernels reach of a card's datasheet.

    products, attention: of its peak; attention in the limit of long sequences, and half of that at `half_positions`.
    bandwidth: all of them, of that of its memory.
    """

    products: float
    bandwidth: float
    attention: float
    half_positions: float

    def seconds(self, kernel: Kernel, hardware: Accelerator, dtype: str) -> float:
        """Seconds of one run."""
        peak = peak_of(hardware, dtype, kernel.wide) * self.products
        if kernel.positions:
            peak = hardware.peak(dtype) * self.attention * kernel.positions / (kernel.positions + self.half_positions)
        return max(kernel.flops / peak, kernel.moved / (hardware.memory_bytes_per_s * self.bandwidth))


# Of one H100, for 16 bits: the profile of GPT-2 124M's step, and attention over 4,096 positions by Llama 3.2 1B's
# (docs/benchmarks.md, "One NVIDIA GPU").
ON_H100 = Reached(products=0.76, bandwidth=0.67, attention=0.53, half_positions=1340)


@dataclass(frozen=True)
class Total:
    """Totals of several kernels, in a step. least_bytes: if the products alone passed what they read and write."""

    kernels: int
    moved: int
    flops: float
    seconds: float
    least_bytes: int

    @classmethod
    def of(cls, kernels: Iterable[Kernel], roof: Roof) -> "Total":
        kernels = list(kernels)
        return cls(
            kernels=sum(each.count for each in kernels),
            moved=sum(each.count * each.moved for each in kernels),
            flops=sum(each.count * each.flops for each in kernels),
            seconds=sum(each.count * roof.seconds(each) for each in kernels),
            least_bytes=sum(each.count * each.product_bytes for each in kernels),
        )


def kernels_of(text: str) -> list[Kernel]:
    """Every kernel of an optimised program, in program order.

    A loop whose length is data counts once, one for rounds after the first of an exchange not at all, and of the
    branches of a conditional each counts once.
    """
    return _Program(text).kernels


def trips_of(text: str) -> list[int]:
    """How often each loop of an optimised program runs whenever it is reached, in program order; 1 where the text does
    not say."""
    return _Program(text).trips


class _Program:
    def __init__(self, text: str):
        self.bodies, self.entry = hlo.computations(text)
        self.shapes = {name: {each.name: each.shape for each in body} for name, body in self.bodies.items()}

        self.trips: list[int] = []
        self.kernels = list(self._walk(self.entry, 1, ""))

    def _walk(self, computation: str | None, count: int, loop: str) -> Iterable[Kernel]:
        for instruction in self.bodies.get(computation, ()):
            opcode = instruction.opcode
            if opcode in CONTROL:
                times = count
                if opcode == "while" and any(f"jit({name})/while" in instruction.rest for name in MORE_ROUNDS):
                    continue
                if opcode == "while":
                    known = hlo.TRIPS.search(instruction.rest)
                    self.trips.append(int(known[1]) if known else 1)
                    times *= self.trips[-1]
                for _, inner in hlo.called(instruction.rest):
                    yield from self._walk(inner, times, _origin(instruction) if opcode == "while" else loop)
            elif not (opcode in NOT_LAUNCHED or opcode.endswith("-done") or ALLOCATION in instruction.rest):
                yield self._kernel(computation, instruction, count, loop)

    def _kernel(self, computation: str, instruction: Instruction, count: int, loop: str) -> Kernel:
        shapes = self.shapes[computation]
        sizes = [sum(hlo.arrays(shapes.get(name, ""))) for name in hlo.operands(instruction.rest)]
        if instruction.opcode in FUSIONS:
            (inner,) = [name for role, name in hlo.called(instruction.rest) if role == "calls"]
            read, written = self._fusion_bytes(inner, sizes)
        else:
            read, written = _plain_bytes(instruction, sizes)
        flops, product_bytes, wide = self._products(computation, instruction)
        return Kernel(
            name=instruction.name,
            opcode=instruction.opcode,
            origin=_origin(instruction),
            count=count,
            read=read,
            written=written,
            flops=flops,
            product_bytes=product_bytes,
            loop=loop,
            positions=_attended(instruction, shapes),
            wide=wide,
        )

    def _fusion_bytes(self, computation: str, sizes: Sequence[int]) -> tuple[int, int]:
        """(read, written) of a fusion whose operands have these sizes."""
        body = self.bodies[computation]
        users: dict[str, list[Instruction]] = {}
        for instruction in body:
            for name in dict.fromkeys(hlo.operands(instruction.rest)):
                users.setdefault(name, []).append(instruction)

        def read_of(name: str, size: int) -> int:
            """Bytes of a value that its users ask for, at most all of it."""
            asked = 0
            for user in users.get(name, ()):
                given = hlo.operands(user.rest)
                if user.opcode in SLICES and given[0] == name:
                    asked += sum(hlo.arrays(user.shape))
                elif user.opcode == "dynamic-update-slice" and given[0] == name:
                    continue  # in place
                elif user.opcode in ELEMENTWISE and not user.root:
                    asked += read_of(user.name, size)
                else:
                    return size
            return min(asked, size)

        read = 0
        for instruction in body:
            if instruction.opcode == "parameter":
                size = sizes[int(instruction.rest.split(")")[0])]
                read += read_of(instruction.name, size)
        (root,) = [instruction for instruction in body if instruction.root]
        by_name = {instruction.name: instruction for instruction in body}
        outputs = hlo.operands(root.rest) if root.opcode == "tuple" else [root.name]
        return read, sum(self._written(by_name, computation, name) for name in outputs)

    def _written(self, by_name: dict[str, Instruction], computation: str, name: str) -> int:
        """Bytes written of one result of a fusion: of one updated in place, the update."""
        made = by_name[name]
        while made.opcode in RENAMES:
            made = by_name[hlo.operands(made.rest)[0]]
        if made.opcode == "dynamic-update-slice":
            return sum(hlo.arrays(self.shapes[computation][hlo.operands(made.rest)[1]]))
        if made.opcode == "parameter":
            return 0 if by_name[name] is made else sum(hlo.arrays(by_name[name].shape))
        return sum(hlo.arrays(by_name[name].shape))

    def _products(self, computation: str, instruction: Instruction) -> tuple[float, int, bool]:
        """(FLOPs, bytes of operands and results, whether some operands are fp32) of an instruction's products."""
        shapes = self.shapes[computation]
        given = [shapes.get(name, "") for name in hlo.operands(instruction.rest)]
        if instruction.opcode in FUSIONS:
            found = [
                self._products(inner, each)
                for role, inner in hlo.called(instruction.rest)
                if role == "calls"
                for each in self.bodies[inner]
            ]
            products, sizes, wide = zip(*found, strict=True)
            return sum(products), sum(sizes), any(wide)
        if instruction.opcode == "dot":
            flops = _dot_flops(instruction.shape, given[0], instruction.rest, "lhs_contracting_dims={")
        elif instruction.opcode == "custom-call":
            flops = _custom_flops(instruction, given)
        else:
            return 0.0, 0, False
        passed = sum(hlo.arrays(instruction.shape)) + sum(sum(hlo.arrays(shape)) for shape in given)
        return flops, passed if flops else 0, bool(flops) and hlo.dims(given[0])[0][0] == "f32"


def _origin(instruction: Instruction) -> str:
    found = _ORIGIN.search(instruction.rest)
    return found[1] if found else ""


def _plain_bytes(instruction: Instruction, sizes: Sequence[int]) -> tuple[int, int]:
    """(read, written) of an instruction outside a fusion."""
    results = hlo.arrays(instruction.shape)
    written = sum(results)
    if instruction.opcode in SLICES:
        return written + sum(sizes[1:]), written
    if instruction.opcode == "dynamic-update-slice":
        return sizes[1], sizes[1]
    if instruction.opcode == "scatter":  # in place: what is added is read, and what it is added to
        return 2 * sizes[-1] + sizes[1], sizes[-1]
    if instruction.opcode.endswith("-start"):  # a start's shape holds its operands too
        return sum(sizes), max(written - sum(sizes), sum(sizes) if instruction.opcode == "all-reduce-start" else 0)
    return sum(sizes), written


def _dot_flops(result: str, left: str, rest: str, contracting: str) -> float:
    """2 x elements of the result x length of the sums."""
    [(_, sizes)] = hlo.dims(left)[:1] or [("", ())]
    start = rest.find(contracting)
    over = rest[start + len(contracting) : rest.find("}", start)] if start >= 0 else ""
    length = math.prod(sizes[int(axis)] for axis in over.split(",") if axis)
    [(_, made)] = hlo.dims(result)[:1]
    return 2.0 * math.prod(made) * length


def _attended(instruction: Instruction, shapes: dict[str, str]) -> int:
    """Positions that a query of cuDNN's attention looks at; 0 for any other instruction."""
    if instruction.opcode != "custom-call" or "fmha" not in "".join(_TARGET.findall(instruction.rest)[:1]):
        return 0
    (_, sizes) = hlo.dims(shapes[hlo.operands(instruction.rest)[1]])[0]  # keys: [batch, positions, heads, width]
    return sizes[1]


def _custom_flops(instruction: Instruction, given: Sequence[str]) -> float:
    """FLOPs of cuDNN's attention and cuBLAS's products; 0 for any other call."""
    target = "".join(_TARGET.findall(instruction.rest)[:1])
    if "fmha" in target:
        (_, query), (_, key) = hlo.dims(given[0])[0], hlo.dims(given[1])[0]  # [batch, positions, heads, width]
        batch, positions, heads, width = query
        causal = '"mask_type": "CAUSAL"' in instruction.rest or '"mask_type":"CAUSAL"' in instruction.rest
        scores = batch * heads * positions * (key[1] - (positions - 1) / 2 if causal else key[1])
        return 4.0 * scores * width * (_FUSED_BACKWARD if "Backward" in target else 1)
    if "gemm" in target or "matmul" in target:
        over = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest)
        if over:
            axes = over[1].replace('"', "")
            return _dot_flops(instruction.shape, given[0], f"over={{{axes}}}", "over={")
    return 0.0
