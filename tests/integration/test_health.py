"""Workers that fail in all ways, end to end: who is ejected and who is not, and how each comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
import structlog

from gateway.pool import Breaker, Worker, WorkerState
from gateway.records import WorkerId
from gateway.sim.faults import Fault, FaultKind
from tests.integration.rig import Rig, fast, rig, until

QUICK = {"health": {"open_s": 0.5, "probe_s": 0.5, "slow_start_s": 0.5}}
COMPLETIONS = "/v1/completions"


def ask(seed: int, **more: Any) -> dict[str, Any]:
    chance = Random(seed)
    return {"model": "demo", "prompt": [chance.randrange(300, 4000) for _ in range(40)], "max_tokens": 2, **more}


def worker(r: Rig, name: str) -> Worker:
    return r.gateway.fleet.workers[WorkerId(name)]


async def metric(r: Rig, series: str) -> float:
    text = (await r.http.get(r.ports.admin_url + "/metrics")).text
    return float(dict(line.rsplit(" ", 1) for line in text.splitlines()).get(f"kvgate_{series}", "0"))


async def many(r: Rig, count: int, **more: Any) -> list[httpx.Response]:
    """One after another."""
    return [await r.http.post(COMPLETIONS, json=ask(seed, **more)) for seed in range(count)]


def received(r: Rig) -> list[int]:
    return [engine.received for engine in r.engines]


# --------------------------------------------------------------------------- before the first byte


@pytest.mark.parametrize("kind", [FaultKind.RESET, FaultKind.STATUS])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_before_the_first_byte_is_silently_made_good(kind: FaultKind, stream: bool) -> None:
    async with rig(2, settings=QUICK) as r:
        for engine in r.engines:
            engine.fault(Fault(kind, times=1))
        first = await r.http.post(COMPLETIONS, json=ask(1, stream=stream))
        # Both fail once and no worker is tried twice: the second failure is the client's.
        assert first.status_code == (500 if kind is FaultKind.STATUS else 502)
        assert (received(r), first.headers["x-kvgate-retries"]) == ([1, 1], "1")
        r.engines[0].fault(Fault(kind, times=1))
        answers = await many(r, 8, stream=stream)
        assert [answer.status_code for answer in answers] == [200] * 8
        assert sorted(answer.headers["x-kvgate-retries"] for answer in answers) == ["0"] * 7 + ["1"]
        reason = "worker_status" if kind is FaultKind.STATUS else "worker_broken"
        assert await metric(r, f'retries_total{{reason="{reason}"}}') == 2
        await until(r.quiet)


async def test_nothing_is_tried_again_after_the_first_byte() -> None:
    async with rig(2, settings=QUICK) as r:
        r.engines[0].fault(Fault(FaultKind.CUT, after=2, times=1))
        r.engines[1].fault(Fault(FaultKind.CUT, after=2, times=1))
        answer = await r.http.post(COMPLETIONS, json=ask(1, stream=True, max_tokens=20))
        assert answer.status_code == 200
        assert b"worker_broken" in answer.content
        assert sum(received(r)) == 1


# --------------------------------------------------------------------------- what is no failure


async def test_the_breaker_never_opens_for_4xx() -> None:
    async with rig(2, settings=QUICK) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.STATUS, code=400))
        answers = await many(r, 100)
        assert [answer.status_code for answer in answers] == [400] * 100
        assert {answer.json()["error"]["message"] for answer in answers} == {"simulated fault"}
        assert sum(received(r)) == 100
        for engine in r.engines:
            engine.fault(Fault(FaultKind.HEAL))
            engine.fault(Fault(FaultKind.STATUS, code=429))
        answers = await many(r, 100)
        assert [answer.status_code for answer in answers] == [429] * 100
        assert all("retry-after" in answer.headers for answer in answers)
        assert sum(received(r)) == 300  # each was offered to both
        r.engines[0].fault(Fault(FaultKind.HEAL))
        # One worker without room, one with: nobody is turned away, whatever the budget of retries.
        assert [answer.status_code for answer in await many(r, 100)] == [200] * 100
        r.engines[1].fault(Fault(FaultKind.HEAL))
        assert [answer.status_code for answer in await many(r, 20)] == [200] * 20
        for name in ("w1", "w2"):
            assert (worker(r, name).state, worker(r, name).health.failures) == (WorkerState.READY, 0)
            assert await metric(r, f'breaker_state{{worker="{name}"}}') == 0
        assert await metric(r, 'retries_total{reason="worker_busy"}') >= 100


# --------------------------------------------------------------------------- one that hangs beside one that serves


async def test_a_worker_that_never_answers_beside_one_that_streams() -> None:
    settings = {**QUICK, "timeouts": {"first_byte_s": 5, "connect_s": 60}, "routing": {"policy": "round_robin"}}
    async with rig(2, settings=settings) as r:
        stuck = worker(r, "w1")
        r.engines[0].fault(Fault(FaultKind.FREEZE))
        seen: list[float] = []

        async def scrape() -> None:
            while True:
                seen.append(await metric(r, 'breaker_state{worker="w1"}'))
                await asyncio.sleep(0.2)

        scraping = asyncio.create_task(scrape())
        ends = await asyncio.gather(*(stream_one(r, seed) for seed in range(60)))
        # Half go to the one that streams; the others fail over as far as the budget of retries lasts.
        assert set(ends) <= {"whole", "504"}
        assert ends.count("whole") > 30
        await until(lambda: 2 in seen)
        assert stuck.state is WorkerState.EJECTED
        before = r.engines[0].received
        assert [answer.headers["x-kvgate-worker"] for answer in await many(r, 10)] == ["w2"] * 10
        await until(lambda: stuck.health.half_open_in_s(time.monotonic()) != 0 and r.engines[0].received > before)
        assert r.engines[0].received - before <= 6  # trials, one token each
        # It is repaired, nobody asks for anything, and it is back.
        r.engines[0].fault(Fault(FaultKind.HEAL))
        await until(lambda: stuck.state is WorkerState.READY)
        assert await metric(r, 'breaker_state{worker="w1"}') == 0
        scraping.cancel()
        assert {answer.headers["x-kvgate-worker"] for answer in await many(r, 4)} == {"w1", "w2"}
        await until(r.quiet)


async def stream_one(r: Rig, seed: int) -> str:
    """How a stream ended."""
    async with r.http.stream("POST", COMPLETIONS, json=ask(seed, stream=True, max_tokens=20)) as answer:
        if answer.status_code != 200:
            return str(answer.status_code)
        text = b"".join([piece async for piece in answer.aiter_raw()])
    return "whole" if text.rstrip().endswith(b"data: [DONE]") else "broken"


async def test_a_lone_worker_is_used_although_it_is_ejected_and_requests_bring_it_back() -> None:
    """Half open with traffic: the pool panics, and the first request that is answered closes the breaker."""
    settings = {"health": {"open_s": 600, "slow_start_s": 0.5}}
    async with rig(1, settings=settings) as r:
        only = worker(r, "w1")
        r.engines[0].fault(Fault(FaultKind.STATUS, times=5))
        assert [answer.status_code for answer in await many(r, 5)] == [500] * 5
        assert only.health.breaker is Breaker.OPEN
        assert await metric(r, 'pool_panic{model="demo"}') == 1
        assert (await many(r, 1))[0].status_code == 200
        assert only.state is WorkerState.DEGRADED
        assert [answer.status_code for answer in await many(r, 5)] == [200] * 5
        await until(lambda: only.state is WorkerState.READY)


# --------------------------------------------------------------------------- probes and requests disagree


class Between:
    """A connection to an engine that can be made to hang or fail for some paths."""

    def __init__(self, url: str) -> None:
        self.hung: set[bytes] = set()
        self.failing: set[bytes] = set()
        self._to = urlsplit(url)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        up_reader, up_writer = await asyncio.open_connection(self._to.hostname, self._to.port)
        back = asyncio.create_task(self._pipe(up_reader, writer))
        try:
            while data := await reader.read(65536):
                path = data.split(b" ", 2)[1].partition(b"?")[0] if data[:4] == b"GET " else b""
                if path in self.hung:
                    continue
                if path in self.failing:
                    writer.write(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
                    continue
                up_writer.write(data)
        except ConnectionError:
            pass
        finally:
            back.cancel()
            up_writer.close()
            writer.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
        writer.close()


@asynccontextmanager
async def between(url: str) -> AsyncIterator[tuple[Between, str]]:
    """The thing and its URL."""
    thing = Between(url)
    server = await asyncio.start_server(thing.serve, "127.0.0.1", 0)
    try:
        yield thing, f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()


async def test_requests_outweigh_probes() -> None:
    """`/metrics` hangs, probes flap: no client sees it and the worker stays. Probes pass, requests fail: it goes."""
    settings = {"health": {"open_s": 0.5, "probe_s": 0.1, "slow_start_s": 0.5}, "load": {"poll_s": 0.1}}
    async with rig(2, settings=settings) as r, between(r.engines[0].url) as (thing, url):
        assert (await r.http.delete(r.ports.admin_url + "/admin/workers/w1")).status_code == 204
        added = await r.http.post(r.ports.admin_url + "/admin/workers", json={"url": url, "name": "odd"})
        assert added.status_code == 201, added.text
        odd = worker(r, "odd")
        await until(lambda: odd.load is not None)
        thing.hung.add(b"/metrics")
        served = 0
        for round_ in range(20):
            thing.failing = {b"/v1/models"} if round_ % 2 else set()
            for answer in await many(r, 4):
                assert answer.status_code == 200
                served += answer.headers["x-kvgate-worker"] == "odd"
            assert odd.state in (WorkerState.READY, WorkerState.DEGRADED)
            await asyncio.sleep(0.05)
        assert served
        await until(lambda: odd.load is None)  # too old to be believed
        assert odd.health.breaker is Breaker.CLOSED
        thing.hung.clear()
        thing.failing.clear()
        r.engines[0].fault(Fault(FaultKind.STATUS, code=500))
        before = r.engines[0].received
        for _ in range(60):
            assert [answer.status_code for answer in await many(r, 4)] == [200] * 4
            if odd.state is WorkerState.EJECTED:
                break
        assert odd.state is WorkerState.EJECTED
        assert r.engines[0].received - before >= 5
        r.engines[0].fault(Fault(FaultKind.HEAL))
        await until(lambda: odd.state is WorkerState.READY)


# --------------------------------------------------------------------------- one 503


async def test_a_single_503_ejects_nobody() -> None:
    async with rig(2, settings=QUICK) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.STATUS, code=503, times=1))
        await many(r, 1)
        assert received(r) == [1, 1]
        assert [answer.status_code for answer in await many(r, 10)] == [200] * 10
        assert {worker(r, name).state for name in ("w1", "w2")} == {WorkerState.READY}


async def test_one_that_is_ejected_for_it_is_back_without_traffic() -> None:
    settings = {"health": {**QUICK["health"], "failures": 1}}
    async with rig(3, settings=settings) as r:
        r.engines[0].fault(Fault(FaultKind.STATUS, code=503, times=1))
        idle = worker(r, "w1")
        for seed in range(60):
            assert (await r.http.post(COMPLETIONS, json=ask(seed))).status_code == 200
            if idle.state is WorkerState.EJECTED:
                break
        assert idle.state is WorkerState.EJECTED
        answer = await r.admin("/admin/workers/w1")
        assert (answer["state"], answer["reason"], answer["health"]["breaker"]) == ("ejected", "worker_status", "open")
        await until(lambda: idle.state is WorkerState.READY)


# --------------------------------------------------------------------------- operators


async def test_a_drained_worker_finishes_what_it_has_and_gets_nothing_new() -> None:
    async with rig(2, engine=fast(speed=5.0)) as r:
        async with r.http.stream("POST", COMPLETIONS, json=ask(1, stream=True, max_tokens=40)) as answer:
            name = answer.headers["x-kvgate-worker"]
            drained = await r.http.post(r.ports.admin_url + f"/admin/workers/{name}/drain")
            assert drained.json()["workers"][0]["state"] == "draining"
            others = {row.headers["x-kvgate-worker"] for row in await many(r, 6)}
            assert others == {"w1", "w2"} - {name}
            text = b"".join([piece async for piece in answer.aiter_raw()])
        assert text.rstrip().endswith(b"data: [DONE]")
        assert await metric(r, f'worker_state{{worker="{name}",state="draining"}}') == 1
        await r.http.post(r.ports.admin_url + f"/admin/workers/{name}/undrain")
        await until(lambda: worker(r, name).state is WorkerState.READY)


async def test_each_change_is_one_line_in_the_log() -> None:
    with structlog.testing.capture_logs() as lines:
        await eject_and_recover()
    changes = [line for line in lines if line["event"] == "worker state changed"]
    assert [(line["worker"], line["state"], line["reason"]) for line in changes] == [
        ("w1", "ejected", "worker_status"),
        ("w1", "degraded", "slow_start"),
        ("w1", "ready", None),
    ]
    assert [line["log_level"] for line in changes] == ["warning", "info", "info"]
    assert [line["model"] for line in lines if "too many workers are ejected" in line["event"]] == ["demo"]


async def eject_and_recover() -> None:
    """A lone worker, without traffic."""
    async with rig(1, settings={"health": {"failures": 1, "open_s": 0.5, "slow_start_s": 0.5}}) as r:
        r.engines[0].fault(Fault(FaultKind.STATUS, times=1))
        await many(r, 1)
        await until(lambda: worker(r, "w1").state is WorkerState.READY)
        await asyncio.sleep(0.6)  # a look of the log later
