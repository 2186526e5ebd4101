"""Workers and pools: who may serve a request, what each has in flight, how fast each is."""

from gateway.pool.eligible import Excluded, admits, eligible
from gateway.pool.fleet import ANY_MODEL, MAX_WORKERS, Fleet, FleetSettings, Pool, ServedModel
from gateway.pool.health import Breaker, HealthSettings, RetryBudget, WorkerState
from gateway.pool.rates import InterTokenRates, PoolRates, PrefillRates
from gateway.pool.sessions import Sessions
from gateway.pool.shards import Shard, ShardSettings, order
from gateway.pool.worker import STALE_S, Reservation, Worker

__all__ = [
    "ANY_MODEL",
    "MAX_WORKERS",
    "STALE_S",
    "Breaker",
    "Excluded",
    "Fleet",
    "FleetSettings",
    "HealthSettings",
    "InterTokenRates",
    "Pool",
    "PoolRates",
    "PrefillRates",
    "Reservation",
    "RetryBudget",
    "ServedModel",
    "Sessions",
    "Shard",
    "ShardSettings",
    "Worker",
    "WorkerState",
    "admits",
    "eligible",
    "order",
]
