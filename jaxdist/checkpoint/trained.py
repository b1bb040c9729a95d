"""Trained parameters in a folder, whoever wrote it: their model, their tokenizer, and the arrays on any mesh."""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxdist.checkpoint.checkpoints import FOLDER, BadCheckpoint, Checkpoints, Manifest, locate
from jaxdist.checkpoint.logical import PARAMS, named, unnamed
from jaxdist.checkpoint.safetensors import FILE
from jaxdist.checkpoint.weights import (
    Source,
    copy_companions,
    is_folder_of_weights,
    model_differences,
    open_weights,
    read_weights,
    require_no_difference,
    source_of,
    stored_dtypes,
    widest,
)
from jaxdist.commands import command_text
from jaxdist.data.batches import Source as DataSource
from jaxdist.data.prepared import TOKENIZER
from jaxdist.data.tokenizer import CONFIG as TOKENIZER_CONFIG
from jaxdist.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer, with_template
from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file, write_whole
from jaxdist.models.base import Model, declare
from jaxdist.models.huggingface import CONFIG, read_model
from jaxdist.models.lora import ADAPTERS, LoRA, adapted_paths
from jaxdist.models.registry import model_of
from jaxdist.parallel.low_rank import merged
from jaxdist.params import named_params
from jaxdist.runtime import processes
from jaxdist.values import fields_of

SOURCE = "source"  # of what a checkpoint says of itself: the files of weights that its parameters came from
GENERATION = "generation_config.json"
ELSEWHERE = ("pytorch_model.bin", "pytorch_model.bin.index.json", "adapter_model.safetensors")


@dataclass(frozen=True)
class Weights:
    """Parameters that fit their model and are not read yet.

    dtypes: in which they are kept, `params.*` by name. read: of `params.*` by name, each with its dtype and sharding.
    source: the files they once came from (`jaxdist.checkpoint.weights.Source` as a dict), None where there are none.
    companions: the folder in which a tokenizer may be. data: what the run said of its tokens. mask_documents: as in
    `RunConfig`, of the run.
    """

    model: Model
    about: str
    dtypes: dict[str, np.dtype]
    read: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    source: dict | None
    companions: Path
    data: dict
    mask_documents: bool = False
    trained_in: str | None = None  # the dtype of the run's arithmetic

    @property
    def dtype(self) -> str:
        """The widest in which they are kept."""
        return str(widest(*self.dtypes.values()))

    def load(self, wanted: dict) -> dict:
        """A nested dict of shapes, dtypes and shardings -> the parameters."""
        return unnamed(PARAMS, wanted, self.read(named(PARAMS, wanted)))

    def tokenizer(self) -> Tokenizer | None:
        """What their tokens mean, None where nothing says so."""
        path = self.companions / TOKENIZER
        if self.data.get("tokenizer") == "bytes":
            return ByteTokenizer()
        return BPETokenizer.load(path) if path.exists() else None

    def begin_of_text(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens before a text: those that stood before each document of the run's data, else the tokenizer's."""
        begin = self.data.get("begin_of_text")
        if begin is None:  # bare tokens do not say; the data of runs that did not record it had none
            return tokenizer.begin_of_text if self.data.get("tokenizer") is None else ()
        return tuple(begin)

    def end_of_text(self) -> tuple[int, ...]:
        """The tokens with which a text ends: of a run, of generation_config.json, of the config.json they came with.

        Raises: ConfigError where one of these is no number."""
        found = [self.data.get("end_of_document")]
        path = self.companions / GENERATION
        texts = [read_text_file("settings of generation", path)] if path.exists() else []
        texts += [self.source["config"]] if self.source is not None else []
        for text in texts:
            try:
                ends = json.loads(text).get("eos_token_id")
            except (ValueError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{GENERATION} in {self.companions}", "must be JSON", "Fetch it again") from error
            found += ends if isinstance(ends, list) else [ends]
        if bad := [end for end in found if end is not None and type(end) is not int]:
            raise ConfigError(
                f"eos_token_id {json.dumps(bad[0])} of {self.about}",
                "must be a token's number, or a list of them",
                "Correct it",
            )
        return tuple(dict.fromkeys(end for end in found if end is not None))

    def write_companions(self, folder: Path) -> None:
        """Put what goes with the parameters into a folder of transformers that has a config.json: the tokenizer, and in
        all files the tokens before and after a text as `begin_of_text` and `end_of_text` have them."""
        copy_companions(self.companions, folder)
        if not processes.is_first():
            return
        ends, end = self.end_of_text(), self.data.get("end_of_document")
        if end is not None:
            one_or_all = ends[0] if len(ends) == 1 else list(ends)
            _set_in(folder / CONFIG, {"eos_token_id": one_or_all})
            _set_in(folder / GENERATION, {"eos_token_id": one_or_all})
        path = folder / TOKENIZER
        if end is None or not path.exists():
            return
        tokenizer = BPETokenizer.load(path)
        begin = self.begin_of_text(tokenizer)
        names = [tokenizer.name(token) for token in begin]
        said: dict[str, str | bool] = {"eos_token": tokenizer.name(end)}
        if begin != tokenizer.begin_of_text:
            write_whole(path, with_template(path.read_bytes(), tuple(names)))
            said |= {"add_bos_token": len(names) == 1, "add_eos_token": False} | (
                {"bos_token": names[0]} if names else {}
            )
        if not (folder / TOKENIZER_CONFIG).exists():  # a class of some model would add tokens of its own
            said |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        _set_in(folder / TOKENIZER_CONFIG, said)
        if begin:
            _set_in(folder / CONFIG, {"bos_token_id": begin[0]})
            _set_in(folder / GENERATION, {"bos_token_id": begin[0]})


def _set_in(path: Path, values: dict) -> None:
    """Set values of a JSON file, which is made where it is missing and left as it is where it says the same."""
    found = json.loads(read_text_file("settings", path)) if path.exists() else {}
    if not isinstance(found, dict):
        raise ConfigError(f"{path.name} in {path.parent}", "must be a JSON object", "Fetch it again")
    if any(found.get(name) != value for name, value in values.items()):
        write_whole(path, (json.dumps(found | values, indent=2) + "\n").encode())


class Meaning(NamedTuple):
    """Whether the tokens of weights and of data are known to mean the same, known to mean other things, or None where
    one does not say; and why, for a person."""

    same: bool | None
    about: str


def compare_tokens(companions: Path, data: dict, source: DataSource) -> Meaning:
    """Compare what the tokens of a model and of data mean.

    companions, data: as in `Weights`. A tokenizer is the same where it gives a text the same tokens; what it puts
    around a text is the data's business.
    """
    path = companions / TOKENIZER
    theirs = data.get("tokenizer") or (str(path) if path.exists() else None)
    if theirs is None or source.tokenizer is None:
        silent = "the model does not say what its tokens mean" if theirs is None else f"{source.about} has bare tokens"
        return Meaning(None, f"{silent}: nothing shows that data and model have the same tokenizer")
    same = theirs == source.tokenizer
    if not same and "bytes" not in (theirs, source.tokenizer) and path.exists():
        same = BPETokenizer.load(path).identity == BPETokenizer.load(source.tokenizer_file).identity
    ours, files = source.tokenizer, (path, source.tokenizer_file)
    names = ["bytes" if name == "bytes" else f"of {file}" for name, file in zip((theirs, ours), files, strict=True)]
    return Meaning(same, f"the model's tokens are {names[0]}, and the data's are {names[1]}")


def require_same_tokens(asked: str, companions: Path, data: dict, source: DataSource) -> str:
    """What must be said of data that a model is to read; "" where both have the same tokenizer.

    Raises: ConfigError where they have two, of which `asked` is the data's flag.
    """
    found = compare_tokens(companions, data, source)
    if found.same is False:
        theirs = "bytes" if data.get("tokenizer") == "bytes" else companions / TOKENIZER
        raise ConfigError(
            asked,
            f"its tokens must mean what the model's do: {found.about}",
            f"Use what `{command_text('prepare')} --data TEXT --tokenizer {theirs} --out FOLDER` makes of the text",
        )
    return _begins_differ(companions, data, source) if found.same else found.about


def _begins_differ(companions: Path, data: dict, source: DataSource) -> str:
    """What must be said where other tokens stand before the data's documents than before the model's texts."""
    begin, path = data.get("begin_of_text"), companions / TOKENIZER
    if begin is None:
        known = data.get("tokenizer") is not None or not path.exists()
        begin = () if known else BPETokenizer.load(path).begin_of_text
    if source.begin_of_text in (None, tuple(begin)):
        return ""
    return (
        f"the model's texts begin with the tokens {list(begin)}, and the documents of {source.about} with "
        f"{list(source.begin_of_text)}: prepare them again with this version"
    )


def find_weights(path: str, parameter: str, model: Model | None = None, seed: int = 0, trust: bool = False) -> Weights:
    """What a path names: a folder of transformers, a run, or a checkpoint DIR[:STEP].

    model: the one they are to fit; else their own. Adapters are merged into the matrices that they correct unless the
    model has such too; those that it has and nobody trained are drawn from the seed. trust: import the class
    that a checkpoint names, whatever it is (`registry.model_of`). Raises: ConfigError, which calls the path
    `parameter`, with a table of all that differs from the model.
    """
    if isinstance(model, LoRA):
        found = _find(path, parameter, model.base, model, trust)
        return found if isinstance(found.model, LoRA) else with_adapters(found, model, seed)
    return _find(path, parameter, model, trust=trust)


def _find(path: str, parameter: str, model: Model | None, keep: LoRA | None = None, trust: bool = False) -> Weights:
    """The weights of `model`; those of `keep` where adapters are there."""
    if is_folder_of_weights(Path(path)):
        model = model or read_model(path)
        folder, places = open_weights(path, model)
        return Weights(
            model=model,
            about=f"the weights in {path}",
            dtypes=stored_dtypes(places, model),
            read=lambda wanted: read_weights(path, model, wanted),
            source=asdict(source_of(folder)),
            companions=folder.path,
            data={},
        )
    for name in ELSEWHERE:
        if (Path(path) / name).exists():
            required = f"must have its weights in {FILE}, and has {name}"
            raise ConfigError(f"{parameter}={path!r}", required, "Save the model whole with save_pretrained")
    checkpoints, manifest = locate(path, parameter)
    there = checkpointed_model(checkpoints, manifest, keep or model, trust)
    kept = {name: kind for name, kind in manifest.arrays.items() if name.startswith(f"{PARAMS}.")}
    wanted = model
    if isinstance(there, LoRA):
        wanted = keep or (model and replace(there, base=model))
    require_no_difference(f"{parameter}={path!r}", _differences(there, wanted or there, kept))
    precision = manifest.table("config").get("precision")
    found = Weights(
        model=wanted or there,
        about=f"the parameters of step {manifest.step} in {checkpoints.folder}",
        dtypes={name: jax.numpy.dtype(dtype) for name, (dtype, _) in kept.items()},
        read=lambda wanted: with_zeros(
            checkpoints.restore(manifest, {name: x for name, x in wanted.items() if name in kept}, cast=True), wanted
        ),
        source=fields_of(Source, manifest.table(SOURCE), "its source") if SOURCE in manifest.about else None,
        companions=companions_of(checkpoints),
        data=manifest.table("data"),
        mask_documents=manifest.table("config").get("mask_documents") is True,
        trained_in=precision.get("dtype") if isinstance(precision, dict) else None,
    )
    return without_adapters(found) if isinstance(found.model, LoRA) and keep is None else found


# ---------------------------------------------------------------------------------------------------------------------
# Adapters
# ---------------------------------------------------------------------------------------------------------------------


def with_adapters(weights: Weights, model: LoRA, seed: int) -> Weights:
    """Weights of `model.base` -> of `model`, its adapters as they begin."""

    def read(wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        ours = {name: x for name, x in wanted.items() if name in adapters}

        def draw(seed) -> dict[str, jax.Array]:
            values = named(PARAMS, model.initial_values(seed))
            return {name: values[name].astype(x.dtype) for name, x in ours.items()}

        drawn = jax.jit(draw, out_shardings={name: x.sharding for name, x in ours.items()})(np.uint32(seed))
        return weights.read({name: x for name, x in wanted.items() if name not in ours}) | drawn

    adapters = {f"{PARAMS}.{name}{part}" for _, name in adapted_paths(declare(model)) for part in (".a", ".b")}
    dtypes = weights.dtypes | dict.fromkeys(adapters, np.dtype(weights.dtype))
    return replace(weights, model=model, dtypes=dtypes, read=read)


def without_adapters(weights: Weights) -> Weights:
    """Weights of a `LoRA` -> of its base, every adapter added to the matrix that it corrects. Sends nothing."""
    model = weights.model
    adapter_of = {f"{PARAMS}.{name}": f"{PARAMS}.{adapter}" for name, adapter in adapted_paths(declare(model))}

    def parts(name: str, x: jax.ShapeDtypeStruct) -> dict[str, jax.ShapeDtypeStruct]:
        """The adapter of a matrix, split as it is."""
        shapes = dict(named_params(declare(model)))
        a, b = (shapes[f"{adapter_of[name]}{part}".removeprefix(f"{PARAMS}.")].shape for part in (".a", ".b"))
        spec = (*x.sharding.spec, *[None] * (len(x.shape) - len(x.sharding.spec)))
        specs = PartitionSpec(*spec[: len(a) - 1], None), PartitionSpec(spec[0], None, *spec[len(a) - 1 :])
        return {
            f"{adapter_of[name]}{part}": jax.ShapeDtypeStruct(
                shape, weights.dtypes[f"{adapter_of[name]}{part}"], sharding=NamedSharding(x.sharding.mesh, spec)
            )
            for part, shape, spec in zip((".a", ".b"), (a, b), specs, strict=True)
        }

    def read(wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
        adapters = {name: parts(name, x) for name, x in wanted.items() if name in adapter_of}
        found = weights.read(wanted | {name: x for each in adapters.values() for name, x in each.items()})
        for name, each in adapters.items():
            arrays = [found[name], *(found.pop(part) for part in each)]
            found[name] = _merge_into(arrays, model.scale)
        return found

    dtypes = {name: dtype for name, dtype in weights.dtypes.items() if f".{ADAPTERS}." not in name}
    return replace(weights, model=model.base, about=f"{weights.about}, adapters merged", dtypes=dtypes, read=read)


def _merge_into(arrays: list[jax.Array], scale: float) -> jax.Array:
    specs = tuple(x.sharding.spec for x in arrays)
    add = partial(merged, scale=scale, stacked=True)
    run = jax.shard_map(add, mesh=arrays[0].sharding.mesh, in_specs=specs, out_specs=specs[0], check_vma=True)
    return jax.jit(run, donate_argnums=0)(*arrays)


# ---------------------------------------------------------------------------------------------------------------------


def _differences(there: Model, model: Model, kept: Mapping[str, tuple[str, list[int]]]) -> list[tuple[str, str, str]]:
    rows = model_differences(there, model)
    shapes = {f"{PARAMS}.{name}": list(param.shape) for name, param in named_params(declare(model))}
    counters = counters_of(model) | counters_of(there)
    for name in sorted(shapes.keys() - counters):
        if name not in kept:
            rows.append(("missing", name, f"the model has {shapes[name]}"))
        elif kept[name][1] != shapes[name]:
            rows.append(("different", name, f"{kept[name][1]}; the model has {shapes[name]}"))
    extra = kept.keys() - shapes.keys() - counters
    return rows + [("extra", name, str(kept[name][1])) for name in sorted(extra)]


def counters_of(model: Model) -> set[str]:
    """`params.*` by name that count what a step did: no weights of a model's, and not in its files."""
    return {f"{PARAMS}.{name}" for name, param in named_params(declare(model)) if param.update == "count"}


def with_zeros(found: dict[str, jax.Array], wanted: dict[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays, and zeros for those that are wanted and not there."""

    def zeros(like: jax.ShapeDtypeStruct) -> jax.Array:
        return jax.jit(lambda: jax.numpy.zeros(like.shape, like.dtype), out_shardings=like.sharding)()

    return {name: found[name] if name in found else zeros(like) for name, like in wanted.items()}


def checkpointed_model(checkpoints: Checkpoints, manifest: Manifest, like: Model | None, trust: bool) -> Model:
    """The model of a checkpoint, as `model_of` makes it. Raises: BadCheckpoint where it does not say."""
    try:
        return model_of(manifest.about["config"]["model"], like, trust)
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"checkpoint {checkpoints.path(manifest.step)}", "must say which model it is of", "Use another checkpoint"
        ) from error


def companions_of(checkpoints: Checkpoints) -> Path:
    """The folder with what came with the parameters: the run's, or that of the checkpoints."""
    return checkpoints.folder.parent if checkpoints.folder.name == FOLDER else checkpoints.folder
