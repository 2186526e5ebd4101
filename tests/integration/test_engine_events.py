"""The event feed of a simulated engine over real ZeroMQ sockets, read with the gateway's own decoder."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace

import httpx
import pytest
import zmq

from gateway.kv import events as kv
from gateway.sim.event_bytes import Encoding
from gateway.sim.publisher import Replay
from gateway.sim.server import EngineSettings, Fault, FaultKind, SimulatedWorker
from tests.integration.engine_rig import SPEECH, WAIT_S, EngineRig

SETTINGS = EngineSettings(speed=50.0, topic="kv@here@demo")


@pytest.fixture
async def rig() -> AsyncIterator[EngineRig]:
    async with EngineRig(SETTINGS) as rig:
        yield rig


@pytest.mark.parametrize("encoding", list(Encoding))
async def test_stored_blocks_carry_tokens_parent_and_identity(encoding: Encoding) -> None:
    async with EngineRig(replace(SETTINGS, encoding=encoding, adapters=("lora",))) as rig:
        prompt = list(range(40))
        await rig.ask(prompt)
        _, [first] = await rig.receive()
        assert isinstance(first, kv.Stored)
        assert (len(first.hashes), first.parent, first.tokens, first.block_size) == (2, None, prompt[:32], 16)
        await rig.ask([*prompt[:32], *range(100, 116)])
        _, [second] = await rig.receive()
        assert isinstance(second, kv.Stored)
        assert (second.parent, second.tokens) == (first.hashes[-1], list(range(100, 116)))
        await rig.ask(prompt, cache_salt="mine", model="lora")
        _, [third] = await rig.receive()
        assert isinstance(third, kv.Stored)
        assert (third.adapter, third.salt, third.tokens) == ("lora", "mine", prompt[:32])
        assert set(third.hashes).isdisjoint(first.hashes)


async def test_answers_are_announced_as_they_fill_blocks(rig: EngineRig) -> None:
    await rig.ask([3] * 16, max_tokens=40)
    stored: list[kv.Stored] = []
    while len(stored) < 3:
        _, events = await rig.receive()
        stored += [event for event in events if isinstance(event, kv.Stored)]
    assert [len(event.hashes) for event in stored] == [1, 1, 1]
    assert [event.parent for event in stored[1:]] == [event.hashes[0] for event in stored[:-1]]
    assert await rig.ask([token for event in stored for token in event.tokens] + [1]) == 48


async def test_evictions_are_told_tail_first_and_the_events_equal_the_cache() -> None:
    async with EngineRig(replace(SETTINGS, kv_tokens=16 * 8)) as rig:
        await rig.ask([1] * 64)
        stored = (await rig.receive())[1][-1]  # room for it may have been made first
        assert isinstance(stored, kv.Stored)
        await rig.ask([2] * 96)
        _, events = await rig.receive()
        removed = [block for event in events if isinstance(event, kv.Removed) for block in event.hashes]
        told = stored.hashes[::-1]
        assert [block for block in removed if block in told] == told[: 4 - 1]
        assert await rig.ask([1] * 64) == 16


async def test_sequences_run_without_gaps(rig: EngineRig) -> None:
    start = int(str(rig.worker.state()["event_sequence"]))
    for number in range(5):
        await rig.ask([number] * 20)
    assert [(await rig.receive())[0] for _ in range(5)] == list(range(start, start + 5))


@pytest.mark.parametrize(("layout", "width"), [(Replay.NEW, 4), (Replay.OLD, 3)])
async def test_replay_gives_every_batch_from_the_start_asked_for(layout: Replay, width: int) -> None:
    async with EngineRig(replace(SETTINGS, replay=layout)) as rig:
        live = {}
        for number in range(3):
            await rig.ask([number] * 20)
            sequence, events = await rig.receive()
            live[sequence] = events
        first = min(live)
        messages, widths = await rig.replay(first)
        assert {message.seq: rig.decode(message.payload) for message in messages} == live
        assert widths == {width}
        assert (await rig.replay(max(live) + 1))[0] == []
        assert (await rig.replay(0))[0][0].seq == 0


async def test_only_the_newest_batches_are_kept_for_replay() -> None:
    async with EngineRig(replace(SETTINGS, buffer_steps=2)) as rig:
        for number in range(5):
            await rig.ask([number] * 20)
        newest = int(str(rig.worker.state()["event_sequence"])) - 1
        assert [message.seq for message in (await rig.replay(0))[0]] == [newest - 1, newest]
        rig.worker.fault(Fault(FaultKind.TRIM))
        assert (await rig.replay(0))[0] == []


async def test_without_replay_there_is_no_endpoint() -> None:
    async with EngineRig(replace(SETTINGS, replay=Replay.OFF)) as rig:
        assert rig.worker.replay_endpoint is None
        assert (await rig.http.get("/kv_event_sources")).json()["0"]["replay_endpoint"] is None


async def test_without_events_there_is_no_source() -> None:
    worker = SimulatedWorker(replace(SETTINGS, events=False), wall_clock=time.time, speech=SPEECH)
    await worker.start()
    async with httpx.AsyncClient(base_url=worker.url, trust_env=False) as http:
        assert (await http.get("/kv_event_sources")).json() == {}
        assert (await http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 1})).status_code == 200
    assert worker.events_endpoint is None
    await worker.stop()


async def test_dropped_batches_leave_a_gap_that_replay_fills(rig: EngineRig) -> None:
    await rig.http.post("/sim/fault", json={"kind": "drop", "count": 2})
    start = int(str(rig.worker.state()["event_sequence"]))
    for number in range(3):
        await rig.ask([number] * 20)
    assert (await rig.receive())[0] == start + 2
    assert [message.seq for message in (await rig.replay(start))[0]] == [start, start + 1, start + 2]


async def test_held_batches_come_in_order_on_release(rig: EngineRig) -> None:
    await rig.http.post("/sim/fault", json={"kind": "hold"})
    start = int(str(rig.worker.state()["event_sequence"]))
    for number in range(3):
        await rig.ask([number] * 20)
    assert not await rig.sub.poll(50)
    await rig.http.post("/sim/fault", json={"kind": "release"})
    assert [(await rig.receive())[0] for _ in range(3)] == [start, start + 1, start + 2]


async def test_a_restart_begins_at_zero_on_the_same_ports_with_an_empty_cache(rig: EngineRig) -> None:
    await rig.ask([1] * 64)
    await rig.drain()
    ports = (rig.worker.events_endpoint, rig.worker.replay_endpoint, rig.worker.url)
    before = (await rig.http.get("/metrics")).text.split("process_start_time_seconds ")[-1].split("\n")[0]
    await rig.http.post("/sim/fault", json={"kind": "restart"})
    async with asyncio.timeout(WAIT_S):
        while rig.worker.state()["boots"] != 2:
            await rig.sub.poll(5)
    assert (rig.worker.events_endpoint, rig.worker.replay_endpoint, rig.worker.url) == ports
    after = (await rig.http.get("/metrics")).text.split("process_start_time_seconds ")[-1].split("\n")[0]
    assert float(after) > float(before)
    assert await rig.ask([1] * 64) == 0
    number = 0
    while not await rig.sub.poll(50):  # the subscriber reconnects by itself
        number += 1
        await rig.ask([number] * 20)
    assert (await rig.receive())[0] <= number
    assert (await rig.replay(0))[0][0].seq == 0


async def test_clearing_the_cache_with_and_without_an_event(rig: EngineRig) -> None:
    await rig.http.post("/sim/fault", json={"kind": "clear"})
    assert [type(event) for event in (await rig.receive())[1]] == [kv.Cleared]
    await rig.ask([1] * 64)
    await rig.receive()
    await rig.http.post("/sim/fault", json={"kind": "clear", "silent": True})
    assert await rig.ask([1] * 64) == 0
    assert [type(event) for event in (await rig.receive())[1]] == [kv.Stored]


async def test_a_reset_is_told_with_the_next_step(rig: EngineRig) -> None:
    await rig.http.post("/reset_prefix_cache")
    assert not await rig.sub.poll(50)
    await rig.ask([1] * 64)
    assert [type(event) for event in (await rig.receive())[1]] == [kv.Cleared, kv.Stored]


async def test_several_workers_live_in_one_loop_and_free_their_ports() -> None:
    first = SimulatedWorker(SETTINGS, wall_clock=time.time, speech=SPEECH)
    second = SimulatedWorker(SETTINGS, wall_clock=time.time, speech=SPEECH)
    await first.start()
    await second.start()
    assert first.url != second.url
    taken = replace(SETTINGS, events_port=int(str(first.events_endpoint).rpartition(":")[2]))
    with pytest.raises(zmq.ZMQError):
        await SimulatedWorker(taken, wall_clock=time.time, speech=SPEECH).start()
    await first.stop()
    again = SimulatedWorker(taken, wall_clock=time.time, speech=SPEECH)
    await again.start()
    for worker in (again, second, second):
        await worker.stop()
