"""The perplexity of a trained model on held-out text, on any mesh.

python -m experiments.evaluate runs/a --data my_tokens --mesh dp=2,tp=2
"""

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint.logical import abstract_parameters, parameters_from_logical
from jaxdist.checkpoint.trained import find_weights, require_same_tokens
from jaxdist.config import RunConfig
from jaxdist.data.batches import EVAL_WINDOWS, Batches, first_batches, held_out_batches, load_corpus
from jaxdist.data.tokens import TokenDtype
from jaxdist.errors import ConfigError, require_positive
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import Model
from jaxdist.models.declared import abstract_values
from jaxdist.runtime import processes
from jaxdist.runtime.devices import DeviceChoice, acquire_devices
from jaxdist.strategy import Dtype, ParallelConfig, PrecisionConfig
from jaxdist.train.program import build_program

from .cli import ProcessFlags, set_precision
from .entry import run_program
from .progress import Progress


@dataclass(frozen=True, kw_only=True)
class EvaluateFlags(ProcessFlags):
    """The perplexity of a trained model on text."""

    GROUPS: ClassVar[dict[str, str]] = {"data": "data", "mesh": "devices"} | ProcessFlags.GROUPS

    checkpoint: tyro.conf.Positional[str]
    """A run's folder, a checkpoint DIR[:STEP], or a folder of transformers."""
    trust: bool = False
    """Import the module of the class that a checkpoint names as its model, where it is not jaxdist's own."""
    data: str | None = None
    """As of train. Default: the source of Python's standard library."""
    token_dtype: TokenDtype | None = None
    """Numbers in a .bin, where they are not plainly uint16."""
    split: Literal["held-out", "train"] = "held-out"
    """Which part of the data: what training with it holds out, or what it trains on."""
    windows: int = EVAL_WINDOWS
    """Windows to look at, spread evenly over the held-out tokens (of train: the first of seed 0); all where there are
    fewer. The default is that of train's --eval-windows."""
    batch_size: int = 16
    """Windows in a batch, over the whole mesh; the result does not depend on it."""
    seq_len: int | None = None
    """Tokens in a window. Default: those of the model."""
    mask_documents: Literal["auto", "yes", "no"] = "auto"
    """Whether attention keeps to a token's document. auto: as in the run that trained it; no for others' weights."""
    mesh: str = "1"
    """As in dp=2,tp=2."""
    zero: Literal[0, 3] = 0
    """3: each data rank holds a part of the weights, and gathers a layer's where it is computed."""
    dtype: Dtype | None = None
    """Dtype of weights and arithmetic. Default: that of the checkpoint's parameters."""
    device: DeviceChoice = "auto"
    """auto simulates the mesh on the CPU where there are too few accelerators."""


def main(flags: EvaluateFlags, console: Console) -> int:
    require_positive("windows", flags.windows, 10**8)
    flags.join(console)
    shape = parse_mesh(flags.mesh)
    devices = acquire_devices(shape.num_devices, flags.device)
    with Progress("checking the weights", quiet=console.quiet):
        weights = find_weights(flags.checkpoint, "checkpoint", trust=flags.trust)
    model = with_seq_len(weights.model, flags.seq_len)
    dtype = flags.dtype or weights.dtype
    schedule = {"schedule": "gpipe", "microbatches": 1} if shape.pp > 1 else {}
    parallel = ParallelConfig(shape, zero=flags.zero, **schedule)
    masks = weights.mask_documents if flags.mask_documents == "auto" else flags.mask_documents == "yes"
    config = RunConfig(
        model,
        parallel,
        precision=PrecisionConfig(dtype),
        batch_size=flags.batch_size,
        steps=1,
        mask_documents=masks,
    )
    set_precision(config)
    corpus = load_corpus(flags.data, model.vocab_size, flags.token_dtype)
    read = processes.Shown(corpus.fingerprint(), corpus.about) if processes.count() > 1 else corpus.about
    processes.require_agreement("data", {"--data": read}, seconds=600)
    asked = "no data given" if flags.data is None else f"data={flags.data!r}"
    if note := require_same_tokens(asked, weights.companions, weights.data, corpus.tokens_of):
        console.print(f"[yellow]note:[/] {escape(note)}", soft_wrap=True)
    try:
        if flags.split == "held-out":
            batches = held_out_batches(corpus, config.batch_size, model.seq_len, flags.windows, masks)
        else:
            batches = first_batches(
                Batches(corpus, config.batch_size, model.seq_len, seed=0, documents=masks), flags.windows
            )
    except ConfigError as error:
        if not masks or flags.mask_documents == "yes":
            raise
        remedy = "The run kept documents apart: name data that says where they end, or --mask-documents no"
        raise ConfigError(error.asked, error.required, remedy) from error
    program = build_program(config, make_mesh(shape, devices.devices))
    other = f" (trained in {weights.trained_in})" if weights.trained_in not in (None, dtype) else ""
    console.print(f"{escape(weights.about)}: {escape(model.describe())}, {dtype}{other}", soft_wrap=True)
    console.print(f"on {escape(corpus.about)}" + ", each document by itself" * masks, soft_wrap=True)
    with Progress("reading the weights", quiet=console.quiet):
        wanted = abstract_parameters(program.layout, program.mesh, config.precision)
        params = parameters_from_logical(program, weights.read(wanted))
    loss = tokens = 0.0
    with Progress("evaluating", quiet=console.quiet) as progress:
        for done, batch in enumerate(batches):
            progress.update(done, len(batches))
            total, count = program.evaluate(params, program.put(batch))
            loss, tokens = loss + float(total), tokens + int(count)
    if not tokens:
        raise ConfigError(f"--data {flags.data}", "some of its tokens must be targets", "Use more --windows")
    mean = loss / tokens
    if not math.isfinite(mean):
        console.print(f"[bold red]the loss is {mean}[/]: the weights or their activations are not finite")
        return 1
    shown = f"{math.exp(mean):,.4f}" if mean < 700 else "above 1e304"  # e**710 is no float
    console.print(
        f"perplexity [bold]{shown}[/]: {mean:.6f} nats a token over {tokens:,.0f} tokens; mesh {shape}",
        soft_wrap=True,
    )
    return 0


def with_seq_len(model: Model, seq_len: int | None) -> Model:
    """The model for windows of another length. Raises: ConfigError where its parameters depend on it."""
    if seq_len is None:
        return model
    require_positive("seq_len", seq_len)
    other = replace(model, seq_len=seq_len)
    if abstract_values(other, "float32") != abstract_values(model, "float32") or seq_len > model.seq_len:
        raise ConfigError(
            f"seq_len={seq_len}",
            f"must be a length that the model has parameters for: it was trained for {model.seq_len} positions",
            "Leave it out",
        )
    return other


if __name__ == "__main__":
    run_program(EvaluateFlags, main, prog="evaluate")
