"""The one error a user's own input can cause, checks that raise it, and text from elsewhere made safe to show."""

import errno
import math
import os
import unicodedata
from numbers import Integral, Real

# Control characters, surrogates (bytes of a name that are not UTF-8) and what reorders or hides text.
_UNPRINTABLE = {"Cc", "Cs", "Cf", "Zl", "Zp"}


class ConfigError(ValueError):
    """A flag, mesh, size or file that cannot work, found before anything is traced.

    Programs print its message alone and exit with code 2. A message has three parts: what was asked, what is
    required and why, what would work.
    """

    def __init__(self, asked: str, required: str, remedy: str):
        end = "" if required.endswith("?") else "."
        super().__init__(f"{asked}: {required}{end} {remedy.removesuffix('.')}.")
        self.asked, self.required = asked, required


FULL = tuple(map(os.strerror, (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)))


def full_disk(error: BaseException) -> str | None:
    """What the system says of a disk that takes no more, in an error of any library; None for another error."""
    return next((reason for reason in FULL if reason in str(error)), None)


def reason_of(error: BaseException) -> str:
    """One line that says why; the name of the exception's type where it carries no message."""
    if reason := full_disk(error):
        return reason
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def is_utf8(text: str) -> bool:
    """Whether a name can be written as UTF-8; one that came from the system's bytes may not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def printable(text: str) -> str:
    """`text` with everything a terminal would obey, or an encoder refuse, written as an escape; newlines stay."""
    if text.isascii() and (text.isprintable() or text.replace("\n", "").isprintable()):
        return text
    return "".join(
        c if c == "\n" or unicodedata.category(c) not in _UNPRINTABLE else c.encode("unicode_escape").decode()
        for c in text
    )


def divisors(n: int) -> list[int]:
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


MOST = 2**31 - 1  # of whatever is counted; sizes with a smaller bound name their own


def require_positive(name: str, value: int, most: int = MOST) -> None:
    if not isinstance(value, Integral) or not 1 <= value <= most:
        raise ConfigError(
            f"{name}={value!r}", f"must be a whole number from 1 to {most:,}", f"Use {name}=1 or more, within that"
        )


def require_within(name: str, value: float, least: float, most: float, remedy: str = "Use one within that") -> None:
    """For a number with a fraction; NaN is never within."""
    if not isinstance(value, Real) or not least <= value <= most:
        raise ConfigError(f"{name}={value!r}", f"must be a number from {least:g} to {most:g}", remedy)
