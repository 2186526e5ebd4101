"""The server of a port: what its end leaves behind."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random

import pytest
from fastapi import FastAPI

from gateway.records import Outcome
from gateway.runtime import Gateway
from gateway.runtime.server import PortServer, listen
from gateway.settings import ServerSettings, Settings
from gateway.telemetry import RequestLog

PATIENCE_S = 30.0


@asynccontextmanager
async def _serving(
    app: FastAPI, **limits: float
) -> AsyncIterator[tuple[PortServer, asyncio.Task[None], tuple[str, int]]]:
    listener = listen("127.0.0.1", 0, keys="--port")
    address = listener.getsockname()
    server = PortServer(app, http="httptools", tls=None, limits=ServerSettings(**limits))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await server.serving.wait()
        yield server, task, address
    finally:
        server.end()
        async with asyncio.timeout(PATIENCE_S):
            await task


@pytest.mark.parametrize("turns", range(6))
async def test_a_connection_accepted_in_the_moment_of_the_end_is_cut(turns: int) -> None:
    async with _serving(FastAPI()) as (server, task, address):
        with socket.create_connection(address) as client:  # the loop has not run: it is not accepted yet
            for _ in range(turns):
                await asyncio.sleep(0)
            server.end()
            async with asyncio.timeout(PATIENCE_S):
                await task
            client.setblocking(False)
            with contextlib.suppress(ConnectionResetError):  # one that was never accepted is reset
                async with asyncio.timeout(PATIENCE_S):
                    assert await asyncio.get_running_loop().sock_recv(client, 1) == b""
    assert not server.server_state.connections


async def test_a_request_that_is_open_at_the_end_is_cancelled() -> None:
    app = FastAPI()
    began = asyncio.Event()
    ended = asyncio.Event()

    @app.get("/")
    async def slow() -> None:
        began.set()
        try:
            await asyncio.sleep(3600)
        finally:
            ended.set()

    async with _serving(app) as (server, task, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            await began.wait()
            server.end()
            await task
            assert ended.is_set()
            with contextlib.suppress(ConnectionResetError):
                await reader.read()
        writer.close()
    assert not server.server_state.connections
    assert not server.server_state.tasks


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nhost: "], ids=["silent", "half a head"])
async def test_a_connection_that_brings_no_request_is_closed(sent: bytes) -> None:
    async with _serving(FastAPI(), header_timeout_s=0.2) as (_, _, address), asyncio.timeout(PATIENCE_S):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(sent)
        assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nhost: ", b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 9\r\n\r\n{"],
    ids=["head", "body"],
)
async def test_a_second_request_must_go_on_too(sent: bytes) -> None:
    app = FastAPI()

    @app.post("/")
    async def late(body: dict[str, int]) -> None:
        """Waits for its body."""

    async with (
        _serving(app, header_timeout_s=0.2, body_timeout_s=0.2) as (_, _, address),
        asyncio.timeout(PATIENCE_S),
    ):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET /none HTTP/1.1\r\nhost: x\r\n\r\n")
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 404")
        writer.write(sent)
        assert (await reader.read()).endswith(b"}"), "the rest of the answer, and the end"
        writer.close()


async def test_requests_that_come_in_time_keep_their_connection() -> None:
    app = FastAPI()
    let_go = asyncio.Event()

    @app.get("/")
    async def slow() -> None:
        await let_go.wait()

    async with (
        _serving(app, header_timeout_s=0.05, body_timeout_s=0.05) as (_, _, address),
        asyncio.timeout(PATIENCE_S),
    ):
        reader, writer = await asyncio.open_connection(*address)
        for _ in range(3):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await asyncio.sleep(0.2)  # longer than either: an answer takes its time
            let_go.set()
            assert b"content-length: 4" in await reader.readuntil(b"\r\n\r\n")
            assert await reader.readexactly(4) == b"null"
            let_go.clear()
            await asyncio.sleep(0.2)  # and so does who has nothing to ask
        writer.close()


async def test_an_answer_that_was_written_is_taken_after_the_end() -> None:
    app = FastAPI()
    answer = b"x" * 8_000_000

    @app.get("/")
    async def large() -> object:
        from fastapi import Response

        return Response(answer)

    async with _serving(app) as (server, task, address):
        reader, writer = await asyncio.open_connection(*address)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"content-length: 8000000" in head
            server.end()
            assert await reader.read() == answer
            await task
        writer.close()


async def test_the_log_has_the_requests_that_were_refused_while_the_ports_closed() -> None:
    class Lines(RequestLog):
        def __init__(self) -> None:
            self.waiting = self.written = 0

        def record(self, outcome: Outcome) -> None:
            self.waiting += 1

        def flush(self) -> None:
            self.written, self.waiting = self.written + self.waiting, 0

        async def wait(self) -> None:
            await asyncio.Event().wait()

    lines = Lines()
    settings = Settings(server=ServerSettings(host="127.0.0.1", port=0, admin_port=0))
    gateway = Gateway(settings, requests_log=lines, rng=Random(1))
    ports = await gateway.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(ports.url.rpartition(":")[2]))
    stopping = asyncio.create_task(gateway.stop())
    async with asyncio.timeout(PATIENCE_S):
        while gateway.edge.accepting:  # noqa: ASYNC110  no event: it would cost every request
            await asyncio.sleep(0)
        body = b'{"model": "demo", "prompt": "x"}'
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        head = await reader.readuntil(b"\r\n\r\n")
        await stopping
    writer.close()
    assert head.startswith(b"HTTP/1.1 503")
    assert lines.written == 1
