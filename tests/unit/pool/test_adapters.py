"""Which adapters a worker is taken to have on its GPU, and what that does to where requests go."""

from __future__ import annotations

from random import Random

from msgspec.structs import replace

from gateway.kv import KvIndex
from gateway.leases import Lease
from gateway.policy import Prices, make_policy
from gateway.pool import Fleet
from gateway.pool.adapters import SLOTS, Adapters
from gateway.records import EngineKind, LoadSample, WorkerFacts, WorkerId, WorkerSpec
from gateway.router import Router
from tests.unit.test_router import SIZE, finish, prompt, request, words

NAMES = tuple(f"w{number}" for number in range(4))


class Shop:
    """A router over four workers of a base model `m` and two adapters."""

    def __init__(self) -> None:
        self.fleet, self.now = Fleet(), 0.0
        rng = Random(3)
        self.router = Router(self.fleet, KvIndex(), make_policy("seconds", rng=rng), rng=rng)
        facts = WorkerFacts(
            EngineKind.VLLM, "1", ("m",), {"poet": "m", "clerk": "m"}, block_size=SIZE, kv_blocks=100_000
        )
        for name in NAMES:
            self.fleet.add(WorkerSpec(WorkerId(name), f"http://{name}:8000"), facts, 0.0)

    def route(self, model: str, seed: int, *, length: int = 64, **fields: object) -> Lease:
        made = replace(request(**fields), model=model)
        return self.router.route(made, prompt(words(Random(seed), length)), self.now)

    def done(self, model: str, seed: int) -> str:
        lease = self.route(model, seed)
        self.now += 1.0
        lease.first_byte(self.now)
        finish(lease, self.now + 1.0)
        self.now += 3.0
        return lease.worker.id

    def load(self, name: str, *adapters: str, slots: int | None = None, started: float | None = None) -> None:
        sample = LoadSample(0, 0, 0.0, start_time_unix=started, adapters=adapters, adapter_slots=slots)
        self.fleet.load(WorkerId(name), sample, self.now)


def test_the_ones_used_last_are_there_as_many_as_fit() -> None:
    adapters = Adapters()
    adapters.use(("a", "b"))
    adapters.use(("c",))
    assert (adapters.loaded, adapters.absent(("a", "x", "y"))) == (("c", "b", "a"), 2)
    adapters.use(("a",))
    adapters.fit(2)
    assert list(adapters.loaded) == ["a", "c"]
    adapters.fit(0)
    assert list(adapters.loaded) == ["a"]
    adapters = Adapters()
    adapters.use(str(number) for number in range(3 * SLOTS))
    assert len(adapters.loaded) == SLOTS


def test_requests_for_an_adapter_go_where_it_is_and_the_decision_says_so() -> None:
    shop = Shop()
    first = shop.done("poet", 1)
    decision = shop.route("poet", 2).decision
    assert decision.worker == first
    prices = {candidate.worker: candidate.terms.adapter_s for candidate in decision.candidates}
    assert prices == {WorkerId(name): 0.0 if name == first else Prices().adapter_s for name in NAMES}
    assert {c.terms.adapter_s for c in shop.route("m", 3).decision.candidates} == {0.0}


def test_a_worker_that_names_the_adapter_is_preferred_until_it_has_had_to_go() -> None:
    shop = Shop()
    shop.load("w2", "poet", slots=1)
    assert shop.done("poet", 1) == "w2"
    shop.load("w2", "clerk", slots=1)
    prices = {c.worker: c.terms.adapter_s for c in shop.route("poet", 2).decision.candidates}
    assert prices[WorkerId("w2")] == Prices().adapter_s


def test_a_queue_outweighs_the_adapter() -> None:
    shop = Shop()
    shop.load("w2", "poet")
    placed = [shop.route("poet", seed, length=2000).worker.id for seed in range(8)]
    assert set(placed) == set(NAMES)


def test_adapters_named_in_the_body_count_as_the_model_does() -> None:
    shop = Shop()
    shop.load("w1", "poet")
    shop.load("w3", "poet", "clerk")
    assert shop.route("m", 1, adapters=("poet", "clerk", "poet")).worker.id == "w3"


def test_a_worker_that_has_started_anew_has_none() -> None:
    shop = Shop()
    worker = shop.fleet.workers[WorkerId("w1")]
    shop.load("w1", "poet", started=100.0)
    shop.load("w1", started=100.0)
    assert list(worker.adapters.loaded) == ["poet"]
    shop.load("w1", started=200.0)
    assert list(worker.adapters.loaded) == []
