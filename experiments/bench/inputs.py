"""Token files of several sizes: opening, memory, tokens/s, share of a step."""

import tempfile
import time
from pathlib import Path

import jax
import numpy as np
from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.data.batches import Batches, Corpus, load_corpus
from jaxdist.data.prefetch import Prefetched
from jaxdist.data.tokens import CHUNK, SAMPLED_CHUNKS
from jaxdist.mesh import make_mesh
from jaxdist.runtime.devices import Devices, acquire_devices
from jaxdist.train.program import build_program

from .flags import BenchFlags
from .rows import Measured, Row
from .timing import resident_bytes, with_parallel

OPEN_SECONDS = 1.0
OPEN_BYTES = 64 << 20  # of memory, whatever the size of the file
READ_BATCHES = 200


def bench_input(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """What it costs to open token files and to read batches from them, and the part of a step that waits for input."""
    devices, rows = acquire_devices(2, flags.device), []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "tokens.bin")
        for gigabytes in sorted(flags.gigabytes):
            with console.status(f"{gigabytes:g} GB"):
                write_tokens(path, int(gigabytes * 1e9), config.model.vocab_size)
                rows += measure_input(f"{gigabytes:g} GB of tokens", path, config)
        console.print(
            f"Opening checks an even sample of at most {CHUNK * SAMPLED_CHUNKS:,} tokens. Read: {READ_BATCHES} batches "
            f"of {config.batch_size} x {config.model.seq_len} tokens from all over the file, by one thread. Memory: "
            "resident, from before opening to after the last batch. The files had just been written, and what of them "
            "the system still held in memory came from there."
        )
        shares = input_shares(load_corpus(str(path), config.model.vocab_size), flags, config, devices, console)
    return [*rows, *shares], devices


def write_tokens(path: Path, num_bytes: int, vocab_size: int) -> None:
    block = np.random.default_rng(0).integers(0, vocab_size, 5_000_000).astype("<u2")
    with open(path, "wb") as file:
        while num_bytes > 0:
            file.write(block[: num_bytes // 2].tobytes())
            num_bytes -= block.nbytes


def measure_input(name: str, path: Path, config: RunConfig) -> list[Row]:
    before, start = resident_bytes(), time.perf_counter()
    corpus = load_corpus(str(path), config.model.vocab_size)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)
    opened = time.perf_counter()
    batches[0].read()
    first = time.perf_counter()
    for step in range(READ_BATCHES):
        batches[step].read()
    seconds = time.perf_counter() - first
    speed = READ_BATCHES * config.batch_size * config.model.seq_len / seconds
    rows = [
        Row(f"{name}: tokens", corpus.num_train + corpus.num_held_out, ""),
        Row(f"{name}: open", opened - start, "s", target=OPEN_SECONDS),
        Row(f"{name}: first batch", first - opened, "s"),
        Row(f"{name}: read", speed, "tokens/s"),
    ]
    if before is not None:
        rows.append(Row(f"{name}: grown", resident_bytes() - before, "bytes", target=OPEN_BYTES))
    return rows


def input_shares(corpus: Corpus, flags: BenchFlags, config: RunConfig, devices: Devices, console: Console) -> list[Row]:
    """The part of a step's time that is spent on its input, prefetched and not."""
    config = with_parallel(config, "dp=2", {})
    program = build_program(config, make_mesh(config.parallel.mesh, devices.devices))
    step, state = program.compile_step(), program.init(config.seed)
    batches = Batches(corpus, config.batch_size, config.model.seq_len, config.seed)

    def make(index: int):
        return jax.block_until_ready(program.put(batches[index]))

    shares = {}
    num_steps = flags.repeats + 1  # the first batch has no step to hide behind, and is left out
    for name, depth in (("prefetched", 2), ("not_prefetched", 0)):
        waits, seconds = [], []
        with Prefetched(make, 0, num_steps if depth else 0, max(depth, 1)) as inputs:
            for index in range(num_steps):
                start = time.perf_counter()
                batch = next(inputs) if depth else make(index)
                waits.append(time.perf_counter() - start)
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                seconds.append(time.perf_counter() - start)
        shares[name] = sum(waits[1:]) / sum(seconds[1:])
    return [
        Row(f"input's share of a step, {name.replace('_', ' ')}", share, "share", simulated=devices.simulated)
        for name, share in shares.items()
    ]
