"""One inference request and its answer, on one client connection.

Rules:
1. `_run` is the life of a request until its answer begins: one task, which waits for nothing but the client's body,
   the tokenising thread and the chosen worker. From then on everything is a callback; no task runs.
2. Whatever way it ends, `_finish` is called synchronously and once: it settles the lease and hands on one outcome.
3. Until an answer begins, workers are tried one after the other (`attempts`). After that nothing is tried again.
4. When the client goes away the worker's connection is dropped in the same call.

It is also a cycle in uvicorn's sense (`keep_alive`, `response_complete`), so that the protocol keeps answers in order.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from gateway.api import ask_for_model, ask_for_salt, ask_for_usage, ask_for_usual_priority, parse_request
from gateway.edge.attempts import Attempts, result_of
from gateway.edge.auth import InvalidKey, Visit
from gateway.edge.body import Body
from gateway.edge.debug import DEBUG_HEADER, may_see
from gateway.edge.gate import TIMEOUT_HEADER, Edge, asked_seconds
from gateway.edge.locate import locate
from gateway.edge.notes import Notes, receipts
from gateway.edge.relay import Relay
from gateway.edge.responses import InternalError, Overloaded, error_response
from gateway.errors import GatewayError, ShuttingDown
from gateway.records import Endpoint, InferenceRequest, PrefixBlocks, Result, StageTimes
from gateway.telemetry.tracing import traceparent
from gateway.upstream.headers import AnswerHead, Headers, request_head
from gateway.upstream.tokenizing import Untold

_log = logging.getLogger("kvgate.edge")

_CLIENT_GONE = 499
"""nginx's code for a client that left before any answer."""

_MAX_ID_BYTES = 256
"""A longer x-request-id is replaced, a longer session id ignored: both are kept and logged."""


class Client(Protocol):
    """What an exchange needs of its client's connection."""

    write_paused: bool

    def write(self, data: bytes) -> None:
        """Bytes for the client, in order; never waits. `pause` and `resume` of the exchange bound what piles up."""

    def exchange_done(self, exchange: Exchange) -> None:
        """The answer is written: the next request's turn, or the end of the connection when `keep_alive` is off."""

    def cut(self, *, reset: bool) -> None:
        """Close although the answer is not whole; `reset` where only an error shows that."""


class Exchange:
    """Made when a request head is complete; `start` when it is its turn on the connection."""

    __slots__ = (
        "_asked_s",
        "_body",
        "_client",
        "_cors",
        "_debug",
        "_edge",
        "_endpoint",
        "_headers",
        "_http_1_0",
        "_loop",
        "_notes",
        "_relay",
        "_session",
        "_settings",
        "_target",
        "_task",
        "_untold",
        "_usage_hidden",
        "_visit",
        "_work",
        "declared_bytes",
        "keep_alive",
        "refusal",
        "response_complete",
    )

    def __init__(
        self,
        edge: Edge,
        client: Client,
        loop: asyncio.AbstractEventLoop,
        endpoint: Endpoint,
        target: bytes,
        headers: Headers,
        fields: Mapping[bytes, bytes],
        *,
        http_1_0: bool,
        keep_alive: bool,
    ) -> None:
        """`target` is path and query; `headers` have lower-case names, `fields` are the same by name, the last of each
        counts."""
        self.keep_alive = keep_alive
        self.response_complete = False
        self.declared_bytes = int(fields.get(b"content-length", b"0"))
        self._asked_s = fields.get(TIMEOUT_HEADER)
        self._edge = edge
        settings = self._settings = edge.settings
        self._client = client
        self._loop = loop
        self._endpoint = endpoint
        self._target = target
        self._headers = headers
        self._http_1_0 = http_1_0
        self._body = Body(edge)
        self._task: asyncio.Task[None] | None = None
        self._usage_hidden = False
        self._work = Attempts(edge, settings.limits)
        self._relay: Relay | None = None
        self._untold: Untold | None = None
        self._cors = settings.cors.lines(fields.get(b"origin")) if settings.cors is not None else b""
        self._debug = may_see(fields.get(DEBUG_HEADER), settings.debug_token)
        self._visit: Visit | None = None
        self.refusal: InvalidKey | None = None
        """Why the body need not be read."""
        if settings.keys is not None:
            try:
                self._visit = Visit(settings.keys.find(fields, endpoint))
            except InvalidKey as error:
                self.refusal = error
        request_id = fields.get(b"x-request-id", b"")
        self._notes = Notes(
            endpoint,
            request_id if 0 < len(request_id) <= _MAX_ID_BYTES else edge.request_ids().encode(),
            self._visit.tenant.access.tenant if self._visit is not None else None,
            edge.clock(),
            edge.trace(fields.get(b"traceparent")) if edge.trace is not None else None,
        )
        session = fields.get(settings.session_header, b"")
        self._session = session.decode("latin-1") if 0 < len(session) <= _MAX_ID_BYTES else None
        edge.exchanges.add(self)

    @property
    def whole(self) -> bool:
        """The body has come, or nothing more of it is wanted."""
        return self._body.whole

    # ---------------------------------------------------------------- the story

    async def _run(self) -> None:
        try:
            body = await self._whole_body()
            request = await self._understand(body)
            blocks = await self._locate(request, body)
            answer = await self._first_answer(request, blocks, body)
            self._pass_on(answer)
        except GatewayError as error:
            self._refuse(error)
        except asyncio.CancelledError:
            # Ours: the exchange is finished already. Otherwise the server is ending.
            self.shut_down()
            raise
        except Exception:  # noqa: BLE001  a bug: logged with its traceback, and the request is ended
            _log.exception("request %s met a bug of the gateway", self._notes.request_name)
            self._crash()

    async def _whole_body(self) -> bytes:
        body, edge = self._body, self._edge
        if not body.whole:
            await body.arrival(self._loop)
        self._notes.begun(edge.clock())
        if body.error is not None:
            raise body.error
        if not edge.accepting:
            raise ShuttingDown("the gateway is shutting down; try another one", retry_after_s=1)
        if len(edge.exchanges) > self._settings.limits.max_exchanges:
            raise Overloaded("the gateway carries as many requests as it may", retry_after_s=1)
        return body.take()

    async def _understand(self, body: bytes) -> InferenceRequest:
        edge, notes = self._edge, self._notes
        if len(body) <= self._settings.limits.inline_parse_bytes:
            request = self._parsed(body)
        else:
            request = await self._loop.run_in_executor(edge.executor, self._parsed, body)
        notes.asked = request.model
        request = edge.router.routed(request)
        notes.parsed(request, edge.clock())
        return request

    def _parsed(self, body: bytes) -> InferenceRequest:
        """Touches nothing but the body: it may run in a thread."""
        settings, notes = self._settings, self._notes
        access = self._visit.tenant.access if self._visit is not None else None
        return parse_request(
            self._endpoint,
            body,
            request_id=notes.request_name,
            session=self._session,
            affinity_field=settings.session_field,
            tenant=notes.tenant,
            salted=settings.tenant_salt,
            labels=access.labels if access is not None else None,
            least_priority=access.least_priority if access is not None else None,
        )

    async def _locate(self, request: InferenceRequest, body: bytes) -> PrefixBlocks:
        edge = self._edge
        visit = self._visit
        if visit is None:
            pool = edge.router.pool(request.model)
        else:
            pool = visit.pool(
                edge.router, request.model, edge.clock(), asked=self._notes.asked, adapters=request.adapters
            )
        blocks, self._untold = await locate(edge, request, pool, body_bytes=len(body))
        located_at = self._notes.located_at = edge.clock()
        if visit is not None:
            visit.take(blocks.tokens, located_at)
        return blocks

    async def _first_answer(self, request: InferenceRequest, blocks: PrefixBlocks, body: bytes) -> AnswerHead:
        """The head of the answer that the client will get; as many workers are tried as that takes."""
        settings, notes = self._settings, self._notes
        timeouts = settings.timeouts.of(self._endpoint, request.model)
        total_s = timeouts.total_s
        if self._asked_s is not None:
            total_s = min(total_s, asked_seconds(self._asked_s))
        head = request_head(
            self._target,
            self._headers,
            request_id=notes.request_id,
            credentials_end_here=settings.keys is not None,
            traceparent=traceparent(notes.trace) if notes.trace is not None else b"",
        )
        if settings.tenant_salt:
            body = ask_for_salt(body, request)
        if request.priority_taken:
            body = ask_for_usual_priority(body, request)
        if request.model != notes.asked:
            body = ask_for_model(body, request.model)
        if settings.ask_usage:
            asking = ask_for_usage(body, request)
            self._usage_hidden = asking is not body
            body = asking
        edge = self._edge
        if edge.shadows is not None and edge.router.settings.routes.shadowing:
            edge.shadows.offer(notes.asked, request, head, body)
        return await self._work.first_answer(
            request,
            blocks,
            head,
            body,
            timeouts=timeouts,
            started_at=notes.started_at,
            total_at=notes.started_at + total_s,
            stages=self._stages,
            hedge=settings.hedges.of(request) if settings.hedges is not None else None,
        )

    def _pass_on(self, answer: AnswerHead) -> None:
        """From here on the bytes run by callbacks: worker -> relay -> client."""
        self._body.let_go()
        stream = self._work.stream
        assert stream is not None
        notes = self._notes
        relay = self._relay = Relay(
            self,
            self._client.write,
            answer,
            endpoint=self._endpoint,
            receipts=receipts(notes, self._work, debug=self._debug) if self._settings.receipts or self._debug else b"",
            cors=self._cors,
            hide_usage=self._usage_hidden,
            http_1_0=self._http_1_0,
            keep_alive=self.keep_alive,
        )
        self.keep_alive = not relay.closes
        stream.relay_to(relay)
        if not self.response_complete:
            relay.send_head()
            if self._client.write_paused:
                stream.pause()

    # ---------------------------------------------------------------- from the client's connection

    def start(self) -> None:
        """It is this request's turn."""
        self._task = self._loop.create_task(self._run())

    def receive(self, data: bytes) -> None:
        """The next bytes of the body; the protocol has counted them."""
        self._body.add(data)

    def received(self, error: GatewayError | None = None) -> None:
        """The body is complete, or will never be because of `error`."""
        if error is not None:
            self.keep_alive = False
        self._body.complete(error)

    def pause(self) -> None:
        """The client takes no more for now."""
        if self._relay is not None and self._work.stream is not None:
            self._work.stream.pause()

    def resume(self) -> None:
        """The client takes bytes again."""
        if self._work.stream is not None:
            self._work.stream.resume()

    def client_gone(self) -> None:
        """The client's connection is lost: so is the worker's, at once."""
        if not self.response_complete:
            status = self._relay.status if self._relay is not None else _CLIENT_GONE
            self._end_work()
            self._finish(Result.CLIENT_GONE, status, self._edge.clock())

    def shut_down(self) -> None:
        """The process ends before the answer did."""
        if self.response_complete:
            return
        self._end_work()
        if self._relay is None:
            error = ShuttingDown("the gateway is shutting down; try another one", retry_after_s=1)
            self._write_error(error)
            self._finish(Result.SHUT_DOWN, error.status, self._edge.clock(), error_code=error.code)
        else:
            self._finish(Result.SHUT_DOWN, self._relay.status, self._edge.clock(), error_code=ShuttingDown.code)
        self._client.cut(reset=False)

    # ---------------------------------------------------------------- from the relay

    def first_byte(self, now: float) -> None:
        """The first byte of a successful answer has come."""
        lease = self._work.lease
        if lease is None:
            return
        untold, self._untold = self._untold, None
        try:
            lease.first_byte(now)
            if untold is not None and self._edge.ask_tokens is not None:
                self._edge.ask_tokens(untold, lease.worker.spec)
        except Exception:  # noqa: BLE001  a bug: logged with its traceback; the answer is on its way, and its end settles
            _log.exception("the first byte of request %s met a bug of the gateway", self._notes.request_name)

    def answered(self, now: float) -> None:
        """The answer is with the client, whole."""
        relay = self._relay
        assert relay is not None
        self._work.stream = None
        try:
            if relay.fault is not None:
                self._finish(Result.WORKER_FAILED, relay.status, now, error_code=relay.fault)
            else:
                self._finish(Result.COMPLETED, relay.status, now)
        except Exception:  # noqa: BLE001  a bug: logged with its traceback, and the request is ended
            # The caller is the worker's connection, which cannot tell the client.
            _log.exception("request %s met a bug of the gateway", self._notes.request_name)
            self.keep_alive = False
        self._client.exchange_done(self)

    def broken(self, error: GatewayError, *, told: bool, now: float) -> None:
        """The answer broke off; `told` when the client got an error event in its place."""
        relay = self._relay
        assert relay is not None
        self._work.stream = None
        if relay.unsent and not told:
            # Nothing has gone out: the client gets an answer that says why.
            self._relay = None
            self._refuse(error)
            return
        self._finish(result_of(error), relay.status, now, error_code=error.code)
        if told:
            self.keep_alive = False
            self._client.exchange_done(self)
        else:
            self._client.cut(reset=self._http_1_0)

    def reader_stalled(self, now: float) -> None:
        """A client that takes nothing for the whole idle time is gone."""
        self.client_gone()
        self._client.cut(reset=True)

    # ---------------------------------------------------------------- ends

    def _refuse(self, error: GatewayError) -> None:
        if self.response_complete:
            return
        self._work.drop()
        self._write_error(error)
        self._finish(result_of(error), error.status, self._edge.clock(), error_code=error.code)
        self._client.exchange_done(self)

    def _crash(self) -> None:
        """A bug, logged by the caller: a plain 500 for the client, or a cut answer, and the connection ends."""
        if self.response_complete:
            return
        self._work.drop()
        self.keep_alive = False
        error = InternalError()
        relay = self._relay
        if relay is None:
            self._write_error(error)
        self._finish(Result.REFUSED, error.status, self._edge.clock(), error_code=error.code)
        if relay is None:
            self._client.exchange_done(self)
        else:
            self._client.cut(reset=self._http_1_0)

    def _end_work(self) -> None:
        self._work.drop()
        task, self._task = self._task, None
        if task is not None:
            task.cancel()

    def _write_error(self, error: GatewayError) -> None:
        if not self._edge.accepting:
            self.keep_alive = False
        shown = self._settings.receipts or self._debug
        lines = receipts(self._notes, self._work if shown else None, debug=self._debug)
        self._client.write(
            error_response(error, endpoint=self._endpoint, receipts=lines + self._cors, keep_alive=self.keep_alive)
        )

    def _finish(self, result: Result, status: int, now: float, *, error_code: str | None = None) -> None:
        """The one end: settles the lease, forgets the exchange, hands on the outcome."""
        self.response_complete = True
        self._body.let_go()
        edge, relay = self._edge, self._relay
        edge.exchanges.discard(self)
        # Nothing may be left that only the garbage collector could take apart.
        self._task = self._relay = self._untold = None
        notes = self._notes
        try:
            ending = notes.ending(result, status, now, relay, error_code)
        except Exception:  # noqa: BLE001  a bug in reading what the worker said of itself must not keep the lease
            _log.exception("request %s met a bug of the gateway", notes.request_name)
            ending = notes.ending(result, status, now, None, error_code)
        work = self._work
        lease, work.lease = work.lease, None
        if lease is None:
            outcome = notes.unplaced(ending, work)
        else:
            outcome = lease.settle(
                ending,
                started_at=notes.started_at,
                stages=notes.stages(work),
                retries=work.retries,
                hedged=work.hedged,
            )
        if self._visit is not None:
            self._visit.settle(outcome)
        try:
            edge.on_outcome(outcome)
        except Exception:  # noqa: BLE001  an observer's bug must not cost the client the end of its answer
            _log.exception("the outcome of request %s was not recorded", outcome.request_id)

    def _stages(self) -> StageTimes:
        return self._notes.stages(self._work)
