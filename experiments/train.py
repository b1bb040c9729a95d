"""Train a GPT on any mesh: data, tensor and pipeline parallel; on one process or many.

python -m experiments.train --mesh dp=2,tp=2

With --out the run is kept in a folder, and the same command continues it after whatever ended it.
"""

import json
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal, TypeVar

import jax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Column, Table

from jaxdist.checkpoint import resume
from jaxdist.checkpoint.checkpoints import Checkpoints, Manifest, SaveFailed
from jaxdist.checkpoint.trained import (
    SOURCE,
    Weights,
    companions_of,
    compare_tokens,
    find_weights,
    require_same_tokens,
)
from jaxdist.checkpoint.weights import copy_companions
from jaxdist.commands import command_text
from jaxdist.config import OptimizerConfig, RunConfig, to_dict
from jaxdist.data.batches import EVAL_WINDOWS, Batches, Corpus, GlobalBatch, held_out_batches, load_corpus
from jaxdist.data.prefetch import Prefetched
from jaxdist.data.tokens import TokenDtype
from jaxdist.errors import ConfigError, is_utf8, printable, reason_of, require_positive
from jaxdist.files import write_whole
from jaxdist.layout import local_bytes
from jaxdist.mesh import make_mesh
from jaxdist.models.base import Model, declare, named_params
from jaxdist.models.lora import LoRA
from jaxdist.models.registry import is_path
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.plan.utilisation import utilisation_of
from jaxdist.plan.verdict import verdict_of
from jaxdist.runtime import expert_load, exporters, gpus, processes, profile
from jaxdist.runtime.budget import JobBudget, begin_job, find_ceiling, find_log, is_asked_for
from jaxdist.runtime.devices import Devices, acquire_devices, refused_option
from jaxdist.runtime.fault_injection import Fault, parse_fault
from jaxdist.runtime.health import SpikeWatch, gather_ranks, make_replica_check, name_culprits
from jaxdist.runtime.metrics import (
    RunFiles,
    StepLines,
    holds_run,
    is_complete,
    process_lines,
    require_writable_folder,
)
from jaxdist.runtime.run_folder import Hold, held, require_shared
from jaxdist.runtime.signals import Signals
from jaxdist.runtime.stragglers import StragglerWatch
from jaxdist.runtime.telemetry import DeviceMemory, MeanLap, Stopwatch, device_memory
from jaxdist.runtime.watchdog import Agreement, Watchdog
from jaxdist.train.program import Program, State, build_program, compiled_bytes
from jaxdist.versions import __version__, versions

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
from .panel import RunPanel
from .progress import Progress as SlowWork
from .tables import Rows

T = TypeVar("T")
MAX_ROLL_BACKS = 5
MAX_SKIPS_IN_A_ROW = 10


@dataclass(frozen=True)
class TrainFlags(CommonFlags, FileFlags, ProcessFlags):
    """Train a GPT on real text, on one device or any mesh."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *CommonFlags.LAYOUT,
        *("model", "config", "data", "weights", "out", "batch_size", "steps", "lr", "lr_schedule", "dtype"),
        *("checkpoint_every", "eval_every", "device", "distributed"),
    )
    GROUPS: ClassVar[dict[str, str]] = {
        "data": "data",
        "out": "folder",
        "grace": "faults",
        "compiler_options": "compiler",
        "eval_every": "evaluation",
        "profile": "metrics",
        "budget": "budget",
    }
    NOT_KEPT: ClassVar[frozenset[str]] = frozenset(
        {
            "config",
            "out",
            "profile",
            "fresh",
            "overwrite",
            "fall_back",
            "drill",
            *(field.name for field in fields(ProcessFlags)),
        }
    )

    data: str | None = None
    """Text file or folder, .npy / .bin tokens, what `prepare` made, or a mixture as in a.bin=0.7,b.npy=0.3.

    Default: the source of Python's standard library."""
    lr: float | None = None
    """Learning rate at the end of the warm-up, the highest. Default: 0.003 for a new model; --weights need one."""
    token_dtype: TokenDtype | None = None
    """Numbers in a .bin, where they are not plainly uint16."""
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
    weights: str | None = None
    """Start at step 0 from these parameters: a folder of transformers, a run, or what `convert` made."""
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
    profile: str | None = None
    """START:END: trace these steps into OUT/profile, for Perfetto and XProf, and say what communication was exposed."""
    metrics_port: int | None = None
    """Serve this process's numbers to Prometheus at http://HOST:PORT/metrics; process I listens on PORT + I."""
    metrics_host: str = exporters.LOOPBACK
    """The address to listen on; 0.0.0.0 lets whoever reaches this machine read."""
    tensorboard: bool = False
    """Write TensorBoard's event files to OUT/tensorboard."""
    wandb: str | None = None
    """A project of Weights & Biases: write an offline run to OUT/wandb (`wandb sync` sends it)."""
    compiler_options: tuple[str, ...] = ()
    """Options of XLA for the step, as in xla_gpu_enable_latency_hiding_scheduler=true. `bench flags` tells
    which this jaxlib takes and what each gains. They may change the last bits of results."""
    eval_every: int = 50
    """Steps between held-out evaluations."""
    eval_windows: int = EVAL_WINDOWS
    """Held-out windows that an evaluation looks at, spread evenly over the held-out tokens."""
    budget: str | None = None
    """Dollars that all jobs in the spend log may cost together. Default: JAXDIST_BUDGET, else the log's ceiling."""
    price_per_hour: str | None = None
    """Dollars for one device, an hour. Turns the budget guard on, as every flag and variable here does."""
    max_hours: str | None = None
    """Longest time for this run, reserved before it starts. Default: as long as the rest of the budget pays for."""
    spend_log: str | None = None
    """Default: JAXDIST_SPEND_LOG, else spend.jsonl. `budget init` makes one."""

    def run_config(self) -> RunConfig:
        """The default rate is one for small models that begin from nothing, and ruins a trained one."""
        if self.lr is None and self.weights is not None:
            raise ConfigError(
                "--weights without --lr",
                f"trained weights must be given a rate of their own; the default, {OptimizerConfig.lr}, is for a small "
                "new model",
                f"Use --lr {published_rate(self.model_config())}, as published for models of this size",
            )
        if self.lr is None:
            return replace(self, lr=OptimizerConfig.lr).run_config()
        return super().run_config()

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
        require_positive("eval_windows", self.eval_windows, 10**8)
        if self.metrics_port is not None:
            require_positive("metrics_port", self.metrics_port, 65_535)
        elif self.metrics_host != TrainFlags.metrics_host:
            raise ConfigError("--metrics-host without --metrics-port", "nothing listens", "Add --metrics-port 9100")
        for asked, package, flag in (
            (self.metrics_port is not None, "prometheus_client", "--metrics-port"),
            (self.tensorboard, "tensorboardX", "--tensorboard"),
            (self.wandb is not None, "wandb", "--wandb"),
        ):
            if asked:
                exporters.require_package(package, flag)
        require_positive("prefetch", self.prefetch, 10**4)
        for name in ("grace", "stuck_after"):
            if not 0 < getattr(self, name) < 1e9:
                flag = f"--{name.replace('_', '-')}"
                raise ConfigError(
                    f"{flag} {getattr(self, name)}", "it must be a time in seconds, above 0", f"Use {flag} 60"
                )
        if self.out is None:
            for name in (
                "keep_last",
                "keep_every",
                "fresh",
                "fall_back",
                "record_digests",
                "profile",
                "tensorboard",
                "wandb",
            ):
                if getattr(self, name) != getattr(TrainFlags, name):
                    flag = flag_word(name, getattr(self, name))
                    raise ConfigError(f"{flag} without --out", "it is about a run's folder", "Add --out runs/a")
        if self.profile is not None and profile.Window.parse(self.profile).first > (self.steps or math.inf):
            reason = f"the run ends after step {self.steps}"
            raise ConfigError(f"--profile {self.profile}", reason, "Name steps that it takes")
        if self.out is not None and not self.out:
            raise ConfigError("--out ''", "it names no folder", "Name one")
        if self.weights is not None and self.restore is not None:
            reason = "the first starts a schedule anew, and the second goes on with one"
            raise ConfigError("--weights with --restore", reason, "Give one of them")
        for name in ("out", "restore", "weights"):
            if not is_utf8(getattr(self, name) or ""):
                asked = f"--{name} {getattr(self, name)!r}"
                raise ConfigError(asked, "its name must be UTF-8, as TensorStore requires", "Choose another folder")
        if self.checkpoint_every is not None and self.out is None:
            raise ConfigError(
                "--checkpoint-every without --out", "there must be a folder for checkpoints", "Add --out runs/a"
            )
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
    while_compiling: bool = False


@dataclass(eq=False)
class RollBack(Exception):
    """Go back to the newest checkpoint and on from batch `next_batch`."""

    reason: str
    next_batch: int


@dataclass(eq=False)
class Job:
    """The job, checked before anything is traced."""

    flags: TrainFlags
    console: Console
    config: RunConfig
    devices: Devices
    options: dict[str, str | bool]
    out: Path | None
    corpus: Corpus
    batches: Batches
    held_out: list[GlobalBatch]
    fault: Fault | None
    program: Program
    data: dict
    hold: Hold | None  # of the folder, by the first process

    @property
    def compiled(self) -> dict:
        """What config.json has of how the step is compiled, beside the configuration."""
        return {"compiler_options": self.options, "attention": self.program.model.ctx.attention}

    def warn(self, text: str) -> None:
        self.console.print(f"[yellow]warning:[/] {escape(in_flags(text, TrainFlags))}", soft_wrap=True)

    def note(self, text: str) -> None:
        self.console.print(f"[yellow]note:[/] {escape(in_flags(text, TrainFlags))}", soft_wrap=True)

    def note_if(self, text: str) -> None:
        if text:
            self.note(text)

    @property
    def data_flag(self) -> str:
        """The data as it was asked for."""
        return "no data given" if self.flags.data is None else f"data={self.flags.data!r}"

    @property
    def own_folder(self) -> Path | None:
        """Where this process writes the run's files: the first alone does."""
        return self.out if processes.is_first() else None


@dataclass(eq=False)
class Run(Job):
    """The job with all it holds while it runs.

    other, weights: the checkpoint of another run, or the parameters alone, that it begins from. source: the files that
    its parameters came from, as checkpoints remember them. lines: of this process, where the run has a folder.
    """

    entropy: float
    checkpoints: Checkpoints | None
    other: tuple[Checkpoints, Manifest] | None
    weights: Weights | None
    source: dict | None
    files: RunFiles
    lines: StepLines | None
    signals: Signals
    watchdog: Watchdog
    budget: JobBudget | None
    step: Callable = field(init=False)  # compiled only once all of the above is taken and said
    planned: int | None = field(init=False)  # bytes of a device at the peak, where the compiler says

    @property
    def window(self) -> profile.Window | None:
        """The steps to profile."""
        return None if self.flags.profile is None else profile.Window.parse(self.flags.profile)

    def find_checkpoint(self) -> Manifest | None:
        """The run's own newest."""
        return resume.find(self.checkpoints, self.config, self.data, self.flags.fall_back, self.warn)

    def start_from(self, manifest: Manifest | None) -> resume.Start:
        if manifest is not None:
            return resume.restore(self.checkpoints, manifest, self.program, same_run=True)
        if self.other is not None:
            return resume.restore(*self.other, self.program, same_run=False)
        return resume.begin(self.program, self.weights)

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
        with nullcontext() if self.fault is None else self.fault.no_room(int(state.step)):
            resume.save(self.checkpoints, self.program, state, self.data, progress, self.source)
            if self.fault is not None:
                self.checkpoints.wait()

    def not_saved(self, error: SaveFailed) -> None:
        self.console.print(f"[bold red]not saved:[/] {escape(str(error))}", soft_wrap=True)

    @property
    def is_lost(self) -> bool:
        """Whether the run's folder is no longer the one that it began in."""
        return self.hold is not None and self.hold.is_lost()

    def stop_reason(self) -> tuple[str, int] | None:
        """Why this process wants to stop before the next step, and the exit code for it."""
        used_up = self.budget.stop_reason() if self.budget else None
        if self.signals.number is not None:
            return self.signals.reason, EXIT_SIGNAL + self.signals.number
        if self.is_lost:
            return f"{self.out} was removed while the run used it", EXIT_SAVE
        return (used_up, EXIT_BUDGET) if used_up else None


def main(flags: TrainFlags, console: Console, now: Callable[[], float] = time.monotonic) -> int:
    """Args: `now` is the clock of the budget."""
    job = check_job(flags, console)
    with ExitStack() as stack:
        if take_folder(job, stack):
            console.print(f"the run in {job.out} is complete: nothing is left to do", markup=False)
            say_unread(job)
            return 0
        if flags.metrics_port is not None:
            exporters.require_free(flags.metrics_port, flags.metrics_host)
        run, own = open_run(job, stack, now)
        print_resolved(console, run.program, run.devices, run.corpus, run.entropy)
        if run.out is None:
            console.print("[yellow]note:[/] without --out nothing of this run is kept: no checkpoint, no metrics")
        try:
            start = compile_and_start(run, own)
            progress, last = train(run, start)
        except Stopped as stopped:
            code = report_stopped(run, stopped)
            if stopped.while_compiling:  # XLA's thread would not survive Python's own end
                stack.close()
                sys.stdout.flush()
                processes.leave(code)
            return code
        except jax.errors.JaxRuntimeError as error:
            if jax.process_count() == 1:
                raise
            text = f"process {jax.process_index()}: another process is gone ({reason_of(error)})"
            print(printable(text), file=sys.stderr, flush=True)
            sys.stderr.flush()
            processes.leave(EXIT_PEER)
        return report_done(run, progress, last)


# ---------------------------------------------------------------------------------------------------------------------
# Before the first step
# ---------------------------------------------------------------------------------------------------------------------


def check_job(flags: TrainFlags, console: Console) -> Job:
    """Everything that can be wrong, checked on all processes together. Raises: ConfigError."""
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
    corpus = load_corpus(flags.data, config.model.vocab_size, flags.token_dtype)
    sizes = corpus, config.batch_size, config.model.seq_len
    batches = Batches(*sizes, config.seed, config.mask_documents)
    held_out = held_out_batches(*sizes, flags.eval_windows, config.mask_documents)
    fault = parse_fault(flags.drill, config.parallel.mesh.num_devices, config.steps)
    poison = fault.poison() if fault else None
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices), poison=poison)
    attention = {"--attention, as it compiles": program.model.ctx.attention}
    processes.require_agreement("attention", attention, seconds=600)
    require_room(program, devices)
    tokens = corpus.tokens_of
    data = {"source": corpus.about, "fingerprint": corpus.fingerprint()}
    data |= {"tokenizer": tokens.tokenizer, "end_of_document": tokens.end_of_document}
    data |= {"begin_of_text": None if tokens.begin_of_text is None else list(tokens.begin_of_text)}
    shown = f"{corpus.about} (SHA-256 {data['fingerprint'][:12]}...)"
    processes.require_agreement("data", {"--data": processes.Shown(data["fingerprint"], shown)}, seconds=600)
    return Job(flags, console, config, devices, options, out, corpus, batches, held_out, fault, program, data, None)


def take_folder(job: Job, stack: ExitStack) -> bool:
    """Lock --out for as long as `stack` lasts: whether it holds this run complete. With --fresh it is emptied.

    Raises: ConfigError where another process holds the folder, it holds another run, or must not be touched.
    """
    if job.out is None:
        return False
    done = False
    if processes.is_first():
        job.hold = stack.enter_context(held(job.out, "out", job.warn))
    require_shared(job.out, "out")
    if processes.is_first():
        if job.flags.fresh:
            resume.clear(job.out, job.flags.overwrite)
        if holds_run(job.out):
            resume.require_own_folder(job.out, job.config, job.compiled, job.warn)
            done = is_complete(job.out)
    return processes.from_first("done", "yes" if done else "") == "yes"


def say_unread(job: Job) -> None:
    """Where a run goes on from its own checkpoint, what it would otherwise have begun from is not looked at."""
    for name in ("restore", "weights"):
        if (given := getattr(job.flags, name)) is not None:
            job.note(f"--{name} {shlex.quote(given)} is not read: {job.out} already holds this run")


def open_run(job: Job, stack: ExitStack, now: Callable[[], float]) -> tuple[Run, Manifest | None]:
    """All that the run holds until `stack` ends, and the run's own newest checkpoint."""
    flags, config, out = job.flags, job.config, job.out
    checkpoints = own = other = weights = source = None
    if out is not None:
        checkpoints = Checkpoints(out / resume.FOLDER, flags.keep_last, flags.keep_every, warn=job.warn)
        own = resume.find(checkpoints, config, job.data, flags.fall_back, job.warn)
    if own is not None:
        say_unread(job)
    if own is None and flags.restore is not None:
        other = resume.find_other(flags.restore, config)
        note = require_same_tokens(job.data_flag, companions_of(other[0]), other[1].table("data"), job.corpus.tokens_of)
        job.note_if(note)
        job.note_if(resume.rate_note(other[1], config))
    elif own is None and flags.weights is not None:
        weights = find_weights(flags.weights, "weights", config.model, config.seed)
        job.note_if(require_same_tokens(job.data_flag, weights.companions, weights.data, job.corpus.tokens_of))
        if weights.dtype != config.precision.dtype:
            theirs = f"dtype={weights.dtype} trains in theirs"
            job.note(f"the weights are {weights.dtype}, and the run's are {config.precision.dtype}; {theirs}")
    elif own is None and is_path(flags.model):
        found = compare_tokens(Path(flags.model), {}, job.corpus.tokens_of)
        job.note_if(found.about if found.same is False else "")
    if own or other:
        source = (own or other[1]).about.get(SOURCE)
    elif weights:
        source = weights.source

    def late() -> None:
        steps = checkpoints.steps() if checkpoints else []
        text = f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint was made"
        print(f"not done within --grace {flags.grace:g} s: {text}", file=sys.stderr, flush=True)

    def heard(name: str) -> None:
        text = f"{name}: stopping once what is under way is done" + ("; the run is saved first" if checkpoints else "")
        print(text, file=sys.stderr, flush=True)

    signals = stack.enter_context(Signals(grace=flags.grace, late=late, heard=heard))
    job.console.when_broken = partial(signals.ask, signal.SIGPIPE)
    watchdog = stack.enter_context(Watchdog(flags.stuck_after, stacks_file(out)))
    budget = stack.enter_context(job_budget(job, now))
    about = {"data": job.corpus.about, "devices": job.devices.description, **job.compiled}
    about |= {"simulated": job.devices.simulated, "versions": versions()}
    about |= {} if flags.weights is None else {"weights": flags.weights}
    files = stack.enter_context(RunFiles(job.own_folder, config, about, own.step if own else 0, job.warn))
    lines = None if out is None else process_lines(out, own.step if own else 0, job.warn)
    if lines:
        stack.callback(lines.close)
    if job.own_folder is not None:
        write_settings(job.own_folder, flags, config)
        if weights:
            copy_companions(weights.companions, job.own_folder)
        if (tokenizer := job.corpus.tokens_of.tokenizer_file) is not None:  # what the run generates is read with it
            write_whole(job.own_folder / tokenizer.name, tokenizer.read_bytes())
    entropy = job.corpus.unigram_entropy()
    held = entropy, checkpoints, other, weights, source, files, lines, signals, watchdog, budget
    return Run(*vars(job).values(), *held), own


def compile_and_start(run: Run, own: Manifest | None) -> resume.Start:
    """Compile the step; restore the state or make it; say how long both took."""
    console = run.console
    begun = time.perf_counter()
    run.watchdog.alive("compiling the step")
    with SlowWork("compiling the step", quiet=console.quiet):
        run.step = interruptible(run, own.step if own else 0, lambda: run.program.compile_step(run.options))
    compiled = time.perf_counter()
    run.watchdog.alive("making the state")
    with SlowWork("making the state" if own is None else "restoring the state", quiet=console.quiet):
        start = run.start_from(own)
    planned = compiled_bytes(run.step)
    run.planned = None if planned is None else planned.peak
    if planned is not None:
        run.files.add_to_config({"compiled": planned._asdict()})
    note = "" if planned is None else f"; the compiler plans {_mib(planned.peak)} a device at the peak"
    console.print(
        f"compiled in {compiled - begun:.1f} s, {'initialised' if not start.step else 'restored'} in "
        f"{time.perf_counter() - compiled:.1f} s{note}"
    )
    if run.weights and not start.step:
        console.print(f"[bold]started from[/] {escape(start.about)}", soft_wrap=True)
    if start.step:
        verb = "resumed after" if own else "restored from"
        console.print(f"[bold]{verb}[/] {escape(start.about)}; batch {start.progress.batch} is next", soft_wrap=True)
    console.print()
    return start


def interruptible(run: Run, step: int, work: Callable[[], T]) -> T:
    """`work` before the first step, in a thread where this process is alone: a signal ends the run without waiting for
    a compiler. Raises: Stopped, where nothing since `step` is lost."""
    if processes.count() > 1:
        return work()
    done: Future[T] = Future()

    def to_end() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    threading.Thread(target=to_end, daemon=True).start()
    while True:
        try:
            return done.result(timeout=0.1)
        except TimeoutError:
            if done.done():
                raise
            if run.signals.number is not None:
                reason, code = run.stop_reason()
                raise Stopped(step, reason, code, newest(run), while_compiling=True) from None


def report_stopped(run: Run, stopped: Stopped) -> int:
    """Say and write why the run ended early; returns the exit code."""
    steps = run.config.steps
    run.console.print(
        f"\n[bold red]stopped[/] after {stopped.steps} of {steps} steps: {escape(stopped.reason)}; "
        f"{stopped.saved or 'no checkpoint was made'}",
        soft_wrap=True,
    )
    run.files.write_stopped({"steps": stopped.steps, "of": steps, "reason": stopped.reason})
    if stopped.code == EXIT_SAVE and jax.process_count() > 1:  # which the others may not know
        processes.fail(EXIT_SAVE, EXIT_SAVE, stopped.reason)
    return stopped.code


def report_done(run: Run, progress: resume.Progress, last: float) -> int:
    """Say and write what the whole run came to; returns the exit code."""
    console, steps = run.console, run.config.steps
    console.print(
        f"\n[bold]done[/]: {steps} steps, held-out loss {last:.4f} nats/token "
        f"(started at {progress.first_loss:.4f}; unigram entropy of the corpus {run.entropy:.4f})"
    )
    epochs = run.batches.epochs(progress.batch)
    for source, passes in zip(run.corpus.sources, epochs, strict=True):
        console.print(f"{passes:.3g} epochs of {escape(source.about)}")
    complete = run.files.write_summary(
        {
            "steps": steps,
            "tokens": progress.tokens,
            "held_out_loss": last,
            "first_held_out_loss": progress.first_loss,
            "unigram_entropy": run.entropy,
            "epochs": epochs,
        }
    )
    if run.budget:
        console.print(f"cost {run.budget.report()}")
    if run.is_lost:
        console.print(f"[bold red]lost:[/] {escape(str(run.out))} was removed while the run used it", soft_wrap=True)
        return EXIT_SAVE
    if not complete:
        console.print(f"[bold red]not written:[/] summary.json ({escape(str(run.files.failure))})")
    return 0 if complete else EXIT_SAVE


def published_rate(model: Model) -> float:
    """The rate at which models of this size were fine-tuned: whole, 2e-5 up to 8B (Alpaca, Llama 2) and 1e-5 above
    (Alpaca 13B); their adapters, 2e-4 up to 13B and 1e-4 above (QLoRA, arXiv 2305.14314, appendix B)."""
    num = sum(math.prod(param.shape) for _, param in named_params(declare(model)))
    if isinstance(model, LoRA):
        return 2e-4 if num < 20e9 else 1e-4
    return 2e-5 if num < 10e9 else 1e-5


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


def write_settings(out: Path, flags: TrainFlags, config: RunConfig) -> None:
    """Leave every setting of the run where --config reads it."""
    try:
        write_whole(out / config_file.NAME, config_file.settings_text("train", flags, config).encode())
    except OSError as error:
        raise ConfigError(f"--out {out}", f"it cannot be written ({error.strerror})", "Name another folder") from error


def stacks_file(out: Path | None) -> str | None:
    """Where a stuck process writes its stacks, beside stderr."""
    return None if out is None else str(out / f"stacks.{jax.process_index()}.txt")


def job_budget(job: Job, now: Callable[[], float]) -> JobBudget | nullcontext:
    """The run's share of a budget, reserved; a context with nothing in it where no budget is asked for."""
    flags = job.flags
    asked_for = is_asked_for(flags.budget, flags.price_per_hour, flags.max_hours, flags.spend_log)
    if not asked_for or not processes.is_first():
        return nullcontext()
    log, ceiling, num_devices = (
        find_log(flags.spend_log),
        find_ceiling(flags.budget),
        job.config.parallel.mesh.num_devices,
    )
    budget = begin_job(log, num_devices, flags.price_per_hour, flags.max_hours, ceiling, "train", (), now)
    for line in budget.announcement:
        job.console.print(line, soft_wrap=True)
    return budget


# ---------------------------------------------------------------------------------------------------------------------
# Steps
# ---------------------------------------------------------------------------------------------------------------------


def train(run: Run, start: resume.Start) -> tuple[resume.Progress, float]:
    """All steps from `start` on; returns the final progress and held-out loss. Raises: Stopped, once all is saved."""
    stopping = run.signals.number is not None and processes.count() == 1
    if start.progress.first_loss is None and not stopping:
        run.watchdog.alive("evaluating")
        with SlowWork("compiling and running the evaluation", quiet=run.console.quiet):
            loss = interruptible(run, start.step, lambda: evaluate(run.program, start.state, run.held_out))
        if not math.isfinite(loss):
            raise Stopped(start.step, f"the held-out loss before the first step is {loss}", 1, newest(run))
        start = replace(start, progress=replace(start.progress, first_loss=loss))
        run.console.print(f"step {start.step:>5}  held-out loss {loss:.4f}")
    while True:
        try:
            return train_from(run, start)
        except RollBack as back:
            start = go_back(run, start, back)


def go_back(run: Run, start: resume.Start, back: RollBack) -> resume.Start:
    """The newest checkpoint, with the batches since then left out. Raises: Stopped where that was done too often."""
    run.checkpoints.wait()
    again, before = run.start_from(run.find_checkpoint()), start.progress
    count = max(before.roll_backs, again.progress.roll_backs) + 1
    if count > MAX_ROLL_BACKS:
        raise Stopped(again.step, f"{back.reason}; rolled back {MAX_ROLL_BACKS} times already", 1)
    skipped = back.next_batch - again.progress.batch
    run.console.print(
        f"[bold red]rolled back[/] to step {again.step}: {escape(back.reason)}; {skipped} batches are left out",
        soft_wrap=True,
    )
    run.files.go_back(again.step)
    if run.lines:
        run.lines.go_back(again.step)
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
    num_steps, loop = run.config.steps, Loop(run, start)
    with ExitStack() as stack:
        stack.enter_context(loop.inputs)
        stack.callback(loop.close)
        panel = RunPanel(f"{run.config.parallel.mesh or 'one device'}", num_steps, run.planned, run.devices.simulated)
        if run.console.is_terminal and not run.console.quiet:
            stack.enter_context(Live(panel, console=run.console, refresh_per_second=2))
        for step in range(start.step + 1, num_steps + 1):
            loop.stop_if_asked(step)
            record = loop.take_step(step)
            panel.update(record, loop.memory)
            loop.say(record)
            loop.require_sound(record)
            loop.compare_and_save(step)
    if start.step == num_steps:  # killed between the last checkpoint and the summary
        loop.held_out_loss = evaluate(run.program, loop.state, run.held_out)
        loop.require_finite_evaluation(num_steps)
    if run.checkpoints is not None:
        run.watchdog.alive("writing the last checkpoint")
        try:
            run.checkpoints.finish()
        except SaveFailed as error:
            raise Stopped(num_steps, str(error), EXIT_SAVE, newest(run)) from error
    say_verdict(run, loop)
    return loop.progress, loop.held_out_loss


def say_verdict(run: Run, loop: "Loop") -> None:
    """What the steps waited for, of all processes."""
    if not loop.laps:
        return
    found = [json.loads(text) for text in processes.from_all("mean times", json.dumps(loop.laps.mean()))]
    verdict = verdict_of(run.config, found, run.devices, run.program.model.ctx.attention)
    run.console.print(f"[bold]verdict:[/] {escape(verdict.text)}", soft_wrap=True)


def open_exporters(run: Run) -> list[exporters.Exporter]:
    """Open the exporters that the flags ask for. Raises: ConfigError."""
    flags, found = run.flags, []
    if flags.metrics_port is not None:
        info = {"mesh": str(run.config.parallel.mesh), "model": run.config.model.describe(), "version": __version__}
        info |= {"run": str(run.out or ""), "devices": run.devices.description}
        found.append(exporters.Prometheus(flags.metrics_port, flags.metrics_host, info, run.planned))
        run.console.print(f"metrics at {found[-1].address}, other processes at the next ports", markup=False)
    if flags.tensorboard and run.own_folder:
        found.append(exporters.TensorBoard(run.own_folder / "tensorboard"))
    if flags.wandb is not None and run.own_folder:
        found.append(exporters.WeightsAndBiases(run.own_folder, flags.wandb, to_dict(run.config)))
    return found


class Loop:
    """What changes from step to step, and the parts of a step in their order. Steps count from 1, as in the metrics."""

    def __init__(self, run: Run, start: resume.Start):
        self.run, self.state, self.progress = run, start.state, start.progress
        self.held_out_loss = math.nan
        self._agreement, self._stragglers = Agreement(), StragglerWatch(run.console)
        self._check_replicas = make_replica_check(run.program)
        self._spikes = SpikeWatch(recent=start.progress.recent)
        self._skips_in_a_row, self._digests = 0, {}
        self._writes = self._writes_own = True  # whether the disk took the last lines
        self._counts_experts, self._counts = bool(expert_load.counters(run.program.layout.trained)), {}
        self._watch, self.laps = Stopwatch(), MeanLap()
        self._window, self._tracing = run.window, False
        self.memory: list[DeviceMemory] = []
        self._gpus = gpus.Watch(run.devices.devices)
        self._exporters = open_exporters(run)
        self._utilisation = utilisation_of(run.config, run.devices)
        last_batch = start.progress.batch + run.config.steps - start.step
        self.inputs = Prefetched(self._make_batch, start.progress.batch, last_batch, run.flags.prefetch)

    def _make_batch(self, index: int):
        run, batch = self.run, self.run.batches[index]
        if run.flags.record_digests:
            self._digests[index] = batch.digest()
        return run.program.put(batch if run.fault is None else run.fault.spoil_batch(index, batch))

    def stop_if_asked(self, step: int) -> None:
        """Raises: Stopped before this step, with its checkpoint, where any process wants to stop."""
        run = self.run
        run.watchdog.alive(f"taking step {step}")
        if stop := self._agreement.stop_reason(step - 1, run.stop_reason()):
            reason, code = stop
            if run.checkpoints is not None:
                self._require_equal_copies(step - 1)
            raise Stopped(step - 1, reason, *last_save(run, self.state, self.progress, code))

    def take_step(self, step: int) -> dict:
        """The step, and the evaluation where one is due; what metrics.jsonl has of it, already written."""
        run, flags, injected = self.run, self.run.flags, self.run.fault
        if injected is not None:
            self.state = self.state._replace(params=injected.flip(step, run.program.mesh, self.state.params))
        begun = time.perf_counter()
        with self._watch.aside():
            self._profile_from(step)
        if injected is not None:
            injected.before(step)
        with self._watch.part("input"):
            batch = next(self.inputs)
        with self._watch.part("step"):
            self.state, metrics = run.step(self.state, batch)
            self._not_finite = metrics.pop("not_finite")
            metrics = jax.device_get(metrics)  # waits for the step
        with self._watch.aside():
            self._profile_to(step)
        record = step_record(step, metrics, time.perf_counter() - begun, self.inputs.waited)
        record["batch"] = self.progress.batch
        if self._counts_experts:
            num_tokens = run.config.batch_size * run.config.model.seq_len
            self._counts = expert_load.counted(run.program.layout, self.state.params, num_tokens)
            record |= expert_load.summary(self._counts)
        if self._utilisation is not None:
            record |= self._utilisation.of(record["step_seconds"])
        if flags.record_digests:
            record["digest"] = self._digests.pop(self.progress.batch)
        evaluates = step % flags.eval_every == 0 or step == run.config.steps
        if evaluates and (flags.on_nonfinite == "skip" or not is_fault(record)):  # otherwise the run ends here
            run.watchdog.alive("evaluating")
            with self._watch.part("evaluation"):
                record["held_out_loss"] = self.held_out_loss = evaluate(run.program, self.state, run.held_out)
        if self._counts_experts and (evaluates or self._is_said(step)):
            record["experts"] = expert_load.rounded(self._counts)
        record["grad_norms"] = dict(
            zip(run.program.layout.trained.groups, metrics["group_norms"].tolist(), strict=True)
        )
        record["seconds"] = self._watch.lap()
        self._stragglers.add(record["seconds"])
        self.laps.add(record["seconds"])
        if spread := self._stragglers.report(step):
            record["processes"] = {name: each._asdict() for name, each in spread.items()}
        self._write(record)
        written = run.files.write_step(record)
        if not written and self._writes:  # once, not in every step
            reason = escape(str(run.files.failure))
            run.console.print(f"[bold red]not written:[/] the metrics of step {step} and on ({reason})")
        elif written and not self._writes:
            run.console.print(f"the metrics are written again from step {step} on")
        self._writes = written
        if not record["tokens"]:
            run.warn(f"batch {record['batch']} of step {step} has no target: its loss of 0 says nothing")
        tokens = self.progress.tokens + record["tokens"]
        self.progress = replace(self.progress, tokens=tokens, batch=self.progress.batch + 1)
        return record

    def close(self) -> None:
        """End what goes on beside the steps, however the run ends."""
        self.end_profile()
        for exporter in self._exporters:
            with self._optional(f"{type(exporter).__name__} may lack the last numbers"):
                exporter.close()

    def _profile_from(self, step: int) -> None:
        if self._window is not None and step == self._window.first:
            with self._optional("the profile cannot be begun"):
                jax.profiler.start_trace(profile.folder_of(self.run.out), create_perfetto_trace=True)
                self._tracing = True

    def _profile_to(self, step: int) -> None:
        """End the trace after its last step, and say what it shows."""
        run, window = self.run, self._window
        if not self._tracing or step < min(window.last, run.config.steps):
            return
        if not self.end_profile():
            return
        folder = profile.folder_of(run.out)
        try:
            found = profile.summarise(folder, run.step.as_text(), run.config.parallel.mesh, run.devices.devices)
        except (ConfigError, OSError) as error:  # the run is worth more
            run.warn(f"the profile cannot be read: {reason_of(error)}")
            return
        text = profile.described(found, step - window.first + 1)
        note = " (simulated devices share cores: no speed)" if run.devices.simulated else ""
        run.console.print(
            f"[bold]profile[/] of steps {window.first} to {step} in {folder}: {text}{note}", soft_wrap=True
        )

    def end_profile(self) -> bool:
        """Write the trace down, also of a run that ends within its window. False where it could not be written."""
        if self._tracing:
            self._tracing = False
            with self._optional("the profile cannot be written"):
                jax.profiler.stop_trace()
                return True
        return False

    @contextmanager
    def _optional(self, failure: str) -> Iterator[None]:
        """For what a run goes on without, as on a full disk: a warning says so."""
        try:
            yield
        except (OSError, RuntimeError) as error:
            self.run.warn(f"{failure}: {reason_of(error)}")

    def _write(self, record: dict) -> None:
        """What this process alone knows of a step."""
        self.memory, found = device_memory(self.run.devices.devices), self._gpus.read()
        for exporter in list(self._exporters):
            try:
                exporter.write(record, self.memory, found)
            except OSError as error:  # a full disk; the run is worth more
                self.run.warn(f"{type(exporter).__name__} gets no more numbers: {reason_of(error)}")
                self._exporters.remove(exporter)
        memory = [each._asdict() for each in self.memory]
        own = {"step": record["step"], "time": time.time(), "seconds": record["seconds"]}
        own |= {"gpus": [each._asdict() for each in found]} if found else {}
        if self.run.lines:
            written = self.run.lines.write({**own, "memory": memory} if memory else own)
            if not written and self._writes_own:
                self.run.warn(f"the metrics of this process are not written: {self.run.lines.failure}")
            self._writes_own = written

    def _is_said(self, step: int) -> bool:
        return step % max(1, self.run.config.steps // 20) == 0

    def say(self, record: dict) -> None:
        """A line for every twentieth part of the run and every evaluation."""
        step, console = record["step"], self.run.console
        if self._is_said(step):
            console.print(f"step {step:>5}  {describe(record)}")
        if "held_out_loss" in record:
            console.print(f"step {step:>5}  held-out loss {self.held_out_loss:.4f}")

    def require_sound(self, record: dict) -> None:
        """Do with a non-finite value or a spike what the flags say. Raises: Stopped, RollBack."""
        run, step, flags = self.run, record["step"], self.run.flags
        if is_fault(record):
            culprits = name_culprits(run.program, gather_ranks("not finite", self._not_finite))
            where = "; ".join(map(str, culprits)) or "in no single rank's part, only in their sum"
            if experts := expert_load.broken(run.program.layout, self._counts, len(run.config.model.kinds)):
                more = f" and {len(experts) - 3} more" if len(experts) > 3 else ""
                where = f"it began in {', '.join(experts[:3])}{more}; {where}"
            fault = f"step {step} is not finite (batch {record['batch']}): {where}"
            self._skips_in_a_row += 1
            if flags.on_nonfinite == "roll-back":
                raise RollBack(fault, self.progress.batch)
            if flags.on_nonfinite == "stop" or self._skips_in_a_row > MAX_SKIPS_IN_A_ROW:
                raise Stopped(step - 1, f"{fault}. Parameters are as before it. {ADVICE}", 1, newest(run))
            self.progress = replace(self.progress, num_skipped=self.progress.num_skipped + 1)
            run.console.print(f"[bold red]skipped[/] {escape(fault)}", soft_wrap=True)
            return
        self._skips_in_a_row = 0
        if "held_out_loss" in record:
            self.require_finite_evaluation(step)
        if flags.on_spike == "ignore":
            self.progress = replace(self.progress, recent=[])
            return
        if record["tokens"] and self._spikes.is_spike(record["loss"]):
            fault = f"the loss jumped to {record['loss']:.4f} in step {step} (batch {record['batch']})"
            if flags.on_spike == "roll-back":
                raise RollBack(fault, self.progress.batch)
            raise Stopped(step, fault, 1, newest(run))
        self.progress = replace(self.progress, recent=self._spikes.recent)

    def require_finite_evaluation(self, step: int) -> None:
        """A step of finite numbers can leave parameters that overflow in the next. Raises: Stopped, RollBack."""
        if math.isfinite(self.held_out_loss):
            return
        fault = f"the held-out loss after step {step} is {self.held_out_loss}"
        if self.run.flags.on_nonfinite == "roll-back":
            raise RollBack(fault, self.progress.batch)
        raise Stopped(step, f"{fault}, so step {step} is not saved. Try a lower --lr", 1, newest(self.run))

    def compare_and_save(self, step: int) -> None:
        """Compare replicas and save, each where it is due. Raises: Stopped."""
        run, flags, last = self.run, self.run.flags, step == self.run.config.steps
        if run.checkpoints is not None and jax.process_count() == 1 and not last:
            try:
                run.checkpoints.wait_if_failed()
            except SaveFailed as error:
                run.not_saved(error)
        due = run.checkpoints is not None and (last or (flags.checkpoint_every and step % flags.checkpoint_every == 0))
        if due or (flags.check_replicas_every and step % flags.check_replicas_every == 0):
            with self._watch.part("checks"):
                self._require_equal_copies(step)
        if due:
            run.watchdog.alive("saving")
            try:
                with self._watch.part("checkpoint"):
                    run.save(self.state, self.progress)
            except SaveFailed as error:
                if last or jax.process_count() > 1:
                    raise Stopped(step, str(error), EXIT_SAVE, newest(run)) from error
                run.not_saved(error)

    def _require_equal_copies(self, done: int) -> None:
        if culprits := self._check_replicas(self.state):
            fault = f"after step {done} copies differ that should be equal: {'; '.join(map(str, culprits))}"
            raise Stopped(done, fault, 1, newest(self.run))


ADVICE = "Try a lower --lr, --dtype float32, or --on-nonfinite skip"


def last_save(run: Run, state: State, progress: resume.Progress, code: int) -> tuple[int, str]:
    """Save where the run stops, and wait for it: (exit code, what was saved)."""
    if run.checkpoints is None:
        return code, "no checkpoint was made: there is no --out"
    run.watchdog.alive("writing the last checkpoint")
    taken = ""
    if run.is_lost:
        try:
            run.hold.take_again()
        except ConfigError as error:
            taken = str(error)
    if taken := processes.from_first("folder", taken):
        return EXIT_SAVE, taken
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
    """Whether the step's numbers are not finite. An overflow that a lower loss scale (fp16) avoids is not a fault."""
    if not math.isfinite(record["loss"]):
        return True
    return not math.isfinite(record["grad_norm"]) and record.get("loss_scale", 1) <= 1


def evaluate(program: Program, state: State, held_out: list[GlobalBatch]) -> float:
    """Mean held-out loss, nats per token."""
    sums = [program.evaluate(state.params, program.put(batch)) for batch in held_out]
    if not (count := sum(int(count) for _, count in sums)):
        raise ConfigError("the held-out data", "some of its tokens must be targets", "Use more --eval-windows")
    return sum(float(total) for total, _ in sums) / count


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
    text = (
        f"loss {record['loss']:.4f}  {record['tokens_per_second']:,.0f} tokens/s  "
        f"grad norm {record['grad_norm']:.3f}  lr {record['lr']:.2e}"
    )
    if "expert_load_max" in record:
        text += f"  busiest expert {record['expert_load_max']:.2f} x the mean"
    if record.get("expert_dropped"):
        text += f", {record['expert_dropped']:.1%} dropped"
    return text


def print_resolved(console: Console, program: Program, devices: Devices, corpus: Corpus, entropy: float) -> None:
    """The mesh, the layout of every parameter, the bytes of a device and whether it is simulated."""
    config, parallel = program.config, program.config.parallel
    model, state = config.model, program.abstract_state()
    leaves = [leaf for leaf in jax.tree.leaves(program.layout.leaves) if leaf.update != "count"]
    params = [param for _, param in named_params(declare(model)) if param.update != "count"]
    total, frozen = (sum(each.size for each in params if each.frozen or not only) for only in (False, True))
    counts = f"{total:,} parameters" + (f", {total - frozen:,} of them trained" if frozen else "")

    summary = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    summary.add_row("[bold]mesh[/]", f"{parallel.mesh}")
    summary.add_row("[bold]devices[/]", devices.description)
    summary.add_row("[bold]model[/]", f"{counts}: {escape(model.describe())}")
    summary.add_row(
        "[bold]strategy[/]",
        f"ZeRO {parallel.zero}, sequence parallel {'on' if parallel.sp else 'off'}, gradients {parallel.grad_sync}, "
        f"{parallel.accumulate} micro-batch{'es' * (parallel.accumulate > 1)}, remat {parallel.remat}",
    )
    if (schedule := parallel.pipeline) is not None:
        summary.add_row(
            "[bold]pipeline[/]",
            f"{schedule.name}, {schedule.num_microbatches} micro-batches over {schedule.num_stages} stages, layers "
            f"{'+'.join(map(str, config.part_layers))}: {schedule.num_ticks} ticks, idle "
            f"{simulate(schedule).idle_share:.1%} (simulated, even ticks), in flight {max(in_flight(schedule))}",
        )
    summary.add_row("[bold]precision[/]", f"{config.precision.dtype}, reductions in {config.precision.reduction_dtype}")
    summary.add_row(
        "[bold]data[/]", f"{escape(corpus.about)}: {corpus.num_train:,} + {corpus.num_held_out:,} held-out tokens"
    )
    summary.add_row("", f"unigram entropy {entropy:.3f} nats/token (a model that ignores context gets no lower)")
    master = 0 if state.master is None else local_bytes(state.master)
    summary.add_row(
        "[bold]state[/]",
        f"{_mib(local_bytes(state))} a device: parameters {_mib(local_bytes(state.params))}, masters {_mib(master)}, "
        f"moments {_mib(local_bytes(state.moments))}",
    )
    console.print(summary)

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
