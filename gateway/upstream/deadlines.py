"""One timer that watches many deadlines.

Rules:
1. Moving a deadline is a plain attribute write; nothing is cancelled or armed again for a request or a chunk.
2. A deadline is noticed at most one tick late, so `tick_s` is the precision of every limit watched here.
3. No timer runs while nothing is watched.
4. Ticks come at whole multiples of `tick_s` on the loop's clock, so that several of these wake the process at the same
   moments: waking an idle process costs more than a tick.

It knows nothing of what it watches, apart from when it is due.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import Protocol

NEVER = math.inf
"""The deadline of something that may take as long as it likes."""


class Watched(Protocol):
    """Something with a deadline, in seconds on the clock of its `Deadlines`."""

    deadline: float

    def overdue(self, now: float) -> None:
        """The deadline has passed. Called on every tick until it is moved or the object is forgotten."""


class Deadlines:
    """Ticks every `tick_s` seconds while anything is watched. The cost of a tick is about 60 ns an object."""

    __slots__ = ("_clock", "_tick_s", "_timer", "_watched")

    def __init__(self, clock: Callable[[], float], *, tick_s: float = 0.25) -> None:
        self._clock = clock
        self._tick_s = tick_s
        self._watched: set[Watched] = set()
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, watched: Watched) -> None:
        """Begin to watch; twice is once. Needs a running loop."""
        self._watched.add(watched)
        if self._timer is None:
            self._arm()

    def forget(self, watched: Watched) -> None:
        """Stop watching; what is not watched is ignored."""
        self._watched.discard(watched)

    def _tick(self) -> None:
        self._timer = None
        if not self._watched:
            return
        self._arm()
        now = self._clock()
        for watched in [w for w in self._watched if w.deadline <= now]:
            try:
                watched.overdue(now)
            except Exception as error:  # noqa: BLE001  a bug of one must not keep the others waiting; it is logged
                told = {"message": "a deadline could not be told", "exception": error}
                asyncio.get_running_loop().call_exception_handler(told)

    def _arm(self) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(next_tick(loop.time(), self._tick_s), self._tick)


def next_tick(now: float, tick_s: float) -> float:
    """The next whole multiple of `tick_s` after `now`; a timer that fired a little early counts as being on time."""
    return (math.floor(now / tick_s + 0.05) + 1) * tick_s
