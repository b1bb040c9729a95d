"""The command that runs a plan: launcher, layout, recipe, and words to fill in for what only the user knows."""

import math
import shlex
from dataclasses import dataclass

from jaxdist.commands import command_text
from jaxdist.config import RunConfig
from jaxdist.models.base import declare
from jaxdist.params import Param, named_params
from jaxdist.plan.explain import billions
from jaxdist.plan.hardware import Cluster
from jaxdist.plan.program_memory import ITEMSIZE, MOMENTS
from jaxdist.plan.recipe import GPT3_RATES, checkpoint_every

from .cli import PLACEHOLDERS, flags_of

CHIPS_OF_A_HOST = 8  # of a TPU, at most; a node of the hardware table is a whole slice


@dataclass(frozen=True)
class Command:
    """Parts of a shell's command (launcher, program, flags with their values), and where its numbers are from."""

    parts: tuple[str, ...]
    notes: tuple[str, ...]

    def __str__(self) -> str:
        return " ".join(self.parts)

    def lines(self, width: int) -> list[str]:
        """The same over lines of at most `width`, a backslash at the end of all but the last."""
        lines: list[str] = []
        for part in self.parts:
            if lines and len(lines[-1]) + len(part) + 3 <= width and not lines[-1].startswith("srun"):
                lines[-1] += " " + part
            else:
                lines.append("    " * bool(lines) + part)
        return [line + " \\" for line in lines[:-1]] + lines[-1:]


def make_command(
    config: RunConfig,
    cluster: Cluster,
    step_seconds: float,
    recipe_notes: list[str],
    rate_known: bool = True,
    data: str = PLACEHOLDERS["data"],
    weights: str | None = None,
) -> Command:
    """For one layout of a plan. recipe_notes: where the values of flags in `config` are from."""
    nodes, per_node = cluster.num_nodes, cluster.devices_per_node
    on_gpus = "TPU" not in cluster.hardware.title
    several = nodes > 1 if on_gpus else cluster.num_devices > CHIPS_OF_A_HOST
    every, why = checkpoint_every(checkpoint_bytes(config), nodes, cluster.num_devices, step_seconds, config.steps)
    parts, notes = [], []
    if nodes > 1 and on_gpus:
        parts += [f"srun --nodes {nodes} --ntasks-per-node {per_node} --gpus-per-node {per_node}"]
        notes += [
            "srun starts a process for every GPU; other launchers, and jobs that outlive their time limit: "
            "docs/cluster.md."
        ]
    elif several:
        notes += ["Start it on every host of the slice (docs/cluster.md)."]
    parts += [command_text("train")]
    parts += ["--distributed"] * several + ["--device gpu"] * on_gpus
    parts += [f"--data {shlex.quote(data)}", f"--out {PLACEHOLDERS['out']}", f"--checkpoint-every {every}"]
    parts += f" {' '.join(flags_of(config))}".replace(" --", "\n--").split("\n")[1:]
    parts += [f"--weights {shlex.quote(weights)}"] if weights is not None else []
    parts += [] if rate_known else ["--lr LR"]
    prepare = command_text("prepare").removeprefix("python -m ")
    notes += [
        *[f"{data}: your tokens ({prepare} makes them)."] * (data == PLACEHOLDERS["data"]),
        f"{PLACEHOLDERS['out']}: a folder for checkpoints{', on storage that all hosts share' * several}. train "
        "refuses such words until they are filled in.",
        *[f"{weights}: the folder or the checkpoint with the weights to begin with."]
        * (weights == PLACEHOLDERS["weights"]),
        *recipe_notes,
        f"--checkpoint-every {every}: {why}.",
    ]
    return Command(tuple(parts), tuple(notes))


UNKNOWN_RATE = (
    "--lr LR: the published table is of Adam; choose one for this optimiser (train refuses the word until it is a "
    "number)."
)
SMALLEST, LARGEST = GPT3_RATES[0][0], GPT3_RATES[-1][0]


def rate_note(rate: float, parameters: float) -> str:
    beyond = ", held at the end of the table" if not SMALLEST <= parameters <= LARGEST else ""
    return (
        f"--lr {rate:g}: GPT-3's for {billions(parameters)} parameters (arXiv 2005.14165, table 2.1, "
        f"interpolated{beyond}); AdamW, cosine to a tenth."
    )


def checkpoint_bytes(config: RunConfig) -> float:
    """Masters and moments."""
    narrow, wide = ITEMSIZE[config.precision.dtype], ITEMSIZE[config.precision.master_dtype]

    def bytes_each(param: Param) -> int:
        """Bytes of an element. Of matrices Muon keeps the momentum alone."""
        moments = 1 if config.optimizer.name == "muon" and param.matrix else MOMENTS.get(config.optimizer.name, 0)
        return narrow if param.frozen else wide * (1 + moments)

    return sum(math.prod(param.shape) * bytes_each(param) for _, param in named_params(declare(config.model)))
