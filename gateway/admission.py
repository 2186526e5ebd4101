"""When a request gets its worker: at once, or after a wait at the gateway.

A request that its worker cannot start waits there behind others, and nothing can be changed any more. Here it waits
where the choice is still open: it goes when a worker can start it, to the worker that is the best then, in the order
of `pool.line`. It may wait for the worker that holds its prefix while another is free: when that is the faster.

Rules:
1. A request is placed at once when nobody waits in its pool, the best worker's wait is at most `hold_s`, and a worker
   has room. That costs two comparisons. All others get a ticket.
2. For waits, requests are held only when the policy thinks in seconds and the pool's speeds have been learned; for
   room, always. Before speeds are learned a wait is a guess, and holding would make every fleet as slow as the guess.
3. Deciding, reserving and telling the waiter is one synchronous step. A ticket is told once: its lease, or an error, be
   it a bug in placing it; a cancelled one is told nothing and leaves nothing behind.
4. `pump` lets go whoever may go. Who calls it is outside: `wake` asks for a call soon, its result says when to call at
   the latest. While anybody waits that is within `_LOOK_AGAIN_S`, so a worker that joins, a poll, a change of state
   needs no word of its own.
5. The work of a pump is bounded: `_SCAN` tickets a pool. Those are compared by the costs of their last look with the
   waits and the room of now; only one that seems to have its place, or whose look is old, is looked at in full. When
   that would take more than `_STEP`, as after a change of the ready workers, the pump ends there and is to be called
   again at once: nobody behind the ticket it has come to is placed before that one has been looked at.
6. Attempts after a failed worker do not come here: they have waited already.

No clock, no I/O: `now` is an argument, in seconds.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import add
from typing import Protocol

from gateway.errors import DeadlineExceeded, GatewayError, NoWorker, QueueFull, QueueTimeout
from gateway.leases import Lease
from gateway.pool import Line, Pool, PriorityClass, Worker
from gateway.records import Endpoint, InferenceRequest, PrefixBlocks
from gateway.router import Choice, Router

_SCAN = 64
"""Tickets looked at in one pump of a pool; measured: 16 cost a few per cent of the mean time to first token."""

_STEP, _LOOK = 3000, 100
"""What a step may cost, and a look beside one for each ready worker; measured: 0.5 us each, so 1.5 ms."""

_ROUNDING_S = 1e-6
"""Costs closer than this are the same: taking a wait off and adding it again is not exact."""

_LOOK_AGAIN_S = 0.1
_STALE_S = 1.0
"""Age of a look whose costs are not compared any more: caches have changed."""

_SOONEST_S = 0.002
"""Between two pumps that only time asks for."""

_RETRY_AFTER_S = (1.0, 600.0)
"""Bounds of what a client is told."""

_NO_WORK = frozenset({Endpoint.TOKENIZE, Endpoint.DETOKENIZE})
"""Not held: nothing that these ask for is scarce."""


@dataclass(frozen=True, slots=True)
class AdmissionSettings:
    """`hold_s`: a request is not given to a worker that is busy for longer (0: only for want of room). A pool's line
    holds `queue_size` requests, each for at most `queue_timeout_s`."""

    hold_s: float = 0.2
    queue_size: int = 1000
    queue_timeout_s: float = 60.0


class WaitsFor(StrEnum):
    """Why a request is not placed at once: others wait already, no worker it may have has room, or its best worker is
    busy for longer than requests are held for."""

    QUEUE = "queue"
    ROOM = "room"
    WAIT = "wait"


class Waiter(Protocol):
    """Whoever waits with a ticket. Called synchronously, once."""

    def placed(self, lease: Lease) -> None:
        """Its worker is reserved; from now on the lease is the waiter's."""

    def refused(self, error: Exception) -> None:
        """It waits no longer. No GatewayError: a bug."""


@dataclass(slots=True, eq=False)
class Ticket:
    """A request that waits. `until` is when its wait ends, and `late` says how."""

    request: InferenceRequest
    blocks: PrefixBlocks
    waiter: Waiter
    pool: str
    tenant: str
    priority: PriorityClass
    arrived_at: float
    until: float
    deadline: bool
    """What passes at `until` is the request's own time, not the longest wait."""
    own_s: float = 0.0
    waits: bool = True
    # The last look: costs without the wait for the workers that were candidates while `ready` was the pool's, the one
    # it chose, and how much dearer than the cheapest that may be and be its choice.
    looked_at: float = -math.inf
    ready: Sequence[Worker] = ()
    candidates: Sequence[Worker] = ()
    costs: Sequence[float] = ()
    at: int = 0
    equal: float = 0.0


class Admission:
    """One for a process, above its router. `wake` is called when `pump` should run soon; it must not call it itself."""

    def __init__(self, router: Router, wake: Callable[[], None], *, settings: AdmissionSettings | None = None) -> None:
        self.settings = settings or AdmissionSettings()
        self.held = 0
        """Tickets that wait, in all pools."""
        self._shed: dict[str, Counter[str]] = {}
        self._router = router
        self._wake = wake
        self._lines: dict[str, Line[Ticket]] = {}
        self._deadlines: list[tuple[float, int, Ticket]] = []
        self._tickets = 0
        self._left = 0
        """Of the present step, see rule 5; negative: it was cut short."""
        router.on_room(self._room)

    def apply(self, settings: AdmissionSettings) -> None:
        """From now on these. Whoever waits goes on waiting as long as it was to, and keeps its place."""
        self.settings = settings
        for line in self._lines.values():
            line.size = settings.queue_size
        self._room()

    # ---------------------------------------------------------------- asking

    def admit(
        self, request: InferenceRequest, blocks: PrefixBlocks, now: float, *, until: float, waiter: Waiter
    ) -> Ticket | None:
        """Place it, now or later: `waiter` is told. Returns the ticket while it waits, None when it has been told. The
        request is to be over at `until`.

        Raises what `Router.route` raises, and QueueFull.
        """
        choice = self._router.consider(request, blocks, now)
        pool = choice.pool
        if self.waits_for(request, choice) is None:
            waiter.placed(self._router.reserve(choice, request, blocks, now))
            return None
        ticket = self._ticket(choice, request, blocks, now, until, waiter)
        line = self._lines.get(pool.name)
        if line is None:
            line = self._lines[pool.name] = Line(self.settings.queue_size)
        if len(line) >= line.size:
            rival = line.rival(ticket)
            error = self._full(pool.name, line, now)
            if rival is None:
                self._count(pool.name, error)
                raise error
            self._refuse(line, rival, error)
        line.add(ticket, now)
        self.held += 1
        self._enter_deadline(ticket)
        # It may be the one that an idle worker has been waiting for.
        self._left = _STEP
        try:
            self._advance(pool, line, now)
        except Exception:
            self.cancel(ticket)  # its caller ends the request: nobody would take its place
            raise
        if ticket.waits or self._left < 0:
            self._wake()
        return ticket if ticket.waits else None

    def at_once(self, request: InferenceRequest, blocks: PrefixBlocks, now: float) -> Lease | None:
        """Place it if it need not wait; None: it would have to. For work that is not worth anybody's waiting.

        Raises what `Router.route` raises.
        """
        choice = self._router.consider(request, blocks, now)
        if self.waits_for(request, choice) is not None:
            return None
        return self._router.reserve(choice, request, blocks, now)

    def waits_for(self, request: InferenceRequest, choice: Choice) -> WaitsFor | None:
        """What a request would wait for, were it admitted now; None: it would be placed at once."""
        if request.endpoint in _NO_WORK:
            return None
        if self.held and self._waiting(choice.pool.name):
            return WaitsFor.QUEUE
        if choice.worker.full:
            return WaitsFor.ROOM
        busy = choice.wait_s > self.settings.hold_s and self._holds(choice.pool)
        return WaitsFor.WAIT if busy else None

    def cancel(self, ticket: Ticket) -> None:
        """Nobody waits with it any more; one that has been told is ignored."""
        if ticket.waits:
            self._lines[ticket.pool].remove(ticket)
            self._told(ticket)

    def pump(self, now: float) -> float | None:
        """Let go whoever may go, and end waits that have lasted too long. Returns when to call again at the latest,
        `now` when that was only a part of them; None when nobody waits."""
        self._expire(now)
        self._left = _STEP
        next_at = math.inf
        for name, line in list(self._lines.items()):
            pool = self._router.fleet.pools.get(name)
            if pool is None or not pool.ready:
                self._nobody_ready(name, line)
            if pool is None:
                del self._lines[name]
                self._shed.pop(name, None)
            elif line:
                self._advance(pool, line, now)
                if line:
                    next_at = min(next_at, self._opens_at(pool, now))
        # In turn: pools share workers, and the first one looked at has the best choice.
        if len(self._lines) > 1:
            first = next(iter(self._lines))
            self._lines[first] = self._lines.pop(first)
        if not self.held:
            return None
        if self._left < 0:
            return now
        return max(now + _SOONEST_S, min(next_at, now + _LOOK_AGAIN_S, self._deadlines[0][0]))

    def depth(self, pool: str) -> dict[PriorityClass, int]:
        """How many wait in a pool, by class."""
        line = self._lines.get(pool)
        return {rank: 0 if line is None else line.depth(rank) for rank in PriorityClass}

    def tenants(self, pool: str) -> dict[str, int]:
        """How many of each tenant wait in a pool; "" without one."""
        line = self._lines.get(pool)
        return {} if line is None else line.tenants()

    def drain_s(self, pool: str, now: float) -> float:
        """Seconds until those that wait in a pool now have been placed."""
        line, found = self._lines.get(pool), self._router.fleet.pools.get(pool)
        return 0.0 if line is None else line.drain_s(now, workers=1 if found is None else len(found.ready))

    def shed_of(self, pool: str) -> dict[str, int]:
        """Requests of a pool sent away since the start, by code of the error."""
        return dict(self._shed.get(pool, ()))

    # ---------------------------------------------------------------- who may go

    def _room(self) -> None:
        if self.held:
            self._wake()

    def _waiting(self, pool: str) -> bool:
        line = self._lines.get(pool)
        return line is not None and len(line) > 0

    def _holds(self, pool: Pool) -> bool:
        """Rule 2: requests are held because of waits."""
        return self.settings.hold_s > 0.0 and self._router.policy.wait_weight > 0.0 and pool.rates.warm

    def _advance(self, pool: Pool, line: Line[Ticket], now: float) -> None:
        """Places whoever may go."""
        for worker in pool.ready:
            worker.settle_due(now)
        passed: set[int] = set()
        while line and pool.ready and not pool.saturated:
            found = self._next(pool, line, passed, now)
            if found is None:
                return
            ticket, choice = found
            line.served(ticket, choice.new_tokens, now)
            self._told(ticket)
            try:
                lease = self._router.reserve(choice, ticket.request, ticket.blocks, now)
            except Exception as bug:  # noqa: BLE001  it is told, and the others that wait go on
                ticket.waiter.refused(bug)
            else:
                ticket.waiter.placed(lease)

    def _next(self, pool: Pool, line: Line[Ticket], passed: set[int], now: float) -> tuple[Ticket, Choice] | None:
        """The first ticket whose best worker can take it, and that decision. `passed` are those that have none."""
        hold_s = self.settings.hold_s if self._holds(pool) else math.inf
        ready, weight = pool.ready, self._router.policy.wait_weight
        waits = [worker.wait_s(now) for worker in ready]
        if min(waits) > hold_s:
            return None
        weighed = [weight * wait for wait in waits]
        found: tuple[Ticket, Choice] | None = None
        looked: list[tuple[Ticket, float]] = []
        failed: list[tuple[Ticket, GatewayError]] = []
        for ticket in line.in_order(_SCAN):
            if id(ticket) in passed:
                continue
            if ticket.ready is ready and now - ticket.looked_at < _STALE_S:
                best, wait_s = self._seems(ticket, ready, waits, weighed, now)
                if wait_s > hold_s or best.full:
                    passed.add(id(ticket))
                    continue
            if self._left <= 0:
                self._left = -1
                break
            self._left = max(0, self._left - _LOOK - len(ready))
            try:
                choice = self._router.consider(ticket.request, ticket.blocks, now)
            except GatewayError as error:
                failed.append((ticket, error))
                continue
            self._keep(ticket, choice, now)
            looked.append((ticket, choice.own_s))
            if choice.wait_s <= hold_s and not choice.worker.full:
                found = ticket, choice
                break
            passed.add(id(ticket))
        for ticket, own_s in looked:
            line.resize(ticket, own_s)
        for ticket, fault in failed:
            self._refuse(line, ticket, fault)
        return found

    def _seems(
        self, ticket: Ticket, ready: Sequence[Worker], waits: list[float], weighed: list[float], now: float
    ) -> tuple[Worker, float]:
        """The worker it would be given by the costs of the last look, and its wait. Between equals the last look has
        decided: told otherwise, a ticket that got no place would be looked at again and again."""
        candidates = ticket.candidates
        if candidates is not ready:
            weight = self._router.policy.wait_weight
            waits = [worker.wait_s(now) for worker in candidates]
            weighed = [weight * wait for wait in waits]
        costs = list(map(add, ticket.costs, weighed))
        lowest = min(costs)
        at = ticket.at if costs[ticket.at] <= lowest + ticket.equal else costs.index(lowest)
        return candidates[at], waits[at]

    def _keep(self, ticket: Ticket, choice: Choice, now: float) -> None:
        """What this look has found."""
        weight, costs = self._router.policy.wait_weight, choice.scores.costs
        ticket.looked_at = now
        ticket.ready, ticket.candidates = choice.pool.ready, choice.candidates
        ticket.at, ticket.equal = choice.at, costs[choice.at] - min(costs) + _ROUNDING_S
        ticket.costs = [
            cost - weight * worker.wait_s(now) for cost, worker in zip(costs, choice.candidates, strict=True)
        ]

    def _opens_at(self, pool: Pool, now: float) -> float:
        """When the wait for one of its workers falls to what requests are not held for, if nothing happens."""
        if not self._holds(pool):
            return math.inf
        opens_at = math.inf
        for worker in pool.ready:
            falls_s = worker.wait_falls_for_s(now)
            if falls_s > 0.0 and (over_s := worker.wait_s(now) - self.settings.hold_s) > 0.0:
                opens_at = min(opens_at, now + min(over_s, falls_s))
        return opens_at

    # ---------------------------------------------------------------- tickets

    def _ticket(
        self,
        choice: Choice,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        now: float,
        until: float,
        waiter: Waiter,
    ) -> Ticket:
        longest = now + self.settings.queue_timeout_s
        ticket = Ticket(
            request,
            blocks,
            waiter,
            pool=choice.pool.name,
            tenant=request.tenant or "",
            priority=PriorityClass.of(request.priority),
            arrived_at=now,
            until=min(longest, until),
            deadline=until <= longest,
            own_s=choice.own_s,
        )
        self._keep(ticket, choice, now)
        return ticket

    def _enter_deadline(self, ticket: Ticket) -> None:
        self._tickets += 1
        heapq.heappush(self._deadlines, (ticket.until, self._tickets, ticket))
        if len(self._deadlines) > 2 * self.held + _SCAN:
            self._deadlines = [entry for entry in self._deadlines if entry[2].waits]
            heapq.heapify(self._deadlines)

    def _expire(self, now: float) -> None:
        deadlines = self._deadlines
        while deadlines and (not deadlines[0][2].waits or deadlines[0][0] <= now):
            ticket = heapq.heappop(deadlines)[2]
            if ticket.waits:
                line = self._lines[ticket.pool]
                self._refuse(
                    line, ticket, DeadlineExceeded.passed() if ticket.deadline else self._late(ticket.pool, now)
                )

    def _nobody_ready(self, name: str, line: Line[Ticket]) -> None:
        for ticket in list(line):
            self._refuse(line, ticket, NoWorker.ready(name))

    def _refuse(self, line: Line[Ticket], ticket: Ticket, error: GatewayError) -> None:
        line.remove(ticket)
        self._told(ticket)
        self._count(ticket.pool, error)
        ticket.waiter.refused(error)

    def _told(self, ticket: Ticket) -> None:
        ticket.waits = False
        self.held -= 1
        if not self.held:
            self._deadlines.clear()  # nobody pumps any more: prompts would stay until somebody waits again

    # ---------------------------------------------------------------- what clients are told

    def _full(self, pool: str, line: Line[Ticket], now: float) -> QueueFull:
        return QueueFull(
            f"{len(line)} requests for model {pool!r} wait already, which is as many as may",
            retry_after_s=self._retry_after_s(pool, now),
        )

    def _late(self, pool: str, now: float) -> QueueTimeout:
        return QueueTimeout(
            f"no worker of model {pool!r} had room within {self.settings.queue_timeout_s:g} s",
            retry_after_s=self._retry_after_s(pool, now),
        )

    def _retry_after_s(self, pool: str, now: float) -> float:
        return min(max(self.drain_s(pool, now), _RETRY_AFTER_S[0]), _RETRY_AFTER_S[1])

    def _count(self, pool: str, error: GatewayError) -> None:
        self._shed.setdefault(pool, Counter())[error.code] += 1
