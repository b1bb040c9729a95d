"""Files that are whole or not there, and small text files of a user's."""

import os
import stat
from pathlib import Path

from jaxdist.errors import ConfigError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file that is under its name only when all of it is on the disk: a reader sees the old one or the new."""
    part = path.with_name(path.name + ".part")
    with open(part, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(part, path)
    flush_folder(path.parent)


def flush_folder(folder: Path) -> None:
    """Names are on the disk only when their folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_text_file(what: str, path: str | Path, most_bytes: int = 2**24) -> str:
    """The UTF-8 text of a regular file; a pipe, which may never end, or a device is not opened.

    Raises: ConfigError where it is something else, too large, or not text.
    """
    asked = f"{what} {str(path)!r}"
    try:
        found = os.stat(path)
        if not stat.S_ISREG(found.st_mode):
            raise ConfigError(asked, "it is not a regular file", "Name a text file")
        if found.st_size > most_bytes:
            raise ConfigError(asked, f"it holds {found.st_size:,} bytes, more than {most_bytes:,}", "Name a text file")
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a name with a zero in it
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(asked, f"it cannot be read ({error})", "Name a text file") from error
