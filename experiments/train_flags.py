"""The flags of `train`, and what of them cannot work together."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import ClassVar, Literal

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.data.batches import EVAL_WINDOWS
from jaxdist.data.tokens import TokenDtype
from jaxdist.errors import MOST, ConfigError, is_utf8, require_positive
from jaxdist.models.base import Model
from jaxdist.models.declared import num_parameters
from jaxdist.models.lora import LoRA
from jaxdist.runtime import exporters, profile

from .cli import PLACEHOLDERS, CommonFlags, ProcessFlags
from .config_file import FileFlags
from .entry import flag_word

# Flags about the folder of a run.
OF_FOLDER = ("keep_last", "keep_every", "fresh", "fall_back", "profile", "tensorboard", "wandb")
COUNTS = dict.fromkeys(("eval_every", "checkpoint_every", "keep_last", "keep_every", "check_replicas_every"), MOST)
COUNTS |= {"eval_windows": 10**8, "metrics_port": 65_535, "prefetch": 10**4}


@dataclass(frozen=True)
class TrainFlags(CommonFlags, FileFlags, ProcessFlags):
    """Train a GPT on real text, on one device or any mesh."""

    COMMON: ClassVar[tuple[str, ...]] = (
        *CommonFlags.LAYOUT,
        *("model", "config", "data", "weights", "out", "batch_size", "steps", "lr", "lr_schedule", "dtype"),
        *("checkpoint_every", "eval_every", "device", "distributed"),
    )
    GROUPS: ClassVar[dict[str, str]] = {"data": "data", "out": "folder", "grace": "faults", "profile": "metrics"} | {
        "compiler_options": "compiler",
        "eval_every": "evaluation",
        "budget": "budget",
    }
    NOT_KEPT: ClassVar[frozenset[str]] = frozenset(
        {"config", "out", "profile", "fresh", "overwrite", "fall_back", "drill"}
        | {field.name for field in fields(ProcessFlags)}
    )

    data: str | None = None
    """Text file or folder, .npy / .bin tokens, what `prepare` made, or a mixture as in a.bin=0.7,b.npy=0.3.

    Default: the source of Python's standard library."""
    lr: float | None = None
    """Learning rate at the end of the warm-up, the highest. Default: 0.003 for a new model; --weights need one."""
    token_dtype: TokenDtype | None = None
    """Numbers in a .bin, where they are not plainly uint16."""
    prefetch: int = 2
    """Batches that are read and sent to the devices ahead, while a step computes."""
    out: str | None = None
    """Folder of the run: run.toml (for --config), config.json, metrics.jsonl, checkpoints/, on GPUs tuned/, and at the
    end summary.json (stopped.json where it was stopped before). The same command continues the run from its newest
    checkpoint."""
    checkpoint_every: int | None = None
    """Steps between checkpoints. One is made at the end and where the run is stopped in any case."""
    keep_last: int | None = 3
    """Checkpoints to keep; older ones are removed."""
    keep_every: int | None = None
    """Keep the checkpoints of every so many steps as well."""
    fresh: bool = False
    """Start at step 0, where --out holds no run; with --overwrite also where it does."""
    overwrite: bool = False
    """With --fresh: remove the run that --out holds."""
    restore: str | None = None
    """DIR[:STEP] of another run: start from its checkpoint, on this mesh and with these settings."""
    weights: str | None = None
    """Start at step 0 from these parameters: a folder of transformers, a run, or what `convert` made."""
    fall_back: bool = False
    """Where the newest checkpoint is damaged, continue from the newest good one."""
    grace: float = 30.0
    """Seconds after SIGTERM or Ctrl-C within which the step must end and its checkpoint be written."""
    on_nonfinite: Literal["stop", "skip", "roll-back"] = "stop"
    """What to do where a loss or gradient is NaN or infinite. No parameter is touched by it in any case."""
    on_spike: Literal["ignore", "stop", "roll-back"] = "ignore"
    """What to do where the loss jumps. roll-back: to the newest checkpoint, and past the batches since."""
    check_replicas_every: int | None = None
    """Steps between comparisons of everything that several ranks hold. Default: before each checkpoint."""
    stuck_after: float = 1800.0
    """Seconds without a finished step after which every process writes its stacks down and ends."""
    drill: str | None = None
    """Rehearse a fault, as in nan:step=5,rank=1,leaf=tokens (inf, flip, batch, stuck, slow, die, term, late, full)."""
    profile: str | None = None
    """START:END: trace these steps into OUT/profile, for Perfetto and XProf, and say what communication was exposed."""
    metrics_port: int | None = None
    """Serve this process's numbers to Prometheus at http://HOST:PORT/metrics; process I listens on PORT + I."""
    metrics_host: str = exporters.LOOPBACK
    """The address to listen on; 0.0.0.0 lets whoever reaches this machine read."""
    tensorboard: bool = False
    """Write TensorBoard's event files to OUT/tensorboard."""
    wandb: str | None = None
    """A project of Weights & Biases: write an offline run to OUT/wandb (`wandb sync` sends it)."""
    compiler_options: tuple[str, ...] = ()
    """Options of XLA for the step, as in xla_gpu_enable_latency_hiding_scheduler=true. `bench flags` tells
    which this jaxlib takes and what each gains. They may change the last bits of results."""
    eval_every: int = 50
    """Steps between held-out evaluations."""
    eval_windows: int = EVAL_WINDOWS
    """Held-out windows that an evaluation looks at, spread evenly over the held-out tokens."""
    budget: str | None = None
    """Dollars that all jobs in the spend log may cost together. Default: JAXDIST_BUDGET, else the log's ceiling."""
    price_per_hour: str | None = None
    """Dollars for one device, an hour. Turns the budget guard on, as every flag and variable here does."""
    max_hours: str | None = None
    """Longest time for this run, reserved before it starts. Default: as long as the rest of the budget pays for."""
    spend_log: str | None = None
    """Default: JAXDIST_SPEND_LOG, else spend.jsonl. `budget init` makes one."""

    def run_config(self) -> RunConfig:
        """The default rate is one for small models that begin from nothing, and ruins a trained one."""
        if self.lr is None and self.weights is not None:
            raise ConfigError(
                "--weights without --lr",
                f"trained weights must be given a rate of their own; the default, {OptimizerConfig.lr}, is for a small "
                "new model",
                f"Use --lr {published_rate(self.model_config())}, as published for models of this size",
            )
        if self.lr is None:
            return replace(self, lr=OptimizerConfig.lr).run_config()
        return super().run_config()

    def require_filled_in(self) -> None:
        """Refuse the placeholders of a command that `plan` printed, before this process joins others."""
        unfilled = [f"--{name} {word}" for name, word in PLACEHOLDERS.items() if getattr(self, name) == word]
        if unfilled:
            raise ConfigError(
                " and ".join(unfilled),
                "must be your own: `plan` wrote a placeholder, as it knows neither your tokens nor your storage",
                "Write --data my_tokens and --out /shared/runs/a, your own (a path of that very name: ./DATA, ./OUT)",
            )

    def check(self) -> None:
        """Refuse what cannot work, before anything is read. Raises: ConfigError."""
        for name, most in COUNTS.items():
            if (value := getattr(self, name)) is not None:
                require_positive(name, value, most)
        for package, flag in (("prometheus_client", "metrics_port"), ("tensorboardX", "tensorboard")):
            if getattr(self, flag) not in (None, False):
                exporters.require_package(package, flag_word(flag, None))
        if self.wandb is not None:
            exporters.wandb_settings(self.wandb)
        for refused in self._refused():
            raise ConfigError(*refused)

    def _refused(self) -> Iterator[tuple[str, str, str]]:
        """(asked, required and why, what would work)."""
        if self.metrics_port is None and self.metrics_host != TrainFlags.metrics_host:
            yield "--metrics-host without --metrics-port", "there must be a port", "Add --metrics-port 9100"
        for name in ("grace", "stuck_after"):
            if not 0 < getattr(self, name) < 1e9:
                flag = flag_word(name, None)
                yield f"{flag} {getattr(self, name)}", "must be a time in seconds, above 0", f"Use {flag} 60"
        for name in OF_FOLDER if self.out is None else ():
            if (value := getattr(self, name)) != getattr(TrainFlags, name):
                yield f"{flag_word(name, value)} without --out", "must have a run's folder", "Add --out runs/a"
        if self.profile is not None and profile.Window.parse(self.profile).first > (self.steps or math.inf):
            yield f"--profile {self.profile}", f"must begin by step {self.steps}, the last", "Name steps that it takes"
        if self.out == "":
            yield "--out ''", "must name a folder", "Name one"
        if self.weights is not None and self.restore is not None:
            reason = "must be one of them: the first starts a schedule anew, and the second goes on with one"
            yield "--weights with --restore", reason, "Give one of them"
        for name in ("out", "restore", "weights"):
            if not is_utf8(given := getattr(self, name) or ""):
                yield f"--{name} {given!r}", "its name must be UTF-8, as TensorStore requires", "Choose another folder"
        if self.checkpoint_every is not None and self.out is None:
            yield "--checkpoint-every without --out", "there must be a folder for checkpoints", "Add --out runs/a"
        if self.overwrite and not self.fresh:
            yield "--overwrite without --fresh", "must start anew, as it removes a run", "Add --fresh"
        if "roll-back" in (self.on_nonfinite, self.on_spike) and self.checkpoint_every is None:
            yield "roll-back without --checkpoint-every", "must have checkpoints", "Add --checkpoint-every 50"


def published_rate(model: Model) -> float:
    """The rate at which models of this size were fine-tuned: whole, 2e-5 up to 8B (Alpaca, Llama 2) and 1e-5 above
    (Alpaca 13B); their adapters, 2e-4 up to 13B and 1e-4 above (QLoRA, arXiv 2305.14314, appendix B)."""
    num = num_parameters(model, padded=True)
    if isinstance(model, LoRA):
        return 2e-4 if num < 20e9 else 1e-4
    return 2e-5 if num < 10e9 else 1e-5
