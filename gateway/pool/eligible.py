"""Which of a pool's workers may have a request: the hard rules, before anything is weighed.

1. A worker for certain tenants gets their requests only, and a request that is limited to labels goes only to workers
   with one of them.
2. A worker that was tried for the request is not asked again.
3. SGLang's own path goes to workers that have it.
4. A prompt too long for some workers goes to the others.

Where rule 3 or 4 would leave nobody in the pool, all are left: then the client gets the engine's own words. Rules 1 and
2 never give way.
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
    `engine` or `context_length`. The shard itself is returned when all its workers are left.
    """
    workers: Sequence[Worker] = shard.workers
    excluded: Excluded = ()
    if pool.for_tenants or request.labels is not None:
        workers, excluded = _kept(workers, excluded, "tenant", lambda worker: admits(worker, request))
    if tried:
        workers, excluded = _kept(workers, excluded, "tried", lambda worker: worker.id not in tried)
    for reason, rule in _soft(pool, request, blocks):
        if any(rule(w) and w.id not in tried and admits(w, request) for w in pool.ready):
            workers, excluded = _kept(workers, excluded, reason, rule)
    return shard if workers is shard.workers else Shard.of(workers), excluded


def _soft(pool: Pool, request: InferenceRequest, blocks: PrefixBlocks) -> list[tuple[str, Callable[[Worker], bool]]]:
    """Rules 3 and 4, as far as they say anything about this request."""
    rules: list[tuple[str, Callable[[Worker], bool]]] = []
    if request.endpoint is Endpoint.GENERATE:
        rules.append(("engine", lambda worker: worker.facts.engine is not EngineKind.VLLM))
    if pool.shortest is not None and blocks.chains:
        longest = max([chain.tokens for chain in blocks.chains])
        if longest > pool.shortest:
            rules.append(("context_length", lambda worker: longest <= (worker.facts.max_model_len or longest)))
    return rules


def admits(worker: Worker, request: InferenceRequest) -> bool:
    """Rule 1."""
    spec = worker.spec
    if spec.tenants and request.tenant not in spec.tenants:
        return False
    return request.labels is None or spec.pool in request.labels


def _kept(
    workers: Sequence[Worker], excluded: Excluded, reason: str, rule: Callable[[Worker], bool]
) -> tuple[Sequence[Worker], Excluded]:
    kept = [worker for worker in workers if rule(worker)]
    if len(kept) == len(workers):
        return workers, excluded
    return kept, excluded + tuple((worker.id, reason) for worker in workers if not rule(worker))
