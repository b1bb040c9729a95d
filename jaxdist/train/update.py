"""The update of the shards a rank owns, with any optax transformation: norms, clipping, the rate, what an overflow
leaves as it is."""

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf
from jaxdist.parallel import collectives as comm


@jax.named_scope("gradient_norms")
def gradient_norms(grads: dict, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """L2 norm of the whole gradient and of each of `layout.groups`, every replicated element counted once.

    Layout: grads in the storage layout, all of them or some -> norm[], norms[groups], equal on every rank.
    Sends: one all-reduce for each set of axes that leaves are sharded on, a scalar for each of its groups.
    (`optax.clip_by_global_norm` on shards would use each rank's own norm.)
    Raises: ConfigError where no parameter has a gradient.
    """
    if not layout.groups:
        raise ConfigError("a step of a model that is frozen", "must train a parameter", "Leave frozen out of one")
    sums: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    leaves = dict(jax.tree.leaves_with_path(layout.leaves))
    for path, g in jax.tree.leaves_with_path(grads):
        leaf = leaves[path]
        if leaf.param.update != "gradient":
            continue
        part = sums.setdefault(leaf.storage_axes, {})
        part[leaf.group] = part.get(leaf.group, 0) + jnp.sum(jnp.square(g))
    squares = dict.fromkeys(layout.groups, 0)
    for axes, part in sums.items():
        for group, total in zip(part, comm.all_reduce(jnp.stack([*part.values()]), axes), strict=True):
            squares[group] = squares[group] + total
    return jnp.sqrt(sum(squares.values())), jnp.sqrt(jnp.stack([*squares.values()]))


@jax.named_scope("update")
def update(
    optimizer: optax.GradientTransformation,
    layout: Layout,
    finite: jax.Array,
    grads: dict,
    moments: optax.OptState,
    params: dict,
    *,
    step: jax.Array,
    norm: jax.Array,
    loss: jax.Array,
    num_tokens: int = 1,
) -> tuple[dict, optax.OptState]:
    """(parameters, moments) after one update, both unchanged to the bit where `finite` is false, but for counts.

    Layout: all in the storage layout; sends nothing but where the optimizer asks for a norm other than the gradient's.
    step, norm, loss: the run's step as a float, the gradient's global norm, the batch's loss.
    """

    def transform(grads: dict, moments, params: dict, step: jax.Array, norm: jax.Array, loss: jax.Array):
        def global_norm(tree) -> jax.Array:
            some, every = jax.tree.leaves(tree), jax.tree.leaves(grads)
            same = len(some) == len(every) and all(map(operator.is_, some, every))
            return norm if same else gradient_norms(tree, layout)[0]

        whole = optax.with_extra_args_support(optimizer)
        return whole.update(grads, moments, params, step=step, value=loss, global_norm=global_norm)

    learned = jax.tree.map(
        lambda leaf, g: g if leaf.param.update == "gradient" else jnp.zeros_like(g), layout.leaves, grads
    )
    updates, changed = keep_state_unless(finite, transform, learned, moments, params, step, norm, loss)

    def updated(leaf: Leaf, p: jax.Array, u: jax.Array, counts: jax.Array) -> jax.Array:
        if leaf.param.update == "count":
            return jnp.where(jnp.isfinite(counts), counts, p).astype(p.dtype)
        if leaf.param.update == "balance":
            # Counts of whole tokens less a mean over n: 1/n and more, or 0, but for rounding.
            above = jnp.sign(jnp.round(counts * num_tokens * leaf.shape[-1]))
            return jnp.where(finite, p - leaf.param.rate * above, p).astype(p.dtype)
        return jnp.where(finite, p + u, p).astype(p.dtype)

    return jax.tree.map(updated, layout.leaves, params, updates, grads), changed


def keep_state_unless(finite: jax.Array, transform: Callable, grads: dict, state, *rest) -> tuple[Any, Any]:
    """`transform(grads, state, *rest)` -> (updates, the new state), which is `state` to the bit where `finite` is
    false; the updates are then of no use.

    Each array of the state is chosen where it is made, and what follows is made of the choice. A choice of the whole
    state at the end needs the old and the new one at once: a copy of the moments.
    """
    given, treedef = jax.tree.flatten((grads, state, *rest))
    closed, results = jax.make_jaxpr(lambda *flat: transform(*treedef.unflatten(flat)), return_shape=True)(*given)
    jaxpr, old = closed.jaxpr, jax.tree.leaves(state)
    first = len(jaxpr.outvars) - len(old)
    keep = {v: was for v, was in zip(jaxpr.outvars[first:], old, strict=True) if not isinstance(v, Literal)}
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*closed.consts, *given), strict=True))
    chosen: dict = {}

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in jaxpr.eqns:
        with eqn.ctx.manager:
            made = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        values |= zip(eqn.outvars, made if eqn.primitive.multiple_results else [made], strict=True)
        for v in keep.keys() & set(eqn.outvars):
            values[v], chosen[v] = jnp.where(finite, values[v], keep[v]), keep[v]
    new = list(map(read, jaxpr.outvars))
    for i, was in enumerate(old, start=first):  # an array that is not made here, or is two of the state's
        if new[i] is not was and (isinstance(v := jaxpr.outvars[i], Literal) or chosen.get(v) is not was):
            new[i] = jnp.where(finite, new[i], was)
    return jax.tree.structure(results).unflatten(new)


def clip_by_global_norm(max_norm: float) -> optax.GradientTransformationExtraArgs:
    """Scale updates down to a global norm of at most `max_norm`: `optax.clip_by_global_norm` over shards.

    The step passes `global_norm`, which sums over ranks; without it the norm is of the arrays as they are.
    """

    def clipped(updates, state, params=None, *, global_norm: Callable = optax.tree.norm, **_):
        norm = global_norm(updates)
        shrink = max_norm / jnp.maximum(norm, max_norm)
        return jax.tree.map(lambda u: u * shrink, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, clipped)


def scale_by_learning_rate(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    """Scale by minus the rate of the run's step, which the step passes: nothing to keep, and no other count of steps
    (one that stands still where an update is skipped)."""

    def scaled(updates, state, params=None, *, step: jax.Array, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: u * -rate, updates), state

    return optax.GradientTransformationExtraArgs(optax.init_empty_state, scaled)
