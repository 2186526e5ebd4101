"""The admin port: metrics, fleet, sessions, decisions, explain. A FastAPI application over what `AdminViews` names.

Rules:
1. It reads; what it changes are the fleet's members, through the runtime, their health (drain, undrain, reset), their
   part of the index (resync) and where a session is.
2. Handlers are `async def` and run on the loop thread, where the core lives; nothing in them waits except probing
   and tokenising, which happen elsewhere.
3. Who may use it is said in `guard`.
4. Errors have OpenAI's shape, like those of the client port.
5. Nothing is loaded from elsewhere: FastAPI's own documentation pages would be, so there is the schema alone, and
   docs/reference/admin-api.md made of it.
"""

from __future__ import annotations

from importlib import metadata

from fastapi import Depends, FastAPI
from fastapi.routing import APIRoute

from gateway.admin.answer import ErrorAnswer
from gateway.admin.decisions import EXPLAIN_PATH, decision_routes
from gateway.admin.failures import map_errors
from gateway.admin.guard import Guard, token_check
from gateway.admin.page import page_routes
from gateway.admin.state import probe_routes, session_routes, state_routes
from gateway.admin.views import AdminViews
from gateway.admin.workers import worker_routes

SCHEMA_PATH = "/admin/openapi.json"


def admin_app(views: AdminViews) -> FastAPI:
    """The application; the runtime serves it on the admin port."""
    app = FastAPI(
        title="kvgate admin",
        version=metadata.version("kvgate"),
        summary="Metrics, fleet and decisions of one kvgate process.",
        responses={"4XX": {"model": ErrorAnswer}},
        openapi_url=SCHEMA_PATH,
        docs_url=None,
        redoc_url=None,
        generate_unique_id_function=_operation_id,
    )
    app.add_middleware(Guard, own_names=lambda: views.settings().own_names, unlimited=(EXPLAIN_PATH,))
    map_errors(app)
    app.include_router(page_routes())
    app.include_router(probe_routes(views))
    guarded = [Depends(token_check(lambda: views.settings().token))]
    for routes in (state_routes, session_routes, decision_routes, worker_routes):
        app.include_router(routes(views), dependencies=guarded)
    return app


def _operation_id(route: APIRoute) -> str:
    """The name of the function: what generated clients call."""
    return route.name
