"""Eight simulated devices for every test, and the small configurations they share."""

import os
import warnings

# Tests compile much and compute little.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_backend_optimization_level=0"

import jax
import pytest

from jaxdist.runtime import acquire_devices

# Before any test touches a backend.
DEVICES = acquire_devices(8, "cpu").devices

warnings.filterwarnings("error", message="Some donated buffers were not usable")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return DEVICES
