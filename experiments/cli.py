"""Flags that programs share: which model, mesh and precision, and which processes."""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, ClassVar, TypeVar

import jax
import tyro
from rich.console import Console

from jaxdist import compat, versions
from jaxdist.commands import command_text
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError, require_positive
from jaxdist.models.base import Model
from jaxdist.models.presets import PRESETS
from jaxdist.models.registry import ModelFlags, class_name, name_of, source_digest
from jaxdist.runtime import processes
from jaxdist.runtime.devices import DeviceChoice, acquire_devices

from .entry import flag_word, parse_words
from .progress import Progress
from .settings import SETTINGS, Setting, SettingFlags, make_config

Flags = TypeVar("Flags")

# What `plan` writes into its command for what it cannot know; `train` refuses them by name.
PLACEHOLDERS = {"data": "DATA", "out": "OUT", "weights": "WEIGHTS"}


ModelName = Annotated[
    str,
    tyro.conf.arg(
        aliases=["--preset"],
        metavar="NAME|PATH|MODULE:CLASS",
        help="A preset, the config.json of a model of transformers, or a class of your own, as in my_module:MyModel. "
        f"Other flags override its sizes. Presets: {', '.join(PRESETS)}.",
    ),
]


@dataclass(frozen=True)
class CommonFlags(SettingFlags, ModelFlags):
    """Which model, on which mesh, in which precision: a flag for every setting of a run."""

    GROUPS: ClassVar[dict[str, str]] = {"device": "devices"}
    LAYOUT: ClassVar[tuple[str, ...]] = ("mesh", "zero", "sp", "overlap", "remat", "schedule", "microbatches")
    COMMON: ClassVar[tuple[str, ...]] = (*LAYOUT, "model", "batch_size", "dtype", "only")  # that --help shows

    model: ModelName = ModelFlags.model
    device: DeviceChoice = "auto"
    """auto simulates the mesh on the CPU where there are too few accelerators."""

    def run_config(self) -> RunConfig:
        """The validated configuration; --remat auto is what it chose. Raises: ConfigError."""
        values = {setting.flag: getattr(self, setting.flag) for setting in SETTINGS}
        words = self.remat.split("-")
        if words[0] != "auto":
            return make_config(self.model_config(), values)
        config = make_config(self.model_config(), values | {"remat": "none"})
        with Progress("choosing what backward repeats", quiet=not processes.is_first()):
            return self.with_remat(config, _gib(words[1:]))

    def with_remat(self, config: RunConfig, gib: float | None) -> RunConfig:
        """The configuration with what backward repeats chosen, within so many GiB of a device; None: what it has."""
        from jaxdist.plan.fit_remat import fit_on_devices

        return fit_on_devices(config, acquire_devices(config.parallel.mesh.num_devices, self.device), gib)


def _gib(words: list[str]) -> float | None:
    """The number of --remat auto-24, None of --remat auto."""
    if not words:
        return None
    with suppress(ValueError):
        if 0 < (found := float("-".join(words))) < math.inf:
            return found
    raise ConfigError(f"--remat auto-{'-'.join(words)}", "must say how many GiB", "Use --remat auto-24")


@dataclass(frozen=True)
class ProcessFlags:
    """How this process finds the others, where a run is several processes."""

    GROUPS: ClassVar[dict[str, str]] = {"distributed": "processes"}

    distributed: bool = False
    """Join the other processes that Slurm, Open MPI or Kubernetes started (with JAX_COORDINATOR_ADDRESS: always)."""
    coordinator: str | None = None
    """HOST:PORT of the first process, where no launcher says so; --num-processes and --process-id belong to it."""
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat: int = 30
    """Seconds of silence after which a process counts as dead, and all others end."""

    def join(self, console: Console) -> None:
        """Join the other processes, if there are any, and compare flags, versions and settings with theirs.

        Call it before anything else touches a JAX backend; from then on only the first process prints to `console`.
        Raises: ConfigError; Disagreement where the processes were not given the same.
        """
        require_positive("heartbeat", self.heartbeat, 10**6)
        if self.num_processes is not None:
            require_positive("num_processes", self.num_processes, 10**6)
        alone = not (self.distributed or self.coordinator or processes.asked_to_join())
        if alone and self.heartbeat != ProcessFlags.heartbeat:
            reason = "there must be other processes to wait for, and this one is alone"
            raise ConfigError(f"--heartbeat {self.heartbeat}", reason, "Leave it out")
        if not alone:
            processes.join(self.coordinator, self.num_processes, self.process_id, self.heartbeat)
            processes.require_agreement("flags", self._must_be_equal())
        elif self.process_id is not None or self.num_processes not in (None, 1):
            asked = "--num-processes or --process-id alone"
            raise ConfigError(asked, "the processes must find each other", "Add --coordinator")
        elif self.num_processes is None:
            processes.require_alone()
        console.quiet = not processes.is_first()

    def _must_be_equal(self) -> dict[str, object]:
        """What every process must have been given alike. Paths of data and output are proven by what they hold."""
        values = {f"--{name.replace('_', '-')}": value for name, value in vars(self).items() if name not in OWN_FLAGS}
        if values.get("--out") is not None:
            values["--out"] = "given"
        values = {name: "not given" if value is None else value for name, value in values.items()}
        # A user's own model is read without running it: no backend may start before the processes join.
        if digest := source_digest(values["--model"]) if "--model" in values else "":
            values[f"the source of {values['--model']} (SHA-256)"] = digest[:16]
        return values | compat.settings() | versions.must_be_equal()


# Flags that tell one process from another; the data, whose content is compared, and a file, whose settings are.
OWN_FLAGS = {"process_id", "coordinator", "distributed", "num_processes", "data", "config"}


def flags_of(config: RunConfig) -> list[str]:
    """The command-line flags that give this configuration to any program with `CommonFlags`."""
    model, sizes = name_of(config.model)
    own = {name: value for name, value in {"model": model, **sizes}.items() if value != getattr(CommonFlags, name)}
    return [word for name, value in own.items() for word in _words(name, value)] + flag_words(config, SETTINGS)


def flag_words(config: RunConfig, settings: Sequence[Setting]) -> list[str]:
    """The settings that are not at their default, as flags."""
    values = {setting.flag: setting.of(config) for setting in settings if setting.of(config) != setting.default}
    return [word for name, value in values.items() for word in _words(name, value)]


def _words(name: str, value) -> list[str]:
    return [flag_word(name, value)] + ([] if isinstance(value, bool) else [str(value)])


def set_precision(config: RunConfig) -> None:
    """Switch JAX to 64 bits for a float64 run; before anything is traced."""
    jax.config.update("jax_enable_x64", config.precision.dtype == "float64")


def refuse_ignored(flags: "CommonFlags", used: set[str], why: str) -> None:
    """Refuse a common flag that was set and that this program would not use."""
    for field in dataclasses.fields(flags):
        default = getattr(type(flags), field.name)
        if field.name not in used and getattr(flags, field.name) != default:
            raise ConfigError(flag_word(field.name, getattr(flags, field.name)), why, "Leave it out")


def require_formulas(program: str, model: Model) -> None:
    """Refuse a model that is not GPT-2, whose operations and papers' formulas the benchmarks compare with."""
    if class_name(model) is not None:
        raise ConfigError(
            f"--model {class_name(model)}",
            f"must be GPT-2, which {program} compares with other frameworks and with formulas",
            f"Use a preset; `{command_text('verify')}` and `{command_text('plan')}` take any model",
        )


def parse_settings(flags: Flags, prog: str, text: str) -> Flags:
    """The flags with settings on top, as in "mesh=dp=2,tp=2 zero=3 sp no-overlap".

    Raises: ConfigError for what is no flag of `CommonFlags`.
    """
    try:
        settings = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r}", f"it cannot be read as settings ({error})", "Close the quotation") from error
    known, words = {field.name for field in dataclasses.fields(CommonFlags)}, []
    for setting in settings:
        name, given, value = setting.partition("=")
        name = name.removeprefix("--")
        if name.removeprefix("no-").replace("-", "_") not in known:
            raise ConfigError(f"{text!r}", f"{name!r} must be a setting", "Write NAME=VALUE for each flag")
        words += [f"--{name}", *([value] if given else [])]
    return parse_words(type(flags), prog, words, flags)
