"""The devices a run uses: real ones where they are, simulated ones where the mesh needs more."""

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jax

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError
from jaxdist.runtime import processes

DeviceChoice = Literal["auto", "cpu", "gpu"]

# Simulated devices take turns on few cores: a rank that waits for the others is slow, not stuck.
PATIENT_FLAGS = (
    "--xla_cpu_collective_call_warn_stuck_timeout_seconds=600",
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600",
    "--xla_cpu_collective_timeout_seconds=3600",
)

MAX_SIMULATED = 256
TUNED = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name for it, inside of its cache's folder


@dataclass(frozen=True)
class Devices:
    """`devices` in mesh order; `simulated` where several of them share one CPU; `description` for a person."""

    devices: list[jax.Device]
    simulated: bool
    description: str

    @property
    def platform(self) -> str:
        return self.devices[0].platform

    def take(self, count: int) -> list[jax.Device]:
        """`count` of them, the same number from each process; this process's own where they do not divide."""
        if count % processes.count() == 0:
            return _share(self.devices, count)
        return [device for device in self.devices if device.process_index == jax.process_index()][:count]


def acquire_devices(count: int, choice: DeviceChoice = "auto") -> Devices:
    """`count` devices, simulating them on the CPU where the machine has fewer accelerators.

    Call it before anything else touches a JAX backend: the number of simulated devices is fixed when it starts.

    Raises: ConfigError where `choice` is "gpu" and there are too few, or a backend with too few CPU devices has
    started already.
    """
    if count > MAX_SIMULATED and choice != "gpu":
        raise ConfigError(
            f"a mesh of {count} devices",
            f"must be at most {MAX_SIMULATED} to be simulated: each is a thread with its own buffers",
            "Use a smaller mesh; an abstract mesh (jaxdist.mesh.make_abstract_mesh) can be traced at any size",
        )
    num_processes = processes.count()
    if count % num_processes:
        raise ConfigError(
            f"a mesh of {count} devices on {num_processes} processes",
            "every process must hold the same number of ranks",
            f"Use a mesh of {num_processes * max(count // num_processes, 1)} devices, or another number of processes",
        )
    prepare_cpu(count // num_processes)
    if choice == "cpu":
        _set("jax_platforms", "cpu")
        return _on_cpu(count, "as asked for")
    if choice == "gpu":
        try:
            found = jax.devices("gpu")
        except RuntimeError:
            found = []
        if len(found) < count:
            raise ConfigError(
                f"device=gpu with a mesh of {count}",
                f"each rank must have a GPU, and this machine shows JAX {len(found)}",
                "Use device=cpu to simulate the mesh"
                + ("" if found else f", or on a machine with an NVIDIA driver {install_text('cuda')}"),
            )
        return _on_accelerator(found, count)
    try:
        found = jax.devices()
    except RuntimeError as error:
        raise ConfigError(
            "device=auto", f"JAX cannot start ({error})", "Unset JAX_PLATFORMS, or use device=cpu"
        ) from error
    if found[0].platform != "cpu" and len(found) >= count:
        return _on_accelerator(found, count)
    if found[0].platform == "cpu":
        return _on_cpu(count, "no accelerator was found")
    _set("jax_default_device", jax.devices("cpu")[0])
    return _on_cpu(count, f"the mesh needs {count} devices and this machine has {len(found)} {found[0].device_kind}")


def prepare_cpu(count: int) -> None:
    """Ask for `count` CPU devices in this process, or as many as XLA_FLAGS asks for, if no backend has started yet."""
    given = os.environ.get("XLA_FLAGS", "")
    missing = [flag for flag in PATIENT_FLAGS if flag.split("=")[0] not in given]
    os.environ["XLA_FLAGS"] = " ".join([given, *missing]).strip()
    asked = map(int, re.findall(r"--xla_force_host_platform_device_count=(\d{1,6})\b", given))
    _set("jax_num_cpu_devices", max(count, jax.config.jax_num_cpu_devices, *asked))


def _set(name: str, value) -> None:
    try:
        jax.config.update(name, value)
    except RuntimeError:  # the backend runs already; what it has is checked by the caller
        return


def _on_cpu(count: int, why: str) -> Devices:
    found = jax.devices("cpu")
    chosen = _share(found, count)
    if len(chosen) < count:
        raise ConfigError(
            f"a mesh of {count} simulated devices",
            f"must be set before JAX starts, which fixes the number, and it has started with {len(found)}",
            f"Set JAX_NUM_CPU_DEVICES={count} before JAX starts (arrays at the top level of a module start it)",
        )
    if count == 1:
        return Devices(chosen, False, f"1 CPU device ({why})")
    where = "one CPU" if processes.count() == 1 else f"the CPUs of {processes.count()} processes"
    text = f"{count} SIMULATED devices on {where} ({why}): values and layouts are real, speed is not"
    return Devices(chosen, True, text)


def _on_accelerator(found: list[jax.Device], count: int) -> Devices:
    unused = f" ({len(found) - count} of {len(found)} left unused)" if len(found) > count else ""
    return Devices(_share(found, count), False, f"{count} x {found[0].device_kind}{unused}")


def _share(found: list[jax.Device], count: int) -> list[jax.Device]:
    """The same number of devices from each process, process by process; fewer than `count` where one has too few."""
    each = count // processes.count()
    taken: dict[int, list[jax.Device]] = {}
    for device in found:
        mine = taken.setdefault(device.process_index, [])
        if len(mine) < each:
            mine.append(device)
    return [device for process in sorted(taken) for device in taken[process]]


def refused_option(name: str, value: str | bool | int) -> str | None:
    """What the default device's compiler says against an option; None where it takes it. Starts JAX's backend."""
    try:
        jax.jit(lambda: 0).lower().compile(compiler_options={name: value})
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).splitlines()[0]
    return None


def keep_tuning(folder: Path) -> None:
    """On GPUs: keep in a folder which kernels XLA timed as the fastest, and take them from there where they are known.

    A program that is compiled again is then the same one: kernels that are chosen anew may sum in another order (seen
    on an H100: docs/survive.md). JAX does so wherever its compilation cache has a folder, so a user's own stays.
    """
    if jax.config.jax_compilation_cache_dir is None:
        (folder / TUNED).mkdir(parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e6)  # whole programs are not kept
