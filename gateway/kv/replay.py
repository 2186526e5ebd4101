"""What a feed does while batches are missing: the replay it asks for, and the live batches that wait for it.

Rules:
1. One replay at a time; to ask again is to give up the one before.
2. A replay may stop early without an end marker (vLLM before 0.33 drops the tail of long ones), so silence is a timeout
   and the next missing number is asked for again. A try that brought something is continued at once; others get slower,
   are at most `tries_a_minute`, and after `replay_tries` in vain the replay rests.

`gateway.kv.feed_state` says what for, and what follows from it. No clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import NamedTuple

from gateway.kv.feed_words import Action, Apply, AskReplay, FeedLimits


class For(Enum):
    """What a replay is asked for: the beginning; what is missing; proof of the same process; whether there is more."""

    START = "start"
    REPAIR = "repair"
    CHECK = "check"
    PROBE = "probe"


class Mark(NamedTuple):
    """One batch, recognised by its bytes."""

    seq: int
    digest: int


class Asking:
    """The replay of one feed. `purpose` is that of the replay that runs or is planned: planned for `at`, or asked for
    and silent until `reply_by` at most. `proof` is what its first reply must be, `brought` says that it brought
    something new, `possible` that there is an endpoint to ask."""

    __slots__ = (
        "_asked",
        "_limits",
        "_rest_s",
        "_rest_until",
        "_tries",
        "at",
        "brought",
        "possible",
        "proof",
        "purpose",
        "reply_by",
    )

    def __init__(self, *, possible: bool, limits: FeedLimits) -> None:
        self.possible = possible
        self.purpose: For | None = None
        self.at: float | None = None
        self.reply_by: float | None = None
        self.proof: Mark | None = None
        self.brought = False
        self._limits = limits
        self._asked: deque[float] = deque(maxlen=limits.tries_a_minute)
        self._tries = 0  # in vain, one after the other
        self._rest_s = limits.replay_rest_s
        self._rest_until = 0.0

    def may(self, now: float) -> bool:
        """Whether asking is of use now."""
        return self.possible and now >= self._rest_until

    def ask(
        self, purpose: For, now: float, *, missing: int, last: Mark | None, continued: bool = False
    ) -> list[Action]:
        """Ask from `missing` on, or note when that will be allowed; a check asks for `last`, the last batch applied.
        What follows a try that brought something is no new try."""
        self.purpose = purpose
        self.reply_by = self.at = self.proof = None
        if not continued:
            if len(self._asked) == self._asked.maxlen and now < self._asked[0] + 60.0:
                self.at = self._asked[0] + 60.0
                return []
            self._asked.append(now)
        self.brought = False
        self.reply_by = now + self._limits.reply_timeout_s * 2**self._tries
        if purpose is For.PROBE:
            return [AskReplay(0)]
        if purpose is For.CHECK:
            self.proof = last
        return [AskReplay(missing if self.proof is None else self.proof.seq)]

    def heard(self, now: float) -> None:
        """It has said something."""
        self.reply_by = now + self._limits.reply_timeout_s

    def afresh(self) -> None:
        """What was in vain before counts no more."""
        self._tries = 0

    def in_vain(self) -> bool:
        """The try brought nothing. False when that was one too many."""
        self._tries += 1
        if self._tries < self._limits.replay_tries:
            return True
        self._tries = 0
        return False

    def pause(self, now: float) -> None:
        """Ask again later; the longer, the more tries were in vain."""
        self.reply_by, self.at = None, now + self._limits.reply_timeout_s * 2 ** (self._tries - 1)

    def give_up(self, now: float) -> None:
        """It rests, the longer each time."""
        self._rest_until = now + self._rest_s
        self._lengthen_rest()

    def probe_after_rest(self) -> None:
        """Look whether there is more, once it has rested."""
        self.purpose, self.at = For.PROBE, self._rest_until

    def probe_later(self, now: float) -> None:
        """A probe found nothing: the next one after a longer rest."""
        self._lengthen_rest()
        self.reply_by, self.at = None, now + self._rest_s

    def done(self) -> None:
        """It brought what there was."""
        self._tries = 0
        self._rest_s = self._limits.replay_rest_s

    def stop(self) -> None:
        """No replay runs or is planned."""
        self.purpose = self.reply_by = self.at = self.proof = None

    def _lengthen_rest(self) -> None:
        self._rest_s = min(2 * self._rest_s, self._limits.longest_rest_s)


class Backlog:
    """Live batches that wait for what is missing before them, in the order they came; bounded in number and bytes."""

    __slots__ = ("_batches", "_bytes", "_limits")

    def __init__(self, limits: FeedLimits) -> None:
        self._limits = limits
        self._batches: deque[Apply] = deque()
        self._bytes = 0

    def __bool__(self) -> bool:
        return bool(self._batches)

    @property
    def first(self) -> Apply:
        """The oldest one; there must be one."""
        return self._batches[0]

    def keep(self, seq: int, payload: bytes) -> bool:
        """Let a batch wait; False when there is no room."""
        limits = self._limits
        fits = not self._batches or self._bytes + len(payload) <= limits.buffered_bytes
        if not fits or len(self._batches) >= limits.buffered_batches:
            return False
        self._batches.append(Apply(seq, payload))
        self._bytes += len(payload)
        return True

    def take(self) -> Apply:
        """Remove and return the oldest one."""
        batch = self._batches.popleft()
        self._bytes -= len(batch.payload)
        return batch

    def drop_before(self, seq: int) -> None:
        """Those with lower numbers, from the oldest on, count no more."""
        while self._batches and self._batches[0].seq < seq:
            self.take()

    def clear(self) -> None:
        """None count any more."""
        self._batches.clear()
        self._bytes = 0
