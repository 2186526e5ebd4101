"""Replicas in processes of their own, killed with -9 under chats and started again cold, a real Redis between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.replicas import Shelf
from gateway.replicas.snapshots import decode_rank
from gateway.sim.server import SimulatedWorker, Speech
from gateway.store_address import parse_store_url
from tests.integration.processes import PATIENCE_S, Program, Served, running
from tests.integration.redis_server import RedisServer, redis_server
from tests.integration.rig import fast, until, write_yaml
from tests.integration.two_gateways import Chats

ENGINES = 8
CHATS = 240
"""A third of them before, in and after the absence of the killed one; 500 take a minute more and show the same."""
STREAMS, STREAM_TOKENS = 4, 8_000
"""Long ones, which the killed one has on its workers when it dies: 20 s each, and any two of them fit into a cache."""
FIRST_TURNS = 8
"""Follow-ups of a cold one that are looked at by themselves: of chats that began before it."""


@dataclass
class Replica:
    """A running gateway and a client for it."""

    program: Program
    served: Served
    client: httpx.AsyncClient

    async def json(self, path: str) -> Any:
        return await asyncio.to_thread(self.served.json, path)

    async def sum(self, metric: str) -> float:
        return await asyncio.to_thread(self.served.value, metric)

    async def peers(self) -> list[dict[str, Any]]:
        """The other replicas it hears."""
        return list((await self.json("/admin/replicas"))["peers"])

    async def others(self) -> float:
        """Requests it takes others to have on its workers."""
        return float(sum(worker["work"]["others"] for worker in (await self.json("/admin/workers"))["workers"]))

    async def kill(self) -> None:
        """With -9."""
        await asyncio.to_thread(self.program.kill)


@dataclass
class Stand:
    """Engines in this process, gateways in others. `clients` are those of the gateways that take traffic now."""

    engines: list[SimulatedWorker]
    file: Path
    tree: dict[str, Any]
    processes: ExitStack
    stack: AsyncExitStack
    clients: list[httpx.AsyncClient] = field(default_factory=list)

    async def start(self, **sections: Any) -> Replica:
        """Another gateway, ready, but without traffic."""
        await asyncio.to_thread(write_yaml, self.file, self.tree | sections)
        ports = ("--port", "0", "--admin-port", "0")
        program = await asyncio.to_thread(
            self.processes.enter_context, running("serve", "--config", str(self.file), *ports)
        )
        served = await asyncio.to_thread(Served, program)
        limits = httpx.Limits(max_connections=None)
        client = httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_S, limits=limits)
        return Replica(program, served, await self.stack.enter_async_context(client))

    def busy(self) -> int:
        """Requests that run or wait in the engines."""
        return self._sum("running") + self._sum("waiting")

    def _sum(self, figure: str) -> int:
        return sum(int(str(engine.state()[figure])) for engine in self.engines)


@asynccontextmanager
async def standing(directory: Path, redis: RedisServer, *, buffer_steps: int = 10_000) -> AsyncIterator[Stand]:
    """Engines that keep so many batches for replays."""
    model = fast(speed=4.0, buffer_steps=buffer_steps)
    speech = Speech.load(model.tokenizer)
    with ExitStack() as processes:
        async with AsyncExitStack() as stack:
            engines = [
                SimulatedWorker(replace(model, name=f"w{number}"), wall_clock=time.time, speech=speech)
                for number in range(1, ENGINES + 1)
            ]
            for engine in engines:
                await engine.start()
                stack.push_async_callback(engine.stop)
            tree = {
                "server": {"host": "127.0.0.1", "ready_timeout_s": PATIENCE_S},
                "workers": [{"url": engine.url, "name": engine.settings.name} for engine in engines],
                "load": {"poll_s": 0.2},
                "redis": {"url": redis.url, "snapshot_s": 1, "timeout_s": 10},
            }
            stand = Stand(engines, directory / "kvgate.yaml", tree, processes, stack)
            yield stand
            stand.clients.clear()


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


async def _eventually(condition: Callable[[], Awaitable[bool]]) -> None:
    """Wait for a condition that has to be asked for."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            if await condition():
                return
            await asyncio.sleep(0.05)


async def _alone(stand: Stand) -> float:
    """What chats hit through one gateway without a store."""
    one = await stand.start(redis={})
    stand.clients[:] = [one.client]
    chats = Chats()
    await chats.run(stand, CHATS // 3, first=10_000)
    stand.clients.clear()
    await one.kill()
    assert chats.errors == []
    return chats.hit


async def _exact(stand: Stand, *replicas: Replica) -> None:
    """Nothing is open, and every gateway says so."""
    await until(lambda: stand.busy() == 0)
    for replica in replicas:
        await _eventually(partial(_nothing_open, replica))
        assert await replica.sum("accounting_drift") == 0


async def _nothing_open(replica: Replica) -> bool:
    gauges = ("worker_inflight_requests", "worker_inflight_tokens", "queue_depth")
    return [await replica.sum(gauge) for gauge in gauges] == [0, 0, 0] and await replica.others() == 0


async def _drain(pieces: AsyncIterator[bytes]) -> None:
    async for _ in pieces:
        pass


async def _hold(client: httpx.AsyncClient) -> list[asyncio.Task[None]]:
    """Streams that end with their gateway only; returns when all have begun."""
    begun = asyncio.Semaphore(0)

    async def stream(number: int) -> None:
        prompt = [3000 + number * 7 + at % 900 for at in range(640)]
        body = {"model": "demo", "prompt": prompt, "max_tokens": STREAM_TOKENS, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as answer:
            assert answer.status_code == 200
            pieces = answer.aiter_raw()
            await anext(pieces)
            begun.release()
            with pytest.raises(httpx.TransportError):
                await _drain(pieces)

    tasks = [asyncio.ensure_future(stream(number)) for number in range(STREAMS)]
    for _ in tasks:
        await begun.acquire()
    return tasks


async def test_a_killed_replica_comes_back_warm_and_chats_hit_as_through_one(
    redis: RedisServer, tmp_path: Path
) -> None:
    async with standing(tmp_path, redis) as stand:
        one_hit = await _alone(stand)
        killed, other = [await stand.start() for _ in range(2)]
        stand.clients[:] = [killed.client, other.client]
        chats = Chats(again=True)
        run = asyncio.ensure_future(chats.run(stand, CHATS))
        await until(lambda: chats.done > CHATS // 3 or run.done(), within_s=5 * PATIENCE_S)

        streams = await _hold(killed.client)

        async def told() -> bool:
            return sum(int(peer["inflight_requests"]) for peer in await other.peers()) >= STREAMS

        await _eventually(told)
        stand.clients.remove(killed.client)  # as a load balancer does, only sooner
        await killed.kill()
        await asyncio.gather(*streams)

        await until(lambda: chats.done > CHATS // 2 or run.done(), within_s=5 * PATIENCE_S)

        chats.go.clear()  # so that it cannot have learned from them what it knows when it is ready
        await until(lambda: stand.busy() == 0)

        async def forgotten() -> bool:
            return await other.peers() == []

        await _eventually(forgotten)
        cold = await stand.start()
        assert await cold.sum("index_blocks") == await other.sum("index_blocks") > 0
        stand.clients.append(cold.client)
        chats.go.set()
        await run
        await _exact(stand, other, cold)
        (peer,) = await cold.peers()
        assert peer["inflight_requests"] == 0
    assert chats.errors == []
    through = [turn for turn in chats.follow_ups if turn.through == str(cold.client.base_url)]
    assert len(through) > FIRST_TURNS
    first = through[:FIRST_TURNS]
    assert sum(turn.cached for turn in first) >= 0.9 * sum(turn.before for turn in first), first
    assert chats.hit >= 0.95 * one_hit > 0.5, (chats.hit, one_hit)


@pytest.mark.parametrize("left", ["store", "replay"])
async def test_a_fleet_of_replicas_that_was_killed_comes_back_warm(
    redis: RedisServer, tmp_path: Path, left: str
) -> None:
    """Nobody is left to ask, and either engines keep two batches only for a replay, or the store is killed as well."""
    async with standing(tmp_path, redis, buffer_steps=2 if left == "store" else 10_000) as stand:
        both = [await stand.start() for _ in range(2)]
        stand.clients[:] = [replica.client for replica in both]
        half = Chats()
        await half.run(stand, CHATS // 3, turns=2)
        await _exact(stand, *both)
        known = await both[0].sum("index_blocks")
        if left == "store":
            await _written(redis, known)
        else:
            await redis.kill()
        await asyncio.gather(*(replica.kill() for replica in both))
        again = [await stand.start() for _ in range(2)]
        for replica in again:
            assert await replica.sum("index_blocks") == known
        stand.clients[:] = [replica.client for replica in again]
        chats = Chats()
        await chats.run(stand, CHATS // 3, turns=2)  # the same chats: what was their second turn is found whole
        await _exact(stand, *again)
    assert (half.errors, chats.errors) == ([], [])
    assert chats.hit >= 0.9 > half.hit


async def _written(redis: RedisServer, blocks: float) -> None:
    """Until the store has copies of all these."""
    shelf = Shelf(parse_store_url(redis.url), prefix="kvgate", life_s=PATIENCE_S)

    async def whole() -> bool:
        async with redis.client() as client:
            names = [str(name).split(":")[2] for name in await client.keys("kvgate:blocks:*:0")]
        copies = [decode_rank(await shelf.get(f"blocks:{name}:0")) for name in names]
        return sum(copy.blocks.blocks for copy in copies if copy is not None) == blocks

    await _eventually(whole)
