"""A run of any terminal, as it goes: the panel of `train`, read from the run's folder.

python -m experiments.report live runs/a
python -m experiments.report live runs/a --once --svg panel.svg
"""

import io
import json
import math
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.live import Live

from jaxdist.errors import ConfigError, require_within
from jaxdist.runtime.metrics import METRICS, STOPPED, is_complete, read_config, read_metrics
from jaxdist.runtime.telemetry import PARTS

from .entry import require_writable, write_output
from .panel import RunPanel

SVG_WIDTH = 80  # characters
FONTS = re.compile(r"@font-face \{.*?\}\s*", re.DOTALL)  # of the network; any of the reader's will do


@dataclass(frozen=True)
class LiveFlags:
    """Show a run that goes on elsewhere."""

    run: tyro.conf.Positional[str]
    """Its folder (--out of train)."""
    every: float = 2.0
    """Seconds between two looks."""
    once: bool = False
    """Show how it stands, and end."""
    svg: str | None = None
    """Draw the panel into this file, as it is at the end."""


def main(flags: LiveFlags, console: Console) -> int:
    require_within("every", flags.every, 0.1, 3600)
    folder = Path(flags.run)
    require_writable("--svg", flags.svg)
    try:
        panel = panel_of(folder)
    except ConfigError as error:
        raise ConfigError(f"RUN {flags.run!r}", error.required, "Name the folder of a run") from error
    if panel.is_empty:
        reason = "a line of its metrics.jsonl must be whole and of this version"
        raise ConfigError(f"the run in {folder}", reason, "Wait for its first step, or use the version that ran it")
    if flags.once or not console.is_terminal:
        console.print(panel)
    else:
        with Live(panel, console=console, refresh_per_second=2) as live:
            ended = has_ended(folder)
            while not ended:
                time.sleep(flags.every)
                ended = has_ended(folder)  # asked before the last steps are read
                with suppress(ConfigError):  # it begins anew
                    panel = panel_of(folder)
                live.update(panel)
    if flags.svg is not None:
        picture = Console(record=True, width=SVG_WIDTH, file=io.StringIO())
        picture.print(panel)
        text = FONTS.sub("", picture.export_svg(title=f"jaxdist report live {folder.name}"))
        write_output("--svg", flags.svg, text)
    return 0


def has_ended(folder: Path) -> bool:
    return is_complete(folder) or (folder / STOPPED).exists()


def panel_of(folder: Path) -> RunPanel:
    """The run as its files have it now. Raises: ConfigError where it has no config.json."""
    config = read_config(folder)
    steps, compiled = config.get("steps"), config.get("compiled")
    planned = sum(x for x in compiled.values() if type(x) is int) if isinstance(compiled, dict) else 0
    simulated = "SIMULATED" in str(config.get("devices", ""))
    panel = RunPanel(str(folder), steps if type(steps) is int else 0, planned or None, simulated)
    for record in records(folder / METRICS):
        panel.update(record, [])
    return panel


def records(path: Path) -> Iterator[dict]:
    """The good lines that say what the panel shows: another version may have written others."""
    for _, line in read_metrics(path)[0]:
        if (record := shown_of(json.loads(line))) is not None:
            yield record


def shown_of(record: dict) -> dict | None:
    """What the panel shows of a line, each number a number (null: it was not finite); None where something is not."""
    numbers = {name: record[name] for name in (*NUMBERS, *OPTIONAL) if name in record}
    parts, norms = (record.get(name) for name in ("seconds", "grad_norms"))
    if not (numbers.keys() >= set(NUMBERS) and isinstance(parts, dict) and isinstance(norms, dict)):
        return None
    numbers, norms = ({name: as_number(value) for name, value in found.items()} for found in (numbers, norms))
    parts = {name: as_number(parts.get(name)) for name in (*PARTS, "total")}
    if None in (*numbers.values(), *norms.values(), *parts.values()) or not sum(parts.values()) < MOST:
        return None
    return {"step": record["step"], "seconds": parts, "grad_norms": norms, **numbers}


def as_number(value) -> float | None:
    if value is None:
        return math.nan
    return float(value) if type(value) in (int, float) and abs(value) < 1e300 else None


MOST = 1e9  # seconds
NUMBERS = ("loss", "grad_norm", "lr", "tokens_per_second")
OPTIONAL = ("held_out_loss", "loss_scale", "mfu", "hfu")
