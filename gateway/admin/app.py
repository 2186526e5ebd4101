"""The admin port: metrics, fleet, decisions, explain. A FastAPI application over what `AdminViews` names.

Rules:
1. It reads; what it changes are the fleet's members, through the runtime, and their health (drain, undrain, reset).
2. Handlers are `async def` and run on the loop thread, where the core lives; nothing in them waits except probing
   and tokenising, which happen elsewhere.
3. Who may use it is said in `guard`.
4. Errors have OpenAI's shape, like those of the client port.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import metadata
from itertools import islice
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from gateway.admin.answers import (
    DecisionAnswer,
    DecisionList,
    ErrorAnswer,
    Health,
    IndexAnswer,
    JoiningAnswer,
    PoolAnswer,
    PoolList,
    Readiness,
    SessionsAnswer,
    WorkerAnswer,
    WorkerList,
)
from gateway.admin.guard import Guard, Unauthorized, token_check
from gateway.api import parse_request
from gateway.errors import BadRequest, GatewayError, NotFound, PayloadTooLarge
from gateway.leases import Recent
from gateway.prefix import PromptHasher
from gateway.records import Endpoint, PrefixBlocks, PrefixMode, WorkerId, WorkerSpec
from gateway.router import Router
from gateway.settings import WorkerSettings
from gateway.telemetry import CONTENT_TYPE, Exposition, Readings

MAX_DECISIONS = 256
"""Most decisions one answer holds: with 64 workers each, rendering them takes 50 ms of the loop."""


_BYTES_A_TOKEN = 4
"""As the client port estimates a prompt whose tokens are not known."""


class IsRank(GatewayError):
    """A data-parallel rank cannot leave alone."""

    status = 409
    type = "invalid_request_error"
    code = "worker_is_rank"


@dataclass(frozen=True, slots=True)
class AdminViews:
    """What the admin port needs of the process.

    `hasher` gives a base model's hasher, None without one. `add_worker` probes and joins (raises WorkerTaken,
    ProbeFailed), `remove_worker` returns once no new request can go there. `members` are the names in use, also of
    workers that have not joined yet. `config` is the configuration with secrets masked. `affinity_header` (lower case)
    and `affinity_field` are where a session id is read. `own_names`: the port may be asked by address or as localhost
    only; `tenant_salt`: tenants have cache salts.
    """

    router: Router
    readings: Readings
    exposition: Exposition
    hasher: Callable[[str], PromptHasher | None]
    add_worker: Callable[[WorkerSpec], Awaitable[None]]
    remove_worker: Callable[[WorkerId], Awaitable[None]]
    members: Callable[[], Collection[WorkerId]]
    config: Callable[[], Mapping[str, Any]]
    ready: Callable[[], Readiness]
    clock: Callable[[], float]
    token: str | None = field(default=None, repr=False)
    own_names: bool = False
    tenant_salt: bool = False
    affinity_header: str = "x-session-id"
    affinity_field: str | None = None
    max_body_bytes: int = 67_108_864


def admin_app(views: AdminViews) -> FastAPI:
    """The application; the runtime serves it on the admin port."""
    app = FastAPI(
        title="kvgate admin",
        version=metadata.version("kvgate"),
        summary="Metrics, fleet and decisions of one kvgate process.",
        responses={"4XX": {"model": ErrorAnswer}},
    )
    app.add_middleware(Guard, own_names=views.own_names)
    _map_errors(app)
    app.include_router(_probes(views))
    guarded = [Depends(token_check(views.token))] if views.token else []
    app.include_router(_reading(views), dependencies=guarded)
    app.include_router(_deciding(views), dependencies=guarded)
    app.include_router(_members(views), dependencies=guarded)
    return app


# --------------------------------------------------------------------------- routes


def _probes(views: AdminViews) -> APIRouter:
    routes = APIRouter(tags=["probes"])

    @routes.get("/health")
    async def health() -> Health:
        """200 while the process lives."""
        return Health()

    @routes.get("/ready", responses={503: {"model": Readiness}})
    async def ready(response: Response) -> Readiness:
        """200 when clients may be sent here, else 503 with the reason."""
        readiness = views.ready()
        response.status_code = 200 if readiness.ready else 503
        return readiness

    return routes


def _reading(views: AdminViews) -> APIRouter:
    routes = APIRouter(tags=["state"])
    fleet = views.router.fleet

    @routes.get("/metrics", response_class=Response, responses={200: {"content": {"text/plain": {}}}})
    async def metrics() -> Response:
        """Prometheus text format."""
        return Response(views.exposition.render(), media_type=CONTENT_TYPE)

    @routes.get("/admin/workers")
    async def workers() -> WorkerList:
        """Every worker, by name."""
        now = views.clock()
        readings = {reading.worker: reading for reading in views.readings.workers()}
        feeds = {feed.worker: feed for feed in views.readings.feeds()}
        return WorkerList(
            workers=[
                WorkerAnswer.of(worker, readings.get(name), feeds.get(name), now)
                for name, worker in sorted(fleet.workers.items())
            ],
            joining=[
                JoiningAnswer(id=name, error=reading.error)
                for name, reading in sorted(readings.items())
                if name not in fleet.workers
            ],
        )

    @routes.get("/admin/workers/{worker_id}")
    async def worker(worker_id: str) -> WorkerAnswer:
        """One worker."""
        return _worker_answer(views, WorkerId(worker_id))

    @routes.get("/admin/pools")
    async def pools() -> PoolList:
        """Every served name with its workers and learned speeds."""
        return PoolList(pools=[PoolAnswer.of(pool) for _, pool in sorted(fleet.pools.items())])

    @routes.get("/admin/index")
    async def index() -> IndexAnswer:
        """Size of the block index, and what each worker holds."""
        return IndexAnswer.of(views.readings.index(), list(views.readings.workers()))

    @routes.get("/admin/sessions")
    async def sessions(id: str | None = None) -> SessionsAnswer:
        """Counts; `?id=` names the worker of one session."""
        return SessionsAnswer.of(views.router.sessions, id, views.clock())

    @routes.get("/admin/config")
    async def config() -> dict[str, Any]:
        """The configuration in force, secrets masked."""
        return dict(views.config())

    return routes


def _deciding(views: AdminViews) -> APIRouter:
    routes = APIRouter(tags=["decisions"])

    @routes.get("/admin/decisions")
    async def decisions(
        limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 20,
        request_id: str | None = None,
        worker: str | None = None,
    ) -> DecisionList:
        """Recent decisions, newest first; of one request (the x-request-id of its answer) or one worker."""
        now = views.clock()
        wanted = (
            recent
            for recent in views.router.recent()
            if request_id in (None, recent.decision.request_id) and worker in (None, recent.decision.worker)
        )
        return DecisionList(decisions=[DecisionAnswer.of(recent, now) for recent in islice(wanted, limit)])

    @routes.post(
        "/admin/explain",
        openapi_extra={"requestBody": {"content": {"application/json": {"schema": {"type": "object"}}}}},
    )
    async def explain(request: Request, path: str = Endpoint.CHAT.value, tenant: str | None = None) -> DecisionAnswer:
        """Where the inference body sent here would go, and every worker's terms. Nothing is run or reserved. `tenant`:
        whose request it is, where tenants have cache salts of their own."""
        try:
            endpoint = Endpoint(path)
        except ValueError as error:
            known = ", ".join(known.value for known in Endpoint)
            raise BadRequest(f"path {path!r} is no inference path; there are {known}", param="path") from error
        body = await _body(request, views.max_body_bytes)
        parse = partial(
            parse_request,
            endpoint,
            body,
            request_id="explain",
            session=request.headers.get(views.affinity_header),
            affinity_field=views.affinity_field,
            tenant=tenant,
            salted=views.tenant_salt,
        )
        asked = await asyncio.to_thread(parse)  # a long body takes a while
        pool = views.router.pool(asked.model)
        hasher = views.hasher(pool.model)
        if hasher is None:
            blocks = PrefixBlocks((), len(body) // _BYTES_A_TOKEN, pool.block_size, PrefixMode.NONE, "no_tokenizer")
        else:
            work = hasher.begin(
                asked,
                block_size=pool.block_size,
                adapter=pool.adapter,
                bytes_a_token=pool.rates.bytes_a_token,
            )
            if work.pending:
                await asyncio.to_thread(work.encode)
            blocks = work.blocks()
        now = views.clock()
        return DecisionAnswer.of(Recent(views.router.explain(asked, blocks, now)), now)

    return routes


def _members(views: AdminViews) -> APIRouter:
    routes = APIRouter(tags=["members"])

    @routes.post("/admin/workers", status_code=201, responses={503: {"model": ErrorAnswer}})
    async def add(settings: WorkerSettings) -> WorkerAnswer:
        """Probe a worker and let it join; the keys are those of `workers` in the configuration file. Where each of its
        data-parallel ranks is a worker, the answer shows the first."""
        spec = settings.spec({str(name) for name in views.members()})
        await views.add_worker(spec)
        return _worker_answer(views, next(iter(_workers_of(spec.name, views)), spec.name))

    @routes.delete("/admin/workers/{worker_id}", status_code=204)
    async def remove(worker_id: str) -> None:
        """Take a worker out, also one that has not joined yet. It gets no new requests; open ones run to their end.
        Data-parallel ranks go with their server: name that."""
        worker = views.router.fleet.workers.get(WorkerId(worker_id))
        if worker is not None and worker.spec.rank is not None:
            raise IsRank(f"{worker_id!r} is a rank of {worker.spec.member!r} and leaves with it: delete that")
        await views.remove_worker(_known(WorkerId(worker_id), views.members()))

    @routes.post("/admin/workers/{worker_id}/drain")
    async def drain(worker_id: str) -> WorkerList:
        """No new requests for a worker, or for all ranks of a server; open ones run to their end. It stays so, also
        over its restart, until `undrain`."""
        return _change(views, worker_id, partial(views.router.fleet.drain, on=True))

    @routes.post("/admin/workers/{worker_id}/undrain")
    async def undrain(worker_id: str) -> WorkerList:
        """New requests again."""
        return _change(views, worker_id, partial(views.router.fleet.drain, on=False))

    @routes.post("/admin/workers/{worker_id}/reset")
    async def reset(worker_id: str) -> WorkerList:
        """Forget what is held against a worker's health: its breaker closes at once, without a slow start."""
        return _change(views, worker_id, views.router.fleet.reset)

    return routes


def _change(views: AdminViews, worker_id: str, change: Callable[[WorkerId, float], None]) -> WorkerList:
    """Do something to a worker, or to all ranks of a server; how they are now."""
    workers = views.router.fleet.workers
    named = [WorkerId(worker_id)] if worker_id in workers else _workers_of(WorkerId(worker_id), views)
    if not named:
        _known(WorkerId(worker_id), workers)
    for name in named:
        change(name, views.clock())
    return WorkerList(workers=[_worker_answer(views, name) for name in named], joining=[])


def _known(worker_id: WorkerId, workers: Collection[WorkerId]) -> WorkerId:
    if worker_id not in workers:
        names = ", ".join(sorted(workers)) or "none"
        raise NotFound(f"no worker is named {worker_id!r}; there are: {names}", code="worker_not_found")
    return worker_id


def _workers_of(member: WorkerId, views: AdminViews) -> list[WorkerId]:
    """The data-parallel ranks that are workers of a server, in their order; itself, where it has none."""
    return [worker.id for worker in views.router.fleet.workers.values() if worker.spec.member == member]


def _worker_answer(views: AdminViews, worker_id: WorkerId) -> WorkerAnswer:
    workers = views.router.fleet.workers
    if worker_id not in workers and (ranks := _workers_of(worker_id, views)):
        raise NotFound(f"{worker_id!r} is the workers {', '.join(ranks)}; name one", code="worker_not_found")
    worker = workers[_known(worker_id, workers)]
    reading = next((reading for reading in views.readings.workers() if reading.worker == worker_id), None)
    feed = next((feed for feed in views.readings.feeds() if feed.worker == worker_id), None)
    return WorkerAnswer.of(worker, reading, feed, views.clock())


async def _body(request: Request, limit: int) -> bytes:
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > limit:
            raise PayloadTooLarge(f"the body is longer than {limit} bytes (server.max_body_bytes)")
    return bytes(parts)


# --------------------------------------------------------------------------- errors


def _map_errors(app: FastAPI) -> None:
    """The one place where errors become answers."""

    @app.exception_handler(GatewayError)
    async def gateway_error(_: Request, error: GatewayError) -> JSONResponse:
        answer = _error(error.status, error.message, error.type, error.code, error.param)
        if error.status == Unauthorized.status:
            answer.headers["www-authenticate"] = "Bearer"
        return answer

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"][1:]) or None
        message = f"{where}: {first['msg']}" if where else str(first["msg"])
        return _error(422, message, "invalid_request_error", "invalid_value", where)

    @app.exception_handler(HTTPException)
    async def http_error(_: Request, error: HTTPException) -> JSONResponse:
        code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "bad_request")
        return _error(error.status_code, str(error.detail), "invalid_request_error", code)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        # Starlette raises the error again after this answer, so the server logs it with its traceback.
        return _error(500, f"internal error: {type(error).__name__}", "server_error", "internal_error")


def _error(status: int, message: str, type_: str, code: str, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": type_, "code": code, "param": param}
    return JSONResponse({"error": error}, status_code=status)
