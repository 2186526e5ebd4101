"""What the admin port answers: shapes for OpenAPI, and how they are made of the core's objects.

Rules:
1. No keys, no prompt text, no session names.
2. Times are ages in seconds: the monotonic clock of the process means nothing outside.
"""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from gateway.leases import Recent
from gateway.pool import Breaker, Pool, Sessions, Worker, health
from gateway.pool.misses import Forgone, forgone
from gateway.pool.trust import Trust
from gateway.records import Decision, EventSource, Finding, LoadSample, MissCause, Outcome, Severity, TrustState
from gateway.telemetry import FeedReading, IndexReading, WorkerReading


class EventEndpoint(BaseModel):
    """Where one rank's KV events and replays come from."""

    rank: int
    endpoint: str
    replay_endpoint: str | None

    @classmethod
    def of(cls, source: EventSource) -> EventEndpoint:
        """As probed or configured."""
        return cls(rank=source.rank, endpoint=source.endpoint, replay_endpoint=source.replay_endpoint)


class LoadAnswer(BaseModel):
    """A worker's own words about its load, and how old they are."""

    running: float
    waiting: float
    kv_usage: float
    prefix_queries: float | None
    prefix_hits: float | None
    age_s: float

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


class FeedAnswer(BaseModel):
    """A worker's event feed: phase of each rank, why it is doubted, counts since it began, seconds since its last
    message."""

    phases: dict[int, str]
    events: dict[str, int]
    gaps: int
    replays: dict[str, int]
    resets: int
    errors: int
    ignored: dict[str, int]
    skipped: dict[str, int]
    purges: dict[str, int]
    repeated: int
    overflows: int
    reconnects: int
    silences: int
    doubts: dict[int, str]
    age_s: float | None

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


class FindingAnswer(BaseModel):
    """What of a worker's set-up is wrong or could be better; `code` as in `docs/reference/findings.md`."""

    severity: Severity
    code: str
    message: str
    fix: str

    @classmethod
    def of(cls, finding: Finding) -> FindingAnswer:
        """As the probe or the comparison of tokens made it."""
        return cls(severity=finding.severity, code=finding.code, message=finding.message, fix=finding.fix)


class TrustAnswer(BaseModel):
    """What the factor `trust` is made of: the state and that of the feeds alone, whether requests contradict the
    index, checked predictions of the last minutes and those missed (`miss_rate` is null while there are too few),
    whether the refresh is tightened, and how often the index was learned anew."""

    state: TrustState
    feed: TrustState
    contradicted: bool
    predictions: int
    misses: int
    miss_rate: float | None
    tightened: bool
    relearned: int

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


class HealthAnswer(BaseModel):
    """What the state of a worker is made of: its breaker, failures not made good by answers, seconds until the trial of
    an open breaker, requests a slow start allows at a time (null: any number), whether an operator drains it."""

    breaker: Breaker
    failures: int
    trial_in_s: float | None
    limit: int | None
    draining: bool

    @classmethod
    def of(cls, worker: health.Health, now: float) -> HealthAnswer:
        """Health now."""
        return cls(
            breaker=worker.breaker,
            failures=worker.failures,
            trial_in_s=worker.half_open_in_s(now),
            limit=worker.limit,
            draining=worker.draining,
        )


class WorkerAnswer(BaseModel):
    """One worker: what it is, what it does, what is known of its cache (`index_from` says from where).
    `findings` say what to improve, and how.

    A data-parallel rank that is a worker of its own has its number in `rank`, and the name of its server in `member`;
    members are what is added and removed. `ranks` are all ranks behind a worker."""

    id: str
    member: str
    rank: int | None
    ranks: list[int]
    url: str
    engine: str
    version: str
    pool: str
    role: str
    weight: float
    state: str
    state_for_s: float
    reason: str | None
    health: HealthAnswer
    models: list[str]
    adapters: dict[str, str]
    block_size: int
    kv_blocks: int | None
    max_model_len: int | None
    events: list[EventEndpoint]
    start_time_unix: float | None
    cached_tokens_reported: bool | None
    needs_key: bool | None
    inflight_requests: int
    inflight_tokens: int
    open_streams: int
    load: LoadAnswer | None
    polls_failed: int
    trust: float
    index_trust: TrustAnswer
    slowdown: float
    index_from: Literal["events", "routing"]
    index_blocks: dict[str, int]
    feed: FeedAnswer | None
    findings: list[FindingAnswer]

    @classmethod
    def of(cls, worker: Worker, reading: WorkerReading | None, feed: FeedReading | None, now: float) -> WorkerAnswer:
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
            load=load,
            polls_failed=reading.polls_failed if reading is not None else 0,
            trust=worker.trust,
            index_trust=TrustAnswer.of(worker.belief),
            slowdown=worker.slowdown,
            index_from="events" if reading is not None and reading.announces else "routing",
            index_blocks={tier.value: blocks for tier, blocks in reading.blocks.items()} if reading is not None else {},
            feed=FeedAnswer.of(feed) if feed is not None else None,
            findings=[FindingAnswer.of(finding) for finding in worker.findings],
        )


class Excluded(BaseModel):
    """A worker that cannot get requests now, and why."""

    worker: str
    reason: str


class PoolAnswer(BaseModel):
    """The workers behind one served name, and the speeds learned from them (seconds). `panic`: so many are ejected that
    all are used. `retries` were made in the last ten seconds, `retries_refused` ever, for want of budget."""

    name: str
    model: str
    adapter: str | None
    block_size: int
    workers: list[str]
    ready: list[str]
    not_ready: list[Excluded]
    panic: bool
    retries: int
    retries_refused: int
    prefill_overhead_s: float
    prefill_token_s: float
    prefill_pair_s: float
    inter_token_floor_s: float
    inter_token_each_s: float
    prompt_tokens: float
    output_tokens: float

    @classmethod
    def of(cls, pool: Pool) -> PoolAnswer:
        """The pool now."""
        rates = pool.rates
        return cls(
            name=pool.name,
            model=pool.model,
            adapter=pool.adapter,
            block_size=pool.block_size,
            workers=[worker.id for worker in pool.workers],
            ready=[worker.id for worker in pool.ready],
            not_ready=[Excluded(worker=worker, reason=reason) for worker, reason in pool.not_ready],
            panic=pool.panic,
            retries=pool.retries.retried,
            retries_refused=pool.retries.refused,
            prefill_overhead_s=rates.prefill.overhead_s,
            prefill_token_s=rates.prefill.token_s,
            prefill_pair_s=rates.prefill.pair_s,
            inter_token_floor_s=rates.inter_token.floor_s,
            inter_token_each_s=rates.inter_token.each_s,
            prompt_tokens=rates.prompt_tokens,
            output_tokens=rates.output_tokens,
        )


class LearnedAnswer(BaseModel):
    """Blocks learned from routing (workers without events, keys of text): how many, the bytes they take, how many were
    dropped since the start, by reason."""

    blocks: int
    bytes: int
    dropped: dict[str, int]
    by_worker: dict[str, int]


class IndexAnswer(BaseModel):
    """The index of KV blocks; `blocks` are those announced, by worker and tier."""

    estimated_bytes: int
    orphans: int
    truncated: int
    blocks: dict[str, dict[str, int]]
    approximate: LearnedAnswer

    @classmethod
    def of(cls, index: IndexReading, workers: list[WorkerReading]) -> IndexAnswer:
        """As metrics see it."""
        blocks = {str(w.worker): {tier.value: n for tier, n in w.blocks.items()} for w in workers}
        approximate = LearnedAnswer(
            blocks=index.learned_blocks,
            bytes=index.learned_bytes,
            dropped=dict(index.learned_dropped),
            by_worker={str(w.worker): w.learned_blocks for w in workers if w.learned_blocks},
        )
        return cls(
            estimated_bytes=index.bytes,
            orphans=index.orphans,
            truncated=index.truncated,
            blocks=blocks,
            approximate=approximate,
        )


class SessionsAnswer(BaseModel):
    """How many sessions are remembered, by worker; with `id` in the query also that session's worker."""

    sessions: int
    by_worker: dict[str, int]
    worker: str | None = None

    @classmethod
    def of(cls, sessions: Sessions, session: str | None, now: float) -> SessionsAnswer:
        """Costs the whole table: some 50 ms with a million sessions."""
        by_worker = {str(worker): count for worker, count in sessions.by_worker().items()}
        worker = sessions.find(session, now) if session is not None else None
        return cls(sessions=len(sessions), by_worker=by_worker, worker=worker)


class TermsAnswer(BaseModel):
    """A worker's cost for the request, in seconds, and its parts."""

    cost: float
    hit_s: float
    wait_s: float
    own_s: float
    decode_s: float
    evict_s: float
    kv_s: float
    affinity_s: float


class CandidateAnswer(BaseModel):
    """One worker that was considered."""

    worker: str
    overlap_tokens: int
    trust: float
    terms: TermsAnswer


class OutcomeAnswer(BaseModel):
    """What became of a decided request; `delivered_tokens` is null when the worker did not say."""

    result: str
    status: int
    delivered_tokens: int | None
    missed_tokens: int
    miss_cause: MissCause | None
    completion_tokens: int | None
    ttft_s: float | None
    duration_s: float
    retries: int
    error_code: str | None

    @classmethod
    def of(cls, outcome: Outcome) -> OutcomeAnswer:
        """The end of a request."""
        return cls(
            result=outcome.result,
            status=outcome.status,
            delivered_tokens=outcome.delivered_tokens,
            missed_tokens=outcome.missed_tokens,
            miss_cause=outcome.miss_cause,
            completion_tokens=outcome.completion_tokens,
            ttft_s=outcome.ttft_s,
            duration_s=outcome.ended_at - outcome.started_at,
            retries=outcome.retries,
            error_code=outcome.error_code,
        )


class DecisionAnswer(BaseModel):
    """Why a request goes where it goes: every candidate's terms, the chosen worker first, then by cost.
    `forgone_tokens` is available less predicted, `forgone_for` what they were given up for."""

    request_id: str
    model: str
    pool: str
    policy: str
    worker: str
    predicted_tokens: int
    available_tokens: int
    forgone_tokens: int
    forgone_for: Forgone | None
    prompt_tokens: int
    block_size: int
    mode: Literal["exact", "engine", "approximate", "none"]
    reason: str | None
    affinity: str
    shard: int | None
    home_shard: int | None
    age_s: float
    candidates: list[CandidateAnswer]
    excluded: list[tuple[str, str]]
    outcome: OutcomeAnswer | None = None

    @classmethod
    def of(cls, recent: Recent, now: float) -> DecisionAnswer:
        """A decision, with its outcome once there is one. Near-ties are broken at random, so the chosen worker need
        not have the lowest cost to the last digit; it comes first all the same."""
        decision: Decision = recent.decision
        ranked = sorted(decision.candidates, key=lambda c: (c.worker != decision.worker, c.terms.cost, c.worker))
        return cls(
            request_id=decision.request_id,
            model=decision.model,
            pool=decision.pool,
            policy=decision.policy,
            worker=decision.worker,
            predicted_tokens=decision.predicted_tokens,
            available_tokens=decision.available_tokens,
            forgone_tokens=decision.available_tokens - decision.predicted_tokens,
            forgone_for=forgone(decision),
            prompt_tokens=decision.prompt_tokens,
            block_size=decision.block_size,
            mode=decision.mode.value,
            reason=decision.reason,
            affinity=decision.affinity,
            shard=decision.shard,
            home_shard=decision.home_shard,
            age_s=now - decision.decided_at,
            candidates=[
                CandidateAnswer(
                    worker=c.worker,
                    overlap_tokens=c.overlap_tokens,
                    trust=c.trust,
                    terms=TermsAnswer(**c.terms._asdict()),
                )
                for c in ranked
            ],
            excluded=list(decision.excluded),
            outcome=OutcomeAnswer.of(recent.outcome) if recent.outcome is not None else None,
        )


class JoiningAnswer(BaseModel):
    """A worker that was asked for and has not joined; `error` says why its last probe failed."""

    id: str
    error: str | None


class WorkerList(BaseModel):
    """All workers, by name; `joining` are those that have not answered yet."""

    workers: list[WorkerAnswer]
    joining: list[JoiningAnswer]


class PoolList(BaseModel):
    """All pools, by name."""

    pools: list[PoolAnswer]


class DecisionList(BaseModel):
    """Recent decisions, newest first."""

    decisions: list[DecisionAnswer]


class Health(BaseModel):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(BaseModel):
    """Whether clients should be sent here, and why not."""

    ready: bool
    reason: str | None = None


class ErrorBody(BaseModel):
    """OpenAI's error object."""

    message: str
    type: str
    code: str
    param: str | None = None


class ErrorAnswer(BaseModel):
    """Every error of the admin port."""

    error: ErrorBody
