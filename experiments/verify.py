"""Prove that a sharded run is the same computation as the one-device run: every leaf by name.

python -m experiments.verify --mesh dp=2,tp=2 --zero 2 --sp
python -m experiments.verify --all
python -m experiments.verify --oracle plain
"""

import dataclasses
import json
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import jax
from rich.console import Console
from rich.markup import escape

from jaxdist.config import RunConfig, to_dict
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError, require_positive
from jaxdist.parity import (
    PROOF_EPS,
    PROOF_LR,
    Difference,
    Observed,
    compare,
    in_float64,
    is_elementwise,
    observe,
    one_device,
    worst,
)
from jaxdist.runtime import processes
from jaxdist.runtime.devices import Devices, acquire_devices

from .cli import CommonFlags, ModelName, ProcessFlags, flag_words, refuse_ignored
from .config_file import FileFlags
from .entry import require_writable, run_program, write_output
from .oracles import OracleName, ask, require_known, starting_parameters
from .progress import Progress
from .settings import SETTINGS
from .strategies import EXPERTS, PIPELINES, STRATEGIES
from .tables import print_columns


@dataclass(frozen=True)
class VerifyFlags(CommonFlags, FileFlags, ProcessFlags):
    """Run the same batches on the mesh and on one device; compare losses, gradients, parameters and moments."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *CommonFlags.LAYOUT,
        *("model", "batch_size", "steps", "dtype", "all", "pipelines", "oracle", "only", "json"),
    )
    NOT_SHARED: ClassVar[frozenset[str]] = frozenset({"steps", "warmup_steps", "lr", "eps"})

    model: ModelName = "proof"
    batch_size: int = 48
    steps: int = 3
    warmup_steps: int = 0
    lr: float = PROOF_LR
    eps: float = PROOF_EPS
    all: bool = False
    """Run the whole table of named strategies instead of the one the flags describe; with --dtype all in that dtype."""
    pipelines: bool = False
    """Run every pipeline schedule at every size, with the other strategies mixed in."""
    oracle: OracleName = "none"
    """Compare with an independent model in float64 instead of one device: in plain jnp, or transformers' GPT-2 (AdamW
    alone)."""
    only: str = ""
    """With --all or --pipelines: the strategies whose name contains this text."""
    config: str | None = None
    """TOML or JSON file of settings, which flags override. Of steps, lr, warmup_steps and eps, which are a proof's own,
    only those in its section [verify] count."""
    json: str | None = None
    """Also write what was found to this file."""


@dataclass(frozen=True)
class Verdict:
    """One strategy's comparison with its reference."""

    name: str
    config: RunConfig
    run: Observed
    differences: list[Difference]

    @property
    def ok(self) -> bool:
        return all(difference.ok for difference in self.differences)


def main(flags: VerifyFlags, console: Console) -> int:
    # ---- check, before anything is traced ----
    flags.join(console)
    experts = [] if flags.oracle == "transformers" else EXPERTS  # whose oracle is of GPT-2
    strategies = (*((*STRATEGIES, *experts) if flags.all else ()), *(PIPELINES if flags.pipelines else ()))
    if strategies:
        used = {"all", "pipelines", "oracle", "only", "steps", "seed", "device", "json", "config", "dtype"}
        used |= {field.name for field in dataclasses.fields(ProcessFlags)}
        refuse_ignored(flags, used, "with --all or --pipelines the named strategies say what runs")
        require_positive("steps", flags.steps)
        dtype = None if flags.dtype == VerifyFlags.dtype else flags.dtype
        chosen = [(s.name, s.run_config(dtype, steps=flags.steps, seed=flags.seed)) for s in strategies]
        chosen = [(name, config) for name, config in chosen if flags.only in name]
        if flags.oracle != "none":
            chosen = [(name, config) for name, config in chosen if config.precision.dtype in ("float32", "float64")]
        if not chosen:
            raise ConfigError(f"--only {flags.only}", "must be part of a strategy's name", "Try --only zero3")
    else:
        if flags.only:
            raise ConfigError("--only alone", "must come with --all or --pipelines", "Add --all, or leave it out")
        config = flags.run_config()
        strategy = [setting for setting in SETTINGS if setting.section == "parallel" and setting.flag != "mesh"]
        chosen = [(" ".join([str(config.parallel.mesh), *flag_words(config, strategy)]), config)]
    count = max(config.parallel.mesh.num_devices for _, config in chosen)
    devices = acquire_devices(count, flags.device)
    report = flags.json if processes.is_first() else None
    require_writable("--json", report)
    console.print(f"devices: {devices.description}")
    if count == 1 and flags.oracle == "none":
        console.print("[yellow]note:[/] the mesh is one device, so nothing is sharded: try --mesh dp=2,tp=2")

    if any(not is_elementwise(config) and getattr(config.model, "num_experts", 0) for _, config in chosen):
        console.print("note: in 16 bits a token's experts are drawn, the same on every mesh (docs/proof.md)")

    # ---- run and compare ----
    verify = Verifier(devices, flags.steps, flags.oracle)
    verdicts = []
    with Progress("comparing strategies", quiet=console.quiet) as progress:
        for name, config in chosen:
            progress.update(len(verdicts), len(chosen))
            verdicts.append(verify(name, config))
            if not console.is_terminal:
                console.print(f"{'pass' if verdicts[-1].ok else 'FAIL'}  {name}", markup=False)

    # ---- report ----
    if not strategies:
        print_leaves(console, verdicts[0])
    print_summary(console, verdicts)
    for verdict in verdicts:
        for difference in verdict.differences:
            if not difference.ok:
                console.print(f"[red]{escape(verdict.name)}[/]: {escape(describe(difference))}")
    num_passed = sum(verdict.ok for verdict in verdicts)
    reference = "one device" if flags.oracle == "none" else f"the oracle ({flags.oracle})"
    console.print(f"{num_passed} of {len(verdicts)} strategies compute what {reference} computes")
    if report:
        write_output("--json", report, json.dumps([to_json(v) for v in verdicts], indent=1) + "\n")
    return 0 if num_passed == len(verdicts) else 1


class Verifier:
    """Compares runs with their one-device reference, or with an oracle, running each reference once."""

    def __init__(self, devices: Devices, steps: int, oracle: OracleName = "none"):
        self.devices, self.steps, self.oracle = devices, steps, oracle
        self.references: dict[RunConfig, Observed] = {}

    def __call__(self, name: str, config: RunConfig) -> Verdict:
        with jax.enable_x64(config.precision.dtype == "float64"):
            batches = random_batches(config, self.steps, config.seed + 1)
            reference, start = one_device(config), None
            if self.oracle != "none":
                require_known(self.oracle, config)
                start = starting_parameters(self.oracle, config)
            if reference not in self.references:
                self.references[reference] = (
                    self.observe(reference, batches) if start is None else ask(self.oracle, reference, batches, start)
                )
            run = self.observe(config, batches, start)
        exact = None if start is not None else partial(in_float64, config, self.devices.take(1), batches)
        return Verdict(name, config, run, compare(config, run, self.references[reference], exact))

    def observe(self, config: RunConfig, batches: list[dict], start: dict | None = None) -> Observed:
        """On every process of the run; a reference on each process alone."""
        return observe(config, self.devices.take(config.parallel.mesh.num_devices), batches, start)


STYLES = {"equal": "green", "DIFFERS": "bold red", "ok": "green", "FAIL": "bold red"}


def print_summary(console: Console, verdicts: list[Verdict]) -> None:
    """A row for each strategy."""
    gradients = [worst(verdict.differences, "gradient") for verdict in verdicts]
    columns = {
        "strategy": [verdict.name for verdict in verdicts],
        "mesh": [str(verdict.config.parallel.mesh) for verdict in verdicts],
        "loss": [f"{verdict.run.losses[0]:.6f}" for verdict in verdicts],
        "worst leaf": [gradient.name for gradient in gradients],
        "error": [f"{gradient.error:.1e}" for gradient in gradients],
        "allowed": [f"{gradient.tolerance:.0e}" for gradient in gradients],
        "state / device": [f"{verdict.run.state_bytes / 1024:,.0f} KiB" for verdict in verdicts],
        "sent / step": [f"{verdict.run.sent_bytes / 1024:,.0f} KiB" for verdict in verdicts],
        "verdict": ["equal" if v.ok else f"DIFFERS ({worst(v.differences).kind})" for v in verdicts],
    }
    left = ("strategy", "mesh", "worst leaf", "verdict")
    under = ("loss", "worst leaf", "allowed", "state / device", "sent / step")
    print_columns(console, columns, left=left, under=under, styles=STYLES)


def print_leaves(console: Console, verdict: Verdict) -> None:
    """Every compared value, one row each."""
    differences = verdict.differences
    columns = {
        "leaf": [d.name for d in differences],
        "what": [d.kind for d in differences],
        "error": [f"{d.error:.1e}" for d in differences],
        "allowed": [f"{d.tolerance:.0e}" for d in differences],
        "norm": [f"{d.norm:.8g}" for d in differences],
        "norm of the reference": [f"{d.reference_norm:.8g}" for d in differences],
        "": ["ok" if d.ok else "FAIL" for d in differences],
    }
    drop = ("norm of the reference", "norm")
    print_columns(console, columns, left=("leaf", "what", ""), drop=drop, styles=STYLES)


def describe(difference: Difference) -> str:
    return (
        f"{difference.kind} {difference.name}: error {difference.error:.2e}, allowed {difference.tolerance:.0e}; "
        f"norm {difference.norm:.8g}, of the reference {difference.reference_norm:.8g}"
    )


def to_json(verdict: Verdict) -> dict:
    return {
        "strategy": verdict.name,
        "config": to_dict(verdict.config),
        "ok": verdict.ok,
        "losses": verdict.run.losses,
        "state_bytes_per_device": verdict.run.state_bytes,
        "sent_bytes_per_step": verdict.run.sent_bytes,
        "differences": [dataclasses.asdict(d) for d in verdict.differences],
    }


if __name__ == "__main__":
    run_program(VerifyFlags, main, "verify")
