"""When a request is late, as the first bytes of its own pool tell, and what became of second copies.

Rules:
1. Late is relative: seconds until the answer began, over the seconds that were expected of that worker for that request
   when it was placed. A long prompt is late by right.
2. A stream begins when its prefill is over, a plain text when its last token is written, and what has no text
   (embeddings, scores) in between: each kind is compared with its like.
3. One observation a request and worker. A request that its second copy overtook counts with the ratio at which it was
   called late: it would have taken longer, nobody knows how much longer. So copies neither hide slowness from the ratio
   nor drive it up.
4. Memory is bounded: the last `KEPT` ratios of each kind.

No clock and no I/O. Who is asked for a second copy, and whether, is decided in `edge.hedge`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final

from gateway.records import Hedged

KEPT: Final = 1000
"""Ratios of a kind: a minute or more of a busy pool, and a 99.9th percentile still has one above it."""

LEAST: Final = 20
"""Fewer say nothing of a tail."""


class Kind(Enum):
    """What an answer's beginning waits for."""

    STREAM = "the prefill"
    TEXT = "the prefill and every token"
    OTHER = "no tokens"


class Refusal(StrEnum):
    """Why a late request got no second copy: nobody else may have it (or too much of the pool is ejected), others wait
    at the gateway, the pool or the best other worker has too little room, that worker would let it wait, or the budget
    for retries is spent."""

    NO_WORKER = "no_worker"
    QUEUE = "queue"
    ROOM = "room"
    BUSY = "busy"
    BUDGET = "budget"


class NoSecond(StrEnum):
    """Why a request gets no second copy however late it is: hedging is off for it, it must not be computed twice, or
    too few answers of its kind have been seen to say what is late."""

    OFF = "off"
    REQUEST = "request"
    UNSEEN = "unseen"


@dataclass(frozen=True, slots=True)
class HedgeRule:
    """A request is late when it takes longer than `percentile` (0..1) of its like, and than `floor_s`."""

    percentile: float
    floor_s: float


class Ratios:
    """The last `KEPT` numbers, in the order of their coming and by size. About a microsecond an addition."""

    __slots__ = ("_order", "_sorted")

    def __init__(self) -> None:
        self._order: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._order)

    def add(self, ratio: float) -> None:
        """The newest; above the bound the oldest goes."""
        if len(self._order) >= KEPT:
            del self._sorted[bisect_left(self._sorted, self._order.popleft())]
        self._order.append(ratio)
        insort(self._sorted, ratio)

    def quantile(self, share: float) -> float | None:
        """The number that a `share` of them (0..1) is not above; None while they are too few to say."""
        count = len(self._sorted)
        at = int(share * count)
        # One at least must lie above it, or it is only the largest so far.
        return self._sorted[at] if count >= LEAST and at < count - 1 else None


class Hedging:
    """Of one pool. `results` counts second copies by what became of them, `refused` those not sent."""

    __slots__ = ("_ratios", "refused", "results")

    def __init__(self) -> None:
        self._ratios = {kind: Ratios() for kind in Kind}
        self.results: Counter[Hedged] = Counter()
        self.refused: Counter[Refusal] = Counter()

    def due_s(self, kind: Kind, expected_s: float, rule: HedgeRule) -> float | None:
        """After how many seconds a request is late; None while too few have been seen to say."""
        ratio = self._ratios[kind].quantile(rule.percentile)
        return None if ratio is None else max(rule.floor_s, expected_s * ratio)

    def began(self, kind: Kind, expected_s: float, took_s: float) -> None:
        """The worker that a request was placed on has begun to answer it well."""
        if expected_s > 0.0:
            self._ratios[kind].add(max(0.0, took_s) / expected_s)

    def overtaken(self, kind: Kind, rule: HedgeRule) -> None:
        """The second copy of a late request was answered first (rule 3)."""
        ratios = self._ratios[kind]
        ratio = ratios.quantile(rule.percentile)
        if ratio is not None:
            ratios.add(ratio)
