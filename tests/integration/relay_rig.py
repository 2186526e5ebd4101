"""The edge between raw sockets: a scripted worker on one side, bytes on the other, the real router between them.

The worker is an `asyncio.Protocol` that hands each request to a script; the client side is plain streams, so that both
ends see exactly what is on the wire.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop

from gateway.edge import (
    Cors,
    Edge,
    EdgeLimits,
    EdgeSettings,
    HedgeRules,
    Keys,
    PhaseTimeouts,
    client_app,
    client_protocol,
    request_id_maker,
)
from gateway.edge.locate import Hasher
from gateway.kv import KvIndex
from gateway.policy import make_policy
from gateway.pool import Fleet
from gateway.records import EngineKind, Outcome, WorkerFacts, WorkerId, WorkerSpec
from gateway.router import Router
from gateway.upstream.connections import Timeouts
from gateway.upstream.http import Upstream, UpstreamStream

PATIENCE_S = 20.0
"""For what should happen at once, on a machine that may be very busy."""

CHAT = "/v1/chat/completions"


def both_loops(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Run a test on asyncio's loop and on uvloop: they differ in when they write and how they tell of a lost client."""

    def run(loop_factory: Callable[[], asyncio.AbstractEventLoop], **arguments: Any) -> None:
        with asyncio.Runner(loop_factory=loop_factory) as runner:
            runner.run(test(**arguments))

    wanted = inspect.Parameter("loop_factory", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.signature(test)
    run.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[wanted, *signature.parameters.values()], return_annotation=None
    )
    run.__dict__.update(test.__dict__)
    run.__name__, run.__doc__, run.__module__ = test.__name__, test.__doc__, test.__module__
    factories = [asyncio.new_event_loop, uvloop.new_event_loop]
    both: Callable[..., None] = pytest.mark.parametrize("loop_factory", factories, ids=["asyncio", "uvloop"])(run)
    return both


def break_opening(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """A bug in the gateway: no stream to this worker can be begun. For the source only, a compiled class takes none."""
    opened = Upstream.open

    def broken(self: Upstream, worker: WorkerSpec) -> UpstreamStream:
        if worker.name == name:
            raise RuntimeError("seeded bug")
        return opened(self, worker)

    monkeypatch.setattr(Upstream, "open", broken)


# --------------------------------------------------------------------------- the worker


class Call:
    """One request as the worker saw it, and the means to answer."""

    def __init__(self, transport: asyncio.Transport, head: bytes, body: bytes) -> None:
        self._transport = transport
        self.head = head
        self.body = body
        self.gone = asyncio.Event()
        """The gateway has dropped the connection."""

    @property
    def headers(self) -> dict[str, str]:
        """By lower-case name."""
        lines = self.head.decode("latin-1").split("\r\n")[1:]
        return {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}

    def send(self, data: bytes) -> None:
        """Bytes as they are."""
        self._transport.write(data)

    def plain(self, body: bytes, *, status: str = "200 OK", headers: Sequence[str] = ()) -> None:
        """A whole JSON answer with its length."""
        lines = [f"HTTP/1.1 {status}", "content-type: application/json", f"content-length: {len(body)}", *headers]
        self.send("\r\n".join(lines).encode() + b"\r\n\r\n" + body)

    def begin_stream(self, *events: bytes, content_type: str = "text/event-stream; charset=utf-8") -> None:
        """The head of a chunked answer and its first chunks."""
        self.send(f"HTTP/1.1 200 OK\r\ncontent-type: {content_type}\r\ntransfer-encoding: chunked\r\n\r\n".encode())
        self.events(*events)

    def events(self, *events: bytes) -> None:
        """Chunks."""
        for event in events:
            self.send(b"%x\r\n%b\r\n" % (len(event), event))

    def end_stream(self) -> None:
        """The last chunk."""
        self.send(b"0\r\n\r\n")

    def close(self) -> None:
        """End the connection after what was sent."""
        self._transport.close()

    def abort(self) -> None:
        """Drop it."""
        self._transport.abort()

    def write_backlog(self) -> int:
        """Bytes the gateway has not taken."""
        return self._transport.get_write_buffer_size()


Script = Callable[[Call], None]


class _WorkerConnection(asyncio.Protocol):
    def __init__(self, worker: FakeWorker) -> None:
        self._worker = worker
        self._buffer = b""
        self._call: Call | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]
        self._worker.connections.add(self._transport)
        self._worker.accepted += 1

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.connections.discard(self._transport)
        if self._call is not None:
            self._call.gone.set()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        head, found, body = self._buffer.partition(b"\r\n\r\n")
        if not found:
            return
        call = Call(self._transport, head, body)
        if len(body) < int(call.headers.get("content-length", "0")):
            return
        self._buffer = b""
        self._call = call
        self._worker.calls.append(call)
        self._worker.script(call)


class FakeWorker:
    """Listens on a free port; every request goes to `script`."""

    def __init__(self, name: str, script: Script) -> None:
        self.name = name
        self.script = script
        self.calls: list[Call] = []
        self.connections: set[asyncio.Transport] = set()
        self.accepted = 0
        self._server: asyncio.Server | None = None
        self.port = 0

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _WorkerConnection(self), "127.0.0.1", 0, ssl=tls)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        for transport in list(self.connections):
            transport.abort()
        await until(lambda: not self.connections)

    async def call(self, number: int = 0) -> Call:
        """The n-th request, once it has come."""
        await until(lambda: len(self.calls) > number)
        return self.calls[number]


def answers(body: bytes, *, status: str = "200 OK", headers: Sequence[str] = ()) -> Script:
    """A script: always the same JSON answer."""
    return lambda call: call.plain(body, status=status, headers=headers)


def streams(*events: bytes) -> Script:
    """A script: always the same whole stream, a chunk an event."""

    def script(call: Call) -> None:
        call.begin_stream(*events)
        call.end_stream()

    return script


def silent(_call: Call) -> None:
    """A script: nothing; the test answers by itself."""


# --------------------------------------------------------------------------- the client


class Answer(NamedTuple):
    """What a client read: status, headers (lower-case names, last of equal ones), body without its framing."""

    status: int
    headers: dict[str, str]
    body: bytes


class RawClient:
    """One client connection that sends and reads bytes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, port: int, *, limit: int = 1 << 24, tls: ssl.SSLContext | None = None) -> RawClient:
        return cls(*await asyncio.open_connection("127.0.0.1", port, limit=limit, ssl=tls))

    def send(self, data: bytes) -> None:
        self.writer.write(data)

    async def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers."""
        raw = await self.reader.readuntil(b"\r\n\r\n")
        first, *lines = raw.decode("latin-1").rstrip("\r\n").split("\r\n")
        pairs = (line.partition(": ") for line in lines)
        return int(first.split(" ")[1]), {name.lower(): value for name, _, value in pairs}

    async def chunk(self) -> bytes:
        """The next chunk of a chunked body; empty at its end."""
        size = int(await self.reader.readuntil(b"\r\n"), 16)
        data = await self.reader.readexactly(size + 2)
        assert data.endswith(b"\r\n")
        return data[:-2]

    async def answer(self) -> Answer:
        """A whole answer, whatever its framing."""
        async with asyncio.timeout(PATIENCE_S):
            status, headers = await self.head()
            while status == 100:
                status, headers = await self.head()
            if "content-length" in headers:
                return Answer(status, headers, await self.reader.readexactly(int(headers["content-length"])))
            if headers.get("transfer-encoding") != "chunked":
                return Answer(status, headers, await self.reader.read())
            body = b""
            while piece := await self.chunk():
                body += piece
            return Answer(status, headers, body)

    async def rest(self) -> bytes:
        """Everything until the connection ends, in whatever way."""
        data = b""
        with contextlib.suppress(ConnectionError):
            async with asyncio.timeout(PATIENCE_S):
                while piece := await self.reader.read(65536):
                    data += piece
        return data

    def abort(self) -> None:
        """Vanish."""
        if not self.writer.is_closing():
            self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(ConnectionError):
            await self.writer.wait_closed()


def post(body: bytes, *, path: str = CHAT, headers: Sequence[str] = (), version: str = "1.1") -> bytes:
    """A request with its length."""
    lines = [f"POST {path} HTTP/{version}", "host: test", f"content-length: {len(body)}", *headers]
    return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


def ask(*, stream: bool = False, more: bytes = b"") -> bytes:
    """A small chat body."""
    flag = b"true" if stream else b"false"
    return b'{"model":"m","stream":%b,"messages":[{"role":"user","content":"hi"}]%b}' % (flag, more)


# --------------------------------------------------------------------------- in between


class Tls(NamedTuple):
    """The contexts of all four ends."""

    gateway: ssl.SSLContext
    clients: ssl.SSLContext
    workers: ssl.SSLContext
    upstream: ssl.SSLContext


@dataclass
class RelayRig:
    """A served edge and its workers."""

    port: int
    edge: Edge
    fleet: Fleet
    router: Router
    upstream: Upstream
    outcomes: list[Outcome]
    retried: list[Outcome]
    workers: list[FakeWorker]
    clients: list[RawClient]
    failed_copies: list[Outcome]
    tls: Tls | None = None

    async def client(self, *, limit: int = 1 << 24) -> RawClient:
        client = await RawClient.connect(self.port, limit=limit, tls=self.tls.clients if self.tls else None)
        self.clients.append(client)
        return client

    async def streaming(self, *events: bytes) -> tuple[RawClient, Call]:
        """A client whose stream the first worker has begun, and the worker's end of it; the first request there is."""
        client = await self.client()
        client.send(post(ask(stream=True)))
        call = await self.workers[0].call()
        call.begin_stream(*events)
        return client, call

    async def ask(self, raw: bytes) -> Answer:
        """One request on a connection of its own."""
        client = await self.client()
        client.send(raw)
        answer = await client.answer()
        await client.close()
        return answer

    def quiet(self) -> bool:
        """No lease, stream or exchange is open."""
        return (
            self.router.open_leases == 0
            and self.upstream.open_streams() == 0
            and self.edge.open_exchanges == 0
            and all((w.inflight_requests, w.inflight_tokens) == (0, 0) for w in self.fleet.workers.values())
        )

    async def outcome(self, number: int = 0) -> Outcome:
        """The n-th outcome, once there is one."""
        await until(lambda: len(self.outcomes) > number)
        return self.outcomes[number]


@contextlib.asynccontextmanager
async def relay(
    *scripts: Script | None,
    limits: EdgeLimits | None = None,
    timeouts: Timeouts | None = None,
    receipts: bool = True,
    ask_usage: bool = True,
    hasher: Hasher | None = None,
    keep_alive_s: int = 30,
    keys: Keys | None = None,
    tenant_salt: bool = False,
    cors: Cors | None = None,
    tls: Tls | None = None,
    hedges: HedgeRules | None = None,
) -> AsyncIterator[RelayRig]:
    """A gateway with one worker a script, named w1, w2, ...; None is a worker that refuses connections.

    Requests go round: the first to w1, the second to w2, and so on.
    """
    clock = time.monotonic
    fleet = Fleet()
    rng = Random(3)
    router = Router(fleet, KvIndex(), make_policy("round_robin", rng=rng), rng=rng)
    upstream = Upstream(clock=clock, timeouts=timeouts, tick_s=0.02, tls=tls.upstream if tls else None)
    outcomes: list[Outcome] = []
    retried: list[Outcome] = []
    failed_copies: list[Outcome] = []
    workers: list[FakeWorker] = []
    async with contextlib.AsyncExitStack() as stack:
        for number, script in enumerate(scripts, start=1):
            worker = FakeWorker(f"w{number}", script or silent)
            await worker.start(tls.workers if tls else None)
            workers.append(worker)
            if script is None:
                await worker.stop()
            else:
                stack.push_async_callback(worker.stop)
            spec = WorkerSpec(name=WorkerId(worker.name), url=f"http{'s' if tls else ''}://127.0.0.1:{worker.port}")
            fleet.add(spec, WorkerFacts(EngineKind.VLLM, "0.32.0", ("m",), block_size=16), clock())
        executor = stack.enter_context(ThreadPoolExecutor(2))
        edge = Edge(
            router=router,
            hashers=lambda model: hasher,
            upstream=upstream,
            executor=executor,
            clock=clock,
            on_outcome=outcomes.append,
            on_retry=retried.append,
            on_copy_failed=failed_copies.append,
            request_ids=request_id_maker(rng),
            settings=EdgeSettings(
                limits=replace(limits or EdgeLimits(), idle_timeout_s=keep_alive_s),
                timeouts=PhaseTimeouts(upstream.timeouts),
                keys=keys,
                tenant_salt=tenant_salt,
                cors=cors,
                receipts=receipts,
                ask_usage=ask_usage,
                hedges=hedges,
            ),
            tick_s=0.02,
        )
        config = uvicorn.Config(
            client_app(fleet.models, ready=lambda: edge.accepting, settings=lambda: edge.settings),
            host="127.0.0.1",
            port=0,
            http=client_protocol(edge),
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            ssl_context_factory=(lambda *_: tls.gateway) if tls else None,
        )
        config.load()
        server = uvicorn.Server(config)
        # Started by hand: `serve` would add its signal handlers and a fifth of a second to every test.
        server.lifespan = config.lifespan_class(config)
        await server.startup()
        port = server.servers[0].sockets[0].getsockname()[1]
        rig = RelayRig(port, edge, fleet, router, upstream, outcomes, retried, workers, [], failed_copies, tls)
        try:
            yield rig
        finally:
            for client in rig.clients:
                client.abort()
            edge.cut()
            upstream.close()
            for listener in server.servers:
                listener.close()
            for connection in list(server.server_state.connections):
                connection.transport.abort()
            await until(lambda: not server.server_state.connections)


async def until(condition: Callable[[], bool], *, within_s: float = PATIENCE_S) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  conditions of several parts, none of which has an event
            await asyncio.sleep(0.002)
