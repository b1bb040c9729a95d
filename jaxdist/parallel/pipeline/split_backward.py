"""A layer's backward in two parts: B, the input gradient that the stage before waits for, and W, the weight gradient.

The layer is traced once with `jax.vjp`; the equations of its pullback are then divided. B is what the input gradient
needs, W is the rest, so the two together do exactly the work of the whole backward, and a tensor-parallel psum of the
input gradient stays in B. Values that W reads from B are *handed* over. Source: zero-bubble pipelines, arXiv
2401.10241, section 2; here the division is made by the program, not by the module's author.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from jaxdist.compat import inner_programs, type_of
from jaxdist.errors import ConfigError
from jaxdist.parallel.remat import CHEAP, GATHERS, MOVES


@dataclass(frozen=True)
class SplitLayer:
    """Three functions that make up layer(weights, fixed, micro, x) -> y and its gradient, on local shards.

    forward(weights, fixed, micro, x) -> (y, until_b, until_w): what backward will need, in lists. `until_b` may be
    dropped after B; `until_w` is read by W (and perhaps by B).
    input_gradient(weights, fixed, until_b, until_w, dy) -> (dx, handed).
    input_gradient_again(weights, fixed, micro, x, dy) -> (dx, handed, until_w): the same after another forward, without
    what y alone needs; weights are fetched once for both.
    weight_gradient(weights, fixed, until_w, handed) -> dw, in the structure of `weights`.
    until_b, until_w, handed: types of what the lists hold. Neither what follows from weights alone (a cast, a ZeRO-3
    gather) nor what elementwise operations make of something smaller that is kept (the steps of a GELU) is in them: B
    and W compute it again. Only what W would have to gather for is handed over by B, where it is smaller than x.
    """

    forward: Callable
    input_gradient: Callable
    input_gradient_again: Callable
    weight_gradient: Callable
    until_b: tuple[Any, ...]
    until_w: tuple[Any, ...]
    handed: tuple[Any, ...]


def split_layer(layer: Callable, weights, fixed, micro, x) -> SplitLayer:
    """Trace `layer` at these arguments (arrays or their types; typed varying alike) and divide its backward.

    weights: a pytree of floating-point leaves, differentiated. fixed, micro: pytrees, not differentiated; `micro` is
    what belongs to the micro-batch. x: one floating-point array. Effects of a layer (jax.debug.print) are dropped.
    Raises: ConfigError where x is not floating point, or y does not have its shape and dtype, so that it could not be
    passed on.
    """
    types = [jax.tree.map(type_of, part) for part in (weights, fixed, micro, x)]
    pullback = None

    def forward_and_residuals(weights, fixed, micro, x):
        nonlocal pullback
        y, pull = jax.vjp(lambda weights, x: layer(weights, fixed, micro, x), weights, x)
        residuals, pullback = jax.tree.flatten(pull)
        return y, residuals

    forward = flat(jax.make_jaxpr(forward_and_residuals)(*types))
    y_type, x_type = forward.out_avals[0], types[3]
    if (y_type.shape, y_type.dtype) != (x_type.shape, x_type.dtype) or not jnp.issubdtype(x_type.dtype, jnp.inexact):
        raise ConfigError(
            f"a layer from {x_type.str_short()} to {y_type.str_short()}",
            "the parts of a pipeline pass one floating-point array on: each must return the shape and dtype it takes",
            "Do what changes the shape in the first or the last function",
        )
    num_weights, num_fixed = (len(jax.tree.leaves(part)) for part in types[:2])
    y_var, *residual_vars = forward.jaxpr.outvars
    residuals = list(dict.fromkeys(variables(residual_vars)))

    def pull(values, dy):
        known = dict(zip(residuals, values, strict=True))
        leaves = [v.val if isinstance(v, Literal) else known[v] for v in residual_vars]
        return jax.tree.unflatten(pullback, leaves)(dy)

    backward = flat(jax.make_jaxpr(pull)([v.aval for v in residuals], y_type))
    *inputs, dy_var = backward.jaxpr.invars
    *dw_vars, dx_var = backward.jaxpr.outvars
    weights_tree = jax.tree.structure(types[0])

    # ---- divide ----
    b_eqns = needed_for([dx_var], backward.jaxpr.eqns)
    made_by_b = {v: eqn for eqn in b_eqns for v in eqn.outvars}
    w_eqns, handed_vars = rest_for(dw_vars, backward.jaxpr.eqns, made_by_b, dy_var)
    read_by_w = {v for eqn in w_eqns for v in variables(eqn.invars)} | set(variables(dw_vars))
    read_by_b = {v for eqn in b_eqns for v in variables(eqn.invars)} | set(variables([dx_var])) | set(handed_vars)
    source_of = dict(zip(inputs, residuals, strict=True))
    for_b, for_w = ([v for v in inputs if v in read] for read in (read_by_b, read_by_w))

    # ---- what F keeps for them ----
    of_micro = dependents(forward.jaxpr.eqns, forward.jaxpr.invars[num_weights + num_fixed :])
    kept = choose_kept(forward.jaxpr.eqns, of_micro, [source_of[v] for v in (*for_b, *for_w)])
    until_w = reached([source_of[v] for v in for_w], forward.jaxpr.eqns, kept)
    until_b = [v for v in reached([source_of[v] for v in for_b], forward.jaxpr.eqns, kept) if v not in until_w]

    # ---- what W would gather for, and B has gathered ----
    fetched = gathered_for([source_of[v] for v in for_w], forward.jaxpr.eqns, until_w)
    if sum(num_bytes(v.aval) for v in fetched) > num_bytes(x_type):
        fetched = []

    def remake(readers: list, more: list, weights, fixed, kept: dict) -> tuple[dict, list]:
        """The residuals that `readers` stand for, and the values of `more`, from weights and what was kept."""
        known = dict(zip(forward.jaxpr.invars, jax.tree.leaves((weights, fixed)), strict=False)) | kept
        wanted = [*(source_of[v] for v in readers), *more]
        made = evaluate(needed_for(wanted, forward.jaxpr.eqns, known), known, constants(forward), wanted)
        return dict(zip(readers, made, strict=False)), made[len(readers) :]

    def run(wanted: list, *args) -> list:
        known = dict(zip(forward.jaxpr.invars, jax.tree.leaves(args), strict=True))
        return evaluate(needed_for(wanted, forward.jaxpr.eqns), known, constants(forward), wanted)

    def run_forward(weights, fixed, micro, x):
        y, *values = run([y_var, *until_b, *until_w], weights, fixed, micro, x)
        return y, values[: len(until_b)], values[len(until_b) :]

    def input_gradient(weights, fixed, kept_b, kept_w, dy):
        values = dict(zip((*until_b, *until_w), (*kept_b, *kept_w), strict=True))
        known, for_later = remake(for_b, fetched, weights, fixed, values)
        dx, *handed = evaluate(b_eqns, known | {dy_var: dy}, constants(backward), [dx_var, *handed_vars])
        return dx, [*handed, *for_later]

    def input_gradient_again(weights, fixed, micro, x, dy):
        wanted = [*(source_of[v] for v in for_b), *fetched, *until_w]
        values = run(wanted, weights, fixed, micro, x)
        known, more = dict(zip(for_b, values, strict=False)), values[len(for_b) :]
        dx, *handed = evaluate(b_eqns, known | {dy_var: dy}, constants(backward), [dx_var, *handed_vars])
        return dx, [*handed, *more[: len(fetched)]], more[len(fetched) :]

    def weight_gradient(weights, fixed, kept_w, handed):
        from_b, gathered = handed[: len(handed_vars)], handed[len(handed_vars) :]
        values = dict(zip((*until_w, *fetched), (*kept_w, *gathered), strict=True))
        known, _ = remake(for_w, [], weights, fixed, values)
        known |= zip(handed_vars, from_b, strict=True)
        return weights_tree.unflatten(evaluate(w_eqns, known, constants(backward), dw_vars))

    return SplitLayer(
        forward=run_forward,
        input_gradient=input_gradient,
        input_gradient_again=input_gradient_again,
        weight_gradient=weight_gradient,
        until_b=tuple(v.aval for v in until_b),
        until_w=tuple(v.aval for v in until_w),
        handed=tuple(v.aval for v in (*handed_vars, *fetched)),
    )


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with its calls of jitted functions (jnp's own are such) written out."""

    def run(closed: ClosedJaxpr, args: Sequence) -> list:
        values = constants(closed) | dict(zip(closed.jaxpr.invars, args, strict=True))
        return evaluate(closed.jaxpr.eqns, values, {}, closed.jaxpr.outvars, call=run)

    return jax.make_jaxpr(lambda *args: run(closed, args))(*closed.in_avals)


def pruned(function: Callable, *args):
    """function(*args), running only what its outputs depend on: no forward collective whose result backward ignores."""
    closed, tree = jax.make_jaxpr(function, return_shape=True)(*args)
    closed, tree = flat(closed), jax.tree.structure(tree)
    known = dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    outputs = closed.jaxpr.outvars
    return tree.unflatten(evaluate(needed_for(outputs, closed.jaxpr.eqns), known, constants(closed), outputs))


def all_equations(jaxpr) -> Iterator:
    """Every equation of a program and of those inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from all_equations(inner)


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


def needed_for(outputs: Sequence, eqns: Sequence, known: Collection = ()) -> list:
    """The equations that `outputs` depend on, in order, as far back as to variables that are known."""
    live, needed = {v for v in variables(outputs) if v not in known}, []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            needed.append(eqn)
            live.update(v for v in variables(eqn.invars) if v not in known)
    return needed[::-1]


def choose_kept(eqns: Sequence, of_micro: set, residuals: Sequence) -> list:
    """What to keep of a micro-batch so that cheap operations alone, and weights, give all its residuals again.

    Going backward, the result of an elementwise operation gives way to its inputs where they need no more bytes beyond
    what is kept already. Going forward again, inputs that nothing else needs give way to a result that is no larger.
    """
    wanted = {v for v in residuals if v in of_micro}
    kept = set(wanted)
    for eqn in reversed(eqns):
        made = [v for v in eqn.outvars if v in kept]
        if made and eqn.primitive.name in CHEAP:
            inputs = {v for v in variables(eqn.invars) if v in of_micro and v not in kept}
            if sum(num_bytes(v.aval) for v in inputs) <= sum(num_bytes(v.aval) for v in made):
                kept = (kept - set(made)) | inputs
    again = needed_for(residuals, eqns, kept)
    for eqn in again:
        inputs = {v for v in variables(eqn.invars) if v in kept}
        elsewhere = {v for other in again if other is not eqn for v in variables(other.invars)} | wanted
        smaller = sum(num_bytes(v.aval) for v in eqn.outvars) <= sum(num_bytes(v.aval) for v in inputs)
        if inputs and smaller and eqn.primitive.name in CHEAP and not inputs & elsewhere:
            kept = (kept - inputs) | set(eqn.outvars)
    return reached(residuals, eqns, kept)


def reached(outputs: Sequence, eqns: Sequence, kept: Collection) -> list:
    """The kept variables from which `outputs` are computed, each once, in an order that does not change."""
    needed = needed_for(outputs, eqns, kept)
    read = (*outputs, *(v for eqn in needed for v in variables(eqn.invars)))
    return list(dict.fromkeys(v for v in read if v in kept))


def gathered_for(outputs: Sequence, eqns: Sequence, kept: Collection) -> list:
    """What gathers give to the computation of `outputs` from what is kept."""
    needed = needed_for(outputs, eqns, kept)
    read = {*variables(outputs), *(v for eqn in needed for v in variables(eqn.invars))}
    gathers = [eqn for eqn in needed if eqn.primitive.name in GATHERS or holds_gather(eqn)]
    return [v for eqn in gathers for v in eqn.outvars if v in read]


def holds_gather(eqn) -> bool:
    """Whether a gather is in a program inside the equation, as in ZeRO-3's fetch of a block."""
    return any(inner.primitive.name in GATHERS for program in inner_programs(eqn) for inner in all_equations(program))


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


def evaluate(eqns: Sequence, known: dict, consts: dict, outputs: Sequence, call: Callable | None = None) -> list:
    """Run equations on arrays: `known` and `consts` map variables to values; `call` runs a jitted function's."""
    values = known | consts

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in eqns:
        args = [read(atom) for atom in eqn.invars]
        if call is not None and eqn.primitive.name in ("jit", "pjit"):
            values |= zip(eqn.outvars, call(eqn.params["jaxpr"], args), strict=True)
            continue
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        values |= zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
    return [read(v) for v in outputs]
