"""The rest of the client port: model list, health, readiness, and errors in OpenAI's shape.

The inference paths never come here when the method is POST; other methods on them are answered with 405. There are no
documentation pages on this port.
"""

from __future__ import annotations

from collections.abc import Callable
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.middleware.cors import CORSMiddleware
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Receive, Scope, Send

from gateway.edge.gate import EdgeSettings
from gateway.edge.responses import EXPOSED_HEADERS, Cors, MethodNotAllowed, error_headers, error_object
from gateway.errors import GatewayError, NotFound, UnknownModel
from gateway.pool import ServedModel
from gateway.records import Endpoint

_INFERENCE_PATHS = frozenset(endpoint.value for endpoint in Endpoint)


def client_app(
    models: Callable[[], list[ServedModel]],
    *,
    ready: Callable[[], bool],
    settings: Callable[[], EdgeSettings],
    started_unix: int = 0,
) -> FastAPI:
    """`models` are those shown, `started_unix` is their `created` time; `ready` says whether traffic may come. Of the
    `settings` in force: with `keys` models are shown to whom they are allowed; health and readiness are everybody's.
    With `cors` the browsers of web pages are told what they may send, also to the inference paths."""
    app = FastAPI(title="kvgate", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(_Pages, settings=settings)

    def allowed(request: Request) -> list[ServedModel]:
        keys = settings().keys
        if keys is None:
            return models()
        tenant = keys.find(dict(request.headers.raw), None)
        return [model for model in models() if tenant.may_use(model.name)]

    @app.get("/v1/models")
    async def list_models(request: Request) -> JSONResponse:
        shown = [_model(model, started_unix) for model in allowed(request)]
        return JSONResponse({"object": "list", "data": shown})

    @app.get("/v1/models/{name:path}")
    async def model(name: str, request: Request) -> JSONResponse:
        for served in allowed(request):
            if served.name == name:
                return JSONResponse(_model(served, started_unix))
        raise UnknownModel("no such model is served; GET /v1/models lists them", param="model")

    @app.get("/health")
    async def health() -> JSONResponse:
        """200 while the process lives; says nothing about workers."""
        return JSONResponse({"status": "ok"})

    @app.get("/ready")
    async def readiness() -> JSONResponse:
        """200 when traffic may come, else 503: at start, and while draining."""
        if ready():
            return JSONResponse({"status": "ready"})
        return JSONResponse({"status": "not_ready"}, status_code=503)

    @app.exception_handler(GatewayError)
    async def gateway_error(_request: Request, error: GatewayError) -> JSONResponse:
        return JSONResponse(error_object(error), status_code=error.status, headers=error_headers(error))

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        path = request.url.path
        headers = dict(error.headers or {})
        if path in _INFERENCE_PATHS:
            shown: GatewayError = MethodNotAllowed(f"{path} takes POST only")
            headers["allow"] = "POST"
        elif error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
            shown = MethodNotAllowed(f"{request.method} is not possible on {path}")
        else:
            shown = NotFound(f"there is nothing at {path}")
        return JSONResponse(error_object(shown), status_code=shown.status, headers=headers)

    return app


class _Pages:
    """Starlette's CORS around the application, as long as web pages may come at all; the origins may change."""

    def __init__(self, app: ASGIApp, *, settings: Callable[[], EdgeSettings]) -> None:
        self._app = app
        self._settings = settings
        self._cors: Cors | None = None
        self._around = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        cors = self._settings().cors
        if cors is not self._cors:
            self._cors, self._around = cors, self._app if cors is None else self._with(cors)
        await self._around(scope, receive, send)

    def _with(self, cors: Cors) -> ASGIApp:
        return CORSMiddleware(
            self._app,
            allow_origins=cors.origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=EXPOSED_HEADERS,
            max_age=600,
        )


def _model(model: ServedModel, created: int) -> dict[str, object]:
    """OpenAI's model object with vLLM's `root`, `parent` and `max_model_len`."""
    return {
        "id": model.name,
        "object": "model",
        "created": created,
        "owned_by": "kvgate",
        "root": model.base or model.name,
        "parent": model.base,
        "max_model_len": model.max_model_len,
    }
