"""What differs between JAX 0.10, 0.11 and 0.12, all supported, in one place; importing it does not import JAX."""

import logging
import os
from pathlib import Path


class _NoPluginWithoutItsDevice(logging.Filter):
    """The extra prove-cuda holds a plugin that compiles and cannot run; without a GPU nobody asked it to."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "xla_cuda" not in record.getMessage() or any(Path("/dev").glob("nvidia[0-9]*"))


logging.getLogger("jax._src.xla_bridge").addFilter(_NoPluginWithoutItsDevice())


def scan_counts(eqn) -> tuple[int, int]:
    """Counts of a `scan`'s inputs: constants, which come first, and carried values, which follow."""
    if "num_consts" in eqn.params:
        return eqn.params["num_consts"], eqn.params["num_carry"]
    num_consts, num_carry, _ = map(len, eqn.params["ft_in"].unpack())  # since 0.12
    return num_consts, num_carry


def coordination_client():
    """The client of `jax.distributed`'s key-value store and barriers; JAX has no public name for it."""
    from jax._src.distributed import global_state

    return global_state.client


def coordination_count() -> int:
    """The number of processes that `jax.distributed` joined; known before a backend starts."""
    from jax._src.distributed import global_state

    return global_state.num_processes or 1


def coordination_index() -> int:
    """This process's number among them; known before a backend starts."""
    from jax._src.distributed import global_state

    return global_state.process_id


# Settings of JAX and XLA that change what a program computes or how it is compiled.
_SETTINGS = (
    "jax_enable_x64",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_default_matmul_precision",
    "jax_numpy_dtype_promotion",
    "jax_disable_jit",
    "jax_debug_nans",
)


def settings() -> dict[str, str]:
    """Settings that all processes of a run must share, by name. Where XLA dumps its programs is each process's own."""
    import jax

    options = os.environ.get("XLA_FLAGS", "").split()
    found = {name: str(getattr(jax.config, name)) for name in _SETTINGS}
    return found | {
        "XLA_FLAGS": " ".join(option for option in options if not option.startswith("--xla_dump")) or "empty"
    }


def callback_of(eqn):
    """The Python function that an equation calls on the host, None where it calls none."""
    return getattr(eqn.params.get("callback"), "callback_func", None)


def source_of(eqn, skipped: tuple[str, ...] = ()) -> str:
    """The line of Python that an equation was made by, as in "leave (tensor.py:40)"; "" where it is not known.

    skipped: endings of files, and of functions, that are passed over for their callers.
    """
    from jax._src.source_info_util import user_frames

    for frame in user_frames(eqn.source_info.traceback):
        function = frame.function_name.split(".")[-1]
        if not frame.file_name.endswith(skipped) and not function.endswith(skipped):
            return f"{function} ({os.path.basename(frame.file_name)}:{frame.start_line})"
    return ""
