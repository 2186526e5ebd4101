"""How long blocks live in a rank's cache, from a sample: the sign of a cache that is too small for its traffic.

Rules:
1. Sampled is one block in 64, by its engine hash, at most `MOST` at a time in each tier; a block is one the whole time,
   so its removal is found again.
2. A life is from the first announcement to the first removal. What ends otherwise (a cache that was cleared, a feed
   that lost its place) has no life: it was not pushed out.
3. Announcements that are told again after a gap come late, so nothing is learned until the feed is live again.

It takes no clock: `now` is in seconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final

from gateway.kv.events import Removed, Stored
from gateway.records import EngineHash, Tier

LIFE_BOUNDS: Final = (1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 24 * 3600)
"""Seconds: one that churns to one that is never full."""

MOST: Final = 2048
"""Sampled blocks of a rank and tier: those of 130,000. Beyond that new ones are left out."""

_OTHERS: Final = 63
"""Bits of a hash that are 0 in the sample."""


@dataclass(slots=True)
class Lives:
    """Lives that ended: how many up to each of `LIFE_BOUNDS` and above the last, and the sum of their seconds."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LIFE_BOUNDS) + 1))
    total_s: float = 0.0

    def add(self, other: Lives) -> None:
        """Those of another rank too."""
        self.counts = [mine + others for mine, others in zip(self.counts, other.counts, strict=True)]
        self.total_s += other.total_s

    def median_s(self) -> float | None:
        """Upper bound of the bucket the median lies in; None without lives, infinite above the last bound."""
        half, so_far = sum(self.counts) / 2, 0
        for bound, count in zip((*LIFE_BOUNDS, float("inf")), self.counts, strict=True):
            so_far += count
            if count and so_far >= half:
                return float(bound)
        return None


class BlockLives:
    """Of one rank. `lives` by tier; tiers that had none are absent."""

    __slots__ = ("_born", "lives")

    def __init__(self) -> None:
        self.lives: dict[Tier, Lives] = {}
        self._born: dict[Tier, dict[EngineHash, float]] = {}

    def note(self, events: Iterable[Stored | Removed], now: float) -> None:
        """Events that were applied just now."""
        for event in events:
            hashes = event.hashes
            if len(hashes) == 1 and hashes[0] & _OTHERS:
                continue  # engines that do not merge events: nearly always
            sample = [one for one in hashes if not one & _OTHERS]
            if not sample:
                continue
            match event:
                case Stored():
                    self._begin(sample, event.tier, now)
                case Removed():
                    self._end(sample, event.tier, now)

    def forget(self) -> None:
        """What lives now may end unseen, or ends for no reason of its own (rules 2 and 3)."""
        self._born.clear()

    def _begin(self, sample: list[EngineHash], tier: Tier, now: float) -> None:
        born = self._born.setdefault(tier, {})
        for one in sample:
            if len(born) >= MOST:
                return
            born.setdefault(one, now)

    def _end(self, sample: list[EngineHash], tier: Tier, now: float) -> None:
        born = self._born.get(tier)
        if born is None:
            return
        for one in sample:
            since = born.pop(one, None)
            if since is not None:
                lives = self.lives.get(tier) or self.lives.setdefault(tier, Lives())
                lives.counts[bisect_left(LIFE_BOUNDS, now - since)] += 1
                lives.total_s += now - since
