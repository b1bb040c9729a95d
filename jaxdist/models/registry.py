"""Models by name: presets, a config.json, a class (or a ready model) in a module of the user's own; and their flags."""

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import ClassVar

from jaxdist.errors import ConfigError, reason_of, require_positive, require_within
from jaxdist.models.base import Model
from jaxdist.models.declared import BOUNDS
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.models.huggingface import CONFIG, read_model
from jaxdist.models.lora import ALPHA_PER_RANK, LoRA
from jaxdist.models.presets import PRESETS
from jaxdist.values import fields_of

# What files and flags call our classes of sizes.
CALLED = {"jaxdist.models.gpt2:GPT2": GPT2Config, "jaxdist.models.decoder:Decoder": DecoderConfig}
PLAIN = (int, float, str, bool, type(None), tuple)  # what a model's fields may hold, so that JSON can


@dataclass(frozen=True)
class ModelFlags:
    """A model, and the sizes of it that are other than its own. Each sets the model's field of the same name."""

    GROUPS: ClassVar[dict[str, str]] = {"model": "model"}

    model: str = "tiny"
    num_layers: int | None = None
    width: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    """Heads of keys and values, of a model whose query heads share them."""
    ffn_width: int | None = None
    """Default for a preset: 4 x width where width is given."""
    seq_len: int | None = None
    """Tokens per sequence."""
    vocab_size: int | None = None
    dropout: float | None = None
    num_experts: int | None = None
    """Experts in the place of each layer's feed-forward, of a decoder (docs/experts.md)."""
    top_k: int | None = None
    """Experts that a token chooses."""
    expert_width: int | None = None
    """Width of each expert; default: ffn_width."""
    shared_width: int | None = None
    """Width of a shared expert, which all tokens use."""
    capacity: float | None = None
    """Tokens an expert takes of a sequence, over its even share; what is beyond is dropped. Default: all."""
    exchange_room: float | None = None
    """Rows that ranks exchange in a round, over an even share, where none is dropped; more rounds take the rest."""
    balance_loss: float | None = None
    """Factor of the loss that is least where all experts are chosen equally often."""
    z_loss: float | None = None
    """Factor of the loss that keeps the router's logits small."""
    balance_rate: float | None = None
    """Step of a bias of each expert's score, up where it was chosen less than the mean, down where more."""
    lora: int = 0
    """Rank of the adapters that are trained in the place of the model's own parameters; 0: none."""
    lora_alpha: float | None = None
    """Adapters are scaled by lora_alpha / lora; default: 2 x lora."""
    lora_targets: str | None = None
    """Names of the matrices with an adapter, as in w_q,w_v; default: all of a layer."""

    def model_config(self) -> Model:
        """The model that these flags describe. Raises: ConfigError."""
        model = self._base_model()
        if self.lora:
            targets = tuple(filter(None, (self.lora_targets or "").replace(" ", "").split(",")))
            alpha = ALPHA_PER_RANK * self.lora if self.lora_alpha is None else self.lora_alpha
            return LoRA(model, self.lora, alpha, targets)
        for name in ("lora_alpha", "lora_targets"):
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{name}={getattr(self, name)}", "must be given with adapters, and there are none", "Add lora=8"
                )
        return model

    def _base_model(self) -> Model:
        model = find_model(self.model)
        sizes = {name: getattr(self, name) for name in SIZES if getattr(self, name) is not None}
        for name in sizes:
            if name not in _fields(model):
                raise ConfigError(
                    f"{name}={sizes[name]}",
                    f"must be a field of the model {self.model}, which has {', '.join(_fields(model)) or 'none'}",
                    "Leave it out",
                )
        if isinstance(model, GPT2Config) and "width" in sizes:
            sizes.setdefault("ffn_width", 4 * sizes["width"])
        if not sizes:
            return model
        with _errors_of_module(self.model):
            model = dataclasses.replace(model, **sizes)  # type: ignore[type-var]  # its subclasses are dataclasses
        _check_sizes(model)
        return model


ADAPTER_FLAGS = ("lora", "lora_alpha", "lora_targets")
SIZES = tuple(field.name for field in dataclasses.fields(ModelFlags) if field.name not in ("model", *ADAPTER_FLAGS))


def find_model(name: str) -> Model:
    """A preset's model, that of a config.json (or its folder), or the one that "my_module:MyModel" names: an instance,
    or a class that needs no arguments.

    The current folder is searched for the module too. Raises: ConfigError where there is none.
    """
    if name in PRESETS:
        return PRESETS[name]
    if is_path(name):
        _read[name] = read_model(name)
        return _read[name]
    found = _import_named(name)
    if inspect.isclass(found) and issubclass(found, Model):
        _check_class(name, found)
        with _errors_of_module(name):
            found = found()
    if not isinstance(found, Model):
        raise ConfigError(f"model={name!r}", "must be a jaxdist.models.base.Model", "Subclass Model")
    _check_class(name, type(found), needs_defaults=False)
    _check_values(name, found)
    _check_sizes(found)
    return found


def is_path(name: str) -> bool:
    """Whether a model's name is that of a config.json, or of a folder with one."""
    return Path(name).suffix == ".json" or os.sep in name or (Path(name) / CONFIG).exists()


def is_code(name: str) -> bool:
    """Whether a model's name makes `find_model` import a module."""
    return ":" in name and name not in PRESETS and not is_path(name)


_read: dict[str, Model] = {}  # those of config.json, by the path that was asked for: `name_of` gives it back


def model_of(found: dict, like: Model | None = None, trust: bool = False) -> Model:
    """The model that `jaxdist.config.to_dict` wrote, as JSON gives it back.

    A file cannot choose what code runs: classes are this package's or those of `like`, which somebody else named,
    unless `trust` is given. Raises: ConfigError.
    """
    if not trust and (foreign := [name for name in _classes_in(found) if name not in _classes_of(like)]):
        raise ConfigError(
            f"the model's class {foreign[0]!r:.100}",
            "a file names it; to be run, it must be a class of jaxdist or named on the command line",
            "If the code is yours, add --trust in the folder of its module" if like is None else "Name it with --model",
        )
    return _made_of(found)


def _made_of(found: dict) -> Model:
    if not isinstance(found, dict):
        raise ConfigError(f"model={found!r:.60}", "must be a dict of model fields", "Use the code that wrote it")
    asked = f"model={str(found.get('class', 'GPT2'))!r}"
    fields = {name: value for name, value in found.items() if name not in ("class", "source")}
    cls = _import_named(str(found["class"])) if "class" in found else GPT2Config
    if not (inspect.isclass(cls) and issubclass(cls, Model)):
        raise ConfigError(asked, "must be a jaxdist.models.base.Model", "Use the code that wrote it")
    nested = tuple(name for name, value in fields.items() if isinstance(value, dict))
    if cls.__module__.startswith(f"{__package__}."):
        fields = fields_of(cls, fields, asked, nested)
    fields |= {name: _made_of(fields[name]) for name in nested}
    try:
        return cls(**{name: _with_tuples(value) for name, value in fields.items()})
    except TypeError as error:
        raise ConfigError(asked, f"its fields must fit the class ({error})", "Use the code that wrote it") from error


OURS = re.compile(r"jaxdist\.models(\.[A-Za-z_]\w*)+:[A-Za-z_]\w*", re.ASCII)


def _classes_in(found) -> list:
    """The classes that what `to_dict` wrote names, other than those of this package."""
    if not isinstance(found, dict):
        return []
    name = found.get("class", "jaxdist.models.gpt2:GPT2")
    own = [] if isinstance(name, str) and OURS.fullmatch(name) else [name]
    return own + [each for value in found.values() for each in _classes_in(value)]


def _classes_of(model: Model | None) -> set[str | None]:
    if model is None:
        return set()
    inner = (value for value in _fields(model).values() if isinstance(value, Model))
    return {class_name(model)}.union(*map(_classes_of, inner))


def to_dict(model: Model) -> dict:
    """What `model_of` undoes. One that is not GPT-2 names its class, and the SHA-256 of the file that defines it."""
    fields = {name: to_dict(value) if isinstance(value, Model) else value for name, value in _fields(model).items()}
    name = class_name(model)
    return fields if name is None else {"class": name, "source": source_digest(name), **fields}


def _with_tuples(value):
    return tuple(map(_with_tuples, value)) if isinstance(value, list) else value


def _import_named(name: str):
    """What "my_module:MyModel" names."""
    if name in CALLED:
        return CALLED[name]
    module_name, colon, attribute = name.partition(":")
    if not colon:
        raise ConfigError(
            f"model={name!r}",
            "there is no preset of that name",
            f"Use {', '.join(PRESETS)}, my_module:MyModel, or the path of a config.json",
        )
    if module_name.endswith(".py") or not all(part.isidentifier() for part in (*module_name.split("."), attribute)):
        raise ConfigError(
            f"model={name!r}",
            "a module and a class must be named as `import` names them",
            f"Write {Path(module_name).stem or 'my_module'}:MyModel",
        )
    _search_current_folder()
    with _errors_of_module(name):
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # the module is there, and imports another that is not
            raise ConfigError(
                f"model={name!r}",
                f"there is no module {error.name} in the current folder or on PYTHONPATH",
                "Name a class in a module, as in my_module:MyModel",
            ) from error
        if not hasattr(module, attribute):
            known = sorted(f"{module_name}:{each}" for each in _models_in(module))
            remedy = f"Use {' or '.join(known)}" if known else "Name a subclass of jaxdist.models.base.Model"
            raise ConfigError(f"model={name!r}", f"the module {module_name} has no {attribute}", remedy)
        return getattr(module, attribute)


def _search_current_folder() -> None:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _models_in(module: ModuleType) -> dict[str, object]:
    """The classes of models that a module defines, and the models."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, Model)
        or (inspect.isclass(value) and issubclass(value, Model) and value.__module__ == module.__name__)
    }


def _check_class(name: str, cls: type[Model], needs_defaults: bool = True) -> None:
    asked = f"model={name!r}"
    missing = sorted(cls.__abstractmethods__)
    if cls.head is Model.head and cls.loss is Model.loss:
        missing.append("head or loss")
    if missing:
        raise ConfigError(
            asked, f"its class must define {', '.join(missing)}", "Define what jaxdist.models.base.Model asks for"
        )
    parameters = getattr(cls, "__dataclass_params__", None)
    if parameters is None or not parameters.frozen:
        reason = "its class must be a frozen dataclass: a model is compared by its sizes"
        raise ConfigError(asked, reason, "Write @dataclass(frozen=True) before the class")
    bare = [
        field.name
        for field in dataclasses.fields(cls)
        if field.init and field.default is field.default_factory is dataclasses.MISSING
    ]
    if needs_defaults and bare:
        reason = f"it is made without arguments, so {', '.join(bare)} must have a default"
        raise ConfigError(asked, reason, "Give every field a default, or name an instance")


def _check_values(name: str, model: Model) -> None:
    for field, value in _fields(model).items():
        if not isinstance(value, PLAIN):
            raise ConfigError(
                f"model={name!r}",
                f"its field {field} must be something that config.json can hold, not {type(value).__name__}",
                "Keep to numbers, words and tuples of them",
            )


def _check_sizes(model: Model) -> None:
    """That the sizes are sizes, whatever the model itself checks. Raises: ConfigError."""
    for name in ("num_layers", "seq_len", "vocab_size"):
        if not isinstance(getattr(model, name, None), int):
            raise ConfigError(
                f"model {type(model).__name__}", f"must have a whole number {name}", f"Add the field `{name}: int = 1`"
            )
    for name, most in BOUNDS.items():
        if isinstance(size := getattr(model, name, None), int):
            require_positive(name, size, most)
    require_within("dropout", model.dropout, 0, 1 - 1e-7, "Use 0.1")


def _fields(model: Model) -> dict[str, object]:
    return {field.name: getattr(model, field.name) for field in dataclasses.fields(model)}


# ---------------------------------------------------------------------------------------------------------------------
# What a model is called
# ---------------------------------------------------------------------------------------------------------------------


def class_name(model: Model) -> str | None:
    """The class of a user's own model, as in my_module:MyModel; None for GPT-2, the class of the presets."""
    if type(model) is GPT2Config:
        return None
    ours = {cls: name for name, cls in CALLED.items()}
    return ours.get(type(model), f"{type(model).__module__}:{type(model).__qualname__}")


def name_of(model: Model) -> tuple[str, dict]:
    """The name for `find_model` of the nearest model, and the sizes that differ from it.

    Raises: ConfigError where a field differs that no flag sets.
    """
    if isinstance(model, LoRA):
        name, sizes = name_of(model.base)
        sizes |= {"lora": model.rank}
        sizes |= {"lora_alpha": model.alpha} if model.alpha != ALPHA_PER_RANK * model.rank else {}
        return name, sizes | ({"lora_targets": ",".join(model.targets)} if model.targets else {})
    wanted, nearest = _fields(model), None
    for name, found in _named_models(model):
        sizes = {field: value for field, value in wanted.items() if value != getattr(found, field)}
        if all(field in SIZES for field in sizes) and (nearest is None or len(sizes) < len(nearest[1])):
            nearest = name, sizes
    if nearest is None:
        raise ConfigError(
            f"model {model.describe()}", "flags must describe it", "Keep it in its module, as in SMALL = MyModel(...)"
        )
    name, sizes = nearest
    if isinstance(model, GPT2Config) and "width" in sizes:
        sizes.setdefault("ffn_width", model.ffn_width)
    return name, sizes


def _named_models(model: Model) -> Iterator[tuple[str, Model]]:
    """The models of the same class that have a name."""
    cls = type(model)
    yield from ((name, found) for name, found in (PRESETS | _read).items() if type(found) is cls)
    if cls is GPT2Config:
        return
    for name, found in _models_in(sys.modules[cls.__module__]).items():
        if found is cls:
            try:
                found = cls()
            except TypeError:  # a field has no default
                continue
        if type(found) is cls:
            yield f"{cls.__module__}:{name}", found


# ---------------------------------------------------------------------------------------------------------------------
# The user's module
# ---------------------------------------------------------------------------------------------------------------------


def source_of(name: str) -> Path | None:
    """The file that a model's name names: a config.json, or a module, found without running it; None for a preset."""
    if name not in PRESETS and is_path(name):
        return Path(name) / CONFIG if Path(name).is_dir() else Path(name)
    module_name, colon, _ = name.partition(":")
    if not colon or not all(part.isidentifier() for part in module_name.split(".")):
        return None
    _search_current_folder()
    try:
        spec = importlib.util.find_spec(module_name)
    except Exception:  # a package above it that cannot be imported, which `find_model` reports
        return None
    return None if spec is None or not spec.has_location else Path(spec.origin)


def source_digest(name: str) -> str:
    """SHA-256 of that file, "" where there is none."""
    path = source_of(name)
    try:
        return "" if path is None else hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def fault_in(name: str, error: BaseException) -> str | None:
    """The file and line of a user's module where an exception comes from; None where it does not pass through it."""
    path = source_of(name)
    if path is None:
        return None
    if isinstance(error, SyntaxError) and error.filename is not None and Path(error.filename) == path:
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"{path}, line {lines[-1]}" if lines else None


@contextmanager
def _errors_of_module(name: str) -> Iterator[None]:
    """Turn whatever the user's module raises into a ConfigError that says where."""
    try:
        yield
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        where = fault_in(name, error) or f"the module {name.partition(':')[0]}"
        said = f"{where} raised {type(error).__name__}: {reason_of(error)}"
        raise ConfigError(f"model={name!r}", said, "Correct the module") from error
