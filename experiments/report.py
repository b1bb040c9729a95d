"""A finished or running run, or several, as one HTML page that opens from disk: what was measured beside the plan.

python -m experiments.report runs/a --out report.html
python -m experiments.report runs/a runs/b runs/c       curves of several runs in the same charts
"""

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import tyro
from rich.console import Console
from rich.markup import escape

from jaxdist.commands import command_text
from jaxdist.config import RunConfig, to_dict
from jaxdist.errors import ConfigError, printable, reason_of
from jaxdist.files import read_regular
from jaxdist.plan.proof.compile import without_devices
from jaxdist.runtime.run_record import Run, labels, read_run

from . import config_file
from .entry import require_writable, run_program, write_output
from .progress import Progress
from .report_page import Entry, Verdict, page
from .report_predictions import config_of, predictions

VERIFY = "verify.json"  # in a run's folder: what `verify --json` writes
MOST_BYTES = 2**28


@dataclass(frozen=True)
class ReportFlags:
    """Make an HTML page of one run, or of several side by side."""

    runs: tyro.conf.Positional[tuple[str, ...]] = ()
    """Folders that `train --out` made, finished or not."""
    out: str = "report.html"
    """The page."""
    trust: bool = False
    """Import a model's module, and read a schedule's file, where a run's config.json names one."""


def main(flags: ReportFlags, console: Console) -> int:
    if not flags.runs:
        raise ConfigError("no run", "there must be a folder that `train --out` made", "Name one, as in runs/a")
    found = {os.path.realpath(run.folder): run for run in map(read_run, map(Path, flags.runs))}
    runs = [*found.values()]  # "a", "./a" and a link to it are one
    require_writable("--out", flags.out)
    without_devices(1)
    entries = []
    with Progress("reading runs", quiet=console.quiet) as progress:
        for number, (label, run) in enumerate(zip(labels([run.folder for run in runs]), runs, strict=True)):
            progress.update(number, len(runs))
            entries.append(make_entry(label, run, flags))
    write_output("--out", flags.out, page(entries))
    for entry in entries:
        console.print(f"{escape(entry.label)}: {entry.run.state}, {entry.run.steps.size} steps", soft_wrap=True)
        for each in entry.run.notes:
            console.print(f"[yellow]note:[/] {escape(printable(each))}", soft_wrap=True)
        if entry.predictions is None:
            console.print(f"[yellow]note:[/] nothing is predicted: {escape(entry.why_not)}", soft_wrap=True)
    console.print(f"wrote {flags.out}", markup=False, soft_wrap=True)
    return 0


def make_entry(label: str, run: Run, flags: ReportFlags) -> Entry:
    """All that is found out about a run; what cannot be is said."""
    reason, config, found = "", None, None
    try:
        config = config_of(run.config, flags.trust)
        found = predictions(config, run.config.get("attention") or "xla")  # written out, as on CPUs
    except (ValueError, TypeError, NotImplementedError) as error:  # settings of another version, or too large
        reason = str(error) if isinstance(error, ConfigError) else f"{type(error).__name__}: {reason_of(error)}"
    return Entry(label, run, found, reason, verdict_of(run, config))


# ---------------------------------------------------------------------------------------------------------------------
# Parity with one device
# ---------------------------------------------------------------------------------------------------------------------


def verdict_of(run: Run, config: RunConfig | None) -> Verdict:
    """What verify.json says of this configuration."""
    if config is None:
        return Verdict(None, "its configuration cannot be used here.")

    def quoted(name: str) -> str:
        return shlex.quote(str(run.folder / name))

    command = f"{command_text('verify')} --config {quoted(config_file.NAME)} --json {quoted(VERIFY)}"
    found = _verify_json(run)
    if found is None:
        return Verdict(None, "nobody has compared this layout with one device. To do so:", command)
    alike = [entry for entry in found if _is_of(entry.get("config"), config)]
    if not alike or type(alike[-1].get("ok")) is not bool:
        return Verdict(None, f"{VERIFY} is not of this configuration. To compare it:", command)
    return Verdict(alike[-1]["ok"], f"as {VERIFY} says.")


def _verify_json(run: Run) -> list[dict] | None:
    """The entries of verify.json; None where there is none that can be read."""
    try:
        found = json.loads(read_regular(run.folder / VERIFY, MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError):
        run.notes.append(f"{VERIFY} cannot be read")
        return None
    return [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []


def _is_of(there, config: RunConfig) -> bool:
    """Whether a verdict's configuration has this run's model, layout and precision."""
    here = json.loads(json.dumps(to_dict(config)))
    return isinstance(there, dict) and all(there.get(name) == here[name] for name in ("model", "parallel", "precision"))


if __name__ == "__main__":
    run_program(ReportFlags, main, "report")
