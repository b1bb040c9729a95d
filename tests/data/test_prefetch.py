"""Prefetch: the order, how far ahead, errors in their place, and a clean end."""

import threading

import pytest

from jaxdist.data.prefetch import Prefetched
from jaxdist.errors import ConfigError


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_items_come_in_order_and_end():
    with Prefetched(lambda step: step * step, 3, 8, depth=2) as inputs:
        assert list(inputs) == [9, 16, 25, 36, 49]
        with pytest.raises(StopIteration):
            next(inputs)
    with Prefetched(lambda step: step, 3, 3, depth=2) as inputs:
        assert list(inputs) == []


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_at_most_depth_items_are_ahead(depth):
    made = threading.Semaphore(0)
    steps = []

    def make(step):
        steps.append(step)
        made.release()
        return step

    with Prefetched(make, 0, 20, depth) as inputs:
        for _ in range(depth):
            made.acquire()
        assert steps == list(range(depth))
        for taken in range(1, 5):
            next(inputs)
            made.acquire()  # the one that was let in by taking one
            assert steps == list(range(depth + taken))
    assert steps == list(range(depth + 4))


def test_an_error_comes_in_its_place_with_its_own_message():
    def make(step):
        if step == 2:
            raise ConfigError("token 9", "there is none", "Use another")
        return step

    with Prefetched(make, 0, 5, depth=4) as inputs:
        assert [next(inputs), next(inputs)] == [0, 1]
        with pytest.raises(ConfigError, match="token 9: there is none"):
            next(inputs)


def test_leaving_early_waits_for_the_thread_and_makes_no_more(monkeypatch):
    started, go_on = threading.Event(), threading.Event()
    steps = []

    def make(step):
        steps.append(step)
        started.set()
        assert go_on.wait(60)

    before = prefetch_threads()
    inputs = Prefetched(make, 0, 100, depth=50)
    shutdown = inputs._pool.shutdown

    def shut_down_while_the_thread_works(wait, cancel_futures):
        shutdown(wait=False, cancel_futures=cancel_futures)
        go_on.set()
        shutdown(wait=wait)

    monkeypatch.setattr(inputs._pool, "shutdown", shut_down_while_the_thread_works)
    with pytest.raises(KeyboardInterrupt), inputs:
        started.wait(60)
        raise KeyboardInterrupt
    assert steps == [0]
    assert prefetch_threads() == before
