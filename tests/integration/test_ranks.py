"""A data-parallel engine behind a whole gateway: each rank with its own cache, feed, load and requests.

The engine is two simulated ones behind one port that speaks as vLLM's front end does: the header names the rank,
`/metrics` has one series a rank, `/kv_event_sources` one endpoint a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import httpx
import uvicorn

from gateway.config import Settings
from gateway.pool import WorkerState
from gateway.records import EngineKind, WorkerId
from gateway.runtime import Gateway
from gateway.sim.server import SimulatedWorker, Speech
from gateway.upstream.load_text import parse_metrics
from tests.integration.rig import PATIENCE_S, fast, until

R0, R1 = WorkerId("w1@0"), WorkerId("w1@1")


class TwoRanks:
    """The front end. `ranks` counts clients' requests (not probes) by the rank their header names, None without one."""

    def __init__(self, engines: list[SimulatedWorker], http: httpx.AsyncClient) -> None:
        self.engines = engines
        self.ranks: Counter[str | None] = Counter()
        self.asked: Counter[str] = Counter()
        self._http = http

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        path = scope["path"]
        self.asked[path] += 1
        if scope["method"] == "POST" and path != "/tokenize":
            headers = {name.decode(): value.decode() for name, value in scope["headers"]}
            named = headers.get("x-data-parallel-rank")
            if "x-request-id" in headers:
                self.ranks[named] += 1
            body = b""
            while True:
                message = await receive()
                body += message.get("body", b"")
                if not message.get("more_body"):
                    break
            answer = await self._http.post(self.engines[int(named or 0)].url + path, content=body)
        elif path in ("/metrics", "/kv_event_sources"):
            each = [await self._http.get(engine.url + path) for engine in self.engines]
            answer = each[0]
            if path == "/metrics":
                texts = [one.text.replace('engine="0"', f'engine="{n}"') for n, one in enumerate(each)]
                return await _send(send, 200, "".join(texts).encode())
            return await _send(send, 200, json.dumps({str(n): one.json()["0"] for n, one in enumerate(each)}).encode())
        else:
            answer = await self._http.request(scope["method"], self.engines[0].url + path)
        await _send(send, answer.status_code, answer.content)


async def _send(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-length", b"%d" % len(body)), (b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Stand:
    """The gateway, the front end, its engines, and a client."""

    def __init__(self, gateway: Gateway, front: TwoRanks, url: str, admin_url: str, http: httpx.AsyncClient) -> None:
        self.gateway, self.front, self.url, self.admin_url, self.http = gateway, front, url, admin_url, http
        self.stop_front: Callable[[], Awaitable[None]]
        self.start_front: Callable[[], Awaitable[None]]

    async def complete(self, prompt: list[int], **headers: str) -> httpx.Response:
        body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
        answer = await self.http.post(self.url + "/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    async def warm(self, rank: int, prompt: list[int]) -> None:
        """Straight to an engine, so that only its events can tell the gateway."""
        url = self.front.engines[rank].url
        await self.http.post(url + "/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})

    def blocks(self, name: WorkerId) -> int:
        return self.gateway.index.gpu_blocks([self.gateway.fleet.workers[name].slot])[0]


@contextlib.asynccontextmanager
async def stand(**worker: Any) -> AsyncIterator[Stand]:
    async with contextlib.AsyncExitStack() as stack:
        settings = fast(speed=100.0, version=worker.pop("version", "0.32.0"))
        speech = Speech.load(settings.tokenizer)
        engines = [SimulatedWorker(settings, wall_clock=time.time, speech=speech) for _ in range(2)]
        for engine in engines:
            await engine.start()
            stack.push_async_callback(engine.stop)
        http = await stack.enter_async_context(httpx.AsyncClient(timeout=PATIENCE_S))
        front = TwoRanks(engines, http)
        running: list[tuple[uvicorn.Server, asyncio.Task[None]]] = []
        port = 0

        async def start() -> None:
            nonlocal port
            listener = socket.create_server(("127.0.0.1", port))
            port = listener.getsockname()[1]
            config = uvicorn.Config(front, log_config=None, lifespan="off", timeout_graceful_shutdown=1)
            server = uvicorn.Server(config)
            running.append((server, asyncio.create_task(server.serve(sockets=[listener]))))
            await until(lambda: server.started)

        async def stop() -> None:
            while running:
                server, task = running.pop()
                server.should_exit = True
                await task

        await start()
        stack.push_async_callback(stop)
        tree: dict[str, Any] = {
            "server": {"host": "127.0.0.1", "port": 0, "admin_port": 0, "drain_timeout_s": 5},
            "workers": [{"url": f"http://127.0.0.1:{port}", "name": "w1", **worker}],
            "load": {"poll_s": 0.1},
        }
        gateway = Gateway(Settings(**tree), rng=Random(1))
        ports = await gateway.start()
        stack.push_async_callback(gateway.stop)
        await gateway.until_ready(PATIENCE_S)
        made = Stand(gateway, front, ports.url, ports.admin_url, http)
        made.start_front, made.stop_front = start, stop
        yield made


def prompt_of(seed: int, blocks: int) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(300, 4000) for _ in range(16 * blocks + 1)]


async def test_a_request_goes_to_the_rank_that_holds_its_prefix() -> None:
    async with stand() as s:
        assert set(s.gateway.fleet.workers) == {R0, R1}
        prompts = {rank: prompt_of(rank, 8) for rank in (0, 1)}
        for rank, prompt in prompts.items():
            await s.warm(rank, prompt)
        await until(lambda: s.blocks(R0) >= 8 and s.blocks(R1) >= 8)
        for rank in (1, 0, 1, 0):
            answer = await s.complete(prompts[rank])
            assert answer.headers["x-kvgate-worker"] == f"w1@{rank}"
            assert answer.headers["x-kvgate-predicted-tokens"] == "128"
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 128
        assert s.front.ranks == {"0": 2, "1": 2}
        # A rank's cache is not the other's: a prefix of rank 1 is no hit on rank 0, whatever the client says.
        answer = await s.complete(prompts[1], **{"x-data-parallel-rank": "0"})
        assert answer.headers["x-kvgate-worker"] == "w1@1"
        assert s.front.ranks["1"] == 3


async def test_cold_requests_spread_over_ranks_and_nothing_stays_counted() -> None:
    async with stand() as s:
        answers = await asyncio.gather(*(s.complete(prompt_of(100 + n, 2)) for n in range(40)))
        chosen = Counter(answer.headers["x-kvgate-worker"] for answer in answers)
        assert set(chosen) == {"w1@0", "w1@1"}
        assert min(chosen.values()) >= 8
        assert {f"w1@{rank}": count for rank, count in s.front.ranks.items()} == chosen
        workers = s.gateway.fleet.workers.values()
        await until(lambda: all(worker.inflight_requests == 0 for worker in workers))
        metrics = (await s.http.get(s.admin_url + "/metrics")).text
        for name in (R0, R1):
            assert f'kvgate_accounting_drift{{worker="{name}"}} 0' in metrics


async def test_load_is_each_ranks_own_and_asked_for_once() -> None:
    async with stand() as s:
        await s.warm(0, prompt_of(1, 2))
        await s.warm(1, prompt_of(2, 40))
        async with asyncio.timeout(PATIENCE_S):
            while True:
                texts = [(await s.http.get(engine.url + "/metrics")).content for engine in s.front.engines]
                said = [parse_metrics(text, EngineKind.VLLM).prefix_queries for text in texts]
                loads = [s.gateway.fleet.workers[name].load for name in (R0, R1)]
                if [load.prefix_queries for load in loads if load is not None] == said:
                    break
                await asyncio.sleep(0.05)
        assert said[0] != said[1] == 641
        member = s.gateway.membership.members[WorkerId("w1")]
        assert member.poller is not None
        polls = member.poller.counts.ok
        assert s.front.asked["/metrics"] <= polls + 10  # probes beside them, none of them twice for two ranks


async def test_ranks_in_the_admin_port() -> None:
    async with stand() as s:
        listed = (await s.http.get(s.admin_url + "/admin/workers")).json()["workers"]
        assert [(w["id"], w["member"], w["rank"], w["ranks"], w["state"]) for w in listed] == [
            ("w1@0", "w1", 0, [0], "ready"),
            ("w1@1", "w1", 1, [1], "ready"),
        ]
        assert [w["feed"]["phases"] for w in listed] == [{"0": "live"}, {"1": "live"}]
        assert (await s.http.get(s.admin_url + "/admin/workers/w1@1")).json()["rank"] == 1
        several = await s.http.get(s.admin_url + "/admin/workers/w1")
        assert (several.status_code, "w1@0, w1@1" in several.text) == (404, True)
        refused = await s.http.delete(s.admin_url + "/admin/workers/w1@1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "worker_is_rank")
        assert set(s.gateway.fleet.workers) == {R0, R1}
        url = listed[0]["url"]
        assert (await s.http.delete(s.admin_url + "/admin/workers/w1")).status_code == 204
        assert not s.gateway.fleet.workers
        metrics = (await s.http.get(s.admin_url + "/metrics")).text
        assert "w1@" not in metrics
        joined = await s.http.post(s.admin_url + "/admin/workers", json={"url": url, "name": "again"})
        assert (joined.status_code, joined.json()["id"], joined.json()["member"]) == (201, "again@0", "again")
        assert set(s.gateway.fleet.workers) == {"again@0", "again@1"}


async def test_a_server_that_is_away_is_away_for_all_its_ranks() -> None:
    async with stand() as s:
        workers = s.gateway.fleet.workers
        await s.stop_front()
        body = {"model": "demo", "prompt": prompt_of(5, 2), "max_tokens": 1}
        answer = await s.http.post(s.url + "/v1/completions", json=body)
        assert answer.status_code == 502
        assert answer.headers["x-kvgate-retries"] == "0"  # the other rank is behind the same port
        await until(lambda: {worker.state for worker in workers.values()} == {WorkerState.DOWN})
        assert (await s.http.post(s.url + "/v1/completions", json=body)).status_code == 503
        await s.start_front()
        await until(lambda: {worker.state for worker in workers.values()} == {WorkerState.READY})
        await s.complete(prompt_of(5, 2))


async def test_ranks_that_cannot_be_named_are_one_worker() -> None:
    """The overlap is then what the best rank may hold, and the engine chooses."""
    async with stand(version="0.10.2") as s:
        assert set(s.gateway.fleet.workers) == {"w1"}
        prompt = prompt_of(7, 8)
        await s.warm(1, prompt)
        await until(lambda: s.blocks(WorkerId("w1")) >= 8)
        answer = await s.complete(prompt, **{"x-data-parallel-rank": "1"})
        assert answer.headers["x-kvgate-worker"] == "w1"
        assert answer.headers["x-kvgate-predicted-tokens"] == "128"
        assert s.front.ranks == {None: 1}
        (worker,) = (await s.http.get(s.admin_url + "/admin/workers")).json()["workers"]
        assert "ranks_as_one" in {finding["code"] for finding in worker["findings"]}
        assert worker["ranks"] == [0, 1]


async def test_ranks_can_be_kept_together() -> None:
    async with stand(ranks="one") as s:
        assert set(s.gateway.fleet.workers) == {"w1"}
        assert len(s.gateway.membership.members[WorkerId("w1")].feeds) == 2
