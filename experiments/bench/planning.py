"""Seconds in which the planner finds a layout."""

import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

from rich.console import Console

from jaxdist.config import RunConfig
from jaxdist.models.presets import PRESETS
from jaxdist.plan.disk_cache import VARIABLE
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.search import rank, search
from jaxdist.strategy import PrecisionConfig

from .flags import BenchFlags
from .rows import Measured, Row

SEARCH_ROWS = [  # preset, nodes, sequences
    ("gpt2-124m", 1, 64),
    ("7b", 1, 512),
    ("7b", 8, 512),
    ("70b", 16, 512),
    ("llama3-8b", 128, 1024),
]
SEARCH_SECONDS = 1.0  # of each, once its layers are traced


def bench_search(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Seconds to enumerate, score and rank: the first search, the first of a process that finds on the disk what an
    earlier one traced, and one that knows its schedules and layers."""
    rows, before = [], os.environ.get(VARIABLE)
    with tempfile.TemporaryDirectory() as folder:
        os.environ[VARIABLE] = folder
        try:
            for sizes in SEARCH_ROWS:
                (devices, layouts, first, _), (*_, read, again) = (in_a_process(timed_twice, sizes) for _ in range(2))
                seconds = {"search": first, "search in another process": read, "search again": again}
                name = f"{sizes[0]} on {devices}"
                rows.append(Row(f"{name}: layouts", layouts, ""))
                for what, value in seconds.items():
                    target = SEARCH_SECONDS if what == "search again" else None
                    rows.append(Row(f"{name}: {what}", value, "s", target=target))
        finally:
            os.environ.pop(VARIABLE)
            os.environ |= {VARIABLE: before} if before is not None else {}
    return rows, None


def in_a_process(function, argument):
    """What it returns in a new process."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, argument).result()


def timed_twice(sizes: tuple[str, int, int]) -> tuple[int, int, float, float]:
    """(devices, layouts, seconds of a search, of the same again)."""
    preset, nodes, batch_size = sizes
    base = RunConfig(PRESETS[preset], precision=PrecisionConfig("bfloat16"), batch_size=batch_size)
    cluster = Cluster(find_hardware("h100"), nodes)
    seconds = []
    for _ in range(2):
        start = time.perf_counter()
        found = search(base, cluster, "cudnn")
        rank(found)
        seconds.append(time.perf_counter() - start)
    return cluster.num_devices, found.num_layouts, *seconds
