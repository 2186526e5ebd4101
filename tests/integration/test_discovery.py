"""Probes and load polls over real sockets, against servers that replay what engines answered."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import ANY

import pytest
import uvicorn

from gateway.records import EngineKind, LoadSample, LoadSource, WorkerId, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed, open_control_client
from gateway.upstream.discovery import probe
from gateway.upstream.load import COUNTER_POLLS, LoadPoller

ENGINES = Path(__file__).parents[1] / "golden" / "engines"


class Replay:
    """An ASGI application that answers what was recorded, and can misbehave."""

    def __init__(self, engine: str) -> None:
        recorded = json.loads((ENGINES / engine / "answers.json").read_text())
        self.answers = {path: (answer["status"], answer["body"].encode()) for path, answer in recorded.items()}
        self.answers["/metrics"] = (200, (ENGINES / engine / "metrics.txt").read_bytes())
        self.hanging: set[str] = set()
        self.endless: set[str] = set()
        self.trickling: set[str] = set()
        self.asked: list[str] = []
        self.over = asyncio.Event()

    async def __call__(self, scope: dict[str, Any], receive: Callable[[], Awaitable[Any]], send: Any) -> None:
        path = scope["path"]
        self.asked.append(path)
        if path in self.hanging:
            await self.over.wait()
        status, body = self.answers.get(path, (404, b"{}"))
        await send({"type": "http.response.start", "status": status, "headers": []})
        while path in self.endless | self.trickling and not self.over.is_set():
            await send({"type": "http.response.body", "body": b"x" * 65536, "more_body": True})
            await asyncio.sleep(0.01 if path in self.trickling else 0)
        await send({"type": "http.response.body", "body": body})


@contextlib.asynccontextmanager
async def serving(app: Replay) -> AsyncIterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        config = uvicorn.Config(app, log_config=None, log_level="error", lifespan="off", timeout_graceful_shutdown=1)
        server = uvicorn.Server(config)
        running = asyncio.create_task(server.serve(sockets=[listener]))
        try:
            async with asyncio.timeout(20):
                while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
                    await asyncio.sleep(0.01)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            app.over.set()
            server.should_exit = True
            await running


@pytest.fixture
async def client() -> AsyncIterator[ControlClient]:
    async with open_control_client(timeout_s=20) as control:
        yield control


def spec(url: str, **more: Any) -> WorkerSpec:
    return WorkerSpec(name=WorkerId("w1"), url=url, **more)


@pytest.mark.parametrize(
    ("engine", "kind", "block_size", "feeds"),
    [
        ("vllm-0.32.0", EngineKind.VLLM, 32, 1),
        ("vllm-0.16.0", EngineKind.VLLM, 32, 0),
        ("sglang-0.5.23", EngineKind.SGLANG, 16, 1),
    ],
)
async def test_an_engine_is_known_from_its_url(
    engine: str, kind: EngineKind, block_size: int, feeds: int, client: ControlClient
) -> None:
    async with serving(Replay(engine)) as url:
        facts = await probe(spec(url), client)
    assert (facts.engine, facts.version) == (kind, engine.rpartition("-")[2])
    assert (facts.models, facts.block_size, facts.max_model_len) == (("tiny",), block_size, 2048)
    assert len(facts.events) == feeds
    assert all(source.endpoint.startswith("tcp://127.0.0.1:") for source in facts.events)


async def test_a_worker_that_is_not_up_is_told_from_a_broken_one(client: ControlClient) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with pytest.raises(ProbeFailed, match="is the worker running"):
        await probe(spec(url), client)


@pytest.mark.parametrize("url", ["ftp://127.0.0.1:1", "http://", "127.0.0.1:8000"])
async def test_an_address_that_is_none(url: str, client: ControlClient) -> None:
    with pytest.raises(ProbeFailed):
        await probe(spec(url), client)


async def test_a_hanging_answer_ends_at_the_deadline() -> None:
    app = Replay("vllm-0.32.0")
    app.hanging.add("/v1/models")
    async with serving(app) as url, open_control_client(timeout_s=0.2) as client:
        with pytest.raises(ProbeFailed, match=r"within 0\.2 s"):
            await probe(spec(url), client)


async def test_a_trickling_answer_ends_at_the_deadline_too() -> None:
    app = Replay("vllm-0.32.0")
    app.trickling.add("/v1/models")
    async with serving(app) as url, open_control_client(timeout_s=0.3, max_bytes=1 << 40) as client:
        with pytest.raises(ProbeFailed, match=r"within 0\.3 s"):
            await probe(spec(url), client)


async def test_an_endless_answer_is_cut() -> None:
    app = Replay("vllm-0.32.0")
    app.endless.add("/v1/models")
    async with serving(app) as url, open_control_client(timeout_s=60, max_bytes=1_000_000) as client:
        with pytest.raises(ProbeFailed, match="more than 1000000 bytes"):
            await probe(spec(url), client)


async def test_hanging_metrics_cost_the_cache_geometry_only() -> None:
    app = Replay("vllm-0.32.0")
    app.hanging.add("/metrics")
    async with serving(app) as url, open_control_client(timeout_s=1) as client:
        facts = await probe(spec(url), client)
    assert (facts.engine, facts.models, facts.block_size, len(facts.events)) == (EngineKind.VLLM, ("tiny",), None, 1)
    assert any("/metrics" in finding.message for finding in facts.findings)


# --------------------------------------------------------------------------- polling


class Samples:
    """Collects what a poller delivers; `wait` until there are enough."""

    def __init__(self) -> None:
        self.seen: list[tuple[WorkerId, LoadSample]] = []
        self._more = asyncio.Event()

    def __call__(self, worker: WorkerId, sample: LoadSample) -> None:
        self.seen.append((worker, sample))
        self._more.set()

    async def wait(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.seen) < count:
                self._more.clear()
                await self._more.wait()


class Pollers:
    """Makes pollers, and ends what they leave open."""

    def __init__(self, client: ControlClient) -> None:
        self._client = client
        self._made: list[LoadPoller] = []

    def __call__(self, url: str, engine: EngineKind, samples: Samples, **more: Any) -> LoadPoller:
        made = LoadPoller(
            spec(url),
            engine,
            client=self._client,
            on_sample=samples,
            random=Random(7),
            **{"poll_s": 0.01, "timeout_s": 20, **more},
        )
        self._made.append(made)
        return made

    async def close(self) -> None:
        for made in self._made:
            made.close()
        # A transport is closed by the loop, in the turns after `close`.
        for _ in range(5):
            await asyncio.sleep(0)


@pytest.fixture
async def poller(client: ControlClient) -> AsyncIterator[Pollers]:
    pollers = Pollers(client)
    yield pollers
    await pollers.close()


async def test_polls_go_on_until_cancelled(poller: Pollers) -> None:
    samples = Samples()
    async with serving(Replay("vllm-0.32.0")) as url:
        polling = poller(url, EngineKind.VLLM, samples)
        task = asyncio.create_task(polling.run())
        await samples.wait(3)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert {worker for worker, _ in samples.seen} == {"w1"}
    assert (samples.seen[0][1].running, samples.seen[0][1].waiting) == (16, 8)
    assert polling.counts.ok == len(samples.seen)
    assert (polling.counts.failed, polling.counts.last_error) == (0, None)


async def test_an_idle_worker_is_polled_every_third_time(poller: Pollers) -> None:
    """Until something of ours, or of somebody else, is there; then at every period again."""
    app, samples, ours = Replay("vllm-0.32.0"), Samples(), [False]
    busy = app.answers["/metrics"][1]
    lines = [line for line in busy.splitlines() if not line.startswith(b"vllm:num_requests")]
    idle = b"\n".join([*lines, b"vllm:num_requests_running 0", b"vllm:num_requests_waiting 0"])
    app.answers["/metrics"] = (200, idle)

    def asked(looks: int, polling: LoadPoller) -> int:
        return sum(not polling.skips() for _ in range(looks))

    async with serving(app) as url:
        polling = poller(url, EngineKind.VLLM, samples, unused=lambda: not ours[0])
        for _ in range(2):
            await polling.poll()
        assert asked(6, polling) == 6  # it was idle only just now
        await polling.poll()
        assert asked(6, polling) == 2
        ours[0] = True
        assert asked(6, polling) == 6
        ours[0] = False
        polling.tighten(True)
        assert asked(6, polling) == 6
        polling.tighten(False)
        app.answers["/metrics"] = (200, busy)
        await polling.poll()
        assert asked(6, polling) == 6
        app.answers["/metrics"] = (500, b"")
        await polling.poll()
        assert asked(6, polling) == 6


async def test_a_failed_poll_is_counted_and_the_next_good_one_delivers(poller: Pollers) -> None:
    app, samples = Replay("vllm-0.32.0"), Samples()
    good = app.answers["/metrics"]
    async with serving(app) as url:
        polling = poller(url, EngineKind.VLLM, samples)
        app.answers["/metrics"] = (500, b"")
        await polling.poll()
        assert (polling.counts.failed, samples.seen) == (1, [])
        assert "answered 500" in (polling.counts.last_error or "")
        app.answers["/metrics"] = (200, b"nothing of use\n")
        await polling.poll()
        assert polling.counts.failed == 2
        app.answers["/metrics"] = good
        await polling.poll()
    assert (polling.counts.ok, polling.counts.failed, polling.counts.last_error) == (1, 2, None)
    assert len(samples.seen) == 1


async def test_a_worker_whose_metrics_hang_delays_no_other(poller: Pollers) -> None:
    stuck, fine = Replay("vllm-0.32.0"), Replay("vllm-0.32.0")
    stuck.hanging.add("/metrics")
    samples = Samples()
    async with serving(stuck) as stuck_url, serving(fine) as fine_url:
        hangs = poller(stuck_url, EngineKind.VLLM, samples, timeout_s=60)
        works = poller(fine_url, EngineKind.VLLM, samples)
        tasks = [asyncio.create_task(item.run()) for item in (hangs, works)]
        await samples.wait(5)
        assert (hangs.counts.ok, hangs.counts.failed) == (0, 0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_hanging_poll_ends_at_its_deadline(poller: Pollers) -> None:
    app, samples = Replay("vllm-0.32.0"), Samples()
    app.hanging.add("/metrics")
    async with serving(app) as url:
        polling = poller(url, EngineKind.VLLM, samples, timeout_s=0.1)
        await polling.poll()
    assert polling.counts.failed == 1


async def test_sglang_is_asked_for_its_loads_and_seldom_for_its_counters(poller: Pollers) -> None:
    app, samples = Replay("sglang-0.5.23"), Samples()
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples)
        for _ in range(COUNTER_POLLS + 1):
            await polling.poll()
    assert (app.asked.count("/v1/loads"), app.asked.count("/metrics")) == (COUNTER_POLLS + 1, 2)
    assert {sample.prefix_hits for _, sample in samples.seen} == {7408}
    assert samples.seen[-1][1].kv_blocks == 512


async def test_sglang_without_metrics_still_tells_its_load(poller: Pollers) -> None:
    app, samples = Replay("sglang-0.5.23"), Samples()
    app.answers["/metrics"] = (404, b"")
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples)
        await polling.poll()
    assert (polling.counts.ok, polling.counts.failed) == (1, 0)
    assert "404" in (polling.counts.counters_error or "")
    assert samples.seen[0][1].prefix_hits is None


async def test_where_sockets_tell_the_load_polls_are_seldom_and_bring_counters_only(poller: Pollers) -> None:
    app, samples, silent = Replay("sglang-0.5.23"), Samples(), set[int | None]()
    told = LoadSample(1, 0, 0.5, source=LoadSource.SOCKET)
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples)
        await polling.poll()
        polling.hears = lambda rank: rank not in silent
        polling.heard({None: told, 7: told})
        assert samples.seen[1:] == [("w1", replace(told, prefix_queries=ANY, prefix_hits=7408, kv_blocks=512))]
        looks = [polling.skips() for _ in range(2 * COUNTER_POLLS)]
        assert looks.count(False) == 2
        await polling.poll()
        assert app.asked.count("/metrics") == 2, "at every one of these polls"
        assert len(samples.seen) == 2, "what a poll says of the load may be older"
        polling.restarted()
        assert not polling.skips(), "another process's counters are read soon"
        polling.heard({None: told})
        assert samples.seen[-1] == ("w1", told), "and none before that"
        assert polling.skips()
        silent.add(None)
        assert not polling.skips()
        await polling.poll()
        assert samples.seen[-1][1].source is LoadSource.POLL


async def test_one_silent_rank_is_polled_for_with_its_url_at_the_usual_pace(poller: Pollers) -> None:
    app, samples = Replay("sglang-0.5.23"), Samples()
    loads = [{"dp_rank": rank, "num_running_reqs": 5, "num_waiting_reqs": 0} for rank in (0, 1)]
    app.answers["/v1/loads"] = (200, json.dumps({"loads": loads}).encode())
    names = {0: WorkerId("w1@0"), 1: WorkerId("w1@1")}
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples, workers=names)
        polling.hears = lambda rank: rank == 0
        assert not any(polling.skips() for _ in range(5))
        await polling.poll()
    assert [worker for worker, _ in samples.seen] == ["w1@1"]
    assert polling.counts.ok == 1


async def test_sglang_before_v1_loads(poller: Pollers) -> None:
    app, samples = Replay("sglang-0.5.23"), Samples()
    del app.answers["/v1/loads"]
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples)
        await polling.poll()
        await polling.poll()
    assert app.asked == ["/v1/loads", "/get_load", "/metrics", "/metrics"]
    assert samples.seen[0][1].prefix_hits == 7408


async def test_sglang_before_v1_loads_and_without_metrics_tells_its_load_all_the_same(poller: Pollers) -> None:
    """As 0.5.3 to 0.5.7 do; when the server has failed its paths are found out again, it may be a newer one."""
    app, samples = Replay("sglang-0.5.23"), Samples()
    newer, app.answers["/metrics"] = app.answers.pop("/v1/loads"), (404, b"")
    app.answers["/get_load"] = (200, b'[{"dp_rank": 0, "num_reqs": 7, "num_waiting_reqs": 3, "num_tokens": 4096}]')
    async with serving(app) as url:
        polling = poller(url, EngineKind.SGLANG, samples)
        for _ in range(2):
            await polling.poll()
        assert app.asked == ["/v1/loads", "/get_load", "/metrics", "/get_load"]
        assert samples.seen[1][1] == LoadSample(4, 3, None, kv_tokens=4096)
        app.answers["/get_load"] = (503, b"")
        await polling.poll()
        app.answers["/v1/loads"] = newer
        await polling.poll()
    assert (polling.counts.ok, polling.counts.failed) == (3, 1)
    assert app.asked[-1] == "/v1/loads"
    assert (samples.seen[-1][1].running, samples.seen[-1][1].kv_tokens) == (0, None)


async def test_a_rank_that_is_gone_is_told_once_and_the_others_count_on(poller: Pollers) -> None:
    """The server has fewer ranks than it had: what is there now must be asked."""
    app, samples = Replay("vllm-0.32.0"), Samples()
    told: list[int] = []
    async with serving(app) as url:
        ranks = {0: WorkerId("w1@0"), 1: WorkerId("w1@1")}
        polling = poller(url, EngineKind.VLLM, samples, workers=ranks, on_missing=lambda: told.append(1))
        for _ in range(3):
            await polling.poll()
        assert (polling.counts.ok, polling.counts.failed, told) == (0, 3, [1])
        assert "rank 1" in (polling.counts.last_error or "")
        polling.workers = {None: WorkerId("w1")}
        await polling.poll()
    assert [worker for worker, _ in samples.seen] == ["w1@0"] * 3 + ["w1"]
    assert (polling.counts.ok, polling.counts.last_error) == (1, None)
