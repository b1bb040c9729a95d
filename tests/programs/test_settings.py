"""Settings and flags are one: every field of the configuration has a flag, its text and its default."""

import dataclasses

import pytest

from experiments.bench.flags import BenchFlags
from experiments.bench.levels import LevelsFlags
from experiments.bench.overlap import OverlapFlags
from experiments.cli import CommonFlags
from experiments.help import texts_of
from experiments.plan import PlanFlags
from experiments.settings import SECTIONS, SETTINGS, make_config
from experiments.strategies import STRATEGIES
from experiments.train import TrainFlags
from experiments.verify import VerifyFlags
from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.models.presets import PRESETS
from jaxdist.strategy import PrecisionConfig

PROGRAMS = [TrainFlags, VerifyFlags, PlanFlags, BenchFlags, LevelsFlags, OverlapFlags]


def test_every_field_is_a_setting_with_a_text():
    fields = {
        (section, field.name)
        for section, cls in SECTIONS.items()
        for field in dataclasses.fields(cls)
        if field.name not in ("model", *SECTIONS)
    }
    assert {(setting.section, setting.name) for setting in SETTINGS} == fields and len(fields) > 30
    assert len({setting.flag for setting in SETTINGS}) == len(SETTINGS)
    assert all(setting.about.endswith(".") for setting in SETTINGS)
    assert set(SECTIONS) - {""} == {field.name for field in dataclasses.fields(RunConfig)} & set(SECTIONS)


def test_flags_without_values_are_the_configuration_without_values():
    assert CommonFlags().run_config() == RunConfig(PRESETS["tiny"])


@pytest.mark.parametrize("flags_type", PROGRAMS)
def test_a_program_that_has_its_own_default_keeps_the_text(flags_type):
    texts = texts_of(flags_type)
    assert {setting.flag for setting in SETTINGS} <= {field.name for field in dataclasses.fields(flags_type)}
    assert {setting.flag for setting in SETTINGS} <= set(texts)


def test_every_strategy_is_described_by_its_settings():
    for strategy in STRATEGIES:
        config = strategy.run_config()
        assert make_config(config.model, {setting.flag: setting.of(config) for setting in SETTINGS}) == config


def test_verify_has_the_settings_of_a_proof():
    optimizer = VerifyFlags().run_config().optimizer
    assert (optimizer.lr, optimizer.eps, optimizer.warmup_steps) == (1e-4, 1e-6, 0)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (lambda: OptimizerConfig("sgd", beta2=0.9), "sgd has no such moment"),
        (lambda: OptimizerConfig("adafactor", beta1=0.8), "adafactor has no such moment"),
        (lambda: PrecisionConfig("bfloat16", loss_scale=2.0), "only float16 scales the loss"),
        (lambda: PrecisionConfig(loss_scale_window=2), "only float16 scales the loss"),
    ],
)
def test_what_nothing_would_read_is_refused(made, said):
    with pytest.raises(ConfigError, match=said):
        made()
