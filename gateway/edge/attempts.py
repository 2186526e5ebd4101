"""The workers that one request is tried on, one after the other, until one begins to answer.

Rules:
1. A lease and the stream that serves it are taken in one step and given up in one step.
2. A worker that fails before its answer begins, or answers 429 or 5xx, is settled and not tried again for this request,
   nor are the other ranks of its server; another one is tried while there is one, at most `max_retries` times and while
   the pool's budget for retries lasts. Then the failure, or the worker's own answer, is the client's.
3. The first worker may have to be waited for (`admission`); the others are taken at once.
4. Where a rule says so, a second worker gets the request while the first is late (`hedge`); it counts as one of
   `max_retries` and against the budget.
5. `drop` is synchronous and may come at any moment; whoever holds the attempts settles the last lease.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from gateway.admission import Ticket
from gateway.api import ask_for_rank, ask_for_session
from gateway.edge.hedge import TRIED_ELSEWHERE, Race, Send, Settle, keeps_session
from gateway.edge.turns import Turn
from gateway.errors import (
    WORKER_BUSY,
    WORKER_STATUS,
    DeadlineExceeded,
    GatewayError,
    NoWorker,
    ShuttingDown,
    UnknownModel,
    WorkerError,
    WorkerTimeout,
)
from gateway.leases import Lease
from gateway.pool import HedgeRule
from gateway.records import (
    Ending,
    Endpoint,
    Hedged,
    InferenceRequest,
    Outcome,
    PrefixBlocks,
    Result,
    StageTimes,
    WorkerId,
)
from gateway.upstream.connections import Timeouts
from gateway.upstream.engine_sessions import engine_session
from gateway.upstream.headers import AnswerHead, RequestHead
from gateway.upstream.http import UpstreamStream

if TYPE_CHECKING:
    # The edge holds the open exchanges, which hold their attempts.
    from gateway.edge.gate import Edge, EdgeLimits

_NAME_SESSIONS = frozenset((Endpoint.CHAT, Endpoint.COMPLETIONS, Endpoint.GENERATE))


class Attempts:
    """Of one request. `lease` and `stream` are those of the last attempt, while it lasts."""

    __slots__ = (
        "_edge", "_limits", "_queued_at", "_race", "_ticket", "connected_at", "hedged", "lease", "queued_s",
        "reserved_at", "retries", "spent", "stream", "tried",
    )  # fmt: skip

    def __init__(self, edge: Edge, limits: EdgeLimits) -> None:
        self.lease: Lease | None = None
        self.stream: UpstreamStream | None = None
        self.retries = 0
        """Attempts that failed and were followed by another, or had one beside them that goes on."""
        self.spent = 0
        """Workers reserved beside the first."""
        self.hedged: Hedged | None = None
        """What became of the second copy, where there was one."""
        self.tried: frozenset[WorkerId] = frozenset()
        self.reserved_at: float | None = None
        self.connected_at: float | None = None
        """When a worker was chosen and when a connection to it was at hand."""
        self.queued_s = 0.0
        """How long it has waited for its turn."""
        self._queued_at: float | None = None
        self._ticket: Ticket | None = None
        self._edge = edge
        self._limits = limits
        self._race: Race | None = None

    async def first_answer(
        self,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        head: RequestHead,
        body: bytes,
        *,
        timeouts: Timeouts,
        started_at: float,
        total_at: float,
        stages: Callable[[], StageTimes],
        hedge: HedgeRule | None = None,
    ) -> AnswerHead:
        """The head of the answer that the client will get, once that answer begins. `timeouts` are those of this
        request, which is to be over at `total_at`; `hedge` says when it may have a second worker. Raises GatewayError
        when there is no answer."""
        edge = self._edge
        now = edge.clock()
        if now >= total_at:
            raise DeadlineExceeded.passed()
        stream = await self._first_turn(request, blocks, now, total_at)
        while True:
            try:
                if hedge is None:
                    placed = self._placed(body, request, self.lease)
                    answer = await stream.send(head, placed, timeouts=timeouts, total_at=total_at)
                else:
                    send = partial(self._send, head, body, request, timeouts, total_at)
                    answer = await self._hedged(hedge, request, blocks, send, partial(self._settle, started_at, stages))
            except WorkerError as error:
                ending = self.ending_of(error, edge.clock())
                other = self._another(request, blocks, ending, started_at, stages)
                if other is None:
                    raise
            else:
                if self.stream is stream:
                    self.connected_at = stream.connected_at
                if answer.status not in TRIED_ELSEWHERE:
                    return answer
                ending = self.ending_of(answer, edge.clock())
                other = self._another(request, blocks, ending, started_at, stages)
                if other is None:
                    return answer
            stream = other

    @staticmethod
    def ending_of(told: AnswerHead | WorkerError, now: float) -> Ending:
        """Of an attempt whose worker failed, or told of its state instead of answering."""
        if isinstance(told, WorkerError):
            return Ending(result_of(told), told.status, now, error_code=told.code)
        code = WORKER_BUSY if told.is_busy else WORKER_STATUS
        return Ending(Result.WORKER_FAILED, told.status, now, error_code=code)

    def exclude(self, lease: Lease) -> None:
        """Its worker is not tried again for this request."""
        self.tried |= self._edge.router.fleet.behind(lease.worker)

    def drop(self) -> None:
        """End the worker's work now, or the wait for one. The lease stays until it is settled."""
        self._leave_line()
        race, self._race = self._race, None
        if race is not None:
            race.close()
        stream, self.stream = self.stream, None
        if stream is not None:
            stream.abort()

    async def _hedged(
        self, rule: HedgeRule, request: InferenceRequest, blocks: PrefixBlocks, send: Send, settle: Settle
    ) -> AnswerHead:
        """As `send`, but that a second worker gets the request while the first is late by `rule`."""
        lease, stream = self.lease, self.stream
        assert lease is not None
        assert stream is not None
        hedging, kind, expected_s = lease.hedging, lease.kind, lease.expected_s()
        due_s = hedging.due_s(kind, expected_s, rule)
        may = self.hedged is None and self.spent < self._limits.max_retries and not keeps_session(lease.worker, request)
        if due_s is not None and may:
            race = self._race = Race(self, self._edge, rule, request, blocks, send=send, settle=settle)
            try:
                return await race.answer(lease, stream, expected_s=expected_s, due_s=due_s)
            finally:
                self._race = None
        answer = await send(lease, stream)
        if 200 <= answer.status < 300:
            hedging.began(kind, expected_s, self._edge.clock() - lease.sent_at)
        return answer

    def _send(
        self,
        head: RequestHead,
        body: bytes,
        request: InferenceRequest,
        timeouts: Timeouts,
        total_at: float,
        lease: Lease,
        stream: UpstreamStream,
    ) -> Coroutine[Any, Any, AnswerHead]:
        return stream.send(head, self._placed(body, request, lease), timeouts=timeouts, total_at=total_at)

    async def _first_turn(
        self, request: InferenceRequest, blocks: PrefixBlocks, now: float, total_at: float
    ) -> UpstreamStream:
        """At once, or after a wait at the gateway; the only wait that is not for the worker."""
        turn = Turn(self._take)
        ticket = self._edge.turns.admission.admit(request, blocks, now, until=total_at, waiter=turn)
        if ticket is not None:
            self._ticket, self._queued_at = ticket, now
            try:
                await turn.wait()
            finally:
                self._leave_line()
        assert self.stream is not None
        return self.stream

    def _take(self, lease: Lease) -> None:
        self._reserve(lease)
        self._end_wait()

    def _leave_line(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            self._edge.turns.admission.cancel(ticket)
            self._end_wait()

    def _end_wait(self) -> None:
        if self._queued_at is not None:
            self.queued_s, self._queued_at = self._edge.clock() - self._queued_at, None

    def _reserve(self, lease: Lease) -> UpstreamStream:
        self.lease = lease
        self.stream = self._edge.upstream.open(lease.worker.spec)
        self.reserved_at = self.connected_at = self._edge.clock()
        return self.stream

    def _another(
        self,
        request: InferenceRequest,
        blocks: PrefixBlocks,
        ending: Ending,
        started_at: float,
        stages: Callable[[], StageTimes],
    ) -> UpstreamStream | None:
        """Settle a failed attempt and reserve another worker; None when there is none: then the attempt stands."""
        edge, failed, now = self._edge, self.lease, ending.ended_at
        assert failed is not None
        self.exclude(failed)
        if self.spent >= self._limits.max_retries:
            return None
        # One without room has done nothing for the request: asking the next adds no work to an overload.
        costly = ending.error_code != WORKER_BUSY
        if costly and not failed.retries.allows(now):
            return None
        try:
            lease = edge.router.route(request, blocks, now, excluded=self.tried, instead_of=failed)
        except (NoWorker, UnknownModel):
            return None
        if costly:
            failed.retries.retry(now)
        self.drop()
        # First of all: whatever fails below, whoever ends the request finds this one.
        self.lease = lease
        outcome = self._settle(started_at, stages, failed, ending)
        self.retries += 1
        self.spent += 1
        stream = self._reserve(lease)
        if edge.on_retry is not None:
            edge.on_retry(outcome)
        return stream

    def _settle(self, started_at: float, stages: Callable[[], StageTimes], lease: Lease, ending: Ending) -> Outcome:
        return lease.settle(ending, started_at=started_at, stages=stages(), retries=self.retries)

    def _placed(self, body: bytes, request: InferenceRequest, lease: Lease | None) -> bytes:
        """The body as the chosen worker needs it: one path of SGLang reads its rank there, all others from a header.
        An engine that keeps sessions is told of this one, unless the client has told it."""
        sessions = self._edge.engine_sessions
        if lease is None:
            return body
        spec = lease.worker.spec
        if (
            lease.worker.facts.keeps_sessions
            and sessions is not None
            and request.session is not None
            and not request.engine_session
            and request.endpoint in _NAME_SESSIONS
        ):
            name = engine_session(request.tenant, request.session)
            sessions.used(name, spec, lease.decision.decided_at)
            body = ask_for_session(body, name)
        if request.endpoint is Endpoint.GENERATE and spec.rank is not None:
            return ask_for_rank(body, spec.rank.asked)
        return body


def result_of(error: GatewayError) -> Result:
    """How a request that ends with this error ended."""
    match error:
        case WorkerTimeout() | DeadlineExceeded():
            return Result.TIMED_OUT
        case WorkerError():
            return Result.WORKER_FAILED
        case ShuttingDown():
            return Result.SHUT_DOWN
        case _:
            return Result.REFUSED
