"""What it costs to leave prefixes on a worker that has become slow, and when that pays for moving one.

A hit on a slow worker may cost less than computing the prefix anew elsewhere, today and every day after: each decision
alone would stay for ever, although moving once would pay after a few. So each worker has an account (`regret_s`):

1. A request that goes to a worker of slowdown above `SLOW` adds what its first token is later than it would be if the
   best other worker held as much of the prompt, waits included. So a cold request adds nothing, and nothing is added
   while all others are as slow or as busy.
2. The account is part of the worker's cost. Where a request goes elsewhere only because of it, it pays what that costs
   more. So at most what has been lost is spent (the ski rental's rule, as for idle workers).
3. It is bounded, forgotten within a minute, and empty once the worker is not slow any more.

No clock, no I/O: `now` is an argument, in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

SLOW = 2.0
"""Slowdown above which a worker has an account: twice what differs by chance between equal ones, so that none of a
fleet of equals has one."""

REGRET_S = 10.0
"""As much as computing a very long prefix costs."""

_FORGOTTEN, _FORGOTTEN_S = 1.0 / 60, 0.001
"""In a tick of half a second, and a little more so that it ends: for about half a minute."""


class Debtor(Protocol):
    """A worker, as far as its account goes."""

    @property
    def slowdown(self) -> float: ...
    @property
    def regret_s(self) -> float: ...
    def wait_s(self, now: float) -> float: ...
    def owe(self, seconds: float) -> None: ...


def forgotten_s(regret_s: float) -> float:
    """What a tick changes of an account."""
    return -_FORGOTTEN * regret_s - _FORGOTTEN_S


def charge(worker: Debtor, others: Sequence[Debtor], alone_s: float, now: float) -> None:
    """A request goes to this slow one among `others`; `alone_s` is its prefill there at slowdown 1."""
    best_s = min(other.wait_s(now) + other.slowdown * alone_s for other in others)
    worker.owe(worker.wait_s(now) + worker.slowdown * alone_s - best_s)


def pay(workers: Sequence[Debtor], costs: Sequence[float], at: int) -> None:
    """A request goes to the one at `at`. Whose account alone kept it away pays for that."""
    owing = [position for position, worker in enumerate(workers) if worker.regret_s and position != at]
    if owing:
        cost, position = min((costs[position] - workers[position].regret_s, position) for position in owing)
        if cost < costs[at]:
            workers[position].owe(cost - costs[at])
