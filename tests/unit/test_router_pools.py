"""The router in front of pools that filter and shards that spill, and where a session goes when its worker cannot."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from gateway import keys
from gateway.errors import NoWorker, UnknownModel
from gateway.kv import KvIndex
from gateway.kv.events import Stored
from gateway.leases import Lease
from gateway.policy import make_policy
from gateway.pool import Fleet, FleetSettings, Reservation, ShardSettings, WorkerState, order
from gateway.records import (
    Chain,
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    NoPrompt,
    PrefixBlocks,
    PrefixMode,
    Result,
    StageTimes,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router, RouterSettings

SIZE = 16


class Bench:
    """A router over workers of the model `m`."""

    def __init__(self, *, shards: ShardSettings | None = None, settings: RouterSettings | None = None) -> None:
        self.fleet, self.index, rng = Fleet(FleetSettings(sharding=shards or ShardSettings())), KvIndex(), Random(1)
        self.router = Router(self.fleet, self.index, make_policy("seconds", rng=rng), rng=rng, settings=settings)

    def join(self, name: str, **fields: object) -> None:
        spec = WorkerSpec(WorkerId(name), f"http://{name}:8000", **fields)  # type: ignore[arg-type]  # a shorthand
        worker = self.fleet.add(spec, WorkerFacts(EngineKind.VLLM, "1", ("m",), block_size=SIZE, kv_blocks=4096), 0.0)
        self.index.bind(worker.slot, block_size=SIZE)

    def hold(self, name: str, tokens: list[int]) -> None:
        hashes = [EngineHash(int(key)) for key in keys.chain(keys.namespace(), tokens, SIZE)]
        slot = self.fleet.workers[WorkerId(name)].slot
        self.index.apply(slot, 0, [Stored(hashes, None, tokens[: len(hashes) * SIZE], SIZE, keyed=True)])

    def route(
        self,
        tokens: list[int],
        now: float = 0.0,
        *,
        session: str | None = None,
        tenant: str | None = None,
        labels: frozenset[str] | None = None,
        excluded: frozenset[WorkerId] = frozenset(),
    ) -> Lease:
        request = InferenceRequest(
            Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=True, session=session, tenant=tenant, labels=labels
        )
        return self.router.route(request, prompt(tokens), now, excluded=excluded)


def prompt(tokens: list[int]) -> PrefixBlocks:
    return PrefixBlocks((Chain(keys.chain(keys.namespace(), tokens, SIZE), len(tokens)),), len(tokens), SIZE)


def words(rng: Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def finish(lease: Lease, at: float) -> None:
    lease.settle(Ending(Result.COMPLETED, 200, at), started_at=at - 1.0, stages=StageTimes())


# --------------------------------------------------------------------------- tenants and labels


def test_a_tenants_worker_gets_that_tenants_requests_only_however_good_its_cache_is() -> None:
    bench, rng = Bench(), Random(1)
    bench.join("own", tenants=frozenset({"acme"}))
    bench.join("open")
    tokens = words(rng, 2000)
    bench.hold("own", tokens)
    assert bench.route(tokens, tenant="acme").worker.id == "own"
    for tenant in ("other", None):
        tokens = words(rng, 2000)
        bench.hold("own", tokens)
        decision = bench.route(tokens, tenant=tenant).decision
        assert decision.worker == "open"
        assert decision.excluded == (("own", "tenant"),)
        assert decision.available_tokens == 0  # what it may not use is not available


def test_a_key_for_labelled_workers_goes_nowhere_else_not_even_after_a_failure() -> None:
    bench, rng = Bench(), Random(1)
    bench.join("a", pool="gold")
    bench.join("b", pool="iron")
    gold = frozenset({"gold"})
    assert {bench.route(words(rng, 40), labels=gold).worker.id for _ in range(8)} == {"a"}
    with pytest.raises(NoWorker):
        bench.route(words(rng, 40), labels=gold, excluded=frozenset({WorkerId("a")}))


def test_a_tenant_without_any_worker_is_told_that_the_model_is_not_served_to_it() -> None:
    bench, rng = Bench(), Random(1)
    bench.join("own", tenants=frozenset({"acme"}))
    with pytest.raises(UnknownModel, match="not to this key"):
        bench.route(words(rng, 40), tenant="other")
    bench.fleet.drain(WorkerId("own"), 1.0, on=True)
    with pytest.raises(NoWorker):
        bench.route(words(rng, 40), 1.0, tenant="acme")  # its worker is away: later


# --------------------------------------------------------------------------- shards


def sharded(workers: int = 12, shards: int = 3, **settings: float) -> Bench:
    bench = Bench(
        shards=ShardSettings(shards=shards, least_workers=2),
        settings=RouterSettings(**settings),  # type: ignore[arg-type]  # a shorthand
    )
    for number in range(workers):
        bench.join(f"w{number}")
    return bench


def home_of(bench: Bench, tokens: list[int]) -> int:
    chain = prompt(tokens).chains[0].keys
    return order(chain[min(len(chain), 64) - 1], len(bench.fleet.pools["m"].shards))[0]


def test_a_prefix_stays_in_its_home_shard_and_only_that_is_weighed() -> None:
    bench, rng = sharded(spill_margin_s=2.0), Random(2)
    seen = set()
    for _ in range(30):
        tokens = words(rng, 400)
        decision = bench.route(tokens).decision
        assert decision.shard == decision.home_shard == home_of(bench, tokens)
        assert len(decision.candidates) == 4
        seen.add(decision.shard)
    assert seen == {0, 1, 2}


def test_a_shard_that_is_busy_spills_by_more_than_the_margin_and_no_sooner() -> None:
    bench, rng = sharded(spill_margin_s=0.5), Random(2)
    tokens = words(rng, 1600)
    shards = set()
    worst = 0.0
    for _ in range(400):
        decision = bench.route(tokens[:1024] + words(rng, 600)).decision
        shards.add(decision.shard)
        if decision.shard == decision.home_shard:
            worst = max(worst, min(candidate.terms.cost for candidate in decision.candidates))
    assert len(shards) > 1
    assert worst > 0.5


def test_a_session_goes_on_in_the_shard_it_was_moved_to() -> None:
    bench, rng = sharded(), Random(3)
    tokens = words(rng, 400)
    home = home_of(bench, tokens)
    pool = bench.fleet.pools["m"]
    elsewhere = pool.shards[(home + 1) % 3].workers[0].id
    bench.router.sessions.keep("chat", elsewhere, 0.0)
    decision = bench.route(tokens, session="chat").decision
    assert (decision.worker, decision.affinity) == (elsewhere, "kept")


def test_an_empty_home_shard_hands_on() -> None:
    bench, rng = sharded(), Random(4)
    tokens = words(rng, 400)
    home = home_of(bench, tokens)
    for worker in bench.fleet.pools["m"].shards[home].workers:
        bench.fleet.drain(worker.id, 1.0, on=True)
    decision = bench.route(tokens, 1.0).decision
    assert decision.home_shard == home
    assert decision.shard not in (home, None)


def test_a_failed_home_shard_hands_on_to_a_free_worker_not_to_one_that_has_what_it_should_have() -> None:
    bench, rng = sharded(), Random(6)
    bench.fleet.apply(replace(bench.fleet.settings, max_inflight=1))
    tokens = words(rng, 400)
    pool = bench.fleet.pools["m"]
    home = home_of(bench, tokens)
    away = [worker for worker in pool.workers if pool.shard_of(worker.id) != home]
    for worker in away[2:]:
        bench.fleet.reserve(worker, Reservation(100, 0, 0, 1.0, True, sent_at=0.0), 0.0)
    failed = frozenset(worker.id for worker in pool.shards[home].workers)
    decision = bench.route(tokens, 1.0, excluded=failed).decision
    assert decision.worker in {worker.id for worker in away[:2]}
    assert dict(decision.excluded) == dict.fromkeys(failed, "tried") | {w.id: "max_inflight" for w in away[2:]}


def test_workers_that_have_what_they_should_have_are_candidates_when_nobody_else_is_left() -> None:
    bench = Bench()
    for name in ("a", "b"):
        bench.join(name)
    bench.fleet.apply(replace(bench.fleet.settings, max_inflight=1))
    bench.fleet.reserve(bench.fleet.workers[WorkerId("a")], Reservation(100, 0, 0, 1.0, True, sent_at=0.0), 0.0)
    decision = bench.route(words(Random(1), 40), excluded=frozenset({WorkerId("b")})).decision
    assert (decision.worker, decision.excluded) == ("a", (("b", "tried"),))


def test_a_long_prompt_leaves_a_home_shard_whose_workers_are_all_too_short() -> None:
    bench, rng = sharded(), Random(7)
    tokens = words(rng, 400)
    home = home_of(bench, tokens)
    pool = bench.fleet.pools["m"]
    for worker in pool.shards[home].workers:
        bench.fleet.facts(worker.id, replace(worker.facts, max_model_len=200), 0.0)
    decision = bench.route(tokens).decision
    assert decision.shard not in (home, None)
    assert set(dict(decision.excluded).values()) == {"context_length"}


def test_a_session_whose_worker_failed_is_said_to_have_moved_for_that_also_when_other_shards_were_asked() -> None:
    bench, rng = sharded(spill_margin_s=0.001), Random(8)
    tokens = words(rng, 4000)
    failed = bench.fleet.pools["m"].shards[home_of(bench, tokens)].workers[0].id
    bench.router.sessions.keep("chat", failed, 0.0)
    decision = bench.route(tokens, session="chat", excluded=frozenset({failed})).decision
    assert decision.affinity == "moved_failed"


# --------------------------------------------------------------------------- sessions that must move


def test_a_session_moves_with_a_reason_and_is_never_stuck() -> None:
    bench, rng = Bench(), Random(5)
    for name in ("a", "b", "c"):
        bench.join(name)
    tokens = words(rng, 40)

    def ask(now: float, *, excluded: frozenset[WorkerId] = frozenset()) -> tuple[WorkerId, str]:
        lease = bench.route(tokens, now, session="chat", excluded=excluded)
        finish(lease, now)
        return lease.worker.id, lease.decision.affinity

    first, word = ask(0.0)
    assert word == "new"
    bench.fleet.drain(first, 1.0, on=True)
    second, word = ask(1.0)
    assert (second != first, word) == (True, "moved_drained")
    bench.fleet.drain(first, 2.0, on=False)
    assert ask(2.0) == (second, "kept")  # back: the session stays where its cache is now
    third, word = ask(3.0, excluded=frozenset({second}))
    assert (third != second, word) == (True, "moved_failed")
    bench.fleet.leaving(third, 4.0, reason="away")
    fourth, word = ask(4.0)
    assert (fourth != third, word) == (True, "moved_gone")
    bench.fleet.remove(fourth, 5.0)
    assert ask(5.0)[1] == "moved_gone"


def test_a_session_moves_away_from_a_queue_and_from_an_ejected_worker() -> None:
    bench, rng = Bench(), Random(6)
    for name in ("a", "b"):
        bench.join(name)
    tokens = words(rng, 40)
    home = bench.route(tokens, session="chat").worker
    others = frozenset(bench.fleet.workers) - {home.id}
    while home.pending_s < 2.0:
        bench.route(words(rng, 8000), excluded=others)
    moved = bench.route(tokens, session="chat")
    assert moved.decision.affinity == "moved_busy"
    at = moved.worker
    now = 1.0
    while at.state is not WorkerState.EJECTED:
        now += 0.1
        lease = bench.route(words(rng, 40), now, excluded=frozenset({home.id}))
        ending = Ending(Result.WORKER_FAILED, 502, now, error_code="worker_broke")
        lease.settle(ending, started_at=1.0, stages=StageTimes())
    assert bench.route(tokens, now, session="chat").decision.affinity == "moved_ejected"


def test_sessions_of_a_lost_worker_are_spread_alike_by_replicas_that_never_met() -> None:
    benches = [Bench(), Bench()]
    for bench in benches:
        for name in ("a", "b", "c", "d"):
            bench.join(name)
        for number in range(40):
            bench.router.sessions.keep(f"chat-{number}", WorkerId("gone"), 0.0)
    found = [
        [bench.route([number] * 8, 1.0 + number, session=f"chat-{number}").worker.id for number in range(40)]
        for bench in benches
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) == 4


def test_a_prompt_of_unknown_tokens_has_no_home_shard_of_its_own() -> None:
    bench = sharded()
    blind = PrefixBlocks((), 100, SIZE, PrefixMode.NONE, "no_tokenizer")
    request = InferenceRequest(Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=True)
    assert {bench.router.route(request, blind, 0.0).decision.shard for _ in range(40)} == {0, 1, 2}
