"""The feed against a real publisher where it could be deceived: repairs under live events, cuts, ranks that share an
address, giant batches."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
import pytest

from gateway.keys import chain, namespace
from gateway.kv.feed_words import FeedLimits, FeedPhase
from gateway.kv.index import KvIndex
from gateway.records import Chain, EventSource, PrefixBlocks, Tier, TrustState
from gateway.upstream.kv_feed import TurnLimits
from tests.integration.publisher import SIZE, WORKER, engine, following, removed, resident, stored, until


def usable(index: KvIndex, *names: int) -> int:
    """Blocks of overlap for the prompt made of these blocks, each the child of the one before."""
    tokens = [token for name in names for token in (name, 1, 2, 3)]
    request = PrefixBlocks((Chain(chain(namespace(), tokens, SIZE), len(tokens)),), len(tokens), SIZE)
    return index.overlap(request, 1 << WORKER).blocks(WORKER)


async def test_live_events_count_while_a_repair_waits() -> None:
    """The replay answers nothing, so the repair takes long; later batches are usable at once, and what they remove is
    gone at once. When the answer comes at last, the content is the engine's."""
    with engine() as publisher:
        async with following(publisher.source(), limits=FeedLimits(reply_timeout_s=5.0)) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1), stored(2, 1), stored(9))
            await until(lambda: resident(index) == {1, 2, 9} and feed.caught_up)
            publisher.answering.clear()
            publisher.publish(removed(9), stored(3, 2), lose=True)
            publisher.publish(stored(5), stored(6, 5), removed(2))
            await until(lambda: usable(index, 5, 6) == 2)
            assert feed.phase is FeedPhase.REPAIRING
            assert feed.trust == "catching_up"
            assert usable(index, 1, 2) == 1
            publisher.publish(removed(3), stored(9), stored(2, 1))
            await until(lambda: usable(index, 1, 2) == 2)
            publisher.answering.set()
            await until(lambda: feed.caught_up)
            assert resident(index) == {1, 2, 5, 6, 9}
            assert feed.trust is TrustState.TRUSTED
            for name in (1, 2, 5, 6, 9):
                publisher.publish(removed(name))
            await until(lambda: index.resident(WORKER, Tier.GPU) == 0)
            assert feed.counters.purges == {}


async def test_a_clear_ends_the_repair() -> None:
    with engine() as publisher:
        async with following(publisher.source(), limits=FeedLimits(reply_timeout_s=30.0)) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1} and feed.caught_up)
            publisher.answering.clear()
            publisher.publish(stored(2), lose=True)
            publisher.publish(stored(3))
            publisher.publish(stored(4), {"type": "AllBlocksCleared"}, stored(5))
            await until(lambda: feed.caught_up and resident(index) == {5})
            assert feed.phase is FeedPhase.LIVE
            assert index.resident(WORKER, Tier.GPU) == 1
            publisher.answering.set()


@pytest.mark.parametrize("batches", [3, 10, 25])
async def test_a_restart_while_cut_off_is_found_whatever_the_numbers(batches: int) -> None:
    """Ten batches before the cut; fewer, as many or more after it, all published before the connection is back."""
    with engine() as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for name in range(1, 11):
                publisher.publish(stored(name))
            await until(lambda: len(resident(index)) == 10)
            new = set(range(101, 101 + batches))
            publisher.restart(*(stored(name) for name in sorted(new)))
            await until(lambda: resident(index) == new)
            assert (feed.counters.resets, feed.phase) == (1, FeedPhase.LIVE)
            assert index.resident(WORKER, Tier.GPU) == batches


async def test_a_cut_from_the_same_process_keeps_the_index() -> None:
    with engine() as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for name in range(1, 11):
                publisher.publish(stored(name))
            await until(lambda: len(resident(index)) == 10)
            publisher.cut()
            publisher.publish(stored(11), lose=True)
            publisher.publish(removed(1), lose=True)
            publisher.mend()
            await until(lambda: resident(index) == set(range(2, 12)) and feed.caught_up)
            assert feed.counters.purges == {}
            assert (feed.counters.resets, feed.counters.reconnects) == (0, 1)
            assert feed.trust is TrustState.TRUSTED


async def test_a_cut_without_replay_is_doubted_until_the_next_number() -> None:
    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            publisher.publish(stored(1))
            await until(lambda: resident(index) == {1})
            publisher.cut()
            publisher.mend()
            await until(lambda: feed.trust is TrustState.UNCERTAIN)
            await publisher.subscriber()
            publisher.publish(stored(2))
            await until(lambda: resident(index) == {1, 2})
            assert feed.trust is TrustState.TRUSTED


async def test_two_ranks_that_share_an_address_make_no_gaps() -> None:
    """Two publishers behind one relay: each counts for itself."""
    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for number in range(20):
                for rank in (0, 1):
                    event = stored(1 + 2 * number + rank)
                    payload = msgspec.msgpack.encode([time.time(), [event], rank])
                    publisher.send([b"kv@w@m", number.to_bytes(8, "big"), payload])
            await until(lambda: index.resident(WORKER, Tier.GPU) == 40)
            assert (feed.counters.gaps, feed.counters.resets) == (0, 0)
            assert feed.other_ranks == (1,)
            assert index.engine_hashes(WORKER, 1, Tier.GPU) == set(range(2, 42, 2))


async def test_another_rank_than_expected_is_just_a_name() -> None:
    """A server of its own for each rank tells the rank in the fleet, not 0."""
    with engine() as publisher:
        publisher.rank = 3
        publisher.publish(stored(1))
        async with following(publisher.source()) as (feed, index):
            await until(lambda: resident(index) == {1} and feed.caught_up)
            publisher.publish(stored(2))
            await until(lambda: resident(index) == {1, 2})
            assert feed.other_ranks == ()
            assert feed.totals.skipped == {}


async def test_a_publisher_that_counts_from_one_in_milliseconds() -> None:
    """The Mooncake master; it has no replay."""
    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for seq in (1, 2, 3):
                payload = msgspec.msgpack.encode([time.time_ns() // 1_000_000, [stored(seq)], 0])
                publisher.send([b"kv@", seq.to_bytes(8, "big"), payload])
            await until(lambda: resident(index) == {1, 2, 3})
            assert (feed.counters.gaps, feed.phase) == (0, FeedPhase.LIVE)


async def test_a_worker_that_computes_and_says_nothing_is_doubted() -> None:
    with engine() as publisher:
        async with following(publisher.source(), limits=FeedLimits(silent_s=0.05)) as (feed, _):
            await publisher.subscriber()
            publisher.publish(stored(1))
            await until(lambda: feed.trust is TrustState.TRUSTED and feed.counters.batches == 1)
            feed.served(3, time.monotonic())
            await until(lambda: feed.trust is TrustState.UNCERTAIN)
            assert feed.doubt == "silent"
            publisher.publish(stored(2))
            await until(lambda: feed.trust is TrustState.TRUSTED)


def giant(blocks: int, size: int) -> dict[str, Any]:
    return {**stored(1), "block_hashes": list(range(1, blocks + 1)), "token_ids": [7] * (blocks * size)}


async def test_one_giant_event_is_applied_in_parts() -> None:
    with engine() as publisher:
        turns = TurnLimits(turn_s=0.0, turn_blocks=100)
        async with following(publisher.source(), turns=turns) as (feed, index):
            await publisher.subscriber()
            publisher.publish(giant(10_000, SIZE))
            seen = set()
            async with asyncio.timeout(30):
                while len(resident(index)) < 10_000:
                    seen.add(len(resident(index)))
                    await asyncio.sleep(0)
            assert len(seen) > 50
            assert index.resident(WORKER, Tier.GPU) == 10_000
            assert index.stats().orphans == 0
            assert feed.totals.events == {"stored": 1}


async def test_a_batch_of_very_many_events_is_decoded_as_it_is_applied() -> None:
    with engine() as publisher:
        async with following(publisher.source(), turns=TurnLimits(turn_s=0.0, turn_blocks=100)) as (feed, index):
            await publisher.subscriber()
            publisher.publish(*(stored(name) for name in range(1, 5_001)), {"type": "BlockMoved"}, removed(1))
            seen = set()
            async with asyncio.timeout(30):
                while len(resident(index)) < 4_999 or not feed.caught_up:
                    seen.add(len(resident(index)))
                    await asyncio.sleep(0)
            assert len(seen) > 20
            assert feed.totals.events == {"stored": 5_000, "removed": 1}
            assert feed.totals.skipped == {"unknown_kind": 1}


async def test_nobody_at_the_address_is_blind_and_holds_nothing_up() -> None:
    source = EventSource(0, "tcp://127.0.0.1:1", "tcp://127.0.0.1:1")
    async with following(source, limits=FeedLimits(connect_timeout_s=0.05)) as (feed, _):
        await until(lambda: feed.caught_up)
        assert feed.trust is TrustState.BLIND


async def test_what_is_not_believed_counts_no_more_at_once_and_goes_in_turns() -> None:
    old, new = range(1, 3_001), range(3_001, 3_011)
    turns = TurnLimits(turn_s=0.001, turn_blocks=100)
    with engine() as publisher:
        async with following(publisher.source(), turns=turns) as (feed, index):
            await publisher.subscriber()
            for start in old[::100]:
                publisher.publish(*(stored(name) for name in range(start, start + 100)))
            await until(lambda: resident(index) == set(old) and feed.caught_up)
            since = time.monotonic()
            for name in new:
                publisher.publish(stored(name))
            await until(lambda: resident(index) == {*old, *new} and feed.caught_up)
            assert usable(index, 1) == 1
            feed.relearn(since)
            assert (usable(index, 1), usable(index, new[0])) == (0, 0)
            assert not feed.caught_up
            assert index.resident(WORKER, Tier.GPU) > 2_000, "the rest goes in turns"
            await until(lambda: resident(index) == set(new) and feed.caught_up)
            assert usable(index, new[0]) == 1


async def test_a_stray_rank_number_leaves_no_doubt() -> None:
    def batch(rank: int, number: int, name: int) -> list[bytes]:
        payload = msgspec.msgpack.encode([time.time(), [stored(name)], rank])
        return [b"kv@w@m", number.to_bytes(8, "big"), payload]

    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for rank, number in ((0, 0), (9, 1), (0, 1)):
                publisher.send(batch(rank, number, 10 * rank + number + 1))
            await until(lambda: index.resident(WORKER, Tier.GPU) == 3)
            assert (feed.other_ranks, feed.trust) == ((9,), TrustState.TRUSTED)
            publisher.send(batch(9, 5, 99))
            await until(lambda: feed.trust is TrustState.UNCERTAIN)


async def test_ranks_that_share_an_address_are_doubted_and_learned_anew_together() -> None:
    def batch(rank: int, number: int, name: int) -> list[bytes]:
        payload = msgspec.msgpack.encode([time.time(), [stored(name)], rank])
        return [b"kv@w@m", number.to_bytes(8, "big"), payload]

    with engine(layout="off") as publisher:
        async with following(publisher.source()) as (feed, index):
            await publisher.subscriber()
            for rank, name in ((0, 1), (1, 2)):
                publisher.send(batch(rank, 0, name))
            await until(lambda: index.resident(WORKER, Tier.GPU) == 2)
            assert feed.trust is TrustState.TRUSTED
            publisher.send(batch(1, 5, 3))
            await until(lambda: feed.trust is TrustState.UNCERTAIN)
            feed.resync()
            await until(lambda: index.resident(WORKER, Tier.GPU) == 0)
