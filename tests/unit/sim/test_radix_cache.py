"""The tree of a simulated SGLang worker: against a naive model, and its rules by hand."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.sim.cache import Claim, HostTier
from gateway.sim.radix_cache import RadixCache


def chain(*digits: int) -> list[int]:
    """Names of pages as engines make them: each stands for itself and everything before it."""
    names: list[int] = []
    for digit in digits:
        names.append((names[-1] if names else 0) * 10 + digit + 1)
    return names


def filled(cache: RadixCache, blocks: list[int]) -> tuple[Claim, list[int]]:
    claim, evicted = cache.claim(blocks, 0)
    cache.fill(claim)
    return claim, evicted


# ---------------------------------------------------------------- against a set of pages


@dataclass
class Held:
    claim: Claim
    blocks: list[int]
    spare: int
    pinned: int
    computed: bool = False


class Model:
    """A set of pages closed under prefixes, and what the running requests hold of it."""

    def __init__(self, capacity: int) -> None:
        self.cache = RadixCache(capacity)
        self.pages: set[int] = set()
        self.open: list[Held] = []
        self.parents: dict[int, int | None] = {}

    def know(self, blocks: list[int]) -> None:
        for before, block in zip([None, *blocks], blocks, strict=False):
            self.parents[block] = before

    def run(self, blocks: list[int]) -> int:
        count = 0
        while count < len(blocks) and blocks[count] in self.pages:
            count += 1
        return count

    def gone(self, blocks: list[int]) -> None:
        pinned = {block for held in self.open for block in held.blocks[: held.pinned]}
        assert not pinned & set(blocks)
        assert set(blocks) <= self.pages
        self.pages -= set(blocks)

    def claim(self, blocks: list[int], reserved: int) -> None:
        self.know(blocks)
        if not self.cache.fits(blocks, reserved):
            return
        run = self.run(blocks)
        claim, evicted = self.cache.claim(blocks, reserved)
        assert claim.held == run
        assert not set(blocks[:run]) & set(evicted)
        self.gone(evicted)
        self.open.append(Held(claim, list(blocks), reserved, run))

    def fill(self, held: Held) -> None:
        if not held.computed:
            self.stored(held, self.cache.fill(held.claim))
            held.computed = True
            held.pinned = len(held.blocks)

    def stored(self, held: Held, positions: list[int]) -> None:
        assert positions == list(range(self.run(held.blocks), len(held.blocks)))
        self.pages |= set(held.blocks)

    def grow(self, held: Held, digit: int) -> None:
        if held.computed and held.spare:
            held.spare -= 1
            block = held.blocks[-1] * 10 + digit + 1 if held.blocks else digit + 1
            held.blocks.append(block)
            self.know(held.blocks)
            assert self.cache.extend(held.claim, block) == []

    def release(self, held: Held) -> None:
        released = self.cache.release(held.claim, uncomputed=not held.computed)
        assert released.dropped == []
        if held.computed:
            self.stored(held, released.stored)
        else:
            assert released.stored == []
        self.open.remove(held)

    def check(self) -> None:
        cache = self.cache
        assert sorted(cache) == sorted(self.pages)
        assert cache.resident == len(self.pages)
        assert all(self.parents[page] is None or self.parents[page] in self.pages for page in self.pages)
        pinned = {block for held in self.open for block in held.blocks[: held.pinned]}
        assert cache.in_use >= len(pinned)
        assert cache.resident - len(pinned) + cache.in_use <= cache.capacity
        if not self.open:
            assert cache.in_use == 0


PAGES = st.lists(st.integers(0, 2), max_size=7)


@settings(max_examples=300)
@given(st.data(), st.integers(4, 30))
def test_the_tree_is_a_set_of_pages(data: st.DataObject, capacity: int) -> None:
    model = Model(capacity)
    for _ in range(data.draw(st.integers(1, 30))):
        action = data.draw(st.sampled_from(["claim", "claim", "fill", "grow", "release", "evict", "clear"]))
        if action == "claim":
            model.claim(chain(*data.draw(PAGES)), data.draw(st.integers(0, 3)))
        elif action == "evict":
            count = data.draw(st.integers(0, 5))
            evicted = model.cache.evict(count)
            model.gone(evicted)
        elif action == "clear":
            model.gone(model.cache.clear())
        elif model.open:
            held = data.draw(st.sampled_from(model.open))
            if action == "fill":
                model.fill(held)
            elif action == "grow":
                model.grow(held, data.draw(st.integers(0, 2)))
            else:
                model.release(held)
        model.check()
    for held in list(model.open):
        model.release(held)
        model.check()
    model.gone(model.cache.clear())
    assert model.pages == set()


# ---------------------------------------------------------------- by hand


def test_leaves_go_first_and_the_one_used_longest_ago_before_others() -> None:
    cache = RadixCache(8)
    for tail in ((1, 1), (2, 2), (3, 3)):
        cache.release(filled(cache, chain(0, 0, *tail))[0])
    cache.release(filled(cache, chain(0, 0, 1, 1))[0])
    assert cache.resident == 8
    assert filled(cache, chain(5, 5))[1] == chain(0, 0, 2, 2)[2:]
    assert cache.held(chain(0, 0, 1, 1)) == 4
    assert cache.held(chain(0, 0, 2, 2)) == 2


def test_a_whole_leaf_goes_even_when_less_is_needed() -> None:
    cache = RadixCache(4)
    cache.release(filled(cache, chain(1, 2, 3, 4))[0])
    assert filled(cache, chain(9))[1] == chain(1, 2, 3, 4)


def test_a_parent_goes_after_its_last_child() -> None:
    cache = RadixCache(6)
    cache.release(filled(cache, chain(0, 0, 1))[0])
    cache.release(filled(cache, chain(0, 0, 2))[0])
    assert cache.evict(None) == [chain(0, 0, 1)[2], chain(0, 0, 2)[2], *chain(0, 0)]


def test_the_path_of_a_running_request_stays() -> None:
    cache = RadixCache(6)
    claim, _ = filled(cache, chain(0, 1, 2))
    cache.release(filled(cache, chain(0, 5))[0])
    assert cache.evict(None) == [chain(0, 5)[1]]
    assert not cache.fits(chain(7, 7, 7, 7), 0)
    cache.release(claim)
    assert cache.fits(chain(7, 7, 7, 7), 0)


def test_pages_computed_twice_are_kept_once() -> None:
    cache = RadixCache(10)
    first, _ = cache.claim(chain(1, 2, 3), 0)
    second, _ = cache.claim(chain(1, 2, 3), 0)
    assert cache.in_use == 6
    assert cache.fill(first) == [0, 1, 2]
    assert cache.fill(second) == []
    assert (cache.in_use, cache.resident) == (3, 3)
    cache.release(first)
    assert cache.in_use == 3
    cache.release(second)
    assert cache.in_use == 0


def test_an_answer_is_cached_when_its_request_is_over() -> None:
    cache = RadixCache(10)
    claim, _ = cache.claim(chain(1, 2), 2)
    cache.fill(claim)
    assert cache.extend(claim, chain(1, 2, 3)[2]) == []
    assert cache.held(chain(1, 2, 3)) == 2
    assert cache.release(claim).stored == [2]
    assert cache.held(chain(1, 2, 3)) == 3
    assert (cache.in_use, cache.resident) == (0, 3)


def test_what_was_not_computed_is_not_kept() -> None:
    cache = RadixCache(10)
    claim, _ = cache.claim(chain(1, 2), 1)
    assert cache.release(claim, uncomputed=True) == ([], [])
    assert (cache.in_use, cache.resident) == (0, 0)
    assert cache.release(claim) == ([], [])


# ---------------------------------------------------------------- the tier below


def test_the_tier_below_keeps_whole_chunks_named_by_their_last_block() -> None:
    host = HostTier(4, chunk=2)
    blocks = chain(1, 2, 3, 4, 5)
    assert host.store(blocks, [0, 1, 2]) == ([1], [])
    assert host.store(blocks, [3, 4]) == ([3], [])
    assert host.resident == 4
    assert host.run(blocks, 0) == 4
    assert host.run(blocks, 1) == 3
    assert host.run(blocks, 4) == 0
    assert host.store(chain(9, 9), [0, 1]) == ([1], [blocks[1]])
    assert host.run(blocks, 0) == 0
    assert host.run(blocks, 2) == 2


@pytest.mark.parametrize(("capacity", "chunk"), [(1, 2), (0, 1), (3, 0)])
def test_a_tier_has_room_for_a_chunk(capacity: int, chunk: int) -> None:
    with pytest.raises(ValueError, match="room"):
        HostTier(capacity, chunk=chunk)
