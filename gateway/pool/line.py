"""The requests of one pool that wait for a worker, and whose turn it is.

Rules:
1. Classes first: `high` before `normal` before `low`. A request waits only for its own class and those above.
2. Within a class the tenant that has been served the fewest tokens is next. One that comes anew starts where the others
   stand, so that time away gives no claim, and one that was served more than its share is remembered until the others
   have caught up (start-time fair queuing, Goyal, Vin and Cheng, 1996: while two tenants both wait, what they are
   served differs by at most one request of each).
3. Within a tenant the shortest is next, with ageing: a second of waiting counts as `AGEING` seconds of work less. The
   order of two requests never changes with time, so it is kept sorted.
4. A line has a bound. When it is full, a newcomer takes the place of the last of a lower class, or of a tenant of its
   class that has more requests in it than the newcomer's would have then; else it is refused.

It knows no workers and no clock: a ticket is something with an order and a size.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Generic, Protocol, TypeVar

AGEING = 0.1
"""Measured on real traces (`docs/concepts/score.md`): 0.05 to 0.3 are alike; at 0 long prompts starve in overload."""

_DRAIN_S = 10.0
"""Averaging time of the rate at which work leaves a line."""

_SHOWS_S = 2.0
"""A line younger than this says nothing about its rate."""


class PriorityClass(StrEnum):
    """What a request's `priority` comes to: engines take any number, here there are three places to queue up."""

    HIGH = "high"
    NORMAL = "normal"
    LOW = "low"

    @classmethod
    def of(cls, priority: int) -> PriorityClass:
        """As in vLLM, lower is sooner and 0 is usual."""
        return cls.NORMAL if priority == 0 else cls.HIGH if priority < 0 else cls.LOW


class Waiting(Protocol):
    """One request in a line. `own_s` is its own prefill in seconds, as far as that is known; the line renews it."""

    own_s: float

    @property
    def tenant(self) -> str: ...
    @property
    def priority(self) -> PriorityClass: ...
    @property
    def arrived_at(self) -> float: ...


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True, order=True)
class _Place(Generic[T]):
    key: float
    number: int
    """Orders equals by arrival."""
    ticket: T = field(compare=False)


@dataclass(slots=True, eq=False)
class _Lane(Generic[T]):
    """The requests of one tenant in one class, in their order."""

    start: float
    """Tokens served, on the scale of the class."""
    places: list[_Place[T]] = field(default_factory=list)


class _Rank(Generic[T]):
    """One class."""

    __slots__ = ("lanes", "stand")

    def __init__(self) -> None:
        self.lanes: dict[str, _Lane[T]] = {}
        self.stand = 0.0
        """Where the tenant stood that was served last: a newcomer starts here."""

    def forget(self) -> None:
        """Tenants with nothing here whose being ahead the others have made up for."""
        for tenant in [name for name, lane in self.lanes.items() if not lane.places and lane.start <= self.stand]:
            del self.lanes[tenant]
        if not any(lane.places for lane in self.lanes.values()):
            self.lanes.clear()


class Line(Generic[T]):
    """See the module. `size` is the most requests it holds."""

    __slots__ = ("_drained_at", "_drained_s", "_number", "_places", "_ranks", "_since", "held_s", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.held_s = 0.0
        """Own seconds of all that wait."""
        self._ranks: dict[PriorityClass, _Rank[T]] = {name: _Rank() for name in PriorityClass}
        self._places: dict[int, _Place[T]] = {}
        """By identity of the ticket."""
        self._number = 0
        self._drained_s = 0.0
        self._drained_at = self._since = 0.0

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[T]:
        """All of them, in no order that means anything."""
        return (place.ticket for place in self._places.values())

    def __contains__(self, ticket: T) -> bool:
        return id(ticket) in self._places

    def depth(self, name: PriorityClass) -> int:
        """How many of a class wait."""
        return sum(len(lane.places) for lane in self._ranks[name].lanes.values())

    def tenants(self) -> dict[str, int]:
        """How many of each tenant wait."""
        found: dict[str, int] = {}
        for rank in self._ranks.values():
            for tenant, lane in rank.lanes.items():
                if lane.places:
                    found[tenant] = found.get(tenant, 0) + len(lane.places)
        return found

    # ---------------------------------------------------------------- coming and going

    def add(self, ticket: T, now: float) -> None:
        """At the end of its turn's order. The caller has made room (`rival`)."""
        if not self._places:
            self._drained_s, self._since = 0.0, now
        rank = self._ranks[ticket.priority]
        lane = rank.lanes.get(ticket.tenant)
        if lane is None:
            lane = rank.lanes[ticket.tenant] = _Lane(rank.stand)
        elif not lane.places:
            lane.start = max(lane.start, rank.stand)
        self._number += 1
        self._enter(lane, _Place(_key(ticket), self._number, ticket))

    def remove(self, ticket: T) -> None:
        """It waits no longer, for whatever reason; one that does not wait is ignored."""
        place = self._places.get(id(ticket))
        if place is None:
            return
        rank = self._ranks[ticket.priority]
        self._leave(rank.lanes[ticket.tenant], place)
        rank.forget()

    def served(self, ticket: T, tokens: int, now: float) -> None:
        """It has got its worker, which computes `tokens` new tokens for it."""
        rank = self._ranks[ticket.priority]
        lane = rank.lanes[ticket.tenant]
        rank.stand = max(rank.stand, lane.start)
        lane.start += max(1, tokens)
        self._drain(ticket.own_s, now)
        self.remove(ticket)

    def resize(self, ticket: T, own_s: float) -> None:
        """Its own seconds are now these; one that does not wait is ignored."""
        place = self._places.get(id(ticket))
        if place is None or own_s == ticket.own_s:
            return
        lane = self._ranks[ticket.priority].lanes[ticket.tenant]
        self._leave(lane, place)
        ticket.own_s = own_s
        self._enter(lane, _Place(_key(ticket), place.number, ticket))

    def _enter(self, lane: _Lane[T], place: _Place[T]) -> None:
        insort(lane.places, place)
        self._places[id(place.ticket)] = place
        self.held_s += place.ticket.own_s

    def _leave(self, lane: _Lane[T], place: _Place[T]) -> None:
        del lane.places[bisect_left(lane.places, place)]
        del self._places[id(place.ticket)]
        self.held_s = max(0.0, self.held_s - place.ticket.own_s) if self._places else 0.0

    # ---------------------------------------------------------------- whose turn

    def in_order(self, limit: int) -> Iterator[T]:
        """The first `limit` requests, by the rules. Of one tenant at most its share of the limit, so that one whose
        requests all wait for the same worker does not hide the others. Nothing may come or go meanwhile."""
        for rank in self._ranks.values():
            lanes = sorted((lane for lane in rank.lanes.values() if lane.places), key=lambda lane: lane.start)
            if not lanes:
                continue
            share = max(1, limit // len(lanes))
            for lane in lanes:
                for place in lane.places[:share]:
                    if limit <= 0:
                        return
                    limit -= 1
                    yield place.ticket

    def rival(self, ticket: T) -> T | None:
        """Whoever has to give its place to this one, which has not been added; None: nobody has."""
        for name in reversed(PriorityClass):
            rank = self._ranks[name]
            counts = {tenant: len(lane.places) for tenant, lane in rank.lanes.items() if lane.places}
            most = max(counts, key=lambda tenant: counts[tenant], default=None)
            if name is ticket.priority and (most is None or counts[most] <= 1 + counts.get(ticket.tenant, 0)):
                return None
            if most is not None:
                return rank.lanes[most].places[-1].ticket
        return None

    # ---------------------------------------------------------------- how fast it moves

    def _drain(self, own_s: float, now: float) -> None:
        self._drained_s = self._fading(now) + own_s / _DRAIN_S
        self._drained_at = now

    def _fading(self, now: float) -> float:
        return self._drained_s * math.exp(-max(0.0, now - self._drained_at) / _DRAIN_S)

    def drain_s(self, now: float, *, workers: int) -> float:
        """Seconds until what waits now has been placed, at the speed of late. Before that shows, as if each of
        `workers` did a second's prefill a second."""
        age_s = now - self._since
        rate = self._fading(now) / (1.0 - math.exp(-age_s / _DRAIN_S)) if age_s >= _SHOWS_S else 0.0
        return self.held_s / (rate or float(max(1, workers)))


def _key(ticket: Waiting) -> float:
    return ticket.own_s + AGEING * ticket.arrived_at
