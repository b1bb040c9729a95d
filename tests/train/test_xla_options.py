"""Sets of XLA's options: what a step for GPUs is compiled with, and what the program itself has otherwise."""

from collections import Counter

import jax
import pytest

from experiments.bench.timing import with_parallel
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.mesh import make_abstract_mesh, parse_mesh
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.presets import PRESETS
from jaxdist.parallel.pipeline.split_backward import inner_programs
from jaxdist.runtime.devices import refused_option
from jaxdist.strategy import ParallelConfig
from jaxdist.train import xla_options
from jaxdist.train.program import build_program, step_options
from jaxdist.train.xla_options import GPU_OPTIONS, XLA_SETS, Option, options_in

SMALL = GPT2Config(2, 64, 8, 256, 32, 256)


def config_of(xla: str, mesh: str = "", model=SMALL) -> RunConfig:
    return RunConfig(model, ParallelConfig(parse_mesh(mesh), xla=xla), batch_size=4)


@pytest.mark.parametrize("option", GPU_OPTIONS, ids=lambda option: f"{option.name}={option.value}")
def test_a_jaxlib_takes_the_options_that_the_table_says_it_takes(option):
    version = jax.lib.__version__
    assert refused_option(option.name, option.value) is None or version not in option.accepted


def test_sets_are_for_gpus_and_depend_on_whether_there_are_several():
    one, several = options_in("fast", 1), options_in("fast", 8)
    assert options_in("default", 1) == options_in("default", 8) == {}
    for options in (one, several):
        assert options_in("stable", 8).items() <= options.items() and options_in("stable", 1) == options_in("stable", 8)
    assert "xla_gpu_enable_latency_hiding_scheduler" in several.keys() - one.keys()
    assert "xla_gpu_experimental_gemm_fusion_v2" in one.keys() - several.keys()
    named = [(option.name, name, option.on) for option in GPU_OPTIONS for name in option.sets]
    assert len(named) == len(set(named))
    assert step_options(config_of("fast"), "gpu") == one and step_options(config_of("fast"), "cpu") == {}
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


@pytest.mark.parametrize("model", [SMALL, PRESETS["llama-proof"]], ids=["gpt2", "llama"])
def test_arrays_are_written_once_only_where_products_would_take_in_what_makes_them(model):
    def barriers(xla, mesh=""):
        config = config_of(xla, mesh, model)
        program = build_program(config, make_abstract_mesh(config.parallel.mesh))
        traced = program.step.trace(program.abstract_state(), program.abstract_batch())
        found = Counter()

        def look(jaxpr):
            for eqn in jaxpr.eqns:
                if eqn.primitive.name == "optimization_barrier":
                    found.update(len(out.aval.shape) for out in eqn.outvars)
                for inner in inner_programs(eqn):
                    look(getattr(inner, "jaxpr", inner))

        look(traced.jaxpr.jaxpr)
        return found

    plain, stable, fast = map(barriers, ("default", "stable", "fast"))
    assert plain == stable and barriers("fast", "tp=2") == barriers("default", "tp=2")
    # In the one layer of a scan: its middle and its gradient, of norms, of the attention's matrix, of Q, K and V; and
    # the logits.
    more = {3: 4, 2: 2, 5: 1} if model is SMALL else {3: 4, 2: 2}
    assert fast - plain == more and not plain - fast


def test_benches_keep_the_set_on_other_meshes():
    assert with_parallel(config_of("fast"), "dp=2", {}).parallel.xla == "fast"
