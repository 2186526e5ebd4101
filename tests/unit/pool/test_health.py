"""Whether a worker may get requests: every change of state, pools in trouble, and the budget of retries."""

from __future__ import annotations

import pytest

from gateway.errors import WORKER_BUSY, WORKER_STATUS, DeadlineExceeded, WorkerTimeout
from gateway.pool import Breaker, Fleet, FleetSettings, HealthSettings, Reservation, Worker, WorkerState
from gateway.pool.health import BUDGET_FLOOR, FORGET_S, Evidence, Health, RetryBudget, evidence_of
from gateway.records import Ending, EngineKind, Result, WorkerFacts, WorkerId, WorkerSpec

SETTINGS = HealthSettings(failures=3, open_s=10.0, slow_start_s=10.0, panic_ratio=0.5)


def health() -> Health:
    return Health(SETTINGS)


def state(worker: Health) -> WorkerState:
    """A call, so that a type checker does not take it for unchanged; the same below."""
    return worker.state


def breaker(worker: Health) -> Breaker:
    return worker.breaker


def limit(worker: Health) -> int | None:
    return worker.limit


def fail(worker: Health, now: float, *, times: int = 1, why: str = WORKER_STATUS) -> None:
    for _ in range(times):
        worker.failed(now, sent_at=now, why=why)


def ejected(at: float = 0.0) -> Health:
    worker = health()
    fail(worker, at, times=3)
    assert breaker(worker) is Breaker.OPEN
    return worker


def recovered(at: float = 20.0) -> Health:
    worker = ejected()
    worker.tick(at)
    worker.tried(at, passed=True)
    return worker


# --------------------------------------------------------------------------- evidence


@pytest.mark.parametrize(
    ("result", "status", "code", "evidence"),
    [
        (Result.COMPLETED, 200, None, Evidence.GOOD),
        (Result.COMPLETED, 400, None, Evidence.NONE),
        (Result.COMPLETED, 429, None, Evidence.NONE),
        (Result.WORKER_FAILED, 500, WORKER_STATUS, Evidence.BAD),
        (Result.WORKER_FAILED, 503, WORKER_STATUS, Evidence.BAD),
        (Result.WORKER_FAILED, 501, WORKER_STATUS, Evidence.NONE),
        (Result.WORKER_FAILED, 429, WORKER_BUSY, Evidence.NONE),
        (Result.WORKER_FAILED, 503, WORKER_BUSY, Evidence.NONE),
        (Result.WORKER_FAILED, 502, "worker_unreachable", Evidence.BAD),
        (Result.WORKER_FAILED, 200, "worker_broken", Evidence.BAD),
        (Result.TIMED_OUT, 504, WorkerTimeout.code, Evidence.BAD),
        (Result.TIMED_OUT, 504, DeadlineExceeded.code, Evidence.NONE),
        (Result.CLIENT_GONE, 499, None, Evidence.NONE),
        (Result.REFUSED, 400, "bad_request", Evidence.NONE),
        (Result.SHUT_DOWN, 503, "shutting_down", Evidence.NONE),
    ],
)
def test_what_an_end_says_of_its_worker(result: Result, status: int, code: str | None, evidence: Evidence) -> None:
    assert evidence_of(Ending(result, status, 1.0, error_code=code)) is evidence


# --------------------------------------------------------------------------- the breaker


def test_failures_degrade_then_eject() -> None:
    worker = health()
    fail(worker, 1.0)
    assert (state(worker), worker.watched) == (WorkerState.READY, True)
    fail(worker, 2.0)
    assert (state(worker), worker.reason) == (WorkerState.DEGRADED, WORKER_STATUS)
    fail(worker, 3.0, why="worker_broken")
    assert (state(worker), worker.reason, breaker(worker)) == (WorkerState.EJECTED, "worker_broken", Breaker.OPEN)
    assert worker.half_open_in_s(4.0) == 9.0
    assert [(change.at, change.state) for change in worker.changes] == [
        (2.0, WorkerState.DEGRADED),
        (3.0, WorkerState.EJECTED),
    ]


def test_answers_make_good_for_failures() -> None:
    worker = health()
    for now in range(20):
        fail(worker, float(now))
        assert worker.answered(float(now), sent_at=float(now))
    assert (state(worker), worker.failures, worker.watched) == (WorkerState.READY, 0, False)
    fail(worker, 30.0, times=2)
    worker.answered(31.0, sent_at=31.0)
    assert state(worker) is WorkerState.DEGRADED  # until all is made good
    worker.answered(32.0, sent_at=32.0)
    assert state(worker) is WorkerState.READY


def test_a_worker_that_fails_more_often_than_it_answers_is_ejected() -> None:
    worker = health()
    for now in range(10):
        fail(worker, float(now), times=2)
        if breaker(worker) is Breaker.OPEN:
            return
        worker.answered(float(now), sent_at=float(now))
    pytest.fail("two thirds fail")


def test_rare_failures_have_nothing_to_do_with_each_other() -> None:
    worker = health()
    for attempt in range(10):
        fail(worker, attempt * (FORGET_S + 1))
    assert worker.failures == 1
    worker.tick(10 * FORGET_S + 11)
    assert (worker.failures, worker.watched) == (0, False)


def test_streams_that_break_count_although_they_began() -> None:
    """A first byte that made good for a failure is taken back: three broken streams are three failures."""
    worker = health()
    for now in (1.0, 2.0, 3.0):
        assert breaker(worker) is Breaker.CLOSED
        credited = worker.watched and worker.answered(now, sent_at=now)
        worker.failed(now, sent_at=now, why="worker_broken", credited=credited)
    assert breaker(worker) is Breaker.OPEN


def test_the_way_back_without_traffic() -> None:
    worker = ejected(at=0.0)
    worker.tick(9.9)
    assert (breaker(worker), worker.wants_trial) == (Breaker.OPEN, False)
    worker.tick(10.0)
    assert (breaker(worker), worker.wants_trial, state(worker)) == (Breaker.HALF_OPEN, True, WorkerState.EJECTED)
    worker.tried(11.0, passed=True)
    assert (breaker(worker), state(worker), worker.reason) == (Breaker.CLOSED, WorkerState.DEGRADED, "slow_start")
    assert limit(worker) == 1
    worker.tick(20.9)
    assert state(worker) is WorkerState.DEGRADED
    worker.tick(21.0)
    assert (state(worker), limit(worker), worker.watched) == (WorkerState.READY, None, False)


def test_failed_trials_double_the_pause_with_a_bound() -> None:
    worker, now, pauses = ejected(), 0.0, []
    for _ in range(8):
        pause = worker.half_open_in_s(now)
        assert pause is not None
        pauses.append(pause)
        now += pause
        worker.tick(now)
        worker.tried(now, passed=False)
    assert pauses == [10, 20, 40, 80, 160, 160, 160, 160]
    assert worker.reason == "trial_failed"


def test_a_trial_that_comes_late_changes_nothing() -> None:
    worker = recovered()
    worker.tried(21.0, passed=False)
    assert breaker(worker) is Breaker.CLOSED
    closed = health()
    closed.tried(1.0, passed=False)
    assert state(closed) is WorkerState.READY


def test_a_request_that_is_answered_all_the_same_closes_the_breaker() -> None:
    worker = ejected(at=5.0)
    worker.answered(6.0, sent_at=4.0)
    assert breaker(worker) is Breaker.OPEN  # sent before it opened
    worker.answered(6.0, sent_at=5.5)
    assert (breaker(worker), worker.reason) == (Breaker.CLOSED, "slow_start")


def test_what_was_sent_before_says_nothing() -> None:
    worker = ejected(at=5.0)
    fail(worker, 5.0, times=300)
    worker.tick(15.0)
    worker.failed(15.5, sent_at=4.0, why=WorkerTimeout.code)
    assert breaker(worker) is Breaker.HALF_OPEN
    worker.tried(16.0, passed=True)
    worker.failed(17.0, sent_at=4.0, why=WorkerTimeout.code)
    assert breaker(worker) is Breaker.CLOSED
    worker.failed(17.0, sent_at=16.5, why=WorkerTimeout.code)
    assert (breaker(worker), worker.half_open_in_s(17.0)) == (Breaker.OPEN, 20.0)


def test_a_failure_half_open_ejects_for_longer() -> None:
    worker = ejected(at=0.0)
    worker.tick(10.0)
    worker.failed(12.0, sent_at=11.0, why="worker_broken")
    assert (breaker(worker), worker.half_open_in_s(12.0)) == (Breaker.OPEN, 20.0)


def test_long_after_a_recovery_it_is_ejected_as_for_the_first_time() -> None:
    worker = recovered(at=20.0)
    worker.tick(40.0)
    fail(worker, 60.0, times=3)
    assert worker.half_open_in_s(60.0) == 20.0
    worker.tick(80.0)
    worker.tried(80.0, passed=True)
    worker.tick(100.0)
    fail(worker, 181.0, times=3)
    assert worker.half_open_in_s(181.0) == 10.0


# --------------------------------------------------------------------------- slow start


def test_a_slow_start_waits_for_an_answer_then_doubles() -> None:
    worker = recovered(at=20.0)
    worker.sent()
    assert (limit(worker), worker.full) == (1, True)
    worker.tick(29.0)
    assert limit(worker) == 1  # nothing answered yet
    worker.tick(31.0)
    assert state(worker) is WorkerState.DEGRADED  # its time is over, but the one request shows nothing yet
    worker.answered(31.0, sent_at=21.0)
    worker.over(sent_at=21.0)
    worker.tick(31.5)
    assert (state(worker), limit(worker)) == (WorkerState.READY, None)

    worker = recovered(at=20.0)
    limits = []
    worker.sent()
    worker.answered(20.0, sent_at=20.0)
    for second in range(1, 10):
        worker.tick(20.0 + second)
        limits.append(limit(worker))
    assert limits == [2, 4, 8, 16, 32, 64, 128, 256, 512]


def test_requests_from_before_take_no_place_in_a_slow_start() -> None:
    worker = recovered(at=20.0)
    worker.over(sent_at=3.0)
    assert worker.trials == 0
    worker.sent()
    worker.over(sent_at=3.0)
    assert worker.trials == 1


# --------------------------------------------------------------------------- probes, members, operators


def test_one_doubtful_failure_does_not_eject_again_who_has_just_recovered() -> None:
    """With a cold cache and one request at a time it is late by right, and answers nobody else meanwhile."""
    worker = recovered(10.0)
    worker.failed(11.0, sent_at=10.5, why="silent", doubtful=True)
    assert state(worker) is WorkerState.DEGRADED
    assert worker.answered(12.0, sent_at=11.0), "made good"
    for at in (13.0, 13.5, 14.0):
        assert state(worker) is WorkerState.DEGRADED
        worker.failed(at, sent_at=at - 0.4, why="silent", doubtful=True)
    assert (state(worker), worker.reason) == (WorkerState.EJECTED, "silent")


def test_a_certain_failure_does() -> None:
    worker = recovered(10.0)
    worker.failed(11.0, sent_at=10.5, why="worker_broken")
    assert state(worker) is WorkerState.EJECTED


def test_probes_eject_only_where_requests_are_silent() -> None:
    worker = health()
    worker.probed(1.0, passed=False)
    assert state(worker) is WorkerState.READY
    worker.probed(2.0, passed=False)
    assert (state(worker), worker.reason) == (WorkerState.DEGRADED, "probe_failed")
    worker.answered(2.5, sent_at=2.0)
    assert state(worker) is WorkerState.READY
    for now in (3.0, 4.0):
        worker.probed(now, passed=False)
    worker.probed(5.0, passed=True)
    assert state(worker) is WorkerState.READY
    for now in (6.0, 7.0, 8.0):
        worker.probed(now, passed=False)
    assert (state(worker), worker.reason) == (WorkerState.EJECTED, "probe_failed")


def test_a_probe_that_passes_does_not_excuse_failing_requests() -> None:
    worker = health()
    for now in (1.0, 2.0, 3.0):
        worker.probed(now, passed=True)
        fail(worker, now)
        worker.probed(now, passed=True)
    assert state(worker) is WorkerState.EJECTED
    worker.probed(4.0, passed=True)
    assert state(worker) is WorkerState.EJECTED


def test_gone_and_back() -> None:
    worker = health()
    fail(worker, 1.0, times=2)
    worker.leave(2.0, "away")
    assert (state(worker), worker.reason) == (WorkerState.GONE, "away")
    worker.back(3.0)
    assert (state(worker), worker.failures) == (WorkerState.READY, 0)
    worker = ejected()
    worker.leave(1.0, "away")
    worker.tick(10.0)
    assert not worker.wants_trial  # nobody is there to try
    worker.back(12.0)
    assert (state(worker), worker.reason) == (WorkerState.DEGRADED, "slow_start")


def test_draining_lasts_over_a_restart_and_an_ejection() -> None:
    worker = health()
    worker.drain(1.0, on=True)
    worker.leave(2.0, "away")
    worker.back(3.0)
    states = [state(worker)]
    fail(worker, 4.0, times=3)
    states.append(state(worker))
    worker.drain(5.0, on=False)
    states.append(state(worker))
    assert states == [WorkerState.DRAINING, WorkerState.DRAINING, WorkerState.EJECTED]


def test_reset_forgets() -> None:
    worker = ejected()
    worker.tick(10.0)
    worker.tried(10.0, passed=False)
    worker.reset(11.0)
    assert (state(worker), limit(worker), worker.watched) == (WorkerState.READY, None, False)
    fail(worker, 12.0, times=3)
    assert worker.half_open_in_s(12.0) == 10.0


def test_changes_are_bounded() -> None:
    worker = health()
    for now in range(100):
        worker.drain(float(now), on=now % 2 == 0)
    assert len(worker.changes) == 16
    assert worker.changes[-1].at == 99.0


# --------------------------------------------------------------------------- pools


def fleet_of(count: int, settings: HealthSettings = SETTINGS) -> tuple[Fleet, list[Worker]]:
    fleet = Fleet(FleetSettings(health=settings))
    facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16)
    return fleet, [
        fleet.add(WorkerSpec(WorkerId(f"w{n}"), f"http://w{n}:8000"), facts, 0.0) for n in range(1, count + 1)
    ]


def eject(fleet: Fleet, *workers: Worker, now: float = 1.0) -> None:
    for worker in workers:
        for _ in range(SETTINGS.failures):
            fleet.ended(worker, Ending(Result.WORKER_FAILED, 500, now), sent_at=now, credited=False)


def ready(fleet: Fleet) -> list[str]:
    return [worker.id for worker in fleet.pools["m"].ready]


def test_an_ejected_worker_is_left_out_until_it_recovers() -> None:
    fleet, (w1, _, _) = fleet_of(3)
    eject(fleet, w1)
    pool = fleet.pools["m"]
    assert (ready(fleet), dict(pool.not_ready), pool.panic) == (["w2", "w3"], {"w1": "ejected"}, False)
    fleet.tick(11.0)
    assert ready(fleet) == ["w2", "w3"]
    fleet.tried(w1.id, 11.0, passed=True)
    assert ready(fleet) == ["w1", "w2", "w3"]


def test_above_the_panic_ratio_all_are_used() -> None:
    fleet, (w1, w2, w3, w4) = fleet_of(4)
    eject(fleet, w1, w2)
    assert ready(fleet) == ["w3", "w4"]
    eject(fleet, w3)
    assert (ready(fleet), fleet.pools["m"].panic) == (["w1", "w2", "w3", "w4"], True)
    fleet.drain(w4.id, 2.0, on=True)
    assert ready(fleet) == ["w1", "w2", "w3"]  # what an operator took out stays out
    fleet.answered(w1, 3.0, sent_at=2.5)
    fleet.answered(w2, 3.0, sent_at=2.5)
    assert (ready(fleet), fleet.pools["m"].panic) == (["w1", "w2"], False)


def test_a_single_worker_is_never_left_out_unless_panic_is_off() -> None:
    fleet, (w1,) = fleet_of(1)
    eject(fleet, w1)
    assert ready(fleet) == ["w1"]
    fleet, (w1,) = fleet_of(1, HealthSettings(failures=3, panic_ratio=1.0))
    eject(fleet, w1)
    assert ready(fleet) == []


def test_a_slow_start_limits_the_share() -> None:
    fleet, (w1, _) = fleet_of(2)
    eject(fleet, w1)
    fleet.tick(11.0)
    fleet.tried(w1.id, 11.0, passed=True)
    first = Reservation(100, 0, 0, 1.0, True, sent_at=12.0)
    fleet.reserve(w1, first, 12.0)
    pool = fleet.pools["m"]
    assert (ready(fleet), [w.id for w in pool.spare], dict(pool.not_ready)) == (["w2"], ["w1"], {"w1": "slow_start"})
    fleet.release(w1, first, 13.0)
    fleet.release(w1, first, 13.0)
    assert (ready(fleet), pool.spare) == (["w1", "w2"], ())


def test_a_slow_start_limits_nothing_where_nobody_else_is() -> None:
    fleet, (w1, w2) = fleet_of(2)
    eject(fleet, w1)
    fleet.tick(11.0)
    fleet.tried(w1.id, 11.0, passed=True)
    fleet.reserve(w1, Reservation(100, 0, 0, 1.0, True, sent_at=12.0), 12.0)
    fleet.leaving(w2.id, 12.0, reason="away")
    assert ready(fleet) == ["w1"]


def test_one_that_joins_anew_has_no_past() -> None:
    fleet, (w1, _) = fleet_of(2)
    eject(fleet, w1)
    fleet.add(w1.spec, w1.facts, 5.0)
    assert (w1.state, fleet.workers[WorkerId("w1")].state) == (WorkerState.GONE, WorkerState.READY)
    assert ready(fleet) == ["w2", "w1"]


# --------------------------------------------------------------------------- budget


def retries_made(budget: RetryBudget, now: float, wanted: int) -> int:
    made = 0
    for _ in range(wanted):
        if budget.allows(now):
            budget.retry(now)
            made += 1
    return made


def test_a_quiet_pool_may_always_retry_a_little() -> None:
    budget = RetryBudget(0.2)
    assert retries_made(budget, 0.0, 50) == BUDGET_FLOOR
    assert budget.refused == 40
    assert retries_made(budget, 9.9, 50) == 0
    assert retries_made(budget, 10.0, 50) == BUDGET_FLOOR


def test_retries_are_a_share_of_requests() -> None:
    budget = RetryBudget(0.2)
    for request in range(1000):
        budget.request(request / 100)
    assert retries_made(budget, 9.99, 1000) == BUDGET_FLOOR + 200
    # The window moves on: a second's requests leave it, all of its retries stay.
    assert retries_made(budget, 10.0, 1000) == 0
    assert retries_made(budget, 25.0, 1000) == BUDGET_FLOOR
    none = RetryBudget(0.0)
    for _ in range(1000):
        none.request(1.0)
    assert retries_made(none, 1.0, 1000) == BUDGET_FLOOR


def test_a_clock_that_starts_anywhere_and_long_pauses() -> None:
    budget = RetryBudget(1.0)
    budget.request(1e9)
    assert retries_made(budget, 1e9, 100) == BUDGET_FLOOR + 1
    assert retries_made(budget, 2e9, 100) == BUDGET_FLOOR
    assert budget.retried == BUDGET_FLOOR
