"""The parts an answer about a worker is made of: load, speeds, feed, trust, health, tiers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from gateway.admin.answer import Answer, example
from gateway.pool import Breaker, WorkerState
from gateway.records import EventSource, Finding, LoadSample, LoadSource, Severity, Tier, TrustState

if TYPE_CHECKING:
    from gateway.pool import PoolRates, Worker, health
    from gateway.pool.trust import Trust
    from gateway.telemetry import FeedReading, LoadSocketReading, WorkerReading


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

    model_config = example(
        running=4.0, waiting=1.0, kv_usage=0.43, prefix_queries=1.2e6, prefix_hits=8.1e5, age_s=0.44, source="poll"
    )

    running: float
    """Requests it computes."""
    waiting: float
    """Requests that wait inside it."""
    kv_usage: float | None
    """Share of its KV blocks held by running requests, 0 to 1; null when it does not say."""
    prefix_queries: float | None
    """Prompt tokens it looked up in its cache since its start; null when it does not say."""
    prefix_hits: float | None
    """Those it found."""
    age_s: float
    """Seconds since it said so."""
    source: LoadSource
    """A poll of it, or the socket on which it publishes its load."""

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
            source=sample.source,
        )


class LoadSocketAnswer(Answer):
    """The sockets on which a worker publishes its load, those of all its ranks; counts since they are listened to."""

    model_config = example(
        endpoints=["tcp://10.0.0.1:5558"], fresh=True, messages=5210, errors=0, restarts=0, age_s=0.21
    )

    endpoints: list[str]
    """ZeroMQ addresses."""
    fresh: bool
    """Its load is what they say; else it is polled."""
    messages: int
    """Messages heard."""
    errors: int
    """Those that could not be read as this worker's load."""
    restarts: int
    """Times their sequence began anew: the engine did."""
    age_s: float | None
    """Seconds since the last message that could be read, of the rank heard longest ago; null before the first."""

    @classmethod
    def of(cls, reading: LoadSocketReading) -> LoadSocketAnswer:
        """As read."""
        return cls(
            endpoints=list(reading.endpoints),
            fresh=reading.fresh,
            messages=reading.messages,
            errors=reading.errors,
            restarts=reading.restarts,
            age_s=reading.age_s,
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

    model_config = example(
        severity="warning",
        code="no_replay",
        message="KV events have no replay",
        fix="add a replay_endpoint (tcp://*:5657) to --kv-events-config",
    )

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


class TierAnswer(Answer):
    """What a tier of a worker's cache is worth: blocks that come and go, and what was taken from it."""

    model_config = example(
        held=27500, stored=1200000, removed=1172500, life_s=300.0, hit_tokens=41000000, hits_per_stored=2.1
    )

    held: int
    """Blocks the index knows in it."""
    stored: int
    """Blocks announced since the feed began."""
    removed: int
    """Blocks pushed out since."""
    life_s: float | None
    """Half of the blocks that were pushed out had lived no longer than this; from a sample. Null without any."""
    hit_tokens: int
    """Prompt tokens taken from it since the gateway's start, as far as answers told."""
    hits_per_stored: float | None
    """Of a token stored, how often it was taken. Below 1 in a slow tier: more is written than used."""

    @classmethod
    def of(cls, tier: Tier, reading: WorkerReading, feed: FeedReading | None, block_size: int) -> TierAnswer:
        """One tier."""
        from gateway.kv.lives import LIFE_BOUNDS  # here: whoever only reads answers needs no index

        stored = feed.blocks_stored.get(tier, 0) if feed is not None else 0
        life = feed.block_lives.get(tier) if feed is not None else None
        hits = reading.hit_tokens.get(tier, 0)
        median_s = life.median_s if life is not None else None
        return cls(
            held=reading.blocks.get(tier, 0),
            stored=stored,
            removed=feed.blocks_removed.get(tier, 0) if feed is not None else 0,
            life_s=median_s if median_s is None or math.isfinite(median_s) else LIFE_BOUNDS[-1],
            hit_tokens=hits,
            hits_per_stored=hits / (stored * block_size) if stored else None,
        )
