"""What a compiler must have made before it goes on, so that it does not make it anew in each place that reads it."""

import jax
from jax import lax


@jax.custom_vjp
def barrier_gradient(x: jax.Array) -> jax.Array:
    """`x`; its gradient is written to memory, in its own dtype, before anything reads it."""
    return x


barrier_gradient.defvjp(lambda x: (x, None), lambda _, dx: (lax.optimization_barrier(dx),))
