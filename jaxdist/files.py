"""Files that are written whole or not at all, and read only if they are regular and of a bounded size. No JAX here."""

import errno
import json
import os
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from jaxdist.errors import ConfigError, reason_of

BYTE_ORDER_MARK = "\ufeff"  # that some editors put before a text


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is under its name only when all of it is on the disk: a reader sees the old one or the new.

    Where that fails, the old one is as it was, and nothing else is left.
    """
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        with suppress(OSError):
            part.unlink()
        raise
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Names are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_regular(path: Path | str, most: int) -> bytes:
    """The content of a regular file of at most `most` bytes; a FIFO or device is refused without waiting for it.

    Raises: OSError, whose `strerror` says what is wrong.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(errno.EFBIG, f"it is larger than {most:,} bytes", str(path))
    return content


def read_text_file(what: str, path: str | Path, most: int = 2**24) -> str:
    """The UTF-8 text of a regular file of at most `most` bytes, without a byte order mark.

    Raises: ConfigError where it is something else, too large, or not text.
    """
    try:
        return read_regular(path, most).decode().removeprefix(BYTE_ORDER_MARK)
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a zero in it
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(f"{what} {str(path)!r}", f"it cannot be read ({reason})", "Name a text file") from error


def read_object(path: Path, most: int, refuse: Callable[[str], Exception]) -> dict[str, Any]:
    """The object in a JSON file. Raises: what `refuse` makes of the reason, where there is none that can be read."""
    try:
        found = json.loads(read_regular(path, most))
    except OSError as error:
        raise refuse(f"it cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise refuse(f"it is not a whole JSON file ({reason_of(error)})") from error
    if not isinstance(found, dict):
        raise refuse("it holds no JSON object")
    return found


def remove(path: Path) -> None:
    """Whatever has this name: a folder with all in it, a file, or a link but not what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def set_aside(path: Path, ending: str) -> Path:
    """Rename what is damaged to a name that nothing has yet, for a person to look at. Returns the new path."""
    names = (path.with_name(f"{path.name}.{ending}{number or ''}") for number in range(10**6))
    aside = next(name for name in names if not os.path.lexists(name))
    path.rename(aside)
    return aside
