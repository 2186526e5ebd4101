"""Brings the fleet to what the roster says: the one place that lets workers join, change and leave.

Rules:
1. One thing at a time: who leaves has left before a newcomer takes its name. Those that leave together get no new
   requests from the same moment on.
2. What a source or an operator says is applied at once; nothing is applied twice.
3. A worker that an operator adds is probed first, and is in the list only when it has answered; its name and address
   are its own meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Protocol

import structlog

from gateway.discovery.roster import ADMIN, CONFIG, Entry, Roster, address_of
from gateway.discovery.source import Found, Source
from gateway.errors import WorkerTaken
from gateway.records import WorkerId, WorkerSpec


class Members(Protocol):
    """Who is there (`upstream.Membership`)."""

    def expect(self, spec: WorkerSpec) -> None:
        """Let a worker join as soon as it answers."""
        ...

    async def add(self, spec: WorkerSpec) -> None:
        """Let a worker join now, or raise."""
        ...

    def change(self, spec: WorkerSpec) -> None:
        """It is configured anew, at the same address."""
        ...

    def withhold(self, name: WorkerId, reason: str | None) -> None:
        """No new requests for it, for that reason, or new ones again (None)."""
        ...

    async def leave(self, name: WorkerId) -> None:
        """Take it out."""
        ...


class Tasks(Protocol):
    """Where background work runs (`runtime.Supervisor`)."""

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run in the background; restarted when it fails."""
        ...

    async def stop(self, name: str) -> None:
        """Cancel and wait; unknown names are fine."""
        ...


class Enrolment:
    """Sources in, members out."""

    def __init__(self, roster: Roster, members: Members, *, clock: Callable[[], float]) -> None:
        self.roster = roster
        self._members = members
        self._clock = clock
        self._present: dict[WorkerId, Entry] = {}
        self._wanted: dict[str, Source] = {}
        self._running: dict[str, Source] = {}
        """Sources by name: those to be followed, and those that run."""
        self._changed = asyncio.Event()
        self._turn = asyncio.Lock()
        self._log = structlog.get_logger("kvgate.discovery")
        self.present: Mapping[WorkerId, Entry] = MappingProxyType(self._present)
        """Every worker that was let in, by name."""

    def begin(self, sources: Iterable[Source], tasks: Tasks) -> None:
        """Run the sources, and do what they say."""
        self.follow(sources)
        tasks.start("enrolment", partial(self.run, tasks))

    def follow(self, sources: Iterable[Source]) -> None:
        """These from now on. One that looks for what the one of its name looks for already is not needed: that goes on.
        What a source of the same name saw last stays until the new one is heard; what others saw is forgotten, and
        their workers leave."""
        before = self._wanted
        self._wanted = {}
        for source in sources:
            known = before.get(source.name)
            same = known is not None and known.looks_for == source.looks_for
            self._wanted[source.name] = known if known is not None and same else source
        for name in self._wanted:
            self.roster.expect(name)
        self._changed.set()

    async def configured(self, specs: Iterable[WorkerSpec]) -> None:
        """The workers of the configuration; returns when they are expected, and those that went are gone."""
        self.roster.listed(CONFIG, map(Found, specs), self._clock())
        await self.apply()

    async def add(self, spec: WorkerSpec) -> None:
        """An operator adds a worker (rule 3). Raises WorkerTaken, ProbeFailed, FleetFull: then nothing has changed."""
        roster = self.roster
        entries = roster.entries()
        if spec.name in entries or spec.name in self._present:
            raise WorkerTaken(f"a worker named {spec.name!r} is in the fleet; delete it first or choose another name")
        address = address_of(spec)
        for name, entry in entries.items():
            if address_of(entry.spec) == address:
                raise WorkerTaken(f"{spec.url} is in the fleet already, as {name!r}")
        roster.add(spec, self._clock())
        mine = self._present[spec.name] = Entry(spec, None, (ADMIN,))
        try:
            await self._members.add(spec)
        except BaseException:
            if self._present.get(spec.name) is mine:  # else it was taken out meanwhile, and its name is another's
                del self._present[spec.name]
            roster.withdraw(spec, self._clock(), out=False)
            self._changed.set()  # a source may have named its address or its name meanwhile
            raise
        self._changed.set()  # the same: it may be filled in

    async def remove(self, name: WorkerId) -> None:
        """An operator takes a worker out; returns when it has left. Unknown names are fine."""
        entry = self._present.get(name)
        if entry is not None:
            self.roster.withdraw(entry.spec, self._clock(), out=True)
            await self.apply()

    def listed(self, source: str, found: Iterable[Found]) -> None:
        """What a source sees now."""
        was = self.roster.source(source)
        self.roster.listed(source, found, self._clock())
        now = self.roster.source(source)
        if was.listed_at is None or was.error is not None:
            self._log.info("source answers", source=source, workers=now.workers)
        if now.left_out and not was.left_out:
            self._log.warning("source names more workers than a fleet holds", source=source, left_out=now.left_out)
        self._changed.set()

    def failed(self, source: str, reason: str) -> None:
        """A source cannot look."""
        was = self.roster.source(source)
        self.roster.failed(source, reason, self._clock())
        if was.error != reason:
            self._log.warning("source does not answer: its workers stay", source=source, reason=reason)

    async def run(self, tasks: Tasks) -> None:
        """Do what is said, as long as it runs."""
        while True:
            self._changed.clear()
            await self._heed(tasks)
            await self.apply()
            await self._changed.wait()

    async def _heed(self, tasks: Tasks) -> None:
        """Run the sources that are to be followed, and no others."""
        for name, source in list(self._running.items()):
            if self._wanted.get(name) is not source:
                await tasks.stop(f"source {name}")
                del self._running[name]
        for state in self.roster.sources():
            if state.name not in self._wanted and state.name not in (CONFIG, ADMIN):
                self.roster.forget(state.name)
        for name, source in self._wanted.items():
            if name not in self._running:
                self._running[name] = source
                tasks.start(f"source {name}", partial(source.run, _Published(self, name)))

    async def apply(self) -> None:
        """Bring the members to the list."""
        async with self._turn:
            while (plan := self.roster.plan(self._present)).leave:
                async with asyncio.TaskGroup() as group:
                    for name in plan.leave:
                        group.create_task(self._leave(name))
            # Nothing waits from here on: the plan is that of this moment.
            for entry in plan.change:
                self._change(entry)
            for entry in plan.join:
                self._members.expect(entry.spec)
                self._present[entry.spec.name] = entry

    async def _leave(self, name: WorkerId) -> None:
        await self._members.leave(name)
        self._present.pop(name, None)

    def _change(self, entry: Entry) -> None:
        name = entry.spec.name
        before = self._present[name]
        self._present[name] = entry
        if before.spec != entry.spec:
            self._members.change(entry.spec)
        if before.draining != entry.draining:
            self._members.withhold(name, entry.draining)


class _Published:
    """What one source says (`source.Publish`)."""

    def __init__(self, enrolment: Enrolment, source: str) -> None:
        self._enrolment = enrolment
        self._source = source

    @property
    def workers(self) -> int:
        return self._enrolment.roster.source(self._source).workers

    def present(self, found: Iterable[Found]) -> None:
        self._enrolment.listed(self._source, found)

    def failed(self, reason: str) -> None:
        self._enrolment.failed(self._source, reason)
