"""A request is cut at every place where its task waits, and at every byte of its answer: nothing stays behind."""

from __future__ import annotations

import asyncio
import re
import types
from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Any, NamedTuple

import pytest

from gateway.edge import EdgeLimits, HedgeRules
from gateway.pool import Kind
from gateway.records import BlockKey, Chain, PrefixBlocks, Result
from tests.integration.relay_rig import (
    Call,
    RelayRig,
    Script,
    answers,
    ask,
    both_loops,
    post,
    relay,
    silent,
    until,
)

TOKEN = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'
DONE = b"data: [DONE]\n\n"
OK = b'{"id":"1","choices":[]}'


_OF_A_REQUEST = ("Exchange._run", "_Runner.run", "_run_Exchange_gen", "run__Runner_gen")
"""Names of its coroutines, as Python has them and as mypyc gives them."""


class Cutter:
    """A task factory that counts how often the tasks of a request wait, and acts once, at the time number `at`."""

    def __init__(self, at: int, act: Callable[[], None]) -> None:
        self.waits = 0
        self.acted = False
        self._at = at
        self._act = act

    def factory(self, loop: asyncio.AbstractEventLoop, coro: Any, **more: Any) -> asyncio.Task[Any]:
        """For `loop.set_task_factory`."""
        if getattr(coro, "__qualname__", type(coro).__name__) in _OF_A_REQUEST:
            coro = _awaited(_watched(coro, self._waits))
        return asyncio.Task(coro, loop=loop, **more)

    def _waits(self) -> None:
        self.waits += 1
        if self.waits == self._at:
            self.acted = True
            asyncio.get_running_loop().call_soon(self._act)


async def _awaited(inner: Any) -> Any:
    return await inner


@types.coroutine
def _watched(coro: Coroutine[Any, Any, Any], waits: Callable[[], None]) -> Generator[Any, Any, Any]:
    """Run `coro` unchanged; `waits` is called whenever it is about to wait."""
    error: BaseException | None = None
    while True:
        try:
            future = coro.send(None) if error is None else coro.throw(error)
        except StopIteration as end:
            return end.value
        waits()
        error = None
        try:
            yield future
        except BaseException as thrown:  # noqa: BLE001  it is the coroutine's
            error = thrown


class _Work:
    """Prefix work that goes to the thread, and gives blocks that are promised."""

    pending = True

    def encode(self) -> None:
        pass

    def blocks(self) -> PrefixBlocks:
        return PrefixBlocks((Chain([BlockKey(number) for number in range(1, 9)], 130),), 130, 16)


class _Hasher:
    known = None

    def begin(self, *_args: object, **_options: object) -> _Work:
        return _Work()


def _promised(r: RelayRig) -> int:
    return r.router._index.stats().speculative


def _lost(r: RelayRig) -> None:
    for exchange in list(r.edge.exchanges):
        exchange._client.transport.abort()  # type: ignore[attr-defined]


def _shut_down(r: RelayRig) -> None:
    r.edge.cut()


def _cancelled(r: RelayRig) -> None:
    for exchange in list(r.edge.exchanges):
        if exchange._task is not None:
            exchange._task.cancel()


class Way(NamedTuple):
    """What the workers of a request do, and how often its tasks wait at least. `kept`: there is a connection already;
    `late`: a second worker gets it while the first is late."""

    scripts: Callable[[], Sequence[Script]]
    waits: int
    kept: bool = False
    late: bool = False


def _two_fail() -> Sequence[Script]:
    """And the third one answers."""
    return (lambda call: call.abort()), answers(b"{}", status="500 Bad"), answers(OK)


def _goes_stale() -> Sequence[Script]:
    """A kept connection is closed when the next request comes."""
    served = 0

    def flaky(call: Call) -> None:
        nonlocal served
        served += 1
        call.plain(OK) if served != 2 else call.abort()

    return (flaky,)


def _second_wins() -> Sequence[Script]:
    return silent, answers(OK)


def _first_wins() -> Sequence[Script]:
    """It answers when the second has the request."""
    calls: list[Call] = []

    def wake(_call: Call) -> None:
        if not calls[0].gone.is_set():
            calls[0].plain(OK)

    return calls.append, wake


def _both_fail() -> Sequence[Script]:
    """The second worker breaks, then the first; a third one answers."""
    calls: list[Call] = []

    def break_both(call: Call) -> None:
        call.abort()
        asyncio.get_running_loop().call_later(0.02, calls[0].abort)

    return calls.append, break_both, answers(OK)


async def _cut_at(at: int, cut: Callable[[RelayRig], None], way: Way) -> tuple[bool, int]:
    """One request, cut at the `at`-th wait; (whether it waited so often, promises seen at that moment)."""
    limits, hedges = EdgeLimits(inline_parse_bytes=0), HedgeRules(0.95, 0.02) if way.late else None
    async with relay(*way.scripts(), hasher=_Hasher(), limits=limits, hedges=hedges) as r:
        index, loop = r.router._index, asyncio.get_running_loop()
        for worker in r.fleet.workers.values():
            index.bind(worker.slot, block_size=16)
        if way.kept:
            assert (await r.ask(post(ask()))).status == 200
            await until(r.quiet)
        for _ in range(50 if way.late else 0):
            r.fleet.pools["m"].hedging.began(Kind.TEXT, 1.0, 0.001)
        before = len(r.outcomes)
        kept_promises = _promised(r)
        promised = 0

        def act() -> None:
            nonlocal promised
            promised = _promised(r) - kept_promises
            cut(r)

        cutter = Cutter(at, act)
        loop.set_task_factory(cutter.factory)
        try:
            client = await r.client()
            raw = post(ask())
            client.send(raw[:-5])
            await until(lambda: r.edge.open_exchanges == 1 or len(r.outcomes) > before)
            client.send(raw[-5:])
            await until(lambda: len(r.outcomes) > before)
        finally:
            loop.set_task_factory(None)
        await until(r.quiet)
        assert len(r.outcomes) == before + 1
        outcome = r.outcomes[-1]
        if cutter.acted:
            assert outcome.result is (Result.CLIENT_GONE if cut is _lost else Result.SHUT_DOWN)
            assert _promised(r) == kept_promises
        else:
            assert outcome.result is Result.COMPLETED
        assert r.edge.buffered_bytes == 0
        client.abort()
        await until(lambda: len(r.edge.deadlines) == 0)
        idle = sum(r.upstream.idle_connections(worker.spec.name) for worker in r.fleet.workers.values())
        await until(lambda: sum(len(worker.connections) for worker in r.workers) == idle)
        return cutter.acted, promised


WAYS = {
    "fresh": Way(_two_fail, 9),
    "kept": Way(_goes_stale, 6, kept=True),
    "second wins": Way(_second_wins, 8, late=True),
    "first wins": Way(_first_wins, 8, late=True),
    "both fail": Way(_both_fail, 10, late=True),
}


@both_loops
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("cut", [_lost, _shut_down, _cancelled])
async def test_cut_wherever_it_waits(cut: Callable[[RelayRig], None], way: Way) -> None:
    """Body, parsing and tokenising in a thread, connecting and waiting for a head; then three workers one after the
    other, or a stale connection and a fresh one, or two workers at a time."""
    at, promises = 0, 0
    acted = True
    while acted:
        at += 1
        acted, promised = await _cut_at(at, cut, way)
        promises += promised
    assert at - 1 >= way.waits, "a request waits at least this often"
    assert way.kept or promises > 0, "some cuts found blocks promised"


WIRE = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    + b"".join(b"%x\r\n%b\r\n" % (len(event), event) for event in (TOKEN, TOKEN, DONE))
    + b"0\r\n\r\n"
)
ERROR_EVENT = re.compile(rb'data: \{"error":\{"message":[^\n]*\n\n')


@both_loops
@pytest.mark.parametrize("usage_asked", [False, True])
async def test_a_worker_that_ends_at_any_byte_of_its_stream(usage_asked: bool) -> None:
    """Before the first byte of its body: 502. Then one error event, unless all of it has come."""
    raw = post(ask(stream=True, more=b',"stream_options":{"include_usage":true}' if usage_asked else b""))
    begun = WIRE.index(TOKEN) + 1
    async with relay(silent) as r:
        for cut in range(len(WIRE) + 1):
            client = await r.client()
            client.send(raw)
            call = await r.workers[0].call(cut)
            call.send(WIRE[:cut])
            call.close()
            answer = await client.answer()
            outcome = await r.outcome(cut)
            if cut < begun:
                assert (answer.status, outcome.result) == (502, Result.WORKER_FAILED)
            elif cut < len(WIRE):
                assert (answer.status, outcome.result, outcome.status) == (200, Result.WORKER_FAILED, 200)
                assert len(ERROR_EVENT.findall(answer.body)) == 1
                assert ERROR_EVENT.search(answer.body).end() == len(answer.body)  # type: ignore[union-attr]
                assert await client.rest() == b""
            else:
                assert (answer.body, outcome.result) == (TOKEN + TOKEN + DONE, Result.COMPLETED)
            client.abort()
            worker = next(iter(r.fleet.workers.values()))
            worker.health.reset(r.edge.clock())
        await until(r.quiet)
        assert len(r.outcomes) == len(WIRE) + 1


@both_loops
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_at_any_byte_of_its_answer(stream: bool) -> None:
    wire = WIRE if stream else b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(OK), OK)
    async with relay(silent) as r:
        for cut in range(len(wire)):
            client = await r.client()
            client.send(post(ask(stream=stream)))
            call = await r.workers[0].call(cut)
            call.send(wire[:cut])
            await asyncio.sleep(0)
            client.abort()
            async with asyncio.timeout(20):
                await call.gone.wait()
            outcome = await r.outcome(cut)
            assert outcome.result is Result.CLIENT_GONE
            await until(r.quiet)
        assert r.edge.buffered_bytes == 0
        await until(lambda: len(r.edge.deadlines) == 0)
