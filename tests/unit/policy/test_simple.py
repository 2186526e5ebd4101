"""The simple policies: who wins by each rule."""

from __future__ import annotations

from collections import Counter
from random import Random

import pytest

from gateway.policy import POLICY_NAMES, Ask, View, make_policy, pick
from gateway.records import Terms, WorkerId
from tests.unit.policy.stand import Stand

ASK = Ask(tokens=1000, output_tokens=0, block_size=16, overhead_s=0.01, token_s=1e-3, pair_s=0.0)


def stands(*inflight: int) -> list[Stand]:
    return [Stand(id=WorkerId(f"w{number}"), inflight_requests=count) for number, count in enumerate(inflight)]


def win(name: str, workers: list[Stand], *, hits: list[int] | None = None, ask: Ask = ASK, seed: int = 0) -> int:
    rng = Random(seed)
    policy = make_policy(name, rng=rng)
    view = View(workers, hits or [0] * len(workers), [0] * len(workers))
    return pick(policy, view, policy.score(ask, view, 0.0), session=None, rng=rng)


@pytest.mark.parametrize("name", POLICY_NAMES)
def test_every_policy_gives_every_candidate_a_finite_number_and_carries_its_name(name: str) -> None:
    policy = make_policy(name, rng=Random(0))
    view = View(stands(0, 5, 2), [0, 100, 0], [0, 0, 0])
    rows = policy.score(ASK._replace(leading=7), view, 0.0)
    assert policy.name == name
    assert len(rows) == 3
    assert all(abs(Terms(*row).cost) < 1e9 for row in rows)
    assert win(name, stands(3)) == 0


def test_an_unknown_policy_is_refused_with_the_names() -> None:
    with pytest.raises(ValueError, match="seconds, least_load"):
        make_policy("sekonds", rng=Random(0))


def test_least_load_counts_requests_per_weight() -> None:
    workers = stands(4, 3, 9)
    assert win("least_load", workers) == 1
    workers[2].weight = 4.0
    assert win("least_load", workers) == 2


def test_round_robin_takes_each_in_turn() -> None:
    workers = stands(0, 50, 0)
    taken = []
    for turn in range(1, 10):
        at = win("round_robin", workers)
        workers[at].picked = turn
        taken.append(at)
    assert taken[3:] == taken[:3] * 2
    assert sorted(taken[:3]) == [0, 1, 2]


def test_random_keeps_to_the_weights() -> None:
    workers = stands(0, 0)
    workers[1].weight = 3.0
    counts = Counter(win("random", workers, seed=seed) for seed in range(2000))
    assert counts[1] / 2000 == pytest.approx(0.75, abs=0.04)


def test_two_choices_never_takes_the_most_loaded() -> None:
    counts = Counter(win("p2c", stands(1, 2, 9), seed=seed) for seed in range(300))
    assert counts[2] == 0
    assert counts[0] > counts[1] > 0


def test_prefix_hash_is_steady_moves_little_and_is_bounded() -> None:
    workers = stands(*[0] * 8)
    homes = [win("prefix_hash", workers, ask=ASK._replace(leading=key)) for key in range(400)]
    assert homes == [win("prefix_hash", workers, ask=ASK._replace(leading=key)) for key in range(400)]
    assert min(Counter(homes).values()) > 20
    without = workers[:-1]
    moved = [win("prefix_hash", without, ask=ASK._replace(leading=key)) for key in range(400)]
    assert all(now == before for now, before in zip(moved, homes, strict=True) if before != 7)
    workers[homes[0]].inflight_requests = 10
    assert win("prefix_hash", workers, ask=ASK._replace(leading=0)) != homes[0]


def test_lmetric_weighs_new_tokens_by_batch() -> None:
    assert win("lmetric", stands(3, 0), hits=[900, 0]) == 0
    assert win("lmetric", stands(30, 0), hits=[900, 0]) == 1
