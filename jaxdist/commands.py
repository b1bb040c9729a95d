"""How our programs are started: `python -m experiments.train` from a clone, `jaxdist train` where it is installed."""

import sys
from pathlib import Path

# Program -> verb -> the module that has its flags and its `main`.
VERBS = {
    "bench": {"chaos": "bench.chaos", "gpu": "bench.gpu", "levels": "bench.levels", "overlap": "bench.overlap"},
    "labs": {"grade": "labs.grade"},
    "plan": {"calibrate": "calibrate", "schedules": "schedules"},
    "report": {"live": "live"},
    "verify": {"where": "where"},
}
# Programs of earlier versions, and what does their work now.
MOVED = {
    **{name: f"bench {name}" for name in ("chaos", "gpu", "levels", "overlap")},
    **{"calibrate": "plan calibrate", "schedules": "plan schedules"},
    **{"diverge": "verify where", "watch": "report live", "rings": "bench overlap", "communication": "plan --trace"},
}


def moved_text(program: str) -> str | None:
    """The one line that answers the name of a program of an earlier version; None for any other."""
    return f"error: {program} is now `{command_text(MOVED[program])}`" if program in MOVED else None


def command_text(program: str) -> str:
    """A program's name as whoever reads this types it, given how this process was started; a program of
    `tests/` is given as "tests.NAME"."""
    if program.startswith("tests."):
        return f"python -m {program}"
    return f"python -m experiments.{program}" if _from_clone() else f"jaxdist {program}"


def command_words(program: str) -> list[str]:
    """The same for a subprocess, which need not find the `jaxdist` script."""
    return [sys.executable, "-m", f"{'experiments' if _from_clone() else 'jaxdist.programs'}.{program}"]


def install_text(extra: str) -> str:
    """How whoever reads this installs what one of our extras names."""
    return f"pip install -e '.[{extra}]'" if _from_clone() else f"pip install 'jaxdist[{extra}]'"


def import_root() -> Path:
    """The folder that PYTHONPATH must name for a subprocess with another working directory."""
    return Path(__file__).parents[1]


def _from_clone() -> bool:
    """Whether the package `experiments` beside ours is in use; a user may have another of that name."""
    file = getattr(sys.modules.get("experiments"), "__file__", None)
    return file is not None and Path(file).parent == import_root() / "experiments"
