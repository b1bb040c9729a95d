"""A matrix with a trained correction of low rank, in the place of a layer's weight."""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxdist.parallel import collectives as comm
from jaxdist.parallel.remat import mark_saveable


class LowRank:
    """w[in, out] + scale * a[in, r] @ b[r, out], in products never added up: x @ w + scale * (x @ a) @ b.

    in, out: one dim or more each. `jaxdist.parallel.tensor` multiplies with it so; what else takes an array is given
    the sum, whose gradient is as large as w, and so are `OF_THE_SUM`. Source: LoRA, arXiv 2106.09685.
    """

    def __init__(self, w: jax.Array, a: jax.Array, b: jax.Array, scale: float):
        if a.shape[:-1] + b.shape[1:] != w.shape or a.shape[-1] != b.shape[0]:
            raise ValueError(f"a{list(a.shape)} and b{list(b.shape)} do not make w{list(w.shape)}")
        self.w, self.a, self.b, self.scale = w, a, b, scale

    shape = property(lambda self: self.w.shape)
    ndim = property(lambda self: self.w.ndim)
    dtype = property(lambda self: self.w.dtype)
    num_in = property(lambda self: self.a.ndim - 1)
    T = property(lambda self: self.total().T)

    def __getitem__(self, index):
        return self if index is Ellipsis else self.total()[index]

    def reshape(self, *shape) -> "LowRank | jax.Array":
        """The weight in another shape, which keeps `in` and `out` apart; the sum where it does not."""
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


# An array's operators and methods that the sum answers.
OF_THE_SUM = (
    *("__len__", "__iter__", "__neg__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__"),
    *("__truediv__", "__matmul__", "__rmatmul__", "astype", "transpose", "sum"),
)


def _of_the_sum(name: str):
    return lambda self, *args, **settings: getattr(self.total(), name)(*args, **settings)


for _name in OF_THE_SUM:
    setattr(LowRank, _name, _of_the_sum(_name))


def merged(w: jax.Array, a: jax.Array, b: jax.Array, scale: float, *, stacked: bool = False) -> jax.Array:
    """w + scale * a @ b in the dtype of w; stacked: of every layer. Layout: local shards in, the same of w out."""
    wide = jnp.promote_types(w.dtype, jnp.float32)
    layers = ((0,), (0,)) if stacked else ((), ())
    product = lax.dot_general(
        a.astype(wide), b.astype(wide), (((a.ndim - 1,), (int(stacked),)), layers), precision=lax.Precision.HIGHEST
    )
    return (w.astype(wide) + scale * product).astype(w.dtype)
