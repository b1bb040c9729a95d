"""What backward keeps of forward and what it computes again."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from jaxdist.errors import ConfigError
from jaxdist.mesh import STATE_AXES

# Operations that only move or retype one array.
MOVES = {
    *("reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type"),
    *("pvary", "copy", "stop_gradient"),
}
# Operations that work element by element, or take a part: cheaper to repeat than to write their result to memory and
# read it again.
CHEAP = MOVES | {
    *("abs", "add", "and", "cos", "div", "dynamic_slice", "eq", "erf", "exp", "exp2", "expm1", "ge", "gt"),
    *("integer_pow", "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not"),
    *("one_minus_square", "or", "pow", "rev", "rsqrt", "select_n", "sign", "sin", "slice", "sqrt", "square", "sub"),
    *("tanh", "unstack", "xor"),
}
FREE = CHEAP | {"iota", "name"}  # positions follow from nothing, and a mark computes nothing
GATHERS = {"all_gather", "all_gather_invariant"}
# What follows from constants alone, and what a kept mask was drawn from.
DRAWS = {"iota", "random_bits", "random_fold_in", "random_wrap", "random_unwrap", "threefry2x32"}
KEPT, HEADS = MARKS = "kept", "heads"
CUDNN_FORWARD = "dot_product_attention_fwd_wrapper"  # JAX's name of cuDNN's attention; a plan's stand-in has it too
Made = tuple[str, tuple[tuple[int, ...], ...]]  # an operation, and the shapes it reads


def mark_saveable(x: jax.Array, mark: str = KEPT) -> jax.Array:
    """Mark an array that backward must not compute again though operations that are repeated made it.

    mark: of `MARKS`; HEADS is of queries, keys and values, which `remat` can name apart from others of their shape.
    """
    return checkpoint_name(x, mark)


def made_by(name: str, avals: Sequence, params: dict) -> Made:
    """An operation, or the mark HEADS, on arrays of these types. Of cuDNN's attention its queries, keys and values."""
    name = HEADS if params.get("name") == HEADS else name
    return name, tuple(tuple(aval.shape) for aval in (avals[:3] if name == CUDNN_FORWARD else avals))


@dataclass(frozen=True, eq=False)
class SavePolicy:
    """A policy for `jax.checkpoint`: products of matrices, sums and collectives are kept, elementwise work is repeated.

    A layer then keeps its GELU's input instead of every step of the GELU, as fused kernels do elsewhere.
    regathers: weights that ZeRO-3 gathered are gathered again, not kept. selective: products
    with batch dims are repeated as well: attention's (arXiv 2205.05198, section 5), and a model's own, if it has any.
    repeated: what these operations make is repeated too; seen: those of them that were asked about.
    """

    regathers: bool = False
    selective: bool = False
    repeated: frozenset[Made] = frozenset()
    seen: set[Made] = field(default_factory=set)

    def __call__(self, primitive, *avals, **params) -> bool:
        name = primitive.name
        if self.repeated and (made := made_by(name, avals, params)) in self.repeated:
            self.seen.add(made)
            return False
        if only_moves_weights(name, params):
            return not self.regathers and gathers_weights(name, params)
        if self.selective and name == "dot_general" and params["dimension_numbers"][1][0]:
            return False
        return params["name"] in MARKS if name == "name" else name not in CHEAP | DRAWS

    def require_seen(self, word: str) -> None:
        """Raises: ConfigError where no operation makes one of the arrays that `remat`, this word, names."""
        unseen = self.repeated - self.seen
        if unseen:
            raise ConfigError(
                f"remat={word!r}",
                f"a layer's {min(unseen)[0]} must read what it names: was it made for another layout or attention?",
                "Use remat=auto, which chooses for this one",
            )


def only_moves_weights(name: str, params: dict) -> bool:
    """Whether an operation moves weights without computing: an unshard is a custom_vjp_call of nothing but such.

    A gather over tp is of activations; one of keys over cp, which ZeRO may use as well, marks what it found.
    """
    inner = called(name, params)
    if inner is not None:
        return all(only_moves_weights(eqn.primitive.name, eqn.params) for eqn in inner.eqns)
    return gathers_weights(name, params) or name in MOVES | {"slice", "concatenate"}


def gathers_weights(name: str, params: dict) -> bool:
    inner = called(name, params)
    if inner is not None:
        return any(gathers_weights(eqn.primitive.name, eqn.params) for eqn in inner.eqns)
    return name in GATHERS and not set(STATE_AXES).isdisjoint(params["axis_name"])


def called(name: str, params: dict) -> Any:
    """The program that an operation calls once, None where it calls none."""
    if name not in ("custom_vjp_call", "jit", "pjit"):
        return None
    return params["call_jaxpr"] if "call_jaxpr" in params else params["jaxpr"]
