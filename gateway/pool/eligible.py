"""Which of a pool's workers may have a request: the hard rules, before anything is weighed.

1. A worker that was tried for the request is not asked again.
2. SGLang's own path goes to workers that have it.
3. A prompt too long for some workers goes to the others.

Where a rule would leave nobody, all are left: then the client gets the engine's own words.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gateway.pool.fleet import Pool
from gateway.pool.worker import Worker
from gateway.records import Endpoint, EngineKind, PrefixBlocks, WorkerId

Excluded = tuple[tuple[WorkerId, str], ...]


def eligible(
    pool: Pool, endpoint: Endpoint, blocks: PrefixBlocks, tried: frozenset[WorkerId]
) -> tuple[Sequence[Worker], Excluded]:
    """The workers, and why the others are left out: `tried`, `engine`, `context_length`, or why they are not ready."""
    workers: Sequence[Worker] = pool.ready
    excluded = pool.not_ready
    if tried:
        excluded += tuple((worker.id, "tried") for worker in workers if worker.id in tried)
        workers = [worker for worker in workers if worker.id not in tried] or [
            worker for worker in pool.spare if worker.id not in tried
        ]
    if endpoint is Endpoint.GENERATE:
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
    return workers, excluded


def _kept(
    workers: Sequence[Worker], excluded: Excluded, reason: str, rule: Callable[[Worker], bool]
) -> tuple[Sequence[Worker], Excluded]:
    kept = [worker for worker in workers if rule(worker)]
    if not kept or len(kept) == len(workers):
        return workers, excluded
    return kept, excluded + tuple((worker.id, reason) for worker in workers if not rule(worker))
