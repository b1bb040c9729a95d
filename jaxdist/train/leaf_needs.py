"""What an optax transformation needs of each leaf, read off its trace, and whether a rank holds it.

An update that works element by element gives the same on shards of any layout. One that looks at a leaf as a whole (a
factored second moment, a matrix's root, a trust ratio) needs a leaf that every rank holds whole; one that looks at all
leaves at once (a global norm) needs all of them whole, or the step's `global_norm`. Optax's own and anybody else's are
traced, and what is not known to be elementwise counts as looking at all of its operands, unless it is declared
`exact_on_shards`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Literal

from jaxdist.errors import ConfigError
from jaxdist.layout import Layout, Leaf
from jaxdist.parallel.muon import EXACT_ON_SHARDS
from jaxdist.parallel.pipeline.split_backward import all_equations
from jaxdist.train.optimizer import by_owner, updater

# fmt: off
ELEMENTWISE = frozenset((
    "abs", "add", "add_any", "and", "atan2", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "copy_p",
    "cos", "cosh", "div", "eq", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow",
    "is_finite", "le", "log", "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "nextafter", "not", "or",
    "pow", "reduce_precision", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt", "square",
    "stop_gradient", "sub", "tan", "tanh", "xor",
))
# fmt: on
CALLS = ("jit", "pjit", "closed_call", "checkpoint", "remat", "custom_jvp_call", "custom_vjp_call")


class Use(NamedTuple):
    """How an array came about.

    leaves: the numbers of those it was made of. how: "equal", all elements are one number and that on every rank;
    "elements", each element is made of the same one of each of `leaves`; "mixed", anything else, since equation `by`.
    """

    leaves: frozenset[int]
    how: str
    by: Any = None


EQUAL = Use(frozenset(), "equal")


def require_held(optimizer: optax.GradientTransformation, layout: Layout, dtype: str) -> None:
    """Refuse an optimizer that needs more of a leaf than a rank stores.

    Raises: ConfigError, with the name of the transformation and of the leaf.
    """
    leaves: list[Leaf] = jax.tree.leaves(layout.leaves)
    if not any(leaf.storage_axes for leaf in leaves):
        return
    params = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_shape, dtype), layout.leaves)
    nobody = len(leaves)
    number = jax.tree.unflatten(jax.tree.structure(params), range(nobody))
    scalar = jax.ShapeDtypeStruct((), dtype)
    state = jax.eval_shape(optimizer.init, params)
    owners = jax.tree.leaves(by_owner(lambda _, i: i, state, number, of_others=nobody))

    per_leaf = [Use(frozenset([i]), "elements") for i in range(len(leaves))]
    kept = [
        _of_no_leaf(x.shape)
        if owner == nobody
        else Use(frozenset([owner]), "elements" if x.shape == leaves[owner].storage_shape else "mixed")
        for x, owner in zip(jax.tree.leaves(state), owners, strict=True)
    ]
    update, scalars = jax.make_jaxpr(updater(optimizer)), [scalar] * 3
    programs = [jax.make_jaxpr(optimizer.init)(params), update(params, state, params, *scalars)]
    made = _uses(programs[0], per_leaf) + _uses(programs[1], [*per_leaf, *kept, *per_leaf, EQUAL, EQUAL, EQUAL])
    for use, owner in zip(made, [*owners, *range(nobody), *owners], strict=True):
        together = use.leaves | ({owner} - {nobody})
        if use.how != "mixed" and together == {owner}:
            continue
        for split in (leaves[i] for i in sorted(together) if leaves[i].storage_axes):
            _refuse(use, split, len(use.leaves))
    if any(eqn.params.get("name") == EXACT_ON_SHARDS for program in programs for eqn in all_equations(program)):
        return  # it says itself what is the same on shards
    parts = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.storage_local, dtype), layout.leaves)
    state = jax.eval_shape(optimizer.init, parts)
    on_parts = [jax.make_jaxpr(optimizer.init)(parts), update(parts, state, parts, *scalars)]
    if list(map(_numbers, programs)) != list(map(_numbers, on_parts)):
        raise ConfigError(
            "the optimizer with parameters that are split",
            "must not compute with the shape of a parameter, of which a rank has a part",
            "Use jaxdist.with_whole_parameters(optimizer), which gathers them, or dp alone with zero=0",
        )


def _numbers(closed) -> list[str]:
    """The single numbers that are written into a program, as texts: NaN is no number that equals itself."""
    written = [atom.val for eqn in all_equations(closed) for atom in eqn.invars if isinstance(atom, Literal)]
    arrays = [x for x in (*closed.consts, *written) if not jnp.shape(x)]
    return [str(complex(x)) for x in arrays if jnp.issubdtype(jnp.result_type(x), jnp.number)]


def _of_no_leaf(shape: tuple[int, ...]) -> Use:
    return Use(frozenset(), "mixed") if shape else EQUAL


def _refuse(use: Use, leaf: Leaf, num_leaves: int) -> None:
    name, primitive = (None, "its state") if use.by is None else (_made_in(use.by), use.by.primitive.name)
    axes = ", ".join(f"{axis}={leaf.mesh.size(axis)}" for axis in leaf.storage_axes)
    looks = "at several parameters together" if num_leaves > 1 else "at more than one element at a time"
    raise ConfigError(
        f"{name or 'the optimizer'} ({primitive}) with parameter {leaf.name} split over {axes}",
        f"it looks {looks}, so every rank must hold all of them",
        "Use jaxdist.with_whole_parameters(optimizer), which gathers them; jaxdist.clip_by_global_norm for a norm, or "
        "the extra argument `global_norm` in a transformation of your own; or dp alone with zero=0",
    )


def _made_in(eqn) -> str | None:
    """The transformation that an equation belongs to, by the function that traced it: "clip" of
    "clip.<locals>.update_fn"."""
    traceback = eqn.source_info.traceback
    names = [frame.function_name for frame in traceback.frames] if traceback else []
    return next((n.split(".<locals>")[0] for n in names if ".<locals>.update" in n or ".<locals>.init" in n), None)


def _uses(closed, inputs: Sequence[Use]) -> list[Use]:
    """How each result of a jaxpr came about, of inputs that came about so."""
    jaxpr = getattr(closed, "jaxpr", closed)
    consts = [_of_no_leaf(jnp.shape(x)) for x in getattr(closed, "consts", ())]
    uses = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *inputs), strict=True))

    def use_of(atom) -> Use:
        return _of_no_leaf(jnp.shape(atom.val)) if isinstance(atom, Literal) else uses[atom]

    for eqn in jaxpr.eqns:
        uses |= zip(eqn.outvars, _made(eqn, [use_of(atom) for atom in eqn.invars]), strict=True)
    return [use_of(atom) for atom in jaxpr.outvars]


def _made(eqn, given: list[Use]) -> list[Use]:
    if eqn.primitive.name == "cond" and given[0].how == "equal":
        branches = [_uses(branch, given[1:]) for branch in eqn.params["branches"]]
        return [_joined(eqn, list(each)) for each in zip(*branches, strict=True)]
    if eqn.primitive.name in CALLS:
        inside = _uses(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")), given)
        return [use._replace(by=eqn) if use.by is not None and _made_in(use.by) is None else use for use in inside]
    if eqn.primitive.name == "name" and eqn.params["name"] == EXACT_ON_SHARDS:
        return [use._replace(how="elements") for use in given]
    equal, [out, *others] = all(use.how == "equal" for use in given), [v.aval.shape for v in eqn.outvars]
    like = all(use.how == "equal" or v.aval.shape == out for use, v in zip(given, eqn.invars, strict=True))
    if eqn.primitive.name in ELEMENTWISE and like:
        return [_joined(eqn, given)]
    scalars = not any((out, *others, *(v.aval.shape for v in eqn.invars)))  # a sum of equal ones tells their number
    if equal and (scalars or eqn.primitive.name == "broadcast_in_dim"):
        return [EQUAL for _ in eqn.outvars]
    by = next((use.by for use in given if use.by is not None), eqn)
    return [Use(frozenset().union(*(use.leaves for use in given)), "mixed", by) for _ in eqn.outvars]


def _joined(eqn, given: list[Use]) -> Use:
    """An array of which each element is made of the same one of all of these."""
    leaves = frozenset().union(*(use.leaves for use in given))
    mixed = next((use for use in given if use.how == "mixed"), None)
    if mixed is not None:
        return Use(leaves, "mixed", mixed.by or eqn)
    return Use(leaves, "elements" if leaves else "equal")
