"""Calls the admission's pump when something has changed, and when time alone changes something.

Several changes in one turn of the loop are one call. No timer runs while nobody waits. A call that fails is logged and
made again: requests that wait have no other way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

import structlog

from gateway.admission import Admission, AdmissionSettings
from gateway.leases import Lease
from gateway.router import Router

_AGAIN_S: Final = 1.0
"""After a failure: rare enough for the log, often enough for those whose time is over."""


class Turns:
    """The line of requests at the gateway, on the event loop."""

    __slots__ = ("_clock", "_log", "_soon", "_timer", "admission")

    def __init__(self, router: Router, clock: Callable[[], float], settings: AdmissionSettings) -> None:
        self.admission = Admission(router, self._wake, settings=settings)
        self._clock = clock
        self._log = structlog.get_logger("kvgate.queue")
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None

    def _wake(self) -> None:
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._soon = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        now = self._clock()
        try:
            again = self.admission.pump(now)
        except Exception:  # noqa: BLE001  whatever it is: it is logged with its traceback, and the others that wait go on
            self._log.exception("the queue could not be advanced", waiting=self.admission.held, again_in_s=_AGAIN_S)
            again = now + _AGAIN_S
        if again is not None:
            self._timer = asyncio.get_running_loop().call_later(again - now, self._pump)


class Turn:
    """One request that asks for its turn. `take` gets its lease in the same step in which it is reserved, before the
    task that waits has run again: whoever ends the request meanwhile finds the lease where it looks for it."""

    __slots__ = ("_done", "_take")

    def __init__(self, take: Callable[[Lease], None]) -> None:
        self._take = take
        self._done: asyncio.Future[None] | None = None
        """There once somebody waits; nearly every request has its lease before."""

    def placed(self, lease: Lease) -> None:
        """From the admission."""
        try:
            self._take(lease)
        except Exception as bug:
            # The request is in no line any more: its own task has to end it, and the others that wait go on.
            if self._done is None or self._done.done():
                raise
            self._done.set_exception(bug)
        else:
            if self._done is not None and not self._done.done():
                self._done.set_result(None)

    def refused(self, error: Exception) -> None:
        """From the admission, to whoever waits; raised where it is still being asked for its turn."""
        if self._done is None:
            raise error
        if not self._done.done():
            self._done.set_exception(error)

    def wait(self) -> asyncio.Future[None]:
        """Done when it has its worker; raises the error with which it was sent away. To be asked for once, in the same
        step in which the admission has given a ticket."""
        self._done = asyncio.get_running_loop().create_future()
        return self._done
