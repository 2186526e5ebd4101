"""Causes of misses: each rule, and their order; and why overlap was left unused."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from gateway.policy import Candidates
from gateway.pool.misses import Forgone, Later, Prediction, Verdict, forgone, judge, missed
from gateway.records import Decision, MissCause, PrefixMode, WorkerId

SIZE = 16
MADE = Prediction(640, 640, 0, True, 1, 0, 50)
LATER = Later(True, 1, 0, 50, identity=False)


def test_a_miss_is_more_than_a_block_and_a_tenth() -> None:
    assert missed(640, 624, SIZE) == 0
    assert missed(640, 580, SIZE) == 0
    assert missed(640, 560, SIZE) == 80
    assert missed(SIZE, 0, SIZE) == 0
    assert missed(0, 500, SIZE) == 0


@pytest.mark.parametrize(
    ("made", "delivered", "later", "cause", "doubts"),
    [
        pytest.param(MADE, 0, LATER._replace(identity=True, epoch=2), MissCause.IDENTITY, True, id="other blocks"),
        pytest.param(MADE, 0, LATER._replace(epoch=2), MissCause.STALE_INDEX, False, id="purged since"),
        pytest.param(MADE, 0, LATER._replace(clears=1), MissCause.EVICTED, False, id="cleared by an event"),
        pytest.param(MADE._replace(events=False), 0, LATER._replace(epoch=2), MissCause.UNKNOWN, True, id="no events"),
        pytest.param(MADE._replace(announced=320), 320, LATER, MissCause.STALE_INDEX, False, id="only promised"),
        pytest.param(MADE._replace(slow=320), 320, LATER, MissCause.SPILLED, False, id="slow tier not loaded"),
        pytest.param(MADE._replace(slow=320), 100, LATER, MissCause.STALE_INDEX, True, id="slow tier, and GPU too"),
        pytest.param(MADE, 320, LATER._replace(shown=False, removed=70), MissCause.EVICTED, False, id="removed"),
        pytest.param(MADE, 320, LATER._replace(shown=False), MissCause.STALE_INDEX, False, id="dropped by the index"),
        pytest.param(MADE, 320, LATER._replace(removed=70), MissCause.EVICTED, False, id="removed, announced again"),
        pytest.param(MADE, 320, LATER._replace(removed=55), MissCause.STALE_INDEX, True, id="others were removed"),
        pytest.param(MADE, 0, LATER, MissCause.STALE_INDEX, True, id="contradicted"),
    ],
)
def test_the_cause_of_a_miss(made: Prediction, delivered: int, later: Later, cause: MissCause, doubts: bool) -> None:
    assert judge(made, delivered, SIZE, later) == Verdict(cause, doubts)


# --------------------------------------------------------------------------- overlap left unused

CHOSEN, BEST = WorkerId("chosen"), WorkerId("best")


def decision(
    *,
    cost: float,
    affinity_s: float = 0.0,
    adapter_s: float = 0.0,
    best_cost: float,
    best_trust: float = 1.0,
    best_adapter_s: float = 0.0,
) -> Decision:
    """100 tokens at `chosen`, 600 at `best`, which would save 0.3 s of what is believed."""
    rows = [
        (cost, 0.05, 0.0, 0.0, 0.0, 0.0, 0.0, affinity_s, 0.0, 0.0, adapter_s, 0.0),
        (best_cost, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, best_adapter_s, 0.0),
        (9.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    ]
    candidates = Candidates([CHOSEN, BEST, WorkerId("busy")], [100, 600, 600], [1.0, best_trust, 1.0], rows)
    return Decision("r", "m", "default", "seconds", CHOSEN, 100, 600, 1000, SIZE, PrefixMode.EXACT, candidates)


@pytest.mark.parametrize(
    ("made", "reason"),
    [
        (decision(cost=1.0, best_cost=1.5), Forgone.LOAD),
        (decision(cost=1.0, best_cost=1.015, affinity_s=0.02), Forgone.AFFINITY),
        (decision(cost=1.0, best_cost=1.5, affinity_s=0.02), Forgone.LOAD),
        (decision(cost=1.0, best_cost=1.2, best_trust=0.5), Forgone.TRUST),
        (decision(cost=1.0, best_cost=1.4, best_trust=0.5), Forgone.LOAD),
        (decision(cost=1.0, best_cost=1.04, best_adapter_s=0.05), Forgone.ADAPTER),
        (decision(cost=1.0, best_cost=1.06, best_adapter_s=0.05), Forgone.LOAD),
        (decision(cost=1.0, best_cost=1.04, adapter_s=0.05, best_adapter_s=0.05), Forgone.LOAD),
        (decision(cost=1.0, best_cost=1.0), Forgone.TIE),
    ],
)
def test_why_a_smaller_overlap_was_taken(made: Decision, reason: Forgone) -> None:
    assert forgone(made) is reason


def test_nothing_was_left_unused() -> None:
    assert forgone(replace(decision(cost=1.0, best_cost=1.5), predicted_tokens=600)) is None
