"""Update rules on the shards a rank owns, the learning-rate schedule, clipping and loss scaling."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.layout import Layout, Leaf
from jaxdist.parallel import collectives as comm
from jaxdist.specs import storage_spec
from jaxdist.strategy import PrecisionConfig


def make_optimizer(
    config: OptimizerConfig, layout: Layout, finite: jax.Array | bool = True
) -> optax.GradientTransformation:
    """The update direction, before the learning rate: `p <- p - lr * update`.

    Where `finite` is false the moments decay by 1, so that gradients of -0.0 leave them as they are, to the bit. (A
    choice between old and new moments would need both at once, which costs a copy of them.)

    AdamW, Lion and SGD-momentum work element by element, so they run unchanged on shards of any layout. Adafactor
    looks at whole (stacked) leaves; `RunConfig` refuses it where a rank holds less. Weight decay is decoupled and
    applies to matrices and embeddings alone, as declared beside each parameter.
    """
    betas = (config.beta1, config.beta2)
    beta1, beta2 = betas if finite is True else (jnp.where(finite, beta, 1.0) for beta in betas)
    rule = {
        "adamw": lambda: optax.scale_by_adam(beta1, beta2, config.eps),
        "lion": lambda: optax.scale_by_lion(beta1, beta2),
        "sgd": lambda: optax.trace(beta1),
        "adafactor": lambda: optax.chain(
            optax.scale_by_factored_rms(decay_rate_fn=adafactor_decay), optax.clip_by_block_rms(1.0)
        ),
    }[config.name]()
    decay_mask = jax.tree.map(lambda leaf: leaf.param.weight_decay, layout.leaves)
    return optax.chain(rule, optax.add_decayed_weights(config.weight_decay, decay_mask))


def adafactor_decay(step: jax.Array, power: float) -> jax.Array:
    """1 - t^-power, t counting from 1, in the precision of the run; optax's own rounds it to 32 bits."""
    return 1 - (step + 1.0) ** -power


@jax.named_scope("update")
def update(
    config: OptimizerConfig,
    layout: Layout,
    finite: jax.Array,
    grads: dict,
    moments,
    params: dict,
    lr: jax.Array,
    num_tokens: int = 1,
) -> tuple[dict, Any]:
    """(parameters, moments) after one update, both unchanged to the bit where `finite` is false, but for counts.

    (A mean of squares of -0.0 would become 0.0; none is ever made.)

    Layout: all in the storage layout; sends nothing.
    """
    counted, grads = grads, jax.tree.map(lambda g: jnp.where(finite, g, -0.0), grads)
    updates, changed = make_optimizer(config, layout, finite).update(grads, moments, params)
    changed = jax.tree.map(
        lambda new, old: jnp.where(finite, new, old) if config.name == "adafactor" or new.ndim == 0 else new,
        changed,
        moments,
    )

    def updated(leaf: Leaf, p: jax.Array, u: jax.Array, counts: jax.Array) -> jax.Array:
        if leaf.param.update == "count":
            return jnp.where(jnp.isfinite(counts), counts, p).astype(p.dtype)
        if leaf.param.update == "balance":
            # Counts of whole tokens less a mean over n: 1/n and more, or 0, but for rounding.
            above = jnp.sign(jnp.round(counts * num_tokens * leaf.shape[-1]))
            return jnp.where(finite, p - leaf.param.rate * above, p).astype(p.dtype)
        return jnp.where(finite, p - lr * u, p).astype(p.dtype)

    return jax.tree.map(updated, layout.leaves, params, updates, counted), changed


def optimizer_specs(optimizer: optax.GradientTransformation, layout: Layout):
    """PartitionSpecs of an optimiser state: moments are stored as their parameters are, counters are replicated."""
    storage = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, jnp.float32), layout.leaves)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda moment, leaf: storage_spec(leaf) if moment.shape == leaf.storage_shape else PartitionSpec(),
        jax.eval_shape(optimizer.init, storage),
        layout.leaves,
        transform_non_params=lambda _: PartitionSpec(),
    )


DECAY_OF_WSD = 0.2  # of the steps after the warm-up


def learning_rate(config: RunConfig, step: jax.Array) -> jax.Array:
    """Linear warm-up, then down from `lr` to `lr * min_lr_ratio` after the last step as `lr_schedule` says (wsd:
    MiniCPM's warm-up, stable, decay, arXiv 2404.06395, with the last fifth as its decay).

    `step` counts from 0, as a float of the precision wanted.
    """
    schedule = config.optimizer
    warmup = min(schedule.warmup_steps, config.steps)
    ramp = (step + 1) / max(warmup, 1)
    progress = jnp.clip((step - warmup) / max(config.steps - warmup, 1), 0, 1)
    floor = schedule.min_lr_ratio
    left = {
        "cosine": 0.5 * (1 + jnp.cos(jnp.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": jnp.minimum(1, (1 - progress) / DECAY_OF_WSD),
    }[schedule.lr_schedule]
    return schedule.lr * jnp.where(step < warmup, ramp, floor + (1 - floor) * left)


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
