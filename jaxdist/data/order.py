"""The order of the data: which source a sample comes from, and which of its windows it is.

Both are computed for any sample number alone, so no list of an epoch is ever made, nothing has to be replayed to resume
in the middle, and every process can ask for the samples of its own rows.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd, isqrt, lcm

import numpy as np

from jaxdist.errors import ConfigError

NUM_ROUNDS = 12
MAX_PERIOD = 10_000  # samples after which the pattern of the sources repeats


def shuffled(places: np.ndarray, count: int, keys: tuple[int, ...]) -> np.ndarray:
    """The values at `places` of the permutation of 0 .. count-1 that `keys` choose; memory does not grow with `count`.

    A generalised Feistel network: a number below a*b, a and b about the root of `count`, is a pair (left, right); each
    round adds a hash of one half to the other, which the next number's pair cannot undo, so the whole is a permutation
    of 0 .. a*b-1. A value of `count` or more is put through again until it is below ("cycle walking").

    Source: Black and Rogaway, Ciphers with Arbitrary Finite Domains, CT-RSA 2002; the hash of a round is SplitMix64's
    (Steele, Lea and Flood, OOPSLA 2014), which shuffles well and hides nothing.
    """
    a = isqrt(count - 1) + 1
    b = -(-count // a)
    values = np.array(places, np.uint64)
    walking = np.arange(len(values))
    while len(walking):
        left, right = np.divmod(values[walking], np.uint64(b))
        for number, key in enumerate(keys):
            if number % 2:
                right = (right + _hash(left, key) % np.uint64(b)) % np.uint64(b)
            else:
                left = (left + _hash(right, key) % np.uint64(a)) % np.uint64(a)
        values[walking] = left * np.uint64(b) + right
        walking = walking[values[walking] >= count]
    return values.astype(np.int64)


def _hash(x: np.ndarray, key: int) -> np.ndarray:
    x = x + np.uint64(key)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=256)
def epoch_keys(seed: int, source: int, epoch: int) -> tuple[int, ...]:
    """What orders one epoch of one source."""
    state = np.random.SeedSequence([seed, source, epoch]).generate_state(NUM_ROUNDS, np.uint64)
    return tuple(int(key) for key in state)


@dataclass(frozen=True, eq=False)
class Mixture:
    """A repeating pattern of sources; after any N samples source k has given floor or ceil of N times its share.

    Made by earliest deadline first: the j-th sample of a source with share w may come from floor(j/w) on and must have
    come by ceil((j+1)/w), and one machine that always takes the earliest deadline meets them all.

    Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980), that such a pattern exists;
    Baruah et al., Proportionate progress, Algorithmica 15 (1996), for the deadlines.
    """

    shares: tuple[int, ...]  # samples of each source in one period
    source_at: np.ndarray  # [period]
    before: np.ndarray  # [period + 1, sources]: samples of each source among the first ones of a period

    @property
    def period(self) -> int:
        return len(self.source_at)

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Samples [n] -> (the source of each, its number among that source's samples)."""
        periods, places = np.divmod(samples, self.period)
        sources = self.source_at[places]
        return sources, periods * np.array(self.shares)[sources] + self.before[places, sources]

    def counts(self, num_samples: int) -> list[int]:
        """Samples of each source among the first `num_samples`."""
        periods, place = divmod(num_samples, self.period)
        return [periods * share + int(before) for share, before in zip(self.shares, self.before[place], strict=True)]


def make_mixture(weights: list[Fraction]) -> Mixture:
    """The pattern with these shares, exactly. Raises: ConfigError where it would be longer than MAX_PERIOD."""
    whole = lcm(*(weight.denominator for weight in weights))
    shares = [int(weight * whole) for weight in weights]
    shares = [share // gcd(*shares) for share in shares]
    period = sum(shares)
    if period > MAX_PERIOD:
        raise ConfigError(
            f"data with weights {', '.join(str(float(weight)) for weight in weights)}",
            f"exact shares must repeat after at most {MAX_PERIOD:,} samples, and these repeat after {period:,}",
            "Use weights of fewer digits that sum to 1, as in 0.7 and 0.3, or small whole numbers, as in 7 and 3",
        )
    source_at = np.zeros(period, np.int64)
    before = np.zeros((period + 1, len(shares)), np.int64)
    given = [0] * len(shares)
    for place in range(period):
        deadlines = [
            (-(-(count + 1) * period // share), source)
            for source, (count, share) in enumerate(zip(given, shares, strict=True))
            if count * period < (place + 1) * share
        ]
        source_at[place] = min(deadlines)[1]
        given[source_at[place]] += 1
        before[place + 1] = given
    return Mixture(tuple(shares), source_at, before)
