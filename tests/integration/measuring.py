"""Times that processes take, without what a busy machine adds to them.

A test that measures milliseconds on a machine with other work fails for the machine's sake. The kernel tells how long a
process was ready to run and had no core (`schedstat`): that is taken off. What is left is what the process did with the
interpreter, or waited for: exactly what a stalled gateway has too much of.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from time import perf_counter

from benchmarks.process_cpu import waited_s

_SAMPLE_EVERY_S = 0.005


class Waiting:
    """How long some processes had waited for a core, sampled over time. `over` tells what of it fell into a span."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self._at: list[float] = []
        self._waited: list[float] = []

    def sample(self) -> None:
        self._at.append(perf_counter())
        self._waited.append(waited_s(self._pids))

    def over(self, start: float, end: float) -> float:
        """Seconds between the last sample before the span and the first one behind it."""
        first = max(0, bisect_right(self._at, start) - 1)
        last = min(len(self._at) - 1, bisect_left(self._at, end))
        return self._waited[last] - self._waited[first]

    def without(self, start: float, end: float) -> float:
        """The length of a span without the waiting in it."""
        return max(0.0, end - start - self.over(start, end))


@asynccontextmanager
async def sampled(pids: Sequence[int]) -> AsyncIterator[Waiting]:
    """Sample the waiting of these processes for as long as the context lasts."""
    waiting = Waiting(pids)
    waiting.sample()

    async def go_on() -> None:
        while True:
            await asyncio.sleep(_SAMPLE_EVERY_S)
            waiting.sample()

    task = asyncio.create_task(go_on())
    try:
        yield waiting
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        waiting.sample()


def percentile(values: Sequence[float], share: float) -> float:
    """The value that this share of them does not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
