"""Inputs made ready while the device computes."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, Self, TypeVar

from jaxdist.errors import require_positive

Item = TypeVar("Item")


class Prefetched(Generic[Item]):
    """The items make(first), ..., make(last - 1) in order, made by one background thread, up to `depth` ahead.

    An error of `make` is raised where its item would have come, and the items before it come first. Leaving the `with`
    block drops what was made ahead and waits for the call in progress.
    """

    def __init__(self, make: Callable[[int], Item], first: int, last: int, depth: int):
        require_positive("prefetch", depth)
        self._make = make
        self._steps = iter(range(first, last))
        self._ahead: deque[Future[Item]] = deque()
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        for _ in range(depth):
            self._submit_next()

    def _submit_next(self) -> None:
        step = next(self._steps, None)
        if step is not None:
            self._ahead.append(self._pool.submit(self._make, step))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if not self._ahead:
            raise StopIteration
        item = self._ahead.popleft().result()
        self._submit_next()
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self._ahead.clear()
        self._pool.shutdown(wait=True, cancel_futures=True)
