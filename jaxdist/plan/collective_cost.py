"""Predicted time of a collective, in the α–β model: every step costs a latency α, every byte 1/B.

No JAX here. The named algorithms are those of `jaxdist.parallel.algorithms`, whose permutes the tests count against
this table, and the pairwise all-to-all.

Convention: S is the *full* buffer, what one device holds where it holds most: the input of a reduce-scatter, the output
of an all-gather, either side of an all-reduce, and the local buffer that an all-to-all cuts in n.

Ranks, bytes, latencies and bandwidths may be numpy arrays, columns of layouts.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from jaxdist.errors import ConfigError


@dataclass(frozen=True)
class CollectiveCost:
    """What a collective waits for: `steps` messages one after the other, and the bytes in them.

    `bytes_sent` is the sum over the steps of the largest message in each. Where every device works in every step (ring,
    halving-doubling, all-to-all) that is what each device sends, and receives. In the tree it is the critical path: S a
    step, up and down again. At the central server it is the root's link, all it receives and then all it sends.
    """

    steps: int
    bytes_sent: float

    def seconds(self, alpha_s: float, bytes_per_s: float) -> float:
        """steps·α + bytes/B, for a latency in seconds a step and a bandwidth in bytes/s, one direction of one link."""
        if not (np.all(np.asarray(alpha_s) >= 0) and np.all(np.asarray(bytes_per_s) > 0)):
            raise ConfigError(
                f"a link with latency {alpha_s} s and bandwidth {bytes_per_s} bytes/s",
                "latency cannot be negative and bandwidth must be above 0",
                "Use 0 s to leave latency out, and bytes (not bits) a second, as in 25e9",
            )
        return self.steps * alpha_s + self.bytes_sent / bytes_per_s


def _ceil_log2(n):
    return (n - 1).bit_length() if isinstance(n, int) else np.ceil(np.log2(n)).astype(int)


def _tree(n, s) -> CollectiveCost:
    steps = 2 * _ceil_log2(n)
    return CollectiveCost(steps, steps * s)


def _pipelined_tree(n, s) -> CollectiveCost:
    # Pieces follow each other up and down (NCCL's trees): the links carry S twice, whatever n is.
    return CollectiveCost(2 * _ceil_log2(n), 2 * s * (n > 1))


_ALGORITHMS = {
    "ring_reduce_scatter": lambda n, s: CollectiveCost(n - 1, (n - 1) * s / n),
    "ring_all_gather": lambda n, s: CollectiveCost(n - 1, (n - 1) * s / n),
    "ring_all_reduce": lambda n, s: CollectiveCost(2 * (n - 1), 2 * (n - 1) * s / n),
    "halving_doubling_all_reduce": lambda n, s: CollectiveCost(2 * _ceil_log2(n), 2 * (n - 1) * s / n),
    "tree_all_reduce": _tree,
    "pipelined_tree_all_reduce": _pipelined_tree,
    "central_all_reduce": lambda n, s: CollectiveCost(2 * (n - 1), 2 * (n - 1) * s),
    "all_to_all": lambda n, s: CollectiveCost(n - 1, (n - 1) * s / n),
}
ALGORITHMS = tuple(_ALGORITHMS)

_BUS_BANDWIDTH_FACTORS = {
    "all_reduce": lambda n: 2 * (n - 1) / n,
    "all_gather": lambda n: (n - 1) / n,
    "reduce_scatter": lambda n: (n - 1) / n,
    "all_to_all": lambda n: (n - 1) / n,
    "broadcast": lambda n: 1.0,
    "permute": lambda n: 1.0,
}


def collective_cost(algorithm: str, n: int, size_bytes: float) -> CollectiveCost:
    """Steps and bytes of one of `ALGORITHMS` over n ranks, for a full buffer of `size_bytes`; (0, 0) on one rank.

    Raises: ConfigError for an unknown algorithm, n below 1, halving-doubling over n that is not a power of two, and
        sizes that are negative or not finite.
    Source: Thakur, Rabenseifner & Gropp 2005, "Optimization of Collective Communication Operations in MPICH"; Patarasuk
        & Yuan 2009 for the ring. Summing arithmetic (their γ) is left out.
    """

    def asked() -> str:  # written only for an error: columns of numbers take longer to print than to compute with
        return f"the cost of {algorithm!r} over {n} ranks"

    _require_name(asked, "algorithm", algorithm, ALGORITHMS)
    _require_ranks(asked, n)
    if algorithm == "halving_doubling_all_reduce" and np.any(n & (n - 1)):
        n = int(np.ravel(n)[np.ravel(n & (n - 1)) > 0][0])
        raise ConfigError(
            asked(),
            "its steps halve the ranks, so their number must be a power of two",
            f"Use {1 << (n.bit_length() - 1)} or {1 << n.bit_length()} ranks, or 'ring_all_reduce'",
        )
    if not np.all(np.isfinite(size_bytes) & (np.asarray(size_bytes) >= 0)):
        raise ConfigError(
            f"{asked()} of {size_bytes} bytes", "a buffer must have a finite size, not below 0", "Use 0 or more bytes"
        )
    return _ALGORITHMS[algorithm](n, size_bytes)


def two_level(algorithm: str, inside: int, across: int, size_bytes: float) -> tuple[CollectiveCost, CollectiveCost]:
    """A collective over `across` nodes of `inside` ranks each: (what the link in a node carries, what leaves it).

    Reduce-scatter inside, the collective over the nodes on the 1/inside that each rank then holds, all-gather inside;
    a reduce-scatter or all-gather alone leaves the other half out; a tree is one of nodes. An all-to-all sends each
    rank its part directly.
    Ranks of one node send at the same time, each over its own network port; where they share one, divide its bandwidth.

    Raises: ConfigError as `collective_cost`, and for an algorithm that is neither a ring, a pipelined tree nor an
        all-to-all.
    Source: Thakur et al. 2005 for the parts; the same decomposition as NCCL's rings over several network ports.
    """
    parts = ("ring_reduce_scatter", "ring_all_gather")
    if algorithm == "all_to_all":
        ranks, away = inside * across, inside * (across - 1)
        within = CollectiveCost(inside - 1, np.true_divide((inside - 1) * size_bytes, ranks))
        return within, CollectiveCost(away, np.true_divide(away * size_bytes, ranks))
    sums = ("ring_all_reduce", "pipelined_tree_all_reduce")
    _require_name(lambda: f"{algorithm!r} in two levels", "such algorithm", algorithm, (*sums, *parts))
    within = collective_cost("ring_all_reduce" if algorithm in sums else algorithm, inside, size_bytes)
    return within, collective_cost(algorithm, across, np.true_divide(size_bytes, inside))


def bus_bandwidth_factor(kind: str, n: int) -> float:
    """busbw / algbw, where algbw = S / seconds: busbw is the link speed at any n, when the algorithm is optimal.

    Raises: ConfigError for an unknown kind of collective, or n below 1.
    Source: NCCL tests, doc/PERFORMANCE.md.
    """

    def asked() -> str:
        return f"the bus bandwidth of {kind!r} over {n} ranks"

    _require_name(asked, "kind", kind, _BUS_BANDWIDTH_FACTORS)
    _require_ranks(asked, n)
    return _BUS_BANDWIDTH_FACTORS[kind](n)


def _require_name(asked: Callable[[], str], what: str, name: str, known) -> None:
    if name not in known:
        raise ConfigError(asked(), f"there is no {what} of that name", f"Use one of {', '.join(known)}")


def _require_ranks(asked: Callable[[], str], n: int) -> None:
    if np.any(np.asarray(n) < 1):
        raise ConfigError(asked(), "a collective must have at least one rank", "Use n = 1 or more")
