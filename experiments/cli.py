"""Flags that all programs share, and the border where a wrong one ends the program."""

import ast
import dataclasses
import errno
import importlib
import io
import math
import os
import re
import shlex
import signal
import stat
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stderr, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar

import jax
import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist import compat, versions
from jaxdist.commands import VERBS, command_text
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError, full_disk, printable, reason_of, require_positive
from jaxdist.files import write_whole
from jaxdist.models.base import Model
from jaxdist.models.presets import PRESETS
from jaxdist.models.registry import SIZES, ModelFlags, class_name, fault_in, is_code, name_of, source_digest
from jaxdist.runtime import processes
from jaxdist.runtime.devices import DeviceChoice, acquire_devices
from jaxdist.runtime.signals import EXIT_SIGNAL, Interrupts

from .config_file import read_flags
from .help import ALL, asks_for_help, print_help
from .progress import Progress
from .settings import SETTINGS, Setting, SettingFlags, make_config

Flags = TypeVar("Flags")

# What `plan` writes into its command for what it cannot know; `train` refuses them by name.
PLACEHOLDERS = {"data": "DATA", "out": "OUT", "weights": "WEIGHTS"}

# Exit codes beside 0 (done) and 1 (it ran, and what it ran is wrong).
EXIT_BAD_INPUT = 2  # refused before anything ran
EXIT_DEFECT = 71  # an exception that should not have happened
EXIT_PEER = 69  # another process of the run is gone; "service unavailable" in sysexits.h
EXIT_SAVE = 74  # the last checkpoint could not be written; "input/output error"
EXIT_BUDGET = 75  # stopped because time or money was used up; "try again later" in sysexits.h


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


def require_writable(flag: str, path: str | None) -> None:
    """Refuse a file that cannot be written, before any work is done for it; a pipe without a reader is refused too.

    What is there stays as it is.
    """
    if path is None:
        return
    try:
        existed = os.path.lexists(path)
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb", buffering=0) as file:
            if stat.S_ISCHR(os.fstat(descriptor).st_mode):
                file.write(b"\n")  # /dev/full opens, and takes nothing
        if not existed:
            os.unlink(path)
    except (OSError, ValueError) as error:  # ValueError: a name with a zero in it
        raise _unwritable(flag, path, error, "Name a file in an existing folder") from error


def write_output(flag: str, path: str, text: str) -> None:
    """Write a file that `require_writable` has seen, whole: the one before it stays until then.

    Raises: ConfigError where the disk does not take it.
    """
    there = Path(path)
    try:
        if there.is_relative_to("/dev") or (there.exists() and not there.is_file()):  # /dev/stdout leads to a file
            there.write_text(text, encoding="utf-8")
        else:
            write_whole(there.resolve(), text.encode())
    except OSError as error:
        raise _unwritable(flag, path, error, "Name a file with room for it") from error


def _unwritable(flag: str, path: str, error: Exception, remedy: str) -> ConfigError:
    return ConfigError(f"{flag} {path!r}", f"it cannot be written ({reason_of(error)})", remedy)


def make_folder(flag: str, path: str | None) -> Path | None:
    if path is None:
        return None
    if not path:
        raise ConfigError(f"{flag} ''", "must name a folder", "Name one")
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{flag} {path!r}", f"must be a folder ({reason_of(error)})", "Name a folder") from error
    return Path(path)


def chosen(only: str, names: list[str]) -> list[str]:
    """The names that contain `only`. Raises: ConfigError where none does."""
    found = [name for name in names if only in name]
    if not found:
        raise ConfigError(f"--only {only}", "must be part of a name here", f"Try --only {names[0].split(',')[0]}")
    return found


def flag_word(name: str, value) -> str:
    """A field's flag as it is written: --zero, and --no-overlap where a switch is off."""
    return ("--no-" if value is False else "--") + name.replace("_", "-")


QUOTES = "'\""
_POSITIONAL = tyro.conf.Positional[str].__metadata__[0]
_VALUE = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s,;:()]*[^\s,;:().]"""


def in_flags(text: str, flags_type: type) -> str:
    """A message of the library, which speaks of parameters, in a program's flags: zero=3 becomes --zero 3.

    flags_type: a dataclass, or a union of those of a program's commands.
    """
    commands = [kind for kind in typing.get_args(flags_type) or (flags_type,) if dataclasses.is_dataclass(kind)]
    if not commands:
        return text
    names = "|".join(dict.fromkeys(field.name for kind in commands for field in dataclasses.fields(kind)))
    hints = {name: hint for kind in commands for name, hint in typing.get_type_hints(kind, include_extras=True).items()}
    bare = {name for name, hint in hints.items() if _POSITIONAL in getattr(hint, "__metadata__", ())}
    text = re.sub(rf"(?<![\w.=/'\"-])({names})=({_VALUE})", lambda match: _as_flag(*match.groups(), bare), text)
    return re.sub(rf"(?<![\w.=/'\"-])({names})(?= in \[)", lambda match: flag_word(match[1], None), text)


def _as_flag(name: str, value: str, bare: set[str]) -> str:
    """bare: the arguments that have no flag."""
    if value in ("True", "False"):
        return flag_word(name, value == "True")
    value = shlex.quote(printable(ast.literal_eval(value))) if value[0] in QUOTES else value
    return value if name in bare else f"{flag_word(name, None)} {value}"


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


class SafeConsole(Console):
    """A console on which text from elsewhere (names of files, foreign checkpoints) cannot command the terminal.

    Its `status` is seen where there is no terminal too, once the work takes longer than a moment. Text stays as it is:
    my_module:Llama: is no picture of an animal. when_broken is called where whoever read it has gone; without it, that
    is a BrokenPipeError.
    """

    def __init__(self, **how):
        super().__init__(emoji=False, **how)
        self.when_broken: Callable[[], None] | None = None

    def status(self, status, **how) -> AbstractContextManager:
        # A notebook's FORCE_COLOR makes rich see a terminal where every frame of a spinner would be a line.
        animated = self.is_terminal and self.file.isatty()
        return super().status(status, **how) if animated or self.quiet else Progress(str(status))

    def _check_buffer(self) -> None:
        try:
            super()._check_buffer()
        except OSError as error:
            if error.errno != errno.EIO:  # a terminal that was closed
                raise
            self.on_broken_pipe()

    def on_broken_pipe(self) -> None:
        """Rich would end the program, with exit code 1."""
        if self.when_broken is None:
            raise
        self.quiet = True
        self.when_broken()

    def render(self, renderable, options=None):
        for segment in super().render(renderable, options):
            yield segment if segment.control else segment._replace(text=printable(segment.text))


def run_program(
    flags_type: type[Flags], main: Callable[[Flags, Console], int | None], prog: str, args: list[str] | None = None
) -> None:
    """Parse `args` (default: the command line), run `main` and end the process with an exit code. prog: as in "train".

    A ConfigError becomes one message and exit code 2. Whatever else escapes is a defect of ours: one line says so, and
    a file holds the traceback.
    """
    words = sys.argv[1:] if args is None else args
    if words and words[0] in VERBS.get(prog, {}):
        module = importlib.import_module(f".{VERBS[prog][words[0]]}", __package__)
        return run_program(typing.get_type_hints(module.main)["flags"], module.main, f"{prog} {words[0]}", words[1:])
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # closed by the shell: >&-
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115, for as long as the process lives
    if not os.environ.get("COLUMNS", "80").strip("0"):  # not known; rich would write nothing into no columns
        del os.environ["COLUMNS"]
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a terminal whose encoding lacks a character shows its number
            stream.reconfigure(errors="backslashreplace")
    flags = None
    try:
        with Interrupts():
            flags = _parse(flags_type, prog, words)
            known = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
            code = main(flags, SafeConsole(highlight=False, width=None if known else 160))
            sys.stdout.flush()
    except ConfigError as error:
        code, said = EXIT_BAD_INPUT, in_flags(str(error), flags_type)
        if not isinstance(error, processes.Disagreement) or processes.is_first():
            _say(f"[bold red]error:[/] {escape(said)}")
        if isinstance(error, processes.Disagreement):  # which all processes know
            processes.end_together("disagreement", 10)
            processes.leave(code)
        if processes.count() > 1:
            processes.fail(code, code, said)
    except KeyboardInterrupt:
        code = EXIT_SIGNAL + signal.SIGINT
        if processes.count() == 1:  # XLA may be compiling in another thread, which Python's own end would not survive
            with suppress(OSError, ValueError):
                sys.stdout.flush()
            processes.leave(code)
    except BrokenPipeError:  # whoever read the output has had enough
        code = EXIT_SIGNAL + signal.SIGPIPE
        _abandon_output()
    except Exception as error:
        code, text = _unexpected(error, prog, words, getattr(flags, "model", None))
        _say(text)
        if processes.count() > 1:
            processes.fail(code, EXIT_PEER, f"{type(error).__name__}: {reason_of(error)}")
    sys.exit(code)


def _parse(flags_type: type[Flags], prog: str, words: list[str]) -> Flags:
    if asks_for_help(flags_type, prog, words):
        print_help(flags_type, prog, words)
    words = ["--help" if word == ALL else word for word in words]  # of few flags all are shown anyway
    flags = _parse_words(flags_type, prog, words)
    if not getattr(flags, "config", None):
        return _with_given(flags, words)
    try:
        values = read_flags(flags_type, prog, flags.config)
    except ConfigError:
        _join_to_end(flags_type)
        raise
    named = flags.model
    flags = _parse_words(flags_type, prog, words, flags_type(**values))
    if flags.model == values.get("model", flags.model):
        if flags.model != named and is_code(flags.model):
            _join_to_end(flags_type)
            reason = "its model is a class, and whoever runs it must have named it"
            raise ConfigError(f"--config {flags.config!r}", reason, f"Add --model {shlex.quote(flags.model)}")
        return _with_given(flags, words, values)
    values = {name: value for name, value in values.items() if name not in SIZES}  # they are of the file's model
    return _with_given(_parse_words(flags_type, prog, words, flags_type(**values)), words, values)


def _with_given(flags: Flags, words: list[str], values: Mapping[str, Any] | None = None) -> Flags:
    """The flags, which know which of them were given, if they ask for that: on the command line, or in a file and other
    than the default, since a run's file has all settings."""
    if not hasattr(flags, "given"):
        return flags
    said = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    other = {name for name, value in (values or {}).items() if value != getattr(type(flags), name)}
    return dataclasses.replace(flags, given=frozenset({name.removeprefix("no_") for name in said} | said | other))


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
    return _parse_words(type(flags), prog, words, flags)


def _parse_words(flags_type: type[Flags], prog: str, words: list[str], default: Flags | None = None) -> Flags:
    parse = partial(tyro.cli, flags_type, prog=command_text(prog), **({} if default is None else {"default": default}))
    try:
        with redirect_stderr(io.StringIO()):
            return parse(args=words)
    except SystemExit as stop:
        if stop.code:
            with suppress(SystemExit):  # say so again, in words that a terminal cannot obey
                parse(args=[printable(word) for word in words])
            _join_to_end(flags_type)
            if processes.count() > 1:
                processes.fail(EXIT_BAD_INPUT, EXIT_BAD_INPUT, "its flags were refused")
        raise


def _join_to_end(flags_type: type) -> None:
    """Join the other processes, who wait for this one, so that they can be told that it ends."""
    commands = typing.get_args(flags_type) or (flags_type,)
    if any(issubclass(kind, ProcessFlags) for kind in commands) and processes.asked_to_join():
        with suppress(ConfigError):
            processes.join(None, None, None)


def _unexpected(error: Exception, prog: str, words: list[str], model: str | None) -> tuple[int, str]:
    """Exit code and one line for an exception that no program expected; a user's own `model` may have caused it."""
    if full_disk(error) or (isinstance(error, OSError) and error.errno == errno.EIO):
        _abandon_output()
        return EXIT_SAVE, f"[bold red]error:[/] the output cannot be written: {escape(str(error))}"
    if isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error):
        text = f"[bold red]error:[/] not enough memory: {escape(reason_of(error))}"
        return 1, f"{text}. `{command_text('plan')}` tells what a layout needs."
    with tempfile.NamedTemporaryFile("w", prefix="jaxdist-defect-", suffix=".txt", delete=False) as file:
        asked = f"{command_text(prog)} {shlex.join(words)}\n{versions.versions()}\n\n"
        file.write(asked.encode("ascii", "replace").decode() + "".join(traceback.format_exception(error)))
    if model and (where := fault_in(model, error)):
        text = f"--model {model}: {where} raised {type(error).__name__}: {reason_of(error)}"
        return EXIT_BAD_INPUT, f"[bold red]error:[/] {escape(text)}. The traceback is in {file.name}."
    return EXIT_DEFECT, (
        f"[bold red]defect:[/] {type(error).__name__}: {escape(reason_of(error))}. This is a fault of jaxdist, not of "
        f"what was asked. Please report it with {file.name}, which holds the command and the traceback."
    )


def _say(text: str) -> None:
    with suppress(OSError):
        SafeConsole(stderr=True, highlight=False).print(text, soft_wrap=True)


def _abandon_output() -> None:
    """Drop what is still buffered for stdout, which would be refused again, with a traceback, when Python ends."""
    with suppress(OSError, ValueError):  # ValueError: what stands in for stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
