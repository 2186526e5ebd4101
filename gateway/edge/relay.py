"""The way of one answer's bytes from a worker to its client.

Rules:
1. Bytes go out in the call they came in with; no task, no queue. What the client cannot take yet is in its transport,
   bounded by pausing the worker's side.
2. The body is what the worker sent. Its framing is chosen for the client: the same length where the worker gave one,
   chunks for HTTP/1.1, connection close for HTTP/1.0.
3. The only event ever taken out of a stream is the usage event that the gateway asked for.
4. A broken stream of events ends with one error event and never with `[DONE]`, also when it is its last event that
   is missing and not the end of its framing; any other broken body, and one with a stated length, is cut, so that its
   framing shows that it is not whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from gateway.edge.responses import error_event_json
from gateway.errors import WORKER_BUSY, WORKER_STATUS, GatewayError, WorkerBroken, WorkerError
from gateway.records import Endpoint, Usage
from gateway.upstream.connection import Taker
from gateway.upstream.headers import (
    BODYLESS,
    EVENT_STREAM,
    STATUS_LINES,
    AnswerFields,
    AnswerHead,
    Framing,
    answer_fields,
)
from gateway.upstream.sse import LAST_BYTES, StreamEnd, UsageEventFilter, error_event, stream_end
from gateway.upstream.usage import AnswerTail

_LAST_CHUNK = b"0\r\n\r\n"
_NAMED_ERRORS = frozenset((Endpoint.MESSAGES, Endpoint.RESPONSES))
_TABLED = 4096
_CHUNK_HEADS = tuple(b"%x\r\n" % size for size in range(_TABLED))
"""Sizes of nearly all events; writing a hexadecimal number costs three times a look-up."""


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body. `data` must not be empty: that would be the end."""
    size = len(data)
    return b"".join((_CHUNK_HEADS[size] if size < _TABLED else b"%x\r\n" % size, data, b"\r\n"))


class RelayOwner(Protocol):
    """The exchange an answer belongs to."""

    def first_byte(self, now: float) -> None:
        """The first byte of a successful answer has come."""

    def answered(self, now: float) -> None:
        """The answer is with the client, whole."""

    def broken(self, error: GatewayError, *, told: bool, now: float) -> None:
        """The answer broke off; `told` when the client got an error event in its place."""

    def reader_stalled(self, now: float) -> None:
        """The client has not taken a byte for the whole idle time."""


class Relay:
    """Sink of one answer (`upstream.connection.AnswerSink`); made when its head is there."""

    __slots__ = (
        "_before",
        "_chunked",
        "_endpoint",
        "_events",
        "_filter",
        "_head",
        "_last",
        "_owner",
        "_success",
        "_tail",
        "_tells",
        "_write",
        "chunks",
        "closes",
        "fault",
        "first_byte_at",
        "last_byte_at",
        "status",
    )

    def __init__(
        self,
        owner: RelayOwner,
        write: Callable[[bytes], None],
        answer: AnswerHead,
        *,
        endpoint: Endpoint,
        receipts: bytes,
        cors: bytes = b"",
        hide_usage: bool,
        http_1_0: bool,
        keep_alive: bool,
    ) -> None:
        """`receipts` and `cors` are finished header lines (empty when they are off); `hide_usage`: the gateway asked
        for usage.

        Raises WorkerBroken for an answer whose body cannot be passed on.
        """
        fields = answer_fields(answer.headers, without_request_id=bool(receipts))
        if fields.transfer_coding not in (b"", b"chunked"):
            raise WorkerBroken("the worker used a transfer coding other than chunked")
        self.status = answer.status
        self.chunks = 0
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None
        self.fault: str | None = None
        """The code of what the worker says of itself: by its status, or by an error in its stream."""
        if answer.status >= 500:
            self.fault = WORKER_BUSY if answer.is_busy else WORKER_STATUS
        self._before = self._last = b""
        """The last bytes of a stream that has a filter, in two pieces; chunks may have their framing."""
        self._owner = owner
        self._write = write
        self._endpoint = endpoint
        self._success = 200 <= answer.status < 300
        self._events = fields.content_type.lower().startswith(EVENT_STREAM)
        self._filter = UsageEventFilter() if hide_usage and self._events else None
        self._tail = AnswerTail(endpoint, stream=self._events) if self._success and self._filter is None else None
        framing = self._framing(fields, http_1_0=http_1_0)
        self._chunked = framing is Framing.CHUNKED
        self._tells = self._events and framing in (Framing.CHUNKED, Framing.CLOSE)
        """A last event fits in; behind a stated length it would pass for a part of the answer, and without a body for
        the next one."""
        self.closes = framing is Framing.CLOSE or not keep_alive
        """The client's connection ends with this answer."""
        self._head = self._client_head(fields, framing, receipts + cors)

    def _framing(self, fields: AnswerFields, *, http_1_0: bool) -> Framing:
        if self.status in BODYLESS:
            return Framing.NONE
        if fields.content_length is not None and self._filter is None:
            return Framing.LENGTH
        return Framing.CLOSE if http_1_0 else Framing.CHUNKED

    def _client_head(self, fields: AnswerFields, framing: Framing, receipts: bytes) -> bytes:
        parts = [STATUS_LINES[self.status], fields.lines]
        if framing is Framing.LENGTH and fields.content_length is not None:
            parts += (b"content-length: ", fields.content_length, b"\r\n")
        elif framing is Framing.CHUNKED:
            parts.append(b"transfer-encoding: chunked\r\n")
        if self.status == 429 and not fields.has_retry_after:
            parts.append(b"retry-after: 1\r\n")
        if self.closes:
            parts.append(b"connection: close\r\n")
        parts += (receipts, b"\r\n")
        return b"".join(parts)

    # ---------------------------------------------------------------- sink

    def on_first(self, data: bytes, pieces: int, now: float) -> Taker:
        """The first bytes of the body go out in one write with the head; what follows from them is done after that."""
        self.chunks += pieces
        if self._filter is not None:
            self._remember(data)
            data = self._filter.feed(data)
        elif self._tail is not None:
            self._tail.add(data)
        self._write(self._head + (chunk(data) if self._chunked and data else data))
        self._head = b""
        if self._success:
            self.first_byte_at = now
            self._owner.first_byte(now)
        if self._filter is not None:
            return Taker(self._on_body_without_usage, self._on_chunk_without_usage if self._chunked else None)
        return Taker(self._on_body, self._on_chunk if self._chunked else None)

    def _on_body(self, data: bytes, pieces: int) -> None:
        self.chunks += pieces
        if self._tail is not None:
            self._tail.add(data)
        self._write(chunk(data) if self._chunked else data)

    def _on_body_without_usage(self, data: bytes, pieces: int) -> None:
        assert self._filter is not None
        self.chunks += pieces
        self._remember(data)
        data = self._filter.feed(data)
        if data:
            self._write(chunk(data) if self._chunked else data)

    def _on_chunk(self, data: bytes, start: int) -> None:
        self.chunks += 1
        if self._tail is not None:
            self._tail.add(data[start:-2])
        self._write(data)

    def _on_chunk_without_usage(self, data: bytes, start: int) -> None:
        # This runs for nearly every token of every stream, with cold caches each time: what is not needed is left out,
        # and callables are taken from slots before the call (CPython 3.11 does not specialise calls of slots).
        self.chunks += 1
        self._before = self._last
        self._last = data
        passing = self._filter
        if passing.holds or data.find(b'"usage"') >= 0 or data[-4:] != b"\n\n\r\n":  # type: ignore[union-attr]
            rest = passing.feed(data[start:-2])  # type: ignore[union-attr]
            if rest:
                self._write(chunk(rest))
            return
        write = self._write
        write(data)

    def on_end(self, now: float) -> None:
        """The framing of the worker's answer is whole: when its last event is there too, finish the client's."""
        if self._tells and self._success:
            begun = self._tail is None or self._tail.whole
            end = stream_end(self._endpoint, self._last_bytes(), whole=begun)
            if end is StreamEnd.CUT:
                self.on_failure(WorkerBroken("the worker ended its stream before its answer was complete"), now)
                return
            if end is StreamEnd.FAILED:
                self.fault = WorkerError.code
        self.last_byte_at = now
        rest = self._filter.finish() if self._filter is not None else b""
        if self._chunked:
            rest = chunk(rest) + _LAST_CHUNK if rest else _LAST_CHUNK
        if self._head or rest:
            self._write(self._head + rest)
            self._head = b""
        self._owner.answered(now)

    def on_failure(self, error: GatewayError, now: float) -> None:
        """The answer broke off: tell the client in the stream, or let it see that the body is cut."""
        if self._tells:
            # A half event is ended first, so that the error is an event of its own.
            last = self._last_bytes()
            whole = self._filter is not None or not last or last.endswith((b"\n\n", b"\n\r\n"))
            told = error_event_json(error, self._endpoint, last=last)
            event = (b"" if whole else b"\n\n") + error_event(told, named=self._endpoint in _NAMED_ERRORS)
            if self._chunked:
                event = chunk(event) + _LAST_CHUNK
            self._write(self._head + event)
            self._head = b""
        self._owner.broken(error, told=self._tells, now=now)

    def on_stalled_reader(self, now: float) -> None:
        """Passed on: only the exchange can give up a client."""
        self._owner.reader_stalled(now)

    def _remember(self, data: bytes) -> None:
        self._before, self._last = b"", (self._before + self._last + data)[-LAST_BYTES:]

    def _last_bytes(self) -> bytes:
        if self._filter is not None:
            return self._before + self._last
        return self._tail.last() if self._tail is not None else b""

    # ---------------------------------------------------------------- readings

    @property
    def unsent(self) -> bool:
        """The client has got nothing yet."""
        return bool(self._head)

    def send_head(self) -> None:
        """Send the head now, if no byte of the body has taken it along."""
        if self._head:
            self._write(self._head)
            self._head = b""

    def usage(self) -> Usage | None:
        """What the worker reported; to be read once the answer has ended."""
        if self._filter is not None:
            return self._filter.usage
        return self._tail.usage() if self._tail is not None else None
