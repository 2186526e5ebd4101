"""How far a worker's index is believed: fast down, back by hits and by time, tightened and relaxed, identity."""

from __future__ import annotations

import pytest

from gateway.pool.evidence import IDENTITY_RUN, LEAST_PREDICTIONS, Check
from gateway.pool.trust import FLOOR, HEAL_S, Remedy, Trust
from gateway.records import MissCause, TrustState

SIZE = 16
PROMPT = 640


class Stand:
    """One worker's trust, and requests of 640 predicted tokens that end one after another, a second apart."""

    def __init__(self, feed: TrustState = TrustState.TRUSTED) -> None:
        self.trust = Trust()
        self.now = 100.0
        self.trust.follow(feed, self.now)

    def requests(self, *delivered: int, cause: MissCause = MissCause.STALE_INDEX, doubts: bool = True) -> None:
        for tokens in delivered:
            missed = PROMPT - tokens > 0.1 * PROMPT
            self.one(tokens, cause=cause if missed else None, doubts=doubts and missed)

    def one(
        self,
        delivered: int,
        *,
        predicted: int = PROMPT,
        announced: int | None = None,
        cause: MissCause | None = None,
        doubts: bool = False,
        relearned: bool = False,
        model: str = "m",
    ) -> None:
        self.now += 1.0
        told = predicted if announced is None else announced
        check = Check(model, predicted, told, delivered, SIZE, self.now - 0.5, cause, doubts, relearned)
        self.trust.observe(check, self.now)

    def wait(self, seconds: float) -> None:
        until = self.now + seconds
        while self.now < until:
            self.now += 0.5
            self.trust.tick(self.now)


def test_one_miss_among_many_hits_moves_little_and_is_forgiven_by_the_next_hit() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * 30, 0)
    assert 0.9 < stand.trust.factor < 1.0
    assert stand.trust.state is TrustState.TRUSTED
    stand.requests(PROMPT)
    assert stand.trust.factor == 1.0


@pytest.mark.parametrize("hits", [0, 3, 1000])
def test_two_misses_in_a_row_without_a_sign_are_enough(hits: int) -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * hits, 0, 0)
    assert stand.trust.factor < 0.3
    assert stand.trust.contradicted
    assert stand.trust.state is TrustState.UNCERTAIN
    stand.requests(0, 0, 0)
    assert stand.trust.factor == FLOOR


def test_hits_bring_trust_back() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * 5, 0, 0, 0, 0)
    stand.requests(PROMPT, PROMPT)
    assert stand.trust.factor > 0.6
    stand.requests(PROMPT, PROMPT)
    assert stand.trust.factor > 0.95
    assert stand.trust.state is TrustState.TRUSTED


def test_time_heals_and_every_relapse_makes_it_slower() -> None:
    stand = Stand()
    stand.requests(0, 0)
    waits = []
    for _ in range(4):
        began = stand.now
        while stand.trust.contradicted:
            stand.wait(1.0)
        waits.append(stand.now - began)
        stand.requests(0, 0)
        assert stand.trust.contradicted
    assert waits[0] < 3 * HEAL_S
    assert waits == sorted(waits)
    assert waits[-1] > 3 * waits[0]


def test_a_worker_that_delivers_half_is_believed_by_half() -> None:
    stand = Stand()
    stand.requests(*[PROMPT // 2] * 40, cause=MissCause.STALE_INDEX)
    assert stand.trust.factor == pytest.approx(0.5, abs=0.05)
    assert stand.trust.tightened


def test_what_was_removed_in_between_says_nothing_about_the_events() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * 10, 0, 0, 0, cause=MissCause.EVICTED, doubts=False)
    assert not stand.trust.contradicted
    assert stand.trust.factor == 1.0
    assert stand.trust.misses == 3


def test_while_predictions_fail_too_often_the_credit_is_what_was_delivered_of_them() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * 8, 0, PROMPT, *[PROMPT] * 8, 0, PROMPT)
    assert stand.trust.tightened
    assert stand.trust.factor == pytest.approx(0.92, abs=0.02)
    assert stand.trust.state is TrustState.TRUSTED


def test_promises_are_not_held_against_the_events() -> None:
    stand = Stand()
    for _ in range(5):
        stand.one(0, announced=0, cause=MissCause.STALE_INDEX)
    assert stand.trust.factor == 1.0


def test_what_was_decided_before_the_index_was_emptied_is_no_evidence() -> None:
    stand = Stand()
    for _ in range(10):
        stand.one(0, cause=MissCause.STALE_INDEX, relearned=True)
    assert not stand.trust.contradicted


def test_a_single_block_is_too_little_to_be_evidence() -> None:
    stand = Stand()
    stand.requests(0, 0)
    before = stand.trust.factor
    stand.one(0, predicted=SIZE)
    assert stand.trust.factor == pytest.approx(before, abs=0.05)


# --------------------------------------------------------------------------- the feed's state


@pytest.mark.parametrize(
    ("feed", "factor"),
    [
        (TrustState.TRUSTED, 1.0),
        (TrustState.CATCHING_UP, 0.75),
        (TrustState.UNCERTAIN, 0.85),
        (TrustState.BLIND, 0.9),
    ],
)
def test_the_feed_alone_lowers_the_credit(feed: TrustState, factor: float) -> None:
    stand = Stand(feed)
    assert stand.trust.factor == pytest.approx(factor)
    assert stand.trust.state is feed


@pytest.mark.parametrize("feed", [TrustState.UNCERTAIN, TrustState.BLIND])
def test_hits_lift_the_doubt_of_a_feed_that_is_not_whole(feed: TrustState) -> None:
    stand = Stand(feed)
    stand.requests(*[PROMPT] * 5)
    assert stand.trust.factor > 0.95
    assert stand.trust.state is feed


def test_a_repaired_feed_is_believed_again_but_not_against_what_requests_said() -> None:
    stand = Stand()
    stand.trust.follow(TrustState.CATCHING_UP, 101.0)
    stand.trust.follow(TrustState.TRUSTED, 102.0)
    assert stand.trust.factor == 1.0
    stand.requests(0, 0)
    stand.trust.follow(TrustState.CATCHING_UP, stand.now)
    stand.trust.follow(TrustState.TRUSTED, stand.now)
    assert stand.trust.contradicted
    assert stand.trust.factor < 0.3


# --------------------------------------------------------------------------- rate and remedies


def test_the_rate_tightens_above_the_threshold_and_relaxes_below_half_of_it() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * (LEAST_PREDICTIONS - 3), 0, PROMPT, 0)
    assert stand.trust.miss_rate == pytest.approx(2 / 20)
    assert stand.trust.tightened
    stand.requests(*[PROMPT] * 40)
    assert stand.trust.miss_rate == pytest.approx(2 / 60)
    between = stand.trust.tightened
    assert between, "3.3 % is below the threshold, not below half of it"
    stand.requests(*[PROMPT] * 25)
    assert (stand.trust.tightened, between) == (False, True)


def test_few_predictions_make_no_rate() -> None:
    stand = Stand()
    stand.requests(PROMPT, PROMPT, 0, PROMPT)
    assert stand.trust.miss_rate is None
    assert not stand.trust.tightened


def test_a_contradicted_worker_is_tightened_and_relaxes_by_time() -> None:
    stand = Stand()
    stand.requests(0, 0)
    assert stand.trust.tightened
    stand.wait(3 * HEAL_S)
    assert not stand.trust.tightened


def test_a_contradicted_index_is_learned_anew_from_where_the_doubts_began_once() -> None:
    stand = Stand()
    stand.requests(*[PROMPT] * 5)
    began = stand.now + 0.5
    stand.requests(0, 0)
    assert stand.trust.remedy(stand.now) == Remedy(began)
    assert stand.trust.remedy(stand.now) is None
    stand.wait(70.0)
    assert stand.trust.remedy(stand.now) is None, "nothing has spoken against the new one"
    stand.requests(0, 0)
    assert stand.trust.remedy(stand.now) is not None
    stand.requests(0, 0)
    stand.wait(120.0)
    assert stand.trust.remedy(stand.now) is None, "the second try rests for four times as long"


def test_single_misses_ask_for_the_whole_history_first() -> None:
    stand = Stand()
    stand.requests(*[PROMPT, PROMPT, PROMPT, PROMPT, 0] * 6, PROMPT)
    assert stand.trust.remedy(stand.now) == Remedy(None)


def test_nothing_is_learned_anew_for_evictions_or_without_events() -> None:
    stand = Stand()
    stand.requests(*[PROMPT, 0] * 20, cause=MissCause.EVICTED, doubts=False)
    assert stand.trust.tightened
    assert stand.trust.remedy(stand.now) is None
    blind = Stand(TrustState.BLIND)
    blind.requests(*[0] * 10)
    assert blind.trust.remedy(blind.now) is None


# --------------------------------------------------------------------------- identity


def test_nothing_delivered_of_what_is_announced_is_an_identity_problem() -> None:
    stand = Stand()
    stand.requests(*[0] * (IDENTITY_RUN - 1))
    assert not stand.trust.identity("m")
    stand.requests(0)
    assert stand.trust.identity("m")
    assert not stand.trust.identity("another")
    (finding,) = stand.trust.findings()
    assert finding.code == "identity"
    assert "model m: nothing was delivered" in finding.message
    assert stand.trust.remedy(stand.now) is None, "learning it anew would change nothing"
    stand.requests(PROMPT)
    assert not stand.trust.identity("m")
    assert stand.trust.findings() == ()


def test_hits_that_were_never_announced_are_an_identity_problem() -> None:
    stand = Stand()
    for _ in range(IDENTITY_RUN):
        stand.one(PROMPT, predicted=0)
    (finding,) = stand.trust.findings()
    assert "never announced" in finding.message
    assert stand.trust.factor == 1.0


def test_requests_of_one_burst_count_once() -> None:
    stand = Stand()
    for _ in range(50):
        check = Check("m", PROMPT, PROMPT, 0, SIZE, 99.0, MissCause.STALE_INDEX, doubts=True)
        stand.trust.observe(check, 101.0)
    assert not stand.trust.identity("m")


def test_unpredicted_hits_are_to_be_expected_after_the_index_was_emptied() -> None:
    stand = Stand()
    stand.requests(0, 0)
    assert stand.trust.remedy(stand.now) is not None
    for _ in range(2 * IDENTITY_RUN):
        stand.one(PROMPT, predicted=0)
    assert not stand.trust.identity("m")


def test_models_are_bounded() -> None:
    stand = Stand()
    for number in range(2000):
        stand.one(PROMPT, predicted=0, model=f"adapter-{number}")
    for _ in range(IDENTITY_RUN):
        stand.one(PROMPT, predicted=0, model="last")
    assert len(stand.trust.findings()) == 1
