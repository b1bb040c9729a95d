"""A matrix with a trained correction of low rank, in the place of a layer's weight."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.remat import mark_saveable


class LowRank:
    """w[in, out] + scale * a[in, r] @ b[r, out], in products never added up: x @ w + scale * (x @ a) @ b.

    in, out: one dim or more each. `jaxdist.parallel.tensor` multiplies with it so. Operators, and methods of an array
    that are not below, are the sum's, whose gradient is as large as w. Source: LoRA, arXiv 2106.09685.
    """

    def __init__(self, w: jax.Array, a: jax.Array, b: jax.Array, scale: float):
        if a.shape[:-1] + b.shape[1:] != w.shape or a.shape[-1] != b.shape[0]:
            raise ValueError(f"a{list(a.shape)} and b{list(b.shape)} do not make w{list(w.shape)}")
        self.w, self.a, self.b, self.scale = w, a, b, scale

    shape = property(lambda self: self.w.shape)
    ndim = property(lambda self: self.w.ndim)
    dtype = property(lambda self: self.w.dtype)
    num_in = property(lambda self: self.a.ndim - 1)
    __array_ufunc__ = None  # with which NumPy leaves an operator to ours

    def __getattr__(self, name: str):
        if name.startswith("_") or not hasattr(jax.Array, name):
            raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")
        return getattr(self.total(), name)

    def __getitem__(self, index):
        return self if index is Ellipsis else self.total()[index]

    def reshape(self, *shape, order: str = "C") -> "LowRank | jax.Array":
        """The weight in another shape, which keeps `in` and `out` apart; the sum where it does not."""
        if order != "C":
            return self.total().reshape(*shape, order=order)
        w = self.w.reshape(*shape)
        size, rank = math.prod(self.a.shape[:-1]), self.a.shape[-1]
        for dim in range(1, w.ndim):
            if math.prod(w.shape[:dim]) == size:
                a, b = self.a.reshape(*w.shape[:dim], rank), self.b.reshape(rank, *w.shape[dim:])
                return LowRank(w, a, b, self.scale)
        return self.total().reshape(*shape)

    def slice_in_dim(self, start, size: int, dim: int) -> "LowRank":
        """`size` elements of `dim` from `start` on."""
        w, a, b = (comm.varying_like(m, start) for m in (self.w, self.a, self.b))
        if dim < self.num_in:
            a = lax.dynamic_slice_in_dim(a, start, size, dim)
        else:
            b = lax.dynamic_slice_in_dim(b, start, size, dim - self.num_in + 1)
        return LowRank(lax.dynamic_slice_in_dim(w, start, size, dim), a, b, self.scale)

    def total(self) -> jax.Array:
        """w + scale * a @ b, added up in at least fp32 and rounded once."""
        return merged(self.w, self.a, self.b, self.scale)

    __jax_array__ = total

    def product(self, x: jax.Array) -> jax.Array:
        """x[..., in] @ w[in, out] + scale * (x @ a) @ b. Of both products backward keeps the sum alone."""
        low = (x @ self.a) * jnp.asarray(self.scale, x.dtype)
        return mark_saveable(x @ self.w + low @ self.b)


def _of_the_sum(name: str):
    return lambda self, *args: getattr(self.total(), name)(*args)


_BINARY = ("add", "sub", "mul", "matmul", "truediv", "floordiv", "mod", "pow")
for _name in (
    *_BINARY,
    *(f"r{name}" for name in _BINARY),
    *["len", "iter", "neg", "abs", "eq", "ne", "lt", "le", "gt", "ge"],
):
    setattr(LowRank, f"__{_name}__", _of_the_sum(f"__{_name}__"))


def merged(w: jax.Array, a: jax.Array, b: jax.Array, scale: float, *, stacked: bool = False) -> jax.Array:
    """w + scale * a @ b in the dtype of w; stacked: of every layer. Layout: local shards in, the same of w out."""
    wide = jnp.promote_types(w.dtype, jnp.float32)
    layers = ((0,), (0,)) if stacked else ((), ())
    product = lax.dot_general(
        a.astype(wide), b.astype(wide), (((a.ndim - 1,), (int(stacked),)), layers), precision=lax.Precision.HIGHEST
    )
    return (w.astype(wide) + scale * product).astype(w.dtype)
