"""Runs found by bisection are those found block by block, where nobody has a block without the one before it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.kv.runs import falling_runs, fast_runs
from gateway.records import BlockKey


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 40), st.integers(0, 255))
def test_bisection_finds_the_same_runs(lengths: list[int], total: int, slots: int) -> None:
    keys = [BlockKey(at * 7 + 3) for at in range(total)]
    masks: dict[BlockKey, int] = {}
    for slot, length in enumerate(lengths):
        for key in keys[:length]:
            masks[key] = masks.get(key, 0) | 1 << slot
    assert falling_runs(keys, slots, masks) == fast_runs(keys, slots, masks)
