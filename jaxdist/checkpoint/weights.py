"""Trained parameters in a folder, whoever wrote it: the model, its tokenizer, and the arrays on any mesh."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax

from jaxdist.checkpoint.checkpoints import find_step
from jaxdist.checkpoint.logical import PARAMS, named, unnamed
from jaxdist.data.prepared import TOKENIZER
from jaxdist.data.tokenizer import BPETokenizer, ByteTokenizer, Tokenizer
from jaxdist.errors import ConfigError
from jaxdist.models.base import Model
from jaxdist.models.registry import model_from_saved


@dataclass(frozen=True)
class Weights:
    """Parameters that can be read. about: for people. dtype: in which they are kept.

    load: shapes, dtypes and shardings as a nested dict -> arrays; each process reads its own shards alone. end_of_text:
    the tokens with which a text ends.
    """

    model: Model
    about: str
    dtype: str
    tokenizer: Tokenizer | None
    begin_of_text: tuple[int, ...]
    end_of_text: tuple[int, ...]
    load: Callable[[dict], dict]


def open_weights(path: str) -> Weights:
    """Those of a run's folder or its checkpoints, DIR[:STEP], the newest where no step is named.

    Raises: ConfigError where there are none; BadCheckpoint where they are damaged.
    """
    checkpoints, step = find_step(path, "checkpoint")
    manifest = checkpoints.check(step)
    about = manifest.about
    try:
        model, data = model_from_saved(about["config"]["model"]), about["data"]
    except (KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"checkpoint={path!r}", f"it does not say what its model is ({error!r})", "Use another"
        ) from error
    end = data.get("end_of_document")
    dtype = {kind for name, (kind, _) in manifest.arrays.items() if name.startswith(f"{PARAMS}.")}.pop()
    return Weights(
        model=model,
        about=f"step {manifest.step} of {checkpoints.folder.parent}",
        dtype=dtype,
        tokenizer=_tokenizer(data.get("tokenizer"), checkpoints.folder.parent / TOKENIZER),
        begin_of_text=(),
        end_of_text=() if end is None else (end,),
        load=lambda wanted: unnamed(PARAMS, wanted, checkpoints.restore(manifest, named(PARAMS, wanted))),
    )


def _tokenizer(kind: str | None, path: Path) -> Tokenizer | None:
    if kind == "bytes":
        return ByteTokenizer()
    return BPETokenizer.load(path, None) if path.exists() else None


def cast(params: dict, dtype: str) -> dict:
    """The parameters in another dtype, one array at a time: hardly more than both are held."""
    convert = jax.jit(lambda x: x.astype(dtype))
    return jax.tree.map(lambda x: x if x.dtype == dtype else convert(x), params)
