"""Seconds in which the planner finds a layout."""

import time

from rich.console import Console

from jaxdist.config import PrecisionConfig, RunConfig
from jaxdist.models.presets import PRESETS
from jaxdist.plan.hardware import Cluster, find_hardware
from jaxdist.plan.schedule_facts import schedule_facts
from jaxdist.plan.search import rank, search

from ..tables import Rows
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
    """Seconds to enumerate, score and rank; the first search, and one that knows its schedules and layers."""
    table = Rows("model", "devices", "layouts", "first s", "again s")
    rows = []
    for preset, nodes, batch_size in SEARCH_ROWS:
        base = RunConfig(PRESETS[preset], precision=PrecisionConfig("bfloat16"), batch_size=batch_size)
        cluster = Cluster(find_hardware("h100"), nodes)
        schedule_facts.cache_clear()
        seconds = []
        for _ in range(2):
            start = time.perf_counter()
            found = search(base, cluster, "cudnn")
            rank(found)
            seconds.append(time.perf_counter() - start)
        name = f"{preset} on {cluster.num_devices}"
        rows += [Row(f"{name}: search", seconds[0], "s"), Row(f"{name}: search again", seconds[1], "s")]
        table.add_row(preset, str(cluster.num_devices), f"{found.num_layouts:,}", *(f"{s:.2f}" for s in seconds))
    table.print(console)
    return rows, None, all(row.value <= SEARCH_SECONDS for row in rows if row.name.endswith("again"))
