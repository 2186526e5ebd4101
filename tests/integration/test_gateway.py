"""The main job, end to end: requests find their prefix, and what was predicted is what the engine delivered."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gateway.pool import WorkerState
from gateway.records import Tier
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.server import SimulatedWorker
from tests.integration.rig import Rig, fast, rig, until

SYSTEM = "You are the assistant of a bicycle shop. Answer in one short sentence. " * 12


def chat(user: str, *, system: str = SYSTEM, **more: Any) -> dict[str, Any]:
    messages = [{"role": "system", "content": system}, {"role": "user", "content": user}]
    return {"model": "demo", "messages": messages, "max_tokens": 8, **more}


def tokens(seed: int, count: int) -> list[int]:
    chance = Random(seed)
    return [chance.randrange(300, 4000) for _ in range(count)]


async def cached(r: Rig, body: dict[str, Any], path: str = "/v1/chat/completions") -> tuple[str, int, int]:
    """(worker, predicted, delivered) of one request."""
    answer = await r.http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    usage = answer.json()["usage"]
    headers = answer.headers
    return (
        headers["x-kvgate-worker"],
        int(headers["x-kvgate-predicted-tokens"]),
        usage["prompt_tokens_details"]["cached_tokens"],
    )


async def test_a_conversation_stays_where_its_prefix_is() -> None:
    async with rig(4) as r:
        first, predicted, delivered = await cached(r, chat("How do I fix a flat tyre?"))
        assert (predicted, delivered) == (0, 0)
        await until(lambda: r.announced > 0)
        for question in ("Which pump?", "Which glue?", "How long does it take?"):
            worker, predicted, delivered = await cached(r, chat(question))
            assert worker == first
            assert predicted == delivered > 100


async def test_only_events_tell_of_what_others_did() -> None:
    """A prompt that reached a worker past the gateway is found through the worker's events."""
    async with rig(3) as r:
        body = {"model": "demo", "prompt": tokens(7, 640), "max_tokens": 1}
        answer = await r.http.post(r.engine("w2").url + "/v1/completions", json=body)
        assert answer.status_code == 200
        await until(lambda: r.announced >= 40)
        assert await cached(r, body, "/v1/completions") == ("w2", 624, 624)


async def test_a_gateway_that_starts_late_learns_by_replay() -> None:
    async with rig(2) as before:
        body = {"model": "demo", "prompt": tokens(8, 320), "max_tokens": 1}
        worker, _, _ = await cached(before, body, "/v1/completions")
        given = [{"url": engine.url, "name": engine.settings.name} for engine in before.engines]
        async with rig(0, settings={"workers": given}) as late:
            worker_late, predicted, delivered = await cached(late, body, "/v1/completions")
            assert (worker_late, predicted, delivered) == (worker, 304, 304)


async def test_salts_do_not_share() -> None:
    async with rig(1) as r:
        await cached(r, chat("a", cache_salt="one"))
        await until(lambda: r.announced > 0)
        _, predicted, delivered = await cached(r, chat("a", cache_salt="two"))
        assert (predicted, delivered) == (0, 0)
        _, predicted, delivered = await cached(r, chat("b", cache_salt="one"))
        assert predicted == delivered > 100


async def test_siblings_of_a_new_prefix_share_before_any_event() -> None:
    """Events are held back; only speculative entries can keep sixteen requests from computing one prefix everywhere."""
    async with rig(4, engine=fast(speed=1.0)) as r:
        for engine in r.engines:
            engine.fault(Fault(FaultKind.HOLD))
        shared = tokens(9, 2048)
        bodies = [{"model": "demo", "prompt": shared + tokens(100 + n, 16), "max_tokens": 1} for n in range(16)]
        answers = await asyncio.gather(*(cached(r, body, "/v1/completions") for body in bodies))
        assert len({worker for worker, _, _ in answers}) < 4
        assert sum(delivered > 2000 for _, _, delivered in answers) >= 12


@pytest.mark.parametrize("policy", ["seconds", "round_robin", "random", "least_load", "p2c", "prefix_hash"])
async def test_every_policy_serves(policy: str) -> None:
    async with rig(3, settings={"routing": {"policy": policy}}) as r:
        answers = [await cached(r, {"model": "demo", "prompt": tokens(n, 64), "max_tokens": 1}, "/v1/completions")
                   for n in range(30)]  # fmt: skip
        workers = {worker for worker, _, _ in answers}
        assert len(workers) >= 2
        decisions = (await r.admin("/admin/decisions"))["decisions"]
        assert {d["policy"] for d in decisions} == {policy}


async def test_a_session_is_kept_and_moved_when_its_worker_leaves() -> None:
    async with rig(3) as r:
        body = {"model": "demo", "prompt": tokens(3, 32), "max_tokens": 1}

        async def ask() -> str:
            answer = await r.http.post("/v1/completions", json=body, headers={"x-session-id": "chat-1"})
            return str(answer.headers["x-kvgate-worker"])

        home = await ask()
        assert {await ask() for _ in range(5)} == {home}
        assert (await r.http.delete(f"{r.ports.admin_url}/admin/workers/{home}")).status_code == 204
        assert await ask() != home
        decision = (await r.admin("/admin/decisions", params={"limit": 1}))["decisions"][0]
        assert decision["affinity"] == "moved_gone"


async def test_predicted_and_delivered_stand_side_by_side() -> None:
    async with rig(1) as r:
        await cached(r, chat("a"))
        await until(lambda: r.announced > 0)
        r.engines[0].fault(Fault(FaultKind.CLEAR, silent=True))
        _, predicted, delivered = await cached(r, chat("b"))
        assert predicted > 100
        assert delivered == 0
        metrics = (await r.http.get(r.ports.admin_url + "/metrics")).text
        assert 'kvgate_route_misses_total{worker="w1",cause="stale_index"} 1' in metrics
        assert 'kvgate_route_predictions_total{worker="w1"} 1' in metrics
        outcome = (await r.admin("/admin/decisions", params={"limit": 1}))["decisions"][0]["outcome"]
        assert (outcome["delivered_tokens"], outcome["missed_tokens"]) == (0, predicted)


async def test_a_stream_that_breaks_is_counted_though_its_code_was_200() -> None:
    async with rig(1) as r:
        r.engines[0].fault(Fault(FaultKind.CUT, times=1, after=2))
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "a", "stream": True})
        assert answer.status_code == 200
        assert '"error"' in answer.text
        assert "[DONE]" not in answer.text
        metrics = (await r.http.get(r.ports.admin_url + "/metrics")).text
        assert 'kvgate_request_results_total{worker="w1",result="worker_failed"} 1' in metrics


async def test_explain_decides_without_doing() -> None:
    async with rig(2) as r:
        worker, _, _ = await cached(r, chat("a"))
        await until(lambda: r.announced > 0)
        before = [engine.received for engine in r.engines]
        answer = await r.http.post(r.ports.admin_url + "/admin/explain", json=chat("c"))
        decision = answer.json()
        assert decision["worker"] == worker
        assert decision["predicted_tokens"] > 100
        assert len(decision["candidates"]) == 2
        assert [engine.received for engine in r.engines] == before
        assert r.quiet()


async def test_a_worker_that_comes_up_late_joins_and_one_that_is_down_does_no_harm() -> None:
    async with rig(1) as r:
        r.gateway.membership.expect(_spec("dead", "http://127.0.0.1:9"))
        await until(lambda: r.gateway.membership.members[_name("dead")].error is not None)
        joining = (await r.admin("/admin/workers"))["joining"]
        assert [row["id"] for row in joining] == ["dead"]
        assert "is the worker running" in joining[0]["error"]
        assert (
            'kvgate_worker_state{worker="dead",state="joining"} 1'
            in (await r.http.get(r.ports.admin_url + "/metrics")).text
        )
        assert (await cached(r, chat("a")))[0] == "w1"
        answer = await r.http.post(
            r.ports.admin_url + "/admin/workers", json={"url": "http://127.0.0.1:9", "name": "x"}
        )
        assert answer.status_code == 502
        assert "is the worker running" in answer.json()["error"]["message"]
        async with rig(1) as other:
            added = await r.http.post(
                r.ports.admin_url + "/admin/workers", json={"url": other.engines[0].url, "name": "w2"}
            )
            assert added.status_code == 201, added.text
            await until(lambda: r.gateway.membership.members[_name("w2")].caught_up)
            assert {row["id"] for row in (await r.admin("/admin/workers"))["workers"]} == {"w1", "w2"}
            assert (await r.http.delete(r.ports.admin_url + "/admin/workers/w2")).status_code == 204
        assert (await cached(r, chat("b")))[0] == "w1"


async def test_a_worker_that_vanishes_is_gone_and_comes_back_with_a_new_cache() -> None:
    async with rig(2) as r:
        body = {"model": "demo", "prompt": tokens(6, 320), "max_tokens": 1}
        home, _, _ = await cached(r, body, "/v1/completions")
        await until(lambda: r.announced >= 20)
        worker = r.gateway.fleet.workers[_name(home)]
        engine = r.engine(home)
        port, events, replay = (_port(e) for e in (engine.url, engine.events_endpoint, engine.replay_endpoint))
        await engine.stop()
        # The request finds nobody, is served elsewhere, and has the worker looked at.
        assert (await cached(r, body, "/v1/completions"))[0] != home
        await until(lambda: worker.state is WorkerState.GONE)
        assert dict(r.gateway.fleet.pools["demo"].not_ready) == {home: "gone"}
        settings = replace(engine.settings, port=port, events_port=events, replay_port=replay)
        again = SimulatedWorker(settings, wall_clock=time.time)
        await again.start()
        try:
            await until(lambda: worker.state is WorkerState.READY)
            await until(lambda: r.gateway.index.resident(worker.slot, Tier.GPU) == 0)
            other = next(w for w in r.gateway.fleet.workers.values() if w is not worker)
            assert r.gateway.index.resident(other.slot, Tier.GPU) >= 20
        finally:
            await again.stop()


async def test_a_restart_that_no_event_tells_of_empties_the_index() -> None:
    async with rig(1) as r:
        await cached(r, {"model": "demo", "prompt": tokens(6, 320), "max_tokens": 1}, "/v1/completions")
        worker = r.gateway.fleet.workers[_name("w1")]
        await until(lambda: r.gateway.index.resident(worker.slot, Tier.GPU) >= 20)
        r.engines[0].fault(Fault(FaultKind.RESTART))
        await until(lambda: r.gateway.index.resident(worker.slot, Tier.GPU) == 0)


async def test_token_ids_that_differ_from_the_workers_are_told() -> None:
    other = Path(__file__).parents[1] / "golden" / "prefix" / "tiny-qwen2"
    async with rig(1, settings={"models": [{"name": "demo", "tokenizer": str(other)}]}) as r:
        worker = r.gateway.fleet.workers[_name("w1")]
        await until(lambda: any(finding.code == "tokenizer_differs" for finding in worker.facts.findings))
    async with rig(1) as r:
        worker = r.gateway.fleet.workers[_name("w1")]
        member = r.gateway.membership.members[_name("w1")]
        await until(lambda: member.compared)
        assert not [finding for finding in worker.facts.findings if finding.code.endswith("_differs")]


async def test_block_sizes_that_differ_still_match() -> None:
    """A worker with blocks of 32 joins one with 16: keys go by 16, each worker is credited in its own blocks."""
    async with rig(1) as r, rig(1, engine=fast(block_size=32)) as large:
        prompt = tokens(5, 325)
        body = {"model": "demo", "prompt": prompt, "max_tokens": 1}
        await r.http.post(large.engines[0].url + "/v1/completions", json=body)
        added = await r.http.post(
            r.ports.admin_url + "/admin/workers", json={"url": large.engines[0].url, "name": "w2"}
        )
        assert added.status_code == 201
        await until(lambda: r.gateway.membership.members[_name("w2")].caught_up)
        await until(lambda: r.announced >= 20)
        assert await cached(r, body, "/v1/completions") == ("w2", 320, 320)


async def test_a_newcomer_with_smaller_blocks_makes_the_others_be_learned_anew() -> None:
    """The keys go by 32 until a worker with blocks of 16 joins; what the first one holds must be found all the same."""
    async with rig(1, engine=fast(block_size=32)) as r, rig(1) as small:
        body = {"model": "demo", "prompt": tokens(5, 325), "max_tokens": 1}
        await r.http.post(r.engines[0].url + "/v1/completions", json=body)
        await until(lambda: r.announced >= 10)
        added = await r.http.post(
            r.ports.admin_url + "/admin/workers", json={"url": small.engines[0].url, "name": "w2"}
        )
        assert added.status_code == 201
        await until(lambda: r.announced >= 20)
        assert await cached(r, body, "/v1/completions") == ("w1", 320, 320)


async def test_promises_end_by_themselves() -> None:
    async with rig(1, settings={"routing": {"speculative_ttl_s": 0.05}}) as r:
        async with r.http.stream("POST", "/v1/chat/completions", json=chat("a", stream=True)) as answer:
            await answer.aread()
        await until(lambda: r.announced > 0)
        await until(lambda: r.gateway.index.stats().speculative == 0)


async def test_secrets_stay_inside() -> None:
    """Neither the configuration nor anything else of the admin port shows a token or a worker's key."""
    async with rig(0, wait=False) as other:
        url = other.ports.admin_url
    settings = {
        "auth": {"admin_token": "token-secret"},
        "workers": [{"url": url, "name": "gone", "api_key": "worker-secret"}],
    }
    async with rig(0, settings=settings, wait=False) as r:
        await until(lambda: r.gateway.membership.members[_name("gone")].error is not None)
        auth = {"authorization": "Bearer token-secret"}
        for path in ("/admin/config", "/admin/workers", "/admin/pools", "/metrics", "/ready"):
            assert (await r.http.get(r.ports.admin_url + path)).status_code in (401, 503)
            answer = await r.http.get(r.ports.admin_url + path, headers=auth)
            assert "secret" not in answer.text, path
        config = await r.admin("/admin/config", headers=auth)
        assert config["settings"]["auth"]["admin_token"] == config["settings"]["workers"][0]["api_key"] == "**********"


async def test_nobody_serves_an_unknown_model_or_an_empty_fleet() -> None:
    async with rig(1) as r:
        answer = await r.http.post("/v1/completions", json={"model": "nope", "prompt": "x"})
        assert answer.status_code == 404
        assert answer.json()["error"]["code"] == "model_not_found"
        assert "demo" in answer.json()["error"]["message"]
    async with rig(0, wait=False) as r:
        assert (await r.http.get("/ready")).status_code == 503
        assert (await r.http.get("/health")).status_code == 200
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": "x"})
        assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")  # it may be served in a moment


def _port(url: str | None) -> int:
    assert url is not None
    return int(url.rsplit(":", 1)[1])


def _name(text: str) -> Any:
    return text


def _spec(name: str, url: str) -> Any:
    from gateway.settings import WorkerSettings

    return WorkerSettings(url=url, name=name).spec(set())
