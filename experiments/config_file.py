"""Settings in a file: what --config reads, and the run.toml that a run leaves.

    [model]
    name = "tiny"                   # then the sizes that are other than its own; a class is named by --model as well
    num_layers = 8
    [parallel]                      # the fields of jaxdist.strategy.ParallelConfig; a mesh is text
    mesh = "dp=2,tp=2"
    [run]                           # batch_size, steps, seed
    [optimizer]                     # the fields of OptimizerConfig
    [precision]                     # the fields of PrecisionConfig
    [train]                         # any flag of that program, for it alone; so have [verify], [plan] and [where]

A flag on the command line overrides the file. JSON has the same keys.
"""

import dataclasses
import json
import shlex
import tomllib
import types
import typing
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from jaxdist.config import RunConfig, renewed
from jaxdist.errors import ConfigError, is_utf8
from jaxdist.files import read_text_file
from jaxdist.models.lora import LoRA
from jaxdist.models.registry import ADAPTER_FLAGS, SIZES, is_code
from jaxdist.values import WRONG, as_type

from .settings import SECTIONS, SETTINGS

PROGRAMS = ("train", "verify", "plan", "where")
NAME = "run.toml"  # of what a run leaves, beside config.json
NO_KEYS = ("config", "given")  # fields of flags that no file sets
HEADER = "# Every setting of the run. `train --config` with this file is the same run; flags override it.\n"
# Section -> key -> flag.
SHARED: dict[str, dict[str, str]] = {
    "model": {"name": "model"} | {name: name for name in (*SIZES, *ADAPTER_FLAGS)},
    **{part or "run": {s.name: s.flag for s in SETTINGS if s.section == part} for part in SECTIONS},
}


@dataclass(frozen=True)
class FileFlags:
    """Where settings come from beside the command line."""

    GROUPS: ClassVar[dict[str, str]] = {"config": "settings"}
    NOT_SHARED: ClassVar[frozenset[str]] = frozenset()  # flags that only the program's own section may set
    NOT_KEPT: ClassVar[frozenset[str]] = frozenset({"config"})  # flags of one command rather than of a run

    config: str | None = None
    """TOML or JSON file of settings, which flags override; `train` leaves one in --out as run.toml."""


# ---------------------------------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------------------------------


def read_flags(flags_type: type[FileFlags], program: str, path: str) -> dict[str, Any]:
    """The value of every flag that a file sets for a program. Raises: ConfigError naming the key that is wrong."""
    hints, values, own = get_type_hints(flags_type), {}, {}
    sections, program = _read(path), program.rpartition(" ")[2]
    for section, table in sections.items():
        section = "where" if section == "diverge" else section  # as an earlier version named it
        keys = _keys_of(section, flags_type, program)
        if keys is None and not isinstance(table, dict):
            places = [each for each in (*SHARED, program) if section in (_keys_of(each, flags_type, program) or ())]
            remedy = f"Write it below [{places[0]}]" if places else f"Write sections: {', '.join(SHARED)}"
            raise ConfigError(f"--config {path!r}", f"{section} must be in a section", remedy)
        if keys is None:
            known = ", ".join([*SHARED, *PROGRAMS])
            raise ConfigError(f"--config {path!r}", f"{section!r} must be a known section", f"Use {known}")
        if not isinstance(table, dict):
            raise ConfigError(f"--config {path!r}", f"{section} must be a section, not a value", f"Write [{section}]")
        for key, value in table.items() if keys else ():
            if (section, key) == ("train", "eval_batches") and type(value) is int:  # as an earlier version counted them
                rows = sections.get("run", {}).get("batch_size", RunConfig.batch_size)
                key, value = "eval_windows", value * rows if type(rows) is int else value
            if key not in keys:
                raise ConfigError(f"--config {path!r}", f"[{section}] has no {key!r}", f"Use {', '.join(keys)}")
            found = own if section == program else values
            value = renewed(key, value) if section == "parallel" else value
            found[keys[key]] = _checked(path, f"{section}.{key}", value, hints[keys[key]])
    return {flag: value for flag, value in values.items() if flag not in flags_type.NOT_SHARED} | own


def with_file(
    flags: FileFlags, program: str, parse: Callable[[FileFlags], FileFlags]
) -> tuple[FileFlags, dict[str, Any]]:
    """The flags of a command line with those of its file below them, and what the file says.

    parse: reads the command line again, on top of flags. Raises: ConfigError.
    """
    kind, values = type(flags), read_flags(type(flags), program, flags.config)
    found = parse(kind(**values))
    if found.model != values.get("model", found.model):
        values = {name: value for name, value in values.items() if name not in SIZES}  # they are of the file's model
        return parse(kind(**values)), values
    if found.model != flags.model and is_code(found.model):
        reason = "its model is a class, and whoever runs it must have named it"
        raise ConfigError(f"--config {flags.config!r}", reason, f"Add --model {shlex.quote(found.model)}")
    return found, values


def _keys_of(section: str, flags_type: type, program: str) -> dict[str, str] | None:
    """Key -> flag; empty for the section of another program, None for one that is not known."""
    if section == program:
        return {field.name: field.name for field in dataclasses.fields(flags_type) if field.name not in NO_KEYS}
    return {} if section in PROGRAMS else SHARED.get(section)


def _read(path: str) -> dict:
    text = read_text_file("--config", path)
    kind, parse = ("JSON", json.loads) if Path(path).suffix == ".json" else ("TOML", tomllib.loads)
    try:
        found = parse(text)
    except (ValueError, RecursionError) as error:
        why = f"it cannot be read as {kind} ({'it is nested too deep' if isinstance(error, RecursionError) else error})"
        raise ConfigError(f"--config {path!r}", why, f"Correct the {kind}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"--config {path!r}", "must hold sections", 'Write {"model": {"name": "tiny"}}')
    return found


def _checked(path: str, key: str, value: Any, hint: Any) -> Any:
    """The value as a flag of this type has it."""
    if (found := as_type(value, hint)) is not WRONG:
        return found
    text = json.dumps(value, default=str)
    shown = text if len(text) < 60 else f"{text[:60]}..."
    raise ConfigError(f"--config {path!r}", f"{key} = {shown}, and it must be {_words(hint)}", "Correct it")


def _words(hint: Any) -> str:
    """A type for a person."""
    if get_origin(hint) in (typing.Union, types.UnionType):
        return " or ".join(_words(part) for part in get_args(hint))
    if get_origin(hint) is Literal:
        return f"one of {', '.join(get_args(hint))}"
    if get_origin(hint) is tuple:
        return f"a list, each {_words(get_args(hint)[0])}"
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", type(None): '"none"'}
    return names[hint]


# ---------------------------------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------------------------------


def settings_text(program: str, flags: FileFlags, config: RunConfig) -> str:
    """The file that gives this configuration, and the program's other flags, to the program again."""
    adapters = {name: getattr(flags, name) for name in ADAPTER_FLAGS}
    model = config.model.base if isinstance(config.model, LoRA) else config.model
    fields = {field.name for field in dataclasses.fields(model)}
    sizes = {name: getattr(model, name) for name in SIZES if name in fields}
    tables = {"model": {"name": flags.model, **sizes, **adapters}}
    for setting in SETTINGS:
        tables.setdefault(setting.section or "run", {})[setting.name] = setting.of(config)
    tables[program] = _own_flags(flags)
    return HEADER + "".join(f"\n[{section}]\n" + "".join(_lines(table)) for section, table in tables.items())


def _own_flags(flags: FileFlags) -> dict[str, Any]:
    """What belongs to the run and that no shared section has. TOML has no null: a flag is None where it is left out."""
    elsewhere = {flag for keys in SHARED.values() for flag in keys.values()} | flags.NOT_KEPT
    own = {field.name: field.default for field in dataclasses.fields(flags) if field.name not in elsewhere}
    values = {name: (getattr(flags, name), default) for name, default in own.items()}
    return {name: "none" if value is None is not default else value for name, (value, default) in values.items()}


def _lines(table: dict[str, Any]) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, str) and not is_utf8(value):
            yield f"# {key}: its bytes are not UTF-8, which this file must be\n"
        elif value is not None:
            yield f"{key} = {_toml(value)}\n"


def _toml(value: bool | int | float | str | tuple) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)
