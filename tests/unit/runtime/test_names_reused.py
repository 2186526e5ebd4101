"""What was begun for a worker that has left is not done to the one that has its name or its slot now."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from gateway.kv import FeedPoint, KvIndex
from gateway.kv.events import Stored
from gateway.pool import Breaker, Fleet, FleetSettings, HealthSettings, Worker
from gateway.records import (
    Ending,
    EngineHash,
    EngineKind,
    EventSource,
    Result,
    Slot,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.replicas import Shelf
from gateway.replicas.snapshots import SPEEDS_NAME
from gateway.runtime import Supervisor
from gateway.runtime.health import HealthWatch
from gateway.runtime.warmth import Warmth
from gateway.upstream.control import Answer, ControlClient, ProbeFailed
from gateway.upstream.kv_feed import KvFeed
from gateway.upstream.members import Member, Seat
from gateway.upstream.membership import Membership

NAME = WorkerId("w1")
SPEC = WorkerSpec(NAME, "http://w1:8000")
FACTS = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16)
PATIENCE_S = 30.0


class SlowWorker:
    """Answers a trial, badly, when it may."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.may_answer = asyncio.Event()

    async def post(self, *_: Any, **__: Any) -> Answer:
        self.asked.set()
        await self.may_answer.wait()
        raise ProbeFailed("no answer in time")


def half_open(fleet: Fleet, now: float) -> Worker:
    """A worker that waits for its trial."""
    worker = fleet.add(SPEC, FACTS, now)
    fleet.ended(worker, Ending(Result.WORKER_FAILED, 500, now), sent_at=now, credited=False)
    fleet.tick(now + 1.0)
    assert worker.health.breaker is Breaker.HALF_OPEN
    return worker


async def test_a_trial_of_one_that_left_says_nothing_of_its_successor() -> None:
    fleet = Fleet(FleetSettings(health=HealthSettings(failures=1, open_s=0.5)))
    asked, tasks = SlowWorker(), Supervisor(asyncio.get_running_loop().time)
    watch = HealthWatch(fleet, control=cast(ControlClient, asked), tasks=tasks, clock=lambda: 100.0, trial_s=PATIENCE_S)
    half_open(fleet, 1.0)
    watch.tick(2.0)
    async with asyncio.timeout(PATIENCE_S):
        await asked.asked.wait()
        fleet.remove(NAME, 3.0)
        successor = half_open(fleet, 4.0)
        asked.may_answer.set()
        await tasks.join(f"trial {NAME}")
    assert successor.health.breaker is Breaker.HALF_OPEN


class SlowStore:
    """Lets a rank's copy be claimed when it may."""

    def __init__(self) -> None:
        self.claimed = asyncio.Event()
        self.may_go_on = asyncio.Event()
        self.written: list[str] = []

    async def get(self, name: str) -> bytes | None:
        return None

    async def put(self, name: str, value: bytes) -> None:
        self.written.append(name)

    async def claim(self, name: str, period_s: float) -> bool:
        if name != SPEEDS_NAME:
            self.claimed.set()
            await self.may_go_on.wait()
        return True


class Followed:
    """A feed that has come to a point."""

    def __init__(self, source: EventSource) -> None:
        self.source = source
        self.point = FeedPoint(7, 1, None, None)


class OneMember:
    """The fleet's members: one of one rank."""

    def __init__(self, seat: Seat) -> None:
        self.members = {NAME: Member(SPEC, seats={NAME: seat}, facts=FACTS)}


async def _copies(leaves: bool) -> list[str]:
    """Names of what is written, where the worker leaves while its copy is claimed, or stays."""
    index, source = KvIndex(), EventSource(0, "tcp://w1:5557", "tcp://w1:5558")
    slot = Slot(0)
    index.bind(slot, block_size=16, engine=EngineKind.VLLM)
    index.apply(slot, 0, [Stored([EngineHash(1)], None, list(range(16)), 16)])
    seat = Seat(SPEC, slot, 16, {source: cast(KvFeed, Followed(source))})
    store = SlowStore()
    warmth = Warmth(cast(Shelf, store), Fleet(FleetSettings()), index, snapshot_s=0.01)
    keeping = asyncio.create_task(warmth.keep(cast(Membership, OneMember(seat))))
    try:
        async with asyncio.timeout(PATIENCE_S):
            await store.claimed.wait()
            if leaves:
                seat.feeds.clear()
                index.release(slot)
                index.bind(slot, block_size=16, engine=EngineKind.VLLM)  # another worker's from now on
                index.apply(slot, 0, [Stored([EngineHash(2)], None, list(range(16, 32)), 16)])
            store.may_go_on.set()
            while store.written.count(SPEEDS_NAME) < 3:  # noqa: ASYNC110  a round of the loop under test
                await asyncio.sleep(0.01)
    finally:
        keeping.cancel()
        await asyncio.wait([keeping])
    return [name for name in store.written if name != SPEEDS_NAME]


async def test_the_blocks_of_the_one_that_has_its_slot_now_are_not_written_under_its_name() -> None:
    assert len(await _copies(leaves=False)) == 1
    assert await _copies(leaves=True) == []
