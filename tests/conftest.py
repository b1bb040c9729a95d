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

# Before any test touches a backend.
DEVICES = acquire_devices(8, "cpu").devices

warnings.filterwarnings("error", message="Some donated buffers were not usable")


@pytest.fixture(scope="session")
def devices() -> list[jax.Device]:
    return DEVICES


# Strategies whose parts are each in another row too: in the whole matrix, not in the sample of every run.
RARE = set(
    [
        "pp2-tp4-sp-dropout",
        "replica2-dp2-tp2-zero2-overlap-loss-chunks",
        "dp2-tp2-sp-documents",
        "pp2-dp2-tp2-zero2-zb-v",
        "tp8-sp-ring",
        "dp2-tp4-sp-ring-zero1-remat-dropout",
        "dp2-tp2-zero1-sgd",
        "tp2",
        "dp2-tp2-dropout",
        "replica2-dp2-tp2-sp-zero3-fp64",
        "pp2-dp2-tp2-sp-zero1",
        "pp2-tp2-sp-remat-block",
        "dp4-overlap-accumulate",
        "dp2-zero1-loss-chunks-accumulate-bf16",
        "cp8",
        "pp2-cp4-all-gather-zb-v",
        "dp4-zero3-overlap-accumulate-documents",
        "dp8-per-parameter",
        "dp8-buckets",
        "dp8-zero1-flat",
        "dp8-zero1-per-parameter",
        "dp8-zero2-flat",
        "dp3-zero3-padded-per-parameter",
        "dp4-zero1-accumulate",
        "dp4-zero2-accumulate",
        "replica2-dp4-zero2",
        "dp4-tp2-zero1",
        "dp2-tp4-sp-zero1-flat",
        "replica2-dp2-tp2-sp-zero2",
        "dp2-tp4-sp-zero1-dropout",
        "dp2-tp2-dropout-accumulate",
        "dp3-tp2-zero1-dropout-fp64",
        "dp8-zero2-overlap",
        "dp4-zero1-overlap-accumulate",
        "dp4-zero2-overlap-accumulate",
        "dp4-overlap-remat-block",
        "dp4-zero1-overlap-buckets",
        "dp4-zero3-overlap-per-parameter",
        "replica2-dp4-zero1-overlap",
        "dp4-overlap-fp16",
        "replica2-dp2-tp2-sp-zero2-overlap",
        "dp4-zero3-overlap-2-layers",
        "dp2-tp4-sp-zero1-overlap-dropout",
        "replica2-dp2-tp2-sp-zero3-overlap-fp64",
        "replica2-tp4-sp-ring-two-way-remat-every-2",
        "dp2-tp4-sp-ring-bf16",
        "dp2-tp4-sp-ring-two-way-fp64",
        "pp4-balanced",
        "pp2-remat-every-2-of-3",
        "pp4-zb-v-dropout-fp64",
        "pp2-dp3-zero2-padded",
        "pp2-dp2-zero3-bf16",
        "pp2-tp2-clipped-sgd",
        "pp2-v-min-5-layers",
        "dp2",
        "dp3-zero1-padded",
        "dp3-zero2-padded",
        "replica2-dp4-zero1",
        "dp4-zero3-remat-block",
        "dp4-zero3-accumulate",
        "accumulate",
        "remat-every-2",
        "dp4-tp2-zero3",
        "dp4-tp2-sp",
        "dp4-tp2-sp-zero2",
        "dp4-tp2-sp-zero3",
        "dp2-tp4",
        "replica2-dp2-tp2-sp-zero3",
        "tp2-sp-ring",
        "dp4-zero3-overlap-remat-block",
        "replica2-dp4-overlap-accumulate",
        "pp2-v-half-8-layers",
        "dp2-tp2-zero1-bf16",
        "dp2-tp2-fp16",
        "moe-pp2-dp2-ep2-fp16",
        "dp2-tp2-fp64",
        "dp2-tp4-sp-loss-chunks-fp64",
        "dp4-tp2-zero3-dropout-remat",
        "pp2-remat-selective-accumulate",
        "replica2-dp4",
        "remat-selective",
        "dp8-zero3-per-parameter",
        "dp4-zero3-remat-every-2",
        "dp8-zero1-overlap",
        "dp4-tp2-zero3-overlap-bf16",
        "dp2-tp2-loss-chunks-fp16",
        "pp2-gpipe",
        "pp2-dp2-tp2-zero1-bf16",
        "pp4-zb-h1-overlap-uneven-fp64",
        "pp2-tp2-interleaved-overlap-bf16",
        "cp2",
        "cp4-unrolled",
        "cp8-all-gather-zero3",
        "cp8-ulysses",
        "dp2-cp4-zero3-overlap",
        "dp2-cp4-usp-2-zero2-accumulate-remat",
        "pp2-dp2-cp2-ulysses-zero3-loss-chunks",
        "cp4-tp2-sp-bf16",
        "dp2-cp4-zero1-fp64",
        "pp2-dp2-tp2-fp16",
        "pp2-dp2-tp2-sp-zero3-fp64",
        "pp2-cp2-remat-chunk-accumulate",
        "pp2-tp2-dp2-zero1-loss-chunks",
        "replica2-dp2-tp2-sp-zero3-accumulate-remat",
        "replica2-dp4-zero3",
        "dp4-tp2-sp-overlap",
        "dp2-tp2-zero3-overlap-1-layer",
        "dp2-cp2-unrolled-remat-arrays-fp64",
        "dp3-zero2-padded-2-layers-fp64",
    ]
)


def sampled(strategies: Iterable[Strategy]) -> list:
    """Rows for `parametrize`; those of RARE are marked exhaustive."""
    return [pytest.param(s, id=s.name, marks=[pytest.mark.exhaustive] * (s.name in RARE)) for s in strategies]
