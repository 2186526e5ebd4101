"""The one seam that turns a GatewayError into bytes for a client.

Shapes: OpenAI's `{"error": {"message", "type", "code", "param"}}`; on `/v1/messages` Anthropic's
`{"type": "error", "error": {"type", "message"}}`. `retry-after` is written in whole seconds when the error knows it.
"""

from __future__ import annotations

import math
from http import HTTPStatus

import msgspec

from gateway.errors import GatewayError, PayloadTooLarge
from gateway.records import Endpoint
from gateway.upstream.headers import STATUS_LINES

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class HeaderTooLarge(PayloadTooLarge):
    """The request's head is above its limit."""

    status = 431
    code = "header_too_large"


class UnsupportedCoding(GatewayError):
    """A body in a transfer coding other than chunked (RFC 9112 6.1)."""

    status = 501
    type = "invalid_request_error"
    code = "unsupported_transfer_coding"


class MethodNotAllowed(GatewayError):
    """The path exists, the method on it does not."""

    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class Overloaded(GatewayError):
    """The process carries as many requests as it may."""

    status = 503
    type = "service_unavailable_error"
    code = "overloaded"


class InternalError(GatewayError):
    """A bug of the gateway; the traceback is in its log, not in the answer."""

    def __init__(self) -> None:
        super().__init__("internal error in the gateway; its log has the details under this request id")


def error_object(error: GatewayError, endpoint: Endpoint | None = None) -> dict[str, object]:
    """The JSON object a client of this endpoint expects."""
    if endpoint is Endpoint.MESSAGES:
        kind = _ANTHROPIC_TYPES.get(error.status, "api_error")
        return {"type": "error", "error": {"type": kind, "message": error.message}}
    return {"error": {"message": error.message, "type": error.type, "code": error.code, "param": error.param}}


def error_json(error: GatewayError, endpoint: Endpoint | None = None) -> bytes:
    """The same as bytes."""
    return msgspec.json.encode(error_object(error, endpoint))


def error_headers(error: GatewayError) -> dict[str, str]:
    """`retry-after` when the error knows when to come back, in whole seconds and at least one; for a missing key the
    scheme it is to be sent with."""
    if error.status == HTTPStatus.UNAUTHORIZED:
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


def error_response(error: GatewayError, *, endpoint: Endpoint | None, receipts: bytes, keep_alive: bool) -> bytes:
    """A whole HTTP answer. `receipts` are finished header lines."""
    body = error_json(error, endpoint)
    extra = "".join(f"{name}: {value}\r\n" for name, value in error_headers(error).items()).encode()
    return b"%bcontent-type: application/json\r\ncontent-length: %d\r\n%b%b%b\r\n%b" % (
        STATUS_LINES[error.status],
        len(body),
        extra,
        receipts,
        b"" if keep_alive else b"connection: close\r\n",
        body,
    )
