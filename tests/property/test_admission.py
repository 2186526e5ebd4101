"""Requests that arrive, are cancelled, end, time out, on workers that come, go, fill up and say anything, in any order.

Held throughout: every request is told once (a lease or an error) or was cancelled, or waits; nobody is placed twice;
what is in flight is what is open; the lines keep their bounds; the order of classes and the fairness of tenants.
"""

from __future__ import annotations

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from gateway.admission import Admission, AdmissionSettings, Ticket
from gateway.errors import NoWorker, QueueFull, UnknownModel
from gateway.kv import KvIndex
from gateway.leases import Lease
from gateway.policy import POLICY_NAMES, make_policy
from gateway.pool import Fleet, FleetSettings, Line, PriorityClass
from gateway.records import (
    Ending,
    Endpoint,
    EngineKind,
    InferenceRequest,
    LoadSample,
    NoPrompt,
    PrefixBlocks,
    PrefixMode,
    Result,
    StageTimes,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router

NAMES = [WorkerId(f"w{number}") for number in range(3)]
SIZE = 6
TIMEOUT_S = 20.0
names = st.sampled_from(NAMES)


class Asker:
    def __init__(self, machine: Hall) -> None:
        self.machine = machine
        self.lease: Lease | None = None
        self.error: Exception | None = None
        self.ticket: Ticket | None = None
        self.cancelled = False
        self.since = machine.now

    def placed(self, lease: Lease) -> None:
        assert (self.lease, self.error, self.cancelled) == (None, None, False)
        self.lease = lease
        self.machine.open.append(self)

    def refused(self, error: Exception) -> None:
        assert (self.lease, self.error, self.cancelled) == (None, None, False)
        self.error = error


class Hall(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet = Fleet()
        self.router = Router(self.fleet, KvIndex(), make_policy("seconds", rng=Random(0)), rng=Random(0))
        self.admission = Admission(
            self.router, lambda: None, settings=AdmissionSettings(queue_size=SIZE, queue_timeout_s=TIMEOUT_S)
        )
        self.askers: list[Asker] = []
        self.open: list[Asker] = []

    @rule(name=names)
    def join(self, name: WorkerId) -> None:
        facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16, kv_blocks=64)
        self.fleet.add(WorkerSpec(name, f"http://{name}:8000"), facts, self.now)

    @rule(name=names)
    def leave(self, name: WorkerId) -> None:
        self.fleet.remove(name, self.now)

    @rule(name=names, on=st.booleans())
    def drain(self, name: WorkerId, on: bool) -> None:
        self.fleet.drain(name, self.now, on=on)

    @rule(name=names, running=st.integers(0, 9), waiting=st.integers(0, 9), usage=st.floats(0, 1))
    def poll(self, name: WorkerId, running: int, waiting: int, usage: float) -> None:
        self.fleet.load(name, LoadSample(running, waiting, usage), self.now)

    @rule(limit=st.sampled_from([None, 1, 2, 5]), hold_s=st.sampled_from([0.0, 0.2, 2.0]))
    def configure(self, limit: int | None, hold_s: float) -> None:
        self.fleet.apply(FleetSettings(max_inflight=limit))
        self.admission.apply(AdmissionSettings(hold_s=hold_s, queue_size=SIZE, queue_timeout_s=TIMEOUT_S))

    @rule(policy=st.sampled_from(POLICY_NAMES))
    def change_policy(self, policy: str) -> None:
        self.router.apply(make_policy(policy, rng=Random(1)), self.router.settings)

    @rule(name=names)
    def learn(self, name: WorkerId) -> None:
        worker = self.fleet.workers.get(name)
        if worker is not None:
            for _ in range(5):
                worker.rates.learn_prefill((1.0, 1000.0, 0.0), 1.0, worker.speed)

    @rule(
        tokens=st.integers(1, 9000),
        priority=st.sampled_from([-1, 0, 0, 1]),
        tenant=st.sampled_from([None, "a", "b"]),
        stream=st.booleans(),
        within_s=st.sampled_from([1.0, 1e6]),
    )
    def arrive(self, tokens: int, priority: int, tenant: str | None, stream: bool, within_s: float) -> None:
        request = InferenceRequest(
            Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=stream, priority=priority, tenant=tenant
        )
        blocks = PrefixBlocks((), tokens, 16, PrefixMode.NONE, "test")
        asker = Asker(self)
        try:
            asker.ticket = self.admission.admit(request, blocks, self.now, until=self.now + within_s, waiter=asker)
        except (NoWorker, UnknownModel):
            assert not any(pool.ready for pool in self.fleet.pools.values())
            return
        except QueueFull as error:
            self.full(error)
            return
        assert (asker.ticket is None) == (asker.lease is not None)
        self.askers.append(asker)

    def full(self, error: QueueFull) -> None:
        assert sum(self.admission.depth("m").values()) == SIZE
        assert error.retry_after_s is not None
        assert 1.0 <= error.retry_after_s <= 600.0

    def waiting(self) -> list[Asker]:
        return [a for a in self.askers if a.lease is None and a.error is None and not a.cancelled]

    @rule(which=st.integers(0, 99))
    def cancel(self, which: int) -> None:
        asked = [asker for asker in self.askers if asker.ticket is not None]
        if asked:
            asker = asked[which % len(asked)]
            assert asker.ticket is not None
            self.admission.cancel(asker.ticket)
            asker.cancelled = asker.lease is None and asker.error is None

    @rule(which=st.integers(0, 99), result=st.sampled_from([Result.COMPLETED, Result.CLIENT_GONE]))
    def end(self, which: int, result: Result) -> None:
        if self.open:
            lease = self.open.pop(which % len(self.open)).lease
            assert lease is not None
            lease.settle(Ending(result, 200, self.now), started_at=0.0, stages=StageTimes())

    @rule(which=st.integers(0, 99))
    def first_byte(self, which: int) -> None:
        if self.open:
            lease = self.open[which % len(self.open)].lease
            assert lease is not None
            lease.first_byte(self.now)

    @rule(seconds=st.sampled_from([0.0, 0.05, 0.5, 4.0]))
    def pump(self, seconds: float) -> None:
        self.now += seconds
        self.router.expire(self.now)
        again = self.admission.pump(self.now)
        assert (again is None) == (self.admission.held == 0)
        if again is not None:
            assert self.now < again <= self.now + 0.11
        assert all(self.now - asker.since < TIMEOUT_S for asker in self.waiting())

    @invariant()
    def everybody_is_somewhere_once(self) -> None:
        waiting = self.waiting()
        assert self.admission.held == len(waiting)
        assert all(asker.ticket is not None and asker.ticket.waits for asker in waiting)
        assert sum(self.admission.depth("m").values()) == len(waiting) <= SIZE
        assert self.router.open_leases == len(self.open)
        assert sum(worker.inflight_requests for worker in self.fleet.workers.values()) <= len(self.open)

    def teardown(self) -> None:
        """With workers that are free, everybody goes."""
        self.configure(None, 0.2)
        self.leave(NAMES[0])
        self.join(NAMES[0])
        while self.open or self.waiting():
            before = len(self.open), len(self.waiting())
            while self.open:
                self.end(0, Result.COMPLETED)
            self.now += 0.2
            self.admission.pump(self.now)
            assert (len(self.open), len(self.waiting())) != before or not before[1]
        assert (self.admission.held, self.router.open_leases) == (0, 0)


Hall.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestHall = Hall.TestCase


class Size:
    """A ticket of a line."""

    def __init__(self, tenant: str, priority: PriorityClass, tokens: int, at: float) -> None:
        self.tenant, self.priority, self.tokens, self.arrived_at, self.own_s = (
            tenant,
            priority,
            tokens,
            at,
            tokens / 1e3,
        )


class Turns(RuleBasedStateMachine):
    """One worker that takes whoever is next: classes are strict, tenants get the same tokens while both wait."""

    LARGEST = 500

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.line: Line[Size] = Line(10_000)
        self.both: dict[PriorityClass, dict[str, int]] = {rank: {} for rank in PriorityClass}

    @rule(
        tenant=st.sampled_from("abc"),
        priority=st.sampled_from(list(PriorityClass)),
        tokens=st.lists(st.integers(1, LARGEST), min_size=1, max_size=5),
    )
    def arrive(self, tenant: str, priority: PriorityClass, tokens: list[int]) -> None:
        self.now += 1.0
        for number in tokens:
            self.line.add(Size(tenant, priority, number, self.now), self.now)

    @rule(turns=st.integers(1, 5))
    def serve(self, turns: int) -> None:
        for _ in range(min(turns, len(self.line))):
            ticket = next(self.line.in_order(1))
            assert all(self.line.depth(rank) == 0 for rank in PriorityClass if _before(rank, ticket.priority))
            tenants = {t.tenant for t in self.line if t.priority is ticket.priority}
            got = self.both[ticket.priority]
            if set(got) != tenants:  # who waits has changed: counted anew
                got.clear()
                got.update(dict.fromkeys(tenants, 0))
            got[ticket.tenant] += ticket.tokens
            self.line.served(ticket, ticket.tokens, self.now)
            assert max(got.values()) - min(got.values()) <= 2 * self.LARGEST


def _before(one: PriorityClass, other: PriorityClass) -> bool:
    ranks = list(PriorityClass)
    return ranks.index(one) < ranks.index(other)


Turns.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestTurns = Turns.TestCase
