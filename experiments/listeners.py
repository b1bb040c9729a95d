"""What watches a run: listeners of one interface, which the training loop tells of every step."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

import jax
from rich.live import Live

from jaxdist.config import to_dict
from jaxdist.errors import ConfigError, reason_of
from jaxdist.plan.verdict import verdict_of
from jaxdist.runtime import expert_load, exporters, gpus, processes, profile
from jaxdist.runtime.stragglers import StragglerWatch
from jaxdist.runtime.telemetry import ASIDE, DeviceMemory, MeanLap, Stopwatch, device_memory
from jaxdist.train.state import State
from jaxdist.versions import __version__

from .panel import RunPanel
from .train_setup import Run


class Watched(Protocol):
    """What a listener may read of the training loop, and change. `state` is that after the step dispatched last."""

    state: State
    watch: Stopwatch
    counts: dict
    memory: list[DeviceMemory]

    def evaluates(self, step: int) -> bool: ...

    def is_said(self, step: int) -> bool: ...


class Listener:
    """Told of each step of a run, in this order; the loop has the state, the progress and the stopwatch.

    A subclass defines what it listens to. Listeners are told in the order of `listeners_of`.
    """

    def __init__(self, run: Run):
        self.run = run

    def waits_for(self, step: int) -> bool:
        """Whether the step must be finished before the next begins."""
        return False

    def on_step(self, loop: Watched, step: int) -> None:
        """A step begins; steps count from 1."""

    def on_dispatched(self, loop: Watched, step: int) -> None:
        """Its state is there, though not computed, and will be overwritten by the next step."""

    def on_computed(self, loop: Watched, step: int, record: dict) -> None:
        """Its numbers are there, and the next step may have been dispatched: add to its record."""

    def on_record(self, loop: Watched, record: dict) -> None:
        """Its record is whole, with the seconds of each part, and may be written."""

    def on_end(self) -> None:
        """The steps end, however they do."""

    def on_done(self) -> None:
        """All steps are taken and saved."""

    @contextmanager
    def optional(self, failure: str) -> Iterator[None]:
        """For what a run goes on without, as on a full disk: a warning says so."""
        try:
            yield
        except (ConfigError, OSError, RuntimeError) as error:
            self.run.warn(f"{failure}: {reason_of(error)}")


class Drill(Listener):
    """The fault that --drill rehearses. All steps before it are finished, so a drill shows the same each time."""

    def waits_for(self, step: int) -> bool:
        return step == self.run.fault.step - 1

    def on_step(self, loop: Watched, step: int) -> None:
        flipped = self.run.fault.flip(step, self.run.program.mesh, loop.state.params)
        loop.state = loop.state._replace(params=flipped)
        self.run.fault.before(step)


class Profile(Listener):
    """A trace of the steps that --profile names, and what it shows."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.window, self.tracing = profile.Window.parse(run.flags.profile), False

    def waits_for(self, step: int) -> bool:
        return step in (self.window.first - 1, self.window.last)

    def on_step(self, loop: Watched, step: int) -> None:
        if step == self.window.first:
            with loop.watch.part(ASIDE), self.optional("the profile cannot be begun"):
                jax.profiler.start_trace(profile.folder_of(self.run.out), create_perfetto_trace=True)
                self.tracing = True

    def on_computed(self, loop: Watched, step: int, record: dict) -> None:
        if self.tracing and step >= min(self.window.last, self.run.config.steps):
            with loop.watch.part(ASIDE):
                if self.end_trace():
                    self.say(step)

    def say(self, step: int) -> None:
        run, folder = self.run, profile.folder_of(self.run.out)
        with self.optional("the profile cannot be read"):
            found = profile.summarise(folder, run.step.as_text(), run.config.parallel.mesh, run.devices.devices)
            text = profile.described(found, step - self.window.first + 1)
            note = " (simulated devices share cores: no speed)" if run.devices.simulated else ""
            about = f"[bold]profile[/] of steps {self.window.first} to {step} in {folder}: {text}{note}"
            run.console.print(about, soft_wrap=True)

    def end_trace(self) -> bool:
        """Write the trace down. False where it could not be written."""
        self.tracing = False
        with self.optional("the profile cannot be written"):
            jax.profiler.stop_trace()
            return True
        return False

    def on_end(self) -> None:
        if self.tracing:  # the run ends within the window
            self.end_trace()


class ExpertLoad(Listener):
    """What the step counted of its experts."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.copies: dict[int, list[jax.Array]] = {}  # by step

    def on_dispatched(self, loop: Watched, step: int) -> None:
        self.copies[step] = expert_load.copies(self.run.program.layout, loop.state.params)

    def on_computed(self, loop: Watched, step: int, record: dict) -> None:
        num_tokens = self.run.config.batch_size * self.run.config.model.seq_len
        loop.counts = expert_load.counted(self.run.program.layout, self.copies.pop(step), num_tokens)
        record |= expert_load.summary(self.run.program.layout, loop.counts)
        if loop.evaluates(step) or loop.is_said(step):
            record["experts"] = expert_load.rounded(loop.counts)


class Processes(Listener):
    """The seconds of a step beside those of the other processes, and the slow ones named."""

    def __init__(self, run: Run):
        super().__init__(run)
        self.stragglers, self.laps = StragglerWatch(run.console), MeanLap()

    def waits_for(self, step: int) -> bool:
        return self.stragglers.is_due(step)

    def on_record(self, loop: Watched, record: dict) -> None:
        self.stragglers.add(record["seconds"])
        self.laps.add(record["seconds"])
        if spread := self.stragglers.report(record["step"]):
            record["processes"] = {name: each._asdict() for name, each in spread.items()}

    def on_done(self) -> None:
        """Say what the steps waited for, on all processes."""
        if not self.laps:
            return
        run, found = self.run, processes.from_all("mean times", json.dumps(self.laps.mean()))
        attention = run.program.model.ctx.attention
        run.say("[bold]verdict:[/]", verdict_of(run.config, list(map(json.loads, found)), run.devices, attention).text)


class OwnNumbers(Listener):
    """What this process alone knows of a step, in its lines and to the exporters that the flags ask for.

    Raises: ConfigError where one cannot be opened.
    """

    def __init__(self, run: Run):
        super().__init__(run)
        self.gpus, self.writes = gpus.Watch(run.devices.devices), True
        self.exporters: list[exporters.Exporter] = []
        flags = run.flags
        if flags.metrics_port is not None:
            info = {"mesh": str(run.config.parallel.mesh), "model": run.config.model.describe(), "version": __version__}
            info |= {"run": str(run.out or ""), "devices": run.devices.description}
            endpoint = exporters.Prometheus(flags.metrics_port, flags.metrics_host, info, run.planned)
            self.exporters.append(endpoint)
            run.console.print(f"metrics at {endpoint.address}, other processes at the next ports", markup=False)
        if flags.tensorboard and run.own_folder:
            self.exporters.append(exporters.TensorBoard(run.own_folder / "tensorboard"))
        if flags.wandb is not None and run.own_folder:
            self.exporters.append(exporters.WeightsAndBiases(run.own_folder, flags.wandb, to_dict(run.config)))

    def on_record(self, loop: Watched, record: dict) -> None:
        loop.memory, found = device_memory(self.run.devices.devices), self.gpus.read()
        for exporter in list(self.exporters):
            try:
                exporter.write(record, loop.memory, found)
            except OSError as error:  # a full disk; the run is worth more
                self.run.warn(f"{type(exporter).__name__} gets no more numbers: {reason_of(error)}")
                self.exporters.remove(exporter)
        own = {"step": record["step"], "time": time.time(), "seconds": record["seconds"]}
        for name, numbers in (("gpus", found), ("memory", loop.memory)):
            own |= {name: [each._asdict() for each in numbers]} if numbers else {}
        if self.run.lines:
            written = self.run.lines.write(own)
            if not written and self.writes:
                self.run.warn(f"the metrics of this process are not written: {self.run.lines.failure}")
            self.writes = written

    def on_end(self) -> None:
        for exporter in self.exporters:
            with self.optional(f"{type(exporter).__name__} may lack the last numbers"):
                exporter.close()


class Records(Listener):
    """The lines of metrics.jsonl."""

    writes = True  # whether the disk took the last one

    def on_record(self, loop: Watched, record: dict) -> None:
        run, step, written = self.run, record["step"], self.run.files.write_step(record)
        if not written and self.writes:  # once, not in every step
            run.say("[bold red]not written:[/]", f"the metrics of step {step} and on ({run.files.failure})")
        elif written and not self.writes:
            run.console.print(f"the metrics are written again from step {step} on")
        self.writes = written
        if not record["tokens"]:
            run.warn(f"batch {record['batch']} of step {step} has no target: its loss of 0 says nothing")


class Panel(Listener):
    """The panel of a terminal."""

    def __init__(self, run: Run):
        super().__init__(run)
        title = f"{run.config.parallel.mesh or 'one device'}"
        self.panel = RunPanel(title, run.config.steps, run.planned, run.devices.simulated)
        self.live = Live(self.panel, console=run.console, refresh_per_second=2)
        self.live.start()

    def on_record(self, loop: Watched, record: dict) -> None:
        self.panel.update(record, loop.memory)

    def on_end(self) -> None:
        self.live.stop()


def listeners_of(run: Run) -> list[Listener]:
    """The listeners that a run's flags, model and terminal ask for, in the order in which they are told."""
    flags = run.flags
    asked = {
        Profile: flags.profile is not None,
        Drill: run.fault is not None,
        ExpertLoad: bool(expert_load.counters(run.program.layout.trained)),
        Processes: True,
        OwnNumbers: True,
        Records: True,
        Panel: run.console.is_terminal and not run.console.quiet,
    }
    return [listener(run) for listener, wanted in asked.items() if wanted]
