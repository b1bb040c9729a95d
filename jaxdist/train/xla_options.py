"""Options of XLA for the step on GPUs: what each changes in the compiled program, and which the sets of `--xla` hold.

`experiments.bench flags` times each of them on a card; `experiments.bench roofline --xla SET` compiles without one.
"""

from typing import NamedTuple

Value = str | bool | int


class Option(NamedTuple):
    """One option of XLA, and a value other than its default.

    sets: of `--xla`, those that hold it; where `several`, for meshes of several devices alone. changes: in the compiled
    program. known: what it is known to cost or to break. accepted: versions of jaxlib with which that was seen.
    """

    name: str
    value: Value
    changes: str
    sets: tuple[str, ...] = ()
    several: bool = False
    known: str = ""
    accepted: tuple[str, ...] = ("0.10.2",)


XLA_SETS = BOTH = ("stable", "fast")
FAST = ("fast",)
GPU_OPTIONS = (
    Option(
        "xla_gpu_enable_dus_accumulator_zero_init_elimination",
        True,
        "a loop's stacks are allocated and not filled with zeros (XLA 42808)",
        BOTH,
        accepted=("0.10.2", "0.11.2"),
    ),
    Option(
        "xla_gpu_experimental_enable_fusion_autotuner",
        False,
        "with a card at hand: fusions are not timed while compiling; without a card nothing",
        BOTH,
        known="on: heap corruption in a log of summed exponentials (XLA 43068), minutes of compiling",
        accepted=("0.10.2", "0.11.2"),
    ),
    Option(
        "xla_gpu_enable_latency_hiding_scheduler",
        True,
        "collectives start early and end late, with products between",
        FAST,
        several=True,
        known="a higher peak",
        accepted=("0.10.2", "0.11.2"),
    ),
    Option(
        "xla_gpu_all_reduce_combine_threshold_bytes", 2**28, "all-reduces are joined up to 256 MiB", FAST, several=True
    ),
    Option(
        "xla_gpu_all_gather_combine_threshold_bytes", 2**28, "all-gathers are joined up to 256 MiB", FAST, several=True
    ),
    Option(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        2**27,
        "reduce-scatters are joined up to 128 MiB",
        FAST,
        several=True,
    ),
    Option("xla_gpu_enable_pipelined_all_gather", True, "gathers of a loop run a turn ahead", FAST, several=True),
    Option("xla_gpu_enable_pipelined_reduce_scatter", True, "scatters of a loop run a turn behind", FAST, several=True),
    Option("xla_gpu_enable_pipelined_all_reduce", True, "all-reduces of a loop run a turn behind", FAST, several=True),
    Option(
        "xla_gpu_enable_while_loop_double_buffering",
        True,
        "two turns of a loop are written out, so that its collectives need no copies",
        FAST,
        several=True,
        known="a larger program",
    ),
    Option(
        "xla_gpu_enable_triton_gemm",
        False,
        "products are cuBLAS's, with no elementwise work inside",
        FAST,
        several=True,
    ),
    Option(
        "xla_gpu_experimental_gemm_fusion_v2",
        True,
        "elementwise work becomes part of the products that read its result",
        known="slower on an H100 (docs/benchmarks.md); XLA 0.10.2 may end with an error",
        accepted=("0.10.2", "0.11.2"),
    ),
    Option("xla_gpu_enable_command_buffer", "", "no CUDA graphs: every kernel is a launch"),
    Option(
        "xla_gpu_enable_command_buffer",
        "FUSION,CUBLAS,CUBLASLT,CUDNN,CUSTOM_CALL,COLLECTIVES,WHILE",
        "attention, collectives and loops in CUDA graphs as well",
        known="hangs with COLLECTIVES (marin 5675)",
    ),
    Option("xla_gpu_command_buffer_unroll_loops", True, "loops in CUDA graphs are written out"),
    Option("xla_gpu_enable_pdl", True, "a kernel starts while the one before it ends"),
    Option("xla_gpu_enable_cublaslt", True, "products are cuBLASLt's where it has them"),
    Option("xla_disable_hlo_passes", "rematerialization", "nothing is computed twice to save memory"),
    Option("xla_gpu_autotune_level", 0, "products are not timed while compiling"),
    Option("xla_gpu_cudnn_gemm_fusion_level", 2, "cuDNN's products with elementwise work, where they are faster"),
    Option("xla_gpu_enable_dynamic_slice_fusion", True, "slices of stacks are read by the kernels that use them"),
    Option("xla_gpu_experimental_parallel_collective_overlap_limit", 2, "two collectives at a time"),
)


def options_in(name: str, num_devices: int) -> dict[str, Value]:
    """The options of a set of `--xla` for a mesh of so many GPUs."""
    found = [option for option in GPU_OPTIONS if name in option.sets and (num_devices > 1 or not option.several)]
    return {option.name: option.value for option in found}


def accepted(name: str) -> tuple[str, ...]:
    """The versions of jaxlib of which it is known that they accept an option."""
    return next(option.accepted for option in GPU_OPTIONS if option.name == name)
