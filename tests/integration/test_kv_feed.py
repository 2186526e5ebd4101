"""The feed against a real publisher: PUB and ROUTER sockets in both replay layouts, lost batches, restarts, floods."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress
from typing import Any

import msgspec
import pytest
import zmq

from gateway.keys import chain, namespace
from gateway.kv import ApproximateSettings
from gateway.kv.feed_words import FeedLimits, FeedPhase
from gateway.kv.index import KvIndex
from gateway.records import Chain, EventSource, PrefixBlocks, PrefixMode, Tier, TrustState, WorkerId
from gateway.upstream.kv_feed import KvFeed, TurnLimits
from tests.integration.publisher import (
    DEADLINE_S,
    SIZE,
    WORKER,
    engine,
    following,
    on_both_loops,
    removed,
    resident,
    stored,
    until,
)


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("layout", ["old", "new"])
def test_history_and_live_batches_arrive_once(layout: str, loop: str) -> None:
    async def scenario() -> None:
        with engine(layout=layout) as publisher:
            for name in range(1, 51):
                publisher.publish(stored(name, name - 1 or None))
            publisher.publish(removed(50))
            async with following(publisher.source()) as (feed, index):
                await until(lambda: feed.caught_up)
                assert resident(index) == set(range(1, 50))
                for name in range(51, 101):
                    publisher.publish(stored(name))
                await until(lambda: len(resident(index)) == 99)
                assert index.stats().orphans == 0
                assert feed.phase is FeedPhase.LIVE
                assert feed.counters.batches == 101
                assert feed.totals.stored == {Tier.GPU: 100}
                assert feed.totals.events == {"stored": 100, "removed": 1}
                assert feed.totals.repeated == 0

    on_both_loops(scenario, loop)


@pytest.mark.parametrize("layout", ["old", "new"])
async def test_lost_batches_are_replayed_without_double_references(layout: str) -> None:
    with engine(layout=layout) as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1), stored(2))
            await until(lambda: resident(index) == {1, 2})
            publisher.publish(removed(1), lose=True)
            publisher.publish(stored(3), lose=True)
            publisher.publish(stored(4))
            publisher.publish(stored(5))
            await until(lambda: resident(index) == {2, 3, 4, 5} and feed.caught_up)
            for name in (2, 3, 4, 5):
                publisher.publish(removed(name))
            await until(lambda: not resident(index))
            assert feed.counters.gaps == 1
            assert feed.counters.purges == {}
            assert index.resident(WORKER, Tier.GPU) == 0


async def test_a_clear_of_a_full_cache_leaves_turns_to_others() -> None:
    with engine() as publisher:
        async with following(publisher.source(), turns=TurnLimits(turn_s=0.0, turn_blocks=100)) as (feed, index):
            await publisher.subscriber()
            for start in range(1, 4001, 500):
                publisher.publish(*[stored(name) for name in range(start, start + 500)])
            await until(lambda: index.resident(WORKER, Tier.GPU) == 4000)
            seen: set[int] = set()
            publisher.publish(stored(5000), {"type": "AllBlocksCleared"}, stored(5001))
            async with asyncio.timeout(DEADLINE_S):
                while resident(index) != {5001}:
                    seen.add(index.resident(WORKER, Tier.GPU))
                    await asyncio.sleep(0)
            assert len(seen) > 20
            await until(lambda: feed.caught_up)
            assert feed.totals.events == {"stored": 4002, "cleared": 1}
            assert index.mark(WORKER).clears == 1


async def test_what_was_learned_of_a_worker_goes_in_turns_before_its_first_event() -> None:
    index = KvIndex(approximate=ApproximateSettings())
    index.bind(WORKER, block_size=SIZE)
    tokens = list(range(4000 * SIZE))
    learned = PrefixBlocks((Chain(chain(namespace(), tokens, SIZE), len(tokens)),), len(tokens), SIZE, PrefixMode.EXACT)
    assert index.remember(WORKER, learned, 0, time.monotonic()) is not None
    with engine() as publisher:
        turns = TurnLimits(turn_s=0.0, turn_blocks=100)
        async with following(publisher.source(), index=index, turns=turns) as (feed, _):
            await publisher.subscriber()
            seen: set[int] = set()
            publisher.publish(stored(5000))
            async with asyncio.timeout(DEADLINE_S):
                while not index.announces(WORKER):
                    seen.add(index.learned(WORKER))
                    await asyncio.sleep(0)
            assert len(seen) > 20
            await until(lambda: resident(index) == {5000} and feed.caught_up)
            assert index.learned(WORKER) == 0


async def test_whoever_believes_the_feed_is_told_at_once_when_it_changes() -> None:
    told = 0

    def count() -> None:
        nonlocal told
        told += 1

    with engine(layout="off") as publisher:
        async with following(publisher.source(), on_trust=count) as (feed, _):
            await publisher.subscriber()
            await until(lambda: feed.trust is TrustState.BLIND and told > 0)
            told = 0
            publisher.publish(stored(1))
            publisher.publish(stored(2))
            await until(lambda: feed.counters.batches == 2)
            assert (feed.trust, told) == (TrustState.TRUSTED, 1)
            publisher.publish(stored(3), lose=True)
            publisher.publish(stored(4))
            await until(lambda: feed.counters.batches == 3)
            assert (feed.trust, told) == (TrustState.UNCERTAIN, 2)


async def test_lost_batches_without_replay_purge_and_later_ones_count() -> None:
    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            assert feed.caught_up
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1})
            publisher.publish(removed(1), lose=True)
            publisher.publish(stored(2))
            await until(lambda: resident(index) == {2})
            assert feed.phase is FeedPhase.LOST
            assert (feed.counters.gaps, feed.counters.purges) == (1, {"gap": 1})


@pytest.mark.parametrize("layout", ["new", "off"])
async def test_a_restarted_engine_is_learned_anew(layout: str) -> None:
    with engine(layout=layout) as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for name in range(1, 11):
                publisher.publish(stored(name))
            await until(lambda: len(resident(index)) == 10)
            publisher.restart()
            await publisher.subscriber()
            publisher.publish(stored(21))
            publisher.publish(stored(22))
            await until(lambda: resident(index) == {21, 22})
            assert feed.counters.resets == 1
            assert feed.phase is FeedPhase.LIVE


async def test_a_replay_that_loses_its_tail_is_asked_for_again() -> None:
    with engine() as publisher:
        publisher.reply_limit = 4
        for name in range(1, 11):
            publisher.publish(stored(name))
        async with following(publisher.source(), limits=FeedLimits(reply_timeout_s=0.3)) as (feed, index):
            await until(lambda: feed.caught_up)
            assert resident(index) == set(range(1, 11))
            assert sorted(set(publisher.requests)) == [0, 4, 8]
            assert feed.phase is FeedPhase.LIVE


async def test_trimmed_history_is_a_partial_view() -> None:
    with engine() as publisher:
        for name in range(1, 11):
            publisher.publish(stored(name))
        del publisher.buffer[:6]
        async with following(publisher.source()) as (feed, index):
            await until(lambda: feed.caught_up)
            assert resident(index) == {7, 8, 9, 10}
            assert feed.phase is FeedPhase.LOST
            assert feed.counters.replays == {"history_gone": 1}


async def test_a_silent_replay_endpoint_does_not_hold_the_feed_up() -> None:
    with engine(layout="off") as publisher:
        source = publisher.source()
        silent = EventSource(0, source.endpoint, f"tcp://127.0.0.1:{publisher.port}", source.topic)
        async with following(silent, limits=FeedLimits(reply_timeout_s=0.02)) as (feed, index):
            await publisher.subscriber()
            await until(lambda: feed.caught_up)
            assert feed.phase is FeedPhase.LOST
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1})
            assert feed.counters.replays["timed_out"] == 1


async def test_broken_messages_are_counted_and_the_feed_goes_on() -> None:
    with engine() as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1})
            publisher.send([b"kv@", b"short", b""])
            publisher.send([b"kv@"])
            publisher.publish(raw=b"\xc1 no msgpack")
            publisher.publish(raw=msgspec.msgpack.encode({"type": "HeartbeatMsg"}))
            publisher.publish({"type": "BlockMoved"}, stored(2))
            await until(lambda: resident(index) == {2})
            assert feed.counters.errors == 3
            assert feed.counters.purges == {"undecodable": 1}
            assert feed.totals.skipped == {"foreign": 1, "unknown_kind": 1}


async def test_messages_of_other_topics_are_not_ours() -> None:
    with engine() as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            publisher.send([b"load", (7).to_bytes(8, "big"), msgspec.msgpack.encode(["LoadStat", 1])])
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1})
            assert (feed.counters.gaps, feed.counters.errors) == (0, 0)


async def test_resync_learns_the_rank_anew() -> None:
    with engine() as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1), stored(2))
            await until(lambda: resident(index) == {1, 2})
            index.purge(WORKER)
            feed.resync()
            await until(lambda: resident(index) == {1, 2} and feed.caught_up)
            assert feed.counters.purges == {"resync": 1}


async def test_a_flood_leaves_the_loop_to_others() -> None:
    batches, per_batch = 1_500, 20
    with engine() as publisher:
        for number in range(batches):
            publisher.publish(*(stored(1 + number * per_batch + offset) for offset in range(per_batch)))
        turns = TurnLimits(turn_s=0.001, turn_blocks=100)
        async with following(publisher.source(), turns=turns) as (feed, index):
            passes = 0
            while not feed.caught_up:
                await asyncio.sleep(0)
                passes += feed.counters.batches > 0
            assert len(resident(index)) == batches * per_batch
            # A turn takes 1 ms, 30,000 one-block events some 100 ms on any machine.
            assert passes >= 20


async def test_blocks_that_stand_for_many_keys_are_applied_a_few_at_a_time() -> None:
    keys, blocks = 512, 40
    event = stored(1) | {
        "block_hashes": list(range(1, blocks + 1)),
        "token_ids": list(range(blocks * keys * SIZE)),
        "block_size": keys * SIZE,
    }
    with engine() as publisher:
        publisher.publish(event)
        async with following(publisher.source(), turns=TurnLimits(turn_s=0.0, turn_blocks=100)) as (feed, index):
            seen = set()
            while not feed.caught_up:
                await asyncio.sleep(0)
                seen.add(index.resident(WORKER, Tier.GPU))
            assert index.resident(WORKER, Tier.GPU) == blocks * keys
            assert len(seen - {0}) >= 5


async def test_orphans_are_placed_to_the_last_when_their_head_comes() -> None:
    names = range(1, 7001)
    with engine() as publisher:
        for name in names:
            publisher.publish(stored(name, parent=9000))
        publisher.publish(stored(9000))
        async with following(publisher.source()) as (feed, index):
            await until(lambda: feed.caught_up)
            assert resident(index) == {*names, 9000}
            assert index.stats().orphans == 0


async def test_feeds_share_their_turns() -> None:
    index = KvIndex()
    index.bind(WORKER, block_size=SIZE)
    with engine() as publisher:
        for name in range(1, 301):
            publisher.publish(stored(name))
        source = publisher.source()
        second = EventSource(1, source.endpoint, source.replay_endpoint, source.topic)
        async with following(source, index=index) as (one, _), following(second, index=index) as (two, _):
            await until(lambda: one.caught_up and two.caught_up)
            for rank in (0, 1):
                assert len(index.engine_hashes(WORKER, rank, Tier.GPU)) == 300
            assert index.resident(WORKER, Tier.GPU) == 300


@pytest.mark.parametrize("after_s", [0.0, 0.005, 0.05])
async def test_cancelling_at_any_time_closes_the_sockets(after_s: float) -> None:
    with engine() as publisher:
        publisher.reply_limit = 0
        async with following(publisher.source()):
            await asyncio.sleep(after_s)


async def test_it_may_run_again() -> None:
    with engine() as publisher:
        publisher.publish(stored(1))
        context: zmq.Context[Any] = zmq.Context()
        index = KvIndex()
        index.bind(WORKER, block_size=SIZE)
        feed = KvFeed(
            WorkerId("w"),
            WORKER,
            publisher.source(),
            index=index,
            context=context,
            clock=time.monotonic,
            turns=asyncio.Lock(),
        )
        for _ in range(2):
            task = asyncio.create_task(feed.run())
            await until(lambda: resident(index) == {1} and feed.caught_up)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        await asyncio.to_thread(context.term)


async def test_a_malformed_endpoint_is_raised() -> None:
    with pytest.raises(zmq.ZMQError):
        async with following(EventSource(0, "nonsense://x")) as (feed, _):
            await feed.run()
