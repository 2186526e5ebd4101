"""Workers that announce themselves in a real Redis: they join, stay over its restart, leave in order or in silence."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from random import Random

import pytest
from structlog.testing import capture_logs

from gateway.discovery import Found
from gateway.records import WorkerId, WorkerSpec
from gateway.replicas import Announcer, RegistrySource
from gateway.replicas.registry import registry_key
from gateway.store_address import parse_store_url
from tests.integration.redis_server import RedisServer, redis_server
from tests.integration.rig import until
from tests.integration.two_gateways import replicas

BEAT_S = 0.3


class Listed:
    """What a source says."""

    def __init__(self) -> None:
        self.urls: list[str] = []
        self.looks = 0
        self.reason: str | None = None

    @property
    def workers(self) -> int:
        return len(self.urls)

    def present(self, found: object) -> None:
        assert isinstance(found, list)
        self.urls = sorted(one.spec.url for one in found if isinstance(one, Found))
        self.looks += 1

    def failed(self, reason: str) -> None:
        self.reason = reason


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


def _read(text: bytes) -> WorkerSpec:
    if b"wrong" in text:
        raise ValueError("wrong")
    return WorkerSpec(WorkerId(text.decode()), text.decode().strip('"'))


def _source(redis: RedisServer) -> RegistrySource:
    return RegistrySource(
        parse_store_url(redis.url), prefix="t", refresh_s=0.05, read=_read, clock=time.monotonic, rng=Random(1)
    )


def _announcer(redis: RedisServer, url: str, *, alive: bool = True) -> Announcer:
    async def answers() -> bool:
        return alive

    return Announcer(
        parse_store_url(redis.url),
        prefix="t",
        url=url,
        worker=f'"{url}"'.encode(),
        heartbeat_s=BEAT_S,
        alive=answers,
        on_change=lambda what: None,
    )


async def test_workers_come_stay_over_a_restart_of_the_store_and_go(redis: RedisServer) -> None:
    listed = Listed()
    two = [_announcer(redis, f"http://w{number}") for number in (1, 2)]
    async with asyncio.TaskGroup() as group:
        look = group.create_task(_source(redis).run(listed))
        beats = [group.create_task(one.run()) for one in two]
        dead = group.create_task(_announcer(redis, "http://dead", alive=False).run())
        await until(lambda: listed.urls == ["http://w1", "http://w2"])

        await redis.kill()
        await until(lambda: listed.reason is not None)
        beats[1].cancel()  # its side-car dies too
        await redis.start()  # empty
        before = listed.looks
        await until(lambda: listed.looks > before)
        assert listed.urls == ["http://w1", "http://w2"]
        await until(lambda: listed.urls == ["http://w1"])  # three beats later

        beats[0].cancel()
        await two[0].leave()
        before = listed.looks
        await until(lambda: listed.looks > before + 1)
        assert listed.urls == []
        for task in (look, dead):
            task.cancel()


async def test_a_record_that_cannot_be_read_hides_nobody(redis: RedisServer) -> None:
    listed = Listed()
    async with redis.client() as client:
        seconds, _ = await client.time()
        bad = [b"\xff", b"{}", b'{"url":"http://x","life_s":9,"worker":"wrong"}', b'{"url":"http://y","life_s":-1}']
        good = b'{"url":"http://w1","life_s":9,"worker":"http://w1"}'
        await client.zadd(registry_key("t"), {record: seconds + 60 for record in (*bad, good)})
    with capture_logs() as logs:
        look = asyncio.ensure_future(_source(redis).run(listed))
        await until(lambda: listed.looks > 2)
        look.cancel()
    assert listed.urls == ["http://w1"]
    assert [line["count"] for line in logs] == [4], "told once, not at every look"
    assert listed.reason is None, "it does answer"


async def test_the_command_takes_its_worker_out_on_sigterm(redis: RedisServer) -> None:
    more = {"workers": [], "discovery": {"registry": {"refresh_s": 0.1}}}
    async with replicas(0, store=redis.url, engines=1, more=more) as rig:
        gateway = await rig.add(wait=False)
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "register", "--redis", redis.url, "--worker", rig.engines[0].url,
            "--heartbeat", "0.5", "--pool", "announced", stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        await gateway.until_ready(20.0)
        (worker,) = gateway.fleet.workers.values()
        assert worker.spec.pool == "announced"
        answer = await rig.clients[0].post(
            "/v1/completions", json={"model": "demo", "prompt": [1, 2, 3], "max_tokens": 1}
        )
        assert answer.status_code == 200
        command.terminate()
        assert await asyncio.wait_for(command.wait(), 20.0) == 0
        await until(lambda: not gateway.fleet.workers)
