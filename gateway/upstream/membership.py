"""Who is in the fleet: a worker's way from its address to its departure.

Rules:
1. A worker that was asked for is probed until it answers, then joins the fleet, is bound to the index, its event feeds
   and its load poll start. Probing goes on every `refresh_s`: adapters and cache sizes change while a worker runs.
2. The index keeps a worker's blocks in the block size of its pool's keys. When a newcomer changes that size, the
   pool's workers are bound anew and their feeds learn them anew.
3. A worker at whose address nobody listens is down: it gets no requests until a probe succeeds. The data path asks for
   such a probe (`look`) when it finds nobody. A worker that was away, or that has a new start time, may have lost its
   cache without a word: its feeds learn it anew.
4. Leaving is complete: tasks end, index, connections and metrics forget the worker; open requests run to their end. The
   worker gives up its slot only when nothing is left that writes to it, and its name only when all of this is done.

It decides nothing about requests and keeps no load numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field, replace
from random import Random
from types import MappingProxyType
from typing import Any, Protocol

import structlog
import zmq

from gateway.kv import KvIndex
from gateway.pool import Fleet, Worker, WorkerState
from gateway.prefix import PromptHasher
from gateway.records import EventSource, Finding, LoadSample, Severity, Slot, WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.discovery import probe
from gateway.upstream.kv_feed import KvFeed
from gateway.upstream.load import LoadPoller
from gateway.upstream.parity import token_differences

_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 5.0


class Tasks(Protocol):
    """Where background work runs (`runtime.Supervisor`)."""

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        """Run in the background; restarted when it fails."""
        ...

    async def stop(self, name: str) -> None:
        """Cancel and wait; unknown names are fine."""
        ...


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Periods in seconds."""

    poll_s: float = 1.0
    refresh_s: float = 10.0


@dataclass(slots=True)
class Member:
    """One worker that was asked for. `error` says why it has not joined, or why the last refresh failed."""

    spec: WorkerSpec
    slot: Slot | None = None
    block_size: int = 0
    facts: WorkerFacts | None = None
    feeds: dict[EventSource, KvFeed] = field(default_factory=dict)
    poller: LoadPoller | None = None
    error: str | None = None
    leaving: bool = False
    away: bool = False
    hasher: PromptHasher | None = None
    compared: bool = False
    """Token ids have been compared with the worker's, as far as they can be; False again when its facts change."""
    not_compared: str | None = None
    """Why the last try to compare them failed; it is made again with the next probe."""
    look: asyncio.Event = field(default_factory=asyncio.Event)
    """Set: probe at once."""

    @property
    def caught_up(self) -> bool:
        """Joined, and every feed shows what its rank published."""
        return self.slot is not None and all(feed.caught_up for feed in self.feeds.values())


class Membership:
    """All members by name. `on_joining` runs before a worker joins and makes its model's hasher ready; `on_left` when
    it has gone."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: KvIndex,
        control: ControlClient,
        tasks: Tasks,
        context: zmq.Context[Any],
        clock: Callable[[], float],
        rng: Random,
        on_joining: Callable[[WorkerSpec, WorkerFacts], Awaitable[PromptHasher | None]],
        on_left: Callable[[WorkerId], None],
        settings: MembershipSettings | None = None,
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._control = control
        self._tasks = tasks
        self._context = context
        self._clock = clock
        self._rng = rng
        self._on_joining = on_joining
        self._on_left = on_left
        self._settings = settings or MembershipSettings()
        self._turns = asyncio.Lock()
        self._members: dict[WorkerId, Member] = {}
        self._log = structlog.get_logger("kvgate.membership")
        self.members: Mapping[WorkerId, Member] = MappingProxyType(self._members)

    def expect(self, spec: WorkerSpec) -> None:
        """Let a worker join as soon as it answers."""
        self._members[spec.name] = Member(spec)
        self._tasks.start(f"worker {spec.name}", lambda: self._follow(spec.name))

    async def add(self, spec: WorkerSpec) -> None:
        """Let a worker join now. Raises ProbeFailed when it does not answer: then nothing has changed; ValueError when
        a member has its name."""
        if spec.name in self._members:
            raise ValueError(f"a worker named {spec.name!r} is a member")
        member = self._members[spec.name] = Member(spec)  # at once: the name is taken while the worker is probed
        try:
            await self._join(member, await probe(spec, self._control))
        except BaseException:
            if self._members.get(spec.name) is member:
                del self._members[spec.name]
            raise
        self._tasks.start(f"worker {spec.name}", lambda: self._follow(spec.name))

    async def leave(self, worker_id: WorkerId) -> None:
        """Take a worker out; unknown names are fine. No new request goes there once this has begun."""
        member = self._members.get(worker_id)
        if member is None or member.leaving:
            return
        member.leaving = True
        self._fleet.set_state(worker_id, WorkerState.DOWN, self._clock(), reason="leaving")
        await self._tasks.stop(f"worker {worker_id}")
        await self._stop_feeds(member, list(member.feeds))
        if member.poller is not None:
            await self._tasks.stop(f"load {worker_id}")
        # Nothing waits from here on: slot, index and name are free at the same moment.
        del self._members[worker_id]
        self._fleet.remove(worker_id, self._clock())
        if member.slot is not None:
            self._index.release(member.slot)
        self._fit_block_sizes()
        self._on_left(worker_id)
        self._log.info("worker left", worker=worker_id)

    def look(self, worker_id: WorkerId) -> None:
        """A request found nobody at this worker's address: probe it now. Unknown names are fine."""
        member = self._members.get(worker_id)
        if member is not None:
            member.look.set()

    # ------------------------------------------------------------------ one worker

    async def _follow(self, worker_id: WorkerId) -> None:
        """Probe until the worker joins, then go on probing for what changes."""
        member = self._members[worker_id]
        retry_s = _FIRST_RETRY_S
        while True:
            member.look.clear()  # before the probe: who asks for one while it runs has seen something newer
            try:
                facts = await probe(member.spec, self._control, known=member.facts)
            except ProbeFailed as error:
                if member.error != error.message:
                    self._log.warning("worker does not answer", worker=worker_id, reason=error.message)
                member.error = error.message
                if error.away:
                    member.away = True
                    self._fleet.set_state(worker_id, WorkerState.DOWN, self._clock(), reason="away")
                pause_s = retry_s if member.away or member.slot is None else self._settings.refresh_s
                retry_s = min(retry_s * 2, _LONGEST_RETRY_S)
            else:
                member.error = None
                retry_s = _FIRST_RETRY_S
                pause_s = self._settings.refresh_s
                if member.slot is None:
                    await self._join(member, facts)
                else:
                    await self._renew(member, facts)
                if not member.compared:
                    await self._compare_tokens(member, facts)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._rng.uniform(0.9, 1.1)):
                    await member.look.wait()

    async def _renew(self, member: Member, facts: WorkerFacts) -> None:
        """A member answered again."""
        before = member.facts
        back, member.away = member.away, False
        if back:
            self._fleet.set_state(member.spec.name, WorkerState.READY, self._clock())
            self._log.info("worker is back", worker=member.spec.name)
        restarted = before is not None and before.start_time_unix != facts.start_time_unix
        if back or restarted:
            for feed in member.feeds.values():
                feed.resync()
        if facts != before:
            await self._refresh(member, facts)

    async def _join(self, member: Member, facts: WorkerFacts) -> None:
        spec = member.spec
        member.hasher = await self._on_joining(spec, facts)
        if member.leaving:
            raise ProbeFailed(f"worker {spec.name} was removed while it joined")
        worker = self._fleet.add(spec, facts, self._clock())
        member.facts = facts
        member.slot = worker.slot
        self._fit_block_sizes()
        self._start_feeds(member, worker, facts.events)
        member.poller = LoadPoller(
            spec,
            facts.engine,
            client=self._control,
            on_sample=self._on_sample,
            random=self._rng,
            poll_s=self._settings.poll_s,
        )
        self._tasks.start(f"load {spec.name}", member.poller.run)
        self._log.info(
            "worker joined",
            worker=spec.name,
            engine=facts.engine.value,
            version=facts.version,
            models=list(facts.models),
            block_size=facts.block_size,
            events=[source.endpoint for source in facts.events],
        )
        member.away = False

    async def _compare_tokens(self, member: Member, facts: WorkerFacts) -> None:
        """Tell the operator of what could be better, token ids that differ included."""
        spec, hasher = member.spec, member.hasher
        differences: tuple[Finding, ...] = ()
        if hasher is not None:
            model = next(iter(spec.models or facts.models), "")
            try:
                differences = await token_differences(spec, model, hasher, self._control)
            except ProbeFailed as error:
                if member.not_compared != error.message:
                    self._log.info("token ids not compared yet", worker=spec.name, reason=error.message)
                member.not_compared = error.message
                return
        member.compared, member.not_compared = True, None
        if differences:
            told = replace(facts, findings=facts.findings + differences)
            self._fleet.facts(spec.name, told, self._clock())
        for finding in facts.findings + differences:
            tell = self._log.info if finding.severity is Severity.INFO else self._log.warning
            tell("worker could serve better", worker=spec.name, **finding._asdict())

    async def _refresh(self, member: Member, facts: WorkerFacts) -> None:
        member.hasher = await self._on_joining(member.spec, facts)
        member.compared = False
        member.facts = facts
        self._fleet.facts(member.spec.name, facts, self._clock())
        self._fit_block_sizes()
        await self._stop_feeds(member, [source for source in member.feeds if source not in facts.events])
        worker = self._fleet.workers[member.spec.name]
        self._start_feeds(member, worker, [source for source in facts.events if source not in member.feeds])
        self._log.info("worker changed", worker=member.spec.name, models=list(facts.models), version=facts.version)

    def _on_sample(self, worker_id: WorkerId, sample: LoadSample) -> None:
        self._fleet.load(worker_id, sample, self._clock())
        member = self._members.get(worker_id)
        if member is not None and member.facts is not None and sample.start_time_unix != member.facts.start_time_unix:
            member.look.set()

    # ------------------------------------------------------------------ index and feeds

    def _fit_block_sizes(self) -> None:
        """Bind every worker in the block size of its pool's keys (rule 2)."""
        for member in self._members.values():
            if member.slot is None or member.facts is None:
                continue
            worker = self._fleet.workers[member.spec.name]
            size = self._fleet.key_block_size(worker)
            if size != member.block_size:
                self._index.bind(worker.slot, block_size=size, engine=member.facts.engine)
                member.block_size = size
                for feed in member.feeds.values():
                    feed.resync()

    def _start_feeds(self, member: Member, worker: Worker, sources: Any) -> None:
        for source in sources:
            feed = member.feeds[source] = KvFeed(
                worker.id,
                worker.slot,
                source,
                index=self._index,
                context=self._context,
                clock=self._clock,
                turns=self._turns,
            )
            self._tasks.start(_feed_name(worker.id, source), feed.run)

    async def _stop_feeds(self, member: Member, sources: list[EventSource]) -> None:
        for source in sources:
            await self._tasks.stop(_feed_name(member.spec.name, source))
            feed = member.feeds.pop(source)
            self._index.purge(feed.slot, source.rank)


def _feed_name(worker_id: WorkerId, source: EventSource) -> str:
    return f"feed {worker_id} {source.rank} {source.endpoint}"
