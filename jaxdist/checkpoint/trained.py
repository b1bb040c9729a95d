"""Trained parameters in a folder, whoever wrote it: their model, their tokenizer, and the arrays on any mesh."""

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import numpy as np

from jaxdist.checkpoint.checkpoints import FOLDER, BadCheckpoint, Checkpoints, Manifest, locate
from jaxdist.checkpoint.logical import PARAMS, named, unnamed
from jaxdist.checkpoint.weights import (
    is_folder_of_weights,
    model_differences,
    open_weights,
    read_weights,
    require_no_difference,
    source_of,
    stored_dtypes,
)
from jaxdist.data.prepared import TOKENIZER
from jaxdist.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file
from jaxdist.models.base import Model, declare, named_params
from jaxdist.models.huggingface import read_model
from jaxdist.models.registry import model_of

SOURCE = "source"  # of what a checkpoint says of itself: the files of weights that its parameters came from
GENERATION = "generation_config.json"


@dataclass(frozen=True)
class Weights:
    """Parameters that fit their model and are not read yet.

    dtype: the widest in which they are kept. read: of `params.*` by name, each with its dtype and sharding. source: the
    files they once came from (`jaxdist.checkpoint.weights.Source` as a dict), None where there are none. companions:
    the folder in which a tokenizer may be. data: what the run said of its tokens.
    """

    model: Model
    about: str
    dtype: str
    read: Callable[[dict[str, jax.ShapeDtypeStruct]], dict[str, jax.Array]]
    source: dict | None
    companions: Path
    data: dict

    def load(self, wanted: dict) -> dict:
        """A nested dict of shapes, dtypes and shardings -> the parameters."""
        return unnamed(PARAMS, wanted, self.read(named(PARAMS, wanted)))

    def tokenizer(self) -> Tokenizer | None:
        """What their tokens mean, None where nothing says so."""
        path = self.companions / TOKENIZER
        if self.data.get("tokenizer") == "bytes":
            return ByteTokenizer()
        return BPETokenizer.load(path, None) if path.exists() else None

    def begin_of_text(self, tokenizer: Tokenizer) -> tuple[int, ...]:
        """The tokens before a text: those that a tokenizer of others puts there; none in a run of ours."""
        return tokenizer.begin_of_text if isinstance(tokenizer, BPETokenizer) and not self.data else ()

    def end_of_text(self) -> tuple[int, ...]:
        """The tokens with which a text ends: of a run, of generation_config.json, of the config.json they came with."""
        found = [self.data.get("end_of_document")]
        path = self.companions / GENERATION
        texts = [read_text_file("settings of generation", path)] if path.exists() else []
        texts += [self.source["config"]] if self.source is not None else []
        for text in texts:
            try:
                ends = json.loads(text).get("eos_token_id")
            except (ValueError, AttributeError, RecursionError) as error:
                raise ConfigError(f"{GENERATION} in {self.companions}", "it is not JSON", "Fetch it again") from error
            found += ends if isinstance(ends, list) else [ends]
        return tuple(dict.fromkeys(end for end in found if type(end) is int))


def find_weights(path: str, parameter: str, model: Model | None = None) -> Weights:
    """What a path names: a folder of transformers, a run, or a checkpoint DIR[:STEP].

    model: the one they are to fit; else their own. Raises: ConfigError, which calls the path `parameter`, with a table
    of all that differs from the model.
    """
    if is_folder_of_weights(Path(path)):
        model = model or read_model(path)
        folder, places = open_weights(path, model)
        return Weights(
            model=model,
            about=f"the weights in {path}",
            dtype=str(np.result_type(*stored_dtypes(places, model).values())),
            read=lambda wanted: read_weights(path, model, wanted),
            source=asdict(source_of(folder)),
            companions=folder.path,
            data={},
        )
    checkpoints, manifest = locate(path, parameter)
    there = checkpointed_model(checkpoints, manifest)
    kept = {name: kind for name, kind in manifest.arrays.items() if name.startswith(f"{PARAMS}.")}
    if model is not None:
        require_no_difference(f"{parameter}={path!r}", _differences(there, model, kept))
    return Weights(
        model=model or there,
        about=f"the parameters of step {manifest.step} in {checkpoints.folder}",
        dtype=str(np.result_type(*(jax.numpy.dtype(dtype) for dtype, _ in kept.values()))),
        read=lambda wanted: checkpoints.restore(manifest, wanted, cast=True),
        source=manifest.about.get(SOURCE),
        companions=companions_of(checkpoints),
        data=manifest.about.get("data", {}),
    )


def _differences(there: Model, model: Model, kept: dict[str, list]) -> list[tuple[str, str, str]]:
    rows = model_differences(there, model)
    shapes = {f"{PARAMS}.{name}": list(param.shape) for name, param in named_params(declare(model))}
    for name, shape in shapes.items():
        if name not in kept:
            rows.append(("missing", name, f"the model has {shape}"))
        elif kept[name][1] != shape:
            rows.append(("different", name, f"{kept[name][1]}; the model has {shape}"))
    return rows + [("extra", name, str(shape)) for name, (_, shape) in kept.items() if name not in shapes]


def checkpointed_model(checkpoints: Checkpoints, manifest: Manifest) -> Model:
    """The model of a checkpoint. Raises: BadCheckpoint where it does not say."""
    try:
        return model_of(manifest.about["config"]["model"])
    except (KeyError, TypeError, AttributeError) as error:
        raise BadCheckpoint(
            f"checkpoint {checkpoints.path(manifest.step)}", "it does not say of which model it is", "Use another"
        ) from error


def companions_of(checkpoints: Checkpoints) -> Path:
    """The folder with what came with the parameters: the run's, or that of the checkpoints."""
    return checkpoints.folder.parent if checkpoints.folder.name == FOLDER else checkpoints.folder
