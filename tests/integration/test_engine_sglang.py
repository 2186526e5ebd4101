"""A simulated SGLang worker over real sockets, alone and behind the gateway; data-parallel ranks of both dialects."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from random import Random
from typing import Any

import httpx
import pytest
import zmq.asyncio

from gateway.kv import events as kv
from gateway.records import Tier
from gateway.sim.releases import sglang_names
from gateway.sim.server import Dialect, EngineSettings, Fault, FaultKind, SimulatedWorker
from tests.integration.engine_rig import SPEECH, WAIT_S, EngineRig
from tests.integration.rig import fast, rig, until

SETTINGS = EngineSettings(dialect=Dialect.SGLANG, speed=50.0)


def tokens(seed: int, count: int) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(300, 4000) for _ in range(count)]


def folded(names: list[int]) -> list[int]:
    return [name % 2**64 for name in names]


# --------------------------------------------------------------------------- events


@pytest.mark.parametrize("version", ["0.5.6", "0.5.9", "0.5.17", "0.5.18", "0.5.20", "0.5.23"])
async def test_pages_are_announced_when_their_prefill_is_over(version: str) -> None:
    prompt = tokens(1, 70)
    async with EngineRig(replace(SETTINGS, version=version)) as r:
        assert await r.ask(prompt) == 0
        _, events = await r.receive()
        stored = [event for event in events if isinstance(event, kv.Stored)]
        assert len(stored) == (1 if version in ("0.5.18", "0.5.20", "0.5.23") else 4)
        assert [name for event in stored for name in event.hashes] == folded(sglang_names(prompt, 16, (0, 5, 23)))
        assert [token for event in stored for token in event.tokens] == prompt[:64]
        assert stored[0].parent is None
        assert [event.parent for event in stored[1:]] == [event.hashes[-1] for event in stored[:-1]]
        assert await r.ask(prompt) == 64


async def test_a_worker_says_first_that_it_is_empty() -> None:
    async with EngineRig(SETTINGS) as r:
        first = (await r.replay(0))[0][0]
        assert (first.seq, r.decode(first.payload)) == (0, [kv.Cleared()])


async def test_answers_are_announced_when_the_request_is_over() -> None:
    async with EngineRig(replace(SETTINGS, tokens_per_event=4)) as r:
        answer = await r.http.post("/v1/completions", json={"prompt": tokens(2, 16), "max_tokens": 49})
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 49
        sizes: list[int] = []
        while sum(sizes) < 4:  # in one batch where the loop was held up
            sizes += [len(event.hashes) for event in (await r.receive())[1] if isinstance(event, kv.Stored)]
        assert sizes == [1, 3]


async def test_decode_alone_delays_events() -> None:
    """Two requests: what the first stores at its end is told when the second is over, or 400 steps have passed."""
    settings = replace(SETTINGS, decode_log_interval=400, speed=1.0)
    async with EngineRig(settings) as r:
        long = asyncio.create_task(r.http.post("/v1/completions", json={"prompt": tokens(3, 16), "max_tokens": 300}))
        await until(lambda: r.worker.state()["running"] == 1)
        await r.receive()
        await r.http.post("/v1/completions", json={"prompt": tokens(4, 16), "max_tokens": 33})
        assert [len(e.hashes) for e in (await r.receive())[1] if isinstance(e, kv.Stored)] == [1]
        assert r.worker.state()["running"] == 1
        assert not await r.sub.poll(20)
        await long
        assert sum(len(e.hashes) for e in (await r.receive())[1] if isinstance(e, kv.Stored)) > 2


async def test_leaves_are_evicted_whole_and_told_in_one_event() -> None:
    async with EngineRig(replace(SETTINGS, kv_tokens=16 * 8)) as r:
        await r.http.post("/flush_cache")
        await r.drain()
        head = tokens(5, 32)
        await r.ask([*head, *tokens(6, 32)])
        await r.ask([*head, *tokens(7, 32)])
        await r.drain()
        await r.ask(tokens(8, 48))
        removed = [event for event in (await r.receive())[1] if isinstance(event, kv.Removed)]
        names = folded(sglang_names([*head, *tokens(6, 32)], 16, (0, 5, 23)))
        assert [event.hashes for event in removed] == [names[2:]]
        assert await r.ask([*head, *tokens(7, 32)]) == 48


async def test_salts_and_adapters_as_the_releases_tell_them() -> None:
    prompt = tokens(9, 40)
    salted = {"cache_salt": "tenant-a"}
    for version, shows in (("0.5.17", False), ("0.5.23", True)):
        async with EngineRig(replace(SETTINGS, version=version, adapters=("sql",))) as r:
            for more in ({}, salted, {"model": "demo:sql"}):
                assert await r.ask(prompt, **more) == 0
                assert await r.ask(prompt, **more) == 32
            events = [await r.receive() for _ in range(3)]
            stored = [event for _, batch in events for event in batch if isinstance(event, kv.Stored)]
            hashes = {name for event in stored for name in event.hashes}
            assert len(hashes) == (6 if shows else 2)
            assert {event.salt for event in stored} == ({None, "tenant-a"} if shows else {None})
            assert {event.adapter for event in stored} == ({None, "sql"} if shows else {None})


async def test_the_host_tier_of_hicache() -> None:
    prompt = tokens(10, 80)
    async with EngineRig(replace(SETTINGS, host_tokens=16 * 64)) as r:
        await r.ask(prompt)
        events = (await r.receive())[1]
        assert [(type(event), event.tier) for event in events if not isinstance(event, kv.Cleared)] == [
            (kv.Stored, Tier.GPU),
            (kv.Stored, Tier.CPU),
        ]
        r.worker.fault(Fault(FaultKind.EVICT))
        gone = (await r.receive())[1]
        assert all(isinstance(event, kv.Removed) and event.tier is Tier.GPU for event in gone)
        assert await r.ask(prompt) == 64
        loaded = [event for event in (await r.receive())[1] if isinstance(event, kv.Stored)]
        assert [(len(event.hashes), event.tier) for event in loaded] == [(5, Tier.GPU)]
        r.worker.fault(Fault(FaultKind.EVICT, medium=Tier.CPU))
        (event,) = (await r.receive())[1]
        assert isinstance(event, kv.Removed)
        assert event.tier is Tier.CPU
        assert set(loaded[0].hashes) <= set(event.hashes)


# --------------------------------------------------------------------------- HTTP


async def test_pages_beside_inference() -> None:
    async with EngineRig(replace(SETTINGS, data_parallel_size=2)) as r:
        info = (await r.http.get("/server_info")).json()
        assert info == (await r.http.get("/get_server_info")).json()
        assert (info["version"], info["page_size"], info["kv_events"]["dp_size"]) == ("0.5.23", 16, 2)
        assert (await r.http.get("/v1/models")).json()["data"][0]["owned_by"] == "sglang"
        assert [load["dp_rank"] for load in (await r.http.get("/v1/loads")).json()["loads"]] == [0, 1]
        assert (await r.http.get("/get_model_info")).json()["served_model_name"] == "demo"
        assert (await r.http.post("/tokenize", json={"prompt": "hello"})).json()["count"] >= 1
        assert (await r.http.get("/version")).status_code == 404
        assert "sglang:num_running_reqs" in (await r.http.get("/metrics")).text


@pytest.mark.parametrize(
    ("version", "missing"),
    [
        ("0.5.4", {"/server_info", "/model_info", "/v1/loads", "/tokenize"}),
        ("0.5.7", {"/server_info", "/model_info", "/v1/loads"}),
        ("0.5.23", set()),
    ],
)
async def test_paths_by_release(version: str, missing: set[str]) -> None:
    async with EngineRig(replace(SETTINGS, version=version)) as r:
        found = {path: (await r.http.get(path)).status_code for path in ("/server_info", "/model_info", "/v1/loads")}
        found["/tokenize"] = (await r.http.post("/tokenize", json={"prompt": "x"})).status_code
        assert {path for path, status in found.items() if status == 404} == missing
        info = (await r.http.get("/get_server_info")).json()
        assert ("kv_events" in info) == (version == "0.5.23")
        layouts = {4} if version == "0.5.23" else {3}
        assert (await r.replay(0))[1] == layouts


async def test_generate_reports_cached_tokens_and_the_rank() -> None:
    async with EngineRig(replace(SETTINGS, data_parallel_size=2, prompt_tokens_details=False)) as r:
        body: dict[str, Any] = {"input_ids": tokens(11, 40), "sampling_params": {"max_new_tokens": 3}}
        for expected in (0, 32):
            meta = (await r.http.post("/generate", json=body | {"routed_dp_rank": 1})).json()["meta_info"]
            assert (meta["cached_tokens"], meta["dp_rank"], meta["completion_tokens"]) == (expected, 1, 3)
        stream = (await r.http.post("/generate", json=body | {"routed_dp_rank": 1, "stream": True})).text
        events = [json.loads(part[6:]) for part in stream.split("\n\n") if part.startswith("data: {")]
        assert stream.endswith("data: [DONE]\n\n")
        assert [event["meta_info"]["completion_tokens"] for event in events] == [1, 2, 3]
        assert events[2]["text"].startswith(events[1]["text"])
        both = await r.http.post("/generate", json={"text": ["one", "two"], "sampling_params": {"max_new_tokens": 2}})
        assert len(both.json()) == 2
        chat = await r.http.post("/v1/completions", json={"prompt": tokens(11, 40), "max_tokens": 1})
        assert chat.json()["usage"]["prompt_tokens_details"] is None
        refused = await r.http.post("/generate", json={"sampling_params": {}})
        assert (refused.status_code, refused.json()["object"]) == (400, "error")


async def test_a_flush_waits_for_nobody() -> None:
    async with EngineRig(replace(SETTINGS, speed=1.0)) as r:
        running = asyncio.create_task(r.http.post("/v1/completions", json={"prompt": [1] * 40, "max_tokens": 400}))
        await until(lambda: r.worker.state()["running"] == 1)
        assert (await r.http.post("/flush_cache")).status_code == 400
        running.cancel()
        await until(lambda: r.worker.state()["running"] == 0)
        assert (await r.http.get("/flush_cache")).status_code == 200
        assert r.worker.state()["resident_blocks"] == 0


# --------------------------------------------------------------------------- ranks


@pytest.mark.parametrize("dialect", list(Dialect))
async def test_ranks_have_caches_and_ports_of_their_own(dialect: Dialect) -> None:
    worker = SimulatedWorker(
        replace(SETTINGS, dialect=dialect, data_parallel_size=3), wall_clock=time.time, speech=SPEECH
    )
    await worker.start()
    base, _, port = str(worker.events_endpoint).rpartition(":")
    context = zmq.asyncio.Context()
    subs = []
    for rank in range(3):
        sub = context.socket(zmq.SUB)
        sub.subscribe(b"")
        sub.connect(f"{base}:{int(port) + rank}")
        subs.append(sub)
    try:
        async with httpx.AsyncClient(base_url=worker.url, timeout=30, trust_env=False) as http:

            async def ask(prompt: list[int], rank: int | None) -> httpx.Response:
                headers = {} if rank is None else {"X-data-parallel-rank": str(rank)}
                return await http.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1}, headers=headers)

            number = 100
            for rank, sub in enumerate(subs):
                while not await sub.poll(50):
                    number += 1
                    assert (await ask([number] * 17, rank)).status_code == 200
                seen = EngineRig.decode((await asyncio.wait_for(sub.recv_multipart(), WAIT_S))[2], rank=rank)
                assert seen
            for rank in (0, 1, 2):
                usage = (await ask([7] * 40, rank)).json()["usage"]
                assert usage["prompt_tokens_details"]["cached_tokens"] == 0
            usage = (await ask([7] * 40, 1)).json()["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == 32
            before = [part["finished"] for part in worker.state()["ranks"]]  # type: ignore[attr-defined]
            for _ in range(6):
                await ask([8] * 8, None)
            after = [part["finished"] for part in worker.state()["ranks"]]  # type: ignore[attr-defined]
            assert [b - a for a, b in zip(before, after, strict=True)] == [2, 2, 2]
            assert (await ask([1], 3)).status_code == 400
            worker.fault(Fault(FaultKind.CLEAR, rank=1))
            resident = [part["resident_blocks"] for part in worker.state()["ranks"]]  # type: ignore[attr-defined]
            assert [count > 0 for count in resident] == [True, False, True]
    finally:
        context.destroy(linger=0)
        await worker.stop()


# --------------------------------------------------------------------------- behind the gateway


async def test_predicted_is_what_an_sglang_worker_delivers() -> None:
    """Conversations of token prompts over three workers with small caches: within a page, every time."""
    chance = Random(5)
    engine = fast(dialect=Dialect.SGLANG, kv_tokens=16 * 120)
    async with rig(3, engine=engine) as r:
        talks = [tokens(seed, 16 * 6) for seed in range(8)]
        hits = 0
        for turn in range(60):
            talk = chance.randrange(len(talks))
            talks[talk] = [*talks[talk][: 16 * 20], *tokens(1000 + turn, chance.randrange(1, 40))]
            answer = await r.http.post(
                "/v1/completions", json={"model": "demo", "prompt": talks[talk], "max_tokens": 1}
            )
            assert answer.status_code == 200, answer.text
            predicted = int(answer.headers["x-kvgate-predicted-tokens"])
            delivered = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            assert abs(predicted - delivered) <= 16, (turn, predicted, delivered)
            hits += delivered
            # Sequential requests: the next prediction is made when this request's events are here.
            await until(lambda: all(_followed(r, e) for e in r.engines))
        assert hits > 60 * 16


def _followed(r: Any, engine: SimulatedWorker) -> bool:
    worker = r.gateway.fleet.workers[engine.settings.name]
    return bool(r.gateway.index.resident(worker.slot, Tier.GPU) == engine.state()["resident_blocks"])


@pytest.mark.parametrize(("dialect", "chunk"), [(Dialect.VLLM, 1), (Dialect.VLLM, 4), (Dialect.SGLANG, 1)])
async def test_the_index_follows_both_tiers(dialect: Dialect, chunk: int) -> None:
    """Small tiers, so that blocks come and go in both; what the engine holds is what the index says, tier by tier."""
    engine = fast(dialect=dialect, kv_tokens=16 * 60, host_tokens=16 * 120, offload_chunk=chunk)
    async with rig(1, engine=engine) as r:
        worker = r.engines[0]
        slot = next(iter(r.gateway.fleet.workers.values())).slot
        for turn in range(30):
            prompt = [*tokens(turn % 5, 16 * 8), *tokens(100 + turn, 16 * (turn % 7) + 3)]
            answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": prompt, "max_tokens": 1})
            assert answer.status_code == 200, answer.text
            await until(
                lambda: all(
                    r.gateway.index.resident(slot, tier) == worker.state()[name]
                    for tier, name in ((Tier.GPU, "resident_blocks"), (Tier.CPU, "host_blocks"))
                )
            )
        state = worker.state()
        assert int(str(state["evicted_blocks"])) > 30
        assert int(str(state["host_blocks"])) >= 80
