"""Bursts, newcomers and slow workers on the virtual clock: the core that serves, at loads no test machine has."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial
from random import Random

import pytest

from gateway.policy import make_policy
from gateway.records import Outcome
from gateway.sim.engine import PRESETS
from gateway.sim.replay import Replay
from gateway.sim.trace import Turn

BLOCK = 16
MODEL = PRESETS["7b-a10"]

Changes = list[tuple[float, Callable[[Replay], None]]]


class Load:
    """Requests in the order of their times; each has leading blocks that others may share, and some of its own."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._fresh = itertools.count(1_000_000)

    def ask(self, at: float, leading: Iterable[int] = (), *, own: int = 4, answer: int = 50) -> None:
        blocks = (*leading, *(next(self._fresh) for _ in range(own)))
        self.turns.append(Turn(len(self.turns), at, len(blocks) * BLOCK + 1, answer, blocks))

    def flow(self, rate: float, start: float, end: float, leading: Callable[[], Iterable[int]], *, seed: int) -> None:
        """An open loop of `rate` requests a second."""
        rng = Random(seed)
        at = start + rng.expovariate(rate)
        while at < end:
            self.ask(at, leading())
            at += rng.expovariate(rate)

    def run(self, workers: int, changes: Changes | None = None, *, event_delay_s: float = 0.0) -> list[Outcome]:
        replay = Replay(
            self.turns,
            policy=make_policy("seconds", rng=Random(1)),
            model=MODEL,
            block_size=BLOCK,
            workers=workers,
            seed=1,
            sessions=False,
            event_delay_s=event_delay_s,
            changes=changes or [],
        )
        replay.run()
        return sorted(replay.outcomes, key=lambda outcome: outcome.started_at)


def share(outcomes: list[Outcome], worker: str, start: float, end: float) -> float:
    """Of the requests that arrived in that time."""
    came = [outcome for outcome in outcomes if start <= outcome.started_at < end]
    return sum(outcome.worker == worker for outcome in came) / len(came)


def test_one_prompt_for_all_spreads_under_load_and_goes_home_in_the_calm() -> None:
    """A system prompt of 4,000 tokens that one of eight workers holds, at 70 % of their capacity."""
    system = range(250)
    load = Load()
    load.ask(0.0, system)
    load.flow(0.7 * 8 * 28, 3.0, 18.0, lambda: system, seed=2)
    for number in range(20):
        load.ask(40.0 + number * 2.0, system)
    seen: list[list[int]] = []
    holders: list[int] = []

    def look(replay: Replay) -> None:
        seen.append([worker.inflight_requests for worker in replay.fleet.workers.values()])
        holders.append(replay.holders(tuple(system)))

    changes: Changes = [(2.9, look), *((8.0 + step * 0.25, look) for step in range(40))]
    outcomes = load.run(8, changes)
    assert holders[0] == 1
    assert holders[-1] >= 3
    for loads in seen[1:]:
        assert max(loads) <= 2 * sum(loads) / 8, loads
    calm = [outcome for outcome in outcomes if outcome.started_at >= 40.0]
    assert all((outcome.delivered_tokens or 0) >= 4000 for outcome in calm)


@pytest.mark.parametrize("workers", [4, 8, 16])
def test_a_burst_of_one_new_prefix_is_not_computed_everywhere(workers: int) -> None:
    """200 requests at once share 256 new blocks; the events that would tell of them come a second late."""
    prefix, own = range(256), 4
    load = Load()
    for number in range(200):
        load.ask(1.0 + number * 1e-4, prefix, own=own)
    outcomes = load.run(workers, event_delay_s=1.0)
    counts = Counter(outcome.worker for outcome in outcomes)
    assert max(counts.values()) <= 0.6 * 200, counts
    computed = sum(outcome.prompt_tokens - (outcome.delivered_tokens or 0) for outcome in outcomes)
    suffixes = 200 * (own * BLOCK + 1)
    assert computed <= 1.1 * (4 * len(prefix) * BLOCK + suffixes)


@pytest.mark.parametrize("load", [0.3, 0.45, 0.6, 0.75, 0.9])
def test_an_empty_worker_gets_its_part_of_the_traffic_within_half_a_minute(load: float) -> None:
    """All prompts are known to three warm workers, at this share of what they can carry, when a fourth joins."""
    prompts = [range(1000 * number, 1000 * number + 100) for number in range(12)]
    for seed in (3, 5):
        rng = Random(seed)
        flow = Load()
        flow.flow(load * 3 * 28, 0.0, 45.0, partial(rng.choice, prompts), seed=seed)
        outcomes = flow.run(3, [(15.0, Replay.join)])
        assert share(outcomes, "w3", 15.0, 45.0) >= 0.1


def test_a_worker_that_becomes_ten_times_slower_loses_its_traffic_though_it_has_the_best_cache() -> None:
    prompts = [range(1000 * number, 1000 * number + 100) for number in range(12)]
    rng = Random(4)
    load = Load()
    load.flow(0.4 * 4 * 28, 0.0, 45.0, lambda: rng.choice(prompts), seed=3)
    outcomes = load.run(4, [(20.0, lambda replay: replay.set_speed(0, 0.1))])
    assert share(outcomes, "w0", 10.0, 20.0) > 0.15
    assert share(outcomes, "w0", 25.0, 45.0) < 0.1
