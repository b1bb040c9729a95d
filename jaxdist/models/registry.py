"""Models by name: the presets, or a class (or a ready model) in a module of the user's own."""

import importlib
import os
import sys
from typing import Literal

from jaxdist.errors import ConfigError, reason_of
from jaxdist.models.base import Model
from jaxdist.models.gpt2 import PRESETS

Preset = Literal[tuple(PRESETS)]


def find_model(name: str) -> Model:
    """A preset's model, or the one that "my_module:MyModel" names: an instance, or a class that needs no arguments.

    The current folder is searched for the module too. Raises: ConfigError where there is none.
    """
    if name in PRESETS:
        return PRESETS[name]
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ConfigError(
            f"model {name!r}", "there is no preset of that name", f"Use {', '.join(PRESETS)}, or my_module:MyModel"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        reason = f"it cannot be imported ({reason_of(error)})"
        raise ConfigError(f"model {name!r}", reason, "Name a class in a module, as in my_module:MyModel") from error
    if isinstance(found, type):
        try:
            found = found()
        except TypeError as error:
            raise ConfigError(
                f"model {name!r}", f"it is made without arguments ({reason_of(error)})", "Give every field a default"
            ) from error
    if not isinstance(found, Model):
        raise ConfigError(f"model {name!r}", "it is not a jaxdist.models.base.Model", "Subclass Model")
    return found
