"""Weights of transformers' models in and out: each process reads and writes only the bytes of its own shards.

`jaxdist.models.huggingface` says which tensor holds which part of a parameter, and how its dims lie there. A tensor is
mapped memory, seen in our order of dims; a shard is an index into that. Nothing is pickled and nothing read is run.
"""

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import reduce
from pathlib import Path, PurePosixPath

import jax
import numpy as np

from jaxdist.checkpoint import safetensors
from jaxdist.checkpoint.logical import PARAMS
from jaxdist.checkpoint.safetensors import Folder, Stored
from jaxdist.errors import ConfigError, reason_of
from jaxdist.files import flush_folder, read_text_file, remove, write_whole
from jaxdist.models.base import Model
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.huggingface import (
    BUFFERS,
    CONFIG,
    HEAD,
    Tensor,
    config_of,
    in_full,
    model_from_config,
    read_model,
    tensors_of,
)
from jaxdist.runtime import processes
from jaxdist.values import fields_of

SUFFIX = ".safetensors"
MAX_FILE_BYTES = 5 * 10**9  # of an export that follows no source
MAX_ROWS = 20  # of a table of differences
COMPARED_ROWS = 1024  # of two tables at a time
# Copied from one folder to the other, where they are.
COMPANIONS = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
)


@dataclass(frozen=True)
class Source:
    """What a checkpoint remembers of the files it was made of, as they were written.

    config, index: texts (index: None where there was one file). headers: of each file, by its name.
    """

    config: str
    index: str | None
    headers: dict[str, str]


def copy_companions(here: Path, there: Path) -> None:
    """Copy the tokenizer and what else goes with the weights, where there is such."""
    if processes.is_first():
        there.mkdir(parents=True, exist_ok=True)
        for name in COMPANIONS:
            if (here / name).is_file():
                write_whole(there / name, (here / name).read_bytes())


def is_folder_of_weights(path: Path) -> bool:
    return path.is_dir() and any(os.path.lexists(path / name) for name in (safetensors.FILE, safetensors.INDEX))


def source_from(found: dict) -> Source:
    """The source that a checkpoint tells of, which may be anything. Raises: ConfigError where no folder can be it."""
    source = Source(**fields_of(Source, found, "its source"))
    try:
        for file, text in source.headers.items():
            if PurePosixPath(file).name != file or not file.endswith(SUFFIX):
                raise ValueError(f"{file!r} is not the name of a file of weights")
            size = safetensors.LENGTH_BYTES + len(text.encode()) + safetensors.data_bytes(text)
            safetensors.checked_header(Path(file), text, size)
        for found_here in (json.loads(source.config), safetensors.parse(source.index or "{}")):
            if not isinstance(found_here, dict):
                raise ValueError("a text is no object of JSON")
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        reason = f"the files that it says its weights came from must be such as safetensors writes ({reason_of(error)})"
        raise ConfigError("the checkpoint", reason, "Use another") from error
    return source


def has_metadata(index: str | None) -> bool:
    """Whether transformers can read an index: it asks for its `metadata`, which the format leaves out at will."""
    return index is None or "metadata" in safetensors.parse(index)


def source_of(folder: Folder) -> Source:
    return Source(read_text_file("the model in", folder.path / CONFIG), folder.index, folder.headers)


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def open_weights(path: Path | str, model: Model) -> tuple[Folder, dict[str, Stored]]:
    """(the folder, where each of the model's tensors is, by its full name).

    A folder of a GPT-2 may have learned more positions than the model uses: the first ones are taken. Raises:
    ConfigError with a table of what is missing, too much, or of another shape or dtype.
    """
    folder = safetensors.open_folder(path)
    there = {in_full(name, model): stored for name, stored in folder.tensors.items()}
    wanted = {tensor.name: tensor for tensor in tensors_of(model)}
    tied = HEAD in there and HEAD not in wanted and _is_tied(model)
    rows = model_differences(read_model(folder.path), model)
    for name in folder.tensors:
        if (full := in_full(name, model)) != name and full in folder.tensors and full in wanted:
            rows.append(("twice", full, f"also as {name}"))
    for name, tensor in wanted.items():
        if name not in there:
            rows.append(("missing", name, f"the model has {list(tensor.shape)}"))
        elif not _fits(tensor, there[name]) or there[name].dtype not in safetensors.FLOATS:
            found = there[name]
            wants = f"{' or '.join(safetensors.FLOATS)} {list(tensor.shape)}"
            rows.append(("different", name, f"{found.dtype} {list(found.shape)}; the model has {wants}"))
    for name, found in there.items():
        if name not in wanted and not BUFFERS.fullmatch(name) and not (tied and name == HEAD):
            rows.append(("extra", name, f"{found.dtype} {list(found.shape)}"))
    require_no_difference(f"weights in {folder.path}", rows)
    if tied:
        _require_same(folder.path, there[HEAD], next(there[t.name] for t in wanted.values() if t.path == "tokens"))
    return folder, {name: there[name] for name in wanted}


# What shapes training and no parameter that is trained.
TRAINING = ("dropout", "balance_loss", "z_loss", "capacity", "exchange_room")
FREE = ("seq_len", *TRAINING)


def model_differences(there: Model, model: Model) -> list[tuple[str, str, str]]:
    """Rows for `require_no_difference`: fields by which two models make something else of the same parameters."""
    if type(there) is not type(model):
        return [("different", "model", f"{type(there).__name__}; here {type(model).__name__}")]
    rows = []
    for name, value in vars(there).items():
        wanted = getattr(model, name)
        if isinstance(value, Model):
            rows += model_differences(value, wanted)
        elif value != wanted and name not in FREE:
            rows.append(("different", name, f"{value}; the model has {wanted}"))
    return rows


def require_no_difference(asked: str, rows: list[tuple[str, str, str]]) -> None:
    """rows: (kind, name, what differs). Raises: ConfigError with all of them in a table, but for very many."""
    if not rows:
        return
    lines = [f"  {kind:<9}  {name}: {text}" for kind, name, text in rows[:MAX_ROWS]]
    lines += [f"  and {len(rows) - MAX_ROWS} more"] if len(rows) > MAX_ROWS else []
    raise ConfigError(
        asked,
        f"they are not the model's: {len(rows)} differences\n" + "\n".join(lines) + "\nAll of it must agree",
        "Use the model that they were written for",
    )


def _fits(tensor: Tensor, stored: Stored) -> bool:
    if tensor.path == "positions" and len(stored.shape) == 2:
        return stored.shape[0] >= tensor.shape[0] and stored.shape[1:] == tensor.shape[1:]
    return stored.shape == tensor.shape


def _is_tied(model: Model) -> bool:
    return isinstance(model, GPT2Config) or model.tied


def _require_same(path: Path, head: Stored, table: Stored) -> None:
    """That a head which is written beside the table it is tied to is that table. Raises: ConfigError."""
    if (head.dtype, head.shape) == (table.dtype, table.shape):
        a, b = (x.map().view(np.uint8) for x in (head, table))
        steps = range(0, len(a), COMPARED_ROWS)
        if all(np.array_equal(a[n : n + COMPARED_ROWS], b[n : n + COMPARED_ROWS]) for n in steps):
            return
    raise ConfigError(
        f"weights in {path}", f"{HEAD} is tied to the token table and must equal it", "Set tie_word_embeddings false"
    )


def read_weights(path: Path | str, model: Model, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """The arrays `wanted` names (`params.tokens`, ...), each in its dtype and with its sharding, on any mesh.

    Padded rows of a vocabulary, which no file has, are 0. Raises: ConfigError, as `open_weights`, and nothing is read.
    """
    _, places = open_weights(path, model)
    parts = _by_parameter(model)

    def array(name: str, like: jax.ShapeDtypeStruct) -> jax.Array:
        read: dict[tuple, np.ndarray] = {}

        def shard(index: tuple[slice, ...]) -> np.ndarray:
            key = tuple((part.start, part.stop) for part in index)
            if key not in read:
                read[key] = _read_part(parts.get(name, []), places, like, index)
            return read[key]

        return jax.make_array_from_callback(like.shape, like.sharding, shard)

    return {name: array(name, like) for name, like in wanted.items()}


def _by_parameter(model: Model) -> dict[str, list[Tensor]]:
    """The tensors of each of our parameters, in the order of layers: `params.*` by name."""
    parts: dict[str, list[Tensor]] = {}
    for tensor in tensors_of(model):
        parts.setdefault(f"{PARAMS}.{tensor.path}", []).append(tensor)
    return parts


def _read_part(
    tensors: list[Tensor], places: Mapping[str, Stored], like: jax.ShapeDtypeStruct, index: tuple[slice, ...]
) -> np.ndarray:
    shape = [len(range(*part.indices(size))) for part, size in zip(index, like.shape, strict=True)]
    found = np.zeros(shape, like.dtype)
    for tensor in tensors:
        place = _place_in(index, tensor)
        if place is not None:
            values = seen_as_ours(tensor, places[tensor.name].map())[index[len(place) :]]
            found[place][: len(values)] = values  # padded rows stay 0
    return found


def _place_in(index: tuple[slice, ...], tensor: Tensor) -> tuple[int, ...] | None:
    """Where a tensor's layer (and expert) is in the part of our parameter that `index` takes; None where it is not."""
    starts = [part.start or 0 for part in index[: len(tensor.index)]]
    stops = [part.stop for part in index[: len(tensor.index)]]
    there = zip(tensor.index, starts, stops, strict=True)
    if any(at < start or (stop is not None and at >= stop) for at, start, stop in there):
        return None
    return tuple(at - start for at, start in zip(tensor.index, starts, strict=True))


def seen_as_ours(tensor: Tensor, stored: np.ndarray) -> np.ndarray:
    """A view of a tensor's memory as the part of our parameter that it holds."""
    return stored[: tensor.shape[0]].reshape(tensor.view).transpose(tensor.order)


def in_our_names(model: Model, theirs: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Arrays by transformers' names -> by ours, a layer at a time, as `jaxdist.parity.observe` has them."""
    found: dict[str, list[np.ndarray]] = {}
    for tensor in tensors_of(model):
        name = f"{tensor.path}[{tensor.index[0]}]" if tensor.index else tensor.path
        found.setdefault(name, []).append(seen_as_ours(tensor, theirs[tensor.name]))
    return {name: np.stack(parts) if len(parts) > 1 else parts[0] for name, parts in found.items()}


def widest(*dtypes: np.dtype) -> np.dtype:
    """The narrowest that holds every value of all: float32 of the two of 16 bits, for which NumPy has none."""
    return np.dtype(reduce(jax.numpy.promote_types, dtypes))


def stored_dtypes(places: Mapping[str, Stored], model: Model) -> dict[str, np.dtype]:
    """The dtype of each of our parameters that the files have, which holds every value of them: `params.*` by name."""
    found: dict[str, np.dtype] = {}
    for tensor in tensors_of(model):
        name, dtype = f"{PARAMS}.{tensor.path}", safetensors.DTYPES[places[tensor.name].dtype]
        found[name] = widest(found.get(name, dtype), dtype)
    return found


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def write_weights(
    out: Path | str,
    model: Model,
    arrays: Mapping[str, jax.Array | np.ndarray],
    source: Source | None = None,
    dtype: str | None = None,
    companions: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Write `params.*` (logical, on any mesh) as a folder that transformers reads; it must not be there yet.

    source: of what was imported: its files, names, dtypes and config are written again, so that what was not trained is
    the same to the byte. dtype: "BF16", say, for all; else the source's, or each array's own. Values are rounded to the
    nearest. companions: writes what else belongs into the folder, before it has its name. Nothing is left of a folder
    that could not be written whole. Raises: ConfigError, OSError.
    """
    out = Path(out)
    if os.path.lexists(out):
        raise ConfigError(f"out={str(out)!r}", "must not exist yet, and it does", "Choose another folder")
    kept = safetensors.NAMES[widest(*(np.dtype(x.dtype) for x in arrays.values()))]
    config = config_text(model, source, dtype, kept)
    headers = _headers(model, arrays, source, dtype)
    partial = out.with_name(out.name + ".partial")
    try:
        _write_folder(partial, model, arrays, source, headers, config)
        companions(partial)
        if processes.is_first():
            partial.rename(out)
            flush_folder(out.parent)
    except BaseException:
        if processes.is_first():
            with suppress(OSError):
                remove(partial)
        raise
    processes.barrier(f"committed {out.name}")


def _write_folder(
    partial: Path,
    model: Model,
    arrays: Mapping[str, jax.Array | np.ndarray],
    source: Source | None,
    headers: dict[str, str],
    config: str,
) -> None:
    if processes.is_first():
        remove(partial)
        partial.mkdir(parents=True)
        for file, text in headers.items():
            safetensors.allocate(partial / file, text)
    processes.barrier(f"allocated {partial.name}")
    places: dict = {}
    for file, text in headers.items():
        size = (partial / file).stat().st_size
        places |= {in_full(n, model): s for n, s in safetensors.checked_header(partial / file, text, size).items()}
    for name, tensors in _by_parameter(model).items():
        shards = _shards(arrays[name])
        for tensor in tensors:
            also = [HEAD] if tensor.path == "tokens" and _is_tied(model) else []
            for there in [tensor.name, *also]:
                if there in places:
                    _write_tensor(tensor, places[there], shards)
    processes.barrier(f"written {partial.name}")
    if processes.is_first():
        for file in headers:
            with open(partial / file, "rb") as written:
                os.fsync(written.fileno())
        if source is not None and source.headers == headers and has_metadata(source.index):
            index = source.index
        else:
            names = {file: _tensors(text) for file, text in headers.items()}
            index = safetensors.index_text(names, sum(map(safetensors.data_bytes, headers.values())))
            index = index if len(headers) > 1 else None
        if index is not None:
            write_whole(partial / safetensors.INDEX, index.encode())
        write_whole(partial / CONFIG, config.encode())


def _headers(
    model: Model, arrays: Mapping[str, jax.Array | np.ndarray], source: Source | None, dtype: str | None
) -> dict[str, str]:
    """File -> header of an export."""
    wanted = {tensor.name: tensor for tensor in tensors_of(model)}
    if source is None:
        tensors = {
            name: (dtype or safetensors.NAMES[np.dtype(arrays[f"{PARAMS}.{tensor.path}"].dtype)], tensor.shape)
            for name, tensor in wanted.items()
        }
        groups = safetensors.split_into_files(tensors, MAX_FILE_BYTES)
        files = dict(zip(safetensors.names_of_files(len(groups)), groups, strict=True))
        return {
            file: safetensors.header_text({name: tensors[name] for name in names}, {"format": "pt"})
            for file, names in files.items()
        }
    found, missing = {}, set(wanted)
    for file, text in source.headers.items():
        there, tensors = _tensors(text), {}
        for name, entry in there.items():
            full = in_full(name, model)
            missing.discard(full)
            if full in wanted:
                tensors[name] = (dtype or entry["dtype"], wanted[full].shape)
            elif full == HEAD and _is_tied(model):
                tensors[name] = (dtype or entry["dtype"], tuple(entry["shape"]))
        same = tensors == {name: (entry["dtype"], tuple(entry["shape"])) for name, entry in there.items()}
        metadata = safetensors.parse(text).get(safetensors.METADATA)
        found[file] = text if same else safetensors.header_text(tensors, metadata)
    require_no_difference("the files that the weights came from", [("missing", name, "") for name in sorted(missing)])
    return found


def _tensors(text: str) -> dict[str, dict]:
    return {name: entry for name, entry in safetensors.parse(text).items() if name != safetensors.METADATA}


def _write_tensor(tensor: Tensor, place: Stored, shards: list[tuple[tuple[slice, ...], np.ndarray]]) -> None:
    """Write what the shards have of it into the tensor's bytes."""
    ours = seen_as_ours(tensor, place.map("r+"))
    for index, values in shards:
        at = _place_in(index, tensor)
        if at is not None:
            rest = index[len(at) :]
            ours[rest] = values[at][: len(ours[rest])]


def _shards(x: jax.Array | np.ndarray) -> list[tuple[tuple[slice, ...], np.ndarray]]:
    """(index, values) of what this process holds of an array and no other writes."""
    if not isinstance(x, jax.Array):
        return [((slice(None),) * x.ndim, x)] if processes.is_first() else []
    return [(part.index, np.asarray(part.data)) for part in x.addressable_shards if part.replica_id == 0]


def config_text(model: Model, source: Source | None, dtype: str | None = None, kept: str = "F32") -> str:
    """The config.json of an export: the source's own where it describes the model. dtype: as in `write_weights`; kept:
    that of the arrays.

    A decoder that was trained on shorter sequences keeps the context of its source, since no parameter knows it; a
    GPT-2 has as many positions as it was trained with.
    """
    described = {"torch_dtype": safetensors.DTYPES[dtype or kept].name}
    if source is None:
        return _json(config_of(model) | described)
    config = json.loads(source.config)  # as `read_model` does: of a name that is there twice the last value counts
    there = model_from_config(config)
    changed = {}
    if isinstance(model, GPT2Config) and there.seq_len != model.seq_len:
        changed = {name: model.seq_len for name in ("n_positions", "n_ctx") if name == "n_positions" or name in config}
    elif model.seq_len > there.seq_len:  # trained on longer sequences than its source
        changed = {"max_position_embeddings": model.seq_len}
    if dtype is not None:
        known = [name for name in ("dtype", "torch_dtype") if name in config] or ["torch_dtype"]
        changed |= dict.fromkeys(known, safetensors.DTYPES[dtype].name)
    if model_differences(there, model):
        return _json(config_of(model) | described)
    return _json(config | changed) if changed else source.config


def _json(config: dict) -> str:
    return json.dumps(config, indent=2) + "\n"
