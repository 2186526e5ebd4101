"""The router: placement, reservation, speculative entries, sessions, outcomes and the record of decisions."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest
from msgspec import structs
from msgspec.structs import replace

from gateway import keys
from gateway.errors import BadRequest, NoWorker, UnknownModel
from gateway.kv import KvIndex
from gateway.kv.events import Stored
from gateway.leases import Lease
from gateway.policy import make_policy
from gateway.pool import Fleet, Worker
from gateway.records import (
    Chain,
    Ending,
    Endpoint,
    EngineHash,
    EngineKind,
    InferenceRequest,
    LoadSample,
    MissCause,
    NoPrompt,
    PrefixBlocks,
    PrefixMode,
    Result,
    Slot,
    StageTimes,
    Tier,
    TokenPrompt,
    Usage,
    WorkerFacts,
    WorkerId,
    WorkerSpec,
)
from gateway.router import Router, RouterSettings
from gateway.weighing import SlowReads

SIZE = 16


class Bench:
    """A router with `count` workers of one model `m`, and short ways to use it."""

    def __init__(
        self, count: int = 4, *, policy: str = "seconds", seed: int = 0, settings: RouterSettings | None = None
    ) -> None:
        self.fleet, self.index, self.rng = Fleet(), KvIndex(), Random(seed)
        self.router = Router(self.fleet, self.index, make_policy(policy, rng=self.rng), rng=self.rng, settings=settings)
        for number in range(count):
            self.join(f"w{number}")

    def join(self, name: str, *, max_model_len: int | None = None, engine: EngineKind = EngineKind.VLLM) -> None:
        facts = WorkerFacts(engine, "1", ("m",), block_size=SIZE, kv_blocks=4096, max_model_len=max_model_len)
        worker = self.fleet.add(WorkerSpec(WorkerId(name), f"http://{name}:8000"), facts, 0.0)
        self.index.bind(worker.slot, block_size=SIZE)

    def worker(self, name: str) -> Worker:
        return self.fleet.workers[WorkerId(name)]

    def slot(self, name: str) -> Slot:
        return self.worker(name).slot

    def hold(self, name: str, tokens: list[int], *, tier: Tier = Tier.GPU) -> None:
        """The worker announces the full blocks of `tokens`."""
        hashes = [EngineHash(int(key)) for key in keys.chain(keys.namespace(), tokens, SIZE)]
        slot = self.fleet.workers[WorkerId(name)].slot
        self.index.apply(slot, 0, [Stored(hashes, None, tokens[: len(hashes) * SIZE], SIZE, tier, keyed=True)])

    def route(
        self, tokens: list[int], now: float = 0.0, *, excluded: set[str] | None = None, **fields: object
    ) -> Lease:
        names = frozenset(WorkerId(name) for name in excluded or ())
        return self.router.route(request(**fields), prompt(tokens), now, excluded=names)


def request(**fields: object) -> InferenceRequest:
    made = InferenceRequest(Endpoint.CHAT, "r", "m", NoPrompt("test"), stream=True)
    return replace(made, **fields)


def prompt(tokens: list[int]) -> PrefixBlocks:
    chain = keys.chain(keys.namespace(), tokens, SIZE)
    return PrefixBlocks((Chain(chain, len(tokens)),), len(tokens), SIZE)


def words(rng: Random, count: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(count)]


def completed(at: float, *, prompt_tokens: int = 100, answer: int = 10, cached: int | None = 0) -> Ending:
    usage = Usage(prompt_tokens, answer, cached)
    return Ending(Result.COMPLETED, 200, at, usage, chunks=answer, first_byte_at=at - 0.5, last_byte_at=at)


def finish(lease: Lease, at: float) -> None:
    lease.settle(completed(at), started_at=at - 1.0, stages=StageTimes())


# --------------------------------------------------------------------------- placement


@pytest.mark.parametrize("length", [5, 200, 2_000])
def test_unique_prompts_one_after_another_spread_over_idle_workers(length: int) -> None:
    """With first-byte times that scatter by a third."""
    bench, rng, now = Bench(4), Random(7), 0.0
    counts: Counter[str] = Counter()
    for _ in range(200):
        lease = bench.route(words(rng, length), now)
        counts[lease.worker.id] += 1
        lease.first_byte(now + (0.01 + length * 2e-4) * rng.uniform(0.7, 1.3))
        finish(lease, now + 2.0)
        now += 3.0
        bench.router.expire(now)
    assert len(counts) == 4
    assert all(0.15 <= count / 200 <= 0.35 for count in counts.values()), counts


def test_a_held_prefix_draws_its_request() -> None:
    bench, tokens = Bench(4), words(Random(1), 1600)
    bench.hold("w2", tokens[:800])
    decision = bench.route(tokens).decision
    assert (decision.worker, decision.predicted_tokens, decision.available_tokens) == ("w2", 800, 800)
    assert decision.prompt_tokens == 1600
    assert len(decision.candidates) == 4


def test_a_long_queue_outweighs_a_hit() -> None:
    bench, rng = Bench(2), Random(1)
    tokens = words(rng, 1600)
    bench.hold("w0", tokens)
    for _ in range(20):
        bench.route(tokens[:800] + words(rng, 4000))
    assert {bench.route(tokens[:800] + words(rng, 800)).worker.id for _ in range(8)} != {"w0"}


def test_siblings_of_a_new_prefix_stay_together_before_any_event() -> None:
    """Without events: 200 requests at once, one new prefix of 256 blocks, unique suffixes."""
    bench, rng = Bench(4), Random(3)
    prefix = words(rng, 256 * SIZE)
    leases = [bench.route(prefix + words(rng, 64), number * 1e-4) for number in range(200)]
    counts = Counter(lease.worker.id for lease in leases)
    uncached = sum(lease.decision.prompt_tokens - lease.decision.predicted_tokens for lease in leases)
    assert max(counts.values()) / 200 <= 0.6, counts
    # Every request computes its suffix, and what is left of its last full block.
    suffixes = 200 * (64 + SIZE)
    assert uncached <= (4 * len(prefix) + suffixes) * 1.1


def test_excluded_and_unready_workers_are_named_with_the_reason() -> None:
    bench = Bench(4)
    bench.fleet.drain(WorkerId("w3"), 0.0, on=True)
    decision = bench.route([1] * 40, excluded={"w0", "w1"}).decision
    assert decision.worker == "w2"
    assert dict(decision.excluded) == {"w0": "tried", "w1": "tried", "w3": "draining"}
    with pytest.raises(NoWorker) as failure:
        bench.route([1] * 40, excluded={"w0", "w1", "w2"})
    assert failure.value.retry_after_s is not None
    assert bench.router.open_leases == 1


def test_a_prompt_goes_where_its_length_fits_and_anywhere_when_it_fits_nowhere() -> None:
    bench = Bench(0)
    bench.join("short", max_model_len=100)
    bench.join("long", max_model_len=1000)
    decisions = [bench.route([number] * 200).decision for number in range(4)]
    assert {decision.worker for decision in decisions} == {"long"}
    assert decisions[0].excluded == ((WorkerId("short"), "context_length"),)
    assert bench.route([9] * 5000).decision.excluded == ()


def test_sglangs_own_path_goes_to_workers_that_have_it() -> None:
    bench = Bench(3)
    bench.join("s", engine=EngineKind.SGLANG)
    decisions = [bench.route([1], endpoint=Endpoint.GENERATE).decision for _ in range(8)]
    assert {decision.worker for decision in decisions} == {"s"}
    assert decisions[0].excluded == tuple((WorkerId(f"w{n}"), "engine") for n in range(3))
    assert Bench(2).route([1], endpoint=Endpoint.GENERATE).decision.excluded == ()


def test_an_unknown_model_names_a_few_that_are_served() -> None:
    bench = Bench(1)
    with pytest.raises(UnknownModel, match=r"'gpt' is not served; there are m$"):
        bench.route([1], model="gpt")
    with pytest.raises(UnknownModel) as caught:
        bench.route([1], model="x" * 1_000_000)
    assert len(caught.value.message) < 300
    with pytest.raises(NoWorker, match="no worker has reported a model"):
        Bench(0).route([1])


def test_models_never_meet_though_they_share_keys() -> None:
    bench = Bench(1)
    other = WorkerFacts(EngineKind.VLLM, "1", ("other",), block_size=SIZE)
    holder = bench.fleet.add(WorkerSpec(WorkerId("o"), "http://o:8000"), other, 0.0)
    bench.index.bind(holder.slot, block_size=SIZE)
    tokens = list(range(4 * SIZE + 1))
    bench.hold("o", tokens)
    lease = bench.route(tokens)
    assert (lease.worker.id, lease.decision.available_tokens) != ("o", 4 * SIZE)
    assert lease.decision.available_tokens == 0
    assert bench.route(tokens, model="other").decision.predicted_tokens == 4 * SIZE


def test_a_request_without_a_model_goes_to_the_only_one() -> None:
    bench = Bench(1)
    assert bench.router.pool("") is bench.fleet.pools["m"]
    assert bench.route([1], model="").decision.model == "m"
    other = WorkerFacts(EngineKind.VLLM, "1", ("other",), block_size=SIZE)
    bench.fleet.add(WorkerSpec(WorkerId("o"), "http://o:8000"), other, 0.0)
    with pytest.raises(BadRequest, match="several models"):
        bench.router.pool("")
    with pytest.raises(NoWorker):
        Bench(0).router.pool("")


def test_unknown_tokens_are_placed_by_load() -> None:
    bench = Bench(3)
    blocks = PrefixBlocks((), 500, SIZE, PrefixMode.NONE, "no_tokenizer")
    leases = [bench.router.route(request(), blocks, 0.0) for _ in range(9)]
    assert Counter(lease.worker.id for lease in leases) == {"w0": 3, "w1": 3, "w2": 3}
    decision = leases[0].decision
    assert (decision.mode, decision.reason, decision.predicted_tokens) == (PrefixMode.NONE, "no_tokenizer", 0)


def test_less_trust_means_less_credit_but_the_same_record() -> None:
    bench, tokens = Bench(2), words(Random(1), 1600)
    bench.hold("w0", tokens)
    bench.hold("w1", tokens[:1200])
    bench.fleet.workers[WorkerId("w0")].trust = 0.5
    decision = bench.route(tokens).decision
    assert decision.worker == "w1"
    assert [(c.overlap_tokens, c.trust) for c in decision.candidates] == [(1584, 0.5), (1200, 1.0)]


def test_a_slow_tier_counts_when_reading_is_faster_than_computing() -> None:
    tokens = words(Random(1), 1600)
    for reads_per_s, expected in ((60_000.0, True), (100.0, False)):
        bench = Bench(2, settings=RouterSettings(slow_reads=SlowReads(cpu_tokens_per_s=reads_per_s)))
        bench.hold("w1", tokens, tier=Tier.CPU)
        bench.router.expire(0.0)
        terms = {c.worker: c.terms for c in bench.router.explain(request(), prompt(tokens), 0.0).candidates}
        assert (terms[WorkerId("w1")].hit_s > 0.0) is expected
        assert (terms[WorkerId("w1")].own_s < terms[WorkerId("w0")].own_s) is expected


# --------------------------------------------------------------------------- reservations


def test_a_slow_tier_counts_nothing_when_computing_is_faster() -> None:
    bench, tokens = (
        Bench(1, settings=RouterSettings(slow_reads=SlowReads(disk_tokens_per_s=100.0))),
        words(Random(1), 1600),
    )
    bench.hold("w0", tokens, tier=Tier.DISK)
    bench.router.expire(0.0)
    (candidate,) = bench.route(tokens).decision.candidates
    assert (candidate.overlap_tokens, candidate.terms.hit_s) == (1584, 0.0)


def test_a_decision_is_counted_at_once() -> None:
    bench = Bench(2)
    first, second = bench.route(words(Random(1), 1600)), bench.route(words(Random(2), 1600))
    assert first.worker is not second.worker
    assert [w.inflight_requests for w in bench.fleet.workers.values()] == [1, 1]
    assert bench.router.open_leases == 2


def test_explaining_is_the_same_decision_and_reserves_nothing() -> None:
    bench, tokens = Bench(4), words(Random(1), 1600)
    bench.hold("w3", tokens)
    explained = bench.router.explain(request(), prompt(tokens), 1.0)
    assert [w.inflight_requests for w in bench.fleet.workers.values()] == [0] * 4
    assert bench.router.recent() == ()
    assert bench.router.route(request(), prompt(tokens), 1.0).decision == explained


def test_settling_is_once_and_returns_the_same_outcome() -> None:
    bench = Bench(1)
    lease = bench.route(words(Random(1), 100), 1.0)
    lease.first_byte(1.2)
    outcome = lease.settle(completed(2.0), started_at=0.9, stages=StageTimes(parse_s=0.01), retries=1)
    worker = lease.worker
    assert (worker.inflight_requests, bench.router.open_leases) == (0, 0)
    again = lease.settle(Ending(Result.CLIENT_GONE, 499, 3.0), started_at=0.0, stages=StageTimes())
    lease.first_byte(4.0)
    assert again is outcome
    assert (worker.inflight_requests, bench.router.open_leases) == (0, 0)
    assert (outcome.worker, outcome.status, outcome.retries, outcome.stages.parse_s) == ("w0", 200, 1, 0.01)
    assert outcome.ttft_s == pytest.approx(0.6)
    assert outcome.inter_token_s == pytest.approx(0.5 / 9)


def test_a_lease_is_given_back_even_when_its_outcome_cannot_be_made() -> None:
    bench = Bench(1)
    lease = bench.route(words(Random(1), 100), 1.0)
    broken = structs.replace(completed(2.0), usage=object())  # no usage at all
    for _ in range(2):
        with pytest.raises((AttributeError, TypeError)):
            lease.settle(broken, started_at=0.9, stages=StageTimes())
        assert (lease.worker.inflight_requests, bench.router.open_leases) == (0, 0)
        assert bench.index.stats().speculative == 0


# --------------------------------------------------------------------------- speculative entries


def test_promised_blocks_last_while_the_prefill_runs_and_a_little_longer() -> None:
    bench, tokens = Bench(2, settings=RouterSettings(speculative_ttl_s=2.0)), words(Random(1), 1600)
    lease = bench.route(tokens, 0.0)
    bench.router.expire(100.0)
    assert bench.router.explain(request(), prompt(tokens), 100.0).available_tokens == 1584
    lease.first_byte(100.0)
    bench.router.expire(101.9)
    assert bench.index.stats().speculative == 100
    finish(lease, 101.95)
    bench.router.expire(102.0)
    assert bench.index.stats().speculative == 0
    assert bench.router.explain(request(), prompt(tokens), 102.0).available_tokens == 0


def test_a_request_that_ends_before_its_first_byte_takes_its_promise_back() -> None:
    bench, tokens = Bench(2), words(Random(1), 1600)
    bench.route(tokens).settle(Ending(Result.WORKER_FAILED, 502, 1.0), started_at=0.0, stages=StageTimes())
    assert bench.index.stats().speculative == 0


# --------------------------------------------------------------------------- sessions


def test_a_session_is_new_then_kept_then_moved_with_a_word() -> None:
    bench, rng = Bench(4), Random(1)
    first = bench.route(words(rng, 40), 0.0, session="chat")
    finish(first, 1.0)
    second = bench.route(words(rng, 40), 2.0, session="chat")
    finish(second, 3.0)
    assert [first.decision.affinity, second.decision.affinity] == ["new", "kept"]
    assert second.worker is first.worker
    bench.fleet.leaving(first.worker.id, 3.0, reason="away")
    moved = bench.route(words(rng, 40), 4.0, session="chat")
    assert moved.decision.affinity == "moved_gone"
    assert bench.route(words(rng, 40), 4.0).decision.affinity == "none"


def test_a_session_never_holds_against_a_queue() -> None:
    bench, rng = Bench(2), Random(1)
    home = bench.route(words(rng, 40), 0.0, session="chat").worker
    while bench.fleet.workers[home.id].pending_s < 2.0:
        bench.route(words(rng, 8000), 0.0, excluded={"w0", "w1"} - {home.id})
    assert bench.route(words(rng, 40), 0.0, session="chat").decision.affinity == "moved_busy"


def test_replicas_that_never_met_send_a_new_session_to_the_same_worker() -> None:
    for name in ("a", "b", "c", "d"):
        chosen = {Bench(8, seed=seed).route([1] * 100, session=name).worker.id for seed in range(5)}
        assert len(chosen) == 1


# --------------------------------------------------------------------------- outcomes


@pytest.mark.parametrize(
    ("delivered", "missed"),
    [(1584, 0), (1568, 0), (1440, 0), (1420, 164), (0, 1584), (None, 0)],
    ids=["all", "one block", "under a tenth", "over a tenth", "nothing", "unsaid"],
)
def test_a_route_miss_is_more_than_a_block_and_a_tenth(delivered: int | None, missed: int) -> None:
    bench, tokens = Bench(1), words(Random(1), 1600)
    bench.hold("w0", tokens)
    lease = bench.route(tokens)
    lease.first_byte(0.1)
    ending = completed(1.0, prompt_tokens=1600, cached=delivered)
    outcome = lease.settle(ending, started_at=0.0, stages=StageTimes())
    assert (outcome.predicted_tokens, outcome.delivered_tokens, outcome.missed_tokens) == (1584, delivered, missed)
    assert outcome.miss_cause is (MissCause.STALE_INDEX if missed else None)


def test_a_block_less_of_a_short_prompt_is_no_route_miss() -> None:
    """A quarter of the prediction, but one block: the engine may have given it up just now."""
    bench, tokens = Bench(1), words(Random(1), 80)
    bench.hold("w0", tokens)
    outcome = bench.route(tokens).settle(completed(1.0, cached=48), started_at=0.0, stages=StageTimes())
    assert (outcome.predicted_tokens, outcome.missed_tokens) == (64, 0)


def test_an_outcome_without_usage_keeps_what_was_decided() -> None:
    bench = Bench(1)
    lease = bench.route([1] * 100, session="s")
    outcome = lease.settle(Ending(Result.CLIENT_GONE, 499, 1.0), started_at=0.0, stages=StageTimes())
    assert (outcome.prompt_tokens, outcome.completion_tokens, outcome.ttft_s) == (100, None, None)
    assert (outcome.result, outcome.affinity, outcome.mode) == (Result.CLIENT_GONE, "new", PrefixMode.EXACT)


def test_recent_decisions_are_bounded_newest_first_and_joined_with_their_outcome() -> None:
    bench = Bench(1, settings=RouterSettings(recent_decisions=3))
    leases = [bench.route([number] * 40, request_id=f"r{number}") for number in range(5)]
    outcome = leases[3].settle(completed(1.0), started_at=0.0, stages=StageTimes())
    leases[0].settle(completed(1.0), started_at=0.0, stages=StageTimes())
    recent = bench.router.recent()
    assert [record.decision.request_id for record in recent] == ["r4", "r3", "r2"]
    assert [record.outcome for record in recent] == [None, outcome, None]


def test_answers_teach_their_length_and_short_limits_are_believed() -> None:
    bench, rng = Bench(1), Random(1)
    for number in range(300):
        lease = bench.route(words(rng, 64), float(number))
        lease.first_byte(number + 0.1)
        lease.settle(completed(number + 0.9, answer=900), started_at=float(number), stages=StageTimes())
    worker = bench.fleet.workers[WorkerId("w0")]
    expected = bench.fleet.pools["m"].rates.output_tokens
    assert expected == pytest.approx(900, rel=0.02)
    for limit, choices, tokens in ((None, 1, 896), (20, 1, 32), (20, 3, 96)):
        lease = bench.route(words(rng, 64), 1000.0, max_tokens=limit, choices=choices)
        assert worker.unindexed_tokens - worker.inflight_tokens == pytest.approx(tokens, abs=SIZE)
        finish(lease, 1001.0)
    lease = bench.route(words(rng, 64), 1000.0, endpoint=Endpoint.EMBEDDINGS)
    assert worker.unindexed_tokens == worker.inflight_tokens


def test_a_crowded_cache_is_avoided() -> None:
    bench = Bench(2)
    bench.fleet.load(WorkerId("w0"), LoadSample(running=0, waiting=0, kv_usage=0.95), 0.0)
    bench.fleet.load(WorkerId("w1"), LoadSample(running=0, waiting=0, kv_usage=0.10), 0.0)
    assert {bench.route([n] * 100, 0.1).worker.id for n in range(5)} == {"w1"}


def test_several_answers_are_reserved_and_learned_one_by_one() -> None:
    bench = Bench(1)
    (worker,) = bench.fleet.workers.values()
    pool = bench.router.pool("m")
    for _ in range(200):
        lease = bench.route([1] * 40, choices=4)
        lease.settle(completed(3.0, answer=1200), started_at=0.0, stages=StageTimes())
    assert pool.rates.output_tokens == pytest.approx(300, rel=0.05)
    before = worker.kv_tokens
    bench.route([1] * 40, choices=2, prompt=TokenPrompt(([1] * 20, [1] * 20)))
    assert worker.kv_tokens - before == pytest.approx(4 * 300, rel=0.15)


def test_tokens_of_one_answer_are_timed_when_there_are_several() -> None:
    bench = Bench(1)
    lease = bench.route([1] * 40, choices=2)
    outcome = lease.settle(completed(3.0, answer=22), started_at=0.0, stages=StageTimes())
    assert outcome.inter_token_s == pytest.approx(0.05)


def test_a_client_cannot_reserve_without_bound() -> None:
    bench = Bench(2)
    for worker in bench.fleet.workers.values():
        bench.fleet.load(worker.id, LoadSample(0, 0, 0.0), 0.0)
    lease = bench.route([1] * 40, choices=10**400, max_tokens=10**400)
    assert lease.worker.kv_tokens < 100_000
    bench.route([1] * 40)
