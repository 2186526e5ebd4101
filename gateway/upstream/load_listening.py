"""Which servers' load sockets are listened to, and the one task that does so.

Rules:
1. A socket is opened for each server that names one, and opened anew when its address or its ranks change. One that
   cannot be opened, for want of files perhaps, is tried again after the next probe.
2. An address that several servers name has one publisher, and nobody can say whose: SGLang goes on, without its load
   socket, when its port is taken. None of them is listened to there; they are polled.
3. A server's polls know its socket, and go on at their own pace without it. That it is silent, or another's too, is a
   finding about the server (`judged`).
4. All sockets are drained in one round, `DRAIN_S` after the last: to be woken for each message costs several times what
   reading it does. After some of them the loop serves others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

import structlog
import zmq

from gateway.findings import LOAD_UNHEARD
from gateway.records import LoadEndpoint, WorkerFacts, WorkerId
from gateway.upstream.load_socket import DRAIN_S, UNHEARD_S, LoadSocket
from gateway.upstream.members import Member, Tasks

_AT_ONCE: Final = 8
"""Servers drained before others have their turn: a millisecond when each has something new."""


class LoadListening:
    """Call `follow` when a member has joined and whenever it was probed, `leave` when it goes."""

    def __init__(self, *, tasks: Tasks, context: zmq.Context[Any], clock: Callable[[], float]) -> None:
        self._tasks = tasks
        self._context = context
        self._clock = clock
        self._sockets: dict[WorkerId, LoadSocket] = {}
        self._started = False
        self._named: Counter[str] = Counter()
        """How many members name an address."""
        self._log = structlog.get_logger("kvgate.load")

    def follow(self, member: Member, *, on: bool) -> None:
        """Listen to the sockets that a member names now, if `on`."""
        facts, poller = member.facts, member.poller
        if facts is None or poller is None or member.leaving:
            return
        self._name(member, facts.loads)
        whole = not facts.rank_routing
        wanted = tuple(load for load in facts.loads if on and self._named[load.endpoint] == 1)
        if whole and len(wanted) < len(facts.loads):
            wanted = ()  # the sum of some ranks is nobody's load
        heard = member.load_socket
        if heard is not None:
            opened = self._sockets.get(member.spec.name) is heard
            if opened and (heard.endpoints, heard.whole) == (wanted, whole):
                return
            self._stop(member)
        if not wanted:
            return
        socket = member.load_socket = self._sockets[member.spec.name] = LoadSocket(
            wanted,
            whole=whole,
            context=self._context,
            clock=self._clock,
            on_load=poller.heard,
            on_restart=member.began_anew,
        )
        poller.hears = socket.fresh
        if not self._started:
            self._started = True
            self._tasks.start("load sockets", self.run)
        self._log.info("load socket", worker=member.spec.name, endpoints=[load.endpoint for load in wanted])

    def judged(self, member: Member, facts: WorkerFacts, *, on: bool) -> WorkerFacts:
        """What a probe of it has found, with what listening has, if `on`."""
        if not on:
            return facts
        socket = member.load_socket
        if socket is not None:
            silent, problem = socket.unheard(), f"nothing that can be read came for {UNHEARD_S:g} s"
        else:
            silent, problem = self._shared(member), "several servers name this address"
        if not silent:
            return facts
        found = LOAD_UNHEARD.found(endpoint=", ".join(load.endpoint for load in silent), problem=problem)
        return replace(facts, findings=(*facts.findings, found))

    def leave(self, member: Member) -> None:
        """It is going: nothing more is heard, and its addresses may be another's."""
        self._name(member, ())
        self._stop(member)

    async def run(self) -> None:
        """Hear all of them until cancelled; `follow` starts it."""
        try:
            while True:
                for number, (name, socket) in enumerate(list(self._sockets.items()), 1):
                    if self._sockets.get(name) is socket:  # else it has left meanwhile
                        self._drain(name, socket)
                    if number % _AT_ONCE == 0:
                        await asyncio.sleep(0)
                await asyncio.sleep(DRAIN_S)
        finally:
            for socket in self._sockets.values():
                socket.close()

    def _drain(self, name: WorkerId, socket: LoadSocket) -> None:
        try:
            socket.drain()
        except zmq.ZMQError as error:
            socket.close()
            del self._sockets[name]
            self._log.warning("load socket cannot be opened; the worker is polled", worker=name, reason=str(error))

    def _name(self, member: Member, loads: tuple[LoadEndpoint, ...]) -> None:
        if loads == member.loads_named:
            return
        self._named.subtract(load.endpoint for load in member.loads_named)
        self._named.update(load.endpoint for load in loads)
        self._named += Counter()  # what is 0 goes
        member.loads_named = loads
        shared = self._shared(member)
        if shared:
            self._log.warning(
                "load socket is not used: several workers name it, so one of them could not open its own",
                worker=member.spec.name,
                endpoints=[load.endpoint for load in shared],
                fix="give each server on a host a --load-publish-endpoint of its own",
            )

    def _shared(self, member: Member) -> tuple[LoadEndpoint, ...]:
        return tuple(load for load in member.loads_named if self._named[load.endpoint] > 1)

    def _stop(self, member: Member) -> None:
        socket, member.load_socket = member.load_socket, None
        if member.poller is not None:
            member.poller.hears = lambda _: False
        if socket is not None:
            socket.close()
            self._sockets.pop(member.spec.name, None)
