"""The plan of a workload, and the figures of a demo."""

from __future__ import annotations

from gateway.sim.demo import DemoResult, GatewayCounters, PolicyScore
from gateway.sim.workload import TurnResult, WorkloadSettings, plan


def test_a_seed_repeats_the_plan_and_another_changes_it() -> None:
    first = plan(WorkloadSettings(seed=4))
    assert plan(WorkloadSettings(seed=4)) == first
    assert plan(WorkloadSettings(seed=5)) != first


def test_a_plan_keeps_its_settings() -> None:
    settings = WorkloadSettings(duration_s=60, sessions_per_s=3, applications=5, turns=(2, 4), answer_tokens=(7, 9))
    sessions = plan(settings)
    assert 120 < len(sessions) < 240
    assert len({session.system for session in sessions}) == 5
    assert len({session.system for session in sessions[:5]}) == 5
    assert [s.arrives_s for s in sessions] == sorted(s.arrives_s for s in sessions)
    assert sessions[-1].arrives_s < 60
    assert {len(session.turns) for session in sessions} == {2, 3, 4}
    assert {turn.answer_tokens for session in sessions for turn in session.turns} == {7, 8, 9}
    assert len({turn.user for session in sessions for turn in session.turns}) > 400


def result(*, at: float = 10.0, ttft_s: float | None = 0.5, cached: int = 80, error: str | None = None) -> TurnResult:
    return TurnResult("s", 0, at, ttft_s, 1.0, 100, 10, cached, "w1", error)


def test_a_score_leaves_out_the_warm_up_but_not_its_errors() -> None:
    score = PolicyScore("seconds", measured_from=5.0)
    score.add(result(at=1.0, cached=0))
    score.add(result(at=1.0, ttft_s=None, error="status_503"))
    score.add(result())
    score.add(result(cached=40, ttft_s=0.1))
    score.counters = GatewayCounters(predictions=4, misses=1)
    assert score.summary() == {
        "hit_rate": 0.6,
        "ttft_p50_s": 0.5,
        "ttft_p99_s": 0.5,
        "requests": 2,
        "errors": 1,
        "route_miss_rate": 0.25,
    }
    assert DemoResult({"seconds": score}).failed


def test_a_score_without_requests_has_no_figures() -> None:
    assert PolicyScore("seconds").summary() == {
        "hit_rate": 0.0,
        "ttft_p50_s": None,
        "ttft_p99_s": None,
        "requests": 0,
        "errors": 0,
        "route_miss_rate": None,
    }
