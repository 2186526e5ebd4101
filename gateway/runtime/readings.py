"""What the owners of state say when metrics are scraped: `telemetry.Readings` over the parts of one gateway."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from gateway.discovery import Enrolment
from gateway.edge import Edge
from gateway.insight import POSITIONS, PrefixInsight
from gateway.kv import KvIndex
from gateway.kv.lives import LIFE_BOUNDS, Lives
from gateway.pool import Breaker, Fleet, Worker, WorkerState
from gateway.records import Tier
from gateway.runtime.reload import Reload, Result
from gateway.runtime.sharing import Sharing
from gateway.runtime.supervisor import Supervisor
from gateway.telemetry import (
    ClientReading,
    ConfigReading,
    FeedReading,
    IndexReading,
    LifeReading,
    LoadSocketReading,
    PoolReading,
    PrefixReading,
    ReplicaReading,
    RequestMetrics,
    SourceReading,
    WorkerReading,
)
from gateway.upstream.http import Upstream
from gateway.upstream.members import Member, Seat
from gateway.upstream.membership import Membership
from gateway.upstream.tokenizing import EngineTokenizing

JOINING = "joining"
"""Asked for, and has not answered yet."""

_BREAKER = {Breaker.CLOSED: 0, Breaker.HALF_OPEN: 1, Breaker.OPEN: 2}
_STATES = (JOINING, *(state.value for state in WorkerState))


class GatewayReadings:
    """Reads fleet, index, members and upstream at once; keeps nothing."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        index: KvIndex,
        insight: PrefixInsight,
        requests: RequestMetrics,
        membership: Membership,
        enrolment: Enrolment,
        upstream: Upstream,
        edge: Edge,
        tokenizing: EngineTokenizing,
        supervisor: Supervisor,
        sharing: Sharing | None,
        reload: Reload,
        clock: Callable[[], float],
    ) -> None:
        self._fleet = fleet
        self._index = index
        self._insight = insight
        self._requests = requests
        self._membership = membership
        self._enrolment = enrolment
        self._upstream = upstream
        self._edge = edge
        self._tokenizing = tokenizing
        self._supervisor = supervisor
        self._sharing = sharing
        self._reload = reload
        self._clock = clock

    def workers(self) -> Iterable[WorkerReading]:
        """Every worker of the fleet."""
        now = self._clock()
        for name, waiting in self._membership.members.items():
            if not waiting.seats:
                yield WorkerReading(name, JOINING, _STATES, 0, 0, 0, error=waiting.error)
        for worker in self._fleet.workers.values():
            load, member = worker.load, self._membership.member_of(worker.id)
            poller = member.poller if member is not None else None
            yield WorkerReading(
                worker=worker.id,
                state=worker.state.value,
                states=_STATES,
                inflight_requests=worker.inflight_requests,
                inflight_tokens=worker.inflight_tokens,
                open_streams=self._upstream.open_streams(worker.spec),
                waiting_requests=load.waiting if load is not None else None,
                kv_usage=load.kv_usage if load is not None else None,
                load_age_s=now - worker.loaded_at if worker.loaded_at is not None else None,
                trust=worker.trust,
                trust_state=worker.belief.state,
                tightened=worker.belief.tightened,
                relearned=worker.belief.remedies,
                findings=tuple(finding.code for finding in worker.findings),
                blocks={tier: self._index.resident(worker.slot, tier) for tier in Tier},
                hit_tokens={tier: self._requests.counts.hits.get((worker.id, tier), 0) for tier in Tier},
                learned_blocks=self._index.learned(worker.slot),
                announces=self._index.announces(worker.slot),
                polls_ok=poller.counts.ok if poller is not None else 0,
                polls_failed=poller.counts.failed if poller is not None else 0,
                error=member.error if member is not None else None,
                breaker=_BREAKER[worker.health.breaker],
                load_socket=_load_socket(member, worker, now),
            )

    def pools(self) -> Iterable[PoolReading]:
        """Every served model."""
        admission = self._edge.turns.admission
        for name, pool in self._fleet.pools.items():
            yield PoolReading(
                name,
                len(pool.ready),
                pool.panic,
                pool.retries.refused,
                pool.spilled,
                queued={rank.value: depth for rank, depth in admission.depth(name).items()},
                queued_tenants=admission.tenants(name),
                drain_s=admission.drain_s(name, self._clock()),
                shed=admission.shed_of(name),
                hedges={kind.value: count for kind, count in pool.hedging.results.items()},
                hedges_refused={reason.value: count for reason, count in pool.hedging.refused.items()},
            )

    def prefixes(self) -> Iterable[PrefixReading]:
        """Every served name that had answers."""
        for model, seen in self._insight.models.items():
            yield PrefixReading(
                model=model,
                prompts=seen.requests,
                tokens=seen.prompt_tokens,
                shared_tokens=seen.shared_tokens,
                new_heads=seen.new_heads,
                drift_tokens=seen.drift_tokens,
                bounds=POSITIONS,
                positions=tuple(seen.positions),
                position_tokens=seen.position_tokens,
            )

    def feeds(self) -> Iterable[FeedReading]:
        """Every worker with an event feed."""
        now = self._clock()
        for member in self._membership.members.values():
            for seat in member.seats.values():
                if seat.feeds:
                    yield _feed_reading(seat, now)

    def clients(self) -> ClientReading:
        """The client port."""
        edge = self._edge
        return ClientReading(edge.connections, edge.buffered_bytes, edge.turned_away)

    def index(self) -> IndexReading:
        """The index as a whole."""
        stats = self._index.stats()
        return IndexReading(
            bytes=stats.estimated_bytes,
            orphans=stats.orphans + stats.placeholders,
            truncated=stats.orphans_dropped + stats.speculative_truncated + stats.truncated,
            learned_blocks=stats.approximate.blocks,
            learned_bytes=stats.approximate.bytes,
            learned_dropped=stats.approximate.dropped,
            tokens_asked=self._tokenizing.results,
        )

    def replicas(self) -> ReplicaReading | None:
        """What is shared with other replicas; None without a store."""
        return None if self._sharing is None else self._sharing.reading()

    def sources(self) -> Iterable[SourceReading]:
        """Where workers come from, in the order of their precedence."""
        now = self._clock()
        for source in self._enrolment.roster.sources():
            age_s = now - source.listed_at if source.listed_at is not None else None
            yield SourceReading(source.name, source.workers, source.left_out, age_s, source.error)

    def config(self) -> ConfigReading:
        """The configuration."""
        reload = self._reload
        return ConfigReading(
            {result.value: reload.results[result] for result in Result},
            bool(reload.problems),
            len(reload.needs_restart),
        )

    def task_restarts(self) -> int:
        """Failures of background tasks since the start."""
        return self._supervisor.restarts


def _load_socket(member: Member | None, worker: Worker, now: float) -> LoadSocketReading | None:
    socket = member.load_socket if member is not None else None
    if socket is None:
        return None
    rank = worker.spec.rank.number if worker.spec.rank is not None else None
    ranks = [heard for number, heard in socket.ranks.items() if rank in (None, number)]
    if not ranks:
        return None
    heard_at = [heard.heard_at for heard in ranks if heard.heard_at is not None]
    return LoadSocketReading(
        endpoints=tuple(heard.endpoint.endpoint for heard in ranks),
        fresh=socket.fresh(rank),
        messages=sum(heard.messages for heard in ranks),
        errors=sum(heard.errors for heard in ranks),
        restarts=sum(heard.restarts for heard in ranks),
        age_s=now - min(heard_at) if len(heard_at) == len(ranks) else None,
    )


def _feed_reading(seat: Seat, now: float) -> FeedReading:
    events: Counter[str] = Counter()
    ignored: Counter[str] = Counter()
    replays: Counter[str] = Counter()
    stored: Counter[Tier] = Counter()
    removed: Counter[Tier] = Counter()
    skipped: Counter[str] = Counter()
    purges: Counter[str] = Counter()
    gaps = resets = errors = repeated = overflows = reconnects = silences = 0
    newest: float | None = None
    phases: dict[int, str] = {}
    doubts: dict[int, str] = {}
    lives: dict[Tier, Lives] = {}
    for source, feed in seat.feeds.items():
        totals, counters = feed.totals, feed.counters
        events.update(totals.events)
        ignored.update(totals.ignored)
        replays.update(counters.replays)
        stored.update(totals.stored)
        removed.update(totals.removed)
        gaps += counters.gaps
        resets += counters.resets
        errors += counters.errors
        skipped.update(totals.skipped)
        purges.update(counters.purges)
        repeated += totals.repeated
        overflows += counters.buffer_overflows
        reconnects += counters.reconnects
        silences += counters.silences
        for tier, some in feed.lives.lives.items():
            lives.setdefault(tier, Lives()).add(some)
        phases[source.rank] = feed.phase.value
        if feed.doubt is not None:
            doubts[source.rank] = feed.doubt
        if counters.last_applied_at is not None:
            newest = counters.last_applied_at if newest is None else max(newest, counters.last_applied_at)
    return FeedReading(
        worker=seat.spec.name,
        events=events,
        gaps=gaps,
        replays=replays,
        resets=resets,
        errors=errors,
        ignored=ignored,
        phases=phases,
        skipped=skipped,
        purges=purges,
        repeated=repeated,
        overflows=overflows,
        reconnects=reconnects,
        silences=silences,
        doubts=doubts,
        age_s=now - newest if newest is not None else None,
        blocks_stored=stored,
        blocks_removed=removed,
        block_lives={
            tier: LifeReading(LIFE_BOUNDS, some.counts, some.total_s, some.median_s()) for tier, some in lives.items()
        },
    )
