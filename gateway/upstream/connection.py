"""One HTTP/1.1 connection to a worker.

Rules:
1. A connection carries one request at a time. It goes back to the pool only when the answer ended exactly where its
   framing said, keep-alive was agreed, and the whole request was taken; anything doubtful is closed.
2. After the response head no task runs: `data_received` hands the body to the sink, once for each read. That path is
   measured in tenths of a microsecond: no clock is read on it, silence is found by `overdue` (see `_stirred`).
3. Between the head and the sink, at most one read limit of body waits here; then reading is paused.
4. Each phase has a deadline: sending, first byte, silence, total, idle age. While the client's side has paused
   reading, the worker is not charged for silence; the sink is told instead.
5. The end of a request is told exactly once: to the waiter before the answer begins, to the sink after it. A stream of
   events begins with the first byte of its body: engines send its head before they compute anything, so that a head
   shows nothing, and until then another worker may be tried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import httptools

from gateway.errors import DeadlineExceeded, GatewayError, WorkerBroken, WorkerTimeout
from gateway.upstream.deadlines import NEVER
from gateway.upstream.headers import AnswerHead, ends_with_connection, is_event_stream

if TYPE_CHECKING:
    # A connection knows its owner, which makes it.
    from gateway.upstream.connections import Timeouts, WorkerConnections

_MAX_HEAD_BYTES = 262_144
"""A response head beyond this is no inference worker's."""

_MAX_EARLY_BYTES = 262_144
"""Body kept while nobody takes it yet: the size of one read of uvloop."""

_JOIN_BELOW_BYTES = 65_536
"""Head and body go out in one write below this; above it copying costs more than a second write."""


_CHUNK_SIZES = {b"%x" % size: size for size in range(1, 0x1000)}
"""Sizes as this gateway writes them too: no leading zeros, no extensions, lower case."""


class Taker(NamedTuple):
    """What is called for the body behind its first bytes. `body` gets data and the number of chunks it came in.
    `chunk`, where the sink has a use for it, gets exactly one whole chunk with its framing, and where its data begins;
    that framing is the one this gateway would write itself."""

    body: Callable[[bytes, int], None]
    chunk: Callable[[bytes, int], None] | None


class AnswerSink(Protocol):
    """Takes the body of one answer."""

    def on_first(self, data: bytes, pieces: int, now: float) -> Taker:
        """The first bytes, which came in `pieces` chunks. Returns what is called for all others."""

    def on_end(self, now: float) -> None:
        """The answer ended where it should. Nothing follows."""

    def on_failure(self, error: GatewayError, now: float) -> None:
        """The answer broke off or stalled. Nothing follows."""

    def on_stalled_reader(self, now: float) -> None:
        """Reading has been paused for the whole idle time; the sink is expected to abort."""


class StaleConnection(Exception):
    """A kept connection was closed by the worker before any byte of an answer: the request may go out again."""


class Connection:
    """One connection; made by `WorkerConnections`, used through `http.UpstreamStream`. For the loop it is an
    `asyncio.Protocol`, without that class as its base: so it can be compiled (`setup.py`)."""

    __slots__ = (
        "_between_chunks",
        "_clock",
        "_doubtful",
        "_early_bytes",
        "_end_at",
        "_ended",
        "_failure",
        "_feed",
        "_head",
        "_head_bytes",
        "_headers",
        "_keep_alive",
        "_looked_at",
        "_loop",
        "_on_body",
        "_on_chunk",
        "_on_over",
        "_owner",
        "_parser",
        "_paused",
        "_pieces",
        "_quarters",
        "_reused",
        "_sending",
        "_sink",
        "_stirred",
        "_timeouts",
        "_total_at",
        "_transport",
        "_unseen",
        "_waiter",
        "_wrote_after",
        "deadline",
        "on_body",
    )

    def __init__(self, owner: WorkerConnections) -> None:
        self.deadline = NEVER
        self._owner = owner
        self._clock = owner.clock
        self._loop = asyncio.get_running_loop()  # asked for once: each time is a system call
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        # The parser calls this for each piece of a body: list.append in C, no Python frame.
        self.on_body = self._pieces.append
        self._parser = httptools.HttpResponseParser(self)
        self._feed = self._parser.feed_data
        self._headers: list[tuple[bytes, bytes]] = []
        self._on_over: Callable[[], None] | None = None
        self._reused = False
        self._sink: AnswerSink | None = None
        self._on_body: Callable[[bytes, int], None] | None = None
        """What the sink wants the body given to, once it has had the first bytes."""
        self._on_chunk: Callable[[bytes, int], None] | None = None
        self._stirred = False
        """Bytes have come since `overdue` or `wrote` looked last, which was at `_looked_at`."""
        self._unseen = False
        """They have come since `overdue` looked, or reading was paused until then."""
        self._looked_at = self._wrote_after = -NEVER
        """Of the body being passed on, bytes have come after `_wrote_after`."""
        self._quarters = 0
        """Quarters of the idle time without bytes."""
        self._waiter: asyncio.Future[AnswerHead] | None = None
        self._timeouts = owner.timeouts
        self._total_at = NEVER
        self._reset()

    def _reset(self) -> None:
        self._head: AnswerHead | None = None
        self._head_bytes = 0
        self._early_bytes = 0
        self._ended = False
        self._end_at = 0
        self._keep_alive = False
        self._doubtful = False
        self._failure: GatewayError | None = None
        self._paused = False
        self._sending = False
        """The worker has not taken all of the request yet."""
        self._between_chunks = False
        """All that was read so far ends with a whole chunk, so the next byte begins one."""

    @property
    def closing(self) -> bool:
        """No request may be sent on it any more."""
        return self._transport is None or self._transport.is_closing()

    # ---------------------------------------------------------------- one request

    def send(
        self, head: bytes, body: bytes, *, timeouts: Timeouts, total_at: float, on_over: Callable[[], None]
    ) -> asyncio.Future[AnswerHead]:
        """Write a request. The future gives the head of the answer once it begins (rule 5) or raises StaleConnection,
        WorkerError or DeadlineExceeded.

        `on_over` is called once, when this connection has nothing more to do with the request.
        """
        assert self._transport is not None
        now = self._clock()
        self._timeouts, self._total_at = timeouts, total_at
        self.deadline = min(now + timeouts.first_byte_s, total_at)
        self._on_over = on_over
        self._waiter = self._loop.create_future()
        if len(body) < _JOIN_BELOW_BYTES:
            self._transport.write(head + body)
        else:
            self._transport.write(head)
            self._transport.write(body)
        return self._waiter

    def relay_to(self, sink: AnswerSink) -> None:
        """Give the body to `sink`, beginning with what came along with the head."""
        now = self._clock()
        self._sink = sink
        self._watch_silence(now)
        self._wrote_after = -NEVER
        if self._early_bytes > _MAX_EARLY_BYTES:
            self.resume()
        if self._ended:
            self._finish(now)
        elif self._failure is not None:
            self._break(self._failure, now)
        elif self._pieces:
            self._deliver(sink)

    def pause(self) -> None:
        """Stop reading until `resume`: the client takes no more."""
        if not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._paused and self._transport is not None:
            self._paused = False
            self._unseen = True
            self._transport.resume_reading()

    def wrote(self, since: float, now: float) -> bool:
        """Whether bytes of a body that is being passed on have come after `since`, when this was asked before."""
        if self._sink is None:
            return False
        self._look(now)
        return self._wrote_after >= since

    def abort(self) -> None:
        """Drop the connection now; nobody is told. The worker sees its request aborted."""
        self._sink = self._on_body = self._on_chunk = None
        self._waiter = None
        self._pieces.clear()
        if self._transport is not None:
            self._transport.abort()
        self._over()

    def shut(self) -> None:
        """Drop the connection because the gateway ends, and tell whoever waits."""
        self._break(WorkerBroken("the gateway is shutting down"), self._clock())

    # ---------------------------------------------------------------- asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]  # create_connection makes full transports
        # Until a request is sent: a connection whose task was cancelled at this moment must not stay.
        self.deadline = self._clock() + self._owner.timeouts.pool_idle_s
        self._owner.deadlines.watch(self)

    def pause_writing(self) -> None:
        """A long request fills the worker's side: it has its own limit."""
        if self._waiter is not None and self._head is None:
            self._sending = True
            self.deadline = min(self._clock() + self._timeouts.send_s, self._total_at)

    def resume_writing(self) -> None:
        """All but a rest has been taken: now it may think."""
        if self._sending:
            self._sending = False
            if self._waiter is not None and self._head is None:
                self.deadline = min(self._clock() + self._timeouts.first_byte_s, self._total_at)

    def data_received(self, data: bytes) -> None:
        on_chunk = self._on_chunk
        if on_chunk is not None and self._between_chunks:
            # One token of a stream is one chunk in one read, nearly always: then there is nothing to parse.
            at = data.find(b"\r\n", 1, 5)
            size = _CHUNK_SIZES.get(data[:at])
            if size is not None and len(data) == at + size + 4 and data[-2:] == b"\r\n":
                self._stirred = True
                on_chunk(data, at + 2)
                return
        feed = self._feed
        try:
            feed(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            if not self._ended:
                now = self._clock()
                if self._head is not None and self._waiter is not None:
                    # The answer may have begun in this very read: then it is no attempt to repeat elsewhere.
                    self._received_early(len(data), now)
                self._break(WorkerBroken("the worker's answer is not valid HTTP"), now)
                return
            # Rubbish behind a complete answer: the answer stands, the connection does not.
            self._doubtful = True
        self._stirred = True
        if data[-1:] != b"\n":
            # Perhaps the first digits of a size: only the parser knows them.
            self._between_chunks = False
        on_body = self._on_body
        pieces = self._pieces
        if on_body is not None and len(pieces) == 1 and not self._ended:
            on_body(pieces.pop(), 1)
        elif self._sink is None:
            self._received_early(len(data), self._clock())
        elif self._ended:
            self._finish(self._clock())
        elif pieces:
            self._deliver(self._sink)

    def eof_received(self) -> None:
        """The worker sends no more: closed, then."""

    def connection_lost(self, exc: Exception | None) -> None:
        self._owner.lost(self)
        self._transport = None
        now = self._clock()
        if exc is None and not self._ended and self._head is not None and ends_with_connection(self._head):
            self._ended = True
            self._end_at = len(self._pieces)
            if self._sink is not None:
                self._finish(now)
            elif self._waiter is not None:
                self._break(WorkerBroken("the worker ended its stream without an event"), now)
            return
        if self._waiter is not None and self._reused and not self._head_bytes:
            self._fail_waiter(StaleConnection())
        else:
            self._break(WorkerBroken("the worker closed the connection before its answer was complete"), now)

    def overdue(self, now: float) -> None:
        """A phase took too long, or a quarter of the idle time has passed."""
        if self._waiter is not None:
            if now >= self._total_at:
                self._break(DeadlineExceeded.passed(), now)
            elif self._sending:
                self._break(WorkerTimeout("the worker did not take the request in time", code="send_timeout"), now)
            else:
                self._break(WorkerTimeout("the worker did not begin to answer in time"), now)
        elif self._sink is None and self._head is None:
            # Idle in the pool for long enough.
            self._owner.lost(self)
            if self._transport is not None:
                self._transport.close()
        elif now >= self._total_at:
            self._break(DeadlineExceeded.passed(), now)
        elif self._stirred or self._unseen:
            self._watch_silence(now)
        elif self._quarters < 4:
            self._quarters += 1
            self.deadline = min(now + self._timeouts.idle_s / 4, self._total_at)
        elif self._paused and self._sink is not None:
            self._sink.on_stalled_reader(now)
        else:
            self._break(WorkerTimeout("the worker stopped in the middle of its answer"), now)

    def _look(self, now: float) -> None:
        if self._stirred:
            self._stirred, self._unseen = False, True
            self._wrote_after = self._looked_at
        self._looked_at = now

    def _watch_silence(self, now: float) -> None:
        self._look(now)
        self._unseen = False
        self._quarters = 1
        self.deadline = min(now + self._timeouts.idle_s / 4, self._total_at)

    # ---------------------------------------------------------------- parser callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._head is None:
            self._headers.append((name, value))
        # Else a trailer: not passed on, and no header of the next answer on this connection.

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        headers, self._headers = self._headers, []
        if status < 200:
            # 100 or 103: the answer itself follows.
            return
        if self._head is not None or self._waiter is None:
            # An answer nobody asked for.
            self._doubtful = True
            return
        self._head = AnswerHead(status, headers)

    def on_chunk_header(self) -> None:
        self._between_chunks = False

    def on_chunk_complete(self) -> None:
        self._between_chunks = True

    def on_message_complete(self) -> None:
        if self._head is None or self._ended:
            return
        self._ended = True
        self._end_at = len(self._pieces)
        self._keep_alive = self._parser.should_keep_alive()

    # ---------------------------------------------------------------- inside

    def _received_early(self, size: int, now: float) -> None:
        """Bytes before anybody takes a body."""
        self._head_bytes += size
        if self._head is None:
            if self._waiter is None or self._doubtful:
                self._doubtful = True
                self._break(WorkerBroken("the worker sent bytes nobody asked for"), now)
            elif self._head_bytes > _MAX_HEAD_BYTES:
                self._break(WorkerBroken("the head of the worker's answer is too long"), now)
            return
        if self._pieces or not is_event_stream(self._head):
            self._begin()
        elif self._ended:
            self._break(WorkerBroken("the worker ended its stream without an event"), now)
            return
        self._early_bytes += size
        if self._early_bytes > _MAX_EARLY_BYTES:
            self.pause()

    def _begin(self) -> None:
        """The answer begins: whoever waits gets its head."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            assert self._head is not None
            waiter.set_result(self._head)

    def _deliver(self, sink: AnswerSink) -> None:
        """Hand over what has been parsed. The fast way is in `data_received`."""
        count = len(self._pieces)
        body = b"".join(self._pieces)
        self._pieces.clear()
        if self._on_body is not None:
            self._on_body(body, count)
        else:
            self._on_body, self._on_chunk = sink.on_first(body, count, self._clock())

    def _finish(self, now: float) -> None:
        """The answer has ended properly; give the connection back before telling the sink."""
        sink, self._sink = self._sink, None
        on_body, self._on_body = self._on_body, None
        self._on_chunk = None
        assert sink is not None
        pieces = self._pieces
        count = self._end_at
        extra = len(pieces) - count
        body = pieces[0] if count == 1 else b"".join(pieces[:count])
        pieces.clear()
        transport = self._transport
        if transport is not None:
            reusable = (
                self._keep_alive
                and not self._doubtful
                and not extra
                and not transport.is_closing()
                and not transport.get_write_buffer_size()
            )
            if self._paused:
                self.resume()
            self._reset()
            if reusable:
                self._reused = True
                self.deadline = now + self._owner.timeouts.pool_idle_s
                self._owner.keep(self)
            else:
                transport.close()
        self._over()
        if body:
            if on_body is not None:
                on_body(body, count)
            else:
                sink.on_first(body, count, now)
        sink.on_end(now)

    def _break(self, error: GatewayError, now: float) -> None:
        """Drop the connection and tell whoever waits, after the body that had come."""
        if self._transport is not None:
            self._transport.abort()
        sink = self._sink
        if self._waiter is not None:
            self._fail_waiter(error)
        elif sink is None:
            # The head has been handed out and the sink is about to come.
            self._failure = error
        else:
            if self._pieces:
                self._deliver(sink)
            self._sink = self._on_body = self._on_chunk = None
            self._over()
            sink.on_failure(error, now)

    def _fail_waiter(self, error: Exception) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_exception(error)

    def _over(self) -> None:
        on_over, self._on_over = self._on_over, None
        if on_over is not None:
            on_over()
