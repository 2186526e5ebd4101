"""What promises cost where many of them live, and where they end in an unusual order: counted, not timed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from gateway.keys import chain, namespace
from gateway.kv import KvIndex
from gateway.kv.events import Removed, Stored
from gateway.records import BlockKey, Chain, EngineHash, PrefixBlocks, Slot, Tier

SIZE = 4
WORKER = Slot(0)


class Counted(list[BlockKey]):
    """Keys that count how many of them are looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        Counted.looks += len(found) if isinstance(at, slice) else 1
        return found

    def index(self, *where: Any) -> int:
        Counted.looks += where[2] - where[1]
        return super().index(*where)


def prompt(ids: Iterable[int]) -> PrefixBlocks:
    tokens = [token for number in ids for token in (number, 1, 2, 3)]
    keys = Counted(chain(namespace(), tokens, SIZE))
    return PrefixBlocks((Chain(keys, len(tokens) + 1),), len(tokens) + 1, SIZE)


def bound() -> KvIndex:
    index = KvIndex()
    index.bind(WORKER, block_size=SIZE)
    return index


def test_a_promise_that_is_evicted_from_its_end_costs_its_blocks() -> None:
    """The worker held a prompt, lost its first block, was promised all of it, and then loses the rest from the end, as
    engines evict."""
    index, count = bound(), 4000
    tokens = [token for number in range(count) for token in (number, 1, 2, 3)]
    blocks = prompt(range(count))
    names = [EngineHash(number + 1) for number in range(count)]
    index.apply(WORKER, 0, [Stored(names, None, tokens, SIZE, Tier.GPU), Removed(names[:1], Tier.GPU)])
    handle = index.speculate(WORKER, blocks)
    assert handle.blocks == count
    Counted.looks = 0
    for name in reversed(names[count // 2 :]):
        index.apply(WORKER, 0, [Removed([name], Tier.GPU)])
    assert Counted.looks < 100 * count // 2
    assert index.stats().speculative == count // 2
    index.retract(handle)
    assert index.stats().speculative == 0


def test_a_sibling_that_leaves_a_promise_is_not_compared_with_all_promises() -> None:
    index, live = bound(), 500
    handles = [index.speculate(WORKER, prompt([number, *range(40)])) for number in range(live)]
    sibling = prompt([live - 1, *range(20), 99])
    Counted.looks = 0
    handles.append(index.speculate(WORKER, sibling, index.overlap(sibling, 1)))
    assert Counted.looks < live
    assert index.overlap(sibling, 1).blocks(WORKER) == 22
    for handle in handles:
        index.retract(handle)
    assert index.stats().speculative == 0
