"""Throws odd inputs at every program and looks for what no program may do: a traceback, a hang, an ignored flag.

python -m tests.support.fuzz --inputs 1000

Each input is a command line made from the program's own flags: sizes that cannot be, numbers that are none, files that
are pipes, devices, folders or damaged, text that a terminal would obey. It runs in a process of its own, forked from
this one, up to the point where a step would be compiled: what is tried is the border, not the computation. The same
seed gives the same inputs.
"""

import contextlib
import dataclasses
import importlib
import os
import random
import re
import shlex
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from rich.console import Console

from experiments.entry import EXIT_DEFECT, chosen, run_program
from jaxdist.commands import command_text
from jaxdist.errors import printable, require_positive
from jaxdist.models.presets import PRESETS

INTEGERS = (0, -1, 1, 2, 3, 4, 7, 8, 128, 10**6, 2**31 - 1, 2**31, 10**9, 10**18, -(10**18))
FLOATS = ("nan", "inf", "-inf", "0", "-1", "1e-320", "1e308", "1e999", "0.5", "1", "3", "3e18", "1_0")
NUMBERS = ", = a= =1 nan inf -inf true 1e99999999 10**9 0 -1 3 1d 3e18d"
NAMES = "[bold] 2026-11-23T10:00 2026-13-45 dp=2,,tp=2 pp=1000 dp=1e9 dp=2,dp=2 base:² x:1:2 gpt2 H100 every-0"
WORDS = (
    *("", " ", "every-99999999999999999999", "3,5", "1,1", "balanced", *NUMBERS.split(), *NAMES.split()),
    *("\x1b[31mred\x1b[0m", "\x07", "\u202e", os.fsdecode(b"\xed\xa0\x80"), "²", "a" * 5000, "../..", "%s%n", "{}"),
)
MADE = "fifo folder empty text.txt binary.bin deep.json deep.toml good.toml cut.json bad.npy link latin.txt"
FILES = MADE.split()
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/proc/self/mem", "/nowhere/at/all")


IGNORED = "given and never looked at:"


class Reached(Exception):
    """The program would compile a step now: everything before it went well."""


@dataclass(frozen=True)
class Target:
    """A program: its flags and main, words that keep it small, and what must not be run, as "module:name"."""

    module: str
    flags: str
    base: tuple[str, ...] = ()
    stop_at: tuple[str, ...] = ()
    share: int = 1


SIZES = "--num-layers 2 --width 16 --num-heads 2 --seq-len 16 --batch-size 8 --steps 2"
TINY = tuple(SIZES.split())
TARGETS = (
    Target("train", "TrainFlags", (*TINY, "--data", "text.txt"), ("jaxdist.train.program:Program.compile_step",), 5),
    Target("verify", "VerifyFlags", TINY, (".verify:Verifier.__call__",), share=3),
    Target("where", "WhereFlags", TINY, (".where:Run",), share=2),
    Target("plan", "PlanFlags", ("--model", "gpt2-124m", "--hardware", "h100", "--nodes", "1"), share=3),
    Target("prepare", "PrepareFlags", ("--data", "text.txt", "--out", "prepared"), share=2),
    Target("generate", "GenerateFlags", ("theirs", "--prompt", "a")),
    Target("evaluate", "EvaluateFlags", ("theirs",)),
    Target("convert", "Hf", ("theirs", "--out", "ours")),
    Target("convert", "Ours", ("ours", "--out", "out")),
    Target("schedules", "SchedulesFlags"),
    Target("report", "ReportFlags", ("theirs",)),
    Target("launch", "LaunchFlags", ("--processes", "1"), (".launch:start",)),
    Target("bench.__main__", "BenchFlags", ("compile", *TINY), ("importlib:import_module",)),
    Target("bench.levels", "LevelsFlags", (), (".bench.levels:levels",)),
    Target("budget", "Run", ("true", "--price-per-hour", "1", "--hours", "1"), (".budget:Guarded",)),
    Target("budget", "Settle", ("--job", "b", "--actual", "1")),
    Target("budget", "Init", ("--budget", "3")),
)


@dataclass(frozen=True)
class FuzzFlags:
    """Odd inputs for every program, the same ones for the same seed."""

    inputs: int = 1000
    seed: int = 0
    bound: float = 20.0
    """Seconds after which an input counts as a hang."""
    only: str = ""
    """Programs whose name contains this."""
    verbose: bool = False
    """Print every input and its exit code."""


def main(flags: FuzzFlags, console: Console) -> int:
    require_positive("inputs", flags.inputs, 10**6)
    names = chosen(flags.only, [target.module for target in TARGETS])
    targets = [target for target in TARGETS if target.module in names for _ in range(target.share)]
    for target in targets:
        importlib.import_module(f"experiments.{target.module}")
    counts, faults, slowest = Counter(), [], 0.0
    with tempfile.TemporaryDirectory() as folder:
        make_files(Path(folder))
        for number in range(flags.inputs):
            chance = random.Random(f"{flags.seed} {number}")
            target = chance.choice(targets)
            words = make_words(target, chance, Path(folder))
            code, output, seconds = run_apart(lambda t=target, w=words: run_target(t, w), folder, flags.bound)
            slowest = max(slowest, seconds)
            fault = fault_of(code, output)
            counts[fault or f"exit {code}"] += 1
            if fault or flags.verbose:
                line = printable(f"{fault or code}: {command_text(target.module)} {shlex.join(words)[:400]}")
                console.print(line, markup=False, soft_wrap=True)
            if fault:
                faults.append(fault)
                console.print(printable(output[-1500:]), markup=False, soft_wrap=True)
            if (number + 1) % 100 == 0:
                console.print(f"{number + 1} of {flags.inputs}: {len(faults)} faults", markup=False)
    told = ", ".join(f"{count} {what}" for what, count in sorted(counts.items()))
    console.print(f"{flags.inputs} inputs: {told}; the slowest took {slowest:.1f} s", markup=False)
    return 1 if faults else 0


def fault_of(code: int | None, output: str) -> str | None:
    """What an outcome shows that no program may show; None where it is as it should be."""
    if code is None:
        return "hang"
    if "Traceback (most recent call last)" in output:
        return "traceback"
    if code == EXIT_DEFECT:
        return "defect"
    if IGNORED in output:
        return "ignored flag"
    if code < 0 or code >= 128:
        return f"killed ({code})"
    if re.search(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]|\x1b(?!\[[0-9;]*[mK])", output) or "\x1b[31mred" in output:
        return "escape sequence"
    return None


def make_words(target: Target, chance: random.Random, folder: Path) -> list[str]:
    """The base words with one to three flags of the program set to something odd."""
    kind = getattr(importlib.import_module(f"experiments.{target.module}"), target.flags)
    hints = get_type_hints(kind)
    words = list(target.base)
    named = [field.name for field in dataclasses.fields(kind) if field.name not in ("command", "which", *SLOW)]
    for name in chance.sample(named, min(len(named), chance.choice((1, 1, 2, 3)))):
        flag = "--" + name.replace("_", "-")
        if hints[name] is bool:
            words.append(chance.choice((flag, flag.replace("--", "--no-", 1))))
        else:
            known = KNOWN.get(name) if chance.random() < 0.8 else None
            words += [f"{flag}={chance.choice(known) if known else odd_value(hints[name], chance, folder)}"]
    return words


# Values of text that lead further into a program than odd ones do.
KNOWN = {"model": (*PRESETS, "json:JSONDecoder", "no_such_module:X", "..:X", "jaxdist.models.gpt2:GPT2Config")}

# Work that is asked for by name and takes minutes.
SLOW = {"compile", "prove", "trace", "all", "pipelines", "distributed", "coordinator", "num_processes", "process_id"}


def odd_value(hint: Any, chance: random.Random, folder: Path) -> str:
    """Text for a flag of this type: often of its kind, at times of another."""
    kinds = {part for part in (hint, *get_args(hint)) if part is not type(None)}
    literals = [choice for part in kinds if get_origin(part) is Literal for choice in get_args(part)]
    if chance.random() < 0.15:
        return chance.choice(WORDS)
    if literals and chance.random() < 0.9:
        return str(chance.choice(literals))
    if int in kinds:
        return str(chance.choice(INTEGERS))
    if float in kinds:
        return chance.choice(FLOATS)
    return chance.choice((*WORDS, *(str(folder / name) for name in FILES), *DEVICES))


def make_files(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "folder").mkdir()
    (folder / "link").symlink_to(folder / "link")
    contents = {
        "empty": b"",
        "text.txt": b"the quick brown fox jumps over the lazy dog; " * 400,
        "latin.txt": b"caf\xe9 " * 1000,
        "binary.bin": bytes(range(256)) * 64,
        "deep.json": b"[" * 100_000,
        "good.toml": b"[parallel]\nzero = 1\n[run]\nsteps = 3\n",
        "deep.toml": b"a = " + b"[" * 50_000,
        "cut.json": b'{"model": {',
        "bad.npy": b"\x93NUMPY\x01\x00\xff\xff",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content)


def run_target(target: Target, words: list[str]) -> None:
    module = importlib.import_module(f"experiments.{target.module}")
    kind = getattr(module, target.flags)
    for place in target.stop_at:
        name, _, attribute = place.partition(":")
        *holders, last = attribute.split(".")
        holder = importlib.import_module(name, "experiments")
        for part in holders:
            holder = getattr(holder, part)
        setattr(holder, last, _reach)
    sys.argv = [target.module, *words]
    run_program(kind, _until_reached(module.main, words), target.module, args=words)


def _reach(*_, **__):
    raise Reached


def watched(flags: Any, read: set[str]) -> Any:
    """The same flags; `read` gets the name of every one that is looked at."""

    class Watched(type(flags)):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

    object.__setattr__(flags, "__class__", Watched)
    return flags


def _until_reached(begin: Callable, words: list[str]) -> Callable:
    """`begin`, ended where a step would be compiled; a program that ends well must have looked at what it was given."""

    def run(flags, console) -> int:
        given = {word[2:].partition("=")[0].removeprefix("no-").replace("-", "_") for word in words if word[:2] == "--"}
        given &= {field.name for field in dataclasses.fields(flags)} - {"config"}  # which is read while parsing
        given = {name for name in given if getattr(flags, name) != getattr(type(flags), name, None)}
        read: set[str] = set()
        try:
            code = begin(watched(flags, read), console)
        except Reached:
            return 0
        if not code and given - read:
            print(f"{IGNORED} {', '.join(sorted(given - read))}", file=sys.stderr)
        return code

    return run


def run_apart(run: Callable[[], None], folder: str, bound: float) -> tuple[int | None, str, float]:
    """(exit code, output, seconds) of `run` in a forked process; the code is None where it was killed at the bound."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as file:
        child = os.fork()
        if child == 0:
            code = 1
            try:
                os.setpgid(0, 0)
                os.chdir(folder)
                null = os.open(os.devnull, os.O_RDONLY)
                for descriptor, target in ((null, 0), (file.fileno(), 1), (file.fileno(), 2)):
                    os.dup2(descriptor, target)
                sys.stdout, sys.stderr = (open(n, "w", encoding="utf-8", closefd=False) for n in (1, 2))  # noqa: SIM115
                run()
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except BaseException:
                traceback.print_exc()
            with contextlib.suppress(OSError):
                sys.stdout.flush()
                sys.stderr.flush()
            os._exit(code)
        code = None
        while time.monotonic() - begun < bound:
            ended, status = os.waitpid(child, os.WNOHANG)
            if ended:
                code = os.waitstatus_to_exitcode(status)
                break
            time.sleep(0.005)
        else:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
        file.seek(0)
        return code, file.read().decode(errors="replace"), time.monotonic() - begun


if __name__ == "__main__":
    run_program(FuzzFlags, main, "tests.support.fuzz")
