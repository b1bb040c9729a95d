"""The order of the data: every window once an epoch, shares kept, and any part of any batch read in any order."""

import math
from fractions import Fraction
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxdist.data.batches import Batches, Corpus, Source, first_batches, held_out_batches
from jaxdist.data.order import epoch_keys, make_mixture, shuffled
from jaxdist.data.tokens import Part, Tokens
from jaxdist.errors import ConfigError


def tokens_of(*arrays: np.ndarray) -> Tokens:
    return Tokens([Part(array, f"part {number}", 0, len(array)) for number, array in enumerate(arrays)], 2**31 - 1)


def corpus_of(*arrays: np.ndarray, weights=None) -> Corpus:
    """Each array is a source, and is its own held-out data."""
    weights = [1] * len(arrays) if weights is None else weights
    return Corpus(
        tuple(
            Source(tokens_of(array), tokens_of(array), f"source {number}", Fraction(weight))
            for number, (array, weight) in enumerate(zip(arrays, weights, strict=True))
        )
    )


def visits(batches: Batches, num_epochs: int = 1) -> list[int]:
    """The windows of a single source, in order: with tokens = arange, the first input of a row tells its window."""
    num_windows = batches.num_windows[0]
    num_steps = -(-num_epochs * num_windows // batches.batch_size)
    starts = np.concatenate([batches[step]["inputs"][:, 0] for step in range(num_steps)])
    assert not (starts % batches.seq_len).any()
    return (starts // batches.seq_len).tolist()[: num_epochs * num_windows]


# ---------------------------------------------------------------------------------------------------------------------
# The permutation
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(count=st.integers(1, 3000), seed=st.integers(0, 2**70), source=st.integers(0, 5), epoch=st.integers(0, 10**6))
def test_shuffled_is_a_permutation(count, seed, source, epoch):
    order = shuffled(np.arange(count), count, epoch_keys(seed, source, epoch))
    assert sorted(order.tolist()) == list(range(count))


@settings(max_examples=30, deadline=None)
@given(count=st.integers(2**40, 2**62), data=st.data())
def test_shuffled_finds_places_of_a_count_that_no_list_could_hold(count, data):
    places = np.array(data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=20, unique=True)))
    found = shuffled(places, count, epoch_keys(1, 0, 0))
    assert len(set(found.tolist())) == len(places) and found.min() >= 0 and found.max() < count
    for place, value in zip(places, found, strict=True):
        assert shuffled(np.array([place]), count, epoch_keys(1, 0, 0))[0] == value


def chi_squared(counts: np.ndarray) -> float:
    """Chi squared of counts that should be equal, in standard deviations from what chance gives."""
    expected = counts.mean()
    freedom = counts.size - 1
    return float((((counts - expected) ** 2).sum() / expected - freedom) / np.sqrt(2 * freedom))


@pytest.mark.parametrize("count", [2, 3, 7, 24, 50])
def test_each_value_is_as_likely_at_each_place(count):
    """Fixed seeds, so the verdict never changes."""
    num_epochs = 2000
    at = np.zeros((count, count))
    following = np.zeros(count)  # how far the next value is from this one
    repeated = 0  # places with the value they had an epoch before
    last = None
    for epoch in range(num_epochs):
        order = shuffled(np.arange(count), count, epoch_keys(0, 0, epoch))
        at[np.arange(count), order] += 1
        np.add.at(following, np.diff(order) % count, 1)
        repeated += 0 if last is None else int((order == last).sum())
        last = order
    assert abs(chi_squared(at)) < 4
    assert abs(chi_squared(following[1:])) < 4 if count > 2 else True
    assert abs(repeated - num_epochs) < 5 * np.sqrt(num_epochs)  # one place in `count`, of `count`


def test_neighbours_in_a_large_epoch_are_unrelated():
    count = 10_000_019
    order = shuffled(np.arange(100_000), count, epoch_keys(7, 0, 3))
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.015
    assert abs(chi_squared(np.bincount(order * 64 // count, minlength=64).astype(float))) < 4
    assert abs(chi_squared(np.bincount(order % 64, minlength=64).astype(float))) < 4
    steps = np.diff(order) % count
    assert len(np.unique(steps)) > 99_000  # no stride comes again and again


# ---------------------------------------------------------------------------------------------------------------------
# Mixtures
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(shares=st.lists(st.integers(1, 60), min_size=1, max_size=7))
def test_shares_are_exact_up_to_rounding_after_every_sample(shares):
    mixture = make_mixture([Fraction(share) for share in shares])
    whole = sum(shares)
    samples = np.arange(2 * whole + 3)
    sources, numbers = mixture.locate(samples)
    given = [0] * len(shares)
    for sample, source, number in zip(samples.tolist(), sources, numbers, strict=True):
        assert number == given[source]  # the samples of a source are numbered without a gap
        given[source] += 1
        assert mixture.counts(sample + 1) == given
        for count, share in zip(given, shares, strict=True):
            assert (sample + 1) * share // whole <= count <= -(-(sample + 1) * share // whole)


def test_each_source_has_epochs_of_its_own():
    """Sources of 10 and 35 windows at 0.7 and 0.3: every window once in each epoch of its source."""
    seq_len, sizes, weights = 4, (10, 35), ("0.7", "0.3")
    arrays = [1000 * number + np.arange(size * seq_len + 1) for number, size in enumerate(sizes)]
    batches = Batches(corpus_of(*arrays, weights=weights), 5, seq_len, seed=1)
    assert batches.num_windows == list(sizes)
    starts = np.concatenate([batches[step]["inputs"][:, 0] for step in range(60)])
    for number, (size, weight) in enumerate(zip(sizes, weights, strict=True)):
        windows = (starts[starts // 1000 == number] % 1000 // seq_len).tolist()
        assert len(windows) == 300 * Fraction(weight)
        for epoch in range(len(windows) // size):
            assert sorted(windows[epoch * size : (epoch + 1) * size]) == list(range(size))
    assert batches.epochs(60) == [21, 90 / 35]
    assert batches.epochs(0) == [0, 0]


def test_sources_are_not_shuffled_alike():
    tokens = np.arange(101)
    batches = Batches(corpus_of(tokens, tokens + 1000), 2, 1, seed=0)
    first = np.concatenate([batches[step]["inputs"][:, 0] for step in range(100)])
    assert first[first < 1000].tolist() != (first[first >= 1000] - 1000).tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Batches
# ---------------------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_each_epoch_visits_each_window_once(draw):
    seq_len = draw.draw(st.integers(1, 9), "seq_len")
    num_windows = draw.draw(st.integers(1, 40), "num_windows")
    num_tokens = num_windows * seq_len + 1 + draw.draw(st.integers(0, seq_len - 1), "left over")
    batch_size = draw.draw(st.integers(1, num_windows), "batch_size")
    batches = Batches(corpus_of(np.arange(num_tokens)), batch_size, seq_len, draw.draw(st.integers(0, 2**70), "seed"))
    order = visits(batches, num_epochs=3)
    for epoch in range(3):
        assert sorted(order[epoch * num_windows : (epoch + 1) * num_windows]) == list(range(num_windows))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_no_token_is_seen_twice_or_missed_in_an_epoch(draw):
    """Over parts cut anywhere, with windows that lie across several of them: each target once."""
    seq_len = draw.draw(st.integers(1, 7), "seq_len")
    sizes = draw.draw(st.lists(st.integers(0, 12), min_size=1, max_size=8), "parts")
    num_windows = (sum(sizes) - 1) // seq_len
    if num_windows < 1:
        return
    parts = np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])
    tokens = tokens_of(*parts)
    corpus = Corpus((Source(tokens, tokens, "parts"),))
    batches = Batches(corpus, 1, seq_len, draw.draw(st.integers(0, 1000), "seed"))
    whole = [batches[step] for step in range(num_windows)]
    targets = np.concatenate([batch["targets"].ravel() for batch in whole])
    inputs = np.concatenate([batch["inputs"].ravel() for batch in whole])
    assert sorted(targets.tolist()) == list(range(1, num_windows * seq_len + 1))
    assert sorted(inputs.tolist()) == list(range(num_windows * seq_len))


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_split_of_the_rows_reads_the_global_batch(draw):
    """What processes read of their own, each with its own objects, is together the whole batch."""
    batch_size = draw.draw(st.integers(1, 12), "batch_size")
    cuts = sorted(draw.draw(st.sets(st.integers(0, batch_size)), "cuts") | {0, batch_size})
    step = draw.draw(st.integers(0, 100), "step")
    arrays = [np.arange(400), 1000 + np.arange(90)]
    whole = Batches(corpus_of(*arrays, weights=[2, 1]), batch_size, 5, 3)[step].read()
    shares = [
        Batches(corpus_of(*arrays, weights=[2, 1]), batch_size, 5, 3)[step].read(slice(*cut)) for cut in pairwise(cuts)
    ]
    for name, array in whole.items():
        np.testing.assert_array_equal(np.concatenate([share[name] for share in shares]), array, err_msg=name)
    assert whole["rows"].tolist() == list(range(batch_size))


def test_only_the_rows_that_are_asked_for_are_read(monkeypatch):
    batches = Batches(corpus_of(np.arange(1000)), 8, 10, 0)
    read = []
    windows = Tokens.windows
    monkeypatch.setattr(
        Tokens, "windows", lambda self, starts, length: read.append(len(starts)) or windows(self, starts, length)
    )
    batch = batches[3]
    assert read == []
    for _ in range(3):  # once for all the ranks, and all the arrays, that ask for the same rows
        batch.read(slice(2, 4))
    assert read == [2]


@pytest.mark.parametrize("seed", [0, 7])
def test_batch_holds_shifted_windows(seed):
    batch_size, seq_len = 3, 5
    tokens = np.random.default_rng(0).integers(0, 1000, 7 * seq_len + 1).astype(np.uint16)
    windows = {tuple(tokens[start : start + seq_len + 1].tolist()) for start in range(0, len(tokens) - 1, seq_len)}
    batches = Batches(corpus_of(tokens), batch_size, seq_len, seed)
    for step in range(8):
        batch = batches[step]
        assert {name: (array.dtype, array.shape) for name, array in batch.items()} == {
            "inputs": (np.int32, (batch_size, seq_len)),
            "targets": (np.int32, (batch_size, seq_len)),
            "rows": (np.int32, (batch_size,)),
        }
        np.testing.assert_array_equal(batch["targets"][:, :-1], batch["inputs"][:, 1:])
        np.testing.assert_array_equal(batch["rows"], range(batch_size))
        rows = np.concatenate([batch["inputs"], batch["targets"][:, -1:]], axis=1)
        assert {tuple(row.tolist()) for row in rows} <= windows


def test_order_depends_on_seed_and_epoch_alone():
    tokens = np.arange(501)
    first = visits(Batches(corpus_of(tokens), 4, 5, seed=1), num_epochs=2)
    epoch_keys.cache_clear()
    assert first == visits(Batches(corpus_of(tokens.copy()), 4, 5, seed=1), num_epochs=2)
    assert first == visits(Batches(corpus_of(tokens), 7, 5, seed=1), num_epochs=2)  # free of the batch size
    assert first != visits(Batches(corpus_of(tokens), 4, 5, seed=2), num_epochs=2)
    assert first[:100] != first[100:]
    assert first[:100] != list(range(100))


def test_order_is_pinned():
    """A change here changes the data of every resumed run."""
    order = visits(Batches(corpus_of(np.arange(11)), 5, 1, seed=0), num_epochs=2)
    expected = [8, 2, 5, 7, 4, 9, 0, 6, 3, 1, 3, 0, 9, 8, 1, 4, 5, 6, 7, 2]
    assert order == expected
    mixture = make_mixture([Fraction("0.5"), Fraction("0.3"), Fraction("0.2")])
    assert mixture.source_at.tolist() == [0, 1, 0, 2, 0, 1, 0, 1, 0, 2]


# ---------------------------------------------------------------------------------------------------------------------
# Held-out batches
# ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 4, 64])
@pytest.mark.parametrize(("num_tokens", "most"), [(41, 100), (43, 100), (3, 4), (1000, 8)])
def test_held_out_windows_count_once(num_tokens, most, batch_size):
    seq_len = 5
    batches = held_out_batches(corpus_of(np.arange(num_tokens)), batch_size, seq_len, most)
    assert len(batches) <= math.ceil(most / batch_size)
    targets = np.concatenate([batch["targets"].ravel() for batch in batches])
    inputs = np.concatenate([batch["inputs"].ravel() for batch in batches])
    np.testing.assert_array_equal(targets[targets >= 0], inputs[targets >= 0] + 1)
    counted = sorted(targets[targets >= 0].tolist())
    if most == 8:  # spread evenly, the first and the last window among them
        assert len(counted) == len(set(counted)) and counted[0] == 1 and counted[-1] == num_tokens - 1
    else:
        assert counted == list(range(1, num_tokens))
    for batch in batches:
        halves = [batch.read(slice(0, batch_size // 2)), batch.read(slice(batch_size // 2, batch_size))]
        for name, array in batch.items():
            np.testing.assert_array_equal(np.concatenate([half[name] for half in halves]), array)


def test_held_out_rows_are_shared_out_by_weight():
    corpus = corpus_of(np.arange(1001), 5000 + np.arange(1001), weights=["0.75", "0.25"])
    [batch] = held_out_batches(corpus, 8, 10, 8)
    assert (batch["inputs"][:, 0] >= 5000).sum() == 2


def test_digests_are_equal_in_any_order_of_reading():
    """Resuming at a step gives what a run from the start gets there."""
    arrays = [np.arange(56), 100 + np.arange(77)]
    from_start = [Batches(corpus_of(*arrays), 4, 5, seed=3)[step].digest() for step in range(30)]
    assert len(set(from_start)) == 30
    for step in reversed(range(30)):
        epoch_keys.cache_clear()
        assert Batches(corpus_of(*arrays), 4, 5, seed=3)[step].digest() == from_start[step]
    batches = Batches(corpus_of(*arrays), 4, 5, seed=3)
    order = np.random.default_rng(0).permutation(30).tolist()
    assert [batches[step].digest() for step in order] == [from_start[step] for step in order]


def test_far_step_does_not_overflow():
    step = 2**40
    batches = Batches(corpus_of(np.arange(8)), 3, 1, seed=0)
    epoch, place = divmod(step * 3, 7)
    expected = shuffled(np.array([place]), 7, epoch_keys(0, 0, epoch))
    assert batches[step]["inputs"][0, 0] == expected


def test_tokens_outside_the_sequence_are_an_index_error():
    for start, stop in ((-1, 2), (0, 12), (5, 3)):
        with pytest.raises(IndexError):
            tokens_of(np.arange(11)).read(start, stop)


def test_too_short_corpus_says_what_would_work():
    with pytest.raises(ConfigError) as caught:
        Batches(corpus_of(np.arange(512)), 8, 64, seed=0)
    for words in ("there are 512", "513 tokens", "batch_size=7 ", "seq_len=63 ", "more data"):
        assert words in str(caught.value)
    for batch_size, seq_len, num_tokens in ((8, 64, 513), (7, 64, 512), (8, 63, 512)):
        Batches(corpus_of(np.arange(num_tokens)), batch_size, seq_len, seed=0)


def test_a_source_needs_only_its_rows_of_a_batch():
    large, small = np.arange(513), np.arange(65)
    Batches(corpus_of(large, small, weights=[7, 1]), 8, 64, seed=0)
    with pytest.raises(ConfigError, match=r"257 tokens.*there are 65 in source 1.*batch_size=2 "):
        Batches(corpus_of(large, small), 8, 64, seed=0)


def test_a_source_that_fills_its_share_exactly_is_enough():
    """As floats 100 x 0.07 is above 7, and 57 / 0.57 below 100."""
    corpus = corpus_of(np.arange(8), np.arange(1000), weights=[7, 93])
    assert Batches(corpus, batch_size=100, seq_len=1, seed=0).num_windows == [7, 999]
    with pytest.raises(ConfigError, match="Use batch_size=100 or less"):
        Batches(corpus, batch_size=101, seq_len=1, seed=0)
    corpus = corpus_of(np.arange(58), np.arange(1000), weights=[57, 43])
    looked_at = first_batches(Batches(corpus, batch_size=1, seq_len=1, seed=0), most=1000)
    assert len(looked_at) == 100
