"""The fleet is brought to the roster: in order, once, also when something happens in between."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest

from gateway.discovery import Enrolment, Found, Publish, Roster
from gateway.errors import WorkerTaken
from gateway.records import WorkerId, WorkerSpec

W1, W2 = WorkerId("w1"), WorkerId("w2")


class Members:
    """Writes down what it is told. `meanwhile` runs while one leaves or is probed."""

    def __init__(self) -> None:
        self.there: dict[WorkerId, WorkerSpec] = {}
        self.told: list[str] = []
        self.meanwhile: Callable[[], Awaitable[None]] | None = None
        self.refuses = False

    def expect(self, spec: WorkerSpec) -> None:
        assert spec.name not in self.there
        self.there[spec.name] = spec
        self.told.append(f"expect {spec.name}")

    async def add(self, spec: WorkerSpec) -> None:
        assert spec.name not in self.there
        await self._pause()
        if self.refuses:
            raise OSError("no answer")
        self.there[spec.name] = spec
        self.told.append(f"add {spec.name}")

    def change(self, spec: WorkerSpec) -> None:
        self.there[spec.name] = spec
        self.told.append(f"change {spec.name}")

    def withhold(self, name: WorkerId, reason: str | None) -> None:
        self.told.append(f"withhold {name}: {reason}")

    async def leave(self, name: WorkerId) -> None:
        self.told.append(f"leave {name}")
        await self._pause()
        self.there.pop(name, None)

    async def _pause(self) -> None:
        meanwhile, self.meanwhile = self.meanwhile, None
        if meanwhile is not None:
            await meanwhile()
        await asyncio.sleep(0)


@pytest.fixture
def members() -> Members:
    return Members()


@pytest.fixture
def enrolment(members: Members) -> Enrolment:
    return Enrolment(Roster(), members, clock=lambda: 1.0)


def spec(name: WorkerId, host: str | None = None) -> WorkerSpec:
    return WorkerSpec(name, f"http://{host or name}:8000")


async def test_who_leaves_has_left_before_a_newcomer_takes_its_name(members: Members, enrolment: Enrolment) -> None:
    await enrolment.configured([spec(W1), spec(W2)])
    await enrolment.configured([spec(W1, "elsewhere"), replace(spec(W2), weight=2.0)])
    assert members.told == ["expect w1", "expect w2", "leave w1", "change w2", "expect w1"]
    assert members.there[W1].url == "http://elsewhere:8000"
    await enrolment.apply()
    assert len(members.told) == 5


async def test_what_is_said_while_one_leaves_counts(members: Members, enrolment: Enrolment) -> None:
    await enrolment.configured([spec(W1)])

    async def meanwhile() -> None:
        enrolment.listed("config", [Found(spec(W1))])  # it is back already

    members.meanwhile = meanwhile
    await enrolment.configured([])
    assert members.told == ["expect w1", "leave w1", "expect w1"]


async def test_a_draining_worker_is_drained_then_leaves(members: Members, enrolment: Enrolment) -> None:
    enrolment.listed("kubernetes", [Found(spec(W1))])
    await enrolment.apply()
    enrolment.listed("kubernetes", [Found(spec(W1), draining="terminating")])
    await enrolment.apply()
    enrolment.listed("kubernetes", [])
    await enrolment.apply()
    assert members.told == ["expect w1", "withhold w1: terminating", "leave w1"]


async def test_an_operator_adds_and_takes_out(members: Members, enrolment: Enrolment) -> None:
    await enrolment.add(spec(W1))
    assert enrolment.present[W1].sources == ("admin",)
    await enrolment.apply()
    assert members.told == ["add w1"]
    for taken in (spec(W1, "other"), spec(W2, "w1")):
        with pytest.raises(WorkerTaken):
            await enrolment.add(taken)
    await enrolment.remove(W1)
    await enrolment.remove(W1)
    assert members.told == ["add w1", "leave w1"]
    assert not enrolment.present


async def test_a_configured_worker_that_is_taken_out_stays_out(members: Members, enrolment: Enrolment) -> None:
    await enrolment.configured([spec(W1)])
    await enrolment.remove(W1)
    await enrolment.configured([spec(W1)])
    assert members.told == ["expect w1", "leave w1"]
    members.refuses = True
    with pytest.raises(OSError, match="no answer"):
        await enrolment.add(spec(W1))
    await enrolment.apply()
    assert not members.there  # a failed attempt changes nothing
    members.refuses = False
    await enrolment.add(spec(W1))
    assert members.told[-1] == "add w1"


async def test_a_name_is_taken_while_its_worker_is_probed(members: Members, enrolment: Enrolment) -> None:
    """A source that names another worker so in that moment gets another name for it, and the name when it is free."""

    async def meanwhile() -> None:
        enrolment.listed("registry", [Found(spec(W1, "b"))])
        await enrolment.apply()
        assert [name.partition("-")[0] for name in members.there] == ["w1"]
        assert W1 not in members.there

    members.meanwhile, members.refuses = meanwhile, True
    with pytest.raises(OSError, match="no answer"):
        await enrolment.add(spec(W1, "a"))
    await enrolment.apply()
    assert {name: one.url for name, one in members.there.items()} == {W1: "http://b:8000"}


async def test_one_taken_out_while_it_is_probed_gives_its_name_away(members: Members, enrolment: Enrolment) -> None:
    async def meanwhile() -> None:
        await enrolment.remove(W1)
        enrolment.listed("registry", [Found(spec(W1, "b"))])
        await enrolment.apply()

    members.meanwhile, members.refuses = meanwhile, True
    with pytest.raises(OSError, match="no answer"):
        await enrolment.add(spec(W1, "a"))
    await enrolment.apply()
    assert members.told == ["leave w1", "expect w1"]
    assert enrolment.present[W1].spec.url == "http://b:8000"


class Named:
    """A source that says one thing and then fails."""

    name = "test"

    def __init__(self, looks_for: object = None) -> None:
        self.looks_for = looks_for

    async def run(self, publish: Publish) -> None:
        publish.present([Found(spec(W1))])
        publish.failed("away")
        await asyncio.Event().wait()


async def test_sources_run_until_the_end(members: Members, enrolment: Enrolment) -> None:
    async with asyncio.TaskGroup() as group:
        running: list[asyncio.Task[None]] = []

        class Tasks:
            def start(self, name: str, run: Callable[[], Awaitable[None]]) -> None:
                async def go() -> None:
                    await run()

                running.append(group.create_task(go(), name=name))

            async def stop(self, name: str) -> None:
                for task in running:
                    if task.get_name() == name:
                        task.cancel()

        enrolment.begin([Named("a")], Tasks())
        assert enrolment.roster.source("test") in enrolment.roster.sources(), "before it has said anything"
        async with asyncio.timeout(10):
            while W1 not in members.there:  # noqa: ASYNC110  a few turns of the loop
                await asyncio.sleep(0)
        assert enrolment.roster.source("test").error == "away"
        assert {task.get_name() for task in running} == {"source test", "enrolment"}
        enrolment.follow([Named("a")])
        for _ in range(10):
            await asyncio.sleep(0)
        assert len(running) == 2, "the same goes on"
        enrolment.follow([Named("b")])
        async with asyncio.timeout(10):
            while len(running) < 3:  # noqa: ASYNC110  a few turns of the loop
                await asyncio.sleep(0)
        assert W1 in members.there, "what it saw stays while it is started anew"
        enrolment.follow([])
        async with asyncio.timeout(10):
            while W1 in members.there:  # noqa: ASYNC110  a few turns of the loop
                await asyncio.sleep(0)
        assert enrolment.roster.sources() == []
        for task in running:
            task.cancel()
