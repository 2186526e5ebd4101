"""A gateway that is named as a worker of itself, directly or over another, is found when it is probed."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.records import WorkerId, WorkerSpec
from gateway.runtime import Gateway
from gateway.upstream.control import GATEWAYS_HEADER
from tests.integration.redis_server import RedisServer, redis_server
from tests.integration.rig import Rig, rig, until, write_yaml

SELF = WorkerId("self")
OFTEN = {"health": {"probe_s": 0.05}}


def error_of(gateway: Gateway, name: str) -> str:
    member = gateway.membership.members.get(WorkerId(name))
    return (member.error or "") if member is not None else ""


async def names_behind(r: Rig) -> list[str]:
    return str((await r.http.get("/health")).headers[GATEWAYS_HEADER]).split(",")


async def test_an_operator_cannot_add_the_gateway_to_itself() -> None:
    async with rig(1) as r:
        for url in (r.ports.url, r.ports.admin_url, r.ports.url.replace("127.0.0.1", "localhost")):
            answer = await r.http.post(f"{r.ports.admin_url}/admin/workers", json={"url": url, "name": "self"})
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["param"]) == (422, "worker_is_this_gateway", "url")
        assert set(r.gateway.membership.members) == set(r.gateway.fleet.workers) == {"w1"}


async def test_a_source_that_names_the_gateway_itself_gets_nothing_there(tmp_path: Path) -> None:
    path = tmp_path / "kvgate.yaml"
    async with rig(1, settings=OFTEN, file=path) as r:
        engine = {"url": r.engines[0].url, "name": "w1"}
        server = {"host": "127.0.0.1", "port": 0, "admin_port": 0}
        write_yaml(path, {"server": server, "workers": [engine, {"url": r.ports.url, "name": "self"}], **OFTEN})
        await r.gateway.reload()
        await until(lambda: "is this gateway itself" in error_of(r.gateway, "self"))
        for _ in range(5):
            answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "hello", "max_tokens": 1})
            assert answer.headers["x-kvgate-worker"] == "w1"
        assert SELF not in r.gateway.fleet.workers
        listed = await r.admin("/admin/workers")
        assert "is this gateway itself" in listed["joining"][0]["error"]


async def test_gateways_that_name_each_other_do_not_go_round() -> None:
    async with rig(1, settings=OFTEN) as one, rig(1, settings=OFTEN) as two:
        answer = await one.http.post(f"{one.ports.admin_url}/admin/workers", json={"url": two.ports.url, "name": "two"})
        assert answer.status_code == 201, "a gateway is a worker like any other"
        assert len(await names_behind(one)) == 2
        answer = await two.http.post(f"{two.ports.admin_url}/admin/workers", json={"url": one.ports.url, "name": "one"})
        assert answer.json()["error"]["code"] == "worker_is_this_gateway"
        # Now both are told to, at the same moment.
        specs = [WorkerSpec(WorkerId("one"), one.ports.url), WorkerSpec(WorkerId("two"), two.ports.url)]
        assert (await one.http.delete(f"{one.ports.admin_url}/admin/workers/two")).status_code == 204
        await asyncio.gather(
            one.gateway.enrolment.configured([WorkerSpec(WorkerId("w1"), one.engines[0].url), specs[1]]),
            two.gateway.enrolment.configured([WorkerSpec(WorkerId("w1"), two.engines[0].url), specs[0]]),
        )
        await until(lambda: "leads back" in error_of(one.gateway, "two") + error_of(two.gateway, "one"))
        one_asked = one.gateway.membership.members[WorkerId("two")]
        for _ in range(10):
            one_asked.look.set()
            await until(lambda: not one_asked.look.is_set())
            await asyncio.sleep(0)
            in_one = one.gateway.fleet.workers.get(WorkerId("two"))
            in_two = two.gateway.fleet.workers.get(WorkerId("one"))
            serving = [worker for worker in (in_one, in_two) if worker is not None and worker.health.reason is None]
            assert len(serving) < 2
        await two.gateway.enrolment.configured([WorkerSpec(WorkerId("w1"), two.engines[0].url)])
        await until(lambda: not error_of(one.gateway, "two") and WorkerId("two") in one.gateway.fleet.workers)


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


async def test_a_gateway_does_not_register(redis: RedisServer) -> None:
    async with rig(1) as r:
        command = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "gateway", "register", "--redis", redis.url, "--worker", r.ports.url,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, said = await asyncio.wait_for(command.communicate(), 60.0)
        assert command.returncode == 2
        assert b"is a gateway, not an engine" in said
