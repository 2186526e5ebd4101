"""The one seam that turns a GatewayError into bytes for a client.

Shapes: OpenAI's `{"error": {"message", "type", "code", "param"}}`; on `/v1/messages` Anthropic's
`{"type": "error", "error": {"type", "message"}}`. `retry-after` is written in whole seconds when the error knows it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from http import HTTPStatus

import msgspec

from gateway.errors import GatewayError, PayloadTooLarge
from gateway.records import Endpoint
from gateway.upstream.headers import STATUS_LINES
from gateway.upstream.sse import next_sequence

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


EXPOSED_HEADERS = (
    "x-request-id",
    "x-kvgate-worker",
    "x-kvgate-predicted-tokens",
    "x-kvgate-retries",
    "x-kvgate-decision",
    "retry-after",
)
"""Headers of answers that the script of a web page may read."""


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


def error_event_json(error: GatewayError, endpoint: Endpoint, *, last: bytes) -> bytes:
    """What the event that ends a broken stream carries; `last` are the stream's last bytes.

    Streams of `/v1/responses` have an event of their own for it: flat, numbered, and named like Anthropic's.
    """
    if endpoint is not Endpoint.RESPONSES:
        return error_json(error, endpoint)
    told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return msgspec.json.encode(told | {"sequence_number": next_sequence(last)})


def error_headers(error: GatewayError) -> dict[str, str]:
    """`retry-after` when the error knows when to come back, in whole seconds and at least one; for a missing key the
    scheme it is to be sent with."""
    if error.status == HTTPStatus.UNAUTHORIZED:
        return {"www-authenticate": "Bearer"}
    if error.retry_after_s is None:
        return {}
    return {"retry-after": str(max(1, math.ceil(error.retry_after_s)))}


class Cors:
    """Which web pages may read the answers (Fetch standard 3.2); never with a browser's own credentials (cookies)."""

    __slots__ = ("_lines", "origins")

    def __init__(self, origins: Iterable[str]) -> None:
        """`*` among them allows all."""
        self.origins = tuple(origins)
        exposed = f"access-control-expose-headers: {', '.join(EXPOSED_HEADERS)}\r\n"
        self._lines = {
            origin.encode(): f"access-control-allow-origin: {origin}\r\nvary: origin\r\n{exposed}".encode()
            for origin in self.origins
        }

    def lines(self, origin: bytes | None) -> bytes:
        """Header lines of the answer to a request from this origin; none for one that is not allowed."""
        if origin is None:
            return b""
        return self._lines.get(b"*") or self._lines.get(origin, b"")


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
