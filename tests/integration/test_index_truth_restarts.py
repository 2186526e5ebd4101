"""The index after engines restarted, lost batches or emptied their cache."""

from __future__ import annotations

import asyncio

import pytest

from gateway.kv.feed_words import FeedPhase
from gateway.kv.index import KvIndex
from gateway.records import Slot, Tier, WorkerId
from gateway.sim.faults import Fault, FaultKind
from gateway.sim.publisher import Replay
from gateway.sim.releases import Dialect
from tests.following import Follower
from tests.integration.rig import Rig, fast, rig, until
from tests.integration.truth import (
    BLOCK,
    DIALECTS,
    ask,
    believed,
    in_step,
    metric,
    predicted,
    prompt,
    resident,
    slot,
    stored,
    told,
    warm,
)

P = prompt(1, 40)
WHOLE = 40 * BLOCK

REPLAYS = pytest.mark.parametrize("replay", list(Replay))


async def both_hold(r: Rig) -> None:
    """w1 and w2 hold the prompt, and the index knows. Start times are taken to be good to a second, so the engines get
    older than that before anything happens to them."""
    for engine in r.engines[:2]:
        await warm(r, engine, P)
    await in_step(r)
    await asyncio.sleep(1.2)
    assert await predicted(r, P) == {"w1": WHOLE, "w2": WHOLE}


# ---------------------------------------------------------------- restarts


@REPLAYS
@DIALECTS
async def test_a_restart_in_place_sends_the_first_request_to_the_other_holder(dialect: Dialect, replay: Replay) -> None:
    async with rig(2, engine=fast(dialect=dialect, replay=replay)) as r:
        await both_hold(r)
        r.engine("w1").fault(Fault(FaultKind.RESTART))
        if replay is Replay.OFF:  # what is published before the connection is back could never be known
            (feed,) = r.gateway.membership.members[WorkerId("w1")].feeds
            await until(lambda: feed.counters.reconnects == 1)
        await warm(r, r.engine("w1"), prompt(2, 9))
        await until(lambda: resident(r, "w1") == 9)
        assert await ask(r, P) == ("w2", WHOLE, WHOLE)
        assert await metric(r, "kvgate_index_blocks", worker="w1", tier="gpu") == 9
        assert await metric(r, "kvgate_kv_event_resets_total", worker="w1") == 1
        assert await metric(r, "kvgate_kv_event_resets_total", worker="w2") == 0


@pytest.mark.parametrize("batches", ["fewer", "more"])
@DIALECTS
async def test_a_restart_while_cut_off(dialect: Dialect, batches: str) -> None:
    """The event sockets are closed meanwhile; the new process has published fewer or more batches than the old one."""
    async with rig(2, engine=fast(dialect=dialect)) as r:
        await both_hold(r)
        w1 = r.engine("w1")
        w1.fault(Fault(FaultKind.OFFLINE))
        w1.fault(Fault(FaultKind.RESTART))
        prompts = [prompt(100 + n, 5) for n in range(2 if batches == "fewer" else 12)]
        for tokens in prompts:
            await warm(r, w1, tokens)
        w1.fault(Fault(FaultKind.ONLINE))
        await until(lambda: resident(r, "w1") == 5 * len(prompts))
        assert await ask(r, P) == ("w2", WHOLE, WHOLE)
        for tokens in prompts:
            assert (await predicted(r, tokens))["w1"] == 5 * BLOCK
        assert await metric(r, "kvgate_kv_event_resets_total", worker="w1") == 1


@pytest.mark.parametrize("layout", ["new", "old", "off"])
async def test_a_restart_that_only_the_events_tell_of(layout: str) -> None:
    """The process does not say when it started, and its batches have passed the numbers of the old one at once."""
    async with told(layout=layout) as (r, (events,)):
        old = set(range(1, 6))
        for name in sorted(old):
            events.publish(stored([name], prompt(name, 1)))
        await until(lambda: resident(r, "w1") == 5)
        events.restart()
        new = set(range(101, 109))
        for name in sorted(new):
            events.publish(stored([name], prompt(name, 1)))
        await events.subscriber()
        events.publish(stored([109], prompt(109, 1)))
        index = r.gateway.index
        await until(lambda: 109 in index.engine_hashes(slot(r, "w1"), 0, Tier.GPU))
        await until(lambda: not old & index.engine_hashes(slot(r, "w1"), 0, Tier.GPU))
        if layout != "off":
            await until(lambda: index.engine_hashes(slot(r, "w1"), 0, Tier.GPU) == new | {109})
        await believed(r, prompt(1, 1), {"w1": 0})


# ---------------------------------------------------------------- lost batches


SMALL = 120 * BLOCK
"""A cache of 120 blocks: four prompts of 40 blocks are one too many."""


async def lose_five(r: Rig, *, for_good: bool = False) -> list[list[int]]:
    """Fill the cache, lose five batches with removals among them, and go on; returns all prompts."""
    (engine,) = r.engines
    prompts = [prompt(n, 40) for n in range(1, 4)]
    for tokens in prompts:
        await warm(r, engine, tokens)
    await in_step(r)
    evicted = engine.state()["evicted_blocks"]
    sequence = engine.state()["event_sequence"]
    engine.fault(Fault(FaultKind.DROP, count=5, for_good=for_good))
    number = 10
    while int(str(engine.state()["event_sequence"])) < int(str(sequence)) + 5:
        prompts.append(prompt(number, 20))
        await warm(r, engine, prompts[-1])
        number += 1
    assert int(str(engine.state()["evicted_blocks"])) > int(str(evicted))
    return prompts


@pytest.mark.parametrize("replay", [Replay.OLD, Replay.NEW])
@DIALECTS
async def test_lost_batches_are_repaired_by_replay(dialect: Dialect, replay: Replay) -> None:
    async with rig(1, engine=fast(dialect=dialect, replay=replay, kv_tokens=SMALL)) as r:
        prompts = await lose_five(r)
        prompts.append(prompt(50, 10))
        await warm(r, r.engines[0], prompts[-1])
        await in_step(r)
        for tokens in prompts:
            answer = await ask(r, tokens)
            assert answer.predicted == answer.delivered
            await in_step(r)
        assert await metric(r, "kvgate_kv_event_gaps_total") >= 1
        assert await metric(r, "kvgate_kv_event_replays_total", result="complete") >= 2
        # No block is counted twice: the engine removes what it holds, and nothing is left.
        r.engines[0].fault(Fault(FaultKind.EVICT))
        await until(lambda: resident(r, "w1") == 0)
        assert r.engines[0].state()["resident_blocks"] == 0


@pytest.mark.parametrize("replay", ["off", "trimmed", "gone"])
@DIALECTS
async def test_lost_batches_without_replay_leave_no_stale_credit(dialect: Dialect, replay: str) -> None:
    layout = Replay.OFF if replay == "off" else Replay.NEW
    kept = 1 if replay == "trimmed" else 10_000
    async with rig(1, engine=fast(dialect=dialect, replay=layout, buffer_steps=kept, kv_tokens=SMALL)) as r:
        (engine,) = r.engines
        old = await lose_five(r, for_good=replay == "gone")
        fresh = prompt(50, 10)
        await warm(r, engine, fresh)
        await believed(r, fresh, {"w1": 10 * BLOCK})
        (feed,) = r.gateway.membership.members[WorkerId("w1")].feeds
        # What is announced meanwhile counts at once; that the replay does not repair the gap is known a moment later.
        await until(lambda: feed.phase is FeedPhase.LOST)
        (row,) = (await r.admin("/admin/workers"))["workers"]
        assert row["feed"]["phases"] == {"0": "lost"}
        for tokens in old[:3]:
            assert await predicted(r, tokens) == {"w1": 0}
        later = prompt(51, 10)
        await warm(r, engine, later)
        await believed(r, later, {"w1": 10 * BLOCK})
        assert await ask(r, later) == ("w1", 10 * BLOCK, 10 * BLOCK)


def test_a_replay_endpoint_that_never_answers_is_asked_six_times_a_minute_at_most() -> None:
    index = KvIndex()
    index.bind(Slot(0), block_size=BLOCK)
    follower = Follower(index, Slot(0), can_replay=True)
    payload = b"\x93\xcb" + bytes(8) + b"\x90\x00"  # no events, time 0
    asked_at: list[float] = []
    follower.connect(0.0)
    for tenth in range(1, 6000):
        now = tenth / 10
        if tenth % 10 == 0:
            follower.live(tenth // 5, payload, now)  # every second number is missing
        follower.tick(now)
        asked_at += [now] * (len(follower.asks) - len(asked_at))
    assert len(asked_at) > 6
    for first in asked_at:
        assert sum(first <= at < first + 60 for at in asked_at) <= 6


@DIALECTS
async def test_two_ranks_never_give_a_false_gap(dialect: Dialect) -> None:
    async with rig(1, engine=fast(dialect=dialect, data_parallel_size=2)) as r:
        for number in range(20):
            await ask(r, prompt(number, 4))
        feeds = [feed for member in r.gateway.membership.members.values() for feed in member.feeds]
        assert len(feeds) == 2
        await until(lambda: sum(feed.totals.events["stored"] for feed in feeds) >= 20)
        assert all(feed.counters.batches for feed in feeds)
        assert await metric(r, "kvgate_kv_event_gaps_total") == 0
        assert await metric(r, "kvgate_kv_event_resets_total") == 0


# ---------------------------------------------------------------- emptied caches


@DIALECTS
async def test_a_clear_that_is_told(dialect: Dialect) -> None:
    async with rig(2, engine=fast(dialect=dialect)) as r:
        await both_hold(r)
        r.engine("w1").fault(Fault(FaultKind.CLEAR))
        await until(lambda: resident(r, "w1") == 0)
        assert await ask(r, P) == ("w2", WHOLE, WHOLE)


async def test_a_restart_that_shows_in_the_uptime_only() -> None:
    """No event can tell: the sockets stay closed. SGLang does not say when its process started."""
    async with rig(2) as r:
        await both_hold(r)
        r.engine("w1").fault(Fault(FaultKind.OFFLINE))
        r.engine("w1").fault(Fault(FaultKind.RESTART))
        await until(lambda: resident(r, "w1") == 0)
        assert await ask(r, P) == ("w2", WHOLE, WHOLE)


@pytest.mark.parametrize("holders", [1, 2])
@DIALECTS
async def test_a_cache_emptied_without_a_sign(dialect: Dialect, holders: int) -> None:
    """Two requests go wrong at most; both are counted with their cause, and hits bring the trust back."""
    prompts = [prompt(n, 20) for n in range(12)]
    async with rig(2, engine=fast(dialect=dialect)) as r:
        for tokens in prompts:
            for engine in r.engines[:holders]:
                await warm(r, engine, tokens)
        await in_step(r)
        w1 = r.engine("w1")
        w1.fault(Fault(FaultKind.CLEAR, silent=True))
        wrong = 0
        for tokens in prompts:
            answer = await ask(r, tokens)
            wrong += answer.delivered < answer.predicted
        assert wrong <= 2
        assert await metric(r, "kvgate_route_misses_total", worker="w1", cause="stale_index") == wrong
        assert await metric(r, "kvgate_route_misses_total") == wrong
        # What it announces from now on is true again.
        number = 100
        while await metric(r, "kvgate_worker_trust", worker="w1") < 1:
            assert number < 130
            await warm(r, w1, prompt(number, 20))
            await believed(r, prompt(number, 20), {"w1": 20 * BLOCK, "w2": 0})
            assert await ask(r, prompt(number, 20)) == ("w1", 20 * BLOCK, 20 * BLOCK)
            number += 1
