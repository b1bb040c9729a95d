"""The products (matmuls) of a traced program: their dims and FLOPs."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

from jaxdist.parallel.expert_parallel import MORE_ROUNDS
from jaxdist.parallel.grouped_matmul import GROUPED, GROUPED_OUTER, GROUPED_PRODUCTS
from jaxdist.parallel.pipeline.split_backward import inner_programs, needed_for


def products_of(jaxpr: Any) -> Iterator:
    """The equations that are products and that a (closed) program's results depend on; what is in a loop comes once."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    yield from products_among(needed_for(jaxpr.outvars, jaxpr.eqns))


def products_among(eqns: Iterable) -> Iterator:
    """Products among these equations and in the programs inside them; of an exchange in rounds, those of the first."""
    for eqn in eqns:
        if is_product(eqn):
            yield eqn
        elif eqn.params.get("name") not in MORE_ROUNDS:
            for inner in inner_programs(eqn):
                yield from products_of(inner)


def is_product(eqn: Any) -> bool:
    return eqn.primitive.name == "dot_general" or eqn.params.get("name") in GROUPED_PRODUCTS


def product_dims(eqn: Any) -> tuple[int, int, int, int]:
    """(batch, m, n, k) of a product; of groups of rows as if each had as many."""
    a, b = (v.aval.shape for v in eqn.invars[:2])
    name = eqn.params.get("name")
    if name == GROUPED:
        (rows, k), (groups, *widths) = a, b
        return groups, rows // groups, math.prod(widths) // k, k
    if name == GROUPED_OUTER:
        (rows, m), (_, n), groups = a, b, eqn.invars[2].aval.shape[0]
        return groups, m, n, rows // groups
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    k, both = math.prod(a[d] for d in left), math.prod(a[d] for d in batch)
    return both, math.prod(a) // (k * both), math.prod(b) // (k * both), k


def flops_of(jaxpr: Any) -> int:
    """FLOPs of `products_of`; groups that have fewer rows than there are groups count too."""
    total = 0
    for eqn in products_of(jaxpr):
        if eqn.params.get("name") == GROUPED:
            (rows, _), (_, *widths) = (v.aval.shape for v in eqn.invars[:2])
            total += 2 * rows * math.prod(widths)
        else:
            total += 2 * math.prod(product_dims(eqn))
    return total
