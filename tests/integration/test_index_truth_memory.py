"""Memory of the index over a long life, and what the index says of its own size.

Sizes are what Python's allocator handed out, so they depend on no other process: bytes where there is time to trace
them, else the number of pieces, which no leak leaves as it is.
"""

from __future__ import annotations

import gc
import itertools
import resource
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gateway.keys import chain, namespace
from gateway.kv.events import Cleared, KvEvent, Removed, Stored
from gateway.kv.index import KvIndex
from gateway.pool import Sessions
from gateway.records import Chain, EngineHash, EngineKind, PrefixBlocks, Slot, Tier, WorkerId

BLOCK = 16
ONE = Slot(0)


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """A function that says how many bytes were allocated since, and are still in use."""
    gc.collect()
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]

        def used() -> int:
            gc.collect()
            return tracemalloc.get_traced_memory()[0] - before

        yield used
    finally:
        tracemalloc.stop()


def pieces() -> int:
    """How many pieces of memory are in use."""
    gc.collect()
    return sys.getallocatedblocks()


def resident_bytes() -> int:
    """Memory of this process that is in use."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def block(number: int) -> list[int]:
    """Tokens of one block that no other number has."""
    return [number % 100_000, number // 100_000, *range(BLOCK - 2)]


def names(first: int, count: int) -> list[EngineHash]:
    """Hashes as wide as an engine's."""
    return [EngineHash((1 << 60) + first + n) for n in range(count)]


def chain_of(first: int, count: int) -> Stored:
    """A prompt of `count` blocks that no other prompt shares."""
    return Stored(names(first, count), None, [t for n in range(count) for t in block(first + n)], BLOCK, keyed=True)


def one_worker(*, engine: EngineKind = EngineKind.VLLM) -> KvIndex:
    index = KvIndex()
    index.bind(ONE, block_size=BLOCK, engine=engine)
    return index


# ---------------------------------------------------------------- a long life


def test_a_million_suffixes_come_and_go_on_a_living_base() -> None:
    """Each suffix is stored behind a block of the base and removed when 2,000 others have come."""
    suffixes, step, warm_up = 1_000_000, 1_000, 100_000
    base = names(0, 512)
    texts = [block(n) for n in range(2 * step)]
    before_all = pieces()
    index = one_worker()
    index.apply(ONE, 0, [chain_of(0, 512)])
    stated = used = 0
    before: list[EngineHash] = []
    for first in range(0, suffixes, step):
        now = names(10_000 + first, step)
        events: list[KvEvent] = [
            Stored([name], base[n % 512], texts[n], BLOCK, keyed=True) for n, name in enumerate(now, first % (2 * step))
        ]
        index.apply(ONE, 0, [*events, Removed(before)])
        before = now
        if first == warm_up:
            used, stated = pieces() - before_all, index.stats().estimated_bytes
    assert index.resident(ONE, Tier.GPU) == 512 + step
    assert index.stats().keys == 512 + step
    assert pieces() - before_all <= 1.05 * used
    assert index.stats().estimated_bytes <= 1.05 * stated
    index.purge(ONE)
    assert index.resident(ONE, Tier.GPU) == index.stats().keys == 0


def test_chains_that_are_never_removed_keep_within_the_cap() -> None:
    """200,000 chains of eight blocks take more than the cap of 256 MiB leaves room for."""
    chains, length, cap = 200_000, 8, 256 * 1024 * 1024
    before = resident_bytes()
    index = KvIndex(max_bytes=cap)
    index.bind(ONE, block_size=BLOCK)
    for number in range(chains):
        index.apply(ONE, 0, [chain_of(number * length, length)])
        if number % 1_000 == 0:
            assert index.stats().estimated_bytes <= cap
    stats = index.stats()
    assert stats.estimated_bytes <= cap
    assert resident_bytes() - before <= 1.25 * cap
    held = index.engine_hashes(ONE, 0, Tier.GPU)
    assert len(held) == index.resident(ONE, Tier.GPU) == chains * length - stats.truncated
    assert len(held) >= chains * length / 2
    # The newest are kept whole; of all others what is kept is what a lookup finds.
    for number in [*range(0, chains, 997), chains - 1]:
        told = chain_of(number * length, length)
        kept = [name in held for name in told.hashes]
        run = kept.index(False) if False in kept else length
        keys = chain(namespace(), told.tokens, BLOCK)
        blocks = PrefixBlocks((Chain(keys, len(told.tokens)),), len(told.tokens), BLOCK)
        assert index.overlap(blocks, 1 << ONE).blocks(ONE) == run
    assert run == length


def test_a_million_sessions() -> None:
    """Five times as many as there is room for."""
    room, warm_up = 200_000, 500_000
    sessions = Sessions(max_sessions=room, ttl_s=3600.0)
    worker = WorkerId("w1")
    before_all = pieces()
    used = 0
    for number in range(1_000_000):
        if number == warm_up:
            used = pieces() - before_all
        sessions.keep(f"session {number:07}", worker, number / 1000)
    assert len(sessions) == room
    assert pieces() - before_all <= 1.05 * used
    assert sessions.find("session 0999999", 1_000.0) == worker
    assert sessions.find("session 0799999", 1_000.0) is None


# ---------------------------------------------------------------- what the index says of its own size


def _own(index: KvIndex) -> None:
    for number in range(100):
        index.apply(ONE, 0, [chain_of(number * 512, 512)])


def _shared(index: KvIndex) -> None:
    for slot in range(8):
        index.bind(Slot(slot), block_size=BLOCK)
        for number in range(20):
            index.apply(Slot(slot), 0, [chain_of(number * 512, 512)])


def _two_tiers(index: KvIndex) -> None:
    for number in range(50):
        event = chain_of(number * 512, 512)
        cpu = Stored(event.hashes, None, event.tokens, BLOCK, Tier.CPU, keyed=True)
        index.apply(ONE, 0, [event, cpu])


def _copies(index: KvIndex) -> None:
    for number in range(50):
        index.apply(ONE, 0, [chain_of(number * 512, 512)] * 2)


def _spans(index: KvIndex) -> None:
    for number in range(50):
        event = chain_of(number * 512, 512)
        index.apply(ONE, 0, [Stored(event.hashes[:256], None, event.tokens, 2 * BLOCK)])


def _orphans(index: KvIndex) -> None:
    for number in range(12_000):
        index.apply(ONE, 0, [Stored(names(number, 1), EngineHash((1 << 61) + number), block(number), BLOCK)])


def _placeholders(index: KvIndex) -> None:
    for number in range(12_000):
        index.apply(ONE, 0, [Stored(names(number, 1), None, [], 0, Tier.CPU)])


def _promised(index: KvIndex) -> None:
    for number in range(100):
        tokens = list(itertools.chain.from_iterable(block(number * 512 + n) for n in range(512)))
        keys = chain(namespace(), tokens, BLOCK)
        index.speculate(ONE, PrefixBlocks((Chain(keys, len(tokens)),), len(tokens), BLOCK))


def _emptied(index: KvIndex) -> None:
    """Full once, nearly empty now: what is left of large tables counts."""
    _own(index)
    index.apply(ONE, 0, [Removed(names(n * 512, 512)) for n in range(99)])


def _cleared(index: KvIndex) -> None:
    _own(index)
    index.apply(ONE, 0, [Cleared(), chain_of(0, 10_000)])


@pytest.mark.parametrize(
    "fill",
    [_own, _shared, _two_tiers, _copies, _spans, _orphans, _placeholders, _promised, _emptied, _cleared],
    ids=lambda fill: fill.__name__.strip("_"),
)
def test_stated_bytes_are_within_a_factor_of_two_of_real_growth(fill: Callable[[KvIndex], None]) -> None:
    empty = one_worker().stats().estimated_bytes
    with traced() as used:
        index = one_worker()
        fill(index)
        stated = index.stats().estimated_bytes - empty
        real = used()
    assert 0.5 * real <= stated <= 2.0 * real
