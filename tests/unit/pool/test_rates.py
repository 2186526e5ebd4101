"""Learned speeds: they find the truth from a wrong prior, ignore outliers and stay in bounds."""

from __future__ import annotations

import math
from random import Random

import pytest

from gateway.pool.rates import PREFILL_PRIOR, PoolRates, PrefillRates, Regression, Slowdown

TRUE = PrefillRates(0.004, 1e-4, 1.4e-9)


def seconds(rates: PrefillRates, new: int, cached: int) -> float:
    return rates.overhead_s + new * (rates.token_s + rates.pair_s * (cached + new / 2))


def feed(rates: PoolRates, rng: Random, *, count: int, noise: float = 0.05, outliers: float = 0.0) -> None:
    slowdown = Slowdown()
    for _ in range(count):
        new, cached = rng.randrange(50, 20_000), rng.randrange(0, 50_000)
        took = seconds(TRUE, new, cached) * math.exp(rng.gauss(0.0, noise))
        if rng.random() < outliers:
            took *= 40.0
        rates.learn_prefill((1.0, float(new), new * (cached + new / 2)), took, slowdown)


@pytest.mark.parametrize("scale", [0.02, 0.5, 1.0, 2.0, 50.0])
def test_finds_the_speed_from_a_prior_of_any_scale(scale: float) -> None:
    rates = PoolRates(PrefillRates(*(value * scale for value in PREFILL_PRIOR)))
    feed(rates, Random(1), count=120)
    for new, cached in ((500, 0), (5_000, 10_000), (20_000, 0)):
        assert rates.prefill_s(new, cached) == pytest.approx(seconds(TRUE, new, cached), rel=0.15)


def test_one_in_ten_stalled_requests_move_it_little() -> None:
    rates = PoolRates()
    feed(rates, Random(2), count=300, outliers=0.1)
    assert rates.prefill_s(5_000, 0) == pytest.approx(seconds(TRUE, 5_000, 0), rel=0.25)


def test_learns_a_new_speed_when_the_engine_changes() -> None:
    rates, slowdown, rng = PoolRates(), Slowdown(), Random(3)
    feed(rates, rng, count=200)
    for _ in range(600):
        new = rng.randrange(50, 20_000)
        rates.learn_prefill((1.0, float(new), new * new / 2), 3 * seconds(TRUE, new, 0), slowdown)
    learned = slowdown.value * rates.prefill_s(5_000, 0)
    assert learned == pytest.approx(3 * seconds(TRUE, 5_000, 0), rel=0.15)


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
def test_impossible_observations_are_ignored(bad: float) -> None:
    model = Regression(PREFILL_PRIOR)
    model.learn((1.0, 100.0, 5_000.0), bad)
    assert (model.samples, model.values) == (0, tuple(PREFILL_PRIOR))


def test_parameters_stay_positive_whatever_is_seen() -> None:
    model, rng = Regression(PREFILL_PRIOR), Random(4)
    for _ in range(500):
        model.learn((1.0, rng.uniform(0, 1e5), rng.uniform(0, 1e9)), 10 ** rng.uniform(-6, 4))
        assert all(0.0 < value < math.inf for value in model.values)


def test_what_was_never_seen_keeps_its_place_in_the_prior() -> None:
    """Short prompts say nothing about pairs; the pair price keeps its relation to the scale instead of drifting."""
    model, rng = Regression(PREFILL_PRIOR), Random(5)
    for _ in range(400):
        new = float(rng.randrange(10, 200))
        model.learn((1.0, new, new * new / 2), 0.5 * (PREFILL_PRIOR.overhead_s + new * PREFILL_PRIOR.token_s))
    assert model.values[2] == pytest.approx(0.5 * PREFILL_PRIOR.pair_s, rel=0.2)


def test_slowdown_follows_a_worker_and_is_bounded() -> None:
    slowdown = Slowdown()
    for _ in range(20):
        slowdown.learn(4.0)
    assert slowdown.value == pytest.approx(4.0, rel=0.35)
    for _ in range(1_000):
        slowdown.learn(1e9)
    assert slowdown.value <= 100.0 * (1 + 1e-9)
    for _ in range(200):
        slowdown.learn(1.0)
    assert slowdown.value == pytest.approx(1.0, rel=0.05)


def test_one_odd_ratio_moves_a_slowdown_little() -> None:
    slowdown = Slowdown()
    for _ in range(10):
        slowdown.learn(1.0)
    slowdown.learn(1_000.0)
    assert slowdown.value < 1.12


def test_three_observations_that_agree_tell_that_a_worker_has_changed() -> None:
    slowdown = Slowdown()
    for _ in range(100):
        slowdown.learn(1.0)
    slowdown.learn(10.0)
    slowdown.learn(10.0)
    assert slowdown.value < 1.5
    slowdown.learn(10.0)
    assert slowdown.value > 2.5
    for _ in range(10):
        slowdown.learn(10.0)
    assert slowdown.value > 5.0
    for _ in range(3):
        slowdown.learn(1.0)
    assert slowdown.value < 1.1


@pytest.mark.parametrize("between", [(1.0, 1.0), (0.05, 1.0), (2.0, 0.1)])
def test_odd_ratios_that_do_not_follow_one_another_tell_of_no_change(between: tuple[float, float]) -> None:
    """Also those on both sides, and those of requests that are nearly all fixed overhead."""
    slowdown = Slowdown()
    for _ in range(100):
        slowdown.learn(1.0)
    for _ in range(3):
        slowdown.learn(10.0)
        slowdown.learn(10.0)
        for ratio in between:
            slowdown.learn(ratio)
    assert slowdown.value < 1.6
    for _ in range(9):
        slowdown.learn(10.0, 0.05)
    assert slowdown.value < 1.6


def test_that_a_worker_is_slow_is_forgotten_when_nothing_shows_it() -> None:
    slowdown = Slowdown()
    for _ in range(100):
        slowdown.learn(10.0)
    known = slowdown.value
    for _ in range(20):  # ten seconds
        slowdown.tick()
    assert slowdown.value == known
    for _ in range(180):
        slowdown.tick()
    assert slowdown.value < 1.3
    slowdown.learn(10.0)
    slowdown.learn(10.0)
    slowdown.learn(10.0)
    assert slowdown.value > 2.0


def test_inter_token_time_is_learned_against_the_batch() -> None:
    rates = PoolRates()
    for number in range(300):
        batch = float(1 + number % 60)
        rates.learn_inter_token(batch, 0.0115 + 5e-5 * batch)
    floor, each = rates.inter_token
    assert floor + 30 * each == pytest.approx(0.0115 + 30 * 5e-5, rel=0.05)


def test_output_length_is_a_running_mean() -> None:
    rates = PoolRates()
    for _ in range(400):
        rates.learn_output(50)
    assert rates.output_tokens == pytest.approx(50, abs=1)


@pytest.mark.parametrize("took_s", [0.0, -1.0, float("inf"), float("nan")])
def test_a_period_without_length_teaches_nothing(took_s: float) -> None:
    rates, slowdown = PoolRates(), Slowdown()
    for _ in range(6):
        rates.learn_prefill((1.0, 100.0, 5000.0), 0.05, slowdown)
    before = (rates.prefill, slowdown.value)
    rates.learn_prefill((1.0, 100.0, 5000.0), took_s, slowdown)
    assert (rates.prefill, slowdown.value) == before
