"""Copies of requests for the shadow version of a model, whose answers nobody sees.

Rules:
1. Off by default, and never in a request's way: `offer` takes a copy or drops it, and returns at once.
2. Bounded: so many copies wait, so many run, and none is larger than `max_body_bytes`.
3. A copy has a lease and an outcome like any request (its version's figures are what it is for), under a request id of
   its own. It has no session, is tried once, and takes nothing from its tenant's rates.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from gateway.api import ask_for_model
from gateway.edge.attempts import result_of
from gateway.edge.locate import locate
from gateway.errors import GatewayError
from gateway.leases import Lease
from gateway.records import Ending, Endpoint, InferenceRequest, Result, StageTimes, Usage
from gateway.upstream.connection import Taker
from gateway.upstream.headers import EVENT_STREAM, AnswerHead, RequestHead, answer_fields
from gateway.upstream.http import UpstreamStream
from gateway.upstream.usage import AnswerTail

if TYPE_CHECKING:
    # The edge offers to the shadows, and they use what it holds.
    from gateway.edge.gate import Edge


@dataclass(frozen=True, slots=True)
class ShadowLimits:
    """`concurrency` tasks run copies; `queue_size` more may wait."""

    concurrency: int = 8
    queue_size: int = 32
    max_body_bytes: int = 1_048_576


class _Copy(NamedTuple):
    request: InferenceRequest
    head: RequestHead
    body: bytes


class Shadows:
    """One for a process. `offer` is called from the request path; `run` is one of `concurrency` tasks of the
    supervisor."""

    def __init__(self, edge: Edge, *, rng: Random, limits: ShadowLimits | None = None) -> None:
        self.limits = limits or ShadowLimits()
        self.results: Counter[str] = Counter()
        """Copies by result: `answered`, `failed`, `unplaced` (nobody serves it, or it would have to wait), `dropped`
        (too many or too large)."""
        self._edge = edge
        self._rng = rng
        self._waiting: deque[_Copy] = deque()
        self._wake = asyncio.Event()

    def offer(self, asked: str, request: InferenceRequest, head: RequestHead, body: bytes) -> None:
        """A request for the client name `asked` is about to be sent, with this body."""
        model = self._edge.router.settings.routes.shadow(asked, self._rng)
        if model is None or model == request.model:
            return
        if len(self._waiting) >= self.limits.queue_size or len(body) > self.limits.max_body_bytes:
            self.results["dropped"] += 1
            return
        copied = replace(request, model=model, session=None, request_id=f"{request.request_id}-shadow")
        self._waiting.append(_Copy(copied, head, body))
        self._wake.set()

    async def run(self) -> None:
        """Send copies, one after the other, for ever."""
        while True:
            while not self._waiting:
                self._wake.clear()
                await self._wake.wait()
            await self._send(self._waiting.popleft())

    # ------------------------------------------------------------------ inside

    async def _send(self, copy: _Copy) -> None:
        edge, request = self._edge, copy.request
        started_at = edge.clock()
        try:
            pool = edge.router.pool(request.model)
            blocks, _ = await locate(edge, request, pool, body_bytes=len(copy.body))
            # Clients' requests come first: a copy takes no turn of theirs.
            lease = edge.turns.admission.at_once(request, blocks, edge.clock())
        except GatewayError:
            lease = None
        if lease is None:
            self.results["unplaced"] += 1
            return
        stream = edge.upstream.open(lease.worker.spec)
        sink = _Discard(request.endpoint, lease)
        result, status, code = Result.SHUT_DOWN, 0, None
        try:
            status = await self._answer(stream, sink, copy, started_at)
            result = Result.COMPLETED if status < 500 else Result.WORKER_FAILED
        except GatewayError as error:
            result, status, code = result_of(error), error.status, error.code
        finally:
            stream.abort()
            ending = Ending(
                result,
                status,
                edge.clock(),
                sink.usage() if result is Result.COMPLETED else None,
                sink.chunks,
                sink.first_byte_at,
                sink.last_byte_at,
                code,
            )
            outcome = lease.settle(ending, started_at=started_at, stages=StageTimes())
        self.results["answered" if result is Result.COMPLETED else "failed"] += 1
        edge.on_outcome(outcome)

    async def _answer(self, stream: UpstreamStream, sink: _Discard, copy: _Copy, started_at: float) -> int:
        """Its status, once it has ended. Raises GatewayError."""
        edge, request = self._edge, copy.request
        timeouts = edge.settings.timeouts.of(request.endpoint, request.model)
        body = ask_for_model(copy.body, request.model)
        answer = await stream.send(copy.head, body, timeouts=timeouts, total_at=started_at + timeouts.total_s)
        over: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        sink.begin(answer, over)
        stream.relay_to(sink)
        await over
        return answer.status


class _Discard:
    """Takes an answer and keeps its figures only."""

    __slots__ = ("_endpoint", "_lease", "_over", "_tail", "chunks", "first_byte_at", "last_byte_at")

    def __init__(self, endpoint: Endpoint, lease: Lease) -> None:
        self.chunks = 0
        self.first_byte_at: float | None = None
        self.last_byte_at: float | None = None
        self._endpoint = endpoint
        self._lease = lease
        self._tail: AnswerTail | None = None
        self._over: asyncio.Future[None] | None = None

    def begin(self, answer: AnswerHead, over: asyncio.Future[None]) -> None:
        """The answer begins; `over` is done when it ends."""
        self._over = over
        if 200 <= answer.status < 300:
            events = answer_fields(answer.headers, without_request_id=False).content_type.lower()
            self._tail = AnswerTail(self._endpoint, stream=events.startswith(EVENT_STREAM))

    def usage(self) -> Usage | None:
        """What the worker reported."""
        return self._tail.usage() if self._tail is not None else None

    def on_first(self, data: bytes, pieces: int, now: float) -> Taker:
        """The prefill is over."""
        if self._tail is not None:
            self.first_byte_at = now
            self._lease.first_byte(now)
        self._take(data, pieces)
        return Taker(self._take, None)

    def on_end(self, now: float) -> None:
        """It was whole."""
        self.last_byte_at = now
        self._finish(None)

    def on_failure(self, error: GatewayError, now: float) -> None:
        """It broke off."""
        self._finish(error)

    def on_stalled_reader(self, now: float) -> None:
        """Reading is never paused here."""

    def _take(self, data: bytes, pieces: int) -> None:
        self.chunks += pieces
        if self._tail is not None:
            self._tail.add(data)

    def _finish(self, error: GatewayError | None) -> None:
        over = self._over
        if over is None or over.done():
            return
        if error is None:
            over.set_result(None)
        else:
            over.set_exception(error)
