"""Reading, and sessions: metrics, pools, index, sessions, configuration, probes."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import APIRouter, Query, Response

from gateway.admin.prefix_answers import PrefixesAnswer
from gateway.admin.replica_answers import ReplicasAnswer
from gateway.admin.state_answers import (
    ConfigAnswer,
    Health,
    IndexAnswer,
    PoolAnswer,
    PoolList,
    Readiness,
    SessionAnswer,
    SessionsAnswer,
)
from gateway.admin.views import AdminViews
from gateway.errors import NotFound
from gateway.records import WorkerId
from gateway.telemetry import CONTENT_TYPE

_SessionId = Annotated[str, Query(min_length=1, description="The session, as its requests name it.")]


def probe_routes(views: AdminViews) -> APIRouter:
    """What a supervisor of the process asks; without the token."""
    routes = APIRouter(tags=["probes"])

    @routes.get("/health")
    async def get_health() -> Health:
        """200 while the process lives."""
        return Health()

    @routes.get("/ready", responses={503: {"model": Readiness}})
    async def get_readiness(response: Response) -> Readiness:
        """200 when clients may be sent here, else 503 with the reason."""
        readiness = views.ready()
        response.status_code = 200 if readiness.ready else 503
        return readiness

    return routes


def state_routes(views: AdminViews) -> APIRouter:
    """Metrics and what the process knows."""
    routes = APIRouter(tags=["state"])
    fleet = views.router.fleet

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def get_metrics() -> Response:
        """Prometheus text format."""
        pieces = []
        for piece in views.exposition.pieces():
            pieces.append(piece)
            await asyncio.sleep(0)  # streams go on
        return Response(b"".join(pieces), media_type=CONTENT_TYPE)

    @routes.get("/admin/pools")
    async def list_pools() -> PoolList:
        """Every served name with its workers and learned speeds."""
        readings = {reading.model: reading for reading in views.readings.pools()}
        return PoolList(pools=[PoolAnswer.of(pool, readings.get(name)) for name, pool in sorted(fleet.pools.items())])

    @routes.get("/admin/index")
    async def get_index() -> IndexAnswer:
        """Size of the block index, and what each worker holds."""
        return IndexAnswer.of(views.readings.index(), list(views.readings.workers()))

    @routes.get("/admin/prefixes")
    async def list_prefixes(
        limit: Annotated[int, Query(ge=1, le=256, description="Most applications, and most prefixes.")] = 20,
    ) -> PrefixesAnswer:
        """What prompts have in common: applications and where their prompts drift apart, the prefixes that save most
        and who holds them. Named by block keys; no text is kept."""
        return PrefixesAnswer.of(views.router, limit)

    @routes.get("/admin/replicas")
    async def get_replicas() -> ReplicasAnswer:
        """The store, and the other replicas heard over it."""
        return ReplicasAnswer.of(views.readings.replicas())

    @routes.get("/admin/config")
    async def get_config() -> ConfigAnswer:
        """The configuration in force, secrets masked, and what the file says otherwise."""
        return views.config()

    return routes


def session_routes(views: AdminViews) -> APIRouter:
    """Sessions: counted, and looked up, moved or forgotten one by one. They are never listed: their names are
    clients'."""
    routes = APIRouter(prefix="/admin/sessions", tags=["sessions"])
    fleet, sessions = views.router.fleet, views.router.sessions

    @routes.get("")
    async def get_sessions(
        id: Annotated[str | None, Query(description="Also where this session is.")] = None,
    ) -> SessionsAnswer:
        """How many sessions there are, by worker."""
        return SessionsAnswer.of(sessions, id, views.clock())

    @routes.put("")
    async def move_session(
        id: _SessionId, worker: Annotated[str, Query(description="Its new worker.")]
    ) -> SessionAnswer:
        """Draw the next requests of a session to another worker. It is a credit, not an order: where that worker is
        much busier, a request goes elsewhere."""
        if worker not in fleet.workers:
            raise NotFound(f"no worker is named {worker!r}", code="worker_not_found", param="worker")
        sessions.keep(id, WorkerId(worker), views.clock())
        return SessionAnswer(worker=WorkerId(worker))

    @routes.delete("")
    async def forget_session(id: _SessionId) -> SessionAnswer:
        """Forget where a session is; its next request goes where the score says."""
        if not sessions.forget(id):
            raise NotFound("no session of that name is remembered", code="session_not_found", param="id")
        return SessionAnswer(worker=None)

    return routes
