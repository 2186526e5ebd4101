"""Whether one worker may get requests: a state machine over evidence, and the budget of a pool's retries.

    ready      nothing speaks against it
    degraded   it serves, but: it has just recovered (slow start), requests failed lately, or probes fail
    ejected    its breaker is open or half open: no requests, unless too much of the pool is ejected (`Crew.renew`)
    draining   an operator, or whoever runs it, wants no new requests there
    gone       nobody listens at its address, or it leaves the fleet

    closed --failures--> open --open_s--> half open --trial passed--> closed, slow start --slow_start_s--> closed
                           ^                  |                            |
                           +--trial failed----+------------failure---------+      each time twice as long, bounded

Rules:
1. Requests are the evidence that counts (`evidence_of`): no connection, 5xx, no first byte in time, a broken stream.
   Never 4xx, and neither 429 nor 503 with Retry-After: those speak of room, not of health.
2. Failures minus answers is what opens the breaker, so one that fails more often than it answers is ejected, and a
   rare failure is forgotten. An answer counts at its first byte where that helps the worker; a stream that breaks later
   takes it back, so that a worker which breaks every stream is ejected as one that never answers.
3. A request is evidence for the time it was sent in: what was sent before the breaker opened or closed says nothing.
4. Probes count where requests are silent: `failures` of them in a row, without an answered request in between.
5. Half open, one request of a single token is made by the gateway itself (`wants_trial`); no client's request is
   risked. Where a client's request is answered all the same (the whole pool is in use), that is as good.
6. Slow start: one request at a time until one has been answered, then twice as many each tenth of `slow_start_s`.

No clock: `now` is an argument, in seconds. Nothing here does I/O or logs; `Health.changes` says what happened.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from gateway.errors import WORKER_BUSY, DeadlineExceeded
from gateway.records import Ending, Result

FORGET_S: Final = 60.0
"""Failures further apart than this have nothing to do with each other."""

LONGEST_DOUBLINGS: Final = 4
"""The breaker stays open 16 times `open_s` at most: a worker that is repaired is used again within minutes."""

_CALM: Final = 10.0
"""A worker that served for this many times `open_s` since it recovered is ejected as for the first time."""

_RAMP: Final = 10
"""Doublings of a slow start: 1024 requests at once, which is beyond what an engine batches."""

_NO_FAULT: Final = frozenset((WORKER_BUSY, DeadlineExceeded.code))
_NOT_IMPLEMENTED: Final = 501
"""It speaks of the request."""


class WorkerState(StrEnum):
    """Whether a worker may get new requests (see the module)."""

    READY = "ready"
    DEGRADED = "degraded"
    EJECTED = "ejected"
    DRAINING = "draining"
    GONE = "gone"


class Breaker(StrEnum):
    """The state of the breaker alone."""

    CLOSED = "closed"
    HALF_OPEN = "half_open"
    OPEN = "open"


class Evidence(Enum):
    """What the end of a request says of its worker."""

    GOOD = "it answered"
    BAD = "it failed"
    NONE = "nothing"


def evidence_of(ending: Ending) -> Evidence:
    """Rule 1, for a request or for one attempt of it."""
    match ending.result:
        case Result.COMPLETED if ending.status < 400:
            return Evidence.GOOD
        case Result.WORKER_FAILED | Result.TIMED_OUT:
            blameless = ending.error_code in _NO_FAULT or ending.status == _NOT_IMPLEMENTED
            return Evidence.NONE if blameless else Evidence.BAD
        case _:
            return Evidence.NONE


@dataclass(frozen=True, slots=True)
class HealthSettings:
    """`failures` open a breaker for `open_s`; above `panic_ratio` of a pool ejected, all of it is used."""

    failures: int = 5
    open_s: float = 10.0
    slow_start_s: float = 10.0
    panic_ratio: float = 0.5


class Change(NamedTuple):
    """A worker's state changed at `at` (seconds); `reason` is a word for people and logs."""

    at: float
    before: WorkerState
    state: WorkerState
    reason: str | None


class Health:
    """One worker's. `state`, `since` and `reason` are what it is, since when, and why."""

    __slots__ = (
        "_answered",
        "_away",
        "_credit",
        "_failed_at",
        "_failed_why",
        "_period_at",
        "_probes_failed",
        "_recovered_at",
        "_slow",
        "_streak",
        "_suspicious",
        "_until",
        "breaker",
        "changes",
        "draining",
        "limit",
        "past",
        "reason",
        "settings",
        "since",
        "state",
        "trials",
        "watched",
        "withheld",
    )

    def __init__(self, settings: HealthSettings | None = None, now: float = 0.0) -> None:
        self.settings = settings or HealthSettings()
        self.state = WorkerState.READY
        self.since = now
        self.reason: str | None = None
        self.breaker = Breaker.CLOSED
        self.draining = False
        self.withheld: str | None = None
        self.limit: int | None = None
        """New requests it may have at a time in a slow start; None: any number."""
        self.trials = 0
        """Requests sent to it since the slow start began that are not over."""
        self.watched = False
        """Answers are evidence now: there is something they could heal."""
        self.changes: list[Change] = []
        """What happened, oldest first; whoever logs it takes it away."""
        self.past: deque[Change] = deque(maxlen=_KEPT_CHANGES)
        """The same, kept for whoever asks."""
        self._away: str | None = None
        self._period_at = -math.inf
        """When the breaker last opened or closed (rule 3)."""
        self._recovered_at = -math.inf
        self._slow = False
        self._answered = False
        self._credit = 0
        self._suspicious = False
        self._failed_at = -math.inf
        self._failed_why = ""
        self._probes_failed = 0
        self._streak = 0
        self._until = -math.inf

    # ---------------------------------------------------------------- readings

    @property
    def failures(self) -> int:
        """Failures not made good by answers."""
        return self._credit

    @property
    def full(self) -> bool:
        """It has as many requests as a slow start allows."""
        return self.limit is not None and self.trials >= self.limit

    @property
    def wants_trial(self) -> bool:
        """A request of one token should show whether it serves again."""
        return self.breaker is Breaker.HALF_OPEN and self._away is None

    def half_open_in_s(self, now: float) -> float | None:
        """Seconds until its trial; None unless the breaker is open."""
        return max(0.0, self._until - now) if self.breaker is Breaker.OPEN else None

    # ---------------------------------------------------------------- evidence of requests

    def failed(self, now: float, *, sent_at: float, why: str, credited: bool = False, doubtful: bool = False) -> None:
        """A request sent at `sent_at` failed by the worker's fault; `credited`: its first byte counted as an answer.
        `doubtful`: it was not waited for, so it may only have been slow. That alone ejects nobody again who has just
        recovered: with a cold cache and one request at a time it is late by right, and has answered nobody else."""
        if sent_at < self._period_at or self.breaker is Breaker.OPEN:
            return
        if now - self._failed_at > FORGET_S:
            self._credit = 0
        self._failed_at, self._failed_why = now, why
        self._credit += 1 + credited
        on_trial = self.breaker is Breaker.HALF_OPEN or self._slow
        if (on_trial and not doubtful) or self._credit >= self.settings.failures:
            self._open(now, why)
        self._settle(now)

    def answered(self, now: float, *, sent_at: float) -> bool:
        """It answered a request sent at `sent_at`; True when that made good for a failure. To be told when `watched`,
        once a request."""
        if sent_at < self._period_at:
            return False
        self._probes_failed = 0
        credited = False
        if self.breaker is not Breaker.CLOSED:
            self._recover(now)
        elif self._slow:
            self._answered = True
            self._ramp(now)
        if self._credit:
            self._credit -= 1
            credited = True
        self._settle(now)
        return credited

    def sent(self) -> None:
        """A request goes there while `limit` is set."""
        self.trials += 1

    def over(self, *, sent_at: float) -> None:
        """A request sent at `sent_at` is over, however it ended; to be told while `limit` is set."""
        if sent_at >= self._period_at and self.trials:
            self.trials -= 1

    # ---------------------------------------------------------------- evidence of probes

    def probed(self, now: float, *, passed: bool) -> None:
        """The regular probe, which asks for facts and not for tokens."""
        self._probes_failed = 0 if passed else self._probes_failed + 1
        if self._probes_failed >= self.settings.failures and self.breaker is Breaker.CLOSED:
            self._probes_failed = 0
            self._open(now, "probe_failed")
        self._settle(now)

    def tried(self, now: float, *, passed: bool) -> None:
        """The trial that `wants_trial` asked for; without effect when that has been decided meanwhile."""
        if self.breaker is Breaker.HALF_OPEN:
            if passed:
                self._recover(now)
            else:
                self._open(now, "trial_failed")
            self._settle(now)

    # ---------------------------------------------------------------- members and operators

    def leave(self, now: float, reason: str) -> None:
        """Nobody listens at its address, or it leaves the fleet."""
        self._away = reason
        self._settle(now)

    def back(self, now: float) -> None:
        """It answered a probe after it was gone: a new process, so old failures say nothing."""
        if self._away is None:
            return
        self._away = None
        self._credit = self._probes_failed = 0
        if self.breaker is not Breaker.CLOSED:
            self._recover(now)
        self._settle(now)

    def drain(self, now: float, *, on: bool) -> None:
        """An operator wants no new requests there, or wants them again."""
        self.draining = on
        self._settle(now)

    def withhold(self, now: float, reason: str | None) -> None:
        """What runs it wants no new requests there, for that reason (it is not ready, it is about to end), or wants
        them again: None. It is independent of what an operator wants."""
        self.withheld = reason
        self._settle(now)

    def reset(self, now: float) -> None:
        """An operator says that it is well: everything held against it is forgotten, at once and without slow start."""
        self.breaker, self._period_at = Breaker.CLOSED, now
        self._slow, self.limit, self.trials = False, None, 0
        self._credit = self._probes_failed = self._streak = 0
        self._suspicious = False
        self._settle(now)

    # ---------------------------------------------------------------- time

    def tick(self, now: float) -> None:
        """Called about twice a second; needed while `watched`."""
        if self.breaker is Breaker.OPEN and now >= self._until:
            self.breaker = Breaker.HALF_OPEN
        elif self._slow:
            unproven = self.trials and not self._answered
            if now - self._recovered_at >= self.settings.slow_start_s and not unproven:
                self._slow, self.limit, self.trials = False, None, 0
            else:
                self._ramp(now)
        elif self._credit and now - self._failed_at > FORGET_S:
            self._credit = 0
        self._settle(now)

    # ---------------------------------------------------------------- inside

    def _open(self, now: float, why: str) -> None:
        if self.breaker is Breaker.CLOSED and now - self._recovered_at > _CALM * self.settings.open_s:
            self._streak = 0
        self._until = now + self.settings.open_s * 2 ** min(self._streak, LONGEST_DOUBLINGS)
        self._streak += 1
        self.breaker, self._period_at, self._failed_why = Breaker.OPEN, now, why
        self._slow, self.limit, self.trials = False, None, 0
        self._credit = 0

    def _recover(self, now: float) -> None:
        self.breaker, self._period_at, self._recovered_at = Breaker.CLOSED, now, now
        self._slow, self._answered, self.limit, self.trials = True, False, 1, 0
        self._credit = self._probes_failed = 0

    def _ramp(self, now: float) -> None:
        if self._answered:
            share = (now - self._recovered_at) / self.settings.slow_start_s
            self.limit = 2 ** max(1, min(_RAMP, int(share * _RAMP)))

    def _settle(self, now: float) -> None:
        """State and reason follow from the parts."""
        # Suspicion begins at half of what ejects and ends when all is made good, so that it does not flicker.
        if self._credit * 2 > self.settings.failures or self._probes_failed > 1:
            self._suspicious = True
        elif not self._credit and not self._probes_failed:
            self._suspicious = False
        state, reason = WorkerState.READY, None
        if self._away is not None:
            state, reason = WorkerState.GONE, self._away
        elif self.draining or self.withheld is not None:
            state, reason = WorkerState.DRAINING, self.withheld
        elif self.breaker is not Breaker.CLOSED:
            state, reason = WorkerState.EJECTED, self._failed_why
        elif self._slow:
            state, reason = WorkerState.DEGRADED, "slow_start"
        elif self._suspicious:
            state, reason = WorkerState.DEGRADED, "probe_failed" if self._probes_failed else self._failed_why
        self.watched = bool(self._credit or self._probes_failed or self._slow or self.breaker is not Breaker.CLOSED)
        self.reason = reason
        if state is not self.state:
            change = Change(now, self.state, state, reason)
            self.past.append(change)
            self.changes.append(change)
            del self.changes[:-_KEPT_CHANGES]
            self.state, self.since = state, now


_KEPT_CHANGES: Final = 16
"""More than can happen between two looks of whoever logs them."""

BUDGET_WINDOW_S: Final = 10
BUDGET_FLOOR: Final = 10
"""Retries a pool always has in a window: one a second, which overloads nobody and is all that a quiet pool needs."""


class RetryBudget:
    """How many retries a pool may make: `ratio` of the requests of the last ten seconds, and a few more.

    A retry may repeat work: without a bound, a pool whose workers fail for being overloaded gets up to
    1 + `retries.max` times the load that overloads it. Answers 429 and 503 with Retry-After cost a worker nothing, so
    moving on to the next one is not charged. Second copies of late requests are (`edge.hedge`).
    """

    __slots__ = ("_requests", "_retries", "_second", "_sent", "ratio", "refused", "retried")

    def __init__(self, ratio: float = 0.2) -> None:
        self.ratio = ratio
        self._second = 0
        self._sent = [0] * BUDGET_WINDOW_S
        self._retries = [0] * BUDGET_WINDOW_S
        self._requests = 0
        self.retried = 0
        """Retries in the window."""
        self.refused = 0
        """Retries that were refused, ever."""

    def request(self, now: float) -> None:
        """A request was placed for the first time."""
        if int(now) != self._second:
            self._advance(int(now))
        self._sent[self._second % BUDGET_WINDOW_S] += 1
        self._requests += 1

    def allows(self, now: float) -> bool:
        """Whether one more retry may be made; a refusal is counted."""
        if self.has_room(now):
            return True
        self.refused += 1
        return False

    def has_room(self, now: float) -> bool:
        """The same question, uncounted."""
        if int(now) != self._second:
            self._advance(int(now))
        return self.retried + 1 <= BUDGET_FLOOR + self.ratio * self._requests

    def retry(self, now: float) -> None:
        """A request was placed once more."""
        if int(now) != self._second:
            self._advance(int(now))
        self._retries[self._second % BUDGET_WINDOW_S] += 1
        self.retried += 1

    def tick(self, now: float) -> None:
        """Time has passed: brings `retried` up to date where nobody asks."""
        self._advance(int(now))

    def _advance(self, second: int) -> None:
        """The seconds passed since then leave the window."""
        for passed in range(self._second + 1, min(second, self._second + BUDGET_WINDOW_S) + 1):
            at = passed % BUDGET_WINDOW_S
            self._requests -= self._sent[at]
            self.retried -= self._retries[at]
            self._sent[at] = self._retries[at] = 0
        self._second = max(second, self._second)
