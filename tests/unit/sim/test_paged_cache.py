"""The cache of a simulated worker: pins, order of eviction, what a release leaves behind."""

from __future__ import annotations

from gateway.sim.paged_cache import PagedCache


def held(cache: PagedCache, blocks: list[int]) -> list[bool]:
    return [block in cache for block in blocks]


def test_the_tail_of_a_prefix_goes_before_its_head() -> None:
    cache = PagedCache(4)
    claim, _ = cache.claim([1, 2, 3], 0)
    cache.release(claim)
    _, evicted = cache.claim([10, 11], 0)
    assert evicted == [3]
    _, evicted = cache.claim([20], 0)
    assert evicted == [2]


def test_older_requests_go_before_newer_ones_and_use_makes_new() -> None:
    cache = PagedCache(6)
    for blocks in ([1, 2], [3, 4], [5, 6]):
        cache.release(cache.claim(blocks, 0)[0])
    cache.release(cache.claim([1, 2], 0)[0])
    assert cache.claim([7, 8, 9], 0)[1] == [4, 3, 6]
    assert cache.held([1, 2]) == 2


def test_pinned_blocks_are_never_evicted_and_pins_are_counted() -> None:
    cache = PagedCache(3)
    first, _ = cache.claim([1, 2], 0)
    second, _ = cache.claim([1, 2], 0)
    cache.release(first)
    assert not cache.fits([3, 4], 0)
    assert cache.in_use == 2
    cache.release(second)
    assert cache.in_use == 0
    assert cache.fits([3, 4], 0)


def test_a_hit_on_idle_blocks_takes_their_room() -> None:
    cache = PagedCache(4)
    cache.release(cache.claim([1, 2, 3], 0)[0])
    assert cache.fits([1, 2, 3], 1)
    assert not cache.fits([1, 2, 3], 2)


def test_reserved_blocks_count_as_used_until_named_or_released() -> None:
    cache = PagedCache(4)
    claim, _ = cache.claim([1], 3)
    assert cache.in_use == 4
    assert cache.extend(claim, 2) == [1]
    assert (cache.in_use, cache.resident) == (4, 2)
    cache.release(claim)
    assert (cache.in_use, held(cache, [1, 2])) == (0, [True, True])


def test_naming_a_block_that_is_there_already_gives_the_room_back() -> None:
    cache = PagedCache(4)
    cache.release(cache.claim([1, 2], 0)[0])
    claim, _ = cache.claim([1], 1)
    assert cache.extend(claim, 2) == []
    assert cache.in_use == 2


def test_uncomputed_blocks_are_dropped_unless_another_holds_them() -> None:
    cache = PagedCache(8)
    cache.release(cache.claim([1], 0)[0])
    claim, _ = cache.claim([1, 2, 3], 1)
    assert claim.fresh == [1, 2]
    assert sorted(cache.release(claim, uncomputed=True).dropped) == [2, 3]
    assert held(cache, [1, 2, 3]) == [True, False, False]
    assert cache.in_use == 0


def test_a_tail_without_its_head_is_no_hit_and_not_fresh() -> None:
    cache = PagedCache(8)
    cache.release(cache.claim([2], 0)[0])
    assert cache.held([1, 2]) == 0
    assert cache.claim([1, 2, 3], 0)[0].fresh == [0, 2]


def test_clearing_forgets_idle_blocks_only() -> None:
    cache = PagedCache(8)
    cache.release(cache.claim([1, 2], 0)[0])
    cache.claim([3], 0)
    assert cache.clear() == [2, 1]
    assert cache.resident == 1
