"""A layer's backward in two parts: B, the input gradient that the stage before waits for, and W, the weight gradient.

The layer is traced once with `jax.vjp`; the equations of its pullback are then divided. B is what the input gradient
needs, W is the rest, so the two together do exactly the work of the whole backward, and a tensor-parallel psum of the
input gradient stays in B. Values that W reads from B are *handed* over. Source: zero-bubble pipelines, arXiv
2401.10241, section 2; here the division is made by the program, not by the module's author.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Literal

from jaxdist.compat import type_of
from jaxdist.errors import ConfigError

# Operations that only move or retype one array: W repeats them rather than being handed a larger result.
MOVES = {"reshape", "transpose", "squeeze", "expand_dims", "broadcast_in_dim", "convert_element_type", "pvary", "copy"}


@dataclass(frozen=True)
class SplitLayer:
    """Three functions that make up layer(weights, fixed, micro, x) -> y and its gradient, on local shards.

    forward(weights, fixed, micro, x) -> (y, until_b, until_w): what backward will need, in lists. `until_b` may be
    dropped after B; `until_w` is read by W (and perhaps by B).
    input_gradient(weights, fixed, until_b, until_w, dy) -> (dx, handed).
    weight_gradient(weights, fixed, until_w, handed) -> dw, in the structure of `weights`.
    until_b, until_w, handed: types of what the lists hold. What follows from weights alone (a cast, a ZeRO-3 gather) is
    in none of them: B and W compute it again.
    """

    forward: Callable
    input_gradient: Callable
    weight_gradient: Callable
    until_b: tuple[Any, ...]
    until_w: tuple[Any, ...]
    handed: tuple[Any, ...]


def split_layer(layer: Callable, weights, fixed, micro, x) -> SplitLayer:
    """Trace `layer` at these arguments (arrays or their types; typed varying alike) and divide its backward.

    weights: a pytree of floating-point leaves, differentiated. fixed, micro: pytrees, not differentiated; `micro` is
    what belongs to the micro-batch. x: one floating-point array.
    Raises: ConfigError where y does not have the shape and dtype of x, which a pipeline needs to pass it on.
    """
    types = [jax.tree.map(type_of, part) for part in (weights, fixed, micro, x)]
    pullback = None

    def forward_and_residuals(weights, fixed, micro, x):
        nonlocal pullback
        y, pull = jax.vjp(lambda weights, x: layer(weights, fixed, micro, x), weights, x)
        residuals, pullback = jax.tree.flatten(pull)
        return y, residuals

    forward = jax.make_jaxpr(forward_and_residuals)(*types)
    y_type, x_type = forward.out_avals[0], types[3]
    if (y_type.shape, y_type.dtype) != (x_type.shape, x_type.dtype):
        raise ConfigError(
            f"a layer from {x_type.str_short()} to {y_type.str_short()}",
            "the parts of a pipeline pass one array on, so each must return the shape and dtype it takes",
            "Do what changes the shape in the first or the last function",
        )
    num_weights, num_fixed = (len(jax.tree.leaves(part)) for part in types[:2])
    y_var, *residual_vars = forward.jaxpr.outvars
    of_micro = dependents(forward.jaxpr.eqns, forward.jaxpr.invars[num_weights + num_fixed :])
    stored = list(dict.fromkeys(v for v in residual_vars if not isinstance(v, Literal) and v in of_micro))
    remade = list(dict.fromkeys(v for v in residual_vars if not isinstance(v, Literal) and v not in of_micro))

    def residuals_from(values: dict):
        return [v.val if isinstance(v, Literal) else values[v] for v in residual_vars]

    def pull(values, dy):
        return jax.tree.unflatten(pullback, residuals_from(dict(zip(stored + remade, values, strict=True))))(dy)

    backward = jax.make_jaxpr(pull)([v.aval for v in stored + remade], y_type)
    *inputs, dy_var = backward.jaxpr.invars
    *dw_vars, dx_var = backward.jaxpr.outvars
    stored_inputs, remade_inputs = inputs[: len(stored)], inputs[len(stored) :]
    weights_tree = jax.tree.structure(types[0])

    # ---- divide ----
    b_eqns = needed_for([dx_var], backward.jaxpr.eqns)
    made_by_b = {v: eqn for eqn in b_eqns for v in eqn.outvars}
    w_eqns, handed_vars = rest_for(dw_vars, backward.jaxpr.eqns, made_by_b, dy_var)
    read_by_w = {v for eqn in w_eqns for v in variables(eqn.invars)} | set(variables(dw_vars))
    read_by_b = {v for eqn in b_eqns for v in variables(eqn.invars)} | set(variables([dx_var])) | set(handed_vars)
    in_w = [v in read_by_w for v in stored_inputs]
    in_b = [v in read_by_b and not w for v, w in zip(stored_inputs, in_w, strict=True)]
    until_w = [(v, source) for v, source, keep in zip(stored_inputs, stored, in_w, strict=True) if keep]
    until_b = [(v, source) for v, source, keep in zip(stored_inputs, stored, in_b, strict=True) if keep]

    def remake(readers: set, weights, fixed) -> dict:
        wanted = [(v, source) for v, source in zip(remade_inputs, remade, strict=True) if v in readers]
        known = zip(forward.jaxpr.invars, jax.tree.leaves((weights, fixed)), strict=False)
        sources = [source for _, source in wanted]
        made = evaluate(needed_for(sources, forward.jaxpr.eqns), dict(known), constants(forward), sources)
        return dict(zip((v for v, _ in wanted), made, strict=True))

    def run_forward(weights, fixed, micro, x):
        known = dict(zip(forward.jaxpr.invars, jax.tree.leaves((weights, fixed, micro, x)), strict=True))
        wanted = [y_var, *(source for _, source in until_b), *(source for _, source in until_w)]
        y, *kept = evaluate(needed_for(wanted, forward.jaxpr.eqns), known, constants(forward), wanted)
        return y, kept[: len(until_b)], kept[len(until_b) :]

    def input_gradient(weights, fixed, kept_b, kept_w, dy):
        known = remake(read_by_b, weights, fixed) | {dy_var: dy}
        known |= zip((v for v, _ in (*until_b, *until_w)), (*kept_b, *kept_w), strict=True)
        dx, *handed = evaluate(b_eqns, known, constants(backward), [dx_var, *handed_vars])
        return dx, handed

    def weight_gradient(weights, fixed, kept_w, handed):
        known = remake(read_by_w, weights, fixed)
        known |= zip((*(v for v, _ in until_w), *handed_vars), (*kept_w, *handed), strict=True)
        return weights_tree.unflatten(evaluate(w_eqns, known, constants(backward), dw_vars))

    return SplitLayer(
        forward=run_forward,
        input_gradient=input_gradient,
        weight_gradient=weight_gradient,
        until_b=tuple(v.aval for v, _ in until_b),
        until_w=tuple(v.aval for v, _ in until_w),
        handed=tuple(v.aval for v in handed_vars),
    )


def variables(atoms: Iterable) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]


def constants(closed: ClosedJaxpr) -> dict:
    return dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))


def dependents(eqns: Sequence, sources: Sequence) -> set:
    """The sources and every variable computed from one of them."""
    found = set(sources)
    for eqn in eqns:
        if any(v in found for v in variables(eqn.invars)):
            found.update(eqn.outvars)
    return found


def needed_for(outputs: Sequence, eqns: Sequence) -> list:
    """The equations that `outputs` depend on, in order."""
    live, needed = set(variables(outputs)), []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            needed.append(eqn)
            live.update(variables(eqn.invars))
    return needed[::-1]


def rest_for(outputs: Sequence, eqns: Sequence, made_by_b: dict, dy_var) -> tuple[list, list]:
    """What W computes for `outputs` when B has made its variables, and the variables it must be handed for that.

    Where B's variable is one it only moved (a reshape, a cast to wider bits), W moves it again from its smaller source.
    """
    live, chosen, handed = variables(outputs), set(), []
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    seen = set()
    while live:
        v = live.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = maker.get(v)
        if v in made_by_b and not only_moved(eqn):
            handed.append(v)
        elif eqn is not None:
            chosen.add(id(eqn))
            live += variables(eqn.invars)
        elif v is dy_var:
            handed.append(v)
    return [eqn for eqn in eqns if id(eqn) in chosen], handed


def only_moved(eqn) -> bool:
    """Whether an equation moves one array without making it smaller."""
    if eqn.primitive.name not in MOVES or len(eqn.invars) != 1 or isinstance(eqn.invars[0], Literal):
        return False
    return num_bytes(eqn.invars[0].aval) <= num_bytes(eqn.outvars[0].aval)


def num_bytes(aval) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def evaluate(eqns: Sequence, known: dict, consts: dict, outputs: Sequence) -> list:
    """Run equations on arrays: `known` and `consts` map variables to values."""
    values = known | consts

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in eqns:
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*map(read, eqn.invars), **eqn.primitive.get_bind_params(eqn.params))
        values |= zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
    return [read(v) for v in outputs]
