"""A layer's backward in two parts: B, the input gradient that the stage before waits for, and W, the weight gradient.

The layer is traced once with `jax.vjp`, and the equations of its pullback are divided: B is what the input gradient
needs, W is the rest. Together they do exactly the work of the whole backward, and a tensor-parallel psum of the input
gradient stays in B. Source: zero-bubble pipelines, arXiv 2401.10241, section 2; here the division is derived from the
program, not written by the module's author.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from jaxdist.errors import ConfigError
from jaxdist.parallel.collectives import type_of
from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.parallel.grouped_matmul import GROUPED_PRODUCTS
from jaxdist.parallel.remat import FREE, GATHERS, MOVES

NAMED = {*GROUPED_PRODUCTS, *MORE_ROUNDS}  # jitted functions whose loops only their name tells how often they run


@dataclass(frozen=True, eq=False)
class SplitLayer:
    """A layer(weights, fixed, micro, x) -> y and its gradient in two parts, on local shards.

    program: (weights, fixed, micro, x) -> (y, *residuals). pullback: (*residuals, dy) -> (*dw, dx).
    b_inputs, w_inputs: the residuals that B and W read: inputs of the pullback, with their variables in `program`.
    b_saved, w_saved: variables of `program` that F saves: until B, and until W (B may read these too). Neither what
        depends only on weights (a cast, a ZeRO-3 gather) nor elementwise results of something smaller that is saved
        (the steps of a GELU) is among them: B and W compute it again.
    from_b: variables of the pullback that B computes and W reads.
    gathered: variables of `program` that B has gathered and W would gather again, if they are smaller than x.
    """

    program: ClosedJaxpr
    pullback: ClosedJaxpr
    weights_tree: Any
    b_inputs: dict
    w_inputs: dict
    b_saved: list
    w_saved: list
    from_b: list
    gathered: list

    @property
    def b_residuals(self) -> list:
        """Types of what F saves until B."""
        return [v.aval for v in self.b_saved]

    @property
    def w_residuals(self) -> list:
        """Types of what F saves until W."""
        return [v.aval for v in self.w_saved]

    @property
    def b_to_w(self) -> list:
        """Types of what B saves until W."""
        return [v.aval for v in (*self.from_b, *self.gathered)]

    def forward(self, weights, fixed, micro, x):
        """(y, b_residuals, w_residuals), both in lists."""
        outputs = [self.program.jaxpr.outvars[:1], self.b_saved, self.w_saved]
        [y], b_residuals, w_residuals = self._run_program(outputs, (weights, fixed, micro, x))
        return y, b_residuals, w_residuals

    def input_gradient(self, weights, fixed, b_residuals, w_residuals, dy):
        """(dx, b_to_w)."""
        saved = zip((*self.b_saved, *self.w_saved), (*b_residuals, *w_residuals), strict=True)
        inputs, gathered = self._run_program([self.b_inputs.values(), self.gathered], (weights, fixed), saved)
        dx, from_b = self._run_b(inputs, dy)
        return dx, [*from_b, *gathered]

    def input_gradient_again(self, weights, fixed, micro, x, dy):
        """(dx, b_to_w, w_residuals) after another forward, without what only y needs; weights are gathered once."""
        outputs = [self.b_inputs.values(), self.gathered, self.w_saved]
        inputs, gathered, w_residuals = self._run_program(outputs, (weights, fixed, micro, x))
        dx, from_b = self._run_b(inputs, dy)
        return dx, [*from_b, *gathered], w_residuals

    def weight_gradient(self, weights, fixed, w_residuals, b_to_w):
        """dw, in the structure of `weights`."""
        from_b, gathered = b_to_w[: len(self.from_b)], b_to_w[len(self.from_b) :]
        saved = zip((*self.w_saved, *self.gathered), (*w_residuals, *gathered), strict=True)
        [inputs] = self._run_program([self.w_inputs.values()], (weights, fixed), saved)
        known = dict(zip((*self.w_inputs, *self.from_b), (*inputs, *from_b), strict=True))
        return self.weights_tree.unflatten(run(self.pullback, known, self.pullback.jaxpr.outvars[:-1]))

    def _run_program(self, outputs: Sequence[Collection], args: tuple, saved: Iterable[tuple] = ()) -> list[list]:
        """Lists of variables of `program`, from its first arguments and from pairs of saved variables and values."""
        known = dict(zip(self.program.jaxpr.invars, jax.tree.leaves(args), strict=False)) | dict(saved)
        values = iter(run(self.program, known, [v for group in outputs for v in group]))
        return [[next(values) for _ in group] for group in outputs]

    def _run_b(self, inputs: list, dy) -> tuple[Any, list]:
        *_, dy_var = self.pullback.jaxpr.invars
        known = dict(zip(self.b_inputs, inputs, strict=True)) | {dy_var: dy}
        dx, *from_b = run(self.pullback, known, [self.pullback.jaxpr.outvars[-1], *self.from_b])
        return dx, from_b


def split_layer(layer: Callable, weights: Any, fixed: Any, micro: Any, x: jax.Array) -> SplitLayer:
    """Trace `layer` at these arguments (arrays or their types; typed varying alike) and divide its backward.

    weights: a pytree of floating-point leaves, differentiated. fixed, micro: pytrees, not differentiated; `micro`
    belongs to the micro-batch. x: one floating-point array. Effects of a layer (jax.debug.print) are dropped.
    Raises: ConfigError if x is not floating point, or y differs from it in shape or dtype, so that no layer could
    follow.
    """
    types = [jax.tree.map(type_of, part) for part in (weights, fixed, micro, x)]
    program, pullback, residuals = trace_layer(layer, types)
    equations, pulled = program.jaxpr.eqns, pullback.jaxpr.eqns
    *inputs, dy = pullback.jaxpr.invars
    *dw, dx = pullback.jaxpr.outvars

    # ---- divide the pullback ----
    b_eqns = needed_for([dx], pulled)
    w_eqns, from_b = rest_for(dw, pulled, {v for eqn in b_eqns for v in eqn.outvars}, dy)
    source_of = dict(zip(inputs, residuals, strict=True))
    read_by_b, read_by_w = {*variables_read([dx], b_eqns), *from_b}, set(variables_read(dw, w_eqns))
    b_inputs, w_inputs = ({v: source_of[v] for v in inputs if v in read} for read in (read_by_b, read_by_w))

    # ---- choose what F saves ----
    num_constant = len(jax.tree.leaves(types[:2]))
    of_micro = dependents(equations, program.jaxpr.invars[num_constant:])
    saved = choose_saved(equations, of_micro, [*b_inputs.values(), *w_inputs.values()])
    w_saved = reached([*w_inputs.values()], equations, saved)
    b_saved = [v for v in reached([*b_inputs.values()], equations, saved) if v not in w_saved]

    # ---- gathers of B that W would repeat ----
    gathered = gathered_for([*w_inputs.values()], equations, w_saved)
    if sum(num_bytes(v.aval) for v in gathered) > num_bytes(types[3]):
        gathered = []
    tree = jax.tree.structure(types[0])
    return SplitLayer(program, pullback, tree, b_inputs, w_inputs, b_saved, w_saved, from_b, gathered)


def trace_layer(layer: Callable, types: Sequence) -> tuple[ClosedJaxpr, ClosedJaxpr, list]:
    """`program` and `pullback` of a `SplitLayer`, and the variables of `program` that the pullback takes."""
    tree = None

    def forward(weights, fixed, micro, x):
        nonlocal tree
        y, pull = jax.vjp(lambda weights, x: layer(weights, fixed, micro, x), weights, x)
        residuals, tree = jax.tree.flatten(pull)
        return y, residuals

    program = flat(jax.make_jaxpr(forward)(*types))
    y_type, x_type = program.out_avals[0], types[3]
    if (y_type.shape, y_type.dtype) != (x_type.shape, x_type.dtype) or not jnp.issubdtype(x_type.dtype, jnp.inexact):
        raise ConfigError(
            f"a layer from {x_type.str_short()} to {y_type.str_short()}",
            "the parts of a pipeline pass one floating-point array on: each must return the shape and dtype it takes",
            "Do what changes the shape in the first or the last function",
        )
    _, *outputs = program.jaxpr.outvars
    residuals = list(dict.fromkeys(variables(outputs)))

    def pull(values, dy):
        known = dict(zip(residuals, values, strict=True))
        leaves = [v.val if isinstance(v, Literal) else known[v] for v in outputs]
        return jax.tree.unflatten(tree, leaves)(dy)

    return program, flat(jax.make_jaxpr(pull)([v.aval for v in residuals], y_type)), residuals


def flat(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with its calls of jitted functions (jnp's own among them) written out, but for `NAMED`."""

    def write_out(closed: ClosedJaxpr, args: Sequence) -> list:
        values = constants(closed) | dict(zip(closed.jaxpr.invars, args, strict=True))
        return evaluate(closed.jaxpr.eqns, values, closed.jaxpr.outvars, call=write_out)

    return jax.make_jaxpr(lambda *args: write_out(closed, args))(*closed.in_avals)


def pruned(function: Callable, *args) -> Any:
    """function(*args), running only what its outputs depend on: no forward collective whose result backward ignores."""
    closed, tree = jax.make_jaxpr(function, return_shape=True)(*args)
    closed, tree = flat(closed), jax.tree.structure(tree)
    known = dict(zip(closed.jaxpr.invars, jax.tree.leaves(args), strict=True))
    return tree.unflatten(run(closed, known, closed.jaxpr.outvars))


def run(closed: ClosedJaxpr, known: dict, outputs: Sequence) -> list:
    """Variables of a program, running only the equations between the known ones and them."""
    return evaluate(needed_for(outputs, closed.jaxpr.eqns, known), known | constants(closed), outputs)


def inner_programs(eqn: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The programs inside an equation: bodies of loops, branches, calls."""
    for value in eqn.params.values():
        for inner in value if isinstance(value, tuple | list) else (value,):
            if isinstance(inner, Jaxpr | ClosedJaxpr):
                yield inner


def all_equations(jaxpr: Any) -> Iterator:
    """Every equation of a program and of those inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in inner_programs(eqn):
            yield from all_equations(inner)


def variables(atoms: Iterable) -> list:
    return [v for v in atoms if not isinstance(v, Literal)]


def variables_read(outputs: Sequence, eqns: Sequence) -> list:
    """Variables among `outputs` and the inputs of equations."""
    return [*variables(outputs), *(v for eqn in eqns for v in variables(eqn.invars))]


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
    """The equations that `outputs` depend on, in order, back to variables that are known."""
    live, needed = {v for v in variables(outputs) if v not in known}, []
    for eqn in reversed(eqns):
        if any(v in live for v in eqn.outvars):
            needed.append(eqn)
            live.update(v for v in variables(eqn.invars) if v not in known)
    return needed[::-1]


def choose_saved(eqns: Sequence, of_micro: set, residuals: Sequence) -> list:
    """What to save of a micro-batch so that only cheap operations, and weights, give all its residuals again.

    Going backward, inputs replace the result of an elementwise operation if they need no more bytes beyond what is
    saved already. Going forward again, a result replaces inputs that nothing else needs, if it is no larger.
    """
    wanted = {v for v in residuals if v in of_micro}
    saved = set(wanted)
    for eqn in reversed(eqns):
        made = [v for v in eqn.outvars if v in saved]
        if made and eqn.primitive.name in FREE:
            inputs = {v for v in variables(eqn.invars) if v in of_micro and v not in saved}
            if sum(num_bytes(v.aval) for v in inputs) <= sum(num_bytes(v.aval) for v in made):
                saved = (saved - set(made)) | inputs
    again = needed_for(residuals, eqns, saved)
    for eqn in again:
        inputs = {v for v in variables(eqn.invars) if v in saved}
        elsewhere = {v for other in again if other is not eqn for v in variables(other.invars)} | wanted
        smaller = sum(num_bytes(v.aval) for v in eqn.outvars) <= sum(num_bytes(v.aval) for v in inputs)
        if inputs and smaller and eqn.primitive.name in FREE and not inputs & elsewhere:
            saved = (saved - inputs) | set(eqn.outvars)
    return reached(residuals, eqns, saved)


def reached(outputs: Sequence, eqns: Sequence, saved: Collection) -> list:
    """The saved variables from which `outputs` are computed, each once, in an order that does not change."""
    read = variables_read(outputs, needed_for(outputs, eqns, saved))
    return list(dict.fromkeys(v for v in read if v in saved))


def gathered_for(outputs: Sequence, eqns: Sequence, saved: Collection) -> list:
    """Results of gathers that the computation of `outputs` from what is saved reads."""
    needed = needed_for(outputs, eqns, saved)
    read = set(variables_read(outputs, needed))
    gathers = [eqn for eqn in needed if eqn.primitive.name in GATHERS or holds_gather(eqn)]
    return [v for eqn in gathers for v in eqn.outvars if v in read]


def holds_gather(eqn: Any) -> bool:
    """Whether a gather is in a program inside the equation, as where ZeRO-3 unshards a layer."""
    return any(inner.primitive.name in GATHERS for program in inner_programs(eqn) for inner in all_equations(program))


def rest_for(outputs: Sequence, eqns: Sequence, made_by_b: set, dy: jax.Array) -> tuple[list, list]:
    """The equations of W, which computes `outputs` after B has made its variables, and the variables it reads from B.

    Where B only moved a variable (a reshape, a cast to wider bits), W moves it again from the smaller source.
    """
    live, chosen, from_b = variables(outputs), set(), []
    maker = {v: eqn for eqn in eqns for v in eqn.outvars}
    seen = set()
    while live:
        v = live.pop()
        if v in seen:
            continue
        seen.add(v)
        eqn = maker.get(v)
        if v is dy or (v in made_by_b and not only_moved(eqn)):
            from_b.append(v)
        elif eqn is not None:
            chosen.add(id(eqn))
            live += variables(eqn.invars)
    return [eqn for eqn in eqns if id(eqn) in chosen], from_b


def only_moved(eqn: Any) -> bool:
    """Whether an equation moves one array without making it smaller."""
    if eqn.primitive.name not in MOVES or len(eqn.invars) != 1 or isinstance(eqn.invars[0], Literal):
        return False
    return num_bytes(eqn.invars[0].aval) <= num_bytes(eqn.outvars[0].aval)


def num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * aval.dtype.itemsize


def evaluate(eqns: Sequence, known: dict, outputs: Sequence, call: Callable | None = None) -> list:
    """Run equations on arrays: `known` maps variables to values; `call` runs those of a jitted function."""
    values = dict(known)

    def read(atom):
        return atom.val if isinstance(atom, Literal) else values[atom]

    for eqn in eqns:
        args = [read(atom) for atom in eqn.invars]
        if call is not None and eqn.primitive.name in ("jit", "pjit") and eqn.params["name"] not in NAMED:
            values |= zip(eqn.outvars, call(eqn.params["jaxpr"], args), strict=True)
            continue
        with eqn.ctx.manager:
            results = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
        values |= zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
    return [read(v) for v in outputs]
