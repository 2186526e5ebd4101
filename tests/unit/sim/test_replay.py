"""The virtual clock: the serving router against an independent simulator of the same score, and placement under load.

Reference figures for the trace in `tests/golden/traces` (4 workers of preset `70b`, rate 0.58, about 70 % load) come
from a separate discrete-event simulator that knows every engine's speed and cache exactly.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from random import Random

import pytest

from gateway.admission import AdmissionSettings
from gateway.leases import Booking
from gateway.policy import Prices, make_policy
from gateway.pool import InterTokenRates, PrefillRates, Worker
from gateway.sim.engine import PRESETS
from gateway.sim.replay import Replay, ReplayReport
from gateway.sim.trace import Turn, arrivals, read_trace

TRACE = Path(__file__).parents[2] / "golden" / "traces" / "mooncake_conversation_600.jsonl.gz"

SECONDS_HIT, SECONDS_MEAN_S = 0.066, 2.87
ROUND_ROBIN_HIT, ROUND_ROBIN_MEAN_S = 0.052, 8.56


NO_LIMIT = 1_000_000
FOR_EVER = AdmissionSettings(queue_size=100_000, queue_timeout_s=1e9)
"""Everybody gets a worker in the end, as in the reference."""


def replay(
    policy: str = "seconds",
    *,
    priors: tuple[PrefillRates, InterTokenRates] | None = None,
    max_inflight: int | None = None,
) -> ReplayReport:
    turns = arrivals(read_trace(TRACE), block_size=512, rate=0.58)
    chosen = make_policy(policy, rng=Random(1))
    return Replay(
        turns, policy=chosen, model=PRESETS["70b"], block_size=512, workers=4, priors=priors,
        max_inflight=max_inflight,
    ).run()  # fmt: skip


def test_learned_speeds_match_the_reference_that_knows_them() -> None:
    report = replay()
    assert report.requests == 600
    assert report.ttft_mean_s == pytest.approx(SECONDS_MEAN_S, rel=0.05)
    assert report.hit == pytest.approx(SECONDS_HIT, abs=0.01)


@pytest.mark.parametrize(
    ("file", "block_size", "preset", "rate", "rows", "hit", "mean_s"),
    [
        ("mooncake_conversation_a", 512, "70b", 1.276, None, 0.141, 1.74),
        ("tau_airline_a", 64, "7b-a10", 15.186, 9000, 0.533, 18.55),
        ("sharegpt_a", 64, "7b-a10", 10.473, 9000, 0.222, 5.78),
    ],
)
def test_whole_traces_match_the_reference(
    file: str, block_size: int, preset: str, rate: float, rows: int | None, hit: float, mean_s: float
) -> None:
    """8 workers, the rate that keeps a fleet with one shared cache busy for 70 % of the time."""
    turns = arrivals(read_trace(TRACE.parent / f"{file}.jsonl.gz"), block_size=block_size, rate=rate, max_rows=rows)
    policy = make_policy("seconds", rng=Random(1))
    report = Replay(turns, policy=policy, model=PRESETS[preset], block_size=block_size, workers=8).run()
    assert report.ttft_mean_s == pytest.approx(mean_s, rel=0.05)
    assert report.hit == pytest.approx(hit, abs=0.01)


@pytest.mark.parametrize(
    ("file", "block_size", "preset", "rate", "rows", "mean_s", "now_s"),
    [
        ("mooncake_conversation_a", 512, "70b", 1.276, None, 1.64, 1.74),
        ("sharegpt_a", 64, "7b-a10", 10.473, 9000, 5.64, 5.78),
    ],
)
def test_holding_at_the_gateway_matches_the_reference_and_is_better_than_deciding_at_once(
    file: str, block_size: int, preset: str, rate: float, rows: int | None, mean_s: float, now_s: float
) -> None:
    turns = arrivals(read_trace(TRACE.parent / f"{file}.jsonl.gz"), block_size=block_size, rate=rate, max_rows=rows)
    policy = make_policy("seconds", rng=Random(1), prices=Prices(own_extra=0.1))
    report = Replay(
        turns, policy=policy, model=PRESETS[preset], block_size=block_size, workers=8, admission=FOR_EVER
    ).run()
    assert report.refused == 0
    assert report.ttft_mean_s == pytest.approx(mean_s, rel=0.03)
    assert report.ttft_mean_s < now_s


def test_the_simulated_engines_match_the_reference_where_no_score_is_involved() -> None:
    report = replay("round_robin", max_inflight=NO_LIMIT)
    assert report.ttft_mean_s == pytest.approx(ROUND_ROBIN_MEAN_S, rel=0.005)
    assert report.hit == pytest.approx(ROUND_ROBIN_HIT, abs=0.001)


@pytest.mark.parametrize("scale", [0.5, 2.0])
def test_speeds_wrong_by_two_at_the_start_cost_little(scale: float) -> None:
    true = (PrefillRates(0.004 * scale, 1e-4 * scale, 1.4e-9 * scale), InterTokenRates(0.0115 * scale, 5e-5 * scale))
    assert replay(priors=true).ttft_mean_s < 1.05 * SECONDS_MEAN_S


def test_the_same_seed_gives_the_same_run() -> None:
    assert replay() == replay()


def test_a_hot_prefix_spreads_under_load_and_comes_together_again() -> None:
    """Everybody shares 4,000 tokens that one of 8 workers holds first; 20 s open loop at 70 %, then calm."""
    rng, block, shared = Random(5), 64, tuple(range(1, 63))
    turns = [Turn(0, 0.0, 4000, 20, shared)]
    at, fresh = 2.0, 1000
    # About 150 ms of a worker go into one request: 25 ms prefill, the rest is its share of decode steps and room.
    while at < 22.0:
        at += rng.expovariate(60.0)
        fresh += 4
        turns.append(Turn(len(turns), at, 4000 + 4 * block, 100, (*shared, *range(fresh, fresh + 4))))
    calm = len(turns)
    for number in range(40):
        fresh += 4
        turns.append(Turn(calm + number, 40.0 + 2 * number, 4000 + 4 * block, 20, (*shared, *range(fresh, fresh + 4))))
    run = Replay(
        turns, policy=make_policy("seconds", rng=Random(1)), model=PRESETS["7b-a10"], block_size=block, workers=8
    )
    run.run()
    outcomes = sorted(run.outcomes, key=lambda outcome: outcome.started_at)
    for moment in range(7, 22):
        flying = Counter(o.worker for o in outcomes if o.started_at <= moment < o.ended_at)
        mean = sum(flying.values()) / 8
        assert max(flying.values()) <= max(2 * mean, mean + 3), (moment, flying)
    assert len({o.worker for o in outcomes[:calm]}) >= 3
    assert all(o.predicted_tokens >= 3968 for o in outcomes[calm:])


def test_a_turn_waits_for_the_one_before_it() -> None:
    turns = [Turn(0, 0.0, 640, 500, tuple(range(10)), session=1), Turn(1, 0.1, 704, 5, tuple(range(11)), 1, after=0)]
    run = Replay(turns, policy=make_policy("seconds", rng=Random(1)), model=PRESETS["70b"], block_size=64, workers=2)
    run.run()
    first, second = run.outcomes
    assert second.started_at == pytest.approx(first.ended_at + 0.05)
    assert (second.worker, second.affinity) == (first.worker, "kept")
    assert second.delivered_tokens == 640


class FailsAtTheSecond:
    """Is told of bookings."""

    placements = 0

    def placed(self, booking: Booking) -> None:
        self.placements += 1
        if self.placements == 2:
            raise RuntimeError("seeded bug")

    def prefilled(self, booking: Booking) -> None: ...

    def closed(self, booking: Booking) -> None: ...

    def pinned(self, session: str, worker: Worker) -> None: ...


def test_a_bug_in_placing_a_request_that_has_waited_ends_the_run() -> None:
    """It is no request that was sent away."""
    turns = [Turn(number, 0.0, 640, 5, tuple(range(10))) for number in range(2)]
    run = Replay(
        turns, policy=make_policy("seconds", rng=Random(1)), model=PRESETS["70b"], block_size=64, workers=1,
        max_inflight=1, admission=FOR_EVER,
    )  # fmt: skip
    run.router.watch(FailsAtTheSecond())
    with pytest.raises(RuntimeError, match="seeded bug"):
        run.run()


def test_a_slow_worker_is_found_out() -> None:
    turns = arrivals(read_trace(TRACE), block_size=512, rate=0.4)
    run = Replay(
        turns, policy=make_policy("seconds", rng=Random(1)), model=PRESETS["70b"], block_size=512, workers=4,
        speeds=[0.1, 1.0, 1.0, 1.0], admission=FOR_EVER,
    )  # fmt: skip
    report = run.run()
    # Of four equal ones it would have a quarter. At the end it need not be known as slow: that is forgotten when
    # nothing has shown it for a while.
    assert report.shares[0] < 0.15
    assert min(report.shares[1:]) > 0.2
