"""A data-parallel engine behind a whole gateway: each rank with its own cache, feed, load and requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest

from gateway.pool import WorkerState
from gateway.records import EngineKind, Tier, WorkerId
from gateway.sim.releases import Dialect
from gateway.sim.server import EngineSettings, SimulatedWorker
from gateway.upstream.load_text import parse_metrics, parse_ranks
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until

W1, R0, R1 = WorkerId("w1"), WorkerId("w1@0"), WorkerId("w1@1")
BOTH = pytest.mark.parametrize("dialect", list(Dialect))


def two_ranks(dialect: Dialect = Dialect.VLLM, **more: Any) -> EngineSettings:
    return fast(dialect=dialect, data_parallel_size=2, **more)


def prompt_of(seed: int, blocks: int) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(300, 4000) for _ in range(16 * blocks + 1)]


async def complete(r: Rig, prompt: list[int], **headers: str) -> httpx.Response:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 2}
    answer = await r.http.post("/v1/completions", json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer


async def warm(r: Rig, rank: int, prompt: list[int]) -> None:
    """Straight to the engine, so that only its events can tell the gateway."""
    body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
    url = r.engines[0].url + "/v1/completions"
    assert (await r.http.post(url, json=body, headers={"x-data-parallel-rank": str(rank)})).status_code == 200


def blocks(r: Rig, name: WorkerId) -> int:
    return r.gateway.index.resident(r.gateway.fleet.workers[name].slot, Tier.GPU)


@BOTH
async def test_a_request_goes_to_the_rank_that_holds_its_prefix(dialect: Dialect) -> None:
    async with rig(1, engine=two_ranks(dialect)) as r:
        assert set(r.gateway.fleet.workers) == {R0, R1}
        prompts = {rank: prompt_of(rank, 8) for rank in (0, 1)}
        for rank, prompt in prompts.items():
            await warm(r, rank, prompt)
        await until(lambda: blocks(r, R0) >= 8 and blocks(r, R1) >= 8)
        for rank in (1, 0, 1, 0, 1):
            # The client's wish is not the gateway's choice, and the wrong rank would have nothing cached.
            answer = await complete(r, prompts[rank], **{"x-data-parallel-rank": str(1 - rank)})
            assert answer.headers["x-kvgate-worker"] == f"w1@{rank}"
            assert answer.headers["x-kvgate-predicted-tokens"] == "128"
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 128


async def test_the_native_path_of_sglang_serves_the_chosen_rank() -> None:
    async with rig(1, engine=two_ranks(Dialect.SGLANG)) as r:
        prompt = prompt_of(3, 8)
        await warm(r, 1, prompt)
        await until(lambda: blocks(r, R1) >= 8)
        body = {"input_ids": prompt, "sampling_params": {"max_new_tokens": 2}, "routed_dp_rank": 0}
        answer = await r.http.post("/generate", json=body)
        assert answer.headers["x-kvgate-worker"] == "w1@1"
        meta = answer.json()["meta_info"]
        assert (meta["dp_rank"], meta["cached_tokens"]) == (1, 128)


@BOTH
async def test_cold_requests_spread_over_ranks_and_nothing_stays_counted(dialect: Dialect) -> None:
    async with rig(1, engine=two_ranks(dialect)) as r:
        answers = await asyncio.gather(*(complete(r, prompt_of(100 + n, 2)) for n in range(40)))
        chosen = Counter(answer.headers["x-kvgate-worker"] for answer in answers)
        assert set(chosen) == {R0, R1}
        assert min(chosen.values()) >= 8
        await until(r.quiet)
        metrics = (await r.http.get(r.ports.admin_url + "/metrics")).text
        for name in (R0, R1):
            assert f'kvgate_accounting_drift{{worker="{name}"}} 0' in metrics


@BOTH
async def test_load_is_each_ranks_own(dialect: Dialect) -> None:
    async with rig(1, engine=two_ranks(dialect)) as r:
        await warm(r, 1, prompt_of(2, 40))
        kind = EngineKind(dialect.value)
        workers = r.gateway.fleet.workers
        text = (await r.http.get(r.engines[0].url + "/metrics")).content
        said = parse_ranks(text, kind, (0, 1))
        assert parse_metrics(text, kind).kv_blocks == sum(sample.kv_blocks or 0 for sample in said.values())
        async with asyncio.timeout(PATIENCE_S):
            while True:
                text = (await r.http.get(r.engines[0].url + "/metrics")).content
                said = parse_ranks(text, kind, (0, 1))
                loads = [workers[name].load for name in (R0, R1)]
                if [load and load.prefix_queries for load in loads] == [said[n].prefix_queries for n in (0, 1)]:
                    break
                await asyncio.sleep(0.05)
        assert said[1].prefix_queries != said[0].prefix_queries
        for name, rank in ((R0, 0), (R1, 1)):
            load = workers[name].load
            assert load is not None
            assert load.kv_blocks == said[rank].kv_blocks
            assert workers[name].kv_capacity == 16 * (load.kv_blocks or 0)


async def test_ranks_in_the_admin_port() -> None:
    async with rig(1, engine=two_ranks()) as r:
        listed = (await r.admin("/admin/workers"))["workers"]
        assert [(w["id"], w["member"], w["rank"], w["ranks"], w["state"]) for w in listed] == [
            ("w1@0", "w1", 0, [0], "ready"),
            ("w1@1", "w1", 1, [1], "ready"),
        ]
        assert [w["feed"]["phases"] for w in listed] == [{"0": "live"}, {"1": "live"}]
        assert (await r.admin("/admin/workers/w1@1"))["rank"] == 1
        admin = r.ports.admin_url
        several = await r.http.get(admin + "/admin/workers/w1")
        assert (several.status_code, "w1@0, w1@1" in several.text) == (404, True)
        refused = await r.http.delete(admin + "/admin/workers/w1@1")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "worker_is_rank")
        assert set(r.gateway.fleet.workers) == {R0, R1}
        assert (await r.http.delete(admin + "/admin/workers/w1")).status_code == 204
        assert not r.gateway.fleet.workers
        assert "w1@" not in (await r.http.get(admin + "/metrics")).text
        joined = await r.http.post(admin + "/admin/workers", json={"url": r.engines[0].url, "name": "again"})
        assert joined.status_code == 201
        assert [(w["id"], w["member"]) for w in joined.json()["workers"]] == [
            ("again@0", "again"),
            ("again@1", "again"),
        ]
        assert set(r.gateway.fleet.workers) == {"again@0", "again@1"}


@BOTH
async def test_a_server_that_is_away_is_away_for_all_its_ranks(dialect: Dialect) -> None:
    async with rig(1, engine=two_ranks(dialect)) as r:
        workers, engine = r.gateway.fleet.workers, r.engines[0]
        prompt = prompt_of(5, 8)
        await warm(r, 1, prompt)
        await until(lambda: blocks(r, R1) >= 8)
        await engine.stop()
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
        answer = await r.http.post("/v1/completions", json=body)
        if answer.status_code != 503:  # else a probe was faster
            assert answer.status_code == 502
            assert answer.headers["x-kvgate-retries"] == "0"  # the other rank is behind the same port
        await until(lambda: {worker.state for worker in workers.values()} == {WorkerState.GONE})
        assert (await r.http.post("/v1/completions", json=body)).status_code == 503
        port = int(engine.url.rpartition(":")[2])
        again = SimulatedWorker(replace(engine.settings, port=port), wall_clock=time.time)
        await again.start()
        try:
            await until(lambda: {worker.state for worker in workers.values()} == {WorkerState.READY})
            member = r.gateway.membership.members[W1]
            await until(lambda: member.caught_up and blocks(r, R1) < 8)  # both caches are new
            answer = await complete(r, prompt)
            assert answer.headers["x-kvgate-predicted-tokens"] == "0"
        finally:
            await again.stop()


@pytest.mark.parametrize(("dialect", "version"), [(Dialect.VLLM, "0.11.0"), (Dialect.SGLANG, "0.5.9")])
async def test_ranks_that_cannot_be_named_are_one_worker(dialect: Dialect, version: str) -> None:
    """The overlap is then what the best rank may hold, and the engine chooses."""
    async with rig(1, engine=two_ranks(dialect, version=version), wait=False) as r:
        await until(lambda: W1 in r.gateway.fleet.workers)
        (worker,) = (await r.admin("/admin/workers"))["workers"]
        assert "ranks_as_one" in {finding["code"] for finding in worker["findings"]}
        assert (worker["id"], worker["rank"], worker["ranks"]) == ("w1", None, [0, 1])
        answer = await complete(r, prompt_of(7, 8), **{"x-data-parallel-rank": "1"})
        assert answer.headers["x-kvgate-worker"] == "w1"


async def test_ranks_can_be_kept_together() -> None:
    async with rig(1, engine=two_ranks(), wait=False) as r:
        url = r.engines[0].url
        await until(lambda: set(r.gateway.fleet.workers) == {R0, R1})
        admin = r.ports.admin_url
        await r.http.delete(admin + "/admin/workers/w1")
        joined = await r.http.post(admin + "/admin/workers", json={"url": url, "name": "w1", "ranks": "one"})
        (worker,) = joined.json()["workers"]
        assert (worker["id"], worker["ranks"]) == ("w1", [0, 1])
        assert len(r.gateway.membership.members[W1].feeds) == 2
        prompt = prompt_of(9, 8)
        await warm(r, 1, prompt)
        await until(lambda: blocks(r, W1) >= 8)
        assert (await complete(r, prompt)).headers["x-kvgate-predicted-tokens"] == "128"
