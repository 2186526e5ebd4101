"""What the admin port tells about workers: shapes for OpenAPI, and how they are made of the core's objects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gateway.admin.answer import Answer
from gateway.admin.worker_parts import (
    EventEndpoint,
    FeedAnswer,
    FindingAnswer,
    HealthAnswer,
    LoadAnswer,
    LoadSocketAnswer,
    RatesAnswer,
    TierAnswer,
    TrustAnswer,
    WorkAnswer,
)
from gateway.pool import WorkerState
from gateway.records import Tier

if TYPE_CHECKING:
    from gateway.pool import Worker
    from gateway.telemetry import FeedReading, SourceReading, WorkerReading


class WorkerAnswer(Answer):
    """One worker: what it is, what it does, what is known of its cache."""

    id: str
    """Its name."""
    member: str
    """Name of its server: what is added and removed. A data-parallel rank that is a worker of its own differs."""
    rank: int | None
    """Its data-parallel rank; null when it is a whole server."""
    ranks: list[int]
    """All ranks behind it."""
    url: str
    engine: str
    version: str
    pool: str
    role: str
    weight: float
    """Its share under policies that do not look at caches."""
    state: WorkerState
    """ready and degraded get requests; ejected, draining and gone do not."""
    state_for_s: float
    reason: str | None
    """Why it is not ready."""
    health: HealthAnswer
    models: list[str]
    adapters: dict[str, str]
    """Adapter -> base model."""
    adapters_loaded: list[str]
    """Those taken to be on its GPU, the one used last first."""
    block_size: int
    """Tokens a KV block."""
    kv_blocks: int | None
    """Size of its cache; null while nobody knows."""
    max_model_len: int | None
    events: list[EventEndpoint]
    start_time_unix: float | None
    cached_tokens_reported: bool | None
    """Its answers say how many prompt tokens were cached; null while nobody knows."""
    needs_key: bool | None
    inflight_requests: int
    """Open requests of this gateway."""
    inflight_tokens: int
    """Uncached prompt tokens sent and not yet seen answered."""
    open_streams: int
    """Open exchanges; the same as inflight_requests, or accounts have drifted."""
    sessions: int
    """Sessions whose last request it served."""
    work: WorkAnswer
    load: LoadAnswer | None
    """Null before the first poll and when the last is too old."""
    load_socket: LoadSocketAnswer | None
    """Null where its load is not published, or not listened to."""
    polls_failed: int
    rates: RatesAnswer
    trust: float
    """How far its index is believed, 0 to 1."""
    index_trust: TrustAnswer
    slowdown: float
    """As in rates."""
    index_from: Literal["events", "routing"]
    """Where knowledge of its cache comes from."""
    index_blocks: dict[str, int]
    """Blocks the index knows, by tier."""
    tiers: dict[Tier, TierAnswer]
    """What each tier holds, churns and gives; tiers without anything are left out."""
    slow_share: float | None
    """Share of hits from slower tiers than the GPU; null without hits."""
    feed: FeedAnswer | None
    """Null without an event feed."""
    findings: list[FindingAnswer]

    @classmethod
    def of(
        cls,
        worker: Worker,
        reading: WorkerReading | None,
        feed: FeedReading | None,
        *,
        sessions: int,
        now: float,
    ) -> WorkerAnswer:
        """`reading` and `feed` are what metrics see of it, None while it joins."""
        facts = worker.facts
        load = None
        if worker.load is not None and worker.loaded_at is not None:
            load = LoadAnswer.of(worker.load, now - worker.loaded_at)
        return cls(
            id=worker.id,
            member=worker.spec.member,
            rank=worker.spec.rank.number if worker.spec.rank is not None else None,
            ranks=list(facts.ranks),
            url=worker.spec.url,
            engine=facts.engine,
            version=facts.version,
            pool=worker.spec.pool,
            role=worker.spec.role,
            weight=worker.weight,
            state=worker.state,
            state_for_s=now - worker.state_since,
            reason=worker.reason,
            health=HealthAnswer.of(worker.health, now),
            models=list(facts.models),
            adapters=dict(facts.adapters),
            adapters_loaded=list(worker.adapters.loaded),
            block_size=worker.block_size,
            kv_blocks=facts.kv_blocks,
            max_model_len=facts.max_model_len,
            events=[EventEndpoint.of(source) for source in facts.events],
            start_time_unix=facts.start_time_unix,
            cached_tokens_reported=facts.cached_tokens_reported,
            needs_key=facts.needs_key,
            inflight_requests=worker.inflight_requests,
            inflight_tokens=worker.inflight_tokens,
            open_streams=reading.open_streams if reading is not None else 0,
            sessions=sessions,
            work=WorkAnswer.of(worker),
            load=load,
            load_socket=_load_socket(reading),
            polls_failed=reading.polls_failed if reading is not None else 0,
            rates=RatesAnswer.of(worker),
            trust=worker.trust,
            index_trust=TrustAnswer.of(worker.belief),
            slowdown=worker.slowdown,
            index_from="events" if reading is not None and reading.announces else "routing",
            index_blocks={tier.value: blocks for tier, blocks in reading.blocks.items()} if reading is not None else {},
            tiers=_tiers(worker, reading, feed),
            slow_share=_slow_share(reading),
            feed=FeedAnswer.of(feed) if feed is not None else None,
            findings=[FindingAnswer.of(finding) for finding in worker.findings],
        )


class JoiningAnswer(Answer):
    """A worker that was asked for and has not joined."""

    id: str
    error: str | None
    """Why its last probe failed; null before the first."""


class SourceAnswer(Answer):
    """One source of workers."""

    source: str
    """`config`, `admin`, `kubernetes`, `registry`, or `dns:` and the name that is looked up."""
    workers: int
    """Workers it names."""
    left_out: int
    """Of these, those that have no room in a fleet."""
    age_s: float | None
    """Seconds since it told them; null before the first time."""
    error: str | None
    """Why it cannot look now; its last list stays. Null when it can."""

    @classmethod
    def of(cls, reading: SourceReading) -> SourceAnswer:
        """As read."""
        return cls(
            source=reading.source,
            workers=reading.workers,
            left_out=reading.left_out,
            age_s=reading.age_s,
            error=reading.error,
        )


class WorkerList(Answer):
    """All workers, by name."""

    workers: list[WorkerAnswer]
    joining: list[JoiningAnswer]
    """Those that have not answered yet."""
    sources: list[SourceAnswer]
    """Where workers come from, those whose word counts most first."""


def _load_socket(reading: WorkerReading | None) -> LoadSocketAnswer | None:
    if reading is None or reading.load_socket is None:
        return None
    return LoadSocketAnswer.of(reading.load_socket)


def _tiers(worker: Worker, reading: WorkerReading | None, feed: FeedReading | None) -> dict[Tier, TierAnswer]:
    if reading is None:
        return {}
    answers = {tier: TierAnswer.of(tier, reading, feed, worker.block_size) for tier in Tier}
    return {tier: one for tier, one in answers.items() if one.held or one.stored or one.hit_tokens}


def _slow_share(reading: WorkerReading | None) -> float | None:
    hits = reading.hit_tokens if reading is not None else {}
    total = sum(hits.values())
    return (total - hits.get(Tier.GPU, 0)) / total if total else None
