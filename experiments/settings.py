"""Every setting of a run as a flag. Both are made of one description: the fields of the classes in `jaxdist.config`."""

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.mesh import MeshShape, parse_mesh
from jaxdist.models.base import Model
from jaxdist.strategy import ParallelConfig, PrecisionConfig

from .help import texts_of

SECTIONS = {"parallel": ParallelConfig, "": RunConfig, "precision": PrecisionConfig, "optimizer": OptimizerConfig}
RENAMED = {("optimizer", "name"): "optimizer"}  # whose field's name says too little among all flags
GROUPS = {  # of --help: first flag -> title
    "mesh": "devices",
    "zero": "strategy",
    "schedule": "pipeline",
    "batch_size": "run",
    "dtype": "precision",
    "optimizer": "optimizer",
}


@dataclass(frozen=True)
class Setting:
    """A field of the configuration and its flag. A mesh is written as text, everything else as it is.

    section: the field of `RunConfig` that holds it, "" for its own. flag: as the attribute of parsed flags.
    """

    section: str
    name: str
    flag: str
    type: Any
    default: Any
    about: str

    def of(self, config: RunConfig) -> Any:
        """The flag's value in a configuration."""
        return _as_text(getattr(getattr(config, self.section) if self.section else config, self.name))


def _as_text(value: Any) -> Any:
    if not isinstance(value, MeshShape):
        return value
    return "" if value.num_devices == 1 else str(value)


def _settings() -> list[Setting]:
    found = []
    for section, cls in SECTIONS.items():
        hints, texts = typing.get_type_hints(cls), texts_of(cls)
        for field in dataclasses.fields(cls):
            if field.name == "model" or field.name in SECTIONS:
                continue
            kind = str if hints[field.name] is MeshShape else hints[field.name]
            flag = RENAMED.get((section, field.name), field.name)
            found.append(Setting(section, field.name, flag, kind, _as_text(field.default), texts[field.name]))
    return found


SETTINGS = _settings()


def _flags_class() -> type:
    """A dataclass with a field for each setting; the flags of programs inherit from it."""
    fields = [(s.flag, Annotated[s.type, tyro.conf.arg(help=s.about)], s.default) for s in SETTINGS]
    namespace = {"GROUPS": GROUPS, "TEXTS": {s.flag: s.about for s in SETTINGS}, "__module__": __name__}
    return dataclasses.make_dataclass("SettingFlags", fields, frozen=True, namespace=namespace)


SettingFlags = _flags_class()


def make_config(model: Model, values: Mapping[str, Any]) -> RunConfig:
    """The validated configuration of a model and the value of every flag. Raises: ConfigError."""
    parts: dict[str, dict] = {section: {} for section in SECTIONS}
    for setting in SETTINGS:
        value = values[setting.flag]
        parts[setting.section][setting.name] = parse_mesh(value) if setting.flag == "mesh" else value
    own = parts.pop("")
    return RunConfig(model=model, **{section: SECTIONS[section](**parts[section]) for section in parts}, **own)
