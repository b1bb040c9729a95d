"""What differs between the JAX versions this package supports (0.10 to 0.12), in one place."""

import jax


def varying_axes(x) -> frozenset[str]:
    """The mesh axes along which the local value `x` may differ from rank to rank, as `shard_map` has proven."""
    return frozenset(jax.typeof(x).manual_axis_type.varying)
