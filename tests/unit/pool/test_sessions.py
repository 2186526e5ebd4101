"""Session records are bounded in number and in time."""

from __future__ import annotations

from gateway.pool import Sessions
from gateway.records import WorkerId

A, B = WorkerId("a"), WorkerId("b")


def test_the_last_worker_is_remembered_for_the_life_time() -> None:
    sessions = Sessions(ttl_s=10.0)
    sessions.keep("s", A, 0.0)
    sessions.keep("s", B, 5.0)
    assert sessions.find("s", 15.0) == B
    assert sessions.find("s", 15.1) is None
    assert sessions.find("other", 5.0) is None


def test_the_least_recently_used_goes_first() -> None:
    sessions = Sessions(max_sessions=2)
    sessions.keep("old", A, 0.0)
    sessions.keep("busy", A, 1.0)
    sessions.keep("old", A, 2.0)
    sessions.keep("new", B, 3.0)
    assert (sessions.find("busy", 3.0), sessions.find("old", 3.0), len(sessions)) == (None, A, 2)
    assert sessions.by_worker() == {A: 1, B: 1}


def test_expiry_takes_what_is_past_its_time_only() -> None:
    sessions = Sessions(ttl_s=10.0)
    for number in range(5):
        sessions.keep(f"s{number}", A, float(number))
    assert sessions.expire(12.5) == 3
    assert len(sessions) == 2


def test_counts_follow_every_change() -> None:
    sessions = Sessions(max_sessions=3, ttl_s=10)
    for number in range(5):
        sessions.keep(f"s{number}", A, 1.0)
    sessions.keep("s4", B, 2.0)
    sessions.keep("s4", B, 3.0)
    assert sessions.by_worker() == {A: 2, B: 1}
    assert sessions.forget("s3")
    assert not sessions.forget("s3")
    assert sessions.by_worker() == {A: 1, B: 1}
    assert sessions.expire(12.0) == 1
    assert sessions.by_worker() == {B: 1}


def test_a_record_tells_its_age() -> None:
    sessions = Sessions(ttl_s=10)
    sessions.keep("s", A, 1.0)
    assert sessions.record("s", 4.0) == (A, 3.0)
    assert sessions.record("s", 12.0) is None
    assert sessions.record("other", 4.0) is None


def test_a_lower_limit_is_reached_step_by_step() -> None:
    sessions = Sessions()
    for number in range(25_000):
        sessions.keep(str(number), A, 1.0)
    sessions.apply(max_sessions=3, ttl_s=3600.0)
    assert [sessions.expire(1.0) for _ in range(4)] == [10_000, 10_000, 4_997, 0]
    assert sessions.find("24999", 1.0) == A
    assert sessions.find("1", 1.0) is None
    assert sessions.by_worker() == {A: 3}
