"""One pool: the workers that may serve one model name, who of them may get requests now, and their shards.

Rules:
1. `ready` and what goes with it are renewed when something changes, not when a request asks.
2. An operator's word (a drain, a role) is never overruled; health gives way when too many are ejected (`panic`), limits
   give way when nobody is below theirs.
"""

from __future__ import annotations

from gateway.pool.health import RetryBudget, WorkerState
from gateway.pool.rates import PoolRates
from gateway.pool.shards import NOBODY, Shard, ShardSettings, assign
from gateway.pool.worker import Worker
from gateway.records import EngineKind, Role, WorkerId

DEFAULT_BLOCK_SIZE = 16
"""vLLM's, for a pool none of whose workers names one."""

_EJECTED = WorkerState.EJECTED.value
_FULL = "slow_start"
_BUSY = "max_inflight"
_SERVING = (WorkerState.READY, WorkerState.DEGRADED)


class Pool:
    """The workers that may serve one model name. `model` is the base model: with `adapter` it names the key space.

    `block_size` is the one configured, or the greatest common divisor of its workers', so that every worker's blocks
    are whole runs of the pool's.
    """

    __slots__ = (
        "_shard_of", "adapter", "block_size", "everybody", "for_tenants", "model", "name", "not_ready", "panic",
        "rates", "reads_extra_key", "retries", "saturated", "sharding", "shards", "shortest", "spare", "spilled",
        "workers",
    )  # fmt: skip

    def __init__(
        self,
        name: str,
        *,
        model: str,
        adapter: str | None,
        rates: PoolRates,
        retry_ratio: float = 0.2,
        sharding: ShardSettings | None = None,
    ) -> None:
        self.name = name
        self.model = model
        self.adapter = adapter
        self.rates = rates
        self.retries = RetryBudget(retry_ratio)
        self.block_size = DEFAULT_BLOCK_SIZE
        self.workers: tuple[Worker, ...] = ()
        self.everybody = NOBODY
        """The workers that may get requests now."""
        self.sharding = sharding or ShardSettings()
        self.shards: tuple[Shard, ...] = ()
        """The same in slices; empty for a pool that is not split."""
        self.spilled = 0
        """Requests that went to another shard than their prefix's."""
        self._shard_of: dict[WorkerId, int] = {}
        self.not_ready: tuple[tuple[WorkerId, str], ...] = ()
        """The others, with the reason."""
        self.spare: tuple[Worker, ...] = ()
        """Workers that have all they may have: only for a request that nobody else may have."""
        self.saturated = False
        """Every worker has as many requests as it should have."""
        self.panic = False
        """Too many are ejected for the rest to do the work: ejected ones are used too."""
        self.for_tenants = False
        """Some of its workers are for certain tenants only."""
        self.reads_extra_key = False
        """Some of its workers keep prompts apart by the body's `extra_key`: all but vLLM."""
        self.shortest: int | None = None
        """Smallest context length among its workers, in tokens."""

    @property
    def ready(self) -> tuple[Worker, ...]:
        """The workers that may get requests now."""
        return self.everybody.workers

    @property
    def mask(self) -> int:
        """Their slots as bits."""
        return self.everybody.mask

    def shard_of(self, worker: WorkerId) -> int | None:
        """The shard of a worker; None for another pool's, and where there are no shards."""
        return self._shard_of.get(worker)

    def refit(self, workers: tuple[Worker, ...], block_size: int, *, panic_ratio: float) -> None:
        """The workers, or what is known of them, have changed."""
        self.workers = workers
        self.block_size = block_size
        self.shortest = min((w.facts.max_model_len for w in workers if w.facts.max_model_len is not None), default=None)
        self.for_tenants = any(worker.spec.tenants for worker in workers)
        self.reads_extra_key = any(worker.facts.engine is not EngineKind.VLLM for worker in workers)
        count = self.sharding.count(len(workers))
        self._shard_of = assign([worker.id for worker in workers], count) if count > 1 else {}
        self.renew(panic_ratio)

    def renew(self, panic_ratio: float) -> None:
        """The state of a worker has changed: who may get requests now?

        Those that are ready or degraded and have room; where there are none, those at the limit of a slow start, and
        then those with as many requests as they should have. When more than `panic_ratio` of those an operator left in
        are ejected, all of them.
        """
        reasons = [(worker, _unfit(worker)) for worker in self.workers]
        fit = [worker for worker, reason in reasons if reason in (None, _EJECTED, _FULL, _BUSY)]
        ejected = sum(reason == _EJECTED for _, reason in reasons)
        self.panic = ejected > panic_ratio * len(fit)
        free = [worker for worker, reason in reasons if reason is None]
        full = [worker for worker, reason in reasons if reason == _FULL]
        busy = [worker for worker, reason in reasons if reason == _BUSY]
        ready = tuple(fit if self.panic else free or full or busy)
        if ready != self.ready:  # else the same tuple: whoever compares with it need not look again
            self.everybody = Shard.of(ready)
        mask = self.mask
        self.spare = () if self.panic else tuple(worker for worker in (*full, *busy) if not mask >> worker.slot & 1)
        self.saturated = bool(self.ready) and all(worker.full for worker in self.ready)
        self.not_ready = tuple(
            (worker.id, reason) for worker, reason in reasons if reason is not None and not mask >> worker.slot & 1
        )
        self.shards = self._slices()

    def _slices(self) -> tuple[Shard, ...]:
        if not self._shard_of:
            return ()
        members: list[list[Worker]] = [[] for _ in range(self.sharding.count(len(self.workers)))]
        for worker in self.ready:
            members[self._shard_of[worker.id]].append(worker)
        return tuple(map(Shard.of, members))


def _unfit(worker: Worker) -> str | None:
    if worker.spec.role is not Role.BOTH:
        return f"role_{worker.spec.role.value}"
    if worker.state not in _SERVING:
        return worker.state.value
    if worker.health.full:
        return _FULL
    return _BUSY if worker.full else None
