"""Who is in the fleet: a worker's way from its address to its departure.

Rules:
1. A worker that was asked for is probed until it answers, then joins the fleet, is bound to the index, its event feeds
   and its load poll start. Probing goes on every `refresh_s`: adapters and cache sizes change while a worker runs.
2. Whatever changes who serves a pool may change the block size of its keys: the index and the feeds (`feeds`) follow.
3. A worker at whose address nobody listens is gone: it gets no requests until a probe succeeds. The data path asks for
   such a probe (`look`) when it finds nobody. A worker that was away, or that has a new start time, may have lost its
   cache without a word: its feeds learn it anew.
4. Leaving is complete: tasks end, index, connections and metrics forget the worker; open requests run to their end. The
   worker gives up its slot only when nothing is left that writes to it, and its name only when all of this is done.
5. A member is one server. Its data-parallel ranks are workers of their own where they can be (`ranks`): each has a seat
   here, with slot and feeds. One probe and one load poll serve them all; they join, go down and leave together.

It decides nothing about requests and keeps no load numbers.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from types import MappingProxyType
from typing import Any

import structlog
import zmq

from gateway.errors import FleetFull
from gateway.kv import KvIndex
from gateway.pool import Fleet
from gateway.prefix import PromptHasher
from gateway.records import (
    Finding,
    LoadSample,
    LoadSource,
    Outcome,
    Severity,
    TrustState,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.upstream.control import MOST_GATEWAYS, ControlClient, LoopsBack, ProbeFailed, Turnstile
from gateway.upstream.discovery import probe, serves_the_same
from gateway.upstream.feeds import Feeds
from gateway.upstream.load import LoadPoller
from gateway.upstream.load_listening import LoadListening
from gateway.upstream.members import Member, Seat, Tasks, cut
from gateway.upstream.parity import token_differences
from gateway.upstream.ranks import rank_facts, rank_specs

_PROBES_AT_ONCE, _YOUNG_S = 16, 0.1
"""With each answer within a millisecond or so, more would only wait for each other's CPU; engines that take longer make
room after a tenth of a second."""

_FIRST_RETRY_S = 0.25
_LONGEST_RETRY_S = 5.0


@dataclass(frozen=True, slots=True)
class MembershipSettings:
    """Periods in seconds; `load_sockets`: workers that publish their load are listened to."""

    poll_s: float = 1.0
    refresh_s: float = 10.0
    load_sockets: bool = True


class Membership:
    """All members by name. `on_joining` runs before a member joins, and at each probe: it makes its model's hasher
    ready. `on_left` runs when a worker has gone."""

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
        self._control = control
        self._tasks = tasks
        self._clock = clock
        self._rng = rng
        self._on_joining = on_joining
        self._on_left = on_left
        self.settings = settings or MembershipSettings()
        self._listening = LoadListening(tasks=tasks, context=context, clock=clock)
        self._probes = Turnstile(_PROBES_AT_ONCE, young_s=_YOUNG_S)
        self._settings_changed = False
        self._members: dict[WorkerId, Member] = {}
        self._log = structlog.get_logger("kvgate.membership")
        self.members: Mapping[WorkerId, Member] = MappingProxyType(self._members)
        self.feeds = Feeds(fleet, index, self.members, tasks=tasks, context=context, clock=clock)

    def expect(self, spec: WorkerSpec) -> None:
        """Let a worker join as soon as it answers."""
        self._members[spec.name] = Member(spec)
        self._tasks.start(f"worker {spec.name}", lambda: self._follow(spec.name))

    async def add(self, spec: WorkerSpec) -> None:
        """Let a worker join now. Raises ProbeFailed when it does not answer and FleetFull when there is no room: then
        nothing has changed; ValueError when a member has its name."""
        if spec.name in self._members:
            raise ValueError(f"a worker named {spec.name!r} is a member")
        member = self._members[spec.name] = Member(spec)  # at once: the name is taken while the worker is probed
        try:
            await self._join(member, await self._probe(member, asked_for=True))
        except BaseException:
            if self._members.get(spec.name) is member and not member.leaving:  # else all goes with who takes it out
                del self._members[spec.name]
                self._give_up(member, list(member.seats.values()))
            raise
        self._tasks.start(f"worker {spec.name}", lambda: self._follow(spec.name))

    def change(self, spec: WorkerSpec) -> None:
        """A member is configured anew, at the same address: its part of the index and its load stay, and a probe finds
        out what else follows. Unknown names are fine."""
        member = self._members.get(spec.name)
        if member is None:
            return
        member.spec = spec
        if member.facts is not None:
            for name, changed in rank_specs(spec, member.facts).items():
                if name in member.seats:
                    member.seats[name].spec = changed
                    self._fleet.respec(changed, self._clock())
        if member.poller is not None:
            member.poller.respec(spec)
        member.look.set()

    def apply(self, settings: MembershipSettings, *, models: bool) -> None:
        """Other periods, other `models`: the block size of a pool's keys and what prompts are cut with may have
        changed. With either, everybody is probed soon."""
        if settings == self.settings and not models:
            return
        self.settings = settings
        self._settings_changed = True
        for member in self._members.values():
            if member.poller is not None:
                member.poller.pace(settings.poll_s)
            member.look.set()

    def withhold(self, name: WorkerId, reason: str | None) -> None:
        """No new requests for a member, for that reason, or new ones again (None); unknown names are fine."""
        member = self._members.get(name)
        if member is not None:
            member.withheld = reason
            for worker in member.seats:
                self._fleet.withhold(worker, self._clock(), reason=reason)

    async def leave(self, name: WorkerId) -> None:
        """Take a member out; unknown names are fine. No new request goes there once this has begun."""
        member = self._members.get(name)
        if member is None or member.leaving:
            return
        member.leaving = True
        self._mark_gone(member, "leaving")
        await self._tasks.stop(f"worker {name}")
        for seat in member.seats.values():
            await self.feeds.stop(seat, list(seat.feeds))
        self._listening.leave(member)
        if member.poller is not None:
            await self._tasks.stop(f"load {name}")
        # Nothing waits from here on: slots, index and names are free at the same moment.
        del self._members[name]
        seats = list(member.seats.values())
        self._give_up(member, seats)
        if not seats:
            self._on_left(name)
        self._log.info("worker left", worker=name)
        await self.feeds.fit_block_sizes()

    def member_of(self, worker_id: WorkerId) -> Member | None:
        """The server that a worker is, or is a rank of; None when it is not in the fleet."""
        worker = self._fleet.workers.get(worker_id)
        return self._members.get(worker.spec.member) if worker is not None else None

    def gateways(self) -> list[str]:
        """The gateways that requests may come to behind the workers. Those that were not let in count too: of two that
        name each other both would be let in by turns."""
        found = {name for member in self._members.values() for name in member.gateways}
        return sorted(found)[: MOST_GATEWAYS - 1]

    def look(self, worker_id: WorkerId) -> None:
        """A request found nobody at this worker's address: probe it now. Unknown names are fine."""
        member = self.member_of(worker_id)
        if member is not None:
            member.look.set()

    def answered(self, outcome: Outcome) -> None:
        """A request is over: its answer may show whether the server reports cached tokens, and blocks that it computed
        must be announced."""
        if outcome.worker is None or outcome.completion_tokens is None:
            return
        member, seat = self.member_of(outcome.worker), self._seat_of(outcome.worker)
        if member is not None and seat is not None:
            member.answered(outcome)
            seat.served(outcome, self._fleet.workers[outcome.worker].block_size)

    # ------------------------------------------------------------------ refresh

    def feed_trust(self, worker_id: WorkerId) -> TrustState | None:
        """How far a worker's event feeds may be believed; None when it has no seat."""
        seat = self._seat_of(worker_id)
        return None if seat is None else seat.trust

    def tighten(self, worker_id: WorkerId, on: bool) -> None:
        """Poll the load of a worker's server more often, or as usual again when no worker of it needs that."""
        member, seat = self.member_of(worker_id), self._seat_of(worker_id)
        if member is None or seat is None:
            return
        seat.tightened = on
        if member.poller is not None:
            member.poller.tighten(any(other.tightened for other in member.seats.values()))

    def relearn(self, worker_id: WorkerId, since: float | None) -> None:
        """Learn a worker's part of the index anew: from all the history that a replay brings, or, with `since` (seconds
        on the clock of the process), from what was announced after it. Without a replay endpoint the history is what is
        known, so it is kept unless it is doubted."""
        seat = self._seat_of(worker_id)
        if seat is None:
            return
        for source, feed in seat.feeds.items():
            if since is not None:
                feed.relearn(since)
            elif source.replay_endpoint is not None:
                feed.resync()

    def resync(self, worker_id: WorkerId) -> int:
        """An operator wants a worker's part of the index learned anew, history kept or not. How many feeds do so."""
        seat = self._seat_of(worker_id)
        if seat is None:
            return 0
        for feed in seat.feeds.values():
            feed.resync()
        self._log.info("index of the worker is learned anew: asked for", worker=worker_id)
        return len(seat.feeds)

    def _seat_of(self, worker_id: WorkerId) -> Seat | None:
        member = self.member_of(worker_id)
        return None if member is None else member.seats.get(worker_id)

    # ------------------------------------------------------------------ one worker

    async def _follow(self, worker_id: WorkerId) -> None:
        """Probe until the worker joins, then go on probing for what changes."""
        member = self._members[worker_id]
        retry_s = _FIRST_RETRY_S
        while True:
            asked_for = member.look.is_set()
            member.look.clear()  # before the probe: who asks for one while it runs has seen something newer
            try:
                facts = await self._probe(member, asked_for=asked_for)
                if not member.seats:
                    await self._join(member, facts)
                else:
                    await self._renew(member, facts)
            except LoopsBack as error:
                self._failed(member, error.message)
                member.gateways, member.away = error.gateways, True
                self._mark_gone(member, "loops_back")
                pause_s = self.settings.refresh_s
            except ProbeFailed as error:
                self._failed(member, error.message)
                if error.away:
                    member.away = True
                    self._mark_gone(member, "away")
                else:
                    self._mark_probed(member, passed=False)
                pause_s = retry_s if member.away or not member.seats else self.settings.refresh_s
                retry_s = min(retry_s * 2, _LONGEST_RETRY_S)
            except FleetFull as error:
                self._failed(member, error.message)
                pause_s = self.settings.refresh_s
            else:
                member.error = None
                retry_s = _FIRST_RETRY_S
                pause_s = self.settings.refresh_s
                if not member.compared:
                    await self._compare_tokens(member)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s * self._rng.uniform(0.9, 1.1)):
                    await member.look.wait()

    async def _probe(self, member: Member, *, asked_for: bool) -> WorkerFacts:
        """What the server says of itself, or what it said if that still holds. Raises ProbeFailed."""
        async with self._probes.inside():
            if member.away or not member.seats:
                await self._control.knock(member.spec.url)
            known, short = member.probed, member.may_be_short(asked_for=asked_for)
            member.confirmed = False
            if known is not None and short and await serves_the_same(member.spec, self._control, known):
                member.short_probes += 1
                return known
            member.short_probes = 0
            member.probed = await probe(member.spec, self._control, known=known)
            member.gateways = member.probed.gateways
            return member.probed

    def _failed(self, member: Member, reason: str) -> None:
        if member.error != reason:
            self._log.warning("worker does not answer", worker=member.spec.name, reason=reason)
        member.error = reason

    def _mark_gone(self, member: Member, reason: str) -> None:
        for name in member.seats:
            self._fleet.leaving(name, self._clock(), reason=reason)

    def _mark_probed(self, member: Member, *, passed: bool) -> None:
        for name in member.seats:
            self._fleet.probed(name, self._clock(), passed=passed)

    async def _renew(self, member: Member, facts: WorkerFacts) -> None:
        """A member answered again."""
        before = member.facts
        back, member.away = member.away, False
        self._mark_probed(member, passed=True)
        if back:
            for name in member.seats:
                self._fleet.back(name, self._clock())
            self._log.info("worker is back", worker=member.spec.name)
        restarted = before is not None and before.start_time_unix != facts.start_time_unix
        if back or restarted:
            for seat in member.seats.values():
                await self.feeds.forget_learned(seat)
            member.restarted(facts.start_time_unix)
        facts = self._listening.judged(member, member.with_reports(facts), on=self.settings.load_sockets)
        hasher = await self._on_joining(member.spec, facts)  # a tokenizer may have come within reach
        if hasher is not member.hasher or before is None or cut(facts) != cut(before):
            member.hasher = hasher
            member.compared, member.differences = False, ()
        if facts != before:
            await self._refresh(member, facts)
        elif self._settings_changed:
            self._settings_changed = False
            await self.feeds.fit_block_sizes()
        self._listening.follow(member, on=self.settings.load_sockets)

    async def _join(self, member: Member, facts: WorkerFacts) -> None:
        member.hasher = await self._on_joining(member.spec, facts)
        spec = member.spec  # not before: it may have changed meanwhile
        if member.leaving:
            raise ProbeFailed(f"worker {spec.name} was removed while it joined")
        self._take_seats(member, facts)
        member.facts = facts
        await self.feeds.fit_block_sizes()
        if member.leaving:
            raise ProbeFailed(f"worker {spec.name} was removed while it joined")
        for seat in member.seats.values():
            self.feeds.start(seat, rank_facts(seat.spec, facts).events)
        if member.poller is not None:  # it had joined before, and lost its seats to a full fleet
            member.poller.workers = member.by_rank()
        else:
            member.poller = LoadPoller(
                spec,
                facts.engine,
                client=self._control,
                on_sample=self._on_sample,
                random=self._rng,
                workers=member.by_rank(),
                on_missing=member.look.set,
                unused=lambda: self._is_unused(member),
                poll_s=self.settings.poll_s,
            )
            self._tasks.start(f"load {spec.name}", member.poller.run)
        self._listening.follow(member, on=self.settings.load_sockets)
        self._log.info(
            "worker joined",
            worker=spec.name,
            engine=facts.engine.value,
            version=facts.version,
            models=list(facts.models),
            block_size=facts.block_size,
            ranks=[name for name in member.seats if name != spec.name],
            events=[source.endpoint for source in facts.events],
        )
        member.away = False

    def _take_seats(self, member: Member, facts: WorkerFacts) -> None:
        """A seat in the fleet for each worker that has none. Raises FleetFull, with nothing changed."""
        taken: list[Seat] = []
        for name, spec in rank_specs(member.spec, facts).items():
            if name in member.seats:
                continue
            try:
                worker = self._fleet.add(spec, rank_facts(spec, facts), self._clock())
            except FleetFull:
                self._give_up(member, taken)
                raise
            seat = member.seats[name] = Seat(spec, worker.slot)
            taken.append(seat)
            if member.withheld is not None:
                self._fleet.withhold(name, self._clock(), reason=member.withheld)

    def _give_up(self, member: Member, seats: Sequence[Seat]) -> None:
        """These workers leave the fleet; nothing writes to their slots any more."""
        for seat in seats:
            del member.seats[seat.spec.name]
            self._fleet.remove(seat.spec.name, self._clock())
            self.feeds.release(seat)
            self._on_left(seat.spec.name)

    async def _compare_tokens(self, member: Member) -> None:
        """Tell the operator of what could be better, token ids that differ included."""
        spec, hasher, facts = member.spec, member.hasher, member.facts
        if facts is None:
            return
        if hasher is not None:
            model = next(iter(spec.models or facts.models), "")
            try:
                member.differences = await token_differences(spec, model, hasher, self._control)
            except ProbeFailed as error:
                if member.not_compared != error.message:
                    self._log.info("token ids not compared yet", worker=spec.name, reason=error.message)
                member.not_compared = error.message
                return
        member.compared, member.not_compared = True, None
        self._tell(member, facts)
        self._advise(member, facts.findings + member.differences)

    def _advise(self, member: Member, findings: Iterable[Finding]) -> None:
        log = self._log
        tell_as = {Severity.INFO: log.info, Severity.WARNING: log.warning, Severity.ERROR: log.error}
        for finding in findings:
            tell_as[finding.severity]("worker could serve better", worker=member.spec.name, **finding._asdict())

    async def _refresh(self, member: Member, facts: WorkerFacts) -> None:
        """Facts or seats have changed."""
        wanted = rank_specs(member.spec, facts)
        gone = [seat for name, seat in member.seats.items() if name not in wanted]
        for seat in gone:
            self._fleet.leaving(seat.spec.name, self._clock(), reason="leaving")
        for seat in gone:
            await self.feeds.stop(seat, list(seat.feeds))
        self._give_up(member, gone)
        self._take_seats(member, facts)
        before, member.facts = member.facts, facts
        self._tell(member, facts)
        await self.feeds.fit_block_sizes()
        for seat in member.seats.values():
            events = rank_facts(seat.spec, facts).events
            await self.feeds.stop(seat, [source for source in seat.feeds if source not in events])
            self.feeds.start(seat, [source for source in events if source not in seat.feeds])
        if member.poller is not None:
            member.poller.workers = member.by_rank()
        if member.compared and before is not None:  # else all of them will be told
            self._advise(member, [finding for finding in facts.findings if finding not in before.findings])
        changed = [fact.name for fact in fields(facts) if getattr(facts, fact.name) != getattr(before, fact.name, None)]
        self._log.info(
            "worker changed",
            worker=member.spec.name,
            changed=changed,
            models=list(facts.models),
            version=facts.version,
        )

    def _tell(self, member: Member, facts: WorkerFacts) -> None:
        """What is known of a server, to each of its workers."""
        facts = replace(facts, findings=facts.findings + member.differences)
        for name, seat in member.seats.items():
            self._fleet.facts(name, rank_facts(seat.spec, facts), self._clock())

    def _on_sample(self, worker_id: WorkerId, sample: LoadSample) -> None:
        self._fleet.load(worker_id, sample, self._clock())
        member = self.member_of(worker_id)
        if member is not None and member.facts is not None and sample.source is LoadSource.POLL:
            if sample.start_time_unix != member.facts.start_time_unix:
                member.look.set()
            else:
                member.confirmed = sample.start_time_unix is not None

    def _is_unused(self, member: Member) -> bool:
        workers = self._fleet.workers
        return not any(workers[name].inflight_requests for name in member.seats)
