"""Few begin at a time; who waits for an answer keeps nobody out."""

from __future__ import annotations

import asyncio

from gateway.upstream.control import Turnstile


class Crowd:
    """So many that want in and stay until they are let go."""

    def __init__(self, turnstile: Turnstile, count: int) -> None:
        self.inside = 0
        self.go = asyncio.Semaphore(0)
        self.tasks = [asyncio.create_task(self._visit(turnstile)) for _ in range(count)]

    async def _visit(self, turnstile: Turnstile) -> None:
        async with turnstile.inside():
            self.inside += 1
            try:
                await self.go.acquire()
            finally:
                self.inside -= 1

    async def settles_at(self, inside: int) -> None:
        async with asyncio.timeout(20):
            while self.inside != inside:  # noqa: ASYNC110  a few turns of the loop
                await asyncio.sleep(0)
        for _ in range(20):
            await asyncio.sleep(0)
        assert self.inside == inside

    async def ends(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.wait(self.tasks)


async def test_the_next_comes_in_when_one_has_left() -> None:
    crowd = Crowd(Turnstile(3, young_s=3600), 8)
    await crowd.settles_at(3)
    crowd.go.release()
    await crowd.settles_at(3)
    assert sum(task.done() for task in crowd.tasks) == 1
    crowd.tasks[1].cancel()
    crowd.tasks[7].cancel()  # one inside and one that waits
    await crowd.settles_at(3)
    for _ in range(8):
        crowd.go.release()
    await asyncio.wait(crowd.tasks)
    assert crowd.inside == 0


async def test_who_stays_long_keeps_nobody_out_and_gives_its_place_up_once() -> None:
    turnstile = Turnstile(3, young_s=0.0)
    crowd = Crowd(turnstile, 8)
    await crowd.settles_at(8)
    await crowd.ends()
    crowd = Crowd(Turnstile(3, young_s=3600), 8)
    await crowd.settles_at(3)
    await crowd.ends()
