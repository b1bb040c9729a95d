"""Digests of what a run computed, in a file: to compare with on another machine, or with another version.

A digest of an array is its norm and its products with a few fixed vectors of signs, which change with nearly any change
of the array and by no more than it. Values are rounded to nine digits.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from jaxdist.config import RunConfig, to_dict
from jaxdist.divergence import Copy, Step, Tensor
from jaxdist.errors import ConfigError
from jaxdist.files import read_text_file
from jaxdist.parity import coarsest_dtype
from jaxdist.probes import Key

FORMAT = "jaxdist digests 1"
NUM_PROJECTIONS = 4
MOST_BYTES = 2**30
OWN = ("parallel", "precision")  # of a configuration: what two runs of one training may have each its own


def is_record(path: str) -> bool:
    """Whether a file says that it holds digests, of whatever version. Raises: ConfigError where it cannot be read."""
    return '"format": "jaxdist digests' in read_text_file("B", path, MOST_BYTES)[:200]


def record_text(config: RunConfig, steps: Sequence[Step]) -> str:
    """The file of a run. steps: of digests (`digested`)."""
    content = {
        "format": FORMAT,
        "settings": shared_settings(config),
        "mesh": str(config.parallel.mesh),
        "dtype": coarsest_dtype(config),
        "steps": [[_entry(key, tensor) for key, tensor in step.tensors.items()] for step in steps],
    }
    return json.dumps(content) + "\n"


def read_record(path: str, config: RunConfig) -> list[Step]:
    """The steps of a file, to be compared with those of `config`.

    Raises: ConfigError for a file that is damaged, of another format, or of another training.
    """
    what = f"the digests in {path!r}"
    try:
        content = json.loads(read_text_file("B", path, MOST_BYTES))
        if content["format"] != FORMAT:
            raise ValueError(content["format"])
        theirs, dtype, steps = content["settings"], content["dtype"], content["steps"]
        read = [Step(n, dtype, dict(map(_tensor, step)), is_digest=True) for n, step in enumerate(steps, 1)]
    except (KeyError, TypeError, ValueError, IndexError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(what, f"must be whole and of the format {FORMAT!r}", "Record them again") from error
    require_same_training(what, config, theirs)
    return read


def require_same_training(what: str, config: RunConfig, theirs: dict[str, Any]) -> None:
    """Refuse another run's settings where they lead to other numbers. Raises: ConfigError naming the first."""
    ours = shared_settings(config)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            raise ConfigError(
                f"{what}: {name} is {theirs.get(name)}",
                f"must be {ours.get(name)}, as in the other run: the two may differ only in layout and precision",
                f"Give both the same {name}",
            )


def shared_settings(config: RunConfig) -> dict[str, Any]:
    """What two runs of one training have in common, as JSON has it, by name."""
    flat: dict[str, Any] = {}
    for name, value in json.loads(json.dumps(to_dict(config))).items():
        if name not in OWN:
            flat |= {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat


def digest(x: np.ndarray) -> np.ndarray:
    """[norm, products with signs], float64."""
    flat = np.asarray(x, np.float64).reshape(-1)
    found = [np.linalg.norm(flat), *(_signs(flat.size) @ flat)]
    return np.array([float(f"{value:.9g}") for value in found])


@cache
def _signs(size: int) -> np.ndarray:
    return np.random.default_rng(size).choice([-1.0, 1.0], (NUM_PROJECTIONS, size))


def digested(step: Step) -> Step:
    """Digests in place of values. Of a tensor that is split over ranks, those of the whole."""
    return replace(step, tensors={key: _digested(x) for key, x in step.tensors.items()}, is_digest=True)


def _digested(tensor: Tensor) -> Tensor:
    rows = {row: digest(x) for row, x in tensor.rows.items()}
    copies = [Copy(c.row, c.ranks, rows[c.row] if tensor.is_split else digest(c.value)) for c in tensor.copies]
    return Tensor(rows, copies, tensor.order, tensor.unequal)


def _entry(key: Key, tensor: Tensor) -> list:
    return [*key, tensor.order, {str(row): x.tolist() for row, x in tensor.rows.items()}]


def _tensor(entry: list) -> tuple[Key, Tensor]:
    direction, part, layer, name, order, rows = entry
    if not all(isinstance(text, str) for text in (direction, part, name)):
        raise TypeError(entry)
    arrays = {int(row): np.array(x, np.float64).reshape(1 + NUM_PROJECTIONS) for row, x in rows.items()}
    return Key(direction, part, int(layer), name), Tensor(arrays, [], int(order))
