"""What each part is told of the configuration: the same at the start and at a reload.

Pure functions from the tree to the parts' own settings.
"""

from __future__ import annotations

from dataclasses import replace
from random import Random

from gateway.admin.views import AdminSettings
from gateway.admission import AdmissionSettings
from gateway.edge import Cors, EdgeLimits, EdgeSettings, HedgeRules, Keys, PhaseTimeouts
from gateway.kv import LEARNED_BYTES, ApproximateSettings
from gateway.policy import OWN_EXTRA_HOLDING, Policy, Prices, Weights, make_policy
from gateway.pool import STALE_S, FleetSettings, HealthSettings, ShardSettings
from gateway.router import RouterSettings
from gateway.settings import Settings
from gateway.upstream.connections import Timeouts
from gateway.upstream.membership import MembershipSettings

_STALE_POLLS = 5
"""Polls of a worker's load that may fail before its last sample is forgotten."""


def fleet_settings(settings: Settings) -> FleetSettings:
    """Health, retries, block sizes."""
    health = settings.health
    return FleetSettings(
        block_sizes={name: m.block_size for m in settings.models for name in (m.name, *m.aliases) if m.block_size},
        stale_s=max(STALE_S, _STALE_POLLS * settings.load.poll_s),
        miss_threshold=settings.index.route_miss_threshold,
        health=HealthSettings(
            failures=health.failures,
            open_s=health.open_s,
            slow_start_s=health.slow_start_s,
            panic_ratio=health.panic_ratio,
        ),
        retry_ratio=settings.retries.budget_ratio,
        sharding=ShardSettings(settings.routing.shards, settings.routing.shard_workers),
        max_inflight=None if settings.admission.max_inflight == "auto" else settings.admission.max_inflight,
    )


def approximate_settings(settings: Settings) -> ApproximateSettings:
    """What is learned from routing; it may take half of the index."""
    index = settings.index
    return ApproximateSettings(
        ttl_s=index.approximate_ttl_s,
        default_tokens=index.approximate_tokens,
        limit=index.max_bytes // 2 // LEARNED_BYTES,
    )


def policy(settings: Settings, *, rng: Random) -> Policy:
    """The policy with its weights."""
    routing = settings.routing
    given = {"alpha": routing.alpha, "beta": routing.beta, "gamma": routing.gamma}
    weights = replace(Weights(), **{name: weight for name, weight in given.items() if weight != "auto"})
    prices = Prices(affinity_s=routing.affinity.credit_s)
    if routing.hold_s:
        # Less work is queued on workers, so the work of one delays fewer others.
        prices = replace(prices, own_extra=OWN_EXTRA_HOLDING)
    return make_policy(routing.policy, rng=rng, weights=weights, prices=prices)


def router_settings(settings: Settings) -> RouterSettings:
    """Promises, sessions, what names stand for."""
    affinity = settings.routing.affinity
    return RouterSettings(
        speculative_ttl_s=settings.routing.speculative_ttl_s,
        max_sessions=affinity.max_sessions,
        session_ttl_s=affinity.ttl_s,
        spill_margin_s=settings.routing.spill_margin_s,
        routes=settings.routes(),
    )


def worker_timeouts(settings: Settings) -> Timeouts:
    """The limits of a request's phases, apart from paths and models of their own."""
    timeouts = settings.timeouts
    return Timeouts(
        connect_s=timeouts.connect_s,
        send_s=timeouts.send_s,
        first_byte_s=timeouts.first_byte_s,
        idle_s=timeouts.idle_s,
        total_s=timeouts.total_s,
    )


def membership_settings(settings: Settings) -> MembershipSettings:
    """Periods of polls and probes, and whether load sockets are listened to."""
    return MembershipSettings(
        poll_s=settings.load.poll_s, refresh_s=settings.health.probe_s, load_sockets=settings.load.sockets
    )


def hedge_rules(settings: Settings) -> HedgeRules | None:
    """When a late request gets a second worker; None where none ever does."""
    retries = settings.retries
    rules = HedgeRules(
        retries.hedge_percentile,
        retries.hedge_floor_s,
        paths={path: (change.hedge_percentile, change.hedge_floor_s) for path, change in retries.paths.items()},
        models={model: (change.hedge_percentile, change.hedge_floor_s) for model, change in retries.models.items()},
    )
    return rules if rules.any else None


def edge_settings(settings: Settings, keys: Keys | None) -> EdgeSettings:
    """The client port's."""
    server, affinity, token = settings.server, settings.routing.affinity, settings.auth.admin_token
    return EdgeSettings(
        limits=EdgeLimits(
            header_timeout_s=server.header_timeout_s,
            body_timeout_s=server.body_timeout_s,
            idle_timeout_s=server.idle_timeout_s,
            max_header_bytes=server.max_header_bytes,
            max_body_bytes=server.max_body_bytes,
            max_buffered_bytes=server.max_buffered_bytes,
            max_connections=server.max_connections,
            max_retries=settings.retries.max,
        ),
        timeouts=PhaseTimeouts(
            worker_timeouts(settings),
            paths={path: phases.changes() for path, phases in settings.timeouts.paths.items()},
            models={model: phases.changes() for model, phases in settings.timeouts.models.items()},
        ),
        keys=keys,
        tenant_salt=settings.auth.tenant_salt,
        cors=Cors(server.cors_origins) if server.cors_origins else None,
        receipts=server.receipts,
        session_header=affinity.header.lower().encode(),
        session_field=affinity.body_field,
        admission=AdmissionSettings(
            hold_s=settings.routing.hold_s,
            queue_size=settings.admission.queue_size,
            queue_timeout_s=settings.admission.queue_timeout_s,
        ),
        hedges=hedge_rules(settings),
        debug_token=b"" if token is None else token.get_secret_value().encode(),
    )


def admin_settings(settings: Settings) -> AdminSettings:
    """The admin port's."""
    auth, affinity = settings.auth, settings.routing.affinity
    token = auth.admin_token
    return AdminSettings(
        token=token.get_secret_value() if token is not None else None,
        own_names=token is None and not auth.admin_open,
        tenant_salt=auth.tenant_salt,
        affinity_header=affinity.header.lower(),
        affinity_field=affinity.body_field,
        max_body_bytes=settings.server.max_body_bytes,
    )
