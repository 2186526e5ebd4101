"""One pool: the workers that may serve one model name, by way of the crew they form (`pool.crew`)."""

from __future__ import annotations

from gateway.pool.crew import Crew
from gateway.pool.health import RetryBudget
from gateway.pool.hedging import Hedging
from gateway.pool.rates import PoolRates
from gateway.pool.shards import Shard
from gateway.pool.worker import Worker
from gateway.records import WorkerId

DEFAULT_BLOCK_SIZE = 16
"""vLLM's, for a pool none of whose workers names one."""

_CROWDED = 0.8
"""Share of the room: below it a pool can do a little work twice without anybody waiting for it."""


class Pool:
    """The workers that may serve one model name. `model` is the base model: with `adapter` it names the key space.

    `block_size` is the one configured, or the greatest common divisor of its workers', so that every worker's blocks
    are whole runs of the pool's.
    """

    __slots__ = (
        "adapter", "block_size", "crew", "hedging", "model", "name", "rates", "retries", "spilled",
    )  # fmt: skip

    def __init__(
        self, name: str, *, model: str, adapter: str | None, rates: PoolRates, retry_ratio: float = 0.2
    ) -> None:
        self.name = name
        self.model = model
        self.adapter = adapter
        self.rates = rates
        self.retries = RetryBudget(retry_ratio)
        self.hedging = Hedging()
        self.block_size = DEFAULT_BLOCK_SIZE
        self.crew = Crew()
        self.spilled = 0
        """Requests that went to another shard than their prefix's."""

    @property
    def workers(self) -> tuple[Worker, ...]:
        """All of them."""
        return self.crew.workers

    @property
    def everybody(self) -> Shard:
        """The workers that may get requests now."""
        return self.crew.everybody

    @property
    def ready(self) -> tuple[Worker, ...]:
        """The same, alone."""
        return self.crew.everybody.workers

    @property
    def mask(self) -> int:
        """Their slots as bits."""
        return self.crew.everybody.mask

    @property
    def shards(self) -> tuple[Shard, ...]:
        """The same in slices; empty for a pool that is not split."""
        return self.crew.shards

    @property
    def not_ready(self) -> tuple[tuple[WorkerId, str], ...]:
        """The others, with the reason."""
        return self.crew.not_ready

    @property
    def spare(self) -> tuple[Worker, ...]:
        """Workers that have all they may have: only for a request that nobody else may have."""
        return self.crew.spare

    @property
    def saturated(self) -> bool:
        """Every worker has as many requests as it should have."""
        return self.crew.saturated

    @property
    def panic(self) -> bool:
        """Too many are ejected for the rest to do the work: ejected ones are used too."""
        return self.crew.panic

    @property
    def for_tenants(self) -> bool:
        """Some of its workers are for certain tenants only."""
        return self.crew.for_tenants

    @property
    def reads_extra_key(self) -> bool:
        """Some of its workers keep prompts apart by the body's `extra_key`: all but vLLM."""
        return self.crew.reads_extra_key

    @property
    def shortest(self) -> int | None:
        """Smallest context length among its workers, in tokens."""
        return self.crew.shortest

    @property
    def crowded(self) -> bool:
        """Its workers have nearly as many requests as they should have, as far as that is known of all of them."""
        workers = (*self.ready, *self.spare)
        limits = [worker.room.limit for worker in workers]
        room = sum(limit for limit in limits if limit is not None)
        if not room or None in limits:
            return False
        taken = sum(worker.inflight_requests + worker.foreign_requests for worker in workers)
        return taken + 1 > _CROWDED * room

    def shard_of(self, worker: WorkerId) -> int | None:
        """The shard of a worker; None for another pool's, and where there are no shards."""
        return self.crew.shard_of(worker)
