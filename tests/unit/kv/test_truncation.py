"""The cap on the index's memory, and purges in steps."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from msgspec.structs import replace

from gateway.keys import chain, namespace
from gateway.kv.approximate import LEARNED_BYTES, ApproximateSettings
from gateway.kv.events import Cleared, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.kv.truncation import BYTES_A_BLOCK
from gateway.records import Chain, EngineHash, PrefixBlocks, Slot, Tier

SIZE = 4
A, B, C = Slot(0), Slot(1), Slot(2)
ALL = 0b111


class Prompts:
    """Prompts of many blocks, announced under names of their own."""

    def __init__(self) -> None:
        self._names = iter(range(1, 1_000_000_000))
        self._rng = random.Random(1)

    def make(self, blocks: int) -> tuple[Stored, PrefixBlocks]:
        tokens = [self._rng.randrange(1 << 17) for _ in range(blocks * SIZE)]
        event = Stored([EngineHash(next(self._names)) for _ in range(blocks)], None, tokens, SIZE)
        ids = [*tokens, 1]
        return event, PrefixBlocks((Chain(chain(namespace(), ids, SIZE), len(ids)),), len(ids), SIZE)


@pytest.fixture
def prompts() -> Prompts:
    return Prompts()


def capped(blocks: int) -> KvIndex:
    index = KvIndex(max_bytes=blocks * BYTES_A_BLOCK)
    for slot in (A, B, C):
        index.bind(slot, block_size=SIZE)
    return index


def total(index: KvIndex) -> int:
    return sum(index.resident(slot, Tier.GPU) for slot in (A, B, C))


def test_the_cap_is_held_and_what_is_kept_is_right(prompts: Prompts) -> None:
    index = capped(10_000)
    sent = []
    for _ in range(600):
        event, blocks = prompts.make(50)
        index.apply(A, 0, [event])
        sent.append(blocks)
        assert total(index) <= 10_000
    stats = index.stats()
    assert stats.truncated == 600 * 50 - total(index)
    assert total(index) > 9_000
    runs = [index.overlap(blocks, ALL).blocks(A) for blocks in sent]
    # What is left of a chain is its beginning, but for the one chain that the slice ended in.
    assert total(index) - 50 < sum(runs) <= total(index)
    assert runs[-1] == 50
    assert runs[0] == 0


def test_prefixes_that_requests_ask_for_are_spared(prompts: Prompts) -> None:
    index = capped(10_000)
    hot_event, hot = prompts.make(200)
    cold_event, cold = prompts.make(200)
    index.apply(A, 0, [hot_event, cold_event])
    for _ in range(600):
        event, _ = prompts.make(50)
        index.apply(A, 0, [event])
        index.retract(index.speculate(A, hot, index.overlap(hot, ALL)))
    assert index.overlap(hot, ALL).blocks(A) == 200
    assert index.overlap(cold, ALL).blocks(A) == 0


def test_the_fullest_worker_gives_way(prompts: Prompts) -> None:
    index = capped(3_000)
    for _ in range(10):
        index.apply(B, 0, [prompts.make(90)[0]])
    for _ in range(100):
        index.apply(A, 0, [prompts.make(90)[0]])
    assert index.resident(B, Tier.GPU) == 900
    assert 2_000 <= index.resident(A, Tier.GPU) <= 2_100


def test_everything_asked_for_still_fits_the_cap(prompts: Prompts) -> None:
    index = capped(2_000)
    for _ in range(100):
        event, blocks = prompts.make(90)
        index.apply(A, 0, [event])
        index.retract(index.speculate(A, blocks, index.overlap(blocks, ALL)))
        assert total(index) <= 2_000


def test_what_waits_for_its_parent_goes_first(prompts: Prompts) -> None:
    index = capped(2_000)
    for number in range(1_500):
        index.apply(A, 0, [Stored([EngineHash(10**9 + number)], EngineHash(5 * 10**9 + number), [1, 2, 3, 4], SIZE)])
    assert index.stats().orphans <= 1_000
    for _ in range(19):
        index.apply(A, 0, [prompts.make(100)[0]])
    assert index.resident(A, Tier.GPU) == 1_900
    assert index.stats().orphans <= 50


def test_removals_and_stores_after_truncation_keep_the_tables_right(prompts: Prompts) -> None:
    index = capped(1_000)
    events = [prompts.make(100) for _ in range(30)]
    for event, _ in events:
        index.apply(A, 0, [event])
    for event, _ in events:
        index.apply(A, 0, [Removed(event.hashes)])
    assert (total(index), index.stats().keys) == (0, 0)
    event, blocks = events[0]
    index.apply(A, 0, [event, Cleared(), event])
    assert index.overlap(blocks, ALL).blocks(A) == 100


def test_copies_go_with_their_block(prompts: Prompts) -> None:
    index = capped(500)
    event, blocks = prompts.make(100)
    index.apply(A, 0, [event, event])
    for _ in range(10):
        index.apply(A, 0, [prompts.make(100)[0]])
    assert index.overlap(blocks, ALL).blocks(A) == 0
    index.apply(A, 0, [event, Removed(event.hashes)])
    assert index.overlap(blocks, ALL).blocks(A) == 0


def test_the_cap_in_bytes_is_not_exceeded(prompts: Prompts) -> None:
    cap = 8 * 1024 * 1024
    tracemalloc.start()
    try:
        index = KvIndex(max_bytes=cap)
        index.bind(A, block_size=SIZE)
        before = tracemalloc.get_traced_memory()[0]
        most = 0
        for _ in range(1_200):
            index.apply(A, 0, [prompts.make(64)[0]])
            most = max(most, tracemalloc.get_traced_memory()[0] - before)
    finally:
        tracemalloc.stop()
    assert index.stats().truncated > 0
    assert most < 1.1 * cap


# ---------------------------------------------------------------- purges in steps


def test_a_purge_in_steps_hides_the_worker_until_it_is_done(prompts: Prompts) -> None:
    index = capped(10_000)
    event, blocks = prompts.make(100)
    for slot in (A, B):
        index.apply(slot, 0, [event])
    steps = index.purging(A, most=30)
    assert next(steps) == 30
    assert [index.overlap(blocks, ALL).blocks(slot) for slot in (A, B)] == [0, 100]
    assert list(steps) == [30, 30, 10]
    index.apply(A, 0, [event])
    assert [index.overlap(blocks, ALL).blocks(slot) for slot in (A, B)] == [100, 100]


def test_a_purge_that_is_given_up_ends_at_once(prompts: Prompts) -> None:
    index = capped(10_000)
    event, blocks = prompts.make(100)
    index.apply(A, 0, [event])
    steps = index.purging(A, most=10)
    next(steps)
    steps.close()
    assert index.resident(A, Tier.GPU) == 0
    index.apply(A, 0, [event])
    assert index.overlap(blocks, ALL).blocks(A) == 100


def test_a_worker_that_leaves_during_its_purge_hides_nobody_else(prompts: Prompts) -> None:
    index = capped(10_000)
    event, blocks = prompts.make(100)
    index.apply(A, 0, [event])
    steps = index.purging(A, most=10)
    next(steps)
    index.release(A)
    index.bind(A, block_size=SIZE)
    index.apply(A, 0, [event])
    assert list(steps) == []
    assert index.overlap(blocks, ALL).blocks(A) == 100


def test_a_purge_touches_its_rank_only_and_is_marked(prompts: Prompts) -> None:
    index = capped(10_000)
    (first, blocks), (second, others) = prompts.make(10), prompts.make(10)
    index.apply(A, 0, [first])
    index.apply(A, 1, [second])
    mark = index.mark(A)
    assert sum(index.purging(A, 0, most=3, cleared=True)) == 10
    assert (index.mark(A).epoch, index.mark(A).clears) == (mark.epoch, mark.clears + 1)
    assert [index.overlap(asked, ALL).blocks(A) for asked in (blocks, others)] == [0, 10]
    assert sum(index.purging(A, most=3)) == 10
    assert index.mark(A).epoch != mark.epoch


def test_a_preview_ends_in_steps(prompts: Prompts) -> None:
    index = capped(10_000)
    (first, blocks), (second, others) = prompts.make(100), prompts.make(100)
    index.apply(A, 0, [first])
    index.preview(A, 0, [Removed(first.hashes), second])
    assert [index.overlap(asked, ALL).blocks(A) for asked in (blocks, others)] == [0, 100]
    steps = index.ending_preview(A, 0, most=30)
    assert list(steps) == [0, 0, 0, 0, 30, 30, 30, 10]  # what was hidden comes back first
    assert [index.overlap(asked, ALL).blocks(A) for asked in (blocks, others)] == [100, 0]
    index.preview(A, 0, [second])
    steps = index.ending_preview(A, 0, most=10)
    next(steps)
    index.release(A)
    assert (list(steps), index.stats().keys) == ([], 0)


def test_a_purge_takes_previews_in_steps_too(prompts: Prompts) -> None:
    index = capped(10_000)
    (first, blocks), (second, others) = prompts.make(50), prompts.make(50)
    for close in (False, True):
        index.apply(A, 0, [first])
        index.preview(A, 0, [Removed(first.hashes[:20]), second])
        steps = index.purging(A, most=30)
        next(steps)
        assert [index.overlap(asked, ALL).blocks(A) for asked in (blocks, others)] == [0, 0]
        if close:
            steps.close()
        else:
            assert list(steps) == [30, 20, 30, 20]
        assert (total(index), index.stats().keys) == (0, 0)


def test_what_was_learned_is_forgotten_in_steps_and_nothing_is_learned_meanwhile(prompts: Prompts) -> None:
    index = KvIndex(approximate=ApproximateSettings())
    index.bind(A, block_size=SIZE)
    (_, blocks), (_, others) = prompts.make(100), prompts.make(10)
    index.remember(A, blocks, 0, 1.0)
    steps = index.forgetting(A, most=30)
    assert next(steps) == 30
    assert index.overlap(blocks, ALL).blocks(A) == 0
    assert index.remember(A, others, 0, 1.0) is None
    assert list(steps) == [30, 30, 10]
    assert (index.learned(A), index.stats().keys) == (0, 0)
    assert index.remember(A, others, 0, 1.0) is not None
    assert index.overlap(others, ALL).blocks(A) == 10


# ---------------------------------------------------------------- learned beside announced


def test_what_was_promised_and_then_learned_is_learned(prompts: Prompts) -> None:
    index = KvIndex(approximate=ApproximateSettings())
    index.bind(A, block_size=SIZE)
    _, blocks = prompts.make(10)
    speculation = index.speculate(A, blocks)
    assert index.remember(A, blocks, 0, 1.0) is not None
    index.retract(speculation)
    assert index.overlap(blocks, ALL).blocks(A) == 10
    assert index.forget(A) == 10
    assert index.overlap(blocks, ALL).blocks(A) == 0
    assert index.stats().speculative == 0
    assert index.stats().speculative == 0


def test_removals_of_what_was_let_go_are_no_unknown_ones(prompts: Prompts) -> None:
    """A feed that hears of many unknown blocks is learned anew: at the cap that would never end."""
    index = capped(1_000)
    names: list[EngineHash] = []
    for _ in range(60):
        event, _ = prompts.make(50)
        index.apply(A, 0, [event, event])  # vLLM: two copies, each removed
        names += event.hashes
    assert total(index) <= 1_000
    applied = index.apply(A, 0, [Removed(names, Tier.GPU), Removed(names, Tier.GPU)])
    let_go = index.stats().truncated
    assert applied.ignored == {"let_go": 2 * let_go}
    assert index.apply(A, 0, [Removed([EngineHash(7)], Tier.GPU)]).ignored == {"unknown_removal": 1}
    index.apply(A, 0, [event])
    index.purge(A)
    assert index.apply(A, 0, [Removed(names, Tier.GPU)]).ignored == {"unknown_removal": 3_000}, "of another process"


def test_removals_of_orphans_that_had_to_go_are_no_unknown_ones(prompts: Prompts) -> None:
    index = KvIndex(orphan_limit=10)
    index.bind(A, block_size=SIZE)
    event, _ = prompts.make(25)
    index.apply(A, 0, [Stored(event.hashes, EngineHash(1 << 40), event.tokens, SIZE)])
    assert index.apply(A, 0, [Removed(event.hashes, Tier.GPU)]).ignored == {"let_go": 15}


def test_what_has_ended_by_itself_takes_no_room_from_others(prompts: Prompts) -> None:
    """The worker that held it need not say anything more."""
    index = capped(10_000)
    for _ in range(60):
        event, _ = prompts.make(100)
        index.apply(A, 0, [replace(event, tier=Tier.CPU, keyed=True, fleeting=True)])
    assert index.resident(A, Tier.CPU) == 6000
    for now in (1e6, 1e6 + 1, 1e6 + 2):
        index.expire(now)
    assert index.resident(A, Tier.CPU) == 0
    for _ in range(60):
        index.apply(B, 0, [prompts.make(100)[0]])
    assert (index.resident(B, Tier.GPU), index.stats().truncated) == (6000, 0)


def test_what_is_learned_leaves_half_of_the_room_to_what_is_announced(prompts: Prompts) -> None:
    """A learned block takes less than an announced one, and is reckoned so."""
    room = 20_000 * BYTES_A_BLOCK
    learned = ApproximateSettings(ttl_s=1e9, default_tokens=1 << 40, limit=room // 2 // LEARNED_BYTES)
    index = KvIndex(max_bytes=room, approximate=learned)
    for slot in (A, B):
        index.bind(slot, block_size=SIZE)
    for _ in range(200):
        index.remember(B, prompts.make(100)[1], 0, 1.0)
    assert index.learned(B) > 0.95 * learned.limit
    for _ in range(99):
        index.apply(A, 0, [prompts.make(100)[0]])
    assert (index.resident(A, Tier.GPU), index.stats().truncated) == (9_900, 0)
