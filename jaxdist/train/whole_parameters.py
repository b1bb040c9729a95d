"""Optimizers that look at whole parameters, on layouts of which a rank holds parts: gathered, updated, cut again.

Shampoo and SOAP, Adafactor's factored moments, LAMB's trust ratios, norms over everything: what one device computes is
computed on every rank, of parameters and gradients at their logical shapes, so that it is equal on every mesh.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax.sharding import PartitionSpec

from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf, axes_of
from jaxdist.parallel import collectives as comm
from jaxdist.parallel.relayout import from_storage, gather_whole, to_storage
from jaxdist.specs import draw_spec
from jaxdist.train.optimizer import by_owner, require_arguments


def with_whole_parameters(
    optimizer: optax.GradientTransformation,
) -> Callable[[Layout], optax.GradientTransformationExtraArgs]:
    """The optimizer for `build_program`, called with every parameter whole: exact, for whatever looks at more than
    single elements.

    Layout: parameters, gradients and arrays of the optimizer's state that have their parameter's shape are in the
    storage layout; the rest of the state is whole on every rank. During an update every rank holds all of them whole.
    Sends: an all-gather of each that the update uses, over the axes that it is stored on, and from stages of uneven
    depth an all-to-all over pp.
    """
    inner = optax.with_extra_args_support(optimizer)

    def on(layout: Layout) -> optax.GradientTransformationExtraArgs:
        require_arguments(
            inner, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), layout.leaves)
        )

        def owners(params: dict) -> Any:
            """For each array of the state the leaf that it is stored like; False for the others."""
            shapes = jax.tree.map(lambda leaf, p: jax.ShapeDtypeStruct(leaf.shape, p.dtype), layout.leaves, params)
            state = jax.eval_shape(inner.init, shapes)
            return by_owner(stored_like, state, layout.leaves, False)

        def init(params: dict):
            if jax.sharding.get_abstract_mesh().manual_axes:
                state = inner.init(jax.tree.map(whole, layout.leaves, params))
                return jax.tree.map(own, owners(params), state)
            state = inner.init(jax.tree.map(lambda leaf, p: jnp.zeros(leaf.shape, p.dtype), layout.leaves, params))
            return jax.tree.map(_padded, owners(params), state)  # outside of `shard_map` for its shapes alone

        def update(grads: dict, state, params: dict, *, global_norm=None, **extra):
            leaf_of = owners(params)
            grads, params = (jax.tree.map(whole, layout.leaves, tree) for tree in (grads, params))
            state = jax.tree.map(whole, leaf_of, state)
            updates, state = inner.update(grads, state, params, global_norm=optax.tree.norm, **extra)
            return jax.tree.map(own, layout.leaves, updates), jax.tree.map(own, leaf_of, state)

        return optax.GradientTransformationExtraArgs(init, update)

    return on


def stored_like(x: jax.ShapeDtypeStruct, leaf: Leaf) -> Leaf | bool:
    if x.shape == leaf.storage_shape != leaf.shape:  # which `optimizer_specs` would take for a shard
        raise ConfigError(
            f"an optimizer that keeps an array of shape {x.shape} for parameter {leaf.name} of shape {leaf.shape}",
            "must keep none of the shape to which ZeRO pads the parameter",
            "Use another number of ranks",
        )
    return leaf if x.shape == leaf.shape else False


def whole(leaf: Leaf | bool, x: jax.Array) -> jax.Array:
    """x[`storage_spec`] -> the logical array, equal on all ranks; what has no leaf, as it is."""
    return gather_whole(from_storage(leaf, x), draw_spec(leaf)) if isinstance(leaf, Leaf) else x


def own(leaf: Leaf | bool, x: jax.Array) -> jax.Array:
    """Undo `whole`. Sends nothing, but where stages hold parts of a table or layers in another order."""
    return to_storage(leaf, _cut(x, draw_spec(leaf))) if isinstance(leaf, Leaf) else x


def _cut(x: jax.Array, spec: PartitionSpec) -> jax.Array:
    for dim, axes in enumerate(spec):
        length = x.shape[dim] // comm.size(axes_of(axes))
        x = lax.dynamic_slice_in_dim(x, comm.rank(axes_of(axes)) * length, length, axis=dim)
    return x


def _padded(leaf: Leaf | bool, x: jax.Array) -> jax.Array:
    return jnp.zeros(leaf.storage_shape, x.dtype) if isinstance(leaf, Leaf) else x
