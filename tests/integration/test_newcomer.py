"""An empty worker joins three that hold all prompts: real HTTP, simulated engines, counted over requests."""

from __future__ import annotations

import asyncio
from random import Random

from gateway.sim.server import EngineSettings
from tests.integration.rig import rig, until

PROMPTS, OPEN = 12, 6
"""Prompts that begin requests, and requests at a time: little is waited for, so a newcomer earns slowly."""
WARM, THEN = 200, 800
LEADING, OWN = 1600, 64
"""Tokens. Engines compute at half their speed, so that it is them who take the time, not this process."""


async def test_an_empty_worker_gets_its_part_of_the_traffic() -> None:
    rng = Random(1)
    prompts = [[rng.randrange(300, 4000) for _ in range(LEADING)] for _ in range(PROMPTS)]
    served: list[str] = []
    async with rig(4, engine=EngineSettings(preset="7b-a10", speed=0.5)) as r:
        workers = f"{r.ports.admin_url}/admin/workers"
        (await r.http.delete(f"{workers}/w4")).raise_for_status()
        await until(lambda: len(r.gateway.fleet.workers) == 3)

        async def ask() -> None:
            own = [rng.randrange(300, 4000) for _ in range(OWN)]
            body = {"model": "demo", "prompt": rng.choice(prompts) + own, "max_tokens": 2, "stream": True}
            answer = await r.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            served.append(answer.headers["x-kvgate-worker"])
            if len(served) == WARM:
                joined = await r.http.post(workers, json={"url": r.engine("w4").url, "name": "w4"})
                joined.raise_for_status()

        left = iter(range(WARM + THEN))

        async def client() -> None:
            for _ in left:
                await ask()

        await asyncio.gather(*(client() for _ in range(OPEN)))
    parts = [served[at : at + 100].count("w4") for at in range(WARM, WARM + THEN, 100)]
    assert served[WARM:].count("w4") >= 0.1 * THEN, parts
