"""How long blocks live: sampled, bounded, and only where their end was an eviction."""

from __future__ import annotations

import math

from gateway.kv.events import Removed, Stored
from gateway.kv.lives import LIFE_BOUNDS, MOST, BlockLives, Lives
from gateway.records import EngineHash, Tier


def hashes(*numbers: int) -> list[EngineHash]:
    return [EngineHash(number) for number in numbers]


def stored(*numbers: int, tier: Tier = Tier.GPU) -> Stored:
    return Stored(hashes(*numbers), None, [], 16, tier=tier)


def removed(*numbers: int, tier: Tier = Tier.GPU) -> Removed:
    return Removed(hashes(*numbers), tier=tier)


def counts(lives: BlockLives, tier: Tier = Tier.GPU) -> dict[float, int]:
    bounds = (*LIFE_BOUNDS, math.inf)
    return {bound: count for bound, count in zip(bounds, lives.lives[tier].counts, strict=True) if count}


def test_a_life_lasts_from_the_first_announcement_to_the_first_removal() -> None:
    lives = BlockLives()
    lives.note([stored(64, 65, 128)], 10.0)
    lives.note([stored(64)], 12.0)  # a second copy
    lives.note([removed(64, 65)], 14.0)
    lives.note([removed(64)], 20.0)
    lives.note([removed(128)], 200.0)
    assert counts(lives) == {5: 1, 300: 1}  # 65 is not in the sample
    assert lives.lives[Tier.GPU].total_s == 4.0 + 190.0


def test_tiers_are_apart() -> None:
    lives = BlockLives()
    lives.note([stored(64), stored(64, tier=Tier.CPU)], 0.0)
    lives.note([removed(64)], 0.5)
    lives.note([removed(64, tier=Tier.CPU)], 100_000.0)
    assert counts(lives) == {1: 1}
    assert counts(lives, Tier.CPU) == {math.inf: 1}
    assert lives.lives[Tier.CPU].median_s() == math.inf


def test_what_is_forgotten_has_no_life() -> None:
    lives = BlockLives()
    lives.note([stored(64)], 0.0)
    lives.forget()
    lives.note([removed(64)], 5.0)
    assert lives.lives == {}


def test_the_sample_is_one_in_64_and_bounded() -> None:
    lives = BlockLives()
    everything = [EngineHash(number) for number in range(64 * (MOST + 500))]
    lives.note([Stored(everything, None, [], 16)], 0.0)
    lives.note([Removed(everything)], 2.0)
    assert counts(lives) == {5: MOST}


def test_ranks_add_up_and_the_median_is_a_bound() -> None:
    one, other = Lives(), Lives()
    assert one.median_s() is None
    one.counts[0], one.total_s = 3, 2.0
    other.counts[4], other.total_s = 4, 1000.0
    one.add(other)
    assert (one.counts[0], one.counts[4], one.total_s, one.median_s()) == (3, 4, 1002.0, 300.0)
