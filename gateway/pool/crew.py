"""The workers behind one or more pools: who of them may get requests now, and their shards.

Rules:
1. Pools with the same workers share one crew: a worker with a hundred adapters stands behind a hundred pools, and what
   happens to it is looked at once.
2. `ready` and what goes with it are renewed when something changes, not when a request asks.
3. An operator's word (a drain, a role) is never overruled; health gives way when too many are ejected (`panic`), limits
   give way when nobody is below theirs.
"""

from __future__ import annotations

from gateway.pool.health import WorkerState
from gateway.pool.shards import NOBODY, Shard, ShardSettings, assign
from gateway.pool.worker import Worker
from gateway.records import EngineKind, Role, WorkerId

_EJECTED = WorkerState.EJECTED.value
_FULL = "slow_start"
_BUSY = "max_inflight"
_SERVING = (WorkerState.READY, WorkerState.DEGRADED)


class Crew:
    """Always the same workers. `refit` is due when it is made and when what is known of them has changed, `renew` when
    their state has."""

    __slots__ = (
        "_shard_of", "everybody", "for_tenants", "not_ready", "panic", "reads_extra_key", "renewals", "saturated",
        "sharding", "shards", "shortest", "spare", "workers",
    )  # fmt: skip

    def __init__(self, workers: tuple[Worker, ...] = (), *, sharding: ShardSettings | None = None) -> None:
        self.workers = workers
        self.sharding = sharding or ShardSettings()
        self.everybody = NOBODY
        """The workers that may get requests now."""
        self.not_ready: tuple[tuple[WorkerId, str], ...] = ()
        """The others, with the reason."""
        self.spare: tuple[Worker, ...] = ()
        """Workers that have all they may have: only for a request that nobody else may have."""
        self.saturated = False
        """Every worker has as many requests as it should have."""
        self.panic = False
        """Too many are ejected for the rest to do the work: ejected ones are used too."""
        self.for_tenants = False
        """Some are for certain tenants only."""
        self.reads_extra_key = False
        """Some keep prompts apart by the body's `extra_key`: all but vLLM."""
        self.shortest: int | None = None
        """Smallest context length, in tokens."""
        self.renewals = 0
        """Since it was made."""
        count = self.sharding.count(len(workers))
        self._shard_of = assign([worker.id for worker in workers], count) if count > 1 else {}
        self.shards = self._slices()
        """`everybody` in slices; empty for a crew that is not split."""

    def shard_of(self, worker: WorkerId) -> int | None:
        """The shard of a worker; None for another crew's, and where there are no shards."""
        return self._shard_of.get(worker)

    def refit(self, panic_ratio: float) -> None:
        """What is known of the workers has changed, or how they are configured."""
        workers = self.workers
        self.shortest = min((w.facts.max_model_len for w in workers if w.facts.max_model_len is not None), default=None)
        self.for_tenants = any(worker.spec.tenants for worker in workers)
        self.reads_extra_key = any(worker.facts.engine is not EngineKind.VLLM for worker in workers)
        self.renew(panic_ratio)

    def renew(self, panic_ratio: float) -> None:
        """The state of a worker has changed: who may get requests now?

        Those that are ready or degraded and have room; where there are none, those at the limit of a slow start, and
        then those with as many requests as they should have. When more than `panic_ratio` of those an operator left in
        are ejected, all of them.
        """
        self.renewals += 1
        reasons = [(worker, _unfit(worker)) for worker in self.workers]
        fit = [worker for worker, reason in reasons if reason in (None, _EJECTED, _FULL, _BUSY)]
        ejected = sum(reason == _EJECTED for _, reason in reasons)
        self.panic = ejected > panic_ratio * len(fit)
        free = [worker for worker, reason in reasons if reason is None]
        full = [worker for worker, reason in reasons if reason == _FULL]
        busy = [worker for worker, reason in reasons if reason == _BUSY]
        ready = tuple(fit if self.panic else free or full or busy)
        if ready != self.everybody.workers:  # else the same tuple: whoever compares with it need not look again
            self.everybody = Shard.of(ready)
            self.shards = self._slices()
        mask = self.everybody.mask
        self.spare = () if self.panic else tuple(worker for worker in (*full, *busy) if not mask >> worker.slot & 1)
        self.saturated = bool(ready) and all(worker.full for worker in ready)
        self.not_ready = tuple(
            (worker.id, reason) for worker, reason in reasons if reason is not None and not mask >> worker.slot & 1
        )

    def _slices(self) -> tuple[Shard, ...]:
        if not self._shard_of:
            return ()
        members: list[list[Worker]] = [[] for _ in range(self.sharding.count(len(self.workers)))]
        for worker in self.everybody.workers:
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
