"""How many requests one worker should have at a time, learned from what it says.

A request that an engine cannot start waits in its queue, where no better worker can take it any more. So the limit
follows what the engine was seen to run when it had no room for more, and rises again when it has.

Rules:
1. A worker has no room when requests wait in it and its KV cache is nearly full, or when two polls in a row show
   waiting requests that are not explained by the prefills ahead of them: then its batch is full.
2. Then the limit is what runs and a little more, so that the next request is at hand when one ends.
3. A poll that shows nobody waiting while the limit binds raises it.
4. No polls, no limit. It is never below 1.
"""

from __future__ import annotations

from dataclasses import dataclass

from gateway.records import LoadSample

_CROWDED = 0.9
"""KV use above which an engine lets requests wait for blocks."""

_AT_HAND = 16
"""One more than runs, and another for every so many: with a large batch more than one ends at a time."""

_RISE = 8
"""By one and an eighth a poll: back from too low a limit in some seconds, not far above the right one."""


@dataclass(slots=True)
class Room:
    """`fixed` is an operator's number, which counts alone; `limit` is None while there is none."""

    fixed: int | None = None
    limit: int | None = None
    _unexplained: bool = False

    def __post_init__(self) -> None:
        self.limit = self.fixed

    def configure(self, fixed: int | None) -> None:
        """An operator's number, or None: learn it. What was learned stays."""
        if fixed is not None:
            self.limit = fixed
        elif self.fixed is not None:
            self.limit = None
        self.fixed = fixed

    def observe(self, sample: LoadSample, *, inflight: float, explained: bool) -> None:
        """A poll; `inflight` are the requests everybody has on the worker, as far as the gateway knows, `explained`
        says that those which wait are waiting for prefills that take no longer than was expected."""
        if self.fixed is not None:
            return
        running, waiting = sample.running, sample.waiting
        before, self._unexplained = self._unexplained, waiting > 0.0 and not explained
        if waiting and running and ((sample.kv_usage or 0.0) >= _CROWDED or (before and self._unexplained)):
            self.limit = _more(int(running), _AT_HAND)
        elif not waiting and self.limit is not None and inflight >= self.limit:
            self.limit = _more(self.limit, _RISE)

    def forget(self) -> None:
        """The last poll is too old to believe."""
        if self.fixed is None:
            self.limit, self._unexplained = None, False


def _more(requests: int, every: int) -> int:
    return requests + 1 + requests // every
