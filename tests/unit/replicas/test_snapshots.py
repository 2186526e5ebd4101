"""A copy of a rank's blocks, made bytes and read again: the same index, and the same fate of its blocks."""

from __future__ import annotations

from random import Random

import pytest

from gateway.kv import FeedPoint, KvIndex
from gateway.kv.events import Removed, Stored
from gateway.pool.rates import PoolRates, Slowdown
from gateway.records import EngineHash, EngineKind, Slot, Tier
from gateway.replicas.snapshots import (
    RankSnapshot,
    Speeds,
    decode_rank,
    decode_speeds,
    encode_rank,
    encode_speeds,
)
from tests.unit.replicas.site import SIZE, blocks_of

SLOT = Slot(3)
POINT = FeedPoint(41, 2**64 - 1, 1.5, 2.5)
TOKENS = list(range(8 * SIZE))


def _hashes(*numbers: int) -> list[EngineHash]:
    return [EngineHash(number) for number in numbers]


def _index(*, engine: EngineKind = EngineKind.VLLM, size: int = SIZE) -> KvIndex:
    index = KvIndex()
    index.bind(SLOT, block_size=size, engine=engine)
    return index


def _filled() -> KvIndex:
    """Six blocks on GPU, the first of them twice; one of them, and a seventh, on CPU."""
    index = _index()
    stored = [
        Stored(_hashes(1, 2, 3, 4, 5, 6), None, TOKENS[: 6 * SIZE], SIZE),
        Stored(_hashes(1), None, TOKENS[:SIZE], SIZE),
        Stored(_hashes(6), EngineHash(5), TOKENS[5 * SIZE : 6 * SIZE], SIZE, tier=Tier.CPU, keyed=True),
        Stored(_hashes(7), EngineHash(6), TOKENS[6 * SIZE : 7 * SIZE], SIZE, tier=Tier.CPU, keyed=True),
        Stored(_hashes(99), EngineHash(98), TOKENS[:SIZE], SIZE),  # waits for its parent
    ]
    index.apply(SLOT, 0, stored)
    return index


def _moved(index: KvIndex, into: KvIndex, *, most: int = 2) -> bool:
    blocks = index.snapshot(SLOT, 0)
    assert blocks is not None
    snapshot = decode_rank(encode_rank(RankSnapshot(12.5, POINT, blocks)))
    assert snapshot is not None
    assert (snapshot.started_unix, snapshot.point) == (12.5, POINT)
    steps = into.restoring(SLOT, 0, snapshot.blocks, most=most)
    sizes = []
    while True:
        try:
            sizes.append(next(steps))
        except StopIteration as end:
            assert all(size <= most for size in sizes)
            return bool(end.value)


def _held(index: KvIndex) -> tuple[int, list[frozenset[int]], list[int]]:
    tiers = list(Tier)
    overlap = index.overlap(blocks_of([*TOKENS, 1]), 1 << SLOT).tokens(SLOT)
    return overlap, [index.engine_hashes(SLOT, 0, t) for t in tiers], [index.resident(SLOT, t) for t in tiers]


def test_the_same_blocks_and_the_same_copies() -> None:
    before, after = _filled(), _index()
    assert _moved(before, after)
    assert _held(after) == _held(before)
    assert _held(after)[0] == 7 * SIZE
    for index in (before, after):
        index.apply(SLOT, 0, [Removed(_hashes(1))])  # one of two copies
        assert index.overlap(blocks_of(TOKENS), 1 << SLOT).tokens(SLOT) == 7 * SIZE
        index.apply(SLOT, 0, [Removed(_hashes(1)), Stored(_hashes(8), EngineHash(7), TOKENS[7 * SIZE :], SIZE)])
        assert index.overlap(blocks_of(TOKENS), 1 << SLOT).tokens(SLOT) == 0
    assert _held(after) == _held(before)
    for index in (before, after):
        index.purge(SLOT)
        assert index.resident(SLOT, Tier.GPU) == index.resident(SLOT, Tier.CPU) == 0
    assert after.stats().keys == 0


def test_blocks_that_span_several_keys() -> None:
    before, after = _index(size=SIZE // 2), _index(size=SIZE // 2)
    before.apply(SLOT, 0, [Stored(_hashes(1, 2), None, TOKENS[: 2 * SIZE], SIZE)])
    assert _moved(before, after)
    assert after.resident(SLOT, Tier.GPU) == 4
    after.apply(SLOT, 0, [Removed(_hashes(2))])
    assert after.resident(SLOT, Tier.GPU) == 2


def test_groups_that_tell_nothing_of_prefixes_stay_known() -> None:
    before, after = _index(), _index()
    before.apply(
        SLOT,
        0,
        [
            Stored(_hashes(1), None, TOKENS[:SIZE], SIZE, group=1, kind="full_attention"),
            Stored(_hashes(5), None, TOKENS[:SIZE], SIZE, group=0, kind="sliding_window"),
        ],
    )
    assert _moved(before, after)
    after.apply(SLOT, 0, [Removed(_hashes(1), group=0)])
    assert after.resident(SLOT, Tier.GPU) == 1
    after.apply(SLOT, 0, [Removed(_hashes(1), group=1)])
    assert after.resident(SLOT, Tier.GPU) == 0


def test_not_into_another_size_another_kind_or_where_blocks_are() -> None:
    assert not _moved(_filled(), _index(size=32))
    assert not _moved(_filled(), _index(engine=EngineKind.SGLANG))
    assert not _moved(_filled(), _filled())
    blocks = _filled().snapshot(SLOT, 0)
    assert blocks is not None
    into = _index()
    steps = into.restoring(SLOT, 0, blocks, most=2)
    next(steps)
    into.bind(SLOT, block_size=SIZE)  # another worker meanwhile
    assert list(steps) == []
    assert into.resident(SLOT, Tier.GPU) == 0
    assert KvIndex().snapshot(SLOT, 0) is None


def test_bytes_that_are_none_of_ours() -> None:
    blocks = _filled().snapshot(SLOT, 0)
    assert blocks is not None
    good = encode_rank(RankSnapshot(None, POINT, blocks))
    rng = Random(1)
    broken = [None, b"", b"\x02" + good[1:], good[:-1], good + b"x", b"\x01\xc0", bytes(rng.randbytes(200))]
    assert all(decode_rank(value) is None for value in broken)
    assert all(decode_speeds(value) is None for value in broken)
    nested = b"\x91" * 100_000 + b"\xc0"  # in a field more than is known
    assert good[1] == 0x9B
    assert decode_rank(good[:1] + b"\x9c" + good[2:] + nested) is None
    assert decode_speeds(good[:1] + b"\x93\x80\x80" + nested) is None
    for _ in range(300):
        at = rng.randrange(1, len(good))
        decode_rank(good[:at] + rng.randbytes(1) + good[at + 1 :])  # never raises


def test_speeds_go_on_from_where_another_process_was() -> None:
    rates, speed = PoolRates(), Slowdown()
    rng = Random(2)
    for _ in range(60):
        new = rng.randrange(100, 4000)
        rates.learn_prefill((1.0, float(new), new * new / 2), 0.02 + new * 1e-3, speed)
        rates.learn_inter_token(4.0, 0.05)
        rates.learn_output(30.0)
        rates.learn_text(4000, 1500)
    told = decode_speeds(encode_speeds(Speeds({"m": rates.learned()}, {7: speed.learned()})))
    assert told is not None
    other, other_speed = PoolRates(), Slowdown()
    other.take_over(told.pools["m"])
    other_speed.take_over(told.workers[7])
    assert other.prefill_s(2000, 100) == pytest.approx(rates.prefill_s(2000, 100))
    assert other.inter_token == pytest.approx(rates.inter_token)
    assert (other.output_tokens, other.bytes_a_token, other_speed.value) == pytest.approx(
        (rates.output_tokens, rates.bytes_a_token, speed.value)
    )
    for one, its in ((rates, speed), (other, other_speed)):
        one.learn_prefill((1.0, 500.0, 125_000.0), 0.9, its)
    assert other.prefill_s(2000, 0) == pytest.approx(rates.prefill_s(2000, 0))

    for wrong in ([], [1.0], [float("nan")] * 30, [0.0] * 30, [1e300] * 30, rates.learned()[:-3]):
        fresh, slow = PoolRates(), Slowdown()
        fresh.take_over(wrong)
        slow.take_over(wrong)
        assert 0.0 < fresh.prefill_s(1000, 0) < 1e4
        assert slow.value == 1.0
