"""Whatever becomes of requests, nothing stays counted: leases, streams, gauges, engines."""

from __future__ import annotations

import asyncio
import functools
import json
import subprocess
import sys
from pathlib import Path
from random import Random
from typing import Any

import httpx

from gateway.sim.server import SimulatedWorker
from tests.integration.rig import Rig, fast, rig, until

ROOT = Path(__file__).parents[2]
REQUESTS = 1000
AT_ONCE = 100


async def test_a_thousand_mixed_requests_a_third_aborted() -> None:
    """Streams and plain answers, chats and token prompts; every third client leaves, some before any byte."""
    async with rig(4, engine=fast(speed=20.0)) as r:
        chance = Random(11)
        gate = asyncio.Semaphore(AT_ONCE)
        results = await asyncio.gather(*(one(r, n, Random(chance.random()), gate) for n in range(REQUESTS)))
        completed, aborted = results.count("completed"), results.count("aborted")
        assert completed + aborted == REQUESTS
        assert aborted >= REQUESTS // 4

        await until(r.quiet, within_s=10)
        metrics = (await r.http.get(r.ports.admin_url + "/metrics")).text
        lines = dict(line.rsplit(" ", 1) for line in metrics.splitlines() if not line.startswith("#"))
        for engine in r.engines:
            name = engine.settings.name
            for gauge in ("worker_inflight_requests", "worker_inflight_tokens", "accounting_drift"):
                assert float(lines[f'kvgate_{gauge}{{worker="{name}"}}']) == 0
        assert (
            sum(float(value) for name, value in lines.items() if name.startswith("kvgate_requests_total")) == REQUESTS
        )
        assert r.gateway.index.stats().speculative <= 50_000


async def one(r: Rig, number: int, chance: Random, gate: asyncio.Semaphore) -> str:
    leaves = number % 3 == 0
    stream = chance.random() < 0.5
    body: dict[str, Any] = {"model": "demo", "stream": stream, "max_tokens": chance.randrange(4, 40)}
    if chance.random() < 0.5:
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": f"Question {chance.randrange(50)} of customer {number}?" * 8}]
    else:
        path = "/v1/completions"
        body["prompt"] = [chance.randrange(300, 4000) for _ in range(chance.randrange(20, 600))]
    if leaves:
        body["max_tokens"] = 2000
    async with gate:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(r.ports.url.rsplit(":", 1)[1]))
        try:
            writer.write(_request(path, body))
            await writer.drain()
            async with asyncio.timeout(chance.choice((0.01, 0.1, 0.25)) if leaves else 60):
                head = await reader.readuntil(b"\r\n\r\n")
                assert head.startswith(b"HTTP/1.1 200 "), head
                await reader.read()
            return "completed"
        except TimeoutError:
            assert leaves
            return "aborted"
        finally:
            writer.close()


def _request(path: str, body: dict[str, Any]) -> bytes:
    raw = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nhost: g\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%b" % (
        path.encode(),
        len(raw),
        raw,
    )


async def test_engines_hear_of_an_abort_within_a_second() -> None:
    """Of a stream, of a plain answer, and of requests whose prefill has not begun."""
    async with rig(1, engine=fast(speed=1.0)) as r:
        engine = r.engines[0]
        loop = asyncio.get_running_loop()
        for stream in (True, False):
            for count in (1, 8):
                aborted = engine.aborted
                body = {"model": "demo", "prompt": [400] * 3000, "max_tokens": 4000, "stream": stream}
                clients = [loop.create_task(_post(r.http, body)) for _ in range(count)]
                await until(functools.partial(_carries, engine, count))
                began = loop.time()
                for client in clients:
                    client.cancel()
                await asyncio.gather(*clients, return_exceptions=True)
                await until(functools.partial(_has_heard, engine, aborted + count))
                # A second is the promise; ten times that is for a busy machine.
                assert loop.time() - began < 10
        await until(r.quiet)


def _carries(engine: SimulatedWorker, count: int) -> bool:
    state = engine.state()
    return (
        state["running"] == count
        or state["waiting"] == count
        or (state["running"] == 1 and state["waiting"] == count - 1)
    )


def _has_heard(engine: SimulatedWorker, aborts: int) -> bool:
    return engine.aborted == aborts


async def _post(http: httpx.AsyncClient, body: dict[str, Any]) -> None:
    await http.post("/v1/completions", json=body)


def test_a_short_soak_accounts_for_every_request(tmp_path: Path) -> None:
    """Processes, faults and kills, as `python -m benchmarks.soak chaos` runs them for minutes."""
    out = tmp_path / "figures.json"
    command = [sys.executable, "-m", "benchmarks.soak", "chaos", "--minutes", "0.1", "--rate", "20", "--engines", "2"]
    done = subprocess.run([*command, "--out", str(out)], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(out.read_text())
    assert figures["accounted"] == figures["requests"]
    for nothing in ("lost", "tracebacks", "accounting_drift", "worker_inflight_requests", "worker_inflight_tokens"):
        assert figures[nothing] == 0, (nothing, figures)
