"""Clients that vanish, in every phase: the worker hears of it, and nothing stays counted."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.records import PrefixBlocks, Result
from gateway.upstream.connections import Timeouts
from tests.integration.relay_rig import PATIENCE_S, ask, both_loops, post, relay, silent, until

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
OK = b'{"id":"1","choices":[]}'


async def heard(gone: asyncio.Event) -> None:
    """The worker's connection has ended. A second is the promise; the rest is for a busy machine."""
    async with asyncio.timeout(PATIENCE_S):
        await gone.wait()


@both_loops
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leaving", ["abort", "close"])
async def test_while_the_worker_has_not_begun(stream: bool, leaving: str) -> None:
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask(stream=stream)))
        call = await r.workers[0].call()
        client.abort() if leaving == "abort" else client.writer.close()
        await heard(call.gone)
        outcome = await r.outcome()
        assert (outcome.result, outcome.status, outcome.worker) == (Result.CLIENT_GONE, 499, "w1")
        assert r.quiet()


@both_loops
async def test_in_the_middle_of_a_stream() -> None:
    async with relay(silent) as r:
        client, call = await r.streaming(TOKEN)
        await client.head()
        assert await client.chunk() == TOKEN
        client.abort()
        await heard(call.gone)
        outcome = await r.outcome()
        assert (outcome.result, outcome.status, outcome.chunks) == (Result.CLIENT_GONE, 200, 1)
        assert r.quiet()


@both_loops
async def test_in_the_middle_of_a_plain_answer() -> None:
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        call.send(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{")
        await client.head()
        client.abort()
        await heard(call.gone)
        assert (await r.outcome()).result is Result.CLIENT_GONE
        assert r.quiet()


@both_loops
async def test_while_its_answer_is_held_back_by_itself() -> None:
    """Reading of the worker is paused: the end of the client must be seen all the same."""
    async with relay(silent) as r:
        client = await r.client(limit=1024)
        client.writer.transport.pause_reading()  # type: ignore[attr-defined]
        client.send(post(ask(stream=True)))
        call = await r.workers[0].call()
        call.begin_stream(*[b"x" * 65_000] * 400)
        await until(lambda: call.write_backlog() > 0)
        client.abort()
        await heard(call.gone)
        await until(r.quiet)
        assert r.outcomes[0].result is Result.CLIENT_GONE


@both_loops
async def test_in_the_middle_of_its_own_request() -> None:
    async with relay(silent) as r:
        raw = post(ask())
        for cut in (10, len(raw) - 5):
            client = await r.client()
            client.send(raw[:cut])
            await until(lambda: len(r.edge.deadlines) == 1)
            await asyncio.sleep(0.02)
            client.abort()
            await until(lambda: len(r.edge.deadlines) == 0)
        assert r.quiet()
        assert not r.workers[0].calls
        # Half a head is no request; half a body is one that ended.
        assert [o.result for o in r.outcomes] == [Result.CLIENT_GONE]


@both_loops
async def test_while_connecting() -> None:
    """To a worker whose backlog is full."""
    import socket

    with socket.socket() as full:
        full.bind(("127.0.0.1", 0))
        full.listen(0)
        fillers = [socket.socket() for _ in range(8)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(full.getsockname())
        async with relay(None, timeouts=Timeouts(connect_s=PATIENCE_S)) as r:
            worker = next(iter(r.fleet.workers.values()))
            worker.spec = type(worker.spec)(name=worker.spec.name, url=f"http://127.0.0.1:{full.getsockname()[1]}")
            client = await r.client()
            client.send(post(ask()))
            await until(lambda: r.upstream.open_streams() == 1)
            client.abort()
            outcome = await r.outcome()
            assert (outcome.result, outcome.status) == (Result.CLIENT_GONE, 499)
            assert r.quiet()
        for filler in fillers:
            filler.close()


@both_loops
async def test_between_two_attempts() -> None:
    """The first worker fails, the second does not answer."""
    async with relay(lambda call: call.abort(), silent) as r:
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[1].call()
        client.abort()
        await heard(call.gone)
        assert [o.result for o in (*r.retried, *r.outcomes)] == [Result.WORKER_FAILED, Result.CLIENT_GONE]
        assert r.quiet()


class _SlowWork:
    """Prefix work that waits in its thread until it is let go."""

    pending = True

    def __init__(self, go: threading.Event, began: threading.Event) -> None:
        self._go = go
        self._began = began

    def encode(self) -> None:
        self._began.set()
        assert self._go.wait(PATIENCE_S)

    def blocks(self) -> PrefixBlocks:
        raise AssertionError("the request has ended")


class _SlowHasher:
    known = None

    def __init__(self) -> None:
        self.go = threading.Event()
        self.began = threading.Event()

    def begin(self, *_args: object, **_options: object) -> _SlowWork:
        return _SlowWork(self.go, self.began)


@both_loops
async def test_while_its_prompt_is_tokenised() -> None:
    hasher = _SlowHasher()
    async with relay(silent, hasher=hasher) as r:
        client = await r.client()
        client.send(post(ask()))
        await until(hasher.began.is_set)
        client.abort()
        outcome = await r.outcome()
        assert (outcome.result, outcome.status, outcome.worker) == (Result.CLIENT_GONE, 499, None)
        assert r.quiet()
        hasher.go.set()
        assert not r.workers[0].calls


@both_loops
async def test_with_requests_waiting_behind_it() -> None:
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask()) * 5)
        call = await r.workers[0].call()
        client.abort()
        await heard(call.gone)
        await until(r.quiet)
        assert [o.result for o in r.outcomes] == [Result.CLIENT_GONE] * 5
        assert len(r.workers[0].calls) == 1


@both_loops
async def test_a_server_that_ends_cancels_what_waits() -> None:
    """A task cancelled from outside settles as shut down."""
    async with relay(silent) as r:
        client = await r.client()
        client.send(post(ask()))
        call = await r.workers[0].call()
        exchange = next(iter(r.edge.exchanges))
        exchange._task.cancel()  # type: ignore[union-attr]
        assert (await client.answer()).status == 503
        await heard(call.gone)
        assert (await r.outcome()).result is Result.SHUT_DOWN
        assert r.quiet()


@both_loops
async def test_two_hundred_that_leave_at_any_moment() -> None:
    """Half of them streams, leaving after 0 to 199 steps of the loop."""

    def busy(call: object) -> None:
        call.begin_stream(*[TOKEN] * 20)  # type: ignore[attr-defined]

    async with relay(busy, silent) as r:

        async def one(number: int) -> None:
            client = await r.client()
            client.send(post(ask(stream=number % 2 == 0)))
            for _ in range(number):
                await asyncio.sleep(0)
            client.abort()

        await asyncio.gather(*[one(number) for number in range(200)])
        await until(r.quiet)
        await until(lambda: not any(worker.connections for worker in r.workers))
        assert {o.result for o in r.outcomes} <= {Result.CLIENT_GONE}
