"""A run's numbers in the forms that others read: a Prometheus endpoint, TensorBoard's files, Weights & Biases.

Each process tells its own times, memory and GPUs; what all know alike (the loss) comes from the first. The packages are
the extra `metrics`.
"""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from jaxdist.commands import install_text
from jaxdist.errors import ConfigError, reason_of
from jaxdist.runtime import expert_load, processes
from jaxdist.runtime.gpus import GPU
from jaxdist.runtime.telemetry import PARTS, DeviceMemory

PREFIX = "jaxdist"
LOOPBACK = "127.0.0.1"


class Exporter(Protocol):
    """Takes every step's line of metrics.jsonl, and what this process alone knows."""

    def write(self, record: Mapping, memory: Sequence[DeviceMemory], gpus: Sequence[GPU]) -> None: ...

    def close(self) -> None: ...


def require_package(name: str, flag: str) -> ModuleType:
    """Raises: ConfigError where it is not installed."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(flag, f"must have the package {error.name}", f"Run {install_text('metrics')}") from error


def require_free(port: int, host: str) -> None:
    """Refuse a port that is taken while nothing has been made or compiled. Raises: ConfigError."""
    server = _listen(port, host, require_package("prometheus_client", "--metrics-port").CollectorRegistry())
    server.shutdown()
    server.server_close()


def _listen(port: int, host: str, registry):
    client, port_here = require_package("prometheus_client", "--metrics-port"), port + processes.index()
    try:
        return client.start_http_server(port_here, addr=host, registry=registry)[0]
    except (OSError, OverflowError) as error:
        reason = f"this process cannot listen on {host}:{port_here} ({error})"
        raise ConfigError(f"--metrics-port {port}", reason, "Use another port, or another --metrics-host") from error


class Prometheus:
    """An endpoint /metrics of this process, at `port` plus the number of the process.

    Names follow the conventions of Prometheus: base units, counters end in _total, what tells series apart is a label.
    host: the address to listen on; loopback alone unless asked. info: labels of jaxdist_run_info. planned: bytes that
    the compiler plans a device. Raises: ConfigError where the port is taken.
    """

    def __init__(self, port: int, host: str, info: Mapping[str, str], planned: int | None):
        client = require_package("prometheus_client", "--metrics-port")
        self._registry = client.CollectorRegistry()

        def metric(kind: str, name: str, text: str, *labels: str):
            return getattr(client, kind)(f"{PREFIX}_{name}", text, labels, registry=self._registry)

        metric("Info", "run", "What runs.").info({**info, "process": str(processes.index())})
        self._steps = metric("Counter", "steps", "Steps done by this process.")
        self._parts = metric("Counter", "time_seconds", "Seconds of this process, by what it did.", "part")
        for part in PARTS:
            self._parts.labels(part)
        self._last = metric("Gauge", "last_step_timestamp_seconds", "When the last step ended, in Unix time.")
        self._memory = metric("Gauge", "device_memory_bytes", "Memory of a device, by its allocator.", "rank", "kind")
        if planned is not None:
            metric("Gauge", "device_memory_planned_bytes", "What the compiler plans a device.").set(planned)
        self._gpu = {
            "busy": metric("Gauge", "gpu_busy_ratio", "Part of the time in which a kernel ran.", "rank"),
            "memory_used": metric("Gauge", "gpu_memory_used_bytes", "Memory in use by all processes.", "rank"),
            "power": metric("Gauge", "gpu_power_watts", "Power.", "rank"),
            "temperature": metric("Gauge", "gpu_temperature_celsius", "Temperature.", "rank"),
            "ecc_errors": metric("Gauge", "gpu_ecc_uncorrected_errors", "Uncorrected errors of its memory.", "rank"),
        }
        self._first = processes.is_first()
        if self._first:
            self._tokens = metric("Counter", "tokens", "Targets trained on, of the whole run.")
            self._loss = metric("Gauge", "loss_nats", "Mean loss of a token.", "split")
            self._norm = metric("Gauge", "gradient_norm", "L2 norm of the whole gradient.")
            self._norms = metric("Gauge", "gradient_group_norm", "L2 norm by part of the model.", "group")
            self._rate = metric("Gauge", "learning_rate_ratio", "Learning rate.")
            self._used = metric("Gauge", "flops_utilization_ratio", "MFU and HFU.", "flops")
            self._scale = metric("Gauge", "loss_scale_ratio", "Loss scale of fp16.")
            texts = (
                "Load of the busiest expert over the mean.",
                "Of the idlest.",
                "Of the busiest rank.",
                "Choices dropped.",
            )
            named = zip(expert_load.NAMES, texts, strict=True)
            self._experts = {name: metric("Gauge", f"{name}_ratio", text) for name, text in named}
        self._server = _listen(port, host, self._registry)
        shown = f"[{host}]" if ":" in host else host
        self.address = f"http://{shown}:{port + processes.index()}/metrics"

    def write(self, record: Mapping, memory: Sequence[DeviceMemory], gpus: Sequence[GPU]) -> None:
        self._steps.inc()
        self._last.set_to_current_time()
        for part in PARTS:
            self._parts.labels(part).inc(record["seconds"][part])
        for device in memory:
            for kind in ("in_use", "peak", "limit"):
                self._memory.labels(device.rank, kind).set(getattr(device, kind))
        for gpu in gpus:
            for name, gauge in self._gpu.items():
                if (value := getattr(gpu, name)) is not None:
                    gauge.labels(gpu.rank).set(value)
        if not self._first:
            return
        self._tokens.inc(record["tokens"])
        self._loss.labels("train").set(record["loss"])
        if "held_out_loss" in record:
            self._loss.labels("held_out").set(record["held_out_loss"])
        self._norm.set(record["grad_norm"])
        for group, norm in record["grad_norms"].items():
            self._norms.labels(group).set(norm)
        self._rate.set(record["lr"])
        for flops, name in (("model", "mfu"), ("hardware", "hfu")):
            if name in record:
                self._used.labels(flops).set(record[name])
        if "loss_scale" in record:
            self._scale.set(record["loss_scale"])
        for name, gauge in self._experts.items():
            if name in record:
                gauge.set(record[name])

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TensorBoard:
    """Event files of the whole run in a folder, written by the first process."""

    def __init__(self, folder: Path):
        self._package, self._folder = require_package("tensorboardX", "--tensorboard"), folder
        self._writer: Any = None

    def write(self, record: Mapping, memory: Sequence[DeviceMemory], gpus: Sequence[GPU]) -> None:
        if self._writer is None:  # steps that come again, after a crash or a roll-back, replace what was written
            self._writer = self._package.SummaryWriter(str(self._folder), purge_step=record["step"])
        for name, value in scalars(record, memory, gpus).items():
            self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def wandb_settings(project: str) -> Any:
    """Raises: ConfigError where the package is not installed, or has no project of that name."""
    wandb = require_package("wandb", "--wandb")
    try:
        return wandb.Settings(project=project, silent=True, x_disable_stats=True, console="off")
    except wandb.Error as error:
        required = f"must be the name of a project ({reason_of(error)})"
        raise ConfigError(f"--wandb {project}", required, "Use another name") from error


class WeightsAndBiases:
    """An offline run in a folder, written by the first process; `wandb sync` sends it."""

    def __init__(self, folder: Path, project: str, config: Mapping):
        wandb, settings = require_package("wandb", "--wandb"), wandb_settings(project)
        self._run = wandb.init(project=project, dir=str(folder), mode="offline", config=dict(config), settings=settings)

    def write(self, record: Mapping, memory: Sequence[DeviceMemory], gpus: Sequence[GPU]) -> None:
        self._run.log(scalars(record, memory, gpus), step=record["step"])

    def close(self) -> None:
        self._run.finish()


def scalars(record: Mapping, memory: Sequence[DeviceMemory], gpus: Sequence[GPU]) -> dict[str, float]:
    """A step's numbers by name, as in loss/train and seconds/input."""
    found = {"loss/train": record["loss"], "gradient_norm/all": record["grad_norm"], "schedule/lr": record["lr"]}
    found |= {"pace/tokens_per_second": record["tokens_per_second"]}
    found |= {"loss/held_out": record["held_out_loss"]} if "held_out_loss" in record else {}
    found |= {f"pace/{name}": record[name] for name in ("mfu", "hfu") if name in record}
    found |= {"schedule/loss_scale": record["loss_scale"]} if "loss_scale" in record else {}
    found |= {name.replace("_", "/", 1): record[name] for name in expert_load.NAMES if name in record}
    found |= {f"gradient_norm/{group}": norm for group, norm in record["grad_norms"].items()}
    found |= {f"seconds/{part}": record["seconds"][part] for part in PARTS}
    found |= {f"memory_peak_bytes/rank_{device.rank}": device.peak for device in memory}
    for gpu in gpus:
        told = {f"gpu_{name}/rank_{gpu.rank}": value for name, value in gpu._asdict().items() if name != "rank"}
        found |= {name: value for name, value in told.items() if value is not None}
    return found
