"""What a training step reads and replaces, and how it starts."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxdist.config import RunConfig
from jaxdist.layout import Layout, drop_frozen
from jaxdist.parallel.relayout import to_compute, to_storage
from jaxdist.specs import kept_dtype
from jaxdist.train.loss_scale import LossScale, initial_loss_scale


class State(NamedTuple):
    """Everything a step reads and replaces.

    params: compute dtype; compute layout, or storage layout for ZeRO-3. master: fp32 in the storage layout, None where
    `params` are fp32 (or fp64) already. moments: the optimiser's, in the storage layout. Both are of what is trained.
    scale: fp16 only.
    """

    step: jax.Array
    params: dict
    master: dict | None
    moments: Any
    scale: LossScale | None


def stored_parameters(config: RunConfig, layout: Layout, logical: dict) -> dict:
    """Local logical arrays, split as they are drawn -> as they are kept, in the storage layout."""
    return jax.tree.map(
        lambda leaf, x: to_storage(leaf, x).astype(kept_dtype(leaf, config.precision)), layout.leaves, logical
    )


def initial_state(config: RunConfig, layout: Layout, optimizer: optax.GradientTransformation, stored: dict) -> State:
    """The state before the first step, on local shards."""
    trained = drop_frozen(layout.leaves, stored)
    params = stored if layout.params_sharded else jax.tree.map(to_compute, layout.leaves, stored)
    return State(
        step=jnp.int32(0),
        params=jax.tree.map(lambda x: x.astype(config.precision.dtype), params),
        master=None if config.precision.dtype == config.precision.master_dtype else trained,
        moments=optimizer.init(trained),
        scale=initial_loss_scale(config.precision),
    )


@contextmanager
def unusable_donations() -> Iterator[None]:
    """Without JAX's warning that what is padded, reordered or rounded cannot reuse the memory that it was given."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        yield
