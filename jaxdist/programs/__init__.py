"""The programs. A wheel holds them in this folder; in a clone they stand in `experiments/`, which this file names."""

from pathlib import Path

__path__ = [str(Path(__file__).parents[2] / "experiments")]
