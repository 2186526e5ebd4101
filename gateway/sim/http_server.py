"""A small HTTP/1.1 server for simulated engines: cheap enough for thousands of streams in one process.

Rules:
1. One request, one `Reply`, finished once: `send` for a whole answer, or `open_stream`, `write`, `close`; `cut` drops
   the connection. After the end every call does nothing.
2. A connection that goes away before the end of its reply calls `on_gone` once, at once: that is how a client abort
   reaches the engine. Reading never pauses, or it would go unseen.
3. Requests sent ahead on a connection wait their turn, up to a limit.

No task a request: everything runs in protocol callbacks. Not a general server: no TLS, no routing, no compression.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from typing import cast
from urllib.parse import unquote

import httptools

MAX_BODY_BYTES = 256 << 20
MAX_PIPELINED = 32

_ACCEPT_TURNS = 4
"""Turns of the event loop, and one more, between accepting a connection and telling its protocol."""

JSON = "application/json"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request as it came; header names are lower case, of repeated ones the last counts."""

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


Handler = Callable[[HttpRequest, "Reply"], None]


class Reply:
    """The answer to one request. `done` once it is complete, cut, or the client is gone."""

    __slots__ = ("_chunked", "_connection", "_keep_alive", "done", "on_gone")

    def __init__(self, connection: Connection, *, keep_alive: bool, chunked: bool) -> None:
        self._connection = connection
        self._keep_alive = keep_alive
        self._chunked = chunked
        self.done = False
        self.on_gone: Callable[[], None] | None = None

    def send(
        self,
        status: int,
        body: bytes = b"",
        *,
        content_type: str | None = JSON,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """The whole answer at once."""
        if self.done:
            return
        head = self._head(status, content_type, headers, f"content-length: {len(body)}\r\n")
        self._connection.write(head + body)
        self._finish()

    def open_stream(self, *, headers: Mapping[str, str] | None = None) -> None:
        """The head of an event stream; `write` and `close` follow."""
        if self.done:
            return
        framing = "transfer-encoding: chunked\r\n" if self._chunked else ""
        self._keep_alive = self._keep_alive and self._chunked
        self._connection.write(self._head(200, EVENT_STREAM, headers, framing))

    def write(self, data: bytes) -> None:
        """One piece of an open stream."""
        if self.done:
            return
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data)
        self._connection.write(data)

    def close(self) -> None:
        """The regular end of an open stream."""
        if self.done:
            return
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")
        self._finish()

    def cut(self) -> None:
        """Drop the connection without an end. Counts as done: `on_gone` is not called."""
        if not self.done:
            self.done = True
            self._connection.abort()

    def lost(self) -> None:
        """The client went away."""
        if not self.done:
            self.done = True
            if self.on_gone is not None:
                self.on_gone()

    def _head(self, status: int, content_type: str | None, headers: Mapping[str, str] | None, framing: str) -> bytes:
        lines = [f"HTTP/1.1 {status} {_phrase(status)}\r\nserver: uvicorn\r\n", framing]
        if content_type is not None:
            lines.append(f"content-type: {content_type}\r\n")
        for name, value in (headers or {}).items():
            lines.append(f"{name}: {value}\r\n")
        if not self._keep_alive:
            lines.append("connection: close\r\n")
        lines.append("\r\n")
        return "".join(lines).encode("latin-1", "replace")

    def _finish(self) -> None:
        self.done = True
        self._connection.reply_done(keep_alive=self._keep_alive)


class Connection(asyncio.Protocol):
    """One client connection. Methods named `on_...` are callbacks of `httptools`."""

    def __init__(self, handler: Handler, server: HttpServer) -> None:
        self._handler = handler
        self._server = server
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._size = 0
        self._reply: Reply | None = None
        self._ahead: deque[tuple[HttpRequest, bool, bool]] = deque()

    # ---------------------------------------------------------------- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._server.joined(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.left(self)
        self._transport = None
        self._ahead.clear()
        reply, self._reply = self._reply, None
        if reply is not None:
            reply.lost()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.write(b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n")
            self._close()

    # ---------------------------------------------------------------- httptools

    def on_message_begin(self) -> None:
        self._url = b""
        self._headers = {}
        self._body = []
        self._size = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        if self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, body: bytes) -> None:
        self._size += len(body)
        if self._size > MAX_BODY_BYTES:
            self.abort()
            return
        self._body.append(body)

    def on_message_complete(self) -> None:
        path = unquote(self._url.partition(b"?")[0].decode("latin-1"))
        request = HttpRequest(self._parser.get_method().decode(), path, self._headers, b"".join(self._body))
        keep_alive = bool(self._parser.should_keep_alive())
        chunked = self._parser.get_http_version() != "1.0"
        if self._reply is None:
            self._begin(request, keep_alive, chunked)
        elif len(self._ahead) < MAX_PIPELINED:
            self._ahead.append((request, keep_alive, chunked))
        else:
            self.abort()

    # ---------------------------------------------------------------- for the reply

    def write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def abort(self) -> None:
        """Drop the connection now, with what is unsent."""
        if self._transport is not None:
            self._transport.abort()

    def reply_done(self, *, keep_alive: bool) -> None:
        self._reply = None
        if not keep_alive:
            self._close()
        elif self._ahead:
            self._begin(*self._ahead.popleft())

    def _begin(self, request: HttpRequest, keep_alive: bool, chunked: bool) -> None:
        reply = Reply(self, keep_alive=keep_alive, chunked=chunked)
        self._reply = reply
        self._handler(request, reply)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


class HttpServer:
    """Listens on one address and gives every request to `handler`."""

    def __init__(self, handler: Handler) -> None:
        self._handler = handler
        self._connections: set[Connection] = set()
        self._empty = asyncio.Event()
        self._empty.set()
        self._server: asyncio.Server | None = None
        self._stopping = False

    @property
    def connections(self) -> int:
        """Open client connections."""
        return len(self._connections)

    async def start(self, host: str, port: int) -> int:
        """Bind and listen; port 0 takes a free one. Returns the port. Raises OSError when it is taken."""
        loop = asyncio.get_running_loop()
        self._stopping = False
        self._server = await loop.create_server(lambda: Connection(self._handler, self), host, port, backlog=4096)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        """Stop listening and drop every connection."""
        if self._server is None:
            return
        self._stopping = True
        # First only accept no more: asyncio loses a connection, and leaves it open, that was accepted before its server
        # was closed and has its first turn behind that.
        for listener in self._server.sockets:
            asyncio.get_running_loop().remove_reader(listener.fileno())
        for _ in range(_ACCEPT_TURNS):
            await asyncio.sleep(0)
        self._server.close()
        self.drop_connections()
        await self._server.wait_closed()
        self._server = None
        await self._empty.wait()

    def joined(self, connection: Connection) -> None:
        """A connection is open. One accepted just before the listening ended is made after it: it is dropped here."""
        self._connections.add(connection)
        self._empty.clear()
        if self._stopping:
            connection.abort()

    def left(self, connection: Connection) -> None:
        """A connection is gone."""
        self._connections.discard(connection)
        if not self._connections:
            self._empty.set()

    def drop_connections(self) -> None:
        """Abort every open connection; their replies see their client gone."""
        for connection in list(self._connections):
            connection.abort()


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return "Status"
