"""When a request is late: the share of its like that was faster, measured by what was expected of each."""

from __future__ import annotations

from random import Random

import pytest

from gateway.pool import HedgeRule, Hedging, Kind
from gateway.pool.hedging import KEPT, LEAST, Ratios

RULE = HedgeRule(0.95, 0.1)


def taught(ratios: list[float], kind: Kind = Kind.STREAM) -> Hedging:
    hedging = Hedging()
    for ratio in ratios:
        hedging.began(kind, 2.0, 2.0 * ratio)
    return hedging


def test_late_is_relative_to_what_was_expected() -> None:
    hedging = taught([1.0] * 90 + [3.0] * 10)
    assert hedging.due_s(Kind.STREAM, 0.5, RULE) == pytest.approx(1.5)
    assert hedging.due_s(Kind.STREAM, 20.0, RULE) == pytest.approx(60.0), "a long prompt is late by right"
    assert hedging.due_s(Kind.STREAM, 0.001, RULE) == 0.1, "the floor"
    assert hedging.due_s(Kind.STREAM, 0.5, HedgeRule(0.8, 0.1)) == pytest.approx(0.5)


def test_nothing_is_late_until_enough_has_been_seen() -> None:
    assert taught([1.0] * (LEAST - 1)).due_s(Kind.STREAM, 1.0, RULE) is None
    assert taught([1.0] * LEAST).due_s(Kind.STREAM, 1.0, HedgeRule(0.9, 0.1)) == 1.0
    # Of a hundred the 99th percentile is the largest so far: nothing is known of what lies above.
    assert taught([1.0] * 100).due_s(Kind.STREAM, 1.0, HedgeRule(0.99, 0.1)) is None
    assert taught([1.0] * 200).due_s(Kind.STREAM, 1.0, HedgeRule(0.99, 0.1)) == 1.0


def test_kinds_are_kept_apart() -> None:
    hedging = taught([1.0] * 50)
    for _ in range(50):
        hedging.began(Kind.TEXT, 1.0, 9.0)
    assert hedging.due_s(Kind.STREAM, 1.0, RULE) == 1.0
    assert hedging.due_s(Kind.TEXT, 1.0, RULE) == 9.0
    assert hedging.due_s(Kind.OTHER, 1.0, RULE) is None


def test_what_was_overtaken_neither_hides_slowness_nor_drives_the_ratio_up() -> None:
    """A tenth of the requests meets a worker that never answers, and all of them are overtaken, for ever."""
    hedging = taught([1.0 + number / 100 for number in range(100)])
    before = hedging.due_s(Kind.STREAM, 1.0, RULE)
    rng = Random(1)
    for _ in range(20 * KEPT):
        if rng.random() < 0.1:
            hedging.overtaken(Kind.STREAM, RULE)
        else:
            hedging.began(Kind.STREAM, 1.0, 1.0 + rng.random())
    after = hedging.due_s(Kind.STREAM, 1.0, RULE)
    assert before is not None
    assert after is not None
    assert 0.8 * before < after <= before + 0.05


def test_it_follows_a_pool_that_becomes_slower_and_faster_again() -> None:
    hedging = taught([1.0] * KEPT)
    for _ in range(KEPT):
        hedging.began(Kind.STREAM, 1.0, 4.0)
    assert hedging.due_s(Kind.STREAM, 1.0, RULE) == 4.0
    for _ in range(KEPT):
        hedging.began(Kind.STREAM, 1.0, 0.5)
    assert hedging.due_s(Kind.STREAM, 1.0, RULE) == 0.5


def test_what_was_not_expected_to_take_time_says_nothing() -> None:
    hedging = Hedging()
    for _ in range(50):
        hedging.began(Kind.STREAM, 0.0, 1.0)
    assert hedging.due_s(Kind.STREAM, 1.0, RULE) is None


def test_ratios_are_bounded_and_equal_a_sorted_window() -> None:
    rng, seen, ratios = Random(2), [], Ratios()
    for _ in range(3 * KEPT):
        seen.append(round(rng.expovariate(1.0), 2))
        ratios.add(seen[-1])
    window = sorted(seen[-KEPT:])
    assert len(ratios) == KEPT
    for share in (0.5, 0.9, 0.95, 0.998):
        assert ratios.quantile(share) == window[int(share * KEPT)]
