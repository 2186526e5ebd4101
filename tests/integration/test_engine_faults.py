"""Faults of caches and event feeds, in both dialects: what the engine does, and what of it the wire shows."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest

from gateway.kv import events as kv
from gateway.records import Tier
from gateway.sim.faults import FaultKind
from gateway.sim.server import Dialect, EngineSettings
from tests.integration.engine_rig import EngineRig
from tests.integration.rig import until

SETTINGS = EngineSettings(speed=50.0)


@pytest.fixture(params=list(Dialect))
async def r(request: pytest.FixtureRequest) -> AsyncIterator[EngineRig]:
    async with EngineRig(replace(SETTINGS, dialect=request.param, host_tokens=16 * 500)) as rig:
        yield rig


async def fault(r: EngineRig, kind: FaultKind, **more: object) -> None:
    answer = await r.http.post("/sim/fault", json={"kind": kind, **more})
    assert answer.status_code == 200, answer.text


def sequence(r: EngineRig) -> int:
    return int(str(r.worker.state()["event_sequence"]))


def removed(events: list[kv.KvEvent], tier: Tier) -> list[int]:
    return [name for event in events if isinstance(event, kv.Removed) and event.tier is tier for name in event.hashes]


async def test_a_restart_is_told_by_sglang_only(r: EngineRig) -> None:
    await fault(r, FaultKind.RESTART)
    await until(lambda: r.worker.state()["boots"] == 2)
    messages, _ = await r.replay(0)
    told = [(message.seq, r.decode(message.payload)) for message in messages]
    assert told == ([(0, [kv.Cleared()])] if r.worker.settings.dialect is Dialect.SGLANG else [])


async def test_lost_batches_come_by_replay_unless_they_are_lost_for_good(r: EngineRig) -> None:
    start = sequence(r)
    await fault(r, FaultKind.DROP, count=2)
    for number in range(3):
        await r.usage([number] * 20)
    assert (await r.receive())[0] == start + 2
    await fault(r, FaultKind.DROP, count=1, for_good=True)
    for number in range(3, 5):
        await r.usage([number] * 20)
    assert (await r.receive())[0] == start + 4
    messages, _ = await r.replay(start)
    assert [message.seq for message in messages] == [start, start + 1, start + 2, start + 4]


async def test_evicted_blocks_are_gone_from_their_tier_only(r: EngineRig) -> None:
    prompt = list(range(500, 580))
    await r.usage(prompt)
    stored = [event for event in (await r.receive())[1] if isinstance(event, kv.Stored)]
    on_gpu = [name for event in stored if event.tier is Tier.GPU for name in event.hashes]
    on_cpu = [name for event in stored if event.tier is Tier.CPU for name in event.hashes]
    assert len(on_gpu) == 5
    assert on_cpu == on_gpu
    await fault(r, FaultKind.EVICT, medium="gpu")
    assert set(on_gpu) <= set(removed((await r.receive())[1], Tier.GPU))
    assert r.worker.state()["resident_blocks"] == 0
    assert await r.ask(prompt) == 64  # from the CPU tier; the last token is always computed
    again = [event for event in (await r.receive())[1] if isinstance(event, kv.Stored)]
    assert [(event.tier, event.hashes) for event in again] == [(Tier.GPU, on_gpu)]
    await fault(r, FaultKind.EVICT, medium="cpu", silent=True)
    await fault(r, FaultKind.EVICT, medium="gpu", silent=True)
    assert await r.ask(prompt) == 0
    assert not removed((await r.receive())[1], Tier.GPU)


async def test_closed_sockets_hide_what_happens_even_a_restart(r: EngineRig) -> None:
    ports = (r.worker.events_endpoint, r.worker.replay_endpoint)
    await fault(r, FaultKind.OFFLINE)
    await r.usage([7] * 40)
    await fault(r, FaultKind.RESTART)
    await until(lambda: r.worker.state()["boots"] == 2)
    async with httpx.AsyncClient(base_url=r.worker.url, trust_env=False) as http:
        for number in range(12):
            body = {"prompt": [number] * 20, "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        reached = sequence(r)
        assert reached >= 12
        assert not await r.sub.poll(20)
        await http.post("/sim/fault", json={"kind": "online"})
    assert (r.worker.events_endpoint, r.worker.replay_endpoint) == ports
    messages, _ = await r.replay(0)
    assert [message.seq for message in messages] == list(range(reached))


async def test_clearing_with_and_without_an_event(r: EngineRig) -> None:
    await r.usage([3] * 64)
    await r.drain()
    await fault(r, FaultKind.CLEAR)
    assert (await r.receive())[1] == [kv.Cleared()]
    await r.usage([4] * 64)
    await r.drain()
    await fault(r, FaultKind.CLEAR, silent=True)
    assert await r.ask([4] * 64) == 0
    assert not any(isinstance(event, kv.Cleared) for event in (await r.receive())[1])


async def test_a_frozen_engine_is_healthy(r: EngineRig) -> None:
    await fault(r, FaultKind.FREEZE)
    with pytest.raises(httpx.ReadTimeout):
        await r.http.post("/v1/completions", json={"prompt": [1] * 20}, timeout=0.2)
    assert (await r.http.get("/health")).status_code == 200
    await until(lambda: r.worker.state()["aborted"] == 1)
    await fault(r, FaultKind.HEAL)
    assert await r.ask([1] * 20) == 0


async def test_chunks_of_an_offload_are_named_by_their_last_block() -> None:
    async with EngineRig(replace(SETTINGS, host_tokens=16 * 500, offload_chunk=4)) as r:
        await r.usage(list(range(500, 500 + 16 * 9 + 1)))
        stored = [event for event in (await r.receive())[1] if isinstance(event, kv.Stored)]
        on_gpu = stored[0].hashes
        offloaded = [event for event in stored if event.tier is Tier.CPU]
        assert [event.hashes for event in offloaded] == [[on_gpu[3]], [on_gpu[7]]]
        assert all((event.tokens, event.block_size, event.parent) == ([], 0, None) for event in offloaded)
