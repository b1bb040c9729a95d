"""Train a GPT on any data x tensor mesh.

python -m experiments.train --mesh dp=2,tp=2
"""

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import PartitionSpec
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from experiments.cli import EXIT_BUDGET, EXIT_SIGNAL, CommonFlags, run_program, set_precision
from jaxdist.config import RunConfig, require_positive
from jaxdist.data import Batches, Corpus, GlobalBatch, held_out_batches, load_corpus
from jaxdist.layout import local_bytes
from jaxdist.mesh import make_mesh
from jaxdist.metrics import RunFiles
from jaxdist.parallel.schedules import in_flight, simulate
from jaxdist.plan.budget import JobBudget, begin_job, is_asked_for
from jaxdist.prefetch import Prefetched
from jaxdist.runtime import Devices, acquire_devices
from jaxdist.step import Program, State, build_program, compiled_peak_bytes


@dataclass(frozen=True)
class TrainFlags(CommonFlags):
    """Train a GPT on real text, on one device or any mesh of data and tensor axes."""

    data: str | None = None
    """Text file or folder, .npy / .bin tokens, what experiments.prepare made, or a mixture as in a.bin=0.7,b.npy=0.3.

    Default: the source of Python's standard library."""
    prefetch: int = 2
    """Batches that are read and sent to the devices ahead, while a step computes."""
    out: str | None = None
    """Folder for config.json, metrics.jsonl and, at the end, summary.json (stopped.json where a budget stopped it)."""
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
    """Default: JAXDIST_SPEND_LOG, else spend.jsonl. `python -m experiments.budget init` makes one."""


class Diverged(ArithmeticError):
    """The loss is no number any more, and no later step can repair it."""


@dataclass(eq=False)
class Stopped(Exception):
    """The budget is used up or a signal came, after `steps` whole steps."""

    steps: int
    reason: str


def main(
    flags: TrainFlags,
    console: Console,
    save: Callable[[State], None] | None = None,
    now: Callable[[], float] = time.monotonic,
) -> int:
    """Args: `save` is called with the state where a run is stopped early; `now` is the clock of the budget."""
    # ---- check everything, before anything is traced ----
    config = flags.run_config()
    require_positive("eval_every", flags.eval_every)
    require_positive("eval_batches", flags.eval_batches)
    require_positive("prefetch", flags.prefetch)
    set_precision(config)
    corpus = load_corpus(flags.data, config.model.vocab_size)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)
    held_out = held_out_batches(corpus, config.batch_size, config.model.seq_len, flags.eval_batches)
    devices = acquire_devices(config.parallel.mesh.num_devices, flags.device)
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))

    about = {"data": corpus.about, "devices": devices.description}
    with job_budget(flags, config, console, now) as budget, RunFiles(flags.out, config, about) as files:
        # ---- say what will run ----
        entropy = corpus.unigram_entropy()
        print_resolved(console, program, devices, corpus, entropy)

        # ---- compile, initialise ----
        start = time.perf_counter()
        step = program.compile_step()
        state = program.init(config.seed)
        peak = compiled_peak_bytes(step, state)
        note = "" if peak is None else f"; the compiler plans {_mib(peak)} a device at the peak"
        console.print(f"compiled and initialised in {time.perf_counter() - start:.1f} s{note}\n")

        # ---- train ----
        try:
            state, losses = train(flags, program, step, state, batches, held_out, files, console, budget, save)
        except Diverged as error:
            console.print(f"[bold red]diverged[/] at {error}")
            return 1
        except Stopped as stopped:
            saved = "the state was saved" if save else "no checkpoint was made, this version has none"
            console.print(
                f"\n[bold red]stopped[/] after {stopped.steps} of {config.steps} steps: {stopped.reason}; {saved}"
            )
            files.write_stopped({"steps": stopped.steps, "of": config.steps, "reason": stopped.reason})
            return EXIT_SIGNAL + budget.signal if budget.signal else EXIT_BUDGET

        # ---- report ----
        first, last = losses[0], losses[-1]
        console.print(
            f"\n[bold]done[/]: {config.steps} steps, held-out loss {last:.4f} nats/token "
            f"(started at {first:.4f}; unigram entropy of the corpus {entropy:.4f})"
        )
        epochs = batches.epochs(config.steps)
        for source, done in zip(corpus.sources, epochs, strict=True):
            console.print(f"{done:.3g} epochs of {escape(source.about)}")
        summary = {"steps": config.steps, "held_out_loss": last, "first_held_out_loss": first}
        files.write_summary({**summary, "unigram_entropy": entropy, "epochs": epochs})
        if budget:
            console.print(f"cost {budget.report()}")
    return 0


def job_budget(flags: TrainFlags, config: RunConfig, console: Console, now) -> JobBudget | nullcontext:
    """The run's share of a budget, reserved; a context with nothing in it where no budget is asked for."""
    if not is_asked_for(flags.budget, flags.price_per_hour, flags.max_hours, flags.spend_log):
        return nullcontext()
    return begin_job(
        config.parallel.mesh.num_devices,
        flags.price_per_hour,
        flags.max_hours,
        flags.budget,
        flags.spend_log,
        note="experiments.train",
        say=lambda text: console.print(text, soft_wrap=True),
        now=now,
    )


def train(
    flags, program: Program, step, state: State, batches, held_out, files: RunFiles, console: Console, budget, save
):
    """Run every step; returns the final state and the held-out losses. Raises: Diverged; Stopped, once saved."""
    config = program.config
    losses = [evaluate(program, state, held_out)]
    console.print(f"step {0:>5}  held-out loss {losses[0]:.4f}")
    live = console.is_terminal
    every = max(1, config.steps // 20)
    inputs = Prefetched(lambda index: program.put(batches[index]), 0, config.steps, flags.prefetch)
    with inputs, _progress(console, disable=not live) as progress:
        task = progress.add_task("train", total=config.steps, line="")
        for index in range(config.steps):
            if budget and (reason := budget.stop_reason()):
                if save:
                    save(state)
                raise Stopped(index, reason)
            start = time.perf_counter()
            state, metrics = step(state, next(inputs))
            metrics = jax.device_get(metrics)  # waits for the step
            record = step_record(index + 1, metrics, time.perf_counter() - start, inputs.waited)
            files.write_step(record)
            line = describe(record)
            progress.update(task, advance=1, line=line)
            if not live and (index + 1) % every == 0:
                console.print(f"step {index + 1:>5}  {line}")
            if not np.isfinite(record["loss"]):
                raise Diverged(f"step {index + 1}: the loss is {record['loss']}. Try a lower --lr, or --dtype float32.")
            if (index + 1) % flags.eval_every == 0 or index + 1 == config.steps:
                losses.append(evaluate(program, state, held_out))
                console.print(f"step {index + 1:>5}  held-out loss {losses[-1]:.4f}")
    return state, losses


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
        f"{num_parameters:,} parameters: {model.num_layers} layers, width {model.width}, {model.num_heads} heads, "
        f"FFN {model.ffn_width}, context {model.seq_len}, vocabulary {model.vocab_size} "
        f"(padded to {model.padded_vocab_size})",
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

    table = Table("parameter", "computed with", "stored as", box=None, header_style="bold", pad_edge=False)
    for leaf in leaves:
        computed = layout_text(leaf.shape, leaf.compute_spec)
        table.add_row(leaf.name, escape(computed), escape(layout_text(leaf.storage_shape, leaf.storage_spec)))
    console.print(table)
    for note in config.warnings():
        console.print(f"[yellow]note:[/] {note}")


def layout_text(shape: tuple[int, ...], spec: PartitionSpec) -> str:
    """A global shape with the mesh axes of each dim: [4, 128, 512_tp]."""
    dims = [(axis,) if isinstance(axis, str) else axis or () for axis in spec]
    return "[" + ", ".join("_".join([str(n), *axes]) for n, axes in zip(shape, dims, strict=True)) + "]"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.2f} MiB"


if __name__ == "__main__":
    run_program(TrainFlags, main, "experiments.train")
