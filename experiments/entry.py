"""How a program starts and ends: flags parsed, files to write tried, errors said, exit codes. No JAX here."""

import ast
import dataclasses
import errno
import importlib
import io
import os
import re
import shlex
import signal
import stat
import sys
import tempfile
import traceback
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist import versions
from jaxdist.commands import VERBS, command_text
from jaxdist.errors import ConfigError, full_disk, printable, reason_of
from jaxdist.files import write_whole
from jaxdist.runtime import processes
from jaxdist.runtime.signals import EXIT_SIGNAL, Interrupts

from .help import ALL, asks_for_help, print_help
from .progress import Progress

Flags = TypeVar("Flags")

# Exit codes beside 0 (done) and 1 (it ran, and what it ran is wrong).
EXIT_BAD_INPUT = 2  # refused before anything ran
EXIT_DEFECT = 71  # an exception that should not have happened
EXIT_PEER = 69  # another process of the run is gone; "service unavailable" in sysexits.h
EXIT_SAVE = 74  # the last checkpoint could not be written; "input/output error"
EXIT_BUDGET = 75  # stopped because time or money was used up; "try again later" in sysexits.h


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
    flags = parse_words(flags_type, prog, words)
    if not getattr(flags, "config", None):
        return _with_given(flags, words)
    from .config_file import with_file  # which knows the models, and so JAX

    try:
        flags, values = with_file(flags, prog, lambda default: parse_words(flags_type, prog, words, default))
    except ConfigError:
        _join_to_end(flags_type)
        raise
    return _with_given(flags, words, values)


def _with_given(flags: Flags, words: list[str], values: Mapping[str, Any] | None = None) -> Flags:
    """The flags, which know which of them were given, if they ask for that: on the command line, or in a file and other
    than the default, since a run's file has all settings."""
    if not hasattr(flags, "given"):
        return flags
    said = {word[2:].partition("=")[0].replace("-", "_") for word in words if word.startswith("--")}
    other = {name for name, value in (values or {}).items() if value != getattr(type(flags), name)}
    return dataclasses.replace(flags, given=frozenset({name.removeprefix("no_") for name in said} | said | other))


def parse_words(flags_type: type[Flags], prog: str, words: list[str], default: Flags | None = None) -> Flags:
    """A command line on top of defaults, by tyro, which ends the program where it refuses a word."""
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
    commands = typing.get_args(flags_type) or (flags_type,)  # those of `cli.ProcessFlags` can join
    if any(hasattr(kind, "join") for kind in commands) and processes.asked_to_join():
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
    if model and (where := _fault_in(model, error)):
        text = f"--model {model}: {where} raised {type(error).__name__}: {reason_of(error)}"
        return EXIT_BAD_INPUT, f"[bold red]error:[/] {escape(text)}. The traceback is in {file.name}."
    return EXIT_DEFECT, (
        f"[bold red]defect:[/] {type(error).__name__}: {escape(reason_of(error))}. This is a fault of jaxdist, not of "
        f"what was asked. Please report it with {file.name}, which holds the command and the traceback."
    )


def _fault_in(model: str, error: Exception) -> str:
    from jaxdist.models.registry import fault_in

    return fault_in(model, error)


def _say(text: str) -> None:
    with suppress(OSError):
        SafeConsole(stderr=True, highlight=False).print(text, soft_wrap=True)


def _abandon_output() -> None:
    """Drop what is still buffered for stdout, which would be refused again, with a traceback, when Python ends."""
    with suppress(OSError, ValueError):  # ValueError: what stands in for stdout has no descriptor
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


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
