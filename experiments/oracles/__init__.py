"""What the oracles compute of a run, in the words of `jaxdist.parity`: only this file knows both sides."""

import dataclasses
import importlib.util
from functools import partial
from typing import Literal

import jax
import numpy as np

from jaxdist.checkpoint.logical import MOMENTS, STEP
from jaxdist.commands import install_text
from jaxdist.config import RunConfig
from jaxdist.errors import ConfigError
from jaxdist.models.base import declare
from jaxdist.models.decoder import DecoderConfig
from jaxdist.models.gpt2 import GPT2Config
from jaxdist.params import named_params
from jaxdist.parity import Observed, by_layer, random_parameters
from jaxdist.placement import make_layout
from jaxdist.strategy import ParallelConfig

from . import decoder, plain

OracleName = Literal["none", "plain", "transformers"]

# Where optax keeps what the papers name.
MOMENT_NAMES = {
    "adamw": {"m": "0.mu", "v": "0.nu"},
    "lion": {"m": "0.mu"},
    "sgd": {"m": "0.trace"},
    "adafactor": {"row": "0.0.v_row", "column": "0.0.v_col", "whole": "0.0.v"},
    "muon": {
        "b": "0.inner_states.matrices.inner_state.0.trace",
        "m": "0.inner_states.others.inner_state.mu",
        "v": "0.inner_states.others.inner_state.nu",
    },
}
COUNTS = {
    "adamw": "0.count",
    "lion": "0.count",
    "adafactor": "0.0.count",
    "muon": "0.inner_states.others.inner_state.count",
}


def starting_parameters(oracle: OracleName, config: RunConfig) -> dict[str, np.ndarray]:
    """Random parameters at logical shape, by name: transformers' own for its oracle."""
    if oracle == "transformers":
        return _gpt2(config).parameters()
    return random_parameters(config, make_layout(config.model, ParallelConfig()))


def ask(oracle: OracleName, config: RunConfig, batches: list[dict], start: dict[str, np.ndarray]) -> Observed:
    """What the oracle computes of this run from its `starting_parameters`, in float64 whatever the run's dtype is."""
    settings = config.optimizer
    names = {field.name for field in dataclasses.fields(plain.Recipe)}
    rule = {name: value for name, value in vars(settings).items() if name in names}
    sizes = {"vocab_size": config.model.vocab_size, "dropout": config.model.dropout}
    sizes["balance_rate"] = getattr(config.model, "balance_rate", 0.0)
    recipe = plain.Recipe(**rule, **sizes, optimizer=settings.name, seed=config.seed, total_steps=config.steps)
    if oracle == "plain":
        losses = partial(decoder.losses, decoder_settings(config)) if isinstance(config.model, DecoderConfig) else None
        with jax.enable_x64(True):
            found = dataclasses.asdict(plain.train(recipe, start, batches, losses))
    else:
        rates = [plain.learning_rate(recipe, step) for step in range(len(batches))]
        targets = [int((batch["targets"] >= 0).sum()) for batch in batches]
        found = _gpt2(config).train(
            batches, rates, (settings.beta1, settings.beta2), settings.eps, settings.weight_decay, settings.clip_norm
        )
        found |= {"rates": rates, "targets": targets}
    counted = {name for name, param in named_params(declare(config.model)) if param.update != "gradient"}
    counters = {f"targets of step {step}": float(n) for step, n in enumerate(found["targets"], 1)}
    counters[STEP] = float(len(batches))
    if settings.name in COUNTS:
        counters[f"{MOMENTS}.{COUNTS[settings.name]}"] = float(len(batches))
    return Observed(
        losses=found["losses"],
        norms=found["norms"],
        group_norms=[_group_norms(each, counted) for each in found["gradients"]],
        rates=found["rates"],
        gradients=[by_layer(each) for each in found["gradients"]],
        parameters=by_layer(found["parameters"]),
        moments=by_layer(_moments(settings.name, found)),
        counters=counters,
        evaluation=found["evaluation"],
    )


def decoder_settings(config: RunConfig) -> decoder.Settings:
    names = [field.name for field in dataclasses.fields(decoder.Settings)]
    return decoder.Settings(**{name: getattr(config.model, name) for name in names})


def require_known(oracle: OracleName, config: RunConfig) -> None:
    """Raises: ConfigError for a run that the oracle cannot compute."""
    known = (GPT2Config, DecoderConfig) if oracle == "plain" else (GPT2Config,)
    if type(config.model) not in known:
        raise ConfigError(
            f"--oracle {oracle} with {config.model.describe()}",
            f"the model must be {' or '.join(model.__name__ for model in known)}",
            "Leave it out",
        )
    if config.precision.dtype not in ("float32", "float64"):
        raise ConfigError(
            f"--oracle {oracle} with dtype {config.precision.dtype}",
            "must not be of 16 bits, too coarse to be held to an oracle, which computes in float64",
            "Use --dtype float32 or float64",
        )
    if oracle != "transformers":
        return
    if any(importlib.util.find_spec(name) is None for name in ("torch", "transformers")):
        raise ConfigError("--oracle transformers", "torch and transformers are not installed", install_text("oracle"))
    if config.optimizer.name != "adamw" or config.model.dropout or config.mask_documents:
        raise ConfigError(
            f"--oracle transformers with {config.optimizer.name}, dropout {config.model.dropout} and "
            f"mask_documents={config.mask_documents}",
            "must be AdamW without dropout, whose masks are not ours, and without masks of documents",
            "Use --oracle plain",
        )


def _gpt2(config: RunConfig):
    from .huggingface import Gpt2, Shape

    sizes = {field.name: getattr(config.model, field.name) for field in dataclasses.fields(Shape)}
    return Gpt2(Shape(**sizes), config.seed)


def _group_norms(gradients: dict, counted: set[str]) -> dict[str, float]:
    """Norms of what stands together: "blocks.attention" of all layers, and each table by itself."""
    squares: dict[str, float] = {}
    for name, g in gradients.items():
        if name in counted:
            continue
        group = ".".join(name.split(".")[:-1][:3]) or name
        squares[group] = squares.get(group, 0.0) + float(np.square(g).sum())
    return {group: square**0.5 for group, square in squares.items()}


def _moments(optimizer: str, found: dict) -> dict[str, np.ndarray]:
    """By optax's names. It keeps one zero where Adafactor has no such moment of a parameter."""
    names = MOMENT_NAMES[optimizer]
    none = dict.fromkeys(found["parameters"], np.zeros(1)) if optimizer == "adafactor" else {}
    return {
        f"{there}.{name}": moment
        for kind, there in names.items()
        for name, moment in (none | found["moments"][kind]).items()
    }
