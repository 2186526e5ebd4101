"""The client port's HTTP/1.1 connections: uvicorn's protocol, with the inference paths taken out of its hands.

Rules:
1. POST on a path of `records.Endpoint` becomes an `Exchange`; every other request goes uvicorn's way to the ASGI app.
2. Answers leave in the order of their requests. A request that arrives before its turn waits: parsed, when it came in
   the same read, otherwise as bytes, at most `max_pipelined_bytes` of them; then reading pauses.
3. Each phase has a limit: head (time, bytes), body (time, bytes; those of all bodies together), idle; and the number of
   connections. What breaks one is answered once, in turn, and the connection ends; a refused upload is read on for
   `linger_s`, so that the answer is not lost in a reset.
4. A connection that is lost ends its exchanges in the same call.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import socket
import struct
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any

import httptools
from uvicorn.config import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

from gateway.edge.exchange import Exchange
from gateway.edge.gate import Edge
from gateway.edge.heads import check_head, endpoint_of, expects_continue
from gateway.edge.responses import HeaderTooLarge, InternalError, Overloaded, error_response
from gateway.errors import BadRequest, GatewayError, PayloadTooLarge, RequestTimeout
from gateway.records import Endpoint
from gateway.upstream.deadlines import NEVER

_log = logging.getLogger("kvgate.edge")

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_RESET = struct.pack("ii", 1, 0)
"""SO_LINGER: on, 0 seconds."""


class _Phase(Enum):
    IDLE = "between requests"
    HEAD = "reading a head"
    BODY = "reading a body"
    ANSWER = "answering"
    CLOSING = "reading on after a refusal, or flushing"


class ClientProtocol(HttpToolsProtocol):
    """One client connection. Made by the class that `client_protocol` returns."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
        *,
        edge: Edge,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.deadline = NEVER
        self.write_paused = False
        self._edge = edge
        self._limits = edge.settings.limits
        self._phase = _Phase.IDLE
        self._mid_message = False
        self._head_bytes = 0
        self._long_head = False
        """The head may be above its limit: worth adding up."""
        self._moved = False
        """The bytes just read brought some of a body, or the end of a request."""
        self._body_bytes = 0
        self._upgrading = False
        self._last_is_exchange = False
        """`self.cycle` is an exchange."""
        self._receiving: Exchange | None = None
        """Whose body is being read."""
        self._open: deque[Exchange] = deque()
        """Exchanges whose answer is not finished, in order."""
        self._turns: deque[Callable[[], None]] = deque()
        """What to start when the answers before are out."""
        self._backlog = bytearray()
        self._refusal: GatewayError | None = None
        """Answered when the answers before are out; nothing is read after it."""

    # ---------------------------------------------------------------- asyncio

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.write = transport.write
        self.deadline = self._edge.clock() + self._limits.header_timeout_s
        self._edge.deadlines.watch(self)
        self._edge.connections += 1
        if self._edge.connections > self._limits.max_connections:
            self._turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.deadlines.forget(self)
        self._edge.connections -= 1
        self._turns.clear()
        self._backlog.clear()
        if self._last_is_exchange:
            self.cycle = None  # type: ignore[assignment]  # uvicorn would look for its own cycle's event
        gone, self._open = self._open, deque()
        for exchange in gone:
            exchange.client_gone()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase is _Phase.CLOSING:
            return
        if self._answering() and not self._mid_message:
            self._backlog += data
            if len(self._backlog) > self._limits.max_pipelined_bytes:
                self.flow.pause_reading()
            return
        self._parse(data)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.write_paused = True
        if self._open:
            self._open[0].pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        self.write_paused = False
        if self._open:
            self._open[0].resume()

    def overdue(self, now: float) -> None:
        """A phase took too long (`upstream.deadlines.Watched`)."""
        self.deadline = NEVER
        match self._phase:
            case _Phase.HEAD:
                self._refuse(RequestTimeout("the request head did not arrive in time"))
            case _Phase.BODY if self._receiving is not None:
                self._stop_reading(RequestTimeout("the request body did not arrive in time"))
            case _Phase.CLOSING:
                self.transport.abort()
            case _:
                self.transport.close()

    # ---------------------------------------------------------------- reading

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _parse(self, data: bytes) -> None:
        phase = self._phase
        self._long_head = self._head_bytes + len(data) > self._limits.max_header_bytes
        self._moved = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            self._refuse(_refusal_of(error))
            return
        if self._phase is not phase:
            self._set_deadline()
        if self._phase is _Phase.HEAD and not self._moved:
            self._head_bytes += len(data)
            if self._long_head:
                self._refuse(HeaderTooLarge("the request head is too large"))
        elif self._phase is _Phase.BODY and phase is _Phase.BODY:
            # Chunk extensions and trailers, which the parser keeps, are no part of the body that is counted.
            self._head_bytes = 0 if self._moved else self._head_bytes + len(data)
            if self._head_bytes > self._limits.max_header_bytes:
                self._refuse(HeaderTooLarge("what stands around the request body is too large"))

    def _feed(self, data: bytes) -> None:
        """Give bytes to the parser; raises its errors. A loop, because each of many requests may offer an upgrade."""
        rest = memoryview(data)
        while self._phase is not _Phase.CLOSING:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                rest = rest[upgrade.args[0] :]
            self._without_upgrade()

    def _set_deadline(self) -> None:
        match self._phase:
            case _Phase.ANSWER:
                self.deadline = NEVER
            case _Phase.HEAD:
                self.deadline = self._edge.clock() + self._limits.header_timeout_s
            case _Phase.BODY:
                self.deadline = self._edge.clock() + self._limits.body_timeout_s
            case _Phase.IDLE:
                self.deadline = self._edge.clock() + self._limits.idle_timeout_s
            case _Phase.CLOSING:
                self.deadline = self._edge.clock() + self._limits.linger_s

    def _without_upgrade(self) -> None:
        """Upgrades are not offered: read the request again as if none had been asked (RFC 9110 7.8).

        Java's client asks for h2c with every first request; the parser stops at the end of such a head.
        """
        if self.parser.get_method() == b"CONNECT":
            self._refuse(BadRequest("CONNECT is not served here", code="bad_request"))
            return
        version = self.parser.get_http_version().encode()
        kept = [
            b"%b: %b\r\n" % (name, value)
            for name, value in self.headers
            if name not in (b"upgrade", b"http2-settings", b"connection")
        ]
        if any(name == b"connection" and b"close" in value.lower() for name, value in self.headers):
            kept.append(b"connection: close\r\n")
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (self.parser.get_method(), self.url, version, b"".join(kept))
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._upgrading = False
        self.parser.feed_data(head)

    # ---------------------------------------------------------------- parser callbacks

    def on_message_begin(self) -> None:
        self.url = b""
        self.headers = []
        self._mid_message = True
        self._head_bytes = 0
        self._limits = self._edge.settings.limits
        if self._phase is not _Phase.CLOSING:
            self._phase = _Phase.HEAD

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._phase is _Phase.CLOSING:
            return
        if self._long_head and sum(len(name) + len(value) for name, value in self.headers) > (
            self._limits.max_header_bytes
        ):
            raise HeaderTooLarge("the request head is too large")
        self._phase = _Phase.BODY
        self._head_bytes = 0
        if self.parser.should_upgrade():
            self._upgrading = True
            return
        endpoint, self.url = endpoint_of(self.url)
        if endpoint is None or self.parser.get_method() != b"POST":
            self._begin_asgi()
        else:
            self._begin_exchange(endpoint, self.url)

    def on_body(self, body: bytes) -> None:
        self._moved = True
        exchange = self._receiving
        if exchange is not None:
            self._body_bytes += len(body)
            if self._body_bytes > self._limits.max_body_bytes:
                self._stop_reading(_too_large(self._limits.max_body_bytes))
            elif self._edge.buffered_bytes + len(body) > self._limits.max_buffered_bytes:
                self._stop_reading(self._crowded())
            else:
                exchange.receive(body)
        elif self._phase is not _Phase.CLOSING:
            super().on_body(body)

    def on_message_complete(self) -> None:
        self._moved = True
        if self._upgrading:
            return
        self._mid_message = False
        if self._phase is _Phase.CLOSING:
            return
        self._phase = _Phase.ANSWER if self._answering() else _Phase.IDLE
        exchange, self._receiving = self._receiving, None
        if exchange is not None:
            exchange.received()
        else:
            super().on_message_complete()

    def _begin_asgi(self) -> None:
        url, headers = self.url, self.headers
        self._last_is_exchange = False
        super().on_message_begin()
        self.url, self.expect_100_continue = url, expects_continue(headers)
        self.headers.extend(headers)
        super().on_headers_complete()
        if self.pipeline:
            # uvicorn's own queue would stop reading, and with it the notice of a client that leaves.
            cycle, app = self.pipeline.pop()
            self._turns.append(functools.partial(self._start_asgi_task, cycle, app))
            self.flow.resume_reading()

    def _begin_exchange(self, endpoint: Endpoint, target: bytes) -> None:
        version = self.parser.get_http_version()
        http_1_0 = version == "1.0"
        # Trailers of a chunked body come through `on_header` too; they must not reach this request's headers.
        headers, self.headers = self.headers, []
        fields = dict(headers)
        if (
            http_1_0
            or version != "1.1"
            or b"host" not in fields
            or b"transfer-encoding" in fields
            or (len(fields) != len(headers))
        ):
            check_head(version, headers)
        exchange = Exchange(
            self._edge,
            self,
            self.loop,
            endpoint,
            target,
            headers,
            fields,
            http_1_0=http_1_0,
            keep_alive=not http_1_0 and self.parser.should_keep_alive(),
        )
        waits = self._answering()
        self.cycle = exchange  # type: ignore[assignment]  # uvicorn reads `keep_alive` and `response_complete` only
        self._last_is_exchange = True
        self._open.append(exchange)
        self._receiving = exchange
        self._body_bytes = 0
        if exchange.refusal is not None:
            self._stop_reading(exchange.refusal)
        elif exchange.declared_bytes > self._limits.max_body_bytes:
            self._stop_reading(_too_large(self._limits.max_body_bytes))
        elif exchange.declared_bytes + self._edge.buffered_bytes > self._limits.max_buffered_bytes:
            self._stop_reading(self._crowded())
        expects = b"expect" in fields and expects_continue(headers)
        if waits:
            self._turns.append(functools.partial(self._begin_turn, exchange, expects))
        else:
            self._begin_turn(exchange, expects)

    def _begin_turn(self, exchange: Exchange, expects: bool) -> None:
        if expects and not exchange.whole:
            self.write(_CONTINUE)
        exchange.start()

    # ---------------------------------------------------------------- ends

    def exchange_done(self, exchange: Exchange) -> None:
        """An exchange has written its answer (`exchange.Client`)."""
        if self._open and self._open[0] is exchange:
            self._open.popleft()
        if exchange.keep_alive:
            self.on_response_complete()
        elif self._mid_message or self._phase is _Phase.CLOSING:
            self._linger()
        else:
            self._close()

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        if self._turns:
            self._turns.popleft()()
        elif self._refusal is not None:
            self._send_refusal(self._refusal)
        elif self._backlog:
            data = bytes(self._backlog)
            self._backlog.clear()
            self.flow.resume_reading()
            self._phase = _Phase.IDLE
            self._parse(data)
        elif not self._mid_message:
            self._phase = _Phase.IDLE
            self._set_deadline()

    def cut(self, *, reset: bool) -> None:
        """Close with an answer that is not whole (`exchange.Client`)."""
        if reset:
            sock = self.transport.get_extra_info("socket")
            if sock is not None:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
            self.transport.abort()
        else:
            self._close()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's word for what its parser refuses."""
        self._refuse(BadRequest(msg))

    def _stop_reading(self, error: GatewayError) -> None:
        """The body being read is refused: its exchange answers, nothing more is read."""
        exchange, self._receiving = self._receiving, None
        self._phase = _Phase.CLOSING
        self.deadline = NEVER
        if exchange is not None:
            exchange.received(error)

    def _refuse(self, error: GatewayError) -> None:
        """What came is no request: say so when the answers before are out."""
        if self._phase is _Phase.CLOSING:
            return
        self._phase = _Phase.CLOSING
        self.deadline = NEVER
        if self._receiving is not None:
            self._stop_reading(error)
        elif self._answering():
            self._refusal = error
        else:
            self._send_refusal(error)

    def _send_refusal(self, error: GatewayError) -> None:
        receipts = b"x-request-id: %b\r\n" % self._edge.request_ids().encode()
        self.write(error_response(error, endpoint=None, receipts=receipts, keep_alive=False))
        self._linger()

    def _turn_away(self) -> None:
        """One connection too many: told why, or, when very many come, cut."""
        self._edge.turned_away += 1
        if self._edge.connections > self._limits.max_connections * 1.1 + 1:
            self._phase = _Phase.CLOSING
            self.transport.abort()
        else:
            self._refuse(Overloaded("the gateway holds as many connections as it may", retry_after_s=1))

    def _crowded(self) -> Overloaded:
        self._edge.turned_away += 1
        return Overloaded("the gateway holds as many request bodies as it may; try again", retry_after_s=1)

    def _linger(self) -> None:
        """Say that nothing more will be sent, and read on for a while before closing."""
        self._phase = _Phase.CLOSING
        self._set_deadline()
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        # Else, under TLS: the end cannot be told while reading goes on. The answer's length and `connection: close` do.

    def _close(self) -> None:
        """Close once everything written is out; a client that does not take it is cut."""
        self._phase = _Phase.CLOSING
        self.deadline = self._edge.clock() + self._edge.upstream.timeouts.idle_s
        self.transport.close()


def client_protocol(edge: Edge) -> type[HttpToolsProtocol]:
    """The class for `uvicorn.Config(http=...)`: client connections that belong to `edge`."""

    class EdgeClientProtocol(ClientProtocol):
        def __init__(
            self,
            config: Config,
            server_state: ServerState,
            app_state: dict[str, Any],
            _loop: asyncio.AbstractEventLoop | None = None,
        ) -> None:
            super().__init__(config, server_state, app_state, _loop, edge=edge)

    return EdgeClientProtocol


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the body is larger than {limit} bytes; the limit is server.max_body_bytes")


def _refusal_of(error: httptools.HttpParserError) -> GatewayError:
    """A parser error, or what a callback raised inside the parser."""
    match error.__context__:
        case None:
            return BadRequest(f"the request is not valid HTTP: {error}", code="invalid_http")
        case GatewayError() as refusal:
            return refusal
        case bug:
            _log.error("a client connection ended by a bug of the gateway", exc_info=bug)
            return InternalError()
