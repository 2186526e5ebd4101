"""Trust under any evidence: a factor in its bounds, never lower for more delivered tokens, and never lost for good."""

from __future__ import annotations

import copy
import itertools
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from gateway.pool.evidence import WINDOW, Check
from gateway.pool.misses import missed
from gateway.pool.trust import FLOOR, Trust
from gateway.records import MissCause, TrustState

SIZE = 16
DOUBTED = (MissCause.STALE_INDEX, MissCause.IDENTITY, MissCause.UNKNOWN)


@dataclass(frozen=True)
class Step:
    """Some time, then a request or a change of the feed."""

    wait_s: float
    feed: TrustState | None
    predicted: int
    announced: int
    delivered: int
    cause: MissCause
    relearned: bool
    asks: bool


steps = st.builds(
    Step,
    wait_s=st.sampled_from([0.0, 0.001, 0.1, 5.0, 90.0, 4000.0]),
    feed=st.one_of(st.none(), st.none(), st.sampled_from(list(TrustState))),
    predicted=st.integers(0, 2000),
    announced=st.integers(0, 2000),
    delivered=st.integers(0, 3000),
    cause=st.sampled_from([*DOUBTED, MissCause.EVICTED, MissCause.SPILLED]),
    relearned=st.booleans(),
    asks=st.booleans(),
)


def check(step: Step, delivered: int, now: float) -> Check:
    short = missed(step.predicted, delivered, SIZE)
    return Check(
        "m",
        step.predicted,
        min(step.predicted, step.announced),
        delivered,
        SIZE,
        now,
        step.cause if short else None,
        doubts=bool(short) and step.cause in DOUBTED,
        relearned=step.relearned,
    )


def run(history: list[Step], trust: Trust, now: float = 0.0) -> float:
    for step in history:
        now += step.wait_s
        if step.feed is not None:
            trust.follow(step.feed, now)
        trust.observe(check(step, step.delivered, now), now)
        if step.asks:
            trust.remedy(now)
        assert FLOOR <= trust.factor <= 1.0
        assert trust.predictions <= WINDOW
        assert 0 <= trust.misses <= trust.predictions
    return now


@given(st.lists(steps, max_size=60))
def test_the_factor_stays_in_its_bounds(history: list[Step]) -> None:
    trust = Trust()
    now = run(history, trust)
    trust.tick(now + 1.0)
    assert FLOOR <= trust.factor <= 1.0


@given(st.lists(steps, max_size=30), steps, st.integers(0, 3000), st.integers(0, 3000))
def test_more_delivered_never_lowers_trust(history: list[Step], last: Step, one: int, other: int) -> None:
    trust = Trust()
    now = run(history, trust) + last.wait_s
    less, more = copy.deepcopy(trust), copy.deepcopy(trust)
    less.observe(check(last, min(one, other), now), now)
    more.observe(check(last, max(one, other), now), now)
    assert less.factor <= more.factor + 1e-9


@given(st.lists(steps, max_size=40))
def test_hits_bring_trust_back_whatever_was_before(history: list[Step]) -> None:
    trust = Trust()
    now = run(history, trust)
    for _ in range(60):
        now += 1.0
        trust.observe(Check("m", 640, 640, 640, SIZE, now), now)
    assert trust.factor > 0.9
    assert not trust.contradicted
    assert not trust.identity("m")


@given(st.lists(steps, max_size=40))
def test_time_alone_gives_a_worker_a_chance_to_show(history: list[Step]) -> None:
    trust = Trust()
    now = run(history, trust)
    trust.follow(TrustState.TRUSTED, now)
    for _ in range(120):
        now += 60.0
        trust.tick(now)
    assert trust.factor > 0.9
    assert not trust.tightened


@given(st.lists(steps, max_size=80))
def test_remedies_are_rare(history: list[Step]) -> None:
    """At most one a minute, whatever requests say."""
    trust, now, given_at = Trust(), 0.0, []
    for step in history:
        now += step.wait_s
        trust.observe(check(step, step.delivered, now), now)
        if trust.remedy(now) is not None:
            given_at.append(now)
    assert all(later - earlier >= 60.0 for earlier, later in itertools.pairwise(given_at))


feeds = st.lists(st.sampled_from(list(TrustState)), max_size=8)


@given(st.lists(steps, max_size=30), feeds, st.sampled_from(list(TrustState)))
def test_what_speaks_against_an_index_outlives_any_order_of_feed_states(
    history: list[Step], between: list[TrustState], last: TrustState
) -> None:
    """The states in between leave no trace: what counts is the last one, and what requests said."""
    straight, winding = Trust(), Trust()
    now = run(history, straight)
    run(history, winding)
    for trust in (straight, winding):
        for feed in (TrustState.BLIND, TrustState.TRUSTED):
            trust.follow(feed, now)  # a change at least: hits do not outlive it
    for feed in [*between, last]:
        winding.follow(feed, now)
    straight.follow(last, now)
    assert straight.believed == winding.believed


@given(
    st.sampled_from([state for state in TrustState if state is not TrustState.BLIND]), feeds, st.floats(0.0, 1.0), feeds
)
def test_two_misses_in_a_row_contradict_a_whole_feed_whatever_it_was_when_they_came(
    at_first: TrustState, between: list[TrustState], pause_s: float, after: list[TrustState]
) -> None:
    trust = Trust()
    trust.follow(at_first, 0.0)
    miss = Check("m", 640, 640, 0, SIZE, 0.0, MissCause.STALE_INDEX, doubts=True)
    trust.observe(miss, 0.0)
    for feed in [*between, TrustState.TRUSTED]:
        trust.follow(feed, pause_s)
    trust.observe(miss, pause_s)
    for feed in [*after, TrustState.TRUSTED]:
        trust.follow(feed, pause_s)
    assert trust.contradicted


@given(st.integers(1, 50), st.integers(0, 2))
def test_misses_of_an_index_that_is_being_filled_leave_it_to_one_more(filling: int, more: int) -> None:
    trust = Trust()
    trust.follow(TrustState.CATCHING_UP, 0.0)
    miss = Check("m", 640, 640, 0, SIZE, 0.0, MissCause.STALE_INDEX, doubts=True)
    for _ in range(filling):
        trust.observe(miss, 0.0)
    trust.follow(TrustState.TRUSTED, 0.0)
    for _ in range(more):
        trust.observe(miss, 0.0)
    assert trust.contradicted == (more > 0)
