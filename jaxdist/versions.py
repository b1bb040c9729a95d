"""Which versions of the packages and which source of ours run here."""

import hashlib
import importlib.metadata
import platform
from functools import cache
from pathlib import Path

PACKAGES = ("jaxdist", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")
__version__ = "0.1.0"


def versions() -> dict[str, str]:
    """Versions of Python and the packages. Our own is known without being installed; "unknown" where another's is
    not."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = __version__ if name == "jaxdist" else importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "unknown"
    return found


@cache
def source_digest() -> str:
    """SHA-256 of every source file of the package, by relative path: two checkouts that differ are told apart.

    Without the programs, so that a wheel, which holds them in the package, equals the clone that it was built from.
    """
    root, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(path for pattern in ("*.py", "*.toml") for path in root.rglob(pattern)):
        if path.is_relative_to(root / "programs"):
            continue
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def must_be_equal() -> dict[str, str]:
    """What all processes of a run must share: they trace one program."""
    found = versions()
    return {f"the version of {name}": found[name] for name in ("jaxdist", "jax", "jaxlib", "flax", "optax")} | {
        "the source of jaxdist (SHA-256)": source_digest()[:16]
    }
