"""Sets of XLA's options: what a step for GPUs is compiled with, and what the program itself has otherwise."""

import jax
import pytest

from experiments.bench.timing import with_parallel
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.runtime.devices import refused_option
from jaxdist.strategy import ParallelConfig
from jaxdist.train import xla_options
from jaxdist.train.program import step_options
from jaxdist.train.xla_options import GPU_OPTIONS, XLA_SETS, Option, options_in

SMALL = GPT2Config(2, 64, 8, 256, 32, 256)


def config_of(xla: str, mesh: str = "") -> RunConfig:
    return RunConfig(SMALL, ParallelConfig(parse_mesh(mesh), xla=xla), batch_size=4)


@pytest.mark.parametrize("option", GPU_OPTIONS, ids=lambda option: f"{option.name}={option.value}")
def test_a_jaxlib_takes_the_options_that_the_table_says_it_takes(option):
    version = jax.lib.__version__
    assert refused_option(option.name, option.value) is None or version not in option.accepted


def test_sets_are_for_gpus_and_depend_on_whether_there_are_several():
    one, several = options_in("fast", 1), options_in("fast", 8)
    assert options_in("default", 1) == options_in("default", 8) == {}
    assert one == options_in("stable", 1) == options_in("stable", 8) and one.items() <= several.items()
    assert "xla_gpu_enable_latency_hiding_scheduler" in several.keys() - one.keys()
    assert step_options(config_of("fast"), "gpu") == one and step_options(config_of("fast"), "cpu") == {}
    if any(refused_option(name, value) for name, value in several.items()):  # by a newer jaxlib than the table knows
        with pytest.raises(ConfigError):
            step_options(config_of("fast", "dp=4,tp=2"), "gpu")
    else:
        assert step_options(config_of("fast", "dp=4,tp=2"), "gpu") == several


def test_an_option_that_this_jaxlib_refuses_is_named(monkeypatch):
    unknown = Option("xla_gpu_not_there", True, "nothing", ("fast",), accepted=("9.9.9",))
    monkeypatch.setattr(xla_options, "GPU_OPTIONS", (*GPU_OPTIONS, unknown))
    with pytest.raises(ConfigError) as found:
        step_options(config_of("fast"), "gpu")
    assert "xla_gpu_not_there=True" in found.value.required and "9.9.9" in str(found.value)
    assert step_options(config_of("stable"), "gpu") == options_in("stable", 1)


def test_an_unknown_set_is_refused_with_those_there_are():
    with pytest.raises(ConfigError) as found:
        config_of("faster")
    assert all(name in found.value.required for name in ("default", *XLA_SETS))


def test_benches_keep_the_set_on_other_meshes():
    assert with_parallel(config_of("fast"), "dp=2", {}).parallel.xla == "fast"
