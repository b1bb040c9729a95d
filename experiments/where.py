"""Find where two configurations part: the first tensor that differs, on which ranks, and the collective before it.

python -m experiments.verify where --mesh dp=2,tp=2 --zero 3             # against the same on one device
python -m experiments.verify where "mesh=dp=2,tp=2 zero=3" "mesh=pp=2"   # A against B
"""

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import tyro
from flax.traverse_util import flatten_dict
from rich.console import Console
from rich.text import Text

from jaxdist.config import RunConfig, to_dict
from jaxdist.data.batches import random_batches
from jaxdist.divergence import FORWARD, Checked, Run, compare_steps, first_divergence
from jaxdist.errors import ConfigError, require_positive
from jaxdist.parity import PROOF_EPS, PROOF_LR, one_device
from jaxdist.runtime import processes
from jaxdist.runtime.devices import acquire_devices

from .cli import CommonFlags, ModelName, parse_settings
from .config_file import FileFlags, read_flags
from .settings import SETTINGS
from .tables import Rows

SHOWN_BEFORE, SHOWN_AFTER = 4, 2  # tensors around the first that differs


@dataclass(frozen=True)
class WhereFlags(CommonFlags, FileFlags):
    """Run A and B in step from the same parameters on the same batches, and name the first tensor that differs."""

    COMMON: ClassVar[tuple[str, ...]] = (*CommonFlags.LAYOUT, "sides", "model", "batch_size", "steps", "dtype")
    NOT_SHARED: ClassVar[frozenset[str]] = frozenset({"steps", "warmup_steps", "lr", "eps"})

    sides: tyro.conf.Positional[tuple[str, ...]] = ()
    """A and B: settings beside the flags, as in "mesh=dp=2,tp=2 zero=3", or a file of settings. A alone is compared
    with itself on one device; without A, the flags say what it is."""
    model: ModelName = "proof"
    batch_size: int = 16
    steps: int = 2
    warmup_steps: int = 0
    lr: float = PROOF_LR
    eps: float = PROOF_EPS


def main(flags: WhereFlags, console: Console) -> int:
    # ---- check, before anything is traced ----
    processes.require_alone()
    require_positive("steps", flags.steps)
    if len(flags.sides) > 2:
        raise ConfigError(f"{len(flags.sides)} sides to compare", "must be two", "Give A and B alone, each quoted")
    first, second = (*flags.sides, None, None)[:2]
    config = configuration(flags, first)
    other = one_device(config) if second is None else configuration(flags, second)
    require_same_training(config, other)
    meshes = [each.parallel.mesh.num_devices for each in (config, other)]
    devices = acquire_devices(max(meshes), flags.device)
    console.print(f"devices: {devices.description}")
    if second is None and config == other:
        console.print("[yellow]note:[/] both sides are one device: name a --mesh, or two sides")
    console.print(f"A: {layout_text(config)}\nB: {layout_text(other)}", markup=False)

    # ---- run in step ----
    with console.status("compiling with probes"):
        run, reference = (Run(each, devices.take(num)) for each, num in zip((config, other), meshes, strict=True))
    found, checked = None, []
    for number, batch in enumerate(random_batches(config, flags.steps, config.seed + 1)):
        with console.status(f"step {number + 1} of {flags.steps}"):
            checked = compare_steps(run.advance(batch), reference.advance(batch))
            found = first_divergence(checked)
        if found is not None:
            break

    # ---- report ----
    print_tensors(console, checked, found)
    console.print(Text(describe(found, run) if found else equal_text(checked, flags.steps)), soft_wrap=True)
    if run.skipped:
        names = ", ".join(sorted(run.skipped))
        console.print(f"not compared, since it cannot be told how ranks share them: {names}", markup=False)
    return 1 if found is not None else 0


def require_same_training(ours: RunConfig, theirs: RunConfig) -> None:
    """Refuse two runs whose settings lead to other numbers. Raises: ConfigError naming the first."""
    here, there = (flatten_dict(to_dict(each), sep=".") for each in (ours, theirs))
    for name in sorted(here.keys() | there.keys()):
        if here.get(name) != there.get(name) and not name.startswith(("parallel.", "precision.")):
            raise ConfigError(
                f"B: {name} is {there.get(name)}",
                f"must be {here.get(name)}, as in the other run: the two may differ only in layout and precision",
                f"Give both the same {name}",
            )


def configuration(flags: WhereFlags, side: str | None) -> RunConfig:
    """The flags, with what a side says on top. Raises: ConfigError."""
    if side is None:
        return flags.run_config()
    if side.endswith((".toml", ".json")):
        values = read_flags(WhereFlags, "verify where", side)
        return dataclasses.replace(flags, **values).run_config()
    return parse_settings(flags, "verify where", side).run_config()


def layout_text(config: RunConfig) -> str:
    """What may differ between A and B, as a side says it: "mesh=dp=2,tp=2 zero=3"."""
    values = {s.flag: s.of(config) for s in SETTINGS if s.section in ("parallel", "precision")}
    changed = [f"{name}={value}" for name, value in values.items() if value not in (getattr(CommonFlags, name), "")]
    return " ".join(changed) or "one device"


def print_tensors(console: Console, checked: list[Checked], found: Checked | None) -> None:
    """The tensors around the first that differs; where none does, those closest to it."""
    if found is None:
        worst = sorted(checked, key=lambda each: -each.error / (each.allowed or 1))[: SHOWN_BEFORE + 1]
        shown = [each for each in checked if each in worst]
    else:
        at = checked.index(found)
        shown = checked[max(at - SHOWN_BEFORE, 0) : at + 1 + SHOWN_AFTER]
    table = Rows("tensor", "phase", "layer", "error", "allowed", "verdict")
    for each in shown:
        layer = str(each.key.layer) if each.key.part == "layer" else each.key.part
        numbers = f"{each.error:.1e}", f"{each.allowed:.0e}"
        table.add_row(each.key.name, each.key.direction, layer, *numbers, "equal" if each.ok else "DIFFERS")
    styles = {"equal": "green", "DIFFERS": "bold red"}
    table.print(console, left=("phase", "layer", "verdict"), styles=styles)


def equal_text(checked: list[Checked], steps: int) -> str:
    return f"equal: {len(checked)} tensors in each of {steps} steps differ by no more than rounding"


def describe(found: Checked, run: Run) -> str:
    """One sentence for a divergence, one for the collective before it, and one for copies that are not equal."""
    key = found.key
    where = [f"step {found.step}"]
    where += [f"rows {ranges(found.rows)}"] if found.rows else []
    where += [f"layer {key.layer}"] if key.part == "layer" else []
    noun = key.name if key.direction in (FORWARD, key.name) else f"{key.direction} {key.name}"
    noun = f"the gradient of {key.name}" if key.direction == "backward" else noun
    how = f"differs{on_ranks(found.ranks, run)} by {found.error:.1e} (allowed {found.allowed:.0e})"
    text = f"{', '.join(where)}: {noun} {how}"
    text += f"; before it: {found.collective}" if found.collective else "; no collective stands before it"
    if found.unequal:
        text += f". {plural('Rank', list(map(str, found.unequal)))} should hold equal copies, and do not"
    return text + "."


def on_ranks(ranks: tuple[int, ...], run: Run) -> str:
    """As in " on rank 3 (dp=1,tp=1)"; "" where there is one rank."""
    if not ranks or run.mesh.num_devices == 1:
        return ""
    return (
        " on every rank" if len(ranks) == run.mesh.num_devices else f" on {plural('rank', [*map(run.name_of, ranks)])}"
    )


def plural(noun: str, names: list[str]) -> str:
    return f"{noun}{'s' * (len(names) > 1)} {' and '.join(filter(None, [', '.join(names[:-1]), names[-1]]))}"


def ranges(rows: tuple[int, ...]) -> str:
    """As in "0-3, 6"."""
    spans: list[list[int]] = []
    for row in rows:
        if spans and row == spans[-1][1] + 1:
            spans[-1][1] = row
        else:
            spans.append([row, row])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
