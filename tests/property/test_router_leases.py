"""After any sequence of placing, first bytes, ends, polls, leaving and coming back: in flight equals open leases."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from gateway import keys
from gateway.errors import NoWorker, UnknownModel
from gateway.kv import KvIndex
from gateway.leases import Lease
from gateway.policy import POLICY_NAMES, make_policy
from gateway.pool import Fleet
from gateway.records import (
    Candidate,
    Chain,
    Decision,
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
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router

SIZE = 16
NAMES = [WorkerId(f"w{number}") for number in range(4)]
PREFIXES = [[seed * 7 + token for token in range(12 * SIZE)] for seed in range(3)]

names = st.sampled_from(NAMES)


class Leases(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.fleet, self.index = Fleet(), KvIndex()
        self.router = Router(self.fleet, self.index, make_policy("seconds", rng=Random(0)), rng=Random(0))
        self.open: list[Lease] = []
        self.settled: list[Lease] = []
        self.told: deque[tuple[Decision, list[Candidate]]] = deque(maxlen=6)

    def tick(self) -> float:
        self.now += 0.25
        return self.now

    @rule(name=names, moved=st.booleans())
    def join(self, name: WorkerId, moved: bool) -> None:
        spec = WorkerSpec(name, f"http://{name}{'-moved' if moved else ''}:8000")
        facts = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=SIZE, kv_blocks=64)
        worker = self.fleet.add(spec, facts, self.tick())
        self.index.bind(worker.slot, block_size=SIZE)

    @rule(name=names)
    def leave(self, name: WorkerId) -> None:
        worker = self.fleet.workers.get(name)
        if worker is not None:
            self.index.release(worker.slot)
        self.fleet.remove(name, self.tick())

    @rule(name=names, what=st.sampled_from(("leaving", "back", "drain", "undrain", "reset", "probed", "tried")))
    def change(self, name: WorkerId, what: str) -> None:
        match what:
            case "leaving":
                self.fleet.leaving(name, self.tick(), reason="away")
            case "back":
                self.fleet.back(name, self.tick())
            case "drain" | "undrain":
                self.fleet.drain(name, self.tick(), on=what == "drain")
            case "reset":
                self.fleet.reset(name, self.tick())
            case "probed":
                self.fleet.probed(name, self.tick(), passed=False)
            case _:
                self.fleet.tried(name, self.tick(), passed=True)

    @rule(name=names, running=st.integers(0, 9), waiting=st.integers(0, 9), usage=st.floats(0, 1))
    def poll(self, name: WorkerId, running: int, waiting: int, usage: float) -> None:
        self.fleet.load(name, LoadSample(running, waiting, usage), self.tick())

    @rule(
        which=st.integers(0, 2),
        cut=st.integers(0, 12 * SIZE),
        stream=st.booleans(),
        known=st.booleans(),
        policy=st.sampled_from(POLICY_NAMES),
        session=st.sampled_from([None, "a", "b"]),
    )
    def place(self, which: int, cut: int, stream: bool, known: bool, policy: str, session: str | None) -> None:
        self.router.policy = make_policy(policy, rng=Random(1))
        tokens = [*PREFIXES[which][:cut], 1]
        if known:
            chain = keys.chain(keys.namespace(), tokens, SIZE)
            blocks = PrefixBlocks((Chain(chain, len(tokens)),), len(tokens), SIZE)
        else:
            blocks = PrefixBlocks((), len(tokens), SIZE, PrefixMode.NONE, "test")
        request = InferenceRequest(Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=stream, session=session)
        try:
            self.open.append(self.router.route(request, blocks, self.tick()))
        except (NoWorker, UnknownModel):
            pool = self.fleet.pools.get("m")
            assert pool is None or not pool.ready
            return
        decision = self.open[-1].decision
        self.told.append((decision, list(decision.candidates)))

    @rule(limit=st.sampled_from([None, 1, 3]))
    def configure(self, limit: int | None) -> None:
        self.fleet.apply(replace(self.fleet.settings, max_inflight=limit))

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def first_byte(self, data: st.DataObject) -> None:
        data.draw(st.sampled_from(self.open)).first_byte(self.tick())

    @precondition(lambda self: self.open)
    @rule(data=st.data(), result=st.sampled_from(Result))
    def end(self, data: st.DataObject, result: Result) -> None:
        lease = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        usage = Usage(lease.decision.prompt_tokens, 5, 0) if result is Result.COMPLETED else None
        lease.settle(Ending(result, 200, self.tick(), usage), started_at=self.now - 1, stages=StageTimes())
        self.settled.append(lease)

    @precondition(lambda self: self.settled)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        lease = data.draw(st.sampled_from(self.settled))
        lease.first_byte(self.tick())
        lease.settle(Ending(Result.TIMED_OUT, 504, self.now), started_at=0.0, stages=StageTimes())

    @rule(seconds=st.floats(0, 5))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.router.expire(self.now)

    @invariant()
    def in_flight_equals_open_leases(self) -> None:
        assert self.router.open_leases == len(self.open)
        workers = {id(lease.worker): lease.worker for lease in self.open}
        workers |= {id(worker): worker for worker in self.fleet.workers.values()}
        for worker in workers.values():
            own = [lease for lease in self.open if lease.worker is worker]
            assert worker.inflight_requests == len(own)
            assert 0 <= worker.pending <= len(own)
            assert worker.inflight_tokens >= 0
            assert worker.unindexed_tokens >= worker.inflight_tokens
            assert worker.kv_tokens >= 0
            assert worker.pending_s >= 0.0
            assert (worker.pending_s > 0.0) == (worker.pending > 0)
            assert 0 <= worker.health.trials <= len(own)
            if not own:
                assert (worker.pending, worker.inflight_tokens, worker.unindexed_tokens) == (0, 0, 0)

    @invariant()
    def what_decisions_read_is_what_is(self) -> None:
        for worker in self.fleet.workers.values():
            assert worker.standing == (
                worker.slowdown, worker.pending_s, worker.head_s, worker.head_since, worker.foreign_s,
                worker.foreign_since, worker.inflight_requests + worker.foreign_requests, worker.regret_s,
                worker.kv_tokens, worker.kv_capacity, worker.unindexed_tokens, worker.evict_discount,
                worker.idle_since_s,
            )  # fmt: skip

    @invariant()
    def a_decision_tells_later_what_it_told_then(self) -> None:
        for decision, candidates in self.told:
            assert list(decision.candidates) == candidates

    @invariant()
    def pools_know_who_is_ready(self) -> None:
        for pool in self.fleet.pools.values():
            before = pool.ready, pool.spare, pool.panic, pool.not_ready, pool.saturated
            pool.crew.renew(0.5)
            assert (pool.ready, pool.spare, pool.panic, pool.not_ready, pool.saturated) == before

    @invariant()
    def slots_are_never_shared(self) -> None:
        workers = {id(worker): worker.slot for worker in self.fleet.workers.values()}
        workers |= {id(lease.worker): lease.worker.slot for lease in self.open}
        assert len(set(workers.values())) == len(workers)

    def teardown(self) -> None:
        for lease in self.open:
            lease.settle(Ending(Result.SHUT_DOWN, 503, self.tick()), started_at=0.0, stages=StageTimes())
        self.open.clear()
        self.router.expire(self.now + 10.0)
        self.in_flight_equals_open_leases()
        assert self.index.stats().speculative == 0


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=60, stateful_step_count=40)
