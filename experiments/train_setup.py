"""What a run needs before its first step: everything checked, its folder taken, its parts opened, its step compiled."""

import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import jax
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from jaxdist.checkpoint import resume
from jaxdist.checkpoint.checkpoints import Checkpoints, Manifest, SaveFailed, made_in, require_savable
from jaxdist.checkpoint.trained import SOURCE, Weights, companions_of, compare_tokens, find_weights, require_same_tokens
from jaxdist.checkpoint.weights import copy_companions, is_folder_of_weights
from jaxdist.commands import command_text
from jaxdist.config import RunConfig
from jaxdist.data.batches import Batches, Corpus, GlobalBatch, held_out_batches, load_corpus, parse_sources
from jaxdist.errors import ConfigError
from jaxdist.files import write_whole
from jaxdist.mesh import make_mesh
from jaxdist.models.base import declare
from jaxdist.models.registry import is_path
from jaxdist.parallel.pipeline.simulate import in_flight, simulate
from jaxdist.params import named_params
from jaxdist.runtime import processes, profile
from jaxdist.runtime.budget import JobBudget, begin_job, find_ceiling, find_log, is_asked_for
from jaxdist.runtime.devices import Devices, acquire_devices, keep_tuning, refused_option
from jaxdist.runtime.fault_injection import Fault, parse_fault
from jaxdist.runtime.metrics import RunFiles, StepLines, holds_run, is_complete, process_lines, require_writable_folder
from jaxdist.runtime.run_folder import held, require_shared
from jaxdist.runtime.signals import Signals
from jaxdist.runtime.watchdog import Watchdog
from jaxdist.specs import compute_spec, local_bytes, storage_spec
from jaxdist.train.program import Program, State, build_program, compiled_bytes
from jaxdist.versions import versions

from . import config_file
from .cli import set_precision
from .entry import EXIT_BUDGET, EXIT_SAVE, EXIT_SIGNAL, in_flags
from .progress import Progress as SlowWork
from .tables import Rows
from .train_flags import TrainFlags

T = TypeVar("T")


@dataclass(eq=False)
class Stopped(Exception):
    """The run ended by itself after `steps` whole steps; `code` is the program's exit code."""

    steps: int
    reason: str
    code: int
    saved: str = ""
    while_compiling: bool = False


@dataclass(eq=False)
class Run:
    """A run: what is checked before anything is traced, and what `open_run` and `compile_and_start` add.

    other, weights: the checkpoint of another run, or the parameters alone, that it begins from. source: the files that
    its parameters came from, as checkpoints remember them. lines: of this process, where the run has a folder. planned:
    bytes of a device at the peak, where the compiler says.
    """

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
    checkpoints: Checkpoints | None = None
    other: tuple[Checkpoints, Manifest] | None = None
    weights: Weights | None = None
    source: dict | None = None
    lines: StepLines | None = None
    planned: int | None = None
    entropy: float = field(init=False)
    files: RunFiles = field(init=False)
    signals: Signals = field(init=False)
    watchdog: Watchdog = field(init=False)
    budget: JobBudget | None = field(init=False)
    step: Callable = field(init=False)

    @property
    def compiled(self) -> dict:
        """What config.json has of how the step is compiled, beside the configuration."""
        return {"compiler_options": self.options, "attention": self.program.model.ctx.attention}

    @property
    def own_folder(self) -> Path | None:
        """Where this process writes the run's files: the first alone does."""
        return self.out if processes.is_first() else None

    def warn(self, text: str) -> None:
        self.say("[yellow]warning:[/]", in_flags(text, TrainFlags))

    def note(self, text: str) -> None:
        if text:
            self.say("[yellow]note:[/]", in_flags(text, TrainFlags))

    def say(self, kind: str, text: str) -> None:
        """kind: with rich's markup."""
        self.console.print(f"{kind} {escape(text)}", soft_wrap=True)

    def not_saved(self, error: SaveFailed) -> None:
        self.say("[bold red]not saved:[/]", str(error))

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

    def last_save(self, state: State, progress: resume.Progress, code: int) -> tuple[int, str]:
        """Save where the run stops, and wait for it: (exit code, what was saved)."""
        if self.checkpoints is None:
            return code, "no checkpoint was made: there is no --out"
        self.watchdog.alive("writing the last checkpoint")
        try:
            self.save(state, progress)
            self.checkpoints.finish()
        except SaveFailed as error:
            return EXIT_SAVE, f"{error}; {self.newest()}"
        return code, f"{self.newest()}; the same command continues"

    def newest(self) -> str:
        """What can be continued from, for a person."""
        if self.checkpoints is None:
            return ""
        try:
            self.checkpoints.wait()
        except SaveFailed as error:
            self.not_saved(error)
        return self.newest_now()

    def newest_now(self) -> str:
        steps = self.checkpoints.steps() if self.checkpoints else []
        return f"the newest checkpoint is of step {steps[-1]}" if steps else "no checkpoint was made"

    def stop_reason(self, in_flight: int = 0) -> tuple[str, int] | None:
        """Why this process wants to stop before the next step, and the exit code for it; `in_flight` steps have begun
        and are not finished."""
        used_up = self.budget.stop_reason(in_flight) if self.budget else None
        if self.signals.number is not None:
            return self.signals.reason, EXIT_SIGNAL + self.signals.number
        return (used_up, EXIT_BUDGET) if used_up else None


def check_run(flags: TrainFlags, console: Console) -> Run:
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
        require_savable(out)
        for name, _ in [] if flags.data is None else parse_sources(flags.data):
            if Path(name).is_dir() and Path(name).resolve() in (out.resolve(), *out.resolve().parents):
                reason = f"must be outside of data={name!r}, or the run would be part of what it reads"
                raise ConfigError(f"out={str(out)!r}", reason, "Name a folder elsewhere")
    corpus = load_corpus(flags.data, config.model.vocab_size, flags.token_dtype)
    sizes = corpus, config.batch_size, config.model.seq_len
    batches = Batches(*sizes, config.seed, config.mask_documents)
    held_out = held_out_batches(*sizes, flags.eval_windows, config.mask_documents)
    fault = parse_fault(flags.drill, config.parallel.mesh.num_devices, config.steps, processes.count())
    if fault and fault.kind == "full":
        every = flags.checkpoint_every or config.steps
        if out is None or (fault.step % every and fault.step != config.steps):
            raise ConfigError(f"drill={flags.drill!r}", "its step must be one that is saved", "Use --checkpoint-every")
    poison = fault.poison() if fault else None
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices), poison=poison)
    attention = {"--attention, as it compiles": program.model.ctx.attention}
    processes.require_agreement("attention", attention, seconds=600)
    require_room(program, devices)
    tokens = corpus.tokens_of
    data = {"source": corpus.about, "fingerprint": corpus.fingerprint()}
    data |= {"tokenizer": tokens.tokenizer, "end_of_document": tokens.end_of_document}
    data |= {"begin_of_text": None if tokens.begin_of_text is None else list(tokens.begin_of_text)}
    data |= {"eval_windows": flags.eval_windows}
    shown = f"{corpus.about} (SHA-256 {data['fingerprint'][:12]}...)"
    processes.require_agreement("data", {"--data": processes.Shown(data["fingerprint"], shown)}, seconds=600)
    return Run(flags, console, config, devices, options, out, corpus, batches, held_out, fault, program, data)


def parse_options(options: Sequence[str]) -> dict[str, str | bool]:
    """NAME=VALUE, each, as this machine's compiler takes it."""
    found: dict[str, str | bool] = {}
    for option in options:
        name, equals, text = option.partition("=")
        value = {"true": True, "false": False}.get(text.lower(), text)
        refusal = refused_option(name, value) if name and equals else "an option must be NAME=VALUE"
        if refusal:
            remedy = f"Use one that `{command_text('bench')} flags` shows"
            raise ConfigError(f"--compiler-options {option}", refusal, remedy)
        found[name] = value
    return found


def require_room(program: Program, devices: Devices) -> None:
    """Raises: ConfigError where the state alone is more than this machine's devices, or its host, can hold."""
    need = local_bytes(program.abstract_state())
    if devices.platform == "cpu":
        mine = sum(device.process_index == jax.process_index() for device in devices.devices)
        need, room = need * mine, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        where = f"the host's memory, for {mine} simulated devices"
    else:
        room, where = (devices.devices[0].memory_stats() or {}).get("bytes_limit", math.inf), "one device"
    if need > room:
        raise ConfigError(
            f"a state of {need / 2**30:,.1f} GiB in {where}",
            f"must fit in {room / 2**30:,.1f} GiB",
            f"Use a smaller model, or ask `{command_text('plan')}` which layout and hardware hold it",
        )


def take_folder(run: Run, stack: ExitStack) -> bool:
    """Lock --out for as long as `stack` lasts: whether it holds this run complete. With --fresh it is emptied.

    Raises: ConfigError where another process holds the folder, it holds another run, or must not be touched.
    """
    if run.out is None:
        return False
    done = False
    if processes.is_first():
        stack.enter_context(held(run.out, "out", run.warn))
    require_shared(run.out, "out")
    if processes.is_first():
        if is_folder_of_weights(run.out) or made_in(run.out):
            reason = "must not hold weights, whose config.json the run's would replace"
            raise ConfigError(f"out={str(run.out)!r}", reason, "Choose another folder")
        if run.flags.fresh:  # removed once nothing is left to refuse
            resume.require_clearable(run.out, run.flags.overwrite)
        elif holds_run(run.out):
            resume.require_own_folder(run.out, run.config, run.compiled, run.warn)
            if done := is_complete(run.out):
                resume.require_data_of_complete(run.out, run.data)
    return processes.from_first("done", "yes" if done else "") == "yes"


def say_unread(run: Run, done: int) -> None:
    """Note the flags that are not looked at where a run goes on from its own checkpoint of step `done`."""
    profiled = run.flags.profile and profile.Window.parse(run.flags.profile).first
    drilled = run.fault and run.fault.kind != "slow" and run.fault.step
    for name, first in (("profile", profiled), ("drill", drilled)):
        if first and first <= done:
            run.note(f"--{name} does nothing: its step {first} was done before, and the run goes on after step {done}")
    for name in ("restore", "weights"):
        if (given := getattr(run.flags, name)) is not None:
            run.note(f"--{name} {shlex.quote(given)} is not read: {run.out} already holds this run")


def open_run(run: Run, stack: ExitStack, now: Callable[[], float]) -> Manifest | None:
    """Open all that the run holds until `stack` ends, and find its own newest checkpoint."""
    flags, out, own = run.flags, run.out, None
    if out is not None:
        run.checkpoints = Checkpoints(out / resume.FOLDER, flags.keep_last, flags.keep_every, warn=run.warn)
        own = None if flags.fresh else run.find_checkpoint()
    if own is None:
        find_beginning(run)
    else:
        run.source = own.about.get(SOURCE)
        say_unread(run, own.step)

    def heard(name: str) -> None:
        saved = "; the run is saved first" if run.checkpoints else ""
        print(f"{name}: stopping once what is under way is done{saved}", file=sys.stderr, flush=True)

    def late() -> None:
        print(f"not done within --grace {flags.grace:g} s: {run.newest_now()}", file=sys.stderr, flush=True)

    run.signals = stack.enter_context(Signals(grace=flags.grace, late=late, heard=heard))
    run.console.when_broken = partial(run.signals.ask, signal.SIGPIPE)
    stacks = None if out is None else str(out / f"stacks.{jax.process_index()}.txt")
    run.watchdog = stack.enter_context(Watchdog(flags.stuck_after, stacks))
    run.budget = stack.enter_context(job_budget(run, now))
    if out is not None and flags.fresh:
        if processes.is_first():
            resume.clear(out, flags.overwrite)
        processes.from_first("cleared", "yes")  # before any process makes a file there
    about = {"data": run.corpus.about, "devices": run.devices.description, **run.compiled}
    about |= {"simulated": run.devices.simulated, "versions": versions()}
    about |= {} if flags.weights is None else {"weights": flags.weights}
    steps = own.step if own else 0
    run.files = stack.enter_context(RunFiles(run.own_folder, run.config, about, steps, run.warn))
    if out is not None:
        run.lines = process_lines(out, steps, run.warn)
        stack.callback(run.lines.close)
    if run.own_folder is not None:
        write_beside(run, run.own_folder)
    run.entropy = run.corpus.unigram_entropy()
    return own


def find_beginning(run: Run) -> None:
    """Find the checkpoint or the weights that a run without a checkpoint of its own begins from."""
    flags, tokens = run.flags, run.corpus.tokens_of
    asked = "no data given" if flags.data is None else f"data={flags.data!r}"
    if flags.restore is not None:
        checkpoints, manifest = run.other = resume.find_other(flags.restore, run.config)
        require_kept(run, "restore", checkpoints.folder)
        run.source = manifest.about.get(SOURCE)
        run.note(require_same_tokens(asked, companions_of(checkpoints), manifest.table("data"), tokens))
        run.note(resume.rate_note(manifest, run.config))
    elif flags.weights is not None:
        run.weights = weights = find_weights(flags.weights, "weights", run.config.model, run.config.seed)
        require_kept(run, "weights", weights.companions)
        run.source = weights.source
        run.note(require_same_tokens(asked, weights.companions, weights.data, tokens))
        ours, theirs = run.config.precision.dtype, weights.dtype
        if theirs != ours:
            run.note(f"the weights are {theirs}, and the run's are {ours}; dtype={theirs} trains in theirs")
    elif is_path(flags.model):
        found = compare_tokens(Path(flags.model), {}, tokens)
        run.note(found.about if found.same is False else "")


def require_kept(run: Run, name: str, folder: Path) -> None:
    """Raises: ConfigError where --fresh would remove what the run is to begin from."""
    if run.flags.fresh and run.out is not None and run.out.resolve() in (folder.resolve(), *folder.resolve().parents):
        given = getattr(run.flags, name)
        reason = f"must lie outside of out={str(run.out)!r}, whose run --fresh removes"
        raise ConfigError(f"{name}={given!r} with fresh=True", reason, "Choose another folder for the new run")


def write_beside(run: Run, folder: Path) -> None:
    """Write every setting where --config reads it, and what text that the run generates is read with."""
    try:
        text = config_file.settings_text("train", run.flags, run.config)
        write_whole(folder / config_file.NAME, text.encode())
        if run.weights:
            copy_companions(run.weights.companions, folder)
        elif run.other is not None:
            copy_companions(companions_of(run.other[0]), folder)
        if (tokenizer := run.corpus.tokens_of.tokenizer_file) is not None:
            write_whole(folder / tokenizer.name, tokenizer.read_bytes())
    except OSError as error:
        raise ConfigError(
            f"--out {folder}", f"it cannot be written ({error.strerror})", "Name another folder"
        ) from error


def job_budget(run: Run, now: Callable[[], float]) -> JobBudget | nullcontext:
    """The run's share of a budget, reserved; a context with nothing in it where no budget is asked for."""
    flags, num_devices = run.flags, run.config.parallel.mesh.num_devices
    asked_for = is_asked_for(flags.budget, flags.price_per_hour, flags.max_hours, flags.spend_log)
    if not asked_for or not processes.is_first():
        return nullcontext()
    log, ceiling = find_log(flags.spend_log), find_ceiling(flags.budget)
    budget = begin_job(log, num_devices, flags.price_per_hour, flags.max_hours, ceiling, "train", (), now)
    for line in budget.announcement:
        run.console.print(line, soft_wrap=True)
    return budget


def compile_and_start(run: Run, own: Manifest | None) -> resume.Start:
    """Compile the step; restore the state or make it; say how long both took."""
    console, begun = run.console, time.perf_counter()
    if run.out is not None and run.devices.platform == "gpu":
        keep_tuning(run.out / "tuned")
    run.watchdog.alive("compiling the step")
    with SlowWork("compiling the step", quiet=console.quiet):
        run.step = interruptible(run, own.step if own else 0, lambda: run.program.compile_step(run.options))
    compiled = time.perf_counter()
    run.watchdog.alive("making the state")
    with SlowWork("making the state" if own is None else "restoring the state", quiet=console.quiet):
        start = run.start_from(own)
    note = ""
    if (planned := compiled_bytes(run.step)) is not None:
        run.planned = planned.peak
        run.files.add_to_config({"compiled": planned._asdict()})
        note = f"; the compiler plans {_mib(planned.peak)} a device at the peak"
    made = "initialised" if not start.step else "restored"
    console.print(f"compiled in {compiled - begun:.1f} s, {made} in {time.perf_counter() - compiled:.1f} s{note}")
    if start.step:
        verb = "resumed after" if own else "restored from"
        run.say(f"[bold]{verb}[/]", f"{start.about}; batch {start.progress.batch} is next")
    elif run.weights:
        run.say("[bold]started from[/]", start.about)
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
    while not wait([done], timeout=0.1).done:
        if run.signals.number is not None:
            raise Stopped(step, *run.stop_reason(), run.newest(), while_compiling=True)
    return done.result()


def print_resolved(run: Run) -> None:
    """The mesh, the layout of every parameter, the bytes of a device and whether it is simulated."""
    config, program, corpus = run.config, run.program, run.corpus
    parallel, model, state = config.parallel, config.model, program.abstract_state()
    params = [param for _, param in named_params(declare(model)) if param.update != "count"]
    total, frozen = (sum(each.size for each in params if each.frozen or not only) for only in (False, True))
    counts = f"{total:,} parameters" + (f", {total - frozen:,} of them trained" if frozen else "")
    rows = [
        ("mesh", f"{parallel.mesh}"),
        ("devices", run.devices.description),
        ("model", f"{counts}: {escape(model.describe())}"),
        (
            "strategy",
            f"ZeRO {parallel.zero}, sequence parallel {'on' if parallel.sp else 'off'}, gradients "
            f"{parallel.grad_sync}, {parallel.accumulate} micro-batch{'es' * (parallel.accumulate > 1)}, "
            f"remat {parallel.remat}",
        ),
    ]
    if (schedule := parallel.pipeline) is not None:
        text = (
            f"{schedule.name}, {schedule.num_microbatches} micro-batches over {schedule.num_stages} stages, layers "
            f"{'+'.join(map(str, config.part_layers))}: {schedule.num_ticks} ticks, idle "
            f"{simulate(schedule).idle_share:.1%} (simulated, even ticks), in flight {max(in_flight(schedule))}"
        )
        rows.append(("pipeline", text))
    sizes = [_mib(0 if tree is None else local_bytes(tree)) for tree in (state.params, state.master, state.moments)]
    rows += [
        ("precision", f"{config.precision.dtype}, reductions in {config.precision.reduction_dtype}"),
        ("data", f"{escape(corpus.about)}: {corpus.num_train:,} + {corpus.num_held_out:,} held-out tokens"),
        ("", f"unigram entropy {run.entropy:.3f} nats/token (a model that ignores context gets no lower)"),
        (
            "state",
            f"{_mib(local_bytes(state))} a device: parameters {sizes[0]}, masters {sizes[1]}, moments {sizes[2]}",
        ),
    ]
    summary = Table.grid(Column(), Column(overflow="fold"), padding=(0, 2))
    for name, text in rows:
        summary.add_row(f"[bold]{name}[/]" if name else "", text)
    run.console.print(summary)
    table = Rows("parameter", "computed with", "stored as")
    for leaf in jax.tree.leaves(program.layout.leaves):
        if leaf.param.update != "count":
            computed = layout_text(leaf.shape, compute_spec(leaf))
            table.add_row(leaf.name, computed, layout_text(leaf.storage_shape, storage_spec(leaf)))
    table.print(run.console, left=("computed with", "stored as"))
    for note in config.warnings():
        run.note(note)


def layout_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """A global shape with the mesh axes of each dim: [4, 128, 512_tp]."""
    dims = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    return "[" + ", ".join("_".join([str(n), *axes]) for n, axes in zip(shape, dims, strict=True)) + "]"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"
