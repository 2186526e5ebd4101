"""A worker that becomes ten times slower, with clients that ask again when they are answered: on the virtual clock."""

from __future__ import annotations

import itertools
from random import Random

import pytest

from gateway.admission import AdmissionSettings
from gateway.policy import make_policy
from gateway.records import Outcome
from gateway.sim.engine import PRESETS
from gateway.sim.replay import Replay
from gateway.sim.trace import Turn

BLOCK = 16
OPEN = 12
"""Requests at a time, and prompts that begin them."""
SLOW_S, FAST_S = 15.0, 60.0
"""When w0 becomes slow, and fast again."""


def conversation(requests: int, leading: int, seed: int) -> list[Turn]:
    """Each begins with one of the prompts, of that many blocks, and has 8 blocks of its own."""
    rng, fresh = Random(seed), itertools.count(1_000_000)
    turns: list[Turn] = []
    for number in range(requests):
        prompt = 1000 * rng.randrange(OPEN)
        blocks = (*range(prompt, prompt + leading), *itertools.islice(fresh, 8))
        after = number - OPEN if number >= OPEN else None
        at = 0.001 * number if after is None else 0.0
        turns.append(Turn(number, at, len(blocks) * BLOCK + 1, 2, blocks, after=after))
    return turns


def played(turns: list[Turn], *, back: bool) -> list[Outcome]:
    changes = [(SLOW_S, lambda replay: replay.set_speed(0, 0.1)), (FAST_S, lambda replay: replay.set_speed(0, 1.0))]
    replay = Replay(
        turns,
        policy=make_policy("seconds", rng=Random(1)),
        model=PRESETS["7b-a10"],
        block_size=BLOCK,
        workers=4,
        seed=1,
        sessions=False,
        changes=changes if back else changes[:1],
        admission=AdmissionSettings(),
    )
    replay.run()
    return sorted(replay.outcomes, key=lambda outcome: outcome.started_at)


def share(outcomes: list[Outcome], start: float, end: float) -> float:
    """Of w0, in the requests that arrived in that time."""
    came = [outcome for outcome in outcomes if start <= outcome.started_at < end]
    return sum(outcome.worker == "w0" for outcome in came) / len(came)


@pytest.mark.parametrize("leading", [100, 200, 250, 400])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_hit_on_a_slow_worker_is_moved_once_that_pays(leading: int, seed: int) -> None:
    """Each hit there costs less than computing its prompt elsewhere once, and more than a hit elsewhere ever after."""
    outcomes = played(conversation(3000, leading, seed), back=False)
    assert share(outcomes, 5.0, SLOW_S) > 0.15
    assert share(outcomes, SLOW_S + 5.0, SLOW_S + 15.0) < 0.1


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_gets_its_part_again_when_it_is_fast_again(seed: int) -> None:
    outcomes = played(conversation(6000, 200, seed), back=True)
    assert share(outcomes, FAST_S - 20.0, FAST_S) < 0.1
    assert share(outcomes, FAST_S + 20.0, FAST_S + 40.0) > 0.15
