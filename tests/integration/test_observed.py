"""Dashboards and alerts against the real thing: Prometheus scrapes a gateway that serves simulated engines."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.integration.prometheus import Prometheus, prometheus, sooner, until_seen
from tests.integration.redis_server import redis_server
from tests.integration.rig import Rig, fast, rig

ROOT = Path(__file__).parents[2]
RULES = (ROOT / "deploy" / "alerts" / "kvgate.yaml").read_text()
BLOCK = 16
_SOONER = 120.0
"""A minute of the rules passes in half a second."""


def expressions() -> dict[str, str]:
    """Every query of every dashboard as Grafana would send it, by where it stands."""
    found = {}
    for path in sorted((ROOT / "dashboards").glob("*.json")):
        for panel in json.loads(path.read_text())["panels"]:
            for target in panel.get("targets", ()):
                expr = target["expr"].replace("$__rate_interval", "15s").replace("15m", "15s")
                name = f"{path.stem}: {panel['title']} {target['refId']}"
                found[name] = expr.replace("$model", ".*").replace("$worker", ".*")
    return found


class Traffic:
    """Conversations of four turns, one after the other, until told to stop; each repeats its beginning."""

    def __init__(self, running: Rig, *, seed: int = 1) -> None:
        self.rig = running
        self.repeating = True
        """False: every prompt is new from its first token on."""
        self._random = Random(seed)

    async def run(self) -> None:
        number = 0
        while True:
            number += 1
            prompt: list[int] = []
            for _ in range(4):
                if not self.repeating:
                    prompt = []
                prompt = prompt + [self._random.randrange(30_000) for _ in range(8 * BLOCK)]
                body = {"model": "demo", "prompt": prompt, "max_tokens": 4, "stream": True}
                await self.rig.http.post("/v1/completions", json=body, headers={"x-session-id": f"s{number}"})


@asynccontextmanager
async def traffic(running: Rig) -> AsyncIterator[Traffic]:
    made = Traffic(running)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_no_panel_is_empty_under_load(tmp_path: Path) -> None:
    async with (
        redis_server(tmp_path) as store,
        rig(2, settings={"redis": {"url": store.url}}) as running,
        prometheus(tmp_path, [running.ports.admin_url]) as seen,
        traffic(running),
    ):

        async def scraped() -> bool:
            return bool(await seen.query("rate(kvgate_delivered_tokens_total[15s]) > 0"))

        await until_seen(scraped)
        asked = expressions()
        assert len(asked) > 40

        async def empty() -> list[str]:
            return [name for name, expr in asked.items() if not await seen.query(expr)]

        async def full() -> bool:
            return not await empty()

        try:
            await until_seen(full, within_s=30)
        except TimeoutError:
            pytest.fail(f"empty: {await empty()}")


async def calm(seen: Prometheus, *, looks: int = 30) -> None:
    """Traffic, a minute of the rules in each look: nothing is pending. Alerts that compare with the past of half an
    hour need as much of it."""
    for _ in range(looks):
        await asyncio.sleep(0.5)
        assert await seen.alerts() == {}


async def fires(seen: Prometheus, alert: str) -> list[dict[str, str]]:
    async def there() -> bool:
        return alert in await seen.alerts()

    await until_seen(there)
    return (await seen.alerts())[alert]


@asynccontextmanager
async def watched(
    tmp_path: Path, *, engines_too: bool = False, **kwargs: Any
) -> AsyncIterator[tuple[Rig, Prometheus, Traffic]]:
    async with (
        rig(2, **kwargs) as running,
        prometheus(
            tmp_path,
            [running.ports.admin_url, *(engine.url for engine in running.engines if engines_too)],
            rules=sooner(RULES, _SOONER),
        ) as seen,
        traffic(running) as made,
    ):
        yield running, seen, made


async def test_calm_traffic_wakes_nobody_and_lost_hits_do(tmp_path: Path) -> None:
    async with watched(tmp_path) as (_, seen, made):
        await calm(seen, looks=60)
        made.repeating = False
        assert (await fires(seen, "KvgateHitRateDropped"))[0]["model"] == "demo"


async def test_a_worker_that_loses_what_it_announced_is_told(tmp_path: Path) -> None:
    engine = fast(kv_tokens=65_536)
    async with watched(tmp_path, engine=engine, settings={"index": {"route_miss_threshold": 0.9}}) as (
        running,
        seen,
        _,
    ):
        await calm(seen, looks=10)
        task = asyncio.create_task(_forget(running))
        try:
            assert (await fires(seen, "KvgateRouteMissRateHigh"))[0]["worker"] in ("w1", "w2")
        finally:
            task.cancel()


async def test_slow_tiers_and_their_links_are_told(tmp_path: Path) -> None:
    """GPU caches too small for the sessions: hits sink to the tier below, over a link that has become slow."""
    engine = fast(host_tokens=262_144)
    async with watched(tmp_path, engines_too=True, engine=engine) as (running, seen, _):
        await calm(seen)
        task = asyncio.create_task(_sink(running))
        try:
            for one in running.engines:
                await running.http.post(f"{one.url}/sim/fault", json={"kind": "link", "factor": 1e-3})
            assert (await fires(seen, "KvgateTransferBandwidthLow"))[0]["instance"]
            assert (await fires(seen, "KvgateTtftWithSlowTierHits"))[0]["worker"] in ("w1", "w2")
        finally:
            task.cancel()


async def _sink(running: Rig) -> None:
    """Engines push what is idle out of their GPU caches, again and again."""
    while True:
        for one in running.engines:
            await running.http.post(f"{one.url}/sim/fault", json={"kind": "evict"})
        await asyncio.sleep(0.05)


async def _forget(running: Rig) -> None:
    """Engines drop their caches again and again, and say nothing."""
    while True:
        for one in running.engines:
            await running.http.post(f"{one.url}/sim/fault", json={"kind": "clear", "silent": True})
        await asyncio.sleep(0.05)
