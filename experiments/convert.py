"""Carry weights between transformers' files and our checkpoints, to the bit, on any mesh.

python -m experiments.convert hf FOLDER --out CHECKPOINT      config.json and safetensors -> a checkpoint of step 0
python -m experiments.convert ours RUN --out FOLDER           a run, or a checkpoint DIR[:STEP] -> safetensors

Each process reads and writes only its own shards. Where transformers is installed, an import is compared with it.
"""

import importlib.util
import math
import shlex
from dataclasses import asdict, dataclass, replace
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from flax.traverse_util import unflatten_dict
from rich.console import Console
from rich.markup import escape

from jaxdist.checkpoint import safetensors
from jaxdist.checkpoint.checkpoints import Checkpoints, SaveFailed, require_savable
from jaxdist.checkpoint.logical import PARAMS, abstract_parameters, fetch
from jaxdist.checkpoint.trained import SOURCE, find_weights
from jaxdist.checkpoint.weights import (
    Source,
    copy_companions,
    has_metadata,
    in_our_names,
    open_weights,
    read_weights,
    source_from,
    source_of,
    stored_dtypes,
    widest,
    write_weights,
)
from jaxdist.commands import command_text, install_text
from jaxdist.config import OptimizerConfig, RunConfig, to_dict
from jaxdist.data.batches import random_batches
from jaxdist.errors import ConfigError, reason_of
from jaxdist.files import write_whole
from jaxdist.mesh import make_mesh, parse_mesh
from jaxdist.models.base import Model, declare
from jaxdist.models.huggingface import CONFIG, read_model, tensors_of
from jaxdist.params import named_params
from jaxdist.parity import forward_logits, observe
from jaxdist.placement import make_layout
from jaxdist.runtime import processes
from jaxdist.runtime.devices import DeviceChoice, Devices, acquire_devices
from jaxdist.runtime.metrics import holds_run
from jaxdist.strategy import ParallelConfig

from .cli import ProcessFlags
from .entry import run_program

PROVED_BYTES = 2 * 10**9  # of fp32 parameters: a proof holds several times as much
PROVED_TOKENS = 32  # of each sequence
NOISE = 1e-3  # of the largest gradient of all: below, a leaf is measured by this
TOLERANCE = 1e-3  # of the largest element of a leaf: what the rounding of fp32 makes of deep models is below it


@dataclass(frozen=True, kw_only=True)
class ConvertFlags(ProcessFlags):
    """From where, to where, through which devices."""

    path: tyro.conf.Positional[str]
    out: str
    """Folder to make."""
    mesh: str = ""
    """Devices that hold the parameters in between, as in dp=2,tp=2."""
    device: DeviceChoice = "auto"


@dataclass(frozen=True, kw_only=True)
class Hf(ConvertFlags):
    """Read a folder of transformers (config.json, safetensors) into a checkpoint."""

    prove: bool = False
    """Compare with transformers even where the model is large."""


@dataclass(frozen=True, kw_only=True)
class Ours(ConvertFlags):
    """Write a run's newest checkpoint, or DIR[:STEP], as a folder that transformers reads."""

    dtype: Literal["source", "float32", "bfloat16", "float16"] = "source"
    """Dtype of the file. source: that of the files from which the parameters came, or of the parameters."""
    trust: bool = False
    """Import the module of the class that a checkpoint names as its model, where it is not jaxdist's own."""


def main(flags: Hf | Ours, console: Console) -> int:
    flags.join(console)
    try:
        return import_weights(flags, console) if isinstance(flags, Hf) else export_weights(flags, console)
    except (OSError, SaveFailed) as error:
        path = getattr(error, "filename", None) or flags.out
        raise ConfigError(
            f"{path}", f"it cannot be read or written ({reason_of(error)})", "Give room or access"
        ) from error


def import_weights(flags: Hf, console: Console) -> int:
    model = read_model(flags.path)
    folder, places = open_weights(flags.path, model)
    dtypes = stored_dtypes(places, model)
    parallel, devices = placed_on(flags)
    jax.config.update("jax_enable_x64", np.dtype(np.float64) in dtypes.values())
    require_savable(flags.out)
    checkpoints = Checkpoints(flags.out)
    if checkpoints.steps() or holds_run(checkpoints.folder):
        raise ConfigError(f"--out {flags.out}", "must not hold a checkpoint or a run yet", "Choose another folder")
    arrays = read_weights(flags.path, model, abstract(model, parallel, devices, dtypes))
    if say_not_finite(arrays, console):
        proof = Proof("not proved: what parameters that are not finite compute cannot be compared")
    else:
        proof = prove(flags, model, parallel, devices)
    if proof.failed:
        console.print(f"[bold red]not converted:[/] {escape(proof.text)}", soft_wrap=True)
        return 1
    source = source_of(folder)
    about = {"config": {"model": to_dict(RunConfig(model, batch_size=1))["model"]}, SOURCE: asdict(source)}
    copy_companions(folder.path, checkpoints.folder)  # the checkpoint comes last: with it, the folder is whole
    if processes.is_first():
        write_whole(checkpoints.folder / CONFIG, source.config.encode())  # so that --model names it
    checkpoints.save(0, arrays, about)
    checkpoints.finish()
    console.print(escape(proof.text), soft_wrap=True)
    console.print(
        f"[bold]done[/]: {described(places.values())} in {escape(flags.out)}; train from them with", soft_wrap=True
    )
    there = shlex.quote(flags.out)
    console.print(f"  {command_text('train')} --model {there} --weights {there}", markup=False, soft_wrap=True)
    return 0


def export_weights(flags: Ours, console: Console) -> int:
    parallel, devices = placed_on(flags)
    weights = find_weights(flags.path, "path", trust=flags.trust)
    source = None if weights.source is None else source_from(weights.source)
    dtype = None if flags.dtype == "source" else safetensors.NAMES[jnp.dtype(flags.dtype)]
    # What adapters correct is rounded once, to what is written.
    files = [safetensors.DTYPES[name] for name in ([dtype] if dtype else dtypes_of(source))]
    dtypes = {name: widest(kept, *files) for name, kept in weights.dtypes.items()}
    jax.config.update("jax_enable_x64", np.dtype(np.float64) in dtypes.values())
    arrays = weights.read(abstract(weights.model, parallel, devices, dtypes))
    say_not_finite(arrays, console, None if flags.dtype == "source" else flags.dtype)
    write_weights(flags.out, weights.model, arrays, source, dtype, weights.write_companions)
    written = safetensors.open_folder(flags.out)
    console.print(
        f"[bold]done[/]: {described(written.tensors.values())} of {escape(weights.about)} in {escape(flags.out)}",
        soft_wrap=True,
    )
    return 0


def dtypes_of(source: Source | None) -> set[str]:
    """In which its files have parameters."""
    tables = [safetensors.parse(text) for text in source.headers.values()] if source else []
    return {entry.get("dtype") for table in tables for entry in table.values()} & {*safetensors.FLOATS}


def say_not_finite(arrays: dict[str, jax.Array], console: Console, dtype: str | None = None) -> list[str]:
    """Warn of parameters that are NaN or infinite, or become so in this dtype, and return their names: they are
    converted all the same."""
    is_finite = jax.jit(lambda x: jax.numpy.isfinite(x.astype(dtype or x.dtype)).all())
    finite = fetch({name: is_finite(x) for name, x in arrays.items()})
    if bad := [name for name, good in finite.items() if not good]:
        more = f" and {len(bad) - 3} more" if len(bad) > 3 else ""
        console.print(f"[yellow]warning:[/] not finite: {', '.join(bad[:3])}{more}", soft_wrap=True)
    return bad


def placed_on(flags: ConvertFlags) -> tuple[ParallelConfig, Devices]:
    """The mesh, over which everything is split that can be."""
    mesh = parse_mesh(flags.mesh)
    return ParallelConfig(mesh, zero=3 if mesh.dp > 1 else 0), acquire_devices(mesh.num_devices, flags.device)


def abstract(
    model: Model, parallel: ParallelConfig, devices: Devices, dtypes: dict[str, np.dtype]
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape, dtype and sharding of every parameter that has a dtype: counters have none."""
    mesh, layout = make_mesh(parallel.mesh, devices.devices), make_layout(model, parallel, parts(model, parallel))
    wanted = abstract_parameters(layout, mesh, "float32")
    return {n: jax.ShapeDtypeStruct(x.shape, dtypes[n], sharding=x.sharding) for n, x in wanted.items() if n in dtypes}


def parts(model: Model, parallel: ParallelConfig) -> tuple[int, ...]:
    return RunConfig(model, parallel, batch_size=rows(parallel)).part_layers


def rows(parallel: ParallelConfig) -> int:
    """The least batch that this mesh divides."""
    return parallel.mesh.replica * parallel.mesh.dp * parallel.num_microbatches


def described(tensors) -> str:
    tensors = list(tensors)
    count = sum(math.prod(stored.shape) for stored in tensors)
    return f"{count:,} parameters in {len(tensors)} tensors of {'/'.join(sorted({s.dtype for s in tensors}))}"


# ---------------------------------------------------------------------------------------------------------------------
# Proof
# ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Proof:
    """What a comparison with transformers said."""

    text: str
    failed: bool = False


def prove(flags: Hf, model: Model, parallel: ParallelConfig, devices: Devices) -> Proof:
    """Compare logits and every gradient with transformers on one batch in fp32, or say why that was not done."""
    missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
    size = 4 * sum(math.prod(tensor.shape) for tensor in tensors_of(model))
    if not has_metadata(open_weights(flags.path, model)[0].index):
        return Proof("not proved: the index of the weights has no metadata, and transformers does not read such")
    if missing:
        return Proof(f"not proved: {' and '.join(missing)} not installed ({install_text('oracle')})")
    if jax.process_count() > 1:
        return Proof("not proved: a proof holds the whole model, and this is one of several processes")
    if size > PROVED_BYTES and not flags.prove:
        return Proof(f"not proved: {size / 1e9:.1f} GB of parameters in fp32; --prove compares them all the same")
    from .oracles.huggingface import CausalLM

    try:
        theirs = CausalLM.load(flags.path, "float32")
    except Exception as error:  # whatever transformers raises for a config.json that its classes refuse
        return Proof(f"not proved: transformers does not read the folder ({reason_of(error)})")
    small = replace(model, seq_len=min(model.seq_len, PROVED_TOKENS))
    small = replace(small, dropout=0.0) if model.dropout else small
    config = RunConfig(small, parallel, OptimizerConfig(clip_norm=1e9), batch_size=2 * rows(parallel))
    [batch] = random_batches(config, 1)
    dtypes = {f"{PARAMS}.{name}": np.dtype(np.float32) for name, _ in named_params(declare(small))}
    arrays = read_weights(flags.path, small, abstract(small, parallel, devices, dtypes))
    whole = {name.removeprefix(f"{PARAMS}."): x for name, x in fetch(arrays).items()}
    logits = forward_logits(small, unflatten_dict(whole, sep="."), batch["inputs"], devices.devices[0])
    found = {"logits": gap(logits, theirs.logits(batch["inputs"]))}
    loss, gradients = theirs.gradients(batch)
    ours = observe(config, devices.devices, [batch], whole)
    found["loss"] = abs(ours.losses[0] - loss) / loss
    theirs_by_name = in_our_names(small, gradients)
    # A gradient that is 0 but for rounding (a router of one choice, what is before a projection of zeros) is noise.
    noise = NOISE * max(np.abs(gradient).max() for gradient in theirs_by_name.values())
    for name, gradient in theirs_by_name.items():
        # A key's bias shifts all scores of a query alike: its gradient is noise, and is measured by the query's.
        query = theirs_by_name[name.replace(".b_k[", ".b_q[")]
        found[name] = gap(ours.gradients[0][name][: len(gradient)], gradient, max(np.abs(query).max(), noise))
    worst = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    text = (
        f"logits, loss and {len(found) - 2} gradients compared with transformers on {batch['inputs'].size} tokens in "
        f"fp32: the largest difference is {found[worst]:.1e} of the largest element, in {worst}"
    )
    return Proof(text, failed=not found[worst] <= TOLERANCE)


def gap(ours: np.ndarray, theirs: np.ndarray, largest: float | None = None) -> float:
    """The largest difference, relative to the largest element of theirs unless another is given."""
    return float(np.abs(ours - theirs).max() / (np.abs(theirs).max() if largest is None else largest))


if __name__ == "__main__":
    run_program(Hf | Ours, main, "convert")
