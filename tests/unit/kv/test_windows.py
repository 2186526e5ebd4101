"""Engines with sliding windows: a prefix counts up to where the engine can go on from."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway import keys
from gateway.kv import KvIndex
from gateway.kv.events import Cleared, Removed, Stored
from gateway.kv.windows import MAX_GROUPS, MAX_WINDOW_BLOCKS, WindowBlocks
from gateway.records import Chain, EngineHash, PrefixBlocks, Slot, Tier

SIZE = 32
WINDOW = 64
"""Reaches two blocks of 32 tokens back."""

A, B = Slot(0), Slot(1)
TOKENS = list(range(1, 20 * SIZE))


def named(*blocks: int) -> list[EngineHash]:
    return [EngineHash(1000 + block) for block in blocks]


def full(first: int, last: int, *, group: int = 1) -> Stored:
    """Full attention holds blocks `first` to `last`, both included."""
    parent = EngineHash(999 + first) if first else None
    tokens = TOKENS[first * SIZE : (last + 1) * SIZE]
    return Stored(named(*range(first, last + 1)), parent, tokens, SIZE, group=group, kind="full_attention")


def window(*blocks: int, group: int = 0, size: int = WINDOW) -> Stored:
    """A window group keeps these blocks; the tokens are those of the whole store."""
    return Stored(named(*blocks), None, TOKENS[: 10 * SIZE], SIZE, group=group, kind="sliding_window", window=size)


def made(*, size: int = SIZE) -> KvIndex:
    index = KvIndex()
    index.bind(A, block_size=size)
    index.bind(B, block_size=size)
    return index


def held(index: KvIndex, blocks: int, slot: Slot = A, *, size: int = SIZE) -> int:
    """Blocks that a prompt whose first `blocks` blocks are those of `TOKENS` finds."""
    tokens = [*TOKENS[: blocks * SIZE], *range(5000, 5000 + 2 * SIZE)]
    chain = Chain(keys.chain(keys.namespace(), tokens, size), len(tokens))
    overlaps = index.overlap(PrefixBlocks((chain,), len(tokens), size), 0b11)
    assert overlaps.confirmed(slot) == overlaps.tokens(slot)
    return overlaps.tokens(slot) // SIZE


@pytest.mark.parametrize("order", [(0, 1), (1, 0)], ids=["window first", "full attention first"])
def test_a_prefix_counts_to_where_the_window_is_kept(order: tuple[int, int]) -> None:
    """What vLLM 0.32 announces for a prompt of ten blocks: all of them, and of the window the last two but one."""
    index = made()
    events = [window(7, 8), full(0, 9)]
    index.apply(A, 0, [events[at] for at in order])
    assert [held(index, blocks) for blocks in (3, 8, 9, 10, 12)] == [0, 0, 9, 9, 9]


def test_prompts_that_part_again_find_the_place_where_they_parted() -> None:
    index = made()
    index.apply(A, 0, [window(8, 9), full(0, 9)])
    assert held(index, 5) == 0
    index.apply(A, 0, [window(3, 4)])
    assert (held(index, 5), held(index, 7), held(index, 10)) == (5, 5, 10)
    index.apply(A, 0, [Removed(named(3), group=0)])
    assert (held(index, 7), held(index, 10)) == (0, 10)


def test_the_start_of_a_prompt_needs_no_more_than_there_is() -> None:
    index = made()
    index.apply(A, 0, [window(0), full(0, 0)])
    assert held(index, 3) == 1


def test_every_window_group_must_hold_the_blocks_and_the_longest_window_counts() -> None:
    index = made()
    index.apply(A, 0, [window(4, 5), window(3, 4, 5, group=2, size=96), full(0, 5)])
    assert held(index, 6) == 0
    index.apply(A, 0, [window(3)])
    assert held(index, 6) == 6
    index.apply(A, 0, [Removed(named(4), group=2)])
    assert held(index, 6) == 0


def test_copies_of_window_blocks_are_counted_as_the_engine_does() -> None:
    index = made()
    index.apply(A, 0, [window(1, 2), window(1, 2), full(0, 2), Removed(named(1, 2), group=0)])
    assert held(index, 3) == 3
    index.apply(A, 0, [Removed(named(2), group=0)])
    assert held(index, 3) == 0


def test_what_full_attention_lets_go_is_no_place_to_go_on_from() -> None:
    index = made()
    index.apply(A, 0, [window(1, 2), full(0, 2), Removed(named(2), group=1)])
    assert held(index, 3) == 0
    index.apply(A, 0, [full(2, 2)])
    assert held(index, 3) == 3


def test_other_workers_and_groups_are_left_alone() -> None:
    index = made()
    index.apply(A, 0, [window(1, 2), full(0, 4)])
    index.apply(B, 0, [full(0, 4)])
    assert (held(index, 5, A), held(index, 5, B)) == (3, 5)
    told = Stored(named(3), None, TOKENS[: 4 * SIZE], SIZE, group=3, kind="mamba")
    assert index.apply(A, 0, [told]).ignored == {"cache_group": 1}
    assert index.apply(A, 0, [Removed(named(3), group=3)]).ignored == {"cache_group": 1}
    assert (held(index, 5, A), held(index, 5, B)) == (3, 5)


def test_a_worker_whose_blocks_cover_several_keys() -> None:
    index = made(size=16)
    index.apply(A, 0, [window(3, 4), full(0, 6)])
    assert held(index, 7, size=16) == 5


@pytest.mark.parametrize("end", ["clear", "purge", "release"])
def test_nothing_is_left_of_a_worker_that_forgets(end: str) -> None:
    index = made()
    index.apply(A, 0, [window(1, 2), full(0, 2)])
    if end == "clear":
        index.apply(A, 0, [Cleared()])
    elif end == "purge":
        index.purge(A)
    else:
        index.release(A)
        index.bind(A, block_size=SIZE)
    index.apply(A, 0, [window(0), full(0, 2)])
    assert held(index, 3) == 1
    assert index.resident(A, Tier.GPU) == 3


@pytest.mark.parametrize("end", ["purged", "cleared"])
def test_an_engine_that_comes_back_without_windows_goes_on_from_what_it_holds(end: str) -> None:
    index = made()
    index.apply(A, 0, [window(1, 2), full(0, 2)])
    if end == "purged":
        index.purge(A)
    else:
        index.apply(A, 0, [Cleared()])
    index.apply(A, 0, [full(0, 2)])
    assert held(index, 3) == 3


def test_window_groups_are_bounded() -> None:
    index = made()
    for group in range(2, 2 + 3 * MAX_GROUPS):
        ignored = index.apply(A, 0, [window(1, 2, group=group)]).ignored
        assert ignored == ({} if group < 2 + MAX_GROUPS else {"cache_group": 2})


def test_window_blocks_are_bounded() -> None:
    blocks = WindowBlocks()
    for name in range(MAX_WINDOW_BLOCKS):
        assert blocks.store(0, EngineHash(name)) is None
    assert blocks.store(0, EngineHash(MAX_WINDOW_BLOCKS)) == 0
    assert len(blocks) == MAX_WINDOW_BLOCKS


LENGTH = 8


def found_by_the_engine(kept: set[int], windows: Sequence[set[int]], asked: int, reach: int) -> int:
    """The engine's own search: the longest prefix whose last `reach` blocks every window group holds."""
    run = next((at for at in range(asked) if at not in kept), asked)
    for end in range(run, 0, -1):
        if all(at in blocks for blocks in windows for at in range(max(0, end - reach), end)):
            return end
    return 0


step = st.tuples(
    st.sampled_from(["keep", "drop"]), st.integers(0, 2), st.lists(st.integers(0, LENGTH - 1), min_size=1, max_size=4)
)


@given(st.lists(step, max_size=40), st.integers(1, 4))
def test_the_overlap_is_what_the_engine_would_find(steps: list[tuple[str, int, list[int]]], reach: int) -> None:
    """Group 0 is full attention, which keeps its blocks in order; 1 and 2 have windows."""
    index = made()
    groups: list[set[int]] = [set(range(LENGTH)), set(), set()]
    size = (reach - 1) * SIZE + 2
    index.apply(A, 0, [full(0, LENGTH - 1, group=0), window(group=1, size=size), window(group=2, size=size)])
    index.apply(A, 0, [window(0, group=1, size=size), window(0, group=2, size=size)])
    groups[1].add(0)
    groups[2].add(0)
    for action, group, blocks in steps:
        for block in blocks:
            if action == "drop" and block in groups[group]:
                groups[group].remove(block)
                index.apply(A, 0, [Removed(named(block), group=group)])
            elif action == "keep" and block not in groups[group] and group:
                groups[group].add(block)
                index.apply(A, 0, [window(block, group=group, size=size)])
            elif action == "keep" and block not in groups[0] and (block == 0 or block - 1 in groups[0]):
                groups[0].add(block)
                index.apply(A, 0, [full(block, block, group=0)])
    for asked in range(LENGTH + 1):
        assert held(index, asked) == found_by_the_engine(groups[0], groups[1:], asked, reach)
