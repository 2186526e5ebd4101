"""One timer for many deadlines."""

from __future__ import annotations

import asyncio

from gateway.upstream.deadlines import NEVER, Deadlines


class Thing:
    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.told: list[float] = []

    def overdue(self, now: float) -> None:
        self.told.append(now)
        self.deadline = NEVER


async def test_only_what_is_due_is_told_and_once() -> None:
    now = 10.0
    deadlines = Deadlines(lambda: now, tick_s=0.001)
    due, later, moved, forgotten = (Thing(t) for t in (10.0, 11.0, 10.0, 10.0))
    for thing in (due, later, moved, forgotten, due):
        deadlines.watch(thing)
    moved.deadline = 12.0
    deadlines.forget(forgotten)
    assert len(deadlines) == 3
    async with asyncio.timeout(10):
        while not due.told:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    now = 11.5
    async with asyncio.timeout(10):
        while not later.told:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert (due.told, later.told, moved.told, forgotten.told) == ([10.0], [11.5], [], [])
    for thing in (due, later, moved):
        deadlines.forget(thing)


async def test_one_that_fails_does_not_stop_the_others() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    class Failing(Thing):
        def overdue(self, now: float) -> None:
            super().overdue(now)
            raise RuntimeError("seeded")

    deadlines = Deadlines(lambda: 1.0, tick_s=0.001)
    things = [Failing(0.0), Failing(0.0), Thing(0.0)]
    for thing in things:
        deadlines.watch(thing)
    async with asyncio.timeout(10):
        while not all(thing.told for thing in things):  # noqa: ASYNC110
            await asyncio.sleep(0.001)
    assert len(failures) == 2
    for thing in things:
        deadlines.forget(thing)


async def test_one_that_fails_at_every_tick_keeps_nobody_from_the_same_tick() -> None:
    failures: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: failures.append(context["exception"]))

    class Failing(Thing):
        def overdue(self, now: float) -> None:
            self.told.append(now)
            raise RuntimeError("seeded")

    deadlines = Deadlines(lambda: 1.0, tick_s=0.001)
    failing, others = [Failing(0.0) for _ in range(8)], [Thing(0.0) for _ in range(8)]
    for thing in (*failing, *others):
        deadlines.watch(thing)
    async with asyncio.timeout(10):
        while not failures:  # noqa: ASYNC110
            await asyncio.sleep(0)
    assert all(thing.told for thing in others)
    for thing in (*failing, *others):
        deadlines.forget(thing)


async def test_no_timer_runs_for_nothing() -> None:
    deadlines = Deadlines(lambda: 0.0, tick_s=0.001)
    thing = Thing(5.0)
    deadlines.watch(thing)
    deadlines.forget(thing)
    async with asyncio.timeout(10):
        while deadlines._timer is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.001)
