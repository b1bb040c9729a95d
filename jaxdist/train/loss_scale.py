"""The dynamic loss scale of float16."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from jaxdist.strategy import PrecisionConfig


class LossScale(NamedTuple):
    """Dynamic loss scaling: the scale, steps since the last overflow, overflows still tolerated before it halves."""

    scale: jax.Array
    good_steps: jax.Array
    hysteresis: jax.Array


def initial_loss_scale(config: PrecisionConfig) -> LossScale | None:
    if config.dtype != "float16":
        return None
    return LossScale(jnp.float32(config.loss_scale), jnp.int32(0), jnp.int32(config.loss_scale_hysteresis))


def next_loss_scale(state: LossScale, finite: jax.Array, config: PrecisionConfig) -> LossScale:
    """Double after a window of finite steps; halve (never below 1) once overflows have used up the hysteresis.

    Source: arXiv 1710.03740, section 3.2; hysteresis as in Megatron-LM.
    """
    grown = state.good_steps + 1 >= config.loss_scale_window
    exhausted = state.hysteresis <= 1
    full = jnp.int32(config.loss_scale_hysteresis)
    good = LossScale(
        jnp.where(grown, state.scale * 2, state.scale),
        jnp.where(grown, 0, state.good_steps + 1),
        jnp.where(grown, full, state.hysteresis),
    )
    bad = LossScale(
        jnp.where(exhausted, jnp.maximum(state.scale / 2, 1), state.scale),
        jnp.int32(0),
        jnp.where(exhausted, state.hysteresis, state.hysteresis - 1),
    )
    return jax.tree.map(lambda a, b: jnp.where(finite, a, b), good, bad)
