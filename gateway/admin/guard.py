"""Who may use the admin port, and what a browser is told about its answers.

Rules:
1. With a token everything but `/health`, `/ready` and the documentation needs it; it is compared in constant time.
2. Without one the port is the machine's own, and stays it in a browser too: a request must name an address or
   `localhost` as its host. A page of another site that has its own name point here (DNS rebinding) does not.
3. No answer may be framed, kept by a cache, or taken for another type than it says.
4. A body is read before the token is looked at, so a long one is refused whoever sends it: above `MOST_BODY_BYTES`,
   except where a path has a limit of its own, behind the token (`/admin/explain`).
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable, Container

from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.errors import GatewayError

MOST_BODY_BYTES = 65_536
"""An entry of `workers` has some hundred."""

_HEADERS = {
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "content-security-policy": "frame-ancestors 'none'; base-uri 'none'",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class Unauthorized(GatewayError):
    """The token is missing or wrong."""

    status = 401
    type = "authentication_error"
    code = "invalid_admin_token"


class ForeignHost(GatewayError):
    """The admin port, which has no token, is asked by a name that is not the machine's own."""

    status = 403
    type = "permission_error"
    code = "foreign_host"


def token_check(token: Callable[[], str | None]) -> Callable[[Request], Awaitable[None]]:
    """A dependency for what needs the token in force, if there is one."""

    async def check(request: Request) -> None:
        expected = token()
        if expected is None:
            return
        given = request.headers.get("authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {expected}".encode()):
            raise Unauthorized("send the admin token: authorization: Bearer <auth.admin_token>")

    return check


class Guard:
    """Around the whole application. `own_names`: rule 2 holds now; `unlimited` are the paths that limit bodies
    themselves."""

    def __init__(self, app: ASGIApp, *, own_names: Callable[[], bool], unlimited: Container[str]) -> None:
        self._app = app
        self._own_names = own_names
        self._unlimited = unlimited

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or refuse, one request."""

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        if scope["type"] == "http" and self._own_names() and not is_own(Headers(scope=scope).get("host", "")):
            error = ForeignHost("ask the admin port by its address or as localhost, or set auth.admin_token")
            body = {"message": error.message, "type": error.type, "code": error.code, "param": None}
            await JSONResponse({"error": body}, status_code=error.status)(scope, receive, guarded)
            return
        limited = scope["type"] == "http" and scope["path"] not in self._unlimited
        await self._app(scope, _up_to(MOST_BODY_BYTES, receive) if limited else receive, guarded)


def _up_to(limit: int, receive: Receive) -> Receive:
    """The same messages; a body above the limit ends the request with 413."""
    size = 0

    async def received() -> Message:
        nonlocal size
        message = await receive()
        size += len(message.get("body", b""))
        if size > limit:
            raise HTTPException(413, f"the body is longer than {limit} bytes")
        return message

    return received


def is_own(host: str) -> bool:
    """Whether a `host` header is an address or `localhost`, with a port or without: no name that somebody else could
    have point here."""
    name = host.strip().lower()
    if name.startswith("["):
        name = name[1:].partition("]")[0]
    elif name.count(":") == 1:
        name = name.partition(":")[0]
    if name in ("localhost", ""):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
