"""Fleets of dozens, found by a name server and an API server: whole when ready, and nothing left of who goes."""

from __future__ import annotations

import asyncio
import gc
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway.discovery.roster import short_hash
from gateway.records import WorkerId
from gateway.sim.kube_api import PODS, Kube, kube, pod
from gateway.sim.name_server import NameServer, name_server
from gateway.sim.server import SimulatedWorker, Speech
from tests.integration.rig import Rig, fast, rig, until

ENGINES, STAY = 90, 30
"""A third is there at first and goes, a third stays, a third comes."""

PATIENCE_S = 120.0
SERVICE = "_http._tcp.fleet.test"


@asynccontextmanager
async def engines() -> AsyncIterator[list[SimulatedWorker]]:
    speech = Speech.load(fast().tokenizer)
    async with AsyncExitStack() as stack:
        running = []
        for _ in range(ENGINES):
            engine = SimulatedWorker(fast(), wall_clock=time.time, speech=speech)
            await engine.start()
            stack.push_async_callback(engine.stop)
            running.append(engine)
        yield running


class Names:
    """Who is there says a name server."""

    def __init__(self, server: NameServer) -> None:
        self.server = server
        server.additional = True
        server.records["host.test", "A"] = ["127.0.0.1"]

    @property
    def discovery(self) -> dict[str, Any]:
        entry = {"name": SERVICE, "type": "srv", "server": self.server.address, "refresh_s": 0.2}
        return {"dns": [entry]}

    def say(self, urls: Sequence[str]) -> None:
        self.server.records[SERVICE, "SRV"] = [f"0 0 {urlsplit(url).port} host.test." for url in urls]

    def name(self, url: str) -> WorkerId:
        return WorkerId(f"w-{short_hash(url)}")


class Cluster:
    """Who is there says an API server; pods have their ports in annotations."""

    def __init__(self, api: Kube) -> None:
        self.api = api

    @property
    def discovery(self) -> dict[str, Any]:
        return {"kubernetes": {"api_server": self.api.url, "namespace": "llm", "selector": "app=vllm"}}

    def say(self, urls: Sequence[str]) -> None:
        wanted: dict[str, Any] = {
            self.name(url): pod(self.name(url), "127.0.0.1", port=str(urlsplit(url).port)) for url in urls
        }
        for name in set(self.api.objects[PODS]) - set(wanted):
            self.api.delete(PODS, name)
        for name in set(wanted) - set(self.api.objects[PODS]):
            self.api.apply(PODS, wanted[name])

    def name(self, url: str) -> WorkerId:
        return WorkerId(f"vllm-{urlsplit(url).port}")


@asynccontextmanager
async def names_or_cluster(way: str) -> AsyncIterator[Names | Cluster]:
    if way == "dns":
        async with name_server() as server:
            yield Names(server)
    else:
        async with kube() as api:
            yield Cluster(api)


async def workers_of_the_scrape(r: Rig) -> set[str]:
    text = (await r.http.get(r.ports.admin_url + "/metrics")).text
    families = text_string_to_metric_families(text)
    return {sample.labels["worker"] for family in families for sample in family.samples if "worker" in sample.labels}


def open_files(running: Sequence[SimulatedWorker]) -> int:
    """Without the connections to engines, of which both ends are here: how many there are is a matter of the moment."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")) - 2 * sum(engine.connections for engine in running)


async def whole(r: Rig, names: set[WorkerId]) -> None:
    """All of them serve, with feed and poll, and nobody else is known anywhere."""
    gateway = r.gateway

    def there() -> bool:
        members = gateway.membership.members
        return (
            set(gateway.fleet.workers) == set(members) == names
            and all(member.caught_up and len(member.feeds) == 1 for member in members.values())
            and len(gateway.fleet.pools["demo"].ready) == len(names)
        )

    await until(there, within_s=PATIENCE_S)
    tasks = gateway.supervisor.names
    assert sum(task.startswith("feed ") for task in tasks) == len(names)
    assert {WorkerId(task.removeprefix("load ")) for task in tasks if task.startswith("load ")} == names
    assert {WorkerId(task.removeprefix("worker ")) for task in tasks if task.startswith("worker ")} == names
    assert await workers_of_the_scrape(r) <= {*names, "gone", ""}
    slots = {worker.slot for worker in gateway.fleet.workers.values()}
    assert set(gateway.index.stats().blocks) <= slots
    assert max(slots) < ENGINES


@pytest.mark.parametrize("way", ["dns", "kubernetes"])
async def test_a_fleet_that_is_found_is_whole_and_a_third_is_replaced_in_one_step(way: str) -> None:
    async with engines() as running, names_or_cluster(way) as source:
        urls = [engine.url for engine in running]
        first, second = urls[: 2 * STAY], urls[STAY:]
        source.say(first)
        settings = {"workers": [], "discovery": source.discovery, "load": {"poll_s": 1}}
        async with rig(0, settings=settings, wait=False) as r:
            await until(lambda: r.gateway.readiness().ready, within_s=PATIENCE_S)
            await whole(r, {source.name(url) for url in first})
            tasks, files = len(asyncio.all_tasks()), open_files(running)
            kept = {name: r.gateway.fleet.workers[name] for name in map(source.name, first[STAY:])}

            async def client(number: int) -> int:
                body = {"model": "demo", "prompt": f"{number} hello", "max_tokens": 2, "stream": number % 2 == 0}
                return (await r.http.post("/v1/completions", json=body)).status_code

            for turn, there in enumerate((second, first, second)):
                source.say(there)
                statuses = {await client(number) for number in range(20)}
                assert statuses == {200}, turn
                await whole(r, {source.name(url) for url in there})
                assert {await client(number) for number in range(20)} == {200}
            assert all(r.gateway.fleet.workers[name] is worker for name, worker in kept.items()), "who stays, stays"
            await until(r.quiet)
            await until(lambda: len(asyncio.all_tasks()) <= tasks + 2, within_s=PATIENCE_S)
            await until(lambda: open_files(running) <= files + 4, within_s=PATIENCE_S)
            await until(lambda: all(engine.connections == 0 for engine in running[:STAY]))
            await until(lambda: all(engine.connections <= 4 for engine in running))
        assert not [task for task in asyncio.all_tasks() if "worker" in task.get_name()]
