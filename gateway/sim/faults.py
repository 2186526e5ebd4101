"""Faults a simulated engine can be told to have, so that tests and operators see what a gateway makes of them.

Two kinds: those done at once to the engine or its event feed, and those that lie in wait for the next requests.
`POST /sim/fault` takes one as JSON: `{"kind": "cut", "after": 3, "times": 2}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gateway.records import Tier


class FaultKind(StrEnum):
    """At once, to the whole worker: RESTART (connections dropped, caches empty, new publishers at sequence 0, new start
    time), HEAL (no more faults, held events released, sockets open).

    At once, to the data-parallel `rank` named or to all: DROP (the next `count` event batches, one when not given, get
    a number but are not sent; `for_good`: nor replayed), HOLD and RELEASE events, OFFLINE (the sockets of events and
    load are closed, the engine goes on, also over a restart) and ONLINE, CLEAR the cache, EVICT `count` idle blocks of
    a `medium` (all when not given; both `silent`: without an event), TRIM the replay buffer, SLOW (speed times
    `factor`), LINK (reads from the tier below the GPU are that much faster, or slower).

    For requests to come: STATUS (answer `code`), RESET (drop the connection unanswered), FREEZE (never answer), and
    for streams, after `after` events: CUT (drop the connection), STALL (send nothing more), GARBLE (one broken line).
    """

    RESTART = "restart"
    DROP = "drop"
    HOLD = "hold"
    RELEASE = "release"
    OFFLINE = "offline"
    ONLINE = "online"
    CLEAR = "clear"
    EVICT = "evict"
    TRIM = "trim"
    SLOW = "slow"
    LINK = "link"
    HEAL = "heal"
    STATUS = "status"
    RESET = "reset"
    FREEZE = "freeze"
    CUT = "cut"
    STALL = "stall"
    GARBLE = "garble"


LYING_IN_WAIT = frozenset(
    {FaultKind.STATUS, FaultKind.RESET, FaultKind.FREEZE, FaultKind.CUT, FaultKind.STALL, FaultKind.GARBLE}
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `times` requests meet it (None: every one until healed); see `FaultKind` for the other fields."""

    kind: FaultKind
    times: int | None = None
    after: int = 0
    code: int = 500
    count: int | None = None
    factor: float = 1.0
    silent: bool = False
    medium: Tier = Tier.GPU
    for_good: bool = False
    rank: int | None = None


class FaultQueue:
    """The faults that wait for requests. Each request meets at most one: the oldest that is not used up."""

    def __init__(self) -> None:
        self._waiting: list[Fault] = []
        self._left: list[int | None] = []

    def add(self, fault: Fault) -> None:
        """Lie in wait behind those that are there."""
        self._waiting.append(fault)
        self._left.append(fault.times)

    def heal(self) -> None:
        """Forget them all."""
        self._waiting.clear()
        self._left.clear()

    def meet(self) -> Fault | None:
        """The fault the next request has, if any."""
        while self._waiting:
            left = self._left[0]
            if left is None:
                return self._waiting[0]
            if left > 0:
                self._left[0] = left - 1
                return self._waiting[0]
            del self._waiting[0], self._left[0]
        return None
