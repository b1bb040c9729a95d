"""Update rules on the shards a rank owns, the learning-rate schedule, clipping and loss scaling."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.layout import Layout, Leaf
from jaxdist.parallel import collectives as comm
from jaxdist.specs import storage_spec
from jaxdist.strategy import PrecisionConfig

# AdamW, Lion and SGD-momentum work element by element, so they run unchanged on shards of any layout. Adafactor looks
# at whole (stacked) leaves; `RunConfig` refuses it where a rank holds less.
RULES: dict[str, Callable[[OptimizerConfig], optax.GradientTransformation]] = {
    "adamw": lambda config: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
    "lion": lambda config: optax.scale_by_lion(config.beta1, config.beta2),
    "sgd": lambda config: optax.trace(config.beta1),
    "adafactor": lambda config: optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=adafactor_decay), optax.clip_by_block_rms(1.0)
    ),
}


def make_optimizer(config: RunConfig, layout: Layout) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a configuration describes: clip, the rule, decoupled weight decay of matrices and embeddings
    alone (as declared beside each parameter), the learning rate."""
    chosen = config.optimizer
    return optax.chain(
        clip_by_global_norm(chosen.clip_norm),
        RULES[chosen.name](chosen),
        optax.add_decayed_weights(chosen.weight_decay, jax.tree.map(lambda leaf: leaf.param.decay, layout.leaves)),
        scale_by_learning_rate(learning_rate(config)),
    )


def adafactor_decay(step: jax.Array, power: float) -> jax.Array:
    """1 - t^-power, t counting from 1, in the precision of the run; optax's own rounds it to 32 bits."""
    return 1 - (step + 1.0) ** -power


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
    num_tokens: int = 1,
) -> tuple[dict, optax.OptState]:
    """(parameters, moments) after one update, both unchanged to the bit where `finite` is false, but for counts.

    Layout: all in the storage layout; sends nothing but where the optimizer asks for a norm other than the gradient's.
    step, norm: the run's step as a float, and the gradient's global norm.
    """

    def transform(grads: dict, moments, params: dict, step: jax.Array, norm: jax.Array):
        def global_norm(tree) -> jax.Array:
            same = all(map(operator.is_, jax.tree.leaves(tree), jax.tree.leaves(grads)))
            return norm if same else gradient_norms(tree, layout)[0]

        whole = optax.with_extra_args_support(optimizer)
        return whole.update(grads, moments, params, step=step, global_norm=global_norm)

    learned = jax.tree.map(
        lambda leaf, g: g if leaf.param.update == "gradient" else jnp.zeros_like(g), layout.leaves, grads
    )
    updates, changed = keep_state_unless(finite, transform, learned, moments, params, step, norm)

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


def by_owner(function: Callable, state: optax.OptState, params: dict, of_others):
    """`function(x, p)` of each array of an optimizer's state and the entry of `params` that it belongs to; `of_others`
    for counters and the like.

    An array belongs to a parameter whose path its own ends with: `optax.tree_map_params` cannot tell where a
    transformation leaves parameters out (`optax.partition`, `optax.masked`).
    """
    owners = {tuple(map(str, path)): p for path, p in jax.tree.leaves_with_path(params)}

    def mapped(path, x):
        keys = tuple(map(str, path))
        found = [owners[keys[i:]] for i in range(len(keys)) if keys[i:] in owners]
        return function(x, found[0]) if found else of_others

    return jax.tree.map_with_path(mapped, state)


def optimizer_specs(optimizer: optax.GradientTransformation, layout: Layout):
    """PartitionSpecs of an optimiser state: moments are stored as their parameters are, counters are replicated."""
    storage = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32), layout.leaves)

    def spec(moment: jax.ShapeDtypeStruct, leaf: Leaf) -> PartitionSpec:
        return storage_spec(leaf) if moment.shape == leaf.storage_shape else PartitionSpec()

    return by_owner(spec, jax.eval_shape(optimizer.init, storage), layout.leaves, PartitionSpec())


DECAY_OF_WSD = 0.2  # of the steps after the warm-up


def learning_rate(config: RunConfig) -> optax.Schedule:
    """Linear warm-up, then down from `lr` to `lr * min_lr_ratio` after the last step as `lr_schedule` says (wsd:
    MiniCPM's warm-up, stable, decay, arXiv 2404.06395, with the last fifth as its decay).

    The step counts from 0, as a float of the precision wanted.
    """
    chosen = config.optimizer
    top, floor = chosen.lr, chosen.lr * chosen.min_lr_ratio
    warmup = min(chosen.warmup_steps, config.steps)
    rest = max(config.steps - warmup, 1)
    decay = rest * DECAY_OF_WSD
    course = {
        "cosine": lambda: optax.cosine_decay_schedule(top, rest, chosen.min_lr_ratio),
        "linear": lambda: optax.linear_schedule(top, floor, rest),
        "constant": lambda: optax.constant_schedule(top),
        "wsd": lambda: optax.linear_schedule(top, floor, decay, transition_begin=rest - decay),
    }[chosen.lr_schedule]()
    if not warmup:
        return course
    ramp = optax.linear_schedule(top / warmup, top, warmup - 1) if warmup > 1 else optax.constant_schedule(top)
    return optax.join_schedules([ramp, course], [warmup])


@jax.named_scope("gradient_norms")
def gradient_norms(grads: dict, layout: Layout) -> tuple[jax.Array, jax.Array]:
    """L2 norm of the whole gradient and of each of `layout.groups`, every replicated element counted once.

    Layout: grads in the storage layout -> norm[], norms[groups], equal on every rank.
    Sends: one all-reduce for each set of axes that leaves are sharded on, a scalar for each of its groups.
    (`optax.clip_by_global_norm` on shards would use each rank's own norm.)
    """
    sums: dict[tuple[str, ...], dict[str, jax.Array]] = {}
    for leaf, g in zip(jax.tree.leaves(layout.leaves), jax.tree.leaves(grads), strict=True):
        if leaf.param.update != "gradient":
            continue
        part = sums.setdefault(leaf.storage_axes, {})
        part[leaf.group] = part.get(leaf.group, 0) + jnp.sum(jnp.square(g))
    squares = dict.fromkeys(layout.groups, 0)
    for axes, part in sums.items():
        for group, total in zip(part, comm.all_reduce(jnp.stack([*part.values()]), axes), strict=True):
            squares[group] = squares[group] + total
    return jnp.sqrt(sum(squares.values())), jnp.sqrt(jnp.stack([*squares.values()]))


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
