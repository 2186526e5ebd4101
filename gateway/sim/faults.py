"""Faults a simulated engine can be told to have, so that tests and operators see what a gateway makes of them.

Two kinds: those done at once to the engine or its event feed, and those that lie in wait for the next requests.
`POST /sim/fault` takes one as JSON: `{"kind": "cut", "after": 3, "times": 2}`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class FaultKind(StrEnum):
    """At once: RESTART (connections dropped, cache empty, new publisher at sequence 0, new start time), DROP (the next
    `count` event batches get a number but are not sent), HOLD and RELEASE events, CLEAR the cache (`silent`: without
    an event), TRIM the replay buffer, SLOW (speed times `factor`), HEAL (no more faults, held events released).

    For requests to come: STATUS (answer `code`), RESET (drop the connection unanswered), FREEZE (never answer), and
    for streams, after `after` events: CUT (drop the connection), STALL (send nothing more), GARBLE (one broken line).
    """

    RESTART = "restart"
    DROP = "drop"
    HOLD = "hold"
    RELEASE = "release"
    CLEAR = "clear"
    TRIM = "trim"
    SLOW = "slow"
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
    count: int = 1
    factor: float = 1.0
    silent: bool = False


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
