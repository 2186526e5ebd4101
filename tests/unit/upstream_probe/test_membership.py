"""Joining and leaving when several things happen at once: slots, names and bindings stay with their worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from random import Random
from typing import Any

import httpx
import pytest
import pytest_asyncio
import zmq

from gateway.kv import KvIndex
from gateway.kv.events import Cleared
from gateway.pool import Fleet, WorkerState
from gateway.records import WorkerFacts, WorkerId, WorkerSpec
from gateway.upstream.control import ControlClient, ProbeFailed
from gateway.upstream.membership import Membership, MembershipSettings

W1, W2 = WorkerId("w1"), WorkerId("w2")


class Tasks:
    """Runs nothing; `on_stop` is what happens elsewhere while a task is waited for."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.runs: dict[str, Callable[[], Awaitable[None]]] = {}
        self.on_stop: Callable[[], Awaitable[None]] | None = None

    def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
        assert name not in self.names
        self.names.add(name)
        self.runs[name] = run

    async def stop(self, name: str) -> None:
        meanwhile, self.on_stop = self.on_stop, None
        if meanwhile is not None:
            await meanwhile()
        self.names.discard(name)


class Stand:
    """A membership over workers that answer at once, unless their host is `down`."""

    def __init__(self, http: httpx.AsyncClient, context: zmq.Context[Any]) -> None:
        self.fleet, self.index, self.tasks = Fleet(), KvIndex(), Tasks()
        self.left: list[WorkerId] = []
        self.models = [{"id": "m"}]
        self.probes = 0
        self.on_probe: Callable[[], None] | None = None
        self.on_joining: Callable[[], Awaitable[None]] | None = None
        self.membership = Membership(
            fleet=self.fleet,
            index=self.index,
            control=ControlClient(http),
            tasks=self.tasks,
            context=context,
            clock=lambda: 1.0,
            rng=Random(1),
            on_joining=self._joining,
            on_left=self.left.append,
            settings=MembershipSettings(refresh_s=0.001),
        )

    async def _joining(self, spec: WorkerSpec, facts: WorkerFacts) -> None:
        meanwhile, self.on_joining = self.on_joining, None
        if meanwhile is not None:
            await meanwhile()

    def bound(self, name: WorkerId) -> bool:
        """Whether events of the worker reach the index."""
        return not self.index.apply(self.fleet.workers[name].slot, 0, [Cleared()]).ignored


@pytest_asyncio.fixture
async def stand() -> AsyncIterator[Stand]:
    made: list[Stand] = []

    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.host == "down":
            raise httpx.ConnectError("refused")
        if request.url.path == "/v1/models":
            made[0].probes += 1
            meanwhile, made[0].on_probe = made[0].on_probe, None
            if meanwhile is not None:
                meanwhile()
            return httpx.Response(200, text=json.dumps({"data": made[0].models}))
        return httpx.Response(404)

    with zmq.Context() as context:
        async with httpx.AsyncClient(transport=httpx.MockTransport(handle)) as http:
            made.append(Stand(http, context))
            yield made[0]


def spec(name: WorkerId, host: str | None = None, *, kv_events: str = "") -> WorkerSpec:
    return WorkerSpec(name, f"http://{host or name}:8000", kv_events=kv_events)


async def test_who_joins_while_another_leaves_keeps_its_slot_and_binding(stand: Stand) -> None:
    membership = stand.membership
    await membership.add(spec(W1))

    async def meanwhile() -> None:
        assert stand.fleet.workers[W1].state is WorkerState.DOWN
        await membership.add(spec(W2))

    stand.tasks.on_stop = meanwhile
    await membership.leave(W1)
    assert set(stand.fleet.workers) == {W2}
    assert stand.bound(W2)
    assert stand.left == [W1]


async def test_leaving_twice_at_once_is_leaving_once(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    stand.tasks.on_stop = lambda: stand.membership.leave(W1)
    await stand.membership.leave(W1)
    assert (stand.left, dict(stand.membership.members), dict(stand.fleet.workers)) == ([W1], {}, {})
    assert not stand.tasks.names


async def test_a_name_is_taken_from_the_first_moment(stand: Stand) -> None:
    one, other = await asyncio.gather(
        stand.membership.add(spec(W1, "a")), stand.membership.add(spec(W1, "b")), return_exceptions=True
    )
    assert one is None
    assert isinstance(other, ValueError)
    assert stand.fleet.workers[W1].spec.url == "http://a:8000"
    assert stand.bound(W1)


async def test_removed_while_it_joins(stand: Stand) -> None:
    stand.on_joining = lambda: stand.membership.leave(W1)
    with pytest.raises(ProbeFailed, match="removed while it joined"):
        await stand.membership.add(spec(W1))
    assert (dict(stand.membership.members), dict(stand.fleet.workers), stand.tasks.names) == ({}, {}, set())


async def test_a_worker_that_does_not_answer_leaves_its_name_free(stand: Stand) -> None:
    with pytest.raises(ProbeFailed):
        await stand.membership.add(spec(W1, "down"))
    assert not stand.membership.members
    await stand.membership.add(spec(W1))
    assert stand.bound(W1)


async def test_nothing_is_left_of_who_left(stand: Stand) -> None:
    await stand.membership.add(spec(W1, kv_events="tcp://127.0.0.1:5557"))
    slot = stand.fleet.workers[W1].slot
    assert any(name.startswith("feed w1") for name in stand.tasks.names)
    await stand.membership.leave(W1)
    assert not stand.tasks.names
    assert stand.index.apply(slot, 0, [Cleared()]).ignored == {"unbound": 1}


async def test_what_a_worker_serves_later_is_found(stand: Stand) -> None:
    await stand.membership.add(spec(W1))
    stand.models.append({"id": "poet", "parent": "m"})
    async with asyncio.TaskGroup() as group:
        following = group.create_task(_run(stand.tasks.runs["worker w1"]))
        async with asyncio.timeout(10):
            while "poet" not in stand.fleet.pools:  # noqa: ASYNC110
                await asyncio.sleep(0)
        following.cancel()
    assert stand.fleet.pools["poet"].adapter == "poet"


async def test_a_look_asked_for_while_a_probe_runs_is_not_lost(stand: Stand) -> None:
    stand.membership._settings = MembershipSettings(refresh_s=10_000)
    await stand.membership.add(spec(W1))
    stand.on_probe = lambda: stand.membership.look(W1)
    following = asyncio.ensure_future(_run(stand.tasks.runs["worker w1"]))
    async with asyncio.timeout(20):
        while stand.probes < 3:  # noqa: ASYNC110  joining, following, and the look; no event tells of a probe
            await asyncio.sleep(0.001)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def _run(run: Callable[[], Awaitable[None]]) -> None:
    await run()
