"""Speeds that another process left in the store: whatever stands there, learning goes on and speeds stay speeds."""

from __future__ import annotations

import math

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.pool import PoolRates
from gateway.pool.rates import Slowdown

ANY = st.one_of(
    st.floats(),
    st.sampled_from([0.0, -0.25, 1e-300, 5e-324, 1e150, 1e308, -1e308]),
    st.floats(1e-9, 1e3),
)
SIZE, OTHER = 1 + 3 * 3 + 9, 1 + 3 * 2 + 4


def learned() -> PoolRates:
    rates = PoolRates()
    for number in range(60):
        new = 100 + 50 * number
        rates.learn_prefill((1.0, float(new), new * new / 2), 0.02 + new * 1e-3, Slowdown())
        rates.learn_inter_token(4.0, 0.05)
    return rates


GOOD = learned().learned()


@example([(5 + 1 + 9 + at, -1e3) for at in range(9)])
@example([(6, 1e308), (9, 1e308)])
@given(st.lists(st.tuples(st.integers(0, len(GOOD) - 1), ANY), max_size=len(GOOD)))
def test_whatever_a_pools_speeds_were_said_to_be(changes: list[tuple[int, float]]) -> None:
    """Like what a process writes, but for some of its numbers."""
    assert (GOOD[4], GOOD[5 + SIZE], len(GOOD)) == (SIZE, OTHER, 6 + SIZE + OTHER)
    said = list(GOOD)
    for at, number in changes:
        said[at] = number
    rates = PoolRates()
    rates.take_over(said)
    for _ in range(6):
        rates.learn_prefill((1.0, 1000.0, 5e5), 0.2, Slowdown())
        rates.learn_inter_token(4.0, 0.05)
        rates.learn_prompt(1000)
        rates.learn_output(100.0)
        rates.learn_text(4000, 1000)
    assert 0.0 < rates.prefill_s(1000, 0) < 1e9
    assert 0.0 < rates.inter_token.floor_s < 1e9
    assert rates.output_tokens <= 1e7
    assert rates.prompt_tokens <= 1e7
    assert 1.0 <= rates.bytes_a_token <= 16.0


@given(st.lists(ANY, min_size=4, max_size=4))
@example([1.0, 100.0, 0.0, 1e-300])
def test_whatever_a_workers_speed_was_said_to_be(said: list[float]) -> None:
    speed = Slowdown()
    speed.take_over(said)
    for _ in range(4):
        speed.learn(2.0, 0.5)
        speed.tick()
        assert math.isfinite(speed.value)
        assert 0.0 < speed.value < 100.1
