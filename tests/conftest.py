"""Eight simulated devices for every test, and the small configurations they share."""

import atexit
import os
import shutil
import tempfile
import warnings
from collections.abc import Iterable

# Tests compile much and compute little. What two of them compile alike, be it in two processes, is compiled once.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"
os.environ.pop("COLUMNS", None)  # which pytest-xdist sets; programs that are piped are as wide as they like
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp(prefix="jaxdist-tests-")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "0"
    atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
# Nor is a layer traced twice for plans.
if "JAXDIST_CACHE" not in os.environ:
    os.environ["JAXDIST_CACHE"] = tempfile.mkdtemp(prefix="jaxdist-tests-")
    atexit.register(shutil.rmtree, os.environ["JAXDIST_CACHE"], ignore_errors=True)

import jax
import pytest

from experiments.strategies import Strategy
from jaxdist.runtime.devices import acquire_devices
from tests.sample import left_out

# Before any test touches a backend.
DEVICES = acquire_devices(8, "cpu").devices

warnings.filterwarnings("error", message="Some donated buffers were not usable")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return DEVICES


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark what `tests.sample` left out."""
    names_left_out = left_out()
    found = set()
    for item in items:
        if names := names_left_out.intersection((item.nodeid, item.nodeid.partition("[")[0])):
            found |= names
            item.add_marker(pytest.mark.left_out)
    if config.args == config.getini("testpaths") and found != names_left_out:
        raise pytest.UsageError(f"tests/left_out.txt names tests that are not there: {sorted(names_left_out - found)}")


def in_sample(rows: Iterable, sample: Iterable) -> list:
    """Rows for `parametrize`; those that are not in `sample` are marked exhaustive."""
    sample = [*sample]
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)), marks=() if row in sample else pytest.mark.exhaustive
        )
        for row in rows
    ]


def sampled(strategies: Iterable[Strategy]) -> list:
    """Rows for `parametrize`; those outside the sample are marked exhaustive."""
    return [pytest.param(s, id=s.name, marks=[] if s.sample else pytest.mark.exhaustive) for s in strategies]
