"""One worker as the gateway sees it: what we sent it, what it says about itself, and what both mean for a new request.

Rules:
1. A reservation is made when a request is placed, moved once at its first byte, and released once. What is in flight
   is the sum over open reservations, always; nothing else writes these numbers.
2. The attributes the score reads are plain numbers, brought up to date when something changes, not when a request asks.
3. `pending` are requests sent whose prefill is not over, in order of sending. The head is being computed since
   `head_since`; what is ahead of a new request is their estimated seconds less what has run of the head's. A head that
   is late is expected to be as late again: so a worker that hangs becomes dearer with time.
4. A request without a stream shows no first byte when its prefill ends. It counts as prefilled once its estimate has
   run out at the head (`settle_due`).
5. KV room is the last poll plus what we placed and ended since. A poll older than `stale_s` says nothing: then only
   our own reservations count.
6. Requests the worker has beyond ours and those of other replicas are another client's. They are priced at what such a
   request costs here on average, with the hit rate the worker shows, never as cold ones.
7. Speed is learned per *predicted* new token, from busy periods as a whole: what is learned is what the next prediction
   needs, also where the tokens are estimated or the worker shows no cache events.
8. What other replicas have sent there (`others`) counts as ours does: an engine works on one queue, whoever filled it.
   So the wait is over both, and what has run is taken off once. Polls show their requests too, and are corrected for
   them as for ours. A busy period they had a part in says nothing about speed.

It does not decide where requests go, and it takes no clock: `now` is an argument, in seconds.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from gateway.pool.adapters import Adapters
from gateway.pool.evidence import Check
from gateway.pool.health import Health, WorkerState
from gateway.pool.rates import PoolRates, Slowdown
from gateway.pool.regret import REGRET_S, SLOW, forgotten_s
from gateway.pool.reservations import NOTHING_SENT, Flow, Period, Reservation, Sent
from gateway.pool.room import Room
from gateway.pool.silence import Silence
from gateway.pool.trust import Trust
from gateway.records import Finding, LoadSample, Slot, Standing, TrustState, WorkerFacts, WorkerId, WorkerSpec

STALE_S = 5.0
"""Age at which a load sample is forgotten, by default: five polls at the default period."""

FORGET_S = 300.0
"""Value of an idle cached block falls to 1/e over this time; measured on conversation and agent traces."""

_HIT_PRIOR = 0.5
"""Hit rate assumed for other clients' requests until the worker's counters show one."""

_CROWDED = 0.9
"""KV occupancy above which a first byte may have waited for room and says nothing about speed."""

_OVERDUE, _OVERDUE_S = 2.0, 0.5
"""A prefill that has taken this much times its estimate, and this much more, is not what others wait for."""

_LEAST_WEIGHT = 1e-3

_PERIOD_REQUESTS = 8
"""A busy period is closed for learning after this many prefills, so that a worker that never idles is learned too."""

_OFF = 2.0
"""It is closed early after this much times its estimate and that of what waits (engines compute several at once)."""


@dataclass(slots=True, eq=False)
class Worker:
    """State of one worker. Made and changed by the fleet and the leases; everybody else reads."""

    id: WorkerId
    slot: Slot
    spec: WorkerSpec
    facts: WorkerFacts
    rates: PoolRates
    block_size: int
    added_at: float
    stale_s: float = STALE_S
    health: Health = field(default_factory=Health)

    inflight_requests: int = 0
    inflight_tokens: int = 0
    """Uncached prompt tokens of pending requests."""
    picked: int = 0
    """Number of the fleet's last decision that chose this worker; 0 = never."""

    # What the score reads (`gateway.policy.Load`).
    pending_s: float = 0.0
    head_s: float = 0.0
    head_since: float = 0.0
    slowdown: float = 1.0
    foreign_s: float = 0.0
    foreign_since: float = 0.0
    foreign_requests: float = 0.0
    kv_tokens: int = 0
    kv_capacity: int = 0
    unindexed_tokens: int = 0
    evict_discount: float = 0.0
    idle_since_s: float = 0.0
    regret_s: float = 0.0
    standing: Standing = field(init=False)
    """Those that a decision in seconds reads, together (`records.Standing`)."""
    trust: float = 1.0
    weight: float = 1.0

    load: LoadSample | None = None
    loaded_at: float | None = None
    hit_rate: float = _HIT_PRIOR
    """Share of prompt tokens found in its cache, from its own counters."""
    speed: Slowdown = field(default_factory=Slowdown)
    belief: Trust = field(default_factory=Trust)
    """What `trust` is made of."""
    others: Sent = NOTHING_SENT
    """What the other replicas have sent, all together."""
    room: Room = field(default_factory=Room)
    adapters: Adapters = field(default_factory=Adapters)

    _silence: Silence = field(default_factory=Silence)
    _own_s: float = 0.0
    _own_head_s: float = 0.0
    _own_since: float = 0.0
    _beyond: float = 0.0
    _beyond_s: float = 0.0
    _beyond_at: float = 0.0
    """When other clients were seen to have so much prefill queued."""
    _others_polled_kv: int = 0
    """KV room of other replicas' requests at the last poll."""
    _pending: OrderedDict[int, Reservation] = field(default_factory=OrderedDict)
    _period: Period | None = None
    _open_kv: int = 0
    _open_output: int = 0
    _polled_kv: int | None = None
    _foreign_seen: float = 0.0
    _stored: Flow = field(default_factory=Flow)

    def __post_init__(self) -> None:
        self.idle_since_s = self.rates.waited_s
        self.rates.settled_s = self.rates.waited_s  # it could not have helped with what was waited for before
        self.respec(self.spec)
        self._fit_capacity()
        self._stand()

    @property
    def state(self) -> WorkerState:
        """Whether it may get new requests."""
        return self.health.state

    @property
    def state_since(self) -> float:
        """When that changed last."""
        return self.health.since

    @property
    def reason(self) -> str | None:
        """Why it is not ready, for people."""
        return self.health.reason

    @property
    def full(self) -> bool:
        """It has as many requests as it should have."""
        limit = self.room.limit
        return limit is not None and self.inflight_requests + self.foreign_requests >= limit

    def wait_s(self, now: float) -> float:
        """Estimated seconds until a new request's prefill could start here: the `wait` of the score, which has the same
        arithmetic in its loop."""
        wait = 0.0
        if self.pending_s:
            ran, head_s = now - self.head_since, self.head_s
            wait = self.pending_s + (ran - 2 * head_s if ran > head_s else -ran)
        if self.foreign_s:
            wait += max(0.0, self.foreign_s - (now - self.foreign_since))
        return wait

    def wait_falls_for_s(self, now: float) -> float:
        """For how long that will go on falling by itself; afterwards something has to happen first."""
        head = self.head_s - (now - self.head_since) if self.pending_s else 0.0
        return max(head, self.foreign_s - (now - self.foreign_since), 0.0)

    # ---------------------------------------------------------------- reservations

    @property
    def pending(self) -> int:
        """Requests sent whose prefill is not over."""
        return len(self._pending)

    def reserve(self, reservation: Reservation, now: float) -> None:
        """Counts a request as sent."""
        self.settle_due(now)
        if not self._pending:
            self._lead(reservation, now)
            self._period = Period(now)
        period = self._period
        if period is not None and (not reservation.streamed or self._disturbed or self.crowds(reservation.kv_tokens)):
            period.clean = False
        self._pending[id(reservation)] = reservation
        self.inflight_requests += 1
        self.inflight_tokens += reservation.new_tokens
        self._own_s += reservation.prefill_s
        if reservation.adapters:
            self.adapters.use(reservation.adapters)
        self._sum_waits(now)
        self._open_kv += reservation.kv_tokens
        self._open_output += reservation.output_tokens
        if self._polled_kv is not None:
            self._polled_kv += reservation.kv_tokens
        self._refresh(now)

    def crowds(self, kv_tokens: int) -> bool:
        """Whether a request that takes this much KV room might have to wait for it."""
        return bool(self.kv_capacity) and self.kv_tokens + kv_tokens > _CROWDED * self.kv_capacity

    def overtaken(self, reservation: Reservation, now: float) -> bool:
        """Another worker has answered this late request, which is about to be released. What it took so far is evidence
        for its speed where that is clean, as a first byte would be. True when that makes a failure (`pool.silence`)."""
        period = self._period
        if period is not None and period.clean and reservation.pending and len(self._pending) == 1:
            took_s = now - self._own_since
            self.rates.learn_late(reservation.new_tokens, reservation.cached_tokens, took_s, self.speed)
            self.relearn()
        return self._silence.overtaken(reservation.sent_at, now)

    def heard(self, now: float) -> None:
        """It has answered somebody, or is in the middle of it: it is not silent."""
        self._silence.answered(now)

    def first_byte(self, reservation: Reservation, now: float) -> None:
        """The prefill of this request is over. Later calls, and calls after the release, change nothing."""
        self._silence.answered(now)
        if not reservation.pending:
            return
        period = self._period
        if period is not None:
            period.add(reservation)
            if not reservation.streamed:
                period.clean = False
        self._prefilled(reservation, now)
        if period is not None and (
            not self._pending
            or period.requests >= _PERIOD_REQUESTS
            or now - period.since > _OFF * (self._own_s + self.slowdown * self.rates.work_s(period.work))
        ):
            self._learn(period, now)
            self._period = self._next_period(now) if self._pending else None

    def release(self, reservation: Reservation, now: float) -> None:
        """The request is over, however it ended. Later calls change nothing."""
        if not reservation.open:
            return
        reservation.open = False
        if reservation.pending:
            self._leave(reservation, now)
            if self._period is not None:
                self._period.clean = False
            if not self._pending:
                self._period = None
        else:
            self._stored.add(reservation.output_tokens, now)
        self.inflight_requests -= 1
        self._open_kv -= reservation.kv_tokens
        self._open_output -= reservation.output_tokens
        if self._polled_kv is not None:
            self._polled_kv = max(0, self._polled_kv - reservation.kv_tokens)
        self._refresh(now)

    def settle_due(self, now: float) -> None:
        """Requests without a stream leave the head of the queue when their estimated prefill has run out."""
        while self._pending:
            head = next(iter(self._pending.values()))
            ends = self._own_since + head.prefill_s
            if head.streamed or ends > now:
                return
            self._prefilled(head, ends)
            if self._period is not None:
                self._period.clean = False  # it took time that nobody saw end
            if not self._pending:
                self._period = None

    def _prefilled(self, reservation: Reservation, now: float) -> None:
        self.rates.waited_s += reservation.wait_s
        self._leave(reservation, now)
        self._stored.add(reservation.new_tokens, now)
        self._refresh(now)

    def _leave(self, reservation: Reservation, now: float) -> None:
        """Out of the pending queue; the next one leads from now on when this was the head."""
        reservation.pending = False
        pending = self._pending
        led = next(iter(pending.values())) is reservation
        del pending[id(reservation)]
        self.inflight_tokens -= reservation.new_tokens
        if not pending:
            self.idle_since_s = self.rates.waited_s
            self._own_s = self._own_head_s = 0.0
        else:
            self._own_s = max(0.0, self._own_s - reservation.prefill_s)
            if led:
                self._lead(next(iter(pending.values())), now)
        self._sum_waits(now)

    def _lead(self, reservation: Reservation, now: float) -> None:
        self._own_head_s = reservation.prefill_s
        self._own_since = now

    def _sum_waits(self, now: float) -> None:
        """What is queued here, by anybody. The engine began what it computes now when the last prefill ended that any
        replica saw; the longest head may be the one. What others alone have queued runs out as foreign work does."""
        self.pending_s, self.head_s, self.head_since = self._own_s, self._own_head_s, self._own_since
        left_s, others = max(0.0, self._beyond_s - (now - self._beyond_at)), self.others
        if others.pending_s and self._pending:
            self.pending_s += others.pending_s
            self.head_s = max(self.head_s, others.head_s)
            self.head_since = max(self.head_since, others.head_since)
        elif others.pending_s:
            left_s += others.left_s(now)
        self.foreign_s, self.foreign_since = left_s, now

    @property
    def _disturbed(self) -> bool:
        """Others' prefills stand in the queue too."""
        return self._beyond_s > 0.0 or self.others.pending_s > 0.0

    # ---------------------------------------------------------------- other replicas

    def sent(self, now: float) -> Sent:
        """What this replica has sent, for the others."""
        self.settle_due(now)
        return Sent(
            self.inflight_requests, self._own_s, self._own_head_s, self._own_since, self.inflight_tokens,
            self._open_kv, self._queued_kv(), self._open_output, self._stored.read(now),
        )  # fmt: skip

    def share(self, others: Sent, now: float) -> None:
        """What the other replicas have sent has changed."""
        if self.others.pending_s and not others.pending_s:
            self.idle_since_s = self.rates.waited_s
        self.others = others
        if others.pending_s and self._period is not None:
            self._period.clean = False
        self.foreign_requests = self._beyond + others.requests
        self._sum_waits(now)
        self._refresh(now)

    def _queued_kv(self) -> int:
        """Room that our requests behind the head will take."""
        return sum(waiting.kv_tokens for waiting in list(self._pending.values())[1:])

    def _next_period(self, now: float) -> Period:
        """A period that begins while others wait: clean when none of what makes one unclean is there already."""
        return Period(now, clean=not (self.crowds(0) or self._disturbed))

    def _learn(self, period: Period, now: float) -> None:
        if period.clean:
            self.rates.learn_prefill(period.work, now - period.since, self.speed)
            self.relearn()

    def relearn(self) -> None:
        """Its speed is known better, or from elsewhere."""
        self.slowdown = self.speed.value
        self.regret_s = self.regret_s if self.slowdown > SLOW else 0.0
        self._stand()

    def owe(self, seconds: float) -> None:
        """So much more (or less) has been lost by leaving prefixes here, see `pool.regret`."""
        self.regret_s = min(max(0.0, self.regret_s + seconds), REGRET_S)
        self.rates.regretted |= self.regret_s > 0.0
        self.relearn()

    # ---------------------------------------------------------------- how far its index is believed

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What probing and requests have found about it."""
        return self.facts.findings + self.belief.findings()

    def check(self, check: Check, now: float) -> None:
        """A request has ended that tests what the index says of this worker."""
        self.belief.observe(check, now)
        self.trust = self.belief.factor

    def follow(self, feed: TrustState, now: float) -> None:
        """The worst state among its event feeds."""
        self.belief.follow(feed, now)
        self.trust = self.belief.factor

    # ---------------------------------------------------------------- what it says about itself

    def observe(self, sample: LoadSample, now: float) -> None:
        """One poll of its load. A sample replaces what was estimated since the one before."""
        self.settle_due(now)
        before = self.load
        self.load, self.loaded_at = sample, now
        if sample.kv_blocks is not None:
            self._fit_capacity()
        if self.kv_capacity:
            self._polled_kv = self._said_kv(sample)
            self._others_polled_kv = self.others.kv_tokens
        if before is not None:
            self._observe_hits(before, sample)
        self.adapters.observe(sample)
        self._observe_foreign(sample, now)
        late = self.pending_s > 0.0 and now - self.head_since > _OVERDUE * self.head_s + _OVERDUE_S
        explained = not late and sample.waiting <= len(self._pending) + self.others.requests
        self.room.observe(sample, inflight=self.inflight_requests + self.foreign_requests, explained=explained)
        self._refresh(now)

    def _said_kv(self, sample: LoadSample) -> int | None:
        """Tokens of KV room that are taken, those of requests which wait included."""
        if sample.kv_usage is not None:
            queued = self._queued_kv() + self.others.queued_kv
            return int(min(max(sample.kv_usage, 0.0), 1.0) * self.kv_capacity) + queued
        return None if sample.kv_tokens is None else max(0, sample.kv_tokens)

    def _observe_hits(self, before: LoadSample, sample: LoadSample) -> None:
        if None in (before.prefix_queries, before.prefix_hits, sample.prefix_queries, sample.prefix_hits):
            return
        queries = (sample.prefix_queries or 0.0) - (before.prefix_queries or 0.0)
        hits = (sample.prefix_hits or 0.0) - (before.prefix_hits or 0.0)
        if queries > 0.0 and 0.0 <= hits <= queries:
            self.hit_rate += 0.1 * (hits / queries - self.hit_rate)

    def _observe_foreign(self, sample: LoadSample, now: float) -> None:
        """Work beyond ours, believed once two polls in a row show it: one poll may catch a request between its end on
        the worker and its end here."""
        known = self.inflight_requests + self.others.requests
        beyond = max(0.0, sample.running + sample.waiting - known)
        self._beyond = min(beyond, self._foreign_seen)
        self._foreign_seen = beyond
        self.foreign_requests = self._beyond + self.others.requests
        queued = min(self._beyond, sample.waiting)
        self._beyond_at, self._beyond_s = now, 0.0
        if queued:
            if self._period is not None:
                self._period.clean = False
            prompt = int(self.rates.prompt_tokens)
            cached = int(prompt * self.hit_rate)
            self._beyond_s = queued * self.slowdown * self.rates.prefill_s(prompt - cached, cached)
        self._sum_waits(now)

    def tick(self, now: float) -> None:
        """Called about twice a second: old samples are forgotten, estimates that depend on time are renewed."""
        self.settle_due(now)
        if self.loaded_at is not None and now - self.loaded_at > self.stale_s:
            self.load = self.loaded_at = self._polled_kv = None
            self._beyond = self._beyond_s = self._foreign_seen = 0.0
            self.foreign_requests = float(self.others.requests)
            self._sum_waits(now)
            self.room.forget()
        self.belief.tick(now)
        self.trust = self.belief.factor
        if self.slowdown > 1.0:
            self.speed.tick()
            self.owe(forgotten_s(self.regret_s))
        self._refresh(now)

    def _fit_capacity(self) -> None:
        blocks = self.load.kv_blocks if self.load is not None and self.load.kv_blocks else self.facts.kv_blocks
        self.kv_capacity = (self.spec.kv_blocks or blocks or 0) * self.block_size

    def respec(self, spec: WorkerSpec) -> None:
        """It was configured anew. A weight of 0 means: only when nobody else is there."""
        self.spec = spec
        self.weight = max(spec.weight, _LEAST_WEIGHT)

    def refit(self, facts: WorkerFacts, block_size: int) -> None:
        """What probing found has changed."""
        self.facts = facts
        self.block_size = block_size
        self._fit_capacity()
        self._stand()

    def _refresh(self, now: float) -> None:
        """Brings the derived numbers up to date.

        The idle age of the next victim is taken from turnover: idle cached tokens / tokens stored per second
        (Little's law; exact for a cache whose blocks are used once, too old by the time blocks were in use otherwise).
        """
        others = self.others
        if self._polled_kv is None:
            self.kv_tokens = self._open_kv + others.kv_tokens
        else:
            self.kv_tokens = max(0, self._polled_kv + others.kv_tokens - self._others_polled_kv)
        self.unindexed_tokens = self.inflight_tokens + self._open_output + others.tokens + others.output_tokens
        if self.kv_capacity:
            idle = max(0, self.kv_capacity - self.kv_tokens)
            flow = self._stored.read(now) + others.stored_rate
            self.evict_discount = math.exp(-idle / (flow * FORGET_S)) if flow > 0.0 else 0.0
        self._stand()

    def _stand(self) -> None:
        """To be called when one of these has changed."""
        self.standing = (
            self.slowdown, self.pending_s, self.head_s, self.head_since, self.foreign_s, self.foreign_since,
            self.inflight_requests + self.foreign_requests, self.regret_s, self.kv_tokens, self.kv_capacity,
            self.unindexed_tokens, self.evict_discount, self.idle_since_s,
        )  # fmt: skip
