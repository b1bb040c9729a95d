"""Generate text from a trained model on any mesh, streamed as its tokens come.

python -m experiments.generate runs/a --mesh tp=2 --prompt "def main("
python -m experiments.generate runs/a --prompts prompts.txt --temperature 0.8 --top-p 0.9
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar

import jax
import numpy as np
import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint.logical import fetch
from jaxdist.checkpoint.trained import Weights, find_weights
from jaxdist.data.prepared import TOKENIZER
from jaxdist.data.text_stream import TextStream
from jaxdist.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from jaxdist.errors import ConfigError, is_utf8, require_positive
from jaxdist.files import BYTE_ORDER_MARK, read_text_file
from jaxdist.generation import NO_TOKEN, Generator, Sampling, build_generator, bytes_per_token
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.runtime import processes
from jaxdist.runtime.devices import DeviceChoice, Devices, acquire_devices
from jaxdist.strategy import Dtype

from .cli import ProcessFlags
from .entry import SafeConsole, run_program
from .progress import Progress

MOST_PROMPT_BYTES = 2**26
TOGETHER = 256  # texts that are continued together, since the cache holds all of them
PROMPT_MULTIPLE = 16  # of positions to which prompts are padded: kernels like even lengths


@dataclass(frozen=True, kw_only=True)
class GenerateFlags(ProcessFlags):
    """Generate text from a trained model."""

    GROUPS: ClassVar[dict[str, str]] = {"temperature": "sampling", "mesh": "devices"} | ProcessFlags.GROUPS

    checkpoint: tyro.conf.Positional[str]
    """A run's folder, a checkpoint DIR[:STEP], or a folder of transformers."""
    trust: bool = False
    """Import the module of the class that a checkpoint names as its model, where it is not jaxdist's own."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text to continue; several are continued together."""
    prompts: str | None = None
    """A file with a prompt in each line (.jsonl: in the "prompt" of each line); - reads standard input."""
    max_new_tokens: int = 100
    """Tokens to add to each text, unless it ends before."""
    stop: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text ends before this."""
    tokenizer: str | None = None
    """A tokenizer.json, or `bytes`. Default: the one that belongs to the checkpoint."""
    temperature: float = Sampling.temperature
    """0 takes the likeliest token; above it, tokens are drawn."""
    top_k: int | None = None
    """Draw among the likeliest so many tokens."""
    top_p: float | None = None
    """Draw among the likeliest tokens that together have this probability."""
    seed: int = 0
    """Seed of the tokens that are drawn; the same on every mesh."""
    mesh: str = "1"
    """As in tp=2: weights and cache are split over tp (heads) and pp (layers), the cache over cp too (positions), texts
    over dp."""
    cp_kind: str = "ring"
    """How prompts attend over cp: ring, all-gather, ulysses, or usp-U, as in training."""
    dtype: Dtype | None = None
    """Dtype of weights, cache and arithmetic. Default: that of the checkpoint's parameters."""
    device: DeviceChoice = "auto"
    """auto simulates the mesh on the CPU where there are too few accelerators."""

    def sampling(self) -> Sampling:
        if self.seed and self.temperature == 0:
            reason = "must not be given: the likeliest token is taken, and nothing is drawn"
            raise ConfigError(f"--seed {self.seed} with --temperature 0", reason, "Add --temperature 1")
        return Sampling(self.temperature, self.top_k, self.top_p, self.seed)

    def texts(self) -> list[str]:
        """Every prompt, in order: those of the first process, whose standard input and files are read. Raises:
        ConfigError."""
        found = [
            *self.prompt,
            *([] if self.prompts is None or not processes.is_first() else read_prompts(self.prompts)),
        ]
        found = json.loads(processes.from_first("prompts", json.dumps(found)))
        if not found:
            raise ConfigError("no prompt", "there must be text to continue", "Give --prompt TEXT or --prompts FILE")
        if bad := [number for number, text in enumerate(found, 1) if not is_utf8(text)]:
            raise ConfigError(f"prompt {bad[0]}", "must be UTF-8", "Convert it")
        return found


def read_prompts(path: str) -> list[str]:
    """Raises: ConfigError naming the line that is no prompt."""
    most = MOST_PROMPT_BYTES
    text = sys.stdin.read(most + 1) if path == "-" else read_text_file("--prompts", Path(path), most)
    if len(text) > most:
        raise ConfigError(f"prompts={path!r}", f"must have at most {most:,} characters", "Divide them")
    text = text.removeprefix(BYTE_ORDER_MARK)
    lines = {number: line.removesuffix("\r") for number, line in enumerate(text.split("\n"), 1) if line.strip()}
    if not lines:
        raise ConfigError(f"prompts={path!r}", "must have a line", "Write a prompt on each line")
    if not path.lower().endswith(".jsonl"):
        return list(lines.values())
    found = []
    for number, line in lines.items():
        try:
            found.append(json.loads(line.removeprefix(BYTE_ORDER_MARK))["prompt"] + "")
            found[-1].encode()  # an escape can be half a character
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = f'line {number} must be {{"prompt": TEXT}} in JSON'
            raise ConfigError(f"prompts={path!r}", reason, "Correct it") from error
    return found


def main(flags: GenerateFlags, console: Console) -> int:
    require_positive("max_new_tokens", flags.max_new_tokens, 2**24)
    sampling, shape = flags.sampling(), parse_mesh(flags.mesh)
    flags.join(console)
    texts = flags.texts()
    devices = acquire_devices(shape.num_devices, flags.device)
    notes = SafeConsole(stderr=True, highlight=False, quiet=console.quiet)
    with Progress("checking the weights", quiet=console.quiet):
        weights = find_weights(flags.checkpoint, "checkpoint", trust=flags.trust)
    jax.config.update("jax_enable_x64", (flags.dtype or weights.dtype) == "float64")
    tokenizer, ends = find_tokenizer(flags.tokenizer, weights), weights.end_of_text()
    if flags.tokenizer is not None and (own := weights.tokenizer()) is not None and own.identity != tokenizer.identity:
        notes.print(f"[yellow]note:[/] --tokenizer {escape(flags.tokenizer)} is not the model's own", soft_wrap=True)
    if begin := weights.begin_of_text(tokenizer):
        notes.print(f"each prompt has {escape(' '.join(map(tokenizer.name, begin)))} before it", soft_wrap=True)
    if plain := [name for name in tokenizer.special if any(name in text for text in texts)]:
        said = f"{escape(', '.join(plain))} in a prompt is text here, and no special token"
        notes.print(f"[yellow]note:[/] {said}", soft_wrap=True)
    sizes = [len(encode(tokenizer, text, weights)) for text in texts]
    longest, room = max(sizes), weights.model.seq_len
    if longest >= room:
        raise ConfigError(
            f"a prompt of {longest:,} tokens",
            f"must leave one of the model's {room:,} positions to the next token",
            f"Shorten it to {room - 1:,} tokens",
        )
    capacity, num_new = min(longest + flags.max_new_tokens, room), min(flags.max_new_tokens, room - min(sizes))
    if longest + flags.max_new_tokens > room:
        text = f"the model has {room} positions: {room - longest} tokens are added to the longest prompt"
        notes.print(f"[yellow]note:[/] {text}")
    generator = build_generator(
        weights.model,
        make_mesh(shape, devices.devices),
        shape,
        dtype=flags.dtype or weights.dtype,
        num_texts=-(-min(len(texts), TOGETHER) // shape.batch_ranks) * shape.batch_ranks,
        capacity=capacity,
        sampling=sampling,
        cp_kind=flags.cp_kind,
        attention=weights.model.attention_for(
            "auto", devices.devices[0].platform, flags.dtype or weights.dtype, training=False, device=devices.devices[0]
        ),
    )
    notes.print(f"{escape(weights.about)}: {escape(weights.model.describe())}, {generator.dtype}", soft_wrap=True)
    notes.print(f"mesh {shape}: {devices.description}", soft_wrap=True)
    with Progress("reading the weights", quiet=console.quiet):
        params = weights.load(generator.abstract_params())
    programs, times, added = Programs.of(generator, params, longest, capacity, console), [], 0
    for first in range(0, len(texts), generator.num_texts):
        some = texts[first : first + generator.num_texts]
        prompts = [encode(tokenizer, text, weights) for text in some]
        streams = [TextStream(tokenizer, ends, flags.stop, prompt.tolist()) for prompt in prompts]
        try:
            times.append(generate(programs, prompts, num_new, streams, some, first, len(texts), console))
        except NotFinite as error:
            where = f"of prompt {first + error.row + 1}, after {error.num_new} new tokens"
            notes.print(f"[bold red]not continued:[/] the model's logits are not finite {where}", soft_wrap=True)
            return 1
        added += sum(len(stream.tokens) for stream in streams)
    report(notes, programs, devices, sizes, added, times)
    return 0


def find_tokenizer(asked: str | None, weights: Weights) -> Tokenizer:
    if asked == "bytes":
        return ByteTokenizer()
    if asked is not None:
        path = Path(asked)
        return BPETokenizer.load(path / TOKENIZER if path.is_dir() else path)
    if (found := weights.tokenizer()) is None:
        raise ConfigError(
            f"the checkpoint of {weights.about}",
            "it must say what its tokens mean, or have a tokenizer.json beside it",
            "Name its tokenizer, as in --tokenizer FILE or --tokenizer bytes",
        )
    return found


def encode(tokenizer: Tokenizer, text: str, weights: Weights) -> np.ndarray:
    tokens = tokenizer.encode([text])[0].astype(np.int64)
    tokens = np.concatenate([np.asarray(weights.begin_of_text(tokenizer), np.int64), tokens])
    if not len(tokens):
        raise ConfigError("an empty prompt", "a token must come before the next", "Write at least a word")
    if tokens.max() >= weights.model.vocab_size:
        raise ConfigError(
            f"token {tokens.max()} of a prompt",
            f"must be in the model's vocabulary of {weights.model.vocab_size} tokens",
            "Name the tokenizer that it was trained with",
        )
    return tokens


@dataclass
class NotFinite(Exception):
    """The logits of a prompt are not finite after `num_new` new tokens."""

    row: int
    num_new: int


@dataclass(frozen=True)
class Programs:
    """Both programs, compiled for prompts of at most `width` tokens, and texts of `capacity`, in `seconds`."""

    generator: Generator
    params: dict
    width: int
    capacity: int
    prefill: Callable
    decode: Callable
    seconds: float

    @classmethod
    def of(cls, generator: Generator, params: dict, longest: int, capacity: int, console: Console) -> "Programs":
        width = min(-(-longest // PROMPT_MULTIPLE) * PROMPT_MULTIPLE, capacity)
        tokens, numbers = (generator.put(np.ones((generator.num_texts, *more), np.int64)) for more in ((width,), ()))
        begun = time.perf_counter()
        with Progress("compiling", quiet=console.quiet):
            prefill = generator.prefill.lower(params, tokens, numbers, np.int32(0)).compile()
            decode = generator.decode.lower(params, generator.caches, numbers, numbers, np.int32(0)).compile()
        return cls(generator, params, width, capacity, prefill, decode, time.perf_counter() - begun)


def generate(
    programs: Programs,
    prompts: list[np.ndarray],
    num_new: int,
    streams: list[TextStream],
    texts: list[str],
    first: int,
    num_all: int,
    console: Console,
) -> list[float]:
    """Continue the prompts until each has ended or `num_new` tokens are added; print the text, streamed where there is
    one alone. first: the number of the first of them, of `num_all`. Returns the seconds of each token."""
    generator, params, number = programs.generator, programs.params, np.int32(first)
    lengths = np.ones(generator.num_texts, np.int64)
    lengths[: len(prompts)] = [len(prompt) for prompt in prompts]
    tokens = np.zeros((generator.num_texts, programs.width), np.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = prompt
    one = num_all == 1

    def write(text: str) -> None:
        if not console.quiet:
            console.file.write(text)
            console.file.flush()

    write(texts[0] if one else "")
    seconds, clock = [], time.perf_counter()
    text = "generating" if len(texts) == num_all else f"generating texts {first + 1:,} and on, of {num_all:,}"
    with Progress(text, quiet=one or console.quiet) as progress:
        found = programs.prefill(params, generator.put(tokens), generator.put(lengths), number)
        for step in range(num_new):
            new = fetch(found.tokens)
            seconds.append(time.perf_counter() - clock)
            clock = time.perf_counter()
            progress.update(step + 1, num_new)
            if bad := [row for row, stream in enumerate(streams) if new[row] == NO_TOKEN and not stream.done]:
                write("\n" if one else "")
                raise NotFinite(bad[0], len(streams[bad[0]].tokens))
            for row, stream in enumerate(streams):
                shown = stream.add(int(new[row]))
                if lengths[row] + step + 1 == programs.capacity:  # the model has no more positions
                    shown += stream.close()
                write(shown if one else "")
            if all(stream.done for stream in streams) or step + 1 == num_new:
                break
            at = np.minimum(lengths + step, programs.capacity - 1)  # of a text that is over, the last once more
            found = programs.decode(params, found.caches, found.tokens, generator.put(at), number)
    for text, stream in zip(texts, streams, strict=True):
        rest = stream.close()
        write(f"{rest}\n" if one else f"{text}{stream.text}\n\n")
    return seconds


def report(
    notes, programs: Programs, devices: Devices, sizes: list[int], num_new: int, times: list[list[float]]
) -> None:
    """How long it took, and what a token costs."""
    generator, others = programs.generator, [seconds for group in times for seconds in group[1:]]
    text = f"{len(sizes):,} prompts" if len(sizes) > 1 else "1 prompt"
    text += f" of {sum(sizes):,} tokens, {num_new:,} added; compiled in {programs.seconds:.1f} s"
    text += f"; first token after {1e3 * times[0][0]:.1f} ms"
    if others:
        slow = np.percentile(others, 95)
        text += (
            f", then {1e3 * statistics.mean(others):.1f} ms between tokens ({1e3 * slow:.1f} ms at the 95th "
            f"percentile), {num_new / sum(map(sum, times)):,.0f} tokens/s"
        )
    sent = bytes_per_token(generator.model, generator.shape, generator.dtype, generator.num_texts)
    if generator.shape.num_devices > 1:
        text += f"; each device sends {sent:,} bytes for a token of every text"
    if devices.simulated:
        text += ". The devices are simulated: their times are no speed"
    notes.print(text, soft_wrap=True)


if __name__ == "__main__":
    run_program(GenerateFlags, main, prog="generate")
