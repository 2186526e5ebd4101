"""A cold gateway begins with what another one left in the store, or with the replay, before it is ready."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.replicas.snapshots import SPEEDS_NAME, decode_speeds
from gateway.runtime import Gateway, warmth
from gateway.sim.faults import Fault, FaultKind
from tests.integration.redis_server import RedisServer, redis_server
from tests.integration.rig import PATIENCE_S, fast, until
from tests.integration.two_gateways import Chats, Replicas, replicas

MORE = {"redis": {"snapshot_s": 1}}


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


def _results(gateway: Gateway) -> dict[str, int]:
    assert gateway.sharing is not None
    return dict(gateway.sharing.warmth.results)


def _blocks(gateway: Gateway) -> int:
    return sum(sum(tiers.values()) for tiers in gateway.index.stats().blocks.values())


async def _written(rig: Replicas) -> None:
    """Until a copy of every engine has been written that is as new as its feed."""
    one = rig.gateways[0]
    assert one.sharing is not None
    written = one.sharing.warmth.written

    def done() -> bool:
        points = [feed.point for member in one.membership.members.values() for feed in member.feeds]
        return None not in points and set(written.values()) == set(points)

    await until(done)


async def _speeds_written(rig: Replicas) -> None:
    """Until what the gateway has learned of speeds is in the store."""
    one = rig.gateways[0]
    assert one.sharing is not None
    shelf, rates = one.sharing.warmth.shelf, one.fleet.pools["demo"].rates
    async with asyncio.timeout(PATIENCE_S):
        while True:
            told = decode_speeds(await shelf.get(SPEEDS_NAME))
            if told is not None and told.pools == {"demo": rates.learned()}:
                return
            await asyncio.sleep(0.05)


async def test_a_killed_and_cold_started_replica_is_warm_before_it_is_ready(redis: RedisServer) -> None:
    # Engines that keep two batches: the replay alone would bring nearly nothing.
    async with replicas(1, store=redis.url, engines=2, engine=fast(buffer_steps=2), more=MORE) as rig:
        chats = Chats()
        await chats.run(rig, 12, turns=2)
        await until(lambda: rig.leased() == 0)
        await _written(rig)
        await _speeds_written(rig)
        one = rig.gateways[0]
        second = await rig.add()
        assert _results(second)["restored"] == 2
        page = (await rig.clients[0].get(rig.ports[1].admin_url + "/metrics")).text
        assert 'kvgate_index_copies_total{result="restored"} 2' in page
        assert 'kvgate_index_copies_total{result="none"}' not in page
        assert _blocks(second) == _blocks(one) > 200
        assert all(worker.trust == 1.0 for worker in second.fleet.workers.values())
        feeds = [feed for member in second.membership.members.values() for feed in member.feeds]
        assert [feed.counters.purges.total() for feed in feeds] == [0, 0]
        model = one.fleet.pools["demo"].rates
        await until(lambda: second.fleet.pools["demo"].rates.prefill == model.prefill)
        # What was only in the store is hit through the newcomer.
        del rig.clients[0]
        again = Chats()
        await again.run(rig, 12, turns=2)
        assert again.hit > 0.9, again.hit


async def test_a_copy_of_an_engine_that_began_anew_is_not_believed(redis: RedisServer) -> None:
    async with replicas(1, store=redis.url, engines=1, more=MORE) as rig:
        await Chats().run(rig, 6, turns=2)
        await until(lambda: rig.leased() == 0)
        await _written(rig)
        before = _blocks(rig.gateways[0])
        await rig.stop(0)
        (engine,) = rig.engines
        engine.fault(Fault(FaultKind.RESTART))
        second = await rig.add()
        assert before > 0
        assert _blocks(second) == 0


async def test_without_an_answer_of_the_store_the_replay_alone_tells(redis: RedisServer) -> None:
    async with replicas(1, store=redis.url, engines=1, more=MORE) as rig:
        await Chats().run(rig, 6, turns=2)
        await until(lambda: rig.leased() == 0)
        await redis.kill()
        second = await rig.add()
        assert _results(second)["store"] >= 1
        await until(lambda: _blocks(second) == _blocks(rig.gateways[0]) > 0)


async def test_a_copy_of_an_idle_engine_stays_and_one_that_nobody_would_read_is_not_written(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies end by themselves; what has not changed is written again before it does."""
    monkeypatch.setattr(warmth, "REWRITTEN_EVERY", 2)
    async with replicas(1, store=redis.url, engines=1, more=MORE) as rig, redis.client() as client:
        await Chats().run(rig, 2, turns=1)
        await until(lambda: rig.leased() == 0)
        await _written(rig)
        (name,) = await client.keys("*:blocks:*:0")
        await client.delete(name)  # as if its life had ended
        before = _results(rig.gateways[0])["written"]
        await until(lambda: _results(rig.gateways[0])["written"] > before)
        assert await client.exists(name)
        monkeypatch.setattr(warmth, "MAX_BYTES", 10)
        await client.delete(name)
        await until(lambda: _results(rig.gateways[0]).get("too_large", 0) > 0)
        assert not await client.exists(name)
