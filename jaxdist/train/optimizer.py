"""The optimizer that a run's settings describe: rules, the learning-rate schedule, how its state is split."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from jaxdist.config import OptimizerConfig, RunConfig
from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf
from jaxdist.mesh import TOKEN_AXES
from jaxdist.parallel.muon import Matrix, scale_by_muon
from jaxdist.specs import storage_spec
from jaxdist.train.update import clip_by_global_norm, scale_by_learning_rate

# AdamW, Lion and SGD-momentum work element by element, so they run unchanged on shards of any layout. Adafactor looks
# at whole (stacked) leaves; `RunConfig` refuses it where a rank holds less. Muon sends what its matrices need.
RULES: dict[str, Callable[[OptimizerConfig, Layout], optax.GradientTransformation]] = {
    "adamw": lambda config, _: optax.scale_by_adam(config.beta1, config.beta2, config.eps),
    "lion": lambda config, _: optax.scale_by_lion(config.beta1, config.beta2),
    "sgd": lambda config, _: optax.trace(config.beta1),
    "adafactor": lambda *_: optax.chain(
        optax.scale_by_factored_rms(decay_rate_fn=adafactor_decay), optax.clip_by_block_rms(1.0)
    ),
    "muon": lambda config, layout: optax.partition(
        {
            "matrices": scale_by_muon(
                jax.tree.map(matrix_of, layout.leaves),
                momentum=muon_momentum(config),
                nesterov=config.nesterov,
                scale=config.muon_scale,
                coefficients=config.muon_coefficients,
                bf16=config.muon_bf16,
            ),
            "others": RULES["adamw"](config, layout),
        },
        jax.tree.map(lambda leaf: "matrices" if leaf.param.matrix else "others", layout.leaves),
    ),
}


MUON_START = 0.85


def muon_momentum(config: OptimizerConfig) -> float | optax.Schedule:
    """Muon's momentum; by step where it rises (as in Jordan et al.'s runs: github.com/KellerJordan/modded-nanogpt)."""
    steps, top = config.momentum_warmup_steps, config.momentum
    return optax.linear_schedule(min(MUON_START, top), top, steps) if steps else top


def matrix_of(leaf: Leaf) -> Matrix | None:
    """A leaf's declaration of matrices, as it is stored; None where it has none."""
    copies = tuple(axis for axis in TOKEN_AXES if leaf.mesh.size(axis) > 1 and axis not in leaf.storage_axes)
    return Matrix(leaf.shape, leaf.param.matrix, storage_spec(leaf), copies) if leaf.param.matrix else None


def make_optimizer(config: RunConfig, layout: Layout) -> optax.GradientTransformationExtraArgs:
    """The optimizer that a configuration describes: clip, the rule, decoupled weight decay of matrices and embeddings
    alone (as declared beside each parameter), the learning rate."""
    chosen = config.optimizer
    return optax.chain(
        clip_by_global_norm(chosen.clip_norm),
        RULES[chosen.name](chosen, layout),
        optax.add_decayed_weights(chosen.weight_decay, jax.tree.map(lambda leaf: leaf.param.decay, layout.leaves)),
        scale_by_learning_rate(learning_rate(config)),
    )


def adafactor_decay(step: jax.Array, power: float) -> jax.Array:
    """1 - t^-power, t counting from 1, in the precision of the run; optax's own rounds it to 32 bits."""
    return 1 - (step + 1.0) ** -power


def updater(optimizer: optax.GradientTransformation) -> Callable:
    """(gradients, state, params, step, norm, loss) -> (updates, state) with what a step passes, to be traced."""

    def update(grads: dict, state, params: dict, step, norm, loss):
        whole = optax.with_extra_args_support(optimizer)
        return whole.update(grads, state, params, step=step, value=loss, global_norm=lambda _: norm)

    return update


def require_arguments(optimizer: optax.GradientTransformation, params: dict) -> None:
    """Refuse an optimizer that asks for more than a step passes, as a search along a line does. params: their shapes.

    Raises: ConfigError.
    """
    scalar = jax.ShapeDtypeStruct((), jnp.float32)
    try:
        jax.eval_shape(updater(optimizer), params, jax.eval_shape(optimizer.init, params), params, *[scalar] * 3)
    except TypeError as error:
        if "required keyword-only argument" not in str(error):
            raise
        rule, _, lacks = str(error).partition(" missing ")
        raise ConfigError(
            f"an optimizer in which {rule.partition('.')[0]} misses {lacks}",
            "must need no more extra arguments than step, value (the batch's loss) and global_norm",
            "Use one that makes its update of one gradient",
        ) from error


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
