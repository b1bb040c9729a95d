"""Train a GPT on any mesh: data, tensor and pipeline parallel; on one process or many.

python -m experiments.train --mesh dp=2,tp=2

With --out the run is kept in a folder, and the same command continues it after whatever ended it.
"""

import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import ClassVar, Literal

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from jaxdist.checkpoint import resume
from jaxdist.checkpoint.checkpoints import Checkpoints, Manifest, SaveFailed
from jaxdist.commands import command_text
from jaxdist.config import RunConfig
from jaxdist.data.batches import Batches, Corpus, GlobalBatch, held_out_batches, load_corpus
from jaxdist.data.prefetch import Prefetched
from jaxdist.errors import ConfigError, is_utf8, printable, reason_of, require_positive
from jaxdist.files import write_whole
from jaxdist.layout import local_bytes
from jaxdist.mesh import make_mesh
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.runtime import processes
from jaxdist.runtime.budget import JobBudget, begin_job, is_asked_for
from jaxdist.runtime.devices import Devices, acquire_devices, refused_option
from jaxdist.runtime.fault_injection import Drill, parse_drill
from jaxdist.runtime.health import SpikeWatch, gather_ranks, make_replica_check, name_culprits
from jaxdist.runtime.metrics import RunFiles, holds_run, is_complete, require_writable_folder
from jaxdist.runtime.run_folder import held, require_shared
from jaxdist.runtime.signals import Signals
from jaxdist.runtime.stragglers import Pace
from jaxdist.runtime.watchdog import Agreement, Watchdog
from jaxdist.train.program import Program, State, build_program, compiled_bytes

from . import config_file
from .cli import (
    EXIT_BUDGET,
    EXIT_PEER,
    EXIT_SAVE,
    EXIT_SIGNAL,
    PLACEHOLDERS,
    CommonFlags,
    ProcessFlags,
    flag_word,
    in_flags,
    run_program,
    set_precision,
)
from .config_file import FileFlags
from .progress import Progress as SlowWork
from .tables import Rows

MAX_ROLL_BACKS = 5
MAX_SKIPS_IN_A_ROW = 10


@dataclass(frozen=True)
class TrainFlags(CommonFlags, FileFlags, ProcessFlags):
    """Train a GPT on real text, on one device or any mesh."""

    GROUPS: ClassVar[dict[str, str]] = {
        "data": "data",
        "out": "folder",
        "grace": "faults",
        "compiler_options": "compiler",
        "eval_every": "evaluation",
        "budget": "budget",
    }
    NOT_KEPT: ClassVar[frozenset[str]] = frozenset(
        {"config", "out", "fresh", "overwrite", "fall_back", "drill", *(field.name for field in fields(ProcessFlags))}
    )

    data: str | None = None
    """Text file or folder, .npy / .bin tokens, what `prepare` made, or a mixture as in a.bin=0.7,b.npy=0.3.

    Default: the source of Python's standard library."""
    prefetch: int = 2
    """Batches that are read and sent to the devices ahead, while a step computes."""
    out: str | None = None
    """Folder of the run: run.toml (for --config), config.json, metrics.jsonl, checkpoints/ and at the end summary.json
    (stopped.json where it was stopped before). The same command continues the run from its newest checkpoint."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. One is made at the end and where the run is stopped in any case."""
    keep_last: int | None = 3
    """Checkpoints to keep; older ones are removed."""
    keep_every: int | None = None
    """Keep the checkpoints of every so many steps as well."""
    fresh: bool = False
    """Start at step 0, where --out holds no run; with --overwrite also where it does."""
    overwrite: bool = False
    """With --fresh: remove the run that --out holds."""
    restore: str | None = None
    """DIR[:STEP] of another run: start from its checkpoint, on this mesh and with these settings."""
    fall_back: bool = False
    """Where the newest checkpoint is damaged, continue from the newest good one."""
    grace: float = 30.0
    """Seconds after SIGTERM or Ctrl-C within which the step must end and its checkpoint be written."""
    on_nonfinite: Literal["stop", "skip", "roll-back"] = "stop"
    """What to do where a loss or gradient is NaN or infinite. No parameter is touched by it in any case."""
    on_spike: Literal["ignore", "stop", "roll-back"] = "ignore"
    """What to do where the loss jumps. roll-back: to the newest checkpoint, and past the batches since."""
    check_replicas_every: int | None = None
    """Steps between comparisons of everything that several ranks hold. Default: before each checkpoint."""
    stuck_after: float = 1800.0
    """Seconds without a finished step after which every process writes its stacks down and ends."""
    record_digests: bool = False
    """Put the SHA-256 of every global batch into metrics.jsonl, to prove that two runs saw the same."""
    drill: str | None = None
    """Rehearse a fault, as in nan:step=5,rank=1,leaf=tokens (inf, flip, batch, stuck, slow, die, term, late, full)."""
    compiler_options: tuple[str, ...] = ()
    """Options of XLA for the step, as in xla_gpu_enable_latency_hiding_scheduler=true. `bench flags` tells
    which this jaxlib takes and what each gains. They may change the last bits of results."""
    eval_every: int = 50
    """Steps between held-out evaluations."""
    eval_batches: int = 4
    budget: str | None = None
    """Dollars that all jobs in the spend log may cost together. Default: JAXDIST_BUDGET, else the log's ceiling."""
    price_per_hour: str | None = None
    """Dollars for one device, an hour. Turns the budget guard on, as every flag and variable here does."""
    max_hours: str | None = None
    """Longest time for this run, reserved before it starts. Default: as long as the rest of the budget pays for."""
    spend_log: str | None = None
    """Default: JAXDIST_SPEND_LOG, else spend.jsonl. `budget init` makes one."""

    def require_filled_in(self) -> None:
        """Refuse the placeholders of a command that `plan` printed, before this process joins others."""
        unfilled = [f"--{name} {word}" for name, word in PLACEHOLDERS.items() if getattr(self, name) == word]
        if unfilled:
            raise ConfigError(
                " and ".join(unfilled),
                "this is a placeholder of `plan`, which knows neither your tokens nor your storage",
                "Write --data my_tokens and --out /shared/runs/a, your own (a path of that very name: ./DATA, ./OUT)",
            )

    def check(self) -> None:
        """Refuse what cannot work, before anything is read."""
        require_positive("eval_every", self.eval_every)
        for name in ("checkpoint_every", "keep_last", "keep_every", "check_replicas_every"):
            if getattr(self, name) is not None:
                require_positive(name, getattr(self, name))
        require_positive("eval_batches", self.eval_batches, 10**6)
        require_positive("prefetch", self.prefetch, 10**4)
        for name in ("grace", "stuck_after"):
            if not 0 < getattr(self, name) < 1e9:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{flag} {getattr(self, name)}", "it is a time in seconds, above 0", f"Use {flag} 60")
        if self.out is None:
            for name in ("keep_last", "keep_every", "fresh", "fall_back", "record_digests"):
                if getattr(self, name) != getattr(TrainFlags, name):
                    flag = flag_word(name, getattr(self, name))
                    raise ConfigError(f"{flag} without --out", "it is about a run's folder", "Add --out runs/a")
        if self.out is not None and not self.out:
            raise ConfigError("--out ''", "it names no folder", "Name one")
        for name in ("out", "restore"):
            if not is_utf8(getattr(self, name) or ""):
                asked = f"--{name} {getattr(self, name)!r}"
                raise ConfigError(asked, "TensorStore writes under names of UTF-8 alone", "Choose another folder")
        if self.checkpoint_every is not None and self.out is None:
            raise ConfigError("--checkpoint-every without --out", "checkpoints need a folder", "Add --out runs/a")
        if self.overwrite and not self.fresh:
            raise ConfigError("--overwrite without --fresh", "it removes a run to start anew", "Add --fresh")
        if "roll-back" in (self.on_nonfinite, self.on_spike) and self.checkpoint_every is None:
            raise ConfigError(
                "roll-back without --checkpoint-every", "it needs a checkpoint", "Add --checkpoint-every 50"
            )


@dataclass(eq=False)
class Stopped(Exception):
    """The run ended by itself after `steps` whole steps; `code` is the program's exit code."""

    steps: int
    reason: str
    code: int
    saved: str = ""


@dataclass(eq=False)
class RollBack(Exception):
    """Go back to the newest checkpoint and on from batch `next_batch`."""

    reason: str
    next_batch: int


@dataclass(eq=False)
class Run:
    """What the loop needs beside the state."""

    flags: TrainFlags
    console: Console
    program: Program
    step: Callable
    batches: Batches
    held_out: list[GlobalBatch]
    data: dict
    files: RunFiles
    checkpoints: Checkpoints | None
    signals: Signals
    watchdog: Watchdog
    budget: JobBudget | None
    drill: Drill | None

    def save(self, state: State, progress: resume.Progress) -> None:
        """Start to save. Raises: SaveFailed; for the save before this one only where there are several processes."""
        if self.checkpoints is None:
            return
        try:
            self.checkpoints.wait()
        except SaveFailed as error:
            if jax.process_count() > 1:
                raise
            self.not_saved(error)
        with nullcontext() if self.drill is None else self.drill.no_room(int(state.step)):
            resume.save(self.checkpoints, self.program, state, self.data, progress)
            if self.drill is not None:
                self.checkpoints.wait()

    def not_saved(self, error: SaveFailed) -> None:
        self.console.print(f"[bold red]not saved:[/] {escape(str(error))}", soft_wrap=True)

    def stop_reason(self) -> tuple[str, int] | None:
        """Why this process wants to stop before the next step, and the exit code for it."""
        used_up = self.budget.stop_reason() if self.budget else None
        if self.signals.number is not None:
            return self.signals.reason, EXIT_SIGNAL + self.signals.number
        return (used_up, EXIT_BUDGET) if used_up else None


def main(flags: TrainFlags, console: Console, now: Callable[[], float] = time.monotonic) -> int:
    """Args: `now` is the clock of the budget."""
    # ---- check everything, before anything is traced ----
    flags.require_filled_in()
    flags.join(console)
    flags.check()
    config = flags.run_config()
    set_precision(config)
    devices = acquire_devices(config.parallel.mesh.num_devices, flags.device)
    options = parse_options(flags.compiler_options)
    out = None if flags.out is None else Path(flags.out)
    if out is not None:
        require_writable_folder(out)
    corpus = load_corpus(flags.data, config.model.vocab_size)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)
    held_out = held_out_batches(corpus, config.batch_size, config.model.seq_len, flags.eval_batches)
    drill = parse_drill(flags.drill, config.parallel.mesh.num_devices)
    poison = drill.poison() if drill else None
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices), poison=poison)
    attention = {"--attention, as it compiles": program.model.ctx.attention}
    processes.require_agreement("attention", attention, seconds=600)
    require_room(program, devices)
    data = {"source": corpus.about, "fingerprint": corpus.fingerprint()}
    shown = f"{corpus.about} (SHA-256 {data['fingerprint'][:12]}...)"
    processes.require_agreement("data", {"--data": processes.Shown(data["fingerprint"], shown)}, seconds=600)

    def warn(text: str) -> None:
        console.print(f"[yellow]warning:[/] {escape(in_flags(text, TrainFlags))}", soft_wrap=True)

    def late() -> None:
        steps = checkpoints.steps() if checkpoints else []
        text = f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint was made"
        print(f"not done within --grace {flags.grace:g} s: {text}", file=sys.stderr, flush=True)

    with ExitStack() as stack:
        # ---- where does it start? ----
        checkpoints = own = other = None
        if out is not None:
            if processes.is_first():
                stack.enter_context(held(out, "--out", warn))
            require_shared(out, "--out")
            if is_done(flags, config, out, console, warn):
                return 0
            checkpoints = Checkpoints(out / resume.FOLDER, flags.keep_last, flags.keep_every, warn=warn)
            own = resume.find(checkpoints, config, data, flags.fall_back, warn)
        if own is None and flags.restore is not None:
            other = resume.find_other(flags.restore, config)

        signals = stack.enter_context(Signals(grace=flags.grace, late=late))
        watchdog = stack.enter_context(Watchdog(flags.stuck_after, stacks_file(out)))
        budget = stack.enter_context(job_budget(flags, config, console, now))
        about = {"data": corpus.about, "devices": devices.description, "compiler_options": options}
        first = out if processes.is_first() else None
        files = stack.enter_context(RunFiles(first, config, about, own.step if own else 0, warn))
        if first is not None:
            write_settings(first, flags, config)

        # ---- say what will run ----
        entropy = corpus.unigram_entropy()
        print_resolved(console, program, devices, corpus, entropy)
        if out is None:
            console.print("[yellow]note:[/] without --out nothing of this run is kept: no checkpoint, no metrics")

        # ---- compile, initialise or restore ----
        begun = time.perf_counter()
        watchdog.alive("compiling the step")
        with SlowWork("compiling the step", quiet=console.quiet):
            step = program.compile_step(options)
        compiled = time.perf_counter()

        def start_from(manifest: Manifest | None) -> resume.Start:
            if manifest is not None:
                return resume.restore(checkpoints, manifest, program, same_run=True)
            if other is not None:
                return resume.restore(*other, program, same_run=False)
            return resume.begin(program)

        def find_start() -> resume.Start:
            return start_from(resume.find(checkpoints, config, data, flags.fall_back, warn))

        watchdog.alive("making the state")
        with SlowWork("making the state" if own is None else "restoring the state", quiet=console.quiet):
            start = start_from(own)
        planned = compiled_bytes(step)
        note = "" if planned is None else f"; the compiler plans {_mib(planned.peak)} a device at the peak"
        console.print(
            f"compiled in {compiled - begun:.1f} s, {'initialised' if not start.step else 'restored'} in "
            f"{time.perf_counter() - compiled:.1f} s{note}"
        )
        if start.step:
            verb = "resumed after" if own else "restored from"
            console.print(
                f"[bold]{verb}[/] {escape(start.about)}; batch {start.progress.batch} is next", soft_wrap=True
            )
        console.print()

        # ---- train ----
        run = Run(
            flags, console, program, step, batches, held_out, data, files, checkpoints, signals, watchdog, budget, drill
        )
        try:
            progress, last = train(run, start, find_start)
        except Stopped as stopped:
            console.print(
                f"\n[bold red]stopped[/] after {stopped.steps} of {config.steps} steps: {escape(stopped.reason)}; "
                f"{stopped.saved or 'no checkpoint was made'}",
                soft_wrap=True,
            )
            files.write_stopped({"steps": stopped.steps, "of": config.steps, "reason": stopped.reason})
            if stopped.code == EXIT_SAVE and jax.process_count() > 1:  # which the others may not know
                processes.fail(EXIT_SAVE, EXIT_SAVE, stopped.reason)
            return stopped.code
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            text = f"process {jax.process_index()}: another process is gone ({reason_of(error)})"
            print(printable(text), file=sys.stderr, flush=True)
            sys.stderr.flush()
            processes.leave(EXIT_PEER)

        # ---- report ----
        console.print(
            f"\n[bold]done[/]: {config.steps} steps, held-out loss {last:.4f} nats/token "
            f"(started at {progress.first_loss:.4f}; unigram entropy of the corpus {entropy:.4f})"
        )
        epochs = batches.epochs(progress.batch)
        for source, passes in zip(corpus.sources, epochs, strict=True):
            console.print(f"{passes:.3g} epochs of {escape(source.about)}")
        complete = files.write_summary(
            {
                "steps": config.steps,
                "tokens": progress.tokens,
                "held_out_loss": last,
                "first_held_out_loss": progress.first_loss,
                "unigram_entropy": entropy,
                "epochs": epochs,
            }
        )
        if budget:
            console.print(f"cost {budget.report()}")
        if not complete:
            console.print(f"[bold red]not written:[/] summary.json ({escape(str(files.failure))})")
            return EXIT_SAVE
    return 0


def parse_options(options: Sequence[str]) -> dict[str, str | bool]:
    """NAME=VALUE, each, as this machine's compiler takes it."""
    found: dict[str, str | bool] = {}
    for option in options:
        name, equals, text = option.partition("=")
        value = {"true": True, "false": False}.get(text.lower(), text)
        refusal = refused_option(name, value) if name and equals else "an option is NAME=VALUE"
        if refusal:
            remedy = f"Use one that `{command_text('bench')} flags` shows"
            raise ConfigError(f"--compiler-options {option}", refusal, remedy)
        found[name] = value
    return found


def require_room(program: Program, devices: Devices) -> None:
    """Raises: ConfigError where the state alone is more than this machine's devices, or its host, can hold."""
    held = local_bytes(program.abstract_state())
    if devices.platform == "cpu":
        mine = sum(device.process_index == jax.process_index() for device in devices.devices)
        need, room = held * mine, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = f"the host's memory, for {mine} simulated devices"
    else:
        need, room = held, (devices.devices[0].memory_stats() or {}).get("bytes_limit", math.inf)
        where = "one device"
    if need > room:
        raise ConfigError(
            f"a state of {need / 2**30:,.1f} GiB in {where}",
            f"it has {room / 2**30:,.1f} GiB",
            f"Use a smaller model, or ask `{command_text('plan')}` which layout and hardware hold it",
        )


def is_done(flags: TrainFlags, config: RunConfig, out: Path, console: Console, warn: Callable[[str], None]) -> bool:
    """Whether --out holds this run complete, as the first process finds it; with --fresh the folder is emptied.

    Raises: ConfigError where the folder holds another run, or must not be touched.
    """
    done = False
    if processes.is_first():
        if flags.fresh:
            resume.clear(out, flags.overwrite)
        if holds_run(out):
            resume.require_own_folder(out, config, warn)
            done = is_complete(out)
    done = processes.from_first("done", "yes" if done else "") == "yes"
    if done:
        console.print(f"the run in {out} is complete: nothing is left to do", markup=False)
    return done


def write_settings(out: Path, flags: TrainFlags, config: RunConfig) -> None:
    """Leave every setting of the run where --config reads it."""
    try:
        write_whole(out / config_file.NAME, config_file.settings_text("train", flags, config).encode())
    except OSError as error:
        raise ConfigError(f"--out {out}", f"it cannot be written ({error.strerror})", "Name another folder") from error


def stacks_file(out: Path | None) -> str | None:
    """Where a stuck process writes its stacks, beside stderr."""
    return None if out is None else str(out / f"stacks.{jax.process_index()}.txt")


def job_budget(flags: TrainFlags, config: RunConfig, console: Console, now) -> JobBudget | nullcontext:
    """The run's share of a budget, reserved; a context with nothing in it where no budget is asked for."""
    asked_for = is_asked_for(flags.budget, flags.price_per_hour, flags.max_hours, flags.spend_log)
    if not asked_for or not processes.is_first():
        return nullcontext()
    return begin_job(
        config.parallel.mesh.num_devices,
        flags.price_per_hour,
        flags.max_hours,
        flags.budget,
        flags.spend_log,
        note="train",
        signals=(),
        say=lambda text: console.print(text, soft_wrap=True),
        now=now,
    )


def train(run: Run, start: resume.Start, find_start: Callable[[], resume.Start]) -> tuple[resume.Progress, float]:
    """All steps from `start` on; returns the final progress and held-out loss. Raises: Stopped, once all is saved."""
    if start.progress.first_loss is None:
        run.watchdog.alive("evaluating")
        with SlowWork("compiling and running the evaluation", quiet=run.console.quiet):
            loss = evaluate(run.program, start.state, run.held_out)
        start = replace(start, progress=replace(start.progress, first_loss=loss))
        run.console.print(f"step {start.step:>5}  held-out loss {loss:.4f}")
    while True:
        try:
            return train_from(run, start)
        except RollBack as back:
            start = go_back(run, start, back, find_start)


def go_back(run: Run, start: resume.Start, back: RollBack, find_start) -> resume.Start:
    """The newest checkpoint, with the batches since then left out. Raises: Stopped where that was done too often."""
    run.checkpoints.wait()
    again, before = find_start(), start.progress
    count = max(before.roll_backs, again.progress.roll_backs) + 1
    if count > MAX_ROLL_BACKS:
        raise Stopped(again.step, f"{back.reason}; rolled back {MAX_ROLL_BACKS} times already", 1)
    skipped = back.next_batch - again.progress.batch
    run.console.print(
        f"[bold red]rolled back[/] to step {again.step}: {escape(back.reason)}; {skipped} batches are left out",
        soft_wrap=True,
    )
    run.files.go_back(again.step)
    progress = replace(
        again.progress,
        batch=back.next_batch,
        num_skipped=again.progress.num_skipped + skipped,
        roll_backs=count,
        first_loss=before.first_loss,
    )
    return replace(again, progress=progress)


def train_from(run: Run, start: resume.Start) -> tuple[resume.Progress, float]:
    """Every step after `start`. Raises: Stopped, RollBack."""
    flags, config, console, program = run.flags, run.program.config, run.console, run.program
    state, progress = start.state, start.progress
    agreement, pace = Agreement(), Pace(console)
    check_replicas = make_replica_check(program)
    spikes = SpikeWatch(recent=progress.recent)
    skips_in_a_row, held_out_loss = 0, math.nan
    live, every = console.is_terminal, max(1, config.steps // 20)

    digests: dict[int, str] = {}

    def require_equal_copies(done: int, state: State) -> None:
        if culprits := check_replicas(state):
            fault = f"after step {done} copies differ that should be equal: {'; '.join(map(str, culprits))}"
            raise Stopped(done, fault, 1, newest(run))

    def make(index: int):
        batch = run.batches[index]
        if flags.record_digests:
            digests[index] = batch.digest()
        return program.put(batch if run.drill is None else run.drill.spoil_batch(index, batch))

    last_batch = progress.batch + config.steps - start.step
    inputs = Prefetched(make, progress.batch, last_batch, flags.prefetch)
    with inputs, _progress(console, disable=not live) as bar:
        task = bar.add_task("train", total=config.steps, completed=start.step, line="")
        for index in range(start.step, config.steps):
            # ---- must this step not start? ----
            run.watchdog.alive(f"taking step {index + 1}")
            if stop := agreement.stop_reason(index, run.stop_reason()):
                reason, code = stop
                if run.checkpoints is not None:
                    require_equal_copies(index, state)
                raise Stopped(index, reason, *last_save(run, state, progress, code))

            # ---- the step ----
            if run.drill is not None:
                state = state._replace(params=run.drill.flip(index + 1, program.mesh, state.params))
            begun = time.perf_counter()
            pace.starts()
            if run.drill is not None:
                run.drill.before(index + 1)
            batch = next(inputs)
            pace.dispatches()
            state, metrics = run.step(state, batch)
            flags_of_ranks = metrics.pop("not_finite")
            metrics = jax.device_get(metrics)  # waits for the step
            record = step_record(index + 1, metrics, time.perf_counter() - begun, inputs.waited)
            record["batch"] = progress.batch
            if flags.record_digests:
                record["digest"] = digests.pop(progress.batch)
            done, last = index + 1, index + 1 == config.steps
            evaluates = done % flags.eval_every == 0 or last
            if evaluates and (flags.on_nonfinite == "skip" or not is_fault(record)):  # otherwise the run ends here
                run.watchdog.alive("evaluating")
                record["held_out_loss"] = held_out_loss = evaluate(program, state, run.held_out)
            if not run.files.write_step(record):
                reason = escape(str(run.files.failure))
                console.print(f"[bold red]not written:[/] the metrics of step {done} ({reason})")
            progress = replace(progress, tokens=progress.tokens + record["tokens"], batch=progress.batch + 1)
            line = describe(record)
            bar.update(task, advance=1, line=line)
            if done % every == 0:
                console.print(f"step {done:>5}  {line}")
            if "held_out_loss" in record:
                console.print(f"step {done:>5}  held-out loss {held_out_loss:.4f}")
            pace.report(index + 1)

            # ---- is it sound? ----
            if is_fault(record):
                culprits = name_culprits(program, gather_ranks("not finite", flags_of_ranks))
                where = "; ".join(map(str, culprits)) or "in no single rank's part, only in their sum"
                fault = f"step {index + 1} is not finite (batch {record['batch']}): {where}"
                skips_in_a_row += 1
                if flags.on_nonfinite == "roll-back":
                    raise RollBack(fault, progress.batch)
                if flags.on_nonfinite == "stop" or skips_in_a_row > MAX_SKIPS_IN_A_ROW:
                    raise Stopped(index, f"{fault}. Parameters are as before it. {ADVICE}", 1, newest(run))
                progress = replace(progress, num_skipped=progress.num_skipped + 1)
                console.print(f"[bold red]skipped[/] {escape(fault)}", soft_wrap=True)
            else:
                skips_in_a_row = 0
                if flags.on_spike != "ignore" and spikes.is_spike(record["loss"]):
                    fault = f"the loss jumped to {record['loss']:.4f} in step {index + 1} (batch {record['batch']})"
                    if flags.on_spike == "roll-back":
                        raise RollBack(fault, progress.batch)
                    raise Stopped(index + 1, fault, 1, newest(run))
                progress = replace(progress, recent=spikes.recent if flags.on_spike != "ignore" else [])

            # ---- replicas, checkpoint ----
            due = run.checkpoints is not None and (
                last or (flags.checkpoint_every and done % flags.checkpoint_every == 0)
            )
            compare = due or (flags.check_replicas_every and done % flags.check_replicas_every == 0)
            if compare:
                require_equal_copies(done, state)
            if due:
                run.watchdog.alive("saving")
                try:
                    run.save(state, progress)
                except SaveFailed as error:
                    if last or jax.process_count() > 1:
                        raise Stopped(done, str(error), EXIT_SAVE, newest(run)) from error
                    run.not_saved(error)
    if start.step == config.steps:  # killed between the last checkpoint and the summary
        held_out_loss = evaluate(program, state, run.held_out)
    if run.checkpoints is not None:
        run.watchdog.alive("writing the last checkpoint")
        try:
            run.checkpoints.finish()
        except SaveFailed as error:
            raise Stopped(config.steps, str(error), EXIT_SAVE, newest(run)) from error
    return progress, held_out_loss


ADVICE = "Try a lower --lr, --dtype float32, or --on-nonfinite skip"


def last_save(run: Run, state: State, progress: resume.Progress, code: int) -> tuple[int, str]:
    """Save where the run stops, and wait for it: (exit code, what was saved)."""
    if run.checkpoints is None:
        return code, "no checkpoint was made: there is no --out"
    run.watchdog.alive("writing the last checkpoint")
    try:
        run.save(state, progress)
        run.checkpoints.finish()
    except SaveFailed as error:
        return EXIT_SAVE, f"{error}; {newest(run)}"
    return code, f"{newest(run)}; the same command continues"


def newest(run: Run) -> str:
    """What can be continued from, for a person."""
    if run.checkpoints is None:
        return ""
    try:
        run.checkpoints.wait()
    except SaveFailed as error:
        run.not_saved(error)
    steps = run.checkpoints.steps()
    return f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint was made"


def is_fault(record: dict) -> bool:
    """Whether the step's numbers are not finite. An overflow that a lower loss scale (fp16) will mend is none."""
    if not math.isfinite(record["loss"]):
        return True
    return not math.isfinite(record["grad_norm"]) and record.get("loss_scale", 1) <= 1


def evaluate(program: Program, state: State, held_out: list[GlobalBatch]) -> float:
    """Mean held-out loss, nats per token."""
    sums = [program.evaluate(state.params, program.put(batch)) for batch in held_out]
    return float(sum(float(total) for total, _ in sums) / sum(float(count) for _, count in sums))


def step_record(step: int, metrics: dict, seconds: float, input_seconds: float) -> dict:
    """One line of metrics.jsonl. `tokens` counts this step's targets; of `seconds` the input was waited for a part."""
    tokens = int(metrics["tokens"])
    record = {
        "step": step,
        "loss": float(metrics["loss"]),
        "grad_norm": float(metrics["grad_norm"]),
        "lr": float(metrics["lr"]),
        "tokens": tokens,
        "step_seconds": seconds,
        "input_seconds": input_seconds,
        "tokens_per_second": tokens / seconds,
    }
    return record if "loss_scale" not in metrics else {**record, "loss_scale": float(metrics["loss_scale"])}


def describe(record: dict) -> str:
    return (
        f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}"
    )


def _progress(console: Console, disable: bool) -> Progress:
    columns = (MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.fields[line]}"), TimeRemainingColumn())
    return Progress(*columns, console=console, disable=disable)


def print_resolved(console: Console, program: Program, devices: Devices, corpus: Corpus, entropy: float) -> None:
    """The mesh, the layout of every parameter, the bytes of a device and whether it is simulated."""
    config, parallel = program.config, program.config.parallel
    model, state = config.model, program.abstract_state()
    leaves = jax.tree.leaves(program.layout.leaves)
    num_parameters = sum(int(np.prod(leaf.shape)) for leaf in leaves)

    facts = Table.grid(padding=(0, 2))
    facts.add_row("[bold]mesh[/]", f"{parallel.mesh}")
    facts.add_row("[bold]devices[/]", devices.description)
    facts.add_row(
        "[bold]model[/]",
        f"{num_parameters:,} parameters: {escape(model.describe())}",
    )
    facts.add_row(
        "[bold]strategy[/]",
        f"ZeRO {parallel.zero}, sequence parallel {'on' if parallel.sp else 'off'}, gradients {parallel.grad_sync}, "
        f"{parallel.accumulate} micro-batch{'es' * (parallel.accumulate > 1)}, remat {parallel.remat}",
    )
    if (schedule := parallel.pipeline) is not None:
        facts.add_row(
            "[bold]pipeline[/]",
            f"{schedule.name}, {schedule.num_microbatches} micro-batches over {schedule.num_stages} stages, layers "
            f"{'+'.join(map(str, config.part_layers))}: {schedule.num_ticks} ticks, idle "
            f"{simulate(schedule).idle_share:.1%} (simulated, even ticks), in flight {max(in_flight(schedule))}",
        )
    facts.add_row("[bold]precision[/]", f"{config.precision.dtype}, reductions in {config.precision.reduction_dtype}")
    facts.add_row(
        "[bold]data[/]", f"{escape(corpus.about)}: {corpus.num_train:,} + {corpus.num_held_out:,} held-out tokens"
    )
    facts.add_row("", f"unigram entropy {entropy:.3f} nats/token (a model that ignores context gets no lower)")
    master = 0 if state.master is None else local_bytes(state.master)
    facts.add_row(
        "[bold]state[/]",
        f"{_mib(local_bytes(state))} a device: parameters {_mib(local_bytes(state.params))}, masters {_mib(master)}, "
        f"moments {_mib(local_bytes(state.moments))}",
    )
    console.print(facts)

    table = Rows("parameter", "computed with", "stored as")
    for leaf in leaves:
        computed = layout_text(leaf.shape, leaf.compute_spec)
        table.add_row(leaf.name, computed, layout_text(leaf.storage_shape, leaf.storage_spec))
    table.print(console, left=("computed with", "stored as"))
    for note in config.warnings():
        console.print(f"[yellow]note:[/] {escape(in_flags(note, TrainFlags))}")


def layout_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """A global shape with the mesh axes of each dim: [4, 128, 512_tp]."""
    dims = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    return "[" + ", ".join("_".join([str(n), *axes]) for n, axes in zip(shape, dims, strict=True)) + "]"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"


if __name__ == "__main__":
    run_program(TrainFlags, main, "train")
