"""Why a feed that looks whole is not believed: it is silent while its worker serves, it was cut off, or what it removes
was never held.

Rules:
1. A worker that serves while its feed is silent is doubted until the feed is heard again.
2. A connection made anew is doubted until a batch shows that the process behind it is the same.
3. In a whole feed removals of unknown blocks are rare. Where they are the rule, what we hold belongs to another
   process; that is believed at most every `contradiction_rest_s`.

`gateway.kv.feed_state` says what follows. No clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

from gateway.kv.feed_words import FeedLimits


class Doubts:
    """Those of one feed. `why` is `silent`, `reconnected` or None; `silent_by` is when a feed that says nothing until
    then is silent."""

    __slots__ = ("_contradiction_after", "_limits", "_live_at", "_removals", "_unknown", "silent_by", "why")

    def __init__(self, limits: FeedLimits) -> None:
        self.why: str | None = None
        self.silent_by: float | None = None
        self._limits = limits
        self._live_at: float | None = None
        self._contradiction_after = 0.0
        self._removals = self._unknown = 0

    def forget(self) -> None:
        """Nothing is held any more that could be doubted."""
        self.why = self.silent_by = None
        self.forget_removals()

    def forget_removals(self) -> None:
        """What was removed so far tells nothing of what is held now."""
        self._removals = self._unknown = 0

    def heard_live(self, now: float) -> None:
        """A batch has come over the subscription."""
        self._live_at = now
        self.silent_by = None
        self.heard()

    def heard(self) -> None:
        """It has said something: it is not silent."""
        if self.why == "silent":
            self.why = None

    def same_process(self) -> None:
        """A batch has shown that the connection leads to the process it led to before."""
        if self.why == "reconnected":
            self.why = None

    def served(self, started_at: float, now: float) -> bool:
        """A request that began at `started_at` had blocks computed. True when the feed must say something by a time
        that was not set before."""
        heard_since = self._live_at is not None and self._live_at >= started_at
        if heard_since or self.silent_by is not None or self.why == "silent":
            return False
        self.silent_by = now + self._limits.silent_s
        return True

    def falls_silent(self, now: float) -> bool:
        """True once, when the time to say something is over."""
        if self.silent_by is None or now < self.silent_by:
            return False
        self.silent_by = None
        self.why = "silent"
        return True

    def expect_unknown_removals(self, now: float) -> None:
        """Blocks were dropped that the engine holds: it will remove what nobody knows."""
        self._contradiction_after = now + self._limits.contradiction_rest_s

    def removed(self, known: int, unknown: int, now: float) -> bool:
        """Blocks were removed, of which the index held `known`. True when what it holds is another process's."""
        self._removals += known + unknown
        self._unknown += unknown
        if self._removals < self._limits.judged_removals:
            return False
        contradicts = 2 * self._unknown > self._removals
        self.forget_removals()
        if not contradicts or now < self._contradiction_after:
            return False
        self.expect_unknown_removals(now)
        return True
