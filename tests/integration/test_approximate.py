"""Fleets without events, models without a tokenizer, and both mixed: prefixes are found all the same."""

from __future__ import annotations

import time
from dataclasses import replace
from functools import partial
from typing import Any

from gateway.pool import WorkerState
from gateway.records import Slot, WorkerId
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.server import Dialect, EngineSettings, SimulatedWorker
from tests.integration.rig import Rig, fast, rig, until
from tests.integration.test_gateway import cached, chat, tokens

# A template alone: with nothing at all the worker's own directory would be read.
TEMPLATE = EngineSettings().tokenizer / "chat_template.jinja"
NO_TOKENIZER: dict[str, Any] = {"models": [{"name": "demo", "chat_template": str(TEMPLATE)}]}
WITH_TOKENIZER: dict[str, Any] = {}
SYSTEM = "You are the assistant of a bicycle shop. Answer in one short sentence. " * 40


def turns(*questions: str, **more: Any) -> dict[str, Any]:
    """A conversation with an answer between two questions."""
    body = chat("", system=SYSTEM, **more)
    messages = body["messages"][:1]
    for question in questions:
        if len(messages) > 1:
            messages.append({"role": "assistant", "content": "Yes, of course, that will be no trouble at all."})
        messages.append({"role": "user", "content": question * 20})
    return {**body, "messages": messages}


async def mode(r: Rig) -> tuple[str, str | None]:
    decision = (await r.admin("/admin/decisions?limit=1"))["decisions"][0]
    return decision["mode"], decision["reason"]


def nothing_learned(r: Rig, slot: Slot) -> bool:
    return r.gateway.index.learned(slot) == 0


def announcing(r: Rig) -> bool:
    return any(r.gateway.index.announces(worker.slot) for worker in r.gateway.fleet.workers.values())


async def test_a_fleet_without_events_is_learned_from_routing() -> None:
    async with rig(4, engine=fast(events=False)) as r:
        first, predicted, delivered = await cached(r, turns("one?"))
        assert (predicted, delivered) == (0, 0)
        for more in (("one?", "two?"), ("one?", "two?", "three?")):
            worker, predicted, delivered = await cached(r, turns(*more))
            assert worker == first
            # Answers are cached too, which routing cannot know.
            assert 0 < predicted <= delivered
            assert predicted > 0.8 * delivered
        assert await mode(r) == ("exact", None)
        index = await r.admin("/admin/index")
        assert index["approximate"]["blocks"] == index["approximate"]["by_worker"][first] > 30
        assert index["approximate"]["bytes"] > 1_000
        assert (await r.admin(f"/admin/workers/{first}"))["index_from"] == "routing"


async def test_a_model_without_a_tokenizer_is_found_by_its_text() -> None:
    """With events or without: no event names a key of text."""
    for events in (True, False):
        async with rig(4, engine=fast(events=events), settings=NO_TOKENIZER) as r:
            first, predicted, _ = await cached(r, turns("one?"))
            assert predicted == 0
            for more in (("one?", "two?"), ("one?", "two?", "three?")):
                worker, predicted, delivered = await cached(r, turns(*more))
                assert worker == first
                assert 0.6 * delivered < predicted < 1.1 * delivered
            assert await mode(r) == ("approximate", "no_tokenizer")
            # A list of token ids needs no tokenizer.
            body = {"model": "demo", "prompt": tokens(3, 320), "max_tokens": 1}
            await cached(r, body, "/v1/completions")
            if events:
                await until(partial(announcing, r))
            _, predicted, delivered = await cached(r, body, "/v1/completions")
            assert await mode(r) == ("exact", None)
            assert predicted == delivered == 304


async def test_bytes_a_token_are_learned_from_usage() -> None:
    async with rig(1, settings=NO_TOKENIZER) as r:
        errors = []
        for number in range(6):
            body = chat("x", system=f"{number} {SYSTEM}")
            answer = await r.http.post("/v1/chat/completions", json=body)
            decision = (await r.admin("/admin/decisions?limit=1"))["decisions"][0]
            errors.append(abs(decision["prompt_tokens"] / answer.json()["usage"]["prompt_tokens"] - 1))
        assert errors[-1] < 0.05 < errors[0]


async def test_salts_never_match_across_tenants() -> None:
    for settings in (WITH_TOKENIZER, NO_TOKENIZER):
        async with rig(1, engine=fast(events=False), settings=settings) as r:
            await cached(r, turns("one?", cache_salt="a"))
            _, predicted, delivered = await cached(r, turns("one?", cache_salt="b"))
            assert (predicted, delivered) == (0, 0)
            assert (await cached(r, turns("one?")))[1:] == (0, 0)
            _, predicted, delivered = await cached(r, turns("one?", cache_salt="a"))
            assert predicted > 200 < delivered


async def test_a_mixed_fleet_takes_each_workers_overlap_from_the_right_index() -> None:
    async with rig(2, each=[{"events": True}, {"events": False}]) as r:
        body = {"model": "demo", "prompt": tokens(1, 640), "max_tokens": 1}
        # Past the gateway: only the worker with events tells.
        for name in ("w1", "w2"):
            assert (await r.http.post(r.engine(name).url + "/v1/completions", json=body)).status_code == 200
        await until(lambda: r.announced >= 40)
        assert await cached(r, body, "/v1/completions") == ("w1", 624, 624)
        # Through the gateway: w2 is learned from routing, and both are compared in one decision.
        other = {"model": "demo", "prompt": tokens(2, 640), "max_tokens": 1}
        r.gateway.fleet.drain(WorkerId("w1"), 0.0, on=True)
        assert await cached(r, other, "/v1/completions") == ("w2", 0, 0)
        r.gateway.fleet.drain(WorkerId("w1"), 0.0, on=False)
        decision = await explain(r, other, "/v1/completions")
        overlaps = {c["worker"]: c["overlap_tokens"] for c in decision["candidates"]}
        assert (decision["worker"], overlaps) == ("w2", {"w1": 0, "w2": 624})
        assert await cached(r, other, "/v1/completions") == ("w2", 624, 624)
        sources = {w["id"]: w["index_from"] for w in (await r.admin("/admin/workers"))["workers"]}
        assert sources == {"w1": "events", "w2": "routing"}


async def explain(r: Rig, body: dict[str, Any], path: str) -> Any:
    answer = await r.http.post(f"{r.ports.admin_url}/admin/explain", params={"path": path}, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_explain_in_text_mode_is_the_decision_that_follows() -> None:
    async with rig(2, settings=NO_TOKENIZER) as r:
        await cached(r, turns("one?"))
        told = await explain(r, turns("one?", "two?"), "/v1/chat/completions")
        assert (told["mode"], told["reason"]) == ("approximate", "no_tokenizer")
        worker, predicted, _ = await cached(r, turns("one?", "two?"))
        assert (worker, predicted) == (told["worker"], told["predicted_tokens"])
        assert predicted > 200


async def test_a_restart_clears_what_was_learned() -> None:
    for settings in (WITH_TOKENIZER, NO_TOKENIZER):
        async with rig(1, engine=fast(events=False), settings=settings) as r:
            await cached(r, turns("one?"))
            assert (await cached(r, turns("one?")))[1] > 200
            slot = next(iter(r.gateway.fleet.workers.values())).slot
            r.engines[0].fault(Fault(kind=FaultKind.RESTART))
            await until(partial(nothing_learned, r, slot))
            _, predicted, delivered = await cached(r, turns("one?"))
            assert (predicted, delivered) == (0, 0)


async def test_what_the_worker_delivers_corrects_what_was_learned() -> None:
    """A cache that was cleared without a word: the first miss ends the belief in everything of that age."""
    async with rig(1, engine=fast(events=False)) as r:
        old = {"model": "demo", "prompt": tokens(1, 640), "max_tokens": 1}
        other = {"model": "demo", "prompt": tokens(2, 640), "max_tokens": 1}
        for body in (other, old):
            await cached(r, body, "/v1/completions")
        r.engines[0].fault(Fault(kind=FaultKind.CLEAR, silent=True))
        assert (await cached(r, old, "/v1/completions"))[1:] == (624, 0)
        assert (await cached(r, other, "/v1/completions"))[1:] == (0, 0)
        # Both were computed anew and count again.
        assert (await cached(r, old, "/v1/completions"))[1:] == (624, 624)
        dropped = (await r.admin("/admin/index"))["approximate"]["dropped"]
        assert dropped["evicted"] == 40


async def test_a_small_cache_is_not_believed_to_hold_more() -> None:
    async with rig(1, engine=fast(events=False, kv_tokens=2_048)) as r:
        for seed in range(6):
            await cached(r, {"model": "demo", "prompt": tokens(seed, 640), "max_tokens": 1}, "/v1/completions")
        slot = next(iter(r.gateway.fleet.workers.values())).slot
        assert r.gateway.index.learned(slot) == 128
        _, predicted, _ = await cached(
            r, {"model": "demo", "prompt": tokens(0, 640), "max_tokens": 1}, "/v1/completions"
        )
        assert predicted == 0


async def test_a_failed_request_teaches_nothing() -> None:
    async with rig(1, engine=fast(events=False)) as r:
        r.engines[0].fault(Fault(kind=FaultKind.STATUS, code=400))
        answer = await r.http.post("/v1/completions", json={"model": "demo", "prompt": tokens(1, 640), "max_tokens": 1})
        assert answer.status_code == 400
        slot = next(iter(r.gateway.fleet.workers.values())).slot
        assert (r.gateway.index.learned(slot), r.gateway.index.stats().keys) == (0, 0)


async def test_a_chat_with_an_image_finds_its_prefix() -> None:
    """The tokens of an image are known to the engine alone, so such a chat goes by its text. (The simulated engine
    takes no images: only the decision is looked at.)"""
    async with rig(2) as r:

        def asked(url: str) -> dict[str, Any]:
            body = turns("one?")
            body["messages"][-1]["content"] = [
                {"type": "text", "text": "What is this?"},
                {"type": "image_url", "image_url": {"url": url}},
            ]
            return body

        decision = await explain(r, asked("data:image/png;base64,AAAA"), "/v1/chat/completions")
        assert (decision["mode"], decision["reason"]) == ("approximate", "multimodal")
        assert decision["prompt_tokens"] > 512


async def test_a_worker_whose_events_end_is_learned_from_then_on() -> None:
    """Its process was started anew without them."""
    async with rig(1) as r:
        body = {"model": "demo", "prompt": tokens(1, 640), "max_tokens": 1}
        await cached(r, body, "/v1/completions")
        await until(partial(announcing, r))
        engine = r.engines[0]
        bare = SimulatedWorker(
            replace(engine.settings, events=False, port=int(engine.url.rpartition(":")[2])), wall_clock=time.time
        )
        await engine.stop()
        await bare.start()
        try:
            worker = r.gateway.fleet.workers[WorkerId("w1")]
            r.gateway.membership.look(worker.id)
            await until(lambda: not worker.facts.events and worker.state is WorkerState.READY)
            await until(lambda: not r.gateway.index.announces(worker.slot))
            assert (await cached(r, body, "/v1/completions"))[1:] == (0, 0)
            assert (await cached(r, body, "/v1/completions"))[1:] == (624, 624)
        finally:
            await bare.stop()


async def test_what_sglang_keeps_apart_is_never_predicted_from_its_events() -> None:
    """Its events tell of the blocks of a prompt as if they had no `extra_key`, so nothing of one that has."""
    async with rig(2, engine=fast(dialect=Dialect.SGLANG)) as r:
        await cached(r, turns("one?"))
        await until(partial(announcing, r))
        _, predicted, delivered = await cached(r, turns("one?"))
        assert predicted == delivered > 100
        # The same tokens under a key: nothing is there, and nothing is claimed.
        worker, predicted, delivered = await cached(r, turns("one?", extra_key="a"))
        assert (predicted, delivered) == (0, 0)
        assert await mode(r) == ("approximate", "extra_key")
        again, predicted, delivered = await cached(r, turns("one?", "two?", extra_key="a"))
        assert again == worker
        assert 0.6 * delivered < predicted < 1.1 * delivered
        assert (await cached(r, turns("one?", extra_key="b")))[1:] == (0, 0)


async def test_vllm_does_not_read_what_keeps_prompts_apart() -> None:
    async with rig(2) as r:
        await cached(r, turns("one?"))
        await until(partial(announcing, r))
        _, predicted, delivered = await cached(r, turns("one?", extra_key="a"))
        assert predicted == delivered > 100
        assert await mode(r) == ("exact", None)
