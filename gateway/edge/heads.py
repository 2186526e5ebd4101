"""What the head of a request on the client port says, and what it must not leave open.

What two readers could take for different requests is refused: by the parser (llhttp in strict mode) both
`content-length` and `transfer-encoding`, two lengths, folded lines, bare line feeds and control characters; here a host
that is missing or given twice, and HTTP/1.0 with chunks.
"""

from __future__ import annotations

from typing import Any

import httptools

from gateway.edge.responses import UnsupportedCoding
from gateway.errors import BadRequest
from gateway.records import Endpoint
from gateway.upstream.headers import Headers

_ENDPOINTS = {endpoint.value.encode(): endpoint for endpoint in Endpoint}


def check_head(version: str, headers: Headers) -> None:
    """Raises for a request whose beginning two readers could take for different ones."""
    http_1_0 = version == "1.0"
    hosts = 0
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            if value.strip().lower() != b"chunked":
                raise UnsupportedCoding("the only transfer coding of a request is chunked")
            if http_1_0:
                raise BadRequest("HTTP/1.0 knows no transfer coding", code="invalid_http")
    if hosts != 1 and (hosts or not http_1_0):
        raise BadRequest("a request has one host header", code="invalid_http")
    if version != "1.1" and not http_1_0:
        raise BadRequest("the protocol is HTTP/1.1 or HTTP/1.0", code="invalid_http")


def expects_continue(headers: Headers) -> bool:
    """Whether the client waits for a word before it sends the body."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)


def endpoint_of(url: bytes) -> tuple[Endpoint | None, bytes]:
    """The endpoint of a request target, and the target in origin form: it may have come in absolute form.

    Raises BadRequest for what only looks like a target to the parser.
    """
    endpoint = _ENDPOINTS.get(url)
    if endpoint is not None:
        return endpoint, url
    try:
        parsed: Any = httptools.parse_url(url)  # its types promise bytes where it has None
    except httptools.HttpParserInvalidURLError as error:
        raise BadRequest("the request target is not a valid URL", code="invalid_http") from error
    path = parsed.path or b"/"
    return _ENDPOINTS.get(path), path + b"?" + parsed.query if parsed.query else path
