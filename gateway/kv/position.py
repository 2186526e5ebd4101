"""How far one rank's event feed has come in the sequence of its engine, and what tells one process of it from another.

It keeps numbers and decides nothing: what follows from them is `gateway.kv.feed_state`'s. No clock: times of our own
are arguments in seconds, those of the engine are Unix times from its batches.
"""

from __future__ import annotations

from collections import deque

from xxhash import xxh3_64_intdigest

from gateway.kv.events import batch_time, first_number
from gateway.kv.feed_words import FeedPoint
from gateway.kv.replay import Mark


class Position:
    """`next` is the number to be applied next, 0 while nothing was applied; batches before `base` count no more.
    `whole`: everything since the engine's start, its last restart or its last clear was, or will be, applied. `mark` is
    the last batch applied, `gap_before` the one that showed the gap counted last."""

    __slots__ = (
        "_remembered",
        "base",
        "gap_before",
        "last_live",
        "lives",
        "mark",
        "newest_ts",
        "next",
        "oldest_ts",
        "whole",
    )

    def __init__(self, *, remembered: int) -> None:
        """Of so many live batches it is known when they came."""
        self._remembered = remembered
        self.forget()

    def forget(self) -> None:
        """As if nothing had ever been applied."""
        self.next = 0
        self.base = 0
        self.whole = True
        self.mark: Mark | None = None
        self.gap_before: int | None = None
        self.last_live: int | None = None
        self.lives: deque[tuple[float, int]] = deque(maxlen=self._remembered)
        """When a batch came live, and its number."""
        self.oldest_ts: float | None = None
        self.newest_ts: float | None = None

    @property
    def point(self) -> FeedPoint | None:
        """For `resume`; None while nothing was applied since something went missing."""
        mark = self.mark
        if mark is None or mark.seq + 1 != self.next:
            return None
        return FeedPoint(mark.seq, mark.digest, self.oldest_ts, self.newest_ts)

    def resume(self, point: FeedPoint) -> None:
        """What another process had applied by then counts as applied."""
        self.mark = Mark(point.seq, point.digest)
        self.next = point.seq + 1
        self.oldest_ts, self.newest_ts = point.oldest_ts, point.newest_ts

    def follows(self, seq: int, payload: bytes) -> bool:
        """Whether nothing is missing before this batch."""
        return seq == self.next or (not self.next and seq == first_number(payload))

    def is_of_another_process(self, seq: int, payload: bytes) -> bool:
        """Whether a batch that comes live cannot be of the process that was followed: the sequence of one only grows,
        and what a replay was faster with has no newer time."""
        if self.last_live is not None and seq <= self.last_live:
            return True
        if seq >= self.next or self.newest_ts is None:
            return False
        ts = batch_time(payload)
        return ts is not None and ts > self.newest_ts

    def came_live(self, seq: int, now: float) -> None:
        """A batch from the subscription is to be applied, now or later."""
        self.last_live = seq
        self.lives.append((now, seq))

    def first_live(self, since: float) -> int:
        """The first batch that came live since then; `next` where none did."""
        return next((seq for at, seq in self.lives if at >= since), self.next)

    def applied(self, seq: int, payload: bytes, *, marks: bool) -> float | None:
        """A batch is applied; `marks`: it is the one to be recognised by from now on. Its time."""
        self.next = seq + 1
        if marks:
            self.mark = Mark(seq, xxh3_64_intdigest(payload))
        ts = batch_time(payload)
        if ts is not None:
            self.newest_ts = ts
            if self.oldest_ts is None:
                self.oldest_ts = ts
        return ts

    def back_to(self, seq: int) -> None:
        """Everything from this number on is to be applied again."""
        self.next = self.base = seq
        self.mark = None

    def lose(self, go_on_from: int) -> None:
        """History up to this number is gone for good."""
        self.whole = False
        self.back_to(go_on_from)
        self.oldest_ts = None
