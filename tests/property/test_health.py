"""Health and the budget of retries under any sequence of evidence."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.pool import Breaker, HealthSettings, RetryBudget, WorkerState
from gateway.pool.health import BUDGET_FLOOR, BUDGET_WINDOW_S, LONGEST_DOUBLINGS, Health

SETTINGS = HealthSettings(failures=3, open_s=4.0, slow_start_s=5.0)
STEP_S = 0.5

EVIDENCE = ("failed", "broken", "answered", "sent", "over", "probed", "unprobed", "tried", "untried", "leave", "back")
OPERATOR = ("drain", "undrain", "reset")

steps = st.lists(
    st.tuples(st.sampled_from(EVIDENCE + OPERATOR), st.floats(0, 30), st.floats(0, 60)), min_size=1, max_size=80
)


def do(health: Health, what: str, now: float, ago: float) -> None:
    """One step; requests were sent `ago` seconds before."""
    match what:
        case "failed":
            health.failed(now, sent_at=now - ago, why="x")
        case "broken":
            health.failed(now, sent_at=now - ago, why="x", credited=health.answered(now, sent_at=now - ago))
        case "answered":
            health.answered(now, sent_at=now - ago)
        case "sent" if health.limit is not None:
            health.sent()
        case "over" if health.limit is not None:
            health.over(sent_at=now - ago)
        case "probed" | "unprobed":
            health.probed(now, passed=what == "probed")
        case "tried" | "untried":
            health.tried(now, passed=what == "tried")
        case "leave":
            health.leave(now, "away")
        case "back":
            health.back(now)
        case "drain" | "undrain":
            health.drain(now, on=what == "drain")
        case "reset":
            health.reset(now)


def check(health: Health, now: float) -> None:
    assert (health.state is WorkerState.EJECTED) <= (health.breaker is not Breaker.CLOSED)
    assert (health.limit is not None) <= (health.breaker is Breaker.CLOSED)
    assert health.limit is None or health.limit >= 1
    assert 0 <= health.failures < SETTINGS.failures
    assert health.trials >= 0
    pause = health.half_open_in_s(now)
    assert pause is None or 0 <= pause <= SETTINGS.open_s * 2**LONGEST_DOUBLINGS
    if health.breaker is not Breaker.CLOSED or health.limit is not None or health.failures:
        assert health.watched


@given(steps)
@settings(max_examples=300)
def test_from_any_evidence_it_recovers(sequence: list[tuple[str, float, float]]) -> None:
    """Whatever has happened: when the worker is there, nobody drains it and its trials pass, it is ready after the
    longest pause and a slow start, without a single request."""
    health, now = Health(SETTINGS), 100.0
    for what, wait, ago in sequence:
        now += wait
        health.tick(now)
        do(health, what, now, ago)
        check(health, now)
    health.back(now)
    health.drain(now, on=False)
    for _ in range(health.trials):  # whatever is open ends some time
        health.over(sent_at=now)
    waited = 0.0
    while waited <= SETTINGS.open_s * 2**LONGEST_DOUBLINGS + SETTINGS.slow_start_s + 60 + 3 * STEP_S:
        now, waited = now + STEP_S, waited + STEP_S
        health.tick(now)
        if health.wants_trial:
            health.tried(now, passed=True)
        health.probed(now, passed=True)
        check(health, now)
    assert (health.state, health.breaker, health.limit) == (WorkerState.READY, Breaker.CLOSED, None)
    assert not health.watched


@given(steps)
@settings(max_examples=100)
def test_a_worker_that_always_fails_is_ejected_from_any_state(sequence: list[tuple[str, float, float]]) -> None:
    health, now = Health(SETTINGS), 100.0
    for what, wait, ago in sequence:
        now += wait
        health.tick(now)
        do(health, what, now, ago)
    for _ in range(SETTINGS.failures):
        now += 0.1
        health.failed(now, sent_at=now, why="x")
    assert health.breaker is Breaker.OPEN


@given(
    st.lists(st.tuples(st.floats(0, 4), st.integers(0, 40), st.integers(0, 40)), max_size=60),
    st.floats(0, 1),
)
@settings(max_examples=200)
def test_retries_never_exceed_their_share(sequence: list[tuple[float, int, int]], ratio: float) -> None:
    budget, now = RetryBudget(ratio), 1000.0
    log: list[tuple[int, int, int]] = []
    for wait, requests, wanted in sequence:
        now += wait
        for _ in range(requests):
            budget.request(now)
        made = 0
        for _ in range(wanted):
            if budget.allows(now):
                budget.retry(now)
                made += 1
        log.append((int(now), requests, made))
        budget.tick(now)
        window: list[Any] = [entry for entry in log if entry[0] > int(now) - BUDGET_WINDOW_S]
        sent, retried = sum(entry[1] for entry in window), sum(entry[2] for entry in window)
        assert budget.retried == retried
        # Requests that left the window may have paid for retries that are still in it; nothing new is allowed then.
        assert made == 0 or retried <= BUDGET_FLOOR + ratio * sent
