"""Where a run starts: at its first step, at its own newest checkpoint, or at another run's."""

import math
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import jax
import numpy as np
from flax.traverse_util import flatten_dict

from jaxdist.checkpoint.checkpoints import (
    FOLDER,
    BadCheckpoint,
    Checkpoints,
    Manifest,
    agreed,
    locate,
    made_in,
    newest_good,
)
from jaxdist.checkpoint.logical import PARAMS, abstract_logical, abstract_parameters, from_logical, to_logical
from jaxdist.checkpoint.trained import SOURCE, Weights, checkpointed_model, counters_of, with_zeros
from jaxdist.checkpoint.weights import COMPANIONS, TRAINING
from jaxdist.config import OptimizerConfig, RunConfig, renewed, to_dict
from jaxdist.errors import ConfigError, reason_of, require_within
from jaxdist.files import remove, set_aside
from jaxdist.mesh import MeshShape
from jaxdist.runtime.metrics import CONFIG, METRICS, PROCESSES, STOPPED, SUMMARY, holds_run, is_complete, read_config
from jaxdist.train.optimizer import learning_rate
from jaxdist.train.program import Program
from jaxdist.train.state import State
from jaxdist.values import fields_of


@dataclass(frozen=True)
class Progress:
    """What a run knows beside its state; with the seed, all that data order and reporting continue from.

    batch: the next one. It is ahead of the step where batches were skipped. recent: the losses spikes are judged by.
    """

    tokens: int = 0
    batch: int = 0
    num_skipped: int = 0
    roll_backs: int = 0
    first_loss: float | None = None
    recent: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Start:
    """The state after `step` steps, and how the run got there."""

    step: int
    state: State
    progress: Progress
    about: str


def about(config: RunConfig, data: dict, progress: Progress, source: dict | None = None) -> dict:
    """What a checkpoint says of the run that wrote it; with the `weights.Source` that its parameters once came from."""
    found = {"config": to_dict(config), "data": data, "progress": asdict(progress), "random": _random(config)}
    return found if source is None else found | {SOURCE: source}


def _random(config: RunConfig) -> dict:
    """All that random numbers follow from: keys are made from the seed and the step."""
    return {
        "seed": config.seed,
        "implementation": jax.config.jax_default_prng_impl,
        "partitionable": jax.config.jax_threefry_partitionable,
    }


def save(
    checkpoints: Checkpoints,
    program: Program,
    state: State,
    data: dict,
    progress: Progress,
    source: dict | None = None,
) -> None:
    """Start to save what comes after `state.step` steps."""
    step = int(state.step)
    checkpoints.save(step, to_logical(program, state), about(program.config, data, progress, source))


def find(
    checkpoints: Checkpoints, config: RunConfig, data: dict, fall_back: bool, warn: Callable[[str], None]
) -> Manifest | None:
    """The newest checkpoint of this very run. Raises: ConfigError where another run wrote it, naming what differs."""
    manifest = agreed(checkpoints, lambda: newest_good(checkpoints, warn, fall_back))
    if manifest is None:
        return None
    require_same_run(str(checkpoints.folder.parent), manifest.about.get("config"), config)
    random = manifest.about.get("random")
    if random != _random(config):
        raise ConfigError(
            f"out={str(checkpoints.folder.parent)!r}",
            f"random numbers must be made alike: its run has {random}, and this one {_random(config)}",
            "Use the same JAX settings",
        )
    require_same_data(checkpoints, manifest, data)
    before, here = manifest.table("data").get("eval_windows"), data.get("eval_windows")
    if before not in (None, here):
        warn(f"held-out losses up to step {manifest.step} are of {before} windows, and from there on of {here}")
    return manifest


def require_same_data(checkpoints: Checkpoints, manifest: Manifest, data: dict) -> None:
    """Raises: ConfigError where the run that wrote a checkpoint reads other data."""
    there = manifest.table("data")
    if there.get("fingerprint") != data["fingerprint"]:
        raise ConfigError(
            f"out={str(checkpoints.folder.parent)!r}",
            f"must hold a run on the same data: its run reads {there.get('source')}, and this one {data['source']}",
            "Give the same data, or start another run with restore",
        )


def require_data_of_complete(out: Path, data: dict) -> None:
    """`require_same_data` of a run that is complete: as its newest checkpoint says, where that can be read."""
    checkpoints = Checkpoints(out / FOLDER)
    for step in checkpoints.steps()[-1:]:
        with suppress(BadCheckpoint):
            manifest = checkpoints.manifest(step)
            require_same_data(checkpoints, manifest, data)


def find_other(text: str, config: RunConfig) -> tuple[Checkpoints, Manifest]:
    """The checkpoint that `restore=DIR[:STEP]` names; its model and optimiser must be this run's."""
    checkpoints, manifest = locate(text, "restore")
    if "progress" not in manifest.about:
        raise ConfigError(f"restore={text!r}", "must hold a run, and it holds parameters only", f"Use weights={text!r}")
    there = manifest.about.get("config")
    differing = differences(there, to_dict(config), only=("model", "optimizer.name"))
    differing = [line for line in differing if line.split(" ")[0] not in [f"model.{name}" for name in TRAINING]]
    if differing:
        raise ConfigError(f"restore={text!r}", f"must be of the same model: {'; '.join(differing)}", "Use the same")
    if manifest.step >= config.steps:
        raise ConfigError(
            f"restore={text!r}",
            f"the run must go beyond its step {manifest.step}, and ends at steps={config.steps}",
            "Use more steps",
        )
    return checkpoints, manifest


def rate_note(manifest: Manifest, config: RunConfig) -> str:
    """What must be said where a run that goes on from another's checkpoint has another learning rate; "" elsewhere."""
    found = manifest.table("config")
    optimizer = OptimizerConfig(**fields_of(OptimizerConfig, found.get("optimizer"), "optimizer"))
    if type(steps := found.get("steps")) is not int:
        raise BadCheckpoint(f"the manifest of step {manifest.step}", "its steps must be a whole number", "Use another")
    there = replace(config, optimizer=optimizer, steps=steps)
    before, here = (float(learning_rate(each)(np.float32(manifest.step))) for each in (there, config))
    if math.isclose(before, here, rel_tol=0.05):
        return ""
    why = "its course follows a run's lr, warmup_steps and steps"
    return f"the learning rate goes from {before:.2e} to {here:.2e}: {why}"


def restore(checkpoints: Checkpoints, manifest: Manifest, program: Program, *, same_run: bool) -> Start:
    """The state on this program's mesh, bit for bit, from whatever mesh wrote it."""
    wanted = abstract_logical(program)
    if not same_run:  # a loss scale belongs to a precision
        wanted = {name: x for name, x in wanted.items() if not name.startswith("scale.") or name in manifest.arrays}
    asked = f"checkpoint {checkpoints.path(manifest.step)}"
    try:
        progress = Progress(**fields_of(Progress, manifest.about["progress"], "its progress"))
        for name in ("tokens", "batch", "num_skipped", "roll_backs"):
            require_within(name, getattr(progress, name), 0, 2**62)
        written_on = MeshShape(**fields_of(MeshShape, manifest.about["config"]["parallel"]["mesh"], "its mesh"))
    except (KeyError, TypeError, ConfigError) as error:
        raise BadCheckpoint(asked, f"must say how far its run had got ({error})", "Use another checkpoint") from error
    counters: tuple[str, ...] = ()
    if not same_run:
        models = (program.config.model, checkpointed_model(checkpoints, manifest, program.config.model, trust=False))
        counters = tuple(name.removeprefix(PARAMS) for model in models for name in counters_of(model))
    foreign = manifest.arrays.keys() - wanted.keys()
    foreign = [name for name in foreign if same_run or not (name.startswith("scale.") or name.endswith(counters))]
    if foreign:
        raise BadCheckpoint(asked, f"must hold only arrays of this run, not {min(foreign)}", "Use another")
    there = {name: x for name, x in wanted.items() if name in manifest.arrays or not name.endswith(counters)}
    state = from_logical(program, with_zeros(checkpoints.restore(manifest, there), wanted))
    text = f"step {manifest.step} of {checkpoints.folder.parent}, written on {written_on}"
    if not same_run:  # batches of another size: the first of those that begin where the other run had got to
        rows = require_rows(asked, manifest.table("config").get("batch_size"))
        batch = -(-progress.batch * rows // program.config.batch_size)
        progress = replace(progress, batch=batch, recent=[], roll_backs=0)
    return Start(manifest.step, state, progress, text)


def require_rows(asked: str, rows) -> int:
    if type(rows) is not int or rows < 1:
        raise BadCheckpoint(asked, "its batch_size must be a whole number above 0", "Use another checkpoint")
    return rows


def require_clearable(out: Path, overwrite: bool) -> None:
    """Raises: ConfigError where there is a run in a folder and `overwrite` does not say that it may go."""
    if (holds_run(out) or made_in(out / FOLDER)) and not overwrite:
        raise ConfigError(
            f"fresh=True with out={str(out)!r}",
            "the folder must not hold a run yet, and it does",
            "Choose another folder, or add overwrite=True",
        )


def clear(out: Path, overwrite: bool) -> None:
    """Remove the run in a folder, and no file of others. Raises: as `require_clearable`."""
    require_clearable(out, overwrite)
    if not holds_run(out) and not made_in(out / FOLDER):
        return
    try:
        for path in (*made_in(out / FOLDER), *(out / PROCESSES).glob("[0-9]*.jsonl")):
            remove(path)
        for name in (CONFIG, METRICS, SUMMARY, STOPPED, *COMPANIONS):
            (out / name).unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(
            f"fresh=True with out={str(out)!r}",
            f"the run in it must be removed first, and cannot be ({error.filename}: {reason_of(error)})",
            "Choose another folder",
        ) from error
    for folder in (out / FOLDER, out / PROCESSES):
        with suppress(OSError):  # what others put there stays
            folder.rmdir()


def require_own_folder(out: Path, config: RunConfig, compiled: dict, warn: Callable[[str], None]) -> None:
    """That a folder with metrics in it is of this run. Raises: ConfigError.

    A damaged configuration is set aside where there is a checkpoint, whose manifest holds the same and will be asked.
    `warn` is told of settings that the run may go on with and that round its numbers otherwise. compiled: those of
    config.json that are not in a configuration.
    """
    try:
        there = read_config(out)
    except ConfigError as error:
        if not Checkpoints(out / FOLDER).steps():
            raise
        if os.path.lexists(out / CONFIG):
            warn(f"{error} It is kept as {set_aside(out / CONFIG, 'damaged').name}; the checkpoints say what ran")
        return
    require_same_run(str(out), there, config)
    if not is_complete(out) and (changed := other_rounding(there, to_dict(config) | compiled)):
        warn(f"the same run goes on, with sums that are rounded otherwise: {'; '.join(changed)}")
    if there["model"].get("source") not in (None, to_dict(config)["model"].get("source")):
        warn(f"the file that defines {there['model']['class']} has changed since this run began")


def is_how(name: str) -> bool:
    """Whether a setting says how a step is computed, and not what: sums may be rounded otherwise."""
    return name.startswith("parallel.") or name == "attention" or name.endswith(".exchange_room")


def other_rounding(there: dict, here: dict) -> list[str]:
    """What differs of all that says how a step is computed, and not what."""
    old, new = flatten_dict(there, sep="."), flatten_dict(here, sep=".")
    old = {name: renewed(name.removeprefix("parallel."), value) for name, value in old.items()}
    known = {name for name in old.keys() & new.keys() if is_how(name)}
    options = {name for name in old.keys() | new.keys() if name.startswith("compiler_options.")}
    return [
        f"{name.removeprefix('parallel.')} was {old.get(name)} and is {new.get(name)}"
        for name in sorted(known | options)
        if old.get(name) != new.get(name)
    ]


def begin(program: Program, weights: Weights | None = None) -> Start:
    """The first state, with fresh moments: of initial values, or of the parameters that a run is to start from."""
    if weights is None:
        return Start(0, program.init(program.config.seed), Progress(), "initial values")
    wanted = abstract_parameters(program.layout, program.mesh, program.config.precision)
    return Start(0, from_logical(program, weights.read(wanted)), Progress(), weights.about)


def require_same_run(out: str, there: dict | None, config: RunConfig) -> None:
    """Raises: ConfigError naming every setting that differs. The mesh and all of the strategy may."""
    if isinstance(there, dict):  # what runs of before did not say was as it is by default
        there = {"mask_documents": False, **there}
        if isinstance(optimizer := there.get("optimizer"), dict):
            there["optimizer"] = {**vars(OptimizerConfig()), **optimizer}
    differing = differences(
        there,
        to_dict(config),
        only=("model", "optimizer", "precision", "batch_size", "steps", "seed", "mask_documents"),
    )
    if differing:
        raise ConfigError(
            f"out={str(out)!r}",
            f"must hold a run of the same settings, or going on would make another run: {'; '.join(differing)}",
            "Give the same settings, choose another folder, or add restore=DIR to start from its checkpoint in another",
        )


def differences(there, here: dict, only: tuple[str, ...]) -> list[str]:
    """`optimizer.lr is 0.001 there and 0.003 here`, for every setting under the names in `only`."""
    if not isinstance(there, dict):
        return ["it does not say what its settings were"]
    old, new = flatten_dict(there, sep="."), flatten_dict(here, sep=".")
    if "model" in only and old.get("model.class") != new.get("model.class"):
        return [f"its model is {old.get('model.class', 'GPT-2')} there and {new.get('model.class', 'GPT-2')} here"]
    wanted = [
        name for name in old.keys() | new.keys() if any(name == top or name.startswith(f"{top}.") for top in only)
    ]
    return [
        f"{name} is {old.get(name)} there and {new.get(name)} here"
        for name in sorted(wanted)
        if old.get(name) != new.get(name) and name != "model.source" and not is_how(name)
    ]
