"""The kept connection of the load polls, against servers that behave and misbehave."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from gateway.upstream.control import ProbeFailed
from gateway.upstream.poll_line import PollLine

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
DEADLINE_S = 20.0


@asynccontextmanager
async def server(serve: Serve) -> AsyncIterator[str]:
    ended: list[asyncio.Event] = []

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        done = asyncio.Event()
        ended.append(done)
        try:
            await serve(reader, writer)
        except (OSError, EOFError):
            pass
        finally:
            writer.close()
            done.set()

    listening = await asyncio.start_server(run, "127.0.0.1", 0)
    async with listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        async with asyncio.timeout(DEADLINE_S):
            for done in ended:
                await done.wait()


async def test_one_connection_serves_many_polls_in_either_framing() -> None:
    opened = 0
    answers = [
        b"HTTP/1.1 200 OK\r\ncontent-length: 3\r\n\r\nabc",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n1\r\nc\r\n0\r\n\r\n",
        b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n",
    ]

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        for answer in answers:
            head = await reader.readuntil(b"\r\n\r\n")
            assert head.startswith(b"GET /metrics HTTP/1.1\r\n")
            assert b"authorization: Bearer key\r\n" in head
            writer.write(answer)
        await reader.read()

    async with server(serve) as url:
        line = PollLine(url, api_key="key")
        got = [await line.get("/metrics", timeout_s=DEADLINE_S) for _ in answers]
        line.close()
    assert [(answer.status, answer.body) for answer in got] == [(200, b"abc"), (200, b"abc"), (404, b"")]
    assert opened == 1


async def test_a_connection_that_was_closed_meanwhile_is_opened_anew() -> None:
    opened = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal opened
        opened += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    async with server(serve) as url:
        line = PollLine(url)
        for _ in range(3):
            assert (await line.get("/metrics", timeout_s=DEADLINE_S)).body == b"x"
        line.close()
    assert opened == 3


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"SSH-2.0-OpenSSH_9.2\r\n", "is this an HTTP server"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", "broke off"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9000000\r\n\r\n" + b"x" * 9_000_000, "is this a worker"),
    ],
)
async def test_a_bad_answer_fails_and_the_next_call_begins_afresh(answer: bytes, said: str) -> None:
    calls = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal calls
        calls += 1
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer if calls == 1 else b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\nx")

    async with server(serve) as url:
        line = PollLine(url)
        with pytest.raises(ProbeFailed, match=said):
            await line.get("/metrics", timeout_s=DEADLINE_S)
        assert (await line.get("/metrics", timeout_s=DEADLINE_S)).body == b"x"
        line.close()


async def test_silence_ends_at_the_deadline() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        await reader.read()

    async with server(serve) as url:
        line = PollLine(url)
        with pytest.raises(ProbeFailed, match="did not answer within"):
            await line.get("/metrics", timeout_s=0.05)
        line.close()


async def test_nobody_there_is_away() -> None:
    with pytest.raises(ProbeFailed, match="no connection") as caught:
        await PollLine("http://127.0.0.1:9").get("/metrics", timeout_s=DEADLINE_S)
    assert caught.value.away
