"""Checkpoints: one folder per step, atomic, with every byte accounted for.

    FOLDER/step_00000200/manifest.json    what it is, and the size and SHA-256 of every other file
    FOLDER/step_00000200/arrays/          Orbax: logical arrays, each process writing its own shards

A save writes into `step_00000200.partial` while training goes on, hashes it, writes the manifest, flushes everything
to the disk and only then takes the `.partial` away by one rename. So whatever kills a process, and wherever, a folder
named `step_*` is complete. Nothing in it is pickled and nothing read from it is run: the class that it names as
its model is imported only where it is jaxdist's own or somebody else named it too (`registry.model_of`).

Arrays have logical shapes (`jaxdist.checkpoint.logical`), so any mesh, ZeRO stage, schedule and number of processes can
read them.
"""

import hashlib
import itertools
import json
import logging
import os
import re
import sys
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, TypeVar

import jax
import orbax.checkpoint as ocp
import tensorstore

from jaxdist.errors import ConfigError, reason_of
from jaxdist.files import flush_folder, read_object, remove, set_aside, write_whole
from jaxdist.runtime import processes
from jaxdist.values import fields_of
from jaxdist.versions import versions

FORMAT = 1
FOLDER = "checkpoints"  # of a run's folder
MANIFEST, ARRAYS, PARTIAL = "manifest.json", "arrays", ".partial"
MAX_MANIFEST_BYTES = 64 * 2**20
_STEP = re.compile(r"step_(\d{8,})")


class BadCheckpoint(ConfigError):
    """A checkpoint that is damaged, incomplete or not one of ours; nothing was restored from it."""


class _SaidElsewhere(logging.Filter):
    """Orbax logs the traceback of every error that it raises too, and that `SaveFailed` says in a line."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and "orbax" in record.pathname)


logging.getLogger("absl").addFilter(_SaidElsewhere())


def _without_late_writes(show: Callable) -> Callable:
    """A hook for exceptions that nobody catches, less those of writes that end after one that failed: Orbax has closed
    the event loop by then, and TensorStore would print a traceback for each."""

    def hook(unraisable) -> None:
        if unraisable.object is not None or str(unraisable.exc_value) != "Event loop is closed":
            show(unraisable)

    return hook


sys.unraisablehook = _without_late_writes(sys.unraisablehook)


class SaveFailed(RuntimeError):
    """A checkpoint could not be written; the ones committed before it are untouched."""


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint is, read and checked without touching an array.

    about: what the run says of itself (configuration, data, counters); JSON values.
    arrays: name -> (dtype, shape). files: path -> (bytes, SHA-256). versions: of Python and the packages that wrote it.
    """

    step: int
    about: dict
    arrays: dict[str, tuple[str, list[int]]]
    files: dict[str, tuple[int, str]]
    versions: dict[str, str] = field(default_factory=versions)
    format: int = FORMAT

    def table(self, name: str) -> dict:
        """What the run says under a name of `about`; empty where there is none. Raises: BadCheckpoint for no table."""
        if isinstance(found := self.about.get(name, {}), dict):
            return found
        raise BadCheckpoint(
            f"the manifest of step {self.step}", f"its {name!r} must be a table", "Use another checkpoint"
        )

    @property
    def digest(self) -> str:
        """SHA-256 of all of it, which the file holds as its `hash`."""
        return _sealed(asdict(self))["hash"]


def require_savable(out: Path | str) -> None:
    """Refuse a folder under which Orbax would lose arrays. Raises: ConfigError.

    It takes a path for a pattern of names, and TensorStore takes it for a URL.
    """
    there = os.path.abspath(out)
    if found := "".join(sign for sign in "*?[#%\\" if sign in there):
        required = f"its path must have none of * ? [ # % \\ in it, and has {found}: no checkpoint could be saved"
        raise ConfigError(f"out={there!r}", required, "Name another folder")


class Checkpoints:
    """The checkpoints of one run. Every process of the run makes one and calls it at the same steps.

    Args:
        folder: of the run's checkpoints, on a file system that all processes share; made at the first save.
        keep_last: the newest ones that stay; None keeps all.
        keep_every: those of every so many steps stay as well.
        timeout: seconds until a save or restore that waits for another process gives up.
        warn: is told what went wrong beside a checkpoint that is committed all the same; from another thread.

    Raises: ConfigError where `folder` is there and is no folder.
    """

    def __init__(
        self,
        folder: Path | str,
        keep_last: int | None = None,
        keep_every: int | None = None,
        timeout: int = 600,
        warn: Callable[[str], None] = lambda text: None,
    ):
        self.folder, self.keep_last, self.keep_every = Path(folder).absolute(), keep_last, keep_every
        if os.path.lexists(self.folder) and not self.folder.is_dir():
            raise ConfigError(f"checkpoints in {self.folder}", "must be a folder", "Name a folder")
        self._warn = warn
        self._orbax = ocp.AsyncCheckpointer(_handler(), timeout_secs=timeout)
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._finishing: tuple[int, Future] | None = None

    # ---- save ----

    def save(self, step: int, arrays: dict[str, jax.Array], about: dict) -> None:
        """Start to save; returns once the arrays are copied to the host, so that they may be donated.

        Waits for an unfinished save first. Raises: SaveFailed, for that one or this one.
        """
        self.finish()
        if step in self.steps():  # the same answer on every process, since nothing is being committed
            return
        partial = self.path(step, PARTIAL)
        try:
            if processes.is_first():
                remove(partial)  # of a process that was killed
                partial.mkdir(parents=True)
            processes.barrier(f"save {step}")
            self._orbax.save(partial / ARRAYS, args=ocp.args.PyTreeSave(arrays))
        except (OSError, ValueError) as error:
            raise self._failed(step, error) from error
        shapes = {name: (str(x.dtype), list(x.shape)) for name, x in arrays.items()}
        self._finishing = step, self._pool.submit(self._finish, step, about, shapes)

    def wait(self) -> None:
        """Wait until the unfinished save is committed. Raises: SaveFailed, where it could not be."""
        if self._finishing is None:
            return
        (step, finishing), self._finishing = self._finishing, None
        if (error := finishing.exception()) is not None:  # of any kind: it was raised in another thread
            raise self._failed(step, error) from error

    def wait_if_failed(self) -> None:
        """`wait`, where it is known already that the unfinished save could not be committed."""
        if self._finishing is not None and self._finishing[1].done() and self._finishing[1].exception() is not None:
            self.wait()

    def finish(self) -> None:
        """Until the last save is committed, on all processes. Raises: SaveFailed on all where it could not be."""
        failure = None
        try:
            self.wait()
        except SaveFailed as error:
            failure = error
        said = processes.from_first("committed", str(failure or ""))
        if failure or said:
            raise failure or SaveFailed(said)

    def set_aside(self, step: int) -> None:
        """Take a damaged checkpoint out of the way, for a person to look at; a save of its step may then come."""
        set_aside(self.path(step), "damaged")

    def _finish(self, step: int, about: dict, shapes: dict) -> None:
        self._orbax.wait_until_finished()
        if processes.is_first():
            self._commit(step, about, shapes)
            self._thin_out()

    def _commit(self, step: int, about: dict, shapes: dict) -> None:
        partial = self.path(step, PARTIAL)
        require_whole_arrays(partial / ARRAYS, shapes)
        manifest = Manifest(step, about, shapes, _hash_files(partial, flush=True))
        for folder in (path for path in partial.rglob("*") if path.is_dir()):
            flush_folder(folder)
        write_whole(partial / MANIFEST, json.dumps(_sealed(asdict(manifest)), indent=1).encode())
        partial.rename(self.path(step))
        flush_folder(self.folder)

    def _failed(self, step: int, error: BaseException) -> SaveFailed:
        if processes.is_first():
            with suppress(OSError):
                remove(self.path(step, PARTIAL))
        return SaveFailed(f"the checkpoint of step {step} could not be written to {self.folder}: {reason_of(error)}")

    def _thin_out(self) -> None:
        """Remove what neither `keep_last` nor `keep_every` keeps, and what killed processes left of others.

        A folder is renamed first: never half a `step_*`. No save is under way here, so every `.partial` is a left one.
        What cannot be removed is told to `warn`: the checkpoint that was just committed is good.
        """
        try:
            for step in self.steps()[: -self.keep_last] if self.keep_last else []:
                if not (self.keep_every and step % self.keep_every == 0):
                    doomed = self.path(step, PARTIAL)
                    remove(doomed)
                    self.path(step).rename(doomed)
            for partial in self.folder.glob(f"step_*{PARTIAL}"):
                remove(partial)
        except OSError as error:
            self._warn(f"old checkpoints in {self.folder} could not be removed: {error}")

    # ---- restore ----

    def path(self, step: int, suffix: str = "") -> Path:
        return self.folder / f"step_{step:08d}{suffix}"

    def steps(self) -> list[int]:
        """Committed steps, oldest first. Nothing in them is read."""
        if not self.folder.is_dir():
            return []
        matches = [_STEP.fullmatch(path.name) for path in self.folder.iterdir() if path.is_dir()]
        return sorted(int(match[1]) for match in matches if match)

    def manifest(self, step: int) -> Manifest:
        """What the checkpoint says of itself; no other file is looked at. Raises: BadCheckpoint."""
        folder = self.path(step)
        if folder.is_symlink():
            raise _bad(folder, "it is a link")
        manifest = read_manifest(folder)
        if manifest.step != step:
            raise _bad(folder, f"its manifest is of step {manifest.step}")
        return manifest

    def require_files(self, manifest: Manifest) -> None:
        """That this process sees every file, at its size. Raises: BadCheckpoint naming the first that it does not."""
        folder = self.path(manifest.step)
        for name, (size, _) in manifest.files.items():
            try:
                found = os.stat(folder / name, follow_symlinks=False).st_size
            except OSError as error:
                raise _bad(folder / name, f"process {processes.index()} cannot see it ({error.strerror})") from error
            if found != size:
                raise _bad(folder / name, f"it has {found:,} bytes and {size:,} were written")

    def check(self, step: int) -> Manifest:
        """Read the manifest and hash every file against it. Raises: BadCheckpoint naming the file."""
        folder = self.path(step)
        manifest = self.manifest(step)
        found = _hash_files(folder)
        for name in sorted(manifest.files.keys() | found.keys()):
            if name not in found:
                raise _bad(folder / name, "the file is missing")
            if name not in manifest.files:
                raise _bad(folder / name, "the manifest does not list this file")
            (size, digest), (found_size, found_digest) = manifest.files[name], found[name]
            if found_size != size:
                raise _bad(folder / name, f"it has {found_size:,} bytes and {size:,} were written")
            if found_digest != digest:
                raise _bad(folder / name, "its SHA-256 is not the one that was written")
        return manifest

    def restore(
        self, manifest: Manifest, wanted: dict[str, jax.ShapeDtypeStruct], cast: bool = False
    ) -> dict[str, jax.Array]:
        """The arrays `wanted` names, each with its sharding, of a checkpoint that `check` has passed.

        cast: convert those that were written in another dtype. Raises: BadCheckpoint where a name or shape differs, or
        a dtype that is not to be converted; nothing has been read then.
        """
        folder = self.path(manifest.step)
        require_same_arrays(folder, manifest, wanted, cast)
        try:
            return self._orbax.restore(
                folder / ARRAYS,
                args=ocp.args.PyTreeRestore(
                    item=dict(wanted),
                    restore_args=jax.tree.map(
                        lambda x: ocp.ArrayRestoreArgs(sharding=x.sharding, global_shape=x.shape, dtype=x.dtype), wanted
                    ),
                    partial_restore=True,
                ),
            )
        except (jax.errors.JaxRuntimeError, MemoryError):  # no fault of the files
            raise
        except Exception as error:  # Orbax and TensorStore raise many kinds for a file that they cannot read
            require_whole_arrays(folder / ARRAYS, {name: manifest.arrays[name] for name in wanted})
            named = next((name for name in sorted(wanted, key=len, reverse=True) if name in str(error)), "unknown")
            raise _bad(folder / ARRAYS, f"array {named} cannot be read ({reason_of(error)})") from error


def locate(path: str, parameter: str) -> tuple[Checkpoints, Manifest]:
    """The committed checkpoint that DIR or DIR:STEP names, of a run's folder or of its checkpoints, every byte checked.

    Raises: ConfigError, which calls the path `parameter`.
    """
    folder, _, step = path.rpartition(":")
    if not folder or not step.isdigit() or Path(path).is_dir():  # a folder may be called 15:04:22
        folder, step = path, ""
    there = Path(folder)
    checkpoints = Checkpoints(there / FOLDER if (there / FOLDER).is_dir() else there)
    steps = checkpoints.steps()
    if not steps or (step and int(step) not in steps):
        found = f"it holds those of steps {', '.join(map(str, steps))}" if steps else "it holds no committed one"
        raise ConfigError(f"{parameter}={path!r}", f"there is no such checkpoint: {found}", "Name DIR or DIR:STEP")
    wanted = int(step) if step else steps[-1]

    def check() -> Manifest:
        try:
            return checkpoints.check(wanted)
        except BadCheckpoint as error:
            others = [other for other in steps if other != wanted]
            remedy = f"Name another, as {folder}:{others[-1]}" if others else "It is the only one there"
            raise BadCheckpoint(error.asked, error.required, remedy) from error

    return checkpoints, agreed(checkpoints, check)


def made_in(folder: Path) -> list[Path]:
    """What `Checkpoints` has made in a folder: committed steps, half-written ones, and those that were set aside."""
    return [path for path in folder.glob("step_*") if _STEP.match(path.name)]


Found = TypeVar("Found", bound="Manifest | None")


def agreed(checkpoints: Checkpoints, choose: Callable[[], Found]) -> Found:
    """The first process's choice, on all of them: it alone reads and hashes every file."""
    chosen: Any = None
    if processes.is_first():
        try:
            chosen = choose()
        except ConfigError as error:
            if jax.process_count() == 1:
                raise
            processes.from_first("checkpoint", "!" + "\n".join((str(error), "the first process says so", "See above")))
            raise
    said = processes.from_first("checkpoint", "" if chosen is None else f"{chosen.step} {chosen.digest}")
    if processes.is_first():
        return chosen
    if said.startswith("!"):
        raise BadCheckpoint(*said[1:].split("\n"))
    chosen = _same_here(checkpoints, *said.split()) if said else None
    return chosen


def _same_here(checkpoints: Checkpoints, step: str, digest: str) -> Manifest:
    """The checkpoint that the first process chose, as this process sees it. Raises: BadCheckpoint."""
    manifest = checkpoints.manifest(int(step))
    if manifest.digest != digest:
        raise BadCheckpoint(
            f"checkpoint {checkpoints.path(manifest.step)}",
            f"must be the same on all processes, and process {processes.index()} sees another than the first one does",
            "Name a folder on a file system that all processes share",
        )
    checkpoints.require_files(manifest)
    return manifest


def require_whole_arrays(folder: Path, arrays: Mapping[str, tuple[str, list[int]]]) -> None:
    """That the files in `folder` hold every element of every array, once: each chunk of its grid, and no other.

    Args: arrays: name -> (dtype, shape), all that was to be written.
    Raises: BadCheckpoint naming the first array that is not whole, and a part that is missing.
    """
    try:
        store = tensorstore.KvStore.open({"driver": "ocdbt", "base": f"file://{folder}/"}).result()
        found: dict[str, set[str]] = {}
        for key in store.list().result():
            name, _, part = key.decode().rpartition("/")
            found.setdefault(name, set()).add(part)
        for name, (_, shape) in arrays.items():
            if ".zarray" not in found.get(name, ()):
                raise _bad(folder, f"array {name} was not written")
            described = json.loads(bytes(store[f"{name}/.zarray"]))
            if described["shape"] != list(shape):
                raise _bad(folder, f"array {name} was written as {described['shape']} instead of {list(shape)}")
            counts = [-(-size // chunk) for size, chunk in zip(shape, described["chunks"], strict=True)]
            parts = {".".join(map(str, place)) or "0" for place in itertools.product(*map(range, counts))}
            if missing := sorted(parts - found[name]):
                count = f"{len(missing)} of its {len(parts)} parts are not there, part {missing[0]} among them"
                raise _bad(folder, f"array {name} is not whole: {count}")
            if foreign := sorted(found[name] - parts - {".zarray"}):
                raise _bad(folder, f"array {name} has a part that does not belong to it: {foreign[0]}")
    except (OSError, ValueError, KeyError) as error:
        if isinstance(error, BadCheckpoint):
            raise
        raise _bad(folder, f"its index cannot be read ({reason_of(error)})") from error


def read_manifest(folder: Path) -> Manifest:
    """What a checkpoint says of itself. Raises: BadCheckpoint where it is no manifest of ours or was changed."""
    path = folder / MANIFEST
    content = read_object(path, MAX_MANIFEST_BYTES, partial(_bad, path))
    if content.get("format") != FORMAT:
        raise _bad(path, f"it is not a manifest of format {FORMAT}")
    if content != _sealed(content):
        raise _bad(path, "its own hash does not fit: it was changed after it was written")
    content.pop("hash")
    try:
        manifest = Manifest(**fields_of(Manifest, content, "it"))
        if odd := [dtype for dtype, _ in manifest.arrays.values() if str(jax.numpy.dtype(dtype)) != dtype]:
            raise ValueError(odd[0])
    except (TypeError, ValueError) as error:
        raise _bad(path, f"it is not a manifest of format {FORMAT} ({error})") from error
    for name in map(PurePosixPath, manifest.files):
        if name.is_absolute() or ".." in name.parts:
            raise _bad(path, f"it lists {str(name)!r}, which lies outside of the checkpoint")
    return manifest


def require_same_arrays(
    folder: Path, manifest: Manifest, wanted: dict[str, jax.ShapeDtypeStruct], cast: bool = False
) -> None:
    """Raises: BadCheckpoint naming the first array that the checkpoint lacks or holds with another shape, or without
    `cast` another dtype."""
    for name, x in wanted.items():
        if name not in manifest.arrays:
            raise _bad(folder, f"it holds no array {name}", "Restore it into the model and optimiser that wrote it")
        dtype, shape = manifest.arrays[name]
        if (dtype, tuple(shape)) != (dtype if cast else str(x.dtype), x.shape):
            raise _bad(
                folder,
                f"its array {name} is {dtype}{shape}, and this run needs {x.dtype}{list(x.shape)}",
                "Restore it into the model and precision that wrote it",
            )


def newest_good(checkpoints: Checkpoints, warn: Callable[[str], None], fall_back: bool) -> Manifest | None:
    """The newest checkpoint, checked; with `fall_back` the newest good one, damaged ones named to `warn` and set aside.

    Raises: BadCheckpoint for the newest, unless told to fall back; for the oldest, where none is good.
    """
    steps, damaged = checkpoints.steps(), []
    for step in reversed(steps):
        try:
            manifest = checkpoints.check(step)
        except BadCheckpoint as error:
            if fall_back and step != steps[0]:
                damaged.append((step, str(error)))
                continue
            remedy = "Use fall_back=True for the newest good one"
            if step == steps[0]:
                remedy = "None older is there: use another folder, or fresh=True with overwrite=True to begin again"
            raise BadCheckpoint(error.asked, error.required, remedy) from error
        for bad, why in damaged:
            checkpoints.set_aside(bad)
            warn(f"passed over: {why}")
        return manifest
    return None


def _handler() -> ocp.PyTreeCheckpointHandler:
    """How Orbax writes. What it reads may be of any kind: a checkpoint says how it was written.

    Not compressed: fp32 values shrink by a twelfth, for a third of the time that writing takes. Where there is one
    process, one copy is written whole: to write a part of each, the first save compiles a program for every shape.
    """
    arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=processes.count() > 1)
    registry = ocp.type_handlers.create_type_handler_registry((jax.Array, arrays))
    return ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)


def _hash_files(folder: Path, flush: bool = False) -> dict[str, tuple[int, str]]:
    """path -> (bytes, SHA-256) of everything in a checkpoint but its manifest; with `flush`, forced to the disk."""
    paths = []
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise _bad(path, "it is neither a file nor a folder")
        if path.is_file() and path != folder / MANIFEST:
            paths.append(path)

    def digest(path: Path) -> tuple[int, str]:
        with path.open("rb") as file:
            if flush:
                os.fsync(file.fileno())
            return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()

    with ThreadPoolExecutor(max_workers=4) as pool:
        return {
            path.relative_to(folder).as_posix(): found
            for path, found in zip(paths, pool.map(digest, paths), strict=True)
        }


def _sealed(content: dict) -> dict:
    """The manifest's content with the SHA-256 of everything else in it."""
    rest = {key: value for key, value in content.items() if key != "hash"}
    return rest | {"hash": hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()}


def _bad(path: Path, reason: str, remedy: str = "Use another checkpoint"):
    return BadCheckpoint(f"checkpoint {path}", reason, remedy)
