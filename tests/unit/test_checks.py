"""Predicted against delivered, over the real index: what each miss is called, and who is believed less for it."""

from __future__ import annotations

from random import Random

import pytest

from gateway import keys
from gateway.kv.events import Cleared, Removed
from gateway.leases import Lease
from gateway.pool.evidence import IDENTITY_RUN
from gateway.records import (
    Chain,
    EngineHash,
    MissCause,
    Outcome,
    PrefixBlocks,
    PrefixMode,
    StageTimes,
    Tier,
    TrustState,
)
from tests.unit.test_router import SIZE, Bench, completed, prompt, request, words

TOKENS = words(Random(5), 40 * SIZE + 3)
WHOLE = 40 * SIZE


def settle(lease: Lease, delivered: int | None, at: float = 1.0) -> Outcome:
    lease.first_byte(at - 0.5)
    ending = completed(at, prompt_tokens=len(TOKENS), cached=delivered)
    return lease.settle(ending, started_at=at - 1.0, stages=StageTimes())


def remove(bench: Bench, name: str, *blocks: int, tier: Tier = Tier.GPU) -> None:
    hashes = [EngineHash(int(key)) for key in keys.chain(keys.namespace(), TOKENS, SIZE)]
    bench.index.apply(bench.slot(name), 0, [Removed([hashes[at] for at in blocks], tier)])


def test_a_miss_without_any_sign_is_a_stale_index() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    outcome = settle(bench.route(TOKENS), 0)
    assert (outcome.missed_tokens, outcome.miss_cause) == (WHOLE, MissCause.STALE_INDEX)
    assert bench.worker("w0").trust < 1.0


def test_a_hit_costs_no_trust_and_has_no_cause() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    outcome = settle(bench.route(TOKENS), WHOLE)
    assert (outcome.missed_tokens, outcome.miss_cause) == (0, None)
    assert bench.worker("w0").trust == 1.0
    assert bench.worker("w0").belief.predictions == 1


def test_blocks_removed_between_decision_and_answer_were_evicted() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    lease = bench.route(TOKENS)
    remove(bench, "w0", *range(20, 40))
    outcome = settle(lease, 20 * SIZE)
    assert (outcome.missed_tokens, outcome.miss_cause) == (20 * SIZE, MissCause.EVICTED)
    assert bench.worker("w0").trust == 1.0


def test_blocks_removed_and_announced_again_by_the_request_were_evicted() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    lease = bench.route(TOKENS)
    remove(bench, "w0", *range(40))
    bench.hold("w0", TOKENS)
    assert settle(lease, 0).miss_cause is MissCause.EVICTED


def test_a_cache_cleared_by_an_event_was_evicted() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    lease = bench.route(TOKENS)
    bench.index.apply(bench.slot("w0"), 0, [Cleared()])
    assert settle(lease, 0).miss_cause is MissCause.EVICTED
    assert bench.worker("w0").trust == 1.0


def test_an_index_purged_between_decision_and_answer_was_stale_and_is_not_doubted_now() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    lease = bench.route(TOKENS)
    bench.index.purge(bench.slot("w0"))
    assert settle(lease, 0).miss_cause is MissCause.STALE_INDEX
    assert bench.worker("w0").trust == 1.0


def test_promises_that_did_not_come_are_a_stale_index_and_cost_no_trust() -> None:
    bench = Bench(1)
    first = bench.route(TOKENS)
    second = bench.route(TOKENS)
    assert second.decision.predicted_tokens == WHOLE
    outcome = settle(second, 0)
    assert outcome.miss_cause is MissCause.STALE_INDEX
    assert bench.worker("w0").trust == 1.0
    settle(first, 0)


def test_what_was_announced_counts_where_the_rest_was_promised() -> None:
    """20 blocks announced, 20 promised: nothing delivered is a contradiction, the announced half is none."""
    bench = Bench(1)
    bench.hold("w0", TOKENS[: 20 * SIZE])
    bench.route(TOKENS)
    half, nothing = bench.route(TOKENS), bench.route(TOKENS)
    assert settle(half, 20 * SIZE).miss_cause is MissCause.STALE_INDEX
    assert bench.worker("w0").trust == 1.0
    assert settle(nothing, 0).miss_cause is MissCause.STALE_INDEX
    assert bench.worker("w0").trust < 1.0


def test_a_slow_tier_that_was_not_loaded_spilled() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    bench.hold("w0", TOKENS, tier=Tier.CPU)
    remove(bench, "w0", *range(10, 40))
    bench.router.expire(0.0)
    lease = bench.route(TOKENS)
    assert lease.decision.predicted_tokens == WHOLE
    outcome = settle(lease, 10 * SIZE)
    assert (outcome.missed_tokens, outcome.miss_cause) == (30 * SIZE, MissCause.SPILLED)
    assert bench.worker("w0").trust == 1.0


def test_a_moved_request_missed_the_first_choice() -> None:
    bench = Bench(2)
    bench.hold("w0", TOKENS)
    failed = bench.route(TOKENS)
    blocks = prompt(TOKENS)
    moved = bench.router.route(request(), blocks, 0.1, excluded=frozenset({failed.worker.id}), instead_of=failed)
    outcome = settle(moved, 0)
    assert (outcome.worker, outcome.predicted_tokens) == ("w1", 0)
    assert (outcome.missed_tokens, outcome.miss_cause) == (WHOLE, MissCause.RETRY)
    assert bench.worker("w0").trust == bench.worker("w1").trust == 1.0


def test_a_hit_the_session_s_credit_outbid_is_a_miss_by_affinity() -> None:
    """The home holds nothing, the other two blocks, which save less than the credit."""
    bench = Bench(2)
    home = bench.route(words(Random(9), 8), session="s")
    settle(home, 0)
    other = next(name for name in ("w0", "w1") if name != home.worker.id)
    tokens = TOKENS[: 4 * SIZE]
    bench.hold(other, tokens[: 3 * SIZE])
    lease = bench.route(tokens, 1.0, session="s")
    assert (lease.worker.id, lease.decision.affinity) == (home.worker.id, "kept")
    outcome = settle(lease, 0, 2.0)
    assert (outcome.missed_tokens, outcome.miss_cause) == (3 * SIZE, MissCause.AFFINITY)


def test_the_worker_of_an_identity_problem_is_named_in_the_cause() -> None:
    bench, now = Bench(1), 0.0
    causes = []
    for number in range(IDENTITY_RUN + 1):
        tokens = words(Random(100 + number), 10 * SIZE + 1)
        bench.hold("w0", tokens)
        causes.append(settle(bench.route(tokens, now), 0, now + 1.0).miss_cause)
        now += 2.0
    assert causes == [MissCause.STALE_INDEX] * IDENTITY_RUN + [MissCause.IDENTITY]
    assert [finding.code for finding in bench.worker("w0").findings] == ["identity"]


def test_of_a_worker_without_events_nobody_knows() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    bench.worker("w0").follow(TrustState.BLIND, 0.0)
    assert settle(bench.route(TOKENS), 0).miss_cause is MissCause.UNKNOWN


@pytest.mark.parametrize(("delivered", "cause"), [(0, MissCause.UNKNOWN), (WHOLE * 3 // 4, None)])
def test_text_says_nothing_about_events(delivered: int, cause: MissCause | None) -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    exact = prompt(TOKENS)
    text = PrefixBlocks(exact.chains, exact.tokens, exact.block_size, PrefixMode.APPROXIMATE)
    outcome = settle(bench.router.route(request(), text, 0.0), delivered)
    assert outcome.miss_cause is cause
    assert bench.worker("w0").trust == 1.0
    assert bench.worker("w0").belief.predictions == 0


def test_a_worker_that_does_not_say_is_neither_believed_nor_doubted_for_it() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS)
    assert settle(bench.route(TOKENS), None).miss_cause is None
    assert bench.worker("w0").belief.predictions == 0


def test_a_distrusted_worker_still_gets_requests_it_alone_claims_and_recovers() -> None:
    bench, now = Bench(2), 0.0
    for number in range(6):
        tokens = words(Random(300 + number), 10 * SIZE + 1)
        bench.hold("w0", tokens)
        settle(bench.route(tokens, now), 0, now + 1.0)
        now += 2.0
    assert bench.worker("w0").trust == pytest.approx(0.05, abs=0.05)
    for number in range(6):
        tokens = words(Random(400 + number), 100 * SIZE + 1)
        bench.hold("w0", tokens)
        lease = bench.route(tokens, now)
        assert lease.worker.id == "w0"
        settle(lease, 100 * SIZE, now + 1.0)
        now += 2.0
    assert bench.worker("w0").trust > 0.9


def test_a_distrusted_holder_gives_way_to_a_believed_one() -> None:
    bench = Bench(2)
    for number in range(3):
        tokens = words(Random(300 + number), 10 * SIZE + 1)
        bench.hold("w0", tokens)
        settle(bench.route(tokens, float(number)), 0, number + 0.9)
    bench.hold("w0", TOKENS)
    bench.hold("w1", TOKENS[: 20 * SIZE])
    decision = bench.route(TOKENS, 10.0).decision
    assert (decision.worker, decision.predicted_tokens, decision.available_tokens) == ("w1", 20 * SIZE, WHOLE)


def untold(known: int) -> PrefixBlocks:
    """`TOKENS` where an engine has told the first `known` blocks only; the rest goes by its text."""
    text_keys = keys.chain(keys.namespace("text"), TOKENS, SIZE)
    text = PrefixBlocks(((Chain(text_keys, len(TOKENS))),), len(TOKENS), SIZE, PrefixMode.APPROXIMATE, text_bytes=2560)
    told = Chain(keys.chain(keys.namespace(), TOKENS, SIZE)[:known], len(TOKENS))
    return PrefixBlocks((told,), len(TOKENS), SIZE, PrefixMode.ENGINE, text_bytes=2560, text=text)


@pytest.mark.parametrize("known", [0, 10])
def test_a_miss_beyond_the_token_ids_that_are_known_is_of_text_and_settles(known: int) -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS[: 5 * SIZE])
    first, second = (bench.router.route(request(), untold(known), 0.0) for _ in range(2))
    assert second.decision.predicted_tokens == WHOLE, "its text was sent there a moment ago"
    outcome = settle(second, 20 * SIZE)
    assert (outcome.missed_tokens, outcome.miss_cause) == (20 * SIZE, MissCause.UNKNOWN)
    assert bench.worker("w0").belief.predictions == 0, "text says nothing about events"
    settle(first, 0)
    assert (bench.router.open_leases, bench.worker("w0").inflight_requests) == (0, 0)


def test_hits_beyond_the_token_ids_that_are_known_are_no_identity_problem() -> None:
    bench = Bench(1)
    bench.hold("w0", TOKENS[: 5 * SIZE])
    bench.worker("w0").follow(TrustState.TRUSTED, 0.0)
    for number in range(2 * IDENTITY_RUN):
        settle(bench.router.route(request(), untold(0), 10.0 * number), 30 * SIZE, at=10.0 * number + 1.0)
        bench.router.expire(10.0 * number + 9.0)
    assert bench.worker("w0").belief.findings() == ()
