"""All requests share one long system prompt, and one of eight workers holds it: processes, seen from outside.

What is asserted does not depend on how fast the machine is: a fixed number of requests is open, their prefill takes the
engines a tenth of a second each, and loads are compared with the mean of the same moments.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from random import Random

import httpx

from tests.integration.processes import PATIENCE_S, Served, engine, gateway

WORKERS = 8
OPEN = 24
"""Three for each worker: about 70 % of the time of their prefills when they are spread."""
REQUESTS = 120
START = 40
"""Requests until the prefix may be where it has to be."""
PREFIX = [Random(1).randrange(300, 4000) for _ in range(4096)]
OWN = 1000


class Client:
    """Sends prompts that begin with the prefix; `served` are worker and delivered tokens of each, in order of end."""

    def __init__(self, served: Served, http: httpx.AsyncClient) -> None:
        self._served, self._http, self._rng = served, http, Random(2)
        self.served: list[tuple[str, int]] = []
        self.inflight: Counter[str] = Counter()
        """Sums over all looks after the start."""

    async def ask(self) -> None:
        own = [self._rng.randrange(300, 4000) for _ in range(OWN)]
        body = {"model": "demo", "prompt": PREFIX + own, "max_tokens": 4}
        answer = await self._http.post(f"{self._served.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        cached = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        self.served.append((answer.headers["x-kvgate-worker"], cached))

    async def load(self) -> None:
        """`REQUESTS` requests, `OPEN` at a time."""
        left = iter(range(REQUESTS))

        async def lane() -> None:
            for _ in left:
                await self.ask()

        looks = asyncio.create_task(self._look())
        try:
            await asyncio.gather(*(lane() for _ in range(OPEN)))
        finally:
            looks.cancel()

    async def _look(self) -> None:
        """All the time, until the load ends: then open requests become few, and say nothing."""
        pattern = r'^kvgate_worker_inflight_requests\{worker="([^"]+)"\} (\S+)$'
        while len(self.served) < REQUESTS - OPEN:
            page = (await self._http.get(f"{self._served.admin}/metrics")).text
            if len(self.served) >= START:
                for name, value in re.findall(pattern, page, re.MULTILINE):
                    self.inflight[name] += int(float(value))
            await asyncio.sleep(0.05)


async def _story(served: Served, newcomer: str) -> None:
    async with httpx.AsyncClient(timeout=PATIENCE_S) as http:
        client = Client(served, http)
        await client.ask()
        holder = client.served.pop()[0]
        await client.load()

        mean = sum(client.inflight.values()) / WORKERS
        assert mean > 0
        assert max(client.inflight.values()) <= 2 * mean, client.inflight
        warm = {worker for worker, cached in client.served if cached >= len(PREFIX)} | {holder}
        assert len(warm) >= 3, Counter(client.served)
        computed = sum(cached < len(PREFIX) for _, cached in client.served)
        assert computed <= WORKERS, f"the prefix was computed {computed} times by {WORKERS} workers"

        # A newcomer holds nothing: in the calm it gets nothing of this prefix.
        joined = await http.post(f"{served.admin}/admin/workers", json={"url": newcomer, "name": "new"})
        assert joined.status_code < 300, joined.text
        await asyncio.to_thread(
            served.program.until, lambda: served.value("worker_state", worker="new", state="ready") == 1
        )
        client.served.clear()
        for _ in range(12):
            await client.ask()
        assert all(cached >= len(PREFIX) for _, cached in client.served), client.served


def test_a_prompt_that_all_share_spreads_as_far_as_it_must_and_no_further(tmp_path: Path) -> None:
    with ExitStack() as stack:
        _, url = engine(stack, "--data-parallel-size", str(WORKERS), "--preset", "70b", "--speed", "1")
        _, newcomer = engine(stack, "--preset", "70b")
        config = tmp_path / "kvgate.json"
        config.write_text(json.dumps({"workers": [{"url": url, "name": "w"}], "load": {"poll_s": 0.2}}))
        served = gateway(stack, "--config", str(config))
        asyncio.run(_story(served, newcomer))
