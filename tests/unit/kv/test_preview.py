"""Batches shown before their turn: visible at once, and without a trace when they have had it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from gateway.keys import chain, namespace
from gateway.kv.events import KvEvent, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.records import Chain, EngineHash, EngineKind, PrefixBlocks, Slot, Tier

A = Slot(3)
SIZE = 4
TOKENS = list(range(6 * SIZE))
KEYS = chain(namespace(), TOKENS, SIZE)


def store(first: int, end: int, tier: Tier = Tier.GPU) -> Stored:
    """Blocks of one prompt; block n has the hash n + 1."""
    hashes = [EngineHash(n + 1) for n in range(first, end)]
    parent = EngineHash(first) if first else None
    return Stored(hashes, parent, TOKENS[first * SIZE : end * SIZE], SIZE, tier, keyed=True)


def remove(*blocks: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed([EngineHash(n + 1) for n in blocks], tier)


def made(*events: KvEvent, engine: EngineKind = EngineKind.VLLM) -> KvIndex:
    index = KvIndex()
    index.bind(A, block_size=SIZE, engine=engine)
    index.apply(A, 0, events)
    return index


def held(index: KvIndex) -> int:
    request = PrefixBlocks((Chain(KEYS, 6 * SIZE + 1),), 6 * SIZE + 1, SIZE)
    return index.overlap(request, 1 << A).blocks(A)


def content(index: KvIndex) -> tuple[object, ...]:
    """Everything that can be seen of the rank."""
    tiers = [(sorted(index.engine_hashes(A, 0, tier)), index.resident(A, tier)) for tier in Tier]
    return held(index), tiers, index.stats().keys, index.stats().orphans


@pytest.mark.parametrize("engine", [EngineKind.VLLM, EngineKind.SGLANG])
@pytest.mark.parametrize(
    ("events", "shown"),
    [
        ([store(3, 5)], 5),
        ([remove(1)], 1),
        ([remove(2), store(2, 3)], 3),
        ([store(3, 6), remove(4)], 4),
        ([remove(0, 1, 2), store(0, 4)], 4),
        ([store(1, 2, Tier.CPU), remove(1)], 2),
        ([store(5, 6), remove(5)], 3),
    ],
)
def test_shown_at_once_and_gone_without_a_trace(engine: EngineKind, events: Sequence[KvEvent], shown: int) -> None:
    index = made(store(0, 3), engine=engine)
    before = content(index)
    index.preview(A, 0, events)
    assert held(index) == shown
    index.end_preview(A, 0)
    assert content(index) == before


def test_a_copy_less_hides_nothing() -> None:
    index = made(store(0, 3), store(0, 3))
    index.preview(A, 0, [remove(2)])
    assert held(index) == 3
    index.preview(A, 0, [remove(2)])
    assert held(index) == 2
    index.end_preview(A, 0)
    index.apply(A, 0, [remove(2)])
    assert held(index) == 3
    index.apply(A, 0, [remove(2)])
    assert held(index) == 2


def test_what_is_applied_meanwhile_finds_the_table_as_it_was() -> None:
    """Missing: block 2 is removed and stored again. Shown before: it is removed."""
    index = made(store(0, 3))
    index.preview(A, 0, [remove(2)])
    index.apply(A, 0, [remove(2), store(2, 3)])
    assert index.stats().ignored[A] == {}
    index.apply(A, 0, [remove(2)])
    index.end_preview(A, 0)
    assert held(index) == 2
    assert index.resident(A, Tier.GPU) == 2


def test_the_place_in_a_chunk_is_kept() -> None:
    """vLLM tells an offloaded chunk by its last block; the others are known by what was stored on GPU before."""

    def offloaded(last: int) -> Stored:
        return Stored([EngineHash(last + 1)], None, [], 0, Tier.CPU)

    for hiding in (False, True):
        index = made(store(0, 2), offloaded(1), store(2, 4), offloaded(3), store(4, 6))
        if hiding:
            index.preview(A, 0, [remove(4)])
            index.end_preview(A, 0)
        index.apply(A, 0, [offloaded(5)])
        assert index.resident(A, Tier.CPU) == 6


def test_a_purge_and_a_release_take_what_is_shown_along() -> None:
    index = made(store(0, 3))
    index.preview(A, 0, [store(3, 5), remove(0)])
    index.purge(A, 0)
    assert (index.stats().keys, index.resident(A, Tier.GPU)) == (0, 0)
    index.apply(A, 0, [store(0, 3)])
    index.preview(A, 0, [store(3, 5), remove(0)])
    index.release(A)
    assert index.stats().keys == 0


OTHER = Stored([EngineHash(100), EngineHash(101)], None, list(range(900, 900 + 2 * SIZE)), SIZE, keyed=True)


@pytest.mark.parametrize("stop_after", [1, 3, 100])
def test_it_ends_in_steps_and_at_once_when_stopped(stop_after: int) -> None:
    index, plain = made(store(0, 4)), made(store(0, 4))
    before = content(index)
    index.preview(A, 0, [remove(3), remove(2), remove(1), OTHER])
    assert (held(index), index.resident(A, Tier.GPU)) == (1, 3)
    steps = index.ending_preview(A, 0, most=1)
    taken = sum(1 for _ in zip(range(stop_after), steps, strict=False))
    steps.close()
    assert taken == min(stop_after, 3 + 2)
    assert content(index) == before
    for one in (index, plain):
        one.apply(A, 0, [remove(3), OTHER])
    assert content(index) == content(plain)


def test_what_was_hidden_comes_back_in_steps_and_what_is_shown_stays() -> None:
    index = made(store(0, 4))
    index.preview(A, 0, [remove(3), remove(2), OTHER])
    assert len(list(index.ending_preview(A, 0, most=1, keep_shown=True))) == 2
    assert (held(index), index.resident(A, Tier.GPU)) == (4, 6)
    index.end_preview(A, 0)
    assert (held(index), index.resident(A, Tier.GPU)) == (4, 4)


def test_a_purge_in_steps_ends_a_preview_in_steps() -> None:
    index = made(store(0, 4))
    index.preview(A, 0, [remove(3), OTHER])
    steps = 0
    for _ in index.purging(A, 0, most=1):
        steps += 1
        assert held(index) == 0
    assert steps == 1 + 2 + 4
    assert content(index) == content(made())
