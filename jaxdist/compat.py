"""What differs between the JAX versions this package supports (0.10 to 0.12), in one place."""

import jax


def type_of(x) -> jax.core.ShapedArray:
    """The abstract value of an array: shape, dtype, varying axes. An abstract value is its own."""
    return x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)


def varying_axes(x) -> frozenset[str]:
    """The mesh axes along which the local value `x` may differ from rank to rank, as `shard_map` has proven."""
    return frozenset(type_of(x).manual_axis_type.varying)
