"""Ask the real compiler, with no accelerator present: what it allocates and which collectives it emits.

The very step that would run is compiled for simulated CPU devices, for NVIDIA GPUs, or for TPUs. XLA needs a
description of the device, not the device. Peak bytes are of its own buffer assignment; collectives are read from the
optimised program, loops multiplied by their trip counts.
"""

import dataclasses
import importlib.util
import math
import os
import re
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import numpy as np

from jaxdist.commands import install_text
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole
from jaxdist.mesh import AXES, MeshShape, make_mesh
from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.plan.proof import hlo
from jaxdist.plan.proof.trace import Count, Iterations, Transfer, as_permutes, on_stages, times_each, total_sent
from jaxdist.runtime.devices import MAX_SIMULATED, acquire_devices, prepare_cpu
from jaxdist.train.program import Program, build_program, compiled_bytes, step_options

# What XLA's GpuTargetConfigProto says of a card: streaming multiprocessors, compute capability, clock in GHz, L2 and
# memory in bytes, memory bandwidth in bytes/s, shared memory of a multiprocessor and of a block. NVIDIA's architecture
# white papers; an H200's memory as its driver reports it.
CUDA_CARDS = {
    "a100-40": (108, (8, 0), 1.41, 40 * 2**20, 42_298_834_944, 1.555e12, 167_936, 166_912),
    "a100-80": (108, (8, 0), 1.41, 40 * 2**20, 84_987_740_160, 2.039e12, 167_936, 166_912),
    "h100": (132, (9, 0), 1.98, 50 * 2**20, 84_961_591_296, 3.35e12, 233_472, 232_448),
    "h200": (132, (9, 0), 1.98, 50 * 2**20, 151_397_597_184, 4.8e12, 233_472, 232_448),
    "b200": (148, (10, 0), 1.965, 126 * 2**20, 191_514_148_864, 8.0e12, 233_472, 232_448),
}
TPU_DIMS = {"v5e": 2, "v6e": 2, "v5p": 3}  # dims of the torus
TPU_TYPES = {"v5e": "v5litepod-{0}", "v6e": "v6e-{0}", "v5p": "v5p-{1}"}  # of chips, or of cores (two a chip)
TARGETS = ("cpu", *CUDA_CARDS, *TPU_DIMS)


@dataclass(frozen=True)
class CompiledStep:
    """What a compiler made of the step, for one device. Bytes; seconds of compiling.

    temporaries: beside the arguments (state and batch). collectives: of the optimised program. asynchronous: how many
    of them overlap with something by start and done.
    """

    target: str
    seconds: float
    arguments: int
    temporaries: int
    collectives: tuple["Emitted", ...]
    text: str
    executable: jax.stages.Compiled
    thunks: str = ""

    @property
    def peak(self) -> int:
        return self.arguments + self.temporaries

    @property
    def asynchronous(self) -> int:
        return sum(c.asynchronous for c in self.collectives)


@dataclass(frozen=True)
class Emitted(Transfer):
    """One collective instruction. axes: the mesh axes its groups span. full_bytes: of the gathered, or summed, buffer.

    count: how often a step runs it, on the stage that runs it most; None where neither the text nor `iterations` says.
    by_stage: the count on each stage, where they differ. matmuls: matrix products (attention kernels among them) that
    the compiler has put between its start and its done, a loop's once; 0 where it is not asynchronous.
    """

    name: str
    kind: str
    axes: tuple[str, ...]
    count: int | None
    full_bytes: int
    num_operands: int
    asynchronous: bool
    by_stage: tuple[int, ...] | None = None
    matmuls: int = 0

    def sent_bytes(self, mesh: MeshShape) -> int | None:  # type: ignore[override]
        """Bytes one device sends in a step, on the stage that sends most."""
        return None if self.count is None else super().sent_bytes(mesh)


def compile_step(
    config: RunConfig, target: str, *, num_nodes: int = 1, dump: str | None = None, thunks: bool = False
) -> CompiledStep:
    """Compile the step of `config` for one of `TARGETS`; no device of that kind is needed.

    num_nodes: over which the mesh's devices are spread (GPUs alone). dump: folder for the optimised program's text.
    thunks: also get the list of what the runtime starts, which XLA writes for GPUs; "" where it writes none.
    Raises: ConfigError for an unknown target, or one whose compiler is not installed, with the line that installs it.
    """
    num_devices = config.parallel.mesh.num_devices
    without_devices(num_devices)
    devices = target_devices(target, num_devices, num_nodes)
    program = build_program(config, make_mesh(config.parallel.mesh, devices))
    options = step_options(config, devices[0].platform)
    with TemporaryDirectory() if thunks else nullcontext() as written:
        options |= {"xla_dump_to": written} if written else {}
        start = time.perf_counter()
        compiled = lower(program).compile(compiler_options=options)
        seconds = time.perf_counter() - start
        files = Path(written).glob("*.thunk_sequence_after_thunk_passes.txt") if written else ()
        found = [path.read_text(encoding="utf-8") for path in files]
    memory = compiled_bytes(compiled)
    if memory is None:
        raise RuntimeError(f"the compiler for {target} gives no memory analysis")
    text = compiled.as_text()
    if dump is not None:
        folder = Path(dump)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"step-{target}.hlo.txt", text.encode())
    return CompiledStep(
        target=target,
        seconds=seconds,
        arguments=memory.arguments,
        temporaries=memory.temporaries,
        collectives=tuple(emitted_collectives(text, config.parallel.mesh, program.iterations())),
        text=text,
        executable=compiled,
        thunks=max(found, key=len, default=""),
    )


def lower(program: Program) -> jax.stages.Lowered:
    return program.step.lower(program.abstract_state(), program.abstract_batch())


def without_devices(num_devices: int) -> None:
    """Keep JAX from starting an accelerator; call it before anything is traced. `num_devices` CPUs are simulated."""
    jax.config.update("jax_platforms", "cpu")
    prepare_cpu(min(num_devices, MAX_SIMULATED))


def target_devices(target: str, num_devices: int, num_nodes: int = 1) -> Sequence:
    """Devices to compile for: simulated ones for "cpu", descriptions otherwise. Raises: as `compile_step`."""
    require_compiler(target)
    if target == "cpu":
        return acquire_devices(num_devices, "cpu").devices
    if target in CUDA_CARDS:
        return _cuda_devices(target, num_devices, num_nodes)
    return _tpu_devices(target, num_devices)


def require_compiler(target: str) -> None:
    """Refuse an unknown target, or one whose compiler is not installed. Raises: ConfigError."""
    if target not in TARGETS:
        raise ConfigError(f"--compile {target}", "there is no such target", f"Use {', '.join(TARGETS)}")
    version = jax.__version__
    if target in CUDA_CARDS and not has_cuda_compiler():
        _refuse(target, f"jax-cuda13-plugin=={version} jax-cuda13-pjrt=={version} nvidia-cuda-nvcc nvidia-cudnn-cu13")
    if target in TPU_DIMS and not importlib.util.find_spec("libtpu"):
        _refuse(target, f"'jax[tpu]=={version}'")


def _cuda_devices(target: str, num_devices: int, num_nodes: int) -> Sequence:
    if num_devices % num_nodes:
        raise ConfigError(
            f"{num_devices} devices on {num_nodes} nodes",
            "each node must have as many",
            f"Use a divisor of {num_devices}",
        )
    from jax.experimental import topologies

    layout = f"{num_nodes}x1x{num_devices // num_nodes}"
    return topologies.get_topology_desc(target, "cuda", target_config=_card(target), topology=layout).devices


def has_cuda_compiler() -> bool:
    """Whether JAX's CUDA plugin is installed; it needs no card to compile, nor to trace cuDNN's attention."""
    return any(importlib.util.find_spec(f"jax_cuda{major}_plugin") for major in (12, 13))


def _card(target: str) -> str:
    """A GpuTargetConfigProto, in text form."""
    cores, (major, minor), clock, l2, memory, bandwidth, shared, shared_block = CUDA_CARDS[target]
    extension = "feature_extension: ACCELERATED_FEATURES" if major >= 9 else ""
    return f"""
        gpu_device_info {{
            threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
            core_count: {cores} fpus_per_core: {64 if major == 8 else 128} clock_rate_ghz: {clock}
            shared_memory_per_block: 49152 shared_memory_per_core: {shared}
            shared_memory_per_block_optin: {shared_block}
            block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
            registers_per_core_limit: 65536 registers_per_block_limit: 65536
            memory_bandwidth: {int(bandwidth)} l2_cache_size: {l2} device_memory_size: {memory}
            cuda_compute_capability {{ major: {major} minor: {minor} {extension} }}
        }}
        platform_name: "CUDA"
        dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
        device_description_str: "NVIDIA {target.partition("-")[0].upper()}"
    """


def _tpu_devices(target: str, num_devices: int) -> Sequence:
    sizes = sorted(torus(num_devices, TPU_DIMS[target]), key=lambda size: size == 1)  # a host is 2x2x1 chips
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", TPU_TYPES[target].format(num_devices, 2 * num_devices))
    name = f"{target}:{'x'.join(map(str, sizes))}"
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except RuntimeError as error:
        raise ConfigError(
            f"--compile {target} for {num_devices} devices",
            f"libtpu must know a slice {name} ({str(error).splitlines()[0]})",
            "Use a number of devices that is a power of two, 4 or more",
        ) from error


def torus(num_devices: int, dims: int) -> tuple[int, ...]:
    """Sizes whose product is `num_devices`, as equal as they can be, smallest first."""
    if dims == 1:
        return (num_devices,)
    fitting = [d for d in range(1, num_devices + 1) if num_devices % d == 0 and d**dims <= num_devices]
    return (fitting[-1], *torus(num_devices // fitting[-1], dims - 1))


def _refuse(target: str, packages: str) -> None:
    extra = "prove-cuda" if target in CUDA_CARDS else "prove-tpu"
    raise ConfigError(
        f"--compile {target}",
        "its compiler is not installed (it needs no device, but it is a package of its own)",
        f"{install_text(extra)}, or beside this jax: pip install {packages}",
    )


# The text of an optimised program.

KINDS = {
    "all-reduce": "all_reduce",
    "all-gather": "all_gather",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "permute",
}
_MATMUL = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|fmha|conv)', re.IGNORECASE)
_LOOP_OF = re.compile(r'op_name="[^"]*jit\((\w+)\)/while"')
_MADE_BY = re.compile(r'op_name="[^"]*jit\((\w+)\)/')  # the innermost


def emitted_collectives(text: str, mesh: MeshShape, iterations: Iterations | None = None) -> list[Emitted]:
    """Every collective of an optimised HLO text over more than one device, in program order.

    iterations: as in `jaxdist.plan.proof.trace.collectives_of`, for loops whose length is data and for the branches of
    a conditional: an instruction's metadata names the jitted functions that it came from. An exchange between experts
    takes one round. What the compiler has lifted
    out of such a loop is counted where it stands.
    """
    bodies, entry = hlo.computations(text)

    def named_runs(function: re.Pattern, rest: str, scanned: Count | None) -> Count | None:
        """How often the function that an instruction's origin names runs, of those that `iterations` knows."""
        found, known = function.search(rest), iterations or {}
        return times_each(scanned, known[found[1]]) if found and found[1] in known else None

    @cache
    def matmuls(computation: str) -> int:
        return sum(map(matmuls_of, bodies.get(computation, ())))

    def matmuls_of(instruction: hlo.Instruction) -> int:
        if instruction.opcode == "dot" or (instruction.opcode == "custom-call" and _MATMUL.search(instruction.rest)):
            return 1
        inside = sum(matmuls(called) for _, called in hlo.called(instruction.rest))
        return min(inside, 1) if instruction.opcode.removesuffix("-start") == "fusion" else inside

    def while_under_way(computation: str, at: int) -> int:
        """Matrix products from the start at this place to its done."""
        name = bodies[computation][at].name
        found = 0
        for instruction in bodies[computation][at + 1 :]:
            if instruction.opcode.endswith("-done") and hlo.operands(instruction.rest) == [name]:
                return found
            found += matmuls_of(instruction)
        return 0

    def walk(name: str, count: Count | None, scanned: Count | None, branch: bool = False) -> Iterable[Emitted]:
        """`scanned`: how often the innermost loop of a known length runs. `branch`: of a conditional."""
        for at, (_, _, opcode, rest, _) in enumerate(bodies.get(name, ())):
            kind = KINDS.get(opcode.removesuffix("-start"))
            started = while_under_way(name, at) if opcode.endswith("-start") else 0
            if kind and not opcode.endswith("-done"):
                times = named_runs(_MADE_BY, rest, scanned) if branch else count
                emitted = _emitted(bodies[name][at], opcode.endswith("-start"), times, mesh)
                if emitted is not None:
                    yield dataclasses.replace(emitted, matmuls=started)
                continue
            inner = (count, scanned, branch)
            if opcode == "while" and (trips := hlo.TRIPS.search(rest)):
                inner = (times_each(count, int(trips[1])), times_each(count, int(trips[1])), branch)
            elif opcode == "while" and (found := _LOOP_OF.search(rest)) and found[1] in MORE_ROUNDS:
                continue
            elif opcode == "while":
                inner = (named_runs(_LOOP_OF, rest, scanned), scanned)
            elif opcode == "conditional":
                inner = (None, scanned, True)
            for role, called in hlo.called(rest):
                if role != "to_apply" or opcode == "call":
                    for emitted in walk(called, *inner):
                        wrapped = {"asynchronous": True, "matmuls": started} if opcode == "async-start" else {}
                        yield dataclasses.replace(emitted, **wrapped)

    return list(walk(entry, 1, 1))


def _emitted(instruction: hlo.Instruction, asynchronous: bool, count: Count | None, mesh: MeshShape) -> Emitted | None:
    name, shape, opcode, rest, _ = instruction
    kind, groups = KINDS[opcode.removesuffix("-start")], _groups(rest, mesh.num_devices)
    axes = _axes_of(groups[0], mesh)
    if not axes:
        return None
    # A start's shape holds the operands first, then the results; of an all-reduce only since JAX 0.12.
    results = hlo.arrays(shape)
    if asynchronous and len(results) > 1 and (kind != "all_reduce" or shape.startswith("((")):
        results = results[len(results) // 2 :] if kind != "permute" else results[1:2]
    if kind == "permute" and axes == ("pp",) and count is not None:
        count = count * _senders(rest, mesh)
    most, by_stage = (None, None) if count is None else on_stages(count)
    full = sum(results) * (len(groups[0]) if kind == "reduce_scatter" else 1)
    kind, full = as_permutes(kind, axes, full, len(groups[0]), mesh)
    return Emitted(
        name=name,
        kind=kind,
        axes=axes,
        count=most,
        full_bytes=full,
        num_operands=len(results),
        asynchronous=asynchronous,
        by_stage=by_stage,
    )


def emitted_bytes(collectives: Iterable[Emitted], mesh: MeshShape) -> int | None:
    """Bytes one device sends in a step, on the stage that sends most in all; None where some are not counted."""
    collectives = list(collectives)
    return None if any(each.count is None for each in collectives) else total_sent(collectives, mesh)


def stages_of(devices: Iterable[int], mesh: MeshShape) -> np.ndarray:
    """The pipeline stage of each device, by its number in the mesh."""
    return np.unravel_index(list(devices), mesh.sizes)[AXES.index("pp")]


def _senders(rest: str, mesh: MeshShape) -> np.ndarray:
    """1 for each stage that sends in a permute over pp, and 0 for the others."""
    [pairs] = re.findall(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest)
    sources = [int(source) for source in re.findall(r"\{(\d+),", pairs)]
    return np.isin(np.arange(mesh.pp), stages_of(sources, mesh)).astype(int)


def _groups(rest: str, num_devices: int) -> list[list[int]]:
    """Device numbers that meet, from each way in which HLO writes replica groups; pairs, for a permute."""
    if found := re.search(r"source_target_pairs=\{(\{[\d,{} ]*\})\}", rest):
        pairs = [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{([\d, ]+)\}", found[1])]
        return [[n for pair in pairs if pair[0] != pair[1] for n in pair][:2] or pairs[0]]
    if found := re.search(r"replica_groups=\{(\{[\d,{} ]*\})\}", rest):
        return [[int(n) for n in group.split(",")] for group in re.findall(r"\{([\d, ]+)\}", found[1])]
    if found := re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest):
        shape, dims, order = ([int(n) for n in part.split(",")] if part else None for part in found.groups())
        numbers = np.arange(math.prod(dims)).reshape(dims)
        return (numbers if order is None else numbers.transpose(order)).reshape(shape).tolist()
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}", rest):  # since JAX 0.12
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        along = [list(sizes).index(name) for name in re.findall(r"'(\w+)'", found[2])]
        numbers = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        size = math.prod(numbers.shape[i] for i in along)
        return np.moveaxis(numbers, along, range(-len(along), 0)).reshape(-1, size).tolist()
    return [list(range(num_devices))]


def _axes_of(group: list[int], mesh: MeshShape) -> tuple[str, ...]:
    """The mesh axes along which the devices of a group differ."""
    places = np.array(np.unravel_index(group, mesh.sizes))
    return tuple(axis for axis, row in zip(AXES, places, strict=True) if len(set(row.tolist())) > 1)
