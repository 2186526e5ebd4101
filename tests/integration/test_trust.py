"""An index that knows when to doubt itself: caches emptied without a sign, and workers whose blocks are not ours."""

from __future__ import annotations

import asyncio

import pytest

from gateway.pool.evidence import IDENTITY_RUN
from gateway.pool.trust import Trust
from gateway.records import TrustState, WorkerId
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.publisher import Replay
from tests.integration.rig import PATIENCE_S, Rig, fast, rig, until
from tests.integration.truth import BLOCK, ask, in_step, metric, predicted, prompt, resident, stored, told, warm

PROMPTS = [prompt(seed, 40) for seed in range(12)]
WHOLE = 40 * BLOCK


def trust(r: Rig, name: str = "w1") -> Trust:
    return r.gateway.fleet.workers[WorkerId(name)].belief


async def warmed(r: Rig, *names: str) -> None:
    """These engines hold every prompt, and the gateway knows."""
    for name in names:
        for tokens in PROMPTS:
            await warm(r, r.engine(name), tokens)
    await in_step(r, *names)
    await until(lambda: all(trust(r, name).state is TrustState.TRUSTED for name in names))


async def misses(r: Rig, cause: str | None = None) -> float:
    return await metric(r, "kvgate_route_misses_total", **({"cause": cause} if cause is not None else {}))


@pytest.mark.parametrize("replay", [Replay.NEW, Replay.OFF])
async def test_a_cache_emptied_without_a_sign_costs_two_requests(replay: Replay) -> None:
    """One worker, so that every request meets the emptied cache."""
    async with rig(1, engine=fast(replay=replay)) as r:
        await warmed(r, "w1")
        assert await metric(r, "kvgate_worker_trust", worker="w1") == 1.0
        r.engines[0].fault(Fault(FaultKind.CLEAR, silent=True))
        for tokens in PROMPTS[:8]:
            assert (await ask(r, tokens)).delivered == 0
        assert await misses(r) == await misses(r, "stale_index") == 2
        assert await metric(r, "kvgate_worker_trust", worker="w1") < 0.3
        assert await metric(r, "kvgate_worker_trust_state", worker="w1", state="uncertain") == 1
        assert await metric(r, "kvgate_worker_refresh_tightened", worker="w1") == 1
        assert await metric(r, "kvgate_index_relearned_total", worker="w1") == 1
        # Prompts computed since then are announced, and are found.
        for tokens in PROMPTS[3:8]:
            answered = await ask(r, tokens)
            assert answered.predicted == answered.delivered == WHOLE
        assert await metric(r, "kvgate_worker_trust", worker="w1") > 0.9
        assert await metric(r, "kvgate_worker_trust_state", worker="w1", state="trusted") == 1
        assert await misses(r) == 2


async def test_the_prompts_computed_anew_are_known_after_the_replay() -> None:
    async with rig(1) as r:
        await warmed(r, "w1")
        r.engines[0].fault(Fault(FaultKind.CLEAR, silent=True))
        for tokens in PROMPTS[:2]:
            assert (await ask(r, tokens)).delivered == 0
        await in_step(r)
        for tokens in PROMPTS[:2]:
            answered = await ask(r, tokens)
            assert answered.predicted == answered.delivered == WHOLE


async def test_another_holder_gets_the_requests() -> None:
    async with rig(2, engine=fast(speed=1.0)) as r:
        await warmed(r, "w1", "w2")
        r.engine("w1").fault(Fault(FaultKind.CLEAR, silent=True))
        answers = [await ask(r, tokens) for tokens in PROMPTS]
        wrong = [answered for answered in answers if not answered.delivered]
        assert len(wrong) <= 2
        assert all(answered.worker == "w1" for answered in wrong)
        assert await misses(r) == await misses(r, "stale_index") == len(wrong)


async def test_one_emptied_prompt_among_hits_changes_little() -> None:
    """A prompt whose blocks were never there, among those that are."""
    async with told() as (r, (events,)):
        ghost = prompt(99, 40)
        events.publish(stored(list(range(1, 41)), ghost))
        await until(lambda: resident(r, "w1") == 40)
        await until(lambda: trust(r).state is TrustState.TRUSTED)
        answered = await ask(r, ghost)
        assert (answered.predicted, answered.delivered) == (WHOLE, 0)
        assert await metric(r, "kvgate_worker_trust", worker="w1") > 0.9
        assert await metric(r, "kvgate_index_relearned_total", worker="w1") == 0


async def test_a_worker_that_never_delivers_what_it_announces_is_named() -> None:
    """Its events are another engine's, as behind a wrong port."""
    async with told() as (r, (events,)):

        async def announced_and_asked(number: int) -> None:
            tokens = prompt(1000 + number, 4)
            events.publish(stored(list(range(1 + 4 * number, 5 + 4 * number)), tokens))
            await until(lambda: trust(r).feed is TrustState.TRUSTED)
            async with asyncio.timeout(PATIENCE_S):
                while (await predicted(r, tokens))["w1"] < 4 * BLOCK:  # noqa: ASYNC110  told over HTTP, without an event
                    await asyncio.sleep(0.01)
            answered = await ask(r, tokens)
            assert (answered.predicted, answered.delivered) == (4 * BLOCK, 0)

        number = 0
        while not trust(r).findings():
            assert number < 20
            await announced_and_asked(number)
            number += 1
        (finding,) = (f for f in (await r.admin("/admin/workers/w1"))["findings"] if f["code"] == "identity")
        assert finding["severity"] == "error"
        assert "demo" in finding["message"]
        assert await metric(r, "kvgate_worker_findings", worker="w1", code="identity") == 1
        await announced_and_asked(number)
        assert await misses(r, "identity") == 1


async def test_hits_that_nobody_announced_are_named() -> None:
    async with told(settings={"routing": {"speculative_ttl_s": 0.01}}) as (r, (events,)):
        events.publish(stored([1], prompt(1, 1)))
        await until(lambda: trust(r).feed is TrustState.TRUSTED)
        shared = prompt(5, 40)
        await ask(r, shared)
        for number in range(IDENTITY_RUN):
            # The promise of the request before has ended: only events could tell.
            r.gateway.router.expire(r.gateway.clock() + 1)
            answered = await ask(r, prompt(100 + number, 1, after=shared))
            assert (answered.predicted, answered.delivered) == (0, WHOLE)
        codes = [finding["code"] for finding in (await r.admin("/admin/workers/w1"))["findings"]]
        assert "identity" in codes


async def test_a_worker_without_events_is_blind() -> None:
    async with rig(1, engine=fast(events=False)) as r:
        await until(lambda: trust(r).state is TrustState.BLIND)
        worker = await r.admin("/admin/workers/w1")
        assert worker["index_trust"]["state"] == "blind"
        assert 0.8 < worker["trust"] < 1.0


async def test_a_worker_that_serves_while_its_feed_is_silent_is_uncertain_until_it_is_heard() -> None:
    async with rig(1, engine=fast(replay=Replay.OFF)) as r:
        await warmed(r, "w1")
        r.engines[0].fault(Fault(FaultKind.HOLD))
        await ask(r, prompt(50, 40))
        await until(lambda: trust(r).state is TrustState.UNCERTAIN, within_s=60)
        assert not trust(r).contradicted
        assert 0.8 < trust(r).factor < 1.0
        r.engines[0].fault(Fault(FaultKind.RELEASE))
        await until(lambda: trust(r).state is TrustState.TRUSTED)
        assert trust(r).factor == 1.0


async def test_a_moved_request_that_loses_its_hit_is_a_miss_by_retry() -> None:
    async with rig(2) as r:
        await warmed(r, "w1")
        r.engine("w1").fault(Fault(FaultKind.STATUS, times=1, code=503))
        answered = await ask(r, PROMPTS[0])
        assert (answered.worker, answered.predicted, answered.delivered) == ("w2", 0, 0)
        assert await misses(r) == await misses(r, "retry") == 1
        (decision,) = (await r.admin("/admin/decisions", params={"limit": 1}))["decisions"]
        assert (decision["outcome"]["miss_cause"], decision["outcome"]["missed_tokens"]) == ("retry", WHOLE)
        assert trust(r, "w2").factor == trust(r, "w1").factor == 1.0


async def test_what_was_given_up_for_load_is_shown() -> None:
    async with rig(2, engine=fast(speed=1.0)) as r:
        await warmed(r, "w1")
        busy = r.gateway.fleet.workers[WorkerId("w1")]
        busy.pending_s = 60.0
        busy.relearn()
        await ask(r, PROMPTS[0])
        (decision,) = (await r.admin("/admin/decisions", params={"limit": 1}))["decisions"]
        assert decision["worker"] == "w2"
        assert (decision["forgone_tokens"], decision["forgone_for"]) == (WHOLE, "load")
