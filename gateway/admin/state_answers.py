"""What the admin port tells about pools, index, sessions and the process itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from gateway.admin.answer import Answer, example
from gateway.records import WorkerId

if TYPE_CHECKING:
    from gateway.pool import Pool, Sessions
    from gateway.telemetry import IndexReading, PoolReading, WorkerReading


class Excluded(Answer):
    """A worker that cannot get requests now, and why."""

    worker: str
    reason: str


class PoolAnswer(Answer):
    """The workers behind one served name, and the speeds learned from them."""

    model_config = example(
        name="poet",
        model="llama",
        adapter="poet",
        block_size=16,
        workers=["w1", "w2"],
        ready=["w1"],
        not_ready=[{"worker": "w2", "reason": "draining"}],
        panic=False,
        retries=0,
        retries_refused=0,
        hedges={"won": 4, "lost": 1},
        hedges_refused={"busy": 2},
        queued={"high": 0, "normal": 3, "low": 0},
        queued_tenants={"shop": 3},
        drain_s=1.4,
        shed={"queue_full": 2},
        inflight_requests=12,
        prefill_overhead_s=0.011,
        prefill_token_s=0.00018,
        prefill_pair_s=1.7e-9,
        inter_token_floor_s=0.019,
        inter_token_each_s=0.0002,
        prompt_tokens=3453.0,
        output_tokens=185.0,
    )

    name: str
    """The name clients use."""
    model: str
    """The base model."""
    adapter: str | None
    """Null for the base model itself."""
    block_size: int
    """Tokens a block of the pool's keys."""
    workers: list[str]
    ready: list[str]
    """Those that may get requests."""
    not_ready: list[Excluded]
    panic: bool
    """So many are ejected that all are used."""
    retries: int
    """Retries of the last ten seconds."""
    retries_refused: int
    """Retries not made since the start, for want of budget."""
    hedges: dict[str, int]
    """Requests sent to a second worker since the start because the first was late, by what became of the second."""
    hedges_refused: dict[str, int]
    """Times that a late request was not, by reason."""
    queued: dict[str, int]
    """Requests that wait at the gateway, by priority class."""
    queued_tenants: dict[str, int]
    """The same by tenant."""
    drain_s: float
    """Seconds until those that wait now have a worker, at the speed of late."""
    shed: dict[str, int]
    """Requests sent away from the queue since the start, by reason."""
    inflight_requests: int
    """Open requests of this gateway on its workers; workers may serve several pools."""
    prefill_overhead_s: float
    prefill_token_s: float
    prefill_pair_s: float
    inter_token_floor_s: float
    inter_token_each_s: float
    prompt_tokens: float
    """Running mean of prompt lengths."""
    output_tokens: float
    """Running mean of answer lengths."""

    @classmethod
    def of(cls, pool: Pool, reading: PoolReading | None) -> PoolAnswer:
        """The pool now; `reading` is its queue, None for a pool that was made this moment."""
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
            hedges={kind.value: count for kind, count in pool.hedging.results.items()},
            hedges_refused={reason.value: count for reason, count in pool.hedging.refused.items()},
            queued=dict(reading.queued) if reading is not None else {},
            queued_tenants=dict(reading.queued_tenants) if reading is not None else {},
            drain_s=reading.drain_s if reading is not None else 0.0,
            shed=dict(reading.shed) if reading is not None else {},
            inflight_requests=sum(worker.inflight_requests for worker in pool.workers),
            prefill_overhead_s=rates.prefill.overhead_s,
            prefill_token_s=rates.prefill.token_s,
            prefill_pair_s=rates.prefill.pair_s,
            inter_token_floor_s=rates.inter_token.floor_s,
            inter_token_each_s=rates.inter_token.each_s,
            prompt_tokens=rates.prompt_tokens,
            output_tokens=rates.output_tokens,
        )


class PoolList(Answer):
    """All pools, by name."""

    pools: list[PoolAnswer]


class LearnedAnswer(Answer):
    """Blocks learned from routing (workers without events, keys of text)."""

    blocks: int
    bytes: int
    dropped: dict[str, int]
    """Since the start, by reason."""
    by_worker: dict[str, int]


class IndexAnswer(Answer):
    """The index of KV blocks."""

    model_config = example(
        estimated_bytes=104857600,
        orphans=0,
        truncated=0,
        blocks={"w1": {"gpu": 27500, "cpu": 0}},
        approximate={"blocks": 0, "bytes": 0, "dropped": {}, "by_worker": {}},
    )

    estimated_bytes: int
    orphans: int
    """Announced blocks whose head is unknown; not part of an overlap."""
    truncated: int
    """Blocks left out or dropped for a limit since the start."""
    blocks: dict[str, dict[str, int]]
    """Those announced, by worker and tier."""
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


class SessionsAnswer(Answer):
    """How many sessions are remembered; of one that was asked for, where it is."""

    model_config = example(sessions=37, by_worker={"w1": 7, "w2": 30}, worker="w2", age_s=92.4)

    sessions: int
    by_worker: dict[str, int]
    worker: str | None = None
    """Of the session in `id`: the worker of its last request; null when it is not known, or was not asked for."""
    age_s: float | None = None
    """Seconds since that request."""

    @classmethod
    def of(cls, sessions: Sessions, session: str | None, now: float) -> SessionsAnswer:
        """Counts, and one session."""
        record = sessions.record(session, now) if session is not None else None
        return cls(
            sessions=len(sessions),
            by_worker={str(worker): count for worker, count in sorted(sessions.by_worker().items())},
            worker=record[0] if record is not None else None,
            age_s=record[1] if record is not None else None,
        )


class SessionAnswer(Answer):
    """One session after a change."""

    model_config = example(worker="w2")

    worker: WorkerId | None
    """Where its next request is drawn to; null when nothing is remembered of it."""


class Health(Answer):
    """The process lives."""

    status: Literal["ok"] = "ok"


class Readiness(Answer):
    """Whether clients should be sent here, and why not."""

    model_config = example(ready=False, reason="no answer from w1")

    ready: bool
    reason: str | None = None


class ConfigAnswer(Answer):
    """The configuration of the process."""

    settings: dict[str, Any]
    """What is in force, secrets masked."""
    origins: dict[str, str]
    """Where each given key came from, by its path: the file, an environment variable, the command line."""
    needs_restart: list[str]
    """Keys whose value in the file waits for a restart."""
    problems: list[str]
    """Why the file as it is now is not in force; empty when it is."""
