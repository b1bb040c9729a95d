"""Layouts a second that the planner enumerates, scores and ranks."""

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

SEARCH_ROWS = [("gpt2-124m", 1, 64), ("7b", 1, 512), ("7b", 8, 512), ("70b", 16, 512)]  # preset, nodes, sequences
SEARCH_SECONDS = 2.0  # for 10,000 layouts


def bench_search(flags: BenchFlags, config: RunConfig, console: Console) -> Measured:
    """Seconds to enumerate, score and rank; the first search of a process, and one that knows its schedules."""
    table = Rows("model", "devices", "layouts", "first s", "again s", "layouts/s")
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
        name, speed = f"{preset} on {cluster.num_devices}", found.num_layouts / seconds[0]
        rows += [Row(f"{name}: search", speed, "layouts/s"), Row(f"{name}: search again", seconds[1], "s")]
        table.add_row(
            preset, str(cluster.num_devices), f"{found.num_layouts:,}", *(f"{s:.2f}" for s in seconds), f"{speed:,.0f}"
        )
    table.print(console)
    fast = all(row.value > 10_000 / SEARCH_SECONDS for row in rows if row.unit == "layouts/s")
    return rows, None, fast
