"""The index: what stores, removals, clears and purges do to overlaps."""

from __future__ import annotations

import copy
import gc
import random
import time
import tracemalloc
from collections.abc import Sequence

import pytest

from gateway.keys import chain, namespace, with_extra
from gateway.kv.events import Cleared, KvEvent, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.kv.numbers import Applied
from gateway.records import Chain, EngineHash, EngineKind, PrefixBlocks, Slot, Tier

SIZE = 4
A, B, C = Slot(0), Slot(1), Slot(70)
ALL = (1 << A) | (1 << B) | (1 << C)


def tokens(blocks: int, *, start: int = 0) -> list[int]:
    return list(range(start * SIZE, (start + blocks) * SIZE))


def hashes(*names: int) -> list[EngineHash]:
    return [EngineHash(name) for name in names]


def store(
    names: Sequence[int],
    ids: list[int],
    *,
    parent: int | None = None,
    size: int = SIZE,
    tier: Tier = Tier.GPU,
    group: int | None = None,
    kind: str | None = None,
    adapter: str | None = None,
    salt: str | None = None,
    extras: list[bytes | None] | None = None,
    keyed: bool = True,
) -> Stored:
    above = None if parent is None else EngineHash(parent)
    return Stored(hashes(*names), above, ids, size, tier, group, kind, adapter, salt, extras, keyed)


def placeholder(*names: int, tier: Tier = Tier.CPU) -> Stored:
    return Stored(hashes(*names), None, [], 0, tier)


def removed(*names: int, tier: Tier = Tier.GPU, group: int | None = None) -> Removed:
    return Removed(hashes(*names), tier, group)


def request(ids: list[int], *, adapter: str | None = None, salt: str | None = None, size: int = SIZE) -> PrefixBlocks:
    """A request of these tokens and one more, so that every full block may count."""
    ids = [*ids, 999_999]
    return PrefixBlocks((Chain(chain(namespace(adapter, salt), ids, size), len(ids)),), len(ids), size)


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex()
    for slot in (A, B, C):
        index.bind(slot, block_size=SIZE)
    return index


def held(index: KvIndex, blocks: PrefixBlocks, slot: Slot) -> int:
    return index.overlap(blocks, ALL).blocks(slot)


def apply(index: KvIndex, slot: Slot, *events: KvEvent, rank: int = 0) -> Applied:
    return index.apply(slot, rank, events)


# ---------------------------------------------------------------- stores and removals


def test_a_child_continues_its_parent(index: KvIndex) -> None:
    apply(index, A, store(range(1, 9), tokens(8)))
    apply(index, A, store(range(9, 13), tokens(4, start=8), parent=8))
    assert held(index, request(tokens(12)), A) == 12
    assert index.overlap(request(tokens(12)), ALL).tokens(A) == 48
    assert index.resident(A, Tier.GPU) == 12
    assert held(index, request(tokens(12)), B) == 0


def test_a_removal_touches_its_worker_only(index: KvIndex) -> None:
    for slot in (A, B, C):
        apply(index, slot, store([1, 2, 3], tokens(3)))
    apply(index, B, removed(3))
    assert [held(index, request(tokens(3)), slot) for slot in (A, B, C)] == [3, 2, 3]
    assert [index.resident(slot, Tier.GPU) for slot in (A, B, C)] == [3, 2, 3]


def test_a_removal_touches_its_tier_only(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), store([1, 2], tokens(2), tier=Tier.CPU))
    apply(index, A, removed(1, 2))
    overlaps = index.overlap(request(tokens(2)), ALL)
    assert (overlaps.blocks(A), overlaps.slow(A)) == (2, {Tier.CPU: 8})
    assert (index.resident(A, Tier.GPU), index.resident(A, Tier.CPU)) == (0, 2)
    apply(index, A, removed(2, tier=Tier.CPU))
    assert held(index, request(tokens(2)), A) == 1


def test_the_other_tier_stays_when_the_slow_copy_goes(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), store([1, 2], tokens(2), tier=Tier.DISK), removed(1, 2, tier=Tier.DISK))
    overlaps = index.overlap(request(tokens(2)), ALL)
    assert (overlaps.blocks(A), overlaps.slow(A)) == (2, {})


def test_a_tail_without_its_head_is_worth_nothing(index: KvIndex) -> None:
    apply(index, A, store([1, 2, 3, 4], tokens(4)), removed(1, 2), store([3], tokens(1, start=2), parent=2))
    assert held(index, request(tokens(4)), A) == 0
    apply(index, A, store([1, 2], tokens(2)))
    assert held(index, request(tokens(4)), A) == 4


def test_the_second_copy_survives_the_removal_of_the_first(index: KvIndex) -> None:
    applied = apply(index, A, store([1], tokens(1)), store([1], tokens(1)), removed(1))
    assert (applied.stored, applied.removed, applied.repeated) == ({Tier.GPU: 1}, {}, 1)
    assert held(index, request(tokens(1)), A) == 1
    assert apply(index, A, removed(1)).removed == {Tier.GPU: 1}
    assert held(index, request(tokens(1)), A) == 0
    assert apply(index, A, removed(1)).ignored == {"unknown_removal": 1}


def test_sglang_holds_a_page_once_however_often_it_says_so() -> None:
    index = KvIndex()
    index.bind(A, block_size=SIZE, engine=EngineKind.SGLANG)
    apply(index, A, store([1], tokens(1), keyed=False), store([1], tokens(1), keyed=False), removed(1))
    assert held(index, request(tokens(1)), A) == 0


def test_two_engine_hashes_of_one_key_are_two_holders(index: KvIndex) -> None:
    # vLLM before 0.17 hides the salt: the same tokens under two hashes.
    apply(index, A, store([1], tokens(1)), store([2], tokens(1)), removed(1))
    assert (held(index, request(tokens(1)), A), index.resident(A, Tier.GPU)) == (1, 1)
    apply(index, A, removed(2))
    assert (held(index, request(tokens(1)), A), index.resident(A, Tier.GPU)) == (0, 0)


def test_a_clear_in_the_middle_of_a_batch_empties_every_tier(index: KvIndex) -> None:
    applied = apply(
        index,
        A,
        store([1, 2], tokens(2)),
        placeholder(2),
        Cleared(),
        store([1], tokens(1)),
    )
    assert applied.clears == 1
    assert held(index, request(tokens(2)), A) == 1
    assert [index.resident(A, tier) for tier in Tier] == [1, 0, 0, 0]


def test_ranks_share_a_slot_and_the_bit_goes_with_the_last(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), rank=0)
    apply(index, A, store([7, 8], tokens(2)), rank=1)
    assert index.resident(A, Tier.GPU) == 2
    apply(index, A, removed(2), rank=0)
    assert held(index, request(tokens(2)), A) == 2
    assert index.purge(A, 1) == 2
    assert held(index, request(tokens(2)), A) == 1
    assert index.purge(A) == 1
    assert (held(index, request(tokens(2)), A), index.resident(A, Tier.GPU)) == (0, 0)


def test_a_rank_does_not_know_the_hashes_of_another(index: KvIndex) -> None:
    apply(index, A, store([1], tokens(1)), rank=0)
    assert apply(index, A, removed(1), rank=1).ignored == {"unknown_removal": 1}
    assert apply(index, A, store([2], tokens(1, start=1), parent=1), rank=1).orphans == 1
    assert held(index, request(tokens(2)), A) == 1


# ---------------------------------------------------------------- workers


def test_release_drops_a_worker_and_its_slot_starts_empty(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)))
    apply(index, B, store([1, 2], tokens(2)))
    index.release(A)
    assert held(index, request(tokens(2)), A) == 0
    assert held(index, request(tokens(2)), B) == 2
    assert apply(index, A, store([1], tokens(1))).ignored == {"unbound": 1}
    index.bind(A, block_size=SIZE)
    assert held(index, request(tokens(2)), A) == 0
    index.release(A)
    index.release(A)


def test_binding_again_forgets_the_worker_before(index: KvIndex) -> None:
    apply(index, A, store([1], tokens(1)))
    index.bind(A, block_size=SIZE)
    assert index.resident(A, Tier.GPU) == 0


def test_a_block_size_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        KvIndex().bind(A, block_size=0)


# ---------------------------------------------------------------- orphans


def test_an_orphan_predicts_nothing_until_its_head_is_announced(index: KvIndex) -> None:
    applied = apply(index, A, store([5, 6], tokens(2, start=4), parent=4))
    assert (applied.orphans, applied.stored) == (2, {})
    assert held(index, request(tokens(2, start=4)), A) == 0
    assert held(index, request(tokens(6)), A) == 0
    assert (index.stats().orphans, index.resident(A, Tier.GPU)) == (2, 0)
    apply(index, A, store([1, 2, 3, 4], tokens(4)))
    assert held(index, request(tokens(6)), A) == 6
    assert (index.stats().orphans, index.resident(A, Tier.GPU)) == (0, 6)
    apply(index, A, removed(6))
    assert held(index, request(tokens(6)), A) == 5


def test_orphans_of_orphans_are_joined_in_one_go(index: KvIndex) -> None:
    apply(index, A, store([3], tokens(1, start=2), parent=2), store([4], tokens(1, start=3), parent=3))
    apply(index, A, store([2], tokens(1, start=1), parent=1))
    assert index.stats().orphans == 3
    apply(index, A, store([1], tokens(1)))
    assert held(index, request(tokens(4)), A) == 4


def test_a_removed_orphan_is_not_joined(index: KvIndex) -> None:
    apply(index, A, store([2, 3], tokens(2, start=1), parent=1), removed(3))
    assert index.stats().orphans == 1
    apply(index, A, store([1], tokens(1)))
    assert held(index, request(tokens(3)), A) == 2


def test_an_orphan_announced_twice_needs_two_removals(index: KvIndex) -> None:
    event = store([2], tokens(1, start=1), parent=1)
    apply(index, A, event, event, store([1], tokens(1)), removed(2))
    assert held(index, request(tokens(2)), A) == 2
    apply(index, A, removed(2))
    assert held(index, request(tokens(2)), A) == 1


def test_a_known_block_inside_an_orphan_run_is_used(index: KvIndex) -> None:
    apply(
        index,
        A,
        store([1, 2], tokens(2)),
        store([1, 2], tokens(2), tier=Tier.CPU),
        removed(1),
        removed(1, tier=Tier.CPU),
    )
    # 2 is still known by its key; a run that begins behind the unknown 1 contains it.
    apply(index, A, store([2, 3], tokens(2, start=1), parent=1))
    assert index.stats().orphans == 0
    apply(index, A, store([1], tokens(1)))
    assert held(index, request(tokens(3)), A) == 3


def test_orphans_are_bounded_and_the_oldest_go_first() -> None:
    index = KvIndex(orphan_limit=100)
    index.bind(A, block_size=SIZE)
    dropped = 0
    for number in range(1000):
        event = store([10_000 + number], tokens(1, start=number), parent=20_000 + number)
        dropped += apply(index, A, event).dropped
    stats = index.stats()
    assert (stats.orphans, stats.orphans_dropped, dropped) == (100, 900, 900)
    apply(index, A, store([20_999], [5, 6, 7, 8]), store([20_000], [6, 6, 7, 8]))
    assert held(index, request([5, 6, 7, 8, *tokens(1, start=999)]), A) == 2
    assert held(index, request([6, 6, 7, 8, *tokens(1)]), A) == 1


def test_orphans_of_one_parent_go_in_any_order_at_the_same_cost() -> None:
    """A prompt that all conversations share, whose head was missed: each of them waits for it."""

    def cost(order: Sequence[int]) -> float:
        index = KvIndex()
        index.bind(A, block_size=SIZE)
        for name in range(16_000):
            apply(index, A, store([name], tokens(1, start=name), parent=20_000))
        spent = []
        for first in range(0, 5000, 500):
            began = time.process_time()
            apply(index, A, removed(*order[first : first + 500]))
            spent.append(time.process_time() - began)
        assert index.stats().orphans == 11_000
        return min(spent)

    oldest_first = range(16_000)
    assert cost(oldest_first[::-1]) < 20 * cost(oldest_first)


@pytest.mark.parametrize("one_chain", [True, False])
def test_a_great_many_orphans_are_placed_in_steps(index: KvIndex, *, one_chain: bool) -> None:
    ids = tokens(7000, start=1)
    names = range(1, 7001)
    if one_chain:
        apply(index, A, store(names, ids, parent=9000))
    else:
        for name in names:
            apply(index, A, store([name], ids[(name - 1) * SIZE : name * SIZE], parent=9000))
    placed = [apply(index, A, store([9000], tokens(1)))]
    apply(index, A, removed(7000), removed(1) if not one_chain else store([8000], tokens(1, start=8000)))
    while index.apply(A, 0, []).unfinished:
        assert len(placed) < 10
        placed.append(apply(index, A))
    assert placed[0].unfinished
    assert placed[0].stored[Tier.GPU] == 1001
    assert (index.stats().orphans, index.resident(A, Tier.GPU)) == (0, 7001 if one_chain else 6999)
    expected = request(tokens(1) + ids) if one_chain else request(tokens(1) + ids[5 * SIZE : 6 * SIZE])
    assert held(index, expected, A) == (7000 if one_chain else 2)


def test_a_clear_takes_orphans_along_that_were_about_to_be_placed(index: KvIndex) -> None:
    apply(index, A, store(range(1, 4001), tokens(4000, start=1), parent=9000))
    assert apply(index, A, store([9000], tokens(1))).unfinished
    assert not apply(index, A, Cleared()).unfinished
    assert (index.stats().orphans, index.stats().keys, index.resident(A, Tier.GPU)) == (0, 0, 0)


def test_orphans_never_reach_another_rank_or_worker(index: KvIndex) -> None:
    apply(index, A, store([2], tokens(1, start=1), parent=1))
    apply(index, B, store([1], tokens(1)))
    apply(index, A, store([1], tokens(1)), rank=1)
    assert [held(index, request(tokens(2)), slot) for slot in (A, B)] == [1, 1]
    assert index.stats().orphans == 1


# ---------------------------------------------------------------- events without tokens, slower tiers


def test_placeholders_are_joined_by_hash_in_either_order(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), placeholder(1), removed(1, 2))
    assert held(index, request(tokens(2)), A) == 1
    applied = apply(index, A, placeholder(2))
    assert (applied.orphans, index.stats().placeholders) == (1, 1)
    apply(index, A, store([2], tokens(1, start=1), parent=1), removed(2))
    overlaps = index.overlap(request(tokens(2)), ALL)
    assert (overlaps.blocks(A), overlaps.slow(A)) == (2, {Tier.CPU: 8})
    assert index.stats().placeholders == 0


def test_a_placeholder_that_is_removed_is_forgotten(index: KvIndex) -> None:
    apply(index, A, placeholder(1), removed(1, tier=Tier.CPU), store([1], tokens(1)), removed(1))
    assert held(index, request(tokens(1)), A) == 0
    assert index.stats().placeholders == 0


def test_a_slow_store_that_hides_its_keys_is_joined_by_hash_only(index: KvIndex) -> None:
    # vLLM's connectors leave extra_keys out: the tokens alone would match the unsalted prompt.
    apply(index, A, store([1], tokens(1), salt="s"), store([1], tokens(1), tier=Tier.CPU, keyed=False), removed(1))
    assert held(index, request(tokens(1)), A) == 0
    assert held(index, request(tokens(1), salt="s"), A) == 1
    apply(index, A, store([9], tokens(1), tier=Tier.CPU, keyed=False))
    assert held(index, request(tokens(1)), A) == 0


def test_sglang_host_stores_are_placed_by_their_tokens() -> None:
    index = KvIndex()
    index.bind(A, block_size=SIZE, engine=EngineKind.SGLANG)
    apply(index, A, store([1, 2], tokens(2), tier=Tier.CPU, keyed=False))
    overlaps = index.overlap(request(tokens(2)), ALL)
    assert (overlaps.tokens(A), overlaps.slow(A)) == (8, {Tier.CPU: 8})


# ---------------------------------------------------------------- identity


def test_adapter_and_salt_are_part_of_the_key(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2), adapter="sql"), store([3], tokens(1, start=2), parent=2, adapter="sql"))
    apply(index, B, store([1, 2], tokens(2), salt="tenant"))
    apply(index, C, store([1, 2], tokens(2)))
    assert [held(index, request(tokens(3)), slot) for slot in (A, B, C)] == [0, 0, 2]
    assert [held(index, request(tokens(3), adapter="sql"), slot) for slot in (A, B, C)] == [3, 0, 0]
    assert [held(index, request(tokens(3), salt="tenant"), slot) for slot in (A, B, C)] == [0, 2, 0]


def test_multimodal_items_are_part_of_the_key(index: KvIndex) -> None:
    apply(index, A, store([1, 2, 3], tokens(3), extras=[None, b"image", None]))
    assert held(index, request(tokens(3)), A) == 1
    root = namespace()
    first = chain(root, tokens(1), SIZE)
    second = chain(with_extra(first[0], b"image"), tokens(1, start=1), SIZE)
    third = chain(second[0], tokens(1, start=2), SIZE)
    keys = [*first, *second, *third]
    assert held(index, PrefixBlocks((Chain(keys, 13),), 13, SIZE), A) == 3


def test_only_full_attention_groups_count(index: KvIndex) -> None:
    applied = apply(
        index,
        A,
        store([1, 2], tokens(2), group=0, kind="full_attention"),
        store([2], tokens(2), group=1, kind="sliding_window"),
        store([3], tokens(1), group=2, kind="mamba"),
        removed(2, group=1),
        removed(1, group=2),
    )
    assert applied.ignored == {"cache_group": 4}
    assert held(index, request(tokens(2)), A) == 2
    apply(index, A, removed(2, group=0))
    assert held(index, request(tokens(2)), A) == 1


def test_a_later_group_of_full_attention_counts_too(index: KvIndex) -> None:
    apply(index, A, store([1], tokens(1), group=3, kind="mla_attention"), removed(1, group=3))
    assert held(index, request(tokens(1)), A) == 0
    assert apply(index, A, removed(1, group=5)).ignored == {"cache_group": 1}


def test_larger_worker_blocks_fill_several_keys_and_are_floored(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(4), size=2 * SIZE))
    assert index.resident(A, Tier.GPU) == 4
    overlaps = index.overlap(request(tokens(4)), ALL)
    assert (overlaps.tokens(A), overlaps.confirmed(A)) == (16, 16)
    assert index.overlap(request(tokens(3)), ALL).tokens(A) == 8
    apply(index, A, store([3], tokens(2, start=4), parent=2, size=2 * SIZE), removed(2))
    assert index.overlap(request(tokens(6)), ALL).tokens(A) == 8
    assert index.resident(A, Tier.GPU) == 4
    apply(index, A, store([9], tokens(2, start=9), parent=8, size=2 * SIZE))
    apply(index, A, store([8], [*tokens(2, start=7)], size=2 * SIZE))
    assert held(index, request([*tokens(4, start=7)]), A) == 4
    assert index.purge(A) == 4
    assert index.resident(A, Tier.GPU) == 0


@pytest.mark.parametrize("size", [2, 6, 0])
def test_block_sizes_that_do_not_fit_are_an_identity_problem(index: KvIndex, size: int) -> None:
    applied = apply(index, A, store([1], list(range(size or 4)), size=size))
    assert applied.ignored == {"block_size": 1}
    assert index.stats().ignored[A] == {"block_size": 1}


@pytest.mark.parametrize(
    "ids", [[2**40, 1.5, 2, 3], [1, 2, 3], [1, 2, 3, -4], [1, 2, 3, 4.5], [1, 2, 3, None], [1, 2, 3, 2**64]]
)
def test_tokens_that_are_none_cost_their_event_only(index: KvIndex, ids: list[int]) -> None:
    for parent in (None, 77):
        applied = apply(index, A, store([1], ids, parent=parent), store([2], tokens(1)))
        assert applied.ignored == {"malformed": 1}
    assert held(index, request(tokens(1)), A) == 1
    stats = index.stats()
    assert (stats.orphans, stats.placeholders) == (0, 0)


def test_wide_tokens_work_also_as_orphans(index: KvIndex) -> None:
    wide = [2**40, 1, 2, 3]
    apply(index, A, store([2], wide, parent=1), store([1], tokens(1)))
    assert held(index, request([*tokens(1), *wide]), A) == 2


# ---------------------------------------------------------------- overlaps


def test_the_last_token_is_never_cached() -> None:
    index = KvIndex()
    index.bind(A, block_size=SIZE)
    apply(index, A, store([1, 2], tokens(2)))
    for length, usable in ((8, 4), (9, 8), (5, 4), (4, 0)):
        ids = tokens(3)[:length]
        blocks = PrefixBlocks((Chain(chain(namespace(), ids, SIZE), length),), length, SIZE)
        overlaps = index.overlap(blocks, ALL)
        assert (overlaps.tokens(A), overlaps.confirmed(A)) == (usable, usable), length
        assert overlaps.blocks(A) == length // SIZE


def test_chains_are_added_and_capped_one_by_one(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)))
    keys = chain(namespace(), tokens(2), SIZE)
    blocks = PrefixBlocks((Chain(keys, 8), Chain(keys, 9), Chain([], 3)), 20, SIZE)
    overlaps = index.overlap(blocks, ALL)
    assert (overlaps.tokens(A), overlaps.confirmed(A), overlaps.blocks(A)) == (12, 12, 4)


def test_only_candidates_are_looked_at(index: KvIndex) -> None:
    for slot in (A, B, C):
        apply(index, slot, store([1], tokens(1)))
    overlaps = index.overlap(request(tokens(1)), 1 << B)
    assert [overlaps.blocks(slot) for slot in (A, B, C)] == [0, 1, 0]


def test_long_runs_end_where_they_end(index: KvIndex) -> None:
    for length in (1, 31, 32, 33, 64, 100):
        for slot, blocks in ((A, length), (B, 100), (C, max(1, length - 1))):
            index.purge(slot)
            apply(index, slot, store(range(1, blocks + 1), tokens(blocks)))
        overlaps = index.overlap(request(tokens(100)), ALL)
        assert [overlaps.blocks(slot) for slot in (A, B, C)] == [length, 100, max(1, length - 1)]
        assert overlaps.confirmed(A) == length * SIZE


def test_slow_tiers_continue_the_fast_run_only(index: KvIndex) -> None:
    names = range(1, 7)
    apply(index, A, store(names, tokens(6)))
    apply(index, A, placeholder(1))  # blocks are told one by one
    apply(index, A, placeholder(3), placeholder(4, tier=Tier.DISK), placeholder(4, tier=Tier.REMOTE), placeholder(6))
    apply(index, A, removed(3, 4, 5, 6))
    overlaps = index.overlap(request(tokens(6)), ALL)
    assert (overlaps.tokens(A), overlaps.blocks(A)) == (16, 4)
    assert overlaps.slow(A) == {Tier.CPU: 4, Tier.DISK: 4}
    assert overlaps.confirmed(A) == 16
    assert overlaps.slow(B) == {}
    # A GPU block behind a slow one does not continue the run: engines look the slow tiers up on their own.
    apply(index, A, store([5], tokens(1, start=4), parent=4))
    assert index.overlap(request(tokens(6)), ALL).blocks(A) == 4


def test_a_cut_prompt_does_not_count_slow_blocks_it_cannot_use(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), placeholder(2), removed(2))
    ids = tokens(2)
    blocks = PrefixBlocks((Chain(chain(namespace(), ids, SIZE), 8),), 8, SIZE)
    overlaps = index.overlap(blocks, ALL)
    assert (overlaps.tokens(A), overlaps.blocks(A), overlaps.slow(A)) == (4, 2, {})


def test_a_prefix_held_in_slow_tiers_alone_counts(index: KvIndex) -> None:
    apply(index, A, store([1, 2], tokens(2)), placeholder(1, 2), removed(1, 2))
    overlaps = index.overlap(request(tokens(2)), ALL)
    assert (overlaps.tokens(A), overlaps.slow(A)) == (8, {Tier.CPU: 8})


# ---------------------------------------------------------------- speculation


def test_speculative_blocks_count_until_they_are_retracted(index: KvIndex) -> None:
    blocks = request(tokens(4))
    apply(index, A, store([1, 2], tokens(2)))
    speculation = index.speculate(A, blocks)
    assert speculation.blocks == 2
    overlaps = index.overlap(blocks, ALL)
    assert (overlaps.tokens(A), overlaps.confirmed(A)) == (16, 8)
    index.retract(speculation)
    index.retract(speculation)
    assert held(index, blocks, A) == 2
    assert index.stats().speculative == 0


@pytest.mark.source_only
def test_a_run_goes_on_through_promises_whose_keys_nobody_entered() -> None:
    """At any place of any chain, whatever was announced or taken back before, it ends where one by one they would."""
    rng = random.Random(5)
    index = KvIndex()
    index.bind(A, block_size=SIZE)
    heads = [tokens(12), tokens(6) + tokens(6, start=20), tokens(3) + tokens(9, start=40)]
    chains = [chain(namespace(), head, SIZE) for head in heads]
    made = []
    found: set[tuple[int, ...]] = set()
    for _ in range(400):
        which, blocks = rng.randrange(3), rng.randrange(1, 13)
        match rng.randrange(4):
            case 0 | 1:
                made.append(index.speculate(A, request(heads[which][: blocks * SIZE])))
            case 2 if made:
                index.retract(made.pop(rng.randrange(len(made))))
            case _:
                names = [EngineHash(int(key)) for key in chains[which][:blocks]]
                index.apply(A, 0, [Stored(names, None, heads[which][: blocks * SIZE], SIZE), Removed(names[-2:])])
        runs = [index.overlap(request(head), ALL).blocks(A) for head in heads]
        entered = copy.deepcopy(index)
        assert runs == [
            next((at for at, key in enumerate(keys) if not entered.holders(key)), len(keys)) for keys in chains
        ]
        found.add(tuple(runs))
    assert len(found) > 10


def test_a_promise_costs_no_entry_a_block(index: KvIndex) -> None:
    """The tables grow by leaps, and a leap takes longer than the rest of a decision."""
    speculation = index.speculate(A, request(tokens(1000)))
    assert held(index, request(tokens(1000)), A) == 1000
    assert (index.stats().speculative, index.stats().keys) == (1000, 0)
    index.retract(speculation)
    assert held(index, request(tokens(1000)), A) == 0


def test_the_end_of_an_announced_block_ends_its_promise_behind_a_hole(index: KvIndex) -> None:
    """A block that lies behind an evicted one is promised again with it; when the engine removes it too, it is gone."""
    blocks = request(tokens(5))
    apply(index, A, store([1, 2, 3], tokens(3)), Removed([EngineHash(1)]))
    speculation = index.speculate(A, blocks)
    assert held(index, blocks, A) == 5
    apply(index, A, Removed([EngineHash(3)]))
    assert held(index, blocks, A) == 2
    index.retract(speculation)
    assert held(index, blocks, A) == 0


def test_two_speculations_on_the_same_blocks_end_separately(index: KvIndex) -> None:
    first, second = index.speculate(A, request(tokens(2))), index.speculate(A, request(tokens(3)))
    other = index.speculate(B, request(tokens(2)))
    index.retract(first)
    index.retract(first)
    assert [held(index, request(tokens(3)), slot) for slot in (A, B)] == [3, 2]
    index.retract(second)
    assert [held(index, request(tokens(3)), slot) for slot in (A, B)] == [0, 2]
    index.retract(other)
    assert index.stats().speculative == 0


def test_the_same_prompt_twice_in_one_request(index: KvIndex) -> None:
    one = request(tokens(2)).chains[0]
    speculation = index.speculate(A, PrefixBlocks((one, one), 18, SIZE))
    assert index.overlap(PrefixBlocks((one, one), 18, SIZE), ALL).tokens(A) == 16
    index.retract(speculation)
    assert held(index, request(tokens(2)), A) == 0


def test_confirmed_blocks_stay_when_the_speculation_ends(index: KvIndex) -> None:
    blocks = request(tokens(3))
    speculation = index.speculate(A, blocks)
    apply(index, A, store([1, 2], tokens(2)))
    index.retract(speculation)
    assert held(index, blocks, A) == 2


def test_a_released_worker_takes_its_speculations_along(index: KvIndex) -> None:
    blocks = request(tokens(2))
    speculation = index.speculate(A, blocks)
    index.release(A)
    index.bind(A, block_size=SIZE)
    assert held(index, blocks, A) == 0
    fresh = index.speculate(A, blocks)
    index.retract(speculation)
    assert held(index, blocks, A) == 2
    index.retract(fresh)
    assert index.speculate(Slot(9), blocks).blocks == 0


def test_speculative_keys_are_bounded() -> None:
    index = KvIndex(speculative_limit=5)
    index.bind(A, block_size=SIZE)
    kept = [index.speculate(A, request(tokens(3, start=10 * number))) for number in range(3)]
    stats = index.stats()
    assert (stats.speculative, stats.speculative_truncated) == (5, 4)
    assert [speculation.blocks for speculation in kept] == [3, 2, 0]
    for speculation in kept:
        index.retract(speculation)
    assert index.stats().speculative == 0


# ---------------------------------------------------------------- numbers


def test_the_tables_are_empty_when_everything_is_gone(index: KvIndex) -> None:
    before = index.stats().estimated_bytes
    for slot in (A, B, C):
        apply(index, slot, store(range(1, 101), tokens(100)), placeholder(50), store([900], tokens(1), parent=899))
    stats = index.stats()
    assert stats.blocks[A] == {Tier.GPU: 100, Tier.CPU: 1, Tier.DISK: 0, Tier.REMOTE: 0}
    assert (stats.keys, stats.orphans) == (101, 3)
    assert stats.estimated_bytes > before
    for slot in (A, B, C):
        index.release(slot)
    stats = index.stats()
    assert (stats.keys, stats.orphans, stats.blocks, stats.placeholders) == (0, 0, {}, 0)


def test_memory_per_block_is_within_its_budget_and_well_estimated() -> None:
    blocks = 22_016  # just above a size at which dictionaries grow
    tracemalloc.start()
    try:
        index = KvIndex()
        before = tracemalloc.get_traced_memory()[0]
        index.bind(A, block_size=SIZE)
        rng = random.Random(1)
        parent = None
        for first in range(0, blocks, 512):
            names = [rng.getrandbits(64) for _ in range(512)]
            apply(index, A, store(names, tokens(512, start=first), parent=parent))
            parent = names[-1]
        gc.collect()
        used = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert index.resident(A, Tier.GPU) == blocks
    assert used / blocks <= 200
    assert 0.8 < index.stats().estimated_bytes / used < 1.2


def test_a_worker_started_anew_with_another_block_size_is_floored_to_that_one() -> None:
    index, slot = KvIndex(), Slot(0)
    index.bind(slot, block_size=16)
    tokens = list(range(96))
    keys = chain(namespace(), tokens, 16)
    prefix = PrefixBlocks((Chain(keys, 97),), 97, 16)
    index.apply(slot, 0, [Stored([EngineHash(n) for n in range(1, 4)], None, tokens, 32)])
    assert index.overlap(prefix, 1).tokens(slot) == 96
    index.apply(slot, 0, [Cleared(), Stored([EngineHash(n) for n in range(11, 16)], None, tokens[:80], 16)])
    assert index.overlap(prefix, 1).tokens(slot) == 80
    index.apply(slot, 0, [Cleared(), Stored([EngineHash(21)], None, tokens[:64], 64)])
    assert index.overlap(PrefixBlocks((Chain(keys[:3], 49),), 49, 16), 1).tokens(slot) == 0
