"""Where requests go when nothing, or one thing, speaks for a worker: whole gateways over engines that take time."""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

import pytest

from gateway.sim.faults import Fault, FaultKind
from tests.integration.rig import fast, rig, until
from tests.integration.test_gateway import tokens


@pytest.mark.parametrize("length", [5, 200])
async def test_unique_prompts_one_after_another_go_to_all_idle_workers(length: int) -> None:
    async with rig(4) as r:
        counts: Counter[str] = Counter()
        for number in range(200):
            body = {"model": "demo", "prompt": tokens(1000 + number, length), "max_tokens": 1}
            answer = await r.http.post("/v1/completions", json=body)
            counts[answer.headers["x-kvgate-worker"]] += 1
        assert len(counts) == 4
        assert all(30 <= count <= 70 for count in counts.values()), counts


async def test_a_burst_of_one_new_prefix_is_computed_on_a_few_workers_while_events_are_late() -> None:
    prefix, rng = tokens(7, 256 * 16), Random(1)
    async with rig(6, engine=fast(speed=4.0), settings={"routing": {"speculative_ttl_s": 60}}) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.HOLD))

        async def ask(number: int) -> tuple[str, int]:
            body = {"model": "demo", "prompt": prefix + [rng.randrange(2000) for _ in range(64)], "max_tokens": 2}
            answer = await r.http.post("/v1/completions", json=body)
            usage = answer.json()["usage"]
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            return answer.headers["x-kvgate-worker"], usage["prompt_tokens"] - cached

        answers = await asyncio.gather(*(ask(number) for number in range(200)))
        counts = Counter(worker for worker, _ in answers)
        assert max(counts.values()) <= 0.6 * 200, counts
        # All six would compute it. On the virtual clock four do; on a busy machine one more may be worth it.
        computed, suffixes = sum(new for _, new in answers), 200 * 64
        assert computed <= 1.1 * (5 * len(prefix) + suffixes) < 6 * len(prefix) + suffixes
        await until(r.quiet)
