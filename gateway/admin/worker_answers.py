"""What the admin port tells about workers: shapes for OpenAPI, and how they are made of the core's objects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gateway.admin.answer import Answer
from gateway.pool import Breaker, PoolRates, Worker, WorkerState, health
from gateway.pool.trust import Trust
from gateway.records import EventSource, Finding, LoadSample, Severity, TrustState
from gateway.telemetry import FeedReading, SourceReading, WorkerReading


class EventEndpoint(Answer):
    """Where one rank's KV events and replays come from."""

    rank: int
    """Number of the data-parallel rank, 0 without data parallelism."""
    endpoint: str
    """ZeroMQ address of its events."""
    replay_endpoint: str | None
    """ZeroMQ address of its replays; null when it has none."""

    @classmethod
    def of(cls, source: EventSource) -> EventEndpoint:
        """As probed or configured."""
        return cls(rank=source.rank, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint)


class LoadAnswer(Answer):
    """A worker's own words about its load, and how old they are."""

    running: float
    """Requests it computes."""
    waiting: float
    """Requests that wait inside it."""
    kv_usage: float
    """Share of its KV blocks held by running requests, 0 to 1."""
    prefix_queries: float | None
    """Prompt tokens it looked up in its cache since its start; null when it does not say."""
    prefix_hits: float | None
    """Those it found."""
    age_s: float
    """Seconds since it said so."""

    @classmethod
    def of(cls, sample: LoadSample, age_s: float) -> LoadAnswer:
        """The last sample."""
        return cls(
            running=sample.running,
            waiting=sample.waiting,
            kv_usage=sample.kv_usage,
            prefix_queries=sample.prefix_queries,
            prefix_hits=sample.prefix_hits,
            age_s=age_s,
        )


class WorkAnswer(Answer):
    """What a new request would meet at a worker, as the score sees it."""

    prefills: int
    """Requests sent by this gateway whose prefill is not over."""
    prefill_s: float
    """Seconds their prefills take."""
    others: float
    """Requests that other clients or gateways have there."""
    kv_tokens: int
    """Tokens of KV room taken by open requests."""
    kv_capacity: int
    """Tokens its KV cache holds; 0 while nobody knows."""

    @classmethod
    def of(cls, worker: Worker) -> WorkAnswer:
        """Work now."""
        return cls(
            prefills=worker.pending,
            prefill_s=worker.pending_s,
            others=worker.foreign_requests,
            kv_tokens=worker.kv_tokens,
            kv_capacity=worker.kv_capacity,
        )


class RatesAnswer(Answer):
    """Speeds learned from requests: of all workers with the same base model, and how this one differs."""

    prefill_overhead_s: float
    """Seconds a prefill takes whatever its length."""
    prefill_token_s: float
    """Seconds for each new token."""
    prefill_pair_s: float
    """Seconds for each pair of tokens that attention looks at."""
    inter_token_floor_s: float
    """Seconds between two tokens of a stream that is alone."""
    inter_token_each_s: float
    """More for each further running request."""
    samples: int
    """Prefills it was learned from; below eight it is an assumption."""
    slowdown: float
    """How much longer this worker takes: 1 as its pool, 2 twice as long."""
    slowdown_samples: int
    """Prefills the slowdown was learned from."""
    hit_rate: float
    """Share of prompt tokens found in its cache, from its own counters."""

    @classmethod
    def of(cls, worker: Worker) -> RatesAnswer:
        """As learned by now."""
        rates: PoolRates = worker.rates
        return cls(
            prefill_overhead_s=rates.prefill.overhead_s,
            prefill_token_s=rates.prefill.token_s,
            prefill_pair_s=rates.prefill.pair_s,
            inter_token_floor_s=rates.inter_token.floor_s,
            inter_token_each_s=rates.inter_token.each_s,
            samples=rates.samples,
            slowdown=worker.slowdown,
            slowdown_samples=worker.speed.samples,
            hit_rate=worker.hit_rate,
        )


class FeedAnswer(Answer):
    """A worker's event feed, all ranks together; counts since it began."""

    phases: dict[int, str]
    """Where the feed of each rank stands: live, replaying, ..."""
    events: dict[str, int]
    """Events by type."""
    gaps: int
    """Gaps in the sequence of messages."""
    replays: dict[str, int]
    """Replays asked for, by result."""
    resets: int
    """Restarts of the worker seen in the sequence."""
    errors: int
    """Messages that could not be read."""
    ignored: dict[str, int]
    """Announced blocks left out, by reason."""
    skipped: dict[str, int]
    """Events left out, by reason."""
    purges: dict[str, int]
    """Times all that a rank announced was forgotten, by reason."""
    repeated: int
    """Blocks announced that were held already."""
    overflows: int
    """Messages that had no room while a replay ran."""
    reconnects: int
    """Times the connection was made anew."""
    silences: int
    """Times the worker computed blocks and announced nothing."""
    doubts: dict[int, str]
    """Why the feed of a rank is not believed although it looks whole."""
    age_s: float | None
    """Seconds since the last message; null before the first."""

    @classmethod
    def of(cls, feed: FeedReading) -> FeedAnswer:
        """All ranks together."""
        return cls(
            phases=dict(feed.phases),
            events=dict(feed.events),
            gaps=feed.gaps,
            replays=dict(feed.replays),
            resets=feed.resets,
            errors=feed.errors,
            ignored=dict(feed.ignored),
            skipped=dict(feed.skipped),
            purges=dict(feed.purges),
            repeated=feed.repeated,
            overflows=feed.overflows,
            reconnects=feed.reconnects,
            silences=feed.silences,
            doubts=dict(feed.doubts),
            age_s=feed.age_s,
        )


class FindingAnswer(Answer):
    """What of a worker's set-up is wrong or could be better."""

    severity: Severity
    code: str
    """As in docs/reference/findings.md."""
    message: str
    """What it is and what it costs."""
    fix: str
    """The engine's flag, or kvgate's key, that mends it."""

    @classmethod
    def of(cls, finding: Finding) -> FindingAnswer:
        """As the probe or the comparison of tokens made it."""
        return cls(severity=finding.severity, code=finding.code, message=finding.message, fix=finding.fix)


class TrustAnswer(Answer):
    """The evidence behind the factor `trust`."""

    state: TrustState
    """Of feeds and requests together."""
    feed: TrustState
    """Of the feeds alone."""
    contradicted: bool
    """Requests contradict the index."""
    predictions: int
    """Predictions of the last minutes that could be checked."""
    misses: int
    """Those that were missed."""
    miss_rate: float | None
    """Their share; null while there are too few."""
    tightened: bool
    """Load is polled more often for it."""
    relearned: int
    """Times the index was learned anew."""

    @classmethod
    def of(cls, trust: Trust) -> TrustAnswer:
        """Trust now."""
        return cls(
            state=trust.state,
            feed=trust.feed,
            contradicted=trust.contradicted,
            predictions=trust.predictions,
            misses=trust.misses,
            miss_rate=trust.miss_rate,
            tightened=trust.tightened,
            relearned=trust.remedies,
        )


class ChangeAnswer(Answer):
    """One change of a worker's state."""

    before: WorkerState
    state: WorkerState
    reason: str | None
    """A word; null where the state says it all."""
    age_s: float
    """Seconds since."""


class HealthAnswer(Answer):
    """What the state of a worker is made of."""

    breaker: Breaker
    failures: int
    """Failures not made good by answers."""
    trial_in_s: float | None
    """Seconds until the trial of an open breaker."""
    limit: int | None
    """Requests a slow start allows at a time; null: any number."""
    draining: bool
    """An operator drains it."""
    changes: list[ChangeAnswer]
    """The last changes of state, newest first."""

    @classmethod
    def of(cls, worker: health.Health, now: float) -> HealthAnswer:
        """Health now."""
        return cls(
            breaker=worker.breaker,
            failures=worker.failures,
            trial_in_s=worker.half_open_in_s(now),
            limit=worker.limit,
            draining=worker.draining,
            changes=[
                ChangeAnswer(before=change.before, state=change.state, reason=change.reason, age_s=now - change.at)
                for change in reversed(worker.past)
            ],
        )


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
            polls_failed=reading.polls_failed if reading is not None else 0,
            rates=RatesAnswer.of(worker),
            trust=worker.trust,
            index_trust=TrustAnswer.of(worker.belief),
            slowdown=worker.slowdown,
            index_from="events" if reading is not None and reading.announces else "routing",
            index_blocks={tier.value: blocks for tier, blocks in reading.blocks.items()} if reading is not None else {},
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

    @classmethod
    def of(
        cls,
        workers: Iterable[Worker],
        readings: Iterable[WorkerReading],
        feeds: Iterable[FeedReading],
        *,
        sources: Iterable[SourceReading],
        sessions: dict[str, int],
        now: float,
    ) -> WorkerList:
        """Every worker with what metrics see of it; a reading without a worker is one that joins."""
        by_name = {reading.worker: reading for reading in readings}
        feed_of = {feed.worker: feed for feed in feeds}
        return cls(
            workers=[
                WorkerAnswer.of(
                    worker,
                    by_name.pop(worker.id, None),
                    feed_of.get(worker.id),
                    sessions=sessions.get(worker.id, 0),
                    now=now,
                )
                for worker in sorted(workers, key=lambda worker: worker.id)
            ],
            joining=[JoiningAnswer(id=name, error=reading.error) for name, reading in sorted(by_name.items())],
            sources=[SourceAnswer.of(source) for source in sources],
        )
