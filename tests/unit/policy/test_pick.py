"""Near-ties: at random among warm ones, in turn among cold ones, by session where one is new."""

from __future__ import annotations

from collections import Counter
from random import Random

from gateway.policy import Candidates, Scores, Seconds, View, pick
from gateway.policy.pick import rendezvous
from gateway.policy.seam import Row, row
from gateway.records import Candidate, Terms, WorkerId
from tests.unit.policy.stand import Stand


def choose(
    costs: list[float], hits: list[int], *, own_s: float = 0.1, picked: list[int] | None = None,
    session: str | None = None, seed: int = 0,
) -> int:  # fmt: skip
    workers = [Stand(id=WorkerId(f"w{n}"), picked=(picked or [0] * len(costs))[n]) for n in range(len(costs))]
    scores = Scores(costs, lambda at: (costs[at], 0.0, 0.0, own_s, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0))
    return pick(Seconds(), View(workers, hits, [0] * len(costs)), scores, session=session, rng=Random(seed))


def test_the_lowest_wins_beyond_near() -> None:
    assert choose([1.0, 0.9, 1.1], [500, 500, 500]) == 1
    assert choose([1.0, 0.9, 1.1], [0, 0, 0]) == 1


def test_warm_near_ties_are_drawn() -> None:
    drawn = Counter(choose([1.0, 1.0005, 1.5], [500, 500, 500], seed=seed) for seed in range(200))
    assert min(drawn[0], drawn[1]) > 50
    assert drawn[2] == 0


def test_of_near_ties_with_overlaps_the_longest_are_drawn() -> None:
    hits = [64, 500, 480, 0]
    drawn = Counter(choose([1.0, 1.0005, 1.0002, 1.0], hits, seed=seed) for seed in range(200))
    assert min(drawn[1], drawn[2]) > 50
    assert drawn[0] == drawn[3] == 0
    assert {choose([1.0, 1.0005], [0, 500], seed=seed) for seed in range(20)} == {1}


def test_cold_near_ties_go_to_the_one_not_chosen_for_longest() -> None:
    assert choose([1.0, 1.004, 1.5], [0, 0, 0], picked=[9, 4, 1]) == 1
    assert choose([1.0, 1.004, 1.5], [0, 0, 0], picked=[4, 9, 1]) == 0


def test_a_new_session_has_one_first_choice_on_every_replica() -> None:
    for name in ("chat-1", "chat-2", "chat-3"):
        chosen = {
            choose([1.0] * 8, [0] * 8, picked=Random(seed).sample(range(8), 8), session=name, seed=seed)
            for seed in range(20)
        }
        assert len(chosen) == 1
    homes = Counter(choose([1.0] * 8, [0] * 8, session=f"chat-{n}") for n in range(800))
    assert min(homes.values()) > 60


def test_a_session_is_no_reason_to_leave_a_warm_or_a_better_worker() -> None:
    assert choose([1.0, 0.5], [0, 0], session="s") == 1
    assert {choose([1.0, 1.0], [500, 500], session="s", seed=seed) for seed in range(20)} == {0, 1}


def test_rendezvous_depends_on_names_alone() -> None:
    assert rendezvous(b"k", WorkerId("a")) == rendezvous(b"k", WorkerId("a"))
    assert rendezvous(b"k", WorkerId("a")) != rendezvous(b"k", WorkerId("b"))


def test_candidates_are_records_made_on_demand() -> None:
    rows: list[Row] = [row(float(n)) for n in range(3)]
    candidates = Candidates([WorkerId(f"w{n}") for n in range(3)], [0, 16, 32], [1.0, 0.5, 1.0], rows)
    assert candidates[1] == Candidate(WorkerId("w1"), 16, 0.5, Terms(1.0))
    assert [c.worker for c in candidates] == ["w0", "w1", "w2"]
    assert candidates[1:] == list(candidates)[1:]
    assert len(candidates) == 3
