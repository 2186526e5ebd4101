"""Answers say which gateway gave them, so that one that is named as a worker of itself is found when it is probed."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gateway.upstream.control import GATEWAYS_HEADER


class Signed:
    """`app`, whose every answer has `GATEWAYS_HEADER`; inference does not come this way."""

    def __init__(self, app: ASGIApp, gateways: Callable[[], Iterable[str]]) -> None:
        self._app = app
        self._gateways = gateways

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""

        async def signed(message: Message) -> None:
            if message["type"] == "http.response.start":
                name = GATEWAYS_HEADER.encode(), ",".join(self._gateways()).encode("latin-1", "replace")
                message["headers"] = [*message.get("headers", ()), name]
            await send(message)

        await self._app(scope, receive, signed)
