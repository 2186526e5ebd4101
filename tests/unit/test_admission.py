"""When a request gets its worker: holding, order, limits, ends of waits."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gateway.admission import Admission, AdmissionSettings, Ticket, WaitsFor
from gateway.errors import DeadlineExceeded, NoWorker, QueueFull, QueueTimeout
from gateway.leases import Booking, Lease
from gateway.policy import make_policy
from gateway.pool import FleetSettings, InterTokenRates, PrefillRates, Worker
from gateway.records import Ending, Endpoint, InferenceRequest, Result, StageTimes, Usage
from gateway.router import Choice, Router
from tests.unit.test_router import Bench, prompt, request

RATES = PrefillRates(1e-6, 0.001, 1e-13), InterTokenRates(0.02, 1e-6)
"""A thousand tokens are a second."""


class Waiter:
    def __init__(self) -> None:
        self.lease: Lease | None = None
        self.error: Exception | None = None

    def placed(self, lease: Lease) -> None:
        assert self.lease is None
        assert self.error is None
        self.lease = lease

    @property
    def granted(self) -> Lease:
        assert self.lease is not None
        return self.lease

    def where(self) -> str | None:
        """Name of its worker, None while it waits."""
        return None if self.lease is None else self.lease.worker.id

    def refused(self, error: Exception) -> None:
        assert self.lease is None
        assert self.error is None
        self.error = error


class Hall(Bench):
    """A bench whose speeds are known, with an admission."""

    def __init__(self, count: int = 2, *, max_inflight: int | None = None, policy: str = "seconds", warm: bool = True,
                 settings: AdmissionSettings | None = None) -> None:  # fmt: skip
        super().__init__(0, policy=policy)
        self.fleet._priors = RATES
        self.fleet.apply(FleetSettings(max_inflight=max_inflight))
        self.wakes = 0
        self.admission = Admission(self.router, self._wake, settings=settings)
        for number in range(count):
            self.join(f"w{number}")
        if warm:
            self.learn()

    def _wake(self) -> None:
        self.wakes += 1

    def learn(self) -> None:
        rates = self.fleet.pools["m"].rates
        for _ in range(6):
            rates.learn_prefill((1.0, 1000.0, 0.0), 1.0, self.worker("w0").speed)
        assert rates.warm

    def ask(
        self, tokens: int | list[int], now: float = 0.0, *, until: float = 1e9, **fields: object
    ) -> tuple[Waiter, Ticket | None]:
        ids = tokens if isinstance(tokens, list) else [self.rng.randrange(1 << 30) for _ in range(tokens)]
        waiter = Waiter()
        asked = request(**({"stream": True} | fields))
        return waiter, self.admission.admit(asked, prompt(ids), now, until=until, waiter=waiter)


def end(waiter: Waiter, now: float) -> None:
    assert waiter.where() is not None
    waiter.granted.settle(Ending(Result.COMPLETED, 200, now, Usage(10, 1, 0)), started_at=0.0, stages=StageTimes())


def test_at_once_while_somebody_is_free() -> None:
    hall = Hall(2)
    first, second = hall.ask(1000)[0], hall.ask(1000)[0]
    assert first.where() is not None
    assert second.where() is not None
    assert first.granted.worker is not second.granted.worker
    assert (hall.admission.held, hall.wakes) == (0, 0)


def test_a_request_waits_until_a_prefill_is_nearly_over() -> None:
    hall = Hall(1)
    first, _ = hall.ask(1000)
    second, ticket = hall.ask(500)
    assert first.where() is not None
    assert (second.where(), ticket is not None, hall.admission.held) == (None, True, 1)
    assert hall.admission.pump(0.1) == pytest.approx(0.2)
    assert second.where() is None
    again = hall.admission.pump(0.75)
    assert again is not None
    assert again < 0.85
    assert hall.admission.pump(0.85) is None
    assert second.where() is not None
    assert hall.admission.held == 0


def test_a_first_byte_and_an_end_ask_for_the_pump() -> None:
    hall = Hall(1)
    first, _ = hall.ask(5000)
    waiting, _ = hall.ask(500)
    wakes = hall.wakes
    assert first.where() is not None
    first.granted.first_byte(0.1)
    assert hall.wakes == wakes + 1
    hall.admission.pump(0.1)
    assert waiting.where() is not None
    end(first, 0.2)
    assert hall.wakes == wakes + 1  # nobody waits


def test_it_waits_for_its_warm_worker_when_that_is_the_faster() -> None:
    hall = Hall(2)
    known = list(range(100_000, 104_000))
    hall.hold("w0", known)
    busy = hall.ask([*known, 1])[0]
    assert busy.where() is not None
    assert busy.where() == "w0"
    long = hall.ask([*known, *range(1500)])[0]  # 1.5 s of work on w0: the next one would wait for it
    follower = hall.ask([*known, 2], 0.3)[0]
    assert long.where() is not None
    assert follower.where() is None
    stranger = hall.ask(800, 0.3)[0]  # w1 is free: it is not kept from somebody whom it suits
    assert stranger.where() is not None
    assert stranger.where() == "w1"
    busy.granted.first_byte(0.4)
    long.granted.first_byte(1.6)
    hall.admission.pump(1.6)
    assert follower.where() is not None
    assert follower.where() == "w0"


def test_not_for_a_warm_worker_that_hangs() -> None:
    hall = Hall(2)
    known = list(range(100_000, 104_000))
    hall.hold("w0", known)
    assert hall.ask([*known, *range(1500)])[0].where() is not None
    follower = hall.ask([*known, 2], 0.1)[0]
    assert follower.where() is None
    hall.admission.pump(3.0)
    assert follower.where() is None
    hall.admission.pump(9.0)  # 7.5 s late
    assert follower.where() is not None
    assert follower.where() == "w1"


@pytest.mark.parametrize(
    "hall",
    [Hall(1, warm=False), Hall(1, settings=AdmissionSettings(hold_s=0.0)), Hall(1, policy="least_load")],
    ids=["not learned", "hold_s 0", "no seconds"],
)
def test_only_room_holds_back_where_waits_are_not_known(hall: Hall) -> None:
    assert all(hall.ask(5000)[0].where() is not None for _ in range(10))
    hall.fleet.apply(FleetSettings(max_inflight=10))
    assert hall.ask(10)[0].where() is None


def test_the_limit_of_a_worker_spills_then_holds() -> None:
    hall = Hall(2, max_inflight=2, settings=AdmissionSettings(hold_s=0.0))
    placed = [hall.ask(10)[0] for _ in range(4)]
    assert [worker.inflight_requests for worker in hall.fleet.workers.values()] == [2, 2]
    waiting, _ = hall.ask(10)
    assert waiting.where() is None
    end(placed[2], 1.0)
    hall.admission.pump(1.0)
    assert waiting.where() is not None
    assert [worker.inflight_requests for worker in hall.fleet.workers.values()] == [2, 2]


def test_a_retry_goes_around_the_line_to_one_with_room() -> None:
    hall = Hall(3, max_inflight=1, settings=AdmissionSettings(hold_s=0.0))
    first, second = hall.ask(10)[0], hall.ask(10)[0]
    tried: set[str] = {first.granted.worker.id}
    lease = hall.route([1, 2, 3], excluded=tried, stream=True)
    assert lease.worker.id not in {*tried, second.granted.worker.id}
    waiting, _ = hall.ask(10)
    assert waiting.where() is None
    # Nobody with room is left: the retry still goes.
    assert hall.route([1, 2, 3], excluded=tried, stream=True).worker.id not in tried


def test_classes_and_tenants_are_served_in_their_order() -> None:
    hall = Hall(1, max_inflight=1, settings=AdmissionSettings(hold_s=0.0))
    running = hall.ask(10)[0]
    asks = {
        "low": hall.ask(10, priority=1)[0], "long": hall.ask(900)[0], "short": hall.ask(100)[0],
        "other": hall.ask(500, tenant="b")[0], "high": hall.ask(5000, priority=-1)[0],
    }  # fmt: skip
    got = []
    for now in range(1, 6):
        end(running, float(now))
        hall.admission.pump(float(now))
        name, running = next((name, waiter) for name, waiter in asks.items() if waiter.where() is not None)
        del asks[name]
        got.append(name)
    assert got == ["high", "short", "other", "long", "low"]


def test_a_full_line_refuses_with_the_time_it_takes_to_drain() -> None:
    hall = Hall(1, settings=AdmissionSettings(queue_size=10))
    hall.ask(1000)
    for _ in range(10):
        hall.ask(2000)
    with pytest.raises(QueueFull) as refused:
        hall.ask(2000)
    assert refused.value.retry_after_s == pytest.approx(20.0, rel=0.01)
    assert (refused.value.status, refused.value.code) == (429, "queue_full")
    assert hall.admission.shed_of("m") == {"queue_full": 1}
    assert sum(hall.admission.depth("m").values()) == 10
    # One of another tenant takes the place of the last.
    newcomer, ticket = hall.ask(2000, tenant="b")
    assert ticket is not None
    assert newcomer.error is None
    assert hall.admission.tenants("m") == {"": 9, "b": 1}
    assert hall.admission.shed_of("m") == {"queue_full": 2}


def test_a_wait_ends_by_its_limit_or_by_the_requests_own_time() -> None:
    hall = Hall(1, settings=AdmissionSettings(queue_timeout_s=5.0))
    hall.ask(100_000)
    late, _ = hall.ask(10)
    own, _ = hall.ask(10, until=2.0)
    hall.admission.pump(1.99)
    assert hall.admission.held == 2
    hall.admission.pump(2.0)
    assert isinstance(own.error, DeadlineExceeded)
    hall.admission.pump(5.0)
    assert isinstance(late.error, QueueTimeout)
    assert late.error.retry_after_s is not None
    assert late.error.retry_after_s >= 1.0
    assert hall.admission.pump(5.1) is None


def test_cancelled_tickets_leave_nothing() -> None:
    hall = Hall(1)
    hall.ask(1000)
    asked = [hall.ask(10) for _ in range(300)]
    for _, ticket in asked:
        assert ticket is not None
        hall.admission.cancel(ticket)
        hall.admission.cancel(ticket)
    assert (hall.admission.held, sum(hall.admission.depth("m").values())) == (0, 0)
    assert hall.admission.pump(10.0) is None
    assert all(waiter.where() is None and waiter.error is None for waiter, _ in asked)
    assert hall.router.open_leases == 1


def test_no_prompt_is_kept_once_nobody_waits() -> None:
    hall = Hall(1)
    running, _ = hall.ask(3000)
    waiter, ticket = hall.ask(100)
    assert ticket is not None
    end(running, 3.0)
    hall.admission.pump(3.0)
    assert (waiter.where(), hall.admission.held) == ("w0", 0)
    kept = weakref.ref(waiter)
    del waiter, ticket
    gc.collect()
    assert kept() is None


def test_nobody_ready_any_more_is_told_at_once() -> None:
    hall = Hall(1)
    hall.ask(1000)
    waiting, _ = hall.ask(10)
    hall.fleet.drain(hall.worker("w0").id, 1.0, on=True)
    hall.admission.pump(1.0)
    assert isinstance(waiting.error, NoWorker)
    hall.fleet.drain(hall.worker("w0").id, 1.0, on=False)
    gone, _ = hall.ask(10)
    hall.fleet.remove(hall.worker("w0").id, 2.0)
    hall.admission.pump(2.0)
    assert isinstance(gone.error, NoWorker)
    assert hall.admission.held == 0


def test_a_worker_that_joins_is_used_by_the_next_pump() -> None:
    hall = Hall(1)
    hall.ask(9000)
    waiting, _ = hall.ask(5000)
    hall.join("w1")
    hall.admission.pump(0.1)
    assert waiting.where() is not None
    assert waiting.where() == "w1"


@pytest.mark.source_only
def test_a_change_of_the_ready_workers_is_worked_off_in_steps_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixty wait for the worker that holds their prompt; behind them is one for the worker that comes."""
    hall = Hall(2)
    hall.fleet.drain(hall.worker("w1").id, 0.0, on=True)
    known = list(range(100_000, 104_000))
    hall.hold("w0", known)
    hall.ask([*known, *range(1500)])  # 1.5 s of work
    warm = [hall.ask([*known, number], priority=-1)[0] for number in range(60)]
    cold = hall.ask(500)[0]
    assert hall.admission.held == 61
    looks: list[str] = []
    consider = hall.router.consider

    def counted(self: Router, asked: InferenceRequest, *rest: Any) -> Choice:
        looks.append(asked.request_id)
        return consider(asked, *rest)

    monkeypatch.setattr(Router, "consider", counted)
    hall.fleet.drain(hall.worker("w1").id, 0.1, on=False)
    steps = 0
    while hall.admission.pump(0.1) == 0.1:
        assert len(looks) <= 30, "a step is bounded"
        assert cold.where() is None, "those before it come first"
        assert looks, "each goes on"
        looks.clear()
        steps += 1
        assert steps < 10
    assert steps >= 2
    assert cold.where() == "w1"
    assert not any(waiter.where() for waiter in warm)
    looks.clear()
    hall.admission.pump(0.11)
    assert len(looks) <= 1, "and are compared by what they cost then"


def test_who_comes_while_a_change_is_worked_off_goes_behind_those_that_wait() -> None:
    hall = Hall(2)
    hall.fleet.drain(hall.worker("w1").id, 0.0, on=True)
    known = list(range(100_000, 104_000))
    hall.hold("w0", known)
    hall.ask([*known, *range(1500)])
    for number in range(60):
        hall.ask([*known, number], priority=-1)
    first = hall.ask(500)[0]
    hall.fleet.drain(hall.worker("w1").id, 0.1, on=False)
    wakes = hall.wakes
    second = hall.ask(500, 0.1)[0]
    assert (first.where(), second.where()) == (None, None)
    assert hall.wakes > wakes
    while hall.admission.pump(0.1) == 0.1:
        pass
    assert (first.where(), second.where()) == ("w1", None)


def test_tokenising_never_waits() -> None:
    hall = Hall(1)
    hall.ask(9000)
    assert hall.ask(10, endpoint=Endpoint.TOKENIZE)[0].where() is not None


def test_a_tenants_own_workers_at_their_limit_hold_its_requests() -> None:
    """Others' workers have room, which is nothing to it."""
    hall = Hall(0, max_inflight=1, warm=False, settings=AdmissionSettings(hold_s=0.0))
    hall.join("w0")
    hall.join("w1")
    worker = hall.worker("w0")
    hall.fleet.remove(worker.id, 0.0)
    hall.fleet.add(replace(worker.spec, tenants=frozenset({"a"})), worker.facts, 0.0)
    other = hall.worker("w1")
    hall.fleet.remove(other.id, 0.0)
    hall.fleet.add(replace(other.spec, tenants=frozenset({"b"})), other.facts, 0.0)
    first = hall.ask(10, tenant="a")[0]
    second = hall.ask(10, tenant="a")[0]
    assert first.where() is not None
    assert (second.where(), second.error) == (None, None)
    end(first, 1.0)
    hall.admission.pump(1.0)
    assert second.where() is not None
    assert second.where() == "w0"


def test_those_whose_own_workers_are_full_do_not_hold_up_who_may_go_elsewhere() -> None:
    """Forty requests wait for one tenant's worker, which is at its limit and computes nothing now; looking at them all
    is more than a step."""
    hall = Hall(0, max_inflight=1, warm=False, settings=AdmissionSettings(hold_s=0.0))
    for name, tenant in (("w0", "a"), ("w1", "b"), ("w2", "b")):
        hall.join(name)
        worker = hall.worker(name)
        hall.fleet.remove(worker.id, 0.0)
        hall.fleet.add(replace(worker.spec, tenants=frozenset({tenant})), worker.facts, 0.0)
    hall.fleet.drain(hall.worker("w2").id, 0.0, on=True)
    for tenant in "ab":
        hall.ask(10, tenant=tenant)[0].granted.first_byte(0.1)
    waiting = [hall.ask(10, 0.1, tenant="a", priority=-1)[0] for _ in range(40)]
    other = hall.ask(10, 0.1, tenant="b")[0]
    assert not any(waiter.where() for waiter in (*waiting, other))
    hall.fleet.drain(hall.worker("w2").id, 0.2, on=False)
    steps = 0
    while hall.admission.pump(0.2) == 0.2:
        steps += 1
        assert steps < 10, "goes on for ever"
    assert other.where() == "w2"
    assert not any(waiter.where() for waiter in waiting)


def test_those_that_prefer_a_busy_one_among_equals_do_not_hold_up_who_may_go() -> None:
    """For forty requests the worker that holds their prompt costs nearly what the idle one does, and they wait for it:
    looked at once, they are not looked at again until the costs have moved."""
    hall = Hall(2)
    known = list(range(100_000, 103_000))
    hall.hold("w0", known)
    hall.fleet.drain(hall.worker("w1").id, 0.0, on=True)
    hall.ask([*known, *range(4500)])  # 4.5 s of work
    waiting = [hall.ask([*known, number], priority=-1)[0] for number in range(40)]
    cold = hall.ask(500)[0]
    hall.fleet.drain(hall.worker("w1").id, 0.1, on=False)
    there, idle = (row[0] for row in hall.router.consider(request(stream=True), prompt([*known, 0]), 0.1).scores)
    now = 0.1 + there - idle - 0.02
    steps = 0
    while hall.admission.pump(now) == now:
        steps += 1
        assert steps < 10, "goes on for ever"
    assert not any(waiter.where() for waiter in waiting)
    assert cold.where() == "w1"


def test_the_waits_of_the_score_are_those_of_the_line() -> None:
    hall = Hall(3)
    for tokens in (3000, 500, 1200, 90):
        hall.ask(tokens)
    for now in (0.0, 0.4, 0.5, 0.9, 7.0):
        choice = hall.router.consider(request(stream=True), prompt([1, 2, 3]), now)
        assert [row[2] for row in choice.scores] == pytest.approx([w.wait_s(now) for w in choice.candidates])


def test_another_policy_is_taken_while_requests_wait() -> None:
    hall = Hall(1)
    hall.ask(9000)
    waiting, _ = hall.ask(10)
    hall.router.apply(make_policy("round_robin", rng=Random(1)), hall.router.settings)
    hall.admission.pump(0.1)
    assert waiting.where() is not None


def outlook(hall: Hall, tokens: int, now: float = 0.0, **fields: object) -> WaitsFor | None:
    """What such a request would wait for; asking changes nothing."""
    asked, blocks = request(**({"stream": True} | fields)), prompt([hall.rng.randrange(1 << 30) for _ in range(tokens)])
    held, leases = hall.admission.held, hall.router.open_leases
    told = hall.admission.waits_for(asked, hall.router.consider(asked, blocks, now))
    assert (hall.admission.held, hall.router.open_leases) == (held, leases)
    return told


def test_what_a_request_would_wait_for() -> None:
    hall = Hall(1)
    assert outlook(hall, 500) is None
    hall.ask(1000)
    assert outlook(hall, 500) is WaitsFor.WAIT
    assert outlook(hall, 500, 0.9) is None, "the prefill is nearly over"
    hall.ask(500)
    assert outlook(hall, 500) is WaitsFor.QUEUE
    for endpoint in (Endpoint.TOKENIZE, Endpoint.DETOKENIZE):
        assert outlook(hall, 5, endpoint=endpoint) is None
        assert hall.ask(5, endpoint=endpoint)[0].where() is not None, "these never wait"
    full = Hall(1, max_inflight=1, warm=False)
    full.ask(10)
    assert outlook(full, 10) is WaitsFor.ROOM


def test_what_must_not_wait_is_placed_at_once_or_not_at_all() -> None:
    hall = Hall(1)
    copy = request(stream=True)
    lease = hall.admission.at_once(copy, prompt([1] * 1000), 0.0)
    assert lease is not None
    assert hall.admission.at_once(copy, prompt([2] * 1000), 0.0) is None, "the worker is busy for a second"
    waiting, ticket = hall.ask(1000)
    assert ticket is not None
    lease.settle(Ending(Result.COMPLETED, 200, 1.0, Usage(10, 1, 0)), started_at=0.0, stages=StageTimes())
    assert hall.admission.at_once(copy, prompt([3] * 1000), 1.0) is None, "somebody waits"
    hall.admission.pump(1.0)
    assert waiting.where() == "w0"
    assert hall.router.open_leases == 1


class Buggy:
    """Somebody who is told of bookings and fails at it."""

    def __init__(self, at: str) -> None:
        self.at = at

    def placed(self, booking: Booking) -> None:
        if self.at == "placed":
            raise RuntimeError("seeded bug")

    def prefilled(self, booking: Booking) -> None: ...

    def closed(self, booking: Booking) -> None: ...

    def pinned(self, session: str, worker: Worker) -> None:
        if self.at == "pinned":
            raise RuntimeError("seeded bug")


@pytest.mark.parametrize("at", ["placed", "pinned"])
def test_a_bug_in_placing_a_request_that_waits_is_told_to_it_and_holds_nothing(at: str) -> None:
    hall = Hall(1, max_inflight=1)
    first, _ = hall.ask(1000)
    waiting = [hall.ask(1000, session="s")[0] for _ in range(2)]
    hall.router.watch(Buggy(at))
    end(first, 1.0)
    assert hall.admission.pump(1.0) is None
    assert [str(waiter.error) for waiter in waiting] == ["seeded bug"] * 2
    assert (hall.admission.held, hall.router.open_leases, hall.worker("w0").inflight_requests) == (0, 0, 0)
    assert hall.index.stats().speculative == 0


@pytest.mark.parametrize("at", ["placed", "pinned"])
def test_a_bug_in_placing_a_request_at_once_holds_nothing(at: str) -> None:
    hall = Hall(1)
    hall.router.watch(Buggy(at))
    with pytest.raises(RuntimeError, match="seeded bug"):
        hall.ask(1000, session="s")
    assert (hall.router.open_leases, hall.worker("w0").inflight_requests) == (0, 0)
    assert hall.index.stats().speculative == 0


@pytest.mark.source_only
def test_a_bug_in_looking_at_the_line_leaves_nobody_in_it_whom_no_one_waits_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its lease would be nobody's."""
    hall = Hall(1, max_inflight=1)
    first, _ = hall.ask(1000)

    def broken(*_: object) -> None:
        raise RuntimeError("seeded bug")

    with monkeypatch.context() as patched:
        patched.setattr(Admission, "_advance", broken)
        with pytest.raises(RuntimeError, match="seeded bug"):
            hall.ask(1000)
    end(first, 1.0)
    hall.admission.pump(1.0)
    assert (hall.admission.held, hall.router.open_leases) == (0, 0)
