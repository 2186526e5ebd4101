"""Tiers below the GPU: chunks that are told by one hash, stores that nobody ever takes back, lookahead."""

from __future__ import annotations

import time
from random import Random

import pytest

from gateway.keys import chain, namespace
from gateway.kv.events import Cleared, KvEvent, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.kv.offload import MAX_FLEETING, MOST_EXCESS, Chunks, Lifetimes
from gateway.records import Chain, EngineHash, EngineKind, PrefixBlocks, Slot, Tier

SIZE = 4
A = Slot(0)


def tokens(blocks: int, *, start: int = 0) -> list[int]:
    return list(range(start * SIZE, (start + blocks) * SIZE))


def hashes(*names: int) -> list[EngineHash]:
    return [EngineHash(name) for name in names]


def gpu(names: list[int], ids: list[int], parent: int | None = None) -> Stored:
    above = None if parent is None else EngineHash(parent)
    return Stored(hashes(*names), above, ids, SIZE, keyed=True)


def end(name: int, *, size: int = 0, tier: Tier = Tier.CPU, fleeting: bool = False) -> Stored:
    return Stored(hashes(name), None, [], size, tier, fleeting=fleeting)


def gone(*names: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed(hashes(*names), tier)


def request(ids: list[int], *, salt: str | None = None) -> PrefixBlocks:
    ids = [*ids, 999_999]
    return PrefixBlocks((Chain(chain(namespace(None, salt), ids, SIZE), len(ids)),), len(ids), SIZE)


@pytest.fixture
def index() -> KvIndex:
    index = KvIndex(offload_ttl_s=60.0)
    index.bind(A, block_size=SIZE)
    return index


def apply(index: KvIndex, *events: KvEvent) -> None:
    index.apply(A, 0, events)


def run(index: KvIndex, ids: list[int]) -> int:
    return index.overlap(request(ids), 1 << A).blocks(A)


# ---------------------------------------------------------------- chunks


@pytest.mark.parametrize("chunk", [1, 2, 4, 8])
def test_a_placeholder_stands_for_every_block_of_its_chunk(index: KvIndex, chunk: int) -> None:
    names = list(range(1, 20))
    apply(index, gpu(names, tokens(19)))
    for name in range(chunk, 20, chunk):
        apply(index, end(name))
    apply(index, gone(*names))
    held = 19 // chunk * chunk
    assert run(index, tokens(19)) == held
    assert index.resident(A, Tier.CPU) == held
    apply(index, gone(chunk, tier=Tier.CPU))
    assert run(index, tokens(19)) == 0
    assert index.resident(A, Tier.CPU) == held - chunk
    for name in range(2 * chunk, 20, chunk):
        apply(index, gone(name, tier=Tier.CPU))
    assert index.stats().keys == 0


def test_the_size_follows_from_later_prompts_too(index: KvIndex) -> None:
    """One chunk a prompt: two distances that agree are needed, the first chunk gets its blocks with the second."""
    apply(index, gpu([1, 2, 3, 4, 5], tokens(5)), end(4))
    assert index.resident(A, Tier.CPU) == 1
    other = tokens(5, start=100)
    apply(index, gpu([11, 12, 13, 14, 15], other), end(14), gone(1, 2, 3, 4, 5, 11, 12, 13, 14, 15))
    assert (run(index, tokens(5)), run(index, other)) == (4, 4)


def test_chunks_that_were_missed_at_the_start_mislead_for_a_moment_only(index: KvIndex) -> None:
    """The first placeholder heard is the third chunk's: its distance to the root is no chunk's length."""
    names = list(range(1, 14))
    apply(index, gpu(names, tokens(13)), end(6))
    assert index.resident(A, Tier.CPU) == 1
    apply(index, end(8), end(10), end(12))
    apply(index, gone(*names))
    assert index.resident(A, Tier.CPU) == 8
    assert run(index, tokens(13)) == 0  # blocks 1 to 4 are nowhere


def test_a_branch_counts_from_the_chunk_it_hangs_on(index: KvIndex) -> None:
    apply(index, gpu([1, 2, 3, 4], tokens(4)), end(2), end(4))
    branch = [*tokens(2), *tokens(4, start=50)]
    apply(index, gpu([21, 22, 23, 24], branch[2 * SIZE :], parent=2), end(22), end(24))
    apply(index, gone(1, 2, 3, 4, 21, 22, 23, 24))
    assert (run(index, branch), run(index, tokens(4))) == (6, 4)
    apply(index, gone(2, tier=Tier.CPU))
    assert run(index, branch) == 0


def test_old_releases_tell_the_size(index: KvIndex) -> None:
    apply(index, gpu(list(range(1, 9)), tokens(8)), end(8, size=4 * SIZE), gone(*range(1, 9)))
    assert index.resident(A, Tier.CPU) == 4


def test_a_placeholder_that_came_before_its_blocks(index: KvIndex) -> None:
    apply(index, end(2), end(4))
    assert index.stats().placeholders == 2
    apply(index, gpu([1, 2, 3, 4], tokens(4)), end(2), end(4), gone(1, 2, 3, 4))
    assert index.stats().placeholders == 0
    assert run(index, tokens(4)) == 4


def test_blocks_told_one_by_one_are_not_remembered() -> None:
    chunks = Chunks()
    chunks.stored(None, hashes(1, 2, 3))
    assert chunks.before(EngineHash(1), {}) == []
    assert chunks.size == 1
    assert not chunks.follows
    chunks.stored(None, hashes(*range(10, 1000)))
    assert chunks.bytes == 0


def test_nothing_is_kept_of_blocks_that_are_gone(index: KvIndex) -> None:
    """A hundred thousand blocks through a cache of ten prompts, offloaded in chunks of four."""
    chance = Random(3)
    live: list[list[int]] = []
    empty = index.stats().estimated_bytes
    for number in range(3000):
        names = list(range(number * 40 + 1, number * 40 + 33))
        apply(index, gpu(names, tokens(32, start=number * 40)), *(end(name) for name in names[3::4]))
        live.append(names)
        if len(live) > 10:
            old = live.pop(chance.randrange(10))
            apply(index, gone(*old), gone(*old[3::4], tier=Tier.CPU))
    for names in live:
        apply(index, gone(*names), gone(*names[3::4], tier=Tier.CPU))
    assert index.stats().keys == 0
    assert index.stats().estimated_bytes - empty < 200_000


def test_walks_end(index: KvIndex) -> None:
    """Parents that go round in a circle, and a chain longer than any chunk."""
    chunks = Chunks()
    chunks.stored(EngineHash(2), hashes(1))
    chunks.stored(EngineHash(1), hashes(2))
    assert chunks.before(EngineHash(1), {}) == []
    apply(index, gpu(list(range(1, 2001)), tokens(2000)), end(2000), gone(*range(1, 2001)))
    assert index.resident(A, Tier.CPU) == 1


def test_a_clear_takes_chunks_along(index: KvIndex) -> None:
    apply(index, gpu([1, 2, 3, 4], tokens(4)), end(2), end(4), Cleared())
    assert index.stats().keys == 0
    apply(index, gpu([1, 2], tokens(2)), end(2), gone(1, 2))
    assert run(index, tokens(2)) == 2


def test_each_tier_has_its_own_chunks(index: KvIndex) -> None:
    names = list(range(1, 9))
    apply(index, gpu(names, tokens(8)), end(4), end(8))
    apply(index, end(4, tier=Tier.DISK), end(8, tier=Tier.DISK), gone(*names))
    apply(index, gone(4, 8, tier=Tier.CPU))
    assert run(index, tokens(8)) == 8
    assert (index.resident(A, Tier.CPU), index.resident(A, Tier.DISK)) == (0, 8)


# ---------------------------------------------------------------- stores that nobody takes back


def test_what_is_never_removed_ends_with_its_life_time(index: KvIndex) -> None:
    index.expire(1000.0)
    apply(index, gpu([1, 2], tokens(2)), end(1, fleeting=True), end(2, fleeting=True), gone(1, 2))
    index.expire(1059.0)
    assert run(index, tokens(2)) == 2
    index.expire(1060.5)
    assert run(index, tokens(2)) == 0
    assert index.stats().keys == 0


def test_announced_again_lives_again(index: KvIndex) -> None:
    index.expire(1000.0)
    apply(index, gpu([1], tokens(1)), end(1, fleeting=True), gone(1))
    index.expire(1050.0)
    apply(index, end(1, fleeting=True))
    index.expire(1100.0)
    assert run(index, tokens(1)) == 1
    index.expire(1110.0)
    assert run(index, tokens(1)) == 0


def test_a_removal_after_all_counts(index: KvIndex) -> None:
    apply(index, gpu([1], tokens(1)), end(1, fleeting=True), end(1, fleeting=True), gone(1))
    apply(index, gone(1, tier=Tier.CPU))
    assert run(index, tokens(1)) == 0
    index.expire(10_000.0)
    assert index.stats().keys == 0


def test_blocks_nobody_knows_end_too(index: KvIndex) -> None:
    apply(index, *(end(name, fleeting=True) for name in range(100)))
    assert index.stats().placeholders == 100
    index.expire(61.0)
    assert index.stats().placeholders == 0


def test_expiry_is_done_in_slices(index: KvIndex) -> None:
    apply(index, gpu(list(range(1, 12_001)), tokens(12_000)))
    apply(index, *(end(name, fleeting=True) for name in range(1, 12_001)))
    left = []
    for _ in range(3):
        index.expire(61.0)
        left.append(index.resident(A, Tier.CPU))
    assert left == [7_000, 2_000, 0]


def test_blocks_on_gpu_stay(index: KvIndex) -> None:
    apply(index, gpu([1, 2], tokens(2)), end(1, fleeting=True), end(2, fleeting=True))
    index.expire(61.0)
    assert run(index, tokens(2)) == 2
    assert index.resident(A, Tier.CPU) == 0


def test_lifetimes_are_bounded() -> None:
    lifetimes = Lifetimes()
    lifetimes.announced([EngineHash(name) for name in range(MAX_FLEETING + 5)], 60.0)
    assert lifetimes.over(0.0, 3) == [0, 1, 2]
    assert lifetimes.over(0.0, 100) == [3, 4]
    assert lifetimes.over(0.0, 100) == []
    assert len(lifetimes) == MAX_FLEETING


def test_a_flood_of_names_nobody_knows_does_not_outrun_the_bound(index: KvIndex) -> None:
    most = 0
    for first in range(0, MAX_FLEETING * 5 // 4, 1000):
        apply(index, Stored(hashes(*range(first, first + 1000)), None, [], 0, Tier.CPU, fleeting=True))
        most = max(most, index.stats().estimated_bytes)
    entry_bytes, waiting_bytes = 100, 8_000_000
    assert most < (MAX_FLEETING + MOST_EXCESS) * entry_bytes + waiting_bytes


def test_every_slice_of_an_expiry_costs_the_same(index: KvIndex) -> None:
    """Not the more, the more were ended before it."""
    for first in range(0, 200_000, 1000):
        names = hashes(*range(first, first + 1000))
        parent = EngineHash(first - 1) if first else None
        apply(index, Stored(names, parent, tokens(1000), SIZE, Tier.DISK, keyed=True, fleeting=True))
    cost = []
    while index.resident(A, Tier.DISK):
        began = time.process_time()
        index.expire(61.0)
        cost.append(time.process_time() - began)
    assert len(cost) == 40
    assert min(cost[20:]) < 6 * max(cost[:3])


# ---------------------------------------------------------------- LMCache and Mooncake


def test_chunks_of_lmcache_are_placed_by_their_tokens(index: KvIndex) -> None:
    """Its names are not the engine's, a chunk is several blocks, and it tells no cache group."""
    first = Stored(hashes(901), None, tokens(4), 4 * SIZE, Tier.CPU, fleeting=True)
    second = Stored(hashes(902), EngineHash(901), tokens(4, start=4), 4 * SIZE, Tier.CPU, fleeting=True)
    apply(index, first, second)
    assert run(index, tokens(8)) == 8
    assert index.overlap(request(tokens(8), salt="tenant-a"), 1 << A).blocks(A) == 0
    index.expire(61.0)
    assert index.stats().keys == 0


def test_blocks_of_mooncake_are_joined_by_name(index: KvIndex) -> None:
    """They do not tell salts: placed by their tokens they could match across them."""
    stored = Stored(hashes(1, 2), None, tokens(2), SIZE, Tier.CPU, group=0, fleeting=True)
    apply(index, stored)
    assert run(index, tokens(2)) == 0
    salted = Stored(hashes(1, 2), None, tokens(2), SIZE, salt="tenant-a", keyed=True)
    apply(index, salted, gone(1, 2))
    assert run(index, tokens(2)) == 0
    assert index.overlap(request(tokens(2), salt="tenant-a"), 1 << A).blocks(A) == 2


# ---------------------------------------------------------------- lookahead


def test_blocks_that_differ_in_what_follows_are_one_key(index: KvIndex) -> None:
    """vLLM 0.33 with lookahead hashing has two names for the same block before two continuations."""
    apply(index, gpu([1, 2], tokens(2)), gpu([3], tokens(1)))
    assert index.resident(A, Tier.GPU) == 2
    apply(index, gone(1, 2))
    assert run(index, tokens(2)) == 1
    apply(index, gone(3))
    assert index.stats().keys == 0


def test_sglang_stores_are_not_followed() -> None:
    index = KvIndex()
    index.bind(A, block_size=SIZE, engine=EngineKind.SGLANG)
    apply(index, gpu([1, 2], tokens(2)), Stored(hashes(1, 2), None, tokens(2), SIZE, Tier.CPU), gone(1, 2))
    assert run(index, tokens(2)) == 2
