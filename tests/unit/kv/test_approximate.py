"""Blocks learned from routing: when, for whom, how long."""

from __future__ import annotations

import pytest

from gateway import keys
from gateway.kv import ApproximateSettings, KvIndex
from gateway.kv.events import Cleared, Removed, Stored
from gateway.records import Chain, EngineHash, PrefixBlocks, PrefixMode, Slot, Tier

SIZE = 16
A, B = Slot(0), Slot(1)
BOTH = 0b11


def index(**settings: float) -> KvIndex:
    made = KvIndex(approximate=ApproximateSettings(**settings))  # type: ignore[arg-type]
    made.bind(A, block_size=SIZE)
    made.bind(B, block_size=SIZE)
    return made


def prompt(blocks: int, *, seed: int = 0, mode: PrefixMode = PrefixMode.EXACT) -> PrefixBlocks:
    """One prompt of whole blocks and one token more, so that all of them can be used."""
    tokens = [seed, *range(blocks * SIZE)]
    chain = keys.chain(keys.namespace(), tokens, SIZE)
    return PrefixBlocks((Chain(chain, len(tokens)),), len(tokens), SIZE, mode)


def joined(head: int, *, seed: int, mode: PrefixMode = PrefixMode.EXACT) -> PrefixBlocks:
    """`head` blocks that all such prompts share, then ten of its own."""
    tokens = [*range(head * SIZE), seed, *range(10 * SIZE)]
    return PrefixBlocks((Chain(keys.chain(keys.namespace(), tokens, SIZE), len(tokens)),), len(tokens), SIZE, mode)


def held(made: KvIndex, blocks: PrefixBlocks) -> list[int]:
    return [tokens // SIZE for tokens in made.overlap(blocks, BOTH).tokens_of([A, B])]


def announce(made: KvIndex, slot: Slot, blocks: int, *, seed: int = 0) -> None:
    tokens = [seed, *range(blocks * SIZE)][: blocks * SIZE]
    hashes = [EngineHash(int(key)) for key in keys.chain(keys.namespace(), tokens, SIZE)]
    made.apply(slot, 0, [Stored(hashes, None, tokens, SIZE)])


def test_a_prefilled_prompt_counts_as_held_by_its_worker_alone() -> None:
    made = index()
    assert made.remember(A, prompt(20), 0, 1.0) is not None
    assert held(made, prompt(20)) == [20, 0]
    assert held(made, prompt(30)) == [20, 0]
    assert held(made, prompt(20, seed=1)) == [0, 0]
    assert (made.learned(A), made.learned(B), made.gpu_tokens([A, B])) == (20, 0, [20 * SIZE, 0])


def test_nothing_is_learned_without_settings() -> None:
    made = KvIndex()
    made.bind(A, block_size=SIZE)
    assert made.remember(A, prompt(20), 0, 1.0) is None
    assert made.stats().approximate.blocks == 0


def test_events_win_over_what_was_learned() -> None:
    made = index()
    made.remember(A, prompt(20), 0, 1.0)
    made.remember(B, prompt(20), 0, 1.0)
    announce(made, A, 8)
    assert made.announces(A)
    assert not made.announces(B)
    assert held(made, prompt(20)) == [8, 20]
    assert made.remember(A, prompt(20), 0, 2.0) is None
    made.apply(A, 0, [Cleared()])
    assert held(made, prompt(20)) == [0, 20]


def test_text_is_learned_beside_events() -> None:
    """No event can carry a key of text."""
    made = index()
    announce(made, A, 8)
    text = prompt(20, mode=PrefixMode.APPROXIMATE, seed=5)
    made.remember(A, text, 0, 1.0)
    assert held(made, text) == [20, 0]
    assert held(made, prompt(20)) == [8, 0]
    made.apply(A, 0, [Cleared()])
    assert held(made, text) == [20, 0]


def test_the_first_event_leaves_text_alone() -> None:
    made = index()
    text = prompt(20, mode=PrefixMode.APPROXIMATE, seed=5)
    made.remember(A, text, 0, 1.0)
    made.remember(A, prompt(20), 0, 1.0)
    announce(made, A, 3)
    assert held(made, text) == [20, 0]
    assert held(made, prompt(20)) == [3, 0]


def test_text_that_stands_for_told_tokens_goes_with_the_first_event() -> None:
    """Else it would hide what the events say was evicted."""
    made = index()
    text = prompt(20, mode=PrefixMode.APPROXIMATE, seed=5)
    told = PrefixBlocks(prompt(8).chains, text.tokens, SIZE, PrefixMode.ENGINE, text=text)
    made.remember(A, told, 0, 1.0)
    assert held(made, text) == [20, 0]
    announce(made, A, 8)
    assert (held(made, text), held(made, told)) == ([0, 0], [8, 0])
    assert made.remember(A, told, 0, 2.0) is None


def test_what_was_learned_goes_in_steps_before_a_workers_first_event() -> None:
    made = index()
    made.remember(A, prompt(20), 0, 1.0)
    made.remember(B, prompt(20), 0, 1.0)
    steps = made.hearing(A, most=8)
    assert next(steps) == 8
    assert (made.learned(A), made.announces(A)) == (12, False)
    assert held(made, prompt(20)) == [0, 20], "a part of it would be no prefix"
    assert made.remember(A, prompt(20), 0, 2.0) is None
    assert list(steps) == [8, 4]
    assert (made.learned(A), made.announces(A)) == (0, True)
    announce(made, A, 8)
    assert held(made, prompt(20)) == [8, 20]
    assert list(made.hearing(A, most=8)) == []


def test_events_that_come_before_the_last_step_do_the_rest_at_once() -> None:
    made = index()
    made.remember(A, prompt(20), 0, 1.0)
    steps = made.hearing(A, most=8)
    next(steps)
    announce(made, A, 8)
    assert (made.learned(A), held(made, prompt(20))) == (0, [0, 0])
    assert list(steps) == []
    assert held(made, prompt(20)) == [8, 0]
    assert made.stats().keys == 8


def test_a_worker_holds_no_more_than_its_cache_and_ends_of_chains_go_first() -> None:
    made = index()
    capacity = 50 * SIZE
    for seed in range(3):
        made.remember(A, joined(20, seed=seed), capacity, float(seed))
    assert made.learned(A) == 50
    made.remember(A, joined(20, seed=3), capacity, 4.0)
    made.expire(4.0)
    assert made.learned(A) == 50
    # The shared head is as young as its youngest user; what went is the end of the oldest chain.
    assert held(made, joined(20, seed=3)) == [30, 0]
    assert held(made, joined(20, seed=0)) == [20, 0]
    assert held(made, joined(20, seed=1)) == [30, 0]
    assert made.stats().approximate.dropped == {"size": 10, "age": 0, "evicted": 0}


def test_a_prompt_larger_than_the_cache_keeps_its_beginning() -> None:
    made = index()
    made.remember(A, prompt(100), 40 * SIZE, 1.0)
    assert held(made, prompt(100)) == [40, 0]


def test_an_unknown_cache_has_the_default_size() -> None:
    made = index(default_tokens=10 * SIZE)
    made.remember(A, prompt(30), 0, 1.0)
    assert made.learned(A) == 10


def test_a_blocks_tokens_count_towards_the_cache() -> None:
    made = index()
    small = prompt(20)
    large = PrefixBlocks(prompt(10, seed=9).chains, 640, 4 * SIZE, PrefixMode.APPROXIMATE)
    made.remember(A, large, 50 * SIZE, 1.0)
    assert made.gpu_tokens([A]) == [40 * SIZE]
    made.remember(A, small, 50 * SIZE, 2.0)
    # 40 blocks of the worker's own for the text, 20 for the tokens: ten too many, so three of the text go.
    assert made.learned(A) == 27
    assert held(made, small) == [20, 0]


def test_all_workers_together_stay_below_the_limit_and_the_fullest_gives_way() -> None:
    made = index(limit=102)  # blocks, and the two pieces they lie in
    made.remember(A, prompt(80), 0, 1.0)
    made.remember(B, prompt(40, seed=1), 0, 2.0)
    assert (made.learned(A), made.learned(B)) == (60, 40)
    assert made.stats().approximate.blocks == 100


def test_blocks_end_with_their_life_time_unless_used() -> None:
    made = index(ttl_s=600.0)
    made.remember(A, joined(20, seed=0), 0, 0.0)
    made.remember(A, joined(20, seed=1), 0, 500.0)
    made.expire(599.9)
    assert held(made, joined(20, seed=0)) == [30, 0]
    made.expire(600.0)
    assert held(made, joined(20, seed=0)) == [20, 0]
    made.expire(1100.0)
    assert made.learned(A) == 0
    assert made.stats().keys == 0
    assert made.stats().approximate.dropped["age"] == 40


def test_a_restart_forgets_and_learns_anew() -> None:
    made = index()
    made.remember(A, prompt(20), 0, 1.0)
    made.remember(A, prompt(5, seed=3, mode=PrefixMode.APPROXIMATE), 0, 1.0)
    made.remember(B, prompt(20), 0, 1.0)
    assert made.forget(A) == 25
    assert held(made, prompt(20)) == [0, 20]
    assert made.forget(A) == 0
    # The new process may come without events.
    announce(made, B, 3)
    made.purge(B)
    made.forget(B)
    assert made.remember(B, prompt(20), 0, 2.0) is not None
    assert held(made, prompt(20)) == [0, 20]


def test_a_key_is_announced_or_learned_never_both() -> None:
    """A restart is seen by the probe before the feed purges; requests may end in between."""
    made = index()
    announce(made, A, 8)
    assert made.forget(A) == 0
    assert made.remember(A, prompt(20), 0, 1.0) is None
    made.purge(A)
    made.remember(A, prompt(20), 0, 2.0)
    assert held(made, prompt(20)) == [20, 0]
    # What comes while a gap is repaired is shown before it is applied: that is hearing too.
    tokens = [0, *range(20 * SIZE)][: 3 * SIZE]
    hashes = [EngineHash(int(key)) for key in keys.chain(keys.namespace(), tokens, SIZE)]
    made.preview(A, 0, [Stored(hashes, None, tokens, SIZE)])
    assert held(made, prompt(20)) == [3, 0]
    announce(made, A, 8)
    made.end_preview(A, 0)
    assert held(made, prompt(20)) == [8, 0]
    made.purge(A)
    assert (made.stats().keys, made.stats().approximate.blocks) == (0, 0)


def test_a_released_slot_leaves_nothing_behind() -> None:
    made = index()
    made.remember(A, prompt(20), 0, 1.0)
    made.release(A)
    assert (made.stats().keys, made.stats().approximate.blocks) == (0, 0)
    assert made.forget(A) == 0
    made.bind(A, block_size=SIZE)
    assert held(made, prompt(20)) == [0, 0]


@pytest.mark.parametrize(
    ("delivered", "shown"), [(30, False), (29, False), (26, True), (20, True), (3, True), (0, True)]
)
def test_fewer_cached_tokens_than_known_show_what_was_evicted(delivered: int, shown: bool) -> None:
    """What is as old as the evicted block goes; the request's own blocks were computed anew, younger ones stay."""
    made = index()
    made.remember(A, joined(20, seed=0), 0, 0.0)
    made.remember(A, prompt(15, seed=8), 0, 0.5)
    made.remember(A, joined(20, seed=1), 0, 1.0)
    made.remember(A, prompt(15, seed=7), 0, 2.0)
    known = made.remember(A, joined(20, seed=1), 0, 10.0)
    assert known is not None
    assert known.uses == ((30, 1.0),)
    assert made.contradict(A, known, delivered=delivered * SIZE, sent_at=9.0, now=11.0) is shown
    assert held(made, joined(20, seed=1)) == [30, 0]
    assert held(made, prompt(15, seed=7)) == [15, 0]
    assert held(made, joined(20, seed=0)) == [20 if shown else 30, 0]
    assert held(made, prompt(15, seed=8)) == [0 if shown else 15, 0]


def test_the_age_of_the_evicted_block_counts_not_that_of_its_head() -> None:
    made = index()
    made.remember(A, joined(20, seed=0), 0, 0.0)
    made.remember(A, prompt(15, seed=8), 0, 3.0)
    made.remember(A, joined(20, seed=1), 0, 5.0)
    known = made.remember(A, joined(20, seed=0), 0, 10.0)
    assert known is not None
    assert known.uses == ((20, 5.0), (30, 0.0))
    assert made.contradict(A, known, delivered=20 * SIZE, sent_at=9.0, now=11.0)
    assert held(made, prompt(15, seed=8)) == [15, 0]
    assert made.contradict(A, known, delivered=5 * SIZE, sent_at=9.0, now=11.0)
    assert held(made, prompt(15, seed=8)) == [0, 0]
    # Its own blocks behind the shared head are as old as the head was.
    assert held(made, joined(20, seed=1)) == [20, 0]


def test_what_was_computed_beside_a_request_proves_nothing() -> None:
    made = index()
    made.remember(A, joined(20, seed=0), 0, 5.0)
    known = made.remember(A, joined(20, seed=1), 0, 5.5)
    assert known is not None
    assert not made.contradict(A, known, delivered=0, sent_at=4.0, now=6.0)
    assert held(made, joined(20, seed=0)) == [30, 0]


def test_half_of_a_texts_estimated_tokens_is_no_contradiction() -> None:
    made = index()
    text = prompt(30, mode=PrefixMode.APPROXIMATE)
    made.remember(A, text, 0, 0.0)
    known = made.remember(A, text, 0, 5.0)
    assert known is not None
    assert not made.contradict(A, known, delivered=16 * SIZE, sent_at=4.0, now=6.0)
    assert made.contradict(A, known, delivered=14 * SIZE, sent_at=4.0, now=6.0)


def test_many_old_blocks_go_in_slices() -> None:
    made = index(ttl_s=10.0)
    made.remember(A, prompt(5_000), 0, 0.0)
    made.expire(20.0)
    assert 0 < made.learned(A) < 5_000
    for _ in range(5):
        made.expire(20.0)
    assert made.learned(A) == 0


def test_a_list_of_prompts_is_learned_and_proves_nothing() -> None:
    made = index()
    both = PrefixBlocks((prompt(5, seed=1).chains[0], prompt(7, seed=2).chains[0]), 200, SIZE)
    made.remember(A, both, 0, 1.0)
    known = made.remember(A, both, 0, 2.0)
    assert known is not None
    assert known.uses == ()
    assert made.learned(A) == 12
    assert not made.contradict(A, known, delivered=0, sent_at=1.5, now=3.0)


def test_bytes_are_counted() -> None:
    made = index()
    empty = made.stats().estimated_bytes
    made.remember(A, prompt(1_000), 0, 1.0)
    stats = made.stats()
    assert 40_000 < stats.approximate.bytes < 160_000
    assert stats.estimated_bytes > empty + stats.approximate.bytes


def test_nothing_is_learned_beside_what_a_preview_hides() -> None:
    made = index()
    announce(made, A, 1)
    (name,) = made.engine_hashes(A, 0, Tier.GPU)
    made.preview(A, 0, [Removed([EngineHash(name)], Tier.GPU)])
    made.forget(A)
    assert made.remember(A, prompt(1), 0, 1.0) is None
    made.end_preview(A, 0)
    announce(made, A, 2, seed=1)
    assert held(made, prompt(1)) == [1, 0], "the removal was shown only, it was never applied"
