"""Compiler options: which this jaxlib accepts, and what each gains or costs on this machine."""

import time

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.runtime.devices import acquire_devices, refused_option
from jaxdist.train.xla_options import GPU_OPTIONS, XLA_SETS

from .flags import BenchFlags
from .rows import Measured, Row, ratios
from .timing import AT_ONCE, timed_step, with_parallel

# Options of XLA, tried one at a time against none.
CPU_OPTIONS = {
    "xla_cpu_enable_fast_math": (True,),
    "xla_cpu_use_xnnpack": (True, False),
    "xla_cpu_use_onednn": (True,),
    "xla_cpu_experimental_onednn_custom_call": (True,),
    "xla_cpu_multi_thread_eigen": (False,),
    "xla_cpu_enable_concurrency_optimized_scheduler": (True, False),
    "xla_cpu_prefer_vector_width": (128, 512),
    "xla_cpu_experimental_ynn_fusion_type": ("", "LIBRARY_FUSION_TYPE_DOT"),
    "xla_cpu_copy_insertion_use_region_analysis": (True,),
    "xla_cpu_use_fusion_emitters": (False,),
    "xla_llvm_disable_expensive_passes": (True,),
}


def bench_flags(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """One device's step with each set of --xla and each option, in turn with the step without any. It sends nothing, so
    what an option does to collectives is not seen here."""
    start = time.monotonic()
    devices = acquire_devices(1, flags.device)
    config = with_parallel(config, "", {"xla": "default"})
    plain = timed_step(config, devices)
    rows = []
    tried = [(name, value) for name, values in CPU_OPTIONS.items() for value in values]
    if devices.platform == "gpu":
        tried = [("--xla", name) for name in XLA_SETS] + [(option.name, option.value) for option in GPU_OPTIONS]
    for option, value in tried:
        name = f"{option}={value}"
        if flags.only not in name:
            continue
        if time.monotonic() - start > flags.start_within:
            console.print(f"{name}: not tried: out of time", markup=False)
            continue
        with console.status(name):
            if option == "--xla":
                step = timed_step(with_parallel(config, "", {"xla": value}), devices)
            elif refusal := refused_option(option, value):
                console.print(f"{name}: refused: {refusal[:60]}", markup=False)
                continue
            else:
                step = timed_step(config, devices, compiler_options={option: value})
            times = [(step.run_several(AT_ONCE), plain.run_several(AT_ONCE)) for _ in range(flags.repeats)]
        ours, theirs = zip(*times, strict=True)
        pairs = ratios(ours, theirs)
        verdict = "within the spread" if pairs[0] <= 1 <= pairs[-1] else "faster" if pairs[0] < 1 else "slower"
        console.print(f"{name}: {verdict}, {pairs[0]:.3f} to {pairs[-1]:.3f} times", markup=False)
        rows.append(Row.beside(f"{name}: step", ours, theirs, "no option"))
        if step.peak_bytes is not None and plain.peak_bytes is not None:
            peak = step.peak_bytes / plain.peak_bytes
            rows.append(Row(f"{name}: peak", step.peak_bytes, "bytes", against="no option", ratio=peak))
    return rows, devices
