"""Properties of the score: more cost never attracts, more overlap never repels, and every term keeps its sign."""

from __future__ import annotations

import math
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from gateway.policy import Ask, Seconds, View, Weights, pick
from gateway.records import Slot, Terms, WorkerId
from tests.unit.policy.stand import Stand

CAPACITY = 100_000


def build(number: int, values: tuple[float, float, float, int, int, float, float]) -> Stand:
    pending_s, head_share, slowdown, inflight, kv_tokens, discount, foreign_s = values
    return Stand(
        id=WorkerId(f"w{number}"),
        slot=Slot(number),
        pending_s=pending_s,
        head_s=pending_s * head_share,
        slowdown=slowdown,
        inflight_requests=inflight,
        kv_tokens=kv_tokens,
        kv_capacity=CAPACITY,
        evict_discount=discount,
        foreign_s=foreign_s,
        picked=number,
    )


stands = st.tuples(
    st.floats(0, 30), st.floats(0, 1), st.floats(0.2, 5), st.integers(0, 200), st.integers(0, CAPACITY),
    st.floats(0, 1), st.floats(0, 10),
)  # fmt: skip
asks = st.builds(
    Ask,
    tokens=st.integers(1, 50_000),
    output_tokens=st.integers(0, 4_000),
    block_size=st.just(16),
    overhead_s=st.floats(1e-4, 0.1),
    token_s=st.floats(1e-6, 1e-2),
    pair_s=st.floats(0, 1e-7),
    computing=st.integers(0, 8),
    new_prefix=st.integers(0, 50_000),
    waited_s=st.floats(0, 60),
    settled_s=st.floats(0, 60),
)
weights = st.builds(Weights, alpha=st.just(1.0) | st.floats(0, 3), beta=st.floats(0, 3), gamma=st.floats(0, 3))
worse = st.sampled_from(
    ["pending_s", "foreign_s", "inflight_requests", "kv_tokens", "foreign_requests", "unindexed_tokens"]
)


@given(values=st.lists(stands, min_size=2, max_size=6), ask=asks, weight=weights, what=worse, more=st.floats(0, 50),
       seed=st.integers(0, 99), data=st.data())  # fmt: skip
def test_adding_cost_never_makes_a_worker_more_attractive(
    values: list[tuple[float, float, float, int, int, float, float]],
    ask: Ask,
    weight: Weights,
    what: str,
    more: float,
    seed: int,
    data: st.DataObject,
) -> None:
    workers = [build(number, value) for number, value in enumerate(values)]
    count = len(workers)
    hits = data.draw(st.lists(st.integers(0, ask.tokens - 1), min_size=count, max_size=count))
    resident = data.draw(st.lists(st.integers(0, CAPACITY), min_size=count, max_size=count))
    policy = Seconds(weight)

    home = data.draw(st.none() | st.integers(0, count - 1))

    def run(candidates: list[Stand]) -> tuple[int, list[Terms]]:
        view = View(candidates, hits, resident, home=home)
        scores = policy.score(ask, view, 1.0)
        assert scores.costs == [row[0] for row in scores]  # the number and its parts are worked out apart
        return pick(policy, view, scores, session=None, rng=Random(seed)), [Terms(*row) for row in scores]

    won, terms = run(workers)
    assert all(math.isfinite(value) for term in terms for value in term)
    burdened = data.draw(st.integers(0, count - 1))
    heavier = list(workers)
    amount = more if what.endswith("_s") else int(more)
    heavier[burdened] = replace(workers[burdened], **{what: getattr(workers[burdened], what) + amount})
    won_after, terms_after = run(heavier)
    assert terms_after[burdened].cost >= terms[burdened].cost - 1e-9
    others = [at for at in range(count) if at != burdened]
    assert all(terms_after[at] == terms[at] for at in others)
    if won_after == burdened and won != burdened:
        # Only as one of several equals, as it was before.
        limit = min(term.cost for term in terms)
        near = max(policy.near(term.own_s, cold=cold) for term in terms for cold in (True, False))
        assert terms[burdened].cost <= limit + near + 1e-9


@given(value=stands, ask=asks, data=st.data())
def test_more_overlap_never_costs_more(
    value: tuple[float, float, float, int, int, float, float], ask: Ask, data: st.DataObject
) -> None:
    worker = build(0, value)
    less = data.draw(st.integers(0, ask.tokens - 1))
    more = data.draw(st.integers(less, ask.tokens - 1))
    resident = data.draw(st.integers(0, CAPACITY))
    costs = [Terms(*Seconds().score(ask, View([worker], [hit], [resident]), 1.0)[0]) for hit in (less, more)]
    assert costs[1].cost <= costs[0].cost + 1e-9 * abs(costs[0].cost)
    assert all(part >= -1e-9 for term in costs for part in term[1:])
