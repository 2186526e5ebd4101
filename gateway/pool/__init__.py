"""Workers and pools: who may serve a request, what each has in flight, how fast each is."""

from gateway.pool.eligible import Excluded, admits, eligible
from gateway.pool.fleet import ANY_MODEL, MAX_WORKERS, Fleet, FleetSettings, ServedModel
from gateway.pool.health import Breaker, HealthSettings, RetryBudget, WorkerState
from gateway.pool.hedging import HedgeRule, Hedging, Kind, NoSecond, Refusal
from gateway.pool.line import AGEING, Line, PriorityClass
from gateway.pool.pool import Pool
from gateway.pool.rates import InterTokenRates, PoolRates, PrefillRates
from gateway.pool.regret import SLOW, charge, pay
from gateway.pool.reservations import NOTHING_SENT, Reservation, Sent
from gateway.pool.routes import Route, Routes, Shadow, Version
from gateway.pool.sessions import Sessions, session_digest
from gateway.pool.shards import Shard, ShardSettings, order
from gateway.pool.worker import STALE_S, Worker

__all__ = [
    "AGEING",
    "ANY_MODEL",
    "MAX_WORKERS",
    "NOTHING_SENT",
    "SLOW",
    "STALE_S",
    "Breaker",
    "Excluded",
    "Fleet",
    "FleetSettings",
    "HealthSettings",
    "HedgeRule",
    "Hedging",
    "InterTokenRates",
    "Kind",
    "Line",
    "NoSecond",
    "Pool",
    "PoolRates",
    "PrefillRates",
    "PriorityClass",
    "Refusal",
    "Reservation",
    "RetryBudget",
    "Route",
    "Routes",
    "Sent",
    "ServedModel",
    "Sessions",
    "Shadow",
    "Shard",
    "ShardSettings",
    "Version",
    "Worker",
    "WorkerState",
    "admits",
    "charge",
    "eligible",
    "order",
    "pay",
    "session_digest",
]
