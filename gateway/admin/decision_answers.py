"""What the admin port tells about decisions and how they ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from gateway.admin.answer import Answer, example
from gateway.admission import WaitsFor
from gateway.pool import NoSecond
from gateway.pool.misses import Forgone, forgone
from gateway.records import Decision, Hedged, MissCause, Outcome, Result

if TYPE_CHECKING:
    from gateway.leases import Recent


class TermsAnswer(Answer):
    """A worker's cost for the request, in seconds, and its parts."""

    model_config = example(
        cost=0.1322,
        hit_s=0.7131,
        wait_s=0.0,
        own_s=0.022,
        decode_s=0.0,
        evict_s=0.0,
        kv_s=0.1246,
        affinity_s=0.02,
        repeat_s=0.0,
        idle_s=0.0,
        adapter_s=0.0,
        regret_s=0.0,
    )

    cost: float
    """The lowest wins. Policies that do not price in seconds put their own figure here and leave the rest at 0."""
    hit_s: float
    """Prefill time the overlap saves; already contained in own_s."""
    wait_s: float
    """Until the prefill could start."""
    own_s: float
    """The prefill itself."""
    decode_s: float
    """What it slows other streams down, and they it."""
    evict_s: float
    """What is lost by blocks that must go for it."""
    kv_s: float
    """What KV room it takes costs."""
    affinity_s: float
    """Credit for the worker of its session."""
    repeat_s: float
    """The price of computing what other workers are computing at this moment."""
    idle_s: float
    """Taken off: what requests have waited elsewhere while this worker had nothing to do."""
    adapter_s: float
    """Added for adapters of the request that the worker would have to load."""
    regret_s: float
    """Added for a slow worker: what requests have lost lately because their prefixes were left there."""


class CandidateAnswer(Answer):
    """One worker that was considered."""

    worker: str
    overlap_tokens: int
    """Leading prompt tokens it holds."""
    trust: float
    """How far that was believed."""
    terms: TermsAnswer


class OutcomeAnswer(Answer):
    """What became of a decided request."""

    result: Result
    status: int
    """HTTP status the client got."""
    delivered_tokens: int | None
    """Cached prompt tokens as the worker reported them; null when it did not say."""
    missed_tokens: int
    """Predicted less delivered where that is a route miss, else 0."""
    miss_cause: MissCause | None
    completion_tokens: int | None
    ttft_s: float | None
    duration_s: float
    retries: int
    hedged: Hedged | None
    """What became of its second copy: won (answered first), lost, failed, ended; null where there was none."""
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
            hedged=outcome.hedged,
            error_code=outcome.error_code,
        )


class DecisionAnswer(Answer):
    """Why a request goes where it goes: every candidate's terms, the chosen worker first, then by cost."""

    request_id: str
    """The x-request-id of its answer."""
    model: str
    pool: str
    policy: str
    worker: str
    """The chosen one."""
    predicted_tokens: int
    """Leading prompt tokens it was predicted to hold."""
    available_tokens: int
    """The most that any worker of the pool held."""
    forgone_tokens: int
    """Available less predicted."""
    forgone_for: Forgone | None
    """What they were given up for."""
    prompt_tokens: int
    block_size: int
    mode: Literal["exact", "engine", "approximate", "none"]
    """What the blocks of the prompt were made of."""
    reason: str | None
    """Why the mode is not exact."""
    affinity: str
    """What became of its session: none, new, kept, or moved_ and why"""
    shard: int | None
    """The shard that was asked; null where the pool is not split."""
    home_shard: int | None
    """The shard its prefix belongs to: another one when it spilled."""
    beside: str | None
    """Of a second copy: the worker that had the request already and was late."""
    age_s: float
    candidates: list[CandidateAnswer]
    excluded: list[tuple[str, str]]
    """Workers that were not considered, each with the reason."""
    outcome: OutcomeAnswer | None = None
    """Null while the request runs, and of an explanation."""
    would_wait: WaitsFor | None = None
    """Of an explanation: what the request would wait for at the gateway now. queue: others wait already; room: no
    worker it may have has room; wait: its best worker is busy for longer than requests are held for. Null: nothing."""
    late_after_s: float | None = None
    """Of an explanation: seconds without a first byte after which a second worker would get the request too."""
    no_second: NoSecond | None = None
    """Of an explanation: why none would. off: hedging is off for it; request: it must not be computed twice; unseen:
    too few answers of its kind were seen to say what is late."""

    @classmethod
    def of(
        cls,
        recent: Recent,
        now: float,
        *,
        would_wait: WaitsFor | None = None,
        late_after: float | NoSecond | None = None,
    ) -> DecisionAnswer:
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
            beside=decision.beside,
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
            would_wait=would_wait,
            late_after_s=None if isinstance(late_after, NoSecond) else late_after,
            no_second=late_after if isinstance(late_after, NoSecond) else None,
        )


class DecisionList(Answer):
    """Recent decisions, newest first."""

    decisions: list[DecisionAnswer]
