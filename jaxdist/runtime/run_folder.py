"""A folder that belongs to one run: locked while the run uses it, and the same folder for all of its processes."""

import errno
import fcntl
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from jaxdist.errors import ConfigError
from jaxdist.runtime import processes

LOCK = ".lock"
SEEN_SECONDS = 3.0  # in which a network file system shows a new file to every process
_NO_LOCKS = {errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL}


@contextmanager
def held(folder: Path, name: str, warn: Callable[[str], None]) -> Iterator[None]:
    """While no other run may use the folder, which is made where there is none.

    The lock (`flock` on a file in it) is the system's and ends with the process, however that ends. It holds between
    the processes of one machine on local file systems, and between machines on NFS (version 4, or 3 with its lock
    daemon and not `nolock` or `local_lock`), Lustre (with `-o flock`), GPFS and CephFS. Where the file system has no
    locks, `warn` says so.

    A folder that was made here and in which nothing was written goes again.

    Raises: ConfigError where another process holds it, naming that one, or where the folder cannot be written.
    """
    made = not folder.exists()
    descriptor = _lock(folder, name, warn)
    try:
        with suppress(OSError):  # a full disk: the lock holds without a name
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
        yield
    finally:
        with suppress(OSError):  # somebody removed it meanwhile
            if made and os.listdir(folder) == [LOCK]:
                (folder / LOCK).unlink()
                folder.rmdir()
        os.close(descriptor)


def _lock(folder: Path, name: str, warn: Callable[[str], None]) -> int:
    """The descriptor of the folder's lock, taken."""
    path = folder / LOCK
    while True:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        except OSError as error:
            raise ConfigError(
                f"{name}={str(folder)!r}",
                f"it cannot be written ({error.strerror})",
                "Name a folder that you may write",
            ) from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.read(descriptor, 200).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise ConfigError(
                f"{name}={str(folder)!r}",
                f"must be used by one run, or two would remove each other's files: {holder} is using it",
                "Wait until that one has ended, or choose another folder",
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
            warn(f"the file system of {folder} has no locks: another run in this folder would not be noticed")
        with suppress(FileNotFoundError):
            if os.stat(path).st_ino == os.fstat(descriptor).st_ino:
                return descriptor
        os.close(descriptor)  # its holder removed it meanwhile


def require_shared(folder: Path, name: str) -> None:
    """Prove that every process sees in `folder` what every other one writes there. All processes come here.

    Raises: Disagreement, on all of them, naming the process that does not.
    """
    if processes.count() == 1:
        return
    index, nonce = processes.index(), processes.from_first("nonce", secrets.token_hex(8))
    mine = folder / f".shared.{nonce}.{index}"
    try:
        mine.write_text(nonce)
        said = ""
    except OSError as error:
        said = f"process {index} cannot write to {folder} ({error.strerror})"
    try:
        wrong = [text for text in processes.from_all("nonce written", said) if text]
        if not wrong:
            others = range(processes.count()) if index == 0 else [0]
            said = "" if all(_appears(mine.with_name(f".shared.{nonce}.{i}"), nonce) for i in others) else str(folder)
            wrong = [
                f"process {i} does not see in {text} what the others write"
                for i, text in enumerate(processes.from_all("nonce read", said))
                if text
            ]
    finally:
        with suppress(OSError):
            mine.unlink(missing_ok=True)
    if wrong:
        raise processes.Disagreement(
            f"{name}={str(folder)!r}",
            f"must be one folder that all processes share: {'; '.join(wrong)}",
            "Name a folder on a file system that all of them mount",
        )


def _appears(path: Path, content: str) -> bool:
    """Whether a file is there with this content, or comes within SEEN_SECONDS."""
    deadline = time.monotonic() + SEEN_SECONDS
    while True:
        with suppress(OSError):
            if path.read_text() == content:
                return True
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
