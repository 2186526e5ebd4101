"""Two gateways and a real Redis between them: one routing state, and nobody waits for the store."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.records import WorkerId
from gateway.sim.faults import Fault, FaultKind
from tests.integration.redis_server import RedisServer, redis_server
from tests.integration.rig import PATIENCE_S, fast, until
from tests.integration.two_gateways import Chats, hit, peers, replicas

CHATS = 500
ENGINES = 8
CALM = fast(speed=4.0)
"""One chat a worker at a time, and prefills that take longer than a word between replicas: follow-ups find their blocks
unless a decision was wrong. With more at once some move, rightly, because their worker is busy."""


@pytest.fixture
async def redis(tmp_path: Path) -> AsyncIterator[RedisServer]:
    async with redis_server(tmp_path) as server:
        yield server


def _prompt(seed: int, tokens: int) -> list[int]:
    return [1000 + (seed * 7919 + at) % 4000 for at in range(tokens)]


async def test_what_one_sends_the_other_sees_and_it_ends_with_the_request(redis: RedisServer) -> None:
    async with replicas(2, store=redis.url, engine=fast(speed=1.0)) as rig:
        one, other = rig.gateways
        body = {"model": "demo", "prompt": _prompt(1, 1600), "max_tokens": 40, "stream": True}
        headers = {"x-session-id": "s1"}
        async with rig.clients[0].stream("POST", "/v1/completions", json=body, headers=headers) as answer:
            name = WorkerId(answer.headers["x-kvgate-worker"])
            there = other.fleet.workers[name]
            await until(lambda: there.others.requests == 1 and there.others.kv_tokens > 1600)
            assert there.foreign_requests == 1  # and not twice, by the poll
            assert other.router.sessions.find("s1", other.clock()) == name
            await until(lambda: there.load is not None and there.load.running == 1)
            assert there.foreign_requests == 1
            async for _ in answer.aiter_raw():
                pass
        await until(lambda: there.others.requests == 0 and there.others.kv_tokens == 0)
        assert one.router.open_leases == 0


async def test_siblings_of_a_new_prefix_follow_it_through_the_other_gateway(redis: RedisServer) -> None:
    # The first one's prefill takes a second, and until it is over no event tells of its blocks.
    async with replicas(2, store=redis.url, engines=4, engine=fast(speed=0.5)) as rig:
        prompt = _prompt(2, 1600)
        first = asyncio.ensure_future(
            rig.clients[0].post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
        )
        one, other = rig.gateways
        await until(lambda: one.router.open_leases == 1)
        await until(
            lambda: any(len(peer.open) for peer in other.sharing.peers.peers.values()) if other.sharing else False
        )
        answer = await rig.clients[1].post(
            "/v1/completions", json={"model": "demo", "prompt": [*prompt, *_prompt(3, 20)], "max_tokens": 1}
        )
        assert answer.headers["x-kvgate-predicted-tokens"] == "1600"
        assert answer.headers["x-kvgate-worker"] == (await first).headers["x-kvgate-worker"]


async def test_chats_through_alternating_gateways_hit_as_through_one(redis: RedisServer) -> None:
    alone, both = Chats(), Chats()
    async with replicas(1, store=None, engines=ENGINES, engine=CALM) as rig:
        await alone.run(rig, CHATS // 4)
    async with replicas(2, store=redis.url, engines=ENGINES, engine=CALM) as rig:
        await both.run(rig, CHATS)
        await until(lambda: rig.leased() == 0)
    assert (alone.errors, both.errors) == ([], [])
    assert both.hit >= 0.95 * alone.hit > 0.5, (both.hit, alone.hit)


async def test_redis_killed_in_the_middle_costs_no_request(redis: RedisServer) -> None:
    alone, chats = Chats(), Chats()
    async with replicas(1, store=None, engines=ENGINES, engine=CALM) as rig:
        await alone.run(rig, CHATS // 4)
    async with replicas(2, store=redis.url, engines=ENGINES, engine=CALM) as rig:
        run = asyncio.ensure_future(chats.run(rig, CHATS))
        await until(lambda: chats.done > CHATS // 10, within_s=3 * PATIENCE_S)
        await redis.kill()
        await until(lambda: not any(rig.shared(gateway) for gateway in rig.gateways))
        page = (await rig.clients[0].get(rig.ports[0].admin_url + "/metrics")).text
        assert "kvgate_store_up 0\n" in page
        told = (await rig.clients[0].get(rig.ports[0].admin_url + "/admin/replicas")).json()
        assert (told["up"], told["lag_s"]) == (False, None)
        assert told["error"]
        assert "kvgate_replica_lag_seconds{" not in page
        alone_from = len(chats.follow_ups)
        await until(lambda: chats.done > CHATS // 2, within_s=3 * PATIENCE_S)
        alone_to = len(chats.follow_ups)
        await redis.start()  # empty
        await rig.together()
        page = (await rig.clients[0].get(rig.ports[0].admin_url + "/metrics")).text
        assert "kvgate_store_up 1\n" in page
        assert "kvgate_replica_peers 1\n" in page
        told = (await rig.clients[0].get(rig.ports[0].admin_url + "/admin/replicas")).json()
        other = rig.gateways[1].sharing
        assert other is not None
        assert [peer["replica"] for peer in told["peers"]] == [f"{other.journal.replica:016x}"]
        await run
        await until(lambda: rig.leased() == 0)
        await until(lambda: all(w.others.requests == 0 for g in rig.gateways for w in g.fleet.workers.values()))
        assert all(gateway.supervisor.restarts == 0 for gateway in rig.gateways)
    assert (alone.errors, chats.errors) == ([], [])
    # Each replica has the engines' events and its own sessions; what the other had queued runs out by itself. So what
    # is missing is a block that no event has told of yet, and who is busy this moment.
    assert chats.hit >= 0.95 * alone.hit > 0.5, (chats.hit, alone.hit)
    away = hit(chats.follow_ups[alone_from:alone_to])
    assert away >= 0.93 * alone.hit, (away, alone.hit)


async def test_a_store_that_stands_still_delays_no_request(redis: RedisServer) -> None:
    patience_s = 20.0  # of a call of the store: a request that waits for one shows it on any machine
    async with replicas(2, store=redis.url, more={"redis": {"timeout_s": patience_s}}) as rig:
        redis.signal(signal.SIGSTOP)
        for number in range(40):
            body = {"model": "demo", "prompt": _prompt(number, 64), "max_tokens": 1}
            began = time.monotonic()
            answer = await rig.clients[number % 2].post("/v1/completions", json=body)
            assert answer.status_code == 200
            assert time.monotonic() - began < patience_s / 2
        await until(lambda: not any(rig.shared(gateway) or peers(gateway) for gateway in rig.gateways))
        redis.signal(signal.SIGCONT)
        await rig.together()


async def test_a_replica_that_ends_says_so_and_one_that_dies_is_forgotten(
    redis: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with replicas(2, store=redis.url) as rig:
        first = rig.gateways[0].sharing
        assert first is not None
        with monkeypatch.context() as patience:
            patience.setattr(first.peers, "_dead_s", 3600.0)  # so it is the word that counts
            await rig.stop(1)
            await until(lambda: peers(rig.gateways[0]) == 0)
        second = await rig.add()
        await rig.together()
        assert second.sharing is not None
        await second.supervisor.stop("replicas speak")  # as one that hangs
        began = time.monotonic()
        await until(lambda: peers(rig.gateways[0]) == 0)
        assert time.monotonic() - began > 1.5


async def test_a_burst_of_siblings_through_two_replicas_spreads(redis: RedisServer) -> None:
    """No event comes, a new prefix of 256 blocks, 200 requests at once through two replicas."""
    patient = {"timeouts": {"connect_s": 60}}
    async with replicas(2, store=redis.url, engines=4, engine=fast(speed=20.0), more=patient) as rig:
        for engine in rig.engines:
            engine.fault(Fault(FaultKind.HOLD))
        prefix = [7 + at % 5000 for at in range(256 * 16)]

        async def ask(number: int) -> str:
            suffix = [5000 + number * 31 + at for at in range(32)]
            body = {"model": "demo", "prompt": [*prefix, *suffix], "max_tokens": 1}
            answer = await rig.clients[number % 2].post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            return str(answer.headers["x-kvgate-worker"])

        names = await asyncio.gather(*map(ask, range(200)))
        shares = [names.count(name) / len(names) for name in set(names)]
        assert max(shares) <= 0.7, shares
