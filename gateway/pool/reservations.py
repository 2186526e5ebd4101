"""What is sent to a worker, as records: one request's reservation, the sum of them for other replicas, and what is
observed while they run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

_FLOW_S = 60.0
"""Averaging time of the stored-token rate; a cache turns over in tens of seconds or more."""


@dataclass(slots=True, eq=False)
class Reservation:
    """What one request is expected to cost its worker. `new_tokens` are uncached prompt tokens, `output_tokens` the
    expected answer; both take KV room. `streamed` says that its first byte marks the end of its prefill,
    `wait_s` how long that was expected to wait for others, `adapters` what the worker needs for it."""

    new_tokens: int
    cached_tokens: int
    output_tokens: int
    prefill_s: float
    streamed: bool
    sent_at: float
    wait_s: float = 0.0
    adapters: tuple[str, ...] = ()
    pending: bool = True
    open: bool = True

    @property
    def kv_tokens(self) -> int:
        """Room it takes beyond what was cached."""
        return self.new_tokens + self.output_tokens


class Sent(NamedTuple):
    """What was sent to a worker and is not over, by this replica or by others: open requests, prefill seconds queued
    and those of the head, which is computed since `head_since`, uncached prompt tokens queued; KV room taken (tokens),
    what of it belongs to requests behind the head, and what is for answers. `stored_rate`: tokens a second that went
    into its cache lately. `told_at`: of others, when they last said so."""

    requests: int = 0
    pending_s: float = 0.0
    head_s: float = 0.0
    head_since: float = 0.0
    tokens: int = 0
    kv_tokens: int = 0
    queued_kv: int = 0
    output_tokens: int = 0
    stored_rate: float = 0.0
    told_at: float = 0.0

    def left_s(self, now: float) -> float:
        """Seconds of its queue that are left, by what was told. Estimates run out; that a head is late counts as far as
        it was told: it may have ended, and the word be on its way."""
        if not self.pending_s:
            return 0.0
        ran, head_s = self.told_at - self.head_since, self.head_s
        left_s = self.pending_s + (ran - 2 * head_s if ran > head_s else -ran)
        return max(0.0, left_s - (now - self.told_at))


NOTHING_SENT = Sent()


@dataclass(slots=True)
class Period:
    """A busy period under observation: from an idle worker's first prefill (or the last cut) until now."""

    since: float
    requests: int = 0
    new_tokens: int = 0
    pairs: float = 0.0
    clean: bool = True

    @property
    def work(self) -> tuple[float, float, float]:
        """Requests, new tokens, token pairs that attention looks at."""
        return float(self.requests), float(self.new_tokens), self.pairs

    def add(self, reservation: Reservation) -> None:
        new = reservation.new_tokens
        self.requests += 1
        self.new_tokens += new
        self.pairs += new * (reservation.cached_tokens + new / 2)


@dataclass(slots=True)
class Flow:
    """Exponential average of a rate: amounts per second over about the last `_FLOW_S`."""

    rate: float = 0.0
    at: float = 0.0

    def add(self, amount: float, now: float) -> None:
        self.rate = self.read(now) + amount / _FLOW_S
        self.at = now

    def read(self, now: float) -> float:
        return self.rate * math.exp(-max(0.0, now - self.at) / _FLOW_S)
