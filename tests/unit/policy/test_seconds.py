"""The score in seconds: every term by hand, what each weight scales, and what wins."""

from __future__ import annotations

import math

import pytest

from gateway.policy import Ask, Prices, Seconds, View, Weights
from gateway.records import Terms
from tests.unit.policy.stand import Stand

PLAIN = Ask(tokens=1000, output_tokens=0, block_size=16, overhead_s=0.01, token_s=1e-3, pair_s=1e-6)


def score(
    worker: Stand,
    hit: int = 0,
    *,
    resident: int = 0,
    ask: Ask = PLAIN,
    now: float = 0.0,
    home: int | None = None,
    **weights: float,
) -> Terms:
    rows = Seconds(Weights(**weights)).score(ask, View([worker], [hit], [resident], home=home), now)
    return Terms(*rows[0])


def test_own_is_prefill_of_the_new_tokens_with_attention_over_the_cached() -> None:
    cold = score(Stand())
    assert cold.own_s == pytest.approx(0.01 + 1.0 + 1e-6 * 1000 * 500)
    warm = score(Stand(), 600)
    assert warm.own_s == pytest.approx(0.01 + 0.4 + 1e-6 * 400 * (600 + 200))
    assert warm.hit_s == pytest.approx(cold.own_s - warm.own_s)
    assert warm.cost == pytest.approx(1.25 * warm.own_s)


def test_wait_takes_off_what_has_run_and_a_late_head_is_expected_to_be_as_late_again() -> None:
    worker = Stand(pending_s=5.0, head_s=2.0, head_since=10.0)
    assert score(worker, now=11.5).wait_s == pytest.approx(3.5)
    assert score(worker, now=12.0).wait_s == pytest.approx(3.0)
    assert score(worker, now=13.5).wait_s == pytest.approx(4.5)


def test_other_clients_queue_runs_down_with_time() -> None:
    worker = Stand(foreign_s=2.0, foreign_since=10.0, foreign_requests=3.0)
    assert score(worker, now=10.5).wait_s == pytest.approx(1.5)
    assert score(worker, now=13.0).wait_s == 0.0
    assert score(worker, now=13.0).decode_s == pytest.approx(3 * 0.002)


def test_a_slow_worker_pays_its_slowdown() -> None:
    assert score(Stand(slowdown=2.0), 600).own_s == pytest.approx(2 * score(Stand(), 600).own_s)


def test_kv_is_occupancy_after_placing() -> None:
    worker = Stand(kv_capacity=10_000, kv_tokens=4_000)
    ask = PLAIN._replace(output_tokens=500)
    assert score(worker, 600, ask=ask).kv_s == pytest.approx((4_000 + 400 + 500) / 10_000)


def test_eviction_costs_recomputing_what_goes_times_its_worth() -> None:
    worker = Stand(kv_capacity=10_000, evict_discount=0.5, unindexed_tokens=500)
    assert score(worker, resident=8_000).evict_s == 0.0
    assert score(worker, resident=9_000).evict_s == pytest.approx(500 * 1e-3 * 0.5)
    assert score(worker, resident=10_000).evict_s == pytest.approx(1_000 * 1e-3 * 0.5)
    assert score(worker, 900, resident=10_000).evict_s == pytest.approx(100 * 1e-3 * 0.5)


def test_without_a_known_capacity_there_is_no_price_for_room() -> None:
    terms = score(Stand(kv_tokens=10**9, evict_discount=1.0), resident=10**9)
    assert (terms.evict_s, terms.kv_s) == (0.0, 0.0)


def test_home_gets_its_credit_and_nobody_else() -> None:
    home = score(Stand(), home=0)
    assert home.cost == pytest.approx(score(Stand()).cost - Prices().affinity_s)
    assert (home.affinity_s, score(Stand()).affinity_s) == (Prices().affinity_s, 0.0)


def test_slow_tier_reads_are_part_of_own() -> None:
    view = View([Stand()], [600], [0], [0.05])
    terms = Terms(*Seconds().score(PLAIN, view, 0.0)[0])
    assert terms.own_s == pytest.approx(score(Stand(), 600).own_s + 0.05)
    assert terms.hit_s == pytest.approx(score(Stand(), 600).hit_s - 0.05)


LOADED = Stand(pending_s=2.0, head_s=1.0, inflight_requests=10, kv_capacity=10_000, kv_tokens=5_000, evict_discount=0.5)


def test_the_three_weights_scale_what_they_say() -> None:
    base = score(LOADED, 600, resident=9_800)
    assert base.evict_s > 0.0
    load = base.decode_s + base.evict_s + base.kv_s
    assert base.cost == pytest.approx(base.wait_s + 1.25 * base.own_s + load)
    assert score(LOADED, 600, resident=9_800, beta=3.0).cost == pytest.approx(base.cost + 2 * base.wait_s)
    assert score(LOADED, 600, resident=9_800, gamma=3.0).cost == pytest.approx(base.cost + 2 * load)
    assert score(LOADED, 600, resident=9_800, alpha=2.0).cost == pytest.approx(base.cost - 1.25 * base.hit_s)
    blind = score(LOADED, 600, resident=9_800, alpha=0.0)
    assert blind.cost == pytest.approx(base.cost + 1.25 * base.hit_s)


def test_near_is_a_millisecond_and_for_cold_requests_a_share_of_the_prefill() -> None:
    policy = Seconds()
    assert policy.near(2.0, cold=False) == 0.001
    assert policy.near(2.0, cold=True) == pytest.approx(0.1)
    assert policy.near(0.001, cold=True) == 0.001


def test_costs_are_finite_at_the_edges() -> None:
    full = Stand(kv_capacity=16, kv_tokens=10**9, unindexed_tokens=10**9, evict_discount=1.0, slowdown=100.0)
    for hit in (0, 999, 1000):
        assert all(math.isfinite(value) for value in score(full, hit, resident=10**9))


def test_a_newcomer_earns_what_others_waited_also_while_it_answers() -> None:
    """One whose cache is as full as the others' earns only since it had nothing to do."""
    ask = PLAIN._replace(waited_s=5.0, settled_s=2.0)

    def idle_s(worker: Stand, resident: int) -> float:
        view = View([Stand(inflight_requests=1), Stand(inflight_requests=1), worker], [0] * 3, [9000, 9000, resident])
        return Terms(*Seconds().score(ask, view, 0.0)[2]).idle_s

    answers = Stand(inflight_requests=1, idle_since_s=4.5)
    assert idle_s(answers, 0) == pytest.approx(3.0)
    assert idle_s(Stand(inflight_requests=1, slowdown=2.0), 0) == pytest.approx(1.5)
    assert idle_s(answers, 8000) == 0.0
    assert idle_s(Stand(idle_since_s=4.5), 8000) == pytest.approx(0.5)
    assert idle_s(Stand(inflight_requests=1, pending_s=0.1, head_s=0.1), 0) == 0.0
