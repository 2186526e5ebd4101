"""When a worker whose late requests are answered by others counts as one that answers nobody."""

from __future__ import annotations

import pytest

from gateway.pool.silence import SILENT_S, Silence


def test_once_for_all_that_were_under_way_and_never_where_somebody_was_answered() -> None:
    silence = Silence()
    assert silence.overtaken(1.0, 5.0)
    assert not silence.overtaken(2.0, 5.5), "sent before that was seen"
    assert silence.overtaken(6.0, 9.0)
    silence.answered(11.0)
    assert not silence.overtaken(10.0, 12.0), "it answers others"


@pytest.mark.parametrize("taken_after_s", [0.01, 0.06, 0.2])
def test_requests_that_are_taken_away_at_once_need_as_long_as_any(taken_after_s: float) -> None:
    silence, at, failures = Silence(), 0.0, 0
    while failures < 5:
        failures += silence.overtaken(at, at + taken_after_s)
        at += 1.0  # nothing is asked of it most of the time
    asked_s = at * taken_after_s
    assert 5 * SILENT_S <= asked_s + 1e-9 < 5 * (SILENT_S + 2 * taken_after_s)


def test_an_answer_makes_good_for_what_was_not_a_failure_yet() -> None:
    silence = Silence()
    for at in range(100):
        assert not silence.overtaken(float(at), at + 0.9 * SILENT_S)
        silence.answered(at + 0.95 * SILENT_S)
