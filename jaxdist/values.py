"""Values from JSON or TOML, as the type that a field declares."""

import dataclasses
import types
import typing
from contextlib import suppress
from typing import Any, Literal, get_args, get_origin, get_type_hints

from jaxdist.errors import ConfigError

WRONG = object()


def as_type(value: Any, hint: Any) -> Any:
    """The value as a field with this type hint has it, WRONG where it is of another type."""
    for kind in get_args(hint) if get_origin(hint) in (typing.Union, types.UnionType) else (hint,):
        if (found := _as_kind(value, kind)) is not WRONG:
            return found
    return WRONG


def _as_kind(value: Any, kind: Any) -> Any:
    if get_origin(kind) is Literal:
        return value if isinstance(value, str) and value in get_args(kind) else WRONG
    if get_origin(kind) is tuple:
        return _as_tuple(value, get_args(kind))
    if get_origin(kind) is list:
        found = _as_tuple(value, (*get_args(kind), ...))
        return WRONG if found is WRONG else list(found)
    if get_origin(kind) is dict:
        found = (
            {name: as_type(part, get_args(kind)[1]) for name, part in value.items()} if isinstance(value, dict) else {}
        )
        return value if isinstance(value, dict) and WRONG not in found.values() else WRONG
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        with suppress(ConfigError):
            return kind(**fields_of(kind, value, kind.__name__))
        return WRONG
    if kind is tuple:
        return tuple(value) if isinstance(value, list) else WRONG
    if kind is type(None):
        return None if value in ("none", None) else WRONG
    if kind is float and type(value) is int:
        return float(value) if abs(value) < 2**1000 else WRONG
    return value if type(value) is kind else WRONG


def _as_tuple(value: Any, kinds: tuple) -> Any:
    """kinds: (int, ...) for any number of parts, else the type of each part."""
    if not isinstance(value, list):
        return WRONG
    kinds = kinds[:1] * len(value) if kinds[1:] == (...,) else kinds
    if len(kinds) != len(value):
        return WRONG
    parts = tuple(as_type(part, kind) for part, kind in zip(value, kinds, strict=True))
    return WRONG if any(part is WRONG for part in parts) else parts


def fields_of(cls: type, found: Any, what: str, more: tuple[str, ...] = ()) -> dict[str, Any]:
    """The values of a dataclass's fields in a mapping that JSON gave, each of its field's type.

    Fields in `more` are returned as they are. Raises: ConfigError, which says `what` was read, for a missing field
    without a default, for one that the class does not have, and for a value of another type.
    """
    if not isinstance(found, dict):
        raise ConfigError(what, "must be a table of settings", "Use the version that wrote it")
    hints = get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    if unknown := sorted(set(found) - set(fields)):
        raise ConfigError(f"{what} has {', '.join(unknown)}", "this version has no such setting", "Use its own version")
    for name, field in fields.items():
        if name not in found and field.default is field.default_factory is dataclasses.MISSING:
            raise ConfigError(f"{what} without {name}", "it must be given", "Use the version that wrote it")
    values = {name: value if name in more else as_type(value, hints[name]) for name, value in found.items()}
    for name, value in values.items():
        if value is WRONG:
            raise ConfigError(
                f"{what}: {name}={found[name]!r:.60}", "must be of the right type", "Use the version that wrote it"
            )
    return values
