"""A worker becomes ten times slower though it holds prompts that nobody else has: real HTTP, simulated engines.

Counted over requests, not over time: clients ask again when they are answered. The engines sleep for most of it, a
prompt's computation lasts as long as some hundred requests' work in this process.
"""

from __future__ import annotations

import asyncio
from random import Random

from gateway.sim.faults import Fault, FaultKind
from gateway.sim.server import EngineSettings
from tests.integration.rig import rig

OPEN = 12
"""Requests at a time, and prompts that begin them."""
WARM = 120
REQUESTS = 600
LAST = 200
LEADING, OWN = 6400, 128
"""Tokens: elsewhere a prompt costs 1.8 s anew; what follows it costs the slow worker 0.4 s, any other 0.04 s."""


async def test_a_worker_that_becomes_slow_loses_its_prompts_to_others() -> None:
    rng = Random(1)
    prompts = [[rng.randrange(300, 4000) for _ in range(LEADING)] for _ in range(OPEN)]
    served: list[str] = []
    async with rig(4, engine=EngineSettings(preset="7b-a10")) as r:

        async def ask() -> None:
            own = [rng.randrange(300, 4000) for _ in range(OWN)]
            body = {"model": "demo", "prompt": rng.choice(prompts) + own, "max_tokens": 2, "stream": True}
            answer = await r.http.post("/v1/completions", json=body)
            assert answer.status_code == 200, answer.text
            served.append(answer.headers["x-kvgate-worker"])
            if len(served) == WARM:
                r.engine("w1").fault(Fault(FaultKind.SLOW, factor=0.1))

        left = iter(range(REQUESTS))

        async def client() -> None:
            for _ in left:
                await ask()

        await asyncio.gather(*(client() for _ in range(OPEN)))
    assert served[WARM // 2 : WARM].count("w1") > 0.1 * WARM / 2, served[:WARM]
    assert served[-LAST:].count("w1") < 0.1 * LAST, [served[at : at + 50].count("w1") for at in range(0, REQUESTS, 50)]
