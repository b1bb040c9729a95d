"""What plans find out by tracing layers and by running schedules, kept on the disk for the next process.

A folder is named by what all of it follows from, the source of this package and the versions of what traces; a file in
it by the rest. Of a model whose code is not the package's nothing is kept. The folders are in $JAXDIST_CACHE, which may
be empty for none, or in jaxdist of $XDG_CACHE_HOME or ~/.cache. They may be removed at any time; a file that cannot be
read or written costs the time to make it again.
"""

import contextlib
import hashlib
import io
import os
import shutil
import zipfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TypeVar

import numpy as np

from jaxdist.files import read_regular, write_whole
from jaxdist.versions import source_digest, versions

T = TypeVar("T")  # a NamedTuple of arrays

VARIABLE = "JAXDIST_CACHE"
VERSIONS_KEPT = 4  # of the package's source, the last used
MOST_BYTES = 2**24  # of a file


def cached_arrays(name: str, kind: type[T], make: Callable[[], T]) -> T:
    """`make()`, a tuple of arrays of this kind, or what it gave in an earlier process under the same name."""
    kept = read_arrays(name, kind._fields)
    if kept is not None:
        return kind(**kept)
    found = make()
    write_arrays(name, found._asdict())
    return found


def read_arrays(name: str, arrays: Sequence[str]) -> dict[str, np.ndarray] | None:
    """The arrays of a file; None where there is none, or a damaged one."""
    folder = _folder()
    if folder is None:
        return None
    try:
        with np.load(io.BytesIO(read_regular(folder / f"{name}.npz", MOST_BYTES)), allow_pickle=False) as found:
            return {each: found[each] for each in arrays}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile):
        return None


def write_arrays(name: str, arrays: dict[str, np.ndarray]) -> None:
    """Where there is a place for them: neither a full disk nor a folder of somebody else's is an error."""
    folder, content = _folder(), io.BytesIO()
    if folder is not None:
        np.savez(content, **arrays)
        with contextlib.suppress(OSError):
            write_whole(folder / f"{name}.npz", content.getvalue())


@cache
def _folder() -> Path | None:
    """Where this version's files are; None where there is no place for them."""
    asked = os.environ.get(VARIABLE)
    if asked == "":
        return None
    try:
        above = Path(asked) if asked else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxdist"
        follows_from = f"{source_digest()} {sorted(versions().items())}"
        folder = above / "plans" / hashlib.sha256(follows_from.encode()).hexdigest()[:16]
        folder.mkdir(parents=True, exist_ok=True)
        os.utime(folder)
        others = [path for path in folder.parent.iterdir() if path.is_dir() and path != folder]
        for path in sorted(others, key=lambda path: path.stat().st_mtime)[: -(VERSIONS_KEPT - 1)]:
            shutil.rmtree(path, ignore_errors=True)
        return folder
    except (OSError, RuntimeError):  # RuntimeError: nobody's home
        return None
