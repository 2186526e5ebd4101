"""Workers, slots and pools."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gateway.errors import FleetFull
from gateway.pool import Fleet, FleetSettings, Reservation, Sent, WorkerState
from gateway.pool.fleet import MAX_WORKERS
from gateway.records import EngineKind, LoadSample, Rank, Role, WorkerFacts, WorkerId, WorkerSpec


def spec(name: str, *, url: str | None = None, role: Role = Role.BOTH, models: tuple[str, ...] = ()) -> WorkerSpec:
    return WorkerSpec(WorkerId(name), url or f"http://{name}:8000", role=role, models=models)


def facts(*models: str, block_size: int | None = 16, length: int | None = None, **adapters: str) -> WorkerFacts:
    return WorkerFacts(
        EngineKind.VLLM, "1", models or ("m",), adapters=adapters, block_size=block_size, max_model_len=length
    )


def open_request() -> Reservation:
    return Reservation(100, 0, 0, 1.0, True, sent_at=0.0)


def test_a_pool_for_each_name_and_adapters_with_their_base() -> None:
    fleet = Fleet()
    fleet.add(spec("a"), facts("llama", sql="llama"), 0.0)
    fleet.add(spec("b"), facts("llama"), 0.0)
    fleet.add(spec("c"), facts("qwen"), 0.0)
    llama, sql = fleet.pools["llama"], fleet.pools["sql"]
    assert [w.id for w in llama.workers] == ["a", "b"]
    assert (llama.model, llama.adapter) == ("llama", None)
    assert [w.id for w in sql.workers] == ["a"]
    assert (sql.name, sql.model, sql.adapter) == ("sql", "llama", "sql")
    assert sql.rates is llama.rates
    assert [(m.name, m.base) for m in fleet.models()] == [("llama", None), ("qwen", None), ("sql", "llama")]


def test_names_served_side_by_side_are_one_model() -> None:
    fleet = Fleet()
    fleet.add(spec("a"), facts("big", block_size=32), 0.0)
    fleet.add(spec("b"), facts("alias", block_size=16, lora="alias"), 0.0)
    assert {pool.model for pool in fleet.pools.values()} == {"big", "alias"}
    fleet.add(spec("c"), facts("big", "alias", block_size=32), 0.0)
    pools = fleet.pools
    assert {name: pool.model for name, pool in pools.items()} == dict.fromkeys(("big", "alias", "lora"), "big")
    assert [w.id for w in pools["big"].workers] == ["a", "c"]
    assert [w.id for w in pools["alias"].workers] == ["b", "c"]
    assert {pool.block_size for pool in pools.values()} == {16}
    assert {fleet.key_block_size(worker) for worker in fleet.workers.values()} == {16}
    assert pools["alias"].rates is pools["big"].rates
    assert {id(worker.rates) for worker in fleet.workers.values()} == {id(pools["big"].rates)}
    fleet.remove(WorkerId("c"), 1.0)
    assert {pool.model for pool in fleet.pools.values()} == {"big", "alias"}


def test_configured_names_win_over_reported_ones() -> None:
    fleet = Fleet()
    fleet.add(spec("a", models=("llama",)), facts("/models/llama-3"), 0.0)
    assert list(fleet.pools) == ["llama"]


def test_block_size_divides_every_workers_and_a_configured_one_wins() -> None:
    fleet = Fleet(FleetSettings(block_sizes={"fixed": 8}))
    fleet.add(spec("a"), facts("m", block_size=32), 0.0)
    assert fleet.pools["m"].block_size == 32
    fleet.add(spec("b"), facts("m", block_size=48, lora="m"), 0.0)
    assert fleet.pools["m"].block_size == 16
    assert fleet.pools["lora"].block_size == 16  # one key space with its base
    fleet.add(spec("c"), facts("fixed", block_size=16), 0.0)
    assert fleet.pools["fixed"].block_size == 8
    any_model = Fleet(FleetSettings(block_sizes={"*": 4, "fixed": 8}))
    any_model.add(spec("a"), facts("m", block_size=32), 0.0)
    any_model.add(spec("b"), facts("fixed", block_size=32), 0.0)
    assert (any_model.pools["m"].block_size, any_model.pools["fixed"].block_size) == (4, 8)
    fleet.add(spec("d"), facts("silent", block_size=None), 0.0)
    assert fleet.pools["silent"].block_size == 16


def test_only_ready_workers_of_a_serving_role_are_candidates() -> None:
    fleet = Fleet()
    for name, role in (("a", Role.BOTH), ("b", Role.PREFILL), ("c", Role.BOTH), ("d", Role.BOTH)):
        fleet.add(spec(name, role=role), facts(), 0.0)
    fleet.drain(WorkerId("c"), 1.0, on=True)
    fleet.leaving(WorkerId("d"), 1.0, reason="away")
    pool = fleet.pools["m"]
    assert [w.id for w in pool.ready] == ["a"]
    assert pool.mask == 1 << fleet.workers[WorkerId("a")].slot
    assert dict(pool.not_ready) == {"b": "role_prefill", "c": "draining", "d": "gone"}
    fleet.drain(WorkerId("c"), 2.0, on=False)
    assert [w.id for w in pool.ready] == ["a", "c"]


def test_a_pool_goes_with_its_last_worker() -> None:
    fleet = Fleet()
    fleet.add(spec("a"), facts(), 0.0)
    fleet.remove(WorkerId("a"), 1.0)
    fleet.remove(WorkerId("a"), 1.0)
    assert not fleet.pools
    assert not fleet.workers


def test_slots_are_used_again_once_nothing_is_open() -> None:
    fleet = Fleet()
    first, second = fleet.add(spec("a"), facts(), 0.0), fleet.add(spec("b"), facts(), 0.0)
    late = open_request()
    fleet.reserve(first, late, 0.0)
    fleet.remove(first.id, 1.0)
    assert fleet.add(spec("c"), facts(), 1.0).slot not in (first.slot, second.slot)
    fleet.release(first, late, 2.0)
    assert fleet.add(spec("d"), facts(), 2.0).slot == first.slot
    fleet.release(first, late, 3.0)
    assert fleet.add(spec("e"), facts(), 3.0).slot not in {w.slot for w in fleet.workers.values() if w.id != "e"}


def test_a_worker_that_comes_back_is_known_by_its_open_load() -> None:
    fleet = Fleet()
    worker = fleet.add(spec("a"), facts(), 0.0)
    reservations = [open_request() for _ in range(50)]
    for reservation in reservations:
        fleet.reserve(worker, reservation, 0.0)
    fleet.remove(worker.id, 1.0)
    again = fleet.add(spec("a"), facts(), 1.2)
    assert again is worker
    assert (again.state, again.inflight_requests) == (WorkerState.READY, 50)
    for reservation in reservations:
        fleet.release(worker, reservation, 2.0)
    assert again.inflight_requests == 0
    assert fleet.add(spec("b"), facts(), 3.0).slot != again.slot


def test_the_same_name_at_another_address_is_another_worker() -> None:
    fleet = Fleet()
    worker = fleet.add(spec("a"), facts(), 0.0)
    fleet.reserve(worker, open_request(), 0.0)
    moved = fleet.add(spec("a", url="http://elsewhere:8000"), facts(), 1.0)
    assert moved is not worker
    assert (moved.inflight_requests, worker.inflight_requests) == (0, 1)
    assert moved.slot != worker.slot


def test_new_facts_move_a_worker_between_pools() -> None:
    fleet = Fleet()
    fleet.add(spec("a"), facts("old", length=4096), 0.0)
    fleet.facts(WorkerId("a"), facts("new", length=8192), 1.0)
    assert list(fleet.pools) == ["new"]
    assert fleet.pools["new"].shortest == 8192
    fleet.facts(WorkerId("nobody"), facts("x"), 1.0)
    fleet.load(WorkerId("nobody"), LoadSample(0, 0, 0), 1.0)


def test_who_shares_a_server() -> None:
    fleet = Fleet()
    url = "http://w1:8000"
    for number in (0, 1):
        rank = Rank(WorkerId("w1"), number, number)
        fleet.add(replace(spec(f"w1@{number}", url=url), rank=rank), facts(), 0.0)
    alone = fleet.add(spec("w2"), facts(), 0.0)
    assert fleet.behind(fleet.workers[WorkerId("w1@1")]) == {"w1@0", "w1@1"}
    assert fleet.behind(alone) == {"w2"}


def test_a_configured_cache_size_wins_over_what_polls_say() -> None:
    fleet = Fleet()
    worker = fleet.add(replace(spec("a"), kv_blocks=5), facts(), 0.0)
    fleet.load(worker.id, LoadSample(0, 0, 0.0, kv_blocks=100), 1.0)
    assert worker.kv_capacity == 5 * 16


def test_slots_are_bounded() -> None:
    fleet = Fleet()
    for number in range(MAX_WORKERS):
        fleet.add(spec(f"w{number}"), facts(), 0.0)
    with pytest.raises(FleetFull, match="at most"):
        fleet.add(spec("one-too-many"), facts(), 0.0)


def test_other_replicas_requests_take_a_workers_room_and_give_it_back() -> None:
    fleet = Fleet(FleetSettings(max_inflight=2))
    shared = fleet.add(spec("a"), facts(), 0.0)
    fleet.add(spec("b"), facts(), 0.0)
    pool = fleet.pools["m"]
    fleet.share(shared, Sent(requests=2), 1.0)
    assert ([w.id for w in pool.ready], pool.not_ready) == (["b"], (("a", "max_inflight"),))
    fleet.share(shared, Sent(requests=1), 2.0)
    assert [w.id for w in pool.ready] == ["a", "b"]


@pytest.mark.parametrize("changed", ["respec", "facts"])
def test_a_limit_that_ends_while_a_worker_is_configured_anew_frees_it(changed: str) -> None:
    fleet = Fleet()
    full = fleet.add(spec("a"), facts(), 0.0)
    fleet.add(spec("b"), facts(), 0.0)
    for poll_at in (0.0, 1.0):
        fleet.load(full.id, LoadSample(running=8, waiting=2, kv_usage=0.95), poll_at)
    assert [w.id for w in fleet.pools["m"].ready] == ["b"]
    stale = 1.0 + 2 * fleet.settings.stale_s
    if changed == "respec":
        fleet.respec(spec("a"), stale)
    else:
        fleet.facts(full.id, facts(), stale)
    assert not full.full
    assert [w.id for w in fleet.pools["m"].ready] == ["a", "b"]


def test_a_worker_with_a_hundred_adapters_is_looked_at_once_when_its_state_changes() -> None:
    fleet = Fleet()
    many = replace(facts("m"), adapters={f"lora-{number}": "m" for number in range(100)})
    for name in ("a", "b", "c"):
        fleet.add(spec(name), many, 0.0)
    fleet.add(spec("d"), facts("m", extra="m"), 0.0)
    pools = fleet.pools
    assert len(pools) == 102
    crews = {id(pool.crew): pool.crew for pool in pools.values()}
    assert len(crews) == 3, "of the model, of its adapters, of d's own"
    before = sum(crew.renewals for crew in crews.values())
    fleet.drain(WorkerId("a"), 1.0, on=True)
    assert sum(crew.renewals for crew in crews.values()) == before + 2
    for pool in pools.values():
        assert [w.id for w in pool.ready] == [w.id for w in pool.workers if w.id != "a"]
    assert pools["lora-1"].ready is pools["lora-99"].ready


def test_crews_and_their_lists_stay_while_nothing_of_them_changes() -> None:
    """Requests that wait compare with the list of the ready workers: a probe that finds nothing new makes no other."""
    fleet = Fleet()
    for name in ("a", "b"):
        fleet.add(spec(name), facts("m", lora="m"), 0.0)
    pool = fleet.pools["lora"]
    crew, ready, renewals = pool.crew, pool.ready, pool.crew.renewals
    fleet.facts(WorkerId("a"), replace(facts("m", lora="m"), version="2", findings=()), 1.0)
    assert (pool.crew, crew.renewals) == (crew, renewals)
    fleet.facts(WorkerId("a"), facts("m", length=100, lora="m"), 2.0)
    assert (pool.crew, pool.shortest) == (crew, 100)
    assert pool.ready is ready
    assert crew.renewals == renewals + 1
    fleet.respec(replace(spec("a"), tenants=frozenset(("t",))), 3.0)
    assert pool.for_tenants
    fleet.respec(spec("a", role=Role.PREFILL), 4.0)
    assert ([w.id for w in pool.ready], pool.for_tenants) == (["b"], False)
    fleet.remove(WorkerId("b"), 5.0)
    assert pool.crew is not crew
    assert [w.id for w in pool.workers] == ["a"]


def test_a_worker_that_is_overtaken_and_answers_nobody_is_ejected() -> None:
    fleet = Fleet()
    worker = fleet.add(spec("a"), facts(), 0.0)
    for at in range(5):
        assert worker.state is not WorkerState.EJECTED
        some = [replace(open_request(), sent_at=float(at)) for _ in range(9)]
        for one in some:
            fleet.reserve(worker, one, float(at))
        for one in some:
            fleet.overtaken(worker, one, at + 0.5)
            fleet.release(worker, one, at + 0.5)
    assert (worker.state, worker.reason) == (WorkerState.EJECTED, "silent")


def test_pools_of_a_mixed_fleet_are_those_of_their_workers_in_the_fleets_order() -> None:
    """As if each pool had been put together worker by worker."""
    rng, fleet = Random(3), Fleet()
    serves: dict[WorkerId, tuple[str, ...]] = {}
    for number in range(60):
        names = tuple(rng.sample(("x", "y", "z"), rng.randrange(4)))
        worker = fleet.add(spec(f"w{number}"), replace(facts("m"), adapters=dict.fromkeys(names, "m")), 0.0)
        serves[worker.id] = ("m", *names)
        if rng.random() < 0.2:
            gone = rng.choice(list(serves))
            fleet.remove(gone, 0.0)
            del serves[gone]
        assert {name: [worker.id for worker in pool.workers] for name, pool in fleet.pools.items()} == {
            served: [name for name, its in serves.items() if served in its]
            for served in dict.fromkeys(served for its in serves.values() for served in its)
        }
