"""Errors of the admin port: those of its own, and the one place where errors become answers (`answer.ErrorAnswer`)."""

from __future__ import annotations

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from gateway.admin.guard import Unauthorized
from gateway.errors import GatewayError

_CLIENT_GONE = 499
"""nginx's code; nobody reads it."""


class IsRank(GatewayError):
    """A data-parallel rank cannot leave alone."""

    status = 409
    type = "invalid_request_error"
    code = "worker_is_rank"


class NothingToLearn(GatewayError):
    """There is nothing that could tell what the worker holds."""

    status = 409
    type = "invalid_request_error"
    code = "nothing_to_resync"


def map_errors(app: FastAPI) -> None:
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
        code = {404: "not_found", 405: "method_not_allowed", 413: "payload_too_large"}.get(
            error.status_code, "bad_request"
        )
        return _error(error.status_code, str(error.detail), "invalid_request_error", code)

    @app.exception_handler(ClientDisconnect)
    async def gone(_: Request, __: ClientDisconnect) -> Response:
        # In the middle of its body: nothing is wrong here, so there is nothing to log.
        return Response(status_code=_CLIENT_GONE)

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Exception) -> JSONResponse:
        # Starlette raises the error again after this answer, so the server logs it with its traceback.
        return _error(500, f"internal error: {type(error).__name__}", "server_error", "internal_error")


def _error(status: int, message: str, type_: str, code: str, param: str | None = None) -> JSONResponse:
    error = {"message": message, "type": type_, "code": code, "param": param}
    return JSONResponse({"error": error}, status_code=status)
