"""Who may get a second copy of a late request: another address that would begin at once, and never in an overload."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest
from msgspec import structs

from gateway.admission import Admission, AdmissionSettings
from gateway.edge import HedgeRules
from gateway.edge.hedge import choose, late_after, may_be_doubled
from gateway.kv import KvIndex
from gateway.leases import Lease
from gateway.policy import make_policy
from gateway.pool import Fleet, FleetSettings, HedgeRule, NoSecond, Refusal, Reservation
from gateway.records import (
    Chain,
    Endpoint,
    EngineKind,
    InferenceRequest,
    LoadSample,
    NoPrompt,
    PrefixBlocks,
    TextPrompt,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Choice, Router

ASKED = InferenceRequest(Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=True)
BLOCKS = PrefixBlocks((Chain([], 100),), 100, 16)


class Stand:
    """A pool of workers, one of which has a request and is late."""

    def __init__(self, names: str = "ab", *, request: InferenceRequest = ASKED, **settings: Any) -> None:
        self.fleet, rng = Fleet(FleetSettings(**settings)), Random(1)
        self.router = Router(self.fleet, KvIndex(), make_policy("seconds", rng=rng), rng=rng)
        self.admission = Admission(self.router, lambda: None, settings=AdmissionSettings(hold_s=0.2))
        self.request = request
        for name in names:
            self.join(name, f"http://{name}:8000")
        self.late: Lease = self.router.route(request, BLOCKS, 0.0)

    def join(self, name: str, url: str, **facts: Any) -> None:
        known = WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=16, kv_blocks=1000)
        self.fleet.add(WorkerSpec(WorkerId(name), url), replace(known, **facts), 0.0)

    @property
    def other(self) -> WorkerId:
        return next(name for name in self.fleet.workers if name != self.late.worker.id)

    def chosen(self, now: float = 1.0) -> Choice | Refusal:
        return choose(self.router, self.admission, self.request, BLOCKS, now, late=self.late)


def test_the_best_other_worker() -> None:
    stand = Stand()
    found = stand.chosen()
    assert isinstance(found, Choice)
    assert found.worker.id == stand.other
    assert stand.router.open_leases == 1, "nothing is reserved yet"


def test_another_name_for_the_same_address_is_no_other_worker() -> None:
    stand = Stand("a")
    stand.join("b", "http://a:8000")
    assert stand.chosen() is Refusal.NO_WORKER


def test_nobody_else() -> None:
    assert Stand("a").chosen() is Refusal.NO_WORKER
    stand = Stand()
    stand.fleet.drain(stand.other, 0.5, on=True)
    assert stand.chosen() is Refusal.NO_WORKER


def test_not_while_too_many_are_ejected() -> None:
    stand = Stand("abc")
    for worker in list(stand.fleet.workers.values())[:2]:
        for _ in range(5):
            worker.health.failed(0.5, sent_at=0.4, why="test")
    stand.fleet.pools["m"].crew.renew(0.5)
    assert stand.fleet.pools["m"].panic
    assert stand.chosen() is Refusal.NO_WORKER


def test_not_where_it_would_wait() -> None:
    stand = Stand()
    worker = stand.fleet.workers[stand.other]
    worker.observe(LoadSample(3, 1, 0.1), 0.5)
    assert stand.chosen() is Refusal.BUSY
    worker.observe(LoadSample(3, 0, 0.1), 0.6)
    assert isinstance(stand.chosen(), Choice)
    stand.fleet.reserve(worker, Reservation(5000, 0, 0, 0.5, True, 0.9), 0.9)
    assert stand.chosen() is Refusal.BUSY


def test_not_while_others_wait_at_the_gateway() -> None:
    stand = Stand(max_inflight=1)
    now = 0.5
    stand.router.route(ASKED, BLOCKS, now)  # both are full

    class Waiter:
        def placed(self, lease: Lease) -> None: ...

        def refused(self, error: Exception) -> None: ...

    assert stand.chosen() is Refusal.ROOM
    assert stand.admission.admit(ASKED, BLOCKS, now, until=60.0, waiter=Waiter()) is not None
    assert stand.chosen() is Refusal.QUEUE


def test_not_while_the_pool_is_nearly_full() -> None:
    stand = Stand(max_inflight=5)
    for _ in range(6):
        assert isinstance(stand.chosen(0.1), Choice)
        worker = min(stand.fleet.workers.values(), key=lambda worker: worker.inflight_requests)
        stand.fleet.reserve(worker, Reservation(1, 0, 0, 0.0, True, 0.1), 0.1)
    stand.fleet.reserve(worker, Reservation(1, 0, 0, 0.0, True, 0.1), 0.1)
    assert stand.chosen(0.1) is Refusal.ROOM, "eight of ten"
    stand.fleet.apply(FleetSettings(max_inflight=50))
    assert isinstance(stand.chosen(0.1), Choice)


def test_not_where_its_kv_cache_is_nearly_full() -> None:
    stand = Stand()
    stand.fleet.workers[stand.other].observe(LoadSample(3, 0, 0.9), 0.5)
    assert stand.chosen() is Refusal.ROOM


def test_not_without_budget_and_no_retry_is_refused_for_it() -> None:
    stand = Stand()
    budget = stand.fleet.pools["m"].retries
    while budget.has_room(1.0):
        budget.retry(1.0)
    assert stand.chosen(1.0) is Refusal.BUDGET
    assert budget.refused == 0
    assert isinstance(stand.chosen(20.0), Choice), "the window has passed"


def test_not_on_an_engine_that_would_keep_the_session() -> None:
    stand = Stand("a", request=structs.replace(ASKED, session="s"))
    stand.join("b", "http://b:8000", keeps_sessions=True)
    assert stand.chosen() is Refusal.NO_WORKER


def test_a_second_copy_leaves_session_and_means_alone() -> None:
    stand = Stand(request=structs.replace(ASKED, session="s"))
    pool, now = stand.fleet.pools["m"], 1.0
    found = stand.chosen()
    assert isinstance(found, Choice)
    mean, sent = pool.rates.prompt_tokens, pool.retries._requests
    lease = stand.router.reserve(found, stand.request, BLOCKS, now, beside=stand.late)
    assert (lease.decision.beside, lease.decision.affinity) == (stand.late.worker.id, "moved_late")
    assert stand.router.sessions.find("s", now) == stand.late.worker.id
    assert (pool.rates.prompt_tokens, pool.retries._requests) == (mean, sent)


@pytest.mark.parametrize(
    ("change", "may"),
    [
        ({}, True),
        ({"endpoint": Endpoint.EMBEDDINGS, "prompt": TextPrompt(("a",))}, True),
        ({"endpoint": Endpoint.RESPONSES}, False),
        ({"endpoint": Endpoint.TOKENIZE}, False),
        ({"choices": 2}, False),
        ({"prompt": TextPrompt(("a", "b"))}, False),
        ({"engine_session": True}, False),
        ({"endpoint": Endpoint.GENERATE, "prompt": NoPrompt("session")}, False),
        ({"session": "s"}, True),
    ],
)
def test_what_may_be_computed_twice(change: dict[str, Any], may: bool) -> None:
    assert may_be_doubled(structs.replace(ASKED, **change)) is may


def test_the_models_word_counts_before_the_paths() -> None:
    rules = HedgeRules(
        0.0, 0.5, paths={Endpoint.CHAT: (0.9, None), Endpoint.SCORE: (0.9, 2.0)}, models={"fast": (None, 0.1)}
    )
    assert rules.any
    score = structs.replace(ASKED, endpoint=Endpoint.SCORE)
    assert rules.of(ASKED) == HedgeRule(0.9, 0.5)
    assert rules.of(structs.replace(ASKED, model="fast")) == HedgeRule(0.9, 0.1)
    assert rules.of(score) == HedgeRule(0.9, 2.0)
    assert rules.of(structs.replace(score, model="fast")) == HedgeRule(0.9, 0.1)
    assert rules.of(structs.replace(ASKED, endpoint=Endpoint.COMPLETIONS)) is None
    assert rules.of(structs.replace(ASKED, choices=3)) is None
    assert not HedgeRules(0.0, 0.5, models={"fast": (None, 0.1)}).any
    assert HedgeRules(0.0, 0.5, models={"fast": (0.99, None)}).any


HALF = HedgeRules(0.5, 0.001)


@pytest.mark.parametrize("stream", [True, False])
def test_what_is_foretold_of_a_request_is_what_happens_to_it(stream: bool) -> None:
    asked = structs.replace(ASKED, stream=stream)
    stand = Stand(request=asked)
    for _ in range(40):
        stand.late.hedging.began(stand.late.kind, 1.0, 3.0)
    told = late_after(HALF, asked, stand.router.consider(asked, BLOCKS, 0.0))
    lease = stand.router.route(asked, BLOCKS, 0.0)
    assert told == pytest.approx(3.0 * lease.expected_s())
    assert lease.expected_s() > 0.001


def test_why_no_second_worker_would_get_a_request() -> None:
    choice = Stand().router.consider(ASKED, BLOCKS, 0.0)
    assert late_after(None, ASKED, choice) is NoSecond.OFF
    assert late_after(HedgeRules(0.5, 0.1, models={"m": (0, None)}), ASKED, choice) is NoSecond.OFF
    assert late_after(HALF, structs.replace(ASKED, endpoint=Endpoint.RESPONSES), choice) is NoSecond.REQUEST
    assert late_after(HALF, ASKED, choice) is NoSecond.UNSEEN
