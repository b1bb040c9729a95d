"""Train a GPT on any mesh: data, tensor and pipeline parallel; on one process or many.

python -m experiments.train --mesh dp=2,tp=2

With --out the run is kept in a folder, and the same command continues it after whatever ended it.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint import resume
from jaxdist.checkpoint.checkpoints import SaveFailed
from jaxdist.data.batches import GlobalBatch
from jaxdist.data.prefetch import Prefetched
from jaxdist.errors import ConfigError, printable, reason_of
from jaxdist.plan.utilisation import utilisation_of
from jaxdist.runtime import expert_load, exporters, processes
from jaxdist.runtime.health import SpikeWatch, gather_ranks, make_replica_check, name_culprits
from jaxdist.runtime.telemetry import DeviceMemory, Span, Stopwatch
from jaxdist.runtime.watchdog import Agreement
from jaxdist.train.program import Program, State

from .entry import EXIT_PEER, EXIT_SAVE, run_program
from .listeners import listeners_of
from .progress import Progress as SlowWork
from .train_flags import TrainFlags
from .train_setup import (
    Run,
    Stopped,
    check_run,
    compile_and_start,
    interruptible,
    open_run,
    print_resolved,
    say_unread,
    take_folder,
)

MAX_ROLL_BACKS = 5
MAX_SKIPS_IN_A_ROW = 10
ADVICE = "Try a lower --lr, --dtype float32, or --on-nonfinite skip"


@dataclass(eq=False)
class RollBack(Exception):
    """Go back to the newest checkpoint and on from batch `next_batch`."""

    reason: str
    next_batch: int


def main(flags: TrainFlags, console: Console, now: Callable[[], float] = time.monotonic) -> int:
    """Args: `now` is the clock of the budget."""
    run = check_run(flags, console)
    with ExitStack() as stack:
        if take_folder(run, stack):
            console.print(f"the run in {run.out} is complete: nothing is left to do", markup=False)
            say_unread(run, run.config.steps)
            return 0
        if flags.metrics_port is not None:
            exporters.require_free(flags.metrics_port, flags.metrics_host)
        own = open_run(run, stack, now)
        print_resolved(run)
        if run.out is None:
            run.note("without --out nothing of this run is kept: no checkpoint, no metrics")
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
            processes.leave(EXIT_PEER)
        return report_done(run, progress, last)


# ---------------------------------------------------------------------------------------------------------------------
# The loop
# ---------------------------------------------------------------------------------------------------------------------


def train(run: Run, start: resume.Start) -> tuple[resume.Progress, float]:
    """All steps from `start` on; returns the final progress and held-out loss. Raises: Stopped, once all is saved."""
    stopping = run.signals.number is not None and processes.count() == 1
    if start.progress.first_loss is None and not stopping:
        run.watchdog.alive("evaluating")
        with SlowWork("compiling and running the evaluation", quiet=run.console.quiet):
            loss = interruptible(run, start.step, lambda: evaluate(run.program, start.state, run.held_out))
        if not math.isfinite(loss):
            raise Stopped(start.step, f"the held-out loss before the first step is {loss}", 1, run.newest())
        start = replace(start, progress=replace(start.progress, first_loss=loss))
        run.console.print(f"step {start.step:>5}  held-out loss {loss:.4f}")
    while True:
        try:
            return train_from(run, start)
        except RollBack as back:
            start = go_back(run, start, back)


def train_from(run: Run, start: resume.Start) -> tuple[resume.Progress, float]:
    """Every step after `start`. Raises: Stopped, RollBack."""
    num_steps, loop = run.config.steps, Loop(run, start)
    with loop.inputs, ExitStack() as ends:
        for listener in loop.listeners:
            ends.callback(listener.on_end)
        ends.callback(loop.arrivals.shutdown, wait=False, cancel_futures=True)
        for step in range(start.step + 1, num_steps + 1):
            loop.stop_if_asked(step)
            loop.dispatch(step)
            loop.finish(but=0 if loop.is_waited_for(step) else 1)
            loop.compare_and_save(step)
    if start.step == num_steps:  # killed between the last checkpoint and the summary
        loop.held_out_loss = evaluate(run.program, loop.state, run.held_out)
        loop.require_finite_evaluation(num_steps)
    if run.checkpoints is not None:
        run.watchdog.alive("writing the last checkpoint")
        try:
            run.checkpoints.finish()
        except SaveFailed as error:
            raise Stopped(num_steps, str(error), EXIT_SAVE, run.newest()) from error
    for listener in loop.listeners:
        listener.on_done()
    return loop.progress, loop.held_out_loss


@dataclass
class Taken:
    """A step that was dispatched. arrived: its metrics on the host, and when they came. Seconds of the loop's clock."""

    step: int
    batch: int
    begun: float
    input: Span
    dispatched: float
    not_finite: jax.Array
    arrived: Future[tuple[dict, float]]


class Loop:
    """What changes from step to step, and the parts of a step in their order. Steps count from 1, as in the metrics.

    A step is dispatched before the one before it is finished, so that devices do not wait for the host, except where
    something is to be done with the state in between: an evaluation, a checkpoint, what a listener waits for. What a
    finished step decides (to stop, to roll back) then comes one step late, and that step is dropped. The first step is
    waited for: what cannot work shows there, and a budget counts with its time.
    """

    def __init__(self, run: Run, start: resume.Start):
        self.run, self.state, self.progress = run, start.state, start.progress
        self.held_out_loss = math.nan
        self.counts: dict = {}  # of experts, by the last step
        self.memory: list[DeviceMemory] = []
        self._first, self._flying = start.step + 1, deque[Taken]()
        self.arrivals = ThreadPoolExecutor(max_workers=1, thread_name_prefix="metrics")
        self._agreement, self._check_replicas = Agreement(), make_replica_check(run.program)
        self._spikes = SpikeWatch(recent=start.progress.recent)
        self._skips_in_a_row = 0
        self._utilisation = utilisation_of(run.config, run.devices)
        self.listeners = listeners_of(run)
        last_batch = start.progress.batch + run.config.steps - start.step
        self.inputs = Prefetched(self._make_batch, start.progress.batch, last_batch, run.flags.prefetch)
        self.watch = Stopwatch()  # begun last: what is made once is no step's
        self._finished = self.watch.now()  # when the last step was

    def _make_batch(self, index: int):
        run, batch = self.run, self.run.batches[index]
        return run.program.put(batch if run.fault is None else run.fault.spoil_batch(index, batch))

    def stop_if_asked(self, step: int) -> None:
        """Raises: Stopped before this step, with its checkpoint, where any process wants to stop."""
        run = self.run
        run.watchdog.alive(f"taking step {step}")
        if stop := self._agreement.stop_reason(step - 1, run.stop_reason(len(self._flying))):
            self.finish()
            reason, code = stop
            if run.checkpoints is not None:
                self._require_equal_copies(step - 1)
            raise Stopped(step - 1, reason, *run.last_save(self.state, self.progress, code))

    def dispatch(self, step: int) -> None:
        """Begin a step. Nothing waits for it here."""
        begun = self.watch.now()
        for listener in self.listeners:
            listener.on_step(self, step)
        waits = self.watch.now()
        try:
            batch = next(self.inputs)
        except BaseException:
            self.finish()  # what was taken is not lost with the input of the next
            raise
        waited = self.watch.add("input", waits, self.watch.now())
        self.state, metrics = self.run.step(self.state, batch)
        not_finite, place = metrics.pop("not_finite"), self.progress.batch + len(self._flying)
        arrived = self.arrivals.submit(lambda: (jax.device_get(metrics), self.watch.now()))
        self._flying.append(Taken(step, place, begun, waited, waited.ended, not_finite, arrived))
        for listener in self.listeners:
            listener.on_dispatched(self, step)

    def is_waited_for(self, step: int) -> bool:
        """Whether something is done with the state after this step, before the next overwrites it."""
        due = step == self._first or self.evaluates(step) or self.compares(step)
        return due or any(listener.waits_for(step) for listener in self.listeners)

    def finish(self, but: int = 0) -> None:
        """Wait for all steps that were dispatched but the last `but`. Raises: Stopped, RollBack."""
        while len(self._flying) > but:
            taken = self._flying.popleft()
            self.run.watchdog.alive(f"waiting for step {taken.step}")
            record = self._finish(taken)
            self.say(record)
            self.require_sound(record)

    def _finish(self, taken: Taken) -> dict:
        """The step's numbers, and the evaluation where one is due; what metrics.jsonl has of it, already written."""
        run, step, (metrics, now) = self.run, taken.step, taken.arrived.result()
        self._not_finite = taken.not_finite
        before, self._finished = self._finished, now
        self.watch.add("step", max(taken.dispatched, before), now)
        record = step_record(step, metrics, now - max(taken.begun, before), taken.input.between(before, now))
        record["batch"] = taken.batch
        if self._utilisation is not None:
            record |= self._utilisation.of(record["step_seconds"])
        for listener in self.listeners:
            listener.on_computed(self, step, record)
        if self.evaluates(step) and (run.flags.on_nonfinite == "skip" or not is_fault(record)):  # else the run ends
            run.watchdog.alive("evaluating")
            with self.watch.part("evaluation"):
                record["held_out_loss"] = self.held_out_loss = evaluate(run.program, self.state, run.held_out)
        groups = run.program.layout.trained.groups
        record["grad_norms"] = dict(zip(groups, metrics["group_norms"].tolist(), strict=True))
        record["seconds"] = self.watch.lap(now if self._flying else None)
        for listener in self.listeners:
            listener.on_record(self, record)
        tokens = self.progress.tokens + record["tokens"]
        self.progress = replace(self.progress, tokens=tokens, batch=self.progress.batch + 1)
        return record

    def evaluates(self, step: int) -> bool:
        return step % self.run.flags.eval_every == 0 or step == self.run.config.steps

    def saves(self, step: int) -> bool:
        flags, last = self.run.flags, step == self.run.config.steps
        return self.run.checkpoints is not None and (last or _every(flags.checkpoint_every, step))

    def compares(self, step: int) -> bool:
        return self.saves(step) or _every(self.run.flags.check_replicas_every, step)

    def is_said(self, step: int) -> bool:
        return step % max(1, self.run.config.steps // 20) == 0

    def say(self, record: dict) -> None:
        """A line for every twentieth part of the run and every evaluation."""
        step, console = record["step"], self.run.console
        if self.is_said(step):
            console.print(f"step {step:>5}  {describe(record)}")
        if "held_out_loss" in record:
            console.print(f"step {step:>5}  held-out loss {self.held_out_loss:.4f}")

    def require_sound(self, record: dict) -> None:
        """Do with a non-finite value or a spike what the flags say. Raises: Stopped, RollBack."""
        run, step, flags = self.run, record["step"], self.run.flags
        if is_fault(record):
            fault = f"step {step} is not finite (batch {record['batch']}): {self._where_not_finite()}"
            self._skips_in_a_row += 1
            if flags.on_nonfinite == "roll-back":
                raise RollBack(fault, self.progress.batch)
            if flags.on_nonfinite == "stop" or self._skips_in_a_row > MAX_SKIPS_IN_A_ROW:
                raise Stopped(step - 1, f"{fault}. Parameters are as before it. {ADVICE}", 1, run.newest())
            self.progress = replace(self.progress, num_skipped=self.progress.num_skipped + 1)
            run.say("[bold red]skipped[/]", fault)
            return
        self._skips_in_a_row = 0
        if "held_out_loss" in record:
            self.require_finite_evaluation(step)
        if flags.on_spike != "ignore" and record["tokens"] and self._spikes.is_spike(record["loss"]):
            fault = f"the loss jumped to {record['loss']:.4f} in step {step} (batch {record['batch']})"
            if flags.on_spike == "roll-back":
                raise RollBack(fault, self.progress.batch)
            raise Stopped(step, fault, 1, run.newest())
        self.progress = replace(self.progress, recent=[] if flags.on_spike == "ignore" else self._spikes.recent)

    def _where_not_finite(self) -> str:
        """The ranks and the experts in which the last step's numbers ceased to be finite."""
        culprits = name_culprits(self.run.program, gather_ranks("not finite", self._not_finite))
        where = "; ".join(map(str, culprits)) or "in no single rank's part, only in their sum"
        experts = expert_load.broken(self.run.program.layout, self.counts, len(self.run.config.model.kinds))
        more = f" and {len(experts) - 3} more" if len(experts) > 3 else ""
        return f"it began in {', '.join(experts[:3])}{more}; {where}" if experts else where

    def require_finite_evaluation(self, step: int) -> None:
        """A step of finite numbers can leave parameters that overflow in the next. Raises: Stopped, RollBack."""
        if math.isfinite(self.held_out_loss):
            return
        fault = f"the held-out loss after step {step} is {self.held_out_loss}"
        if self.run.flags.on_nonfinite == "roll-back":
            raise RollBack(fault, self.progress.batch)
        raise Stopped(step, f"{fault}, so step {step} is not saved. Try a lower --lr", 1, self.run.newest())

    def compare_and_save(self, step: int) -> None:
        """Compare replicas and save, each where it is due. Raises: Stopped."""
        run, last = self.run, step == self.run.config.steps
        if run.checkpoints is not None and jax.process_count() == 1 and not last:
            try:
                run.checkpoints.wait_if_failed()
            except SaveFailed as error:
                run.not_saved(error)
        if self.compares(step):
            with self.watch.part("checks"):
                self._require_equal_copies(step)
        if self.saves(step):
            run.watchdog.alive("saving")
            try:
                with self.watch.part("checkpoint"):
                    run.save(self.state, self.progress)
            except SaveFailed as error:
                if last or jax.process_count() > 1:
                    raise Stopped(step, str(error), EXIT_SAVE, run.newest()) from error
                run.not_saved(error)

    def _require_equal_copies(self, done: int) -> None:
        if culprits := self._check_replicas(self.state):
            fault = f"after step {done} copies differ that should be equal: {'; '.join(map(str, culprits))}"
            raise Stopped(done, fault, 1, self.run.newest())


def _every(count: int | None, step: int) -> bool:
    return bool(count) and step % count == 0


def go_back(run: Run, start: resume.Start, back: RollBack) -> resume.Start:
    """The newest checkpoint, with the batches since then left out. Raises: Stopped where that was done too often."""
    try:
        run.checkpoints.wait()
    except SaveFailed as error:
        run.not_saved(error)
    again, before = run.start_from(run.find_checkpoint()), start.progress
    count = max(before.roll_backs, again.progress.roll_backs) + 1
    if count > MAX_ROLL_BACKS:
        raise Stopped(again.step, f"{back.reason}; rolled back {MAX_ROLL_BACKS} times already", 1, run.newest())
    skipped = back.next_batch - again.progress.batch
    run.say(f"[bold red]rolled back[/] to step {again.step}:", f"{back.reason}; {skipped} batches are left out")
    run.files.go_back(again.step)
    if run.lines:
        run.lines.go_back(again.step)
    num_skipped = again.progress.num_skipped + skipped
    changed = {"num_skipped": num_skipped, "roll_backs": count, "first_loss": before.first_loss}
    return replace(again, progress=replace(again.progress, batch=back.next_batch, **changed))


# ---------------------------------------------------------------------------------------------------------------------
# Numbers of a step, and the end
# ---------------------------------------------------------------------------------------------------------------------


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
    tokens, names = int(metrics["tokens"]), ("loss", "grad_norm", "lr")
    return {
        "step": step,
        **{name: float(metrics[name]) for name in names},
        "tokens": tokens,
        "step_seconds": seconds,
        "input_seconds": input_seconds,
        "tokens_per_second": tokens / seconds,
        **({"loss_scale": float(metrics["loss_scale"])} if "loss_scale" in metrics else {}),
    }


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


def report_stopped(run: Run, stopped: Stopped) -> int:
    """Say and write why the run ended early; returns the exit code."""
    steps = run.config.steps
    saved = stopped.saved or "no checkpoint was made"
    run.say(f"\n[bold red]stopped[/] after {stopped.steps} of {steps} steps:", f"{stopped.reason}; {saved}")
    run.files.write_stopped({"steps": stopped.steps, "of": steps, "reason": stopped.reason})
    if stopped.code == EXIT_SAVE and jax.process_count() > 1:  # which the others may not know
        processes.fail(EXIT_SAVE, EXIT_SAVE, stopped.reason)
    return stopped.code


def report_done(run: Run, progress: resume.Progress, last: float) -> int:
    """Say and write what the whole run came to; returns the exit code."""
    console, steps, first = run.console, run.config.steps, progress.first_loss
    console.print(
        f"\n[bold]done[/]: {steps} steps, held-out loss {last:.4f} nats/token "
        f"(started at {first:.4f}; unigram entropy of the corpus {run.entropy:.4f})"
    )
    epochs = run.batches.epochs(progress.batch)
    for source, passes in zip(run.corpus.sources, epochs, strict=True):
        console.print(f"{passes:.3g} epochs of {escape(source.about)}")
    summary = {"steps": steps, "tokens": progress.tokens, "held_out_loss": last, "first_held_out_loss": first}
    complete = run.files.write_summary({**summary, "unigram_entropy": run.entropy, "epochs": epochs})
    if run.budget:
        console.print(f"cost {run.budget.report()}")
    if not complete:
        console.print(f"[bold red]not written:[/] summary.json ({escape(str(run.files.failure))})")
    return 0 if complete else EXIT_SAVE


if __name__ == "__main__":
    run_program(TrainFlags, main, "train")
