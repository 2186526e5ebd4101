"""Which of a pool's workers may have a request: the hard rules, before anything is weighed.

1. A worker for certain tenants gets their requests only, and a request that is limited to labels goes only to workers
   with one of them.
2. A worker that was tried for the request is not asked again.
3. SGLang's own path goes to workers that have it.
4. A prompt too long for some workers goes to the others.

Where rule 3 or 4 would leave nobody, all are left: then the client gets the engine's own words. Rule 1 never gives way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.pool.pool import Pool
from gateway.pool.shards import Shard
from gateway.pool.worker import Worker
from gateway.records import Endpoint, EngineKind, InferenceRequest, PrefixBlocks, WorkerId

Excluded = tuple[tuple[WorkerId, str], ...]


def eligible(
    pool: Pool, shard: Shard, request: InferenceRequest, blocks: PrefixBlocks, tried: frozenset[WorkerId]
) -> tuple[Shard, Excluded]:
    """The workers of `shard` (or of the whole pool) that are left, and why the others are not: `tenant`, `tried`,
    `engine`, `context_length`, or why they are not ready. The shard itself is returned when all its workers are left.
    """
    workers: Sequence[Worker] = shard.workers
    excluded = pool.not_ready
    guarded = pool.for_tenants or request.labels is not None
    if guarded:
        workers, excluded = _admitting(workers, excluded, request)
        if not workers:  # all of theirs have what they should have
            workers = _admitting(pool.spare, (), request)[0]
    if tried:
        excluded += tuple((worker.id, "tried") for worker in workers if worker.id in tried)
        workers = [worker for worker in workers if worker.id not in tried]
        if not workers:
            spare = [worker for worker in pool.spare if worker.id not in tried]
            workers = _admitting(spare, (), request)[0] if guarded else spare
    if request.endpoint is Endpoint.GENERATE:
        workers, excluded = _kept(workers, excluded, "engine", lambda w: w.facts.engine is not EngineKind.VLLM)
    if pool.shortest is not None and blocks.chains:
        longest = max(chain.tokens for chain in blocks.chains)
        if longest > pool.shortest:
            workers, excluded = _kept(
                workers,
                excluded,
                "context_length",
                lambda w: w.facts.max_model_len is None or longest <= w.facts.max_model_len,
            )
    return shard if workers is shard.workers else Shard.of(workers), excluded


def admits(worker: Worker, request: InferenceRequest) -> bool:
    """Rule 1."""
    spec = worker.spec
    if spec.tenants and request.tenant not in spec.tenants:
        return False
    return request.labels is None or spec.pool in request.labels


def _admitting(
    workers: Sequence[Worker], excluded: Excluded, request: InferenceRequest
) -> tuple[Sequence[Worker], Excluded]:
    kept = [worker for worker in workers if admits(worker, request)]
    if len(kept) == len(workers):
        return workers, excluded
    return kept, excluded + tuple((worker.id, "tenant") for worker in workers if not admits(worker, request))


def _kept(
    workers: Sequence[Worker], excluded: Excluded, reason: str, rule: Callable[[Worker], bool]
) -> tuple[Sequence[Worker], Excluded]:
    kept = [worker for worker in workers if rule(worker)]
    if not kept or len(kept) == len(workers):
        return workers, excluded
    return kept, excluded + tuple((worker.id, reason) for worker in workers if not rule(worker))
